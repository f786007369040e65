"""Checkpoints on each node's own disk (`--publish-to`): nodes with mount namespaces of their own, so that one path is
another disk on each. Lost with its disk, or cut off, the run goes on from the newest step that survivors hold.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.formats import inspect

pytestmark = [pytest.mark.e2e, pytest.mark.root]

Supervise = Callable[..., Any]


class Cluster:
    """Nodes a and b with a rank each, c as a spare. `disk(node)` is what each has at `ckpt`."""

    def __init__(
        self, supervise: Supervise, root: Path, trainer: str = "titan", pace: float = 0.3, **more: Any
    ) -> None:
        self.root = root
        self.ckpt, self.shared = root / "node/ckpt", root / "shared"
        for folder in (self.ckpt, self.shared):
            folder.mkdir(parents=True)
        self._start, self._trainer = supervise, trainer
        self._shared = {"nproc": 1, "world": 2, "torchrun": ("--nnodes", "2"), "pace": pace, "out": self.ckpt, **more}
        self.a = self._node("a")
        self.a.until((self.a.job_dir / "controller.json").exists, 30, "a controller")
        address = json.loads((self.a.job_dir / "controller.json").read_text())["address"]
        self._more = ("--controller", str(address))
        self.b = self._node("b", *self._more)
        self.wait_for("a", "b")

    def _node(self, name: str, *options: str) -> Any:
        disk = self.disk(name)
        disk.mkdir(parents=True)
        enter = f'mount --bind {disk} {self.ckpt} && exec "$@"'
        prefix = ("unshare", "--mount", "--propagation", "private", "sh", "-c", enter, "sh")
        tiers = ("--checkpoint-dir", str(self.ckpt), "--publish-to", str(self.shared), "--spares", "1")
        return self._start(
            self._trainer, node=name, prefix=prefix, options=("--node-name", name, *tiers, *options), **self._shared
        )

    def spare(self) -> Any:
        self.c = self._node("c", *self._more, "--spare")
        self.wait_for("c")
        return self.c

    def disk(self, name: str) -> Path:
        return self.root / "disks" / name

    def wait_for(self, *names: str) -> None:
        for name in names:
            self.a.until(lambda name=name: name in {n["node"] for n in self.told()["nodes"]}, 30, f"{name} to join")

    def told(self) -> dict[str, Any]:
        return dict(self.a.told("status"))

    def newest(self, tier: str) -> int:
        return next((one["step"] for one in self.told()["tiers"] if one["tier"] == tier), 0)

    def wait_tier(self, tier: str, step: int, within_s: float = 60) -> None:
        self.a.until(lambda: self.newest(tier) >= step, within_s, f"step {step} to be {tier}")

    def lose(self, job: Any, name: str) -> None:
        """The node dies, and its disk with it."""
        for process in job.kin():
            process.kill()
        until_gone(job)
        shutil.rmtree(self.disk(name))

    def published(self) -> list[str]:
        found = [path for path in self.shared.iterdir() if not path.name.startswith(".")]
        for path in found:
            read = inspect(path)
            assert read is None or read.complete, (path, read)
        return sorted(path.name for path in found)

    def succeeds(self, *others: Any) -> None:
        self.a.code()
        shutil.copy(self.disk("a") / "final.bin", self.ckpt / "final.bin")
        self.a.succeeds()
        for other in others:
            assert other.code() == 0


def until_gone(job: Any) -> None:
    job.until(lambda: not job.kin(), 20, "the node's processes to end")


def resumed_from(job: Any) -> str:
    """The checkpoint that the newest attempt started from."""
    return str(job.told("status")["resume"]["path"])


def test_a_node_is_lost_with_its_disk_while_the_shared_folder_is_away(supervise: Supervise, tmp_path: Path) -> None:
    """The spare gets the lost node's part from its peer's mirror; what could not be published is, later."""
    cluster = Cluster(supervise, tmp_path)
    a, b, c = cluster.a, cluster.b, cluster.spare()
    away = tmp_path / "away"
    cluster.shared.rename(away)
    cluster.wait_tier("mirrored", 10)
    assert cluster.newest("published") == 0
    kept = cluster.newest("mirrored")
    cluster.lose(b, "b")
    c.wait_ranks(1)
    assert resumed_from(a) >= f"{cluster.ckpt}/step-{kept}"
    away.rename(cluster.shared)
    cluster.succeeds(c)
    assert "step-60" in cluster.published()


@pytest.mark.slow
def test_node_and_mirror_are_lost_and_the_published_checkpoint_is_left(supervise: Supervise, tmp_path: Path) -> None:
    cluster = Cluster(supervise, tmp_path)
    a, b, c = cluster.a, cluster.b, cluster.spare()
    cluster.wait_tier("published", 10)
    kept = cluster.newest("published")
    cluster.shared.chmod(0o700)
    for name in "ac":  # the peers are there, their mirrors are not
        for mirrors in cluster.disk(name).glob(".unbroken-mirrors/*/b"):
            shutil.rmtree(mirrors)
    for process in a.kin():
        if "supervisor.mover.process" in " ".join(process.cmdline()):
            process.kill()
    cluster.lose(b, "b")
    c.wait_ranks(1)
    assert int(resumed_from(a).rpartition("-")[2]) >= kept
    cluster.succeeds(c)
    assert "step-60" in cluster.published()
