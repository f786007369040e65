"""The agent of a node: watches its ranks, collects evidence, and brings the node to its assigned state.

It owns no process and decides nothing about the job: what runs belongs to the keeper, what should run is said by the
controller's assignment, and `reconcile` (pure) gives the steps between. It may be killed at any moment; the next one
starts from the keeper's state and `agent.json`. Without a controller it changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

import msgspec

from diagnosis import rules
from diagnosis.signals import Finding, RankSample
from recovery.safekeeping import PreparationError, prepare
from supervisor.collector import Collector
from supervisor.deadline import timeout
from supervisor.desk import Desk
from supervisor.keeping import Keeper, KeeperError
from supervisor.link import Link
from supervisor.messages import Assignment, ControllerMessage, Heartbeat, Refused, StoreOffer
from supervisor.node import LocalPaths, NodePlan, start_time, write_atomically
from supervisor.notebook import NotebookFile
from supervisor.probes.checkpoints import CheckpointProbe
from supervisor.probes.kernel_log import KernelLog, kernel_findings
from supervisor.rankwatch import RankWatch
from supervisor.reconcile import (
    Collect,
    Finished,
    Join,
    KillWorkers,
    Launch,
    Leave,
    NodeSituation,
    Prepare,
    Release,
    Step,
    Stop,
    Wake,
    launcher_state,
    reconcile,
)

ATTEMPTS_KEPT = 20
"""Output of so many attempts stays in the local folder."""
LOOK_EVERY_S = 0.5
LOOK_AT_START_S = 0.1
"""Until the first sign of progress, so that the end of a recovery is seen when it comes."""
HEARTBEAT_EVERY_S = 1.0

log = logging.getLogger("unbroken.agent")


class Agent:
    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._paths = LocalPaths(plan.local_dir)
        self._notebook = NotebookFile(self._paths.agent_state)
        self._book = self._notebook.book
        self._changed = asyncio.Event()
        self._keeper = Keeper(self._paths.keeper_socket, self._on_change)
        self._desk = Desk(self._on_change)
        self._link = Link.for_plan(plan)
        self._rules = rules.default()
        self._ranks = RankWatch(self._paths, self._rules, self._book.offsets)
        self._kernel = KernelLog(plan.kernel_log, plan.node)
        self._checkpoints = CheckpointProbe(plan.spec.checkpoint_dirs, plan.cwd, plan.launcher_argv)
        self._collector = Collector(
            plan, self._paths, self._ranks, self._keeper, self._on_change, lambda: self._checkpoints.folders
        )
        self._assignment: Assignment | None = None
        self._incarnation = time.time_ns()
        self._seq = 0
        self._findings: list[Finding] = []
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._notices: list[str] = []
        self._prepare_error = ""
        self._keeper_gone_since: float | None = time.monotonic()
        self._sent_changes = (-1, -1)
        self._done_at: float | None = None
        self._joined_at = 0.0
        self._progressed = 0

    # ----- what comes in -----

    def _on_change(self) -> None:
        self._changed.set()

    def _on_message(self, message: ControllerMessage) -> None:
        if isinstance(message, Refused):
            self._mention(f"the controller refuses this node: {message.why}")
            return
        held = self._assignment
        if held is not None and (message.epoch, message.version) < (held.epoch, held.version):
            return
        if message.epoch < self._book.epoch or message == held:
            return  # the answer to most heartbeats: acting on it would make one heartbeat of each
        self._assignment = message
        self._book.epoch = message.epoch
        self._acknowledge(message)
        for number, text in message.notices:
            if number > self._book.notice:
                self._book.notice = number
                self._say(text)
        self._changed.set()

    def _acknowledge(self, assignment: Assignment) -> None:
        self._collector.acknowledge(assignment)
        seen = assignment.findings_seen - self._book.findings_from
        if seen > 0:
            del self._findings[:seen]
            self._book.findings_from = assignment.findings_seen

    def _say(self, text: str) -> None:
        """A line for the user's terminal."""
        try:
            with open(self._paths.notices, "a", encoding="utf-8") as file:
                file.write(text.replace("\n", " ") + "\n")
        except OSError as error:  # a full disk is no reason to end
            log.warning("not shown (%s): %s", error.strerror, text)

    def _mention(self, text: str) -> None:
        """Something the agent cannot do or see: told once, to the user and the controller."""
        if text and text not in self._notices:
            self._notices = [*self._notices, text][-16:]
            self._say(text)

    # ----- the loop -----

    async def run(self) -> None:
        """Until the job has an outcome and nothing runs here any more."""
        server = await self._desk.serve(self._paths.agent_socket)
        tasks = [asyncio.create_task(self._keeper.watch()), asyncio.create_task(self._link.run(self._on_message))]
        if self._kernel.problem:
            log.info(self._kernel.problem)
        next_look = next_beat = 0.0
        try:
            while True:
                for task in tasks:
                    if task.done():
                        task.result()  # a bug of ours: end, and be started again
                now = time.monotonic()
                more = False
                if now >= next_look:
                    more = self._look()
                    next_look = now + (0.01 if more else self._look_interval())
                self._notice_crash()
                await self._reconcile()
                if self._changed.is_set() or now >= next_beat:
                    self._changed.clear()
                    self._post()
                    next_beat = now + HEARTBEAT_EVERY_S
                if self._done_at is not None and (self._link.ended or time.monotonic() - self._done_at > 2.0):
                    return
                await self._wait_for_change(max(0.0, min(next_look, next_beat) - time.monotonic()))
        finally:
            server.close()
            for task in [*tasks, *self._busy.values()]:
                task.cancel()

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with timeout(seconds):
                await self._changed.wait()
        except asyncio.TimeoutError:
            pass

    def _look(self) -> bool:
        state = self._keeper.state
        if state is not None and state.newest_attempt:
            self._ranks.follow(state.newest_attempt, state.workers_of(state.newest_attempt))
        stopped = self._ranks.stopped
        found, more = self._ranks.look()
        if self._ranks.stopped != stopped:
            self._changed.set()
        workers = state.workers if state is not None else ()
        found.extend(kernel_findings(self._kernel.poll(time.time()), self._rules, workers))
        if found:
            self._findings = (self._findings + found)[-200:]
            self._collector.note_findings(found)
            self._changed.set()
        pids = [w.pid for w in state.workers if w.alive] if state is not None else []
        self._checkpoints.scan(pids)
        self._mention(self._checkpoints.problem)
        self._mention(self._collector.problem)
        self._read_front()
        self._book.offsets = self._ranks.offsets()
        self._notebook.write()
        return more

    def _look_interval(self) -> float:
        if self._ranks.attempt == self._progressed:
            return LOOK_EVERY_S
        if self._ranks.shows_progress:
            self._progressed = self._ranks.attempt
            self._changed.set()
            return LOOK_EVERY_S
        young = time.monotonic() - self._joined_at < 30.0
        return LOOK_AT_START_S if young else LOOK_EVERY_S

    def _read_front(self) -> None:
        try:
            gone = start_time(self._plan.front_pid) != self._plan.front_start_time
        except OSError:  # nothing can be read just now: that is no news of the front
            return
        if gone:
            wanted = "FRONT_GONE"
        else:
            try:
                wanted = str(msgspec.json.decode(self._paths.front.read_bytes())["stop"])
            except (OSError, msgspec.DecodeError, KeyError, TypeError):
                return
        if wanted != self._book.stop_request:
            self._book.stop_request = wanted
            self._changed.set()
        if wanted == "FRONT_GONE" and self._done_at is None:
            self._done_at = time.monotonic()  # the keeper died with it: say so, then end

    # ----- evidence -----

    def _notice_crash(self) -> None:
        state = self._keeper.state
        attempt = state.newest_attempt if state is not None else 0
        if state is None or attempt <= self._book.crash_attempt:
            return
        if any(worker.status and not worker.stopped_by_us for worker in state.workers_of(attempt)):
            self._book.crash_attempt = attempt
            self._look()
            self._start("crash", self._collector.crash(attempt))

    # ----- reconciling -----

    def _situation(self) -> NodeSituation:
        book = self._book
        return NodeSituation(
            keeper=self._keeper.state,
            joining=self._desk.offer is not None,
            watching=self._desk.watching,
            prepared=book.prepared,
            joined=book.joined,
            collected=book.collected,
            woken=book.woken,
        )

    async def _reconcile(self) -> None:
        assignment = self._assignment
        if assignment is None:
            return
        for step in reconcile(assignment, self._situation()):
            try:
                await self._take(step, assignment)
            except KeeperError as error:
                log.warning("%s: %s", type(step).__name__, error)

    async def _take(self, step: Step, assignment: Assignment) -> None:
        match step:
            case Launch():
                await self._launch()
            case KillWorkers(attempt=attempt):
                await self._keeper.order(op="kill", attempt=attempt)
            case Prepare(attempt=attempt):
                self._start("prepare", self._prepare(assignment, attempt))
            case Join(round=formed, rank=rank):
                await self._join(assignment, rank)
                log.info("attempt %d: this node is %d of %d", formed.attempt, rank, len(formed.nodes))
            case Release(order=order):
                self._desk.release(order)
            case Leave():
                self._desk.leave()
            case Stop(signal=name, grace_s=grace_s):
                self._start("stop", self._stop(name, grace_s))
            case Wake(ranks=ranks, number=number):
                self._book.woken = number
                await self._keeper.order(op="signal", signal=int(signal.SIGCONT), ranks=list(ranks))
            case Collect():
                assert assignment.evidence is not None
                self._book.collected = assignment.evidence.number
                self._start(f"evidence {assignment.evidence.number}", self._collector.requested(assignment.evidence))
            case Finished():
                self._finish(assignment)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the loop, unless the same work is under way."""
        running = self._busy.get(name)
        if running is not None and not running.done():
            work.close()
            return
        if running is not None and running.exception() is not None:
            log.error("%s failed", name, exc_info=running.exception())
        self._busy = {key: task for key, task in self._busy.items() if not task.done()}
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._changed.set())
        self._busy[name] = task

    async def _launch(self) -> None:
        env = {**os.environ, **self._plan.launcher_env}
        await self._keeper.order(op="launch", argv=list(self._plan.launcher_argv), env=env, cwd=self._plan.cwd)

    async def _prepare(self, assignment: Assignment, attempt: int) -> None:
        """No rank is left that could still write: look once more, so that nothing torn is taken for a checkpoint.

        What is found goes out before `prepared` does; where it changes the plan, the job forms another attempt.
        """
        await self._checkpoints.scan_now()
        try:
            done = await asyncio.to_thread(prepare, assignment.prepare)
        except (PreparationError, OSError, ValueError) as error:
            self._prepare_error = str(error) or repr(error)
            await asyncio.sleep(1.0)
            return
        for line in done:
            self._say(line)
        self._prepare_error = ""
        self._book.prepared = attempt

    async def _join(self, assignment: Assignment, rank: int) -> None:
        formed, resume, attempt = assignment.round, assignment.resume, assignment.attempt
        assert formed is not None
        env = {"UNBROKEN_ATTEMPT": str(attempt), "UNBROKEN_JOB_DIR": self._plan.job_dir}
        args: list[str] = []
        if resume is not None and resume.path:
            env["UNBROKEN_RESUME_FROM"] = resume.path
            step = "" if resume.step is None else str(resume.step)
            if attempt > 1:
                args = [
                    word.replace("{resume_from}", resume.path).replace("{resume_step}", step)
                    for word in self._plan.restart_args
                ]
        await self._keeper.order(op="attempt", number=attempt, args=args, env=env)
        if attempt > ATTEMPTS_KEPT:  # their evidence is in the job folder
            old = self._paths.attempt(attempt - ATTEMPTS_KEPT)
            self._start("tidy", asyncio.to_thread(shutil.rmtree, old, ignore_errors=True))
        self._book.joined, self._joined_at = attempt, time.monotonic()
        self._notebook.write()
        self._desk.join(
            attempt=attempt,
            rank=rank,
            nodes=len(formed.nodes),
            store_host=formed.store_host,
            store_port=formed.store_port,
        )

    async def _stop(self, name: str, grace_s: float) -> None:
        number = int(getattr(signal, name, signal.SIGTERM))
        await self._keeper.order(op="stop", signal=number, grace_s=grace_s)
        await asyncio.sleep(grace_s + 1.0)  # once in a grace period is enough

    def _finish(self, assignment: Assignment) -> None:
        if self._done_at is None:
            assert assignment.outcome is not None
            try:
                write_atomically(self._paths.outcome, msgspec.json.encode(assignment.outcome))
            except OSError as error:
                log.error("the outcome cannot be written (%s): trying again", error.strerror)
                return
            self._done_at = time.monotonic()
            self._changed.set()

    # ----- what goes out -----

    def _keeper_gone_s(self) -> float:
        if self._keeper.state is not None:
            self._keeper_gone_since = None
            return 0.0
        if self._keeper_gone_since is None:
            self._keeper_gone_since = time.monotonic()
        return time.monotonic() - self._keeper_gone_since

    def _offer(self) -> StoreOffer | None:
        """The launcher's store, under the address by which other nodes reach this one."""
        offer = self._desk.offer
        if offer is None or offer.host:
            return offer
        return msgspec.structs.replace(offer, host=self._link.address or "127.0.0.1")

    def _samples(self, attempt: int) -> tuple[RankSample, ...]:
        """The ranks of `attempt`; the end of one that failed is held back until its evidence can go with it."""
        if self._ranks.attempt != attempt:
            return ()  # a launcher was let in, its ranks are still to come
        samples = self._ranks.samples()
        crash = self._busy.get("crash")
        if crash is None or crash.done():
            return samples
        return tuple(msgspec.structs.replace(sample, exit=None) for sample in samples)

    def _post(self) -> None:
        state, assignment = self._keeper.state, self._assignment
        if state is not None and state.newest_attempt:
            self._ranks.follow(state.newest_attempt, state.workers_of(state.newest_attempt))
        self._seq += 1
        launcher, how = launcher_state(self._situation(), self._keeper_gone_s())
        changes = (self._checkpoints.changes, self._link.connections)
        fresh = changes != self._sent_changes
        attempt = max(self._book.joined, state.newest_attempt if state is not None else 0)
        self._sent_changes = changes
        self._link.post(
            Heartbeat(
                node=self._plan.node,
                incarnation=self._incarnation,
                seq=self._seq,
                epoch=assignment.epoch if assignment is not None else 0,
                version=assignment.version if assignment is not None else 0,
                attempt=attempt,
                launcher=launcher,
                launcher_exit=how,
                keeper="absent" if state is None else "ready" if state.ready else "starting",
                offer=self._offer(),
                prepared=self._book.prepared,
                prepare_error=self._prepare_error,
                ranks=self._samples(attempt),
                evidence=self._collector.pending,
                findings=tuple(self._findings[:50]),
                findings_from=self._book.findings_from,
                checkpoints=self._checkpoints.checkpoints if fresh else None,
                stop_request=self._book.stop_request,
                notices=tuple(self._notices),
                done=self._done_at is not None,
            )
        )


def main(argv: list[str]) -> int:
    """`python -m supervisor.agent LOCAL_DIR`, started by the front."""
    paths = LocalPaths(argv[1])
    plan = msgspec.json.decode(paths.plan.read_bytes(), type=NodePlan)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, lambda: None)  # the job's signals are the front's to handle
        code = 0
        try:
            await Agent(plan).run()
        except Exception:
            log.exception("the agent ends, to be started again")
            code = 1
        logging.shutdown()
        os._exit(code)  # a thread that hangs on a dead file system must not keep a dead agent

    asyncio.run(run())
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
