"""The node's local folder: made for this user alone, held by a lock while its `unbroken run` lives, tidied up later.

Who holds a folder is told by the lock (flock), not by process ids: they mean nothing in another container or on another
host. On a network file system a lock may hold on one host only, so each boot of a host has folders of its own there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import time
from pathlib import Path
from typing import NamedTuple

from supervisor.errors import LaunchRefused
from supervisor.node_health.storage import mount_of, parse_mountinfo
from supervisor.paths import LocalPaths, local_dir

SOCKET_PATH_LIMIT = 107
_LONGEST_SOCKET = "attempts/99999/rank999999.sock"
LOCK_WAIT_S = 2.0
"""A process that tidies up holds the locks of dead jobs for a moment."""
PREVIOUS = ".previous"


class LocalFolder(NamedTuple):
    """A local folder that is ours until `lock` is closed."""

    paths: LocalPaths
    lock: int
    """-1: this file system has no locks."""


def take_local_folder(name: str, job_dir: Path, node: str) -> LocalFolder:
    """The node's local folder, empty; what an earlier run left in it is kept once, as `<node>.previous`.

    Raises LaunchRefused where it is another user's, or open to others, or where its run still lives.
    """
    digest = hashlib.sha256(str(job_dir).encode()).hexdigest()[:8]
    root = local_dir("", "").absolute()
    node += _mark(root)
    folder = local_dir(f"{name}-{digest}", node).absolute()
    if len(os.fsencode(folder)) + len(_LONGEST_SOCKET) + 1 > SOCKET_PATH_LIMIT:
        short = hashlib.sha256(f"{folder}".encode()).hexdigest()[:12]
        folder = Path(f"/tmp/unbroken-{os.getuid()}/{short}/n")
    try:
        _own(folder.parent.parent, shared=True)
        _own(folder.parent)
        lock = _lock(folder, LOCK_WAIT_S)
        if lock is None:
            raise LaunchRefused(f"this job runs already on this node ({folder}): give --name or --node-name")
        try:
            if folder.exists():
                previous = folder.with_name(f"{folder.name}{PREVIOUS}")
                shutil.rmtree(previous, ignore_errors=True)
                folder.rename(previous)
            _own(folder)
        except OSError:
            release(lock)
            raise
    except OSError as error:
        raise LaunchRefused(
            f"the local folder {folder} cannot be made ({error.strerror}): set UNBROKEN_LOCAL_DIR to one that can"
        ) from error
    return LocalFolder(LocalPaths(folder), lock)


def _own(folder: Path, *, shared: bool = False) -> None:
    """Make `folder`, for this user alone. Sockets in it start processes: nobody else may own it, or put others there.

    `shared`: the one above all jobs. It may be root's, and read by others, and written to where none can remove
    another's (sticky, as /tmp).
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = os.lstat(folder)
    how = "set UNBROKEN_LOCAL_DIR to your own"
    if stat.S_ISLNK(found.st_mode):
        raise LaunchRefused(f"the local folder {folder} is a link: set UNBROKEN_LOCAL_DIR to the folder behind it")
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in ({os.getuid(), 0} if shared else {os.getuid()}):
        raise LaunchRefused(f"the local folder {folder} belongs to somebody else: {how}")
    others = found.st_mode & (0o022 if shared else 0o077)
    if others and not (shared and found.st_mode & stat.S_ISVTX):
        mode = "go-w" if shared else "700"
        raise LaunchRefused(
            f"the local folder {folder} is open to other users ({found.st_mode & 0o7777:o}): `chmod {mode} {folder}`, "
            f"once you have seen that what is in it is yours, or {how}"
        )


def _mark(root: Path) -> str:
    """Distinguishes this boot of this host from others that share the folders; empty on a file system of its own."""
    try:
        mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text(errors="replace"))
        mount = mount_of(os.path.realpath(root), mounts)
        if mount is not None and not mount.network:
            return ""
        return "-" + Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return ""


# ----- locks -----


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name.removesuffix(PREVIOUS)}.lock")


def _lock(folder: Path, wait_s: float = 0.0) -> int | None:
    """Lock the folder: a descriptor; -1 without locks; None where another process holds it. Raises OSError."""
    path, deadline = _lock_file(folder), time.monotonic() + wait_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(descriptor, path):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.05)
        except OSError:
            os.close(descriptor)
            return -1
        os.close(descriptor)


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether the file is still in its place: a process that tidies up may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def release(lock: int) -> None:
    if lock >= 0:
        os.close(lock)


def is_held(folder: Path) -> bool:
    """Whether a process holds the local folder, or may hold it, where there are no locks."""
    if not _lock_file(folder).exists():
        return True
    try:
        lock = _lock(folder)
    except OSError:
        return True
    if lock is not None:
        release(lock)
    return lock is None or lock < 0


# ----- afterwards -----


def remove_old_jobs(folder: Path, keep: int = 5) -> None:
    """Delete what earlier jobs left beside `folder`'s job: all but the newest `keep` that are provably over."""
    root, mark = folder.parent.parent, _mark(folder)
    jobs = []
    for job in root.iterdir():
        nodes = [path.parent for path in job.glob("*/node.json")]
        ours = all(node.name.removesuffix(PREVIOUS).endswith(mark) for node in nodes)
        if job != folder.parent and nodes and ours and not any(map(is_held, nodes)):
            jobs.append((max(node.stat().st_mtime for node in nodes), job, nodes))
    for _, job, nodes in sorted(jobs)[: -keep or None]:
        _remove(job, nodes)


def _remove(job: Path, nodes: list[Path]) -> None:
    """Delete a job's folder with all its locks held, so that no run starts in it meanwhile."""
    held: list[int] = []
    try:
        for name in {node.name.removesuffix(PREVIOUS) for node in nodes}:
            lock = _lock(job / name)
            if lock is None or lock < 0:
                return
            held.append(lock)
        shutil.rmtree(job, ignore_errors=True)
    except OSError:
        return
    finally:
        for lock in held:
            with contextlib.suppress(OSError):
                release(lock)
