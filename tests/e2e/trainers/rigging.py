"""What the tests rig a training script with. The supervised program knows nothing of it.

Two things that no test can do from outside: learn which process is which rank without asking the program under test
(`sign_in`), and faults that happen within a script (`strike`, `skips`, `tearing`, `at_the_end`). Faults come from
the variable RIG, for example `relock@12:1,exception@20:0` (kind, step, rank); each acts once, so that the restarted
attempt passes, unless its kind ends in `!`. A script without RIG and RIG_DIR in its environment is left alone.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    kind: str
    step: int
    rank: int
    always: bool


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _folder() -> Path | None:
    folder = os.environ.get("RIG_DIR")
    return Path(folder) if folder else None


def _faults() -> list[Fault]:
    faults = []
    for text in filter(None, os.environ.get("RIG", "").split(",")):
        kind, _, where = text.partition("@")
        step, _, rank = where.partition(":")
        faults.append(Fault(kind.rstrip("!"), int(step), int(rank), kind.endswith("!")))
    return faults


def _due(kind: str, step: int) -> bool:
    """Whether this fault is to happen here and now; leaves the mark that keeps it from happening again."""
    for fault in _faults():
        if fault[:3] != (kind, step, _rank()):
            continue
        folder = _folder()
        assert folder is not None, "RIG needs RIG_DIR"
        mark = folder / f"struck-{kind}-{step}-{fault.rank}"
        if mark.exists() and not fault.always:
            continue
        mark.touch()
        return True
    return False


def sign_in(collected: bool = False) -> None:
    """Tell the test that this process is this rank, and wait for the file RIG_GATE, if there is to be one.

    `collected`: at its end this rank collects what its keeper imported, as every other script does. That takes 0.7 s of
    a core. The ends themselves are compared in tests/training/.
    """
    if not collected:
        atexit.unregister(gc.unfreeze)
    folder, gate = _folder(), os.environ.get("RIG_GATE")
    while gate and not os.path.exists(gate):
        time.sleep(0.05)
    if folder is not None:
        entry = folder / f"pid-{os.getpid()}"
        entry.with_suffix(".new").write_text(str(_rank()))
        (folder / f"gpus-{os.getpid()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
        entry.with_suffix(".new").rename(entry)
        if os.environ.get("RIG_SIGNALS"):
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, lambda number, _: (folder / f"signal-{number}-{_rank()}").touch())


def write_weights(tensors: object, path: Path) -> None:
    """The raw bytes of all weights, one after the other: equal files mean equal bits."""
    import torch

    data = b"".join(bytes(t.detach().contiguous().view(torch.uint8).flatten().tolist()) for t in tensors)  # type: ignore[attr-defined]
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    temporary.replace(path)


def made(step: int) -> None:
    """The truth about steps: when this process made which, in a file of its own."""
    folder = _folder()
    if folder is not None:
        with open(folder / f"steps-{_rank()}-{os.getpid()}", "a") as file:
            file.write(f"{step} {time.time():.4f}\n")


def strike(step: int) -> None:
    """The faults within a step. RIG_HOLD (`25:PATH`): from step 25 on, wait until there is a file PATH."""
    held_at, _, path = os.environ.get("RIG_HOLD", "").partition(":")
    while path and step >= int(held_at) and not os.path.exists(path):
        time.sleep(0.05)
    for kind, act in _WITHIN_A_STEP.items():
        if _due(kind, step):
            sys.stdout.flush()
            act()


def skips(step: int) -> bool:
    """Whether this rank leaves out the collective of this step."""
    return _due("skip", step)


def damages(how: str, step: int) -> bool:
    """Whether this rank's weights go wrong at this step, in this way."""
    return _due(how, step)


def tearing(step: int, path: Path, data: bytes) -> None:
    """Die in the middle of writing `data` to `path`, if that is this rank's fault at this step."""
    if _due("tear", step):
        path.write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)


def at_the_end() -> None:
    """The faults of a script whose work is complete. Their step is -1."""
    if _due("teardown", -1):
        import torch

        torch.distributed.ProcessGroup.shutdown = lambda _group: _stall()  # type: ignore[method-assign]


def _stall() -> None:
    time.sleep(1_000_000)


def _raise() -> None:
    table: dict[str, int] = {}
    table["momentum"] += 1


def _lose_the_peer() -> None:
    """What NCCL raises when a connection to node b breaks."""
    raise RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or there was a network error\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
        "Last error:\nsocketProgress: Connection closed by remote peer b<42138>"
    )


def _hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(1_000_000)  # PyDLL: the interpreter's lock stays held during the call


def _crash() -> None:
    ctypes.string_at(0)


def _go_deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _stall()


def _lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _cross_two_locks() -> None:
    one, other = threading.Lock(), threading.Lock()
    one.acquire()
    thread = threading.Thread(target=lambda: (other.acquire(), one.acquire()), daemon=True)
    thread.start()
    while not other.locked():
        time.sleep(0.01)
    with other:
        pass


def _join_who_waits_for_us() -> None:
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=lock.acquire, daemon=True)
    thread.start()
    thread.join()


def _fill_the_pool() -> None:
    pool = ThreadPoolExecutor(1)
    pool.submit(lambda: pool.submit(int).result()).result()


def _end_the_main_thread() -> None:
    threading.Thread(target=lambda: time.sleep(1_000_000), daemon=True).start()
    ctypes.CDLL(None).syscall(60)  # exit: of the calling thread alone (x86-64)


def _call_another_collective() -> None:
    import torch

    torch.distributed.barrier()


def _leave_the_group() -> None:
    import torch

    torch.distributed.ProcessGroup.shutdown = lambda _group: _stall()  # type: ignore[method-assign]
    torch.distributed.destroy_process_group()


def _xid_79() -> None:
    """What the kernel writes when the GPU of this process falls off the bus."""
    folder = _folder()
    assert folder is not None
    with open(folder / "kernel", "a") as log:
        log.write(f"NVRM: Xid (PCI:0000:c1:00): 79, pid={os.getpid()}, name=python, GPU has fallen off the bus.\n")


def _print_an_xid() -> None:
    print(f"NVRM: Xid (PCI:0000:c1:00): 79, pid={os.getpid()}, name=python, GPU has fallen off the bus.", flush=True)


_WITHIN_A_STEP = {
    "xid": _xid_79,
    "xid_hang": lambda: (_xid_79(), _stall()),
    "xid_printed": _print_an_xid,
    "relock": _lock_twice,
    "crossed": _cross_two_locks,
    "joined": _join_who_waits_for_us,
    "pool": _fill_the_pool,
    "gone": _end_the_main_thread,
    "other": _call_another_collective,
    "left": _leave_the_group,
    "exception": _raise,
    "lost_peer": _lose_the_peer,
    "gil": _hold_the_lock,
    "segfault": _crash,
    "deaf": _go_deaf,
    "exit0": lambda: sys.exit(0),
    "exit3": lambda: sys.exit(3),
    "leave": lambda: os._exit(0),
}
