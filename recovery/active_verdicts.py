"""What the figures of active tests say of nodes and GPUs, beside those of others of their kind. Pure.

A device fails where it is worse than the median of its kind by the margin and by three times the usual spread, and is
so again when the test is repeated. Wrong data and other bits are faults of their own. A test that does not come to its
end counts only where others of the kind needed a fraction of its time, and CPUs were free. Absolute limits are a site's
to set. With too few to compare with, nothing is said: *unknown*.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from diagnosis.signals import Frozen
from recovery.group_tests import BUSY, throttled_words
from recovery.ledger import TestResult, TestVerdict

GPU_MARGIN: Final = 0.1
CPU_MARGIN: Final = 0.5
"""CPUs are shared with the system, and differ from run to run."""
ENOUGH: Final = 4
"""So many figures of one kind, its own included, are enough to compare."""
SPREADS: Final = 3.0 * 1.4826
FRACTION: Final = 0.5
"""Of the time after which a test was ended, others must have needed at most so much, for it to count."""
LESS_IS_BETTER: Final = frozenset({"s"})
"""Units. Of all others more is better."""

Key = tuple[str, str, str]
"""Node, GPU, test."""


class Figure(Frozen, frozen=True, kw_only=True):
    """What one test gave on one device."""

    node: str
    gpu: str = ""
    test: str
    kind: str = ""
    value: float | None = None
    """The median of its repetitions."""
    unit: str = ""
    digest: str = ""
    fault: str = ""
    """Wrong data, or an error of the device: why, in words."""
    hung: str = ""
    """The test did not come to its end: where, in words."""
    crashed: str = ""
    """It ended before its end, which may be the device's fault, or that of the software: how, in words."""
    took_s: float = 0.0
    """Its process, from start to end; that of all tests of the device."""
    waited: float = 0.0
    """The share of that time that its process waited for a CPU that others had."""
    throttled: float = 0.0
    """The share of that time that the CPU quota of its own control group kept it waiting."""
    unfinished: str = ""
    """It could not be made, for a reason that is not the device's: why, in words."""
    seconds: float = 0.0
    at: float = 0.0

    @property
    def key(self) -> Key:
        return self.node, self.gpu, self.test


class Context(NamedTuple):
    """What figures are compared with."""

    usual: Mapping[tuple[str, str], Usual]
    bits: Mapping[tuple[str, str], Bits]
    took_s: Mapping[str, tuple[float, ...]]
    """Kind -> how long the processes took that came to their end."""
    present: Counter[tuple[str, ...]]
    """(Kind, test), and (kind, test, node) -> how many of the figures are of now."""
    floors: Mapping[str, float]


class Bits(NamedTuple):
    """The digests of one test on one kind."""

    digest: str
    """That of most. Empty: there is no majority."""
    have: int
    of: int
    unsteady: int
    """So many devices more gave different bits in runs of their own."""


class Usual(NamedTuple):
    """Of one test on one kind."""

    median: float
    spread: float
    size: int


def margin_of(kind: str) -> float:
    return CPU_MARGIN if kind.endswith(" CPU") else GPU_MARGIN


def judge(
    figures: Sequence[Figure],
    *,
    earlier: Iterable[Figure] = (),
    again: Iterable[Figure] = (),
    floors: Mapping[str, float] | None = None,
) -> tuple[TestResult, ...]:
    """A result for each figure. `earlier`: of other nodes, kept from before. `again`: of repeated tests. `floors`: test
    -> what a site demands.

    What `to_repeat` names and `again` has not is unknown.
    """
    earlier = tuple(earlier)
    context = Context(
        usual=usual_values([*figures, *earlier]),
        bits=_usual_digests([*figures, *earlier]),
        took_s=_times(figures),
        present=Counter(
            key
            for one in figures
            if one.value is not None and not one.unfinished
            for key in ((one.kind, one.test), (one.kind, one.test, one.node))
        ),
        floors=floors or {},
    )
    second = {figure.key: figure for figure in again}
    repeated = {figure.node for figure in second.values()}
    found = []
    for figure in figures:
        result = _result(figure, second.get(figure.key), context)
        if (figure.hung or figure.crashed) and figure.key not in second and figure.node in repeated:
            result = replace(result, reason=f"{figure.hung or figure.crashed}; not when it was repeated")
        found.append(result)
    return tuple(found)


NEEDED: Final = ("device", "peer_copy", "pairs", "training_bits", "memory_patterns")
"""Tests that need no others to compare with (`device`: all of one device, where it did not come to its end): where one
is not known, the node is not proven well."""


def node_verdict(results: Iterable[TestResult]) -> TestVerdict:
    """All of them together: what only lacked others to compare with is no doubt about the node."""
    found = list(results)
    if any(one.verdict == "fail" for one in found):
        return "fail"
    doubt = any(one.verdict == "unknown" and one.test in NEEDED for one in found)
    return "pass" if not doubt and any(one.verdict == "pass" for one in found) else "unknown"


EARLIER_S: Final = 28 * 86400.0
"""Figures that are older are not compared with: drivers and clocks change."""


def earlier_figures(results: Iterable[TestResult], now: float) -> tuple[Figure, ...]:
    """Of each test of each device the newest that did not fail, to compare others with."""
    newest: dict[Key, TestResult] = {}
    for one in results:
        key = (one.node, one.gpu, one.test)
        if one.verdict != "fail" and now - EARLIER_S < one.at <= now + 3600.0 and one.at >= _at(newest.get(key)):
            newest[key] = one
    return tuple(
        Figure(node=one.node, gpu=one.gpu, test=one.test, kind=one.kind, value=one.value, digest=one.digest)
        for one in newest.values()
        if one.value is not None or one.digest
    )


def _at(result: TestResult | None) -> float:
    return result.at if result is not None else float("-inf")


def to_repeat(results: Iterable[TestResult], figures: Iterable[Figure]) -> tuple[Key, ...]:
    """The tests that are to be made once more before they count against a device."""
    of_key = {figure.key: figure for figure in figures}
    return tuple(
        key
        for one in results
        if one.verdict == "unknown"
        and one.reason.startswith(NOT_REPEATED)
        and (key := (one.node, one.gpu, one.test)) in of_key
    )


NOT_REPEATED: Final = "to be repeated: "


def usual_values(figures: Iterable[Figure]) -> dict[tuple[str, str], Usual]:
    """(Kind, test) -> what is usual."""
    values: dict[tuple[str, str], list[float]] = {}
    for figure in figures:
        if figure.value is not None and not figure.unfinished:
            values.setdefault((figure.kind, figure.test), []).append(figure.value)
    found = {}
    for key, some in values.items():
        middle = statistics.median(some)
        found[key] = Usual(middle, statistics.median(abs(one - middle) for one in some), len(some))
    return found


def _usual_digests(figures: Iterable[Figure]) -> dict[tuple[str, str], Bits]:
    """(Kind, test) -> what most have."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    unsteady: Counter[tuple[str, str]] = Counter()
    for figure in figures:
        some = counts.setdefault((figure.kind, figure.test), Counter())
        if figure.digest and figure.fault:
            unsteady[figure.kind, figure.test] += 1
        elif figure.digest:
            some[figure.digest] += 1
    found = {}
    for key, some in counts.items():
        digest, have = some.most_common(1)[0] if some else ("", 0)
        found[key] = Bits(digest if 2 * have > some.total() else "", have, some.total(), unsteady[key])
    return found


def _times(figures: Iterable[Figure]) -> dict[str, tuple[float, ...]]:
    """Kind -> how long the processes took that came to their end, one for each device."""
    whole: dict[tuple[str, str, str], float] = {}
    ended_early = set()
    for figure in figures:
        device = (figure.kind, figure.node, figure.gpu)
        if figure.hung or figure.crashed:
            ended_early.add(device)
        elif figure.took_s > 0.0:
            whole[device] = max(whole.get(device, 0.0), figure.took_s)
    found: dict[str, tuple[float, ...]] = {}
    for device, took_s in whole.items():
        if device not in ended_early:
            found[device[0]] = (*found.get(device[0], ()), took_s)
    return found


def _result(figure: Figure, second: Figure | None, context: Context) -> TestResult:
    verdict, reason = _judged(figure, context)
    if verdict == "fail" and not figure.fault:
        if second is None:
            verdict, reason = "unknown", NOT_REPEATED + reason
        else:
            verdict, later = _judged(second, context)
            reason = f"{reason}; repeated: {later}" if verdict == "fail" else f"at first {reason}; repeated: {later}"
            figure = second
    return TestResult(
        node=figure.node,
        gpu=figure.gpu,
        test=figure.test,
        value=figure.value,
        unit=figure.unit,
        digest=figure.digest,
        verdict=verdict,
        reason=reason,
        at=figure.at,
        kind=figure.kind,
        seconds=figure.seconds,
    )


def _judged(figure: Figure, context: Context) -> tuple[TestVerdict, str]:
    if figure.fault and figure.digest:
        return _judged_unsteady(figure, context.bits[figure.kind, figure.test])
    if figure.fault:
        return "fail", figure.fault
    if figure.hung or figure.crashed:
        return _judged_unended(figure, context.took_s.get(figure.kind, ()))
    if figure.unfinished:
        return "unknown", figure.unfinished
    if figure.digest:
        return _judged_digest(figure, context.bits[figure.kind, figure.test])
    if figure.value is None:
        return "pass", "all data is right"
    verdict, reason = _judged_value(figure, figure.value, context.usual.get((figure.kind, figure.test)), context.floors)
    if verdict == "fail" and figure.waited >= BUSY:
        return "unknown", f"{reason}; {_busy(figure)}"
    if verdict == "fail" and figure.throttled >= BUSY:
        # What was kept from before does not say whether those nodes had a quota, too.
        mine = context.present[figure.kind, figure.test, figure.node]
        others = context.present[figure.kind, figure.test] - mine
        enough = others >= ENOUGH - 1 or figure.test in context.floors
        return "fail" if enough else "unknown", f"{reason}; {throttled_words(figure.throttled)}"
    return verdict, reason


def _busy(figure: Figure) -> str:
    return f"the CPUs of its node are busy: it waited for one {100 * figure.waited:.0f} % of its time"


def _judged_unended(figure: Figure, others_s: Sequence[float]) -> tuple[TestVerdict, str]:
    """Others of the kind must have done it: else it may be our test, or the software of all nodes."""
    why = figure.hung or figure.crashed
    if len(others_s) < ENOUGH - 1:
        return "unknown", f"{why}; {len(others_s)} others of its kind came to the end, too few to compare with"
    usual_s = statistics.median(others_s)
    if figure.hung and figure.waited >= BUSY:
        return "unknown", f"{why}; {_busy(figure)}"
    if figure.hung and usual_s > FRACTION * figure.took_s:
        return "unknown", f"{why}; others of its kind needed {usual_s:.0f} s, not much less"
    quota = f"; {throttled_words(figure.throttled)}" if figure.throttled >= BUSY else ""
    return "fail", f"{why}; others of its kind came to the end after {usual_s:.0f} s{quota}"


def _judged_unsteady(figure: Figure, bits: Bits) -> tuple[TestVerdict, str]:
    """Where no other device of the kind repeats its bits, it may be torch that cannot."""
    if bits.of < max(1, bits.unsteady):
        return "unknown", f"{figure.fault}; {bits.of} other devices of its kind gave the same bits in each run"
    return "fail", figure.fault


def _judged_digest(figure: Figure, bits: Bits) -> tuple[TestVerdict, str]:
    digest, have, count, _ = bits
    if count < 2:
        return "pass", "every run gave the same bits; no other device of its kind to compare with"
    if figure.digest == digest:
        return "pass", f"the same bits as {have - 1} of {count - 1} others of its kind"
    if digest and have >= 2:
        return "fail", f"{have} of {count} devices of its kind agree on other bits"
    return "unknown", f"{count} devices of its kind do not agree on any bits: there is no majority"


def _judged_value(
    figure: Figure, value: float, usual: Usual | None, floors: Mapping[str, float]
) -> tuple[TestVerdict, str]:
    less = figure.unit in LESS_IS_BETTER
    floor = floors.get(figure.test)
    if floor is not None and (value > floor if less else value < floor):
        return "fail", f"{value:.4g} {figure.unit}, the site demands {floor:.4g}"
    if usual is None or usual.size < ENOUGH:
        if floor is not None:
            return "pass", f"{value:.4g} {figure.unit}, the site demands {floor:.4g}"
        others = usual.size - 1 if usual is not None else 0
        return "unknown", f"{value:.4g} {figure.unit}; {others} others of its kind are too few to compare with"
    worse = value / usual.median - 1.0 if less else 1.0 - value / usual.median
    reason = f"{value:.4g} {figure.unit}, the median of {usual.size} is {usual.median:.4g}"
    if worse >= margin_of(figure.kind) and abs(value - usual.median) > SPREADS * usual.spread:
        return "fail", f"{100 * worse:.0f} % worse than others of its kind: {reason}"
    return "pass", reason
