"""OOM kills: one event for each process killed, whichever of their several lines the kernel's version writes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from diagnosis.kernel.rules import KernelEvent
from diagnosis.signals import clean_text

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
