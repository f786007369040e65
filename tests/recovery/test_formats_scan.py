"""Finding checkpoints again and again: what is read, what is not read again, what is still being written."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from recovery.checkpoint import Checkpoint
from recovery.formats import BUILT_IN
from recovery.formats.scan import CheckpointScanner
from recovery.quarantine import keep_copy
from tests.conftest import Later

torch = Later("torch")

LATER = 1e12
"""A time at which everything has stood still."""


class Counting:
    """The torch file format, counting how often it reads."""

    name = "torch_save"

    def __init__(self) -> None:
        self.read = 0

    def recognize(self, path: Path) -> bool:
        return BUILT_IN[-1].recognize(path)

    def inspect(self, path: Path) -> Checkpoint:
        self.read += 1
        return BUILT_IN[-1].inspect(path)


def save(path: Path, step: int, **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.arange(1000.0), "step": step, **more}, path)
    return path


def discover(folder: Path) -> list[Checkpoint]:
    return CheckpointScanner().scan([folder], time.time())


def steps(found: list[Checkpoint]) -> list[int | None]:
    return [checkpoint.step for checkpoint in found]


def test_an_unchanged_checkpoint_is_read_once(tmp_path: Path) -> None:
    counting = Counting()
    scanner = CheckpointScanner([counting])
    path = save(tmp_path / "ckpt.pt", 5)
    for now in range(10):
        assert steps(scanner.scan([tmp_path], LATER + now)) == [5]
    assert counting.read == 1
    save(path, 6)
    assert steps(scanner.scan([tmp_path], LATER + 11)) == [6]
    assert counting.read == 2
    path.unlink()
    assert scanner.scan([tmp_path], LATER + 12) == []


def test_the_newest_eight_of_many(tmp_path: Path) -> None:
    counting = Counting()
    first = tmp_path / "step_0.pt"
    torch.save({"w": torch.ones(3)}, first)
    for step in range(1, 300):
        shutil.copyfile(first, tmp_path / f"step_{step}.pt")
        os.utime(tmp_path / f"step_{step}.pt", (step, step))
    os.utime(first, (0, 0))
    found = CheckpointScanner([counting]).scan([tmp_path], LATER)
    assert [Path(c.path).name for c in found] == [f"step_{step}.pt" for step in range(299, 291, -1)]
    assert counting.read == 8


def test_the_newest_of_ten_thousand_is_found_for_little(tmp_path: Path) -> None:
    data = save(tmp_path / "elsewhere" / "x.pt", 5).read_bytes()
    folder = tmp_path / "out"
    folder.mkdir()
    for step in range(10_000):
        (folder / f"step_{step}.pt").touch()
    (folder / "step_9998.pt").write_bytes(data)
    os.utime(folder, (1, 1))
    scanner = CheckpointScanner()
    assert scanner.scan([folder], LATER)[0].path == str(folder / "step_9999.pt")
    began_s = time.thread_time()
    found = scanner.scan([folder], LATER)
    assert time.thread_time() - began_s < 0.02, "it has not changed"
    assert [Path(c.path).name for c in found if c.complete] == ["step_9998.pt"]
    assert scanner.cut_short == ""
    save(folder / "step_10000.pt", 10_000)
    assert scanner.scan([folder], LATER)[0].path == str(folder / "step_10000.pt")


def test_more_names_than_are_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.formats.scan.NAMES", 50)
    for step in range(60):
        (tmp_path / f"step_{step}.pt").touch()
    scanner = CheckpointScanner()
    scanner.scan([tmp_path], LATER)
    assert scanner.cut_short == str(tmp_path)


def test_it_reads_on_until_one_is_complete(tmp_path: Path) -> None:
    save(tmp_path / "step_1.pt", 1)
    for step in range(2, 15):
        (tmp_path / f"step_{step}.pt").touch()
    found = discover(tmp_path)
    assert len(found) == 8
    assert [c.step for c in found if c.complete] == [1]


def test_a_file_that_grows_is_complete_only_at_its_end(tmp_path: Path) -> None:
    data = save(tmp_path / "elsewhere" / "whole.pt", 7).read_bytes()
    folder = tmp_path / "out"
    folder.mkdir()
    scanner = CheckpointScanner()
    with open(folder / "ckpt.pt", "wb") as file:
        for begin in range(0, len(data), 101):
            file.write(data[begin : begin + 101])
            file.flush()
            found = scanner.scan([folder], LATER + begin)
            assert len(found) == 1
            assert found[0].complete == (begin + 101 >= len(data))


def test_a_writer_that_never_pauses(tmp_path: Path) -> None:
    """What is called complete while a real torch.save goes on at once, over and over, holds a whole step."""
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            save(tmp_path / "ckpt.pt", step)

    writer = threading.Thread(target=write)
    writer.start()
    scanner, newest = CheckpointScanner(), 0
    try:
        for now in range(150):
            for found in scanner.scan([tmp_path], LATER + now):
                if found.complete:
                    assert found.step is not None
                    assert found.step >= newest
                    newest = found.step
    finally:
        stop.set()
        writer.join()
    assert scanner.scan([tmp_path], LATER)[0].complete


def test_a_format_without_an_end_mark_must_stand_still(tmp_path: Path) -> None:
    path = save(tmp_path / "step_5" / "model.pt", 5)
    now = path.stat().st_mtime
    scanner = CheckpointScanner()
    assert [c.why for c in scanner.scan([tmp_path], now + 0.1)] == ["it changed less than a second ago"]
    assert [c.complete for c in scanner.scan([tmp_path], now + 1.2)] == [True]
    behind = CheckpointScanner()
    assert not behind.scan([tmp_path], now - 3600)[0].complete, "the storage's clock is ahead of ours"
    assert behind.scan([tmp_path], now - 3598)[0].complete


def test_a_folder_that_is_damaged_later_is_noticed_within_a_minute(tmp_path: Path) -> None:
    path = save(tmp_path / "step_5" / "model.pt", 5)
    scanner = CheckpointScanner()
    assert scanner.scan([tmp_path], LATER)[0].complete
    with open(path, "r+b") as file:
        file.truncate(100)
    assert not scanner.scan([tmp_path], LATER + 61)[0].complete


def test_the_folder_may_be_a_checkpoint_a_file_or_missing(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3" / "model.pt", 3)
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    assert [c.path for c in discover(tmp_path / "checkpoint-3")] == [str(tmp_path / "checkpoint-3")]
    assert steps(discover(save(tmp_path / "one.pt", 4))) == [4]
    assert discover(tmp_path / "missing") == []


def test_a_link_beside_its_target_is_not_a_second_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "ckpt_5.pt", 5)
    (tmp_path / "last.pt").symlink_to("ckpt_5.pt")
    save(tmp_path / "elsewhere" / "real.pt", 9)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "ckpt.pt").symlink_to(tmp_path / "elsewhere" / "real.pt")
    assert sorted(Path(c.path).name for c in discover(tmp_path)) == ["ckpt.pt", "ckpt_5.pt", "real.pt"]


def test_lightning_and_nested_folders(tmp_path: Path) -> None:
    save(tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "epoch=0-step=10.ckpt", 10)
    assert steps(discover(tmp_path)) == [10]


class TestFilesToCopy:
    def test_a_single_file_without_a_step_in_its_name(self, tmp_path: Path) -> None:
        scanner = CheckpointScanner()
        path = save(tmp_path / "ckpt.pt", 5)
        scanner.scan([tmp_path], LATER)
        assert scanner.files_to_copy() == [path]
        keep_copy(path)
        found = scanner.scan([tmp_path], LATER)
        assert [(c.step, bool(c.copy_of)) for c in found] == [(5, False), (5, True)]

    def test_a_file_that_is_called_the_last(self, tmp_path: Path) -> None:
        scanner = CheckpointScanner()
        last = save(tmp_path / "last.ckpt", 5)
        save(tmp_path / "epoch=0-step=5.ckpt", 5)
        scanner.scan([tmp_path], LATER)
        assert scanner.files_to_copy() == [last]

    def test_numbered_files_are_not_copied(self, tmp_path: Path) -> None:
        scanner = CheckpointScanner()
        save(tmp_path / "ckpt_5.pt", 5)
        scanner.scan([tmp_path], LATER)
        assert scanner.files_to_copy() == []

    def test_a_file_that_is_written_again(self, tmp_path: Path) -> None:
        scanner = CheckpointScanner()
        model, other = save(tmp_path / "model.pt", 5), save(tmp_path / "other.pt", 5)
        scanner.scan([tmp_path], LATER)
        assert scanner.files_to_copy() == []
        save(model, 6)
        scanner.scan([tmp_path], LATER)
        assert scanner.files_to_copy() == [model]
        assert other.exists()

    def test_a_copy_that_never_succeeds_is_tried_less_and_less(self, tmp_path: Path) -> None:
        scanner = CheckpointScanner()
        save(tmp_path / "ckpt.pt", 5)
        offered = []
        for second in range(700):
            scanner.scan([tmp_path], LATER + second)
            offered += [second] * len(scanner.files_to_copy())
        assert offered[:5] == [0, 1, 3, 7, 15]
        assert len(offered) <= 12

    def test_a_copy_of_every_version_that_can_be_had(self, tmp_path: Path) -> None:
        scanner = CheckpointScanner()
        for step in range(1, 20):
            path = save(tmp_path / "ckpt.pt", step)
            os.utime(path, (step, step))
            scanner.scan([tmp_path], LATER + step)
            assert scanner.files_to_copy() == [path]
            assert keep_copy(path) is not None


def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    save(tmp_path / "a" / "ckpt.pt", 5)
    (tmp_path / "a").chmod(0)
    try:
        assert discover(tmp_path) == [] or os.geteuid() == 0
    finally:
        (tmp_path / "a").chmod(0o700)
