"""`unbroken diagnose` of whole folders: what files say together."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle

import msgspec
from click.testing import CliRunner

from diagnosis.logs.reader import Place
from diagnosis.signals import ExitRecord, Frame, NodeEvidence, RankOutput, RankStack
from supervisor import messages as m
from supervisor.cli.main import main
from supervisor.controller.journal import Entry, open_journal
from supervisor.diagnose import log_files
from supervisor.diagnose import read as diagnose_read
from supervisor.messages import encode

XID = "[ 12.5] NVRM: Xid (PCI:0000:C1:00): 79, pid=1234, name=python, GPU has fallen off the bus."

HEALTHY = "".join(f"step {step} loss {3 - step / 1000:.3f} grad_norm 0.9 lr 3e-4\n" for step in range(2000))


def test_the_log_folder_of_torchrun(answer, tmp_path, traceback):
    """Rank 2 fails, the others are ended: the error file and the log say the same."""
    for rank in range(4):
        folder = tmp_path / "none_abc" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(HEALTHY)
        (folder / "stderr.log").write_text(traceback() if rank == 2 else "")
    extra = {"py_callstack": traceback(), "timestamp": "1795292431"}
    (tmp_path / "none_abc/attempt_0/2/error.json").write_text(
        json.dumps({"message": {"message": "KeyError: 'x'", "extraInfo": extra}})
    )
    value = answer(tmp_path)
    assert value["verdict"]["failure_class"] == "script_error"
    assert value["verdict"]["culprits"] == [{"rank": 2}]
    assert value["files"] == 9


def test_our_own_job_folder(answer, tmp_path, traceback):
    evidence = NodeEvidence(
        node="node7",
        attempt=2,
        exits=(ExitRecord(rank=56, local_rank=0, pid=7, code=1, signal=None, ended_at=1795292431.0),),
        outputs=(RankOutput(rank=56, tail=("step 5 loss 2.0",), traceback=tuple(traceback().splitlines())),),
    )
    folder = tmp_path / "attempts" / "2" / "node7"
    folder.mkdir(parents=True)
    (folder / "evidence-0.json").write_bytes(msgspec.json.encode(evidence))
    (tmp_path / "token").write_text("secret")
    (tmp_path / "journal.1.jsonl").write_text('{"kind":"opened"}\n')
    value = answer(tmp_path)
    assert value["verdict"]["failure_class"] == "script_error"
    assert value["verdict"]["culprits"] == [{"node": "node7", "rank": 56}]
    record = {"seq": 9, "at": 1.0, "epoch": 1, "kind": "event", "crc32": 1}
    event = {"event": "evidence_arrived", "at": 1.0, "evidence": msgspec.to_builtins(evidence)}
    journal = tmp_path / "journal.2.jsonl"
    journal.write_text('{"kind":"opened"}\n' + json.dumps(record | {"body": event}) + "\n")
    assert answer(journal)["verdict"]["culprits"] == [{"node": "node7", "rank": 56}]


def test_in_processes_of_their_own_all_is_the_same(answer, tmp_path, monkeypatch, traceback, dump):
    for rank in range(5):
        (tmp_path / f"rank{rank}.log").write_text(HEALTHY + (traceback() if rank == 3 else ""))
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump(0, waits=True), protocol=2))
    alone = answer(tmp_path)
    monkeypatch.setattr(diagnose_read, "POOL_BYTES", 1)
    monkeypatch.setattr(diagnose_read, "AT_ONCE_BYTES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert answer(tmp_path) == alone
    assert alone["verdict"]["culprits"] == [{"rank": 3}]


def test_a_file_that_may_not_be_read_is_told(answer, tmp_path):
    (tmp_path / "a.log").write_text(f"{XID}\n")
    os.symlink("/proc/self/mem", tmp_path / "b.log")
    value = answer(tmp_path)
    assert value["verdict"]["failure_class"] == "gpu_fallen_off_bus"
    assert value["problems"] == [f"{tmp_path}/b.log: Input/output error"]
    named = CliRunner().invoke(main, ["diagnose", str(tmp_path / "b.log")])
    assert (named.exit_code, "Input/output error" in named.stderr) == (66, True)


def test_a_run_that_has_succeeded_has_no_failure(answer, tmp_path):
    """Its ranks once stood still for a moment, and stacks of that are in its folder."""
    frames = (Frame(function="all_reduce", file="torch/distributed/x.py", line=5),)
    evidence = NodeEvidence(node="a", attempt=1, stacks=tuple(RankStack(rank=rank, frames=frames) for rank in range(2)))
    folder = tmp_path / "attempts" / "1" / "a"
    folder.mkdir(parents=True)
    (folder / "evidence-1.json").write_bytes(msgspec.json.encode(evidence))
    begun = [m.ControllerStarted(at=1.0, epoch=1), m.JobDefined(at=1.0, spec=m.JobSpec(name="llama"))]
    write_journal(tmp_path, begun)
    assert answer(tmp_path)["verdict"]["failure_class"] != "none"
    ended = ExitRecord(rank=0, local_rank=0, pid=7, code=0, signal=None, ended_at=9.0)
    offer = m.StoreOffer(host="a", port=29400, local_world_size=1)
    events = [
        m.NodeJoined(at=2.0, node="a", host="a", address="10.0.0.1"),
        m.LauncherReady(at=3.0, node="a", attempt=1, offer=offer),
        m.WorkersStarted(at=4.0, node="a", attempt=1, ranks=(0,)),
        m.Progressed(at=5.0, attempt=1, step=1, first=True),
        m.RankEnded(at=9.0, node="a", attempt=1, exit=ended),
        m.LauncherEnded(at=9.5, node="a", attempt=1, how="exit code 0", code=0),
        m.NodeDone(at=9.6, node="a"),
    ]
    write_journal(tmp_path, events)
    value = answer(tmp_path)
    assert (value["verdict"]["failure_class"], value["verdict"]["action"]) == ("none", "none")
    assert (value["alternatives"], value["evidence"]) == ([], [])


def write_journal(folder, events):
    journal, _ = open_journal(folder)
    journal.write([Entry("event", event.at, encode(event)) for event in events])
    journal.close()


# ----- processes that read -----


LOG = b"".join(b"step: %d loss: 2.%d\n" % (n, n) for n in range(20_000))


def test_a_process_that_is_killed_takes_no_other_file_along(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnose_read, "POOL_BYTES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    for number in range(12):
        (tmp_path / f"rank{number}.log").write_bytes(LOG)
    found = log_files.find([str(tmp_path)]).sources
    killed = []

    def note(_):
        if not killed:
            killed.extend(multiprocessing.active_children())
            for process in killed:
                process.kill()

    told = list(diagnose_read.read_all(found, [Place()] * 12, diagnose_read.ReadOptions(), note))
    assert killed
    assert [one.problem for one in told] == [""] * 12
    assert [one.logs[0].lines for one in told] == [20_000] * 12


def test_a_file_that_always_costs_the_process_its_life_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnose_read, "MAX_KILLED", 3)
    sources = [log_files.Source(str(tmp_path / f"rank{number}.log"), 9 - number) for number in range(4)]

    def dying(given, *_):
        return ((number, diagnose_read.Reading()) for number in given if number > 1)

    monkeypatch.setattr(diagnose_read, "_in_pool", dying)
    told = list(diagnose_read._in_processes(sources, [Place()] * 4, diagnose_read.ReadOptions(), lambda _: None, 2))
    assert [bool(one.problem) for one in told] == [True, True, False, False]
