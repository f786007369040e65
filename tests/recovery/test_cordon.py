import pytest

from diagnosis.taxonomy import FailureClass
from recovery.cordon import WINDOW_S, Cordon, Cordons, breaker_limit, drain_reason, is_drain_of


@pytest.mark.parametrize(("nodes", "limit"), [(1, 2), (8, 2), (20, 2), (30, 3), (4000, 400)])
def test_the_breaker_opens_at_two_nodes_or_a_tenth(nodes: int, limit: int) -> None:
    assert breaker_limit(nodes) == limit


def test_policy_may_take_so_many_within_the_hour_and_no_more() -> None:
    ledger = Cordons()
    assert ledger.allowed_together(["a", "b", "c"], 8, 0.0) == ("a", "b")
    ledger.add(Cordon(node="a", reason="x", at=0.0))
    ledger.add(Cordon(node="b", reason="x", at=10.0))
    assert ledger.allowed_together(["c", "a"], 8, 20.0) == ("a",), "a costs nothing again"
    assert ledger.allowed_together(["c"], 8, WINDOW_S + 5.0) == ("c",), "the first one is forgotten"


def test_a_lifted_cordon_still_counts_for_the_breaker() -> None:
    ledger = Cordons()
    for node in ("a", "b"):
        ledger.add(Cordon(node=node, reason="x", at=0.0))
        assert ledger.lift(node)
    assert not ledger.lift("a")
    assert ledger.allowed_together(["c"], 8, 1.0) == ()


def test_operators_win_and_are_not_limited() -> None:
    ledger = Cordons()
    for node in "abc":
        ledger.add(Cordon(node=node, reason="maintenance", by="ann", at=0.0))
    ledger.add(Cordon(node="a", reason="policy", at=1.0, until=2.0))
    assert ledger.of("a", 3.0).by == "ann"
    assert ledger.allowed_together(["x"], 8, 1.0) == ("x",)


def test_a_cordon_ends_by_itself_and_a_gpu_takes_its_node_along() -> None:
    ledger = Cordons()
    ledger.add(Cordon(node="a", gpu="0000:c1:00", reason="xid 63", at=0.0, until=10.0))
    assert ledger.of("a", 9.0) is not None
    assert ledger.of("a", 10.0) is None
    assert ledger.all(11.0) == ()


def test_an_operator_lets_the_breaker_start_anew() -> None:
    ledger = Cordons()
    for node in ("a", "b"):
        ledger.add(Cordon(node=node, reason="x", at=0.0))
    assert ledger.taken(1.0) == 2
    ledger.start_anew()
    assert ledger.taken(1.0) == 0
    assert ledger.allowed_together(["c"], 8, 1.0) == ("c",)
    assert ledger.of("a", 1.0) is not None, "the cordons themselves stand"


def test_what_an_operator_vouched_for_is_known_since_when() -> None:
    ledger = Cordons()
    ledger.vouch("a", 10.0)
    ledger.vouch("b", 20.0)
    assert ledger.vouched_since(15.0) == ("b",)
    ledger.vouch("a", 30.0)
    assert set(ledger.vouched_since(15.0)) == {"a", "b"}


def test_the_reason_of_a_drain_is_one_line_that_tells_everything_and_is_bounded() -> None:
    cordon = Cordon(
        node="n1",
        culprit_gpu="0000:c1:00",
        reason='Xid 79:\nReason="forged" \x1b[31m' + "x" * 1000,
        failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
        incident="i-3",
    )
    reason = drain_reason(cordon, "4711")
    assert reason.startswith("unbroken: gpu_fallen_off_bus gpu=0000:c1:00 incident=4711/i-3 Xid 79: Reason='forged'")
    assert len(reason) <= 200
    assert reason.isprintable()
    by_ann = Cordon(node="n1", reason="its fan", by="ann@login")
    assert drain_reason(by_ann, "llama") == "unbroken: operator job=llama by=ann@login its fan"


def test_only_the_drain_of_a_job_is_its_own() -> None:
    by_policy = drain_reason(Cordon(node="n1", gpu="3", reason="why", incident="i-3"), "77")
    by_ann = drain_reason(Cordon(node="n1", reason="why", by="ann@login"), "77")
    for reason in (by_policy, by_ann):
        assert is_drain_of(reason, "77")
        assert not any(is_drain_of(reason, other) for other in ("7", "777", "", "77/i-3", "why"))
    for reason in (
        "",
        "unbroken:",
        "disk swap job=77",
        "ticket 42: unbroken: operator job=77 why",
        "unbroken: gpu_fallen_off_bus 0000:c1:00 Xid 79 (kernel_log_xid)",
        "unbroken: operator job=8 by=ann job=77",
        "unbroken: operator job=8 by=ann as for job=77 incident=77/i-1",
        "unbroken: gpu_fallen_off_bus 0000:c1:00 job=77",
    ):
        assert not is_drain_of(reason, "77"), reason
