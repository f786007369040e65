"""NCCL in the ranks of a node: settings from trees, RAS and pipes with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diagnosis.health import Reading
from supervisor.node_health.contract import JobView, Moment, Place, Probe
from supervisor.node_health.network import nccl
from supervisor.node_health.network.nccl import CHECKS, NcclProbe

NET_DEV = "Inter-|   Receive  |  Transmit\n face |bytes\n    lo: 1 2 0\n  ens3: 5 6 0\nibp12s0: 5 6 0\n"
REPORT = """NCCL version 2.27.3 compiled with CUDA 12.9

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   {status}  {errors}

Errors
======

{trouble}"""


class Node:
    """A tree with ranks whose processes are files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.probe = NcclProbe()
        self.place = Place(root=root)
        self.at = 0.0
        for name in ("mlx5_0", "mlx5_1", "mlx5_bond_0"):
            (root / "sys/class/infiniband" / name / "ports/1").mkdir(parents=True)
        (root / "proc/driver/nvidia/gpus/0000:1b:00.0").mkdir(parents=True)

    def write(self, name: str, content: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def rank(self, rank: int, **settings: str) -> None:
        pid = 1000 + rank
        settings = {"PATH": "/usr/bin", "AWS_SECRET_ACCESS_KEY": "hush", "WANDB_API_KEY": "NCCL_DEBUG=x", **settings}
        self.write(f"proc/{pid}/environ", "".join(f"{key}={value}\0" for key, value in settings.items()))
        self.write(f"proc/{pid}/status", "Name:\tpt_main\nUid:\t1001\t1001\t1001\t1001\n")
        self.write(f"proc/{pid}/net/dev", NET_DEV)
        self.place.job = JobView(ranks={**self.place.job.ranks, pid: rank})

    def look(self) -> dict[str, Reading]:
        self.at += 60.0
        readings = self.probe.look(self.place, Moment(1.7e9 + self.at, self.at))
        return {f"{reading.check} {reading.device}".strip(): reading for reading in readings}

    def bad(self) -> dict[str, str]:
        return {key: reading.text for key, reading in self.look().items() if reading.status == "unhealthy"}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_it_is_a_probe_and_without_a_job_says_nothing(node: Node) -> None:
    assert isinstance(node.probe, Probe)
    seen = node.look()
    assert set(seen) == {check.id for check in CHECKS}
    assert {reading.status for reading in seen.values()} == {"not_applicable"}


def test_sound_settings(node: Node) -> None:
    for rank in range(8):
        node.rank(
            rank, NCCL_DEBUG="WARN", NCCL_SOCKET_IFNAME="ens", NCCL_IB_HCA="=mlx5_0:1,mlx5_1:1", NCCL_P2P_DISABLE="1"
        )
    seen = node.look()
    assert {key: seen[key].status for key in ("nccl_settings", "nccl_flight_recorder", "nccl_ras")} == {
        "nccl_settings": "healthy",
        "nccl_flight_recorder": "healthy",
        "nccl_ras": "not_applicable",
    }
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
    assert nccl.names_nothing(value, ["lo", "ens3", "ibp12s0"]) == missing


def test_settings_that_name_what_is_not_there(node: Node) -> None:
    node.rank(0, NCCL_SOCKET_IFNAME="eth0", NCCL_IB_HCA="mlx5_0:1,mlx5_7:1")
    assert node.bad()["nccl_settings"] == (
        "NCCL_SOCKET_IFNAME=eth0: no network interface eth0 on this node; "
        "NCCL_IB_HCA=mlx5_0:1,mlx5_7:1: no RDMA device mlx5_7 on this node"
    )
    assert node.look()["nccl_settings"].level == "warning"
    node.place.job = JobView()
    node.look()
    node.rank(1, NCCL_SOCKET_IFNAME="eth0,ens3")  # of several interfaces one is enough
    assert node.bad() == {}


def test_of_an_environment_only_the_variables_of_nccl_are_kept(node: Node) -> None:
    node.rank(0, NCCL_DEBUG="IN\x1b[31mFO", NCCL_SECRET="hush", TORCH_FR_BUFFER_SIZE="1")
    kept = nccl.read_settings(node.place, 1000)
    assert kept == {"NCCL_DEBUG": "INFO", "TORCH_FR_BUFFER_SIZE": "1"}
    assert "hush" not in repr(node.look())


def test_another_users_ranks_are_unknown(node: Node) -> None:
    node.rank(0)
    if os.geteuid() == 0:  # root reads everything: a process that is gone is the next best
        (node.root / "proc/1000/environ").unlink()
    else:
        (node.root / "proc/1000/environ").chmod(0)
    assert {reading.status for reading in node.look().values()} == {"unknown"}


def test_the_flight_recorder(node: Node) -> None:
    node.rank(0, TORCH_NCCL_TRACE_BUFFER_SIZE="0")
    assert "is off" in node.bad()["nccl_flight_recorder"]
    node.place.job = JobView()
    node.look()
    node.rank(1, TORCH_FR_BUFFER_SIZE="4000", TORCH_NCCL_DEBUG_INFO_PIPE_FILE="/dumps/pipe_")
    seen = node.look()["nccl_flight_recorder"]
    assert seen.text == "the flight recorder keeps 4000 entries; 1 pipes to have it dumped"


@pytest.mark.parametrize(
    "content", ["", "\x00" * 500, "NCCL_IB_HCA\x00=\x00NCCL_IB_HCA==\x00", "\x1b[2J/libnccl.so.2\n" * 99]
)
def test_garbage_is_no_finding(node: Node, content: str) -> None:
    for name in ("environ", "status", "net/dev", "net/tcp", "net/tcp6"):
        node.rank(0)
        node.write(f"proc/1000/{name}", content)
        node.probe = NcclProbe()
        assert {reading.level for reading in node.look().values() if reading.status == "unhealthy"} <= {"warning"}


def test_ras_of_a_captured_tree_is_not_asked(node: Node, ras_server: Any) -> None:
    node.rank(0, NCCL_RAS_ADDR=f"localhost:{ras_server.port}")
    line = f"   0: 0100007F:{ras_server.port:04X} 00000000:0000 0A 0:0 00:0 00000000  {{uid}} 0 77 1\n"
    node.write("proc/1000/net/tcp", "  sl  local_address\n" + line.format(uid=1001))
    assert node.look()["nccl_ras"].text == "RAS of a captured tree cannot be asked"
    node.write("proc/1000/net/tcp", "  sl  local_address\n" + line.format(uid=1002))
    assert node.look()["nccl_ras"].text.startswith("another user's process listens")
    assert ras_server.connections == 0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts a real process with settings of NCCL; returns its pid."""
    started = []

    def start_one(**settings: str) -> int:
        code = "import sys; print(flush=True); sys.stdin.read()"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **settings},
            cwd=tmp_path,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield start_one
    for process in started:
        process.communicate()


class Job:
    """One real rank on this machine."""

    def __init__(self, pid: int, rank: int = 0) -> None:
        self.probe = NcclProbe()
        self.place = Place(job=JobView(ranks={pid: rank}))

    def look(self, at: float) -> dict[str, Reading]:
        return {
            r.check: r for r in self.probe.look(self.place, Moment(1.7e9 + at, at)) if r.check.startswith("nccl_ras")
        }


def report(trouble: str = "", status: str = "RUNNING", errors: str = "OK") -> str:
    return REPORT.format(trouble=trouble, status=status, errors=errors)


def test_a_sound_job_is_asked_once_in_half_a_minute(ras_server: Any, start: Callable[..., int]) -> None:
    ras_server.report = report()
    job = Job(start(NCCL_RAS_ADDR=f"localhost:{ras_server.port}"))
    seen = job.look(60)
    assert {check: reading.status for check, reading in seen.items()} == {
        "nccl_ras": "healthy",
        "nccl_ras_missing": "healthy",
        "nccl_ras_error": "healthy",
    }
    assert job.look(80) == seen
    assert ras_server.connections == 1
    job.look(120)
    assert ras_server.connections == 2


def test_only_the_node_of_rank_0_asks_for_the_whole_job(ras_server: Any, start: Callable[..., int]) -> None:
    seen = Job(start(NCCL_RAS_ADDR=f"localhost:{ras_server.port}"), rank=8).look(60)
    assert seen["nccl_ras"].status == "healthy"
    assert seen["nccl_ras_missing"].status == "not_applicable"
    assert ras_server.heard == ["CLIENT PROTOCOL 2"]
    ras_server.report = report()
    job = Job(start(NCCL_RAS_ADDR=f"localhost:{ras_server.port}"), rank=8)
    job.place.only = ("nccl_ras*",)  # somebody wants to know it from this node
    assert job.look(60)["nccl_ras_missing"].status == "healthy"


def test_processes_that_are_missing_and_errors(ras_server: Any, start: Callable[..., int]) -> None:
    pid = start(NCCL_RAS_ADDR=f"localhost:{ras_server.port}")
    ras_server.report = report(
        f"INCOMPLETE\n  Missing communicator data from 1 job process\n"
        f"  Process {pid} on node 127.0.0.1 managing GPU 5\n\n"
        "DEAD\n  2 job processes are considered dead (unreachable via the RAS network)\n"
        "  Process 11 on node 10.9.9.9 managing GPU 5\n  Process 12 on node 10.9.9.9 managing GPU 6\n\n"
        "#0-0 (cf264af53edbe986) ERROR\n  Asynchronous error on 1 rank\n"
        "  Rank 3 reported Remote process error -- GPU 3 managed by process 13 on node 10.9.9.9\n",
        errors="INCOMPLETE,ERROR",
    )
    seen = Job(pid).look(60)
    missing = seen["nccl_ras_missing"]
    assert (missing.status, missing.level, missing.pids) == ("unhealthy", "warning", (pid,))
    assert missing.text.startswith("processes of the job: 2 cannot be reached, 1 do not answer: process 11 on 10.9.9.9")
    assert missing.values["dead_processes"] == 2
    assert seen["nccl_ras_error"].text == "NCCL reports: Remote process error (rank 3, process 13 on 10.9.9.9)"
    assert seen["nccl_ras_error"].pids == ()


def test_a_job_that_ends_is_not_told_of(ras_server: Any, start: Callable[..., int]) -> None:
    ras_server.report = report("DEAD\n  9 job processes are considered dead\n", status="FINALIZE")
    seen = Job(start(NCCL_RAS_ADDR=f"localhost:{ras_server.port}")).look(60)
    assert {reading.status for reading in seen.values()} == {"healthy"}


@pytest.mark.parametrize(
    ("manner", "own", "whole"), [("garbage", "unknown", "unknown"), ("closing", "unknown", "unknown")]
)
def test_what_is_no_ras_is_unknown(
    ras_server: Any, start: Callable[..., int], manner: str, own: str, whole: str
) -> None:
    ras_server.manner = manner
    seen = Job(start(NCCL_RAS_ADDR=f"localhost:{ras_server.port}")).look(60)
    assert (seen["nccl_ras"].status, seen["nccl_ras_missing"].status) == (own, whole)


def test_ras_threads_that_do_not_answer_are_a_warning(ras_server: Any, start: Callable[..., int]) -> None:
    ras_server.manner = "silent"
    job = Job(start(NCCL_RAS_ADDR=f"localhost:{ras_server.port}"))
    job.probe = NcclProbe(greeting_s=0.1)
    reading = job.look(60)["nccl_ras"]
    assert ras_server.connections == 4
    assert (reading.status, reading.level) == ("unhealthy", "warning")
    assert "takes connections and does not answer" in reading.text


def test_nothing_is_asked_where_nobody_listens(start: Callable[..., int]) -> None:
    seen = Job(start(NCCL_RAS_ADDR="localhost:1")).look(60)
    assert {reading.status for reading in seen.values()} == {"not_applicable"}
