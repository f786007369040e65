"""`unbroken diagnose` on files, pipes and whatever is in them."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys

import msgspec
import pytest
from click.testing import CliRunner

from diagnosis.signals import NodeEvidence, RankOutput
from supervisor.cli import diagnose
from supervisor.cli.main import main
from supervisor.diagnose import log_files as diagnose_files

XID = "[ 12.5] NVRM: Xid (PCI:0000:C1:00): 79, pid=1234, name=python, GPU has fallen off the bus."


HEALTHY = "".join(f"step {step} loss {3 - step / 1000:.3f} grad_norm 0.9 lr 3e-4\n" for step in range(2000))


def test_a_kernel_log(answer, tmp_path):
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


def test_a_healthy_log_has_no_verdict_against_it(answer, tmp_path):
    path = tmp_path / "out.log"
    path.write_text(HEALTHY)
    value = answer(path)
    assert (value["verdict"]["failure_class"], value["verdict"]["action"]) == ("none", "none")
    assert (value["kernel_events"], value["lines"]) == ([], 2000)


def test_standard_input_and_words_for_people(run):
    text = run("-", stdin=XID + "\n")
    assert text.startswith("gpu_fallen_off_bus (")
    assert "line 1: xid 79 0000:c1:00" in text


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
def test_any_bytes_are_survived(answer, tmp_path, content):
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
    (log,) = diagnose.read(io.BytesIO(data), "x").logs
    assert [(event.code, event.line) for event in log.events] == [(7, before + 2), (79, 2 * before + 3)]
    assert log.lines == 2 * before + 3


def test_a_large_log_takes_little_memory(tmp_path):
    """Ten times as much to read, no more to hold: the peak of a process of its own."""
    program = "import resource,sys;from supervisor.cli import diagnose;diagnose.main((sys.argv[1],),True);"
    program += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,file=sys.stderr)"

    def peak(copies):
        path = tmp_path / f"log{copies}"
        path.write_text(HEALTHY * copies)
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60, check=True
        )
        return int(done.stderr.split()[-1])

    assert peak(200) < peak(20) + 8 * 1024


def test_names_of_files_are_shown_as_what_can_be_shown(answer, tmp_path):
    for name in (b"a\xff.log", b"b\x1b[31m.log"):
        with open(bytes(tmp_path) + b"/" + name, "w") as file:
            file.write(f"{XID}\n")
    assert {one["file"] for one in answer(tmp_path)["kernel_events"]} == {f"{tmp_path}/a.log", f"{tmp_path}/b.log"}
    missing = CliRunner().invoke(main, ["diagnose", f"{tmp_path}/\x1b[31mnone"])
    assert (missing.exit_code, "\x1b" in missing.output) == (66, False)


def test_an_exit_record_alone(answer, tmp_path):
    path = tmp_path / "rank3.exit"
    path.write_text(json.dumps({"rank": 3, "local_rank": 3, "pid": 9, "status": 11, "ended_at": 1795292431.0}))
    value = answer(path)
    assert value["verdict"]["failure_class"] == "worker_crash"
    assert value["verdict"]["culprits"] == [{"rank": 3}]


@pytest.mark.parametrize(
    "record", [{"rank": 10**21, "status": 9}, {"rank": 1, "status": -1}, {"rank": 1, "status": 1e9}]
)
def test_an_exit_record_that_cannot_be(answer, tmp_path, record):
    path = tmp_path / "rank1.exit"
    path.write_text(json.dumps(record))
    value = answer(path)
    assert value["verdict"]["failure_class"] == "unknown"
    assert len(value["problems"]) == 1


def test_secrets_are_not_told(run, tmp_path):
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


# ----- `unbroken diagnose --digest` -----


def test_a_digest_of_a_job_folder_tells_what_is_new_since_the_attempt_before(run, tmp_path):
    for number, word in ((1, "port 1 is down"), (2, "shard 7 is missing")):
        folder = tmp_path / "attempts" / str(number) / "n1"
        folder.mkdir(parents=True)
        tail = (*HEALTHY.splitlines()[:30], f"{word} again", word)
        evidence = NodeEvidence(node="n1", attempt=number, outputs=(RankOutput(rank=0, tail=tail),))
        (folder / "evidence-0.json").write_bytes(msgspec.json.encode(evidence))

    text = run(tmp_path, "--digest")

    new = text.partition("== new since attempt 1\n")[2].partition("\n==")[0]
    assert [line.rpartition(" ")[2] for line in new.splitlines()] == ["again", "missing"]


def test_a_digest_beside_a_healthy_attempt(run, tmp_path, traceback):
    for name, more in (("well", ""), ("ill", "link 7 retrained\n" + traceback())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank3.log").write_text(HEALTHY + more)
    text = run(tmp_path / "ill", "--digest", "--healthy", str(tmp_path / "well"))
    new = text.partition(f"== new since {tmp_path / 'well'}\n")[2].partition("\n==")[0]
    assert "link 7 retrained" in new
    assert "grad_norm" not in new


# ----- `unbroken diagnose --good` -----

NOISE = "NCCL WARN NET/IB : Got completion from peer 10.0.0.3<4242> with status=12 opcode=0 len=0 vendor err 129\n"
SETUP = "".join(f"layer {number} is built\n" for number in range(2))


@pytest.fixture
def failed(tmp_path):
    """A log that ends early, and three good ones with the same warning at the start."""
    for name, lines in (("a", 2000), ("b", 1900), ("c", 1800)):
        text = SETUP + NOISE + SETUP + "".join(HEALTHY.splitlines(keepends=True)[:lines]) + "all work is done\n"
        (tmp_path / f"good-{name}.log").write_text(text)
    path = tmp_path / "failed.log"
    path.write_text(SETUP + NOISE + 3 * SETUP + "shard 17 came late\n")
    return path


def test_all_words_after_good_are_good_runs(answer, failed):
    good = sorted(failed.parent.glob("good-*.log"))
    value = answer(failed, "--good", *good)
    assert value["files"] == 1
    assert value["compared"]["beside"] == list(map(str, good))
    assert [one["text"] for one in value["compared"]["new"]] == ["shard 17 came late"]
    assert value["verdict"]["failure_class"] != answer(failed)["verdict"]["failure_class"] == "nccl_network"


@pytest.mark.parametrize("last", [(), ("--json",)])
def test_good_needs_a_path(failed, last):
    result = CliRunner().invoke(main, ["diagnose", str(failed), "--good", *last])
    assert (result.exit_code, "--good needs a path" in result.stderr) == (2, True)


def test_of_many_good_runs_the_newest_are_compared_with(answer, failed):
    good = sorted(failed.parent.glob("good-*.log"))
    for age, path in enumerate(reversed(good)):
        os.utime(path, (1000.0 - age, 1000.0 - age))
    old = failed.parent / "old.log"
    old.write_text("shard 17 came late\n")
    os.utime(old, (1.0, 1.0))
    value = answer(failed, "--good", old, *good)
    assert value["compared"]["beside"] == list(map(str, good))


def test_a_good_run_that_failed_is_good_up_to_its_last_step(failed, traceback):
    for path in (failed, failed.parent / "good-a.log"):
        path.write_text(HEALTHY + traceback())
    result = CliRunner().invoke(main, ["diagnose", str(failed), "--json", "--good", str(failed.parent / "good-a.log")])
    assert json.loads(result.stdout)["verdict"]["failure_class"] == "script_error"
    assert "good-a.log" in result.stderr


def test_a_job_folder_is_compared_with_its_earlier_attempts(answer, tmp_path):
    for number, end in ((1, "ValueError: port\n"), (2, ""), (3, "shard 17 came late\n")):
        folder = tmp_path / "attempts" / str(number)
        folder.mkdir(parents=True)
        (folder / "rank0.out").write_text(SETUP + NOISE + HEALTHY + end)
    value = answer(tmp_path)
    assert value["compared"]["beside"] == ["attempt 2", "attempt 1"]
    assert [one["text"] for one in value["compared"]["new"]] == ["shard 17 came late"]
    one_attempt = diagnose.of_attempt(str(tmp_path), 3)
    assert one_attempt is not None
    assert one_attempt["compared"] == value["compared"]
    with open(tmp_path / "attempts" / "3" / "rank1.out", "wb") as large:
        large.truncate(diagnose.COMPARED_AT_ONCE)
    assert diagnose.of_attempt(str(tmp_path), 3) is None, "it would take long"
    assert diagnose.of_attempt(str(tmp_path), 1) is None
    assert diagnose.of_attempt(str(tmp_path / "nowhere"), 1) is None


# ----- `unbroken diagnose` of flight recorder dumps -----


def test_no_name_forges_a_line(run, tmp_path):
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


def test_dumps_without_a_wait_and_a_damaged_one(answer, tmp_path, dump):
    for rank in range(2):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(msgspec.json.encode(dump(rank, waits=False)))
    (tmp_path / "nccl_trace_rank_2").write_bytes(b"\x80\x02}q\x00cposix\nsystem\n")
    value = answer(tmp_path)
    assert value["flight_recorder"]["kind"] is None
    assert len(value["problems"]) == 1
    assert "nccl_trace_rank_2" in value["problems"][0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dust in the wind\n", "perhaps"),
        ("Unable to determine the device handle for GPU0000:03:00.0: Unknown Error\n", "its name is not in it"),
    ],
)
def test_what_to_do_is_said_where_nothing_or_no_node_is_known(tmp_path, text, said):
    log = tmp_path / "a.log"
    log.write_text(text)
    result = CliRunner().invoke(main, ["diagnose", str(log)])
    assert said in " ".join(result.output.split())
    assert any(line.startswith("  do  ") for line in result.output.splitlines())
