"""A failed run beside good ones."""

from __future__ import annotations

import pytest

from diagnosis.incident import LogEvidence, of_logs
from diagnosis.logs import compare
from diagnosis.logs.reader import LogReader, place
from diagnosis.logs.templates import TemplateBook
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict.triage import conclude

RETRY = "NCCL WARN NET/IB : Got completion from peer 10.0.0.{n}<4242> with status=12 opcode=0 len=0 vendor err 129"
CAUGHT = """Traceback (most recent call last):
  File "/app/metrics.py", line 12, in push
    self.gateway.send(sample)
KeyError: 'gateway'"""


def steps(first: int, last: int, took_s: float = 0.2) -> list[str]:
    """A trainer's lines, with a checkpoint every 20 steps."""
    lines = []
    for step in range(first, last):
        lines.append(f"step {step} loss {3 - step / 500:.3f} step_time {took_s + step % 7 / 1000:.3f}s")
        lines += [f"wrote checkpoint of step {step}"] if step % 20 == 19 else []
    return lines


def read(files: dict[str, list[str]]):
    logs, book = [], TemplateBook()
    for name, lines in files.items():
        log = LogReader(name, place=place(name))
        text = "\n".join(lines).encode()
        book.feed(name, text, 1, place(name).rank)
        log.feed(text)
        log.end()
        logs.append(log.summary())
    return logs, book.templates()


def good(lines: list[str] | dict[str, list[str]], name: str = "good", *, failed: bool = False) -> compare.GoodRun:
    return compare.good_run(
        name, *read(lines if isinstance(lines, dict) else {"good.log": lines}), until_progress=failed
    )


def compared(lines: list[str] | dict[str, list[str]], *runs: compare.GoodRun):
    """The comparison, the verdict without it and the verdict with it."""
    logs, templates = read(lines if isinstance(lines, dict) else {"bad.log": lines})
    found, told = compare.compare(logs, templates, runs)
    without = conclude(of_logs(LogEvidence(logs=tuple(logs))))
    return found, without, conclude(of_logs(LogEvidence(logs=tuple(told), compared=found)))


START = ["building the model", "model has 7 layers"]
END = ["the work is done", "wrote the last weights"]


def test_new_lines_before_the_failure_come_first() -> None:
    bad = [*START, "profile b is used", *steps(0, 50), "shard 17 came late", "queue 3 runs dry", *CAUGHT.splitlines()]
    found, _, _ = compared(bad, good([*START, *steps(0, 90), *END]))
    assert [one.text for one in found.new] == [
        "queue 3 runs dry",
        "shard 17 came late",
        "profile b is used",
    ]
    assert found.new_left_out == 1


def test_a_line_with_another_name_in_it_is_not_new() -> None:
    run = good([*START, "run calm-wood-4 of project llama begins", *steps(0, 90), *END])
    found, _, _ = compared([*START, "run red-sea-77 of project llama begins", *steps(0, 40)], run)
    assert found.new == ()


@pytest.mark.parametrize("word", ["failed", "is unhealthy"])
def test_a_line_that_sounds_of_trouble_is_always_new(word: str) -> None:
    run = good([*START, "link mlx5 of this node is up", *steps(0, 90), *END])
    line = f"link mlx5 of this node {word}"
    found, _, _ = compared([*START, line, *steps(0, 40)], run)
    assert [one.text for one in found.new] == [line]


def test_a_new_line_at_the_end_is_a_doubt_where_nothing_else_is_known() -> None:
    run = good([*START, *steps(0, 90), *END])
    found, without, verdict = compared([*START, *steps(0, 50), "shard 17 came late"], run)
    assert (without.failure_class, verdict.failure_class) == (FailureClass.NONE, FailureClass.UNKNOWN)
    assert found.at_end is not None
    assert verdict.evidence[0].line == found.at_end.line == 55
    assert verdict.confidence < 0.6


def test_runs_of_another_job_give_no_doubt() -> None:
    run = good([f"epoch {number} begins, {line}" for number, line in enumerate(START * 30)])
    _, _, verdict = compared([*START, *steps(0, 50), "shard 17 came late"], run)
    assert verdict.failure_class is FailureClass.NONE


def test_there_is_no_doubt_of_a_run_that_was_completed() -> None:
    run = good([*START, *steps(0, 90), *END])
    _, _, verdict = compared([*START, *steps(0, 90), "shard 17 came late", "Training completed."], run)
    assert verdict.failure_class is FailureClass.NONE


@pytest.mark.parametrize(("until", "doubts"), [(60, True), (20, False)])
def test_an_earlier_attempt_tells_what_is_new_only_as_far_as_it_came(until: int, doubts: bool) -> None:
    earlier = good([*START, *steps(0, until), "ValueError: port"], "attempt 1", failed=True)
    found, _, _ = compared([*START, *steps(0, 50), "evaluation begins"], earlier)
    assert (found.at_end is not None) is doubts


def test_what_an_attempt_said_after_its_last_step_is_not_good() -> None:
    bad = [*START, *steps(0, 50), *CAUGHT.splitlines()]
    earlier = good(bad, "attempt 1", failed=True)
    found, without, verdict = compared(bad, earlier)
    assert verdict.failure_class is without.failure_class is FailureClass.SCRIPT_ERROR
    assert found.known == ()


def test_a_complaint_of_good_runs_is_no_cause() -> None:
    noise = [RETRY.format(n=3)]
    run = good([*START, *noise, *START, *steps(0, 90), *END])
    found, without, verdict = compared([*START, *noise, *START, *START], run)
    assert without.failure_class not in (FailureClass.NONE, FailureClass.UNKNOWN)
    assert verdict.failure_class is FailureClass.UNKNOWN
    assert found.known


def test_a_caught_exception_of_good_runs_is_no_cause() -> None:
    noise = CAUGHT.splitlines()
    run = good([*START, *noise, *START, *steps(0, 90), *END])
    _, without, verdict = compared([*START, *noise, *START], run)
    assert without.failure_class is FailureClass.SCRIPT_ERROR
    assert verdict.failure_class is not FailureClass.SCRIPT_ERROR


@pytest.mark.parametrize(
    "bad",
    [
        [*START, RETRY.format(n=3)],  # nothing comes after it
        [*START, RETRY.format(n=3), "peer 3 is given up", *START, *START],  # something new comes after it
        [*START, *[RETRY.format(n=3)] * 50, *START, *START],  # far more often
    ],
    ids=["at the end", "before a new line", "far more often"],
)
def test_the_same_complaint_counts_where_the_run_does_not_go_on_as_good_ones_did(bad: list[str]) -> None:
    run = good([*START, RETRY.format(n=3), *START, *steps(0, 90), *END])
    _, without, verdict = compared(bad, run)
    assert verdict.failure_class is without.failure_class
    assert verdict.failure_class not in (FailureClass.NONE, FailureClass.UNKNOWN)


def test_numbers_that_tell_are_part_of_a_complaint() -> None:
    run = good([*START, "helper ended with exit code 1", *START, *steps(0, 90), *END])
    known = compare.KnownLines([run])
    assert known.of_text("helper ended with exit code 1") is not None
    assert known.of_text("helper ended with exit code 9") is None
    assert known.of_text("NVRM: Xid (PCI:0000:c1:00): 79, pid=4") is None


def test_what_good_runs_say_and_this_one_does_not() -> None:
    run = good([*START, "data of 9 shards is ready", *steps(0, 90), *END])
    found, _, _ = compared([*START, *steps(0, 50)], run)
    assert [(one.text, one.why) for one in found.missing] == [
        ("data of 9 shards is ready", "not said"),
        (END[0], "comes next in good runs"),
    ]


def test_a_line_that_came_regularly_and_came_no_more() -> None:
    bad = [*START, *steps(0, 200), *(line for line in steps(200, 500) if "checkpoint" not in line)]
    found, _, _ = compared(bad, good([*START, *steps(0, 500), *END]))
    assert "wrote checkpoint of step 199" not in [one.text for one in found.new]
    assert [one.line for one in found.missing if "then no more" in one.why] == [212]


def test_steps_that_take_longer() -> None:
    run = good([*START, *steps(0, 90), *END])
    assert len(compared([*START, *steps(0, 50, took_s=0.9)], run)[0].slower) == 1
    assert compared([*START, *steps(0, 50, took_s=0.25)], run)[0].slower == ()


@pytest.mark.parametrize("odd", [3, 6])
def test_the_rank_whose_log_differs(odd: int) -> None:
    def ranks(lines):
        return {f"rank{rank}.log": lines(rank) for rank in range(8)}

    run = good(ranks(lambda _: [*START, "joined the group", *steps(0, 90), *END]))
    speaks, _, _ = compared(
        ranks(lambda rank: [*START, "joined the group", *steps(0, 40), *(["ring 2 is rebuilt"] * (rank == odd))]), run
    )
    silent, _, _ = compared(ranks(lambda rank: [*START, *(["joined the group"] * (rank != odd)), *steps(0, 40)]), run)
    assert [(one.ranks, one.text) for one in speaks.odd] == [((odd,), "ring 2 is rebuilt")]
    assert [(one.ranks, one.text) for one in silent.odd] == [((odd,), "joined the group")]
