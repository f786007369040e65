"""The agent reads what ranks hold in memory: whole, half-written, none, or garbage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.snapshot_memory import DATA_AT, PAGE, Header, Slot, addresses, make_slots
from supervisor.agent.snapshots import SnapshotMonitor


@pytest.fixture
def paths() -> Iterator[list[str]]:
    made = make_slots(1)
    yield addresses(made)
    for descriptor in made:
        os.close(descriptor)


def written(path: str, step: int, *, world: int = 2) -> Slot:
    slot = Slot(path, writable=True)
    slot.reserve(DATA_AT + PAGE)
    slot.void()
    slot.commit(Header(step, 1, world, 3, step, 1000.5, 100, DATA_AT + 100, 20, 0))
    return slot


def test_what_ranks_hold_is_told(paths: list[str]) -> None:
    monitor = SnapshotMonitor(paths)
    monitor.look()
    assert (monitor.held, monitor.changes) == ((), 0)
    slot = written(paths[1], 7)
    monitor.look()
    [held] = monitor.held
    assert (held.rank, held.world, held.attempt, held.step, held.at, held.digests) == (1, 2, 3, 7, 1000.5, ())
    slot.write_sums(7, {"content": [], "replicas": {"0-3": "a", "4-9": "b"}, "group": "g", "members": 2})
    monitor.look()
    monitor.look()
    assert [(one.group, one.members, one.digests) for one in monitor.held] == [("g", 2, ("a", "b"))]
    assert monitor.changes == 2
    slot.void()
    monitor.look()
    assert (monitor.held, monitor.changes) == ((), 3)


@pytest.mark.parametrize("sums", [{"group": 3, "members": "x", "replicas": []}, {"group": "g" * 900}, {}])
def test_sums_may_be_anything(paths: list[str], sums: dict[str, object]) -> None:
    written(paths[0], 7).write_sums(7, sums)
    monitor = SnapshotMonitor(paths)
    monitor.look()
    assert [(one.step, one.digests) for one in monitor.held] == [(7, ())]


@pytest.mark.parametrize("garbage", [b"", b"UNBSNAP1" * 600, os.urandom(9000), bytes(9000)])
def test_garbage_is_nothing(paths: list[str], garbage: bytes) -> None:
    with open(Slot(paths[0]).path, "wb") as file:
        file.write(garbage)
    monitor = SnapshotMonitor(paths)
    monitor.look()
    assert monitor.held == ()


def test_of_another_snapshot_the_sums_do_not_count(paths: list[str]) -> None:
    written(paths[0], 7).write_sums(6, {"group": "g", "members": 2, "replicas": {"0": "a"}})
    monitor = SnapshotMonitor(paths)
    monitor.look()
    assert monitor.held[0].digests == ()


def test_a_rank_that_no_world_has_is_nothing(paths: list[str]) -> None:
    written(paths[0], 7, world=1)
    monitor = SnapshotMonitor(paths)
    monitor.look()
    assert monitor.held == ()


def test_memory_that_is_gone_is_nothing() -> None:
    monitor = SnapshotMonitor(["/proc/self/fd/9999#0123456789abcdef"])
    monitor.look()
    assert monitor.held == ()


def test_another_file_in_its_place_is_nothing(paths: list[str], tmp_path: Path) -> None:
    written(paths[0], 7)
    copy = tmp_path / "copy"
    copy.write_bytes(Path(Slot(paths[0]).path).read_bytes())
    monitor = SnapshotMonitor([f"{copy}#{paths[0].partition('#')[2]}"])
    monitor.look()
    assert monitor.held == ()
