"""deploy/slurm/prolog.sh as slurmd runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.test_healthcheck import XID_79

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def slurm_conf(tmp_path: Path) -> str:
    """As a site sets it, with the place of our environment and of one with torch."""
    script = Path(__file__).parents[2] / "deploy" / "slurm" / "prolog.sh"
    program = tmp_path / "prolog"
    program.write_text(
        f"""#!/bin/sh
export UNBROKEN_BIN={Path(sys.executable).parent} UNBROKEN_TRAINING_PYTHON={sys.executable}
exec {script}
"""
    )
    program.chmod(0o755)
    tmp_path.chmod(0o755)
    more = "bf_interval=1,sched_min_interval=100000,sched_interval=1,nohold_on_prolog_fail"
    return f"Prolog={program}\nPrologFlags=Alloc\nPrologEpilogTimeout=180\nSchedulerParameters={more}"


@pytest.mark.timeout(400)
@pytest.mark.lasts(40)
def test_a_job_does_not_start_on_a_bad_node_and_starts_on_a_good_one(cluster: Any, tmp_path: Path) -> None:
    """node3's GPU has fallen off the bus. The reason is ours, and the job is not held."""
    cluster.kernel_says("node3", XID_79)
    batch = tmp_path / "job.sh"
    batch.write_text("#!/bin/sh\nhostname\n")
    out = {node: tmp_path / f"{node}.out" for node in ("node1", "node3")}
    for node, path in out.items():
        cluster.run("ctl", "sbatch", "-w", node, "-J", node, "-o", str(path), str(batch))
    cluster.until(lambda: cluster.states()["node3"].startswith("drain"), 120, "node3 to be drained")
    cluster.until(lambda: out["node1"].exists() and out["node1"].read_text() == "node1\n", 240, "the job on node1")
    assert cluster.reason("node3").startswith("unbroken: gpu_fallen_off_bus 0000:c1:00 ")
    assert "held" not in cluster.run("ctl", "squeue", "-h", "-n", "node3", "-o", "%T %r").lower()
    assert not out["node3"].exists()
