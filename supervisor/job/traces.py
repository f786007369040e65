"""Traces that an operator asks for: which ranks of which nodes are to make one now. It decides nothing else.

The answer does not come through the job: each node puts it into the job folder, where the command waits for it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from supervisor import messages as m
from supervisor.job.attempts import Attempts
from supervisor.job.core import Core, Wants
from supervisor.job.nodes import Nodes
from supervisor.notes import note

MOST_RANKS = 64
"""In one request: each trace takes megabytes for every step."""
MOST_STEPS = 100
LONGEST_S = 600.0
_NAME = re.compile(r"[a-z0-9]{4,16}")
_NUMBERS = re.compile(r"\d{1,7}(?:,\d{1,7}){0,63}")


class Traces:
    def __init__(self, core: Core, nodes: Nodes, attempts: Attempts) -> None:
        self._core, self._nodes, self._attempts = core, nodes, attempts
        self._number = 0
        self._wanted: m.TraceRequest | None = None
        self._attempt = 0

    def of(self, node: str) -> m.TraceRequest | None:
        """What this node is asked for, if the attempt is still the one that was asked about."""
        attempt, wanted = self._attempts.current, self._wanted
        if wanted is None or attempt is None or attempt.number != self._attempt or attempt.over:
            return None
        ranks = tuple(rank for rank in wanted.ranks if rank in attempt.ranks.get(node, ()))
        return msgspec.structs.replace(wanted, ranks=ranks) if ranks else None

    def asked(self, event: m.OperatorCommand) -> Wants:
        request = read_request(event.argument)
        attempt = self._attempts.current
        if request is None:
            yield _refuse("trace_unclear", argument=event.argument)
        elif attempt is None or attempt.over or self._core.state not in ("RUNNING", "DIAGNOSING"):
            yield _refuse("trace_nothing_runs")
        elif request.what == "steps" and not self._core.spec.traceable:
            yield _refuse("trace_not_allowed")
        elif missing := sorted(set(request.ranks) - set(attempt.rank_nodes)):
            yield _refuse("trace_no_rank", ranks=tuple(map(str, missing)))
        else:
            self._number += 1
            self._wanted = msgspec.structs.replace(request, number=self._number)
            self._attempt = attempt.number
            for name in attempt.members:
                self._nodes.touch(name)
            yield note(
                "trace_asked",
                ranks=tuple(map(str, request.ranks)),
                many=len(request.ranks) > 1,
                steps=request.steps,
                input=request.what == "input",
            )


def read_request(argument: str) -> m.TraceRequest | None:
    """`NAME --ranks 0,5 --steps 3 --wait 60` or `NAME --ranks 0,5 --input --wait 60`; None: it is neither."""
    name, *words = argument.split()[:16] or [""]
    what = "input" if "--input" in words else "steps"
    words = [word for word in words if word != "--input"]
    given = dict(zip(words[::2], words[1::2], strict=False))
    steps, wait = given.get("--steps", "3"), given.get("--wait", "60")
    if not _NAME.fullmatch(name) or len(words) % 2 or set(given) - {"--ranks", "--steps", "--wait"}:
        return None
    if not _NUMBERS.fullmatch(given.get("--ranks", "")) or not (steps.isascii() and steps.isdigit() and len(steps) < 4):
        return None
    if not (wait.isascii() and wait.isdigit() and len(wait) < 4):
        return None
    ranks = tuple(sorted(set(map(int, given["--ranks"].split(",")))))
    if not (0 < int(steps) <= MOST_STEPS and 0 < int(wait) <= LONGEST_S and len(ranks) <= MOST_RANKS):
        return None
    return m.TraceRequest(
        number=0,
        name=name,
        what="input" if what == "input" else "steps",
        ranks=ranks,
        steps=int(steps),
        budget_s=float(wait),
    )


def _refuse(kind: str, **arguments: Any) -> m.Note:
    return note(kind, refused=True, **arguments)
