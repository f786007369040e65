"""No spare is left: the job starts again on other nodes, once, and goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.e2e, pytest.mark.slow]

Submit = Callable[..., Any]
XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def test_a_bad_node_and_no_spare(cluster: Any, submit: Submit) -> None:
    job = submit(nodes=2)
    job.wait_step(12)
    cluster.kernel_says("node2", XID_79)
    job.kill(1)
    job.wait_shown("starts the job again|requeued", within_s=60)
    cluster.until(lambda: job.slurm("%T %N") == "RUNNING node[1,3]", 60, lambda: job.slurm("%T %N %r %S %x"))
    assert job.slurm("%x") == "node2"
    job.succeeds(within_s=120)
    assert job.places() == {}
    assert [incident["id"] for incident in job.incidents()] == ["i-1"]
    assert cluster.reason("node2").startswith("unbroken: ")
