"""A trainer of one rank with the habits of a small script: `step_000010.pt`, the newest found by its name."""

from __future__ import annotations

import argparse
import io
import os
import time
from pathlib import Path

import rigging
import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--prefix", default="")
    options = parser.parse_args()
    rigging.sign_in()
    options.out.mkdir(parents=True, exist_ok=True)
    told = os.environ.get("UNBROKEN_RESUME_FROM", "")
    attempt = os.environ.get("UNBROKEN_ATTEMPT", "1")
    step, weights = 0, torch.zeros(1000)
    saves = sorted(options.out.glob(f"{options.prefix}step_*.pt"))
    if attempt == "1":
        print(f"first start resumes from {os.path.basename(told) or 'nothing'}", flush=True)
    elif saves:
        print(f"resumes from {saves[-1].name}; told {os.path.basename(told)}", flush=True)
        assert told == str(saves[-1])
    if saves and attempt != "1":
        state = torch.load(saves[-1])
        step, weights = state["step"], state["w"]
    while step < options.steps:
        step += 1
        weights += step
        time.sleep(options.step_s)
        print(f"step {step} loss {1 / step:.4f}", flush=True)
        if step % 10 == 0:
            path = options.out / f"{options.prefix}step_{step:06d}.pt"
            buffer = io.BytesIO()
            torch.save({"step": step, "w": weights}, buffer)
            rigging.tearing(step, path, buffer.getvalue())
            torch.save({"step": step, "w": weights}, path)


if __name__ == "__main__":
    main()
