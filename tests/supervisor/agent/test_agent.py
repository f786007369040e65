"""The agent's turn, without a controller, a keeper or a front. The whole of it: tests/e2e."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from recovery.checkpoint import Checkpoint
from supervisor.agent.agent import FRONT_GONE, FrontMonitor, JobMonitor, NodeAgent
from supervisor.agent.checkpoints import CheckpointMonitor
from supervisor.agent.link import Link
from supervisor.config import NodePlan
from supervisor.files import start_time
from supervisor.keeper_client import KeeperState, WorkerProcess
from supervisor.messages import Assignment, JobSpec, Outcome, Refused
from supervisor.node_health.kernel_log import KmsgRecords

ASSIGNED = Assignment(node="n1", epoch=3, version=2, role="member", stage="run", attempt=2)
WORKER = WorkerProcess(attempt=2, rank=0, local_rank=0, pid=os.getpid())


@pytest.fixture
def agent(make_state: Any, tmp_path: Path) -> NodeAgent:
    (tmp_path / "job").mkdir()
    return NodeAgent(make_state(front_pid=os.getpid(), front_start_time=start_time(os.getpid())).plan)


def heartbeats(agent: NodeAgent) -> list[Any]:
    sent: list[Any] = []
    agent._link.post = sent.append  # type: ignore[method-assign]
    return sent


def test_the_newest_assignment_counts_and_what_is_out_of_bounds_is_ignored(agent: NodeAgent) -> None:
    agent._receive(ASSIGNED)
    assert agent._state.assignment == ASSIGNED
    assert (agent._state.saved.epoch, agent._state.wakeup.is_set) == (3, True)
    agent._state.wakeup.clear()
    for other in (
        ASSIGNED,
        msgspec.structs.replace(ASSIGNED, version=1),
        msgspec.structs.replace(ASSIGNED, epoch=2, version=9),
        msgspec.structs.replace(ASSIGNED, node="n2", version=9),
        Refused(why="another version"),
    ):
        agent._receive(other)
        assert agent._state.assignment == ASSIGNED
        assert not agent._state.wakeup.is_set
    assert len(agent._state.notices.reported) == 2
    agent._receive(msgspec.structs.replace(ASSIGNED, version=3, notices=((1, "hello"), (2, "there"))))
    agent._receive(msgspec.structs.replace(ASSIGNED, version=4, notices=((2, "there"),)))
    assert agent._state.paths.notices.read_text().splitlines()[-2:] == ["hello", "there"]


def test_a_new_state_of_the_keeper_is_handled_before_it_is_reported(agent: NodeAgent) -> None:
    """It may come while the keeper is asked for something: the end of a rank never goes out without its evidence."""
    sent, crashes = heartbeats(agent), []
    agent._evidence.start_crash = crashes.append  # type: ignore[method-assign]
    agent._state.set_keeper(KeeperState(workers=(WORKER,)))
    agent._report(100.0)
    assert sent == []
    agent._handle_keeper_state(100.0)
    agent._report(100.0)
    assert (len(sent), crashes) == (1, [])
    agent._state.set_keeper(KeeperState(workers=(msgspec.structs.replace(WORKER, status=9, order=0),)))
    agent._report(100.1)
    assert len(sent) == 1
    agent._handle_keeper_state(100.2)
    agent._report(100.2)
    assert (len(sent), crashes) == (2, [2])


def test_heartbeats_go_out_for_news_with_looks_and_after_a_while(agent: NodeAgent) -> None:
    sent = heartbeats(agent)
    agent._report(100.0)
    assert len(sent) == 1
    agent._report(100.6)
    assert len(sent) == 1
    agent._looked_at = 100.6
    agent._report(100.6)
    assert len(sent) == 2
    agent._state.wakeup.set()
    agent._report(100.7)
    assert len(sent) == 3
    agent._report(102.1)
    assert len(sent) == 4


def test_news_between_two_looks_do_not_hold_up_what_the_second_has_seen(agent: NodeAgent) -> None:
    """A step that is told a look later makes all steps look that much slower."""
    sent = heartbeats(agent)
    for tenths, looks, news in ((0, True, True), (2, False, True), (5, True, False), (6, True, False)):
        now = 100.0 + tenths / 10
        agent._looked_at = now if looks else agent._looked_at
        agent._state.wakeup.clear()
        if news:
            agent._state.wakeup.set()
        agent._report(now)
    assert len(sent) == 3, "at the start, for news, and with the look after them; not with a look just after that"


def test_a_fatal_line_of_the_kernel_is_reported_when_it_comes(agent: NodeAgent) -> None:
    """A packet socket keeps records apart as the device does. A storm of them is not read line by line."""
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    agent._health.kernel_log._source = KmsgRecords(ours.detach())
    reads = []

    async def story() -> None:
        agent._follow_kernel_log()
        kernel.send(b"2,10,1000,-;NVRM: Xid (PCI:0000:c1:00): 79, pid=77, GPU has fallen off the bus.\n")
        await asyncio.wait_for(agent._state.wakeup.wait(20.0), 5.0)
        assert [one.rule for one in agent._state.findings._queue] == ["xid_79"]
        read, agent._read_kernel_log = agent._read_kernel_log, lambda workers: reads.append(1) or read(workers)  # type: ignore
        for number in range(50):
            kernel.send(b"6,%d,1000,-;eth0: link is up\n" % (11 + number))
            await asyncio.sleep(0.001)
        while not reads:
            await asyncio.sleep(0.01)
        agent._leave_kernel_log()

    asyncio.run(story())
    assert len(reads) == 1
    agent._health.kernel_log.close()
    kernel.close()


def test_an_orphan_ends_as_a_controller_would_end_it(agent: NodeAgent) -> None:
    outcome = Outcome(state="stopped", exit_code=143, line="stopped")
    agent._orphan = SimpleNamespace(look=lambda _now: outcome)  # type: ignore[assignment]
    agent._handle_lost_controller(100.0)
    written = msgspec.json.decode(agent._state.paths.outcome.read_bytes(), type=Outcome)
    assert (written.state, written.exit_code) == ("failed", 70)  # it does not know what runs here
    agent._receive(ASSIGNED)
    agent._handle_lost_controller(100.0)
    held = agent._state.assignment
    assert (held.stage, held.outcome) == ("stop", outcome)


def test_the_front_is_watched(tmp_path: Path, make_state: Any) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        plan = make_state(front_pid=child.pid, front_start_time=start_time(child.pid)).plan
        file = tmp_path / "front.json"
        front = FrontMonitor(plan, file)
        assert front.stop_request() is None
        for text in ("{", "[]", '{"other": 1}'):
            file.write_text(text)
            assert front.stop_request() is None
        file.write_text('{"stop": "SIGTERM"}')
        assert [front.stop_request(), front.stop_request()] == ["SIGTERM", None]
    finally:
        child.kill()
        child.wait()
    assert front.stop_request() == FRONT_GONE


def checkpoint_monitor(tmp_path: Path, given: tuple[str, ...]) -> CheckpointMonitor:
    folder = str(tmp_path)
    return CheckpointMonitor(given, folder, local_dir=folder, job_dir=folder, node="n1")


def plan(tmp_path: Path, **more: object) -> NodePlan:
    return NodePlan(
        node="n1",
        job_dir=str(tmp_path),
        local_dir=str(tmp_path / "local"),
        spec=JobSpec(name="j"),
        launcher_argv=("train.py",),
        python="/opt/venv/bin/python",
        cwd=str(tmp_path),
        front_pid=1,
        front_start_time=1,
        **more,  # type: ignore[arg-type]
    )


def worker(rank: int, pid: int, status: int | None = None) -> WorkerProcess:
    return WorkerProcess(attempt=1, rank=rank, local_rank=rank - 8, pid=pid, status=status)


def test_only_living_ranks_are_in_the_job_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    node = plan(tmp_path, launcher_env={"CUDA_VISIBLE_DEVICES": "2,3"})
    checkpoints = checkpoint_monitor(tmp_path, ("ckpt",))
    link = Link.for_plan(node)
    link.url = "http://n0:7461"
    monitor = JobMonitor(node, checkpoints, link)
    info = monitor.info([worker(8, 80), worker(9, 90), worker(10, 70, status=9)])
    assert info.ranks == {80: 8, 90: 9}
    assert info.gpus_of_ranks == {8: "2,3:0", 9: "2,3:1"}
    assert info.checkpoint_dirs == (str(tmp_path / "ckpt"),)
    assert info.folders == (str(tmp_path), str(tmp_path / "local"), str(tmp_path))
    assert info.python == "/opt/venv/bin/python"
    assert (info.checkpoint_bytes, info.clock_offset_s) == (0, None)


def test_a_launcher_without_a_gpu_has_the_others(tmp_path: Path) -> None:
    node = plan(tmp_path, launcher_env={"CUDA_VISIBLE_DEVICES": "2,3"})
    monitor = JobMonitor(node, checkpoint_monitor(tmp_path, ()), Link.for_plan(node))
    assert monitor.info([worker(8, 80)]).gpus_of_ranks == {8: "2,3:0"}
    assert monitor.info([worker(8, 80)], gpus=("GPU-1", "GPU-3")).gpus_of_ranks == {8: "GPU-1,GPU-3:0"}


def test_room_is_counted_in_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    checkpoints = checkpoint_monitor(tmp_path, ("ckpt",))
    sizes = [(100, True, 1.0), (300, True, 2.0), (7, False, 3.0)]
    checkpoints.checkpoints = tuple(
        Checkpoint(path=f"{at}", step=1, format="f", complete=complete, modified_at=at, size_bytes=size)
        for size, complete, at in sizes
    )
    node = plan(tmp_path)
    assert JobMonitor(node, checkpoints, Link.for_plan(node)).info([]).checkpoint_bytes == 300


def test_the_clock_is_reported_when_it_is_known_and_does_not_change_all_the_time(tmp_path: Path) -> None:
    node = plan(tmp_path)
    link = Link.for_plan(node)
    monitor = JobMonitor(node, checkpoint_monitor(tmp_path, ()), link)
    link.clock.answered(asked_at=100.5, received_at=100.0, sent_at=100.0, now=100.5, mono=0.0)
    first = monitor.info([])
    assert first.clock_offset_s == 0.5
    link.clock.answered(asked_at=101.5, received_at=101.0, sent_at=101.0, now=101.5002, mono=1.0)
    assert monitor.info([]) == first


def test_a_folder_whose_name_is_not_utf8_is_left_out(tmp_path: Path) -> None:
    node = plan(tmp_path)
    checkpoints = checkpoint_monitor(tmp_path, ("ckpt", os.fsdecode(b"run\xff")))
    info = JobMonitor(node, checkpoints, Link.for_plan(node)).info([])
    assert info.checkpoint_dirs == (str(tmp_path / "ckpt"),)
    assert msgspec.json.encode(info)
