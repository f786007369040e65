"""Target files: how Prometheus finds controllers and agents, whose ports are free ones, with `file_sd_configs`.

Each writes one file, replaced atomically, and removes it when the job has ended. A file that stays names a daemon that
did not end as it should, which is what the alerts on `up` are for. It goes when the same job begins anew, and when a
job that writes into the same folder starts a day later: who lives writes its file again every hour.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
from pathlib import Path
from typing import Final, Literal

import msgspec

from supervisor.files import make_shared, read_own, write_atomically
from supervisor.metrics.table import job_name
from supervisor.paths import JOBS
from supervisor.wire.peers import is_loopback

log = logging.getLogger("unbroken.metrics")

_ODD: Final = re.compile(r"[^A-Za-z0-9._-]+")

RETRY_S: Final = 60.0
"""After so long a file that could not be written is tried again."""
AGAIN_S: Final = 3600.0
"""Seconds after which a file is written again: its age shows which daemons live."""
STALE_S: Final = 24 * 3600.0
"""A file this old belongs to a daemon that was killed. It is kept until then, so that the alert can fire."""
ONLY_ON: Final = "unbroken_only_on"
"""Label of a target that no other host reaches: the alerts do not miss it where it was never reached."""
_NAME: Final = re.compile(r"\.?[A-Za-z0-9._-]+-[0-9a-f]{8}\..*(agent|controller)\.json(\.\d+)?")
"""Of a target file, or of one that was being written."""

Role = Literal["controller", "agent"]


def folders(job_dir: str, targets_dir: str) -> tuple[Path, ...]:
    """Where target files may be, the best place first: the folder of all jobs (`targets_dir`), else one beside all job
    folders where these are ours (`unbroken-jobs/targets`: one line of Prometheus finds them), else the job's own.
    """
    if targets_dir:
        return (Path(targets_dir),)
    folder = Path(os.path.abspath(job_dir))
    beside = (folder.parent / "targets",) if folder.parent.name == JOBS else ()
    return (*beside, folder / "targets")


class TargetFile:
    """The target file of one daemon. Nothing here raises: a missing target must not disturb the run."""

    def __init__(self, job_dir: str, targets_dir: str, role: Role, node: str = "") -> None:
        """`targets_dir`: of all jobs; may be empty."""
        self._role: Role = role
        self._node = node
        folder = os.path.realpath(job_dir)
        name = _ODD.sub("-", os.path.basename(folder))[:60]
        self._prefix = f"{name}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}."
        own = f"{self._prefix}{_ODD.sub('-', node) + '.' if node else ''}{role}.json"
        self._places = [place / own for place in folders(job_dir, targets_dir)]
        self.path = self._places[0]
        """Where it was written last, or will be."""
        self._removed = False

    def write(self, job: str, address: str, scheme: str = "http") -> bool:
        """`address`: `host:port`. False when it has to be tried again. To be called from a thread: the folder may be on
        a file system that hangs.
        """
        labels = {"job": job_name(job), "unbroken_role": self._role}
        if self._node:
            labels["node"] = self._node
        if scheme != "http":
            labels["__scheme__"] = scheme
        if is_loopback(address.rpartition(":")[0]):
            labels[ONLY_ON] = socket.gethostname()
        data = msgspec.json.encode([{"targets": [address], "labels": labels}]) + b"\n"
        for path in self._places:
            if self._removed:
                return True
            try:
                _put(path, data)
            except OSError as error:
                log.warning("the file that tells Prometheus of this %s cannot be written: %s", self._role, error)
                continue
            self.path = path
            return True
        return False

    def port(self) -> int:
        """The port that the last daemon of this name had; 0 when there was none."""
        for path in self._places:
            try:
                (group,) = msgspec.json.decode(read_own(path))
                return int(group["targets"][0].rpartition(":")[2])
            except (OSError, msgspec.DecodeError, ValueError, KeyError, TypeError, IndexError):
                continue
        return 0

    def tidy(self, *, anew: bool, now: float) -> None:
        """Remove what killed daemons have left: of any job what is a day old at `now` (Unix seconds), and all of this
        job where it begins `anew`: its agents write theirs when they connect.
        """
        for path, written_at in self._found():
            mine = path.name.lstrip(".").startswith(self._prefix)
            if written_at < now - STALE_S or (anew and mine):
                _unlink(path)

    def remove(self, *, all_of_job: bool = False) -> None:
        """The job has ended; `all_of_job`: the files of agents that are gone as well."""
        self._removed = True
        others = [path for path, _ in self._found() if path.name.startswith(self._prefix)] if all_of_job else []
        for path in dict.fromkeys([*self._places, *others]):
            _unlink(path)

    def _found(self) -> list[tuple[Path, float]]:
        """All target files in the folders of this one, with the time at which they were written."""
        found = []
        for place in self._places:
            try:
                entries = [entry for entry in os.scandir(place.parent) if _NAME.fullmatch(entry.name)]
            except OSError:
                continue  # nothing was ever written there
            for entry in entries:
                try:
                    found.append((Path(entry.path), entry.stat(follow_symlinks=False).st_mtime))
                except OSError:
                    continue  # gone meanwhile
        return found


def _put(path: Path, data: bytes) -> None:
    """Write `data`, or only its time where it is there already. Raises OSError."""
    try:
        if read_own(path) == data:
            os.utime(path)
            return
    except OSError:
        pass  # it is not there, or another user's
    make_shared(path.parent)
    write_atomically(path, data, 0o644)
    path.chmod(0o644)  # whatever the umask: Prometheus is another user


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except (NotADirectoryError, PermissionError):
        pass  # another user's: their next job removes it
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)
