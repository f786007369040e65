"""What is read of checkpoints that the real libraries wrote: format, step, and over how many ranks they are spread."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.checkpoint import RankLayout
from recovery.formats import inspect
from recovery.formats.folders import INCOMPLETE_MARK
from tests.recovery.checkpoints.samples import unpack

TWO = RankLayout(world_size=2)
OF_MEGATRON = RankLayout(world_size=2, tensor=2, pipeline=1, data=1)
NEMO_2 = "llama--val_loss=1.50-step=20-consumed_samples=640"


@pytest.mark.parametrize(
    ("name", "path", "kind", "layout"),
    [
        ("torch_save", "ckpt_000020.pt", "torch_save", None),
        ("torch_save", "legacy_step_000020.pth", "torch_save", None),
        ("safetensors", "model_20.safetensors", "safetensors", None),
        ("dcp", "step-20", "dcp", TWO),
        ("torchtitan", "checkpoint/step-20", "dcp", TWO),
        ("hf", "checkpoint-20", "hf", TWO),
        ("lightning", "epoch=0-step=20.ckpt", "torch_save", None),
        ("lightning_sharded", "epoch=0-step=20.ckpt", "dcp", TWO),
        ("megatron", "iter_0000020", "megatron", RankLayout(world_size=8, tensor=2, pipeline=2, data=2)),
        ("megatron_dist", "iter_0000020", "megatron", OF_MEGATRON),
        ("nemo", NEMO_2, "nemo", OF_MEGATRON),
        ("nemo", "llama-step=20.nemo", "nemo", None),
        ("deepspeed", "global_step20", "deepspeed", RankLayout(world_size=2, tensor=1, data=2, fixed=True)),
        ("deepspeed3", "global_step20", "deepspeed", RankLayout(world_size=2, tensor=1, data=2, fixed=True)),
    ],
)
def test_whole_checkpoints(tmp_path: Path, name: str, path: str, kind: str, layout: RankLayout | None) -> None:
    found = inspect(unpack(name, tmp_path) / path)
    assert found is not None
    assert (found.format, found.step, found.complete, found.why) == (kind, 20, True, "")
    assert found.layout == layout


def test_accelerate_tells_its_ranks_and_no_step(tmp_path: Path) -> None:
    found = inspect(unpack("accelerate", tmp_path) / "checkpoints" / "checkpoint_1")
    assert found is not None
    assert (found.complete, found.step, found.layout) == (True, None, TWO)


@pytest.mark.parametrize(
    ("name", "path", "missing"),
    [
        ("megatron", "iter_0000020", "mp_rank_01_001/distrib_optim.pt"),
        ("megatron_dist", "iter_0000020", "metadata.json"),
        ("megatron_dist", "iter_0000020", "common.pt"),
        ("nemo", NEMO_2, "weights/metadata.json"),
        ("nemo", NEMO_2, "weights/__1_0.distcp"),
        ("deepspeed", "global_step20", "mp_rank_00_model_states.pt"),
        ("deepspeed3", "global_step20", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("lightning_sharded", "epoch=0-step=20.ckpt", "meta.pt"),
        ("accelerate", "checkpoints/checkpoint_1", "random_states_0.pkl"),
        ("hf", "checkpoint-20", "optimizer.pt"),
    ],
)
def test_a_file_that_the_format_demands(tmp_path: Path, name: str, path: str, missing: str) -> None:
    folder = unpack(name, tmp_path) / path
    (folder / missing).unlink()
    found = inspect(folder)
    assert found is not None
    assert not found.complete


def test_saves_that_their_writers_mark_as_unfinished(tmp_path: Path) -> None:
    trainer = unpack("hf", tmp_path) / "checkpoint-20"
    (trainer / INCOMPLETE_MARK).touch()
    nemo = unpack("nemo", tmp_path) / NEMO_2
    nemo.with_name(nemo.name + "-unfinished").touch()
    assert [found.complete for found in map(inspect, (trainer, nemo)) if found is not None] == [False, False]


def test_a_part_of_another_step(tmp_path: Path) -> None:
    root = unpack("megatron", tmp_path)
    part = "mp_rank_01_000/model_optim_rng.pt"
    (root / "iter_0000020" / part).write_bytes((root / "iter_0000010" / part).read_bytes())
    found = inspect(root / "iter_0000020")
    assert found is not None
    assert not found.complete
