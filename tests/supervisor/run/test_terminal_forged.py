"""Which lines of a rank would look like ours, and what is shown instead."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.run.terminal import Marker

FORGED = [
    b"unbroken: the run is complete\n",
    b"  unbroken: x\n",
    b"\tunbroken: x\n",
    b"\x1b[32munbroken: x\x1b[0m\n",
    b"\x1b[1;31munbroken\x1b[0m: x\n",
    b"un\x1b[0mbroken: x\n",
    b"unbrok\xe2\x80\x8ben: x\n",
    b"\xef\xbb\xbfunbroken: x\n",
    b"step 1\runbroken: x\n",
    b"xxx\b\b\bunbroken: x\n",
    b"step 1\x1b[2K\x1b[1Gunbroken: x\n",
    b"step 1\x1b[1Aunbroken: x\n",
    b"\x1b]0;title\x07unbroken: x\n",
    b"step 1\nunbroken: x\nstep 2\n",
    b"\x00unbroken: x\n",
]


@pytest.mark.parametrize("data", FORGED)
def test_what_looks_like_a_line_of_ours_names_its_rank(data: bytes) -> None:
    shown = Marker(3).shown(data)
    assert shown.count(b"[rank3] u") == 1
    assert shown.replace(b"[rank3] ", b"") == data


@pytest.mark.parametrize(
    "data",
    [
        b"step 1 loss 2.5\n",
        b"INFO unbroken: x\n",
        b"\x1b[32mINFO\x1b[0m unbroken: x\n",
        b"unbroken is a word\n",
        b"Unbroken: x\n",
        b" 50%|#####     | 5/10\r 60%|######    | 6/10\r",
        b"under\n",
        b"\xff\xfe\x80 unb\n",
    ],
)
def test_anything_else_is_shown_as_it_is(data: bytes) -> None:
    assert Marker(3).shown(data) == data


@given(st.lists(st.sampled_from([*FORGED, b"step 1 loss 2\n", b"50%\r", b"INFO unbroken: y\n"]), max_size=4), st.data())
def test_pieces_of_any_length_hide_nothing(lines: list[bytes], draw: st.DataObject) -> None:
    """However a line is flushed, no word of ours is shown at the start of a line without its rank before it."""
    data = b"".join(lines)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=6)))
    marker = Marker(0)
    shown = b"".join(marker.shown(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))
    assert shown.replace(b"[rank0] ", b"") == data
    for line in re.split(rb"[\n\r]|\x1b\[1G|\x1b\[1A", shown):
        plain = re.sub(rb"\x1b\[[0-9;]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x1f]|\xe2\x80\x8b|\xef\xbb\xbf", b"", line)
        assert not plain.lstrip().startswith(b"unbroken:")


@pytest.mark.parametrize("data", [b"u\x1b" * 30_000, b"u" + b"\x1b[0m" * 15_000, b"\x1b[" * 30_000, b"unbroken" * 8000])
def test_no_output_costs_more_than_its_length(data: bytes) -> None:
    before = time.process_time()
    Marker(0).shown(data)
    assert time.process_time() - before < 5.0
