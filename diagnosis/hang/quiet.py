"""Is this quiet a hang? The judgement on a suspicion that is open, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from diagnosis import flight
from diagnosis.hang.pace import Pace, Phase
from diagnosis.hang.watched import EXCUSED, WatchedRank, names
from diagnosis.incident import HangReport
from diagnosis.signals import RankFlight
from diagnosis.stacks import doing as stack_reading

QUEUED_S: Final = 30.0
WORLD: Final = "0"
"""The process group of all ranks has this id on every rank; the ids of others are each rank's own."""
END_STUCK_S: Final = 20.0
"""A rank that stays in one place this long, without CPU time or I/O, when all steps are made and others have ended,
does not come to its end: a deadlock in a destructor (torch 2.13's DDP reducer has one), a lock, a dead service."""


Disagreement = tuple[tuple[int, ...], str]
"""Ranks that called another collective than the others (nobody where it is one against one), and why; "" for none."""


def disagreement(flights: Iterable[RankFlight]) -> Disagreement:
    """What the flight recorders of living ranks say of collectives that do not fit."""
    report = flight.analyse(flight.from_rank_flights(flights))
    if report is None or report.kind not in ("collective_type_mismatch", "size_mismatch", "dtype_mismatch"):
        return (), ""
    return report.culprit_ranks, report.why


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """The job at one moment of a suspicion."""

    now: float
    quiet_s: float
    held: bool
    """The suspicion is old enough to be confirmed."""
    phase: Phase
    ranks: Mapping[int, WatchedRank]
    """The live ones."""
    ended: tuple[int, ...]
    """Ranks that ended with code 0."""
    complete: bool
    """The last step that the output names was reached."""
    ends_known: bool
    """The output names a last step at all."""
    disagreement: Disagreement

    @property
    def waiting(self) -> list[int]:
        return [number for number, rank in self.ranks.items() if rank.waits]

    @property
    def others(self) -> list[int]:
        return [number for number, rank in self.ranks.items() if not rank.waits]

    @property
    def fresh(self) -> bool:
        return all(rank.fresh(self.now) for rank in self.ranks.values())


def pause_phase(scene: Scene) -> Phase | None:
    """The phase of this pause: what those do that are not merely waiting."""
    phases = (scene.ranks[number].pause_phase() for number in scene.others)
    return next((phase for phase in phases if phase is not None), None)


def judge(scene: Scene, pace: Pace) -> HangReport | None:
    """The report that confirms the suspicion; None while it may be an honest pause."""
    waiting, others = scene.waiting, scene.others
    report: HangReport | None = None
    if scene.ended:
        report = _end(scene, waiting, others) if scene.held and scene.fresh else None
    elif scene.held and scene.phase in ("steady", "end"):
        report = _together(scene, pace, waiting, others)
    if report is None:
        report = _by_limit(scene, pace, others or waiting)
    return report


def _together(scene: Scene, pace: Pace, waiting: list[int], others: list[int]) -> HangReport | None:
    """All ranks live: compare what they do."""
    ranks = scene.ranks
    if waiting and others and all(ranks[number].is_stuck(scene.now) for number in others):
        return _missing(scene, waiting, others)
    if not scene.fresh:
        return None  # the rank that all wait for may be one of which nothing is known
    if scene.complete and all(rank.at_end for rank in ranks.values()):
        return _report(scene, "exit_hang", sorted(ranks), "the work is complete and the end hangs on all ranks")
    if not others and _settled(ranks.values()):
        return _all_waiting(scene, pace)
    return None


def _settled(ranks: Iterable[WatchedRank]) -> bool:
    """Nobody changed its place since the suspicion, where stacks are known at all."""
    return all(not rank.stack_changed and (rank.stack is None or rank.same_count >= 2) for rank in ranks)


def _missing(scene: Scene, waiting: list[int], others: list[int]) -> HangReport:
    stack = scene.ranks[others[0]].stack
    where = stack_reading.place(stack) if stack is not None else "an unknown place"
    why = (
        f"{names(waiting)} waited {scene.quiet_s:.1f} s in a collective that {names(others)} did not enter: "
        f"rank {others[0]} stays in {where}"
    )
    return _report(scene, "missing", sorted(others), why)


def _all_waiting(scene: Scene, pace: Pace) -> HangReport | None:
    """Nobody does anything but wait, by the counters. Ranks that call collectives synchronously are seen in them.

    Others may only have queued them: with NCCL the counters run ahead while GPUs compute a long step, and how far
    differs from rank to rank. There the counters alone say nothing until the quiet is longer than any before.
    """
    odd, why = scene.disagreement
    if why:
        return _report(scene, "mismatch", list(odd), why)
    behind = _behind(scene.ranks)
    synchronous = all(rank.activity == "collective" for rank in scene.ranks.values())
    if synchronous and behind:
        why = f"all ranks wait in collectives and {names(behind)} entered fewer of them than the others"
        return _report(scene, "mismatch", behind, why)
    if not synchronous and scene.quiet_s < max(QUEUED_S, 3.0 * max(pace.longest_s.values(), default=0.0)):
        return None
    why = f"all {len(scene.ranks)} ranks wait in collectives that do not complete"
    return _report(scene, "all_waiting", behind, f"{why}; {names(behind)} entered the fewest" if behind else why)


def _behind(ranks: Mapping[int, WatchedRank]) -> list[int]:
    """Ranks that entered fewer collectives of the world group than most; other groups' ids mean different groups."""
    counts = {number: rank.sample.groups[WORLD][0] for number, rank in ranks.items() if WORLD in rank.sample.groups}
    most = max(counts.values(), default=0)
    behind = sorted(number for number, count in counts.items() if count < most)
    return behind if len(counts) == len(ranks) and 2 * len(behind) <= len(counts) else []


def _end(scene: Scene, waiting: list[int], others: list[int]) -> HangReport | None:
    """Some ranks ended with code 0 and the rest is quiet."""
    ranks = scene.ranks
    live = sorted(ranks)
    if any(ranks[number].activity in EXCUSED or ranks[number].pause_phase() for number in others):
        return None
    if not all(ranks[number].tears_down for number in others):
        stuck = scene.complete and scene.quiet_s >= END_STUCK_S and all(r.is_stuck(scene.now) for r in ranks.values())
        if not stuck:
            return None  # somebody still does something of its own
    tearing_down = all(rank.tears_down or rank.at_end for rank in ranks.values() if rank.stack is not None)
    seen = any(rank.stack is not None for rank in ranks.values())
    if scene.complete or (not scene.ends_known and not waiting and tearing_down and seen):
        why = f"{names(scene.ended)} ended well, the work is complete and {names(live)} does not end"
        return _report(scene, "exit_hang", live, why)
    if waiting:
        why = f"{names(scene.ended)} ended with code 0 while {names(waiting)} still waits in a collective"
        return _report(scene, "early_exit", list(scene.ended), why)
    return None


def _by_limit(scene: Scene, pace: Pace, doing: list[int]) -> HangReport | None:
    """Nothing tells: only time does."""
    phase = pause_phase(scene) or scene.phase
    limit = pace.phase_limit_s(phase)
    ranks = scene.ranks
    if any(ranks[number].stack_changed for number in doing):
        limit *= 3  # somebody works at something
    elif any(ranks[number].moves_bytes for number in doing):
        limit *= 6  # a large checkpoint is being loaded from slow storage
    if scene.quiet_s < limit or not all(ranks[number].fresh(scene.now) for number in doing):
        return None
    if phase == "end" and scene.ended and scene.complete:
        return _report(scene, "exit_hang", sorted(ranks), "the work is complete and the end hangs", limit)
    named = sorted(doing) if len(doing) < len(ranks) else []
    return _report(scene, "silent", named, f"no progress for {scene.quiet_s:.0f} s in phase {phase}", limit)


def _report(
    scene: Scene,
    kind: Literal["missing", "mismatch", "all_waiting", "silent", "exit_hang", "early_exit"],
    ranks: list[int],
    why: str,
    limit_s: float = 0.0,
) -> HangReport:
    return HangReport(
        kind=kind,
        ranks=tuple(ranks),
        quiet_s=round(scene.quiet_s, 2),
        limit_s=round(limit_s, 2),
        phase=pause_phase(scene) or scene.phase,
        why=why,
    )
