"""What a control group says of its CPU quota."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from supervisor.active.cpu_quota import QuotaWatch, Throttled, quota_s, read_stat, stat_files, throttled_s
from tests.conftest import until

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
        (Throttled(7.5, 100, 100, 2.5, 2.5), 7.4, 1, 7.4),  # a quarter of a CPU: all that it waited
        (Throttled(7.5, 100, 100, 2.5, 2.5), 9.0, 1, 7.5),  # others had the CPU for the rest
        (Throttled(60.0, 100, 100, 20.0, 2.4), 7.4, 8, 7.4),  # of all CPUs together
        (Throttled(60.0, 10, 100, 0.25, 0.25), 7.4, 1, 1.0),  # mostly there was quota left
        (Throttled(0.0, 0, 100), 7.4, 1, 0.0),
        (Throttled(0.0, 0, 0), 7.4, 1, 0.0),  # there is no quota
        (Throttled(60.0, 100, 100, 2.5, 0.6), 7.4, 1, 0.0),  # a sidecar has used it up
        (Throttled(60.0, 100, 100, 0.0, 0.0), 7.4, 1, 0.0),  # it is not known how much there was
    ],
)
def test_what_the_quota_is_to_blame_for(after: Throttled, waited_s: float, processes: int, seconds: float) -> None:
    """Within 10 s."""
    assert throttled_s(Throttled(0.0, 0, 0), after, 10.0, waited_s, processes) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("5000\n", 0.005), ("50000 100000\n", 0.05), ("max 100000\n", 0.0), ("-1\n", 0.0), ("", 0.0)]
)
def test_what_a_period_gives(text: str, seconds: float) -> None:
    assert quota_s(text) == seconds


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


def test_how_much_of_its_quota_a_process_has_got(tmp_path: Path) -> None:
    """Counted while the quota is used up only."""
    proc, root = tmp_path / "proc/7", tmp_path / "group"
    proc.mkdir(parents=True)
    root.mkdir()

    def at(ticks: int, periods: int) -> None:
        (proc / "stat").write_text(f"7 (a) b) R {'0 ' * 10}{ticks} 0 0 0\n")
        (root / "cpu.stat").write_text(f"nr_periods 900\nnr_throttled {periods}\nthrottled_usec 1\n")

    (root / "cpu.max").write_text("50000 100000\n")
    at(100, 10)
    watch = QuotaWatch(7, tmp_path / "proc", files=(root / "cpu.stat",))
    for ticks, periods, given_s, own_s in ((200, 10, 0.0, 0.0), (250, 20, 0.5, 0.5), (250, 40, 1.5, 0.5)):
        at(ticks, periods)
        (seen,) = watch.look()
        assert (round(seen.given_s, 3), round(seen.own_s, 3)) == (given_s, own_s)
    (proc / "stat").unlink()
    assert watch.look() == (seen,)


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
    until(lambda: not (made / "cgroup.procs").read_text().strip(), 30.0, "its processes to end")
    made.rmdir()


COMPUTES = """
import json, os, sys, time
from pathlib import Path
from supervisor.active.children import run_children
children = run_children(sys.argv[1], [{}], 60.0, environment=dict(os.environ), memory_bytes=1 << 34)
print(json.dumps([[one.throttled, one.waited, one.waited_s, one.throttled_s] for one in children]))
"""
BUSY = """#!{python}
import subprocess, sys, time
from pathlib import Path
sys.stdin.readline()
Path("{group}/cpu.cfs_quota_us").write_text("5000")
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range({others})]
end = time.monotonic() + 3.0
while time.monotonic() < end: pass
for one in others: one.kill()
print('{{"end": true}}', flush=True)
"""


@pytest.fixture
def held(group: Path, tmp_path: Path) -> Callable[[int], list[float]]:
    """A process that computes in the group, beside so many others: what is said of it."""

    def run(others: int) -> list[float]:
        program = tmp_path / "python"
        program.write_text(BUSY.format(python=sys.executable, group=group, others=others))
        program.chmod(0o755)
        inside = ("sh", "-c", f'echo 0 > {group}/cgroup.procs && exec "$@"', "sh")
        argv = [*inside, sys.executable, "-c", COMPUTES, str(program)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=240)
        (found,) = json.loads(done.stdout)
        return list(found)

    return run


@pytest.mark.root
def test_a_process_with_a_quota(held: Callable[[int], list[float]]) -> None:
    """However busy the machine is: it gets this little of a CPU on any."""
    share, _, waited_s, throttled_s = held(0)
    assert share > 0.3, (share, waited_s, throttled_s)
    assert throttled_s <= waited_s


@pytest.mark.root
def test_a_quota_that_others_of_the_group_use_up(held: Callable[[int], list[float]]) -> None:
    """It has waited for them, as on any busy node: its node is not slow by itself."""
    throttled, waited, waited_s, throttled_s = held(3)
    assert (throttled, throttled_s) == (0.0, 0.0)
    assert waited > 0.3, waited_s
