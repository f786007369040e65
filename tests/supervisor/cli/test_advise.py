"""`unbroken advise`: for figures that are given, for a job by its journal, and what it says to bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from recovery.cadence import Costs, best_interval_s
from recovery.checkpoint import Checkpoint
from supervisor import messages as m
from supervisor.cli import render
from supervisor.cli.main import main
from supervisor.controller.journal import Entry, open_journal
from supervisor.controller.report import job_advice, status_of

PLAN = ("--nodes", "64", "--mttf-node", "256", "--save", "60", "--restart", "300")
"""Sixty-four nodes that fail once in four hours."""


def advise(*arguments: str) -> Result:
    variables = {key: None for key in os.environ if key.startswith("UNBROKEN")}
    return CliRunner().invoke(main, ["advise", *arguments], env=variables)


def answer(*arguments: str) -> Any:
    done = advise(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_a_plan(tmp_path: Path) -> None:
    told = answer(*PLAN, "--interval", "7200", "--gpus-per-node", "4")
    best = best_interval_s(Costs(stall_s=60, durable_s=60, restart_s=300), 4 * 3600.0)
    assert (told["schema"], told["job"], told["measured"]) == (1, None, None)
    assert told["figures"]["gpus"] == 256
    assert told["advice"]["interval_s"] == pytest.approx(best)
    assert told["advice"]["gain"] == pytest.approx(told["advice"]["ettr_advised"] - told["advice"]["ettr_now"])
    text = advise(*PLAN, "--interval", "7200").output
    assert "save every 1,300 s instead of 7,200 s: +" in text
    assert not list(tmp_path.iterdir())


def test_a_plan_of_saves_in_the_background() -> None:
    sooner, later = answer(*PLAN)["advice"], answer(*PLAN, "--durable", "900")["advice"]
    assert later["interval_s"] == sooner["interval_s"]
    assert later["ettr_advised"] < sooner["ettr_advised"]
    assert sooner["ettr_now"] is None


def test_spares_by_repair_time_and_share() -> None:
    plan = (*PLAN, "--mttf-node", "6000")
    usual = answer(*plan)["advice"]
    assert [row["spares"] for row in usual["spares"]] == [0, 1, 2, 3, 4]
    assert usual["spares_advised"] == 2
    assert answer(*plan, "--repair", "1")["advice"]["spares_advised"] == 1
    assert answer(*plan, "--waiting", "5")["advice"]["spares_advised"] == 1
    assert answer(*PLAN)["advice"]["spares_advised"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--nodes", "8"), "without a job, --mttf-node, --save, --restart are needed too"),
        ((*PLAN[:-2],), "without a job, --restart is needed too"),
        ((*PLAN, "--save", "0"), "a number over 0 is needed"),
        ((*PLAN, "--save", "nan"), "a number over 0 is needed"),
        ((*PLAN, "--mttf-node", "inf"), "a number over 0 is needed"),
        ((*PLAN, "--restart", "-3"), "a number over 0 is needed"),
        ((*PLAN, "--nodes", "99999999"), "1 to 1,000,000 is needed"),
        ((*PLAN, "--durable", "30"), "--durable is shorter than --save"),
        ((*PLAN, "--job-dir", "x"), "not both"),
        (("x", "--job-dir", "y"), "both name a job"),
    ],
)
def test_bad_figures(arguments: tuple[str, ...], says: str) -> None:
    done = advise(*arguments)
    assert done.exit_code == 2
    assert says in done.output


def test_no_such_job(tmp_path: Path) -> None:
    done = advise(str(tmp_path / "nothing"))
    assert (done.exit_code, done.output.count("\n")) == (66, 1)


def test_failures_that_come_too_fast() -> None:
    arguments = ("--nodes", "100000", "--mttf-node", "10", "--save", "60", "--restart", "300")
    assert answer(*arguments)["lacks"]
    assert "no interval helps" in advise(*arguments).output


def keep(job_dir: Path, events: list[m.AnyEvent]) -> str:
    journal, _ = open_journal(job_dir)
    journal.write([Entry("event", event.at, m.encode(event)) for event in events])
    journal.close()
    return str(job_dir)


def failing(make_driver: Any, failures: int) -> Any:
    """A job on one node of two ranks that saves every hour, for 20 s, and fails every two hours."""
    run = make_driver(nodes_min=1, nodes_max=1, name="llama")
    run.join("a")
    run.up()
    for number in range(failures):
        begin, step, seen = run.now, 1000 * number, []
        while run.now < begin + 7200.0:
            for _ in range(40):
                step += 10
                run.tell(m.Progressed, after=90.0, attempt=run.number, step=step, step_at=run.now + 90.0)
            run.now += 20.0
            saved = {"path": f"/c/{number}-{step}", "step": step, "format": "torch_save", "complete": True}
            seen.insert(0, Checkpoint(**saved, modified_at=run.now, began_at=run.now - 20.0))
            run.tell(m.CheckpointsSeen, after=1.0, node="a", checkpoints=tuple(seen[:8]))
        run.crash(step=step)
        while run.state != "STARTING":
            run.fire("backoff")
        run.up(1000 * number + 1000)
    return run


def test_a_job_by_its_journal(tmp_path: Path, make_driver: Any) -> None:
    run = failing(make_driver, 4)
    told = answer(keep(tmp_path, run.journal))
    assert told["job"] == "llama"
    assert told["measured"]["failures"] == {"worker_crash": 4}
    assert told["measured"]["stall_s"] == pytest.approx(20.0, abs=2.0)
    assert told["advice"]["interval_s"] < told["measured"]["interval_s"]
    assert (told["enough"], told["matters"]) == (True, True)
    text = advise(str(tmp_path)).output
    assert "4 worker_crash" in text
    assert "instead of 3,600 s" in text


def test_too_little_data_gives_a_range_and_no_gain(tmp_path: Path, make_driver: Any) -> None:
    where = keep(tmp_path, failing(make_driver, 1).journal)
    told = answer(where)
    assert (told["enough"], told["matters"]) == (False, False)
    last = next(line for line in advise(where).output.splitlines() if line.startswith("too little data for advice"))
    assert render.about(told["advice"]["interval_low_s"]) in last
    assert "useful time" not in last


def test_an_ended_job_and_one_that_never_saved(tmp_path: Path, make_driver: Any) -> None:
    run = make_driver(nodes_min=1, nodes_max=1)
    run.join("a")
    run.up()
    run.tell(m.StopRequested, after=100.0, node="a", signal="SIGTERM")
    told = answer(keep(tmp_path, run.journal))
    assert (told["advice"], told["figures"]) == (None, None)
    assert "no checkpoint" in told["lacks"][0]
    assert advise(str(tmp_path)).output.splitlines()[-1] == "no advice"


def test_status_tells_only_what_matters(make_driver: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for failures, lines in ((4, 1), (2, 0)):
        job = failing(make_driver, failures).job
        told = status_of(job.view(), None, job_advice(job, job.now))
        assert (told["advice"] is not None) == bool(lines)
        render.status(told)
        assert capsys.readouterr().out.count("\nadvice: save every ") == lines
        told["outcome"] = {"line": "ended", "exit_code": 0}
        render.status(told)
        assert "advice" not in capsys.readouterr().out, "nothing is to be changed any more"
