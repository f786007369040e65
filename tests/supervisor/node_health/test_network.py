"""Ethernet ports and NCCL's settings, from trees as machines have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diagnosis.health import CheckResult
from supervisor.node_health import network
from supervisor.node_health.contract import JobInfo, Moment, Probe, ProbeContext, Site
from supervisor.node_health.network import CHECKS, EthernetProbe, NcclProbe, default_routes, outliers

from .tree import Files, Tree, of

ROUTES = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"


class Node(Tree):
    """A node's /sys/class/net in a folder, looked at every ten seconds."""

    def __init__(self, folder: Path, site: Site | None = None) -> None:
        super().__init__(folder, EthernetProbe(), site)
        self.received: dict[str, int] = {}

    def interface(self, name: str, bus: str = "", driver: str = "mlx5_core", **files: object) -> None:
        """A port on the PCI bus, up, with its links as sysfs has them."""
        bus = bus or f"0000:{len(self.received) + 16:02x}:00.0"
        device = f"sys/devices/pci0000:00/{bus}"
        self.write(f"{device}/net/{name}/type", 1)
        for path, target in (
            (f"{device}/net/{name}/device", f"../../../{bus}"),
            (f"{device}/driver", f"../../../bus/pci/drivers/{driver}"),
            (f"sys/class/net/{name}", f"../../devices/pci0000:00/{bus}/net/{name}"),
            (f"sys/bus/pci/devices/{bus}", f"../../../devices/pci0000:00/{bus}"),
            (f"sys/bus/pci/drivers/{driver}/{bus}", f"../../../../devices/pci0000:00/{bus}"),
        ):
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            if not (self.root / path).is_symlink():
                (self.root / path).symlink_to(target)
        self.set(name, **{"operstate": "up", "speed": 25000, "carrier_down_count": 1, **files})
        self.count(name, 10_000)

    def set(self, name: str, **files: object) -> None:
        for file, content in files.items():
            self.write(f"sys/class/net/{name}/{file}", content)

    def count(self, name: str, received: int) -> None:
        """So many bytes were received since its driver was loaded."""
        self.received[name] = received
        self.set(name, **{"statistics/rx_bytes": received})

    def down(self, name: str) -> None:
        self.set(name, operstate="down", carrier="0", flags="0x1003", speed=-1)

    def route(self, *names: str) -> None:
        rows = [f"{name}\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0" for name in names]
        self.write("proc/net/route", ROUTES + "\n".join(rows))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_an_interface_that_is_up(node: Node) -> None:
    node.interface("eth0")
    node.place.preflight = True
    results = node.look()
    assert {one.status for one in results} == {"healthy"}
    assert {one.check for one in results} == {check.id for check in node.probe.checks}
    assert of(results, "eth_speed", "eth0").values == {"mbps": 25000.0}


def test_only_physical_ethernet_counts(node: Node) -> None:
    node.interface("eth0")
    node.interface("ib0", type=32)
    node.interface("pf0vf3", phys_port_name="pf0vf3")
    node.interface("wlan0")
    node.write("sys/class/net/wlan0/phy80211/index", 0)
    for name in ("lo", "docker0", "bond0"):
        node.set(name, operstate="up")
    target = "../../devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1:1.0/net/usb0"
    (node.root / "sys/class/net/usb0").symlink_to(target)
    assert {one.device for one in node.look()} == {"eth0"}


def test_a_captured_tree_without_device_links(node: Node) -> None:
    node.set("eth0", operstate="up", speed=1000, type=1)
    node.set("veth12ab", operstate="down", type=1)
    node.set("eth0/statistics", rx_bytes=5000)
    results = node.look()
    assert {one.device for one in results} == {"eth0"}


def test_what_was_never_up_is_nobodys_fault(node: Node) -> None:
    node.interface("eno2", operstate="down", carrier="0", speed=-1)
    node.count("eno2", 0)
    results = node.look()
    assert {one.status for one in results if one.device == "eno2"} == {"not_applicable"}


def test_the_only_way_out_is_critical(node: Node) -> None:
    node.interface("eth0")
    node.interface("eth1")
    node.route("eth0")
    assert node.bad() == {}
    node.down("eth1")
    assert node.bad()["eth_carrier", "eth1"] == "warning"
    node.down("eth0")
    assert node.bad()["eth_carrier", "eth0"] == "critical"
    assert "default route" in of(node.look(), "eth_carrier", "eth0").text


def test_a_default_route_that_goes_with_its_interface_is_remembered(node: Node) -> None:
    node.interface("eth0")
    node.route("eth0")
    node.look()
    node.route()
    node.down("eth0")
    node.probe = EthernetProbe()
    assert node.bad()["eth_carrier", "eth0"] == "critical"


def test_one_half_of_a_bond_is_a_warning(node: Node) -> None:
    for name in ("eth0", "eth1"):
        node.interface(name)
        node.write(f"sys/class/net/bond0/lower_{name}/x", "")
    node.write("sys/class/net/vlan7/lower_bond0/x", "")
    node.route("vlan7")
    assert default_routes(node.place) == {"vlan7", "bond0", "eth0", "eth1"}
    node.look()
    node.down("eth0")
    assert node.bad()["eth_carrier", "eth0"] == "warning"
    node.down("eth1")
    assert node.bad()["eth_carrier", "eth1"] == "critical"


def test_default_routes_of_ipv6(node: Node) -> None:
    zero = "0" * 32
    node.write(
        "proc/net/ipv6_route",
        f"{zero} 00 {zero} 00 fe80000000000000000000000000000{1} 00000400 00000001 00000000 00000003     eth7\n"
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo\n"
        f"fd000000000000000000000000000000 40 {zero} 00 {zero} 00000100 00000001 00000000 00000001     eth8",
    )
    assert default_routes(node.place) == {"eth7"}


def test_taken_down_by_hand(node: Node) -> None:
    node.interface("eth0")
    node.look()
    node.set("eth0", operstate="down", flags="0x1002")
    assert "taken down" in of(node.look(), "eth_carrier", "eth0").text


def test_carrier_lost_and_back(node: Node) -> None:
    node.interface("eth0")
    assert node.bad() == {}
    node.set("eth0", carrier_down_count=2)
    assert node.bad() == {("eth_link_lost", "eth0"): "warning"}
    assert node.bad(11 * 60) == {}
    for downs in (3, 4):
        node.set("eth0", carrier_down_count=downs)
        node.look()
    assert node.bad(3600) == {("eth_link_lost", "eth0"): "warning"}
    assert node.bad(12 * 3600) == {}


def test_older_kernels_count_changes_only(node: Node) -> None:
    node.interface("eth0", carrier_changes=5)
    (node.root / "sys/class/net/eth0/carrier_down_count").unlink()
    assert node.bad() == {}
    node.set("eth0", carrier_changes=7)
    assert node.bad() == {("eth_link_lost", "eth0"): "warning"}


def test_drivers_that_report_no_state(node: Node) -> None:
    node.interface("eth0", operstate="unknown", carrier=1, speed=-1)
    results = node.look()
    assert of(results, "eth_carrier", "eth0").status == "healthy"
    assert of(results, "eth_speed", "eth0").status == "not_applicable"
    (node.root / "sys/class/net/eth0/carrier").unlink()
    assert of(node.look(), "eth_carrier", "eth0").status == "unknown"


def test_a_slower_speed_than_before(node: Node) -> None:
    node.interface("eth0")
    node.look()
    node.set("eth0", speed=10000)
    assert node.bad(60) == {("eth_speed", "eth0"): "warning"}
    node.set("eth0", speed=25000)
    assert node.bad(60) == {}


def test_a_speed_that_the_site_wants(tmp_path: Path) -> None:
    node = Node(tmp_path, Site(limits={"eth_speed": {"least_mbps": 100000}}))
    node.interface("eth0")
    assert node.bad() == {("eth_speed", "eth0"): "warning"}


def test_what_is_left_out(tmp_path: Path) -> None:
    node = Node(tmp_path, Site(interfaces_left_out=("eno*",)))
    node.interface("eno1")
    node.down("eno1")
    assert {one.status for one in node.look()} == {"not_applicable"}


def test_outliers() -> None:
    assert outliers({"a": 1, "b": 1, "c": 0}) == {}  # too few to tell
    assert outliers({"a": 1, "b": 1, "c": 1, "d": 0}) == {"d": 1}
    assert outliers({"a": 1, "b": 1, "c": 0, "d": 0}) == {}
    assert outliers({"a": 1, "b": 0, "c": 0, "d": 0}) == {}  # more than its peers is no fault


@pytest.mark.parametrize("hostile", ["", "\x1b[31m", "up up", "9" * 5000, "-7"])
def test_hostile_files(node: Node, hostile: str) -> None:
    node.interface("eth0", operstate=hostile, speed=hostile, carrier=hostile, carrier_down_count=hostile)
    node.set("eth0", **{"statistics/rx_bytes": hostile})
    node.write("proc/net/route", hostile)
    node.write("proc/net/ipv6_route", hostile)
    node.place.preflight = True
    assert all("\x1b" not in one.text for one in node.look())
    node.look(60)


@pytest.mark.parametrize("linked", [True, False])
def test_a_part_of_a_bond_that_is_down_beside_one_that_is_up_is_a_warning(node: Node, linked: bool) -> None:
    """Nothing else tells of it: it has received nothing in this boot. Not every captured tree has the link `master`."""
    node.write("sys/class/net/bond0/bonding/slaves", "ens1f0 ens1f1")
    for name in ("ens1f0", "ens1f1", "eno2"):
        node.interface(name)
        if linked and name != "eno2":
            (node.root / f"sys/class/net/{name}/master").symlink_to("../../../../virtual/net/bond0")
    node.down("ens1f1")
    node.down("eno2")
    for name in ("ens1f1", "eno2"):
        node.count(name, 0)
    results = node.look()
    assert [(one.device, one.level) for one in results if one.status == "unhealthy"] == [("ens1f1", "warning")]
    assert of(results, "eth_carrier", "ens1f1").text == "no carrier; bond0 has to do without it"
    node.probe, node.place.state_dir = EthernetProbe(), None
    node.down("ens1f0")
    node.count("ens1f0", 0)
    assert node.bad() == {}  # a bond that nobody uses


NET_DEV = "Inter-|   Receive  |  Transmit\n face |bytes\n    lo: 1 2 0\n  ens3: 5 6 0\nibp12s0: 5 6 0\n"


class NcclNode(Files):
    """A tree with ranks whose processes are files."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.probe = NcclProbe()
        self.place = ProbeContext(root=root)
        self.at = 0.0
        for name in ("mlx5_0", "mlx5_1", "mlx5_bond_0"):
            (root / "sys/class/infiniband" / name / "ports/1").mkdir(parents=True)
        (root / "proc/driver/nvidia/gpus/0000:1b:00.0").mkdir(parents=True)

    def rank(self, rank: int, **settings: str) -> None:
        pid = 1000 + rank
        settings = {"PATH": "/usr/bin", "AWS_SECRET_ACCESS_KEY": "hush", "WANDB_API_KEY": "NCCL_DEBUG=x", **settings}
        self.write(f"proc/{pid}/environ", "".join(f"{key}={value}\0" for key, value in settings.items()))
        self.write(f"proc/{pid}/net/dev", NET_DEV)
        self.place.job = JobInfo(ranks={**self.place.job.ranks, pid: rank})

    def look(self) -> dict[str, CheckResult]:
        self.at += 60.0
        results = self.probe.look(self.place, Moment(1.7e9 + self.at, self.at))
        return {f"{result.check} {result.device}".strip(): result for result in results}

    def bad(self) -> dict[str, str]:
        return {key: result.text for key, result in self.look().items() if result.status == "unhealthy"}


@pytest.fixture
def nccl_node(tmp_path: Path) -> NcclNode:
    return NcclNode(tmp_path)


def test_it_is_a_probe_and_without_a_job_says_nothing(nccl_node: NcclNode) -> None:
    assert isinstance(nccl_node.probe, Probe)
    seen = nccl_node.look()
    assert set(seen) == {check.id for check in CHECKS}
    assert {result.status for result in seen.values()} == {"not_applicable"}


def test_sound_settings(nccl_node: NcclNode) -> None:
    for rank in range(8):
        nccl_node.rank(
            rank, NCCL_DEBUG="WARN", NCCL_SOCKET_IFNAME="ens", NCCL_IB_HCA="=mlx5_0:1,mlx5_1:1", NCCL_P2P_DISABLE="1"
        )
    seen = nccl_node.look()
    assert {result.status for result in seen.values()} == {"healthy"}
    assert seen["nccl_settings"].text == "NCCL_DEBUG=WARN, NCCL_P2P_DISABLE=1"


def test_settings_without_a_gpu_are_left_alone(nccl_node: NcclNode) -> None:
    (nccl_node.root / "proc/driver/nvidia/gpus/0000:1b:00.0").rmdir()
    nccl_node.rank(0, NCCL_SOCKET_IFNAME="nowhere", NCCL_IB_HCA="mlx5_9")
    assert nccl_node.look()["nccl_settings"].status == "not_applicable"


@pytest.mark.parametrize(
    ("value", "missing"),
    [
        ("ens3", []),
        ("ens,eth", ["eth"]),
        ("eth0,eth1", ["eth0", "eth1"]),
        ("=ens", ["ens"]),
        ("^docker0,lo", []),
        ("^=docker0", []),
        ("", []),
        ("ibp12s0:1", []),
        (",,", []),
    ],
)
def test_names_that_fit_nothing(value: str, missing: list[str]) -> None:
    assert network.names_nothing(value, ["lo", "ens3", "ibp12s0"]) == missing


def test_settings_that_name_what_is_not_there(nccl_node: NcclNode) -> None:
    nccl_node.rank(0, NCCL_SOCKET_IFNAME="eth0", NCCL_IB_HCA="mlx5_0:1,mlx5_7:1")
    assert nccl_node.bad()["nccl_settings"] == (
        "NCCL_SOCKET_IFNAME=eth0: no network interface eth0 on this node; "
        "NCCL_IB_HCA=mlx5_0:1,mlx5_7:1: no RDMA device mlx5_7 on this node"
    )
    assert nccl_node.look()["nccl_settings"].level == "warning"
    nccl_node.place.job = JobInfo()
    nccl_node.look()
    nccl_node.rank(1, NCCL_SOCKET_IFNAME="eth0,ens3")  # of several interfaces one is enough
    assert nccl_node.bad() == {}


def test_of_an_environment_only_the_variables_of_nccl_are_kept(nccl_node: NcclNode) -> None:
    nccl_node.rank(0, NCCL_DEBUG="IN\x1b[31mFO", NCCL_SECRET="hush", TORCH_FR_BUFFER_SIZE="1")
    assert network.read_settings(nccl_node.place, 1000) == {"NCCL_DEBUG": "INFO", "TORCH_FR_BUFFER_SIZE": "1"}
    assert "hush" not in repr(nccl_node.look())


def test_another_users_ranks_are_unknown(nccl_node: NcclNode) -> None:
    nccl_node.rank(0)
    if os.geteuid() == 0:  # root reads everything: a process that is gone is the next best
        (nccl_node.root / "proc/1000/environ").unlink()
    else:
        (nccl_node.root / "proc/1000/environ").chmod(0)
    assert {result.status for result in nccl_node.look().values()} == {"unknown"}


def test_the_flight_recorder(nccl_node: NcclNode) -> None:
    nccl_node.rank(0, TORCH_NCCL_TRACE_BUFFER_SIZE="0")
    assert "is off" in nccl_node.bad()["nccl_flight_recorder"]
    nccl_node.place.job = JobInfo()
    nccl_node.look()
    nccl_node.rank(1, TORCH_FR_BUFFER_SIZE="4000", TORCH_NCCL_DEBUG_INFO_PIPE_FILE="/dumps/pipe_")
    seen = nccl_node.look()["nccl_flight_recorder"]
    assert seen.text == "the flight recorder keeps 4000 entries; 1 pipes to have it dumped"


@pytest.mark.parametrize(
    "content", ["", "\x00" * 500, "NCCL_IB_HCA\x00=\x00NCCL_IB_HCA==\x00", "\x1b[2J/libnccl.so.2\n" * 99]
)
def test_garbage_is_no_finding(nccl_node: NcclNode, content: str) -> None:
    for name in ("environ", "net/dev"):
        nccl_node.rank(0)
        nccl_node.write(f"proc/1000/{name}", content)
        nccl_node.probe = NcclProbe()
        assert {result.level for result in nccl_node.look().values() if result.status == "unhealthy"} <= {"warning"}
