"""Reads the kernel log: which lines mean trouble, which lines belong together, what each is about.

Lines of any origin (kmsg records, dmesg, journalctl, syslog, quoted in a job's log) go in one by one, and one event
comes out for each message that tells of trouble; nothing is collapsed here (`diagnosis.kernel.causes` does that).
What the messages are is data: `kernel.toml`. Xids and SXids have tables of their own (`diagnosis.kernel.xid`).
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final

import msgspec

from diagnosis.kernel.oom import OomKills
from diagnosis.kernel.rules import CONFIDENCE, Compiled, KernelEvent, KernelRules, Severity, default
from diagnosis.kernel.stamps import Stamp, read_stamp
from diagnosis.kernel.xid import Tables, pci_address, read_sxid, read_xid
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass

MAX_LINE: Final = 2048
"""Characters of a line that are looked at."""
OPEN_MESSAGES: Final = 16
"""Messages of several lines that may be under way at once (several CPUs write at once)."""

MAX_XIDS: Final = 8
_XIDS: Final = re.compile(r"(?<!^)(?=NVRM: Xid ?\()")


class _Open:
    """A message of which more lines may come."""

    __slots__ = ("compiled", "confirmed", "event", "left", "taken", "told")

    def __init__(self, compiled: Compiled, event: KernelEvent) -> None:
        self.compiled, self.event = compiled, event
        self.left = compiled.rule.span
        self.taken: set[str] = set()
        self.told = False
        self.confirmed = compiled.confirm is None


class KernelReader:
    """Feed it lines in order; it gives the events that are complete. Never raises, whatever the lines."""

    def __init__(self, tables: Tables | None = None, rules: KernelRules | None = None) -> None:
        self._tables = tables
        self._rules = rules or default()
        self._open: deque[_Open] = deque()
        self._kills = OomKills()
        self._line = 0

    @property
    def is_open(self) -> bool:
        """Whether a later line may change what was told: none of the next lines may be left out."""
        return bool(self._open) or self._kills.waits

    def skip(self, lines: int) -> None:
        """So many lines were left out, because none has a literal of the rules and no message was open."""
        self._line += lines

    def feed(self, line: str) -> list[KernelEvent]:
        """Read the next line."""
        self._line += 1
        low = line[: MAX_LINE * 2].lower()
        told = self._age() if self._open or self._kills.waits else []
        candidates = self._rules.candidates(low)
        if candidates is None and not self._open:
            return told
        stamp = read_stamp(line[: MAX_LINE * 2].rstrip("\r\n"))
        if stamp.is_foreign:
            return told
        # A record of /dev/kmsg has its newlines written out.
        for part in stamp.text.replace("\\x0a", "\n").split("\n"):
            text = part[:MAX_LINE]
            told += self._more(text) if candidates is None else self._read(text, text.lower(), stamp, candidates)
        return told

    def end(self) -> list[KernelEvent]:
        """Nothing more comes (for now): what is still open is complete as it is."""
        told = self._kills.end()
        while self._open:
            told += _told(self._open.popleft())
        return told

    def _age(self) -> list[KernelEvent]:
        told = self._kills.age()
        for message in self._open:
            message.left -= 1
        while self._open and (self._open[0].left < 0 or len(self._open) > OPEN_MESSAGES):
            told += _told(self._open.popleft())
        expired = [message for message in self._open if message.left < 0]
        for message in expired:
            self._open.remove(message)
            told += _told(message)
        return told

    def _read(self, text: str, low: str, stamp: Stamp, candidates: list[Compiled]) -> list[KernelEvent]:
        if "xid" in low or "nvswitch" in low:
            # Lines that were written at once may have become one.
            parts = _XIDS.split(text)[:MAX_XIDS] if low.count("xid") > 1 else [text]
            events = [event for part in parts if (event := self._read_driver_error(part, stamp)) is not None]
            if events:
                return events
        if "kill" in low or "oom" in low:
            found = self._kills.read(text, low, lambda: self._event_base(text, stamp))
            if found is not None:
                return found
        for one in candidates:
            match = one.regex.search(text) if _has_one(low, one.literals) else None
            if match is not None:
                return self._matched(one, match, text, stamp)
        return self._more(text)

    def _event_base(self, text: str, stamp: Stamp) -> KernelEvent:
        return KernelEvent(
            kind="oom_kill",
            rule="oom_kill",
            failure_class=FailureClass.HOST_OOM,
            severity="fatal",
            scope="node",
            confidence=0.93,
            text=clean_text(text.strip()),
            line=self._line,
            at=stamp.at,
            uptime=stamp.uptime,
        )

    def _read_driver_error(self, text: str, stamp: Stamp) -> KernelEvent | None:
        error = read_xid(text, self._tables) or read_sxid(text, self._tables)
        if error is None:
            return None
        told = {
            "follows": error.follows,
            "process": error.process,
            "mig": error.mig,
            "link": error.link,
            "after": " ".join(map(str, error.after)),
            "mnemonic": error.mnemonic,
            "pid": error.pid,
        }
        return KernelEvent(
            kind=error.kind,
            rule=f"{error.kind}_{error.code}",
            failure_class=error.failure_class,
            severity=error.severity,
            scope="gpu" if error.kind == "xid" else "node",
            text=clean_text(text.strip()),
            line=self._line,
            code=error.code,
            device=error.device,
            action=error.action,
            confidence=error.confidence,
            pid=error.pid,
            gpu_uuid=error.gpu_uuid,
            consequence=error.consequence,
            fields={
                "code": str(error.code),
                **error.detail,
                **{name: str(value) for name, value in told.items() if value not in (None, "")},
            },
            at=stamp.at,
            uptime=stamp.uptime,
        )

    def _matched(self, one: Compiled, match: re.Match[str], text: str, stamp: Stamp) -> list[KernelEvent]:
        rule = one.rule
        event = KernelEvent(
            kind=rule.kind,
            rule=rule.id,
            failure_class=rule.failure_class,
            severity=rule.severity,
            scope=rule.scope,
            confidence=rule.confidence or CONFIDENCE[rule.severity],
            text=clean_text(text.strip()),
            line=self._line,
            at=stamp.at,
            uptime=stamp.uptime,
        )
        event = _with_groups(event, match)
        for message in reversed(self._open):
            if self._belongs(message, one, event):
                return self._confirm(message, text)
        if not one.stays_open:
            return [event]
        message = _Open(one, event)
        self._open.append(message)
        if one.rule.waits or not message.confirmed:
            return self._confirm(message, text)
        message.told = True
        return [event]

    def _belongs(self, message: _Open, one: Compiled, event: KernelEvent) -> bool:
        """Whether a line of rule `one` is part of an open message; then it lends it what it knows."""
        rule = message.compiled.rule
        if not message.confirmed and message.compiled.confirm is not None:
            return one is not message.compiled and message.compiled.confirm.search(event.text) is not None
        if one.rule.id in rule.swallows:
            return True
        if one.rule.id not in rule.takes or message.taken:
            return False
        message.taken.add(one.rule.id)
        message.event = msgspec.structs.replace(
            message.event,
            device=event.device or message.event.device,
            severity=event.severity,
            confidence=event.confidence,
            fields={**message.event.fields, **event.fields},
        )
        return True

    def _more(self, text: str) -> list[KernelEvent]:
        for message in reversed(self._open):
            if message.compiled.until is not None and message.compiled.until.search(text) is not None:
                message.left = 0
                return []
            if not message.confirmed:
                told = self._confirm(message, text)
                if told:
                    return told
            match = message.compiled.more.search(text) if message.compiled.more is not None else None
            if match is not None:
                message.event = _with_groups(message.event, match, keep=True)
                return []
        return []

    def _confirm(self, message: _Open, text: str) -> list[KernelEvent]:
        if message.confirmed or message.compiled.confirm is None or message.compiled.confirm.search(text) is None:
            return []
        message.confirmed = True
        if message.compiled.rule.waits:
            return []
        message.told = True
        return [message.event]


def _has_one(text: str, words: tuple[str, ...]) -> bool:
    for word in words:  # noqa: SIM110  # any() over a generator costs twice as much
        if word in text:
            return True
    return False


_WORDS: Final[dict[str, Severity]] = {
    "fatal": "fatal", "recoverable": "error", "corrected": "warning", "info": "info",
}  # fmt: skip


def _with_groups(event: KernelEvent, match: re.Match[str], keep: bool = False) -> KernelEvent:
    """The event with what a pattern's groups say; `keep`: what it has already stays."""
    groups = {name.rstrip("0123456789"): value for name, value in match.groupdict().items() if value is not None}
    pci, name, said = groups.pop("pci", ""), groups.pop("dev", ""), groups.pop("said", "").lower()
    if "comm" in groups:
        groups["process"] = groups.pop("comm")
    port = groups.get("port", "")
    device = pci_address(pci) if pci else name.strip("-.") or pci_address(port)
    fields = {key: clean_text(value.strip(), 120) for key, value in groups.items()}
    pid = int(fields["pid"]) if fields.get("pid", "").isdigit() else None
    severity = _WORDS.get(said, event.severity)
    return msgspec.structs.replace(
        event,
        device=event.device or device if keep else device or event.device,
        pid=event.pid if pid is None else pid,
        severity=severity,
        confidence=CONFIDENCE[severity] if said else event.confidence,
        fields={**event.fields, **fields},
    )


def _told(message: _Open) -> list[KernelEvent]:
    return [] if message.told or not message.confirmed else [message.event]
