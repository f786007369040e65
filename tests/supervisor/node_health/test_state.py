"""Standings: what is told when, whose it is, and that nothing grows without bound."""

from __future__ import annotations

import msgspec
import pytest

from diagnosis.health import Check, CheckResult, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import Evidence, Finding, Signal
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import JobInfo
from supervisor.node_health.protocol import PollReport, TimedOut
from supervisor.node_health.state import (
    FINDINGS_A_MINUTE,
    STATES_KEPT,
    Change,
    CheckStates,
    rank_of_gpu,
    responded,
    responds,
    unkillable,
)

GPU, OTHER_GPU = "0000:c1:00", "0000:c2:00"


def check(name: str, **more: object) -> Check:
    return Check(
        id=name,
        what="w",
        source="s",
        threshold="t",
        failure_class=FailureClass.GPU_ECC_UNCORRECTABLE,
        scope="gpu",
        **more,  # type: ignore[arg-type]
    )


ECC, SLOW, EVER = check("ecc", calm_looks=2), check("slow", looks=3), check("ever", clears=False)


class Node:
    """Standings of one probe, with a clock."""

    def __init__(self, job: JobInfo | None = None, steps: dict[int, int] | None = None) -> None:
        self.check_states = CheckStates("n1", "boot-1", lambda: steps or {})
        self.check_states.learn({"p": (ECC, SLOW, EVER)})
        self.check_states.job = job or JobInfo()
        self.now = 1000.0

    def look(self, *results: CheckResult) -> list[Change]:
        self.now += 10.0
        return self.check_states.note(
            PollReport(probe="p", wall=self.now, mono=self.now - 900, took_s=0.0, results=results)
        )

    def status(self, name: str) -> dict[str, str]:
        return {s.result.device: s.status for s in self.check_states.all() if s.result.check == name}


def test_a_flaw_is_told_once_and_its_end_is_not_a_finding() -> None:
    node = Node()
    assert node.look(healthy("ecc", GPU)) == []
    (bad,) = node.look(unhealthy("ecc", "3 errors", GPU, gpu=GPU, gpu_uuid="GPU-1"))
    assert (bad.finding.rule, bad.finding.node, bad.finding.gpu, bad.finding.gpu_uuid) == ("ecc", "n1", GPU, "GPU-1")
    assert (bad.finding.at, bad.finding.mono, bad.finding.boot_id) == (1020.0, 120.0, "boot-1")
    assert node.look(unhealthy("ecc", "4 errors", GPU, gpu=GPU)) == []
    assert node.look(healthy("ecc", GPU)) == []
    (good,) = node.look(healthy("ecc", GPU))
    assert good.finding is None
    assert node.status("ecc") == {GPU: "healthy"}


def test_worse_is_told_again_and_better_is_not() -> None:
    node = Node()
    (warned,) = node.look(unhealthy("ecc", "a few", GPU, "warning"))
    (worse,) = node.look(unhealthy("ecc", "many", GPU, "critical"))
    assert (warned.finding.severity, worse.finding.severity) == ("warning", "error")
    node.look(unhealthy("ecc", "a few", GPU, "warning"))
    (better,) = node.look(unhealthy("ecc", "a few", GPU, "warning"))
    assert better.finding is None


def test_hysteresis_is_the_checks_own() -> None:
    node = Node()
    for _ in range(2):
        assert node.look(unhealthy("slow", "slow", GPU)) == []
    assert node.status("slow") == {GPU: "unknown"}
    assert len(node.look(unhealthy("slow", "slow", GPU))) == 1
    for _ in range(5):
        assert node.look(unknown("slow", "cannot see", GPU)) == []
    assert node.status("slow") == {GPU: "unhealthy"}
    node.look(healthy("slow", GPU))
    assert node.status("slow") == {GPU: "unhealthy"}, "one look that sees it well is not enough"
    node.look(healthy("slow", GPU))
    assert node.status("slow") == {GPU: "healthy"}


def test_gpus_that_are_asked_in_turns_are_not_forgotten_between() -> None:
    node = Node()
    (told,) = node.look(unhealthy("ecc", "bad", GPU, gpu=GPU), healthy("ever", GPU), healthy("ever", OTHER_GPU))
    assert told.finding is not None
    changes = node.check_states.changes
    for _ in range(5):
        assert node.look(healthy("ecc", OTHER_GPU), healthy("ever", GPU), healthy("ever", OTHER_GPU)) == []
    assert node.look(unhealthy("ecc", "bad", GPU, gpu=GPU)) == []
    assert node.status("ecc") == {GPU: "unhealthy", OTHER_GPU: "healthy"}
    assert node.check_states.changes == changes + 1


def test_what_is_no_longer_spoken_of_is_forgotten_unless_it_never_clears() -> None:
    node = Node()
    node.look(*(unhealthy(name, "bad", "pid 12") for name in ("ecc", "ever")), healthy("slow", "pid 12"))
    node.look(healthy("slow", "x"))  # the others were not looked at this time
    assert node.status("ecc") == {"pid 12": "unhealthy"}
    for _ in range(2):
        node.look(healthy("ecc"), healthy("ever"), healthy("slow"))
    assert node.status("ecc") == {"": "healthy"}
    assert node.status("ever") == {"": "healthy", "pid 12": "unhealthy"}


def test_what_never_clears_stands_though_it_does_not_apply_any_more() -> None:
    node = Node()
    node.look(*(unhealthy(name, "bad", GPU) for name in ("ecc", "ever")))
    node.look(*(not_applicable(name, "no driver", GPU) for name in ("ecc", "ever")))
    assert node.status("ecc") == {GPU: "not_applicable"}
    assert node.status("ever") == {GPU: "unhealthy"}


def test_a_silent_probe_leaves_nothing_well_and_nothing_bad_cleared() -> None:
    node = Node()
    node.look(healthy("ecc", GPU), unhealthy("ecc", "bad", OTHER_GPU))
    node.check_states.timed_out(TimedOut(probe="p", doing="nvmlX", since_s=60.0), node.now, node.now)
    assert node.status("ecc") == {GPU: "unknown", OTHER_GPU: "unhealthy"}
    reasons = [s.result.text for s in node.check_states.all() if s.status == "unknown"]
    assert reasons == ["no look has returned for 60 s (in nvmlX)"]


def test_a_storm_is_bounded() -> None:
    node = Node()
    told = [c for c in node.look(*(unhealthy("ecc", "bad", f"d{n}") for n in range(100_000))) if c.finding]
    assert len(told) == FINDINGS_A_MINUTE
    assert len(list(node.check_states.all())) == STATES_KEPT
    assert node.check_states.left_out == STATES_KEPT - FINDINGS_A_MINUTE
    node.look(*(healthy("ecc", f"d{n}") for n in range(10)))
    node.look(*(healthy("ecc", f"d{n}") for n in range(10)))
    node.now += 60.0
    (later,) = node.look(unhealthy("ecc", "bad again", "d0"))
    assert later.finding is not None


@pytest.mark.parametrize(
    ("result", "rank"),
    [
        (unhealthy("ecc", "by its process", GPU, gpu=GPU, pids=(7, 70)), 0),
        (unhealthy("ecc", "by its index", GPU, gpu=GPU), 1),
        (unhealthy("ecc", "no rank's process, no GPU", "eth0", pids=(7,)), None),
    ],
)
def test_a_flaw_has_the_rank_and_its_step(result: CheckResult, rank: int | None) -> None:
    job = JobInfo(ranks={70: 0, 71: 1}, gpus_of_ranks={0: "1,0:0", 1: "1,0:1"})
    node = Node(job, {0: 40, 1: 41})
    node.look(healthy("ecc", GPU, gpu=GPU), healthy("ecc", OTHER_GPU, gpu=OTHER_GPU))
    (change,) = node.look(result)
    assert (change.finding.rank, change.finding.step) == (rank, 41 if rank is None else 40 + rank)


def test_the_drivers_own_list_of_processes_wins_over_the_given_devices() -> None:
    node = Node(JobInfo(ranks={70: 0, 71: 1}, gpus_of_ranks={0: ":0", 1: ":1"}))
    node.look(healthy("slow", GPU, gpu=GPU, pids=(71,)), healthy("slow", OTHER_GPU, gpu=OTHER_GPU, pids=(70,)))
    (change,) = node.look(unhealthy("ecc", "bad", GPU, gpu=GPU))
    assert change.finding.rank == 1


def test_findings_of_the_kernel_log_get_the_gpus_uuid_and_rank() -> None:
    node = Node(JobInfo(ranks={70: 4}), {4: 9})
    node.look(healthy("ecc", GPU, gpu=GPU, gpu_uuid="GPU-1", pids=(70,)))
    line = Signal(source="kernel", text="NVRM: Xid (PCI:0000:c1:00): 79", at=1000.0, mono=5.0)
    xid = Finding(
        rule="xid",
        failure_class=FailureClass.GPU_FALLEN_OFF_BUS,
        confidence=0.9,
        scope="gpu",
        severity="fatal",
        evidence=Evidence(text=line.text),
        gpu=GPU,
    )
    placed = node.check_states.placed(xid, line, None)
    assert (placed.gpu_uuid, placed.rank, placed.step, placed.mono) == ("GPU-1", 4, 9, 5.0)
    elsewhere = node.check_states.placed(msgspec.structs.replace(xid, gpu="0000:01:00"), line, None)
    assert (elsewhere.gpu_uuid, elsewhere.rank, elsewhere.step) == ("", None, 9)


@pytest.mark.parametrize(
    ("given", "rank"),
    [
        ({0: ":0", 1: ":1"}, 1),
        ({0: "1:0", 1: "0:0"}, 0),
        ({0: "GPU-aa,GPU-bb:0", 1: "GPU-aa,GPU-bb:1"}, 1),
        ({0: "MIG-1:0"}, None),
        ({0: "0,1:7"}, None),
        ({0: ""}, None),
        ({0: "9:0"}, None),
        ({}, None),
    ],
)
def test_ranks_of_gpus(given: dict[int, str], rank: int | None) -> None:
    assert rank_of_gpu(OTHER_GPU, "GPU-bb-22", [GPU, OTHER_GPU], given) == rank


@pytest.mark.parametrize(
    ("state", "since_s", "level"),
    [("D", 50.0, "critical"), ("S", 50.0, "critical"), ("D", 20.0, "warning"), ("R", 500.0, "warning")],
)
def test_an_overdue_call_is_the_drivers_fault_only_when_it_waits_long(state: str, since_s: float, level: str) -> None:
    word = TimedOut(probe="nvml", doing="nvmlDeviceGetName 0", since_s=since_s, tid=3, state=state, wchan="rm_ioctl")
    result = responds("gpu", word)
    assert (result.status, result.level) == ("unhealthy", level)
    assert "nvmlDeviceGetName 0" in result.text
    assert "rm_ioctl" in result.text


def test_a_late_look_elsewhere_never_ends_a_diagnosis() -> None:
    result = responds("node", TimedOut(probe="storage", since_s=5000.0, state="D", wchan="nfs_wait"))
    assert (result.level, result.device) == ("warning", "storage")


def test_a_process_that_does_not_die_is_critical_and_names_what_it_waits_in() -> None:
    result = unkillable("gpu", 77, [("S", "futex"), ("D", "os_acquire_rwlock"), ("D", "")], 10.0)
    assert result.level == "critical"
    assert "77" in result.text
    assert "D in os_acquire_rwlock" in result.text
    assert "futex" not in result.text


@pytest.mark.parametrize(
    ("threads", "since_s", "level"),
    [
        ([("Z", ""), ("R", "")], 5.0, "warning"),
        ([("Z", ""), ("R", "")], 90.0, "critical"),
        ([("D", "__refrigerator")], 90.0, "warning"),
        ([("Z", ""), ("D", "")], 5.0, "critical"),
    ],
)
def test_who_only_wants_for_a_cpu_or_is_frozen_blames_no_driver(
    threads: list[tuple[str, str]], since_s: float, level: str
) -> None:
    assert unkillable("gpu", 77, threads, since_s).level == level


def test_a_look_that_came_back_says_that_the_worker_responds() -> None:
    report = PollReport(probe="p", wall=1.0, mono=1.0, took_s=0.5, results=(healthy("ecc"),))
    assert responded("node", report).device == "p"
    assert responded("gpu", report).status == "healthy"
    assert responded("gpu", PollReport(probe="p", wall=1.0, mono=1.0, took_s=0.5)).status == "not_applicable"
