"""Judging a snapshot of a GPU: pure functions, so cases are data."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.health import CheckResult
from supervisor.node_health.gpu import facts as codes
from supervisor.node_health.gpu.checks import CHECKS, ROWS, judged
from supervisor.node_health.gpu.facts import Gap, Gpu, GpuHistory, Process, Window, usual
from supervisor.node_health.gpu.probe import of_this_job
from tests.tables import table

BY_ID = {row.check.id: row for row in ROWS}
GIB = 1 << 30


def judge(check: str, limits: dict[str, float] | None = None, **facts: Any) -> CheckResult:
    row = BY_ID[check]
    result = judged(row, Gpu("0000:c1:00", "GPU-1", facts), {**row.check.limits, **(limits or {})})
    assert result is not None
    return result


def processes(*each: tuple[str, int]) -> tuple[Process, ...]:
    return tuple(Process(100 + n, size, "python", owner) for n, (owner, size) in enumerate(each))  # type: ignore[arg-type]


CASES = table(__file__)["cases"]


def fact(name: str, value: Any) -> Any:
    """As the table writes it -> as a snapshot has it."""
    if isinstance(value, str) and value.startswith("gap "):
        code = value.removeprefix("gap ")
        return Gap(int(code) if code.isdigit() else getattr(codes, code), "f")
    return processes(*((owner, size * GIB) for owner, size in value)) if name == "processes" else value


@pytest.mark.parametrize(("check", "facts", "expected"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_a_snapshot_is_judged(check: str, facts: dict[str, Any], expected: str) -> None:
    result = judge(check, **{name: fact(name, value) for name, value in facts.items()})
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
