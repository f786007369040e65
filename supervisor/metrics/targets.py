"""Target files: how Prometheus finds controllers and agents, whose ports are free ones, with `file_sd_configs`.

Each writes one file, replaced atomically, and removes it when the job has ended. A file that stays names a daemon that
did not end as it should, which is what the alerts on `up` are for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from supervisor.files import write_atomically
from supervisor.metrics.table import job_name

log = logging.getLogger("unbroken.metrics")

_ODD: Final = re.compile(r"[^A-Za-z0-9._-]+")
OFF: Final = frozenset({"0", "false", "no", "off"})

RETRY_S: Final = 60.0
"""After so long a file that could not be written is tried again."""

Role = Literal["controller", "agent"]


class MetricsOptions(NamedTuple):
    """The settings `[metrics]` as daemons get them: from the environment that the front gave them."""

    enabled: bool = True
    listen: str = ""
    targets_dir: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> MetricsOptions:
        return cls(
            enabled=environment.get("UNBROKEN_METRICS", "").strip().lower() not in OFF,
            listen=environment.get("UNBROKEN_METRICS_LISTEN", ""),
            targets_dir=environment.get("UNBROKEN_METRICS_TARGETS", ""),
        )

    def where(self, *, alone: bool) -> tuple[str, int]:
        """Host and port (0: any free one) for an agent; `alone`: of a job of one node. Raises ValueError."""
        text = self.listen or ("127.0.0.1" if alone else "0.0.0.0")
        host, _, port = text.rpartition(":") if ":" in text else (text, "", "0")
        if not port.isdigit() or int(port) > 65535:
            raise ValueError(f"metrics.listen = {self.listen!r}: expected HOST:PORT, for example 0.0.0.0:7462")
        return host.strip("[]") or "0.0.0.0", int(port)


class TargetFile:
    """The file of one daemon. Nothing here raises: Prometheus may miss us, the run may not."""

    def __init__(self, job_dir: str, targets_dir: str, role: Role, node: str = "") -> None:
        """`targets_dir`: of all jobs; empty: `targets` in the job folder."""
        self._role: Role = role
        self._node = node
        self._folder = Path(targets_dir) if targets_dir else Path(job_dir) / "targets"
        folder = os.path.realpath(job_dir)
        name = _ODD.sub("-", os.path.basename(folder))[:60]
        self._prefix = f"{name}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}."
        self.path = self._folder / f"{self._prefix}{f'{node}.' if node else ''}{role}.json"

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
        try:
            if self._removed:
                return True
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, msgspec.json.encode([{"targets": [address], "labels": labels}]) + b"\n")
            self.path.chmod(0o644)  # Prometheus is another user
        except OSError as error:
            log.warning("Prometheus cannot be told of this %s: %s", self._role, error)
            return False
        return True

    def port(self) -> int:
        """The port that the last daemon of this name had; 0 when there was none."""
        try:
            (group,) = msgspec.json.decode(self.path.read_bytes())
            return int(group["targets"][0].rpartition(":")[2])
        except (OSError, msgspec.DecodeError, ValueError, KeyError, TypeError, IndexError):
            return 0

    def remove(self, *, all_of_job: bool = False) -> None:
        """The job has ended; `all_of_job`: the files of agents that are gone as well."""
        self._removed = True
        paths = [self.path]
        if all_of_job:
            try:
                paths += [path for path in self._folder.iterdir() if path.name.startswith(self._prefix)]
            except OSError:
                pass  # nothing was ever written
        for path in dict.fromkeys(paths):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s stays behind: %s", path, error)
