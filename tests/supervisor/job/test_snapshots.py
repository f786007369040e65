"""From which snapshot the next attempt starts, and what is done about replicas that differ."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from recovery.snapshot_choice import NodeSnapshot
from supervisor import messages as m

CORRUPT = Verdict(
    failure_class=FailureClass.SILENT_DATA_CORRUPTION,
    culprits=(Culprit(node="b", rank=2),),
    confidence=0.8,
    why="rank 2 differs",
    action="rollback_and_restart",
)


def checkpoint(driver: Any, step: int) -> None:
    found = Checkpoint(path=f"/c/{step}", step=step, format="x", complete=True, modified_at=driver.now)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(found,))


def again(driver: Any, *steps: int, attempt: int = 1, at: float | None = None, only: str = "ab") -> Any:
    """Rank 1 is killed, and the launchers come back: what was chosen."""
    driver.crash()
    if driver.state == "RECOVERING":
        driver.fire("backoff")
    for place, name in enumerate(driver.job.attempt.members):
        held = tuple(
            NodeSnapshot(
                attempt=attempt,
                step=step,
                first_rank=2 * place,
                ranks=2,
                world=4,
                at=driver.now if at is None else at,
            )
            for step in steps
            if name in only
        )
        offer = m.StoreOffer(host=name, port=1, local_world_size=2, snapshots=held)
        driver.tell(m.LauncherReady, node=name, attempt=driver.number, offer=offer)
    return driver.told["a"].round.snapshot


def test_all_ranks_start_from_the_newest_that_all_hold(running: Any) -> None:
    driver = running("a", "b")
    assert again(driver, 30, 40) == (1, 40)
    assert driver.told["b"].round.snapshot == (1, 40)


def test_a_newer_checkpoint_wins_and_an_older_one_does_not(running: Any) -> None:
    driver = running("a", "b")
    checkpoint(driver, 40)
    assert again(driver, 30, 40) is None
    driver.up(41)
    assert again(driver, 50, attempt=2) == (2, 50)


def test_what_one_node_lacks_is_not_used(running: Any) -> None:
    driver = running("a", "b")
    assert again(driver, 40, only="a") is None


def test_what_was_written_while_the_numbers_were_wrong_is_not_used_now_nor_later(running: Any) -> None:
    driver = running("a", "b")
    good = driver.now
    driver.tell(m.NumbersSeen, after=5, attempt=1, bad=True, step=40, ranks=(0,))
    driver.now += 5
    assert again(driver, 40) is None
    driver.up(1)
    assert again(driver, 30, at=good) is None  # an attempt has started from before it: that is another past
    driver.up(1)
    assert again(driver, 5, attempt=3) == (3, 5)


def test_the_odd_replica_is_an_incident_that_stops_nothing(running: Any) -> None:
    driver = running("a", "b")
    driver.verdict = CORRUPT
    agreed_at = driver.now
    driver.now += 10
    checkpoint(driver, 20)
    driver.tell(m.ReplicasDiffer, attempt=1, step=20, compared=4, odd=(2,), since=agreed_at)
    assert driver.state == "RUNNING"
    [finding] = driver.seen[-1].findings
    assert (finding.failure_class, finding.node, finding.rank) == (FailureClass.SILENT_DATA_CORRUPTION, "b", 2)
    assert [one.suspect for one in driver.job.checkpoints.candidates()] == [True]
    total = driver.job.incidents.log.total
    driver.tell(m.ReplicasDiffer, attempt=1, step=30, compared=4, odd=(2,))
    assert driver.job.incidents.log.total == total == 1


def test_two_replicas_blame_nobody(running: Any) -> None:
    driver = running("a", "b")
    driver.tell(m.ReplicasDiffer, attempt=1, step=20, compared=2)
    assert set(driver.loud) == {"replicas_differ"}
    assert driver.job.incidents.log.total == 0
    assert driver.job.checkpoints.suspect_open("replicas")


@pytest.mark.parametrize("numbers_first", [True, False])
def test_numbers_that_are_good_again_do_not_make_replicas_equal(running: Any, numbers_first: bool) -> None:
    driver = running("a", "b")
    tell = [
        lambda: driver.tell(m.NumbersSeen, after=5, attempt=1, bad=True, step=19, ranks=(0,)),
        lambda: driver.tell(m.ReplicasDiffer, after=5, attempt=1, step=20, compared=2),
    ]
    for one in tell if numbers_first else tell[::-1]:
        one()
    assert driver.job.incidents.log.total == 1
    driver.tell(m.NumbersSeen, after=5, attempt=1, bad=False, step=21, ranks=(0,))
    driver.now += 5
    checkpoint(driver, 30)
    assert [one.suspect for one in driver.job.checkpoints.candidates()] == [True]
    assert again(driver, 40) is None


def test_a_start_from_a_snapshot_is_no_start_without_a_checkpoint(running: Any) -> None:
    driver = running("a", "b")
    assert again(driver, 40) == (1, 40)
    [told] = [one for one in driver.actions if isinstance(one, m.Note) and one.kind == "attempt_starts"]
    assert not told.arguments.get("no_checkpoint")
    driver.up(41)
    assert again(driver, attempt=2) is None
    [told] = [one for one in driver.actions if isinstance(one, m.Note) and one.kind == "attempt_starts"]
    assert told.arguments.get("no_checkpoint")
