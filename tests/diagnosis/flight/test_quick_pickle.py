"""What is read at the speed of C is what the careful reader reads, and nothing else."""

from __future__ import annotations

import os
import pickle
import struct

import pytest

from diagnosis.flight import plain_pickle, quick_pickle

VALUE = {
    "version": "2.10",
    "entries": [
        {"record_id": n, "sizes": [[n, 1 << 40]], "at": -n, "none": None, "x": 0.5, "t": ("a", "b")} for n in range(300)
    ],
    "long text": "x" * 5000,
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_what_the_careful_reader_reads(protocol):
    data = pickle.dumps(VALUE, protocol=protocol)
    assert quick_pickle._plain_end(data) == len(data)
    assert quick_pickle.loads(data) == VALUE == plain_pickle.loads(data)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


FOREIGN = {
    "a call": pickle.dumps({"entries": [Evil()]}, 2),
    "a class": pickle.dumps({"entries": {1}}, 2),
    "cut short": pickle.dumps(VALUE, 2)[:-40],
    "nothing": b"",
    "no pickle": b"hello",
    "text that ends behind the end": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "a frame larger than all": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"}.",
    "an empty stack": b"\x80\x02.",
    "items without a dictionary": b"\x80\x02(NNu.",
    "a list as a key": b"\x80\x02}]Ns.",
    "nothing to get": b"\x80\x02h\x07.",
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_plain_pickle_is_refused_in_words(data):
    with pytest.raises(ValueError, match="pickle"):
        quick_pickle.loads(data)


def test_an_index_for_which_c_would_take_gigabytes_never_comes_to_it():
    data = b"\x80\x02}r" + struct.pack("<I", 0xFFFFFFF0) + b"."
    assert quick_pickle._plain_end(data) is None
    assert quick_pickle.loads(data) == {}


def test_any_change_of_a_byte_either_reads_or_is_refused():
    data = pickle.dumps(VALUE["entries"][:3], 2)
    for place in range(len(data)):
        for byte in (0x00, 0x28, 0x52, 0x63, 0x72, 0x8A, 0xFF):
            try:
                quick_pickle.loads(data[:place] + bytes([byte]) + data[place + 1 :])
            except ValueError:
                continue
