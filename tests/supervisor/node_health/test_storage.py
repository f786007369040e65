"""File systems: what is judged, and that one which never answers delays and disturbs nothing."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diagnosis.health import CheckResult
from supervisor.node_health.contract import Expect, JobInfo, Moment, Probe, ProbeContext, Site
from supervisor.node_health.storage import (
    CHILD,
    INODES,
    SPACE,
    Asker,
    MountAnswer,
    MountSpace,
    StorageProbe,
    Target,
    judge_answer,
    judge_inodes,
    judge_present,
    judge_silence,
    judge_space,
    judge_writable,
    judge_write,
    parse_mountinfo,
    targets,
)

GIB, TIB = 1 << 30, 1 << 40
ROOT = "27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro\n"
LUSTRE = "61 27 0:52 / /lustre rw,flock shared:9 - lustre 10.0.0.1@o2ib:/scratch rw,checksum,flock\n"
HOME = "62 27 0:53 / /home rw,relatime - nfs4 filer:/home rw,vers=4.2,hard\n"


def look(probe: StorageProbe, place: ProbeContext) -> list[CheckResult]:
    return probe.look(place, Moment(wall=time.time(), mono=time.monotonic()))


def of(results: list[CheckResult], check: str, device: str = "") -> CheckResult:
    found = [result for result in results if result.check == check and (not device or result.device == device)]
    assert len(found) == 1, found
    return found[0]


def captured(folder: Path, table: str, **more: Any) -> ProbeContext:
    """A tree with this mount table, and state kept as on a live node."""
    for name, text in (("proc/self/mountinfo", table), ("proc/sys/kernel/random/boot_id", "b-1\n")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ProbeContext(root=folder, state_dir=folder / "state", **more)


def target(line: str = LUSTRE, role: str = "network") -> Target:
    (mount,) = parse_mountinfo(line)
    return Target(mount, mount.point, role)


def space(size: float, free: float, files: int = 1000, files_free: int = 900) -> MountSpace:
    return MountSpace(int(size), int(free), files, files_free, "/x")


# ----- judging -----


@pytest.mark.parametrize(
    ("size", "free", "status", "level"),
    [
        (100 * GIB, 30 * GIB, "healthy", ""),
        (100 * GIB, 14 * GIB, "unhealthy", "warning"),
        (100 * GIB, 3 * GIB, "unhealthy", "warning"),
        (100 * GIB, 0.9 * GIB, "unhealthy", "critical"),
        (2 * TIB, 200 * GIB, "healthy", ""),  # 90 % used, and room for a long time
        (900 * TIB, 20 * TIB, "healthy", ""),
        (20 * GIB, 0, "unhealthy", "critical"),
        (4 * GIB, 0.5 * GIB, "unhealthy", "warning"),
        (400 << 20, 300 << 20, "healthy", ""),  # small, and nearly empty
    ],
)
def test_room_is_judged_by_share_and_size(size: float, free: float, status: str, level: str) -> None:
    result = judge_space(target(ROOT, "local"), space(size, free), 0, SPACE.limits)
    assert result.status == status
    assert not level or result.level == level


def test_room_for_checkpoints_is_counted_in_checkpoints() -> None:
    lustre = target(role="checkpoints")
    result = judge_space(lustre, space(900 * TIB, 437 * GIB), 312 * GIB, SPACE.limits)
    assert (result.status, result.level) == ("unhealthy", "warning")
    assert judge_space(lustre, space(900 * TIB, 300 * GIB), 312 * GIB, SPACE.limits).level == "critical"
    assert result.text == "/lustre: 1.4 checkpoints of 312 GiB fit (437 GiB free)"
    assert judge_space(lustre, space(900 * TIB, 700 * GIB), 312 * GIB, SPACE.limits).status == "healthy"
    elsewhere = judge_space(target(role="network"), space(900 * TIB, 437 * GIB), 312 * GIB, SPACE.limits)
    assert elsewhere.status == "healthy"


@pytest.mark.parametrize(
    ("point", "role", "level"),
    [
        ("/data", "local", "warning"),
        ("/data", "network", "warning"),
        ("/data", "job", "critical"),
        ("/data", "expected", "critical"),
        ("/", "local", "critical"),
        ("/tmp", "local", "critical"),
    ],
)
def test_a_full_mount_that_the_job_does_not_use_is_no_cause_of_its_failures(point: str, role: str, level: str) -> None:
    full = target(f"66 27 7:1 / {point} rw - ext4 /dev/sdb1 rw", role)
    for result in (
        judge_space(full, space(100 * GIB, 0), 0, SPACE.limits, in_use=True),
        judge_inodes(full, space(TIB, TIB, 10**7, 0), INODES.limits, in_use=True),
    ):
        assert (result.status, result.level) == ("unhealthy", level)
    assert judge_space(full, space(100 * GIB, 0), 0, SPACE.limits).level == "critical"


def test_what_has_no_size_or_is_not_written_is_not_judged() -> None:
    images = target("66 27 7:1 / /snap/core ro,nodev - squashfs /dev/loop1 ro,errors=continue")
    for where, room in ((images, space(GIB, 0)), (target(), MountSpace(0, 0, 0, 0, "/x"))):
        assert judge_space(where, room, 0, SPACE.limits).status == "not_applicable"
        assert judge_inodes(where, room, INODES.limits).status == "not_applicable"


@pytest.mark.parametrize(
    ("files", "free", "status", "level"),
    [
        (10**9, 10**8, "healthy", ""),  # 90 % used, 100 million left
        (10**7, 4 * 10**5, "unhealthy", "warning"),
        (10**7, 5 * 10**4, "unhealthy", "warning"),
        (10**7, 5 * 10**3, "unhealthy", "critical"),
        (0, 0, "not_applicable", ""),  # btrfs
    ],
)
def test_inodes(files: int, free: int, status: str, level: str) -> None:
    result = judge_inodes(target(), space(TIB, TIB, files, free), INODES.limits)
    assert result.status == status
    assert not level or result.level == level


def test_errors_of_dead_mounts_are_unhealthy_and_closed_doors_are_not() -> None:
    for number in (errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT):
        result = judge_answer(target(), MountAnswer(error=number), in_use=False)
        assert (result.status, result.level) == ("unhealthy", "critical")
        assert os.strerror(number) in result.text
    assert judge_answer(target(), MountAnswer(error=errno.EIO), in_use=True).level == "warning"
    assert judge_answer(target(role="job"), MountAnswer(error=errno.EIO), in_use=True).level == "critical"
    for answer in (MountAnswer(error=errno.EACCES), MountAnswer(error=errno.ENOENT), MountAnswer(lost=True)):
        assert judge_answer(target(), answer, in_use=False).status == "unknown"
    assert judge_answer(target(), MountAnswer(space=space(1, 1)), in_use=False).status == "healthy"


def test_silence_is_unknown_first() -> None:
    early = judge_silence(target(), 12.0, 30.0, "rpc_wait_bit_killable", in_use=False)
    late = judge_silence(target(), 31.0, 30.0, "rpc_wait_bit_killable", in_use=False)
    assert (early.status, late.status) == ("unknown", "unhealthy")
    assert late.text == "/lustre (lustre) has not answered for 31 s (its thread waits in rpc_wait_bit_killable)"


def test_writing() -> None:
    assert judge_write("/c", MountAnswer(), 10).status == "healthy"
    assert judge_write("/c", MountAnswer(error=errno.EACCES), 10).status == "unknown"
    assert judge_write("/c", None, 10).status == "unhealthy"
    assert "no space or quota left" in judge_write("/c", MountAnswer(error=errno.EDQUOT), 10).text
    assert judge_write("/c", MountAnswer(error=errno.EROFS), 10).status == "unhealthy"


def test_expected_mounts() -> None:
    mounts = parse_mountinfo(ROOT + LUSTRE + "65 27 0:56 / /auto rw - autofs systemd-1 rw,fd=7\n")
    results = judge_present(mounts, ("/lustre/", "/data", "/auto"), {"/old": "nfs4"})
    assert [(result.device, result.status) for result in results] == [
        ("/lustre/", "healthy"),
        ("/data", "unhealthy"),
        ("/auto", "unknown"),
        ("/old", "unhealthy"),
    ]


def test_read_only_is_a_fault_only_where_it_was_writable() -> None:
    ro = "61 27 0:52 / /lustre ro,flock - lustre 10.0.0.1@o2ib:/scratch ro,flock\n"
    assert judge_writable(target(ro), was_writable=False).status == "not_applicable"
    assert judge_writable(target(ro), was_writable=True).level == "critical"
    assert judge_writable(target(ro, "job"), was_writable=False).status == "not_applicable"  # code, data: meant so
    assert judge_writable(target(LUSTRE), was_writable=True).status == "healthy"


# ----- which mounts -----


def test_each_file_system_once_and_the_jobs_first() -> None:
    table = ROOT + LUSTRE + HOME + "70 27 0:53 /bind /bind rw - nfs4 filer:/home rw\n"
    job = JobInfo(checkpoint_dirs=("/ckpt/run1",), folders=("/home/u/job", "/lustre/logs"))
    found = targets(parse_mountinfo(table), ProbeContext(job=job), {"/ckpt/run1": "/lustre/c/run1"})
    assert [(one.mount.point, one.path, one.role) for one in found] == [
        ("/lustre", "/lustre/c/run1", "checkpoints"),
        ("/home", "/home/u/job", "job"),
        ("/", "/", "local"),
    ]


def test_disks_are_looked_at_but_not_the_boot_partition() -> None:
    table = ROOT + "31 27 259:5 / /scratch rw - xfs /dev/nvme2n1 rw\n32 27 259:6 / /boot rw - ext4 /dev/sda1 rw\n"
    assert [one.mount.point for one in targets(parse_mountinfo(table), ProbeContext(), {})] == ["/", "/scratch"]


def test_a_node_with_hundreds_of_mounts_is_not_asked_about_all() -> None:
    table = ROOT + "".join(f"{n} 27 0:{n} / /pod/{n} rw - nfs4 filer:/{n} rw\n" for n in range(100, 600))
    assert len(targets(parse_mountinfo(table), ProbeContext(), {})) == 24


def test_mounts_that_come_and_go_are_forgotten(tmp_path: Path) -> None:
    probe = StorageProbe()
    for pod in range(300):
        results = look(probe, captured(tmp_path, ROOT + f"50 27 8:{pod} / /pod/{pod} rw - ext4 /dev/rbd{pod} rw\n"))
        assert of(results, "mount_writable", f"/pod/{pod}").status == "healthy"
        assert {result.device for result in results} <= {"", "/", f"/pod/{pod}"}
    assert len(ProbeContext(root=tmp_path, state_dir=tmp_path / "state").load("mounts")) < 100


# ----- captured trees -----


def test_a_captured_tree_is_judged_by_its_mount_table_alone(tmp_path: Path) -> None:
    site = Site(expect=Expect(mounts=("/lustre", "/data")))
    broken = "30 27 259:3 / /local rw,relatime - ext4 /dev/nvme1n1 ro,errors=remount-ro\n"
    results = look(StorageProbe(), captured(tmp_path, ROOT + LUSTRE + broken, site=site))
    assert of(results, "mount_present", "/data").status == "unhealthy"
    assert of(results, "mount_present", "/lustre").status == "healthy"
    assert of(results, "mount_writable", "/").status == "healthy"
    assert "after an error" in of(results, "mount_writable", "/local").text
    for check in ("mount_answers", "disk_space", "disk_inodes", "storage_write"):
        assert of(results, check).status == "not_applicable"


def test_a_table_that_is_none_is_not_read_as_no_mounts(tmp_path: Path) -> None:
    results = look(StorageProbe(), captured(tmp_path, "\x1b[31m12\n"))
    assert {result.status for result in results} == {"unknown"}


def test_every_check_has_an_answer_where_nothing_is_to_be_looked_at(tmp_path: Path) -> None:
    """One that said nothing of a check would make the whole node unknown."""
    none = "30 1 0:52 / /proc rw,relatime - proc proc rw\n"
    results = look(StorageProbe(), captured(tmp_path, none))
    assert {result.check for result in results} == {check.id for check in StorageProbe.checks}
    assert {result.status for result in results} == {"not_applicable"}


def test_a_remount_and_an_unmount_are_noticed_by_the_next_process_too(tmp_path: Path) -> None:
    job = JobInfo(checkpoint_dirs=("/lustre/run",))
    look(StorageProbe(), captured(tmp_path, ROOT + LUSTRE, job=job))
    second = StorageProbe()
    results = look(second, captured(tmp_path, (ROOT + LUSTRE).replace(" rw,", " ro,"), job=job))
    for point, fstype in (("/lustre", "lustre"), ("/", "ext4")):
        text = of(results, "mount_writable", point).text
        assert text == f"{point} ({fstype}) is read-only and was writable earlier in this boot"
    results = look(second, captured(tmp_path, ROOT, job=job))
    assert "not mounted any more" in of(results, "mount_present", "/lustre").text
    assert not [r for r in results if r.check == "mount_writable" and r.device == "/lustre"]
    assert of(look(StorageProbe(), captured(tmp_path, ROOT)), "mount_present").status == "not_applicable"


# ----- a live node -----


def test_this_node(tmp_path: Path) -> None:
    probe = StorageProbe()
    assert isinstance(probe, Probe)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    job = JobInfo(checkpoint_dirs=(str(tmp_path / "link/to/come"),), checkpoint_bytes=1)
    results = look(probe, ProbeContext(job=job, preflight=True))
    assert {result.check for result in results} == {check.id for check in probe.checks}
    assert all(result.status == "healthy" for result in results if result.check == "storage_write")
    assert [result for result in results if "checkpoints_left" in result.values]
    assert list((tmp_path / "real").iterdir()) == []  # the small file is gone


def test_links_are_followed_and_missing_folders_are_what_is_there_of_them(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    asker = Asker()
    asker.ask("one", "real", str(tmp_path / "link/not/there"))
    asker.ask("two", "stat", str(tmp_path / "not there"))
    asker.collect(20.0)
    one, two = asker.answers["one"], asker.answers["two"]
    assert one.space.real_path == str((tmp_path / "real").resolve())
    assert one.space.size_bytes == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert two.error == errno.ENOENT
    assert asker.open == {}


def test_an_empty_look_leaves_no_process_behind() -> None:
    asker = Asker()
    asker.ask("root", "stat", "/")
    pid = asker.open["root"].pid
    asker.collect(20.0)
    assert not Path(f"/proc/{pid}").exists()


def test_a_child_that_is_killed_costs_its_answers_and_nothing_else(tmp_path: Path) -> None:
    deaf = tmp_path / "deaf.py"
    deaf.write_text("import time\ntime.sleep(600)\n")
    asker = Asker(deaf)
    asker.ask("root", "stat", "/")
    (question,) = asker.open.values()
    os.kill(question.pid, 9)
    asker.collect(20.0)
    assert asker.answers["root"].lost
    assert asker.open == {}


def test_a_child_that_never_begins_accuses_no_file_system(tmp_path: Path) -> None:
    deaf = tmp_path / "deaf.py"
    deaf.write_text("import time\ntime.sleep(600)\n")
    asker = Asker(deaf)
    probe, now = StorageProbe(asker), Moment(wall=0.0, mono=0.0)
    place = ProbeContext(state_dir=tmp_path / "state")
    place.site = Site(limits={"mount_answers": {"unknown_s": 0.05, "hang_s": 0.05}})
    for _ in range(2):
        answers = [r for r in probe.look(place, now) if r.check == "mount_answers"]
        assert {r.status for r in answers} == {"unknown"}
        assert len({question.pid for question in asker.open.values()}) == 1
    after = StorageProbe().look(ProbeContext(state_dir=tmp_path / "state"), now)
    assert "healthy" in {r.status for r in after if r.check == "mount_answers"}, "nothing is left of it"
    os.kill(next(iter(asker.open.values())).pid, 9)
    asker.collect(20.0)


def test_the_child_ends_with_its_parent() -> None:
    child = subprocess.Popen([sys.executable, "-I", "-S", str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdin.write(b"rubbish\n1 stat 2f\n")
    child.stdin.close()
    assert child.wait(30.0) == 0


@pytest.mark.root
@pytest.mark.skipif("fuse" not in Path("/proc/filesystems").read_text(), reason="fuse: modprobe fuse")
@pytest.mark.parametrize("job", [True, False])
def test_a_mount_that_never_answers(tmp_path: Path, job: bool) -> None:
    folder = tmp_path / "silent"
    folder.mkdir()
    script = Path(__file__).with_name("silent_mount.py")
    paths = [str(folder / "run/ckpt"), str(folder / "other")] if job else []
    arguments = [str(folder), str(tmp_path / "state"), *paths]
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second, third, other, last = [json.loads(line) for line in done.stdout.splitlines()]
    key = f"mount_answers {folder}"
    assert first["told"][key][0] == "unknown"
    assert second["told"][key][0] == "unhealthy"
    assert "has not answered for" in second["told"][key][2]
    assert third["told"][key][0] == "unhealthy"
    assert third["took_s"] < 1.5  # it is not waited for again
    assert third["pids"] == second["pids"] == first["pids"]
    assert third["threads"] == 2  # the child's own, and one for the mount
    for told in (first, second, third, other, last):
        assert told["told"]["mount_answers /"][0] == "healthy"
        assert told["told"]["disk_space /"][0] != "unknown"
    assert other["told"][key][:2] == ["unhealthy", "critical"]  # it knows what the one before it asked
    assert other["took_s"] < 1.5
    assert (other["pids"], other["threads"]) == (first["pids"], 2)  # and asks no second time
    assert "Transport endpoint is not connected" in last["told"][key][2]
    assert last["pids"] == []
