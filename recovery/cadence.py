"""How often a run should save, and how many spare nodes it should have: what wastes the least time.

Pure: it computes with figures that others measured (`supervisor.job.advice`) or an operator gave. Nothing acts on the
result. Times are seconds.

The model. A run trains for `interval_s`, is held up for `stall_s` by a save, and so on. A save can be used `durable_s`
after it began (the stall, where training waits for the whole save). Failures come at random, independent of each
other, one in `mtbf_s` on average, also during a restart. Each costs `restart_s`, and all training since the beginning
of the newest save that can be used. With M = `mtbf_s`, t = `interval_s`, d = `stall_s`, L = `durable_s`,
R = `restart_s`, the expected time from one durable save to the next is exactly

    M (1 - e^(-(t + d) / M)) e^((R + t + L) / M)

(Daly's form where L = d), and the share of useful time is t divided by that. It has one maximum, where
t = M (1 - e^(-(t + d) / M)): R and L do not move it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from diagnosis.signals import Frozen

DAY_S = 86_400.0

# ----- the failure rate -----

PUBLISHED = (
    ("Meta RSC-1", 6.50e-3),
    ("Meta RSC-2", 2.34e-3),
    ("Llama 3", 3.79e-3),
)
"""Failures per day and node of eight GPUs. The clusters: "Revisiting Reliability in Large-Scale Machine Learning
Research Clusters" (arXiv 2410.21680). Llama 3: 419 unexpected interruptions of 2,048 nodes in 54 days (arXiv
2407.21783)."""
PRIOR_RATE = sum(rate for _, rate in PUBLISHED) / len(PUBLISHED)
PRIOR_FAILURES = 1
"""That is as much as one failure of the job's own, and no more: the first paper also has jobs of 1,024 GPUs that fail
three times as often as its rate says."""
PRIOR_DECADES = 7
"""A job may be far worse than what is published: ten times as bad with a tenth of the weight, and so on."""
HARDWARE_SHARE = 0.78
"""Of Llama 3's interruptions: confirmed or suspected hardware. Such a node is taken out."""
PRECISION = 1e-10
STEPS_OF_ROOT = 400
"""More than halving needs, whatever the scale."""
TAIL = 0.05
"""Left out on either side: rates are given with an interval that holds the true one in 90 % of all cases."""


class Rate(Frozen, frozen=True, kw_only=True):
    """Failures per node and day."""

    likely: float
    """It is as likely higher as lower."""
    low: float
    high: float

    def mtbf_s(self, nodes: int) -> tuple[float, float, float]:
        """Seconds between two failures of `nodes` nodes: likely, the shortest and the longest."""
        likely, low, high = (DAY_S / (nodes * rate) for rate in (self.likely, self.high, self.low))
        return likely, low, high


def exact_rate(per_node_day: float) -> Rate:
    """A rate that somebody has given."""
    return Rate(likely=per_node_day, low=per_node_day, high=per_node_day)


def observed_rate(failures: int, node_days: float, published: float = PRIOR_RATE) -> Rate:
    """After `failures` in `node_days`, and what is published: Bayes' rule, exact.

    Before: a mixture of Gamma distributions, one for each decade from the published rate upwards. So after: the same
    mixture with other weights. One Gamma alone would hold on to the published rate, however many failures there were.
    """
    shape = PRIOR_FAILURES + failures
    parts: list[tuple[float, float]] = []
    """Logarithm of the weight, and exposure."""
    for decade in range(PRIOR_DECADES):
        exposure = PRIOR_FAILURES / published / 10.0**decade
        weight = PRIOR_FAILURES * math.log(exposure) - shape * math.log(exposure + node_days)
        parts.append((weight - decade * math.log(10.0), exposure + node_days))
    most = max(weight for weight, _ in parts)
    weights = [(math.exp(weight - most), exposure) for weight, exposure in parts]
    total = math.fsum(weight for weight, _ in weights)
    mixture = [(weight / total, exposure) for weight, exposure in weights if weight > PRECISION * total]
    low, likely, high = (_quantile(shape, mixture, p) for p in (TAIL, 0.5, 1.0 - TAIL))
    return Rate(likely=likely, low=low, high=high)


def observed_node_rate(failures: int, node_days: float) -> float:
    """The likely rate of what takes nodes out."""
    return observed_rate(failures, node_days, HARDWARE_SHARE * PRIOR_RATE).likely


def _quantile(shape: int, mixture: Sequence[tuple[float, float]], p: float) -> float:
    """Of Gamma distributions of one shape: weight and exposure of each."""

    def below(rate: float) -> float:
        return p - math.fsum(weight * gamma_cdf(shape, exposure * rate) for weight, exposure in mixture)

    high = 1.0 / max(exposure for _, exposure in mixture)
    while below(high) > 0.0:
        high *= 2.0
    return _root(below, 0.0, high)


def gamma_cdf(shape: int, x: float) -> float:
    """P(X <= x) of the Gamma distribution with scale 1. The shape is whole: it is a sum of Poisson probabilities."""
    if x <= 0.0:
        return 0.0
    top = min(shape - 1, int(x))
    highest = math.exp(top * math.log(x) - x - math.lgamma(top + 1))
    below = term = highest
    for n in range(top, 0, -1):
        term *= n / x
        below += term
    term = highest
    for n in range(top + 1, shape):
        term *= x / n
        below += term
    return max(0.0, 1.0 - below)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that is positive at `low` and not at `high` becomes zero."""
    for _ in range(STEPS_OF_ROOT):
        middle = 0.5 * (low + high)
        if high - low <= PRECISION * high:
            break
        if falling(middle) > 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


# ----- the interval -----


LEAST_S = 1.0
"""Nobody saves more often, however little it costs."""


class Costs(Frozen, frozen=True, kw_only=True):
    """What a save and a restart take."""

    stall_s: float
    """How long a save holds training up."""
    durable_s: float
    """From the beginning of a save until a restart could use it; never less than the stall."""
    restart_s: float
    """From a failure to the first new step."""
    step_s: float = 0.0
    """One step; 0: not known."""

    @property
    def least_interval_s(self) -> float:
        """A save begins after a step, and when the one before is durable."""
        return max(self.step_s, self.durable_s - self.stall_s, LEAST_S)


def best_interval_s(costs: Costs, mtbf_s: float) -> float:
    """The training time between two saves that wastes the least."""
    stall = costs.stall_s / mtbf_s

    def rest(share: float) -> float:
        return -math.expm1(-(share + stall)) - share

    return max(costs.least_interval_s, mtbf_s * _root(rest, 0.0, 1.0) if stall > 0.0 else 0.0)


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Young 1974: for saves that are short against the time between failures."""
    return math.sqrt(2.0 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Daly 2006, the form of higher order."""
    if stall_s >= 2.0 * mtbf_s:
        return mtbf_s
    part = math.sqrt(stall_s / (2.0 * mtbf_s))
    return young_s(stall_s, mtbf_s) * (1.0 + part / 3.0 + part * part / 9.0) - stall_s


def useful_share(interval_s: float, costs: Costs, mtbf_s: float) -> float:
    """The expected ETTR: the share of the time that goes into steps which count."""
    if interval_s <= 0.0:
        return 0.0
    cycle = (interval_s + costs.stall_s) / mtbf_s
    lost = (costs.restart_s + interval_s + costs.durable_s) / mtbf_s
    return math.exp(math.log(interval_s / mtbf_s) - math.log(-math.expm1(-cycle)) - lost)


# ----- spares -----

MOST_SPARES = 4
SPARE_SHARE = 0.01
REPAIR_S = DAY_S
"""Until a node that was taken out, or another one for it, is back: nobody publishes it, so this is an assumption."""


class SpareRow(Frozen, frozen=True, kw_only=True):
    """What one number of spares means."""

    spares: int
    waits: float
    """Share of the time in which the job waits because a node is missing."""


def spare_table(nodes: int, per_node_day: float, repair_s: float) -> tuple[SpareRow, ...]:
    """The job runs while no more nodes are broken than it has spares, and nothing breaks while it waits.

    So with k spares at most k + 1 are broken, and it waits for Erlang's loss probability of k + 1 servers: exact for
    failures at random and repairs of any distribution.
    """
    load = nodes * per_node_day * repair_s / DAY_S
    rows: list[SpareRow] = []
    waits = 1.0
    for spares in range(MOST_SPARES + 1):
        waits = load * waits / (spares + 1 + load * waits)
        rows.append(SpareRow(spares=spares, waits=waits))
    return tuple(rows)


# ----- together -----


class Figures(Frozen, frozen=True, kw_only=True):
    """What the advice is computed from."""

    nodes: int
    gpus: int
    """Of all nodes."""
    rate: Rate
    """Of what interrupts the run and is neither the user's code nor an operator."""
    node_rate: float
    """Of what takes a node out: times in a day, for each node."""
    costs: Costs
    interval_s: float | None = None
    """Training time between two saves now; None: not known."""
    repair_s: float = REPAIR_S
    spare_share: float = SPARE_SHARE


USEFUL_AT_ALL = 0.05


class Advice(Frozen, frozen=True, kw_only=True):
    """What to change, and what that gains."""

    mtbf_s: float
    mtbf_low_s: float
    mtbf_high_s: float
    interval_s: float
    interval_low_s: float
    """For failures as often as is likely (`mtbf_low_s`), and `interval_high_s` as rare."""
    interval_high_s: float
    young_s: float
    daly_s: float
    is_least: bool
    """Saving as often as can be: by the formula it would be more often still."""
    is_hopeless: bool
    """Failures come so fast that no interval helps."""
    ettr_now: float | None = None
    """Expected with the present interval; None: it is not known."""
    ettr_advised: float
    gain: float | None = None
    """Useful time, as a share of all time."""
    gain_low: float | None = None
    """The least of what failures as often, or as rare, as is likely leave of it."""
    gpu_hours_a_day: float | None = None
    """What the gain is worth."""
    spares: tuple[SpareRow, ...] = ()
    spares_advised: int | None = None
    """The fewest with which the job waits less than `Figures.spare_share`; None: more than `MOST_SPARES`."""


def advise(figures: Figures) -> Advice:
    costs = figures.costs
    mtbfs = figures.rate.mtbf_s(figures.nodes)
    best, soonest, latest = (best_interval_s(costs, mtbf_s) for mtbf_s in mtbfs)
    now_s = figures.interval_s
    gains = []
    if now_s is not None:
        gains = [useful_share(best, costs, mtbf_s) - useful_share(now_s, costs, mtbf_s) for mtbf_s in mtbfs]
    rows = spare_table(figures.nodes, figures.node_rate, figures.repair_s)
    return Advice(
        mtbf_s=mtbfs[0],
        mtbf_low_s=mtbfs[1],
        mtbf_high_s=mtbfs[2],
        interval_s=best,
        interval_low_s=soonest,
        interval_high_s=latest,
        young_s=young_s(costs.stall_s, mtbfs[0]),
        daly_s=daly_s(costs.stall_s, mtbfs[0]),
        is_least=best <= costs.least_interval_s,
        is_hopeless=useful_share(best, costs, mtbfs[0]) < USEFUL_AT_ALL,
        ettr_now=None if now_s is None else useful_share(now_s, costs, mtbfs[0]),
        ettr_advised=useful_share(best, costs, mtbfs[0]),
        gain=gains[0] if gains else None,
        gain_low=min(gains) if gains else None,
        gpu_hours_a_day=24.0 * figures.gpus * gains[0] if gains else None,
        spares=rows,
        spares_advised=next((row.spares for row in rows if row.waits < figures.spare_share), None),
    )
