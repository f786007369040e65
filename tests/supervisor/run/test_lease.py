"""The lease of a job: who may take it, and when."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from supervisor.errors import JobRunsAlready
from supervisor.files import Here, start_time
from supervisor.run import lease
from supervisor.run.lease import Holder, Lease, holder_here, take

ME = holder_here("n1", "", 0)
ELSEWHERE = msgspec.structs.replace(ME, host="other", boot_id="b", pid_namespace="pid:[1]")


class Clock:
    """Time that passes by waiting only; `then` is called at each wait."""

    def __init__(self, then: Callable[[float], None] = lambda _: None) -> None:
        self.time = 0.0
        self.then = then

    def pause(self, seconds: float) -> None:
        self.time += seconds
        self.then(self.time)


def taken(job: Path, mine: Holder = ME, clock: Clock | None = None, joins: bool = False) -> Lease | None:
    clock = clock or Clock()
    return take(job, mine, joins=joins, say=lambda _: None, pause=clock.pause, now=lambda: clock.time)


def hold(job: Path, holder: Holder, number: int = 1) -> Path:
    path = lease.lease_path(job, number)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lease.encode(holder))
    return path


def test_a_life_that_is_over_is_followed_at_once(tmp_path: Path) -> None:
    clock = Clock()
    first = taken(tmp_path)
    assert first is not None
    first.give_up()
    second = taken(tmp_path, clock=clock)
    assert second is not None
    assert (first.number, second.number, clock.time) == (1, 2, 0.0)


def test_a_life_elsewhere_that_beats_is_not_taken(tmp_path: Path) -> None:
    path = hold(tmp_path, ELSEWHERE)
    clock = Clock(lambda time: path.write_bytes(lease.encode(msgspec.structs.replace(ELSEWHERE, beat=int(time / 2)))))
    with pytest.raises(JobRunsAlready, match="other, node n1"):
        taken(tmp_path, clock=clock)
    assert clock.time <= 3.0
    clock.time = 0.0
    assert taken(tmp_path, msgspec.structs.replace(ME, node="n2"), clock, joins=True) is None
    with pytest.raises(JobRunsAlready, match="--node-name"):
        taken(tmp_path, ME, clock, joins=True)


def test_on_this_host_the_process_tells_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        holder = msgspec.structs.replace(ME, pid=process.pid, start_time=start_time(process.pid) or 0)
        hold(tmp_path, holder)
        clock = Clock()
        with pytest.raises(JobRunsAlready):
            taken(tmp_path, clock=clock)
    assert taken(tmp_path, clock=clock) is not None
    assert clock.time == 0.0


def test_a_process_of_another_namespace_is_not_looked_for(tmp_path: Path) -> None:
    """Its id may be that of anybody here, or of nobody."""
    nobody = msgspec.structs.replace(ME, pid=1 << 22, pid_namespace="pid:[1]")
    assert lease.lease_state(nobody, ME, Here.find(), lambda _: None) == "unknown"
    path = hold(tmp_path, nobody)
    clock = Clock(lambda time: path.write_bytes(lease.encode(msgspec.structs.replace(nobody, beat=int(time)))))
    with pytest.raises(JobRunsAlready):
        taken(tmp_path, clock=clock)


def test_a_job_that_its_scheduler_has_started_again_follows_at_once(tmp_path: Path) -> None:
    hold(tmp_path, msgspec.structs.replace(ELSEWHERE, scheduler_job="7", requeues=1))
    clock = Clock()
    for requeues, at_once in ((1, False), (2, True)):
        mine = msgspec.structs.replace(ME, scheduler_job="7", requeues=requeues)
        told = lease.lease_state(
            lease.decode(lease.lease_path(tmp_path, 1).read_bytes()), mine, Here.find(), start_time
        )
        assert (told == "free") == at_once
    assert taken(tmp_path, mine, clock) is not None
    assert clock.time == 0.0


def test_of_many_that_come_at_once_one_takes_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from supervisor.run.lease import *\n"
        "input()\n"
        "mine = holder_here(sys.argv[2], '', 0)\n"
        "try: print(take(Path(sys.argv[1]), mine, joins=True, say=lambda _: None) is not None)\n"
        "except Taken: print('refused')\n"
        "sys.stdout.flush(); input()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [
        subprocess.Popen([*command, f"n{n}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for n in range(6)
    ]
    for word in ("go\n", None):
        for process in processes:
            assert process.stdin is not None
            if word:
                process.stdin.write(word)
                process.stdin.flush()
        if word:
            told = [process.stdout.readline().strip() for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate("\n", timeout=60)
    assert sorted(told) == ["False"] * 5 + ["True"]


def test_who_is_followed_finds_out_and_a_folder_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    mine = taken(tmp_path)
    assert mine is not None
    fast = Lease(tmp_path, 1, mine.holder, beat_s=0.001)
    path = lease.lease_path(tmp_path, 1)
    before = path.read_bytes()
    fast.keep()
    _until(lambda: path.read_bytes() != before)
    path.parent.rename(tmp_path / "away")
    beat = fast.holder.beat
    _until(lambda: fast.holder.beat > beat + 5)
    assert fast.lost == ""
    (tmp_path / "away").rename(path.parent)
    hold(tmp_path, ELSEWHERE, 2)
    _until(lambda: "other" in fast.lost)
    fast.give_up()
    assert len(path.read_bytes()) == lease.SIZE
    found = lease.read_lease(path)
    assert found is not None
    assert found.ended


def _until(condition: Callable[[], bool]) -> None:
    import time

    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
