"""What root's programs believe of a request to drain a node."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from recovery.cordon import Drained, DrainRequest, may_be_asked, read_request, too_many

REASON = "unbroken: gpu_fallen_off_bus gpu=0000:c1:00 incident=77/i-1 Xid 79"
GOOD = {"job": "77", "node": "node2", "reason": REASON, "boot_id": "b", "at": 1000.0}


def read(**changes: Any) -> DrainRequest | str:
    data = msgspec.json.encode({"schema": 1, **GOOD, **changes})
    return read_request(data, job="77", node="node2", boot_id="b", now=1010.0)


def test_a_request_as_we_write_it_is_taken() -> None:
    assert read() == DrainRequest(job="77", node="node2", reason=REASON, boot_id="b", at=1000.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"job": "78"},
        {"node": "node3"},
        {"boot_id": "before"},
        {"at": 1010.0 - 8 * 86400.0},
        {"at": 2000.0},
        {"schema": 2},
        {"more": 1},
        {"at": "now"},
        {"reason": REASON.replace("77/i-1", "78/i-1")},
        {"reason": REASON + "\n"},
        {"reason": REASON + ' "'},
        {"reason": REASON + "\x1b[31m"},
        {"reason": REASON + "x" * 200},
        {"reason": REASON + "x" * 5000},
        {"reason": "unbroken: operator job=77 by=ann I do not like it"},
        {"reason": "unbroken: nonsense incident=77/i-1 why"},
        {"reason": "incident=77/i-1"},
        {"reason": ""},
    ],
)
def test_anything_else_is_not(changes: dict[str, Any]) -> None:
    assert isinstance(read(**changes), str)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 4000, b'{"schema":1}', b"null"])
def test_nor_what_is_no_request(data: bytes) -> None:
    assert isinstance(read_request(data, job="77", node="node2", boot_id="b", now=1.0), str)


def test_verdicts_are_asked_for_and_orders_are_not() -> None:
    assert may_be_asked(REASON, "77")
    assert not may_be_asked("unbroken: operator job=77 by=ann why", "77")


def test_so_many_nodes_within_an_hour_and_the_last_ones_step_back() -> None:
    now = 10_000.0
    two = [Drained("a", now - 10, "unbroken:"), Drained("b", now - 5, "unbroken:")]
    others = [Drained("x", now, "disk swap"), Drained("y", now - 4000, "unbroken:")]
    assert too_many([*others, two[0]], "c", 2, now) == 0
    assert too_many([*others, *two], "c", 2, now) == 2, "before it is drained"
    assert too_many([*others, *two], "b", 2, now) == 0, "it is one of them"
    both = [*two, Drained("c", now - 5, "unbroken:")]
    assert [too_many(both, node, 2, now) for node in "abc"] == [0, 0, 3], "at the same second, by name"
