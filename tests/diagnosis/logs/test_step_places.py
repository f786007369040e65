from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diagnosis.logs.steps import NEWEST, SHAPE_BYTES, places
from diagnosis.text import shape

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
