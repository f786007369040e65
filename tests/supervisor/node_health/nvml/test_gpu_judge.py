"""Judging a snapshot of a GPU: pure functions, so cases are data."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.health import CheckResult
from supervisor.node_health.gpu.checks import CHECKS, ROWS, judged
from supervisor.node_health.gpu.facts import (
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN_ERROR,
    Gap,
    Gpu,
    GpuHistory,
    Process,
    Window,
    usual,
)
from supervisor.node_health.gpu.probe import of_this_job

BY_ID = {row.check.id: row for row in ROWS}
GIB = 1 << 30


def judge(check: str, limits: dict[str, float] | None = None, **facts: Any) -> CheckResult:
    row = BY_ID[check]
    result = judged(row, Gpu("0000:c1:00", "GPU-1", facts), {**row.check.limits, **(limits or {})})
    assert result is not None
    return result


def processes(*each: tuple[str, int]) -> tuple[Process, ...]:
    return tuple(Process(100 + n, size, "python", owner) for n, (owner, size) in enumerate(each))  # type: ignore[arg-type]


BAD, WARNING, FINE, ABSENT, UNKNOWN = "critical", "warning", "healthy", "not_applicable", "unknown"
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("gpu_present", {"a": 1.0}, FINE),
    ("gpu_present", {"a": 1.0, "b": Gap(GPU_IS_LOST, "f")}, BAD),
    ("gpu_present", {"handle": Gap(6, "f")}, BAD),
    ("gpu_present", {"handle": Gap(NO_PERMISSION, "f")}, UNKNOWN),
    ("gpu_answers", {"a": 1.0, "b": Gap(UNKNOWN_ERROR, "f")}, BAD),
    ("gpu_answers", {"a": 1.0, "b": 1.0, "c": Gap(UNKNOWN_ERROR, "f")}, FINE),
    ("gpu_answers", {"a": Gap(NOT_SUPPORTED, "f"), "b": Gap(NO_PERMISSION, "f")}, FINE),
    ("gpu_recovery_action", {"recovery_action": 0}, FINE),
    ("gpu_recovery_action", {"recovery_action": 3}, WARNING),
    ("gpu_recovery_action", {"recovery_action": 7}, BAD),
    ("gpu_recovery_action", {"recovery_action": Gap(NOT_SUPPORTED, "f")}, ABSENT),
    ("gpu_recovery_action", {"recovery_action": Gap(UNKNOWN_ERROR, "f")}, UNKNOWN),
    ("gpu_ecc_corrected_rate", {"ecc_corrected_rate": (99.0, 5000.0, 300.0)}, FINE),
    ("gpu_ecc_corrected_rate", {"ecc_corrected_rate": (17_700.0, 0.0, 300.0)}, FINE),
    ("gpu_ecc_corrected_rate", {"ecc_corrected_rate": (17_700.0, 17_700.0, 200.0)}, FINE),
    ("gpu_ecc_corrected_rate", {"ecc_corrected_rate": (100.0, 100.0, 300.0)}, WARNING),
    ("gpu_ecc_corrected_rate", {"ecc_corrected_rate": (17_700.0, 17_700.0, 295.0)}, BAD),
    ("gpu_row_remap_pending", {"remapped_rows": (0, 1, 1, 0)}, WARNING),
    ("gpu_row_remap_pending", {"remapped_rows": (0, 1, 1, 0), "preflight": 1.0}, BAD),
    ("gpu_hw_slowdown", {"hw_slowdown": (0.59, 600.0)}, FINE),
    ("gpu_hw_slowdown", {"hw_slowdown": (1.0, 300.0)}, FINE),
    ("gpu_hw_slowdown", {"hw_slowdown": (0.6, 600.0), "clock_reasons": 0x80}, BAD),
    ("gpu_temperature", {"temperature_c": 86, "gpu_max_c": 87, "slowdown_c": 89}, FINE),
    ("gpu_temperature", {"temperature_c": 88, "gpu_max_c": 87, "slowdown_c": 89}, WARNING),
    ("gpu_temperature", {"temperature_c": 89, "gpu_max_c": 87, "slowdown_c": 89}, BAD),
    ("gpu_temperature", {"temperature_c": 120, "gpu_max_c": Gap(NOT_SUPPORTED, "f")}, ABSENT),
    ("gpu_nvlink_inactive", {"links": (0, 0, 0), "links_before": ()}, ABSENT),
    ("gpu_nvlink_inactive", {"links": (1, 0, 1), "links_before": ()}, FINE),
    ("gpu_nvlink_inactive", {"links": (1, 0, 1), "links_before": (0, 1)}, BAD),
    ("gpu_nvlink_inactive", {"links": (1, 0, 1), "links_of_peers": 3.0}, BAD),
    ("gpu_nvlink_inactive", {"links": (1, 1, 1), "links_of_peers": 2.0}, FINE),
    ("gpu_nvlink_inactive", {"links": (0, 0), "links_before": (0, 1), "mig_mode": (1, 1)}, ABSENT),
    ("gpu_fabric", {"fabric": (0, 0, 0)}, ABSENT),
    ("gpu_fabric", {"fabric": (1, 0, 0)}, ABSENT),
    ("gpu_fabric", {"fabric": (1, 0, 0), "fabric_before": 1.0}, BAD),
    ("gpu_fabric", {"fabric": (2, 0, 0)}, WARNING),
    ("gpu_fabric", {"fabric": (2, 0, 0), "preflight": 1.0}, BAD),
    ("gpu_fabric", {"fabric": (3, 0, 0)}, FINE),
    ("gpu_fabric", {"fabric": (3, 0, 0x1AA)}, FINE),
    ("gpu_fabric", {"fabric": (3, 0, 0x1A6)}, WARNING),
    ("gpu_fabric", {"fabric": (3, 0, 0x19A)}, BAD),
    ("gpu_fabric", {"fabric": (4, 0, 0)}, UNKNOWN),
    ("gpu_pcie_replays", {"pcie_replays_per_min": 30, "pcie_width_max": 16, "pcie_generation_max": 5}, FINE),
    ("gpu_pcie_replays", {"pcie_replays_per_min": 31, "pcie_width_max": 16, "pcie_generation_max": 5}, WARNING),
    ("gpu_pcie_replays", {"pcie_replays_per_min": 16}, WARNING),
    ("gpu_pcie_replays", {"pcie_replays_per_min": 700, "pcie_width_max": 16, "pcie_generation_max": 5}, BAD),
    ("gpu_pcie_generation", {"pcie_generation": 1, "pcie_generation_best": 5, "utilization": (0, 0)}, ABSENT),
    ("gpu_pcie_generation", {"pcie_generation": 4, "pcie_generation_best": 4, "utilization": (99, 0)}, FINE),
    ("gpu_pcie_generation", {"pcie_generation": 3, "pcie_generation_best": 5, "utilization": (99, 0)}, WARNING),
    ("gpu_processes_foreign", {"processes": processes(("other", GIB))}, FINE),
    ("gpu_processes_foreign", {"processes": processes(("other", GIB), ("rank", GIB))}, WARNING),
    ("gpu_processes_foreign", {"processes": processes(("system", GIB), ("rank", GIB))}, FINE),
    ("gpu_processes_foreign", {"processes": processes(("other", GIB)), "preflight": 1.0}, BAD),
    ("gpu_processes_foreign", {"processes": processes(("gone", GIB)), "preflight": 1.0}, FINE),
    ("gpu_memory_zombie", {"processes": (), "memory": (499 << 20, 80 * GIB)}, FINE),
    ("gpu_memory_zombie", {"processes": (), "memory": (GIB, 80 * GIB)}, WARNING),
    ("gpu_memory_zombie", {"processes": (), "memory": (GIB, 80 * GIB), "preflight": 1.0}, BAD),
    ("gpu_memory_zombie", {"processes": (), "memory": (GIB, 80 * GIB), "mig_mode": (1, 1)}, ABSENT),
    ("gpu_memory_zombie", {"processes": (), "memory": (GIB, 80 * GIB), "addressing": 2}, ABSENT),
    ("gpu_memory_zombie", {"processes": (), "memory": (GIB, 80 * GIB), "addressing": 1}, WARNING),
    ("gpu_memory_zombie", {"processes": processes(("gone", GIB)), "memory": (GIB, 80 * GIB)}, WARNING),
    ("gpu_memory_zombie", {"processes": processes(("other", 0)), "memory": (GIB, 80 * GIB)}, FINE),
    ("gpu_modes", {"compute_mode": 3, "mig_mode": (0, 0)}, FINE),
    ("gpu_modes", {"compute_mode": 0, "mig_mode": (1, 1)}, WARNING),
    ("gpu_application_clocks", {"clock_sm": 1980, "clock_sm_default": Gap(26, "f")}, FINE),
]


@pytest.mark.parametrize(("check", "facts", "expected"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_a_snapshot_is_judged(check: str, facts: dict[str, Any], expected: str) -> None:
    result = judge(check, **facts)
    assert (result.level if result.status == "unhealthy" else result.status) == expected
    assert result.device == result.gpu == "0000:c1:00"
    assert result.status == "healthy" or result.text, "what is not healthy says why"


def test_every_check_is_judged_and_its_threshold_can_be_read() -> None:
    assert {row.check.id for row in ROWS} == {check.id for check in CHECKS[2:]}
    for check in CHECKS:
        assert "{" not in check.threshold_text()


def test_limits_of_a_site() -> None:
    assert judge("gpu_application_clocks", {"sm_mhz": 1900}, clock_sm=1800).level == "warning"
    assert judge("gpu_pcie_replays", {"per_min": 1}, pcie_replays_per_min=31).status == "healthy"


def test_what_was_not_looked_at_is_not_judged() -> None:
    assert judged(BY_ID["gpu_row_remap_pending"], Gpu("0000:c1:00", "", {"temperature_c": 40}), {}) is None


def test_hostile_text_is_cleaned() -> None:
    hostile = tuple(Process(pid, GIB, "\x1b[31m" + "9" * 1000, "other") for pid in range(9))
    result = judge("gpu_processes_foreign", processes=hostile, preflight=1.0)
    assert result.status == "unhealthy"
    assert "\x1b" not in result.text
    assert len(result.text) <= 300


def test_a_counter_that_falls_was_reset() -> None:
    window = Window(60.0)
    for mono, value in ((0.0, 1000.0), (10.0, 2000.0), (20.0, 5.0)):
        window.count(mono, value)
    assert window.per_s is None
    window.count(30.0, 15.0)
    assert window.per_s == window.newest_per_s == 1.0


def test_a_rate_spans_a_long_gap_between_looks() -> None:
    window = Window(60.0)
    window.count(0.0, 0.0)
    window.count(1000.0, 500.0)
    assert window.per_s == 0.5
    window.count(1010.0, 500.0)
    assert window.per_s is not None
    assert window.per_s < 0.5


def test_an_idle_gpu_is_not_slowed_down() -> None:
    history = GpuHistory()
    for look in range(61):
        facts = history.derive({"clock_reasons": 0x89}, look * 10.0)
    assert facts["hw_slowdown"] == (0.0, 600.0)


def test_a_burst_of_replays_is_no_rate() -> None:
    history = GpuHistory()
    for mono, replays in ((0.0, 0), (10.0, 100), (20.0, 100)):
        facts = history.derive({"pcie_replays": replays}, mono)
    assert facts["pcie_replays_per_min"] == 20.0


@pytest.mark.parametrize("kept", [None, [], {}, {"links": 3}, {"links": [1], "fabric": 1, "counters": {"a": 1}}, "x"])
def test_a_kept_state_that_does_not_fit_is_left_out(kept: Any) -> None:
    history = GpuHistory()
    history.restore(kept, 100.0)
    assert history.derive({"ecc_corrected": 5}, 100.0)


def test_what_most_have() -> None:
    assert usual([18, 18, 18, 17]) == 18
    assert usual([12, 12, 0]) is None, "a pair with a bridge, and one card without"
    assert usual([18, 17]) is None
    assert usual([18]) is None
    assert usual([None, None]) is None


@pytest.mark.parametrize(
    ("listed", "minor", "ours"),
    [("", "3", True), ("0,1", "1", True), ("0,1", "3", False), ("2-5", "3", True), ("x", "3", True), ("0", "", True)],
)
def test_gpus_of_a_slurm_job(listed: str, minor: str, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_GPUS", listed)
    assert of_this_job(minor) is ours
