"""Slow ranks joined to what was told of devices: same node, same GPU, or nobody's."""

from __future__ import annotations

import msgspec
import pytest

from diagnosis.kernel.rules import KernelEvent
from diagnosis.signals import Frame, RankStack
from diagnosis.story import LauncherFailure, LineMatch, LogStory, Slowness
from diagnosis.taxonomy import FailureClass
from diagnosis.trends import devices

NODES = {rank: f"n{rank // 4}" for rank in range(16)}
SLOW = Slowness(
    kind="rank", ranks=(6,), cost_percent=22.0, why="rank 6 took 1.28 times as long", confidence=0.85, node="n1"
)
NCCL = LogStory(source="rank6.log", rank=6, node="n1", gpus={6: (2, "0000:c1:00")})


def match(
    device: str = "", rank: int | None = None, failure_class: FailureClass = FailureClass.GPU_THERMAL_POWER
) -> LineMatch:
    return LineMatch(
        rule="gpu_hw_slowdown",
        role="cause",
        failure_class=failure_class,
        confidence=0.8,
        severity="error",
        scope="gpu",
        text="the hardware slows the GPU down (thermal) in 90 % of 600 s",
        line=3,
        rank=rank,
        fields={"device": device} if device else {},
    )


def told(node: str = "n1", *matches: LineMatch) -> LogStory:
    return LogStory(source="health.log", node=node, kind="kernel", matches=matches)


@pytest.mark.parametrize(
    ("stories", "gpu"),
    [
        ([told("n1", match("0000:c1:00", rank=6))], "0000:c1:00"),
        ([told("n1", match("0000:c1:00")), NCCL], "0000:c1:00"),
        ([told("n1", match("2"))], "2"),
        ([told("n1", match("2")), NCCL], "0000:c1:00"),
        ([told("n1", match("0000:c1:00"))], "0000:c1:00"),
    ],
)
def test_the_gpu_of_the_slow_rank(stories: list[LogStory], gpu: str) -> None:
    (found,) = devices.named([SLOW], stories, NODES)

    assert (found.kind, found.gpu, found.because, found.node) == ("gpu", gpu, FailureClass.GPU_THERMAL_POWER, "n1")
    assert found.why.endswith("rank 6 took 1.28 times as long")
    assert gpu in found.why
    assert "slowed down by heat or power (the hardware slows the GPU down (thermal)" in found.why
    assert found.evidence[0].source == "health.log"


@pytest.mark.parametrize(
    "stories",
    [
        [],
        [told("n2", match("0000:c1:00"))],
        [told("n1", match("3"))],
        [told("n1", match("0000:c2:00")), NCCL],
        [told("n1", match("0000:c1:00", rank=5))],
        [told("n1", match("0000:c1:00"), match("0000:c2:00"))],
        [told("n1", match("2", failure_class=FailureClass.GPU_OOM))],
    ],
)
def test_another_gpu_is_not_the_reason(stories: list[LogStory]) -> None:
    assert devices.named([SLOW], stories, NODES) == (SLOW,)


def test_the_only_gpu_of_the_node_that_is_told_of_is_less_sure_than_its_own() -> None:
    (own,) = devices.named([SLOW], [told("n1", match("0000:c1:00")), NCCL], NODES)
    (beside,) = devices.named([SLOW], [told("n1", match("0000:c1:00"))], NODES)

    assert (own.confidence, beside.confidence) == (devices.SURE, SLOW.confidence)
    assert beside.why.startswith("GPU 0000:c1:00 of the node of rank 6 is slowed down")


def test_ranks_of_a_node_of_which_some_are_not_known_have_no_order() -> None:
    nodes = {rank: node for rank, node in NODES.items() if rank != 4}

    (beside,) = devices.named([SLOW], [told("n1", match("2"))], nodes)
    launcher = LogStory(source="torchrun.log", launcher=(LauncherFailure(rank=6, line=1, text="", local_rank=2),))
    (own,) = devices.named([SLOW], [told("n1", match("2")), launcher], nodes)

    assert beside.why.startswith("GPU 2 of the node of rank 6 is")
    assert own.why.startswith("rank 6's GPU 2 is")


def test_a_lost_lane_that_the_kernel_tells() -> None:
    event = KernelEvent(
        kind="aer",
        rule="aer_corrected",
        failure_class=FailureClass.PCIE_ERROR,
        severity="warning",
        scope="node",
        text="pcieport: AER: Corrected error received: 0000:c1:00.0",
        line=9,
        device="0000:c1:00",
    )
    (found,) = devices.named([SLOW], [LogStory(source="dmesg", node="n1", kind="kernel", events=(event,)), NCCL], NODES)

    assert (found.gpu, found.because) == ("0000:c1:00", FailureClass.PCIE_ERROR)


def test_a_port_of_a_slow_links_nodes() -> None:
    link = msgspec.structs.replace(SLOW, kind="link", ranks=(1, 6), node="")
    event = KernelEvent(
        kind="mlx5",
        rule="mlx5_link_down",
        failure_class=FailureClass.NCCL_NETWORK,
        severity="error",
        scope="fabric",
        text="mlx5_core 0000:5e:00.0: Port: 1 Link DOWN",
        line=9,
        device="mlx5_2",
    )
    kernel = LogStory(source="dmesg", node="n1", kind="kernel", events=(event,))

    (found,) = devices.named([link], [kernel], NODES)

    assert (found.kind, found.node, found.ranks) == ("link", "n1", (1, 6))
    assert "mlx5_2 of n1 (mlx5_core 0000:5e:00.0: Port: 1 Link DOWN)" in found.why
    assert devices.named([link], [msgspec.structs.replace(kernel, node="n3")], NODES) == (link,)


def stack(rank: int, function: str, file: str) -> RankStack:
    return RankStack(rank=rank, frames=(Frame(function=function, file=file, line=1),))


def test_a_late_rank_in_its_data_loader_is_an_input_stall() -> None:
    data = stack(6, "_next_data", "torch/utils/data/dataloader.py")
    waiting = [stack(rank, "all_reduce", "torch/distributed/distributed_c10d.py") for rank in (1, 2, 3)]

    (found,) = devices.named([SLOW], [told("n1", match("0000:c1:00", rank=6))], NODES, [data, *waiting])

    assert (found.kind, found.ranks) == ("input", (6,))
    assert found.why == "rank 6 is in its data loader by the stack: rank 6 took 1.28 times as long"
    computing = stack(6, "forward", "model.py")
    also = stack(1, "_next_data", "torch/utils/data/dataloader.py")
    for stacks in ([data], [computing, *waiting], [data, computing, *waiting], [data, also, *waiting]):
        assert devices.named([SLOW], [], NODES, stacks) == (SLOW,)
