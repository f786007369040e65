"""Whether a node with one bad GPU may go on with the others, one process less. Pure.

Only where the user allows it, and only where it is known which process has which GPU: one each, in the order of
`CUDA_VISIBLE_DEVICES`. What the job does about it: docs/ledger.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from diagnosis.signals import Frozen
from diagnosis.taxonomy import FailureClass
from recovery.checkpoint import Checkpoint
from recovery.cordon import Cordon

OF_ONE_GPU: Final = frozenset(
    {FailureClass.GPU_ECC_UNCORRECTABLE, FailureClass.GPU_FALLEN_OFF_BUS, FailureClass.GPU_HANG}
)
"""What one GPU has, and the others of its node need not. Of a driver, a link, a switch or a machine they all depend."""
LEAST_OF_UUID: Final = len("GPU-") + 8


class NodeGpus(Frozen, frozen=True, kw_only=True):
    """What is known of the GPUs of a node's processes. Nothing at all: they have not been looked at yet."""

    gpus: tuple[tuple[str, str], ...] = ()
    """PCI address and UUID, in the order of the processes."""
    problem: str = ""
    """Why no process can be started without one of them, in words."""


def of_processes(processes: int | None, environment: Mapping[str, str], gpus: Mapping[str, str]) -> NodeGpus:
    """`processes`: that torchrun starts. `environment`: of the launcher. `gpus`: PCI address -> UUID, of the node."""
    if not gpus:
        return NodeGpus()
    if environment.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
        return NodeGpus(problem="TORCH_ELASTIC_WORKER_IDENTICAL=1 says that all nodes have as many processes")
    if not all(gpus.values()):
        return NodeGpus(problem="the driver does not tell the UUIDs of all GPUs")
    found = _visible(environment, sorted(gpus.items()))
    if isinstance(found, str):
        return NodeGpus(problem=found)
    if processes != len(found):
        return NodeGpus(problem=f"not each of its processes ({processes or 'unknown'}) has one of {len(found)} GPUs")
    return NodeGpus(gpus=found) if len(found) > 1 else NodeGpus(problem="it has only this GPU")


def _visible(environment: Mapping[str, str], every: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...] | str:
    """The GPUs that CUDA gives to the launcher, in its order; else why that is not known."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return tuple(every)
    names, found = [name.strip() for name in text.split(",")], []
    numbers = [int(name) for name in names if name.isascii() and name.isdigit()]
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or sorted(numbers) == list(range(len(every)))
    for name in names:
        if name.isascii() and name.isdigit() and int(name) < len(every) and by_bus:
            found.append(every[int(name)])
        elif len(same := [gpu for gpu in every if _names(name, gpu)]) == 1:
            found += same
        elif name.isascii() and name.isdigit() and not by_bus:
            return f"CUDA_VISIBLE_DEVICES={text[:80]} numbers some of its GPUs, in an order that is not known"
        else:
            return f"CUDA_VISIBLE_DEVICES={text[:80]} does not name GPUs that it has"
    return tuple(found) if len(set(found)) == len(found) else f"CUDA_VISIBLE_DEVICES={text[:80]} names one twice"


def _names(name: str, gpu: tuple[str, str]) -> bool:
    return name == gpu[0] or (len(name) >= LEAST_OF_UUID and name.startswith("GPU-") and gpu[1].startswith(name))


class BadGpu(Frozen, frozen=True, kw_only=True):
    """The one GPU that a node is started without."""

    uuid: str
    others: tuple[str, ...]
    """UUIDs of those that its processes get."""
    reason: str


def bad_gpu(cordons: Iterable[Cordon], known: NodeGpus) -> BadGpu | None:
    """`cordons`: of the node. None: it stays out as a whole, or in as it is.

    Proven bad is what policy found to be a fault of this GPU alone, and what a person cordoned by its name. A node with
    two bad GPUs is no good node.
    """
    held, found = tuple(cordons), set()
    for cordon in held:
        name = cordon.gpu
        if cordon.failure_class is not None:
            name = (cordon.gpu or cordon.culprit_gpu) if cordon.failure_class in OF_ONE_GPU else ""
        same = [gpu for gpu in known.gpus if _names(name, gpu)]
        if len(same) != 1:
            return None
        found.add(same[0])
    if len(found) != 1 or known.problem:
        return None
    (_, uuid), *_ = found
    others = tuple(other for _, other in known.gpus if other != uuid)
    return BadGpu(uuid=uuid, others=others, reason=held[0].reason)


def why_not_loaded(newest: Checkpoint | None, world_size: int) -> str:
    """Why so many ranks cannot resume from this checkpoint, in words; empty: nothing says so."""
    layout = newest.layout if newest is not None else None
    if newest is None or layout is None or not layout.fixed or layout.world_size == world_size:
        return ""
    return f"{newest.path} ({newest.format}) can only be loaded by {layout.world_size} ranks"


def with_processes(argv: Sequence[str], options: int, processes: int) -> list[str]:
    """torchrun's arguments, with another number of processes. `options`: how many words come before the script."""
    kept = [word for word in argv[:options] if not re.fullmatch(r"--nproc[-_]per[-_]node=.*", word)]
    return [f"--nproc-per-node={processes}", *kept, *argv[options:]]
