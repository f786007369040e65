"""Rules of the job that no transcript tells: any event in any state, and single decisions."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from diagnosis.incident import Culprit, HangReport, Incident, Verdict
from diagnosis.signals import Evidence, ExitRecord, Finding, NodeEvidence
from diagnosis.taxonomy import FailureClass
from recovery.actions import Checkpoint
from supervisor import messages as m
from supervisor.job.job import InvalidTransition, Job
from supervisor.job.lifecycle import HOLD_LIMIT_S
from supervisor.job.transitions import TRANSITIONS
from supervisor.skew import Difference, compare

CRASH = Verdict(
    failure_class=FailureClass.WORKER_CRASH,
    culprits=(Culprit(node="a", rank=1),),
    confidence=0.8,
    why="rank 1 was killed",
    action="restart",
)


class Driver:
    """A job with its clock."""

    def __init__(self, verdict: Verdict = CRASH, **spec: Any) -> None:
        self.verdict = verdict
        self.seen: list[Incident] = []
        self.job = Job(conclude=self._conclude)
        self.now = 1000.0
        self.told: dict[str, m.Assignment] = {}
        self.actions: list[m.Action] = []
        self.tell(m.ControllerStarted, epoch=1)
        self.tell(m.JobDefined, spec=m.JobSpec(**{"name": "test", **spec}))

    def _conclude(self, incident: Incident) -> Verdict:
        self.seen.append(incident)
        return self.verdict

    def tell(self, kind: Any, after: float = 0.0, **fields: Any) -> list[m.Action]:
        self.now += after
        self.actions = self.job.handle(kind(at=self.now, **fields))
        for action in self.actions:
            if isinstance(action, m.Assign):
                self.told[action.assignment.node] = action.assignment
        return self.actions

    def join(self, *names: str, **fields: Any) -> None:
        for name in names:
            self.tell(m.NodeJoined, node=name, host=f"host-{name}", address="10.0.0.1", **fields)

    @property
    def number(self) -> int:
        return self.job.attempt.number if self.job.attempt is not None else 0

    def up(self, step: int = 1) -> None:
        assert self.job.attempt is not None
        members = self.job.attempt.members
        for name in members:
            offer = m.StoreOffer(host=name, port=1, local_world_size=2)
            self.tell(m.LauncherReady, node=name, attempt=self.number, offer=offer)
        for place, name in enumerate(members):
            self.tell(m.WorkersStarted, node=name, attempt=self.number, ranks=(2 * place, 2 * place + 1))
        self.tell(m.Progressed, attempt=self.number, step=step, first=True)

    def crash(self, node: str = "a", rank: int = 1, step: int | None = None, **fields: Any) -> None:
        usual = {"local_rank": rank % 2, "pid": 1, "code": None, "signal": 9, "ended_at": 1.0}
        record = ExitRecord(rank=rank, **{**usual, **fields})
        self.tell(m.EvidenceArrived, evidence=NodeEvidence(node=node, attempt=self.number, exits=(record,)))
        self.tell(m.RankEnded, node=node, attempt=self.number, exit=record, step=step)

    def fire(self, timer: str) -> None:
        self.now = max(self.now, self.job.timers[timer])
        self.tell(m.TimerFired, timer=timer)

    @property
    def state(self) -> str:
        return self.job.state


def started(*names: str, **fields: Any) -> Driver:
    driver = Driver(nodes_min=len(names), nodes_max=len(names), **fields)
    driver.join(*names)
    driver.up()
    return driver


# ----- anything, anytime -----


def anything(dice: random.Random) -> m.AnyEvent:
    """Any event with plausible and implausible values."""
    node = dice.choice(("a", "a", "b", "b", "c", "nobody"))
    attempt = dice.choice((0, 1, 1, 1, 1, 1, 2, 99))
    record = ExitRecord(
        rank=dice.randrange(6),
        local_rank=0,
        pid=1,
        code=dice.choice((0, 0, 1, None)),
        signal=9,
        ended_at=dice.random() * 1e9,
        stopped_by_us=dice.random() < 0.2,
    )
    report = HangReport(
        kind=dice.choice(("stopped", "traced", "missing", "silent", "exit_hang", "early_exit")),
        ranks=(dice.randrange(6),),
        quiet_s=5.0,
        limit_s=3.0,
        phase="steady",
        why="why",
    )
    finding = Finding(
        rule="r",
        failure_class=dice.choice(list(FailureClass)),
        confidence=0.5,
        scope="node",
        severity="error",
        evidence=Evidence(text="t"),
        at=dice.random() * 2000,
    )
    checkpoint = Checkpoint(
        path=f"/c/{dice.randrange(4)}",
        step=dice.choice((None, 5, 10)),
        format="x",
        complete=dice.random() < 0.7,
        modified_at=dice.random() * 3000,
    )
    offer = m.StoreOffer(host=node, port=1, local_world_size=2)
    piece = NodeEvidence(node=node, attempt=attempt, request=dice.randrange(5))
    timers = ("evidence", "backoff", "gather", "nodes", "hold", "form", "start", "stood", "settle", "finish", "end")
    at: dict[str, float] = {"at": 0.0}
    makers: list[Any] = [
        lambda: m.ControllerStarted(**at, epoch=dice.randrange(1, 9)),
        lambda: m.JobDefined(**at, spec=m.JobSpec(name="another", nodes_max=7)),
        lambda: m.NodeJoined(**at, node=node, host=node, address=node, spare=dice.random() < 0.3),
        lambda: m.NodeLost(**at, node=node, silent_s=5.0),
        lambda: m.LauncherReady(**at, node=node, attempt=attempt, offer=offer),
        lambda: m.PreparationFailed(**at, node=node, attempt=attempt, error="e"),
        lambda: m.WorkersStarted(**at, node=node, attempt=attempt, ranks=dice.choice(((0, 1), (2, 3), (0,)))),
        lambda: m.Progressed(**at, attempt=attempt, step=dice.choice((None, 0, 3, 50)), first=True),
        lambda: m.RankEnded(**at, node=node, attempt=attempt, exit=record, step=dice.choice((None, 3))),
        lambda: m.LauncherEnded(**at, node=node, attempt=attempt, how="how", fresh=dice.random() < 0.5),
        lambda: m.EvidenceArrived(**at, evidence=piece),
        lambda: m.FindingArrived(**at, node=node, finding=finding, number=dice.randrange(9)),
        lambda: m.HangSuspected(**at, attempt=attempt, report=report),
        lambda: m.HangCleared(**at, attempt=attempt, quiet_s=5.0),
        lambda: m.RankWakeWanted(**at, attempt=attempt, ranks=(0, 3)),
        lambda: m.HangConfirmed(**at, attempt=attempt, report=report),
        lambda: m.PaceLearned(**at, longest_s={"steady": 3.0}),
        lambda: m.CheckpointsSeen(**at, node=node, checkpoints=(checkpoint,)),
        lambda: m.TimerFired(**at, timer=dice.choice(timers)),
        lambda: m.OverrideGiven(
            **at,
            command=dice.choice(
                ("pause", "resume", "restart", "cordon", "uncordon", "mode", "approve", "reject", "approve", "resume")
            ),
            argument=dice.choice(("a", "b", "", "observe", "recommend", "enforce")),
        ),
    ]
    last: list[Any] = [
        lambda: m.StopRequested(**at, node=node, signal=dice.choice(("SIGTERM", "SIGINT", "SIGQUIT"))),
        lambda: m.NodeDone(**at, node=node),
        lambda: m.OverrideGiven(**at, command="stop"),
    ]
    kind = dice.random()
    # Half of the time the events that bring an attempt up: ready, started, progress.
    maker: Any = dice.choice(last if kind < 0.003 else [makers[4], makers[6], makers[7]] if kind < 0.5 else makers)
    event: m.AnyEvent = maker()
    return event


def _agree(job: Job, event: m.AnyEvent, now: float) -> m.AnyEvent:
    """A chance for events to fit: most that name an attempt name the current one, timers are due."""
    if isinstance(event, m.TimerFired) and event.timer in job.timers:
        now = max(now, job.timers[event.timer])
    attempt = getattr(event, "attempt", None)
    if attempt == 1 and job.attempt is not None:
        return msgspec.structs.replace(event, at=now, attempt=job.attempt.number)
    return msgspec.structs.replace(event, at=now)


def storm(seed: int) -> set[str]:
    """Hundreds of events at random; the states that the job was in."""
    dice = random.Random(seed)

    def conclude(incident: Incident) -> Verdict:
        inner = random.Random(f"{seed} {incident.id}")
        return Verdict(
            failure_class=inner.choice(list(FailureClass)),
            culprits=(Culprit(node=inner.choice(("a", "b", "nobody"))),),
            confidence=inner.random(),
            why="dice",
            action=inner.choice(("none", "restart", "stop", "hold", "cordon_node_and_restart")),
            fingerprint=inner.choice(("", "x")),
        )

    job = Job(conclude=conclude)
    spec = m.JobSpec(name="x", nodes_min=2, nodes_max=2, max_restarts=5, mode=dice.choice(("enforce", "recommend")))
    events: list[m.AnyEvent] = [m.ControllerStarted(at=1000.0, epoch=1), m.JobDefined(at=1000.0, spec=spec)]
    for event in events:
        job.handle(event)
    now = 1000.0
    states: set[str] = set()
    for _ in range(400):
        now += dice.expovariate(1.0)
        event = _agree(job, anything(dice), now)
        now = max(now, event.at)
        events.append(event)
        job.handle(event)
        states.add(job.state)
        job.view()
    again = Job(conclude=conclude)
    for event in events:
        again.handle(event)
    assert again.view() == job.view()
    return states


@pytest.mark.parametrize("seed", range(30))
def test_any_event_in_any_state_is_harmless_and_replays(seed: int) -> None:
    storm(seed)


def test_the_storms_reach_every_state() -> None:
    assert set().union(*(storm(seed) for seed in range(100, 130))) == set(TRANSITIONS)


def test_an_invalid_transition_tells_the_story() -> None:
    driver = started("a")
    with pytest.raises(InvalidTransition) as failure:
        driver.job._enter("IDLE")
    assert "RUNNING -> IDLE" in str(failure.value)
    assert "attempt 1 starts on 1 node (a)" in str(failure.value)


def test_every_state_but_the_ends_leads_to_an_end() -> None:
    for state, following in TRANSITIONS.items():
        assert ("FAILED" in following) == (state not in ("SUCCEEDED", "FAILED"))


# ----- attempts -----


def test_ranks_keep_their_order_and_nodes_may_say_theirs() -> None:
    driver = Driver(nodes_min=3, nodes_max=3)
    for name, order in (("c", 2), ("a", 0), ("b", 1)):
        driver.join(name, order=order)
    driver.up()
    assert driver.told["a"].round is not None
    assert driver.told["a"].round.nodes == ("a", "b", "c")
    assert driver.told["a"].round.store_host == "a"


def test_fewer_nodes_are_enough_after_a_while() -> None:
    driver = Driver(nodes_min=1, nodes_max=3, gather_s=30.0)
    driver.join("a", "b")
    assert driver.state == "IDLE"
    driver.fire("gather")
    assert driver.state == "STARTING"
    assert driver.job.attempt is not None
    assert driver.job.attempt.members == ("a", "b")


def test_a_spare_that_comes_first_is_not_taken_for_an_ordinary_node() -> None:
    driver = Driver(nodes_min=2, nodes_max=2, gather_s=30.0)
    driver.join("s", spare=True)
    driver.join("a")
    assert driver.state == "IDLE"
    driver.join("b")
    assert driver.job.attempt is not None
    assert driver.job.attempt.members == ("a", "b")
    late = Driver(nodes_min=2, nodes_max=2, gather_s=30.0)
    late.join("s", spare=True)
    late.join("a")
    late.fire("gather")
    assert late.job.attempt is not None
    assert late.job.attempt.members == ("a", "s")


def test_a_job_that_never_gets_its_nodes_fails_with_a_reason() -> None:
    driver = Driver(nodes_min=2, nodes_max=2)
    driver.join("a")
    driver.fire("nodes")
    assert driver.job.outcome is not None
    assert driver.job.outcome.exit_code == 91
    assert "no 2 nodes" in driver.job.outcome.line


def test_running_begins_without_visible_progress_too() -> None:
    driver = Driver()
    driver.join("a")
    driver.tell(m.LauncherReady, node="a", attempt=1, offer=m.StoreOffer(host="a", port=1, local_world_size=1))
    driver.tell(m.WorkersStarted, node="a", attempt=1, ranks=(0,))
    assert driver.state == "STARTING"
    driver.fire("stood")
    assert driver.state == "RUNNING"


def test_a_member_that_is_cordoned_while_the_attempt_is_formed_is_replaced() -> None:
    driver = Driver(nodes_min=2, nodes_max=2)
    driver.join("a", "b")
    driver.join("s", spare=True)
    driver.tell(m.OverrideGiven, command="cordon", argument="b", by="ann")
    assert driver.job.attempt is not None
    assert driver.job.attempt.members == ("a", "s")
    assert driver.told["b"].role == "excluded"


def test_a_preparation_that_fails_is_an_incident() -> None:
    driver = Driver()
    driver.join("a")
    driver.tell(m.PreparationFailed, node="a", attempt=1, error="no space left")
    assert driver.seen[0].trigger == "setup"
    assert driver.number == 2


def test_a_preparation_that_fails_during_the_back_off_is_not_forgotten() -> None:
    driver = started("a")
    driver.crash()
    driver.up(1)
    driver.crash()
    assert "backoff" in driver.job.timers
    driver.tell(m.PreparationFailed, node="a", attempt=driver.number, error="no space left")
    assert len(driver.seen) == 2
    driver.fire("backoff")
    assert driver.seen[2].trigger == "setup"


def test_a_preparation_that_succeeds_in_the_end_is_forgiven() -> None:
    driver = started("a")
    driver.crash()
    driver.up(1)
    driver.crash()
    driver.tell(m.PreparationFailed, node="a", attempt=driver.number, error="no space left")
    offer = m.StoreOffer(host="a", port=1, local_world_size=2)
    driver.tell(m.LauncherReady, node="a", attempt=driver.number, offer=offer)
    driver.fire("backoff")
    assert (driver.state, len(driver.seen)) == ("STARTING", 2)


def test_launchers_that_do_not_come_are_an_incident() -> None:
    driver = Driver()
    driver.join("a")
    driver.fire("form")
    assert driver.seen[0].trigger == "setup"
    assert driver.number == 2


def test_a_launcher_that_cannot_start_is_an_incident_at_once() -> None:
    driver = Driver()
    driver.join("a")
    driver.tell(m.LauncherEnded, node="a", attempt=0, how="exit code 2")
    assert driver.seen[0].launcher_exits == {"a": "exit code 2"}


def test_the_end_of_the_old_launcher_is_none_of_the_new_attempt() -> None:
    driver = started("a")
    driver.crash()
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="exit code 1")
    assert (driver.state, len(driver.seen)) == ("STARTING", 1)
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="exit code 1")
    assert len(driver.seen) == 2, "the second one was started for this attempt"


def test_launchers_that_do_not_end_after_a_success_are_not_waited_for() -> None:
    driver = started("a")
    for rank in (0, 1):
        record = ExitRecord(rank=rank, local_rank=rank, pid=1, code=0, signal=None, ended_at=0.0)
        driver.tell(m.RankEnded, node="a", attempt=1, exit=record)
    assert driver.told["a"].stage == "finish"
    driver.fire("finish")
    assert driver.state == "SUCCEEDED"


def finishing(*names: str) -> Driver:
    """Every rank ended well, the launchers are still there."""
    driver = started(*names)
    for rank in range(2 * len(names)):
        record = ExitRecord(rank=rank, local_rank=rank % 2, pid=1, code=0, signal=None, ended_at=0.0)
        driver.tell(m.RankEnded, node=names[rank // 2], attempt=1, exit=record)
    return driver


def test_a_node_that_is_lost_after_every_rank_ended_well_changes_nothing() -> None:
    driver = finishing("a", "b")
    driver.tell(m.NodeLost, after=15.0, node="b", silent_s=15.0)
    assert driver.state == "RUNNING", "the launcher on a has not ended"
    driver.tell(m.LauncherEnded, node="a", attempt=1, how="exit code 0")
    assert (driver.state, driver.seen) == ("SUCCEEDED", [])


def test_a_hang_that_is_told_after_every_rank_ended_well_changes_nothing() -> None:
    driver = finishing("a")
    report = HangReport(kind="silent", ranks=(), quiet_s=60.0, limit_s=60.0, phase="end", why="quiet")
    driver.tell(m.HangConfirmed, attempt=1, report=report)
    driver.fire("finish")
    assert (driver.state, driver.seen) == ("SUCCEEDED", [])


def restarted(first: int) -> Driver:
    """The second attempt, which should go on at step 100, shows this step first."""
    driver = started("a")
    checkpoint = Checkpoint(path="/c/100", step=100, format="x", complete=True, modified_at=driver.now + 60)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(checkpoint,))
    driver.crash(step=120)
    driver.up(first)
    return driver


def test_a_run_that_begins_again_is_held_once_its_second_step_shows_it() -> None:
    driver = restarted(0)
    assert driver.state == "RUNNING", "a progress bar that is being drawn says 0 too"
    driver.tell(m.Progressed, attempt=2, step=1)
    assert (driver.state, driver.told["a"].stage, driver.number) == ("RECOVERING", "form", 3)
    assert "operator" in driver.job.waiting


def test_a_bar_that_is_drawn_from_nothing_and_jumps_is_no_new_beginning() -> None:
    driver = restarted(0)
    driver.tell(m.Progressed, attempt=2, step=101)
    assert driver.state == "RUNNING"
    [incident] = driver.job.view().incidents
    assert incident.closed_at is not None


@pytest.mark.parametrize("step", [60, 99, 100, 101, 130])
def test_a_run_that_goes_on_somewhere_near_is_left_alone(step: int) -> None:
    driver = restarted(step)
    driver.tell(m.Progressed, attempt=2, step=step + 1)
    assert driver.state == "RUNNING"


def test_a_checkpoint_that_counts_samples_is_no_measure_for_steps() -> None:
    driver = started("a")
    checkpoint = Checkpoint(path="/c/64000", step=64000, format="x", complete=True, modified_at=driver.now + 60)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(checkpoint,))
    driver.crash(step=510)
    driver.up(501)
    driver.tell(m.Progressed, attempt=2, step=502)
    assert driver.state == "RUNNING"


def test_what_an_earlier_job_left_behind_is_no_reason_to_hold() -> None:
    driver = Driver()
    driver.join("a")
    old = Checkpoint(path="/c/5000", step=5000, format="x", complete=True, modified_at=driver.now - 86400)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(old,))
    driver.up(0)
    driver.crash(step=7)
    driver.up(0)
    driver.tell(m.Progressed, attempt=2, step=1)
    assert driver.state == "RUNNING"


# ----- incidents -----


def test_a_rank_that_we_stopped_ourselves_is_no_failure() -> None:
    driver = started("a")
    driver.crash(stopped_by_us=True)
    assert driver.state == "RUNNING"


def test_evidence_of_all_members_is_waited_for_but_not_for_ever() -> None:
    driver = started("a", "b")
    driver.crash(node="b", rank=3)
    assert driver.state == "DIAGNOSING"
    assert driver.told["a"].evidence is not None
    assert driver.told["b"].evidence is None, "it has told already"
    driver.fire("evidence")
    assert driver.state == "STARTING"
    assert [piece.node for piece in driver.seen[0].evidence] == ["b"]


def test_a_node_that_was_only_silent_needs_no_restart() -> None:
    driver = started("a", "b", "c")
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.tell(m.NodeLost, node="c", silent_s=5.0)
    driver.tell(m.NodeJoined, node="b", host="", address="")
    assert driver.state == "DIAGNOSING"
    driver.tell(m.NodeJoined, node="c", host="", address="")
    assert (driver.state, driver.seen, driver.number) == ("RUNNING", [], 1)


def test_a_node_that_came_back_with_a_dead_rank_is_diagnosed() -> None:
    driver = started("a", "b")
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.crash(node="a", rank=1)
    driver.tell(m.NodeJoined, node="b", host="", address="")
    assert driver.state == "DIAGNOSING"
    driver.fire("evidence")
    assert driver.number == 2


def test_a_node_that_registers_anew_has_lost_its_ranks() -> None:
    driver = started("a", "b")
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    driver.join("b")
    driver.fire("evidence")
    assert driver.number == 2


def test_a_diagnosis_that_fails_does_not_stop_the_run() -> None:
    def broken(_: Incident) -> Verdict:
        raise KeyError("a defect")

    driver = Driver()
    driver.job._conclude_by = broken
    driver.join("a")
    driver.up()
    driver.crash()
    assert driver.state == "STARTING"
    verdict = driver.job.view().incidents[0].verdict
    assert verdict is not None
    assert verdict.failure_class is FailureClass.UNKNOWN


def test_a_choice_of_checkpoint_that_fails_does_not_stop_the_run() -> None:
    def broken(_: Any) -> Any:
        raise OSError("a defect")

    driver = started("a")
    driver.job._choose = broken
    driver.crash()
    assert driver.state == "STARTING"


def test_an_incident_closes_even_if_no_step_is_ever_seen() -> None:
    driver = started("a")
    driver.crash()
    driver.tell(m.LauncherReady, node="a", attempt=2, offer=m.StoreOffer(host="a", port=1, local_world_size=2))
    driver.tell(m.WorkersStarted, node="a", attempt=2, ranks=(0, 1))
    driver.fire("stood")
    assert driver.job.view().incidents[0].closed_at is None
    driver.fire("settle")
    assert driver.job.view().incidents[0].closed_at is not None


def test_a_hang_that_was_left_alone_and_lasts_is_acted_on() -> None:
    driver = started("a")
    driver.verdict = Verdict(
        failure_class=FailureClass.NONE, culprits=(), confidence=0.9, why="all is well", action="none"
    )
    report = HangReport(kind="silent", ranks=(), quiet_s=600.0, limit_s=600.0, phase="steady", why="quiet")
    driver.tell(m.HangConfirmed, attempt=1, report=report)
    driver.tell(m.EvidenceArrived, evidence=NodeEvidence(node="a", attempt=1, request=1))
    assert driver.state == "RUNNING"
    driver.fire("again")
    driver.fire("evidence")
    assert (driver.state, driver.number) == ("STARTING", 2)


def test_the_breaker_hands_over_to_an_operator_and_nobody_is_cordoned_beyond_it() -> None:
    bad = Verdict(
        failure_class=FailureClass.GPU_HANG,
        culprits=(Culprit(node="n0"), Culprit(node="n1"), Culprit(node="n2")),
        confidence=0.9,
        why="their GPUs hang",
        action="cordon_node_and_restart",
    )
    driver = Driver(bad, nodes_min=1, nodes_max=8)
    driver.join(*(f"n{i}" for i in range(8)))
    driver.up()
    driver.crash(node="n0", rank=1)
    driver.fire("evidence")
    assert driver.state == "RECOVERING"
    assert "operator" in driver.job.waiting
    assert driver.job.view().cordons == ()
    driver.tell(m.OverrideGiven, command="resume")
    assert driver.state == "STARTING"


def test_a_job_that_nobody_decides_about_ends_after_a_day() -> None:
    driver = started("a", mode="recommend")
    driver.crash()
    assert driver.state == "RECOVERING"
    assert driver.job.timers["hold"] == driver.now + HOLD_LIMIT_S
    driver.fire("hold")
    assert driver.job.outcome is not None
    assert driver.job.outcome.exit_code == 90


def test_the_end_of_a_pause_leaves_the_day_for_an_approval() -> None:
    driver = started("a", mode="recommend")
    driver.crash()
    driver.tell(m.OverrideGiven, command="pause")
    driver.tell(m.OverrideGiven, command="resume", after=10.0)
    assert "approve" in driver.job.waiting
    assert driver.job.timers["hold"] == driver.now + HOLD_LIMIT_S


def test_mode_enforce_ordered_during_a_pause_holds_after_it() -> None:
    driver = started("a", mode="recommend")
    driver.crash()
    driver.tell(m.OverrideGiven, command="pause")
    driver.tell(m.OverrideGiven, command="mode", argument="enforce")
    assert driver.state == "RECOVERING"
    driver.tell(m.OverrideGiven, command="resume")
    assert driver.job.attempt is not None
    assert (driver.state, driver.job.attempt.number) == ("STARTING", 2)


def test_a_cordon_of_a_node_that_nobody_knows_is_told_as_that() -> None:
    driver = started("a")
    notes = driver.tell(m.OverrideGiven, command="cordon", argument="nodee")
    assert any("knows no node nodee" in one.text for one in notes if isinstance(one, m.Note))
    assert driver.job.cordons.of("nodee", driver.now) is not None


def test_a_node_that_is_lost_while_a_plan_waits_for_approval_is_replaced_later() -> None:
    driver = Driver(nodes_min=2, nodes_max=2, mode="recommend")
    driver.join("a", "b")
    driver.join("s", spare=True)
    driver.up()
    driver.crash()
    driver.fire("evidence")
    driver.tell(m.NodeLost, node="b", silent_s=5.0)
    assert driver.state == "RECOVERING"
    driver.tell(m.OverrideGiven, command="approve")
    assert driver.job.attempt is not None
    assert driver.job.attempt.members == ("a", "s")


def test_findings_are_acknowledged_and_reach_the_diagnosis_once() -> None:
    driver = started("a")
    finding = Finding(
        rule="xid",
        failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
        confidence=0.9,
        scope="gpu",
        severity="fatal",
        evidence=Evidence(text="Xid 79"),
        at=driver.now,
    )
    for number in (0, 0, 1):
        driver.tell(m.FindingArrived, node="a", finding=finding, number=number)
    assert driver.told["a"].findings_seen == 2
    driver.crash(ended_at=driver.now)
    assert len(driver.seen[0].findings) == 2


def test_progress_gives_the_restart_budget_back() -> None:
    driver = started("a", max_restarts=2)
    for step in range(10, 100, 10):
        driver.crash(step=step)
        if "backoff" in driver.job.timers:
            driver.fire("backoff")
        driver.up(step + 5)
    assert driver.state == "RUNNING"
    assert driver.job.view().budget.used == 0


def test_what_is_lost_is_down_time_and_steps_done_again() -> None:
    driver = started("a")
    driver.tell(m.Progressed, after=100.0, attempt=1, step=101)
    driver.crash(ended_at=driver.now, step=101)
    driver.now += 2.0
    driver.up(81)
    [incident] = driver.job.view().incidents
    assert incident.lost_s == pytest.approx(2.0 + 20 * 1.0)
    view = driver.job.view()
    assert view.ettr == pytest.approx(1 - 22.0 / 102.0, abs=1e-3)


# ----- operators and ends -----


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_stop_by_signal(signal: str, code: int) -> None:
    driver = started("a", "b")
    driver.tell(m.StopRequested, node="a", signal=signal)
    assert driver.told["b"].stop_signal == signal
    assert driver.told["b"].outcome is not None
    assert driver.told["b"].outcome.exit_code == code
    driver.tell(m.NodeDone, node="a")
    assert not any(isinstance(action, m.End) for action in driver.actions)
    driver.tell(m.NodeLost, node="b", silent_s=15.0)
    assert any(isinstance(action, m.End) for action in driver.actions)


def test_a_controller_that_starts_after_the_end_ends_too() -> None:
    driver = started("a")
    driver.tell(m.OverrideGiven, command="stop")
    driver.tell(m.NodeDone, node="a")
    driver.tell(m.ControllerStarted, epoch=2)
    assert any(isinstance(action, m.End) for action in driver.actions)


def test_a_node_that_never_says_that_it_is_done_is_not_waited_for() -> None:
    driver = started("a")
    driver.tell(m.OverrideGiven, command="stop")
    driver.fire("end")
    assert any(isinstance(action, m.End) for action in driver.actions)


def test_loud_lines_reach_the_terminal_of_the_first_node_only() -> None:
    driver = started("a", "b")
    driver.crash(node="b", rank=3)
    assert [text for _, text in driver.told["a"].notices]
    assert driver.told["b"].notices == ()


def test_a_new_epoch_says_everything_again() -> None:
    driver = started("a")
    before = driver.told["a"]
    driver.tell(m.ControllerStarted, epoch=2)
    after = driver.told["a"]
    assert (after.epoch, after.round) == (2, before.round)
    assert after.version > before.version
    assert {a.timer for a in driver.actions if isinstance(a, m.SetTimer)} == set(driver.job.timers)


def test_a_new_controller_suspects_nothing_until_its_own_watch_does() -> None:
    driver = started("a")
    report = HangReport(kind="silent", ranks=(), quiet_s=3.0, limit_s=2.0, phase="steady", why="quiet")
    driver.tell(m.HangSuspected, attempt=1, report=report)
    assert "stacks" in driver.job.timers
    driver.tell(m.ControllerStarted, epoch=2)
    assert "stacks" not in driver.job.timers


def test_what_differs_between_the_nodes_is_told_once_and_changes_nothing() -> None:
    run = Driver()
    run.join("a", "b", "c")

    def differ(key: str = "driver", **versions: str) -> tuple[Difference, ...]:
        return compare({node: {key: version} for node, version in versions.items()})

    def notes(actions: list[m.Action]) -> list[tuple[str, bool]]:
        return [(action.text, action.loud) for action in actions if isinstance(action, m.Note)]

    before = (run.number, run.told["a"].stage)
    actions = run.tell(m.VersionsCompared, differences=differ(a="1", b="2"))
    assert notes(actions) == [("the nodes are not the same: driver is 1 on a and 2 on b", True)]
    assert {type(action) for action in actions} == {m.Note, m.Assign}  # the line for the terminal, nothing else
    assert (run.number, run.told["a"].stage) == before
    assert run.tell(m.VersionsCompared, differences=differ(a="1", b="2", c="1")) == []
    assert run.job.view().skew[0].text == "driver is 2 on b and 1 on the other 2"
    assert run.tell(m.VersionsCompared, differences=()) == []
    assert run.job.view().skew == ()
    quiet = run.tell(m.VersionsCompared, differences=differ("bios", a="1", b="2"))
    assert notes(quiet) == [("the nodes are not the same: bios is 1 on a and 2 on b", False)]


def test_who_holds_the_others_up_is_told_and_shown_and_changes_nothing() -> None:
    run = started("a", "b")
    before = (run.job.state, run.number)

    actions = run.tell(m.StragglersSeen, attempt=1, ranks=(1,), cost=0.22, since=50_520.0)

    assert [(one.text, one.loud) for one in actions if isinstance(one, m.Note)] == [
        ("rank 1 (a) holds the others up: 22 % of every step since 14:02 UTC", True)
    ]
    assert (run.job.state, run.number) == before
    view = run.job.view().stragglers
    assert view is not None
    assert (view.ranks, view.cost_percent) == ((1,), 22.0)
    assert run.tell(m.StragglersSeen, attempt=7, ranks=(0,), cost=0.5) == []  # of no attempt that there is
    over = run.tell(m.StragglersSeen, attempt=1, ranks=())
    assert [one.text for one in over if isinstance(one, m.Note)] == ["rank 1 holds nobody up any more"]
    assert run.job.view().stragglers is None


def test_what_is_known_of_a_slow_ranks_gpu_is_told_with_it() -> None:
    run = started("a", "b")
    hot = Finding(
        rule="gpu_hw_slowdown",
        failure_class=FailureClass.GPU_THERMAL_POWER,
        confidence=0.5,
        scope="gpu",
        severity="warning",
        evidence=Evidence(text="thermal slowdown in 90 % of 600 s, 91 °C", source="gpu"),
        node="b",
        rank=1,
        gpu="0000:c1:00",
        at=run.job.now,
    )
    run.tell(m.FindingArrived, node="b", finding=hot, number=0)

    actions = run.tell(m.StragglersSeen, attempt=1, ranks=(1,), cost=0.22, since=run.job.now)

    (note,) = (one.text for one in actions if isinstance(one, m.Note))
    assert note.endswith(
        ": its GPU 0000:c1:00 is slowed down by heat or power (thermal slowdown in 90 % of 600 s, 91 °C)"
    )
    view = run.job.view().stragglers
    assert view is not None
    assert view.text == note
