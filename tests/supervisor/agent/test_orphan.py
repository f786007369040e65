"""A node without a controller: what is due (pure), and how it is done."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diagnosis import rules
from diagnosis.signals import ExitRecord, RankSample
from recovery.schedulers import Local
from recovery.scheduling import Answer
from supervisor.agent.link import Link, LinkTimeouts
from supervisor.agent.orphan import TIMEOUTS, OrphanDuties, OrphanHandler, OrphanSituation, due, makes_no_progress
from supervisor.agent.ranks import RankMonitor
from supervisor.agent.state import AgentState
from supervisor.controller.loop import FenceWriter
from supervisor.keeper_client import KeeperState, WorkerProcess
from supervisor.messages import Assignment, JobSpec, Outcome
from supervisor.paths import Fence, RequeueRecord

STILL = RankSample(rank=1, local_rank=0, pid=7, moved_age_s=100.0)
MOVING = RankSample(rank=0, local_rank=0, pid=6, moved_age_s=0.0)
SPEC = JobSpec(name="j", scheduler="recorded", scheduler_job="77")
ALONE = OrphanSituation(
    now=1000.0, started_at=0.0, alone_since=900.0, had_controller=True, samples=(STILL,), may_requeue=True
)
NOTHING = OrphanDuties(
    notify=False, read_fence=False, question_due=False, ask_scheduler=False, end=False, give_up=False
)


def ended(code: int | None) -> RankSample:
    record = ExitRecord(rank=1, local_rank=0, pid=7, code=code, signal=None if code is not None else 9, ended_at=1.0)
    return msgspec.structs.replace(STILL, moved_age_s=0.0, exit=record)


def situation(**more: Any) -> OrphanSituation:
    return msgspec.structs.replace(ALONE, **more)


# ----- what is due -----


@pytest.mark.parametrize(
    ("samples", "still"),
    [
        ([STILL], True),
        ([STILL, MOVING], False),
        ([ended(None)], True),
        ([ended(1), STILL], True),
        ([ended(0)], False),
        ([], False),
    ],
)
def test_which_nodes_make_no_progress(samples: list[RankSample], still: bool) -> None:
    assert makes_no_progress(samples, 60.0) is still


@pytest.mark.parametrize(
    ("more", "spec", "due_and_asks"),
    [
        ({}, SPEC, (True, True)),
        ({"alone_since": 941.0}, SPEC, (False, False)),
        ({"samples": (MOVING,)}, SPEC, (True, False)),
        ({"samples": ()}, SPEC, (True, False)),
        ({"may_requeue": False}, SPEC, (True, False)),
        ({}, msgspec.structs.replace(SPEC, mode="observe"), (True, False)),
        ({}, JobSpec(name="j"), (False, False)),
        ({"requeued": True}, SPEC, (False, False)),
        ({"stop_request": "SIGTERM"}, SPEC, (False, False)),
        ({"question_at": 991.0}, SPEC, (False, False)),
        ({"question_at": 990.0}, SPEC, (True, True)),
    ],
)
def test_who_asks_the_scheduler(more: dict[str, Any], spec: JobSpec, due_and_asks: tuple[bool, bool]) -> None:
    duties = due(situation(**more), spec, 0)
    assert (duties.question_due, duties.ask_scheduler) == due_and_asks


@pytest.mark.parametrize(
    ("index", "question_at", "next_s"),
    [(0, None, 60.0), (7, None, 74.0), (4000, None, 600.0), (0, 900.0, 10.0), (7, 900.0, 14.0), (4000, 900.0, 60.0)],
)
def test_nodes_ask_one_after_the_other(index: int, question_at: float | None, next_s: float) -> None:
    for late_s, asks in ((-0.1, False), (0.1, True)):
        now = 900.0 + next_s + late_s
        one = situation(now=now, question_at=question_at, samples=(STILL,))
        assert due(one, SPEC, index).ask_scheduler is asks


def test_without_a_first_controller_the_user_is_notified_and_a_scheduled_node_gives_up() -> None:
    one = situation(had_controller=False, alone_since=0.0, samples=(), now=19.0)
    assert due(one, SPEC, 0) == NOTHING
    one = msgspec.structs.replace(one, now=20.0)
    assert due(one, SPEC, 0) == msgspec.structs.replace(NOTHING, notify=True)
    one = msgspec.structs.replace(one, now=900.0)
    assert due(one, SPEC, 0).give_up
    assert not due(one, JobSpec(name="j"), 0).give_up
    assert not due(msgspec.structs.replace(one, samples=(MOVING,)), SPEC, 0).give_up
    assert not due(msgspec.structs.replace(one, had_controller=True), SPEC, 0).give_up


def test_a_signal_ends_a_scheduled_node_after_a_while() -> None:
    for spec, alone_s, ends in ((SPEC, 9.0, False), (SPEC, 10.0, True), (JobSpec(name="j"), 10.0, False)):
        assert due(situation(stop_request="SIGTERM", alone_since=1000.0 - alone_s), spec, 0).end is ends


@pytest.mark.parametrize(
    ("more", "reads"),
    [
        ({"living_attempt": 2}, True),
        ({"living_attempt": 2, "alone_since": 998.5}, False),
        ({"living_attempt": 2, "fence_read_at": 999.5}, False),
        ({"living_attempt": 2, "fence_read_at": 999.0}, True),
        ({"living_attempt": 0}, False),
    ],
)
def test_who_reads_the_fence(more: dict[str, Any], reads: bool) -> None:
    assert due(situation(**more), JobSpec(name="j"), 0).read_fence is reads


# ----- how it is done -----


class RecordedScheduler(Local):
    name = "recorded"

    def __init__(self, lost: bool | Exception, answer: Answer, job_dir: Path) -> None:
        self.lost, self.answer, self.job_dir = lost, answer, job_dir
        self.asked = 0
        self.requeued: list[tuple[Any, ...]] = []
        self.record: RequeueRecord | None = None

    async def headless(self, job: str) -> str:  # noqa: ARG002
        self.asked += 1
        if isinstance(self.lost, Exception):
            raise self.lost
        return "n0" if self.lost else ""

    async def requeue(self, job: str, exclude: tuple[str, ...], avoid: tuple[str, ...] = ()) -> Answer:
        self.requeued.append((job, exclude, avoid))
        self.record = RequeueRecord.read(self.job_dir)
        return self.answer


class RecordedKeeper:
    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    async def request(self, **request: Any) -> dict[str, Any]:
        self.requests.append(request)
        return {}


class Ranks(RankMonitor):
    """Of a node whose ranks are in this state."""

    def __init__(self, state: AgentState, *ranks: RankSample) -> None:
        super().__init__(state.paths, rules.default(), {})
        self.ranks = ranks

    def samples(self) -> tuple[RankSample, ...]:
        return self.ranks


def handler(
    state: AgentState,
    scheduler: RecordedScheduler | None = None,
    *ranks: RankSample,
    keeper: RecordedKeeper | None = None,
    connected: bool = False,
) -> OrphanHandler:
    link = Link.for_plan(state.plan)
    link.connected, link.problem = connected, "no address in controller.json"
    return OrphanHandler(
        state, link, Ranks(state, *ranks), keeper or RecordedKeeper(), scheduler=scheduler  # type: ignore[arg-type]
    )  # fmt: skip


def assigned(state: AgentState) -> AgentState:
    Path(state.plan.job_dir).mkdir(exist_ok=True)
    state.assignment = Assignment(
        node="n1", epoch=3, version=1, role="member", stage="run", attempt=2, may_requeue=True
    )
    state.saved.epoch = 3
    return state


async def looks(one: OrphanHandler, *times: float) -> list[Outcome | None]:
    """A look at each of these times; what it begins is done before the next."""
    outcomes = []
    for now in times:
        outcomes.append(one.look(now))
        for task in one._state.work.tasks.values():
            if not task.done():
                await asyncio.wait_for(asyncio.shield(task), 60)
    return outcomes


def test_a_job_without_its_first_node_is_started_again_and_the_record_says_by_whom(make_state: Any) -> None:
    state = assigned(make_state(spec=SPEC))
    job_dir = Path(state.plan.job_dir)
    scheduler = RecordedScheduler(True, Answer(outcome="done", text="job 77 is requeued"), job_dir)
    before = time.time()

    async def story() -> list[Outcome | None]:
        one = handler(state, scheduler, STILL)
        assert await looks(one, 100.0, 161.0, 300.0) == [None, None, None]
        state.saved.stop_request = "SIGTERM"
        return await looks(one, 301.0)

    [outcome] = asyncio.run(story())
    assert scheduler.requeued == [("77", (), ("n0",))]
    record = scheduler.record
    assert record is not None, "it is written before the request, which may end this node"
    assert (record.job, record.requeues, record.by, record.lost) == ("77", 0, "n1", "n0")
    assert before - 62 <= record.lost_at <= record.at - 60 <= time.time()
    assert (outcome.state, outcome.exit_code) == ("requeued", 75)


def test_a_refusal_is_shown_once_and_the_scheduler_is_asked_again(make_state: Any, shown: Any) -> None:
    state = assigned(make_state(spec=SPEC))
    job_dir = Path(state.plan.job_dir)
    scheduler = RecordedScheduler(True, Answer(outcome="denied", text="not yours"), job_dir)
    asyncio.run(looks(handler(state, scheduler, STILL), 100.0, 161.0, 165.0, 172.0))
    assert len(scheduler.requeued) == 2
    assert len(shown(state)) == 1 + 2  # the first: there is no controller
    assert scheduler.record is not None
    assert RequeueRecord.read(job_dir) is None


@pytest.mark.parametrize(("lost", "connected"), [(False, False), (ValueError("bug"), False), (True, True)])
def test_nothing_is_requeued_otherwise(make_state: Any, lost: bool | Exception, connected: bool) -> None:
    state = assigned(make_state(spec=SPEC))
    scheduler = RecordedScheduler(lost, Answer(outcome="done", text=""), Path(state.plan.job_dir))
    one = handler(state, scheduler, STILL, connected=connected)
    assert asyncio.run(looks(one, 100.0, 161.0)) == [None, None]
    assert (scheduler.asked, scheduler.requeued) == (not connected, [])


@pytest.mark.parametrize(("signal", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_a_node_that_has_no_controller(make_state: Any, signal: str, code: int) -> None:
    state = assigned(make_state(spec=SPEC))
    state.saved.stop_request = signal
    [first, second] = asyncio.run(looks(handler(state, None, MOVING), 100.0, 110.0))
    assert first is None
    assert (second.state, second.exit_code) == ("stopped", code)


@pytest.mark.parametrize(
    ("signal", "silent_s", "ends"),
    [("SIGTERM", 9.0, False), ("SIGTERM", 10.0, True), ("", 10.0, False), ("SIGTERM", 5.0, False)],
)
def test_a_signal_ends_a_node_whose_controller_hangs(make_state: Any, signal: str, silent_s: float, ends: bool) -> None:
    """It stays connected for longer than Slurm waits."""
    state = assigned(make_state(spec=SPEC))
    state.saved.stop_request = signal
    one = handler(state, None, MOVING, connected=True)
    heard_at = one._link.heard_at
    [outcome] = asyncio.run(looks(one, heard_at + silent_s))
    assert (outcome is not None) is ends
    assert outcome is None or (outcome.state, outcome.exit_code) == ("stopped", 143)


def test_a_node_that_finds_no_controller_shows_why_once_and_gives_up(make_state: Any, shown: Any) -> None:
    state = make_state(spec=SPEC)
    *before, last = asyncio.run(looks(handler(state), 100.0, 121.0, 140.0, 1001.0))
    assert before == [None, None, None]
    assert (last.state, last.exit_code) == ("failed", 70)
    [line] = shown(state)
    assert "no address in controller.json" in line
    assert state.plan.job_dir in line


@pytest.mark.parametrize(
    ("written", "killed"),
    [
        (Fence(epoch=3, attempt=4), [3]),
        (Fence(epoch=5, attempt=3), [2]),
        (Fence(epoch=3, attempt=2), []),
        (Fence(epoch=2, attempt=4), []),  # of a controller that was replaced, or of a job before
        (None, []),
        ("{", []),
        ("folder", []),
    ],
)
def test_ranks_of_an_older_attempt_are_killed(make_state: Any, written: Fence | str | None, killed: list[int]) -> None:
    state = assigned(make_state())
    file = Path(state.plan.job_dir) / "fence.json"
    if isinstance(written, Fence):
        written.write(file.parent)
    elif written == "folder":
        file.mkdir()
    elif written is not None:
        file.write_text(written)
    worker = WorkerProcess(attempt=2, rank=0, local_rank=0, pid=7)
    ended_worker = msgspec.structs.replace(worker, status=9)
    for workers, connected, found in (((worker,), False, killed), ((worker,), True, []), ((ended_worker,), False, [])):
        state.keeper, keeper = KeeperState(workers=workers), RecordedKeeper()
        one = handler(state, keeper=keeper, connected=connected)
        asyncio.run(looks(one, 10.0, 10.5))
        assert keeper.requests == []
        asyncio.run(looks(one, 12.5))
        assert keeper.requests == [{"op": "kill", "attempt": attempt} for attempt in found]


def test_the_controller_writes_each_new_attempt_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        writer = FenceWriter(tmp_path, 7)
        for attempt in (1, 1, 2, 1):
            writer.raise_to(attempt)
            if writer._task is not None:
                await writer._task

    asyncio.run(scenario())
    assert Fence.read(tmp_path) == Fence(epoch=7, attempt=2)


def test_the_timeouts_are_in_order() -> None:
    assert LinkTimeouts().ping_s < TIMEOUTS.silent_after_signal_s < TIMEOUTS.end_after_signal_s
    assert TIMEOUTS.read_fence_after_s < TIMEOUTS.end_after_signal_s < TIMEOUTS.ask_scheduler_after_s
    assert TIMEOUTS.ask_scheduler_after_s < TIMEOUTS.longest_wait_s < TIMEOUTS.give_up_after_s
