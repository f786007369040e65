from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest

from supervisor.node_health.contract import Expect, ProbeContext, Site
from supervisor.node_health.infiniband import InfinibandProbe

from .tree import Tree, of

H100 = {"hca_type": "MT4129", "board_id": "MT_0000000838", "fw_ver": "28.39.1002"}
LOM = {"hca_type": "MT4125", "board_id": "MT_0000000359", "fw_ver": "22.39.1002"}
CLEAN = {
    "link_downed": 0,
    "symbol_error": 0,
    "link_error_recovery": 0,
    "port_rcv_errors": 0,
    "local_link_integrity_errors": 0,
    "excessive_buffer_overrun_errors": 0,
    "port_xmit_discards": 0,
    "port_rcv_data": 1_234_567,
}
UP = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
POLLING = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "40 Gb/sec (4X QDR)"}
DISABLED = {"state": "1: DOWN", "phys_state": "3: Disabled", "rate": "40 Gb/sec (4X QDR)"}
INIT = {"state": "2: INIT", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}


class Node(Tree):
    """A node's sysfs in a folder, looked at every ten seconds."""

    def __init__(self, folder: Path, site: Site | None = None) -> None:
        super().__init__(folder, InfinibandProbe(), site)

    def device(self, name: str, kind: dict[str, str] = H100, *, layer: str = "InfiniBand", card: str = "") -> None:
        for file, content in {**kind, "sys_image_guid": card or f"946d:ae03:00cd:{name}"}.items():
            self.write(f"sys/class/infiniband/{name}/{file}", content)
        self.write(f"sys/class/infiniband/{name}/ports/1/link_layer", layer)

    def port(self, name: str, state: dict[str, str] | None = None, **counters: object) -> None:
        device, _, number = name.partition("/")
        at = f"sys/class/infiniband/{device}/ports/{number or 1}"
        for file, content in (state or {}).items():
            self.write(f"{at}/{file}", content)
        for counter, value in counters.items():
            group = "counters" if counter in CLEAN else "hw_counters"
            self.write(f"{at}/{group}/{counter}", value)

    def eight(self, **of_one: Any) -> None:
        for n in range(8):
            self.device(f"mlx5_{n}", **of_one)
            self.port(f"mlx5_{n}", UP, **CLEAN)

    def on_bus(self, name: str, bus: str) -> None:
        """Give the device a PCI function with a driver."""
        self.write(f"sys/bus/pci/devices/{bus}/driver/uevent", "")
        (self.root / f"sys/class/infiniband/{name}/device").symlink_to(f"../../../bus/pci/devices/{bus}")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_every_check_is_said_and_its_threshold_can_be_printed(node: Node) -> None:
    node.eight()
    node.place.preflight = True
    results = node.look()
    assert {one.check for one in results} == {check.id for check in node.probe.checks}
    assert all("{" not in check.threshold_text() for check in node.probe.checks)
    state = of(results, "ib_port_state", "mlx5_3/1")
    assert (state.status, state.text) == ("healthy", "ACTIVE, 400 Gb/sec (4X NDR)")
    assert of(results, "ib_port_rate", "mlx5_3/1").values == {"gbps": 400.0}


def test_totals_since_boot_are_no_fault(node: Node) -> None:
    """A real H100 node in service: link_downed and the buffer counter at their maximum."""
    node.eight()
    node.port("mlx5_1", link_downed=255, excessive_buffer_overrun_errors=15, symbol_error=65535, port_rcv_errors=999)
    node.port("mlx5_1", local_ack_timeout_err=19345, out_of_sequence=88, rnr_nak_retry_err=4)
    assert node.bad() == {}
    assert node.bad() == {}
    assert "only its state tells" in of(node.look(), "ib_link_lost", "mlx5_1/1").text
    assert of(node.look(), "ib_link_errors", "mlx5_1/1").values["port_rcv_errors_total"] == 999


def test_unused_ports_of_a_real_node_stay_silent(node: Node) -> None:
    """Eight compute ports, and two cards with two Ethernet ports of which one is used."""
    node.eight()
    for n, state in enumerate((UP, DISABLED, DISABLED, DISABLED)):
        node.device(f"mlx5_{8 + n}", LOM, layer="Ethernet", card=f"card{n // 2}")
        node.port(f"mlx5_{8 + n}", {**state, "rate": "100 Gb/sec (4X EDR)"})
    results = node.look()
    assert not [one for one in results if one.status == "unhealthy"]
    assert of(results, "ib_port_state", "mlx5_9/1").status == "not_applicable"


def test_ports_unlike_their_peers_are_a_warning(node: Node) -> None:
    """A real RoCE node: six of eight are active, one is polling, one is disabled; nothing is known of before."""
    node.eight(layer="Ethernet")
    node.port("mlx5_5", DISABLED, port_rcv_data=0)
    node.port("mlx5_7", POLLING, port_rcv_data=0)
    assert node.bad() == {("ib_port_state", "mlx5_5/1"): "warning", ("ib_port_state", "mlx5_7/1"): "warning"}


def test_the_site_expects_more_active_ports(tmp_path: Path) -> None:
    node = Node(tmp_path, Site(expect=Expect(ib_ports=8, ib_rate_gbps=400)))
    node.eight()
    for n in (8, 9):  # storage: slower, and one of two is unused
        node.device(f"mlx5_{n}", LOM, layer="Ethernet")
        node.port(f"mlx5_{n}", {**(UP if n == 8 else DISABLED), "rate": "100 Gb/sec (4X EDR)"})
    assert node.bad() == {}
    node.probe, node.place.state_dir = InfinibandProbe(), None
    node.port("mlx5_2", POLLING, port_rcv_data=0)
    assert node.bad() == {("ib_port_count", ""): "critical", ("ib_port_state", "mlx5_2/1"): "critical"}
    node.port("mlx5_2", {**UP, "rate": "200 Gb/sec (2X NDR)"})
    assert node.bad(60)["ib_port_rate", "mlx5_2/1"] == "critical"


def test_nothing_at_all_where_the_site_expects_ports(tmp_path: Path) -> None:
    assert Node(tmp_path, Site(expect=Expect(ib_ports=8))).bad() == {("ib_port_count", ""): "critical"}


def test_a_port_that_was_active_goes_down_and_comes_back(node: Node) -> None:
    node.eight()
    assert node.bad() == {}
    node.port("mlx5_4", POLLING, link_downed=1)
    assert node.bad() == {("ib_port_state", "mlx5_4/1"): "critical", ("ib_link_lost", "mlx5_4/1"): "critical"}
    text = of(node.look(), "ib_port_state", "mlx5_4/1").text
    assert text == "mlx5_4/1 is DOWN (Polling): it was ACTIVE earlier in this boot"
    node.port("mlx5_4", INIT)
    assert node.bad()["ib_port_state", "mlx5_4/1"] == "warning"
    node.port("mlx5_4", UP)
    assert node.bad() == {("ib_link_lost", "mlx5_4/1"): "critical"}
    assert node.bad(11 * 60) == {}


def test_what_was_active_is_remembered_until_the_next_boot(node: Node) -> None:
    node.device("mlx5_0")
    node.port("mlx5_0", UP)
    assert node.bad() == {}
    node.port("mlx5_0", POLLING)
    node.probe = InfinibandProbe()
    assert node.bad()["ib_port_state", "mlx5_0/1"] == "critical"
    node.boot("an0ther")
    node.probe = InfinibandProbe()
    assert of(node.look(), "ib_port_state", "mlx5_0/1").status == "not_applicable"


def test_a_single_look_sees_that_a_port_was_in_use(node: Node) -> None:
    node.device("mlx5_0")
    node.port("mlx5_0", POLLING, **{**CLEAN, "link_downed": 2})
    assert node.bad() == {("ib_port_state", "mlx5_0/1"): "critical"}


@pytest.mark.parametrize(
    ("phys", "status"), [("4: ACTIVE", "healthy"), ("0: <unknown>", "healthy"), ("2: Polling", "unhealthy")]
)
def test_words_of_phys_state(node: Node, phys: str, status: str) -> None:
    """The first is what a real mlx5 tree has."""
    node.device("mlx5_0")
    node.port("mlx5_0", {**UP, "phys_state": phys})
    assert of(node.look(), "ib_port_state", "mlx5_0/1").status == status


def test_no_subnet_manager(node: Node) -> None:
    node.device("mlx5_0")
    node.port("mlx5_0", INIT)
    assert node.bad() == {("ib_port_state", "mlx5_0/1"): "warning"}


def test_flaps_are_counted_over_hours(node: Node) -> None:
    node.device("mlx5_0")
    node.port("mlx5_0", UP, link_downed=7)
    assert node.bad() == {}
    for downed in (8, 9, 10):
        node.look(3600)
        node.port("mlx5_0", link_downed=downed)
        assert node.bad() == {("ib_link_lost", "mlx5_0/1"): "critical"}
    assert node.bad(3600) == {("ib_link_lost", "mlx5_0/1"): "critical"}
    assert node.bad(12 * 3600) == {}


def test_a_lost_link_without_a_counter_is_counted_once(node: Node) -> None:
    node.device("rdmap0s31", layer="Ethernet")
    node.port("rdmap0s31", UP)
    node.look()
    node.port("rdmap0s31", POLLING)
    lost = of(node.look(), "ib_link_lost", "rdmap0s31/1")
    assert (lost.status, lost.values) == ("unhealthy", {"lost_in_window": 1.0})
    node.port("rdmap0s31", UP)
    assert of(node.look(), "ib_link_lost", "rdmap0s31/1").values == {"lost_in_window": 1.0}


def test_a_counter_that_starts_anew_is_no_lost_link(node: Node) -> None:
    node.device("mlx5_0")
    node.port("mlx5_0", UP, **{**CLEAN, "link_downed": 9, "symbol_error": 60000})
    node.look()
    node.port("mlx5_0", link_downed=0, symbol_error=0)
    assert node.bad(60) == {}
    node.port("mlx5_0", link_downed=1)
    assert node.bad(60) == {("ib_link_lost", "mlx5_0/1"): "critical"}


def test_a_slower_rate_than_before(node: Node) -> None:
    node.device("mlx5_0")
    node.port("mlx5_0", UP)
    assert node.bad() == {}
    node.port("mlx5_0", {"rate": "100 Gb/sec (1X NDR)"})
    assert node.bad(60) == {("ib_port_rate", "mlx5_0/1"): "warning"}


def test_a_slower_rate_than_the_peers(node: Node) -> None:
    node.eight()
    node.port("mlx5_6", {"rate": "200 Gb/sec (2X NDR)"})
    assert node.bad() == {("ib_port_rate", "mlx5_6/1"): "warning"}


@pytest.mark.parametrize(
    ("counter", "little", "much", "check"),
    [
        ("symbol_error", 100, 700, "ib_symbol_errors"),
        ("link_error_recovery", 5, 6, "ib_link_errors"),
        ("port_rcv_errors", 10, 11, "ib_link_errors"),
        ("local_link_integrity_errors", 0, 1, "ib_link_errors"),
        ("port_xmit_discards", 100, 101, "ib_link_errors"),
        ("local_ack_timeout_err", 10, 11, "ib_transport_errors"),
        ("req_transport_retries_exceeded", 0, 1, "ib_transport_errors"),
        ("roce_adp_retrans", 600, 601, "ib_transport_errors"),
    ],
)
def test_errors_are_judged_by_rate(node: Node, counter: str, little: int, much: int, check: str) -> None:
    node.device("mlx5_0")
    node.port("mlx5_0", UP, **{counter: 3})
    assert node.bad(60) == {}
    after: dict[str, Any] = {counter: 3 + little}
    node.port("mlx5_0", **after)
    assert node.bad(60) == {}
    assert node.bad(60 * 61) == {}
    after = {counter: 3 + little + much}
    node.port("mlx5_0", **after)
    assert node.bad(60) == {(check, "mlx5_0/1"): "warning"}
    assert node.bad(60 * 61) == {}


def test_symbol_errors_add_up_over_an_hour(node: Node) -> None:
    node.device("mlx5_0")
    total = 0
    for _ in range(3):
        node.port("mlx5_0", UP, symbol_error=total)
        assert node.bad(600) == {}
        total += 60
    node.port("mlx5_0", symbol_error=total)
    assert node.bad(600) == {("ib_symbol_errors", "mlx5_0/1"): "warning"}


def test_a_site_sets_its_own_limits(tmp_path: Path) -> None:
    node = Node(tmp_path, Site(limits={"ib_link_errors": {"port_rcv_errors": 1000}}))
    node.device("mlx5_0")
    node.port("mlx5_0", UP, port_rcv_errors=0)
    node.look()
    node.port("mlx5_0", port_rcv_errors=900)
    assert node.bad(60) == {}


def test_counters_that_a_driver_has_not(node: Node) -> None:
    """As older kernels show i40iw, and hfi1 its own names."""
    node.device("i40iw0", {"hca_type": "i40iw"}, layer="Ethernet")
    node.port("i40iw0", UP, **dict.fromkeys(CLEAN, "N/A (no PMA)"), ip4InDiscards=0)
    results = node.look()
    assert not [one for one in results if one.status in ("unhealthy", "unknown")]
    assert of(results, "ib_symbol_errors", "i40iw0/1").status == "not_applicable"


def test_a_device_that_is_gone(node: Node) -> None:
    node.eight()
    node.on_bus("mlx5_3", "0000:5e:00.0")
    assert node.bad() == {}
    shutil.rmtree(node.root / "sys/class/infiniband/mlx5_3")
    assert node.bad() == {("ib_device_missing", "mlx5_3"): "warning"}
    shutil.rmtree(node.root / "sys/bus/pci/devices/0000:5e:00.0")
    assert node.bad() == {("ib_device_missing", "mlx5_3"): "critical"}


def test_a_device_with_another_name_is_not_gone(node: Node) -> None:
    node.eight()
    node.on_bus("mlx5_3", "0000:5e:00.0")
    node.look()
    (node.root / "sys/class/infiniband/mlx5_3").rename(node.root / "sys/class/infiniband/ibp94s0")
    assert node.bad() == {}


def test_what_is_not_the_jobs_is_left_out(tmp_path: Path) -> None:
    node = Node(tmp_path, Site(interfaces_left_out=("mlx5_9", "ens3*")))
    node.device("mlx5_9")
    node.port("mlx5_9", UP)
    node.device("mlx5_8", LOM, layer="Ethernet")
    node.port("mlx5_8", UP)
    node.write("sys/class/infiniband/mlx5_8/device/net/eno1/operstate", "up")
    node.write("proc/net/route", "Iface\tDestination\nbond0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0")
    node.write("sys/class/net/bond0/lower_eno1/operstate", "up")
    node.look()
    node.port("mlx5_9", POLLING)
    node.port("mlx5_8", DISABLED)
    assert node.bad() == {}


def test_soft_devices_are_none(node: Node) -> None:
    node.device("rxe0", {}, layer="Ethernet")
    node.port("rxe0", {**UP, "phys_state": "2: Polling"})
    assert {one.status for one in node.look()} == {"not_applicable"}


def test_a_roce_port_whose_interface_is_down(node: Node) -> None:
    """EFA's driver always says ACTIVE."""
    node.device("rdmap0s31", {}, layer="Ethernet")
    node.port("rdmap0s31", UP)
    node.write("sys/class/net/ens31/operstate", "down")
    node.write("sys/class/infiniband/rdmap0s31/device/net/ens31/address", "")
    assert node.bad() == {("ib_netdev", "rdmap0s31/1"): "warning"}


@pytest.mark.parametrize("hostile", ["", "\x1b[31m", "4", ":", "9" * 5000, "4: " + "A" * 5000])
def test_hostile_files(node: Node, hostile: str) -> None:
    node.device("mlx5_0", {"hca_type": hostile, "board_id": hostile, "fw_ver": hostile})
    node.port("mlx5_0", dict.fromkeys(UP, hostile), **dict.fromkeys(CLEAN, hostile))
    node.place.preflight = True
    assert all(len(one.text) < 600 and "\x1b" not in one.text for one in node.look())
    assert node.bad() == {}


class Counted(ProbeContext):
    """A place that notes what is read in it."""

    opened: ClassVar[list[str]] = []

    def text(self, relative: str, limit: int = 65536) -> str | None:
        self.opened.append(relative)
        return super().text(relative, limit)


def test_a_look_reads_little(node: Node) -> None:
    """Between thorough looks only state and lost links are read: two files for each port."""
    node.eight()
    node.look()
    node.place = Counted(root=node.root)
    node.look(10)
    assert len([path for path in Counted.opened if "infiniband" in path]) == 16


def test_a_port_that_carried_gigabytes_and_is_off_beside_active_peers_is_a_warning(node: Node) -> None:
    """Disabling a port may leave link_downed at 0; all cards tell one GUID here, as virtual functions do."""
    node.eight(card="a088:c203:00ad:eab8")
    for n in range(8):
        if n % 2:
            node.on_bus(f"mlx5_{n}", f"0000:{0x10 + n:02x}:00.0")
        else:  # a tree whose `device` tells no address
            shown = node.root / f"sys/class/infiniband/mlx5_{n}"
            real = node.root / f"sys/devices/pci0000:00/0000:{0x10 + n:02x}:00.0/infiniband/mlx5_{n}"
            real.parent.mkdir(parents=True)
            shown.rename(real)
            shown.symlink_to(f"../../{real.relative_to(node.root / 'sys')}")
            (real / "device").symlink_to("../..")
    node.port("mlx5_3", POLLING, port_rcv_data=345678912345, link_downed=0)
    node.port("mlx5_5", DISABLED, port_rcv_data=345678912345, link_downed=0)
    assert node.bad() == {("ib_port_state", "mlx5_3/1"): "warning", ("ib_port_state", "mlx5_5/1"): "warning"}
    assert of(node.look(), "ib_port_state", "mlx5_3/1").text.endswith(
        "its peers are ACTIVE, and it has carried 1383 GB"
    )


def test_an_unused_second_port_of_a_card_stays_silent(node: Node) -> None:
    node.eight()
    node.device("mlx5_8", card="946d:ae03:00cd:mlx5_0")
    node.port("mlx5_8", DISABLED, port_rcv_data=345678912345, link_downed=0)
    assert node.bad() == {}


def test_few_ports_without_traffic_are_not_compared(node: Node) -> None:
    for n, data in enumerate((345678912345, 345678912345, 0)):
        node.device(f"mlx5_{n}")
        node.port(f"mlx5_{n}", UP if n < 2 else POLLING, port_rcv_data=data, link_downed=0)
    assert node.bad() == {}
    node.port("mlx5_2", port_rcv_data=2_000_000_000)
    assert node.bad(30) == {("ib_port_state", "mlx5_2/1"): "warning"}
