"""What is learned from one case helps later ones, and harms none."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from diagnosis import llm, rules
from diagnosis.taxonomy import FailureClass
from tests.bench import learning
from tests.bench.__main__ import group
from tests.bench.learning import Case

END = "srun: error: n1: task 0: Exited with exit code 1"


def case(name: str, words: str, label: FailureClass = FailureClass.STORAGE_ERROR, at: str = "") -> Case:
    return Case(id=name, label=label, log=f"step 1 loss 3.1\nstep 2 loss 3.0\n{words}\n{END}\n", source="o/r@1", at=at)


CASES = (
    case("c1", "flux governor 17 failed to balance the manifold"),
    case("c2", "flux governor 4 failed to balance the manifold"),
    case("c3", "quux turbine overheated, cannot spin", FailureClass.SCRIPT_ERROR),
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "cases.jsonl"
    file.write_bytes(b"\n".join(msgspec.json.encode(one) for one in CASES))
    return file


def test_a_rule_of_the_first_case_settles_the_second(corpus: Path) -> None:
    before = rules.default()
    result = CliRunner().invoke(group, ["learning", str(corpus), "--json"], standalone_mode=False)
    found = json.loads(result.stdout)
    assert result.return_value == 0
    assert found["all"]["settled_by_learned"] == 1
    assert found["all"]["wrong_by_learned"] == 0
    assert (found["all"]["asked"], found["all"]["calls_saved"], found["all"]["rules"]) == (2, 1, 2)
    assert list(found["repositories"]) == ["o/r"]
    assert [(one["id"], one["learned"]) for one in found["changed"]] == [("c2", "storage_error")]
    assert rules.default() is before, "nothing is left behind"


def test_a_wrong_verdict_of_a_learned_rule_is_counted() -> None:
    steps = learning.run(
        [CASES[0], case("c4", "flux governor 5 failed to balance the manifold", FailureClass.DISK_FULL)],
        learning.stand_in,
        from_nothing=False,
        note=lambda _: None,
    )
    assert learning.report(steps)["all"]["wrong_by_learned"] == 1


def test_recorded_answers_give_the_same_and_a_missing_one_is_no_answer(tmp_path: Path) -> None:
    shown = llm.shown_evidence(learning.incident_of(CASES[0]))
    question = llm.question(shown)
    file = tmp_path / "answers.jsonl"
    said = learning.stand_in(CASES[0], question, shown)
    file.write_text(json.dumps({"question": learning.key_of(question), "answer": said}) + "\n")
    steps = learning.run(CASES, learning.recorded(file), from_nothing=False, note=lambda _: None)
    assert [bool(one.approved) for one in steps] == [True, False, False]
    assert "has no answer" in steps[2].opinion
    file.write_text("no json\n")
    with pytest.raises(learning.WrongCorpus):
        learning.recorded(file)


def test_cases_come_in_order_of_time(tmp_path: Path) -> None:
    later = [msgspec.structs.replace(one, at=f"2026-0{9 - n}") for n, one in enumerate(CASES)]
    (tmp_path / "cases.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, later)))
    assert [one.id for one in learning.load(tmp_path)] == ["c3", "c2", "c1"]
