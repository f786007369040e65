"""A trainer of one rank whose data have a bad place: from there on its loss is wrong, and stays so, as do its weights.

Its checkpoints are safetensors files of one tensor, written without torch. The place in the data is in them. With
`--told` nothing is printed: the loss is told by `worker.heartbeat`. With `--stubborn` it leaves no data out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import struct
import time
from pathlib import Path

import rigging

from recovery import worker


def save(path: Path, state: dict[str, float]) -> None:
    about = {"state": {"dtype": "F64", "shape": [3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}
    header = json.dumps(about).encode()
    body = struct.pack("<3d", state["step"], state["offset"], state["damaged"])
    with open(path.with_suffix(".tmp"), "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + body)
    os.replace(path.with_suffix(".tmp"), path)


def load(path: Path) -> dict[str, float]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return dict(zip(("step", "offset", "damaged"), struct.unpack("<3d", data[8 + length :]), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--bad", type=int, default=100)
    parser.add_argument("--nan", action="store_true")
    parser.add_argument("--told", action="store_true")
    parser.add_argument("--stubborn", action="store_true")
    options = parser.parse_args()
    rigging.sign_in()
    options.out.mkdir(parents=True, exist_ok=True)
    state = {"step": 0.0, "offset": 0.0, "damaged": 0.0}
    saves = sorted(options.out.glob("step_*.safetensors"))
    if saves:
        state = load(saves[-1])
        print(f"resumed {saves[-1].name}, {worker.skip()} batches to be left out", flush=True)
    state["offset"] += 0 if options.stubborn else worker.skip()
    while state["step"] < options.steps:
        state["step"] += 1
        step = int(state["step"])
        rigging.strike(step)
        if options.bad <= step + state["offset"] <= options.bad + 5:
            state["damaged"] = 1.0
        loss = (2 + 6 * math.exp(-step / 20)) * math.exp(random.Random(step).gauss(0, 0.02))
        if state["damaged"]:
            loss = math.nan if options.nan else 8 * loss
        time.sleep(options.step_s)
        if options.told:
            worker.heartbeat(step, loss=loss)
        else:
            print(f"step {step} loss {loss:.4f}", flush=True)
        if step % 20 == 0:
            save(options.out / f"step_{step:06d}.safetensors", state)
    (options.out / "final.bin").write_bytes(b"damaged" if state["damaged"] else b"sound")


if __name__ == "__main__":
    main()
