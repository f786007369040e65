"""SIGKILL to the controller, the agent or both at random moments: the run must reach its last step all the same."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from supervisor.bench.recovery import LIMIT_S, Script, plain, supervised, weights_sha256
from supervisor.demo.watched_run import WatchedRun
from supervisor.errors import RunFailed

ROLES = {"controller": "supervisor.controller.main", "agent": "supervisor.agent.agent"}
PAUSE_S = (0.05, 2.0)
"""Between two kills: from before the victim is up again to long after."""
RANK_KILL_SHARE = 0.15
"""How often a rank is killed as well, just before: so that supervisors die in the middle of a recovery."""


def processes_of(run: WatchedRun, role: str) -> list[psutil.Process]:
    """The living processes of this role that the run's front started."""
    module = ROLES[role]
    try:
        family = psutil.Process(run.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in family if module in _command(process)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie as well
        return ""


class RandomKills:
    """Which processes are killed when, from a seed. Counts those that were killed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.hits = {"controller": 0, "agent": 0, "rank": 0}

    def pause_s(self) -> float:
        return self._random.uniform(*PAUSE_S)

    def kill_some(self, run: WatchedRun) -> None:
        roles = self._random.choice((("controller",), ("agent",), ("controller", "agent")))
        hit_rank = self._random.random() < RANK_KILL_SHARE
        victims = [(role, process) for role in roles for process in processes_of(run, role)]
        if hit_rank and (pid := _rank_pid(run)) is not None:
            victims.insert(0, ("rank", pid))
        for role, process in victims:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
            self.hits[role] += 1


def _rank_pid(run: WatchedRun) -> psutil.Process | None:
    for line in reversed(run.lines):
        if " up, pid " in line.text:
            try:
                return psutil.Process(int(line.text.split()[-1]))
            except psutil.NoSuchProcess:
                return None
    return None


def report(folder: Path, kills: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Kill until `kills` processes of ours were killed, then let the run end. Raises RunFailed."""
    script = Script(steps=int(kills * 30 + 100), save_every=50)
    undisturbed, place = folder / "undisturbed", folder / "unbroken"
    undisturbed.mkdir(parents=True)
    place.mkdir()
    kills_made = RandomKills(seed)
    run = supervised(script, place)
    began = time.monotonic()
    try:
        run.wait_for_step(1, timeout_s=LIMIT_S)
        while kills_made.hits["controller"] + kills_made.hits["agent"] < kills and run.process.poll() is None:
            time.sleep(kills_made.pause_s())
            kills_made.kill_some(run)
            say(f"step {run.last_step()}: {_hits_text(kills_made.hits)}")
        steps_when_done = run.last_step()
        code = run.wait_for_end(LIMIT_S + script.steps * script.step_ms / 1000 * 4)
    finally:
        run.close(grace_s=20.0)
    if code != 0:
        raise RunFailed(f"seed {seed}: unbroken run ended with {code}: {run.lines[-1].text}")
    took_s = time.monotonic() - began
    say("the same run, undisturbed")
    reference = plain(script._replace(step_ms=0.0), undisturbed)
    try:
        reference.wait_for_end(LIMIT_S + script.steps * 0.05)
    finally:
        reference.close()
    return {
        "schema": 1,
        "seed": seed,
        "kills": kills_made.hits,
        "steps": script.steps,
        "step_after_the_last_kill": steps_when_done,
        "took_s": took_s,
        "exit_code": code,
        "equal_weights": weights_sha256(place) == weights_sha256(undisturbed),
        "load": os.getloadavg()[0],
    }


def _hits_text(hits: dict[str, int]) -> str:
    return ", ".join(f"{count} {role}" for role, count in hits.items())
