"""A look of our own: real probe workers, probes of the test's own as plug-ins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.node_health.contract import ProbeContext
from supervisor.node_health.runner import WorkerAnswer

PlugIn = Callable[[str], dict[str, str]]
Check = Callable[..., Any]


FLICKERING = """
class FlickerProbe:
    name, every_s, deadline_s = "flicker", 60.0, 5.0
    checks = (check("flicker_once", looks=3), check("flicker_stays", looks=3), check("flicker_kept", clears=False))
    def look(self, place, now):
        time.sleep(float(os.environ.get("FLICKER_S", "0")))
        looks = (place.load("flicker") or 0) + 1
        place.keep("flicker", looks)
        bad = lambda id, when: unhealthy(id, "seen") if when else healthy(id)
        return [
            bad("flicker_once", looks == 1), bad("flicker_stays", looks < 4), bad("flicker_kept", looks == 1)
        ]
"""


STUCK = """
class StuckProbe:
    name, every_s, deadline_s = "stuck", 60.0, float(os.environ.get("STUCK_DEADLINE_S", "30"))
    checks = (check("stuck"), check("stuck_too"))
    doing = ""
    def look(self, place, now):
        self.doing = "statvfs /mnt"
        time.sleep(3600)
"""


STUCK_FOR_GOOD = """
import ctypes
class GilProbe:
    name, every_s, deadline_s = "gil", 60.0, 30.0
    checks = (check("gil"),)
    def look(self, place, now):
        ctypes.PyDLL(None).pause()
"""


def test_what_is_wrong_comes_first(check: Check, plug_in: PlugIn, broken: str) -> None:
    env = plug_in(broken)
    done = check("--only", "broken", env=env)
    lines = done.out.splitlines()
    assert done.code == 2
    assert lines[0] == "CRITICAL: 2 of 3 checks: broken_disk sda: 2 % left; broken_fan: slow"
    assert lines[1] == "CRITICAL  broken_disk sda: 2 % left  [storage_error]"
    assert lines[2] == "WARNING   broken_fan: slow  [storage_error]"
    assert lines[3] == "UNKNOWN   broken_none: only root can read it"
    assert lines[4].startswith("3 checks of ")
    assert ", 4 results (" in lines[4]
    assert lines[4].endswith(": 1 critical, 1 warning, 1 healthy, 1 unknown")
    assert len(lines) == 5
    assert "healthy   broken_disk sdb" in check("--only", "broken", "-v", env=env).out.splitlines()


def test_json_has_every_field(check: Check, plug_in: PlugIn, broken: str) -> None:
    done = check("--only", "broken_d*", "--json", "--node-name", "n7", env=plug_in(broken))
    answer = done.answer
    assert {key: answer[key] for key in ("node", "from", "status", "exit_code", "problems")} == {
        "node": "n7",
        "from": "standalone",
        "status": "critical",
        "exit_code": 2,
        "problems": [],
    }
    assert answer["boot_id"] == ProbeContext().boot_id
    entry = done.entry("broken_disk", "sda")
    assert entry.pop("since").endswith("Z")
    assert entry == {
        "check": "broken_disk",
        "probe": "broken",
        "status": "unhealthy",
        "level": "critical",
        "failure_class": "storage_error",
        "scope": "node",
        "device": "sda",
        "gpu": "",
        "gpu_uuid": "",
        "rank": None,
        "text": "2 % left",
        "values": {"left_percent": 2.0},
        "threshold": "t",
        "source": "s",
    }
    assert done.entry("broken_disk", "sdb")["level"] is None


def test_exit_codes_are_those_of_nagios(check: Check, plug_in: PlugIn, broken: str) -> None:
    env = plug_in(broken)
    codes = {name: check("--only", name, env=env).code for name in ("broken_fan", "broken_none", "memory_available")}
    assert codes == {"broken_fan": 1, "broken_none": 3, "memory_available": 0}


RAISING = """
class RaisingProbe:
    name, every_s, deadline_s = "raising", 60.0, 5.0
    checks = (check("raising"), check("raising_too"))
    def look(self, place, now):
        raise ValueError("of ours")
"""


EXITING = """
class ExitingProbe:
    name, every_s, deadline_s = "exiting", 60.0, 60.0
    checks = (check("exiting"),)
    def look(self, place, now):
        raise SystemExit(2)
class NotMadeProbe:
    def __init__(self):
        raise SystemExit(2)
"""


def test_a_probe_that_ends_the_program_is_told_and_ends_nothing(check: Check, plug_in: PlugIn) -> None:
    done = check("--only", "exiting", "--json", env=plug_in(EXITING))
    assert (done.code, done.answer["status"]) == (3, "unknown")
    assert sum("SystemExit" in problem for problem in done.answer["problems"]) == 2


def test_a_probe_that_raises_leaves_the_node_unknown(check: Check, plug_in: PlugIn, broken: str) -> None:
    env = plug_in(RAISING + broken)
    why = check("--only", "raising", "--json", env=env).answer["problems"][0]
    assert re.search(r"raising: ValueError: of ours \(.*\.py:\d+\)$", why)
    done = check("--only", "raising", "--only", "memory_available", env=env)
    first = f"UNKNOWN: not everything could be checked: {why}"
    assert (done.code, done.out.splitlines()[0]) == (3, first)
    answer = check("--only", "raising", "--only", "memory_available", "--json", env=env).answer
    assert (answer["status"], answer["problems"]) == ("unknown", [why])
    worse = check("--only", "raising", "--only", "broken_fan", env=env)
    assert (worse.code, worse.out.splitlines()[0]) == (
        1,
        f"WARNING: 1 of 3 checks: broken_fan: slow; not everything could be checked: {why}",
    )
    allowed = check("--only", "broken_none", "--only", "memory_available", env=env)
    assert allowed.code == 0, "what only root may read is no fault of ours"


def test_a_probe_that_cannot_be_loaded_leaves_the_node_unknown(check: Check, plug_in: PlugIn) -> None:
    env = plug_in("raise ImportError('half written')\nclass HalfProbe: pass")
    done = check("--only", "memory_available", "--json", env=env)
    assert (done.code, done.answer["status"], done.entry("memory_available")["status"]) == (3, "unknown", "healthy")
    (problem,) = done.answer["problems"]
    assert problem.startswith("probe ")
    assert "half written" in problem
    assert check("--only", "check_of_half", env=env).code == 3, "which checks it has is not known"
    drained = check("--slurm", "prolog", "--only", "memory_available", env=env)
    assert (drained.code, drained.out, "half written" in drained.err) == (0, "", True)


def test_preflight_checks_are_made_when_asked_for(check: Check, plug_in: PlugIn, broken: str) -> None:
    env = plug_in(broken)
    assert check("--only", "broken_before", "--json", env=env).entry("broken_before")["status"] == "unhealthy"
    with_all = check("--only", "broken", "--preflight", "--skip", "*_fan", "--json", env=env).answer["checks"]
    assert {one["check"] for one in with_all} == {"broken_disk", "broken_before", "broken_none"}


def test_what_takes_several_looks_is_looked_at_again(check: Check, plug_in: PlugIn) -> None:
    env = plug_in(FLICKERING)
    first = check("--only", "flicker", "--timeout", "60", "--json", env=env)
    assert first.entry("flicker_once")["status"] == "healthy"
    assert first.entry("flicker_stays")["status"] == "unhealthy"
    assert first.entry("flicker_kept")["status"] == "unhealthy"
    later = check("--only", "flicker", "--timeout", "60", "--json", env=env)
    assert later.entry("flicker_once")["status"] == "healthy"
    assert later.entry("flicker_stays")["status"] == "healthy"
    kept = later.entry("flicker_kept")
    assert kept["status"] == "unhealthy"
    assert kept["text"] == "seen (not seen at the last look; it stands until the node is booted anew)"


def test_without_time_for_another_look_it_is_not_known(check: Check, plug_in: PlugIn) -> None:
    env = {**plug_in(FLICKERING), "FLICKER_S": "4"}
    done = check("--only", "flicker", "--timeout", "16", "--json", env=env)
    entry = done.entry("flicker_stays")
    assert (entry["status"], entry["text"]) == ("unknown", "seen in 1 of the 3 looks that it takes: seen")


def test_a_look_that_does_not_return_is_unknown_and_delays_nothing_else(
    check: Check, plug_in: PlugIn, broken: str
) -> None:
    done = check("--only", "stuck*", "--only", "broken", "--timeout", "8", "--json", env=plug_in(STUCK + broken))
    assert done.took_s < 28, "not even its own deadline is waited for"
    assert done.entry("stuck_too")["status"] == "unknown"
    text = done.entry("stuck_too")["text"]
    assert text.startswith("no answer from stuck within ")
    assert text.endswith(" s (in statvfs /mnt)")
    assert done.entry("broken_disk", "sda")["status"] == "unhealthy"


BRISK = """
class BriskProbe:
    name, every_s, deadline_s, once_s = "brisk", 60.0, 500.0, 0.5
    checks = (check("brisk"),)
    def look(self, place, now):
        time.sleep(3600)
"""


def test_a_probe_that_hangs_does_not_take_the_whole_time(check: Check, plug_in: PlugIn) -> None:
    done = check("--only", "brisk", "--timeout", "400", "--json", env=plug_in(BRISK))
    assert done.took_s < 100
    assert (done.code, done.entry("brisk")["status"]) == (3, "unknown")


def test_a_look_past_its_own_deadline_is_a_finding(check: Check, plug_in: PlugIn) -> None:
    env = {**plug_in(STUCK), "STUCK_DEADLINE_S": "0.5"}
    done = check("--only", "stuck*", "--only", "station*", "--skip", "gpu*", "--timeout", "60", "--json", env=env)
    assert done.took_s < 50, "it does not wait for the end of its time"
    entry = done.entry("station_node_responds", "stuck")
    assert (entry["status"], entry["level"]) == ("unhealthy", "warning")
    assert "statvfs /mnt has not returned for " in entry["text"]
    assert done.entry("stuck")["status"] == "unknown"


def test_a_worker_that_talks_nonsense_is_bounded() -> None:
    told = WorkerAnswer("node")
    for _ in range(1000):
        told.take(b"\x1b[31m\xff")
    assert 0 < len(told.problems) < 100


def test_a_worker_that_cannot_speak_any_more_is_ended(check: Check, plug_in: PlugIn) -> None:
    done = check("--only", "gil", "--timeout", "4", "--json", env=plug_in(STUCK_FOR_GOOD))
    assert (done.code, done.entry("gil")["status"]) == (3, "unknown")
    assert done.took_s < 28


def test_beside_a_process_that_does_not_die_no_other_is_started(check: Check, tmp_path: Path) -> None:
    """The note is what an earlier check would have left; the process is any that lives."""
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    fields = Path(f"/proc/{left.pid}/stat").read_text().rpartition(")")[2].split()
    try:
        (tmp_path / "kept").mkdir()
        killed_at = time.clock_gettime(time.CLOCK_BOOTTIME) - 60
        note = [left.pid, int(fields[19]), killed_at]
        (tmp_path / "kept" / "left-gpu.json").write_text(json.dumps([note]))
        done = check("--only", "gpu_*", "--only", "memory_available", "--json", site="[expect]\ngpus = 8\n")
        entry = done.entry("gpu_driver_responds")
        assert (entry["status"], entry["level"]) == ("unhealthy", "critical")
        assert f"the process {left.pid} " in entry["text"]
        assert done.entry("gpu_nvml")["status"] == "unknown"
        assert done.entry("memory_available")["status"] == "healthy"
    finally:
        left.kill()
        left.wait()
    after = check("--only", "gpu_*", "--timeout", "60", "--json", site="[expect]\ngpus = 8\n").entry(
        "gpu_driver_responds"
    )
    assert after["status"] == "healthy", "a new one was started, and answers"


@pytest.mark.gpu
def test_a_real_driver_answers(check: Check) -> None:
    done = check("--only", "nvml", "--only", "gpu_driver_responds", "--preflight", "--json")
    assert done.entry("gpu_driver_responds")["status"] == "healthy"
    assert done.entry("gpu_nvml")["status"] == "healthy"


def test_the_prolog_lets_a_job_start_where_our_programs_hang(tmp_path: Path) -> None:
    """Where the file server with our environment does not answer, say: Slurm would drain each node at its own limit."""
    bodies = {"unbroken": "exec sleep 300", "timeout": 'shift 3; exec /usr/bin/timeout 0.2 "$@"'}
    for name, body in bodies.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = Path(__file__).parents[3] / "deploy" / "slurm" / "prolog.sh"
    env = {**os.environ, "UNBROKEN_BIN": str(tmp_path), "UNBROKEN_TRAINING_PYTHON": sys.executable}
    assert subprocess.run([str(script)], env=env, timeout=30, check=False).returncode == 0
