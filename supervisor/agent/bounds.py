"""Bounds on what an assignment may ask of an agent, whoever the controller is. Pure.

An assignment names no program, argument or variable: what runs is in the node's own plan, which the front wrote from
the user's command. Preparations are of known kinds only (`Preparation`), or the message cannot be read. Which files may
be moved is decided where they are moved, by who wrote them. All other bounds are here.
"""

from __future__ import annotations

import math
import re

from supervisor.messages import Assignment

LONGEST_GRACE_S = 3600.0
LONGEST_EVIDENCE_S = 300.0
ATTEMPTS = 10_000_000
RANKS = NODES = 1_000_000
PATH_CHARACTERS = 4096
FOLDERS = 64
PREPARATIONS = 256
NOTICES = 10_000
STOP_SIGNALS = frozenset({"SIGINT", "SIGTERM"})
_HOST = re.compile(r"[A-Za-z0-9._:%-]{0,255}")
"""Empty, with port 0, where a controller that lost its journal found ranks that run already."""


def out_of_bounds(assignment: Assignment, node: str) -> str:
    """Why `node` must not act on the assignment, in words; empty when it may."""
    if assignment.node != node:
        return f"it is for node {assignment.node[:64]!r}"
    if not 0 <= assignment.attempt < ATTEMPTS:
        return f"its attempt is {assignment.attempt}"
    if assignment.stop_signal not in STOP_SIGNALS:
        return f"its stop signal is {assignment.stop_signal[:20]!r}"
    if not _within(assignment.grace_s, LONGEST_GRACE_S):
        return f"its grace period is {assignment.grace_s} s"
    return _round(assignment) or _evidence(assignment) or _paths(assignment)


def _round(assignment: Assignment) -> str:
    formed = assignment.round
    if formed is None:
        return ""
    if not _HOST.fullmatch(formed.store_host) or not 0 <= formed.store_port < 65536:
        return "its rendezvous has no address"
    rank = formed.rank_of(assignment.node)
    if assignment.role == "member" and formed.attempt == assignment.attempt and rank is None:
        return "its round leaves this node out"
    if rank is not None and not 0 <= rank < formed.size <= NODES:
        return f"its round gives this node the place {rank} of {formed.size}"
    return ""


def _evidence(assignment: Assignment) -> str:
    asked = assignment.evidence
    if asked is not None and not _within(asked.budget_s, LONGEST_EVIDENCE_S):
        return f"its evidence may take {asked.budget_s} s"
    ranks = (*assignment.wake, *(asked.ranks if asked is not None else ()))
    if len(ranks) > RANKS or not all(0 <= rank < RANKS for rank in ranks):
        return "it names impossible ranks"
    return ""


def _paths(assignment: Assignment) -> str:
    watched = assignment.space.folders if assignment.space is not None else ()
    if len(assignment.prepare) > PREPARATIONS or max(len(assignment.checkpoint_folders), len(watched)) > FOLDERS:
        return "it names too many paths"
    if len(assignment.notices) > NOTICES:
        return "it has too many notices"
    paths = [*assignment.checkpoint_folders, *watched]
    if assignment.resume is not None and assignment.resume.path:
        paths.append(assignment.resume.path)
    for preparation in assignment.prepare:
        paths.append(preparation.path)
        paths.extend([copy] if (copy := getattr(preparation, "copy", "")) else [])
    for path in paths:
        if not is_absolute_path(path):
            return f"{path[:80]!r} is no absolute path"
    return ""


def is_absolute_path(path: str) -> bool:
    """Absolute and of a possible length. Users' folders may have any other characters in their names."""
    return path.startswith("/") and len(path) <= PATH_CHARACTERS and "\0" not in path


def _within(seconds: float, most: float) -> bool:
    return math.isfinite(seconds) and 0 <= seconds <= most
