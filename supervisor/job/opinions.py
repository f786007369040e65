"""Which incidents a language model is asked about, and what came of it. Nothing that decides reads any of it."""

from __future__ import annotations

from typing import Final

from diagnosis.incident import Opinion
from diagnosis.taxonomy import FailureClass
from supervisor.job.casebook import Case, Casebook
from supervisor.messages import OpinionWanted

AGAIN: Final = 8
"""So many of the newest a new controller asks about anew: as many as may wait (`supervisor.opinion.queue`)."""


def newly_wanted(cases: Casebook, below: float, is_over: bool) -> list[OpinionWanted]:
    """About verdicts less sure than `below`, and failures that got none: an operator or the job's end came first.

    To be called after each event; each incident is decided on once. A false alarm is nobody's riddle.
    """
    found: list[OpinionWanted] = []
    for case in reversed(cases.cases):
        if case.opinion_decided:
            break  # those before it were, too
        moved_on = case.next_attempt is not None or case.plan is not None or is_over
        if case.verdict is None and case.closed_at is None and not moved_on:
            continue
        case.opinion_decided = True
        verdict = case.verdict
        unsure = verdict.confidence < below if verdict is not None else moved_on and case.trigger != "signal"
        if unsure and below > 0.0 and case.opinion is None:
            case.opinion_wanted = True
            found.append(OpinionWanted(incident=case.id))
    return found


def wanted_again(cases: Casebook) -> list[OpinionWanted]:
    """What was asked of the controller before this one, and not answered."""
    waiting = [case.id for case in cases.cases if case.opinion_wanted]
    return [OpinionWanted(incident=name) for name in waiting[-AGAIN:]]


def arrived(case: Case, opinion: Opinion) -> None:
    """A try that failed stands beside the opinion that there is, and does not replace it."""
    case.opinions += 1
    case.opinion_wanted = False
    if opinion.problem and case.opinion is not None and not case.opinion.problem:
        case.opinion_failed = opinion
    else:
        case.opinion, case.opinion_failed = opinion, None


def lost(cases: Casebook) -> None:
    """The controller goes with the job: nobody is left to hear an answer."""
    for case in cases.cases:
        if case.opinion_wanted:
            why = f"the job ended before it came: `unbroken why {case.id} --ask` asks now"
            arrived(case, Opinion(failure_class=FailureClass.UNKNOWN, problem=why))
