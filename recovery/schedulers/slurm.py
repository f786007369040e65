"""Slurm, by its own commands: `sinfo` and `squeue` to look, `scontrol` to act. Tried on 22.05; docs/slurm.md.

What is read are single fields that these commands have printed in the same form for many versions (their JSON changed
with nearly each). Every command has a deadline, after which it is killed and reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from diagnosis.signals import clean_line
from recovery.actions import OrderOutcome
from recovery.scheduling import PREFIX, Answer

COMMAND_S: Final = 15.0
"""For one command. With its daemon down it gives up by itself after about 4 s, with a hung one after MessageTimeout."""
START_AGAIN_S: Final = 15
"""A requeued job may start again after this. It has to lie behind the end of the job's last process: a start time that
has passed by then is put 121 s into the future by slurmctld."""
REASON_LIMIT: Final = 200
OUTPUT_LIMIT: Final = 64 * 1024

_NODE: Final = re.compile(r"(?!(?i:all)$)[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""One node's name: no list, no range, and not the word that means every node."""
_JOB: Final = re.compile(r"[0-9]{1,12}([_+][0-9]{1,9})?")

_WORDS: Final[tuple[tuple[OrderOutcome, re.Pattern[str]], ...]] = (
    ("already", re.compile(r"job is pending execution", re.I)),
    ("unsupported", re.compile(r"presently disabled|not supported", re.I)),
    ("denied", re.compile(r"invalid user id|permission denied|not (?:allowed|authorized)", re.I)),
    (
        "unavailable",
        re.compile(
            r"unable to contact slurm|socket timed out|connection (?:refused|reset|timed out)|connect failure"
            r"|zero bytes were transmitted|standby mode|communication|temporarily unable|munge",
            re.I,
        ),
    ),
)

_REQUEUE: Final = """
trap '' TERM HUP PIPE
{
  job=$1
  shift
  scontrol requeue "$job" || exit 3
  for pause in 0.1 0.2 0.5 1 1 0; do
    scontrol update JobId="$job" "$@" && exit 0
    sleep "$pause"
  done
  exit 4
} &
wait $!
"""
"""Requeueing a job ends us, too: SIGTERM comes at once, SIGKILL after KillWait. What has to follow is done by a process
that ignores the first, and outlives whoever started it."""


class _Done(NamedTuple):
    code: int | None
    """None: it did not end in time."""
    out: str
    words: str
    """What it said of an error."""


class _Standing(NamedTuple):
    state: str
    reason: str
    """Empty: none."""

    @property
    def drained(self) -> bool:
        return self.state.startswith("drain")

    @property
    def ours(self) -> bool:
        return self.reason.startswith(PREFIX)


class Slurm:
    name = "slurm"

    def __init__(self, environment: Mapping[str, str] | None = None, command_s: float = COMMAND_S) -> None:
        given = os.environ if environment is None else environment
        # A user's own defaults for how these commands print would change what we read.
        theirs = ("SINFO_", "SQUEUE_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "LC_", "LANG")
        self._environment = {k: v for k, v in given.items() if not k.startswith(theirs)} | {"LC_ALL": "C"}
        self._command_s = command_s

    async def drain(self, node: str, reason: str) -> Answer:
        standing = await self._standing(node)
        if isinstance(standing, Answer):
            return standing
        if standing.ours and standing.drained:
            return Answer(outcome="already", text=f"{node} is {standing.state}: {standing.reason}")
        if standing.drained or (standing.reason and not standing.ours):
            return _foreign(node, standing)
        text = reason if reason.startswith(PREFIX) else f"{PREFIX} {reason}"
        text = clean_line(text, REASON_LIMIT).replace('"', "'")
        done = await self._run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={text}")
        return _answer(done, f"{node} gets no new jobs: {text}")

    async def undrain(self, node: str) -> Answer:
        standing = await self._standing(node)
        if isinstance(standing, Answer):
            return standing
        if not standing.drained and not standing.ours:
            return Answer(outcome="already", text=f"{node} is {standing.state}")
        if not standing.ours:
            return _foreign(node, standing)
        done = await self._run("scontrol", "update", f"NodeName={node}", "State=UNDRAIN")
        return _answer(done, f"{node} is in service again")

    async def requeue(self, job: str, exclude: tuple[str, ...]) -> Answer:
        if not _JOB.fullmatch(job):
            return Answer(outcome="failed", text=f"{clean_line(job, 40)!r} is no Slurm job id")
        bad = [node for node in exclude if not _NODE.fullmatch(node)]
        if bad:
            return Answer(outcome="failed", text=f"{clean_line(bad[0], 40)!r} is no node's name")
        seen = await self._run("squeue", "--noheader", f"--jobs={job}", "--format=%x")
        if seen.code != 0:
            return _answer(seen, "")
        users = seen.out.strip()
        excluded = [*([users] if users and users != "(null)" else []), *exclude]
        changes = [f"StartTime=now+{START_AGAIN_S}", *([f"ExcNodeList={','.join(excluded)}"] if excluded else [])]
        done = await self._run_on("sh", "-c", _REQUEUE, "requeue", job, *changes)
        if done.code == 4:
            return Answer(outcome="done", text=f"job {job} is requeued, but not changed: {done.words}")
        without = f" without {', '.join(exclude)}" if exclude else ""
        return _answer(done, f"job {job} is requeued{without}")

    async def headless(self, job: str) -> bool:
        if not _JOB.fullmatch(job):
            return False
        seen = await self._run("squeue", "--noheader", f"--jobs={job}", "--format=%T|%B|%N")
        state, _, rest = seen.out.strip().partition("|")
        first, _, nodes = rest.partition("|")
        if seen.code != 0 or state != "RUNNING" or not _NODE.fullmatch(first) or not nodes:
            return False
        named = await self._run("scontrol", "show", "hostnames", nodes)
        return named.code == 0 and bool(named.out.split()) and first not in named.out.split()

    async def _standing(self, node: str) -> _Standing | Answer:
        """How the node stands now, or why that cannot be said."""
        if not _NODE.fullmatch(node):
            return Answer(outcome="failed", text=f"{clean_line(node, 40)!r} is no node's name")
        seen = await self._run("sinfo", "--all", "--noheader", "--Node", f"--nodes={node}", "--format=%T|%E")
        if seen.code != 0:
            return _answer(seen, "")
        state, bar, reason = seen.out.partition("\n")[0].partition("|")  # a line for each partition it is in
        if not bar:
            return Answer(outcome="failed", text=f"Slurm has no node {node}")
        reason = clean_line(reason, 1000).strip()
        return _Standing(state.strip().lower(), "" if reason.lower() == "none" else reason)

    async def _run(self, *command: str) -> _Done:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            return _Done(127, "", f"{command[0]} cannot be started ({error.strerror})")
        reading = asyncio.ensure_future(_read(process))
        try:
            await asyncio.wait({reading}, timeout=self._command_s)
            if not reading.done():
                return _Done(None, "", self._no_answer(command))
            out, err = reading.result()
        finally:
            reading.cancel()
            await _reap(process)
        return _Done(process.returncode, out, clean_line(" ".join((err or out).split()), 300))

    async def _run_on(self, *command: str) -> _Done:
        """A command of few words that goes on when we are stopped (asyncio would kill it)."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        deadline = time.monotonic() + self._command_s
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if process.poll() is None:
            _kill(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            return _Done(None, "", self._no_answer(command))
        assert process.stderr is not None
        with process.stderr as stream:
            words = os.read(stream.fileno(), OUTPUT_LIMIT).decode(errors="replace")
        return _Done(process.returncode, "", clean_line(" ".join(words.split()), 300))

    def _no_answer(self, command: tuple[str, ...]) -> str:
        return f"{command[0]} gave no answer within {self._command_s:g} s"


async def _read(process: asyncio.subprocess.Process) -> tuple[str, str]:
    assert process.stdout is not None
    assert process.stderr is not None

    async def whole(stream: asyncio.StreamReader) -> str:
        kept = b""
        while piece := await stream.read(OUTPUT_LIMIT):
            kept = (kept + piece)[:OUTPUT_LIMIT]
        return kept.decode(errors="replace")

    out, err, _ = await asyncio.gather(whole(process.stdout), whole(process.stderr), process.wait())
    return out, err


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Whatever is left of it is killed. One that the kernel holds is left to asyncio, which reaps it when it ends."""
    if process.returncode is not None:
        return
    _kill(process.pid)
    await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=1.0)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _answer(done: _Done, well: str) -> Answer:
    """What a command's end means."""
    if done.code == 0:
        return Answer(outcome="done", text=well)
    if done.code is None:
        return Answer(outcome="unavailable", text=done.words)
    if done.code == 127:
        return Answer(outcome="unsupported", text=done.words)
    outcome: OrderOutcome = next((meant for meant, words in _WORDS if words.search(done.words)), "failed")
    return Answer(outcome=outcome, text=done.words or f"it ended with code {done.code}")


def _foreign(node: str, standing: _Standing) -> Answer:
    why = f": {standing.reason}" if standing.reason else ""
    return Answer(outcome="foreign", text=f"{node} is {standing.state} for another reason{why}")
