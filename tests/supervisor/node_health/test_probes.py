"""Reading processes, beacons, output and the kernel log: real files, real processes."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

from supervisor.agent.beacon import BeaconFile, parse
from supervisor.agent.output import BACKLOG_BYTES, OutputTail, last_bytes, read_streams
from supervisor.agent.procfs import ProcessIdentity, ProcessReader, files_open_for_writing
from supervisor.files import start_time
from supervisor.node_health.kernel_log import KernelLog


def beacon(payload: bytes, sequence: int = 2) -> bytes:
    return struct.pack("<8sIIddI", b"UBEACON1", sequence, 42, 1.0, 2.0, len(payload)) + payload + bytes(100)


def test_a_beacon_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rank0.beacon"
    reader = BeaconFile(path)
    assert reader.read() is None
    path.write_bytes(beacon(b'{"groups":{"0":[7,6]},"step":12}'))
    seen = reader.read()
    assert seen is not None
    assert (seen.groups, seen.step, seen.monotonic) == ({"0": (7, 6)}, 12, 2.0)
    assert parse(beacon(b"{}", sequence=3)) is None
    assert parse(beacon(b'{"groups":')) is None
    assert parse(b"") is None
    assert parse(bytes(4096)) is None
    reader.close()


def test_a_stopped_process_is_seen_as_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        reader = ProcessReader(child.pid)
        result = reader.read()
        assert result is not None
        assert result.state == "T"
        assert result.read_bytes > 0
    finally:
        child.kill()
        child.wait()
    assert reader.read() is None
    assert ProcessReader(child.pid).read() is None
    reader.close()
    ourselves = ProcessReader(os.getpid())
    assert ourselves.read().state == "R"  # type: ignore[union-attr]
    ourselves.close()


def test_bytes_written_are_counted(tmp_path: Path) -> None:
    reader = ProcessReader(os.getpid())
    before = reader.read()
    (tmp_path / "file").write_bytes(bytes(100_000))
    after = reader.read()
    assert before is not None
    assert after is not None
    assert after.written_bytes - before.written_bytes >= 100_000
    assert reader.state() == "R"
    reader.close()


def test_a_process_is_there_until_it_is_gone_or_a_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = start_time(child.pid)
    assert began is not None
    identity = ProcessIdentity(child.pid, began)
    assert identity.is_there()
    assert not ProcessIdentity(child.pid, began + 1).is_there()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_there()
    child.wait()
    assert not identity.is_there()
    assert not ProcessIdentity(child.pid, began).is_there()
    identity.close()


def test_files_open_for_writing_are_found(tmp_path: Path) -> None:
    with open(tmp_path / "model.pt", "wb"), open(__file__, "rb"):
        paths = files_open_for_writing(os.getpid(), limit=4096)
    assert str(tmp_path / "model.pt") in paths
    assert __file__ not in paths


def test_output_is_followed_over_truncation_and_a_huge_backlog(tmp_path: Path) -> None:
    path = tmp_path / "rank0.out"
    tail = OutputTail(str(path))
    assert tail.read() == b""
    path.write_bytes(b"one\n")
    assert tail.read() == b"one\n"
    assert tail.read() == b""
    path.write_bytes(b"2\n")
    assert tail.read() == b"2\n"
    with open(path, "ab") as file:
        file.truncate(BACKLOG_BYTES * 2)
        file.seek(0, os.SEEK_END)
        file.write(b"end\n")
    pieces = b""
    while piece := tail.read():
        pieces += piece
    assert pieces.endswith(b"end\n")
    assert tail.skipped_bytes > BACKLOG_BYTES
    assert last_bytes(str(path), 4) == b"end\n"
    assert last_bytes(str(tmp_path / "absent")) == b""
    tail.close()


def test_streams_that_are_not_there_or_broken_are_no_streams(tmp_path: Path) -> None:
    assert read_streams(tmp_path / "streams.json") == ()
    (tmp_path / "streams.json").write_bytes(b'[{"rank":1,')
    assert read_streams(tmp_path / "streams.json") == ()


def test_the_kernel_log_file_is_followed_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("old line\n")
    log = KernelLog(str(path), "n1")
    with open(path, "a") as file:
        file.write("NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.\nhalf")
    signals = log.poll(5.0)
    assert [s.text for s in signals] == ["NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus."]
    assert (signals[0].node, signals[0].source, signals[0].at) == ("n1", "kernel", 5.0)
    with open(path, "a") as file:
        file.write(" and half\n")
    assert [s.text for s in log.poll(6.0)] == ["half and half"]
    log.close()


def test_an_unreadable_kernel_log_is_said_and_survived(tmp_path: Path) -> None:
    log = KernelLog(str(tmp_path / "absent"), "n1")
    assert "cannot be read" in log.problem
    assert log.poll(1.0) == []
    (tmp_path / "absent").write_text("now it is there\n")
    assert [s.text for s in log.poll(2.0)] == ["now it is there"]
    log.close()
