"""The schedulers that unbroken knows: `Slurm`, `Local` (none at all), and those plugged in (`load_schedulers`).

An entry point of group `unbroken.schedulers` names a class without arguments, or an instance; its `name` is what
`[scheduler] name` says. A plug-in may not take the name of a built-in one.

Slurm is used by its own commands: `sinfo` and `squeue` to look, `scontrol` to act. Tried on 22.05; docs/slurm.md.

What is read are single fields that these commands have printed in the same form for many versions (their JSON changed
with nearly each). Every command has a deadline, after which it is killed and reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from inspect import iscoroutinefunction
from typing import Final, NamedTuple

from diagnosis.signals import clean_line
from recovery.cordon import Drained, is_drain_of
from recovery.scheduling import PREFIX, Answer, JobThere, LeavingNode, RequestOutcome, Scheduler, slurm_job

_IN_SERVICE: Final = frozenset({"idle", "allocated", "mixed", "completing", "reserved", "planned"})
_OUT: Final = "*$%"
"""Marks behind a state: not responding, in a maintenance reservation, being switched off."""
_SOCKETS: Final = re.compile(r"\([^)]*\)")


class Room(NamedTuple):
    """What the job may be given, and what it needs."""

    where: str
    """In words: `partition main`."""
    needs: int
    """Nodes."""
    nodes: dict[str, bool]
    """Node -> whether it is in service now; without those that the user excluded."""
    demanded: frozenset[str] = frozenset()
    """Nodes that the user asked for by name: the job starts on no others."""
    held: frozenset[str] = frozenset()
    """Nodes that are the job's now. One that is down is not."""


class LeftOut(NamedTuple):
    nodes: tuple[str, ...]
    why_not: str = ""
    """Why nothing is left out that makes sense: the job cannot start without the nodes that are bad."""
    kept: tuple[str, ...] = ()
    """Nodes that the job may have again, for there are too few others."""


def nodes_of(listing: str, alike: Sequence[str], excluded: Sequence[str]) -> dict[str, bool]:
    """Node -> whether it is in service, from lines `NAME|STATE|GRES`. Only those with GRES as nodes of `alike` have."""
    found: dict[str, tuple[str, str]] = {}
    for line in listing.splitlines():
        name, state, gres = (*(part.strip() for part in line.split("|")), "", "")[:3]
        if name:
            found[name] = (state.lower(), _SOCKETS.sub("", gres))
    kinds = {found[name][1] for name in alike if name in found}
    return {
        name: state.rstrip("*$%~#!@^-+") in _IN_SERVICE and not any(mark in state for mark in _OUT)
        for name, (state, gres) in found.items()
        if name not in excluded and (not kinds or gres in kinds)
    }


def drained_of(listing: str, job: str) -> list[LeavingNode]:
    """The nodes that somebody has drained, and not `job` itself, from lines `NAME|STATE|USER|REASON`."""
    found: dict[str, LeavingNode] = {}
    for line in listing.splitlines():
        node, state, user, reason = (*(part.strip() for part in line.split("|", 3)), "", "", "")[:4]
        if state.lower().startswith("drain") and not is_drain_of(reason, job):
            text = "" if reason.lower() == "none" else f": {reason}"
            why = clean_line(f"drained by {user.partition('(')[0] or 'somebody'}{text}", REASON_LIMIT)
            found[node] = LeavingNode(node=node, kind="drained", why=why)
    return list(found.values())


def maintenance_of(listing: str, now: float) -> list[tuple[str, str]]:
    """Nodes (as a list of Slurm's) and why, of maintenance reservations that are in force or begin within a day."""
    found = []
    for line in listing.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "MAINT" not in fields.get("Flags", "").split(","):
            continue
        try:
            begins, ends = (
                time.mktime(time.strptime(fields[name], "%Y-%m-%dT%H:%M:%S")) for name in ("StartTime", "EndTime")
            )
        except (KeyError, ValueError, OverflowError):
            continue
        if begins - AHEAD_S <= now < ends:
            name = clean_line(fields.get("ReservationName", ""), 64)
            why = f"maintenance from {fields['StartTime'].replace('T', ' ')[:16]} (reservation {name})"
            found.append((fields.get("Nodes", ""), why))
    return found


def leave_out(room: Room, bad: Sequence[str], lost: Sequence[str]) -> LeftOut:
    """What to exclude of the nodes that are bad and of those that are only lost."""
    bad, lost = sorted(set(bad)), sorted(set(lost) - set(bad))
    wanted = [node for node in bad if node in room.demanded]
    if wanted:
        return LeftOut((), f"it was submitted for {_names(wanted)}, by name")
    others = [node for node in room.nodes if node not in bad]
    if len(others) < room.needs:
        besides = f" besides {_names(bad)}" if bad else ""
        return LeftOut((), f"it needs {_count(room.needs)}, and {room.where} has {len(others)}{besides}")
    in_service = [node for node in others if room.nodes[node] and node not in lost]
    if len(in_service) >= room.needs and not room.demanded.intersection(lost):
        return LeftOut((*bad, *lost))
    return LeftOut(tuple(bad), kept=tuple(lost))


def _names(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:8]) + (", ..." if len(nodes) > 8 else "")


def _count(number: int) -> str:
    return f"{number} node{'s' * (number != 1)}"


COMMAND_S: Final = 15.0
"""For one command. With its daemon down it gives up by itself after about 4 s, with a hung one after MessageTimeout."""
START_AGAIN_S: Final = 15
"""A requeued job may start again after this. It has to lie behind the end of the job's last process: a start time that
has passed by then is put 121 s into the future by slurmctld."""
START_ORPHAN_S: Final = 45
"""The same when the node of the batch script is lost: slurmctld tries to reach it before the job counts as ended."""
GIVEN_UP_S: Final = 60.0
"""Slurm gives up a node that is silent at most this long after SlurmdTimeout."""
REASON_LIMIT: Final = 200
AHEAD_S: Final = 86400.0
"""Maintenance that begins later than this is none of a job's business yet."""
OUTPUT_LIMIT: Final = 64 * 1024

_NODE: Final = re.compile(r"(?!(?i:all)$)[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""One node's name: no list, no range, and not the word that means every node."""
_GRES: Final = re.compile(r" (?:TresPer\w+|JOB_GRES)=(?!\(null\))\S")
_AGAIN: Final = re.compile(r" JobState=(?:COMPLETING|PENDING|REQUEUED|RUNNING) .* Restarts=(\d+)")
_SLURMD_TIMEOUT: Final = re.compile(r"^SlurmdTimeout\s*=\s*(\d+)", re.M)
_JOB: Final = re.compile(r"[0-9]{1,12}([_+][0-9]{1,9})?")

_WORDS: Final[tuple[tuple[RequestOutcome, re.Pattern[str]], ...]] = (
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
  echo requeued
  for pause in 0.1 0.2 0.5 1 1 0; do
    scontrol update JobId="$job" "$@" && exit 0
    sleep "$pause"
  done
  exit 4
} &
wait $!
"""
_CANCEL: Final = """
trap '' TERM HUP PIPE
scancel "$1" &
wait $!
"""
"""Both end us, too: SIGTERM comes at once, SIGKILL after KillWait. What has to follow is done by a process that ignores
the first, and outlives whoever started it."""


def quarantine_name(node: str) -> str:
    """Of our reservation of a node: nobody else's has this name."""
    return f"unbroken_quarantine_{node}"


class _Done(NamedTuple):
    code: int | None
    """None: it did not end in time."""
    out: str
    words: str
    """What it printed about an error."""


class _NodeState(NamedTuple):
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
        self._own = given.get("SLURM_JOB_ID", "")
        array, task = (given.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK"))
        self._own_task = f"{array}_{task}" if array and task else self._own
        """Our job as orders name it: of an array's last task the job id alone would mean the whole array."""
        self._step = given.get("SLURM_STEP_ID", "")
        self._is_step = given.get("SLURM_TASK_PID", "") == str(os.getppid())
        """`unbroken run`, which has started us, is the step's own process: nothing else comes after it there."""
        nodes = given.get("SLURM_JOB_NUM_NODES", "")
        self._given = int(nodes) if nodes.isdigit() else 0
        self._left: subprocess.Popen[bytes] | None = None
        """A command that goes on without us."""
        self._orphaned: set[str] = set()
        """Jobs that have lost their first node."""
        self._waits_since: dict[str, float] = {}
        """Job -> when it was first to be requeued while Slurm still held nodes that are lost (monotonic)."""

    def job_of(self, environment: Mapping[str, str]) -> JobThere | None:
        return slurm_job(environment, time.time())

    async def drain(self, node: str, reason: str) -> Answer:
        found = await self._node_state(node)
        if isinstance(found, Answer):
            return found
        if found.ours and found.drained:
            return Answer(outcome="already", text=f"{node} is {found.state}: {found.reason}")
        if found.drained or (found.reason and not found.ours):
            return _foreign(node, found)
        text = reason if reason.startswith(PREFIX) else f"{PREFIX} {reason}"
        text = clean_line(text, REASON_LIMIT).replace('"', "'")
        done = await self._run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={text}")
        return _answer(done, f"{node} gets no new jobs: {text}")

    async def undrain(self, node: str, job: str) -> Answer:
        found = await self._node_state(node)
        if isinstance(found, Answer):
            return found
        if not found.drained and not found.ours:
            return Answer(outcome="already", text=f"{node} is {found.state}")
        if not is_drain_of(found.reason, job):
            return _foreign(node, found)
        done = await self._run("scontrol", "update", f"NodeName={node}", "State=UNDRAIN")
        return _answer(done, f"{node} is in service again")

    async def reserve(self, node: str, seconds: float) -> Answer:
        """Quarantine: from now on only this user's jobs start on `node`, and only those that name the reservation.
        What runs there goes on. It ends by itself after `seconds`."""
        name = quarantine_name(node)
        found = await self._node_state(node)
        if isinstance(found, Answer):
            return found
        if name in await self._reservations():
            return Answer(outcome="already", text=f"{node} is in reservation {name}")
        whose = ("Flags=IGNORE_JOBS", f"Users={getpass.getuser()}")
        length = ("StartTime=now", f"Duration={max(1, round(seconds / 60))}")
        what = (f"ReservationName={name}", f"Nodes={node}", *whose, *length)
        made = await self._run("scontrol", "create", "reservation", *what)
        tests = f"only jobs with --reservation={name} start on {node}"
        return _answer(made, f"{tests}{'; while it is drained, none does' if found.drained else ''}")

    async def release(self, node: str) -> Answer:
        """The end of a quarantine of ours; another reservation of the node is left alone."""
        name = quarantine_name(node)
        if not _NODE.fullmatch(node) or name not in await self._reservations():
            return Answer(outcome="already", text=f"{node} is in no quarantine of ours")
        return _answer(
            await self._run("scontrol", "delete", f"ReservationName={name}"), f"reservation {name} is removed"
        )

    async def _reservations(self) -> frozenset[str]:
        """Their names; none where Slurm does not answer."""
        seen = await self._run("scontrol", "--oneliner", "show", "reservation")
        return frozenset(re.findall(r"^ReservationName=(\S+)", seen.out, re.M)) if seen.code == 0 else frozenset()

    async def requeue(self, job: str, exclude: tuple[str, ...], avoid: tuple[str, ...] = ()) -> Answer:
        if not _JOB.fullmatch(job):
            return Answer(outcome="failed", text=f"{clean_line(job, 40)!r} is no Slurm job id")
        bad = [node for node in (*exclude, *avoid) if not _NODE.fullmatch(node)]
        if bad:
            return Answer(outcome="failed", text=f"{clean_line(bad[0], 40)!r} is no node's name")
        users: tuple[str, ...] = ()
        left = ""
        if exclude or avoid:
            seen = await self._room(job, (*exclude, *avoid))
            if isinstance(seen, Answer):
                return seen
            room, users = seen
            choice = leave_out(room, exclude, avoid)
            if choice.why_not:
                return Answer(outcome="unsupported", text=f"job {job} cannot start again: {choice.why_not}")
            holds = await self._holds(job, [node for node in avoid if node in room.held])
            if holds:
                return Answer(outcome="unavailable", text=holds)
            exclude, left = choice.nodes, _kept(choice.kept, room)
        start_s = START_ORPHAN_S if job in self._orphaned else START_AGAIN_S
        target = self._target(job)
        excluded = [f"ExcNodeList={','.join((*users, *exclude))}"] if exclude else []
        done = await self._run_on("sh", "-c", _REQUEUE, "requeue", target, f"StartTime=now+{start_s}", *excluded)
        if done.code == 4:
            return Answer(outcome="done", text=f"job {job} is requeued, but not changed: {done.words}")
        without = f" without {', '.join(exclude)} (`scontrol update JobId={job} ExcNodeList=` allows them)"
        return _answer(done, f"job {job} is requeued{without if exclude else ''}{left}")

    async def cancel(self, job: str) -> Answer:
        if not _JOB.fullmatch(job):
            return Answer(outcome="failed", text=f"{clean_line(job, 40)!r} is no Slurm job id")
        return _answer(await self._run_on("sh", "-c", _CANCEL, "cancel", self._target(job)), f"job {job} is cancelled")

    async def end_step(self, job: str, nodes: tuple[str, ...]) -> Answer:
        """srun waits for the task of a node that was booted again before Slurm missed it, and so the job goes on."""
        if not _JOB.fullmatch(job) or job != self._own or not self._step.isdigit():
            return Answer(outcome="already", text="no srun waits for anything")
        seen = await self._run("squeue", "--noheader", f"--jobs={job}", "--format=%N")
        if seen.code != 0:
            return _answer(seen, "")
        held = [node for node in await self._names(seen.out.strip()) if node in nodes]
        if not held:
            return Answer(outcome="already", text="it has given up those nodes")
        step = f"{self._target(job)}.{self._step}"
        why = f"its srun would wait for {', '.join(held[:8])}, of which nothing is heard"
        if not self._is_step:
            return Answer(outcome="unsupported", text=f"{why}: `scancel {step}` ends that")
        done = await self._run_on("sh", "-c", _CANCEL, "cancel", step)
        return _answer(done, f"step {step} is ended, for {why}")

    async def comment(self, job: str, text: str) -> Answer:
        if not _JOB.fullmatch(job):
            return Answer(outcome="failed", text=f"{clean_line(job, 40)!r} is no Slurm job id")
        target = self._target(job)
        seen = await self._run("squeue", "--noheader", f"--jobs={target}", "--format=%k")
        if seen.code != 0:
            return _answer(seen, "")
        found = clean_line(seen.out, 1000).strip()
        if found not in ("", "(null)") and not found.startswith(PREFIX):
            return Answer(outcome="foreign", text=f"job {job} has a comment of its user")
        text = clean_line(text, REASON_LIMIT).replace('"', "'")
        done = await self._run("scontrol", "update", f"JobId={target}", f"Comment={text}")
        return _answer(done, f"the comment of job {job} is: {text}")

    async def jobs_on(self, node: str) -> dict[str, int]:
        """Job -> user id, of those that run on `node` or have ended there just now; none where Slurm is silent."""
        if not _NODE.fullmatch(node):
            return {}
        seen = await self._run("squeue", "--noheader", "--states=all", f"--nodelist={node}", "--format=%A|%U")
        pairs = [line.strip().partition("|") for line in seen.out.splitlines()] if seen.code == 0 else []
        return {job: int(uid) for job, _, uid in pairs if job.isdigit() and uid.isdigit()}

    async def drained(self) -> list[Drained] | Answer:
        """The nodes that are drained now, since when, and the beginning of why."""
        seen = await self._run("sinfo", "--all", "--noheader", "--Node", "--list-reasons", "--format=%N|%T|%H|%9E")
        if seen.code != 0:
            return _answer(seen, "")
        if len(seen.out) >= OUTPUT_LIMIT:
            return Answer(outcome="failed", text="too many nodes are drained or down to be counted")
        found = []
        for line in seen.out.splitlines():
            node, state, at, reason = (*line.split("|"), "", "", "", "")[:4]
            with contextlib.suppress(ValueError):
                since = time.mktime(time.strptime(at.strip(), "%Y-%m-%dT%H:%M:%S"))
                if state.strip().lower().startswith("drain"):
                    found.append(Drained(node.strip(), since, reason.strip()))
        return found

    def _target(self, job: str) -> str:
        return self._own_task if job == self._own else job

    async def starts_again(self, job: str, requeues: int) -> bool | None:
        """It counts the new start when it is ordered, before it ends the processes of the old one."""
        if not _JOB.fullmatch(job):
            return False
        shown = await self._run("scontrol", "show", "job", job, "--oneliner")
        if _answer(shown, "").outcome == "unavailable":
            return None
        # Of an array, all tasks are shown: each has a line, which begins with its own id.
        lines = shown.out.splitlines()
        own = lines if len(lines) == 1 else [line for line in lines if line.startswith(f"JobId={job} ")]
        found = _AGAIN.search("".join(own))
        return shown.code == 0 and found is not None and int(found[1]) > requeues

    async def leaving(self, job: str, nodes: tuple[str, ...]) -> tuple[LeavingNode, ...] | None:
        wanted = tuple(node for node in nodes if _NODE.fullmatch(node))
        if not wanted:
            return ()
        listing = ("--all", "--noheader", "--Node", f"--nodes={','.join(wanted)}", "--format=%N|%T|%u|%E")
        states = await self._run("sinfo", *listing)
        shown = await self._run("scontrol", "--oneliner", "show", "reservation")
        if states.code != 0 or shown.code != 0:
            return None
        found = {one.node: one for one in drained_of(states.out, job)}
        for lists, why in maintenance_of(shown.out, time.time()):
            for node in await self._names(lists):
                if node in wanted:
                    found.setdefault(node, LeavingNode(node=node, kind="maintenance", why=why))
        return tuple(found[node] for node in wanted if node in found)

    async def headless(self, job: str) -> str:
        if not _JOB.fullmatch(job):
            return ""
        seen = await self._run("squeue", "--noheader", f"--jobs={job}", "--format=%T|%B|%N")
        state, _, rest = seen.out.strip().partition("|")
        first, _, nodes = rest.partition("|")
        if seen.code != 0 or state != "RUNNING" or not _NODE.fullmatch(first) or not nodes:
            return ""
        named = await self._names(nodes)
        if not named or first in named:
            return ""
        self._orphaned.add(job)
        return first

    async def _holds(self, job: str, lost: list[str]) -> str:
        """Why the job cannot be requeued yet: a node of its that is lost, as which Slurm does not see it so far.

        Found on 22.05.8 (and with no part of ours): if such a node goes down while the requeued job still ends, the job
        is left without its GPUs, its next srun fails (`Invalid generic resource`), and the job with it.
        """
        if not lost:
            return ""
        shown = await self._run("scontrol", "show", "job", job, "--oneliner")
        if shown.code == 0 and not _GRES.search(shown.out):
            return ""
        settings = await self._run("scontrol", "show", "config")
        found = _SLURMD_TIMEOUT.search(settings.out)
        since = self._waits_since.setdefault(job, time.monotonic())
        if time.monotonic() - since > (float(found[1]) if found else 300.0) + GIVEN_UP_S:
            return ""  # it answers Slurm, though not us
        return f"it has not given up {', '.join(lost[:8])} yet, and would start the job without GPUs"

    async def _names(self, nodes: str) -> tuple[str, ...]:
        """The names that a list like `node[1-3]` stands for; none where it is not known."""
        if not nodes or nodes == "(null)":
            return ()
        named = await self._run("scontrol", "show", "hostnames", nodes)
        return tuple(named.out.split()) if named.code == 0 else ()

    async def _room(self, job: str, gone: tuple[str, ...]) -> tuple[Room, tuple[str, ...]] | Answer:
        """What the job can be given instead of nodes that are gone, and the user's own exclusions; or why not."""
        seen = await self._run("squeue", "--noheader", f"--jobs={job}", "--format=%D|%P|%v|%x|%n|%N")
        if seen.code != 0:
            return _answer(seen, "")
        count, partition, reservation, *lists = (*seen.out.strip().split("|"), *[""] * 6)[:6]
        users, demanded, held = [await self._names(one) for one in lists]
        where, which = f"partition {partition}", [f"--partition={partition}"]
        if reservation not in ("", "(null)"):
            shown = await self._run("scontrol", "--oneliner", "show", "reservation", reservation)
            found = re.search(r" Nodes=(\S+)", shown.out)
            if found is not None:
                where, which = f"reservation {reservation}", ["--all", f"--nodes={found[1]}"]
        listed = await self._run("sinfo", "--noheader", "--Node", *which, "--format=%N|%T|%G")
        if listed.code != 0:
            return _answer(listed, "")
        # After a node was lost squeue tells how many are left; how many the job was given is what it will need.
        needs = max(int(count) if count.isdigit() else 0, self._given if job == self._own else 0)
        nodes = nodes_of(listed.out, (*held, *gone), users)
        return Room(where, needs, nodes, frozenset(demanded), frozenset(held)), users

    async def _node_state(self, node: str) -> _NodeState | Answer:
        """The state of the node now, or why it cannot be read."""
        if not _NODE.fullmatch(node):
            return Answer(outcome="failed", text=f"{clean_line(node, 40)!r} is no node's name")
        seen = await self._run("sinfo", "--all", "--noheader", "--Node", f"--nodes={node}", "--format=%T|%E")
        if seen.code != 0:
            return _answer(seen, "")
        state, bar, reason = seen.out.partition("\n")[0].partition("|")  # a line for each partition it is in
        if not bar:
            return Answer(outcome="failed", text=f"Slurm has no node {node}")
        reason = clean_line(reason, 1000).strip()
        return _NodeState(state.strip().lower(), "" if reason.lower() == "none" else reason)

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
        """A command of few words that goes on when we are stopped (asyncio would kill it).

        One that has said a word on stdout by its deadline has done what matters, and is left to do the rest.
        """
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        deadline = time.monotonic() + self._command_s
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        with process.stdout as said, process.stderr as stream:
            if process.poll() is None:
                if select.select([said], [], [], 0)[0]:
                    self._left = process
                    return _Done(4, "", "slurmctld takes its time, and is asked on")
                _kill(process.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                return _Done(None, "", self._no_answer(command))
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
    outcome: RequestOutcome = next((meant for meant, words in _WORDS if words.search(done.words)), "failed")
    return Answer(outcome=outcome, text=done.words or f"it ended with code {done.code}")


def _kept(nodes: tuple[str, ...], room: Room) -> str:
    """That lost nodes are not left out, and what follows from it."""
    if not nodes:
        return ""
    return (
        f"; {', '.join(nodes)} may be given to it again, for it needs {room.needs} nodes and {room.where} "
        f"has too few others: it starts when enough are in service"
    )


def _foreign(node: str, found: _NodeState) -> Answer:
    why = f": {found.reason}" if found.reason else ""
    return Answer(outcome="foreign", text=f"{node} is {found.state} for another reason{why}")


# ----- no scheduler -----

_NONE = Answer(outcome="unsupported", text="there is no scheduler: this holds for this job only")


class Local:
    name = "local"

    def job_of(self, environment: Mapping[str, str]) -> JobThere | None:  # noqa: ARG002
        return None

    async def _nothing(self, *_: object, **__: object) -> Answer:
        return _NONE

    drain = undrain = requeue = cancel = end_step = comment = _nothing

    async def starts_again(self, job: str, requeues: int) -> bool:  # noqa: ARG002
        return False

    async def leaving(self, job: str, nodes: tuple[str, ...]) -> tuple[LeavingNode, ...]:  # noqa: ARG002
        return ()

    async def headless(self, job: str) -> str:  # noqa: ARG002
        return ""


# ----- all of them -----

GROUP: Final = "unbroken.schedulers"
BUILT_IN: Final[tuple[type[Scheduler], ...]] = (Local, Slurm)
OPTIONAL: Final = frozenset({"leaving"})
CALLS: Final = tuple(
    name for name, value in vars(Scheduler).items() if iscoroutinefunction(value) and name not in OPTIONAL
)
"""What a plug-in must have."""


def load_schedulers(points: Iterable[EntryPoint] | None = None) -> tuple[dict[str, Scheduler], tuple[str, ...]]:
    """Every scheduler by its name; and in words, which plug-ins were skipped and why."""
    found: dict[str, Scheduler] = {made.name: made for made in (kind() for kind in BUILT_IN)}
    skipped: list[str] = []
    for point in entry_points(group=GROUP) if points is None else points:
        try:
            loaded = point.load()
            plugged: Scheduler = loaded() if isinstance(loaded, type) else loaded
            if (
                not isinstance(plugged.name, str)
                or not callable(plugged.job_of)
                or not all(iscoroutinefunction(getattr(plugged, call)) for call in CALLS)
            ):
                raise TypeError("it is no Scheduler")
            if plugged.name in found:
                raise ValueError(f"there is a scheduler {plugged.name!r} already")
            found[plugged.name] = plugged
        except (Exception, SystemExit) as error:
            skipped.append(f"scheduler {point.name} was skipped: {type(error).__name__}: {str(error)[:200]}")
    return found, tuple(skipped)
