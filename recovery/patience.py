"""How long an unproven silence may last before a restart is risked.

The rule is that of ski rental. A restart costs a recovery plus the steps since the last checkpoint. When the wait has
cost as much, a restart is risked: that costs at most twice what was best. But an honest wait begins again after a
restart. So the shortest limit is generous, the time that a place in the code has needed before counts several times
over, a restart that did not help makes the next limit longer, and after two of them there is none. Pure: figures in, a
limit with its reason out.
"""

from __future__ import annotations

from typing import Final

from diagnosis.signals import Frozen

LEAST_S: Final = 60.0
"""Never earlier, whatever is set."""
AUTOMATIC_LEAST_S: Final = 600.0
"""The same where nobody has set anything: honest waits of minutes are common; torch waits as long with NCCL."""
AGAIN_FACTOR: Final = 4.0
"""By how much longer is waited where a restart did not help."""
TRIES: Final = 2
"""Restarts of the same ranks at the same place and step; then a person has to look."""
BEFORE_TIMEOUT_S: Final = 15.0
"""A restart comes at the latest so long before the collective's own time-out would end the run."""


class Figures(Frozen, frozen=True, kw_only=True):
    """What is known of this run and this silence; seconds."""

    recovery_s: float = 0.0
    """From the decision to restart to the first step: the slowest so far, else the first start."""
    redo_s: float = 0.0
    """Training since what the next attempt would go on from: of the whole attempt where there is no checkpoint."""
    needed_s: float = 0.0
    """The longest honest wait at this place before."""
    did_not_help: int = 0
    """Restarts of the same ranks at the same place and step."""
    timeout_s: float | None = None
    """After so long the waiting ranks' own collective ends the run."""
    over: bool = False
    """Ranks have ended well and only the end is waited for: a restart would win nothing, and may lose what is saved."""


class Limit(Frozen, frozen=True, kw_only=True):
    """`seconds` of silence after which a restart is risked; None: never. `why` says so in words."""

    seconds: float | None
    why: str


def limit(figures: Figures, *, patience_s: float | None = None, factor: float = 3.0, off: bool = False) -> Limit:
    """When this silence may be acted on. `patience_s`: what the user has set; None: by the run's own figures."""
    if off:
        return Limit(seconds=None, why="Nothing is done about it (hang.off)")
    if figures.over:
        return Limit(
            seconds=None,
            why="Nothing is done about it: ranks have ended well, and what still runs may save what came of it",
        )
    if figures.did_not_help >= TRIES:
        return Limit(
            seconds=None, why=f"Nothing is done about it: {figures.did_not_help} restarts at this place did not help"
        )
    cost_s = figures.recovery_s + figures.redo_s
    if patience_s is not None:
        seconds = max(LEAST_S, patience_s)
        why = f"If this lasts {seconds:.0f} s (--patience), the job restarts"
    elif cost_s > AUTOMATIC_LEAST_S:
        seconds = cost_s
        again = f"{figures.redo_s:.0f} s of steps made again"
        why = f"If this lasts {cost_s:.0f} s, the job restarts: that is what a restart costs ({again})"
    else:
        seconds, why = AUTOMATIC_LEAST_S, f"If this lasts {AUTOMATIC_LEAST_S:.0f} s, the job restarts"
    if figures.needed_s * factor > seconds:
        seconds = figures.needed_s * factor
        before = f"this place has taken up to {figures.needed_s:.0f} s before"
        why = f"If this lasts {seconds:.0f} s, the job restarts: {before}"
    if figures.did_not_help:
        seconds *= AGAIN_FACTOR**figures.did_not_help
        why = f"If this lasts {seconds:.0f} s, the job restarts: the restart before did not help"
    if figures.timeout_s is not None and LEAST_S <= figures.timeout_s - BEFORE_TIMEOUT_S < seconds:
        seconds = figures.timeout_s - BEFORE_TIMEOUT_S
        ends = f"at {figures.timeout_s:.0f} s the collective's own time-out would end the run"
        why = f"If this lasts {seconds:.0f} s, the job restarts: {ends}"
    return Limit(seconds=round(seconds, 1), why=why)
