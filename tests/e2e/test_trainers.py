"""Training scripts with the habits of those in the field, unmodified, with a fault that each finds hardest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]


def culprits(job: Any) -> list[list[int]]:
    return [[c["rank"] for c in incident["verdict"]["culprits"]] for incident in job.incidents()]


@pytest.mark.slow
def test_one_checkpoint_overwritten_in_place(supervise: Supervise) -> None:
    """nanoGPT's `ckpt.pt` is torn in the middle of a save: the copy of the last complete one is used."""
    job = supervise("nanogpt", rig="tear@30:0")
    job.succeeds()
    assert culprits(job) == [[0]]
    assert "Resuming training from" in job.shown()
    assert job.shown().count("iter 5:") == 1, "it began again from the start"


@pytest.mark.slow
@pytest.mark.lasts(60)
def test_hugging_face_trainer(supervise: Supervise) -> None:
    job = supervise("hf", steps=40, rig="relock@27:1")
    job.wait_checkpoint("checkpoint-10")
    job.kill(1)
    job.succeeds(200)
    assert culprits(job) == [[1], [1]]


@pytest.mark.slow
def test_torchtitan(supervise: Supervise) -> None:
    job = supervise("titan")
    job.wait_checkpoint("step-20/.metadata")
    job.kill(0)
    job.succeeds()
    assert culprits(job) == [[0]]
    assert "Loading the checkpoint at step" in job.shown()


@pytest.mark.slow
def test_killed_while_saving(supervise: Supervise) -> None:
    job = supervise("megatron", rig="tear@20:0,tear@40:1")
    job.succeeds()
    assert culprits(job) == [[0], [1]]


@pytest.mark.slow
def test_megatron_ends_with_work_left(supervise: Supervise) -> None:
    """`--exit-duration-in-mins`: code 0 before the last iteration is what was asked for, not a failure."""
    job = supervise("megatron", "--exit-duration-in-mins", "0.02", steps=400, ends=20, healthy=())
    assert job.code() == 0
    assert "exiting program after" in job.shown()
    assert job.step() < 400
    assert job.incidents() == []


@pytest.mark.slow
def test_a_restart_that_forgets_its_checkpoint_is_held(supervise: Supervise, after: Callable[[float], None]) -> None:
    """nanoGPT without `--restart-args` begins again at 0: it must not overwrite a good checkpoint."""
    job = supervise("nanogpt", restart_args=False, steps=120)
    job.wait_checkpoint("ckpt.pt")
    job.wait_step(21)
    good = (job.out / "ckpt.pt").read_bytes()
    job.kill(1)
    job.wait_shown("--restart-args", within_s=30)
    after(2)
    copies = [
        path.read_bytes() for path in job.folder.rglob("*") if path.is_file() and path.stat().st_size == len(good)
    ]
    assert good in copies, "the checkpoint at step 20 is gone"
