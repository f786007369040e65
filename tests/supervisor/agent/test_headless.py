from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diagnosis.signals import ExitRecord, RankSample
from recovery.scheduling import Answer, Local
from supervisor.agent.orphan import Headless, stands_still
from supervisor.messages import JobSpec, Outcome
from supervisor.paths import NodePlan, RequeueRecord

STILL = RankSample(rank=1, local_rank=0, pid=7, moved_age_s=100.0)
MOVING = RankSample(rank=0, local_rank=0, pid=6, moved_age_s=0.0)
SPEC = JobSpec(name="j", scheduler="told", scheduler_job="77")


def ended(code: int | None) -> RankSample:
    record = ExitRecord(rank=1, local_rank=0, pid=7, code=code, signal=None if code is not None else 9, ended_at=1.0)
    return msgspec.structs.replace(STILL, moved_age_s=0.0, exit=record)


def plan(spec: JobSpec, job_dir: Path = Path("/nowhere")) -> NodePlan:
    return NodePlan(
        node="n", job_dir=str(job_dir), local_dir="/l", spec=spec, launcher_argv=(), python="python", cwd="/",
        front_pid=1, front_start_time=1,
    )  # fmt: skip


class Told(Local):
    name = "told"

    def __init__(self, lost: bool | Exception) -> None:
        self.lost, self.asked, self.requeued = lost, 0, []  # type: ignore[var-annotated]
        self.answer = Answer(outcome="denied", text="not yours")
        self.job_dir = Path()
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


def watched(
    scheduler: Told,
    samples: Sequence[RankSample],
    spec: JobSpec = SPEC,
    connected: bool = False,
    allowed: bool = True,
) -> list[str]:
    """What it says within many looks."""
    said: list[str] = []
    looks: list[bool] = []

    def look() -> bool:
        looks.append(connected)
        return connected

    headless = Headless(plan(spec), look, lambda: samples, said.append, scheduler, 0.02, 0.005, lambda: allowed)
    watch(headless, lambda: len(looks) > 60)
    return said


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
def test_which_nodes_stand_still(samples: list[RankSample], still: bool) -> None:
    assert stands_still(samples, 60.0) is still


def watch(headless: Headless, until: Callable[[], bool]) -> None:
    async def run() -> None:
        task = asyncio.ensure_future(headless.watch())
        deadline = time.monotonic() + 60
        while not (until() or task.done()) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        assert until()
        task.cancel()

    asyncio.run(run())


def test_a_job_without_its_first_node_is_started_again_and_the_record_says_by_whom(tmp_path: Path) -> None:
    scheduler = Told(True)
    scheduler.answer, scheduler.job_dir = Answer(outcome="done", text="job 77 is requeued"), tmp_path
    signal, ended = [""], list[Outcome]()
    headless = Headless(
        plan(SPEC, tmp_path), lambda: False, lambda: [STILL], lambda _: None, scheduler, 0.02, 0.005,
        stopped_by=lambda: signal[0], end=ended.append, alone_s=0.0,
    )  # fmt: skip

    def done() -> bool:
        signal[0] = "SIGTERM" if scheduler.requeued else ""
        return bool(ended)

    before = time.time()
    watch(headless, done)
    assert scheduler.requeued == [("77", (), ("n0",))]
    record = scheduler.record
    assert record is not None, "before the order goes out, which may end us"
    assert (record.job, record.requeues, record.by, record.lost) == ("77", 0, "n", "n0")
    assert before - 1 <= record.lost_at <= record.at <= time.time()
    [outcome] = ended
    assert (outcome.state, outcome.exit_code) == ("requeued", 75)
    assert outcome.line.endswith("told starts it again (job 77 is requeued)")


def test_a_refusal_is_told_once_and_asked_about_again(tmp_path: Path) -> None:
    scheduler = Told(True)
    scheduler.job_dir = tmp_path
    said: list[str] = []
    headless = Headless(plan(SPEC, tmp_path), lambda: False, lambda: [STILL], said.append, scheduler, 0.02, 0.005)
    watch(headless, lambda: len(scheduler.requeued) > 2)
    assert said == [
        "the job has lost its first node, n0, with the controller: told starts it again",
        "told does not start the job again: not yours",
    ]
    assert scheduler.record is not None
    watch(headless, lambda: RequeueRecord.read(tmp_path) is None)


@pytest.mark.parametrize(("connected", "ends"), [(False, True), (True, False)])
def test_a_signal_ends_a_node_that_has_no_controller(connected: bool, ends: bool) -> None:
    ended: list[Outcome] = []
    looks = iter(range(20))
    headless = Headless(
        plan(SPEC), lambda: next(looks, None) is None or connected, lambda: [MOVING], lambda _: None, Told(False),
        look_s=0.002, stopped_by=lambda: "SIGTERM", end=ended.append, alone_s=0.01,
    )  # fmt: skip
    watch(headless, lambda: next(looks, None) is None)
    assert [(outcome.state, outcome.exit_code) for outcome in ended] == [("stopped", 143)] * ends


@pytest.mark.parametrize(
    ("lost", "more"),
    [
        (False, {}),
        (ValueError("bug"), {}),
        (True, {"samples": [MOVING]}),
        (True, {"samples": []}),
        (True, {"connected": True}),
        (True, {"allowed": False}),
        (True, {"spec": msgspec.structs.replace(SPEC, mode="observe")}),
        (True, {"spec": JobSpec(name="j")}),
    ],
)
def test_nothing_is_done_otherwise(lost: bool | Exception, more: dict[str, Any]) -> None:
    scheduler = Told(lost)
    watched(scheduler, **{"samples": [STILL], **more})
    assert scheduler.requeued == []
    assert bool(scheduler.asked) == (not more)


def test_a_node_that_finds_no_controller_says_so_once() -> None:
    for connected, told in ((False, 1), (True, 0)):
        said: list[str] = []
        looks = iter(range(20))
        headless = Headless(
            plan(JobSpec(name="j"), Path("/shared/j")),
            lambda looks=looks, connected=connected: next(looks, None) is None or connected,  # type: ignore[misc]
            list, said.append, look_s=0.002, first_s=0.01, problem=lambda: "no address in controller.json",
        )  # fmt: skip
        watch(headless, lambda looks=looks: next(looks, None) is None)  # type: ignore[misc]
        why = "n has found no controller for 0 s (no address in controller.json)"
        assert said == [f"{why}: does every node see the same folder /shared/j?"] * told


def test_a_node_that_no_controller_ever_came_to_gives_up() -> None:
    for samples, connected, gives_up in (([], [False], True), ([STILL], [False], False), ([], [True, False], False)):
        given: list[str] = []
        looks: list[bool] = []

        def look(connected: list[bool] = connected, looks: list[bool] = looks) -> bool:
            looks.append(connected[min(len(looks), len(connected) - 1)])
            return looks[-1]

        headless = Headless(
            plan(SPEC),
            look,
            lambda samples=samples: samples,  # type: ignore[misc]
            lambda _: None,
            Told(False),
            look_s=0.005,
            give_up=given.append,
            never_s=0.05,
        )

        watch(headless, lambda given=given, looks=looks: bool(given) or len(looks) > 40)  # type: ignore[misc]
        assert bool(given) is gives_up
        assert all(line == "no controller came within 0 s: see what the first node says" for line in given)
