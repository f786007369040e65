"""Files as small processes need them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor import files


def install(folder: Path, name: str, text: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(text)


def test_entry_points_of_a_group(tmp_path: Path) -> None:
    install(
        tmp_path / "one", "first", "[other]\na = not:this\n[group]\n# no = comment:x\nb = mod.ule:Name\nc=d:e [x]\n"
    )
    install(tmp_path / "two", "first", "[group]\nb = shadowed:Name\n")
    install(tmp_path / "two", "second", "[ group ]\nz = last:Z\n")
    install(tmp_path / "two", "third", "no ini file\x00")
    path = [str(tmp_path / "none"), str(tmp_path / "one"), str(tmp_path / "two")]
    assert files.entry_points("group", path) == ["mod.ule:Name", "d:e", "last:Z"]
    assert files.entry_points("nothing", path) == []


def test_entry_points_are_those_that_importlib_finds() -> None:
    for group in ("console_scripts", "torchrun.logs_specs", "pytest11"):
        expected = {point.value.partition("[")[0].strip() for point in importlib.metadata.entry_points(group=group)}
        assert set(files.entry_points(group, sys.path)) == expected


def test_versions_of_what_is_installed() -> None:
    for name in ("msgspec", "aiohttp"):
        assert files.version_of(name, sys.path) == importlib.metadata.version(name)
    assert files.version_of("not-there", sys.path) == ""


def test_start_times_name_a_process_for_good() -> None:
    mine = files.start_time(os.getpid())
    assert mine is not None
    assert mine > 0
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert files.start_time(child.pid) is None  # a zombie
    child.wait()
    assert files.start_time(child.pid) is None


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    files.write_atomically(path, b"one")
    files.write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["state.json"]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="file"):
        files.write_atomically(tmp_path / "file", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
