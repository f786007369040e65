"""A silence that nothing proves to be a hang, in words: who is where, and how many wait for whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from diagnosis import stacks
from diagnosis.hang.ranks import WatchedRank, names
from diagnosis.incident import HangReport
from diagnosis.signals import Frame

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
        who, many = names(report.ranks), len(report.ranks) != 1
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
