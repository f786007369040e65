"""What nodes are told."""

from __future__ import annotations

from typing import Any

from supervisor import messages as m


def test_a_new_epoch_says_everything_again(running: Any) -> None:
    driver = running("a")
    before = driver.told["a"]
    driver.tell(m.ControllerStarted, epoch=2)
    after = driver.told["a"]
    assert (after.epoch, after.round) == (2, before.round)
    assert after.version > before.version
    assert {a.timer for a in driver.actions if isinstance(a, m.SetTimer)} == set(driver.job.timers)
