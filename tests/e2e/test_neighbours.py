"""Jobs beside each other in one folder: the recovery of one touches nothing of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


def tree(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.lasts(90)
def test_five_jobs_in_one_folder(supervise: Callable[..., Any], tmp_path: Path) -> None:
    """`--out ckpt-$ID` with files `step_000010.pt`; two of them share one folder, and one of all jobs is disturbed."""
    runs, shared = tmp_path / "runs", tmp_path / "runs" / "shared"
    old = runs / "ckpt-4700"
    old.mkdir(parents=True)
    (old / "step_009000.pt").write_bytes(b"")
    (old / "latest").write_text("global_step9000")

    def start(number: int, out: Path, *more: str, rig: str = "") -> Any:
        folder = tmp_path / f"job{number}"
        folder.mkdir()
        return supervise("files", *more, nproc=1, steps=60, out=out, folder=folder, rig=rig, healthy=())

    torn = start(1, runs / "ckpt-4711", rig="tear@30:0")
    others = [start(number, runs / f"ckpt-{4711 + number}") for number in (2, 3)]
    both = [start(number, shared, "--prefix", f"{name}_") for number, name in ((4, "a"), (5, "b"))]
    untouched = tree(old)
    for job in (torn, *others, *both):
        assert job.code(200) == 0
        assert "corrupt" not in job.shown()
        assert "first start resumes from nothing" in job.shown()
    assert tree(old) == untouched
    for folder in [*(runs / f"ckpt-{number}" for number in (4713, 4714)), shared]:
        assert not (folder / ".unbroken-set-aside").exists()
    assert [path.name for path in shared.glob("*_step_*.pt")].__len__() == 2 * 6
    assert "resumes from step_000020.pt" in torn.shown()
    assert [path.name for path in (runs / "ckpt-4711" / ".unbroken-set-aside").glob("*.pt")] == ["step_000030.pt"]
    assert (runs / "ckpt-4711" / "step_000010.pt").exists()
    (incident,) = torn.incidents()
    assert incident["verdict"]["culprits"][0]["rank"] == 0
    assert all(job.incidents() == [] for job in (*others, *both))
