"""The checks of a GPU that answers NVML: a table of rows, each a check and the function that judges a snapshot. Pure.

A judge returns None (healthy), `Bad`, or `Skip` (no statement). It is not called when a fact that it needs is missing:
a fact that the GPU does not have makes the check not applicable, any other gap makes it unknown.

Numbers without a remark are those of NVIDIA's documents and tools (RMA criteria, DCGM's health watches); where ours
differ, a comment says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from diagnosis.health import Check, CheckResult, Level
from diagnosis.signals import clean_text
from supervisor.node_health.contract import CHECK, checks_of
from supervisor.node_health.gpu.facts import (
    CORRUPTED_INFOROM,
    GPU_IS_LOST,
    HW_POWER_BRAKE,
    HW_SLOWDOWN,
    HW_THERMAL,
    NO_PERMISSION,
    RESET_REQUIRED,
    UNTOLD,
    Bad,
    Gap,
    Gpu,
    Judgement,
    Limits,
    Process,
    Skip,
    metrics,
)


def nvlink(gpu: Gpu, _: Limits) -> Judgement:
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


def nvlink_errors(gpu: Gpu, limits: Limits) -> Judgement:
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


def fabric(gpu: Gpu, _: Limits) -> Judgement:
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


def pcie_replays(gpu: Gpu, limits: Limits) -> Judgement:
    per_min = gpu.value("pcie_replays_per_min")
    # Where lanes and generation are not told, those of the slowest server GPUs' slots of the last years.
    lanes, generation = gpu.number("pcie_width_max") or 16, gpu.number("pcie_generation_max") or 4
    usual = limits["per_min"] * lanes * _GT_PER_S.get(int(generation), 64.0)
    if per_min <= usual:
        return None
    level: Level = "critical" if per_min > usual * limits["storm"] else "warning"
    return Bad(level, f"{per_min:.0f} PCIe replays a minute, up to {usual:.0f} are usual")


def pcie_generation(gpu: Gpu, limits: Limits) -> Judgement:
    generation, best = gpu.value("pcie_generation"), gpu.value("pcie_generation_best")
    busy = gpu.numbers("utilization")[0]
    if busy < limits["utilization"]:
        return Skip("not_applicable", "judged under load only: an idle link slows down by itself")
    if generation >= best:
        return None
    return Bad("warning", f"PCIe generation {generation:g} at {busy} %, it or most GPUs of this model had {best:g}")


Judge = Callable[[Gpu, Limits], Judgement]
PRESENT: Final = "gpu_present"
MIB: Final = 1024 * 1024
ADDRESSED_BY_CPU: Final = 2
"""Addressing mode ATS (Grace): the GPU's memory is a NUMA node, whose used part has the kernel's page cache in it."""


class GpuCheck(NamedTuple):
    judge: Judge
    needs: tuple[str, ...]
    """Facts without which it is not judged."""
    check: Check


def _present(gpu: Gpu, _: Limits) -> Judgement:
    lost = [gap for gap in gpu.gaps() if gap.code == GPU_IS_LOST]
    gone = gpu.facts.get("handle")
    if lost:
        return Bad("critical", f"GPU is lost ({lost[0].call})")
    if not isinstance(gone, Gap) or gone.code == RESET_REQUIRED:
        return None
    if gone.code == NO_PERMISSION:
        return Skip("unknown", gone.words)
    return Bad("critical", f"the driver no longer knows this GPU ({gone.words})")


def _answers(gpu: Gpu, limits: Limits) -> Judgement:
    gaps = gpu.gaps()
    if any(gap.code == GPU_IS_LOST for gap in gaps):
        return Skip("unknown", "GPU is lost")
    if reset := [gap for gap in gaps if gap.code == RESET_REQUIRED]:
        return Bad("critical", f"GPU requires a reset ({reset[0].call})")
    quiet = (NO_PERMISSION, CORRUPTED_INFOROM, UNTOLD)
    failed = [gap for gap in gaps if not gap.absent and gap.code not in quiet]
    asked = len(failed) + len(gpu.facts) - len(gaps)
    if failed and len(failed) >= limits["share"] * asked:
        return Bad("critical", f"{len(failed)} of {asked} calls fail ({failed[0].words})")
    return None


RECOVERY_ACTIONS: Final = {
    1: "GPU reset",
    2: "node reboot",
    3: "drain peer-to-peer traffic",
    4: "drain and reset",
    5: "recover the IMEX domain",
    6: "bus reset",
    7: "system reboot",
}


def _recovery(gpu: Gpu, _: Limits) -> Judgement:
    action = int(gpu.value("recovery_action"))
    if action == 0:
        return None
    name = RECOVERY_ACTIONS.get(action)
    # A number that a newer driver invented says that something is wrong, not what.
    level: Level = "warning" if action == 3 or name is None else "critical"
    return Bad(level, f"the driver asks for: {name or f'an action unknown to us ({action})'}")


def _ecc_uncorrected(gpu: Gpu, _: Limits) -> Judgement:
    errors, before = gpu.value("ecc_uncorrected"), gpu.value("ecc_uncorrected_before")
    if errors > before:
        return Bad("critical", f"{errors:g} uncorrected memory errors since the driver was loaded, {before:g} before")
    return Bad("warning", f"{errors:g} uncorrected memory errors, all before we watched") if errors else None


def _ecc_corrected(gpu: Gpu, limits: Limits) -> Judgement:
    sustained, newest, age_s = gpu.numbers("ecc_corrected_rate")
    # A watch a tenth short of the time counts as the whole of it: looks are jittered.
    if age_s < 0.9 * limits["for_s"] or min(sustained, newest) < limits["per_s"]:
        return None
    level: Level = "critical" if sustained >= limits["critical_per_s"] else "warning"
    return Bad(level, f"{sustained:.0f} corrected memory errors a second over {age_s:.0f} s")


def _sram(gpu: Gpu, _: Limits) -> Judgement:
    return Bad("critical", "its SRAM error threshold is exceeded") if gpu.value("sram_threshold") else None


def _remap_pending(gpu: Gpu, _: Limits) -> Judgement:
    if not gpu.numbers("remapped_rows")[2]:
        return None
    level: Level = "critical" if gpu.value("preflight") else "warning"
    return Bad(level, "a row remap is pending: it needs a reset")


def _remap_failed(gpu: Gpu, _: Limits) -> Judgement:
    return Bad("critical", "a row remap has failed") if gpu.numbers("remapped_rows")[3] else None


_REASONS: Final = {HW_THERMAL: "heat", HW_POWER_BRAKE: "power brake", HW_SLOWDOWN: "hardware slowdown"}


def _lasting(gpu: Gpu, name: str, limits: Limits) -> tuple[float, float] | None:
    share, age_s = gpu.numbers(name)
    return (share, age_s) if age_s >= 0.9 * limits["for_s"] and share >= limits["share"] else None


def _hw_slowdown(gpu: Gpu, limits: Limits) -> Judgement:
    lasting = _lasting(gpu, "hw_slowdown", limits)
    if lasting is None:
        return None
    reasons = int(gpu.value("clock_reasons"))
    names = [name for bit, name in _REASONS.items() if reasons & bit] or ["not just now"]
    return Bad("critical", f"slowed down in {lasting[0]:.0%} of {lasting[1]:.0f} s ({', '.join(names)})")


def _sw_thermal(gpu: Gpu, limits: Limits) -> Judgement:
    lasting = _lasting(gpu, "sw_thermal", limits)
    return Bad("warning", f"thermal slowdown in {lasting[0]:.0%} of {lasting[1]:.0f} s") if lasting else None


def _temperature(gpu: Gpu, _: Limits) -> Judgement:
    celsius = gpu.value("temperature_c")
    highest, slowdown = gpu.number("gpu_max_c"), gpu.number("slowdown_c")
    if not highest and not slowdown:
        return Skip("not_applicable", "the GPU reports no temperature threshold")
    if slowdown and celsius >= slowdown:
        return Bad("critical", f"{celsius:g} °C, slowdown begins at {slowdown:g} °C")
    return Bad("warning", f"{celsius:g} °C, maximum {highest:g} °C") if highest and celsius > highest else None


def _processes(gpu: Gpu, limits: Limits) -> Judgement:
    held: list[Process] = list(gpu.numbers("processes"))
    foreign = [each for each in held if each.owner == "other" and each.memory_bytes >= limits["memory_mib"] * MIB]
    preflight = bool(gpu.value("preflight"))
    if not foreign or not (preflight or any(each.owner == "rank" for each in held)):
        return None
    shown = ", ".join(f"pid {each.pid} {each.name} ({each.memory_bytes // MIB} MiB)" for each in foreign[:4])
    return Bad("critical" if preflight else "warning", f"{len(foreign)} foreign processes hold its memory: {shown}")


def _zombie_memory(gpu: Gpu, limits: Limits) -> Judgement:
    held: list[Process] = list(gpu.numbers("processes"))
    used = gpu.numbers("memory")[0]
    if used < limits["memory_mib"] * MIB or any(each.owner != "gone" for each in held):
        return None
    mig = gpu.numbers("mig_mode")
    if mig and mig[0]:
        return Skip("not_applicable", "in MIG mode the GPU as a whole lists no processes")
    if gpu.number("addressing") == ADDRESSED_BY_CPU:
        return Skip("not_applicable", "its memory is memory of the node too: the kernel may hold some of it")
    whose = f"of ended processes {[each.pid for each in held][:4]}" if held else "of no process"
    return Bad("critical" if gpu.value("preflight") else "warning", f"{used // MIB} MiB {whose}")


def _modes(gpu: Gpu, _: Limits) -> Judgement:
    if gpu.value("compute_mode") == 2:
        return Bad("critical", "compute mode prohibits programs")
    mig = gpu.numbers("mig_mode")
    if mig and mig[0] != mig[1]:
        return Bad("warning", "MIG mode will change with the next reset")
    return Bad("warning", "MIG mode is on") if mig and mig[0] else None


def _clocks(gpu: Gpu, limits: Limits) -> Judgement:
    for name, key in (("SM", "clock_sm"), ("memory", "clock_memory")):
        mhz, default = gpu.value(key), gpu.number(f"{key}_default") or 0.0
        if mhz and mhz < (least := max(default, limits["sm_mhz" if key == "clock_sm" else "memory_mhz"])):
            return Bad("warning", f"{name} application clock {mhz:g} MHz, expected {least:g} MHz")
    return None


ROWS: Final = (
    GpuCheck(_present, (), CHECK["gpu_present"]),
    GpuCheck(_answers, (), CHECK["gpu_answers"]),
    GpuCheck(_recovery, ("recovery_action",), CHECK["gpu_recovery_action"]),
    GpuCheck(_ecc_uncorrected, ("ecc_uncorrected",), CHECK["gpu_ecc_uncorrected"]),
    GpuCheck(_ecc_corrected, ("ecc_corrected_rate",), CHECK["gpu_ecc_corrected_rate"]),
    GpuCheck(_sram, ("sram_threshold",), CHECK["gpu_ecc_sram_threshold"]),
    GpuCheck(_remap_pending, ("remapped_rows",), CHECK["gpu_row_remap_pending"]),
    GpuCheck(_remap_failed, ("remapped_rows",), CHECK["gpu_row_remap_failed"]),
    GpuCheck(_hw_slowdown, ("hw_slowdown",), CHECK["gpu_hw_slowdown"]),
    GpuCheck(_sw_thermal, ("sw_thermal",), CHECK["gpu_sw_thermal_slowdown"]),
    GpuCheck(_temperature, ("temperature_c",), CHECK["gpu_temperature"]),
    GpuCheck(nvlink, ("links",), CHECK["gpu_nvlink_inactive"]),
    GpuCheck(nvlink_errors, ("nvlink_rates",), CHECK["gpu_nvlink_errors"]),
    GpuCheck(fabric, ("fabric",), CHECK["gpu_fabric"]),
    GpuCheck(pcie_replays, ("pcie_replays_per_min",), CHECK["gpu_pcie_replays"]),
    GpuCheck(pcie_generation, ("pcie_generation", "utilization"), CHECK["gpu_pcie_generation"]),
    GpuCheck(_processes, ("processes",), CHECK["gpu_processes_foreign"]),
    GpuCheck(_zombie_memory, ("processes", "memory"), CHECK["gpu_memory_zombie"]),
    GpuCheck(_modes, ("compute_mode",), CHECK["gpu_modes"]),
    GpuCheck(_clocks, ("clock_sm",), CHECK["gpu_application_clocks"]),
)
CHECKS: Final = checks_of("nvml")
NVML, NVML_COUNT = CHECKS[:2]


def judged(row: GpuCheck, gpu: Gpu, limits: Limits) -> CheckResult | None:
    """One row's result of one GPU; None when what it needs was not looked at this time."""
    needed = [gpu.facts.get(name) for name in row.needs]
    if any(fact is None for fact in needed):
        return None
    judgement: Judgement = None
    gaps = [fact for fact in needed if isinstance(fact, Gap)]
    if gaps:
        gap = next((gap for gap in gaps if not gap.absent), gaps[0])
        judgement = Skip("not_applicable" if gap.absent else "unknown", gap.words)
    else:
        judgement = row.judge(gpu, limits)
    bad = isinstance(judgement, Bad)
    return CheckResult(
        check=row.check.id,
        status="unhealthy"
        if isinstance(judgement, Bad)
        else judgement.status
        if isinstance(judgement, Skip)
        else "healthy",
        level=judgement.level if isinstance(judgement, Bad) else "critical",
        device=gpu.device,
        gpu=gpu.device,
        gpu_uuid=gpu.uuid,
        text=clean_text(judgement[1], 300) if judgement else "",
        values=metrics(gpu) if row.check.id == PRESENT else {},
        pids=gpu.pids if bad or row.check.id == PRESENT else (),
    )
