"""Whom the words of old logs blame: each phrase in own wordings, and the names of victims and speakers beside it."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest

from diagnosis.incident import Candidate, Culprit, LogSummary, Verdict
from diagnosis.signals import Evidence
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict.named import with_named
from supervisor.cli import diagnose, render


def culprits(failure_class: str, *lines: str, known: tuple[Culprit, ...] = ()) -> tuple[Culprit, ...]:
    """Of a verdict of this class whose evidence is the first line."""
    line = Evidence(text=lines[0], source="given.log", line=1)
    best = Candidate(failure_class=FailureClass(failure_class), confidence=0.9, why="", evidence=(line,))
    verdict = Verdict(
        failure_class=best.failure_class, culprits=known, confidence=0.9, why="", action="hold", evidence=(line,)
    )
    log = LogSummary(source="given.log", kind="output", lines=len(lines), size_bytes=1, tail=lines)
    found = with_named(verdict, best, [log])
    assert msgspec.structs.replace(found, culprits=()) == msgspec.structs.replace(verdict, culprits=())
    return found.culprits


@pytest.mark.parametrize(
    ("failure_class", "lines", "ranks"),
    [
        ("worker_crash", ["the pod failed", "Container rank 5 status failed, code 7"], [5]),
        ("worker_crash", ["launcher: Rank 12 died with exit code 3"], [12]),
        ("worker_crash", ["trainers with rank=[3, 6] were aborted"], [3, 6]),
        ("silent_hang", ["grad_17 [missing ranks: 2, 9]"], [2, 9]),
        ("nccl_timeout", ["Ranks 4, 5 failed to pass the barrier in 30000 ms"], [4, 5]),
        ("nccl_setup", ["Duplicate GPU detected : rank 6 and rank 2 both on CUDA device 41000"], [6, 2]),
        ("collective_mismatch", ["check your collective calls at and around rank 11."], [11]),
        # Who waits, who follows, who ended well, and who was asked to end.
        ("worker_crash", ["Rank 2 failed to connect to its peer"], []),
        ("worker_crash", ["Rank 2 failed because a peer is gone"], []),
        ("worker_crash", ["Rank 2 exited with code 0"], []),
        ("worker_crash", ["Rank 2 was killed by SIGTERM"], []),
        ("worker_crash", ["[rank2]: the launcher gives up"], []),
        ("script_error", ["Rank 2 failed at once"], []),
        ("none", ["Rank 2 failed at once"], []),
    ],
)
def test_a_rank_is_blamed_by_name(failure_class: str, lines: list[str], ranks: list[int]) -> None:
    assert [one.rank for one in culprits(failure_class, *lines)] == ranks


@pytest.mark.parametrize(
    ("failure_class", "lines", "expected"),
    [
        ("cuda_illegal_access", ["Memory access fault by GPU node-4 on address 0x7f00"], Culprit(gpu="node-4")),
        ("gpu_oom", ["OutOfMemoryError: GPU 3 has a total capacity of 79 GiB"], Culprit(gpu="3")),
        ("gpu_oom", ["the peak of GPU 3 was 79 GiB"], None),
        ("unknown", ["x", "The error from device(chipId:6, dieId:0)"], Culprit(kind="chip", name="6")),
        ("unknown", ["found device(chipId:6, dieId:0)"], None),
        (
            "cpu_or_memory_hw",
            ["EDAC MC0: CPU 4: Machine Check Event", "EDAC MC0: 1 CE read error on CPU_SrcID#0_DIMM#1 (slot:1)"],
            Culprit(kind="dimm", name="CPU_SrcID#0_DIMM#1"),
        ),
        ("cpu_or_memory_hw", ["CPU 4: Machine Check: 0 Bank 5"], Culprit(kind="cpu", name="4")),
        ("cpu_or_memory_hw", ["CPU supports 32 MCE banks"], None),
        ("kernel_fault", ["BUG: soft lockup - CPU#31 stuck for 22s! [python:7]"], Culprit(kind="cpu", name="31")),
        ("storage_error", ["nfs: server home3 not responding, timed out"], Culprit(kind="server", name="home3")),
        (
            "storage_error",
            ["operation ost_write to node 10.0.7.1@tcp failed: rc = -5"],
            Culprit(kind="server", name="10.0.7.1@tcp"),
        ),
        (
            "storage_error",
            ["blk_update_request: I/O error, dev nvme2n1, sector 88"],
            Culprit(kind="disk", name="nvme2n1"),
        ),
        (
            "disk_full",
            ["OSError: [Errno 28] No space left on device: '/scratch/run/a.pt'"],
            Culprit(kind="file", name="/scratch/run/a.pt"),
        ),
        (
            "config_or_argument_error",
            ["python3: can't open file 'pre.py': [Errno 2]"],
            Culprit(kind="file", name="pre.py"),
        ),
        ("config_or_argument_error", ['  File "/opt/lib/config.py", line 3, in load'], None),
        ("worker_crash", ["Pod: ml.bert-worker-3 exited with code 139"], Culprit(kind="pod", name="bert-worker-3")),
        ("worker_crash", ["Pod: ml.bert-worker-3 exited with code 0"], None),
        (
            "disk_full",
            ["Normal x 4m kubelet, ip-9 Node gke-a2 status is now: NodeHasDiskPressure"],
            Culprit(node="gke-a2"),
        ),
        (
            "preempted_or_cancelled",
            ["slurmstepd: error: *** STEP 71.0 ON n14 CANCELLED AT 2026-03-01T12:00:00 DUE TO TIME LIMIT ***"],
            Culprit(kind="job", name="71.0 on n14"),
        ),
        ("preempted_or_cancelled", ["slurmstepd: error: *** JOB 71 ON n14 CANCELLED AT 2026-03-01T12:00:00 ***"], None),
        # The host that writes is to blame for its own devices only, and never for a peer that it misses.
        ("nvlink_error", ["Mar  1 12:00:00 gpu-17 nv-fabricmanager[31]: link training failed"], Culprit(node="gpu-17")),
        ("nccl_network", ["Mar  1 12:00:00 gpu-17 trainer[31]: peer is gone"], None),
        ("gpu_hang", ["Mar  1 12:00:00 kernel: amdgpu: GPU reset begin"], None),
        # One line that names two: one of them may be a victim.
        ("gpu_oom", ["no access for cuda:0 from the context for cuda:1"], None),
    ],
)
def test_a_place_is_blamed_by_name(failure_class: str, lines: list[str], expected: Culprit | None) -> None:
    assert culprits(failure_class, *lines) == ((expected,) if expected is not None else ())


def test_who_is_known_stays_and_the_file_is_added() -> None:
    known = Culprit(rank=3, node="n1")
    line = "OSError: cannot identify image file '/data/cats/7.jpg'"
    assert culprits("data_loading_error", line, known=(known,)) == (
        Culprit(rank=3, node="n1", kind="file", name="/data/cats/7.jpg"),
    )
    assert culprits("worker_crash", "Rank 9 crashed", known=(known,)) == (known,)
    both = (known, Culprit(rank=4))
    assert culprits("data_loading_error", line, known=both) == both


def test_all_nodes_that_were_drained_for_the_same_reason_are_named() -> None:
    rows = [f"cloud_node_fail  slurm  2026-03-01T12:0{n}:00 c{n}" for n in range(3)]
    rows.append("new disk  root  2026-03-01T12:00:00 c7")
    found = culprits("node_failure", *rows, known=(Culprit(node="c0"),))
    assert [one.node for one in found] == ["c0", "c1", "c2"]


def test_a_name_far_from_the_evidence_blames_nobody() -> None:
    assert culprits("worker_crash", "a worker failed", *["."] * 20, "Rank 1 crashed") == ()


def verdict_of(log: str) -> dict[str, Any]:
    found: dict[str, Any] = diagnose.answer([diagnose.read(io.BytesIO(log.encode()), "given.log")])["verdict"]
    return found


def test_the_answer_says_what_kind_of_thing_it_names_and_the_action_stays() -> None:
    verdict = verdict_of("[  12.0] EDAC MC1: 1 UE memory read error on CPU_SrcID#1_DIMM#0 (channel:0 slot:0)\n")
    assert verdict["culprits"] == [{"rank": None, "kind": "dimm", "name": "CPU_SrcID#1_DIMM#0"}]
    assert verdict["action"] == "hold"  # no node is known that could be left out
    assert render.culprits_text(verdict) == "dimm CPU_SrcID#1_DIMM#0"


def test_a_secret_in_a_name_is_hidden() -> None:
    (found,) = culprits("config_or_argument_error", "can't open file 'https://me:hunter22@h/x.json'")
    assert "hunter22" not in found.name
