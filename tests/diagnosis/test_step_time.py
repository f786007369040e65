"""Where the time of a step goes: traces of a few events, whose shares can be seen at a glance."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.step_time import (
    COMMUNICATION,
    COMPUTE,
    DATA,
    IDLE,
    OPTIMIZER,
    PARTS,
    NoSteps,
    RankTime,
    TraceEvents,
    slowest,
)

STEP_US = 1000.0


def event(kind: str, name: str, begin: float, duration: float, thread: object = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": duration, "tid": thread, "pid": 1}


def steps(count: int, of_one: list[tuple[str, str, float, float, int]]) -> TraceEvents:
    """`of_one`: kind, name, begin and end within each step of 1000 us, thread."""
    events = TraceEvents()
    for step in range(count):
        for kind, name, begin, end, thread in of_one:
            events.add(event(kind, name, step * STEP_US + begin, end - begin, thread))
    return events


ON_CPU = [
    ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100, 1),
    ("cpu_op", "aten::stack", 10, 90, 1),  # collate belongs to the loader
    ("cpu_op", "aten::linear", 100, 300, 1),
    ("cpu_op", "aten::addmm", 100, 300, 1),
    ("user_annotation", "gloo:all_reduce", 250, 600, 2),  # 250 to 300 is hidden
    ("cpu_op", "aten::view", 255, 258, 2),
    ("user_annotation", "Optimizer.step#AdamW.step", 700, 1000, 1),
    ("cpu_op", "aten::add_", 710, 990, 1),
]
ON_GPU = [
    ("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 100, 1),
    ("kernel", "sm90_xmma_gemm", 50, 400, 7),
    ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 300, 600, 20),
    ("gpu_user_annotation", "Optimizer.step#AdamW.step", 600, 800, 7),
    ("kernel", "multi_tensor_apply_kernel", 600, 800, 7),
    ("user_annotation", "Optimizer.step#AdamW.step", 500, 560, 1),
    ("cpu_op", "aten::linear", 0, 1000, 1),  # the CPU runs ahead: the GPU decides
]


@pytest.mark.parametrize(
    ("of_one", "shares"),
    [
        (ON_CPU, {DATA: 0.1, COMPUTE: 0.2, COMMUNICATION: 0.3, OPTIMIZER: 0.3, IDLE: 0.1}),
        (ON_GPU, {DATA: 0.05, COMPUTE: 0.35, COMMUNICATION: 0.2, OPTIMIZER: 0.2, IDLE: 0.2}),
    ],
    ids=["cpu", "gpu"],
)
def test_parts(of_one: list[tuple[str, str, float, float, int]], shares: dict[str, float]) -> None:
    found = steps(5, of_one).time(3)
    assert (found.rank, found.steps) == (3, 4)
    assert found.step_s == pytest.approx(STEP_US * 1e-6)
    assert {part: found.parts[part] / found.step_s for part in PARTS if found.parts[part]} == pytest.approx(
        shares, abs=1e-9
    )


def test_an_operator_that_waits_is_communication() -> None:
    waits = [
        ("cpu_op", "autograd::engine::evaluate_function", 0, 800, 1),
        ("cpu_op", "aten::mm", 10, 200, 1),
        ("user_annotation", "gloo:all_reduce", 200, 700, 2),
        ("user_annotation", "Optimizer.step#SGD.step", 990, 1000, 1),
    ]
    found = steps(3, waits).time(0)
    assert found.parts[COMMUNICATION] / found.step_s == pytest.approx(0.5)


def test_without_an_optimizer_the_whole_trace_counts() -> None:
    events = TraceEvents()
    events.add(event("cpu_op", "aten::mm", 0, 400))
    events.add(event("cpu_op", "aten::mm", 600, 400))
    found = events.time(0)
    assert (found.steps, found.step_s) == (0, pytest.approx(1e-3))
    assert found.parts[COMPUTE] == pytest.approx(0.8e-3)


def test_nothing_to_add_up() -> None:
    with pytest.raises(NoSteps):
        TraceEvents().time(0)


ANY = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.lists(st.integers()))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["cat", "name", "ts", "dur", "tid"]), ANY), max_size=6))
def test_hostile_events(events: list[dict[str, Any]]) -> None:
    taken = TraceEvents()
    for one in events:
        taken.add({**one, "ph": "X"})
    for one in events:
        taken.add({"cat": "cpu_op", "name": "a", "ts": 1.0, **one, "ph": "X"})
    try:
        found = taken.time(0)
    except NoSteps:
        return
    assert sum(found.parts.values()) <= found.step_s * 1.000001 + 1e-12


def rank(number: int, own_s: float, step_s: float = 1.0) -> RankTime:
    return RankTime(number, 3, step_s, {**dict.fromkeys(PARTS, 0.0), COMMUNICATION: step_s - own_s}, ())


def test_slowest() -> None:
    found = slowest([rank(0, 0.5), rank(1, 0.9), rank(2, 0.6)])
    assert found is not None
    assert (found.rank, found.without_s) == (1, pytest.approx(0.7))
    assert found.share == pytest.approx(0.3)
    assert slowest([rank(0, 0.5), rank(1, 0.51)]) is None
    assert slowest([rank(0, 0.5)]) is None


def test_no_step_is_quicker_than_the_slowest_of_the_others() -> None:
    """Ranks are traced at moments of their own, and one of them had longer steps then."""
    found = slowest([rank(0, 0.076, 0.077), rank(1, 0.025, 0.041)])
    assert found is not None
    assert found.without_s == 0.025
