"""`unbroken report`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recovery.cadence import Costs, Figures, advise, exact_rate
from supervisor.cli.report import LOST, STARTING, TRAINING, markdown, page, summary

HOSTILE = "<script>alert(1)</script> | a *cell* [x](javascript:1)"


def incident(**given: Any) -> dict[str, Any]:
    verdict = {"failure_class": "gpu_ecc", "why": HOSTILE, "culprits": [{"node": "n1", "rank": None, "gpu": ""}]}
    return {
        "id": "i-1",
        "opened_at": "2026-01-01T00:30:00.000Z",
        "what": "",
        "verdict": verdict,
        "plan": {"kind": "restart", "why": "without n1"},
        "next_attempt": 2,
        "seconds": {"detect": 1.0, "first_step": 5.0},
        "lost_s": 360.0,
    } | given


def figures(gpus: int = 8, incidents: tuple[dict[str, Any], ...] = (), **given: Any) -> dict[str, Any]:
    """A job of one hour. `ettr` is 0.8 of it."""
    status = {
        "name": "llama",
        "state": "SUCCEEDED",
        "step": 100,
        "last_step": 100,
        "started_at": "2026-01-01T00:00:00.000Z",
        "ended_at": "2026-01-01T01:00:00.000Z",
        "now": "2026-01-01T01:00:00.000Z",
        "restarts": 1,
        "lost_s": sum(one["lost_s"] for one in incidents),
        "ettr": 0.8,
        "incidents_total": len(incidents),
    }
    measured = {"nodes": 1, "gpus": gpus, "trained_s": 2880.0, "failures": {"gpu_ecc": len(incidents)}}
    advice = {"measured": measured, "advice": None, "lacks": ["too little data"], "enough": False, "matters": False}
    points = [{"at": f"2026-01-01T00:{n:02}:00.000Z", "attempt": 1, "step": n, "loss": 1 / (n + 1)} for n in range(9)]
    return {
        "status": status | given,
        "incidents": list(incidents),
        "advice": advice | {"figures": None},
        "curve": {"points": points},
    }


def test_all_time_is_accounted_for() -> None:
    told = summary([figures(incidents=(incident(),))])
    assert told["shares"] == pytest.approx({TRAINING: 0.8, STARTING: 0.1, LOST + "gpu_ecc": 0.1})
    assert told["gpu_hours"] == pytest.approx(8.0)
    assert told["classes"] == [{"class": "gpu_ecc", "count": 1, "lost_s": 360.0, "median_down_s": 6.0}]
    assert told["failures"] == 1
    assert told["rate"]["low"] < told["rate"]["likely"] < told["rate"]["high"]


def test_seconds_tell_no_rate_of_failures() -> None:
    job = figures(incidents=(incident(),))
    job["advice"]["measured"]["trained_s"] = 15.0
    told = summary([job])
    assert (told["failures"], told["rate"]) == (1, None)


def test_time_that_two_incidents_have_in_common_counts_once() -> None:
    both = (incident(lost_s=600.0), incident(id="i-2", lost_s=600.0))
    told = summary([figures(incidents=both, lost_s=720.0)])
    assert told["shares"] == pytest.approx({TRAINING: 0.8, STARTING: 0.0, LOST + "gpu_ecc": 0.2})


def test_incidents_that_are_no_longer_listed_have_a_share() -> None:
    told = summary([figures(incidents=(incident(),), lost_s=540.0, incidents_total=201)])
    shares = {TRAINING: 0.8, STARTING: 0.05, LOST + "gpu_ecc": 0.1, LOST + "older incidents": 0.05}
    assert told["shares"] == pytest.approx(shares)


def test_a_large_job_counts_for_what_it_costs() -> None:
    told = summary([figures(gpus=300, ettr=0.9), figures(gpus=100, ettr=0.5)])
    assert told["ettr"] == pytest.approx(0.8)


def test_a_job_that_never_started_has_no_share() -> None:
    told = summary([figures(started_at=None, ended_at=None, ettr=None, step=None)])
    assert (told["ettr"], told["shares"]) == (None, {})
    assert "not known" in markdown(told)
    assert page(told)


def test_an_incident_without_a_verdict_is_listed() -> None:
    told = summary([figures(incidents=(incident(verdict=None, plan=None, next_attempt=None),))])
    assert told["classes"][0]["class"] == "not classified"
    assert markdown(told)


def test_what_logs_say_becomes_no_markup() -> None:
    told = summary([figures(incidents=(incident(),), name=HOSTILE)])
    assert "<script>" not in page(told)
    assert "<script>" not in markdown(told)
    assert "\\](javascript" in markdown(told)
    lines = markdown(told).splitlines()
    columns = [line.replace("\\|", "").count("|") for line in lines if line.startswith("| ")]
    assert len(set(columns[-3:])) == 1  # the table of incidents keeps its columns


def test_the_form_follows_the_name_of_the_file(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from supervisor.cli.main import main
    from tests.supervisor.cli.test_page import job_folder

    folder = str(job_folder(tmp_path))
    for name, begins in (("r.html", "<!doctype html>"), ("r.md", "# Report"), ("r.json", "{")):
        done = CliRunner().invoke(main, ["report", folder, "-o", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        assert (tmp_path / name).read_text().startswith(begins)
    assert json.loads((tmp_path / "r.json").read_text())["schema"] == 1
    assert CliRunner().invoke(main, ["report", folder, "-o", str(tmp_path / "r.pdf")]).exit_code == 2


def test_the_page_has_plots_and_runs_and_loads_nothing() -> None:
    text = page(summary([figures(incidents=(incident(),), name=HOSTILE), figures(state="RUNNING")]))
    assert text.count("<svg") == 6  # where the time went, what was lost, and of each job steps and loss
    assert "<script" not in text
    assert not re.search(r"""(?:src|href)=|url\(["']?(?!#)|@import""", text)
    assert "#1a7f37" in text


def test_a_loss_for_which_there_is_no_axis_is_left_out() -> None:
    told = figures()
    told["curve"]["points"][3]["loss"], told["curve"]["points"][5]["loss"] = 1.7e308, -1.7e308
    assert page(summary([told])).count("<svg") == 3


def test_there_is_advice_on_saves_and_spares() -> None:
    from supervisor.controller.report import plain

    given = Figures(
        nodes=64,
        gpus=512,
        rate=exact_rate(0.01),
        node_rate=0.01,
        costs=Costs(stall_s=30.0, durable_s=30.0, restart_s=60.0),
        interval_s=7200.0,
    )
    job = figures()
    job["advice"] |= {"enough": True, "lacks": [], "figures": plain(given), "advice": plain(advise(given))}
    told = markdown(summary([job])).partition("## Advice")[2]
    assert "save every" in told
    assert re.search(r"to wait less than .* spare", told)
