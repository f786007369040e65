"""What an operator's order would do, found out by giving it to a copy of the job: the one that the journal makes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from supervisor.messages import Action, Note, OverrideGiven, SchedulerOrder
from supervisor.notes import text_of

if TYPE_CHECKING:
    from supervisor.job.attempt import Attempt
    from supervisor.job.job import Job

NAMES_TOLD = 8


def would(where: Path, order: OverrideGiven) -> dict[str, Any]:
    """The answer to `--dry-run`: what `order` would do to the job of this folder now. Raises OSError.

    Nothing is written and nobody is told.
    """
    from supervisor.controller.report import fold

    job = fold(where).job
    attempt, over, waiting = job.attempt, job.is_over, job.waiting
    live = attempt is not None and not attempt.over and not over and _starts_or_runs(job)
    before = frozenset(attempt.members) if attempt is not None else frozenset()
    state, drains = job.state, dict(job.scheduler.drains)
    line = (
        f"would send `{' '.join(filter(None, (order.command, order.argument)))}` to job {job.spec.name}, "
        f"which is {state} in attempt {attempt.number if attempt is not None else 0}{', paused' if job.paused else ''}"
    )
    actions = job.handle(order)
    refused = "; ".join(text_of(action) for action in actions if isinstance(action, Note) and action.refused)
    sentences = [f"refused: {refused}"] if refused else _consequences(job, attempt, live, over, waiting, actions)
    after = frozenset(job.attempt.members) if job.attempt is not None else frozenset()
    interrupts = live and (job.attempt is not attempt or (job.is_over and not over))
    return {
        "schema": 1,
        "would": "\n".join([line, *(sentences or ["nothing would change at once"])]),
        "command": order.command,
        "argument": order.argument,
        "state": state,
        "refused": bool(refused),
        "unknown_node": any(action.unknown_node for action in actions if isinstance(action, Note)),
        "interrupts": interrupts,
        "drains": sorted(name for name, told in job.scheduler.drains.items() if drains.get(name) != told),
        "attempt": job.attempt.number if job.attempt is not None and job.attempt is not attempt else None,
        "leave": sorted(before - after),
        "join": sorted(after - before),
        "scheduler": [
            {"kind": one.kind, "node": one.node, "reason": one.reason, "exclude": list(one.exclude)}
            for one in actions
            if isinstance(one, SchedulerOrder)
        ],
    }


def _starts_or_runs(job: Job) -> bool:
    return job.state in ("STARTING", "RUNNING", "DIAGNOSING")


def _consequences(
    job: Job, attempt: Attempt | None, live: bool, over: bool, waiting: str, actions: list[Action]
) -> list[str]:
    """In sentences, the worst first."""
    told: list[str] = []
    new = job.attempt if job.attempt is not attempt else None
    if live and attempt is not None and (new is not None or (job.is_over and not over)):
        ranks = sum(map(len, attempt.ranks.values()))
        told.append(f"attempt {attempt.number} would be stopped ({ranks} ranks on {_names(attempt.members)})")
    if job.outcome is not None and not over:
        told.append(f"the job would end: {job.outcome.line} (exit code {job.outcome.exit_code})")
    elif new is not None:
        told += _next_attempt(job, attempt, new)
    if job.waiting and job.waiting != waiting:
        told.append(f"the job would wait for: {job.waiting}")
    for action in actions:
        if isinstance(action, SchedulerOrder):
            about = action.node or (
                f"start the job again without {_names(action.exclude)}" if action.kind == "requeue" else "the job"
            )
            reason = f" ({action.reason})" if action.reason else ""
            told.append(f"{job.spec.scheduler} would be told: {action.kind} {about}{reason}")
    if not told:  # what the job itself says, but for the line that repeats the order
        told += [text_of(action) for action in actions[1:] if isinstance(action, Note)]
    return told


def _next_attempt(job: Job, old: Attempt | None, new: Attempt) -> list[str]:
    starts = "would start" if job.state == "STARTING" else "would be next,"
    told = [f"attempt {new.number} {starts} on {_names(new.members) or 'no node yet'}{new.resume_text}"]
    if old is not None:
        left = [name for name in old.members if name not in new.members]
        told += [f"{_names(left)} would leave the run"] if left else []
        came = [name for name in new.members if name not in old.members]
        told += [f"{_names(came)} would join it"] if came else []
    told += [f"{len(new.prepare)} checkpoints would be moved aside or restored"] if new.prepare else []
    return told


def _names(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:NAMES_TOLD]) + (", ..." if len(names) > NAMES_TOLD else "")
