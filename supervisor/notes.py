"""What the job tells people, in words: every sentence of a `Note` is made here, from its kind and its arguments.

The job says `note("node_lost", node="n3", why="...")`. The timeline, the terminal, `why` and the log show `text_of` it;
`unbroken replay` and the tests compare kinds and arguments. So a sentence may become better at any time.

A template is a sentence with `{argument}` in it, formatted as by `str.format`. A tuple is shown as a list of at most 8
names. What stands in [square brackets] is left out where one of its arguments is empty, None or False:

    [; it ends at {at:utc}]    where there is an `at`
    [paused?, which waits]     where `paused` holds
    [!paused?, at once]        where it does not

Formats besides Python's: `utc` and `utcs` (a Unix time, to the minute or the second), `hm` (its time of day), `took`
(seconds), and `#word` (a count: no word, 1 word, 2 words).
"""

from __future__ import annotations

import datetime
import re
import string
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from supervisor.messages import Note, NoteValue

NAMES_SHOWN: Final = 8
PROSE: Final = frozenset({"why", "what", "text", "reason", "how"})
"""Arguments that are sentences themselves: they are shown, and not compared."""


class Kind(NamedTuple):
    template: str
    tells: frozenset[str] = frozenset()
    """Tags of events that a note of this kind tells completely: the event's own line is a detail then."""
    repeats: frozenset[str] = frozenset()
    """Tags of events whose own line says all that this note says: the timeline leaves the note out."""


def _kind(template: str, tells: Iterable[str] = (), repeats: Iterable[str] = ()) -> Kind:
    return Kind(template, frozenset(tells), frozenset(repeats))


KINDS: Final[dict[str, Kind]] = {
    # the controller and its journal
    "controller_restarted": _kind("the controller was started again (epoch {epoch})", tells=["controller_started"]),
    "journal_stalled": _kind(
        "the journal could not be written for {seconds:.0f} s: the job took no decisions in that time"
    ),
    "journal_damaged": _kind(
        "the journal was damaged ([lost?{lost:#record} lost][!lost?nothing is lost]): {what}. The job goes on with the "
        "records that can be read"
    ),
    "acts_again": _kind(
        "all running attempts are known again, and no operator command can be lost: the job acts again"
    ),
    "attempt_adopted": _kind(
        "attempt {attempt} runs, but the journal has no record of its start: the job keeps it running"
    ),
    "command_unrecorded": _kind(
        "{command}: done, but the journal cannot be written now ({why}); the command is recorded as soon as it can be"
    ),
    # nodes
    "node_joined": _kind("{node} ({host}) joined", repeats=["node_joined"]),
    "node_back": _kind("{node} ({host}) is back", tells=["node_joined"]),
    "nodes_lost": _kind("{count} nodes are lost ({nodes}): {why}", tells=["nodes_lost"]),
    "node_lost": _kind("{node} is lost: {why}", tells=["node_lost", "stop_requested"]),
    "spec_differs": _kind(
        "a node was started with different options than the first node; its options are ignored"
        "[ (first difference: {what})]",
        tells=["job_defined"],
    ),
    "nodes_differ": _kind("the nodes differ: {what}[; and {more} more differences (see `unbroken status`)]"),
    "nodes_awaited": _kind("waits for nodes: {found} of {wanted} can be used"),
    "no_room": _kind("{node}: not enough disk space yet: {what}"),
    "room_again": _kind("there is enough disk space again: the run goes on"),
    # attempts
    "attempt_forming": _kind("attempt {attempt} is being formed on {nodes}"),
    "attempt_starts": _kind(
        "[attempt {given_up} never started its ranks; ]"
        "[attempts {given_up_from} to {given_up_to} never started their ranks; ]"
        "attempt {attempt} starts on {count:#node} ({nodes})[; newest good checkpoint: {checkpoint}]"
        "[no_checkpoint?; no good checkpoint was found][, but {gone} was there before: is its file system mounted?]"
    ),
    "snapshot_held": _kind(
        "all ranks of attempt {attempt} hold a snapshot of step {step} in memory, and may start from it"
    ),
    "world_size_differs": _kind(
        "{path} was written by {saved:#rank}, and this attempt has {now}: {format} cannot load it with another number "
        "of data-parallel ranks. Use as many nodes as before, or convert it (DeepSpeed: ds_to_universal.py)"
    ),
    "fewer_processes": _kind(
        "{node} goes on without {gpu} ({reason}): {processes} of its {of} processes[. The attempt has {world:#rank}, "
        "not {full}]. A script that does not fix the global batch trains with a smaller one. "
        "`unbroken uncordon {node}` gives the GPU back, from the next attempt on"
    ),
    "fewer_given_up": _kind("{node} is left out as a whole: {why}. `unbroken uncordon {node}` lets it be used again"),
    "gpu_in_use": _kind(
        "{node} goes on as it is in this attempt. From the next one on it runs {processes} of {of} processes, without "
        "{gpu}, if no spare can take its place (`unbroken restart` starts that now)"
    ),
    "gpu_not_left_out": _kind("{node} cannot go on without one GPU: {why}. It is left out as a whole"),
    "attempt_runs": _kind("attempt {attempt} runs"),
    "replicas_differ": _kind(
        "{what}. No majority of at least three shows which is right. Checkpoints written since the ranks last agreed "
        "are used only if no other is left[.{advice}]"
    ),
    "attempt_delayed": _kind("the next attempt starts in {delay_s:.0f} s"),
    "resume_unknown": _kind("cannot determine the checkpoint to resume from ({why}): the script decides"),
    "resumed_early": _kind("the run resumed at step {step}, although there is a checkpoint of step {expected}"),
    "began_again": _kind(
        "attempt {attempt} started at step {step}, although {path} has step {expected}. The attempt was stopped before "
        "it could overwrite that checkpoint. Tell the script how to resume (`--restart-args`)"
    ),
    "ranks_ended_well": _kind("every rank ended with code 0"),
    "launchers_ended": _kind("every rank has ended, but the launchers have not: they are killed"),
    "job_ended": _kind("{why}", tells=["stop_requested"]),
    # slow and silent ranks
    "hang_suspected": _kind("possible hang: {why}", tells=["hang_suspected"]),
    "hang_cleared": _kind("progress again after {quiet_s:.1f} s[no_hang?: it was not a hang]", tells=["hang_cleared"]),
    "silence": _kind("no progress, but no proof of a hang: {what}. {how}", tells=["silence_seen"]),
    "silence_lasts": _kind("[still?still no progress: ]{what}. {how}", tells=["silence_seen"]),
    "ranks_stopped": _kind(
        "{who} [one?is][!one?are] stopped, and nothing is done about it ({why})", tells=["rank_wake_wanted"]
    ),
    "stragglers": _kind("{what}"),
    "stragglers_gone": _kind("{who} no longer [one?slows][!one?slow] the others down"),
    "input_wait": _kind("{what}"),
    "input_wait_gone": _kind("the ranks wait for data no longer"),
    # alerts from outside
    "alert_fires": _kind(
        "{node}: alert {name} ({failure_class})[gpu?, GPU {gpu}][said?: {said}]", tells=["alerts_seen"]
    ),
    "alert_suspects": _kind(
        "{node}: alert {name} ({failure_class})[gpu?, GPU {gpu}][said?: {said}]. An alert proves nothing: the node is "
        "tested before the next restart, and `unbroken swap {node}` replaces it",
        tells=["alerts_seen"],
    ),
    "alert_ended": _kind("{node}: alert {name} has ended", tells=["alerts_seen"]),
    "alerts_left_out": _kind("more than {most} alerts fire: the others are left out", tells=["alerts_seen"]),
    # active tests
    "suspects_tested": _kind(
        "{nodes} and {partners} test each other before the next attempt, at most {at_most:.0f} s: who is to blame is "
        "not proven"
    ),
    "suspects_known": _kind(
        "active tests ({took_s:.0f} s)[; {failed} failed with two good partners ({why})][; {passed} did well]"
        "[; {between} do well with others, and fail together: look between them][; nobody is named: {unknown}]"
    ),
    "qualify_begins": _kind("{node} makes the {suite} active tests, at most {at_most:.0f} s"),
    "qualify_passed": _kind(
        "{node}: {passed:#active test} passed, none failed[, {unknown} unknown]. `unbroken uncordon {node}` lets this "
        "job use a cordoned node again"
    ),
    "qualify_failed": _kind("{node} failed active tests: {what}. `unbroken cordon {node}` keeps this job off it"),
    "qualify_unknown": _kind("{node} was not tested: {why}"),
    "qualify_absent": _kind("{node} is no node of this job, or is lost: run `unbroken qualify` on the node itself"),
    "qualify_in_use": _kind("{node} runs ranks of attempt {attempt}: only a spare or cordoned node can be tested"),
    "qualify_old": _kind(
        "{node} runs an older unbroken, whose agent makes no tests: run `unbroken qualify` on the node"
    ),
    "qualify_twice": _kind("{node} makes active tests already"),
    # planned swaps
    "swap_planned": _kind(
        "{node} leaves at the next checkpoint[, about {about:hm}]: {why}[ ({seen})][; a swap costs about {cost_s} s]"
        "[; the node costs {percent} % of every step]. `unbroken reject {node}` keeps it, `unbroken swap {node} --now` "
        "does not wait"
    ),
    "swap_recommended": _kind(
        "{node} should leave: {why}[ ({seen})][; a swap costs about {cost_s} s][; the node costs {percent} % of every "
        "step]. It stays[: {because}]. `unbroken swap {node}` replaces it at the next checkpoint"
    ),
    "swap_blocked": _kind("{node} should leave: {why}[ ({seen})]. It stays[: {because}]"),
    "swap_withdrawn": _kind("{node} need not leave any more: {why}"),
    "swap_signal_harms": _kind(
        "the run broke soon after its ranks were asked to save ({signal}), and had not saved. It is not sent again: "
        "the setting swap.signal must name a signal at which all ranks save together"
    ),
    "swap_undone": _kind("{node} is used again, which a planned swap had replaced: too few other nodes are left"),
    "swap_rejected": _kind("{node} stays: {why}"),
    "swap_no_member": _kind("{node} does not train in this attempt: there is nothing to replace"),
    "spare_unwell": _kind(
        "{node} is idle, and not well: {why}[ ({seen})]. It replaces nobody at a checkpoint, and otherwise only where "
        "no other node is left. If it is well: `unbroken uncordon {node}`"
    ),
    "swap_no_spare": _kind(
        "no spare can take the place of {node}. `unbroken cordon {node}` leaves it out of the next attempt"
    ),
    "swap_not_now": _kind("{node} cannot be replaced now ({state}). `unbroken cordon {node}` leaves it out"),
    "device_trains_on": _kind("{incident}: the ranks train on[ (step {step})]"),
    # incidents
    "incident_opened": _kind("{incident}: {what}", tells=["rank_ended", "hang_confirmed", "node_lost"]),
    "incident_grows": _kind("{what}", tells=["rank_ended", "node_lost"]),
    "incident_more": _kind("{incident}: {what}"),
    "incident_goes_on": _kind("{incident}: {what}. {why}"),
    "incident_closed": _kind("{incident} closed: {why}"),
    "evidence_missing": _kind("no evidence from {nodes} in time: the diagnosis goes on without it"),
    "verdict": _kind("{incident}: {failure_class} ({confidence:.0%} sure): {why}"),
    "plan": _kind("{incident}: [observe?would ]{plan}[observe? (mode observe)]: {why}"),
    "left_waiting": _kind(
        "{incident}: nothing more is done[: {why}]. Decide with `unbroken restart` or `unbroken stop`"
    ),
    "plan_waits_paused": _kind("{incident}: the job is paused: nothing is done until `unbroken resume`"),
    "plan_waits": _kind("{incident}: its plan waits for `unbroken approve`"),
    "reviewed": _kind("{incident}: diagnosed again: {failure_class} ({confidence:.0%} sure): {why}; {plan}"),
    "reviewed_plan_stays": _kind(
        "{incident}: diagnosed again: {failure_class} ({confidence:.0%} sure): {why}; the plan stays[: {plan}]"
    ),
    "reviewed_refused": _kind(
        "{incident}: diagnosed again: {failure_class} ({confidence:.0%} sure): {why}; {plan}: not done, {because} "
        "(`unbroken cordon NODE` excludes a node)"
    ),
    "bad_numbers_to_the_end": _kind(
        "{incident}: the loss was NaN or infinite[ from step {from_step}] to the end of the run"
    ),
    "loss_advice": _kind("{incident}: the loss does not come back by itself. {why}"),
    "rolled_back": _kind(
        "back to step {step} ({checkpoint})[: {lost_steps:#step} lost][, about {lost_min} min]"
        "[; {aside:#newer checkpoint} moved aside, `unbroken rollback --undo` puts them back]"
        "[; the next {skip} batches are left out]"
    ),
    "rollback_given_up": _kind(
        "the rollback is given up: no checkpoint that is old enough can be used now. What it moved aside is put back"
    ),
    "rollback_undone": _kind("the rollback is undone: {checkpoints} put back, unless written again since"),
    "recovered": _kind(
        "recovered[ at step {step}] in {took_s:took} s[, {lost_steps:#step} lost] ({incident}: {what}); "
        "[!checkpoint?the script chose what to resume from][offered?the script was offered {checkpoint}]"
        "[resumed?resumed from {checkpoint}][ignored?it did not resume from {checkpoint}]"
    ),
    "held": _kind(
        "the job is held: {why}. Decide with `unbroken resume`, `restart` or `stop`[; without a decision it ends at "
        "{ends_at:utc}]"
    ),
    "cordoned": _kind("cordoned {node}: {reason}"),
    "cluster_cordoned": _kind(
        "{node} is not used: it is cordoned for the cluster: {reason} (by {by})[, until {until:utc}]. "
        "`unbroken uncordon {node} --cluster` gives it back"
    ),
    "cluster_cordon_over": _kind("{node} may be used again: it is no longer cordoned for the cluster"),
    "on_probation": _kind("{node} was repaired: until {until:utc} it is used where no other node is left"),
    "retest_due": _kind("{node} was repaired a day ago, and not tested since: `unbroken qualify` there does it"),
    "lemon_proposed": _kind(
        "{node} fails again and again ({points:g} points: {why}). Nothing is done about it; "
        "`unbroken cordon {node} --cluster` takes it out of use for all jobs"
    ),
    "ledger_cordon": _kind(
        "{node} is cordoned [proposal?in a proposal to all jobs][!proposal?for all jobs of the cluster] in the ledger"
    ),
    "ledger_unreadable": _kind("the ledger of all jobs cannot be used: {why}. What was read of it before holds"),
    "ledger_read": _kind("the ledger of all jobs can be read again"),
    "ledger_unwritable": _kind(
        "nothing can be written to the ledger of all jobs: {why}. What this job finds out is kept until it can be, "
        "or the job ends"
    ),
    "ledger_written": _kind("the ledger of all jobs can be written again"),
    # what is remembered of incidents
    "incident_recurred": _kind("{incident}: {what}"),
    "verdict_corrected": _kind(
        "{incident}: {by} says that it was {failure_class}[ ({why})][; the verdict was {said}]",
        tells=["override_given"],
    ),
    "incident_unknown": _kind("there is no incident {named}, or it is too old to be corrected"),
    "class_unknown": _kind("{why}"),
    "memory_unusable": _kind(
        "the memory of incidents cannot be used: {why}. The job goes on without it, and tries again"
    ),
    "memory_usable": _kind("the memory of incidents can be used again"),
    "cordon_vouched": _kind("{node} is not cordoned: an operator has uncordoned it"),
    # operators
    "command": _kind("operator: {command}[ {argument}][ by {by}][ ({reason})]", repeats=["override_given"]),
    "command_too_late": _kind("{command}: the job has ended already"),
    "ends_by_itself": _kind("every rank has ended with code 0: the job ends as complete within a minute"),
    "nothing_runs_yet": _kind("nothing runs yet: the job waits for {what}"),
    "no_checkpoint": _kind("no good checkpoint is known: there is nothing to go back to"),
    "one_checkpoint": _kind("{checkpoint} is the only good checkpoint: there is none before it"),
    "no_such_step": _kind("no good checkpoint has step {step}; known steps: {steps}"),
    "no_rollback": _kind("no rollback was done, or it is undone already: there is nothing to put back"),
    "needs_a_node": _kind("{command} needs the name of a node"),
    "gpu_not_cordoned": _kind(
        "{place} is not cordoned[. Cordoned on this node: {where} ({why})][!where?, and neither is the node]"
    ),
    "mode_unknown": _kind("unknown mode {mode!r}: observe, recommend or enforce"),
    "nothing_waits_for_approval": _kind("nothing waits for approval[; the job waits for {what}]"),
    "other_incident_waits": _kind("{named} does not wait for approval; {waits} does ({why})"),
    "plan_changed": _kind("the plan for {about} has changed since it was shown: {why}. It is {now} now"),
    "paused_for": _kind(
        "paused: {reason}. Running ranks go on. Look at the job, then decide with `unbroken resume`, `restart` or "
        "`stop`"
    ),
    "paused_idle": _kind("no attempt starts until `unbroken resume`"),
    "paused_starting": _kind(
        "the attempt that is starting may finish its start. Until `unbroken resume`, later failures are recorded, but "
        "nothing is restarted"
    ),
    "paused_running": _kind(
        "the ranks go on. Until `unbroken resume`, failures are recorded, but nothing is restarted"
    ),
    "paused_diagnosing": _kind("the diagnosis is completed; no recovery starts until `unbroken resume`"),
    "paused_recovering": _kind("no attempt starts until `unbroken resume`"),
    "paused_already": _kind("the job was already paused, since {at:utcs}[ by {by}]"),
    "nothing_paused": _kind("the job is neither paused nor held"),
    "room_doubted": _kind("the next attempt starts, although there may not be enough disk space"),
    "breaker_reset": _kind("the circuit breaker is reset: policy may cordon nodes again"),
    "approval_awaited": _kind("{about} waits for `unbroken approve` or `reject` ({plan}: {why})"),
    "first_attempt_waits": _kind("the first attempt starts as soon as it can; it waits for {what}"),
    "node_unknown": _kind("the job has no node {node}; if it joins, it is not used"),
    "node_in_use": _kind(
        "{node} goes on working in this attempt and is left out of the next (`unbroken restart` starts that now)"
    ),
    "not_cordoned": _kind("{argument} was not cordoned. Nothing known so far will get it cordoned"),
    "still_left_out": _kind(
        "{node} is still not used: {place} is cordoned ({reason})[cluster?, for all jobs: `unbroken uncordon {node} "
        "--cluster` gives it back]"
    ),
    "plan_needs_approval": _kind("the waiting plan is carried out only after `unbroken approve`"),
    "restart_completes": _kind("the restart that has begun is completed; after that the job only watches"),
    "trace_asked": _kind(
        "rank[many?s] {ranks} [many?are][!many?is] asked [input?what the workers of the data loader do]"
        "[!input?for a trace of {steps:#step}]"
    ),
    "trace_unclear": _kind("a trace of what? {argument!r} is not what `unbroken trace` sends"),
    "trace_nothing_runs": _kind("no attempt runs: there is nothing to trace"),
    "trace_not_allowed": _kind(
        "the job was not started with `unbroken run --traceable`: its ranks cannot be asked for traces"
    ),
    "trace_no_rank": _kind("the attempt has no rank {ranks}"),
    # the scheduler
    "scheduler_says": _kind("{scheduler}: {text}"),
    "nodes_kept": _kind("{scheduler} may keep the nodes of this job allocated: {text}"),
    "request_given_up": _kind(
        "{what}, and the job [paused?was paused when it ended][!paused?has ended]: a person has to do that now"
        "[ ({reason})]"
    ),
    "request_unknown_node": _kind("{node} was never one of the job's nodes: {scheduler} is not told"),
    "drain_asked": _kind("{scheduler} is asked to drain {node}[paused? after `unbroken resume`] ({reason})"),
    "undrain_asked": _kind("{scheduler} is asked to give {node} back"),
    "request_unanswered": _kind(
        "{scheduler} does not answer: the request to [drain?drain {node}][!drain?give {node} back] is repeated ({text})"
    ),
    "request_done": _kind("{scheduler}: [drain?drain {node}][!drain?give {node} back]: {outcome}"),
    "request_refused": _kind(
        "{scheduler} does not [drain?drain {node}][!drain?give {node} back]: {why} ({text})"
        "[drain?; only this job stops using it][root?, and root's programs on the node are asked to drain it]"
        "[nobody?, and no agent is on the node to leave a request for root's programs]"
    ),
    "requeued": _kind(
        "{scheduler} has started the job again (restart {requeues})"
        "[: {by} asked for it, because the first node, {lost}, was lost]",
        tells=["job_requeued"],
    ),
    "requeue_planned": _kind("{scheduler} is asked to start the job again if no node comes within {wait_s:.0f} s"),
    "requeue_asked": _kind(
        "{found} of {wanted} nodes can be used and no spare is left: {scheduler} is asked to start the job again"
        "[ without {exclude}][both?,][ without {avoid} where there are enough others]"
    ),
    "requeue_later": _kind("{scheduler} cannot start the job again yet ({text}); it is asked again later"),
    "requeue_refused": _kind("{scheduler} does not start the job again: {why}"),
    "requeue_happens": _kind("{what}"),
    "requeue_taken_back": _kind(
        "{scheduler} was already asked to start the job again: it is now asked to cancel the job"
    ),
    "requeue_cancelled": _kind("{scheduler}: {text}: the job does not start again"),
    "requeue_not_cancelled": _kind("{scheduler} does not cancel the job: {why}; cancel it there, or it starts again"),
}

_REPORTED: Final = frozenset().union(*(kind.tells | kind.repeats for kind in KINDS.values()))
_GROUP = re.compile(r"\[(?:(!?)(\w+)\?)?([^\[\]]*)\]")
_FIELD = re.compile(r"\{(\w+)")


def note(
    kind: str,
    *,
    incident: str = "",
    loud: bool = False,
    refused: bool = False,
    unknown_node: bool = False,
    **arguments: NoteValue,
) -> Note:
    """A note of this kind. Raises KeyError where there is no such kind."""
    KINDS[kind]
    return Note(
        kind=kind, arguments=arguments, incident=incident, loud=loud, refused=refused, unknown_node=unknown_node
    )


def text_of(note: Note, behind_id: bool = False) -> str:
    """The note in words; never raises. `behind_id`: it is printed after its incident's id, and does not repeat the id.

    A note of a journal from before there were kinds has its text.
    """
    if not note.kind:
        return _without_id(note.text, note.incident) if behind_id and note.incident else note.text
    kind = KINDS.get(note.kind)
    if kind is None:  # of a newer version
        told = ", ".join(f"{name} {_formatted(value, '')}" for name, value in note.arguments.items())
        return f"{note.kind.replace('_', ' ')}: {told}" if told else note.kind.replace("_", " ")
    template = kind.template
    if behind_id and note.incident:
        template = template.removeprefix("{incident}: ").removeprefix("{incident} ")
    text = _filled(template, {**note.arguments, "incident": note.incident})
    return text.replace(f"({note.incident}: ", "(") if behind_id and note.incident else text


def same(one: Note, other: Note) -> bool:
    """Whether two notes tell the same, in whatever words. Of one without a kind only what it is about is known."""
    if (one.incident, one.loud, one.refused, one.unknown_node) != (
        other.incident,
        other.loud,
        other.refused,
        other.unknown_node,
    ):
        return False
    return not (one.kind and other.kind) or (one.kind == other.kind and _facts(one) == _facts(other))


def tells(note: Note, event: str) -> bool:
    """Whether a note on an event of this tag tells all of it.

    A note of a journal from before there were kinds stands for its event wherever notes of today do.
    """
    if not note.kind:
        return event in _REPORTED
    kind = KINDS.get(note.kind)
    return kind is not None and event in kind.tells


def repeats(note: Note, event: str) -> bool:
    """Whether a note on an event of this tag says nothing that the event does not."""
    kind = KINDS.get(note.kind)
    return kind is not None and event in kind.repeats


def _facts(note: Note) -> dict[str, NoteValue]:
    return {name: value for name, value in note.arguments.items() if name not in PROSE}


class _Formatter(string.Formatter):
    """An argument of the wrong type for its format is shown as it is; a missing one as nothing."""

    def get_value(self, key: int | str, args: Any, kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002
        value = kwargs.get(str(key))
        return "" if value is None else value

    def format_field(self, value: Any, format_spec: str) -> str:
        try:
            return _formatted(value, format_spec)
        except (TypeError, ValueError, OverflowError, OSError):
            return str(value)


def _formatted(value: Any, form: str) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value[:NAMES_SHOWN])) + (", ..." if len(value) > NAMES_SHOWN else "")
    if form in ("utc", "utcs"):
        at = datetime.datetime.fromtimestamp(value, tz=datetime.timezone.utc)
        return f"{at:%Y-%m-%d %H:%M} UTC" if form == "utc" else f"{at:%Y-%m-%d %H:%M:%S} UTC"
    if form == "hm":
        return f"{datetime.datetime.fromtimestamp(value, tz=datetime.timezone.utc):%H:%M} UTC"
    if form == "took":
        return f"{value:.{1 if value < 100 else 0}f}"
    if form.startswith("#"):
        return f"{value or 'no'} {form[1:]}{'s' if value > 1 else ''}"
    return format(value, form)


_fill = _Formatter().vformat


def _filled(template: str, arguments: Mapping[str, NoteValue]) -> str:
    def group(match: re.Match[str]) -> str:
        negated, flag, text = match.groups()
        if flag is not None:
            return text if _is_empty(arguments.get(flag)) is bool(negated) else ""
        return text if all(not _is_empty(arguments.get(name)) for name in _FIELD.findall(text)) else ""

    return _fill(_GROUP.sub(group, template), (), arguments)


def _is_empty(value: NoteValue) -> bool:
    return value is None or value is False or value in ("", ())


def _without_id(text: str, incident: str) -> str:
    return text.removeprefix(f"{incident}: ").removeprefix(f"{incident} ").replace(f"({incident}: ", "(")
