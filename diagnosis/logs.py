"""What a log file tells by itself: kernel events, rules of output, tracebacks. No job, no node, no exit records.

Blocks of whole lines go in, so that a file of any size is read in bounded memory; `conclude` makes one verdict of
what all files told.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from diagnosis import exceptions, kernel_rules, rules, tracebacks, triage
from diagnosis.incident import Incident, Verdict
from diagnosis.kernel import KernelReader
from diagnosis.kernel_causes import Causes, is_elsewhere
from diagnosis.kernel_rules import KernelEvent
from diagnosis.rules import RuleMatch
from diagnosis.signals import Evidence, Finding, Signal, Word, clean_text
from diagnosis.stamps import read_stamp
from diagnosis.taxonomy import FailureClass
from diagnosis.xid_tables import Tables

MAX_EVENTS: Final = 20_000
MAX_MATCHES: Final = 400
TAIL_LINES: Final = 3000
"""The end of a file, where its tracebacks are read."""
MAX_TRACEBACKS: Final = 20

_RANK: Final = re.compile(rb"(?:\[|\b)rank[ :=]?(\d{1,5})\b|^\s*(\d{1,5}):\s", re.IGNORECASE)
_CASCADE: Final = 0.6


class LogEvent(Word, frozen=True, kw_only=True):
    """A kernel event and the file it stands in."""

    file: str
    event: KernelEvent


class LogReader:
    """Reads one log. `events`, `findings`: what it told."""

    def __init__(
        self, name: str, tables: Tables | None = None, messages: kernel_rules.KernelRules | None = None
    ) -> None:
        self.name = name
        self.lines = 0
        self.events: list[KernelEvent] = []
        self.events_left_out = 0
        self._literals = tuple(literal.encode() for literal in (messages or kernel_rules.default()).literals)
        self._kernel = KernelReader(tables, messages)
        self._causes = Causes()
        self._at = 0.0
        self._found: list[Finding] = []
        self._matches: list[RuleMatch] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, block: bytes) -> None:
        """The next lines, whole ones, without the last newline."""
        lowered = block.lower()
        kernel_lines: set[int] = set()
        if self._kernel.is_open or any(literal in lowered for literal in self._literals):
            for line in block.split(b"\n"):
                for event in self._kernel.feed(line.decode(errors="replace")):
                    kernel_lines.add(event.line)
                    self._note(event)
        else:
            self._kernel.skip(block.count(b"\n") + 1)
        self._read_output(block, kernel_lines)
        self._tail.extend(line.decode(errors="replace") for line in block.rsplit(b"\n", TAIL_LINES)[-TAIL_LINES:])
        self.lines += block.count(b"\n") + 1

    def end(self) -> None:
        """Nothing more comes."""
        for event in self._kernel.end():
            self._note(event)
        self.events.sort(key=lambda event: event.line)

    def _note(self, event: KernelEvent) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        else:
            self.events_left_out += 1
        self._at = next((one for one in (event.at, event.uptime) if one is not None), self._at)
        finding = None if is_elsewhere(event) else self._causes.note(event, self._at)
        if finding is not None and len(self._found) < MAX_MATCHES:
            evidence = msgspec.structs.replace(finding.evidence, source=self.name, line=event.line)
            self._found.append(msgspec.structs.replace(finding, evidence=evidence))

    def _read_output(self, block: bytes, kernel_lines: set[int]) -> None:
        at, number = 0, self.lines + 1
        for match in rules.default().scan(block):
            if len(self._matches) >= MAX_MATCHES:
                return
            number += block.count(b"\n", at, match.start)
            at = match.start
            begin = block.rfind(b"\n", 0, match.start) + 1
            line = block[begin : begin + rules.MAX_LINE].split(b"\n", 1)[0]
            if number in kernel_lines or _is_of_kernel(line):
                continue
            self._matches.append(match)
            rank = _RANK.search(line)
            self._found.append(_finding(match, self.name, number, rank))

    def findings(self) -> list[Finding]:
        """What it tells of failures, tracebacks included. Each names its line."""
        return [*self._found, *self._of_tracebacks()]

    def _of_tracebacks(self) -> list[Finding]:
        found = []
        first = self.lines - len(self._tail) + 1
        for traceback in tracebacks.read(self._tail)[:MAX_TRACEBACKS]:
            if traceback.is_launchers:
                continue
            reading = exceptions.read(traceback, self._matches)
            evidence = Evidence(
                text=clean_text(traceback.line),
                source=self.name,
                line=first + traceback.index,
                rank=traceback.rank,
            )
            found.append(
                Finding(
                    rule="traceback",
                    failure_class=reading.failure_class,
                    confidence=reading.confidence * (_CASCADE if reading.is_cascade else 1.0),
                    scope="rank",
                    severity="fatal",
                    evidence=evidence,
                    rank=traceback.rank,
                    at=float(first + traceback.index),
                )
            )
        return found


def _is_of_kernel(line: bytes) -> bool:
    text = line[:300].decode(errors="replace")
    return " kernel: " in text or read_stamp(text).uptime is not None


def _finding(match: RuleMatch, name: str, line: int, rank: re.Match[bytes] | None) -> Finding:
    number = int(rank[1] or rank[2]) if rank is not None else None
    found = rules.finding(match, Signal(source="output", text=match.text, at=float(line), rank=number))
    counts = match.rule.severity == "fatal" or match.confidence >= 0.75
    return msgspec.structs.replace(
        found,
        confidence=found.confidence * (_CASCADE if match.rule.role == "cascade" else 1.0),
        severity="error" if counts and found.severity != "warning" else "warning",
        evidence=msgspec.structs.replace(found.evidence, source=name, line=line),
    )


def conclude(logs: Iterable[LogReader]) -> Verdict:
    """One verdict of what the logs tell; class `none` where none tells of a failure."""
    logs = list(logs)
    found = [finding for log in logs for finding in log.findings()]
    serious = [finding for finding in found if finding.severity != "warning"]
    if not serious:
        count = sum(log.lines for log in logs)
        return Verdict(
            failure_class=FailureClass.NONE,
            culprits=(),
            confidence=0.7,
            why=f"nothing in {count} lines tells of a failure",
            action="none",
            evidence=tuple(finding.evidence for finding in found[:3]),
        )
    return triage.conclude(Incident(id="log", opened_at=0.0, attempt=0, trigger="signal", findings=tuple(found)))
