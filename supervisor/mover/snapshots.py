"""Copies of snapshots: of this node's ranks, and of other nodes'. They lie in this process' memory, and end with it.

A part is what the ranks of one node wrote of one step. Its copy counts only when all of it is here and its checksums
are those of its sender: what a torn transfer left is never told to anybody, and goes with the next orders.

A snapshot is copied while its ranks train. It counts only if its slot has still the same snapshot afterwards.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec

from recovery.snapshot_choice import SnapshotPart
from recovery.snapshot_memory import DATA_AT, PAGE, SLOTS, Header, Slot, addresses_of, free_bytes, read_header
from recovery.snapshot_mirrors import is_needed
from recovery.tiers import NODE_NAME, PartSource, SaveKey, SnapshotBring, SnapshotOrders
from supervisor.mover.copying import CHUNK, CopyError, CopyPace, GaveWay
from supervisor.mover.peer import Handler, PeerError, Wire, in_a_hurry, send_content

FREE_SHARE: Final = 0.5
"""Of the memory that would be free without them, all copies together may take so much. The rest is for ranks."""
NAME: Final = "unbroken-copy"
KEY: Final = "snapshot"
"""In place of a save's name: `stamp` is the step."""

PartKey = tuple[str, int, int]
"""Owner, attempt and step."""


def key_of(part: SnapshotPart) -> PartKey:
    return part.owner, part.attempt, part.step


class HeldBytes:
    """Bytes of all copies."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def add(self, more: int) -> None:
        with self._lock:
            self.bytes += more


held = HeldBytes()


class RankCopy:
    """The content of one rank's slot, from its start to the end of its table. The kernel frees it with the last user
    of its descriptor."""

    def __init__(self, size: int, free: Callable[[], int] = free_bytes) -> None:
        """Raises OSError, CopyError: also where memory is short."""
        available = free()
        if held.bytes + size > FREE_SHARE * (available + held.bytes):
            raise CopyError("copies may take half of the memory that ranks leave, and that is too little")
        self.size = size
        self.crc = 0
        self._at = 0
        self.descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        held.add(size)
        os.posix_fallocate(self.descriptor, 0, size)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.descriptor)
            held.add(-self.size)

    def write(self, data: bytes) -> None:
        """Raises CopyError for more than was announced."""
        if self._at + len(data) > self.size:
            raise CopyError("a snapshot is longer than announced")
        self.crc = zlib.crc32(data, self.crc)
        view = memoryview(data)
        while view:
            count = os.pwrite(self.descriptor, view, self._at)
            view = view[count:]
            self._at += count

    @property
    def whole(self) -> bool:
        return self._at == self.size

    @contextlib.contextmanager
    def reading(self) -> Iterator[int]:
        """A descriptor with a position of its own: several peers may fetch it at once."""
        descriptor = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def header(self) -> Header | None:
        """What the content says of itself; None: nothing."""
        try:
            return read_header(os.pread(self.descriptor, PAGE, 0), self.size)
        except (ValueError, TypeError):
            return None


def end_of(header: Header) -> int:
    return header.table_at + header.table_bytes


def said_by(header: Header) -> tuple[int, int, int, int]:
    """Rank, world, attempt and step."""
    return header.rank, header.world, header.attempt, header.step


def copy_slot(slot: Slot, header: Header, free: Callable[[], int] = free_bytes) -> RankCopy | None:
    """A copy of what the slot holds; None: its rank has begun to write another one meanwhile. Raises OSError,
    CopyError.

    The page of sums comes later than the snapshot, so it is read with the rest and may be missing: the rank takes the
    content as it is then, which our own checksum protects from here on.
    """
    copy = RankCopy(end_of(header), free)
    at = 0
    while at < copy.size:
        data = os.pread(slot.descriptor, min(CHUNK, copy.size - at), at)
        if not data:
            return None
        copy.write(data)
        at += len(data)
        if slot.header() != header:
            return None
    return copy if copy.header() == header else None


class Whole(msgspec.Struct, frozen=True):
    """All of a part."""

    part: SnapshotPart
    copies: tuple[RankCopy, ...]
    """In the order of the ranks."""


class SnapshotCopies:
    """Several threads. `changes` counts what is told."""

    def __init__(self) -> None:
        self._whole: dict[PartKey, Whole] = {}
        self._half: dict[PartKey, dict[int, RankCopy]] = {}
        self._lock = threading.Lock()
        self._orders = SnapshotOrders()

    @property
    def parts(self) -> tuple[SnapshotPart, ...]:
        with self._lock:
            return tuple(sorted(whole.part for whole in self._whole.values()))

    def get(self, key: PartKey) -> Whole | None:
        with self._lock:
            return self._whole.get(key)

    def obey(self, orders: SnapshotOrders) -> bool:
        """What is not needed any more is freed. Whether anything was."""
        with self._lock:
            self._orders = orders
            old = [key for key, one in self._whole.items() if not is_needed(one.part, orders)]
            for key in old:
                del self._whole[key]
            for key in [key for key in self._half if not self._is_wanted(key)]:
                del self._half[key]
            return bool(old)

    def _is_wanted(self, key: PartKey) -> bool:
        """Of what is half here only the newest step can become whole."""
        orders = self._orders
        return orders.attempt > 0 and key[1] == orders.attempt and key[2] >= orders.from_step

    def rank(self, key: PartKey, rank: int) -> RankCopy | None:
        """A rank's copy of a part that may not be whole yet."""
        with self._lock:
            return self._half.get(key, {}).get(rank)

    def begin(self, key: PartKey, part: SnapshotPart) -> None:
        """Others' are only taken as long as they are wanted. Raises CopyError."""
        if not NODE_NAME.fullmatch(key[0]) or key_of(part) != key:
            raise CopyError("it names no node, or another snapshot")
        with self._lock:
            if not self._is_wanted(key):
                raise CopyError("this snapshot is not to be mirrored any more")
            for other in [other for other in self._half if other[0] == key[0] and other != key]:
                del self._half[other]

    def add(self, key: PartKey, rank: int, copy: RankCopy) -> None:
        with self._lock:
            if self._is_wanted(key):
                self._half.setdefault(key, {})[rank] = copy

    def finish(self, part: SnapshotPart, crcs: Sequence[int]) -> None:
        """From now on it counts. Raises CopyError where not all of it is here."""
        key = key_of(part)
        with self._lock:
            there = self._half.get(key, {})
            copies = [there.get(part.first_rank + number) for number in range(part.ranks)]
            for number, (copy, crc) in enumerate(zip(copies, crcs, strict=False)):
                if why := _why_not(copy, part, part.first_rank + number, crc):
                    raise CopyError(why)
            if len(crcs) != part.ranks or None in copies:
                raise CopyError("not all of its ranks are here")
            self._whole[key] = Whole(part, tuple(copy for copy in copies if copy is not None))
            self._half.pop(key, None)

    def drop(self) -> None:
        with self._lock:
            self._whole.clear()
            self._half.clear()


def _why_not(copy: RankCopy | None, part: SnapshotPart, rank: int, crc: int) -> str:
    if copy is None or not copy.whole:
        return f"the snapshot of rank {rank} is not all here"
    header = copy.header()
    if copy.crc != crc or header is None:
        return f"the copy of rank {rank} is damaged"
    if said_by(header) != (rank, part.world, part.attempt, part.step):
        return f"what came as rank {rank} says that it is rank {header.rank} of step {header.step}"
    return ""


# ----- this node's own ranks -----


class SlotCopier:
    """Copies what this node's ranks write of the step that is asked for, before they write over it."""

    def __init__(self, node: str, files: Sequence[str], copies: SnapshotCopies) -> None:
        self._node = node
        self._files = ":".join(files)
        self._copies = copies
        self._slots: dict[int, list[Slot]] = {}
        self._found: dict[int, tuple[Header, RankCopy]] = {}
        self._for = (-1, -1)

    def look(self, orders: SnapshotOrders) -> bool:
        """Copy what is there. True: the part is whole now. Raises OSError, CopyError."""
        asked = orders.attempt, orders.from_step
        if asked != self._for:
            self._found.clear()
            self._for = asked
        if len(self._found) >= orders.ranks:  # also where nothing is asked for
            return False
        for local in range(orders.ranks):
            if local not in self._found:
                self._look_at(local, orders)
        if len(self._found) < orders.ranks:
            return False
        headers = [self._found[local][0] for local in range(orders.ranks)]
        if len({(one.step, one.world) for one in headers}) > 1:
            raise CopyError("its ranks keep snapshots of different steps, or faster than they can be copied")
        part = SnapshotPart(
            attempt=orders.attempt,
            step=headers[0].step,
            world=orders.world,
            first_rank=orders.first_rank,
            ranks=orders.ranks,
            owner=self._node,
            at=round(max(one.at for one in headers), 3),
            size_bytes=sum(end_of(one) for one in headers),
        )
        key = key_of(part)
        self._copies.begin(key, part)
        for local, (_, copy) in self._found.items():
            self._copies.add(key, orders.first_rank + local, copy)
        self._copies.finish(part, [self._found[local][1].crc for local in range(orders.ranks)])
        return True

    def is_done(self, orders: SnapshotOrders) -> bool:
        """Nothing is awaited."""
        return (orders.attempt, orders.from_step) == self._for and len(self._found) >= orders.ranks

    def _look_at(self, local: int, orders: SnapshotOrders) -> None:
        if local not in self._slots:
            self._slots[local] = [Slot(address) for address in addresses_of(self._files, local)]
        slots = self._slots[local]
        found = [
            (header.step, number, header)
            for number, slot in enumerate(slots)
            if (header := slot.header()) is not None
            and header.attempt == orders.attempt
            and header.step >= orders.from_step
            and header.rank == orders.first_rank + local
            and header.world == orders.world
        ]
        if found:
            _, number, header = min(found)
            copy = copy_slot(slots[number], header)
            if copy is not None:
                self._found[local] = header, copy


def put_into_slots(
    files: Sequence[str], wanted: SnapshotBring, copies: Sequence[RankCopy], go_on: Callable[[], None]
) -> None:
    """This node's ranks will find these snapshots as if they had written them. No rank is there; `go_on` raises where
    one may come. Raises OSError, CopyError."""
    joined = ":".join(files)
    for local, copy in enumerate(copies):
        header, rank = copy.header(), wanted.first_rank + local
        if header is None or said_by(header) != (rank, wanted.world, wanted.attempt, wanted.step):
            raise CopyError(f"what came as rank {rank} is another snapshot")
        slots = [Slot(address, writable=True) for address in addresses_of(joined, local)]
        try:
            if len(slots) < SLOTS:
                raise CopyError(f"there is no place for the snapshot of rank {rank} on this node")
            _put(slots, header, copy, go_on)
        finally:
            for slot in slots:
                slot.close()


def _put(slots: Sequence[Slot], header: Header, copy: RankCopy, go_on: Callable[[], None]) -> None:
    there = [slot.header() for slot in slots]
    if header in there:
        return
    if copy.size > FREE_SHARE * free_bytes():
        raise CopyError(f"too little memory is free for a snapshot of {copy.size} bytes")
    number = min(range(len(slots)), key=lambda one: own.sequence if (own := there[one]) is not None else 0)
    slot = slots[number]
    slot.void()
    memory = slot.reserve(copy.size)
    crc = zlib.crc32(os.pread(copy.descriptor, DATA_AT, 0))
    memory[PAGE:DATA_AT] = os.pread(copy.descriptor, PAGE, PAGE)
    at = DATA_AT
    while at < copy.size:
        go_on()
        data = os.pread(copy.descriptor, min(CHUNK, copy.size - at), at)
        memory[at : at + len(data)] = data
        crc = zlib.crc32(data, crc)
        at += len(data)
    if crc != copy.crc:
        raise CopyError(f"the copy of rank {header.rank} has changed in memory")
    go_on()
    slot.commit(header)


# ----- between nodes -----


def _asked(op: str, key: PartKey, **more: object) -> dict[str, Any]:
    owner, attempt, step = key
    return {"op": op, "owner": owner, "name": KEY, "attempt": attempt, "stamp": step, **more}


def send_snapshot(wire: Wire, whole: Whole, pace: CopyPace, count: Callable[[int], None]) -> None:
    """To a peer that keeps it. What came whole before is not sent again. Raises OSError, PeerError, CopyError."""
    part, key = whole.part, key_of(whole.part)
    told = msgspec.to_builtins(part)
    for number, copy in enumerate(whole.copies):
        wire.send(_asked("put_snapshot", key, part=told, rank=part.first_rank + number, size=copy.size, crc=copy.crc))
        if wire.answer().get("send"):
            with copy.reading() as descriptor:
                send_content(wire, descriptor, pace, count)
            wire.answer()
    wire.send(_asked("whole_snapshot", key, part=told, crcs=[copy.crc for copy in whole.copies]))
    wire.answer()


def fetch_snapshot(
    wire: Wire, bring: SnapshotBring, source: PartSource, count: Callable[[int], None]
) -> list[RankCopy]:
    """All of a part, checked. Raises OSError, PeerError, CopyError."""
    found: list[RankCopy] = []
    for rank in range(bring.first_rank, bring.first_rank + bring.ranks):
        wire.send(_asked("get_snapshot", (source.owner, bring.attempt, bring.step), rank=rank))
        about = wire.answer()
        try:
            size, crc = int(about["size"]), int(about["crc"])
        except (KeyError, TypeError, ValueError):
            raise PeerError("its answer is incomplete") from None
        copy = RankCopy(size)
        for data in wire.data(copy.size):
            copy.write(data)
            count(len(data))
        if not copy.whole or copy.crc != crc:
            raise CopyError(f"the snapshot of rank {rank} did not arrive whole")
        found.append(copy)
    return found


class SnapshotServer:
    """What a peer asks, answered. `PeerServer` has seen who asks."""

    def __init__(self, copies: SnapshotCopies, told: Callable[[], None]) -> None:
        self._copies = copies
        self._told = told
        self.handlers: dict[str, Handler] = {
            "put_snapshot": self._put,
            "whole_snapshot": self._whole,
            "get_snapshot": self._get,
        }

    def _put(self, wire: Wire, request: dict[str, Any], owner: str, key: SaveKey) -> None:
        own = owner, key.attempt, key.stamp
        try:
            part = msgspec.convert(request["part"], SnapshotPart)
            rank, size, crc = int(request["rank"]), int(request["size"]), int(request["crc"])
            there = self._copies.rank(own, rank)
            if self._copies.get(own) is not None or (there is not None and there.crc == crc):
                wire.send({"have": True})
                return
            if not 0 <= rank - part.first_rank < part.ranks or not DATA_AT <= size <= part.size_bytes:
                raise CopyError("its request is impossible")
            self._copies.begin(own, part)
            copy = RankCopy(size)
        except (KeyError, TypeError, ValueError, CopyError, OSError) as error:
            wire.send({"error": str(error)[:300] or "its request is incomplete"})
            return
        wire.send({"send": True})
        for data in wire.data(size):
            copy.write(data)
        if copy.crc != crc:
            wire.send({"error": f"the snapshot of rank {rank} did not arrive whole"})
            return
        self._copies.add(own, rank, copy)
        wire.send({"ok": True})

    def _whole(self, wire: Wire, request: dict[str, Any], owner: str, key: SaveKey) -> None:
        try:
            part = msgspec.convert(request["part"], SnapshotPart)
            if key_of(part) != (owner, key.attempt, key.stamp):
                raise CopyError("it is another snapshot's")
            if self._copies.get(key_of(part)) is None:
                self._copies.finish(part, [int(crc) for crc in request["crcs"]])
        except (KeyError, TypeError, ValueError, CopyError) as error:
            wire.send({"error": str(error)[:300]})
            return
        self._told()
        wire.send({"ok": True})

    def _get(self, wire: Wire, request: dict[str, Any], owner: str, key: SaveKey) -> None:
        found = self._copies.get((owner, key.attempt, key.stamp))
        rank = request.get("rank")
        number = rank - found.part.first_rank if found is not None and isinstance(rank, int) else -1
        if found is None or not 0 <= number < len(found.copies):
            wire.send({"error": "that snapshot is not here"})
            return
        copy = found.copies[number]
        with copy.reading() as descriptor:
            wire.send({"size": copy.size, "crc": copy.crc})
            send_content(wire, descriptor, in_a_hurry())


# ----- what is done, and when -----

LOOK_EVERY_S: Final = 0.25
"""While a step is awaited: a slot is written over two snapshots later."""
CALM_S: Final = 1.0
AGAIN_S, LONGEST_AGAIN_S = 2.0, 30.0
"""After a failure."""


class SnapshotsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """All that is wanted now."""

    orders: SnapshotOrders = SnapshotOrders()
    peer: PartSource | None = None
    bring: SnapshotBring | None = None
    number: int = 0
    """Of `bring`."""


class SnapshotMirror:
    """One thread copies and sends, one brings; others answer peers."""

    def __init__(
        self,
        node: str,
        files: Sequence[str],
        call: Callable[[PartSource], AbstractContextManager[Wire]],
        told: Callable[[], None],
    ) -> None:
        """`call`: a connection to a peer. `told`: what is reported has changed."""
        self.copies = SnapshotCopies()
        self.server = SnapshotServer(self.copies, told)
        self.brought, self.bring_problem, self.problem = 0, "", ""
        self._node, self._files = node, tuple(files)
        self._call, self._told = call, told
        self._copier = SlotCopier(node, files, self.copies)
        self._asked = SnapshotsAsked()
        self._sent: tuple[PartKey, PartSource] | None = None
        """What was sent, and to whom: a mover that was started again answers at another port, and has lost it."""
        self._news, self._bring_news = threading.Event(), threading.Event()

    def obey(self, asked: SnapshotsAsked) -> None:
        self._asked = asked
        if self.copies.obey(asked.orders):
            self._told()
        self._news.set()
        self._bring_news.set()

    def run(self) -> None:
        again_s = AGAIN_S
        while True:
            try:
                pause_s = self.turn()
                self._set_problem("")
                again_s = AGAIN_S
            except GaveWay:
                pause_s = CALM_S
            except (OSError, PeerError, CopyError) as error:
                self._set_problem(f"snapshots of {self._node} are not mirrored: {error}")
                pause_s, again_s = again_s, min(2 * again_s, LONGEST_AGAIN_S)
            self._news.wait(pause_s)
            self._news.clear()

    def turn(self) -> float:
        """Do what is due; how long to rest. Raises OSError, PeerError, CopyError."""
        asked = self._asked
        if self._copier.look(asked.orders):
            self._told()
        self.send(asked)
        return CALM_S if self._copier.is_done(asked.orders) else LOOK_EVERY_S

    def send(self, asked: SnapshotsAsked) -> None:
        """Raises OSError, PeerError, CopyError."""
        peer = asked.peer
        own = [part for part in self.copies.parts if part.owner == self._node and part.attempt == asked.orders.attempt]
        newest = max(own, key=lambda part: part.step, default=None)
        if peer is None or newest is None or self._sent == (key_of(newest), peer):
            return
        whole = self.copies.get(key_of(newest))
        if whole is None:
            return

        def count(_: int) -> None:
            now = self._asked
            if now.number > self.brought and now.bring is not None:
                raise GaveWay("ranks wait for a snapshot")
            if not is_needed(whole.part, now.orders):
                raise GaveWay("another step is copied now")

        with self._call(peer) as wire:
            send_snapshot(wire, whole, CopyPace(), count)
        self._sent = key_of(newest), peer

    def run_bringing(self) -> None:
        """A thread of its own: the other one may wait for a peer that is gone."""
        while True:
            self._bring_news.wait()
            self._bring_news.clear()
            asked = self._asked
            if asked.bring is not None and asked.number > self.brought:
                self.bring(asked.bring, asked.number)

    def bring(self, wanted: SnapshotBring, number: int) -> None:
        """Have the part in this node's slots. What stands in the way is told."""

        def go_on() -> None:
            if self._asked.bring is None or self._asked.number != number:
                raise CopyError("nobody waits for it any more")

        problem = f"no node has the snapshots of step {wanted.step}"
        for source in wanted.sources:
            try:
                put_into_slots(self._files, wanted, self._from(source, wanted, go_on), go_on)
                problem = ""
                break
            except (OSError, PeerError, CopyError) as error:
                problem = f"{source.node} does not give the snapshots of {source.owner}: {error}"
        self.brought, self.bring_problem = number, problem
        self._told()

    def _from(self, source: PartSource, wanted: SnapshotBring, go_on: Callable[[], None]) -> Sequence[RankCopy]:
        if source.node == self._node:
            whole = self.copies.get((source.owner, wanted.attempt, wanted.step))
            if whole is None:
                raise CopyError("it is not here any more")
            return whole.copies
        with self._call(source) as wire:
            return fetch_snapshot(wire, wanted, source, lambda _: go_on())

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._told()
