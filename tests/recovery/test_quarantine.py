from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import recovery.quarantine
from recovery.checkpoint import INCOMPLETE, Checkpoint, PutBack, Restore, ResumeSituation, SetAside, choose
from recovery.formats import inspect
from recovery.formats.scan import CheckpointScanner
from recovery.quarantine import (
    PreparationError,
    keep_copy,
    mend_pointers,
    prepare,
    read_records,
    restore,
    set_aside,
    undo,
)
from tests.conftest import Later

torch = Later("torch")


def save(path: Path, step: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.arange(1000.0), "iter_num": step}, path)
    return path


def tear(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def found(folder: Path) -> list[Checkpoint]:
    return CheckpointScanner().scan([folder], time.time(), at_rest=True)


def recover(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    chosen, preparations = choose(found(folder))
    return chosen, prepare(preparations)


class TestSetAside:
    def test_of_torn_files_of_one_name_one_is_kept(self, tmp_path: Path) -> None:
        """On a full disk each attempt leaves another."""
        path = tmp_path / "ckpt-10.pt"
        for _ in range(3):
            tear(save(path, 10))
            moved = set_aside(path, INCOMPLETE + "it is torn").moved_to
        assert sorted(p.name for p in Path(moved).parent.iterdir()) == ["ckpt-10.pt", "ckpt-10.pt.why.json"]
        save(path, 10)
        assert set_aside(path, "rolled back").moved_to != moved
        save(tmp_path / "ckpt-20.pt", 20)
        whole = set_aside(tmp_path / "ckpt-20.pt", "rolled back").moved_to
        tear(save(tmp_path / "ckpt-20.pt", 20))
        assert set_aside(tmp_path / "ckpt-20.pt", INCOMPLETE + "it is torn").moved_to != whole, "what is whole stays"

    def test_moves_explains_and_can_be_undone(self, tmp_path: Path) -> None:
        path = save(tmp_path / "ckpt-10.pt", 10)
        first = Path(set_aside(path, "torn").moved_to)
        second = Path(set_aside(save(tmp_path / "ckpt-10.pt", 10), "again").moved_to)
        assert not path.exists()
        assert first != second
        records = read_records(tmp_path)
        assert [record.why for record in records] == ["torn", "again"]
        undo(records[0])
        assert path.exists()
        with pytest.raises(PreparationError, match="is there again"):
            undo(records[1])

    def test_aside_is_out_of_sight(self, tmp_path: Path) -> None:
        set_aside(save(tmp_path / "ckpt-10.pt", 10), "torn")
        assert found(tmp_path) == []


class TestPointers:
    def megatron(self, root: Path, step: int) -> Path:
        save(root / f"iter_{step:07d}" / "mp_rank_00" / "model_optim_rng.pt", step)
        (root / "latest_checkpointed_iteration.txt").write_text(str(step))
        return root / f"iter_{step:07d}"

    def test_megatron_goes_back_to_the_one_before(self, tmp_path: Path) -> None:
        self.megatron(tmp_path, 100)
        torn = self.megatron(tmp_path, 200)
        tear(torn / "mp_rank_00" / "model_optim_rng.pt")
        chosen, done = recover(tmp_path)
        assert chosen.step == 100
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "100"
        assert not torn.exists()
        assert len(done) == 2
        for record in reversed(read_records(tmp_path)):
            undo(record)
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "200"
        assert torn.exists()

    def test_megatron_with_nothing_left_starts_afresh(self, tmp_path: Path) -> None:
        tear(self.megatron(tmp_path, 100) / "mp_rank_00" / "model_optim_rng.pt")
        chosen, _ = recover(tmp_path)
        assert chosen is None
        assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()

    def test_a_tracker_that_names_something_else_that_is_there_stays(self, tmp_path: Path) -> None:
        (tmp_path / "release").mkdir()
        torn = self.megatron(tmp_path, 100)
        tear(torn / "mp_rank_00" / "model_optim_rng.pt")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
        recover(tmp_path)
        assert not torn.exists()
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"

    @pytest.mark.parametrize("text", ["", "global_step300"])
    def test_deepspeed_with_a_torn_or_stale_tracker(self, tmp_path: Path, text: str) -> None:
        save(tmp_path / "global_step100" / "mp_rank_00_model_states.pt", 100)
        (tmp_path / "latest").write_text(text)
        chosen, done = recover(tmp_path)
        assert chosen.step == 100
        assert (tmp_path / "latest").read_text() == "global_step100"
        assert len(done) == 1
        assert recover(tmp_path)[1] == []

    def test_a_strangers_file_called_latest_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "latest").write_text("run-42")
        save(tmp_path / "ckpt-5.pt", 5)
        tear(save(tmp_path / "ckpt-6.pt", 6))
        recover(tmp_path)
        assert (tmp_path / "latest").read_text() == "run-42"

    def test_a_link_follows(self, tmp_path: Path) -> None:
        save(tmp_path / "ckpt_10.pt", 10)
        tear(save(tmp_path / "ckpt_20.pt", 20))
        (tmp_path / "last.pt").symlink_to("ckpt_20.pt")
        (tmp_path / "other").symlink_to("nowhere")
        chosen, done = recover(tmp_path)
        assert chosen is not None
        assert os.readlink(tmp_path / "last.pt") == "ckpt_10.pt"
        assert os.readlink(tmp_path / "other") == "nowhere"
        assert len(done) == 2
        for record in reversed(read_records(tmp_path)):
            undo(record)
        assert os.readlink(tmp_path / "last.pt") == "ckpt_20.pt"
        assert (tmp_path / "last.pt").exists()

    def test_nothing_to_mend(self, tmp_path: Path) -> None:
        assert mend_pointers(tmp_path, None) == []


class TestCopies:
    def test_keeps_the_two_newest(self, tmp_path: Path) -> None:
        path = tmp_path / "ckpt.pt"
        for step in (10, 20, 30):
            save(path, step)
            os.utime(path, (step, step))
            made = keep_copy(path)
            assert (made.step, made.copy_of) == (step, str(path))
        assert keep_copy(path) is None, "this version is kept already"
        copies = [f for f in found(tmp_path) if f.copy_of]
        assert [(f.step, f.copy_of) for f in copies] == [(30, str(path)), (20, str(path))]

    def test_a_torn_file_is_not_copied(self, tmp_path: Path) -> None:
        path = save(tmp_path / "ckpt.pt", 10)
        tear(path)
        assert keep_copy(path) is None
        assert list((tmp_path / ".unbroken-copies" / "ckpt.pt").iterdir()) == []

    def test_one_node_copies_at_a_time(self, tmp_path: Path) -> None:
        path = save(tmp_path / "ckpt.pt", 10)
        home = tmp_path / ".unbroken-copies" / "ckpt.pt"
        (home / ".tmp-another-node-1").mkdir(parents=True)
        assert keep_copy(path) is None
        os.utime(home / ".tmp-another-node-1", (1, 1))
        leftover = home / f".tmp-{os.uname().nodename}-999999999"
        leftover.mkdir()
        assert keep_copy(path) is not None
        assert not leftover.exists()

    def test_a_file_that_changes_meanwhile_is_not_copied(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = save(tmp_path / "ckpt.pt", 10)
        copy = shutil.copyfile

        def copy_slowly(*arguments: object) -> None:
            copy(*arguments)  # type: ignore[arg-type]
            save(path, 20)

        monkeypatch.setattr(shutil, "copyfile", copy_slowly)
        assert keep_copy(path) is None
        assert keep_copy(tmp_path / "gone.pt") is None

    def test_no_space_is_no_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = save(tmp_path / "ckpt.pt", 10)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(shutil, "copyfile", full)
        assert keep_copy(path) is None
        assert path.exists()

    def test_restore_twice(self, tmp_path: Path) -> None:
        path = save(tmp_path / "ckpt.pt", 10)
        copy = keep_copy(path)
        tear(path)
        assert restore(Path(copy.path), path)
        assert not restore(Path(copy.path), path), "and nobody is told a second time"
        back = inspect(path)
        assert (back.complete, back.step) == (True, 10)
        assert len(read_records(tmp_path)) == 1


class TestPrepare:
    def test_a_torn_ckpt_comes_back(self, tmp_path: Path) -> None:
        path = save(tmp_path / "ckpt.pt", 10)
        scanner = CheckpointScanner()
        scanner.scan([tmp_path], 1e12)
        assert scanner.files_to_copy() == [path]
        keep_copy(path)
        path.write_bytes(b"")
        chosen, preparations = choose(scanner.scan([tmp_path], 1e12))
        assert (chosen.path, chosen.step) == (str(path), 10)
        assert len(prepare(preparations)) == 2
        assert inspect(path).step == 10
        assert prepare(preparations) == [], "repeating it does nothing, and says so"
        assert len(read_records(tmp_path)) == 1

    @pytest.mark.parametrize("cut", [0, 1, 2, 3])
    def test_it_may_be_cut_off_anywhere(self, tmp_path: Path, cut: int) -> None:
        save(tmp_path / "a-10.pt", 10)
        for step in (20, 30):
            tear(save(tmp_path / f"a-{step}.pt", step))
        single = save(tmp_path / "x" / "ckpt.pt", 5)
        keep_copy(single)
        tear(single)
        _, preparations = choose(found(tmp_path))
        assert len(preparations) == 4
        prepare(preparations[:cut])
        prepare(preparations)
        assert sorted(f.step for f in found(tmp_path) if f.complete and not f.copy_of) == [5, 10]
        assert all(f.complete for f in found(tmp_path))

    def test_what_was_finished_meanwhile_stays(self, tmp_path: Path) -> None:
        path = save(tmp_path / "ckpt-10.pt", 10)
        assert len(prepare([SetAside(path=str(path), why=INCOMPLETE + "it is being written")])) == 1
        assert path.exists()
        prepare([SetAside(path=str(path), why="rolled back")])
        assert not path.exists()

    def test_a_file_with_a_live_writer_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recovery.quarantine, "WRITER_WAIT_S", 0.2)
        path = save(tmp_path / "ckpt-10.pt", 10)
        tear(path)
        code = f"f = open({str(path)!r}, 'ab'); print('open', flush=True); input()"
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
            writer.stdout.readline()
            with pytest.raises(PreparationError, match=f"still being written by process {writer.pid}"):
                prepare([SetAside(path=str(path), why=INCOMPLETE)])
            writer.kill()
        prepare([SetAside(path=str(path), why=INCOMPLETE)])
        assert not path.exists()

    def test_a_writer_that_ends_is_waited_for(self, tmp_path: Path) -> None:
        path = save(tmp_path / "ckpt-10.pt", 10)
        data = path.read_bytes()
        tear(path)
        code = "import sys, time; f = open(sys.argv[1], 'wb'); print('open', flush=True); time.sleep(0.3); "
        code += "f.write(sys.stdin.buffer.read())"
        with subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as writer:
            writer.stdout.readline()
            writer.stdin.write(data)
            writer.stdin.close()
            assert len(prepare([SetAside(path=str(path), why=INCOMPLETE)])) == 1
            assert path.exists()

    def test_a_missing_copy_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(PreparationError, match="it is gone: choose another"):
            prepare([Restore(copy=str(tmp_path / "no"), path=str(tmp_path / "ckpt.pt"))])

    def test_a_full_disk_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = save(tmp_path / "ckpt-10.pt", 10)
        tear(path)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "rename", full)
        with pytest.raises(PreparationError, match="free some space"):
            prepare([SetAside(path=str(path), why=INCOMPLETE)])
        assert path.exists()


class TestRollback:
    """Newer checkpoints move aside; `PutBack` puts them and what names them back."""

    def roll_back(self, folder: Path, step: int) -> list[PutBack]:
        _, preparations = choose(found(folder), ResumeSituation(kind="operator", step=step))
        prepare(preparations)
        return [PutBack(path=one.path) for one in preparations if isinstance(one, SetAside)]

    def test_there_and_back(self, tmp_path: Path) -> None:
        for step in (10, 20, 30):
            save(tmp_path / f"ckpt-{step}.pt", step)
        (tmp_path / "latest").symlink_to("ckpt-30.pt")
        (tmp_path / "latest.txt").write_text("ckpt-30.pt")
        before = {path.name: path.lstat().st_ino for path in tmp_path.glob("*.pt")}
        undone = self.roll_back(tmp_path, 10)
        assert [path.name for path in tmp_path.glob("*.pt")] == ["ckpt-10.pt"]
        assert os.readlink(tmp_path / "latest") == (tmp_path / "latest.txt").read_text() == "ckpt-10.pt"
        prepare(undone)
        assert {path.name: path.lstat().st_ino for path in tmp_path.glob("*.pt")} == before
        assert os.readlink(tmp_path / "latest") == (tmp_path / "latest.txt").read_text() == "ckpt-30.pt"
        assert prepare(undone) == [], "it may be repeated"
        assert max(one.step or 0 for one in found(tmp_path)) == 30

    def test_what_was_written_again_stays_and_the_older_one_is_kept(self, tmp_path: Path) -> None:
        for step in (10, 20):
            save(tmp_path / f"ckpt-{step}.pt", step)
        undone = self.roll_back(tmp_path, 10)
        new = save(tmp_path / "ckpt-20.pt", 20).read_bytes() + b"new"
        (tmp_path / "ckpt-20.pt").write_bytes(new)
        [told] = prepare(undone)
        assert "was written again since" in told
        assert (tmp_path / "ckpt-20.pt").read_bytes() == new
        assert (tmp_path / ".unbroken-set-aside/ckpt-20.pt").exists()

    def test_a_file_that_is_overwritten_in_place(self, tmp_path: Path) -> None:
        """Its copy of an earlier step was put there; the file of before comes back, unless the script wrote since."""
        path = save(tmp_path / "ckpt.pt", 10)
        assert keep_copy(path) is not None
        os.utime(save(path, 20), ns=(time.time_ns() + 10**9,) * 2)
        undone = self.roll_back(tmp_path, 10)
        assert [one.step for one in found(tmp_path) if not one.copy_of] == [10]
        prepare(undone)
        assert [one.step for one in found(tmp_path) if not one.copy_of] == [20]
        undone = self.roll_back(tmp_path, 10)
        save(path, 11)
        prepare(undone)
        assert [one.step for one in found(tmp_path) if not one.copy_of] == [11]

    def test_a_pointer_that_somebody_changed_since_is_left(self, tmp_path: Path) -> None:
        for step in (10, 20):
            save(tmp_path / f"ckpt-{step}.pt", step)
        (tmp_path / "latest.txt").write_text("ckpt-20.pt")
        undone = self.roll_back(tmp_path, 10)
        (tmp_path / "latest.txt").write_text("none of this")
        prepare(undone)
        assert (tmp_path / "latest.txt").read_text() == "none of this"

    def test_a_torn_one_that_was_moved_is_not_put_back(self, tmp_path: Path) -> None:
        save(tmp_path / "ckpt-10.pt", 10)
        tear(save(tmp_path / "ckpt-20.pt", 20))
        recover(tmp_path)
        assert prepare([PutBack(path=str(tmp_path / "ckpt-20.pt"))]) == []
        assert not (tmp_path / "ckpt-20.pt").exists()
