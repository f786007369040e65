"""Which nodes a Slurm job can leave out and still find enough others. Pure.

A job that excludes too many waits for ever (`BadConstraints`), also when the nodes are back; so what was merely lost is
left out only where there is enough beside it, and what is bad only where the job can start at all without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

_IN_SERVICE: Final = frozenset({"idle", "allocated", "mixed", "completing", "reserved", "planned"})
_OUT: Final = "*$%"
"""Marks behind a state: not responding, in a maintenance reservation, being switched off."""
_SOCKETS: Final = re.compile(r"\([^)]*\)")


class Room(NamedTuple):
    """What the job may be given, and what it needs."""

    where: str
    """In words: `partition main`."""
    needs: int
    """Nodes."""
    nodes: dict[str, bool]
    """Node -> whether it is in service now; without those that the user excluded."""
    demanded: frozenset[str] = frozenset()
    """Nodes that the user asked for by name: the job starts on no others."""
    held: frozenset[str] = frozenset()
    """Nodes that are the job's now. One that is down is not."""


class LeftOut(NamedTuple):
    nodes: tuple[str, ...]
    why_not: str = ""
    """Why nothing is left out that makes sense: the job cannot start without the nodes that are bad."""
    kept: tuple[str, ...] = ()
    """Nodes that the job may have again, for there are too few others."""


def nodes_of(listing: str, alike: Sequence[str], excluded: Sequence[str]) -> dict[str, bool]:
    """Node -> whether it is in service, from lines `NAME|STATE|GRES`. Only those with GRES as nodes of `alike` have."""
    found: dict[str, tuple[str, str]] = {}
    for line in listing.splitlines():
        name, state, gres = (*(part.strip() for part in line.split("|")), "", "")[:3]
        if name:
            found[name] = (state.lower(), _SOCKETS.sub("", gres))
    kinds = {found[name][1] for name in alike if name in found}
    return {
        name: state.rstrip("*$%~#!@^-+") in _IN_SERVICE and not any(mark in state for mark in _OUT)
        for name, (state, gres) in found.items()
        if name not in excluded and (not kinds or gres in kinds)
    }


def leave_out(room: Room, bad: Sequence[str], lost: Sequence[str]) -> LeftOut:
    """What to exclude of the nodes that are bad and of those that are only lost."""
    bad, lost = sorted(set(bad)), sorted(set(lost) - set(bad))
    wanted = [node for node in bad if node in room.demanded]
    if wanted:
        return LeftOut((), f"it was submitted for {_names(wanted)}, by name")
    others = [node for node in room.nodes if node not in bad]
    if len(others) < room.needs:
        besides = f" besides {_names(bad)}" if bad else ""
        return LeftOut((), f"it needs {_count(room.needs)}, and {room.where} has {len(others)}{besides}")
    in_service = [node for node in others if room.nodes[node] and node not in lost]
    if len(in_service) >= room.needs and not room.demanded.intersection(lost):
        return LeftOut((*bad, *lost))
    return LeftOut(tuple(bad), kept=tuple(lost))


def _names(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:8]) + (", ..." if len(nodes) > 8 else "")


def _count(number: int) -> str:
    return f"{number} node{'s' * (number != 1)}"
