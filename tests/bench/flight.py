"""Our flight recorder analyser beside torchrun's own (`torch.distributed.flight_recorder`), on the same dumps.

The jobs are made up (`flight_jobs`), so whose fault it is is known: an answer is right when it names exactly those
ranks.
"""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from diagnosis.flight import RankDump, analyse, read_dump, timings
from diagnosis.incident import FlightReport
from tests.bench.flight_jobs import FAULTS, Fault, Job, Shape, break_it, build, dump, dumps, run

TORCH_DEADLINE_S: Final = 1800.0
ROOT: Final = Path(__file__).parents[2]
"""Of the repository, where `tests` is found."""
_THEIRS: Final = """
import json, sys, time
from torch.distributed.flight_recorder import fr_trace
for folder in sys.argv[1:]:
    print("== " + folder, file=sys.stderr, flush=True)
    began, used = time.perf_counter(), time.process_time()
    try:
        fr_trace.main([folder, "-p", "rank_", "--allow-incomplete-ranks"])
    except BaseException as error:
        print("gave up: " + repr(error), file=sys.stderr)
    peak = [int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
    took = [time.perf_counter() - began, time.process_time() - used, peak]
    print("took " + json.dumps(took), file=sys.stderr, flush=True)
"""
_OURS: Final = "import sys; from tests.bench import flight; print(flight.measured(sys.argv[1]))"
_NAMED: Final = re.compile(r"missing ranks: \{([\d, ]*)\}|Culprit rank (\d+)|FR dumps from ranks \(\{([\d, ]*)\}\)")


class Size(NamedTuple):
    """How much is measured."""

    cases: int
    """Of each kind of fault."""
    ranks: int
    """Of the largest job."""
    theirs_up_to: int
    """Ranks of the largest job that torchrun's analyser is given: it needs 4 MB a rank."""
    seed: int


def report(folder: Path, size: Size, python: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Right answers by kind of fault, then time and memory by the size of the job. `python`: one with torch, or ""."""
    rows = _answers(folder, size.cases, size.seed, python, say)
    sizes = [ranks for ranks in (64, 256, 1024, 4096, 16_384) if ranks <= size.ranks]
    return {
        "seed": size.seed,
        "answers": rows,
        "right": sum(row["ours"] for row in rows),
        "cases": sum(row["cases"] for row in rows),
        "with_gaps": _with_gaps(size.cases, size.seed),
        "sizes": [_size(folder, ranks, python if ranks <= size.theirs_up_to else "", say) for ranks in sizes],
    }


def case(fault: Fault, seed: int) -> Job:
    """One small job with this fault, run until it hangs."""
    dice = random.Random(f"{fault} {seed}")
    shape = Shape(
        tensor=dice.choice((1, 2, 4)),
        pipeline=dice.choice((1, 2, 4)),
        data=dice.choice((2, 3, 4)),
        ahead=dice.choice((1, 1, 4, 30)),
        expert=dice.random() < 0.4,
        uneven=dice.random() < 0.3,
    )
    if fault == "late":  # who comes late is told by when calls are made, as long as the CPU is not ahead
        shape = shape._replace(ahead=1, steps=24)
    job = break_it(build(shape), fault, dice)
    run(job)
    return job


def _answers(folder: Path, cases: int, seed: int, python: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    jobs: dict[str, Job] = {}
    right: Counter[str] = Counter()
    for fault in FAULTS:
        for number in range(cases):
            job = case(fault, seed + number)
            place = folder / f"{fault.replace(' ', '-')}.{number}"
            place.mkdir()
            written = dumps(job)
            for rank, data in written.items():
                (place / f"rank_{rank}").write_bytes(data)
            jobs[str(place)] = job
            found = judged([read_dump(data, rank) for rank, data in written.items()])
            right[job.fault] += (found.culprit_ranks if found else ()) == job.culprits
    theirs = _torchrun(python, list(jobs), say) if python else {}
    first, all_named = Counter[str](), Counter[str]()
    for name, job in jobs.items():
        named = theirs.get(name, {}).get("named", [])
        first[job.fault] += (named[0] if named else ()) == job.culprits
        all_named[job.fault] += tuple(sorted({rank for ranks in named for rank in ranks})) == job.culprits
    total = Counter(job.fault for job in jobs.values())
    return [
        {
            "fault": fault,
            "cases": total[fault],
            "ours": right[fault],
            "torchrun_first": first[fault] if theirs else None,
            "torchrun_all": all_named[fault] if theirs else None,
        }
        for fault in FAULTS
        if total[fault]
    ]


def _with_gaps(cases: int, seed: int) -> list[dict[str, Any]]:
    """The same jobs, every tenth dump left out by chance: how often it is right, by how sure it says it is."""
    bins: dict[str, list[bool]] = {}
    for fault in FAULTS:
        for number in range(cases):
            job, dice = case(fault, seed + number), random.Random(seed + number)
            kept = [read_dump(data, rank) for rank, data in dumps(job).items() if dice.random() > 0.1]
            found = judged(kept)
            told = f"{found.confidence:.1f}" if found else "nothing is wrong"
            bins.setdefault(told, []).append((found.culprit_ranks if found else ()) == job.culprits)
    return [{"confidence": told, "cases": len(rows), "right": sum(rows)} for told, rows in sorted(bins.items())]


def _torchrun(python: str, folders: list[str], say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Folder -> ranks that torchrun's analyser names (each time that it names some), seconds, MiB."""
    found: dict[str, dict[str, Any]] = {}
    try:
        done = subprocess.run(
            [python, "-c", _THEIRS, *folders], capture_output=True, text=True, timeout=TORCH_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        say(f"torchrun's analyser took more than {TORCH_DEADLINE_S:.0f} s")
        return found
    if done.returncode:
        say(f"torchrun's analyser: {done.stderr.strip()[-300:]}")
    for part in done.stderr.split("== ")[1:]:
        place, _, told = part.partition("\n")
        named = [_ranks(match) for match in _NAMED.finditer(told)]
        took = re.search(r"^took (\[.*\])$", told, re.MULTILINE)
        seconds, cpu, peak = json.loads(took[1]) if took else (None, None, None)
        found[place] = {"named": named, "seconds": seconds, "cpu_seconds": cpu, "peak_mib": peak}
    return found


def _ranks(match: re.Match[str]) -> tuple[int, ...]:
    listed = next((part for part in match.groups() if part), "")
    return tuple(sorted(int(one) for one in re.findall(r"\d+", listed)))


def _size(folder: Path, ranks: int, python: str, say: Callable[[str], None]) -> dict[str, Any]:
    """A stuck rank in a job of so many ranks, 2,000 calls each: tensor parallel 8, pipeline parallel 2.

    torchrun's analyser gives up at once where more than two ranks of a group send and receive.
    """
    dice = random.Random(ranks)
    job = break_it(build(Shape(8, 2, ranks // 16)), "stuck", dice)
    run(job)
    place = folder / f"ranks-{ranks}"
    place.mkdir()
    size = 0
    for rank in job.programs:
        size += (place / f"rank_{rank}").write_bytes(pickle.dumps(dump(job, rank, past=60), protocol=2))
    say(f"{ranks} ranks, {size / 1e6:.0f} MB of dumps")
    done = subprocess.run(
        [sys.executable, "-c", _OURS, str(place)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ours = json.loads(done.stdout)
    theirs = _torchrun(python, [str(place)], say).get(str(place), {}) if python else {}
    shutil.rmtree(place)
    return {
        "ranks": ranks,
        "mb": round(size / 1e6),
        "right": ours["culprits"] == list(job.culprits),
        "seconds": ours["seconds"],
        "cpu_seconds": ours["cpu_seconds"],
        "peak_mib": ours["peak_mib"],
        "torchrun_seconds": theirs.get("seconds"),
        "torchrun_cpu_seconds": theirs.get("cpu_seconds"),
        "torchrun_peak_mib": theirs.get("peak_mib"),
    }


def judged(dumps: list[RankDump]) -> FlightReport | None:
    """As `unbroken diagnose` does it."""
    return analyse(dumps, slow=timings.slowdowns(timings.of_dumps(dumps)))


def measured(folder: str) -> str:
    """Reads and judges the dumps of a folder; what it took, as JSON. Runs in a process of its own."""
    began, used = time.perf_counter(), time.process_time()
    found = judged([read_dump(path.read_bytes(), int(path.name[5:])) for path in Path(folder).iterdir()])
    return json.dumps(
        {
            "culprits": list(found.culprit_ranks) if found else [],
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - used,
            "peak_mib": _peak_mib(),
        }
    )


def _peak_mib() -> float:
    """Of this process since it began; `ru_maxrss` would count what its parent had."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def show(found: dict[str, Any]) -> None:
    """The same as tables, for people."""
    console = Console(width=110)
    table = Table(title=f"exactly the guilty ranks named, of all cases; seed {found['seed']}")
    for heading in ("fault", "cases", "unbroken", "torchrun, all it names", "torchrun, first it names"):
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    for row in found["answers"]:
        told = (row["cases"], row["ours"], row["torchrun_all"], row["torchrun_first"])
        table.add_row(row["fault"], *("" if one is None else str(one) for one in told))
    console.print(table)
    gaps = Table(title="every tenth dump left out")
    for heading in ("confidence", "cases", "right"):
        gaps.add_column(heading, justify="right")
    for row in found["with_gaps"]:
        gaps.add_row(row["confidence"], str(row["cases"]), str(row["right"]))
    console.print(gaps)
    sizes = Table(title="one rank is stuck; 2,000 calls of each rank; read and judged on one core")
    for heading in ("ranks", "MB", "right", "s", "CPU s", "MiB", "torchrun s", "its CPU s", "its MiB"):
        sizes.add_column(heading, justify="right")
    measured_both = ("seconds", "cpu_seconds", "peak_mib")
    for row in found["sizes"]:
        numbers = [row[name] for name in (*measured_both, *(f"torchrun_{name}" for name in measured_both))]
        cells = ["" if one is None else f"{one:.0f}" if one >= 100 else f"{one:.1f}" for one in numbers]
        sizes.add_row(str(row["ranks"]), str(row["mb"]), "yes" if row["right"] else "NO", *cells)
    console.print(sizes)
