"""The command line against a real controller process, and against what it leaves behind."""

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from diagnosis.incident import HangReport
from diagnosis.signals import ExitRecord, NodeEvidence, RankOutput
from supervisor.agent.link import Link, address_reader, token_reader
from supervisor.cli.main import main
from supervisor.cli.render import seconds
from supervisor.controller.journal import Entry, open_journal
from supervisor.controller.main import read_controller_file
from supervisor.controller.report import plain, rfc3339
from supervisor.messages import (
    PROTOCOL,
    AnyEvent,
    ControllerStarted,
    EvidenceArrived,
    HangCleared,
    HangSuspected,
    Heartbeat,
    Hello,
    JobDefined,
    JobSpec,
    LauncherReady,
    NodeJoined,
    Progressed,
    RankEnded,
    StoreOffer,
    WorkersStarted,
    encode,
)
from supervisor.run.lease import holder_here, newest_journal, take

AT = 1_767_225_600.0
SPEC = JobSpec(name="llama", command=("torchrun", "train.py"))


def unbroken(*arguments: str, cwd: Path, code: int = 0) -> str:
    """What it prints, on stdout and stderr."""
    variables = {key: None for key in os.environ if key.startswith("UNBROKEN")}
    before = Path.cwd()
    os.chdir(cwd)
    try:
        done = CliRunner().invoke(main, list(arguments), env=variables)
    finally:
        os.chdir(before)
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def process(*arguments: str, cwd: Path) -> str:
    """The same as a process of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UNBROKEN")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    argv = [sys.executable, "-m", "supervisor.cli.main", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=cwd, env=environment, check=False).stdout


def read(*arguments: str, cwd: Path) -> dict[str, Any]:
    answer = json.loads(unbroken(*arguments, "--json", cwd=cwd))
    assert answer["schema"] == 1
    assert isinstance(answer, dict)
    return answer


def a_story() -> list[AnyEvent]:
    """One node, two ranks, one killed."""
    end = ExitRecord(rank=1, local_rank=1, pid=12, code=None, signal=9, ended_at=AT + 9)
    output = RankOutput(rank=1, tail=("\x1b[31mstep 30/100", "[bold]not markup[/bold]"))
    report = HangReport(kind="silent", ranks=(0,), quiet_s=4.0, limit_s=3.0, phase="steady", why="rank 0 is quiet")
    offer = StoreOffer(host="127.0.0.1", port=29500, local_world_size=2)
    return [
        ControllerStarted(at=AT, epoch=1),
        JobDefined(at=AT, spec=SPEC),
        NodeJoined(at=AT + 0.1, node="n0", host="h0", address="127.0.0.1"),
        LauncherReady(at=AT + 1, node="n0", attempt=1, offer=offer),
        WorkersStarted(at=AT + 2, node="n0", attempt=1, ranks=(0, 1)),
        Progressed(at=AT + 3, attempt=1, step=10, last_step=100, first=True),
        HangSuspected(at=AT + 7, attempt=1, report=report),
        HangCleared(at=AT + 8, attempt=1, quiet_s=5.0),
        Progressed(at=AT + 8.5, attempt=1, step=30, last_step=100),
        EvidenceArrived(at=AT + 9.1, evidence=NodeEvidence(node="n0", attempt=1, exits=(end,), outputs=(output,))),
        RankEnded(at=AT + 9.1, node="n0", attempt=1, exit=end, step=30, last_step=100),
    ]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A working folder with one job whose controller is gone."""
    folder = tmp_path / "unbroken-jobs" / "llama"
    journal, _ = open_journal(folder)
    journal.write([Entry("event", event.at, encode(event)) for event in a_story()])
    journal.close()
    return tmp_path


@pytest.fixture
def live(job: Path) -> Iterator[Path]:
    """The same with a controller."""
    folder = job / "unbroken-jobs" / "llama"
    argv = [sys.executable, "-m", "supervisor.controller.main", "--job-dir", str(folder)]
    with open(job / "log", "wb") as log:
        process = subprocess.Popen(argv, stderr=log)
    deadline = time.monotonic() + 60
    while (found := read_controller_file(folder)) is None or found.pid != process.pid:
        assert process.poll() is None, (job / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield job
    process.terminate()
    process.wait(60)


def test_a_dead_job_is_read_from_its_journal(job: Path) -> None:
    status = read("status", cwd=job)
    assert (status["name"], status["attempt"], status["step"], status["controller"]) == ("llama", 2, None, None)
    assert status["nodes"][0]["node"] == "n0"
    assert status["incidents"][0]["id"] == "i-1"
    (incident,) = read("incidents", cwd=job)["incidents"]
    assert incident["verdict"]["culprits"][0] == {"node": "n0", "rank": 1, "gpu": ""}
    assert incident["verdict"]["kind"] in ("cause", "symptom")
    assert incident["opened_at"].endswith("Z")
    assert read("why", "1", cwd=job)["incident"] == incident
    rows = read("timeline", cwd=job)["rows"]
    assert [row["seq"] for row in rows] == sorted(row["seq"] for row in rows)
    assert rows[0]["at"] == "2026-01-01T00:00:00.000Z"


def test_what_people_see(job: Path) -> None:
    status = unbroken("status", cwd=job)
    assert "job llama: " in status
    assert "no controller answers" in status
    assert "n0\t" in status, "tab-separated in a pipe"
    assert "worker_crash" in unbroken("incidents", cwd=job)
    why = unbroken("why", "last", cwd=job)
    assert "rank 1" in why
    assert "evidence" in why
    assert "\x1b" not in why
    timeline = unbroken("timeline", cwd=job)
    assert "rank 1 on n0 was killed by signal 9" in timeline
    assert "hang suspected: rank 0 is quiet" in timeline
    assert "evidence of n0" not in timeline
    assert "evidence of n0" in unbroken("timeline", "--all", cwd=job)


def test_a_copied_folder_and_a_single_file_are_as_good(job: Path, tmp_path: Path) -> None:
    shutil.copytree(job / "unbroken-jobs" / "llama", tmp_path / "copy")
    (tmp_path / "elsewhere").mkdir()
    assert read("status", "--job-dir", str(tmp_path / "copy"), cwd=tmp_path / "elsewhere")["name"] == "llama"
    file = tmp_path / "copy" / "journal.1.jsonl"
    assert read("status", "--job-dir", str(file), cwd=tmp_path / "elsewhere")["name"] == "llama"
    assert read("status", "--job-dir", "llama", cwd=job)["name"] == "llama"


def test_a_live_controller_answers_and_takes_orders(live: Path) -> None:
    status = read("status", cwd=live)
    assert status["controller"]["epoch"] == 2
    assert status["controller"]["journal"] == "ok"
    assert "would send `pause`" in unbroken("pause", "--dry-run", cwd=live)
    assert not read("status", cwd=live)["paused"]
    assert read("pause", "--reason", "maintenance", cwd=live)["ok"]
    assert read("status", cwd=live)["paused"]
    assert "maintenance" in unbroken("timeline", cwd=live)
    unbroken("resume", cwd=live)
    unbroken("mode", "observe", cwd=live)
    unbroken("cordon", "n7", "-m", "smells", cwd=live, code=3)  # the job has never had it
    status = read("status", cwd=live)
    assert (status["paused"], status["mode"]) == (False, "observe")
    assert status["cordons"][0]["node"] == "n7"
    assert status["cordons"][0]["reason"] == "smells"
    since = read("timeline", cwd=live)["rows"][-1]["seq"]
    unbroken("uncordon", "n7", cwd=live)
    newer = read("timeline", "--since", str(since), cwd=live)["rows"]
    assert min(row["seq"] for row in newer) > since
    assert "uncordon" in newer[0]["text"]


def test_what_hurts_is_asked_first(live: Path) -> None:
    assert "--yes" in unbroken("stop", cwd=live, code=2)
    assert "--yes" not in unbroken("swap", "n9", "--now", cwd=live, code=1), "what is refused needs no answer"
    said = unbroken("stop", "--yes", "-m", "enough", cwd=live)
    assert f"the job is {live / 'unbroken-jobs' / 'llama'}, the newest here" in said, "nobody named it"
    assert "enough" in unbroken("timeline", cwd=live)


def test_nobody_forges_a_line_of_the_timeline_with_a_reason(live: Path) -> None:
    unbroken("pause", "-m", "maintenance\n2031-01-01 00:00:00.000  root@vm: stop", cwd=live)
    assert "\n2031-01-01" not in unbroken("timeline", cwd=live)


def test_a_controller_that_hangs_is_told_nothing_and_the_operator_is_told_what_to_do(live: Path) -> None:
    found = read_controller_file(live / "unbroken-jobs" / "llama")
    assert found is not None
    began = time.monotonic()
    os.kill(found.pid, signal.SIGSTOP)
    try:
        said = unbroken("stop", "--yes", cwd=live, code=69)
        would = unbroken("stop", "--dry-run", cwd=live)
    finally:
        os.kill(found.pid, signal.SIGCONT)
    assert time.monotonic() - began < 40
    assert f"hangs: it is process {found.pid} on " in said
    assert "Nothing was done" in said
    assert "What follows is read from the journal" in would
    assert "the job would end" in would
    assert read("status", cwd=live)["outcome"] is None


def test_what_is_refused_is_told_by_the_exit_code_too(live: Path) -> None:
    said = unbroken("approve", "i-1", cwd=live, code=1)
    assert "nothing waits for approval" in said
    assert "Nothing was done" in said
    assert "refused: nothing waits for approval" in unbroken("approve", "i-1", "--dry-run", cwd=live, code=1)


def test_a_dry_run_says_what_would_happen_and_leaves_no_trace(live: Path) -> None:
    unbroken("restart", "--yes", cwd=live)
    since = read("timeline", cwd=live)["rows"][-1]["seq"]
    would = read("stop", "--dry-run", cwd=live)
    assert would["interrupts"]
    assert "the job would end: stopped by an operator (exit code 143)" in would["would"]
    assert read("timeline", "--since", str(since), cwd=live)["rows"] == []


def test_a_cordon_is_asked_about_only_where_it_interrupts(live: Path) -> None:
    unbroken("restart", "--yes", cwd=live)  # an attempt is being formed on n0
    assert "--yes" in unbroken("cordon", "n0", cwd=live, code=2)
    assert read("status", cwd=live)["cordons"] == []
    unbroken("cordon", "n7", "--dry-run", cwd=live, code=3)
    unbroken("cordon", "n7", cwd=live, code=3)
    unbroken("cordon", "n0", "--yes", cwd=live)
    assert {cordon["node"] for cordon in read("status", cwd=live)["cordons"]} == {"n0", "n7"}


def test_without_a_model_asking_says_so(live: Path) -> None:
    assert "model" in unbroken("why", "last", "--ask", cwd=live, code=1)
    assert "known incidents: i-1" in unbroken("why", "i-9", "--ask", cwd=live, code=66)


def test_a_job_is_found_by_its_id_in_slurm(job: Path, tmp_path: Path) -> None:
    jobs = job / "unbroken-jobs"
    (jobs / "llama").rename(jobs / "4711")
    assert read("status", "--job", "4711", cwd=job)["name"] == "llama"
    assert "not the id" in unbroken("status", "--job", "../4711", cwd=job, code=66)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert "4711" in unbroken("status", "--job", "4711", cwd=elsewhere, code=66), (
        "Slurm does not know it, or is not there"
    )
    assert "both name a job" in unbroken("pause", "--job", "4711", "--job-dir", "4711", cwd=job, code=2)


def test_watch_ends_with_the_job(live: Path) -> None:
    folder = live / "unbroken-jobs" / "llama"

    async def agent_that_obeys() -> None:
        hello = Hello(protocol=PROTOCOL, node="n0", host="h0", address="", spec=SPEC)
        link = Link(address_reader(folder), token_reader(folder), hello)
        told: list[object] = []
        task = asyncio.create_task(link.run(told.append))
        watching = asyncio.create_task(asyncio.to_thread(process, "watch", "--every", "0.2", cwd=live))
        stopping = asyncio.create_task(asyncio.to_thread(process, "stop", "--yes", cwd=live))
        for seq in itertools.count(1):
            done = any(getattr(message, "outcome", None) for message in told)
            link.post(Heartbeat(node="n0", incarnation=1, seq=seq, attempt=1, done=done))
            await asyncio.sleep(0.02)
            if watching.done():
                break
        task.cancel()
        await stopping
        assert "STOPPED" in (await watching).splitlines()[-1]

    asyncio.run(asyncio.wait_for(agent_that_obeys(), 100))


def test_a_job_that_is_starting_is_told_so_before_there_is_a_journal(job: Path) -> None:
    lease = take(job / "unbroken-jobs" / "new", holder_here("n0", "", 0), joins=False, say=print)
    assert lease is not None
    for named in ((), ("--job-dir", "new")):
        told = unbroken("status", *named, cwd=job, code=66)
        assert "job new is starting" in told
        assert f"process {os.getpid()}" in told
    lease.give_up()
    assert read("status", cwd=job)["name"] == "llama", "it has ended before it began: the newest job is another"


def test_a_second_life_is_starting_until_its_own_journal_begins(job: Path) -> None:
    folder = job / "unbroken-jobs" / "llama"
    lease = take(folder, holder_here("n0", "", 0, newest_journal(folder)), joins=False, say=print)
    assert lease is not None
    for command in ("status", "stop"):
        assert "job llama is starting" in unbroken(command, cwd=job, code=66)
    listed = read("jobs", cwd=job)["jobs"]
    assert [(one["name"], one["starting"]) for one in listed] == [("llama", True)]
    journal, _ = open_journal(folder)
    journal.write([Entry("event", AT, encode(ControllerStarted(at=AT, epoch=journal.epoch)))])
    assert read("status", cwd=job)["name"] == "llama"
    journal.close()
    lease.give_up()


def test_no_life_starts_where_a_standing_controller_has_the_journal(job: Path) -> None:
    lease = take(job / "unbroken-jobs" / "llama", holder_here("n0", "", 0), joins=False, say=print)
    assert lease is not None
    assert read("status", cwd=job)["name"] == "llama"
    lease.give_up()


@pytest.mark.parametrize("command", ["status", "jobs", "why last", "stop", "check", "qualify", "nodes", "run true"])
def test_a_command_in_a_folder_that_was_removed_says_so(tmp_path: Path, command: str) -> None:
    gone, before = tmp_path / "gone", Path.cwd()
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        done = CliRunner().invoke(main, command.split())
    finally:
        os.chdir(before)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 78
    assert "was removed" in done.output


def test_errors_say_what_to_do(tmp_path: Path, job: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "--job-dir" in unbroken("status", cwd=empty, code=66)
    assert "there is no job folder" in unbroken("status", "--job-dir", "nowhere", cwd=empty, code=66)
    assert "cannot be read: " in unbroken("status", "--job-dir", "n" * 300, cwd=empty, code=66)
    assert "is not a job folder" in unbroken("status", "--job-dir", str(empty), cwd=job, code=66)
    assert "known incidents: i-1" in unbroken("why", "i-9", cwd=job, code=66)
    assert "Nothing was done" in unbroken("pause", cwd=job, code=69)
    (empty / "unbroken.toml").write_text("[run]\nspare = 1\n")
    assert "did you mean run.spares" in unbroken("config", cwd=empty, code=78)
    assert "did you mean run.spares" in unbroken("run", "--", "true", cwd=empty, code=78)


def test_an_order_for_a_job_that_has_ended_is_told_so(live: Path) -> None:
    folder = live / "unbroken-jobs" / "llama"
    unbroken("stop", "--yes", "-m", "enough", cwd=live)
    found = read_controller_file(folder)
    assert found is not None
    os.kill(found.pid, signal.SIGKILL)
    (folder / "controller.json").write_text('{"address": "http://127.0.0.1:9"}')
    said = unbroken("pause", cwd=live, code=1)
    assert "the job has ended already: stopped by an operator: enough. Nothing was done." in said


def test_a_token_that_cannot_be_read_is_told_apart(live: Path) -> None:
    token = live / "unbroken-jobs" / "llama" / "token"
    token.write_text("")
    assert "is empty. Nothing was done" in unbroken("pause", cwd=live, code=69)
    token.unlink()
    assert "token cannot be read: " in unbroken("stop", "--yes", cwd=live, code=69)
    said = unbroken("status", cwd=live)
    assert "the journal is read instead" in said
    assert "job llama: " in said


def test_replay_tells_what_is_decided_differently_now(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path / "old")
    first = journal.write([Entry("event", event.at, encode(event)) for event in a_story()[:3]])
    lie = {"of": first, "actions": [{"type": "note", "text": "something else"}]}
    journal.write([Entry("decided", AT, encode(lie))])
    assert "3 events, 1 decided differently" in unbroken("replay", "old", cwd=tmp_path, code=1)


def test_config_tells_where_values_come_from(tmp_path: Path) -> None:
    (tmp_path / "unbroken.toml").write_text('[run]\nmode = "observe"\n')
    rows = {row["key"]: row for row in read("config", cwd=tmp_path)["settings"]}
    assert rows["run.mode"]["value"] == "observe"
    assert rows["run.mode"]["from"].endswith("unbroken.toml")
    assert rows["run.spares"]["from"] == "default"
    assert "run.mode\tobserve" in unbroken("config", cwd=tmp_path)


def test_run_loads_nothing_that_it_does_not_need() -> None:
    heavy = {"aiohttp", "asyncio", "rich", "torch", "diagnosis.flight"}
    code = f"import sys, supervisor.cli.main; print(*sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


def test_times_and_durations() -> None:
    assert rfc3339(AT) == "2026-01-01T00:00:00.000Z"
    assert [seconds(value) for value in (0.184, 12.34, 250, 10920, None)] == [
        "0.18 s",
        "12.3 s",
        "4 min 10 s",
        "3 h 02 min",
        "",
    ]
    assert plain(StoreOffer(host="h", port=1, local_world_size=2)) == {
        "host": "h",
        "port": 1,
        "local_world_size": 2,
        "snapshots": [],
    }


def test_an_operator_corrects_a_verdict_after_the_job_and_again(job: Path) -> None:
    said = unbroken("why", "last", "--correct", "gpu_hung", cwd=job, code=2)
    assert "gpu_hang" in said
    assert unbroken("why", "last", "--note", "x", cwd=job, code=2)
    unbroken("why", "i-1", "--correct", "nvlink_error", "--note", "a cable\nwas replaced", cwd=job)
    why = unbroken("why", "1", "--correct", "gpu_hang", cwd=job)
    assert "gpu_hang" in why
    assert "a cable was replaced" in why
    (incident,) = read("incidents", cwd=job)["incidents"]
    assert [one["failure_class"] for one in incident["corrections"]] == ["nvlink_error", "gpu_hang"]
    assert all(one["by"] and one["at"].endswith("Z") for one in incident["corrections"])
    assert "gpu_hang (corrected)" in unbroken("incidents", cwd=job)
    assert "known incidents: i-1" in unbroken("why", "i-9", "--correct", "gpu_hang", cwd=job, code=66)


def test_a_correction_is_of_one_job_and_damage_costs_only_its_line(job: Path) -> None:
    unbroken("why", "last", "--correct", "gpu_hang", cwd=job)
    file = job / "unbroken-jobs" / "llama" / "corrections.jsonl"
    line = file.read_bytes()
    file.write_bytes(line.replace(b"llama-", b"other-").replace(b"gpu_hang", b"gpu_oom") + b'{"half' + line + b"\xff\n")
    (incident,) = read("incidents", cwd=job)["incidents"]
    assert [one["failure_class"] for one in incident["corrections"]] == ["gpu_hang"]


def test_a_correction_of_a_job_that_runs_is_in_its_journal(live: Path) -> None:
    unbroken("why", "last", "--correct", "nvlink_error", "--note", "a cable", cwd=live)
    assert not (live / "unbroken-jobs" / "llama" / "corrections.jsonl").exists()
    assert "was nvlink_error (a cable)" in unbroken("timeline", cwd=live)
    assert "a cable" in unbroken("why", "last", cwd=live)
