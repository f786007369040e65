"""Which rank the others wait for, by the stacks of all ranks, and where each rank is, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from diagnosis.incident import FlightReport
from diagnosis.signals import Evidence, RankStack
from diagnosis.stacks import Activity, StackGroup, activity, bare, group, is_native, place, tells_of

WAITING: Final[frozenset[Activity]] = frozenset({"collective", "gpu_sync"})
"""A rank that does this may be waiting for another one."""
MAX_EVIDENCE: Final = 6
DOING: Final[dict[Activity, str]] = {
    "collective": "waiting in a collective",
    "checkpoint": "saving or loading a checkpoint",
    "evaluation": "evaluating",
    "data": "getting data",
    "compile": "compiling",
    "teardown": "tearing the process group down already",
    "sleep": "sleeping",
    "lock": "waiting for a lock or another process",
    "gpu_sync": "waiting for its GPU",
    "compute": "running code",
    "unknown": "doing something unknown",
}


def origin(stacks: Iterable[RankStack]) -> tuple[tuple[int, ...], Activity, str] | None:
    """The ranks that the others wait for, what they do, and the reason in words; None if stacks do not show it.

    Processes whose ranks are not known (`read_dump`) count, and are named only in words.
    """
    known = list(stacks)
    groups = group(known)
    waiting = [one for one in groups if one.activity in WAITING]
    apart = [one for one in groups if one.activity not in WAITING]
    if _moves(known, {rank for one in apart for rank in one.ranks}):
        return None
    if not waiting or sum(len(one.ranks) for one in apart) > sum(len(one.ranks) for one in waiting):
        return None
    if apart:
        doing = (
            apart[0] if len(apart) == 1 else min(apart, key=lambda one: (one.activity == "teardown", len(one.ranks)))
        )
        ranks = sorted(rank for one in apart if one.activity == doing.activity for rank in one.ranks)
        peers = [rank for one in waiting for rank in one.ranks]
        why = f"{_are(ranks)} {DOING[doing.activity]} in {_where(doing)} while {_are(peers)} {_wait(waiting[0])}"
        return tuple(rank for rank in ranks if rank >= 0), doing.activity, why
    return _other_collective([one for one in groups if one.activity == "collective"], len(groups))


def _moves(stacks: Iterable[RankStack], ranks: Collection[int]) -> bool:
    """One of these ranks waited like the others in another sample: the job moves."""
    return any(one.rank in ranks and one.frames and activity(one) in WAITING for one in stacks)


def _other_collective(groups: list[StackGroup], of: int) -> tuple[tuple[int, ...], Activity, str] | None:
    """One rank, or few of many, wait in another call than all others. Stages of a pipeline do so normally."""
    calls: dict[tuple[str, str], list[int]] = {}
    for one in groups:
        calls.setdefault((_call(one), _where(one)), []).extend(one.ranks)
    if len(groups) < of or len(calls) != 2:
        return None
    (usual, many), (other, few) = sorted(calls.items(), key=lambda item: -len(item[1]))
    if usual[0] == other[0] or 3 * len(few) > len(many):
        return None
    why = f"{_are(few)} waiting in {other[0]} ({other[1]}), {_are(many)} in {usual[0]} ({usual[1]})"
    return tuple(sorted(rank for rank in few if rank >= 0)), "collective", why


def explain(
    stacks: Iterable[RankStack], flight: FlightReport | None = None, nodes: Mapping[int, str] | None = None
) -> tuple[Evidence, ...]:
    """Where the ranks are, one line for each group of equal stacks: culprits of the flight recorder first, then the
    odd ones, then those that wait."""
    groups = group(stacks)
    culprits = frozenset(() if flight is None else flight.culprit_ranks)
    groups.sort(
        key=lambda one: (culprits.isdisjoint(one.ranks), one.activity in (*WAITING, "teardown"), len(one.ranks))
    )
    return tuple(_line(one, flight, culprits, nodes or {}) for one in groups[:MAX_EVIDENCE])


def _line(one: StackGroup, flight: FlightReport | None, culprits: frozenset[int], nodes: Mapping[int, str]) -> Evidence:
    note = ""
    if flight is not None and flight.collective_seq is not None and not culprits.isdisjoint(one.ranks):
        what = f"collective {flight.collective_seq} of group {flight.process_group}"
        if flight.kind == "missing_rank" and one.activity not in WAITING:
            note = f"; it did not enter {what}"
        elif flight.kind == "stalled_rank":
            note = f"; it does not complete {what}"
    call = f", at {_call(one)}" if one.frames and _call(one) != _where(one).split(" ", 1)[0] else ""
    rank = next((rank for rank in one.ranks if rank in culprits), one.ranks[0])
    text = f"{names(one.ranks)}: {one.activity} in {_where(one)}{call}{note}"
    return Evidence(text=text, source="stacks", rank=rank if rank >= 0 else None, node=nodes.get(rank, ""))


def _call(one: StackGroup) -> str:
    """The function that waits: of Python, else the outermost of compiled code that has a name."""
    python = next((bare(frame) for frame in one.frames if not is_native(frame.file)), "")
    if python:
        return python
    told = next((frame.function for frame in one.frames if tells_of(frame) is not None), "")
    return told or one.frames[0].function


def _wait(biggest: StackGroup) -> str:
    return "waiting for the GPU" if biggest.activity == "gpu_sync" else f"waiting in {_call(biggest)}"


def _are(ranks: Iterable[int]) -> str:
    known = set(ranks)
    return f"{names(known)} {'is' if len(known) == 1 else 'are'}"


def _where(one: StackGroup) -> str:
    return place(RankStack(rank=one.ranks[0], frames=one.frames))


def names(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2, 3, 4, 5 and 2 more`, `process 4312` where only that is known."""
    known = sorted(set(ranks))
    word = "rank" if not known or known[-1] >= 0 else "process"
    plural = "" if len(known) == 1 else "s" if word == "rank" else "es"
    shown = ", ".join(str(abs(rank)) for rank in known[:6])
    return f"{word}{plural} {shown}" + (f" and {len(known) - 6} more" if len(known) > 6 else "")
