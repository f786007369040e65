"""An order is carried out only on what is the job's, whoever gave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.checkpoint import Preparation, Restore, SetAside
from recovery.provenance import Provenance
from recovery.quarantine import Bounds, GivenFolders, WrittenByRanks, prepare


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Of the same user, and nothing to do with the job."""
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_bytes(b"a key")
    return path


def orders(tmp_path: Path, secret: Path) -> list[list[Preparation]]:
    given = tmp_path / "given"
    (given / ".unbroken-copies" / "ckpt.pt").mkdir(parents=True)
    copy = given / ".unbroken-copies" / "ckpt.pt" / "1.pt"
    copy.write_bytes(b"of the attacker")
    (given / "link").symlink_to(secret.parent)
    (given / "leaf").symlink_to(secret)
    around = str(given / ".." / "home" / "id_rsa")
    through = str(given / "link" / "id_rsa")
    targets = [str(secret), around, through]
    return [
        *([SetAside(path=path, why="incomplete: it is torn")] for path in targets),
        *([SetAside(path=path, why="rolled back")] for path in targets),
        *([Restore(copy=str(copy), path=path)] for path in targets),
        *([SetAside(path=path, why="x"), Restore(copy=str(copy), path=path)] for path in targets),
        *([Restore(copy=path, path=str(given / "stolen.pt"))] for path in [*targets, str(given / "leaf")]),
        [Restore(copy=str(copy), path=str(secret.parent / "new"))],
        [SetAside(path=str(tmp_path), why="x")],
        [SetAside(path=str(given / ".."), why="x")],
        [SetAside(path=str(secret.parent / "latest"), why="x")],
        [SetAside(path="/", why="x")],
    ]


@pytest.mark.parametrize("kind", ["given", "seen"])
def test_what_is_outside_is_neither_moved_nor_replaced_nor_copied(tmp_path: Path, secret: Path, kind: str) -> None:
    bounds: Bounds = GivenFolders([tmp_path / "given"]) if kind == "given" else WrittenByRanks(Provenance())
    (secret.parent / "latest").write_text("global_step9000")
    for order in orders(tmp_path, secret):
        said = prepare(order, bounds)
        assert all("left in place" in line for line in said), order
    assert sorted(path.name for path in secret.parent.iterdir()) == ["id_rsa", "latest"]
    assert secret.read_bytes() == b"a key"
    assert not (tmp_path / "given" / "stolen.pt").exists()


def test_what_is_inside_is_moved(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "way").symlink_to("given")
    (tmp_path / "given" / "ckpt.pt").write_bytes(b"torn")
    (said,) = prepare([SetAside(path=str(tmp_path / "given" / "ckpt.pt"), why="x")], GivenFolders([tmp_path / "way"]))
    assert "was moved to" in said
