"""EDAC, throttling, CPUs, NVMe, from trees as machines have them."""

from __future__ import annotations

import time
from pathlib import Path

from diagnosis.health import CheckResult, settle
from supervisor.node_health.contract import Moment, ProbeContext
from supervisor.node_health.machine import CHECK, HardwareProbe, one_cpu_per_package, parse_cpus

from .tree import plant

EDAC = "sys/devices/system/edac/mc"
CPUS = "sys/devices/system/cpu"


def look(
    place: ProbeContext, probe: HardwareProbe | None = None, mono: float = 1000.0
) -> dict[tuple[str, str], CheckResult]:
    results = (probe or HardwareProbe()).look(place, Moment(wall=time.time(), mono=mono))
    return {(result.check, result.device): result for result in results}


def counters(corrected: int, uncorrected: int) -> dict[str, str]:
    slot = "CPU_SrcID#1_MC#0_Chan#0_DIMM#0\n"
    return {
        f"{EDAC}/mc0/ce_count": "0\n",
        f"{EDAC}/mc0/ue_count": "0\n",
        f"{EDAC}/mc1/ce_count": f"{corrected}\n",
        f"{EDAC}/mc1/ue_count": f"{uncorrected}\n",
        f"{EDAC}/mc1/dimm0/dimm_label": slot,
        f"{EDAC}/mc1/dimm0/dimm_ce_count": f"{corrected}\n",
        f"{EDAC}/mc1/dimm0/dimm_ue_count": f"{uncorrected}\n",
        f"{EDAC}/mc1/dimm4/dimm_label": "CPU_SrcID#1_MC#0_Chan#1_DIMM#0\n",
        f"{EDAC}/mc1/dimm4/dimm_ce_count": "0\n",
        f"{EDAC}/mc1/dimm4/dimm_ue_count": "0\n",
    }


def test_uncorrected_memory_errors(tmp_path: Path) -> None:
    """Those that come while we look are critical, also for the next process of this boot; older ones a warning."""
    root = plant(tmp_path / "root", counters(0, 0) | {"proc/sys/kernel/random/boot_id": "first\n"})
    place, probe = ProbeContext(root=root, state_dir=tmp_path / "state"), HardwareProbe()
    assert look(place, probe)["edac_uncorrected", "mc1"].status == "healthy"
    plant(root, counters(0, 1))
    for same in (probe, probe, HardwareProbe()):
        seen = look(place, same)
        assert seen["edac_uncorrected", "mc0"].status == "healthy"
        assert (seen["edac_uncorrected", "mc1"].status, seen["edac_uncorrected", "mc1"].level) == (
            "unhealthy",
            "critical",
        )
        assert "CPU_SrcID#1_MC#0_Chan#0_DIMM#0" in seen["edac_uncorrected", "mc1"].text
    seen = look(ProbeContext(root=root))
    assert (seen["edac_uncorrected", "mc1"].status, seen["edac_uncorrected", "mc1"].level) == ("unhealthy", "warning")
    plant(root, counters(0, 0) | {"proc/sys/kernel/random/boot_id": "second\n"})
    assert look(place)["edac_uncorrected", "mc1"].status == "healthy"


def test_an_uncorrected_error_stands_until_the_next_boot(tmp_path: Path) -> None:
    place, check = ProbeContext(root=plant(tmp_path, counters(0, 1))), CHECK["edac_uncorrected"]
    check_state = settle(check, None, look(place)["edac_uncorrected", "mc1"], 0.0)
    plant(tmp_path, counters(0, 0))  # reset by hand
    for at in range(5):
        check_state = settle(check, check_state, look(place)["edac_uncorrected", "mc1"], at)
    assert check_state.status == "unhealthy"


def test_corrected_errors_count_only_as_a_rate(tmp_path: Path) -> None:
    place, probe = ProbeContext(root=plant(tmp_path, counters(54321, 0))), HardwareProbe()
    assert look(place, probe)["edac_corrected", "mc1"].status == "healthy", "since boot: months, for all we know"
    plant(tmp_path, counters(54361, 0))
    assert look(place, probe, 2000.0)["edac_corrected", "mc1"].status == "healthy"
    plant(tmp_path, counters(54421, 0))
    seen = look(place, probe, 3000.0)["edac_corrected", "mc1"]
    assert (seen.status, seen.level) == ("unhealthy", "warning")
    assert "DIMM#0" in seen.text
    assert look(place, probe, 7000.0)["edac_corrected", "mc1"].status == "healthy", "an hour later"
    plant(tmp_path, counters(54421 + 3000, 0))
    assert look(place, probe, 7030.0)["edac_corrected", "mc1"].level == "critical"
    plant(tmp_path, counters(5, 0))
    assert look(place, probe, 7060.0)["edac_corrected", "mc1"].status == "healthy", "the counters were reset"


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpus("\n") == set()
    assert len(parse_cpus("0-99999")) == 8192


def two_packages(total_ms: int | None, count: int = 7) -> dict[str, str]:
    files = {f"{CPUS}/online": "0-7\n", f"{CPUS}/present": "0-7\n"}
    for cpu, siblings in ((0, "0-1,4-5"), (2, "2-3,6-7")):
        files[f"{CPUS}/cpu{cpu}/topology/core_siblings_list"] = f"{siblings}\n"
        files[f"{CPUS}/cpu{cpu}/thermal_throttle/package_throttle_count"] = f"{count if cpu else 0}\n"
        if total_ms is not None:
            files[f"{CPUS}/cpu{cpu}/thermal_throttle/package_throttle_total_time_ms"] = f"{total_ms if cpu else 0}\n"
    return files


def test_throttling_is_judged_by_its_share_of_the_time(tmp_path: Path) -> None:
    place, probe = ProbeContext(root=plant(tmp_path, two_packages(900_000))), HardwareProbe()
    assert one_cpu_per_package(place) == [0, 2]
    assert look(place, probe)["cpu_throttle", "package 1"].status == "healthy", "since boot: no rate yet"
    plant(tmp_path, two_packages(901_000))
    assert look(place, probe, 1030.0)["cpu_throttle", "package 1"].status == "healthy"
    plant(tmp_path, two_packages(910_000))
    seen = look(place, probe, 1060.0)
    assert seen["cpu_throttle", "package 0"].status == "healthy"
    assert (seen["cpu_throttle", "package 1"].status, seen["cpu_throttle", "package 1"].level) == (
        "unhealthy",
        "warning",
    )
    assert seen["cpu_throttle", "package 1"].text == "throttled 30 % of the time"


def test_old_kernels_only_count_throttles(tmp_path: Path) -> None:
    place, probe = ProbeContext(root=plant(tmp_path, two_packages(None))), HardwareProbe()
    look(place, probe)
    plant(tmp_path, two_packages(None, 27))
    assert look(place, probe, 1030.0)["cpu_throttle", "package 1"].text == "throttled 40 times a minute"


def drive(name: str, state: str, transport: str = "pcie") -> dict[str, str]:
    base = f"sys/class/nvme/{name}"
    return {
        f"{base}/state": f"{state}\n",
        f"{base}/transport": f"{transport}\n",
        f"{base}/model": "SAMSUNG MZQL27T6HBLA-00A07              \n",
        f"{base}/firmware_rev": "GDC5602Q\n",
    }


def test_states_of_nvme_controllers(tmp_path: Path) -> None:
    files = drive("nvme0", "live") | drive("nvme1", "dead") | drive("nvme2", "connecting", "tcp")
    seen = look(ProbeContext(root=plant(tmp_path, files), preflight=True))
    assert seen["nvme_state", "nvme0"].text == "live SAMSUNG MZQL27T6HBLA-00A07 GDC5602Q"
    assert (seen["nvme_state", "nvme1"].status, seen["nvme_state", "nvme1"].level) == ("unhealthy", "critical")
    assert (seen["nvme_state", "nvme2"].status, seen["nvme_state", "nvme2"].level) == ("unhealthy", "warning")
