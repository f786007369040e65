"""A job as its agents see it, in simulated time, and short ways to say what happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diagnosis.hang.watch import Confirmed, HangNotice, HangWatch, Silent, Suspected
from diagnosis.incident import HangReport
from diagnosis.signals import ExitRecord, Frame, RankSample, RankStack

TORCH = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "collective": (("all_reduce", TORCH), ("train", "train.py"), ("<module>", "train.py")),
    "barrier": (("barrier", TORCH), ("<module>", "train.py")),
    "sleep": (("sleep", "train.py"), ("step", "train.py"), ("<module>", "train.py")),
    "busy": (("step", "train.py"), ("<module>", "train.py")),
    "checkpoint": (("sleep", "train.py"), ("save_checkpoint", "train.py"), ("<module>", "train.py")),
    "evaluation": (("forward", "model.py"), ("evaluate", "train.py"), ("<module>", "train.py")),
    "pickling": (("_object_to_tensor", TORCH), ("broadcast_object_list", TORCH), ("train", "train.py")),
    "other library": (("wait", "/env/lib/python3.11/site-packages/deepspeed/runtime/engine.py"), ("train", "train.py")),
    "recv": (("recv", TORCH), ("_exception_logger.<locals>.wrapper", TORCH), ("train", "train.py")),
    "poll": (("poll", "train.py"), ("upload", "train.py"), ("<module>", "train.py")),
    "program": (
        ("_try_wait", "/usr/lib/python3.11/subprocess.py"),
        ("wait", "/usr/lib/python3.11/subprocess.py"),
        ("upload", "train.py"),
        ("<module>", "train.py"),
    ),
    "future": (
        ("wait", "/usr/lib/python3.11/threading.py"),
        ("result", "/usr/lib/python3.11/concurrent/futures/_base.py"),
        ("upload", "train.py"),
        ("<module>", "train.py"),
    ),
    "request": (
        ("readinto", "/usr/lib/python3.11/socket.py"),
        ("_read_status", "/usr/lib/python3.11/http/client.py"),
        ("fetch", "train.py"),
        ("<module>", "train.py"),
    ),
    "destroy": (("destroy_process_group", TORCH), ("<module>", "train.py")),
}


def stack_of(
    place: str, rank: int = 0, *, line: int = 7, sample: int = 0, others: int = 0, sends: bool = False
) -> RankStack:
    """As py-spy gives it; `line`: of the innermost frame."""
    frames = tuple(
        Frame(function=name, file=file, line=7 if depth else line) for depth, (name, file) in enumerate(PLACES[place])
    )
    return RankStack(rank=rank, frames=frames, sample=sample, others=others, sends=sends)


class Watched:
    """Ranks that step together until told otherwise; heartbeats every second, ticks four times a second."""

    def __init__(self, ranks: int, step_s: float, last_step: int | None) -> None:
        self.now = 1000.0
        self.watch = HangWatch()
        self.watch.start(self.now, 1)
        self.step_s: float | None = step_s
        self.last_step = last_step
        self.steps = [0] * ranks
        self.moved_at = [self.now] * ranks
        self.waits_from: list[float | None] = [None] * ranks
        self.stopped_from: list[float | None] = [None] * ranks
        self.states = ["S"] * ranks
        self.cpu_s = [0.0] * ranks
        self.busy: set[int] = set()
        self.places = ["collective"] * ranks
        self.changing: set[int] = set()
        self.hints = [""] * ranks
        self.locked_from: list[float | None] = [None] * ranks
        self.others = [0] * ranks
        self.sending: set[int] = set()
        self.world = ranks
        self.io_bytes = [0] * ranks
        self.exits: dict[int, ExitRecord] = {}
        self.heard = True
        self.notices: list[tuple[float, HangNotice]] = []
        self.fault_at = self.now
        self._next_step = self._next_beat = self.now
        self._stacks_at: float | None = None

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.25
            self._step()
            for rank in self.busy:
                self.cpu_s[rank] += 0.25
            if self.heard and self.now >= self._next_beat:
                self.watch.observe(self.now, self._samples())
                self._next_beat = self.now + 1.0
            self._stacks()
            for notice in self.watch.tick(self.now):
                self.notices.append((self.now - self.fault_at, notice))
                if isinstance(notice, Suspected):
                    self._stacks_at = self.now + 1.5

    def hang(self, rank: int, place: str, *, state: str = "S") -> None:
        """From now on `rank` stays at `place` and the others wait for it."""
        self.fault_at = self.now
        self.step_s = None
        self.places[rank] = place
        self.states[rank] = state
        for other in range(len(self.steps)):
            if other != rank and other not in self.exits:
                self.waits_from[other] = self.now
        if state == "R":
            self.busy.add(rank)
        if state in "Tt":
            self.stopped_from[rank] = self.now

    def go_on(self, step_s: float = 0.1) -> None:
        """All ranks step again."""
        self.step_s = step_s
        self._next_step = self.now
        self.states = ["S"] * len(self.steps)
        self.stopped_from = [None] * len(self.steps)
        self.locked_from = [None] * len(self.steps)
        self.places = ["collective"] * len(self.steps)
        self.busy.clear()

    def end(self, rank: int, code: int = 0) -> None:
        self.exits[rank] = ExitRecord(
            rank=rank, local_rank=rank, pid=rank + 10, code=code, signal=None, ended_at=self.now
        )

    def confirmed(self) -> list[HangReport]:
        return [notice.report for _, notice in self.notices if isinstance(notice, Confirmed)]

    def silences(self) -> list[HangReport]:
        return [notice.report for _, notice in self.notices if isinstance(notice, Silent)]

    def first(self, kind: type[HangNotice]) -> float:
        """Seconds from the fault to the first notice of this kind."""
        return next(at for at, notice in self.notices if isinstance(notice, kind) and at > 0)

    def count(self, kind: type[HangNotice]) -> int:
        return sum(isinstance(notice, kind) for _, notice in self.notices)

    def _step(self) -> None:
        if self.step_s is None or self.now < self._next_step:
            return
        self._next_step = self.now + (self.step_s if self.step_s > 0.25 else 0.0)
        for rank in range(len(self.steps)):
            self.steps[rank] += max(1, int(0.25 / self.step_s))
            self.moved_at[rank] = self.now
            self.waits_from[rank] = None

    def _samples(self) -> list[RankSample]:
        return [self._sample(rank) for rank in range(len(self.steps))]

    def _sample(self, rank: int) -> RankSample:
        step, since, stopped = self.steps[rank], self.waits_from[rank], self.stopped_from[rank]
        return RankSample(
            rank=rank,
            local_rank=rank,
            pid=rank + 10,
            state=self.states[rank],  # type: ignore[arg-type]
            step=step or None,
            last_step=self.last_step,
            groups={"0": (step + (since is not None), step)},
            moved_age_s=self.now - self.moved_at[rank],
            waiting_s=None if since is None else self.now - since,
            stopped_s=None if stopped is None else self.now - stopped,
            cpu_s=self.cpu_s[rank],
            phase=self.hints[rank],  # type: ignore[arg-type]
            world=self.world,
            timeout_s=1800.0,
            locked_s=None if self.locked_from[rank] is None else self.now - (self.locked_from[rank] or 0.0),
            io_bytes=self.io_bytes[rank],
            exit=self.exits.get(rank),
        )

    def _stacks(self) -> None:
        if self.watch.suspected and self._stacks_at is None:
            self._stacks_at = self.now + 3.0
        if self._stacks_at is None or self.now < self._stacks_at:
            return
        self._stacks_at = None
        live = [rank for rank in range(len(self.steps)) if rank not in self.exits]
        for sample in (0, 1):
            lines = {rank: int(self.now * 4) + sample if rank in self.changing else 7 for rank in live}
            self.watch.note_stacks(
                self.now,
                [
                    stack_of(
                        self.places[rank],
                        rank,
                        line=lines[rank],
                        sample=sample,
                        others=self.others[rank],
                        sends=rank in self.sending,
                    )
                    for rank in live
                ],
            )


@pytest.fixture
def watched() -> Callable[..., Watched]:
    """`watched(ranks=2, step_s=0.1, last_step=None, warm_s=30)`: a job that has run for `warm_s` seconds."""

    def make(ranks: int = 2, step_s: float = 0.1, last_step: int | None = None, warm_s: float = 30.0) -> Watched:
        job = Watched(ranks, step_s, last_step)
        job.run(warm_s)
        job.notices.clear()
        return job

    return make


@pytest.fixture
def at() -> Callable[..., RankStack]:
    """`at("checkpoint", rank=1)`: the stack of a rank at such a place."""
    return stack_of
