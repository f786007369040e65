"""What a job is told of earlier incidents, and what operators say of its own: shown, and never acted upon."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from recovery.incident_memory import PastIncident, Recurrence
from supervisor import messages as m
from supervisor.view import IncidentView

AGAIN = Recurrence(
    of="node", name="a", times=2, since_at=1.0, last=PastIncident(job="j", incident="i-9", at=1.0), text="second time"
)


def first(driver: Any) -> IncidentView:
    found: IncidentView = driver.job.view().incidents[0]
    return found


def wanted(driver: Any) -> dict[str, m.Assignment]:
    """The nodes' desired states, without what is told there."""
    return {name: msgspec.structs.replace(one, notices=(), version=0) for name, one in driver.told.items()}


@pytest.fixture
def broken(running: Any) -> Any:
    driver = running("a", "b")
    driver.crash("a", 1)
    return driver


def test_a_recurrence_is_told_once_and_changes_nothing_else(broken: Any) -> None:
    broken.tell(m.JournalStalled, seconds=1.0)  # whatever was still to be done
    before, state = wanted(broken), broken.state
    broken.tell(m.IncidentRecurred, incident="i-1", recurrences=(AGAIN,))
    assert broken.loud["incident_recurred"]["what"] == "second time"
    assert {type(action) for action in broken.actions} <= {m.Note, m.Assign}  # which takes the note to the terminals
    assert first(broken).recurrences == (AGAIN,)
    assert (broken.state, wanted(broken)) == (state, before)
    assert broken.tell(m.IncidentRecurred, incident="i-1", recurrences=(AGAIN,)) == []
    assert broken.tell(m.IncidentRecurred, incident="i-77", recurrences=(AGAIN,)) == []
    assert broken.replayed().view() == broken.job.view()


def test_corrections_are_kept_in_order_with_who_and_when(broken: Any) -> None:
    broken.order("correct", "i-1 nvlink_error", by="ann")
    broken.now += 5
    broken.order("correct", "i-1 gpu_hang", by="bob")
    found = first(broken).corrections
    assert isinstance(found, tuple)
    assert [(one.failure_class, one.by) for one in found] == [("nvlink_error", "ann"), ("gpu_hang", "bob")]
    assert found[0].at < found[1].at
    assert broken.replayed().view() == broken.job.view()


@pytest.mark.parametrize("argument", ["i-1 gpu_hung", "i-9 gpu_hang", "i-1", "", "gpu_hang i-1"])
def test_what_cannot_be_corrected_is_refused(broken: Any, argument: str) -> None:
    (refusal,) = [one for one in broken.order("correct", argument) if isinstance(one, m.Note) and one.refused]
    assert refusal.kind in ("class_unknown", "incident_unknown")
    assert first(broken).corrections is msgspec.UNSET


def test_an_unknown_class_names_those_like_it(broken: Any) -> None:
    (refusal,) = [one for one in broken.order("correct", "i-1 gpu_hung") if isinstance(one, m.Note) and one.refused]
    assert "gpu_hang" in str(refusal.arguments["why"])


def test_an_ended_job_can_be_corrected(broken: Any) -> None:
    broken.order("stop")
    assert broken.job.is_over
    broken.order("correct", "i-1 gpu_hang")
    corrections = first(broken).corrections
    assert isinstance(corrections, tuple)
    assert corrections[0].failure_class == "gpu_hang"


def test_what_is_remembered_is_named_as_the_cluster_names_it(slurm: Any) -> None:
    driver = slurm()
    driver.crash("b", 2)
    memory, record = driver.job.memory, driver.job.incidents.log.records[0]
    found = memory.closed(record)
    assert (found.nodes, found.gpus, found.ranks) == (("nodeb",), ("nodeb/0000:c1:00",), (2,))
    assert found.cordoned == ("nodeb",)
    assert found.plan.startswith("restart")
    assert memory.job_id.startswith("4711-")
