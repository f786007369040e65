"""What a rank is doing, told by the stack of its main thread."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from diagnosis.signals import Frame, RankStack, Word, clean_text

Activity = Literal[
    "collective",
    "checkpoint",
    "evaluation",
    "data",
    "compile",
    "teardown",
    "sleep",
    "lock",
    "compute",
    "unknown",
]

MAX_FRAMES: Final = 40

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
    r"torch/(?:_dynamo|_inductor|_functorch/(?!_?vmap)|fx/|utils/cpp_extension)|/triton/(?:compiler|runtime)/|ninja"
    r"|numba/|tvm/|/jax/_src/compiler"
)
_DATA_FILE: Final = re.compile(
    r"torch/utils/data/|/datasets/(?!__main__)|torchdata/|webdataset/|streaming/base/|/tokenizers/|nvidia/dali|grain/"
    r"|huggingface_hub/|/filelock/|urllib3/|requests/|botocore/|fsspec/|s3fs/|gcsfs/"
    r"|/subprocess\.py$"  # a program that it started: an upload, as a rule
)
_DATA_NAME: Final = re.compile(
    r"(?:^|[_.])(?:dataloader|dataset|tokenize|tokenizer|preprocess|prefetch|get_batch|next_batch|load_data|fetch|collate|"
    r"read_shard|load_shard)(?:$|_|s$)|_next_data|_try_get_data|_get_data|DataLoader",
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
_LOCK_FILE: Final = re.compile(r"/(?:threading|queue|selectors|socket|ssl)\.py$|multiprocessing/")


def parse(rank: int, dump: bytes | str, *, sample: int = 0) -> RankStack:
    """The main thread of `py-spy dump --json` output. Text that is not such a dump becomes `error`."""
    try:
        threads = msgspec.json.decode(dump)
        main = _main_thread(threads)
        frames = tuple(_frame(raw) for raw in main["frames"][:MAX_FRAMES])
    except (msgspec.DecodeError, UnicodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        return RankStack(rank=rank, frames=(), sample=sample, error=f"no stack: {clean_text(str(error), 200)}")
    return RankStack(rank=rank, frames=frames, sample=sample, error="" if frames else "no Python frames")


def _main_thread(threads: list[dict[str, Any]]) -> dict[str, Any]:
    for thread in threads:
        # py-spy leaves the thread id of a busy process at None sometimes: then only the name tells.
        if thread.get("thread_name") == "MainThread" or thread.get("os_thread_id") == thread.get("pid"):
            return thread
    return threads[0]


def _frame(raw: dict[str, Any]) -> Frame:
    return Frame(
        function=clean_text(str(raw.get("name", "")), 120),
        file=clean_text(str(raw.get("filename") or raw.get("short_filename") or ""), 300),
        line=int(raw.get("line") or 0),
    )


def activity(stack: RankStack) -> Activity:
    """What the main thread is doing.

    Phases that may honestly last (checkpoint, evaluation, compiling) win over what happens inside them; a collective
    inside them wins over both, because then the rank is only waiting for others.
    """
    frames = stack.frames
    if not frames:
        return "unknown"
    if any(_TEARDOWN_NAME.match(_bare(frame)) and not _is_user_loop(frame) for frame in frames):
        return "teardown"
    if _in_collective(frames):
        return "collective"
    if any(_COMPILE_FILE.search(frame.file) for frame in frames):
        return "compile"
    for frame in frames:  # innermost first: an evaluation that saves is saving
        if _CHECKPOINT_FILE.search(frame.file) or _CHECKPOINT.search(_bare(frame)):
            return "data" if _DATA_NAME.search(frame.function) else "checkpoint"
        if _EVALUATION.search(_bare(frame)):
            return "evaluation"
        if _DATA_FILE.search(frame.file) or _DATA_NAME.search(frame.function):
            return "data"
    return _leaf(frames[0])


def _leaf(frame: Frame) -> Activity:
    name = _bare(frame)
    if name in _SLEEP_NAME:
        return "sleep"
    if name in _LOCK_NAME and (_LOCK_FILE.search(frame.file) or not frame.file):
        return "lock"
    if _LOCK_FILE.search(frame.file):
        return "lock"
    return "compute"


def _in_collective(frames: tuple[Frame, ...]) -> bool:
    """In a call of torch.distributed that waits for other ranks (the innermost few frames tell)."""
    return any(_COLLECTIVE_NAME.match(_bare(frame)) and _DISTRIBUTED_FILE.search(frame.file) for frame in frames[:8])


def _is_user_loop(frame: Frame) -> bool:
    """`cleanup` and the like in the user's own code are only teardown when the library is being torn down."""
    return _bare(frame) in {"cleanup", "teardown", "shutdown"} and not (
        frame.file.startswith("/usr/lib") or "site-packages" in frame.file or "/lib/python" in frame.file
    )


def _bare(frame: Frame) -> str:
    """`Trainer.evaluate` -> `evaluate`; `f.<locals>.inner` -> `inner`."""
    return frame.function.rsplit(".", 1)[-1]


def in_barrier(stack: RankStack) -> bool:
    """Waiting in a barrier, as scripts do at their end."""
    return any(_bare(frame) in {"barrier", "monitored_barrier", "wait_for_everyone"} for frame in stack.frames[:8])


def signature(stack: RankStack) -> tuple[Frame, ...]:
    """Equal for two samples that show the same place."""
    return stack.frames


class StackGroup(Word, frozen=True, kw_only=True):
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


def odd_ones(stacks: Iterable[RankStack]) -> tuple[int, ...]:
    """The ranks that are not where most are, nor waiting in a collective; empty when nobody stands out."""
    groups = group(stacks)
    if not groups:
        return ()
    apart = [one for one in groups if one.activity not in ("collective", "teardown")]
    if len(apart) == len(groups):
        apart = groups[1:]
    return tuple(sorted(rank for one in apart for rank in one.ranks))


def place(stack: RankStack) -> str:
    """`evaluate (train.py:41)`: the innermost frame of the user's own code, else the innermost one."""
    if not stack.frames:
        return stack.error or "unknown place"
    own = (frame for frame in stack.frames if not is_library(frame.file))
    frame = next(own, stack.frames[0])
    return f"{_bare(frame)} ({frame.file.rsplit('/', 1)[-1]}:{frame.line})"


def is_library(file: str) -> bool:
    """Installed code or the standard library, not the user's."""
    return "site-packages/" in file or "dist-packages/" in file or "/lib/python" in file or file.startswith("<")
