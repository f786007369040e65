"""Processes that read: one that is killed costs nothing but time."""

from __future__ import annotations

import multiprocessing

from diagnosis.logs.reader import Place
from supervisor.diagnose import log_files
from supervisor.diagnose import read as diagnose_read

LOG = b"".join(b"step: %d loss: 2.%d\n" % (n, n) for n in range(20_000))


def test_a_process_that_is_killed_takes_no_other_file_along(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnose_read, "POOL_BYTES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    for number in range(12):
        (tmp_path / f"rank{number}.log").write_bytes(LOG)
    found = log_files.find([str(tmp_path)]).sources
    killed = []

    def note(_):
        if not killed:
            killed.extend(multiprocessing.active_children())
            for process in killed:
                process.kill()

    told = list(diagnose_read.read_all(found, [Place()] * 12, diagnose_read.ReadOptions(), note))
    assert killed
    assert [one.problem for one in told] == [""] * 12
    assert [one.logs[0].lines for one in told] == [20_000] * 12


def test_a_file_that_always_costs_the_process_its_life_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnose_read, "MAX_KILLED", 3)
    sources = [log_files.Source(str(tmp_path / f"rank{number}.log"), 9 - number) for number in range(4)]

    def dying(given, *_):
        return ((number, diagnose_read.Reading()) for number in given if number > 1)

    monkeypatch.setattr(diagnose_read, "_in_pool", dying)
    told = list(diagnose_read._in_processes(sources, [Place()] * 4, diagnose_read.ReadOptions(), lambda _: None, 2))
    assert [bool(one.problem) for one in told] == [True, True, False, False]
