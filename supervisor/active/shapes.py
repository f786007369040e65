"""The job's own matrix products and collectives, by their shapes in a Kineto trace of a step. Pure.

Only shapes, types and sizes are taken: nothing of the trace is run. What takes most comes first; the rest is left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

PRODUCTS: Final = 8
COLLECTIVES: Final = 4
LARGEST: Final = 1 << 20
"""Of one dimension."""
MOST_BYTES: Final = 4 << 30

_TYPES: Final = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64"}
_BYTES: Final = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Int": 4, "Long": 8, "Byte": 1}
_WIDTHS: Final = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "int": 4, "long int": 8}
_COLLECTIVES: Final = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "send": "send_receive",
    "recv": "send_receive",
}
"""As traces name them -> the test that moves as much in the same way, or in the nearest one."""


class JobShapes(NamedTuple):
    """As `supervisor/training/active_tests.py` wants them."""

    products: tuple[dict[str, Any], ...] = ()
    collectives: tuple[dict[str, Any], ...] = ()


def shapes_of(events: Iterable[Mapping[str, Any]]) -> JobShapes:
    """`events`: of a trace that was recorded with shapes."""
    products: Counter[tuple[str, int, int, int, int]] = Counter()
    collectives: Counter[tuple[str, int]] = Counter()
    for event in events:
        arguments = event.get("args")
        if not isinstance(arguments, Mapping):
            continue
        if (product := _product(event.get("name"), arguments)) is not None:
            products[product] += 1
        elif (collective := _collective(str(event.get("name")), arguments)) is not None:
            collectives[collective] += 1
    costly = sorted(products, key=lambda one: -products[one] * math.prod(one[1:]))
    large = sorted(collectives, key=lambda one: -collectives[one] * one[1])
    return JobShapes(
        tuple({"dtype": dtype, "shape": list(shape)} for dtype, *shape in costly[:PRODUCTS]),
        tuple({"name": name, "bytes": size} for name, size in large[:COLLECTIVES]),
    )


def _product(name: object, arguments: Mapping[str, Any]) -> tuple[str, int, int, int, int] | None:
    """(Type, batch, m, k, n)."""
    first = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}.get(str(name))
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if first is None or not isinstance(dims, list) or not isinstance(types, list) or len(dims) < first + 2:
        return None
    left, right = dims[first], dims[first + 1]
    dtype = _TYPES.get(str(types[first])) if len(types) > first else None
    if dtype is None or not _are_sizes(left) or not _are_sizes(right) or len(left) != len(right):
        return None
    if len(left) == 2 and left[1] == right[0]:
        return dtype, 1, left[0], left[1], right[1]
    if len(left) == 3 and left[0] == right[0] and left[2] == right[1]:
        return dtype, left[0], left[1], left[2], right[2]
    return None


def _are_sizes(dims: object) -> bool:
    return isinstance(dims, list) and all(isinstance(one, int) and 0 < one <= LARGEST for one in dims)


def _collective(name: str, arguments: Mapping[str, Any]) -> tuple[str, int] | None:
    """(Test, bytes), rounded to a power of two: sizes that hardly differ are one."""
    if name.startswith("gloo:"):
        test, size = (
            _COLLECTIVES.get(name.removeprefix("gloo:").replace("all_reduce", "allreduce")),
            _gloo_bytes(arguments),
        )
    else:
        test = _COLLECTIVES.get(str(arguments.get("Collective name", "")).lower())
        elements = arguments.get("In msg nelems")
        size = elements * _BYTES.get(str(arguments.get("dtype")), 0) if isinstance(elements, int) else 0
    return (test, 1 << max(2, (size - 1).bit_length())) if test is not None and 0 < size <= MOST_BYTES else None


def _gloo_bytes(arguments: Mapping[str, Any]) -> int:
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list) or not dims or not types or not _are_sizes(dims[0]):
        return 0
    return math.prod(dims[0]) * _WIDTHS.get(str(types[0]), 0)
