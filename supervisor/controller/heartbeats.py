"""Heartbeats in, events out: what changed, who has gone silent, and what the hang watch makes of it.

Pure: time is passed in. Nothing here is kept over a controller restart: the first heartbeats after one tell the whole
state again, and the job knows how to hear things twice.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from diagnosis.hang import watch as hang
from diagnosis.input_waits import InputWatch
from diagnosis.signals import LossAlarm, RankSample
from diagnosis.stragglers import StragglerWatch
from recovery.fewer_processes import NodeGpus
from recovery.snapshot_choice import RankSnapshot, ReplicaWatch
from recovery.tiers import NodeTiers
from supervisor import messages as m
from supervisor.node_diff import Difference, NodeDiffMonitor

QUIET_S = 3.0
"""More than two heartbeats: a node without workers that is silent for so long is the last to be given any."""
SILENT_S = 5.0
"""A node with workers, silent for this long while the ranks of the others make no progress, is lost."""
STILL_S = 10.0
"""Ranks of others that moved once after the silence began, and then stood still for so long, do not move on: they have
done what they could without it. Or for as long as makes a hang suspect, where that is longer, up to ..."""
STILL_LONGEST_S = 60.0
STILL_AT_START_S = 30.0
"""The same before a pace is known: everybody stands still then for a while."""
SILENT_ALONE_S = 30.0
"""The same when no other node of the attempt can tell: its agent may just be restarting."""
SILENT_UNSEEN_S = 120.0
"""The same when nobody at all is heard: more likely it is we who are cut off."""
TOGETHER_S = 1.25
"""More than the time between two heartbeats: nodes that fall silent at once are lost at once."""
SILENT_IDLE_S = 15.0
"""The same for a node without workers."""
STALL_S = 2.0
"""When `tick` itself came this late we were asleep, not the nodes: their silence is measured from now."""
PROGRESS_EVERY_S = 10.0
"""Steps are told so often; before whatever a step matters to, the newest is told first."""
NUMBERS_EVERY_S = 10.0
"""A loss that is a number now and none then is told at most so often."""
LOSS_CHANGES_S = 10.0
"""What is wrong with the loss, or that it is well again, changes at most so often."""
LOSS_AGAIN_S = 60.0
"""A loss that is wrong is told again after so long: the job may have been busy with something else."""
SNAPSHOT_EVERY_S = 5.0
"""Which snapshot all ranks have written is told at most so often, and only where snapshots are mirrored."""
CLOCK_SLACK_S = 2.0
"""More than the time between two heartbeats: what moved until the silence began does not move on in it."""
COMPLAIN_EVERY_S = 10.0
"""A preparation that keeps failing is told again after this: the next attempt may fail in the same words."""


@dataclasses.dataclass
class _Seen:
    """What was last told of one node."""

    heard_at: float
    incarnation: int = 0
    seq: int = -1
    attempt: int = 0
    ranks: tuple[int, ...] = ()
    exits: set[int] = dataclasses.field(default_factory=set)
    moved_at: float = 0.0
    alive: bool = False
    launcher: m.LauncherState | None = None
    ready: tuple[int, m.StoreOffer] | None = None
    complained_at: float | None = None
    findings: int = 0
    evidence: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    stop_request: str = ""
    space: m.SpaceReported | None = None
    tests: m.NodeTestReport | None = None
    gpus: NodeGpus | None = None
    tiers: NodeTiers | None = None
    done: bool = False
    lost: bool = False
    quiet: bool = False
    samples: tuple[RankSample, ...] = ()
    """The newest ones of the newest attempt."""


class _Heard:
    """When nodes were heard last and when their ranks moved last, for many questions at one time."""

    def __init__(self, nodes: Iterable[_Seen]) -> None:
        self.newest = 0.0
        found: dict[int, list[tuple[float, float | None]]] = {}
        for one in nodes:
            self.newest = max(self.newest, one.heard_at)
            if one.ranks:
                found.setdefault(one.attempt, []).append((one.heard_at, one.moved_at if one.alive else None))
        self._times: dict[int, list[float]] = {}
        self._moved: dict[int, list[float | None]] = {}
        """Attempt -> for each of its times: when ranks of a node moved last that was heard then or later."""
        for attempt, seen in found.items():
            seen.sort(key=lambda one: one[0])
            newest: float | None = None
            moved: list[float | None] = []
            for _, moved_at in reversed(seen):
                newest = moved_at if newest is None else newest if moved_at is None else max(newest, moved_at)
                moved.append(newest)
            self._times[attempt] = [heard_at for heard_at, _ in seen]
            self._moved[attempt] = moved[::-1]

    def since(self, at: float, attempt: int) -> tuple[bool, float | None]:
        """Of nodes with ranks of `attempt` that were heard after `at`: whether there are any, when live ranks moved."""
        times = self._times.get(attempt, [])
        first = bisect.bisect_right(times, at)
        return (True, self._moved[attempt][first]) if first < len(times) else (False, None)


class Newest(NamedTuple):
    """How far the ranks are, by the newest heartbeat."""

    attempt: int
    step: int | None
    at: float
    """When that step was made."""
    last_step: int | None
    broken: bool = False
    """A rank of the attempt ended badly, or is gone."""
    counted: int = 0
    counted_step: int | None = None
    """As in `Progressed`."""
    loss: float | None = None


class _Count(NamedTuple):
    """The step clock that is furthest."""

    steps: int = 0
    at: float = 0.0
    step: int | None = None


class _Loss(NamedTuple):
    """The newest loss of one rank."""

    rank: int
    step: int | None
    value: float


class HeartbeatEvents:
    """`skew`: what `VersionsCompared` said before (`Job.skew`). `mirrors`: whether snapshots are mirrored."""

    def __init__(self, skew: tuple[Difference, ...] = (), mirrors: Callable[[], bool] = lambda: False) -> None:
        self._mirrors = mirrors
        self._snapshot_told: tuple[tuple[int, int], float] = ((0, -1), -math.inf)
        self._left_step = (0, -1)
        """Attempt and step from which the script has gone back by itself."""
        """Attempt and step of the newest one that was told, and when."""
        self._watch = hang.HangWatch()
        self._stragglers = StragglerWatch()
        self._inputs = InputWatch()
        self._count = self._told_count = _Count()
        self._node_diff = NodeDiffMonitor(skew)
        self._nodes: dict[str, _Seen] = {}
        self._attempt = 0
        self._step: int | None = None
        self._step_at = 0.0
        """When it was made, by the clock of `now`."""
        self._step_node = ""
        self._last_step: int | None = None
        self._told_step: int | None = None
        self._told_steps = 0
        self._told_at = 0.0
        self._moved = False
        self._told_moved = False
        self._broken = False
        self._loss_now: _Loss | None = None
        self._bad_since: dict[int, int | None] = {}
        """Ranks whose newest loss is no number -> the step from which on."""
        self._numbers_told = (False, 0.0)
        """Whether the newest word was that they are bad, and when it was."""
        self._watching: set[int] = set()
        """Ranks that print their loss again and again."""
        self._alarms: dict[int, LossAlarm] = {}
        self._alarm_kinds: Counter[str] = Counter()
        """How many of them there are of each kind: each heartbeat asks, and all ranks are too many to look at."""
        self._loss_told: tuple[str, float] = ("", -math.inf)
        """The kind of the alarm that was told last (none: it is well), and when."""
        self._ticked_at: float | None = None
        self._snapshots: dict[str, tuple[RankSnapshot, ...]] = {}
        """By node: what its ranks hold in memory."""
        self._replicas = ReplicaWatch()

    def observe(self, beat: m.Heartbeat, now: float) -> list[m.AnyEvent]:
        """The events in one heartbeat; none if it is older than one that was seen."""
        seen = self._nodes.get(beat.node)
        if seen is None:
            seen = self._nodes[beat.node] = _Seen(heard_at=now)
        elif (beat.incarnation, beat.seq) <= (seen.incarnation, seen.seq):
            return []
        first = seen.seq < 0
        seen.incarnation, seen.seq = beat.incarnation, beat.seq
        seen.heard_at = now
        events: list[m.AnyEvent] = []
        if seen.lost:
            seen.lost = False
            self._node_diff.recheck(now)
            events.append(m.NodeJoined(at=now, node=beat.node, host="", address=""))
        elif seen.quiet:
            events.append(m.NodeQuiet(at=now, node=beat.node, silent_s=0.0))
        seen.quiet = False
        self._note_steps(beat, now)
        if _matters(beat, seen):
            self._tell_step(now, events)
        self._reports(beat, seen, now, events)
        self._workers(beat, seen, now, events)
        self._launcher(beat, seen, now, first, events)
        if beat.done and not seen.done:
            events.append(m.NodeDone(at=now, node=beat.node))
        seen.done = beat.done
        return events

    def before_command(self, now: float) -> list[m.AnyEvent]:
        """What is known and was not worth telling yet: an operator's command may end the attempt."""
        events: list[m.AnyEvent] = []
        self._tell_step(now, events)
        return events

    def tick(self, now: float) -> list[m.AnyEvent]:
        """What time alone tells; call it a few times a second."""
        if self._ticked_at is not None and now - self._ticked_at > STALL_S:
            for seen in self._nodes.values():
                seen.heard_at = max(seen.heard_at, now - 1.0)
        self._ticked_at = now
        events: list[m.AnyEvent] = []
        notices = self._watch.tick(now)
        if notices:
            self._tell_step(now, events)
        events += [self._event_of(notice, now) for notice in notices]
        slow = self._stragglers.tick(now)
        if slow is not None:
            seen_slow = m.StragglersSeen(
                at=now,
                attempt=self._attempt,
                ranks=slow.ranks,
                cost=round(slow.cost, 3),
                since=slow.since,
                step_s=round(slow.step_s, 6),
                starved=round(slow.starved, 3),
            )
            events.append(seen_slow)
        waits = self._inputs.tick(now)
        if waits is not None:
            share, since = round(waits.share, 3), waits.since
            events.append(
                m.InputWaitSeen(
                    at=now, attempt=self._attempt, ranks=waits.ranks, count=waits.many, share=share, since=since
                )
            )
        for name, seen in self._nodes.items():
            silent_s = now - seen.heard_at
            if silent_s > QUIET_S and not (seen.quiet or seen.lost or seen.done or self._works(seen)):
                seen.quiet = True
                events.append(m.NodeQuiet(at=now, node=name, silent_s=silent_s))
        lost = self._newly_lost(now)
        for name in lost:
            seen = self._nodes[name]
            seen.lost = True
            self._snapshots.pop(name, None)
            self._node_diff.recheck(now)
        if lost:
            self._tell_step(now, events)
        silences = [now - self._nodes[name].heard_at for name in lost]
        if len(lost) > 1:
            events.append(m.NodesLost(at=now, nodes=tuple(lost), silent_s=max(silences)))
        else:
            events += [m.NodeLost(at=now, node=name, silent_s=silences[0]) for name in lost]
        if self._node_diff.is_due(now):
            differences = self._node_diff.changes(
                [name for name, seen in self._nodes.items() if not seen.lost and not seen.done]
            )
            if differences is not None:
                events.append(m.VersionsCompared(at=now, differences=differences))
        return events

    # ----- silence -----

    def _newly_lost(self, now: float) -> list[str]:
        """Nodes that count as lost from now on.

        Heartbeats of nodes are spread over a second, so nodes that die together pass the limit one after the other.
        Where others are about to pass it, too, all of them wait for the last, at most `TOGETHER_S`: a switch that
        failed is one loss of many nodes, and not many losses.
        """
        silent = {
            name: seen
            for name, seen in self._nodes.items()
            if now - seen.heard_at > SILENT_S - TOGETHER_S and not seen.lost and not seen.done
        }
        due = [name for name, seen in silent.items() if now - seen.heard_at > SILENT_S]
        if not due:
            return []
        heard = _Heard(self._nodes.values())
        lost = [name for name in due if self._is_lost(silent[name], now - silent[name].heard_at, heard)]
        longest_s = max((now - silent[name].heard_at for name in lost if self._works(silent[name])), default=0.0)
        others = any(now - seen.heard_at <= SILENT_S and self._works(seen) for seen in silent.values())
        return [] if others and longest_s and longest_s <= SILENT_S + TOGETHER_S else lost

    def _is_lost(self, seen: _Seen, silent_s: float, heard: _Heard) -> bool:
        if not self._works(seen):
            return silent_s > SILENT_IDLE_S
        peers, moved_at = heard.since(seen.heard_at + CLOCK_SLACK_S, seen.attempt)
        if not peers:
            return silent_s > (SILENT_ALONE_S if heard.newest > seen.heard_at + CLOCK_SLACK_S else SILENT_UNSEEN_S)
        # The others move on: so does it, or they would wait for it.
        usual_s = STILL_AT_START_S if self._watch.phase == "start" else self._watch.suspect_limit_s
        still_s = max(STILL_S, min(STILL_LONGEST_S, usual_s))
        if moved_at is not None and moved_at < seen.heard_at - still_s:
            return (
                silent_s > SILENT_ALONE_S
            )  # they stood before it fell silent: that they stand now tells nothing of it
        since = max(seen.heard_at + CLOCK_SLACK_S, self._ticked_at - still_s if self._ticked_at is not None else 0.0)
        return moved_at is None or moved_at <= since

    def _works(self, seen: _Seen) -> bool:
        """Workers of the newest attempt are there."""
        return seen.alive and seen.attempt == self._attempt

    @property
    def newest(self) -> Newest:
        """Fresher than what the job was told."""
        count = self._count
        loss = None if self._loss_now is None else self._loss_now.value
        return Newest(
            self._attempt, self._step, self._step_at, self._last_step, self._broken, count.steps, count.step, loss
        )

    def is_first(self, node: str, most: int) -> bool:
        """Whether the node is one of few that tell how far the job is: all of a small job, else who told the step."""
        return len(self._nodes) <= most or node == self._step_node

    def rank_samples(self) -> list[tuple[str, RankSample, float]]:
        """Of the newest attempt, as they were heard last: node, sample, when."""
        return [(node, sample, seen.heard_at) for node, seen in self._nodes.items() for sample in seen.samples]

    @property
    def snapshot(self) -> RankSnapshot | None:
        """The newest snapshot that all ranks of the newest attempt hold; that of one of them."""
        held: dict[tuple[int, int], list[RankSnapshot]] = {}
        for seen in self._snapshots.values():
            for one in seen:
                held.setdefault((one.attempt, one.step), []).append(one)
        whole = [key for key, ones in held.items() if len({one.rank for one in ones}) == ones[0].world]
        return max(held[max(whole)], key=lambda one: one.at) if whole else None

    # ----- one heartbeat -----

    def _reports(self, beat: m.Heartbeat, seen: _Seen, now: float, events: list[m.AnyEvent]) -> None:
        if beat.inventory is not None:
            self._node_diff.record(beat.node, beat.inventory, now)
        if beat.checkpoints is not None:
            folders = beat.checkpoint_folders or ()
            events.append(m.CheckpointsSeen(at=now, node=beat.node, checkpoints=beat.checkpoints, folders=folders))
        if beat.snapshots is not None:
            before = self._snapshots.get(beat.node, ())
            self._snapshots[beat.node] = beat.snapshots
            self._tell_going_back(_newest_step(before), _newest_step(beat.snapshots), now, events)
            self._compare_replicas(beat.snapshots, now, events)
            self._tell_snapshot(now, events)
        if beat.tiers is not None:
            events.append(_tiers_seen(beat.node, seen.tiers, beat.tiers, now))
            seen.tiers = beat.tiers
        if beat.stop_request and beat.stop_request != seen.stop_request:
            events.append(m.StopRequested(at=now, node=beat.node, signal=beat.stop_request))
        seen.stop_request = beat.stop_request
        if beat.space is not None and beat.space != seen.space:
            events.append(m.SpaceSeen(at=now, node=beat.node, number=beat.space.number, full=beat.space.full))
        seen.space = beat.space
        if beat.tests is not None and beat.tests != seen.tests:
            events.append(m.NodeTested(at=now, node=beat.node, report=beat.tests))
        seen.tests = beat.tests
        if beat.gpus is not None and beat.gpus != seen.gpus:
            events.append(m.GpusSeen(at=now, node=beat.node, gpus=beat.gpus))
            seen.gpus = beat.gpus
        known = max(0, seen.findings - beat.findings_from)
        fresh = beat.findings[known:]
        if fresh:
            self._watch.note_findings(fresh, [sample.rank for sample in beat.ranks])
        if len(fresh) == 1:
            number = beat.findings_from + known
            events.append(m.FindingArrived(at=now, node=beat.node, finding=fresh[0], number=number))
        elif fresh:
            events.append(m.findings_arrived(now, beat.node, fresh, beat.findings_from + known))
        seen.findings = max(seen.findings, beat.findings_from + len(beat.findings))
        for piece in beat.evidence:
            key = (piece.attempt, piece.request)
            if key not in seen.evidence:
                seen.evidence.add(key)
                self._watch.note_stacks(now, piece.stacks)
                self._watch.note_flights(now, piece.flights)
                events.append(m.EvidenceArrived(at=now, evidence=piece))

    def _tell_snapshot(self, now: float, events: list[m.AnyEvent]) -> None:
        told, at = self._snapshot_told
        if now - at < SNAPSHOT_EVERY_S or not self._mirrors():
            return
        newest = self.snapshot
        if newest is not None and (newest.attempt, newest.step) != told:
            self._snapshot_told = (newest.attempt, newest.step), now
            events.append(m.SnapshotSeen(at=now, attempt=newest.attempt, step=newest.step))

    def _tell_going_back(
        self, before: tuple[int, int], held: tuple[int, int], now: float, events: list[m.AnyEvent]
    ) -> None:
        """A script goes back by itself, in the same attempt: told at once, with the step from which it did."""
        if self._mirrors() and held[0] == before[0] and held < before and before > self._left_step:
            self._left_step, self._snapshot_told = before, (held, now)
            events += [m.SnapshotSeen(at=now, attempt=attempt, step=step) for attempt, step in (before, held)]

    def _compare_replicas(self, held: tuple[RankSnapshot, ...], now: float, events: list[m.AnyEvent]) -> None:
        for one in self._replicas.observe(held):
            differ = m.ReplicasDiffer(
                at=now,
                attempt=one.attempt,
                step=one.step,
                compared=one.ranks,
                odd=one.odd[:16],
                contents=one.contents,
                since=one.agreed_at,
                since_step=one.agreed_step,
            )
            events.append(differ)

    def _workers(self, beat: m.Heartbeat, seen: _Seen, now: float, events: list[m.AnyEvent]) -> None:
        if beat.attempt != seen.attempt:
            seen.attempt, seen.ranks, seen.exits, seen.alive = beat.attempt, (), set(), False
            seen.evidence = {key for key in seen.evidence if key[0] >= beat.attempt}
        if not beat.ranks or beat.attempt < self._attempt:
            seen.alive = False
            return
        if beat.attempt > self._attempt:
            self._begin(beat.attempt, now)
            self._note_steps(beat, now)
        ranks = tuple(sorted(sample.rank for sample in beat.ranks))
        if ranks != seen.ranks:
            seen.ranks = ranks
            events.append(m.WorkersStarted(at=now, node=beat.node, attempt=beat.attempt, ranks=ranks))
        self._watch.observe(now, beat.ranks)
        self._stragglers.observe(now, beat.ranks)
        self._inputs.observe(beat.ranks)
        self._look_at_ranks(beat, seen, now)
        self._progress(now, events)
        self._numbers(now, events)
        self._loss(now, events)
        stopped: list[int] = []
        for sample in sorted(
            (s for s in beat.ranks if s.exit is not None), key=lambda s: s.exit.order if s.exit else 0
        ):
            if sample.rank not in seen.exits and sample.exit is not None:
                seen.exits.add(sample.rank)
                if sample.exit.stopped_by_us:
                    stopped.append(sample.rank)
                    continue
                events.append(
                    m.RankEnded(
                        at=now,
                        node=beat.node,
                        attempt=beat.attempt,
                        exit=sample.exit,
                        step=self._step,
                        last_step=self._last_step,
                    )
                )
        if stopped:
            events.append(
                m.RanksStopped(
                    at=now,
                    node=beat.node,
                    attempt=beat.attempt,
                    ranks=tuple(sorted(stopped)),
                    step=self._step,
                    last_step=self._last_step,
                )
            )

    def _begin(self, attempt: int, now: float) -> None:
        self._attempt = attempt
        self._step = self._last_step = self._told_step = None
        self._told_at, self._moved, self._told_moved, self._told_steps = now, False, False, 0
        self._broken = False
        for seen in self._nodes.values():
            seen.samples = ()
        self._loss_now = None
        self._bad_since.clear()
        self._numbers_told = (False, 0.0)
        self._watching.clear()
        self._alarms.clear()
        self._alarm_kinds.clear()
        self._loss_told = ("", -math.inf)
        self._watch.start(now, attempt)
        self._stragglers.start(now)
        self._inputs.start(now)
        self._count = self._told_count = _Count()

    def _note_steps(self, beat: m.Heartbeat, now: float) -> None:
        if beat.attempt != self._attempt:
            return
        for sample in beat.ranks:
            if sample.step is not None and (self._step is None or sample.step > self._step):
                self._step, self._step_at, self._step_node = sample.step, now - sample.moved_age_s, beat.node
            clock = sample.clock
            if clock is not None and (clock.steps, clock.step or 0) > (self._count.steps, self._count.step or 0):
                self._count = _Count(clock.steps, now - clock.age_s, clock.step)

    def _tell_step(self, now: float, events: list[m.AnyEvent]) -> None:
        """What follows may break the attempt, or say what it saved: the job is to know how far it was."""
        stepped = self._step is not None and self._step != self._told_step and self._told_step is not None
        counted = self._count != self._told_count and self._told_moved
        if stepped or counted:
            self._report_progress(now, events)

    def _look_at_ranks(self, beat: m.Heartbeat, seen: _Seen, now: float) -> None:
        seen.alive = False
        seen.samples = beat.ranks
        for sample in beat.ranks:
            if sample.exit is None and sample.state != "X":  # X: gone together with its keeper, its exit is not known
                seen.alive = True
                seen.moved_at = max(seen.moved_at, now - sample.moved_age_s)
            if sample.last_step is not None:
                self._last_step = sample.last_step
            elif sample.step is not None and self._last_step is not None and sample.step > self._last_step:
                self._last_step = None  # that was the end of an epoch
            self._moved = self._moved or _has_moved(sample)
            self._broken = self._broken or (sample.exit.code != 0 if sample.exit is not None else sample.state == "X")
            if sample.bad_reports:
                self._bad_since[sample.rank] = sample.bad_since
            else:
                self._bad_since.pop(sample.rank, None)
            if sample.watches_loss:
                self._watching.add(sample.rank)
            self._note_alarm(sample.rank, sample.loss_alarm)
            if sample.loss is not None and (self._loss_now is None or sample.rank <= self._loss_now.rank):
                told = _Loss(sample.rank, sample.loss_step, sample.loss)  # each rank has losses of its own
                self._loss_now = None if sample.bad_reports else told

    def _note_alarm(self, rank: int, alarm: LossAlarm | None) -> None:
        before = self._alarms.pop(rank, None)
        if before is not None:
            self._alarm_kinds[before.kind] -= 1
        if alarm is not None:
            self._alarms[rank] = alarm
            self._alarm_kinds[alarm.kind] += 1

    def _progress(self, now: float, events: list[m.AnyEvent]) -> None:
        """The first sign of life, the first two steps (one alone may mislead), then at most one event every 10 s."""
        first = self._told_step is None and self._step is not None
        alive = self._moved and not self._told_moved
        moved_on = self._step != self._told_step
        later = moved_on and (self._told_steps < 2 or now - self._told_at >= PROGRESS_EVERY_S)
        if self._count != self._told_count:
            first_count = not self._told_count.steps and self._count.steps > 0
            later = later or first_count or now - self._told_at >= PROGRESS_EVERY_S
        if first or alive or later:
            self._report_progress(now, events, first)

    def _report_progress(self, now: float, events: list[m.AnyEvent], first: bool = False) -> None:
        step_at = None if self._step is None else round(min(now, self._step_at), 3)
        told = m.Progressed(
            at=now,
            attempt=self._attempt,
            step=self._step,
            step_at=step_at,
            last_step=self._last_step,
            first=first,
            counted=self._count.steps,
            counted_at=round(min(now, self._count.at), 3) if self._count.steps else None,
            counted_step=self._count.step,
            loss=None if self._loss_now is None else self._loss_now.value,
            loss_step=None if self._loss_now is None else self._loss_now.step,
        )
        events.append(told)
        self._told_count = self._count
        self._told_steps += self._step != self._told_step
        self._told_step, self._told_at, self._told_moved = self._step, now, True

    def _numbers(self, now: float, events: list[m.AnyEvent]) -> None:
        told, told_at = self._numbers_told
        bad = bool(self._bad_since)
        if bad == told or now - told_at < NUMBERS_EVERY_S:
            return
        self._numbers_told = (bad, now)
        first = min((step for step in self._bad_since.values() if step is not None), default=None)
        ranks = tuple(sorted(self._bad_since)[:16])
        step = first if bad else self._step
        events.append(m.NumbersSeen(at=now, attempt=self._attempt, bad=bad, step=step, ranks=ranks))

    def _loss(self, now: float, events: list[m.AnyEvent]) -> None:
        """An alarm counts if most of the ranks that print a loss agree; NaN of one rank soon is that of all."""
        kind = ""
        if self._alarm_kinds["nan"]:
            kind = "nan"
        elif 2 * len(self._alarms) > len(self._watching):
            kind = self._alarm_kinds.most_common(1)[0][0]
        told, told_at = self._loss_told
        if now - told_at < (LOSS_AGAIN_S if kind == told else LOSS_CHANGES_S) or (kind == told == ""):
            return
        self._loss_told = (kind, now)
        alarms = {rank: alarm for rank, alarm in self._alarms.items() if alarm.kind == kind}
        ranks = heapq.nsmallest(16, alarms)
        first = min(alarms.values(), key=lambda alarm: math.inf if alarm.step is None else alarm.step, default=None)
        self._tell_step(now, events)
        events.append(m.LossSeen(at=now, attempt=self._attempt, alarm=first, ranks=tuple(ranks), step=self._step))

    def _launcher(self, beat: m.Heartbeat, seen: _Seen, now: float, first: bool, events: list[m.AnyEvent]) -> None:
        if beat.launcher == "ended" and seen.launcher != "ended":
            how = beat.launcher_exit or "in an unknown way"
            events.append(
                m.LauncherEnded(
                    at=now, node=beat.node, attempt=beat.attempt, how=how, fresh=not first, code=beat.launcher_code
                )
            )
        seen.launcher = beat.launcher
        ready = None
        if beat.launcher == "joining" and beat.offer is not None and beat.prepared and not seen.alive:
            ready = (beat.prepared, beat.offer)
            if ready != seen.ready:
                events.append(m.LauncherReady(at=now, node=beat.node, attempt=beat.prepared, offer=beat.offer))
        seen.ready = ready
        if not beat.prepare_error:
            seen.complained_at = None
        elif seen.complained_at is None or now - seen.complained_at >= COMPLAIN_EVERY_S:
            seen.complained_at = now
            failed = m.PreparationFailed(at=now, node=beat.node, attempt=beat.prepared + 1, error=beat.prepare_error)
            events.append(failed)

    def _event_of(self, notice: hang.HangNotice, now: float) -> m.AnyEvent:
        if isinstance(notice, hang.Suspected):
            return m.HangSuspected(at=now, attempt=self._attempt, report=notice.report)
        if isinstance(notice, hang.Confirmed):
            return m.HangConfirmed(at=now, attempt=self._attempt, report=notice.report)
        if isinstance(notice, hang.Cleared):
            return m.HangCleared(at=now, attempt=self._attempt, quiet_s=notice.quiet_s)
        if isinstance(notice, hang.Wake):
            return m.RankWakeWanted(at=now, attempt=self._attempt, ranks=notice.ranks, stopped_s=notice.stopped_s)
        return m.SilenceSeen(at=now, attempt=self._attempt, report=notice.report)


def _newest_step(held: tuple[RankSnapshot, ...]) -> tuple[int, int]:
    """Attempt and step of the newest snapshot of a node."""
    return max(((one.attempt, one.step) for one in held), default=(0, -1))


def _tiers_seen(node: str, before: NodeTiers | None, tiers: NodeTiers, now: float) -> m.AnyEvent:
    if before is not None and before != tiers == msgspec.structs.replace(before, snapshots=tiers.snapshots):
        return m.SnapshotCopiesSeen(at=now, node=node, snapshots=tiers.snapshots)
    return m.TiersSeen(at=now, node=node, tiers=tiers)


def _matters(beat: m.Heartbeat, seen: _Seen) -> bool:
    """Whether a heartbeat has something whose step is asked for."""
    if beat.checkpoints is not None or beat.findings or beat.evidence or beat.stop_request != seen.stop_request:
        return True
    if beat.launcher == "ended" and seen.launcher != "ended":
        return True
    return any(sample.exit is not None and sample.rank not in seen.exits for sample in beat.ranks)


def _has_moved(sample: RankSample) -> bool:
    """A step, or a collective that completed."""
    stepped = sample.step is not None or sample.clock is not None
    return stepped or any(completed > 0 for _, completed in sample.groups.values())
