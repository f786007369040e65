"""EDAC, throttling, CPUs, crash records, NVMe, BMC, from trees as machines have them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from diagnosis.health import Reading, settle
from supervisor.node_health import drives, sel
from supervisor.node_health.contract import Moment, Place, Probe
from supervisor.node_health.hardware import CHECK, HardwareProbe, one_cpu_per_package, parse_cpus

EDAC = "sys/devices/system/edac/mc"
CPUS = "sys/devices/system/cpu"


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def look(place: Place, probe: HardwareProbe | None = None, mono: float = 1000.0) -> dict[tuple[str, str], Reading]:
    readings = (probe or HardwareProbe()).look(place, Moment(wall=time.time(), mono=mono))
    return {(reading.check, reading.device): reading for reading in readings}


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


def test_it_is_a_probe_and_says_something_of_every_check_of_an_empty_tree(tmp_path: Path) -> None:
    probe = HardwareProbe()
    assert isinstance(probe, Probe)
    seen = look(Place(root=tmp_path, preflight=True), probe)
    assert {check for check, _ in seen} == {check.id for check in probe.checks}
    assert {reading.status for reading in seen.values()} == {"not_applicable"}
    assert all(check.threshold_text() for check in probe.checks)


def test_it_finds_nothing_wrong_with_this_machine() -> None:
    assert not [r for r in look(Place(preflight=True)).values() if r.status == "unhealthy"]


def test_uncorrected_memory_errors(tmp_path: Path) -> None:
    """Those that come while we look are critical, also for the next process of this boot; older ones a warning."""
    root = plant(tmp_path / "root", counters(0, 0) | {"proc/sys/kernel/random/boot_id": "first\n"})
    place, probe = Place(root=root, state_dir=tmp_path / "state"), HardwareProbe()
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
    seen = look(Place(root=root))
    assert (seen["edac_uncorrected", "mc1"].status, seen["edac_uncorrected", "mc1"].level) == ("unhealthy", "warning")
    plant(root, counters(0, 0) | {"proc/sys/kernel/random/boot_id": "second\n"})
    assert look(place)["edac_uncorrected", "mc1"].status == "healthy"


def test_an_uncorrected_error_stands_until_the_next_boot(tmp_path: Path) -> None:
    place, check = Place(root=plant(tmp_path, counters(0, 1))), CHECK["edac_uncorrected"]
    standing = settle(check, None, look(place)["edac_uncorrected", "mc1"], 0.0)
    plant(tmp_path, counters(0, 0))  # reset by hand
    for at in range(5):
        standing = settle(check, standing, look(place)["edac_uncorrected", "mc1"], at)
    assert standing.status == "unhealthy"


def test_corrected_errors_count_only_as_a_rate(tmp_path: Path) -> None:
    place, probe = Place(root=plant(tmp_path, counters(54321, 0))), HardwareProbe()
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
    place, probe = Place(root=plant(tmp_path, two_packages(900_000))), HardwareProbe()
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
    place, probe = Place(root=plant(tmp_path, two_packages(None))), HardwareProbe()
    look(place, probe)
    plant(tmp_path, two_packages(None, 27))
    assert look(place, probe, 1030.0)["cpu_throttle", "package 1"].text == "throttled 40 times a minute"


@pytest.mark.parametrize(
    ("driver", "governor", "allowed", "status"),
    [
        ("intel_pstate", "powersave", 3_800_000, "healthy"),
        ("acpi-cpufreq", "powersave", 3_800_000, "unhealthy"),
        ("acpi-cpufreq", "performance", 2_000_000, "healthy"),
        ("intel_cpufreq", "schedutil", 800_000, "unhealthy"),
    ],
)
def test_cpu_frequency(tmp_path: Path, driver: str, governor: str, allowed: int, status: str) -> None:
    base = f"{CPUS}/cpufreq/policy0"
    files = {"scaling_driver": driver, "scaling_governor": governor, "scaling_max_freq": str(allowed)}
    plant(tmp_path, {f"{base}/{name}": f"{text}\n" for name, text in (files | {"cpuinfo_max_freq": "3800000"}).items()})
    assert look(Place(root=tmp_path, preflight=True))["cpu_frequency", ""].status == status
    assert ("cpu_frequency", "") not in look(Place(root=tmp_path))


def test_crash_records(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/pstore").mkdir(parents=True)
    place = Place(root=tmp_path)
    assert look(place)["crash_records", ""].status == "healthy"
    plant(tmp_path, {"sys/fs/pstore/console-ramoops-0": "booting", "sys/fs/pstore/dmesg-efi-1": "Shutdown#1 Part1\n"})
    assert look(place)["crash_records", ""].status == "healthy", "an orderly end is no crash"
    plant(tmp_path, {"sys/fs/pstore/dmesg-efi-2": "Panic#2 Part1\n<0>[ 12.3] Kernel panic - not syncing\n"})
    seen = look(place)["crash_records", ""]
    assert (seen.status, seen.level) == ("unhealthy", "warning")
    assert "Panic#2 Part1" in seen.text


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
    seen = look(Place(root=plant(tmp_path, files), preflight=True))
    assert seen["nvme_state", "nvme0"].text == "live SAMSUNG MZQL27T6HBLA-00A07 GDC5602Q"
    assert (seen["nvme_state", "nvme1"].status, seen["nvme_state", "nvme1"].level) == ("unhealthy", "critical")
    assert (seen["nvme_state", "nvme2"].status, seen["nvme_state", "nvme2"].level) == ("unhealthy", "warning")
    assert seen["nvme_health", ""].status == "not_applicable"


def smart(warning: int = 0, used: int = 3) -> bytes:
    page = bytearray(512)
    page[0], page[1:3], page[3], page[4], page[5] = warning, (310).to_bytes(2, "little"), 100, 10, used
    page[160:176] = (2).to_bytes(16, "little")
    return bytes(page)


def test_what_a_drive_says_of_itself() -> None:
    limits = drives.CHECK["nvme_health"].limits
    fine = drives.judge_smart("nvme0", smart(), limits)
    assert fine.status == "healthy"
    assert fine.values == {"life_used_percent": 3, "spare_percent": 100, "temperature_c": 37, "media_errors": 2}
    worn = drives.judge_smart("nvme0", smart(used=104), limits)
    assert (worn.status, worn.level) == ("unhealthy", "warning")
    warned = drives.judge_smart("nvme0", smart(warning=0b1001), limits)
    assert (warned.status, warned.level) == ("unhealthy", "critical")
    assert "spare blocks below their threshold, read-only" in warned.text
    assert drives.judge_smart("nvme0", "only root can read the SMART log", limits).status == "unknown"


def test_a_drive_that_is_not_there_has_no_smart_log() -> None:
    assert drives.read_smart("nvme99") == "/dev/nvme99: No such file or directory"
    assert drives.read_smart("null") == "the SMART log could not be read: Inappropriate ioctl for device"
    assert drives._COMMAND.size == 72


MDSTAT = """Personalities : [raid1] [raid6] [raid5] [raid4] [raid0]
md1 : active raid1 sdb3[2](F) sda3[0]
      1948488512 blocks super 1.0 [2/1] [U_]
      bitmap: 3/15 pages [12KB], 65536KB chunk

md2 : active (auto-read-only) raid5 sdd1[3] sdc1[2] sdb2[1]
      2917676544 blocks level 5, 256k chunk, algorithm 2 [4/3] [_UUU]
      [=>...................]  recovery =  8.1% (251596/3068288) finish=6.7min speed=6963K/sec

md0 : active raid0 nvme1n1[1] nvme0n1[0]
      7501210624 blocks super 1.2 512k chunks

md127 : inactive sdf[0](S)
      3906886488 blocks super external:imsm

unused devices: <none>
"""


def test_raid_arrays_without_a_drive(tmp_path: Path) -> None:
    probe, place = HardwareProbe(), Place(root=tmp_path)

    def bad(text: str) -> dict[str, Reading]:
        plant(tmp_path, {"proc/mdstat": text})
        return {
            r.device: r for (check, _), r in look(place, probe).items() if check == "raid" and r.status == "unhealthy"
        }

    found = bad(MDSTAT)
    assert {name: r.level for name, r in found.items()} == {"md1": "warning", "md2": "warning"}
    assert found["md2"].text == "RAID array md2: 1 of 4 drives are missing, recovery = 8.1%"
    found = bad(MDSTAT.replace("[_UUU]", "[UUUU]").replace("md0 : active", "md0 : broken"))
    assert {name: r.level for name, r in found.items()} == {"md1": "warning", "md0": "critical"}
    assert bad(MDSTAT.replace("md0 : active", "md0 : inactive"))["md0"].level == "critical"
    assert not bad("")


@pytest.mark.parametrize("text", ["", "garbage", "md0 : \n", "md0 : active\n   [2/1] [U_", "\x00\xff" * 99])
def test_any_mdstat_is_read(text: str) -> None:
    assert len(drives.judge_arrays(text, ())) <= 1


EVENTS = """   1 |  Pre-Init  |0000005906| Fan FAN1 Tach | Lower Critical going low  | Asserted
   2 | 03/01/2026 | 11:25:37 | Memory #0x02 | Uncorrectable ECC (CPU1 DIMM_A1) | Asserted
   3 | 03/14/2026 | 11:25:39 | Power Supply PS2 Status | Power Supply AC lost | Asserted
   4 | 03/14/2026 | 11:26:39 | Power Supply PS2 Status | Power Supply AC lost | Deasserted
   5 | 03/14/26 | 23:09:44 CET | Memory #0x88 | Correctable ECC (CPU0_G1) | Asserted
   6 | 03/14/2026 | 23:10:00 | OS Boot | C: boot completed | Asserted
   7 | 03/14/2026 | 23:10:00 | Critical Interrupt PCIe | Bus Fatal Error | {direction}
   8 | 99/99/2026 | 23:10:00 | Memory #0x02 | Uncorrectable ECC | Asserted
"""


def test_the_event_log_of_the_bmc() -> None:
    at = 1773532800.0  # 2026-03-15
    found = sel.failures(EVENTS.format(direction="Deasserted"), at, 1)
    assert found == [("warning", "Power Supply PS2 Status Power Supply AC lost")]
    seen = sel.judge(sel.failures(EVENTS.format(direction="Asserted"), at, 1))
    assert (seen.status, seen.level, seen.text) == ("unhealthy", "critical", "Critical Interrupt PCIe Bus Fatal Error")
    assert sel.judge(sel.failures(EVENTS, at + 30 * 86400, 1)).status == "healthy"


def test_the_bmc_is_only_asked_by_name() -> None:
    now = Moment(wall=0.0, mono=0.0)
    assert sel.look(Place(), now)[0].text == "only looked at with --only ipmi_events"
    there = shutil.which("ipmitool")
    asked = sel.look(Place(only=("ipmi_*",)), now)[0]
    assert (asked.text == "no ipmitool here") == (there is None)
    assert "--only" not in asked.text
