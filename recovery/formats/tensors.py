"""Where the tensors of a checkpoint lie in its files, which of them are weights, and whether their numbers are finite.

Nothing is unpickled. A checkpoint is called non-finite only on proof: NaN or infinity among the *weights*. Optimizer
states, random states and statistics may hold what they like: `best_loss = inf` and a mask full of `-inf` are honest.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple, cast

import msgspec

from diagnosis.pickles import InertObject, PickleError, read_inert
from recovery.formats.dcp import read_metadata
from recovery.formats.files import HEADER_LIMIT, MEMBER_ERRORS, METADATA, Budget, PartOfFile, storage_of, stored

TENSORS: Final = 100_000
"""Of one file."""


class TensorPlace(NamedTuple):
    """Numbers of one tensor (or of a chunk of it) in one file."""

    name: str
    file: str
    offset: int
    size: int
    dtype: str
    """`float32`, `float16`, `bfloat16`, `float64`: others are not looked at."""
    is_parameter: bool = False
    """The file itself says so."""


# ----- where they are -----

_OF_TORCH: Final = {"Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Double": "float64"}
_OF_SAFETENSORS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
ITEM_SIZES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
_DEPTH: Final = 12
_REBUILD: Final = re.compile(r"torch\._utils\._rebuild_(?:tensor(?:_v2)?|parameter(?:_with_state)?)")


def places_in_torch_file(path: str, begin: int = 0, size: int | None = None, name: str = "") -> list[TensorPlace]:
    """In a file of `torch.save`, or in a part of a file that is one (DCP). Raises OSError; damaged: none."""
    with open(path, "rb") as whole:
        size = os.fstat(whole.fileno()).st_size - begin if size is None else size
        file = PartOfFile(whole, begin, size)
        try:
            archive = zipfile.ZipFile(cast("IO[bytes]", file))
            members = {member.filename: member for member in archive.infolist()}
            pickle = next((one for one in members.values() if one.filename.endswith("/data.pkl")), None)
            if pickle is None or pickle.file_size > 64 << 20:
                return []
            budget = Budget()
            content = read_inert(stored(cast("IO[bytes]", file), pickle), budget.out_of_time)
        except (*MEMBER_ERRORS, PickleError):
            return []  # whether it is whole is judged elsewhere; the format before torch 1.6 is not looked at
        root = pickle.filename.removesuffix("data.pkl")
        found: list[TensorPlace] = []
        for label, rebuilt in _tensors_of(content.value, name):
            place = _place(rebuilt)
            member = members.get(f"{root}data/{place.key}") if place is not None else None
            if place is None or member is None or member.compress_type != zipfile.ZIP_STORED:
                continue
            try:
                at = begin + _data_of(file, member) + place.offset
            except MEMBER_ERRORS:
                return []
            if place.offset >= 0 and place.offset + place.size <= member.file_size:
                found.append(TensorPlace(label, path, at, place.size, place.dtype, place.is_parameter))
        return found


class _Rebuilt(NamedTuple):
    key: str
    offset: int
    size: int
    dtype: str
    is_parameter: bool


def _tensors_of(value: object, name: str) -> Iterator[tuple[str, InertObject]]:
    """Every tensor in a pickle's value, by its path in dictionaries and lists."""
    pending: list[tuple[str, object, int]] = [(name, value, 0)]
    given, looked = 0, 0
    while pending and given < TENSORS and looked < 10 * TENSORS:
        label, one, depth = pending.pop()
        looked += 1
        if isinstance(one, InertObject) and _REBUILD.fullmatch(one.name):
            given += 1
            yield label, one
        elif depth >= _DEPTH:
            continue
        elif isinstance(one, InertObject):
            for key, item in one.pairs():
                if isinstance(key, (str, int)):
                    pending.append((f"{label}.{key}" if label else str(key), item, depth + 1))
            if one.name in ("list", "set"):
                pending += [(f"{label}.{number}", item, depth + 1) for number, item in enumerate(one.items)]
            if isinstance(one.state, InertObject):
                pending.append((label, one.state, depth + 1))
        elif type(one) is tuple:
            pending += [(f"{label}.{number}", item, depth + 1) for number, item in enumerate(one)]


def _place(rebuilt: InertObject) -> _Rebuilt | None:
    """`_rebuild_tensor_v2(storage, offset, size, stride, ...)`; `_rebuild_parameter(tensor, ...)`."""
    if "parameter" in rebuilt.name:
        inner = rebuilt.args[0] if rebuilt.args else None
        place = _place(inner) if isinstance(inner, InertObject) and "parameter" not in inner.name else None
        return place._replace(is_parameter=True) if place is not None else None
    if len(rebuilt.args) < 3 or not isinstance(rebuilt.args[0], InertObject) or not rebuilt.args[0].args:
        return None
    storage = storage_of(rebuilt.args[0].args[0])
    dtype = _OF_TORCH.get(storage.kind) if storage is not None else None
    offset, shape = rebuilt.args[1], rebuilt.args[2]
    if storage is None or dtype is None or type(offset) is not int or type(shape) is not tuple:
        return None
    if not all(type(length) is int and length >= 0 for length in shape):
        return None
    item = ITEM_SIZES[dtype]
    return _Rebuilt(storage.key, offset * item, math.prod(shape) * item, dtype, False)


def _data_of(file: PartOfFile, member: zipfile.ZipInfo) -> int:
    file.seek(member.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return member.header_offset + 30 + int(name) + int(extra)


def places_in_safetensors(path: str) -> list[TensorPlace]:
    """Raises OSError; damaged: none."""
    with open(path, "rb") as file:
        try:
            length = struct.unpack("<Q", file.read(8))[0]
            header = msgspec.json.decode(file.read(length)) if length <= HEADER_LIMIT else {}
        except (msgspec.DecodeError, UnicodeDecodeError, struct.error):
            return []
    found: list[TensorPlace] = []
    for name, entry in list(header.items())[:TENSORS] if isinstance(header, dict) else ():
        try:
            dtype, (begin, end) = _OF_SAFETENSORS.get(entry["dtype"]), entry["data_offsets"]
            if dtype is not None and 0 <= begin <= end:
                found.append(TensorPlace(name, path, 8 + length + begin, end - begin, dtype))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def places_in_dcp(folder: str, budget: Budget, weights: bool = True) -> list[TensorPlace]:
    """Every chunk is a file of `torch.save` within a `.distcp` file. Raises OSError; damaged: none."""
    with open(os.path.join(folder, METADATA), "rb") as file:
        data = file.read(16 * budget.limits.pickle_bytes)
    try:
        metadata = read_metadata(data, budget)
    except PickleError:
        return []
    proven = parameters_by_optimizer(chunk.name for chunk in metadata.chunks)
    found: list[TensorPlace] = []
    for chunk in metadata.chunks[:TENSORS]:
        if not chunk.is_tensor or chunk.is_packed or (weights and not may_hold_weights(chunk.name)):
            continue
        if budget.out_of_time():
            break
        path = os.path.join(folder, chunk.file)
        places = places_in_torch_file(path, chunk.offset, chunk.length, chunk.name)
        found += [place._replace(is_parameter=place.name in proven) for place in places]
    return found


def places_in(path: str, budget: Budget, weights: bool = True) -> list[TensorPlace]:
    """By the file's or folder's kind; none for others. `weights`: leave out what cannot be one. Raises OSError."""
    if os.path.isdir(path):
        return places_in_dcp(path, budget, weights) if os.path.exists(os.path.join(path, METADATA)) else []
    if path.endswith(".safetensors"):
        return places_in_safetensors(path)
    return places_in_torch_file(path)


# ----- which of them are weights -----

_PREFIX: Final = re.compile(r"(?:(?:model|module|state_dict|model_state_dict|app|_orig_mod|net)\.)+")
_STATE: Final = re.compile(
    r"(?:.*\.)?state\.(?:(?P<plain>.+)\.(?:exp_avg|exp_avg_sq|momentum_buffer)"
    r"|(?:exp_avg|exp_avg_sq|fp32_param)\.(?P<megatron>.+))"
)
_NO_WEIGHTS: Final = re.compile(
    r"(?:^|[._/])(?:optim\w*|opt|lr_sched\w*|sched\w*|scaler|grad_scaler|rng\w*|random\w*|dataloader|loader|train_state"
    r"|ema_stats|metrics?|callbacks|loops|buffers?|\w*mask\w*|\w*cache\w*|inv_freq|rotary\w*|rope|running_\w+|stats"
    r"|num_batches_tracked|_extra_state|\w*observer\w*|amax\w*|scales?|\w*history\w*|exp_avg\w*|momentum\w*)(?:$|[._/])",
    re.IGNORECASE,
)
_WEIGHT: Final = re.compile(
    r"(?:^|[._])(?:weight|weight_[a-z]+\w*|kernel|embedding|flat_param|_flat_param"
    r"|single_partition_of_fp32_groups\.\d+|fp32_flat_groups\.\d+)$"
)
"""Names that only parameters have. Whether `bias` is one or a causal mask cannot be told from its name."""


def may_hold_weights(name: str) -> bool:
    return _NO_WEIGHTS.search(name) is None or (_WEIGHT.search(name) is not None and "fp32" in name)


def is_weight(place: TensorPlace) -> bool:
    """Whether it is proven to be a parameter of the model: by what the file says, by the optimizer, or by its name."""
    return may_hold_weights(place.name) and (place.is_parameter or _WEIGHT.search(place.name) is not None)


def parameters_by_optimizer(names: Iterable[str]) -> frozenset[str]:
    """The names among `names` of tensors for which the optimizer keeps a state."""
    known = list(names)
    stepped = {found["plain"] or found["megatron"] for name in known if (found := _STATE.fullmatch(name)) is not None}
    bare = {_PREFIX.sub("", name, count=1) for name in stepped}
    return frozenset(name for name in known if name in stepped or _PREFIX.sub("", name, count=1) in bare)


# ----- whether their numbers are finite -----

_TOP_ONES: Final = bytes(1 if byte & 0x7F == 0x7F else 0 for byte in range(256))
_HALF_ONES: Final = bytes(1 if byte & 0x7C == 0x7C else 0 for byte in range(256))
_BIT_7: Final = bytes(byte >> 7 for byte in range(256))
_BITS_4_TO_7: Final = bytes(1 if byte & 0xF0 == 0xF0 else 0 for byte in range(256))
_MASK_VALUES: Final = 3
"""A mask has hardly more different numbers: -inf, 0, 1."""


class NonFinite(NamedTuple):
    """What was found in one block."""

    nan: int
    infinite: int


def non_finite(data: bytes, dtype: str) -> NonFinite:
    """How many numbers are NaN or infinite, without a loop over them: a number is if its exponent has only ones."""
    item = ITEM_SIZES[dtype]
    data = data[: len(data) // item * item]
    high = data[item - 1 :: item]
    if dtype == "float16":
        ones = int.from_bytes(high.translate(_HALF_ONES), "little")
    elif not ones_in(high):
        return NonFinite(0, 0)
    else:
        next_ = data[item - 2 :: item].translate(_BITS_4_TO_7 if dtype == "float64" else _BIT_7)
        ones = int.from_bytes(high.translate(_TOP_ONES), "little") & int.from_bytes(next_, "little")
    if not ones:
        return NonFinite(0, 0)
    positions = [at for at, byte in enumerate(ones.to_bytes(len(high), "little")) if byte]
    numbers = [data[at * item : at * item + item] for at in positions]
    infinite = sum(map(_is_infinite, numbers, [dtype] * len(numbers)))
    return NonFinite(len(numbers) - infinite, infinite)


def ones_in(high: bytes) -> bool:
    """Whether any number may be non-finite, from the highest bytes alone: for most data it settles the matter."""
    return b"\x7f" in high or b"\xff" in high


def _is_infinite(number: bytes, dtype: str) -> bool:
    """Of a number that is not finite."""
    mantissa = {"float32": (1 << 23) - 1, "float64": (1 << 52) - 1, "float16": (1 << 10) - 1, "bfloat16": (1 << 7) - 1}
    return int.from_bytes(number, "little") & mantissa[dtype] == 0


def is_like_a_mask(data: bytes, dtype: str) -> bool:
    """Whether the block has hardly more than two different numbers."""
    item = ITEM_SIZES[dtype]
    seen: set[bytes] = set()
    for at in range(0, len(data) - item + 1, item):
        seen.add(data[at : at + item])
        if len(seen) > _MASK_VALUES:
            return False
    return True


def why_non_finite(place: TensorPlace, data: bytes) -> str:
    """Why a block of a weight is not finite, in words; empty when it is, and for what may be a mask."""
    found = non_finite(data, place.dtype)
    if not found.nan and (not found.infinite or is_like_a_mask(data, place.dtype)):
        return ""
    count = len(data) // ITEM_SIZES[place.dtype]
    what = f"{found.nan} of {count} numbers are NaN" if found.nan else f"{found.infinite} of {count} are infinite"
    return f"weights are not finite: {place.name[-120:]} in {Path(place.file).name[-80:]}: {what} in the part looked at"
