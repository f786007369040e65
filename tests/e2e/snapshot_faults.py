"""Faults of nodes, links and memory while snapshots are mirrored (`mirror_snapshots`). Run by hand:

    python -m pytest --slow -n 0 tests/e2e/snapshot_faults.py [-k NAME]

Each time the run goes on from the newest mirrored step, and ends with the weights of an undisturbed run. No copy
outlives its job. The state is sharded (FSDP2), with two ranks a node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.node_disks import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

Supervise = Callable[..., Any]
TWO_EACH = {"nproc": 2, "world": 4}
ON = {"UNBROKEN_MIRROR_SNAPSHOTS": "1"}


def nodes(supervise: Supervise, root: Path, ballast_mb: int = 0, **more: Any) -> Cluster:
    """Two members with two ranks each, FSDP2, and two spares."""
    more = {"spares": 2, "hold": 60, "pace": 0.2, "steps": 80, "env": ON, **TWO_EACH, **more}
    return Cluster(supervise, root, "sharded", "1000", str(ballast_mb), **more)


def mirrored(cluster: Cluster) -> int:
    return int((cluster.told().get("mirrored_snapshot") or {}).get("step", 0))


def wait_mirrored(cluster: Cluster, step: int, within_s: float = 90) -> int:
    cluster.a.until(lambda: mirrored(cluster) >= step, within_s, f"step {step} to be mirrored")
    return mirrored(cluster)


def started_from(cluster: Cluster, *names: str) -> list[int]:
    """The steps in memory that rank after rank went on from."""
    found = [
        cluster.jobs[node].wait_shown(rf"rank {rank} goes on from memory at step (\d+)", 90)[1]
        for rank, node in enumerate(node for node in names for _ in range(2))
    ]
    return [int(step) for step in found]


def mover(cluster: Cluster, node: str) -> psutil.Process:
    """Of a node."""
    (found,) = (one for one in cluster.jobs[node].kin() if "supervisor.mover.process" in " ".join(one.cmdline()))
    return found


def memory_held() -> Iterator[tuple[int, int]]:
    """Process and bytes of each snapshot or copy of one that is held on this machine."""
    for process in psutil.process_iter():
        try:
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                if "memfd:unbroken-" in os.readlink(entry):
                    yield process.pid, entry.stat().st_size
        except OSError:
            continue


def copies(process: psutil.Process) -> int:
    return sum("memfd:unbroken-copy" in os.readlink(one) for one in Path(f"/proc/{process.pid}/fd").iterdir())


@pytest.mark.parametrize("for_s", [3, 40])
def test_the_link_is_cut_in_the_middle_of_a_copy(supervise: Supervise, tmp_path: Path, for_s: float) -> None:
    """For a moment: it goes on. For longer: the node is left out, and all go on from what was whole before."""
    with nodes(supervise, tmp_path, 8, pace=0.4, hold=100, steps=110) as cluster:
        kept = wait_mirrored(cluster, 10)
        cluster.hosts["b"].slow_down("16mbit")
        cluster.a.until(lambda: copies(mover(cluster, "d")) % 2 == 1, 90, "a copy that is half there")
        kept = max(kept, mirrored(cluster))
        cluster.hosts["b"].cut()
        time.sleep(for_s)
        cluster.hosts["b"].mend()
        cluster.hosts["b"].run("tc", "qdisc", "del", "dev", "eth0", "root")
        if for_s > 5:
            steps = started_from(cluster, "a", "c")
            assert min(steps) == max(steps) >= kept
        wait_mirrored(cluster, kept + 10, 120)
        cluster.go_on()
        cluster.succeeds("b", "c", "d")


def test_the_peer_dies_in_the_middle_of_a_copy(supervise: Supervise, tmp_path: Path) -> None:
    """First its mover, then the whole node: another one becomes the peer."""
    with nodes(supervise, tmp_path, 8, pace=0.4, hold=100, steps=110) as cluster:
        wait_mirrored(cluster, 10)
        cluster.hosts["b"].slow_down("16mbit")
        cluster.a.until(lambda: copies(mover(cluster, "d")) % 2 == 1, 90, "a copy that is half there")
        mover(cluster, "d").kill()
        cluster.hosts["b"].run("tc", "qdisc", "del", "dev", "eth0", "root")
        kept = wait_mirrored(cluster, mirrored(cluster) + 10, 120)
        cluster.lose("d")
        kept = wait_mirrored(cluster, kept + 10, 120)
        cluster.lose("b")
        cluster.go_on()
        steps = started_from(cluster, "a", "c")
        assert min(steps) == max(steps) >= kept
        cluster.succeeds("c")


def test_no_memory_for_copies_on_the_peer(supervise: Supervise, tmp_path: Path) -> None:
    with nodes(supervise, tmp_path, 8, hold=150, steps=160) as cluster:
        wait_mirrored(cluster, 10)
        mover(cluster, "d").rlimit(psutil.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        before = mirrored(cluster)
        cluster.jobs["b"].wait_shown("not mirrored", 60)
        assert mirrored(cluster) <= before + 20
        mover(cluster, "d").kill()
        kept = wait_mirrored(cluster, cluster.step(), 90)
        cluster.lose("b")
        cluster.go_on()
        steps = started_from(cluster, "a", "c")
        assert min(steps) == max(steps) >= kept
        cluster.succeeds("c")


def test_nothing_is_left_when_everything_is_killed(supervise: Supervise, tmp_path: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    with nodes(supervise, tmp_path, 8) as cluster:
        wait_mirrored(cluster, 20)
        assert min(copies(mover(cluster, node)) for node in "bd") >= 2
        kin = [process for job in cluster.jobs.values() for process in job.kin()]
        mine = {process.pid for process in kin}
        assert {pid for pid, _ in memory_held()} & mine
        for process in kin:
            process.kill()
        cluster.a.until(lambda: not [one for one in memory_held() if one[0] in mine], 20, "copies to be gone")
        left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "copy" in path.name}
        assert not left, left
        assert set(os.listdir("/dev/shm")) <= shm
