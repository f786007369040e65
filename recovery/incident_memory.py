"""What is remembered of an incident once it is over, over all jobs that share a store, and when one has come back.

Pure; `recovery.incident_store` keeps the records. What is remembered informs and decides nothing: no verdict and no
plan of a job reads it. A record has only what is shown of an incident anyway: evidence that is cleaned, redacted and
cut. What is read was written by others: it is cleaned again.

For who looks for past cases like a text (BM25): `IncidentStore(folder).similar(text, limit)`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis.incident import Verdict
from diagnosis.signals import Frozen, clean_line
from diagnosis.taxonomy import TAXONOMY, FailureClass

DAY_S: Final = 86400.0
WINDOW_S: Final = 90 * DAY_S
"""What is older is no recurrence."""
NAME_LIMIT: Final = 128
TEXT_LIMIT: Final = 500
EVIDENCE_KEPT: Final = 10
PLACES_KEPT: Final = 16
"""Culprits of one incident, and files of data in its evidence."""
CORRECTIONS_KEPT: Final = 20
RECURRENCES_SHOWN: Final = 3
LEAST_PART: Final = 3
LEAST_WORDS: Final = 3
"""Evidence with fewer words is like that of many other incidents (`Killed`)."""


class Correction(Frozen, frozen=True, kw_only=True):
    """What an operator says that an incident was. The newest holds; those before it are kept."""

    failure_class: str
    note: str = ""
    by: str = ""
    uid: int | None = None
    """The user, where that is proven."""
    at: float


class ClosedIncident(Frozen, frozen=True, kw_only=True):
    """One incident as it is remembered. Times are Unix seconds."""

    job: str
    """Its name; many jobs may have it."""
    job_id: str
    """Of this one job, its lives included."""
    incident: str
    opened_at: float
    closed_at: float | None = None
    attempt: int = 0
    step: int | None = None
    trigger: str = ""
    what: str = ""
    """What was seen first."""
    failure_class: str = ""
    """The verdict's; empty: there was none."""
    confidence: float = 0.0
    why: str = ""
    action: str = ""
    """What the verdict asks for."""
    nodes: tuple[str, ...] = ()
    """Culprits."""
    gpus: tuple[str, ...] = ()
    """Culprits; `NODE/GPU`, or a UUID."""
    ranks: tuple[int, ...] = ()
    """Culprits."""
    evidence: tuple[str, ...] = ()
    """Lines, the most telling first."""
    fingerprint: str = ""
    """The same for evidence that says the same, whatever the numbers and hosts in it."""
    plan: str = ""
    """Its kind, and why."""
    cordoned: tuple[str, ...] = ()
    outcome: str = ""
    """How it was closed."""
    next_attempt: int | None = None
    lost_s: float = 0.0
    corrections: tuple[Correction, ...] = ()
    """Oldest first."""

    @property
    def truth(self) -> str:
        """The class that an operator gave, else the verdict's."""
        return self.corrections[-1].failure_class if self.corrections else self.failure_class

    @property
    def text(self) -> str:
        """All that is searched."""
        notes = (one.note for one in self.corrections)
        return "\n".join((self.truth, self.what, self.why, *self.evidence, *notes))


class SimilarIncident(NamedTuple):
    """A past case, and how well it fits: more is better; only figures of one search compare."""

    incident: ClosedIncident
    score: float


RecurrenceOf = Literal["gpu", "node", "data", "step", "evidence"]


class PastIncident(Frozen, frozen=True, kw_only=True):
    """As much of an earlier incident as is told with a new one."""

    job: str
    incident: str
    at: float
    failure_class: str = ""
    done: str = ""
    """What was done about it, in words."""
    note: str = ""
    """An operator's."""
    by: str = ""
    """Whose note it is."""


class Recurrence(Frozen, frozen=True, kw_only=True):
    """An incident has something in common with earlier ones."""

    of: RecurrenceOf
    name: str = ""
    """The node, GPU, file or step."""
    times: int
    """With this one."""
    since_at: float
    """When the first of them was opened."""
    last: PastIncident
    text: str = ""
    """All of it in words."""


LATEST_AT: Final = 1e11
"""Later times than this (the year 5138) cannot be shown."""


def read_record(raw: bytes) -> ClosedIncident | None:
    """A record of the store, with text that may be shown; None: it is none."""
    try:
        found = _RECORD.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError):  # TypeError: a number in its place
        return None
    times = (found.opened_at, found.closed_at or 0.0, *(one.at for one in found.corrections))
    return bounded(found) if all(0.0 <= at < LATEST_AT for at in times) else None


_RECORD: Final = msgspec.json.Decoder(ClosedIncident)
_NAMES: Final = ("job", "job_id", "incident", "trigger", "failure_class", "action", "fingerprint")
_TEXTS: Final = ("what", "why", "plan", "outcome")


def bounded(one: ClosedIncident) -> ClosedIncident:
    """The same, cleaned and cut."""
    fields: dict[str, object] = {name: clean_line(getattr(one, name), NAME_LIMIT).strip() for name in _NAMES}
    fields |= {name: clean_line(getattr(one, name), TEXT_LIMIT) for name in _TEXTS}
    fields |= {
        name: tuple(clean_line(text, NAME_LIMIT).strip() for text in getattr(one, name)[:PLACES_KEPT])
        for name in ("nodes", "gpus", "cordoned")
    }
    return msgspec.structs.replace(
        one,
        **fields,
        ranks=one.ranks[:PLACES_KEPT],
        evidence=tuple(clean_line(text, TEXT_LIMIT) for text in one.evidence[:EVIDENCE_KEPT]),
        corrections=tuple(map(bounded_correction, one.corrections[-CORRECTIONS_KEPT:])),
    )


def bounded_correction(one: Correction) -> Correction:
    """The same, cleaned and cut."""
    failure_class, by = clean_line(one.failure_class, NAME_LIMIT), clean_line(one.by, NAME_LIMIT)
    return msgspec.structs.replace(one, failure_class=failure_class, by=by, note=clean_line(one.note, TEXT_LIMIT))


def corrected(one: ClosedIncident, more: Iterable[Correction]) -> ClosedIncident:
    """With these corrections besides its own; one that is there already counts once."""
    every = {msgspec.json.encode(found): found for found in (*one.corrections, *more)}
    in_order = sorted(every.values(), key=lambda found: found.at)
    return msgspec.structs.replace(one, corrections=tuple(in_order[-CORRECTIONS_KEPT:]))


# ----- fingerprints -----

_TIMES: Final = re.compile(r"\b(?:mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)\b")
_FOLDER: Final = re.compile(r"(?:(?<=[\s'\"=(,:])|^)(?:/[^\s/'\":,)]{1,255}){1,64}/")
_HEX: Final = re.compile(r"\b(?:0x[0-9a-f]+|(?=[a-f]*\d)[0-9a-f]{7,}(?:-[0-9a-f]{4,}){0,5})\b")
_NUMBER: Final = re.compile(r"\d+(?:[.:,]\d+)*")
_WORD: Final = re.compile(r"[a-z]{3,}")


def normalised(line: str, names: Iterable[str] = ()) -> str:
    """`line` without what differs from one time to the next: numbers, addresses, dates, folders, and these hosts."""
    text = line.lower()
    there = {low for one in names if len(one) > 1 and (low := one.lower()) in text}  # of thousands
    for name in sorted(there, key=len, reverse=True):
        text = re.sub(rf"(?<![a-z0-9_-]){re.escape(name)}(?![a-z0-9_-])", "host", text)
    text = _FOLDER.sub("", _TIMES.sub("", text))
    return " ".join(_NUMBER.sub("#", _HEX.sub("#", text)).split())


def fingerprint(verdict: Verdict, hosts: Iterable[str] = ()) -> str:
    """Of the most telling piece of evidence; empty where that says too little."""
    text = normalised(verdict.evidence[0].text if verdict.evidence else verdict.why, hosts)
    if len(_WORD.findall(text)) < LEAST_WORDS:
        return ""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


# ----- recurrence -----

_PLACELESS: Final = frozenset({"user", "framework", "numerics", "scheduler", "none"})
"""Domains of classes that say nothing against the node on which they happen."""
_DATA: Final = re.compile(
    r"(?:[^\s'\",:()\[\]=]{0,200}/)?([\w.@+-]{1,120}\.(?:parquet|arrow|tar|jsonl|npy|npz|bin|idx|mds|tfrecord|h5|hdf5"
    r"|webdataset|feather|zst|lmdb))(?![\w.])"
)
Place = tuple[RecurrenceOf, str]


def places(one: ClosedIncident) -> tuple[Place, ...]:
    """What two incidents have in common where one is the other's recurrence, the most telling first."""
    classes = {entry.value: entry for entry in FailureClass}
    known = classes.get(one.truth)
    domain = TAXONOMY[known].domain if known is not None else "unknown"
    if not one.truth or domain in ("none", "scheduler"):
        return ()
    found: list[Place] = []
    if domain not in _PLACELESS:
        found += [("gpu", name) for name in one.gpus]
        found += [("node", name) for name in one.nodes]
    found += [("data", name) for name in _data_files(one.evidence)]
    if one.step is not None:
        found.append(("step", f"{one.job} {one.step} {one.truth}"))
    if one.fingerprint:
        found.append(("evidence", one.fingerprint))
    return tuple(dict.fromkeys(found))


def _data_files(lines: Iterable[str]) -> Iterator[str]:
    named = dict.fromkeys(name for line in lines for name in _DATA.findall(line))
    yield from list(named)[:PLACES_KEPT]


def recurrence(of: Place, one: ClosedIncident, times: int, since_at: float, last: ClosedIncident) -> Recurrence:
    """`times` and `since_at` with `one`; `last`: the newest of those before it."""
    kind, name = of
    name = str(one.step) if kind == "step" else "" if kind == "evidence" else name
    noted = next((each for each in reversed(last.corrections) if each.note), None)
    past = PastIncident(
        job=last.job,
        incident=last.incident,
        at=last.opened_at,
        failure_class=last.truth,
        done=done(last),
        note=noted.note if noted is not None else "",
        by=noted.by if noted is not None else "",
    )
    found = Recurrence(of=kind, name=name, times=times, since_at=since_at, last=past)
    return msgspec.structs.replace(found, text=_recurrence_text(found, one))


def done(one: ClosedIncident) -> str:
    """What was done about it, in words."""
    cordoned = f"{', '.join(one.cordoned[:4])} cordoned" if one.cordoned else ""
    started = f"attempt {one.next_attempt} started" if one.next_attempt is not None else ""
    return ", ".join(filter(None, (cordoned, started))) or one.outcome


def unknown_class(name: str) -> str:
    """Why this is the name of no failure class, with those that are like it; empty: it is one."""
    known = [one.value for one in FailureClass]
    if name in known:
        return ""
    parts = [one for one in known if len(name) >= LEAST_PART and (name.lower() in one)]
    near = list(dict.fromkeys([*parts, *difflib.get_close_matches(name.lower(), known, n=4, cutoff=0.5)]))[:4]
    like = f"near it are {', '.join(near)}" if near else "none is like it"
    return f"there is no failure class {clean_line(name, 60)!r}: {like} (all of them: unbroken docs taxonomy)"


_ORDINALS: Final = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_COMMON: Final[dict[RecurrenceOf, str]] = {
    "gpu": "on GPU {}",
    "node": "on node {}",
    "data": "with the file {}",
    "step": "at step {} of this job",
    "evidence": "with the same evidence",
}


def _recurrence_text(one: Recurrence, now: ClosedIncident) -> str:
    """In words: `third incident on node n7 in 9 days; last one ...`. Of a node, GPU or file they may be of other
    classes; only the same step and the same evidence are another time of the same."""
    number = _ORDINALS[one.times - 2] if 2 <= one.times < len(_ORDINALS) + 2 else f"{one.times}th"
    last = one.last
    what, before = ("time", "last time") if one.of in ("step", "evidence") else ("incident", "last one")
    text = f"{number} {what} {_COMMON[one.of].format(one.name)} in {age(now.opened_at - one.since_at)}; {before} "
    text += f"({last.job} {last.incident}, {age(now.opened_at - last.at)} ago, {last.failure_class or '?'})"
    text += f": {last.done}" if last.done else ""
    return text + (f"; {last.note} (note by {last.by or 'an operator'})" if last.note else "")


def age(seconds: float) -> str:
    """`9 days`."""
    for size, name in ((DAY_S, "day"), (3600.0, "hour"), (60.0, "minute")):
        if seconds >= 2 * size or (size == 60.0):
            number = max(1, round(seconds / size))
            return f"{number} {name}{'s' * (number != 1)}"
    raise AssertionError
