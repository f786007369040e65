"""The dumps of many ranks as one picture: which group is which, who belongs to it, and how far everybody is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from diagnosis.flight.dumps import NEVER, Channel, Group, RankDump, Status, merged

_DIGITS: Final = re.compile(r"\d+")
MAX_RANKS: Final = 65_536


@dataclass(slots=True)
class Joined:
    """One process group with what each member's dump says of it."""

    group: Group
    members: tuple[int, ...]
    calls: dict[int, Channel] = field(default_factory=dict)
    """Rank -> its collectives in this group."""
    p2p: dict[int, Channel] = field(default_factory=dict)
    status: dict[int, Status] = field(default_factory=dict)
    """Of ranks that told how far they are, but have no call of this group in the ring."""
    kind: str = ""
    """Equal for groups that do the same for other ranks: all tensor-parallel ones, all data-parallel ones."""

    def __str__(self) -> str:
        """As people know it: `TP_1 (ranks 2, 3)`."""
        name = self.group.desc if self.group.desc not in ("", "undefined") else f"group {self.group.name}"
        if not self.members:
            return name
        listed = ", ".join(map(str, self.members[:8])) + (", ..." if len(self.members) > 8 else "")
        return f"{name} (rank{'s' if len(self.members) > 1 else ''} {listed})"

    def enqueued(self, rank: int) -> int:
        """The last collective that it is known to have called; -1: none in what its dump tells."""
        channel = self.calls.get(rank)
        return channel.enqueued if channel else self.status.get(rank, NEVER).enqueued


@dataclass(slots=True)
class Picture:
    dumps: dict[int, RankDump]
    groups: list[Joined]
    world: tuple[int, ...]
    """All ranks that any dump knows of."""
    of: dict[tuple[int, int], int]
    """(rank, its channel) -> number of the group."""
    problems: list[str]

    def absent(self, rank: int) -> bool:
        return rank not in self.dumps


def join(dumps: Iterable[RankDump]) -> Picture:
    """Puts them together. Of a rank that came twice the newest dump counts, of each backend."""
    problems: list[str] = []
    by_rank = _by_rank(dumps, problems)
    world = {rank for dump in by_rank.values() for group in dump.config for rank in group.members} | set(by_rank)
    everyone = tuple(sorted(world))[:MAX_RANKS]
    numbers: dict[Group, int] = {}
    groups: list[Joined] = []
    of: dict[tuple[int, int], int] = {}
    for rank, dump in by_rank.items():
        for at, channel in enumerate(dump.channels):
            number = _number_of(channel.group, numbers, groups, everyone)
            of[rank, at] = number
            known = groups[number].p2p if channel.p2p else groups[number].calls
            known.setdefault(rank, channel)
    _name_numbers(by_rank, numbers, groups)
    for joined in groups:
        if not joined.members:
            joined.members = tuple(sorted({*joined.calls, *joined.p2p}))
        step = joined.members[1] - joined.members[0] if len(joined.members) > 1 else 0
        joined.kind = f"{_DIGITS.sub('#', joined.group.desc)}/{len(joined.members)}/{step}"
    return Picture(dumps=by_rank, groups=groups, world=everyone, of=of, problems=problems)


def _number_of(group: Group, numbers: dict[Group, int], groups: list[Joined], everyone: tuple[int, ...]) -> int:
    number = numbers.get(group)
    if number is None:
        number = numbers[group] = len(groups)
        is_world = group.desc == "default_pg" or (group.name == "0" and group.desc in ("", "undefined"))
        members = group.members or (everyone if is_world else ())
        groups.append(Joined(group=group, members=members))
    return number


def _by_rank(dumps: Iterable[RankDump], problems: list[str]) -> dict[int, RankDump]:
    found: dict[int, RankDump] = {}
    nameless: list[RankDump] = []
    for dump in dumps:
        if dump.rank is None:
            nameless.append(dump)
        elif dump.rank not in found:
            found[dump.rank] = dump
        elif not dump.backends & found[dump.rank].backends:
            found[dump.rank] = merged(found[dump.rank], dump)
        else:
            problems.append(f"rank {dump.rank} has several dumps: the newest is used")
            found[dump.rank] = max(found[dump.rank], dump, key=lambda one: (one.newest, len(one.order)))
    for dump in nameless:
        shared = [set(group.members) for group in dump.config if group.members]
        only = set.intersection(*shared) - found.keys() if shared else set()
        if len(only) == 1:
            found[only.pop()] = dump
        else:
            problems.append("a dump does not tell of which rank it is")
    problems[:] = list(dict.fromkeys(problems))
    return dict(sorted(found.items()))


def _name_numbers(dumps: dict[int, RankDump], numbers: dict[Group, int], groups: list[Joined]) -> None:
    """Statuses that only have a rank's own number of a group: other ranks tell what that number stands for.

    All ranks make their groups in one order, so the number of the tensor-parallel group is the same everywhere.
    """
    meant: dict[int, set[str]] = {}
    for dump in dumps.values():
        for channel in dump.channels:
            meant.setdefault(channel.pg_id, set()).add(_DIGITS.sub("#", channel.group.desc))
    for rank, dump in dumps.items():
        for pg_id, status in dump.unnamed.items():
            descs = meant.get(pg_id, set())
            fits = [group for group in dump.config if {_DIGITS.sub("#", group.desc)} == descs and group in numbers]
            if len(fits) == 1 and rank not in groups[numbers[fits[0]]].calls:
                groups[numbers[fits[0]]].status[rank] = status
