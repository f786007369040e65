from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from diagnosis.incident import Culprit, Verdict
from diagnosis.signals import Evidence
from diagnosis.taxonomy import TAXONOMY, FailureClass
from recovery.policy import BUDGET_SPENT, FREE_PREEMPTIONS, FULL_DISK_TRIES, NOT_WORTH_RETRYING, Situation, plan

EIGHT = Situation(incident="i-1", at=0.0, nodes=8, nodes_min=8, replacements=2, may_cordon=("n1", "n2"))


def verdict(failure_class: FailureClass, action: Any = "restart", sure: float = 0.9, node: str = "n1") -> Verdict:
    culprits = (Culprit(node=node, rank=3, gpu="0000:c1:00"),) if node else ()
    return Verdict(failure_class=failure_class, culprits=culprits, confidence=sure, why="because", action=action)


@pytest.mark.parametrize("failure_class", FailureClass)
@pytest.mark.parametrize(
    "action", ["none", "restart", "stop", "hold", "cordon_node_and_restart", "wait_and_retry", "requeue"]
)
def test_every_verdict_gets_a_plan_with_a_reason(failure_class: FailureClass, action: str) -> None:
    """A broken run is never left alone: it restarts, ends, or waits for a person."""
    found = plan(verdict(failure_class, action), EIGHT)
    assert found.why
    assert found.kind in ("restart", "stop", "hold", "succeed")
    assert (found.kind == "stop") == (found.exit_code is not None)
    spent = plan(verdict(failure_class, action), replace(EIGHT, delay_s=None, repeats=FREE_PREEMPTIONS))
    assert spent.kind != "restart", "the budget is spent"


@pytest.mark.parametrize("failure_class", [c for c in FailureClass if TAXONOMY[c].retry == "never"])
def test_what_a_restart_would_repeat_stops_at_once_or_at_the_second_time(failure_class: FailureClass) -> None:
    again = plan(verdict(failure_class, "stop"), replace(EIGHT, repeats=1))
    assert (again.kind, again.exit_code) == ("stop", NOT_WORTH_RETRYING)
    assert plan(verdict(failure_class, "restart"), replace(EIGHT, repeats=1)).kind == "stop"


def test_what_only_a_line_says_ends_the_job_the_second_time() -> None:
    denied = FailureClass.PERMISSION_OR_AUTH
    assert plan(verdict(denied, "stop"), EIGHT).kind == "stop"
    assert plan(verdict(denied, "restart"), EIGHT).kind == "restart"
    assert plan(verdict(denied, "restart"), replace(EIGHT, repeats=1)).exit_code == NOT_WORTH_RETRYING


@pytest.mark.parametrize("failure_class", [FailureClass.SCRIPT_ERROR, FailureClass.GPU_OOM])
@pytest.mark.parametrize("action", ["restart", "stop"])
def test_what_may_have_been_chance_gets_one_more_try(failure_class: FailureClass, action: str) -> None:
    found = verdict(failure_class, action)
    assert plan(found, EIGHT).kind == "restart"
    assert plan(found, replace(EIGHT, repeats=1)).exit_code == NOT_WORTH_RETRYING
    assert plan(found, replace(EIGHT, deterministic=True)).exit_code == NOT_WORTH_RETRYING


def test_the_same_point_twice_stops_unless_it_is_the_hardware() -> None:
    again = replace(EIGHT, deterministic=True)
    assert plan(verdict(FailureClass.WORKER_CRASH), again).exit_code == NOT_WORTH_RETRYING
    assert plan(verdict(FailureClass.NODE_FAILURE), again).kind == "restart"


def test_a_hang_that_restarts_did_not_help_waits_for_a_person_unless_a_surer_rule_holds() -> None:
    twice, hang = replace(EIGHT, did_not_help=2, broken=False), FailureClass.SILENT_HANG
    assert plan(verdict(hang), replace(twice, did_not_help=1)).kind == "restart"
    for situation in (twice, replace(twice, delay_s=None), replace(twice, mode="recommend")):
        left = plan(verdict(hang), situation)
        assert (left.kind, left.until, left.counts, left.needs_approval) == ("ignore", "progress", False, False)
    assert plan(verdict(FailureClass.COLLECTIVE_MISMATCH), replace(twice, repeats=1)).exit_code == NOT_WORTH_RETRYING
    without = plan(verdict(FailureClass.GPU_FALLEN_OFF_BUS, "cordon_node_and_restart"), twice)
    assert (without.kind, len(without.cordons)) == ("restart", 1)


def test_a_bad_node_is_left_out() -> None:
    found = plan(verdict(FailureClass.GPU_FALLEN_OFF_BUS, "cordon_node_and_restart"), EIGHT)
    assert found.kind == "restart"
    assert [(c.node, c.gpu, c.incident) for c in found.cordons] == [("n1", "", "i-1")]
    gpu = plan(verdict(FailureClass.GPU_ECC_UNCORRECTABLE, "cordon_gpu_and_restart"), EIGHT)
    assert [(c.node, c.gpu) for c in gpu.cordons] == [("n1", "0000:c1:00")]


def test_nobody_is_cordoned_on_a_guess_or_when_it_is_lost_anyway() -> None:
    assert plan(verdict(FailureClass.GPU_HANG, "cordon_node_and_restart", sure=0.3), EIGHT).cordons == ()
    lost = plan(verdict(FailureClass.NODE_FAILURE, "cordon_node_and_restart"), replace(EIGHT, lost=("n1",)))
    assert (lost.kind, lost.cordons) == ("restart", ())


def test_an_only_node_is_restarted_in_place_and_that_is_said() -> None:
    alone = Situation(incident="i-1", at=0.0, may_cordon=("n1",))
    found = plan(verdict(FailureClass.GPU_HANG, "cordon_node_and_restart"), alone)
    assert (found.kind, found.cordons) == ("restart", ())
    assert "no node can replace n1" in found.why


def test_the_open_breaker_asks_an_operator() -> None:
    found = plan(verdict(FailureClass.GPU_HANG, "cordon_node_and_restart"), replace(EIGHT, may_cordon=()))
    assert found.kind == "hold"


def test_a_link_is_blamed_the_second_time() -> None:
    bad_link = verdict(FailureClass.NCCL_NETWORK, "wait_and_retry")
    first = plan(bad_link, EIGHT)
    assert first.delay_s > 0
    assert first.cordons == ()
    assert len(plan(bad_link, replace(EIGHT, culprit_repeats=1)).cordons) == 1


def test_what_needs_time_waits_longer_each_time() -> None:
    waits = [
        plan(verdict(FailureClass.STORAGE_ERROR, "wait_and_retry"), replace(EIGHT, repeats=n)).delay_s for n in range(8)
    ]
    assert waits == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]


def test_a_full_disk_is_waited_for_longer_and_longer_and_never_charged() -> None:
    full = verdict(FailureClass.DISK_FULL)
    plans = [plan(full, replace(EIGHT, repeats=n)) for n in range(9)]
    assert {(one.kind, one.until, one.counts) for one in plans} == {("hold", "space", False)}
    assert [one.delay_s for one in plans] == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    assert plan(full, replace(EIGHT, repeats=FULL_DISK_TRIES)).until == ""


def test_a_quota_is_waited_for_as_a_full_disk_and_other_storage_is_not() -> None:
    for text, until in (
        ("OSError: [Errno 122] Disk quota exceeded: '/home/u/step10.pt'", "space"),
        ("OSError: [Errno 5] Input/output error: '/home/u/step10.pt'", ""),
    ):
        told = replace(verdict(FailureClass.STORAGE_ERROR, "wait_and_retry"), evidence=(Evidence(text=text),))
        assert plan(told, EIGHT).until == until


def test_the_end_that_hangs_is_a_success_only_if_the_work_may_be_done() -> None:
    hung = verdict(FailureClass.EXIT_HANG, "none")
    assert plan(hung, replace(EIGHT, broken=False, work_may_be_complete=True)).kind == "succeed"
    assert plan(hung, replace(EIGHT, broken=False)).kind == "restart"


def test_nothing_is_done_about_nothing_unless_the_run_is_broken() -> None:
    assert plan(verdict(FailureClass.NONE, "none"), replace(EIGHT, broken=False)).kind == "ignore"
    assert plan(verdict(FailureClass.NONE, "none"), EIGHT).kind == "restart"


@pytest.mark.parametrize(
    ("text", "loaded", "sure", "path"),
    [
        ("RuntimeError: PytorchStreamReader failed reading zip archive", "/c/step-300", 0.9, "/c/step-300"),
        ("EOFError: Ran out of input", "/c/step-300", 0.4, None),
        ("RuntimeError: PytorchStreamReader failed reading zip archive", "", 0.9, None),
        ("RuntimeError: Error(s) in loading state_dict for GPT:", "/c/step-300", 0.9, None),
    ],
)
def test_a_checkpoint_that_cannot_be_read_makes_way_and_one_that_does_not_fit_stays(
    text: str, loaded: str, sure: float, path: str | None
) -> None:
    said = verdict(FailureClass.CHECKPOINT_CORRUPT_OR_MISMATCH, "rollback_and_restart", sure, node="")
    said = replace(said, evidence=(Evidence(text=text),))
    found = plan(said, replace(EIGHT, loaded=loaded))
    assert found.kind == "restart"
    assert (found.rollback.path if found.rollback is not None else None) == path
    assert plan(said, replace(EIGHT, loaded=loaded, deterministic=True)).kind == "stop"


def test_a_spent_budget_stops_and_preemption_is_free() -> None:
    spent = replace(EIGHT, delay_s=None)
    assert plan(verdict(FailureClass.WORKER_CRASH), spent).exit_code == BUDGET_SPENT
    preempted = plan(verdict(FailureClass.PREEMPTED_OR_CANCELLED, "requeue"), spent)
    assert (preempted.kind, preempted.counts) == ("restart", False)


def test_recommend_asks_before_a_restart() -> None:
    assert plan(verdict(FailureClass.WORKER_CRASH), replace(EIGHT, mode="recommend")).needs_approval


def test_without_a_replacement_the_job_is_started_again_elsewhere_if_that_may_be() -> None:
    bad = verdict(FailureClass.GPU_FALLEN_OFF_BUS, "cordon_node_and_restart")
    alone = replace(EIGHT, replacements=0)
    in_place = plan(bad, alone)
    assert (in_place.kind, in_place.cordons) == ("restart", ())
    elsewhere = plan(bad, replace(alone, may_requeue=True))
    assert elsewhere.kind == "requeue"
    assert [cordon.node for cordon in elsewhere.cordons] == ["n1"]
    assert elsewhere.cordons[0].culprit_gpu == "0000:c1:00"
    assert plan(bad, replace(EIGHT, may_requeue=True)).kind == "restart", "there are replacements"
    lost = replace(alone, lost=("n1",), nodes=7, may_requeue=True)
    assert plan(verdict(FailureClass.NODE_FAILURE), lost).kind == "requeue"
    assert plan(verdict(FailureClass.WORKER_CRASH), lost).kind == "requeue", "whatever the verdict is, a node is gone"
    assert plan(bad, replace(alone, may_requeue=True, delay_s=None)).exit_code == BUDGET_SPENT
    assert plan(bad, replace(alone, may_requeue=True, mode="recommend")).needs_approval


def test_a_node_that_an_operator_vouches_for_is_kept() -> None:
    bad = verdict(FailureClass.GPU_FALLEN_OFF_BUS, "cordon_node_and_restart")
    found = plan(bad, replace(EIGHT, vouched=("n1",), may_cordon=()))
    assert (found.kind, found.cordons) == ("restart", ())
    assert "vouched" in found.why
