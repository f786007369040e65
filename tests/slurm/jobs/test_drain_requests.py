"""A job of an ordinary user, who may not drain nodes: root's programs on the node do it, at the job's request."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.lasts(60), pytest.mark.timeout(300)]

XID_79 = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
BIN = Path(sys.executable).parent
EPILOG = Path(__file__).parents[3] / "deploy" / "slurm" / "epilog.sh"
SPOOL = "/mnt/requests"
PROGRAMS = {
    "health": (
        "HealthCheckProgram={}\nHealthCheckInterval=5\nHealthCheckNodeState=ANY",
        f"{BIN}/unbroken drain-requests",
    ),
    "epilog": ("Epilog={}", str(EPILOG)),
}


@pytest.fixture(params=list(PROGRAMS))
def by(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def site() -> Iterator[Path]:
    """In a folder that users can enter, as pytest's own cannot be."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "site.toml").write_text(f'drain_requests = "{SPOOL}"\n')
        yield Path(folder) / "site.toml"


@pytest.fixture
def slurm_conf(by: str, site: Path, tmp_path: Path) -> str:
    """As a site sets it, with the place of our environment."""
    conf, command = PROGRAMS[by]
    program = tmp_path / by
    program.write_text(f"#!/bin/sh\nexport UNBROKEN_BIN={BIN} UNBROKEN_SITE={site}\nexec {command}\n")
    program.chmod(0o755)
    return conf.format(program)


def test_a_node_is_drained_for_a_job_of_an_ordinary_user(
    by: str, cluster: Any, submit: Callable[..., Any], site: Path
) -> None:
    for node in cluster.nodes:
        folder = cluster.hosts[node].root / SPOOL[1:]
        folder.mkdir()
        folder.chmod(0o1733)
    job = submit(nodes=3, spares=1, as_nobody=True, options=(f"--export=ALL,UNBROKEN_SITE={site}",))
    job.wait_step(12)
    cluster.kernel_says("node2", XID_79)
    job.kill(1)
    job.wait_shown("root's programs are asked to drain it")
    requests = cluster.hosts["node2"].root / SPOOL[1:]
    if by == "health":
        cluster.until(lambda: cluster.reason("node2"), 60, "the drain while the job runs")
        assert job.slurm() == "RUNNING"
    else:
        assert [file.name for file in requests.iterdir()] == [f"{job.id}.65534.json"]
        assert cluster.reason("node2") == ""
    job.succeeds()
    cluster.until(lambda: cluster.reason("node2"), 60, "the drain")
    assert re.match(rf"unbroken: \w+ gpu=0000:c1:00 incident={job.id}/i-1 ", cluster.reason("node2"))
    assert cluster.states()["node2"].startswith("drain")
    cluster.until(lambda: not list(requests.iterdir()), 30, "the request to be gone")
    assert [cluster.reason(node) for node in ("node1", "node3", "node4")] == ["", "", ""]
