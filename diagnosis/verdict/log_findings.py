"""Where lines of a log were said, and what a log of the kernel or of a scheduler tells, as findings."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from diagnosis.errors import tracebacks
from diagnosis.kernel.causes import Causes, is_elsewhere
from diagnosis.kernel.rules import KernelEvent
from diagnosis.signals import Evidence, Finding
from diagnosis.story import LineMatch, LoggedTraceback, LogStory
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import statements

LONG_AGO_S: Final = 3600.0
_AMONG_OUTPUT: Final = 0.8
"""The same where it stands among what training prints: somebody joined the logs, or printed it."""
BOOT_S: Final = 120.0
_LONG_AGO: Final = 0.7
"""How much of a kernel message holds that is so much older than the newest, where no date tells more."""
HEARSAY: Final = 0.5
"""How much of it holds where a rank prints the line, or other words stand before it: the kernel writes neither."""
SAID_BY: Final = "said_by"
"""Field of a finding that is hearsay."""
_OF_RANK: Final = re.compile(r"\s{0,2}\[(?:rank|default)[ :=]?\d{1,6}\]", re.IGNORECASE)
_QUOTED: Final = re.compile(r"(?:[^\n]{61}|[^\n]{0,60}?[\"'`])[^\n]*?(?:NVRM: |SXid )")
_BACK: Final = (
    (re.compile(r"server (\S{1,120}) not responding"), re.compile(r"server \S{1,120} OK\b")),
    (re.compile(r"([\w.-]{1,40}):? [Ll]ink (?:is )?[Dd]own"), re.compile(r"[Ll]ink (?:is )?[Uu]p|link becomes ready")),
)
"""What goes away and comes back, and the line that says so of the same name."""
_OF_NCCL: Final = re.compile(r"(?:^|[\s>|])([A-Za-z][\w.-]{1,120}):\d{1,9}:\d{1,9} \[-?\d{1,3}\] ")
"""The node that wrote a line of NCCL: `host:pid:thread [device]`."""


def place(one: LineMatch | LoggedTraceback, story: LogStory) -> Evidence:
    """Evidence without a text yet: file, line, rank, node, time."""
    return Evidence(
        text="",
        source=story.source,
        line=one.line,
        node=_node(one, story),
        rank=one.rank if one.rank is not None or _is_of_job(one) else story.rank,
        at=one.at,
    )


def _is_of_job(one: LineMatch | LoggedTraceback) -> bool:
    return isinstance(one, LineMatch) and one.role == "outcome"


def _node(one: LineMatch | LoggedTraceback, story: LogStory) -> str:
    """Where it happened: what the line says itself counts most."""
    named = ""
    if isinstance(one, LineMatch):
        named = one.fields.get("node") or (one.fields.get("host", "") if one.scope == "node" else "")
        nccl = _OF_NCCL.search(one.text[:200]) if not (named or one.node or story.node) else None
        named = nccl[1] if nccl is not None else named
    return named or one.node or story.node


def with_reported(story: LogStory) -> LogStory:
    """The story in which tracebacks that a launcher's report repeats are their workers', and nobody else's."""
    for failure in story.launcher:
        told = tracebacks.last(failure.message.split("\n")) if "Traceback" in failure.message else None
        if told is None or told.exception == tracebacks.CUT_OFF:
            continue
        repeated = [one for one in story.tracebacks if one.rank is None and one.traceback.frames[:1] == told.frames[:1]]
        said = [one for one in story.matches if one.rank is None and one.text.strip() in failure.message]
        line = min([*(one.line for one in said), *(one.line for one in repeated)], default=failure.line)
        workers = LoggedTraceback(traceback=told, line=line, rank=failure.rank, node=failure.host, at=failure.at)
        story = msgspec.structs.replace(
            story,
            tracebacks=(*(one for one in story.tracebacks if one not in repeated), workers),
            matches=tuple(one for one in story.matches if one not in said),
        )
    return story


def findings(story: LogStory) -> list[Finding]:
    """What the kernel and the scheduler told."""
    causes, found = Causes(), []
    lines: dict[str, int] = {}
    newest = max((event.uptime for event in story.events if event.uptime is not None), default=0.0)
    for event in story.events:
        at = next((one for one in (event.at, event.uptime) if one is not None), 0.0)
        finding = None if is_elsewhere(event) else causes.note(event, at)
        if finding is not None:
            line = lines.setdefault(finding.evidence.text, event.line)
            is_old = event.at is None and newest - (event.uptime or newest) > LONG_AGO_S
            holds = (_LONG_AGO if is_old else 1.0) * (_AMONG_OUTPUT if story.kind == "mixed" else 1.0)
            if _is_hearsay(event, story):
                holds *= HEARSAY
                finding = msgspec.structs.replace(finding, fields={**finding.fields, SAID_BY: "a rank"})
            found.append(_placed(finding, story, line, event.at))
            found[-1] = msgspec.structs.replace(
                found[-1],
                confidence=finding.confidence * holds,
                severity="warning" if _is_of_boot(event, finding) else finding.severity,
            )
    if story.kind in ("kernel", "scheduler"):
        found += [_of_log(match, story) for match in story.matches]
    return found


def _is_of_boot(event: KernelEvent, finding: Finding) -> bool:
    """Links and mounts come up while a node boots, and no job runs yet."""
    comes_up = finding.failure_class in (FailureClass.NCCL_NETWORK, FailureClass.STORAGE_ERROR)
    return comes_up and event.uptime is not None and event.uptime < BOOT_S


def _is_hearsay(event: KernelEvent, story: LogStory) -> bool:
    """A line as the kernel writes it, but not written by the kernel: in the output of one rank, or by its prefix."""
    if story.rank is not None and story.kind != "kernel":
        return True
    at = event.line - 1 - (story.lines - len(story.tail))
    whole = story.tail[at] if 0 <= at < len(story.tail) else event.text
    return any(_OF_RANK.match(text) is not None or _QUOTED.match(text) is not None for text in (whole, event.text))


def has_recovered(finding: Finding, story: LogStory) -> bool:
    """What it tells of came back, and the same log says so near its end."""
    for gone, back in _BACK:
        named = gone.search(finding.evidence.text)
        if named is not None:
            return any(named[1] in text and back.search(text) is not None for text in story.tail)
    return False


def last_line(finding: Finding, story: LogStory) -> int:
    """Where the kernel said it for the last time."""
    return max((event.line for event in story.events if event.rule == finding.rule), default=finding.evidence.line or 0)


def _placed(finding: Finding, story: LogStory, line: int, at: float | None) -> Finding:
    evidence = msgspec.structs.replace(finding.evidence, source=story.source, line=line, node=story.node, at=at)
    return msgspec.structs.replace(finding, evidence=evidence, node=story.node, at=at or 0.0)


def _of_log(match: LineMatch, story: LogStory) -> Finding:
    return Finding(
        rule=match.rule,
        failure_class=match.failure_class,
        confidence=match.confidence,
        scope=match.scope,
        severity="warning" if statements.of_match(match, place(match, story)) is None else match.severity,
        evidence=Evidence(text=match.text, source=story.source, line=match.line, node=_node(match, story), at=match.at),
        node=_node(match, story),
        rank=match.rank,
        fields=match.fields,
        at=match.at or 0.0,
    )
