"""The two-round test on the real cluster, with a node that is made bad. Too dear for CI (35 s of CPU each), so by hand:

    python -m pytest -q --slow tests/slurm/two_rounds_by_hand.py

docs/active-tests.md has what it gave.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(500)]

QUOTA = Path("/sys/fs/cgroup/cpu/unbroken-by-hand")
TASK = """
[ {fault} = quota ] && [ "$(hostname)" = node3 ] && echo 0 > {quota}/cgroup.procs
exec > $SLURM_PROCID.json 2> $SLURM_PROCID.err
exec unbroken check --active full --only pairs --only matmul --json --beside-jobs
"""


@pytest.mark.parametrize("fault", ["lossy", "quota"])
def test_the_bad_node_is_named_and_nobody_else(cluster: Any, fault: str, tmp_path: Path) -> None:
    if fault == "lossy":
        limit = ("tbf", "rate", "8mbit", "burst", "4k", "limit", "12k")
        cluster.run("node3", "tc", "qdisc", "add", "dev", "eth0", "root", *limit)
    else:
        QUOTA.mkdir(exist_ok=True)
        (QUOTA / "cpu.cfs_quota_us").write_text("10000")  # a tenth of a CPU, where four nodes share two
    (tmp_path / "task.sh").write_text(TASK.format(fault=fault, quota=QUOTA))
    (tmp_path / "job.sh").write_text("#!/bin/bash\nsrun --ntasks-per-node=1 bash task.sh\necho ended\n")
    cluster.run("ctl", "sbatch", "--nodes=4", "--output=job.log", "job.sh", cwd=tmp_path)
    log = tmp_path / "job.log"
    cluster.until(lambda: log.exists() and "ended" in log.read_text(), 400, "the end of the job")
    words = (tmp_path / "0.err").read_text()
    answer = json.loads((tmp_path / "0.json").read_text())
    failed = [one for one in answer["results"] if one["verdict"] == "fail"]
    assert {one["node"] for one in failed} == {"node3"}, words
    assert "pairs" in {one["test"] for one in failed}, words
    assert answer["pairs"]["rounds"] == 2
    if fault == "quota":
        assert all("throttled by its CPU quota" in one["reason"] for one in failed)
    cluster.until(lambda: fault != "quota" or not (QUOTA / "cgroup.procs").read_text(), 30, "the end of its processes")
    if fault == "quota":
        QUOTA.rmdir()
