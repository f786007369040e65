"""Snapshots in memory for training scripts: a save that costs a memory copy, and that outlives the rank.

    from unbroken import snapshot

    unbroken_stager = snapshot.Stager()                                      # torch's checkpoints (DCP)
    dcp.async_save(state, checkpoint_id=path, async_stager=unbroken_stager)
    dcp.load(state, storage_reader=snapshot.reader(path))                    # from memory, else from `path`

    snapshot.save({"model": model.state_dict(), "step": step}, step)         # loops of one's own
    state = snapshot.load() or torch.load(path)

Standard library and torch only, Python 3.9. Outside `unbroken run` nothing is kept: a `Stager` copies as torch's own
does, `save` does nothing, and `load` gives None. Saving never raises: what stands in its way is said once, on stderr.
Only `load` raises, where the snapshot that all ranks start from cannot be read here: a rank that began elsewhere than
the others would be worse.

What is not a tensor is pickled. Those pickles are read by ranks of the same user and job alone, never by the agent.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import copy
import ctypes
import errno
import hashlib
import os
import pickle
import sys
import threading
import time
import weakref
import zlib
from typing import Any, Iterable, NamedTuple, Optional  # noqa: UP035 (Python 3.9)

import torch
from torch.utils import _pytree

from . import worker
from .snapshot_memory import (
    CHOSEN_VARIABLE,
    DATA_AT,
    FILES_VARIABLE,
    PAGE,
    Header,
    Slot,
    addresses_of,
    chosen,
    is_rank,
    next_slot,
    room,
)

__all__ = ["SnapshotError", "Stager", "load", "reader", "save", "step", "writer"]

STEP_NAMES = ("step", "global_step", "iteration", "iter_num", "iter", "train_step", "current_step")
ALIGNED = 64
WORDS = PAGE // 8
PIECE_BYTES = 8 << 20
"""The sums are made in pieces of this size: so soon they stop when the memory is wanted."""
SUMS_AFTER_S = 0.1
"""So long after the save of a large state they begin: training, and the save in the background, go first."""
BUCKETS = 8
"""So many digests of replicas at most."""
SHARED_COPY_BYTES = 32 << 20
"""A copy of less is made by one thread."""
COPY_THREADS = 4


LIMITS = {
    errno.EFBIG: "a copy of the state is larger than `ulimit -f` allows",
    errno.ENOMEM: "memory ran out, or two copies of the state are more than `ulimit -v` allows",
    errno.ENOSPC: "no memory is left for two copies of the state",
    errno.EMFILE: "raise `ulimit -n`",
}
"""What the kernel's error means here."""


class SnapshotError(RuntimeError):
    """The snapshot from which all ranks are to start cannot be read by this one."""


# ----- for scripts -----


def step() -> Optional[int]:  # noqa: UP045 (Python 3.9)
    """The step of the snapshot from which this attempt starts; None where it starts from none."""
    found = chosen(os.environ.get(CHOSEN_VARIABLE, ""))
    return found[1] if found is not None else None


def save(state: Any, step: int, *, replicas: Any = None) -> bool:
    """Keep a copy of `state` in memory; whether it is kept. Costs a memory copy. `replicas`: as for `Stager`."""
    return _kept(state, step, replicas, staged=False) is not None


def load(map_location: Any = None) -> Any:
    """The state that was saved; None where this attempt starts from no snapshot. Raises SnapshotError."""
    found = read()
    if found is None:
        return None
    try:
        tensors = [
            tensor.clone() if map_location is None else tensor.to(map_location, copy=True) for tensor in found.tensors
        ]
        return found.tree(tensors)
    except Exception as error:
        raise found.refused(error) from error


class Stager:
    """torch's `AsyncStager`: `dcp.async_save(..., async_stager=snapshot.Stager())`. One for all saves of a run.

    The step is found in the state (`step`, `global_step`, ...), or in what `worker.heartbeat` was told; `at` says it.
    `replicas` says whose tensors are equal by declaration, so that a rank whose are not is found: a
    `DistributedDataParallel` module (its parameters), True (all plain tensors of numbers, on all ranks), or the ranks.
    """

    _synchronize_after_execute = False

    def __init__(self, replicas: Any = None) -> None:
        self._replicas = replicas
        self._step: Optional[int] = None  # noqa: UP045
        self._plain: Any = None

    def at(self, step: int) -> Stager:
        """The next state is of this step."""
        self._step = step
        return self

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: Any, **_: Any) -> Any:
        """A copy that the save can read while training goes on: in the shared memory, else as torch makes it."""
        step, self._step = self._step, None
        step = step_of(state_dict) if step is None else step
        if step is None and FILES_VARIABLE in os.environ:
            _say("no snapshot is kept: which step is this? Say `stager.at(step)`, or have `step` in the state")
        staged = _kept(state_dict, step, self._replicas, staged=True) if step is not None else None
        return self._copied(state_dict) if staged is None else staged

    def _copied(self, state_dict: Any) -> Any:
        if self._plain is None:
            from torch.distributed.checkpoint import staging

            if hasattr(staging, "DefaultStager"):
                self._plain = staging.DefaultStager(staging.StagingOptions(False, False, False, False))
            else:
                self._plain = staging.BlockingAsyncStager()
        return self._plain.stage(state_dict)

    def synchronize_staging(self) -> None:
        """The copy is complete when `stage` returns."""

    def close(self) -> None:
        """The snapshots stay."""
        plain, self._plain = self._plain, None
        if hasattr(plain, "close"):
            plain.close()


def reader(path: Any = None) -> Any:
    """For `dcp.load(state, storage_reader=...)`: reads the snapshot, or `path` where this attempt starts from none."""
    from . import snapshot_dcp

    found = read()
    if found is None:
        return snapshot_dcp.FileSystemReader(path)
    try:
        return snapshot_dcp.MemoryReader(found)
    except Exception as error:
        raise found.refused(error) from error


def writer(path: Any, stager: Stager) -> Any:
    """For `dcp.async_save(state, storage_writer=...)` of a torch whose `async_save` has no `async_stager` yet."""
    from . import snapshot_dcp

    return snapshot_dcp.StagedWriter(path, stager)


def step_of(state: Any) -> Optional[int]:  # noqa: UP045
    """The step that a state tells: under a usual name, at the top or one below; else the newest heartbeat's."""
    for table in [state, *(state.values() if isinstance(state, dict) else ())]:
        if not isinstance(table, dict):
            continue
        for name in STEP_NAMES:
            value = table.get(name)
            if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
    return worker.last_step()


# ----- what lies where -----


class Leaf(NamedTuple):
    """A tensor in the memory. `global_shape` and `chunk` (offsets, sizes) are those of a DTensor, else None."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    global_shape: Optional[tuple[int, ...]] = None  # noqa: UP045
    chunk: Any = None


class Layout:
    """Where the tensors of a state lie. The same for all states of one shape."""

    def __init__(self, places: list[int], tensors: list[Any], spec: Any, replicated: list[bool]) -> None:
        self._made_for = [(one.shape, one.dtype, _meshed(one)) for one in tensors]
        self._spec, self._replicated = spec, replicated
        self.places = places
        """Which leaves of the tree are tensors."""
        self.leaves: list[Leaf] = [Leaf(0, torch.uint8, ())] * len(tensors)
        self.ranges: list[tuple[int, int]] = []
        """Begin and end, from `DATA_AT` on, of what is summed together: buckets of replicas, then the rest."""
        self.names: list[str] = []
        """Of the buckets: the number of their first and last tensor."""
        locals_ = [_local(tensor) for tensor in tensors]
        self.sizes = sizes = [tensor.numel() * tensor.element_size() for tensor in locals_]
        """Of the tensors in bytes."""
        equal = [number for number, is_equal in enumerate(replicated) if is_equal]
        alike = repr([(locals_[number].dtype, tuple(locals_[number].shape)) for number in equal])
        self.alike = hashlib.blake2b(alike.encode(), digest_size=4).hexdigest()
        """Of replicas: only ranks with tensors of the same types and shapes are compared."""
        share = -(-sum(sizes[number] for number in equal) // BUCKETS)
        bucket: list[int] = []
        end = 0
        for number in equal:
            bucket.append(number)
            if sum(sizes[one] for one in bucket) >= share:
                end = self._place(bucket, locals_, tensors, end, f"{bucket[0]}-{bucket[-1]}")
                bucket = []
        if bucket:
            end = self._place(bucket, locals_, tensors, end, f"{bucket[0]}-{bucket[-1]}")
        rest = [number for number, is_equal in enumerate(replicated) if not is_equal]
        self.size = self._place(rest, locals_, tensors, end, "") if rest else end
        template = _pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        self.fixed = pickle.dumps((template, places, self.leaves, self.ranges), protocol=4)

    def fits(self, places: list[int], tensors: list[Any], spec: Any, replicated: list[bool]) -> bool:
        """Compared one by one: to make a key of thousands of tensors takes longer than to copy them."""
        if (places, spec, replicated) != (self.places, self._spec, self._replicated):
            return False
        return all(
            one.dtype is dtype and one.shape == shape and (type(one) in _PLAIN or _meshed(one) == mesh)
            for one, (shape, dtype, mesh) in zip(tensors, self._made_for)
        )

    def _place(self, numbers: list[int], locals_: list[Any], tensors: list[Any], begin: int, name: str) -> int:
        end = begin
        for number in numbers:
            own, whole = locals_[number], tensors[number]
            chunk = global_shape = None
            if own is not whole:
                pieces = whole.__create_chunk_list__()
                global_shape = tuple(whole.shape)
                chunk = (tuple(pieces[0].offsets), tuple(pieces[0].sizes)) if pieces else None
            self.leaves[number] = Leaf(end, own.dtype, tuple(own.shape), _strides(own.shape), global_shape, chunk)
            end += -(-own.numel() * own.element_size() // ALIGNED) * ALIGNED
        end = -(-end // PAGE) * PAGE
        self.ranges.append((begin, end))
        if name:
            self.names.append(name)
        return end


_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Known at once, because a state may have very many."""


def _meshed(tensor: Any) -> Any:
    """How a DTensor is spread; None for any other tensor."""
    return None if type(tensor) in _PLAIN else getattr(tensor, "_spec", None)


def _local(tensor: Any) -> Any:
    """The part of a DTensor that this rank has; any other tensor as it is."""
    if type(tensor) in _PLAIN:
        return tensor
    if hasattr(tensor, "_local_tensor") and hasattr(tensor, "__create_chunk_list__"):
        return tensor._local_tensor
    return tensor


def _unfit(tensor: Any) -> str:
    """Why a tensor cannot be kept; empty where it can."""
    own = _local(tensor)
    if own.layout is not torch.strided or own.is_quantized or own.device.type == "meta" or own.is_nested:
        return f"it has a {'quantized' if own.is_quantized else own.layout} tensor"
    if type(own) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer if hasattr(torch.nn, "Buffer") else None):
        return f"it has a {type(own).__name__}"
    return ""


def views(memory: Any, leaves: Iterable[Leaf]) -> list[Any]:
    """The tensors in `memory`, a ctypes array that begins with a slot."""
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    flat = flat[: flat.numel() // PAGE * PAGE]
    bases: dict[torch.dtype, Any] = {}
    found = []
    for offset, dtype, shape, strides, _, _ in leaves:
        if dtype not in bases:
            bases[dtype] = (flat.view(dtype).as_strided, dtype.itemsize)
        as_strided, itemsize = bases[dtype]
        found.append(as_strided(shape, strides, (DATA_AT + offset) // itemsize))
    return found


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(1, size)
    return tuple(strides[::-1])


def sums(memory: Any, ranges: Iterable[tuple[int, int]], wanted: Any = None) -> Optional[list[str]]:  # noqa: UP045
    """A digest of each range: any one changed bit changes it. None: `wanted()` said that the memory is wanted.

    The sums of the 512 columns of words, at the speed of memory, where each piece counts differently.
    """
    words = torch.frombuffer(memory, dtype=torch.uint8)[DATA_AT:]
    found = []
    for begin, end in ranges:
        total = torch.zeros(WORDS, dtype=torch.int64)
        for at in range(begin, end, PIECE_BYTES):
            if wanted is not None and wanted():
                return None
            piece = words[at : min(end, at + PIECE_BYTES)].view(torch.int64).view(-1, WORDS)
            total = total * 31 + piece.sum(0)
        found.append(hashlib.blake2b(ctypes.string_at(total.data_ptr(), PAGE), digest_size=8).hexdigest())
    return found


# ----- keeping -----


class RankMemory:
    """The slots of this rank. One for each process; a fork of it writes nothing."""

    def __init__(self, files: str, environment: Any = os.environ) -> None:
        self.files = files
        self.rank, self.world = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        self.local_rank = int(environment.get("LOCAL_RANK", "0"))
        self.local_world = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        self.attempt = worker.attempt()
        self.slots = [Slot(address, writable=True) for address in addresses_of(files, self.local_rank)]
        if len(self.slots) < 2:
            raise OSError("this node has more ranks than `unbroken run` made room for")
        self.arrays: list[Any] = [None, None]
        """Each slot's memory as a ctypes array."""
        self.own_views: list[Any] = [(None, []), (None, [])]
        """Of each slot: the layout, and its tensors."""
        self.leases: list[Any] = [None, None]
        """Weak references to the arrays whose tensors a save in the background still reads."""
        self.pinned = [0, 0]
        """Each slot's address, where the GPU writes to it directly."""
        self.layout: Optional[Layout] = None  # noqa: UP045
        self.came_from: Optional[int] = None  # noqa: UP045
        """The slot from which this attempt came, until it has kept a snapshot of its own."""
        self.pool: Any = None
        self.summing: Any = None
        self.stop_summing = threading.Event()
        headers = [slot.header() for slot in self.slots]
        wanted = chosen(environment.get(CHOSEN_VARIABLE, ""))
        for number, header in enumerate(headers):
            if header is not None and (header.attempt, header.step) == wanted:
                self.came_from = number

    def keep(self, state: Any, step: int, replicas: Any, staged: bool) -> Any:
        """The copy (or True, where no `staged` one is wanted). Raises OSError, ValueError and what torch raises."""
        leaves, spec = _pytree.tree_flatten(state)
        places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaf.detach() if leaf.requires_grad else leaf for leaf in map(leaves.__getitem__, places)]
        others: list[Any] = [None] * len(leaves)
        if len(places) < len(leaves):
            others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        group, members, equal = _replicas(replicas, tensors, self.world)
        layout = self._layout(places, tensors, spec, equal)
        table = pickle.dumps((layout.fixed, others), protocol=4)
        headers = [slot.header() for slot in self.slots]
        if any(one is not None and (one.attempt, one.step) == (self.attempt, step) for one in headers):
            raise ValueError(f"a snapshot of step {step} is there already: keep everything in one state, once a step")
        number = next_slot(headers, self.came_from)
        if self._is_read(number):
            raise ValueError("saves of the two snapshots before are still under way")
        self.stop_sums()
        needed = DATA_AT + layout.size + len(table)
        self._check_room(needed)
        slot, sequence = self.slots[number], 1 + max([0, *(one.sequence for one in headers if one is not None)])
        slot.void()
        self._reserve(number, needed)
        self._copy(layout, self._own(number, layout), list(map(_local, tensors)))
        table_at = DATA_AT + layout.size
        slot.map[table_at : table_at + len(table)] = table  # type: ignore[index]
        header = Header(
            sequence, self.rank, self.world, self.attempt, step, time.time(), layout.size, table_at, len(table),
            zlib.crc32(table),
        )  # fmt: skip
        slot.commit(header)
        self.came_from = None
        other = headers[1 - number]
        if other is not None and other.attempt == self.attempt and other.step > step:
            self.slots[1 - number].void()  # the script went back by itself: what came after is of another run
        about = {"group": f"{group}-{layout.alike}" if group else "", "members": members}
        self._start_sums(number, sequence, layout, about)
        return self._staged(number, layout, spec, leaves, tensors) if staged else True

    def _layout(self, places: list[int], tensors: list[Any], spec: Any, equal: list[bool]) -> Layout:
        if self.layout is None or not self.layout.fits(places, tensors, spec, equal):
            why = next(filter(None, map(_unfit, tensors)), "")
            if why:
                raise ValueError(f"the state cannot be kept: {why}")
            self.layout = Layout(places, tensors, spec, equal)
        return self.layout

    def _is_read(self, number: int) -> bool:
        lease = self.leases[number]
        return lease is not None and lease() is not None

    def _check_room(self, needed: int) -> None:
        if all(slot.allocated_bytes >= needed for slot in self.slots):
            return
        found = room(self.files, self.local_rank, self.local_world, needed)
        if not found.enough:
            raise MemoryError(
                f"two copies of the state need {_gib(found.wanted_bytes)} more on this node, and "
                f"{_gib(found.free_bytes)} of memory are free"
            )

    def _reserve(self, number: int, needed: int) -> None:
        """Both slots get their memory at once: there is room for two copies, or nothing is kept."""
        for one, slot in enumerate(self.slots):
            before = slot.map
            if one != number and (self._is_read(one) or slot.header() is not None):
                if slot.allocated_bytes < needed:
                    os.posix_fallocate(slot.descriptor, 0, needed)  # it grows, and what is in it stays
                continue
            memory = slot.reserve(needed)
            if memory is not before:
                self._unpin(one)
                self.arrays[one] = (ctypes.c_char * len(memory)).from_buffer(memory)
                self.own_views[one] = (None, [])

    def _own(self, number: int, layout: Layout) -> list[Any]:
        """The tensors of a slot, ready to be copied to. What lies between them is zero, so that sums are the same."""
        made_for, found = self.own_views[number]
        if made_for is not layout:
            array = self.arrays[number]
            found = views(array, layout.leaves)
            for begin, end in _gaps(layout):
                ctypes.memset(ctypes.addressof(array) + DATA_AT + begin, 0, end - begin)
            self.own_views[number] = (layout, found)
        return list(found)

    def _copy(self, layout: Layout, targets: list[Any], sources: list[Any]) -> None:
        devices = {source.device for source in sources if not source.is_cpu}
        threads = min(COPY_THREADS, len(os.sched_getaffinity(0)) // max(1, self.local_world))
        if devices:
            self._pin()
        if devices or layout.size < SHARED_COPY_BYTES or threads < 2 or torch.get_num_threads() > 1:
            _copy_all(targets, sources)
            for device in devices:
                getattr(torch, device.type).current_stream(device).synchronize()
            return
        if self.pool is None:
            self.pool = concurrent.futures.ThreadPoolExecutor(threads, "unbroken-copy")
        list(self.pool.map(_copy_all, *zip(*_shared(layout, targets, sources, threads))))

    def _pin(self) -> None:
        """So that the GPU writes to it directly. Where that cannot be the copy is slower, that is all."""
        for number, array in enumerate(self.arrays):
            if array is not None and not self.pinned[number]:
                self.pinned[number] = ctypes.addressof(array)
                try:
                    torch.cuda.cudart().cudaHostRegister(ctypes.addressof(array), len(array), 0)
                except Exception as error:
                    _say(f"snapshots are copied without pinned memory: {error}")

    def _unpin(self, number: int) -> None:
        address, self.pinned[number] = self.pinned[number], 0
        if address:
            torch.cuda.cudart().cudaHostUnregister(address)

    def _staged(self, number: int, layout: Layout, spec: Any, leaves: list[Any], tensors: list[Any]) -> Any:
        """The copy as a state. While any tensor of it is in use the slot is not written to."""
        memory = self.slots[number].map
        assert memory is not None
        array = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.leases[number] = weakref.ref(array)
        copies = [
            leaf if type(leaf) in (int, float, str, bool, type(None)) else copy.deepcopy(leaf)
            if not isinstance(leaf, torch.Tensor) else None
            for leaf in leaves
        ]  # fmt: skip
        for place, whole, view in zip(layout.places, tensors, views(array, layout.leaves)):
            copies[place] = view if _local(whole) is whole else _rebuilt(whole, view)
        return _pytree.tree_unflatten(copies, spec)

    # ----- sums, in the background -----

    def stop_sums(self) -> None:
        if self.summing is not None and _owner == os.getpid():
            self.stop_summing.set()
            self.summing.join()
            self.summing = None
            self.stop_summing.clear()

    def _start_sums(self, number: int, sequence: int, layout: Layout, about: dict[str, Any]) -> None:
        array, slot = self.arrays[number], self.slots[number]

        def work() -> None:
            try:
                self.stop_summing.wait(SUMS_AFTER_S if layout.size >= SHARED_COPY_BYTES else 0.0)
                found = sums(array, layout.ranges, self.stop_summing.is_set)
                if found is not None:
                    replicas = dict(zip(layout.names, found))
                    slot.write_sums(sequence, {"content": found, "replicas": replicas, **about})
            except Exception as error:
                _say(f"snapshots have no sums: {error}")

        self.summing = threading.Thread(target=work, name="unbroken-sums", daemon=True)
        self.summing.start()


def _replicas(replicas: Any, tensors: list[Any], world: int) -> tuple[str, int, list[bool]]:
    """A name for the ranks that have the same, how many they are, and which of the tensors are meant."""
    none = "", 0, [False] * len(tensors)
    if replicas is None or replicas is False:
        return none
    plain = [_local(one) is one and (one.is_floating_point() or one.is_complex()) for one in tensors]
    if replicas is True:
        return "all", world, plain
    if not hasattr(replicas, "process_group"):
        return _group_name(replicas), len(list(replicas)), plain
    if getattr(replicas, "_comm_hooks", None):
        return none  # a hook may let the replicas drift apart on purpose
    left_out = set(getattr(replicas, "parameters_to_ignore", ()))
    known = {one.data_ptr() for name, one in replicas.module.named_parameters() if name not in left_out}
    ranks = torch.distributed.get_process_group_ranks(replicas.process_group)
    return (
        _group_name(ranks),
        len(ranks),
        [is_plain and one.data_ptr() in known for is_plain, one in zip(plain, tensors)],
    )


def _group_name(ranks: Iterable[int]) -> str:
    return hashlib.blake2b(repr(sorted(map(int, ranks))).encode(), digest_size=6).hexdigest()


def _gaps(layout: Layout) -> list[tuple[int, int]]:
    """What lies between the tensors."""
    used = sorted((leaf.offset, leaf.offset + _count(leaf.shape) * leaf.dtype.itemsize) for leaf in layout.leaves)
    begins = [begin for begin, _ in used[1:]] + [layout.size]
    return [(end, begin) for (_, end), begin in zip(used, begins) if begin > end]


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _rebuilt(whole: Any, local: Any) -> Any:
    """A DTensor like `whole` with another local part: on the CPU, whatever its mesh is for."""
    names, context = whole.__tensor_flatten__()
    inner = {**{name: getattr(whole, name) for name in names}, "_local_tensor": local}
    return type(whole).__tensor_unflatten__(inner, context, whole.shape, whole.stride())


def _copy_all(targets: list[Any], sources: list[Any]) -> None:
    """One call for all of them: one for each would cost more than the copy of a small tensor."""
    with torch.no_grad():
        if targets and hasattr(torch, "_foreach_copy_"):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            return
        for target, source in zip(targets, sources):
            target.copy_(source, non_blocking=True)


def _shared(layout: Layout, targets: list[Any], sources: list[Any], threads: int) -> list[tuple[list[Any], list[Any]]]:
    """The copies in about equal shares; a large tensor is cut."""
    limit = -(-layout.size // threads)
    shares: list[tuple[list[Any], list[Any]]] = [([], [])]
    free = limit
    for target, source, leaf_size in zip(targets, sources, layout.sizes):
        if leaf_size <= free or not source.is_contiguous():
            shares[-1][0].append(target)
            shares[-1][1].append(source)
            free -= leaf_size
        else:
            item, target, source, at = source.element_size(), target.view(-1), source.view(-1), 0
            while at < source.numel():
                if free < item:
                    shares.append(([], []))
                    free = limit
                count = min(source.numel() - at, max(1, free // item))
                shares[-1][0].append(target[at : at + count])
                shares[-1][1].append(source[at : at + count])
                at, free = at + count, free - count * item
        if free <= 0:
            shares.append(([], []))
            free = limit
    return [share for share in shares if share[0]]


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


_memory: Optional[RankMemory] = None  # noqa: UP045
_owner = 0
_said: set[str] = set()


def _kept(state: Any, step: int, replicas: Any, *, staged: bool) -> Any:
    """The copy in memory; None where none is kept. Raises nothing."""
    global _memory, _owner
    files = os.environ.get(FILES_VARIABLE, "")
    try:
        if not files or (_owner and _owner != os.getpid()):
            return None
        if not is_rank():
            raise OSError("this process is not the rank itself, but one that the rank has started")
        if _memory is None or _memory.files != files:
            _memory, _owner = RankMemory(files), os.getpid()
            atexit.register(_memory.stop_sums)  # no thread of ours may be at work when the interpreter goes down
        return _memory.keep(state, int(step), replicas, staged)
    except Exception as error:
        _say(f"no snapshot is kept: {_in_words(error)}. Saves go on without")
        return None


def _in_words(error: Exception) -> str:
    hint = LIMITS.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return f"{error}: {hint}" if hint else str(error)


def _say(text: str) -> None:
    """Once in a process."""
    if text not in _said and len(_said) < 20:
        _said.add(text)
        print(f"unbroken: {text}", file=sys.stderr, flush=True)


# ----- loading -----


class Found:
    """A snapshot that was read: its tensors lie in the shared memory, and are not to be kept."""

    def __init__(
        self, slot: Slot, header: Header, tensors: list[Any], leaves: list[Leaf], template: Any, rest: Any
    ) -> None:
        self._slot = slot
        self.step = header.step
        self.tensors = tensors
        self.leaves = leaves
        self._template = template
        self._places, self._others = rest

    def refused(self, error: Exception) -> SnapshotError:
        """What to raise where it could not be used after all: no attempt starts from it again."""
        return _refused(self.step, _voided(self._slot, f"{type(error).__name__}: {error}"))

    def tree(self, tensors: list[Any]) -> Any:
        """The state with these in place of its tensors."""
        numbers, spec = _pytree.tree_flatten(self._template)
        values = list(self._others)
        for place, tensor in zip(self._places, tensors):
            values[place] = tensor
        return _pytree.tree_unflatten([values[number] for number in numbers], spec)


def read() -> Optional[Found]:  # noqa: UP045
    """The snapshot from which this attempt starts; None where it starts from none. Raises SnapshotError."""
    wanted = chosen(os.environ.get(CHOSEN_VARIABLE, ""))
    files = os.environ.get(FILES_VARIABLE, "")
    if wanted is None or not files or not is_rank():
        return None
    why = "it is not there"
    for address in addresses_of(files, int(os.environ.get("LOCAL_RANK", "0"))):
        try:
            slot = Slot(address, writable=True)
        except OSError as error:
            why = str(error)
            continue
        header = slot.header()
        if header is None or (header.attempt, header.step) != wanted:
            slot.close()
            continue
        found = _found(slot, header)
        if isinstance(found, Found):
            os.environ.pop("UNBROKEN_SKIP_BATCHES", None)  # they are behind it: it was written after a rollback
            return found
        why = _voided(slot, found)
        slot.close()
    raise _refused(wanted[1], why)


def _refused(step: int, why: str) -> SnapshotError:
    return SnapshotError(
        f"rank {os.environ.get('RANK', '0')} cannot start from the snapshot of step {step}: {why}. The next attempt "
        "starts from an older one, or from a checkpoint on storage"
    )


def _voided(slot: Slot, why: str) -> str:
    """The next attempt starts from another one: what stands in the way now would do so again."""
    try:
        slot.void()
    except OSError as error:
        return f"{why} (and it cannot be marked: {error})"
    return why


def _found(slot: Slot, header: Header) -> Any:
    """The snapshot, or why this rank cannot start from it."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if (header.rank, header.world) != (rank, world):
        return f"it is of rank {header.rank} of {header.world}"
    try:
        return _read(slot, header)
    except Exception as error:  # a class with another name, a module that is not there, no memory
        return f"{type(error).__name__}: {error}"


def _read(slot: Slot, header: Header) -> Any:
    """The snapshot, or what is wrong with it."""
    memory = slot.mapped()
    array = (ctypes.c_char * len(memory)).from_buffer(memory)
    table = memory[header.table_at : header.table_at + header.table_bytes]
    if zlib.crc32(table) != header.table_sum:
        return "its table is damaged"
    fixed, others = pickle.loads(table)
    template, places, leaves, ranges = pickle.loads(fixed)
    expected = slot.sums(header.sequence).get("content")
    if expected is not None and sums(array, ranges) != expected:
        return "its content has changed since it was written"
    return Found(slot, header, views(array, leaves), leaves, template, (places, others))
