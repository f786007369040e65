"""A digest of a log: lines by template, and what is shown of them."""

from __future__ import annotations

import msgspec
import pytest

from diagnosis.incident import Culprit, LogEvidence, LoggedTraceback, LogSummary, Verdict
from diagnosis.logs import digest, templates
from diagnosis.logs.compare import good_run
from diagnosis.logs.templates import Template, TemplateBook
from diagnosis.rules import RuleMatch
from diagnosis.signals import Evidence, Frame
from diagnosis.taxonomy import FailureClass
from diagnosis.tracebacks import Traceback

VERDICT = Verdict(
    failure_class=FailureClass.GPU_OOM,
    culprits=(Culprit(node="n1", rank=3),),
    confidence=0.9,
    why="rank 3 ran out of GPU memory",
    action="stop",
    evidence=(Evidence(text="CUDA out of memory", source="rank3.log", line=8, rank=3),),
)


def log(rank: int, *lines: str, step: int | None = None) -> LogSummary:
    return LogSummary(source=f"rank{rank}.log", rank=rank, lines=len(lines), tail=lines, step=step)


def timeout(rank: int) -> RuleMatch:
    return RuleMatch(
        rule="watchdog",
        role="symptom",
        failure_class=FailureClass.NCCL_TIMEOUT,
        confidence=0.7,
        severity="error",
        scope="rank",
        text="Watchdog caught collective operation timeout",
        line=9,
        rank=rank,
        at=600.0,
    )


def failed_case() -> LogEvidence:
    oom = LoggedTraceback(
        traceback=Traceback(
            exception="torch.OutOfMemoryError",
            message="CUDA out of memory",
            frames=(
                Frame(function="main", file="train.py", line=3),
                Frame(function="forward", file="model.py", line=7),
            ),
        ),
        line=4,
        rank=3,
        at=10.0,
    )
    peers = [msgspec.structs.replace(log(rank, "step 10", step=10), matches=(timeout(rank),)) for rank in range(3)]
    culprit = msgspec.structs.replace(log(3, "step 9", "torch.OutOfMemoryError", step=9), tracebacks=(oom,))
    return LogEvidence(logs=(*peers, culprit))


def test_the_verdict_comes_first_then_what_the_culprit_said() -> None:
    lines = digest.render(digest.build(failed_case(), VERDICT), 10_000).splitlines()

    assert lines[1].startswith("gpu_oom (90%): rank 3 ran out of GPU memory")
    cause = next(n for n, line in enumerate(lines) if "torch.OutOfMemoryError: CUDA out of memory" in line)
    assert lines[cause + 1].strip() == "forward (model.py:7)"
    assert cause < next(n for n, line in enumerate(lines) if "Watchdog" in line)
    assert sum("Watchdog" in line for line in lines) == 1
    assert any(line.endswith("timeout (also rank 1-2)") for line in lines)
    assert "rank 3 ended at step 9, most at step 10" in lines


@pytest.mark.parametrize("limit", [0, 1, 10, 100, 1000, 4096])
def test_the_budget_is_kept_and_every_prefix_is_the_beginning_of_the_whole(limit: int) -> None:
    verdict = msgspec.structs.replace(VERDICT, why="Grüße " * 30)
    whole = digest.render(digest.build(failed_case(), verdict), 100_000)

    part = digest.render(digest.build(failed_case(), verdict), limit)

    assert len(part.encode()) <= limit
    assert whole.startswith(part.rstrip("\n"))


def test_what_only_one_rank_says_is_odd() -> None:
    book = TemplateBook()
    for rank in range(16):
        lines = [f"step {step} loss 2.{step}" for step in range(50)]
        if rank == 5:
            lines.insert(20, "retrying read of shard 17")
        book.feed(f"rank{rank}.log", "\n".join(lines).encode(), 1, rank)

    found = digest.build(LogEvidence(), VERDICT, book)

    (odd,) = (section for section in found.sections if section.title == "odd ranks")
    assert odd.lines == ("only rank 5: retrying read of shard 17",)


def test_what_the_healthy_attempt_did_not_say_is_new() -> None:
    healthy, failed = TemplateBook(), TemplateBook()
    healthy.feed("log", b"step 1 loss 2\nwarning: slow disk 3", 1)
    failed.feed("log", b"step 1 loss 2\nwarning: slow disk 4\nlink 7 retrained", 1)

    good = good_run("good", (), healthy.templates(), until_progress=False)
    found = digest.build(LogEvidence(), VERDICT, failed, [good])

    (new,) = (section for section in found.sections if section.title.startswith("new since"))
    assert new.lines == ("log:3 link 7 retrained",)


def test_what_began_at_the_end_comes_before_what_was_always_said() -> None:
    book = TemplateBook()
    lines = [f"step {step}" for step in range(1000)]
    lines.insert(980, "allocator is flushing")
    book.feed("log", "\n".join(lines).encode(), 1)

    text = digest.render(digest.build(LogEvidence(), VERDICT, book), 10_000)

    assert text.index("allocator is flushing") < text.index("== everything else")


def test_secrets_and_escapes_never_leave() -> None:
    lines = (
        "\x1b[31mHF_TOKEN=hf_abcdefghijklmnopqrstuv",
        "-----BEGIN RSA PRIVATE KEY-----",
        "MIIEpAIBAAK",
        "-----END RSA PRIVATE KEY-----",
        "after",
    )
    case = LogEvidence(logs=(log(0, *lines),))

    text = digest.render(digest.build(case, VERDICT), 10_000)

    assert "hf_abc" not in text
    assert "MIIEpAIBAAK" not in text
    assert "\x1b" not in text
    assert "after" in text


def test_the_same_input_gives_the_same_digest() -> None:
    assert digest.build(failed_case(), VERDICT) == digest.build(failed_case(), VERDICT)


def read(*lines: str, rank: int | None = None, source: str = "log") -> list[Template]:
    book = TemplateBook()
    book.feed(source, "\n".join(lines).encode(), 1, rank)
    return book.templates()


def test_lines_that_differ_in_numbers_are_one() -> None:
    (one,) = read("step 1 loss 2.345", "step 20 loss 0.1e-05", "step 300 loss -1.0")

    assert (one.text, one.count, one.first_line, one.last_line) == ("step # loss #", 3, 1, 3)
    assert one.sample == "step 1 loss 2.345"


def test_addresses_and_times_are_no_difference() -> None:
    (one,) = read(
        "2025-01-01 00:00:00 freed 0x7f00deadbeef of aaaaaaaa0", "2025-01-01 00:01:00 freed 0x7f00cafebabe of bbbbbbbb0"
    )

    assert one.text == "freed # of #"
    assert (one.first_at, one.last_at) == (1735689600.0, 1735689660.0)


def test_prefixes_tell_whose_line_it_is() -> None:
    by_text = {one.text: one for one in read("[rank0]: hello", "[rank1]: hello", "1: hello", "nobody says this")}

    assert by_text["hello"].ranks == {0: 1, 1: 2}
    assert by_text["nobody says this"].ranks == {}


def test_logs_of_several_ranks_are_joined() -> None:
    book = TemplateBook()
    book.feed("rank0.log", b"loaded 3 shards\nready", 1, 0)
    book.feed("rank1.log", b"loaded 4 shards", 1, 1)
    book.feed("rank0.log", b"loaded 5 shards", 3, 0)

    (loaded, ready) = book.templates()

    assert (loaded.ranks, loaded.count, loaded.source) == ({0: 2, 1: 1}, 3, "rank0.log")
    assert (loaded.first_line, loaded.last_line) == (1, 3)
    assert ready.ranks == {0: 1}


def test_a_log_whose_every_line_is_new_takes_bounded_memory() -> None:
    book = TemplateBook(max_shapes=100)
    for block in range(50):
        book.feed("log", "\n".join(f"a{'x' * block} {'y' * line}" for line in range(50)).encode(), 1 + 50 * block)

    found = book.templates()

    assert len(found) <= 101
    assert sum(one.count for one in found) == 2500
    assert any(one.text == templates.OTHERS.decode() for one in found)


def test_any_bytes_are_taken() -> None:
    book = TemplateBook()
    book.feed("log", b"\xff\xfe\x00\x1b[31m\n" + b"z" * 1_000_000 + b"\n\r\n", 1)

    assert all(len(one.text) <= templates.MAX_BYTES for one in book.templates())
