"""Where the time of a step goes on each rank, from the events of a Kineto trace.

Each moment of a step belongs to one part. On a GPU the kernels decide; on a CPU the operators that run, and those that
call no other come first: an operator that only waits for a collective is communication. Communication that is hidden
behind computation costs nothing, and is not counted. What no event covers is idle: Python, and what was not recorded.

A trace is hostile input: what is no event is counted and left out, and all that is kept of one is bounded.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple

from diagnosis.signals import clean_line

COMPUTE, COMMUNICATION, DATA = "compute", "communication", "data loading"
OPTIMIZER, CHECKPOINT, IDLE = "optimizer", "checkpoint", "idle"
PARTS: Final = (COMPUTE, COMMUNICATION, DATA, OPTIMIZER, CHECKPOINT, IDLE)

MOST_SPANS: Final = 3_000_000
MOST_NAMES: Final = 4000
MOST_THREADS: Final = 4000
NAME_LENGTH: Final = 120
LONGEST_SHOWN: Final = 5
MICROSECOND: Final = 1e-6
WORTH_TELLING: Final = 0.02
"""Share of a step that a slow rank costs; less is told of nobody."""

_COLLECTIVE = re.compile(r"(?:gloo|nccl|rccl|ucc|mpi|xccl|hccl):")
_COLLECTIVE_KERNEL = re.compile(r"(?i)nccl|rccl|nvshmem|onecclkernel")
_DATA = re.compile(r"(?i)enumerate\(DataLoader\)|dataloader_next|DataLoader.*__next__")
_CHECKPOINT = re.compile(
    r"(?i)(?:save|write|dump)\w*[ ._#:]*\w*checkpoint|checkpoint\w*[ ._#:]*(?:save|write)|torch\.save"
)
_STEP = "Optimizer.step#"
_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_PART_OF: Final = {
    "in optimizer": OPTIMIZER,
    "compute": COMPUTE,
    "communication": COMMUNICATION,
    "data": DATA,
    "checkpoint": CHECKPOINT,
    "optimizer": OPTIMIZER,
    "outer": COMPUTE,
}
_FIRST_ON_GPU: Final = ("in optimizer", "compute", "communication", "data", "checkpoint", "optimizer")
_FIRST_ON_CPU: Final = ("data", "checkpoint", "in optimizer", "compute", "communication", "optimizer", "outer")
"""Which layer a moment belongs to, if several cover it: the first."""


class RankTime(NamedTuple):
    """Of one rank, means over the whole steps of its trace."""

    rank: int
    steps: int
    """0: the trace has no whole step of an optimizer of torch, and all of it counts as one."""
    step_s: float
    parts: dict[str, float]
    """Part -> seconds of a step; they add up to `step_s`."""
    longest: tuple[tuple[str, float], ...]
    """Kernels, or operators on a CPU, and the seconds of a step that each runs."""
    left_out: int = 0
    """Events that were not understood, or were too many."""

    @property
    def own_s(self) -> float:
        """What it needs itself: all but waiting for others and moving data between them."""
        return self.step_s - self.parts[COMMUNICATION]


class SlowestRank(NamedTuple):
    rank: int
    step_s: float
    without_s: float
    """The step if this rank were as quick as the slowest of the others."""

    @property
    def share(self) -> float:
        return 1 - self.without_s / self.step_s


Merged = list[tuple[float, float]]
"""Begins and ends in order, none touching another."""


class NoSteps(ValueError):
    """The trace has nothing that could be added up."""


class _Spans:
    """Begins and ends, kept small."""

    def __init__(self) -> None:
        self.begins, self.ends = array("d"), array("d")

    def add(self, begin: float, end: float) -> None:
        self.begins.append(begin)
        self.ends.append(end)

    def merged(self) -> Merged:
        found: Merged = []
        for begin, end in sorted(zip(self.begins, self.ends, strict=True)):
            if found and begin <= found[-1][1]:
                if end > found[-1][1]:
                    found[-1] = found[-1][0], end
            else:
                found.append((begin, end))
        return found


class TraceEvents:
    """Takes the events of one rank, in any order; then `time` says where its steps went."""

    def __init__(self) -> None:
        self._spans: dict[str, _Spans] = defaultdict(_Spans)
        self._ops: dict[str, _Spans] = {}
        """Of each thread of a CPU."""
        self._op_names: dict[str, array[int]] = {}
        self._names: dict[str, int] = {}
        self._kernels: Counter[int] = Counter()
        self._collective_threads: set[str] = set()
        self._steps: dict[str, list[float]] = defaultdict(list)
        """Optimizer -> ends of its steps."""
        self._step_threads: set[str] = set()
        self._begin, self._end = math.inf, -math.inf
        self._count = 0
        self.has_gpu = False
        self.left_out = 0

    def add(self, event: Mapping[str, Any]) -> None:
        if event.get("ph") != "X":
            return
        begin, duration, name, kind = event.get("ts"), event.get("dur"), event.get("name"), event.get("cat")
        if (
            not isinstance(begin, (int, float))
            or not isinstance(duration, (int, float))
            or not (abs(begin) < 1e18 and 0 <= duration < 1e15)
            or not isinstance(name, str)
            or not isinstance(kind, str)
        ):
            self.left_out += 1
            return
        if self._count >= MOST_SPANS:
            self.left_out += 1
            return
        self._count += 1
        thread = str(event.get("tid"))[:40]
        self._sort(kind.lower(), name[:NAME_LENGTH], thread, float(begin), float(begin) + float(duration))

    def _sort(self, kind: str, name: str, thread: str, begin: float, end: float) -> None:
        if kind in _ON_GPU:
            self.has_gpu = True
            collective = kind == "kernel" and _COLLECTIVE_KERNEL.search(name)
            self._spans["gpu communication" if collective else "gpu compute"].add(begin, end)
            self._kernels[self._number(name)] += round((end - begin) * 1000)
        elif kind == "gpu_user_annotation":
            if name.startswith(_STEP):
                self._spans["gpu optimizer"].add(begin, end)
        elif kind == "user_annotation":
            self._annotation(name, thread, begin, end)
        elif kind == "cpu_op":
            if name.startswith("c10d::"):
                self._spans["communication"].add(begin, end)
            elif thread in self._ops or len(self._ops) < MOST_THREADS:
                self._ops.setdefault(thread, _Spans()).add(begin, end)
                self._op_names.setdefault(thread, array("l")).append(self._number(name))
        else:
            return  # runtime calls, Python frames, spans of the recording itself
        self._begin, self._end = min(self._begin, begin), max(self._end, end)

    def _annotation(self, name: str, thread: str, begin: float, end: float) -> None:
        if name.startswith(_STEP):
            self._spans["optimizer"].add(begin, end)
            if name in self._steps or len(self._steps) < MOST_NAMES:
                self._steps[name].append(end)
            self._step_threads.add(thread)
        elif _COLLECTIVE.match(name):
            self._spans["communication"].add(begin, end)
            self._collective_threads.add(thread)
        elif _DATA.search(name):
            self._spans["data"].add(begin, end)
        elif _CHECKPOINT.search(name):
            self._spans["checkpoint"].add(begin, end)

    def _number(self, name: str) -> int:
        if len(self._names) >= MOST_NAMES:
            return self._names.get(name, self._names.setdefault("others", len(self._names)))
        return self._names.setdefault(name, len(self._names))

    def time(self, rank: int) -> RankTime:
        """Raises NoSteps."""
        window, steps = self._window()
        layers, longest = self._layers()
        covered = _covered(layers, window)
        count = max(1, steps)
        step_s = (window[1] - window[0]) * MICROSECOND / count
        parts = dict.fromkeys(PARTS, 0.0)
        for name, length in covered.items():
            parts[_PART_OF[name]] += length * MICROSECOND / count
        parts[IDLE] = max(0.0, step_s - sum(parts.values()))
        shown = {number: name for name, number in self._names.items()}
        scale = step_s / (self._end - self._begin) if self._end > self._begin else 0.0
        top = (
            (clean_line(shown[one], NAME_LENGTH), ns / 1000 * scale) for one, ns in longest.most_common(LONGEST_SHOWN)
        )
        return RankTime(rank, steps, step_s, parts, tuple(top), self.left_out)

    def _layers(self) -> tuple[list[tuple[str, Merged]], Counter[int]]:
        """What covers which time, the first first, and how many ns each kernel or operator took."""
        layers = {name: self._spans[name].merged() for name in ("data", "checkpoint", "optimizer")}
        if self.has_gpu:
            layers["compute"] = self._spans["gpu compute"].merged()
            layers["communication"] = self._spans["gpu communication"].merged()
            layers["in optimizer"] = _both(layers["compute"], self._spans["gpu optimizer"].merged())
            return [(name, layers[name]) for name in _FIRST_ON_GPU], self._kernels
        longest: Counter[int] = Counter()
        leaves, outer = _Spans(), _Spans()
        for thread, spans in self._ops.items():
            if thread not in self._collective_threads - self._step_threads:
                _split(spans, self._op_names[thread], leaves, outer, longest)
        layers["compute"], layers["outer"] = leaves.merged(), outer.merged()
        layers["communication"] = self._spans["communication"].merged()
        layers["in optimizer"] = _both(layers["compute"], layers["optimizer"])
        return [(name, layers[name]) for name in _FIRST_ON_CPU], longest

    def _window(self) -> tuple[tuple[float, float], int]:
        """From the end of one step to the end of another, and how many steps that are: of the busiest optimizer."""
        busiest = max(self._steps, key=lambda name: len(self._steps[name]), default="")
        ends = sorted(self._steps[busiest]) if busiest else []
        if len(ends) > 1 and ends[-1] > ends[0]:
            return (ends[0], ends[-1]), len(ends) - 1
        if self._end <= self._begin:
            raise NoSteps("it has no event that takes time")
        return (self._begin, self._end), 0


def _split(spans: _Spans, names: Sequence[int], leaves: _Spans, outer: _Spans, longest: Counter[int]) -> None:
    """Operators of a thread: those that call no other, and the others."""
    order = sorted(range(len(spans.begins)), key=lambda at: (spans.begins[at], -spans.ends[at]))
    for at, following in zip(order, [*order[1:], -1], strict=True):
        begin, end = spans.begins[at], spans.ends[at]
        if following >= 0 and spans.begins[following] < end:
            outer.add(begin, end)
        else:
            leaves.add(begin, end)
            longest[names[at]] += round((end - begin) * 1000)


def _both(one: Merged, other: Merged) -> Merged:
    """Where both are."""
    found: Merged = []
    at = 0
    for begin, end in one:
        while at < len(other) and other[at][1] <= begin:
            at += 1
        look = at
        while look < len(other) and other[look][0] < end:
            found.append((max(begin, other[look][0]), min(end, other[look][1])))
            look += 1
    return found


def _covered(layers: Sequence[tuple[str, Merged]], window: tuple[float, float]) -> dict[str, float]:
    """How long each layer is the first that covers a moment of the window."""
    changes = []
    for at, (_, spans) in enumerate(layers):
        for begin, end in spans:
            begin, end = max(begin, window[0]), min(end, window[1])
            if begin < end:
                changes += [(begin, at, 1), (end, at, -1)]
    changes.sort()
    open_now, covered, since = [0] * len(layers), [0.0] * len(layers), window[0]
    for moment, at, change in changes:
        first = next((one for one, count in enumerate(open_now) if count), None)
        if first is not None:
            covered[first] += moment - since
        since = moment
        open_now[at] += change
    return {name: covered[at] for at, (name, _) in enumerate(layers)}


def slowest(times: Sequence[RankTime]) -> SlowestRank | None:
    """The rank that the others wait for, if it costs enough to be told."""
    if len(times) < 2:
        return None
    ordered = sorted(times, key=lambda one: one.own_s)
    worst, next_to_worst = ordered[-1], ordered[-2]
    step_s = fmean(one.step_s for one in times)
    # Each was traced at moments of its own: the difference may be more than there is to be saved.
    without_s = max(step_s - (worst.own_s - next_to_worst.own_s), next_to_worst.own_s)
    found = SlowestRank(worst.rank, step_s, without_s)
    return found if step_s > 0 and found.share >= WORTH_TELLING else None
