"""For training scripts that want more than to be watched; standard library only, Python 3.9 and up.

    from unbroken import worker
    start = worker.resume_from()      # path of the checkpoint to load, or None
    worker.heartbeat(step)            # once a step; costs a microsecond or two
    worker.heartbeat(step, loss=loss) # the same, and the loss is watched though nothing is printed
    skip = worker.skip()              # batches to leave out after that checkpoint, where the loss went wrong; mostly 0
    worker.phase("checkpoint")        # a pause is about to come; phase("") when it is over

Outside `unbroken run` all of it does nothing. Nothing here ever raises or blocks.
"""

from __future__ import annotations

import os
import stat
from typing import Optional

_last_step: Optional[int] = None  # noqa: UP045 (Python 3.9)


def heartbeat(step: int, loss: Optional[float] = None) -> None:  # noqa: UP045 (Python 3.9)
    """Tell the agent that the run is at this step. A tensor as `loss` is read here, which waits for the GPU."""
    global _last_step
    try:
        _last_step = int(step)
        told = "" if loss is None else f" loss {float(loss):.6g}"
        _write(f"step {_last_step}{told}\n")
    except Exception:  # a step that is no number
        pass


def last_step() -> Optional[int]:  # noqa: UP045
    """The newest step that this process told; None before the first."""
    return _last_step


def phase(name: str) -> None:
    """Tell the agent what the next pause is: `checkpoint`, `evaluation`, `end`; empty when it is over."""
    word = "".join(character for character in str(name)[:40] if character.isalnum() or character in "_-")
    _write(f"phase {word}\n")


def resume_from() -> Optional[str]:  # noqa: UP045 (Python 3.9)
    """The checkpoint that this attempt is to load; None: begin at the beginning, or as the script always does."""
    return os.environ.get("UNBROKEN_RESUME_FROM") or None


def skip() -> int:
    """How many batches after the checkpoint of this attempt are to be left out: the loss went wrong in them.

    These are steps; times your accumulation, if you count micro-batches.

    Add it to what the script saves of its place in the data: an attempt from a later checkpoint is not told again.
    """
    value = os.environ.get("UNBROKEN_SKIP_BATCHES", "")
    return int(value) if value.isascii() and value.isdigit() else 0


def attempt() -> int:
    """Which life of the job this is, from 1; 0 outside unbroken."""
    value = os.environ.get("UNBROKEN_ATTEMPT", "")
    return int(value) if value.isascii() and value.isdigit() else 0


_descriptor: Optional[int] = None  # noqa: UP045
_owner = 0
"""The process that looked for the descriptor: a fork (a data loader's worker) looks again."""


def _write(line: str) -> None:
    descriptor = _find_descriptor()
    if descriptor < 0:
        return
    try:
        os.write(descriptor, line.encode())
    except (OSError, ValueError):
        pass  # a full pipe, a reader that is gone: the run matters more


def _find_descriptor() -> int:
    """The inherited descriptor, made non-blocking; -1 when there is none (any more)."""
    global _descriptor, _owner
    if _descriptor is None or _owner != os.getpid():
        _owner = os.getpid()
        _descriptor = _checked(os.environ.get("UNBROKEN_HEARTBEAT_FD", ""))
    return _descriptor


def _checked(value: str) -> int:
    """The number of an open pipe, socket or file; anything else (a descriptor that now is a terminal) is refused."""
    try:
        descriptor = int(value)
        mode = os.fstat(descriptor).st_mode
        if descriptor < 3 or not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)):
            return -1
        os.set_blocking(descriptor, False)
        return descriptor
    except (OSError, ValueError, OverflowError):
        return -1
