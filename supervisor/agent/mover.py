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

from recovery.tiers import BringBack, NodeTiers, NotBrought, SaveKey, SnapshotBring, SnapshotOrders
from supervisor.agent.checkpoints import CheckpointMonitor
from supervisor.agent.state import AgentState
from supervisor.config import NodePlan
from supervisor.mover.protocol import MoverOrders, MoverSetup, MoverStatus
from supervisor.paths import daemon_argv

LINE_LIMIT: Final = 32 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between two starts of a mover that ends by itself."""
SNAPSHOT_S, LONGEST_SNAPSHOT_S = 20.0, 300.0
"""To bring snapshots may take so long and the time for their size, at most so long."""
SNAPSHOT_ENDS_S: Final = 5.0
"""So long a mover may take to leave the slots alone, when the time is up."""
END_S: Final = 10.0
REST_S: Final = 20.0
"""So long the look after the end of all ranks is waited for."""
BRING_S: Final = 1700.0
"""To bring back a save never takes longer."""
BRING_SLACK_S: Final = 60.0
"""So long no mover may be there, and so much longer than its rate tells it may take."""
BRING_RATE: Final = 100 << 20
"""Bytes a second, where none has come yet: what is copied from this node's own mirrors is not counted."""
BRING_NOTICE_S: Final = 30.0
BRING_RETRIES_S: Final = 60.0
"""So long the mover itself asks again where a source does not answer."""
DRAIN_S: Final = 1800.0
"""At the end of a run that succeeded: so long for its last checkpoints to be published."""
CLEAR_S: Final = 10.0
"""After it: so long for our copies to be removed."""
DRAIN_STOPPED_S: Final = 20.0
"""Of a run that was stopped, or that cannot publish: somebody waits."""

WHY_LIMIT: Final = 300

log = logging.getLogger("unbroken.agent")


class MoverRunner:
    """`run` for ever; `follow` with each look; `rest` and `bring` before an attempt."""

    def __init__(
        self,
        state: AgentState,
        checkpoints: CheckpointMonitor,
        *,
        slack_s: float = BRING_SLACK_S,
        retries_s: float = BRING_RETRIES_S,
    ) -> None:
        plan = state.plan
        self._state = state
        self._checkpoints = checkpoints
        self._setup = setup_of(plan)
        self._process: Process | None = None
        self._orders = MoverOrders()
        self._told: MoverOrders | None = None
        self._news = asyncio.Event()
        self._draining_since: float | None = None
        self._clearing_since: float | None = None
        self.status: MoverStatus | None = None
        """The newest; None: there is no mover, or it has not spoken yet."""
        self.changes = 0
        """Grows with every change of what is reported of it."""
        self.problem = ""
        self._slack_s, self._retries_s = slack_s, retries_s
        self._lives = False
        """The process that runs now has spoken."""
        self._not_brought: dict[SaveKey, NotBrought] = {}
        """For the attempt that is being formed; the mover has tried for a while."""

    @property
    def is_wanted(self) -> bool:
        return self._setup is not None

    @property
    def tiers(self) -> NodeTiers | None:
        """What the controller is told; None: nothing is known yet.

        A failure is told once it is final for an attempt, also by a mover that was started again since.
        """
        if self.status is None:
            return None
        return msgspec.structs.replace(self.status.tiers, failed=tuple(self._not_brought.values()))

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
            self._process, self._told, self._lives = None, None, False
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
            await self._end_process()

    def _receive(self, status: MoverStatus) -> None:
        before, self.status = self.status, status
        self.problem, self._lives = "", True
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
            gone=tiers.gone if tiers is not None else (),
            snapshots=_without_bring(tiers.snapshots if tiers is not None else None),
        )
        self._tell()

    async def rest(self, attempt: int) -> None:
        """No rank of it, or of an older one, is left that could write: wait until the mover has seen all there is."""
        if self._setup is None:
            return
        self._rest(attempt)
        wanted = self._orders.rest
        if not await self._until(lambda status: status.tiers.rested >= wanted, min(REST_S, self._slack_s)):
            self._state.notices.report(
                f"{self._state.plan.node}: what lies in {self._setup.checkpoint_dir} is not known after "
                f"{REST_S:.0f} s: is the file system answering?"
            )

    def _rest(self, attempt: int) -> None:
        if attempt > self._orders.rest:
            self._orders = msgspec.structs.replace(self._orders, rest=attempt)
        self.follow()

    async def bring(self, wanted: BringBack) -> str:
        """Have the checkpoint that the attempt resumes from on this node's disk; empty: it is there, else why not.

        What the mover cannot get is in the next report: the controller chooses again. Ranks must not start meanwhile.
        """
        if self._setup is None:
            return ""
        key = wanted.save.key
        problem, answered = await self._bring_once(self._renewed(wanted))
        if not problem:
            self._forget_failure(key)
            return ""
        if answered:
            self._not_brought[key] = NotBrought(
                name=key.name, attempt=key.attempt, stamp=key.stamp, why=problem[:WHY_LIMIT]
            )
            self.changes += 1
        self._state.notices.show(f"{key.name} could not be brought back to this node: {problem}")
        self._state.wakeup.set()
        return f"{key.name} could not be brought back: {problem}"

    async def bring_snapshot(self, wanted: SnapshotBring) -> None:
        """Have the snapshots that ranks may start from in this node's slots; else they are not offered.

        Afterwards nobody writes to the slots: a mover that does not say so is ended.
        """
        if self._setup is None or not self._setup.snapshot_files:
            return
        number = 1 + max(self._orders.bring_snapshot_number, self.status.brought_snapshot if self.status else 0)
        self._orders = msgspec.structs.replace(self._orders, bring_snapshot=wanted, bring_snapshot_number=number)
        limit_s = min(min(SNAPSHOT_S, self._slack_s) + 2 * wanted.size_bytes / BRING_RATE, LONGEST_SNAPSHOT_S)
        done = await self._until(lambda status: status.brought_snapshot >= number, limit_s)
        self._orders = msgspec.structs.replace(self._orders, bring_snapshot=None)
        self._tell()
        problem = self.status.bring_snapshot_problem if self.status is not None else ""
        if not done:
            problem = f"it takes too long: more than {limit_s:.0f} s"
            ends_s = min(SNAPSHOT_ENDS_S, self._slack_s)
            if not await self._until(lambda status: status.brought_snapshot >= number, ends_s):
                await self._end_process()
        if problem:
            self._state.notices.show(f"the snapshots of step {wanted.step} could not be brought here: {problem}")

    async def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            try:
                process.kill()
            except ProcessLookupError:
                pass
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except asyncio.TimeoutError:
            log.error("the mover does not end within %.0f s", END_S)

    def has_reported(self, wanted: BringBack) -> bool:
        """The controller knows that this node cannot get it."""
        return wanted.save.key in self._not_brought

    def attempt_starts(self) -> None:
        """Before the next attempt each save may be tried again."""
        for key in list(self._not_brought):
            self._forget_failure(key)

    def _forget_failure(self, key: SaveKey) -> None:
        if self._not_brought.pop(key, None) is not None:
            self.changes += 1

    def _renewed(self, wanted: BringBack) -> BringBack:
        """The controller may know by now that a source answers at another port."""
        tiers = self._state.assignment.tiers if self._state.assignment is not None else None
        newer = tiers.bring if tiers is not None else None
        return newer if newer is not None and newer.save.key == wanted.save.key else wanted

    async def _bring_once(self, wanted: BringBack) -> tuple[str, bool]:
        """Why it is not here, and whether that is the mover's own answer."""
        number = max(self._orders.bring_number, self.status.brought if self.status is not None else 0) + 1
        self._orders = msgspec.structs.replace(self._orders, bring=wanted, bring_number=number)
        self._tell()
        problem = await self._wait_for_all_of(wanted)
        self._orders = msgspec.structs.replace(self._orders, bring=None)
        self._tell()
        if problem:
            return problem, False
        return self.status.bring_problem if self.status is not None else "", True

    async def _wait_for_all_of(self, wanted: BringBack) -> str:
        """Until the mover is done with it; why it is not waited for any longer."""
        save, began = wanted.save, time.monotonic()
        lived_at = told_at = moved_at = began
        before = self.status.brought_bytes if self.status is not None else 0
        moved = 0
        while not await self._until(
            lambda status: status.brought >= self._orders.bring_number, min(1.0, self._slack_s)
        ):
            now = time.monotonic()
            if (newer := self._renewed(wanted)) != wanted:  # the mover leaves the older order
                wanted, number = newer, self._orders.bring_number + 1
                self._orders = msgspec.structs.replace(self._orders, bring=wanted, bring_number=number)
                self._tell()
            lived_at = now if self._lives else lived_at
            if now - lived_at >= self._slack_s:
                return f"the process that copies checkpoints has not run for {self._slack_s:.0f} s"
            here = max(0, (self.status.brought_bytes if self.status is not None else 0) - before)
            if here != moved:
                moved, moved_at = here, now
            rate = moved / max(moved_at - began, 1.0) if moved else BRING_RATE
            until = began + 2 * save.size_bytes / rate if save.size_bytes else moved_at
            if now >= min(until + self._slack_s + self._retries_s, began + BRING_S):
                return f"it takes too long: {_size(moved)} of {_size(save.size_bytes)} after {now - began:.0f} s"
            if now - told_at >= BRING_NOTICE_S:
                told_at = now
                self._state.notices.show(
                    f"bringing back {save.name} for this node: {_size(moved)} of {_size(save.size_bytes)} so far"
                )
        return ""

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

    def _is_cleared(self, status: MoverStatus, now: float) -> bool:
        """Our copies are of no use any more. What stays, for example where the shared folder hangs, is told later."""
        if self._clearing_since is None:
            self._clearing_since = now
            self._orders = msgspec.structs.replace(self._orders, over=True)
            self._tell()
        return status.cleared or now - self._clearing_since >= CLEAR_S

    def may_end(self, *, succeeded: bool) -> bool:
        """At the end of the job: whether nothing is left to be published that is worth waiting for."""
        self._rest(max(self._state.newest_attempt, self._state.saved.joined))
        assignment, status = self._state.assignment, self.status
        tiers = assignment.tiers if assignment is not None else None
        now = time.monotonic()
        if self._setup is None or status is None or tiers is None:
            return True
        if tiers.drained:
            return not succeeded or self._is_cleared(status, now)
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


def _without_bring(orders: SnapshotOrders | None) -> SnapshotOrders | None:
    return None if orders is None else msgspec.structs.replace(orders, bring=None)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count else "nothing"


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
        snapshot_files=plan.snapshot_files if spec.mirror_snapshots else (),
    )
