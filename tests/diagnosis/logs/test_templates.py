from __future__ import annotations

from diagnosis.logs import digest
from diagnosis.logs.digest import Template, TemplateBook


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
    assert any(one.text == digest.OTHERS for one in found)


def test_any_bytes_are_taken() -> None:
    book = TemplateBook()
    book.feed("log", b"\xff\xfe\x00\x1b[31m\n" + b"z" * 1_000_000 + b"\n\r\n", 1)

    assert all(len(one.text) <= digest.MAX_BYTES for one in book.templates())
