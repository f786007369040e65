"""Real checkpoints, made by the real libraries; then broken."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from recovery.formats import BUILT_IN, inspect, load_formats, recognize
from recovery.formats.files import Budget, inspect_torch_file, is_temporary, step_in_name
from tests.conftest import Later

torch = Later("torch")


def content(**more: object) -> dict[str, object]:
    model = {"w": torch.arange(1000.0), "b": torch.ones(7, dtype=torch.bfloat16)}
    return {"model": model, "optimizer": {"lr": 0.1}, **more}


def save(path: Path, **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content(**more), path)
    return path


def save_dcp(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.arange(5000.0), "v": torch.arange(300.0), "step": 5}, checkpoint_id=folder, no_dist=True)
    return folder


def save_hf(folder: Path, step: int) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file({"w": torch.arange(100.0)}, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"x": torch.ones(3)}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.5}))
    return folder


def save_megatron(root: Path, step: int) -> Path:
    folder = root / f"iter_{step:07d}"
    for rank in (0, 1):
        save(folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", iteration=step)
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def save_deepspeed(root: Path, step: int) -> Path:
    folder = root / f"global_step{step}"
    save(folder / "mp_rank_00_model_states.pt", global_steps=step, dp_world_size=2)
    for rank in (0, 1):
        save(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text(f"global_step{step}")
    return folder


def truncate(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)


class TestTorchFiles:
    def test_whole_file_with_step(self, tmp_path: Path) -> None:
        found = inspect(save(tmp_path / "ckpt.pt", iter_num=250))
        assert (found.format, found.complete, found.step, found.why) == ("torch_save", True, 250, "")
        assert found.size_bytes == (tmp_path / "ckpt.pt").stat().st_size

    @pytest.mark.parametrize("zipped", [True, False])
    def test_truncated_anywhere_is_incomplete(self, tmp_path: Path, zipped: bool) -> None:
        whole = tmp_path / "whole.pt"
        torch.save(content(step=3), whole, _use_new_zipfile_serialization=zipped)
        found = inspect(whole)
        assert found.complete
        assert found.step == 3
        data, cut = whole.read_bytes(), tmp_path / "cut.pt"
        for size in sorted({*range(0, len(data), 97), len(data) - 1, len(data) - 22}):
            cut.write_bytes(data[:size])
            found = inspect(cut)
            assert found is not None, size
            assert not found.complete, size
            assert found.why

    def test_any_flipped_byte_of_the_data_is_found(self, tmp_path: Path) -> None:
        path = save(tmp_path / "ckpt.pt")
        data = bytearray(path.read_bytes())
        offset = data.index(torch.arange(1000.0).numpy().tobytes()) + 1234
        data[offset] ^= 1
        path.write_bytes(data)
        assert "checksum" in inspect(path).why

    def test_zeroed_file(self, tmp_path: Path) -> None:
        path = tmp_path / "ckpt.pt"
        path.write_bytes(b"\0" * 10_000)
        assert "zeros" in inspect(path).why

    def test_checksums_that_were_not_computed(self, tmp_path: Path) -> None:
        torch.serialization.set_crc32_options(False)
        try:
            found = inspect(save(tmp_path / "ckpt.pt", iteration=9))
        finally:
            torch.serialization.set_crc32_options(True)
        assert found.complete
        assert found.step == 9

    def test_missing_tensor_data(self, tmp_path: Path) -> None:
        path = save(tmp_path / "whole.pt")
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "less.pt", "w") as new:
            for member in old.infolist():
                if not member.filename.endswith("data/0"):
                    new.writestr(member, old.read(member))
        assert "tensor data 0 is missing" in inspect_torch_file(tmp_path / "less.pt", Budget()).why

    @pytest.mark.parametrize("zipped", [True, False])
    def test_a_malicious_pickle_is_never_executed(self, tmp_path: Path, zipped: bool) -> None:
        class Evil:
            def __reduce__(self) -> tuple[object, ...]:
                return (os.system, (f"touch {tmp_path}/executed",))

        torch.save({"x": Evil(), "step": 4}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        (tmp_path / "b.pt").write_bytes(pickle.dumps({"x": Evil(), "step": 4}))
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Evil()))
        for name in ("a.pt", "b.pt"):
            assert inspect(tmp_path / name).step == 4
        assert inspect(tmp_path / "d") is not None
        assert not (tmp_path / "executed").exists()

    def test_other_files_are_not_taken_for_checkpoints(self, tmp_path: Path) -> None:
        for name, data in {
            "train.bin": b"\x01\x02" * 100,
            "empty.bin": b"",
            "notes.pt": b"hello, world",
            "readme.txt": b"",
            "a.tar": b"hello",
        }.items():
            (tmp_path / name).write_bytes(data)
            assert recognize(tmp_path / name) is None, name

    def test_lightning_name_and_content(self, tmp_path: Path) -> None:
        path = save(tmp_path / "epoch=0-step=100.ckpt", global_step=100, epoch=0)
        assert inspect(path).step == 100
        truncate(path, 700)
        found = inspect(path)
        assert found.step == 100
        assert not found.complete


class TestSafetensors:
    def test_whole_truncated_and_damaged(self, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        path = tmp_path / "model.safetensors"
        save_file({"w": torch.arange(50.0)}, path, metadata={"step": "12"})
        found = inspect(path)
        assert (found.complete, found.step) == (True, 12)
        data = path.read_bytes()
        for size in range(0, len(data), 7):
            path.write_bytes(data[:size])
            assert not inspect(path).complete, size
        path.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
        assert not inspect(path).complete


class TestFolders:
    def test_dcp(self, tmp_path: Path) -> None:
        folder = save_dcp(tmp_path / "step-100")
        found = inspect(folder)
        assert (found.format, found.complete, found.step) == ("dcp", True, 100)
        truncate(folder / "__0_0.distcp", 5000)
        assert "instead of" in inspect(folder).why

    def test_dcp_lacks_a_file(self, tmp_path: Path) -> None:
        folder = save_dcp(tmp_path / "step-100")
        shutil.move(folder / "__0_0.distcp", folder / "__1_0.distcp")
        assert "__0_0.distcp is missing" in inspect(folder).why

    def test_dcp_without_or_with_torn_metadata(self, tmp_path: Path) -> None:
        folder = save_dcp(tmp_path / "step-100")
        data = (folder / ".metadata").read_bytes()
        for size in range(0, len(data), 11):
            (folder / ".metadata").write_bytes(data[:size])
            assert not inspect(folder).complete, size
        (folder / ".metadata").unlink()
        assert "no .metadata" in inspect(folder).why

    @pytest.mark.parametrize(
        ("name", "why"), [("model.safetensors", "no weights"), ("trainer_state.json", "no trainer_state.json")]
    )
    def test_hugging_face(self, tmp_path: Path, name: str, why: str) -> None:
        folder = save_hf(tmp_path / "checkpoint-10", 10)
        found = inspect(folder)
        assert (found.format, found.complete, found.step) == ("hf", True, 10)
        (folder / name).unlink()
        assert why in inspect(folder).why

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
    def test_hugging_face_with_a_torn_file(self, tmp_path: Path, name: str) -> None:
        folder = save_hf(tmp_path / "checkpoint-10", 10)
        truncate(folder / name, 100)
        assert inspect(folder).why.startswith(f"{name}: ")

    def test_hugging_face_shards_and_staging(self, tmp_path: Path) -> None:
        folder = save_hf(tmp_path / "checkpoint-10", 10)
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        assert inspect(folder).why == "model-00002-of-00002.safetensors is missing (1 of 2 shards)"
        found = inspect(save_hf(tmp_path / "tmp-checkpoint-20", 20))
        assert (found.complete, found.step) == (False, 20)

    def test_hugging_face_lacks_a_random_state(self, tmp_path: Path) -> None:
        folder = save_hf(tmp_path / "checkpoint-10", 10)
        (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
        assert inspect(folder).why == "rng_state_1.pth is missing"

    def test_megatron(self, tmp_path: Path) -> None:
        older, newer = save_megatron(tmp_path, 100), save_megatron(tmp_path, 200)
        assert [(f.complete, f.step) for f in map(inspect, (older, newer)) if f] == [(True, 100), (True, 200)]
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("100\n")
        assert "still names 100" in inspect(newer).why
        shutil.rmtree(older / "mp_rank_00")
        assert inspect(older).why == "mp_rank_00 is missing"

    def test_a_folder_named_as_megatrons_by_somebody_else(self, tmp_path: Path) -> None:
        """Without a tracker file, which only Megatron writes, it is not incomplete."""
        save(tmp_path / "iter_0000020" / "state.pt", iteration=20)
        found = inspect(tmp_path / "iter_0000020")
        assert (found.format, found.complete, found.step) == ("folder", True, 20)

    def test_megatron_distributed_checkpoint(self, tmp_path: Path) -> None:
        folder = save_dcp(tmp_path / "iter_0000050")
        save(folder / "common.pt", iteration=50)
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("50")
        found = inspect(folder)
        assert (found.format, found.complete, found.step) == ("megatron", True, 50)
        truncate(folder / "common.pt", 10)
        assert not inspect(folder).complete

    def test_deepspeed(self, tmp_path: Path) -> None:
        folder = save_deepspeed(tmp_path, 100)
        found = inspect(folder)
        assert (found.format, found.complete, found.step) == ("deepspeed", True, 100)
        (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
        assert inspect(folder).why == "the part of data-parallel rank 1 is missing"

    def test_accelerate(self, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoint_3"
        for name in ("pytorch_model.bin", "optimizer.bin", "random_states_0.pkl"):
            save(folder / name)
        found = inspect(folder)
        assert (found.format, found.complete, found.step) == ("accelerate", True, None)
        (folder / "random_states_0.pkl").unlink()
        assert not inspect(folder).complete

    def test_any_folder_with_a_step(self, tmp_path: Path) -> None:
        save(tmp_path / "step_40" / "model.pt")
        found = inspect(tmp_path / "step_40")
        assert (found.format, found.complete, found.step) == ("folder", True, 40)
        (tmp_path / "step_50").mkdir()
        assert inspect(tmp_path / "step_50").why == "the folder is empty"


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-10", 10), ("iter_0000100", 100), ("global_step7", 7), ("epoch=0-step=100.ckpt", 100),
        ("ckpt_000250.pt", 250), ("step-3", 3), ("state_step001000.pt", 1000), ("00005.pt", 5),
        ("ckpt.pt", None), ("model_best.pt", None), ("llama3-8b.pt", None), ("epoch_3", None),
        ("checkpoint_epoch3.pt", None),
    ],
)  # fmt: skip
def test_step_in_name(name: str, step: int | None) -> None:
    assert step_in_name(name) == step


@pytest.mark.parametrize(
    "name", ["ckpt.pt.tmp", "tmp-checkpoint-10", ".tmpYhaGEJ", ".metadata.tmp", "step-10.tmp", "tmp.ckpt.pt"]
)
def test_temporary_names(name: str) -> None:
    assert is_temporary(name)


@pytest.mark.parametrize("name", ["template_ckpt.pt", ".metadata", ".gitattributes", "temperature.pt", "attempt-1.pt"])
def test_lasting_names(name: str) -> None:
    assert not is_temporary(name)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
@example(seed=309)  # ckpt.pt, cut after three bytes
def test_no_truncated_checkpoint_is_called_complete(tmp_path: Path, seed: int) -> None:
    """Any one file of any format cut short anywhere; json files too."""
    pristine = tmp_path / "pristine"
    if not pristine.exists():
        save(pristine / "ckpt.pt", step=5)
        save_dcp(pristine / "step-5")
        save_hf(pristine / "checkpoint-5", 5)
        save_megatron(pristine, 5)
        save_deepspeed(pristine, 5)
    dice = random.Random(seed)
    name = dice.choice(["ckpt.pt", "step-5", "checkpoint-5", "iter_0000005", "global_step5"])
    work = tmp_path / "work"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(pristine, work)
    path = work / name
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    victim = dice.choice([f for f in files if f.name != "training_args.bin"])
    truncate(victim, dice.randrange(victim.stat().st_size))
    assert not inspect(path).complete, f"{victim.name} of {victim.stat().st_size} bytes"


def test_no_damage_makes_a_format_raise(tmp_path: Path) -> None:
    """Bytes changed at random, mostly in headers: complete or not, but never an exception and never slow."""
    save(tmp_path / "ckpt.pt", step=5)
    torch.save({"w": torch.ones(9)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_dcp(tmp_path / "step-5")
    save_hf(tmp_path / "checkpoint-5", 5)
    dice = random.Random(5)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for _ in range(400):
        victim = dice.choice(files)
        data = victim.read_bytes()
        damaged = bytearray(data)
        for _ in range(dice.choice([1, 3, 20])):
            damaged[dice.randrange(min(len(data), dice.choice([400, len(data)])))] = dice.randrange(256)
        victim.write_bytes(damaged)
        top = tmp_path / victim.relative_to(tmp_path).parts[0]
        known = recognize(top)
        assert known is None or known.inspect(top).path == str(top)
        victim.write_bytes(data)


class TestPlugins:
    def test_a_broken_plugin_is_reported_and_skipped(self) -> None:
        points = [
            EntryPoint("missing", "no_such_module:Format", "unbroken.checkpoint_formats"),
            EntryPoint("wrong", "json:JSONDecoder", "unbroken.checkpoint_formats"),
            EntryPoint("good", "recovery.formats.folders:DcpFolder", "unbroken.checkpoint_formats"),
        ]
        formats, skipped = load_formats(points)
        assert [f.name for f in formats[: -len(BUILT_IN)]] == ["dcp"]
        assert len(skipped) == 2
        assert skipped[0].startswith("checkpoint format missing was skipped: ModuleNotFoundError")
