"""Formats whose ranks write beside each other, and in which no file names all the others: two nodes have a part each.

Alone, neither part is whole; together they are, and so they are published, and brought to a node that has neither.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from recovery.formats import inspect
from recovery.quarantine import read_records, undo
from recovery.tiers import join
from supervisor.mover.publish import Publisher
from tests.conftest import Later
from tests.recovery.test_formats import save, save_deepspeed, save_hf
from tests.supervisor.mover.test_kills import content_of
from tests.supervisor.mover.test_mover import Node, lose_disk, node, wanted

__all__ = ["node"]

torch = Later("torch")

Nodes = Callable[[str], Node]


def megatron(root: Path, step: int) -> Path:
    """Pipeline-parallel ranks on two nodes; each file has the run's arguments."""
    folder = root / f"iter_{step:07d}"
    args = argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    for rank in (0, 1):
        save(folder / f"mp_rank_00_{rank:03d}" / "model_optim_rng.pt", iteration=step, args=args)
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def hugging_face(root: Path, step: int) -> Path:
    folder = save_hf(root / f"checkpoint-{step}", step)
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    shutil.copy(folder / "rng_state_0.pth", folder / "rng_state_1.pth")
    return folder


LAYOUTS = {
    "megatron": (megatron, "mp_rank_00_001/model_optim_rng.pt", "latest_checkpointed_iteration.txt"),
    "deepspeed": (save_deepspeed, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "latest"),
    "hf": (hugging_face, "rng_state_1.pth", ""),
}


@pytest.fixture(params=LAYOUTS)
def saved(request: pytest.FixtureRequest, node: Nodes) -> tuple[Node, Node, str, str, str]:
    """Nodes a and b with their parts of step 20, its name, what b wrote of it, and the tracker file."""
    write, of_b, tracker = LAYOUTS[request.param]
    a, b = node("a"), node("b")
    folder = write(a.folder, 20)
    b.write(f"{folder.name}/{of_b}", (folder / of_b).read_bytes())
    (folder / of_b).unlink()
    for empty in [path for path in folder.rglob("*") if path.is_dir() and not any(path.iterdir())]:
        empty.rmdir()
    return a, b, folder.name, of_b, tracker


def look(*nodes: Node) -> dict[str, object]:
    for one in nodes:
        one.look()
    reports = {one.name: one.mover.status().tiers for one in nodes}
    keys = {part.key for report in reports.values() for part in report.parts}
    return {one.save.name: one for one in join(reports, set(reports), keys)}


def test_parts_that_are_not_whole_alone_are_whole_together(saved: tuple[Node, Node, str, str, str]) -> None:
    a, b, name, _, _ = saved
    assert not inspect(a.folder / name).complete
    assert not inspect(b.folder / name).complete
    assert not look(a)[name].usable
    assert not look(b)[name].usable
    assert look(a, b)[name].usable


def test_a_torn_part_of_another_node_is_seen(saved: tuple[Node, Node, str, str, str]) -> None:
    a, b, name, of_b, _ = saved
    whole = (b.folder / name / of_b).read_bytes()
    b.write(f"{name}/{of_b}", whole[: len(whole) // 2])
    assert not look(a, b)[name].usable


def test_it_is_published_and_brought_to_a_node_with_nothing(
    saved: tuple[Node, Node, str, str, str], node: Nodes
) -> None:
    a, b, name, _, tracker = saved
    c = node("c")
    if tracker:
        c.write(tracker, (a.folder / tracker).read_bytes().replace(b"20", b"10"))
    found = look(a, b)[name]
    for one, peer in ((a, b), (b, c)):
        one.look(peer=peer.source())
        while one.mover.mirror() or one.mover.stage():
            pass
    a.look(commit=(found.save,))
    assert a.mover.commit()
    shared = a.folder.parent / "shared"
    assert inspect(shared / name).complete
    assert not tracker or (shared / tracker).read_text() == (a.folder / tracker).read_text()
    back = wanted([a, b, c], name, {"a", "c"})
    b.mover._server.close()
    lose_disk(b)
    c.mover.bring(back, 1)
    assert c.mover.status().bring_problem == ""
    assert content_of(c.folder / name) == content_of(shared / name)
    assert not tracker or (c.folder / tracker).read_text() == (a.folder / tracker).read_text()
    for record in read_records(c.folder) if tracker else ():
        undo(record)
        assert "10" in (c.folder / tracker).read_text()
    assert len(read_records(c.folder)) == bool(tracker)
    assert Publisher(shared, a.folder.parent / "job", "a").why_not_free(found.save) == ""


# ----- saves of which one node's part is not as it must be -----


def ranks_of_a_script(a: Path, b: Path) -> Path:
    save(a / "step_20/rank_0.pt", step=20)
    return save(b / "step_20/rank_1.pt", step=20)


def experts(a: Path, b: Path) -> Path:
    """Two of four expert-parallel ranks on each node, two pipeline stages."""
    args = argparse.Namespace(pipeline_model_parallel_size=2, expert_model_parallel_size=4)
    for stage, rank in itertools.product((0, 1), range(4)):
        folder = (a, b)[rank // 2] / "iter_0000020" / f"mp_rank_00_{stage:03d}_{rank:03d}"
        last = save(folder / "model_optim_rng.pt", iteration=20, args=args)
    (a / "latest_checkpointed_iteration.txt").write_text("20")
    return last


def experts_without_stages(a: Path, b: Path) -> Path:
    args = argparse.Namespace(pipeline_model_parallel_size=1, expert_model_parallel_size=4)
    for rank in range(4):
        folder = (a, b)[rank // 2] / "iter_0000020" / f"mp_rank_00_{rank:03d}"
        last = save(folder / "model_optim_rng.pt", iteration=20, args=args)
    (a / "latest_checkpointed_iteration.txt").write_text("20")
    return last


def zero(a: Path, b: Path, folder: str) -> Path:
    """ZeRO's parts in a folder of another library: ranks 0 and 1 on one node, 2 and 3 on the other."""
    for rank in range(4):
        last = save((a, b)[rank // 2] / folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    save(a / folder / "mp_rank_00_model_states.pt", global_steps=20, dp_world_size=4)
    return last


def trainer_with_zero(a: Path, b: Path) -> Path:
    folder = save_hf(a / "checkpoint-20", 20)
    (folder / "rng_state.pth").unlink()
    for rank in range(4):
        save((a, b)[rank // 2] / f"checkpoint-20/rng_state_{rank}.pth")
    return zero(a, b, "checkpoint-20/global_step20")


def accelerate_with_zero(a: Path, b: Path) -> Path:
    for rank in range(4):
        save((a, b)[rank // 2] / f"step_20/random_states_{rank}.pkl")
    return zero(a, b, "step_20/pytorch_model")


UNEVEN = (experts, experts_without_stages, trainer_with_zero, accelerate_with_zero)


@pytest.mark.parametrize("write", [*UNEVEN, ranks_of_a_script])
def test_both_parts_are_one_save(node: Nodes, write: Callable[[Path, Path], Path]) -> None:
    a, b = node("a"), node("b")
    last = write(a.folder, b.folder)
    assert look(a, b)[last.relative_to(b.folder).parts[0]].usable


@pytest.mark.parametrize("write", UNEVEN)
def test_a_node_that_came_back_with_an_empty_disk_is_missed(node: Nodes, write: Callable[[Path, Path], Path]) -> None:
    a, b = node("a"), node("b")
    name = write(a.folder, b.folder).relative_to(b.folder).parts[0]
    shutil.rmtree(b.folder / name)
    assert not look(a, b)[name].whole


@pytest.mark.parametrize("write", [*UNEVEN, ranks_of_a_script])
def test_a_file_that_was_cut_off_on_another_node_is_seen(node: Nodes, write: Callable[[Path, Path], Path]) -> None:
    a, b = node("a"), node("b")
    last = write(a.folder, b.folder)
    last.write_bytes(last.read_bytes()[:300])
    assert not look(a, b)[last.relative_to(b.folder).parts[0]].whole


def test_a_part_of_another_step_is_seen(node: Nodes) -> None:
    a, b = node("a"), node("b")
    folder = megatron(a.folder, 20)
    (folder / "mp_rank_00_001/model_optim_rng.pt").unlink()
    args = argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    save(b.folder / folder.name / "mp_rank_00_001" / "model_optim_rng.pt", iteration=10, args=args)
    assert not look(a, b)[folder.name].whole
