"""How long an unproven silence is waited out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from recovery.policy import AGAIN_FACTOR, AUTOMATIC_LEAST_S, BEFORE_TIMEOUT_S, LEAST_S, SilenceFigures, silence_limit


@pytest.mark.parametrize(
    ("figures", "settings", "seconds"),
    [
        ({}, {}, AUTOMATIC_LEAST_S),
        ({"recovery_s": 5, "redo_s": 30}, {}, AUTOMATIC_LEAST_S),
        ({"recovery_s": 90, "redo_s": 1500}, {}, 1590),
        ({"recovery_s": 90, "redo_s": 1500}, {"patience_s": 120}, 120),
        ({}, {"patience_s": 5}, LEAST_S),
        ({"needed_s": 300}, {}, 900),
        ({"needed_s": 300}, {"factor": 5}, 1500),
        ({"needed_s": 100}, {"patience_s": 120}, 300),
        ({"needed_s": 20}, {"patience_s": 120}, 120),
        ({"did_not_help": 1}, {"patience_s": 120}, 120 * AGAIN_FACTOR),
        ({"did_not_help": 2}, {"patience_s": 120}, None),
        ({"did_not_help": 2}, {}, None),
        ({"over": True}, {}, None),
        ({}, {"off": True}, None),
        ({"recovery_s": 90, "redo_s": 3000, "timeout_s": 1800}, {}, 1800 - BEFORE_TIMEOUT_S),
        ({"needed_s": 500, "timeout_s": 600}, {}, 600 - BEFORE_TIMEOUT_S),
        ({"timeout_s": 20}, {}, AUTOMATIC_LEAST_S),
        ({"timeout_s": 1800}, {}, AUTOMATIC_LEAST_S),
        ({"did_not_help": 2, "timeout_s": 600}, {}, None),
    ],
)
def test_limits(figures: dict[str, Any], settings: dict[str, Any], seconds: float | None) -> None:
    found = silence_limit(SilenceFigures(**figures), **settings)
    assert found.seconds == seconds
    assert found.why


def test_never_before_a_minute_and_never_sooner_for_more_at_stake() -> None:
    dice = random.Random(3)
    for _ in range(2000):
        figures = SilenceFigures(
            recovery_s=dice.choice((0, 5, 400)),
            redo_s=dice.choice((0, 30, 4000)),
            needed_s=dice.choice((0, 45, 300, 2000)),
            did_not_help=dice.choice((0, 0, 1)),
            timeout_s=dice.choice((None, 30, 300, 1800)),
        )
        patience_s = dice.choice((None, 1, 60, 900))
        found = silence_limit(figures, patience_s=patience_s)
        assert found.seconds is not None
        assert found.seconds >= LEAST_S
        dearer = SilenceFigures(
            **{name: getattr(figures, name) for name in figures.__struct_fields__} | {"redo_s": 9000}
        )
        assert (silence_limit(dearer, patience_s=patience_s).seconds or 0) >= found.seconds
