"""The event log of the node's management controller (BMC), by `ipmitool`: slow, for root, and only when asked for."""

from __future__ import annotations

import re
import subprocess
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from typing import Final

from diagnosis.health import Check, Level, Reading, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.probes.probe import Moment, Place

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
_RULES: Final[tuple[tuple[re.Pattern[str], Level], ...]] = (
    (
        re.compile(
            r"uncorrectable|fatal|pci serr|pci perr|\bnmi\b|ierr|thermal trip|machine check|mca_error"
            r"|bios corrupt|non-recoverable|frb\d",
            re.I,
        ),
        "critical",
    ),
    (
        re.compile(
            r"ac lost|failure detected|predictive failure|redundancy lost|throttled|correctable.*limit"
            r"|(?:upper|lower) critical",
            re.I,
        ),
        "warning",
    ),
)
_DATE: Final = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4}|\d{2})$")


def failures(text: str, wall: float, days: float) -> list[tuple[Level, str]]:
    """Level and text of the failures asserted lately; `text`: of `ipmitool sel elist`; `wall`: Unix seconds."""
    found = []
    oldest = datetime.fromtimestamp(wall, timezone.utc) - timedelta(days=days + 1)  # the clock's zone is not told
    for line in text.splitlines()[-4096:]:
        fields = [field.strip() for field in line.split("|")]
        if len(fields) < 6 or "Asserted" not in fields[5:]:
            continue
        logged = _day(fields[1])
        if logged is None or logged < oldest:
            continue
        event = " ".join(fields[3:-1])
        level = next((level for rule, level in _RULES if rule.search(event)), None)
        # "Non-fatal" and the like come from sensors that tell of every change.
        if level and not re.search(r"non-?(fatal|critical)", event, re.I):
            found.append((level, clean_text(event, 120)))
    return found


def _day(text: str) -> datetime | None:
    found = _DATE.match(text)
    if not found:
        return None
    first, second, year = (int(part) for part in found.groups())
    month, day = (first, second) if first <= 12 else (second, first)
    try:
        return datetime(year + (2000 if year < 100 else 0), month, day, tzinfo=timezone.utc)
    except ValueError:
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
    import shutil  # 0.6 MiB, for what is only looked at when asked for

    program = shutil.which("ipmitool", path="/usr/bin:/usr/sbin:/bin:/sbin") if place.live else None
    if program is None:
        return [not_applicable(CHECK.id, "no ipmitool here")]
    try:
        done = subprocess.run(
            [program, "sel", "elist"], capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return [unknown(CHECK.id, f"ipmitool gave no answer in {TIMEOUT_S:g} s")]
    except OSError as error:
        return [unknown(CHECK.id, f"ipmitool cannot be started: {error.strerror}")]
    if done.returncode != 0:
        why = clean_text(done.stderr.decode(errors="replace").strip(), 150)
        return [unknown(CHECK.id, f"ipmitool says: {why or done.returncode}")]
    text = done.stdout[-(1 << 20) :].decode(errors="replace")
    return [judge(failures(text, now.wall, place.limits(CHECK)["days"]))]
