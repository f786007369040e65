"""Bytes that are on their way: real connections of this process."""

from __future__ import annotations

import os
import socket
import time

import pytest

from supervisor.agent.sending import sends, unacknowledged

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
