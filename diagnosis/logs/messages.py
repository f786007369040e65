"""The kernel's messages in a log: all of them up to a limit, of later ones the rare; a flood's are only counted."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

import msgspec

from diagnosis.kernel.log import KernelReader
from diagnosis.kernel.rules import KernelEvent, KernelRules
from diagnosis.kernel.xid import Tables

MAX_EVENTS: Final = 20_000
RARE_EVENTS: Final = 16
"""Of each kind and device so many are kept even then, so that a flood of one hides no other."""
MAX_FLOODS: Final = 20_000
_VARIES: Final = re.compile(
    rb"0x[0-9a-f]{1,16}|\d{4,20}(?![\d:])|(?<!\d)\d\d:\d\d:\d\d(?!\d)|(?<=:\d\d)[.,]\d{1,9}", re.IGNORECASE
)
"""In messages of one rule and one device: addresses, long numbers, clocks, fractions."""


class Messages:
    """Reads one log. After `end`, `events` has them in order."""

    def __init__(self, tables: Tables | None = None, rules: KernelRules | None = None) -> None:
        self.events: list[KernelEvent] = []
        self.left_out = 0
        self._of_event: Counter[tuple[str, str]] = Counter()
        self._flood: dict[bytes, list[KernelEvent]] = {}
        """Of lines that were left out, without what varies, what they told."""
        self._reader = KernelReader(tables, rules)

    @property
    def is_open(self) -> bool:
        """None of the next lines may be left out."""
        return self._reader.is_open

    def skip(self, lines: int) -> None:
        """So many lines were left out."""
        self._reader.skip(lines)

    def feed(self, line: bytes, number: int) -> list[KernelEvent]:
        """The events that the next line completes; of one of a flood, those of an earlier line that was like it."""
        is_flood = len(self.events) >= MAX_EVENTS and not self.is_open
        like = _VARIES.sub(b"", line) if is_flood else b""
        if like in self._flood:
            self.skip(1)
            told = self._flood[like]
            self.left_out += len(told)
            return [msgspec.structs.replace(event, line=number) for event in told]
        kept = len(self.events)
        events = self._reader.feed(line.decode(errors="replace"))
        for event in events:
            self._note(event)
        is_whole = not self.is_open and all(event.line == number for event in events)
        if is_flood and events and is_whole and len(self.events) == kept and len(self._flood) < MAX_FLOODS:
            self._flood[like] = events
        return events

    def end(self) -> None:
        """Nothing more comes."""
        for event in self._reader.end():
            self._note(event)
        self.events.sort(key=lambda event: event.line)  # messages of several lines were told late

    def _note(self, event: KernelEvent) -> None:
        key = event.rule, event.device
        if len(self.events) < MAX_EVENTS or (self._of_event[key] < RARE_EVENTS and len(self.events) < 2 * MAX_EVENTS):
            self.events.append(event)
            self._of_event[key] += 1
        else:
            self.left_out += 1
