"""What proves that a silence is a hang. Any other is told in words; `recovery.policy` bounds how long it lasts.

An honest wait must never pass for a proof: a rank that sleeps, polls, computes, reads, or waits for a program, a socket
or a file is alive, and from outside nobody can tell whether it comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from diagnosis import flight, stacks
from diagnosis.flight.waits import WaitRing
from diagnosis.hang.ranks import WORLD, WatchedRank
from diagnosis.incident import HangReport
from diagnosis.signals import Frame, RankFlight, rank_names

PLACES: Final = 2
"""A place in the code is known by its innermost frame, or its caller's: the next poll may stand a line further."""


def unproven(
    ranks: Mapping[int, WatchedRank], quiet_s: float, phase: str, step: int | None, *, done: bool = False
) -> HangReport:
    """`done`: ranks have ended well, and all tells that the work is complete: what is left may save what came of it."""
    waiting = [number for number, rank in ranks.items() if rank.waits]
    others = sorted(set(ranks) - set(waiting)) or sorted(ranks)
    first = ranks[others[0]]
    timeouts = [rank.sample.timeout_s for rank in ranks.values() if rank.sample.timeout_s]
    report = HangReport(
        kind="exit_hang" if done else "missing" if len(others) < len(ranks) else "silent",
        ranks=tuple(others),
        quiet_s=round(quiet_s, 2),
        limit_s=0.0,
        phase=phase,
        why="",
        proven=False,
        place=_shown(first),
        elsewhere=sum(1 for number in others if _shown(ranks[number]) != _shown(first)),
        places=remembered(first),
        step=step,
        waiting=len(waiting) if len(others) < len(ranks) else 0,
        timeout_s=min(timeouts) if waiting and timeouts else None,
    )
    return msgspec.structs.replace(report, why=describe(report))


def remembered(rank: WatchedRank) -> tuple[str, ...]:
    """The places by which it is known again where this rank stands."""
    return tuple(f"{one.function} {one.file}:{one.line}" for one in reversed(rank.own[-PLACES:]))


def describe(report: HangReport, quiet_s: float | None = None) -> str:
    """`rank 0 has been in upload (train.py:88) for 40 s; 7 ranks wait for it`."""
    seconds = report.quiet_s if quiet_s is None else quiet_s
    lasts = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    if report.elsewhere:
        who, many = f"rank {report.ranks[0]}", False
    else:
        who, many = rank_names(report.ranks), len(report.ranks) != 1
    where = f"been in {report.place}" if report.place else "shown no progress"
    text = f"{who} {'have' if many else 'has'} {where} for {lasts}"
    if report.elsewhere:
        text += f", {_ranks(len(report.ranks) - 1, 'is', 'are')} somewhere of their own too"
    it = "them" if many or report.elsewhere else "it"
    return text + (f"; {_ranks(report.waiting, 'waits', 'wait')} for {it}" if report.waiting else "")


def _ranks(count: int, one: str, many: str) -> str:
    return f"1 rank {one}" if count == 1 else f"{count} ranks {many}"


def _shown(rank: WatchedRank) -> str:
    if rank.own:
        return _word(rank.own[-1])
    return stacks.place(rank.stack) if rank.stack is not None and rank.stack.frames else ""


def _word(frame: Frame) -> str:
    return f"{stacks.bare(frame)} ({frame.file.rsplit('/', 1)[-1]}:{frame.line})"


LOCKED_S: Final = 2.5
"""No thread of a rank has run for so long, and none can be woken but by another of them."""
DEAD_S: Final = 2.5
"""The main thread is gone for so long without a report of the process's end, which takes milliseconds."""
TEARDOWN_S: Final = 3.0
"""So long a rank stands in the destruction of its process groups while others wait for it."""

Proof = Literal["mismatch", "all_waiting", "exit_hang", "early_exit", "deadlock", "dead", "device", "teardown"]
Disagreement = tuple[tuple[int, ...], str]
"""Ranks that called another collective than the others (nobody where it is one against one), and why; "" for none."""


def disagreement(flights: Iterable[RankFlight]) -> Disagreement:
    """What the flight recorders of living ranks say of collectives that do not fit."""
    report = flight.analyse(flight.from_rank_flights(flights))
    if report is None or report.kind not in ("collective_type_mismatch", "size_mismatch", "dtype_mismatch"):
        return (), ""
    return report.culprit_ranks, report.why


def wait_ring_of(now: float, ranks: Mapping[int, WatchedRank], flights: Iterable[RankFlight]) -> WaitRing | None:
    """Ranks that stand in collectives for which each waits for the next one: nothing ends that."""
    standing = [number for number, rank in ranks.items() if _does_nothing_else(rank, now)]
    unrecorded = [number for number in standing if ranks[number].sends_or_receives]
    # Any rank may be the one that it waits for: that all of them stand has to be known.
    return flight.find_ring(flights, standing, unrecorded if len(standing) == len(ranks) else ())


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """The job at one moment of a silence."""

    now: float
    quiet_s: float
    held: bool
    """It has lasted long enough for two stacks of each rank."""
    ranks: Mapping[int, WatchedRank]
    """The live ones."""
    ended: tuple[int, ...]
    """Ranks that ended with code 0."""
    complete: bool
    """The last step that the output names was reached."""
    ends_known: bool
    """The output names a last step at all."""
    disagreement: Disagreement
    wait_ring: WaitRing | None = None
    """Ranks that wait for each other."""
    ring_is_sure: bool = False
    """None of them has moved since its recorder was read: it is a proof by itself."""
    devices: Mapping[int, str]
    """Rank -> a fatal finding about its GPU or node in this attempt."""

    @property
    def all_known(self) -> bool:
        """Every rank of the job is here or has ended, and was heard of just now."""
        world = max((rank.sample.world for rank in self.ranks.values()), default=0)
        known = 0 < world <= len(self.ranks) + len(self.ended)
        return known and all(rank.fresh(self.now) for rank in self.ranks.values())


def prove(scene: Scene) -> HangReport | None:
    """The report of a proven hang; None while an honest wait would look the same."""
    found = _dead(scene) or _deadlock(scene) or _device(scene)
    if found is not None or not scene.held or not scene.all_known:
        return found
    return _end(scene) if scene.ended else _teardown(scene) or _collectives(scene)


# ----- one rank -----


def _dead(scene: Scene) -> HangReport | None:
    """Its first thread has ended, or all of it has, and nobody gets to know."""
    dead = [
        number
        for number, rank in scene.ranks.items()
        if rank.dead_since is not None and rank.fresh(scene.now) and rank.seen_at - rank.dead_since >= DEAD_S
    ]
    if not dead:
        return None
    return _report(scene, "dead", dead, f"the main thread of {rank_names(dead)} is gone, and the process does not end")


def _deadlock(scene: Scene) -> HangReport | None:
    """Every thread waits for another one of the same process. (In a collective its runtime's threads would not.)"""
    locked = [
        number
        for number, rank in scene.ranks.items()
        if rank.fresh(scene.now) and (rank.sample.locked_s or 0.0) >= LOCKED_S and not rank.in_collective
    ]
    if not locked or (not scene.held and scene.ranks[locked[0]].stack is None):
        return None  # a moment later it is known where it stands
    where = _where(scene.ranks[locked[0]])
    who = f"every thread of {rank_names(locked)} waits for another thread of the same process"
    why = f"deadlock: {who}, the main thread in {where}"
    return _report(scene, "deadlock", locked, why)


def _device(scene: Scene) -> HangReport | None:
    struck = sorted(scene.devices.keys() & scene.ranks.keys())
    if not struck or not scene.held:
        return None
    what = scene.devices[struck[0]]
    why = f"no progress for {scene.quiet_s:.1f} s after a fatal finding on {rank_names(struck)}: {what}"
    return _report(scene, "device", struck, why)


# ----- all ranks -----


def _teardown(scene: Scene) -> HangReport | None:
    """A rank that destroys its process groups never comes to the collective in which others wait for it."""
    leaving = [number for number, rank in scene.ranks.items() if rank.tears_down]
    staying = [rank for number, rank in scene.ranks.items() if number not in leaving]
    if not leaving or not all(_stands(rank, scene.now, TEARDOWN_S) for rank in scene.ranks.values()):
        return None
    if scene.complete and all(rank.in_collective for rank in staying):
        why = f"the work is complete and {rank_names(leaving)} does not come out of its teardown"
        return _report(scene, "exit_hang", leaving, why)
    if not any(rank.in_collective for rank in staying):
        return None
    why = f"{rank_names(leaving)} destroys its process groups while others wait in a collective"
    return _report(scene, "teardown", leaving, why)


def _stands(rank: WatchedRank, now: float, seconds: float) -> bool:
    return rank.settled(now) and rank.same_from is not None and now - rank.same_from[0] >= seconds


def _collectives(scene: Scene) -> HangReport | None:
    """All ranks are in collectives: in ones that do not fit, or in such as do not complete."""
    ranks = scene.ranks
    odd, why = scene.disagreement
    if why and all(rank.waits for rank in ranks.values()):
        return _report(scene, "mismatch", odd, why)
    if scene.wait_ring is not None and scene.ring_is_sure:
        return _report(scene, "mismatch", scene.wait_ring.odd, scene.wait_ring.why)
    if not all(rank.in_collective and rank.settled(scene.now) for rank in ranks.values()):
        return None
    if scene.complete and all(rank.stack is not None and stacks.in_barrier(rank.stack) for rank in ranks.values()):
        return _report(scene, "exit_hang", ranks, "the work is complete and the end hangs on all ranks")
    if not all(_is_set_up(rank) and not _has_helpers(rank) for rank in ranks.values()):
        return None
    if scene.wait_ring is not None:
        return _report(scene, "mismatch", scene.wait_ring.odd, scene.wait_ring.why)
    behind = _behind(ranks)
    if behind:
        why = f"all ranks wait in collectives and {rank_names(behind)} entered fewer of them than the others"
        return _report(scene, "mismatch", behind, why)
    return _report(scene, "all_waiting", (), f"all {len(ranks)} ranks wait in collectives that do not complete")


def _does_nothing_else(rank: WatchedRank, now: float) -> bool:
    return rank.in_collective and rank.settled(now) and not _has_helpers(rank)


def _behind(ranks: Mapping[int, WatchedRank]) -> list[int]:
    """Ranks that entered fewer collectives of the world group than most; other groups' ids mean different groups."""
    counts = {number: rank.sample.groups[WORLD][0] for number, rank in ranks.items() if WORLD in rank.sample.groups}
    most = max(counts.values(), default=0)
    behind = sorted(number for number, count in counts.items() if count < most)
    return behind if len(counts) == len(ranks) and 2 * len(behind) <= len(counts) else []


def _is_set_up(rank: WatchedRank) -> bool:
    """What it waits in is not a group's first collective: with thousands of ranks that one takes a minute or more."""
    groups = rank.sample.groups.values()
    pending = [completed for enqueued, completed in groups if enqueued > completed]
    return all(completed > 0 for completed in pending) and any(completed > 0 for _, completed in groups)


def _has_helpers(rank: WatchedRank) -> bool:
    """Threads of the script that may be at work for it while its main thread waits."""
    return rank.stack is not None and rank.stack.others > 0


def _end(scene: Scene) -> HangReport | None:
    """Some ranks ended with code 0, and each of the rest stands in a collective or in its teardown."""
    ranks = scene.ranks
    live = sorted(ranks)
    if not all((rank.in_collective or rank.tears_down) and rank.settled(scene.now) for rank in ranks.values()):
        return None
    waiting = [number for number, rank in ranks.items() if rank.in_collective and not rank.tears_down]
    if scene.complete or (not scene.ends_known and not waiting):
        why = f"{rank_names(scene.ended)} ended well, the work is complete and {rank_names(live)} does not end"
        return _report(scene, "exit_hang", live, why)
    if waiting and not any(_has_helpers(rank) for rank in ranks.values()):
        why = f"{rank_names(scene.ended)} ended with code 0 while {rank_names(waiting)} still waits in a collective"
        return _report(scene, "early_exit", scene.ended, why)
    return None


def _where(rank: WatchedRank) -> str:
    return stacks.place(rank.stack) if rank.stack is not None else "an unknown place"


def _report(scene: Scene, kind: Proof, ranks: Iterable[int], why: str) -> HangReport:
    named = tuple(sorted(ranks))
    first = scene.ranks.get(named[0]) if named else None
    return HangReport(
        kind=kind,
        ranks=named,
        quiet_s=round(scene.quiet_s, 2),
        limit_s=0.0,
        phase="",
        why=why,
        waiting=sum(1 for number, rank in scene.ranks.items() if rank.waits and number not in named),
        place=_where(first) if first is not None and first.stack is not None else "",
        places=remembered(first) if first is not None else (),
    )
