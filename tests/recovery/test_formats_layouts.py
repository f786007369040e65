"""The layouts found in the wild: what a run is seen to write, what is told of it, and what is moved when it is torn.

Each case is what one save of step N writes, in its order. Safetensors in a folder of the save are seen by nobody.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from recovery.checkpoint import Checkpoint, Preparation, Restore, SetAside, choose
from recovery.formats.scan import CheckpointScanner, WrittenCheckpoints
from recovery.quarantine import WrittenByRanks, keep_copy, prepare
from tests.conftest import Later
from tests.tables import read

from .ranks import Ranks

torch = Later("torch")
safetensors = Later("safetensors.torch")

LATER = 1e12


class Layout(NamedTuple):
    files: str
    """Of one save, in their order; a line of text as `NAME=TEXT`, a link as `NAME->TARGET`."""
    told: str
    """What is told of it."""
    also: str = ""
    """What goes with it when it is moved aside."""
    stepless: bool = False
    """The files do not hold their step."""


LAYOUTS = {name: Layout(**fields) for name, fields in read(__file__).items()}


def content(path: Path, layout: Layout, step: int) -> bytes:
    state = {"w": torch.arange(500.0) + step}
    if path.suffix == ".safetensors":
        return safetensors.save(state)
    buffer = io.BytesIO()
    torch.save(state if layout.stepless else {**state, "step": step}, buffer)
    return buffer.getvalue()


def write(ranks: Ranks, out: Path, layout: Layout, step: int, torn: bool = False) -> None:
    """One save, in which the last checkpoint file is `torn`."""
    parts = layout.files.format(n=step, out=out).split(" ")
    last = [part for part in parts if "->" not in part and ("step=" in part or "=" not in part)][-1]
    for part in parts:
        name, _, text = part.partition("=" if "step=" not in part else "\0")
        link, _, target = name.partition("->")
        path = out / link
        ranks.make(path.parent)
        if target:
            ranks.link(path, target)
        elif text:
            ranks.write(path, text.encode())
        else:
            data = content(path, layout, step)
            data = data[: len(data) // 2] if torn and part == last else data
            if path.suffix == ".safetensors" and path.parent != out:
                path.write_bytes(data)
            else:
                ranks.write(path, data)
            os.utime(path, (1000 + step, 1000 + step))


class Run:
    """Steps 20, 40 and 60, the last one `torn`, and somebody else's run beside."""

    def __init__(self, out: Path, layout: Layout, torn: bool = False) -> None:
        self.out, self.ranks = out, Ranks()
        self.scanner = CheckpointScanner(seen=WrittenCheckpoints(self.ranks.provenance))
        foreign = out / "other"
        foreign.mkdir(parents=True)
        torch.save({"step": 9000}, foreign / "ckpt.pt")
        for step in (20, 40, 60):
            write(self.ranks, out, layout, step, torn=torn and step == 60)
            if torn and step == 60:
                self.ranks.die()
            self.look()
            for file in self.scanner.files_to_copy():
                copy = keep_copy(file)
                if copy is not None:
                    self.ranks.provenance.adopt(copy.path, time.time_ns(), str(file))

    def look(self) -> list[Checkpoint]:
        self.ranks.looked_at()
        return self.scanner.scan([], LATER, at_rest=True)

    def prepare(self, preparations: Sequence[Preparation]) -> None:
        prepare(preparations, WrittenByRanks(self.ranks.provenance))

    def name(self, found: Checkpoint | SetAside | None) -> str:
        return os.path.relpath(found.path, self.out) if found is not None else ""


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_told_is_the_newest_whole_one(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    run = Run(tmp_path / "out", layout)
    chosen, preparations = choose(run.look())
    assert (run.name(chosen), preparations) == (layout.told.format(n=60), ())


@pytest.mark.parametrize("name", LAYOUTS)
def test_torn_it_is_moved_as_a_whole_and_the_one_before_is_told(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    run = Run(tmp_path / "out", layout, torn=True)
    chosen, preparations = choose(run.look())
    aside = {run.name(one) for one in preparations if isinstance(one, SetAside)}
    assert run.name(chosen) == layout.told.format(n=40)
    assert aside == {one.format(n=60) for one in (layout.told, layout.also) if one}
    run.prepare(preparations)
    again, nothing = choose(run.look())
    assert (run.name(again), nothing) == (layout.told.format(n=40), ())
    assert any(isinstance(one, Restore) for one in preparations) == (name == "one file")


@pytest.mark.parametrize("name", ["DeepSpeed", "Megatron", "verl", "a link", "a whole link", "a marker"])
def test_what_points_to_a_torn_one_is_mended(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "out", LAYOUTS[name], torn=True)
    _, preparations = choose(run.look())
    run.prepare(preparations)
    pointer = next(path for path in run.out.iterdir() if path.name.startswith("latest"))
    names = os.readlink(pointer) if pointer.is_symlink() else pointer.read_text()
    assert os.path.basename(names) in ("40", LAYOUTS[name].told.format(n=40))


def test_an_empty_folder_is_a_save_only_beside_others(tmp_path: Path) -> None:
    (tmp_path / "epoch_3").mkdir()
    assert CheckpointScanner().scan([tmp_path], LATER) == []
    write(Ranks(), tmp_path, LAYOUTS["epoch_40/"], 2)
    found = CheckpointScanner().scan([tmp_path], LATER)
    assert {os.path.basename(c.path): c.why for c in found} == {"epoch_3": "the folder is empty", "epoch_2": ""}


def test_a_torn_checkpoint_of_the_trainer_is_known_by_those_beside(tmp_path: Path) -> None:
    for step in (20, 40):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        safetensors.save_file({"w": torch.ones(9)}, folder / "model.safetensors")
        if step == 20:
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": 20}))
    found = CheckpointScanner().scan([tmp_path], LATER)
    assert [(c.step, c.complete) for c in found] == [(40, False), (20, True)]
