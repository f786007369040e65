"""What shows only in long, or in unlucky runs: writers that pause, files that come late, disks that fill up, other
jobs in the same folder."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from recovery.checkpoint import Checkpoint
from recovery.tiers import BringBack, NodeTiers, PartSource, Save, SaveKey, bring_back, join
from supervisor.mover.copying import CopyError, CopyPace, NewFile, checksum, need_room
from supervisor.mover.parts import STILL_S, LocalParts
from supervisor.mover.peer import Mirrors, PeerServer
from supervisor.mover.process import GONE_S, LEFT_S, GaveWay, Mover
from supervisor.mover.publish import RECORDS_READ, Publisher, PublishRecord, record_file
from tests.supervisor.mover.saves import dcp_files, torch_file
from tests.supervisor.mover.test_kills import content_of
from tests.supervisor.mover.test_mover import SECRET, Node, dcp, node, published, save_of, wanted

__all__ = ["node"]

Nodes = Callable[[str], Node]


def staged_files(one: Node) -> set[str]:
    home = one.folder.parent / "shared" / ".unbroken-publishing"
    return {path.name for path in home.rglob("*") if path.is_file() and path.parent.parent.name == "data"}


# ----- files that come late -----


def test_a_committing_file_that_comes_later_is_staged_too(node: Nodes) -> None:
    a, b = node("a"), node("b")
    files = dcp_files(2, 10, 300_000)
    a.write("step-10/__0_0.distcp", files["__0_0.distcp"])
    b.write("step-10/__1_0.distcp", files["__1_0.distcp"])
    a.look(), b.look()
    assert a.mover.stage()
    assert b.mover.stage()
    a.write("step-10/.metadata", files[".metadata"])
    assert a.look().staged == (), "that part is not there as it is now"
    assert a.mover.stage()
    assert a.mover.status().tiers.staged
    a.look(commit=(save_of([a, b]),))
    assert a.mover.commit()
    assert published(a) == {f"step-10/{name}": data for name, data in files.items()}


def test_a_commit_that_fails_holds_up_nothing(node: Nodes) -> None:
    a, b = node("a"), node("b")
    dcp([a, b], 10)
    a.look(), b.look()
    a.look(commit=(save_of([a, b]),))  # b has staged nothing
    worked, problem = a.mover.publish()
    assert worked
    assert "not staged" in problem
    assert a.mover.status().tiers.staged


def test_a_part_that_grows_while_it_is_staged_leaves_the_others_alone(node: Nodes) -> None:
    a, b = node("a"), node("b")
    files = dcp_files(2, 10, 300_000)
    b.write("step-10/__1_0.distcp", files["__1_0.distcp"])
    a.write("step-10/__0_0.distcp", files["__0_0.distcp"])
    a.look(), b.look()
    assert b.mover.stage()
    before = a.mover._seen
    a.write("step-10/.metadata", files[".metadata"])
    a.look()
    now, a.mover._seen = a.mover._seen, before
    counted = a.mover._counter

    def grow(tier: str) -> Callable[[int], None]:
        a.mover._seen = now  # the look in the middle of the copy
        return counted(tier)

    a.mover._counter = grow  # type: ignore[method-assign]
    a.mover.stage()
    assert "__1_0.distcp" in staged_files(a)
    while a.mover.stage():
        pass
    a.look(commit=(save_of([a, b]),))
    assert a.mover.commit()
    assert published(a) == {f"step-10/{name}": data for name, data in files.items()}


def test_a_writer_that_pauses_in_the_middle_of_a_file_is_no_rewriting(tmp_path: Path) -> None:
    files = dcp_files(1, 10, 300_000)
    data = files["__0_0.distcp"]
    file = tmp_path / "step-10/__0_0.distcp"
    file.parent.mkdir()
    (tmp_path / "notes").mkdir()

    def judge(path: Path) -> Checkpoint | None:
        done = (path / ".metadata").exists()
        return Checkpoint(path=str(path), step=10, format="dcp", complete=done, why="", modified_at=0.0)

    parts = LocalParts(tmp_path, tmp_path / "notes", "a", judge)

    def look(now: float) -> tuple[bool, bool, bool]:
        (seen,) = parts.look([str(tmp_path / "step-10")], 1, 0.0, now)
        return seen.part.whole, seen.part.rewritten, seen.movable

    for now, size in ((0.0, 1000), (STILL_S, 1000), (STILL_S + 1, len(data))):
        file.write_bytes(data[:size])
        os.utime(file, ns=(size, size))
        looked = look(now)
    assert looked == (False, False, False)
    (tmp_path / "step-10/.metadata").write_bytes(files[".metadata"])
    look(10.0)
    assert look(11.0) == (True, False, True)
    file.write_bytes(data + b"more")
    look(12.0)
    assert look(13.0)[1], "it was whole: this is another save in the same folder"


def test_a_save_that_is_being_written_is_not_told_of(node: Nodes) -> None:
    a = node("a")
    reports: list[NodeTiers] = []
    for size in range(1, 20):
        a.write("step-10/__0_0.distcp", b"x" * size)
        told = a.look(at_rest=False)
        if told not in reports:
            reports.append(told)
    assert len(reports) == 1
    assert reports[0].parts == ()
    assert [part.size_bytes for part in a.look(at_rest=True).parts] == [19]


def test_that_ranks_write_a_part_that_no_file_names_is_told_once(node: Nodes) -> None:
    a = node("a")
    reports: list[NodeTiers] = []
    for size in range(1, 20):
        a.write("step_10/rank_0.pt", b"x" * size)
        a.write("step-10/__0_0.distcp", b"x" * size)
        told = a.look(at_rest=False)
        if told not in reports:
            reports.append(told)
    assert [report.writing for report in reports] == [("step_10",)]
    assert a.look(at_rest=True).writing == ()


# ----- many saves -----


def turn(one: Node) -> bool:
    """What the controller and the publisher do."""
    tiers = one.look()
    joined = join({one.name: tiers}, {one.name}, set())
    todo = tuple(j.save for j in joined if j.whole and j.staged and "published" not in j.tiers)
    one.look(commit=todo)
    worked, problem = one.mover.publish()
    assert not problem
    return worked


def test_a_publisher_with_a_backlog_comes_to_an_end(node: Nodes) -> None:
    a = node("a")
    for step in range(1, 8):
        dcp([a], step)
        for path in (a.folder / f"step-{step}").iterdir():
            os.utime(path, (step, step))
    turns = 0
    while turn(a):
        turns += 1
        assert turns < 20
    assert not a.look().staged
    assert {name.split("/")[0] for name in published(a)} == {f"step-{step}" for step in range(4, 8)}
    told = a.mover.status().tiers.published
    assert told[0].name == "step-7", "the newest one, whichever was published last"


def test_staged_files_of_saves_that_the_script_removed_go(node: Nodes) -> None:
    a, b = node("a"), node("b")
    dcp([a, b], 10)
    a.look(), b.look()
    assert a.mover.stage()
    assert b.mover.stage()
    shutil.rmtree(a.folder / "step-10")
    a = node("a")  # its mover was started again since
    a.look()
    a.mover.tidy(0.0)
    a.mover.tidy(GONE_S - 1)
    assert staged_files(a) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    a.mover.tidy(GONE_S)
    assert staged_files(a) == {"__1_0.distcp"}, "the other node's part stays"
    b.mover.tidy(0.0), b.mover.tidy(GONE_S)
    assert staged_files(b) == {"__1_0.distcp"}, "its save is there"


def staged(nodes: list[Node]) -> Save:
    """Step 10, of which all parts are staged."""
    dcp(nodes, 10)
    for one in nodes:
        one.look()
        assert one.mover.stage()
    return save_of(nodes)


def test_what_a_commit_has_begun_is_left_to_it(node: Nodes) -> None:
    a = node("a")
    dcp([a], 10)
    a.look()
    assert a.mover.stage()
    a.mover._publisher._keep(PublishRecord(save=save_of([a]), state="begun", at=1.0))
    shutil.rmtree(a.folder / "step-10")
    a.look()
    a.mover.tidy(0.0), a.mover.tidy(GONE_S)
    assert staged_files(a) == {".metadata", "__0_0.distcp"}


def test_what_is_about_to_be_committed_is_left_to_it(node: Nodes) -> None:
    a, b = node("a"), node("b")
    save = staged([a, b])
    a.mover._publisher._claim("step-10")
    b.mover._publisher.drop(save.key)
    assert staged_files(a) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    a.look(commit=(save,))
    assert a.mover.commit(), "the claim is its own"
    assert {name.split("/")[0] for name in published(a)} == {"step-10"}
    assert not list((a.folder.parent / "shared/.unbroken-publishing/committing").iterdir())


def test_what_is_being_removed_is_not_committed(node: Nodes) -> None:
    """Its removal was cut off: it goes on later, or the files are staged anew."""
    a, b = node("a"), node("b")
    save = staged([a, b])
    (note,) = (a.folder.parent / "shared/.unbroken-publishing").glob("*/*/part-b.json")
    for again in (False, True):
        note.rename(note.with_name("going-b.json"))
        a.look(commit=(save,))
        with pytest.raises(CopyError):
            a.mover.commit()
        assert not published(a)
        if not again:
            b.mover._publisher.drop(save.key)
            assert staged_files(a) == {".metadata", "__0_0.distcp"}
        b.mover._staged.clear()
        assert b.mover.stage()
    a.look(commit=(save,))
    assert a.mover.commit()


def test_what_was_staged_anew_is_committed_also_after_a_crash_in_between(node: Nodes) -> None:
    """The mover had just said that it wants it after all, and not yet taken back the word of its removal."""
    a, b = node("a"), node("b")
    save = staged([a, b])
    (note,) = (a.folder.parent / "shared/.unbroken-publishing").glob("*/*/part-b.json")
    shutil.copy(note, note.with_name("going-b.json"))
    b.mover._staged.clear()
    assert b.mover.stage()
    a.look(commit=(save,))
    assert a.mover.commit()


def test_two_jobs_do_not_publish_the_same_name(node: Nodes, tmp_path: Path) -> None:
    """Whoever is first publishes it; the other one leaves it alone, also afterwards."""
    a = node("a")
    save = staged([a])
    (tmp_path / "other").mkdir()
    other = Publisher(tmp_path / "shared", tmp_path / "other", "a")
    other.stage(a.look().parts[0], a.folder, CopyPace(), lambda _: None, lambda: True)
    a.mover._publisher._claim("step-10")
    with pytest.raises(CopyError):
        other.commit(save)
    assert not published(a)
    a.look(commit=(save,))
    assert a.mover.commit()
    before = published(a)
    with pytest.raises(CopyError):
        other.commit(save)
    assert published(a) == before


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, 524])
def test_where_there_are_no_links_saves_are_published_too(
    node: Nodes, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "no links here")

    a = node("a")
    save = staged([a])
    monkeypatch.setattr(os, "symlink", refuse)
    a.look(commit=(save,))
    assert a.mover.commit()
    assert published(a)


def test_an_old_record_is_found_among_many(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    first = Publisher(tmp_path, tmp_path / "job", "a")
    (tmp_path / "job/published").mkdir()
    for step in range(RECORDS_READ + 5):
        first._keep(
            PublishRecord(save=Save(name=f"step-{step}", format="dcp", step=step), state="whole", at=float(step))
        )
        record = tmp_path / "job/published" / record_file(f"step-{step}")
        os.utime(record, (step, step))
    later = Publisher(tmp_path, tmp_path / "job", "a")
    later.read_records()
    assert later.is_published(SaveKey(f"step-{RECORDS_READ + 4}", 0, 0))
    assert len(later._known) == RECORDS_READ
    assert later.save_of(SaveKey("step-0", 0, 0)) is not None


# ----- mirrors -----


def half(mirrors: Mirrors, owner: str, step: int) -> None:
    data = mirrors.begin(owner, SaveKey(f"step-{step}", 1, 0))
    with NewFile(data, f"step-{step}/f", 4) as file:
        file.write(b"half")
        file.finish()


def test_of_one_owner_there_is_one_half_mirror(tmp_path: Path) -> None:
    mirrors = Mirrors(tmp_path, "job")
    for step in range(10):
        half(mirrors, "b", step)
    half(mirrors, "c", 1)
    assert len(list((mirrors.home / "b").iterdir())) == 1
    assert len(list((mirrors.home / "c").iterdir())) == 1


def test_mirrors_leave_room_for_the_script_s_own_saves(tmp_path: Path) -> None:
    mirrors = Mirrors(tmp_path, "job")
    key = SaveKey("step-1", 1, 0)
    data = mirrors.begin("b", key)
    about = os.statvfs(tmp_path)
    mirrors.own_bytes = about.f_bavail * about.f_frsize // 2
    with pytest.raises(OSError, match="no room"):
        mirrors.make_room("b", key, data, 1 << 30)
    need_room(data, 1)


def test_mirrors_of_a_node_that_mirrors_elsewhere_go_once_newer_saves_are_published(node: Nodes) -> None:
    a, b = node("a"), node("b")
    dcp([a, b], 10)
    for one in (a, b):
        for path in (one.folder / "step-10").iterdir():
            os.utime(path, (1000, 1000))
    b.look(peer=a.source())
    assert b.mover.mirror()
    a.mover.tidy(0.0)
    assert [part.owner for part in a.look().mirrors] == ["b"]
    save = Save(name="step-20", format="dcp", step=20, modified_at=time.time() + 10 * LEFT_S)
    a.mover._publisher._keep(PublishRecord(save=save, state="whole", at=10_000.0))
    a.mover.tidy(0.0)
    assert [part.owner for part in a.look().mirrors] == ["b"], "it came just now, whatever clocks and files say"
    (manifest,) = a.mover._mirrors.home.glob("b/*/manifest.json")
    os.utime(manifest, (1000, 1000))
    a.mover.tidy(0.0)
    assert a.look().mirrors == ()
    assert not list((a.mover._mirrors.home / "b").iterdir())


def test_staged_files_of_a_lost_node_go_once_much_newer_saves_are_published(node: Nodes) -> None:
    a, b = node("a"), node("b")
    dcp([a, b], 10)
    for one in (a, b):
        for path in (one.folder / "step-10").iterdir():
            os.utime(path, (1000, 1000))
    b.look()
    assert b.mover.stage()
    (note,) = (a.folder.parent / "shared/.unbroken-publishing").glob("*/*/part-b.json")
    save = Save(name="step-20", format="dcp", step=20, modified_at=1001.0 + LEFT_S)
    a.mover._publisher._keep(PublishRecord(save=save, state="whole", at=1.0))
    a.look(paths=(), gone=("b",))
    a.mover.tidy(0.0)
    assert staged_files(a) == {"__1_0.distcp"}, "it came just now, whatever the clock of b says"
    os.utime(note, (1000, 1000))
    save = Save(name="step-20", format="dcp", step=20, modified_at=1000.0 + LEFT_S)
    a.mover._publisher._keep(PublishRecord(save=save, state="whole", at=1.0))
    a.look(paths=(), gone=("b",))
    a.mover.tidy(0.0)
    assert staged_files(a) == {"__1_0.distcp"}, "it may come back"
    save = msgspec.structs.replace(save, modified_at=1001.0 + LEFT_S)
    a.mover._publisher._keep(PublishRecord(save=save, state="whole", at=1.0))
    a.look(gone=())
    a.mover.tidy(0.0)
    assert staged_files(a) == {"__1_0.distcp"}, "it is there"
    a.look(gone=("b",))
    a.mover.tidy(0.0)
    assert staged_files(a) == set()
    b.look()
    b.mover.tidy(0.0)
    assert b.mover.stage(), "it was not lost after all"
    assert staged_files(a) == {"__1_0.distcp"}


def test_after_a_good_end_only_what_the_script_wrote_and_what_is_published_is_left(node: Nodes) -> None:
    a, b = node("a"), node("b")
    dcp([a, b], 10), dcp([a], 20)
    for one, peer in ((a, b), (b, a)):
        one.look(peer=peer.source())
        while one.mover.mirror() or one.mover.stage():
            pass
    (newest, _) = join({"a": a.look()}, {"a"}, set())
    a.look(commit=(newest.save,))
    assert a.mover.commit()
    written = content_of(a.folder)
    assert staged_files(a) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    for one in (a, b):
        one.look(over=True)
        one.mover.clear()
        assert one.mover.status().cleared
        assert one.mover.status().tiers.mirrors == ()
        assert not one.mover.mirror()
        assert not one.mover.stage()
        assert not list(one.mover._mirrors.home.glob("*/*/data"))
    assert staged_files(a) == set()
    assert content_of(a.folder) == written
    assert {name.split("/")[0] for name in published(a)} == {"step-20"}
    c = node("c")  # the run is started again on another node
    c.look()
    c.mover._publisher.read_records()
    told = {"c": c.mover.status().tiers}
    back = bring_back(join(told, {"c"}, set()), "step-20", told, {"c": "127.0.0.1"})
    assert back is not None
    c.mover.bring(back, 1)
    assert c.mover.status().bring_problem == ""
    assert content_of(c.folder) == published(a)


def test_where_the_newest_is_not_there_as_it_was_published_no_copy_goes(node: Nodes) -> None:
    a, b = node("a"), node("b")
    dcp([a, b], 10)
    for one, peer in ((a, b), (b, a)):
        one.look(peer=peer.source())
        while one.mover.mirror() or one.mover.stage():
            pass
    a.look(over=True), a.mover.clear()
    assert a.mover.status().cleared
    assert a.look().mirrors, "nothing is published"
    a.look(over=False, commit=(save_of([a, b]),))
    assert a.mover.commit()
    shutil.rmtree(a.folder.parent / "shared/step-10")
    a.look(over=True), a.mover.clear()
    assert a.look().mirrors


def test_a_link_where_a_copy_is_expected_leads_to_no_removal(node: Nodes, tmp_path: Path) -> None:
    a, b, c = node("a"), node("b"), node("c")
    dcp([a, b], 10)
    for one, peer in ((a, b), (b, a)):
        one.look(peer=peer.source())
        while one.mover.mirror() or one.mover.stage():
            pass
    mirror = next(path.parent for path in a.mover._mirrors.home.glob("*/*/manifest.json"))
    elsewhere = tmp_path / "elsewhere"
    mirror.rename(elsewhere)
    mirror.symlink_to(elsewhere)
    before = content_of(elsewhere)
    a.mover._mirrors.drop_all()
    assert content_of(elsewhere) == before
    assert Mirrors(a.folder, a.mover._mirrors.home.name).parts == (), "nor is it used"
    (data,) = (tmp_path / "shared/.unbroken-publishing").glob("*/*/data")
    staged = tmp_path / "staged"
    data.rename(staged)
    data.symlink_to(staged)
    before = content_of(staged)
    for key in c.mover._publisher.staged_by("a"):
        c.mover._publisher.drop(key, "a")
    assert content_of(staged) == before


def test_what_other_jobs_have_left_is_told(node: Nodes) -> None:
    a, b = node("a"), node("b")
    dcp([b], 10)
    b.look(peer=a.source())
    assert b.mover.mirror()
    a.mover.tidy(0.0)
    assert a.look().others == 0, "it is this job's own"
    other = Mirrors(a.folder, "another")
    assert other.of_other_jobs() == (1, sum(part.size_bytes for part in b.look().parts))


def test_another_job_in_the_same_folder_does_not_see_the_old_one_s_mirrors(node: Nodes) -> None:
    a, b = node("a"), node("b")
    dcp([a, b], 5000)
    for one, peer in ((a, b), (b, a)):
        one.look(attempt=7, peer=peer.source())
        assert one.mover.mirror()
    root = a.folder.parent
    shutil.rmtree(a.folder / "step-5000")
    shutil.rmtree(b.folder / "step-5000")
    assert a.look().mirrors
    (root / "job/token").write_text("n" * 40)
    new = node("a")
    told = new.look(attempt=0)
    assert told.mirrors == ()
    assert new.mover._parts.brought == {}
    assert list((new.folder / ".unbroken-mirrors").rglob("*.distcp")), "a job that may be alive keeps its own"


def test_notes_of_another_job_do_not_count(node: Nodes) -> None:
    a = node("a")
    dcp([a], 10)
    assert a.look(attempt=7).parts[0].attempt == 7
    (a.folder.parent / "job/token").write_text("n" * 40)
    new = node("a")
    assert new.look(attempt=1, since=time.time() + 60).parts[0].attempt == 0


def test_a_mirror_transfer_gives_way_to_ranks_that_wait(node: Nodes) -> None:
    a, b = node("a"), node("b")
    dcp([a, b], 10)
    b.look(peer=a.source(), bring=BringBack(save=Save(name="step-10", format="dcp")), bring_number=1)
    with pytest.raises(GaveWay):
        b.mover.mirror()
    b.mover._brought = 1
    assert b.mover.mirror()


def test_summing_up_a_file_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * (3 << 20))
    words: list[int] = []
    assert checksum(tmp_path, "f", lambda: words.append(1), 0.0).size == 3 << 20
    assert len(words) == 3


def test_a_stranger_who_says_a_byte_now_and_then_is_put_out(tmp_path: Path) -> None:
    server = PeerServer(Mirrors(tmp_path, "job"), SECRET, lambda *_: None, host="127.0.0.1", proof_s=0.4)
    server.start()
    bytes_said = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.05) as stranger:
        stranger.sendall(b"\0\0\2")
        while bytes_said < 100:  # 5 s; each byte comes within the time of one read
            try:
                assert stranger.recv(1) == b""
                break
            except TimeoutError:
                stranger.sendall(b"\0")
                bytes_said += 1
            except ConnectionError:
                break
    server.close()
    assert bytes_said < 100


def test_an_order_that_is_given_anew_is_not_told_as_failed(node: Nodes) -> None:
    a, b = node("a"), node("b")
    dcp([a, b], 10)
    a.look(), b.look()
    back = wanted([a, b], "step-10", {"a", "b"})
    a.look(bring=back, bring_number=2)
    a.mover.bring(BringBack(save=back.save), 1)
    assert a.mover.status().bring_problem
    assert a.mover.status().tiers.failed == ()
    a.mover.bring(BringBack(save=back.save), 2)
    assert a.mover.status().tiers.failed


# ----- bringing back -----


def test_nothing_is_replaced_in_a_shared_folder(node: Nodes) -> None:
    a, b = node("a"), node("b")
    content = dcp([a, b], 10)
    a.look(), b.look()
    back = wanted([a, b], "step-10", {"a", "b"})
    (a.mover._mirrors.top / "here-b").touch()
    (a.folder / "step-10/__1_0.distcp").write_bytes(b"another")
    before = content_of(a.folder)
    a.mover.bring(back, 1)
    assert "shared" in a.mover.status().bring_problem
    assert content_of(a.folder) == before
    a.write("step-10/__1_0.distcp", content["step-10/__1_0.distcp"])
    a.mover.bring(back, 2)
    assert a.mover.status().bring_problem == "", "all of it is there"


def test_a_single_file_of_an_older_attempt_is_not_the_one_that_is_wanted(node: Nodes) -> None:
    a, b = node("a"), node("b")
    for one in (a, b):
        one.write("ckpt.pt", torch_file(100))
        one.look(attempt=1)
    at = time.time() + 10
    os.utime(a.folder / "ckpt.pt", (at, at))
    a.look(attempt=2, since=at)
    b.look(attempt=2, since=at)
    back = wanted([a, b], "ckpt.pt", {"a", "b"})
    assert back.save.attempt == 2
    assert b.mover._missing(back.save) == ["ckpt.pt"]
    assert a.mover._missing(back.save) == []


def test_a_source_that_is_not_up_yet_is_asked_again(node: Nodes) -> None:
    a, b = node("a"), node("b")
    content = dcp([a, b], 10)
    a.look(), b.look()
    back = wanted([a, b], "step-10", {"a", "b"})
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    late = tuple(
        PartSource(owner=one.owner, node=one.node, address=one.address, port=port) if one.node == "b" else one
        for one in back.sources
    )
    a.mover.bring_again_s = 60.0
    asked = a.mover._fetch
    tries: list[int] = []

    def fetch(order: BringBack, save: Save, names: list[str]) -> dict[str, str]:
        tries.append(len(names))
        return asked(order if len(tries) == 1 else back, save, names)

    a.mover._fetch = fetch  # type: ignore[method-assign]
    a.mover.bring(BringBack(save=back.save, sources=late), 1)
    assert a.mover.status().bring_problem == ""
    assert tries == [1, 1]
    assert content_of(a.folder) == content


# ----- names and certificates -----


def test_a_name_that_is_not_utf_8_stops_only_that_save(node: Nodes) -> None:
    a = node("a")
    dcp([a], 10)
    dcp([a], 20)
    with open(os.fsencode(a.folder) + b"/step-20/\xff.txt", "wb") as file:
        file.write(b"x")
    told = a.look()
    assert {part.name for part in told.parts} == {"step-10", "step-20"}
    msgspec.json.encode(a.mover.status())
    assert {one.part.name for one in a.mover._seen if one.movable} == {"step-10"}
    assert any("step-20" in problem for problem in a.mover.status().problems)


def test_without_a_readable_certificate_nobody_is_answered(node: Nodes) -> None:
    a = node("a")
    setup = a.mover._setup
    mover = Mover(msgspec.structs.replace(setup, tls_cert=str(a.folder / "none.pem")), lambda _: None)
    status = mover.status()
    assert status.tiers.port == 0
    assert any("certificate" in problem for problem in status.problems)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", mover._server.port), timeout=5)
