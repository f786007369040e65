"""One rank's flight recorder dump, reduced at once to what ranks are compared by (some 20 KB of a full ring).

Reads what torch writes: pickles and JSON of versions 2.0 to 2.10, of NCCL and gloo, whole or with active entries only.
gloo never marks an entry completed, `retired` does; NCCL also retires what timed out, so there only the state counts.

While a job hangs, agents send a dump in few words (`reduced`): of each group the calls around the oldest that is not
completed, and the newest ones. That is enough to see who waits for whom and who disagrees. It is read as a dump again.
"""

from __future__ import annotations

import gc
import heapq
import re
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import structs

from diagnosis import pickles
from diagnosis.signals import CollectiveEntry, Frame, RankFlight, clean_line, clean_text

_P2P: Final = re.compile(r"(?:\w+:)?(send|recv) (\d{1,6})(?:->|<-)(\d{1,6})$")
_SAME_SIZES: Final = re.compile(
    r"_?(all_?reduce|all_?gather(_base|_into_tensor)?|reduce_?scatter(_base|_tensor)?|broadcast(_oop)?|reduce(_oop)?"
    r"|gather|scatter)$",
    re.IGNORECASE,
)
"""Of all others (all_to_all, several that were coalesced) ranks may honestly give tensors of other sizes."""
_NO_DTYPES: Final = re.compile(r"coalesced$|barrier", re.IGNORECASE)
_TENSORS: Final = 64
_DIMENSIONS: Final = 8
_LISTS: Final = (list, tuple)


class Call(NamedTuple):
    """What was called; sizes and dtypes are text, empty where ranks may differ in them."""

    op: str
    """As recorded, for example `nccl:all_reduce`."""
    sizes: str = ""
    outputs: str = ""
    dtypes: str = ""

    @property
    def kind(self) -> str:
        """`all_reduce`: without the backend, and without the peers of a send."""
        return self.op.rsplit(":", 1)[-1].split(" ", 1)[0]

    def __str__(self) -> str:
        shapes = f"{self.sizes}->{self.outputs}" if self.outputs and self.outputs != self.sizes else self.sizes
        return " ".join(part for part in (self.op, shapes, self.dtypes) if part)

    def digest(self) -> int:
        """Equal for equal calls on all ranks; never 0."""
        return zlib.crc32("|".join(self).encode(errors="replace")) or 1


def peer_of(op: str) -> tuple[bool, int] | None:
    """Of a send or receive: (sends, index of the partner in the group); None of anything else."""
    found = _P2P.match(op)
    return (found[1] == "send", int(found[3])) if found else None


def shape(sizes: Any) -> tuple[object, ...]:
    """`[[4, 8], [2]]` as a value that can be compared, for one tensor just its sizes; () for what is no sizes."""
    try:
        if type(sizes) is list and len(sizes) == 1:
            one = sizes[0]
            if type(one) is list and len(one) <= _DIMENSIONS:
                sum(one)  # all numbers: nothing nested, which would take for ever to hash
                return tuple(one)
        return _shapes(sizes) if type(sizes) in _LISTS and sizes else ()
    except (TypeError, KeyError):
        return ()


def _shapes(sizes: Any) -> tuple[object, ...]:
    for one in sizes[:_TENSORS]:
        sum(one[:_DIMENSIONS])
    return (*[tuple(one[:_DIMENSIONS]) for one in sizes[:_TENSORS]], len(sizes))


def names(dtypes: Any) -> tuple[object, ...]:
    """`["Float"]` as a value that can be compared."""
    return tuple([one for one in dtypes[:_TENSORS] if type(one) is str]) if type(dtypes) in _LISTS else ()


def call(op: object, sizes: tuple[object, ...], outputs: tuple[object, ...], dtypes: tuple[object, ...]) -> Call:
    """What all ranks of a group have to call alike."""
    name = clean_line(op, 80) if isinstance(op, str) else "?"
    return comparable(Call(name, _shortened(sizes, 120), _shortened(outputs, 120), _shortened(dtypes, 60)))


def comparable(facts: Call) -> Call:
    """Without that in which ranks may honestly differ."""
    if _P2P.match(facts.op):
        return facts._replace(outputs="")
    kind = facts.kind
    same = _SAME_SIZES.match(kind) is not None
    # Only the root of these two has all tensors: one side of each is the same everywhere.
    scatters, gathers = kind.startswith("scatter"), kind.startswith("gather")
    return Call(
        op=facts.op,
        sizes=facts.sizes if same and not scatters else "",
        outputs=facts.outputs if same and not gathers else "",
        dtypes="" if _NO_DTYPES.search(kind) or scatters or gathers else facts.dtypes,
    )


def _shortened(value: tuple[object, ...], limit: int) -> str:
    """`4x8` for one tensor, `4x8,2` for two."""
    tensors = [one for one in value if isinstance(one, tuple)]
    if tensors:
        whole = ",".join(_sides(one) for one in tensors) + (f",... {value[-1]}" if len(tensors) == _TENSORS else "")
    else:
        whole = _sides(value)
    if len(whole) <= limit:
        return clean_line(whole, limit)
    return f"{clean_line(whole, limit - 12)}#{zlib.crc32(whole.encode(errors='replace')):08x}"


def _sides(one: tuple[object, ...]) -> str:
    return "x".join(str(part)[:24] for part in one)


MAX_BYTES: Final = 64 << 20
MAX_ENTRIES: Final = 100_000
MAX_CHANNELS: Final = 2_000
MAX_MEMBERS: Final = 65_536
MAX_ALL_MEMBERS: Final = 500_000
"""Of all groups of one rank."""
KEPT_CALLS: Final = 64
MAX_FRAMES: Final = 16
SCHEDULED, STARTED, COMPLETED = 0, 1, 2
_FURTHEST: Final = 1 << 62
_NUMBER: Final = re.compile(r"\d{1,7}")


class ProcessGroup(NamedTuple):
    """A process group as one rank knows it. gloo's dumps do not tell the members: then they are empty."""

    name: str
    desc: str
    members: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Thousands of ranks that tell of the same group share its members, also when sent by another process."""
        return _group, (self.name, self.desc, array("I", self.members).tobytes())


class Status(NamedTuple):
    """The last collective of a group that was enqueued, started, completed; -1: none."""

    enqueued: int = -1
    started: int = -1
    completed: int = -1


NEVER: Final = Status()


@dataclass(slots=True)
class Channel:
    """One rank's calls in one group, oldest first: its collectives, or its point-to-point calls."""

    group: ProcessGroup
    p2p: bool
    pg_id: int
    seqs: array[int] = field(default_factory=lambda: array("q"))
    calls: array[int] = field(default_factory=lambda: array("I"))
    """`Call.digest` of each."""
    ops: array[int] = field(default_factory=lambda: array("I"))
    """Digest of the bare operation of each: sizes may honestly differ between ranks of other groups."""
    times: array[int] = field(default_factory=lambda: array("q"))
    """Unix nanoseconds when it was enqueued; 0: not told."""
    ended: array[int] = field(default_factory=lambda: array("q"))
    """Unix nanoseconds when it was seen to be complete; 0: not told. Empty: of none."""
    durations_us: array[int] = field(default_factory=lambda: array("q"))
    """As the GPU measured it; 0: not told. Empty: of none, as timing is off by default."""
    states: bytearray = field(default_factory=bytearray)
    status: Status = NEVER
    pending: int | None = None
    """Index of the oldest that is not completed."""

    @property
    def enqueued(self) -> int:
        return max(self.status.enqueued, self.seqs[-1] if self.seqs else -1)

    @property
    def waits_at(self) -> int | None:
        """Sequence number of the oldest call that is not completed."""
        return None if self.pending is None else self.seqs[self.pending]


@dataclass(slots=True)
class RankDump:
    """What one rank's flight recorder says."""

    rank: int | None
    version: str = ""
    channels: tuple[Channel, ...] = ()
    order: array[int] = field(default_factory=lambda: array("H"))
    """The channel of each call, in the order of the calls."""
    known: dict[int, Call] = field(default_factory=dict)
    """Digest -> call: of the last ones of each channel, and of what is pending."""
    frames: dict[tuple[int, int], tuple[Frame, ...]] = field(default_factory=dict)
    """(channel, index) -> stack of the call: of what is pending, and of the last call."""
    config: tuple[ProcessGroup, ...] = ()
    """All groups it told of, also those without a call in the ring."""
    unnamed: dict[int, Status] = field(default_factory=dict)
    """Status of groups that only have a number of this rank's own."""
    first_record: int = 0
    """More than 0: the ring has wrapped, or only active entries were dumped."""
    partial: bool = False
    """Calls between those that it has are left out: only active entries were dumped, or few were sent on."""
    problems: tuple[str, ...] = ()

    @property
    def backends(self) -> set[str]:
        """`nccl`, `gloo`, ...: each has a recorder of its own."""
        return {one.op.split(":", 1)[0] for one in self.known.values()}

    @property
    def newest(self) -> int:
        """Unix nanoseconds of its last call; 0: not told."""
        return max((one.times[-1] for one in self.channels if one.times), default=0)

    def front_at(self) -> int | None:
        """The channel of its oldest call that is not completed."""
        waiting = {number: one.pending for number, one in enumerate(self.channels) if one.pending is not None}
        if len(waiting) < 2:
            return next(iter(waiting), None)
        for number in self.order:
            if number in waiting:
                if waiting[number] == 0:
                    return number
                waiting[number] = (waiting[number] or 0) - 1
        return None


def read_dump(data: bytes, rank: int | None) -> RankDump:
    """The dump in `data`, which may be foreign. Raises ValueError, in words, when it is none or damaged."""
    collecting = gc.isenabled()
    gc.disable()  # tens of thousands of small lists, none of them garbage yet: looking through them doubles the time
    try:
        return _Reader(_decoded(data)).read(rank)
    finally:
        if collecting:
            gc.enable()


def _decoded(data: bytes) -> dict[Any, Any]:
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data) >> 20} MiB is more than any flight recorder holds")
    head = data[:64].lstrip()
    if head.startswith((b"{", b"[")):
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise ValueError(f"JSON that is damaged or cut short: {clean_text(str(error), 120)}") from None
    elif head.startswith(b"\x80"):
        value = pickles.read_plain(data)
    else:
        raise ValueError("neither a pickle nor JSON" if data else "an empty file")
    if not isinstance(value, dict) or not ("entries" in value or "pg_config" in value or "pg_status" in value):
        raise ValueError("no flight recorder dump: it has neither entries nor process groups")
    return value


def merged(one: RankDump, other: RankDump) -> RankDump:
    """The recorders of two backends of one rank as one, the calls in the order in which they were made."""
    offset = len(one.channels)
    mine = zip(_times(one), one.order, strict=True)
    theirs = zip(_times(other), (number + offset for number in other.order), strict=True)
    return RankDump(
        rank=one.rank,
        version=one.version,
        channels=(*one.channels, *other.channels),
        order=array("H", [number for _, number in heapq.merge(mine, theirs, key=lambda call: call[0])]),
        known={**one.known, **other.known},
        frames={**one.frames, **{(at + offset, index): facts for (at, index), facts in other.frames.items()}},
        config=(*one.config, *other.config),
        unnamed=one.unnamed,
        first_record=max(one.first_record, other.first_record),
        partial=one.partial or other.partial,
        problems=(*one.problems, *other.problems),
    )


def _times(dump: RankDump) -> Iterator[int]:
    """When each call was made, in their order."""
    taken = [iter(one.times) for one in dump.channels]
    return (next(taken[number]) for number in dump.order)


class _Reader:
    def __init__(self, value: dict[Any, Any]) -> None:
        self.value = value
        self.problems: list[str] = []
        self.channels: list[Channel] = []
        self.order = array("H")
        self.calls: dict[object, tuple[int, int, Call]] = {}
        self.groups = dict(_configured(value.get("pg_config")))

    def read(self, rank: int | None) -> RankDump:
        entries = self.value.get("entries") or []
        if type(entries) is not list:
            raise ValueError("no flight recorder dump: its entries are no list")
        if len(entries) > MAX_ENTRIES:
            self.problems.append(f"{len(entries)} entries, the last {MAX_ENTRIES} were read")
            entries = entries[-MAX_ENTRIES:]
        where = self._entries(entries)
        if entries and not self.order:
            raise ValueError(f"no flight recorder dump: none of its {len(entries)} entries is one")
        unnamed = self._statuses()
        for channel in self.channels:
            if channel.durations_us:
                channel.durations_us.extend([0] * (len(channel.seqs) - len(channel.durations_us)))
            if not any(channel.ended):
                channel.ended = array("q")
            channel.pending = next((at for at, state in enumerate(channel.states) if state != COMPLETED), None)
        version = self.value.get("version")
        first = _number(entries[0].get("record_id")) if entries and type(entries[0]) is dict else 0
        return RankDump(
            rank=rank if rank is None or 0 <= rank < 1 << 24 else None,
            version=clean_text(version, 20) if isinstance(version, str) else "",
            channels=tuple(self.channels),
            order=self.order,
            known=self._known(),
            frames=self._frames(where),
            config=tuple(self.groups.values()),
            unnamed=unnamed,
            first_record=first,
            partial=first > 0 and not any(COMPLETED in channel.states for channel in self.channels),
            problems=tuple(self.problems),
        )

    def _entries(self, entries: list[Any]) -> dict[tuple[int, int], Any]:
        """Reads them into the channels; (channel, index) -> entry, of the pending ones that are first, and the last."""
        numbers: dict[object, int] = {}
        matter: dict[tuple[int, int], Any] = {}
        waiting: set[int] = set()
        strange, number = 0, 0
        calls, order, channels = self.calls, self.order, self.channels
        for entry in entries:
            if type(entry) is not dict:
                strange += 1
                continue
            get = entry.get
            op, pg_id, p2p = get("profiling_name"), get("pg_id"), get("is_p2p") is True
            inputs, outputs, dtypes = shape(get("input_sizes")), shape(get("output_sizes")), get("input_dtypes")
            if type(op) is not str:
                strange += 1
                continue
            single = isinstance(dtypes, list) and len(dtypes) == 1 and type(dtypes[0]) is str
            key = (op, inputs, outputs, dtypes[0] if single and dtypes else names(dtypes))
            known = calls.get(key)
            if known is None:
                facts = call(op, inputs, outputs, names(dtypes))
                known = calls[key] = (facts.digest(), Call(facts.op).digest(), facts)
            if type(pg_id) is not int:
                pg_id = -1
            at = (pg_id << 1 | p2p) if pg_id >= 0 else f"{p2p} {_named(get('process_group'))}"
            found = numbers.get(at)
            if found is None:
                found = self._channel(numbers, at, entry, pg_id, p2p)
                if found is None:
                    strange += 1
                    continue
            number = found
            channel = channels[number]
            seq = get("p2p_seq_id" if p2p else "collective_seq_id")
            if type(seq) is not int or not 0 <= seq < _FURTHEST:
                seq = _number(get("seq_id") if seq is None else seq)
            state = get("state")
            state = COMPLETED if state == "completed" else _unfinished(state, get("retired"), op)
            seqs = channel.seqs
            if seqs and seqs[-1] == seq and not p2p:  # one call of several that were coalesced
                channel.calls[-1] = (channel.calls[-1] * 31 + known[0]) & 0xFFFFFFFF
                channel.states[-1] = min(channel.states[-1], state)
            else:
                created, ended = get("time_created_ns"), get("time_discovered_completed_ns")
                seqs.append(seq)
                channel.calls.append(known[0])
                channel.ops.append(known[1])
                created = created if type(created) is int and 0 <= created < _FURTHEST else 0
                channel.times.append(created)
                channel.ended.append(ended if type(ended) is int and created < ended < _FURTHEST else 0)
                channel.states.append(state)
                order.append(number)
                if duration := get("duration_ms"):
                    _note_duration(channel, duration)
            if state != COMPLETED and number not in waiting:
                waiting.add(number)
                matter[number, len(seqs) - 1] = entry
        if strange:
            self.problems.append(f"{strange} entries are none of a flight recorder")
        if self.channels and self.channels[number].seqs:
            matter[number, len(self.channels[number].seqs) - 1] = entries[-1]
        return matter

    def _channel(self, numbers: dict[object, int], at: object, entry: Any, pg_id: int, p2p: bool) -> int | None:
        if len(self.channels) >= MAX_CHANNELS:
            return None
        name, desc = _named(entry.get("process_group"))
        group = self.groups.get(name)
        if group is None or (desc and group.desc and desc != group.desc):
            group = ProcessGroup(name or str(pg_id), desc)
        numbers[at] = len(self.channels)
        self.channels.append(Channel(group=group, p2p=p2p, pg_id=pg_id))
        return numbers[at]

    def _statuses(self) -> dict[int, Status]:
        raw = self.value.get("pg_status")
        found: dict[int, Status] = {}
        for key, facts in list(raw.items())[:MAX_CHANNELS] if type(raw) is dict else ():
            if type(facts) is dict:
                fields = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
                found[_number(key)] = Status(*(_number(facts.get(name)) for name in fields))
        for channel in self.channels:
            if not channel.p2p and channel.pg_id in found:
                channel.status = found.pop(channel.pg_id)
        return found

    def _known(self) -> dict[int, Call]:
        """All calls where they are few; else the last ones of each channel, and what is pending."""
        every = {digest: facts for digest, _, facts in self.calls.values()}
        if len(every) <= KEPT_CALLS:
            return every
        kept: set[int] = set()
        for channel in self.channels:
            first = channel.pending or 0
            kept.update(channel.calls[-4:], channel.calls[first : first + 4])
        return {digest: every[digest] for digest in sorted(kept & every.keys())[: 4 * KEPT_CALLS]}

    def _frames(self, where: dict[tuple[int, int], Any]) -> dict[tuple[int, int], tuple[Frame, ...]]:
        found = {}
        for place, entry in where.items():
            frames = tuple(_read_frames(entry.get("frames"))) if type(entry) is dict else ()
            if frames:
                found[place] = frames
        return found


def _configured(raw: object) -> Iterator[tuple[str, ProcessGroup]]:
    room = MAX_ALL_MEMBERS
    for name, facts in list(raw.items())[:MAX_CHANNELS] if isinstance(raw, dict) else ():
        if isinstance(name, str) and isinstance(facts, dict):
            ranks = facts.get("ranks")
            text = ranks if isinstance(ranks, str) else ""
            if isinstance(ranks, list):
                text = " ".join([str(one) for one in ranks[:MAX_MEMBERS] if type(one) is int])
            group = ProcessGroup(clean_line(name, 120), _text(facts.get("desc"), 120), members_of(text))
            room -= len(group.members)
            if (name or group.members) and room >= 0:
                yield name, group


@lru_cache(maxsize=32)
def members_of(text: str) -> tuple[int, ...]:
    """`[0, 1, 2]` -> its numbers; cached, as thousands of ranks tell of the same group."""
    if "-" in text or len(text) > 1 << 19:
        return ()
    return tuple(sorted({int(one) for one in _NUMBER.findall(text)}))[:MAX_MEMBERS]


def _group(name: str, desc: str, members: bytes) -> ProcessGroup:
    return ProcessGroup(name, desc, _shared(members))


@lru_cache(maxsize=32)
def _shared(members: bytes) -> tuple[int, ...]:
    return tuple(array("I", members))


def _named(raw: object) -> tuple[str, str]:
    """Name and description of `process_group`."""
    if isinstance(raw, (list, tuple)) and raw:
        return _text(raw[0], 120), _text(raw[1], 120) if len(raw) > 1 else ""
    return _text(raw, 120), ""


def _text(raw: object, limit: int) -> str:
    return clean_line(raw, limit) if isinstance(raw, str) else ""


def _number(raw: object) -> int:
    if isinstance(raw, str) and raw.isascii() and raw.isdigit() and len(raw) < 19:
        raw = int(raw)
    return raw if type(raw) is int and -1 <= raw < _FURTHEST else -1


def _note_duration(channel: Channel, duration_ms: object) -> None:
    """Of the last call; those before it that were not timed are 0."""
    facts = channel.durations_us
    facts.extend([0] * (len(channel.seqs) - 1 - len(facts)))
    if isinstance(duration_ms, (int, float)) and 0 < duration_ms < 1 << 40:
        facts.append(int(duration_ms * 1000))


def _unfinished(state: object, retired: object, op: str) -> int:
    if retired is True and op.startswith("gloo"):
        return COMPLETED
    return STARTED if state == "started" else SCHEDULED


def _read_frames(raw: object) -> Iterator[Frame]:
    for one in raw[:MAX_FRAMES] if isinstance(raw, (list, tuple)) else ():
        if isinstance(one, dict):
            line = one.get("line")
            function, file = _text(one.get("name"), 120), _text(one.get("filename"), 200)
            yield Frame(function=function, file=file, line=line if type(line) is int and 0 <= line < 1 << 31 else 0)


NEWEST: Final = 4
AROUND_PENDING: Final = 2
MAX_SENT: Final = 32
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
    open_ones = [one for one in entries if not one.completed][:MAX_SENT]
    done = [one for one in entries if one.completed][-(MAX_SENT - len(open_ones)) or len(entries) :]
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
    groups: dict[tuple[str, str, str], ProcessGroup] = {}  # ranks tell of the same ones: each is made once
    return [_dump(flight, groups) for flight in flights if flight.entries]


def _dump(flight: RankFlight, groups: dict[tuple[str, str, str], ProcessGroup]) -> RankDump:
    channels: dict[tuple[str, str, bool], Channel] = {}
    dump = RankDump(rank=flight.rank, first_record=1, partial=True)
    for entry in flight.entries:
        key = (entry.group, entry.name, entry.p2p)
        channel = channels.get(key)
        if channel is None:
            named = (entry.name or entry.group, entry.desc, entry.group)
            group = groups.get(named)
            if group is None:
                group = groups[named] = ProcessGroup(*named[:2], _members(entry.group))
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
    dump.config = tuple({id(one.group): one.group for one in dump.channels}.values())
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
    return RankFlight(rank=nccl.rank, entries=tuple(entries)[-MAX_SENT:])
