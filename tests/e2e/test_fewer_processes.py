"""From a GPU that fails, by the scripted driver, to an attempt that runs without it, and back."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SOURCE = Path(__file__).parents[1] / "fake_nvml" / "fake_nvml.c"
UUIDS = [f"GPU-00000000-0000-0000-0000-{n:012d}" for n in range(2)]
XID = 8
"""The kind of event."""


@pytest.fixture
def nvml(tmp_path: Path) -> dict[str, str]:
    """The environment of a node with two GPUs."""
    library = tmp_path / "libnvidia-ml.so.1"
    flags = ("-shared", "-fPIC", "-O1", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library), str(SOURCE), "-lpthread")
    subprocess.run(["gcc", *flags], check=True, timeout=60)
    (tmp_path / "state").write_text("count 2\n*.memory_used 0\n")
    (tmp_path / "events").touch()
    files = {"FAKE_NVML_STATE": str(tmp_path / "state"), "FAKE_NVML_EVENTS": str(tmp_path / "events")}
    return {"LD_LIBRARY_PATH": str(tmp_path), **files}


def test_a_node_trains_on_without_its_bad_gpu_and_gets_it_back(
    supervise: Callable[..., Any], nvml: dict[str, str], tmp_path: Path
) -> None:
    job = supervise(steps=4000, pace=0.1, options=("--fewer-processes", "--gather", "1"), env=nvml)

    def gpus(ranks: dict[int, int]) -> set[str]:
        return {(job.rig / f"gpus-{pid}").read_text() for pid in ranks.values()}

    job.wait_checkpoint("step-*.pt")
    journals = job.job_dir.glob
    job.until(lambda: any(UUIDS[1] in one.read_text() for one in journals("journal.*.jsonl")), 60, "the GPUs")
    before = job.wait_ranks(2)
    assert gpus(before) == {"all"}
    with open(tmp_path / "events", "a") as events:
        events.write(f"1 {XID} 79\n")
    job.wait_shown("gpu_fallen_off_bus|Xid")
    job.kill(1)
    job.wait_shown("goes on without " + UUIDS[1])
    one = job.wait_ranks(1, list(before.values()))
    assert gpus(one) == {UUIDS[0]}
    job.wait_shown(r"recovered at step \d+")
    (node,) = job.told("status")["nodes"]
    assert (node["state"], node["ranks"]) == ("ACTIVE", [0])
    assert UUIDS[1] in node["why"]
    assert job.told("status")["restarts"] == 1
    job.ask("uncordon", node["node"], "--reason", "it was replaced")
    job.ask("restart", "--yes")
    assert gpus(job.wait_ranks(2, [*before.values(), *one.values()])) == {"all"}
