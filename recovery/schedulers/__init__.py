"""The schedulers that unbroken knows: `slurm` and `local` (no scheduler at all), and those plugged in.

An entry point of group `unbroken.schedulers` names a class without arguments, or an instance; its `name` is what
`[scheduler] name` says. A plug-in may not take the name of a built-in one.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from inspect import iscoroutinefunction
from typing import Final

from recovery.schedulers.slurm import Slurm
from recovery.scheduling import Local, Scheduler

GROUP: Final = "unbroken.schedulers"
BUILT_IN: Final[tuple[type[Scheduler], ...]] = (Local, Slurm)
CALLS: Final = tuple(name for name, value in vars(Scheduler).items() if iscoroutinefunction(value))
"""What a plug-in must have."""


def load_schedulers(points: Iterable[EntryPoint] | None = None) -> tuple[dict[str, Scheduler], tuple[str, ...]]:
    """Every scheduler by its name; and in words, which plug-ins were skipped and why."""
    found: dict[str, Scheduler] = {made.name: made for made in (kind() for kind in BUILT_IN)}
    skipped: list[str] = []
    for point in entry_points(group=GROUP) if points is None else points:
        try:
            loaded = point.load()
            plugged: Scheduler = loaded() if isinstance(loaded, type) else loaded
            if (
                not isinstance(plugged.name, str)
                or not callable(plugged.job_of)
                or not all(iscoroutinefunction(getattr(plugged, call)) for call in CALLS)
            ):
                raise TypeError("it is no Scheduler")
            if plugged.name in found:
                raise ValueError(f"there is a scheduler {plugged.name!r} already")
            found[plugged.name] = plugged
        except (Exception, SystemExit) as error:
            skipped.append(f"scheduler {point.name} was skipped: {type(error).__name__}: {str(error)[:200]}")
    return found, tuple(skipped)
