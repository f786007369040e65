"""What a rank is doing, told by the stack of its main thread."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

from diagnosis.signals import Frame, Frozen, RankStack
from diagnosis.stacks.dumps import parse as parse
from diagnosis.stacks.dumps import read_dump as read_dump
from diagnosis.stacks.frames import is_native

Activity = Literal[
    "collective",
    "checkpoint",
    "evaluation",
    "data",
    "compile",
    "teardown",
    "sleep",
    "lock",
    "gpu_sync",
    "compute",
    "unknown",
]
"""`gpu_sync`: the CPU waits for what it gave the GPU, which may be a collective, a kernel or a copy."""

# A word is a part of an identifier between underscores: `save_checkpoint`, `_save`, `Trainer.evaluate`.
_CHECKPOINT: Final = re.compile(
    r"(?:^|[_.])(?:save|saves|saving|load|loading|restore|restoring|resume|upload|download|snapshot|write)(?:$|_)"
    r"|checkpoint|ckpt|state_?dict|(?:^|[_.])(?:torch_)?(?:load|save)$|safetensors|snapshot",
    re.IGNORECASE,
)
_EVALUATION: Final = re.compile(
    r"(?:^|[_.])(?:eval|evaluate|evaluation|evaluating|validate|validation|validating|valid|val|test|testing|"
    r"predict|generate|sample|benchmark)(?:$|_)|estimate_loss|eval_loop|run_eval",
    re.IGNORECASE,
)
_CHECKPOINT_FILE: Final = re.compile(
    r"torch/serialization\.py$|torch/distributed/checkpoint/|safetensors/|dist_checkpointing/|orbax/|/checkpointing?\.py$"
)
_COMPILE_FILE: Final = re.compile(
    r"torch/(?:_dynamo|_inductor|_functorch/(?!_?vmap)|fx/|utils/cpp_extension)|(?:^|/)triton/(?:compiler|runtime)/|ninja"
    r"|numba/|tvm/|/jax/_src/compiler"
)
_DATA_FILE: Final = re.compile(
    r"torch/utils/data/|(?:^|/)datasets/(?!__main__)|torchdata/|webdataset/|streaming/base/|/tokenizers/|nvidia/dali|grain/"
    r"|huggingface_hub/|(?:^|/)filelock/|urllib3/|requests/|botocore/|fsspec/|s3fs/|gcsfs/"
    r"|(?:^|/)subprocess\.py$"  # a program that it started: an upload, as a rule
)
_DATA_NAME: Final = re.compile(
    r"(?:^|[_.])(?:dataloader|data_loader|dataset|tokenize|tokenizer|preprocess|prefetch|(?:get|next|load|read|fetch)_"
    r"(?:batch|data|shard|sample)|batch_generator|fetch|collate)(?:$|_|s$)|_next_data|_try_get_data|_get_data|DataLoader",
    re.IGNORECASE,
)
_COLLECTIVE_NAME: Final = re.compile(
    r"^(?:all_reduce|all_gather\w*|all_to_all\w*|reduce_scatter\w*|_?reduce|_?broadcast\w*|barrier|monitored_barrier|"
    r"gather\w*|scatter\w*|send|recv|isend|irecv|batch_isend_irecv|_all_gather_base|_reduce_scatter_base|allreduce\w*|"
    r"all_gather_object|_object_to_tensor|wait|synchronize|wait_for_everyone|_sync_params_and_buffers|"
    r"_verify_param_shape_across_processes|_store_based_barrier|store_based_barrier|_wait_for_work)$"
)
_DISTRIBUTED_FILE: Final = re.compile(r"torch/distributed/|torch/nn/parallel/|deepspeed/(?:comm|runtime)/|accelerate/")
_TEARDOWN_NAME: Final = re.compile(
    r"^(?:destroy_process_group|_shutdown_backend|_shutdown|_run_exitfuncs|_exit_function|shutdown|_finalize_\w+|"
    r"end_training|_python_exit|cleanup|teardown)$"
)
_SLEEP_NAME: Final = frozenset({"sleep", "pause", "sigwait", "nanosleep"})
_LOCK_NAME: Final = frozenset(
    {"acquire", "_wait_for_tstate_lock", "join", "get", "poll", "select", "communicate", "_wait"}
)
_LOCK_FILE: Final = re.compile(r"(?:^|/)(?:threading|queue|selectors|socket|ssl)\.py$|multiprocessing/")


_GPU_SYNC: Final = re.compile(
    r"p?(?:cuda|hip)(?:Stream|Device|Event)Synchronize|(?:cu|cuda|hip)Memcpy|cu(?:Stream|Ctx|Event)Synchronize|"
    r"at::native::(?:_local_scalar_dense|nonzero|copy)_?\w*cuda"
)
_GPU_SYNC_FILE: Final = re.compile(r"torch/(?:cuda|xpu|accelerator)/(?:__init__|streams)\.py$")
_NATIVE_ACTIVITY: Final[tuple[tuple[Activity, re.Pattern[str]], ...]] = (
    (
        "teardown",
        re.compile(
            r"p?ncclComm(?:Abort|Destroy|Finalize)|c10d::NCCLComm::(?:abort|ncclCommAbort|destroy|finalize)|"
            r"c10d::ProcessGroup\w*::(?:abort|shutdown|~)"
        ),
    ),
    ("collective", re.compile(r"p?nccl[A-Z]|c10d::|gloo::|MPI_[A-Z]|p?rcclx?[A-Z]")),
    ("gpu_sync", _GPU_SYNC),
)
"""What a compiled function tells, wherever it stands in a stack."""
_NATIVE_LEAF: Final[tuple[tuple[Activity, re.Pattern[str]], ...]] = (
    ("sleep", re.compile(r"_*(?:clock_)?nanosleep|usleep|sleep$")),
    (
        "lock",
        re.compile(
            r"_*(?:futex|pthread_(?:cond|mutex|join)|lll_lock|sem_|new_sem|poll|ppoll|epoll|select|accept|recv|"
            r"std::condition|waitpid|wait4|sched_yield|sigwait|do_futex)"
        ),
    ),
    ("data", re.compile(r"_*(?:libc_)?p?read(?:v|64)?$|_*open(?:at)?(?:64)?$|_*[fl]?stat")),
    ("checkpoint", re.compile(r"_*(?:libc_)?p?write(?:v|64)?$|_*f(?:data)?sync$|_*ftruncate|_*rename")),
)
"""What the innermost function tells where no Python frame does."""


def activity(stack: RankStack) -> Activity:
    """What the main thread is doing.

    Phases that may honestly last (checkpoint, evaluation, compiling) win over what happens inside them; a collective
    inside them wins over both, because then the rank is only waiting for others.
    """
    frames = tuple(frame for frame in stack.frames if not is_native(frame.file))
    native = tuple(frame for frame in stack.frames if is_native(frame.file)) if len(frames) < len(stack.frames) else ()
    if any(_TEARDOWN_NAME.match(bare(frame)) and not _is_user_loop(frame) for frame in frames):
        return "teardown"
    deep = _native_activity(native)
    if _in_collective(frames) or deep in ("collective", "teardown"):
        return "teardown" if deep == "teardown" else "collective"
    if not frames:
        return deep or (_native_leaf(native[0]) if native else "unknown")
    if any(_COMPILE_FILE.search(frame.file) for frame in frames):
        return "compile"
    for frame in frames:  # innermost first: an evaluation that saves is saving
        if _CHECKPOINT_FILE.search(frame.file) or _CHECKPOINT.search(bare(frame)):
            return "data" if _DATA_NAME.search(frame.function) else "checkpoint"
        if _EVALUATION.search(bare(frame)):
            return "evaluation"
        if _DATA_FILE.search(frame.file) or _DATA_NAME.search(frame.function):
            return "data"
    if deep is not None or (bare(frames[0]) == "synchronize" and _GPU_SYNC_FILE.search(frames[0].file)):
        return "gpu_sync"
    leaf = _leaf(frames[0])
    if leaf == "compute" and native and native[0] == stack.frames[0]:
        told = _native_leaf(native[0])
        return told if told in ("sleep", "lock") else leaf
    return leaf


def _native_activity(frames: tuple[Frame, ...]) -> Activity | None:
    if frames and "libcuda.so" in frames[0].file:
        return next((told for told in map(tells_of, frames) if told in ("collective", "teardown")), "gpu_sync")
    return next((told for told in map(tells_of, frames) if told is not None), None)


def tells_of(frame: Frame) -> Activity | None:
    """What a compiled function tells, wherever it stands in a stack."""
    return next((told for told, pattern in _NATIVE_ACTIVITY if pattern.match(frame.function)), None)


def _native_leaf(frame: Frame) -> Activity:
    return next((told for told, pattern in _NATIVE_LEAF if pattern.match(frame.function)), "unknown")


def _leaf(frame: Frame) -> Activity:
    name = bare(frame)
    if name in _SLEEP_NAME:
        return "sleep"
    if name in _LOCK_NAME and (_LOCK_FILE.search(frame.file) or not frame.file):
        return "lock"
    if _LOCK_FILE.search(frame.file):
        return "lock"
    return "compute"


def _in_collective(frames: tuple[Frame, ...]) -> bool:
    """In a call of torch.distributed that waits for other ranks (the innermost few frames tell)."""
    return any(_COLLECTIVE_NAME.match(bare(frame)) and _DISTRIBUTED_FILE.search(frame.file) for frame in frames[:8])


_CALLS_FILE: Final = re.compile(r"torch/distributed/(?:distributed_c10d|_functional_collectives|nn/functional)\.py$")
_OWN_WORK: Final = re.compile(r"_object_to_tensor|\w+_object(?:_list)?$")
"""What pickles objects or reads them back besides."""


def waits_in_collective(stack: RankStack) -> bool:
    """It stands in the very call that waits for other ranks: not in what a call of torch.distributed does of its own
    (pickling an object to be broadcast), and not in a wait that its stack does not show (`work.wait()`)."""
    inner = next((frame for frame in stack.frames if not is_native(frame.file)), None)
    if inner is None or not _CALLS_FILE.search(inner.file):
        return False
    return _COLLECTIVE_NAME.match(bare(inner)) is not None and _OWN_WORK.match(bare(inner)) is None


def in_send_or_receive(stack: RankStack) -> bool:
    """It stands in a call that waits for one other rank, which gloo's flight recorder does not know."""
    inner = next((frame for frame in stack.frames if not is_native(frame.file)), None)
    return inner is not None and bare(inner) in {"send", "recv"} and _CALLS_FILE.search(inner.file) is not None


def in_teardown(stack: RankStack) -> bool:
    """In torch's own destruction or abort of process groups, not merely in some handler at exit (which may upload)."""
    return any(
        (bare(frame) in _GROUP_ENDS and _DISTRIBUTED_FILE.search(frame.file) is not None)
        or (is_native(frame.file) and tells_of(frame) == "teardown")
        for frame in stack.frames
    )


_GROUP_ENDS: Final = frozenset({"destroy_process_group", "_shutdown_backend", "_abort_process_group"})


def own_frames(stack: RankStack) -> tuple[Frame, ...]:
    """The frames of the script's own code, the outermost first."""
    return tuple(
        frame for frame in reversed(stack.frames) if not is_library(frame.file) and not _OURS.search(frame.file)
    )


_OURS: Final = re.compile(r"supervisor/training/(?:bootstrap|keeper|stub)\.py$")


def _is_user_loop(frame: Frame) -> bool:
    """`cleanup` and the like in the user's own code are only teardown when the library is being torn down."""
    return bare(frame) in {"cleanup", "teardown", "shutdown"} and not (
        frame.file.startswith("/usr/lib") or "site-packages" in frame.file or "/lib/python" in frame.file
    )


def bare(frame: Frame) -> str:
    """`Trainer.evaluate` -> `evaluate`; `f.<locals>.inner` -> `inner`."""
    return frame.function.rsplit(".", 1)[-1]


def in_barrier(stack: RankStack) -> bool:
    """Waiting in a barrier, as scripts do at their end."""
    return any(bare(frame) in {"barrier", "monitored_barrier", "wait_for_everyone"} for frame in stack.frames[:8])


def signature(stack: RankStack) -> tuple[Frame, ...]:
    """Equal for two samples that show the same place."""
    return stack.frames


class StackGroup(Frozen, frozen=True, kw_only=True):
    """Ranks whose stacks are the same."""

    ranks: tuple[int, ...]
    activity: Activity
    frames: tuple[Frame, ...]


def group(stacks: Iterable[RankStack]) -> list[StackGroup]:
    """Equal stacks together, the largest group first; of several samples of a rank the newest counts."""
    newest: dict[int, RankStack] = {}
    for stack in stacks:
        if stack.frames and (stack.rank not in newest or newest[stack.rank].sample <= stack.sample):
            newest[stack.rank] = stack
    by_place: dict[tuple[str, ...], list[RankStack]] = {}
    for stack in newest.values():
        # Lines inside a library differ between ranks by chance; functions tell where somebody is.
        key = tuple(f"{frame.file}:{frame.function}" for frame in stack.frames)
        by_place.setdefault(key, []).append(stack)
    groups = [
        StackGroup(
            ranks=tuple(sorted(stack.rank for stack in members)),
            activity=activity(members[0]),
            frames=members[0].frames,
        )
        for members in by_place.values()
    ]
    return sorted(groups, key=lambda one: (-len(one.ranks), one.ranks))


def place(stack: RankStack) -> str:
    """`evaluate (train.py:41)`: the innermost frame of the user's own code, else the innermost one."""
    if not stack.frames:
        return stack.error or "unknown place"
    own = (frame for frame in stack.frames if not is_library(frame.file))
    told = (frame for frame in stack.frames if tells_of(frame) is not None)
    frame = next(own, None) or next(told, stack.frames[0])
    line = f":{frame.line}" if frame.line or not is_native(frame.file) else ""
    return f"{bare(frame)} ({frame.file.rsplit('/', 1)[-1]}{line})"


_LIBRARY: Final = re.compile(
    r"^(?:torch|torchvision|torchdata|numpy|deepspeed|accelerate|transformers|lightning|pytorch_lightning|"
    r"lightning_fabric|triton|transformer_engine|multiprocessing|concurrent|asyncio|importlib|tqdm|wandb)/"
    r"|^(?:threading|queue|selectors|socket|ssl|subprocess|runpy|contextlib|functools)\.py$"
)
"""As py-spy shortens the names of installed code."""


def is_library(file: str) -> bool:
    """Installed code or the standard library, not the user's."""
    return (
        "site-packages/" in file
        or "dist-packages/" in file
        or "/lib/python" in file
        or file.startswith("<")
        or is_native(file)
        or _LIBRARY.match(file) is not None
    )
