"""What proves the token, and what does not."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest

from supervisor.messages import PROTOCOL
from supervisor.wire import authentication
from supervisor.wire.authentication import (
    Authenticator,
    Exchange,
    Forged,
    ServerNonces,
    SharedSecret,
    Unproven,
    exchange_of,
    new_nonce,
)
from supervisor.wire.limits import RESERVED, UnprovenConnections
from supervisor.wire.peers import listen_privately, not_private, peer_uid

EXCHANGE = Exchange("0" * 32, "1" * 64, 3)


def settled(controller: Authenticator, secret: SharedSecret) -> Exchange:
    nonce = new_nonce()
    return exchange_of(controller.answer(nonce, 10.0), nonce, secret)


def test_a_request_is_taken_once_soon_and_as_it_was_signed() -> None:
    controller, secret = Authenticator("token", 3), SharedSecret("token")
    exchange = settled(controller, secret)
    assert exchange.epoch == 3
    signed = secret.authorization(exchange, "POST", "/v1/override", b"{}")
    assert controller.admit(signed, "POST", "/v1/override", b"{ }", 11.0) is None
    assert controller.admit(signed, "POST", "/v1/ask", b"{}", 11.0) is None
    assert controller.admit(signed, "GET", "/v1/override", b"{}", 11.0) is None
    assert controller.admit(signed, "POST", "/v1/override", b"{}", 41.0) is None, "too late"
    assert controller.admit(signed, "POST", "/v1/override", b"{}", 11.0) == exchange
    assert controller.admit(signed, "POST", "/v1/override", b"{}", 11.0) is None, "heard before"


@pytest.mark.parametrize("given", ["", "Bearer token", "Unbroken", "Unbroken a.b.c", "Unbroken \xff.1.2"])
def test_what_is_no_signature_is_refused(given: str) -> None:
    assert Authenticator("token", 1).admit(given, "GET", "/", b"", 0.0) is None


def test_nonces_of_others_are_refused() -> None:
    """Of another controller, and those that were given for another nonce of the client."""
    controller, secret = Authenticator("token", 3), SharedSecret("token")
    for exchange in (settled(Authenticator("token", 3), secret), settled(controller, secret)._replace(client="0" * 32)):
        assert controller.admit(secret.authorization(exchange, "GET", "/"), "GET", "/", b"", 11.0) is None


def test_without_the_token_nothing_is_proven_either_way() -> None:
    with pytest.raises(Unproven, match="this job's token"):
        settled(Authenticator("guessed", 3), SharedSecret("token"))
    controller = Authenticator("token", 3)
    exchange = settled(controller, SharedSecret("token"))
    forged = SharedSecret("guessed").authorization(exchange, "GET", "/")
    assert controller.admit(forged, "GET", "/", b"", 11.0) is None


def test_another_epoch_or_nonce_is_not_proven() -> None:
    nonce = new_nonce()
    for change in ({"epoch": 9}, {"nonce": "a" * 64}, {"proof": "\xff"}):
        with pytest.raises(Unproven):
            exchange_of(Authenticator("token", 3).answer(nonce, 0.0) | change, nonce, SharedSecret("token"))


def test_another_protocol_is_told_in_words() -> None:
    nonce = new_nonce()
    answer = Authenticator("token", 3).answer(nonce, 0.0) | {"protocol": PROTOCOL + 1}
    with pytest.raises(Unproven, match=f"protocol {PROTOCOL + 1} and this end speaks {PROTOCOL}"):
        exchange_of(answer, nonce, SharedSecret("token"))


@pytest.mark.parametrize("answer", [None, [], {}, {"protocol": "2", "epoch": 1, "nonce": "", "proof": ""}])
def test_what_is_no_answer_is_none(answer: object) -> None:
    with pytest.raises(ValueError, match="as a controller does"):
        exchange_of(answer, new_nonce(), SharedSecret("token"))


def test_frames_are_read_in_order_and_unchanged() -> None:
    secret = SharedSecret("token")
    agent, controller = secret.session(EXCHANGE, controller=False), secret.session(EXCHANGE, controller=True)
    first, second = agent.out.seal(b"one"), agent.out.seal(b"two")
    assert [controller.into.open(frame) for frame in (first, second)] == [b"one", b"two"]
    third = agent.out.seal(b"three")
    for wrong in (first, third[:-1] + b"!", b"", b"short", controller.out.seal(b"three")):
        fresh = SharedSecret("token").session(EXCHANGE, controller=True)
        fresh.into.open(first)
        fresh.into.open(second)
        with pytest.raises(Forged):
            fresh.into.open(wrong)
    assert controller.into.open(third) == b"three"


def test_a_flood_of_challenges_fills_nothing_and_used_nonces_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "USED_LIMIT", 3)
    nonces = ServerNonces()
    issued = [nonces.issue("0" * 32, 0.0) for _ in range(1000)]
    assert [nonces.use(one, 0.0) for one in issued[:4]] == [True, True, True, False]
    assert nonces.use(issued[4], 31.0)


# ----- who is put out when there are too many that have proven nothing -----


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
