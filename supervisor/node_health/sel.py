"""The event log of the node's management controller (BMC), by `ipmitool`: slow, for root, and only when asked for."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from typing import Final

from diagnosis.health import Check, Level, Reading, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import Moment, Place
from supervisor.node_health.programs import find_program, run

# fmt: off
CHECK: Final = Check(id="ipmi_events", failure_class=FailureClass.CPU_OR_MEMORY_HW, scope="node", when="preflight",
    what="the management controller logged a hardware failure",
    source="ipmitool sel elist (only with --only ipmi_events)",
    # The log is seldom cleared: what is old in it has been dealt with, or is seen by other checks.
    threshold="a failure asserted within {days} days",
    limits={"days": 1})
# fmt: on
TIMEOUT_S: Final = 25.0

# By the event texts of ipmitool's own tables (IPMI 2.0, table 42-3), and NVIDIA's OEM ones.
_CRITICAL: Final = (
    r"uncorrectable|fatal|pci serr|pci perr|\bnmi\b|ierr|thermal trip|machine check|mca_error|bios corrupt"
    r"|non-recoverable|frb\d"
)
_WARNING: Final = (
    r"ac lost|failure detected|predictive failure|redundancy lost|throttled|correctable.*limit|(?:upper|lower) critical"
)


def failures(text: str, wall: float, days: float) -> list[tuple[Level, str]]:
    """Level and text of the failures asserted lately; `text`: of `ipmitool sel elist`; `wall`: Unix seconds."""
    found: list[tuple[Level, str]] = []
    oldest = datetime.fromtimestamp(wall, timezone.utc) - timedelta(days=days + 1)  # the clock's zone is not told
    for line in text.splitlines()[-4096:]:
        fields = [field.strip() for field in line.split("|")]
        if len(fields) < 6 or "Asserted" not in fields[5:]:
            continue
        logged = _day(fields[1])
        if logged is None or logged < oldest:
            continue
        event = " ".join(fields[3:-1])
        critical = re.search(_CRITICAL, event, re.I)
        # "Non-fatal" and the like come from sensors that tell of every change.
        if (critical or re.search(_WARNING, event, re.I)) and not re.search(r"non-?(fatal|critical)", event, re.I):
            found.append(("critical" if critical else "warning", clean_text(event, 120)))
    return found


def _day(text: str) -> datetime | None:
    for form in ("%m/%d/%Y", "%m/%d/%y", "%d/%m/%Y", "%d/%m/%y"):
        try:
            return datetime.strptime(text, form).replace(tzinfo=timezone.utc)
        except ValueError:
            continue
    return None


def judge(found: list[tuple[Level, str]]) -> Reading:
    if not found:
        return healthy(CHECK.id, text="no failure logged lately")
    worst: Level = "critical" if any(level == "critical" for level, _ in found) else "warning"
    texts = list(dict.fromkeys(text for level, text in found if level == worst))
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return unhealthy(CHECK.id, "; ".join(texts[:3]) + more, level=worst, values={"events": len(found)})


def look(place: Place, now: Moment) -> list[Reading]:
    """Nothing unless it was asked for by its name."""
    if not any(fnmatchcase(CHECK.id, pattern) for pattern in place.only):
        return [not_applicable(CHECK.id, "only looked at with --only ipmi_events")]
    program = find_program("ipmitool") if place.live else ""
    if not program:
        return [not_applicable(CHECK.id, "no ipmitool here")]
    try:
        done = run([program, "sel", "elist"], TIMEOUT_S)
    except OSError as error:
        return [unknown(CHECK.id, f"ipmitool cannot be started: {error.strerror}")]
    if done is None:
        return [unknown(CHECK.id, f"ipmitool gave no answer in {TIMEOUT_S:g} s")]
    if done[0] != 0:
        return [unknown(CHECK.id, f"ipmitool says: {clean_text(done[1].strip()[-150:]) or done[0]}")]
    return [judge(failures(done[1], now.wall, place.limits(CHECK)["days"]))]
