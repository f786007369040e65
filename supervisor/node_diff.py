"""What differs between the nodes of a job: versions of driver, firmware, kernel, torch, NCCL and the like. Pure.

A difference is reported, never acted on: many are intended, and which value is right cannot be known here.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Final

from diagnosis.signals import Frozen, clean_text

SETTLE_S: Final = 10.0
"""Nodes join one after the other: inventories are compared when none has changed for this long."""
KEYS: Final = 64
VALUE_LIMIT: Final = 200
LONG: Final = 1000
"""Longer values are not remembered."""
DIFFERENCES: Final = 16
NODES_NAMED: Final = 8
VALUES_KEPT: Final = 8
TOLERANCE: Final = 0.02
"""Sizes (keys that end in `_gib`) are the same within this share: kernels keep a little more or less for themselves."""


_IMPORTANT: Final = "driver nccl torch cuda gpus gpu infiniband gsp unbroken kernel".split()
"""Keys whose differences make runs fail or slow, the most important first."""


class Value(Frozen, frozen=True, kw_only=True):
    value: str
    count: int
    nodes: tuple[str, ...]
    """The first few of them, in order."""


class Difference(Frozen, frozen=True, kw_only=True):
    """One key of the inventory with more than one value."""

    key: str
    values: tuple[Value, ...]
    """The most common first, at most 8."""
    text: str
    """In words, naming the nodes of the rarer values."""

    @property
    def important(self) -> bool:
        return self.key in _IMPORTANT


def bounded(inventory: Mapping[str, str]) -> dict[str, str]:
    """A node's inventory, cleaned and limited in size."""
    items = sorted(inventory.items())[:KEYS]
    return {_clean(key, 64): _clean(value, VALUE_LIMIT) for key, value in items if value}


def _clean(text: str, limit: int) -> str:
    return clean_text(text, limit) if len(text) > LONG else _cleaned(text, limit)


@functools.lru_cache(maxsize=512)
def _cleaned(text: str, limit: int) -> str:
    """Thousands of nodes send the same values at once, when their controller has started again."""
    return clean_text(text, limit)


def compare(inventories: Mapping[str, Mapping[str, str]]) -> tuple[Difference, ...]:
    """The keys on which the nodes differ, by name. A node without a key is left out for that key."""
    keys = sorted({key for inventory in inventories.values() for key in inventory})
    found = []
    for key in keys:
        groups = _groups(key, {node: inventory[key] for node, inventory in inventories.items() if key in inventory})
        if len(groups) > 1:
            found.append(_difference(key, groups))
    return tuple(sorted(found, key=_weight)[:DIFFERENCES])


def _weight(difference: Difference) -> int:
    return _IMPORTANT.index(difference.key) if difference.important else len(_IMPORTANT)


def _groups(key: str, values: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    if not key.endswith("_gib"):
        for node in sorted(values):
            groups.setdefault(values[node], []).append(node)
        return groups
    first, size = "", 0.0
    for number, node in sorted((_number(value), node) for node, value in values.items()):
        if not first or number > size * (1 + TOLERANCE):
            first, size = values[node], number
        groups.setdefault(first, []).append(node)
    return groups


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _difference(key: str, groups: Mapping[str, list[str]]) -> Difference:
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    values = tuple(
        Value(value=value, count=len(nodes), nodes=tuple(sorted(nodes)[:NODES_NAMED])) for value, nodes in ordered
    )
    return Difference(key=key, values=values[:VALUES_KEPT], text=_text(key, values))


def _text(key: str, values: tuple[Value, ...]) -> str:
    common, *rare = values
    parts = [f"{one.value} on {_named(one)}" for one in rare[:4]] + (["..."] if len(rare) > 4 else [])
    if common.count > rare[0].count:
        others = f"the other {common.count}" if common.count > 1 else "the other one"
        parts.append(f"{common.value} on {others}")
    else:  # no value has the majority
        parts.insert(0, f"{common.value} on {_named(common)}")
    return f"{key} is {', '.join(parts[:-1])} and {parts[-1]}"


def _named(value: Value) -> str:
    more = value.count - len(value.nodes)
    return ", ".join(value.nodes) + (f" and {more} more" if more else "")


class NodeDiffMonitor:
    """Records inventories, and reports what differs when that has changed."""

    def __init__(self, reported: tuple[Difference, ...] = ()) -> None:
        """`reported`: the last report of the controller before (`Job.skew`)."""
        self._reported = reported
        self._inventories: dict[str, dict[str, str]] = {}
        self._same: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
        self._due_at: float | None = None

    def record(self, node: str, inventory: Mapping[str, str], now: float) -> None:
        clean = bounded(inventory)
        if self._inventories.get(node) == clean:
            return
        if len(self._same) > 256:
            self._same.clear()
        # Thousands of nodes mostly have the same inventory: one copy is kept.
        self._inventories[node] = self._same.setdefault(tuple(clean.items()), clean)
        self._due_at = now + SETTLE_S

    def recheck(self, now: float) -> None:
        """Nodes have joined or left: compare again."""
        if self._inventories:
            self._due_at = now + SETTLE_S

    def is_due(self, now: float) -> bool:
        """Whether inventories have changed, and then not for a while: time to call `changes`."""
        return self._due_at is not None and now >= self._due_at

    def changes(self, present: Collection[str]) -> tuple[Difference, ...] | None:
        """All that differs between the nodes `present`; None when that was the last report."""
        self._due_at = None
        found = compare({node: self._inventories[node] for node in present if node in self._inventories})
        if found == self._reported:
            return None
        self._reported = found
        return found
