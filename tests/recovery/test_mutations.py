"""Checkpoints that real libraries wrote, damaged in every way: what is damaged is never chosen where a checksum, the
structure, or the first sight of it could show it; nothing raises, and nothing is changed.

`python -m tests.recovery.test_mutations` prints how many of each kind were seen.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from recovery.checkpoint import Checkpoint, choose
from recovery.formats import recognize
from recovery.formats.content import ContentLedger, ContentReader
from recovery.formats.scan import CheckpointScanner, FolderWalk, Listings
from tests.recovery.checkpoints.samples import NAMES, unpack

LATER = 4e9
OLDER, NEWER = 10, 20
_DATA = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp", ".metadata", ".bin", ".nemo", ".pkl")


class Run(NamedTuple):
    """A run's folder, its newest checkpoint, and the one before."""

    root: Path
    newest: Path
    older: Path


Mutation = Callable[[Run, random.Random], str]
"""Damages the newest checkpoint; the file that was touched, relative to it (empty: a file by itself, or several)."""


def scanned(root: Path, ledger: ContentLedger) -> list[Checkpoint]:
    return [ledger.judged(one) for one in CheckpointScanner().scan([root], LATER, at_rest=True)]


def look_at_all(root: Path, ledger: ContentLedger) -> None:
    """What the agent's thread does while the job runs."""
    for one in scanned(root, ledger):
        if one.complete or ledger.is_known(one.path):
            ledger.look(one.path, ContentReader(), 1.0)


def data_files(checkpoint: Path) -> list[Path]:
    """The files without which it cannot be loaded."""
    if checkpoint.is_file():
        return [checkpoint]
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return [path for path in files if path.name.endswith(_DATA) and path.name != "training_args.bin"]


# ----- the mutations -----


def truncated(run: Run, dice: random.Random) -> str:
    victim = dice.choice(data_files(run.newest))
    size = dice.choice([0, 1, dice.randrange(victim.stat().st_size), victim.stat().st_size - 1])
    os.truncate(victim, size)
    return str(victim)


def zero_tail(run: Run, dice: random.Random) -> str:
    """The size is there, the last blocks never were written."""
    victim = dice.choice(data_files(run.newest))
    data = victim.read_bytes()
    keep = dice.randrange(len(data) // 2, len(data) - 8)
    write_in_place(victim, data[:keep] + b"\0" * (len(data) - keep))
    return str(victim)


def flipped(run: Run, dice: random.Random) -> str:
    """One bit, anywhere: headers, pickles, zip directories, tensors."""
    victim = dice.choice(data_files(run.newest))
    data = bytearray(victim.read_bytes())
    where = dice.choice([range(min(512, len(data))), range(max(0, len(data) - 512), len(data)), range(len(data))])
    data[dice.choice(where)] ^= 1 << dice.randrange(8)
    write_in_place(victim, data)
    return str(victim)


def flipped_unnoticed(run: Run, dice: random.Random) -> str:
    """The same, and the times are set back."""
    before = {path: path.stat() for path in data_files(run.newest)}
    victim = flipped(run, dice)
    stat = before[Path(victim)]
    os.utime(victim, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return victim


def missing(run: Run, dice: random.Random) -> str:
    victim = dice.choice(data_files(run.newest))
    victim.unlink()
    return str(victim)


def of_another_step(run: Run, dice: random.Random) -> str:
    """A file of the checkpoint before is in the place of this one's."""
    victim = dice.choice(data_files(run.newest))
    source = run.older / victim.relative_to(run.newest) if run.newest.is_dir() else run.older
    if dice.random() < 0.5:
        shutil.copy(source, victim)
    else:
        victim.unlink()
        shutil.copy2(source, victim)
    return str(victim)


def copied_in_part(run: Run, dice: random.Random) -> str:
    """A copy of the folder that was cut off: some files are there, the last one of them perhaps in part."""
    if run.newest.is_file():
        return truncated(run, dice)
    files = data_files(run.newest)
    dice.shuffle(files)
    kept = dice.randrange(len(files))
    for path in files[kept:]:
        path.unlink()
    return str(run.newest)


def clock_skewed(run: Run, dice: random.Random) -> str:
    """Harmless: the storage's clock was a day off."""
    shift = dice.choice([-86400, 86400]) * 1_000_000_000
    for path in [run.newest, *run.newest.rglob("*")]:
        stat = path.stat()
        os.utime(path, ns=(stat.st_atime_ns + shift, stat.st_mtime_ns + shift))
    return ""


def saved_again(run: Run, dice: random.Random) -> str:
    """Harmless: every file was written anew, with other weights where the files do not tell their step."""
    others = "iter_" not in run.newest.name and "global_step" not in run.newest.name and dice.random() < 0.8
    for path in data_files(run.newest):
        source = run.older / path.relative_to(run.newest) if run.newest.is_dir() else run.older
        write_in_place(path, (source if others else path).read_bytes())
    return ""


def step_twice(run: Run, dice: random.Random) -> str:
    """A torn copy of the newest beside it, under another name."""
    copy = run.newest.with_name(f"copy-of-{run.newest.name}")
    (shutil.copytree if run.newest.is_dir() else shutil.copy)(run.newest, copy)
    victim = dice.choice(data_files(copy))
    os.truncate(victim, dice.randrange(victim.stat().st_size // 2))
    return str(copy)


def write_in_place(path: Path, data: bytes | bytearray) -> None:
    with open(path, "r+b") as file:
        file.truncate(len(data))
        file.write(data)


DAMAGE: dict[str, Mutation] = {
    one.__name__: one
    for one in (truncated, zero_tail, flipped, flipped_unnoticed, missing, of_another_step, copied_in_part)
}
HARMLESS: dict[str, Mutation] = {one.__name__: one for one in (clock_skewed, step_twice, saved_again)}


# ----- what must be seen -----


def meaning(path: Path) -> object:
    """What torch reads of a file: of an archive its members, of a `.distcp` file those of its chunks."""
    data = path.read_bytes()
    found: list[object] = []
    at = 0
    while (begin := data.find(b"PK\x05\x06", at)) >= 0:  # the end of each archive
        try:
            with zipfile.ZipFile(io.BytesIO(data[at : begin + 22])) as archive:
                found.append([(member.filename, archive.read(member)) for member in archive.infolist()])
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, RuntimeError, EOFError):
            return data
        at = begin + 22
    return found or data


def has_checksums(path: Path) -> bool:
    """Whether every byte that matters is under one: torch's archives, and the chunks of a `.distcp` file."""
    return path.exists() and path.read_bytes()[:2] == b"PK" and path.suffix != ".metadata"


def may_be_missed(kind: str, name: str, before: dict[Path, object], victim: Path, newest: Path) -> str:
    """Why a damage that was there at the first sight cannot be seen; empty: it must be."""
    if kind in ("flipped", "flipped_unnoticed", "zero_tail") and not has_checksums(victim):
        return "no checksum"
    if kind in ("flipped", "flipped_unnoticed") and victim.exists() and meaning(victim) == before[victim]:
        return "nothing that is read has changed"
    if kind == "of_another_step":
        return "whole, and of the other step"
    if kind in ("missing", "copied_in_part") and newest.is_dir() and name in ("accelerate", "hf"):
        return "the format does not say that the file must be there"
    return ""


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class Seen(NamedTuple):
    kind: str
    name: str
    when: str
    outcome: str
    """`seen`, `harmless` (and left alone), or why it was not seen."""


def pristine(names: tuple[str, ...], folder: Path) -> Iterator[tuple[str, Run]]:
    for name in names:
        root = unpack(name, folder)
        walk = FolderWalk(lambda path, _: recognize(Path(path)) is not None, Listings())
        by_step: dict[tuple[str, int], Path] = {}
        for path in map(Path, walk.find([root]).checkpoints):
            steps = [
                step for step in (OLDER, NEWER) if str(step) in path.name.partition("step")[2] or f"{step}" in path.name
            ]
            if steps:
                by_step[path.name.replace(str(steps[-1]), "#"), steps[-1]] = path
        if name == "accelerate":
            by_step = {
                ("#", (OLDER, NEWER)[number]): root / "checkpoints" / f"checkpoint_{number}" for number in (0, 1)
            }
        for shape, step in sorted(by_step, key=str):
            if step == NEWER:
                label = name if sum(1 for _, at in by_step if at == NEWER) == 1 else f"{name} {shape}"
                yield label, Run(root, by_step[shape, NEWER], by_step[shape, OLDER])


def alone(run: Run, work: Path) -> Run:
    """A copy of the two checkpoints, with the tracker files beside them."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for path in run.newest.parent.iterdir():
        if path in (run.newest, run.older) or path.suffix == ".txt" or path.name == "latest":
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, work / path.name)
    return Run(work, work / run.newest.name, work / run.older.name)


def mutate(label: str, run: Run, kind: str, after_first_sight: bool, seed: str, work: Path) -> Seen:
    """One mutation. Raises AssertionError for a bad choice."""
    dice = random.Random(seed)
    run = alone(run, work)
    ledger = ContentLedger()
    if after_first_sight:
        look_at_all(run.root, ledger)
        assert len(ledger.records) == 2, seed
        assert not any(one.changed or one.non_finite for one in ledger.records.values()), seed
    before = {path: meaning(path) for path in data_files(run.newest)}
    old_bytes = {path: path.read_bytes() for path in data_files(run.newest)}
    victim = Path((DAMAGE | HARMLESS)[kind](run, dice))
    there = contents(run.root)
    if after_first_sight:
        look_at_all(run.root, ledger)
    chosen, _ = choose(scanned(run.root, ledger))
    assert contents(run.root) == there, f"{seed}: a file was changed"
    assert chosen is not None, seed
    took_newest = chosen.path == str(run.newest)
    assert took_newest or chosen.path == str(run.older), (seed, chosen)
    when = "after first sight" if after_first_sight else "before"
    if kind in HARMLESS:
        by_time = kind == "clock_skewed" and label == "accelerate"  # it tells no step: then the newest is the latest
        together = kind == "step_twice" and run.newest.is_file()  # files of one step stand or fall together
        assert took_newest or by_time or together, (seed, scanned(run.root, ledger))
        return Seen(kind, label, when, "harmless")
    same = (
        victim.is_file()
        and victim in old_bytes
        and victim.read_bytes().rstrip(b"\0") == old_bytes[victim].rstrip(b"\0")
    )
    same = same and (victim.suffix == ".nemo" or victim.stat().st_size == len(old_bytes[victim]))  # tar ends with zeros
    if not took_newest or same:
        return Seen(kind, label, when, "seen")
    name = label.partition(" ")[0]
    why = may_be_missed(kind, name, before, victim, run.newest)
    if after_first_sight and why == "no checksum" and kind == "zero_tail" and run.newest.is_file():
        return Seen(kind, label, when, "a single file that was written anew for the most part")
    if after_first_sight and why == "whole, and of the other step" and run.newest.is_file():
        return Seen(kind, label, when, "a single file that was saved anew")
    if after_first_sight and kind in ("missing", "copied_in_part") and why:
        return Seen(kind, label, when, why)
    allowed = why and (not after_first_sight or why == "nothing that is read has changed")
    assert allowed, f"{seed}: {victim.relative_to(run.root)} {kind} {when} was not seen ({why})"
    return Seen(kind, label, when, why)


def mutations(count: int, seed: int, folder: Path) -> list[Seen]:
    runs = list(pristine(NAMES, folder / "pristine"))
    kinds = [*DAMAGE, *HARMLESS]
    found = []
    for number in range(count):
        label, run = runs[number % len(runs)]
        kind = kinds[(number // len(runs)) % len(kinds)]
        after = bool((number + number // (len(runs) * len(kinds))) % 2)
        found.append(mutate(label, run, kind, after, f"{seed} {number} {label} {kind}", folder / "work"))
    return found


def test_every_kind_of_damage_in_every_format(tmp_path: Path) -> None:
    seen = mutations(150, 1, tmp_path)
    assert sum(one.outcome in ("seen", "harmless") for one in seen) > 0.8 * len(seen)


@pytest.mark.slow
def test_every_kind_of_damage_in_every_format_before_and_after_the_first_sight(tmp_path: Path) -> None:
    seen = mutations(300, 2, tmp_path)
    assert len({(one.kind, one.name, one.when) for one in seen}) == len(seen)
    assert sum(one.outcome in ("seen", "harmless") for one in seen) > 0.8 * len(seen)


def main(count: int, folder: Path) -> None:
    seen = mutations(count, 3, folder)
    for key in ("kind", "name"):
        rows = sorted({(getattr(one, key), one.when) for one in seen})
        for value, when in rows:
            outcomes = Counter(one.outcome for one in seen if (getattr(one, key), one.when) == (value, when))
            total = sum(outcomes.values())
            good = outcomes.pop("seen", 0) + outcomes.pop("harmless", 0)
            print(f"{value:50} {when:18} {good:5}/{total:<5} {dict(outcomes)}")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        main(int(sys.argv[1]), Path(scratch))
