"""Where the files of a node and of a job are, and what some of them hold."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from diagnosis.signals import Frozen
from supervisor.files import start_time, write_atomically

__all__ = ["JOBS", "LocalPaths", "incidents_folder", "local_dir", "start_time", "write_atomically"]


JOBS: Final = "unbroken-jobs"
"""Where job folders are by default."""


def incidents_folder(ledger: Path | None, job_dir: Path) -> Path:
    """Where past incidents are kept: with the ledger of all jobs, else with the jobs beside this one, else with it."""
    if ledger is not None:
        return ledger
    return job_dir.parent if job_dir.parent.name == JOBS else job_dir


RESERVE_BYTES = 128 * 1024

START: Final = Path(__file__).resolve().parent.parent / "unbroken.py"
"""Where each of our processes begins."""


class RequeueRecord(Frozen, frozen=True, kw_only=True):
    """`requeue.json` of the job folder: which node requeued the job while there was no controller to journal it."""

    job: str
    """The scheduler's id."""
    requeues: int
    """How often the job had been requeued before, as in `JobSpec`."""
    by: str
    lost: str
    """The first node, as the scheduler calls it."""
    at: float
    lost_at: float
    """Since when `by` had no controller. Unix times."""

    def write(self, job_dir: Path) -> None:
        """Raises OSError."""
        write_atomically(job_dir / "requeue.json", msgspec.json.encode(self))

    @staticmethod
    def forget(job_dir: Path) -> None:
        """Remove the record: the scheduler did not requeue the job. Raises OSError."""
        (job_dir / "requeue.json").unlink(missing_ok=True)

    @classmethod
    def read(cls, job_dir: Path) -> RequeueRecord | None:
        try:
            return msgspec.json.decode((job_dir / "requeue.json").read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None


class Fence(Frozen, frozen=True, kw_only=True):
    """`fence.json` of the job folder: the newest attempt. Nodes without a controller kill their ranks of older ones."""

    epoch: int
    attempt: int

    def write(self, job_dir: Path) -> None:
        """Raises OSError."""
        write_atomically(job_dir / "fence.json", msgspec.json.encode(self))

    @classmethod
    def read(cls, job_dir: Path) -> Fence | None:
        """Raises OSError; None when there is none."""
        try:
            return msgspec.json.decode((job_dir / "fence.json").read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError):
            return None


class LocalPaths:
    """The files of a node's local folder (docs/node-files.md lists them)."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.plan = self.folder / "node.json"
        self.front = self.folder / "front.json"
        self.keeper_socket = self.folder / "keeper.sock"
        self.agent_socket = self.folder / "agent.sock"
        self.controller_socket = self.folder / "controller.sock"
        self.notices = self.folder / "notices.log"
        self.outcome = self.folder / "outcome.json"
        self.reserve = self.folder / "reserve"
        self.launcher_exit = self.folder / "launcher.exit"
        self.agent_state = self.folder / "agent.json"
        self.health = self.folder / "health.json"
        self.probe_state = self.folder / "probes"
        self.of_all_jobs = self.folder.parent.parent
        """Above the local folders of all jobs of the user on this node."""

    def set_reserve(self) -> None:
        """Reserve a little of the disk for the outcome, should it become full. Raises OSError."""
        descriptor = os.open(self.reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
        finally:
            os.close(descriptor)

    def write_surely(self, path: Path, data: bytes) -> None:
        """As `write_atomically`; on a full disk it uses the reserve. Raises OSError."""
        try:
            write_atomically(path, data, 0o600)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.reserve.exists():
                raise
            self.reserve.unlink(missing_ok=True)
            write_atomically(path, data, 0o600)

    def attempt(self, number: int) -> Path:
        return self.folder / "attempts" / str(number)

    def streams(self, attempt: int) -> Path:
        return self.attempt(attempt) / "streams.json"

    def rank_file(self, attempt: int, rank: int, suffix: str) -> Path:
        """`suffix`: out, err, exit, beacon, error.json or sock."""
        return self.attempt(attempt) / f"rank{rank}.{suffix}"


def daemon_argv(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules; it is found whatever PYTHONPATH and the working folder hold."""
    return [sys.executable, str(START), "-m", module, *arguments]


def daemon_env(environment: Mapping[str, str], cwd: Path) -> dict[str, str]:
    """The user's environment for a process in another folder: relative entries of PYTHONPATH made absolute."""
    path = environment.get("PYTHONPATH", "")
    entries = [str(cwd / entry) for entry in path.split(os.pathsep)] if path else []
    return {**environment, **({"PYTHONPATH": os.pathsep.join(entries)} if entries else {})}


def local_dir(job: str, node: str) -> Path:
    """The default local folder. Unix socket paths below it must fit in 107 bytes: the front checks."""
    root = os.environ.get("UNBROKEN_LOCAL_DIR") or f"{tempfile.gettempdir()}/unbroken-{os.getuid()}"
    return Path(root) / job / node
