"""Full file systems: the real thing is in tests/e2e/test_surroundings.py."""

from __future__ import annotations

from pathlib import Path

from supervisor.agent.disk import full_disks


def test_a_disk_with_space_and_one_that_is_not_there_say_nothing(tmp_path: Path) -> None:
    assert full_disks([tmp_path, tmp_path / "absent"], 1.0, "n1") == []


def test_a_file_system_without_blocks_is_not_full() -> None:
    assert full_disks([Path("/proc"), Path("/sys")], 1.0, "n1") == []
