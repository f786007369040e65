"""The agent of a node: watches its ranks, collects evidence, and brings the node to its assigned state.

It owns no process of the job and decides nothing about it: what runs belongs to the keeper, what should run is said by
the controller's assignment, and `reconcile` (pure) gives the steps between. It may be killed at any moment; the next
one starts from the keeper's state and `agent.json`. Without a controller it changes nothing.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from diagnosis import rules
from supervisor.agent.actions import Deeds
from supervisor.agent.bell import Bell
from supervisor.agent.bounds import out_of_bounds
from supervisor.agent.checkpoints import CheckpointProbe
from supervisor.agent.collector import Collector
from supervisor.agent.drain_request import DrainRequests
from supervisor.agent.fence import Fencing
from supervisor.agent.heartbeat import Outgoing
from supervisor.agent.job_info import JobWatch
from supervisor.agent.launcher_socket import Desk
from supervisor.agent.link import Link
from supervisor.agent.metrics import agent_samples, metrics_port
from supervisor.agent.orphan import END_GRACE_S, Headless
from supervisor.agent.procfs import Lifeline
from supervisor.agent.rankwatch import RankWatch
from supervisor.agent.reconcile import NodeSituation, reconcile
from supervisor.agent.space import SpaceWatch
from supervisor.agent.state import NotebookFile
from supervisor.errors import KeeperError
from supervisor.files import read_own
from supervisor.keeper_client import Keeper, KeeperState, WorkerProcess
from supervisor.logs import configure
from supervisor.messages import Assignment, ControllerMessage, Outcome, Refused
from supervisor.node_health.kernel_log import KernelLog, KernelSight
from supervisor.node_health.monitor import Health
from supervisor.paths import LocalPaths, NodePlan
from supervisor.site import load_or_default, use_rules

LOOK_EVERY_S = 0.5
LOOK_CALM_S = 0.75
"""Once the ranks make progress: what is shown of them is less than a second old, and waking up costs most of a look."""
LOOK_AT_START_S = 0.1
"""Until the first sign of progress, so that the end of a recovery is seen when it comes."""
YOUNG_S = 30.0
HEARTBEAT_EVERY_S = 1.3
"""At the latest: one goes with each reading, for waking up costs more than what is done then."""
HEARTBEATS_APART_S = 0.5
GARBAGE = 20_000
"""Objects made before cycles are looked for: there are next to none, and each search costs as much as a look."""

EXIT_NO_CONTROLLER = 70
"""As where a part of ours cannot be started (`supervisor.run.front`)."""

log = logging.getLogger("unbroken.agent")


class Agent:
    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._paths = LocalPaths(plan.local_dir)
        self._notebook = NotebookFile(self._paths.agent_state)
        self._book = self._notebook.book
        self._changed = Bell()
        self._keeper = Keeper(self._paths.keeper_socket, self._on_change)
        self._desk = Desk(self._on_change)
        self._link = Link.for_plan(plan)
        site, site_problem = load_or_default(plan.site_file)
        rules_problem = use_rules(site, Path(plan.job_dir))
        self._rules = rules.default()
        self._ranks = RankWatch(self._paths, self._rules, self._book.offsets)
        self._kernel = KernelLog(plan.kernel_log, plan.node)
        self._checkpoints = CheckpointProbe(
            plan.spec.checkpoint_dirs, plan.cwd, local_dir=plan.local_dir, job_dir=plan.job_dir, node=plan.node
        )
        self._sight = KernelSight(site.tables)
        self._health = Health(
            plan.node,
            self._paths.health,
            self._paths.probe_state,
            site=site.site,
            steps=self._ranks.steps,
            on_change=self._on_change,
            shared_dir=self._paths.of_all_jobs,
        )
        self._desk.on_release = self._health.release_gpus
        self._job = JobWatch(plan, self._checkpoints, self._link)
        self._collector = Collector(
            plan,
            self._paths,
            self._ranks,
            self._keeper,
            self._on_change,
            written=lambda: self._checkpoints.folders,
            standing=self._health.standing,
            look=self._look,
        )
        self._space = SpaceWatch(plan.cwd, self._paths.folder, lambda: self._checkpoints.folders, self._on_change)
        self._out = Outgoing(
            plan,
            self._book,
            self._keeper,
            self._desk,
            self._ranks,
            self._collector,
            self._checkpoints,
            self._health,
            self._space,
        )
        self._deeds = Deeds(
            plan,
            self._notebook,
            self._keeper,
            self._desk,
            self._collector,
            self._checkpoints,
            self._out.say,
            self._on_change,
        )
        self._drain_requests = DrainRequests(plan, site.drain_requests, self._book, self._out.mention)
        self._metrics = metrics_port(plan, lambda: agent_samples(self._health, self._link, self._ranks))
        self._headless = self._without_a_controller()
        self._fencing = Fencing(Path(plan.job_dir), lambda: self._book.epoch, self._living_attempt, self._kill_old)
        self._assignment: Assignment | None = None
        self._progressed = 0
        self._followed: KeeperState | None = None
        self._searched: KeeperState | None = None
        """The keeper's state whose ranks are followed, and the one that was searched for a crash: it seldom changes."""
        self._front = Lifeline(plan.front_pid, plan.front_start_time)
        self._front_file = str(self._paths.front)
        self._front_read = (0, 0)
        """Inode and time of the front's file as it was read last."""
        self._out.mention(site_problem)
        self._out.mention(rules_problem)

    def _without_a_controller(self) -> Headless:
        return Headless(
            self._plan,
            lambda: self._link.connected,
            self._ranks.samples,
            self._out.say,
            allowed=lambda: self._assignment is not None and self._assignment.may_requeue,
            give_up=self._give_up,
            stopped_by=lambda: self._book.stop_request,
            end=self._end_alone,
            problem=lambda: self._link.problem,
        )

    # ----- what comes in -----

    def _on_change(self) -> None:
        self._changed.ring()

    def _on_message(self, message: ControllerMessage) -> None:
        if isinstance(message, Refused):
            self._out.mention(f"the controller refuses this node: {message.why}")
            return
        if problem := out_of_bounds(message, self._plan.node):
            self._out.mention(f"the controller is not obeyed: {problem}")
            return
        held = self._assignment
        if held is not None and (message.epoch, message.version) < (held.epoch, held.version):
            return
        if message.epoch < self._book.epoch or message == held:
            return  # the answer to most heartbeats: acting on it would make one heartbeat of each
        self._assignment = message
        self._book.epoch = message.epoch
        self._checkpoints.follow(message.checkpoint_folders)
        self._drain_requests.tend(message.drain_request)
        self._checkpoints.leads = message.round is None or message.round.nodes[:1] == (self._plan.node,)
        self._collector.acknowledge(message)
        self._out.acknowledge(message.findings_seen)
        for number, text in message.notices:
            if number > self._book.notice:
                self._book.notice = number
                self._out.say(text)
        self._changed.ring()

    def _give_up(self, why: str) -> None:
        """End this node; the front does, as soon as it finds an outcome."""
        outcome = Outcome(state="failed", exit_code=EXIT_NO_CONTROLLER, line=why)
        try:
            self._paths.write_surely(self._paths.outcome, msgspec.json.encode(outcome))
        except OSError as error:
            log.error("the outcome cannot be written (%s): trying again", error.strerror)

    def _end_alone(self, outcome: Outcome) -> None:
        """As if the controller that is gone had ended the job."""
        held = self._assignment
        if held is None:
            self._give_up(outcome.line)
            return
        self._assignment = msgspec.structs.replace(held, stage="stop", outcome=outcome, grace_s=END_GRACE_S)
        self._changed.ring()

    def _living_attempt(self) -> int:
        state = self._keeper.state
        return max((worker.attempt for worker in state.workers if worker.alive), default=0) if state is not None else 0

    async def _kill_old(self, attempt: int) -> None:
        try:
            await self._keeper.order(op="kill", attempt=attempt)
        except KeeperError as error:
            log.warning("%s", error)

    # ----- the loop -----

    async def run(self) -> None:
        """Until the job has an outcome and nothing runs here any more."""
        server = await self._desk.serve(self._paths.agent_socket)
        link, headless = self._link.run(self._on_message), self._headless.watch()
        works = (self._keeper.watch(), link, self._health.run(), self._metrics.start(), headless)
        tasks = [asyncio.create_task(work) for work in works]
        looked_at = next_look = last_beat = 0.0
        try:
            while True:
                for task in tasks:
                    if task.done():
                        task.result()  # a bug of ours: end, and be started again
                now = time.monotonic()
                looks = now >= next_look or (now >= looked_at + LOOK_EVERY_S and not self._calm(now))
                if looks:
                    unread, looked_at = self._look(), now
                    next_look = now + (0.01 if unread else self._look_interval(now))
                self._notice_ends()
                self._fencing.look(self._link.connected, now)
                await self._reconcile()
                if self._changed.rung or now >= last_beat + (HEARTBEATS_APART_S if looks else HEARTBEAT_EVERY_S):
                    self._changed.hush()
                    self._follow()
                    self._out.post(self._link, self._assignment, self._situation(), self._deeds)
                    last_beat = now
                done_at = self._deeds.done_at
                if done_at is not None and (self._link.ended or time.monotonic() - done_at > 2.0):
                    await self._metrics.stop()
                    return
                await self._changed.wait(min(next_look, last_beat + HEARTBEAT_EVERY_S) - time.monotonic())
        finally:
            server.close()
            self._deeds.cancel()
            for task in tasks:
                task.cancel()

    def _follow(self) -> None:
        state = self._keeper.state
        if state is None or state is self._followed:
            return
        self._followed = state
        attempt = state.newest_attempt
        if attempt:
            self._ranks.follow(attempt, state.workers_of(attempt))

    def _look(self) -> bool:
        """Look at everything once; whether much output still waits to be read."""
        more, workers = self._watch()
        self._keep_up(workers)
        self._notebook.write()
        return more

    def _watch(self) -> tuple[bool, Sequence[WorkerProcess]]:
        """Whether much of the ranks' output still waits to be read, and who they are. Rings for what is news."""
        self._follow()
        state = self._keeper.state
        stopped = self._ranks.stopped
        found, more = self._ranks.look()
        if self._ranks.stopped != stopped:
            self._changed.ring()
        workers = state.workers if state is not None else ()
        lines = self._health.attributed([*self._kernel.poll(time.time()), *self._health.heard()])
        found.extend(self._health.kernel(self._sight.findings(lines, workers)))
        self._collector.note_findings(found)
        found.extend(self._health.take())
        if found:
            self._out.note(found)
            self._changed.ring()
        self._read_front()
        return more, workers

    def _keep_up(self, workers: Sequence[WorkerProcess]) -> None:
        """What may come a second late."""
        written = self._ranks.written()
        self._checkpoints.scan(
            {worker.pid: written.get(worker.pid, 0) for worker in workers if worker.alive},
            {worker.pid: worker.ended_at for worker in workers if worker.ended_at is not None},
        )
        self._health.tend(self._job.view(workers))
        self._space.tend(self._assignment.space if self._assignment is not None else None)
        self._metrics.tell(self._link.address, self._link.connections)
        self._out.mention(self._link.distrust)
        if self._assignment is not None:
            self._drain_requests.tend(self._assignment.drain_request)
        for problem in (self._checkpoints.problem, self._collector.problem, self._health.unseen(self._kernel.problem)):
            self._out.mention(problem)
        for left in self._checkpoints.left:
            self._out.mention(left)
        self._book.offsets = self._ranks.offsets()

    def _calm(self, now: float) -> bool:
        """Whether to look less often: the attempt has shown progress, and for long enough (at which step it began must
        be seen), and the controller hears of it.
        """
        settled = self._progressed == self._ranks.attempt and now - self._deeds.joined_at > YOUNG_S
        return settled and self._link.connected and self._deeds.done_at is None

    def _look_interval(self, now: float) -> float:
        """Seconds to the next look."""
        if self._ranks.attempt != self._progressed:
            if not self._ranks.shows_progress:
                return LOOK_AT_START_S if now - self._deeds.joined_at < YOUNG_S else LOOK_EVERY_S
            self._progressed = self._ranks.attempt
            self._changed.ring()
        return LOOK_CALM_S if self._calm(now) else LOOK_EVERY_S

    def _read_front(self) -> None:
        try:
            gone = not self._front.holds()
        except OSError:  # nothing can be read just now: that is no news of the front
            return
        if gone:
            wanted = "FRONT_GONE"
        else:
            try:
                about = os.stat(self._front_file)
                if (about.st_ino, about.st_mtime_ns) == self._front_read:
                    return
                wanted = str(msgspec.json.decode(read_own(self._paths.front))["stop"])
            except (OSError, msgspec.DecodeError, KeyError, TypeError):
                return
            self._front_read = (about.st_ino, about.st_mtime_ns)
        if wanted != self._book.stop_request:
            self._book.stop_request = wanted
            self._changed.ring()
        if wanted == "FRONT_GONE":
            self._deeds.end()  # the keeper died with it: say so, then end

    def _notice_ends(self) -> None:
        """What ranks wrote last is read before their end is told; of a crash the evidence is collected."""
        state = self._keeper.state
        if state is self._searched:
            return
        before, self._searched = self._searched, state
        if state is None or _ended(state) != _ended(before):
            self._look()
        if state is None or state.newest_attempt <= self._book.crash_attempt:
            return
        attempt = state.newest_attempt
        if any(worker.status and not worker.stopped_by_us for worker in state.workers_of(attempt)):
            self._deeds.collect_crash(attempt)

    # ----- reconciling -----

    def _situation(self) -> NodeSituation:
        book, offer = self._book, self._desk.offer
        return NodeSituation(
            keeper=self._keeper.state,
            joining=offer is not None,
            store_port=offer.port if offer is not None else 0,
            watching=self._desk.watching,
            prepared=book.prepared,
            joined=book.joined,
            collected=book.collected,
            woken=book.woken,
            may_launch=self._deeds.may_launch,
        )

    async def _reconcile(self) -> None:
        assignment = self._assignment
        if assignment is None:
            return
        for step in reconcile(assignment, self._situation()):
            try:
                await self._deeds.take(step, assignment)
            except KeeperError as error:
                log.warning("%s: %s", type(step).__name__, error)


def _ended(state: KeeperState | None) -> int:
    return sum(worker.status is not None for worker in state.workers) if state is not None else 0


def main(argv: list[str]) -> int:
    """`python -m supervisor.agent.agent LOCAL_DIR`, started by the front."""
    paths = LocalPaths(argv[1])
    plan = msgspec.json.decode(read_own(paths.plan), type=NodePlan)
    configure()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, lambda: None)  # the job's signals are the front's to handle
        code = 0
        try:
            agent = Agent(plan)
            gc.collect()
            gc.freeze()
            gc.set_threshold(GARBAGE, 20, 100)
            await agent.run()
        except Exception:
            log.exception("the agent ends, to be started again")
            code = 1
        logging.shutdown()
        os._exit(code)  # a thread that hangs on a dead file system must not keep a dead agent

    asyncio.run(run())
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
