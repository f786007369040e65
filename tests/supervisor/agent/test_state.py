from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from diagnosis.signals import Evidence, Finding
from diagnosis.taxonomy import FailureClass
from supervisor.agent.state import (
    FINDINGS_KEPT,
    NOTICES_REPORTED,
    OFFSETS_EVERY_S,
    FindingQueue,
    SavedState,
    SavedStateFile,
    Wakeup,
)
from supervisor.keeper_client import KeeperState, LauncherProcess
from supervisor.messages import Assignment


def test_the_next_agent_reads_what_this_one_wrote(tmp_path: Path) -> None:
    file = SavedStateFile(tmp_path / "agent.json", lambda: 0.0)
    file.state.epoch = 3
    file.write()
    assert SavedStateFile(tmp_path / "agent.json").state.epoch == 3


def test_new_offsets_alone_are_written_every_few_seconds(tmp_path: Path) -> None:
    now = 0.0
    file = SavedStateFile(tmp_path / "agent.json", lambda: now)
    written = []
    for look in range(10):
        now = look * OFFSETS_EVERY_S / 4
        file.state.offsets = {"rank0.out": look}
        file.write()
        written.append(SavedStateFile(tmp_path / "agent.json").state.offsets["rank0.out"])
    assert written == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    file.state.notice = 1
    file.write()
    assert SavedStateFile(tmp_path / "agent.json").state.offsets == {"rank0.out": 9}


def test_a_file_that_cannot_be_read_gives_an_empty_state(tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_bytes(b"{")
    assert SavedStateFile(tmp_path / "agent.json").state == SavedState()


def test_a_number_always_means_the_same_finding() -> None:
    """However many there were while no controller acknowledged them."""
    saved = SavedState()
    queue = FindingQueue(saved)
    for number in range(FINDINGS_KEPT + 30):
        queue.add(
            [
                Finding(
                    rule=str(number),
                    failure_class=FailureClass.GPU_HANG,
                    confidence=1,
                    scope="node",
                    severity="error",
                    evidence=Evidence(text=str(number), source="s", node="n", at=0.0),
                )
            ]
        )
    assert saved.findings_from == 30
    queue.acknowledge(31)
    assert (saved.findings_from, queue.oldest(1)[0].rule) == (31, "31")


def test_a_notice_is_reported_once_and_only_the_newest_are_kept(make_state: Any, shown: Any) -> None:
    state = make_state()
    state.notices.report("")
    for number in (1, 1, 2):
        state.notices.report(f"problem {number}")
    state.notices.show("for the user alone")
    assert state.notices.reported == ("problem 1", "problem 2")
    assert shown(state) == ["problem 1", "problem 2", "for the user alone"]
    for number in range(3, 40):
        state.notices.report(f"problem {number}")
    assert len(state.notices.reported) == NOTICES_REPORTED


def test_a_wakeup_ends_the_wait_of_one_who_waits_and_of_the_next() -> None:
    async def run() -> None:
        wakeup = Wakeup()
        waiting = asyncio.create_task(wakeup.wait(60))
        await asyncio.sleep(0)
        wakeup.set()
        await asyncio.wait_for(waiting, 60)
        assert wakeup.is_set
        await asyncio.wait_for(wakeup.wait(60), 60)
        wakeup.clear()
        began = time.monotonic()
        await wakeup.wait(0.02)
        assert time.monotonic() - began >= 0.019
        assert not wakeup.is_set
        await wakeup.wait(-1.0)

    asyncio.run(run())


def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async def run() -> None:
        wakeup = Wakeup()
        waiting = asyncio.create_task(wakeup.wait(60))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        wakeup.set()
        await asyncio.wait_for(wakeup.wait(60), 60)

    asyncio.run(run())


def test_a_launcher_that_is_replaced_is_no_news_until_its_successor_is_known(make_state: Any) -> None:
    state = make_state()
    gpus = ("GPU-12345678",)

    def assigned(attempt: int, gpus: tuple[str, ...], role: str = "member") -> Assignment:
        return Assignment(epoch=1, version=1, node="n", role=role, attempt=attempt, stage="form", gpus=gpus)

    assert not state.is_replaced
    state.assignment, state.saved.joined = assigned(2, ()), 1
    state.set_keeper(KeeperState(ready=True, launcher=LauncherProcess(pid=10)))
    assert not state.is_replaced
    state.assignment = assigned(2, gpus)
    assert state.is_replaced
    state.assignment = assigned(2, gpus, role="spare")
    assert not state.is_replaced
    state.assignment, state.saved.gpus, state.replaced_launcher = assigned(2, gpus), gpus, 10
    assert state.is_replaced, "the keeper still tells of the one before"
    state.set_keeper(KeeperState(ready=True, launcher=LauncherProcess(pid=11)))
    assert not state.is_replaced
    state.assignment, state.saved.joined = assigned(2, ()), 2
    assert not state.is_replaced, "the ranks run"
