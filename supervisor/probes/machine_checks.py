"""The checks of the machine as a whole and how a look at it is judged. Pure; `machine.py` looks."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from diagnosis.health import Check, Level, Reading, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.probes.probe import JobView
from supervisor.probes.units import UnitState

# fmt: off
REBOOTED = Check(id="node_rebooted", failure_class=FailureClass.NODE_FAILURE, scope="node",
    when="periodic", calm_looks=1,
    what="the node was booted anew",
    source="/proc/sys/kernel/random/boot_id, /proc/uptime",
    threshold="another boot id than when it was last looked at, for the first {recent_s} s",
    limits={"recent_s": 3600})
UPTIME = Check(id="uptime", failure_class=FailureClass.NODE_FAILURE, scope="node", when="preflight",
    what="the node was booted only just now",
    source="/proc/uptime",
    threshold="less than {least_s} s",
    limits={"least_s": 600})
SYNCHRONIZED = Check(id="clock_synchronized", failure_class=FailureClass.NODE_FAILURE, scope="node",
    when="periodic", looks=3,
    what="the clock is not kept by its time service",
    source="adjtimex",
    threshold="the kernel says unsynchronized, a time service is enabled, and the controller's clock is not near",
    limits={"near_s": 0.05})
OFFSET = Check(id="clock_offset", failure_class=FailureClass.NODE_FAILURE, scope="node", when="periodic",
    what="the clock differs from the controller's",
    source="times in heartbeats and their answers",
    # No run fails from a second; credentials (munge, Kerberos, TLS) do from minutes, and logs are hard to compare.
    threshold="over {warning_s} s for certain: warning; over {critical_s} s: critical",
    limits={"warning_s": 0.05, "critical_s": 60})
UNITS = Check(id="unit_running", failure_class=FailureClass.NODE_FAILURE, scope="node", when="periodic", looks=2,
    what="a service that must run has no process",
    source="/sys/fs/cgroup/system.slice/*.service/cgroup.events",
    threshold="expected by the site and not running; warning: enabled, one of those we know, and not running")
MODULES = Check(id="module_loaded", failure_class=FailureClass.GPU_DRIVER, scope="node", when="periodic", looks=2,
    what="a kernel module that the site expects is not loaded",
    source="/sys/module, /proc/modules",
    threshold="expected by the site and not loaded")
LIBRARY = Check(id="driver_library", failure_class=FailureClass.GPU_DRIVER, scope="node", when="periodic", looks=2,
    what="the driver's library is not of the version of its kernel module",
    source="/proc/driver/nvidia/version, libcuda.so.1",
    threshold="versions differ: what starts now cannot use a GPU (an upgrade without a reboot)")
VERSIONS = Check(id="versions_expected", failure_class=FailureClass.GPU_DRIVER, scope="node", when="preflight",
    what="a version is not the one that the site expects",
    source="supervisor.probes.inventory",
    threshold="differs from the site's `versions`")
NAME = Check(id="controller_name", failure_class=FailureClass.DNS_OR_CONNECT, scope="node", when="preflight",
    what="the controller's host name cannot be resolved",
    source="getaddrinfo",
    threshold="an error, or no answer within {seconds} s",
    limits={"seconds": 2})
SLURM = Check(id="slurmctld_reachable", failure_class=FailureClass.DNS_OR_CONNECT, scope="node", when="preflight",
    what="no Slurm controller can be reached",
    source="scontrol ping",
    threshold="none is UP, or no answer within {seconds} s",
    limits={"seconds": 10})
# fmt: on

_VERSION: Final = re.compile(r"\d{3}\.\d+(?:\.\d+)?")


class Boot(NamedTuple):
    """What is known of this boot and the one before."""

    uptime_s: float
    before_at: float | None
    """When the node was last looked at in an earlier boot; None when it never was."""


def judge_reboot(boot: Boot | None, wall: float, limits: Mapping[str, float]) -> Reading:
    if boot is None:
        return unknown(REBOOTED.id, "the uptime cannot be read")
    values = {"uptime_s": boot.uptime_s}
    if boot.before_at is None or boot.uptime_s > limits["recent_s"]:
        return healthy(REBOOTED.id, values=values)
    text = f"booted anew at {_utc(wall - boot.uptime_s)}, last looked at before that at {_utc(boot.before_at)}"
    return unhealthy(REBOOTED.id, text, level="warning", values=values)


def judge_uptime(boot: Boot | None, limits: Mapping[str, float]) -> Reading:
    if boot is None:
        return unknown(UPTIME.id, "the uptime cannot be read")
    if boot.uptime_s >= limits["least_s"]:
        return healthy(UPTIME.id)
    return unhealthy(UPTIME.id, f"up for {boot.uptime_s:.0f} s only", level="warning")


def judge_synchronized(kernel: tuple[bool, float] | None, served: bool, job: JobView, near_s: float) -> Reading:
    """`kernel`: whether it says synchronized, and its largest error in seconds. `served`: a time service is enabled."""
    if kernel is None:
        return unknown(SYNCHRONIZED.id, "the kernel does not tell (adjtimex is not allowed here)")
    synchronized, error_s = kernel
    if synchronized:
        return healthy(SYNCHRONIZED.id, values={"largest_error_s": error_s})
    if job.clock_offset_s is not None and abs(job.clock_offset_s) + job.clock_error_s <= near_s:
        # A virtual machine's clock, or chrony without `rtcsync`, is kept well and the kernel does not know.
        return healthy(SYNCHRONIZED.id, text="unsynchronized, says the kernel, but near the controller's")
    if not served:
        return not_applicable(SYNCHRONIZED.id, "no time service is enabled here")
    return unhealthy(SYNCHRONIZED.id, "a time service is enabled, and the clock is unsynchronized", level="warning")


def judge_offset(job: JobView, limits: Mapping[str, float]) -> Reading:
    level: Level
    if job.clock_offset_s is None:
        return not_applicable(OFFSET.id, "no controller to compare with")
    offset_s, error_s = job.clock_offset_s, job.clock_error_s
    certain_s = abs(offset_s) - error_s
    way = "ahead of" if offset_s > 0 else "behind"
    text = f"{abs(offset_s):.3g} s {way} the controller's, give or take {error_s:.2g} s"
    values = {"offset_s": offset_s, "error_s": error_s}
    if certain_s <= limits["warning_s"]:
        return healthy(OFFSET.id, text=text, values=values)
    level = "critical" if certain_s > limits["critical_s"] else "warning"
    return unhealthy(OFFSET.id, text, level=level, values=values)


def judge_unit(unit: str, state: UnitState, expected: bool) -> Reading:
    if state == "unknown":
        return not_applicable(UNITS.id, "no services of systemd are to be seen here", unit)
    if state == "oneshot":
        return not_applicable(UNITS.id, "it does its work once and ends", unit)
    if state == "running":
        return healthy(UNITS.id, unit)
    why = "the site expects it" if expected else "it is enabled"
    return unhealthy(UNITS.id, f"{unit} does not run, and {why}", unit, "critical" if expected else "warning")


def judge_modules(expected: Sequence[str], loaded: frozenset[str]) -> list[Reading]:
    if not expected:
        return [not_applicable(MODULES.id, "the site expects none")]
    if not loaded:
        return [unknown(MODULES.id, "what is loaded cannot be read")]
    return [
        healthy(MODULES.id, name)
        if name.replace("-", "_") in loaded
        else unhealthy(MODULES.id, f"{name} is not loaded, and the site expects it", name)
        for name in expected
    ]


def judge_library(module: str, library: str) -> Reading:
    if not _VERSION.fullmatch(module) or not _VERSION.fullmatch(library):
        return not_applicable(LIBRARY.id, "no NVIDIA driver, or no library of a version that can be seen")
    if module == library:
        return healthy(LIBRARY.id, text=module)
    return unhealthy(LIBRARY.id, f"the kernel module is {module}, and libcuda is {library}")


def judge_versions(expected: Mapping[str, str], found: Mapping[str, str]) -> list[Reading]:
    readings = []
    for key, value in sorted(expected.items()):
        if key not in found:
            readings.append(unknown(VERSIONS.id, f"{key} cannot be seen here", key))
        elif found[key] == value:
            readings.append(healthy(VERSIONS.id, key, found[key]))
        else:
            readings.append(unhealthy(VERSIONS.id, f"{key} is {found[key]}, and the site expects {value}", key))
    return readings or [not_applicable(VERSIONS.id, "the site expects none")]


def judge_ping(output: str | None) -> Reading:
    """`output` of `scontrol ping`: `Slurmctld(primary) at head1 is UP`, a line for each controller (older versions:
    `Slurmctld(primary/backup) at head1/head2 are UP/DOWN`); None: no answer in time.
    """
    if output is None:
        return unhealthy(SLURM.id, "scontrol ping does not answer")
    lines = [clean_text(line, 100) for line in output.splitlines() if line.startswith("Slurmctld")]
    if not lines:
        return unknown(SLURM.id, f"scontrol ping: {clean_text(' '.join(output.split()), 200) or 'no word'}")
    up = any(re.search(r"\bUP\b", line) for line in lines)
    return healthy(SLURM.id, text="; ".join(lines)) if up else unhealthy(SLURM.id, "; ".join(lines))


def _utc(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, tz=datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
