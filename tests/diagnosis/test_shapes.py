"""What a shape says of its lines: never less than they mean."""

from __future__ import annotations

import re

import pytest

from diagnosis import rules, text
from diagnosis.kernel import log as kernel_rules
from diagnosis.kernel.log import KernelReader
from diagnosis.logs.reader import LogReader


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"mlx5_core", "mlx5_core"),
        (r"severity\([0-3]\)", "severity(3)"),
        (r"synd 0x0*[1-9a-f]", "synd 0x01"),
        (r"EXT[234]-fs \w{1,3}", "ext4-fs a1"),
        (r"(?<!x7)y(?!9)", "x8y8"),
        (r"code [^5]", "code 0"),
        (r"[\x1b]\[3\dm", "\x1b[31m"),
        (r"(?P<a1>b2)\d{2,3}", "b2123"),
    ],
)
def test_a_blind_pattern_finds_the_shape_of_what_the_pattern_finds(pattern, line):
    assert re.search(pattern, line, re.IGNORECASE)
    assert re.search(text.blind(pattern), text.shape(line.encode()).decode(), re.IGNORECASE)


def test_the_shape_of_every_sample_may_mean_something():
    kernel = kernel_rules.default()
    for rule in kernel.rules:
        for sample in rule.samples:
            assert kernel.may_mean(text.shape(sample.lower().encode()).decode()), sample
    for one in rules.default().rules:
        if "output" in one.sources:
            for sample in one.samples:
                assert rules.default().may_mean(text.shape(sample.lower().encode())), sample


def test_a_line_of_a_harmless_shape_is_read_while_a_message_is_open():
    lines = [
        "[ 1.0] kworker/u8:1: attempt to access beyond end of device",
        "[ 1.0] sdb1: rw=1, sector=10, nr_sectors = 8 limit=2",
    ]
    harmless = "[ 0.5] sdb9: rw=1, sector=99, nr_sectors = 8 limit=1"
    log = LogReader("x")
    log.feed("\n".join([harmless, *lines]).encode())
    log.end()
    assert [(event.kind, event.device, event.line) for event in log.summary().events] == [("block", "sdb1", 2)]


def test_a_log_tells_what_its_lines_tell():
    lines = [line for rule in kernel_rules.default().rules for line in (*rule.samples, *rule.others)] * 2
    reader, log = KernelReader(), LogReader("x")
    told = [event for line in lines for event in reader.feed(line)] + reader.end()
    log.feed("\n".join(lines).encode())
    log.end()
    assert list(log.summary().events) == sorted(told, key=lambda event: event.line)


def test_a_pattern_that_cannot_be_made_blind_finds_everything():
    assert text.blind(r"(a)(?(1)b|c)") == ""


def test_the_same_shape_with_other_numbers_may_mean_something():
    log = LogReader("x")
    log.feed(b"[ 1.0] mlx4_core 0000:03:00.0: Link down is fine 7\nx")
    log.feed(b"[ 1.0] mlx5_core 0000:03:00.0: Link down is fine 7\nx")
    log.end()
    assert [event.line for event in log.summary().events if event.kind == "mlx5"] == [3]
