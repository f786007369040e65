"""Movers of several nodes in one process: real files, real connections, and kills at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recovery.tiers import BringBack, NodeTiers, PartSource, Save, SavePart, bring_back, join
from supervisor.mover.copying import CopyError, NewFile, pause_s
from supervisor.mover.peer import Mirrors, PeerError, PeerServer, SourcePace, TooSlow, call, fetch_file, send_part
from supervisor.mover.process import Mover, MoverOrders, MoverSetup, MoverStatus
from supervisor.mover.publish import why_full, why_not_published
from supervisor.wire.authentication import SharedSecret
from tests.supervisor.mover.saves import dcp_files, torch_file
from tests.supervisor.mover.test_kills import (
    content_of,
    no_pause,
    nothing,
    part_files,
    run_and_kill,
    seconds_of,
)

SECRET = SharedSecret("t" * 40)


class Node:
    """A node's mover, driven step by step."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.folder = root / name
        self.folder.mkdir(exist_ok=True)
        (root / "shared").mkdir(exist_ok=True)
        (root / "job").mkdir(exist_ok=True)
        token = root / "job" / "token"
        if not token.exists():
            token.write_text("t" * 40)
            token.chmod(0o600)
        self.said: list[MoverStatus] = []
        setup = MoverSetup(
            node=name,
            checkpoint_dir=str(self.folder),
            publish_to=str(root / "shared"),
            job_dir=str(root / "job"),
            token_file=str(token),
        )
        self.mover = Mover(setup, self.said.append)
        self.mover.bring_again_s = 0.0
        self.mover._server.start()
        self.orders: dict[str, Any] = {"attempt": 1, "since": 0.0, "at_rest": True}

    def write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def look(self, **orders: Any) -> NodeTiers:
        self.orders |= orders
        saves = [str(path) for path in sorted(self.folder.iterdir(), reverse=True) if not path.name.startswith(".")]
        self.mover._orders = MoverOrders(**{"paths": tuple(saves), **self.orders})
        self.mover.look()
        return self.mover.status().tiers

    def source(self, owner: str = "") -> PartSource:
        return PartSource(owner=owner or self.name, node=self.name, address="127.0.0.1", port=self.mover._server.port)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    made: list[Node] = []

    def make(name: str) -> Node:
        made.append(Node(name, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.mover._server.close()


def dcp(nodes: list[Node], step: int, size: int = 300_000) -> dict[str, bytes]:
    """A real DCP save, each node with its own file, the first one with `.metadata`."""
    content = dcp_files(len(nodes), step, size)
    for rank, one in enumerate(nodes):
        one.write(f"step-{step}/__{rank}_0.distcp", content[f"__{rank}_0.distcp"])
    nodes[0].write(f"step-{step}/.metadata", content[".metadata"])
    return {f"step-{step}/{name}": data for name, data in content.items()}


def lose_disk(one: Node) -> None:
    for path in one.folder.rglob("*"):
        if path.is_file():
            path.unlink()


def wanted(nodes: list[Node], name: str, present: set[str]) -> BringBack:
    reports = {one.name: one.mover.status().tiers for one in nodes}
    addresses = {one.name: "127.0.0.1" for one in nodes if one.name in present}
    found = bring_back(join(reports, present, set()), name, reports, addresses)
    assert found is not None
    return found


def test_a_spare_gets_the_part_of_a_node_that_was_lost_with_its_disk(node: Callable[[str], Node]) -> None:
    a, b, c = node("a"), node("b"), node("c")
    content = dcp([a, b], 10)
    for one, peer in ((a, b), (b, a)):
        one.look(peer=peer.source())
        while one.mover.mirror():
            pass
    back = wanted([a, b, c], "step-10", {"a", "c"})
    b.mover._server.close()
    lose_disk(b)
    for one in (a, c):
        one.mover.bring(back, 1)
        assert one.mover.status().bring_problem == ""
        assert content_of(one.folder) == content
    told = c.look()
    assert told.parts == ()
    assert {part.owner for part in told.mirrors} == {"a", "b"}, "it has what others wrote"


def test_what_cannot_be_had_is_told_and_nothing_is_made_up(node: Callable[[str], Node]) -> None:
    a, b = node("a"), node("b")
    dcp([a, b], 10)
    a.look(), b.look()
    back = wanted([a, b], "step-10", {"a", "b"})
    b.mover._server.close()
    a.mover.bring(back, 1)
    status = a.mover.status()
    assert "b does not give the part of b" in status.bring_problem
    assert [one.key for one in status.tiers.failed] == [back.save.key]
    assert not (a.folder / "step-10/__1_0.distcp").exists()


def test_a_torn_file_is_moved_aside_and_comes_back_from_the_mirror(node: Callable[[str], Node]) -> None:
    a, b = node("a"), node("b")
    content = dcp([a, b], 10)
    b.look(peer=a.source())
    assert b.mover.mirror()
    torn = b.folder / "step-10/__1_0.distcp"
    at = torn.stat().st_mtime_ns
    torn.write_bytes(b"torn")
    os.utime(torn, ns=(at, at))
    b.mover._server.close()
    b = node("b")  # the node was switched off and on
    a.look(), b.look()
    b.mover.bring(wanted([a, b], "step-10", {"a", "b"}), 1)
    assert b.mover.status().bring_problem == ""
    assert content_of(b.folder) == content
    (aside,) = (b.folder / "step-10/.unbroken-set-aside").glob("*.distcp")
    assert aside.read_bytes() == b"torn"


def published(one: Node) -> dict[str, bytes]:
    return content_of(one.folder.parent / "shared")


def save_of(nodes: list[Node]) -> Save:
    """The newest one that is local."""
    joined = join({one.name: one.mover.status().tiers for one in nodes}, {one.name for one in nodes}, set())
    local = [one.save for one in joined if one.usable and "local" in one.tiers]
    return max(local, key=lambda save: (save.attempt, save.stamp))


def test_a_save_is_published_only_when_every_part_is_staged(node: Callable[[str], Node]) -> None:
    a, b, c = node("a"), node("b"), node("c")
    content = dcp([a, b], 10)
    a.look(), b.look()
    save = save_of([a, b])
    assert a.mover.stage()
    assert not a.mover.stage()
    a.look(commit=(save,))
    with pytest.raises(CopyError, match="not staged"):
        a.mover.commit()
    assert published(a) == {}
    assert b.mover.stage()
    assert a.mover.commit()
    assert not a.mover.commit()
    assert published(a) == content
    lose_disk(a), lose_disk(b)
    c.mover._publisher.read_records()
    told = c.look()
    back = wanted([c], "step-10", {"c"})
    assert told.published
    assert back.published
    assert not back.sources
    c.mover.bring(back, 1)
    assert content_of(c.folder) == content


def test_with_the_mirror_gone_too_the_published_save_is_left(node: Callable[[str], Node]) -> None:
    a, b = node("a"), node("b")
    content = dcp([a, b], 10)
    a.look(), b.look(peer=a.source())
    assert b.mover.mirror()
    assert a.mover.stage()
    assert b.mover.stage()
    a.look(commit=(save_of([a, b]),))
    assert a.mover.commit()
    shutil.rmtree(a.mover._mirrors.home / "b")
    b.mover._server.close()
    back = wanted([a, b], "step-10", {"a", "b"})
    assert back.published
    a.mover.bring(back, 1)
    assert a.mover.status().bring_problem == ""
    assert content_of(a.folder) == content


def test_a_link_that_is_cut_in_the_middle_leaves_the_rest_to_another_source(
    node: Callable[[str], Node],
) -> None:
    """The peer sends half of a file and is gone; the other mirror gives it."""
    a, b, c = node("a"), node("b"), node("c")
    content = dcp([a, b], 10)
    b.look(peer=c.source())
    assert b.mover.mirror()
    a.look(), c.look()
    back = wanted([a, b, c], "step-10", {"a", "b", "c"})
    cut = half_way(b.mover._server.port)
    sources = tuple(
        PartSource(**{**{name: getattr(one, name) for name in one.__struct_fields__}, "port": cut})
        if one.node == "b"
        else one
        for one in back.sources
    )
    a.mover.bring(BringBack(save=back.save, sources=sources[:-1]), 1)
    assert "hung up" in a.mover.status().bring_problem
    assert not list(a.folder.rglob("*partial"))
    a.mover.bring(BringBack(save=back.save, sources=sources), 2)
    assert a.mover.status().bring_problem == ""
    assert content_of(a.folder) == content


def test_a_peer_that_is_very_slow_leaves_the_rest_to_the_shared_folder(node: Callable[[str], Node]) -> None:
    a, b = node("a"), node("b")
    content = dcp([a, b], 10)
    a.look(), b.look()
    assert a.mover.stage()
    assert b.mover.stage()
    a.look(commit=(save_of([a, b]),))
    assert a.mover.commit()
    back = wanted([a, b], "step-10", {"a", "b"})
    (source,) = [one for one in back.sources if one.node == "b"]
    slow = msgspec.structs.replace(source, port=half_way(b.mover._server.port, pieces=64))
    a.mover.slow_after_s = 0.3
    a.mover.bring(msgspec.structs.replace(back, sources=(slow,)), 1)
    assert a.mover.status().bring_problem == ""
    assert content_of(a.folder) == content
    told = [problem for status in a.said for problem in status.problems]
    assert any("b gives the part of b with" in one for one in told)
    assert a.mover.status().problems == ()


def test_of_two_slow_sources_the_quicker_one_is_waited_for(node: Callable[[str], Node]) -> None:
    """The other mirror is slower still, and nothing is published."""
    a, b, c = node("a"), node("b"), node("c")
    content = dcp([a, b], 10, 2_000_000)
    b.look(peer=c.source())
    assert b.mover.mirror()
    a.look(), c.look()
    back = wanted([a, b, c], "step-10", {"a", "b", "c"})
    assert not back.published
    ports = {
        "b": half_way(b.mover._server.port, pieces=256, times=1),
        "c": half_way(c.mover._server.port, pieces=16),
    }
    slow = [msgspec.structs.replace(one, port=ports[one.node]) for one in back.sources if one.owner == "b"]
    assert {one.node for one in slow} == {"b", "c"}
    a.mover.slow_after_s = 0.3
    a.mover.bring(msgspec.structs.replace(back, sources=tuple(sorted(slow, key=lambda one: one.node))), 1)
    assert a.mover.status().bring_problem == ""
    assert content_of(a.folder) == content


@pytest.mark.parametrize(
    ("size", "given", "other", "left"),
    [
        (100 << 30, 1 << 20, 100 << 20, True),  # days, where another one has it in a quarter of an hour
        (100 << 30, 60 << 20, 100 << 20, False),  # not four times as long
        (1 << 30, 20 << 20, 100 << 20, False),  # a minute is no reason
        (100 << 30, 1 << 10, 0, False),  # there is no other
        (100 << 30, 0, 100 << 20, True),  # nothing comes at all
    ],
)
def test_a_source_is_left_where_another_one_is_much_quicker(size: int, given: int, other: int, left: bool) -> None:
    now = 0.0
    pace = SourcePace(size, other, clock=lambda: now)
    slow = False
    for _ in range(40):
        now += 1.0
        try:
            pace.count(given)
        except TooSlow:
            slow = True
            break
    assert slow == left
    assert not slow or now == 30.0


def half_way(port: int, *, pieces: int = 0, times: int = 1000) -> int:
    """A port that passes on what comes, and cuts the link after 100 kB of answers, or gives 20 such pieces a second
    then; so many times, then all at once."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for number in range(1000):
            caller, _ = listening.accept()
            with caller, socket.create_connection(("127.0.0.1", port)) as callee:
                left, both = 100_000 if number < times else 1 << 30, {caller: callee, callee: caller}
                while left > 0:
                    for ready in select.select(list(both), [], [], 5)[0]:
                        data = ready.recv(16384)
                        left = 0 if not data else left - len(data) * (ready is callee)
                        both[ready].sendall(data)
                with contextlib.suppress(OSError):
                    while pieces and (data := callee.recv(pieces)):
                        caller.sendall(data)
                        select.select([caller], [], [], 0.05)

    threading.Thread(target=serve, daemon=True).start()
    return int(listening.getsockname()[1])


def test_what_somebody_else_put_there_is_never_replaced(node: Callable[[str], Node]) -> None:
    a = node("a")
    dcp([a], 10)
    foreign = a.folder.parent / "shared/step-10/notes.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    a.look()
    with pytest.raises(CopyError, match="did not put it there"):
        a.mover.stage()
    with pytest.raises(CopyError, match="did not put it there"):
        a.mover._publisher.commit(save_of([a]))
    assert published(a) == {"step-10/notes.txt": b"mine"}


def test_a_later_attempt_s_save_of_the_same_name_replaces_ours(node: Callable[[str], Node]) -> None:
    a = node("a")
    dcp([a], 10)
    a.look()
    a.mover.stage()
    a.look(commit=(save_of([a]),))
    a.mover.commit()
    lose_disk(a)
    now = time.time()
    content = dcp([a], 10, 200_000)
    os.utime(a.folder / "step-10/.metadata", (now + 5, now + 5))
    a.look(attempt=2, since=now + 4)
    assert a.mover.stage()
    a.look(commit=(save_of([a]),))
    assert a.mover.commit()
    assert published(a) == content


def test_a_file_overwritten_by_each_save_is_published_each_time(node: Callable[[str], Node]) -> None:
    a, b = node("a"), node("b")
    for step in (10, 20):
        a.write("ckpt.pt", torch_file(step))
        a.look(peer=b.source())
        assert a.mover.mirror()
        assert a.mover.stage()
        a.look(commit=(save_of([a]),))
        assert a.mover.commit()
        assert published(a) == {"ckpt.pt": torch_file(step)}
    assert len({part.key for part in b.look().mirrors}) == 2


def test_a_folder_that_is_written_again_is_not_copied(node: Callable[[str], Node]) -> None:
    a = node("a")
    dcp([a], 10)
    assert not a.look().parts[0].rewritten
    dcp([a], 10, 200_000)
    assert a.look().parts[0].rewritten
    assert not a.mover.stage()


def test_a_part_that_changes_is_not_copied_until_it_stands_still(node: Callable[[str], Node]) -> None:
    a = node("a")
    a.write("step-10/__1_0.distcp", b"x" * 1000)
    assert not [one for one in a.mover._seen if one.movable]
    a.look(at_rest=False)
    assert not [one for one in a.mover._seen if one.movable]
    a.look(at_rest=True)
    assert [one for one in a.mover._seen if one.movable]


def test_nodes_that_share_the_folder_notice_it(node: Callable[[str], Node]) -> None:
    a = node("a")
    (a.mover._mirrors.top / "here-b").touch()
    a.mover._marked_at = float("-inf")
    assert a.look(peer=a.source()).shared
    assert not a.mover.mirror()
    assert any("shared between nodes" in problem for problem in a.mover.status().problems)


# ----- peers are not trusted -----


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PeerServer]:
    (tmp_path / "theirs").mkdir()
    made = PeerServer(Mirrors(tmp_path / "theirs", "job"), SECRET, lambda *_: None, host="127.0.0.1")
    made.start()
    yield made
    made.close()


def test_who_does_not_know_the_token_gets_nothing(server: PeerServer) -> None:
    with pytest.raises(PeerError, match="cannot prove"):
        call("127.0.0.1", server.port, SharedSecret("another"), None)


def test_a_stranger_who_only_listens_learns_nothing_and_is_put_out(server: PeerServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stranger:
        stranger.sendall(b"\xff" * 64)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "put", "owner": "b", "name": "../x", "attempt": 1, "stamp": 0, "file": "f", "size": 1, "mtime_ns": 0},
        {"op": "put", "owner": "../b", "name": "s", "attempt": 1, "stamp": 0, "file": "s/f", "size": 1, "mtime_ns": 0},
        {"op": "put", "owner": "b", "name": "s", "attempt": 1, "stamp": 0, "file": "../f", "size": 1, "mtime_ns": 0},
        {"op": "put", "owner": "b", "name": "s", "attempt": 1, "stamp": 0, "file": "/f", "size": 1, "mtime_ns": 0},
        {"op": "put", "owner": "b", "name": "s", "attempt": 1, "stamp": 0, "file": "s", "size": 1 << 60, "mtime_ns": 0},
        {"op": "get", "owner": "b", "name": "s", "attempt": 1, "stamp": 0, "file": "../../job/token"},
        {"op": "whole", "owner": "b", "name": "s", "attempt": 1, "stamp": 0, "mirror": {"part": 1}},
        {"op": "dance"},
        {},
    ],
)
def test_requests_that_lead_elsewhere_are_refused(server: PeerServer, request_: dict[str, Any], tmp_path: Path) -> None:
    before = sorted(str(path) for path in tmp_path.rglob("*f"))
    wire, connection = call("127.0.0.1", server.port, SECRET, None)
    with connection:
        wire.send(request_)
        with pytest.raises((PeerError, OSError)):
            wire.answer()
    assert sorted(str(path) for path in tmp_path.rglob("*f")) == before


def test_a_link_in_our_folder_is_not_followed(server: PeerServer, tmp_path: Path) -> None:
    """Somebody who may write there could lead us out."""
    outside = tmp_path / "outside"
    outside.mkdir()
    source = tmp_path / "mine"
    (source / "s").mkdir(parents=True)
    (source / "s/f").write_bytes(b"data")
    part = SavePart(name="s", owner="b", format="folder", files=part_files({"s/f": b"data"}))
    data = server._mirrors.begin("b", part.key)
    (data / "s").symlink_to(outside)
    wire, connection = call("127.0.0.1", server.port, SECRET, None)
    with connection, pytest.raises((PeerError, OSError)):
        send_part(wire, part, source, no_pause(), nothing)
    assert list(outside.iterdir()) == []


def test_a_damaged_mirror_is_not_given(server: PeerServer, tmp_path: Path) -> None:
    source = tmp_path / "mine"
    (source / "s").mkdir(parents=True)
    (source / "s/f").write_bytes(b"data")
    part = SavePart(name="s", owner="b", format="folder", files=part_files({"s/f": b"data"}))
    wire, connection = call("127.0.0.1", server.port, SECRET, None)
    with connection:
        assert send_part(wire, part, source, no_pause(), nothing)
        assert not send_part(wire, part, source, no_pause(), nothing), "it is not sent twice"
        (server._mirrors.data("b", part.key) / "s/f").write_bytes(b"dana")
        with pytest.raises(PeerError, match="damaged"):
            fetch_file(wire, "b", part.key, "s/f", 4, tmp_path, nothing)
    assert not (tmp_path / "s/f").exists()


def test_a_disk_without_room_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no room"):
        NewFile(tmp_path, "big", 1 << 49)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_a_peer_whose_disk_is_full_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)], check=True)
    try:
        server = PeerServer(Mirrors(small, "job"), SECRET, lambda *_: None, host="127.0.0.1")
        server.start()
        source = tmp_path / "mine"
        for step, size in ((1, 400_000), (2, 400_000), (3, 400_000), (4, 900_000)):
            content = {f"step-{step}/f": os.urandom(size)}
            (source / f"step-{step}").mkdir(parents=True)
            (source / f"step-{step}/f").write_bytes(content[f"step-{step}/f"])
            part = SavePart(
                name=f"step-{step}", owner="b", format="folder", modified_at=float(step), files=part_files(content)
            )
            wire, connection = call("127.0.0.1", server.port, SECRET, None)
            with connection:
                if step < 4:  # the third takes the place of the first
                    assert send_part(wire, part, source, no_pause(), nothing)
                else:
                    with pytest.raises(PeerError, match="no room"):
                        send_part(wire, part, source, no_pause(), nothing)
        server.close()
        assert [held.name for held in Mirrors(small, "job").parts] == ["step-3"], "one always stays"
        assert not list(small.rglob("*partial"))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_slow_disk_gets_longer_pauses() -> None:
    assert pause_s(1 << 20, 0.0) == pytest.approx(1 / 512)
    assert pause_s(1 << 20, 1.0) == 0.25
    assert pause_s(1 << 20, 1000.0) == 5.0


# ----- the start -----


def test_bad_folders_are_refused_with_a_sentence(tmp_path: Path) -> None:
    local, good = tmp_path / "local", tmp_path / "good"
    local.mkdir(), good.mkdir()
    (tmp_path / "file").touch()
    assert why_not_published(good, local) == ""
    assert "does not exist" in why_not_published(tmp_path / "none", local)
    assert "is a file" in why_not_published(tmp_path / "file", local)
    assert "cannot be written" in why_not_published(Path("/proc"), local), "also for root"
    for inside in (local, local / "sub"):
        inside.mkdir(exist_ok=True)
        assert "the same folder" in why_not_published(inside, local)
    (good / "ckpt").mkdir()
    assert "own disk" in why_not_published(good, good / "ckpt")


@pytest.mark.root
def test_a_full_disk_is_refused_with_a_sentence(tmp_path: Path) -> None:
    imports = "import sys; from pathlib import Path; from supervisor.mover.publish import why_full"
    ask = f"{imports}; print(why_full(Path(sys.argv[1])))"
    full = 'mount -t tmpfs -o size=1m tmpfs "$1" && cat /dev/zero >"$1/file"; exec "$2" -c "$3" "$1"'
    inside = ["unshare", "--mount", "sh", "-c", full, "sh", str(tmp_path), sys.executable, ask]
    assert "make room" in subprocess.run(inside, capture_output=True, text=True, check=False).stdout
    assert why_full(tmp_path) == ""


# ----- killed at any moment -----


@pytest.mark.slow
def test_a_fetch_that_is_killed_never_shows_a_committing_file_without_data(memory: Path) -> None:
    dice = random.Random(2)
    a, b, c = (Node(name, memory) for name in "abc")
    content = dcp([a, b], 10)
    a.look(), b.look()
    back = wanted([a, b], "step-10", {"a", "b"})
    usual_s = seconds_of(lambda: c.mover.bring(back, 1))
    assert content_of(c.folder) == content
    cut = 0
    for _ in range(60):
        if dice.random() < 0.7:
            shutil.rmtree(c.folder / "step-10", ignore_errors=True)
        run_and_kill(lambda: c.mover.bring(back, 1), dice.uniform(0.0, 1.1 * usual_s))
        there = content_of(c.folder)
        assert there.items() <= content.items()
        if "step-10/.metadata" in there:
            assert there == content
        cut += 0 < len(there) < len(content)
    assert cut
    c.mover.bring(back, 1)
    assert content_of(c.folder) == content
    for one in (a, b, c):
        one.mover._server.close()
