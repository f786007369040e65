"""NCCL in the ranks of a job, seen from outside: its RAS service, its settings, the flight recorder.

What RAS tells of other nodes is hearsay about the whole job, so nothing of it is more than a warning here: it says
where to look, and a rank of this node is named by its pid where RAS names it. Of a rank's environment, which is the one
it was started with, only the variables named here are ever kept.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

from diagnosis.health import Check, Reading, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import Moment, Place
from supervisor.node_health.network import listeners, ras
from supervisor.node_health.network.ras import Status, local_pids, parse

# fmt: off
ANSWER: Final = Check(id="nccl_ras", failure_class=FailureClass.NCCL_TIMEOUT, scope="job", when="periodic", looks=2,
    what="NCCL's RAS threads on this node do not answer: their processes are stopped or stuck",
    source="NCCL RAS (`NCCL_RAS_ADDR`, by default localhost:28028)",
    threshold="no greeting in four connections of 1.5 s each")
MISSING: Final = Check(id="nccl_ras_missing", failure_class=FailureClass.NCCL_TIMEOUT, scope="job",
    when="periodic", looks=2,
    what="processes of the job that RAS cannot reach or that do not answer it",
    source="NCCL RAS: DEAD, INCOMPLETE (asked on the node of rank 0)",
    threshold="any, two reports in a row")
ERROR: Final = Check(id="nccl_ras_error", failure_class=FailureClass.NCCL_NETWORK, scope="job", when="periodic",
    what="communicators with an error in one of their ranks",
    source="NCCL RAS: ERROR (asked on the node of rank 0)",
    threshold="any")
# each look compares two reports
SETTINGS: Final = Check(id="nccl_settings", failure_class=FailureClass.NCCL_SETUP, scope="node", when="periodic",
    what="settings of NCCL that name what this node lacks",
    source="/proc/PID/environ (variables of NCCL only), /proc/PID/net/dev, /sys/class/infiniband",
    threshold="an interface or RDMA device that is not there")
RECORDER: Final = Check(id="nccl_flight_recorder", failure_class=FailureClass.NCCL_SETUP, scope="node", when="periodic",
    what="torch's flight recorder is off: a hang leaves no trace",
    source="/proc/PID/environ (TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE)",
    threshold="a buffer of 0 entries")
# fmt: on
OF_REPORT: Final = (MISSING, ERROR)
CHECKS: Final = (ANSWER, *OF_REPORT, SETTINGS, RECORDER)
ASK_AGAIN_S: Final = 30.0
"""RAS is not asked more often, whoever looks."""
REPORT_S: Final = 15.0
"""Three legs of RAS's own timeout."""


# --- how NCCL is set up in a rank

KEYS: Final = frozenset(
    """
    NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_RAS_ADDR NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_SHM_DISABLE
    TORCH_FR_BUFFER_SIZE TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_DEBUG_INFO_PIPE_FILE
    """.split()
)
SLOW: Final = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE")
ENVIRON_LIMIT: Final = 1 << 20


@dataclasses.dataclass(frozen=True)
class RankNccl:
    rank: int
    pid: int
    settings: Mapping[str, str]
    uid: int = -1


def read_settings(place: Place, pid: int) -> dict[str, str] | None:
    """None when the process is gone or another user's."""
    text = place.text(f"proc/{pid}/environ", ENVIRON_LIMIT)
    if text is None:
        return None
    found = {}
    for entry in text.split("\0"):
        key, _, value = entry.partition("=")
        if key in KEYS:
            found[key] = clean_text(value, 500)
    return found


def read_rank(place: Place, rank: int, pid: int) -> RankNccl | None:
    """None when the process is gone or another user's."""
    settings = read_settings(place, pid)
    if settings is None:
        return None
    uid = re.search(r"^Uid:\s+(\d+)", place.text(f"proc/{pid}/status", 8192) or "", re.MULTILINE)
    return RankNccl(rank, pid, settings, int(uid[1]) if uid else -1)


def names_nothing(value: str, names: list[str]) -> list[str]:
    """Entries of `NCCL_SOCKET_IFNAME` or `NCCL_IB_HCA` that no name fits: prefixes, or with `=` whole names.

    With `^` the entries are left out, and may name what is not there.
    """
    if value.startswith("^"):
        return []
    whole, wanted = value.startswith("="), (entry.strip().partition(":")[0] for entry in value.lstrip("=").split(","))
    return [one for one in wanted if one and not any(name == one if whole else name.startswith(one) for name in names)]


def wrong_names(ranks: Iterable[RankNccl], interfaces: list[str], devices: list[str] | None) -> list[str]:
    """What is wrong, in words. `devices`: RDMA devices; None when they cannot be known."""
    wrong: dict[str, str] = {}
    for each in ranks:
        for variable, there, what in (
            ("NCCL_SOCKET_IFNAME", interfaces or None, "network interface"),
            ("NCCL_IB_HCA", devices, "RDMA device"),
        ):
            value = each.settings.get(variable, "")
            missing = names_nothing(value, there) if there is not None else []
            # Of several interfaces one is enough; a missing HCA is bandwidth that is missing.
            if missing and (variable == "NCCL_IB_HCA" or len(missing) == len(value.split(","))):
                text = clean_text(f"{variable}={value}: no {what} {', '.join(missing)} on this node", 300)
                wrong.setdefault(variable, text)
    return list(wrong.values())


def recorder_size(settings: Mapping[str, str]) -> int | None:
    """Entries of torch's flight recorder as it is set; None when it is left to torch (2000 since torch 2.8 or so)."""
    for key in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        if (value := settings.get(key, "")).strip().isdecimal():
            return int(value)
    return None


# --- judging


def judge_report(now: Status, own: frozenset[str]) -> list[Reading]:
    """`own`: addresses of this node; ranks on it are named by their pids."""
    if now.communicators and now.ending == now.communicators:
        return [healthy(check.id, text="the job's communicators are being finalized") for check in OF_REPORT]
    peers = [*now.peers.get("DEAD", ()), *now.peers.get("INCOMPLETE", ())]
    counts = ((now.dead, "cannot be reached"), (now.missing, "do not answer"))
    text = f"processes of the job: {', '.join(f'{count} {how}' for count, how in counts if count)}"
    if peers:
        text += ": " + ", ".join(f"process {peer.pid} on {peer.host}" for peer in peers[:4])
    lost = bool(now.dead or now.missing)
    text = clean_text(text, 300) if lost else f"all processes of {now.communicators} communicators answer"
    values = {"dead_processes": now.dead, "missing_processes": now.missing, "ras_timeouts": now.timeouts}
    pids = local_pids(peers, own)
    missing = judged(MISSING.id, "warning" if lost else None, text, values=values, pids=pids)
    if not now.errors:
        return [missing, healthy(ERROR.id, text="no communicator has an error")]
    what, peer = now.errors[0]
    where = f" (rank {peer.rank}, process {peer.pid} on {peer.host})" if peer else ""
    text = f"NCCL reports: {what}{where}" + f", and {len(now.errors) - 1} more" * (len(now.errors) > 1)
    pids = local_pids([peer for _, peer in now.errors if peer], own)
    return [missing, unhealthy(ERROR.id, text, level="warning", pids=pids)]


class NcclProbe:
    name = "nccl"
    checks = CHECKS
    every_s = 60.0
    deadline_s = 40.0

    def __init__(self, greeting_s: float = ras.GREETING_S) -> None:
        self._greeting_s = greeting_s
        self._forget()

    def _forget(self) -> None:
        self._ranks: dict[int, RankNccl] = {}
        """Pid -> what was read of it: once, for what it was started with does not change."""
        self._asked_at: float | None = None
        self._said: list[Reading] = []

    def look(self, place: Place, now: Moment) -> list[Reading]:
        if not place.job.ranks:
            self._forget()
            return [not_applicable(check.id, "no rank of a job here") for check in CHECKS]
        hidden = self._read(place)
        ranks = sorted(self._ranks.values(), key=lambda each: each.rank)
        if not ranks:
            why = "only the user of the job or root can read its ranks" if hidden else "the ranks are gone"
            return [unknown(check.id, why) for check in CHECKS]
        readings = self._ras(place, now, ranks)
        if not place.names("proc/driver/nvidia/gpus"):
            return readings + [not_applicable(check.id, "no NVIDIA GPU here") for check in (SETTINGS, RECORDER)]
        return [*readings, _judge_settings(place, ranks), _judge_recorder(ranks)]

    def _read(self, place: Place) -> bool:
        """Read the ranks that are new; whether there are any that cannot be read."""
        wanted = place.job.ranks
        self._ranks = {pid: each for pid, each in self._ranks.items() if pid in wanted}
        hidden = False
        for pid, rank in wanted.items():
            if pid in self._ranks:
                continue
            if (found := read_rank(place, rank, pid)) is not None:
                self._ranks[pid] = found
            else:
                hidden = hidden or place.denied(f"proc/{pid}/environ")
        return hidden

    def _ras(self, place: Place, now: Moment, ranks: list[RankNccl]) -> list[Reading]:
        if self._asked_at is not None and now.mono - self._asked_at < ASK_AGAIN_S:
            return self._said
        first = ranks[0]
        port = ras.port_of(first.settings.get("NCCL_RAS_ADDR", ""))
        elsewhere = not place.live or place.link("proc/self/ns/net") != place.link(f"proc/{first.pid}/ns/net")
        listener = _listener(place, first.pid, port, elsewhere=elsewhere)
        everything = (ANSWER, *OF_REPORT)
        if listener is None or listener[1] != first.uid:
            self._asked_at = None
            why = f"another user's process listens on port {port}"
            if listener is None:
                why = f"no rank listens on port {port}: NCCL is older than 2.24, RAS is off, or it has not begun yet"
            return [not_applicable(check.id, why) for check in everything]
        if not place.live:
            return [unknown(check.id, "RAS of a captured tree cannot be asked") for check in everything]
        if elsewhere:
            return [unknown(check.id, "the ranks have a network of their own") for check in everything]
        self._asked_at = now.mono
        self._said = self._ask(place, listener[0], port, whole=first.rank == 0 or _asked_for(place))
        return self._said

    def _ask(self, place: Place, host: str, port: int, *, whole: bool) -> list[Reading]:
        elsewhere = "RAS is asked about the whole job on the node of rank 0"
        try:
            report, silent = ras.ask(host, port, REPORT_S, status=whole, greeting_s=self._greeting_s)
        except ras.Refused:
            return [not_applicable(check.id, f"nobody listens on port {port}") for check in (ANSWER, *OF_REPORT)]
        except ras.NoAnswerError as error:
            why = clean_text(f"NCCL RAS on port {port}: {error}", 200)
            other = [unknown(check.id, why) if whole else not_applicable(check.id, elsewhere) for check in OF_REPORT]
            stuck = "does not answer" in why or "in time" in why
            return [unhealthy(ANSWER.id, why, level="warning") if stuck else unknown(ANSWER.id, why), *other]
        text = f"NCCL RAS answers on port {port}" + f" after {silent} silent connections" * bool(silent)
        answered = healthy(ANSWER.id, text=text, values={"silent_connections": silent})
        if not whole:
            return [answered, *(not_applicable(check.id, elsewhere) for check in OF_REPORT)]
        status = parse(report)
        if not status.is_report:
            return [answered, *(unknown(check.id, "RAS did not send a report") for check in OF_REPORT)]
        return [answered, *judge_report(status, ras.local_addresses(place))]


def _listener(place: Place, pid: int, port: int, *, elsewhere: bool) -> tuple[str, int] | None:
    """Address and user of who listens in the network namespace of `pid`; `elsewhere`: it is not ours."""
    if not elsewhere:
        try:
            return ras.reachable(listeners.listener(port))
        except OSError:
            pass
    net = f"proc/{pid}/net"
    return ras.find_listener(place.text(f"{net}/tcp") or "", place.text(f"{net}/tcp6") or "", port)


def _judge_settings(place: Place, ranks: list[RankNccl]) -> Reading:
    lines = (place.text(f"proc/{ranks[0].pid}/net/dev") or "").splitlines()
    interfaces = [line.partition(":")[0].strip() for line in lines if ":" in line]
    known = place.live or place.path("sys/class/infiniband").is_dir()
    devices = place.names("sys/class/infiniband") if known else None
    wrong = wrong_names(ranks, interfaces, devices)
    return judged(SETTINGS.id, "warning" if wrong else None, "; ".join(wrong) or _summary(ranks[0]))


def _judge_recorder(ranks: list[RankNccl]) -> Reading:
    sizes = [recorder_size(each.settings) for each in ranks]
    if 0 in sizes:
        return unhealthy(RECORDER.id, "torch's flight recorder is off: a hang leaves no trace", level="warning")
    pipes = sum("TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in each.settings for each in ranks)
    kept = "as many entries as torch likes" if sizes[0] is None else f"{sizes[0]} entries"
    text = f"the flight recorder keeps {kept}; {pipes} pipes to have it dumped"
    return healthy(RECORDER.id, text=text, values={"pipes": pipes})


def _asked_for(place: Place) -> bool:
    """Whether somebody named one of the checks that need a report."""
    return any(fnmatchcase(check.id, pattern) for check in OF_REPORT for pattern in place.only)


def _summary(each: RankNccl) -> str:
    level = each.settings.get("NCCL_DEBUG", "")
    text = f"NCCL_DEBUG={level}" if level else "NCCL_DEBUG is not set: NCCL keeps its warnings to itself"
    slow = [f"{key}=1" for key in SLOW if each.settings.get(key) == "1"]
    return clean_text(", ".join([text, *slow]), 200)
