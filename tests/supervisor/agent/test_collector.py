"""What the collector does beside the loop must never hold it up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from diagnosis import rules
from diagnosis.signals import ExitRecord, NodeEvidence, RankOutput
from supervisor.agent import collector
from supervisor.agent.collector import Collector
from supervisor.agent.rankwatch import RankWatch
from supervisor.keeper_client import Keeper
from supervisor.messages import JobSpec
from supervisor.paths import LocalPaths, NodePlan


def test_a_disk_that_does_not_answer_costs_one_thread_however_often_ranks_crash(tmp_path, monkeypatch):
    free, asked = threading.Event(), []

    def hang(folders, _, node):
        asked.append((list(folders), node))
        free.wait()
        return []

    monkeypatch.setattr(collector, "full_disks", hang)

    async def story():
        plan = NodePlan(
            node="n1",
            job_dir=str(tmp_path),
            local_dir=str(tmp_path),
            spec=JobSpec(name="j"),
            launcher_argv=(),
            python="",
            cwd=str(tmp_path),
            front_pid=1,
            front_start_time=1,
        )
        paths = LocalPaths(tmp_path)
        keeper, ranks = Keeper(paths.keeper_socket, lambda: None), RankWatch(paths, rules.default(), {})
        one = Collector(plan, paths, ranks, keeper, lambda: None, written=lambda: [tmp_path])
        for _ in range(3):
            await one._look_at_disks()

    threads = threading.active_count()
    asyncio.run(story())
    assert asked == [([tmp_path, tmp_path], "n1")]
    assert threading.active_count() <= threads + 1
    free.set()


def test_evidence_is_for_its_user_alone(tmp_path):
    async def story():
        plan = NodePlan(
            node="n1",
            job_dir=str(tmp_path / "job"),
            local_dir=str(tmp_path),
            spec=JobSpec(name="j"),
            launcher_argv=(),
            python="",
            cwd=str(tmp_path),
            front_pid=1,
            front_start_time=1,
        )
        paths = LocalPaths(tmp_path)
        keeper, ranks = Keeper(paths.keeper_socket, lambda: None), RankWatch(paths, rules.default(), {})
        one = Collector(plan, paths, ranks, keeper, lambda: None)
        await one.crash(1)
        while one._filing:
            await asyncio.gather(*one._filing)
        assert one.problem == ""

    asyncio.run(story())
    made = sorted((tmp_path / "job" / "attempts").rglob("*"))
    assert [path.name for path in made] == ["1", "n1", "evidence-0.json"]
    assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o700", "0o700", "0o600"]


TERMINATE = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
RAISED = (
    "Traceback (most recent call last):",
    '  File "train.py", line 58, in act_out',
    "    raise IndexError",
    "IndexError: 5121",
)


@pytest.mark.parametrize(
    ("lines", "blames"),
    [((TERMINATE,), True), ((TERMINATE, "  what(): op.preamble.length <= op.nbytes. 8 vs 4"), True), ((), False)],
)
def test_a_rank_that_gloo_aborted_waits_for_its_peers_own_end(lines, blames):
    record = ExitRecord(rank=0, local_rank=0, pid=10, code=None, signal=6, ended_at=100.0)
    said = RankOutput(rank=0, tail=lines)
    evidence = NodeEvidence(node="n1", attempt=1, exits=(record,), outputs=(said,))
    assert collector.only_blames_peers(evidence) is blames


@pytest.mark.parametrize(
    ("tail", "ending"), [(RAISED, True), ((*RAISED, "[rank1]: exiting"), True), ((*RAISED, *["step 7"] * 9), False)]
)
def test_a_rank_whose_output_ends_in_a_traceback_is_about_to_end(tail, ending):
    assert collector.is_ending(RankOutput(rank=1, tail=tail, traceback=RAISED)) is ending
    assert not collector.is_ending(RankOutput(rank=1, tail=("step 7",)))
    over_a_peer = (
        *RAISED[:2],
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1",
    )
    assert not collector.is_ending(RankOutput(rank=1, tail=over_a_peer, traceback=over_a_peer))
