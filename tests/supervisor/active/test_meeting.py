"""Nodes that test each other: real connections, and real children, which answer by their node's name."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from supervisor.active import meeting
from supervisor.active.meeting import Leader, MeetingPlace, Participant, SuiteAnswer, meet, natural
from supervisor.active.suite import ActiveSetup, Devices, Suite
from supervisor.errors import ActiveTestsImpossible
from supervisor.files import write_atomically
from supervisor.mover.peer import PeerError, call
from supervisor.wire.authentication import SharedSecret

SUITE = Suite("quick", 60.0, 10.0, 15.0, 0.1, 6.0, 0.1, 5.0, 5.0)
KIND = "H100, torch 2.13.0, CUDA 12.8"
SCRIPT = """#!{python}
import json, os, sys, time
order, node = json.loads(sys.stdin.readline()), os.environ["TEST_NODE"]
def tell(**words): print(json.dumps(words), flush=True)
if order["do"] == "look":
    tell(devices=["cuda:0"], kind="{kind}")
else:
    tell(kind="{kind}", uuid="GPU-" + node)
bad = os.environ.get("TEST_BAD", "")
if order["do"] == "node":
    tell(test="matmul", unit="TFLOP/s", values=[600.0 if bad == "slow" else 700.0], ok=True)
    tell(test="training_bits", digest="b" if bad == "bits" else "a", ok=True)
    if bad == "memory": tell(test="memory_patterns", ok=False, why="8 words changed")
if order["do"] == "group":
    if bad == "hangs": time.sleep(600)
    if bad == "fails": sys.exit("nccl error")
    tell(test="all_reduce_large", unit="s", values=[0.5 if bad == "far" else 0.1], ok=True)
tell(end=True)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Callable[[str, str], ActiveSetup]:
    python = tmp_path / "python"
    python.write_text(SCRIPT.format(python=sys.executable, kind=KIND))
    python.chmod(0o755)

    def made(node: str, bad: str = "") -> ActiveSetup:
        return ActiveSetup(node, str(python), {**os.environ, "TEST_NODE": node, "TEST_BAD": bad}, tmp_path)

    return made


def outcome_of(
    bench: Any, bad: Mapping[str, str], count: int = 6, **more: Any
) -> tuple[SuiteAnswer, dict[str, SuiteAnswer]]:
    """The leader's answer, and what each node is told."""
    secret, listening = SharedSecret("secret"), socket.create_server(("127.0.0.1", 0))
    port, told = listening.getsockname()[1], {}

    def take_part(node: str) -> None:
        participant = Participant(bench(node, bad.get(node, "")), Devices(("cuda:0",), KIND), SUITE)
        told[node] = participant.take_part("127.0.0.1", port, secret)

    threads = [threading.Thread(target=take_part, args=(f"n{number}",)) for number in range(1, count + 1)]
    for thread in threads:
        thread.start()
    answer = Leader(count, SUITE, secret, **more).lead(listening)
    for thread in threads:
        thread.join(30)
    return answer, told


def failed(answer: SuiteAnswer) -> set[tuple[str, str]]:
    return {(one.node, one.test) for one in answer.results if one.verdict == "fail"}


def test_every_fault_is_found_and_no_healthy_node_is_named(bench: Any) -> None:
    bad = {"n2": "fails", "n5": "slow", "n6": "bits"}
    answer, told = outcome_of(bench, bad)
    assert failed(answer) == {("n2", "pairs"), ("n5", "matmul"), ("n6", "training_bits")}
    assert answer.bad == ("n5", "n6", "n2")
    assert answer.pairs is not None
    assert answer.pairs.rounds == 2
    assert answer.group is not None
    assert not answer.group.failed
    assert set(told) == {f"n{number}" for number in range(1, 7)}
    assert {one.node for one in told["n2"].results} == {"n2"}


def test_a_test_that_hangs_and_one_that_is_slow(bench: Any) -> None:
    answer, _ = outcome_of(bench, {"n2": "hangs", "n7": "far"}, 8, only=("pairs",))
    assert answer.pairs is not None
    assert {one.node: one.how for one in answer.pairs.named} == {"n2": "fails", "n7": "slow"}
    assert len(answer.pairs.good) == 6


def test_a_node_with_wrong_data_meets_nobody(bench: Any) -> None:
    answer, _ = outcome_of(bench, {"n1": "memory"}, 4)
    assert failed(answer) == {("n1", "memory_patterns")}
    assert answer.pairs is not None
    assert "n1" not in answer.pairs.good


def test_who_does_not_come_is_missed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEET_S", 3.0)
    secret, listening = SharedSecret("secret"), socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    devices = Devices(("cuda:0",), KIND)
    answers: list[SuiteAnswer] = []
    leader = Leader(2, SUITE, secret, only=("matmul",))
    thread = threading.Thread(target=lambda: answers.append(leader.lead(listening)))
    thread.start()
    with pytest.raises(ActiveTestsImpossible, match="prove"):
        Participant(bench("n2"), devices, SUITE).take_part("127.0.0.1", port, SharedSecret("another"))
    Participant(bench("n1"), devices, SUITE).take_part("127.0.0.1", port, secret)
    thread.join(30)
    (answer,) = answers
    assert answer.absent == 1
    assert answer.missing


def test_nodes_find_each_other_by_a_file(bench: Any, tmp_path: Path) -> None:
    folder, found = tmp_path / "meet", {}

    def come(node: str, leads: bool) -> None:
        found[node] = meet(
            folder,
            leads=leads,
            nodes=2,
            bench=bench(node),
            suite_name="quick",
            own_address="127.0.0.1",
            only=("pairs",),
        )

    threads = [threading.Thread(target=come, args=(node, node == "n1")) for node in ("n1", "n2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found["n1"].pairs is not None
    assert found["n1"].pairs.good == ("n1", "n2")
    assert not list(folder.iterdir())


def test_a_file_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    place = MeetingPlace(address="127.0.0.1", port=1, secret="x")
    path = tmp_path / "active-tests.json"
    path.write_text(f'{{"address":"{place.address}","port":1,"secret":"x"}}')
    path.chmod(0o644)
    with pytest.raises(ActiveTestsImpossible, match="others may"):
        meeting._found(path)


def test_names_in_the_order_of_their_numbers() -> None:
    assert sorted(["n10", "n9", "m1", "n100", "n"], key=natural) == ["m1", "n", "n9", "n10", "n100"]


def test_who_proves_nothing_holds_nobody_up(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More strangers than are greeted at once, which say nothing; and one that says a byte now and then."""
    monkeypatch.setattr(meeting, "PROOF_S", 0.5)
    monkeypatch.setattr(meeting, "GREETED", 3)
    secret, listening = SharedSecret("secret"), socket.create_server(("127.0.0.1", 0), backlog=64)
    address = listening.getsockname()
    strangers = [socket.create_connection(address) for _ in range(8)]
    strangers[0].sendall(b"\x00\x00\x03\xff")
    thread = threading.Thread(target=Leader(1, SUITE, secret, only=("matmul",)).lead, args=(listening,))
    thread.start()
    heard = (select.select(strangers[:1], [], [], 0.2)[0] or strangers[0].send(b" ") for _ in range(100))
    assert any(isinstance(one, list) for one in heard), "it is hung up, however often it says something"
    answer = Participant(bench("n1"), Devices(("cuda:0",), KIND), SUITE).take_part("127.0.0.1", address[1], secret)
    assert {one.node for one in answer.results} == {"n1"}
    thread.join(30)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(("node", "devices"), [("n1\x1b[2J", 1), ("n" * 100, 1), ("n1", 0), ("n1", 1 << 40)])
def test_an_impossible_introduction_is_not_let_in(node: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEET_S", 1.0)
    secret, listening = SharedSecret("secret"), socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    leader = Leader(1, SUITE, secret, only=("matmul",))
    thread = threading.Thread(target=leader.lead, args=(listening,))
    thread.start()
    wire, connection = call("127.0.0.1", port, secret, None)
    with connection:
        wire.send({"node": node, "address": "127.0.0.1", "port": 1, "devices": devices, "kind": KIND})
        with pytest.raises((PeerError, OSError)):
            wire.answer()
    thread.join(30)
    assert leader.absent == 1


def test_the_file_of_a_leader_that_was_killed(bench: Any, tmp_path: Path) -> None:
    """The next one writes another; who came before it waits."""
    folder, told = tmp_path / "meet", []
    folder.mkdir()
    gone = socket.create_server(("127.0.0.1", 0))
    place = MeetingPlace(address="127.0.0.1", port=gone.getsockname()[1], secret="x" * 48)
    gone.close()
    write_atomically(folder / "active-tests.json", msgspec.json.encode(place), 0o600)

    def come(node: str, leads: bool) -> None:
        told.append(
            meet(
                folder,
                leads=leads,
                nodes=2,
                bench=bench(node),
                suite_name="quick",
                own_address="127.0.0.1",
                only=("matmul",),
            )
        )

    early = threading.Thread(target=come, args=("n2", False))
    early.start()
    early.join(1.5)
    come("n1", True)
    early.join(30)
    assert len(told) == 2


def test_after_a_leader_that_is_stopped_nobody_tests_on(bench: Any) -> None:
    secret, listening = SharedSecret("secret"), socket.create_server(("127.0.0.1", 0))
    port, rounds = listening.getsockname()[1], threading.Event()
    leader = Leader(2, SUITE, secret, only=("pairs",), say=lambda _: rounds.set())
    thread = threading.Thread(target=leader.lead, args=(listening,))
    thread.start()

    def take_part(node: str) -> None:
        with contextlib.suppress(ActiveTestsImpossible):
            Participant(bench(node, "hangs"), Devices(("cuda:0",), KIND), SUITE).take_part("127.0.0.1", port, secret)

    others = [threading.Thread(target=take_part, args=(node,)) for node in ("n1", "n2")]
    for other in others:
        other.start()
    assert rounds.wait(30)
    started = time.monotonic()
    leader.stop()
    for one in (thread, *others):
        one.join(30)
    assert time.monotonic() - started < SUITE.group_s / 2
