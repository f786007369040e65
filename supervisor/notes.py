"""What the job tells people, in words: every sentence of a `Note` is made here, from its kind and its arguments.

`sentences.toml` has a template for each kind, and for events.

The job says `note("node_lost", node="n3", why="...")`. The timeline, the terminal, `why` and the log show `text_of` it;
`unbroken replay` and the tests compare kinds and arguments. So a sentence may become better at any time.

A template is a sentence with `{argument}` in it, formatted as by `str.format`. A tuple is shown as a list of at most 8
names. What stands in [square brackets] is left out where one of its arguments is empty, None or False:

    [; it ends at {at:utc}]    where there is an `at`
    [paused?, which waits]     where `paused` holds
    [!paused?, at once]        where it does not

Formats besides Python's: `utc` and `utcs` (a Unix time, to the minute or the second), `hm` (its time of day), `took`
(seconds), `#word` (a count: no word, 1 word, 2 words) and `ranks` (`rank 3`, `ranks 0 to 7`).
"""

from __future__ import annotations

import datetime
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from diagnosis.tables import load
from supervisor.messages import AnyEvent, Note, NoteValue

NAMES_SHOWN: Final = 8
PROSE: Final = frozenset({"why", "what", "text", "reason", "how"})
"""Arguments that are sentences themselves: they are shown, and not compared."""


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `sentences.toml`."""

    text: str
    tells: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()
    detail: bool = False


def _kinds(table: str) -> dict[str, Kind]:
    rows = load("supervisor", "sentences.toml")[table]
    return {name: msgspec.convert({"text": row} if isinstance(row, str) else row, Kind) for name, row in rows.items()}


KINDS: Final = _kinds("notes")
EVENTS: Final = _kinds("events")
_REPORTED: Final = frozenset(tag for kind in KINDS.values() for tag in kind.tells + kind.repeats)
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
    template = kind.text
    if behind_id and note.incident:
        template = template.removeprefix("{incident}: ").removeprefix("{incident} ")
    text = _filled(template, {**note.arguments, "incident": note.incident})
    return text.replace(f"({note.incident}: ", "(") if behind_id and note.incident else text


def event_text(event: AnyEvent) -> tuple[str, bool] | None:
    """An event in a sentence, and whether it is a detail; None: there is no template for it."""
    kind = EVENTS.get(str(event.__struct_config__.tag))
    return (_filled(kind.text, msgspec.structs.asdict(event)), kind.detail) if kind is not None else None


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
    if form == "ranks":
        return _ranks(value)
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


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 7`, `ranks 1, 4`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return "ranks " + ", ".join(map(str, ordered[:16])) + (" ..." if len(ordered) > 16 else "")


_fill = _Formatter().vformat


def _filled(template: str, arguments: Mapping[str, Any]) -> str:
    def group(match: re.Match[str]) -> str:
        negated, flag, text = match.groups()
        if flag is not None:
            return text if _is_empty(arguments.get(flag)) is bool(negated) else ""
        return text if all(not _is_empty(arguments.get(name)) for name in _FIELD.findall(text)) else ""

    return _fill(_GROUP.sub(group, template), (), arguments)


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", ())


def _without_id(text: str, incident: str) -> str:
    return text.removeprefix(f"{incident}: ").removeprefix(f"{incident} ").replace(f"({incident}: ", "(")
