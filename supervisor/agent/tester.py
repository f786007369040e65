"""Active tests that the controller asks this node for: a process makes them, and only while no rank of the job lives.

It is ended as soon as the controller takes the order back. Nothing waits for it but the next attempt's preparations,
which wait for its end: its children may hold the GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from supervisor.active import NodeTestSetup
from supervisor.agent.state import AgentState
from supervisor.messages import NodeTestOrder, NodeTestReport
from supervisor.paths import daemon_argv

RANKS_END_S: Final = 20.0
"""So long ranks may take to end before the tests."""
SLACK_S: Final = 45.0
"""Besides the order's time: until torch is imported and the devices are known."""
END_S: Final = 3.0
"""What it gets to end by itself once the order is taken back. Its children do not outlive it in any case."""
REST_S: Final = 10.0
"""What is killed is gone after so long, or a driver holds it."""
LINE_LIMIT: Final = 1 << 20

log = logging.getLogger("unbroken.agent")


class NodeTester:
    """`report` is what the controller is told; None: it asks for nothing, or nothing is known yet."""

    def __init__(self, state: AgentState, address: Callable[[], str], *, ranks_end_s: float = RANKS_END_S) -> None:
        self._state, self._address, self._ranks_end_s = state, address, ranks_end_s
        self.report: NodeTestReport | None = None
        self._number = self._round = 0
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        """Of tests that are over: their processes end."""
        self._begin_by = self._end_by = 0.0

    def follow(self, order: NodeTestOrder | None) -> None:
        """With each turn: what the controller asks for now."""
        now = time.monotonic()
        if order is None or order.number != self._number:
            self._stop()
            self.report, self._number, self._round = None, order.number if order is not None else 0, 0
            if order is None:
                return
            self._begin_by, self._end_by = now + self._ranks_end_s, now + self._ranks_end_s + order.budget_s + SLACK_S
            if order.round:
                self._give_up("its agent was started again while it was tested")
        if self.report is not None and (self.report.problem or self.report.results):
            return
        if self._task is None:
            self._begin(order, now)
        elif now > self._end_by:
            self._stop()
            self._give_up("its tests did not end in time")
        elif (
            order.world and order.round > self._round and self._process is not None and self._process.stdin is not None
        ):
            self._round = order.round
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    def _begin(self, order: NodeTestOrder, now: float) -> None:
        """Once the keeper says that no rank lives."""
        state = self._state
        if state.keeper is not None and not any(worker.alive for worker in state.keeper.workers):
            self._task = asyncio.get_running_loop().create_task(self._run(order))
        elif now > self._begin_by:
            ranks = "no keeper tells whether ranks live" if state.keeper is None else "ranks still live"
            self._give_up(f"{ranks} here after {self._ranks_end_s:.0f} s")

    async def _run(self, order: NodeTestOrder) -> None:
        plan = self._state.plan
        setup = NodeTestSetup(
            node=plan.node,
            python=plan.python,
            cwd=plan.cwd,
            address=self._address() or "127.0.0.1",
            order=order,
            ledger=str(Path(plan.cwd) / plan.settings.ledger.folder) if plan.settings.ledger.folder else "",
            site_file=plan.settings.run.site_file,
        )
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *daemon_argv("supervisor.active.tester", msgspec.json.encode(setup).decode()),
                stdin=PIPE,
                stdout=PIPE,
                limit=LINE_LIMIT,
                env={**os.environ, **plan.launcher_env},
            )
            if order.number != self._number:
                return  # taken back meanwhile
            self._process = process
            assert process.stdout is not None
            while line := await process.stdout.readline():
                report = msgspec.json.decode(line, type=NodeTestReport)
                if report.number == self._number:
                    self.report = report
                    self._state.wakeup.set()
            if order.number == self._number and not (self.report and (self.report.problem or self.report.results)):
                self._give_up("the process that tests it has ended by itself")
        except (OSError, ValueError, msgspec.DecodeError) as error:
            log.warning("active tests: %s", error)
            if order.number == self._number:
                self._give_up("its tests cannot be started")
        finally:
            if process is not None:
                _kill(process)
        if process is not None:
            await process.wait()

    def _give_up(self, why: str) -> None:
        self.report = NodeTestReport(number=self._number, problem=why)
        self._state.wakeup.set()

    def _stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.close()  # it kills its children and ends
            asyncio.get_running_loop().call_later(END_S, _kill, process)
        if self._task is not None:
            self._process, self._ending, self._task = None, self._task, None

    async def rest(self) -> None:
        """Until nothing of the tests is left, `REST_S` at most."""
        if self._ending is not None:
            await asyncio.wait({self._ending}, timeout=REST_S)


def _kill(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
