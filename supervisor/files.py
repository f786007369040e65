"""Small files, written whole and read only where they are what they should be; and which process a pid is."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from pathlib import Path
from typing import NamedTuple

SECRET_BYTES = 4096
OWN_BYTES = 64 << 20


class Here(NamedTuple):
    """This boot and this PID namespace: process ids mean something only within them."""

    boot_id: str
    pid_namespace: str

    @classmethod
    def find(cls) -> Here:
        try:
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(boot_id, os.readlink("/proc/self/ns/pid"))
        except OSError:
            return cls("", "")

    def sees(self, boot_id: str, pid_namespace: str) -> bool:
        """Whether a process id from there means the same here."""
        return bool(self.boot_id) and (boot_id, pid_namespace) == self


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks after boot; None when it is gone or a zombie.

    Raises OSError when that cannot be read (no descriptor or memory left).
    """
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    try:
        stat = os.read(descriptor, 2048).decode(errors="replace")
    except ProcessLookupError:
        return None
    finally:
        os.close(descriptor)
    fields = stat[stat.rfind(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace `path` so that a reader sees the old or the new content, never a mixture. `mode`: less the umask.

    Others may write into a shared job folder: a link that lies at the temporary name is never followed.
    """
    temporary = f"{path.parent}/.{path.name}.{os.getpid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):  # on a full disk each process would leave one
            os.unlink(temporary)
        raise


def head_of(path: str, limit: int = 1024) -> bytes:
    """The first bytes of a file of /proc or /sys; empty where it is gone or not ours to read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return b""
    try:
        return os.read(descriptor, limit)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}


def create_exclusively(path: Path, data: bytes) -> bool:
    """Make `path` with this content, whole; False where it is there already. Raises OSError.

    Exactly one process of all hosts makes it: by a hard link, which is atomic on shared file systems, too.
    """
    unique = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    temporary = path.with_name(f".claim-{unique}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        return _take(temporary, path, data)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _take(temporary: Path, target: Path, data: bytes) -> bool:
    try:
        os.link(temporary, target)
        return True
    except FileExistsError:
        # An NFS client that repeats a lost reply sees its own success as this error: the link count shows it.
        return os.stat(temporary).st_nlink == 2 and target.read_bytes() == data
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:  # a file system without hard links
        with open(target, "xb") as file:
            file.write(data)
        return True
    except FileExistsError:
        return False


def make_shared(folder: Path) -> None:
    """Make `folder`, writable for all who may write to its parent; users cannot remove each other's files (sticky).

    It gives no new right: who may write to the parent could replace the folder. Raises OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    above, own = os.stat(folder.parent), os.stat(folder)
    rights = stat.S_IMODE(above.st_mode) & 0o077
    if rights & 0o020 and own.st_gid != above.st_gid:
        try:
            os.chown(folder, -1, above.st_gid)
        except OSError:  # we are not of that group
            rights &= 0o007
    if rights & 0o022:
        os.chmod(folder, 0o700 | rights | stat.S_ISVTX | above.st_mode & stat.S_ISGID)


def open_regular(path: str | Path, *, follow: bool = True) -> int:
    """A descriptor to read a regular file. Raises OSError, in words, where it is anything else.

    To open a pipe or a terminal may block, and to open some devices has effects.
    """
    _refuse_others(os.stat(path, follow_symlinks=follow), path)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags | (0 if follow else os.O_NOFOLLOW))
    try:
        _refuse_others(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_others(found: os.stat_result, path: str | Path) -> None:
    for is_it, number, what in (
        (stat.S_ISDIR, errno.EISDIR, "it is a folder"),
        (stat.S_ISLNK, errno.ELOOP, "it is a symbolic link"),
        (stat.S_ISFIFO, errno.EINVAL, "it is a pipe, not a file"),
        (stat.S_ISSOCK, errno.EINVAL, "it is a socket, not a file"),
    ):
        if is_it(found.st_mode):
            raise OSError(number, what, str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a device, not a file", str(path))


def read_own(path: str | Path, limit: int = OWN_BYTES) -> bytes:
    """A regular file of this user, not through a link. Raises OSError: PermissionError where it is another user's."""
    descriptor = open_regular(path, follow=False)
    with open(descriptor, "rb") as file:
        if not is_ours(os.fstat(descriptor), Path(path).parent):
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
        return file.read(limit)


def read_token(path: Path, *, shared: bool = False) -> str:
    """A job's token; empty where the file is. Raises OSError where others could have made it, or can read it.

    `shared`: a file that a person named. It may be somebody else's, and read by a group, but not written by others.
    """
    descriptor = open_regular(path, follow=shared)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not shared and not is_ours(found, path.parent):
            raise PermissionError(
                errno.EPERM,
                f"it belongs to user {found.st_uid}, not to user {os.geteuid()}, whose job this is",
                str(path),
            )
        if found.st_mode & (0o022 if shared else 0o077):
            verb = "changed" if found.st_mode & 0o022 else "read"
            raise PermissionError(errno.EPERM, f"others may have {verb} it: remove it, or `chmod 600` it", str(path))
        return file.read(SECRET_BYTES).decode("ascii", errors="replace").strip()


def is_ours(found: os.stat_result, folder: Path) -> bool:
    """Whether a file found in `folder` was made by this user, also on a file server that maps root to another user."""
    if found.st_uid == os.geteuid():
        return True
    if os.geteuid() != 0:
        return False
    try:
        return found.st_uid == _owner_of_new(folder)
    except OSError:
        return False


def _owner_of_new(folder: Path) -> int:
    """The owner of files that root makes there (`nobody` on NFS with root_squash)."""
    probe = folder / f".owner-{os.getpid()}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(probe)


def version_of(name: str, path: list[str]) -> str:
    """Version of an installed distribution, by the name of its folder along `path`; empty when it is not there."""
    for folder in path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for one in names:
            stem, _, kind = one.rpartition(".")
            stem, _, version = stem.partition("-")
            if kind in ("dist-info", "egg-info") and stem.lower() == name and version:
                return version.partition("-py")[0]
    return ""


def entry_points(group: str, path: list[str]) -> list[str]:
    """The targets (`module:name`) of an entry-point group, by the files of what is installed along `path`.

    As `importlib.metadata` has them, which takes 3 MiB and 13 ms. The first of two distributions with one name counts.
    """
    found: dict[str, list[str]] = {}
    for folder in path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for name in names:
            stem, _, kind = name.rpartition(".")
            if kind in ("dist-info", "egg-info") and stem.partition("-")[0].lower() not in found:
                found[stem.partition("-")[0].lower()] = _targets(f"{folder or '.'}/{name}/entry_points.txt", group)
    return [target for targets in found.values() for target in targets]


def _targets(path: str, group: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    section, targets = "", []
    for line in map(str.strip, lines):
        if line.startswith("["):
            section = line.strip("[] ")
        elif section == group and "=" in line and not line.startswith(("#", ";")):
            targets.append(line.partition("=")[2].partition("[")[0].strip())
    return targets
