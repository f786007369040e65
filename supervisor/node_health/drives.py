"""NVMe controllers: their state, and what their SMART log says (as root); and software RAID arrays."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from typing import Final

from diagnosis.health import Check, Level, Reading, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import Frozen, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import Place
from supervisor.node_health.network.counters import recall

# fmt: off
CHECKS: Final = (
    Check(id="nvme_state", failure_class=FailureClass.STORAGE_ERROR, scope="node", looks=2,
        what="an NVMe controller is dead, or resets again and again",
        source="/sys/class/nvme/*/state",
        threshold="dead: critical; new, resetting or connecting: warning"),
    Check(id="nvme_health", failure_class=FailureClass.STORAGE_ERROR, scope="node", when="preflight",
        what="an NVMe drive warns of itself or is worn out",
        source="SMART log page of /dev/nvme* (NVME_IOCTL_ADMIN_CMD)",
        threshold="a critical-warning bit: critical; {percent} % of its rated life used: warning",
        limits={"percent": 100}),
    Check(id="raid", failure_class=FailureClass.STORAGE_ERROR, scope="node", when="periodic",
        what="a software RAID array without all of its drives",
        source="/proc/mdstat",
        threshold="a drive is missing: warning; broken, or inactive after it was active: critical"),
)
# fmt: on
CHECK: Final = {check.id: check for check in CHECKS}
MOST: Final = 64
_ROOT: Final = "sys/class/nvme"


class Controller(Frozen, frozen=True, kw_only=True):
    name: str
    state: str
    """`live`, `new`, `resetting`, `connecting`, `deleting`, `dead`; empty where the kernel does not tell."""
    local: bool = True
    """On this node's PCI bus, not reached over a network."""
    model: str = ""


def read_controllers(place: Place) -> list[Controller]:
    def word(name: str, file: str) -> str:
        return " ".join((place.text(f"{_ROOT}/{name}/{file}", 128) or "").split())

    return [
        Controller(
            name=name,
            state=word(name, "state"),
            local=word(name, "transport") in ("", "pcie"),
            model=clean_text(f"{word(name, 'model')} {word(name, 'firmware_rev')}".strip(), 80),
        )
        for name in place.names(_ROOT, "nvme[0-9]*", MOST)
    ]


def judge_state(one: Controller) -> Reading:
    changing = one.state in ("new", "resetting", "connecting")
    level: Level | None = "critical" if one.state == "dead" else "warning" if changing else None
    return judged("nvme_state", level, f"{one.state or 'state not told'} {one.model}".strip(), one.name)


# --- the SMART log

_WARNINGS: Final = (
    "spare blocks below their threshold",
    "temperature beyond its threshold",
    "reliability degraded by media or internal errors",
    "read-only",
    "its backup of volatile memory failed",
    "persistent memory read-only",
)
_LOG_BYTES: Final = 512
_ADMIN_COMMAND: Final = 0xC0484E41
"""NVME_IOCTL_ADMIN_CMD: _IOWR('N', 0x41, 72 bytes)."""
_COMMAND: Final = struct.Struct("=BBHIIIQQII6III")
"""struct nvme_passthru_cmd of linux/nvme_ioctl.h."""


def read_smart(name: str, timeout_ms: int = 3000) -> bytes | str:
    """The SMART log page of a controller; or, in words, why it could not be had."""
    import ctypes
    import fcntl

    page = ctypes.create_string_buffer(_LOG_BYTES)
    words = 0x02 | (_LOG_BYTES // 4 - 1) << 16  # log page 2, and so many dwords (counted from 0) of it
    every_namespace = 0xFFFFFFFF
    get_log_page = 0x02
    command = _COMMAND.pack(
        get_log_page, 0, 0, every_namespace, 0, 0, 0, ctypes.addressof(page), 0, _LOG_BYTES, words, 0, 0, 0, 0, 0,
        timeout_ms, 0,
    )  # fmt: skip
    try:
        descriptor = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return "only root can read the SMART log"
    except OSError as error:
        return f"/dev/{name}: {error.strerror}"
    try:
        status = fcntl.ioctl(descriptor, _ADMIN_COMMAND, bytearray(command))
    except OSError as error:
        return f"the SMART log could not be read: {error.strerror}"
    finally:
        os.close(descriptor)
    return page.raw if status == 0 else f"the drive refused to give its SMART log (status {status:#x})"


def judge_smart(name: str, page: bytes | str, limits: dict[str, float]) -> Reading:
    if isinstance(page, str):
        return unknown("nvme_health", page, name)
    bits, kelvin, spare, used = page[0], int.from_bytes(page[1:3], "little"), page[3], page[5]
    media_errors = int.from_bytes(page[160:168], "little")
    values = {
        "life_used_percent": used,
        "spare_percent": spare,
        "temperature_c": kelvin - 273,
        "media_errors": media_errors,
    }
    said = f"{used} % of its rated life used, {spare} % spare, {media_errors} media errors"
    warned = [text for bit, text in enumerate(_WARNINGS) if bits & 1 << bit]
    if warned:
        return unhealthy("nvme_health", f"it warns: {', '.join(warned)}; {said}", name, values=values)
    return judged("nvme_health", "warning" if used >= limits["percent"] else None, said, name, values=values)


# --- RAID

_ARRAY: Final = re.compile(r"^(md\S{0,60}) : (\w+)(.*(?:\n .*)*)", re.MULTILINE)
_MEMBERS: Final = re.compile(r"\[\d+/\d+\] \[([U_]+)\]")
_ACTION: Final = re.compile(r"(?:recovery|resync|reshape|check) *= *[\d.]+%")


def judge_arrays(text: str, active: Iterable[str]) -> list[Reading]:
    """`text`: of /proc/mdstat; `active`: arrays that were active earlier in this boot. Some never are: containers."""
    readings = []
    for name, state, rest in _ARRAY.findall(text):
        members, action = _MEMBERS.search(rest), _ACTION.search(rest)
        drives = members[1] if members else ""
        level: Level | None = None
        said = f"RAID array {name} is {state}"
        if state == "broken" or (state == "inactive" and name in active):
            level = "critical"
        elif "_" in drives:
            said, level = f"RAID array {name}: {drives.count('_')} of {len(drives)} drives are missing", "warning"
        text = clean_text(said + (f", {' '.join(action[0].split())}" if action else ""))
        readings.append(judged("raid", level, text, name))
    return readings


# --- the looks at them


class DriveLooks:
    def __init__(self) -> None:
        self._arrays: set[str] | None = None
        """RAID arrays that were active in this boot."""

    def look(self, place: Place) -> list[Reading]:
        controllers = read_controllers(place)
        readings = [judge_state(one) for one in controllers] or [not_applicable("nvme_state", "no NVMe controller")]
        readings += self._raid(place)
        if not place.preflight:
            return readings
        local = [one.name for one in controllers if one.local]
        if not local or not place.live:
            why = "the SMART log is not in a captured tree" if local else "no NVMe controller"
            return [*readings, not_applicable("nvme_health", why)]
        return readings + [judge_smart(name, read_smart(name), place.limits(CHECK["nvme_health"])) for name in local]

    def _raid(self, place: Place) -> list[Reading]:
        if self._arrays is None:
            self._arrays = recall(place, "raid", set[str])
        text = place.text("proc/mdstat") or ""
        readings = judge_arrays(text, self._arrays)
        active = {name for name, state, _ in _ARRAY.findall(text) if state == "active"}
        if not active <= self._arrays:
            self._arrays |= active
            place.keep("raid", sorted(self._arrays))
        return readings or [not_applicable("raid", "no software RAID here")]
