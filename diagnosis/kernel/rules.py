"""What is known of kernel messages: the rules of `kernel.toml`, what a message that matched one becomes, and OOM kills.

An OOM kill is a rule of its own kind: several lines tell of it, and one event comes of them.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

import msgspec

from diagnosis.signals import Frozen, clean_text
from diagnosis.tables import load
from diagnosis.taxonomy import FailureClass
from diagnosis.text import Words, blind, literal

Kind = Literal[
    "xid", "sxid", "fallen_off_bus", "gpu_driver", "oom_kill", "mlx5", "link", "mce", "edac", "aer", "nvme", "block",
    "filesystem", "nfs", "lustre", "hung_task", "lockup", "oops", "segfault", "other",
]  # fmt: skip
Severity = Literal["fatal", "error", "warning", "info"]
Scope = Literal["rank", "gpu", "node", "fabric", "storage", "job"]


class KernelRule(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"failure_class": "class"}):
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


class KernelEvent(Frozen, frozen=True, kw_only=True):
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


CONFIDENCE: Final[dict[Severity, float]] = {"fatal": 0.9, "error": 0.8, "warning": 0.4, "info": 0.2}
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


@functools.cache
def default() -> KernelRules:
    """The table that comes with the package."""
    return KernelRules(msgspec.convert(load("diagnosis.kernel", "kernel.toml")["rule"], list[KernelRule]))


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
    pid = int(match["pid"])
    return msgspec.structs.replace(event, code=pid, pid=pid, fields=fields)
