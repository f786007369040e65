from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.checkpoint import (
    INCOMPLETE,
    POINTER,
    ROLLED_BACK,
    TEMPORARY,
    Checkpoint,
    Restore,
    ResumeSituation,
    SetAside,
    choose,
    going_on,
    newest,
)


def checkpoint(
    step: int | None, path: str = "", *, complete: bool = True, at: float | None = None, **more: object
) -> Checkpoint:
    return Checkpoint(
        path=path or f"/c/checkpoint-{step}",
        step=step,
        format="torch_save" if path.endswith(".pt") else "hf",
        complete=complete,
        why="" if complete else "it is torn",
        modified_at=float(step or 0) if at is None else at,
        **more,  # type: ignore[arg-type]
    )


def test_an_empty_list_is_normal() -> None:
    assert choose([]) == (None, ())


def test_the_newest_complete_one_and_what_is_newer_goes_aside() -> None:
    torn_old, good, torn = checkpoint(5, complete=False), checkpoint(10), checkpoint(20, complete=False)
    chosen, preparations = choose([torn, good, torn_old])
    assert chosen == good
    assert preparations == (SetAside(path=torn.path, why=INCOMPLETE + "it is torn"),)


def test_nothing_complete_everything_broken_goes_aside() -> None:
    chosen, preparations = choose([checkpoint(10, complete=False)])
    assert chosen is None
    assert [step.path for step in preparations] == ["/c/checkpoint-10"]


def test_suspect_ones_only_when_nothing_else_is_left() -> None:
    good, suspect = checkpoint(10), checkpoint(20, suspect=True)
    chosen, preparations = choose([suspect, good])
    assert chosen == good
    assert preparations[0].path == suspect.path
    assert choose([suspect]) == (suspect, ())


def test_a_later_step_than_allowed_is_moved_aside() -> None:
    chosen, preparations = choose(
        [checkpoint(10), checkpoint(20), checkpoint(30)], ResumeSituation(kind="operator", step=15)
    )
    assert chosen == checkpoint(10)
    assert [step.path for step in preparations] == ["/c/checkpoint-20", "/c/checkpoint-30"]
    assert isinstance(preparations[0], SetAside)
    assert preparations[0].why.startswith(ROLLED_BACK)


def test_a_file_that_tells_no_step_does_not_win() -> None:
    assert choose([checkpoint(None, "/c/tokenizer.pt", at=99.0), checkpoint(10)])[0] == checkpoint(10)
    assert choose([checkpoint(None, "/c/a.pt", at=1.0), checkpoint(None, "/c/b.pt", at=2.0)])[0] == checkpoint(
        None, "/c/b.pt", at=2.0
    )


def test_a_torn_file_is_replaced_by_its_copy() -> None:
    torn = checkpoint(None, "/c/ckpt.pt", complete=False, at=300.0)
    copies = [checkpoint(step, f"/c/copies/{step}.pt", copy_of="/c/ckpt.pt") for step in (100, 200)]
    chosen, preparations = choose([torn, *copies])
    assert chosen == checkpoint(200, "/c/ckpt.pt")
    assert preparations == (
        SetAside(path="/c/ckpt.pt", why=INCOMPLETE + "it is torn"),
        Restore(copy="/c/copies/200.pt", path="/c/ckpt.pt"),
    )


def test_a_missing_file_is_restored() -> None:
    chosen, preparations = choose([checkpoint(200, "/c/copies/200.pt", copy_of="/c/ckpt.pt")])
    assert chosen.path == "/c/ckpt.pt"
    assert preparations == (Restore(copy="/c/copies/200.pt", path="/c/ckpt.pt"),)


def test_a_whole_file_is_preferred_to_its_copy() -> None:
    live, copy = checkpoint(200, "/c/ckpt.pt"), checkpoint(200, "/c/copies/200.pt", copy_of="/c/ckpt.pt")
    assert choose([copy, live]) == (live, ())


def test_a_second_file_that_is_torn_gets_its_copy_too() -> None:
    live = checkpoint(300, "/c/last.pt")
    best = checkpoint(None, "/c/best.pt", complete=False, at=250.0)
    copy = checkpoint(200, "/c/copies/200.pt", copy_of="/c/best.pt")
    chosen, preparations = choose([live, best, copy])
    assert chosen == live
    assert preparations[1:] == (Restore(copy="/c/copies/200.pt", path="/c/best.pt"),)


def test_rolling_back_a_single_file() -> None:
    live, copy = checkpoint(300, "/c/ckpt.pt"), checkpoint(200, "/c/copies/200.pt", copy_of="/c/ckpt.pt")
    chosen, preparations = choose([live, copy], ResumeSituation(kind="operator", step=250))
    assert chosen == checkpoint(200, "/c/ckpt.pt")
    assert [type(step) for step in preparations] == [SetAside, Restore]


def test_a_stale_tracker_is_always_in_the_way() -> None:
    tracker = Checkpoint(
        path="/c/latest", step=None, format=POINTER, complete=False, why="it is empty", modified_at=1.0
    )
    assert [step.path for step in choose([checkpoint(10), tracker])[1]] == ["/c/latest"]


def test_newest_ignores_copies() -> None:
    assert newest([checkpoint(5), checkpoint(9, copy_of="/c/x")]) == checkpoint(5)


def test_files_of_one_step_stand_or_fall_together() -> None:
    files = [checkpoint(step, f"/c/{kind}_{step:03d}.pt") for step in (10, 20, 30) for kind in ("model", "optim")]
    assert choose(files)[0] == files[4]
    torn = checkpoint(30, "/c/optim_030.pt", complete=False)
    chosen, preparations = choose([*files[:5], torn])
    assert chosen.step == 20
    assert [step.path for step in preparations] == ["/c/model_030.pt", "/c/optim_030.pt"]
    chosen, preparations = choose(files[:5])
    assert chosen.step == 20
    assert "optim_#.pt is missing" in preparations[0].why  # type: ignore[union-attr]


def test_a_best_file_now_and_then_is_no_companion() -> None:
    files = [checkpoint(step, f"/c/ckpt_{step}.pt") for step in (10, 20, 30)]
    assert choose([*files, checkpoint(10, "/c/best_10.pt")])[0] == files[2]
    assert choose([*files, checkpoint(10, "/c/best_10.pt"), checkpoint(20, "/c/best_20.pt")])[0] != files[2]


def test_names_that_differ_in_more_than_the_step_are_no_companions() -> None:
    names = {10: "epoch=0-step=10-loss=0.5", 20: "epoch=0-step=20-loss=-0.1", 30: "epoch=1-step=30-loss=2e-3"}
    files = [checkpoint(step, f"/c/{name}.pt") for step, name in names.items()]
    assert choose(files) == (files[2], ())


def test_files_of_ranks_are_counted() -> None:
    files = [checkpoint(step, f"/c/step{step}_rank{rank}.pt") for step in (10, 20, 30) for rank in (0, 1)]
    assert choose(files)[0] in files[4:]
    chosen, _ = choose(files[:5])
    assert chosen.step == 20


def test_a_leftover_temporary_file_spoils_nothing() -> None:
    whole = checkpoint(10, "/c/ckpt_10.pt")
    leftover = Checkpoint(
        path="/c/ckpt_10.pt.tmp", step=10, format="torch_save", complete=False, why=TEMPORARY, modified_at=9.0
    )
    assert choose([whole, leftover])[0] == whole


FIVE = [checkpoint(step) for step in (100, 200, 300, 400, 500)]
"""Each written at the second of its step."""


@pytest.mark.parametrize(
    ("situation", "step"),
    [
        (ResumeSituation(), 500),
        (ResumeSituation(kind="spike", step=401), 400),
        (ResumeSituation(kind="spike", step=400), 300),
        (ResumeSituation(kind="spike", step=450, margin=60), 300),
        (ResumeSituation(kind="spike", step=450, margin=49), 400),
        (ResumeSituation(kind="spike", step=90), None),
        (ResumeSituation(kind="bad_numbers", step=301, margin=60), 300),
        (ResumeSituation(kind="bad_numbers", before=299.5), 200),
        (ResumeSituation(kind="corruption", before=399.9), 300),
        (ResumeSituation(kind="corruption", step=250, before=399.9), 200),
        (ResumeSituation(kind="mismatch", path="/c/checkpoint-500"), 400),
        (ResumeSituation(kind="mismatch", path="/c/checkpoint-200"), 100),
        (ResumeSituation(kind="mismatch", path="/c/gone"), 500),
        (ResumeSituation(kind="operator", step=350), 300),
        (ResumeSituation(kind="operator", step=300), 300),
        (ResumeSituation(kind="operator", step=99), None),
    ],
)
def test_how_far_back_each_situation_goes(situation: ResumeSituation, step: int | None) -> None:
    chosen, preparations = choose(FIVE, situation)
    assert (chosen.step if chosen is not None else None) == step
    aside = {one.path for one in preparations if isinstance(one, SetAside)}
    assert aside == {one.path for one in FIVE if (one.step or 0) > (step or 0)}
    assert all(one.why.startswith(ROLLED_BACK) for one in preparations if isinstance(one, SetAside))


def test_a_rollback_prefers_an_older_trusted_one_and_moves_no_tokenizer() -> None:
    tokenizer = checkpoint(None, "/c/tokenizer.pt", at=999.0)
    suspect, torn = checkpoint(300, suspect=True), checkpoint(200, complete=False)
    chosen, preparations = choose(
        [FIVE[0], torn, suspect, FIVE[4], tokenizer], ResumeSituation(kind="operator", step=400)
    )
    assert chosen == FIVE[0]
    assert [one.path for one in preparations] == [torn.path, suspect.path, FIVE[4].path]


def test_a_copy_of_the_one_that_does_not_fit_is_used() -> None:
    live, copy = checkpoint(300, "/c/ckpt.pt"), checkpoint(200, "/c/copies/200.pt", copy_of="/c/ckpt.pt")
    chosen, preparations = choose([live, copy], ResumeSituation(kind="mismatch", path="/c/ckpt.pt"))
    assert chosen == checkpoint(200, "/c/ckpt.pt")
    assert [type(step) for step in preparations] == [SetAside, Restore]


def test_what_a_run_may_go_back_to() -> None:
    others = [checkpoint(350, suspect=True), checkpoint(450, complete=False), checkpoint(None, "/c/t.pt", at=9e9)]
    beside = checkpoint(300, "/c/best_300.pt", at=9e9)
    assert [one.path for one in going_on([*others, beside, *FIVE])] == [one.path for one in reversed(FIVE)]
    assert going_on(others) == []


@given(
    st.lists(
        st.builds(
            checkpoint,
            st.none() | st.integers(0, 9),
            st.sampled_from([f"/c/{name}" for name in "abcdef"]),
            complete=st.booleans(),
            at=st.floats(0, 100),
            suspect=st.booleans(),
            copy_of=st.sampled_from(["", "/c/live"]),
        ),
        unique_by=lambda found: found.path,
    ),
    st.builds(
        ResumeSituation,
        kind=st.sampled_from(["crash", "spike", "bad_numbers", "corruption", "mismatch", "operator"]),
        step=st.none() | st.integers(0, 9),
        margin=st.integers(0, 3),
        before=st.none() | st.floats(0, 100),
        path=st.sampled_from(["", "/c/a", "/c/b"]),
    ),
)
def test_rules_that_always_hold(candidates: list[Checkpoint], situation: ResumeSituation) -> None:
    chosen, preparations = choose(candidates, situation)
    aside = [step.path for step in preparations if isinstance(step, SetAside)]
    restored = [step.path for step in preparations if isinstance(step, Restore)]
    assert len(aside) == len(set(aside))
    assert len(restored) == len(set(restored))
    limit, before = situation.not_after_step, situation.before
    good = [c for c in candidates if c.complete]
    good = [c for c in good if limit is None or (c.step is not None and c.step <= limit)]
    good = [c for c in good if before is None or c.modified_at <= before]
    if situation.kind == "mismatch":
        misfit = next((c for c in candidates if c.path == situation.path), None)
        good = [c for c in good if misfit is None or (c != misfit and not newer(c, misfit))]
        good = [c for c in good if misfit is None or newer(misfit, c)]
    assert (chosen is None) == (not good)
    if chosen is None:
        return
    assert chosen.complete
    assert not chosen.copy_of
    assert any((c.step, c.modified_at) == (chosen.step, chosen.modified_at) for c in good), "newer than allowed"
    assert not chosen.suspect or all(c.suspect for c in good)
    assert chosen.path not in aside or chosen.path in restored


def newer(one: Checkpoint, other: Checkpoint) -> bool:
    if one.step is not None and other.step is not None:
        return one.step > other.step
    return one.modified_at > other.modified_at
