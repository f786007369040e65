"""`unbroken status --exit-code`, with which a batch script ends: what became of the run, not of one node's task."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from supervisor.cli.main import main
from supervisor.controller.journal import Entry, open_journal
from supervisor.messages import AnyEvent, ControllerStarted, JobDefined, JobSpec, StopRequested, encode

BEGUN = (ControllerStarted(at=1.0, epoch=1), JobDefined(at=1.0, spec=JobSpec(name="llama")))


@pytest.mark.parametrize(
    ("events", "exit_code", "output"),
    [
        ((*BEGUN, StopRequested(at=2.0, node="node1", signal="SIGTERM")), 0, "143\n"),
        (BEGUN, 1, "unbroken: the job has not ended\n"),
    ],
    ids=["ended", "not ended"],
)
def test_the_exit_code_of_a_job(tmp_path: Path, events: tuple[AnyEvent, ...], exit_code: int, output: str) -> None:
    journal, _ = open_journal(tmp_path)
    journal.write([Entry("event", event.at, encode(event)) for event in events])
    journal.close()
    variables = {key: None for key in os.environ if key.startswith("UNBROKEN")}
    done = CliRunner().invoke(main, ["status", "--exit-code", "--job-dir", str(tmp_path)], env=variables)
    assert (done.exit_code, done.output) == (exit_code, output)
