"""Who is at the other end: of a unix socket by its user and folder, of a TLS connection by its certificate."""

from __future__ import annotations

import os
import pwd
import socket
import ssl
import stat
import struct
from pathlib import Path

from diagnosis.signals import clean_text

_CREDENTIALS = struct.Struct("3i")


def peer_uid(connection: socket.socket) -> int | None:
    """The user id of the process at the other end of a unix socket, as the kernel knows it; None for other sockets.

    Raises OSError.
    """
    if connection.family != socket.AF_UNIX:
        return None
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


def user_name(uid: int) -> str:
    """`ann (uid 1000)`."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except (KeyError, OSError):
        return f"uid {uid}"


def is_loopback(host: str) -> bool:
    """Whether every host means itself by this address."""
    return host.startswith("127.") or host.strip("[]") in ("::1", "localhost")


def not_private(folder: Path, owners: frozenset[int]) -> str:
    """Why others than `owners` could enter or change `folder`, in words; empty when only they can."""
    try:
        found = os.lstat(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder"
    if found.st_uid not in owners:
        return f"{folder} belongs to user {found.st_uid}"
    if found.st_mode & 0o077:
        return f"{folder} is open to others (mode {found.st_mode & 0o777:o})"
    return ""


def own_users() -> frozenset[int]:
    """This user, and root, who can do everything anyway."""
    return frozenset({os.geteuid(), 0})


def listen_privately(path: Path) -> socket.socket:
    """A unix socket in a folder of our own that nobody else can enter; the folder is made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if problem := not_private(path.parent, frozenset({os.geteuid()})):
        raise PermissionError(1, problem)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listening.bind(str(path))
        os.chmod(path, 0o600)
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening


def tls_context(ca: str) -> ssl.SSLContext:
    """`ca`: a file of certificates to trust, empty for the system's. Raises OSError."""
    return ssl.create_default_context(cafile=ca or None)


def explain_tls(error: BaseException, address: str, ca: str) -> str:
    """One sentence for a failure of TLS; empty where `error` is none."""
    if isinstance(error, ssl.SSLCertVerificationError):
        trusted = f"in {ca}" if ca else "of this system"
        return (
            f"the certificate of the controller at {address} is not trusted ({error.verify_message}): no certificate "
            f"{trusted} vouches for it. Name the file with the right one in UNBROKEN_TLS_CA (`controller.tls_ca`)"
        )
    if isinstance(error, ssl.SSLError):
        return f"what listens at {address} does not speak TLS as it must: {clean_text(error.reason or str(error), 100)}"
    return ""
