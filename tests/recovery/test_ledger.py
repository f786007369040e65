"""The ledger's records, and the state of the nodes that follows from them."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.ledger import (
    AHEAD_S,
    DAY_S,
    HOUR_S,
    KEEP_S,
    LINE_BYTES,
    PROBATION_S,
    PROPOSAL_S,
    RESULTS_KEPT,
    RETEST_S,
    WINDOW_S,
    CordonLifted,
    CordonScope,
    LedgerEntry,
    LedgerLine,
    LedgerRecord,
    NodeCordoned,
    NodeFailed,
    NodesSeen,
    TestResult,
    compacted,
    duration_s,
    encode_entry,
    merge,
    read_line,
)

NOW = 1_800_000_000.0
_numbers = itertools.count()


def entry(what: LedgerRecord, at: float = NOW, by: str = "policy", name: str = "", job: str = "j1") -> LedgerEntry:
    return LedgerEntry(v=1, id=name or f"e{next(_numbers)}", at=at, by=by, job=job, writer="w", what=what)


def cordon(
    node: str = "n7", scope: CordonScope = "cluster", until: float | None = None, fleet: int = 8
) -> NodeCordoned:
    return NodeCordoned(
        node=node, scope=scope, reason="bad", failure_class="gpu_memory_error", until=until, fleet=fleet
    )


def failed(node: str = "n7", what: str = "gpu_memory_error") -> NodeFailed:
    return NodeFailed(node=node, failure_class=what, incident="i-1")


def test_a_result_keeps_all_that_is_known_through_json() -> None:
    result = TestResult(
        node="n7",
        gpu="GPU-1",
        test="matmul_bf16_4096",
        value=612.5,
        unit="TFLOP/s",
        verdict="fail",
        reason="14 % below the median of 8 nodes",
        peers=("n8",),
        at=1000.0,
        kind="H100 torch 2.13.0 CUDA 12.8",
        seconds=1.5,
    )
    assert msgspec.json.decode(msgspec.json.encode(result), type=TestResult) == result
    line = read_line(encode_entry(entry(result)), NOW)
    assert line.entry is not None
    assert line.entry.what == result


def test_a_result_needs_no_value() -> None:
    assert TestResult(node="n7", test="step_digest", digest="ab12", verdict="unknown", at=1.0).value is None


# ----- cordons -----


def test_a_cordon_holds_until_it_is_lifted_or_over() -> None:
    on = entry(cordon(), NOW - 10, name="c1")
    assert merge([on], NOW)["n7"].state == "CORDONED"
    off = entry(CordonLifted(node="n7", lifts=("c1",)), NOW)
    assert merge([on, off], NOW)["n7"].state == "IN USE"
    limited = entry(cordon(until=NOW + 60))
    assert merge([limited], NOW + 59)["n7"].cordons == (limited,)
    assert merge([limited], NOW + 61)["n7"].cordons == ()


def test_a_lift_leaves_a_cordon_that_its_writer_had_not_read() -> None:
    """Two jobs at once, and no clock that both trust: the second cordon stays, though its time is before the lift's."""
    first, second = entry(cordon(), NOW - 20, name="c1"), entry(cordon(), NOW - 10, name="c2", job="j2")
    lift = entry(CordonLifted(node="n7", lifts=("c1",)), NOW)
    assert merge([first, second, lift], NOW)["n7"].cordons == (second,)


def test_a_proposal_keeps_nobody_off_and_is_forgotten() -> None:
    proposal = entry(cordon(scope="proposal"))
    assert merge([proposal], NOW)["n7"].proposals == (proposal,)
    assert merge([proposal], NOW)["n7"].state == "IN USE"
    assert merge([proposal], NOW + PROPOSAL_S + 1)["n7"].proposals == ()
    assert merge([entry(cordon(scope="job"))], NOW)["n7"].cordons == ()


def test_the_breaker_counts_the_cordons_of_all_jobs() -> None:
    wanted = [entry(cordon(f"n{i}"), NOW + i, job=f"j{i}") for i in range(4)]
    found = merge(wanted, NOW + 10)
    assert [name for name, one in found.items() if one.cordons] == ["n0", "n1"]
    assert [name for name, one in found.items() if one.proposals] == ["n2", "n3"]
    more = merge([*wanted, entry(cordon("n9"), NOW + HOUR_S + 30)], NOW + HOUR_S + 60)
    assert more["n9"].cordons
    assert not more["n3"].cordons, "an hour later it is no cordon either"
    of_people = [entry(cordon(f"n{i}"), NOW + i, by="ann") for i in range(4)]
    assert all(one.cordons for one in merge(of_people, NOW + 10).values())
    large = [entry(cordon(f"n{i}", fleet=1000), NOW + i) for i in range(120)]
    assert sum(bool(one.cordons) for one in merge(large, NOW + 200).values()) == 100


def test_two_entries_of_one_name_hide_nothing() -> None:
    ours, theirs = entry(cordon(), name="c1"), entry(failed("n8"), name="c1")
    assert merge([ours, theirs], NOW)["n7"].cordons == (ours,)


# ----- repairs and scores -----


def test_a_repair_begins_a_probation_and_a_lift_without_a_word_does_not() -> None:
    on = entry(cordon(), NOW - DAY_S, name="c1")
    repaired = merge([on, entry(CordonLifted(node="n7", lifts=("c1",), repair="GPU 3 replaced"), NOW)], NOW)["n7"]
    assert (repaired.state, repaired.probation_until) == ("PROBATION", NOW + PROBATION_S)
    taken_back = merge([on, entry(CordonLifted(node="n7", lifts=("c1",)), NOW)], NOW)["n7"]
    assert (taken_back.state, taken_back.probation_until) == ("IN USE", None)


def test_probation_ends_and_a_new_cordon_comes_before_it() -> None:
    lift = entry(CordonLifted(node="n7", repair="new GPU"), NOW)
    assert merge([lift], NOW + PROBATION_S - 1)["n7"].state == "PROBATION"
    assert merge([lift], NOW + PROBATION_S)["n7"].state == "IN USE"
    again = merge([lift, entry(cordon(), NOW + 5)], NOW + 6)["n7"]
    assert (again.state, again.probation_until) == ("CORDONED", None)


def test_a_repaired_node_is_to_be_tested_again_after_a_day() -> None:
    lift = entry(CordonLifted(node="n7", repair="new GPU"), NOW)
    at_once = entry(TestResult(node="n7", test="matmul", verdict="pass", at=NOW + 60), NOW + 60)
    later = entry(TestResult(node="n7", test="matmul", verdict="pass", at=NOW + RETEST_S), NOW + RETEST_S + 60)
    assert not merge([lift, at_once], NOW + RETEST_S - 1)["n7"].retest_due
    assert merge([lift, at_once], NOW + RETEST_S)["n7"].retest_due
    assert not merge([lift, at_once, later], NOW + RETEST_S + 120)["n7"].retest_due
    assert not merge([lift], NOW + PROBATION_S)["n7"].retest_due


def test_a_repaired_node_that_fails_again_within_a_day_counts_more() -> None:
    lift = entry(CordonLifted(node="n7", repair="new GPU"), NOW - DAY_S)
    before, again = entry(failed(), NOW - 2 * DAY_S), entry(failed(), NOW)
    first = merge([before], NOW)["n7"].score
    both = merge([before, lift, again], NOW)["n7"].score
    apart = merge([before, again], NOW)["n7"].score
    assert first.points < apart.points < both.points
    assert (first.lemon, apart.lemon, both.lemon) == (False, False, True)
    assert any("24 h after a repair" in why for why in both.why)
    soon = merge([before, lift, entry(failed(), NOW - DAY_S + 12 * 60)], NOW)["n7"].score
    assert any("12 min after a repair" in why for why in soon.why)


def test_what_is_close_together_is_one_outage_and_what_is_old_counts_no_more() -> None:
    storm = [entry(failed(what=kind), NOW + minute * 60) for minute, kind in enumerate(("a", "a", "b", "a"))]
    found = merge(storm, NOW + HOUR_S)["n7"].score
    assert (found.outages, found.lemon) == (1, False)
    assert merge(storm, NOW + WINDOW_S + HOUR_S)["n7"].score.points == 0
    test = entry(TestResult(node="n7", test="matmul", verdict="fail", at=NOW), NOW)
    assert merge([test], NOW)["n7"].score.outages == 1
    unknown = entry(TestResult(node="n7", test="matmul", verdict="unknown", at=NOW), NOW)
    assert merge([unknown], NOW)["n7"].score.points == 0


def test_jobs_that_left_a_node_out_without_a_proof_make_no_lemon() -> None:
    """Meta's `excl_jobid_count` hardly tells anything."""
    out = [entry(cordon(scope="job"), NOW - number * DAY_S, job=f"j{number}") for number in range(20)]
    found = merge(out, NOW)["n7"].score
    assert 0 < found.points <= 1
    assert not found.lemon


# ----- in any order -----

NODES = st.sampled_from(("n1", "n2", "n3"))
IDS = st.sampled_from([f"c{number}" for number in range(8)])
AGES = st.floats(0, 200 * DAY_S).map(lambda age: NOW - age)
RECORDS = st.one_of(
    st.builds(
        cordon, NODES, st.sampled_from(("job", "proposal", "cluster")), st.none() | AGES.map(lambda at: at + 30 * DAY_S)
    ),
    st.builds(lambda node, lifts, repair: CordonLifted(node=node, lifts=tuple(lifts), repair=repair),
              NODES, st.lists(IDS, max_size=3), st.sampled_from(("", "new"))),
    st.builds(failed, NODES, st.sampled_from(("a", "b"))),
    st.builds(lambda node, verdict, at: TestResult(node=node, test="t", verdict=verdict, at=at),
              NODES, st.sampled_from(("pass", "fail")), AGES),
    st.builds(lambda nodes: NodesSeen(nodes=tuple(nodes)), st.lists(NODES, max_size=3)),
)  # fmt: skip
ENTRIES = st.lists(
    st.builds(
        lambda what, at, by, name, writer: LedgerEntry(v=1, id=name, at=at, by=by, writer=writer, what=what),
        RECORDS, AGES, st.sampled_from(("policy", "ann")), IDS, st.sampled_from(("w1", "w2")),
    ),
    max_size=14,
)  # fmt: skip


@given(ENTRIES, st.randoms(use_true_random=False))
def test_the_same_records_in_any_order_or_twice_give_the_same_state(entries: list[LedgerEntry], dice: object) -> None:
    shuffled = [*entries, *entries[:3]]
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    assert merge(shuffled, NOW) == merge(entries, NOW)


@given(ENTRIES, st.integers(0, 14), st.floats(0, 40 * DAY_S))
def test_put_together_they_say_the_same(entries: list[LedgerEntry], own: int, later_s: float) -> None:
    """Of some files, by one of several users: cordons, probation and scores stay, now and later."""
    mine, others = entries[:own], entries[own:]
    lines = [LedgerLine(b"", one) for one in mine]
    kept = [read_line(raw, NOW).entry for raw in compacted(lines, entries, NOW)]
    assert None not in kept
    after = merge([*(one for one in kept if one is not None), *others], NOW + later_s)
    for node, before in merge(entries, NOW + later_s).items():
        if not (before.cordons or before.proposals or before.score.points or before.probation_until is not None):
            continue
        now = after[node]
        ids = [one.id for one in before.cordons]
        assert ([one.id for one in now.cordons], now.probation_until, now.score) == (
            ids,
            before.probation_until,
            before.score,
        )
        assert [one.id for one in now.proposals] == [one.id for one in before.proposals]


def test_old_records_and_repeated_results_go() -> None:
    old = [entry(failed(), NOW - KEEP_S - number) for number in range(50)]
    results = [
        entry(TestResult(node="n7", test="matmul", verdict="pass", at=NOW - number), NOW - number)
        for number in range(50)
    ]
    over = entry(cordon(until=NOW - KEEP_S), NOW - KEEP_S - 1)
    everything = [*old, *results, over]
    assert len(compacted([LedgerLine(b"", one) for one in everything], everything, NOW)) == RESULTS_KEPT


def test_a_lift_stays_while_what_it_lifts_is_in_anybodys_file() -> None:
    theirs = entry(cordon(), NOW - 2 * KEEP_S, name="c1")
    lift = entry(CordonLifted(node="n7", lifts=("c1",)), NOW - 2 * KEEP_S + 1)
    assert len(compacted([LedgerLine(b"", lift)], [theirs, lift], NOW)) == 1
    assert compacted([LedgerLine(b"", lift)], [lift], NOW) == []


# ----- hostile lines -----


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[" * 60_000,
        b'{"v":1,"id":"x","at":1e400,"what":{"record":"seen","nodes":[]}}',
        b'{"v":1,"id":"x","at":NaN,"what":{"record":"seen","nodes":[]}}',
        b'{"v":1,"id":"","at":1,"what":{"record":"seen","nodes":[]}}',
        b'{"v":1,"id":"x","at":1,"what":{"record":"failed","node":"","failure_class":"a"}}',
        b'{"v":1,"id":"x","at":1,"what":{"record":"other","node":"n"}}',
        b"x" * (LINE_BYTES + 1),
    ],
)
def test_a_damaged_line_is_told_and_left_out(raw: bytes) -> None:
    line = read_line(raw, NOW)
    assert line.entry is None
    assert line.problem
    assert not line.newer


def test_a_time_in_the_future_is_none() -> None:
    assert read_line(encode_entry(entry(cordon(), NOW + AHEAD_S + 1)), NOW).entry is None
    assert read_line(encode_entry(entry(cordon(), NOW + AHEAD_S - 1)), NOW).entry is not None


def test_a_newer_versions_line_is_kept_and_not_understood() -> None:
    raw = b'{"v":2,"id":"x","at":%d,"what":{"record":"blessed","node":"n7"}}' % NOW
    line = read_line(raw, NOW)
    assert (line.entry, line.newer) == (None, True)
    assert compacted([line], [], NOW) == [raw]
    assert compacted([line], [], NOW + KEEP_S + 1) == []


def test_text_is_cleaned_and_bounded() -> None:
    hostile = "\x1b[2Jgood\nnode\u202e " + "x" * 1000
    what = NodeCordoned(node=hostile, scope="cluster", reason=hostile, evidence=(hostile,) * 20)
    found = read_line(encode_entry(entry(what)), NOW).entry
    assert found is not None
    assert isinstance(found.what, NodeCordoned)
    for text in (found.what.node, found.what.reason, *found.what.evidence):
        assert "\x1b" not in text
        assert "\n" not in text
        assert len(text) <= 300
    assert len(found.what.evidence) == 5


def test_durations() -> None:
    assert [duration_s(text) for text in ("90m", "12h", "3d", "soon", "-1h")] == [5400.0, 43200.0, 259200.0, None, None]


@pytest.mark.parametrize(("field", "value"), [("fleet", b"1" + b"0" * 400), ("until", b"1e308"), ("until", b"1e12")])
def test_numbers_beyond_all_measure_do_no_harm(field: str, value: bytes) -> None:
    raw = encode_entry(entry(cordon(until=NOW + 5.0, fleet=8)))
    before = {"fleet": b'"fleet":8', "until": b'"until":1800000005.0'}[field]
    assert before in raw
    line = read_line(raw.replace(before, b'"%s":%s' % (field.encode(), value)), NOW)
    assert line.entry is not None
    [held] = merge([line.entry], NOW)["n7"].cordons
    assert isinstance(held.what, NodeCordoned)
    assert held.what.fleet <= 1_000_000
    assert held.what.until is None or held.what.until == NOW + 5.0


def test_a_node_without_a_name_is_none() -> None:
    line = read_line(encode_entry(entry(NodesSeen(nodes=("\n", "n1")))), NOW)
    assert line.entry is not None
    assert list(merge([line.entry], NOW)) == ["n1"]


def test_very_many_records_are_merged_soon() -> None:
    many = 30_000
    entries = [entry(cordon(f"n{number}", fleet=10**6), NOW + number * 1e-3) for number in range(many)]
    entries += [entry(failed("x", f"c{number}"), NOW + number * 1e-3) for number in range(many)]
    repaired = CordonLifted(node="y", repair="r")
    entries += [entry(failed("y") if number % 2 else repaired, NOW - number * 9 * HOUR_S) for number in range(many)]
    began = time.process_time()
    found = merge(entries, NOW + 60)
    assert time.process_time() - began < 15.0
    assert found["n29999"].cordons
    assert found["x"].score.outages == 1
