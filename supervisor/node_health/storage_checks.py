"""The checks of file systems and how a look at them is judged. Pure; `storage.py` looks."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from diagnosis.health import Check, Level, Reading, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.mount_asker import Answer, Space
from supervisor.node_health.mounts import Mount, automounted, mount_at

GIB: Final = 1 << 30

# fmt: off
PRESENT = Check(id="mount_present", failure_class=FailureClass.STORAGE_ERROR, scope="node",
    when="periodic", calm_looks=1,
    what="a file system that the job or the site needs is not mounted",
    source="/proc/self/mountinfo",
    threshold="expected by the site, or held the job's folders earlier in this boot, and is not mounted now")
WRITABLE = Check(id="mount_writable", failure_class=FailureClass.STORAGE_ERROR, scope="node",
    when="periodic", calm_looks=1,
    what="a file system became read-only",
    source="/proc/self/mountinfo",
    threshold="read-only now, and was writable earlier in this boot, or made so by the kernel after an error")
ANSWERS = Check(id="mount_answers", failure_class=FailureClass.STORAGE_ERROR, scope="node",
    when="periodic", calm_looks=1,
    what="a file system does not answer",
    source="statvfs in a child process",
    threshold="no answer within {unknown_s} s: unknown; within {hang_s} s (before a job: {unknown_s} s), or an error",
    limits={"unknown_s": 10, "hang_s": 30})
SPACE = Check(id="disk_space", failure_class=FailureClass.DISK_FULL, scope="storage", when="periodic", calm_looks=1,
    what="a file system is nearly full",
    source="statvfs",
    # A share alone is no measure: 5 % of a large shared file system is room for months. Critical is only what is about
    # to fail: it counts as the cause of a failure that nothing else explains.
    threshold="less than {few_checkpoints} more of the job's checkpoints fit, or over {warning_percent} % used"
    " with less than {warning_gib} GiB free: warning; less than {least_checkpoints}, or over {critical_percent} %"
    " with less than {critical_gib} GiB: critical; beside a job a mount that it does not use: at most a warning",
    limits={"few_checkpoints": 2, "least_checkpoints": 1, "warning_percent": 85, "critical_percent": 95,
        "warning_gib": 50, "critical_gib": 1})
INODES = Check(id="disk_inodes", failure_class=FailureClass.DISK_FULL, scope="storage", when="periodic", calm_looks=1,
    what="a file system has few inodes left",
    source="statvfs",
    threshold="over {warning_percent} % used with less than {warning_free} free, critical over {critical_percent} %"
    " with less than {critical_free}; beside a job as for disk_space",
    limits={"warning_percent": 85, "critical_percent": 95, "warning_free": 500_000, "critical_free": 10_000})
WRITE = Check(id="storage_write", failure_class=FailureClass.STORAGE_ERROR, scope="node", when="preflight",
    what="a small file cannot be written, read and removed",
    source="open, write, fsync, read, unlink in a child process",
    threshold="an error, or not done within {seconds} s",
    limits={"seconds": 10})
# fmt: on
CHECKS: Final = (PRESENT, WRITABLE, ANSWERS, SPACE, INODES, WRITE)
_OUT_OF_SIGHT: Final = {errno.EACCES, errno.EPERM}
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT}
_LEVELS: Final[tuple[Level, ...]] = ("critical", "warning")
_EVERYBODYS: Final = ("/", "/tmp", "/var", "/var/tmp")
"""Mount points that every program may write to, whether or not it says so."""


class Target(NamedTuple):
    """One mount, and why it is looked at."""

    mount: Mount
    path: str
    """What is asked for: a folder of the job (quotas of folders count then), else the mount point."""
    role: str
    """`checkpoints`, `job`, `expected`, `network` or `local`."""

    @property
    def needed(self) -> bool:
        return self.role in ("checkpoints", "job", "expected")


def judge_present(mounts: Sequence[Mount], expected: Sequence[str], gone: Mapping[str, str]) -> list[Reading]:
    """`gone`: mount point that held a folder of the job -> what was there (`lustre`)."""
    readings = []
    for point in expected:
        mount = mount_at(point, mounts)
        if mount is not None:
            readings.append(healthy(PRESENT.id, point, f"{mount.fstype} from {clean_text(mount.source, 100)}"))
        elif automounted(point, mounts):
            readings.append(unknown(PRESENT.id, "its automounter waits until it is used", point))
        else:
            readings.append(unhealthy(PRESENT.id, f"{point} is not mounted, and the site expects it", point))
    for point, fstype in gone.items():
        text = f"{point} ({fstype}) is not mounted any more, and folders of the job were on it"
        readings.append(unhealthy(PRESENT.id, text, point))
    return readings or [not_applicable(PRESENT.id, "the site expects no mounts, and the job's are there")]


def judge_writable(target: Target, was_writable: bool) -> Reading:
    mount = target.mount
    if not mount.read_only:
        return healthy(WRITABLE.id, mount.point)
    what = f"{mount.point} ({mount.fstype}) is read-only"
    if mount.failed:
        return unhealthy(WRITABLE.id, f"{what}: the kernel made it so after an error", mount.point)
    if was_writable:
        return unhealthy(WRITABLE.id, f"{what} and was writable earlier in this boot", mount.point)
    return not_applicable(WRITABLE.id, "it was mounted read-only", mount.point)


def judge_answer(target: Target, answer: Answer, in_use: bool) -> Reading:
    """`in_use`: there is a job, so that a mount it does not use is of less weight."""
    point = target.mount.point
    if answer.lost:
        return unknown(ANSWERS.id, "the process that asked it ended", point)
    if not answer.error:
        return healthy(ANSWERS.id, point)
    if answer.error in _OUT_OF_SIGHT:
        if target.mount.fstype.startswith("fuse."):
            return not_applicable(ANSWERS.id, "it belongs to another user", point)
        return unknown(ANSWERS.id, "this user may not look into it", point)
    if answer.error == errno.ENOENT:
        return unknown(ANSWERS.id, "another mount hides it", point)
    text = f"{point} ({target.mount.fstype}) answers with an error: {os.strerror(answer.error)}"
    return unhealthy(ANSWERS.id, text, point, "warning" if in_use and not target.needed else "critical")


def judge_silence(target: Target, open_s: float, limit_s: float, wchan: str, in_use: bool) -> Reading:
    """A question that is open for `open_s` seconds, longer than anything should take."""
    point = target.mount.point
    where = f" (its thread waits in {wchan})" if wchan else ""
    text = f"{point} ({target.mount.fstype}) has not answered for {open_s:.0f} s{where}"
    if open_s < limit_s:
        return unknown(ANSWERS.id, text, point)
    level: Level = "warning" if in_use and not target.needed else "critical"
    return unhealthy(ANSWERS.id, text, point, level, values={"open_s": round(open_s, 1)})


def judge_space(
    target: Target, space: Space, checkpoint_bytes: int, limits: Mapping[str, float], in_use: bool = False
) -> Reading:
    """`in_use`: there is a job, so that a mount it does not use is of less weight: it did not fail for want of that."""
    point, free = target.mount.point, space.free_bytes
    if not space.size_bytes or target.mount.read_only:
        return not_applicable(SPACE.id, "it has no size, or nothing is written to it", point)
    if point == "/dev/shm":
        return not_applicable(SPACE.id, "it is memory", point)
    used = 100 * (1 - free / space.size_bytes)
    values = {"free_bytes": free, "size_bytes": space.size_bytes, "used_percent": round(used, 2)}
    text = f"{point}: {_bytes(free)} free, {used:.0f} % used"
    if target.role == "checkpoints" and checkpoint_bytes > 0:
        fit = free / checkpoint_bytes
        values["checkpoints_left"] = round(fit, 2)
        text = f"{point}: {fit:.1f} checkpoints of {_bytes(checkpoint_bytes)} fit ({_bytes(free)} free)"
        if fit < limits["few_checkpoints"]:
            level: Level = "critical" if fit < limits["least_checkpoints"] else "warning"
            return unhealthy(SPACE.id, text, point, level, values=values)
    level_now = _weighed(_worst(used, free / GIB, "gib", limits), target, in_use)
    return judged(SPACE.id, level_now, text, point, values=values)


def judge_inodes(target: Target, space: Space, limits: Mapping[str, float], in_use: bool = False) -> Reading:
    """`in_use`: as for `judge_space`."""
    point = target.mount.point
    if space.files <= 0 or target.mount.read_only or space.files_available > space.files:
        return not_applicable(INODES.id, "it does not count inodes", point)
    used = 100 * (1 - space.files_available / space.files)
    text = f"{point}: {space.files_available} inodes free, {used:.0f} % used"
    values = {"free_inodes": space.files_available, "used_percent": round(used, 2)}
    level = _weighed(_worst(used, space.files_available, "free", limits), target, in_use)
    return judged(INODES.id, level, text, point, values=values)


def _weighed(level: Level | None, target: Target, in_use: bool) -> Level | None:
    elsewhere = in_use and not target.needed and target.mount.point not in _EVERYBODYS
    return "warning" if level and elsewhere else level


def _worst(used_percent: float, left: float, name: str, limits: Mapping[str, float]) -> Level | None:
    for level in _LEVELS:
        if used_percent >= limits[f"{level}_percent"] and left < limits[f"{level}_{name}"]:
            return level
    return None


def judge_write(path: str, answer: Answer | None, seconds: float) -> Reading:
    if answer is None:
        return unhealthy(WRITE.id, f"a small file in {path} was not written, read and removed in {seconds:g} s", path)
    if answer.lost:
        return unknown(WRITE.id, "the process that tried ended", path)
    if not answer.error:
        return healthy(WRITE.id, path)
    if answer.error in _OUT_OF_SIGHT:
        return unknown(WRITE.id, "this user may not write there", path)
    why = "no space or quota left" if answer.error in _NO_ROOM else os.strerror(answer.error)
    return unhealthy(WRITE.id, f"a small file cannot be written in {path}: {why}", path)


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} PiB"
