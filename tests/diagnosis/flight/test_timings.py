"""From dumps to who is late, and to slow links."""

from __future__ import annotations

import json

import pytest

from diagnosis.flight import read_dump, timings

START = 1_700_000_000_000_000_000
WORLD = {"0": ("default_pg", (0, 1, 2, 3))}


def entry(name, number, seq, at, **more):
    return {
        "record_id": seq,
        "pg_id": number,
        "process_group": [name, ""],
        "collective_seq_id": seq,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": at,
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "retired": True,
        "is_p2p": False,
        **more,
    }


def dump(rank, groups, entries):
    config = {
        name: {"name": name, "desc": desc, "ranks": str(list(ranks))}
        for name, (desc, ranks) in groups.items()
        if rank in ranks
    }
    return read_dump(json.dumps({"version": "2.10", "pg_config": config, "entries": entries}).encode(), rank)


def late(rank, late_ns, **more):
    entries = [entry("0", 0, seq, START + seq * 200_000_000 + late_ns, **more) for seq in range(1, 50)]
    send = entry("0", 0, 0, START, is_p2p=True, p2p_seq_id=1, profiling_name="nccl:send 0->1")
    return dump(rank, WORLD, [*entries, *([send] if rank < 2 else [])])


def test_a_rank_that_is_always_late():
    told = timings.of_dumps([late(rank, 100_000_000 if rank == 3 else 0) for rank in range(4)])
    assert {one.group for one in told} == {"default_pg (ranks 0, 1, 2, 3)", "p2p 0->1"}
    found = timings.slowdowns([one for one in told if not one.group.startswith("p2p")])
    assert [(one.kind, one.ranks) for one in found] == [("rank", (3,))]
    assert timings.slowdowns(told) == ()  # a group of several stages: they wait for each other by nature


def test_the_gpu_tells_what_clocks_cannot():
    shifted = [late(rank, 100_000_000 if rank == 3 else 0, duration_ms=1.0) for rank in range(4)]
    told = [one for one in timings.of_dumps(shifted) if not one.group.startswith("p2p")]
    assert all(len(one.duration_us) == len(one.seqs) and set(one.duration_us) == {1000} for one in told)
    assert timings.slowdowns(told) == ()  # the clock of rank 3 is ahead: no GPU waited
    waiting = [late(rank, 0, duration_ms=1.0 if rank == 3 else 80.0) for rank in range(4)]
    told = [one for one in timings.of_dumps(waiting) if not one.group.startswith("p2p")]
    assert [one.ranks for one in timings.slowdowns(told)] == [(3,)]


def test_ends_of_calls_put_clocks_right():
    ahead = [
        dump(
            rank,
            WORLD,
            [
                entry("0", 0, seq, at := START + seq * 200_000_000 + shift, time_discovered_completed_ns=at + 1_000_000)
                for seq in range(1, 50)
            ],
        )
        for rank, shift in enumerate((0, 0, 0, 100_000_000))
    ]
    assert timings.slowdowns(timings.of_dumps(ahead)) == ()


def test_a_slow_link():
    groups = {str(pair): (f"TP_{pair}", (2 * pair, 2 * pair + 1)) for pair in range(6)}
    groups["9"] = ("DP_0", (0, 2, 4, 6, 8, 10))
    dumps = [
        dump(
            rank,
            groups,
            [
                entry(str(rank // 2), 0, seq, START + seq * 100_000_000, duration_ms=60.0 if rank // 2 == 4 else 10.0)
                for seq in range(1, 40)
            ],
        )
        for rank in range(12)
    ]
    (found,) = timings.slowdowns(timings.of_dumps(dumps))
    assert (found.kind, found.ranks) == ("link", (8, 9))
    assert "TP_4 (ranks 8, 9)" in found.why


PIPE = {"0": ("PP_0", (3, 5, 7, 9))}


def stage(at, transfers_ms):
    """One of four stages that send forward and back; a stage waits for the one before it, and that is no transfer."""
    entries, seq = [], 0
    for step in range(40):
        now = START + step * 400_000_000
        for op, peer, waits_ms in (
            ("recv", at - 1, 90),
            ("send", at + 1, 0),
            ("recv", at + 1, 80),
            ("send", at - 1, 0),
        ):
            if not 0 <= peer < 4:
                continue
            seq, now = seq + 1, now + 50_000_000
            took = transfers_ms[min(at, peer)] + waits_ms
            name = f"nccl:{op} {at}{'->' if op == 'send' else '<-'}{peer}"
            more = {"is_p2p": True, "p2p_seq_id": seq, "profiling_name": name, "duration_ms": took}
            entries.append(entry("0", 0, 0, now, **more))
    return dump(PIPE["0"][1][at], PIPE, entries[:-1] if at == 1 else entries)


def test_two_ranks_that_are_slow_to_each_other_are_a_slow_link():
    (found,) = timings.slowdowns(timings.of_dumps([stage(at, (5.0, 40.0, 5.0)) for at in range(4)]))
    assert (found.kind, found.ranks) == ("link", (5, 7))
    assert found.cost_percent == pytest.approx(100 * 2 * 35 / 400, rel=0.2)
    assert f"spare {found.cost_percent:.0f} % of the time" in found.why
    assert timings.slowdowns(timings.of_dumps([stage(at, (5.0, 6.0, 5.0)) for at in range(4)])) == ()


def test_nothing_gives_nothing():
    assert timings.of_dumps([]) == []
