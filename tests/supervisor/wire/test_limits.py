"""Who is put out when there are too many that have proven nothing."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest

from supervisor.wire.limits import RESERVED, UnprovenConnections
from supervisor.wire.peers import listen_privately, not_private, peer_uid


def test_the_newest_is_always_taken_and_the_crowd_pays_for_it() -> None:
    limit: UnprovenConnections[int] = UnprovenConnections(at_once=6, per_address=4)
    assert [limit.came(key, "crowd", 0.0, 10.0) for key in range(4)] == [[]] * 4
    assert limit.came(4, "crowd", 0.0, 10.0) == [0]
    limit.gone(0)
    assert limit.came(10, "one", 0.0, 10.0) == []
    assert limit.came(11, "two", 0.0, 10.0) == []
    assert limit.came(12, "three", 0.0, 10.0) == [1], "the oldest of the address with the most"
    assert limit.oldest() == 1


def test_what_takes_too_long_is_overdue() -> None:
    limit: UnprovenConnections[int] = UnprovenConnections(at_once=6, per_address=4)
    limit.came(1, "a", 0.0, 10.0)
    limit.came(2, "a", 5.0, 10.0)
    assert limit.timed_out(9.9) == []
    assert limit.timed_out(10.0) == [1]
    limit.gone(1)
    assert (limit.timed_out(20.0), len(limit)) == ([2], 1)


@pytest.mark.parametrize("descriptors", [64, 256, 1024, 65536, 1 << 20])
def test_there_is_always_room_for_our_own_work(descriptors: int) -> None:
    limit: UnprovenConnections[int] = UnprovenConnections.for_descriptors(descriptors)
    assert limit.at_once <= max(8, descriptors - RESERVED)
    chance = random.Random(7)
    held: set[int] = set()
    for key in range(3 * limit.at_once):
        held.add(key)
        for over in limit.came(key, f"10.0.0.{chance.randrange(9)}", float(key), 10.0):
            limit.gone(over)
            held.discard(over)
        assert key in held
        assert len(held) == len(limit) <= limit.at_once


def test_a_private_socket_tells_whose_process_comes(tmp_path: Path) -> None:
    with listen_privately(tmp_path / "own" / "s") as listening, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "own" / "s"))
        listening.setblocking(True)
        assert peer_uid(listening.accept()[0]) == os.geteuid() == peer_uid(client)
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PermissionError):
        listen_privately(tmp_path / "open" / "s")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    assert not_private(tmp_path / "link", frozenset({os.geteuid()}))
    assert not_private(tmp_path / "none", frozenset({os.geteuid()}))
    assert not_private(tmp_path / "own", frozenset({os.geteuid() + 1}))
