"""The ledger's folder: several writers, damage, and files that are put together."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from recovery.ledger import DAY_S, KEEP_S, CordonLifted, NodeCordoned, NodeFailed, NodesSeen, TestResult, merge
from recovery.ledger_folder import APPEND_S, COMPACT_FILES, SEALED_S, LedgerFolder

NOW = 1_800_000_000.0


def put(folder: LedgerFolder, node: str, at: float = NOW, name: str = "") -> None:
    what = NodeCordoned(node=node, scope="cluster", reason="bad")
    folder.append([folder.entry(what, at, by="ann", name=name)], at)


def aged(folder: Path, at: float) -> None:
    """Files look as if they had been written at the time in their names."""
    for path in folder.iterdir():
        os.utime(path, (at, at))


def test_two_writers_share_a_folder_and_read_each_other(tmp_path: Path) -> None:
    one, other = LedgerFolder(tmp_path, "h1"), LedgerFolder(tmp_path, "h2")
    put(one, "n1")
    assert merge(other.read(NOW).entries, NOW)["n1"].cordons
    before = one.signature()
    put(other, "n2")
    assert one.signature() != before
    assert sorted(merge(one.read(NOW).entries, NOW)) == ["n1", "n2"]
    assert len(list(tmp_path.iterdir())) == 2, "each has a file of its own"


def test_an_append_goes_to_the_same_file_for_a_day(tmp_path: Path) -> None:
    folder = LedgerFolder(tmp_path)
    for hour in range(0, 48, 6):
        put(folder, f"n{hour}", NOW + hour * 3600)
    assert len(list(tmp_path.iterdir())) == 2
    assert len(folder.read(NOW + 2 * DAY_S).entries) == 8


def test_where_its_file_is_gone_a_writer_begins_another(tmp_path: Path) -> None:
    folder = LedgerFolder(tmp_path)
    put(folder, "n1")
    (gone,) = tmp_path.iterdir()
    gone.unlink()
    put(folder, "n2")
    assert [one.what.node for one in folder.read(NOW).entries if isinstance(one.what, NodeCordoned)] == ["n2"]


def test_after_a_failed_write_another_file_is_begun(tmp_path: Path) -> None:
    folder = LedgerFolder(tmp_path)
    put(folder, "n1")
    (torn,) = tmp_path.iterdir()
    torn.rename(tmp_path / "aside")
    torn.symlink_to(tmp_path / "aside")
    with pytest.raises(OSError, match="symbolic"):
        put(folder, "n2")
    put(folder, "n2")
    assert (tmp_path / "aside").read_bytes().count(b"\n") == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_damaged_lines_and_strange_files_are_told_and_left_out(tmp_path: Path) -> None:
    folder = LedgerFolder(tmp_path)
    put(folder, "n1")
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(b'garbage\n\xff\xfe\n{"v":1,"id":"half')
    os.mkfifo(tmp_path / f"{int(NOW)}-pipe.jsonl")
    (tmp_path / f"{int(NOW)}-link.jsonl").symlink_to("/etc/hostname")
    (tmp_path / "notes.txt").write_text("somebody's")
    found = LedgerFolder(tmp_path).read(NOW)
    assert len(found.entries) == 1
    assert len(found.problems) == 4
    assert sum("line" in problem for problem in found.problems) == 2


def test_a_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    writer, reader = LedgerFolder(tmp_path), LedgerFolder(tmp_path)
    put(writer, "n1")
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert reader.read(NOW) == ((), ())
    path.write_bytes(whole)
    assert len(reader.read(NOW).entries) == 1


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    writer, reader = LedgerFolder(tmp_path), LedgerFolder(tmp_path)
    put(writer, "n1")
    reader.read(NOW)
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    with path.open("r+b") as file:  # where it was read already
        file.write(b"x" * (size - 1))
    put(writer, "n2")
    assert len(reader.read(NOW).entries) == 2


def fill(folder: Path, files: int, each: int) -> None:
    for number in range(files):
        writer = LedgerFolder(folder, f"h{number}")
        writer.append(
            [
                writer.entry(NodeFailed(node=f"n{number}", failure_class="a"), NOW - KEEP_S - line, by="policy")
                for line in range(each)
            ],
            NOW,
        )
        put(writer, f"n{number}")


def test_old_files_are_put_together_and_say_the_same(tmp_path: Path) -> None:
    fill(tmp_path, COMPACT_FILES, 100)
    aged(tmp_path, NOW)
    later = NOW + SEALED_S + APPEND_S
    folder = LedgerFolder(tmp_path)
    before = merge(folder.read(later).entries, later)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert folder.compact(later) == COMPACT_FILES
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < size / 10
    after = merge(LedgerFolder(tmp_path).read(later).entries, later)
    assert {name: one.cordons for name, one in after.items()} == {name: one.cordons for name, one in before.items()}


def test_files_that_may_be_written_to_are_left_alone(tmp_path: Path) -> None:
    fill(tmp_path, COMPACT_FILES, 1)
    assert LedgerFolder(tmp_path).compact(NOW + SEALED_S - 60) == 0
    assert len(list(tmp_path.iterdir())) == COMPACT_FILES


def test_one_who_reads_while_files_are_put_together_loses_nothing(tmp_path: Path) -> None:
    fill(tmp_path, COMPACT_FILES, 1)
    aged(tmp_path, NOW)
    later = NOW + SEALED_S + APPEND_S
    reader = LedgerFolder(tmp_path)
    before = merge(reader.read(later).entries, later)
    LedgerFolder(tmp_path).compact(later)
    assert merge(reader.read(later).entries, later).keys() == before.keys()


class Behind(LedgerFolder):
    """Its first look at the folder is from before files were put together, as an NFS client's may be."""

    before: list[str] | None = None

    def _names(self) -> list[str]:
        names, self.before = self.before, None
        return super()._names() if names is None else names


def test_one_whose_list_of_files_is_old_looks_again(tmp_path: Path) -> None:
    fill(tmp_path, COMPACT_FILES, 1)
    aged(tmp_path, NOW)
    later = NOW + SEALED_S + APPEND_S
    reader = Behind(tmp_path)
    reader.before = reader._names()
    LedgerFolder(tmp_path).compact(later)
    assert len(merge(reader.read(later).entries, later)) == COMPACT_FILES


def test_two_who_put_files_together_lose_nothing(tmp_path: Path) -> None:
    fill(tmp_path, COMPACT_FILES, 1)
    aged(tmp_path, NOW)
    later = NOW + SEALED_S + APPEND_S
    first, second = LedgerFolder(tmp_path), LedgerFolder(tmp_path)
    second.read(later)
    assert (first.compact(later), second.compact(later)) == (COMPACT_FILES, 0)
    assert len(merge(LedgerFolder(tmp_path).read(later).entries, later)) == COMPACT_FILES


def _write_many(folder: str, host: str) -> None:
    writer, now = LedgerFolder(folder, host), NOW + SEALED_S + APPEND_S
    for number in range(50):
        put(writer, f"{host}-{number}", now)
        writer.read(now)


def _compact_often(folder: str) -> None:
    for number in range(20):
        one = LedgerFolder(folder, "c")
        one.compact(NOW + SEALED_S + APPEND_S + number)


def test_several_processes_write_read_and_put_together_at_once(tmp_path: Path) -> None:
    fill(tmp_path, 2 * COMPACT_FILES, 3)
    aged(tmp_path, NOW)
    context = multiprocessing.get_context("fork")
    work = [context.Process(target=_write_many, args=(str(tmp_path), f"w{number}")) for number in range(3)]
    work += [context.Process(target=_compact_often, args=(str(tmp_path),)) for _ in range(2)]
    for one in work:
        one.start()
    for one in work:
        one.join(60)
    assert [one.exitcode for one in work] == [0] * 5
    found = LedgerFolder(tmp_path).read(NOW + SEALED_S + APPEND_S)
    nodes = merge(found.entries, NOW + SEALED_S + APPEND_S)
    assert not found.problems
    assert len(nodes) == 150 + 2 * COMPACT_FILES
    assert all(one.cordons for one in nodes.values())


def test_a_lift_names_what_was_read(tmp_path: Path) -> None:
    one, other = LedgerFolder(tmp_path, "h1"), LedgerFolder(tmp_path, "h2")
    put(one, "n1")
    record = merge(other.read(NOW).entries, NOW)["n1"]
    lift = CordonLifted(node="n1", lifts=tuple(held.id for held in record.cordons), repair="new GPU")
    other.append([other.entry(lift, NOW + 1, by="bob"), other.entry(NodesSeen(nodes=("n1",)), NOW, by="bob")], NOW)
    assert merge(one.read(NOW + 2).entries, NOW + 2)["n1"].state == "PROBATION"


def test_what_was_not_read_is_not_removed(tmp_path: Path) -> None:
    """Files are put together by one that reads less than there is."""
    fill(tmp_path, COMPACT_FILES, 20)
    aged(tmp_path, NOW)
    later = NOW + SEALED_S + APPEND_S
    before = merge(LedgerFolder(tmp_path).read(later).entries, later)
    size = max(path.stat().st_size for path in tmp_path.iterdir())
    for few in (LedgerFolder(tmp_path, most_bytes=3 * size), LedgerFolder(tmp_path, most_entries=65)):
        few.compact(later)
        read = few.read(later)
        assert read.problems or len(list(tmp_path.iterdir())) < COMPACT_FILES
        assert read == few.read(later), "it does not read on and on"
    after = merge(LedgerFolder(tmp_path).read(later).entries, later)
    assert {node: len(one.cordons) for node, one in after.items()} == {
        node: len(one.cordons) for node, one in before.items()
    }


def test_one_file_that_is_far_too_large_hides_no_other(tmp_path: Path) -> None:
    put(LedgerFolder(tmp_path), "n1")
    with (tmp_path / f"{int(NOW) + 5}-broken.jsonl").open("wb") as file:
        file.truncate(3 << 40)
    reader = LedgerFolder(tmp_path)
    found = reader.read(NOW)
    assert [entry.what.node for entry in found.entries if isinstance(entry.what, NodeCordoned)] == ["n1"]
    assert found.problems
    assert len(found.problems) == len(reader.read(NOW).problems)


def test_a_job_keeps_the_newest_test_of_each_node_and_all_that_failed(tmp_path: Path) -> None:
    writer = LedgerFolder(tmp_path, "h1")
    results = [
        TestResult(node=f"n{number % 2}", test="t", verdict="fail" if number == 3 else "pass", at=NOW + number)
        for number in range(10)
    ]
    writer.append([writer.entry(one, one.at, by="ann") for one in results], NOW)
    job = LedgerFolder(tmp_path, all_tests=False)
    assert sorted(entry.at - NOW for entry in job.read(NOW).entries) == [3.0, 8.0, 9.0]
    assert len(LedgerFolder(tmp_path).read(NOW).entries) == 10
    fill(tmp_path, COMPACT_FILES, 1)
    aged(tmp_path, NOW)
    later = NOW + SEALED_S + APPEND_S
    assert job.compact(later) == COMPACT_FILES + 1
    kept = [entry for entry in LedgerFolder(tmp_path).read(later).entries if isinstance(entry.what, TestResult)]
    assert len(kept) == 10, "what it does not keep in memory stays in the folder"
