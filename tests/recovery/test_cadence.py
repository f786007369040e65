"""The advised interval and the number of spares: against jobs in virtual time, published tables, and each other."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from recovery.cadence import (
    DAY_S,
    PRIOR_DECADES,
    PRIOR_RATE,
    Costs,
    Figures,
    advise,
    best_interval_s,
    daly_s,
    exact_rate,
    gamma_cdf,
    observed_rate,
    spare_table,
    useful_share,
    young_s,
)
from tests.recovery import cadence_jobs
from tests.recovery.cadence_jobs import CASES, LAWS, compare, exponential

HOUR_S = 3600.0


def blocking(save_s: float, restart_s: float = 600.0) -> Costs:
    return Costs(stall_s=save_s, durable_s=save_s, restart_s=restart_s)


# ----- the interval -----


@pytest.mark.parametrize("name", CASES)
def test_the_advised_interval_is_as_good_as_the_best_of_a_grid(name: str) -> None:
    found = compare(*CASES[name], exponential)
    assert found.loss <= 3 * found.error + 1e-4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_the_comparison_would_notice_another_interval(name: str, factor: float) -> None:
    found = compare(*CASES[name], exponential, factor=factor)
    assert found.loss > 3 * found.error + 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_same_with_many_failures(name: str, seed: int) -> None:
    found = compare(*CASES[name], exponential, jobs=60, failures=300, seed=seed)
    assert found.loss <= 3 * found.error + 2e-5
    costs, mtbf_s = CASES[name]
    assert found.advised == pytest.approx(useful_share(found.advised_s, costs, mtbf_s), rel=0.01)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", CASES)
def test_where_failures_come_in_bursts_the_advice_loses_little(name: str, law: str) -> None:
    assert compare(*CASES[name], LAWS[law]).loss < 0.015


@pytest.mark.parametrize("interval_s", [60.0, 900.0, 7200.0])
@pytest.mark.parametrize("name", CASES)
def test_the_expected_share_is_that_of_a_job(name: str, interval_s: float) -> None:
    costs, mtbf_s = CASES[name]
    chance = random.Random(7)
    gaps = [exponential(chance, mtbf_s) for _ in range(6000)]
    assert cadence_jobs.useful_share(costs, interval_s, gaps) == pytest.approx(
        useful_share(interval_s, costs, mtbf_s), abs=0.02
    )


@pytest.mark.parametrize(
    ("mtbf_min", "save_min", "interval_min", "share"),
    [
        (1731, 1 / 6, 24, 0.981),
        (1731, 5, 128, 0.921),
        (433, 1, 29, 0.912),
        (108, 5, 30, 0.662),
        (13.5, 1, 4.6, 0.316),
        (13.5, 5, 8.6, 0.175),
    ],
)
def test_meta_clusters(mtbf_min: float, save_min: float, interval_min: float, share: float) -> None:
    """1,024 to 131,072 GPUs at the rate of RSC-1, with restarts of ten minutes."""
    costs = blocking(60 * save_min)
    best = best_interval_s(costs, 60 * mtbf_min)
    assert best == pytest.approx(60 * interval_min, rel=0.02)
    assert useful_share(best, costs, 60 * mtbf_min) == pytest.approx(share, abs=6e-4)


@pytest.mark.parametrize("stall_s", [1e-6, 0.1, 10.0, 1000.0, 1e6])
def test_no_other_interval_is_expected_to_be_better(stall_s: float) -> None:
    costs, mtbf_s = blocking(stall_s, 0.0), 20_000.0
    best = best_interval_s(costs, mtbf_s)
    share = useful_share(best, costs, mtbf_s)
    assert best <= mtbf_s
    others = [best * factor for factor in (0.2, 0.9, 0.999, 1.001, 1.1, 5.0)]
    assert all(useful_share(one, costs, mtbf_s) <= share for one in others if one >= costs.least_interval_s)


def test_known_approximations_agree_where_saves_are_short() -> None:
    assert daly_s(60.0, 20_000.0) == pytest.approx(best_interval_s(blocking(60.0), 20_000.0), rel=1e-4)
    assert young_s(60.0, 20_000.0) == pytest.approx(1549.19, rel=1e-5)
    assert young_s(1.0, 1e8) == pytest.approx(best_interval_s(blocking(1.0), 1e8), rel=1e-3)
    assert daly_s(50_000.0, 20_000.0) == 20_000.0


def test_neither_restart_nor_the_way_to_storage_moves_the_interval() -> None:
    sooner = best_interval_s(Costs(stall_s=5, durable_s=5, restart_s=0), 20_000.0)
    later = best_interval_s(Costs(stall_s=5, durable_s=300, restart_s=900), 20_000.0)
    assert sooner == later


def test_a_save_begins_only_when_the_one_before_can_be_used_and_after_a_step() -> None:
    assert best_interval_s(Costs(stall_s=0.01, durable_s=300, restart_s=60), 3600.0) == pytest.approx(299.99)
    assert best_interval_s(Costs(stall_s=0.01, durable_s=0.01, restart_s=60, step_s=90), 3600.0) == 90.0
    assert best_interval_s(Costs(stall_s=0.0, durable_s=0.0, restart_s=60), 3600.0) == 1.0


def test_failures_that_come_faster_than_restarts_overflow_nothing() -> None:
    assert useful_share(1.0, blocking(60.0, 1e6), 0.01) == 0.0
    assert 0.0 <= useful_share(1e9, blocking(60.0), 1.0) < 1e-6


# ----- the failure rate -----


@pytest.mark.parametrize(
    ("shape", "p", "quantile"),
    [  # half of chi-squared with twice the shape as degrees of freedom: the tables of every textbook
        (1, 0.05, 0.103 / 2),
        (1, 0.95, 5.991 / 2),
        (2, 0.05, 0.711 / 2),
        (5, 0.95, 18.307 / 2),
        (10, 0.05, 10.851 / 2),
        (15, 0.975, 46.979 / 2),
        (50, 0.95, 124.342 / 2),
    ],
)
def test_gamma_by_tables(shape: int, p: float, quantile: float) -> None:
    assert gamma_cdf(shape, quantile) == pytest.approx(p, abs=1e-3)


@pytest.mark.parametrize(("shape", "x"), [(1, 0.01), (3, 2.5), (40, 30.0), (300, 320.0), (300, 900.0), (5, 800.0)])
def test_gamma_by_its_sum(shape: int, x: float) -> None:
    terms = (math.exp(n * math.log(x) - x - math.lgamma(n + 1)) for n in range(shape))
    assert gamma_cdf(shape, x) == pytest.approx(1.0 - math.fsum(terms), abs=1e-12)


def test_the_rate_goes_from_what_is_published_to_what_was_seen() -> None:
    nothing = observed_rate(0, 0.0)
    assert 0.5 * PRIOR_RATE < nothing.likely < 2 * PRIOR_RATE
    assert nothing.high / nothing.low > 100  # that is hardly more than nothing
    quiet = observed_rate(0, 2000.0)
    assert quiet.likely < 0.1 * PRIOR_RATE
    for rate in (0.01, 0.2, 30.0, 5000.0):  # however far from what is published
        much = observed_rate(200, 200 / rate)
        assert much.low < rate < much.high < 1.3 * much.low
        assert much.likely == pytest.approx(rate, rel=0.02)


def test_nine_of_ten_intervals_hold_the_true_rate() -> None:
    chance = random.Random(3)
    decades, weights = range(PRIOR_DECADES), [10.0**-decade for decade in range(PRIOR_DECADES)]
    rates = [chance.expovariate(1 / PRIOR_RATE) * 10**decade for decade in chance.choices(decades, weights, k=800)]
    held = 0
    for rate in rates:
        failures, days = -1, 0.0
        while days < 100.0:
            failures, days = failures + 1, days + chance.expovariate(rate)
        told = observed_rate(failures, 100.0)
        held += told.low <= rate <= told.high
    assert held / len(rates) == pytest.approx(0.9, abs=0.03)


# ----- spares -----


def test_spares_by_the_balance_of_the_states() -> None:
    nodes, rate, repair_s = 100, 0.01, 2 * DAY_S
    breaks, mends = nodes * rate, DAY_S / repair_s
    for row in spare_table(nodes, rate, repair_s):
        shares = [1.0]
        for broken in range(row.spares + 1):
            shares.append(shares[-1] * breaks / (mends * (broken + 1)))
        assert row.waits == pytest.approx(shares[-1] / math.fsum(shares), rel=1e-12)


def test_spares_by_a_job_whose_repairs_all_take_as_long() -> None:
    """What was repaired after exactly a day is not exponential, and need not be."""
    chance, breaks_per_day = random.Random(5), 0.7
    (row,) = (one for one in spare_table(70, 0.01, DAY_S) if one.spares == 1)
    now = waited = 0.0
    back: list[float] = []
    for _ in range(40_000):
        now += chance.expovariate(breaks_per_day)
        back = [*(at for at in back if at > now), now + 1.0]
        if len(back) > row.spares:
            waited += back[0] - now
            now = back.pop(0)
    assert waited / now == pytest.approx(row.waits, rel=0.05)


def test_no_failures_need_no_spares() -> None:
    assert [row.waits for row in spare_table(10, 0.01, 0.0)] == [0.0] * 5


# ----- together -----


def test_what_a_change_is_worth() -> None:
    figures = Figures(
        nodes=64,
        gpus=512,
        rate=exact_rate(24 / (64 * 4)),
        node_rate=0.01,
        costs=blocking(60.0, 300.0),
        interval_s=4 * HOUR_S,
    )
    told = advise(figures)
    assert told.mtbf_s == pytest.approx(4 * HOUR_S)
    assert told.ettr_now is not None
    assert told.gain == pytest.approx(told.ettr_advised - told.ettr_now)
    assert told.gain is not None
    assert told.gain > 0.2
    assert told.gpu_hours_a_day == pytest.approx(24 * 512 * told.gain)
    assert told.spares_advised == 3
    assert not told.is_hopeless
    unknown = advise(msgspec.structs.replace(figures, interval_s=None))
    assert (unknown.gain, unknown.ettr_now, unknown.gpu_hours_a_day) == (None, None, None)


def test_the_least_gain_is_that_of_the_rate_at_which_the_change_helps_least() -> None:
    figures = Figures(
        nodes=8, gpus=64, rate=observed_rate(3, 100.0), node_rate=0.01, costs=blocking(10.0), interval_s=HOUR_S
    )
    told = advise(figures)
    assert told.gain is not None
    assert told.gain_low is not None
    assert told.gain_low < told.gain
    assert told.interval_low_s < told.interval_s < told.interval_high_s


def test_hopeless() -> None:
    told = advise(Figures(nodes=100_000, gpus=1, rate=exact_rate(2.4), node_rate=2.4, costs=blocking(60.0)))
    assert told.is_hopeless
    assert told.spares_advised is None
