"""Whether a fork of the keeper would be the same process as a fresh Python: what libraries read when they are loaded.

A worker whose variables or limits differ from the keeper's is started cold: setting OMP_NUM_THREADS after torch was
imported has no effect, for example, and speed and bits would differ.
"""

from __future__ import annotations

import os
import resource
from typing import Any, Mapping  # noqa: UP035 (Python 3.9)

READ_AT_LOAD = tuple(
    "OMP_ MKL_ KMP_ GOMP_ OPENBLAS_ NUMEXPR_ MALLOC_ GLIBC_TUNABLES LD_ PYTHON TORCH PYTORCH_ LANG LC_".split()
)
READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_ELASTIC_", "TORCH_FR_", "PYTHON_EXEC", "PYTHONUNBUFFERED")


def read_at_load(environ: Mapping[str, str], shim: str) -> dict[str, str]:
    """The variables that matter, with our folder taken out of PYTHONPATH."""
    chosen = {
        name: value
        for name, value in environ.items()
        if name.startswith(READ_AT_LOAD) and not name.startswith(READ_LATER)
    }
    path = os.pathsep.join(entry for entry in chosen.pop("PYTHONPATH", "").split(os.pathsep) if entry != shim)
    if path:
        chosen["PYTHONPATH"] = path
    return chosen


def limits() -> dict[str, Any]:
    """Affinity, niceness and resource limits of this process, as JSON has them."""
    return {
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "rlimits": [list(resource.getrlimit(number)) for number in range(16)],
    }


def difference(keeper: Mapping[str, str], worker: Mapping[str, str], mine: Any, theirs: Any) -> str:
    """Why the worker cannot be forked, in words; empty when it can."""
    names = sorted(name for name in {*keeper, *worker} if keeper.get(name) != worker.get(name))
    if names:
        shown = ", ".join(f"{name} ({worker.get(name, 'unset')}, not {keeper.get(name, 'unset')})" for name in names)
        return f"variables that are read when libraries are loaded differ: {shown[:400]}"
    for name, value in mine.items():
        if theirs.get(name) != value:
            return f"{name} differs from the keeper's"
    return ""
