"""Whom the words of old logs blame: each phrase in own wordings, and the names of victims and speakers beside it."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest

from diagnosis.incident import Candidate, Culprit, LogSummary, Verdict
from diagnosis.signals import Evidence
from diagnosis.tables import load
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict.named import Phrase, phrases, with_named
from supervisor.cli import diagnose, render


def culprits(failure_class: str, *lines: str, known: tuple[Culprit, ...] = (), at: int = 1) -> tuple[Culprit, ...]:
    """Of a verdict of this class whose evidence is the first line, or line `at`."""
    line = Evidence(text=lines[at - 1], source="given.log", line=at)
    best = Candidate(failure_class=FailureClass(failure_class), confidence=0.9, why="", evidence=(line,))
    verdict = Verdict(
        failure_class=best.failure_class, culprits=known, confidence=0.9, why="", action="hold", evidence=(line,)
    )
    log = LogSummary(source="given.log", kind="output", lines=len(lines), size_bytes=1, tail=lines)
    found = with_named(verdict, best, [log])
    assert msgspec.structs.replace(found, culprits=()) == msgspec.structs.replace(verdict, culprits=())
    return found.culprits


ROWS = list(zip(load("diagnosis.verdict", "named.toml")["phrase"], phrases(), strict=True))


@pytest.mark.parametrize(("row", "phrase"), ROWS, ids=[f"{row['kind']}-{at}" for at, (row, _) in enumerate(ROWS)])
def test_a_phrase_names_what_its_samples_say(row: dict[str, Any], phrase: Phrase) -> None:
    assert [phrase.names(line) for line, _ in row["samples"]] == [[name] for _, name in row["samples"]]
    for line in row.get("others", ()):
        assert len(phrase.names(line)) != 1, line  # of two that one line names, one may be a victim


@pytest.mark.parametrize(
    ("failure_class", "lines", "ranks"),
    [
        ("worker_crash", ["the pod failed", "Container rank 5 status failed, code 7"], [5]),
        ("silent_hang", ["grad_17 [missing ranks: 2, 9]"], [2, 9]),
        ("collective_mismatch", ["Rank 4 is running collective: A, but Rank 7 is running collective: B"], [4, 7]),
        ("collective_mismatch", [f"rank {one} called all_reduce" for one in range(8)], []),
        ("worker_crash", ["local rank 3 died with exit code -9"], []),
        ("silent_hang", ["Missing ranks: 12 of 512 have not joined"], []),
        ("nccl_setup", ["Duplicate GPU detected : rank 6 and rank 2 both on CUDA device 41000"], [6, 2]),
        ("rendezvous_store", ["Timed out task names:", *(f"/job:w/replica:0/task:{n}" for n in (2, 5))], [2, 5]),
        # Nobody is to blame if nearly all are named; and a bug that all ranks have is no rank's.
        ("rendezvous_store", ["Timed out task names:", *(f"/job:w/replica:0/task:{n}" for n in range(1, 8))], []),
        ("script_error", ["Rank 2 failed at once"], []),
        ("none", ["Rank 2 failed at once"], []),
    ],
)
def test_a_rank_is_blamed_by_name(failure_class: str, lines: list[str], ranks: list[int]) -> None:
    assert [one.rank for one in culprits(failure_class, *lines)] == ranks


@pytest.mark.parametrize(
    ("failure_class", "lines", "expected"),
    [
        ("unknown", ["x", "The error from device(chipId:6, dieId:0)"], Culprit(kind="chip", name="6")),
        ("storage_error", ["nfs: server home3 not responding, timed out"], Culprit(kind="server", name="home3")),
        ("storage_error", ["nfs: server home3 not responding", "nfs: server home3 OK"], None),
        ("disk_full", ["kubelet, ip-9 Node gke-a2 status is now: NodeHasDiskPressure"], Culprit(node="gke-a2")),
        ("script_error", ["ModuleNotFoundError: No module named 'apex'"], Culprit(kind="module", name="apex")),
        (
            "preempted_or_cancelled",
            ["slurmstepd: error: *** STEP 71.0 ON n14 CANCELLED AT 2026-03-01T12:00:00 DUE TO TIME LIMIT ***"],
            Culprit(kind="job", name="71.0 on n14"),
        ),
        # The host that writes is to blame for its own devices only, and never for a peer that it misses.
        ("nvlink_error", ["Mar  1 12:00:00 gpu-17 nv-fabricmanager[31]: link training failed"], Culprit(node="gpu-17")),
        ("nccl_network", ["Mar  1 12:00:00 gpu-17 trainer[31]: peer is gone"], None),
        ("node_failure", ["knode-1 Ready 4d", "localhost   NotReady   <none>   41d"], None),
        ("dns_or_connect", ["ssh: connect to host localhost port 22: refused"], None),
    ],
)
def test_a_place_is_blamed_by_name(failure_class: str, lines: list[str], expected: Culprit | None) -> None:
    assert culprits(failure_class, *lines) == ((expected,) if expected is not None else ())


@pytest.mark.parametrize(
    ("lines", "gpu"),
    [
        (["GPU 00000000:1B:00.0", "    Clocks Event Reasons", "        HW Slowdown : Active"], "00000000:1B:00.0"),
        (
            ["GPU 6: NVIDIA H100 80GB", "the burn ended", "  what(): system not yet initialized"],
            "",
        ),  # a list, and its end
    ],
)
def test_a_report_is_on_what_its_first_line_names(lines: list[str], gpu: str) -> None:
    found = culprits("gpu_thermal_power", *lines, at=len(lines))
    assert [one.gpu for one in found] == ([gpu] if gpu else [])


def test_who_reports_a_peer_is_no_culprit() -> None:
    lines = ("waiting for remainder of ranks", "[1,3]<stderr>:Missing ranks:", "[1,3]<stderr>:2: [allreduce.g1 ...]")
    assert culprits("silent_hang", *lines, known=(Culprit(rank=3),)) == (Culprit(rank=2),)
    line = "b01:9:9 [0] NCCL WARN NET/IB : Got completion from peer 10.0.5.6<5555> with status=12 opcode=0 len=0"
    both = (Culprit(node="b01"), Culprit(node="10.0.5.6"))
    assert culprits("nccl_network", line, known=both[:1]) == both  # a link has two ends


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
    assert found.name
    assert "hunter22" not in found.name
