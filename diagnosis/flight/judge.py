"""What the flight recorders of several ranks say together: who holds the others up, and in which collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from diagnosis import stacks as stack_reading
from diagnosis.flight import waits
from diagnosis.flight.dumps import RankDump
from diagnosis.flight.mismatch import Mismatch, judge_order, next_call
from diagnosis.flight.mismatch import find as find_mismatch
from diagnosis.flight.waits import Picture, Wait, Waits, join
from diagnosis.log_evidence import FlightKind, FlightReport, Slowdown
from diagnosis.signals import Evidence, Frame, RankStack
from diagnosis.stuck import names

MOST = 0.15
"""A place where waiting ends counts as an origin, too, when so much of the most waited-for one's ranks wait for it."""
MOST_OF_GLOO = 0.75
"""gloo records no send and no receive: there innocent ranks seem to wait for nobody, too."""
MAX_NAMED = 64
SURE = 0.5


class _Found(NamedTuple):
    kind: FlightKind
    culprits: tuple[int, ...]
    wait: Wait | None
    why: str
    confidence: float


def analyse(
    dumps: Iterable[RankDump], stacks: Sequence[RankStack] = (), slow: Sequence[Slowdown] = ()
) -> FlightReport | None:
    """The origin of a hang, or a straggler; None when nothing is wrong: no rank waits, and none is always late.

    `stacks` (py-spy's, of some or all ranks) tell who waits in a call that no recorder has: gloo's send and receive.
    `slow`: what `diagnosis.stragglers.collectives` says of the same dumps.
    """
    picture = join(dumps)
    if not picture.dumps:
        return None
    activities = {one.rank: stack_reading.activity(one) for one in stacks if one.frames}
    mismatch = find_mismatch(picture)
    graph = waits.build(picture)
    if mismatch and mismatch.p2p and not mismatch.odd:
        wait = Wait(mismatch.usual_rank, mismatch.group, mismatch.seq, True)
        if skipped := _of_skipped(picture, wait):
            return _report(picture, skipped, graph, stacks)
    if mismatch and mismatch.hot:
        return _of_mismatch(picture, mismatch, graph, stacks)
    found = _origin(picture, graph, activities)
    if mismatch and (found is None or found.confidence < 0.5) and graph.waiting:
        return _of_mismatch(picture, mismatch, graph, stacks)
    found = _of_late(slow, found) or found
    return _report(picture, found, graph, stacks) if found else None


def _of_late(slow: Sequence[Slowdown], now: _Found | None) -> _Found | None:
    """A rank that always comes late, where nobody waits just now, or for that one only."""
    late = next((one for one in slow if one.kind in ("rank", "node")), None)
    if late is None or (now and not (now.kind == "missing_rank" and set(now.culprits) <= set(late.ranks))):
        return None
    return _Found("straggler", late.ranks, now.wait if now else None, late.why, min(late.confidence, 0.8))


def _of_mismatch(picture: Picture, found: Mismatch, graph: Waits, stacks: Sequence[RankStack]) -> FlightReport:
    confidence = {"majority": 0.92, "siblings": 0.85, "habit": 0.7, "nobody": 0.6}[found.by] - (0 if found.hot else 0.3)
    who = names(found.odd) if found.odd else "the ranks"
    usual, other = (str(one) if one else "another call" for one in (found.usual, found.other))
    what = "point-to-point call" if found.p2p else "collective"
    because = {"siblings": ", as all groups of its kind did", "habit": ", as always before"}.get(found.by, "")
    why = (
        f"{who} disagreed on {what} {found.seq} of {found.group}: "
        f"{other} (rank {found.other_rank}) against {usual} (rank {found.usual_rank}{because})"
    )
    wait = Wait(found.usual_rank, found.group, found.seq, found.p2p)
    report = _report(picture, _Found(found.kind, found.odd, wait, why, round(confidence, 2)), graph, stacks)
    calls = tuple(
        Evidence(
            text=f"rank {rank} called {call or 'something else'} as {what} {found.seq} of {found.group}",
            source="flight recorder",
            rank=rank,
        )
        for rank, call in ((found.other_rank, found.other), (found.usual_rank, found.usual))
    )
    return structs.replace(report, evidence=(*calls, *report.evidence)[:6])


def _origin(
    picture: Picture, graph: Waits, activities: Mapping[int, str], *, fronts_only: bool = False
) -> _Found | None:
    ends = waits.sinks(graph)
    ends = [one for one in ends if one.waited_by or len(one.ranks) > 1]
    ends = _through_unrecorded(ends, graph, activities)
    if not ends:
        return _all_there(picture, graph)
    score = max(_weight(one) for one in ends)
    least = (MOST_OF_GLOO if _is_gloo(picture) else MOST) * score
    chief = [one for one in ends if _weight(one) >= least]
    cycles = [one for one in chief if len(one.ranks) > 1]
    if cycles:
        found = _of_cycle(picture, graph, cycles[0])
        if found.confidence < SURE and not fronts_only:
            graph = waits.build(picture, fronts_only=True)
            return _origin(picture, graph, activities, fronts_only=True) or found
        return found
    return _of_ends(picture, graph, chief, activities)


def _is_gloo(picture: Picture) -> bool:
    return any(one.op.startswith("gloo") for dump in picture.dumps.values() for one in dump.known.values())


def _weight(one: waits.Sink) -> int:
    return one.waited_by + (len(one.ranks) if len(one.ranks) > 1 else 0)


def _through_unrecorded(ends: list[waits.Sink], graph: Waits, activities: Mapping[int, str]) -> list[waits.Sink]:
    """Without those whose stacks show them waiting in a call that is not recorded, where others do not wait."""
    idle = {one.ranks[0] for one in ends if len(one.ranks) == 1 and one.ranks[0] not in graph.waiting}
    waiting = {rank for rank in idle if activities.get(rank) == "collective"}
    busy = {rank for rank, doing in activities.items() if doing not in ("collective", "unknown")}
    if not waiting or not busy - graph.waiting.keys():
        return ends
    kept = [one for one in ends if one.ranks[0] not in waiting]
    known = {rank for one in kept for rank in one.ranks}
    more = [waits.Sink((rank,), len(waiting)) for rank in sorted(busy - graph.waiting.keys() - known)]
    return [*kept, *more]


def _of_cycle(picture: Picture, graph: Waits, cycle: waits.Sink) -> _Found:
    orders = judge_order(picture, cycle.ranks)
    odd = tuple(rank for rank in cycle.ranks if orders.get(rank) == "deviates")
    involved = [graph.waiting[rank] for rank in cycle.ranks if rank in graph.waiting]
    wait = _wait_for(picture, graph, odd) or (involved[0] if involved else None)
    p2p = any(one.p2p for one in involved)
    kind: FlightKind = "p2p_missing" if p2p else "order_inversion"
    if not odd:
        why = f"{names(cycle.ranks)} wait for each other in a ring, and none is known to call out of order"
        return _Found(kind, cycle.ranks if len(cycle.ranks) <= 2 else (), wait, why, 0.4)
    where = f" while rank {wait.rank} waits in {_call(wait)}" if wait else ""
    what = "skipped or added a point-to-point call" if p2p else "made calls in another order than ranks alike"
    why = f"{names(odd)} {what}{where}; {names(cycle.ranks)} wait for each other"
    return _Found(kind, odd, wait, why, 0.85 if len(odd) == 1 else 0.6)


def _of_ends(
    picture: Picture, graph: Waits, chief: Sequence[waits.Sink], activities: Mapping[int, str]
) -> _Found | None:
    alive = tuple(sorted(rank for one in chief for rank in one.ranks if not picture.absent(rank)))
    dead = tuple(sorted(rank for one in chief for rank in one.ranks if picture.absent(rank)))
    lagging = _lagging(picture, graph) if dead and not alive else None
    if lagging and lagging.wait and not any(picture.absent(member) for member in lagging.wait.group.members):
        return lagging  # else its call waits for one that is gone
    if dead and not _rather_alive(picture, chief):
        return _of_absent(picture, graph, dead, alive)
    ranks = alive
    wait = _wait_for(picture, graph, ranks)
    stuck = tuple(rank for rank in ranks if rank in graph.waiting)
    if stuck and len(stuck) == len(ranks):
        return _of_stuck(picture, graph, ranks)
    ranks = tuple(rank for rank in ranks if rank not in graph.waiting) or ranks
    orders = judge_order(picture, ranks)
    skipped = tuple(rank for rank in ranks if orders.get(rank) == "deviates" and rank in graph.only_p2p)
    if skipped:
        why = f"{names(skipped)} went on without the call that rank {wait.rank if wait else '?'} waits for"
        return _Found("p2p_missing", skipped, wait, why, 0.75)
    waiters = len(graph.waiting)
    confidence = 0.9 if len(ranks) <= max(1, waiters // 2) else 0.6 if len(ranks) <= waiters else 0.4
    confidence *= 0.8 if graph.stale or len(picture.dumps) < len(picture.world) else 1.0
    idle = sorted(picture.dumps.keys() - graph.waiting.keys() - set(ranks))
    perhaps = ""
    if _is_gloo(picture) and idle and not all(rank in activities for rank in ranks):
        confidence *= 0.4  # others wait for nobody, either: in sends and receives, which gloo does not record
        perhaps = f"; it may wait for {names(idle)} itself, in a send or receive, which gloo does not record"
    if any(activities.get(rank) == "collective" for rank in ranks):
        confidence = 0.3  # waits in what is not recorded, and nobody knows for whom
    doing = {activities[rank] for rank in ranks if rank in activities} - {"unknown"}
    seen = f", seen in {' or '.join(sorted(doing))}" if doing else ""
    who = f"{waiters} others wait" if waiters > 1 else "another waits"
    why = f"{names(ranks)} did not come to {_call(wait)}{seen}: {who} for that, directly or not{perhaps}"
    return _Found("missing_rank", ranks, wait, why, round(confidence, 2))


def _rather_alive(picture: Picture, chief: Sequence[waits.Sink]) -> bool:
    """A rank that has a dump, and in it waits for nobody: that another died, or lost its dump, does not explain it.

    Unless it runs on gloo, where a rank's end makes the calls of its peers fail at once: they wait no longer.
    """
    weights = {picture.absent(one.ranks[0]): one.waited_by for one in reversed(chief)}
    return not _is_gloo(picture) and 2 * weights.get(False, 0) >= weights.get(True, 0)


def _of_absent(picture: Picture, graph: Waits, dead: tuple[int, ...], alive: tuple[int, ...]) -> _Found:
    """Only who is waited for: a rank without a dump may be well, and a set of dumps may be part of one."""
    gone = sum(1 for rank in picture.world if picture.absent(rank))
    wait = _wait_for(picture, graph, dead)
    many = gone > max(1, len(picture.world) // 4)
    confidence = 0.35 if many else 0.8 if len(dead) == 1 and not alive else 0.4
    why = f"{names(dead)} left no dump, and {_call(wait)} waits for it"
    if many:
        why += f" (there are dumps of {len(picture.dumps)} of {len(picture.world)} ranks only)"
    return _Found("dead_rank", dead, wait, why, confidence)


def _of_stuck(picture: Picture, graph: Waits, ranks: tuple[int, ...]) -> _Found:
    lagging = tuple(rank for rank in ranks if graph.lagging[rank])
    if not lagging and (idle := waits.unstarted(picture, ranks)) and len(idle) < len(ranks):
        return _unstarted(graph, idle)
    culprits = lagging or ranks
    own = graph.waiting[culprits[0]]
    if own.p2p and not lagging and (skipped := _of_skipped(picture, own)):
        return skipped
    why = f"{names(culprits)} did not complete {_call(own)}"
    why += ", which its peers completed" if lagging else "; all members have called it, and older calls wait for nobody"
    return _Found("stalled_rank", culprits, own, why, 0.75 if lagging and len(lagging) <= 2 else 0.45)


def _of_skipped(picture: Picture, wait: Wait) -> _Found | None:
    orders = judge_order(picture, wait.group.members[:MAX_NAMED])
    ranks = tuple(rank for rank, one in orders.items() if one == "deviates")
    why = f"{names(ranks)} made calls in another order than ranks alike, and {_call(wait)} has no answer"
    return _Found("p2p_missing", ranks, wait, why, 0.6) if ranks else None


def _unstarted(graph: Waits, ranks: tuple[int, ...]) -> _Found:
    wait = graph.waiting[ranks[0]]
    why = f"{names(ranks)} called {_call(wait)}, and the GPU has not begun it; those of others have"
    return _Found("stalled_rank", ranks, wait, why, 0.7 if len(ranks) <= 2 else 0.5)


def _lagging(picture: Picture, graph: Waits) -> _Found | None:
    """A few ranks whose GPUs do not complete what those of their peers completed."""
    most = max(graph.lagging.values(), default=0)
    ranks = tuple(sorted(rank for rank, count in graph.lagging.items() if count == most))
    if not ranks or len(ranks) > max(2, len(picture.dumps) // 8):
        return None
    wait = graph.waiting[ranks[0]]
    why = f"{names(ranks)} did not complete {_call(wait)}, which its peers completed"
    return _Found("stalled_rank", ranks, wait, why, 0.7)


def _all_there(picture: Picture, graph: Waits) -> _Found | None:
    """Nobody is missed anywhere; what is not completed is with the GPUs and the network."""
    if not graph.waiting:
        return None
    if lagging := _lagging(picture, graph):
        return lagging
    unstarted = waits.unstarted(picture, tuple(graph.waiting))
    first = min(graph.waiting.values(), key=lambda one: one.rank)
    if unstarted and 2 * len(unstarted) <= len(graph.waiting):
        return _unstarted(graph, unstarted)
    why = f"all ranks have called {_call(first)}, and it does not complete: no rank stands out"
    return _Found("stalled_rank", (), first, why, 0.25)


def _wait_for(picture: Picture, graph: Waits, ranks: Sequence[int]) -> Wait | None:
    """The call that the first of `ranks` has to come to next, where siblings tell; else what was called first."""
    rank = next((rank for rank in ranks if rank in graph.why), None)
    if rank is None:
        return None
    expected = next_call(picture, rank)
    calls = [one for one in graph.why[rank] if (one.group.kind, one.p2p) == expected] or graph.why[rank]
    return min(calls, key=lambda one: one.since)


def _call(wait: Wait | None) -> str:
    if wait is None:
        return "a call"
    return f"{'point-to-point call' if wait.p2p else 'collective'} {wait.seq} of {wait.group}"


def _report(picture: Picture, found: _Found, graph: Waits, stacks: Sequence[RankStack]) -> FlightReport:
    wait = found.wait
    waiting = tuple(sorted(rank for rank in graph.waiting if rank not in found.culprits))
    shown = (*found.culprits[:1], *((wait.rank,) if wait else ()), *waiting[:1])
    texts = [_place(picture, rank, found, stacks) for rank in dict.fromkeys(shown)]
    problems = [*picture.problems]
    for rank, dump in picture.dumps.items():
        problems += [f"rank {rank}: {problem}" for problem in dump.problems]
    return FlightReport(
        kind=found.kind,
        culprit_ranks=found.culprits[:MAX_NAMED],
        process_group=str(wait.group) if wait else "",
        collective_seq=wait.seq if wait and wait.seq >= 0 and not wait.p2p else None,
        why=found.why,
        confidence=found.confidence,
        waiting_ranks=waiting[:MAX_NAMED],
        evidence=tuple(one for one in texts if one)[:2],
        ranks_seen=len(picture.dumps),
        problems=tuple(problems[:20]),
    )


def _place(picture: Picture, rank: int, found: _Found, stacks: Sequence[RankStack]) -> Evidence | None:
    """Where the rank is, by its stack if there is one, else by the last call that its recorder has."""
    stack = next((one for one in stacks if one.rank == rank and one.frames), None)
    role = "held up the others" if rank in found.culprits else "waits"
    if stack:
        where = f"{stack_reading.activity(stack)} in {stack_reading.place(stack)}, at {stack.frames[0].function}"
        return Evidence(text=f"rank {rank} ({role}): {where}", source="stacks", rank=rank)
    dump = picture.dumps.get(rank)
    if dump is None:
        return Evidence(text=f"rank {rank} left no flight recorder dump", source="flight recorder", rank=rank)
    at = dump.front_at()
    if at is None and dump.order:
        at = dump.order[-1]
    if at is None:
        return None
    channel = dump.channels[at]
    index = channel.pending if channel.pending is not None else len(channel.seqs) - 1
    called = dump.known.get(channel.calls[index])
    doing = "waits in" if channel.pending is not None else "last completed"
    frames = dump.frames.get((at, index), ())
    where = f", called in {_own(frames)}" if frames else ""
    group = picture.groups[picture.of[rank, at]]
    text = f"rank {rank} ({role}): {doing} {called or 'call'}, number {channel.seqs[index]} of {group}{where}"
    return Evidence(text=text[:500], source="flight recorder", rank=rank)


def _own(frames: tuple[Frame, ...]) -> str:
    return stack_reading.place(RankStack(rank=0, frames=frames))
