"""Whom the words of old logs blame, where no account and no finding tells: phrases (`named.toml`) near the evidence.

A phrase says that something failed, and names it: `Rank 1 crashed`, `error on DIMM_A1`, `server nfs2 not responding`.
The name of who waits, of who reports, or of who was asked to end is no such phrase. Nothing here is read for a live
job, and the action of the verdict stays what it was.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from diagnosis.incident import Candidate, Culprit, LogSummary, Verdict
from diagnosis.tables import load
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.text import redact

LINES_BEFORE: Final = 4
LINES_AFTER: Final = 12
"""So many lines around the evidence may name the culprit."""
MAX_LISTED: Final = 16
MAX_EVERY: Final = 4
"""Of more that are named one by one none is to blame."""
MAX_NAME: Final = 200
_FIELDS: Final = ("rank", "gpu", "node")
_WORDS: Final = {
    "RANKS": r"\d{1,6}\b(?:,? (?:and )?\d{1,6}\b){0,31}",
    "PATH": r"(?:~|\.{1,2})?/[^\s'\":;,<>()\x00]{2,400}",
}


class Phrase(NamedTuple):
    """A row of the table, compiled."""

    kind: str
    pattern: re.Pattern[str]
    """The group that matched is the name."""
    classes: frozenset[FailureClass]
    every: bool
    heading: bool
    speaker: bool

    def names(self, line: str) -> list[str]:
        """What a line names by it, each once."""
        found = (match[match.lastgroup] for match in self.pattern.finditer(line) if match.lastgroup)
        return [one for one in dict.fromkeys(found) if one not in _NOBODY]


@functools.cache
def phrases() -> list[Phrase]:
    """Compiled when the first old log is read."""
    table = load("diagnosis.verdict", "named.toml")
    return [
        Phrase(
            kind=row["kind"],
            pattern=re.compile(functools.reduce(lambda text, word: text.replace(*word), _WORDS.items(), row["regex"])),
            classes=frozenset(one for word in row["classes"] for one in _classes(word, table["of"])),
            every=row.get("every", False),
            heading=row.get("heading", False),
            speaker=row.get("speaker", False),
        )
        for row in table["phrase"]
    ]


def _classes(word: str, groups: dict[str, Any]) -> Iterator[FailureClass]:
    """Of a group, a domain (but where the word is a class), or a class."""
    members = groups.get(word) or [one.value for one, entry in TAXONOMY.items() if entry.domain == word != "unknown"]
    if members:
        yield from (one for member in members if member != word for one in _classes(member, groups))
    else:
        yield FailureClass(word)


_MET: Final = ("device", "dimm", "disk", "file", "module", "parameter", "pid", "server")
"""Kinds that say more about a culprit that is known: what the rank could not read, what the node lacks."""
_LINK_DOWN: Final = re.compile(r"(?i)\blink (?:is )?down\b")
_OF_REPORT: Final = re.compile(r"\s|$|[A-Z][\w /-]{0,40}:(?:\s|$)")
"""A line of a report below its heading: indented, or `Key: value`."""
_NOBODY: Final = ("localhost", "127.0.0.1", "0.0.0.0")
_NUMBER: Final = re.compile(r"(?<=task:)\d+|(?<![\w:/])\d+")
_LISTED: Final = re.compile(
    r"^(?P<reason>\S[^\n]{0,200}?)\s{1,40}\S{1,32}\s{1,12}\d{4}-\d\d-\d\dT[\d:]{8}\s{1,12}"
    r"(?P<node>[A-Za-z][\w.,\[\]-]{0,120})\s*$|^(?P<kube>[a-z0-9][\w.-]{0,120}) +(?P<state>NotReady)\b"
)
"""A row of `sinfo -R` (reason, user, time, nodes) or of `kubectl get nodes`."""
_BACK: Final = r"(?i: (?:is )?(?:OK|up|back|reachable)\b)"
"""What is said of a server that answers again."""


def with_named(found: Verdict, best: Candidate, logs: Sequence[LogSummary]) -> Verdict:
    """The verdict on old logs, with the culprits that their words name. `best`: its reading."""
    if found.failure_class is FailureClass.NONE or best.is_of_all or len(found.culprits) > 1:
        return found
    known = next(iter(found.culprits), None)
    if found.failure_class is FailureClass.NODE_FAILURE and known is not None and known.node and known.rank is None:
        return msgspec.structs.replace(found, culprits=_listed(known, best, logs))
    named, instead = _culprits(found.failure_class, best, logs)
    if known is not None and instead and named and named[0].node:  # a link has two ends, and it may be either
        named = () if any(map(_LINK_DOWN.search, (one.text for one in found.evidence))) else (known, *named)
    if named and (known is None or instead):
        return msgspec.structs.replace(found, culprits=named)
    if known is None or len(named) != 1 or named[0].kind not in _MET:
        return found
    more = msgspec.structs.replace(known, kind=named[0].kind, name=named[0].name)
    return msgspec.structs.replace(found, culprits=(more,))


_HOSTS: Final = re.compile(
    r"(?P<stem>[A-Za-z][\w.-]{0,80}?)"
    r"(?:\[(?P<numbers>\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?){0,100})\](?P<end>[\w.-]{0,80}))?(?:,|$)"
)


def nodes_of(text: str, most: int = MAX_EVERY) -> list[str]:
    """The nodes of a list as Slurm writes it (`a1,k[07-08,11]`); empty: these are more."""
    found: list[str] = []
    for hosts in _HOSTS.finditer(text):
        stem, end = hosts["stem"], hosts["end"] or ""
        for part in (hosts["numbers"] or "").split(","):
            first, _, last = part.partition("-")
            if not first:
                found.append(stem)
                continue
            if int(last or first) - int(first) >= most or len(found) > most:
                return []
            numbers = range(int(first), int(last or first) + 1)
            found += [f"{stem}{one:0{len(first)}d}{end}" for one in numbers]
    return found if len(found) <= most else []


def with_single_nodes(found: Verdict) -> Verdict:
    """The verdict with each node of a list by itself; a list of many nodes is no culprit."""
    if not any("[" in one.node or "," in one.node for one in found.culprits):
        return found
    culprits: list[Culprit] = []
    for one in found.culprits:
        if "[" not in one.node and "," not in one.node:
            culprits.append(one)
            continue
        nodes = nodes_of(one.node)
        culprits += [msgspec.structs.replace(one, node=node) for node in nodes]
        if not nodes and (one.rank is not None or one.gpu or one.name):
            culprits.append(msgspec.structs.replace(one, node=""))
    return msgspec.structs.replace(found, culprits=tuple(culprits)[:MAX_LISTED])


class _Lines(NamedTuple):
    near: list[str]
    """The evidence, the lines from it on, and the lines before it."""
    above: list[str]
    """The lines of the file up to it, the last first."""
    end: list[str]
    """The end of the file."""


def _lines(best: Candidate, logs: Sequence[LogSummary], is_unknown: bool) -> _Lines:
    near: list[str] = [one.text for one in best.evidence]
    above: list[str] = []
    end: list[str] = []
    for log in logs:
        if not best.evidence or log.source == best.evidence[0].source:
            line = best.evidence[0].line if best.evidence else None
            at = (line or 0) - 1 - (log.lines - len(log.tail))
            end += log.tail
            above += log.tail[at::-1] if at >= 0 else ()
            near += [*log.tail[at : at + LINES_AFTER + 1], *above[1 : LINES_BEFORE + 1]] if at >= 0 else ()
    near += end[::-1] if is_unknown else ()  # the last word counts: a list of who is missing gets shorter
    return _Lines(near, above, end or near)


def _culprits(
    failure_class: FailureClass, best: Candidate, logs: Sequence[LogSummary]
) -> tuple[tuple[Culprit, ...], bool]:
    """Who is named, and whether instead of who speaks."""
    lines = _lines(best, logs, failure_class is FailureClass.UNKNOWN)
    told: dict[str, list[str]] = {}
    kinds: dict[str, Phrase] = {}
    for phrase in phrases():
        field = phrase.kind if phrase.kind in _FIELDS else "name"
        if failure_class not in phrase.classes or field in told:
            continue
        names = _every(phrase, lines.end) if phrase.every else _first(phrase, lines.near)
        names = _heading(phrase, lines.above) if phrase.heading else names
        if phrase.kind == "server":
            names = [one for one in names if not any(re.search(re.escape(one) + _BACK, line) for line in lines.near)]
        if names:
            told[field], kinds[field] = [redact(one)[:MAX_NAME] for one in names], phrase
    if "rank" in told:
        ranks = dict.fromkeys(int(number) for name in told["rank"] for number in _NUMBER.findall(name))
        return tuple(Culprit(rank=rank) for rank in list(ranks)[:MAX_LISTED]), kinds["rank"].speaker
    count = max(map(len, told.values()), default=0)
    if not count:
        return (), False
    found = []
    for at in range(count):
        one = {field: names[at] for field, names in told.items() if at < len(names)}
        name = {"kind": kinds["name"].kind, "name": one["name"].replace(" ON ", " on ")} if "name" in one else {}
        found.append(msgspec.convert({field: one[field] for field in ("gpu", "node") if field in one} | name, Culprit))
    return tuple(found), "node" in kinds and kinds["node"].speaker


def _first(phrase: Phrase, lines: Iterable[str]) -> list[str]:
    """What the first line names by it; nothing where it names several, because one of them may be a victim."""
    names = next(filter(None, map(phrase.names, lines)), [])
    return names if len(names) == 1 else []


def _heading(phrase: Phrase, above: Iterable[str]) -> list[str]:
    """What the line names above which the report on it begins: of the lines between, each belongs to the report."""
    for line in above:
        names = phrase.names(line)
        if names or _OF_REPORT.match(line) is None:
            return names
    return []


def _every(phrase: Phrase, lines: Iterable[str]) -> list[str]:
    """What all lines name by it; nothing where these are too many."""
    names = list(dict.fromkeys(name for line in lines for name in phrase.names(line)))
    return names if len(names) <= MAX_EVERY else []


def _listed(known: Culprit, best: Candidate, logs: Sequence[LogSummary]) -> tuple[Culprit, ...]:
    """The nodes of all rows of a list of drained nodes that give the reason of the evidence."""
    row = _LISTED.match(best.evidence[0].text.strip()) if best.evidence else None
    rows = [_LISTED.match(line) for log in logs if log.source == best.evidence[0].source for line in log.tail]
    alike = [one for one in rows if row is not None and one is not None and one["reason"] == row["reason"]]
    nodes = [one["node"] or one["kube"] for one in alike]
    return tuple(Culprit(node=node) for node in dict.fromkeys(nodes))[:MAX_LISTED] or (known,)
