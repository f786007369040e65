"""What stands before a kernel message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.kernel.log import moment, read_stamp


@pytest.mark.parametrize(
    ("line", "at", "uptime"),
    [
        ("[ 1234.5] text", None, 1234.5),
        ("6,3964,206764307,-;text", None, 206.764307),
        ("6,3964,206764307,-,caller=T77;text", None, 206.764307),
        ("[Sun Feb 23 16:24:18 2025] text", 1740327858.0, None),
        ("[Sun Jan  5 18:37:06 2025] text", 1736102226.0, None),
        ("2025-01-17T17:10:43+0000 n1.lan kernel: text", 1737133843.0, None),
        ("2025-01-17T17:10:43.5Z n1.lan kernel: text", 1737133843.5, None),
        ("kern  :warn  : 2025-01-21T04:41:44,283302+00:00 text", 1737434504.283302, None),
        ("1737133843.250000 n1 kernel: text", 1737133843.25, None),
        ("Jan 13 23:30:29 n1 kernel: [  945.9] text", None, 945.9),
        ("<4>[  945.9] text", None, 945.9),
        ("04 Aug, 14:03:26 fd183fd0-4585-374f kernel: text", None, None),
        ("Mai 07 21:02:55 fritz-arch kernel: text", None, None),
        ("kernel:[  945.9] text", None, 945.9),
        ("[  +0.000844] text", None, None),
        ("[Feb21 17:13] text", None, None),
        ("\x1b[32m[  945.9]\x1b[0m text", None, 945.9),
        ("[2025-99-17T17:10:43Z] text", None, None),
    ],
)
def test_stamps(line, at, uptime):
    stamp = read_stamp(line)
    assert stamp.text.strip() == "text"
    assert (stamp.at, stamp.uptime) == (pytest.approx(at) if at else at, uptime)


def test_a_message_keeps_its_own_beginning():
    assert read_stamp("NVRM: Xid (PCI:0000:c1:00): 79").text == "NVRM: Xid (PCI:0000:c1:00): 79"
    assert read_stamp("nvme nvme0: I/O 1 QID 1 timeout, aborting").text.startswith("nvme nvme0:")


@given(st.text(max_size=200))
def test_any_text_is_survived(text):
    read_stamp(text)


AT = 1795292431.0  # 2026-11-21 20:20:31 UTC


@pytest.mark.parametrize(
    ("line", "at"),
    [
        ("2026-11-21 20:20:31,500 - INFO - x", AT + 0.5),
        ("[2026-11-21 20:20:31] x", AT),
        ("[rank3]: 2026/11/21 20:20:31 x", AT),
        ("2026-11-21T20:20:31.25Z x", AT + 0.25),
        ("2026-11-21T21:20:31+01:00 x", AT),
        ("[11/21/26 20:20:31] INFO x", AT),
        ("11/21/2026 20:20:31 - INFO - x", AT),
        ("Sat Nov 21 20:20:31 2026 x", AT),
        ("Nov 21 20:20:31 node7 kernel: x", AT),
        ("[rank3]:[E1121 20:20:31.500000000 ProcessGroupNCCL.cpp:616] x", AT + 0.5),
        ("W1121 20:20:31.500000 123 torch/distributed/run.py:792] x", AT + 0.5),
        ("12:20:31 x", None),
        ("2026-99-21 20:20:31 x", None),
        ("x" * 300 + "2026-11-21 20:20:31", None),
    ],
)
def test_the_time_that_a_line_tells(line, at):
    assert moment(line, 2026) == at


def test_without_a_year_some_stamps_tell_nothing():
    assert moment("Nov 21 20:20:31 node7 kernel: x") is None


@given(st.text(max_size=200))
def test_any_text_has_a_time_or_none(text):
    moment(text, 2026)
