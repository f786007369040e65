"""From a failure that only suspects a node, through active tests between real agents, to its cordon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.node_disks import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.slow, pytest.mark.lasts(70)]

Supervise = Callable[..., Any]
LOSES_PACKETS = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "8mbit", "burst", "4k", "limit", "12k")
"""What leaves faster than 8 Mbit/s is lost, once a few packets wait: the job's own small messages get through."""


def test_the_node_behind_a_lossy_link_is_left_out(supervise: Supervise, tmp_path: Path) -> None:
    """a says that its connection to b broke: that may be a's link, or b's. A spare takes b's place."""
    with Cluster(supervise, tmp_path, spares=2, hold=12, steps=24, rig="lost_peer@12:0") as cluster:
        cluster.a.until(lambda: cluster.step() >= 11, 90, "step 11")
        cluster.hosts["b"].run(*LOSES_PACKETS)
        cluster.go_on()
        cluster.succeeds("c", "d")
        incident, *others = cluster.a.incidents()
        assert not others
        assert set(incident["tests"]["failed"]) == {"b"}, incident["tests"]
        assert incident["verdict"]["culprits"][0]["node"] == "b"
        assert incident["plan"]["cordons"][0]["node"] == "b"
        assert incident["tests"]["took_s"] <= 60.0
        for name in cluster.names:
            left = [one for one in cluster.jobs[name].kin() if "active" in " ".join(one.cmdline())]
            assert not left, "a test outlives the job"
