"""A node goes on without its bad GPU: where no other node can take its place, and only where that is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.incident import Culprit, Verdict
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint, RankLayout
from recovery.fewer_processes import NodeGpus
from supervisor import messages as m

UUIDS = tuple(f"GPU-{n:08d}-0000-0000-0000-000000000000" for n in range(2))
GPUS = NodeGpus(gpus=(("0000:10:00", UUIDS[0]), ("0000:11:00", UUIDS[1])))


def ecc(node: str = "b", gpu: str = "0000:11:00", **more: Any) -> Verdict:
    usual = {
        "failure_class": FailureClass.GPU_ECC_UNCORRECTABLE,
        "confidence": 0.95,
        "why": "Xid 48",
        "action": "cordon_gpu_and_restart",
    }
    return Verdict(culprits=(Culprit(node=node, rank=3, gpu=gpu),), **{**usual, **more})


@pytest.fixture
def pair(running: Any) -> Any:
    """Nodes a and b, two GPUs each; the verdict is on b's second GPU."""

    def start(*names: str, verdict: Verdict | None = None, known: str = "ab", **more: Any) -> Any:
        spec = {"fewer_processes": True, "gather_s": 30.0, "nodes_min": 2, "nodes_max": 2, **more}
        driver = running(*(names or ("a", "b")), verdict=verdict or ecc(), **spec)
        for name in known:
            driver.tell(m.GpusSeen, node=name, gpus=GPUS)
        return driver

    return start


def offer(driver: Any, node: str, processes: int, port: int = 2) -> None:
    told = m.StoreOffer(host=node, port=port, local_world_size=processes)
    driver.tell(m.LauncherReady, node=node, attempt=driver.number, offer=told)


def start_with_fewer(driver: Any) -> dict[str, Any]:
    """What is said, before any rank starts."""
    driver.crash("b", 3)
    driver.fire("gather")
    said = driver.loud
    offer(driver, "a", 2)
    offer(driver, "b", 1)
    return said


def come_up(driver: Any, step: int | None = 9) -> None:
    driver.tell(m.WorkersStarted, node="a", attempt=driver.number, ranks=(0, 1))
    driver.tell(m.WorkersStarted, node="b", attempt=driver.number, ranks=(2,))
    driver.tell(m.Progressed, attempt=driver.number, step=step, first=True)


def test_the_node_goes_on_without_its_bad_gpu(pair: Any) -> None:
    driver = pair()
    driver.crash("b", 3)
    assert driver.job.incidents.log.newest.plan.kind == "restart"
    assert driver.told["b"].role == "member"
    assert driver.told["b"].gpus == UUIDS[:1]
    assert driver.told["a"].gpus == ()
    assert driver.state == "RECOVERING"  # another node may come within the time to gather
    driver.fire("gather")
    assert driver.state == "STARTING"
    said = driver.loud["fewer_processes"]
    assert (said["node"], said["gpu"], said["processes"], said["of"]) == ("b", UUIDS[1], 1, 2)
    assert (said["world"], said["full"]) == (3, 4)
    offer(driver, "a", 2)
    offer(driver, "b", 2, port=1)  # of the launcher before
    assert driver.job.attempt.round is None
    offer(driver, "b", 1)
    assert driver.job.attempt.world_size == 3
    come_up(driver)
    assert driver.state == "RUNNING"
    node = next(one for one in driver.job.view().nodes if one.node == "b")
    assert node.state == "ACTIVE"
    assert UUIDS[1] in node.why
    assert driver.replayed().view(driver.now) == driver.job.view(driver.now)


@pytest.mark.parametrize(
    "more",
    [
        {"fewer_processes": False},
        {"known": ""},
        {"verdict": ecc(failure_class=FailureClass.NVLINK_ERROR)},
        {"verdict": ecc(gpu="0000:99:00")},
        {"verdict": ecc(gpu="")},
    ],
)
def test_else_it_goes_on_as_it_is(pair: Any, more: dict[str, Any]) -> None:
    driver = pair(**more)
    driver.crash("b", 3)
    assert driver.state == "STARTING"
    assert driver.told["b"].gpus == ()
    assert not driver.job.nodes.cordoned()


def test_two_bad_gpus_of_a_node_are_too_many(pair: Any) -> None:
    both = (Culprit(node="b", gpu="0000:10:00"), Culprit(node="b", gpu="0000:11:00"))
    driver = pair("a", "b", "c", verdict=Verdict(**{**_fields(ecc()), "culprits": both}))
    driver.crash("b", 3)
    assert driver.told["b"].role == "excluded"
    driver.tell(m.NodeLost, node="c", silent_s=20.0)
    assert driver.told["b"].role == "excluded"  # although only one of them is written down


def _fields(verdict: Verdict) -> dict[str, Any]:
    return {name: getattr(verdict, name) for name in verdict.__struct_fields__}


def test_a_spare_takes_the_nodes_place(pair: Any) -> None:
    driver = pair("a", "b", "c", known="abc")
    driver.crash("b", 3)
    assert driver.job.attempt.members == ("a", "c")
    assert driver.told["b"].role == "excluded"
    assert driver.state == "STARTING"


def test_it_comes_in_time(pair: Any) -> None:
    driver = pair()
    driver.crash("b", 3)
    driver.join("c")
    assert driver.job.attempt.members == ("a", "c")
    assert driver.told["b"].role == "excluded"
    assert driver.state == "STARTING"


def test_a_checkpoint_that_wants_all_ranks_keeps_the_node_whole(pair: Any) -> None:
    driver = pair()
    fixed = RankLayout(world_size=4, fixed=True)
    saved = Checkpoint(path="/c/1", step=1, format="deepspeed", complete=True, modified_at=driver.now, layout=fixed)
    driver.tell(m.CheckpointsSeen, node="a", checkpoints=(saved,))
    driver.crash("b", 3)
    assert driver.told["b"].gpus == ()
    assert not driver.job.nodes.cordoned()


def test_uncordoned_it_is_whole_again_with_the_next_attempt(pair: Any) -> None:
    driver = pair()
    start_with_fewer(driver)
    come_up(driver)
    driver.order("uncordon", "b")
    assert driver.told["b"].gpus == UUIDS[:1]  # this attempt has begun with it
    driver.order("restart")
    assert driver.told["b"].gpus == ()
    offer(driver, "a", 2)
    offer(driver, "b", 1, port=2)  # of the launcher before
    assert driver.job.attempt.round is None
    offer(driver, "b", 2, port=3)
    assert driver.job.attempt.world_size == 4
    assert not driver.job.attempt.without


def test_without_a_step_it_is_not_tried_again(pair: Any) -> None:
    driver = pair()
    start_with_fewer(driver)
    driver.tell(m.WorkersStarted, node="a", attempt=driver.number, ranks=(0, 1))
    driver.tell(m.WorkersStarted, node="b", attempt=driver.number, ranks=(2,))
    driver.verdict = Verdict(
        failure_class=FailureClass.CONFIG_OR_ARGUMENT_ERROR,
        culprits=(),
        confidence=0.9,
        why="global batch",
        action="stop",
    )
    driver.crash("b", 2)
    assert driver.job.incidents.log.newest.plan.kind == "restart"
    assert driver.state == "RECOVERING"
    assert driver.told["b"].role == "excluded"
    assert driver.job.attempt.members == ("a",)
    driver.order("uncordon", "b")
    assert driver.told["b"].role == "member"
    assert driver.told["b"].gpus == ()
    driver.order("cordon", f"b/{UUIDS[0]}")
    assert driver.told["b"].gpus == UUIDS[1:]  # that the node was given back counts for this, too


def test_uncordoned_before_it_starts_it_waits_for_the_launcher_of_all(pair: Any) -> None:
    driver = pair()
    driver.crash("b", 3)
    offer(driver, "a", 2)
    offer(driver, "b", 1)
    driver.order("uncordon", "b")
    assert driver.state == "STARTING"
    assert driver.job.attempt.round is None
    offer(driver, "b", 2, port=3)
    assert driver.job.attempt.world_size == 4


def test_a_node_that_is_blamed_again_is_left_out(pair: Any) -> None:
    driver = pair("a", "b", nodes_min=1)
    start_with_fewer(driver)
    come_up(driver)
    driver.verdict = ecc(gpu="0000:10:00")
    driver.crash("b", 2)
    assert driver.told["b"].role == "excluded"
    assert driver.job.attempt.members == ("a",)


def test_an_operator_cordons_a_gpu(pair: Any) -> None:
    driver = pair()
    driver.order("cordon", f"b/{UUIDS[0]}")
    assert driver.loud["gpu_in_use"]["gpu"] == UUIDS[0]
    assert driver.told["b"].role == "member"
    driver.order("restart")
    assert driver.told["b"].gpus == UUIDS[1:]
    driver.order("cordon", "b/0000:99:00")
    assert driver.told["b"].role == "excluded"  # which GPU that is nobody knows


def test_the_map_of_gpus_holds_until_the_node_is_lost(pair: Any) -> None:
    driver = pair()
    driver.tell(m.GpusSeen, node="b", gpus=NodeGpus(problem="an agent that came after the GPU had gone"))
    others = (GPUS.gpus[1], ("0000:12:00", UUIDS[0].replace("0", "9")))
    driver.tell(m.GpusSeen, node="b", gpus=NodeGpus(gpus=others))  # numbered anew without the one that has gone
    driver.order("cordon", f"b/{UUIDS[0]}")
    assert "gpu_in_use" in driver.loud
    driver.tell(m.NodeLost, node="b", silent_s=20.0)
    driver.join("b")
    assert driver.job.nodes.bad_gpu("b") is None
