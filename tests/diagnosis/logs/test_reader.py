"""What a log tells: whose lines, which tracebacks, how far training came; in bounded memory."""

from __future__ import annotations

import random

import pytest

from diagnosis.kernel import log as kernel_rules
from diagnosis.logs import reader as logs
from diagnosis.logs.reader import LogReader, Place

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/home/u/train.py", line 41, in step',
    "    loss = batch['x']",
    "KeyError: 'x'",
]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def steps(first, last):
    return [f"step {n}/90000 loss {3 - n / 90000:.3f} grad_norm 0.9" for n in range(first, last)]


def log(lines, *, block=200, **options):
    log = LogReader("x", **options)
    for at in range(0, len(lines), block):
        log.feed("\n".join(lines[at : at + block]).encode())
    log.end()
    return log.summary()


def test_progress_and_what_came_after_it():
    told = log([*steps(0, 5000), *TRACEBACK, "bye"])
    assert (told.step, told.last_step, told.progress_line, told.finished_line) == (4999, 90_000, 5000, None)
    assert [(one.line, one.traceback.line) for one in told.tracebacks] == [(5001, "KeyError: 'x'")]
    assert (told.lines, told.tail[-1]) == (5005, "bye")
    loss = next(curve for curve in told.curves if curve.name == "loss")
    assert (loss.points[-1].step, loss.points[-1].line) == (4999, 5000)


def test_the_work_is_complete():
    told = log([*steps(0, 50), "Training completed! Do not forget to share your model", "wandb: Synced 5 files"])
    assert told.finished_line == 51
    assert log([*steps(0, 50), "training complete", *steps(50, 60)]).finished_line is None
    assert log([*steps(0, 50), "INFO: [EARLY STOP] nothing gained, stopping training."]).finished_line == 51
    assert log([*steps(0, 50), "train: EarlyStopping(patience=3) watches val_loss"]).finished_line is None


def test_each_rank_of_a_mixed_log():
    lines = [f"[rank{n % 4}]: {line}" for n, line in enumerate(steps(0, 400))]
    lines += [f"[rank2]: {line}" for line in TRACEBACK]
    lines += [f"[rank1]: {OOM}"]
    told = log(lines)
    assert told.rank is None
    assert [(one.rank, one.line) for one in told.tracebacks] == [(2, 401)]
    assert [(one.failure_class.value, one.rank, one.line) for one in told.matches] == [("gpu_oom", 1, 405)]


def test_mixed_tracebacks_without_a_prefix_of_torchs():
    """srun -l: the lines of two ranks alternate."""
    mixed = [f"{rank}: {line}" for line in TRACEBACK for rank in (0, 1)]
    told = log([*(f"{n % 8}: {line}" for n, line in enumerate(steps(0, 40))), *mixed])
    assert [(one.rank, one.traceback.name) for one in told.tracebacks] == [(0, "KeyError"), (1, "KeyError")]


def test_the_first_and_the_last_traceback_of_a_long_log_are_told():
    first = [line.replace("KeyError: 'x'", "ValueError: first") for line in TRACEBACK]
    told = log([*steps(0, 9000), *first, *steps(9000, 30_000), *TRACEBACK, *steps(30_000, 39_000)])
    assert [(one.line, one.traceback.name) for one in told.tracebacks] == [(9001, "ValueError"), (30_005, "KeyError")]


@pytest.mark.parametrize("block", [1, 2, 3, 50])
def test_a_traceback_over_the_edges_of_blocks(block):
    told = log([*["filler"] * 4000, *TRACEBACK, *["more"] * 4000], block=block)
    assert [(one.line, one.traceback.name) for one in told.tracebacks] == [(4001, "KeyError")]


def test_repeated_lines_are_one_match_and_ranks_are_apart():
    told = log([f"[rank{n % 3}]: {OOM}" for n in range(30)])
    assert [(one.rank, one.count, one.line, one.last_line) for one in told.matches] == [
        (0, 10, 1, 28),
        (1, 10, 2, 29),
        (2, 10, 3, 30),
    ]


def test_a_flood_of_different_matches_is_bounded():
    told = log([f"[rank{n}]: {OOM}" for n in range(5000)])
    assert len(told.matches) == logs.MATCHES_OF_A_RULE
    assert sum(one.count for one in told.matches) == 5000


def test_who_speaks_is_told_by_the_lines_or_else_by_the_name():
    place = Place(3, "node1")
    assert (log(steps(0, 9), place=place).rank, log(steps(0, 9), place=place).node) == (3, "node1")
    assert log([f"[rank11]: {line}" for line in steps(0, 9)], place=place).rank == 11
    kernel = log([f"Jan 14 03:55:30 cn01 kernel: [ {n}.5] all is well" for n in range(9)])
    assert (kernel.kind, kernel.node) == ("kernel", "cn01")


def test_lines_have_the_time_that_they_tell():
    told = log(["2026-11-21 20:20:30 hello", f"2026-11-21 20:20:31,500 ERROR {OOM}", "2026-11-21T20:20:32Z bye"])
    assert (told.first_at, told.matches[0].at, told.last_at) == (1795292430.0, 1795292431.5, 1795292432.0)


def test_slurms_own_log_is_the_schedulers():
    lines = ["slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T20:20:31 DUE TO TIME LIMIT ***"]
    assert log(lines).kind == "scheduler"


def test_reports_of_launchers_are_read_where_they_stand():
    report = ["srun: error: node3: task 17: Killed"]
    told = log([*steps(0, 5000), *report, *["and on"] * 9000])
    assert [(one.rank, one.line) for one in told.launcher] == [(17, 5001)]


def test_a_flood_of_the_kernel_hides_nothing_else(monkeypatch):
    monkeypatch.setattr(logs, "MAX_EVENTS", 50)
    flood = [f"[ {n}.5] NVRM: Xid (PCI:0000:c1:00): 13, pid={n}, name=python, Graphics Exception" for n in range(200)]
    told = log([*flood, "[ 900.5] NVRM: Xid (PCI:0000:c2:00): 79, pid=5, GPU has fallen off the bus.", *flood])
    assert [(one.code, one.line) for one in told.events[-1:]] == [(79, 201)]
    assert (len(told.events), told.events_left_out) == (51, 350)


def xid(number, gpu, code=13):
    said = f"NVRM: Xid (PCI:0000:{gpu}:00): {code}, pid={1000 + number}, name=python, ESR 0x{number:x}=0x{7 * number:x}"
    return f"Nov 21 20:20:{number % 60:02d} n7 kernel: [{100 + number / 7:12.6f}] {said}"


def test_lines_of_a_flood_that_are_only_counted_tell_what_they_told(monkeypatch):
    monkeypatch.setattr(logs, "MAX_EVENTS", 50)
    lines = [xid(n, "c1") for n in range(400)]
    lines[200:200] = [xid(n, "02") for n in range(30)]
    lines[300:300] = [f"{xid(n, 'c1', 94)}\n{OOM}" for n in range(20)]
    samples = [one for rule in kernel_rules.default().rules for one in rule.samples]
    random.Random(7).shuffle(samples)
    lines += [*samples, *lines, *samples]
    fast = log(lines)
    monkeypatch.setattr(logs, "MAX_FLOODS", 0)
    assert repr(fast) == repr(log(lines))
    assert len([one for one in fast.events if one.device == "0000:02:00" and one.code == 13]) == logs.RARE_EVENTS
    assert fast.events_left_out > 700


def test_consequences_on_many_ranks_hide_no_cause(monkeypatch):
    monkeypatch.setattr(logs, "MAX_MATCHES", 64)
    flood = [f"[rank{n}]: RuntimeError: Connection closed by peer [127.0.0.1]:4321" for n in range(100)]
    told = log([*flood, f"[rank7]: {OOM}"])
    assert {one.failure_class.value for one in told.matches} >= {"gpu_oom"}
    assert len(told.matches) <= 64 + logs.FIRST_OF_A_RULE
