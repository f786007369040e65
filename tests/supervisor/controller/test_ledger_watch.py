"""The controller's way to the ledger: real folders, several controllers, one that does not answer."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from recovery.ledger import CordonLifted, LedgerEntry, NodeCordoned, NodeFailed, merge
from recovery.ledger_folder import LedgerFolder
from supervisor import messages as m
from supervisor.controller import ledger_watch
from supervisor.controller.ledger_watch import LedgerWatch, ledger_nodes
from supervisor.controller.metrics import ledger_samples


class Controller:
    """As much of one as the ledger needs."""

    def __init__(self, folder: Path, name: str, *nodes: str) -> None:
        self.posted: list[Any] = []
        self.watch = LedgerWatch(LedgerFolder(folder, name), self.posted.append, time.time, lambda: nodes)

    def write(self, number: int, what: Any, by: str = "policy") -> None:
        name = f"{id(self)}-{number}"
        self.watch.write(m.LedgerWrite(number=number, id=name, at=time.time(), by=by, job="j", what=what))

    async def once(self) -> None:
        await self.watch.stop()
        await self.watch._look(5.0)

    @property
    def cordoned(self) -> list[str]:
        newest = [one for one in self.posted if isinstance(one, m.LedgerSeen)][-1]
        return [one.node for one in newest.nodes if one.cordon]


def test_two_controllers_write_at_once_and_each_reads_both(tmp_path: Path) -> None:
    one, other = Controller(tmp_path, "h1", "a", "b"), Controller(tmp_path, "h2", "c")
    one.write(1, NodeCordoned(node="a", scope="cluster", reason="bad", fleet=8))
    other.write(1, NodeCordoned(node="c", scope="cluster", reason="bad", fleet=8))

    async def both() -> None:
        await asyncio.gather(one.once(), other.once())
        await asyncio.gather(one.once(), other.once())

    asyncio.run(both())
    assert one.cordoned == other.cordoned == ["a", "c"]
    assert [event.number for event in one.posted if isinstance(event, m.LedgerWritten)] == [1]
    found = merge(LedgerFolder(tmp_path).read(time.time()).entries, time.time())
    assert sorted(found) == ["a", "b", "c"], "the fleet is known by who used it"


def test_nothing_is_said_again_while_nothing_changes(tmp_path: Path) -> None:
    one = Controller(tmp_path, "h1", "a")

    async def often() -> None:
        for _ in range(5):
            await one.once()

    asyncio.run(often())
    assert len([event for event in one.posted if isinstance(event, m.LedgerSeen)]) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_is_not_there_is_said_and_records_wait(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    one = Controller(folder, "h1", "a")
    one.write(1, NodeFailed(node="a", failure_class="gpu_lost"))
    asyncio.run(one.once())
    assert [event.problem != "" for event in one.posted] == [True]
    folder.mkdir()
    asyncio.run(one.once())
    assert [type(event) for event in one.posted[1:]] == [m.LedgerWritten, m.LedgerSeen]
    assert one.posted[-1].problem == ""


class Hung(LedgerFolder):
    """Its file system does not answer until it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reading, self.writing = os.pipe()

    def signature(self) -> Any:
        os.read(self.reading, 1)
        return super().signature()


def test_a_folder_that_hangs_costs_the_controller_its_deadline_and_no_more(tmp_path: Path) -> None:
    folder, posted = Hung(tmp_path), list[Any]()
    watch = LedgerWatch(folder, posted.append, time.time, lambda: ())

    async def look() -> float:
        began = time.monotonic()
        await watch._look(0.2)
        await watch._look(30.0)  # the first one has not returned: no second is begun
        took = time.monotonic() - began
        os.write(folder.writing, b"12345")
        while posted[-1].problem:
            await watch._look(30.0)
        return took

    assert asyncio.run(look()) < 20.0
    assert [bool(event.problem) for event in posted] == [True, False]


def test_what_a_controller_tells_its_job_is_bounded(tmp_path: Path) -> None:
    del tmp_path
    now = 1_800_000_000.0
    entries = [
        LedgerEntry(v=1, id=f"f{number}", at=now, what=NodeFailed(node=f"n{number:05}", failure_class="a"))
        for number in range(1500)
    ]
    held = NodeCordoned(node="n01499", scope="cluster", reason="x" * 300)
    entries.append(LedgerEntry(v=1, id="c", at=now, by="ann", what=held))
    told = ledger_nodes(merge(entries, now).values())
    assert len(told) == ledger_watch.NODES_REPORTED
    [cordoned] = [one for one in told if one.cordon]
    assert cordoned.node == "n01499"
    assert len(cordoned.cordon) == ledger_watch.REASON_CHARS


def test_of_several_cordons_a_persons_is_shown_and_the_last_end_counts() -> None:
    now = 1_800_000_000.0
    policy = NodeCordoned(node="a", scope="cluster", reason="Xid 79", until=now + 900, fleet=8)
    person = NodeCordoned(node="a", scope="cluster", reason="to be repaired", until=now + 60)
    entries = [
        LedgerEntry(v=1, id="1", at=now - 5, by="policy", what=policy),
        LedgerEntry(v=1, id="2", at=now, by="ann", what=person),
    ]
    [told] = ledger_nodes(merge(entries, now).values())
    assert (told.cordon, told.by, told.until) == ("to be repaired", "ann", now + 900)


def test_a_repaired_node_that_fails_again_within_a_day_is_told_as_a_lemon(tmp_path: Path) -> None:
    """Job 1 proves a fault and cordons; somebody repairs; job 2 has the node on probation, and it fails again."""
    one, other = Controller(tmp_path, "h1", "a"), Controller(tmp_path, "h2", "a")
    one.write(1, NodeFailed(node="a", failure_class="gpu_lost", incident="i-1"))
    one.write(2, NodeCordoned(node="a", scope="cluster", reason="Xid 79", fleet=8))
    asyncio.run(one.once())
    asyncio.run(other.once())
    assert other.cordoned == ["a"]
    person = LedgerFolder(tmp_path, "login")
    now = time.time()
    held = merge(person.read(now).entries, now)["a"].cordons
    lift = CordonLifted(node="a", lifts=tuple(entry.id for entry in held), repair="GPU 3 replaced")
    person.append([person.entry(lift, now, by="ann")], now)
    asyncio.run(other.once())
    [told] = other.posted[-1].nodes
    assert (told.cordon, told.probation_until, told.lemon) == ("", now + 7 * 86400.0, False)
    later = now + 8 * 3600.0
    again = person.entry(NodeFailed(node="a", failure_class="gpu_lost", incident="i-1"), later, by="policy", job="j2")
    person.append([again], later)
    record = merge(person.read(later + 1).entries, later + 1)["a"]
    assert (record.state, record.score.lemon, record.score.outages) == ("PROBATION", True, 2)


def test_a_lemon_is_named_until_it_is_taken_out_of_use() -> None:
    now = 1_800_000_000.0
    bad = [
        LedgerEntry(v=1, id=f"f{day}", at=now - day * 86400.0, what=NodeFailed(node="a", failure_class="x"))
        for day in (1, 3, 5)
    ]
    held = LedgerEntry(v=1, id="c", at=now, by="ann", what=NodeCordoned(node="a", scope="cluster", reason="r"))
    hostile = [
        LedgerEntry(v=1, id=f"h{day}", at=now - day * 86400.0, what=NodeFailed(node="e v\ni l", failure_class="x"))
        for day in (1, 3, 5)
    ]

    def samples(*entries: LedgerEntry) -> dict[tuple[str, ...], float]:
        records = merge(entries, now).values()
        return {(one.name, *one.labels): float(one.value) for one in ledger_samples(records, readable=True)}

    found = samples(*bad, *hostile)
    assert found["unbroken_ledger_nodes", "lemon"] == 2
    assert {key: points for key, points in found.items() if key[0] == "unbroken_ledger_lemon_points"} == {
        ("unbroken_ledger_lemon_points", "a"): 6.0
    }
    out = samples(*bad, held)
    assert (out["unbroken_ledger_nodes", "lemon"], out["unbroken_ledger_nodes", "cordoned"]) == (0, 1)


class Broken(LedgerFolder):
    def signature(self) -> Any:
        raise ValueError("a defect")


def test_a_defect_does_not_keep_a_controller_from_its_start(tmp_path: Path) -> None:
    posted: list[Any] = []
    watch = LedgerWatch(Broken(tmp_path), posted.append, time.time, lambda: ())
    asyncio.run(watch.first_look())
    assert "a defect" in posted[-1].problem


class ReadOnly(LedgerFolder):
    read_only = True

    def append(self, entries: Iterable[LedgerEntry], now: float) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self.folder))
        super().append(entries, now)


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, posted = ReadOnly(tmp_path), list[Any]()
    watch = LedgerWatch(folder, posted.append, time.time, lambda: ("a",))
    what = NodeFailed(node="a", failure_class="gpu_lost")
    watch.write(m.LedgerWrite(number=1, id="j-1", at=time.time(), by="policy", job="j", what=what))

    async def rounds() -> None:
        await watch.first_look()
        for _ in range(4):
            await watch._write_waiting(5.0)
            await watch._look(5.0)
        folder.read_only = False
        await watch._write_waiting(5.0)

    asyncio.run(rounds())
    assert [bool(event.unwritten) for event in posted if isinstance(event, m.LedgerSeen)] == [False, True, False]
    assert not any(event.problem for event in posted if isinstance(event, m.LedgerSeen))
    assert [event.number for event in posted if isinstance(event, m.LedgerWritten)] == [1]
    assert len(caplog.records) == 2


def test_what_is_written_last_waits_for_a_look_that_is_under_way(tmp_path: Path) -> None:
    folder, posted = Hung(tmp_path), list[Any]()
    watch = LedgerWatch(folder, posted.append, time.time, lambda: ())
    watch.write(
        m.LedgerWrite(
            number=1, id="j-1", at=time.time(), by="policy", job="j", what=NodeFailed(node="a", failure_class="x")
        )
    )

    async def end() -> None:
        looking = asyncio.create_task(watch._look(30.0))
        while not watch._calls.busy:
            await asyncio.sleep(0.0)
        looking.cancel()
        asyncio.get_running_loop().call_later(0.2, os.write, folder.writing, b"1")
        await watch.stop()

    asyncio.run(end())
    assert [event.number for event in posted if isinstance(event, m.LedgerWritten)] == [1]
