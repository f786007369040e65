"""Both engines give the same lines a reading: whatever the log, the same story."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis import rules
from diagnosis.kernel import log as kernel_rules
from diagnosis.logs import scan
from diagnosis.logs.reader import LogReader
from diagnosis.logs.scan import simplified

hyperscan = pytest.importorskip("hyperscan")

SAMPLES = [
    *(sample for rule in kernel_rules.default().rules for sample in (*rule.samples, *rule.others)),
    *(sample for rule in rules.default().rules for sample in (*rule.samples, *rule.others)),
    "Traceback (most recent call last):",
    '  File "/home/u/train.py", line 41, in step',
    "KeyError: 'x'",
    "iteration 10/ 100 | lm loss: 2.5E+00 | grad norm: 0.3 | number of nan iterations:   0 |",
    "healthy \x1b[31mline\x1b[0m with nothing",
    "",
]


@pytest.fixture(scope="module")
def compiled():
    found = scan.at_once(scan.patterns())
    assert found is not None
    return found


def log(engine, blocks):
    log = LogReader("x", engine=engine)
    for block in blocks:
        log.feed(block)
    log.end()
    return log.summary()


@settings(max_examples=40, deadline=None)
@given(
    lines=st.lists(st.one_of(st.sampled_from(SAMPLES), st.text(max_size=60)), min_size=1, max_size=60),
    cut=st.integers(0, 60),
)
def test_the_engines_give_one_story(compiled, lines, cut):
    raw = [line.replace("\n", " ").encode(errors="replace") for line in lines]
    blocks = [b"\n".join(part) for part in (raw[:cut], raw[cut:]) if part]
    assert repr(log(scan.AtOnce(compiled), blocks)) == repr(log(scan.Shapes(), blocks))


def test_a_healthy_line_of_megatron_is_in_no_pattern(compiled):
    hits = []
    compiled.hits(
        memoryview(f"{SAMPLES[-3]}\n".encode() * 100), lambda number, *_: hits.append(compiled.patterns[number].id)
    )
    assert hits == []


def test_all_samples_in_one_log(compiled):
    block = "\n".join(SAMPLES * 3).encode()
    one, other = log(scan.AtOnce(compiled), [block]), log(scan.Shapes(), [block])
    assert repr(one) == repr(other)  # NaN is not itself
    assert len(one.matches) > 50
    assert len(one.events) > 50


@pytest.mark.parametrize(
    ("pattern", "simple"),
    [
        (r"a{0,40}b{1,9}?c{2,8}d{0,2}", r"a*b+c{2,}d{0,2}"),
        (r"^x(?<!y z)(?=[)])\Z", "x"),
        (r"(?P<pci>[0-9a-f:]{7,16})x", "(?:[0-9a-f:]{7,})x"),
        (r"loss.{0,40}became nan|other", "became nan|other"),
        (r"loss.{0,40}ab", "loss.*ab"),
        (r"timeout.{0,9}of nothing", "of nothing"),
        (r"(?:NVRM|Xid) \(.{0,9}(?:timed out|failed.{0,9}nothing)x?", "(?:timed out|nothing)"),
    ],
)
def test_a_pattern_is_simplified(pattern, simple):
    assert simplified(pattern) == simple


def test_a_simplified_pattern_finds_what_the_pattern_finds():
    for one in rules.default().rules:
        for sample in one.samples:
            if "output" in one.sources:
                assert re.search(simplified(one.regex), sample, re.IGNORECASE), sample


@pytest.mark.parametrize("before", [b"", b"step 5 loss 2.3 | nothing here\n" * 20])
def test_a_scan_finds_whatever_a_pattern_finds(compiled, texts_of, before):
    """Also behind long gaps: Vectorscan is known to jump over the end of one."""
    chance = random.Random(before)
    tried = 0
    numbers: dict[str, set[int]] = {}
    for number, one in enumerate(compiled.patterns):
        numbers.setdefault(one.id, set()).add(number)
    for name, expression in {one.id: one.expression for one in compiled.patterns}.items():
        texts, matches = texts_of(expression, chance), re.compile(expression.encode(), re.IGNORECASE)
        for _ in range(12):
            line = texts.one().replace("\n", " ").encode()
            if matches.search(line) is not None:
                found: set[int] = set()
                compiled.hits(memoryview(before + line + b"\nmore"), lambda number, *_, found=found: found.add(number))
                assert found & numbers[name], (name, line)
                tried += 1
    assert tried > 1000


@pytest.mark.parametrize(
    "line", ["number of NaN losses: 3", "of nan in grads", "loss is inf\u2026", "loss is inf#", "grad_norm is inf"]
)
def test_a_loss_that_is_no_number(compiled, line):
    block = f"x\n{line}".encode()
    rule = next(one for one in rules.default().rules if one.id == "nan_loss")
    assert re.search(rule.regex, line, re.IGNORECASE)
    assert repr(log(scan.AtOnce(compiled), [block])) == repr(log(scan.Shapes(), [block]))
    assert log(scan.AtOnce(compiled), [block]).matches


def test_a_flood_costs_little_and_its_last_line_is_told(compiled):
    line = b"[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
    blocks = [b"\n".join([line] * 4000)] * 4
    engine = scan.AtOnce(compiled)
    given = [len(engine.lines(block)) for block in blocks]
    assert scan.FLOOD < given[0] < 2 * scan.FLOOD
    assert given[-1] < 250
    told = log(scan.AtOnce(compiled), blocks)
    match = next(one for one in told.matches if one.failure_class.value == "gpu_oom")
    assert (match.line, match.last_line) == (1, 16_000)
    assert 12_000 < match.count < 20_000


def test_near_misses_are_remembered_and_hide_nothing(compiled):
    near = [f"[rank{n}]: a message of {n} bytes about NVRM: nothing" for n in range(3000)]
    real = "NVRM: Xid (PCI:0000:c1:00): 79, pid=1"
    block = "\n".join([*near, real, *near]).encode()
    assert [block[one.start : one.end].decode() for one in scan.AtOnce(compiled).lines(block)] == [real]


def test_a_compiled_scan_is_used_in_another_process(compiled):
    again = scan.at_once(scan.patterns(), compiled.dump())
    assert again is not None
    assert scan.AtOnce(again).lines(b"a\nNVRM: Xid (PCI:0000:c1:00): 79, pid=1\nb") == [
        scan.LogLine(2, 39, scan.OUTPUT | scan.KERNEL)
    ]


def test_what_cannot_be_scanned_for_is_found_by_its_words():
    odd = scan.Pattern("odd", r"(a)x(?(1)b|c)", (b"axb",), scan.OUTPUT, r"(a)x(?(1)b|c)")
    found = scan.at_once([odd])
    assert found is not None
    assert scan.AtOnce(found).lines(b"..axb..\nabc") == [scan.LogLine(0, 7, scan.OUTPUT)]


@pytest.mark.parametrize("size", [scan.CHUNK - 1, scan.CHUNK, scan.CHUNK + 1, 5 * scan.CHUNK])
def test_lines_longer_than_a_chunk(compiled, size):
    block = b"x" * size + b" No space left on device\nshort\n" + b"y" * size
    assert [line.start for line in scan.AtOnce(compiled).lines(block)] == [0]
