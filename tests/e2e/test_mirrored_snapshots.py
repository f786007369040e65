"""Snapshots in memory that are mirrored to other nodes: a node is lost with all that it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.node_disks import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.slow]

Supervise = Callable[..., Any]


def test_the_spare_goes_on_from_a_mirrored_snapshot(supervise: Supervise, tmp_path: Path) -> None:
    """The script writes no checkpoint. The spare gets the lost node's part from a fourth node, the survivor has its
    own copy of that step: its ranks have written over it long since."""
    env = {"UNBROKEN_MIRROR_SNAPSHOTS": "1"}
    with Cluster(supervise, tmp_path, "in_memory", spares=2, pace=0.2, hold=60, env=env, steps=80) as cluster:

        def mirrored() -> int:
            return int((cluster.told().get("mirrored_snapshot") or {}).get("step", 0))

        cluster.a.until(lambda: mirrored() >= 20, 60, "a snapshot to be mirrored")
        kept = mirrored()
        assert cluster.a.told("checkpoints")["mirrored_snapshot"]["step"] >= 20
        cluster.lose("b")
        cluster.go_on()
        steps = [
            int(cluster.jobs[node].wait_shown(rf"rank {rank} goes on from memory at step (\d+)", 60)[1])
            for node, rank in (("a", 0), ("c", 1))
        ]
        assert steps[0] == steps[1] >= kept
        cluster.succeeds("c")
