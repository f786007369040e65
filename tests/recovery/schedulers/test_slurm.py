"""What commands that misbehave lead to. (What real ones do: tests/slurm.)"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recovery.schedulers import Slurm
from recovery.scheduling import Answer
from tests.conftest import runs, until
from tests.tables import table

CASES = table(__file__)

Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    def make(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin", "HERE": str(tmp_path)}, command_s=30.0)


def drain(slurm: Slurm, reason: str = "unbroken: why") -> Answer:
    return asyncio.run(slurm.drain("n1", reason))


def test_no_slurm_here(tmp_path: Path) -> None:
    answer = drain(Slurm({"PATH": str(tmp_path)}))
    assert (answer.outcome, answer.text) == ("unsupported", "sinfo cannot be started (No such file or directory)")


def test_a_command_that_hangs_is_killed_with_its_children(program: Program, slurm: Slurm, tmp_path: Path) -> None:
    program("sinfo", 'sleep 1000 & echo $! > "$HERE/child"; wait')
    began = time.monotonic()
    answer = drain(Slurm(slurm._environment, command_s=2.0))
    assert (answer.outcome, answer.text) == ("unavailable", "sinfo gave no answer within 2 s")
    assert time.monotonic() - began < 30
    child = int((tmp_path / "child").read_text())
    until(lambda: not runs(child), 60, "the end of the child")


def test_endless_output_is_cut(program: Program, slurm: Slurm) -> None:
    program("sinfo", "head -c 100000000 /dev/zero | tr '\\0' x; exit 1")
    answer = drain(slurm)
    assert answer.outcome == "failed"
    assert len(answer.text) <= 300


@pytest.mark.parametrize(
    ("says", "outcome"),
    CASES["words_of_slurm"],
)
def test_words_of_slurm(program: Program, slurm: Slurm, says: str, outcome: str) -> None:
    program("sinfo", "echo 'idle|none'")
    program("scontrol", f"echo '{says}' >&2; exit 1")
    answer = drain(slurm)
    assert answer.outcome == outcome
    assert answer.text == (says or "it ended with code 1")


@pytest.mark.parametrize(
    ("stands", "outcome"),
    CASES["what_stands_decides"],
)
def test_what_stands_decides(program: Program, slurm: Slurm, stands: str, outcome: str) -> None:
    program("sinfo", f"printf '%s\\n' '{stands}'")
    program("scontrol", "exit 0")
    assert drain(slurm).outcome == outcome


def test_a_users_own_formats_do_not_reach_the_commands(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SINFO_FORMAT", "SQUEUE_FORMAT2", "SINFO_PARTITION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program("sinfo", 'if env | grep -q "^S[A-Z]*_FORMAT\\|^SINFO"; then exit 1; fi; echo "idle|none"')
    program("scontrol", "exit 0")
    assert drain(Slurm()).outcome == "done"


@pytest.fixture
def job(program: Program, tmp_path: Path) -> Slurm:
    """Job 12 on n1 to n3 of a partition of five nodes; its user excluded node7. What `scontrol` is told is kept."""
    program("squeue", "echo '3|main|(null)|node7||n[1-3]'")
    program("sinfo", "for n in 1 2 3 4 5; do echo \"n$n|mixed|gpu:h100:8(S:0-1)\"; done; echo 'node7|idle|gpu:h100:8'")
    program(
        "scontrol",
        'case "$2" in hostnames) case "$3" in n*3*) echo n1 n2 n3;; *) echo "$3";; esac;; '
        'job) echo "JobId=12 $SHOWN";; config) echo "SlurmdTimeout           = 300 sec";; '
        '*) echo "$@" >> "$HERE/told";; esac',
    )
    return Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin", "HERE": str(tmp_path)})


def test_a_requeue_excludes_what_the_user_did_and_what_is_gone(job: Slurm, tmp_path: Path) -> None:
    answer = asyncio.run(job.requeue("12", ("n1",), ("n2",)))
    allows = "(`scontrol update JobId=12 ExcNodeList=` allows them)"
    assert (answer.outcome, answer.text) == ("done", f"job 12 is requeued without n1, n2 {allows}")
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ["requeue 12", "update JobId=12 StartTime=now+15 ExcNodeList=node7,n1,n2"]


def test_a_job_that_needs_the_lost_nodes_is_requeued_with_them(job: Slurm, tmp_path: Path) -> None:
    answer = asyncio.run(job.requeue("12", ("n1",), ("n2", "n3")))
    assert answer.outcome == "done"
    assert "n2, n3 may be given to it again, for it needs 3 nodes and partition main has too few others" in answer.text
    assert "ExcNodeList=node7,n1\n" in (tmp_path / "told").read_text()


@pytest.mark.usefixtures("job")
def test_a_lost_node_is_given_up_before_a_job_with_gpus_is_requeued(tmp_path: Path) -> None:
    """Else Slurm starts it without them."""
    slurm = Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin", "HERE": str(tmp_path), "SHOWN": "TresPerNode=gres:gpu:8"})
    answer = asyncio.run(slurm.requeue("12", (), ("n3",)))
    assert (answer.outcome, "has not given up n3 yet" in answer.text) == ("unavailable", True)
    assert not (tmp_path / "told").exists()
    assert asyncio.run(slurm.requeue("12", (), ("n4",))).outcome == "done", "it is none of the job's nodes any more"
    slurm._waits_since["12"] -= 361
    assert asyncio.run(slurm.requeue("12", (), ("n3",))).outcome == "done", "it answers Slurm, though not us"


def test_a_job_that_cannot_start_without_what_is_bad_is_left_alone(job: Slurm, tmp_path: Path) -> None:
    answer = asyncio.run(job.requeue("12", ("n1", "n2", "n3"), ()))
    assert (answer.outcome, answer.text) == (
        "unsupported",
        "job 12 cannot start again: it needs 3 nodes, and partition main has 2 besides n1, n2, n3",
    )
    assert not (tmp_path / "told").exists()


def test_how_many_nodes_a_job_needs_is_what_it_was_given(program: Program, job: Slurm, tmp_path: Path) -> None:
    """After a loss squeue tells of those that are left."""
    program("squeue", "echo '2|main|(null)|node7||n[1-3]'")
    given = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "5"}
    slurm = Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin", "HERE": str(tmp_path), **given})
    assert "too few others" in asyncio.run(slurm.requeue("12", (), ("n3",))).text
    assert "requeued without n3" in asyncio.run(job.requeue("12", (), ("n3",))).text


def test_requeued_but_not_changed_is_said(program: Program, job: Slurm) -> None:
    program("scontrol", 'case "$1 $2" in requeue*) ;; show*) echo node7;; *) echo "$@" >&2; sleep 0.01; exit 1;; esac')
    answer = asyncio.run(job.requeue("12", ("n1", "n2")))
    assert answer.outcome == "done"
    change = "update JobId=12 StartTime=now+15 ExcNodeList=node7,n1,n2"
    assert answer.text.startswith(f"job 12 is requeued, but not changed: {change} {change}")


def test_what_follows_a_requeue_is_done_though_we_are_stopped(program: Program, job: Slurm, tmp_path: Path) -> None:
    program(
        "scontrol",
        'if [ "$1" = show ]; then echo node7; elif [ "$1" = requeue ]; then : > "$HERE/requeued"; sleep 0.5; '
        'else echo "$@" > "$HERE/$1"; fi',
    )

    async def give_up() -> None:
        asking = asyncio.ensure_future(job.requeue("12", ("n1",)))
        while not (tmp_path / "requeued").exists():
            assert not asking.done(), asking.result()
            await asyncio.sleep(0.01)
        asking.cancel()

    asyncio.run(give_up())
    update = tmp_path / "update"
    until(lambda: update.exists() and update.read_text(), 60, "the update")
    assert "ExcNodeList=node7,n1" in (tmp_path / "update").read_text()


@pytest.mark.parametrize(("says", "outcome"), [("", "done"), ("scancel: error: Invalid user id", "denied")])
def test_a_job_is_cancelled(program: Program, job: Slurm, says: str, outcome: str) -> None:
    program("scancel", f"[ -z '{says}' ] || {{ echo '{says}' >&2; exit 1; }}")
    assert asyncio.run(job.cancel("12")).outcome == outcome
    assert asyncio.run(job.cancel("1,2")).outcome == "failed"


@pytest.mark.parametrize(
    ("told", "again"),
    [
        ("JobState=COMPLETING Reason=None Requeue=1 Restarts=2 BatchFlag=1", True),
        ("JobState=PENDING Reason=BeginTime Requeue=1 Restarts=2 BatchFlag=1", True),
        ("JobState=COMPLETING Reason=None Requeue=1 Restarts=1 BatchFlag=1", False),
        ("JobState=CANCELLED Reason=None Requeue=1 Restarts=2 BatchFlag=1", False),
        ("", False),
    ],
)
def test_whether_a_job_starts_again(program: Program, slurm: Slurm, told: str, again: bool) -> None:
    program("scontrol", f"echo 'JobId=12 JobName=x {told} ExitCode=0:0'")
    assert asyncio.run(slurm.starts_again("12", 1)) is again
    assert not asyncio.run(slurm.starts_again("1 2", 1))


def test_a_scheduler_that_does_not_answer_may_start_the_job_again(program: Program, slurm: Slurm) -> None:
    """The busiest moment of slurmctld is a preemption of many jobs."""
    program(
        "scontrol", "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    )
    assert asyncio.run(slurm.starts_again("12", 1)) is None
    program("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert asyncio.run(slurm.starts_again("12", 1)) is False


def test_a_task_of_an_array_does_not_start_again_because_another_does(program: Program, slurm: Slurm) -> None:
    others = "echo 'JobId=13 ArrayJobId=12 JobState=PENDING Requeue=1 Restarts=2 X=1'"
    program("scontrol", f"{others}; echo 'JobId=12 ArrayJobId=12 JobState=CANCELLED Requeue=1 Restarts=1 X=1'")
    assert not asyncio.run(slurm.starts_again("12", 1))
    assert asyncio.run(slurm.starts_again("13", 1))


def test_a_job_is_named_by_its_number(slurm: Slurm) -> None:
    for name in ("", "1,2", "-a", "ALL", "1;2"):
        assert asyncio.run(slurm.requeue(name, ())).outcome == "failed"
    assert asyncio.run(slurm.requeue("1", ("node[1-3]",))).outcome == "failed"


OWN = {"SLURM_JOB_ID": "79", "SLURM_STEP_ID": "0", "SLURM_TASK_PID": str(os.getppid())}
SQUEUE = """case "$*" in *%k*) cat "$HERE/comment" ;; *) echo 'node[1-2]' ;; esac"""
SCONTROL = """case "$*" in "show hostnames"*) printf 'node1\\nnode2\\n' ;; *) echo "$*" >> "$HERE/done" ;; esac"""


def _of_job(slurm: Slurm, **more: str) -> Slurm:
    return Slurm({**slurm._environment, **OWN, **more}, command_s=30.0)


def test_the_step_is_ended_only_where_slurm_still_counts_on_the_node(
    program: Program, slurm: Slurm, tmp_path: Path
) -> None:
    program("squeue", SQUEUE)
    program("scontrol", SCONTROL)
    program("scancel", 'echo "$*" >> "$HERE/done"')
    ours = _of_job(slurm)
    for job, nodes in (("79", ("node9",)), ("80", ("node2",))):
        assert asyncio.run(ours.end_step(job, nodes)).outcome == "already"
    within = asyncio.run(_of_job(slurm, SLURM_TASK_PID="1").end_step("79", ("node2",)))
    assert (within.outcome, "scancel 79.0" in within.text) == ("unsupported", True), "something may come after us"
    assert not (tmp_path / "done").exists()
    assert asyncio.run(ours.end_step("79", ("node2",))).outcome == "done"
    assert (tmp_path / "done").read_text() == "79.0\n"


def test_an_array_task_means_itself_alone(program: Program, slurm: Slurm, tmp_path: Path) -> None:
    """The job id of an array's last task is that of the whole array."""
    program("squeue", SQUEUE)
    program("scontrol", SCONTROL)
    program("scancel", 'echo "$*" >> "$HERE/done"')
    (tmp_path / "comment").write_text("(null)\n")
    task = _of_job(slurm, SLURM_ARRAY_JOB_ID="79", SLURM_ARRAY_TASK_ID="4")
    assert asyncio.run(task.cancel("79")).outcome == "done"
    assert asyncio.run(task.requeue("79", ())).outcome == "done"
    assert asyncio.run(task.comment("79", "unbroken: i-1")).outcome == "done"
    said = (tmp_path / "done").read_text().splitlines()
    assert [line.split()[:2] for line in said] == [
        ["79_4"],
        ["requeue", "79_4"],
        ["update", "JobId=79_4"],
        ["update", "JobId=79_4"],
    ]


@pytest.mark.parametrize(
    ("standing", "outcome"),
    [("(null)", "done"), ("", "done"), ("unbroken: i-1: oom", "done"), ("project apollo", "foreign")],
)
def test_a_comment_of_the_user_stands(
    program: Program, slurm: Slurm, tmp_path: Path, standing: str, outcome: str
) -> None:
    program("squeue", SQUEUE)
    program("scontrol", SCONTROL)
    (tmp_path / "comment").write_text(standing + "\n")
    answer = asyncio.run(_of_job(slurm).comment("79", 'unbroken: i-2: a "b"\n\x1b[31m' + "x" * 1000))
    assert answer.outcome == outcome
    if outcome == "done":
        said = (tmp_path / "done").read_text()
        assert said.startswith("update JobId=79 Comment=unbroken: i-2: a 'b' ")
        assert len(said) < 250
    else:
        assert not (tmp_path / "done").exists()
