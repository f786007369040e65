"""Pickles of plain data are read as `pickle` reads them; all others end in a ValueError, soon and in bounds."""

from __future__ import annotations

import pickle
import pickletools

import pytest

from diagnosis.flight import plain_pickle
from diagnosis.flight.plain_pickle import loads

FRAME = {"name": "step", "filename": "train.py", "line": 7}
PLAIN = {
    "version": "2.10",
    "empty": [[], {}, ()],
    "numbers": [0, 255, 256, 65536, -1, 1 << 40, -(1 << 70), 1.5, float("inf")],
    "none": [None, True, False],
    "text": ["ä", "", "x" * 300, "\U0001f600"],
    "tuples": [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "entries": [{"frames": [FRAME, FRAME], "process_group": ("0", "default_pg")} for _ in range(400)],
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_read_as_pickle_reads_it(protocol):
    assert loads(pickle.dumps(PLAIN, protocol)) == PLAIN
    assert loads(pickletools.optimize(pickle.dumps(PLAIN, protocol)) + b"what comes behind") == PLAIN


def test_what_begins_is_no_whole():
    data = pickle.dumps(PLAIN, 2)
    for end in range(0, len(data), 97):
        with pytest.raises(ValueError, match="damaged"):
            loads(data[:end])


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    "data", [pickle.dumps(Evil(), 0), pickle.dumps({"a": [Evil()]}, 2), pickle.dumps(Evil, 4), b"cos\nsystem\n."]
)
def test_nothing_is_executed(data, capsys):
    with pytest.raises(ValueError, match="more than plain data"):
        loads(data)
    assert not capsys.readouterr().out


def laughs():
    """Each list holds the one before twice."""
    return b"\x80\x02(]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(40)) + b"t."


HIMSELF = b"\x80\x02]q\x00h\x00a."
DEEP = b"\x80\x02" + b"](" * 1000 + b"e" * 1000 + b"."


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (laughs(), "too large"),
        (HIMSELF, "contains itself"),
        (DEEP, "too deep"),
        (b"\x80\x02}(K\x01K\x02u.", "no text"),
        (b"\x80\x02}" + b"(K\x01u.", "damaged"),
        (b"\x80\x02K\x01K\x02.", "damaged"),
        (b"\x80\x02K\x01(a.", "damaged"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "damaged"),
        (b"\x80\x02r\xff\xff\xff\x7f.", "damaged"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"", "damaged"),
        (b"{}", "more than plain data"),
    ],
)
def test_hostile_ones_end_in_words(data, why):
    with pytest.raises(ValueError, match=why):
        loads(data)


def test_size_and_opcodes_are_bounded(monkeypatch):
    with pytest.raises(ValueError, match="too large"):
        loads(pickle.dumps("x" * 100), limit_bytes=100)
    monkeypatch.setattr(plain_pickle, "OPCODES", 1000)
    with pytest.raises(ValueError, match="1000 opcodes"):
        loads(b"\x80\x02" + b"N" * 2000)
