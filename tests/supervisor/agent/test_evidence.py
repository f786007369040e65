"""Evidence of a node: what is in it, and that collecting it never holds up the agent."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diagnosis import rules
from diagnosis.signals import ExitRecord, RankOutput
from diagnosis.verdict import accounts
from supervisor.agent import evidence
from supervisor.agent.evidence import EvidenceCollector, RankEnd, is_ending, only_blame_peers, read_output
from supervisor.agent.ranks import RankMonitor, Stream
from supervisor.agent.state import AgentState
from supervisor.keeper_client import KeeperState, WorkerProcess


def collector(state: AgentState) -> EvidenceCollector:
    return EvidenceCollector(state, RankMonitor(state.paths, rules.default(), {}), list)


def test_a_disk_that_does_not_answer_costs_one_thread_however_often_ranks_crash(make_state, tmp_path, monkeypatch):
    free, asked = threading.Event(), []

    def hang(folders, _, node):
        asked.append((list(folders), node))
        free.wait()
        return []

    monkeypatch.setattr(evidence, "full_disks", hang)
    state = make_state()
    state.written_folders = (tmp_path,)

    async def story():
        one = collector(state)
        for _ in range(3):
            await one._look_at_disks()

    threads = threading.active_count()
    asyncio.run(story())
    assert asked == [([tmp_path, state.paths.folder], "n1")]
    assert threading.active_count() <= threads + 1
    free.set()


def test_evidence_is_for_its_user_alone(make_state, tmp_path):
    async def story():
        one = collector(make_state())
        await one.collect_crash(1)
        while one._filing:
            await asyncio.gather(*one._filing)
        assert one.problem == ""

    asyncio.run(story())
    made = sorted((tmp_path / "job" / "attempts").rglob("*"))
    assert [path.name for path in made] == ["1", "n1", "evidence-0.json"]
    assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o700", "0o700", "0o600"]


def worker(rank: int, status: int | None, order: int | None = None) -> WorkerProcess:
    return WorkerProcess(attempt=2, rank=rank, local_rank=rank, pid=100 + rank, status=status, order=order)


def test_each_ended_rank_is_read_and_scanned_once_while_the_end_of_its_peer_is_awaited(make_state, monkeypatch):
    state = make_state()
    output: dict[str, list[Any]] = {}
    for rank, lines in ((0, [TERMINATE]), (1, RAISED)):
        path = state.paths.rank_file(2, rank, "err")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))
        output.setdefault("streams", []).append({"rank": rank, "local_rank": rank, "stream": "err", "path": str(path)})
    state.paths.streams(2).write_bytes(msgspec.json.encode(output["streams"]))
    scanned: list[int] = []
    of_rank = accounts.account_of_rank

    def recorded(node, record, output):
        scanned.append(record.rank)
        return of_rank(node, record, output)

    monkeypatch.setattr(accounts, "account_of_rank", recorded)

    async def story():
        state.keeper = KeeperState(workers=(worker(0, 6, 0), worker(1, None)))
        one = collector(state)
        collecting = asyncio.create_task(one.collect_crash(2))
        await asyncio.sleep(0.2)
        assert not collecting.done(), "rank 0 only blames its peer, which is ending"
        state.keeper = KeeperState(workers=(worker(0, 6, 0), worker(1, 256, 1)))
        await asyncio.wait_for(collecting, 60)

    asyncio.run(story())
    assert scanned == [0, 1]
    (found,) = state.evidence.values()
    assert [(one.rank, one.code, one.signal) for one in found.exits] == [(0, None, 6), (1, 1, None)]
    assert [one.traceback for one in found.outputs] == [(), RAISED]
    assert state.wakeup.is_set


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
def test_a_rank_that_gloo_aborted_blames_its_peer(lines, blames):
    record = ExitRecord(rank=0, local_rank=0, pid=10, code=None, signal=6, ended_at=100.0)
    output = RankOutput(rank=0, tail=lines)
    assert only_blame_peers([RankEnd(record, output, accounts.blames_peer(record, output))]) is blames
    assert not only_blame_peers([])


@pytest.mark.parametrize(
    ("tail", "ending"), [(RAISED, True), ((*RAISED, "[rank1]: exiting"), True), ((*RAISED, *["step 7"] * 9), False)]
)
def test_a_rank_whose_output_ends_in_a_traceback_is_about_to_end(tail, ending):
    assert is_ending(RankOutput(rank=1, tail=tail, traceback=RAISED)) is ending
    assert not is_ending(RankOutput(rank=1, tail=("step 7",)))
    over_a_peer = (
        *RAISED[:2],
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1",
    )
    assert not is_ending(RankOutput(rank=1, tail=over_a_peer, traceback=over_a_peer))


def test_a_message_of_a_megabyte_hides_no_traceback(make_state: Any, tmp_path: Path) -> None:
    stack = 'Traceback (most recent call last):\n  File "a.py", line 17, in <module>\n    raise RuntimeError(text)\n'
    path = tmp_path / "stderr.log"
    path.write_text(f"{'A' * 1_000_000}\n{stack}RuntimeError: too long {'B' * 1_000_000}\n")
    stream = Stream(rank=1, local_rank=1, stream="stderr", path=str(path))
    output = read_output(1, 1, [stream], make_state().paths)
    assert output.traceback[0].startswith("Traceback")
    assert output.traceback[-1].startswith("RuntimeError: too long")
    assert max(map(len, (*output.tail, *output.traceback))) < 5000
    assert is_ending(output)
