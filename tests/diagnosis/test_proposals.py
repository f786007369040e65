"""Rules that a model proposes: what is worth a person's time."""

from __future__ import annotations

import msgspec
import pytest

from diagnosis import llm, rules
from diagnosis.incident import ProposedRule
from diagnosis.llm import ShownLine
from diagnosis.taxonomy import FailureClass

LINE = "[rank3]: FluxError: governor 17 lost its balance (0x7f) at 99%"
LINES = (
    ShownLine(text="rank 1 on n1 ended with code 1"),
    ShownLine(text=LINE, where="n1 rank 1", said=True),
    ShownLine(text="torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", said=True),
    ShownLine(text="HF_TOKEN=[secret] was refused by it", said=True),
)


def propose(line: object, text: object, failure_class: FailureClass = FailureClass.SCRIPT_ERROR) -> ProposedRule | None:
    return llm.proposed_rule({"line": line, "text": text}, failure_class, LINES, "rule-i-1")


def test_a_good_one_matches_its_line_and_such_with_other_numbers() -> None:
    rule = propose(2, "FluxError: governor 17 lost its balance (0x7f)")
    assert rule == ProposedRule(
        id="rule-i-1",
        failure_class=FailureClass.SCRIPT_ERROR,
        text="FluxError: governor 17 lost its balance (0x7f)",
        line=LINE,
    )
    used = rules.packaged().with_site([llm.rule_row(rule)])
    for line, wanted in ((LINE, True), (LINE.replace("17", "4"), True), ("FluxError: governor", False)):
        found = [match for match in used.scan(line.encode()) if match.rule.id == "rule-i-1"]
        assert bool(found) is wanted
        assert all((match.rule.severity, match.confidence) == ("error", 0.6) for match in found)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (2, "governor 18 lost its balance"),  # not what stands there
        (2, "FluxError"),  # too short
        (2, "17 lost"),
        (2, "(0x7f) at 99%"),  # too few words
        (1, "rank 1 on n1 ended with code 1"),  # our own words
        (3, "CUDA out of memory. Tried to allocate"),  # known
        (4, "[secret] was refused by it"),
        (9, "FluxError: governor 17 lost its balance"),
        ("2", "FluxError: governor 17 lost its balance"),
        (True, "FluxError: governor 17 lost its balance"),
        (2, None),
        (2, ["FluxError: governor 17 lost its balance"]),
    ],
)
def test_others_are_not_kept(line: object, text: object) -> None:
    assert propose(line, text) is None


def test_a_class_that_is_no_failure_gets_no_rule() -> None:
    for each in (FailureClass.UNKNOWN, FailureClass.NONE, FailureClass.PREEMPTED_OR_CANCELLED):
        assert propose(2, "FluxError: governor 17 lost its balance", each) is None


def test_no_rule_is_made_of_what_healthy_logs_say() -> None:
    """Whatever part of a harmless line a model chooses: the whole, a half, or its words."""
    packaged = rules.packaged()
    lines = [*rules.healthy(), *(line for noise in packaged.file.noise for line in noise.samples)]
    for line in lines:
        for text in (line[:160].strip(), line[len(line) // 2 :].strip()[:160], line[: len(line) // 2].strip()[:160]):
            rule = ProposedRule(id="rule-i-1", failure_class=FailureClass.GPU_HANG, text=text, line=line)
            assert llm.rule_flaw(rule), line


def test_the_healthy_lines_say_nothing() -> None:
    found = [match for line in rules.healthy() for match in rules.packaged().scan(line.encode())]
    assert [match.text for match in found if match.rule.severity != "warning"] == []


def test_any_regex_character_is_only_text() -> None:
    line = ShownLine(text=r"weird (a+)+$ [words] .* \d here ^ | ? { } é", said=True)
    rule = llm.proposed_rule({"line": 1, "text": line.text}, FailureClass.SCRIPT_ERROR, (line,), "rule-i-1")
    assert rule is not None
    assert msgspec.json.decode(msgspec.json.encode(rule), type=ProposedRule) == rule
