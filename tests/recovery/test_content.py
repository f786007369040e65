"""What is seen of a checkpoint after its first complete sight, and whether its weights are finite."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recovery.checkpoint import Checkpoint, SetAside, choose
from recovery.formats import inspect
from recovery.formats.content import OPEN_COST, ContentLedger, ContentReader, Stopped
from recovery.formats.files import Budget
from recovery.formats.tensors import is_weight, non_finite, places_in
from recovery.formats.verify import NotVerifiable, find_checkpoints, verify
from tests.recovery.checkpoints.samples import NAMES, unpack


def is_good(found: Any) -> bool:
    return found.checkpoint.complete and not found.checkpoint.suspect


def first_sight(path: Path) -> ContentLedger:
    ledger = ContentLedger()
    ledger.look(str(path), ContentReader(), time.time())
    return ledger


def judged(path: Path, ledger: ContentLedger, *, again: bool = False) -> Checkpoint:
    ledger.look(str(path), ContentReader(), time.time(), again=again)
    found = inspect(path)
    assert found is not None
    return ledger.judged(found)


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def keep_times(path: Path, stat: os.stat_result) -> None:
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


class TestChanges:
    def test_bytes_that_change_under_the_same_times(self, tmp_path: Path) -> None:
        path = unpack("safetensors", tmp_path) / "model_20.safetensors"
        ledger = first_sight(path)
        stat = path.stat()
        flip(path, stat.st_size - 100)
        keep_times(path, stat)
        found = judged(path, ledger)
        assert (found.complete, found.changed) == (False, True)
        assert [type(one) for one in choose([found])[1]] == [SetAside]

    def test_a_disk_that_loses_a_bit_is_noticed_when_its_turn_comes(self, tmp_path: Path) -> None:
        """Not even the time of the inode changes: the record is made to say so."""
        path = unpack("safetensors", tmp_path) / "model_20.safetensors"
        ledger = first_sight(path)
        stat = path.stat()
        flip(path, 2000)
        keep_times(path, stat)
        record = ledger.records[str(path)]
        now = msgspec.structs.replace(record.files[""], ctime_ns=path.stat().st_ctime_ns)
        ledger.records[str(path)] = msgspec.structs.replace(record, files={"": now})
        assert judged(path, ledger).complete
        assert judged(path, ledger, again=True).changed

    def test_one_shard_that_is_written_anew(self, tmp_path: Path) -> None:
        root = unpack("dcp", tmp_path)
        ledger = first_sight(root / "step-20")
        shutil.copy(root / "step-10" / "__1_0.distcp", root / "step-20" / "__1_0.distcp")
        assert judged(root / "step-20", ledger).changed
        for name in ("__0_0.distcp", ".metadata"):
            shutil.copy(root / "step-10" / name, root / "step-20" / name)
        assert judged(root / "step-20", ledger).complete, "now it is another save"

    def test_what_is_copied_or_touched_is_the_same(self, tmp_path: Path) -> None:
        path = unpack("hf", tmp_path) / "checkpoint-20"
        ledger = first_sight(path)
        for file in path.iterdir():
            os.utime(file)
        (path / "README.md").write_text("added by a hook")
        assert judged(path, ledger).complete

    def test_whoever_writes_meanwhile_is_not_recorded(self, tmp_path: Path) -> None:
        path = unpack("safetensors", tmp_path) / "model_20.safetensors"

        def write(_: int) -> bool:
            os.utime(path, (1, 1))
            return True

        with pytest.raises(Stopped):
            ContentLedger().look(str(path), ContentReader(write), 0.0)

    @pytest.mark.parametrize("in_place", [True, False])
    def test_a_save_while_it_is_read_again_proves_nothing(self, tmp_path: Path, in_place: bool) -> None:
        path = unpack("safetensors", tmp_path) / "model_20.safetensors"
        ledger, other = first_sight(path), (path.parent / "model_10.safetensors").read_bytes()
        assert len(other) == path.stat().st_size

        def save(_: int) -> bool:
            if not in_place:
                path.unlink(missing_ok=True)
            path.write_bytes(other)
            return True

        with pytest.raises(Stopped):
            ledger.look(str(path), ContentReader(save), 0.0, again=True)
        assert judged(path, ledger).complete

    def test_a_file_is_opened_once_and_small_files_have_their_price(self, tmp_path: Path) -> None:
        path = unpack("safetensors", tmp_path) / "model_20.safetensors"
        charged: list[int] = []
        ContentReader(lambda size: charged.append(size) is None).blocks(str(path), path.stat().st_size, 64, 1 << 20)
        assert charged.count(OPEN_COST) == 1
        assert len(charged) > 5
        charged.clear()
        ContentReader(lambda size: charged.append(size) is None).why_non_finite(str(path))
        assert charged.count(OPEN_COST) == 1
        assert len(charged) > 2

    def test_it_stops_when_somebody_is_in_a_hurry(self, tmp_path: Path) -> None:
        path = unpack("safetensors", tmp_path) / "model_20.safetensors"
        ledger = ContentLedger()
        with pytest.raises(Stopped):
            ledger.look(str(path), ContentReader(lambda _: False), 0.0)
        assert not ledger.records


class TestNumbers:
    @pytest.mark.parametrize("name", NAMES)
    def test_honest_checkpoints_are_never_suspect(self, tmp_path: Path, name: str) -> None:
        """They hold a mask of -inf, an infinite best loss, and states of optimizers."""
        found, cut_short = find_checkpoints(unpack(name, tmp_path))
        assert len(found) >= 2
        assert not cut_short
        for path in found:
            assert not judged(path, first_sight(path)).suspect
            result = verify(path)
            assert result is not None
            assert is_good(result), result.checkpoint.why
            assert result.tensors or "legacy" in path.name

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
    def test_every_kind_of_number(self, dtype: str) -> None:
        torch = pytest.importorskip("torch")
        kind = getattr(torch, dtype)
        torch.manual_seed(1)
        numbers = torch.randn(999).to(kind)
        numbers[:4] = torch.tensor([0.0, -0.0, torch.finfo(kind).max, torch.finfo(kind).min], dtype=kind)
        numbers[4] = torch.finfo(kind).tiny
        assert non_finite(numbers.view(torch.uint8).numpy().tobytes(), dtype) == (0, 0)
        numbers[[7, 500]] = float("nan")
        numbers[[8, 9, 998]] = torch.tensor([float("inf"), float("-inf"), float("inf")], dtype=kind)
        assert non_finite(numbers.view(torch.uint8).numpy().tobytes(), dtype) == (2, 3)

    @pytest.mark.parametrize("name", ["safetensors", "torch_save", "dcp", "hf", "torchtitan", "deepspeed", "lightning"])
    def test_a_weight_that_is_nan(self, tmp_path: Path, name: str) -> None:
        """Planted in the files as they are; checksums are the formats' matter."""
        for path in find_checkpoints(unpack(name, tmp_path))[0]:
            if "legacy" in path.name:
                continue
            folders = [path] if path.is_file() or (path / ".metadata").exists() else sorted(path.iterdir())
            places = [place for one in folders if one.suffix != ".json" for place in places_in(str(one), Budget())]
            weights = [place for place in places if is_weight(place)]
            assert weights, path
            nan = {"float32": b"\0\0\xc0\x7f", "bfloat16": b"\xc0\x7f"}[weights[0].dtype]
            with open(weights[0].file, "r+b") as file:
                file.seek(weights[0].offset + 8)
                file.write(nan)
            assert "are NaN" in ContentReader().why_non_finite(str(path))

    def test_infinity_in_a_weight_and_in_a_mask_of_that_name(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        weights = torch.randn(64, 64)
        weights[3, 3] = float("inf")
        torch.save({"model": {"a.weight": weights}, "step": 1}, tmp_path / "ckpt_1.pt")
        torch.save({"model": {"a.weight": torch.full((64, 64), float("-inf")).triu(1)}}, tmp_path / "ckpt_2.pt")
        torch.save({"optimizer": {"a.weight": weights}, "model": {"bias": weights}}, tmp_path / "ckpt_3.pt")
        bad, *honest = [judged(tmp_path / f"ckpt_{n}.pt", first_sight(tmp_path / f"ckpt_{n}.pt")) for n in (1, 2, 3)]
        assert (bad.complete, bad.suspect) == (True, True)
        assert not any(one.suspect for one in honest)
        assert choose([bad, honest[0]])[0] == honest[0]


class TestVerify:
    def test_a_flipped_bit_in_a_tensor_of_a_distributed_checkpoint(self, tmp_path: Path) -> None:
        path = unpack("dcp", tmp_path) / "step-20"
        place = places_in(str(path), Budget())[-1]
        flip(Path(place.file), place.offset + 5)
        result = verify(path)
        assert result is not None
        assert not is_good(result)

    @pytest.mark.parametrize("kind", ["missing", "fifo", "device", "text", "empty folder", "loop"])
    def test_what_is_no_checkpoint(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "x.pt"
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path = Path("/dev/null")
        elif kind == "text":
            path.write_text("hello, world")
        elif kind == "empty folder":
            path = tmp_path
        elif kind == "loop":
            path.symlink_to(path)
        with pytest.raises(NotVerifiable):
            find_checkpoints(path)

    def test_a_folder_with_more_than_is_looked_at(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recovery.formats.scan.NAMES", 20)
        root = unpack("safetensors", tmp_path)
        for number in range(30):
            (root / f"model_{number}0.safetensors").touch()
        assert find_checkpoints(root)[1] == str(root)


class TestRemote:
    @pytest.mark.parametrize("name", ["megatron_dist", "nemo", "torch_save"])
    def test_of_memory_and_of_local_files(self, tmp_path: Path, name: str) -> None:
        fsspec = pytest.importorskip("fsspec")
        from recovery.formats.remote import fetch

        root = unpack(name, tmp_path / "there")
        fsspec.filesystem("memory").put(str(root), f"/{name}-run", recursive=True)
        for number, url in enumerate((f"memory://{name}-run", f"file://{root}")):
            into = tmp_path / str(number)
            into.mkdir()
            here = fetch(url, into)
            assert {path.name for path in find_checkpoints(here)[0]} == {
                path.name for path in find_checkpoints(root)[0]
            }
            assert all((result := verify(one)) is not None and is_good(result) for one in find_checkpoints(here)[0])

    def test_one_checkpoint_brings_the_tracker_beside_it(self, tmp_path: Path) -> None:
        pytest.importorskip("fsspec")
        from recovery.formats.remote import fetch

        root = unpack("megatron", tmp_path)
        (tmp_path / "into").mkdir()
        result = verify(fetch(f"file://{root}/iter_0000020/", tmp_path / "into"))
        assert result is not None
        assert is_good(result), result.checkpoint.why

    @pytest.mark.parametrize("url", ["memory://nothing-here", "nosuchscheme://x", "file:///nowhere/at/all"])
    def test_what_is_not_there(self, tmp_path: Path, url: str) -> None:
        pytest.importorskip("fsspec")
        from recovery.formats.remote import fetch

        with pytest.raises(NotVerifiable):
            fetch(url, tmp_path)

    def test_a_store_that_gives_no_answer(self) -> None:
        from recovery.formats.remote import within

        with pytest.raises(NotVerifiable):
            within(0.05, "s3://bucket/run", lambda: time.sleep(30))

    @pytest.mark.parametrize("path", ["b/run/../../etc/passwd", "b/run/a//b", "elsewhere/x", "b/run"])
    def test_names_that_lead_elsewhere(self, path: str) -> None:
        from recovery.formats.remote import _below

        with pytest.raises(NotVerifiable):
            _below(path, "b/run", "s3://b/run")
