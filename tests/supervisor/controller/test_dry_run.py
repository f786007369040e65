"""What `--dry-run` says: found out on the journal, without a trace in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diagnosis.incident import Verdict
from diagnosis.taxonomy import FailureClass
from supervisor import messages as m
from supervisor.controller.journal import Entry, open_journal, read_history
from supervisor.controller.report import dry_run

VERDICT = Verdict(failure_class=FailureClass.UNKNOWN, culprits=(), confidence=0.5, why="-", action="restart")


@pytest.fixture
def ask(make_driver: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Nodes a and b run under Slurm, c is the spare; then what the order would do after `before`."""

    def answer(command: str, argument: str = "", before: Callable[[Any], None] = lambda _: None) -> dict[str, Any]:
        driver = make_driver(VERDICT, nodes_min=2, nodes_max=2, scheduler="slurm", scheduler_job="7", spares=1)
        driver.join("a", "b")
        driver.join("c", spare=True)
        driver.up()
        before(driver)
        journal, _ = open_journal(tmp_path)
        journal.write([Entry("event", event.at, m.encode(event)) for event in driver.journal])
        journal.close()
        order = m.OperatorCommand(at=driver.now, command=command, argument=argument, by="ann")  # type: ignore[arg-type]
        found = dry_run(tmp_path, order)
        assert len(read_history(tmp_path).records) == len(driver.journal) + 1, "nothing was written"
        return found

    return answer


def test_a_restart_after_a_cordon_tells_who_leaves_who_comes_and_what_stops(ask: Any) -> None:
    found = ask("restart", before=lambda driver: driver.order("cordon", "b"))
    assert (found["interrupts"], found["attempt"], found["leave"], found["join"]) == (True, 2, ["b"], ["c"])
    assert "attempt 1 would be stopped (4 ranks on a, b)" in found["would"]
    assert "attempt 2 would start on a, c; no good checkpoint was found" in found["would"]


def test_a_cordon_while_an_attempt_is_formed_interrupts_it(ask: Any) -> None:
    found = ask("cordon", "b", before=lambda driver: driver.order("restart"))
    assert (found["interrupts"], found["leave"], found["join"]) == (True, ["b"], ["c"])


def test_the_end_is_told_with_its_exit_code(ask: Any) -> None:
    found = ask("stop")
    assert found["interrupts"]
    assert "the job would end: stopped by an operator (exit code 143)" in found["would"]


def test_what_would_be_refused_is_said(ask: Any) -> None:
    found = ask("approve", "i-9")
    assert found["refused"]
    assert "nothing waits for approval" in found["would"]
