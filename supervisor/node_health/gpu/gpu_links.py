"""Judging a GPU's links: NVLink, its fabric, PCIe. A part of `gpu_judge`, whose rows these functions are."""

from __future__ import annotations

from typing import Final

from diagnosis.health import Level
from supervisor.node_health.gpu.facts import Bad, Gpu, Limits, Said, Skip


def nvlink(gpu: Gpu, _: Limits) -> Said:
    states, mig = gpu.numbers("links"), gpu.numbers("mig_mode")
    if mig and mig[0]:
        return Skip("not_applicable", "in MIG mode NVLinks are not used")
    active = [link for link, state in enumerate(states) if state == 1]
    lost = [link for link in gpu.numbers("links_before") if link not in active]
    if lost:
        return Bad("critical", f"NVLink {', '.join(map(str, lost[:18]))} inactive, active earlier")
    usual = gpu.number("links_of_peers")
    if usual and len(active) < usual:
        return Bad("critical", f"{len(active)} NVLinks active, most GPUs of this model here have {usual:g}")
    return None if active else Skip("not_applicable", "no NVLink was ever active: it is not connected")


def nvlink_errors(gpu: Gpu, limits: Limits) -> Said:
    crc_per_s, replays_per_s, recoveries, failures = gpu.numbers("nvlink_rates")
    erring = ", ".join(map(str, gpu.numbers("nvlinks_erring")[:18]))
    where = f" (NVLink {erring})" if erring else ""
    if crc_per_s >= limits["crc_per_s"]:
        return Bad("critical", f"{crc_per_s:.0f} NVLink CRC errors a second{where}")
    if recoveries >= limits["recoveries"]:
        return Bad("critical", f"{recoveries:g} NVLink recoveries in 10 minutes{where}")
    if not (recoveries or failures or replays_per_s >= limits["replays_per_s"]):
        return None
    return Bad(
        "warning",
        f"in 10 minutes {recoveries:g} NVLink recoveries, {failures:g} lost or malformed packets, "
        f"{replays_per_s:.1f} replays a second{where}",
    )


FABRIC_STATES: Final = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
_FABRIC_BITS: Final[tuple[tuple[int, Level, str], ...]] = (
    (0, "critical", "degraded bandwidth"),
    (2, "warning", "route recovery in progress"),
    (4, "critical", "route unhealthy"),
    (6, "warning", "recovering from an access timeout"),
)
"""Two bits each at this shift of the health mask: 0 not supported, 1 true, 2 false."""


def fabric(gpu: Gpu, _: Limits) -> Said:
    state, status, mask = gpu.numbers("fabric")
    if state == 0:
        return Skip("not_applicable", "the GPU is in no NVLink fabric")
    if state not in FABRIC_STATES:
        return Skip("unknown", f"fabric state {state} is unknown to us")
    if state != 3:
        if gpu.value("fabric_before"):
            return Bad("critical", f"fabric registration {FABRIC_STATES[state]}, it was completed earlier")
        if state == 1:
            return Skip("not_applicable", "fabric registration was never started")
        # Until it is completed no program can start on this GPU (CUDA error 802), but it takes a while after a boot.
        level: Level = "critical" if gpu.value("preflight") else "warning"
        return Bad(level, "fabric registration is still in progress: is the fabric manager running?")
    if status:
        return Bad("critical", f"fabric registration completed with error {status}")
    flaws = [(level, text) for shift, level, text in _FABRIC_BITS if mask >> shift & 3 == 1]
    if (configuration := mask >> 8 & 0xF) >= 2:
        flaws.append(("critical", f"wrong configuration ({configuration})"))
    if not flaws:
        return None
    worst: Level = "critical" if any(level == "critical" for level, _ in flaws) else "warning"
    return Bad(worst, f"fabric: {', '.join(text for _, text in flaws)}")


_GT_PER_S: Final = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


def pcie_replays(gpu: Gpu, limits: Limits) -> Said:
    per_min = gpu.value("pcie_replays_per_min")
    # Where lanes and generation are not told, those of the slowest server GPUs' slots of the last years.
    lanes, generation = gpu.number("pcie_width_max") or 16, gpu.number("pcie_generation_max") or 4
    usual = limits["per_min"] * lanes * _GT_PER_S.get(int(generation), 64.0)
    if per_min <= usual:
        return None
    level: Level = "critical" if per_min > usual * limits["storm"] else "warning"
    return Bad(level, f"{per_min:.0f} PCIe replays a minute, up to {usual:.0f} are usual")


def pcie_generation(gpu: Gpu, limits: Limits) -> Said:
    generation, best = gpu.value("pcie_generation"), gpu.value("pcie_generation_best")
    busy = gpu.numbers("utilization")[0]
    if busy < limits["utilization"]:
        return Skip("not_applicable", "judged under load only: an idle link slows down by itself")
    if generation >= best:
        return None
    return Bad("warning", f"PCIe generation {generation:g} at {busy} %, it or most GPUs of this model had {best:g}")
