"""Memory of host and job, read from trees as machines have them; and one real OOM kill in a real cgroup."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnosis.health import CRITICAL, OK, CheckResult, CheckState, exit_code, settle
from supervisor.node_health import memory
from supervisor.node_health.contract import JobInfo, Moment, ProbeContext, Site
from supervisor.node_health.memory import MemoryProbe

from .tree import plant

NOW = Moment(wall=1_700_000_000.0, mono=1000.0)
MEMINFO = """MemTotal:       2113480660 kB
MemFree:        1900127928 kB
MemAvailable:   {available} kB
SwapCached:            0 kB
SwapTotal:       {swap} kB
SwapFree:              0 kB
Hugetlb:               0 kB
"""
SLURM = "system.slice/slurmstepd.scope/job_77"


def by_check(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.check: result for result in results}


def look(place: ProbeContext, probe: MemoryProbe | None = None) -> dict[str, CheckResult]:
    return by_check((probe or MemoryProbe()).look(place, NOW))


@pytest.mark.parametrize(
    ("available", "status", "level"),
    [(3_000_000, "healthy", ""), (2_000_000, "unhealthy", "warning"), (90_000, "unhealthy", "critical")],
)
def test_memory_left(tmp_path: Path, available: int, status: str, level: str) -> None:
    plant(tmp_path, {"proc/meminfo": MEMINFO.format(available=available, swap=0)})
    seen = look(ProbeContext(root=tmp_path))["memory_available"]
    assert (seen.status, seen.level if level else "") == (status, level)


def test_a_small_node_is_not_low_on_memory_for_being_small(tmp_path: Path) -> None:
    plant(tmp_path, {"proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 900000 kB\n"})
    assert look(ProbeContext(root=tmp_path))["memory_available"].status == "healthy"


def test_pressure(tmp_path: Path) -> None:
    busy = "some avg10=99.00 avg60={some} avg300={some} total=5\nfull avg10=9.00 avg60={full} avg300={long} total=9\n"
    plant(
        tmp_path,
        {
            "proc/pressure/memory": busy.format(some=40.0, full=25.5, long=3.0),
            "proc/pressure/io": busy.format(some=99.0, full=95.0, long=20.0),
        },
    )
    place = ProbeContext(root=tmp_path, job=JobInfo(ranks={100: 0}))
    seen = look(place)
    assert (seen["memory_pressure"].status, seen["memory_pressure"].level) == ("unhealthy", "warning")
    assert seen["io_pressure"].status == "healthy", "a minute of saving a checkpoint is no fault"
    plant(tmp_path, {"proc/pressure/io": busy.format(some=99.0, full=95.0, long=80.0)})
    assert look(place)["io_pressure"].status == "unhealthy"
    assert look(ProbeContext(root=tmp_path))["io_pressure"].status == "healthy", (
        "whoever copies files on an idle node waits"
    )


def events(kills: int) -> str:
    return f"low 0\nhigh 0\nmax 17\noom {kills}\noom_kill {kills}\noom_group_kill 0\n"


def slurm_v2(root: Path) -> ProbeContext:
    """Two ranks of a Slurm step under cgroup v2: the limit is the job's."""
    leaf = f"{SLURM}/step_0/user/task_"
    files = {f"proc/{pid}/cgroup": f"0::/{leaf}{pid - 100}\n" for pid in (100, 101)}
    files |= {f"sys/fs/cgroup/{leaf}{task}/memory.max": "max\n" for task in (0, 1)}
    files |= {
        f"sys/fs/cgroup/{SLURM}/memory.max": f"{64 << 30}\n",
        f"sys/fs/cgroup/{SLURM}/memory.current": f"{10 << 30}\n",
        f"sys/fs/cgroup/{SLURM}/memory.events": events(2),
        "proc/vmstat": "pgfault 99\noom_kill 2\n",
    }
    return ProbeContext(root=plant(root, files), job=JobInfo(ranks={100: 0, 101: 1}))


def test_a_kill_in_the_jobs_cgroup_is_told_once_and_not_again_for_the_host(tmp_path: Path) -> None:
    place, probe = slurm_v2(tmp_path), MemoryProbe()
    assert look(place, probe)["cgroup_oom_kill"].status == "healthy", "kills of before we looked are not news"
    plant(tmp_path, {f"sys/fs/cgroup/{SLURM}/memory.events": events(3), "proc/vmstat": "oom_kill 3\n"})
    place.job = JobInfo()  # the rank that was killed is gone, and the others with it
    seen = look(place, probe)
    assert (seen["cgroup_oom_kill"].status, seen["cgroup_oom_kill"].level) == ("unhealthy", "critical")
    assert seen["cgroup_oom_kill"].device == f"/{SLURM}"
    assert seen["host_oom_kill"].status == "healthy"
    assert look(place, probe)["cgroup_oom_kill"].status == "healthy"
    plant(tmp_path, {"proc/vmstat": "oom_kill 5\n"})
    seen = look(place, probe)
    assert (seen["host_oom_kill"].status, seen["host_oom_kill"].level) == ("unhealthy", "warning")
    assert "2 processes" in seen["host_oom_kill"].text


def test_a_kill_stands_long_enough_to_be_seen_and_then_clears() -> None:
    check = next(check for check in MemoryProbe.checks if check.id == "cgroup_oom_kill")
    check_state: CheckState | None = settle(check, None, memory.judge_kills(0, "/a"), 0.0)
    check_state = settle(check, check_state, memory.judge_kills(1, "/a"), 10.0)
    assert exit_code([(check_state.status, check_state.level)]) == CRITICAL
    for at in range(20, 80, 10):
        assert check_state.status == "unhealthy"
        check_state = settle(check, check_state, memory.judge_kills(0, "/a"), at)
    assert exit_code([(check_state.status, check_state.level)]) == OK


def test_page_cache_does_not_count_against_the_limit(tmp_path: Path) -> None:
    place = slurm_v2(tmp_path)
    folder = f"sys/fs/cgroup/{SLURM}"
    assert look(place)["cgroup_memory"].status == "healthy"
    stat = f"anon {2 << 30}\nfile {61 << 30}\nshmem {{shmem}}\nslab_reclaimable 4096\n"
    plant(tmp_path, {f"{folder}/memory.current": f"{63 << 30}\n", f"{folder}/memory.stat": stat.format(shmem=1 << 30)})
    assert look(place)["cgroup_memory"].status == "healthy"
    plant(tmp_path, {f"{folder}/memory.stat": stat.format(shmem=60 << 30)})
    seen = look(place)["cgroup_memory"]
    assert (seen.status, seen.level) == ("unhealthy", "warning")
    assert "62.0 of 64.0 GiB" in seen.text


def test_cgroup_v1_counts_each_folder_by_itself(tmp_path: Path) -> None:
    base, job = "sys/fs/cgroup/memory", "slurm/uid_1000/job_5"
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
    files = {
        "proc/100/cgroup": f"12:cpuset:/\n4:memory:/{job}/step_0\n1:name=systemd:/x\n0::/\n",
        f"{base}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{base}/{job}/memory.limit_in_bytes": f"{8 << 30}\n",
        f"{base}/{job}/memory.usage_in_bytes": f"{7900 << 20}\n",
        f"{base}/{job}/memory.stat": f"cache 1\ntotal_cache {7 << 30}\ntotal_shmem 0\n",
        f"{base}/{job}/memory.oom_control": control.format(0),
        f"{base}/{job}/step_0/memory.limit_in_bytes": "9223372036854771712\n",
        f"{base}/{job}/step_0/memory.oom_control": control.format(0),
    }
    place, probe = ProbeContext(root=plant(tmp_path, files), job=JobInfo(ranks={100: 0})), MemoryProbe()
    assert {look(place, probe)[check].status for check in ("cgroup_memory", "cgroup_oom_kill")} == {"healthy"}
    plant(tmp_path, {f"{base}/{job}/step_0/memory.oom_control": control.format(1)})
    seen = look(place, probe)["cgroup_oom_kill"]
    assert (seen.status, seen.device, seen.pids) == ("unhealthy", f"/{job}", (100,))


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    files = {
        "proc/100/cgroup": "0::/../../docker/abc\n",
        "sys/fs/cgroup/memory.max": "1073741824\n",
        "sys/fs/cgroup/memory.current": "1048576\n",
        "sys/fs/cgroup/memory.events": events(0),
    }
    group = memory.cgroup_of(ProbeContext(root=plant(tmp_path, files)), 100)
    assert (group.path, group.limit) == ("/", 1 << 30)


def test_a_cgroup_that_goes_away_is_not_spoken_of_any_more(tmp_path: Path) -> None:
    place, probe = slurm_v2(tmp_path), MemoryProbe()
    look(place, probe)
    place.job = JobInfo()
    (tmp_path / f"sys/fs/cgroup/{SLURM}/memory.events").unlink()
    assert look(place, probe)["cgroup_oom_kill"].device == ""


def test_shm_of_a_captured_tree(tmp_path: Path) -> None:
    mounts = "shm /dev/shm tmpfs rw,nosuid,nodev,noexec,relatime,size=65536k,inode64 0 0\n"
    place = ProbeContext(root=plant(tmp_path, {"proc/mounts": mounts}), job=JobInfo(ranks={1: 0, 2: 1}))
    seen = look(place)
    assert (seen["shm_size"].status, seen["shm_free"].status) == ("unhealthy", "unknown")
    assert seen["shm_size"].text == "/dev/shm has 64 MiB for 2 ranks"
    assert look(ProbeContext(root=tmp_path))["shm_size"].status == "not_applicable", "nobody here who would need it"
    (tmp_path / "proc/driver/nvidia/gpus/0000:c1:00.0").mkdir(parents=True)
    assert look(ProbeContext(root=tmp_path))["shm_size"].status == "unhealthy"
    plant(tmp_path, {"proc/mounts": mounts.replace("65536k", "4194304k")})
    assert look(place)["shm_size"].status == "healthy"


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            {files}                 1048576              files
Max locked memory         {lock}              unlimited            bytes
"""


def test_limits_of_the_ranks(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/1/limits": LIMITS.format(files=1024, lock="unlimited"),
            "proc/2/limits": LIMITS.format(files=512, lock="8388608"),
            "proc/2/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
        },
    )
    place = ProbeContext(root=tmp_path, job=JobInfo(ranks={1: 0, 2: 1}))
    seen = look(place)
    assert seen["limit_memlock"].status == "not_applicable"
    assert (seen["limit_open_files"].status, seen["limit_open_files"].level) == ("unhealthy", "warning")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    seen = look(place)
    assert (seen["limit_memlock"].status, seen["limit_memlock"].pids) == ("unhealthy", (2,))
    plant(tmp_path, {"proc/2/status": "CapEff:\t000001ffffffffff\n"})
    assert look(place)["limit_memlock"].status == "healthy"


def test_a_rank_that_runs_out_of_descriptors() -> None:
    """Real: our own descriptors, counted as the kernel does (since 6.2; not told by older ones)."""
    place = ProbeContext(job=JobInfo(ranks={os.getpid(): 0}))
    open_now = os.stat("/proc/self/fd").st_size
    assert look(place)["limit_open_files"].status == "healthy"
    few = Site(limits={"limit_open_files": {"percent": 0.0001}})
    if open_now:
        assert look(ProbeContext(job=place.job, site=few))["limit_open_files"].status == "unhealthy"


@pytest.fixture
def cgroup_v1() -> Iterator[Path]:
    folder = Path("/sys/fs/cgroup/memory") / f"unbroken-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("cgroup v1: boot with systemd.unified_cgroup_hierarchy=0 (no memory cgroup can be made here)")
    yield folder
    folder.rmdir()


@pytest.mark.root
def test_a_real_kill_is_seen(cgroup_v1: Path) -> None:
    (cgroup_v1 / "memory.limit_in_bytes").write_text(str(32 << 20))
    script = "import sys; sys.stdin.readline(); x = bytearray(1 << 28)"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as rank:
        (cgroup_v1 / "cgroup.procs").write_text(str(rank.pid))
        place, probe = ProbeContext(job=JobInfo(ranks={rank.pid: 3})), MemoryProbe()
        assert look(place, probe)["cgroup_oom_kill"].status == "healthy"
        rank.communicate(b"go\n")
        assert rank.returncode == -9
        place.job = JobInfo()
        seen = look(place, probe)
    assert (seen["cgroup_oom_kill"].status, seen["cgroup_oom_kill"].device) == ("unhealthy", f"/{cgroup_v1.name}")
    assert seen["host_oom_kill"].status == "healthy"
