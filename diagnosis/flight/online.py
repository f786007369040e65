"""A dump in few words, sent on while a job hangs, and read as a dump again.

Kept of each group: the calls around the oldest that is not completed, and the newest ones. That is enough to see who
waits for whom and who disagrees; what needs whole sequences (order bugs) is left to the dumps themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import structs

from diagnosis.flight.dumps import (
    COMPLETED,
    SCHEDULED,
    STARTED,
    Call,
    Channel,
    ProcessGroup,
    RankDump,
    comparable,
    members_of,
    peer_of,
    read_dump,
)
from diagnosis.signals import CollectiveEntry, RankFlight, clean_text

NEWEST: Final = 4
AROUND_PENDING: Final = 2
MAX_ENTRIES: Final = 32
"""Some 250 bytes each: eight ranks stay within the 64 KiB of a node's evidence."""
LISTED: Final = 16
_RANGE: Final = re.compile(r"\[(\d{1,7})-(\d{1,7}):(\d{1,7})\]")


def reduced(dump: RankDump) -> RankFlight:
    """The entries that tell where a rank is, in the order of its calls."""
    kept = []
    for channel in dump.channels:
        pending = len(channel.seqs) if channel.pending is None else channel.pending
        near = range(max(0, pending - 1), min(len(channel.seqs), pending + AROUND_PENDING))
        kept.append({*near, *range(max(0, len(channel.seqs) - NEWEST), len(channel.seqs))})
    taken = [0] * len(dump.channels)
    entries = []
    for number in dump.order:
        at = taken[number]
        taken[number] += 1
        if at in kept[number]:
            entries.append(_entry(dump, dump.channels[number], at))
    open_ones = [one for one in entries if not one.completed][:MAX_ENTRIES]
    done = [one for one in entries if one.completed][-(MAX_ENTRIES - len(open_ones)) or len(entries) :]
    chosen = {id(one) for one in (*open_ones, *done)}
    return RankFlight(rank=dump.rank or 0, entries=tuple(one for one in entries if id(one) in chosen))


def _entry(dump: RankDump, channel: Channel, at: int) -> CollectiveEntry:
    made = dump.known.get(channel.calls[at]) or Call("?")
    group = channel.group
    return CollectiveEntry(
        group=_listed(group.members) or group.name,
        seq=channel.seqs[at],
        op=made.op,
        sizes=made.sizes,
        dtypes=made.dtypes,
        completed=channel.states[at] == COMPLETED,
        outputs=made.outputs if made.outputs != made.sizes else "",
        name=group.name,
        desc=group.desc,
        p2p=channel.p2p,
        started=channel.states[at] == STARTED,
        at_ns=channel.times[at],
    )


def _listed(members: tuple[int, ...]) -> str:
    """`[0, 1]`, or `[0-4088:8]` for many that are evenly spaced."""
    if len(members) <= LISTED:
        return str(list(members)) if members else ""
    step = members[1] - members[0]
    if members == tuple(range(members[0], members[-1] + 1, step)):
        return f"[{members[0]}-{members[-1]}:{step}]"
    return clean_text(str(list(members)), 2_000)


def _members(text: str) -> tuple[int, ...]:
    spaced = _RANGE.fullmatch(text)
    if spaced:
        first, last, step = (int(part) for part in spaced.groups())
        return tuple(range(first, last + 1, max(1, step)))[:65_536]
    return members_of(text) if text.startswith("[") and text.endswith("]") else ()


def with_members(flight: RankFlight, members: Mapping[str, str]) -> RankFlight:
    """gloo's recorder does not tell who is in a group; the rank itself does, by the group's name."""
    entries = [
        structs.replace(one, group=clean_text(members[one.name], 200))
        if one.name in members and not _members(one.group) and _members(members[one.name])
        else one
        for one in flight.entries
    ]
    return structs.replace(flight, entries=tuple(entries))


def from_rank_flights(flights: Iterable[RankFlight]) -> list[RankDump]:
    """What agents sent, as dumps. Ranks that had nothing to send are left out: they may be well."""
    return [_dump(flight) for flight in flights if flight.entries]


def _dump(flight: RankFlight) -> RankDump:
    channels: dict[tuple[str, str, bool], Channel] = {}
    dump = RankDump(rank=flight.rank, first_record=1, partial=True)
    for entry in flight.entries:
        key = (entry.group, entry.name, entry.p2p)
        channel = channels.get(key)
        if channel is None:
            group = ProcessGroup(entry.name or entry.group, entry.desc, _members(entry.group))
            p2p = entry.p2p or peer_of(entry.op) is not None
            channel = channels[key] = Channel(group=group, p2p=p2p, pg_id=len(channels))
        made = comparable(Call(entry.op, entry.sizes, entry.outputs or entry.sizes, entry.dtypes))
        digest = made.digest()
        dump.known[digest] = made
        state = COMPLETED if entry.completed else STARTED if entry.started else SCHEDULED
        if state != COMPLETED and channel.pending is None:
            channel.pending = len(channel.seqs)
        channel.seqs.append(entry.seq)
        channel.calls.append(digest)
        channel.ops.append(Call(made.op).digest())
        channel.times.append(entry.at_ns)
        channel.states.append(state)
        dump.order.append(list(channels).index(key))
    dump.channels = tuple(channels.values())
    dump.config = tuple(dict.fromkeys(one.group for one in dump.channels))
    return dump


def read_flight(data: bytes, rank: int) -> RankFlight:
    """The entries around what is not completed and the last ones, oldest first; `error` says why there are none."""
    try:
        return read_reduced(data, rank)
    except ValueError as error:
        return RankFlight(rank=rank, error=f"unreadable flight recorder: {clean_text(str(error), 200)}")


def read_reduced(data: bytes, rank: int) -> RankFlight:
    """The same. Raises ValueError while a dump is not whole, or when it is none."""
    return reduced(read_dump(data, rank))


def both(nccl: RankFlight, gloo: RankFlight) -> RankFlight:
    """What the recorders of one rank know: each backend has its own. A build without NCCL has no recorder of it."""
    if nccl.error or gloo.error:
        return gloo if nccl.error else nccl
    entries = dict.fromkeys(gloo.entries + nccl.entries)  # some torch may have one recorder under both names
    return RankFlight(rank=nccl.rank, entries=tuple(entries)[-MAX_ENTRIES:])
