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

from diagnosis import exceptions, kernel_rules, rules, shapes, tracebacks, triage
from diagnosis.incident import Incident, Verdict
from diagnosis.kernel import KernelReader
from diagnosis.kernel_causes import Causes, as_cause, is_elsewhere
from diagnosis.kernel_rules import KernelEvent
from diagnosis.rules import RuleMatch
from diagnosis.signals import Evidence, Finding, Signal, Word, clean_text
from diagnosis.stamps import read_stamp
from diagnosis.steps import StepReader
from diagnosis.story import LineMatch, LoggedTraceback, LogStory
from diagnosis.taxonomy import FailureClass
from diagnosis.xid_tables import Tables

MAX_EVENTS: Final = 20_000
MAX_MATCHES: Final = 400
TAIL_LINES: Final = 3000
"""The end of a file, where its tracebacks are read."""
MAX_TRACEBACKS: Final = 20

SHAPES_KEPT: Final = 20_000
SHAPE_BYTES: Final = 500
"""Shapes of harmless lines: so many (and a block more), so long."""

_RANK: Final = re.compile(rb"(?:\[|\b)rank[ :=]?(\d{1,5})\b|^\s*(\d{1,5}):\s", re.IGNORECASE)
_CASCADE: Final = 0.6
_MAY_STEP: Final = (b"step", b"iter", b"it/s", b"s/it", b"epoch", b"loss", b"train", b"exiting")


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
        self._messages = messages or kernel_rules.default()
        words = {*map(shapes.literal, self._messages.literals)}
        self._kernel_words = tuple(sorted(word.encode() for word in words))
        self._gates = rules.default().gate_shapes
        self._harmless: set[bytes] = set()
        """Shapes of lines that mean nothing, whatever their numbers (where no message is open)."""
        self._kernel = KernelReader(tables, messages)
        self._causes = Causes()
        self._at = 0.0
        self._found: list[Finding] = []
        self._matches: list[RuleMatch] = []
        self._tail: deque[tuple[bytes, int]] = deque()
        """The last blocks, and how many lines each has: at least TAIL_LINES together."""
        self._tail_lines = 0
        self._steps = StepReader()
        self._progress_line: int | None = None
        self._finished_line: int | None = None
        self._lined: dict[tuple[str, int | None], LineMatch] = {}
        self._size = 0

    def feed(self, block: bytes) -> None:
        """The next lines, whole ones, without the last newline."""
        here = shapes.shape(block).split(b"\n")
        unknown = set(here) - self._harmless
        spoken = self._may_mean(unknown) if unknown else unknown
        if spoken or self._kernel.is_open:
            self._read(block.split(b"\n"), [shape in spoken for shape in here])
        else:
            self._kernel.skip(len(here))
        self._size += len(block) + 1
        self._follow(block)
        self.lines += len(here)
        self._tail.append((block, len(here)))
        self._tail_lines += len(here)
        while self._tail_lines - self._tail[0][1] >= TAIL_LINES:
            self._tail_lines -= self._tail.popleft()[1]

    def _may_mean(self, unknown: set[bytes]) -> set[bytes]:
        """Which of these shapes may mean something; the others are kept as harmless."""
        text = b"\n".join(unknown).lower()
        of_kernel = [word for word in self._kernel_words if word in text]
        of_output = [gate for gate in self._gates if gate in text]
        spoken = {shape for shape in unknown if self._may_speak(shape, of_kernel, of_output)}
        if len(self._harmless) > SHAPES_KEPT:
            self._harmless.clear()
        self._harmless.update(shape for shape in unknown - spoken if len(shape) <= SHAPE_BYTES)
        return spoken

    def _may_speak(self, shape: bytes, of_kernel: list[bytes], of_output: list[bytes]) -> bool:
        low = shape.lower()
        told_by_kernel = any(word in low for word in of_kernel)
        if not told_by_kernel and not any(gate in low for gate in of_output):
            return False
        if len(shape) > SHAPE_BYTES or b"\\x" in low or rules.default().may_mean(low):
            return True
        return told_by_kernel and self._messages.may_mean(read_stamp(shape.decode(errors="replace")).text.lower())

    def _read(self, lines: list[bytes], spoken: list[bool]) -> None:
        """Read the lines that may mean something, and those that belong to a message that is open."""
        skipped = 0
        for index, line in enumerate(lines):
            if not spoken[index] and not self._kernel.is_open:
                skipped += 1
                continue
            self._kernel.skip(skipped)
            skipped = 0
            number = self.lines + index + 1
            events = self._kernel.feed(line.decode(errors="replace"))
            for event in events:
                self._note(event)
            if spoken[index] and all(event.line != number for event in events):
                self._read_output(line, number)
        self._kernel.skip(skipped)

    def end(self) -> None:
        """Nothing more comes."""
        for event in self._kernel.end():
            self._note(event)
        self._judge()

    def _note(self, event: KernelEvent) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
            return
        if not self.events_left_out:
            self._judge()
        self.events_left_out += 1
        self._learn(event)

    def _judge(self) -> None:
        """Read the events in the order of their lines: messages of several lines were told late."""
        self.events.sort(key=lambda event: event.line)
        for event in self.events if not self.events_left_out else ():
            self._learn(event)

    def _learn(self, event: KernelEvent) -> None:
        self._at = next((one for one in (event.at, event.uptime) if one is not None), self._at)
        finding = None if is_elsewhere(event) else self._causes.note(event, self._at)
        if finding is None or len(self._found) >= MAX_MATCHES:
            return
        line = next(
            (one.evidence.line for one in self._found if one.evidence.text == finding.evidence.text), event.line
        )
        evidence = msgspec.structs.replace(finding.evidence, source=self.name, line=line)
        self._found.append(msgspec.structs.replace(finding, evidence=evidence))

    def _follow(self, block: bytes) -> None:
        """The newest step, and the line that shows it."""
        for index, line in enumerate(block.split(b"\n")):
            low = line[:2000].lower()
            if not any(word in low for word in _MAY_STEP):
                continue
            before = self._steps.step
            self._steps.feed(line[:2000] + b"\n")
            if self._steps.step != before:
                self._progress_line, self._finished_line = self.lines + index + 1, None
            elif self._steps.phase == "end":
                self._finished_line = self._finished_line or self.lines + index + 1

    def _read_output(self, line: bytes, number: int) -> None:
        if len(self._matches) >= MAX_MATCHES:
            return
        matches = list(rules.default().scan(line))
        if not matches or _is_of_kernel(line):
            return
        rank = _RANK.search(line[: rules.MAX_LINE])
        for match in matches:
            self._matches.append(match)
            self._line_match(match, number, int(rank[1] or rank[2]) if rank is not None else None)
            self._found.append(_finding(match, self.name, number, rank))

    def _line_match(self, match: RuleMatch, number: int, rank: int | None) -> None:
        known = self._lined.get((match.rule.id, rank))
        if known is not None:
            self._lined[match.rule.id, rank] = msgspec.structs.replace(known, count=known.count + 1)
            return
        rule = match.rule
        self._lined[rule.id, rank] = LineMatch(
            rule=rule.id,
            role=rule.role,
            failure_class=match.failure_class,
            confidence=match.confidence,
            severity=rule.severity,
            scope=rule.scope,
            text=match.text,
            line=number,
            rank=rank,
            fields=match.fields,
        )

    def story(self) -> LogStory:
        """All of it, after `end`."""
        tail = [line for block, _ in self._tail for line in block.split(b"\n")][-TAIL_LINES:]
        lines = [line.decode(errors="replace") for line in tail]
        first = self.lines - len(tail) + 1
        return LogStory(
            source=self.name,
            kind="kernel" if self.events and not self._lined else "output",
            lines=self.lines,
            size_bytes=self._size,
            matches=tuple(self._lined.values()),
            tracebacks=tuple(
                LoggedTraceback(traceback=one, line=first + one.index, rank=one.rank)
                for one in tracebacks.read(lines)[-MAX_TRACEBACKS:]
            ),
            events=tuple(self.events),
            events_left_out=self.events_left_out,
            progress_line=self._progress_line,
            step=self._steps.step,
            last_step=self._steps.last_step,
            finished_line=self._finished_line,
            tail=tuple(clean_text(line) for line in lines[-40:]),
        )

    def findings(self) -> list[Finding]:
        """What it tells of failures, tracebacks included. Each names its line."""
        return [*self._found, *self._of_tracebacks()]

    def _of_tracebacks(self) -> list[Finding]:
        found = []
        tail = [line for block, _ in self._tail for line in block.split(b"\n")][-TAIL_LINES:]
        first = self.lines - len(tail) + 1
        lines = [line.decode(errors="replace") for line in tail]
        for traceback in tracebacks.read(lines)[:MAX_TRACEBACKS]:
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
    if all(finding.severity == "warning" for finding in found):
        found = [as_cause(finding) or finding for finding in found]
    if all(finding.severity == "warning" for finding in found):
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
