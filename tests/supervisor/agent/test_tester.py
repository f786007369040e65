"""Active tests by an agent: they begin when no rank lives, end with the order, and tell why they are not made.

The real process, with a program in place of the training Python.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from supervisor.active import NodeTestSetup
from supervisor.agent.state import AgentState
from supervisor.agent.tester import NodeTester
from supervisor.keeper_client import KeeperState, WorkerProcess
from supervisor.messages import NodeTestOrder
from supervisor.paths import daemon_argv
from tests.conftest import runs, until

SCRIPT = """#!{python}
import json, os, sys, time
order = json.loads(sys.stdin.readline())
def tell(**words): print(json.dumps(words), flush=True)
if order["do"] == "serve": sys.exit(1)
if order["do"] == "look": tell(devices=["cpu"], kind="C, torch 2, x86_64 CPU")
elif order["do"] == "group":
    open({mark!r} + str(os.getpid()), "w").close()
    if {hangs}: time.sleep(60)
    tell(kind="C, torch 2, x86_64 CPU")
    tell(test="all_reduce", unit="s", values=[0.1 * order["world"]], ok=True)
else:
    tell(kind="C, torch 2, x86_64 CPU")
    tell(test="memory_patterns", ok=False, why="8 words changed")
tell(end=True)
"""
WITHIN_S = 40.0


@pytest.fixture
def tested(make_state: Any, tmp_path: Path) -> Callable[..., tuple[AgentState, NodeTester]]:
    def make(*, hangs: bool = False, ranks_end_s: float = 20.0) -> tuple[AgentState, NodeTester]:
        python = tmp_path / "python"
        python.write_text(SCRIPT.format(python=sys.executable, mark=str(tmp_path / "pid-"), hangs=hangs))
        python.chmod(0o755)
        state = make_state(python=str(python))
        state.keeper = KeeperState()
        return state, NodeTester(state, lambda: "127.0.0.1", ranks_end_s=ranks_end_s)

    return make


async def followed(tester: NodeTester, order: NodeTestOrder, until: Callable[[], Any]) -> None:
    """As an agent does, turn by turn."""
    end = asyncio.get_running_loop().time() + WITHIN_S
    while not until():
        assert asyncio.get_running_loop().time() < end, tester.report
        tester.follow(order)
        await asyncio.sleep(0.05)


async def ended(tester: NodeTester) -> None:
    tester.follow(None)
    await tester.rest()


def test_it_gets_ready_and_makes_each_round_once(tested: Any, tmp_path: Path) -> None:
    _, tester = tested()

    async def all_of_it() -> None:
        order = NodeTestOrder(number=3, budget_s=60.0)
        await followed(tester, order, lambda: tester.report)
        ready = tester.report
        assert ready is not None
        assert (ready.number, ready.round, ready.devices, ready.problem) == (3, 0, 1, "")
        for number in (1, 2):
            here = {"world": 1, "first_rank": 0, "host": "127.0.0.1", "port": ready.port}
            order = NodeTestOrder(number=3, budget_s=60.0, round=number, **here)
            await followed(tester, order, lambda: tester.report.round == number)  # noqa: B023
            assert tester.report is not None
            assert tester.report.part is not None
            assert tester.report.part.seconds == {"all_reduce": 0.1}
        assert len(list(tmp_path.glob("pid-*"))) == 2
        await ended(tester)
        assert tester.report is None

    asyncio.run(all_of_it())


def test_no_test_where_a_rank_lives(tested: Any) -> None:
    state, tester = tested(ranks_end_s=0.3)
    worker = WorkerProcess(pid=os.getpid(), rank=0, local_rank=0, attempt=1)
    state.keeper = KeeperState(workers=(worker,))

    async def all_of_it() -> None:
        await followed(tester, NodeTestOrder(number=1, budget_s=60.0), lambda: tester.report)
        assert tester.report is not None
        assert "live" in tester.report.problem
        assert tester._task is None

    asyncio.run(all_of_it())


def test_it_ends_with_the_order(tested: Any, tmp_path: Path) -> None:
    """Also a child that hangs."""
    _, tester = tested(hangs=True)

    async def all_of_it() -> None:
        await followed(tester, NodeTestOrder(number=1, budget_s=60.0), lambda: tester.report)
        assert tester.report is not None
        order = NodeTestOrder(number=1, budget_s=60.0, round=1, world=1, host="127.0.0.1", port=tester.report.port)
        await followed(tester, order, lambda: list(tmp_path.glob("pid-*")))
        await ended(tester)
        (mark,) = tmp_path.glob("pid-*")
        end = asyncio.get_running_loop().time() + WITHIN_S
        while runs(int(mark.name[4:])):
            assert asyncio.get_running_loop().time() < end
            await asyncio.sleep(0.05)

    asyncio.run(all_of_it())


def test_an_agent_that_comes_in_the_middle_says_so(tested: Any) -> None:
    _, tester = tested()

    async def all_of_it() -> None:
        tester.follow(NodeTestOrder(number=5, budget_s=60.0, round=1, world=2, host="h", port=1))
        assert tester.report is not None
        assert "started again" in tester.report.problem

    asyncio.run(all_of_it())


def test_a_node_by_itself(tested: Any) -> None:
    _, tester = tested()

    async def all_of_it() -> None:
        order = NodeTestOrder(number=1, budget_s=60.0, suite="quick")
        await followed(tester, order, lambda: tester.report)
        assert tester.report is not None
        assert [(one.node, one.test, one.verdict) for one in tester.report.results] == [
            ("n1", "memory_patterns", "fail")
        ]
        await ended(tester)

    asyncio.run(all_of_it())


def test_a_python_that_is_none(make_state: Any) -> None:
    broken = make_state(python="/nowhere/python")
    broken.keeper = KeeperState()
    tester = NodeTester(broken, lambda: "127.0.0.1")

    async def all_of_it() -> None:
        await followed(tester, NodeTestOrder(number=1, budget_s=60.0), lambda: tester.report)
        assert tester.report is not None
        assert "/nowhere/python" in tester.report.problem

    asyncio.run(all_of_it())


DIES = """
import subprocess, sys, time
tester = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(tester.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_its_agent_also_while_torch_is_imported(tmp_path: Path) -> None:
    """Then it reads nothing, and would not see that the agent has hung up for as long as that takes."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/imports\nexec sleep 50\n")
    python.chmod(0o755)
    order = NodeTestOrder(number=1, budget_s=60.0)
    setup = NodeTestSetup(node="n1", python=str(python), cwd="/", address="127.0.0.1", order=order)
    argv = daemon_argv("supervisor.active.tester", msgspec.json.encode(setup).decode())
    with subprocess.Popen([sys.executable, "-c", DIES, *argv], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        tester = int(agent.stdout.readline())
        until((tmp_path / "imports").exists, WITHIN_S, "torch to be imported")
        agent.kill()
    until(lambda: not runs(tester), 10.0, "the tests to end with the agent")
