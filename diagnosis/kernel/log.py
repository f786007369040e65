"""Reads the kernel log: which lines mean trouble, which lines belong together, what each is about.

Lines of any origin (kmsg records, dmesg, journalctl, syslog, quoted in a job's log) go in one by one, and one event
comes out for each message that tells of trouble; nothing is collapsed here (`diagnosis.kernel.causes` does that).
What the messages are is data: `kernel.toml`. Xids and SXids have tables of their own (`diagnosis.kernel.xid`). An OOM
kill is a rule of its own kind: several lines tell of it, and one event comes of them.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis.kernel.xid import Tables, pci_address, read_sxid, read_xid
from diagnosis.signals import Frozen, KernelEvent, KernelKind, KernelSeverity, Outlook, Scope, clean_text
from diagnosis.tables import load
from diagnosis.taxonomy import FailureClass
from diagnosis.text import Words, blind, literal


class KernelRule(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"failure_class": "class"}):
    """One message as written in `kernel.toml`.

    In its patterns `<pci>` stands for a PCI address, `<dev>` for a device's name; other named groups become fields.
    """

    id: str
    kind: KernelKind
    failure_class: FailureClass
    severity: KernelSeverity = "error"
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
    outlook: Outlook = ""
    samples: tuple[str, ...] = ()
    """Lines that must match."""
    others: tuple[str, ...] = ()
    """Lines that must mean nothing, to any rule."""


CONFIDENCE: Final[dict[KernelSeverity, float]] = {"fatal": 0.9, "error": 0.8, "warning": 0.4, "info": 0.2}
_PLACEHOLDERS: Final = {
    "pci": r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?",
    "dev": r"[A-Za-z][\w!.-]{0,31}",
    "comm": r"[^\[\]\n]{1,64}?",
}
_GROUP: Final = re.compile(r"\(\?P<([a-z]+)\d*>|(?<!\(\?P)<(pci|dev|comm)>")


def _compile(pattern: str) -> re.Pattern[str]:
    """The pattern with its placeholders filled in. A name may stand for several groups: each gets a number."""
    numbers = itertools.count()

    def group(match: re.Match[str]) -> str:
        begin = f"(?P<{match[1] or match[2]}{next(numbers)}>"
        return begin if match[1] else f"{begin}{_PLACEHOLDERS[match[2]]})"

    return re.compile(_GROUP.sub(group, pattern), re.IGNORECASE | re.ASCII)


class Compiled:
    """A rule ready for use. Its patterns are compiled when a line needs them: most never are on a healthy node."""

    def __init__(self, rule: KernelRule) -> None:
        self.rule = rule
        self.literals = rule.literals
        self.stays_open = bool(rule.more or rule.confirm or rule.takes or rule.swallows or rule.waits)

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        return _compile(self.rule.regex)

    @functools.cached_property
    def more(self) -> re.Pattern[str] | None:
        return _compile(self.rule.more) if self.rule.more else None

    @functools.cached_property
    def confirm(self) -> re.Pattern[str] | None:
        return _compile(self.rule.confirm) if self.rule.confirm else None

    @functools.cached_property
    def until(self) -> re.Pattern[str] | None:
        return _compile(self.rule.until) if self.rule.until else None

    @functools.cached_property
    def blind(self) -> re.Pattern[str]:
        """Finds something in the shape of every line that matches."""
        return re.compile(blind(self.regex.pattern), re.IGNORECASE | re.ASCII)

    def check(self) -> None:
        """Raises `re.error` when a pattern is none."""
        _ = (self.regex, self.more, self.confirm, self.until)


class KernelRules:
    """The compiled table."""

    def __init__(self, rules: Iterable[KernelRule]) -> None:
        self.rules = tuple(rules)
        self.compiled = tuple(Compiled(rule) for rule in self.rules)
        # Xids, SXids and OOM kills have readers of their own: words without a rule.
        self._words = Words([*(one.literals for one in self.compiled), OWN_LITERALS])
        self.literals = self._words.words
        """One of them is in every line (in lower case) that means something."""
        self._shapes = Words([tuple(map(literal, one.literals)) for one in self.compiled])

    def candidates(self, low: str) -> list[Compiled] | None:
        """The rules that may match a text in lower case, in order; None where nothing at all is in it."""
        numbers = self._words.rules_for(low)
        return None if numbers is None else [self.compiled[n] for n in numbers if n < len(self.compiled)]

    def may_mean(self, shape: str) -> bool:
        """Whether a message of this shape (in lower case) may mean something, where no other message is open."""
        if OWN.search(shape) is not None:
            return True
        return any(self.compiled[n].blind.search(shape) is not None for n in self._shapes.rules_for(shape) or ())

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
                Compiled(rule).check()
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


OWN: Final = re.compile(r"xid\s?\(|detected nvswitch|kill(?:ed)? process|oom-kill:|oom_reaper")
"""What has readers of its own: Xids, SXids, OOM kills."""
OWN_LITERALS: Final = ("xid", "nvswitch", "kill process", "killed process", "oom-kill:", "oom_reaper")


_file: Final = functools.partial(load, "diagnosis.kernel", "kernel.toml")


@functools.cache
def default() -> KernelRules:
    """The table that comes with the package."""
    return KernelRules(msgspec.convert(_file()["rule"], list[KernelRule]))


class OomLine(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the lines that tell of an OOM kill, as written in `kernel.toml`."""

    id: Literal["killed", "summary", "announced", "reaped"]
    literal: str
    """It is (in lower case) in every line that matches."""
    regex: str
    samples: tuple[str, ...]
    """Lines that must match."""
    others: tuple[str, ...]
    """Lines that must not."""


@functools.cache
def oom_lines() -> tuple[tuple[OomLine, re.Pattern[str]], ...]:
    """The lines about OOM kills with their patterns: the first that matches a line counts."""
    lines = msgspec.convert(_file()["oom"], list[OomLine])
    return tuple((one, re.compile(one.regex, re.IGNORECASE | re.ASCII)) for one in lines)


class OomKills:
    """The kernel writes several lines about one OOM kill, and each version others: one event for a process."""

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

    def read(self, text: str, low: str, base: Callable[[], KernelEvent]) -> list[KernelEvent] | None:
        """Events of a line about an OOM kill (maybe none yet), or None when it is about something else."""
        for one, pattern in oom_lines():
            match = pattern.search(text) if one.literal in low else None
            if match is None:
                continue
            event = _kill(base(), match)
            if one.id == "killed":
                return self._kill(event, has_reason=match["why"] is not None)
            if one.id != "reaped":
                return self._announce(event)
            if event.pid in self._killed or (self._pending is not None and self._pending.pid == event.pid):
                return []
            return self._kill(event, has_reason=True)  # the line of the kill itself is lost
        return None

    def _announce(self, event: KernelEvent) -> list[KernelEvent]:
        if self._pending is not None and self._pending.pid == event.pid:
            return []
        complete = self.end()
        self._pending, self._left = event, 30
        return complete

    def _kill(self, event: KernelEvent, *, has_reason: bool) -> list[KernelEvent]:
        complete: list[KernelEvent] = []
        pending = self._pending
        if pending is not None:
            # Kernels that announce a kill and then kill a child instead give no reason on the second line.
            if pending.pid == event.pid or not has_reason:
                event = msgspec.structs.replace(event, fields={**pending.fields, **event.fields})
                self._pending = None
            else:
                complete = self.end()
        if event.pid is not None:
            self._killed.append(event.pid)
        return [*complete, event]


def _kill(event: KernelEvent, match: re.Match[str]) -> KernelEvent:
    groups = match.groupdict()
    fields = {name: clean_text(groups[name], 120) for name in ("pid", "process", "constraint") if groups.get(name)}
    scope = "cgroup" if "cgroup" in (groups.get("why") or "") or "cgroup out of memory" in event.text.lower() else ""
    if scope:
        fields["limit"] = scope
    if groups.get("cgroup"):
        fields["cgroup"] = clean_text(groups["cgroup"], 300)
    pid = int(match["pid"])
    return msgspec.structs.replace(event, code=pid, pid=pid, fields=fields)


class Stamp(NamedTuple):
    """A line without what stands before its message, and the time in it."""

    text: str
    at: float | None = None
    """Unix time, where a date and a year are given."""
    uptime: float | None = None
    """Seconds since the kernel started."""
    is_foreign: bool = False
    """A program wrote it into the kernel's log: its facility says so."""


_COLOUR: Final = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_MONTHS: Final = {name: n for n, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split(), 1)}
_KMSG: Final = re.compile(r"(?P<level>\d{1,4}),\d{1,12},(?P<us>\d{1,18}),[^;\n]{0,200};")
_LEVEL: Final = re.compile(r"<(?P<level>\d{1,4})>|(?P<facility>[a-z0-9]{3,8})\s{0,6}:\s?[a-z]{3,6}\s{0,3}: ")
_UPTIME: Final = re.compile(r"\[\s{0,8}(?P<s>\d{1,9}\.\d{1,9})\](?:\[\s{0,8}[TC]\d{1,8}\])?\s?")
_CTIME: Final = re.compile(
    r"\[?[A-Z][a-z]{2} (?P<month>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) (?P<clock>\d\d:\d\d:\d\d) (?P<year>\d{4})\]?\s?"
)
_ISO: Final = re.compile(
    r"\[?(?P<date>\d{4}-\d\d-\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?\s?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?\]?\s{0,3}"
)
_DELTA: Final = re.compile(r"\[(?:\s{0,8}[+<]\s{0,12}\d{1,9}\.\d{1,9}>?|[A-Z][a-z]{2} ?\d{1,2} \d\d:\d\d)\]\s?")
"""`dmesg -d`, `-e` and `-H` write the time since the message before, or the minute."""
_SYSLOG: Final = re.compile(r"[A-Z][a-z]{2} {1,2}\d{1,2} \d\d:\d\d:\d\d(?:\.\d{1,6})?\s+")
_UNIX: Final = re.compile(r"(?P<unix>\d{9,10}\.\d{3,9}) (?=\S+ \S+:)")
_SENDER: Final = re.compile(r"(?:(?!NVRM)[\w.-]{1,128} )?(?:kernel|vmunix)(?:\[\d{1,9}\])?: ?")
_HOST: Final = re.compile(r"[A-Za-z][\w.-]{0,63}:? (?=\[\s{0,8}\d{1,9}\.\d{6}\] )")
"""Who collects the kernel logs of many nodes writes the node before the kernel's own stamp."""

_STRANGE: Final = re.compile(r"[^\n]{0,60}?\d\d:\d\d:\d\d[^\n]{0,90}?\skernel: ?")
"""A clock and a host in any form, as long as it says who speaks."""


def read_stamp(line: str) -> Stamp:
    """Take off what stands before the message; what is not known as such stays."""
    text = _COLOUR.sub("", line) if "\x1b" in line else line
    at: float | None = None
    uptime: float | None = None
    is_foreign = False
    for _ in range(7):
        first = text[:1]
        match = _KMSG.match(text) if first.isdigit() else None
        if match is not None:
            uptime = int(match["us"]) / 1e6
        elif first == "[" and (match := _UPTIME.match(text)) is not None:
            uptime = float(match["s"])
        elif (match := _ISO.match(text) or _CTIME.match(text)) is not None:
            at = _moment(match.groupdict())
        elif first.isdigit() and (match := _UNIX.match(text)) is not None:
            at = float(match["unix"])
        elif first == "[":
            match = _DELTA.match(text)
        else:
            match = _LEVEL.match(text) or _SYSLOG.match(text) or _SENDER.match(text) or _HOST.match(text)
        if match is None and "kernel:" in text:
            match = _STRANGE.match(text)
        if match is None:
            break
        if match.re in (_KMSG, _LEVEL):
            is_foreign = _is_foreign(match.groupdict())
        elif match.re in (_SENDER, _STRANGE):
            is_foreign = False
        text = text[match.end() :]
    return Stamp(text, at, uptime, is_foreign)


def _is_foreign(parts: dict[str, str | None]) -> bool:
    """Whether a level (`<12>`) or a facility (`user  :warn  : `, as of `dmesg -x`) is not the kernel's."""
    if parts.get("level"):
        return int(parts["level"] or 0) >> 3 != 0
    return parts.get("facility") != "kern"


def _moment(parts: dict[str, str | None]) -> float | None:
    try:
        clock = datetime.time.fromisoformat(parts["clock"] or "")
        if parts.get("date"):
            day = datetime.date.fromisoformat(parts["date"] or "")
        else:
            day = datetime.date(
                int(parts["year"] or 0), _MONTHS[(parts["month"] or "").lower()], int(parts["day"] or 0)
            )
    except (ValueError, KeyError):
        return None
    zone = (parts.get("zone") or "Z").replace(":", "")
    offset = 0 if zone == "Z" else (1 if zone[0] == "+" else -1) * (int(zone[1:3]) * 3600 + int(zone[3:5]) * 60)
    moment = datetime.datetime.combine(day, clock, datetime.timezone.utc).timestamp()
    return moment + float(f"0.{parts.get('part') or 0}") - offset


_ANYWHERE: Final = re.compile(
    r"(?<!\d)(?P<date>\d{4}[-/]\d\d[-/]\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
    r" ?(?P<zone>Z\b|[+-]\d\d:?\d\d\b)?"
    r"|(?<![\d/])(?P<us>\d\d/\d\d/(?:20)?\d\d),? (?P<us_clock>\d\d:\d\d:\d\d)"
    r"|\b(?P<name>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2}) (?P<named_clock>\d\d:\d\d:\d\d)(?:\.\d{1,6})?"
    r"(?: (?P<year>\d{4})\b)?"
    r"|(?:^|[^\w])[IWEFC](?P<glog>\d{4}) (?P<glog_clock>\d\d:\d\d:\d\d)(?:\.(?P<glog_part>\d{1,9}))?"
)
_CLOCK: Final = re.compile(r"\d\d:\d\d:\d\d")
STAMP_CHARACTERS: Final = 160
"""A stamp begins this near to the beginning of its line."""


def moment(line: str, year: int | None = None) -> float | None:
    """The first time with a date in the beginning of a line, Unix seconds (without a zone: as if it were UTC).

    `year`: of stamps that tell none (syslog, glog); without it they tell nothing.
    """
    match = _ANYWHERE.search(line, 0, STAMP_CHARACTERS) if _CLOCK.search(line, 0, STAMP_CHARACTERS) else None
    if match is None:
        return None
    found = match.groupdict()
    if found["date"] is not None:
        return _moment({**found, "date": found["date"].replace("/", "-")})
    if found["us"] is not None:
        month, day, us_year = found["us"].split("/")
        return _moment({"date": f"20{us_year[-2:]}-{month}-{day}", "clock": found["us_clock"]})
    stamp_year = found["year"] or (str(year) if year else "")
    if not stamp_year:
        return None
    if found["glog"] is not None:
        date = f"{stamp_year}-{found['glog'][:2]}-{found['glog'][2:]}"
        return _moment({"date": date, "clock": found["glog_clock"], "part": found["glog_part"]})
    return _moment({"month": found["name"], "day": found["day"], "clock": found["named_clock"], "year": stamp_year})


MAX_LINE: Final = 2048
"""Characters of a line that are looked at."""
OPEN_MESSAGES: Final = 16
"""Messages of several lines that may be under way at once (several CPUs write at once)."""

MAX_XIDS: Final = 8
_XIDS: Final = re.compile(r"(?<!^)(?=NVRM: Xid ?\()")


class _Open:
    """A message of which more lines may come."""

    __slots__ = ("compiled", "confirmed", "event", "left", "reported", "taken")

    def __init__(self, compiled: Compiled, event: KernelEvent) -> None:
        self.compiled, self.event = compiled, event
        self.left = compiled.rule.span
        self.taken: set[str] = set()
        self.reported = False
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
        """Whether a later line may change what was reported: none of the next lines may be left out."""
        return bool(self._open) or self._kills.waits

    def skip(self, lines: int) -> None:
        """So many lines were left out, because none has a literal of the rules and no message was open."""
        self._line += lines

    def feed(self, line: str) -> list[KernelEvent]:
        """Read the next line."""
        self._line += 1
        low = line[: MAX_LINE * 2].lower()
        complete = self._age() if self._open or self._kills.waits else []
        candidates = self._rules.candidates(low)
        if candidates is None and not self._open:
            return complete
        stamp = read_stamp(line[: MAX_LINE * 2].rstrip("\r\n"))
        if stamp.is_foreign:
            return complete
        # A record of /dev/kmsg has its newlines written out.
        for part in stamp.text.replace("\\x0a", "\n").split("\n"):
            text = part[:MAX_LINE]
            complete += self._more(text) if candidates is None else self._read(text, text.lower(), stamp, candidates)
        return complete

    def end(self) -> list[KernelEvent]:
        """Nothing more comes (for now): what is still open is complete as it is."""
        complete = self._kills.end()
        while self._open:
            complete += _completed(self._open.popleft())
        return complete

    def _age(self) -> list[KernelEvent]:
        complete = self._kills.age()
        for message in self._open:
            message.left -= 1
        while self._open and (self._open[0].left < 0 or len(self._open) > OPEN_MESSAGES):
            complete += _completed(self._open.popleft())
        expired = [message for message in self._open if message.left < 0]
        for message in expired:
            self._open.remove(message)
            complete += _completed(message)
        return complete

    def _read(self, text: str, low: str, stamp: Stamp, candidates: list[Compiled]) -> list[KernelEvent]:
        if "xid" in low or "nvswitch" in low:
            # Lines that were written at once may have become one.
            parts = _XIDS.split(text)[:MAX_XIDS] if low.count("xid") > 1 else [text]
            events = [read_xid(part, self._tables) or read_sxid(part, self._tables) for part in parts]
            found = [self._placed(event, stamp) for event in events if event is not None]
            if found:
                return found
        if "kill" in low or "oom" in low:
            killed = self._kills.read(text, low, lambda: self._event_base(text, stamp))
            if killed is not None:
                return killed
        for one in candidates:
            match = one.regex.search(text) if _has_one(low, one.literals) else None
            if match is not None:
                return self._matched(one, match, text, stamp)
        return self._more(text)

    def _placed(self, event: KernelEvent, stamp: Stamp) -> KernelEvent:
        return msgspec.structs.replace(event, line=self._line, at=stamp.at, uptime=stamp.uptime)

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

    def _matched(self, one: Compiled, match: re.Match[str], text: str, stamp: Stamp) -> list[KernelEvent]:
        rule = one.rule
        event = KernelEvent(
            kind=rule.kind,
            rule=rule.id,
            failure_class=rule.failure_class,
            severity=rule.severity,
            scope=rule.scope,
            confidence=rule.confidence or CONFIDENCE[rule.severity],
            outlook=rule.outlook,
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
        message.reported = True
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
                complete = self._confirm(message, text)
                if complete:
                    return complete
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
        message.reported = True
        return [message.event]


def _has_one(text: str, words: tuple[str, ...]) -> bool:
    for word in words:  # noqa: SIM110  # any() over a generator costs twice as much
        if word in text:
            return True
    return False


_WORDS: Final[dict[str, KernelSeverity]] = {
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
    of_bus = fields.get("section", "").startswith("PCIe")  # firmware reports errors of the bus in the same form
    return msgspec.structs.replace(
        event,
        failure_class=FailureClass.PCIE_ERROR if of_bus else event.failure_class,
        device=event.device or device if keep else device or event.device,
        pid=event.pid if pid is None else pid,
        severity=severity,
        confidence=CONFIDENCE[severity] if said else event.confidence,
        fields={**event.fields, **fields},
    )


def _completed(message: _Open) -> list[KernelEvent]:
    return [] if message.reported or not message.confirmed else [message.event]
