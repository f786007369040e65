"""How long a step would take without its slow operations: the what-if analysis of ByteDance (OSDI 2025), in our words.

A timeline of operations (`Operation`) of a job with data and pipeline parallelism is turned into a graph: which
operation waits for which. The graph is worked through again with other durations, and the end of the last operation is
the step that would have been. Durations are replaced by what is usual for operations of their kind: the mean of
computations, the median of transfers. A transfer begins when its last member is there, so that waiting is no duration.

Clocks of different ranks must agree to some milliseconds. What the timeline does not have (loading data, checkpoints)
is in no result; `launch_slowdown` says how much of a step that is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Final, NamedTuple

FORWARD, BACKWARD = "forward-compute", "backward-compute"
GATHER, SCATTER = "params-all-gather", "grads-reduce-scatter"
SEPARATE, EMBEDDING = "separate-grads-all-reduce", "embedding-grads-all-reduce"
LAYERNORM, CLIP, OPTIMIZER, GC = "layernorm-grads-all-reduce", "optimizer-clip-main-grad", "optimizer", "gc"
SENDS_AND_RECEIVES: Final = {
    "forward-send": ("forward-recv", 1),
    "forward-recv": ("forward-send", -1),
    "backward-send": ("backward-recv", -1),
    "backward-recv": ("backward-send", 1),
}
"""Kind -> what its peer does, and how many stages away the peer is."""
SPANS_REPLICAS: Final = frozenset({GATHER, SCATTER, SEPARATE, CLIP})
"""All data-parallel ranks take part in it."""
USUAL_IS_MEDIAN: Final = frozenset({*SENDS_AND_RECEIVES, GATHER, SCATTER, SEPARATE, LAYERNORM, EMBEDDING, CLIP})
KINDS: Final = USUAL_IS_MEDIAN | {FORWARD, BACKWARD, OPTIMIZER, GC}
CLOCKS_DIFFER_S: Final = 0.01
"""A transfer that ends this long before its last member is there was measured by clocks that do not agree."""
NEAR_S: Final = 5e-5
WORST_SHARE: Final = 0.03
"""M_W asks about this share of the ranks: the worst."""


class WhatIfError(ValueError):
    """The timeline cannot be worked through; the message is for a person."""


class Operation(NamedTuple):
    """One operation of one rank in one step, as the published timelines have it."""

    dp_rank: int
    stage: int
    rank: int
    step: int
    kind: str
    start_s: float
    duration_s: float
    number: int
    """Which of its kind in this step on this rank, from 0."""
    model_chunk: int = 0
    """Of this stage; -1: it belongs to none."""
    global_chunk: int = 0
    """Of the whole model."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


Name = tuple[str, int, int]
"""Kind, number, stage: the same for all data-parallel ranks and steps."""
Durations = dict[Name, list[float]]
"""Of each operation, one for each lane: a data-parallel rank in a step."""


class Share(NamedTuple):
    """How much of the lost time some operations explain, asked in both directions."""

    without_s: float
    """The mean step if these were as usual."""
    alone_s: float
    """The mean step if all others were as usual."""
    of_loss: float
    """Share of the lost time that goes when these are as usual: M_W of the worst ranks, M_S of the last stage."""
    explains: float
    """Share of the lost time that is there when only these are slow."""


class WhatIf(NamedTuple):
    """All times are means over the steps, in seconds."""

    steps: tuple[int, ...]
    measured_s: float
    simulated_s: float
    """The same durations, worked through without what the timeline does not have."""
    usual_s: float
    """All operations as usual."""
    launch_slowdown: float
    slowdown: float
    """`simulated_s / usual_s`: over 1.1 is called a straggling job in the study."""
    by_dp_rank: dict[int, float]
    """Slowdown if only the operations of this one are as they were."""
    by_stage: dict[int, float]
    by_kind: dict[str, float]
    worst_ranks: tuple[int, ...]
    worst: Share
    """Of `worst_ranks`: M_W."""
    last_stage: Share
    """M_S."""
    left_out: tuple[str, ...] = ()
    """What of the timeline was not used, in words."""


class Timeline:
    """The operations of all lanes by name, with the graph that they share."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        lanes: dict[tuple[int, int], dict[Name, Operation]] = defaultdict(dict)
        unknown: set[str] = set()
        for one in operations:
            if one.kind in KINDS:
                lanes[one.step, one.dp_rank][one.kind, one.number, one.stage] = one
            else:
                unknown.add(one.kind)
        if not lanes:
            raise WhatIfError(f"the timeline has no operation of a known kind: {', '.join(sorted(KINDS))}")
        self.left_out = tuple(f"operations of the kind {kind}" for kind in sorted(unknown)[:8])
        self._keep_alike(lanes)
        self.lanes = sorted(self._operations)
        self.names = list(self._operations[self.lanes[0]])
        self.steps = sorted({step for step, _ in self.lanes})
        self.stages = 1 + max(stage for _, _, stage in self.names)
        self._graph = _Graph(self._operations[self.lanes[0]], self.stages, self._has_replicas())
        self._lane_of_step = [self.steps.index(step) for step, _ in self.lanes]

    def _keep_alike(self, lanes: dict[tuple[int, int], dict[Name, Operation]]) -> None:
        """Steps in which every rank has the operations of the first step: those that began or ended outside go."""
        wanted = set(lanes[min(lanes)])
        replicas = {dp for _, dp in lanes}
        odd = {step for (step, _), found in lanes.items() if set(found) != wanted}
        odd |= {step for step, _ in lanes if any((step, dp) not in lanes for dp in replicas)}
        if all(step in odd for step, _ in lanes):
            raise WhatIfError("in no step do all data-parallel ranks have the same operations")
        if odd:
            self.left_out += (f"{len(odd)} steps in which ranks have other operations than in the first",)
        self._operations = {key: found for key, found in lanes.items() if key[0] not in odd}

    def _has_replicas(self) -> bool:
        kinds = {kind for kind, _, _ in self.names}
        return len({dp for _, dp in self.lanes}) > 1 or bool(kinds & {GATHER, SCATTER, SEPARATE})

    def operations(self, name: Name) -> list[Operation]:
        return [self._operations[lane][name] for lane in self.lanes]

    def measured(self) -> list[float]:
        """Of each step: from its first start to its last end."""
        starts, ends = [math.inf] * len(self.steps), [-math.inf] * len(self.steps)
        for lane, at in zip(self.lanes, self._lane_of_step, strict=True):
            for one in self._operations[lane].values():
                starts[at], ends[at] = min(starts[at], one.start_s), max(ends[at], one.end_s)
        return [end - start for start, end in zip(starts, ends, strict=True)]

    def durations(self) -> Durations:
        """How long each operation itself took: without waiting for others."""
        found = {name: [one.duration_s for one in self.operations(name)] for name in self.names}
        for group in self._graph.groups:
            members = {name: self.operations(name) for name in group}
            begin = [
                max(column)
                for column in zip(*([one.start_s for one in ones] for ones in members.values()), strict=True)
            ]
            begin = self._across(group, begin)
            for name, ones in members.items():
                itself = [one.end_s - start for one, start in zip(ones, begin, strict=True)]
                found[name] = [0.0 if value <= -CLOCKS_DIFFER_S else value for value in itself]
        return found

    def _across(self, group: Sequence[Name], values: list[float]) -> list[float]:
        """The largest of all data-parallel ranks, where all take part."""
        if group[0][0] not in SPANS_REPLICAS:
            return values
        largest = [-math.inf] * len(self.steps)
        for at, value in zip(self._lane_of_step, values, strict=True):
            largest[at] = max(largest[at], value)
        return [largest[at] for at in self._lane_of_step]

    def usual(self, durations: Durations) -> Durations:
        """The durations, each replaced by what is usual for its kind."""
        of_kind: dict[str, list[float]] = defaultdict(list)
        for name, values in durations.items():
            of_kind[name[0]] += values
        usual = {kind: (median if kind in USUAL_IS_MEDIAN else fmean)(values) for kind, values in of_kind.items()}
        return {name: [usual[name[0]]] * len(values) for name, values in durations.items()}

    def step_s(self, durations: Durations) -> list[float]:
        """How long each step takes with these durations."""
        ends: dict[Name, list[float]] = {}
        begin = [0.0] * len(self.lanes)
        last = begin
        for unit, is_group in self._graph.order:
            starts = []
            for name in unit:
                before = [ends[other] for other in self._graph.before[name]]
                starts.append(list(map(max, *before)) if len(before) > 1 else before[0] if before else begin)
            if is_group:
                start = self._across(unit, list(map(max, *starts)) if len(starts) > 1 else starts[0])
                starts = [start] * len(unit)
            for name, start in zip(unit, starts, strict=True):
                ends[name] = list(map(float.__add__, start, durations[name]))
                last = list(map(max, last, ends[name]))
        longest = [0.0] * len(self.steps)
        for at, value in zip(self._lane_of_step, last, strict=True):
            longest[at] = max(longest[at], value)
        return longest

    def mixed(self, base: Durations, other: Durations, chosen: Callable[[Operation], bool]) -> Durations:
        """`base`, but the operations that are `chosen` as in `other`."""
        mixed = {}
        for name in self.names:
            takes = [chosen(one) for one in self.operations(name)]
            mixed[name] = [
                other[name][at] if take else base[name][at] for at, take in enumerate(takes)
            ]  # fmt: skip
        return mixed


class _Graph:
    """Which operation of a step waits for which, on one model replica: all replicas and steps are alike."""

    def __init__(self, operations: Mapping[Name, Operation], stages: int, has_replicas: bool) -> None:
        self._operations = operations
        self._stages = stages
        self.before: dict[Name, list[Name]] = {name: [] for name in operations}
        self.groups: list[tuple[Name, ...]] = []
        """Operations that end together, once all have begun."""
        self._overlaps = any(name[0] == SEPARATE for name in operations)
        self._pairs: dict[tuple[str, int, int], list[Name]] = defaultdict(list)
        for stage in range(stages):
            self._add_pipeline(stage)
            if has_replicas:
                self._add_replicas(stage)
            self._add_end_of_step(stage, has_replicas)
        self.groups += [tuple(members) for members in self._pairs.values()]
        if any(len(members) > 2 for members in self._pairs.values()):
            raise WhatIfError("more than two ranks take part in one send and receive")
        self._add_groups_of_stages(has_replicas)
        self.order = self._ordered()

    def _of(self, stage: int, *kinds: str) -> list[Operation]:
        """In the order of their starts."""
        found = (one for name, one in self._operations.items() if name[2] == stage and name[0] in kinds)
        return sorted(found, key=lambda one: (one.start_s, one.number, one.kind))

    def _wait(self, later: Name, *earlier: Name) -> None:
        if later in self.before:
            self.before[later] += [name for name in earlier if name in self.before]

    def _chain(self, names: Sequence[Name], first_waits_for: Sequence[Name] = ()) -> None:
        waits_for = [name for name in first_waits_for if name in self.before]
        for name in names:
            if name in self.before:
                self._wait(name, *waits_for)
                waits_for = [name]

    def _add_pipeline(self, stage: int) -> None:
        computes = self._of(stage, FORWARD, BACKWARD)
        if not any(one.kind == FORWARD for one in computes) or not any(one.kind == BACKWARD for one in computes):
            raise WhatIfError(f"stage {stage} has no forward or no backward computation")
        self._chain([_name(one) for one in computes])
        for kind in SENDS_AND_RECEIVES:
            transfers = self._of(stage, kind)
            self._chain([_name(one) for one in transfers])
            self._match(stage, kind, transfers, [one for one in computes if one.kind[:7] == kind[:7]])
        first = next(at for at, one in enumerate(computes) if one.kind == BACKWARD)
        if first >= 2:  # with a pipeline, the first backward transfers are posted one forward pass earlier
            for kind in ("backward-recv", "backward-send"):
                self._wait((kind, 0, stage), _name(computes[first - 2]))

    def _match(self, stage: int, kind: str, transfers: Sequence[Operation], computes: Sequence[Operation]) -> None:
        """Find the computation that each transfer is for, and the peer's transfer.

        Profilers also record transfers that were never begun: before the first or after the last computation, and at
        both ends of the model.
        """
        sends = kind.endswith("send")
        last_start, first_end = max(one.start_s for one in computes), min(one.end_s for one in computes)
        real = [
            one
            for one in transfers
            if (one.end_s >= first_end - NEAR_S if sends else one.start_s <= last_start + NEAR_S)
        ]
        outside = [one for one in transfers if one not in real]
        self.groups += [(_name(one),) for one in outside]
        at = 0
        if len(real) != len(computes):
            if real and len(real) + 1 != len(computes):
                raise WhatIfError(
                    f"stage {stage} has {len(computes)} {computes[0].kind} but {len(real)} {kind}: this pipeline "
                    "schedule is not known"
                )
            at = 0 if sends else 1  # the first receive was not recorded
        peer, away = SENDS_AND_RECEIVES[kind]
        chunks = self._stages * (1 + max(one.model_chunk for one in self._operations.values()))
        count = 0
        for transfer in real:
            name = _name(transfer)
            compute = self._operations.get((computes[0].kind, at, stage))
            if compute is None:
                raise WhatIfError(f"stage {stage}: {kind} {transfer.number} belongs to no computation")
            if sends:
                self._wait(name, _name(compute))
            else:
                self._wait(_name(compute), name)
                self._wait(name, (compute.kind, at - 1, stage))
            if 0 <= compute.global_chunk + away < chunks:
                other = (stage + away) % self._stages
                key = (kind, stage, count) if sends else (peer, other, count)
                self._pairs[key].append(name)
                count += 1
            else:
                self.groups.append((name,))
            at += 1

    def _add_replicas(self, stage: int) -> None:
        self._chain([_name(one) for one in self._of(stage, GATHER, SCATTER)])
        computes = self._of(stage, FORWARD, BACKWARD)
        gathers = sorted(self._of(stage, GATHER), key=lambda one: -one.number)
        for chunk, gather in _first_of_each_chunk(gathers).items():
            forward = next((one for one in computes if one.kind == FORWARD and one.model_chunk == chunk), None)
            if forward is not None:
                self._wait(_name(forward), _name(gather))
        scatters = sorted(self._of(stage, SCATTER), key=lambda one: one.number) if self._overlaps else []
        for chunk, scatter in _first_of_each_chunk(scatters).items():
            backward = [one for one in computes if one.kind == BACKWARD and one.model_chunk == chunk]
            if backward:
                self._wait(_name(scatter), _name(max(backward, key=lambda one: one.end_s)))

    def _add_end_of_step(self, stage: int, has_replicas: bool) -> None:
        last = max(self._of(stage, FORWARD, BACKWARD), key=lambda one: one.end_s)
        collect = (GC, 0, stage)
        begun: list[Name] = [collect] if collect in self.before else [_name(last)]
        self._wait(collect, _name(last))
        scatters = [_name(one) for one in sorted(self._of(stage, SCATTER), key=lambda one: one.number)]
        at_the_ends = [(EMBEDDING, 0, stage)] if stage in (0, self._stages - 1) else []
        end: list[Name] = [(CLIP, 0, stage), (OPTIMIZER, 0, stage)]
        chain: list[Name] = [(LAYERNORM, 0, stage), *at_the_ends]
        if has_replicas and self._overlaps:
            begun = [*scatters[-1:], *begun]
            chain.append((SEPARATE, 0, stage))
        elif has_replicas:
            chain += scatters
        self._chain([*chain, *end], begun)

    def _add_groups_of_stages(self, has_replicas: bool) -> None:
        there = self.before
        if has_replicas:
            self.groups += [(name,) for name in there if name[0] in (GATHER, SCATTER, SEPARATE)]
        ends = sorted({0, self._stages - 1})
        for kind, stages in ((EMBEDDING, ends), (CLIP, range(self._stages))):
            members = tuple((kind, 0, stage) for stage in stages if (kind, 0, stage) in there)
            self.groups += [members] if members else []

    def _ordered(self) -> list[tuple[tuple[Name, ...], bool]]:
        """Groups and single operations, each after all that it waits for. Raises WhatIfError for a circle."""
        unit_of: dict[Name, tuple[Name, ...]] = {name: group for group in self.groups for name in group}
        units = {name: unit_of.get(name, (name,)) for name in self.before}
        waits = {unit: {units[one] for name in unit for one in self.before[name]} - {unit} for unit in units.values()}
        waited: dict[tuple[Name, ...], list[tuple[Name, ...]]] = defaultdict(list)
        for unit, others in waits.items():
            for other in others:
                waited[other].append(unit)
        left = {unit: len(others) for unit, others in waits.items()}
        ready = [unit for unit, count in left.items() if count == 0]
        order = []
        while ready:
            unit = ready.pop()
            order.append((unit, unit[0] in unit_of))
            for other in waited[unit]:
                left[other] -= 1
                if left[other] == 0:
                    ready.append(other)
        if len(order) != len(left):
            raise WhatIfError("operations wait for each other in a circle: this pipeline schedule is not known")
        return order


def analyse(operations: Iterable[Operation]) -> WhatIf:
    """What slow operations cost, as the study has it. Raises WhatIfError."""
    timeline = Timeline(operations)
    measured, real = fmean(timeline.measured()), timeline.durations()
    usual = timeline.usual(real)
    simulated_s, usual_s = fmean(timeline.step_s(real)), fmean(timeline.step_s(usual))
    first = [timeline.operations(name)[0] for name in timeline.names]
    replicas = sorted({dp for _, dp in timeline.lanes})
    kinds = sorted({_pipeline_direction(one.kind) for one in first})

    def slowdown(chosen: Callable[[Operation], bool]) -> float:
        return fmean(timeline.step_s(timeline.mixed(usual, real, chosen))) / usual_s

    by_dp_rank = {dp: slowdown(lambda one, dp=dp: one.dp_rank == dp) for dp in replicas}  # type: ignore[misc]
    by_stage = {at: slowdown(lambda one, at=at: one.stage == at) for at in range(timeline.stages)}  # type: ignore[misc]
    by_kind = {kind: slowdown(lambda one, kind=kind: _pipeline_direction(one.kind) == kind) for kind in kinds}  # type: ignore[misc]
    worst = _worst_ranks(timeline, by_dp_rank, by_stage)

    def share(chosen: Callable[[Operation], bool]) -> Share:
        without_s = fmean(timeline.step_s(timeline.mixed(real, usual, chosen)))
        alone_s = fmean(timeline.step_s(timeline.mixed(usual, real, chosen)))
        lost = simulated_s - usual_s
        if lost <= 0:
            return Share(without_s, alone_s, 0.0, 0.0)
        return Share(without_s, alone_s, (simulated_s - without_s) / lost, (alone_s - usual_s) / lost)

    return WhatIf(
        steps=tuple(timeline.steps),
        measured_s=measured,
        simulated_s=simulated_s,
        usual_s=usual_s,
        launch_slowdown=measured / simulated_s,
        slowdown=simulated_s / usual_s,
        by_dp_rank=by_dp_rank,
        by_stage=by_stage,
        by_kind=by_kind,
        worst_ranks=tuple(sorted(worst)),
        worst=share(lambda one: one.rank in worst),
        last_stage=share(lambda one: one.stage == timeline.stages - 1),
        left_out=timeline.left_out,
    )


def _worst_ranks(timeline: Timeline, by_dp_rank: Mapping[int, float], by_stage: Mapping[int, float]) -> Collection[int]:
    """The worst few: a rank is as bad as its data-parallel rank and its stage both are."""
    places = {one.rank: (one.dp_rank, one.stage) for name in timeline.names for one in timeline.operations(name)}
    score = {rank: min(by_dp_rank[dp], by_stage[stage]) for rank, (dp, stage) in places.items()}
    ordered = sorted(score, key=lambda rank: (-score[rank], rank))
    return set(ordered[: math.ceil(len(ordered) * WORST_SHARE)])


def _name(one: Operation) -> Name:
    return one.kind, one.number, one.stage


def _pipeline_direction(kind: str) -> str:
    return f"{kind.split('-')[0]}-pp-comm" if kind in SENDS_AND_RECEIVES else kind


def _first_of_each_chunk(operations: Iterable[Operation]) -> dict[int, Operation]:
    found: dict[int, Operation] = {}
    for one in operations:
        found.setdefault(one.model_chunk, one)
    return found
