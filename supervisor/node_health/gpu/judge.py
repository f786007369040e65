"""Judging one look at one GPU: pure functions over a frozen snapshot, one for each row of `gpu_checks`.

A judge says None (healthy), `Bad`, or `Skip` (no statement). Facts that could not be had are answered before it is
asked: absent ones make the check not applicable, others unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from diagnosis.health import Check, Level, Reading
from diagnosis.signals import clean_text
from supervisor.node_health.gpu import checks
from supervisor.node_health.gpu import gpu_links as links
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
    Limits,
    Process,
    Said,
    Skip,
    metrics,
)

Judge = Callable[[Gpu, Limits], Said]
MIB: Final = 1024 * 1024
ADDRESSED_BY_CPU: Final = 2
"""Addressing mode ATS (Grace): the GPU's memory is a NUMA node, whose used part has the kernel's page cache in it."""


class Row(NamedTuple):
    check: Check
    judge: Judge
    needs: tuple[str, ...]
    raw: bool = False
    """The judge looks at gaps itself."""


def _present(gpu: Gpu, _: Limits) -> Said:
    lost = [gap for gap in gpu.gaps() if gap.code == GPU_IS_LOST]
    gone = gpu.facts.get("handle")
    if lost:
        return Bad("critical", f"GPU is lost ({lost[0].call})")
    if not isinstance(gone, Gap) or gone.code == RESET_REQUIRED:
        return None
    if gone.code == NO_PERMISSION:
        return Skip("unknown", gone.words)
    return Bad("critical", f"the driver no longer knows this GPU ({gone.words})")


def _answers(gpu: Gpu, limits: Limits) -> Said:
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


def _recovery(gpu: Gpu, _: Limits) -> Said:
    action = int(gpu.value("recovery_action"))
    if action == 0:
        return None
    name = RECOVERY_ACTIONS.get(action)
    # A number that a newer driver invented says that something is wrong, not what.
    level: Level = "warning" if action == 3 or name is None else "critical"
    return Bad(level, f"the driver asks for: {name or f'an action unknown to us ({action})'}")


def _ecc_uncorrected(gpu: Gpu, _: Limits) -> Said:
    errors, before = gpu.value("ecc_uncorrected"), gpu.value("ecc_uncorrected_before")
    if errors > before:
        return Bad("critical", f"{errors:g} uncorrected memory errors since the driver was loaded, {before:g} before")
    return Bad("warning", f"{errors:g} uncorrected memory errors, all before we watched") if errors else None


def _ecc_corrected(gpu: Gpu, limits: Limits) -> Said:
    sustained, newest, age_s = gpu.numbers("ecc_corrected_rate")
    # A watch a tenth short of the time counts as the whole of it: looks are jittered.
    if age_s < 0.9 * limits["for_s"] or min(sustained, newest) < limits["per_s"]:
        return None
    level: Level = "critical" if sustained >= limits["critical_per_s"] else "warning"
    return Bad(level, f"{sustained:.0f} corrected memory errors a second over {age_s:.0f} s")


def _sram(gpu: Gpu, _: Limits) -> Said:
    return Bad("critical", "its SRAM error threshold is exceeded") if gpu.value("sram_threshold") else None


def _remap_pending(gpu: Gpu, _: Limits) -> Said:
    if not gpu.numbers("remapped_rows")[2]:
        return None
    level: Level = "critical" if gpu.value("preflight") else "warning"
    return Bad(level, "a row remap is pending: it needs a reset")


def _remap_failed(gpu: Gpu, _: Limits) -> Said:
    return Bad("critical", "a row remap has failed") if gpu.numbers("remapped_rows")[3] else None


_REASONS: Final = {HW_THERMAL: "heat", HW_POWER_BRAKE: "power brake", HW_SLOWDOWN: "hardware slowdown"}


def _lasting(gpu: Gpu, name: str, limits: Limits) -> tuple[float, float] | None:
    share, age_s = gpu.numbers(name)
    return (share, age_s) if age_s >= 0.9 * limits["for_s"] and share >= limits["share"] else None


def _hw_slowdown(gpu: Gpu, limits: Limits) -> Said:
    lasting = _lasting(gpu, "hw_slowdown", limits)
    if lasting is None:
        return None
    reasons = int(gpu.value("clock_reasons"))
    names = [name for bit, name in _REASONS.items() if reasons & bit] or ["not just now"]
    return Bad("critical", f"slowed down in {lasting[0]:.0%} of {lasting[1]:.0f} s ({', '.join(names)})")


def _sw_thermal(gpu: Gpu, limits: Limits) -> Said:
    lasting = _lasting(gpu, "sw_thermal", limits)
    return Bad("warning", f"thermal slowdown in {lasting[0]:.0%} of {lasting[1]:.0f} s") if lasting else None


def _temperature(gpu: Gpu, _: Limits) -> Said:
    celsius = gpu.value("temperature_c")
    highest, slowdown = gpu.number("gpu_max_c"), gpu.number("slowdown_c")
    if not highest and not slowdown:
        return Skip("not_applicable", "the GPU tells no temperature threshold")
    if slowdown and celsius >= slowdown:
        return Bad("critical", f"{celsius:g} °C, slowdown begins at {slowdown:g} °C")
    return Bad("warning", f"{celsius:g} °C, maximum {highest:g} °C") if highest and celsius > highest else None


def _processes(gpu: Gpu, limits: Limits) -> Said:
    held: list[Process] = list(gpu.numbers("processes"))
    foreign = [each for each in held if each.owner == "other" and each.memory_bytes >= limits["memory_mib"] * MIB]
    preflight = bool(gpu.value("preflight"))
    if not foreign or not (preflight or any(each.owner == "rank" for each in held)):
        return None
    shown = ", ".join(f"pid {each.pid} {each.name} ({each.memory_bytes // MIB} MiB)" for each in foreign[:4])
    return Bad("critical" if preflight else "warning", f"{len(foreign)} foreign processes hold its memory: {shown}")


def _zombie_memory(gpu: Gpu, limits: Limits) -> Said:
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


def _modes(gpu: Gpu, _: Limits) -> Said:
    if gpu.value("compute_mode") == 2:
        return Bad("critical", "compute mode prohibits programs")
    mig = gpu.numbers("mig_mode")
    if mig and mig[0] != mig[1]:
        return Bad("warning", "MIG mode will change with the next reset")
    return Bad("warning", "MIG mode is on") if mig and mig[0] else None


def _clocks(gpu: Gpu, limits: Limits) -> Said:
    for name, key in (("SM", "clock_sm"), ("memory", "clock_memory")):
        mhz, default = gpu.value(key), gpu.number(f"{key}_default") or 0.0
        if mhz and mhz < (least := max(default, limits["sm_mhz" if key == "clock_sm" else "memory_mhz"])):
            return Bad("warning", f"{name} application clock {mhz:g} MHz, expected {least:g} MHz")
    return None


ROWS: Final = (
    Row(checks.PRESENT, _present, (), raw=True),
    Row(checks.ANSWERS, _answers, (), raw=True),
    Row(checks.RECOVERY, _recovery, ("recovery_action",)),
    Row(checks.ECC_UNCORRECTED, _ecc_uncorrected, ("ecc_uncorrected",)),
    Row(checks.ECC_CORRECTED, _ecc_corrected, ("ecc_corrected_rate",)),
    Row(checks.SRAM, _sram, ("sram_threshold",)),
    Row(checks.REMAP_PENDING, _remap_pending, ("remapped_rows",)),
    Row(checks.REMAP_FAILED, _remap_failed, ("remapped_rows",)),
    Row(checks.HW_SLOWDOWN, _hw_slowdown, ("hw_slowdown",)),
    Row(checks.SW_THERMAL, _sw_thermal, ("sw_thermal",)),
    Row(checks.TEMPERATURE, _temperature, ("temperature_c",)),
    Row(checks.NVLINK, links.nvlink, ("links",)),
    Row(checks.NVLINK_ERRORS, links.nvlink_errors, ("nvlink_rates",)),
    Row(checks.FABRIC, links.fabric, ("fabric",)),
    Row(checks.PCIE_REPLAYS, links.pcie_replays, ("pcie_replays_per_min",)),
    Row(checks.PCIE_GENERATION, links.pcie_generation, ("pcie_generation", "utilization")),
    Row(checks.PROCESSES, _processes, ("processes",)),
    Row(checks.ZOMBIE_MEMORY, _zombie_memory, ("processes", "memory")),
    Row(checks.MODES, _modes, ("compute_mode",)),
    Row(checks.CLOCKS, _clocks, ("clock_sm",)),
)
CHECKS: Final = (checks.NVML, checks.NVML_COUNT, *(row.check for row in ROWS))


def judged(row: Row, gpu: Gpu, limits: Limits) -> Reading | None:
    """One row's reading of one GPU; None when what it needs was not looked at this time."""
    needed = [gpu.facts.get(name) for name in row.needs]
    if any(fact is None for fact in needed):
        return None
    said: Said = None
    gaps = [] if row.raw else [fact for fact in needed if isinstance(fact, Gap)]
    if gaps:
        gap = next((gap for gap in gaps if not gap.absent), gaps[0])
        said = Skip("not_applicable" if gap.absent else "unknown", gap.words)
    else:
        said = row.judge(gpu, limits)
    bad = isinstance(said, Bad)
    return Reading(
        check=row.check.id,
        status="unhealthy" if isinstance(said, Bad) else said.status if isinstance(said, Skip) else "healthy",
        level=said.level if isinstance(said, Bad) else "critical",
        device=gpu.device,
        gpu=gpu.device,
        gpu_uuid=gpu.uuid,
        text=clean_text(said[1], 300) if said else "",
        values=metrics(gpu) if row.check is checks.PRESENT else {},
        pids=gpu.pids if bad or row.check is checks.PRESENT else (),
    )
