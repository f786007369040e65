"""`unbroken diagnose` on files, folders, pipes and whatever is in them."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import sys

import msgspec
import pytest
from click.testing import CliRunner

from diagnosis.signals import ExitRecord, NodeEvidence, RankOutput
from supervisor.cli import main
from supervisor.diagnose import command as diagnose
from supervisor.diagnose import files as diagnose_files
from supervisor.diagnose import read as diagnose_read

XID = "[ 12.5] NVRM: Xid (PCI:0000:C1:00): 79, pid=1234, name=python, GPU has fallen off the bus."
HEALTHY = "".join(f"step {step} loss {3 - step / 1000:.3f} grad_norm 0.9 lr 3e-4\n" for step in range(2000))


def run(*arguments, stdin=None):
    result = CliRunner().invoke(main, ["diagnose", *map(str, arguments)], input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*arguments, stdin=None):
    return json.loads(run(*arguments, "--json", stdin=stdin))


def test_a_kernel_log(tmp_path):
    path = tmp_path / "dmesg"
    path.write_text(f"[ 1.0] Linux version 6.8\n[ 2.0] mlx5_core 0000:5e:00.0 ens1: Link up\n{XID}\n")
    value = answer(path)
    assert value["kernel_events"] == [
        {
            "kind": "xid",
            "code": 79,
            "device": "0000:c1:00",
            "line": 3,
            "failure_class": "gpu_fallen_off_bus",
            "severity": "fatal",
        }
    ]
    verdict = value["verdict"]
    assert (verdict["failure_class"], verdict["kind"], verdict["domain"]) == (
        "gpu_fallen_off_bus",
        "cause",
        "accelerator",
    )
    assert verdict["culprits"] == [{"gpu": "0000:c1:00", "rank": None}]
    assert verdict["action"] == "cordon_node_and_restart"
    assert value["evidence"][0] == {
        "source": str(path),
        "line": 3,
        "rank": None,
        "at": None,
        "text": XID.split("] ", 1)[1],
    }
    assert (value["schema"], value["flight_recorder"]) == (1, None)


def test_a_crash_of_another_program_is_an_event_and_no_verdict(tmp_path):
    path = tmp_path / "dmesg"
    path.write_bytes(b"[ 1.0] gnome-shell[77]: segfault at 0 ip 00007f24 sp 00007ffc error 4 in libc.so.6[16+15]\r\n")
    value = answer(path)
    assert [one["kind"] for one in value["kernel_events"]] == ["segfault"]
    assert value["verdict"]["failure_class"] == "none"


def test_a_healthy_log_has_no_verdict_against_it(tmp_path):
    path = tmp_path / "out.log"
    path.write_text(HEALTHY)
    value = answer(path)
    assert (value["verdict"]["failure_class"], value["verdict"]["action"]) == ("none", "none")
    assert (value["kernel_events"], value["lines"]) == ([], 2000)


def test_a_ranks_output_with_a_traceback(tmp_path):
    path = tmp_path / "rank3.log"
    lines = [
        "[rank3]: Traceback (most recent call last):",
        '[rank3]:   File "/home/u/train.py", line 41, in step',
        "[rank3]:     loss = batch['x']",
        "[rank3]: KeyError: 'x'",
    ]
    path.write_text(HEALTHY + "\n".join(lines) + "\n")
    value = answer(path)
    assert value["verdict"]["failure_class"] == "script_error"
    assert value["verdict"]["culprits"][0]["rank"] == 3
    assert (value["evidence"][0]["line"], value["evidence"][0]["rank"]) == (2001, 3)


def test_the_hardware_explains_what_the_ranks_say(tmp_path):
    (tmp_path / "rank0.log").write_text(HEALTHY + "RuntimeError: CUDA error: unspecified launch failure\n")
    (tmp_path / "sub").mkdir()
    with gzip.open(tmp_path / "sub" / "kern.log.gz", "wt") as file:
        file.write(f"{XID}\n")
    (tmp_path / "model.pt").write_bytes(b"NVRM: Xid (PCI:0000:c2:00): 79, no log\n")
    value = answer(tmp_path)
    assert value["verdict"]["failure_class"] == "gpu_fallen_off_bus"
    assert [(one["file"], one["line"]) for one in value["kernel_events"]] == [(f"{tmp_path}/sub/kern.log.gz", 1)]


def test_standard_input_and_words_for_people():
    text = run("-", stdin=XID + "\n")
    assert text.startswith("gpu_fallen_off_bus (")
    assert "line 1: xid 79 0000:c1:00" in text


def test_a_file_that_is_not_there():
    result = CliRunner().invoke(main, ["diagnose", "/no/such/file"])
    assert (result.exit_code, "/no/such/file" in result.stderr) == (66, True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n\n",
        bytes(range(256)) * 300,
        b"\x1f\x8b damaged gzip",
        b"x" * 3_000_000,
        gzip.compress(b"a\n" * 99, mtime=0)[:-9],
    ],
)
def test_any_bytes_are_survived(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert answer(path)["verdict"]["failure_class"] in ("none", "unknown")


def test_lines_are_counted_over_blocks_and_messages_of_several_lines_over_their_edges():
    line = b"step 1 loss 2.0 and some more text to fill the line up to a sensible length for a log\n"
    before = diagnose_files.BLOCK // len(line)
    oom = [
        b"oom-kill:constraint=CONSTRAINT_NONE,task=python,pid=7,uid=0\n",
        b"Out of memory: Killed process 7 (python)\n",
    ]
    data = line * before + b"".join(oom) + line * before + XID.encode()
    (log,) = diagnose.read(io.BytesIO(data), "x").stories
    assert [(event.code, event.line) for event in log.events] == [(7, before + 2), (79, 2 * before + 3)]
    assert log.lines == 2 * before + 3


def test_a_large_log_takes_little_memory(tmp_path):
    """Ten times as much to read, no more to hold: the peak of a process of its own."""
    program = "import resource,sys;from supervisor.diagnose import command;command.main((sys.argv[1],),True);"
    program += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,file=sys.stderr)"

    def peak(copies):
        path = tmp_path / f"log{copies}"
        path.write_text(HEALTHY * copies)
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60, check=True
        )
        return int(done.stderr.split()[-1])

    assert peak(200) < peak(20) + 8 * 1024


def test_names_of_files_are_shown_as_what_can_be_shown(tmp_path):
    for name in (b"a\xff.log", b"b\x1b[31m.log"):
        with open(bytes(tmp_path) + b"/" + name, "w") as file:
            file.write(f"{XID}\n")
    assert {one["file"] for one in answer(tmp_path)["kernel_events"]} == {f"{tmp_path}/a.log", f"{tmp_path}/b.log"}
    missing = CliRunner().invoke(main, ["diagnose", f"{tmp_path}/\x1b[31mnone"])
    assert (missing.exit_code, "\x1b" in missing.output) == (66, False)


def test_a_return_ends_a_line_where_no_newline_does(tmp_path):
    path = tmp_path / "console"
    path.write_bytes(f"boot\r{XID}\r[ 13.0] EDAC MC0: 1 UE memory read error\r".encode())
    assert [(event["kind"], event["line"]) for event in answer(path)["kernel_events"]] == [("xid", 2), ("edac", 3)]


@pytest.mark.parametrize("coding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_read(tmp_path, coding):
    path = tmp_path / "log"
    path.write_bytes(("\ufeff" + "healthy line\n" * 9000 + XID + "\n").encode(coding))
    assert [(event["kind"], event["line"]) for event in answer(path)["kernel_events"]] == [("xid", 9001)]


def test_what_a_disk_says_after_its_port_has_failed_is_no_cause(tmp_path):
    path = tmp_path / "dmesg"
    path.write_text(
        "[ 5.0] pcieport 0000:30:03.0: DPC: containment event, status:0x1f01 source:0x0000\n"
        "[ 5.1] nvme nvme0: frozen state error detected, reset controller\n"
    )
    value = answer(path)
    assert [event["kind"] for event in value["kernel_events"]] == ["aer", "nvme"]
    assert value["verdict"]["failure_class"] == "pcie_error"


@pytest.mark.parametrize(
    ("lines", "failure_class"),
    [
        (["45, pid=7, name=python3, Ch 00000001 caused by previous Xid 149"], "nvlink_error"),
        (["43, pid=7, name=python3, channel 0x0b00000a"], "cuda_illegal_access"),
        (["45, pid=7, name=python3, Ch 00000001"], "none"),
        (
            ["145, RLW_RXPIPE Nonfatal XC0 i0 Link 04 (0x04 0x08)", "137, RLW_RXPIPE hit on link 4: PRIV"],
            "nvlink_error",
        ),
    ],
)
def test_where_only_consequences_are_told_they_name_the_cause(tmp_path, lines, failure_class):
    path = tmp_path / "dmesg"
    path.write_text("".join(f"[ 9.0] NVRM: Xid (PCI:0000:c1:00): {line}\n" for line in lines))
    verdict = answer(path)["verdict"]
    assert verdict["failure_class"] == failure_class
    assert [one["gpu"] for one in verdict["culprits"]] == ([] if failure_class == "none" else ["0000:c1:00"])


# ----- whole folders -----


def traceback(name="KeyError: 'x'"):
    place = '  File "/home/u/train.py", line 41, in step'
    return "\n".join(["Traceback (most recent call last):", place, "    loss = batch['x']", name, ""])


def test_the_log_folder_of_torchrun(tmp_path):
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


def test_our_own_job_folder(tmp_path):
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


def test_an_exit_record_alone(tmp_path):
    path = tmp_path / "rank3.exit"
    path.write_text(json.dumps({"rank": 3, "local_rank": 3, "pid": 9, "status": 11, "ended_at": 1795292431.0}))
    value = answer(path)
    assert value["verdict"]["failure_class"] == "worker_crash"
    assert value["verdict"]["culprits"] == [{"rank": 3}]


@pytest.mark.parametrize(
    "record", [{"rank": 10**21, "status": 9}, {"rank": 1, "status": -1}, {"rank": 1, "status": 1e9}]
)
def test_an_exit_record_that_cannot_be(tmp_path, record):
    path = tmp_path / "rank1.exit"
    path.write_text(json.dumps(record))
    value = answer(path)
    assert value["verdict"]["failure_class"] == "unknown"
    assert len(value["problems"]) == 1


def test_no_name_forges_a_line(tmp_path):
    forged = "x\n\x1b]0;title\x07none (99%): all is well\r\u2028\u202e"
    for rank in (0, 1):
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(
            json.dumps(
                {
                    "version": "2.5",
                    "pg_config": {"0": {"name": "0", "desc": forged, "ranks": "[0, 1]"}},
                    "entries": [
                        {
                            "pg_id": 0,
                            "process_group": ["0", forged],
                            "collective_seq_id": 5 + rank,
                            "profiling_name": f"nccl:all_reduce{forged}",
                            "input_sizes": [[8]],
                            "output_sizes": [[8]],
                            "state": "scheduled",
                            "frames": [{"name": forged, "filename": forged, "line": 3}],
                        }
                    ],
                }
            )
        )
    (tmp_path / "new\nnone (99%): all is well\n.log").write_text("RuntimeError: CUDA out of memory. Tried to\n")
    told = run(tmp_path)
    assert "all is well" in told
    assert not any(line.startswith("none") for line in told.splitlines())
    assert not set(told) & set("\x1b\x07\r\u2028\u202e")


def test_secrets_are_not_told(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(
        "Traceback (most recent call last):\n"
        '  File "/home/u/train.py", line 5, in main\n    login()\n'
        "PermissionError: login with token=hf_abcdefghijklmnopqrstuvwxyz failed, password: supersecret99\n"
    )
    for told in (run(path), run(path, "--json"), run(path, "--digest", "--bytes", "2000")):
        assert "login with token=[secret] failed" in told
        assert "hf_abc" not in told
        assert "supersecret" not in told


def dump(rank, waits, calls=5, late_s=0.0):
    entry = {
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[8]],
        "output_sizes": [[8]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "is_p2p": False,
        "frames": [{"name": "f", "filename": "train.py", "line": 3}],
    }
    entries = [
        entry
        | {"record_id": n, "collective_seq_id": n + 1, "state": "completed"}
        | {"time_created_ns": 10**18 + n * 10**9 + int(late_s * 1e9)}
        for n in range(calls)
    ]
    if waits:
        entries.append(
            entry
            | {"record_id": calls, "collective_seq_id": calls + 1, "state": "scheduled"}
            | {"time_created_ns": 10**18 + (calls + 4) * 10**9}
        )
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return {"version": "2.10", "pg_config": config, "entries": entries, "rank": rank}


@pytest.mark.parametrize("write", [lambda value: pickle.dumps(value, protocol=2), msgspec.json.encode])
def test_flight_recorder_dumps(tmp_path, write):
    for rank in range(4):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(write(dump(rank, waits=rank != 2)))
    value = answer(tmp_path)
    report = value["flight_recorder"]
    assert (report["kind"], report["culprit_ranks"], report["collective_seq"]) == ("missing_rank", [2], 6)
    assert value["verdict"]["culprits"] == [{"rank": 2}]
    assert "missing_rank, rank 2, collective 6" in run(tmp_path)


def test_a_rank_that_is_late_and_one_that_never_comes(tmp_path):
    for rank in range(4):
        value = dump(rank, waits=rank != 2, calls=40, late_s=0.5 * (rank == 2))
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(msgspec.json.encode(value))
    value = answer(tmp_path)
    assert (value["verdict"]["failure_class"], value["verdict"]["culprits"]) == ("straggler_or_slow", [{"rank": 2}])
    assert value["flight_recorder"]["kind"] == "straggler"
    (tmp_path / "rank0.log").write_text(
        "[rank0]:[E ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600029 milliseconds "
        "before timing out.\n"
    )
    value = answer(tmp_path)
    assert (value["verdict"]["failure_class"], value["verdict"]["culprits"]) == ("silent_hang", [{"rank": 2}])
    assert value["flight_recorder"]["kind"] == "missing_rank"
    assert value["slowness"][0]["ranks"] == [2]


def test_dumps_without_a_wait_and_a_damaged_one(tmp_path):
    for rank in range(2):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(msgspec.json.encode(dump(rank, waits=False)))
    (tmp_path / "nccl_trace_rank_2").write_bytes(b"\x80\x02}q\x00cposix\nsystem\n")
    value = answer(tmp_path)
    assert value["flight_recorder"]["kind"] is None
    assert len(value["problems"]) == 1
    assert "nccl_trace_rank_2" in value["problems"][0]


def test_in_processes_of_their_own_all_is_the_same(tmp_path, monkeypatch):
    for rank in range(5):
        (tmp_path / f"rank{rank}.log").write_text(HEALTHY + (traceback() if rank == 3 else ""))
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump(0, waits=True), protocol=2))
    alone = answer(tmp_path)
    monkeypatch.setattr(diagnose_read, "POOL_BYTES", 1)
    monkeypatch.setattr(diagnose_read, "AT_ONCE_BYTES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert answer(tmp_path) == alone
    assert alone["verdict"]["culprits"] == [{"rank": 3}]


SMI = """
GPU 00000000:{bus}:00.0
    Temperature
        GPU Current Temp                  : {temperature} C
    Clocks Event Reasons
            HW Thermal Slowdown           : {slow}
"""


def test_the_gpu_that_makes_a_rank_slow_and_what_it_costs(tmp_path):
    for rank in range(8):
        node = f"n{rank // 4}"
        (tmp_path / node).mkdir(exist_ok=True)
        gpu = f"cudaDev {rank % 4} nvmlDev {rank % 4} busId {25 + rank % 4:x}000"
        nccl = f"{node}:7:9 [{rank % 4}] NCCL INFO comm 0x5 rank {rank} nranks 8 {gpu} commId 0x9"
        steps = (f"step {n} loss 2.{n:03} step_time: {1 + n % 7 / 100 + 0.3 * (rank == 5):.3f} s" for n in range(100))
        (tmp_path / node / f"rank{rank}.log").write_text("\n".join([nccl, *steps]))
    report = SMI.format(bus="19", temperature=60, slow="Not Active") + SMI.format(
        bus="1A", temperature=91, slow="Active"
    )
    (tmp_path / "n1" / "nvidia-smi.log").write_text(report)

    value = answer(tmp_path)

    verdict, (slow,) = value["verdict"], value["slowness"]
    assert verdict["failure_class"] == "gpu_thermal_power"
    assert verdict["culprits"] == [{"node": "n1", "gpu": "0000:1a:00", "rank": 5}]
    assert verdict["why"].startswith(
        "rank 5's GPU 0000:1a:00 is slowed down by heat or power (HW Thermal Slowdown : Active"
    )
    assert "without it steps would take 23 % less time" in verdict["why"]
    assert (slow["kind"], slow["gpu"], slow["ranks"]) == ("gpu", "0000:1a:00", [5])


def test_a_digest(tmp_path):
    (tmp_path / "rank3.log").write_text(HEALTHY + traceback())
    text = run(tmp_path, "--digest", "--bytes", "2000")
    assert "KeyError: 'x'" in text
    assert len(text.encode()) <= 2000


def test_a_digest_beside_the_attempt_before(tmp_path):
    for number, word in ((1, "network IB"), (2, "network Socket")):
        folder = tmp_path / "attempts" / str(number)
        folder.mkdir(parents=True)
        (folder / "rank0.out").write_text(f"NCCL INFO Using {word}\n{HEALTHY}port {number} is down\n")
    (tmp_path / "attempts" / "3").mkdir()

    text = run(tmp_path, "--digest")

    new = text[text.index("== new since attempt 1") :]
    assert new.splitlines()[1:3] == ["rank0.out:1 NCCL INFO Using network Socket", "rank0.out:2002 port 2 is down"]
    assert "not said at start-up: NCCL INFO Using network IB" in text
    assert "new after the last step: rank0.out:2002 port 2 is down" in text


def test_a_digest_of_a_job_folder_tells_what_is_new_since_the_attempt_before(tmp_path):
    for number, word in ((1, "port 1 is down"), (2, "shard 7 is missing")):
        folder = tmp_path / "attempts" / str(number) / "n1"
        folder.mkdir(parents=True)
        tail = (*HEALTHY.splitlines()[:30], f"{word} again", word)
        evidence = NodeEvidence(node="n1", attempt=number, outputs=(RankOutput(rank=0, tail=tail),))
        (folder / "evidence-0.json").write_bytes(msgspec.json.encode(evidence))

    text = run(tmp_path, "--digest")

    new = text.partition("== new since attempt 1\n")[2].partition("\n==")[0]
    assert [line.rpartition(" ")[2] for line in new.splitlines()] == ["again", "missing"]


def test_a_digest_beside_a_healthy_attempt(tmp_path):
    for name, more in (("well", ""), ("ill", "link 7 retrained\n" + traceback())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank3.log").write_text(HEALTHY + more)
    text = run(tmp_path / "ill", "--digest", "--healthy", str(tmp_path / "well"))
    new = text.partition("== new since the healthy attempt\n")[2].partition("\n==")[0]
    assert "link 7 retrained" in new
    assert "grad_norm" not in new
    result = CliRunner().invoke(main, ["diagnose", str(tmp_path), "--healthy", str(tmp_path)])
    assert (result.exit_code, "--healthy goes with --digest" in result.stderr) == (2, True)


def test_an_empty_folder(tmp_path):
    result = CliRunner().invoke(main, ["diagnose", str(tmp_path)])
    assert (result.exit_code, "no file in it" in result.stderr) == (66, True)


def test_a_file_that_may_not_be_read_is_told(tmp_path):
    (tmp_path / "a.log").write_text(f"{XID}\n")
    os.symlink("/proc/self/mem", tmp_path / "b.log")
    value = answer(tmp_path)
    assert value["verdict"]["failure_class"] == "gpu_fallen_off_bus"
    assert value["problems"] == [f"{tmp_path}/b.log: Input/output error"]
    named = CliRunner().invoke(main, ["diagnose", str(tmp_path / "b.log")])
    assert (named.exit_code, "Input/output error" in named.stderr) == (66, True)


def test_a_rank_that_is_behind(tmp_path):
    for rank in range(6):
        (tmp_path / f"rank{rank}.log").write_text(HEALTHY if rank != 4 else HEALTHY[: len(HEALTHY) // 2])
    told = answer(tmp_path)["progress"]
    assert told["step"] == 1999
    assert [one["ranks"] for one in told["others"]] == [[4]]
    assert "newest step: 1999; rank 4 at " in run(tmp_path)
