"""What a control group says of its CPU quota."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.active.cpu_quota import Throttled, read_stat, stat_files, throttled_s

V1 = "nr_periods 20\nnr_throttled 17\nthrottled_time 386230498\nnr_bursts 0\nburst_time 0\n"
V2 = "usage_usec 9\nuser_usec 9\nnr_periods 20\nnr_throttled 17\nthrottled_usec 386230\nnr_bursts 0\n"


@pytest.mark.parametrize(
    ("text", "seconds", "periods"),
    [
        (V1, 0.386, 17),
        (V2, 0.386, 17),
        ("", 0.0, 0),
        ("nr_throttled -1\nthrottled_time x\n\0\n", 0.0, 0),
        ("throttled_usec " + "9" * 5000 + "\nnr_throttled " + "9" * 400, 0.0, 0),
    ],
)
def test_both_versions_are_read(text: str, seconds: float, periods: int) -> None:
    found = read_stat(text)
    assert (round(found.seconds, 3), found.periods) == (seconds, periods)


@pytest.mark.parametrize(
    ("after", "waited_s", "processes", "seconds"),
    [
        (Throttled(7.5, 100, 100), 7.4, 1, 7.4),  # a quarter of a CPU: all that it waited
        (Throttled(7.5, 100, 100), 9.0, 1, 7.5),  # others had the CPU for the rest
        (Throttled(60.0, 100, 100), 7.4, 8, 7.4),  # of all CPUs together
        (Throttled(60.0, 10, 100), 7.4, 1, 1.0),  # mostly there was quota left
        (Throttled(0.0, 0, 100), 7.4, 1, 0.0),
        (Throttled(0.0, 0, 0), 7.4, 1, 0.0),  # there is no quota
    ],
)
def test_what_the_quota_is_to_blame_for(after: Throttled, waited_s: float, processes: int, seconds: float) -> None:
    """Within 10 s."""
    assert throttled_s(Throttled(0.0, 0, 0), after, 10.0, waited_s, processes) == seconds


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("2:cpu,cpuacct:/a/b\n1:name=systemd:/x\n0::/y\n", ["cpu,cpuacct/a/b", "cpu,cpuacct/a", "cpu,cpuacct"]),
        ("2:cpu,cpuacct:/docker/0123\n", ["cpu,cpuacct"]),  # the container sees its own group as the root
        ("2:cpuset:/a/b\n", []),
        ("2:cpu,cpuacct:/../a\n", []),
        ("nonsense\n::\n", []),
    ],
)
def test_the_group_and_those_above_it(groups: str, files: list[str], tmp_path: Path) -> None:
    for name in ("cpu,cpuacct/a/b", "cpuset/a/b"):
        (tmp_path / name).mkdir(parents=True)
        for folder in (tmp_path / name, *list((tmp_path / name).parents)[:2]):
            (folder / "cpu.stat").write_text(V1)
    assert [str(file.parent.relative_to(tmp_path)) for file in stat_files(groups, tmp_path)] == files


def test_a_group_that_cannot_be_looked_at_is_none(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text(V2)
    assert stat_files(f"0::/{'x' * 300}\n", tmp_path) == (tmp_path / "cpu.stat",)


def test_one_hierarchy(tmp_path: Path) -> None:
    (tmp_path / "pod/box").mkdir(parents=True)
    (tmp_path / "pod/cpu.stat").write_text(V2)
    assert stat_files("0::/pod/box\n", tmp_path) == (tmp_path / "pod/cpu.stat",)


@pytest.fixture
def group() -> Iterator[Path]:
    """One of the kernel's, with a twentieth of a CPU."""
    made = Path(f"/sys/fs/cgroup/cpu/unbroken-{os.getpid()}")
    try:
        made.mkdir()
        (made / "cpu.cfs_quota_us").write_text("100000")
    except OSError as error:
        pytest.skip(f"no CPU quota can be set by cgroup v1: {error}")
    yield made
    made.rmdir()


COMPUTES = """
import json, os, sys, time
from pathlib import Path
from supervisor.active.children import run_children
children = run_children(sys.argv[1], [{}], 60.0, environment=dict(os.environ), memory_bytes=1 << 34)
print(json.dumps([[one.throttled, one.waited_s, one.throttled_s] for one in children]))
"""
BUSY = """#!{python}
import sys, time
from pathlib import Path
sys.stdin.readline()
Path("{group}/cpu.cfs_quota_us").write_text("5000")
end = time.monotonic() + 3.0
while time.monotonic() < end: pass
print('{{"end": true}}', flush=True)
"""


@pytest.mark.root
def test_a_process_with_a_quota(group: Path, tmp_path: Path) -> None:
    """However busy the machine is: it gets this little of a CPU on any."""
    program = tmp_path / "python"
    program.write_text(BUSY.format(python=sys.executable, group=group))
    program.chmod(0o755)
    inside = ("sh", "-c", f'echo 0 > {group}/cgroup.procs && exec "$@"', "sh")
    done = subprocess.run([*inside, sys.executable, "-c", COMPUTES, str(program)], stdout=subprocess.PIPE, timeout=120)
    ((share, waited_s, throttled_s),) = json.loads(done.stdout)
    assert share > 0.3, (share, waited_s, throttled_s)
    assert throttled_s <= waited_s
