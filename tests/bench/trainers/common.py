"""What the scripts for `unbroken bench recovery --script` have in common: they tell their start and each step."""

from __future__ import annotations

import argparse
import os
from array import array
from pathlib import Path
from typing import Any

os.write(1, f"rank {os.environ['RANK']} up, pid {os.getpid()}\n".encode())  # before the imports


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    found = parser.parse_args()
    found.out.mkdir(parents=True, exist_ok=True)
    return found


def say_step(step: int, steps: int) -> None:
    if os.environ["RANK"] == "0":
        os.write(1, f"step {step}/{steps}\n".encode())


def write_weights(parameters: Any, out: Path) -> None:
    values = array("f")
    for parameter in parameters:
        values.extend(parameter.detach().flatten().tolist())
    (out / "weights.bin").write_bytes(values.tobytes())
