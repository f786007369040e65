"""A captured tree is judged by its files alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Check = Callable[..., Any]


PORT = "sys/class/infiniband/mlx5_0/ports/1"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    files = {
        "proc/sys/kernel/hostname": "gpu-17\n",
        "proc/sys/kernel/random/boot_id": "11111111-2222-3333-4444-555555555555\n",
        "proc/meminfo": "MemTotal:       2113478448 kB\nMemFree:        51200 kB\nMemAvailable:   51200 kB\n",
        f"{PORT}/state": "1: DOWN\n",
        f"{PORT}/phys_state": "3: Disabled\n",
        f"{PORT}/rate": "10 Gb/sec (4X)\n",
        f"{PORT}/link_layer": "InfiniBand\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_captured_tree_is_judged_by_its_files_alone(check: Check, tree: Path, tmp_path: Path) -> None:
    done = check("--root", str(tree), "--json", site="[expect]\nib_ports = 1\n")
    answer = done.answer
    assert (answer["node"], answer["from"], done.code) == ("gpu-17", "root", 2)
    assert answer["boot_id"] == "11111111-2222-3333-4444-555555555555"
    assert answer["problems"] == []
    assert done.entry("memory_available")["level"] == "critical"
    assert "50 of 2063944 MiB" in done.entry("memory_available")["text"]
    assert done.entry("ib_port_state", "mlx5_0/1")["status"] == "unhealthy", (
        "one look is enough: a tree does not change"
    )
    assert done.entry("gpu_driver_responds")["status"] == "not_applicable"
    assert not (tmp_path / "kept").exists(), "nothing of another node is kept"


def test_a_captured_tree_has_its_own_site_file(check: Check, tree: Path) -> None:
    (tree / "etc/unbroken").mkdir(parents=True)
    (tree / "etc/unbroken/site.toml").write_text('skip = ["memory_a*"]\n[expect]\nib_ports = 2\n')
    done = check("--root", str(tree), "--json", site=None)
    assert "memory_available" not in {one["check"] for one in done.answer["checks"]}
    assert done.entry("ib_port_count")["status"] == "unhealthy"


def test_a_port_that_nobody_expects_is_not_applicable(check: Check, tree: Path) -> None:
    done = check("--root", str(tree), "--only", "infiniband", "--json")
    assert done.entry("ib_port_state", "mlx5_0/1")["status"] == "not_applicable"
    assert done.code == 0


def test_a_trees_site_file_is_its_own(check: Check, tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside.toml", tmp_path / "tree"
    outside.write_text("limits = 3\n")
    (tree / "etc/unbroken").mkdir(parents=True)
    (tree / "etc/unbroken/site.toml").symlink_to(outside)
    assert check("--root", str(tree), "--only", "memory_available", site=None).err == ""
