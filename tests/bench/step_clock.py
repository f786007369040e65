"""What the step clock costs: the same loop with and without it, in turns, in one process.

python -m tests.bench.step_clock [ROUNDS]
"""

from __future__ import annotations

import mmap
import statistics
import sys
import time
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
from torch.utils.data import DataLoader, dataloader

from supervisor.training.clock import BATCHES, STEPS, StepClock

STEPS_EACH = 100


def steps(model: Any, optimizer: Any, batches: Any) -> float:
    """Seconds of the quickest step."""
    quickest = float("inf")
    for _ in range(STEPS_EACH):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(next(batches)).square().mean().backward()
        optimizer.step()
        quickest = min(quickest, time.perf_counter() - began)
    return quickest


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    batches = iter(DataLoader(torch.randn(8 * (rounds + 2) * 2 * STEPS_EACH, 64), batch_size=8))
    clock = StepClock(memoryview(mmap.mmap(-1, 4096))[4040:4088].cast("d"))
    steps(model, optimizer, batches)
    assert clock.listen()
    iterator = dataloader._BaseDataLoaderIter
    hook, ours = dict(hooks), {name: vars(iterator)[name] for name in ("_profile_name", "_num_yielded")}
    took: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds):
        on = number % 2 == 1
        hooks.clear()
        hooks.update(hook if on else {})
        for name, attribute in ours.items():
            if on:
                setattr(iterator, name, attribute)
            else:
                delattr(iterator, name)
        took[on].append(steps(model, optimizer, batches))
    assert clock.figures[STEPS] == clock.figures[BATCHES] == rounds * STEPS_EACH
    for on, times in took.items():
        word = "with" if on else "without"
        print(
            f"{word:8} quickest {1e6 * min(times):8.2f} us, median of rounds {1e6 * statistics.median(times):8.2f} us"
        )
    print(f"ratio of minima {min(took[True]) / min(took[False]):.4f}")


if __name__ == "__main__":
    main()
