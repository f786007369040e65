"""Where checkpoints come is known to every node, to the next controller and after a requeue; what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diagnosis.signals import Evidence, Finding
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from supervisor import messages as m
from supervisor.job.attempts import FOLDERS_KEPT


def saved(step: int) -> Checkpoint:
    return Checkpoint(path=f"/c/save{step}", step=step, complete=True, format="folder", modified_at=step)


@pytest.fixture
def saving(running: Any) -> Callable[..., Any]:
    """Nodes a and b run, and a writes checkpoints to /c."""

    def start(**spec: Any) -> Any:
        driver = running("a", "b", **spec)
        driver.tell(m.CheckpointsSeen, node="a", checkpoints=(saved(20),), folders=("/c",))
        return driver

    return start


def test_every_node_is_told_where_one_of_them_writes(saving: Any) -> None:
    driver = saving()
    assert {name: told.checkpoint_folders for name, told in driver.told.items()} == {"a": ("/c",), "b": ("/c",)}
    driver.join("c")
    assert driver.told["c"].checkpoint_folders == ("/c",)
    driver.tell(m.CheckpointsSeen, node="b", checkpoints=(saved(20),))
    assert driver.job.checkpoints.folders == ("/c",), "who only looks has learned nothing of its own"


def test_after_a_requeue_new_nodes_look_there_before_it_is_told_what_is_known(saving: Any) -> None:
    driver = saving(scheduler="slurm", scheduler_job="7")
    driver.tell(m.JobRequeued, requeues=1)
    driver.tell(m.ControllerStarted, epoch=2)
    driver.tell(m.JobDefined, spec=m.JobSpec(name="test", nodes_min=2, nodes_max=2, requeues=1))
    driver.join("d", "e")
    assert driver.told["d"].checkpoint_folders == ("/c",)
    assert not [line.text for line in driver.job.story if line.text.startswith("attempt 2 starts")]
    for node in ("d", "e"):
        driver.tell(m.CheckpointsSeen, node=node, checkpoints=(saved(40), saved(20)))
    driver.up()
    told = [line.text for line in driver.job.story if line.text.startswith("attempt 2 starts")]
    assert told == ["attempt 2 starts on 2 nodes (d, e); newest good checkpoint: /c/save40"]


def test_checkpoints_that_are_gone_are_told_aloud(saving: Any) -> None:
    driver = saving()
    driver.crash("a", 1)
    for node in ("a", "b"):
        driver.tell(m.CheckpointsSeen, node=node, checkpoints=(), folders=("/c",))
    driver.up(step=1)
    (line,) = [line for line in driver.job.story if line.text.startswith("attempt 2 starts")]
    assert line.loud
    assert line.text.endswith(
        "no good checkpoint was found, but /c/save20 was there before: is its file system mounted?"
    )


def test_the_folders_written_to_last_are_kept(saving: Any) -> None:
    driver = saving()
    for number in range(3 * FOLDERS_KEPT):
        driver.tell(m.CheckpointsSeen, node="a", checkpoints=(), folders=(f"/{number}",))
        driver.tell(m.CheckpointsSeen, node="b", checkpoints=(), folders=("/c",))
    assert len(driver.job.checkpoints.folders) == FOLDERS_KEPT
    assert driver.job.checkpoints.folders[-2:] == (f"/{3 * FOLDERS_KEPT - 1}", "/c")


def test_a_checkpoint_after_a_bad_loss_is_suspect_by_whatever_clock(saving: Any) -> None:
    """The storage's clock is an hour behind: by its time the checkpoint of step 40 is older than the bad loss."""
    driver = saving()
    driver.tell(m.Progressed, attempt=1, step=30)
    finding = Finding(
        rule="loss_nan",
        failure_class=FailureClass.LOSS_SPIKE_OR_NAN,
        confidence=0.9,
        scope="job",
        severity="error",
        at=driver.now,
        attempt=1,
        evidence=Evidence(source="stderr", text="loss is nan"),
    )
    driver.tell(m.FindingArrived, node="a", finding=finding, number=0)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(saved(40), saved(20)), folders=("/c",))
    driver.crash("a", 1)
    driver.up(step=21)
    assert driver.job.attempt.resume.path == "/c/save20"
    assert [one.path for one in driver.job.attempt.prepare] == ["/c/save40"]
