"""The agent's side of the mover (`supervisor.mover.process`): starts it, starts it again, tells it what is wanted.

It is there only where the user gave a folder to publish to. Whatever happens to it, the ranks go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from recovery.tiers import BringBack
from supervisor.agent.checkpoints import CheckpointMonitor
from supervisor.agent.state import AgentState
from supervisor.config import NodePlan
from supervisor.mover.protocol import MoverOrders, MoverSetup, MoverStatus
from supervisor.paths import daemon_argv

LINE_LIMIT: Final = 32 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between two starts of a mover that ends by itself."""
REST_S: Final = 20.0
"""So long the look after the end of all ranks is waited for."""
BRING_S: Final = 1700.0
BRING_NOTICE_S: Final = 20.0
DRAIN_S: Final = 1800.0
"""At the end of a run that succeeded: so long for its last checkpoints to be published."""
DRAIN_STOPPED_S: Final = 20.0
"""Of a run that was stopped, or that cannot publish: somebody waits."""

log = logging.getLogger("unbroken.agent")


class MoverRunner:
    """`run` for ever; `follow` with each look; `rest` and `bring` before an attempt."""

    def __init__(self, state: AgentState, checkpoints: CheckpointMonitor) -> None:
        plan = state.plan
        self._state = state
        self._checkpoints = checkpoints
        self._setup = setup_of(plan)
        self._process: Process | None = None
        self._orders = MoverOrders()
        self._told: MoverOrders | None = None
        self._news = asyncio.Event()
        self._draining_since: float | None = None
        self.status: MoverStatus | None = None
        """The newest; None: there is no mover, or it has not spoken yet."""
        self.changes = 0
        """Grows with every change of what is reported of it."""
        self.problem = ""

    @property
    def is_wanted(self) -> bool:
        return self._setup is not None

    # ----- the process -----

    async def run(self) -> None:
        """Keep one running."""
        pause_s = FIRST_PAUSE_S
        while self._setup is not None:
            began = time.monotonic()
            try:
                await self._run_once(self._setup)
            except OSError as error:
                log.warning("the mover cannot be started: %s", error)
            self._process, self._told = None, None
            if time.monotonic() - began > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            self.problem = "checkpoints are not copied: the process for it has ended, and is started again"
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _run_once(self, setup: MoverSetup) -> None:
        self._process = process = await asyncio.create_subprocess_exec(
            *daemon_argv("supervisor.mover.process", msgspec.json.encode(setup).decode()),
            stdin=PIPE,
            stdout=PIPE,
            limit=LINE_LIMIT,
            env={**os.environ, "MALLOC_ARENA_MAX": "2", "UNBROKEN_JOB_DIR": setup.job_dir},  # it is known as the job's
        )
        self._tell()
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._receive(msgspec.json.decode(line, type=MoverStatus))
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("the mover does not speak as it must: %s", error)
        finally:
            if process.returncode is None:
                try:
                    process.kill()
                except ProcessLookupError:
                    pass
        await process.wait()

    def _receive(self, status: MoverStatus) -> None:
        before, self.status = self.status, status
        self.problem = ""
        if before is None or before.tiers != status.tiers:
            self.changes += 1
            self._state.wakeup.set()
        for problem in status.problems:
            self._state.notices.report(problem)
        self._news.set()

    def _tell(self) -> None:
        stdin = self._process.stdin if self._process is not None else None
        if stdin is None or stdin.is_closing() or self._orders == self._told:
            return
        if stdin.transport.get_write_buffer_size() > LINE_LIMIT:
            return  # it does not read: told again with the next look
        stdin.write(msgspec.json.encode(self._orders) + b"\n")
        self._told = self._orders

    # ----- what is wanted -----

    def follow(self) -> None:
        """With each look: the saves that are there, and what the controller asks."""
        if self._setup is None:
            return
        state, assignment = self._state, self._state.assignment
        tiers = assignment.tiers if assignment is not None else None
        newest = max(state.newest_attempt, state.saved.joined)
        paths = tuple(one.path for one in self._checkpoints.checkpoints if not one.copy_of)
        self._orders = msgspec.structs.replace(
            self._orders,
            paths=paths,
            attempt=newest,
            since=state.joined_wall,
            at_rest=self._orders.rest >= newest and newest > 0,
            peer=tiers.peer if tiers is not None else None,
            commit=tiers.commit if tiers is not None else (),
        )
        self._tell()

    async def rest(self, attempt: int) -> None:
        """No rank of it, or of an older one, is left that could write: wait until the mover has seen all there is."""
        if self._setup is None:
            return
        self._rest(attempt)
        wanted = self._orders.rest
        if not await self._until(lambda status: status.tiers.rested >= wanted, REST_S):
            self._state.notices.report(
                f"{self._state.plan.node}: what lies in {self._setup.checkpoint_dir} is not known after "
                f"{REST_S:.0f} s: is the file system answering?"
            )

    def _rest(self, attempt: int) -> None:
        if attempt > self._orders.rest:
            self._orders = msgspec.structs.replace(self._orders, rest=attempt)
        self.follow()

    async def bring(self, wanted: BringBack) -> None:
        """Have the checkpoint that the attempt resumes from on this node's disk. What fails is in the next report."""
        if self._setup is None:
            return
        number = max(self._orders.bring_number, self.status.brought if self.status is not None else 0) + 1
        self._orders = msgspec.structs.replace(self._orders, bring=wanted, bring_number=number)
        self._tell()
        save = wanted.save
        done = await self._until(lambda status: status.brought >= number, BRING_NOTICE_S)
        if not done:
            size = f"{save.size_bytes / 2**30:.1f} GiB" if save.size_bytes else "all of it"
            self._state.notices.show(f"bringing back {save.name} ({size}) for this node takes time")
            done = await self._until(lambda status: status.brought >= number, BRING_S)
        self._orders = msgspec.structs.replace(self._orders, bring=None)
        problem = self.status.bring_problem if done and self.status is not None else "it takes too long"
        if not done or problem:
            self._state.notices.show(f"{save.name} could not be brought back to this node: {problem}")

    async def _until(self, holds: Callable[[MoverStatus], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.status is None or not holds(self.status):
            self._news.clear()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._tell()  # a mover that was started again knows nothing
            try:
                await asyncio.wait_for(self._news.wait(), min(left, 1.0))
            except asyncio.TimeoutError:
                continue
        return True

    def may_end(self, *, succeeded: bool) -> bool:
        """At the end of the job: whether nothing is left to be published that is worth waiting for."""
        self._rest(max(self._state.newest_attempt, self._state.saved.joined))
        assignment, status = self._state.assignment, self.status
        tiers = assignment.tiers if assignment is not None else None
        if self._setup is None or status is None or tiers is None or tiers.drained:
            return True
        now = time.monotonic()
        if self._draining_since is None:
            self._draining_since = now
            if succeeded and status.tiers.parts:
                self._state.notices.show("the last checkpoints are being published")
        troubled = bool(status.problems or self.problem)
        limit_s = DRAIN_S if succeeded and not troubled else DRAIN_STOPPED_S
        if now - self._draining_since < limit_s:
            return False
        if status.tiers.parts:
            self._state.notices.show(
                f"the newest checkpoint was not published to {self._setup.publish_to} within {limit_s:.0f} s: "
                f"this node's part of it is in {self._setup.checkpoint_dir}"
            )
        return True


def setup_of(plan: NodePlan) -> MoverSetup | None:
    """None: the user gave no folder to publish to."""
    spec, settings = plan.spec, plan.settings
    if not spec.publish_to or len(spec.checkpoint_dirs) != 1:
        return None
    token = settings.run.token_file
    return MoverSetup(
        node=plan.node,
        checkpoint_dir=spec.checkpoint_dirs[0],
        publish_to=spec.publish_to,
        job_dir=plan.job_dir,
        token_file=token or str(Path(plan.job_dir) / "token"),
        shared_token=bool(token),
        tls_cert=settings.controller.tls_cert,
        tls_key=settings.controller.tls_key,
        tls_ca=settings.controller.tls_ca,
    )
