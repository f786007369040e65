"""What a model may propose as a rule, and what each gate keeps out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec
import pytest

from diagnosis import llm, proposals, rules
from diagnosis.incident import Culprit, Opinion, ProposedRule, Verdict
from diagnosis.llm import ShownEvidence, ShownLine
from diagnosis.logs.steps import went_on
from diagnosis.proposals import Tried
from diagnosis.taxonomy import FailureClass

RULE_LINE = "[rank3]: FluxError: governor 17 lost its balance (0x7f) at 99%"
TEXT = "FluxError: governor 17 lost its balance (0x7f)"
LINES = (
    ShownLine(text="rank 1 on n1 ended with code 1"),
    ShownLine(text=RULE_LINE, where="n1 rank 1", said=True),
    ShownLine(text="torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", said=True),
    ShownLine(text="HF_TOKEN=[secret] was refused by the flux governor", said=True),
    ShownLine(text="WARNING: the flux governor wobbles", said=True),
    ShownLine(text="step 12/100 loss 2.5 (flux governor balanced)", said=True),
    ShownLine(text="the RuntimeError error has failed in rank", said=True),
    ShownLine(text="FluxError: governor of node-a7 lost its balance", said=True),
)


def opinion(
    line: object,
    text: object,
    failure_class: FailureClass = FailureClass.SCRIPT_ERROR,
    *,
    settled: FailureClass | None = None,
    tried: Tried = proposals.NOTHING,
) -> Opinion:
    said = {"lines": [2], "failure_class": failure_class.value, "rule": {"line": line, "text": text}}
    shown = ShownEvidence(lines=LINES, culprits={})
    return llm.ground(json.dumps(said), shown, id="rule-i-1", settled=settled, tried=tried)


def gate(found: Opinion) -> str:
    assert found.rule is None
    return found.rule_rejected.partition(":")[0]


def proposed(text: str, failure_class: FailureClass, line: str = "") -> ProposedRule:
    return ProposedRule(id="rule-i-1", failure_class=failure_class, text=text, line=line or text)


def test_a_good_one_matches_its_line_and_such_with_other_numbers() -> None:
    rule = opinion(2, TEXT).rule
    assert rule == proposed(TEXT, FailureClass.SCRIPT_ERROR, RULE_LINE)
    used = rules.packaged().with_site([proposals.row(rule)])
    others = (RULE_LINE.replace("17", "4"), RULE_LINE.replace("0x7f", "0xDEADBEEF"))
    for line, wanted in ((RULE_LINE, True), *((one, True) for one in others), ("FluxError: governor", False)):
        found = [match for match in used.scan(line.encode()) if match.rule == "rule-i-1"]
        assert bool(found) is wanted, line
        assert all((match.severity, match.confidence) == ("error", 0.6) for match in found)


def test_a_path_stands_for_any_path() -> None:
    line = "flux governor: cannot balance /data/run7/shard-00012.bin, 3 times"
    pattern = re.compile(str(proposals.row(proposed(line, FailureClass.STORAGE_ERROR))["regex"]))
    assert pattern.search("flux governor: cannot balance /mnt/x, 44 times")
    assert not pattern.search("flux governor: cannot balance it, 44 times")


@pytest.mark.parametrize(
    ("line", "text", "wanted"),
    [
        (2, "governor 18 lost its balance", "words"),  # not what stands there
        (2, "FluxError", "words"),  # too short
        (2, "17 lost its ", "words"),
        (2, "(0x7f) at 99%", "general"),
        (3, "CUDA out of memory. Tried to allocate", "general"),
        (3, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "known"),
        (4, "[secret] was refused by the flux governor", "words"),
        (5, "the flux governor wobbles", "warning"),
        (6, "(flux governor balanced)", "progress"),
        (7, "the RuntimeError error has failed", "general"),
        (8, "FluxError: governor of node-a7 lost", "host"),
    ],
)
def test_each_gate_rejects(line: int, text: str, wanted: str) -> None:
    assert gate(opinion(line, text, tried=Tried(hosts=frozenset({"node-a7", "n1"})))) == wanted


@pytest.mark.parametrize(
    ("line", "text"),
    [(1, "rank 1 on n1 ended with code 1"), (9, TEXT), ("2", TEXT), (True, TEXT), (2, None), (2, [TEXT])],
)
def test_what_is_no_choice_of_a_rank_s_words_is_no_proposal(line: object, text: object) -> None:
    found = opinion(line, text)
    assert (found.rule, found.rule_rejected) == (None, "")


def test_a_class_that_is_no_failure_gets_no_rule() -> None:
    for each in (FailureClass.UNKNOWN, FailureClass.PREEMPTED_OR_CANCELLED):
        assert gate(opinion(2, TEXT, each)) == "class"


def test_what_healthy_runs_or_other_classes_print_is_no_rule() -> None:
    again = RULE_LINE.replace("17", "3")
    assert gate(opinion(2, TEXT, tried=Tried(healthy=(again,)))) == "healthy"
    assert gate(opinion(2, TEXT, tried=Tried(cases=((FailureClass.GPU_HANG, again),)))) == "other classes"
    assert opinion(2, TEXT, tried=Tried(cases=((FailureClass.SCRIPT_ERROR, again),))).rule is not None


def test_the_operator_s_class_is_that_of_the_rule() -> None:
    rule = opinion(2, TEXT, FailureClass.GPU_HANG, settled=FailureClass.STORAGE_ERROR).rule
    assert rule is not None
    assert rule.failure_class is FailureClass.STORAGE_ERROR


def test_lines_are_healthy_up_to_the_last_that_shows_progress() -> None:
    lines = ("step 1 loss 3.0", "flux governor wobbles", "step 2 loss 2.9", "FluxError: it fell")
    assert went_on(lines) == list(lines[:3])
    assert went_on(lines[3:]) == []


def verdict(failure_class: FailureClass) -> Verdict:
    return Verdict(failure_class=failure_class, culprits=(Culprit(rank=1),), confidence=0.5, why="", action="none")


def test_only_incidents_without_a_cause_or_with_a_correction_teach() -> None:
    assert proposals.may_learn(None, None)
    assert proposals.may_learn(verdict(FailureClass.UNKNOWN), None)
    assert proposals.may_learn(verdict(FailureClass.WORKER_CRASH), None)
    assert not proposals.may_learn(verdict(FailureClass.GPU_OOM), None)
    assert proposals.may_learn(verdict(FailureClass.GPU_OOM), FailureClass.HOST_OOM)


# ----- filters of noise -----

FALSE_ALARM = "flux telemetry client: RuntimeError: CUDA error: an illegal memory access was encountered"


@pytest.fixture
def _as_before() -> Iterator[None]:
    yield
    rules.use(())


@pytest.mark.usefixtures("_as_before")
def test_a_false_alarm_becomes_a_filter_that_silences_its_line_alone() -> None:
    found = proposals.rejected(proposed("flux telemetry client: RuntimeError", FailureClass.NONE, FALSE_ALARM))
    assert found is None
    row = proposals.row(proposed("flux telemetry client: RuntimeError", FailureClass.NONE, FALSE_ALARM))
    used = rules.use([row])
    true = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert list(used.scan(FALSE_ALARM.encode())) == []
    assert [one.failure_class for one in used.scan(true.encode())] == [FailureClass.CUDA_ILLEGAL_ACCESS]


@pytest.mark.parametrize(
    ("text", "line", "wanted"),
    [
        ("CUDA error: an illegal memory access was", FALSE_ALARM, "other classes"),
        ("the flux telemetry client connected", "the flux telemetry client connected", "known"),
    ],
)
def test_a_filter_that_would_silence_failures_or_nothing_is_none(text: str, line: str, wanted: str) -> None:
    found = proposals.rejected(proposed(text, FailureClass.NONE, line))
    assert found is not None
    assert found.gate == wanted


# ----- of all that comes with the program -----


def test_no_rule_is_made_of_what_healthy_logs_say() -> None:
    """Whatever part of a harmless line a model chooses: the whole, a half, or its words."""
    packaged = rules.packaged()
    lines = [*rules.healthy(), *(line for noise in packaged.file.noise for line in noise.samples)]
    for line in lines:
        for text in (line[:160].strip(), line[len(line) // 2 :].strip()[:160], line[: len(line) // 2].strip()[:160]):
            assert proposals.rejected(proposed(text, FailureClass.GPU_HANG, line)), line


def test_any_regex_character_is_only_text() -> None:
    line = r"weird (a+)+$ [words] .* \d here ^ | ? { } governor é"
    rule = proposed(line, FailureClass.SCRIPT_ERROR)
    assert proposals.rejected(rule) is None
    assert msgspec.json.decode(msgspec.json.encode(rule), type=ProposedRule) == rule
    assert re.search(str(proposals.row(rule)["regex"]), line)


def test_the_healthy_lines_match_no_rule() -> None:
    found = [match for line in rules.healthy() for match in rules.packaged().scan(line.encode())]
    assert [match.text for match in found if match.severity != "warning"] == []
