"""What is ours, among what others write: nothing foreign is ever offered, read, moved, copied or changed."""

from __future__ import annotations

import functools
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recovery.checkpoint import Checkpoint, Preparation, Restore, SetAside, choose
from recovery.formats.scan import CheckpointScanner, WrittenCheckpoints
from recovery.provenance import Provenance
from recovery.quarantine import PreparationError, WrittenByRanks, keep_copy, prepare
from tests.conftest import Later

from .ranks import Ranks

torch = Later("torch")

LATER = 1e12
_opened: list[str] = []
_listening = [False]


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _listening[0] and isinstance(args[0], (str, os.PathLike)):
        _opened.append(os.path.realpath(args[0]))


sys.addaudithook(_hear)


@contextmanager
def opened() -> Iterator[list[str]]:
    """Every file that is opened meanwhile."""
    _opened.clear()
    _listening[0] = True
    try:
        yield _opened
    finally:
        _listening[0] = False


@functools.cache
def saved(step: int) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(20.0), "step": step}, buffer)
    return buffer.getvalue()


STEPS = (10, 20, 30, 40, 9000)


class World:
    """One job, and others, in one folder. `foreign`: what others wrote last, byte by byte."""

    def __init__(self, root: Path) -> None:
        self.root, self.ranks = root, Ranks()
        self.provenance: Provenance = self.ranks.provenance
        self.scanner = CheckpointScanner(seen=WrittenCheckpoints(self.provenance))
        self.foreign: dict[Path, bytes] = {}

    def ours(self, name: str, data: bytes) -> None:
        path = self.root / name
        self.ranks.make(path.parent)
        self.ranks.write(path, data)
        self.foreign.pop(path, None)
        self.ranks.looked_at()

    def theirs(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.foreign[path] = data

    def scan(self) -> list[Checkpoint]:
        self.ranks.looked_at()
        found = self.scanner.scan([], LATER, at_rest=True)
        for file in self.scanner.files_to_copy():
            assert file not in self.foreign
            copy = keep_copy(file, is_own=lambda path: self.provenance.owns(str(path)))
            if copy is not None:
                self.provenance.adopt(copy.path, time.time_ns(), str(file))
        return found

    def recover(self) -> tuple[Checkpoint | None, tuple[Preparation, ...], list[str]]:
        chosen, preparations = choose(self.scan())
        done = prepare(preparations, WrittenByRanks(self.provenance, "/the/job"))
        return chosen, preparations, done

    def inside(self, path: str) -> list[Path]:
        """What is foreign there, or in it."""
        return [one for one in self.foreign if str(one) == path or str(one).startswith(path + "/")]

    def check(self) -> None:
        for path, data in self.foreign.items():
            assert path.read_bytes() == data, path


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def names(found: list[Checkpoint]) -> list[str]:
    return [os.path.basename(one.path) for one in found if not one.copy_of]


STYLES = ["ckpt-4711", "4711", "2026-11-22", "seed-7", "llama-7b", "run3", "step-100", "checkpoint-5", "save40", "x"]


@pytest.mark.parametrize("neighbour", STYLES)
@pytest.mark.parametrize("own", STYLES)
def test_two_jobs_in_one_folder_whatever_they_are_called(world: World, own: str, neighbour: str) -> None:
    """Each writes `step_000010.pt` into a folder of its own, or into the same; ours tears the third."""
    beside = "foreign_" if own == neighbour else ""
    for step in (10, 20):
        world.ours(f"{own}/step_{step:06d}.pt", saved(step))
        world.theirs(f"{neighbour}/{beside}step_{step:06d}.pt", saved(step))
    world.theirs(f"{neighbour}/{beside}step_000030.pt", saved(30)[:100])
    world.theirs(f"{neighbour}/{beside}step_009000.pt", saved(9000))
    world.ours(f"{own}/step_000030.pt", saved(30)[:500])
    chosen, preparations, _ = world.recover()
    world.check()
    assert chosen.path == str(world.root / own / "step_000020.pt")
    assert [one.path for one in preparations] == [str(world.root / own / "step_000030.pt")]
    assert not (world.root / own / "step_000030.pt").exists()
    assert (world.root / own / "step_000010.pt").exists()


def test_a_first_start_without_a_record_offers_nothing(world: World) -> None:
    for name in ("ckpt.pt", "out/checkpoint-10/optimizer.pt", "out/step_10.pt", "out/torn.pt"):
        world.theirs(name, saved(9000) if "torn" not in name else b"")
    with opened() as files:
        assert world.recover() == (None, (), [])
    assert not set(files) & set(map(str, world.foreign))
    world.check()


def test_a_copy_of_an_old_checkpoint_is_not_offered(world: World) -> None:
    world.ours("out/step_10.pt", saved(10))
    world.theirs("out/step_9000.pt", saved(9000))
    world.theirs("out/checkpoint-9000/step_9000.pt", saved(9000))
    assert names(world.scan()) == ["step_10.pt"]
    world.theirs("out/step_10.pt", saved(9000))
    assert names(world.scan()) == []
    world.check()


def test_a_folder_of_ours_with_something_foreign_in_it_is_left_whole(world: World) -> None:
    for step in (10, 20, 30):
        torn = step == 30
        world.ours(f"out/step_{step}/model.pt", saved(step)[:300] if torn else saved(step))
        world.ours(f"out/step_{step}/optim.pt", saved(step))
    world.theirs("out/step_30/best_of_mine.pt", saved(9000))
    chosen, _, done = world.recover()
    assert chosen is not None
    assert names([chosen]) == ["step_20"]
    assert any("left in place" in said for said in done)
    assert list(world.scanner.left) == [str(world.root / "out" / "step_30")]
    world.check()


def test_what_is_put_into_a_checkpoint_after_it_was_chosen_keeps_it_in_place(world: World) -> None:
    """A neighbour that saves while we recover."""
    for step in (10, 20):
        world.ours(f"out/step_{step}/model.pt", saved(step)[: 300 if step == 20 else None])
    _, preparations = choose(world.scan())
    assert [one.path for one in preparations] == [str(world.root / "out" / "step_20")]
    world.theirs("out/step_20/optim.pt", saved(9000))
    (said,) = prepare(preparations, WrittenByRanks(world.provenance))
    assert "left in place" in said
    world.check()


def test_a_file_that_is_written_over_after_it_was_chosen_stays(world: World) -> None:
    world.ours("out/step_10.pt", saved(10))
    world.ours("out/step_20.pt", saved(20)[:300])
    _, preparations = choose(world.scan())
    assert len(preparations) == 1
    world.theirs("out/step_20.pt", saved(9000)[:200])
    (said,) = prepare(preparations, WrittenByRanks(world.provenance))
    assert "left in place" in said
    world.check()


def test_a_file_that_somebody_else_has_open_stays(world: World) -> None:
    world.ours("out/step_10.pt", saved(10))
    world.ours("out/step_20.pt", saved(20)[:300])
    _, preparations = choose(world.scan())
    import subprocess

    reading = "import sys; f = open(sys.argv[1], 'rb'); print(flush=True); input()"
    path = str(world.root / "out" / "step_20.pt")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", reading, path], stdin=pipe, stdout=pipe) as other:
        other.stdout.readline()
        (said,) = prepare(preparations, WrittenByRanks(world.provenance, "/job", (b"UNBROKEN_JOB_DIR=/job",)))
        other.communicate(b"\n")
    assert "left in place" in said
    assert os.path.exists(path)


def test_pointers_that_others_wrote_are_left_alone(world: World) -> None:
    for step in (100, 200):
        torn = saved(20)[:300] if step == 200 else saved(10)
        world.ours(f"out/iter_{step:07d}/mp_rank_00/model_optim_rng.pt", torn)
    world.theirs("out/latest_checkpointed_iteration.txt", b"9000")
    world.theirs("out/latest", b"global_step9000")
    world.theirs("out/latest.txt", b"iter_0000200")
    chosen, _, _ = world.recover()
    assert os.path.basename(chosen.path) == "iter_0000100"
    assert not (world.root / "out" / "iter_0000200").exists()
    world.check()


def test_a_safe_copy_of_a_neighbour_is_neither_used_nor_deleted(world: World) -> None:
    for number in range(5):
        world.theirs(f"out/.unbroken-copies/ckpt.pt/{number + 1}.pt", saved(9000))
    for step in (10, 20, 30, 40):
        world.ours("out/ckpt.pt", saved(step))
        os.utime(world.root / "out" / "ckpt.pt", (step, step))
        world.ranks.write(world.root / "out" / "ckpt.pt", saved(step))
        world.scan()
    world.ours("out/ckpt.pt", saved(40)[:300])
    chosen, preparations, _ = world.recover()
    world.check()
    assert chosen.step == 40
    assert [type(one) for one in preparations] == [SetAside, Restore]
    assert len(list((world.root / "out" / ".unbroken-copies" / "ckpt.pt").glob("*.pt"))) == 5 + 2


def test_what_was_set_aside_for_a_neighbour_is_not_replaced(world: World) -> None:
    world.ours("out/step_10.pt", saved(10))
    for attempt in range(2):
        world.ours("out/step_20.pt", saved(20)[: 300 + attempt])
        world.recover()
    home = world.root / "out" / ".unbroken-set-aside"
    assert [path.name for path in home.glob("*.pt")] == ["step_20.pt"], "the newest torn one of its name"
    other = World(world.root)
    other.ours("out/step_10.pt", saved(10))
    other.ours("out/step_20.pt", saved(20)[:200])
    _, preparations = choose(other.scan())
    prepare(preparations, WrittenByRanks(other.provenance, "/another/job"))
    assert sorted(path.name for path in home.glob("*.pt*") if path.suffix != ".json") == ["step_20.pt", "step_20.pt.2"]


def test_renames_carry_what_is_ours_and_nothing_else(world: World) -> None:
    ranks, out = world.ranks, world.ranks.make(world.root / "out")
    for step in (10, 20):
        ranks.replace(ranks.write(out / "tmp.pt", saved(step)), out / "ckpt.pt")
    assert names(world.scan()) == ["ckpt.pt"]
    folder = ranks.make(out / "tmp-checkpoint-10")
    ranks.write(folder / "a.pt", saved(10))
    ranks.write(folder / "b.pt", saved(10))
    ranks.replace(folder, out / "checkpoint-10")
    world.theirs("out/elsewhere.pt", saved(9000))
    ranks.replace(out / "elsewhere.pt", out / "step_9000.pt")
    world.foreign = {out / "step_9000.pt": saved(9000)}
    assert sorted(names(world.scan())) == ["checkpoint-10", "ckpt.pt"]
    world.theirs("out/ckpt.pt", saved(9000))
    assert names(world.scan()) == ["checkpoint-10"]


def test_what_was_opened_and_not_changed_is_not_ours(world: World) -> None:
    """A data set that is mapped for writing, a file that could not be opened after all."""
    world.theirs("out/step_9000.pt", saved(9000))
    path = world.root / "out" / "step_9000.pt"
    about = path.stat()
    from recovery.provenance import Write

    was = [about.st_ino, about.st_size, about.st_mtime_ns]
    world.provenance.note([Write(time.time_ns(), 1, "w", str(path), was)])
    assert names(world.scan()) == []


def test_noting_again_what_was_noted_changes_nothing(world: World) -> None:
    """An agent that starts again reads the whole record of its ranks once more."""
    ranks = world.ranks
    written = []
    note = ranks.provenance.note
    ranks.provenance.note = lambda writes: (written.extend(writes), note(writes))[1]  # type: ignore[method-assign]
    out = ranks.make(world.root / "out")
    for step in (10, 20):
        ranks.replace(ranks.write(out / "tmp.pt", saved(step)), out / f"step_{step}.pt")
    ranks.replace(out / "step_10.pt", out / "old.pt")
    ranks.write(out / "gone.pt", saved(10))
    ranks.remove(out / "gone.pt")
    before = names(world.scan())
    world.theirs("out/tmp.pt", saved(9000))
    world.theirs("out/step_10.pt", saved(9000))
    world.theirs("out/gone.pt", saved(9000))
    note(written)
    assert names(world.scan()) == before
    again = Provenance()
    again.note(written)
    again.settle(lambda _pid, _path: False, time.time_ns())
    ours = {path for path, item in again.items.items() if item.kind == "file" and again.owns(path)}
    assert ours == {str(out / "old.pt"), str(out / "step_20.pt")}


def test_a_pruning_script_and_a_mount_that_is_away(world: World) -> None:
    for step in (10, 20, 30):
        world.ours(f"out/step_{step}.pt", saved(step))
    (world.root / "out" / "step_30.pt").unlink()
    assert names(world.scan()) == ["step_20.pt", "step_10.pt"]
    (world.root / "out").rename(world.root / "away")
    assert names(world.scan()) == []
    (world.root / "away").rename(world.root / "out")
    assert names(world.scan()) == ["step_20.pt", "step_10.pt"]


def test_a_link_in_place_of_a_file_of_ours(world: World, tmp_path: Path) -> None:
    world.ours("out/step_10.pt", saved(10))
    world.theirs("private/step_9000.pt", saved(9000))
    (tmp_path / "out" / "step_10.pt").unlink()
    (tmp_path / "out" / "step_10.pt").symlink_to(tmp_path / "private" / "step_9000.pt")
    with opened() as files:
        assert names(world.scan()) == []
    assert str(tmp_path / "private" / "step_9000.pt") not in files


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.provenance.ITEMS_KEPT", 100)
    world = Provenance()
    from recovery.provenance import Write

    world.note([Write(at, 1, "w", f"/nowhere/{at}", None) for at in range(1, 500)])
    world.settle(lambda _pid, _path: False, 10)
    assert len(world.items) <= 100


FOLDERS = [
    "out",
    "ckpt-4711",
    "ckpt-4711/sub",
    "step-10",
    "step-20",
    "checkpoint-10",
    "iter_0000010",
    "2026-11-22",
    ".",
]
LOADED = (".pt", ".ckpt", ".distcp", ".metadata", "trainer_state.json")
"""What a script may load from a folder that it is sent to."""
FILES = ["ckpt.pt", "step_10.pt", "step_20.pt", "model.pt", "optim.pt", "latest", "latest_checkpointed_iteration.txt",
         "mp_rank_00.pt", ".metadata", "__0_0.distcp", "trainer_state.json", "last.ckpt"]  # fmt: skip
PLACES = st.tuples(st.sampled_from(FOLDERS), st.sampled_from(FILES)).map("/".join)
CONTENT = st.one_of(
    st.sampled_from(STEPS).map(saved),
    st.sampled_from(STEPS).map(lambda step: saved(step)[:400]),
    st.sampled_from([b"", b"10", b"step-10", b"global_step9000"]),
)
ACTS = st.one_of(
    st.tuples(st.sampled_from(["ours", "theirs"]), PLACES, CONTENT),
    st.tuples(st.sampled_from(["our rename", "their rename", "their cp"]), PLACES, PLACES),
    st.tuples(st.sampled_from(["prune", "look", "recover", "restart"]), PLACES, st.none()),
)


def act(world: World, step: str, name: str, more: Any) -> None:
    path = world.root / name
    if step == "ours":
        if not path.is_dir():
            world.ours(name, more)
    elif step == "theirs":
        if not path.is_dir():
            world.theirs(name, more)
    elif step in ("our rename", "their rename"):
        target = world.root / more
        if not path.is_file() or target.is_dir() or target == path:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        was = world.foreign.pop(path, None)
        world.foreign.pop(target, None)
        if step == "our rename":
            world.ranks.replace(path, target)
            world.ranks.looked_at()
        else:
            was = path.read_bytes()
            os.replace(path, target)
        if was is not None:
            world.foreign[target] = was
    elif step == "their cp":
        if path.is_file() and not (world.root / more).is_dir():
            world.theirs(more, path.read_bytes())
    elif step == "prune":
        if path.is_file():
            path.unlink()
            world.foreign.pop(path, None)
    elif step == "look":
        examine(world, lambda: world.scan())
    elif step == "recover":
        examine(world, lambda: world.recover()[0])
    elif step == "restart":  # all that the next agent knows is what was kept
        kept = dict(world.provenance.items)
        world.provenance = world.ranks.provenance = Provenance()
        world.provenance.learn(kept)
        world.scanner = CheckpointScanner(seen=WrittenCheckpoints(world.provenance))


def examine(world: World, what: Callable[[], Any]) -> None:
    try:
        with opened() as files:
            found = what()
    except PreparationError:
        found = None
    foreign = {os.path.realpath(path) for path in world.foreign}
    assert not foreign & set(files), "read"
    for one in found if isinstance(found, list) else [found]:
        if one is not None and one.complete:
            assert not any(str(path).endswith(LOADED) for path in world.inside(one.path)), "offered"
    world.check()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(acts=st.lists(ACTS, min_size=4, max_size=30))
def test_nothing_foreign_is_ever_touched(acts: list[tuple[str, str, Any]]) -> None:
    root = Path(os.path.realpath(tempfile.mkdtemp()))
    try:
        world = World(root)
        for one in acts:
            act(world, *one)
        examine(world, lambda: world.scan())
        examine(world, lambda: world.recover()[0])
    finally:
        shutil.rmtree(root)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    return folder


def plant(place: Path, how: str, victim: Path) -> None:
    if how == "link":
        place.symlink_to(victim)
        return
    if how == "file":
        place.touch()
        return
    place.mkdir()
    if how == "writable":
        place.chmod(0o777)
    else:
        os.chown(place, 65534, 65534)


PLANTS = [
    "link",
    "file",
    "writable",
    pytest.param("foreign", marks=pytest.mark.skipif(os.geteuid() != 0, reason="root")),
]


@pytest.mark.parametrize("how", PLANTS)
def test_a_planted_folder_for_what_is_moved_aside_is_not_used(world: World, victim: Path, how: str) -> None:
    world.ours("out/step_10.pt", saved(10))
    world.ours("out/step_20.pt", saved(20)[:300])
    world.ours("out/latest.txt", b"step_20.pt")
    plant(world.root / "out" / ".unbroken-set-aside", how, victim)
    chosen, preparations, done = world.recover()
    assert chosen is not None
    assert len(preparations) == 1
    assert any("left in place" in said for said in done)
    assert (world.root / "out" / "step_20.pt").read_bytes() == saved(20)[:300]
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize("how", PLANTS)
def test_a_planted_folder_for_copies_is_not_used(world: World, victim: Path, how: str) -> None:
    world.ours("out/ckpt.pt", saved(10))
    world.ours("out/ckpt.pt", saved(20))
    world.scan()
    (copies,) = (world.root / "out").glob(".unbroken-copies")
    copies.rename(world.root / "out" / "away")
    plant(copies, how, victim)
    world.ours("out/ckpt.pt", saved(30))
    world.scan()
    assert list(victim.iterdir()) == []


def test_a_copy_is_not_restored_through_a_planted_link(world: World, victim: Path) -> None:
    world.ours("out/ckpt.pt", saved(10))
    world.scan()
    (copy,) = (world.root / "out" / ".unbroken-copies" / "ckpt.pt").glob("*.pt")
    world.ours("out/ckpt.pt", saved(20)[:300])
    _, preparations = choose(world.scan())
    assert [type(one) for one in preparations] == [SetAside, Restore]
    copies = world.root / "out" / ".unbroken-copies"
    copies.rename(victim / "moved")
    copies.symlink_to(victim / "moved")
    assert len(prepare(preparations, WrittenByRanks(world.provenance))) == 1
    assert (world.root / "out" / "ckpt.pt").read_bytes() == saved(20)[:300], "nothing is moved that cannot be replaced"
    assert copy.exists()
    copies.unlink()
    (victim / "moved").rename(copies)
    prepare(preparations, WrittenByRanks(world.provenance))
    assert (world.root / "out" / "ckpt.pt").read_bytes() == saved(10)


class TestABaseModelThatARankCopied:
    """A rank may copy what it starts from into its own folder, with a step of another run."""

    def chosen(self, world: World) -> int | None:
        checkpoint, preparations = choose(world.scan())
        assert not preparations
        return checkpoint.step if checkpoint is not None else None

    def test_the_runs_own_saves_win(self, world: World) -> None:
        world.ours("out/step_9000.pt", saved(9000))
        assert self.chosen(world) == 9000
        world.ours("out/step_10.pt", saved(10))
        assert self.chosen(world) == 10
        world.ours("out/step_20.pt", saved(20))
        assert self.chosen(world) == 20

    @pytest.mark.parametrize(
        "names",
        [
            ["step_10.pt", "step_9000.pt", "step_20.pt"],  # not written first
            ["step_9000.pt", "step_9000.pt", "step_10.pt"],  # written twice
            ["step_9000.pt", "best_10.pt"],  # what is written beside checkpoints is no save
        ],
    )
    def test_else_the_highest_step_wins(self, world: World, names: list[str]) -> None:
        for name in names:
            world.ours(f"out/{name}", saved(int(name.removesuffix(".pt").rpartition("_")[2])))
        assert self.chosen(world) == 9000

    def test_a_torn_later_save_proves_nothing(self, world: World) -> None:
        world.ours("out/step_9000.pt", saved(9000))
        world.ours("out/step_10.pt", saved(10)[:300])
        assert self.chosen(world) == 9000


def test_our_folders_are_for_this_user_alone(world: World) -> None:
    world.ours("out/step_10.pt", saved(10))
    world.ours("out/step_20.pt", saved(20)[:300])
    world.recover()
    assert (world.root / "out" / ".unbroken-set-aside").stat().st_mode & 0o777 == 0o700


def test_a_small_file_is_not_written_through_a_planted_link(tmp_path: Path) -> None:
    from recovery.quarantine import replace

    secret = tmp_path / "secret"
    secret.write_text("mine")
    (tmp_path / f".latest.{os.getpid()}").symlink_to(secret)
    replace(tmp_path / "latest", b"10")
    assert (secret.read_text(), (tmp_path / "latest").read_text()) == ("mine", "10")


def fill(world: World, folder: str, step: int, torn: bool = False) -> None:
    world.ours(f"{folder}/model.pt", saved(step))
    world.ours(f"{folder}/extra.pt", saved(step)[: 300 if torn else None])


SIDE_FILES = ["notes.txt", ".DS_Store", "results.json"]


@pytest.mark.parametrize("name", ["tick", "step", "foo"])
@pytest.mark.parametrize("beside", SIDE_FILES)
def test_a_foreign_file_beside_never_keeps_a_whole_folder_from_being_offered(
    world: World, name: str, beside: str
) -> None:
    for step in (10, 20, 30):
        fill(world, f"out/{name}-{step}", step)
        world.scan()
    for step in (10, 20, 30):
        world.theirs(f"out/{name}-{step}/{beside}", b"mine")
    fill(world, f"out/{name}-40", 40, torn=True)
    with opened() as files:
        chosen, preparations, _ = world.recover()
    world.check()
    assert chosen.path == str(world.root / "out" / f"{name}-30")
    assert [one.path for one in preparations] == [str(world.root / "out" / f"{name}-40")]
    assert not set(files) & set(map(str, world.foreign))
    assert world.provenance.why_not_offered(chosen.path) == ""
    assert not list(world.root.glob("out/*/.unbroken-copies"))


def test_a_torn_folder_with_foreign_files_stays_and_no_part_of_it_is_offered(world: World) -> None:
    for step in (10, 20, 30):
        fill(world, f"out/tick-{step}", step)
    world.ours("out/tick-40/model.pt", saved(40))
    for name in ("notes.txt", "extra.json", "mine.safetensors"):
        world.theirs(f"out/tick-40/{name}", b"x" * 100)
    world.ours("out/tick-40/extra.pt", saved(40)[:300])
    chosen, _, done = world.recover()
    world.check()
    assert chosen.path == str(world.root / "out" / "tick-30")
    assert sorted(os.listdir(world.root / "out" / "tick-40")) == [
        "extra.json",
        "extra.pt",
        "mine.safetensors",
        "model.pt",
        "notes.txt",
    ]
    assert any("left in place" in said for said in done)


def test_a_folder_that_lacks_what_every_earlier_one_has_is_not_offered(world: World) -> None:
    for step in (10, 20, 30):
        fill(world, f"out/tick-{step}", step)
    world.ours("out/tick-40/model.pt", saved(40))
    chosen, preparations, _ = world.recover()
    assert chosen.path == str(world.root / "out" / "tick-30")
    assert [one.path for one in preparations] == [str(world.root / "out" / "tick-40")]


def test_nothing_older_is_offered_than_what_is_in_doubt(world: World) -> None:
    """Somebody put weights into our newest folder: a script may load them, or ours."""
    for step in (10, 20, 30):
        fill(world, f"out/step-{step}", step)
    world.theirs("out/step-30/model.safetensors", b"x" * 100)
    chosen, preparations, _ = world.recover()
    world.check()
    assert (chosen, preparations) == (None, ())
    assert "in doubt" in world.scanner.left[str(world.root / "out" / "step-30")]


def test_a_file_beside_a_distributed_checkpoint(world: World) -> None:
    pytest.importorskip("torch.distributed.checkpoint")
    for step in (10, 20):
        folder = world.root / "elsewhere" / str(step)
        torch.distributed.checkpoint.save({"w": torch.arange(9.0)}, checkpoint_id=folder, no_dist=True)
        for file in sorted(folder.iterdir(), key=lambda file: file.name, reverse=True):
            world.ours(f"out/step-{step}/{file.name}", file.read_bytes())
    world.theirs("out/step-20/.DS_Store", b"x")
    chosen, preparations, _ = world.recover()
    assert (chosen.path, preparations) == (str(world.root / "out" / "step-20"), ())


@pytest.mark.parametrize("told", ["torch", "birth", "before"])
def test_a_file_that_is_replaced_before_the_next_look_is_not_ours(world: World, told: str) -> None:
    """cp b.pt .t; mv .t step_20.pt, just after the rank has closed it."""
    from recovery.provenance import Write, born

    out = world.ranks.make(world.root / "out")
    path = out / "step_20.pt"
    if told == "birth" and not (os.major(os.stat(out).st_dev) and born(str(out)).born_ns):
        pytest.skip("this file system does not tell when a file was made")
    if told == "before":
        world.ours("out/step_20.pt", saved(10))
    at = time.time_ns() - (10**9 if told == "birth" else 0)
    was = [path.stat().st_ino, 0, 0] if told == "before" else None
    world.provenance.note([Write(at, 4711, "w", str(path), was)])
    path.write_bytes(saved(20))
    if told == "torch":
        world.provenance.note([Write(at + 1, 4711, "i", str(path), [path.stat().st_ino, 0, 0])])
    world.theirs("out/.t", saved(9000))
    os.replace(out / ".t", path)
    world.foreign = {path: saved(9000)}
    assert names(world.scan()) == []
    world.check()


def test_when_a_rank_began_to_write_a_checkpoint(world: World) -> None:
    before = time.time()
    world.ours("step_000010.pt", saved(10))
    for step in (10, 20):
        world.ours(f"out/step_{step}/model.pt", saved(step))
    between = time.time_ns() / 1e9
    for step in (10, 20):
        world.ours(f"out/step_{step}/optim.pt", saved(step))
    world.theirs("step_000030.pt", saved(30))
    found = {os.path.basename(one.path): one for one in world.scan()}
    assert set(found) == {"step_000010.pt", "step_10", "step_20"}
    for one in found.values():
        assert one.began_at is not None
        assert before - 1.0 <= one.began_at <= between, "its first file counts"
    again = {os.path.basename(one.path): one for one in world.scan()}
    assert again == found
