"""How long a save holds up training: run by `supervisor.bench.checkpoint` with the training Python, needs torch.

    python saves.py FOLDER MIB TENSOR_MIB ROUNDS SECONDS

It prints JSON: way -> seconds of each round, or why there are none.

All ways save the same state in turns, which a step in place changes in between. What goes on in the background is
waited for before the next one. After so many seconds no further round begins, once there are two. Each round is told
as a line of JSON as well.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import staging, state_dict_saver

from recovery import snapshot, snapshot_memory

LEAST_ROUNDS = 2
Way = Callable[[dict[str, Any], int], Callable[[], object]]
"""Saves a state of a step; what is given back waits for the rest of it."""


def nothing() -> None:
    """All is done already."""


def made_ways(folder: Path, state: dict[str, Any]) -> dict[str, Way]:
    warm = {name: tensor.clone() for name, tensor in state["model"].items()}
    ours = snapshot.Stager()

    def copy(given: dict[str, Any], _: int) -> Callable[[], object]:
        for name, tensor in given["model"].items():
            warm[name].copy_(tensor)
        return nothing

    def snapshot_save(given: dict[str, Any], step: int) -> Callable[[], object]:
        if not snapshot.save(given, step):
            raise RuntimeError("no snapshot was kept")
        return nothing

    def torch_save(given: dict[str, Any], step: int) -> Callable[[], object]:
        torch.save(given, folder / f"{step}.pt")
        return nothing

    def dcp_save(given: dict[str, Any], step: int) -> Callable[[], object]:
        dcp.save(given, checkpoint_id=folder / str(step))
        return nothing

    def async_save(**options: Any) -> Way:
        def way(given: dict[str, Any], step: int) -> Callable[[], object]:
            saved = dcp.async_save(given, checkpoint_id=folder / str(step), **options)
            if isinstance(saved, state_dict_saver.AsyncSaveResponse):
                saved.staging_completion.result()
                return lambda: saved.upload_completion.result()
            return lambda: saved.result()

        return way

    ways: dict[str, Way] = {
        "memory copy, warm": copy,
        "snapshot.save": snapshot_save,
        "async_save, our stager": async_save(async_stager=ours),
        "torch.save": torch_save,
        "dcp.save": dcp_save,
        "async_save, defaults": async_save(),
        "async_save, BlockingAsyncStager": async_save(async_stager=staging.BlockingAsyncStager()),
    }

    def staged(options: tuple[bool, bool, bool, bool]) -> Way:
        if options[0] and not torch.cuda.is_available():
            raise RuntimeError("memory is pinned for an accelerator, and there is none")
        return async_save(async_stager=staging.DefaultStager(staging.StagingOptions(*options)))

    for name, options in STAGINGS.items():
        ways[f"async_save, DefaultStager, {name}"] = made_late(functools.partial(staged, options))
    ways["async_save, process"] = made_late(
        lambda: async_save(async_checkpointer_type=state_dict_saver.AsyncCheckpointerType.PROCESS)
    )
    ways["DLRover flash checkpoint, memory"] = made_late(lambda: with_dlrover(folder))
    return ways


STAGINGS = {
    "shared memory": (False, True, False, False),
    "pinned memory": (True, False, False, False),
    "its own defaults": (True, True, True, True),
}
"""Pinned and shared memory, in a thread, without waiting for copies."""


def made_late(make: Callable[[], Way]) -> Way:
    """Made when it is used first: what cannot be made here is told by its name, with the reason."""
    made: list[Way] = []

    def way(given: dict[str, Any], step: int) -> Callable[[], object]:
        if not made:
            made.append(make())
        return made[0](given, step)

    return way


def with_dlrover(folder: Path) -> Way:
    """DLRover's flash checkpoint, where it is installed."""
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    checkpointer = DdpCheckpointer(str(folder / "dlrover"))

    def way(given: dict[str, Any], step: int) -> Callable[[], object]:
        checkpointer.save_checkpoint(step, given, str(folder / f"dlrover-{step}.pt"), storage_type=StorageType.MEMORY)
        return nothing

    return way


def measured(folder: Path, mib: int, tensor_mib: float, rounds: int, seconds: float) -> dict[str, Any]:
    count = max(1, int(mib / tensor_mib))
    model = {f"layer{number}": torch.randn(int(tensor_mib * (1 << 18))) for number in range(count)}
    state: dict[str, Any] = {"model": model, "step": 0}
    found: dict[str, Any] = {}
    ways = made_ways(folder, state)
    step, began_at = 0, time.monotonic()
    for number in range(rounds + 1):  # the first one warms up
        now = time.monotonic() - began_at
        if number > LEAST_ROUNDS and now * (number + 1) / number > seconds:
            break
        print(json.dumps({"rounds": number, "seconds": round(now, 1)}), flush=True)
        for name, way in ways.items():
            if isinstance(found.get(name), str):
                continue
            step += 1
            state["step"] = step
            torch._foreach_mul_(list(model.values()), 1.0001)
            time.sleep(0.05)
            try:
                began = time.perf_counter()
                wait = way(state, step)
                took = time.perf_counter() - began
                wait()
                found.setdefault(name, []).append(took)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"[:200]
            shutil.rmtree(folder / str(step), ignore_errors=True)
            (folder / f"{step}.pt").unlink(missing_ok=True)
    return {name: times if isinstance(times, str) else times[1:] for name, times in found.items()}


def main() -> None:
    folder, mib, tensor_mib = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    rounds, seconds = int(sys.argv[4]), float(sys.argv[5])
    slots = snapshot_memory.make_slots(1)
    files = ":".join(snapshot_memory.addresses(slots))
    os.environ.update({snapshot_memory.FILES_VARIABLE: files, "UNBROKEN_ATTEMPT": "1"})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    ways = measured(folder, mib, tensor_mib, rounds, seconds)
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "ways": ways}))
    sys.stdout.flush()
    os._exit(0)  # servers of the others that do not end


if __name__ == "__main__":
    main()
