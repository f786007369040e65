"""The loss watch on curves of many kinds. The honest ones here are of other kinds than those it was tuned on."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tomllib

from diagnosis.logs.loss import LossWatch
from diagnosis.logs.steps import StepReader
from diagnosis.signals import LossAlarm

Curve = Callable[[random.Random], list[float]]
CASES = Path(__file__).parents[1] / "cases"


def alarmed(values: Sequence[float], every: int = 1, rates: Sequence[float] = ()) -> tuple[int, LossAlarm] | None:
    """At which value it gave its first alarm, and which."""
    watch = LossWatch()
    for index, value in enumerate(values):
        watch.feed(every * (index + 1), value, rates[index] if rates else None)
        if watch.alarm is not None:
            return index, watch.alarm
    return None


# ----- honest curves -----


def power_law(dice: random.Random, steps: int = 600) -> list[float]:
    """A scaling law: it falls for ever, more and more slowly."""
    power, noise = dice.uniform(0.1, 0.5), dice.choice([0.003, 0.02, 0.06])
    return [1.7 + 9 * (1 + step) ** -power * math.exp(dice.gauss(0, noise)) for step in range(steps)]


def staircase(dice: random.Random) -> list[float]:
    """The learning rate is divided by ten twice; each epoch ends a little lower than the next begins."""
    out = []
    for step in range(600):
        level = (2.3, 0.9, 0.4)[(step > 200) + (step > 400)] * (1 + math.exp(-(step % 200) / 15))
        out.append(level * (1 + 0.15 * (step % 50 < 3)) * math.exp(dice.gauss(0, 0.08)))
    return out


def warm_up(dice: random.Random) -> list[float]:
    """It rises at first, while the learning rate is warming up."""
    top, at = dice.uniform(11, 14), dice.randrange(20, 60)
    rise = [10.8 + (top - 10.8) * math.sin(math.pi * step / at) for step in range(at)]
    return [*rise, *(2.5 + 8 * math.exp(-step / 80) + abs(dice.gauss(0, 0.05)) for step in range(500))]


def mixture(dice: random.Random) -> list[float]:
    """Batches of three sources, each with a level of its own."""
    return [
        (2.2 + 4 * math.exp(-step / 100)) * dice.choice([0.5, 1.0, 1.0, 1.5]) * math.exp(dice.gauss(0, 0.03))
        for step in range(600)
    ]


def longer_contexts(dice: random.Random) -> list[float]:
    """The data change every 150 values, up or down by a third, and the model adapts."""
    out, offset = [], 0.0
    for step in range(600):
        if step and step % 150 == 0:
            offset += dice.uniform(-0.3, 0.35)
        offset *= 0.995
        out.append((2.4 + 6 * math.exp(-step / 60)) * math.exp(offset + dice.gauss(0, 0.03)))
    return out


def ends_of_epochs(dice: random.Random) -> list[float]:
    """Fine-tuning: memorized more with each epoch, in steps down; small batches at each end."""
    size = dice.randrange(60, 120)
    out = []
    for step in range(600):
        small = 3.0 if step % size == size - 1 else 1.0
        out.append(1.6 * 0.6 ** (step // size) * math.exp(dice.gauss(0, 0.25 * small)))
    return out


def quantized(dice: random.Random) -> list[float]:
    """Printed with two digits, near zero."""
    return [
        max(0.01, round(0.9 * math.exp(-step / 60) + 0.02 * math.exp(dice.gauss(0, 0.4)), 2)) for step in range(600)
    ]


def cosine_restarts(dice: random.Random) -> list[float]:
    """Warm restarts; the loss is up to twice as high at the high rate."""
    period, height, noise = dice.choice([100, 150]), dice.uniform(0.2, 0.7), dice.uniform(0.02, 0.1)
    out = []
    for step in range(600):
        rate = 0.5 * (1 + math.cos(math.pi * (step % period) / period))
        out.append((0.6 + 1.5 * math.exp(-step / 90)) * math.exp(height * rate + dice.gauss(0, noise)))
    return out


def lone_outliers(dice: random.Random) -> list[float]:
    """Single bad batches, some of them two or three in a row."""
    out = [(2.1 + 5 * math.exp(-step / 70)) * math.exp(dice.gauss(0, 0.02)) for step in range(600)]
    for _ in range(12):
        at = dice.randrange(100, 590)
        for step in range(at, at + dice.randrange(1, 4)):
            out[step] *= dice.uniform(1.5, 5)
    return out


def of_a_policy(dice: random.Random) -> list[float]:
    """A policy's loss crosses zero: nothing can be said of it."""
    return [dice.gauss(0, 0.02) * (1 + step / 100) for step in range(600)]


def smoothed(dice: random.Random) -> list[float]:
    """A running average, which wanders."""
    out, mean = [], 3.0
    for step in range(600):
        mean += 0.1 * ((2.0 + 4 * math.exp(-step / 80)) * math.exp(dice.gauss(0, 0.25)) - mean)
        out.append(mean)
    return out


def blips(dice: random.Random) -> list[float]:
    """Spikes that pass by themselves within some values."""
    out = [(2.3 + 5 * math.exp(-step / 70)) * math.exp(dice.gauss(0, 0.02)) for step in range(600)]
    for at in (150, 300, 450):
        height, length = dice.uniform(0.3, 1.2), dice.uniform(1, 6)
        for step in range(at, at + 40):
            out[step] *= math.exp(height * math.exp(-(step - at) / length))
    return out


def other_data(dice: random.Random) -> list[float]:
    """Fine-tuning on code, then on text: up to five times as high from one value to the next, and as calm."""
    code, text, at, first = dice.uniform(0.5, 1.0), dice.uniform(1.8, 2.6), dice.randint(200, 900), dice.uniform(1.5, 3)
    means = (code + (first - code) * math.exp(-step / 60) if step < at else text for step in range(1500))
    return [mean * math.exp(dice.gauss(0, 0.03)) for mean in means]


def data_in_turns(dice: random.Random) -> list[float]:
    low, high, each = dice.uniform(0.4, 0.9), dice.uniform(1.5, 2.4), dice.choice([150, 300])
    means = ((high if step // each % 2 else low) + 2 * math.exp(-step / 40) for step in range(1500))
    return [mean * math.exp(dice.gauss(0, 0.04)) for mean in means]


def a_part_that_grows(dice: random.Random) -> list[float]:
    """The weight of an auxiliary loss is raised slowly."""
    own, long, at, part = dice.uniform(0.3, 0.8), dice.uniform(200, 600), dice.randint(200, 500), dice.uniform(0.5, 1.5)
    grown = (min(1.0, max(0.0, (step - at) / long)) for step in range(1500))
    means = (own * (1 + part * share) + 1.5 * math.exp(-step / 50) for step, share in enumerate(grown))
    return [mean * math.exp(dice.gauss(0, 0.03)) for mean in means]


def curriculum(dice: random.Random) -> list[float]:
    """Harder every 300 values: 3.5 times as high, and learnt again."""
    levels = (0.1 * 1.6 ** (step // 300) * (1 + 1.2 * math.exp(-(step % 300) / 40)) for step in range(1500))
    return [(level + 1.5 * math.exp(-step / 30)) * math.exp(dice.gauss(0, 0.1)) for step, level in enumerate(levels)]


NEW_LEVELS: tuple[Curve, ...] = (other_data, data_in_turns, a_part_that_grows, curriculum)
HONEST: tuple[Curve, ...] = (
    power_law, staircase, warm_up, mixture, longer_contexts, ends_of_epochs, quantized, cosine_restarts, lone_outliers,
    of_a_policy, smoothed, blips,
)  # fmt: skip
SEEDS = 20


@pytest.mark.parametrize("curve", HONEST, ids=lambda curve: curve.__name__)
def test_no_alarm_on_honest_curves(curve: Curve) -> None:
    """240 in all."""
    false = [(seed, found) for seed in range(SEEDS) if (found := alarmed(curve(random.Random(seed)))) is not None]
    assert not false


@pytest.mark.parametrize("curve", NEW_LEVELS, ids=lambda curve: curve.__name__)
def test_a_new_level_is_seldom_an_alarm_and_never_a_lasting_one(curve: Curve) -> None:
    """At most one of 20 curves."""
    false = 0
    for seed in range(SEEDS):
        watch, alarms = LossWatch(), 0
        for step, value in enumerate(curve(random.Random(seed))):
            watch.feed(step, value)
            alarms += watch.alarm is not None
        assert watch.alarm is None, seed
        false += alarms > 0
    assert false <= 1


def test_even_a_very_high_level_becomes_the_usual_one() -> None:
    watch, seen = LossWatch(), []
    for step, value in enumerate(spiked(random.Random(9), 8.0, 200)):
        watch.feed(step, value)
        seen.append(watch.alarm is not None)
    assert any(seen[300:320])
    assert not any(seen[380:])


def test_no_alarm_in_any_healthy_log() -> None:
    """Every case of a log in tests/diagnosis/cases whose numbers are in order."""
    read = 0
    for path in sorted(CASES.rglob("*.toml")):
        case = tomllib.loads(path.read_text())
        texts = [value for value in _texts(case) if "loss" in value.lower()]
        if not texts or "loss_spike_or_nan" in json.dumps(case):
            continue
        read += 1
        for text in texts:
            reader = StepReader()
            for line in text.encode().splitlines(keepends=True):
                reader.feed(line)
            assert reader.curves.alarm is None, path.name
    assert read


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in _texts(one)]


# ----- curves that went wrong -----


def healthy(dice: random.Random, noise: float = 0.03, steps: int = 500) -> list[float]:
    return [(2.3 + 8 * math.exp(-step / 60)) * math.exp(dice.gauss(0, noise)) for step in range(steps)]


def spiked(dice: random.Random, height: float, length: int, wild: float = 0.0, noise: float = 0.03) -> list[float]:
    out = healthy(dice, noise)
    for step in range(300, 300 + length):
        out[step] *= height * math.exp(dice.gauss(0, wild))
    return out


def collapsed(dice: random.Random) -> list[float]:
    """It knows nothing any more: about the logarithm of the vocabulary's size, whatever the batch."""
    values = healthy(dice)
    return [*values[:300], *(10.3 * math.exp(dice.gauss(0, 0.005)) for _ in range(200))]


def climbing(dice: random.Random) -> list[float]:
    return [value * math.exp(max(0, step - 300) / 120) for step, value in enumerate(healthy(dice))]


WRONG: dict[str, tuple[Curve, int]] = {
    "three times, restless": (lambda dice: spiked(dice, 3.0, 60, wild=0.15), 30),
    "six times, short": (lambda dice: spiked(dice, 6.0, 15), 12),
    "twice, restless": (lambda dice: spiked(dice, 2.0, 80, wild=0.2), 30),
    "four times, noisy": (lambda dice: spiked(dice, 4.0, 60, wild=0.5, noise=0.12), 30),
    "back to where it began": (collapsed, 30),
    "climbs": (climbing, 150),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_went_wrong_is_seen_soon_and_from_the_right_step_on(kind: str) -> None:
    curve, within = WRONG[kind]
    for seed in range(SEEDS):
        found = alarmed(curve(random.Random(1000 + seed)), every=10)
        assert found is not None, seed
        at, alarm = found
        assert at - 300 <= within, seed
        assert alarm.step is not None
        assert 2960 <= alarm.step <= 3010 + 10 * within, seed
        assert alarm.interval == 10
        assert alarm.level > 1.3 * alarm.usual


def test_a_learning_rate_that_rises_explains_it() -> None:
    values = spiked(random.Random(1), 6.0, 200)
    assert alarmed(values) is not None
    assert alarmed(values, rates=[1e-3 if 300 <= step < 500 else 1e-4 for step in range(500)]) is None


def test_the_alarm_ends_when_the_loss_is_back() -> None:
    watch = LossWatch()
    seen = []
    for step, value in enumerate(spiked(random.Random(2), 6.0, 40)):
        watch.feed(step, value)
        seen.append(watch.alarm is not None)
    assert not any(seen[:300])
    assert all(seen[310:338])
    assert not any(seen[350:])


def test_the_next_attempt_is_watched_from_its_first_step_on() -> None:
    """It goes on 40 steps before the spike, which comes again: there is no time to learn the level anew."""
    values = spiked(random.Random(3), 6.0, 60)
    watch = LossWatch()
    for step in range(320):
        watch.feed(step, values[step])
    assert watch.alarm is not None
    watch.begin_again()
    assert watch.alarm is None
    for step in range(280, 315):
        watch.feed(step, values[step])
    assert watch.alarm is not None
    assert watch.alarm.step in (300, 301)


def test_a_run_that_begins_at_the_beginning_is_no_spike() -> None:
    values = healthy(random.Random(4))
    watch = LossWatch()
    for step in range(1, 300):
        watch.feed(step, values[step])
    watch.begin_again()
    for step in range(1, 300):
        watch.feed(step, values[step])
        assert watch.alarm is None


def test_memory_is_bounded_and_odd_values_do_no_harm() -> None:
    watch = LossWatch()
    dice = random.Random(5)
    for step in range(3000):
        odd = [math.nan, math.inf, -math.inf, 0.0, -1e300, 1e300, 5e-324, dice.random()]
        watch.feed(dice.choice([None, step, 7, 10**15]), dice.choice(odd), dice.choice([None, 0.0, 1e-5]))
    kept = [value for value in vars(watch).values() if hasattr(value, "__len__")]
    assert sum(map(len, kept)) < 500


class Thorough(LossWatch):
    """Finds level and noise anew for each value."""

    _calm_below = property(lambda _: -math.inf, lambda _, __: None)  # type: ignore[assignment]


@pytest.mark.parametrize("seed", range(6))
def test_values_that_are_taken_at_a_glance_change_nothing(seed: int) -> None:
    dice = random.Random(seed)
    quick, thorough, step, rise = LossWatch(), Thorough(), 0, 0.0
    for _ in range(900):
        step += 1
        if dice.random() < 0.01:
            rise = dice.choice([0.0, 0.0, 0.4, 1.0, 2.0])
        goes_back = dice.random() < 0.005
        step = max(1, step - dice.randrange(150)) if goes_back else step
        value = (2.0 + 6 * math.exp(-step / 60)) * math.exp(rise + dice.gauss(0, 0.02 * seed))
        for watch in (quick, thorough):
            if goes_back:
                watch.begin_again()
            watch.feed(step, value, 1e-4 if seed % 2 else None)
        assert quick.alarm == thorough.alarm
        assert quick.__dict__ | {"_calm_below": None} == thorough.__dict__ | {"_calm_below": None}


class Counting(LossWatch):
    thorough = 0

    def _usual(self) -> tuple[float, float] | None:
        self.thorough += 1
        return super()._usual()


@pytest.mark.parametrize("curve", [power_law, staircase, longer_contexts])
def test_most_values_are_taken_at_a_glance(curve: Curve) -> None:
    """All ranks of a node print one: to find level and noise for each would be most of what its agent costs."""
    watch, values = Counting(), curve(random.Random(3))
    for step, value in enumerate(values):
        watch.feed(step, value)
    assert watch.thorough < len(values) / 5


def test_what_is_calm_is_found_anew_in_each_attempt() -> None:
    """It rises by a third, goes back to before that, and then is twice as high."""
    quick, thorough = LossWatch(), Thorough()
    for watch in (quick, thorough):
        for step in range(1, 70):
            watch.feed(step, 2.0 if step < 33 else 2.7)
        watch.begin_again()
        for step in range(33, 90):
            watch.feed(step, 2.0 if step < 43 else 3.7)
    assert quick.__dict__ | {"_calm_below": None} == thorough.__dict__ | {"_calm_below": None}


# ----- in lines -----


def lines(step: int, loss: float, dice: random.Random) -> str:
    return f"step {step}/5000 | loss {loss:.4f} | aux_loss {dice.uniform(0, 9):.3f} | lr 1.0e-04"


def read(log: Sequence[str]) -> StepReader:
    reader = StepReader()
    for line in log:
        reader.feed(line.encode() + b"\n")
    return reader


def test_other_losses_between_do_not_count() -> None:
    """Parts of the loss beside it, and the evaluation's between."""
    dice = random.Random(6)
    log = []
    for step, value in enumerate(healthy(dice), 1):
        log.append(lines(step, value, dice))
        if step % 10 == 0:
            log.append(f"eval | step {step} | loss {dice.uniform(3, 30):.3f}")
            log.append(f"step {step}: val loss {dice.uniform(3, 30):.3f}")
            log.append(f"[step {step}] kl_loss {dice.uniform(3, 30):.3f}, z loss: {dice.uniform(0, 3):.4f}")
    assert read(log).loss_alarm is None
    assert read(log).curves.watched


@pytest.mark.parametrize(
    "form",
    [
        "step {step}/5000 | loss {loss:.4f} | aux_loss 0.100 | lr 1.0e-04",
        "iter {step}: loss {loss:.4f}, time 210.11ms, mfu 31.01%",
        "{{'loss': {loss:.4f}, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.1, 'step': {step}}}",
        " iteration {step:8d}/ 5000 | consumed samples: 1024 | lm loss: {loss:.6E} | loss scale: 1.0 |",
        "[titan] 2026-11-23 05:00:01,123 - root - INFO - step: {step:2}  loss: {loss:7.4f}  memory: 30.1GiB(40.0%)",
        "Epoch 0:  10%|#         | {step}/5000 [00:10<01:40, 10.0it/s, v_num=0, train_loss={loss:.3f}]",
    ],
)
def test_a_spike_in_the_lines_of_known_trainers(form: str) -> None:
    log = [form.format(step=step, loss=value) for step, value in enumerate(spiked(random.Random(7), 6.5, 40), 1)]
    reader = read(log[:330])
    alarm = reader.loss_alarm
    assert alarm is not None
    assert alarm.kind in ("spike", "divergence")
    assert alarm.step in range(300, 303)
    assert read(log[:300]).loss_alarm is None


def test_nan_that_stays() -> None:
    log = [f"step {step} loss {value:.3f}" for step, value in enumerate(healthy(random.Random(8), steps=60), 1)]
    assert read([*log, "step 61 loss nan", "step 62 loss nan"]).loss_alarm is None
    alarm = read([*log, *(f"step {step} loss nan" for step in (61, 62, 63))]).loss_alarm
    assert alarm == LossAlarm(kind="nan", step=61)
