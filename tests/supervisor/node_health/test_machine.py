"""The machine as a whole, what it is made of, and its hardware: from trees as they are captured, and from this one."""

import time
from pathlib import Path

import msgspec
import pytest

from diagnosis.health import CheckResult, settle
from supervisor.node_health.contract import JobInfo, Moment, ProbeContext
from supervisor.node_health.machine import (
    CHECK,
    OFFSET,
    REBOOTED,
    HardwareProbe,
    MachineProbe,
    driver_version,
    inventory,
    judge_offset,
    judge_reboot,
    one_cpu_per_package,
    packages,
    parse_cpus,
)

from .tree import plant

PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build  (dvs-builder@U22)  Fri\n"
    "GCC version:  gcc version 13.2.0\n"
)
CPUINFO = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Platinum 8480C\n"
    "microcode\t: 0x2b000571\n\nprocessor\t: 1\nmodel name\t: other\n"
)
NODE = {
    "proc/sys/kernel/osrelease": "5.15.0-1071-nvidia\n",
    "proc/driver/nvidia/version": PROPRIETARY,
    "proc/meminfo": "MemTotal:       2113463756 kB\nMemFree:        2000000000 kB\n",
    "proc/cpuinfo": CPUINFO,
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.4 LTS"\n',
    "sys/module/mlx5_core/version": "23.10-1.1.9\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    **{
        f"sys/class/infiniband/mlx5_{n}/{name}": text
        for n in range(3)
        for name, text in (
            ("fw_ver", "28.39.1002\n" if n else "22.36.1010\n"),
            ("board_id", "MT_0000000838\n" if n else "MT_0000000359\n"),
        )
    },
    **{
        f"sys/bus/pci/devices/0000:{bus}:00.0/{name}": f"{text}\n"
        for bus, device, kind in (("1b", "2330", "030200"), ("43", "2330", "030200"), ("05", "22a3", "068000"))
        for name, text in (("vendor", "0x10de"), ("device", f"0x{device}"), ("class", f"0x{kind}"))
    },
}


def tree(folder: Path, files: dict[str, str]) -> ProbeContext:
    return ProbeContext(root=plant(folder, files))


def test_a_node_of_two_gpus(tmp_path: Path) -> None:
    place = tree(tmp_path, NODE)
    library = tmp_path / "usr/lib/x86_64-linux-gnu"
    library.mkdir(parents=True)
    (library / "libcuda.so.1").symlink_to("libcuda.so.535.129.03")
    (tmp_path / "usr/local").mkdir()
    (tmp_path / "usr/local/cuda").symlink_to("/etc/alternatives/cuda")
    (tmp_path / "etc/alternatives").mkdir()
    (tmp_path / "etc/alternatives/cuda").symlink_to("/usr/local/cuda-12.4")
    assert inventory(place) == {
        "cuda_toolkit": "12.4",
        "cpu": "Intel(R) Xeon(R) Platinum 8480C",
        "cuda_library": "535.129.03",
        "driver": "535.129.03",
        "driver_kind": "proprietary",
        "gpus": "2 x 10de:2330",
        "infiniband": "1 x MT_0000000359 22.36.1010, 2 x MT_0000000838 28.39.1002",
        "kernel": "5.15.0-1071-nvidia",
        "memory_gib": "2015.6",
        "microcode": "0x2b000571",
        "ofed": "23.10-1.1.9",
        "os": "Ubuntu 22.04.4 LTS",
        "thp": "madvise",
    }


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (PROPRIETARY, "535.129.03"),
        (OPEN, "570.86.15"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module 390.48 Thu Mar 22 00:42:57 PDT 2018\n", "390.48"),
        ("garbage", ""),
        ("", ""),
    ],
)
def test_the_driver(tmp_path: Path, text: str, version: str) -> None:
    assert driver_version(tree(tmp_path, {"proc/driver/nvidia/version": text})) == version


def test_an_empty_tree_has_nothing(tmp_path: Path) -> None:
    assert inventory(ProbeContext(root=tmp_path)) == {}


def test_arm_names_implementer_and_part(tmp_path: Path) -> None:
    text = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd4f\n\nprocessor\t: 1\n"
    assert inventory(tree(tmp_path, {"proc/cpuinfo": text})) == {"cpu": "0x41 0xd4f"}


def test_packages_of_the_training_environment(tmp_path: Path) -> None:
    place = tree(
        tmp_path,
        {
            "opt/venv/pyvenv.cfg": "home = /usr/bin\ninclude-system-site-packages = true\nversion = 3.10.12\n",
            "opt/venv/lib/python3.10/site-packages/torch-2.4.0+cu121.dist-info/METADATA": "",
            "opt/venv/lib/python3.10/site-packages/nvidia_nccl_cu12-2.20.5.dist-info/METADATA": "",
            "opt/venv/lib/python3.10/site-packages/torchvision-0.19.0.dist-info/METADATA": "",
            "usr/local/lib/python3.10/dist-packages/torch-1.0.dist-info/METADATA": "",
            "usr/local/lib/python3.10/dist-packages/transformer_engine-1.7.0+4e7caa1.dist-info/METADATA": "",
            "usr/lib/python3/dist-packages/numpy-1.21.5.egg-info/PKG-INFO": "",
        },
    )
    assert packages(place, "/opt/venv/bin/python") == {
        "torch": "2.4.0+cu121",
        "nccl": "2.20.5",
        "transformer_engine": "1.7.0+4e7caa1",
        "numpy": "1.21.5",
    }
    assert packages(place, "") == {}
    assert packages(place, "/nowhere/bin/python") == {}


def test_this_machine() -> None:
    import sys

    found = inventory(ProbeContext(job=JobInfo(python=sys.executable)))
    assert {"kernel", "cpu", "memory_gib"} <= set(found)
    assert all(value and len(value) <= 200 for value in found.values())


NOW = 1_767_225_600.0  # 2026-01-01 00:00:00 UTC


def look(place: ProbeContext, probe: MachineProbe | None = None, wall: float = NOW) -> list[CheckResult]:
    return (probe or MachineProbe()).look(place, Moment(wall=wall, mono=wall))


def of(results: list[CheckResult], check: str, device: str = "") -> CheckResult:
    found = [result for result in results if result.check == check and (not device or result.device == device)]
    assert len(found) == 1, found
    return found[0]


def boot(folder: Path, boot_id: str, uptime_s: float, state: Path) -> ProbeContext:
    files = {"proc/sys/kernel/random/boot_id": f"{boot_id}\n", "proc/uptime": f"{uptime_s:.2f} 1000.00\n"}
    return ProbeContext(root=plant(folder, files), state_dir=state)


# ----- boots -----


def test_a_reboot_is_told_for_an_hour_by_every_process_of_the_new_boot(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert of(look(boot(tmp_path, "one", 90_000, state)), "node_rebooted").status == "healthy"
    again = of(look(boot(tmp_path, "two", 300, state), wall=NOW + 900), "node_rebooted")
    assert (again.status, again.level) == ("unhealthy", "warning")
    assert again.text == "booted anew at 2026-01-01 00:10:00 UTC, last looked at before that at 2026-01-01 00:00:00 UTC"
    later = of(look(boot(tmp_path, "two", 2000, state), wall=NOW + 2600), "node_rebooted")
    assert later.text.endswith("2026-01-01 00:00:00 UTC")
    assert of(look(boot(tmp_path, "two", 3700, state), wall=NOW + 4300), "node_rebooted").status == "healthy"


def test_how_long_ago_the_node_was_looked_at_is_kept_now_and_then(tmp_path: Path) -> None:
    state = tmp_path / "state"
    probe = MachineProbe()
    for minute in range(31):
        look(boot(tmp_path, "one", 90_000 + 60 * minute, state), probe, NOW + 60 * minute)
    assert NOW + 1200 <= msgspec.json.decode((state / "machine.json").read_bytes())["value"]["at"] <= NOW + 1860
    (state / "machine.json").write_text("garbage")
    assert of(look(boot(tmp_path, "two", 10, state)), "node_rebooted").status == "healthy"


def test_without_an_uptime_nothing_is_known() -> None:
    assert judge_reboot(None, NOW, REBOOTED.limits).status == "unknown"


# ----- the clock -----


@pytest.mark.parametrize(
    ("offset_s", "error_s", "status", "level"),
    [
        (None, 0.0, "not_applicable", ""),
        (0.004, 0.001, "healthy", ""),
        (0.3, 0.29, "healthy", ""),  # the way was slow: nothing is certain
        (-0.3, 0.01, "unhealthy", "warning"),
        (2.0, 0.01, "unhealthy", "warning"),
        (3600.0, 0.01, "unhealthy", "critical"),
    ],
)
def test_the_offset_to_the_controller(offset_s: float | None, error_s: float, status: str, level: str) -> None:
    result = judge_offset(JobInfo(clock_offset_s=offset_s, clock_error_s=error_s), OFFSET.limits)
    assert result.status == status
    assert not level or result.level == level


def test_the_offset_is_told_in_words() -> None:
    result = judge_offset(JobInfo(clock_offset_s=-0.3, clock_error_s=0.012), OFFSET.limits)
    assert result.text == "0.3 s behind the controller's, give or take 0.012 s"


# ----- the probe -----


EDAC = "sys/devices/system/edac/mc"
CPUS = "sys/devices/system/cpu"


def hardware_results(
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
    assert hardware_results(place, probe)["edac_uncorrected", "mc1"].status == "healthy"
    plant(root, counters(0, 1))
    for same in (probe, probe, HardwareProbe()):
        seen = hardware_results(place, same)
        assert seen["edac_uncorrected", "mc0"].status == "healthy"
        assert (seen["edac_uncorrected", "mc1"].status, seen["edac_uncorrected", "mc1"].level) == (
            "unhealthy",
            "critical",
        )
        assert "CPU_SrcID#1_MC#0_Chan#0_DIMM#0" in seen["edac_uncorrected", "mc1"].text
    seen = hardware_results(ProbeContext(root=root))
    assert (seen["edac_uncorrected", "mc1"].status, seen["edac_uncorrected", "mc1"].level) == ("unhealthy", "warning")
    plant(root, counters(0, 0) | {"proc/sys/kernel/random/boot_id": "second\n"})
    assert hardware_results(place)["edac_uncorrected", "mc1"].status == "healthy"


def test_an_uncorrected_error_stands_until_the_next_boot(tmp_path: Path) -> None:
    place, check = ProbeContext(root=plant(tmp_path, counters(0, 1))), CHECK["edac_uncorrected"]
    check_state = settle(check, None, hardware_results(place)["edac_uncorrected", "mc1"], 0.0)
    plant(tmp_path, counters(0, 0))  # reset by hand
    for at in range(5):
        check_state = settle(check, check_state, hardware_results(place)["edac_uncorrected", "mc1"], at)
    assert check_state.status == "unhealthy"


def test_corrected_errors_count_only_as_a_rate(tmp_path: Path) -> None:
    place, probe = ProbeContext(root=plant(tmp_path, counters(54321, 0))), HardwareProbe()
    assert hardware_results(place, probe)["edac_corrected", "mc1"].status == "healthy", (
        "since boot: months, for all we know"
    )
    plant(tmp_path, counters(54361, 0))
    assert hardware_results(place, probe, 2000.0)["edac_corrected", "mc1"].status == "healthy"
    plant(tmp_path, counters(54421, 0))
    seen = hardware_results(place, probe, 3000.0)["edac_corrected", "mc1"]
    assert (seen.status, seen.level) == ("unhealthy", "warning")
    assert "DIMM#0" in seen.text
    assert hardware_results(place, probe, 7000.0)["edac_corrected", "mc1"].status == "healthy", "an hour later"
    plant(tmp_path, counters(54421 + 3000, 0))
    assert hardware_results(place, probe, 7030.0)["edac_corrected", "mc1"].level == "critical"
    plant(tmp_path, counters(5, 0))
    assert hardware_results(place, probe, 7060.0)["edac_corrected", "mc1"].status == "healthy", (
        "the counters were reset"
    )


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
    assert hardware_results(place, probe)["cpu_throttle", "package 1"].status == "healthy", "since boot: no rate yet"
    plant(tmp_path, two_packages(901_000))
    assert hardware_results(place, probe, 1030.0)["cpu_throttle", "package 1"].status == "healthy"
    plant(tmp_path, two_packages(910_000))
    seen = hardware_results(place, probe, 1060.0)
    assert seen["cpu_throttle", "package 0"].status == "healthy"
    assert (seen["cpu_throttle", "package 1"].status, seen["cpu_throttle", "package 1"].level) == (
        "unhealthy",
        "warning",
    )
    assert seen["cpu_throttle", "package 1"].text == "throttled 30 % of the time"


def test_old_kernels_only_count_throttles(tmp_path: Path) -> None:
    place, probe = ProbeContext(root=plant(tmp_path, two_packages(None))), HardwareProbe()
    hardware_results(place, probe)
    plant(tmp_path, two_packages(None, 27))
    assert hardware_results(place, probe, 1030.0)["cpu_throttle", "package 1"].text == "throttled 40 times a minute"


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
    seen = hardware_results(ProbeContext(root=plant(tmp_path, files), preflight=True))
    assert seen["nvme_state", "nvme0"].text == "live SAMSUNG MZQL27T6HBLA-00A07 GDC5602Q"
    assert (seen["nvme_state", "nvme1"].status, seen["nvme_state", "nvme1"].level) == ("unhealthy", "critical")
    assert (seen["nvme_state", "nvme2"].status, seen["nvme_state", "nvme2"].level) == ("unhealthy", "warning")
