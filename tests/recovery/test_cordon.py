import pytest

from recovery.actions import Cordon
from recovery.cordon import WINDOW_S, CordonLedger, breaker_limit


@pytest.mark.parametrize(("nodes", "limit"), [(1, 2), (8, 2), (20, 2), (30, 3), (4000, 400)])
def test_the_breaker_opens_at_two_nodes_or_a_tenth(nodes: int, limit: int) -> None:
    assert breaker_limit(nodes) == limit


def test_policy_may_take_so_many_within_the_hour_and_no_more() -> None:
    ledger = CordonLedger()
    assert ledger.allowed_together(["a", "b", "c"], 8, 0.0) == ("a", "b")
    ledger.add(Cordon(node="a", reason="x", at=0.0))
    ledger.add(Cordon(node="b", reason="x", at=10.0))
    assert ledger.allowed_together(["c", "a"], 8, 20.0) == ("a",), "a costs nothing again"
    assert ledger.allowed_together(["c"], 8, WINDOW_S + 5.0) == ("c",), "the first one is forgotten"


def test_a_lifted_cordon_still_counts_for_the_breaker() -> None:
    ledger = CordonLedger()
    for node in ("a", "b"):
        ledger.add(Cordon(node=node, reason="x", at=0.0))
        assert ledger.lift(node)
    assert not ledger.lift("a")
    assert ledger.allowed_together(["c"], 8, 1.0) == ()


def test_operators_win_and_are_not_limited() -> None:
    ledger = CordonLedger()
    for node in "abc":
        ledger.add(Cordon(node=node, reason="maintenance", by="ann", at=0.0))
    ledger.add(Cordon(node="a", reason="policy", at=1.0, until=2.0))
    held = ledger.of("a", 3.0)
    assert held is not None
    assert held.by == "ann"
    assert ledger.allowed_together(["x"], 8, 1.0) == ("x",)


def test_a_cordon_ends_by_itself_and_a_gpu_takes_its_node_along() -> None:
    ledger = CordonLedger()
    ledger.add(Cordon(node="a", gpu="0000:c1:00", reason="xid 63", at=0.0, until=10.0))
    assert ledger.of("a", 9.0) is not None
    assert ledger.of("a", 10.0) is None
    assert ledger.all(11.0) == ()
