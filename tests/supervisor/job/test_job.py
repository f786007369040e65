"""Rules of the job that no transcript tells: any event in any state."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import supervisor.job
from diagnosis.incident import Culprit, HangReport, Incident, Verdict
from diagnosis.signals import Evidence, ExitRecord, Finding, NodeEvidence
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from supervisor import messages as m
from supervisor.job.core import Enter, TimerName, Want
from supervisor.job.job import TRANSITIONS, InvalidTransition, Job
from supervisor.notes import KINDS

Dice = random.Random


def a_node(dice: Dice) -> str:
    return dice.choice(("a", "a", "b", "b", "c", "nobody"))


def an_attempt(dice: Dice) -> int:
    return dice.choice((0, 1, 1, 1, 1, 1, 2, 99))


def an_exit(dice: Dice) -> ExitRecord:
    return ExitRecord(
        rank=dice.randrange(6),
        local_rank=0,
        pid=1,
        code=dice.choice((0, 0, 1, None)),
        signal=9,
        ended_at=dice.random() * 1e9,
        stopped_by_us=dice.random() < 0.2,
    )


def a_hang(dice: Dice) -> HangReport:
    return HangReport(
        kind=dice.choice(("stopped", "traced", "missing", "silent", "exit_hang", "early_exit")),
        ranks=(dice.randrange(6),),
        quiet_s=5.0,
        limit_s=3.0,
        phase="steady",
        why="why",
    )


def a_finding(dice: Dice) -> Finding:
    return Finding(
        rule="r",
        failure_class=dice.choice(list(FailureClass)),
        confidence=0.5,
        scope="node",
        severity="error",
        evidence=Evidence(text="t"),
        at=dice.random() * 2000,
    )


def a_checkpoint(dice: Dice) -> Checkpoint:
    return Checkpoint(
        path=f"/c/{dice.randrange(4)}",
        step=dice.choice((None, 5, 10)),
        format="x",
        complete=dice.random() < 0.7,
        modified_at=dice.random() * 3000,
    )


def evidence(dice: Dice) -> NodeEvidence:
    return NodeEvidence(node=a_node(dice), attempt=an_attempt(dice), request=dice.randrange(5))


def rank_ended(dice: Dice) -> dict[str, Any]:
    return {"node": a_node(dice), "attempt": an_attempt(dice), "exit": an_exit(dice), "step": dice.choice((None, 3))}


def override(dice: Dice) -> dict[str, Any]:
    usual = ("pause", "resume", "restart", "cordon", "uncordon", "mode", "approve", "reject", "approve", "resume")
    return {
        "command": dice.choice(usual),
        "argument": dice.choice(("a", "b", "", "observe", "recommend", "enforce")),
    }


TIMERS = (
    "evidence",
    "backoff",
    "gather",
    "nodes",
    "hold",
    "form",
    "start",
    "stood",
    "settle",
    "finish",
    "end",
    "silence",
    "again",
)
Maker = tuple[type[m.AnyEvent], Callable[[Dice], dict[str, Any]]]


def of_attempt(dice: Dice, **more: Any) -> dict[str, Any]:
    return {"node": a_node(dice), "attempt": an_attempt(dice), **more}


# What brings an attempt up.
STARTS: list[Maker] = [
    (m.LauncherReady, lambda d: of_attempt(d, offer=m.StoreOffer(host=a_node(d), port=1, local_world_size=2))),
    (m.WorkersStarted, lambda d: of_attempt(d, ranks=d.choice(((0, 1), (2, 3), (0,))))),
    (m.Progressed, lambda d: {"attempt": an_attempt(d), "step": d.choice((None, 0, 3, 50)), "first": True}),
]
ANYTHING: list[Maker] = [
    *STARTS,
    (m.ControllerStarted, lambda d: {"epoch": d.randrange(1, 9)}),
    (m.JobDefined, lambda _: {"spec": m.JobSpec(name="another", nodes_max=7)}),
    (m.NodeJoined, lambda d: {"node": a_node(d), "host": "h", "address": "1", "spare": d.random() < 0.3}),
    (
        m.ReplicasDiffer,
        lambda d: {"attempt": an_attempt(d), "step": 3, "compared": 3, "odd": d.choice(((), (1,), (9,)))},
    ),
    (m.NodeLost, lambda d: {"node": a_node(d), "silent_s": 5.0}),
    (m.PreparationFailed, lambda d: of_attempt(d, error="e")),
    (m.RankEnded, rank_ended),
    (m.LauncherEnded, lambda d: of_attempt(d, how="how", fresh=d.random() < 0.5)),
    (m.EvidenceArrived, lambda d: {"evidence": evidence(d)}),
    (m.FindingArrived, lambda d: {"node": a_node(d), "finding": a_finding(d), "number": d.randrange(9)}),
    (m.HangSuspected, lambda d: {"attempt": an_attempt(d), "report": a_hang(d)}),
    (m.HangCleared, lambda d: {"attempt": an_attempt(d), "quiet_s": 5.0}),
    (m.RankWakeWanted, lambda d: {"attempt": an_attempt(d), "ranks": (0, 3)}),
    (m.HangConfirmed, lambda d: {"attempt": an_attempt(d), "report": a_hang(d)}),
    (m.SilenceSeen, lambda d: {"attempt": an_attempt(d), "report": a_hang(d)}),
    (m.PaceLearned, lambda _: {"longest_s": {"steady": 3.0}}),
    (m.CheckpointsSeen, lambda d: {"node": a_node(d), "checkpoints": (a_checkpoint(d),)}),
    (m.TimerFired, lambda d: {"timer": d.choice(TIMERS)}),
    (m.OperatorCommand, override),
]
ENDS: list[Maker] = [
    (m.StopRequested, lambda d: {"node": a_node(d), "signal": d.choice(("SIGTERM", "SIGINT", "SIGQUIT"))}),
    (m.NodeDone, lambda d: {"node": a_node(d)}),
    (m.OperatorCommand, lambda _: {"command": "stop"}),
]


def anything(dice: Dice, job: Job, now: float) -> m.AnyEvent:
    """Any event with plausible and implausible values; half of them help an attempt up, and few end the job.

    Most that name an attempt name the current one, and timers are due: else hardly anything would fit.
    """
    kind = dice.random()
    event, values = dice.choice(ENDS if kind < 0.003 else STARTS if kind < 0.5 else ANYTHING)
    fields = values(dice)
    if fields.get("attempt") == 1 and job.attempt is not None:
        fields["attempt"] = job.attempt.number
    return event(at=max(now, job.timers.get(fields.get("timer", ""), now)), **fields)


def dicing(seed: int) -> Callable[[Incident], Verdict]:
    """A diagnosis by dice, the same for the same incident."""

    def conclude(incident: Incident) -> Verdict:
        dice = Dice(f"{seed} {incident.id}")
        return Verdict(
            failure_class=dice.choice(list(FailureClass)),
            culprits=(Culprit(node=dice.choice(("a", "b", "nobody"))),),
            confidence=dice.random(),
            why="dice",
            action=dice.choice(("none", "restart", "stop", "hold", "cordon_node_and_restart")),
            fingerprint=dice.choice(("", "x")),
        )

    return conclude


def storm(seed: int) -> set[str]:
    """Hundreds of events at random; the states that the job was in."""
    dice = Dice(seed)
    job, again = Job(conclude=dicing(seed)), Job(conclude=dicing(seed))
    spec = m.JobSpec(
        name="x",
        nodes_min=2,
        nodes_max=2,
        max_restarts=5,
        mode=dice.choice(("enforce", "enforce", "recommend", "observe")),
    )
    events: list[m.AnyEvent] = [m.ControllerStarted(at=1000.0, epoch=1), m.JobDefined(at=1000.0, spec=spec)]
    for event in events:
        job.handle(event)
    states: set[str] = set()
    for _ in range(400):
        events.append(anything(dice, job, events[-1].at + dice.expovariate(1.0)))
        job.handle(events[-1])
        states.add(job.state)
        job.view()
    for event in events:
        again.handle(event)
    assert again.view() == job.view()
    return states


def test_any_event_in_any_state_is_harmless_and_replays() -> None:
    assert set().union(*map(storm, (*range(40), 246))) == set(TRANSITIONS)


def test_an_invalid_transition_tells_the_story(running: Any) -> None:
    job = running("a").job
    with pytest.raises(InvalidTransition) as failure:
        job.want_handlers[Enter](Enter("IDLE"))
    assert "RUNNING -> IDLE" in str(failure.value)
    assert "attempt 1 starts on 1 node (a)" in str(failure.value)


def test_every_state_but_the_ends_leads_to_an_end() -> None:
    ends = {state for state, following in TRANSITIONS.items() if not following}
    assert {"SUCCEEDED", "FAILED"} <= ends
    for state in set(TRANSITIONS) - ends:
        assert "FAILED" in TRANSITIONS[state]


# ----- the tables of the job -----


SOURCES = sorted(Path(supervisor.job.__file__).parent.glob("*.py"))


def test_every_event_has_a_handler() -> None:
    assert set(Job().event_handlers) == set(get_args(m.AnyEvent))


def test_every_timer_has_a_handler() -> None:
    assert set(Job().timer_handlers) == set(get_args(TimerName))


def test_every_want_has_a_handler() -> None:
    leave_as_they_are = {m.Note, m.SchedulerRequest, m.SchedulerComment, m.LedgerWrite}
    assert set(Job().want_handlers) == {*leave_as_they_are, *Want.__subclasses__()}


def test_every_command_has_a_handler() -> None:
    assert set(Job().operator.commands) == set(get_args(get_type_hints(m.OperatorCommand)["command"]))


def test_every_note_has_a_sentence() -> None:
    told = set()
    for path in SOURCES:
        for call in ast.walk(ast.parse(path.read_text())):
            func = getattr(call, "func", None)
            name = getattr(func, "id", getattr(func, "attr", ""))  # `note(...)` or `record.note(...)`
            if isinstance(call, ast.Call) and name in ("note", "_refuse"):
                told |= {one.value for one in ast.walk(call.args[0]) if isinstance(one, ast.Constant)}
    assert told - {"paused_"} <= set(KINDS)
    assert {f"paused_{state}" for state in ("idle", "starting", "running", "diagnosing", "recovering")} <= set(KINDS)


CLASSES = {
    node.name: node for path in SOURCES for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
}


def _yielding(part: str) -> set[str]:
    """The methods of this class that yield wants."""
    methods = [node for node in CLASSES[part].body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in methods if any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in ast.walk(node))}


@pytest.mark.parametrize("name", CLASSES)
def test_no_want_is_forgotten(name: str) -> None:
    """A method that yields wants does nothing where it is only called: its caller must yield from it."""
    parts = {attribute: type(part).__name__ for attribute, part in vars(Job()).items()}
    for node in ast.walk(CLASSES[name]):
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if call is None or not isinstance(call.func, ast.Attribute):
            continue
        owner = call.func.value
        whose = name if getattr(owner, "id", "") == "self" else parts.get(getattr(owner, "attr", "").lstrip("_"), "")
        lost = whose in CLASSES and call.func.attr in _yielding(whose)
        assert not lost, f"{name}:{node.lineno}: {call.func.attr} is called, and its wants are lost"
