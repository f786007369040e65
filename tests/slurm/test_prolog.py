"""deploy/slurm/prolog.sh as slurmd runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.test_healthcheck import XID_79
from tests.supervisor.active.test_active_tests import FLIP

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def slurm_conf(tmp_path: Path) -> str:
    """As a site sets it, with the place of our environment and of one with torch. On node2 a bit flips."""
    script = Path(__file__).parents[2] / "deploy" / "slurm" / "prolog.sh"
    (tmp_path / "sitecustomize.py").write_text(FLIP)
    program = tmp_path / "prolog"
    program.write_text(
        f"""#!/bin/sh
export UNBROKEN_BIN={Path(sys.executable).parent} UNBROKEN_TRAINING_PYTHON={sys.executable}
[ "$SLURMD_NODENAME" != node2 ] || export PYTHONPATH={tmp_path} TEST_FLIP='range(5, 99, 7)'
exec {script}
"""
    )
    program.chmod(0o755)
    tmp_path.chmod(0o755)
    more = "bf_interval=1,sched_min_interval=100000,sched_interval=1,nohold_on_prolog_fail"
    return f"Prolog={program}\nPrologFlags=Alloc\nPrologEpilogTimeout=180\nSchedulerParameters={more}"


@pytest.mark.timeout(400)
@pytest.mark.lasts(60)
def test_a_job_does_not_start_on_a_bad_node_and_starts_on_a_good_one(cluster: Any, tmp_path: Path) -> None:
    """node3's GPU has fallen off the bus; node2 counts wrong."""
    cluster.kernel_says("node3", XID_79)
    batch = tmp_path / "job.sh"
    batch.write_text("#!/bin/sh\nhostname\n")
    out = {node: tmp_path / f"{node}.out" for node in ("node1", "node2", "node3")}
    for node, path in out.items():
        cluster.run("ctl", "sbatch", "-w", node, "-o", str(path), str(batch))
    for node in ("node2", "node3"):
        cluster.until(lambda node=node: cluster.states()[node].startswith("drain"), 240, f"{node} to be drained")
        assert cluster.reason(node).startswith("unbroken: ")
        assert not out[node].exists()
    cluster.until(lambda: out["node1"].exists() and out["node1"].read_text() == "node1\n", 240, "the job on node1")
    assert cluster.states()["node1"] in ("idle", "allocated", "mixed", "completing")
