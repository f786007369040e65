"""A healthy trainer full of long pauses: none of them is a fault, and a supervisor must sit still through all.

`--pause KIND:SECONDS@STEP`, as often as wanted. Kinds: `save` (rank 0 writes a large checkpoint to slow storage while
the others wait in a barrier), `evaluate_all` (every rank computes), `measure` (rank 0 computes alone, and nothing in
its name tells), `judge` (rank 0 waits for another program to evaluate), `hand_over` (as `judge`, but nothing in its
name tells), `start` (before the first step; its step does not matter).
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import time
from pathlib import Path

import rigging

rigging.sign_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


class SlowStorage(io.RawIOBase):
    """A file on storage that takes a given time for the whole of a checkpoint."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.file = open(path, "wb")  # noqa: SIM115 (closed by whoever closes this object)
        self.until = time.monotonic() + seconds

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        piece = max(1, len(view) // 20)
        for at in range(0, len(view), piece):
            self.file.write(view[at : at + piece])
            self.file.flush()
            if len(view) > 10_000:
                time.sleep(max(0.0, self.until - time.monotonic()) / 8)
        return len(view)

    def close(self) -> None:
        if not self.file.closed:
            time.sleep(max(0.0, self.until - time.monotonic()))
            self.file.close()
        super().close()


def save_checkpoint(out: Path, step: int, weights: torch.Tensor, seconds: float) -> None:
    temporary = out / f".step-{step}.pt"
    with SlowStorage(temporary, seconds) as storage:
        torch.save({"step": step, "weights": weights, "padding": torch.zeros(250_000)}, storage)
    temporary.rename(out / f"step-{step}.pt")


def compute(seconds: float) -> float:
    layers = [
        torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256), torch.nn.GELU()) for _ in range(8)
    ]
    model = torch.nn.Sequential(*layers)
    until, total = time.monotonic() + seconds, 0.0
    while time.monotonic() < until:
        total += model(torch.randn(64, 256)).square().mean().item()
    return total


def evaluate(seconds: float) -> float:
    with torch.no_grad():
        return compute(seconds)


def measure(seconds: float) -> float:
    with torch.no_grad():
        return compute(seconds)


def evaluate_by_judge(seconds: float) -> None:
    hand_over(seconds)


def hand_over(seconds: float) -> None:
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({seconds})"], check=True)


def pause(kind: str, seconds: float, out: Path, step: int, weights: torch.Tensor) -> None:
    alone = dist.get_rank() == 0
    if kind == "evaluate_all":
        evaluate(seconds)
    elif kind == "save" and alone:
        save_checkpoint(out, step, weights, seconds)
    elif kind == "measure" and alone:
        measure(seconds)
    elif kind == "judge" and alone:
        evaluate_by_judge(seconds)
    elif kind == "hand_over" and alone:
        hand_over(seconds)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--pause", action="append", default=[])
    args = parser.parse_args()
    pauses: dict[int, list[tuple[str, float]]] = {}
    for text in args.pause:
        kind, _, rest = text.partition(":")
        seconds, _, at = rest.partition("@")
        if kind == "start":
            compute(float(seconds))
        else:
            pauses.setdefault(int(at), []).append((kind, float(seconds)))
    dist.init_process_group("gloo")
    weights = torch.zeros(256)
    for step in range(1, args.steps + 1):
        rigging.strike(step)
        time.sleep(args.step_s)
        gradient = weights - torch.randn(256, generator=torch.Generator().manual_seed(step))
        dist.all_reduce(gradient)
        weights = weights - 0.1 * gradient
        if dist.get_rank() == 0:
            print(f"step {step}/{args.steps} loss {gradient.square().mean().item():.5f}", flush=True)
        for kind, seconds in pauses.get(step, ()):
            pause(kind, seconds, args.out, step, weights)
    if dist.get_rank() == 0:
        rigging.write_weights([weights], args.out / "final.bin")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
