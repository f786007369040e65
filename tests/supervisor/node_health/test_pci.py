"""The PCI bus of nodes as sysfs writes it: an HGX board with two PCIe switches, and what may go wrong with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from diagnosis.health import CheckResult
from supervisor.node_health.contract import Expect, Moment, ProbeContext, Site
from supervisor.node_health.pci import PciProbe

from .tree import Files

DEVICES = "sys/bus/pci/devices"
COR = "RxErr 0\nBadTLP {n}\nBadDLLP 0\nRollover 0\nTimeout 0\nNonFatalErr 0\nHeaderOF 0\nTOTAL_ERR_COR {n}\n"
UNCOR = (
    "Undefined 0\nDLP 0\nSDES 0\nTLP 0\nCmpltTO {n}\nMalfTLP 0\nUnsupReq {asked}\nACSViol 0\nTOTAL_ERR_{kind} {total}\n"
)
GPU, SWITCH, NIC, NVME, BRIDGE = (
    "0x030200 10de 2330",
    "0x068000 10de 22a3",
    "0x020700 15b3 1021",
    "0x010802 144d a80a",
    "",
)
HOST_PORT, UPPER, LOWER = "0000:00:01.0", "0000:01:00.0", "0000:02:{:02x}.0"


class Node(Files):
    """A tree of one node: a root port, a PCIe switch below it, and devices below that."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.at = 0.0
        self.probe = PciProbe()
        self.place = ProbeContext(root=root, state_dir=root / "state")
        self.write("proc/sys/kernel/random/boot_id", "b1\n")

    def add(self, chain: list[str], what: str, *, width: int = 16, most: int = 16, **files: str) -> None:
        pci_class, vendor, device = what.split() if what else ("0x060400", "1000", "c030")
        real = self.root / "sys/devices/pci0000:00" / Path(*chain)
        real.mkdir(parents=True, exist_ok=True)
        link = self.root / DEVICES / chain[-1]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path("../../../devices/pci0000:00", *chain))
        self.set(
            chain[-1],
            **{
                "class": f"{pci_class}\n",
                "vendor": f"0x{vendor}\n",
                "device": f"0x{device}\n",
                "current_link_width": f"{width}\n",
                "max_link_width": f"{most}\n",
                "aer_dev_correctable": COR.format(n=7),
                "aer_dev_nonfatal": UNCOR.format(n=0, asked=3, kind="NONFATAL", total=3),
                "aer_dev_fatal": UNCOR.format(n=0, asked=0, kind="FATAL", total=0),
                **files,
            },
        )
        header = int(vendor, 16).to_bytes(2, "little") + int(device, 16).to_bytes(2, "little")
        self.write(f"{DEVICES}/{chain[-1]}/config", header + bytes(60))

    def set(self, address: str, **files: str) -> None:
        for name, content in files.items():
            self.write(f"{DEVICES}/{address}/{name}", content)

    def remove(self, address: str) -> None:
        link = self.root / DEVICES / address
        shutil.rmtree(link.resolve())
        link.unlink()

    def look(self, after_s: float = 20.0, *, preflight: bool = False) -> list[CheckResult]:
        self.at += after_s
        self.place.preflight = preflight
        return self.probe.look(self.place, Moment(wall=1.7e9 + self.at, mono=self.at))

    def bad(self, after_s: float = 20.0, *, preflight: bool = False) -> dict[str, CheckResult]:
        return {f"{r.check} {r.device}": r for r in self.look(after_s, preflight=preflight) if r.status == "unhealthy"}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Four GPUs, two NICs, two NVMe drives and an NVSwitch, all fine; some errors since the boot."""
    node = Node(tmp_path)
    node.add([HOST_PORT], BRIDGE)
    node.add([HOST_PORT, UPPER], BRIDGE)
    for number, (what, lanes) in enumerate([*[(GPU, 16)] * 4, *[(NIC, 16)] * 2, *[(NVME, 4)] * 2, (SWITCH, 2)]):
        port = LOWER.format(number)
        node.add([HOST_PORT, UPPER, port], BRIDGE, width=lanes)
        bus = f"0000:{0x10 + number:02x}:00.0"
        node.add([HOST_PORT, UPPER, port, bus], what, width=lanes, most=lanes)
        if what == GPU:
            node.write(f"proc/driver/nvidia/gpus/{bus}/information", "Model: \t\t NVIDIA H100 80GB HBM3\n")
    return node


def test_a_sound_node_is_healthy_whatever_was_counted_before(node: Node) -> None:
    assert node.bad(preflight=True) == {}
    results = {r.check: r for r in node.look() if r.status == "healthy"}
    assert results["gpu_count"].values == {"gpus": 4}
    assert results["gpu_on_bus"].text == "4 of 4 NVIDIA GPUs answer on the PCI bus"
    assert results["nvswitch_on_bus"].text.startswith("1 of 1")
    assert results["pcie_link_width"].text.startswith("10 of 10 links")  # nine devices and the way up of the switch
    assert results["pcie_aer_fatal"].text.startswith("20 of 20 ports")


def test_a_gpu_that_answers_with_all_ones_or_leaves_the_list_is_lost_and_comes_back(node: Node) -> None:
    node.look()
    config = f"{DEVICES}/0000:12:00.0/config"
    before = (node.root / config).read_bytes()
    node.write(config, b"\xff" * 64)
    node.set("0000:12:00.0", current_link_width="63\n")
    bad = node.bad()
    assert list(bad) == ["gpu_on_bus 0000:12:00"]
    assert bad["gpu_on_bus 0000:12:00"].gpu == "0000:12:00"
    assert "all ones" in bad["gpu_on_bus 0000:12:00"].text
    node.write(config, before)
    node.set("0000:12:00.0", current_link_width="16\n")
    assert [(r.device, r.status) for r in node.look() if r.check == "gpu_on_bus"] == [("", "healthy")]
    node.remove("0000:13:00.0")
    assert "not on the PCI bus" in node.bad()["gpu_on_bus 0000:13:00"].text
    node.probe = PciProbe()  # the agent was restarted: what this boot had is not forgotten
    assert "gpu_on_bus 0000:13:00" in node.bad()
    node.write("proc/sys/kernel/random/boot_id", "b2\n")
    shutil.rmtree(node.root / "proc/driver/nvidia/gpus/0000:13:00.0")
    node.probe = PciProbe()  # the node was: the GPU may have been taken out
    assert node.bad() == {}


def test_a_gpu_that_only_the_driver_still_has_is_lost(node: Node) -> None:
    node.remove("0000:13:00.0")
    assert list(node.bad()) == ["gpu_on_bus 0000:13:00"]


def test_a_list_or_a_device_that_cannot_be_read_is_no_lost_gpu(node: Node) -> None:
    node.look()
    for name in ("class", "vendor"):
        (node.root / DEVICES / "0000:10:00.0" / name).unlink()
    (node.root / DEVICES / "0000:16:00.0/class").unlink()
    node.probe = PciProbe()
    assert node.bad() == {}
    (node.root / "sys/bus/pci/devices").rename(node.root / "sys/bus/pci/elsewhere")
    shutil.rmtree(node.root / "proc/driver")
    assert {r.status for r in node.look()} == {"unknown"}


def test_a_gpu_that_was_put_to_sleep_is_not_woken(node: Node) -> None:
    node.set("0000:10:00.0", **{"power/runtime_status": "suspended\n"}, current_link_width="63\n")
    node.write(f"{DEVICES}/0000:10:00.0/config", b"\xff" * 64)
    assert node.bad() == {}


@pytest.mark.parametrize(("expected", "level"), [(8, "critical"), (2, "warning"), (4, None)])
def test_the_number_of_gpus_that_the_site_expects(node: Node, expected: int, level: str | None) -> None:
    node.place.site = Site(expect=Expect(gpus=expected))
    bad = node.bad()
    assert [r.level for r in bad.values()] == ([level] if level else [])


def test_a_gpu_that_the_driver_does_not_run(node: Node) -> None:
    folder = node.root / "proc/driver/nvidia/gpus"
    shutil.rmtree(folder / "0000:11:00.0")
    assert node.bad()["gpu_has_driver 0000:11:00"].level == "warning"
    shutil.rmtree(folder / "0000:12:00.0")
    assert node.bad()["gpu_has_driver 0000:12:00"].level == "critical"
    shutil.rmtree(folder)  # the driver was unloaded: another check's matter
    assert node.bad() == {}
    node.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03\n")
    assert {r.level for r in node.bad().values()} == {"critical"}  # it is there and runs none that it ran


def test_gpus_are_counted_where_only_the_drivers_list_is_seen(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.write("proc/driver/nvidia/gpus/0000:c1:00.0/information", "Model: x\n")
    (count,) = [r for r in node.look() if r.check == "gpu_count"]
    assert count.values == {"gpus": 1}
    assert not node.bad()


def test_vgpu_functions_and_other_makers_are_no_gpus(node: Node) -> None:
    node.add([HOST_PORT, "0000:20:00.4"], GPU)
    (node.root / DEVICES / "0000:20:00.4/physfn").symlink_to("../0000:10:00.0")
    node.write(f"{DEVICES}/0000:20:00.4/config", b"\xff" * 64)  # a virtual function has no vendor of its own
    node.add([HOST_PORT, "0000:21:00.0"], "0x030000 1a03 2000")
    assert node.bad() == {}
    assert next(r for r in node.look() if r.check == "gpu_count").values == {"gpus": 4}


def test_a_link_that_lost_lanes(node: Node) -> None:
    node.set("0000:11:00.0", current_link_width="8\n")  # from the start: its peers tell
    result = node.bad()["pcie_link_width 0000:11:00"]
    assert result.level == "critical"
    assert result.text == "PCIe link of GPU 0000:11:00.0 has x8 of x16: another of its kind has x16"
    assert result.values == {"width_lanes": 8, "possible_lanes": 16}
    rest = [r.text for r in node.look() if r.check == "pcie_link_width" and not r.device]
    assert rest == ["9 of 10 links have the lanes of their kind here"]
    node.set(UPPER, current_link_width="4\n")  # later: what it had tells
    assert "x16 earlier in this boot" in node.bad()[f"pcie_link_width {UPPER}"].text


def test_links_as_the_node_is_wired_are_no_fault(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for number in range(2):  # a desktop that gives each board eight of the sixteen lanes
        node.add([f"0000:00:0{number}.0"], BRIDGE, width=8)
        node.add([f"0000:00:0{number}.0", f"0000:0{number + 1}:00.0"], "0x030000 10de 2684", width=8)
    node.add(["0000:00:02.1"], BRIDGE)  # and a third one that has a whole slot
    node.add(["0000:00:02.1", "0000:0a:00.0"], "0x030000 10de 2684")
    node.add(["0000:00:03.0"], BRIDGE, width=2, most=2)  # a slot with two lanes for a drive with four
    node.add(["0000:00:03.0", "0000:05:00.0"], NVME, width=2, most=4)
    node.add(["0000:00:04.0"], BRIDGE, width=0, most=255)
    node.add(["0000:00:04.0", "0000:06:00.0"], NIC, width=0, most=255)  # a machine that emulates no links
    told = node.bad()
    assert {r.level for r in told.values()} == {"warning"}  # boards for desktops whose slots differ
    assert set(told) == {"pcie_link_width 0000:01:00", "pcie_link_width 0000:02:00"}
    node.remove("0000:0a:00.0")
    assert set(node.bad()) == {"gpu_on_bus 0000:0a:00"}


def test_uncorrected_errors_of_this_boot_from_before_the_first_look_are_a_warning(node: Node) -> None:
    node.set("0000:14:00.0", aer_dev_fatal=UNCOR.format(n=2, asked=0, kind="FATAL", total=2))
    node.set("0000:10:00.0", aer_dev_nonfatal=UNCOR.format(n=1, asked=9, kind="NONFATAL", total=10))
    bad = node.bad()
    assert {key: r.level for key, r in bad.items()} == {
        "pcie_aer_fatal 0000:14:00.0": "warning",
        "pcie_aer_nonfatal 0000:10:00": "warning",
    }
    text = "2 fatal PCIe errors at NIC 0000:14:00.0 in this boot, before we first looked"
    assert bad["pcie_aer_fatal 0000:14:00.0"].text == text
    node.set("0000:14:00.0", aer_dev_fatal=UNCOR.format(n=3, asked=0, kind="FATAL", total=3))
    after = node.bad()["pcie_aer_fatal 0000:14:00.0"]
    assert (after.level, after.values) == ("critical", {"errors": 3})


def test_new_uncorrected_errors_stand_until_the_counter_is_reset(node: Node) -> None:
    node.look()
    node.set("0000:14:00.0", aer_dev_fatal=UNCOR.format(n=1, asked=0, kind="FATAL", total=1))
    node.set("0000:10:00.0", aer_dev_nonfatal=UNCOR.format(n=1, asked=9, kind="NONFATAL", total=10))
    node.set(HOST_PORT, aer_dev_nonfatal=UNCOR.format(n=0, asked=9, kind="NONFATAL", total=9))
    bad = node.bad()
    assert {(key, r.level) for key, r in bad.items()} == {
        ("pcie_aer_fatal 0000:14:00.0", "critical"),
        ("pcie_aer_nonfatal 0000:10:00", "warning"),
    }
    assert bad["pcie_aer_fatal 0000:14:00.0"].text == "1 fatal PCIe errors at NIC 0000:14:00.0 in this boot"
    assert bad["pcie_aer_nonfatal 0000:10:00"].gpu == "0000:10:00"
    node.probe = PciProbe()
    assert set(node.bad()) == set(bad)  # what has happened in this boot has happened
    node.set("0000:14:00.0", aer_dev_fatal=UNCOR.format(n=0, asked=0, kind="FATAL", total=0))
    assert "pcie_aer_fatal 0000:14:00.0" not in node.bad()  # the device was taken out and put in: counted anew


def test_corrected_errors_are_judged_by_their_rate(node: Node) -> None:
    node.look()
    node.set(UPPER, aer_dev_correctable=COR.format(n=7 + 10))
    assert node.bad(after_s=20) == {}  # 30 in a minute
    node.set(UPPER, aer_dev_correctable=COR.format(n=17 + 100))
    assert node.bad(after_s=20)[f"pcie_aer_corrected {UPPER}"].values == {"corrected_per_min": 110}
    assert node.bad(after_s=60) == {}


def test_slow_links_of_nics_are_reported_before_a_job_and_idle_gpus_are_not(node: Node) -> None:
    for address in ("0000:10:00.0", "0000:14:00.0", "0000:16:00.0"):
        node.set(address, current_link_speed="8.0 GT/s PCIe\n", max_link_speed="32.0 GT/s PCIe\n")
    node.set(LOWER.format(6), max_link_speed="8.0 GT/s PCIe\n")  # the slot of the drive can do no more
    assert list(node.bad(preflight=True)) == ["pcie_link_speed 0000:14:00.0"]
    assert node.bad() == {}


def test_garbage_in_sysfs_is_no_finding(node: Node) -> None:
    for name in ("current_link_width", "max_link_width", "aer_dev_fatal", "aer_dev_correctable", "class", "vendor"):
        node.write(f"{DEVICES}/0000:10:00.0/{name}", b"\xff\x00 TOTAL_ERR_FATAL -5 \n" * 3)
    node.write("state/pci.json", b'{"boot_id": "b1", "value": {"seen": 5, "widest": ["x"]}}')
    assert node.bad(preflight=True) == {}


def test_a_tree_without_config_files_tells_a_lost_gpu_by_what_else_reads_as_all_ones(node: Node) -> None:
    for config in node.root.glob("sys/devices/**/config"):
        config.unlink()
    node.set("0000:11:00.0", current_link_width="63\n", max_link_width="63\n", current_link_speed="Unknown\n")
    node.set("0000:13:00.0", revision="0xff\n")
    node.set("0000:10:00.0", revision="0xa1\n", current_link_speed="Unknown\n")  # it has lanes
    bad = node.bad()
    assert set(bad) == {"gpu_on_bus 0000:11:00", "gpu_on_bus 0000:13:00"}
    assert bad["gpu_on_bus 0000:13:00"].gpu == "0000:13:00"
    for number in (0x10, 0x12):  # now no peer tells more: it is the tree that tells nothing
        node.set(f"0000:{number:02x}:00.0", current_link_width="63\n", current_link_speed="Unknown\n")
    node.probe, node.place.state_dir = PciProbe(), None
    assert node.bad() == {}


def test_a_lone_gpu_with_fewer_lanes_is_told_only_where_the_slot_is_known(tmp_path: Path) -> None:
    """An AWS g5 machine shows no bridge above its A10G, which has x8 of its x16."""
    node = Node(tmp_path)
    node.add(["0000:00:1e.0"], GPU, width=8)
    assert node.bad() == {}
    node.set("0000:00:1e.0", current_link_width="4\n")
    assert node.bad()["pcie_link_width 0000:00:1e"].text.endswith("x4 of x16: it had x8 earlier in this boot")
    node.add([HOST_PORT], BRIDGE)
    node.add([HOST_PORT, "0000:01:00.0"], "0x030200 10de 20b5", width=8)
    assert node.bad()["pcie_link_width 0000:01:00"].text.endswith("x8 of x16: both ends can do x16")
