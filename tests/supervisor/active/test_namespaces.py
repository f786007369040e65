"""The whole command on four nodes in network namespaces, with torch and gloo, and a link that loses packets."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.active import NodeTestSetup
from supervisor.paths import daemon_argv

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.slow]


def test_the_node_behind_a_lossy_link_is_named(bridge: Any, check_all: Any, tmp_path: Path) -> None:
    bridge.lose_packets("n3")
    processes = check_all("--active", "full", "--only", "pairs", "--beside-jobs")  # of other tests
    answers = [json.loads(process.communicate(timeout=200)[0]) for process in processes]
    words = (tmp_path / "n1.err").read_text()
    failed = {(one["node"], one["test"]) for one in answers[0]["results"] if one["verdict"] == "fail"}
    assert failed == {("n3", "pairs")}, words
    assert set(answers[0]["pairs"]["good"]) == {"n1", "n2", "n4"}, words
    assert processes[2].returncode == 2
    assert processes[3].returncode == 0


class FakeAgents:
    """Agents' processes for active tests, one in each namespace, that do what a job's assignments ask."""

    def __init__(self, bridge: Any, driver: Any) -> None:
        self.bridge, self.driver = bridge, driver
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.rounds: dict[str, int] = {}
        self.at = time.monotonic()

    def tell(self, kind: Any, **fields: Any) -> None:
        now = time.monotonic()
        self.driver.tell(kind, after=now - self.at, **fields)
        self.at = now

    def run(self) -> None:
        """Until the job asks for no tests any more."""
        try:
            while asked := {name: one.tests for name, one in self.driver.told.items() if one.tests is not None}:
                for name, order in asked.items():
                    self.give(name, order)
                pipes = {process.stdout: name for name, process in self.processes.items()}
                for pipe in select.select(list(pipes), [], [], 1.0)[0]:
                    if line := pipe.readline():
                        self.tell(
                            m.NodeTested, node=pipes[pipe], report=msgspec.json.decode(line, type=m.NodeTestReport)
                        )
                if self.driver.job.timers.get("tests", 1e12) <= self.driver.now + time.monotonic() - self.at:
                    self.tell(m.TimerFired, timer="tests")
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()

    def give(self, name: str, order: m.NodeTestOrder) -> None:
        node = self.bridge.node(name)
        if name not in self.processes:
            setup = NodeTestSetup(node=name, python=sys.executable, cwd="/tmp", address=node.address, order=order)
            argv = node.command(*daemon_argv("supervisor.active.tester", msgspec.json.encode(setup).decode()))
            self.processes[name] = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        elif order.world and order.round > self.rounds.get(name, 0):
            self.rounds[name] = order.round
            pipe = self.processes[name].stdin
            assert pipe is not None
            pipe.write(msgspec.json.encode(order) + b"\n")
            pipe.flush()


@pytest.mark.parametrize("fault", ["lossy", "cut"])
def test_a_job_tests_its_suspect(bridge: Any, make_driver: Any, fault: str) -> None:
    """A job of two nodes and two spares, whose verdict suspects n2."""
    verdict = Verdict(
        failure_class=FailureClass.NCCL_NETWORK,
        culprits=(Culprit(node="n2"),),
        confidence=0.8,
        why="connections to n2 broke",
        action="wait_and_retry",
    )
    driver = make_driver(verdict, nodes_min=2, nodes_max=2, spares=2, test_suspects=True)
    driver.join("n1", "n2")
    driver.join("n3", "n4", spare=True)
    driver.up()
    driver.crash("n1", rank=1, code=1, signal=None)
    driver.fire("evidence")
    if fault == "lossy":
        bridge.lose_packets("n2")
    elif fault == "cut":
        bridge.cut("n2", "n1")
    began = time.monotonic()
    FakeAgents(bridge, driver).run()
    assert time.monotonic() - began < 75.0
    tests = driver.job.view().incidents[-1].tests
    left_out = {one.node for one in driver.job.nodes.cordons.all(driver.now)}
    assert set(tests.failed) == left_out == ({"n2"} if fault == "lossy" else set()), tests
    assert (("n2", "n1") in tests.between) is (fault == "cut"), tests  # on a busy machine others may be slow together
    assert ("n2" in tests.passed) == (fault != "lossy"), tests
    assert driver.job.state == "STARTING" or "backoff" in driver.job.timers
