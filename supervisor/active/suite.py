"""What the suite consists of, how long each part may take, and what the children's reports say. Pure but for `run_*`.

Quick: within a minute altogether. Full: within ten. Both are told beforehand, and kept: a part for which no time is
left is not begun, and said to be unknown.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from diagnosis.signals import clean_line
from recovery.active_verdicts import LESS_IS_BETTER, Figure, judge, to_repeat
from recovery.group_tests import BUSY as BUSY_SHARE
from recovery.group_tests import GroupPart
from recovery.ledger import TestResult
from supervisor.active.children import ChildReport, WarmParent, run_children
from supervisor.errors import ActiveTestsImpossible, CheckRefused
from supervisor.node_health.check import Options, answer, table

MEMORY_BYTES: Final = 16 << 30
"""Of one child: pinned memory, and what CUDA keeps on the host."""
CPU_THREADS: Final = 4


class Suite(NamedTuple):
    """Seconds. `*_s`: how long a child may take. `*_share_s`: how long one measurement is to take."""

    name: str
    whole_s: float
    look_s: float
    node_s: float
    node_share_s: float
    group_s: float
    group_share_s: float
    join_s: float
    """How long ranks wait for each other: some import torch more slowly."""
    collective_s: float
    """A collective that takes longer has failed."""


SUITES: Final = {
    "quick": Suite("quick", 60.0, 40.0, 25.0, 0.3, 15.0, 0.15, 9.0, 5.0),
    "full": Suite("full", 600.0, 60.0, 180.0, 3.0, 60.0, 1.0, 30.0, 20.0),
}


class Devices(NamedTuple):
    """What there is to be tested on a node."""

    devices: tuple[str, ...]
    kind: str


class ActiveSetup(NamedTuple):
    """With what the tests of this node are run."""

    node: str
    python: str
    """The training environment's."""
    environment: Mapping[str, str]
    cwd: Path
    products: tuple[dict[str, Any], ...] = ()
    """The job's own (`supervisor.active.shapes`)."""
    warm: WarmParent | None = None
    """Has imported torch, and forks the children."""
    leader: int = -1
    """The connection to who asked for the tests; there is nobody to be told once it is gone."""

    def run(
        self, orders: Sequence[Mapping[str, Any]], deadline_s: float, *, group: bool = False, listen: int = -1
    ) -> tuple[ChildReport, ...]:
        """Blocks. Raises ActiveTestsImpossible."""
        try:
            return run_children(
                self.python,
                orders,
                deadline_s,
                environment=self.environment,
                memory_bytes=MEMORY_BYTES,
                cwd=self.cwd,
                inherited=(listen,) if listen >= 0 else (),
                together=group,
                warm=self.warm,
                until=self.leader,
            )
        except OSError as error:
            raise ActiveTestsImpossible(f"no test can be started with {self.python}: {error}") from None


@contextlib.contextmanager
def warmed(bench: ActiveSetup, suite: Suite) -> Iterator[ActiveSetup]:
    """With a parent that has imported torch, if children may be forked from it. Blocks.

    Raises ActiveTestsImpossible.
    """
    try:
        warm = WarmParent(bench.python, bench.environment, bench.cwd)
    except OSError as error:
        raise ActiveTestsImpossible(f"no test can be started with {bench.python}: {error}") from None
    try:
        yield bench if warm.ready(suite.look_s) else bench._replace(warm=warm)
    except TimeoutError:
        raise ActiveTestsImpossible(
            f"{bench.python} has not imported torch within {suite.look_s:.0f} s: nothing was tested"
        ) from None
    finally:
        warm.close()


def find_devices(bench: ActiveSetup, suite: Suite) -> Devices:
    """Blocks. Raises ActiveTestsImpossible."""
    (report,) = bench.run([{"do": "look"}], suite.look_s)
    found = next((line.get("devices") for line in report.lines if isinstance(line.get("devices"), list)), None)
    if not found:
        why = report.hung or report.died or "it named no device"
        raise ActiveTestsImpossible(f"{bench.python} cannot tell which devices there are: {why}")
    return Devices(tuple(clean_line(str(one), 20) for one in found[:64]), report.kind)


# ----- a node -----


def run_node(bench: ActiveSetup, devices: Devices, suite: Suite, tests: Sequence[str] = ()) -> list[Figure]:
    """Every device of the node at the same time; then copies between GPUs. `tests`: only these. Blocks."""
    busy: dict[str, str] = {}
    with contextlib.suppress(ActiveTestsImpossible):  # a driver that has begun to hang shows in the tests
        busy = busy_gpus() if devices.devices != ("cpu",) else {}
    started = time.monotonic()
    order = {
        "do": "node",
        "suite": suite.name,
        "deadline_s": suite.node_s,
        "share_s": suite.node_share_s,
        "threads": threads(devices),
    }
    order |= {"tests": list(tests), "products": list(bench.products)}
    orders = [{**order, "device": device} for device in devices.devices]
    figures = figures_of(bench.node, bench.run(orders, suite.node_s), time.time())
    left_s = suite.node_s - (time.monotonic() - started)
    if len(devices.devices) > 1 and left_s > 5.0 and (not tests or PEERS in tests):
        figures += figures_of(bench.node, bench.run([{"do": "peers"}], left_s), time.time(), PEERS)
    return mark_busy(figures, busy)


def run_alone(
    bench: ActiveSetup,
    devices: Devices,
    suite: Suite,
    families: Sequence[str] | None = None,
    *,
    earlier: Sequence[Figure] = (),
    floors: Mapping[str, float] | None = None,
) -> tuple[TestResult, ...]:
    """The node's devices, compared with each other and with what other nodes gave before. Blocks.

    `families`: of `NODE_FAMILIES`; None: all.
    """
    started = time.monotonic()
    wanted = list(NODE_FAMILIES) if families is None else list(families)
    figures = run_node(bench, devices, suite, wanted) if wanted else []
    others = [one for one in earlier if one.node != bench.node]
    results = judge(figures, earlier=others, floors=floors)
    repeat = sorted({family for _, _, test in to_repeat(results, figures) for family in families_of(test)})
    if repeat and suite.whole_s - (time.monotonic() - started) >= suite.node_s:
        again = run_node(bench, devices, suite, repeat)
        results = judge(figures, earlier=others, again=again, floors=floors)
    return results


BUSY: Final = ("gpu_processes_foreign", "gpu_memory_zombie")
"""Checks (docs/checks.md)."""
BUSY_S: Final = 10.0


def busy_gpus() -> dict[str, str]:
    """GPU -> who else uses it, in words. Blocks. Raises ActiveTestsImpossible where the driver does not say."""
    try:
        answered = answer(table(), Options(only=BUSY, preflight=True, fresh=True, timeout_s=BUSY_S))
    except (CheckRefused, OSError):
        return {}
    if answered.flaws:
        raise ActiveTestsImpossible(f"it is not known who uses the GPUs ({clean_line(answered.flaws[0], 200)})")
    found = [one.check_state for one in answered.seen if one.check_state.status == "unhealthy"]
    return {one.result.gpu_uuid: clean_line(one.result.text, 200) for one in found if one.result.gpu_uuid}


def mark_busy(figures: Sequence[Figure], busy: Mapping[str, str]) -> list[Figure]:
    """What a GPU gave while others used it says nothing of its speed; wrong data is wrong all the same."""
    return [
        replace(one, unfinished=f"others use the GPU: {busy[one.gpu]}") if one.gpu in busy and not one.digest else one
        for one in figures
    ]


PEERS: Final = "peer_copy"


def threads(devices: Devices) -> int:
    """Of one child's computing on the CPU. One where the CPU itself is tried: more would measure its other users."""
    return 1 if devices.devices == ("cpu",) else min(CPU_THREADS, os.cpu_count() or 1)


NODE_FAMILIES: Final = ("matmul", "memory_copy", "memory_patterns", "host_copies", "training_bits", PEERS, "replay")
"""What a child can be asked for."""
_STARTS: Final = {"replay_": "replay", "copy_": "host_copies", "matmul_": "matmul", f"{PEERS}_": PEERS}


def families_of(test: str) -> tuple[str, ...]:
    """What a child is to be asked for, to have this test repeated. One that hung: everything."""
    if test in NODE_FAMILIES:
        return (test,)
    return next(((family,) for start, family in _STARTS.items() if test.startswith(start)), NODE_FAMILIES)


def figures_of(node: str, reports: Sequence[ChildReport], at: float, part: str = "device") -> list[Figure]:
    """The figures of one node's children."""
    return [figure for report in reports for figure in _figures(node, report, at, part)]


def _figures(node: str, report: ChildReport, at: float, part: str) -> list[Figure]:
    gpu = report.uuid or (report.device if report.device != "cpu" else "")
    base = Figure(
        node=node,
        gpu=clean_line(gpu, 80),
        kind=clean_line(report.kind, 200),
        at=at,
        test=part,
        took_s=report.took_s,
        waited=report.waited,
        throttled=report.throttled,
    )
    found = [
        replace(
            base,
            gpu=clean_line(str(line.get("uuid") or base.gpu), 80),
            test=clean_line(str(line["test"]), 80),
            value=_typical(line, report),
            unit=clean_line(str(line.get("unit", "")), 20),
            digest=clean_line(str(line.get("digest", "")), 80),
            unfinished=clean_line(str(line.get("unfinished", "")), 300),
            fault="" if line.get("ok") else clean_line(str(line.get("why", "it did not do well")), 300),
            seconds=number_of(line.get("seconds")),
        )
        for line in report.lines
        if isinstance(line.get("test"), str)
    ]
    why = report.hung or report.died
    if report.began and report.hung:
        found.append(replace(base, hung=why))
    elif report.began and any(word in why for word in FAULTS):
        found.append(replace(base, fault=why))
    elif report.began and any(word in why for word in CRASHES):
        found.append(replace(base, crashed=why))
    elif why:
        found.append(replace(base, unfinished=why))
    return found


FAULTS: Final = ("CUDA error: uncorrectable",)
"""Words of errors that say themselves that the device is broken."""
CRASHES: Final = (
    "CUDA error: unspecified launch", "CUDA error: an illegal", "CUDA error: misaligned", "CUDA error: unknown",
    "CUDA error: hardware", "CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_INTERNAL_ERROR", "SIGSEGV", "SIGBUS",
)  # fmt: skip
"""Words of errors that a broken device causes, and software that does not fit: they count where others of the kind do
well. Other errors, such as no memory left, say nothing of the device."""


def _typical(line: Mapping[str, Any], report: ChildReport) -> float | None:
    """Of several repetitions the median. On a CPU the best: others use it, too, and that is no fault of it. Where a
    quota slows the node itself, what all of them together give: a short one may have fitted into what was left of it.
    """
    values = line.get("values")
    if not isinstance(values, list):
        return None
    found = [number for value in values[:1000] if (number := number_of(value)) > 0.0]
    if not found:
        return None
    less = line.get("unit") in LESS_IS_BETTER
    if report.throttled >= BUSY_SHARE:
        return statistics.fmean(found) if less else statistics.harmonic_mean(found)
    if report.kind.endswith(" CPU"):
        return min(found) if less else max(found)
    return statistics.median(found)


def number_of(value: object) -> float:
    """0 for what is no finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e30:
        return 0.0
    return float(value)


# ----- a group -----


class GroupOrder(NamedTuple):
    """One node's part in a group's test."""

    first_rank: int
    world: int
    host: str
    """Where rank 0 keeps the store."""
    port: int
    listen: int = -1
    """Descriptor on which rank 0 listens; -1: on another node."""
    collectives: tuple[dict[str, Any], ...] = ()
    """The job's own (`supervisor.active.shapes`)."""


def run_group(bench: ActiveSetup, devices: Devices, suite: Suite, order: GroupOrder) -> tuple[ChildReport, ...]:
    """Blocks."""
    orders = []
    for number, device in enumerate(devices.devices):
        rank = order.first_rank + number
        orders.append(
            {
                "do": "group",
                "device": device,
                "threads": threads(devices),
                "rank": rank,
                "world": order.world,
                "host": order.host,
                "port": order.port,
                "timeout_s": suite.collective_s,
                "deadline_s": suite.group_s,
                "join_s": suite.join_s,
                "share_s": suite.group_share_s,
                "collectives": list(order.collectives),
                **({"listen": order.listen} if rank == 0 and order.listen >= 0 else {}),
            }
        )
    return bench.run(orders, suite.group_s, group=True, listen=order.listen)


def part_of(reports: Sequence[ChildReport]) -> GroupPart:
    """What one node's children say of their group."""
    if unknown := next((f"{one.device}: {why}" for one in reports if (why := _not_its_fault(one))), ""):
        return GroupPart(unknown=clean_line(unknown, 400))
    seconds: dict[str, float] = {}
    for report in reports:
        for line in report.lines:
            value = _typical(line, report)
            if isinstance(line.get("test"), str) and line.get("unit") == "s" and value is not None:
                test = clean_line(line["test"], 80)
                seconds[test] = max(seconds.get(test, 0.0), value)
    return GroupPart(
        failed=clean_line("; ".join(why for one in reports if (why := _trouble(one))), 400),
        wrong=any(line.get("test") and not line.get("ok") for one in reports for line in one.lines),
        seconds=seconds,
        waited=max((one.waited for one in reports), default=0.0),
        throttled=max((one.throttled for one in reports), default=0.0),
        stalled_waited=max((one.stalled_waited if _joined(one) else 1.0 for one in reports), default=1.0),
    )


def _joined(report: ChildReport) -> bool:
    return any(line.get("joined") for line in report.lines)


NOT_ITS_FAULT: Final = ("out of memory", " MiB of memory", "killed by SIGKILL")
"""Words of errors that say nothing of a device or a network."""


def _not_its_fault(report: ChildReport) -> str:
    why = report.died or report.hung
    return why if not report.began or any(word in why for word in NOT_ITS_FAULT) else ""


def _trouble(report: ChildReport) -> str:
    wrong = next((line for line in report.lines if line.get("test") and not line.get("ok")), None)
    if wrong is not None:
        return f"{clean_line(str(wrong['test']), 80)}: {clean_line(str(wrong.get('why', 'wrong data')), 200)}"
    return report.died or report.hung
