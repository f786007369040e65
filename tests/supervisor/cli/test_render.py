"""What people read: the parts that no transcript shows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from supervisor import messages as m
from supervisor.cli import render
from supervisor.cli.main import main
from supervisor.config import read_toml
from supervisor.controller.client import ControllerClient
from supervisor.controller.journal import Entry, open_journal
from supervisor.controller.report import status_of
from supervisor.errors import ConfigError, ControllerUnusable
from supervisor.job.job import Job
from supervisor.messages import AnyEvent, ControllerStarted, JobDefined, JobSpec, StopRequested, encode
from supervisor.node_diff import compare


def test_status_tells_what_differs_and_whose_clock_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job()
    spec = m.JobSpec(name="llama", nodes_min=3, nodes_max=3)
    job.handle(m.JobDefined(at=1.0, spec=spec))
    for node in ("a", "b", "c"):
        job.handle(m.NodeJoined(at=1.0, node=node, host=f"host-{node}", address="10.0.0.1"))
    found = compare({"a": {"driver": "550"}, "b": {"driver": "535"}, "c": {"driver": "550"}})
    job.handle(m.VersionsCompared(at=2.0, differences=found))
    answer = status_of(job.view(), None)
    assert [node["clock_offset_s"] for node in answer["nodes"]] == [None] * 3
    assert answer["skew"][0]["values"][1] == {"value": "535", "count": 1, "nodes": ["b"]}
    answer["nodes"][2]["clock_offset_s"] = -2.5
    answer["nodes"][1]["clock_offset_s"] = 0.004
    render.status(answer)
    lines = capsys.readouterr().out.splitlines()
    assert "the nodes differ: driver is 535 on b and 550 on the other 2" in lines
    assert [line.rpartition("\t")[2] for line in lines if "\thost-" in line] == [
        "",
        "",
        "its clock is 2.5 s behind",
    ]


def test_status_tells_when_the_scheduler_ends_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    for ends_in, said in ((7290.0, "(in 2 h 01 min)"), (-5.0, "(over)"), (None, "")):
        job = Job()
        ends_at = None if ends_in is None else time.time() + ends_in
        job.handle(m.JobDefined(at=1.0, spec=m.JobSpec(name="llama", ends_at=ends_at)))
        render.status(status_of(job.view(), None))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time limit: ")]
        assert [line.partition(" (")[2] for line in lines] == [said[1:]] * bool(said)


# ----- `unbroken status --exit-code`, with which a batch script ends -----


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


# ----- commands given what they cannot use, or nowhere to say it -----


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that has only begun, and whose controller is gone."""
    folder = tmp_path / "job"
    journal, _ = open_journal(folder)
    spec = JobSpec(name="llama", command=("torchrun", "train.py"))
    events = (ControllerStarted(at=1.0, epoch=1), JobDefined(at=1.0, spec=spec))
    journal.write([Entry("event", event.at, encode(event)) for event in events])
    journal.close()
    return folder


def unbroken(*arguments: str | Path) -> Result:
    variables = {key: None for key in os.environ if key.startswith("UNBROKEN")}
    return CliRunner().invoke(main, [str(one) for one in arguments], env=variables)


def test_a_file_that_is_no_journal_is_no_job(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a journal\n")
    for path in (file, Path(os.devnull)):
        done = unbroken("status", "--job-dir", path)
        assert (done.exit_code, "neither a job folder nor a journal" in done.output) == (66, True)
    for path in (file, tmp_path):
        done = unbroken("replay", path)
        assert (done.exit_code, "holds no record of a job" in done.output) == (66, True)


@pytest.mark.parametrize("content", [b"a\nb", b"\xff\xfe", b"a b\x1b[0m", b"x" * 5000])
def test_a_token_file_that_holds_something_else(job: Path, content: bytes) -> None:
    token = job / "other"
    token.write_bytes(content)
    done = unbroken("pause", "--job-dir", job, "--controller", "127.0.0.1:1", "--token-file", token)
    assert (done.exit_code, "does not hold a job's token. Nothing was done" in done.output) == (69, True)


def test_a_device_is_no_token_file(job: Path) -> None:
    with pytest.raises(ControllerUnusable, match="a device"):
        ControllerClient.of_job(job, controller="127.0.0.1:1", token_file="/dev/zero")


def test_of_an_endless_configuration_a_little_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/dev/zero cannot be read: it is a device"):
        read_toml(Path("/dev/zero"))
    with open(tmp_path / "endless.toml", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="is too long"):
        read_toml(tmp_path / "endless.toml")


@pytest.mark.parametrize(
    ("command", "where"),
    [
        ("status", "full"),
        ("status --json", "full"),
        ("watch", "full"),
        ("status", "closed"),
        ("watch", "closed"),
        ("timeline --json", "closed pipe"),
    ],
)
def test_an_answer_that_cannot_be_written(job: Path, command: str, where: str) -> None:
    shell = {"full": '"$@" >/dev/full', "closed": '"$@" >&-', "closed pipe": '"$@" | true'}[where]
    argv = [sys.executable, "-m", "supervisor.cli.main", *command.split(), "--job-dir", str(job)]
    done = subprocess.run(["sh", "-c", shell, "sh", *argv], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.returncode == (1 if where == "full" else 0)
    assert ("the answer cannot be written: No space left" in done.stderr) == (where == "full")
