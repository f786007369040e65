"""Which device makes a slow rank or a slow link slow: what else was told of its GPU, or of the ports of its nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis.kernel.rules import KernelEvent
from diagnosis.signals import Evidence, RankStack, clean_line
from diagnosis.stacks.doing import Activity, activity
from diagnosis.story import LineMatch, LogStory, Slowness
from diagnosis.stuck import names
from diagnosis.taxonomy import FailureClass

SURE: Final = 0.9
TEXT: Final = 160
SLOWS: Final = {
    FailureClass.GPU_THERMAL_POWER: "is slowed down by heat or power",
    FailureClass.GPU_ECC_UNCORRECTABLE: "has memory errors",
    FailureClass.PCIE_ERROR: "has a bad PCIe link",
    FailureClass.NVLINK_ERROR: "has NVLink errors",
    FailureClass.STRAGGLER_OR_SLOW: "runs below its clocks",
    FailureClass.GPU_DRIVER: "is not the job's alone, or not as it should be",
}
"""What makes a GPU slow while the job goes on."""
_OF_GPU: Final = ("xid", "gpu_driver", "aer")
_OF_LINK: Final = ("mlx5", "link")
_PCI: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}")


class Place(NamedTuple):
    """Where a rank runs, as far as anything tells."""

    node: str
    number: int | None
    """Of its GPU, as the node counts them."""
    pci: str


class _Trouble(NamedTuple):
    """What was told of one device."""

    of: Literal["gpu", "link"]
    failure_class: FailureClass
    device: str
    """PCI address, index, or the kernel's name; empty where only a rank is told."""
    node: str
    rank: int | None
    evidence: Evidence


def named(
    slow: Iterable[Slowness],
    stories: Sequence[LogStory],
    rank_nodes: Mapping[int, str],
    stacks: Iterable[RankStack] = (),
) -> tuple[Slowness, ...]:
    """The same, with the GPU or port that is the reason wherever something was told of it, or the input by stacks."""
    doing: dict[int, set[Activity]] = {}
    for stack in stacks:
        doing.setdefault(stack.rank, set()).add(activity(stack))
    found = tuple(_of_input(one, doing) for one in slow)
    troubles = list(_troubles(stories)) if any(one.kind in ("rank", "link") for one in found) else []
    if not troubles:
        return found
    places = _places(stories, rank_nodes)
    return tuple(
        _of_link(one, troubles, places) if one.kind == "link" else _of_gpu(one, troubles, places) for one in found
    )


def _of_gpu(slow: Slowness, troubles: Sequence[_Trouble], places: Mapping[int, Place]) -> Slowness:
    if slow.kind != "rank" or len(slow.ranks) != 1:
        return slow
    rank = slow.ranks[0]
    place = places.get(rank, Place(slow.node, None, ""))
    of_gpu = [one for one in troubles if one.of == "gpu"]
    own = [one for one in of_gpu if _is_own(one, rank, place)]
    beside = [one for one in of_gpu if one.rank is None and _may_be(one, place)]
    if not own and len({one.device for one in beside}) != 1:
        return slow
    why = (own or beside)[0]
    gpu = why.device if _PCI.fullmatch(why.device) else place.pci or why.device
    which = f"{names([rank])}'s GPU{f' {gpu}' if gpu else ''}" if own else f"GPU {gpu} of the node of {names([rank])}"
    return msgspec.structs.replace(
        slow,
        kind="gpu",
        gpu=gpu,
        because=why.failure_class,
        node=slow.node or place.node or why.node,
        why=f"{which} {SLOWS[why.failure_class]} ({_said(why)}): {slow.why}",
        confidence=max(slow.confidence, SURE) if own else slow.confidence,
        evidence=(why.evidence, *slow.evidence),
    )


def _of_input(slow: Slowness, doing: Mapping[int, set[Activity]]) -> Slowness:
    """Ranks that come late, and are in their data loaders in all their stacks, while no other rank is."""
    others = [rank for rank in doing if rank not in slow.ranks]
    if slow.kind != "rank" or len(others) <= len(slow.ranks) or any("data" in doing[rank] for rank in others):
        return slow
    if any(doing.get(rank) != {"data"} for rank in slow.ranks):
        return slow
    is_in = "is in its data loader" if len(slow.ranks) == 1 else "are in their data loaders"
    return msgspec.structs.replace(slow, kind="input", why=f"{names(slow.ranks)} {is_in} by the stack: {slow.why}")


def _of_link(slow: Slowness, troubles: Sequence[_Trouble], places: Mapping[int, Place]) -> Slowness:
    """Two ranks on two nodes: the port of one of them, where only one is told of."""
    nodes = {places[rank].node for rank in slow.ranks if rank in places} - {""} or {slow.node} - {""}
    found = [one for one in troubles if one.of == "link" and one.node in nodes]
    if len({(one.node, one.device) for one in found}) != 1:
        return slow
    why = found[0]
    return msgspec.structs.replace(
        slow,
        node=why.node,
        why=f"{slow.why}; {why.device} of {why.node} ({_said(why)})",
        evidence=(why.evidence, *slow.evidence),
    )


def _said(one: _Trouble) -> str:
    return clean_line(" ".join(one.evidence.text.split()), TEXT)


# ----- whose GPU -----


def _is_own(one: _Trouble, rank: int, place: Place) -> bool:
    """It is told of the GPU that this rank uses."""
    if one.rank is not None:
        return one.rank == rank
    if not _is_on(one, place):
        return False
    return one.device == (place.pci if _PCI.fullmatch(one.device) else str(place.number)) != ""


def _may_be(one: _Trouble, place: Place) -> bool:
    """It is told of a GPU of the rank's node, and nothing says which one the rank uses."""
    known = place.pci if _PCI.fullmatch(one.device) else "" if place.number is None else str(place.number)
    return bool(one.device) and not known and bool(place.node) and one.node == place.node


def _is_on(one: _Trouble, place: Place) -> bool:
    return not one.node or not place.node or one.node == place.node


def _places(stories: Iterable[LogStory], rank_nodes: Mapping[int, str]) -> dict[int, Place]:
    """By what logs tell of GPUs, else by the order of a node's ranks, where all ranks before it are known."""
    gpus: dict[int, tuple[int, str]] = {}
    local: dict[int, int] = {}
    for story in stories:
        gpus |= story.gpus
        local |= {
            one.rank: one.local_rank for one in story.launcher if one.rank is not None and one.local_rank is not None
        }
    on: dict[str, list[int]] = {}
    for rank in sorted(rank_nodes):
        on.setdefault(rank_nodes[rank], []).append(rank)
    for ranks in on.values():
        if ranks == list(range(ranks[0], ranks[0] + len(ranks))) and ranks[0] % len(ranks) == 0:
            local |= {rank: index for index, rank in enumerate(ranks) if rank not in local}
    found = {}
    for rank in {*rank_nodes, *gpus, *local}:
        number, pci = gpus.get(rank, (local.get(rank), ""))
        found[rank] = Place(rank_nodes.get(rank, ""), number, pci)
    return found


# ----- what was told -----


def _troubles(stories: Iterable[LogStory]) -> Iterator[_Trouble]:
    for story in stories:
        yield from (_of_match(one, story) for one in story.matches if one.scope == "gpu" and one.failure_class in SLOWS)
        for event in story.events:
            of: Literal["gpu", "link"] | None = (
                "gpu"
                if event.kind in _OF_GPU and event.failure_class in SLOWS and _PCI.fullmatch(event.device)
                else "link"
                if event.kind in _OF_LINK and event.device
                else None
            )
            if of is not None and event.severity != "info":
                yield _of_event(of, event, story)


def _of_match(one: LineMatch, story: LogStory) -> _Trouble:
    node = one.node or story.node
    rank = one.rank if one.rank is not None else story.rank
    device = one.fields.get("device", "").lower()
    # Health daemons write with the rank's output, and name the GPU that they mean.
    evidence = Evidence(text=one.text, source=story.source, line=one.line or None, node=node, rank=rank, at=one.at)
    return _Trouble(
        "gpu", one.failure_class, device, node, rank if not device or one.rank is not None else None, evidence
    )


def _of_event(of: Literal["gpu", "link"], one: KernelEvent, story: LogStory) -> _Trouble:
    evidence = Evidence(text=one.text, source=story.source, line=one.line, node=story.node, at=one.at)
    return _Trouble(of, one.failure_class, one.device, story.node, None, evidence)
