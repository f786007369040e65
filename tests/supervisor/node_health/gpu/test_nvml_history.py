"""What the NVML probe sees only by comparing looks: new errors, rates, lanes and GPUs that are lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

FakeNvml, Start = Any, Callable[..., Any]
GPUS = [f"0000:{0x10 + index:02x}:00" for index in range(8)]


def test_new_uncorrected_errors_are_critical_and_old_ones_a_warning(fake_nvml: FakeNvml, looker: Start) -> None:
    fake_nvml.state(**{"0.ecc.uncorrected.volatile": 2})
    child = looker()
    assert child.look(100.0).at("gpu_ecc_uncorrected")["level"] == "warning"
    fake_nvml.state(**{"0.ecc.uncorrected.volatile": 3})
    assert child.look(110.0).at("gpu_ecc_uncorrected").get("level", "critical") == "critical"
    fake_nvml.state()
    assert child.look(120.0).at("gpu_ecc_uncorrected")["status"] == "healthy"


def test_what_was_once_there_is_remembered_by_the_next_process(
    fake_nvml: FakeNvml, looker: Start, tmp_path: Path
) -> None:
    kept = str(tmp_path / "kept")
    assert looker().look(100.0, state_dir=kept).flaws == {}
    # All GPUs lose the same links: only who remembers can tell.
    fake_nvml.state(**{"*.link.7": 0, "0.ecc.uncorrected.volatile": 1, "1.fabric.state": 1})
    results = looker().look(200.0, state_dir=kept)
    assert results.flaws == {"gpu_nvlink_inactive": GPUS, "gpu_ecc_uncorrected": [GPUS[0]], "gpu_fabric": [GPUS[1]]}
    assert results.at("gpu_ecc_uncorrected").get("level", "critical") == "critical"
    assert looker().look(200.0).flaws == {"gpu_ecc_uncorrected": [GPUS[0]]}


def test_storms_are_judged_by_rate_and_only_when_they_last(fake_nvml: FakeNvml, looker: Start) -> None:
    child = looker()
    fake_nvml.state(**{"0.ecc.corrected.volatile": 5_000_000, "1.field.94": 900_000, "2.field.163": 1_000_000})
    assert child.look(100.0).flaws == {}, "counters that are high are no fault"
    for look in range(1, 40):
        counters = {
            "0.ecc.corrected.volatile": 5_000_000 + look * 177_000,
            "1.field.94": 900_000 + look * 20,
            "2.field.163": 1_000_000 + look * 100,
            "3.reasons": 0x48,
            "4.reasons": 0x20,
            "5.reasons": 0x4,
            "6.ecc.corrected.volatile": look * 500,
        }
        fake_nvml.state(**counters)
        results = child.look(100.0 + look * 10)
        assert results.at("gpu_ecc_corrected_rate")["status"] == ("unhealthy" if look >= 27 else "healthy")
    found = results.flaws
    assert found["gpu_pcie_replays"] == [GPUS[1]]
    assert "gpu_hw_slowdown" not in found, "six minutes are not ten"
    for look in range(40, 70):
        results = child.look(100.0 + look * 10)
    assert results.flaws["gpu_hw_slowdown"] == [GPUS[3]]
    assert results.flaws["gpu_sw_thermal_slowdown"] == [GPUS[4]]


def test_nvlink_errors_by_rate(fake_nvml: FakeNvml, looker: Start) -> None:
    child = looker()
    fake_nvml.state(**{"*.field.214": 0})
    child.look(100.0)
    fake_nvml.state(
        **{"*.field.214": 0, "0.field.163.4": 12_000, "1.field.162.2": 1, "2.field.214.0": 1, "3.field.161": 4}
    )
    seen: dict[str, dict[str, Any]] = {}
    for look in range(1, 17):
        for (check, device), result in child.look(100.0 + look * 10).items():
            if check == "gpu_nvlink_errors":
                seen.setdefault(device, result)
    levels = {device: each.get("level", "critical") for device, each in seen.items() if each["status"] == "unhealthy"}
    assert levels == {GPUS[0]: "critical", GPUS[1]: "warning", GPUS[2]: "warning"}
    assert "(NVLink 4)" in seen[GPUS[0]]["text"]
    assert len(seen) == 8, "each GPU had its turn"


def test_nvlink_errors_of_a_gpu_that_only_counts_sums(fake_nvml: FakeNvml, looker: Start) -> None:
    sums = {"*.field.38": 7, "*.field.45": 0, "*.field.52": 3, "*.field.59": 0}
    by_link = {f"no_field.{number}": 1 for number in (161, 162, 163)}
    fake_nvml.state(**sums, **by_link)
    child = looker()
    child.look(100.0)
    fake_nvml.state(**{**sums, **by_link, "0.field.59": 1})
    results = child.look(170.0)
    assert results.flaws == {"gpu_nvlink_errors": [GPUS[0]]}
    assert results.at("gpu_present")["values"]["nvlink_crc"] == 0


def test_nvlinks_that_cannot_be_read_now_and_then_are_no_errors(fake_nvml: FakeNvml, looker: Start) -> None:
    """Link 3 has no counters (it is not connected), link 4 had many errors long ago and is not told at one look."""
    old: dict[str, object] = {"*.field.163.4": 1_000_000, "*.field_ret.163.3": 3}
    fake_nvml.state(**old)
    child = looker()

    def found_from(start: float) -> dict[str, list[str]]:
        """Every GPU has its turn; half an hour after its first look a probe asks again for what was not there."""
        found: dict[str, list[str]] = {}
        for look in range(9):
            found.update(child.look(start + look * 10).flaws)
        return found

    assert found_from(100.0) == {}
    fake_nvml.state(**old, **{"*.field_ret.163.4": 999})
    assert found_from(200.0) == {}
    fake_nvml.state(**old)
    assert found_from(300.0) == found_from(2000.0) == {}
    fake_nvml.state(**{**old, "0.field.163.5": 20_000})
    assert found_from(2100.0) == {"gpu_nvlink_errors": [GPUS[0]]}


def test_a_slow_slot_is_no_fault_and_a_link_that_became_slower_is(fake_nvml: FakeNvml, looker: Start) -> None:
    slots: dict[str, object] = {"*.pcie_generation": 3, "0.pcie_generation": 4}
    fake_nvml.state(**slots)
    child = looker()
    assert child.look(100.0).flaws == {}
    fake_nvml.state(**{**slots, "2.pcie_generation": 1})
    found = [child.look(float(mono)).flaws for mono in range(110, 300, 10)]
    assert {"gpu_pcie_generation": [GPUS[2]]} in found
    assert all(flaws.keys() <= {"gpu_pcie_generation"} for flaws in found)
    fake_nvml.state(**slots)
    assert looker().look(100.0).flaws == {}


def test_a_gpu_that_is_lost_keeps_its_name_and_the_others_their_looks(fake_nvml: FakeNvml, looker: Start) -> None:
    child = looker()
    child.look(100.0)
    fake_nvml.state(**{"3.lost": 1})
    results = child.look(110.0)
    assert results.flaws == {"gpu_present": [GPUS[3]]}
    assert results.at("gpu_present", GPUS[3])["gpu_uuid"] == "GPU-00000000-0000-0000-0000-000000000003"
    assert results.at("gpu_temperature", GPUS[3])["status"] == "unknown"
    assert results.at("gpu_temperature", GPUS[4])["status"] == "healthy"
    later = child.look(800.0)
    assert fake_nvml.calls()["nvmlShutdown"] == 1, "only a library that is started again sees a GPU that was reset"
    assert later.flaws == {"gpu_present": [GPUS[3]]}
    assert child.look(810.0).flaws == {"gpu_present": [GPUS[3]]}
    assert later.at("gpu_present", GPUS[3])["gpu_uuid"] == "GPU-00000000-0000-0000-0000-000000000003"
    fake_nvml.state()
    child.look(1500.0)
    assert child.look(1510.0).flaws == {}


def test_gpus_that_a_new_start_no_longer_finds_are_missed_by_name(fake_nvml: FakeNvml, looker: Start) -> None:
    child = looker()
    child.look(100.0)
    fake_nvml.state(**{"3.lost": 1})
    child.look(800.0)
    fake_nvml.state(count=3)
    child.look(1500.0)
    assert child.look(1510.0).flaws == {"gpu_present": GPUS[3:]}
