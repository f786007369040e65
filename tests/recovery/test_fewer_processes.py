"""Which process has which GPU, and when one of them may be left out."""

from __future__ import annotations

from typing import Any

import pytest

from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint, RankLayout
from recovery.cordon import Cordon
from recovery.fewer_processes import NodeGpus, bad_gpu, of_processes, why_not_loaded, with_processes

UUIDS = {f"0000:1{n}:00": f"GPU-0000000{n}-0000-0000-0000-00000000000{n}" for n in range(4)}
EVERY = tuple(UUIDS.items())
KNOWN = NodeGpus(gpus=EVERY)


@pytest.mark.parametrize(
    ("processes", "environment", "gpus", "found"),
    [
        (4, {}, UUIDS, EVERY),
        (4, {}, {}, ()),  # not looked at yet
        (4, {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, UUIDS, EVERY[::-1]),  # all of them: the order does not matter
        (2, {"CUDA_VISIBLE_DEVICES": "2, 3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, UUIDS, EVERY[2:]),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-00000001,GPU-00000003"}, UUIDS, (EVERY[1], EVERY[3])),
    ],
)
def test_the_gpus_of_the_processes(processes: int, environment: dict[str, str], gpus: Any, found: Any) -> None:
    assert of_processes(processes, environment, gpus) == NodeGpus(gpus=found)


@pytest.mark.parametrize(
    ("processes", "environment", "gpus"),
    [
        (8, {}, UUIDS),
        (2, {}, UUIDS),
        (None, {}, UUIDS),
        (1, {"CUDA_VISIBLE_DEVICES": "GPU-00000001"}, UUIDS),  # nothing would be left
        (2, {"CUDA_VISIBLE_DEVICES": "2,3"}, UUIDS),  # by speed, or by bus?
        (2, {"CUDA_VISIBLE_DEVICES": "1,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, UUIDS),
        (4, {"CUDA_VISIBLE_DEVICES": "0,1,2,7"}, UUIDS),
        (4, {"CUDA_VISIBLE_DEVICES": ""}, UUIDS),
        (1, {"CUDA_VISIBLE_DEVICES": "MIG-1234"}, UUIDS),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-0000000,GPU-00000003"}, UUIDS),  # which of them?
        (4, {}, {**UUIDS, "0000:11:00": ""}),
        (4, {"TORCH_ELASTIC_WORKER_IDENTICAL": "1"}, UUIDS),
    ],
)
def test_where_that_is_not_known_the_reason_is(processes: int | None, environment: dict[str, str], gpus: Any) -> None:
    told = of_processes(processes, environment, gpus)
    assert not told.gpus
    assert told.problem


ECC = {"failure_class": FailureClass.GPU_ECC_UNCORRECTABLE, "reason": "Xid 48"}


@pytest.mark.parametrize(
    "cordons",
    [
        [Cordon(node="n", culprit_gpu="0000:12:00", **ECC)],
        [Cordon(node="n", gpu="0000:12:00", **ECC)],
        [Cordon(node="n", gpu="GPU-00000002-0000", reason="fan", by="ann")],
        [Cordon(node="n", gpu="0000:12:00", **ECC), Cordon(node="n", gpu=EVERY[2][1], reason="fan", by="ann")],
    ],
)
def test_one_gpu_is_bad(cordons: list[Cordon]) -> None:
    bad = bad_gpu(cordons, KNOWN)
    assert bad is not None
    assert bad.uuid == EVERY[2][1]
    assert bad.others == (EVERY[0][1], EVERY[1][1], EVERY[3][1])


@pytest.mark.parametrize(
    "cordons",
    [
        [],
        [Cordon(node="n", reason="out", by="ann")],
        [Cordon(node="n", reason="out", by="ann", culprit_gpu="0000:12:00")],  # a person means the node
        [Cordon(node="n", culprit_gpu="0000:12:00", **{**ECC, "failure_class": FailureClass.NVLINK_ERROR})],
        [Cordon(node="n", culprit_gpu="", **ECC)],
        [Cordon(node="n", gpu="0000:99:00", **ECC)],
        [Cordon(node="n", gpu="GPU-", reason="fan", by="ann")],
        [Cordon(node="n", gpu="0000:12:00", **ECC), Cordon(node="n", gpu="0000:13:00", **ECC)],
        [Cordon(node="n", gpu="0000:12:00", **ECC), Cordon(node="n", reason="out", by="ann")],
    ],
)
def test_else_the_node_stays_out_as_a_whole(cordons: list[Cordon]) -> None:
    assert bad_gpu(cordons, KNOWN) is None


def test_a_checkpoint_may_want_as_many_ranks_as_wrote_it() -> None:
    def saved(**layout: Any) -> Checkpoint:
        return Checkpoint(path="/c/1", step=1, format="f", complete=True, layout=RankLayout(**layout))

    assert why_not_loaded(saved(world_size=16, fixed=True), 15)
    assert not why_not_loaded(saved(world_size=15, fixed=True), 15)
    assert not why_not_loaded(saved(world_size=16), 15)
    assert not why_not_loaded(Checkpoint(path="/c/1", step=1, format="f", complete=True), 15)
    assert not why_not_loaded(None, 15)


def test_only_torchruns_own_option_is_changed() -> None:
    argv = ["--rdzv-id", "x", "--nproc-per-node=8", "--nproc_per_node=4", "train.py", "--nproc-per-node=9"]
    assert with_processes(argv, 4, 7) == ["--nproc-per-node=7", "--rdzv-id", "x", "train.py", "--nproc-per-node=9"]
