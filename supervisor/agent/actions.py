"""What an agent does to its node: the actions of `reconcile`, carried out by the keeper and the launcher socket; and
the request to drain the node, for root's programs.

Nothing here decides anything. Work that takes time runs beside the agent's loop, each kind at most once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from recovery.checkpoint import ROLLED_BACK, Preparation, PutBack, SetAside
from recovery.cordon import DrainRequest, clean_reason, may_be_asked, request_file
from recovery.fewer_processes import with_processes
from recovery.quarantine import PreparationError, prepare
from recovery.snapshot_memory import CHOSEN_VARIABLE, FILES_VARIABLE
from recovery.tiers import BringBack
from supervisor.agent.checkpoints import CheckpointMonitor
from supervisor.agent.evidence import EvidenceCollector
from supervisor.agent.mover import MoverRunner
from supervisor.agent.procfs import handles
from supervisor.agent.reconcile import (
    AnswerLauncher,
    AskRanks,
    Collect,
    EndLauncher,
    Finished,
    Join,
    KillWorkers,
    Launch,
    MakeTrace,
    NodeAction,
    Prepare,
    Stop,
    WakeRanks,
)
from supervisor.agent.state import AgentState
from supervisor.agent.tester import NodeTester
from supervisor.agent.tracing import Tracer
from supervisor.blocking import BlockingCalls, timeout
from supervisor.files import write_atomically
from supervisor.keeper_client import KeeperClient
from supervisor.messages import Assignment, Outcome, Round, StoreOffer
from supervisor.node_health.contract import ProbeContext
from supervisor.wire.peers import own_users, peer_uid, user_name


class LauncherSocket:
    """The agent's socket, where the launcher's rendezvous handler asks what to do (docs/node-files.md, "Agent socket").

    A launcher has at most one question open: `join` (it waits in rendezvous) or `wait` (its workers run). The question
    is kept until the agent answers it. A launcher asks again when the agent was restarted, so nothing is lost. Keeps
    `state.offer` and `state.watching`.
    """

    def __init__(self, state: AgentState, release_gpus: Callable[[float, str], Awaitable[dict[str, Any]]]) -> None:
        """`release_gpus`: lets go of the GPUs for so many seconds, at this user's request.

        (`unbroken check --release-gpus`)
        """
        self._state = state
        self._release_gpus = release_gpus
        self._question: tuple[str, asyncio.Future[dict[str, Any]]] | None = None

    async def serve(self, path: Path) -> asyncio.Server:
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._talk, path=str(path), limit=1 << 16)
        os.chmod(path, 0o600)
        return server

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = peer_uid(writer.get_extra_info("socket"))
        if uid is None or uid not in own_users():
            writer.close()
            return
        answer: asyncio.Future[dict[str, Any]] | None = None
        line_to_come = asyncio.ensure_future(reader.readline())
        try:
            while line := await line_to_come:
                answer = self._open(msgspec.json.decode(line, type=dict[str, Any]), uid)
                line_to_come = asyncio.ensure_future(reader.readline())
                either: set[asyncio.Future[Any]] = {answer, line_to_come}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():  # else it hung up or asks again, and the old question is void
                    writer.write(msgspec.json.encode(answer.result()) + b"\n")
                    await writer.drain()
        except (OSError, ValueError, KeyError, TypeError, msgspec.DecodeError):
            pass  # the client is gone, or what it sends cannot be read
        finally:
            line_to_come.cancel()
            self._close(answer)
            writer.close()

    def _open(self, request: dict[str, Any], uid: int) -> asyncio.Future[dict[str, Any]]:
        op = str(request["op"])
        if op == "release_gpus":  # an operator asks, not a launcher
            return asyncio.ensure_future(self._release_gpus(float(request["seconds"]), user_name(uid)))
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if op == "join":
            self._state.offer = StoreOffer(
                host=str(request.get("store_host", "")),
                port=int(request["store_port"]),
                local_world_size=int(request["local_world_size"]),
            )
            self._state.watching = None
        elif op == "wait":
            self._state.watching = int(request["attempt"])
            self._state.offer = None
        else:
            raise ValueError(f"unknown request {op!r}")
        self._question = (op, answer)
        self._state.wakeup.set()
        return answer

    def _close(self, answer: asyncio.Future[dict[str, Any]] | None) -> None:
        if self._question is not None and self._question[1] is answer:
            self._clear()
            self._state.wakeup.set()

    def _clear(self) -> None:
        self._question = None
        self._state.offer = None
        self._state.watching = None

    def answer(self, op: str, **body: object) -> bool:
        """Answer the open question; False when this one is not open.

        `join`: the waiting launcher starts the workers of an attempt (`attempt`, `rank`, `nodes`, `store_host`,
        `store_port`), or ends with code 0 (`leave`). `wait`: the launcher looks at its workers, or restarts them
        (`order`).
        """
        if self._question is None or self._question[0] != op or self._question[1].done():
            return False
        answer = self._question[1]
        self._clear()
        answer.set_result(body)
        return True


def _changes_what_is_newest(step: Preparation) -> bool:
    """Others than before are among the newest then, and only the newest are reported."""
    return isinstance(step, PutBack) or (isinstance(step, SetAside) and step.why.startswith(ROLLED_BACK))


WRITE_S = 5.0
AGAIN_S = 60.0
"""A request that could not be written is tried again after so long."""


class DrainRequests:
    """Writes the job's request to drain this node to where root's programs read it (`recovery.cordon`), as the
    newest assignment wants it.

    For jobs of users who may not drain nodes themselves. The request is removed when the node is uncordoned before it
    was read.
    """

    def __init__(self, state: AgentState, folder: str) -> None:
        """`folder`: the site's, for requests."""
        self._state = state
        self._node = state.plan.scheduler_node or state.plan.node
        self._job = state.plan.spec.scheduler_job
        self._path = Path(folder) / request_file(self._job, os.getuid())
        self._file = BlockingCalls("drain request")
        self._again_at = 0.0

    def follow(self, reason: str) -> None:
        """`reason`: empty, or one that root's programs would not take, stands for no request."""
        reason = reason if may_be_asked(reason, self._job) else ""
        busy = self._state.work.is_running("drain request")
        if reason == self._state.saved.drain_request or busy or not self._job or time.monotonic() < self._again_at:
            return
        self._state.work.start("drain request", self._update(reason))

    async def _update(self, reason: str) -> None:
        try:
            await self._file.run(lambda: self._write(reason), WRITE_S)
        except (OSError, asyncio.TimeoutError) as error:
            self._again_at = time.monotonic() + AGAIN_S
            why = error.strerror if isinstance(error, OSError) and error.strerror else "it takes too long"
            self._state.notices.report(
                f"{self._node}: the request to drain it cannot be written to {self._path.parent} ({why}): "
                "other jobs may still get this node"
            )
            return
        self._state.saved.drain_request = reason
        if reason:
            self._state.notices.report(f"{self._node}: root's programs are asked to drain it ({self._path})")

    def _write(self, reason: str) -> None:
        if not reason:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            return
        boot_id = ProbeContext().boot_id
        request = DrainRequest(
            job=self._job, node=self._node, reason=clean_reason(reason), boot_id=boot_id, at=round(time.time(), 3)
        )
        write_atomically(self._path, msgspec.json.encode(request), 0o600)


FIRST_LAUNCH_DELAY_S, LONGEST_LAUNCH_DELAY_S = 3.0, 30.0
"""Between launchers that end before they start any rank: the controller may end the run as soon as it knows."""
PREPARE_NOTICE_S = 30.0
"""After so long the user is told that bad checkpoints are still being moved."""
RESUME_CHECK_S = 30.0
ATTEMPTS_KEPT = 20
"""The local folder keeps the output of so many attempts."""

log = logging.getLogger("unbroken.agent")


class ActionRunner:
    """`run` carries out one action."""

    def __init__(
        self,
        state: AgentState,
        keeper: KeeperClient,
        launcher: LauncherSocket,
        evidence: EvidenceCollector,
        checkpoints: CheckpointMonitor,
        mover: MoverRunner,
        tracer: Tracer,
        tester: NodeTester,
    ) -> None:
        self._state = state
        self._mover = mover
        self._tracer, self._tester = tracer, tester
        self._plan = state.plan
        self._keeper = keeper
        self._launcher = launcher
        self._evidence = evidence
        self._checkpoints = checkpoints
        self._shown: deque[str] = deque(maxlen=64)
        """Lines about preparations that the user has seen."""
        self._launches = 0
        """How many launchers were started since the newest ranks."""
        self._launched_after = -1
        """The newest attempt that had ranks when a launcher was started last."""
        self._launch_at = 0.0

    async def run(self, action: NodeAction, assignment: Assignment) -> None:
        """Raises KeeperError when the keeper does not do it."""
        match action:
            case Launch():
                await self._launch(assignment.gpus)
            case KillWorkers(attempt=attempt):
                await self._keeper.request(op="kill", attempt=attempt)
            case Prepare(attempt=attempt):
                self._state.work.start("prepare", self._prepare(assignment, attempt))
            case Join(round=formed, rank=rank):
                await self._join(assignment, rank)
                log.info("attempt %d: this node is %d of %d", formed.attempt, rank, formed.size)
            case AnswerLauncher(answer=answer):
                self._launcher.answer("wait", order=answer)
            case EndLauncher():
                self._launcher.answer("join", leave=True)
            case Stop(signal=name, grace_s=grace_s):
                self._state.work.start("stop", self._stop(name, grace_s))
            case WakeRanks(ranks=ranks, number=number):
                self._state.saved.woken = number
                await self._keeper.request(op="signal", signal=int(signal.SIGCONT), ranks=list(ranks))
            case AskRanks(signal=name, number=number):
                self._state.saved.asked = number
                await self._ask_ranks(name)
            case Collect():
                assert assignment.evidence is not None
                self._state.saved.collected = assignment.evidence.number
                self._state.work.start(
                    f"evidence {assignment.evidence.number}", self._evidence.collect_requested(assignment.evidence)
                )
            case MakeTrace():
                assert assignment.trace is not None
                self._state.saved.traced = assignment.trace.number
                self._state.work.start(
                    f"trace {assignment.trace.number}", self._tracer.answer(assignment.trace), wakes=False
                )
            case Finished():
                self._finish(assignment)

    def end(self) -> None:
        """Only a last heartbeat is left to be sent."""
        if self._state.done_at is None:
            self._state.done_at = time.monotonic()

    def write_outcome(self, outcome: Outcome) -> bool:
        """For the front, which ends this node as soon as it finds an outcome."""
        paths = self._state.paths
        try:
            paths.write_surely(paths.outcome, msgspec.json.encode(outcome))
        except OSError as error:
            log.error("the outcome cannot be written (%s): trying again", error.strerror)
            return False
        return True

    @property
    def may_launch(self) -> bool:
        """Where launchers end before they start any rank, the pauses between them grow."""
        return self._state.newest_attempt != self._launched_after or time.monotonic() >= self._launch_at

    async def _launch(self, gpus: tuple[str, ...]) -> None:
        """`gpus`: for one process each, where one of the node's GPUs is left out."""
        newest = self._state.newest_attempt
        self._launches = self._launches + 1 if newest == self._launched_after else 1
        self._launched_after = newest
        self._launch_at = time.monotonic() + min(
            LONGEST_LAUNCH_DELAY_S, FIRST_LAUNCH_DELAY_S * 2.0 ** min(self._launches - 1, 10)
        )
        launcher = self._state.keeper.launcher if self._state.keeper is not None else None
        replaced = launcher.pid if launcher is not None and gpus != self._state.saved.gpus else 0
        env, argv = {**os.environ, **self._plan.launcher_env}, list(self._plan.launcher_argv)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            argv = with_processes(argv, self._plan.torchrun_options, len(gpus))
        await self._keeper.request(op="launch", argv=argv, env=env, cwd=self._plan.cwd)
        self._state.saved.gpus, self._state.replaced_launcher = gpus, replaced
        self._state.saved_file.write()

    async def _prepare(self, assignment: Assignment, attempt: int) -> None:
        """Scan once more, now that no rank can write: nothing torn is taken for a checkpoint.

        The controller gets what was found before it gets `prepared`; where that changes the plan, the job forms another
        attempt. Nothing is touched that this node does not know to be the job's, whatever the assignment says.
        """
        await self._tester.rest()
        back = tuple(step for step in assignment.prepare if isinstance(step, PutBack))
        if back and not await self._carry_out(back):  # the mover must see what comes back, and not fetch it
            return
        await self._checkpoints.scan_now()
        if self._mover.is_wanted:
            await self._mover.rest(attempt - 1)
            if assignment.tiers is not None and assignment.tiers.bring is not None:
                if not await self._bring(assignment.tiers.bring):
                    return  # the ranks of this node would start from another step than the others
                await self._checkpoints.scan_now()
            snapshots = assignment.tiers.snapshots if assignment.tiers is not None else None
            if snapshots is not None and snapshots.bring is not None:
                await self._mover.bring_snapshot(snapshots.bring)
        if not await self._carry_out(tuple(step for step in assignment.prepare if step not in back)):
            return
        self._state.prepare_error = ""
        self._state.saved.prepared = attempt

    async def _carry_out(self, steps: tuple[Preparation, ...]) -> bool:
        """False: it cannot be done, and the controller is told."""
        bounds = self._checkpoints.bounds()
        work = asyncio.create_task(asyncio.to_thread(prepare, steps, bounds))
        if not (await asyncio.wait({work}, timeout=PREPARE_NOTICE_S))[0]:
            self._state.notices.show(
                f"moving checkpoints has taken {PREPARE_NOTICE_S:.0f} s so far: is the file system answering?"
            )
        try:
            done = await work
        except (PreparationError, OSError, ValueError) as error:
            self._state.prepare_error = str(error) or repr(error)
            await asyncio.sleep(1.0)
            return False
        for line in done:
            if line not in self._shown:  # a sound checkpoint is found again before each attempt
                self._shown.append(line)
                self._state.notices.show(line)
        if bounds.placed:
            self._checkpoints.placed(bounds.placed)
        if bounds.placed or any(map(_changes_what_is_newest, steps)):
            await self._checkpoints.scan_now()
        return True

    async def _bring(self, wanted: BringBack) -> bool:
        """False: it is not here. The controller is told, chooses again, or asks again for the same."""
        reported_before = self._mover.has_reported(wanted)
        problem = await self._mover.bring(wanted)
        if problem and (reported_before or not self._mover.has_reported(wanted)):
            self._state.prepare_error = problem
        if problem:
            await asyncio.sleep(1.0)
        return not problem

    async def _join(self, assignment: Assignment, rank: int) -> None:
        formed, resume, attempt = assignment.round, assignment.resume, assignment.attempt
        assert formed is not None
        env = {
            "UNBROKEN_ATTEMPT": str(attempt),
            "UNBROKEN_JOB_DIR": self._plan.job_dir,
            # Also where there are none: a job that a rank of another job started has inherited that one's.
            FILES_VARIABLE: ":".join(self._plan.snapshot_files),
            CHOSEN_VARIABLE: "" if formed.snapshot is None else "{}:{}".format(*formed.snapshot),
        }
        args: list[str] = []
        skip = resume.skip_batches if resume is not None else 0
        if skip:
            env["UNBROKEN_SKIP_BATCHES"] = str(skip)
        if resume is not None and resume.path and await self._may_resume(resume.path, formed):
            env["UNBROKEN_RESUME_FROM"] = resume.path
            step = "" if resume.step is None else str(resume.step)
            if attempt > 1:
                args = [
                    word.replace("{resume_from}", resume.path)
                    .replace("{resume_step}", step)
                    .replace("{skip_batches}", str(skip))
                    for word in shlex.split(self._plan.settings.run.restart_args)
                ]
        await self._keeper.request(op="attempt", number=attempt, args=args, env=env)
        if attempt > ATTEMPTS_KEPT:  # their evidence is in the job folder
            old = self._state.paths.attempt(attempt - ATTEMPTS_KEPT)
            self._state.work.start("tidy", asyncio.to_thread(shutil.rmtree, old, ignore_errors=True))
        self._state.saved.joined, self._state.joined_at = attempt, time.monotonic()
        self._state.saved.joined_wall = self._state.joined_wall = time.time()
        self._state.saved_file.write()
        self._mover.attempt_starts()
        self._launcher.answer(
            "join",
            attempt=attempt,
            rank=rank,
            nodes=formed.size,
            store_host=formed.store_host,
            store_port=formed.store_port,
        )

    async def _may_resume(self, path: str, formed: Round) -> bool:
        check = asyncio.to_thread(self._checkpoints.why_no_resume, path, formed.size, formed.leader)
        try:
            async with timeout(RESUME_CHECK_S):
                why = await check
        except asyncio.TimeoutError:
            why = f"who wrote it was not found out within {RESUME_CHECK_S:.0f} s"
        if why:
            self._state.notices.show(f"the script does not resume from {path}: {why}")
        return not why

    async def _ask_ranks(self, name: str) -> None:
        """A signal that a rank does not handle would end it: only those that do get it."""
        number, keeper = int(getattr(signal, name, 0)), self._state.keeper
        workers = keeper.workers_of(keeper.newest_attempt) if keeper is not None and number else ()
        ready = [worker.rank for worker in workers if worker.alive and handles(worker.pid, number)]
        if ready:
            await self._keeper.request(op="signal", signal=number, ranks=ready, handled=True)
        if len(ready) < len(workers) or not workers:
            self._state.notices.report(
                f"{len(workers) - len(ready)} of {len(workers)} ranks do not handle {name}: they are not asked for a "
                "checkpoint (swap.signal), and the swap waits for the next one"
            )

    async def _stop(self, name: str, grace_s: float) -> None:
        number = int(getattr(signal, name, signal.SIGTERM))
        await self._keeper.request(op="stop", signal=number, grace_s=grace_s)
        await asyncio.sleep(grace_s + 1.0)  # one request in a grace period is enough

    def _finish(self, assignment: Assignment) -> None:
        if self._state.done_at is None:
            assert assignment.outcome is not None
            if not self._mover.may_end(succeeded=assignment.outcome.state == "succeeded"):
                return  # asked again with the next look
            if self.write_outcome(assignment.outcome):
                self.end()
                self._state.wakeup.set()
