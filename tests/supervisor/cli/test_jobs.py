"""`unbroken jobs` and `unbroken logs`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from supervisor.cli.jobs import outputs
from supervisor.cli.main import HELP, main
from supervisor.config import NodePlan
from supervisor.controller.journal import Entry, open_journal
from supervisor.messages import ControllerStarted, JobDefined, JobSpec, encode
from supervisor.run.lease import holder_here, take

AT = 1_767_225_600.0
SPEC = JobSpec(name="llama", command=("torchrun", "train.py"))


def job_folder(where: Path, name: str) -> Path:
    folder = where / "unbroken-jobs" / name
    folder.mkdir(parents=True)
    journal, _ = open_journal(folder)
    events = (ControllerStarted(at=AT, epoch=1), JobDefined(at=AT, spec=SPEC))
    journal.write([Entry("event", event.at, encode(event)) for event in events])
    journal.close()
    return folder


def ran_here(root: Path, job_dir: Path, node: str, attempts: dict[int, dict[int, str]]) -> None:
    """What `unbroken run` and torchrun leave on a node. `attempts`: what each rank printed in each attempt."""
    local = root / f"{job_dir.name}-0" / node
    (local / "attempts").mkdir(parents=True)
    plan = NodePlan(
        node=node,
        job_dir=str(job_dir),
        local_dir=str(local),
        spec=SPEC,
        launcher_argv=(),
        python="",
        cwd="/",
        front_pid=1,
        front_start_time=1,
    )
    (local / "node.json").write_bytes(msgspec.json.encode(plan))
    (local / "node.json").chmod(0o600)
    for number, ranks in attempts.items():
        folder = local / "attempts" / str(number)
        folder.mkdir()
        streams = []
        for rank, text in ranks.items():
            file = folder / f"rank{rank}.out"
            file.write_text(text)
            streams.append({"rank": rank, "local_rank": rank, "stream": "out", "path": str(file)})
        (folder / "streams.json").write_bytes(msgspec.json.encode(streams))


def unbroken(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    kept = {key: value for key, value in os.environ.items() if not key.startswith("UNBROKEN")}
    return subprocess.run(
        [sys.executable, "-m", "supervisor.cli.main", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=kept | {"PYTHONPATH": str(Path(__file__).parents[3]), "UNBROKEN_LOCAL_DIR": str(cwd / "local")},
        check=False,
        timeout=60,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with two jobs. The newer one printed something on this node."""
    os.utime(next(job_folder(tmp_path, "old").glob("journal.*.jsonl")), (1, 1))
    new = job_folder(tmp_path, "new")
    ran_here(tmp_path / "local", new, "n1", {1: {0: "a\nb\n", 1: "c\n"}, 2: {0: "d\ne\nf\n", 1: ""}})
    ran_here(tmp_path / "local", tmp_path / "unbroken-jobs" / "old", "n1", {1: {0: "not this\n"}})
    return tmp_path


def test_jobs_are_listed_newest_first_and_one_that_cannot_be_read_does_not_hide_the_others(place: Path) -> None:
    (place / "unbroken-jobs" / "broken" / "epochs").mkdir(parents=True)
    listed = json.loads(unbroken("jobs", "--json", cwd=place).stdout)
    assert [Path(one["job_dir"]).name for one in listed["jobs"]] == ["new", "old", "broken"]
    assert [one["state"] for one in listed["jobs"][:2]] == ["IDLE", "IDLE"]
    assert listed["jobs"][0]["controller"] is False
    shown = unbroken("jobs", "--last", "1", cwd=place)
    assert shown.returncode == 0
    assert "llama" in shown.stdout
    assert json.loads(unbroken("jobs", "--last", "1", "--json", cwd=place).stdout)["left_out"] == 2


def test_a_job_is_listed_before_its_controller_has_begun(place: Path) -> None:
    lease = take(place / "unbroken-jobs" / "begins", holder_here("n0", "", 0, 0), joins=False, say=print)
    assert lease is not None
    listed = json.loads(unbroken("jobs", "--json", cwd=place).stdout)["jobs"]
    assert [(one["name"], one["starting"]) for one in listed] == [("begins", True), ("llama", False), ("llama", False)]
    lease.give_up()
    assert len(json.loads(unbroken("jobs", "--json", cwd=place).stdout)["jobs"]) == 2


def test_without_jobs_it_says_so(tmp_path: Path) -> None:
    done = unbroken("jobs", cwd=tmp_path)
    assert done.returncode == 66
    assert str(tmp_path) in done.stderr


def test_output_is_found_by_the_job_folder(place: Path) -> None:
    found = list(outputs(place / "unbroken-jobs" / "new", place / "local"))
    assert {(one.node, one.attempt, one.rank) for one in found} == {
        (*("n1", attempt), rank) for attempt in (1, 2) for rank in (0, 1)
    }


def test_the_newest_attempt_is_shown_unless_another_is_named(place: Path) -> None:
    assert unbroken("logs", "0", cwd=place).stdout == "d\ne\nf\n"
    assert unbroken("logs", "0", "-n", "1", cwd=place).stdout == "f\n"
    assert unbroken("logs", "1", "--attempt", "1", cwd=place).stdout == "c\n"
    listed = json.loads(unbroken("logs", "--json", cwd=place).stdout)["files"]
    assert [(one["attempt"], one["rank"], one["bytes"]) for one in listed] == [(2, 0, 6), (2, 1, 0)]


def test_what_is_not_here_is_told_apart(place: Path) -> None:
    assert unbroken("logs", "1", cwd=place).returncode == 1  # it printed nothing
    assert unbroken("logs", "7", cwd=place).returncode == 66
    told = unbroken("logs", "0", "--attempt", "9", cwd=place)
    assert (told.returncode, "attempt 1, 2" in told.stderr) == (66, True)
    (place / "local" / "new-0" / "n1" / "attempts" / "2" / "rank0.out").unlink()
    assert "is gone" in unbroken("logs", "0", cwd=place).stderr


def test_each_command_has_one_place_in_the_help() -> None:
    named = [name for names in HELP.values() for name in names]
    assert sorted(named) == sorted(main.commands)


@pytest.mark.parametrize("name", sorted(set(main.commands) - {"demo", "bench", "controller"}))
def test_each_command_answers_h(name: str) -> None:
    done = CliRunner().invoke(main, [name, "-h"])
    assert done.exit_code == 0
    assert done.output.startswith(f"Usage: main {name}")
    options = done.output.partition("Options:")[2].partition("Commands:")[0]
    assert not re.search(r"^  -\S+(?: [A-Z]\S*)?\n(?!   )", options, re.MULTILINE), "an option without a word of help"
