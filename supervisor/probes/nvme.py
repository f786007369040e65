"""NVMe controllers: their state, from sysfs; and what they say of their own health, from their SMART log (as root)."""

from __future__ import annotations

import os
import struct
from typing import Final

from diagnosis.health import Check, Reading, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import Word, clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.probes.probe import Place

# fmt: off
CHECKS: Final = (
    Check(id="nvme_state", failure_class=FailureClass.STORAGE_ERROR, scope="node", looks=2,
        what="an NVMe controller is dead, resets again and again, or is gone",
        source="/sys/class/nvme/*/state",
        threshold="dead: critical; resetting, connecting or given up by its driver: warning"),
    Check(id="nvme_health", failure_class=FailureClass.STORAGE_ERROR, scope="node", when="preflight",
        what="an NVMe drive warns of itself or is worn out",
        source="SMART log page of /dev/nvme* (NVME_IOCTL_ADMIN_CMD)",
        threshold="a critical-warning bit: critical; {percent} % of its rated life used: warning",
        limits={"percent": 100}),
)
# fmt: on
MOST: Final = 64
_ROOT: Final = "sys/class/nvme"


class Controller(Word, frozen=True, kw_only=True):
    name: str
    state: str
    """`live`, `new`, `resetting`, `connecting`, `deleting`, `dead`; empty where the kernel does not tell."""
    address: str = ""
    """PCI address with the function; empty for drives that are reached over a network."""
    model: str = ""


def read_controllers(place: Place) -> list[Controller]:
    return [
        Controller(
            name=name,
            state=(place.text(f"{_ROOT}/{name}/state", 64) or "").strip(),
            address=(place.text(f"{_ROOT}/{name}/address", 64) or "").strip() if _on_pcie(place, name) else "",
            model=_model(place, name),
        )
        for name in place.names(_ROOT, "nvme[0-9]*", MOST)
    ]


def _on_pcie(place: Place, name: str) -> bool:
    return (place.text(f"{_ROOT}/{name}/transport", 64) or "pcie").strip() == "pcie"


def _model(place: Place, name: str) -> str:
    words = (place.text(f"{_ROOT}/{name}/{part}", 128) or "" for part in ("model", "firmware_rev"))
    return clean_text(" ".join(" ".join(words).split()), 80)


def judge_state(controller: Controller) -> Reading:
    text = " ".join(part for part in (controller.state or "state not told", controller.model) if part)
    if controller.state == "dead":
        return unhealthy("nvme_state", text, device=controller.name)
    if controller.state in ("new", "resetting", "connecting"):
        return unhealthy("nvme_state", text, device=controller.name, level="warning")
    return healthy("nvme_state", controller.name, text)


def judge_gone(place: Place, name: str, address: str) -> Reading | None:
    """Of a controller that was there earlier in this boot; None when it was taken away on purpose."""
    if not place.path(f"sys/bus/pci/devices/{address}").exists():
        return unhealthy("nvme_state", f"it is gone from the PCI bus (was {address})", device=name, level="warning")
    if place.link(f"sys/bus/pci/devices/{address}/driver") is None:
        return unhealthy("nvme_state", f"its driver gave it up ({address})", device=name, level="warning")
    return None  # another driver has it (vfio, SPDK)


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
        return unhealthy("nvme_health", f"it warns: {', '.join(warned)}; {said}", device=name, values=values)
    if used >= limits["percent"]:
        return unhealthy("nvme_health", said, device=name, level="warning", values=values)
    return healthy("nvme_health", name, said, values=values)


class NvmeLooks:
    """The looks at NVMe of one station: it remembers which controllers there were."""

    def __init__(self) -> None:
        self._were: dict[str, str] | None = None
        """Name -> PCI address of all controllers seen since the node was booted."""

    def look(self, place: Place) -> list[Reading]:
        controllers = read_controllers(place)
        if self._were is None:
            kept = place.load("nvme")
            self._were = {str(name): str(address) for name, address in kept.items()} if isinstance(kept, dict) else {}
        there = {controller.name: controller.address for controller in controllers if controller.address}
        readings = [judge_state(controller) for controller in controllers]
        for name, address in list(self._were.items()):
            if name in there:
                continue
            gone = None if address in there.values() else judge_gone(place, name, address)
            if gone is None:
                del self._were[name]
            readings.append(gone or not_applicable("nvme_state", "another driver or another name has it", name))
        if not there.items() <= self._were.items():
            self._were = dict([*self._were.items(), *there.items()][-MOST:])
            place.keep("nvme", self._were)
        if not readings:
            readings = [not_applicable("nvme_state", "no NVMe controller")]
        return [*readings, *self._smart(place, controllers)]

    @staticmethod
    def _smart(place: Place, controllers: list[Controller]) -> list[Reading]:
        if not place.preflight:
            return []
        local = [controller.name for controller in controllers if controller.address]
        if not local or not place.live:
            why = "the SMART log is not in a captured tree" if local else "no NVMe controller"
            return [not_applicable("nvme_health", why)]
        limits = place.limits(CHECKS[1])
        return [judge_smart(name, read_smart(name), limits) for name in local]
