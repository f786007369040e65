"""Files as small processes need them."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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


def test_versions_of_installed_distributions() -> None:
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


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="file"):
        files.write_atomically(tmp_path / "file", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """Anything else would be waited for, and opening some devices does something."""
    plain = tmp_path / "plain"
    plain.write_text("text")
    (tmp_path / "link").symlink_to(plain)
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for name, words in (("pipe", "pipe"), ("socket", "socket"), (".", "folder"), ("/dev/zero", "device")):
        with pytest.raises(OSError, match=words):
            files.open_regular(tmp_path / name)
    with open(files.open_regular(tmp_path / "link")) as file:
        assert file.read() == "text"
    with pytest.raises(OSError, match="symbolic link"):
        files.open_regular(tmp_path / "link", follow=False)
    assert files.read_own(plain) == b"text"


def test_a_token_that_others_could_have_made_or_read_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("abc\n")
    for mode, shared, good in ((0o600, False, True), (0o640, False, False), (0o622, True, False), (0o640, True, True)):
        token.chmod(mode)
        if good:
            assert files.read_token(token, shared=shared) == "abc"
        else:
            with pytest.raises(PermissionError, match="chmod 600"):
                files.read_token(token, shared=shared)
    token.chmod(0o600)
    (tmp_path / "link").symlink_to(token)
    with pytest.raises(OSError, match="symbolic link"):
        files.read_token(tmp_path / "link")


@pytest.mark.root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    planted = tmp_path / "token"
    planted.write_text("abc\n")
    planted.chmod(0o600)
    os.chown(planted, 12345, 12345)
    for read in (files.read_token, files.read_own):
        with pytest.raises(PermissionError, match=r"another user|12345"):
            read(planted)
    assert files.read_token(planted, shared=True) == "abc"
    assert os.listdir(tmp_path) == ["token"]


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    (tmp_path / f".file.{os.getpid()}").symlink_to(victim)
    files.write_atomically(tmp_path / "file", b"new", 0o600)
    assert (victim.read_text(), (tmp_path / "file").read_text()) == ("whole", "new")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that other users can enter, as pytest's own cannot be."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.root
def test_a_shared_folder_is_for_all_who_may_write_to_its_parent(open_folder: Path) -> None:
    """Two users of a group in a project folder; a third is of no group."""

    def as_user(user: int, *command: str, umask: str = "077", group: int = 4000) -> bool:
        script = f'umask {umask}; "$@"'
        ids = (f"--reuid={user}", f"--regid={user}", f"--groups={group}")
        return not subprocess.run(
            ["setpriv", *ids, "sh", "-c", script, "sh", *command], stderr=-3, timeout=30
        ).returncode

    def made(mode: int, user: int, group: int = 4000, umask: int = 0o077) -> Path:
        above = open_folder / f"{mode:o}"
        above.mkdir()
        os.chown(above, 4001, group)
        above.chmod(mode)
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([4000])
                os.setgid(user)
                os.setuid(user)
                os.umask(umask)
                files.make_shared(above / "jobs")
                files.make_shared(above / "jobs")
            finally:
                os._exit(0 if (above / "jobs").is_dir() else 1)
        assert os.waitpid(pid, 0)[1] == 0
        return above / "jobs"

    project = made(0o2775, 4001)
    about = project.stat()
    assert (about.st_mode & 0o7777, about.st_gid) == (0o3775, 4000)
    assert as_user(4001, "mkdir", str(project / "a"))
    assert as_user(4002, "mkdir", str(project / "b"))
    assert not as_user(4002, "mv", str(project / "a"), str(project / "mine"))
    assert not as_user(4003, "mkdir", str(project / "c"), group=4003)
    without_setgid = made(0o775, 4002).stat()
    assert (without_setgid.st_mode & 0o7777, without_setgid.st_gid) == (0o1775, 4000), "else another group could write"
    assert made(0o755, 4001, umask=0o022).stat().st_mode & 0o7777 == 0o755
    assert made(0o700, 4001).stat().st_mode & 0o7777 == 0o700
    assert made(0o1777, 4002).stat().st_mode & 0o7777 == 0o1777
