"""deploy/slurm/healthcheck.sh as slurmd runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.fixture
def slurm_conf(tmp_path: Path) -> str:
    """As a site sets it, with the place of our environment."""
    script = Path(__file__).parents[2] / "deploy" / "slurm" / "healthcheck.sh"
    program = tmp_path / "healthcheck"
    program.write_text(f"#!/bin/sh\nUNBROKEN_BIN={Path(sys.executable).parent} exec {script}\n")
    program.chmod(0o755)
    tmp_path.chmod(0o755)
    return f"HealthCheckProgram={program}\nHealthCheckInterval=15\nHealthCheckNodeState=ANY"


def test_a_bad_node_is_drained_and_others_reasons_stand(cluster: Any) -> None:
    cluster.run("ctl", "scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=disk swap")
    for node in ("node2", "node3"):
        cluster.kernel_says(node, XID_79)
    cluster.until(lambda: cluster.reason("node3"), 60, "a reason of node3")
    assert cluster.reason("node3").startswith("unbroken: gpu_fallen_off_bus 0000:c1:00 ")
    assert cluster.states()["node3"] == "drained"
    assert cluster.reason("node2") == "disk swap"
    assert [cluster.states()[node] for node in ("node1", "node4")] == ["idle", "idle"]
