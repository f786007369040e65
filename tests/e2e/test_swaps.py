"""A GPU falls off the bus: a rank that hangs is replaced one slow step later, one that trains on at a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

Supervise = Callable[..., Any]


def three(supervise: Supervise, rig: str, pace: float, steps: int = 60, every: int = 5) -> tuple[Any, Any, Any]:
    """Nodes a and b with a rank each, c as a spare. `rig`: what happens on b."""
    shared = {"nproc": 1, "world": 2, "torchrun": ("--nnodes", "2"), "pace": pace, "steps": steps}
    saves = ("--save-every", str(every))
    a = supervise("plain", *saves, node="a", options=("--node-name", "a", "--spares", "1"), **shared)
    shown = a.job_dir / "controller.json"
    a.until(shown.exists, 20, "a controller")
    others = []
    for name, extra, its_rig in (("b", (), rig), ("c", ("--spare",), "")):
        address = str(json.loads(shown.read_text())["address"])
        options = ("--node-name", name, "--controller", address, "--spares", "1", *extra)
        job = supervise("plain", *saves, node=name, options=options, rig=its_rig, **shared)
        a.until(lambda name=name: name in [one["node"] for one in a.told("status")["nodes"]], 30, f"{name} to join")
        others.append(job)
    return a, *others


def made(job: Any) -> list[tuple[int, float]]:
    """Step and time of all that rank 0 made, in all attempts."""
    lines = [line.split() for path in job.rig.glob("steps-0-*") for line in path.read_text().splitlines()]
    return sorted(((int(step), float(at)) for step, at in lines), key=lambda one: one[1])


def test_a_rank_that_hangs_of_an_xid_is_replaced_after_one_slow_step(supervise: Supervise) -> None:
    a, _, c = three(supervise, "xid_hang@30:1", 0.2)
    assert set(c.wait_ranks(1)) == {1}
    c.succeeds()
    a.succeeds()
    (incident,) = a.incidents()
    assert incident["verdict"]["failure_class"] == "gpu_fallen_off_bus"
    assert [one["node"] for one in incident["verdict"]["culprits"]] == ["b"]
    assert [one["node"] for one in a.told("status")["cordons"]] == ["b"]
    steps = made(a)
    hung = max(at for step, at in steps[: [step for step, _ in steps].index(29) + 1])
    again = next(at for _, at in steps if at > hung + 0.5)
    print(f"\nfirst new step after {again - hung:.2f} s; {incident['seconds']}")
    assert incident["seconds"]["detect"] + incident["seconds"]["diagnose"] < 4, "1.3 s; by the limits of hangs 5 s"


@pytest.mark.slow
@pytest.mark.lasts(60)
@pytest.mark.timeout(300)
def test_a_rank_that_trains_on_leaves_at_the_next_checkpoint(supervise: Supervise) -> None:
    """And what it prints of an Xid is nothing."""
    a, _, c = three(supervise, "xid_printed@12:1,xid@31:1", 0.3, 90, 60)
    a.wait_shown(r"b leaves at the next checkpoint", 60)
    (planned,) = a.told("status")["swaps"]
    assert (planned["node"], planned["state"]) == ("b", "planned")
    assert set(c.wait_ranks(1)) == {1}
    c.succeeds()
    a.succeeds()
    struck, swap = a.incidents()
    assert (struck["trigger"], swap["trigger"]) == ("device", "swap")
    assert struck["step"] >= 29, "what a rank writes of a device is no finding"
    steps = [step for step, _ in made(a)]
    print(f"\nsteps made twice: {len(steps) - len(set(steps))}; {swap['seconds']}")
    assert len(steps) - len(set(steps)) <= 3, "0 or 1 on a machine that is not busy"
