"""What an agent does not do at a controller's word."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from recovery.checkpoint import Restore, Resume, SetAside
from supervisor.agent.reconcile import out_of_bounds
from supervisor.messages import Assignment, EvidenceRequest, Round, SpaceWanted, decode_controller_message

ROUND = Round(attempt=1, nodes=("n0", "n1"), store_host="10.0.0.5", store_port=4000)
USUAL = Assignment(
    epoch=1,
    version=1,
    node="n0",
    role="member",
    attempt=1,
    stage="run",
    round=ROUND,
    resume=Resume(path="/data/../ckpt/step 10", step=10),
    prepare=(SetAside(path="/data/ckpt", why="torn"), Restore(copy="/data/a", path="/data/b")),
    checkpoint_folders=("/data/\u00e9\u00a0\n",),
    evidence=EvidenceRequest(number=1, budget_s=5.0, ranks=(0, 7)),
    wake=(3,),
)

WRONG: list[dict[str, Any]] = [
    {"node": "n1"},
    {"attempt": -1},
    {"attempt": 1 << 60},
    {"stop_signal": "SIGSEGV"},
    {"stop_signal": "Signals"},
    {"grace_s": -1.0},
    {"grace_s": math.inf},
    {"grace_s": math.nan},
    {"round": msgspec.structs.replace(ROUND, store_host="-o x y")},
    {"round": msgspec.structs.replace(ROUND, store_port=-1)},
    {"round": msgspec.structs.replace(ROUND, store_port=1 << 16)},
    {"round": msgspec.structs.replace(ROUND, nodes=("n1",))},
    {"evidence": EvidenceRequest(number=1, budget_s=math.inf)},
    {"evidence": EvidenceRequest(number=1, budget_s=1.0, ranks=(-1,))},
    {"wake": (-1,)},
    {"wake": (1 << 40,)},
    {"resume": Resume(path="relative")},
    {"resume": Resume(path="/a\0b")},
    {"prepare": (SetAside(path="", why=""),)},
    {"prepare": (Restore(copy="relative", path="/a"),)},
    {"prepare": (SetAside(path="/a", why=""),) * 1000},
    {"checkpoint_folders": ("/" + "x" * 5000,)},
    {"space": SpaceWanted(number=1, folders=("relative",))},
    {"notices": ((1, "x"),) * 20_000},
]


def test_usual_assignments_are_within_bounds() -> None:
    assert out_of_bounds(USUAL, "n0") == ""
    adopted = Round(attempt=1, nodes=("n0",), store_host="", store_port=0)
    assert out_of_bounds(msgspec.structs.replace(USUAL, round=adopted), "n0") == ""


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_is_out_of_bounds_has_a_reason(wrong: dict[str, Any]) -> None:
    assert out_of_bounds(msgspec.structs.replace(USUAL, **wrong), "n0")


@pytest.mark.parametrize(
    "change",
    [
        {"prepare": [{"type": "run", "argv": ["rm"]}]},
        {"stage": "execute"},
        {"role": "root"},
        {"attempt": "1"},
        {"resume": {"path": 1}},
    ],
)
def test_an_unknown_kind_of_preparation_cannot_be_decoded(change: dict[str, Any]) -> None:
    told = msgspec.to_builtins(USUAL) | change
    with pytest.raises(msgspec.DecodeError):
        decode_controller_message(msgspec.json.encode(told))


def test_no_field_names_a_program_or_a_variable() -> None:
    """Whoever adds one reads this first: what runs comes from the node's own plan, never from the wire."""
    assert {field.name for field in msgspec.structs.fields(Assignment)} <= {
        *"epoch version node role attempt stage round resume prepare checkpoint_folders paused may_requeue".split(),
        *"evidence wake wake_number evidence_seen findings_seen grace_s stop_signal outcome notices".split(),
        *"space drain_request".split(),  # folders to look at; a reason for root's programs, who check it
    }
