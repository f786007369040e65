"""The machine as a whole: whether it was booted anew, and how far its clock is from the controller's."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Final, NamedTuple

from diagnosis.health import Check, CheckResult, Level, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Frozen
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import JobInfo, Moment, ProbeContext
from supervisor.node_health.counters import recall

# fmt: off
REBOOTED = Check(id="node_rebooted", failure_class=FailureClass.NODE_FAILURE, scope="node",
    when="periodic", calm_looks=1,
    what="the node was booted anew",
    source="/proc/sys/kernel/random/boot_id, /proc/uptime",
    threshold="another boot id than when it was last looked at, for the first {recent_s} s",
    limits={"recent_s": 3600})
OFFSET = Check(id="clock_offset", failure_class=FailureClass.NODE_FAILURE, scope="node", when="periodic",
    what="the clock differs from the controller's",
    source="times in heartbeats and their answers",
    # No run fails from a second; credentials (munge, Kerberos, TLS) do from minutes, and logs are hard to compare.
    threshold="over {warning_s} s for certain: warning; over {critical_s} s: critical",
    limits={"warning_s": 0.05, "critical_s": 60})
# fmt: on

KEEP_EVERY_S: Final = 600.0


# --- reading


class Boot(NamedTuple):
    """What is known of this boot and the one before."""

    uptime_s: float
    before_at: float | None
    """When the node was last looked at in an earlier boot; None when it never was."""


class _Seen(Frozen, frozen=True, kw_only=True):
    """What is kept over boots."""

    boot_id: str = ""
    at: float | None = None
    before_at: float | None = None


def read_boot(place: ProbeContext, wall: float) -> Boot | None:
    """Also keeps, now and then, that the node was looked at."""
    try:
        uptime_s = float((place.text("proc/uptime", 64) or "").split()[0])
    except (ValueError, IndexError):
        return None
    kept, boot_id = recall(place, "machine", _Seen, any_boot=True), place.boot_id
    before_at = kept.before_at if kept.boot_id == boot_id else kept.at
    if boot_id and (kept.boot_id != boot_id or wall - (kept.at or 0.0) > KEEP_EVERY_S):
        place.keep("machine", _Seen(boot_id=boot_id, at=wall, before_at=before_at))
    return Boot(uptime_s, before_at)


# --- judging


def judge_reboot(boot: Boot | None, wall: float, limits: Mapping[str, float]) -> CheckResult:
    if boot is None:
        return unknown(REBOOTED.id, "the uptime cannot be read")
    values = {"uptime_s": boot.uptime_s}
    if boot.before_at is None or boot.uptime_s > limits["recent_s"]:
        return healthy(REBOOTED.id, values=values)
    text = f"booted anew at {_utc(wall - boot.uptime_s)}, last looked at before that at {_utc(boot.before_at)}"
    return unhealthy(REBOOTED.id, text, level="warning", values=values)


def judge_offset(job: JobInfo, limits: Mapping[str, float]) -> CheckResult:
    if job.clock_offset_s is None:
        return not_applicable(OFFSET.id, "no controller to compare with")
    offset_s, error_s = job.clock_offset_s, job.clock_error_s
    certain_s = abs(offset_s) - error_s
    way = "ahead of" if offset_s > 0 else "behind"
    text = f"{abs(offset_s):.3g} s {way} the controller's, give or take {error_s:.2g} s"
    level: Level = "critical" if certain_s > limits["critical_s"] else "warning"
    values = {"offset_s": offset_s, "error_s": error_s}
    return judged(OFFSET.id, level if certain_s > limits["warning_s"] else None, text, values=values)


def _utc(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, tz=datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


# --- the probe


class MachineProbe:
    name = "machine"
    checks = (REBOOTED, OFFSET)
    every_s = 60.0
    deadline_s = 20.0
    once_s = 5.0

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
        return [
            judge_reboot(read_boot(place, now.wall), now.wall, place.limits(REBOOTED)),
            judge_offset(place.job, place.limits(OFFSET)),
        ]
