"""Jobs in virtual time, to compare the advice of `recovery.cadence` with: `python -m tests.recovery.cadence_jobs`.

They are walked through save by save, and know nothing of the formula.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from recovery.cadence import Costs, best_interval_s

Law = Callable[[random.Random, float], float]
"""A time until the next failure, for a mean."""


def exponential(chance: random.Random, mean_s: float) -> float:
    return chance.expovariate(1.0 / mean_s)


def weibull(chance: random.Random, mean_s: float) -> float:
    """Shape 0.7, as clusters show it: what has just failed fails again sooner."""
    return chance.weibullvariate(mean_s / 1.2658235, 0.7)


def bursts(chance: random.Random, mean_s: float) -> float:
    """Two of five failures follow shortly on the one before."""
    short = 0.02
    return chance.expovariate(1.0 / (mean_s * (short if chance.random() < 0.4 else (1.0 - 0.4 * short) / 0.6)))


LAWS: dict[str, Law] = {"exponential": exponential, "Weibull 0.7": weibull, "bursts": bursts}


def useful_share(costs: Costs, interval_s: float, gaps: Sequence[float]) -> float:
    """One job, with a failure at the end of each gap: the share of its time that went into training that was kept."""
    clock = kept = 0.0
    for gap in gaps:
        fails_at = clock + gap
        now, done = clock + costs.restart_s, kept
        while (save_at := now + interval_s) + costs.durable_s <= fails_at:
            done += interval_s
            kept = done
            now = save_at + costs.stall_s
        clock = fails_at
    return kept / clock


class Compared(NamedTuple):
    """The advised interval beside others, over the same failures."""

    advised_s: float
    best_s: float
    """Of the grid."""
    advised: float
    best: float
    loss: float
    error: float
    """Of `loss`, one standard error."""


def compare(
    costs: Costs, mtbf_s: float, law: Law, *, factor: float = 1.0, jobs: int = 24, failures: int = 60, seed: int = 1
) -> Compared:
    """`factor`: the advised interval is taken so many times longer."""
    chance = random.Random(seed)
    gaps = [[law(chance, mtbf_s) for _ in range(failures)] for _ in range(jobs)]
    advised_s = factor * best_interval_s(costs, mtbf_s)
    grid = [max(costs.least_interval_s, advised_s / factor * 1.25**power) for power in range(-8, 9)]
    shares = {one: [useful_share(costs, one, job) for job in gaps] for one in {*grid, advised_s}}
    best_s = max(grid, key=lambda one: statistics.fmean(shares[one]))
    losses = [best - ours for best, ours in zip(shares[best_s], shares[advised_s], strict=True)]
    return Compared(
        advised_s,
        best_s,
        statistics.fmean(shares[advised_s]),
        statistics.fmean(shares[best_s]),
        statistics.fmean(losses),
        statistics.stdev(losses) / jobs**0.5,
    )


CASES = {
    "64 nodes, 60 s saves": (Costs(stall_s=60, durable_s=60, restart_s=300), 4 * 3600.0),
    "64 nodes, async": (Costs(stall_s=5, durable_s=240, restart_s=300), 4 * 3600.0),
    "512 nodes, 5 min saves": (Costs(stall_s=300, durable_s=300, restart_s=600), 3600.0),
}
"""What a save and a restart cost, and how often the job fails."""

if __name__ == "__main__":
    print("| job | failures | advised | best of the grid | useful time, advised | best | loss |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, (costs, mtbf_s) in CASES.items():
        for law_name, law in LAWS.items():
            found = compare(costs, mtbf_s, law, jobs=60, failures=300)
            print(
                f"| {name} | {law_name} | {found.advised_s:,.0f} s | {found.best_s:,.0f} s | {found.advised:.2%} "
                f"| {found.best:.2%} | {100 * found.loss:.2f} ± {100 * found.error:.2f} % |"
            )
