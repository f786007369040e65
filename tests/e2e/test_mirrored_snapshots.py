"""Snapshots in memory that are mirrored to other nodes: a node is lost with all that it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.snapshot_faults import mirrored, nodes, started_from, wait_mirrored

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.slow, pytest.mark.lasts(55)]

Supervise = Callable[..., Any]


def test_the_spare_goes_on_from_a_mirrored_snapshot(supervise: Supervise, tmp_path: Path) -> None:
    """Two ranks a node with sharded state, and no checkpoint. The spare gets the lost node's part from a fourth node,
    the survivor has its own copy of that step: its ranks have written over it long since."""
    with nodes(supervise, tmp_path) as cluster:
        kept = wait_mirrored(cluster, 20)
        assert cluster.a.told("checkpoints")["mirrored_snapshot"]["step"] >= kept
        kept = mirrored(cluster)
        cluster.lose("b")
        cluster.go_on()
        steps = started_from(cluster, "a", "c")
        assert min(steps) == max(steps) >= kept
        cluster.succeeds("c")
