"""What is told about a job, as plain JSON values: from a live controller or from its journal afterwards.

Every object carries `"schema": 1`; docs/protocol.md lists the fields. Nothing is left out when it is empty.
"""

from __future__ import annotations

import datetime
import enum
import functools
import heapq
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from diagnosis.incident import Verdict
from diagnosis.signals import RankSample, rank_names
from diagnosis.taxonomy import TAXONOMY
from recovery.snapshot_choice import one_world
from supervisor import messages as m
from supervisor.controller import corrections
from supervisor.controller.journal import Decided, History, Record, digest_of, read_history, steps
from supervisor.job.advice import JobAdvice, advice_of, measured
from supervisor.job.view import input_text, slow_text
from supervisor.notes import event_text, repeats, same, tells, text_of
from supervisor.view import rfc3339, utc

if TYPE_CHECKING:
    from supervisor.controller.loop import ControlLoop
    from supervisor.job.attempts import Attempt
    from supervisor.job.job import Job
    from supervisor.view import CurveView, IncidentView, JobView, RestartView, StoryLine

# ----- dry runs -----


SCHEMA = 1
TIMES = {"at", "until", "modified_at", "since_at"}
"""Fields that hold Unix seconds in the core and are shown as times."""


def plain(value: object) -> Any:
    """`value` as JSON types with every field, empty ones too (not unset ones); times are RFC 3339 in UTC."""
    if isinstance(value, msgspec.Struct):
        content = {name: getattr(value, name) for name in value.__struct_fields__}
        fields = {name: _field(name, one) for name, one in content.items() if one is not msgspec.UNSET}
        if isinstance(value, Verdict):
            entry = TAXONOMY[value.failure_class]
            fields |= {"kind": entry.kind, "domain": entry.domain}
        return fields
    if isinstance(value, datetime.datetime):
        return rfc3339(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _field(name: str, value: object) -> Any:
    return rfc3339(value) if name in TIMES and isinstance(value, float) else plain(value)


# ----- a job's state -----


class Folded(NamedTuple):
    """A job as its journal tells it."""

    job: Job
    history: History
    failures: list[str]
    """Events on which the job failed, in words."""


def fold(where: Path) -> Folded:
    """Replay the journals of a job folder, or one journal file, through the job. Raises OSError."""
    from supervisor.config import use_begun_rules
    from supervisor.job.job import Job

    history = read_history(where)
    use_begun_rules(where if where.is_dir() else where.parent)
    job = Job()
    failures: list[str] = []
    for step in steps(history.records):
        try:
            job.handle(step.event)
        except Exception as error:
            failures.append(f"event {step.seq}: {type(error).__name__}: {error}")
    if where.is_dir():
        corrections.apply(where, job)
    return Folded(job, history, failures)


STORY_SHOWN = 30
RANKS_SHOWN = 64


def status_of(
    view: JobView,
    controller: dict[str, object] | None,
    advice: JobAdvice | None = None,
    story: Iterable[StoryLine] = (),
) -> dict[str, Any]:
    """`unbroken status --json`; `controller` is None when none answers (the journal was read instead)."""
    status: dict[str, Any] = plain(view)
    incidents = view.incidents
    status["incidents"] = [_brief(incident) for incident in incidents[-5:]]
    status["controller"] = controller
    status["advice"] = _worth_telling(advice)
    status["story"] = plain(list(story)[-STORY_SHOWN:])
    status["ranks"] = []
    return status


def rank_rows(samples: Sequence[tuple[str, RankSample, float]], now: float) -> list[dict[str, Any]]:
    """What each rank does; of many, those that have ended, stand or are behind."""

    def trouble(one: tuple[str, RankSample, float]) -> tuple[bool, bool, int, float]:
        sample = one[1]
        fine = sample.stopped_s is None and (sample.exit is None or not sample.exit.failed)
        return fine, sample.step is None, sample.step or 0, one[2] - sample.moved_age_s

    chosen = heapq.nsmallest(RANKS_SHOWN, samples, key=trouble) if len(samples) > RANKS_SHOWN else samples
    return [
        {
            "rank": sample.rank,
            "node": node,
            "step": sample.step,
            "quiet_s": None if sample.exit is not None else round(max(0.0, now - heard_at + sample.moved_age_s), 1),
            "text": _doing(sample),
        }
        for node, sample, heard_at in sorted(chosen, key=lambda one: one[1].rank)
    ]


def _doing(sample: RankSample) -> str:
    if sample.exit is not None:
        return sample.exit.how.removeprefix("was ") + (", by unbroken" if sample.exit.stopped_by_us else "")
    if sample.stopped_s is not None:
        return "stopped"
    if sample.waiting_s is not None:
        return "waits in a collective"
    return sample.phase


def _worth_telling(told: JobAdvice | None) -> dict[str, Any] | None:
    if told is None or not told.matters or told.advice is None:
        return None
    return {
        "interval_s": told.advice.interval_s,
        "interval_now_s": told.measured.interval_s,
        "gain": told.advice.gain,
        "gpu_hours_a_day": told.advice.gpu_hours_a_day,
        "on_gpus": told.measured.on_gpus,
    }


def job_advice(job: Job, now: float) -> JobAdvice:
    """What the job's own figures say of its saves and spares at `now`."""
    return advice_of(measured(job, now))


def advice_answer(name: str, told: JobAdvice) -> dict[str, Any]:
    """`unbroken advise --json`."""
    return {"schema": SCHEMA, "job": name, **plain(told)}


def _brief(incident: IncidentView) -> dict[str, Any]:
    verdict = incident.verdict
    return {
        "id": incident.id,
        "opened_at": rfc3339(incident.opened_at),
        "open": incident.closed_at is None,
        "failure_class": verdict.failure_class.value if verdict is not None else None,
        "why": verdict.why if verdict is not None else incident.what,
    }


def incidents_of(view: JobView) -> dict[str, Any]:
    """`unbroken incidents --json`."""
    return {
        "schema": SCHEMA,
        "job": view.name,
        "total": view.incidents_total,
        "incidents": [plain(incident) for incident in view.incidents],
    }


def curve_of(name: str, curve: CurveView) -> dict[str, Any]:
    """Steps and loss of the whole job (`/v1/curve`)."""
    return {"schema": SCHEMA, "job": name, **plain(curve)}


def live_view(name: str, loop: ControlLoop) -> Callable[[], dict[str, object]]:
    """What the endpoints `healthz`, `status`, `incidents`, `curve` and `advice` of a running controller answer.

    What is read is read now; to make the answer of it takes longer, and may be done in a thread.
    """
    agents, stall, epoch = list(loop.connections), loop.stall, loop.epoch
    if name == "health":
        return lambda: {"schema": SCHEMA, "ok": not stall, "epoch": epoch, "journal": stall or "ok"}
    job, now = loop.job, loop.clock.now()
    if name == "advice":
        return functools.partial(advice_answer, job.spec.name, loop.advice.of(job, now))
    if name == "curve":
        return functools.partial(curve_of, job.spec.name, job.curve.view())
    newest, held = loop.watch.newest, loop.watch.snapshot
    view: JobView = job.view(now, None if held is None else one_world(held))
    if newest.attempt == view.attempt:
        # The job hears of a step every 10 s, which is journalled; readers see the newest heartbeat's.
        loss = view.loss if newest.loss is None else newest.loss
        view = msgspec.structs.replace(view, counted=max(view.counted, newest.counted), loss=loss)
        if newest.step is not None and newest.step > (-1 if view.step is None else view.step):
            view = msgspec.structs.replace(view, step=newest.step, last_step=newest.last_step, step_from="output")
        if view.step is not None and newest.counted_step is not None and newest.counted_step >= view.step:
            view = msgspec.structs.replace(view, step=newest.counted_step, step_from="clock")
        view = msgspec.structs.replace(view, restart=_counted_to(view.step, view.restart))
    if name == "incidents":
        return lambda: incidents_of(view)
    if stall and newest.attempt == view.attempt and newest.broken and view.state == "RUNNING":
        # What is decided is in the journal first; that nothing trains any more is to be seen all the same.
        waiting = f"the journal, which cannot be written ({stall}): a rank has ended, and nothing is decided before"
        view = msgspec.structs.replace(view, state="DIAGNOSING", waiting=waiting)
    advice = loop.advice.of(job, now)
    offsets = {name: connection.clock_offset_s for name, connection in loop.connections.items()}
    story, samples = list(job.story)[-STORY_SHOWN:], loop.watch.rank_samples()

    def status() -> dict[str, object]:
        told = status_of(view, {"epoch": epoch, "agents": sorted(agents), "journal": stall or "ok"}, advice, story)
        told["ranks"] = rank_rows(samples, now)
        if held is not None:
            written_at = rfc3339(utc(held.at))
            told["snapshot"] = {"attempt": held.attempt, "step": held.step, "ranks": held.world, "at": written_at}
        for node in told["nodes"]:
            node["clock_offset_s"] = offsets.get(node["node"])
        return told

    return status


def _counted_to(step: int | None, restart: RestartView | None) -> RestartView | None:
    """What a restart would lose, counted to the step that is shown: the job was told of an older one."""
    if step is None or restart is None:
        return restart
    loses = restart.loses_steps
    if restart.step is not None:
        loses = max(0, step - restart.step)
    elif loses is not None:
        loses = step
    after = _counted_to(step, restart.after_node_loss)
    return msgspec.structs.replace(restart, loses_steps=loses, after_node_loss=after)


# ----- the timeline -----


def timeline_rows(history: History) -> list[dict[str, Any]]:
    """One row for each event and each note of the job: seq, at, epoch, kind, text, incident, loud, detail."""
    rows: list[dict[str, Any]] = []
    for step in steps(history.records):
        text, detail = tell(step.event)
        row = {
            "seq": step.seq,
            "at": rfc3339(step.event.at),
            "epoch": step.epoch,
            "kind": step.event.__struct_config__.tag,
            "text": text,
            "incident": "",
            "loud": False,
            "detail": detail,
        }
        rows.append(row)
        notes = [one for one in step.decided.actions if isinstance(one, m.Note)] if step.decided is not None else []
        judged = step.decided is not None and row["kind"] in _JUDGED
        row["detail"] = detail or judged or any(tells(note, str(row["kind"])) for note in notes)
        for note in notes:
            if not repeats(note, str(row["kind"])):
                text = text_of(note, behind_id=True)
                text = f"refused: {text}" if note.refused else text
                told = {"kind": "note", "text": text, "incident": note.incident, "loud": note.loud}
                rows.append({**row, **told, "detail": False})
        if step.decided is not None and step.decided.error:
            rows.append(
                {
                    **row,
                    "kind": "failure",
                    "text": f"an error in unbroken itself: {step.decided.error}",
                    "detail": False,
                }
            )
    return rows


_JUDGED = frozenset({"hang_suspected", "hang_confirmed", "silence_seen"})
"""Events that the job tells of in notes of its own, or leaves alone: their own line is a detail once it has decided."""


def tell(event: m.AnyEvent) -> tuple[str, bool]:
    """The event in a sentence, and whether it is a detail that most readers do not need."""
    return event_text(event) or _tell(event)


def _tell(event: m.AnyEvent) -> tuple[str, bool]:
    """Those of which a template cannot tell."""
    match event:
        case m.JobDefined():
            return f"job {event.spec.name}: {' '.join(event.spec.command)[:200]}", False
        case m.NodesLost():
            return f"{len(event.nodes)} nodes lost: silent for {event.silent_s:.1f} s", False
        case m.NodeQuiet():
            return f"{event.node} {'misses heartbeats' if event.silent_s else 'is heard again'}", True
        case m.Progressed():
            told = f"attempt {event.attempt}: step {'?' if event.step is None else event.step}"
            return (f"{told} is the first one seen", False) if event.first else (told, True)
        case m.RankEnded(exit=end):
            how = f"was killed by signal {end.signal}" if end.signal is not None else f"ended with code {end.code}"
            return f"rank {end.rank} on {event.node} {how}{' (by unbroken)' if end.stopped_by_us else ''}", False
        case m.EvidenceArrived(evidence=found):
            kind = "crash evidence" if found.request == 0 else f"evidence {found.request}"
            return f"{kind} of {found.node} arrived ({found.took_s:.2f} s to collect)", True
        case m.FindingArrived(finding=finding):
            text = f"{event.node}: {finding.failure_class.value}: {finding.evidence.text}"
            return text, finding.severity == "warning"
        case m.FindingsArrived(first=finding):
            many = event.end - event.number
            text = f"{event.node}: {many} findings, the first {finding.failure_class.value}: {finding.evidence.text}"
            return text, all(one.severity == "warning" for one in event.findings)
        case m.LossSeen(alarm=alarm) if alarm is not None:
            since = "" if alarm.step is None else f" since step {alarm.step}"
            return f"the loss of {rank_names(event.ranks)} has gone wrong ({alarm.kind}){since}", True
        case m.ReplicasDiffer():
            who = f"not on {rank_names(event.odd)}" if event.odd else "on no majority of them"
            return f"replicas at step {event.step}: the same {who}", False
        case _:
            return _detail(event), True


def _detail(event: m.AnyEvent) -> str:
    match event:
        case m.PaceLearned():
            learned = ", ".join(f"{phase} {longest:.1f} s" for phase, longest in event.longest_s.items())
            return f"longest pauses of a healthy run: {learned}"
        case m.CheckpointsSeen(checkpoints=seen):
            return f"checkpoint {seen[0].path}" if seen else "no checkpoint"
        case m.StragglersSeen():
            return slow_text(event) if event.ranks else "no rank slows the others down any more"
        case m.InputWaitSeen():
            return input_text(event) if event.ranks else "the ranks wait for data no longer"
        case m.SpaceSeen():
            return f"{event.node}: {'; '.join(event.full) or 'there is enough disk space'}"
        case m.LossSeen():
            return "the loss is well again"
        case m.VersionsCompared():
            return "; ".join(one.text for one in event.differences) or "all nodes are the same"
        case m.OpinionArrived(opinion=told):
            return f"a model on {event.incident}: {told.problem or told.failure_class.value}"
        case m.IncidentRecurred():
            return f"{event.incident}: {'; '.join(one.text for one in event.recurrences) or 'no recurrence'}"
        case _:
            return str(event.__struct_config__.tag).replace("_", " ")


# ----- replay -----


class DecisionDifference(NamedTuple):
    """An event on which the job decides now what it did not decide then."""

    seq: int
    text: str
    then: list[Any]
    now: list[Any]


def differences(history: History) -> tuple[int, list[DecisionDifference]]:
    """Feed the events through a new job: how many there were, and where the decisions differ from the journal's.

    Events whose decisions their controller did not live to write are not compared.
    """
    from supervisor.job.job import Job

    job = Job()
    last = _last_decided(history.records)
    count = 0
    found: list[DecisionDifference] = []
    for step in steps(history.records, history.problems):
        count += 1
        error = ""
        try:
            actions = tuple(job.handle(step.event))
        except Exception as failure:
            actions, error = (), f"{type(failure).__name__}: {failure}"[:500]
        if step.seq > last.get(step.epoch, 0):
            continue
        then = step.decided or Decided(of=step.seq)
        if not _decided_alike(then, actions) or _failure(then.error) != _failure(error):
            found.append(
                DecisionDifference(
                    step.seq, tell(step.event)[0], _wanted(then.actions, then.error), _wanted(actions, error)
                )
            )
    return count, found


def _decided_alike(then: Decided, now: Sequence[m.Action]) -> bool:
    """Whether the same was decided, in whatever words."""
    if len(then.actions) != len(now):
        return False
    return all(_alike(one, other) for one, other in zip(then.actions, now, strict=True))


def _failure(error: str) -> str:
    """The exception's name."""
    return error.partition(":")[0]


def _alike(then: m.Action, now: m.Action) -> bool:
    if isinstance(then, m.Note) and isinstance(now, m.Note):
        return same(then, now)
    if isinstance(then, m.Assign) and isinstance(now, m.Assign):
        one, other = _round(then.assignment.round), _round(now.assignment.round)
        known = one is not None and other is not None and one.names and other.names
        if not known:  # an older journal names the nodes only once a decision
            one, other = (_unnamed(one), _unnamed(other))
        if one != other:
            return False
    return m.encode(_without_words(then)) == m.encode(_without_words(now))


def _round(given: m.Round | None) -> m.Round | None:
    """With the digest of its names, however the journal has it."""
    if given is None:
        return None
    names = given.names or (digest_of(given.nodes) if given.nodes else "")
    return m.Round(
        attempt=given.attempt,
        store_host=given.store_host,
        store_port=given.store_port,
        names=names,
        snapshot=given.snapshot,
    )


def _unnamed(given: m.Round | None) -> m.Round | None:
    return msgspec.structs.replace(given, names="") if given is not None else None


def _without_words(action: m.Action) -> m.Action:
    """Without the words that are only for people."""
    replace = msgspec.structs.replace
    match action:
        case m.Assign():
            given = action.assignment
            notices = tuple((number, "") for number, _ in given.notices)
            outcome = _bare(given.outcome) if given.outcome is not None else None
            bare = replace(
                given, round=None, notices=notices, outcome=outcome, drain_request="x" if given.drain_request else ""
            )
            return m.Assign(assignment=bare)
        case m.SchedulerRequest():
            return replace(action, reason="")
        case m.SchedulerComment():
            return replace(action, text="")
        case m.End():
            return m.End(outcome=_bare(action.outcome))
        case _:
            return action


def _bare(outcome: m.Outcome) -> m.Outcome:
    return msgspec.structs.replace(outcome, line="", first_failure="")


def _wanted(actions: Sequence[object], error: str) -> list[Any]:
    return [msgspec.to_builtins(action) for action in actions] + ([{"error": error}] if error else [])


def _last_decided(records: Sequence[Record]) -> dict[int, int]:
    """For each controller's life (epoch) the last event whose decision it lived to write down."""
    last: dict[int, int] = {}
    for record in records:
        if record.kind == "decided":
            try:
                last[record.epoch] = max(last.get(record.epoch, 0), msgspec.json.decode(record.body, type=Decided).of)
            except msgspec.ValidationError:
                continue
    return last


NAMES_SHOWN = 8
REPEATED = frozenset({"rolled_back", "rollback_undone"})
"""Notes that a dry run repeats as they are."""


def dry_run(where: Path, command: m.OperatorCommand) -> dict[str, Any]:
    """The answer to `--dry-run`: what `command` would do to the job of this folder now. Raises OSError.

    Nothing is written and nobody is told.
    """

    job = fold(where).job
    attempt, over, waiting = job.attempt, job.is_over, job.waiting
    live = attempt is not None and not attempt.over and not over and _starts_or_runs(job)
    before = frozenset(attempt.members) if attempt is not None else frozenset()
    state, drains, to_drain = job.state, dict(job.scheduler.drains), job.swaps.to_drain
    line = (
        f"would send `{' '.join(filter(None, (command.command, command.argument)))}` to job {job.spec.name}, "
        f"which is {state} in attempt {attempt.number if attempt is not None else 0}{', paused' if job.paused else ''}"
    )
    actions = job.handle(command)
    refused = "; ".join(text_of(action) for action in actions if isinstance(action, m.Note) and action.refused)
    sentences = [f"refused: {refused}"] if refused else _consequences(job, attempt, live, over, waiting, actions)
    after = frozenset(job.attempt.members) if job.attempt is not None else frozenset()
    asked_now = {name for name, told in job.scheduler.drains.items() if drains.get(name) != told}
    interrupts = live and (job.attempt is not attempt or (job.is_over and not over))
    return {
        "schema": 1,
        "would": "\n".join([line, *(sentences or ["nothing would change at once"])]),
        "command": command.command,
        "argument": command.argument,
        "state": state,
        "refused": bool(refused),
        "unknown_node": any(action.unknown_node for action in actions if isinstance(action, m.Note)),
        "interrupts": interrupts,
        "drains": sorted(asked_now | (job.swaps.to_drain - to_drain)),
        "attempt": job.attempt.number if job.attempt is not None and job.attempt is not attempt else None,
        "leave": sorted(before - after),
        "join": sorted(after - before),
        "scheduler": [
            {"kind": one.kind, "node": one.node, "reason": one.reason, "exclude": list(one.exclude)}
            for one in actions
            if isinstance(one, m.SchedulerRequest)
        ],
    }


def _starts_or_runs(job: Job) -> bool:
    return job.state in ("STARTING", "RUNNING", "DIAGNOSING")


def _consequences(
    job: Job, attempt: Attempt | None, live: bool, over: bool, waiting: str, actions: list[m.Action]
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
    told += [text_of(one) for one in actions if isinstance(one, m.Note) and one.kind in REPEATED]
    for action in actions:
        if isinstance(action, m.SchedulerRequest):
            about = action.node or (
                f"start the job again without {_names(action.exclude)}" if action.kind == "requeue" else "the job"
            )
            reason = f" ({action.reason})" if action.reason else ""
            told.append(f"{job.spec.scheduler} would be asked: {action.kind} {about}{reason}")
    if not told:  # what the job itself says, but for the line that repeats the command
        told += [text_of(action) for action in actions[1:] if isinstance(action, m.Note)]
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
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
