"""Nodes that test each other: one leads, all others do what it asks, and it says in the end what came of it.

The leader puts its address and a fresh secret into a folder that all nodes share; whoever can read that file takes
part. Both ends prove that they know it, as movers do. The leader waits for nobody longer than it said beforehand: a
node that does not answer has failed that test.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from diagnosis.signals import Frozen, clean_line
from recovery.active_verdicts import Figure, judge, to_repeat
from recovery.group_tests import (
    PAIR_TEST,
    GroupOutcome,
    GroupPart,
    Narrowed,
    PairConclusion,
    conclude,
    group_outcome,
    narrowed,
    next_groups,
    next_halves,
    pair_margin,
    pair_results,
    throttled_nodes,
    throttled_words,
)
from recovery.ledger import TestResult
from supervisor.active.children import GONE_S, ChildReport
from supervisor.active.suite import (
    NODE_FAMILIES,
    SUITES,
    ActiveSetup,
    Devices,
    GroupOrder,
    Suite,
    families_of,
    find_devices,
    part_of,
    run_group,
    run_node,
)
from supervisor.errors import ActiveTestsImpossible
from supervisor.files import read_token, write_atomically
from supervisor.mover.peer import PeerError, Wire, accept, call
from supervisor.wire.authentication import SharedSecret

MEET_S: Final = 60.0
"""How long nodes wait for the leader's file, and the leader for nodes."""
ANSWER_S: Final = 8.0
"""How much longer than a test the answer may take."""
PROOF_S: Final = 10.0
GREETED: Final = 64
"""Connections at once that have not proven themselves; more wait."""
MOST_NODES: Final = 4096
MOST_DEVICES: Final = 64
END_S: Final = 30.0


class Introduction(Frozen, frozen=True, kw_only=True):
    """How a node introduces itself."""

    node: str
    address: str
    port: int
    """Where it would keep the store of the next group."""
    devices: int
    kind: str
    domain: str = ""


class GroupReports(Frozen, frozen=True, kw_only=True):
    reports: tuple[ChildReport, ...]
    port: int


class NodeFigures(Frozen, frozen=True, kw_only=True):
    figures: tuple[Figure, ...]


class SuiteAnswer(Frozen, frozen=True, kw_only=True):
    """What the suite says in the end."""

    suite: str
    seconds: float
    results: tuple[TestResult, ...] = ()
    pairs: PairConclusion | None = None
    group: GroupOutcome | None = None
    smallest: Narrowed | None = None
    """Where the whole group failed and its pairs did well."""
    absent: int = 0
    """How many nodes did not come."""
    missing: tuple[str, ...] = ()
    """What was not done, or who did not come, and why: in words."""

    @property
    def bad(self) -> tuple[str, ...]:
        """The nodes that failed a test."""
        return tuple(dict.fromkeys(one.node for one in self.results if one.verdict == "fail"))


# ----- what every node does -----


class Participant:
    """One node's end: does what the leader asks, with children, until the leader says that it is over."""

    def __init__(self, bench: ActiveSetup, devices: Devices, suite: Suite, domain: str = "") -> None:
        self._bench = bench
        self._devices = devices
        self._suite = suite
        self._domain = domain
        self.reached = False
        """Whether the leader has answered."""

    def take_part(self, address: str, port: int, secret: SharedSecret) -> SuiteAnswer:
        """Blocks until the end. Raises ActiveTestsImpossible."""
        try:
            wire, connection = call(address, port, secret, None)
        except (OSError, PeerError) as error:
            raise ActiveTestsImpossible(f"the leader at {address}:{port} cannot be reached: {error}") from None
        self.reached = True
        with contextlib.closing(connection):
            connection.settimeout(self._suite.whole_s + MEET_S + END_S)
            try:
                self._bench = self._bench._replace(leader=connection.fileno())
                return self._serve(wire, str(connection.getsockname()[0]))
            except (OSError, PeerError, msgspec.ValidationError) as error:
                raise ActiveTestsImpossible(f"the leader at {address}:{port} went away: {error}") from None

    def _serve(self, wire: Wire, address: str) -> SuiteAnswer:
        listening = socket.create_server((address, 0))
        self._bench = with_interface(self._bench, address)
        try:
            wire.send(
                msgspec.to_builtins(
                    Introduction(
                        node=self._bench.node,
                        address=address,
                        port=listening.getsockname()[1],
                        devices=len(self._devices.devices),
                        kind=self._devices.kind,
                        domain=self._domain,
                    )
                )
            )
            while True:
                order = wire.answer()
                if order.get("do") == "end":
                    return msgspec.convert(order["answer"], SuiteAnswer)
                if order.get("do") == "node":
                    tests = [str(test) for test in order.get("tests") or ()]
                    figures = run_node(self._bench, self._devices, self._suite, tests)
                    wire.send(msgspec.to_builtins(NodeFigures(figures=tuple(figures))))
                elif order.get("do") == "group":
                    reports = run_group(self._bench, self._devices, self._suite, self._group_order(order, listening))
                    listening.close()
                    listening = socket.create_server((address, 0))
                    answer = GroupReports(reports=reports, port=listening.getsockname()[1])
                    wire.send(msgspec.to_builtins(answer))
        finally:
            listening.close()

    @staticmethod
    def _group_order(order: Mapping[str, Any], listening: socket.socket) -> GroupOrder:
        first = int(order["first_rank"])
        return GroupOrder(
            first_rank=first,
            world=int(order["world"]),
            host=str(order["host"]),
            port=int(order["port"]),
            listen=listening.fileno() if first == 0 else -1,
            collectives=tuple(order.get("collectives") or ()),
        )


def with_interface(bench: ActiveSetup, address: str) -> ActiveSetup:
    """Have gloo use the interface of `address`, which the others reach; the user's own choice wins.

    Left to itself gloo takes the address of the host's name, which on many hosts is the loopback's.
    """
    import psutil  # seldom needed

    if "GLOO_SOCKET_IFNAME" in bench.environment:
        return bench
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return bench._replace(environment={**bench.environment, "GLOO_SOCKET_IFNAME": name})
    return bench


# ----- what the leader does -----


class _Node:
    """A node that has come."""

    def __init__(self, hello: Introduction, wire: Wire, connection: socket.socket) -> None:
        self.hello = hello
        self.port = hello.port
        self.lost = ""
        self._wire = wire
        self._connection = connection

    def ask(self, order: Mapping[str, Any], within_s: float) -> dict[str, Any] | None:
        """Its answer. None: there was none in time, and there will be none any more."""
        if self.lost:
            return None
        try:
            self._connection.settimeout(within_s)
            self._wire.send(dict(order))
            return self._wire.answer()
        except (OSError, PeerError) as error:
            self.lost = clean_line(str(error) or type(error).__name__, 200)
            return None

    def tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, PeerError):
            self._connection.settimeout(END_S)
            self._wire.send(dict(message))

    def hang_up(self) -> None:
        self.lost = self.lost or "it is over"
        _hang_up(self._connection)

    def close(self) -> None:
        self._connection.close()


class Leader:
    """Waits for the nodes, has them tested, and judges."""

    def __init__(
        self,
        expected: int,
        suite: Suite,
        secret: SharedSecret,
        *,
        floors: Mapping[str, float] | None = None,
        collectives: Sequence[Mapping[str, Any]] = (),
        only: Sequence[str] = (),
        earlier: Sequence[Figure] = (),
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`only`: patterns of tests; none: all. `earlier`: figures of other nodes, to compare with."""
        self._earlier = tuple(earlier)
        self._only = tuple(only)
        self._expected = expected
        self._suite = suite
        self._secret = secret
        self._floors = dict(floors or {})
        self._collectives = list(collectives)
        self._say = say
        self._nodes: dict[str, _Node] = {}
        self._changed = threading.Condition()
        self._greeted = threading.BoundedSemaphore(GREETED)
        self._missing: list[str] = []
        self.absent = 0
        self._started = time.monotonic()

    def lead(self, listening: socket.socket) -> SuiteAnswer:
        """Blocks until the end; every node that still answers is told."""
        threading.Thread(target=self._let_in, args=(listening,), name="active tests", daemon=True).start()
        self._gather()
        self._started = time.monotonic()
        try:
            answer = self._tests()
            for node in self._nodes.values():
                own = tuple(one for one in answer.results if one.node == node.hello.node)
                node.tell({"do": "end", "answer": msgspec.to_builtins(replace(answer, results=own, pairs=None))})
            return answer
        finally:
            listening.close()
            for node in self._nodes.values():
                node.close()

    def stop(self) -> None:
        """Wait for no node any more."""
        for node in list(self._nodes.values()):
            node.hang_up()

    # ----- who comes -----

    def _let_in(self, listening: socket.socket) -> None:
        while True:
            self._greeted.acquire()
            try:
                connection, _ = listening.accept()
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
            except OSError:
                if listening.fileno() < 0:
                    return  # it is over
                self._greeted.release()
                time.sleep(0.1)  # no descriptor is free, or the like

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(PROOF_S)
        # Who sends a byte now and then gets no more time than others.
        late = threading.Timer(PROOF_S, _hang_up, (connection,))
        late.daemon = True
        late.start()
        try:
            wire = accept(connection, self._secret)
            hello = msgspec.convert(wire.answer(), Introduction)
            if hello.node != clean_line(hello.node, 63) or not 1 <= hello.devices <= MOST_DEVICES:
                raise PeerError("it has an impossible name, or number of devices")
        except (OSError, PeerError, msgspec.ValidationError):
            connection.close()
            return
        finally:
            late.cancel()
            self._greeted.release()
        with self._changed:
            if hello.node in self._nodes or len(self._nodes) >= min(self._expected, MOST_NODES):
                connection.close()
                return
            self._nodes[hello.node] = _Node(hello, wire, connection)
            self._changed.notify_all()

    def _gather(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._nodes) >= self._expected, MEET_S)
            if len(self._nodes) < self._expected:
                names = ", ".join(sorted(self._nodes, key=natural)[:16])
                self._missing.append(
                    f"only {len(self._nodes)} of {self._expected} nodes came within {MEET_S:.0f} s: {names}"
                )
            self.absent = self._expected - len(self._nodes)
            self._expected = len(self._nodes)  # whoever comes later comes too late
            self._nodes = {name: self._nodes[name] for name in sorted(self._nodes, key=natural)}

    # ----- the tests -----

    def _left_s(self) -> float:
        return self._suite.whole_s - (time.monotonic() - self._started)

    def _tests(self) -> SuiteAnswer:
        families = [test for test in NODE_FAMILIES if self._wants(test)]
        figures = self._node_tests(families) if families else []
        present = self._nodes.keys()
        self._earlier = tuple(one for one in self._earlier if one.node not in present)
        results = judge(figures, earlier=self._earlier, floors=self._floors)
        failed = {one.node for one in results if one.verdict == "fail"}
        able = [name for name, node in self._nodes.items() if name not in failed and not node.lost]
        pairs, rounds = self._pair_tests(able) if self._wants(PAIR_TEST) else (None, [])
        group = smallest = None
        if pairs is not None and pairs.links:
            self._missing.append("all together were not tested: it is known which two of them fail together")
        elif self._wants("group"):
            group, smallest = self._group_tests(
                [name for name in (pairs.good if pairs is not None else able) if not self._nodes[name].lost]
            )
        results = self._repeated(figures, results)
        self._missing += [f"{name} was lost: {node.lost}" for name, node in self._nodes.items() if node.lost]
        return SuiteAnswer(
            suite=self._suite.name,
            seconds=round(time.monotonic() - self._started, 1),
            results=(*results, *(pair_results(pairs, rounds, time.time()) if pairs is not None else ())),
            pairs=pairs,
            group=group,
            smallest=smallest,
            missing=tuple(self._missing),
            absent=self.absent,
        )

    def _wants(self, test: str) -> bool:
        return not self._only or any(fnmatch.fnmatch(test, pattern) for pattern in self._only)

    def _node_tests(self, families: Sequence[str]) -> list[Figure]:
        self._say(f"{len(self._nodes)} nodes test their own devices: at most {self._suite.node_s:.0f} s")
        return self._figures(dict.fromkeys(self._nodes, families))

    def _repeated(self, figures: Sequence[Figure], results: tuple[TestResult, ...]) -> tuple[TestResult, ...]:
        """With the tests repeated that were worse than others', while there is time."""
        repeat: dict[str, set[str]] = {}
        for node, _, test in to_repeat(results, figures):
            if not self._nodes[node].lost:
                repeat.setdefault(node, set()).update(families_of(test))
        if not repeat:
            return results
        if self._left_s() < self._suite.node_s:
            self._missing.append(f"there was no time to repeat tests of {', '.join(repeat)}")
            return results
        self._say(f"{', '.join(list(repeat)[:8])} repeat{'s' * (len(repeat) == 1)} tests that were worse than others'")
        again = self._figures({name: sorted(tests) for name, tests in repeat.items()})
        return judge(figures, earlier=self._earlier, again=again, floors=self._floors)

    def _figures(self, wanted: Mapping[str, Sequence[str]]) -> list[Figure]:
        orders = {name: {"do": "node", "tests": list(tests)} for name, tests in wanted.items()}
        answers = self._ask_all(orders, self._suite.node_s + GONE_S)
        found: list[Figure] = []
        for answer in answers.values():
            with contextlib.suppress(msgspec.ValidationError):
                found += msgspec.convert(answer, NodeFigures).figures
        return found

    def _ask_all(self, orders: Mapping[str, Mapping[str, Any]], within_s: float) -> dict[str, dict[str, Any] | None]:
        """All at the same time."""
        if not orders:
            return {}
        with ThreadPoolExecutor(max_workers=len(orders)) as pool:
            asked = {
                name: pool.submit(self._nodes[name].ask, order, within_s + ANSWER_S) for name, order in orders.items()
            }
            return {name: answer.result() for name, answer in asked.items()}

    def _pair_tests(self, able: Sequence[str]) -> tuple[PairConclusion | None, list[list[GroupOutcome]]]:
        rounds: list[list[GroupOutcome]] = []
        margin = pair_margin(self._nodes[name].hello.kind for name in able)
        while groups := next_groups(able, rounds, margin):
            if self._left_s() < self._suite.group_s:
                self._missing.append("there was no time for another round of pairs")
                break
            self._say(f"round {len(rounds) + 1} of pairs: {len(groups)} groups, at most {self._suite.group_s:.0f} s")
            rounds.append(self._groups(groups))
        self._missing += [f"{name}: {throttled_words(share)}" for name, share in throttled_nodes(rounds).items()]
        domains = {name: node.hello.domain for name, node in self._nodes.items() if node.hello.domain}
        return (conclude(able, rounds, margin, domains) if rounds else None), rounds

    def _group_tests(self, good: Sequence[str]) -> tuple[GroupOutcome | None, Narrowed | None]:
        """All that are proven good, together; if that fails, halves."""
        if len(good) < 3 or self._left_s() < self._suite.group_s:
            return None, None
        self._say(f"all {len(good)} together: at most {self._suite.group_s:.0f} s")
        (outcome,) = self._groups([tuple(good)])
        if not outcome.failed or outcome.busy:
            return outcome, None
        steps: list[list[GroupOutcome]] = []
        while (halves := next_halves(good, steps)) and self._left_s() >= self._suite.group_s:
            self._say(f"all together fails: {len(halves)} halves")
            steps.append(self._groups(halves))
        return outcome, narrowed(good, steps)

    def _groups(self, groups: Sequence[Sequence[str]]) -> list[GroupOutcome]:
        orders: dict[str, dict[str, Any]] = {}
        for group in groups:
            members = [self._nodes[name] for name in group]
            world, first = sum(node.hello.devices for node in members), 0
            for node in members:
                orders[node.hello.node] = {
                    "do": "group",
                    "first_rank": first,
                    "world": world,
                    "host": members[0].hello.address,
                    "port": members[0].port,
                    "collectives": self._collectives,
                }
                first += node.hello.devices
        answers = self._ask_all(orders, self._suite.group_s + GONE_S)
        parts: dict[str, GroupPart | None] = {}
        for name, answer in answers.items():
            parts[name] = None
            with contextlib.suppress(msgspec.ValidationError):
                if answer is not None:
                    told = msgspec.convert(answer, GroupReports)
                    parts[name], self._nodes[name].port = part_of(told.reports), told.port
        return [group_outcome(group, parts) for group in groups]


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def natural(name: str) -> tuple[object, ...]:
    """n2 comes before n10."""
    parts, number = [], ""
    for character in f"{name}\0":
        if character.isdigit():
            number += character
            continue
        if number:
            parts.append(f"{int(number):020d}")
            number = ""
        parts.append(character)
    return tuple(parts)


# ----- how they find each other -----


class MeetingPlace(Frozen, frozen=True, kw_only=True):
    """The file by which nodes find the leader. Only its owner may read it."""

    address: str
    port: int
    secret: str


def meet(
    folder: Path,
    *,
    leads: bool,
    nodes: int,
    bench: ActiveSetup,
    suite_name: str,
    own_address: str,
    domain: str = "",
    floors: Mapping[str, float] | None = None,
    collectives: Sequence[Mapping[str, Any]] = (),
    only: Sequence[str] = (),
    earlier: Sequence[Figure] = (),
    say: Callable[[str], None] = lambda _: None,
) -> SuiteAnswer:
    """Take part in the tests of `nodes` nodes, which share `folder`; the one that leads does so besides. Blocks.

    Raises ActiveTestsImpossible.
    """
    suite = SUITES[suite_name]
    path = folder / "active-tests.json"
    if not leads:
        devices = find_devices(bench, suite)
        return _followed(path, Participant(bench, devices, suite, domain))
    secret = os.urandom(24).hex()
    listening = socket.create_server((own_address, 0), backlog=min(nodes, MOST_NODES))
    place = MeetingPlace(address=own_address, port=listening.getsockname()[1], secret=secret)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(place), 0o600)
        answers: list[SuiteAnswer] = []
        shared = SharedSecret(secret)
        leader = Leader(
            nodes, suite, shared, floors=floors, collectives=collectives, only=only, earlier=earlier, say=say
        )
        thread = threading.Thread(target=lambda: answers.append(leader.lead(listening)), daemon=True)
        thread.start()
        try:
            devices = find_devices(bench, suite)
            Participant(bench, devices, suite, domain).take_part(own_address, place.port, shared)
        except BaseException:  # Ctrl-C, too: the others need not go on
            leader.stop()
            raise
        thread.join(END_S)
        return answers[0]
    except OSError as error:
        raise ActiveTestsImpossible(f"{folder} cannot be used by the nodes to find each other: {error}") from None
    finally:
        listening.close()
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _followed(path: Path, participant: Participant) -> SuiteAnswer:
    """Do what the leader of the file asks. One that was killed may have left its file: the next will write another."""
    deadline = time.monotonic() + MEET_S
    while True:
        place = _found(path)
        try:
            return participant.take_part(place.address, place.port, SharedSecret(place.secret))
        except ActiveTestsImpossible:
            if participant.reached or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _found(path: Path) -> MeetingPlace:
    """The leader's file, once it is there. Somebody else's is refused."""
    deadline = time.monotonic() + MEET_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            try:
                return msgspec.json.decode(read_token(path), type=MeetingPlace)
            except (OSError, msgspec.DecodeError) as error:
                if isinstance(error, FileNotFoundError):
                    raise
                raise ActiveTestsImpossible(f"{path} is not used: {error}") from None
        if time.monotonic() > deadline:
            raise ActiveTestsImpossible(f"no leader has come within {MEET_S:.0f} s: there is no {path}")
        time.sleep(0.2)
