"""The keeper's end of its unix socket."""

from __future__ import annotations

import array
import os
import socket
from typing import Any

MAX_LINE = 16 << 20


class Client:
    """One connection: a buffer in, a bounded buffer out, descriptors that came along."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self.connection = connection
        self.peer = peer
        """The process that connected."""
        self.incoming = b""
        self.outgoing = b""
        self.descriptors: list[int] = []
        self.watching = False
        self.worker: Any = None
        """The `members.Worker` that this stub stands for."""

    def fileno(self) -> int:
        return self.connection.fileno()

    def receive(self) -> bool:
        """Take what is there; False when the peer is gone or sends nonsense."""
        try:
            data, ancillary, _flags, _address = self.connection.recvmsg(
                1 << 20, socket.CMSG_SPACE(16 * 4), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        for level, kind, packed in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(packed[: len(packed) - len(packed) % received.itemsize])
                self.descriptors.extend(received)
        self.incoming += data
        return bool(data) and len(self.incoming) <= MAX_LINE and len(self.descriptors) <= 16

    def is_gone(self) -> bool:
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def drop_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def close(self) -> None:
        self.drop_descriptors()
        self.connection.close()


def listen(path: str) -> socket.socket:
    """Listen at `path`, which appears only when it can be connected to; what is left there of an earlier run goes."""
    early = path + "~"
    if os.path.exists(early):
        os.unlink(early)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(early)
    finally:
        os.umask(mask)
    listener.listen(256)
    listener.setblocking(False)
    os.replace(early, path)
    return listener
