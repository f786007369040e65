"""Pickles are read as `pickle` reads them, and nothing in them is executed."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.pickles import (
    InertObject,
    PickleDamaged,
    PickleError,
    PickleNotPlain,
    PickleTooLong,
    plain_end,
    plain_value,
    read_inert,
    read_plain,
)

FRAME = {"name": "step", "filename": "train.py", "line": 7}
VALUE = {
    "version": "2.10",
    "empty": [[], {}, ()],
    "numbers": [0, 255, 256, 65536, -1, 1 << 40, 1.5, float("inf")],
    "none": [None, True, False],
    "text": ["ä", "", "x" * 5000, "\U0001f600"],
    "tuples": [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "entries": [{"id": n, "frames": [FRAME, FRAME], "process_group": ("0", "default_pg")} for n in range(400)],
}


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_fast_and_the_slow_way_read_what_pickle_reads(protocol):
    for data in (pickle.dumps(VALUE, protocol), pickletools.optimize(pickle.dumps(VALUE, protocol))):
        assert plain_end(data) == len(data)
        assert read_plain(data + b"more") == VALUE == plain_value(read_inert(data).value)


def test_a_number_that_the_pattern_does_not_know_is_read_the_slow_way():
    data = pickle.dumps({"a": 1 << 70}, 2)
    assert plain_end(data) is None
    assert read_plain(data) == {"a": 1 << 70}


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"entries": [Evil()]}, 2),
        pickle.dumps(Evil(), 0),
        pickle.dumps({"entries": {1}}, 2),
        pickle.dumps(Evil, 4),
        b"cos\nsystem\n.",
        b"\x80\x02}]Ns.",  # a list as a key: C refuses it
        b"\x80\x02}(K\x01\x8a\x09123456789u.",  # a number as a key, where the slow way reads
        pickle.dumps({"a": b"bytes"}, 4),
    ],
)
def test_what_is_not_plain_is_refused_and_never_executed(data):
    with pytest.raises((PickleNotPlain, PickleDamaged)):
        read_plain(data)
    with pytest.raises(PickleNotPlain):
        plain_value(read_inert(data).value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"{}",
        pickle.dumps(VALUE, 2)[:-40],
        b"\x80\x02X\xff\xff\xff\x7fabc.",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"}",
        b"\x80\x02.",
        b"\x80\x02(NNu.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02K\x01(a.",
        b"\x80\x02r\xff\xff\xff\x7f.",
        b"\x80\x02h\x07.",
    ],
)
def test_damaged_ones_are_refused(data):
    with pytest.raises(PickleDamaged):
        read_plain(data)
    with pytest.raises(PickleDamaged):
        read_inert(data)


def test_every_beginning_of_a_pickle_is_damaged():
    data = pickle.dumps(VALUE, 2)
    for end in range(0, len(data), 97):
        with pytest.raises(PickleDamaged):
            read_plain(data[:end])


def test_any_change_of_a_byte_either_reads_or_is_refused():
    data = pickle.dumps(VALUE["entries"][:3], 2)
    for place in range(len(data)):
        for byte in (0x00, 0x28, 0x52, 0x63, 0x72, 0x8A, 0xFF):
            try:
                read_plain(data[:place] + bytes([byte]) + data[place + 1 :])
            except PickleError:
                continue


def test_an_index_for_which_c_would_take_gigabytes_never_comes_to_it():
    data = b"\x80\x02}r" + struct.pack("<I", 0xFFFFFFF0) + b"."
    assert plain_end(data) is None
    assert read_plain(data) == {}


def test_sizes_are_bounded():
    with pytest.raises(PickleTooLong):
        read_plain(pickle.dumps("x" * 100), limit_bytes=100)
    with pytest.raises(PickleTooLong):
        read_plain(b"\x80\x02" + b"N" * 2000 + b"c", opcodes=1000)
    with pytest.raises(PickleTooLong):
        read_inert(b"(" * 10_000, out_of_time=lambda: True)
    read_inert(b"(" * 100_000 + b"t" * 100_000 + b".")


def test_sharing_and_depth_are_bounded_the_slow_way():
    shared = b"\x80\x02(]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(40)) + b"t."
    assert len(plain_value(read_inert(shared).value)) == 41  # each list holds the one before twice
    for endless in (b"\x80\x02]q\x00h\x00a.", b"\x80\x02" + b"](" * 1000 + b"e" * 1000 + b"."):
        with pytest.raises(PickleTooLong):
            plain_value(read_inert(endless).value)


def shown(value):
    """An inert value as the value that it stands for, bytes of old protocols included."""
    if isinstance(value, InertObject):
        if value.name == "dict":
            return {key: shown(item) for key, item in value.pairs()}
        if value.name == "list":
            return [shown(item) for item in value.items]
        return value.args[0].encode("latin1") if value.args and value.name == "_codecs.encode" else b""
    return tuple(map(shown, value)) if isinstance(value, tuple) else value


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=20,
    ),
    st.integers(0, 5),
)
def test_any_value_is_read_as_it_is(value, protocol):
    assert shown(read_inert(pickle.dumps(value, protocol)).value) == value


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    for read in (read_inert, read_plain):
        try:
            read(data)
        except PickleError:
            pass
