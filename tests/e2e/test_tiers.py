"""Checkpoints on each node's own disk (`--publish-to`). Lost with its disk, or cut off, the run goes on from the newest
step that survivors hold. More faults, and other trainers: `pytest --slow tests/e2e/tier_faults.py`, by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.node_disks import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.root]

Supervise = Callable[..., Any]


@pytest.mark.slow
@pytest.mark.lasts(60)
def test_a_node_is_lost_with_its_disk_while_the_shared_folder_is_away(supervise: Supervise, tmp_path: Path) -> None:
    """The spare gets the lost node's part from its peer's mirror; what could not be published is, later."""
    with Cluster(supervise, tmp_path, hold=25, pace=0.1) as cluster:
        away = tmp_path / "away"
        cluster.shared.rename(away)
        cluster.wait_tier("mirrored", 10)
        assert cluster.newest("published") == 0
        kept = cluster.newest("mirrored")
        cluster.lose("b")
        cluster.go_on()
        cluster.jobs["c"].wait_ranks(1)
        assert cluster.resumed_step() >= kept
        away.rename(cluster.shared)
        cluster.succeeds("c")
        assert "step-60" in cluster.published()


@pytest.mark.slow
@pytest.mark.lasts(75)
def test_node_and_peer_are_lost_and_the_published_checkpoint_is_left(supervise: Supervise, tmp_path: Path) -> None:
    with Cluster(supervise, tmp_path, spares=2, hold=25, pace=0.1) as cluster:
        cluster.wait_tier("published", 10)
        kept = cluster.newest("published")
        cluster.lose("b", "d")  # half way round the ring: d has b's mirrors
        cluster.go_on()
        cluster.jobs["c"].wait_ranks(1)
        assert cluster.resumed_step() >= kept
        cluster.succeeds("c")
        assert "step-60" in cluster.published()
