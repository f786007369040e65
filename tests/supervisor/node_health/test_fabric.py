"""Services of NVLink and GPUDirect, read from trees as HGX boards, NVL72 trays and plain machines have them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from diagnosis.health import Reading
from supervisor.node_health.contract import Moment, Place, Probe
from supervisor.node_health.fabric import CHECKS, LOG, FabricProbe, LogTail

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: ...\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs-builder@U16-I3)\n"
CGROUP = "sys/fs/cgroup/system.slice/nvidia-fabricmanager.service/cgroup.procs"
JOURNALD = "sys/fs/cgroup/system.slice/systemd-journald.service"
STARTED = (
    "[{day} 07:00:51] [INFO] [tid 2009] Fabric Manager version {version} is running with the following "
    "configuration options\n"
)
CONFIGURED = (
    "[{day} 07:00:59] [INFO] [tid 2009] Successfully configured all the available GPUs and NVSwitches to "
    "route NVLink traffic.\n"
)
FATAL = (
    "[{day} 07:53:55] [ERROR] [tid 841] detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus "
    "id 00000000:86:00.0 physical id 3 port 33\n"
)
NON_FATAL = (
    "[{day} 18:14:07] [ERROR] [tid 12727] detected NVSwitch non-fatal error 12028 on fid 0 on NVSwitch "
    "pci bus id 00000000:86:00.0 physical id 3 port 61\n"
)
MULTICAST = (
    "[{day} 06:01:46] [ERROR] [tid 1230079] failed to find the GPU handle 5410063385821516767 in the "
    "multicast team request setup 6130285411925746235.\n"
)
TOPOLOGY = (
    "[{day} 06:01:46] [ERROR] [tid 77] detected number of NVSwitches don't match with any supported "
    "system topology, aborting fabric manager\n"
)
INBAND = (
    "[{day} 03:14:18] [INFO] [tid 855] Sending inband response message:  Message header details: magic "
    "Id:adbc request Id:2b59bdc21b9504c4 status:0 type:3 length:24\n"
)
JUL23 = "Jul 23 2024"


class Node:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.probe = FabricProbe()
        self.place = Place(root=root, state_dir=root / "state")

    def write(self, name: str, content: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def log(self, *lines: str, day: str = JUL23, version: str = "535.129.03") -> None:
        path = self.root / LOG
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("".join(lines).format(day=day, version=version))

    def gpus(self, model: str, count: int = 8) -> None:
        self.write("proc/driver/nvidia/version", CLOSED)
        for number in range(count):
            self.write(f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0/information", f"Model: \t\t {model}\nIRQ: 5\n")

    def enable(self, unit: str) -> None:
        link = self.root / f"etc/systemd/system/multi-user.target.wants/{unit}.service"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"/lib/systemd/system/{unit}.service")

    def look(self, *, preflight: bool = False) -> dict[str, Reading]:
        self.place.preflight = preflight
        return {reading.check: reading for reading in self.probe.look(self.place, Moment(1.7e9, 1.0))}


@pytest.fixture
def plain(tmp_path: Path) -> Node:
    """A node of systemd, without anything of NVIDIA's."""
    node = Node(tmp_path)
    node.write(f"{JOURNALD}/cgroup.procs", "611\n")
    node.write("proc/sys/kernel/random/boot_id", "b1\n")
    node.write("proc/1/comm", "systemd\n")
    node.write("proc/977/comm", "nvidia-smi\n")
    return node


@pytest.fixture
def hgx(plain: Node) -> Node:
    """Eight H100 and four NVSwitches, the fabric manager runs."""
    plain.gpus("NVIDIA H100 80GB HBM3")
    for number in range(4):
        plain.write(f"sys/bus/pci/devices/0000:0{number}:00.0/class", "0x068000\n")
        plain.write(f"sys/bus/pci/devices/0000:0{number}:00.0/vendor", "0x10de\n")
    plain.write(CGROUP, "2009\n")
    plain.log(STARTED, CONFIGURED, INBAND)
    return plain


def test_it_is_a_probe_and_says_something_of_every_check_of_an_empty_tree(tmp_path: Path) -> None:
    probe = FabricProbe()
    assert isinstance(probe, Probe)
    readings = probe.look(Place(root=tmp_path, preflight=True), Moment(1.7e9, 1.0))
    assert {r.check for r in readings} == {check.id for check in CHECKS}
    assert {r.status for r in readings} == {"not_applicable"}


def test_a_sound_board_is_healthy(hgx: Node) -> None:
    seen = hgx.look()
    assert {
        check: seen[check].status for check in ("fabric_manager", "fabric_manager_version", "fabric_manager_log")
    } == {
        "fabric_manager": "healthy",
        "fabric_manager_version": "healthy",
        "fabric_manager_log": "healthy",
    }
    assert seen["fabric_manager_version"].text == "fabric manager 535.129.03, driver 535.129.03"


@pytest.mark.parametrize("content", ["", None])
def test_a_manager_that_does_not_run_on_a_board_with_switches(hgx: Node, content: str | None) -> None:
    (hgx.root / CGROUP).unlink()
    if content is not None:
        hgx.write(CGROUP, content)
    reading = hgx.look()["fabric_manager"]
    assert (reading.status, reading.level) == ("unhealthy", "critical")
    assert reading.text == "the fabric manager does not run on a node with 4 NVSwitches"
    hgx.write("proc/4711/comm", "nv-fabricmanage\n")  # a driver container runs it, in a control group of its own
    assert hgx.look()["fabric_manager"].status == "healthy"
    (hgx.root / "proc/4711/comm").unlink()
    assert "ran earlier in this boot" in hgx.look()["fabric_manager"].text


def test_inside_of_a_container_nothing_is_known(hgx: Node) -> None:
    (hgx.root / CGROUP).unlink()
    shutil.rmtree(hgx.root / JOURNALD)
    assert hgx.look()["fabric_manager"].status == "unknown"


@pytest.mark.parametrize(
    ("model", "count", "on", "status", "level"),
    [
        ("NVIDIA GB200", 4, True, "not_applicable", ""),
        ("NVIDIA GH200 480GB", 1, True, "not_applicable", ""),
        ("NVIDIA A100-PCIE-40GB", 8, True, "not_applicable", ""),  # one image for all nodes: enabled, nothing to do
        ("NVIDIA B200", 8, True, "unhealthy", "warning"),  # its switches are not on the node's PCI bus
        ("NVIDIA B200", 8, False, "not_applicable", ""),
        ("NVIDIA GeForce RTX 4090", 2, False, "not_applicable", ""),
    ],
)
def test_it_is_asked_for_only_where_it_is_needed(
    plain: Node, model: str, count: int, on: bool, status: str, level: str
) -> None:
    plain.gpus(model, count)
    if on:
        plain.enable("nvidia-fabricmanager")
    reading = plain.look()["fabric_manager"]
    assert reading.status == status
    assert not level or reading.level == level


def test_a_manager_that_ran_where_no_switch_is_seen_is_missed(plain: Node) -> None:
    plain.gpus("NVIDIA B300 SXM6 AC")
    plain.enable("nvidia-fabricmanager")
    plain.write(CGROUP, "2009\n")
    assert plain.look()["fabric_manager"].status == "healthy"
    plain.write(CGROUP, "")
    plain.probe = FabricProbe()  # the agent was restarted meanwhile
    reading = plain.look()["fabric_manager"]
    assert (reading.status, reading.level) == ("unhealthy", "critical")


def test_versions_that_differ(hgx: Node) -> None:
    hgx.write("proc/driver/nvidia/version", OPEN)
    reading = hgx.look()["fabric_manager_version"]
    assert (reading.text, reading.level) == ("fabric manager 535.129.03, driver 550.54.15", "warning")
    hgx.write(CGROUP, "")
    assert hgx.look()["fabric_manager_version"].level == "critical"
    hgx.log(STARTED, version="550.54.15")
    assert hgx.look()["fabric_manager_version"].status == "healthy"


@pytest.mark.parametrize(
    ("line", "level"), [(FATAL, "critical"), (NON_FATAL, "warning"), (MULTICAST, "warning"), (TOPOLOGY, "critical")]
)
def test_errors_in_the_log_stand_until_it_is_started_anew(hgx: Node, line: str, level: str) -> None:
    assert hgx.look()["fabric_manager_log"].status == "healthy"
    hgx.log(line, INBAND)
    reading = hgx.look()["fabric_manager_log"]
    assert (reading.status, reading.level) == ("unhealthy", level)
    assert hgx.look()["fabric_manager_log"].status == "unhealthy"
    hgx.log(STARTED, CONFIGURED, day="Jul 24 2024")
    assert hgx.look()["fabric_manager_log"].status == "healthy"


def test_a_non_fatal_error_is_forgotten_after_a_day(hgx: Node) -> None:
    hgx.log(NON_FATAL)
    hgx.log(INBAND, day="Jul 24 2024")
    assert hgx.look()["fabric_manager_log"].status == "unhealthy"
    hgx.log(INBAND, day="Jul 25 2024")
    assert hgx.look()["fabric_manager_log"].status == "healthy"


def test_a_log_that_is_rotated_or_half_written_or_garbage_is_read_on(hgx: Node) -> None:
    tail = LogTail()
    assert tail.read(hgx.place)
    with (hgx.root / LOG).open("a") as file:
        file.write(FATAL.format(day=JUL23)[:60])
    assert tail.read(hgx.place) == ""
    with (hgx.root / LOG).open("a") as file:
        file.write(FATAL.format(day=JUL23)[60:])
    assert "20034" in (tail.read(hgx.place) or "")
    assert len(tail.found) == 1
    (hgx.root / LOG).rename(hgx.root / f"{LOG}.1")
    (hgx.root / LOG).write_bytes(
        b"\xff\x00" * 99 + b"\n[Xxx 99 2024 99:99:99] detected NVSwitch fatal error 1\x1b[31m\n"
    )
    tail.read(hgx.place)
    assert [level for level, _, _ in tail.found] == ["critical", "critical"]
    assert "\x1b" not in tail.found[-1][2]
    (hgx.root / LOG).write_text(NON_FATAL.format(day=JUL23) * 5000)
    tail.read(hgx.place)
    assert len(tail.found) == 50


def test_the_log_may_lie_elsewhere_or_be_missing(hgx: Node) -> None:
    (hgx.root / LOG).rename(hgx.root / "var/fm.log")
    assert hgx.look()["fabric_manager_log"].text == f"there is no /{LOG}"
    hgx.write("usr/share/nvidia/nvswitch/fabricmanager.cfg", "# x\nLOG_LEVEL=4\nLOG_FILE_NAME=/var/fm.log\n")
    assert hgx.look()["fabric_manager_log"].status == "healthy"


def test_imex_is_asked_for_in_a_domain_with_a_channel_only(plain: Node) -> None:
    plain.gpus("NVIDIA GB200", 4)
    assert plain.look()["imex"].status == "not_applicable"
    plain.write("etc/nvidia-imex/nodes_config.cfg", "# the nodes\n10.0.0.1\n")
    plain.write("dev/nvidia-caps-imex-channels/channel0", "")
    assert "only this node" in plain.look()["imex"].text
    plain.write("etc/nvidia-imex/nodes_config.cfg", "# the nodes\n10.0.0.1\n10.0.0.2\n\n")
    assert (plain.look()["imex"].status, plain.look()["imex"].level) == ("unhealthy", "warning")
    plain.write("proc/4711/comm", "nvidia-imex\n")
    assert plain.look()["imex"].values == {"domain_nodes": 2}
    (plain.root / "proc/4711/comm").unlink()
    assert plain.look()["imex"].level == "critical"  # it ran in this boot


@pytest.mark.parametrize(
    ("version", "modules", "release", "status"),
    [
        (CLOSED, ["mlx5_core"], "5.15.0-91-generic", "unhealthy"),
        (CLOSED, ["mlx5_core", "nvidia_peermem"], "5.15.0-91-generic", "healthy"),
        (OPEN, ["mlx5_core"], "5.15.0-91-generic", "healthy"),
        (OPEN, ["mlx5_core"], "5.4.0-42-generic", "unhealthy"),
        (OPEN, ["efa"], "6.8.0", "not_applicable"),
        ("", ["mlx5_core"], "6.8.0", "not_applicable"),
    ],
)
def test_gpudirect(plain: Node, version: str, modules: list[str], release: str, status: str) -> None:
    if version:
        plain.write("proc/driver/nvidia/version", version)
    for name in modules:
        (plain.root / "sys/module" / name).mkdir(parents=True)
    plain.write("proc/sys/kernel/osrelease", release + "\n")
    (plain.root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert plain.look(preflight=True)["gpudirect_rdma"].status == status
    assert "gpudirect_rdma" not in plain.look()


def test_garbage_and_odd_files_are_no_finding(hgx: Node) -> None:
    hgx.write("etc/nvidia-imex/nodes_config.cfg", "")
    hgx.write("usr/share/nvidia/nvswitch/fabricmanager.cfg", "")
    files = [path for path in hgx.root.rglob("*") if path.is_file() and "bus/pci" not in str(path)]
    for content in (b"", b"\xff\x00\x1b[31m \n" * 50, b"9" * 5000):
        for path in files:
            path.write_bytes(content)
        hgx.probe = FabricProbe()
        seen = hgx.look(preflight=True)
        assert {check for check, reading in seen.items() if reading.status == "unhealthy"} <= {"fabric_manager"}
    (hgx.root / LOG).unlink()
    os.mkfifo(hgx.root / LOG)
    (hgx.root / CGROUP).unlink()
    (hgx.root / CGROUP).mkdir()
    assert hgx.look()["fabric_manager_log"].status == "unknown"


def test_this_machine_is_read_as_it_is() -> None:
    readings = FabricProbe().look(Place(preflight=True), Moment(1.7e9, 1.0))
    assert [r for r in readings if r.status == "unhealthy" and r.level == "critical"] == []
