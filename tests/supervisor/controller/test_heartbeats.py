from __future__ import annotations

import itertools
import time
from typing import Any, Literal

import msgspec
import pytest

from diagnosis.signals import Evidence, ExitRecord, Finding, LossAlarm, NodeEvidence, RankClock, RankSample
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from recovery.snapshot_choice import RankSnapshot, SnapshotPart
from recovery.tiers import NodeTiers
from supervisor import messages as m
from supervisor.controller.heartbeats import (
    COMPLAIN_EVERY_S,
    LOSS_AGAIN_S,
    LOSS_CHANGES_S,
    PROGRESS_EVERY_S,
    SILENT_ALONE_S,
    SILENT_IDLE_S,
    SILENT_S,
    SILENT_UNSEEN_S,
    STILL_S,
    TOGETHER_S,
    HeartbeatEvents,
)

OFFER = m.StoreOffer(host="a", port=1, local_world_size=2)


class Nodes:
    """Sends heartbeats to an observer, seconds after the beginning."""

    def __init__(self) -> None:
        self.observer = HeartbeatEvents()
        self.seq = 0

    def beat(self, at: float, node: str = "a", **fields: Any) -> list[m.AnyEvent]:
        self.seq += 1
        return self.observer.observe(m.Heartbeat(**{"node": node, "incarnation": 1, "seq": self.seq, **fields}), at)

    def tick(self, start: float, end: float) -> list[m.AnyEvent]:
        return [event for n in range(int((end - start) * 4)) for event in self.observer.tick(start + n / 4)]


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def sample(rank: int, **fields: Any) -> RankSample:
    return RankSample(**{"rank": rank, "local_rank": rank % 2, "pid": 100 + rank, "state": "S", **fields})


def ended(rank: int, code: int, order: int = 0) -> RankSample:
    record = ExitRecord(rank=rank, local_rank=rank, pid=1, code=code, signal=None, ended_at=5.0, order=order)
    return sample(rank, exit=record)


def kinds(events: list[m.AnyEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_old_repeated_and_reordered_heartbeats_say_nothing(nodes: Nodes) -> None:
    nodes.beat(1.0, seq=5, launcher="joining", prepared=1, offer=OFFER)
    assert nodes.beat(1.1, seq=5, launcher="ended") == []
    assert nodes.beat(1.2, seq=4, launcher="ended") == []
    assert kinds(nodes.beat(1.3, incarnation=2, seq=0, launcher="ended")) == ["LauncherEnded"]


def test_a_launcher_is_ready_when_it_waits_and_its_preparations_are_done(nodes: Nodes) -> None:
    assert nodes.beat(1.0, launcher="joining", offer=OFFER) == []
    assert nodes.beat(1.1, launcher="joining", prepared=1) == []
    [ready] = nodes.beat(1.2, launcher="joining", prepared=1, offer=OFFER)
    assert ready == m.LauncherReady(at=1.2, node="a", attempt=1, offer=OFFER)
    [again] = nodes.beat(1.3, launcher="joining", prepared=2, offer=OFFER)
    assert isinstance(again, m.LauncherReady)
    assert again.attempt == 2


def test_ends_come_in_order_after_their_evidence(nodes: Nodes) -> None:
    nodes.beat(1.0, attempt=1, ranks=(sample(0), sample(1)), launcher="running")
    evidence = (NodeEvidence(node="a", attempt=1),)
    ranks = (ended(0, 1, order=1), ended(1, 3, order=0))
    told = nodes.beat(2.0, attempt=1, ranks=ranks, evidence=evidence, launcher="ended", launcher_exit="exit code 1")
    assert kinds(told) == ["EvidenceArrived", "RankEnded", "RankEnded", "LauncherEnded"]
    assert [event.exit.rank for event in told if isinstance(event, m.RankEnded)] == [1, 0]
    assert nodes.beat(3.0, attempt=1, ranks=ranks, evidence=evidence, launcher="ended") == []


def test_progress_is_told_at_its_first_sign_at_the_first_steps_and_then_now_and_then(nodes: Nodes) -> None:
    nodes.beat(1.0, attempt=1, ranks=(sample(0),))
    [sign] = nodes.beat(2.0, attempt=1, ranks=(sample(0, groups={"0": (3, 2)}),))
    assert sign == m.Progressed(at=2.0, attempt=1, step=None)
    [first] = nodes.beat(3.0, attempt=1, ranks=(sample(0, step=7, last_step=90),))
    assert first == m.Progressed(at=3.0, attempt=1, step=7, step_at=3.0, last_step=90, first=True)
    later = [nodes.beat(4.0 + n, attempt=1, ranks=(sample(0, step=8 + n),)) for n in range(25)]
    assert sum(map(len, later)) == 1 + int(25 / PROGRESS_EVERY_S)


def ten_steps(nodes: Nodes) -> None:
    """The newest of which was not told yet."""
    for n in range(10):
        nodes.beat(1.0 + n / 2, attempt=1, launcher="running", ranks=(sample(0, step=n), sample(1)))
    assert nodes.observer.newest[:2] == (1, 9)


@pytest.mark.parametrize(
    "fields",
    [
        {"launcher": "ended"},
        {"ranks": (sample(0, step=12, moved_age_s=0.4), ended(1, 1))},
        {"checkpoints": ()},
        {"stop_request": "SIGTERM"},
        {"evidence": (NodeEvidence(node="a", attempt=1),)},
    ],
)
def test_the_newest_step_is_reported_before_what_it_matters_to(nodes: Nodes, fields: dict[str, Any]) -> None:
    ten_steps(nodes)
    usual = {"launcher": "running", "ranks": (sample(0, step=12, moved_age_s=0.4), sample(1))}
    told = nodes.beat(7.0, attempt=1, **{**usual, **fields})
    assert told[0] == m.Progressed(at=7.0, attempt=1, step=12, step_at=6.6)
    assert len(told) > 1


def test_and_before_what_an_operator_commands(nodes: Nodes) -> None:
    ten_steps(nodes)
    (told,) = nodes.observer.before_command(6.0)
    assert isinstance(told, m.Progressed)
    assert told.step == 9
    assert nodes.observer.before_command(6.5) == []


def test_a_loss_that_is_no_number_is_told_and_when_it_is_one_again(nodes: Nodes) -> None:
    nodes.beat(1.0, attempt=1, ranks=(sample(0, step=7), sample(1, step=7)))
    bad = sample(1, step=9, bad_reports=2, bad_since=8)
    [seen] = [e for e in nodes.beat(20.0, attempt=1, ranks=(sample(0, step=9), bad)) if isinstance(e, m.NumbersSeen)]
    assert (seen.bad, seen.step, seen.ranks) == (True, 8, (1,))
    assert "NumbersSeen" not in kinds(nodes.beat(21.0, attempt=1, ranks=(sample(0, step=10), bad)))
    good = (sample(0, step=11), sample(1, step=11))
    assert "NumbersSeen" not in kinds(nodes.beat(22.0, attempt=1, ranks=good))  # it may come and go
    [again] = [e for e in nodes.beat(31.0, attempt=1, ranks=good) if isinstance(e, m.NumbersSeen)]
    assert (again.bad, again.step) == (False, 11)


def test_the_next_attempt_starts_from_nothing(nodes: Nodes) -> None:
    nodes.beat(1.0, attempt=1, ranks=(sample(0, step=50),))
    told = nodes.beat(2.0, attempt=2, ranks=(sample(0, step=3),))
    assert told[-1] == m.Progressed(at=2.0, attempt=2, step=3, step_at=2.0, first=True)
    late = nodes.beat(2.5, node="b", attempt=1, ranks=(sample(2, step=51),))
    assert late == [], "a node that still runs the old attempt has nothing to say about this one"


def test_a_failing_preparation_complains_now_and_then(nodes: Nodes) -> None:
    [failed] = nodes.beat(1.0, prepared=1, prepare_error="no space")
    assert isinstance(failed, m.PreparationFailed)
    assert failed.attempt == 2
    assert nodes.beat(2.0, prepared=1, prepare_error="no space") == []
    assert len(nodes.beat(1.0 + COMPLAIN_EVERY_S, prepared=1, prepare_error="no space")) == 1


def test_checkpoints_stops_and_the_end(nodes: Nodes) -> None:
    checkpoint = Checkpoint(path="/c", step=1, format="x", complete=True)
    told = nodes.beat(1.0, checkpoints=(checkpoint,), stop_request="SIGTERM", done=True)
    assert kinds(told) == ["CheckpointsSeen", "StopRequested", "NodeDone"]
    assert kinds(nodes.beat(2.0, stop_request="SIGTERM", done=True)) == []


# ----- silence -----


def quiet_pair(nodes: Nodes, silent_from: float, until: float, moving: bool) -> list[m.AnyEvent]:
    """b stops talking, a goes on; what ticks tell."""
    told: list[m.AnyEvent] = []
    for second in range(1, int(until)):
        step = second if moving or second <= silent_from else int(silent_from)
        age = 0.0 if moving else max(0.0, second - silent_from)
        nodes.beat(float(second), attempt=1, ranks=(sample(0, step=step, moved_age_s=age),))
        if second <= silent_from:
            nodes.beat(float(second), node="b", attempt=1, ranks=(sample(2),))
        told += [e for n in range(4) for e in nodes.observer.tick(second + n / 4) if isinstance(e, m.NodeLost)]
    return told


def test_a_silent_node_whose_peers_wait_is_lost_within_seconds(nodes: Nodes) -> None:
    [lost] = quiet_pair(nodes, silent_from=10, until=30, moving=False)
    assert isinstance(lost, m.NodeLost)
    assert lost.node == "b"
    assert SILENT_S < lost.silent_s < SILENT_S + 1
    back = nodes.beat(31.0, node="b", attempt=1, ranks=(sample(2),))
    assert isinstance(back[0], m.NodeJoined)


def test_an_agent_that_is_silent_in_a_pause_of_all_is_waited_for_longer(nodes: Nodes) -> None:
    """The others stood before: that they do not move says nothing of its node."""
    told: list[m.AnyEvent] = []
    for second in range(1, 100):
        for node, rank in (("a", 0), ("b", 2)):
            if node == "a" or second <= 40:
                ranks = (sample(rank, step=5, moved_age_s=float(second - 5)),)
                nodes.beat(float(second), node=node, attempt=1, ranks=ranks)
        told += [event for event in nodes.tick(second, second + 1) if isinstance(event, m.NodeLost)]
    [lost] = told
    assert (lost.node, SILENT_ALONE_S < lost.silent_s < SILENT_ALONE_S + 2) == ("b", True)


def test_a_silent_node_whose_peers_have_moved_a_last_time_is_lost_all_the_same(nodes: Nodes) -> None:
    told: list[m.AnyEvent] = []
    for second in range(1, 60):
        moved_at = second if second <= 10 else 14 if second >= 14 else 10  # continued late, or with work of its own
        for node, rank in (("a", 0), ("b", 2)):
            if node == "a" or second <= 10:
                ranks = (sample(rank, step=moved_at, moved_age_s=float(second - moved_at)),)
                nodes.beat(float(second), node=node, attempt=1, ranks=ranks)
        told += [event for event in nodes.tick(second, second + 1) if isinstance(event, m.NodeLost)]
    [lost] = told
    assert (lost.node, STILL_S <= lost.at - 14 < STILL_S + 2) == ("b", True)


def test_nobody_is_lost_only_because_we_slept(nodes: Nodes) -> None:
    nodes.beat(1.0, attempt=1, ranks=(sample(0),))
    nodes.beat(1.0, node="b", attempt=1, ranks=(sample(2),))
    nodes.observer.tick(1.1)
    nodes.beat(500.0, attempt=1, ranks=(sample(0, moved_age_s=400),))
    assert not any(isinstance(event, m.NodeLost) for event in nodes.observer.tick(500.1))


def test_an_only_node_and_an_idle_one_get_longer(nodes: Nodes) -> None:
    nodes.beat(0.0, attempt=1, ranks=(sample(0),))
    lost = [event for event in nodes.tick(0.0, SILENT_UNSEEN_S + 2) if isinstance(event, m.NodeLost)]
    assert [round(event.at) for event in lost] == [round(SILENT_UNSEEN_S)]
    idle = Nodes()
    idle.beat(0.0)
    lost = [event for event in idle.tick(0.0, 60.0) if isinstance(event, m.NodeLost)]
    assert [round(event.at) for event in lost] == [round(SILENT_IDLE_S)]


# ----- the hang watch -----


def test_a_rank_that_does_not_enter_a_collective_is_suspected(nodes: Nodes) -> None:
    told: list[m.AnyEvent] = []
    for second in range(1, 60):
        stuck = max(0, second - 40)
        count = second - stuck
        ranks = tuple(
            sample(
                rank,
                step=count if rank == 0 else None,
                groups={"0": (count + (rank == 0 and stuck > 0), count)},
                moved_age_s=float(stuck),
                waiting_s=float(stuck) if rank == 0 and stuck else None,
            )
            for rank in (0, 1)
        )
        told += nodes.beat(float(second), attempt=1, ranks=ranks)
        told += nodes.tick(second, second + 1)
    suspected = next(event for event in told if isinstance(event, m.HangSuspected))
    assert suspected.attempt == 1
    assert suspected.at < 45


def test_inventories_are_compared_between_the_nodes_that_are_there(nodes: Nodes) -> None:
    assert nodes.beat(1.0, "a", inventory={"driver": "1"}) == []
    assert nodes.beat(1.0, "b", inventory={"driver": "2"}) == []
    for second in range(2, 12):
        nodes.beat(float(second), "a")
        nodes.beat(float(second), "b")
    (told,) = nodes.tick(11.0, 12.0)
    assert isinstance(told, m.VersionsCompared)
    assert [one.text for one in told.differences] == ["driver is 1 on a and 2 on b"]
    for second in range(12, 60):  # b is lost, and then nothing differs any more
        nodes.beat(float(second), "a")
    assert kinds(nodes.tick(31.0, 60.0)) == ["NodeQuiet", "NodeLost", "VersionsCompared"]


def test_a_rank_that_the_others_wait_for_is_told_and_forgotten_with_its_attempt(nodes: Nodes) -> None:
    told: list[m.AnyEvent] = []
    for second in range(1, 300):
        # Rank 1 computes for the whole of its step; the others wait for it a third of the time.
        waits = second % 3 == 0
        ranks = tuple(
            sample(
                rank,
                step=second,
                groups={"0": (second + (waits and rank != 1), second)},
                clock=RankClock(steps=second, step_s=1.0, input_share=0.3 if rank == 1 else 0.01),
            )
            for rank in range(4)
        )
        told += nodes.beat(float(second), attempt=1, ranks=ranks)
        told += nodes.tick(second, second + 1)
    (slow,) = (event for event in told if isinstance(event, m.StragglersSeen))
    assert (slow.attempt, slow.ranks, slow.since) == (1, (1,), pytest.approx(1.0, abs=2))
    assert slow.cost == pytest.approx(1 / 3, abs=0.03)
    assert (slow.step_s, slow.starved) == (1.0, 0.3)
    assert not {"HangSuspected", "HangConfirmed"}.intersection(kinds(told))


def test_nodes_that_fall_silent_at_once_are_lost_at_once(nodes: Nodes) -> None:
    """Their heartbeats are spread over a second, and so would be their losses."""
    losses: list[m.NodeLost | m.NodesLost] = []
    for quarter in range(4 * 40):
        now = quarter / 4
        for index in range(8):
            if quarter % 4 == index % 4 and (index < 4 or now <= 20.0):
                step = min(int(now), 20)
                ranks = (sample(index, step=step, moved_age_s=max(0.0, now - 20.0)),)
                nodes.beat(now, node=f"n{index}", attempt=1, ranks=ranks)
        losses += [event for event in nodes.observer.tick(now) if isinstance(event, m.NodeLost | m.NodesLost)]
    [lost] = losses
    assert isinstance(lost, m.NodesLost)
    assert sorted(lost.nodes) == ["n4", "n5", "n6", "n7"]
    assert lost.at < 20.0 + SILENT_S + TOGETHER_S + 0.5


def test_findings_of_one_heartbeat_are_one_event_with_those_alike_counted(nodes: Nodes) -> None:
    def finding(gpu: str, number: int) -> Finding:
        evidence = Evidence(text=f"Xid 63 row {number}", node="a")
        return Finding(
            rule="xid.63",
            failure_class=FailureClass.GPU_ECC_UNCORRECTABLE,
            confidence=0.6,
            scope="gpu",
            severity="warning",
            evidence=evidence,
            gpu=gpu,
            rank=2 if gpu == "g1" else None,
            at=float(number),
        )

    told = [finding("g0", 0), finding("g1", 1), finding("g0", 2), finding("g1", 3)]
    [event] = nodes.beat(1.0, findings=tuple(told), findings_from=5)
    assert isinstance(event, m.FindingsArrived)
    assert (event.number, event.end) == (5, 9)
    assert [(one.gpu, one.rank, one.count, one.evidence.text) for one in event.findings] == [
        ("g0", None, 2, "Xid 63 row 0"),
        ("g1", 2, 2, "Xid 63 row 1"),
    ]
    assert m.decode_event(m.encode(event)) == event
    assert nodes.beat(2.0, findings=tuple(told), findings_from=5) == []
    [late] = nodes.beat(3.0, findings=(*told, finding("g2", 4)), findings_from=5)
    assert isinstance(late, m.FindingArrived)
    assert late.number == 9


def in_memory(rank: int, step: int, digest: str = "", *, world: int = 4) -> RankSnapshot:
    told = {"group": "g", "members": world, "digests": (digest,)} if digest else {}
    return RankSnapshot(rank=rank, world=world, attempt=1, step=step, at=float(step), **told)


def test_replicas_of_several_nodes_are_compared(nodes: Nodes) -> None:
    assert nodes.beat(1.0, snapshots=(in_memory(0, 10, "x"), in_memory(1, 10, "x"))) == []
    [differ] = nodes.beat(1.1, "b", snapshots=(in_memory(2, 10, "y"), in_memory(3, 10, "x")))
    assert isinstance(differ, m.ReplicasDiffer)
    assert (differ.attempt, differ.step, differ.compared, differ.odd) == (1, 10, 4, (2,))


def test_the_newest_snapshot_that_all_ranks_hold_is_shown(nodes: Nodes) -> None:
    nodes.beat(1.0, snapshots=(in_memory(0, 10), in_memory(1, 10), in_memory(0, 20), in_memory(1, 20)))
    assert nodes.observer.snapshot is None
    nodes.beat(1.1, "b", snapshots=(in_memory(2, 10), in_memory(3, 10), in_memory(2, 20)))
    assert nodes.observer.snapshot is not None
    assert nodes.observer.snapshot.step == 10
    nodes.beat(1.2)  # nothing new
    assert nodes.observer.snapshot.step == 10
    nodes.beat(1.3, "b", snapshots=(in_memory(2, 20), in_memory(3, 20)))
    assert nodes.observer.snapshot.step == 20


def test_where_snapshots_are_mirrored_the_job_hears_of_a_new_one_now_and_then(nodes: Nodes) -> None:
    def told(at: float, step: int) -> list[int]:
        events = nodes.beat(at, snapshots=tuple(in_memory(rank, step, world=2) for rank in (0, 1)))
        return [event.step for event in events if isinstance(event, m.SnapshotSeen)]

    assert told(1.0, 10) == []
    nodes.observer = HeartbeatEvents(mirrors=lambda: True)
    assert told(2.0, 10) == [10]
    assert told(4.0, 20) == []
    assert told(7.0, 30) == [30]
    assert told(12.0, 30) == []
    assert told(13.0, 40) == [40]
    assert told(13.5, 50) == []
    assert told(14.0, 35) == [50, 35], "the script has gone back: that is told at once"
    assert told(14.5, 50) == []
    assert told(15.0, 35) == [], "known"
    assert told(15.5, 60) == []
    assert told(16.0, 10) == [60, 10]


# ----- the loss -----

SPIKE = LossAlarm(kind="spike", step=100, usual=2.0, level=8.0)


def losses(events: list[m.AnyEvent]) -> list[m.LossSeen]:
    return [event for event in events if isinstance(event, m.LossSeen)]


def test_the_loss_of_the_first_rank_that_tells_one_goes_with_the_steps(nodes: Nodes) -> None:
    def told(at: float, attempt: int, *ranks: RankSample) -> list[tuple[float | None, int | None]]:
        events = nodes.beat(at, attempt=attempt, ranks=ranks)
        return [(event.loss, event.loss_step) for event in events if isinstance(event, m.Progressed)]

    assert told(1.0, 1, sample(0, step=1), sample(1, step=1, loss=9.0, loss_step=1)) == [(9.0, 1)]
    assert told(2.0, 1, sample(0, step=2, loss=2.0, loss_step=2), sample(1, step=2, loss=9.0)) == [(2.0, 2)]
    assert told(13.0, 1, sample(0, step=3, loss=2.0, loss_step=2, bad_reports=1)) == [(None, None)]
    assert told(14.0, 2, sample(0, step=2), sample(1, step=2)) == [(None, None)]
    assert nodes.observer.newest.loss is None


def test_most_ranks_that_print_a_loss_must_agree(nodes: Nodes) -> None:
    def told(at: float, alarmed: int) -> list[m.LossSeen]:
        ranks = tuple(
            sample(rank, step=110, watches_loss=rank < 4, loss_alarm=SPIKE if rank < alarmed else None)
            for rank in range(6)
        )
        return losses(nodes.beat(at, attempt=1, ranks=ranks))

    assert told(1.0, 0) == []
    assert told(2.0, 2) == []
    [seen] = told(3.0, 3)
    assert (seen.alarm, seen.ranks, seen.step) == (SPIKE, (0, 1, 2), 110)
    assert told(4.0, 4) == [], "told already"
    assert len(told(4.0 + LOSS_AGAIN_S, 4)) == 1, "it lasts"
    [well] = told(80.0, 1)
    assert well.alarm is None
    assert told(200.0, 0) == [], "that all is well is told once"
    flapping = [event for second in range(100) for event in told(201.0 + second, 4 * (second % 2))]
    times = [event.at for event in flapping]
    assert len(times) > 5
    assert all(after - before >= LOSS_CHANGES_S for before, after in itertools.pairwise(times))


def test_nan_of_one_rank_is_enough_and_a_new_attempt_begins_well(nodes: Nodes) -> None:
    nan = LossAlarm(kind="nan", step=90)
    ranks = (sample(0, watches_loss=True, loss_alarm=nan), sample(1, watches_loss=True), sample(2, watches_loss=True))
    [seen] = losses(nodes.beat(1.0, attempt=1, ranks=ranks))
    assert (seen.alarm, seen.ranks) == (nan, (0,))
    assert losses(nodes.beat(2.0, attempt=2, ranks=(sample(0), sample(1), sample(2)))) == []


@pytest.mark.parametrize("kind", ["spike", "nan"])
def test_a_loss_that_went_wrong_on_4096_ranks_costs_as_much_as_one_that_is_well(kind: Literal["spike", "nan"]) -> None:
    """Each heartbeat of a node comes to its own ranks only: looking at all of them took 5.7 s."""
    nodes = Nodes()
    wrong = LossAlarm(kind=kind, step=90)
    began = time.process_time()
    seen: list[m.LossSeen] = []
    for at in (1.0, 2.0):
        for node in range(512):
            ranks = tuple(sample(8 * node + n, watches_loss=True, loss_alarm=wrong) for n in range(8))
            seen += losses(nodes.beat(at, node=f"n{node}", attempt=1, ranks=ranks))
    assert len(seen) == 1
    assert time.process_time() - began < 1.5


def test_what_the_step_clock_counts_is_told_every_ten_seconds_and_before_the_end(nodes: Nodes) -> None:
    """The script shows no step."""
    told = [
        event
        for second in range(1, 36)
        for event in nodes.beat(
            float(second), attempt=1, ranks=(sample(0, clock=RankClock(steps=second * 3, age_s=0.25)),)
        )
        if isinstance(event, m.Progressed)
    ]
    assert [(one.step, one.counted, one.counted_at) for one in told] == [
        (None, 3, 0.75),
        (None, 33, 10.75),
        (None, 63, 20.75),
        (None, 93, 30.75),
    ]
    last = msgspec.structs.replace(ended(0, 1), clock=RankClock(steps=106, age_s=0.5))
    events = nodes.beat(36.0, attempt=1, ranks=(last,))
    assert kinds(events)[:2] == ["Progressed", "RankEnded"]
    assert events[0].counted == 106
    assert nodes.observer.newest.counted == 106


def test_the_clock_that_is_furthest_tells_the_runs_step(nodes: Nodes) -> None:
    ranks = (
        sample(0, step=400, clock=RankClock(steps=456, step=456)),
        sample(1, clock=RankClock(steps=457)),
        sample(2, step=400, clock=RankClock(steps=457, step=457)),
    )
    (told,) = (event for event in nodes.beat(1.0, attempt=1, ranks=ranks) if isinstance(event, m.Progressed))
    assert (told.step, told.counted, told.counted_step) == (400, 457, 457)


def test_ranks_that_wait_for_data_are_told(nodes: Nodes) -> None:
    told: list[m.AnyEvent] = []
    for second in range(1, 130):
        clock = RankClock(steps=second, input_share=0.4)
        nodes.beat(float(second), attempt=1, ranks=(sample(0, clock=clock), sample(1, clock=RankClock(steps=second))))
        told += nodes.tick(second, second + 1)
    (waits,) = (event for event in told if isinstance(event, m.InputWaitSeen))
    assert (waits.attempt, waits.ranks, waits.count, waits.share) == (1, (0,), 1, 0.4)


def test_who_tells_the_step_and_what_each_rank_does(nodes: Nodes) -> None:
    for number in range(70):
        nodes.beat(1.0, node=f"n{number}", attempt=1, ranks=(sample(number, step=number % 50),))
    assert [node for node in ("n0", "n49", "n69") if nodes.observer.is_first(node, 64)] == ["n49"]
    assert nodes.observer.is_first("n0", 70)
    assert len(nodes.observer.rank_samples()) == 70
    nodes.beat(2.0, node="n7", attempt=2, ranks=(sample(7),))
    assert [(node, one.rank) for node, one, _ in nodes.observer.rank_samples()] == [("n7", 7)]


def test_copies_of_snapshots_are_told_alone_where_nothing_else_has_changed(nodes: Nodes) -> None:
    """The whole of what a node has, with all names of files, would be in the journal for each step mirrored."""
    copies = tuple(
        SnapshotPart(attempt=1, step=step, world=2, first_rank=0, ranks=2, owner="a", at=1.0, size_bytes=9)
        for step in (10, 20)
    )

    def told(at: float, port: int, held: tuple[SnapshotPart, ...], incarnation: int = 1) -> m.AnyEvent:
        beat = nodes.beat(at, incarnation=incarnation, tiers=NodeTiers(port=port, snapshots=held))
        (found,) = (one for one in beat if isinstance(one, m.TiersSeen | m.SnapshotCopiesSeen))
        return found

    assert isinstance(told(1.0, 7000, copies[:1]), m.TiersSeen)
    alone = told(2.0, 7000, copies)
    assert isinstance(alone, m.SnapshotCopiesSeen)
    assert alone.snapshots == copies
    assert isinstance(told(3.0, 7001, copies[1:]), m.TiersSeen)
    assert isinstance(told(4.0, 7001, copies[1:], incarnation=2), m.TiersSeen), "a new agent: all is told again"
    assert isinstance(told(5.0, 7001, (), incarnation=2), m.SnapshotCopiesSeen)
