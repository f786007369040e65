"""Looks at the GPUs with the real probe, when it is told to: a child, since pynvml keeps the library it has loaded.

A line of its input is {"mono": seconds, "site": {...}, "preflight": bool, "ranks": {pid: rank}, "root": folder}; it
answers with the results. With the argument `listen` it also writes the signals that it hears, as they come.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from pathlib import Path

import msgspec

from diagnosis.signals import Signal
from supervisor.node_health.contract import JobInfo, Moment, ProbeContext, Site
from supervisor.node_health.gpu.probe import NvmlProbe

WRITING = threading.Lock()


class Tree(ProbeContext):
    """A place whose files come from a tree though the driver is asked."""

    live = True  # type: ignore[assignment]


def write(word: dict[str, object]) -> None:
    with WRITING:
        sys.stdout.write(json.dumps(word) + "\n")
        sys.stdout.flush()


def tell(signal: Signal) -> None:
    write({"signal": msgspec.to_builtins(signal)})


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def report_doing(probe: NvmlProbe) -> None:
    """What the probe is in the middle of, whenever that has not changed for a while."""
    while True:
        doing = probe.doing
        time.sleep(0.1)
        if doing and probe.doing == doing:
            write({"doing": doing})


def main() -> None:
    probe = NvmlProbe()
    threading.Thread(target=report_doing, args=(probe,), daemon=True).start()
    place = Tree(node="n1")
    if "listen" in sys.argv:
        threading.Thread(target=probe.listen, args=(place, tell), daemon=True).start()
    for line in sys.stdin:
        asked = json.loads(line)
        place.site = msgspec.convert(asked.get("site", {}), Site)
        place.preflight = asked.get("preflight", False)
        place.state_dir = Path(asked["state_dir"]) if "state_dir" in asked else None
        place.job = JobInfo(ranks={int(pid): rank for pid, rank in asked.get("ranks", {}).items()})
        place.root = Path(asked.get("root", "/"))
        before = cpu_s()
        results = probe.look(place, Moment(wall=time.time(), mono=asked["mono"]))
        write({"readings": msgspec.to_builtins(results), "cpu_s": cpu_s() - before, "every_s": probe.every_s})


main()
