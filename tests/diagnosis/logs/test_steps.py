"""Steps out of the output of real trainers' formats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.logs.steps import NEWEST, SHAPE_BYTES, StepReader, places
from diagnosis.text import shape
from tests.tables import table

CASES = table(__file__)


def bar(label, n, total, tail=""):
    """One state of a tqdm bar."""
    return f"\r{label}{n * 100 // total:3d}%|{'█' * (n * 10 // total):10s}| {n}/{total} [00:01<00:09,  9.50it/s{tail}]"


def bars(label, numbers, total, tail=""):
    return "".join(bar(label, n, total, tail) for n in numbers)


def read(*texts):
    reader = StepReader()
    for text in texts:
        reader.feed(text.encode())
    return reader


MEGATRON = (
    " [2026-01-01 10:00:00] iteration {i:8d}/    1000 | consumed samples: {s:12d} | elapsed time per iteration (ms): "
    "4210.1 | lm loss: 8.5E+00 | loss scale: 16384.0 | number of skipped iterations:   {i} | nan iterations:   0 |\n"
)
TITAN = "[rank0]:\x1b[0m[titan] INFO - \x1b[31mstep: {i:2}  \x1b[32mloss:  7.1000  \x1b[33mmemory: 1.2GiB(3%)\x1b[0m\n"
DEEPSPEED = (
    "[INFO] [logging.py:96:log_dist] [Rank 0] step={i}, skipped=6, lr=[9.6e-06], mom=[(0.9, 0.95)]\n"
    "[INFO] epoch=0/micro_step={s}/global_step={i}, RunningAvgSamplesPerSec=171.9\n"
)


@pytest.mark.parametrize(
    ("line", "step", "last"),
    [
        (MEGATRON, 60, 1000),
        (TITAN, 60, None),
        (DEEPSPEED, 60, None),
        ("iter {i}: loss 2.3012, time 12.10ms, mfu 3.20%\n", 60, None),
        ("[Step {i}/100] Loss: 5.1219 | Tokens/s: 2376.02\n", 60, 100),
        ('{{"step": {i}, "loss": 2.1, "max_steps": 100}}\n', 60, None),
        ("Epoch [1/3], Step [{i}/600], Loss: 0.2\n", 60, None),
        ("train: global step {i} of 500 loss=1.0\n", 60, 500),
        ("3: [default3]: it {i} loss 1.0\n", 60, None),
    ],
    ids=["megatron", "torchtitan", "deepspeed", "nanogpt", "brackets", "json", "epochs", "of", "prefix"],
)
@pytest.mark.parametrize("whole", [True, False])
def test_formats(line, step, last, whole):
    lines = [line.format(i=i, s=4 * i) for i in (10, 20, 30, 40, 50, 60)]
    reader = read("".join(lines)) if whole else read(*lines)
    assert (reader.step, reader.last_step) == (step, last)


@pytest.mark.parametrize(
    "said",
    CASES["a_number_in_a_path_is_no_step"],
)
@pytest.mark.parametrize("before", ["step {i}\n", ""])
def test_a_number_in_a_path_is_no_step(before, said):
    lines = [(before + said + "\n").format(i=i, n=80 * i) for i in range(1, 20)]
    assert read(*lines).step == (19 if before else None)


@pytest.mark.parametrize(
    "line",
    CASES["a_step_beside_a_slash_is_one"],
)
def test_a_step_beside_a_slash_is_one(line):
    assert read(*(line.format(i=i) + "\n" for i in range(1, 20))).step == 19


def test_hf_trainer_and_its_other_bars():
    reader = read(bars("Map: ", range(0, 1001, 100), 1000), bars("Loading checkpoint shards: ", range(3), 2), "\n")
    assert reader.step is None
    reader.feed(bars("", range(20), 100).encode())
    reader.feed(b"{'loss': 1.25, 'grad_norm': 1.0, 'learning_rate': 5e-05, 'epoch': 0.1}\n")
    assert (reader.step, reader.last_step, reader.loss) == (19, 100, 1.25)
    reader.feed(bars("", range(14), 13).encode())
    assert (reader.step, reader.last_step, reader.phase) == (19, 100, "evaluation")
    reader.feed(bars("", range(20, 31), 100).encode())
    assert (reader.step, reader.phase) == (30, "")
    reader.feed(b"{'train_runtime': 12.0, 'train_loss': 1.0, 'epoch': 1.0}\n")
    assert reader.phase == "end"


@pytest.mark.parametrize("rate", ["301113.97it/s", "81.2MB/s", "54230it/s", "17 kB/s"])
def test_a_bar_that_counts_bytes_counts_no_steps(rate):
    reader = read(*(f"\r{n}%|##  | {n * 4096}/9912422 [00:01<00:09, {rate}]" for n in range(1, 9)), "\n")
    assert reader.step is None
    reader.feed(bars("", range(1, 8), 100).encode())
    assert reader.step == 7


def test_lightning_counts_on_over_epochs():
    tail = ", v_num=0, train_loss=2.30"
    reader = read(*(bars(f"Epoch {epoch}: ", range(1, 101), 100, tail) for epoch in range(3)))
    assert (reader.step, reader.last_step) == (300, None)
    reader.feed(bars("Validation DataLoader 0: ", range(11), 10).encode())
    assert (reader.step, reader.phase) == (300, "evaluation")


def test_a_counter_that_begins_again_counts_on():
    assert read(*(f"epoch {epoch} step {i}/50 loss 0.1\n" for epoch in range(3) for i in range(50))).step == 149


def test_another_loops_counter_with_the_same_name_is_noise():
    train = "".join(f"step {i} loss 1.0\n" for i in range(100))
    reader = read(train, "".join(f"step {i} loss 1.0\n" for i in range(10)), "step 100 loss 1\nstep 101 loss 1\n")
    assert reader.step == 101


def test_constants_are_never_steps():
    reader = read("max_steps = 1000\nwarmup steps: 10\neval_steps=5\ngradient accumulation steps = 1\n" * 5)
    assert reader.step is None


def test_one_number_is_not_yet_believed():
    assert read("step 7 loss 1\n").step is None
    assert read("step 7 loss 1\nstep 8 loss 1\n").step == 8


@pytest.mark.parametrize("value", ["nan", "NaN", "inf", "-inf", "NAN"])
def test_bad_losses(value):
    reader = read("step 1 loss 2.0\nstep 2 loss 2.0\n", f"step 3 loss {value}\n")
    assert reader.bad_loss
    assert reader.bad_since == 3
    reader.feed(b"step 4 loss 2.0\n")
    assert not reader.bad_loss


@pytest.mark.parametrize(
    ("line", "phase"),
    CASES["phases"],
)
def test_phases(line, phase):
    reader = read("step 1 loss 1\nstep 2 loss 1\n", line)
    assert reader.phase == phase
    reader.feed(b"step 3 loss 1\n")
    assert reader.phase == ""


@pytest.mark.parametrize("end", ["checkpoint written\n", "{'eval_loss': 1.5, 'epoch': 1.0}\n", "validation done\n"])
def test_what_ends_a_phase_needs_no_other_word(end):
    reader = read("step 1 loss 1\nstep 2 loss 1\n", "saving checkpoint\n")
    assert reader.phase == "checkpoint"
    reader.feed(end.encode())
    assert reader.phase == ""


def test_the_line_before_excuses_no_loss():
    assert read("step 1 loss 1\nstep 2 loss 1\nval_loss: nan\nloss nan\n").bad_loss


def test_a_step_before_a_flood_is_found():
    reader = read("step 1 loss 1\nstep 2 loss 1\n", "step 3 loss nan\n" + "a warning of no use at all\n" * 5000)
    assert reader.step == 3
    assert reader.bad_loss


def test_byte_by_byte_and_giant_lines():
    reader = StepReader()
    for byte in b"".join(b"step %d loss 1\n" % i for i in range(12)):
        reader.feed(bytes([byte]))
    assert reader.step == 11
    for _ in range(20):
        reader.feed(b"x" * 1_000_000)
    assert len(reader._partial) <= 4096
    reader.feed(b"\nstep 12 loss 1\n")
    assert reader.step == 12


_pieces = st.sampled_from(
    [
        bar("", 3, 10),
        bar("Epoch 1: ", 3, 10),
        "step 5 loss nan\n",
        "iter 7/9: loss 1\n",
        "\x1b[31m",
        "epoch: [3] [ 1/2]\n",
    ]
)


@given(st.lists(_pieces.map(str.encode) | st.binary(max_size=60), max_size=30))
def test_any_bytes_are_survived(pieces):
    reader = StepReader()
    for piece in pieces:
        reader.feed(piece)
    assert reader.step is None or reader.step >= 0
    assert len(reader._counters) <= 64


@pytest.mark.parametrize("stride", [1, 3, 10])
def test_lines_read_at_once_say_what_they_say_one_by_one(stride):
    lines = [
        b"step %d/900 | loss 2.5 | lr 1e-4\n" % number for number in (*range(1, 41, stride), *range(3, 31), 7, 8, 40)
    ]
    whole, single = StepReader(), StepReader()
    for at in range(0, len(lines), 14):
        whole.feed(b"".join(lines[at : at + 14]))
    for line in lines:
        single.feed(line)
    assert (whole.step, whole.last_step) == (single.step, single.last_step)
    assert whole.loss == single.loss == 2.5


LINE = b"epoch 2 global step 17/900 | loss: 1.25 | val_loss 2.5e-01 | saved checkpoint"


def test_what_stands_where() -> None:
    found = places(shape(LINE))
    (counter,) = found.counters
    assert counter.total is not None
    assert (LINE[slice(*counter.value)], LINE[slice(*counter.total)]) == (b"17", b"900")
    assert (counter.key, counter.weight, counter.epochal) == (b"n:global step", 3.0, True)
    assert [(LINE[start:end], training) for start, end, training in found.losses] == [
        (b"1.25", True),
        (b"2.5e-01", False),
    ]
    assert found.hints == ((LINE.index(b"saved"), "over"),)
    assert not found.bars


def test_nothing_stands_in_most_lines_and_little_in_any() -> None:
    assert places(shape(b"loading shards of the tokenizer")) is None
    assert len(places(shape(b"step 1 " * 1000)).counters) == NEWEST


_words = st.sampled_from(
    ["step", "iter ", "it", "epoch", "loss", ":", "=", " ", "/", "[", "]", "|", ".", "%", "e-", "nan"]
)


@given(st.lists(_words | st.integers(0, 10**6).map(str), max_size=20), st.permutations("0123456789"))
def test_the_digits_do_not_matter(words: list[str], digits: list[str]) -> None:
    line = "".join(words).encode()
    other = line.translate(bytes.maketrans(b"0123456789", "".join(digits).encode()))
    assert len(line) <= SHAPE_BYTES
    assert places(shape(line)) == places(shape(other))
    for counter in getattr(places(shape(line)), "counters", ()):
        assert int(line[slice(*counter.value)]) >= 0
    for start, end, _ in getattr(places(shape(line)), "losses", ()):
        float(line[start:end])
