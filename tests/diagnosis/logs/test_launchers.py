"""Reports of launchers."""

from __future__ import annotations

import pytest

from diagnosis.logs import launchers

REPORT = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-03-01_12:00:07
  host      : n2
  rank      : 9 (local_rank: 1)
  exitcode  : 1 (pid: 4711)
  error_file: /tmp/torchelastic_x/none_y/attempt_0/1/error.json
  traceback : Traceback (most recent call last):
    File "train.py", line 3, in main
      step()
  ValueError: rank: too many

------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-01_12:00:05
  host      : n1
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 4242)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4242
============================================================"""


def test_the_report_of_torchrun():
    other, root = launchers.read(REPORT.splitlines(), 100)
    assert (root.rank, root.local_rank, root.host, root.pid, root.signal, root.code) == (3, 3, "n1", 4242, 9, None)
    assert root.is_root
    assert root.at == 1772366405.0
    assert (other.rank, other.code, other.is_root, other.line) == (9, 1, False, 106)
    assert other.message.endswith("ValueError: rank: too many")
    assert other.error_file.endswith("error.json")


def test_prefixes_and_the_agents_own_line_are_the_same_worker():
    agent = "E0301 12:00:05.1 77 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) "
    agent += "local_rank: 3 (pid: 4242) of binary: /usr/bin/python"
    lines = [agent, *(f"[n1:0]: {line}" for line in REPORT.splitlines())]
    found = launchers.read(lines)
    assert [(one.rank, one.pid) for one in found] == [(3, 4242), (9, 4711)]
    assert found[0].is_root


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("srun: error: n3: task 3: Killed", (3, "n3", None, 9)),
        ("srun: error: n3: task 3: Exited with exit code 137", (3, "n3", 137, None)),
        ("srun: error: n3: task 5: Out Of Memory", (5, "n3", None, 9)),
        ("srun: error: n3: task 0: Segmentation fault (core dumped)", (0, "n3", None, 11)),
        (
            "mpirun noticed that process rank 3 with PID 77 on node n4 exited on signal 7 (Bus error).",
            (3, "n4", None, 7),
        ),
        (
            "[rank: 1] Child process with PID 9 terminated with code -6. Forcefully terminating all other processes",
            (1, "", None, 6),
        ),
        (
            "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal SIGKILL",
            (None, "", None, 9),
        ),
        (
            "[launch.py:321:sigkill_handler] ['python', 't.py', '--local_rank=7'] exits with return code = -11",
            (None, "", None, 11),
        ),
        (
            "subprocess.CalledProcessError: Command '['python', 't.py']' died with <Signals.SIGABRT: 6>.",
            (None, "", None, 6),
        ),
        (
            "/var/spool/slurmd/job77/slurm_script: line 40:  1234 Killed                  torchrun t.py",
            (None, "", None, 9),
        ),
        (
            "[0]: time: 2024-01-01_00:00:00 host: n1 rank: 3 (local_rank: 3) exitcode: -11 (pid: 77) error_file: <N/A>",
            (3, "n1", None, 11),
        ),
        ("Exited with exit code 139.", (None, "", 139, None)),
        ("Process finished with exit code -1", (None, "", None, 1)),
        ("command terminated with exit code 137", (None, "", 137, None)),
        ("    Exit_status=271", (None, "", 271, None)),
        ("train.service: Main process exited, code=killed, status=9/KILL", (None, "", 9, None)),
    ],
)
def test_lines(line, expected):
    (one,) = launchers.read([line])
    assert (one.rank, one.host, one.code, one.signal) == expected


def test_ranges_of_tasks_and_blocks():
    assert [one.rank for one in launchers.read(["srun: error: n[1-2]: tasks 0-2,5: Exited with exit code 1"])] == [
        0,
        1,
        2,
        5,
    ]
    hydra = ["=   RANK 3 PID 123 RUNNING AT n1", "=   KILLED BY SIGNAL: 9 (Killed)"]
    assert [(one.rank, one.signal, one.pid) for one in launchers.read(hydra)] == [(3, 9, 123)]
    orte = ["  Process name: [[12345,1],3]", "  Exit code:    1"]
    assert [(one.rank, one.code) for one in launchers.read(orte)] == [(3, 1)]


@pytest.mark.parametrize(
    "line",
    [
        "time      : 12 s",
        "rank : 3",
        "the exit code: 0",
        "Sending process 1234 closing signal SIGTERM",
        "Process 73583 exits successfully.",
        "Process finished with exit code 0",
        "[launch.py] ['python', '--local_rank=7'] exits with return code = 0",
    ],
)
def test_what_is_no_report(line):
    assert launchers.read([line, "x" * 100_000]) == ()


def test_the_same_rank_of_two_attempts_is_told_twice():
    second = REPORT.replace("4242", "5242").replace("4711", "5711")
    assert len(launchers.read([*REPORT.splitlines(), *second.splitlines()])) == 4
