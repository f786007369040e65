"""File systems: there, writable, answering, and with room for the next checkpoints.

The mount table is read; nothing else of a file system is touched here. What may block for ever (`statvfs`, links) is
asked by a child process (`mount_asker.py`), and an answer that does not come is a result like any other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from diagnosis.health import Reading, not_applicable, unknown
from diagnosis.signals import clean_text
from supervisor.node_health import storage_checks as checks
from supervisor.node_health.contract import Moment, Place
from supervisor.node_health.mount_asker import Asker, Kind
from supervisor.node_health.mounts import Mount, automounted, mount_at, mount_of, read_mounts
from supervisor.node_health.network.counters import recall
from supervisor.node_health.storage_checks import ANSWERS, INODES, SPACE, WRITE, Target

MOUNTS: Final = 24
"""So many mounts are looked at; those of the job first."""
JOB_PATHS: Final = 16
PROMPT_S: Final = 1.0
"""Most file systems answer within milliseconds."""
_NOT_LIVE: Final = "a captured tree has no file systems that could be asked"


def targets(
    mounts: Sequence[Mount], place: Place, real: Mapping[str, str], writable: Sequence[str] = ()
) -> list[Target]:
    """The mounts to look at, one for each file system, the job's first.

    `real`: paths of the job without links. `writable`: mount points that could be written to earlier in this boot.
    """
    found: dict[str, Target] = {}

    def add(mount: Mount | None, path: str, role: str) -> None:
        if mount is not None and mount.fstype != "autofs":
            found.setdefault(mount.device, Target(mount, path or mount.point, role))

    for role, paths in (("checkpoints", place.job.checkpoint_dirs), ("job", place.job.folders)):
        for path in paths[:JOB_PATHS]:
            add(mount_of(real.get(path, path), mounts), real.get(path, path), role)
    for point in place.site.expect.mounts:
        add(mount_at(point, mounts), "", "expected")
    for point in ("/", "/tmp", "/dev/shm"):
        add(mount_at(point, mounts), "", "local")
    for mount in mounts:
        if mount.network:
            add(mount, "", "network")
        elif mount.failed or (mount.disk and not mount.point.startswith("/boot")):
            add(mount, "", "local")
    for point in writable:
        add(mount_at(point, mounts), "", "local")
    return list(found.values())[:MOUNTS]


class Silence(NamedTuple):
    """A thread of a child that waits for a mount."""

    pid: int
    tid: int
    start: int
    """Start of the thread in clock ticks after boot: with its id it names it for good."""
    since: float
    """Monotonic seconds, which all processes of a boot share."""


def start_ticks(place: Place, silence: Silence) -> int:
    """Of the thread as it is now; 0 when it has ended."""
    stat = place.text(f"proc/{silence.pid}/task/{silence.tid}/stat", 1024) or ""
    fields = stat[stat.rfind(")") + 1 :].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else 0


class StorageProbe:
    name = "storage"
    checks = checks.CHECKS
    every_s = 60.0
    deadline_s = 50.0

    def __init__(self, asker: Asker | None = None) -> None:
        self.doing = ""
        self._asker = asker or Asker()
        self._real: dict[str, str] = {}
        self._looked = False
        self._seen: dict[str, tuple[str, str, str]] | None = None
        """Mount point -> file system, `rw` or `ro`, `job` or empty, as seen in this boot."""
        self._left: dict[str, Silence] | None = None
        """Device -> what an earlier process asked and never heard of."""
        self._kept_silent: dict[str, int] = {}

    def look(self, place: Place, now: Moment) -> list[Reading]:
        del now  # questions are timed where they are asked
        mounts = read_mounts(place)
        if mounts is None:
            why = "the mount table cannot be read" if place.live else "the tree has no mount table that can be read"
            return [unknown(check.id, why) for check in self.checks]
        limits = place.limits(ANSWERS)
        soon = place.preflight or not self._looked
        patience_s = limits["unknown_s"] if soon else limits["hang_s"]
        if place.live:
            self._resolve(place, mounts, patience_s)
        if self._seen is None:
            self._seen = recall(place, "mounts", dict[str, tuple[str, str, str]])
        writable = [point for point, (_, state, _) in self._seen.items() if state == "rw"]
        found = targets(mounts, place, self._real, writable)
        readings = self._judge_table(place, mounts, found, self._seen)
        if place.live:
            readings += self._judge_answers(place, mounts, found, patience_s)
        else:
            readings += [not_applicable(check.id, _NOT_LIVE) for check in (ANSWERS, SPACE, INODES, WRITE)]
        self._looked = True
        judged = {reading.check for reading in readings}
        none = "there is no mount that it is about"
        return readings + [not_applicable(check.id, none) for check in self.checks if check.id not in judged]

    # ----- the table -----

    def _judge_table(
        self, place: Place, mounts: Sequence[Mount], found: Sequence[Target], seen: dict[str, tuple[str, str, str]]
    ) -> list[Reading]:
        before = dict(seen)
        job_paths = [self._real.get(path, path) for path in (*place.job.checkpoint_dirs, *place.job.folders)]
        gone = {}
        for point, (fstype, _, used) in before.items():
            inside = any(path == point or path.startswith(point.rstrip("/") + "/") for path in job_paths)
            if used and inside and mount_at(point, mounts) is None and not automounted(point, mounts):
                gone[point] = fstype
        readings = checks.judge_present(mounts, place.site.expect.mounts, gone)
        for target in found:
            fstype, state, used = before.get(target.mount.point, ("", "", ""))
            was_writable = state == "rw" and fstype == target.mount.fstype
            readings.append(checks.judge_writable(target, was_writable))
            job = "job" if target.role in ("checkpoints", "job") else used
            kept = "rw" if was_writable or not target.mount.read_only else "ro"
            seen[target.mount.point] = target.mount.fstype, kept, job
        if seen != before:
            for point in list(seen)[: -4 * MOUNTS]:  # containers come and go
                del seen[point]
            place.keep("mounts", seen)
        return readings

    # ----- the answers -----

    def _resolve(self, place: Place, mounts: Sequence[Mount], patience_s: float) -> None:
        """Follow the links in the job's paths, once for each: through them it may use another file system."""
        paths = [*place.job.checkpoint_dirs[:JOB_PATHS], *place.job.folders[:JOB_PATHS]]
        self._real = {path: real for path, real in self._real.items() if path in paths}
        fresh = [path for path in dict.fromkeys(paths) if path not in self._real]
        while fresh:
            silent = self._silent(place, mounts)
            batch: dict[str, str] = {}
            """Device -> the one path of it that is asked for now."""
            for path in fresh:
                mount = mount_of(path, mounts)
                if mount is not None and mount.device not in silent:
                    batch.setdefault(mount.device, path)
            for path in batch.values():
                self._asker.ask(f"real {path}", "real", path)
            self._collect(place, mounts, patience_s)
            for path in batch.values():
                answer = self._asker.answers.get(f"real {path}")
                if answer is not None and answer.space is not None:
                    self._real[path] = answer.space.real_path
            fresh = [path for path in fresh if path not in batch.values()] if batch else []

    def _judge_answers(
        self, place: Place, mounts: Sequence[Mount], found: Sequence[Target], patience_s: float
    ) -> list[Reading]:
        silent = self._silent(place, mounts)
        for target in found:
            if target.mount.device not in silent:
                kind: Kind = "stat" if target.path == target.mount.point else "real"
                self._asker.ask(target.mount.device, kind, target.path)
        self._collect(place, mounts, patience_s)
        silent = self._silent(place, mounts)
        readings = [
            reading
            for target in found
            for reading in self._judge_target(place, target, silent.get(target.mount.device))
        ]
        if place.preflight:
            readings += self._try_writing(place, mounts, silent)
        self._asker.clear()
        self._remember(place, self._silent(place, mounts))
        return readings

    def _silent(self, place: Place, mounts: Sequence[Mount]) -> dict[str, Silence]:
        """Device -> the open question to it: it is not asked another one.

        Also those that a station before this one left open: its child may still be there, stuck in the kernel.
        """
        if self._left is None:
            self._left = recall(place, "mounts_silent", dict[str, Silence])
        self._left = {device: one for device, one in self._left.items() if 0 < one.start == start_ticks(place, one)}
        found = dict(self._left)
        for question in self._asker.open.values():
            mount = mount_of(question.path, mounts)
            if mount is not None:
                silence = Silence(question.pid, question.tid, 0, question.since)
                found[mount.device] = silence._replace(start=start_ticks(place, silence))
        return found

    def _remember(self, place: Place, silent: Mapping[str, Silence]) -> None:
        pids = {device: one.pid for device, one in silent.items()}
        if pids != self._kept_silent:
            self._kept_silent = pids
            place.keep("mounts_silent", dict(silent))

    def _try_writing(self, place: Place, mounts: Sequence[Mount], silent: Mapping[str, Silence]) -> list[Reading]:
        seconds = place.limits(WRITE)["seconds"]
        asked: dict[str, str] = {}
        """Device -> the one folder of it that is written to."""
        for path in [*place.job.checkpoint_dirs[:JOB_PATHS], "/tmp"]:
            mount = mount_of(self._real.get(path, path), mounts)
            if mount is not None and mount.device not in silent:
                asked.setdefault(mount.device, path)
        for path in asked.values():
            self._asker.ask(f"write {path}", "write", path)
        self._collect(place, mounts, seconds)
        return [checks.judge_write(path, self._asker.answers.get(f"write {path}"), seconds) for path in asked.values()]

    def _collect(self, place: Place, mounts: Sequence[Mount], patience_s: float) -> None:
        self.doing = "statvfs"
        self._asker.collect(min(PROMPT_S, patience_s))
        if self._asker.open:
            self._remember(place, self._silent(place, mounts))  # we may be ended while we wait
            self._asker.collect(patience_s)
        self.doing = ""

    def _judge_target(self, place: Place, target: Target, silence: Silence | None) -> list[Reading]:
        in_use = bool(place.job.ranks)
        point = target.mount.point
        if silence is not None and not silence.tid:
            why = "the process that asks has not begun: the node is too busy, or its own files do not answer"
            return [unknown(check.id, why, point) for check in (ANSWERS, SPACE, INODES)]
        if silence is not None:
            limits = place.limits(ANSWERS)
            limit_s = limits["unknown_s"] if place.preflight else limits["hang_s"]
            wchan = (place.text(f"proc/{silence.pid}/task/{silence.tid}/wchan", 64) or "").strip()
            wchan = clean_text(wchan, 64) if wchan != "0" else ""
            reading = checks.judge_silence(target, time.monotonic() - silence.since, limit_s, wchan, in_use)
            return [reading, *(unknown(check.id, "it does not answer", point) for check in (SPACE, INODES))]
        answer = self._asker.answers.get(target.mount.device)
        if answer is None:
            why = self._asker.problem or "too many others do not answer"
            return [unknown(check.id, why, point) for check in (ANSWERS, SPACE, INODES)]
        readings = [checks.judge_answer(target, answer, in_use)]
        if answer.space is None:
            return readings + [unknown(check.id, "it gave no sizes", point) for check in (SPACE, INODES)]
        return [
            *readings,
            checks.judge_space(target, answer.space, place.job.checkpoint_bytes, place.limits(SPACE), in_use),
            checks.judge_inodes(target, answer.space, place.limits(INODES), in_use),
        ]
