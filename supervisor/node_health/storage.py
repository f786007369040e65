"""File systems: there, writable, answering, and with room for the next checkpoints.

The mount table is read; nothing else of a file system is touched here. What may block for ever (`statvfs`, links) is
asked by a child process (`Asker`, `mount_child.py`), and an answer that does not come is a result like any other.

One child for all mounts, one open question for each: a mount that does not answer is never asked again before it has.
The child stays while a question is open (it may not be killable) and still asks the others; with none it is let go, so
that between looks nothing of it is left.
"""

from __future__ import annotations

import errno
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from diagnosis.health import CheckResult, Level, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from supervisor.node_health.contract import Moment, ProbeContext, checks_of, recall

# --- the mount table

TABLE_LIMIT: Final = 1 << 20
"""A node with thousands of container mounts has a table of some hundred KiB."""
_NETWORK: Final = frozenset(
    "nfs nfs4 lustre gpfs wekafs weka beegfs ceph cifs smb3 glusterfs 9p afs orangefs pvfs2 panfs vastfs".split()
)
_LOCAL_FUSE: Final = tuple(
    (
        "fuse.lxcfs fuse.portal fuse.gvfsd fuse.snapfuse fuse.squashfuse fuse.fuse-overlayfs fuse.rootlesskit"
        " fuse.vmware- fuse.archivemount fuse.encfs fuse.gocryptfs fuse.unionfs fuse.mergerfs fuse.AppImage fuse.xrdp"
    ).split()
)
"""How the names of FUSE file systems without a server far away begin; all others are taken to have one."""
_JOURNALED: Final = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"}
_FAILED_OPTIONS: Final = {"emergency_ro", "shutdown"}
"""What ext4 says of itself since Linux 6.12 once an error made it stop."""


class Mount(NamedTuple):
    point: str
    device: str
    """`major:minor`: the same for every mount of one file system."""
    fstype: str
    source: str
    options: frozenset[str]
    """Of this mount."""
    super_options: frozenset[str]
    """Of the file system."""

    @property
    def read_only(self) -> bool:
        return "ro" in self.options or "ro" in self.super_options or bool(_FAILED_OPTIONS & self.super_options)

    @property
    def failed(self) -> bool:
        """Turned read-only by the kernel after an error: asked for read and write, and does not have it."""
        if _FAILED_OPTIONS & self.super_options:
            return True
        return self.fstype in _JOURNALED and "rw" in self.options and "ro" in self.super_options

    @property
    def disk(self) -> bool:
        """A file system of this node that is written to."""
        return self.fstype in _JOURNALED and not self.read_only

    @property
    def network(self) -> bool:
        """Whether a server far away answers for it."""
        if self.fstype.startswith("fuse."):
            return not self.fstype.startswith(_LOCAL_FUSE)
        return self.fstype in _NETWORK


def read_mounts(place: ProbeContext) -> list[Mount] | None:
    """None when there is no table to be read."""
    for path in ("proc/self/mountinfo", "proc/1/mountinfo"):
        text = place.text(path, TABLE_LIMIT)
        if text:
            return parse_mountinfo(text) or None  # there is always a root
    if place.live:
        return None
    text = place.text("proc/mounts", TABLE_LIMIT) or place.text("proc/self/mounts", TABLE_LIMIT)
    return (parse_mounts(text) or None) if text else None


def parse_mountinfo(text: str) -> list[Mount]:
    """proc(5): `36 35 98:0 /root /point rw,noatime [optional fields] - ext3 /dev/root rw,errors=continue`."""
    found = []
    for line in text.split("\n"):
        before, dash, after = line.partition(" - ")
        fields, more = before.split(" "), after.split(" ")
        if not dash or len(fields) < 6 or not more[0]:
            continue
        found.append(
            Mount(
                point=_unescaped(fields[4]),
                device=fields[2],
                fstype=more[0],
                source=_unescaped(more[1]) if len(more) > 1 else "",
                options=frozenset(fields[5].split(",")),
                super_options=frozenset(more[2].split(",")) if len(more) > 2 else frozenset(),
            )
        )
    return found


def parse_mounts(text: str) -> list[Mount]:
    """`/proc/mounts`, where a captured tree has no better: `/dev/root / ext4 rw,relatime 0 0`."""
    found = []
    for number, line in enumerate(text.split("\n")):
        fields = line.split(" ")
        if len(fields) >= 4:
            options = frozenset(fields[3].split(","))
            found.append(
                Mount(_unescaped(fields[1]), f"?:{number}", fields[2], _unescaped(fields[0]), options, options)
            )
    return found


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word) if "\\" in word else word


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that holds `path` (without following links); the last one at a point hides those before it."""
    best: Mount | None = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def mount_at(point: str, mounts: Sequence[Mount]) -> Mount | None:
    """What is mounted exactly there, but for an automounter that still waits."""
    at = point.rstrip("/") or "/"
    return next((mount for mount in reversed(mounts) if mount.point == at and mount.fstype != "autofs"), None)


def automounted(point: str, mounts: Sequence[Mount]) -> bool:
    """Whether an automounter has it: then it comes when it is used, and may go when it is not."""
    return any(
        mount.fstype == "autofs" and (point == mount.point or point.startswith(mount.point.rstrip("/") + "/"))
        for mount in mounts
    )


# --- the child process

CHILD: Final = Path(__file__).with_name("mount_child.py")
QUESTIONS: Final = 64
LINE_LIMIT: Final = 16 * 1024

Kind = Literal["stat", "real", "write"]


class MountSpace(NamedTuple):
    """What statvfs says, and what the path is without its links."""

    size_bytes: int
    free_bytes: int
    files: int
    files_available: int
    real_path: str


class MountAnswer(NamedTuple):
    error: int = 0
    """errno, 0 when it went well."""
    space: MountSpace | None = None
    lost: bool = False
    """The child ended before it could tell."""


class MountQuestion(NamedTuple):
    key: str
    path: str
    since: float
    """Monotonic."""
    pid: int
    tid: int = 0
    """Thread that waits; 0: it was not begun yet."""


class Asker:
    def __init__(self, child: Path = CHILD) -> None:
        self.open: dict[str, MountQuestion] = {}
        """Key -> the question that was not answered yet."""
        self.answers: dict[str, MountAnswer] = {}
        """Those since the last `clear`."""
        self.problem = ""
        """Why nothing can be asked."""
        self._path = child
        self._child: subprocess.Popen[bytes] | None = None
        self._numbers: dict[str, str] = {}
        self._count = 0
        self._rest = b""

    def ask(self, key: str, kind: Kind, path: str) -> None:
        """Ask unless a question of this key is open."""
        if key in self.open or len(self.open) >= QUESTIONS or not self._start():
            return
        assert self._child is not None
        assert self._child.stdin is not None
        self._count += 1
        number = str(self._count)
        try:
            self._child.stdin.write(f"{number} {kind} {os.fsencode(path).hex()}\n".encode())
            self._child.stdin.flush()
        except OSError:
            self._ended()
            return
        self._numbers[number] = key
        self.open[key] = MountQuestion(key, path, time.monotonic(), self._child.pid)

    def collect(self, patience_s: float) -> None:
        """Take answers until those to the questions that are still young are all there, or they are young no more."""
        while self._child is not None:
            now = time.monotonic()
            waits = [patience_s - (now - question.since) for question in self.open.values()]
            wait_s = max((left for left in waits if left > 0), default=0.0)
            if not self._read(wait_s) and wait_s <= 0:
                break
            if not self.open:
                break
        if not self.open:
            self._drop()

    def clear(self) -> None:
        self.answers.clear()

    def _start(self) -> bool:
        if self._child is not None:
            return True
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(self._path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
            )
        except OSError as error:
            self.problem = f"no process can be started to ask file systems: {error.strerror}"
            return False
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)
        self.problem, self._rest = "", b""
        return True

    def _read(self, wait_s: float) -> bool:
        """Take what the child says within `wait_s`; whether it said anything."""
        assert self._child is not None
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(0.0, wait_s) * 1000):
            return False
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._ended()
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:LINE_LIMIT]
        for line in lines:
            self._take(line.decode(errors="replace").split(" "))
        return True

    def _take(self, words: list[str]) -> None:
        number, what, *more = words
        key = self._numbers.get(number)
        question = self.open.get(key) if key is not None else None
        if key is None or question is None:
            return
        if what == "began":
            self.open[key] = question._replace(tid=int(more[0]))
            return
        del self._numbers[number], self.open[key]
        if what == "error":
            self.answers[key] = MountAnswer(error=int(more[0]))
        elif len(more) == 5:
            size, free, files, files_available = map(int, more[:4])
            real_path = os.fsdecode(bytes.fromhex(more[4]))
            self.answers[key] = MountAnswer(space=MountSpace(size, free, files, files_available, real_path))
        else:
            self.answers[key] = MountAnswer()

    def _ended(self) -> None:
        """The child is gone, and with it what it was asked."""
        for key in self.open:
            self.answers[key] = MountAnswer(lost=True)
        self.open.clear()
        self._drop()

    def _drop(self) -> None:
        """Close its standard input, which ends it."""
        child, self._child = self._child, None
        self._numbers.clear()
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was not written yet cannot be any more
                pass
        try:
            child.wait(1.0)
        except subprocess.TimeoutExpired:
            pass  # subprocess itself looks after it when the next one is started


GIB: Final = 1 << 30

PRESENT, WRITABLE, ANSWERS, SPACE, INODES, WRITE = CHECKS = checks_of("storage")
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


def judge_present(mounts: Sequence[Mount], expected: Sequence[str], gone: Mapping[str, str]) -> list[CheckResult]:
    """`gone`: mount point that held a folder of the job -> what was there (`lustre`)."""
    results = []
    for point in expected:
        mount = mount_at(point, mounts)
        if mount is not None:
            results.append(healthy(PRESENT.id, point, f"{mount.fstype} from {clean_text(mount.source, 100)}"))
        elif automounted(point, mounts):
            results.append(unknown(PRESENT.id, "its automounter waits until it is used", point))
        else:
            results.append(unhealthy(PRESENT.id, f"{point} is not mounted, and the site expects it", point))
    for point, fstype in gone.items():
        text = f"{point} ({fstype}) is not mounted any more, and folders of the job were on it"
        results.append(unhealthy(PRESENT.id, text, point))
    return results or [not_applicable(PRESENT.id, "the site expects no mounts, and the job's are there")]


def judge_writable(target: Target, was_writable: bool) -> CheckResult:
    mount = target.mount
    if not mount.read_only:
        return healthy(WRITABLE.id, mount.point)
    what = f"{mount.point} ({mount.fstype}) is read-only"
    if mount.failed:
        return unhealthy(WRITABLE.id, f"{what}: the kernel made it so after an error", mount.point)
    if was_writable:
        return unhealthy(WRITABLE.id, f"{what} and was writable earlier in this boot", mount.point)
    return not_applicable(WRITABLE.id, "it was mounted read-only", mount.point)


def judge_answer(target: Target, answer: MountAnswer, in_use: bool) -> CheckResult:
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


def judge_silence(target: Target, open_s: float, limit_s: float, wchan: str, in_use: bool) -> CheckResult:
    """A question that is open for `open_s` seconds, longer than anything should take."""
    point = target.mount.point
    where = f" (its thread waits in {wchan})" if wchan else ""
    text = f"{point} ({target.mount.fstype}) has not answered for {open_s:.0f} s{where}"
    if open_s < limit_s:
        return unknown(ANSWERS.id, text, point)
    level: Level = "warning" if in_use and not target.needed else "critical"
    return unhealthy(ANSWERS.id, text, point, level, values={"open_s": round(open_s, 1)})


def judge_space(
    target: Target, space: MountSpace, checkpoint_bytes: int, limits: Mapping[str, float], in_use: bool = False
) -> CheckResult:
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


def judge_inodes(target: Target, space: MountSpace, limits: Mapping[str, float], in_use: bool = False) -> CheckResult:
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


def judge_write(path: str, answer: MountAnswer | None, seconds: float) -> CheckResult:
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


MOUNTS: Final = 24
"""So many mounts are looked at; those of the job first."""
JOB_PATHS: Final = 16
PROMPT_S: Final = 1.0
"""Most file systems answer within milliseconds."""
_NOT_LIVE: Final = "a captured tree has no file systems that could be asked"


def targets(
    mounts: Sequence[Mount], place: ProbeContext, real: Mapping[str, str], writable: Sequence[str] = ()
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


class MountSilence(NamedTuple):
    """A thread of a child that waits for a mount."""

    pid: int
    tid: int
    start: int
    """Start of the thread in clock ticks after boot: with its id it names it for good."""
    since: float
    """Monotonic seconds, which all processes of a boot share."""


def start_ticks(place: ProbeContext, silence: MountSilence) -> int:
    """Of the thread as it is now; 0 when it has ended."""
    stat = place.text(f"proc/{silence.pid}/task/{silence.tid}/stat", 1024) or ""
    fields = stat[stat.rfind(")") + 1 :].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else 0


class StorageProbe:
    name = "storage"
    checks = CHECKS
    every_s = 60.0
    deadline_s = 50.0

    def __init__(self, asker: Asker | None = None) -> None:
        self.doing = ""
        self._asker = asker or Asker()
        self._real: dict[str, str] = {}
        self._looked = False
        self._seen: dict[str, tuple[str, str, str]] | None = None
        """Mount point -> file system, `rw` or `ro`, `job` or empty, as seen in this boot."""
        self._left: dict[str, MountSilence] | None = None
        """Device -> what an earlier process asked and never heard of."""
        self._kept_silent: dict[str, int] = {}

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:
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
        results = self._judge_table(place, mounts, found, self._seen)
        if place.live:
            results += self._judge_answers(place, mounts, found, patience_s)
        else:
            results += [not_applicable(check.id, _NOT_LIVE) for check in (ANSWERS, SPACE, INODES, WRITE)]
        self._looked = True
        judged = {result.check for result in results}
        none = "there is no mount that it is about"
        return results + [not_applicable(check.id, none) for check in self.checks if check.id not in judged]

    # ----- the table -----

    def _judge_table(
        self,
        place: ProbeContext,
        mounts: Sequence[Mount],
        found: Sequence[Target],
        seen: dict[str, tuple[str, str, str]],
    ) -> list[CheckResult]:
        before = dict(seen)
        job_paths = [self._real.get(path, path) for path in (*place.job.checkpoint_dirs, *place.job.folders)]
        gone = {}
        for point, (fstype, _, used) in before.items():
            inside = any(path == point or path.startswith(point.rstrip("/") + "/") for path in job_paths)
            if used and inside and mount_at(point, mounts) is None and not automounted(point, mounts):
                gone[point] = fstype
        results = judge_present(mounts, place.site.expect.mounts, gone)
        for target in found:
            fstype, state, used = before.get(target.mount.point, ("", "", ""))
            was_writable = state == "rw" and fstype == target.mount.fstype
            results.append(judge_writable(target, was_writable))
            job = "job" if target.role in ("checkpoints", "job") else used
            kept = "rw" if was_writable or not target.mount.read_only else "ro"
            seen[target.mount.point] = target.mount.fstype, kept, job
        if seen != before:
            for point in list(seen)[: -4 * MOUNTS]:  # containers come and go
                del seen[point]
            place.keep("mounts", seen)
        return results

    # ----- the answers -----

    def _resolve(self, place: ProbeContext, mounts: Sequence[Mount], patience_s: float) -> None:
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
        self, place: ProbeContext, mounts: Sequence[Mount], found: Sequence[Target], patience_s: float
    ) -> list[CheckResult]:
        silent = self._silent(place, mounts)
        for target in found:
            if target.mount.device not in silent:
                kind: Kind = "stat" if target.path == target.mount.point else "real"
                self._asker.ask(target.mount.device, kind, target.path)
        self._collect(place, mounts, patience_s)
        silent = self._silent(place, mounts)
        results = [
            result for target in found for result in self._judge_target(place, target, silent.get(target.mount.device))
        ]
        if place.preflight:
            results += self._try_writing(place, mounts, silent)
        self._asker.clear()
        self._remember(place, self._silent(place, mounts))
        return results

    def _silent(self, place: ProbeContext, mounts: Sequence[Mount]) -> dict[str, MountSilence]:
        """Device -> the open question to it: it is not asked another one.

        Also those that a probe worker before this one left open: its child may still be there, stuck in the kernel.
        """
        if self._left is None:
            self._left = recall(place, "mounts_silent", dict[str, MountSilence])
        self._left = {device: one for device, one in self._left.items() if 0 < one.start == start_ticks(place, one)}
        found = dict(self._left)
        for question in self._asker.open.values():
            mount = mount_of(question.path, mounts)
            if mount is not None:
                silence = MountSilence(question.pid, question.tid, 0, question.since)
                found[mount.device] = silence._replace(start=start_ticks(place, silence))
        return found

    def _remember(self, place: ProbeContext, silent: Mapping[str, MountSilence]) -> None:
        pids = {device: one.pid for device, one in silent.items()}
        if pids != self._kept_silent:
            self._kept_silent = pids
            place.keep("mounts_silent", dict(silent))

    def _try_writing(
        self, place: ProbeContext, mounts: Sequence[Mount], silent: Mapping[str, MountSilence]
    ) -> list[CheckResult]:
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
        return [judge_write(path, self._asker.answers.get(f"write {path}"), seconds) for path in asked.values()]

    def _collect(self, place: ProbeContext, mounts: Sequence[Mount], patience_s: float) -> None:
        self.doing = "statvfs"
        self._asker.collect(min(PROMPT_S, patience_s))
        if self._asker.open:
            self._remember(place, self._silent(place, mounts))  # we may be ended while we wait
            self._asker.collect(patience_s)
        self.doing = ""

    def _judge_target(self, place: ProbeContext, target: Target, silence: MountSilence | None) -> list[CheckResult]:
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
            result = judge_silence(target, time.monotonic() - silence.since, limit_s, wchan, in_use)
            return [result, *(unknown(check.id, "it does not answer", point) for check in (SPACE, INODES))]
        answer = self._asker.answers.get(target.mount.device)
        if answer is None:
            why = self._asker.problem or "too many others do not answer"
            return [unknown(check.id, why, point) for check in (ANSWERS, SPACE, INODES)]
        results = [judge_answer(target, answer, in_use)]
        if answer.space is None:
            return results + [unknown(check.id, "it gave no sizes", point) for check in (SPACE, INODES)]
        return [
            *results,
            judge_space(target, answer.space, place.job.checkpoint_bytes, place.limits(SPACE), in_use),
            judge_inodes(target, answer.space, place.limits(INODES), in_use),
        ]
