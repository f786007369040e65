from __future__ import annotations

import pytest

from recovery.schedulers import Room, leave_out, nodes_of

LISTING = """\
n1|mixed|gpu:h100:8(S:0-1)
n2|allocated|gpu:h100:8(S:0)
n3|down*|gpu:h100:8
n4|drained|gpu:h100:8
n5|idle|gpu:h100:8
n6|idle~|gpu:h100:8
n7|idle$|gpu:h100:8
cpu1|idle|(null)
n1|mixed|gpu:h100:8(S:0-1)

"""


def room(needs: int, demanded: tuple[str, ...] = (), down: tuple[str, ...] = ()) -> Room:
    nodes = {f"n{i}": f"n{i}" not in down for i in range(1, 6)}
    return Room("partition main", needs, nodes, frozenset(demanded))


def test_nodes_that_are_alike_and_which_of_them_are_in_service() -> None:
    assert nodes_of(LISTING, ["n1", "gone"], ["n5"]) == {
        "n1": True, "n2": True, "n3": False, "n4": False, "n6": True, "n7": False,
    }  # fmt: skip
    assert "cpu1" in nodes_of(LISTING, ["gone"], []), "nothing is known of what it needs"
    assert nodes_of("", ["n1"], []) == {}


@pytest.mark.parametrize(
    ("needs", "bad", "lost", "down", "left_out", "kept"),
    [
        (3, ["n1"], ["n2"], (), ("n1", "n2"), ()),
        (4, ["n1"], ["n2"], (), ("n1",), ("n2",)),  # too few beside both
        (3, ["n1"], ["n2"], ("n5",), ("n1",), ("n2",)),  # the other that there is does not run now
        (5, [], ["n2"], ("n2",), (), ("n2",)),
        (4, ["n1"], ["n1"], (), ("n1",), ()),  # bad is bad
        (1, [], [], (), (), ()),
    ],
)
def test_what_is_left_out(
    needs: int, bad: list[str], lost: list[str], down: tuple[str, ...], left_out: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    choice = leave_out(room(needs, down=down), bad, lost)
    assert (choice.nodes, choice.kept, choice.why_not) == (left_out, kept, "")


def test_what_is_bad_and_needed_is_the_end_of_it() -> None:
    assert leave_out(room(5), ["n1"], ["n2"]).why_not == "it needs 5 nodes, and partition main has 4 besides n1"
    assert leave_out(room(2, demanded=("n1", "n2")), ["n1"], []).why_not == "it was submitted for n1, by name"
    choice = leave_out(room(2, demanded=("n1", "n2")), [], ["n1"])
    assert (choice.nodes, choice.kept) == ((), ("n1",))
