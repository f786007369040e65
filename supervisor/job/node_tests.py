"""Active tests within a job: of an incident's suspects before the next attempt, and of idle nodes by themselves.

Suspects meet each other first, and then good nodes (`recovery.group_tests`). A node that is not heard of, cannot start
a test or still has ranks is *unknown*: only what its processes have felt themselves counts. The next attempt waits for
all of it `LIMIT_S` at most. What follows from the outcome is not decided here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from diagnosis.signals import clean_line
from recovery.group_tests import (
    FEWEST,
    Group,
    GroupOutcome,
    GroupPart,
    Margin,
    conclude,
    group_outcome,
    next_groups,
    pair_margin,
    pair_results,
    with_partners,
)
from recovery.ledger import TestResult
from supervisor import messages as m
from supervisor.job.attempts import Attempts
from supervisor.job.core import Core, SuspectsTested, Timer, Wants, WantsAnd, cancel
from supervisor.job.ledger import ClusterLedger
from supervisor.job.nodes import Nodes
from supervisor.notes import note
from supervisor.view import NodeTestsView

LIMIT_S: Final = 60.0
"""For all rounds together."""
READY_S: Final = 30.0
"""Until all have ended their ranks and imported torch."""
ROUND_S: Final = 23.0
"""A group may take 15 s, its processes 5 s to end."""
LEAST_S: Final = 15.0
"""With less time left no round is begun."""
AGAIN_S: Final = 600.0
"""Suspects that were tested so lately are not tested again."""
RETEST_APART_S: Final = 86400.0
"""A test after a repair that said nothing is not made again sooner."""
SUITE_S: Final[dict[m.SuiteName, float]] = {"quick": 60.0, "full": 600.0}
SLACK_S: Final = 60.0
"""What a suite may take besides: it waits for ranks to end and for torch, and a node may be slow to answer."""
MOST_DEVICES: Final = 64
_ADDRESS: Final = re.compile(r"[A-Za-z0-9._:%-]{1,255}")
"""Agents obey no assignment with another one in it."""
RESULTS_KEPT: Final = 64
"""Of one node: as many tests, of all of its devices."""
NODES_KEPT: Final = 1000
ENDED_KEPT: Final = 32
WRITTEN: Final = 256
"""Results of one series that the ledger gets."""


@dataclasses.dataclass
class _Series:
    """The tests of one incident's suspects."""

    number: int
    incident: str
    suspects: tuple[str, ...]
    nodes: tuple[str, ...]
    began_at: float
    ready: dict[str, m.NodeTestReport] = dataclasses.field(default_factory=dict)
    out: dict[str, str] = dataclasses.field(default_factory=dict)
    """Node -> why it makes no more tests."""
    able: tuple[str, ...] = ()
    rounds: list[list[GroupOutcome]] = dataclasses.field(default_factory=list)
    groups: tuple[Group, ...] = ()
    """Of the round under way; none: the nodes get ready."""
    parts: dict[str, GroupPart] = dataclasses.field(default_factory=dict)

    @property
    def margin(self) -> Margin:
        return pair_margin(f"{self.ready[name].devices} {self.ready[name].kind}" for name in self.able)

    @property
    def awaited(self) -> set[str]:
        if not self.groups and not self.rounds and set(self.suspects) <= self.out.keys():
            return set()  # nothing can come of it
        asked = {name for group in self.groups for name in group} if self.groups else set(self.nodes)
        return asked - self.out.keys() - (self.parts.keys() if self.groups else self.ready.keys())


@dataclasses.dataclass
class _Alone:
    """A node that tests itself."""

    order: m.NodeTestOrder
    by: str
    ends_at: float


class NodeTests:
    def __init__(self, core: Core, nodes: Nodes, attempts: Attempts, ledger: ClusterLedger) -> None:
        self._core, self._nodes, self._attempts, self._ledger = core, nodes, attempts, ledger
        self._number = 0
        self._series: _Series | None = None
        self._alone: dict[str, _Alone] = {}
        self._tested_at: dict[str, float] = {}
        """Suspects -> when their tests ended."""
        self._retested_at: dict[str, float] = {}
        """Nodes on probation -> when they began to test themselves."""
        self._ended: dict[str, NodeTestsView] = {}
        """Of nodes that have tested themselves, the newest."""
        self.results: dict[str, dict[tuple[str, str], TestResult]] = {}
        """Node -> test and GPU -> the newest result."""

    # ----- queries -----

    @property
    def is_awaited(self) -> bool:
        """The next attempt waits for tests of suspects."""
        return self._series is not None and "tests" in self._core.timers

    def order(self, node: str) -> m.NodeTestOrder | None:
        """What this node is asked for now."""
        series, alone = self._series, self._alone.get(node)
        if series is None or node not in series.nodes:
            return alone.order if alone is not None else None
        order = m.NodeTestOrder(number=series.number, round=len(series.rounds) + bool(series.groups), budget_s=LIMIT_S)
        group = next((one for one in series.groups if node in one and not series.out.keys() & set(one)), ())
        if not group:
            return order
        first = series.ready[group[0]]
        sizes = [series.ready[name].devices for name in group]
        return m.NodeTestOrder(
            number=order.number,
            budget_s=LIMIT_S,
            round=order.round,
            world=sum(sizes),
            first_rank=sum(sizes[: group.index(node)]),
            host=first.address,
            port=first.port,
        )

    def view(self) -> tuple[NodeTestsView, ...]:
        """Of nodes by themselves."""
        now = {
            name: NodeTestsView(node=name, suite=one.order.suite or "full", by=one.by, running=True)
            for name, one in self._alone.items()
        }
        return tuple({**self._ended, **now}.values())

    # ----- an incident's suspects -----

    def begin(self, incident: str, suspects: tuple[str, ...]) -> WantsAnd[bool]:
        """False: nobody can be tested, or nothing new would come of it."""
        core, now = self._core, self._core.now
        suspects = tuple(name for name in suspects if now - self._tested_at.get(name, -AGAIN_S) >= AGAIN_S)
        usable = self._nodes.usable()
        heard = [node.name for node in usable if node.quiet_since is None and node.can_test]
        here = [name for name in heard if name not in self._alone]
        suspects = tuple(name for name in suspects if name in here)
        last = self._nodes.last_choice
        others = sorted((name for name in here if name not in suspects), key=lambda name: name in last)
        nodes = with_partners(suspects, others)
        if not core.spec.test_suspects or not nodes:
            return False
        self._number += 1
        self._series = _Series(self._number, incident, suspects, nodes, now)
        yield Timer("tests", now + READY_S)
        self._nodes.touch(*nodes)
        yield note(
            "suspects_tested",
            loud=True,
            incident=incident,
            nodes=suspects,
            partners=nodes[len(suspects) :],
            at_most=LIMIT_S,
        )
        return True

    def reported(self, event: m.NodeTested) -> Wants:
        report, series, alone = event.report, self._series, self._alone.get(event.node)
        if alone is not None and report.number == alone.order.number:
            yield from self._alone_reported(event.node, report)
            return
        if series is None or report.number != series.number or event.node not in series.nodes:
            return
        can_meet = 0 < report.port < 65536 and _ADDRESS.fullmatch(report.address) is not None
        if report.problem or not can_meet or not 1 <= report.devices <= MOST_DEVICES:
            why = report.problem or "it names no address or devices that can be"
            series.out.setdefault(event.node, clean_line(why, 200))
        elif report.round == 0 and not series.groups and not series.rounds:
            series.ready[event.node] = report
        elif series.groups and report.round == len(series.rounds) + 1 and event.node in series.able:
            series.parts[event.node] = report.part or GroupPart(unknown="it does not say what came of it")
            series.ready[event.node] = report  # the next store has another port
        if not series.awaited:
            yield from self._go_on(series)

    def lost(self, node: str) -> Wants:
        """It is not heard of any more, or was started again."""
        series = self._series
        if series is not None and node in series.nodes and node not in series.out:
            series.out[node] = "the node was lost"
            if not series.awaited:
                yield from self._go_on(series)

    def due(self) -> Wants:
        """Who has not answered by now is not waited for."""
        now = self._core.now
        for name in [name for name, one in self._alone.items() if now >= one.ends_at]:
            yield from self._end_alone(name, "it did not answer in time")
        if self._series is not None:
            for name in self._series.awaited:
                self._series.out[name] = "it did not answer in time"
            yield from self._go_on(self._series)
        else:
            yield from self._set_timer()

    def _go_on(self, series: _Series) -> Wants:
        """All have answered, or are not waited for: the next round, or the end."""
        if series.groups:
            self._close_round(series)
        else:
            series.able = tuple(name for name in series.nodes if name in series.ready and name not in series.out)
            if len(series.able) < FEWEST or not set(series.suspects) & set(series.able):
                why = "; ".join(f"{name}: {text}" for name, text in list(series.out.items())[:4])
                yield from self._end(series, f"too few nodes could take part ({why})")
                return
        while groups := self._groups(series):
            left_s = series.began_at + LIMIT_S - self._core.now
            if left_s < LEAST_S:
                yield from self._end(series, "no time was left for another round")
                return
            series.groups = groups
            for group in groups:
                if series.out.keys() & set(group):  # it is not tested
                    series.parts.update(dict.fromkeys(group, GroupPart(unknown="one of them is gone")))
            if series.awaited:
                yield Timer("tests", self._core.now + min(ROUND_S, left_s))
                self._nodes.touch(*series.nodes)
                return
            self._close_round(series)
        yield from self._end(series)

    @staticmethod
    def _close_round(series: _Series) -> None:
        silent = {name: GroupPart(unknown=why) for name, why in series.out.items()}
        series.rounds.append([group_outcome(group, {**silent, **series.parts}) for group in series.groups])
        series.groups, series.parts = (), {}

    def _groups(self, series: _Series) -> tuple[Group, ...]:
        """None where all suspects are proven good and nobody else failed: nothing else is needed."""
        if series.rounds:
            found = conclude(series.able, series.rounds, series.margin)
            open_ = {
                name for some in series.rounds for one in some if one.failed and not one.busy for name in one.nodes
            }
            open_ -= {*found.good, *(one.node for one in found.bad)}
            if not open_ and set(series.suspects) & set(series.able) <= set(found.good):
                return ()
        return next_groups(series.able, series.rounds, series.margin)

    def _end(self, series: _Series, unknown: str = "") -> Wants:
        now, conclusion = self._core.now, None
        self._series = None
        yield from self._set_timer()
        self._nodes.touch(*series.nodes)
        if series.rounds:
            conclusion = conclude(series.able, series.rounds, series.margin, self._tested_domains(series.able))
            met = (one for some in series.rounds for one in some if set(one.nodes) & set(conclusion.unproven))
            unknown = unknown or next((f"{one.busy} ({one.failed})" for one in met if one.busy), "")
            found = pair_results(conclusion, series.rounds, now)
            self._keep(found)
            told = [one for one in found if one.node in series.suspects or one.verdict == "fail"]
            for one in told[:WRITTEN]:
                yield from self._ledger.tested(one)
        self._tested_at.update(dict.fromkeys(series.suspects, now))  # also those that could not be: nothing is new
        while len(self._tested_at) > NODES_KEPT:
            del self._tested_at[next(iter(self._tested_at))]
        partners = tuple(name for name in series.able if name not in series.suspects)
        yield SuspectsTested(series.incident, series.suspects, partners, now - series.began_at, conclusion, unknown)

    def _tested_domains(self, tested: Sequence[str]) -> dict[str, str]:
        """Node -> switch or rack, where all of the job's nodes below it were tested: else a part may be well."""
        here = {node.name: node.domain for node in self._nodes if node.present and node.domain}
        partly = {domain for name, domain in here.items() if name not in tested}
        return {name: here[name] for name in tested if here.get(name, "") not in ("", *partly)}

    def stop(self, why: str) -> Wants:
        """Nobody waits for the suspects' tests any more."""
        if self._series is not None:
            yield from self._end(self._series, why)

    def forget(self) -> None:
        """The job ends, or its nodes are others."""
        names = {*self._alone, *(self._series.nodes if self._series is not None else ())}
        self._series, self._alone = None, {}
        self._nodes.touch(*names)

    def _keep(self, found: Iterable[TestResult]) -> None:
        for one in found:
            of_node = self.results.pop(one.node, {})
            of_node.pop((one.test, one.gpu), None)
            of_node[one.test, one.gpu] = one
            while len(of_node) > RESULTS_KEPT:
                del of_node[next(iter(of_node))]
            self.results[one.node] = of_node
        while len(self.results) > NODES_KEPT:
            del self.results[next(iter(self.results))]

    def _set_timer(self) -> Wants:
        """For those that test themselves."""
        ends = [one.ends_at for one in self._alone.values()]
        if ends:
            yield Timer("tests", min(ends))
        else:
            yield cancel("tests")

    # ----- one node by itself -----

    def asked(self, event: m.OperatorCommand) -> Wants:
        """`unbroken qualify NODE`: `NODE quick` or `NODE full`."""
        name, _, words = event.argument.partition(" ")
        name = self._nodes.named(name)
        suite: m.SuiteName = "quick" if words.strip() == "quick" else "full"
        attempt, node = self._attempts.current, self._nodes.get(name)
        if not name:
            yield _refuse("needs_a_node", command="qualify")
        elif node is None or not node.present:
            yield _refuse("qualify_absent", node=name)
        elif attempt is not None and not attempt.over and name in attempt.member_set:
            yield _refuse("qualify_in_use", node=name, attempt=attempt.number)
        elif not node.can_test:
            yield _refuse("qualify_old", node=name)
        elif self.order(name) is not None:
            yield _refuse("qualify_twice", node=name)
        else:
            yield from self.test_alone(name, suite, event.by)

    def test_alone(self, name: str, suite: m.SuiteName, by: str) -> Wants:
        self._number += 1
        order = m.NodeTestOrder(number=self._number, suite=suite, budget_s=SUITE_S[suite])
        self._alone[name] = _Alone(order, by, self._core.now + SUITE_S[suite] + SLACK_S)
        if self._series is None:
            yield from self._set_timer()
        self._nodes.touch(name)
        yield note("qualify_begins", node=name, suite=suite, at_most=SUITE_S[suite])

    def retest(self) -> Wants:
        """Idle nodes that were repaired a day ago test themselves once, where that is allowed."""
        core, attempt = self._core, self._attempts.current
        if not core.spec.test_suspects or core.mode != "enforce" or core.paused or core.is_over:
            return
        used = attempt.member_set if attempt is not None and not attempt.over else frozenset()
        for node in list(self._nodes):
            known = self._ledger.of(node.name)
            due = known is not None and known.retest_due and not known.cordon
            if not due or not node.present or node.name in used or self.order(node.name) is not None:
                continue
            if not node.can_test:
                continue
            if core.now - self._retested_at.get(node.name, -RETEST_APART_S) >= RETEST_APART_S:
                self._retested_at[node.name] = core.now
                yield from self.test_alone(node.name, "quick", "policy")

    def make_way(self, members: Iterable[str]) -> Wants:
        """The next attempt starts on these nodes: what they test is given up."""
        for name in [name for name in members if name in self._alone]:
            yield from self._end_alone(name, "the job needs the node")

    def _alone_reported(self, name: str, report: m.NodeTestReport) -> Wants:
        if not (report.problem or report.results):
            return  # it has begun
        found = [one for one in report.results if one.node == name][:RESULTS_KEPT]
        self._keep(found)
        for one in found:
            yield from self._ledger.tested(one)
        yield from self._end_alone(name, report.problem, found)

    def _end_alone(self, name: str, problem: str, found: Sequence[TestResult] = ()) -> Wants:
        alone = self._alone.pop(name)
        self._ended.pop(name, None)
        self._ended[name] = NodeTestsView(
            node=name,
            suite=alone.order.suite or "full",
            by=alone.by,
            running=False,
            problem=problem,
            results=tuple(found),
        )
        while len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        self._nodes.touch(name)
        if self._series is None:
            yield from self._set_timer()
        failed = [f"{one.test} ({one.reason})" for one in found if one.verdict == "fail"]
        if problem and not found:
            yield note("qualify_unknown", loud=True, node=name, why=problem)
        elif failed:
            yield note("qualify_failed", loud=True, node=name, what="; ".join(failed[:4]))
        else:
            passed = sum(one.verdict == "pass" for one in found)
            yield note("qualify_passed", loud=True, node=name, passed=passed, unknown=len(found) - passed or None)


def _refuse(kind: str, **arguments: Any) -> m.Note:
    return note(kind, refused=True, **arguments)
