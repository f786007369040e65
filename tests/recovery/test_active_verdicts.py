"""What figures say beside others: relative, by a margin, and only when they are so again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from recovery.active_verdicts import Figure, earlier_figures, judge, to_repeat
from recovery.ledger import TestResult, TestVerdict

KIND = "NVIDIA H100, torch 2.13.0, CUDA 12.8"
CPU = "EPYC, torch 2.13.0, x86_64 CPU"


def rates(*values: float, kind: str = KIND, test: str = "matmul_bf16", unit: str = "TFLOP/s") -> list[Figure]:
    return [
        Figure(node=f"n{number}", gpu="GPU-0", test=test, kind=kind, value=value, unit=unit)
        for number, value in enumerate(values)
    ]


def verdicts(results: tuple[TestResult, ...]) -> str:
    return "".join({"pass": ".", "fail": "F", "unknown": "?"}[one.verdict] for one in results)


WELL = (700.0, 705.0, 695.0, 702.0, 698.0)


def test_a_slow_one_is_named_only_when_it_is_slow_again() -> None:
    figures = rates(*WELL, 600.0)
    first = judge(figures)
    assert verdicts(first) == ".....?"
    assert to_repeat(first, figures) == (("n5", "GPU-0", "matmul_bf16"),)
    again = judge(figures, again=[figures[5]])
    assert verdicts(again) == ".....F"
    assert verdicts(judge(figures, again=rates(*WELL, 699.0)[5:])) == "......"
    assert to_repeat(again, figures) == ()


@pytest.mark.parametrize(("value", "verdict"), [(640.0, "."), (625.0, "F"), (900.0, ".")])
def test_a_tenth_is_the_least(value: float, verdict: str) -> None:
    figures = rates(*WELL, value)
    assert verdicts(judge(figures, again=figures))[-1] == verdict


def test_where_devices_differ_much_a_tenth_is_not_enough() -> None:
    figures = rates(500.0, 600.0, 700.0, 800.0, 900.0, 550.0)
    assert verdicts(judge(figures, again=figures)) == "......"


def test_seconds_are_better_when_they_are_fewer() -> None:
    figures = rates(1.0, 1.01, 0.99, 1.0, 1.5, 0.5, unit="s")
    assert verdicts(judge(figures, again=figures)) == "....F."


def test_too_few_to_compare_are_unknown() -> None:
    figures = rates(700.0, 700.0, 300.0)
    assert verdicts(judge(figures, again=figures)) == "???"
    assert to_repeat(judge(figures), figures) == ()
    assert verdicts(judge(figures, again=figures, earlier=rates(700.0, 701.0))) == "..F"


def test_figures_of_the_ledger_are_compared_with() -> None:
    def kept(node: str, value: float, at: float = 100.0, verdict: TestVerdict = "unknown") -> TestResult:
        return TestResult(node=node, gpu="GPU-0", test="matmul_bf16", kind=KIND, value=value, verdict=verdict, at=at)

    now = 40 * 86400.0
    results = [kept("a", 9.0, now - 9), kept("a", 700.0, now - 5), kept("b", 701.0, now - 5), kept("c", 699.0, now - 5)]
    results += [kept("d", 300.0, now - 5, "fail"), kept("e", 300.0, now - 30 * 86400)]
    earlier = earlier_figures(results, now)
    assert {(one.node, one.value) for one in earlier} == {("a", 700.0), ("b", 701.0), ("c", 699.0)}
    assert verdicts(judge(rates(300.0), earlier=earlier, again=rates(300.0))) == "F"


def test_other_kinds_are_not_compared() -> None:
    figures = [*rates(*WELL), *rates(300.0, kind="NVIDIA A100, torch 2.13.0, CUDA 12.8")]
    assert verdicts(judge(figures, again=figures)) == ".....?"


def test_a_cpu_may_be_a_third_slower() -> None:
    figures = rates(*WELL, 470.0, kind=CPU)
    assert verdicts(judge(figures, again=figures)) == "......"


def test_a_floor_needs_nobody_to_compare_with() -> None:
    figures = rates(600.0)
    assert verdicts(judge(figures, again=figures, floors={"matmul_bf16": 650.0})) == "F"
    assert verdicts(judge(figures, again=figures, floors={"matmul_bf16": 550.0})) == "."


def test_wrong_data_is_a_fault_at_once() -> None:
    (result,) = judge([Figure(node="n0", test="memory_patterns", fault="3 words changed")])
    assert (result.verdict, result.reason) == ("fail", "3 words changed")


def test_a_hang_counts_when_it_hangs_again() -> None:
    hung = Figure(node="n0", test="device", kind=KIND, hung="did not end within 25 s")
    figures = [replace(hung, took_s=25.0), *ended(6.0, 7.0, 8.0)]
    assert verdicts(judge(figures)) == "?..."
    assert to_repeat(judge(figures), figures) == (hung.key,)
    assert verdicts(judge(figures, again=figures[:1])) == "F..."
    well = judge(figures, again=[Figure(node="n0", test="matmul_bf16", kind=KIND, value=700.0)])
    assert verdicts(well) == "?..."
    assert to_repeat(well, figures) == ()


def ended(*seconds: float) -> list[Figure]:
    """Devices of which all tests came to their end after so long."""
    return [
        Figure(node=f"w{number}", test="memory_patterns", kind=KIND, took_s=one) for number, one in enumerate(seconds)
    ]


@pytest.mark.parametrize(
    ("others", "waited", "verdict"),
    [
        ((6.0, 7.0, 8.0), 0.0, "F"),
        ((6.0, 7.0, 8.0), 0.3, "?"),  # its CPUs were busy
        ((14.0, 15.0, 16.0), 0.0, "?"),  # others were hardly faster
        ((6.0, 7.0), 0.0, "?"),
        ((), 0.0, "?"),
    ],
)
def test_a_missed_deadline_is_no_fault_by_itself(others: tuple[float, ...], waited: float, verdict: str) -> None:
    hung = Figure(node="n0", test="device", kind=KIND, hung="did not end", took_s=25.0, waited=waited)
    assert verdicts(judge([hung, *ended(*others)], again=[hung]))[0] == verdict


def test_a_crash_counts_where_others_do_well() -> None:
    crash = Figure(node="n0", test="device", kind=KIND, crashed="was killed by SIGSEGV", took_s=1.0)
    everywhere = [crash, *(replace(crash, node=f"n{number}") for number in range(1, 5))]
    assert verdicts(judge(everywhere, again=everywhere)) == "?????"
    assert verdicts(judge([crash, *ended(6.0, 7.0, 8.0)], again=[crash])) == "F..."
    assert verdicts(judge([crash, *ended(6.0, 7.0, 8.0)])) == "?..."


def test_a_slow_one_on_a_busy_node_is_not_known() -> None:
    figures = [*rates(*WELL), replace(rates(600.0)[0], node="n9", waited=0.4)]
    assert verdicts(judge(figures, again=figures[5:])) == ".....?"


@pytest.mark.parametrize(
    ("own", "others", "earlier", "verdict"),
    [
        (0.72, 0.0, False, "F"),
        (0.72, 0.0, True, "?"),  # whether they had a quota, too, is not known
        (0.72, 0.7, False, "F"),  # all have one: it is slower beside them
    ],
)
def test_a_quota_is_the_nodes_own_slowness(own: float, others: float, earlier: bool, verdict: str) -> None:
    good = [replace(one, throttled=others) for one in rates(*WELL)]
    slow = replace(rates(200.0)[0], node="n9", throttled=own)
    result = judge(
        [slow, *([] if earlier else good)], earlier=good if earlier else (), again=[replace(slow, seconds=1.0)]
    )
    assert verdicts(result)[0] == verdict
    assert "72 %" in result[0].reason
    busy = replace(slow, waited=0.3)
    assert verdicts(judge([busy, *good], again=[busy]))[0] == "?"


def test_steps_that_torch_cannot_repeat_are_no_fault_of_a_device() -> None:
    odd = [replace(one, fault="gradients differ between runs") for one in digests("a", "b", "c")]
    assert verdicts(judge(odd)) == "???"
    assert verdicts(judge(odd[:1])) == "?"
    steady = [replace(one, node="n9") for one in digests("a")]
    assert verdicts(judge([*odd[:1], *steady])) == "F."
    assert verdicts(judge(odd[:1], earlier=steady)) == "F"


def digests(*values: str) -> list[Figure]:
    return [
        Figure(node=f"n{number}", test="training_bits", kind=KIND, digest=value) for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("bits", "expected"),
    [("a", "."), ("aa", ".."), ("ab", "??"), ("aab", "..F"), ("aabb", "????"), ("abc", "???"), ("aaab", "...F")],
)
def test_the_bits_of_most_are_right(bits: str, expected: str) -> None:
    figures = digests(*bits)
    assert verdicts(judge(figures, again=figures)) == expected


def test_an_odd_digest_that_does_not_come_back_is_no_proof() -> None:
    figures = digests(*"aaab")
    first = judge(figures)
    assert verdicts(first) == "...?"
    assert verdicts(judge(figures, again=digests(*"aaaa")[3:])) == "...."


def test_what_could_not_be_made_is_unknown() -> None:
    (result,) = judge([Figure(node="n0", test="device", unfinished="torch is not there")])
    assert result.verdict == "unknown"
