"""The controller's way to past incidents: real files, several jobs, one that is locked, damaged or does not answer."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from recovery.incident_store import IncidentStore
from supervisor import messages as m
from supervisor.controller.memory_watch import MemoryWatch

GPU = Verdict(
    failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
    culprits=(Culprit(node="b", rank=2, gpu="0000:c1:00"),),
    confidence=0.95,
    why="Xid 79: the GPU has fallen off the bus",
    action="cordon_node_and_restart",
)


class Controller:
    """As much of one as the memory needs: a job, and its events."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        self.posted: list[m.AnyEvent] = []
        self.store = IncidentStore(folder, busy_s=0.1)
        self.watch = MemoryWatch(self.store, driver.job, self.posted.append, lambda: driver.now)

    def look(self) -> None:
        """And the job hears what it found."""
        asyncio.run(self.watch._look(5.0))
        for event in self.posted:
            self.driver.job.handle(event)

    @property
    def problems(self) -> list[str]:
        return [one.problem for one in self.posted if isinstance(one, m.IncidentMemorySeen)]

    @property
    def recurrences(self) -> list[m.IncidentRecurred]:
        return [one for one in self.posted if isinstance(one, m.IncidentRecurred)]


@pytest.fixture
def failed(make_driver: Any, tmp_path: Path) -> Any:
    """Names of jobs -> each with an incident that is diagnosed, and goes on to the next attempt."""

    def make(name: str = "llama", after: float = 0.0) -> Controller:
        driver = make_driver(GPU, name=name, nodes_min=2, nodes_max=2)
        driver.now += after
        for node in ("a", "b", "c"):
            driver.join(node, scheduler_node=f"node{node}", spare=node == "c")
        driver.up()
        driver.crash("b", 2)
        return Controller(driver, tmp_path)

    return make


def end(controller: Controller) -> None:
    controller.driver.order("stop", by="op")


def test_closed_incidents_are_written_once_and_again_when_corrected(failed: Any) -> None:
    controller = failed()
    controller.look()
    assert controller.store.all() == [], "it is open"
    end(controller)
    controller.look()
    (written,) = controller.store.all()
    assert (written.incident, written.failure_class, written.nodes) == ("i-1", "gpu_fallen_off_bus", ("nodeb",))
    changed = controller.store.path.stat().st_mtime_ns
    controller.look()
    assert controller.store.path.stat().st_mtime_ns == changed
    controller.driver.order("correct", "i-1 nvlink_error", by="op")
    controller.look()
    assert controller.store.all()[0].truth == "nvlink_error"
    assert controller.problems == controller.recurrences == []


def test_another_job_is_told_of_the_last_time(failed: Any) -> None:
    before = failed("first")
    end(before)
    before.driver.order("correct", "i-1 gpu_fallen_off_bus", by="op")
    before.look()
    later = failed("second", after=2 * 86400.0)
    later.look()
    (found,) = later.recurrences[0].recurrences[:1]
    assert (found.of, found.name, found.times, found.last.job) == ("gpu", "nodeb/0000:c1:00", 2, "first")
    assert "cordoned" in found.text
    later.look()
    assert len(later.recurrences) == 1


def test_a_new_controller_writes_what_the_old_one_did_not_and_asks_nothing_again(failed: Any, tmp_path: Path) -> None:
    first = failed("first")
    end(first)
    first.look()
    dead = failed("second", after=60.0)
    end(dead)
    again = Controller(dead.driver, tmp_path)
    again.look()
    assert len(again.store.all()) == 2
    assert again.recurrences == []


def test_a_locked_or_damaged_store_is_told_once_and_used_again(failed: Any) -> None:
    controller = failed()
    controller.look()
    end(controller)
    controller.store.write([], 0.0)
    held = sqlite3.connect(controller.store.path)
    held.execute("BEGIN EXCLUSIVE")
    for _ in range(3):
        controller.look()
    assert len(controller.problems) == 1
    held.close()
    controller.store.path.write_bytes(b"damaged" * 1000)
    controller.look()
    assert len(controller.problems) == 1, "another word for it is no news"
    controller.store.path.unlink()
    controller.look()
    assert [bool(one) for one in controller.problems] == [True, False]
    assert len(controller.store.all()) == 1


class Hung(IncidentStore):
    """Its file system does not answer until it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reading, self.answer = os.pipe()

    def write(self, *_: Any) -> None:
        os.read(self.reading, 1)


def test_a_store_that_hangs_costs_the_end_of_the_job_seconds_at_most(failed: Any, tmp_path: Path) -> None:
    controller = failed()
    end(controller)
    store = Hung(tmp_path)
    controller.watch = MemoryWatch(store, controller.driver.job, controller.posted.append, lambda: 0.0)

    async def die() -> float:
        began = asyncio.get_running_loop().time()
        await controller.watch.stop()
        return asyncio.get_running_loop().time() - began

    try:
        assert asyncio.run(die()) < 10.0
    finally:
        os.write(store.answer, b"x")
    assert len(controller.problems) == 1
