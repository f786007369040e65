"""Made-up jobs with a fault in them, and the flight recorder dumps that they leave: whose fault it is is known.

Ranks of a tensor x pipeline x data parallel job run the same kind of program; each call begins on a rank's GPU when
the one before it is complete there, and completes when all that take part have come to it. The CPU may be some calls
ahead of the GPU.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

Fault = Literal[
    "healthy",
    "stuck",
    "two stuck",
    "dead",
    "GPU does not begin",
    "GPU does not complete",
    "other collective",
    "other size",
    "other dtype",
    "other size sent",
    "send skipped",
    "order swapped",
    "call twice",
    "late",
]
FAULTS: Final[tuple[Fault, ...]] = Fault.__args__  # type: ignore[attr-defined]
STARTED_AT: Final = 1_795_000_000_000_000_000
RING: Final = 2_000


class Shape(NamedTuple):
    """Sizes of the three kinds of parallelism, steps, and micro-batches of each."""

    tensor: int
    pipeline: int
    data: int
    steps: int = 6
    micro: int = 2
    layers: int = 2
    expert: bool = False
    """Halves of each data-parallel group exchange tokens in every step."""
    uneven: bool = False
    """Data-parallel replicas work on batches of different lengths."""
    ahead: int = 1
    """How many calls the CPU may be ahead of the GPU; 1: it waits for each, as with gloo."""

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data


@dataclass(slots=True)
class Call:
    """One call of one rank's program."""

    group: str
    op: str
    sizes: list[list[int]]
    outputs: list[list[int]]
    dtype: str = "BFloat16"
    peer: int = -1
    """Of a send or receive: the rank at the other end."""
    seq: int = 0
    key: tuple[object, ...] = ()
    """Equal for the calls of all ranks that complete together."""
    enqueued: bool = False
    started: bool = False
    completed: bool = False
    at: int = 0
    """Unix nanoseconds when it was enqueued."""
    ended: int = 0

    @property
    def p2p(self) -> bool:
        return self.peer >= 0


@dataclass(slots=True)
class Job:
    """Who is in which group, and what each rank calls."""

    shape: Shape
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Name -> (description, ranks)."""
    programs: dict[int, list[Call]] = field(default_factory=dict)
    fault: Fault = "healthy"
    culprits: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    limits: dict[int, int] = field(default_factory=dict)
    """Rank -> it does not make this call, nor any later one."""
    gpu_limits: dict[int, int] = field(default_factory=dict)
    """Rank -> its GPU does not complete this call; where it is in `lost` its peers do."""
    unstarted: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    delays: dict[int, int] = field(default_factory=dict)
    """Rank -> nanoseconds it takes longer before each call."""


def build(shape: Shape) -> Job:
    """The job without a fault."""
    job = Job(shape)
    tensor, pipeline, data = shape.tensor, shape.pipeline, shape.data
    names = iter(range(1, 1 << 20))
    job.groups["0"] = ("default_pg", tuple(range(shape.world)))
    mine: dict[int, dict[str, str]] = {rank: {} for rank in range(shape.world)}

    def rank_of(t: int, p: int, d: int) -> int:
        return t + tensor * (d + data * p)

    rows: list[tuple[str, list[int]]] = []
    rows += [("TP", [rank_of(t, p, d) for t in range(tensor)]) for p in range(pipeline) for d in range(data)]
    rows += [("DP", [rank_of(t, p, d) for d in range(data)]) for p in range(pipeline) for t in range(tensor)]
    rows += [("PP", [rank_of(t, p, d) for p in range(pipeline)]) for d in range(data) for t in range(tensor)]
    for _, ranks in [row for row in rows if row[0] == "DP" and shape.expert and data % 2 == 0]:
        rows += [("EP", ranks[: data // 2]), ("EP", ranks[data // 2 :])]
    counts = {"TP": 0, "DP": 0, "PP": 0, "EP": 0}
    for kind, ranks in rows:
        if len(ranks) > 1:
            name = str(next(names))
            job.groups[name] = (f"{kind}_{counts[kind]}", tuple(ranks))
            counts[kind] += 1
            for rank in ranks:
                mine[rank][kind] = name
    for rank in range(shape.world):
        stage = rank // (tensor * data)
        job.programs[rank] = list(_program(job, mine[rank], stage, rank))
    return job


def _program(job: Job, mine: dict[str, str], stage: int, rank: int) -> Iterator[Call]:
    shape = job.shape
    pipe = job.groups[mine["PP"]][1] if "PP" in mine else ()

    replica = rank // shape.tensor % shape.data
    lengths = [256 * (1 + (replica * 7 + turn * 5) % 16) if shape.uneven else 4096 for turn in range(shape.micro)]

    def tensor_parallel(length: int) -> Iterator[Call]:
        if "TP" in mine:
            for _ in range(shape.layers):
                yield Call(mine["TP"], "all_reduce", [[length, 1024]], [[length, 1024]])
        if "EP" in mine:
            yield Call(mine["EP"], "all_to_all", [[1024 + rank, 512]], [[1024, 512]])

    def point(op: str, to: int, length: int) -> Iterator[Call]:
        if 0 <= to < len(pipe):
            yield Call(mine["PP"], op, [[length, 512]], [[length, 512]], peer=pipe[to])

    for step in range(shape.steps):
        for length in lengths:
            yield from point("recv", stage - 1, length) if stage else ()
            yield from tensor_parallel(length)
            yield from point("send", stage + 1, length)
        for length in lengths:
            yield from point("recv", stage + 1, length)
            yield from tensor_parallel(length)
            yield from point("send", stage - 1, length) if stage else ()
        if "DP" in mine:
            size = 65_536 * shape.data
            yield Call(mine["DP"], "_reduce_scatter_base", [[size]], [[65_536]], "Float")
            yield Call(mine["DP"], "_all_gather_base", [[65_536]], [[size]])
        if step % 2:
            yield Call("0", "all_reduce", [[1]], [[1]], "Float")


def break_it(job: Job, fault: Fault, dice: random.Random) -> Job:
    """Puts the fault into it, at a random rank and a random call of one of the last steps."""
    rank = dice.randrange(job.shape.world)
    program = job.programs[rank]
    at = dice.randrange(len(program) // 2, len(program) - len(program) // (job.shape.steps * 2))
    job.fault, job.culprits = fault, (rank,)
    if fault == "healthy":
        job.culprits = ()
    elif fault == "stuck":
        job.limits[rank] = at
    elif fault == "two stuck":
        other = dice.choice([one for one in job.programs if one != rank])
        job.limits = {rank: at, other: at}
        job.culprits = tuple(sorted(job.limits))
    elif fault == "dead":
        job.limits[rank], job.dead = at, (rank,)
    elif fault in ("GPU does not begin", "GPU does not complete"):
        at = _next(program, at, lambda one: not one.p2p)
        job.gpu_limits[rank] = at
        (job.unstarted if fault == "GPU does not begin" else job.lost).add(rank)
    elif fault in ("other collective", "other size", "other dtype"):
        at = _next(program, at, lambda one: not one.p2p)
        program[at] = _altered(program[at], fault)
    elif fault in ("send skipped", "other size sent"):
        at = _next(program, at, lambda one: one.op == "send")
        if program[at].op != "send":
            job.fault, job.culprits = "healthy", ()
        elif fault == "send skipped":
            del program[at]
        else:
            program[at].sizes = program[at].outputs = [[program[at].sizes[0][0] + 8, 512]]
    elif fault == "order swapped":
        at = _next_swap(program, at)
        program[at], program[at + 1] = program[at + 1], program[at]
    elif fault == "call twice":
        at = _next(program, at, lambda one: not one.p2p)
        one = program[at]
        program.insert(at, Call(one.group, one.op, one.sizes, one.outputs, one.dtype))
    elif fault == "late":
        job.delays[rank] = 30_000_000
    return job


def _altered(one: Call, fault: Fault) -> Call:
    if fault == "other collective":
        return Call(one.group, "broadcast", one.sizes, one.sizes, one.dtype)
    if fault == "other dtype":
        return Call(one.group, one.op, one.sizes, one.outputs, "Half")
    return Call(one.group, one.op, [[*one.sizes[0][:-1], one.sizes[0][-1] + 8]], one.outputs, one.dtype)


def _next(program: list[Call], at: int, fits: Callable[[Call], bool]) -> int:
    return next((place for place in [*range(at, len(program)), *range(at)] if fits(program[place])), at)


def _next_swap(program: list[Call], at: int) -> int:
    places = [*range(at, len(program) - 1), *range(at)]
    differ = (place for place in places if program[place].group != program[place + 1].group)
    return next(differ, at)


def run(job: Job) -> None:
    """Lets it go on until no rank can."""
    for rank, program in job.programs.items():
        _number(rank, program)
    here = dict.fromkeys(job.programs, 0)
    there: dict[tuple[object, ...], dict[int, Call]] = {}
    clock = {rank: STARTED_AT + rank * 1000 for rank in job.programs}
    todo = list(job.programs)
    while todo:
        rank = todo.pop()
        program, limit = job.programs[rank], job.limits.get(rank, 1 << 60)
        while here[rank] < len(program):
            _enqueue(job, program, here[rank], min(limit, here[rank] + job.shape.ahead), clock, rank)
            call = program[here[rank]]
            if here[rank] >= limit or (job.gpu_limits.get(rank) == here[rank] and rank in job.unstarted):
                break
            call.started = True
            met = there.setdefault(call.key, {})
            met[rank] = call
            members = (rank, call.peer) if call.p2p else job.groups[call.group][1]
            if any(member not in met for member in members) or _disagree(met):
                break
            if len(met) == len(members):
                now = max(clock[member] for member in members) + 50_000
                for member, theirs in met.items():
                    clock[member] = now
                    if job.gpu_limits.get(member) == here[member] and member in job.lost:
                        continue
                    theirs.completed, theirs.ended = True, now
                    here[member] += 1
                    todo.append(member)
                del there[call.key]
            break
    job.culprits = tuple(rank for rank in job.culprits if here[rank] == job.limits.get(rank, here[rank]))
    if job.fault != "late" and not any(call.enqueued and not call.completed for call in _all_calls(job)):
        job.fault, job.culprits = "healthy", ()  # it did no harm, or nobody is left who could wait


def _all_calls(job: Job) -> Iterator[Call]:
    return (call for program in job.programs.values() for call in program)


def _enqueue(job: Job, program: list[Call], begin: int, end: int, clock: dict[int, int], rank: int) -> None:
    for call in program[begin:end]:
        if not call.enqueued:
            call.enqueued = True
            clock[rank] += 100_000 + job.delays.get(rank, 0)
            call.at = clock[rank]


def _disagree(met: dict[int, Call]) -> bool:
    told = {
        ("" if call.p2p else call.op, "" if call.op == "all_to_all" else str(call.sizes), call.dtype)
        for call in met.values()
    }
    return len(told) > 1


def _number(rank: int, program: list[Call]) -> None:
    counts: dict[object, int] = {}
    for call in program:
        if call.p2p:
            route = (rank, call.peer) if call.op == "send" else (call.peer, rank)
            turn = counts[call.group, route] = counts.get((call.group, route), 0) + 1
            call.key = (call.group, route, turn)
            call.seq = counts[call.group, "p2p"] = counts.get((call.group, "p2p"), 0) + 1
        else:
            call.seq = counts[call.group] = counts.get(call.group, 0) + 1
            call.key = (call.group, call.seq)


def dump(job: Job, rank: int, ring: int = RING, *, active: bool = False, past: int = 0) -> dict[str, Any]:
    """What the flight recorder of a rank holds, as NCCL's writes it.

    `past`: so many times the first two steps were made before; the job is then as long as its rings are large.
    """
    made = [call for call in job.programs[rank] if call.enqueued]
    period = made[: 2 * len(job.programs[rank]) // job.shape.steps] if past else []
    offsets = Counter((call.group, call.p2p) for call in period)
    own = {name: told for name, told in job.groups.items() if rank in told[1]}
    numbers = {name: number for number, name in enumerate(own)}
    whole = [(call, turn) for turn in range(past) for call in period] + [(call, past) for call in made]
    first = max(0, len(whole) - ring)
    entries = [
        _entry(job, rank, number, call, numbers, turn * offsets[call.group, call.p2p])
        for number, (call, turn) in enumerate(whole[first:], first)
    ]
    status = {}
    for name, number in numbers.items():
        calls = [call for call in made if call.group == name and not call.p2p]
        if calls:
            before = past * offsets[name, False]
            status[str(number)] = {
                "last_enqueued_collective": before + calls[-1].seq,
                "last_started_collective": before + max((call.seq for call in calls if call.started), default=-1),
                "last_completed_collective": before + max((call.seq for call in calls if call.completed), default=-1),
            }
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": str(list(ranks))} for name, (desc, ranks) in own.items()
        },
        "pg_status": status,
        "entries": [entry for entry in entries if not active or entry["state"] != "completed"],
    }


def _entry(job: Job, rank: int, number: int, call: Call, numbers: dict[str, int], before: int) -> dict[str, Any]:
    desc, members = job.groups[call.group]
    op = call.op
    if call.p2p:
        op = f"{op} {members.index(rank)}{'->' if op == 'send' else '<-'}{members.index(call.peer)}"
    return {
        "record_id": number,
        "pg_id": numbers[call.group],
        "process_group": (call.group, desc),
        "thread_name": "python",
        "thread_id": "140624145636224",
        "collective_seq_id": 0 if call.p2p else before + call.seq,
        "p2p_seq_id": before + call.seq if call.p2p else 0,
        "op_id": before + call.seq,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": call.at,
        "input_sizes": call.sizes,
        "input_dtypes": [call.dtype],
        "output_sizes": call.outputs,
        "output_dtypes": [call.dtype],
        "state": "completed" if call.completed else "started" if call.started else "scheduled",
        "time_discovered_started_ns": call.at + 10_000 if call.started else None,
        "time_discovered_completed_ns": call.ended if call.completed else None,
        "retired": call.completed,
        "timeout_ms": 600_000,
        "is_p2p": call.p2p,
    }


def dumps(job: Job, ring: int = RING) -> dict[int, bytes]:
    """Rank -> its dump, of all that are not dead."""
    return {rank: pickle.dumps(dump(job, rank, ring), protocol=2) for rank in job.programs if rank not in job.dead}
