"""Every rule on its own samples, and scanning."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis import rules
from tests.tables import table

CASES = table(__file__)
ALL = rules.default()
RULES = [pytest.param(rule, id=rule.id) for rule in ALL.rules]


def ids(text: str, source: str) -> set[str]:
    return {match.rule for match in ALL.scan(text.encode(), source)}


@pytest.mark.parametrize("rule", RULES)
def test_samples(rule):
    assert rule.samples
    assert rule.others
    for source in rule.sources:
        for sample in rule.samples:
            assert rule.id in ids(sample, source), f"{source}: {sample}"
        for sample in rule.others:
            assert rule.id not in ids(sample, source), f"{source}: {sample}"


def test_ids_are_unique():
    assert len({rule.id for rule in ALL.rules}) == len(ALL.rules)


@pytest.mark.parametrize("line", CASES["healthy_lines_say_nothing"])
def test_healthy_lines_say_nothing(line):
    assert [match for match in ALL.scan(line.encode()) if match.severity == "fatal"] == []
    assert "nan_loss" not in ids(line, "output")


def test_matches_come_in_order_with_their_lines():
    text = b"fine\nOSError: [Errno 28] No space left on device\nfine\rRuntimeError: CUDA error: out of memory\n"
    found = list(ALL.scan(text))
    assert [match.rule for match in found] == ["disk_full", "cuda_oom"]
    assert found[0].text == "OSError: [Errno 28] No space left on device"
    assert found[1].text.startswith("RuntimeError")


def test_floods_and_giant_lines_are_bounded():
    repeated = b"error: CUDA out of memory, " * 100_000
    found = [match.text for match in ALL.scan(repeated + b"no space left on device\nNo space left on device\n")]
    assert len(found) <= 2 * rules.WINDOWS + 1
    assert found[-1] == "No space left on device"
    assert len(list(ALL.scan(b"CUDA out of memory\n" * 5000))) == rules.MAX_MATCHES
    giant = b"x" * 2_000_000 + b" CUDA out of memory " + b"y" * 2_000_000
    (match,) = ALL.scan(giant)
    assert match.rule == "cuda_oom"
    assert len(match.text) <= 500


def test_a_bad_rule_file_names_the_key():
    with pytest.raises(ValueError, match=r"failure_class|class"):
        rules.parse("gates = []\n[[rule]]\nid = 'x'\nclass = 'no_such'\nregex = 'x'\nliterals = ['x']\n")


@given(st.binary(max_size=400), st.sampled_from(["output", "kernel", "gpu"]))
def test_any_bytes_are_survived(data, source):
    list(ALL.scan(data, source))


@given(st.lists(st.sampled_from([rule.samples[0].encode() for rule in ALL.rules]) | st.binary(max_size=30), max_size=8))
def test_mixed_samples_are_survived(lines):
    for match in ALL.scan(b"\n".join(lines)):
        assert len(match.text) <= 500


def gated(found: rules.Rules, line: bytes) -> bool:
    return bool(found._gated_lines(line + b"\n"))


def test_lines_that_differ_in_their_numbers_only_are_looked_at_once_and_none_is_missed():
    found = rules.Rules(rules.RuleFile(gates=("got 0 bytes", "killed"), rule=()))
    for number in (5, 7, 0, 3, 0):
        assert gated(found, b"unexpected end, got %d bytes" % number) == (number == 0)
    for step in range(2000):
        assert gated(found, b"step %d of worker %s" % (step, b"abcdefghij"[step % 10 :])) is False
        assert gated(found, b"step %d killed" % step)
    assert len(found._harmless) <= rules.SHAPES_KEPT + 1


@pytest.mark.parametrize("noise", [pytest.param(one, id=one.id) for one in ALL.file.noise])
def test_noise(noise):
    assert noise.samples
    for sample in noise.samples:
        assert ids(sample, "output") == set(), sample
    pattern = re.compile(noise.regex, re.IGNORECASE)
    assert all(pattern.search(sample) for sample in noise.samples)
    assert not any(pattern.search(sample) for sample in noise.others)


@pytest.mark.parametrize(
    "line",
    CASES["what_says_itself_that_it_is_mild_is_a_warning"],
)
def test_what_says_itself_that_it_is_mild_is_a_warning(line):
    assert {match.severity for match in ALL.scan(line.encode())} == {"warning"}


def test_memory_that_ran_out_counts_even_where_it_was_only_warned_of():
    (match,) = ALL.scan(b"2026-01-01 | WARNING | trainer | CUDA out of memory. Skipping batch")
    assert (match.severity, match.confidence) == ("error", 0.76)


def test_an_error_stays_one_whatever_it_quotes():
    (match,) = ALL.scan(
        b"RuntimeError: CUDA out of memory. Set PYTORCH_CUDA_ALLOC_CONF for more info, or keep ignoring it"
    )
    assert match.severity == "fatal"


def site_row(**more):
    row = {"id": "our_tracker", "class": "dns_or_connect", "regex": r"tracker \d+ unreachable", "literals": ["tracker"]}
    return {**row, "samples": ["tracker 7 unreachable"], **more}


def test_a_site_adds_rules_and_changes_ours():
    ours = ALL.with_site([site_row(), {"id": "disk_full", "confidence": 0.5, "severity": "warning"}])
    (match,) = ours.scan(b"step 4\ntracker 7 unreachable")
    assert match.rule == "our_tracker"
    (match,) = ours.scan(b"OSError: [Errno 28] No space left on device")
    assert (match.confidence, match.severity) == (0.5, "warning")
    changed = ALL.with_site([{"id": "disk_full", "regex": "pool is full", "literals": ["pool is full"]}])
    assert not list(changed.scan(b"OSError: [Errno 28] No space left on device"))
    assert list(changed.scan(b"pool is full"))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"class": "no_such"}, r"rule.our_tracker.*no_such.*class"),
        ({"regex": "("}, r"rule.our_tracker: "),
        ({"literals": ["a"]}, r"rule.our_tracker: `literals`"),
        ({"samples": ["tracker is fine"]}, r"rule.our_tracker: `samples`: it does not match 'tracker is fine'"),
        ({"others": ["tracker 7 unreachable"]}, r"`others`: it matches"),
        ({"id": ""}, r"`id`"),
        ({"colour": "red"}, r"rule.our_tracker.*colour"),
    ],
)
def test_a_wrong_rule_of_a_site_is_told_with_its_key(row, words):
    with pytest.raises(ValueError, match=words):
        ALL.with_site([site_row(**row)])


def test_a_process_uses_the_rules_of_its_site():
    try:
        rules.use([site_row()])
        assert list(rules.default().scan(b"tracker 7 unreachable"))
    finally:
        rules.use([])
    assert rules.default() is ALL


def test_colours_hide_nothing():
    assert {match.severity for match in ALL.scan(b"\x1b[33mWARNING\x1b[0m no space left on device")} == {"warning"}
    assert ids("\x1b[31mKilled\x1b[0m", "output") == {"killed"}


def test_an_exception_is_no_warning_whatever_it_warns_of():
    (match,) = ALL.scan(b"RuntimeError: CUDA out of memory. Warning: fragmentation")
    assert match.severity == "fatal"


@pytest.mark.parametrize(
    ("line", "peer"),
    [
        ("[c10d] recvValue failed on SocketImpl(fd=5, addr=[n1]:55512, remote=[n0]:29500): Connection reset", "n0"),
        ("RuntimeError: [x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:43211", "10.0.0.7"),
        ("[x/gloo/transport/tcp/pair.cc:538] Read error [10.0.0.7]:60313: Connection reset by peer", "10.0.0.7"),
        ("Read error [::ffff:10.0.0.7]:60313: Connection reset by peer", "10.0.0.7"),
        ("[x/gloo/transport/tcp/pair.cc:460] writev [10.0.0.7]:5: Broken pipe", "10.0.0.7"),
        ("[x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [fd00::7]:43211", "fd00::7"),
        ("[x/gloo/transport/tcp/pair.cc:538] Read error [fd00:0:1::7]:43211: Connection reset by peer", "fd00:0:1::7"),
        ("misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n7<57557>", "n7"),
    ],
)
def test_who_was_at_the_other_end(line, peer):
    assert {match.fields.get("peer") for match in ALL.scan(line.encode())} == {peer}


def test_a_field_has_one_name_whatever_the_wording():
    (match,) = ALL.scan(b"srun: error: Node failure on n12")
    assert match.fields["host"] == "n12"
