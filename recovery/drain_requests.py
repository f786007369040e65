"""Requests to drain a node, from jobs that may not drain it themselves to root's programs on that node.

A job whose user lacks the rights leaves a file in a folder of the node; what root runs there (Slurm's Epilog and
HealthCheckProgram) reads it. Any user can write one, so root believes little of it: only jobs that Slurm has on this
node, only this node, only this boot, only what looks as we write it, and only so many nodes within an hour.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis.signals import clean_line
from diagnosis.taxonomy import FailureClass
from recovery.cordon import REASON_LIMIT, is_drain_of
from recovery.scheduling import PREFIX

FOLDER: Final = "/var/spool/unbroken"
SIZE_LIMIT: Final = 4096
AGE_LIMIT_S: Final = 7 * 86400.0
"""An Epilog may come as late as the end of the job."""
AHEAD_S: Final = 60.0
"""A time that lies further ahead than this is none."""
WINDOW_S: Final = 3600.0
PER_HOUR: Final = 2

_CLASSES: Final = frozenset(one.value for one in FailureClass)


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    schema: Literal[1] = 1
    job: str
    node: str
    """As the scheduler calls it."""
    reason: str
    """As `recovery.cordon.drain_reason` makes it."""
    boot_id: str
    at: float
    """Unix time."""


class Drained(NamedTuple):
    """A node that is drained, as the scheduler tells it."""

    node: str
    at: float
    reason: str
    """May be cut."""


def file_name(job: str, uid: int) -> str:
    """Of the one request that a job has on a node: root looks for the names that can be, and lists nothing."""
    return f"{job}.{uid}.json"


def may_be_asked(reason: str, job: str) -> bool:
    """Whether root's programs take this reason: a verdict of this job, not an order of somebody who can write to it."""
    return is_drain_of(reason, job) and reason.split()[1] in _CLASSES


def read_request(data: bytes, *, job: str, node: str, boot_id: str, now: float) -> DrainRequest | str:
    """The request, or why it is none, in words."""
    if len(data) > SIZE_LIMIT:
        return f"it is longer than {SIZE_LIMIT} bytes"
    try:
        request = msgspec.json.decode(data, type=DrainRequest)
    except (msgspec.DecodeError, RecursionError):
        return "its format is not ours"
    if (request.job, request.node) != (job, node):
        return "it is about another job or node"
    if request.boot_id != boot_id:
        return "the node was booted since"
    if not now - AGE_LIMIT_S <= request.at <= now + AHEAD_S:
        return "it is too old"
    if request.reason != clean_reason(request.reason) or not may_be_asked(request.reason, job):
        return "its reason is not one of our verdicts"
    return request


def clean_reason(text: str) -> str:
    return clean_line(text, REASON_LIMIT).replace('"', "'")


def too_many(drained: Iterable[Drained], node: str, per_hour: int, now: float) -> int:
    """How many nodes were drained by us within the hour, where `node` is, or would be, one too many; else 0.

    Several nodes look at the same time. So each looks again after it was drained, and those that came last step back.
    """
    ours = {one.node: one.at for one in drained if one.reason.startswith(PREFIX) and one.at > now - WINDOW_S}
    order = sorted(ours, key=lambda name: (ours[name], name))
    place = order.index(node) if node in ours else len(order)
    return len(order) if place >= per_hour else 0
