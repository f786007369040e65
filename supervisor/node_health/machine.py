"""The machine as a whole: boots, clock, services, kernel modules, versions, and the way to the scheduler."""

from __future__ import annotations

import ctypes
import datetime
import os
import re
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from diagnosis.health import Check, Level, Reading, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Frozen, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import JobView, Moment, Place
from supervisor.node_health.inventory import inventory
from supervisor.node_health.network.counters import recall
from supervisor.node_health.programs import find_program, run
from supervisor.node_health.units import UnitState, enabled_units, service, state_of

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
VERSIONS = Check(id="versions_expected", failure_class=FailureClass.GPU_DRIVER, scope="node", when="preflight",
    what="a version is not the one that the site expects",
    source="supervisor.node_health.inventory",
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

KNOWN_UNITS: Final = ("slurmd", "munge", "sssd", "nvidia-persistenced")
"""Looked at where they are enabled; fabric manager and IMEX belong to the fabric probe."""
TIME_UNITS: Final = tuple("chronyd chrony ntpd ntp ntpsec systemd-timesyncd openntpd ptp4l phc2sys".split())
KEEP_EVERY_S: Final = 600.0
ENABLED_EVERY: Final = 15
"""Looks between two readings of what is enabled."""
_SLURM_FOLDERS: Final = ("etc/slurm", "run/slurm/conf", "var/spool/slurmd/conf-cache", "opt/slurm/etc", "usr/local/etc")
_STA_UNSYNC: Final = 0x40
_TIME_ERROR: Final = 5


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


def read_boot(place: Place, wall: float) -> Boot | None:
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


def kernel_clock() -> tuple[bool, float] | None:
    """Whether the kernel's clock is synchronized, and its largest error in seconds; None when it does not tell.

    adjtimex(2) with `modes` 0 reads only. `struct timex` of 64-bit Linux: maxerror at 24 (microseconds), status at 40.
    """
    buffer = ctypes.create_string_buffer(512)
    try:
        state = ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if state < 0 or struct.calcsize("l") != 8:
        return None
    (error_us,) = struct.unpack_from("=q", buffer, 24)
    (status,) = struct.unpack_from("=i", buffer, 40)
    return state != _TIME_ERROR and not status & _STA_UNSYNC, error_us / 1e6


def loaded_modules(place: Place) -> frozenset[str]:
    listed = (place.text("proc/modules", 256 * 1024) or "").splitlines()
    return frozenset([*place.names("sys/module"), *(line.split(" ", 1)[0] for line in listed)])


def resolve(host: str, seconds: float) -> Reading:
    """In a thread of its own: a resolver takes its time and cannot be stopped."""
    result: list[str] = []

    def ask() -> None:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            result.append("")
        except (OSError, UnicodeError) as error:
            result.append(clean_text(str(error), 200))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        return unhealthy(NAME.id, f"{host} was not resolved in {seconds:g} s", host)
    return unhealthy(NAME.id, f"{host} cannot be resolved: {result[0]}", host) if result[0] else healthy(NAME.id, host)


def has_slurm(place: Place) -> bool:
    """That its programs are there says little: images carry them."""
    named = "SLURM_CONF" in os.environ or "SLURM_JOB_ID" in os.environ
    return named or any(place.names(folder, "slurm.conf") for folder in _SLURM_FOLDERS)


def ping_slurm(program: str, seconds: float) -> Reading:
    try:
        done = run([program, "ping"], seconds)
    except OSError as error:
        return unknown(SLURM.id, f"scontrol cannot be run: {error.strerror}")
    return judge_ping(done[1][:4096] if done else None)


# --- judging


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
    return judged(UPTIME.id, "warning" if boot.uptime_s < limits["least_s"] else None, f"up for {boot.uptime_s:.0f} s")


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
    if job.clock_offset_s is None:
        return not_applicable(OFFSET.id, "no controller to compare with")
    offset_s, error_s = job.clock_offset_s, job.clock_error_s
    certain_s = abs(offset_s) - error_s
    way = "ahead of" if offset_s > 0 else "behind"
    text = f"{abs(offset_s):.3g} s {way} the controller's, give or take {error_s:.2g} s"
    level: Level = "critical" if certain_s > limits["critical_s"] else "warning"
    values = {"offset_s": offset_s, "error_s": error_s}
    return judged(OFFSET.id, level if certain_s > limits["warning_s"] else None, text, values=values)


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
    return judged(SLURM.id, None if up else "critical", "; ".join(lines))


def _utc(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, tz=datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


# --- the probe


class MachineProbe:
    name = "machine"
    checks = (REBOOTED, UPTIME, SYNCHRONIZED, OFFSET, UNITS, MODULES, VERSIONS, NAME, SLURM)
    every_s = 60.0
    deadline_s = 20.0

    def __init__(self) -> None:
        self._looks = 0
        self._enabled: frozenset[str] = frozenset()

    def look(self, place: Place, now: Moment) -> list[Reading]:
        if self._looks % ENABLED_EVERY == 0:
            self._enabled = enabled_units(place)
        self._looks += 1
        boot = read_boot(place, now.wall)
        modules = place.site.expect.modules
        readings = [
            judge_reboot(boot, now.wall, place.limits(REBOOTED)),
            self._synchronized(place),
            judge_offset(place.job, place.limits(OFFSET)),
            *self._units(place),
            *judge_modules(modules, loaded_modules(place) if modules else frozenset()),
        ]
        return readings + (self._preflight(place, boot) if place.preflight else [])

    def _synchronized(self, place: Place) -> Reading:
        if not place.live:
            return not_applicable(SYNCHRONIZED.id, "a captured tree has no clock")
        served = any(
            service(unit) in self._enabled and state_of(place, unit) in ("running", "stopped") for unit in TIME_UNITS
        )
        return judge_synchronized(kernel_clock(), served, place.job, place.limits(SYNCHRONIZED)["near_s"])

    def _units(self, place: Place) -> list[Reading]:
        expected = tuple(service(unit) for unit in place.site.expect.units)
        known = tuple(unit for unit in map(service, KNOWN_UNITS) if unit in self._enabled and unit not in expected)
        readings = [judge_unit(unit, state_of(place, unit), unit in expected) for unit in (*expected, *known)]
        return readings or [not_applicable(UNITS.id, "none that we know is enabled, and the site expects none")]

    def _preflight(self, place: Place, boot: Boot | None) -> list[Reading]:
        versions = place.site.expect.versions
        readings = [
            judge_uptime(boot, place.limits(UPTIME)),
            *judge_versions(versions, inventory(place) if versions else {}),
        ]
        host = urlsplit(place.job.controller).hostname or ""
        if not place.live or not host:
            readings.append(not_applicable(NAME.id, "there is no controller to look for"))
        else:
            readings.append(resolve(host, place.limits(NAME)["seconds"]))
        program = find_program("scontrol") if place.live and has_slurm(place) else ""
        if program:
            readings.append(ping_slurm(program, place.limits(SLURM)["seconds"]))
        else:
            readings.append(not_applicable(SLURM.id, "no Slurm is set up here"))
        return readings
