"""What readers are shown of a running job beyond what was decided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diagnosis.incident import Verdict
from diagnosis.signals import ExitRecord, RankSample
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from recovery.snapshot_choice import NodeSnapshot
from supervisor import messages as m
from supervisor.controller.heartbeats import Newest
from supervisor.controller.journal import Entry, open_journal, read_history
from supervisor.controller.report import RANKS_SHOWN, dry_run, live_view, rank_rows
from supervisor.job.advice import OnlineAdvice


@pytest.fixture
def shown(make_driver: Any) -> Any:
    """The status of a job that runs and was told of step 9, as its controller answers."""
    driver = make_driver()
    driver.join("a")
    driver.up(step=8)
    driver.tell(m.Progressed, attempt=1, step=9)

    def status(
        newest: Newest, stall: str = "", name: str = "status", saved: int | None = None, held: Any = None
    ) -> Any:
        if saved is not None:
            one = Checkpoint(
                path=f"/c/{saved}", step=saved, complete=True, format="dcp", modified_at=driver.now, size_bytes=1
            )
            driver.tell(m.CheckpointsSeen, node="a", checkpoints=(one,))
        loop = SimpleNamespace(
            epoch=1,
            connections={},
            stall=stall,
            job=driver.job,
            watch=SimpleNamespace(newest=newest, snapshot=held, rank_samples=list),
            clock=SimpleNamespace(now=lambda: driver.now),
            advice=OnlineAdvice(),
        )
        return live_view(name, loop)()  # type: ignore[arg-type]

    return status


def test_the_step_is_that_of_the_newest_heartbeat(shown: Any) -> None:
    assert shown(Newest(1, 51, 0.0, 60))["step"] == 51
    assert shown(Newest(1, 51, 0.0, 60))["last_step"] == 60
    assert shown(Newest(1, None, 0.0, None))["step"] == 9
    assert shown(Newest(0, 51, 0.0, None))["step"] == 9


def test_what_a_restart_would_lose_is_counted_to_the_step_that_is_shown(shown: Any) -> None:
    restart = shown(Newest(1, 51, 0.0, None))["restart"]
    assert (restart["step"], restart["loses_steps"]) == (None, 51)
    restart = shown(Newest(1, 51, 0.0, None), saved=4)["restart"]
    assert (restart["step"], restart["loses_steps"]) == (4, 47)
    restart = shown(Newest(1, 51, 0.0, None, counted_step=57), saved=52)["restart"]
    assert (restart["step"], restart["loses_steps"]) == (52, 5)
    assert shown(Newest(0, 51, 0.0, None), saved=4)["restart"]["loses_steps"] == 5, "of another attempt"


def test_so_is_what_it_would_lose_without_the_memory_of_a_node(shown: Any) -> None:
    held = NodeSnapshot(attempt=1, step=48, first_rank=0, ranks=2, world=2, at=0.0)
    restart = shown(Newest(1, 51, 0.0, None), saved=4, held=held)["restart"]
    assert (restart["from_memory"], restart["step"], restart["loses_steps"]) == (True, 48, 3)
    assert (restart["after_node_loss"]["step"], restart["after_node_loss"]["loses_steps"]) == (4, 47)


def test_a_job_whose_ranks_are_dead_is_not_running_while_its_journal_is_full(shown: Any) -> None:
    broken = Newest(1, 51, 0.0, None, broken=True)
    assert shown(broken)["state"] == "RUNNING", "decided in a moment"
    full = shown(broken, "No space left on device")
    assert full["state"] == "DIAGNOSING"
    assert "No space left" in full["waiting"]
    assert shown(Newest(1, 51, 0.0, None), "No space left on device")["state"] == "RUNNING"


def test_advice_of_a_job_that_runs(shown: Any) -> None:
    newest = Newest(1, 51, 0.0, None)
    told = shown(newest, name="advice")
    assert (told["schema"], told["job"], told["advice"], told["measured"]["nodes"]) == (1, "test", None, 1)
    assert shown(newest)["advice"] is None


# ----- what `--dry-run` says -----


VERDICT = Verdict(failure_class=FailureClass.UNKNOWN, culprits=(), confidence=0.5, why="-", action="restart")


@pytest.fixture
def ask(make_driver: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Nodes a and b run under Slurm, c is the spare; then what the order would do after `before`."""

    def answer(command: str, argument: str = "", before: Callable[[Any], None] = lambda _: None) -> dict[str, Any]:
        slurm = {"scheduler": "slurm", "scheduler_job": "7", "swap_mode": "recommend"}
        driver = make_driver(VERDICT, nodes_min=2, nodes_max=2, spares=1, **slurm)
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


@pytest.mark.parametrize(("before", "drains"), [("", ["b"]), ("swap", []), ("cordon", [])])
def test_a_swap_that_drains_the_node_later_says_so(before: str, drains: list[str], ask: Any) -> None:
    found = ask("swap", "b", before=lambda driver: not before or driver.order(before, "b"))
    assert (found["interrupts"], found["drains"]) == (False, drains)
    assert ("slurm is asked to drain it then, for the whole cluster" in found["would"]) == bool(drains)


def test_a_recommended_swap_that_is_approved_drains_the_node(ask: Any) -> None:
    def recommended(driver: Any) -> None:
        driver.tell(m.StragglersSeen, attempt=1, ranks=(2,), cost=0.2, since=driver.now)

    found = ask("approve", "b", before=recommended)
    assert (found["refused"], found["interrupts"], found["drains"]) == (False, False, ["b"])


def test_the_end_is_told_with_its_exit_code(ask: Any) -> None:
    found = ask("stop")
    assert found["interrupts"]
    assert "the job would end: stopped by an operator (exit code 143)" in found["would"]


def test_what_would_be_refused_is_said(ask: Any) -> None:
    found = ask("approve", "i-9")
    assert found["refused"]
    assert "nothing waits for approval" in found["would"]


def test_of_many_ranks_those_with_trouble_are_told() -> None:
    def sample(rank: int, **given: Any) -> RankSample:
        return RankSample(**{"rank": rank, "local_rank": 0, "pid": 1, "step": 50, **given})

    killed = ExitRecord(rank=300, local_rank=0, pid=1, code=None, signal=9, ended_at=1.0)
    samples = [("n0", sample(rank), 10.0) for rank in range(500)]
    samples[300] = ("n1", sample(300, exit=killed), 10.0)
    samples[301] = ("n1", sample(301, stopped_s=3.0), 10.0)
    samples[302] = ("n1", sample(302, step=7, waiting_s=2.0, moved_age_s=4.0), 10.0)
    rows = {row["rank"]: row for row in rank_rows(samples, 11.0)}
    assert len(rows) == RANKS_SHOWN
    assert (rows[300]["quiet_s"], rows[300]["text"]) == (None, "killed by SIGKILL")
    assert rows[301]["text"] == "stopped"
    assert (rows[302]["step"], rows[302]["quiet_s"], rows[302]["text"]) == (7, 5.0, "waits in a collective")
