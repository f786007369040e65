"""NCCL in the ranks of a node: settings from trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diagnosis.health import CheckResult
from supervisor.node_health import network
from supervisor.node_health.contract import JobInfo, Moment, Probe, ProbeContext
from supervisor.node_health.network import CHECKS, NcclProbe

from .tree import Files

NET_DEV = "Inter-|   Receive  |  Transmit\n face |bytes\n    lo: 1 2 0\n  ens3: 5 6 0\nibp12s0: 5 6 0\n"


class Node(Files):
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
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_it_is_a_probe_and_without_a_job_says_nothing(node: Node) -> None:
    assert isinstance(node.probe, Probe)
    seen = node.look()
    assert set(seen) == {check.id for check in CHECKS}
    assert {result.status for result in seen.values()} == {"not_applicable"}


def test_sound_settings(node: Node) -> None:
    for rank in range(8):
        node.rank(
            rank, NCCL_DEBUG="WARN", NCCL_SOCKET_IFNAME="ens", NCCL_IB_HCA="=mlx5_0:1,mlx5_1:1", NCCL_P2P_DISABLE="1"
        )
    seen = node.look()
    assert {result.status for result in seen.values()} == {"healthy"}
    assert seen["nccl_settings"].text == "NCCL_DEBUG=WARN, NCCL_P2P_DISABLE=1"


def test_settings_without_a_gpu_are_left_alone(node: Node) -> None:
    (node.root / "proc/driver/nvidia/gpus/0000:1b:00.0").rmdir()
    node.rank(0, NCCL_SOCKET_IFNAME="nowhere", NCCL_IB_HCA="mlx5_9")
    assert node.look()["nccl_settings"].status == "not_applicable"


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


def test_settings_that_name_what_is_not_there(node: Node) -> None:
    node.rank(0, NCCL_SOCKET_IFNAME="eth0", NCCL_IB_HCA="mlx5_0:1,mlx5_7:1")
    assert node.bad()["nccl_settings"] == (
        "NCCL_SOCKET_IFNAME=eth0: no network interface eth0 on this node; "
        "NCCL_IB_HCA=mlx5_0:1,mlx5_7:1: no RDMA device mlx5_7 on this node"
    )
    assert node.look()["nccl_settings"].level == "warning"
    node.place.job = JobInfo()
    node.look()
    node.rank(1, NCCL_SOCKET_IFNAME="eth0,ens3")  # of several interfaces one is enough
    assert node.bad() == {}


def test_of_an_environment_only_the_variables_of_nccl_are_kept(node: Node) -> None:
    node.rank(0, NCCL_DEBUG="IN\x1b[31mFO", NCCL_SECRET="hush", TORCH_FR_BUFFER_SIZE="1")
    assert network.read_settings(node.place, 1000) == {"NCCL_DEBUG": "INFO", "TORCH_FR_BUFFER_SIZE": "1"}
    assert "hush" not in repr(node.look())


def test_another_users_ranks_are_unknown(node: Node) -> None:
    node.rank(0)
    if os.geteuid() == 0:  # root reads everything: a process that is gone is the next best
        (node.root / "proc/1000/environ").unlink()
    else:
        (node.root / "proc/1000/environ").chmod(0)
    assert {result.status for result in node.look().values()} == {"unknown"}


def test_the_flight_recorder(node: Node) -> None:
    node.rank(0, TORCH_NCCL_TRACE_BUFFER_SIZE="0")
    assert "is off" in node.bad()["nccl_flight_recorder"]
    node.place.job = JobInfo()
    node.look()
    node.rank(1, TORCH_FR_BUFFER_SIZE="4000", TORCH_NCCL_DEBUG_INFO_PIPE_FILE="/dumps/pipe_")
    seen = node.look()["nccl_flight_recorder"]
    assert seen.text == "the flight recorder keeps 4000 entries; 1 pipes to have it dumped"


@pytest.mark.parametrize(
    "content", ["", "\x00" * 500, "NCCL_IB_HCA\x00=\x00NCCL_IB_HCA==\x00", "\x1b[2J/libnccl.so.2\n" * 99]
)
def test_garbage_is_no_finding(node: Node, content: str) -> None:
    for name in ("environ", "net/dev"):
        node.rank(0)
        node.write(f"proc/1000/{name}", content)
        node.probe = NcclProbe()
        assert {result.level for result in node.look().values() if result.status == "unhealthy"} <= {"warning"}
