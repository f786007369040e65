"""Stuck processes: from trees as machines have them, and from real processes where possible."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnosis.health import CheckResult
from supervisor.node_health.contract import JobInfo, Moment, ProbeContext, Site
from supervisor.node_health.processes import ProcessProbe, ProcessReader, Since, Task, check_of, judge_one_look

from .tree import Files

KTHREAD, USER = 2129984, 4194304


class Processes(Files):
    """A tree of /proc that a test changes from look to look."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.place = ProbeContext(root=root)
        self.probe = ProcessProbe()
        self.mono = 1000.0
        self.put(1, "S", name="systemd")

    def put(
        self, pid: int, state: str, *, name: str = "python", wchan: str = "0", runs: int = 5, flags: int = USER,
        threads: int = 1, start: int = 700, folder: str = "",
    ) -> None:  # fmt: skip
        stat = f"{pid} ({name}) {state} 1 1 1 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 {threads} 0 {start} 0 0\n"
        for file, text in (("stat", stat), ("wchan", wchan), ("schedstat", f"1000 2000 {runs}\n")):
            path = self.root / "proc" / (folder or str(pid)) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def looks(self, count: int, every_s: float = 60.0) -> dict[str, CheckResult]:
        """The last of so many looks."""
        for _ in range(count):
            results = self.probe.look(self.place, Moment(wall=0.0, mono=self.mono))
            self.mono += every_s
        return {result.check: result for result in results}


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


def bad(seen: dict[str, CheckResult]) -> set[str]:
    return {check for check, result in seen.items() if result.status == "unhealthy"}


def test_waiting_for_the_disk_again_and_again_is_work(processes: Processes) -> None:
    for runs in range(12):
        processes.put(77, "D", wchan="folio_wait_bit_common", runs=runs)
        seen = processes.looks(1)
        assert not bad(seen)
        assert seen["process_stuck_storage"].values == {"in_state_d": 1}


def test_a_process_that_is_stuck_in_the_driver(processes: Processes) -> None:
    processes.put(77, "D", name="nvidia-smi", wchan="os_acquire_rwlock_write")
    processes.put(78, "D", wchan="_nv047834rm")
    assert processes.looks(3)["process_stuck_driver"].level == "warning"
    seen = processes.looks(2)
    assert bad(seen) == {"process_stuck_driver"}
    result = seen["process_stuck_driver"]
    assert (result.level, result.pids) == ("critical", (77, 78))
    assert "nvidia-smi (pid 77) stuck in os_acquire_rwlock_write for 240 s" in result.text
    processes.put(77, "S", name="nvidia-smi")
    processes.put(78, "R")
    assert not bad(processes.looks(1))


def test_one_look_at_a_captured_tree_tells_who_waits_for_the_driver_or_a_server(processes: Processes) -> None:
    processes.put(77, "D", name="nvidia-smi", wchan="os_acquire_rwlock_write")
    processes.put(78, "D", name="python3", wchan="cl_sync_io_wait")
    processes.put(79, "D", name="cp", wchan="folio_wait_bit_common")
    processes.put(80, "D", name="nvidia-smi", wchan="some_mutex")
    seen = processes.looks(1)
    assert bad(seen) == {"process_stuck_driver", "process_stuck_storage"}
    driver, storage = seen["process_stuck_driver"], seen["process_stuck_storage"]
    assert (driver.level, driver.pids, storage.level, storage.pids) == ("warning", (77,), "warning", (78,))
    assert storage.text == "in state D: python3 (pid 78) in cl_sync_io_wait; one look cannot tell for how long"


def test_a_check_without_an_agent_tells_who_did_not_run_for_some_seconds() -> None:
    nfs = Task(pid=78, name="cp", start=1, runs=9, wchan="nfs_wait_bit_killable")
    once, twice = Since(task=nfs, at=10.0), Since(task=nfs, at=10.0, looks=2)
    assert judge_one_look("process_stuck_storage", [once], {}, 12.0, tree=False) is None
    told = judge_one_look("process_stuck_storage", [twice], {78: 3}, 12.0, tree=False)
    text = "in state D: cp (pid 78, rank 3) in nfs_wait_bit_killable; for 2 s at least"
    assert (told.level, told.text) == ("warning", text)


def test_a_stuck_rank_is_worse_than_another_process(processes: Processes) -> None:
    processes.put(50, "D", name="ls", wchan="rpc_wait_bit_killable")
    processes.put(77, "D", wchan="nfs_wait_bit_killable")
    seen = processes.looks(6)
    assert bad(seen) == {"process_stuck_storage"}
    assert seen["process_stuck_storage"].level == "warning"
    processes.place.job = JobInfo(ranks={77: 4})
    result = processes.looks(1)["process_stuck_storage"]
    assert (result.level, result.pids) == ("critical", (77, 50))
    assert result.text.startswith("python (pid 77, rank 4) stuck in nfs_wait_bit_killable for 360 s; ls (pid 50)")


def test_it_takes_five_minutes(processes: Processes) -> None:
    processes.put(77, "D", wchan="some_mutex")
    for _ in range(10):
        assert not bad(processes.looks(1, every_s=30.0))
    assert bad(processes.looks(1)) == {"process_stuck"}


def test_checks_that_are_run_now_and_then_see_it_too(processes: Processes, tmp_path: Path) -> None:
    processes.place = ProbeContext(root=processes.root, state_dir=tmp_path / "state", preflight=True)
    processes.write("proc/sys/kernel/random/boot_id", "first\n")
    processes.put(77, "D", wchan="some_mutex")
    for _ in range(2):
        assert not bad(processes.looks(1, every_s=150.0))
        processes.probe = ProcessProbe()
    assert bad(processes.looks(1)) == {"process_stuck"}
    (tmp_path / "state/stuck.json").write_text('{"boot_id": "first", "value": ["?"]}')
    processes.probe = ProcessProbe()
    assert not bad(processes.looks(1))


def test_a_pid_that_is_used_again_is_another_process(processes: Processes) -> None:
    for start in range(12):
        processes.put(77, "D", wchan="some_mutex", start=start)
        assert not bad(processes.looks(1))


def test_a_parent_that_waits_for_its_vfork_is_not_stuck(processes: Processes) -> None:
    processes.put(77, "D", name="make", wchan="kernel_clone")
    processes.put(78, "D", name="make", wchan="__refrigerator")
    assert processes.looks(9)["process_stuck"].values == {"in_state_d": 0}


def test_a_paused_container_is_not_stuck(processes: Processes) -> None:
    processes.put(77, "D", wchan="hrtimer_nanosleep")
    processes.write("proc/77/cgroup", "6:freezer:/docker/ab\n4:memory:/docker/ab\n")
    processes.write("sys/fs/cgroup/freezer/docker/ab/freezer.state", "FROZEN\n")
    assert not bad(processes.looks(9))
    processes.write("sys/fs/cgroup/freezer/docker/ab/freezer.state", "THAWED\n")
    assert bad(processes.looks(6)) == {"process_stuck"}


def test_kernel_threads_that_always_sleep_in_d_are_left_out(processes: Processes) -> None:
    processes.put(90, "D", name="always", flags=KTHREAD, wchan="worker")
    processes.put(91, "S", name="jbd2/nvme0n1", flags=KTHREAD)
    assert processes.looks(9)["process_stuck"].values == {"in_state_d": 0}
    processes.put(91, "D", name="jbd2/nvme0n1", flags=KTHREAD, wchan="wait_on_buffer")
    seen = processes.looks(11)
    assert bad(seen) == {"process_stuck_storage"}
    assert seen["process_stuck_storage"].pids == (91,)


def test_a_dead_rank_whose_thread_does_not_end(processes: Processes) -> None:
    """SIGKILL ended its main thread; another is in the driver for ever and keeps the GPU."""
    processes.place.job = JobInfo(ranks={77: 4})
    processes.put(77, "Z", threads=2)
    processes.put(79, "D", folder="77/task/79", wchan="uvm_va_space_destroy", runs=3)
    seen = processes.looks(5)
    assert bad(seen) == {"process_stuck_driver"}
    assert "rank 4" in seen["process_stuck_driver"].text


@pytest.mark.parametrize(
    ("name", "wchan", "expected"),
    [
        ("nv-hostengine", "", "process_stuck_driver"),
        ("python", "uvm_va_block_check", "process_stuck_driver"),
        ("python", "cl_sync_io_wait", "process_stuck_storage"),
        ("python", "request_wait_answer", "process_stuck_storage"),
        ("nv-hostengine", "rpc_wait_bit_killable", "process_stuck_storage"),
        ("python", "kernfs_iop_getattr", "process_stuck"),
        ("kworker/u8:1", "wb_wait_for_completion", "process_stuck"),
        ("python", "", "process_stuck"),
    ],
)
def test_what_a_process_is_stuck_in(name: str, wchan: str, expected: str) -> None:
    assert check_of(Task(pid=1, name=name, start=1, runs=1, wchan=wchan)) == expected


def test_hostile_names(processes: Processes) -> None:
    processes.put(77, "D", name="a) S 1 (\x1b[2Jb\n) R", wchan="nfs_\x1b[31mx")
    processes.put(78, "D", name="")
    (processes.root / "proc/79").mkdir()
    (processes.root / "proc/79/stat").write_bytes(b"79 (x) \xff")
    seen = processes.looks(6)
    assert bad(seen) == {"process_stuck_storage", "process_stuck"}
    assert "\x1b" not in seen["process_stuck_storage"].text


def test_a_real_process_whose_main_thread_has_ended_is_a_zombie_with_threads() -> None:
    """Real: and while none of its threads is in state D it is not called stuck."""
    script = "import ctypes, sys, threading; threading.Thread(target=sys.stdin.readline).start();"
    script += "ctypes.CDLL(None).pthread_exit(None)"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        deadline = time.monotonic() + 60
        while ") Z " not in stat.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        snapshot = ProcessReader().read(ProbeContext())
        process.kill()
    assert process.pid not in {task.pid for task in snapshot.stuck}


@pytest.fixture
def freezer() -> Iterator[Path]:
    folder = Path("/sys/fs/cgroup/freezer") / f"unbroken-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("cgroup v1: boot with systemd.unified_cgroup_hierarchy=0 (no freezer can be made here)")
    yield folder
    folder.rmdir()


@pytest.mark.root
def test_a_real_frozen_process_is_in_state_d_and_not_stuck(freezer: Path) -> None:
    place = ProbeContext(site=Site(limits={"process_stuck": {"seconds": 0, "looks": 2}}))
    with subprocess.Popen(["sleep", "60"]) as process:
        (freezer / "cgroup.procs").write_text(str(process.pid))
        (freezer / "freezer.state").write_text("FROZEN")
        try:
            deadline = time.monotonic() + 60
            while (freezer / "freezer.state").read_text() != "FROZEN\n" and time.monotonic() < deadline:
                time.sleep(0.01)
            assert process.pid in {task.pid for task in ProcessReader().read(ProbeContext()).stuck}
            probe = ProcessProbe()
            for mono in range(4):
                results = probe.look(place, Moment(wall=0.0, mono=float(mono)))
                assert not [r for r in results if process.pid in r.pids]
        finally:
            (freezer / "freezer.state").write_text("THAWED")
            process.kill()
