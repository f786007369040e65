"""The controller's loop: journals what happens, asks the job what to do about it, and sees that it is done.

One queue, one order: every event is on stable storage before the job sees it, and what the job wants done goes out at
once. While the journal cannot be written nothing new is decided but an operator's `stop` and `pause`, and nothing here
can ever stop a healthy run: agents without a controller keep training.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from recovery.schedulers import load_schedulers
from recovery.scheduling import Answer, LeavingNode, Scheduler
from supervisor import messages as m
from supervisor.blocking import BlockingCalls, timeout
from supervisor.controller.journal import (
    Entry,
    History,
    Journal,
    JournalWriter,
    RoundNames,
    Superseded,
    decided_entry,
    read_after,
    steps,
)
from supervisor.controller.listener import Connection
from supervisor.errors import CommandNotJournalled
from supervisor.job.advice import OnlineAdvice
from supervisor.notes import text_of
from supervisor.paths import Fence

if TYPE_CHECKING:
    from supervisor.controller.heartbeats import HeartbeatEvents
    from supervisor.controller.ledger_watch import LedgerWatch
    from supervisor.controller.memory_watch import MemoryWatch
    from supervisor.controller.notify import Notifier
    from supervisor.job.job import Job

WRITE_S = 5.0

log = logging.getLogger("unbroken.controller")


class FenceWriter:
    """`raise_to` is called with each assignment that goes out; nothing waits for the folder."""

    def __init__(self, job_dir: Path, epoch: int) -> None:
        self._job_dir = job_dir
        self._epoch = epoch
        self._attempt = 0
        self._folder = BlockingCalls("fence")
        self._task: asyncio.Task[None] | None = None

    def raise_to(self, attempt: int) -> None:
        if attempt > self._attempt:
            self._attempt = attempt
            self._task = asyncio.get_running_loop().create_task(self._write(Fence(epoch=self._epoch, attempt=attempt)))

    async def _write(self, fence: Fence) -> None:
        try:
            await self._folder.run(lambda: fence.write(self._job_dir), WRITE_S)
        except (OSError, asyncio.TimeoutError) as error:
            log.warning("the job folder's fence.json cannot be written: %r", error)


SPECS = 16
"""Different job specs that are told apart (a node with one more says so at each connection)."""


class KnownNodes:
    """Told of every event, replayed or new."""

    def __init__(self) -> None:
        self.replaying = True
        self.unheard: set[str] = set()
        """Nodes that an earlier controller knew, neither lost nor done, of which no heartbeat came to this one."""
        self.specs: list[m.JobSpec] = []
        self._ran: dict[str, int] = {}

    def note(self, event: m.AnyEvent) -> None:
        if isinstance(event, m.JobDefined):
            self.is_new(event.spec)
        elif isinstance(event, m.NodeJoined):
            if self.replaying:
                self.unheard.add(event.node)
        elif isinstance(event, m.WorkersStarted):
            self._ran[event.node] = event.attempt
        elif isinstance(event, m.NodeLost | m.NodesLost | m.NodeDone):
            for node in event.nodes if isinstance(event, m.NodesLost) else (event.node,):
                self.unheard.discard(node)
                self._ran.pop(node, None)

    def is_new(self, spec: m.JobSpec, spare: bool = False) -> bool:
        """Whether this spec is seen for the first time. The name is the first node's to give.

        A spare need not say how many spares there are.
        """
        replace = msgspec.structs.replace
        if spare and any(replace(spec, name=known.name, spares=known.spares) == known for known in self.specs):
            return False
        if any(replace(spec, name=known.name) == known for known in self.specs):
            return False
        self.specs = [*self.specs, spec][-SPECS:]
        return True

    def heard(self, heartbeat: m.Heartbeat, now: float) -> m.LauncherEnded | None:
        """What only this memory can tell of a heartbeat: its node ran workers, and now its keeper knows of none.

        It was started anew then (power cut, requeue); neither the agent nor the watch was there before.
        """
        self.unheard.discard(heartbeat.node)
        ran = self._ran.get(heartbeat.node, 0)
        if not ran or heartbeat.attempt != 0 or heartbeat.keeper not in ("starting", "ready"):
            return None
        del self._ran[heartbeat.node]
        return m.LauncherEnded(at=now, node=heartbeat.node, attempt=ran, how="its node was started anew", fresh=False)


class Clock:
    """Unix time that never runs backwards, over controller restarts neither."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._base = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        return self._base + time.monotonic()


class Timers:
    """`fire(name)` is called when a timer is due, at once for one that was due while there was no controller."""

    def __init__(self, now: Callable[[], float], fire: Callable[[str], None]) -> None:
        self._now = now
        self._fire = fire
        self._wanted: dict[str, float] = {}
        self._running: dict[str, asyncio.TimerHandle] = {}

    def want(self, action: m.SetTimer) -> None:
        """Take note; nothing runs yet."""
        if action.at is None:
            self._wanted.pop(action.timer, None)
        else:
            self._wanted[action.timer] = action.at

    def forget(self, timer: str) -> None:
        self._wanted.pop(timer, None)

    def arm(self, timer: str) -> None:
        """Let `timer` run as it is wanted now."""
        running = self._running.pop(timer, None)
        if running is not None:
            running.cancel()
        at = self._wanted.get(timer)
        if at is not None:
            delay_s = max(0.0, at - self._now())
            self._running[timer] = asyncio.get_running_loop().call_later(delay_s, self._due, timer)

    def arm_all(self) -> None:
        for timer in list(self._wanted):
            self.arm(timer)

    def stop(self) -> None:
        for handle in self._running.values():
            handle.cancel()
        self._running.clear()

    def _due(self, timer: str) -> None:
        del self._running[timer]
        self.forget(timer)
        self._fire(timer)


TICK_S = 0.25
ANSWER_S = 4.0
"""An operator's command is answered within this, done or not (the command line waits 5 s)."""
FIRST_S = 2.5
"""`stop` and `pause` wait so long for a journal of which nobody knows yet that it cannot be written (`STALL_S`)."""
WITHOUT_JOURNAL = ("stop", "pause")
"""Commands that are done while the journal cannot be written: they only ever keep things from being done."""
QUEUE_LIMIT, QUEUE_LIMIT_A_NODE = 20_000, 32
"""Events waiting for the journal, at least, and for each node; beyond this heartbeats are answered but not looked at:
they repeat themselves. A node that says `done` is always heard."""
CATCH_UP_S = 5.0
"""After the controller itself was stopped or its journal hung: agents get so long to be heard before one is missed."""
READERS_AT_ONCE = 2
"""Of the whole journal, for those who may only look: others of them wait. A command does not wait for them."""
WATCHED_S = 3.0
"""Somebody who has asked for the status looks at the job for so long."""
WATCHED_NODES = 64
"""In a larger job only the node that tells the step is asked for more heartbeats."""
UNHEARD_S = 120.0
"""A node that an earlier controller knew and this one never heard of is lost after this."""
UNHEARD_AFRESH_S = 20.0
"""The same when no healthy run can be hurt: the whole first node was started again and its ranks are gone, or what is
heard of the run is broken."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
TURN_S = 0.01
"""So long at most decisions are made before others have their turn."""
_ASSIGN = b'{"type":"assign","assignment":'
LONELY_S = 900.0
"""A controller that no agent ever came to ends after this."""


class _Posted(NamedTuple):
    event: m.AnyEvent
    done: asyncio.Future[list[m.Action]] | None


class ControlLoop:
    """Everything of the controller but the port: `run` ends with the outcome, or None when told to stop.

    `make_watch` is called once the job has been replayed (the watch starts with what the job remembers). `view` gives
    what the reading endpoints show; how things are shown is not this class's business. `life`: how often the scheduler
    has started the job again by now.
    """

    def __init__(
        self,
        job: Job,
        make_watch: Callable[[], HeartbeatEvents],
        journal: Journal,
        history: History,
        view: Callable[[str, ControlLoop], Callable[[], dict[str, object]]],
        unheard_s: float = UNHEARD_S,
        life: int = 0,
    ) -> None:
        self.job = job
        self.epoch = journal.epoch
        self.clock = Clock(history.last_at)
        self.connections: dict[str, Connection] = {}
        self.outcome: m.Outcome | None = None
        self.superseded = False
        self.lived_attempt = 0
        """The newest attempt that an earlier controller has told anybody of."""
        self.folded_attempt = 0
        """The newest one that we made of the same events up to there; with another one we would act on another past."""
        self._writer = JournalWriter(journal)
        self._known_nodes = KnownNodes()
        self._names = RoundNames()
        self._timers = Timers(self.clock.now, self._fire)
        self._view = view
        self.advice = OnlineAdvice()
        self._inbox: deque[_Posted] = deque()
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._assignments: dict[str, tuple[int, int, bytes]] = {}
        """Node -> epoch, version and text of its newest assignment."""
        self._readers = asyncio.Semaphore(READERS_AT_ONCE)
        self._executor = Executor(self.post, self.clock.now, lambda: job.spec, life=life)
        self.opinion_wanted: Callable[[m.OpinionWanted], None] = lambda _: None
        """The job wants a model's opinion (`supervisor.opinion`), which is posted as an event."""
        self._fence = FenceWriter(journal.job_dir, journal.epoch)
        self.ask_model: Callable[[str], str] = lambda _: "there is no model to ask"
        """Has a model asked about an incident (`supervisor.opinion`); why not, in words, or the empty string."""
        self.ledger: LedgerWatch | None = None
        """Where the ledger of all jobs is configured; set before `run`."""
        self.memory: MemoryWatch | None = None
        self.notifier: Notifier | None = None
        """Keeps past incidents; set before `run`."""
        self._watched_until = 0.0
        self._deaf_until = 0.0
        self._quiet_until = 0.0
        self._last_heard = time.monotonic()
        self._unheard_s = unheard_s
        self._began = time.monotonic()
        self._replay(history)
        self.watch = make_watch()

    def _replay(self, history: History) -> None:
        folded = 0
        for step in steps(history.records, history.problems):
            if isinstance(step.event, m.TimerFired):
                self._timers.forget(step.event.timer)
            if isinstance(step.event, m.JobRequeued):
                self.outcome = None
            told = (
                [one for one in step.decided.actions if isinstance(one, m.Assign)] if step.decided is not None else []
            )
            self.lived_attempt = max([self.lived_attempt, *(one.assignment.attempt for one in told)])
            for action in self._decide(step.event)[0]:
                if isinstance(action, m.Assign):
                    folded = max(folded, action.assignment.attempt)
                elif isinstance(action, m.SetTimer):
                    self._timers.want(action)
                elif isinstance(action, m.End):
                    self.outcome = action.outcome
            if told:
                self.folded_attempt = folded
            if isinstance(step.event, m.JournalDamaged):  # what was lost would be told of as another version's work
                self.lived_attempt = self.folded_attempt = folded = 0
                self.outcome = self.outcome if self.job.state in ENDED else None
        self._known_nodes.replaying = False
        for problem in history.problems[:50]:
            log.warning("journal: %s", problem)

    def begin_again(self, event: m.JobRequeued) -> None:
        """The scheduler has started the job again: it goes on with its history, however it ended. Before `run`."""
        self.outcome = None
        self.post(event)

    # ----- what comes in -----

    def hello(self, hello: m.Hello, connection: Connection) -> str:
        old = self.connections.get(hello.node)
        if old is not None and old.host != hello.host:
            return (
                f"node name {hello.node!r} is taken by an agent on {old.host}: give each node a --node-name of its own"
            )
        if old is not None and old.run and hello.run and old.run != hello.run:
            return (
                f"node {hello.node!r} is in this job already, by another `unbroken run` on {old.host}: end that "
                "one, or give this one a --node-name of its own"
            )
        connection.node, connection.host, connection.run = hello.node, hello.host, hello.run
        self.connections[hello.node] = connection
        if old is not None:
            old.close_soon()
        now = self.clock.now()
        if self._known_nodes.is_new(hello.spec, hello.spare):  # the job takes the first and remarks on others
            self.post(m.JobDefined(at=now, spec=hello.spec, node=hello.node))
        self.post(
            m.NodeJoined(
                at=now,
                node=hello.node,
                host=hello.host,
                address=hello.address,
                index=hello.index,
                spare=hello.spare,
                scheduler_node=hello.scheduler_node,
                domain=hello.domain,
                can_test=hello.can_test,
            )
        )
        log.info("agent of %s connected from %s", hello.node, connection.peer)
        return ""

    def heartbeat(self, heartbeat: m.Heartbeat, connection: Connection) -> None:
        self._last_heard = time.monotonic()
        reborn = self._known_nodes.heard(heartbeat, self.clock.now())
        if reborn is not None:
            self.post(reborn)
        limit = max(QUEUE_LIMIT, QUEUE_LIMIT_A_NODE * len(self.connections))
        if len(self._inbox) < limit or heartbeat.done:
            self._observe(lambda now: self.watch.observe(heartbeat, now), heartbeat)
        else:
            self._deaf_until = time.monotonic() + CATCH_UP_S
        epoch, version, text = self._assignments.get(heartbeat.node, (0, 0, b""))
        if text and (epoch, version) != (heartbeat.epoch, heartbeat.version):
            connection.send(text)  # it does not hold the newest yet; one that does need not hear it again
        if time.monotonic() < self._watched_until and self.watch.is_first(heartbeat.node, WATCHED_NODES):
            connection.tell_watched(WATCHED_S)

    def gone(self, connection: Connection) -> None:
        """Its socket closed. Nothing is concluded from that: silence is measured by the watch."""
        if self.connections.get(connection.node) is connection:
            del self.connections[connection.node]
            log.info("agent of %s disconnected", connection.node)

    # ----- what people and programs ask: each answer comes within seconds, and what it says was done, was done -----

    async def command(self, request: m.CommandRequest, by: str, uid: int | None, role: str = "") -> dict[str, object]:
        """Carry out an operator's command, or say what it would do, if that is asked or to be confirmed.

        `by`, `uid`, `role`: who gives it, as far as that is proven.
        Raises ValueError when it is refused, CommandNotJournalled when that is not known yet.
        """
        if request.dry_run:
            async with self._readers:
                return await self._dry_run(request.event(self.clock.now(), by, uid, role))
        if self.outcome is not None:
            raise ValueError(f"{request.command}: the job has ended already")
        if self.stall and request.command not in WITHOUT_JOURNAL:
            raise ValueError(
                f"the journal cannot be written ({self.stall}): until it can be, nothing is done but `stop` and `pause`"
            )
        if request.confirm:
            would = await self._dry_run(request.event(self.clock.now(), by, uid, role))
            asks = request.confirm == "always" or would["interrupts"] or would["drains"]
            if asks and not would["refused"]:
                return {**would, "confirm": True}
        command = request.event(self.clock.now(), by, uid, role)
        try:
            async with timeout(ANSWER_S):
                actions = await self._decided(command)
        except asyncio.TimeoutError:
            raise CommandNotJournalled(
                f"the command is not recorded yet: the journal did not accept it within {ANSWER_S:.0f} s"
            ) from None
        log.info("command %s %s by %s: %s", command.command, command.argument, command.by, command.reason)
        notes = [action for action in actions if isinstance(action, m.Note)]
        refused = [text_of(note) for note in notes if note.refused]
        if refused:
            raise ValueError("; ".join(refused))
        unknown = any(note.unknown_node for note in notes)
        return {"schema": 1, "ok": True, "notes": [text_of(note) for note in notes], "unknown_node": unknown}

    async def _decided(self, command: m.OperatorCommand) -> list[m.Action]:
        """What was decided, once the journal has the command; where it cannot be written, of some before that."""
        if not self.stall:
            self._observe(self.watch.before_command, "command")
            asked = self.submit(command)
            done, _ = await asyncio.wait({asked}, timeout=FIRST_S)
            if done or command.command not in WITHOUT_JOURNAL or not self.stall:
                return await asyncio.shield(asked)
        return await asyncio.shield(self.submit_without_journal(command))

    async def _dry_run(self, command: m.OperatorCommand) -> dict[str, object]:
        """What the command would do: by the journal, in a thread. A long one takes its time, and agents do not wait."""
        from supervisor.controller.report import dry_run

        try:
            return await asyncio.to_thread(dry_run, self.job_dir, command)
        except OSError as error:
            raise ValueError(f"the journal cannot be read: {error.strerror or error}") from None

    def ask(self, incident: str) -> dict[str, object]:
        """Have a model asked about an incident. Raises ValueError when there is no such incident, or no model."""
        incidents = self.view("incidents")()["incidents"]
        assert isinstance(incidents, list)
        if not any(one["id"] == incident for one in incidents):
            raise ValueError(f"there is no incident {incident}")
        problem = self.ask_model(incident)
        if problem:
            raise ValueError(problem)
        return {"schema": 1, "ok": True, "incident": incident}

    def view(self, name: str) -> Callable[[], dict[str, object]]:
        """Reads it now; what it gives makes the answer, in a thread."""
        if name == "status":
            self._watched_until = time.monotonic() + WATCHED_S
        return self._view(name, self)

    async def timeline(self, since: int) -> dict[str, object]:
        """The job's story after record `since`."""
        from supervisor.controller.report import timeline_rows  # only the few who ask pay for it

        def rows() -> list[dict[str, object]]:
            return [row for row in timeline_rows(read_after(self.job_dir, since)) if row["seq"] > since]

        async with self._readers:
            return {"schema": 1, "rows": await asyncio.to_thread(rows)}

    # ----- events -----

    @property
    def job_dir(self) -> Path:
        return self._writer.journal.job_dir

    def submit(self, event: m.AnyEvent) -> asyncio.Future[list[m.Action]]:
        """As `post`; the future gives what was decided."""
        done: asyncio.Future[list[m.Action]] = asyncio.get_running_loop().create_future()
        self._inbox.append(_Posted(event, done))
        self._wake.set()
        return done

    def submit_without_journal(self, command: m.OperatorCommand) -> asyncio.Future[list[m.Action]]:
        """As `submit`, for a `stop` or `pause` while the journal cannot be written: decided on ahead of all that waits.

        It is journalled before that, when there is room again. After a `stop` nothing waits for the journal any more.
        """
        done: asyncio.Future[list[m.Action]] = asyncio.get_running_loop().create_future()

        def decide(seq: int) -> list[Entry]:
            event = msgspec.structs.replace(command, at=self.clock.now(), unrecorded=self.stall)
            entries = [Entry("event", event.at, m.encode(event))]
            actions, error = self._decide(event)
            told = self._written(actions)
            if seq:
                entries.append(decided_entry(seq, event.at, told, error, self._names.fresh()))
            self._dispatch(actions, told)
            if not done.done():
                done.set_result(actions)
            return entries

        self._writer.ahead(decide)
        if command.command == "stop":
            self._writer.give_up()
        self._wake.set()
        return done

    def post(self, event: m.AnyEvent) -> None:
        """Queue an event: it is journalled, then decided on, after everything posted before it."""
        self._inbox.append(_Posted(event, None))
        self._wake.set()

    def stop(self) -> None:
        self._stop.set()

    @property
    def waiting(self) -> int:
        """Events that wait for the journal."""
        return len(self._inbox)

    @property
    def stall(self) -> str:
        """Why the journal cannot be written now; empty while all is well."""
        return self._writer.stall

    def _observe(self, look: Callable[[float], list[m.AnyEvent]], what: object) -> None:
        try:
            events = look(self.clock.now())
        except Exception:
            # One heartbeat that the watch cannot digest must not cost the others their controller.
            if time.monotonic() > self._quiet_until:
                self._quiet_until = time.monotonic() + 10.0  # it comes again every second
                log.exception("the watch failed on %.2000r", what)
            return
        for event in events:
            self.post(event)

    # ----- the loop -----

    async def run(self) -> m.Outcome | None:
        """Until the job has ended (its outcome), `stop` was called or a newer controller took over (None)."""
        if self.outcome is not None:
            return self.outcome
        self._timers.arm_all()
        self.post(m.ControllerStarted(at=self.clock.now(), epoch=self.epoch))
        tasks = [
            asyncio.create_task(coroutine)
            for coroutine in (
                self._work(),
                self._tick(),
                self._look_for_newer(),
                self._executor.watch_nodes(self._scheduler_nodes),
                self._stop.wait(),
            )
        ]
        beside = [one for one in (self.ledger, self.memory, self.notifier) if one is not None]
        watching = [asyncio.create_task(one.run()) for one in beside]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except Superseded as error:
            log.warning("%s: this controller ends", error)
            self.superseded = True
        finally:
            for task in (*tasks, *watching):
                task.cancel()
            self._timers.stop()
        await asyncio.gather(*(one.stop() for one in beside))
        await self._farewell()
        return self.outcome

    def _scheduler_nodes(self) -> tuple[str, ...]:
        return tuple(node.scheduler_name for node in self.job.nodes if node.present and node.scheduler_name)

    async def _work(self) -> None:
        while self.outcome is None:
            if self._writer.journal.is_large and not self._writer.given_up:
                await self._writer.write([], sync=False)  # what was decided on all that is in the journal
                self._writer.shrink_beside()
            if not self._inbox:
                await self._rest()
                continue
            batch = list(self._inbox)
            was = self._writer.stalled_for_s
            first = await self._writer.write(
                [Entry("event", posted.event.at, m.encode(posted.event)) for posted in batch]
            )
            if self._writer.stalled_for_s != was:
                self._deaf_until = time.monotonic() + CATCH_UP_S
                self.post(m.JournalStalled(at=self.clock.now(), seconds=round(self._writer.stalled_for_s, 1)))
            began = time.monotonic()
            for place, posted in enumerate(batch):
                self._inbox.popleft()
                actions, error = self._decide(posted.event)
                told = self._written(actions)
                if first and (actions or error):
                    names = self._names.fresh()
                    self._writer.later(decided_entry(first + place, posted.event.at, told, error, names))
                self._dispatch(actions, told)
                if posted.done is not None and not posted.done.done():
                    posted.done.set_result(actions)
                if time.monotonic() - began > TURN_S:
                    await asyncio.sleep(0)  # heartbeats are heard, and what was decided leaves
                    began = time.monotonic()
        await self._writer.write([], sync=True)

    async def _rest(self) -> None:
        """What can be done while nothing happens; then wait."""
        if self._writer.has_late:
            await self._writer.write([], sync=False)
        else:
            self._wake.clear()
            await self._wake.wait()

    def _decide(self, event: m.AnyEvent) -> tuple[list[m.Action], str]:
        """`Job.handle`, and how it failed. A job that fails on an event goes on without it: so does every replay."""
        self._known_nodes.note(event)
        try:
            return self.job.handle(event), ""
        except Exception as failure:
            log.exception("the job failed on %.2000r", event)
            return [], f"{type(failure).__name__}: {failure}"[:500]

    def _written(self, actions: Sequence[m.Action]) -> list[m.Action | msgspec.Raw]:
        """The actions as the journal has them: assignments are JSON, the same that the node is sent."""
        told: list[m.Action | msgspec.Raw] = []
        for action in actions:
            if isinstance(action, m.Assign):
                told.append(msgspec.Raw(_ASSIGN + m.encode(self._names.shorten(action.assignment)) + b"}"))
            else:
                told.append(action)
        return told

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - before > 2.0:
                # We were stopped or starved: everybody looks silent now, and nobody is.
                log.warning("the controller itself stood still for %.1f s", now - before - TICK_S)
                self._deaf_until = now + CATCH_UP_S
            if now >= self._deaf_until and (not self.stall or self._writer.given_up):
                self._observe(self.watch.tick, "tick")
                self._give_up_unheard(now - self._began)
            if not self._known_nodes.specs and now - self._last_heard > LONELY_S:
                log.warning("no agent connected within %.0f s: the controller ends", LONELY_S)
                return

    def _give_up_unheard(self, after_s: float) -> None:
        """The watch cannot miss what it never saw: nodes that went while there was no controller."""
        healthy = self.job.state == "RUNNING"  # as far as it is heard
        if after_s < (self._unheard_s if healthy else min(self._unheard_s, UNHEARD_AFRESH_S)):
            return
        unheard = tuple(sorted(self._known_nodes.unheard))
        if len(unheard) > 1:
            self.post(m.NodesLost(at=self.clock.now(), nodes=unheard, silent_s=after_s))
        elif unheard:
            self.post(m.NodeLost(at=self.clock.now(), node=unheard[0], silent_s=after_s))
        self._known_nodes.unheard.clear()

    async def _look_for_newer(self) -> None:
        """An idle controller finds out too that it was replaced. Raises Superseded."""
        while True:
            await asyncio.sleep(2.0)
            try:
                newer = await self._writer.newest_epoch()
            except OSError as error:
                log.warning("the job folder cannot be read: %s", error)
                continue
            if newer > self.epoch:
                raise Superseded(self.epoch, newer)

    async def _farewell(self) -> None:
        """Let what was sent last leave, at most half a second."""
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and not all(link.drained for link in self.connections.values()):
            await asyncio.sleep(0.01)

    # ----- what goes out -----

    def _dispatch(self, actions: Sequence[m.Action], told: Sequence[m.Action | msgspec.Raw]) -> None:
        """`told`: the same as `_written` gives them."""
        for action, written in zip(actions, told, strict=True):
            if isinstance(action, m.Assign):
                assert isinstance(written, msgspec.Raw)
                self._assign(action.assignment, bytes(written)[len(_ASSIGN) : -1])
            elif isinstance(action, m.SetTimer):
                self._timers.want(action)
                self._timers.arm(action.timer)
            elif isinstance(action, m.Note):
                log.info("%s", text_of(action), extra={"repeat_kind": action.kind})
                if action.loud and self.notifier is not None:
                    self.notifier.add(action)
            elif isinstance(action, (m.SchedulerRequest, m.SchedulerComment)):
                self._executor.start(action)
            elif isinstance(action, m.LedgerWrite):
                if self.ledger is not None:
                    self.ledger.write(action)
            elif isinstance(action, m.OpinionWanted):
                self.opinion_wanted(action)
            else:
                assert isinstance(action, m.End)
                self.outcome = action.outcome
                if self.notifier is not None:
                    self.notifier.add_end(action.outcome)

    def _assign(self, assignment: m.Assignment, message: bytes) -> None:
        node = assignment.node
        self._fence.raise_to(assignment.attempt)
        self._assignments[node] = (assignment.epoch, assignment.version, message)
        connection = self.connections.get(node)
        if connection is not None:
            connection.send(message)

    def _fire(self, timer: str) -> None:
        self.post(m.TimerFired(at=self.clock.now(), timer=timer))


REQUEST_S = 60.0
"""For one request; a scheduler has deadlines of its own, a plug-in may not."""
_AGAIN = ("does not start", "starts")
NODES_EVERY_S = 60.0
WAITING_LIMIT = 1000
"""Requests under way at a time; one too many is answered `unavailable`, and given again by the job."""


class Executor:
    """Asks the scheduler. Requests are carried out one after the other, as they were given.

    Their answers come back as events. Nothing in the controller waits for one, and no failure here ends it.
    """

    def __init__(
        self,
        post: Callable[[m.AnyEvent], None],
        now: Callable[[], float],
        spec: Callable[[], m.JobSpec],
        schedulers: Mapping[str, Scheduler] | None = None,
        life: int = 0,
        request_s: float = REQUEST_S,
    ) -> None:
        """`spec`: the job's, which names its scheduler and its id there. `schedulers` None: all that are known.
        `life`: how often the scheduler has started the job again by now."""
        self._post = post
        self._now = now
        self._spec = spec
        self._schedulers = schedulers
        self._life = life
        self._request_s = request_s
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turn: asyncio.Lock | None = None
        self._comment: m.SchedulerComment | None = None
        """The newest that has not been made."""
        self._commenting: asyncio.Task[None] | None = None

    def start(self, action: m.SchedulerRequest | m.SchedulerComment) -> None:
        if isinstance(action, m.SchedulerComment):
            self._comment = action
            if self._commenting is None or self._commenting.done():
                self._commenting = asyncio.get_running_loop().create_task(self._make_comment())
        elif action.kind == "requeue" and self._life > self._spec().requeues:
            log.info("request %d has been carried out: it is why this process is here", action.number)
        elif action.number in self._tasks:
            log.info("request %d is under way", action.number)
        elif len(self._tasks) >= WAITING_LIMIT:
            self._post_answer(action, Answer(outcome="unavailable", text="too many requests are waiting"))
        else:
            task = asyncio.get_running_loop().create_task(self._carry_out(action))
            self._tasks[action.number] = task
            task.add_done_callback(lambda _: self._tasks.pop(action.number, None))

    async def watch_nodes(self, nodes: Callable[[], tuple[str, ...]]) -> None:
        """Each minute: which of these nodes, the job's, the scheduler takes out of service. A change is an event."""
        before: tuple[LeavingNode, ...] | None = None  # what another controller saw may be over
        while True:
            await asyncio.sleep(NODES_EVERY_S)
            spec = self._spec()
            scheduler = self._scheduler() if spec.scheduler_job and spec.swap_mode != "off" else None
            if scheduler is None or not hasattr(scheduler, "leaving"):
                continue
            try:
                async with timeout(self._request_s):
                    found = await scheduler.leaving(self._spec().scheduler_job, nodes())
            except asyncio.TimeoutError:
                continue
            except Exception:  # a plug-in's bug is told and costs nothing else
                log.exception("the scheduler")
                continue
            if found is not None and found != before:
                before = found
                self._post(m.NodesLeaving(at=self._now(), nodes=found))

    def _scheduler(self) -> Scheduler | None:
        """The job's; None: there is none of that name."""
        if self._schedulers is None:
            self._schedulers, problems = load_schedulers()
            for problem in problems:
                log.warning("%s", problem)
        return self._schedulers.get(self._spec().scheduler)

    async def _carry_out(self, request: m.SchedulerRequest) -> None:
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            answer = await self._ask(request)
        self._post_answer(request, answer)

    async def _make_comment(self) -> None:
        """The newest one; requests do not wait for it. What stands between is not missed."""
        while self._comment is not None:
            comment, self._comment = self._comment, None
            answer = await self._ask(comment)
            log.info("comment: %s: %s", answer.outcome, answer.text)

    async def _ask(self, action: m.SchedulerRequest | m.SchedulerComment) -> Answer:
        """What the job's scheduler answers, or why it does not."""
        try:
            async with timeout(self._request_s):
                scheduler, spec = self._scheduler(), self._spec()
                job = spec.scheduler_job
                if scheduler is None:
                    return Answer(outcome="unsupported", text=f"there is no scheduler {spec.scheduler!r}")
                if isinstance(action, m.SchedulerComment):
                    return await scheduler.comment(job, action.text)
                if action.kind == "drain":
                    return await scheduler.drain(action.node, action.reason)
                if action.kind == "undrain":
                    return await scheduler.undrain(action.node, job or spec.name)
                if action.kind == "cancel":
                    return await scheduler.cancel(job)
                if action.kind == "look":
                    again = await scheduler.starts_again(job, spec.requeues)
                    if again is None:
                        return Answer(outcome="unavailable", text="it does not say whether it starts the job again")
                    return Answer(outcome="done" if again else "failed", text=f"it {_AGAIN[again]} the job again")
                if action.kind == "end_step":
                    return await scheduler.end_step(job, action.avoid)
                return await scheduler.requeue(job, action.exclude, action.avoid)
        except asyncio.TimeoutError:
            return Answer(outcome="unavailable", text=f"no answer within {self._request_s:g} s")
        except Exception as error:  # a plug-in's bug is told and costs nothing else
            log.exception("the scheduler")
            return Answer(outcome="failed", text=f"{type(error).__name__}: {str(error)[:200]}")

    def _post_answer(self, request: m.SchedulerRequest, answer: Answer) -> None:
        what = f"{request.kind} {request.node}".strip()
        log.info("request %d (%s): %s: %s", request.number, what, answer.outcome, answer.text)
        self._post(
            m.SchedulerAnswered(at=self._now(), number=request.number, outcome=answer.outcome, text=answer.text[:500])
        )
