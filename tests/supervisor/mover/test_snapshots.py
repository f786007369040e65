"""Copies of snapshots: real slots, real connections between two movers' servers, torn at each frame."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recovery.snapshot_choice import SnapshotPart
from recovery.snapshot_memory import DATA_AT, PAGE, Header, Slot, addresses, make_slots, read_header
from recovery.tiers import PartSource, SnapshotBring, SnapshotOrders
from supervisor.mover.copying import CHUNK, CopyError, CopyPace
from supervisor.mover.peer import Mirrors, PeerError, PeerServer, Wire, call
from supervisor.mover.snapshots import (
    RankCopy,
    SnapshotMirror,
    SnapshotsAsked,
    copy_slot,
    fetch_snapshot,
    held,
    key_of,
    put_into_slots,
    send_snapshot,
)
from supervisor.wire.authentication import SharedSecret

SECRET = SharedSecret("t" * 40)
SIZE = 2 * CHUNK + 12 * PAGE
"""Of a rank's tensors: several frames."""
ORDERS = SnapshotOrders(attempt=1, from_step=10, first_rank=2, ranks=2, world=4)


class Node:
    """Two ranks' slots and a mover's part for snapshots. Rank 2 is the first."""

    def __init__(self, name: str, root: Path, cut: Callable[[Wire], Wire] = lambda wire: wire) -> None:
        self.name = name
        self.held = make_slots(2)
        self.files = tuple(addresses(self.held))
        self.slots = [Slot(address, writable=True) for address in self.files]
        self.cut = cut
        self.told = 0
        self.mirror = SnapshotMirror(name, self.files, self.connected, self.count)
        folder = root / name
        folder.mkdir()
        self.server = PeerServer(
            Mirrors(folder, "job"), SECRET, lambda *_: None, "127.0.0.1", more=self.mirror.server.handlers
        )
        self.server.start()

    def count(self) -> None:
        self.told += 1

    @contextlib.contextmanager
    def connected(self, peer: PartSource) -> Iterator[Wire]:
        wire, connection = call(peer.address, peer.port, SECRET, None)
        try:
            yield self.cut(wire)
        finally:
            connection.close()

    def source(self, owner: str) -> PartSource:
        return PartSource(owner=owner, node=self.name, address="127.0.0.1", port=self.server.port)

    def write(self, step: int, *, attempt: int = 1) -> None:
        """Both ranks keep a snapshot of this step."""
        for local in (0, 1):
            write(self.slots[2 * local + step % 2], 2 + local, step, attempt)

    def read(self) -> list[tuple[int, int, int]]:
        found = [slot.header() for slot in self.slots]
        return sorted((one.rank, one.attempt, one.step) for one in found if one is not None)

    def end(self) -> None:
        self.server.close()
        for slot in self.slots:
            slot.close()
        for descriptor in self.held:
            os.close(descriptor)


def content(rank: int, step: int) -> bytes:
    return bytes([(rank * 50 + step) % 256]) * SIZE


def write(slot: Slot, rank: int, step: int, attempt: int = 1, *, commit: bool = True) -> Header:
    table = json.dumps([rank, step]).encode()
    at = DATA_AT + SIZE
    slot.void()
    memory = slot.reserve(at + len(table))
    memory[DATA_AT:at] = content(rank, step)
    memory[at : at + len(table)] = table
    header = Header(step + 1, rank, 4, attempt, step, 100.0 + step, SIZE, at, len(table), zlib.crc32(table))
    if commit:
        slot.commit(header)
        slot.write_sums(header.sequence, {"content": [f"{rank}-{step}"]})
    return header


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(name: str, **more: Any) -> Node:
        made.append(Node(name, tmp_path, **more))
        return made[-1]

    yield make
    for node in made:
        node.end()


def turn(node: Node, orders: SnapshotOrders = ORDERS, **more: Any) -> float:
    node.mirror.obey(SnapshotsAsked(orders=orders, **more))
    return node.mirror.turn()


def steps(node: Node) -> list[tuple[str, int]]:
    return [(part.owner, part.step) for part in node.mirror.copies.parts]


# ----- this node's own -----


def test_the_first_snapshot_from_the_named_step_on_is_copied(nodes: Callable[..., Node]) -> None:
    a = nodes("a")
    a.write(9)
    turn(a)
    assert steps(a) == []
    a.write(10)
    a.write(11)
    turn(a)
    assert steps(a) == [("a", 10)]
    [own] = a.mirror.copies.parts
    assert (own.first_rank, own.ranks, own.world, own.attempt) == (2, 2, 4, 1)
    a.write(12)
    a.write(13)  # both slots have turned over
    turn(a)
    whole = a.mirror.copies.get(key_of(own))
    assert whole is not None
    for rank, copy in enumerate(whole.copies, 2):
        assert os.pread(copy.descriptor, SIZE, DATA_AT) == content(rank, 10)


@pytest.mark.parametrize("attempt", [0, 2])
def test_another_attempt_s_is_not_copied(nodes: Callable[..., Node], attempt: int) -> None:
    a = nodes("a")
    a.write(10, attempt=attempt)
    turn(a)
    assert steps(a) == []


def test_a_slot_that_is_written_over_meanwhile_gives_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two reads the rank begins the next snapshot, or has written all of it."""
    held = make_slots(1)
    [slot, _] = [Slot(address, writable=True) for address in addresses(held)]
    reads = 0
    real = os.pread

    def pread(descriptor: int, count: int, at: int) -> bytes:
        nonlocal reads
        data = real(descriptor, count, at)
        reads += 1
        if reads == turns:
            write(slot, 0, 12, commit=committed)
        return data

    try:
        for committed in (False, True):
            reads, turns = 0, 10**9
            monkeypatch.setattr(os, "pread", pread)
            assert copy_slot(slot, write(slot, 0, 10)) is not None
            total = reads
            assert total > 6
            for turns in range(1, total - 1):  # the last read is of the copy, and before it the slot was right
                header = write(slot, 0, 10)
                reads = 0
                assert copy_slot(slot, header) is None, (committed, turns, total)
    finally:
        monkeypatch.undo()
        for descriptor in held:
            os.close(descriptor)


def test_ranks_that_were_copied_at_different_steps_are_no_part(nodes: Callable[..., Node]) -> None:
    a = nodes("a")
    write(a.slots[0], 2, 10)
    turn(a)
    write(a.slots[2], 3, 11)
    with pytest.raises(CopyError):
        turn(a)
    assert steps(a) == []
    a.write(20)
    turn(a, SnapshotOrders(attempt=1, from_step=20, first_rank=2, ranks=2, world=4))
    assert steps(a) == [("a", 20)]


def test_where_memory_is_short_nothing_is_copied() -> None:
    gc.collect()
    before = held.bytes  # what other tests have left
    with pytest.raises(CopyError):
        RankCopy(PAGE * 3, free=lambda: before + PAGE * 5)
    first = RankCopy(PAGE * 3, free=lambda: before + PAGE * 6)
    assert held.bytes == before + first.size == before + PAGE * 3
    with pytest.raises(CopyError):
        RankCopy(PAGE * 3, free=lambda: before + PAGE * 3)  # both would be all
    del first
    assert RankCopy(PAGE * 3, free=lambda: before + PAGE * 6).size == PAGE * 3


def test_what_is_not_needed_any_more_is_freed(nodes: Callable[..., Node]) -> None:
    a = nodes("a")
    gc.collect()  # what other tests have left
    before = copies_held()
    a.write(10)
    turn(a)
    assert copies_held() == before + 2
    kept = SnapshotOrders(attempt=1, from_step=20, first_rank=2, ranks=2, world=4, keep=((1, 10),))
    turn(a, kept)
    assert steps(a) == [("a", 10)]
    a.write(20)
    turn(a, kept)
    assert steps(a) == [("a", 10), ("a", 20)]
    turn(a, SnapshotOrders())
    assert (steps(a), copies_held()) == ([], before)


def test_a_lack_of_memory_is_told_in_the_same_words() -> None:
    """Each other text would be another line on the user's terminal, every half minute."""
    told = set()
    for size in (PAGE, 2 * PAGE):
        with pytest.raises(CopyError) as raised:
            RankCopy(4 * PAGE, free=lambda size=size: size)  # type: ignore[misc]
        told.add(str(raised.value))
    assert len(told) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[" * 4000,
        '{"rank": 1}',
        f"[1, 2, 4, 1, 10, Infinity, {SIZE}, {DATA_AT + SIZE}, 10, 1]",
        f"[1, 2, 4, 1, 10, NaN, {SIZE}, {DATA_AT + SIZE}, 10, 1]",
        f"[1, 2, 4, 1, 10, 100.0, {SIZE}, {DATA_AT + SIZE}.0, 10, 1]",
        f"[1, 2, 4, 1, 10, 100.0, {SIZE}, null, 10, 1]",
    ],
)
def test_a_header_that_says_anything_else_is_none(text: str) -> None:
    """A peer, or a script, may have written it: neither agent nor mover may end of it."""
    head = struct.pack("<8sQQII", b"UNBSNAP1", 1, 1, len(text), zlib.crc32(text.encode()))
    assert read_header((head + text.encode()).ljust(PAGE, b"\0"), 2 * SIZE) is None


def copies_held() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd:unbroken-copy" in link for link in links)


# ----- between nodes -----


def bring(*sources: PartSource, step: int = 10) -> SnapshotBring:
    return SnapshotBring(
        attempt=1, step=step, world=4, first_rank=2, ranks=2, size_bytes=2 * SIZE, sources=tuple(sources)
    )


def test_a_part_comes_back_from_a_peer_into_another_node_s_slots(nodes: Callable[..., Node]) -> None:
    a, b, c = nodes("a"), nodes("b"), nodes("c")
    a.write(10)
    turn(b)
    turn(a, peer=b.source("a"))
    assert steps(b) == [("a", 10)]
    assert b.told
    a.server.close()
    c.write(4)
    c.write(5)
    wanted = bring(a.source("a"), b.source("a"))
    turn(c, bring=wanted, number=1)
    c.mirror.bring(wanted, 1)
    assert (c.mirror.brought, c.mirror.bring_problem) == (1, "")
    assert c.read() == [(2, 1, 5), (2, 1, 10), (3, 1, 5), (3, 1, 10)]  # the older one has made way
    for slot in c.slots:
        header = slot.header()
        assert header is not None
        if header.step == 10:
            assert slot.sums(header.sequence) == {"content": [f"{header.rank}-10"]}
            assert bytes(slot.mapped()[DATA_AT : DATA_AT + SIZE]) == content(header.rank, 10)


class Torn:
    """A wire that breaks after so many frames of ours."""

    def __init__(self, wire: Wire, frames: int) -> None:
        self._wire, self._left, self.sent = wire, frames, 0

    def _count(self) -> None:
        if self._left <= 0:
            self._wire._connection.close()
            raise PeerError("cut")
        self._left -= 1
        self.sent += 1

    def send(self, message: dict[str, Any]) -> None:
        self._count()
        self._wire.send(message)

    def send_data(self, data: bytes) -> None:
        self._count()
        self._wire.send_data(data)

    def answer(self) -> dict[str, Any]:
        return self._wire.answer()


def test_a_transfer_that_is_torn_at_any_frame_never_counts(nodes: Callable[..., Node]) -> None:
    """And the next try completes it; a rank that came whole is not sent again."""
    a, b = nodes("a"), nodes("b")
    a.write(10)
    turn(a)
    whole = a.mirror.copies.get(("a", 1, 10))
    assert whole is not None
    with a.connected(b.source("a")) as wire:
        turn(b)
        counting: Any = Torn(wire, 10**9)
        send_snapshot(counting, whole, hurried(), lambda _: None)
    frames = counting.sent
    assert frames >= 9
    for cut in range(frames):
        b.mirror.obey(SnapshotsAsked())
        b.mirror.obey(SnapshotsAsked(orders=ORDERS))
        with a.connected(b.source("a")) as wire:
            torn: Any = Torn(wire, cut)
            with pytest.raises((PeerError, OSError)):
                send_snapshot(torn, whole, hurried(), lambda _: None)
        assert steps(b) == [], cut
        with a.connected(b.source("a")) as wire:
            again: Any = Torn(wire, 10**9)
            send_snapshot(again, whole, hurried(), lambda _: None)
        assert steps(b) == [("a", 10)]
        assert again.sent == frames if cut < frames // 2 else again.sent < frames


def hurried() -> CopyPace:
    pace = CopyPace()
    pace.hurry = True
    return pace


@pytest.mark.parametrize("damage", ["content", "other rank", "other step"])
def test_what_is_not_what_was_announced_does_not_count(nodes: Callable[..., Node], damage: str) -> None:
    a, b = nodes("a"), nodes("b")
    a.write(10)
    turn(a)
    turn(b)
    whole = a.mirror.copies.get(("a", 1, 10))
    assert whole is not None
    copy = whole.copies[1]
    if damage == "content":
        os.pwrite(copy.descriptor, b"\xff", DATA_AT + 5)
    else:
        rank, step = (2, 10) if damage == "other rank" else (3, 12)
        forged = make_slots(1)
        slot = Slot(addresses(forged)[0], writable=True)
        write(slot, rank, step)
        os.pwrite(copy.descriptor, os.pread(slot.descriptor, PAGE, 0), 0)
        data = os.pread(copy.descriptor, copy.size, 0)
        copy.crc = zlib.crc32(data)
        slot.close()
        for descriptor in forged:
            os.close(descriptor)
    with pytest.raises(PeerError), a.connected(b.source("a")) as wire:
        send_snapshot(wire, whole, hurried(), lambda _: None)
    assert steps(b) == []
    with pytest.raises(CopyError):
        put_into_slots(b.files, bring(), whole.copies, lambda: None)
    assert not [one for one in b.read() if one[0] == 3]


@pytest.mark.parametrize("crcs", [(), (0,), (0, 1), (1, 0), (0, 0, 0)])
def test_only_all_ranks_with_their_checksums_are_a_part(nodes: Callable[..., Node], crcs: tuple[int, ...]) -> None:
    """`crcs`: by how much each is wrong."""
    a, b = nodes("a"), nodes("b")
    a.write(10)
    turn(a)
    turn(b)
    whole = a.mirror.copies.get(("a", 1, 10))
    assert whole is not None
    key, right = key_of(whole.part), [copy.crc for copy in whole.copies]
    b.mirror.copies.begin(key, whole.part)
    for rank, copy in enumerate(whole.copies, 2):
        with pytest.raises(CopyError):
            b.mirror.copies.finish(whole.part, right)
        b.mirror.copies.add(key, rank, copy)
    wrong = [crc + more for crc, more in zip([*right, 0], crcs, strict=False)]
    with pytest.raises(CopyError):
        b.mirror.copies.finish(whole.part, wrong)
    assert steps(b) == []
    b.mirror.copies.finish(whole.part, right)
    assert steps(b) == [("a", 10)]


def test_what_nobody_waits_for_is_not_put_into_slots(nodes: Callable[..., Node]) -> None:
    """Ranks may have started: a slot that was begun holds nothing."""
    a = nodes("a")
    a.write(10)
    turn(a)
    whole = a.mirror.copies.get(("a", 1, 10))
    assert whole is not None
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    b = nodes("b")
    put_into_slots(b.files, bring(), whole.copies, count)
    assert calls > 6
    for turns in range(calls):
        c = nodes(f"c{turns}")
        left = [turns]

        def go_on(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise CopyError("nobody waits")

        with pytest.raises(CopyError):
            put_into_slots(c.files, bring(), whole.copies, go_on)
        assert c.read() in ([], [(2, 1, 10)])
    b.mirror.obey(SnapshotsAsked(orders=ORDERS, bring=None, number=3))
    b.mirror.bring(bring(a.source("a")), 3)
    assert b.mirror.bring_problem


def test_a_peer_that_was_started_again_gets_the_copy_once_more(nodes: Callable[..., Node]) -> None:
    """Under its name another mover answers now, which has nothing."""
    a, b = nodes("a"), nodes("b")
    a.write(10)
    turn(b)
    turn(a, peer=b.source("a"))
    assert steps(b) == [("a", 10)]
    again = nodes("again")
    turn(again)
    turn(a, peer=msgspec.structs.replace(again.source("a"), node="b"))
    assert steps(again) == [("a", 10)]


def test_a_peer_takes_only_what_the_controller_wants_mirrored(nodes: Callable[..., Node]) -> None:
    a, b = nodes("a"), nodes("b")
    a.write(10)
    turn(a)
    b.mirror.obey(SnapshotsAsked(orders=SnapshotOrders(attempt=1, from_step=11)))
    with pytest.raises(PeerError):
        turn(a, peer=b.source("a"))
    assert steps(b) == []


def test_only_a_part_with_a_name_of_its_own_is_taken(nodes: Callable[..., Node]) -> None:
    b = nodes("b")
    turn(b)
    told = SnapshotPart(attempt=1, step=10, world=4, first_rank=2, ranks=2, owner="../x", size_bytes=2 * SIZE)
    with pytest.raises(CopyError):
        b.mirror.copies.begin(key_of(told), told)


class Liar:
    """A peer that answers anything."""

    def __init__(self, answer: dict[str, Any], data: bytes = b"") -> None:
        self._answer, self._data = answer, data

    def send(self, _: dict[str, Any]) -> None:
        """It takes whatever is asked."""

    def answer(self) -> dict[str, Any]:
        return self._answer

    def data(self, size: int) -> Iterator[bytes]:
        yield self._data[:size]


@pytest.mark.parametrize(
    ("answer", "data"),
    [
        ({}, b""),
        ({"size": "x", "crc": 1}, b""),
        ({"size": -1, "crc": 1}, b""),
        ({"size": 1 << 60, "crc": 1}, b""),
        ({"size": 5, "crc": 1}, b"12345"),
        ({"size": 3 * PAGE, "crc": zlib.crc32(bytes(3 * PAGE))}, bytes(3 * PAGE)),
        ({"size": 5, "crc": zlib.crc32(b"1234")}, b"1234"),
    ],
)
def test_whatever_a_peer_answers_nothing_is_taken_for_a_snapshot(
    nodes: Callable[..., Node], answer: dict[str, Any], data: bytes
) -> None:
    b = nodes("b")
    liar: Any = Liar(answer, data)
    wanted = bring()
    with pytest.raises((PeerError, CopyError, OSError)):
        put_into_slots(b.files, wanted, fetch_snapshot(liar, wanted, b.source("a"), lambda _: None), lambda: None)
    assert b.read() == []
