"""Our own logs: bounded lines, few repetitions, nothing of what strangers send."""

from __future__ import annotations

import logging

from supervisor.logs import BURST_OF_STRANGERS, WINDOW_S, BoundedFormatter, NoForeignText, RepeatLimit


def record(message: str, *args: object, name: str = "asyncio", at: float = 0.0) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.ERROR, "f", 1, message, args, None)
    made.created = at
    return made


def test_a_line_that_repeats_is_counted() -> None:
    limit = RepeatLimit()
    passed = [limit.filter(record("from %s", number)) for number in range(1000)]
    assert sum(passed) == BURST_OF_STRANGERS
    assert limit.filter(record("another"))
    later = record("from %s", 1, at=WINDOW_S)
    assert limit.filter(later)
    assert f"{1000 - BURST_OF_STRANGERS} more" in later.getMessage()
    ours = [limit.filter(record("agent %s", number, name="unbroken.controller")) for number in range(500)]
    assert all(ours), "as many agents as come at once"


def test_kinds_that_never_repeat_do_not_fill_the_memory() -> None:
    limit = RepeatLimit()
    for number in range(5000):
        limit.filter(record(f"kind {number}"))
    assert len(limit._seen) <= 1000


def test_a_request_that_cannot_be_read_is_not_copied() -> None:
    from aiohttp.http_exceptions import InvalidHeader

    made = record("Error handling request from %s", "10.0.0.9")
    try:
        raise InvalidHeader("Authorization: Bearer LEAK")
    except InvalidHeader as error:
        made.exc_info = (type(error), error, error.__traceback__)
    assert NoForeignText().filter(made)
    shown = BoundedFormatter("%(message)s").format(made)
    assert "LEAK" not in shown
    assert "InvalidHeader" in shown


def test_sentences_of_one_kind_are_counted_apart_from_others() -> None:
    limit = RepeatLimit()
    for _ in range(2000):
        joined = record("%s", "n1 joined", name="unbroken.controller")
        joined.repeat_kind = "node_joined"
        limit.filter(joined)
    lost = record("%s", "n1 is lost", name="unbroken.controller")
    lost.repeat_kind = "node_lost"
    assert limit.filter(lost)
