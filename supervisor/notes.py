"""What the job tells people, in words: every sentence of a `Note` is made here, from its kind and its arguments.

The job says `note("node_lost", node="n3", why="...")`. The timeline, the terminal, `why` and the log show `text_of` it;
`unbroken replay` and the tests compare kinds and arguments. So a sentence may become better at any time.

A template is a sentence with `{argument}` in it, formatted as by `str.format`. What stands in [square brackets] is left
out where one of its arguments is empty, None or False. A tuple is shown as a list of at most 8 names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from supervisor.messages import Note, NoteValue

NAMES_SHOWN: Final = 8
PROSE: Final = frozenset({"why", "what", "text", "reason", "how"})
"""Arguments that are sentences themselves: they are shown, and not compared."""


class Kind(NamedTuple):
    template: str
    tells: frozenset[str] = frozenset()
    """Events (by their tag) of which a note of this kind tells everything: their own line is a detail then."""
    repeats: frozenset[str] = frozenset()
    """Events whose own line says all that this note says: the note is not shown in the timeline."""


def _kind(template: str, tells: Iterable[str] = (), repeats: Iterable[str] = ()) -> Kind:
    return Kind(template, frozenset(tells), frozenset(repeats))


KINDS: Final[dict[str, Kind]] = {
    # the controller and its journal
    "controller_restarted": _kind("the controller was started again (epoch {epoch})", tells=["controller_started"]),
    "journal_stalled": _kind(
        "the journal could not be written for {seconds:.0f} s: nothing was done by itself meanwhile"
    ),
    "journal_damaged": _kind("the journal was damaged ({lost}): {what}. What is whole counts"),
    "acts_again": _kind("what runs is known again, and no operator's word can be lost: the job acts again"),
    "attempt_adopted": _kind("attempt {attempt} runs, and the journal does not tell of its start: it goes on as it is"),
    "command_unrecorded": _kind(
        "{command}: done although the journal cannot be written now ({why}): it is recorded when that is possible again"
    ),
    # nodes
    "node_joined": _kind("{node} ({host}) joined", repeats=["node_joined"]),
    "node_back": _kind("{node} ({host}) is back", tells=["node_joined"]),
    "nodes_lost": _kind("{count} nodes are lost ({nodes}): {why}", tells=["nodes_lost"]),
    "node_lost": _kind("{node} is lost: {why}", tells=["node_lost", "stop_requested"]),
    "spec_differs": _kind("a node asks for something else than the first one did: the first one's word holds"),
    "nodes_differ": _kind("the nodes are not the same: {what}[; and {more} more differences (unbroken status)]"),
    "nodes_awaited": _kind("waits for nodes: {found} of {wanted} can be used"),
    "no_room": _kind("{node}: no room yet: {what}"),
    "room_again": _kind("there is room on disks again: the run goes on"),
    # attempts
    "attempt_forming": _kind("attempt {attempt} is being formed on {nodes}"),
    "attempt_starts": _kind("attempt {attempt} starts on {size} ({nodes}){what}"),
    "attempt_runs": _kind("attempt {attempt} runs"),
    "attempt_delayed": _kind("waits {delay_s:.0f} s before the next attempt"),
    "resume_unknown": _kind("which checkpoint to resume from could not be worked out ({why}): the script decides"),
    "resumed_early": _kind("the run goes on at step {step}, before the checkpoint of step {expected}"),
    "began_again": _kind(
        "attempt {attempt} began again at step {step}, although {path} holds step {expected}: stopped before that is "
        "overwritten. Tell the script how to resume (`--restart-args`)"
    ),
    "ranks_ended_well": _kind("every rank ended with code 0"),
    "launchers_ended": _kind("launchers do not end although every rank did: they are ended"),
    "job_ended": _kind("{why}"),
    # slow and silent ranks
    "hang_suspected": _kind("a hang is suspected: {why}", tells=["hang_suspected"]),
    "hang_cleared": _kind("progress again after {quiet_s:.1f} s[: it was no {suspected}]", tells=["hang_cleared"]),
    "silence": _kind("no progress, and no proof of a hang: {what}; {how}", tells=["silence_seen"]),
    "silence_lasts": _kind("[{still} ]{what}; {how}", tells=["silence_seen"]),
    "ranks_stopped": _kind("{who} stopped; left alone ({why})", tells=["rank_wake_wanted"]),
    "stragglers": _kind("{what}"),
    "stragglers_gone": _kind("{who} nobody up any more"),
    # incidents
    "incident_opened": _kind("{incident}: {what}", tells=["rank_ended", "hang_confirmed", "node_lost"]),
    "incident_grows": _kind("{what}", tells=["rank_ended", "node_lost"]),
    "incident_more": _kind("{incident}: {what}"),
    "incident_goes_on": _kind("{incident}: {what}. {why}"),
    "incident_closed": _kind("{incident} closed: {why}"),
    "evidence_missing": _kind("concludes without the evidence of {nodes}: its time is up"),
    "verdict": _kind("{incident}: {failure_class} ({confidence:.0%} sure): {why}"),
    "plan": _kind("{incident}: [would {observed} (mode observe)][{kind}]: {why}"),
    "left_waiting": _kind("{incident}: left waiting[: {why}] (`unbroken restart`, `stop`)"),
    "plan_waits_paused": _kind("{incident}: paused: nothing is done until `unbroken resume`"),
    "plan_waits": _kind("{incident}: waits for `unbroken approve`"),
    "reviewed": _kind("{incident}: looked at again: {what}"),
    "recovered": _kind("{what}"),
    "held": _kind(
        "held: {why}. Go on with `unbroken resume`, `restart` or `stop`[; it ends at {ends} UTC if nobody does]"
    ),
    "cordoned": _kind("cordoned {node}: {reason}"),
    "cordon_vouched": _kind("{node} is not cordoned: an operator said that it may be used"),
    # operators
    "command": _kind("operator: {command}[ {argument}][ by {by}][ ({reason})]", repeats=["override_given"]),
    "refused": _kind("{why}"),
    "paused_for": _kind("paused: {reason}. What runs goes on; look, then `unbroken resume`, `restart` or `stop`"),
    "paused": _kind("{what}"),
    "paused_already": _kind("it was paused already, since {since} UTC[ by {by}]"),
    "nothing_paused": _kind("nothing was paused or held"),
    "room_doubted": _kind("the next attempt starts although there may be no room"),
    "breaker_reset": _kind("the circuit breaker starts anew: policy may cordon again"),
    "approval_awaited": _kind("{incident} waits for `unbroken approve` or `reject` ({plan}: {why})"),
    "first_attempt_waits": _kind("the first attempt starts as soon as it can; it waits for {what}"),
    "node_unknown": _kind("the job knows no node {node}: it is left out if it comes"),
    "node_in_use": _kind("{node} is in use: it is left out from the next attempt on (`unbroken restart`: now)"),
    "not_cordoned": _kind("{argument} was not cordoned; policy will not cordon it for what is known so far"),
    "still_left_out": _kind("{node} is still left out: {place} is cordoned ({reason})"),
    "plan_needs_approval": _kind("the plan that waits is not carried out without `unbroken approve`"),
    "restart_completes": _kind("the restart that has begun is completed; after that nothing is done by itself"),
    # the scheduler
    "scheduler_says": _kind("{scheduler}: {text}"),
    "nodes_kept": _kind("{scheduler} may keep the nodes: {text}"),
    "request_given_up": _kind("{what}"),
    "request_unknown_node": _kind("{node} was never one of the job's nodes: {scheduler} is not told"),
    "drain_asked": _kind("{scheduler} is asked to drain {node}[ after `unbroken {after}`] ({reason})"),
    "undrain_asked": _kind("{scheduler} is asked to give {node} back"),
    "request_unanswered": _kind("{scheduler} does not answer: it is asked again to {request} ({text})"),
    "request_done": _kind("{scheduler}: {request}: {outcome}"),
    "request_refused": _kind("{scheduler} does not {request}: {why} ({text}){what}"),
    "requeued": _kind(
        "{scheduler} has started the job again (restart {requeues})"
        "[: {by} asked for it, for the first node, {lost}, was lost]",
        tells=["job_requeued"],
    ),
    "requeue_planned": _kind("{scheduler} is asked to start the job again if no node comes within {wait_s:.0f} s"),
    "requeue_asked": _kind(
        "{found} of {wanted} nodes can be used and no spare is left: "
        "{scheduler} is asked to start the job again[ {what}]"
    ),
    "requeue_later": _kind("{scheduler} cannot start the job again yet, and is asked again: {text}"),
    "requeue_refused": _kind("{scheduler} does not start the job again: {why}"),
    "requeue_happens": _kind("{what}"),
    "requeue_taken_back": _kind("{scheduler} was asked already to start the job again: it is asked to cancel it"),
    "requeue_cancelled": _kind("{scheduler}: {text}: it does not come back"),
    "requeue_not_cancelled": _kind("{scheduler} does not cancel the job: {why}; cancel it there, or it starts again"),
}

_GROUP = re.compile(r"\[([^\[\]]*)\]")
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
    """The note in words; never raises. `behind_id`: it is shown behind its incident's id, and does not repeat that.

    A note of a journal from before there were kinds has its text.
    """
    if not note.kind:
        return _without_id(note.text, note.incident) if behind_id and note.incident else note.text
    kind = KINDS.get(note.kind)
    if kind is None:  # of a newer version
        told = ", ".join(f"{name} {_shown(value)}" for name, value in note.arguments.items())
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
    """Whether a note on an event of this tag tells all of it."""
    kind = KINDS.get(note.kind)
    return kind is not None and event in kind.tells


def repeats(note: Note, event: str) -> bool:
    """Whether a note on an event of this tag says nothing that the event does not."""
    kind = KINDS.get(note.kind)
    return kind is not None and event in kind.repeats


def _facts(note: Note) -> dict[str, NoteValue]:
    return {name: value for name, value in note.arguments.items() if name not in PROSE}


def _filled(template: str, arguments: Mapping[str, NoteValue]) -> str:
    def group(match: re.Match[str]) -> str:
        return match[1] if all(not _is_empty(arguments.get(name)) for name in _FIELD.findall(match[1])) else ""

    chosen = _GROUP.sub(group, template)
    known = {name: _shown(arguments.get(name)) for name in _FIELD.findall(chosen)}
    try:
        return chosen.format(**known)
    except ValueError:  # a number was expected and is none
        return re.sub(r"\{(\w+)[^}]*\}", lambda match: str(known[match[1]]), chosen)


def _is_empty(value: NoteValue) -> bool:
    return value is None or value is False or value in ("", ())


def _shown(value: NoteValue) -> str | int | float:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ", ".join(map(str, value[:NAMES_SHOWN])) + (", ..." if len(value) > NAMES_SHOWN else "")
    return value


def _without_id(text: str, incident: str) -> str:
    return text.removeprefix(f"{incident}: ").removeprefix(f"{incident} ").replace(f"({incident}: ", "(")
