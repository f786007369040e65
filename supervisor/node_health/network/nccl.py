"""NCCL in the ranks of a job, seen from outside: its settings and the flight recorder.

Of a rank's environment, which is the one it was started with, only the variables named here are ever kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final

from diagnosis.health import Check, CheckResult, healthy, judged, not_applicable, unhealthy, unknown
from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass
from supervisor.node_health.contract import Moment, ProbeContext

# fmt: off
SETTINGS: Final = Check(id="nccl_settings", failure_class=FailureClass.NCCL_SETUP, scope="node", when="periodic",
    what="settings of NCCL that name what this node lacks",
    source="/proc/PID/environ (variables of NCCL only), /proc/PID/net/dev, /sys/class/infiniband",
    threshold="an interface or RDMA device that is not there")
RECORDER: Final = Check(id="nccl_flight_recorder", failure_class=FailureClass.NCCL_SETUP, scope="node", when="periodic",
    what="torch's flight recorder is off: a hang leaves no trace",
    source="/proc/PID/environ (TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE)",
    threshold="a buffer of 0 entries")
# fmt: on
CHECKS: Final = (SETTINGS, RECORDER)


# --- how NCCL is set up in a rank

KEYS: Final = frozenset(
    """
    NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_SHM_DISABLE
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


def read_settings(place: ProbeContext, pid: int) -> dict[str, str] | None:
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


class NcclProbe:
    name = "nccl"
    checks = CHECKS
    every_s = 60.0
    deadline_s = 10.0
    once_s = 5.0

    def __init__(self) -> None:
        self._ranks: dict[int, RankNccl] = {}
        """Pid -> what was read of it: once, for what it was started with does not change."""

    def look(self, place: ProbeContext, now: Moment) -> list[CheckResult]:  # noqa: ARG002
        if not place.job.ranks:
            self._ranks = {}
            return [not_applicable(check.id, "no rank of a job here") for check in CHECKS]
        hidden = self._read(place)
        ranks = sorted(self._ranks.values(), key=lambda each: each.rank)
        if not ranks:
            why = "only the user of the job or root can read its ranks" if hidden else "the ranks are gone"
            return [unknown(check.id, why) for check in CHECKS]
        if not place.names("proc/driver/nvidia/gpus"):
            return [not_applicable(check.id, "no NVIDIA GPU here") for check in CHECKS]
        return [_judge_settings(place, ranks), _judge_recorder(ranks)]

    def _read(self, place: ProbeContext) -> bool:
        """Read the ranks that are new; whether there are any that cannot be read."""
        wanted = place.job.ranks
        self._ranks = {pid: each for pid, each in self._ranks.items() if pid in wanted}
        hidden = False
        for pid, rank in wanted.items():
            if pid in self._ranks:
                continue
            if (settings := read_settings(place, pid)) is not None:
                self._ranks[pid] = RankNccl(rank, pid, settings)
            else:
                hidden = hidden or place.denied(f"proc/{pid}/environ")
        return hidden


def _judge_settings(place: ProbeContext, ranks: list[RankNccl]) -> CheckResult:
    lines = (place.text(f"proc/{ranks[0].pid}/net/dev") or "").splitlines()
    interfaces = [line.partition(":")[0].strip() for line in lines if ":" in line]
    known = place.live or place.path("sys/class/infiniband").is_dir()
    devices = place.names("sys/class/infiniband") if known else None
    wrong = wrong_names(ranks, interfaces, devices)
    return judged(SETTINGS.id, "warning" if wrong else None, "; ".join(wrong) or _summary(ranks[0]))


def _judge_recorder(ranks: list[RankNccl]) -> CheckResult:
    sizes = [recorder_size(each.settings) for each in ranks]
    if 0 in sizes:
        return unhealthy(RECORDER.id, "torch's flight recorder is off: a hang leaves no trace", level="warning")
    pipes = sum("TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in each.settings for each in ranks)
    kept = "as many entries as torch likes" if sizes[0] is None else f"{sizes[0]} entries"
    text = f"the flight recorder keeps {kept}; {pipes} pipes to have it dumped"
    return healthy(RECORDER.id, text=text, values={"pipes": pipes})


def _summary(each: RankNccl) -> str:
    level = each.settings.get("NCCL_DEBUG", "")
    text = f"NCCL_DEBUG={level}" if level else "NCCL_DEBUG is not set: NCCL keeps its warnings to itself"
    slow = [f"{key}=1" for key in SLOW if each.settings.get(key) == "1"]
    return clean_text(", ".join([text, *slow]), 200)
