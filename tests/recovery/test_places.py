"""Which folders hold checkpoints, from the files that a run wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.formats.places import file_written, guess_folders, may_be_checkpoint

PLACES = {
    "one file": (["out/ckpt.pt"], ["out"]),
    "numbered files": (["out/step_20.pt", "out/step_40.pt"], ["out"]),
    "a folder for each save": (["out/save40/state.pt"], ["out"]),
    "padded": (["out/step_0000040/state.pt"], ["out"]),
    "epochs": (["out/epoch_3/weights.pt"], ["out"]),
    "epoch and step": (["out/epoch=0-step=40.ckpt/checkpoint/mp_rank_00/x.pt"], ["out"]),
    "DCP": (["run/step-100/__0_0.distcp"], ["run"]),
    "Megatron": (["meg/iter_0000100/mp_rank_00/model_optim_rng.pt"], ["meg"]),
    "Trainer": (["hf/checkpoint-10/model-00001-of-00002.safetensors"], ["hf"]),
    "DeepSpeed": (["ds/global_step40/zero_pp_rank_0_mp_rank_00_optim_states.pt"], ["ds"]),
    "a folder of each role": (["rl/global_step_40/actor/model_world_size_8_rank_0.pt"], ["rl"]),
    "FSDP in accelerate": (["acc/checkpoint_0/pytorch_model_fsdp_0/__0_0.distcp"], ["acc"]),
    "weights and the best": (["out/weights/ckpt_40.pt", "out/best/model.pt"], ["out/weights", "out/best"]),
    "a word of their own, once": (["out/tick-20/w.pt"], ["out/tick-20"]),
    "a word of their own, again": (["out/tick-20/w.pt", "out/tick-40/w.pt"], ["out"]),
    "bare numbers, once": (["out/20/w.pt"], ["out/20"]),
    "bare numbers, again": (["out/20/w.pt", "out/40/w.pt"], ["out"]),
    "with a measure": (["out/e_1_loss_0.45/w.pt", "out/e_2_loss_0.31/w.pt"], ["out"]),
    "a run of several": (["runs/run7/ckpt.pt"], ["runs/run7"]),
    "a run of several, twice": (["runs/exp_7/ckpt.pt", "runs/exp_8/ckpt.pt"], ["runs/exp_7", "runs/exp_8"]),
    "a run by its date": (["o/2026-11-22/a.pt", "o/2026-11-23/a.pt"], ["o/2026-11-22", "o/2026-11-23"]),
    "a run by the model's size": (["runs/model_7b/step_40.pt"], ["runs/model_7b"]),
    "a run named after a stage": (["runs/llama-step2-sft/step_40.pt"], ["runs/llama-step2-sft"]),
    "numbered files of a stage": (["step2/out/ckpt_40.pt"], ["step2/out"]),
    "a version": (["logs/version_0/checkpoints/last.ckpt"], ["logs/version_0/checkpoints"]),
    "one for each rank": (["out/rank_0/s.pt", "out/rank_1/s.pt"], ["out/rank_0", "out/rank_1"]),
}


@pytest.mark.parametrize("name", PLACES)
def test_guess_folders(name: str) -> None:
    written, folders = PLACES[name]
    assert guess_folders([Path("/data", file) for file in written]) == [Path("/data", folder) for folder in folders]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ckpt.pt", True),
        ("ckpt.pt.tmp", True),
        ("ckpt.pt.tmp.4711", True),
        (".model.safetensors.partial", True),
        ("epoch=0-step=40.ckpt", True),
        ("train.log", False),
        ("ckpt.pt.json", False),
        ("notes.4711", False),
    ],
)
def test_names_of_files(name: str, known: bool) -> None:
    assert may_be_checkpoint(name) == known


def test_files_that_ranks_have_open(tmp_path: Path) -> None:
    assert file_written("last.ckpt.tmp (deleted)", tmp_path) == tmp_path / "last.ckpt.tmp"
    assert file_written("/dev/shm/x.bin", tmp_path) is None
    assert file_written("/data/train.log", tmp_path) is None
