"""The log of NVIDIA's fabric manager: its version, and the errors since it last started."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from typing import Final

from diagnosis.health import Level
from diagnosis.signals import clean_text
from supervisor.probes.probe import Place

LOG: Final = "var/log/fabricmanager.log"
CONFIG: Final = "usr/share/nvidia/nvswitch/fabricmanager.cfg"


@dataclasses.dataclass(frozen=True)
class LogFacts:
    """What the log tells since the fabric manager last started or last had everything configured."""

    version: str = ""
    newest: float = 0.0
    """Time of the newest line (Unix, the node's zone)."""
    found: tuple[tuple[Level, float, str], ...] = ()
    """Level, time and text of each error; at most 50, the newest kept. A time of 0 is not known."""


_MONTHS: Final = {
    name: number for number, name in enumerate("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)
}
_STAMP: Final = re.compile(r"\[(\w{3}) (\d\d) (\d{4}) (\d\d):(\d\d):(\d\d)\]")
_STARTED: Final = re.compile(r"Fabric Manager version (\d[\d.]*) is running with")
_CONFIGURED: Final = "Successfully configured all the available"
_ERRORS: Final[tuple[tuple[str, Level], ...]] = (
    ("detected NVSwitch fatal error", "critical"),
    ("detected NVSwitch non-fatal error", "warning"),
    ("in the multicast team", "warning"),
    ("don't match with any supported system topology", "critical"),
    ("Failed to configure all the available", "critical"),
)


def _stamp(line: str) -> float:
    found = _STAMP.match(line)
    if not found or found[1] not in _MONTHS:
        return 0.0
    day, year, hour, minute, second = (int(part) for part in found.groups()[1:])
    try:
        return time.mktime((year, _MONTHS[found[1]], day, hour, minute, second, 0, 0, -1))
    except (OverflowError, ValueError):
        return 0.0


def parse_log(text: str, before: LogFacts) -> LogFacts:
    """`text`: what was written after what `before` was read from."""
    version, newest, found = before.version, before.newest, list(before.found)
    for line in text.splitlines():
        if started := _STARTED.search(line):
            version, found = started[1], []
        elif _CONFIGURED in line:
            found = []
        else:
            for pattern, level in _ERRORS:
                if pattern in line:
                    found.append((level, _stamp(line), clean_text(line, 200)))
                    break
        newest = _stamp(line) or newest
    return LogFacts(version, newest, tuple(found[-50:]))


class LogTail:
    """Reads what was added to the log since the last look; at most the last `LIMIT` bytes."""

    LIMIT: Final = 256 * 1024

    def __init__(self) -> None:
        self.facts = LogFacts()
        self._at = 0
        self._inode = 0

    def read(self, place: Place) -> str | None:
        """What was added; None when there is no log that can be read."""
        configured = re.search(r"^LOG_FILE_NAME=(/\S+)", place.text(CONFIG) or "", re.MULTILINE)
        name = configured[1].lstrip("/") if configured else LOG
        try:
            descriptor = os.open(place.path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError):
            return None
        try:
            info = os.fstat(descriptor)
            if info.st_ino != self._inode or info.st_size < self._at:
                self._at = 0  # a new file: it was rotated, or begun anew
            self._inode = info.st_ino
            start = max(self._at, info.st_size - self.LIMIT)
            data = os.pread(descriptor, self.LIMIT, start)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        whole = data[: data.rfind(b"\n") + 1]
        self._at = start + len(whole)
        text = whole.decode(errors="replace")
        self.facts = parse_log(text, self.facts)
        return text
