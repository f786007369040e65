"""How fast logs are read, with all rules on: both our engines beside ripgrep, Python's `re` and Drain3, in one run.

All are given the same bytes and run on one core, in turns. What they do is not the same: ours end with a story (rules,
tracebacks, kernel events, steps, curves), ripgrep and `re` only find lines that match one of the same patterns, as far
as they know them; Drain3 counts templates. `scan alone` is our engine without the reading of what it found.
"""

from __future__ import annotations

import io
import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from diagnosis import rules
from diagnosis.logs import scan
from diagnosis.logs.reader import LogReader
from diagnosis.logs.scan import simplified
from supervisor.diagnose import log_files as diagnose_files

SAMPLE_BYTES: Final = 64 << 20
SLOW_BYTES: Final = 8 << 20
SLOWEST_BYTES: Final = 1 << 19
"""What the slow ones are given; the rate is what is compared."""
REPEATS: Final = 3
GOAL_MB_S: Final = 300.0


class Reader(NamedTuple):
    """One that reads."""

    name: str
    run: Callable[[Path, int], None]
    """With the file and how many bytes of it to read."""
    limit: int
    missing: str = ""
    """Why it is not measured."""


def report(paths: tuple[str, ...], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all readers on these logs, or on some of our own making."""
    compiled = scan.at_once(scan.patterns())
    logs = []
    with tempfile.TemporaryDirectory(prefix="unbroken-bench-") as folder:
        files = [Path(path) for path in paths] or list(make(Path(folder)))
        for file in files:
            say(f"{file.name}: {file.stat().st_size / 1e6:.0f} MB")
            logs.append({"log": file.name, "bytes": file.stat().st_size, "readers": _measure(file, _readers(compiled))})
    return {"logs": logs, "patterns": len(scan.patterns()), "goal_mb_s": GOAL_MB_S, "load": os.getloadavg()[0]}


def _measure(file: Path, readers: list[Reader]) -> list[dict[str, Any]]:
    took: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        for one in readers:
            if one.missing:
                continue
            size = min(file.stat().st_size, one.limit)
            before = _cpu_s()
            one.run(file, size)
            took.setdefault(one.name, []).append(size / (_cpu_s() - before) / 1e6)
    ours = statistics.median(took[readers[0].name])
    return [
        {
            "reader": one.name,
            "mb_s": round(statistics.median(took[one.name]), 1) if not one.missing else None,
            "all": [round(value, 1) for value in took.get(one.name, [])],
            "ratio": round(ours / statistics.median(took[one.name]), 2) if not one.missing else None,
            "missing": one.missing,
        }
        for one in readers
    ]


def _cpu_s() -> float:
    """Of this process and of what it started and waited for: others on the machine do not count."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


# ----- the readers -----


def _readers(compiled: scan.Scan | None) -> list[Reader]:
    expressions = [rule.regex for rule in rules.default().rules if "output" in rule.sources]
    others = [
        Reader("unbroken, shapes", lambda file, size: _story(file, size, scan.Shapes()), SLOW_BYTES),
        _ripgrep(expressions),
        Reader("Python re", lambda file, size: _re(file, size, expressions), SLOWEST_BYTES),
        _drain3(),
    ]
    if compiled is None:
        return others
    return [
        Reader("unbroken, one scan", lambda file, size: _story(file, size, scan.AtOnce(compiled)), 1 << 40),
        Reader("  the scan alone", lambda file, size: _scan_only(file, size, compiled), 1 << 40),
        *others,
    ]


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        yield from diagnose_files.blocks(stream if size >= file.stat().st_size else io.BytesIO(stream.read(size)))


def _story(file: Path, size: int, engine: scan.Engine) -> None:
    log = LogReader(file.name, engine=engine)
    for block in _blocks(file, size):
        log.feed(block)
    log.end()
    log.summary()


def _scan_only(file: Path, size: int, compiled: scan.Scan) -> None:
    engine = scan.AtOnce(compiled)
    for block in _blocks(file, size):
        engine.lines(block)


def _re(file: Path, size: int, expressions: list[str]) -> None:
    pattern = re.compile("|".join(re.sub(r"\(\?P<\w+>", "(?:", one) for one in expressions).encode(), re.IGNORECASE)
    for block in _blocks(file, size):
        for line in block.split(b"\n"):
            pattern.search(line)


def _ripgrep(expressions: list[str]) -> Reader:
    program = shutil.which("rg")
    if program is None:
        missing = "not installed (package `ripgrep` of most distributions, or `cargo install ripgrep`)"
        return Reader("ripgrep", lambda file, size: None, 0, missing)  # noqa: ARG005
    # Lookarounds are unknown to it, and some escapes: it gets what our scan gets.
    given = "\n".join(re.sub(r"\\(['\"])", r"\1", simplified(one)) for one in expressions)

    def run(file: Path, size: int) -> None:
        del size
        command = [
            program,
            "--count",
            "--text",
            "--ignore-case",
            "--no-unicode",
            "--threads=1",
            "--no-mmap",
            "-f",
            "-",
            str(file),
        ]
        done = subprocess.run(command, input=given.encode(), capture_output=True, check=False, timeout=600)
        if done.returncode > 1:
            raise RuntimeError(done.stderr.decode(errors="replace")[:300])

    return Reader("ripgrep", run, 1 << 40)


def _drain3() -> Reader:
    try:
        from drain3 import TemplateMiner
        from drain3.template_miner_config import TemplateMinerConfig
    except ImportError:
        return Reader("Drain3", lambda file, size: None, 0, "not installed (pip install drain3)")  # noqa: ARG005

    def run(file: Path, size: int) -> None:
        config = TemplateMinerConfig()
        config.profiling_enabled = False
        miner = TemplateMiner(config=config)
        for block in _blocks(file, size):
            for line in block.decode(errors="replace").split("\n"):
                miner.add_log_message(line)

    return Reader("Drain3", run, SLOWEST_BYTES)


# ----- logs of our own making -----


def make(folder: Path, size: int = SAMPLE_BYTES) -> Iterator[Path]:
    """Logs like those of healthy runs, `size` bytes each."""
    for name, line in (("megatron", _megatron), ("nccl-info", _nccl), ("kernel", _kernel), ("every-line-new", _new)):
        path = folder / f"{name}.log"
        chance = random.Random(name)
        with path.open("w") as file:
            written = number = 0
            while written < size:
                text = "".join(f"{line(chance, number + n)}\n" for n in range(1000))
                number += 1000
                written += file.write(text)
        yield path


def _megatron(chance: random.Random, number: int) -> str:
    if number % 100 == 99:
        return f"saving checkpoint at iteration {number:7d} to /ckpt in torch_dist format"
    return (
        f" [2026-11-2{chance.randint(0, 9)} 1{chance.randint(0, 9)}:{chance.randint(10, 59)}:{chance.randint(10, 59)}] "
        f"iteration {number:8d}/  500000 | consumed samples: {number * 1024:12d} | elapsed time per iteration (ms): "
        f"{chance.uniform(3000, 3300):.1f} | throughput per GPU (TFLOP/s/GPU): {chance.uniform(300, 420):.1f} | "
        f"learning rate: {chance.uniform(1e-5, 3e-4):.6E} | global batch size:  1024 | lm loss: "
        f"{chance.uniform(2, 3):.6E} | loss scale: 1.0 | grad norm: {chance.uniform(0.1, 0.3):.3f} | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def _nccl(chance: random.Random, number: int) -> str:
    host = f"node{chance.randint(1, 128)}:{chance.randint(1000, 99_999)}:{chance.randint(1000, 99_999)}"
    channel = f"Channel {number % 32:02d}/0 : {chance.randint(0, 1023)}[{number % 8}] -> {chance.randint(0, 1023)}[0]"
    said = (
        f"{channel} [send] via NET/IB/{number % 8}/GDRDMA",
        f"comm 0x{chance.getrandbits(44):x} rank {chance.randint(0, 1023)} nRanks 1024 nNodes 128 localRanks 8",
        "NCCL_IB_TIMEOUT set by environment to 22.",
        f"AllReduce: opCount {number:x} sendbuff 0x{chance.getrandbits(44):x} count {chance.randint(1, 1 << 28)}",
    )
    return f"{host} [{number % 8}] NCCL INFO {said[number % len(said)]}"


def _kernel(chance: random.Random, number: int) -> str:
    device = f"0000:{chance.randint(16, 255):02x}:00.0"
    said = (
        f"pci {device}: BAR 6: assigned [mem 0x{chance.getrandbits(32):x}-0x{chance.getrandbits(32):x} pref]",
        f"mlx5_core {device} eth{number % 8}: Link up",
        f"audit: type=1400 audit({number}.{chance.randint(0, 999)}:{number}): apparmor=ALLOWED operation=open",
        f"IPv6: ADDRCONF(NETDEV_CHANGE): veth{chance.getrandbits(24):x}: link becomes ready",
        f"nvme nvme{number % 8}: 64/0/0 default/read/poll queues",
        f"docker0: port {number % 64}(veth{chance.getrandbits(24):x}) entered forwarding state",
    )
    return f"Nov 21 20:20:{number % 60:02d} node7 kernel: [{number / 7:12.6f}] {said[number % len(said)]}"


_TEXT: Final = (__doc__ or "").replace("`", "").split()


def _new(chance: random.Random, number: int) -> str:
    del number
    return f"{chance.getrandbits(60):x} INFO worker: {' '.join(chance.choices(_TEXT, k=14))}"


# ----- for people -----


def show(found: dict[str, Any]) -> None:
    """Tables, one for each log."""
    console = Console(width=100)
    for log in found["logs"]:
        table = Table(title=f"{log['log']} ({log['bytes'] / 1e6:.0f} MB), {found['patterns']} patterns")
        for heading in ("reader", "MB/s of one core", "ours is faster by"):
            table.add_column(heading, justify="left" if heading == "reader" else "right")
        for row in log["readers"]:
            if row["mb_s"] is None:
                table.add_row(row["reader"], "-", row["missing"])
            else:
                table.add_row(row["reader"], f"{row['mb_s']:.1f}", f"{row['ratio']:.2f}")
        console.print(table)


def met(found: dict[str, Any]) -> bool:
    """Whether the goal is met on all logs."""
    return all(log["readers"][0]["mb_s"] >= found["goal_mb_s"] for log in found["logs"])
