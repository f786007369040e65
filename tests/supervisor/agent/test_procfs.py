"""Reading processes: real files, real processes, real connections."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supervisor.agent.procfs import ProcessIdentity, RankProcessReader, files_open_for_writing, sends, unacknowledged
from supervisor.files import start_time


def test_a_stopped_process_is_seen_as_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        reader = RankProcessReader(child.pid)
        reading = reader.read()
        assert reading.state == "T"
        assert reading.read_bytes > 0
    finally:
        child.kill()
        child.wait()
    assert reader.read() is None
    assert RankProcessReader(child.pid).read() is None
    reader.close()
    ourselves = RankProcessReader(os.getpid())
    assert ourselves.read().state == "R"  # type: ignore[union-attr]
    ourselves.close()


def test_bytes_written_are_counted(tmp_path: Path) -> None:
    reader = RankProcessReader(os.getpid())
    before = reader.read()
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert reader.read().written_bytes - before.written_bytes >= 100_000
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


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


@pytest.mark.parametrize(
    ("queues", "again", "found"),
    [
        ("00000000:00000000", "00000000", False),
        ("00040000:00000000", "00000000", True),
        ("00000000:00040000", "00000000", False),
        ("00040000:00000000", "00000007", False),
    ],
)
def test_what_the_table_says(queues: str, again: str, found: bool) -> None:
    line = (
        f"   1: 0100007F:1F90 0100007F:C350 01 {queues} 01:00000014 {again}     0        0 4711 2 ffff 20 4 30 10 -1\n"
    )
    assert unacknowledged(HEAD + line) == ({"socket:[4711]"} if found else set())


def comes_to_rest() -> bool:
    """The last acknowledgement may come a moment later, and pytest's own workers talk by sockets, too."""
    until = time.monotonic() + 30.0
    while sends(os.getpid()):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_reader_that_is_slow(family: socket.AddressFamily) -> None:
    address = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((address, 0), family=family) as server, socket.socket(family) as writer:
        writer.connect(server.getsockname()[:2])
        reader, _ = server.accept()
        with reader:
            assert comes_to_rest()
            writer.setblocking(False)
            sent = 0
            try:
                while True:
                    sent += writer.send(bytes(1 << 16))
            except BlockingIOError:
                assert sends(os.getpid())
            while sent > 0:
                sent -= len(reader.recv(1 << 16))
            assert comes_to_rest()
