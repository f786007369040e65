"""The store of past incidents, as several jobs use it, and when it is not whole."""

from __future__ import annotations

import contextlib
import os
import resource
import sqlite3
import stat
import struct
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recovery import incident_store
from recovery.incident_memory import DAY_S, WINDOW_S, ClosedIncident, Correction, normalised
from recovery.incident_store import FILE, KEEP_S, RECORD_BYTES, IncidentStore

NOW = 1_800_000_000.0
XID = "NVRM: Xid (PCI:0000:c1:00): 79, pid=4711, name=python, GPU has fallen off the bus."


def incident(number: int = 1, job: str = "llama", **fields: Any) -> ClosedIncident:
    values: dict[str, Any] = {
        "job": job,
        "job_id": f"{job}-1",
        "incident": f"i-{number}",
        "opened_at": NOW + 60.0 * number,
        "failure_class": "gpu_fallen_off_bus",
        "nodes": ("n7",),
        "gpus": ("n7/0000:c1:00",),
        "evidence": (XID,),
        "fingerprint": "f" * 16,
        "cordoned": ("n7",),
        "next_attempt": 2,
    }
    return ClosedIncident(**(values | fields))


def oom(number: int, **fields: Any) -> ClosedIncident:
    words = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB"
    return incident(number, failure_class="gpu_oom", evidence=(words,), fingerprint="a" * 16, **fields)


@pytest.fixture
def store(tmp_path: Path) -> IncidentStore:
    return IncidentStore(tmp_path, busy_s=0.1)


def test_a_store_that_is_not_there_yet_is_empty(store: IncidentStore) -> None:
    assert store.all() == []
    assert store.similar("xid") == []
    assert store.recurrences(incident()) == ()
    assert not store.path.exists()


def test_what_is_written_is_read(store: IncidentStore) -> None:
    store.write([incident(2), incident(1)], NOW)
    assert store.all() == [incident(1), incident(2)]


def test_the_most_similar_comes_first_and_only_what_was_before(store: IncidentStore) -> None:
    store.write([oom(1), incident(2), oom(3)], NOW)
    best = store.similar("kernel: NVRM: Xid 79, GPU has fallen off the bus", 2)
    assert best[0].incident.incident == "i-2"
    assert best[0].score > 0
    found = [one.incident.incident for one in store.similar("CUDA out of memory", before=NOW + 100)]
    assert found == ["i-1"]
    assert store.similar("CUDA out of memory", corrected_only=True) == []


@pytest.mark.parametrize("text", ['" OR words:*', "NEAR(a b) AND NOT (", "a" * 100_000, "\0\ud800 Xid", "", "*", "-"])
def test_no_text_is_a_query(store: IncidentStore, text: str) -> None:
    store.write([incident()], NOW)
    store.similar(text)


def test_a_correction_survives_a_later_word_of_the_job(store: IncidentStore) -> None:
    store.write([incident()], NOW)
    told = Correction(failure_class="nvlink_error", note="a cable was replaced", by="op", at=NOW + 9)
    assert store.correct("llama-1", "i-1", [told])
    assert not store.correct("llama-1", "i-9", [told])
    store.write([incident(outcome="attempt 2 made a step")], NOW)
    (found,) = store.all(corrected_only=True)
    assert (found.truth, found.outcome) == ("nvlink_error", "attempt 2 made a step")
    assert found.corrections == (told,)
    assert store.similar("cable")[0].incident == found


def test_recurrence_on_a_node_names_the_last_time(store: IncidentStore) -> None:
    cable = Correction(failure_class="gpu_fallen_off_bus", note="a cable was replaced", by="op", at=NOW)
    first = incident(1, opened_at=NOW - 9 * DAY_S, fingerprint="", gpus=())
    second = incident(2, job="other", opened_at=NOW - DAY_S, fingerprint="", gpus=(), corrections=(cable,))
    elsewhere = incident(3, opened_at=NOW - DAY_S, nodes=("n8",), fingerprint="", gpus=())
    long_ago = incident(4, opened_at=NOW - WINDOW_S - DAY_S)
    store.write([first, second, elsewhere, long_ago], NOW)
    (found,) = store.recurrences(incident(5, opened_at=NOW, fingerprint=""))
    assert (found.of, found.name, found.times, found.since_at) == ("node", "n7", 3, first.opened_at)
    assert (found.last.job, found.last.note, found.last.by) == ("other", "a cable was replaced", "op")


def test_an_incident_is_no_recurrence_of_itself_nor_of_later_ones(store: IncidentStore) -> None:
    store.write([incident(1), incident(2)], NOW)
    assert store.recurrences(incident(1)) == ()


def test_the_same_place_in_other_words_is_told_once(store: IncidentStore) -> None:
    store.write([incident(1)], NOW)
    assert [one.of for one in store.recurrences(incident(2))] == ["gpu"]


def test_several_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    def write(job: int) -> None:
        mine = IncidentStore(tmp_path, busy_s=20.0)
        for number in range(5):
            mine.write([incident(number, job=f"job{job}")], NOW)

    threads = [threading.Thread(target=write, args=(job,)) for job in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(IncidentStore(tmp_path).all()) == 20


def test_old_incidents_go_but_for_those_that_were_corrected(store: IncidentStore) -> None:
    kept = Correction(failure_class="gpu_hang", at=NOW)
    old = NOW - KEEP_S - DAY_S
    store.write([incident(1, opened_at=old), incident(2, opened_at=old, corrections=(kept,)), incident(3)], NOW)
    assert [one.incident for one in store.all()] == ["i-2", "i-3"]
    assert len(store.similar("xid")) == 2


def test_the_file_has_a_limit(tmp_path: Path) -> None:
    store = IncidentStore(tmp_path, most_bytes=200_000)
    for number in range(60):
        store.write([incident(number, evidence=tuple(f"line {number} {n} {'x' * 400}" for n in range(10)))], NOW)
    assert store.path.stat().st_size < 400_000
    assert store.all()[-1].incident == "i-59"


def test_many_incidents_are_too_many(store: IncidentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident_store, "MOST_INCIDENTS", 3)
    store.write([incident(number) for number in range(5)], NOW)
    assert [one.incident for one in store.all()] == ["i-2", "i-3", "i-4"]


# ----- a store that is not as it should be: an OSError, in words, and within the time -----


def test_damaged_locked_newer_foreign(store: IncidentStore) -> None:
    store.write([incident()], NOW)
    whole = store.path.read_bytes()
    with sqlite3.connect(store.path) as held:
        held.execute("BEGIN EXCLUSIVE")
        _fails(store, "lock")
    held.close()
    assert len(store.all()) == 1
    for damage in (b"not a database at all" * 400, whole[:100] + os.urandom(len(whole) - 100)):
        store.path.write_bytes(damage)
        _fails(store, "damaged")
    store.path.write_bytes(whole)
    with sqlite3.connect(store.path) as newer:
        newer.execute("PRAGMA user_version = 7")
    _fails(store, "newer")
    store.path.unlink()
    with sqlite3.connect(store.path) as foreign:
        foreign.execute("CREATE TABLE other (a)")
    _fails(store, "another program")


def _fails(store: IncidentStore, word: str) -> None:
    for call in (
        lambda: store.write([incident(3)], NOW),
        lambda: store.all(),
        lambda: store.similar("xid bus"),
        lambda: store.recurrences(incident(4)),
    ):
        with pytest.raises(OSError, match=word):
            call()


def test_a_link_or_a_pipe_is_no_store(store: IncidentStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"")
    store.path.symlink_to(tmp_path / "elsewhere")
    _fails(store, "no file")
    store.path.unlink()
    os.mkfifo(store.path)
    _fails(store, "no file")


def journal_that_names(other: Path, pages: int) -> bytes:
    """As SQLite leaves one of a transaction over several files; it deletes `other` when it has read it."""
    magic, name = bytes.fromhex("d9d505f920a163d7"), os.fsencode(other)
    header = magic + struct.pack(">IIIII", 0, 0, pages, 512, 4096)
    lock_page = (0x40000000 // 4096) + 1
    return header.ljust(512, b"\0") + struct.pack(f">I{len(name)}sII", lock_page, name, len(name), sum(name)) + magic


def test_a_journal_of_somebody_else_deletes_no_file(store: IncidentStore, tmp_path: Path) -> None:
    store.write([incident(1)], NOW)
    precious = tmp_path / "precious"
    precious.write_text("x")
    journal = tmp_path / f"{FILE}-journal"
    journal.write_bytes(journal_that_names(precious, store.path.stat().st_size // 4096))
    _fails(store, "names another file")
    assert precious.exists()
    journal.unlink()
    journal.symlink_to(precious)
    _fails(store, "no file")


@pytest.mark.parametrize("record", ["zeroblob(900000000) || ''", "5"])
def test_a_store_that_computes_takes_no_memory(store: IncidentStore, record: str) -> None:
    store.write([incident(1)], NOW)
    with sqlite3.connect(store.path) as other:
        other.execute("ALTER TABLE incident RENAME TO held")
        fields = "id, job_id, name, opened_at, corrected"
        other.execute(f"CREATE VIEW incident AS SELECT {fields}, {record} AS record FROM held")
    other.close()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(OSError):
        assert store.recurrences(incident(2)) == ()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_a_write_ahead_log_is_not_used(store: IncidentStore) -> None:
    store.write([incident(1)], NOW)
    with contextlib.closing(sqlite3.connect(store.path)) as other:
        other.execute("PRAGMA journal_mode = WAL")
    _fails(store, "write-ahead")


@pytest.mark.parametrize("at", [1e300, -1e300, 1e12])
def test_a_time_that_cannot_be_shown_is_no_record(store: IncidentStore, at: float) -> None:
    store.write([incident(1)], NOW)
    with sqlite3.connect(store.path) as other:
        record = msgspec.json.encode(incident(1, opened_at=at)).decode()
        other.execute("UPDATE incident SET record = ?", (record,))
    other.close()
    assert store.recurrences(incident(2)) == ()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        IncidentStore(tmp_path / "none").all()


def test_a_writer_that_dies_leaves_nothing_half(store: IncidentStore) -> None:
    store.write([incident(1)], NOW)
    with pytest.raises(AttributeError):
        store.write([incident(2), None], NOW)  # type: ignore[list-item]
    assert [one.incident for one in store.all()] == ["i-1"]


def test_who_may_write_to_the_folder_may_write_to_the_file(tmp_path: Path) -> None:
    for folder_mode, mode in ((0o2775, 0o664), (0o700, 0o600)):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(folder_mode)
        IncidentStore(folder).write([incident()], NOW)
        assert stat.S_IMODE((folder / FILE).stat().st_mode) == mode


def test_what_others_wrote_is_cleaned_and_bounded(store: IncidentStore) -> None:
    store.write([incident(1)], NOW)
    key = "sk-" + "a1" * 20
    hostile = incident(1, why=f"\x1b[31m{key}\nforged", evidence=("e" * 900,) * 50, nodes=("n\n7",) * 99)
    with sqlite3.connect(store.path) as other:
        other.execute("UPDATE incident SET record = ?", (msgspec.json.encode(hostile).decode(),))
    (read,) = store.all()
    assert not any(hidden in read.why for hidden in (key, "\n", "\x1b"))
    assert (len(read.evidence), len(read.nodes)) == (10, 16)
    assert len(read.evidence[0]) <= 500
    with sqlite3.connect(store.path) as other:
        other.execute("UPDATE incident SET record = ?", ("x" * (RECORD_BYTES + 1),))
    assert store.all() == []
    with sqlite3.connect(store.path) as other:
        other.execute("UPDATE incident SET record = '{}'")
    assert store.all() == []


def test_thousands_of_hosts_are_soon_looked_through() -> None:
    hosts = [f"gpu-a-{number:04d}{domain}" for number in range(4096) for domain in ("", ".cluster.example")]
    begun = time.process_time()
    assert normalised("NCCL error on gpu-a-0007.cluster.example: step 4", hosts) == "nccl error on host: step #"
    assert time.process_time() - begun < 0.1
