"""What-if step times: timelines whose answers can be worked out by hand, and the published ones where they are.

The published timelines (ByteDance-Seed/StragglerAnalysis, `trace-AR.parquet` and others with their results) are no part
of the project: set STRAGGLER_TRACES to a folder with them. They need pyarrow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from diagnosis.whatif import Operation, WhatIfError, analyse
from supervisor.diagnose.traces import read_timeline

PUBLISHED = os.environ.get("STRAGGLER_TRACES", "")
FORWARD_S, BACKWARD_S, END_S = 1.0, 2.0, 0.5


def timeline(
    *, replicas: int = 2, stages: int = 1, steps: int = 3, slow: Mapping[tuple[int, int], float] | None = None
) -> list[Operation]:
    """One microbatch: forward down the stages, backward up again, then all replicas reduce and take the step.

    `slow`: (replica, stage) -> how many times as long its computations take.
    """
    found = []
    factor = {(dp, at): (slow or {}).get((dp, at), 1.0) for dp in range(replicas) for at in range(stages)}
    for step in range(steps):
        ends = []
        for dp in range(replicas):
            now, rows = 0.0, []
            for at in range(stages):
                if at:
                    rows.append(("forward-recv", at, 0.0, now))
                rows.append(("forward-compute", at, now, now + FORWARD_S * factor[dp, at]))
                now = rows[-1][3]
                if at + 1 < stages:
                    rows.append(("forward-send", at, now, now))
            for at in reversed(range(stages)):
                if at + 1 < stages:
                    rows.append(("backward-recv", at, 0.0, now))
                rows.append(("backward-compute", at, now, now + BACKWARD_S * factor[dp, at]))
                now = rows[-1][3]
                if at:
                    rows.append(("backward-send", at, now, now))
            ends.append(now)
            found += [row(dp, stages, step, kind, at, begin, end) for kind, at, begin, end in rows]
        last = max(ends)
        for dp in range(replicas):
            for at in range(stages):
                found.append(row(dp, stages, step, "optimizer-clip-main-grad", at, ends[dp], last))
                found.append(row(dp, stages, step, "optimizer", at, last, last + END_S))
    return found


def interleaved(
    slow: Mapping[tuple[int, int], float], stages: int = 2, chunks: int = 2, batches: int = 4
) -> list[Operation]:
    """Two replicas of a pipeline with several model chunks on each stage: every forward first, then every backward.

    As profilers do, it records a transfer for each computation, also at both ends of the model.
    """
    found: list[Operation] = []
    whole = stages * chunks
    ends: dict[int, list[float]] = {}
    for dp in (0, 1):
        done: dict[tuple[str, int, int], float] = {}
        free, counts = [0.0] * stages, [{"forward": 0, "backward": 0} for _ in range(stages)]
        forward = [("forward", chunk, batch) for chunk in range(chunks) for batch in range(batches)]
        backward = [("backward", chunk, batch) for chunk in reversed(range(chunks)) for batch in range(batches)]
        left = [[*forward, *backward] for _ in range(stages)]
        while any(left):
            for at in range(stages):
                while left[at]:
                    way, chunk, batch = left[at][0]
                    part = chunk * stages + at
                    before = (way, part + (-1 if way == "forward" else 1), batch)
                    is_first = way == "forward" and part == 0
                    if way == "backward" and part == whole - 1:
                        before = ("forward", part, batch)
                    if not is_first and before not in done:
                        break
                    left[at].pop(0)
                    came = free[at] if is_first else done[before]
                    begin = max(free[at], came)
                    end = begin + (FORWARD_S if way == "forward" else BACKWARD_S) * slow.get((dp, at), 1.0)
                    number = counts[at][way]
                    counts[at][way] += 1
                    rows = (
                        (f"{way}-recv", min(free[at], came), came),
                        (f"{way}-compute", begin, end),
                        (f"{way}-send", end, end),
                    )
                    for kind, first, last in rows:
                        is_compute = kind.endswith("compute")
                        places = (chunk, part) if is_compute else (-1, -1)
                        found.append(Operation(dp, at, dp * stages + at, 0, kind, first, last - first, number, *places))
                    free[at] = done[way, part, batch] = end
        ends[dp] = free
    last = max(max(one) for one in ends.values())
    for dp, at in ((dp, at) for dp in ends for at in range(stages)):
        place = (dp, at, dp * stages + at, 0)
        found.append(Operation(*place, "optimizer-clip-main-grad", ends[dp][at], last - ends[dp][at], 0, -1, -1))
        found.append(Operation(*place, "optimizer", last, END_S, 0, -1, -1))
    return found


@pytest.mark.parametrize(("slow", "rank"), [({}, None), ({(1, 0): 2.0}, 2), ({(0, 1): 3.0}, 1)])
def test_interleaved_stages(slow: Mapping[tuple[int, int], float], rank: int | None) -> None:
    found = analyse(interleaved(slow))
    assert found.simulated_s == pytest.approx(found.measured_s)
    if rank is None:
        assert found.slowdown == pytest.approx(1.0)
    else:
        assert found.worst_ranks == (rank,)
        assert found.worst.of_loss == pytest.approx(1.0, abs=0.1)


def row(dp: int, stages: int, step: int, kind: str, at: int, begin: float, end: float) -> Operation:
    return Operation(dp, at, dp * stages + at, step, kind, step * 100 + begin, end - begin, 0, 0, at)


def test_all_alike() -> None:
    found = analyse(timeline(replicas=4, stages=2))
    assert found.measured_s == pytest.approx(2 * (FORWARD_S + BACKWARD_S) + END_S)
    assert found.slowdown == pytest.approx(1.0)
    assert found.worst.of_loss == 0.0


def test_one_slow_worker() -> None:
    found = analyse(timeline(replicas=4, slow={(2, 0): 3.0}))
    assert found.simulated_s == pytest.approx(9.5)
    assert found.usual_s == pytest.approx(1.5 * 3.0 + 0.5)  # the mean of three quick and one slow
    assert found.worst_ranks == (2,)
    assert found.worst.of_loss == pytest.approx((9.5 - 5.0) / (9.5 - 5.0))
    assert max(found.by_dp_rank, key=found.by_dp_rank.__getitem__) == 2


def test_slow_last_stage() -> None:
    found = analyse(timeline(stages=4, slow={(0, 3): 2.0, (1, 3): 2.0}))
    assert found.simulated_s == pytest.approx(5 * 3 + 0.5)
    assert found.usual_s == pytest.approx(5 * 3 + 0.5)  # one after the other: the mean changes nothing
    assert max(found.by_stage, key=found.by_stage.__getitem__) == 3


def test_waiting_is_no_duration() -> None:
    """The quick replica waits 6 s in the transfer that all take part in, and loses nothing by itself."""
    found = analyse(timeline(replicas=2, slow={(0, 0): 3.0}))
    assert found.by_kind["optimizer-clip-main-grad"] == pytest.approx(1.0)
    assert found.by_dp_rank == {0: pytest.approx(9.5 / 6.5), 1: pytest.approx(1.0)}


def test_no_gap_is_lost() -> None:
    shifted = [one._replace(start_s=one.start_s + (5.0 if one.kind.startswith("opt") else 0.0)) for one in timeline()]
    found = analyse(shifted)
    assert found.launch_slowdown == pytest.approx((3.5 + 5.0) / 3.5, rel=0.01)
    assert found.slowdown == pytest.approx(1.0)


def test_steps_that_were_cut_off_are_left_out() -> None:
    cut = [one for one in timeline(steps=3) if not (one.step == 2 and one.kind == "optimizer")]
    found = analyse(cut)
    assert found.steps == (0, 1)
    assert len(found.left_out) == 1


@pytest.mark.parametrize(
    "broken",
    [
        [],
        [Operation(0, 0, 0, 0, "juggling", 0.0, 1.0, 0)],
        [one for one in timeline() if one.kind != "backward-compute"],
    ],
    ids=["nothing", "unknown kind", "no backward"],
)
def test_what_cannot_be_worked_through(broken: list[Operation]) -> None:
    with pytest.raises(WhatIfError):
        analyse(broken)


if PUBLISHED:  # a skipped test would fail CI, which has none

    @pytest.mark.parametrize("name", [one.stem[6:] for one in sorted(Path(PUBLISHED).glob("trace-*.parquet"))])
    def test_published(name: str) -> None:
        folder = Path(PUBLISHED)
        found = analyse(read_timeline(folder / f"trace-{name}.parquet"))
        result, worst, last = (
            json.loads((folder / f"{one}-{name}.json").read_bytes()) for one in ("result", "mw", "ms")
        )
        assert found.slowdown == pytest.approx(result["blocking_slowdown"], rel=0.05)
        assert found.launch_slowdown == pytest.approx(result["launch_slowdown"], rel=0.05)
        assert (found.simulated_s, found.usual_s) == pytest.approx((worst["tori"], worst["tideal"]), rel=0.05)
        assert found.worst.of_loss == pytest.approx(worst["Mw"], rel=0.05, abs=0.005)
        assert found.last_stage.of_loss == pytest.approx(last["Ms"], rel=0.05, abs=0.005)
        for what, here in (("dp_rank", found.by_dp_rank), ("stage", found.by_stage), ("optype", found.by_kind)):
            there = result[f"blocking_decompose_by_{what}"] or {}
            assert {str(one): here[one] for one in here if str(one) in there} == pytest.approx(there, rel=0.05)
