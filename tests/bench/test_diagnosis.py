from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from diagnosis.taxonomy import FailureClass
from tests.bench import diagnosis
from tests.bench.__main__ import group
from tests.bench.diagnosis import Guess, Labelled

OOM = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
torch.OutOfMemoryError: CUDA out of memory.
"""


def case(number: int, label: str, log: str = "", secondary: tuple[str, ...] = ()) -> Labelled:
    return Labelled(
        id=f"c{number}", label=FailureClass(label), log=log, secondary=tuple(FailureClass(one) for one in secondary)
    )


def test_a_score_counts_false_alarms_misses_and_symptoms_apart() -> None:
    cases = [case(1, "none"), case(2, "gpu_oom"), case(3, "host_oom", secondary=("nccl_timeout",)), case(4, "none")]
    guesses = [Guess(("gpu_oom",)), Guess(("none", "gpu_oom")), Guess(("nccl_timeout",)), Guess(("none",))]

    found = diagnosis.score(cases, guesses)

    assert (found["top_1"], found["top_3"]) == (0.25, 0.5)
    assert (found["healthy"], found["false_alarms"], found["missed"], found["symptom_for_cause"]) == (2, 1, 1, 1)
    assert {"label": "gpu_oom", "said": "none", "count": 1} in found["confusions"]


def test_what_is_sure_and_always_right_is_calibrated() -> None:
    cases = [case(number, "gpu_oom") for number in range(4)]
    sure = [Guess(("gpu_oom",), 1.0)] * 4
    boastful = [Guess(("none",), 1.0)] * 4

    assert diagnosis.calibration(cases, sure)["expected_error"] == 0.0
    assert diagnosis.calibration(cases, boastful)["expected_error"] == 1.0


def test_the_nearest_neighbour_is_never_the_case_itself() -> None:
    cases = [
        case(1, "gpu_oom", "memory of the card"),
        case(2, "disk_full", "memory of the card"),
        case(3, "none", "ok"),
    ]

    assert diagnosis.Nearest(cases)(cases[0]).classes[0] == "disk_full"


def test_baselines_read_the_last_exception_and_the_first_word() -> None:
    log = "WARNING: connection lost, tried again\n" + OOM

    assert diagnosis.last_traceback_line(case(1, "gpu_oom", log)).classes == ("gpu_oom",)
    assert diagnosis.first_keyword(case(1, "gpu_oom", log)).classes == ("dns_or_connect",)


def test_the_command_scores_a_corpus(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "label": "gpu_oom", "log": OOM, "note": "other fields are left alone"},
        {"id": "b", "label": "none", "log": "step 1 loss 2.0\nstep 2 loss 1.9\n"},
        {"id": "c", "label": "gpu_oom", "files": {"rank0.log": "step 1 loss 2.0\n", "rank1.log": OOM}},
    ]
    (tmp_path / "cases.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))

    result = CliRunner().invoke(group, ["diagnosis", str(tmp_path), "--json"])

    found = msgspec.json.decode(result.stdout)
    assert found["cases"] == 3
    assert found["scores"]["unbroken"]["top_1"] == 1.0
    assert set(found["scores"]) == {"unbroken", "last traceback line", "first keyword", "nearest neighbour"}
    assert CliRunner().invoke(group, ["diagnosis", str(tmp_path)]).exit_code == 0


@pytest.mark.parametrize("line", ['{"id": "a"}', "no json", '{"id": "a", "label": "bad_luck"}'])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "cases.jsonl").write_text("\n" + line)

    with pytest.raises(diagnosis.WrongCorpus, match=r"cases\.jsonl, line 2"):
        diagnosis.load(tmp_path / "cases.jsonl")


def test_a_corpus_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(diagnosis.WrongCorpus, match="No such file"):
        diagnosis.load(tmp_path / "none.jsonl")


def test_a_row_that_a_case_wants_shows_when_it_is_left_out(tmp_path: Path) -> None:
    went_on = "\n".join(
        ["RuntimeError: CUDA error: unspecified launch failure", *(f"step {n} loss 2" for n in range(40))]
    )
    labelled = [case(1, "none", went_on), case(2, "gpu_oom", OOM)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b"\n".join(map(msgspec.json.encode, labelled)))

    rows = {row["name"]: row for row in diagnosis.without_each(corpus)}

    assert list(rows["trained_on"]["lost"]) == ["c1"]
    assert rows["elsewhere"]["changed"] == 0


def test_other_weights_are_read_and_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(msgspec.json.encode(case(1, "gpu_oom", OOM)))
    (tmp_path / "weights.toml").write_text("[factor]\n")

    for options in (["--weights", str(tmp_path / "weights.toml")], ["--without", "no_such_row"]):
        refused = CliRunner().invoke(group, ["diagnosis", str(tmp_path), *options], standalone_mode=False)
        assert refused.return_value == 2
