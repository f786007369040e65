"""The agent of a node: watches its ranks, collects evidence, and brings the node to its assigned state.

It owns no process of the job and decides nothing about it: the keeper runs the processes, the controller's assignment
says what should run, and `reconcile` (pure) says what to do next. It may be killed at any moment; the next one
starts from the keeper's state and `agent.json`. Without a controller it changes nothing, but for what an orphan must do
(`OrphanHandler`).

`NodeAgent.run` is the whole of it: look, act, report, sleep.
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
from diagnosis.signals import Finding, RankSample, from_wait_status
from recovery.fewer_processes import NodeGpus, of_processes
from recovery.snapshot_choice import of_node
from recovery.tiers import NodeTiers
from supervisor.agent.actions import ActionRunner, DrainRequests, LauncherSocket
from supervisor.agent.checkpoints import CheckpointMonitor, is_utf8
from supervisor.agent.evidence import EvidenceCollector
from supervisor.agent.link import Link
from supervisor.agent.metrics import metrics_port
from supervisor.agent.mover import MoverRunner
from supervisor.agent.orphan import EXIT_NO_CONTROLLER, OrphanHandler
from supervisor.agent.prefetch import Prefetch, wanted
from supervisor.agent.procfs import ProcessIdentity
from supervisor.agent.ranks import RankMonitor
from supervisor.agent.reconcile import Collect, launcher_state, out_of_bounds, reconcile
from supervisor.agent.snapshots import SnapshotMonitor
from supervisor.agent.space import SpaceMonitor
from supervisor.agent.state import AgentState
from supervisor.agent.tester import NodeTester
from supervisor.agent.tracing import Tracer
from supervisor.config import NodePlan, load_site_or_default, read_plan, use_rules
from supervisor.errors import KeeperError
from supervisor.files import read_own
from supervisor.keeper_client import KeeperClient, KeeperState, WorkerProcess
from supervisor.logs import configure
from supervisor.messages import ControllerMessage, Heartbeat, Outcome, Refused, StoreOffer
from supervisor.node_health.contract import JobInfo
from supervisor.node_health.monitor import HealthMonitor
from supervisor.paths import LocalPaths

CLOCK_EVERY_S = 60.0
"""The clock's offset changes all the time. It is read once a minute: every change is sent to the probe workers."""


class JobMonitor:
    """`info` gives the newest state; it costs some microseconds."""

    def __init__(self, plan: NodePlan, checkpoints: CheckpointMonitor, link: Link) -> None:
        self._plan = plan
        self._checkpoints = checkpoints
        self._link = link
        self._clock = JobInfo()
        self._next_clock_at = 0.0
        self._info = JobInfo()
        self._made_of: tuple[object, ...] = ()
        """What `_info` was made of."""
        variables = {**os.environ, **plan.launcher_env}
        self._visible = variables.get("CUDA_VISIBLE_DEVICES", "")
        """The launcher's, which the ranks inherit. What a script sets for itself shows only in the GPUs' processes."""
        self._gpus: tuple[str, ...] = ()

    def info(self, workers: Sequence[WorkerProcess], on_probation: bool = False, gpus: tuple[str, ...] = ()) -> JobInfo:
        """`gpus`: with which the launcher was started, where one was left out."""
        now = time.monotonic()
        if now >= self._next_clock_at:
            self._clock = self._read_clock(now)
            self._next_clock_at = now + (CLOCK_EVERY_S if self._clock.clock_offset_s is not None else 5.0)
        made_of = (workers, self._clock, self._checkpoints.changes, self._checkpoints.folders, on_probation, gpus)
        if made_of != self._made_of:
            self._made_of, self._gpus = made_of, gpus
            self._info = msgspec.structs.replace(self._look(workers), on_probation=on_probation)
        return self._info

    def _look(self, workers: Sequence[WorkerProcess]) -> JobInfo:
        clock, visible = self._clock, ",".join(self._gpus) or self._visible
        alive = [worker for worker in workers if worker.alive]
        complete = [one for one in self._checkpoints.checkpoints if one.complete]
        newest = max(complete, key=lambda one: one.modified_at, default=None)
        return JobInfo(
            ranks={worker.pid: worker.rank for worker in alive},
            gpus_of_ranks={worker.rank: f"{visible}:{worker.local_rank}" for worker in alive},
            checkpoint_dirs=tuple(filter(is_utf8, map(str, self._checkpoints.folders))),
            checkpoint_bytes=newest.size_bytes if newest is not None else 0,
            folders=(self._plan.job_dir, self._plan.local_dir, self._plan.cwd),
            python=self._plan.python,
            clock_offset_s=clock.clock_offset_s,
            clock_error_s=clock.clock_error_s,
        )

    def _read_clock(self, now: float) -> JobInfo:
        best = self._link.clock.best(now)
        if best is None:
            return JobInfo()
        offset_s, error_s = best
        return JobInfo(clock_offset_s=round(offset_s, 4), clock_error_s=round(error_s, 4))


FINDINGS_SENT = 50


class HeartbeatBuilder:
    """`build` makes a heartbeat: the whole state of the node, as it is now."""

    def __init__(
        self,
        state: AgentState,
        link: Link,
        ranks: RankMonitor,
        checkpoints: CheckpointMonitor,
        health: HealthMonitor,
        snapshots: SnapshotMonitor,
        mover: MoverRunner,
        tester: NodeTester,
    ) -> None:
        self._state = state
        self._tester = tester
        self._link = link
        self._ranks = ranks
        self._checkpoints = checkpoints
        self._health = health
        self._snapshots = snapshots
        self._mover = mover
        self._sent_tiers = (-1, -1)
        self._incarnation = time.time_ns()
        self._seq = 0
        self._keeper_gone_since: float | None = time.monotonic()
        self._sent_checkpoints = (-1, -1)
        """Of the heartbeat before: how often the checkpoints had changed, and the number of the connection."""
        self._sent_inventory = (-1, -1)
        self._sent_snapshots = (0, -1)

    def build(self) -> Heartbeat:
        state, saved, assignment = self._state, self._state.saved, self._state.assignment
        self._seq += 1
        launcher, how = launcher_state(state, self._keeper_gone_s())
        if state.is_replaced and launcher in ("joining", "ended"):
            launcher, how = "starting", ""
        ended = state.keeper.launcher if launcher == "ended" and state.keeper is not None else None
        attempt = max(saved.joined, state.newest_attempt)
        new_checkpoints, new_inventory, new_snapshots = self._is_new()
        return Heartbeat(
            node=state.plan.node,
            incarnation=self._incarnation,
            seq=self._seq,
            epoch=assignment.epoch if assignment is not None else 0,
            version=assignment.version if assignment is not None else 0,
            attempt=attempt,
            launcher=launcher,
            launcher_exit=how,
            launcher_code=None if ended is None or ended.status is None else from_wait_status(ended.status)[0],
            keeper="absent" if state.keeper is None else "ready" if state.keeper.ready else "starting",
            offer=self._offer(),
            prepared=saved.prepared,
            prepare_error=state.prepare_error,
            ranks=self._samples(attempt),
            evidence=tuple(state.evidence.values()),
            findings=state.findings.oldest(FINDINGS_SENT),
            findings_from=saved.findings_from,
            checkpoints=self._checkpoints.checkpoints if new_checkpoints else None,
            checkpoint_folders=tuple(map(str, self._checkpoints.learned)) if new_checkpoints else None,
            snapshots=self._snapshots.held if new_snapshots else None,
            tiers=self._new_tiers(),
            stop_request=saved.stop_request,
            notices=state.notices.reported,
            inventory=self._health.inventory if new_inventory else None,
            space=state.space,
            done=state.done_at is not None,
            tests=self._tester.report,
            gpus=self._gpus() if state.plan.spec.fewer_processes else None,
        )

    def _gpus(self) -> NodeGpus:
        plan = self._state.plan
        return of_processes(plan.processes, {**os.environ, **plan.launcher_env}, self._health.check_states.gpus)

    def _is_new(self) -> tuple[bool, bool, bool]:
        """Whether checkpoints, inventory and snapshots go with this heartbeat: once for each change and connection."""
        checkpoints = (self._checkpoints.changes, self._link.connections)
        inventory = (self._health.inventory_version, self._link.connections)
        new_checkpoints = checkpoints != self._sent_checkpoints
        new_inventory = inventory != self._sent_inventory and bool(self._health.inventory)
        snapshots = (self._snapshots.changes, self._link.connections if self._snapshots.changes else -1)
        new_snapshots = snapshots != self._sent_snapshots
        self._sent_checkpoints, self._sent_inventory, self._sent_snapshots = checkpoints, inventory, snapshots
        return new_checkpoints, new_inventory, new_snapshots

    def _new_tiers(self) -> NodeTiers | None:
        """Once for each change and each connection."""
        tiers = (self._mover.changes, self._link.connections)
        if tiers == self._sent_tiers or self._mover.status is None:
            return None
        self._sent_tiers = tiers
        return self._mover.tiers

    def _keeper_gone_s(self) -> float:
        if self._state.keeper is not None:
            self._keeper_gone_since = None
            return 0.0
        if self._keeper_gone_since is None:
            self._keeper_gone_since = time.monotonic()
        return time.monotonic() - self._keeper_gone_since

    def _offer(self) -> StoreOffer | None:
        """The launcher's store, under the address by which other nodes reach this one, and what its ranks hold."""
        offer = self._state.offer
        if offer is None or self._state.is_replaced:
            return None
        host = offer.host or self._link.address or "127.0.0.1"
        self._snapshots.look()  # some may just have been brought
        return msgspec.structs.replace(offer, host=host, snapshots=of_node(self._snapshots.held))

    def _samples(self, attempt: int) -> tuple[RankSample, ...]:
        """The ranks of `attempt`. The end of a failed rank is held back until its evidence can go with it."""
        if self._ranks.attempt != attempt:
            return ()  # a launcher was let in, its ranks are still to come
        samples = self._ranks.samples()
        if not self._state.collecting_crash:
            return samples
        return tuple(msgspec.structs.replace(sample, exit=None) for sample in samples)


LOOK_EVERY_S = 0.5
LOOK_EVERY_CALM_S = 0.75
"""While the ranks make progress: what is shown of them is less than a second old. To wake up costs most of a look."""
LOOK_EVERY_AT_START_S = 0.1
"""Until the first sign of progress, so that the end of a recovery is seen when it comes."""
LOOK_EVERY_CLOSELY_S = 0.1
CLOSELY_S = 30.0
"""So long after a finding after which no further step is expected: whether there is one decides what is done."""
LOOK_EVERY_AWAITING_S = 0.25
"""While a node is to leave with the next checkpoint, or somebody watches the job."""
LOOK_EVERY_BACKLOG_S = 0.01
"""While much of the ranks' output waits to be read."""
KERNEL_PAUSE_S = 0.25
"""Between two reads of the kernel log that new lines cause; and so long lines that belong together may take."""
START_S = 30.0
"""So long an attempt counts as just started."""
HEARTBEAT_EVERY_S = 1.3
"""At the latest. One goes with most looks: the agent is awake then anyway."""
HEARTBEATS_APART_S = 0.5
LAST_HEARTBEAT_S = 2.0
"""A node that is done waits so long for the controller to receive its last heartbeat."""
STOP_GRACE_S = 5.0
"""Of ranks that are ended without a controller."""
FRONT_GONE = "FRONT_GONE"
GARBAGE = 20_000
"""Objects made before Python looks for reference cycles. There are next to none, and each search costs as much as a
look."""

log = logging.getLogger("unbroken.agent")


class NodeAgent:
    def __init__(self, plan: NodePlan) -> None:
        self._state = state = AgentState(plan)
        site, site_problem = load_site_or_default(plan.settings.run.site_file)
        rules_problem = use_rules(site, Path(plan.job_dir))

        # What it watches.
        self._front = FrontMonitor(plan, state.paths.front)
        self._keeper = KeeperClient(state.paths.keeper_socket)
        self._link = Link.for_plan(plan)
        self._ranks = RankMonitor(state.paths, rules.default(), state.saved.offsets)
        self._checkpoints = CheckpointMonitor(
            plan.spec.checkpoint_dirs, plan.cwd, local_dir=plan.local_dir, job_dir=plan.job_dir, node=plan.node
        )
        self._health = HealthMonitor(
            plan.node,
            state.paths.health,
            state.paths.probe_state,
            site=site.site,
            steps=self._ranks.steps,
            on_change=state.wakeup.set,
            shared_dir=state.paths.of_all_jobs,
            kernel_log=plan.settings.run.kernel_log,
        )
        self._snapshots = SnapshotMonitor(plan.snapshot_files)
        self._job = JobMonitor(plan, self._checkpoints, self._link)
        self._space = SpaceMonitor(state)

        # What it does.
        self._launcher = LauncherSocket(state, self._health.release_gpus)
        self._evidence = EvidenceCollector(state, self._ranks, self._health.current_findings)
        self._mover = MoverRunner(state, self._checkpoints)
        self._tracer = Tracer(state, self._ranks)
        self._tester = NodeTester(state, lambda: self._link.address)
        self._actions = ActionRunner(
            state,
            self._keeper,
            self._launcher,
            self._evidence,
            self._checkpoints,
            self._mover,
            self._tracer,
            self._tester,
        )
        self._orphan = OrphanHandler(state, self._link, self._ranks, self._keeper)
        self._drain_requests = DrainRequests(state, site.drain_requests)
        self._prefetch = Prefetch()
        self._nodes = 0
        """How many the newest round had."""

        # What it reports.
        self._heartbeat = HeartbeatBuilder(
            state, self._link, self._ranks, self._checkpoints, self._health, self._snapshots, self._mover, self._tester
        )
        self._metrics = metrics_port(plan, self._health, self._link, self._ranks, self._mover)
        state.notices.report(site_problem)
        state.notices.report(rules_problem)

        # When it wakes. Monotonic times.
        self._looked_at = self._next_look = self._last_heartbeat = 0.0
        self._look_reported_at = 0.0
        """When a heartbeat went with a look last: one for news tells nothing newer of the ranks."""
        self._kernel_read_at = float("-inf")
        """When lines of the kernel log came last, where they come by themselves."""
        self._kernel_timer: asyncio.TimerHandle | None = None
        self._close_until = 0.0
        """Until then it looks closely."""
        self._progressed = 0
        """The newest attempt that has shown progress."""
        self._handled: KeeperState | None = None
        """The keeper's state that was acted on last."""

    async def run(self) -> None:
        """Until the job has an outcome and nothing runs here any more."""
        server = await self._launcher.serve(self._state.paths.agent_socket)
        self._tracer.listen()
        followers = (
            self._keeper.watch(self._state.set_keeper),
            self._link.run(self._receive),
            self._health.run(),
            self._metrics.start(),
        )
        tasks = [asyncio.create_task(follower) for follower in followers]
        mover = asyncio.create_task(self._mover.run())
        self._follow_kernel_log()
        try:
            while not self._is_finished():
                for task in tasks:
                    if task.done():
                        task.result()  # a bug of ours: end, and be started again
                await self._turn()
                await self._state.wakeup.wait(self._next_turn_at() - time.monotonic())
            await self._metrics.stop()
        finally:
            server.close()
            self._leave_kernel_log()
            self._tracer.close()
            self._tester.follow(None)
            self._state.work.cancel()
            for task in (*tasks, mover):
                task.cancel()

    async def _turn(self) -> None:
        """Look, act, report."""
        now = time.monotonic()
        self._handle_keeper_state(now)
        if self._looked_at < now and self._must_look(now):
            self._look(now)
        self._handle_lost_controller(now)
        await self._act()
        self._report(now)
        self._read_ahead()

    # ----- when it wakes -----

    def _next_turn_at(self) -> float:
        return min(self._next_look, self._last_heartbeat + HEARTBEAT_EVERY_S)

    def _must_look(self, now: float) -> bool:
        return now >= self._next_look or (now >= self._looked_at + LOOK_EVERY_S and not self._is_calm(now))

    def _look_pause_s(self, now: float) -> float:
        """Seconds to the next look."""
        if now < self._close_until:
            return LOOK_EVERY_CLOSELY_S
        if self._progressed != self._ranks.attempt:
            return LOOK_EVERY_AT_START_S if now - self._state.joined_at < START_S else LOOK_EVERY_S
        if self._looks_closely(now) or now < self._link.watched_until:
            return LOOK_EVERY_AWAITING_S
        return LOOK_EVERY_CALM_S if self._is_calm(now) else LOOK_EVERY_S

    def _looks_closely(self, now: float) -> bool:
        """What is seen next decides what the job does."""
        assignment = self._state.assignment
        return now < self._close_until or (assignment is not None and assignment.save_awaited)

    def _is_calm(self, now: float) -> bool:
        """The attempt has made progress for some time, and the controller gets to know of it.

        Not sooner: the controller must see at which step the attempt began.
        """
        settled = self._progressed == self._ranks.attempt and now - self._state.joined_at > START_S
        return settled and self._link.connected and self._state.done_at is None

    def _is_finished(self) -> bool:
        done_at = self._state.done_at
        return done_at is not None and (self._link.ended or time.monotonic() - done_at > LAST_HEARTBEAT_S)

    # ----- what it watches -----

    def _receive(self, message: ControllerMessage) -> None:
        state, saved = self._state, self._state.saved
        if isinstance(message, Refused):
            state.notices.report(f"the controller refuses this node: {message.why}")
            return
        problem = out_of_bounds(message, state.plan.node)
        if not problem and message.gpus and not state.plan.spec.fewer_processes:
            problem = "it leaves a GPU out, and this node was started without --fewer-processes"
        if problem:
            state.notices.report(f"an assignment of the controller is ignored: {problem}")
            return
        held = state.assignment
        if held is not None and (message.epoch, message.version) < (held.epoch, held.version):
            return
        if message.epoch < saved.epoch or message == held:
            return  # the answer to most heartbeats: acting on it would cause a heartbeat for each
        state.assignment = message
        saved.epoch = message.epoch
        self._checkpoints.follow(message.checkpoint_folders)
        self._checkpoints.wait_for_save(message.save_awaited)
        self._checkpoints.leads = message.round is None or message.round.leader == state.plan.node
        self._drain_requests.follow(message.drain_request)
        self._evidence.acknowledge(message)
        state.findings.acknowledge(message.findings_seen)
        for number, text in message.notices:
            if number > saved.notice:
                saved.notice = number
                state.notices.show(text)
        state.wakeup.set()

    def _handle_keeper_state(self, now: float) -> None:
        """Act on a new state of the keeper.

        What ranks wrote last is read before their end is reported. Of a crash the evidence is collected.
        """
        keeper, before = self._state.keeper, self._handled
        if keeper is before:
            return
        self._handled = keeper
        if keeper is not None and keeper.newest_attempt:
            self._ranks.follow(keeper.newest_attempt, keeper.workers_of(keeper.newest_attempt))
        if keeper is None or _count_ended(keeper) != _count_ended(before):
            self._look(now)
        if keeper is not None and keeper.newest_attempt > self._state.saved.crash_attempt:
            attempt = keeper.newest_attempt
            if any(worker.status and not worker.stopped_by_us for worker in keeper.workers_of(attempt)):
                self._evidence.start_crash(attempt)

    def _look(self, now: float) -> None:
        """Look at everything once."""
        workers = self._state.keeper.workers if self._state.keeper is not None else ()
        backlog = self._look_at_ranks_and_node(workers)
        self._look_at_front()
        self._snapshots.look()
        self._low_priority_work(workers)
        self._tracer.watch_input(now)
        self._looked_at = now
        self._next_look = now + (LOOK_EVERY_BACKLOG_S if backlog else self._look_pause_s(now))

    def _look_at_ranks_and_node(self, workers: Sequence[WorkerProcess]) -> bool:
        """Whether much of the ranks' output still waits to be read. News of any kind is reported at once."""
        stopped = self._ranks.stopped
        found, backlog = self._ranks.look()
        news = self._ranks.stopped != stopped
        if self._progressed != self._ranks.attempt and self._ranks.shows_progress:
            self._progressed, news = self._ranks.attempt, True
        found.extend(self._read_kernel_log(workers))
        found.extend(self._health.take())
        self._report_findings(found)
        if news:
            self._state.wakeup.set()
        return backlog

    def _report_findings(self, found: Sequence[Finding]) -> None:
        self._state.findings.add(found)
        if any(one.outlook == "fails" for one in found):
            self._close_until = time.monotonic() + CLOSELY_S
            self._next_look = 0.0
        if found:
            self._state.wakeup.set()

    def _read_kernel_log(self, workers: Sequence[WorkerProcess]) -> list[Finding]:
        now = time.monotonic()
        found = self._health.kernel_log.findings(workers, more_may_come=now < self._kernel_read_at + KERNEL_PAUSE_S)
        self._evidence.note_findings(found)  # the verdict scans the end of the ranks' output itself
        return found

    def _follow_kernel_log(self) -> None:
        """Read the next lines of /dev/kmsg when they come, not with the next look."""
        descriptor = self._health.kernel_log.descriptor
        if descriptor is not None:
            asyncio.get_running_loop().add_reader(descriptor, self._kernel_log_grew, descriptor)

    def _kernel_log_grew(self, descriptor: int) -> None:
        """A storm of lines costs four looks a second at most."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(descriptor)
        self._kernel_read_at = time.monotonic()
        keeper = self._state.keeper
        self._report_findings(self._read_kernel_log(keeper.workers if keeper is not None else ()))
        self._kernel_timer = loop.call_later(KERNEL_PAUSE_S, self._follow_kernel_log)

    def _leave_kernel_log(self) -> None:
        descriptor = self._health.kernel_log.descriptor
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
        if self._kernel_timer is not None:
            self._kernel_timer.cancel()

    def _look_at_front(self) -> None:
        request = self._front.stop_request()
        if request is None:
            return
        if request != self._state.saved.stop_request:
            self._state.saved.stop_request = request
            self._state.wakeup.set()
        if request == FRONT_GONE:
            self._actions.end()  # the keeper died with it: report that, then end

    def _low_priority_work(self, workers: Sequence[WorkerProcess]) -> None:
        """Checkpoints, `health.json`, requests of the controller that take time, saved offsets: may lag by a second."""
        state, assignment = self._state, self._state.assignment
        written = self._ranks.written()
        self._checkpoints.update(
            {worker.pid: written.get(worker.pid, 0) for worker in workers if worker.alive},
            {worker.pid: worker.ended_at for worker in workers if worker.ended_at is not None},
        )
        state.written_folders = self._checkpoints.folders
        self._mover.follow()
        on_probation = assignment is not None and assignment.on_probation
        self._health.update(self._job.info(workers, on_probation, state.saved.gpus))
        self._space.follow(assignment.space if assignment is not None else None)
        if assignment is not None:
            self._drain_requests.follow(assignment.drain_request)
        self._metrics.update_target(self._link.address, self._link.connections)
        problems = (
            self._link.distrust,
            self._checkpoints.problem,
            self._mover.problem,
            self._evidence.problem,
            self._health.notice(),
            *self._checkpoints.left,
        )
        for problem in problems:
            state.notices.report(problem)
        state.saved.offsets = self._ranks.offsets()
        state.saved_file.write()

    # ----- what it does -----

    def _read_ahead(self) -> None:
        keeper, assignment = self._state.keeper, self._state.assignment
        if assignment is not None and assignment.round is not None:
            self._nodes = assignment.round.size
        path = wanted(assignment, keeper, self._checkpoints.checkpoints, self._progressed)
        ranks = [worker.rank for worker in keeper.workers_of(keeper.newest_attempt)] if path and keeper else ()
        self._prefetch.follow(path, ranks, self._nodes)

    def _handle_lost_controller(self, now: float) -> None:
        """Without a connection: see to what an orphan must do, and end the node where it says so."""
        outcome = self._orphan.look(now)
        held = self._state.assignment
        if outcome is None or (held is not None and held.outcome is not None):
            return
        if held is None:
            self._actions.write_outcome(Outcome(state="failed", exit_code=EXIT_NO_CONTROLLER, line=outcome.line))
            return
        # As if the controller had ended the job.
        self._state.assignment = msgspec.structs.replace(held, stage="stop", outcome=outcome, grace_s=STOP_GRACE_S)
        self._state.wakeup.set()

    async def _act(self) -> None:
        """Bring the node nearer to its assignment."""
        assignment = self._state.assignment
        if assignment is None:
            return
        self._tester.follow(assignment.tests)
        for action in reconcile(assignment, self._state, may_launch=self._actions.may_launch):
            if isinstance(action, Collect):
                self._look(time.monotonic())  # evidence has what the ranks have written until now
            try:
                await self._actions.run(action, assignment)
            except KeeperError as error:
                log.warning("%s: %s", type(action).__name__, error)

    # ----- what it reports -----

    def _report(self, now: float) -> None:
        """Send a heartbeat: at once when there are news, else with a look, or after a while."""
        state = self._state
        if state.keeper is not self._handled:
            return  # it changed meanwhile: handle that first, the wakeup is set
        apart_s = LOOK_EVERY_CLOSELY_S if self._looks_closely(now) else HEARTBEATS_APART_S
        if now < self._link.watched_until:
            apart_s = min(apart_s, LOOK_EVERY_AWAITING_S / 2)
        looked = self._looked_at >= now
        due = self._look_reported_at + apart_s if looked else self._last_heartbeat + HEARTBEAT_EVERY_S
        if state.wakeup.is_set or now >= due:
            state.wakeup.clear()
            self._link.post(self._heartbeat.build())
            self._last_heartbeat = now
            self._look_reported_at = now if looked else self._look_reported_at


class FrontMonitor:
    """The front (`unbroken run` on this node): is it there, and has it received a signal?"""

    def __init__(self, plan: NodePlan, file: Path) -> None:
        self._process = ProcessIdentity(plan.front_pid, plan.front_start_time)
        self._file = file
        self._read = (0, 0)
        """Inode and time of the file as it was read last."""

    def stop_request(self) -> str | None:
        """The signal that the front has received, or `FRONT_GONE`. None: nothing new is known."""
        try:
            if not self._process.is_there():
                return FRONT_GONE
            status = os.stat(self._file)
            version = (status.st_ino, status.st_mtime_ns)
            if version == self._read:
                return None
            request = str(msgspec.json.decode(read_own(self._file))["stop"])
        except (OSError, msgspec.DecodeError, KeyError, TypeError):  # it cannot be read now, or says nothing
            return None
        self._read = version
        return request


def _count_ended(keeper: KeeperState | None) -> int:
    return sum(worker.status is not None for worker in keeper.workers) if keeper is not None else 0


def main(argv: list[str]) -> int:
    """`python -m supervisor.agent.agent LOCAL_DIR`, started by the front."""
    paths = LocalPaths(argv[1])
    plan = read_plan(paths.plan)
    configure()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, lambda: None)  # the job's signals are the front's to handle
        code = 0
        try:
            agent = NodeAgent(plan)
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
