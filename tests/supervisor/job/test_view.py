"""What is told of a run and acted on by nobody: nodes that differ, ranks that hold the others up."""

from __future__ import annotations

from typing import Any

import msgspec

from diagnosis.signals import Evidence, Finding
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint, RankLayout
from recovery.snapshot_choice import NodeSnapshot
from supervisor import messages as m
from supervisor.node_diff import Difference, compare
from supervisor.notes import text_of


def test_what_differs_between_the_nodes_is_told_once_and_changes_nothing(make_driver: Any) -> None:
    run = make_driver()
    run.join("a", "b", "c")

    def differ(key: str = "driver", **versions: str) -> tuple[Difference, ...]:
        return compare({node: {key: version} for node, version in versions.items()})

    def notes(actions: list[m.Action]) -> list[tuple[str, bool]]:
        return [(text_of(action), action.loud) for action in actions if isinstance(action, m.Note)]

    before = (run.number, run.told["a"].stage)
    actions = run.tell(m.VersionsCompared, differences=differ(a="1", b="2"))
    assert notes(actions) == [("the nodes differ: driver is 1 on a and 2 on b", True)]
    assert {type(action) for action in actions} == {m.Note, m.Assign}  # the line for the terminal, nothing else
    assert (run.number, run.told["a"].stage) == before
    assert run.tell(m.VersionsCompared, differences=differ(a="1", b="2", c="1")) == []
    assert run.job.view().skew[0].text == "driver is 2 on b and 1 on the other 2"
    assert run.tell(m.VersionsCompared, differences=()) == []
    assert run.job.view().skew == ()
    quiet = run.tell(m.VersionsCompared, differences=differ("bios", a="1", b="2"))
    assert notes(quiet) == [("the nodes differ: bios is 1 on a and 2 on b", False)]


def test_who_holds_the_others_up_is_told_and_shown_and_changes_nothing(running: Any) -> None:
    run = running("a", "b")
    before = (run.job.state, run.number)

    actions = run.tell(m.StragglersSeen, attempt=1, ranks=(1,), cost=0.22, since=50_520.0)

    assert [(text_of(one), one.loud) for one in actions if isinstance(one, m.Note)] == [
        ("rank 1 (a) holds the others up: 22 % of every step since 14:02 UTC", True)
    ]
    assert (run.job.state, run.number) == before
    view = run.job.view().stragglers
    assert view is not None
    assert (view.ranks, view.cost_percent) == ((1,), 22.0)
    assert run.tell(m.StragglersSeen, attempt=7, ranks=(0,), cost=0.5) == []  # of no attempt that there is
    over = run.tell(m.StragglersSeen, attempt=1, ranks=())
    assert [text_of(one) for one in over if isinstance(one, m.Note)] == ["rank 1 no longer slows the others down"]
    assert run.job.view().stragglers is None


def test_what_a_slow_rank_costs_is_told_with_it(running: Any) -> None:
    run = running("a", "b")
    (told,) = (
        one
        for one in run.tell(
            m.StragglersSeen, attempt=1, ranks=(1,), cost=0.165, since=50_520.0, step_s=0.97, starved=0.4
        )
        if isinstance(one, m.Note)
    )
    for figure in ("40 %", "0.81 s", "0.97 s", "16 %", "16 rank-hours a day"):
        assert figure in text_of(told)
    view = run.job.view().stragglers
    assert view is not None
    assert view.text == text_of(told)


def test_what_is_known_of_a_slow_ranks_gpu_is_told_with_it(running: Any) -> None:
    run = running("a", "b")
    hot = Finding(
        rule="gpu_hw_slowdown",
        failure_class=FailureClass.GPU_THERMAL_POWER,
        confidence=0.5,
        scope="gpu",
        severity="warning",
        evidence=Evidence(text="thermal slowdown in 90 % of 600 s, 91 °C", source="gpu"),
        node="b",
        rank=1,
        gpu="0000:c1:00",
        at=run.job.now,
    )
    run.tell(m.FindingArrived, node="b", finding=hot, number=0)

    actions = run.tell(m.StragglersSeen, attempt=1, ranks=(1,), cost=0.22, since=run.job.now)

    (note,) = (text_of(one) for one in actions if isinstance(one, m.Note))
    assert note.endswith(
        ": its GPU 0000:c1:00 is slowed down by heat or power (thermal slowdown in 90 % of 600 s, 91 °C)"
    )
    view = run.job.view().stragglers
    assert view is not None
    assert view.text == note


# ----- checkpoints: what a restart would resume from now, and lose -----


def of_step(step: int, **more: Any) -> Checkpoint:
    return Checkpoint(
        **{"path": f"/c/save{step}", "step": step, "complete": True, "format": "deepspeed", "modified_at": step, **more}
    )


def test_what_a_restart_would_lose(running: Any) -> None:
    run = running("a", step=1)
    assert run.job.view().restart.path == ""
    run.tell(m.CheckpointsSeen, node="a", checkpoints=(of_step(20, modified_at=run.now),))
    run.tell(m.Progressed, after=60, attempt=1, step=32)
    restart = run.job.view().restart
    assert (restart.path, restart.step, restart.loses_steps, restart.loses_s) == ("/c/save20", 20, 12, 60.0)


def test_a_restart_would_start_from_a_newer_snapshot_in_memory(running: Any) -> None:
    run = running("a", step=1)
    held = NodeSnapshot(attempt=1, step=30, first_rank=0, ranks=2, world=2, at=run.now)
    run.tell(m.Progressed, after=60, attempt=1, step=32)
    for step, from_memory in ((20, True), (30, False), (40, False)):
        run.tell(m.CheckpointsSeen, node="a", checkpoints=(of_step(step, modified_at=run.now),))
        restart = run.job.view(None, held).restart
        assert restart.from_memory == from_memory
        assert (restart.step, restart.path) == ((30, "") if from_memory else (step, f"/c/save{step}"))
        after = restart.after_node_loss
        if from_memory:
            assert (restart.loses_steps, restart.loses_s) == (2, 60.0)
            assert (after.step, after.path, after.loses_steps) == (step, f"/c/save{step}", 12)
        else:
            assert after is None
    run.tell(m.NumbersSeen, after=1, attempt=1, bad=True, step=33, ranks=(0,))
    late = msgspec.structs.replace(held, step=50, at=run.now + 1)
    assert not run.job.view(None, late).restart.from_memory


def test_to_look_changes_nothing(running: Any) -> None:
    run = running("a")
    run.tell(m.CheckpointsSeen, node="a", checkpoints=(of_step(20), of_step(40, complete=False, why="torn")))
    before = run.job.checkpoints.choose(("a",))
    run.job.view()
    assert run.job.checkpoints.choose(("a",)) == before


def test_what_one_node_has_read_counts_against_what_others_only_saw(running: Any) -> None:
    run = running("a", "b")
    changed = of_step(40, complete=False, changed=True, why="its bytes differ")
    for node, newest in (("a", of_step(40)), ("b", changed)):
        run.tell(m.CheckpointsSeen, node=node, checkpoints=(of_step(20), newest))
    view = run.job.view()
    assert view.restart.path == "/c/save20"
    assert {one.step: one.verdict for one in view.checkpoints} == {20: "whole", 40: "changed"}


def test_a_checkpoint_that_another_number_of_ranks_cannot_load_is_told(running: Any) -> None:
    for world_size, told in ((2, []), (8, ["world_size_differs"])):
        run = running("a")
        layout = RankLayout(world_size=world_size, data=world_size, fixed=True)
        run.tell(m.CheckpointsSeen, node="a", checkpoints=(of_step(20, layout=layout),))
        run.crash("a", 1)
        offer = m.StoreOffer(host="a", port=1, local_world_size=2)
        notes = run.tell(m.LauncherReady, node="a", attempt=2, offer=offer)
        assert [one.kind for one in notes if isinstance(one, m.Note) and one.kind == "world_size_differs"] == told
