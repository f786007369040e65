"""Commands given what they cannot use, or nowhere to say it: a sentence and an exit code, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from supervisor.cli.main import main
from supervisor.config import read_toml
from supervisor.controller.client import ControllerClient
from supervisor.controller.journal import Entry, open_journal
from supervisor.errors import ConfigError, ControllerUnusable
from supervisor.messages import ControllerStarted, JobDefined, JobSpec, encode


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
