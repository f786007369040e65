"""Joining the parts of several nodes, peers, the order in which files appear, names from others."""

from __future__ import annotations

import random

import pytest

from recovery.checkpoint import Checkpoint, RankLayout, choose
from recovery.tiers import (
    NodePlace,
    NodeTiers,
    NotBrought,
    PartFile,
    PublishedSave,
    SaveKey,
    SavePart,
    bring_back,
    choose_peers,
    commit_groups,
    join,
    judged,
    mirrors_to_drop,
    tracker_of,
    why_bad_name,
)

HERE = "/local/ckpt"


def files(*names: str, size: int = 10) -> tuple[PartFile, ...]:
    return tuple(PartFile(name=name, size=size) for name in names)


def dcp(step: int, owner: str, rank: int, *, committed: bool = False, attempt: int = 1, size: int = 10) -> SavePart:
    """One node's part of a DCP save of two nodes; the first one's has `.metadata`."""
    save = f"step-{step}"
    names = [f"{save}/__{rank}_0.distcp", *([f"{save}/.metadata"] if committed else [])]
    return SavePart(
        name=save,
        owner=owner,
        attempt=attempt,
        format="dcp",
        step=step,
        modified_at=float(step),
        files=files(*names, size=size),
        needs=files(f"{save}/__0_0.distcp", f"{save}/__1_0.distcp") if committed else (),
        why="a part",
    )


def hf(step: int, owner: str, *names: str, whole: bool = False) -> SavePart:
    save = f"checkpoint-{step}"
    return SavePart(
        name=save,
        owner=owner,
        attempt=1,
        format="hf",
        step=step,
        modified_at=float(step),
        files=files(*(f"{save}/{name}" for name in names)),
        whole=whole,
        why="" if whole else "it has no weights",
    )


def two(step: int, **more: int) -> tuple[SavePart, SavePart]:
    return dcp(step, "a", 0, committed=True, **more), dcp(step, "b", 1, **more)


def everybody(*names: str) -> frozenset[str]:
    return frozenset(names)


def test_a_dcp_save_is_whole_over_both_nodes_and_by_neither_alone() -> None:
    first, second = two(10)
    (alone,) = join({"a": NodeTiers(parts=(first,))}, everybody("a", "b"), set())
    assert not alone.whole
    assert "__1_0.distcp is missing" in alone.why
    (other,) = join({"b": NodeTiers(parts=(second,))}, everybody("a", "b"), set())
    assert not other.whole
    (both,) = join({"a": NodeTiers(parts=(first,)), "b": NodeTiers(parts=(second,))}, everybody("a", "b"), set())
    assert both.usable
    assert both.tiers == ("local",)
    assert both.save.owners == ("a", "b")


def test_parts_of_two_attempts_are_never_one_save() -> None:
    first, _ = two(10, attempt=2)
    _, old = two(10, attempt=1)
    joined = join({"a": NodeTiers(parts=(first,)), "b": NodeTiers(parts=(old,))}, everybody("a", "b"), set())
    assert len(joined) == 2
    assert not any(one.usable for one in joined)


def test_a_lost_node_s_part_is_had_from_its_mirror() -> None:
    first, second = two(10)
    reports = {"a": NodeTiers(parts=(first,), mirrors=(second,), port=7), "b": NodeTiers(parts=(second,), port=8)}
    (kept,) = join(reports, everybody("a"), set())
    assert kept.usable
    (lost,) = join({**reports, "a": NodeTiers(parts=(first,))}, everybody("a"), set())
    assert lost.whole
    assert not lost.usable
    assert lost.missing == "the part of b is lost"
    wanted = bring_back([kept], "step-10", reports, {"a": "10.0.0.1", "c": "10.0.0.3"})
    assert wanted is not None
    assert [(source.owner, source.node) for source in wanted.sources] == [("a", "a"), ("b", "a")]


def test_a_file_that_a_crash_cut_off_counts_as_its_mirror_has_it() -> None:
    first, second = two(10)
    torn = SavePart(**{**_fields(second), "files": files("step-10/__1_0.distcp", size=3)})
    reports = {"a": NodeTiers(parts=(first,), mirrors=(second,)), "b": NodeTiers(parts=(torn,))}
    (joined,) = join(reports, everybody("a", "b"), set())
    assert joined.usable
    assert {file.size for file in joined.save.files} == {10}
    (short,) = join({"a": NodeTiers(parts=(first,)), "b": NodeTiers(parts=(torn,))}, everybody("a", "b"), set())
    assert not short.whole
    assert "3 bytes instead of 10" in short.why


def _fields(part: SavePart) -> dict[str, object]:
    return {name: getattr(part, name) for name in part.__struct_fields__}


def test_a_format_that_does_not_name_its_files_waits_until_no_node_adds_any() -> None:
    first = hf(10, "a", "model.safetensors", "trainer_state.json", whole=True)
    second = hf(10, "b", "rng_state_1.pth")
    reports = {"a": NodeTiers(parts=(first,)), "b": NodeTiers(parts=(second,))}
    (early,) = join(reports, everybody("a", "b"), set())
    assert not early.whole
    (later,) = join(reports, everybody("a", "b"), {first.key})
    assert later.usable
    assert len(later.save.files) == 3


def test_the_choice_is_the_newest_that_survivors_hold_and_moves_aside_what_is_newer() -> None:
    (old_a, old_b), (new_a, new_b) = two(10), two(20)
    reports = {"a": NodeTiers(parts=(new_a, old_a), mirrors=(old_b,)), "b": NodeTiers(parts=(new_b, old_b))}
    local = [
        Checkpoint(path=f"{HERE}/step-{step}", step=step, format="dcp", complete=False, why="its own part only")
        for step in (10, 20)
    ]
    both, prepare = choose(judged(local, join(reports, everybody("a", "b"), set()), HERE))
    assert both is not None
    assert both.step == 20
    assert prepare == ()
    survivor, prepare = choose(judged(local, join(reports, everybody("a"), set()), HERE))
    assert survivor is not None
    assert survivor.step == 10
    assert [step.path for step in prepare] == [f"{HERE}/step-20"]


def test_what_no_mover_has_reported_is_neither_offered_nor_moved() -> None:
    parts = two(10)
    reports = {"a": NodeTiers(parts=parts[:1]), "b": NodeTiers(parts=parts[1:])}
    local = [Checkpoint(path=f"{HERE}/step-20", step=20, format="dcp", complete=True, modified_at=20.0)]
    assert choose(judged(local, join(reports, everybody("a", "b"), set()), HERE)) == (None, ())


def test_a_folder_that_each_save_overwrites_is_left_to_the_script() -> None:
    first, second = two(10)
    again = SavePart(**{**_fields(second), "rewritten": True})
    joined = join({"a": NodeTiers(parts=(first,)), "b": NodeTiers(parts=(again,))}, everybody("a", "b"), set())
    assert choose(judged([], joined, HERE)) == (None, ())


def test_what_is_whole_on_one_node_is_in_doubt_until_the_others_have_told() -> None:
    """Whatever is not known: nothing is moved aside for it."""
    parts = (hf(20, "a", "model.safetensors", "trainer_state.json", whole=True),)
    found = Checkpoint(path=f"{HERE}/checkpoint-20", step=20, format="hf", complete=True, modified_at=20.0)
    for opened in (frozenset[int](), frozenset((1,))):
        joined = join({"a": NodeTiers(parts=parts)}, everybody("a"), set(), opened)
        assert joined[0].open
        assert choose(judged([found], joined, HERE)) == (None, ())
    (lost,) = join({"a": NodeTiers(parts=parts)}, everybody("a"), set(), frozenset(), frozenset((1,)))
    assert not lost.open
    assert not lost.usable


def test_a_node_that_has_all_by_itself_is_not_overruled() -> None:
    """Its report is cut where a save has very many files."""
    cut = SavePart(**{**_fields(two(20)[0]), "whole": True})
    joined = join({"a": NodeTiers(parts=(cut,))}, everybody("a"), set())
    assert choose(judged([], joined, HERE)) == (None, ())


def test_what_nodes_have_read_in_a_save_counts() -> None:
    (old_a, old_b), (new_a, new_b) = two(10), two(20)
    joined = join(
        {"a": NodeTiers(parts=(new_a, old_a)), "b": NodeTiers(parts=(new_b, old_b))}, everybody("a", "b"), set()
    )
    layout = RankLayout(world_size=2)
    mine = Checkpoint(path=f"{HERE}/step-20", step=20, format="dcp", complete=False, began_at=5.0, layout=layout)
    for bad in ({"changed": True, "why": "its bytes differ"}, {"suspect": True, "why": "a weight is not finite"}):
        theirs = Checkpoint(path=f"{HERE}/step-20", step=20, format="dcp", **{"complete": False, **bad})
        chosen, prepare = choose(judged([mine, theirs], joined, HERE))
        assert chosen is not None
        assert chosen.step == 10
        assert [step.path for step in prepare] == [f"{HERE}/step-20"]
    (found,) = [one for one in judged([mine], joined, HERE) if one.step == 20]
    assert (found.layout, found.began_at, found.complete) == (layout, 5.0, True)


def test_nothing_is_brought_into_a_folder_that_nodes_share() -> None:
    reports = {"a": NodeTiers(parts=two(10), port=7, shared=True), "c": NodeTiers(port=7)}
    joined = join(reports, everybody("a", "c"), set())
    assert joined[0].usable
    assert bring_back(joined, "step-10", reports, {"a": "h", "c": "i"}) is None


def test_a_node_that_gets_nothing_costs_the_others_nothing() -> None:
    """It failed at one save: another one is used. It fails at that one, too: it is the node."""
    (old_a, old_b), (new_a, new_b) = two(10), two(20)
    have = {"a": NodeTiers(parts=(new_a, old_a)), "b": NodeTiers(parts=(new_b, old_b))}
    failed = tuple(NotBrought(name=f"step-{step}", attempt=1, why="no room") for step in (20, 10))
    for count, step in ((0, 20), (1, 10), (2, 20)):
        joined = join({**have, "c": NodeTiers(failed=failed[:count])}, everybody("a", "b", "c"), set())
        assert all(one.whole and not one.missing for one in joined)
        chosen, _ = choose(judged([], joined, HERE))
        assert chosen is not None
        assert chosen.step == step


def test_a_published_save_is_usable_when_all_its_nodes_are_gone() -> None:
    one = PublishedSave(name="step-10", attempt=1, format="dcp", step=10)
    (joined,) = join({"c": NodeTiers(published=(one,))}, everybody("c"), set())
    assert joined.usable
    assert joined.tiers == ("published",)
    wanted = bring_back([joined], "step-10", {}, {"c": "h"})
    assert wanted is not None
    assert wanted.published
    assert not wanted.sources


def test_copies_that_were_brought_hide_nothing() -> None:
    """They are whole by the word of who brought them, and do not tell what is needed."""
    first, second = two(10)
    brought = tuple(SavePart(**{**_fields(one), "needs": (), "whole": True}) for one in (first, second))
    reports = {"a": NodeTiers(parts=(first,), mirrors=brought[1:]), "c": NodeTiers(mirrors=brought)}
    (joined,) = join(reports, everybody("a", "c"), set())
    assert joined.usable


def test_staged_means_every_part() -> None:
    first, second = two(10)
    key = (tuple(first.key),)
    half = join({"a": NodeTiers(parts=(first,), staged=key), "b": NodeTiers(parts=(second,))}, everybody("a"), set())
    full = join(
        {"a": NodeTiers(parts=(first,), staged=key), "b": NodeTiers(parts=(second,), staged=key)}, everybody("a"), set()
    )
    assert (half[0].staged, full[0].staged) == (False, True)


# ----- peers -----


def test_peers_are_in_another_domain_and_stay_when_others_are_lost() -> None:
    places = [NodePlace(f"n{i}", f"h{i}", f"rack{i // 4}") for i in range(16)]
    names = {place.node for place in places}
    domain = {place.node: place.domain for place in places}
    peers = choose_peers(places, names)
    assert len(peers) == 16
    assert len(set(peers.values())) == 16
    assert all(domain[node] != domain[peer] and node != peer for node, peer in peers.items())
    for lost in names:
        now = choose_peers(places, names - {lost})
        assert {node for node in now if now[node] != peers[node]} == {node for node in now if peers[node] == lost}
        assert lost not in now.values()


@pytest.mark.parametrize("seed", range(20))
def test_whoever_is_there_has_a_peer_that_is_there(seed: int) -> None:
    dice = random.Random(seed)
    places = [
        NodePlace(f"n{i}", f"h{dice.randrange(6)}", dice.choice(("", "x", "y"))) for i in range(dice.randrange(1, 9))
    ]
    present = {place.node for place in places if dice.random() < 0.7}
    peers = choose_peers(places, present)
    assert set(peers) == (present if len(present) > 1 else set())
    assert all(peer in present and peer != node for node, peer in peers.items())


def test_the_newest_two_mirrors_are_kept() -> None:
    held = [(SaveKey(f"step-{n}", 1 + (n > 30), 0), float(n)) for n in (10, 20, 40, 30)]
    assert {key.name for key in mirrors_to_drop(held)} == {"step-10", "step-20"}


# ----- what becomes visible when -----


@pytest.mark.parametrize(
    ("names", "last"),
    [
        (("s/.metadata", "s/__0_0.distcp", "s/z.distcp"), "s/.metadata"),
        (("c/trainer_state.json", "c/model.safetensors", "c/model.safetensors.index.json"), "c/trainer_state.json"),
        (("k/random_states_0.pkl", "k/zz.bin"), "k/random_states_0.pkl"),
        (("i/metadata.json", "i/common.pt", "i/__0_0.distcp", "i/.metadata"), "i/.metadata"),
    ],
)
def test_what_says_that_the_others_are_there_comes_last(names: tuple[str, ...], last: str) -> None:
    groups = commit_groups(names)
    assert groups[-1] == [last]
    assert sorted(name for group in groups for name in group) == sorted(names)


def test_trackers() -> None:
    first, second = two(10)
    (joined,) = join({"a": NodeTiers(parts=(first,)), "b": NodeTiers(parts=(second,))}, everybody("a", "b"), set())
    assert tracker_of(joined.save) is None
    one = PublishedSave(name="run/iter_0000100", format="megatron", step=100)
    (published,) = join({"a": NodeTiers(published=(one,))}, everybody("a"), set())
    assert tracker_of(published.save) == ("run/latest_checkpointed_iteration.txt", "100")


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/./b", "a\0b", "x/" * 9 + "x", "a" * 256, ".unbroken-mirrors/x",
     "a/.unbroken-set-aside/b", "a/", "\udcff"],
)  # fmt: skip
def test_names_that_lead_elsewhere(name: str) -> None:
    assert why_bad_name(name)


@pytest.mark.parametrize("name", ["ckpt.pt", "step-10/.metadata", "run/iter_0000100/mp_rank_00/model_optim_rng.pt"])
def test_names_of_checkpoints(name: str) -> None:
    assert not why_bad_name(name)


@pytest.mark.parametrize(
    ("told", "lost"),
    [
        ({"parts": (hf(10, "b", "rng_state_1.pth"),)}, True),
        ({"writing": ("checkpoint-20",)}, True),
        ({"parts": (hf(20, "b", "rng_state_1.pth"),), "writing": ("checkpoint-20",)}, False),
        ({"parts": (dcp(10, "b", 1),)}, False),
        ({}, False),
    ],
)
def test_what_a_node_wrote_that_is_gone_is_known_by_what_it_told_before(told: dict[str, object], lost: bool) -> None:
    """No file of the format names what others wrote. Where b wrote none so far, the save of a alone may be all."""
    first = hf(20, "a", "model.safetensors", whole=True)
    reports = {"a": NodeTiers(parts=(first,)), "b": NodeTiers(**told)}  # type: ignore[arg-type]
    present = everybody("a", "b") if told.get("parts") and told.get("writing") else everybody("a")
    [save] = [one for one in join(reports, present, set(), closed_attempts={1}) if one.save.step == 20]
    assert not save.usable
    assert (save.missing == "the part of b is lost") is lost
    seen = Checkpoint(path=f"{HERE}/checkpoint-20", step=20, format="hf", complete=True, modified_at=20.0)
    [found] = [one for one in judged([seen], [save], HERE) if one.step == 20]
    assert found.in_doubt is not lost
