"""Faults of disks, links and shared folders under `--publish-to`, and other trainers than torchtitan. Run by hand:

    python -m pytest --slow -n 0 tests/e2e/tier_faults.py [-k NAME]

Each time the run must go on from the newest step that survivors hold, or that is published; what is published must be
whole at every moment; and the weights must be those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.formats import inspect
from tests.e2e.conftest import KNOWN
from tests.e2e.node_disks import Cluster, run

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

Supervise = Callable[..., Any]
AWAY_S = 60.0


@contextlib.contextmanager
def never_torn(shared: Path) -> Iterator[None]:
    """Whatever has its committing file is whole, at every moment."""
    over, torn = threading.Event(), []

    def watch() -> None:
        while not over.wait(0.02):
            with contextlib.suppress(OSError):
                for path in shared.iterdir():
                    shown = path.is_file() or (path / ".metadata").exists() or (path / "trainer_state.json").exists()
                    read = inspect(path) if shown and not path.name.startswith(".") else None
                    if read is not None and not read.complete and path.exists():
                        torn.append((path.name, read.why))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)
    assert not torn


@contextlib.contextmanager
def nodes(supervise: Supervise, root: Path, *extra: str, trainer: str = "titan", **more: Any) -> Iterator[Cluster]:
    with (
        Cluster(supervise, root, trainer, *extra, **{"spares": 2, "hold": 25, **more}) as cluster,
        never_torn(cluster.shared),
    ):
        yield cluster


def small(folder: str, size: str) -> Callable[[Cluster], None]:
    """Make the disk of a node, or the shared folder (`shared`), a small one."""

    def make(cluster: Cluster) -> None:
        if folder == "shared":
            for host in cluster.hosts.values():
                command = "mount", "--bind", f"{cluster.root}/small", str(cluster.shared)
                host.run(*command)
            return
        host = cluster.hosts[folder]
        host.run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(cluster.ckpt))

    return make


def replaced(cluster: Cluster, *gone: str, within_s: float = 90) -> None:
    """Spares have taken the place of the nodes that are gone."""
    cluster.go_on()
    there = [name for name in cluster.names if name not in gone]
    cluster.a.until(
        lambda: sum(len(cluster.jobs[name].ranks()) for name in there) == 2,
        within_s,
        "the new ranks",
    )


def ends_published(cluster: Cluster, *others: str) -> None:
    cluster.succeeds(*others)
    names = cluster.published()
    assert "step-60" in names, names
    for file in (cluster.shared / "step-60").iterdir():
        same = [d / "step-60" / file.name for d in map(cluster.disk, cluster.names)]
        held = [path.read_bytes() for path in same if path.exists()]
        assert not held or file.read_bytes() in held, file


# ----- nodes -----


def test_a_peer_is_lost_and_then_the_node(supervise: Supervise, tmp_path: Path) -> None:
    with nodes(supervise, tmp_path, pace=1.0, hold=1000) as cluster:
        cluster.shared.rename(tmp_path / "away")
        cluster.wait_tier("mirrored", 10)
        cluster.lose("d")  # b's peer
        cluster.wait_tier("mirrored", cluster.newest("local") + 10)
        kept = cluster.newest("mirrored")
        cluster.lose("b")
        replaced(cluster, "b", "d")
        assert cluster.resumed_step() >= kept
        (tmp_path / "away").rename(cluster.shared)
        ends_published(cluster, "c")


def test_three_nodes_one_is_lost_with_its_disk(supervise: Supervise, tmp_path: Path) -> None:
    """The weights are those of a plain resume from that step. With three ranks, DDP adds in another order in the first
    step after any start, so that an undisturbed run's differ in the last bits."""
    with nodes(supervise, tmp_path, members=3, spares=1) as cluster:
        cluster.wait_tier("mirrored", 20)
        kept = cluster.newest("mirrored")
        cluster.lose("c")
        cluster.go_on()
        cluster.jobs["d"].wait_ranks(1)
        step = cluster.resumed_step()
        assert step >= kept
        assert cluster.a.code(300) == 0
        assert "step-60" in cluster.published()
        resumed = shutil.copytree(cluster.shared / f"step-{step}", tmp_path / "plain" / f"step-{step}").parent
        titan = KNOWN["titan"].command(resumed, 60, 0.001)
        plain = [sys.executable, str(Path(__file__).parents[1] / "unsupervised.py"), "3", *titan]
        subprocess.run(plain, check=True, timeout=300, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert (cluster.disk("a") / "final.bin").read_bytes() == (resumed / "final.bin").read_bytes()


# ----- the link -----


@pytest.mark.parametrize("for_s", [3, 30])
def test_the_link_is_cut_in_the_middle_of_a_mirror(supervise: Supervise, tmp_path: Path, for_s: float) -> None:
    """For a moment: it goes on. For longer: the node is left out, and comes back as a spare."""
    with nodes(supervise, tmp_path, "--ballast-mb", "8", pace=0.5, hold=45) as cluster:
        cluster.wait_tier("mirrored", 10)
        cluster.hosts["b"].slow_down("16mbit")

        def half() -> bool:
            return any(path.name.endswith(".unbroken-partial") for path in mirrors.rglob("*"))

        mirrors = cluster.disk("d") / ".unbroken-mirrors"
        cluster.a.until(half, 60, "a mirror that is half there")
        kept = max(cluster.newest("mirrored"), cluster.newest("published"))
        cluster.hosts["b"].cut()
        cluster.go_on()
        time.sleep(for_s)
        cluster.hosts["b"].mend()
        if for_s > 5:
            assert cluster.resumed_step() >= kept
        ends_published(cluster, "b", "c", "d")


# ----- the shared folder -----


def test_the_shared_folder_is_away_for_a_minute(supervise: Supervise, tmp_path: Path) -> None:
    with nodes(supervise, tmp_path, pace=2.0, hold=1000) as cluster:
        cluster.wait_tier("published", 10)
        before = cluster.a.ranks()
        cluster.shared.rename(tmp_path / "away")
        step = cluster.step()
        time.sleep(AWAY_S)
        assert cluster.step() > step + 20, "training waits for it"
        (tmp_path / "away").rename(cluster.shared)
        assert cluster.a.ranks() == before
        ends_published(cluster, "b", "c", "d")


def test_the_shared_folder_hangs_for_a_minute(supervise: Supervise, tmp_path: Path) -> None:
    """Also while a node is lost: agents answer, the ranks start again from mirrors."""
    with nodes(supervise, tmp_path, pace=1.2) as cluster:
        cluster.wait_tier("published", 10)
        held = {name: host.freeze(cluster.shared) for name, host in cluster.hosts.items()}
        began, step = time.monotonic(), cluster.step()
        cluster.wait_tier("mirrored", 20, within_s=90)
        kept = cluster.newest("mirrored")
        assert kept > cluster.newest("published")
        cluster.lose("b")
        replaced(cluster, "b")
        assert cluster.resumed_step() >= kept
        cluster.a.until(lambda: cluster.step() >= kept + 5, 60, "steps")
        time.sleep(max(0.0, began + AWAY_S - time.monotonic()))
        assert cluster.step() > step
        for name in "acd":
            cluster.hosts[name].thaw(cluster.shared, held[name])
        ends_published(cluster, "c", "d")


# ----- full disks -----


def test_the_local_disk_is_full(supervise: Supervise, tmp_path: Path) -> None:
    with nodes(supervise, tmp_path, "--ballast-mb", "4", hold=1000, before=small("b", "40m")) as cluster:
        cluster.a.wait_shown("space|room|full", within_s=120)
        time.sleep(5)
        cluster.hosts["b"].run("mount", "-o", "remount,size=400m", str(cluster.ckpt))
        ends_published(cluster, "b", "c", "d")


def test_the_disk_of_the_peer_is_full(supervise: Supervise, tmp_path: Path) -> None:
    """What cannot be mirrored is published."""
    with nodes(supervise, tmp_path, "--ballast-mb", "4", before=small("d", "8m")) as cluster:
        cluster.wait_tier("published", 20)
        assert cluster.newest("mirrored") < 20, "there was room for the first one at most"
        cluster.jobs["b"].wait_shown("not mirrored to d")
        kept = cluster.newest("published")
        cluster.lose("b")
        replaced(cluster, "b")
        assert cluster.resumed_step() >= kept
        ends_published(cluster, "c")


def test_the_shared_folder_is_full(supervise: Supervise, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(tmp_path / "small"))
    try:
        with nodes(supervise, tmp_path, "--ballast-mb", "4", before=small("shared", "")) as cluster:
            cluster.a.wait_shown("not published to")
            cluster.wait_tier("mirrored", 20)
            kept = cluster.newest("mirrored")
            cluster.lose("b")
            replaced(cluster, "b")
            assert cluster.resumed_step() >= kept
            run("mount", "-o", "remount,size=400m", str(tmp_path / "small"))
            cluster.succeeds("c")
            names = sorted(path.name for path in (tmp_path / "small").iterdir())
            assert "step-60" in names, names
            for name in names:
                read = inspect(tmp_path / "small" / name) if not name.startswith(".") else None
                assert read is None or read.complete, name
    finally:
        run("umount", "-l", str(tmp_path / "small"))


# ----- other trainers -----


@pytest.mark.parametrize(
    ("trainer", "extra", "last"),
    [("hf", ("2",), "checkpoint-40"), ("nanogpt", (), "ckpt.pt"), ("megatron", (), "iter_0000060")],
)
def test_other_formats(supervise: Supervise, tmp_path: Path, trainer: str, extra: tuple[str, ...], last: str) -> None:
    """The second node is lost with its disk: the spare gets what the first one wrote, and its part from a mirror."""
    steps = 40 if trainer == "hf" else 60
    with nodes(supervise, tmp_path, *extra, trainer=trainer, steps=steps, pace=0.5) as cluster:
        cluster.wait_tier("published", 10, within_s=120)
        kept = max(cluster.newest("mirrored"), cluster.newest("published"))
        cluster.lose("b")
        replaced(cluster, "b")
        assert cluster.resumed_step() >= kept
        cluster.succeeds("c")
        assert last in cluster.published()


# ----- what it costs -----

PAIRS = 3


def steps_of(cluster: Cluster, interval: int) -> list[float]:
    """How long each step of rank 0 took, without those that follow a save, and the first ones."""
    (shown,) = cluster.a.rig.glob("steps-0-*")
    at = {int(step): float(when) for step, when in (line.split() for line in shown.read_text().splitlines())}
    return [at[step] - at[step - 1] for step in sorted(at) if step > interval and step % interval != 1]


def test_step_time_with_and_without(supervise: Supervise, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints a figure for docs/benchmarks.md: pairs in turns, 2 nodes, each save 64 MiB, mirrored and published."""
    interval = 30
    more = ("--ballast-mb", "32", "--checkpoint.interval", str(interval))
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for turn in range(2 * PAIRS):
        on = turn % 4 in (0, 3)
        folder = tmp_path / f"turn{turn}"
        folder.mkdir()
        with Cluster(
            lambda *words, folder=folder, **named: supervise(*words, folder=folder, **named),
            folder,
            "titan",
            *more,
            steps=150,
            pace=0.02,
            spares=0,
            publish=on,
        ) as cluster:
            assert cluster.a.code() == 0
            found[on].append(steps_of(cluster, interval))
            assert (len(cluster.published()) >= 1) == on
        shutil.rmtree(folder)
    with capsys.disabled():
        for what, pick in (("median", statistics.median), ("minimum", min)):
            told = {on: [1000 * pick(steps) for steps in found[on]] for on in found}
            ratios = [on / off for on, off in zip(told[True], told[False], strict=True)]
            print(
                f"\nstep, {what} ms: with {statistics.median(told[True]):.2f} ({min(told[True]):.2f}), "
                f"without {statistics.median(told[False]):.2f} ({min(told[False]):.2f}); of pairs "
                f"{statistics.median(ratios):.3f} ({', '.join(f'{one:.2f}' for one in ratios)})"
            )
