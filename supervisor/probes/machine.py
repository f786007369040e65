"""The machine as a whole: boots, clock, services, kernel modules, versions, and the way to the scheduler."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
import threading
from typing import Final
from urllib.parse import urlsplit

import msgspec

from diagnosis.health import Reading, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from supervisor.probes.inventory import driver_version, inventory, library_version
from supervisor.probes.machine_checks import (
    LIBRARY,
    MODULES,
    NAME,
    OFFSET,
    REBOOTED,
    SLURM,
    SYNCHRONIZED,
    UNITS,
    UPTIME,
    VERSIONS,
    Boot,
    judge_library,
    judge_modules,
    judge_offset,
    judge_ping,
    judge_reboot,
    judge_synchronized,
    judge_unit,
    judge_uptime,
    judge_versions,
)
from supervisor.probes.probe import Moment, Place
from supervisor.probes.units import enabled_units, service, state_of

KNOWN_UNITS: Final = ("slurmd", "munge", "sssd", "nvidia-persistenced")
"""Looked at where they are enabled; fabric manager and IMEX belong to the fabric probe."""
TIME_UNITS: Final = tuple("chronyd chrony ntpd ntp ntpsec systemd-timesyncd openntpd ptp4l phc2sys".split())
KEEP_EVERY_S: Final = 600.0
ENABLED_EVERY: Final = 15
"""Looks between two readings of what is enabled."""
_SLURM_FOLDERS: Final = ("etc/slurm", "run/slurm/conf", "var/spool/slurmd/conf-cache", "opt/slurm/etc", "usr/local/etc")
_STA_UNSYNC: Final = 0x40
_TIME_ERROR: Final = 5


class _Seen(msgspec.Struct):
    at: float
    before_at: float | None = None


class _Kept(msgspec.Struct):
    """`machine.json` of the state folder, of whichever boot (`Place.load` knows this one only)."""

    boot_id: str
    value: _Seen


def read_boot(place: Place, wall: float) -> Boot | None:
    """Also keeps, now and then, that the node was looked at."""
    try:
        uptime_s = float((place.text("proc/uptime", 64) or "").split()[0])
    except (ValueError, IndexError):
        return None
    kept, boot_id = _kept(place), place.boot_id
    same = kept is not None and kept.boot_id == boot_id
    before_at = None
    if kept is not None:
        before_at = kept.value.before_at if same else kept.value.at
    if boot_id and (not same or kept is None or wall - kept.value.at > KEEP_EVERY_S):
        place.keep("machine", {"at": wall, "before_at": before_at})
    return Boot(uptime_s, before_at)


def _kept(place: Place) -> _Kept | None:
    if place.state_dir is None:
        return None
    try:
        return msgspec.json.decode((place.state_dir / "machine.json").read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return None


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


def find_program(name: str) -> str:
    """Path of a program of PATH or of where Slurm is usually put; empty when there is none."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin", "/opt/slurm/bin"]
    paths = (os.path.join(folder, name) for folder in folders if folder.startswith("/"))
    return next((path for path in paths if os.access(path, os.X_OK)), "")


def has_slurm(place: Place) -> bool:
    """That its programs are there says little: images carry them."""
    named = "SLURM_CONF" in os.environ or "SLURM_JOB_ID" in os.environ
    return named or any(place.names(folder, "slurm.conf") for folder in _SLURM_FOLDERS)


def ping_slurm(program: str, seconds: float) -> Reading:
    try:
        child = subprocess.Popen(
            [program, "ping"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/"
        )
    except OSError as error:
        return unknown(SLURM.id, f"scontrol cannot be run: {error.strerror}")
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()  # and no wait for its end, which may never come
        return judge_ping(None)
    return judge_ping(output.decode(errors="replace")[:4096])


class MachineProbe:
    name = "machine"
    checks = (REBOOTED, UPTIME, SYNCHRONIZED, OFFSET, UNITS, MODULES, LIBRARY, VERSIONS, NAME, SLURM)
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
            judge_library(driver_version(place), library_version(place, "libcuda.so.1")),
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
