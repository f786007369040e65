"""The NVML probe through the real ctypes path, against a scripted library in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.node_health.contract import EventListener, Moment, Probe, ProbeContext, Talkative
from supervisor.node_health.gpu.checks import CHECKS
from supervisor.node_health.gpu.probe import NvmlProbe

FakeNvml, Start = Any, Callable[..., Any]
GPUS = [f"0000:{0x10 + index:02x}:00" for index in range(8)]


def test_it_follows_the_protocols() -> None:
    probe = NvmlProbe()
    assert isinstance(probe, Probe)
    assert isinstance(probe, EventListener)
    assert isinstance(probe, Talkative)
    assert len({check.id for check in CHECKS}) == len(CHECKS)


def test_a_captured_tree_is_not_asked(tmp_path: Path) -> None:
    results = NvmlProbe().look(ProbeContext(root=tmp_path), Moment(wall=1.0, mono=1.0))
    assert {result.check for result in results} == {check.id for check in CHECKS}
    assert {result.status for result in results} == {"not_applicable"}


def test_importing_it_does_not_import_pynvml() -> None:
    code = "import sys, supervisor.node_health.gpu.probe; sys.exit('pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_node_without_library_and_gpu_has_nothing_to_look_at(looker: Start, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    results = looker(LD_LIBRARY_PATH=str(tmp_path / "empty")).look(1.0, site={})
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("gpu: this machine has a driver of its own")
    assert {result["status"] for result in results.values()} == {"not_applicable"}
    assert {check for check, _ in results} == {check.id for check in CHECKS}


def test_healthy_gpus_are_healthy_and_every_check_says_so(looker: Start) -> None:
    child = looker()
    first = child.look(100.0, preflight=True)
    assert first.flaws == {}
    assert {check for check, _ in first} == {check.id for check in CHECKS}
    assert {result["check"] for result in first.values() if result["status"] == "unknown"} == {
        "gpu_ecc_corrected_rate",
        "gpu_nvlink_errors",
        "gpu_pcie_replays",
    }
    second = child.look(170.0, preflight=True)
    assert {result["status"] for result in second.values()} == {"healthy"}
    values = second.at("gpu_present")["values"]
    assert values["power_w"] == 350.0
    assert values["temperature_c"] == 45
    assert values["nvlinks_active"] == 18
    assert len(values) <= 40
    assert second.at("gpu_present")["gpu_uuid"].startswith("GPU-")


FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "pending row remap": ({"3.remap.pending": 1}, "gpu_row_remap_pending"),
    "failed row remap": ({"3.remap.failed": 1}, "gpu_row_remap_failed"),
    "SRAM threshold": ({"3.sram_exceeded": 1}, "gpu_ecc_sram_threshold"),
    "old uncorrected errors": ({"3.ecc.uncorrected.volatile": 2}, "gpu_ecc_uncorrected"),
    "reset wanted": ({"3.field.230": 1}, "gpu_recovery_action"),
    "an action of a newer driver": ({"3.field.230": 99}, "gpu_recovery_action"),
    "hot": ({"3.temperature": 90}, "gpu_temperature"),
    "fewer links than its peers": ({"3.link.7": 0}, "gpu_nvlink_inactive"),
    "fabric in progress": ({"3.fabric.state": 2}, "gpu_fabric"),
    "fabric failed": ({"3.fabric.status": 999}, "gpu_fabric"),
    "fabric degraded": ({"3.fabric.health": 0x1A9}, "gpu_fabric"),
    "fabric wrongly configured": ({"3.fabric.health": 0x5AA}, "gpu_fabric"),
    "slow under load": ({"3.pcie_generation": 1}, "gpu_pcie_generation"),
    "memory of nobody": ({"3.memory_used": 20 << 30}, "gpu_memory_zombie"),
    "programs prohibited": ({"3.compute_mode": 2}, "gpu_modes"),
    "MIG will change": ({"3.mig_pending": 1}, "gpu_modes"),
    "low clocks": ({"3.application_clock.1": 1155}, "gpu_application_clocks"),
    "reset required": ({"3.ret.nvmlDeviceGetTemperature": 16}, "gpu_answers"),
    "lost": ({"3.lost": 1}, "gpu_present"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen_by_its_own_check_and_by_no_other(fault: str, fake_nvml: FakeNvml, looker: Start) -> None:
    state, check = FAULTS[fault]
    fake_nvml.state(**state)
    found = looker().look(100.0, preflight=True).flaws
    # A GPU that is lost before it was ever seen has no address yet: it is missing from the count instead.
    expected = {"gpu_nvml_count": [""]} if fault == "lost" else {check: [GPUS[3]]}
    assert found == expected


def test_a_driver_without_the_older_temperature_call_is_asked_by_the_newer(fake_nvml: FakeNvml, looker: Start) -> None:
    fake_nvml.state(**{"ret.nvmlDeviceGetTemperature": 26, "3.temperature": 90})
    assert looker().look(100.0).flaws == {"gpu_temperature": [GPUS[3]]}


def test_a_gpu_without_a_pci_address_is_no_fault(fake_nvml: FakeNvml, looker: Start) -> None:
    fake_nvml.state(count=1, **{"ret.nvmlDeviceGetPciInfo_v3": 3})
    results = looker().look(100.0, site={})
    assert results.flaws == {}
    assert {check for check, _ in results} == {check.id for check in CHECKS if check.when != "preflight"}


def test_functions_that_a_driver_lacks_make_checks_not_applicable(fake_nvml: FakeNvml, looker: Start) -> None:
    lacking = {
        "nvmlDeviceGetMarginTemperature": 13,
        "nvmlDeviceGetGpuFabricInfoV": 3,
        "nvmlDeviceGetSramEccErrorStatus": 13,
        "nvmlDeviceGetRemappedRows": 3,
        "nvmlDeviceGetTotalEccErrors": 3,
        "nvmlDeviceGetCurrentClocksEventReasons": 13,
        "nvmlDeviceGetNvLinkState": 3,
        "nvmlDeviceGetComputeRunningProcesses_v3": 13,
    }
    fake_nvml.state(**{f"ret.{name}": code for name, code in lacking.items()})
    child = looker()
    child.look(100.0)
    before = fake_nvml.calls()
    for look in range(1, 9):
        results = child.look(100.0 + look * 10)
    after = fake_nvml.calls()
    assert results.flaws == {}
    for check in ("gpu_ecc_uncorrected", "gpu_ecc_corrected_rate"):
        assert results.at(check)["status"] == "not_applicable"
    assert results.at("gpu_hw_slowdown")["status"] == "healthy", "older drivers have it under an older name"
    for name in lacking:
        if name != "nvmlDeviceGetCurrentClocksEventReasons":
            assert after[name] == before[name], "what a GPU does not have is not asked again and again"


def test_old_fabric_structure(fake_nvml: FakeNvml, looker: Start) -> None:
    fake_nvml.state(**{"*.fabric.version": 2, "3.fabric.status": 1})
    assert looker().look(100.0).flaws == {"gpu_fabric": [GPUS[3]]}


def test_unknown_values_are_no_exceptions(fake_nvml: FakeNvml, looker: Start) -> None:
    odd: dict[str, object] = {
        "*.fabric.state": 77,
        "*.compute_mode": 55,
        "*.reasons": 0xFFFF0000,
        "field_type.94": 99,
        "*.name": "H100 \udcff\x1b[31m".encode(errors="surrogateescape").decode("latin-1"),
        "*.vbios": "\xff\xfe",
        "*.threshold.0": 4294967295,
        "*.processes": f"{2**32 - 1} 17592186044415",
    }
    fake_nvml.state(**odd)
    results = looker().look(100.0, preflight=True)
    assert results.flaws == {}
    assert results.at("gpu_fabric")["status"] == "unknown"
    assert "\x1b" not in str(results)


@pytest.mark.parametrize(
    ("code", "status"), [(18, "unknown"), (9, "unhealthy"), (4, "unknown"), (999, "unknown"), (12, "unknown")]
)
def test_a_library_that_does_not_start_is_tried_again_slowly(
    code: int, status: str, fake_nvml: FakeNvml, looker: Start
) -> None:
    """Status on a machine without the driver's own files; with them, 18 and 999 are unhealthy."""
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("gpu: this machine has a driver of its own")
    fake_nvml.state(**{"ret.nvmlInitWithFlags": code})
    child = looker()
    for mono in range(100, 160, 10):
        results = child.look(float(mono))
        assert results.at("gpu_nvml", "")["status"] == status
        assert results.at("gpu_temperature", "")["status"] == "unknown", "there is a GPU, and it cannot be seen"
    assert fake_nvml.calls()["nvmlInitWithFlags"] == 1
    fake_nvml.state()
    assert child.look(170.0).flaws == {}
    assert fake_nvml.calls()["nvmlInitWithFlags"] == 2


def test_fewer_gpus_than_expected(fake_nvml: FakeNvml, looker: Start) -> None:
    fake_nvml.state(count=7)
    results = looker().look(100.0)
    assert results.flaws == {"gpu_nvml_count": [""]}
    assert "7 GPUs of 8" in results.at("gpu_nvml_count", "")["text"]


def test_gpus_that_others_may_use_are_not_missing(fake_nvml: FakeNvml, looker: Start) -> None:
    fake_nvml.state(**{f"{gpu}.ret.nvmlDeviceGetHandleByIndex_v2": 4 for gpu in range(4)})
    results = looker().look(100.0)
    assert results.flaws == {}
    assert results.at("gpu_nvml_count", "")["status"] == "unknown"


def test_gpus_of_the_bus_that_the_driver_does_not_know(fake_nvml: FakeNvml, looker: Start, tmp_path: Path) -> None:
    """The GPUs of the bus come from a tree; one of them may not be opened, as in a job's control group."""
    root = tmp_path / "root"
    for index, device in enumerate(GPUS):
        folder = root / f"sys/bus/pci/devices/{device}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
        (folder / "driver").symlink_to("../../../bus/pci/drivers/nvidia")
        information = root / f"proc/driver/nvidia/gpus/{device}.0/information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 1\nDevice Minor: \t {index}\n")
        (root / "dev").mkdir(exist_ok=True)
        if index == 5:
            information.write_text(f"Device Minor: \t {index}\nGPU Excluded:\t Yes\n")
        if index != 6:
            (root / f"dev/nvidia{index}").write_text("")
    fake_nvml.state(count=5)
    results = looker().look(100.0, root=str(root), site={})
    assert results.flaws == {"gpu_nvml_count": [""]}
    assert results.at("gpu_nvml_count", "")["text"] == f"the driver gives no access to {GPUS[7]}"
    fake_nvml.state(**{"7.lost": 1, "7.ret.nvmlDeviceGetHandleByIndex_v2": 15})
    results = looker().look(100.0, root=str(root), site={})
    assert results.flaws == {"gpu_present": [GPUS[7]]}, "lost before it was ever seen, and named all the same"


def test_processes(fake_nvml: FakeNvml, looker: Start) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        me, other, gone = os.getpid(), 1, 2**22 + 7
        fake_nvml.state(
            **{
                "0.processes": f"{sleeper.pid} 4000",
                "1.processes": f"{sleeper.pid} 4000, {other} 900",
                "2.processes": f"{other} 900",
                "3.processes": f"{gone} 20000",
                "3.memory_used": 20000 << 20,
                "4.processes": f"{sleeper.pid} 4000, {other} 50",
            }
        )
        child = looker()
        results = child.look(100.0, ranks={str(me): 5})
        assert results.flaws == {"gpu_processes_foreign": [GPUS[1]], "gpu_memory_zombie": [GPUS[3]]}
        assert results.at("gpu_processes_foreign", GPUS[1])["level"] == "warning"
        assert results.at("gpu_present")["pids"] == [sleeper.pid], "they lead to ranks"
        before = child.look(170.0, preflight=True)
        assert set(before.flaws["gpu_processes_foreign"]) == {GPUS[0], GPUS[1], GPUS[2], GPUS[4]}
    finally:
        sleeper.kill()
        sleeper.wait()
