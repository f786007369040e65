"""A checkpoint that cannot be brought to this node: the controller is told, and no rank starts without it.

With real movers; nothing answers where the checkpoint should come from.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from recovery.checkpoint import ROLLED_BACK, PutBack, SetAside
from recovery.quarantine import prepare
from recovery.tiers import BringBack, OwnedFile, PartSource, Save, SnapshotBring, SnapshotOrders, TierOrders
from supervisor.agent.actions import ActionRunner
from supervisor.agent.checkpoints import CheckpointMonitor
from supervisor.agent.mover import MoverRunner
from supervisor.agent.reconcile import Prepare
from supervisor.agent.state import AgentState
from supervisor.agent.tester import NodeTester
from supervisor.messages import Assignment, JobSpec
from tests.supervisor.mover.saves import torch_file

SAVE = Save(
    name="step-20",
    attempt=1,
    format="dcp",
    step=20,
)


@pytest.fixture
def state(make_state: Any, tmp_path: Path) -> AgentState:
    for name in ("job", "ckpt", "shared"):
        (tmp_path / name).mkdir()
    (tmp_path / "job" / "token").write_text("t" * 40)
    (tmp_path / "job" / "token").chmod(0o600)
    spec = JobSpec(name="j", checkpoint_dirs=(str(tmp_path / "ckpt"),), publish_to=str(tmp_path / "shared"))
    made: AgentState = make_state(spec=spec)
    return made


@pytest.fixture
def mute() -> Iterator[int]:
    """The port of a peer that takes connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def order(port: int, file: str = "step-20/__0_0.distcp") -> Assignment:
    save = msgspec.structs.replace(SAVE, files=(OwnedFile(name=file, size=10, owner="n2"),))
    source = PartSource(owner="n2", node="n2", address="127.0.0.1", port=port)
    return Assignment(
        epoch=1,
        version=1,
        node="n1",
        role="member",
        stage="form",
        attempt=2,
        tiers=TierOrders(bring=BringBack(save=save, sources=(source,))),
    )


class Node:
    def __init__(self, state: AgentState, *, slack_s: float) -> None:
        spec = state.plan.spec
        seen = CheckpointMonitor(
            spec.checkpoint_dirs, state.plan.cwd, local_dir=state.plan.local_dir, job_dir=state.plan.job_dir, node="n1"
        )
        self.state, self._seen = state, seen
        self.mover = MoverRunner(state, seen, slack_s=slack_s, retries_s=0.0)
        nothing: Any = None
        tester = NodeTester(state, lambda: "127.0.0.1")
        self._actions = ActionRunner(state, nothing, nothing, nothing, seen, self.mover, nothing, tester)

    def roll_back(self, path: Path) -> None:
        prepare([SetAside(path=str(path), why=f"{ROLLED_BACK}a test")], self._seen.bounds())

    async def prepare(self, assignment: Assignment) -> None:
        self.state.assignment = assignment
        await self._actions.run(Prepare(attempt=assignment.attempt), assignment)
        while self.state.work.is_running("prepare"):
            await asyncio.sleep(0.01)

    @property
    def failed(self) -> list[str]:
        return [one.name for one in self.mover.tiers.failed] if self.mover.tiers is not None else []


def with_mover(node: Node, story: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        mover = asyncio.create_task(node.mover.run())
        try:
            deadline = time.monotonic() + 60
            while node.mover.status is None:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            await story()
        finally:
            mover.cancel()
            await asyncio.gather(mover, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 90))


def test_the_controller_chooses_again_before_the_node_is_said_to_fail(state: AgentState) -> None:
    node = Node(state, slack_s=60)

    async def story() -> None:
        await node.prepare(order(1, file="../x"))
        assert node.failed == ["step-20"]
        assert state.saved.prepared < 2, "no rank starts"
        assert not state.prepare_error
        await node.prepare(order(1, file="../x"))
        assert "step-20 could not be brought back" in state.prepare_error
        assert state.saved.prepared < 2
        node.mover.attempt_starts()
        assert node.failed == [], "the next attempt tries again"

    with_mover(node, story)


def test_without_a_mover_the_node_cannot_prepare(state: AgentState) -> None:
    node = Node(state, slack_s=0.05)
    asyncio.run(node.prepare(order(1)))
    assert "has not run" in state.prepare_error
    assert state.saved.prepared < 2


def test_what_is_put_back_is_told_before_the_node_is_ready(state: AgentState, tmp_path: Path, mute: int) -> None:
    """Else ranks would start from an older one, with the newest in the folder; nor is it fetched from elsewhere."""
    node = Node(state, slack_s=30)
    state.saved.joined = 1
    file = tmp_path / "ckpt" / "step-20" / "__0_0.distcp"
    file.parent.mkdir()
    file.write_bytes(b"own")
    node.roll_back(file.parent)
    assert not file.exists()

    async def story() -> None:
        undo = msgspec.structs.replace(order(mute), prepare=(PutBack(path=str(file.parent)),), tiers=TierOrders())
        await node.prepare(undo)
        assert state.saved.prepared == 2
        assert node.mover.tiers is not None
        assert [one.name for one in node.mover.tiers.parts] == ["step-20"]
        assert file.read_bytes() == b"own"

    with_mover(node, story)


def test_what_is_put_back_is_not_fetched(state: AgentState, tmp_path: Path, mute: int) -> None:
    node = Node(state, slack_s=30)
    state.saved.joined = 1
    file = tmp_path / "ckpt" / "step-20.pt"
    file.write_bytes(torch_file(20))
    stamp = file.stat().st_mtime_ns // 1000
    node.roll_back(file)

    async def story() -> None:
        undo = order(mute, file="step-20.pt")
        assert undo.tiers is not None
        assert undo.tiers.bring is not None
        mine = OwnedFile(name=file.name, size=len(torch_file(20)), owner="n1")
        save = Save(name=file.name, attempt=1, stamp=stamp, format="torch_save", step=20, files=(mine,))
        bring = msgspec.structs.replace(undo.tiers.bring, save=save)
        back = (PutBack(path=str(file)),)
        await node.prepare(msgspec.structs.replace(undo, prepare=back, tiers=TierOrders(bring=bring)))
        assert (state.saved.prepared, state.prepare_error) == (2, "")
        assert file.read_bytes() == torch_file(20)
        assert list((file.parent / ".unbroken-set-aside").iterdir()) == [], "it is not kept twice"

    with_mover(node, story)


def test_a_node_ends_when_its_copies_are_gone(state: AgentState) -> None:
    node = Node(state, slack_s=30)
    node.state.assignment = msgspec.structs.replace(order(1), tiers=TierOrders(drained=True))

    async def story() -> None:
        assert node.mover.may_end(succeeded=False), "it may be started again"
        assert not node.mover.may_end(succeeded=True)
        while not node.mover.may_end(succeeded=True):
            await asyncio.sleep(0.02)
        assert node.mover.status is not None
        assert node.mover.status.cleared

    with_mover(node, story)


def test_what_does_not_move_is_given_up(state: AgentState, mute: int) -> None:
    node = Node(state, slack_s=0.5)

    async def story() -> None:
        began = time.monotonic()
        await node.prepare(order(mute))
        assert "too long" in state.prepare_error
        assert time.monotonic() - began < 30
        assert state.saved.prepared < 2

    with_mover(node, story)


def snapshots_from(port: int) -> Assignment:
    source = PartSource(owner="n2", node="n3", address="127.0.0.1", port=port)
    bring = SnapshotBring(
        attempt=1, step=20, world=4, first_rank=0, ranks=2, size_bytes=100, sources=(source,) if port else ()
    )
    orders = SnapshotOrders(attempt=1, bring=bring)
    return msgspec.structs.replace(order(1), tiers=TierOrders(snapshots=orders))


@pytest.fixture
def mirroring(state: AgentState) -> AgentState:
    """The slots are no slots: nothing can be put there."""
    spec = msgspec.structs.replace(state.plan.spec, mirror_snapshots=True)
    state.plan = msgspec.structs.replace(state.plan, spec=spec, snapshot_files=("/dev/null#x", "/dev/null#y"))
    return state


def test_snapshots_that_nobody_gives_do_not_keep_ranks_waiting(mirroring: AgentState) -> None:
    """Ranks start from the checkpoint on storage: this node does not offer the step."""
    node = Node(mirroring, slack_s=30)

    async def story() -> None:
        for port in (0, 1):
            await node.prepare(snapshots_from(port))
            assert (mirroring.saved.prepared, mirroring.prepare_error) == (2, "")
            assert node.mover.status is not None
            assert node.mover.status.bring_snapshot_problem

    with_mover(node, story)


def movers_of(state: AgentState) -> list[psutil.Process]:
    """Not all children: a test before this one may have left some, for example multiprocessing's resource tracker."""
    return [one for one in psutil.Process().children() if state.plan.job_dir in " ".join(one.cmdline())]


def test_after_the_time_for_snapshots_nobody_writes_to_the_slots(mirroring: AgentState, mute: int) -> None:
    """The mover waits for a peer that says nothing: it is ended before ranks start, and another one comes."""
    node = Node(mirroring, slack_s=0.5)

    async def story() -> None:
        first = movers_of(mirroring)
        assert len(first) == 1
        await node.prepare(snapshots_from(mute))
        assert mirroring.saved.prepared == 2
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in first)
        while not node.mover.problem:
            await asyncio.sleep(0.02)
        while node.mover.problem:
            await asyncio.sleep(0.02)

    with_mover(node, story)
