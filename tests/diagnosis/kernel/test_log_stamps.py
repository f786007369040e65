"""What stands before a kernel message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.kernel.log import moment, read_stamp
from tests.tables import table

CASES = table(__file__)


@pytest.mark.parametrize(("line", "at", "uptime"), CASES["stamps"])
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


@pytest.mark.parametrize(("line", "at"), CASES["the_time_that_a_line_tells"])
def test_the_time_that_a_line_tells(line, at):
    assert moment(line, 2026) == at


def test_without_a_year_some_stamps_tell_nothing():
    assert moment("Nov 21 20:20:31 node7 kernel: x") is None


@given(st.text(max_size=200))
def test_any_text_has_a_time_or_none(text):
    moment(text, 2026)
