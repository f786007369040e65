"""Services of NVLink, read from trees as HGX boards, NVL72 trays and plain machines have them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from diagnosis.health import CheckResult
from supervisor.node_health.contract import Moment, ProbeContext
from supervisor.node_health.fabric import FabricProbe, state_of

from .tree import Files

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: ...\n"
CGROUP = "sys/fs/cgroup/system.slice/nvidia-fabricmanager.service/cgroup.procs"
JOURNALD = "sys/fs/cgroup/system.slice/systemd-journald.service"


class Node(Files):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.probe = FabricProbe()
        self.place = ProbeContext(root=root, state_dir=root / "state")

    def gpus(self, model: str, count: int = 8) -> None:
        self.write("proc/driver/nvidia/version", CLOSED)
        for number in range(count):
            self.write(f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0/information", f"Model: \t\t {model}\nIRQ: 5\n")

    def enable(self, unit: str) -> None:
        link = self.root / f"etc/systemd/system/multi-user.target.wants/{unit}.service"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"/lib/systemd/system/{unit}.service")

    def look(self, *, preflight: bool = False) -> dict[str, CheckResult]:
        self.place.preflight = preflight
        return {result.check: result for result in self.probe.look(self.place, Moment(1.7e9, 1.0))}


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
    return plain


def test_a_sound_board_is_healthy(hgx: Node) -> None:
    assert hgx.look()["fabric_manager"].status == "healthy"


OLD = "sys/fs/cgroup/systemd/system.slice"


def test_services_by_their_control_groups_of_either_kind(tmp_path: Path) -> None:
    unified, old = Node(tmp_path / "unified"), Node(tmp_path / "old")
    folder = "sys/fs/cgroup/system.slice"
    unified.write(f"{folder}/failed.service/cgroup.events", "populated 0\nfrozen 0\n")
    assert state_of(unified.place, "failed") == "unknown", "a tree with some control groups says nothing of the others"
    unified.write(f"{folder}/systemd-journald.service/cgroup.events", "populated 1\nfrozen 0\n")
    assert [state_of(unified.place, unit) for unit in ("failed", "absent", "systemd-journald")] == [
        "stopped",
        "stopped",
        "running",
    ]
    for unit, pids in (("imex", "4711\n"), ("systemd-journald", "300\n"), ("gone", "")):
        old.write(f"{OLD}/{unit}.service/cgroup.procs", pids)
    assert [state_of(old.place, unit) for unit in ("imex", "gone")] == ["running", "stopped"]
    (old.root / OLD / "gone.service/worker").mkdir()
    assert state_of(old.place, "gone") == "running", "its processes are further down"


@pytest.mark.parametrize("content", ["", None])
def test_a_manager_that_does_not_run_on_a_board_with_switches(hgx: Node, content: str | None) -> None:
    (hgx.root / CGROUP).unlink()
    if content is not None:
        hgx.write(CGROUP, content)
    result = hgx.look()["fabric_manager"]
    assert (result.status, result.level) == ("unhealthy", "critical")
    assert result.text == "the fabric manager does not run on a node with 4 NVSwitches"
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
    result = plain.look()["fabric_manager"]
    assert result.status == status
    assert not level or result.level == level


def test_a_manager_that_ran_where_no_switch_is_seen_is_missed(plain: Node) -> None:
    plain.gpus("NVIDIA B300 SXM6 AC")
    plain.enable("nvidia-fabricmanager")
    plain.write(CGROUP, "2009\n")
    assert plain.look()["fabric_manager"].status == "healthy"
    plain.write(CGROUP, "")
    plain.probe = FabricProbe()  # the agent was restarted meanwhile
    result = plain.look()["fabric_manager"]
    assert (result.status, result.level) == ("unhealthy", "critical")


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


def test_garbage_and_odd_files_are_no_finding(hgx: Node) -> None:
    hgx.write("etc/nvidia-imex/nodes_config.cfg", "")
    files = [path for path in hgx.root.rglob("*") if path.is_file() and "bus/pci" not in str(path)]
    for content in (b"", b"\xff\x00\x1b[31m \n" * 50, b"9" * 5000):
        for path in files:
            path.write_bytes(content)
        hgx.probe = FabricProbe()
        seen = hgx.look(preflight=True)
        assert {check for check, result in seen.items() if result.status == "unhealthy"} <= {"fabric_manager"}
    (hgx.root / CGROUP).unlink()
    os.mkfifo(hgx.root / CGROUP)
    assert hgx.look()["fabric_manager"].status in ("healthy", "unhealthy")
