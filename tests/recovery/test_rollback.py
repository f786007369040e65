from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.signals import LossAlarm
from recovery.checkpoint import ResumeSituation
from recovery.rollback import (
    MOST_SKIPPED,
    PLACES,
    TRIES,
    LossCase,
    ReplicaCase,
    Rollback,
    before_corruption,
    margin,
    plan_for,
    plan_for_replicas,
)


def spike(step: int | None, interval: int = 1, kind: str = "spike") -> LossAlarm:
    return LossAlarm(kind=kind, step=step, interval=interval)  # type: ignore[arg-type]


HUNDREDS = (100, 200, 300, 400)
AT_305 = Rollback(first_bad=305, last_bad=320, skipped=135)


@pytest.mark.parametrize(
    ("case", "kind", "step", "skip"),
    [
        # Margin 15 (a twentieth), and as many again behind the newest step as were bad.
        (LossCase(alarm=spike(305), step=320, steps=HUNDREDS), "rollback", 200, 135),
        (LossCase(alarm=spike(320), step=330, steps=HUNDREDS), "rollback", 300, 46),
        # A loss that is printed every 50 steps went wrong up to 50 steps earlier.
        (LossCase(alarm=spike(350, interval=50), step=380, steps=HUNDREDS), "rollback", 200, 280),
        # Nothing is so old: without the margin. Nothing at all is.
        (LossCase(alarm=spike(105), step=120, steps=(100,)), "rollback", 100, 35),
        (LossCase(alarm=spike(90), step=120, steps=HUNDREDS), "hold", None, 0),
        (LossCase(alarm=spike(None), step=120, steps=HUNDREDS), "hold", None, 0),
        (LossCase(alarm=spike(305), step=320, steps=()), "hold", None, 0),
        # NaN needs no margin.
        (LossCase(alarm=spike(301, kind="nan"), step=305, steps=HUNDREDS), "rollback", 300, 20),
        # Too much data lies between: none is left out the first time; then a person decides.
        (LossCase(alarm=spike(9000), step=9010, steps=(100,)), "rollback", 100, 0),
        (
            LossCase(
                alarm=spike(9000), step=9010, steps=(100,), before=(Rollback(first_bad=9001, last_bad=9009),)
            ),
            "hold", 100, 0,
        ),
        # Again at the same data. Without a skip the first time: it is left out now. With one: more is.
        (
            LossCase(alarm=spike(306), step=320, steps=HUNDREDS, before=(Rollback(first_bad=305, last_bad=320),)),
            "rollback", 200, 135,
        ),
        (
            LossCase(alarm=spike(306), step=320, steps=HUNDREDS, before=(AT_305,), skipped_after=(200, 135)),
            "rollback", 200, 270,
        ),
        (LossCase(alarm=spike(306), step=320, steps=HUNDREDS, before=(AT_305,) * TRIES), "hold", 200, 0),
        # Another place, from a checkpoint after which data are left out already: these count.
        (LossCase(alarm=spike(250), step=260, steps=HUNDREDS, skipped_after=(200, 135)), "rollback", 200, 207),
        (LossCase(alarm=spike(250), step=260, steps=HUNDREDS, skipped_after=(100, 135)), "rollback", 200, 72),
        # A third place.
        (
            LossCase(
                alarm=spike(5000), step=5010, steps=(4000,),
                before=(AT_305, AT_305, Rollback(first_bad=900, last_bad=920, skipped=9)),
            ),
            "hold", 4000, 0,
        ),
    ],
)  # fmt: skip
def test_what_is_done(case: LossCase, kind: str, step: int | None, skip: int) -> None:
    plan = plan_for(case)
    assert (plan.kind, plan.step, plan.skip_batches) == (kind, step, skip)


def test_the_margin_grows_with_the_run_up_to_a_limit() -> None:
    assert [margin(spike(step)) for step in (20, 400, 2000, 900_000)] == [2, 20, 100, 100]
    assert margin(spike(900_000, interval=100)) == 200


@given(
    st.builds(
        LossCase,
        alarm=st.builds(
            LossAlarm,
            kind=st.sampled_from(["nan", "spike", "divergence"]),
            step=st.none() | st.integers(0, 5000),
            interval=st.integers(1, 200),
        ),
        step=st.integers(0, 6000),
        steps=st.lists(st.integers(0, 6000), max_size=8).map(tuple),
        before=st.lists(
            st.builds(
                Rollback,
                first_bad=st.integers(0, 5000),
                last_bad=st.integers(0, 6000),
                skipped=st.integers(0, MOST_SKIPPED),
            ),
            max_size=5,
        ).map(tuple),
        skipped_after=st.tuples(st.none() | st.integers(0, 6000), st.integers(0, MOST_SKIPPED)),
    )
)
def test_bounds_that_always_hold(case: LossCase) -> None:
    plan = plan_for(case)
    assert plan.why
    assert 0 <= plan.skip_batches <= MOST_SKIPPED
    if plan.kind == "hold":
        assert not plan.skip_batches
        return
    assert plan.step in case.steps
    assert plan.situation is not None
    assert case.alarm.step is not None
    limit = plan.situation.not_after_step
    assert limit is not None
    assert plan.step is not None
    assert plan.step <= limit < case.alarm.step or case.alarm.step == 0
    assert len(case.before) < 5 * PLACES * TRIES


@pytest.mark.parametrize(
    ("named", "seen_equal", "step", "before", "kind", "told"),
    [
        (True, True, 300, 0, "rollback", 300),
        (True, True, 300, TRIES - 1, "rollback", 300),
        (True, True, 300, TRIES, "hold", 300),
        (False, True, 300, 0, "hold", 300),
        (True, True, None, 0, "hold", None),
        (True, False, 300, 0, "hold", None),
    ],
)
def test_replicas_that_differ(
    named: bool, seen_equal: bool, step: int | None, before: int, kind: str, told: int | None
) -> None:
    situation = before_corruption(4, 50.0, 60.0, 310)
    assert (situation.not_after_step, situation.before, situation.snapshot) == (310, 60.0, (4, 310))
    case = ReplicaCase(named=named, seen_equal=seen_equal, situation=situation, step=step, before=before)
    found = plan_for_replicas(case)
    assert (found.kind, found.step) == (kind, told)


@pytest.mark.parametrize("agreed_at", [None, 60.0])
def test_where_this_attempt_never_saw_them_equal_only_what_was_there_before_counts(agreed_at: float | None) -> None:
    assert before_corruption(4, 50.0, agreed_at, None) == ResumeSituation(kind="corruption", before=50.0)
