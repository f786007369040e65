"""Reads the kernel log: which lines mean trouble, which lines belong together, what each is about.

Lines of any origin (kmsg records, dmesg, journalctl, syslog, quoted in a job's log) go in one by one, and one event
comes out for each message that tells of trouble; nothing is collapsed here (`diagnosis.kernel_causes` does that).
What the messages are is data: `kernel.toml`. Xids and SXids have tables of their own (`diagnosis.xid`).
"""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from diagnosis.signals import Word, clean_text
from diagnosis.stamps import Stamp, read_stamp
from diagnosis.taxonomy import FailureClass
from diagnosis.xid import SxidReading, XidReading, pci_address, read_sxid, read_xid
from diagnosis.xid_tables import Tables

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

MAX_LINE: Final = 2048
"""Characters of a line that are looked at."""
OPEN_MESSAGES: Final = 16
"""Messages of several lines that may be under way at once (several CPUs write at once)."""

Kind = Literal[
    "xid", "sxid", "fallen_off_bus", "gpu_driver", "oom_kill", "mlx5", "link", "mce", "edac", "aer", "nvme", "block",
    "filesystem", "nfs", "lustre", "hung_task", "lockup", "oops", "segfault", "other",
]  # fmt: skip
Severity = Literal["fatal", "error", "warning", "info"]
Scope = Literal["rank", "gpu", "node", "fabric", "storage", "job"]


class KernelRule(Word, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"failure_class": "class"}):
    """One message as written in `kernel.toml`.

    In its patterns `<pci>` stands for a PCI address, `<dev>` for a device's name; other named groups become fields.
    """

    id: str
    kind: Kind
    failure_class: FailureClass
    severity: Severity = "error"
    scope: Scope = "node"
    confidence: float = 0.0
    """0: what its severity stands for."""
    literals: tuple[str, ...]
    """One of them (in lower case) is in every line that matches."""
    regex: str
    more: str = ""
    """Later lines of the same message that tell more (device, severity)."""
    confirm: str = ""
    """Only a message if one of its later lines matches this."""
    takes: tuple[str, ...] = ()
    """Rules of which the next line is the rest of this message: once for each."""
    swallows: tuple[str, ...] = ()
    """Rules whose lines belong to this message as long as it is open."""
    until: str = ""
    """Its last line."""
    waits: bool = False
    """Told only when the message is complete: its later lines may change it."""
    span: int = 40
    """Lines after which it is complete in any case."""
    samples: tuple[str, ...] = ()
    """Lines that must match."""
    others: tuple[str, ...] = ()
    """Lines that must mean nothing, to any rule."""


class KernelEvent(Word, frozen=True, kw_only=True):
    """One message of the kernel that tells of trouble."""

    kind: Kind
    rule: str
    """Id of the rule; `xid_79`, `sxid_20034` for these."""
    failure_class: FailureClass
    severity: Severity
    scope: Scope
    text: str
    """Its (first) line without stamps; cleaned."""
    line: int
    """Number of its first line (of an OOM kill: the line that names who was killed), from 1."""
    code: int | None = None
    """The Xid or SXid, or the killed process."""
    device: str = ""
    """PCI address `dddd:bb:dd`, or the kernel's name of it."""
    action: str = ""
    """What the tables of Xids and SXids say to do; empty: what the class asks for."""
    confidence: float = 0.8
    pid: int | None = None
    """The process it is about."""
    gpu_uuid: str = ""
    consequence: bool = False
    """It says itself, or its table says, that something else came first."""
    fields: dict[str, str] = {}
    at: float | None = None
    """Unix time, where its stamp has a date (without a zone: as if it were UTC)."""
    uptime: float | None = None
    """Seconds since the kernel started, where its stamp says that."""


_CONFIDENCE: Final[dict[Severity, float]] = {"fatal": 0.9, "error": 0.8, "warning": 0.4, "info": 0.2}
_PLACEHOLDERS: Final = {
    "pci": r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?",
    "dev": r"[A-Za-z][\w!.-]{0,31}",
    "comm": r"[^\[\]\n]{1,64}?",
}
_GROUP: Final = re.compile(r"\(\?P<([a-z]+)\d*>|(?<!\(\?P)<(pci|dev|comm)>")


def _compile(pattern: str) -> re.Pattern[str] | None:
    """The pattern with its placeholders filled in. A name may stand for several groups: each gets a number."""
    if not pattern:
        return None
    numbers = itertools.count()

    def group(match: re.Match[str]) -> str:
        begin = f"(?P<{match[1] or match[2]}{next(numbers)}>"
        return begin if match[1] else f"{begin}{_PLACEHOLDERS[match[2]]})"

    return re.compile(_GROUP.sub(group, pattern), re.IGNORECASE | re.ASCII)


class _Compiled:
    __slots__ = ("confirm", "literals", "more", "regex", "rule", "stays_open", "until")

    def __init__(self, rule: KernelRule) -> None:
        self.rule = rule
        self.literals = rule.literals
        regex = _compile(rule.regex)
        assert regex is not None
        self.regex = regex
        self.more, self.confirm, self.until = _compile(rule.more), _compile(rule.confirm), _compile(rule.until)
        self.stays_open = bool(rule.more or rule.confirm or rule.takes or rule.swallows or rule.waits)


class _Open:
    """A message of which more lines may come."""

    __slots__ = ("compiled", "confirmed", "event", "left", "taken", "told")

    def __init__(self, compiled: _Compiled, event: KernelEvent) -> None:
        self.compiled, self.event = compiled, event
        self.left = compiled.rule.span
        self.taken: set[str] = set()
        self.told = False
        self.confirmed = compiled.confirm is None


class KernelRules:
    """The compiled table."""

    def __init__(self, rules: Iterable[KernelRule]) -> None:
        self.rules = tuple(rules)
        self.compiled = tuple(_Compiled(rule) for rule in self.rules)
        literals = {*_OWN_LITERALS, *(literal for rule in self.rules for literal in rule.literals)}
        self.literals = tuple(sorted(one for one in literals if not any(o in one for o in literals - {one})))
        """One of them is in every line (in lower case) that means something."""

    def with_site(self, site: Mapping[str, object]) -> KernelRules:
        """These rules with a site's changes over them: `{"edac_corrected": {"severity": "error"}}`, keys as in the
        table. A rule that is not known is a new one, and is tried first. Raises `ValueError`, which names the key.
        """
        if not site:
            return self
        known = {rule.id: rule for rule in self.rules}
        new: list[KernelRule] = []
        for name, change in site.items():
            before = msgspec.to_builtins(known[name]) if name in known else {}
            try:
                rule = msgspec.convert({"id": name, **before, **_table(change)}, KernelRule)
                _Compiled(rule)
            except (msgspec.ValidationError, TypeError, re.error) as error:
                raise ValueError(f"kernel.{name}: {error}") from None
            if name in known:
                known[name] = rule
            else:
                new.append(rule)
        return KernelRules([*new, *known.values()])


def _table(change: object) -> dict[str, object]:
    if not isinstance(change, Mapping):
        raise TypeError("expected a table")
    return dict(change)


_OWN_LITERALS: Final = ("xid", "nvswitch", "kill process", "killed process", "oom-kill:", "oom_reaper")


@functools.cache
def default() -> KernelRules:
    """The table that comes with the package."""
    text = importlib.resources.files("diagnosis").joinpath("kernel.toml").read_text(encoding="utf-8")
    return KernelRules(msgspec.convert(tomllib.loads(text)["rule"], list[KernelRule]))


class KernelReader:
    """Feed it lines in order; it gives the events that are complete. Never raises, whatever the lines."""

    def __init__(self, tables: Tables | None = None, rules: KernelRules | None = None) -> None:
        self._tables = tables
        self._rules = rules or default()
        self._open: deque[_Open] = deque()
        self._kills = _OomKills()
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
        relevant = _has_one(low, self._rules.literals)
        if not relevant and not self._open:
            return told
        stamp = read_stamp(line[: MAX_LINE * 2])
        # A record of /dev/kmsg has its newlines written out.
        for part in stamp.text.replace("\\x0a", "\n").split("\n"):
            text = part[:MAX_LINE]
            told += self._read(text, text.lower(), stamp) if relevant else self._more(text)
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

    def _read(self, text: str, low: str, stamp: Stamp) -> list[KernelEvent]:
        if "xid" in low or "nvswitch" in low:
            event = self._read_driver_error(text, stamp)
            if event is not None:
                return [event]
        if "kill" in low or "oom" in low:
            found = self._kills.read(text, low, lambda: self._event_base(text, stamp))
            if found is not None:
                return found
        for one in self._rules.compiled:
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
        xid = read_xid(text, self._tables)
        sxid = read_sxid(text, self._tables) if xid is None else None
        reading: XidReading | SxidReading | None = xid or sxid
        if reading is None:
            return None
        kind: Kind = "xid" if xid is not None else "sxid"
        fields = {"code": str(reading.code), **reading.detail}
        if xid is not None and xid.follows is not None:
            fields["follows"] = str(xid.follows)
        if xid is not None and xid.process:
            fields["process"] = xid.process
        if xid is not None and xid.mig:
            fields["mig"] = xid.mig
        if reading.link is not None:
            fields["link"] = str(reading.link)
        if reading.after:
            fields["after"] = " ".join(map(str, reading.after))
        if reading.mnemonic:
            fields["mnemonic"] = reading.mnemonic
        if xid is not None and xid.pid is not None:
            fields["pid"] = str(xid.pid)
        return KernelEvent(
            kind=kind,
            rule=f"{kind}_{reading.code}",
            failure_class=reading.failure_class,
            severity=reading.severity,
            scope="gpu" if xid is not None else "node",
            text=clean_text(text.strip()),
            line=self._line,
            code=reading.code,
            device=reading.device,
            action=reading.action,
            confidence=reading.confidence,
            pid=xid.pid if xid is not None else None,
            gpu_uuid=xid.gpu_uuid if xid is not None else "",
            consequence=reading.consequence,
            fields=fields,
            at=stamp.at,
            uptime=stamp.uptime,
        )

    def _matched(self, one: _Compiled, match: re.Match[str], text: str, stamp: Stamp) -> list[KernelEvent]:
        rule = one.rule
        event = KernelEvent(
            kind=rule.kind,
            rule=rule.id,
            failure_class=rule.failure_class,
            severity=rule.severity,
            scope=rule.scope,
            confidence=rule.confidence or _CONFIDENCE[rule.severity],
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

    def _belongs(self, message: _Open, one: _Compiled, event: KernelEvent) -> bool:
        """Whether a line of rule `one` is part of an open message; then it lends it what it knows."""
        rule = message.compiled.rule
        if not message.confirmed and message.compiled.confirm is not None:
            return message.compiled.confirm.search(event.text) is not None
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
    device = pci_address(pci) if pci else name.strip("-.")
    fields = {key: clean_text(value.strip(), 120) for key, value in groups.items()}
    pid = int(fields["pid"]) if fields.get("pid", "").isdigit() else None
    severity = _WORDS.get(said, event.severity)
    return msgspec.structs.replace(
        event,
        device=event.device or device if keep else device or event.device,
        pid=event.pid if pid is None else pid,
        severity=severity,
        confidence=_CONFIDENCE[severity] if said else event.confidence,
        fields={**event.fields, **fields},
    )


def _told(message: _Open) -> list[KernelEvent]:
    return [] if message.told or not message.confirmed else [message.event]


# ----- OOM kills -----

_KILLED: Final = re.compile(
    r"(?P<why>out of memory[^:\n]{0,40}:\s*)?\bKilled process (?P<pid>\d{1,10})(?:, UID \d+)?,?"
    r" \((?P<process>.{1,64}?)\)(?=[\s,.:]|$)",
    re.IGNORECASE | re.ASCII,
)
_WILL_KILL: Final = re.compile(
    r"out of memory[^:\n]{0,40}:\s*Kill process (?P<pid>\d{1,10}) \((?P<process>.{1,64}?)\)(?=[\s,.:]|$)",
    re.IGNORECASE | re.ASCII,
)
_SUMMARY: Final = re.compile(
    r"oom-kill:constraint=(?P<constraint>\w{1,40}).{0,1500}?\btask=(?P<process>.{0,64}?),pid=(?P<pid>\d{1,10})",
    re.IGNORECASE | re.ASCII,
)
_CGROUP: Final = re.compile(r"oom_memcg=(?P<cgroup>[^,]{1,300})")
_REAPED: Final = re.compile(r"oom_reaper: reaped process (?P<pid>\d{1,10}) \((?P<process>.{1,64}?)\)(?=[\s,.:]|$)")


class _OomKills:
    """An OOM kill is told by several lines, that differ by version: one event for each process killed."""

    def __init__(self) -> None:
        self._pending: KernelEvent | None = None
        self._left = 0
        self._killed: deque[int] = deque(maxlen=64)

    @property
    def waits(self) -> bool:
        return self._pending is not None

    def age(self) -> list[KernelEvent]:
        self._left -= 1
        return self.end() if self._pending is not None and self._left < 0 else []

    def end(self) -> list[KernelEvent]:
        """A kill that was announced, and whose own line is lost."""
        event, self._pending = self._pending, None
        return [event] if event is not None else []

    def read(self, text: str, low: str, base: object) -> list[KernelEvent] | None:
        """Events of a line about an OOM kill (maybe none yet), or None when it is about something else."""
        assert callable(base)
        match = _KILLED.search(text) if "killed process" in low else None
        if match is not None:
            return self._kill(_kill(base(), match), has_reason=match["why"] is not None)
        match = _SUMMARY.search(text) if "oom-kill:" in low else None
        if match is not None:
            event = _kill(base(), match)
            cgroup = _CGROUP.search(text)
            if cgroup is not None:
                event = msgspec.structs.replace(event, fields={**event.fields, "cgroup": clean_text(cgroup[1], 300)})
            return self._announce(event)
        match = _WILL_KILL.search(text) if "kill process" in low else None
        if match is not None:
            return self._announce(_kill(base(), match))
        match = _REAPED.search(text) if "oom_reaper" in low else None
        if match is None:
            return None
        if int(match["pid"]) in self._killed or (self._pending is not None and self._pending.pid == int(match["pid"])):
            return []
        # The line of the kill itself is lost.
        return self._kill(_kill(base(), match), has_reason=True)

    def _announce(self, event: KernelEvent) -> list[KernelEvent]:
        if self._pending is not None and self._pending.pid == event.pid:
            return []
        told = self.end()
        self._pending, self._left = event, 30
        return told

    def _kill(self, event: KernelEvent, *, has_reason: bool) -> list[KernelEvent]:
        told: list[KernelEvent] = []
        pending = self._pending
        if pending is not None:
            # Kernels that announce a kill and then kill a child instead give no reason on the second line.
            if pending.pid == event.pid or not has_reason:
                event = msgspec.structs.replace(event, fields={**pending.fields, **event.fields})
                self._pending = None
            else:
                told = self.end()
        if event.pid is not None:
            self._killed.append(event.pid)
        return [*told, event]


def _kill(event: KernelEvent, match: re.Match[str]) -> KernelEvent:
    groups = match.groupdict()
    fields = {name: clean_text(groups[name], 120) for name in ("pid", "process", "constraint") if groups.get(name)}
    scope = "cgroup" if "cgroup" in (groups.get("why") or "") or "cgroup out of memory" in event.text.lower() else ""
    if scope:
        fields["limit"] = scope
    pid = int(match["pid"])
    return msgspec.structs.replace(event, code=pid, pid=pid, fields=fields)
