"""Who listens on a TCP port of this network namespace, from the kernel's socket diagnostics (sock_diag(7)).

`/proc/net/tcp` says the same, but to write it the kernel walks its table of all connections: milliseconds even of an
empty one, and it is larger on a larger machine.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

_NETLINK_SOCK_DIAG: Final = 4
_BY_FAMILY, _ERROR, _DONE = 20, 2, 3
_DUMP_REQUEST: Final = 0x301
_LISTEN: Final = 1 << 10
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI")
_FOUND: Final = struct.Struct("!BBxxHH16s16s24xI")
"""Family, state, port and port, address and address, user (which is in the byte order of the machine)."""
PATIENCE_S: Final = 1.0


def listener(port: int) -> tuple[str, int] | None:
    """Address and user of who listens on `port`. Raises OSError where the kernel does not tell (then /proc may)."""
    for family in (socket.AF_INET, socket.AF_INET6):
        for host, uid in _dump(family, port):
            return host, uid
    return None


def _dump(family: int, port: int) -> list[tuple[str, int]]:
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _LISTEN) + struct.pack("!H", port) + bytes(46)
    found: list[tuple[str, int]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(PATIENCE_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _DUMP_REQUEST, 1, 0) + body)
        while data := kernel.recv(1 << 16):
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == _DONE:
                    return found
                if kind == _ERROR or length < _HEADER.size + _FOUND.size:
                    raise OSError("the kernel does not tell who listens")
                _, _, here, _, source, _, _ = _FOUND.unpack_from(data, at + _HEADER.size)
                (uid,) = struct.unpack_from("=I", data, at + _HEADER.size + _FOUND.size - 4)
                if here == port:
                    found.append((socket.inet_ntop(family, source[: 4 if family == socket.AF_INET else 16]), uid))
                at += (length + 3) & ~3
    return found
