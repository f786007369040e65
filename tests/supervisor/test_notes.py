"""Notes: a kind and arguments, made into a sentence in one place."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import pytest

from supervisor.messages import EVENT_TAGS, AnyEvent, Note
from supervisor.notes import EVENTS, KINDS, note, repeats, same, tells, text_of


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_shown_whatever_its_arguments_are(kind: str) -> None:
    for arguments in ({}, dict.fromkeys(("seconds", "confidence", "delay_s", "wait_s", "quiet_s"), "?")):
        told = text_of(note(kind, incident="i-1", **arguments))
        assert "{" not in told
        assert "[" not in told


def test_templates_of_events_name_fields_of_theirs() -> None:
    fields = {str(one.__struct_config__.tag): set(one.__struct_fields__) for one in get_args(AnyEvent)}
    for tag, kind in EVENTS.items():
        assert set(re.findall(r"\{(\w+)|\[!?(\w+)\?", kind.text)) <= {("", one) for one in fields[tag]} | {
            (one, "") for one in fields[tag]
        }
    assert {tag for kind in KINDS.values() for tag in (*kind.tells, *kind.repeats)} <= EVENT_TAGS


def test_numbers_and_lists_are_formatted() -> None:
    told = note("verdict", incident="i-1", failure_class="oom", confidence=0.955, why="rank 3 said so")
    assert text_of(told) == "i-1: oom (96% sure): rank 3 said so"
    assert text_of(told, behind_id=True) == "oom (96% sure): rank 3 said so"
    nodes = tuple(f"n{number}" for number in range(9))
    assert text_of(note("attempt_forming", attempt=0, nodes=nodes)) == (
        "attempt 0 is being formed on n0, n1, n2, n3, n4, n5, n6, n7, ..."
    )


def test_notes_are_compared_without_their_sentences() -> None:
    one = note("node_lost", node="n3", why="silent for 4 s")
    assert same(one, note("node_lost", node="n3", why="not heard for 4 s"))
    assert not same(one, note("node_lost", node="n4", why="silent for 4 s"))
    assert not same(one, note("node_lost", node="n3", why="silent for 4 s", loud=True))
    assert not same(one, note("node_unknown", node="n3"))


def test_notes_of_old_journals_are_shown_and_compared_by_what_they_are_about() -> None:
    old = msgspec.json.decode(b'{"type":"note","text":"i-1: rank 1 was killed","incident":"i-1"}', type=Note)
    assert text_of(old) == "i-1: rank 1 was killed"
    assert text_of(old, behind_id=True) == "rank 1 was killed"
    assert same(old, note("incident_opened", incident="i-1", what="rank 1 was killed"))
    assert not same(old, note("incident_opened", incident="i-2", what="rank 1 was killed"))


def test_notes_of_newer_versions_are_shown() -> None:
    assert text_of(Note(kind="moon_seen", arguments={"nodes": ("n1", "n2")})) == "moon seen: nodes n1, n2"


def test_a_note_may_tell_or_repeat_its_event() -> None:
    assert tells(note("node_back", node="n3", host="h3"), "node_joined")
    assert repeats(note("node_joined", node="n3", host="h3"), "node_joined")
    assert not tells(note("node_joined", node="n3", host="h3"), "node_joined")


def test_a_note_from_before_kinds_stands_for_its_event() -> None:
    old = Note(text="rank 1 on b ended with code 1")
    assert tells(old, "rank_ended")
    assert tells(old, "override_given")
    assert not tells(old, "progressed")
