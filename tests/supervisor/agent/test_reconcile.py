"""The agent's next steps, case by case, and what it does not do at a controller's word."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from recovery.checkpoint import Restore, Resume, SetAside
from recovery.tiers import PartSource, SnapshotBring, SnapshotOrders, TierOrders
from supervisor.agent.reconcile import (
    AnswerLauncher,
    Collect,
    EndLauncher,
    Finished,
    Join,
    KillWorkers,
    Launch,
    Prepare,
    Stop,
    WakeRanks,
    launcher_state,
    out_of_bounds,
    reconcile,
)
from supervisor.agent.state import SavedState
from supervisor.keeper_client import KeeperState, LauncherProcess, WorkerProcess
from supervisor.messages import (
    Assignment,
    EvidenceRequest,
    Outcome,
    Round,
    SpaceWanted,
    StoreOffer,
    decode_controller_message,
)

ROUND_2 = Round(attempt=2, nodes=("b", "a"), store_host="h", store_port=1)
LAUNCHER = LauncherProcess(pid=10)


def assigned(stage: str, attempt: int = 1, **more: Any) -> Assignment:
    return Assignment(
        **{"epoch": 1, "version": 1, "node": "a", "role": "member", "attempt": attempt, "stage": stage} | more
    )


def worker(attempt: int, rank: int, status: int | None = None) -> WorkerProcess:
    return WorkerProcess(attempt=attempt, rank=rank, local_rank=rank, pid=100 + rank, status=status)


OFFER = StoreOffer(host="h", port=0, local_world_size=1)


def state(
    keeper: KeeperState | None, watching: int | None = None, offer: StoreOffer | None = None, **saved: Any
) -> Any:
    """What of an `AgentState` decides."""
    return SimpleNamespace(keeper=keeper, watching=watching, offer=offer, saved=SavedState(**saved))


def node(*workers: WorkerProcess, launcher: LauncherProcess | None = LAUNCHER, **more: Any) -> Any:
    return state(KeeperState(ready=True, launcher=launcher, workers=workers), **more)


def test_the_first_attempt_prepares_and_launches() -> None:
    assert reconcile(assigned("form"), node(launcher=None)) == [Prepare(attempt=1), Launch()]


def test_after_a_launcher_that_ended_at_once_there_is_a_pause() -> None:
    assert Launch() not in reconcile(assigned("form"), node(launcher=None, prepared=1), may_launch=False)


def test_nothing_is_launched_before_torch_is_imported_unless_it_cannot_be() -> None:
    importing = KeeperState(ready=False)
    assert Launch() not in reconcile(assigned("form"), state(importing))
    broken = KeeperState(ready=False, error="No module named 'torch'")
    assert Launch() in reconcile(assigned("form"), state(broken))


@pytest.mark.parametrize(("rank", "port", "joins"), [(0, 4000, True), (0, 4001, False), (1, 4001, True)])
def test_a_round_is_that_of_the_launcher_whose_store_it_names(rank: int, port: int, joins: bool) -> None:
    """After a crash of everything the newest round is one of launchers that are gone."""
    names = ("a", "b") if rank == 0 else ("b", "a")
    formed = Round(attempt=2, nodes=names, store_host="b", store_port=4000)
    steps = reconcile(
        assigned("run", 2, round=formed), node(prepared=2, offer=msgspec.structs.replace(OFFER, port=port))
    )
    assert (Join(round=formed, rank=rank) in steps) is joins


def test_another_number_of_processes_needs_another_launcher() -> None:
    fewer = assigned("form", 2, gpus=("GPU-12345678",))
    assert reconcile(fewer, node(offer=OFFER, prepared=2)) == [EndLauncher()]
    ended = LauncherProcess(pid=10, status=0)
    assert reconcile(fewer, node(launcher=ended, prepared=2)) == [Launch()]
    running = assigned("run", 2, gpus=fewer.gpus, round=ROUND_2)
    assert reconcile(running, node(offer=OFFER, prepared=2)) == [EndLauncher()]
    assert Join(round=ROUND_2, rank=1) in reconcile(running, node(offer=OFFER, prepared=2, gpus=fewer.gpus))
    assert reconcile(assigned("form", 3), node(offer=OFFER, prepared=3, gpus=fewer.gpus)) == [EndLauncher()]


@pytest.mark.parametrize("gpus", [("0",), ("GPU-1",), ("GPU-12345678",) * 2, ("GPU-12345678,GPU-99999999",)])
def test_gpus_have_uuids(gpus: tuple[str, ...]) -> None:
    assert out_of_bounds(assigned("form", gpus=gpus), "a")
    assert not out_of_bounds(assigned("form", gpus=("GPU-12345678-0000-0000-0000-000000000000",)), "a")


def test_a_joining_launcher_waits_for_the_round() -> None:
    assert reconcile(assigned("form", 2), node(offer=OFFER, prepared=2)) == []
    steps = reconcile(assigned("run", 2, round=ROUND_2), node(offer=OFFER, prepared=2))
    assert steps == [Join(round=ROUND_2, rank=1)]


def test_no_round_is_joined_before_its_preparations_are_done() -> None:
    assert reconcile(assigned("run", 2, round=ROUND_2), node(offer=OFFER, prepared=1)) == [Prepare(attempt=2)]


def test_running_workers_of_the_attempt_are_left_alone() -> None:
    running = node(worker(2, 0), worker(2, 1), watching=2, joined=2, prepared=2)
    assert reconcile(assigned("run", 2, round=ROUND_2), running) == []
    assert reconcile(assigned("form", 2), running) == []
    assert reconcile(assigned("hold", 3), running) == []


def test_old_workers_are_killed_before_the_launcher_is_released() -> None:
    failed = node(worker(1, 0), worker(1, 1, status=9), watching=1, joined=1, prepared=1)
    assert reconcile(assigned("form", 2), failed) == [KillWorkers(attempt=1)]
    ended = node(worker(1, 0, status=9), worker(1, 1, status=9), watching=1, joined=1, prepared=1)
    assert reconcile(assigned("form", 2), ended) == [Prepare(attempt=2), AnswerLauncher(answer="look")]


def test_a_node_whose_ranks_had_all_ended_well_restarts_without_a_failure() -> None:
    done = node(worker(1, 0, status=0), watching=1, joined=1, prepared=2)
    assert reconcile(assigned("form", 2), done) == [AnswerLauncher(answer="restart")]


def test_a_finished_rank_does_not_release_the_launcher_before_the_whole_job_finished() -> None:
    done = node(worker(1, 0, status=0), watching=1, joined=1, prepared=1)
    assert reconcile(assigned("run", 1, round=ROUND_2), done) == []
    assert reconcile(assigned("finish", 1), done) == [AnswerLauncher(answer="look")]


def test_an_attempt_is_launched_once() -> None:
    started = node(joined=2, prepared=2)
    assert reconcile(assigned("run", 2, round=ROUND_2), started) == []


def test_a_dead_launcher_is_replaced_for_the_next_attempt_only() -> None:
    dead = LauncherProcess(pid=10, status=9)
    ended = node(worker(1, 0, status=9), launcher=dead, joined=1, prepared=1)
    assert reconcile(assigned("run", 1, round=ROUND_2), ended) == []
    assert reconcile(assigned("form", 2), ended) == [Prepare(attempt=2), Launch()]


@pytest.mark.parametrize("role", ["spare", "excluded"])
def test_a_spare_or_excluded_node_runs_nothing(role: str) -> None:
    old = node(worker(1, 0), watching=1, joined=1)
    assert reconcile(assigned("run", 2, role=role, round=ROUND_2), old) == [KillWorkers(attempt=2)]
    assert reconcile(assigned("run", 2, role=role), node(worker(1, 0, status=9), watching=1)) == [
        AnswerLauncher(answer="restart")
    ]
    assert reconcile(assigned("run", 2, role=role), node(offer=OFFER)) == (
        [EndLauncher()] if role == "excluded" else []
    )


def test_stop_ends_everything_and_then_the_node_is_finished() -> None:
    outcome = Outcome(state="stopped", exit_code=143, line="stopped")
    stopping = assigned("stop", 1, outcome=outcome, stop_signal="SIGINT", grace_s=5.0)
    assert reconcile(stopping, node(worker(1, 0))) == [Stop(signal="SIGINT", grace_s=5.0)]
    assert reconcile(stopping, node(worker(1, 0, status=2), watching=1)) == [AnswerLauncher(answer="look")]
    assert reconcile(stopping, node(worker(1, 0, status=2), offer=OFFER)) == [EndLauncher()]
    assert reconcile(stopping, node(worker(1, 0, status=2), launcher=None)) == [Finished()]
    assert reconcile(assigned("stop", 1), node(launcher=None)) == []


def test_requests_for_evidence_and_to_wake_ranks_are_carried_out_once() -> None:
    order = assigned("run", 1, evidence=EvidenceRequest(number=3, budget_s=5.0), wake=(1,), wake_number=2)
    running = node(worker(1, 0), worker(1, 1), watching=1, joined=1)
    assert reconcile(order, running) == [WakeRanks(ranks=(1,), number=2), Collect()]
    assert reconcile(order, node(worker(1, 0), worker(1, 1), watching=1, joined=1, woken=2, collected=3)) == []


def test_without_a_keeper_nothing_is_done() -> None:
    absent = state(None)
    assert reconcile(assigned("form"), absent) == []
    assert reconcile(assigned("run", 1, role="spare"), absent) == []


def test_the_state_of_the_launcher_in_the_heartbeat() -> None:
    gone = state(None, joined=1)
    assert launcher_state(gone, 1.0) == ("absent", "")
    assert launcher_state(gone, 6.0) == ("ended", "the keeper is gone")
    assert launcher_state(node(offer=OFFER), 0.0) == ("joining", "")
    assert launcher_state(node(worker(1, 0), watching=1), 0.0) == ("running", "")
    assert launcher_state(node(), 0.0) == ("starting", "")
    assert launcher_state(node(launcher=None), 0.0) == ("absent", "")
    killed = LauncherProcess(pid=10, status=9)
    assert launcher_state(node(launcher=killed, joined=1), 0.0) == ("ended", "torchrun was killed by SIGKILL")
    ended = LauncherProcess(pid=10, status=256)
    assert launcher_state(node(launcher=ended, joined=1), 0.0) == ("ended", "torchrun ended with code 1")
    assert launcher_state(node(launcher=None, joined=2), 0.0)[0] == "ended"


ROUND = Round(attempt=1, nodes=("n0", "n1"), store_host="10.0.0.5", store_port=4000)
USUAL = Assignment(
    epoch=1,
    version=1,
    node="n0",
    role="member",
    attempt=1,
    stage="run",
    round=ROUND,
    resume=Resume(path="/data/../ckpt/step 10", step=10),
    prepare=(SetAside(path="/data/ckpt", why="torn"), Restore(copy="/data/a", path="/data/b")),
    checkpoint_folders=("/data/\u00e9\u00a0\n",),
    evidence=EvidenceRequest(number=1, budget_s=5.0, ranks=(0, 7)),
    wake=(3,),
)

SNAPSHOTS = SnapshotBring(
    attempt=1,
    step=20,
    world=4,
    first_rank=2,
    ranks=2,
    size_bytes=10,
    sources=(PartSource(owner="b", node="b", address="10.0.0.5", port=1),),
)

WRONG: list[dict[str, Any]] = [
    {"node": "n1"},
    {"attempt": -1},
    {"attempt": 1 << 60},
    {"stop_signal": "SIGSEGV"},
    {"stop_signal": "Signals"},
    {"grace_s": -1.0},
    {"grace_s": math.inf},
    {"grace_s": math.nan},
    {"round": msgspec.structs.replace(ROUND, store_host="-o x y")},
    {"round": msgspec.structs.replace(ROUND, store_port=-1)},
    {"round": msgspec.structs.replace(ROUND, store_port=1 << 16)},
    {"round": msgspec.structs.replace(ROUND, nodes=("n1",))},
    {"evidence": EvidenceRequest(number=1, budget_s=math.inf)},
    {"evidence": EvidenceRequest(number=1, budget_s=1.0, ranks=(-1,))},
    {"wake": (-1,)},
    {"wake": (1 << 40,)},
    {"resume": Resume(path="relative")},
    {"resume": Resume(path="/a\0b")},
    {"prepare": (SetAside(path="", why=""),)},
    {"prepare": (Restore(copy="relative", path="/a"),)},
    {"prepare": (SetAside(path="/a", why=""),) * 1000},
    {"checkpoint_folders": ("/" + "x" * 5000,)},
    {"space": SpaceWanted(number=1, folders=("relative",))},
    {"notices": ((1, "x"),) * 20_000},
    *[
        {"tiers": TierOrders(snapshots=wrong)}
        for wrong in (
            SnapshotOrders(ranks=1000),
            SnapshotOrders(ranks=-1),
            SnapshotOrders(first_rank=-1),
            SnapshotOrders(world=1 << 40),
            SnapshotOrders(keep=((1, 1),) * 100),
            SnapshotOrders(bring=msgspec.structs.replace(SNAPSHOTS, ranks=1000)),
            SnapshotOrders(bring=msgspec.structs.replace(SNAPSHOTS, size_bytes=-1)),
            SnapshotOrders(
                bring=msgspec.structs.replace(
                    SNAPSHOTS, sources=(PartSource(owner="b", node="b", address="-o x", port=1),)
                )
            ),
        )
    ],
]


def test_usual_assignments_are_within_bounds() -> None:
    assert out_of_bounds(USUAL, "n0") == ""
    orders = SnapshotOrders(attempt=1, from_step=5, first_rank=2, ranks=2, world=4, keep=((1, 3),), bring=SNAPSHOTS)
    assert out_of_bounds(msgspec.structs.replace(USUAL, tiers=TierOrders(snapshots=orders)), "n0") == ""
    adopted = Round(attempt=1, nodes=("n0",), store_host="", store_port=0)
    assert out_of_bounds(msgspec.structs.replace(USUAL, round=adopted), "n0") == ""


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_is_out_of_bounds_has_a_reason(wrong: dict[str, Any]) -> None:
    assert out_of_bounds(msgspec.structs.replace(USUAL, **wrong), "n0")


@pytest.mark.parametrize(
    "change",
    [
        {"prepare": [{"type": "run", "argv": ["rm"]}]},
        {"stage": "execute"},
        {"role": "root"},
        {"attempt": "1"},
        {"resume": {"path": 1}},
    ],
)
def test_an_unknown_kind_of_preparation_cannot_be_decoded(change: dict[str, Any]) -> None:
    told = msgspec.to_builtins(USUAL) | change
    with pytest.raises(msgspec.DecodeError):
        decode_controller_message(msgspec.json.encode(told))


def test_no_field_names_a_program_or_a_variable() -> None:
    """Whoever adds one reads this first: what runs comes from the node's own plan, never from the wire."""
    assert {field.name for field in msgspec.structs.fields(Assignment)} <= {
        *"epoch version node role attempt stage round resume prepare checkpoint_folders paused may_requeue".split(),
        *"evidence wake wake_number evidence_seen findings_seen grace_s stop_signal outcome notices".split(),
        *"space drain_request".split(),  # folders to look at; a reason for root's programs, who check it
        *"ask ask_number save_awaited".split(),  # one of three signals, for ranks that handle it
        "trace",  # a name without a path in it, checked by `out_of_bounds`; what is written is in the job folder
        "tests",  # a suite of ours, or a place in a group, checked by `out_of_bounds`; the plan names the Python
        "on_probation",
        "gpus",  # UUIDs, checked by `out_of_bounds`: those of the node's that its processes get, where it allows that
        "tiers",  # names below its own checkpoint folder, checked again by its mover; peers, who prove themselves
    }
