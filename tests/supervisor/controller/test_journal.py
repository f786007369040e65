"""The journal: epochs, torn tails, what older controllers write too late, compaction, files that fail."""

import contextlib
import errno
import multiprocessing
import os
import random
import socket
from pathlib import Path

import msgspec
import pytest

import supervisor.controller.journal
from supervisor.controller.journal import (
    Decided,
    Entry,
    FileMark,
    History,
    Journal,
    RoundNames,
    Superseded,
    claim_epoch,
    decided_entry,
    digest_of,
    format_record,
    open_journal,
    read_after,
    read_history,
    steps,
)
from supervisor.messages import Assign, Assignment, JournalDamaged, Note, Progressed, Round, TimerFired, encode


def event(number: int) -> Entry:
    return Entry("event", 1000.0 + number, encode(TimerFired(at=1000.0 + number, timer=f"t{number}")))


def progressed(step: int) -> Entry:
    return Entry("event", float(step), encode(Progressed(at=float(step), attempt=1, step=step)))


def timers(where: Path) -> list[str]:
    found = [step.event for step in steps(read_history(where).records)]
    return [each.timer for each in found if isinstance(each, TimerFired)]


def shrink(journal: Journal) -> None:
    """Thin out everything so far."""
    thinned = journal.thin_out(journal.mark())
    if thinned is not None:
        journal.take_over(thinned)


def test_a_tail_torn_at_any_byte_loses_only_the_last_record(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    journal.write([event(1), event(2)])
    whole = journal.path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start + 1, len(whole)):
        journal.path.write_bytes(whole[:end])
        history = read_history(tmp_path)
        assert timers(tmp_path) == ["t1"], end
        assert "not a whole record" in history.problems[0]


@pytest.mark.parametrize("damage", [b"\x00" * 40 + b"\n", b"{}\n", b"garbage", b'{"seq":1,"crc32":1}\n'])
def test_what_is_whole_behind_damage_counts_and_what_is_damaged_is_kept(tmp_path: Path, damage: bytes) -> None:
    journal, _ = open_journal(tmp_path)
    journal.write([event(1)])
    with open(journal.path, "ab") as file:
        file.write(damage)
    journal.write([event(2)])
    found = journal.path.read_bytes()
    second, history = open_journal(tmp_path)
    assert len(history.problems) == 1
    second.write([event(3)])
    assert timers(tmp_path) == ["t1", "t2", "t3"]
    (told,) = (s.event for s in steps(read_history(tmp_path).records) if isinstance(s.event, JournalDamaged))
    assert (told.lost, told.events, told.orders) == (0, False, False)
    assert (tmp_path / "damaged" / "journal.1.jsonl").read_bytes() == found
    assert open_journal(tmp_path)[1].damaged == ()


def test_a_controller_that_was_replaced_may_write_but_not_act(tmp_path: Path) -> None:
    old, _ = open_journal(tmp_path)
    old.write([event(1)])
    new, _ = open_journal(tmp_path)
    with pytest.raises(Superseded, match="epoch 2 has taken over"):
        old.write([event(2)])
    new.write([event(3)])
    assert timers(tmp_path) == ["t1", "t3"]
    assert "dropped" in read_history(tmp_path).problems[0]


def _claim(job_dir: str, start: object, claimed: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    for _ in range(20):
        claimed.put(claim_epoch(Path(job_dir)))  # type: ignore[attr-defined]


def test_no_epoch_is_claimed_twice(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, claimed = context.Event(), context.Queue()
    processes = [context.Process(target=_claim, args=(str(tmp_path), start, claimed)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    numbers = [claimed.get(timeout=30) for _ in range(80)]
    for process in processes:
        process.join(30)
    assert sorted(numbers) == list(range(1, 81))
    assert sorted(os.listdir(tmp_path / "epochs"), key=int) == [str(n) for n in range(1, 81)]


def test_a_journal_that_grew_large_is_thinned_while_it_is_used(tmp_path: Path) -> None:
    first, _ = open_journal(tmp_path)
    first.write([event(1)])
    journal, _ = open_journal(tmp_path, max_bytes=10_000)
    last = 0
    for n in range(10):
        last = journal.write([progressed(1000 * n + i) for i in range(20)])
    journal.write([Entry("decided", 0.0, encode(Decided(of=last, actions=(Note(text="x"),)))), progressed(9999)])
    assert journal.is_large
    shrink(journal)
    assert not journal.is_large
    journal.write([event(2)])
    assert timers(tmp_path) == ["t1", "t2"]
    kept = [step.event for step in steps(read_history(tmp_path).records)]
    assert [each.step for each in kept if isinstance(each, Progressed)] == [9000, 9019, 9999]
    assert [path.name for path in tmp_path.glob("journal*")] == ["journal.2.jsonl"]


def test_a_journal_is_thinned_while_others_write(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path, max_bytes=1000)
    journal.write([event(1), *(progressed(step) for step in range(50))])
    mark = journal.mark()
    journal.write([progressed(50), event(2)])
    thinned = journal.thin_out(mark)
    assert thinned is not None
    journal.write([event(3)])
    journal.take_over(thinned)
    journal.write([event(4)])
    history = read_history(tmp_path)
    assert (timers(tmp_path), history.problems) == (["t1", "t2", "t3", "t4"], [])
    told = [step.event for step in steps(history.records)]
    assert [each.step for each in told if isinstance(each, Progressed)] == [49, 50]


def _random_story(folder: Path, dice: random.Random) -> Journal:
    """Several controllers, one after the other: some die while they write, some write on after the next has begun."""
    journal, _ = open_journal(folder)
    step = 0
    for _ in range(dice.randint(1, 4)):
        for _ in range(dice.randint(0, 12)):
            step += 1
            first = journal.write(
                [progressed(step)] * dice.randint(1, 4) if dice.random() < 0.8 else [event(step), progressed(step)]
            )
            if dice.random() < 0.2:
                journal.write([Entry("decided", 0.0, encode(Decided(of=first, actions=(Note(text="x"),))))])
        if dice.random() < 0.2:
            shrink(journal)
        old = journal
        if dice.random() < 0.6:
            journal, _ = open_journal(folder, forget=dice.random() < 0.15)
        if old is not journal and dice.random() < 0.4:
            with contextlib.suppress(Superseded):
                old.write([event(99)])
        if old is not journal and old.path.exists() and dice.random() < 0.4:
            with open(old.path, "ab") as file:
                file.write(dice.choice([b'{"seq":9', b"\0" * 30]))
    journal.write([progressed(step + 1), progressed(step + 2)])
    return journal


def _thinned_in_memory(history: History, mark: FileMark, journal: Journal) -> bytes:
    """What is to be in the smaller file, the simple way."""
    records = [record for record in history.records if record.seq <= mark.seq]
    decided = {msgspec.json.decode(record.body)["of"] for record in records if record.kind == "decided"}
    is_progress = [record.kind == "event" and b'"progressed"' in bytes(record.body) for record in records]
    kept = [
        record
        for at, record in enumerate(records)
        if record.kind != "opened"
        and not (is_progress[at] and [*is_progress, False][at + 1] and record.seq not in decided)
    ]
    about = {
        "after_seq": 0,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "thinned_to": mark.seq,
        "kept": len(kept),
    }
    lines = [(0, kept[0].at, "opened", msgspec.json.encode(about))]
    lines += [(one.seq, one.at, one.kind, bytes(one.body)) for one in kept]
    return b"".join(format_record(seq, at, journal.epoch, kind, body) for seq, at, kind, body in lines)  # type: ignore[arg-type]


def test_a_journal_is_thinned_line_by_line_as_it_would_be_in_memory(tmp_path: Path) -> None:
    whole = 0
    for seed in range(60):
        dice = random.Random(seed)
        folder = tmp_path / str(seed)
        journal = _random_story(folder, dice)
        if dice.random() < 0.4:  # one line of one file is damaged, lost, or there twice
            path = dice.choice(sorted(folder.glob("journal.*.jsonl")))
            lines = path.read_bytes().splitlines(keepends=True)
            at = dice.randrange(len(lines))
            lines[at : at + 1] = dice.choice([[], [lines[at]] * 2, [lines[at].replace(b'"crc32":', b'"crc32":1')]])
            path.write_bytes(b"".join(lines))
            journal._size = journal.path.stat().st_size
        mark = journal.mark()
        journal.write([progressed(1000)])
        history = read_history(folder)
        thinned = journal.thin_out(mark)
        if history.damaged:
            assert thinned is None, (seed, history.problems)
            continue
        if thinned is not None:
            whole += 1
            assert thinned.path.read_bytes() == _thinned_in_memory(history, mark, journal), seed
            assert thinned.size == thinned.path.stat().st_size
    assert whole > 30


def test_a_journal_that_somebody_else_has_read_is_not_replaced(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    journal.write([event(1)])
    thinned = journal.thin_out(journal.mark())
    assert thinned is not None
    before = journal.path.read_bytes()
    claim_epoch(tmp_path)
    journal.take_over(thinned)
    assert journal.path.read_bytes() == before


@pytest.mark.parametrize("broken", ["sync_folder", "replace"])
def test_what_is_written_after_a_thinning_that_failed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    journal, _ = open_journal(tmp_path)
    journal.write([event(1)])
    with monkeypatch.context() as patched:
        patched.setattr(os if broken == "replace" else supervisor.controller.journal, broken, fail)
        with pytest.raises(OSError, match="Stale"):
            shrink(journal)
    journal.write([event(2)])
    assert timers(tmp_path) == ["t1", "t2"]


def test_a_new_story_in_the_same_folder_forgets_the_old_one(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    journal.write([event(1)])
    second, history = open_journal(tmp_path, forget=True)
    assert history.records == []
    second.write([event(2)])
    assert timers(tmp_path) == ["t2"]
    assert timers(journal.path) == ["t1"]


def test_no_hard_links_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(_source: object, _target: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", link)
    assert [claim_epoch(tmp_path) for _ in range(3)] == [1, 2, 3]


def test_a_round_is_written_once_for_all_its_nodes() -> None:
    nodes = tuple(f"n{i}" for i in range(500))
    formed = Round(attempt=1, nodes=nodes, store_host="n0", store_port=1)
    actions = [
        Assign(assignment=Assignment(epoch=1, version=1, node=n, role="member", attempt=1, stage="run", round=formed))
        for n in nodes
    ]
    names = RoundNames()
    told = [Assign(assignment=names.shorten(one.assignment)) for one in actions]
    body = decided_entry(1, 0.0, told, "", names.fresh()).body
    assert len(body) < 500 * 300
    decided = msgspec.json.decode(body, type=Decided)
    assert decided.names == {digest_of(nodes): nodes}
    for rank, action in enumerate(decided.actions):
        assert isinstance(action, Assign)
        formed_again = action.assignment.round
        assert formed_again is not None
        assert (formed_again.nodes, formed_again.names) == ((), digest_of(nodes))
        assert (formed_again.rank_of(nodes[rank]), formed_again.size, formed_again.leader) == (rank, 500, "n0")
    assert names.fresh() == {}


def test_an_event_of_the_future_is_skipped_and_told(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    journal.write([event(1)])
    journal.write([Entry("event", 5.0, b'{"event":"of_the_future","at":5.0}'), event(2)])
    assert timers(tmp_path) == ["t1", "t2"]
    problems: list[str] = []
    list(steps(read_history(tmp_path).records, problems))
    assert "of_the_future" in problems[0]


# ----- the end of a long journal -----


def test_the_end_of_a_journal_is_as_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor.controller.journal, "TAIL_BYTES", 500)
    first, _ = open_journal(tmp_path)
    first.write([event(number) for number in range(20)])
    second, _ = open_journal(tmp_path)
    second.write([event(number) for number in range(20, 60)])
    with open(second.path, "ab") as file:
        file.write(b'{"seq":9')  # being written

    def events(history: History, after: int) -> list[tuple[int, bytes]]:
        records = [one for one in history.records if one.kind == "event" and one.seq > after]
        return [(one.seq, bytes(one.body)) for one in records]

    for seq in (0, 1, 5, 21, 22, 23, 40, 61, 62, 63, 99):
        assert events(read_after(tmp_path, seq), seq) == events(read_history(tmp_path), seq), seq
    assert len(read_after(tmp_path, 50).records) < 20


def test_a_damaged_end_is_read_as_ever(tmp_path: Path) -> None:
    journal, _ = open_journal(tmp_path)
    journal.write([event(1)])
    with open(journal.path, "ab") as file:
        file.write(b"garbage\n")
    journal.write([event(2)])
    assert read_after(tmp_path, 2).problems == read_history(tmp_path).problems != []
