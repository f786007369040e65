"""A server that speaks the protocol of NCCL's RAS, or does not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest


class RasServer:
    """Listens on a port of its own. `manner` says how it behaves; `report` is what it answers to `VERBOSE STATUS`."""

    def __init__(self) -> None:
        self.manner = "well"
        self.report = ""
        self.heard: list[str] = []
        self.connections = 0
        self._over = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection, self.connections), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
            if self.manner == "silent" or (self.manner == "first silent" and number == 1):
                self._over.wait(20)
                return
            if self.manner == "closing":
                return
            for line in lines:
                command = line.decode().strip()
                self.heard.append(command)
                for part in self._answer(command):
                    connection.sendall(part)
                if command == "VERBOSE STATUS":
                    return

    def _answer(self, command: str) -> Iterator[bytes]:
        if self.manner == "garbage":
            yield b"HTTP/1.1 400 Bad Request\r\n\r\n"
        elif self.manner == "no line":
            yield b"\xff" * 100_000
        elif command.startswith("CLIENT PROTOCOL"):
            yield b"SERVER PROTOCOL 2\n"
        elif command.startswith("TIMEOUT"):
            yield b"ERROR: Unknown command TIMEOUT 5\n" if self.manner == "old" else b"OK\n"
        elif command == "VERBOSE STATUS" and self.manner == "endless":
            while not self._over.is_set():
                yield b"NCCL version 2.27.3 compiled with CUDA 12.9\n" * 1000
        elif command == "VERBOSE STATUS" and self.manner == "dripping":
            while not self._over.is_set():
                yield b"N"
                time.sleep(0.02)
        elif command == "VERBOSE STATUS" and self.manner == "no report":
            self._over.wait(20)
        elif command == "VERBOSE STATUS":
            yield self.report.encode()


@pytest.fixture
def ras_server() -> Iterator[RasServer]:
    server = RasServer()
    yield server
    server.close()
