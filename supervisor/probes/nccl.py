"""NCCL in the ranks of a job, seen from outside: its RAS service, its settings, its versions, the flight recorder.

What RAS tells of other nodes is hearsay about the whole job, so nothing of it is more than a warning here: it says
where to look, and a rank of this node is named by its pid where RAS names it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from diagnosis.health import Check, Reading, healthy, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.probes import nccl_settings, ras
from supervisor.probes.nccl_settings import RankNccl
from supervisor.probes.pcie import tally
from supervisor.probes.probe import Moment, Place
from supervisor.probes.ras_report import Lag, Status, lags, local_pids, parse

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
LAGGING: Final = Check(id="nccl_ras_lagging", failure_class=FailureClass.NCCL_TIMEOUT, scope="job",
    when="periodic", looks=2,
    what="ranks that launch no more collectives while the others of their communicator are ahead",
    source="NCCL RAS: MISMATCH (asked on the node of rank 0)",
    threshold="the same count, behind the others, in three reports in a row")
SETTINGS: Final = Check(id="nccl_settings", failure_class=FailureClass.NCCL_SETUP, scope="node", when="periodic",
    what="settings of NCCL that name what this node lacks, or that differ between its ranks",
    source="/proc/PID/environ (variables of NCCL only), /proc/PID/net/dev, /sys/class/infiniband",
    threshold="an interface or RDMA device that is not there; one of the settings that must agree does not")
VERSION: Final = Check(id="nccl_version", failure_class=FailureClass.NCCL_SETUP, scope="node", when="periodic",
    what="ranks of this node that run different versions of NCCL, or one that has two",
    source="/proc/PID/maps",
    threshold="more than one library")
RECORDER: Final = Check(id="nccl_flight_recorder", failure_class=FailureClass.NCCL_SETUP, scope="node", when="periodic",
    what="torch's flight recorder is off, or has nowhere to dump to",
    source="/proc/PID/environ (TORCH_FR_*, TORCH_NCCL_*)",
    threshold="a buffer of 0 entries, or a folder that is not there")
# fmt: on
OF_REPORT: Final = (MISSING, ERROR, LAGGING)
CHECKS: Final = (ANSWER, *OF_REPORT, SETTINGS, VERSION, RECORDER)
ASK_AGAIN_S: Final = 30.0
"""RAS is not asked more often, whoever looks."""
REPORT_S: Final = 15.0
"""Three legs of RAS's own timeout."""
LIBRARY_LOOKS: Final = 5
"""So many looks are given to a rank to load NCCL."""


def judge_report(now: Status, before: Status | None, own: frozenset[str]) -> list[Reading]:
    """`own`: addresses of this node; ranks on it are named by their pids."""
    if now.communicators and now.ending == now.communicators:
        why = "the job's communicators are being finalized"
        return [healthy(check.id, text=why) for check in OF_REPORT]
    values = {
        "communicators": float(now.communicators),
        "dead_processes": float(now.dead),
        "missing_processes": float(now.missing),
        "ras_timeouts": float(now.timeouts),
    }
    return [
        _judge_missing(now, values, own),
        _judge_errors(now, own),
        _judge_lags(lags(before, now) if before is not None else [], own),
    ]


def _judge_missing(now: Status, values: dict[str, float], own: frozenset[str]) -> Reading:
    if not now.dead and not now.missing:
        return healthy(MISSING.id, text=f"all processes of {now.communicators} communicators answer", values=values)
    peers = now.peers.get("DEAD", []) + now.peers.get("INCOMPLETE", [])
    named = ", ".join(f"process {peer.pid} on {peer.host}" for peer in peers[:4])
    parts = [
        f"{count} {how}" for count, how in ((now.dead, "cannot be reached"), (now.missing, "do not answer")) if count
    ]
    text = f"processes of the job: {', '.join(parts)}{': ' * bool(named)}{named}"
    return unhealthy(MISSING.id, clean_text(text, 300), level="warning", values=values, pids=local_pids(peers, own))


def _judge_errors(now: Status, own: frozenset[str]) -> Reading:
    if not now.errors:
        return healthy(ERROR.id, text="no communicator has an error")
    text, peer = now.errors[0]
    where = f" (rank {peer.rank}, process {peer.pid} on {peer.host})" if peer else ""
    more = f", and {len(now.errors) - 1} more" if len(now.errors) > 1 else ""
    peers = [peer for _, peer in now.errors if peer]
    return unhealthy(ERROR.id, f"NCCL reports: {text}{where}{more}", level="warning", pids=local_pids(peers, own))


def _judge_lags(found: list[Lag], own: frozenset[str]) -> Reading:
    if not found:
        return healthy(LAGGING.id, text="no rank stands still behind the others")
    worst = found[0]
    named = ", ".join(f"rank {peer.rank} on {peer.host}" for peer in worst.peers[:4]) or f"{worst.ranks} ranks"
    text = (
        f"{named} launched {worst.operation} {worst.launched} times and no more, others {worst.ahead} times"
        f" (communicator {worst.communicator})"
    )
    values = {"launched": float(worst.launched), "ahead": float(worst.ahead), "lags": float(len(found))}
    pids = local_pids([peer for lag in found for peer in lag.peers], own)
    return unhealthy(LAGGING.id, clean_text(text, 300), level="warning", values=values, pids=pids)


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
        self._looks: dict[int, int] = {}
        self._spoken: set[str] = set()
        self._lacks: dict[tuple[int, str], bool] = {}
        self._with_pipe: set[int] = set()
        self._status: Status | None = None
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
        return self._ras(place, now, ranks) + self._set_up(place, ranks)

    def _read(self, place: Place) -> bool:
        """Read the ranks that are new; whether there are any that cannot be read."""
        wanted = place.job.ranks
        self._ranks = {pid: each for pid, each in self._ranks.items() if pid in wanted}
        self._looks = {pid: looks for pid, looks in self._looks.items() if pid in wanted}
        hidden = False
        for pid, rank in wanted.items():
            known = self._ranks.get(pid)
            looks = self._looks.get(pid, 0)
            if known is not None and (known.libraries or looks >= LIBRARY_LOOKS):
                continue
            self._looks[pid] = looks + 1
            if (found := nccl_settings.read_rank(place, rank, pid)) is not None:
                self._ranks[pid] = found
            else:
                hidden = hidden or place.denied(f"proc/{pid}/environ")
        return hidden

    def _ras(self, place: Place, now: Moment, ranks: list[RankNccl]) -> list[Reading]:
        if self._asked_at is not None and now.mono - self._asked_at < ASK_AGAIN_S:
            return self._said
        first = ranks[0]
        port = ras.port_of(first.settings.get("NCCL_RAS_ADDR", ""))
        own_net = f"proc/{first.pid}/net"  # of its network namespace
        listener = ras.find_listener(place.text(f"{own_net}/tcp") or "", place.text(f"{own_net}/tcp6") or "", port)
        everything = (ANSWER, *OF_REPORT)
        if listener is None or listener.uid != first.uid:
            self._status, self._asked_at = None, None
            why = (
                f"no rank listens on port {port}: NCCL is older than 2.24, RAS is off, or no communicator is there yet"
            )
            if listener is not None:
                why = f"another user's process listens on port {port}"
            return [not_applicable(check.id, why) for check in everything]
        if not place.live:
            return [unknown(check.id, "RAS of a captured tree cannot be asked") for check in everything]
        if place.link("proc/self/ns/net") != place.link(f"proc/{first.pid}/ns/net"):
            return [unknown(check.id, "the ranks have a network of their own") for check in everything]
        self._asked_at = now.mono
        self._said = self._ask(place, listener.host, port, whole=first.rank == 0 or _asked_for(place))
        return self._said

    def _ask(self, place: Place, host: str, port: int, *, whole: bool) -> list[Reading]:
        elsewhere = "RAS is asked about the whole job on the node of rank 0"
        try:
            answer = ras.ask(host, port, REPORT_S, status=whole, greeting_s=self._greeting_s)
        except ras.Refused:
            return [not_applicable(check.id, f"nobody listens on port {port}") for check in (ANSWER, *OF_REPORT)]
        except ras.NoAnswerError as error:
            why = clean_text(f"NCCL RAS on port {port}: {error}", 200)
            other = [unknown(check.id, why) if whole else not_applicable(check.id, elsewhere) for check in OF_REPORT]
            stuck = "does not answer" in why or "in time" in why
            return [unhealthy(ANSWER.id, why, level="warning") if stuck else unknown(ANSWER.id, why), *other]
        text = f"NCCL RAS answers on port {port}" + f" after {answer.silent} silent connections" * bool(answer.silent)
        answered = healthy(ANSWER.id, text=text, values={"silent_connections": float(answer.silent)})
        if not whole:
            return [answered, *(not_applicable(check.id, elsewhere) for check in OF_REPORT)]
        status = parse(answer.report)
        if not status.is_report:
            return [answered, *(unknown(check.id, "RAS did not send a report") for check in OF_REPORT)]
        before, self._status = self._status, status
        return [answered, *judge_report(status, before, ras.local_addresses(place))]

    def _set_up(self, place: Place, ranks: list[RankNccl]) -> list[Reading]:
        using = [each for each in ranks if each.libraries]
        if not using:
            return [not_applicable(check.id, "no rank here has loaded NCCL") for check in (SETTINGS, VERSION, RECORDER)]
        return [*self._settings(place, using), self._version(place, using), self._recorder(place, using)]

    def _settings(self, place: Place, ranks: list[RankNccl]) -> list[Reading]:
        interfaces = [
            line.partition(":")[0].strip()
            for line in (place.text(f"proc/{ranks[0].pid}/net/dev") or "").splitlines()
            if ":" in line
        ]
        known = place.live or place.path("sys/class/infiniband").is_dir()
        devices = place.names("sys/class/infiniband") if known else None
        wrong = {**nccl_settings.judge_names(ranks, interfaces, devices), **nccl_settings.judge_agreement(ranks)}
        bad = {key: unhealthy(SETTINGS.id, text, key, "warning") for key, text in wrong.items()}
        readings = tally(SETTINGS, bad, len(nccl_settings.KEYS), "settings fit this node", self._spoken)
        if not bad:
            readings[-1] = healthy(SETTINGS.id, text=_summary(ranks[0]))
        return readings

    def _version(self, place: Place, ranks: list[RankNccl]) -> Reading:
        libraries = sorted({library for each in ranks for library in each.libraries})
        versions = {library: nccl_settings.version_of(place, library) or "version not told" for library in libraries}
        said = "; ".join(f"{version} ({library})" for library, version in versions.items())
        if len(libraries) > 1 and (len(set(versions.values())) > 1 or "version not told" in versions.values()):
            return unhealthy(VERSION.id, clean_text(f"NCCL of the ranks here: {said}", 300), level="warning")
        return healthy(VERSION.id, text=clean_text(f"NCCL {said}", 300))

    def _recorder(self, place: Place, ranks: list[RankNccl]) -> Reading:
        off = [each.rank for each in ranks if nccl_settings.recorder_size(each.settings) == 0]
        if off:
            return unhealthy(RECORDER.id, "torch's flight recorder is off: a hang leaves no trace", level="warning")
        for each in ranks:
            folder = nccl_settings.dump_folder(each.settings)
            if folder and self._lacks_folder(place, each.pid, folder):
                text = clean_text(f"torch cannot dump the flight recorder: there is no folder {folder}", 300)
                return unhealthy(RECORDER.id, text, level="warning")
        for each in ranks:
            if each.pid not in self._with_pipe and nccl_settings.has_pipe(place, each):
                self._with_pipe.add(each.pid)
        pipes = len(self._with_pipe & {each.pid for each in ranks})
        size = nccl_settings.recorder_size(ranks[0].settings)
        text = f"the flight recorder keeps {'as many entries as torch likes' if size is None else f'{size} entries'}"
        return healthy(RECORDER.id, text=f"{text}; {pipes} pipes to have it dumped", values={"pipes": float(pipes)})

    def _lacks_folder(self, place: Place, pid: int, folder: str) -> bool:
        """Asked once of a rank: the folder may lie on a file system that hangs later."""
        if (pid, folder) not in self._lacks:
            self._lacks[pid, folder] = nccl_settings.lacks_folder(place, pid, folder)
        return self._lacks[pid, folder]


def _asked_for(place: Place) -> bool:
    """Whether somebody named one of the checks that need a report."""
    return any(fnmatchcase(check.id, pattern) for check in OF_REPORT for pattern in place.only)


def _summary(each: RankNccl) -> str:
    level = each.settings.get("NCCL_DEBUG", "")
    text = f"NCCL_DEBUG={level}" if level else "NCCL_DEBUG is not set: NCCL keeps its warnings to itself"
    slow = [f"{key}=1" for key in nccl_settings.SLOW if each.settings.get(key) == "1"]
    return clean_text(", ".join([text, *slow]), 200)
