"""How NCCL is set up in the ranks of a job, read from outside: their environment and the libraries they have mapped.

Of an environment only the variables named here are ever kept. It is the one a process was started with: what a script
sets later for itself cannot be seen.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Iterable, Mapping
from typing import Final

from diagnosis.signals import clean_text
from supervisor.probes.probe import Place

KEYS: Final = frozenset(
    """
    NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_RAS_ADDR NCCL_ALGO NCCL_PROTO NCCL_NET NCCL_IB_DISABLE
    NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_NVLS_ENABLE NCCL_NET_GDR_LEVEL NCCL_CROSS_NIC NCCL_BUFFSIZE
    NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_IB_GID_INDEX NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT
    TORCH_FR_BUFFER_SIZE TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_FR_DUMP_TEMP_FILE TORCH_NCCL_DEBUG_INFO_TEMP_FILE
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE TORCH_NCCL_DUMP_ON_TIMEOUT
    """.split()
)
MUST_AGREE: Final = tuple(
    """
    NCCL_ALGO NCCL_PROTO NCCL_NET NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_NVLS_ENABLE NCCL_BUFFSIZE
    NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS
    """.split()
)
"""Ranks that choose differently wait for each other for ever, or talk past each other."""
SLOW: Final = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE")
ENVIRON_LIMIT: Final = 1 << 20
MAPS_LIMIT: Final = 4 << 20
_LIBRARY: Final = re.compile(r"(/[^\n]*/libnccl\.so[.\d]*)(?: \(deleted\))?$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class RankNccl:
    rank: int
    pid: int
    settings: Mapping[str, str]
    libraries: tuple[str, ...] = ()
    """Paths of the NCCL libraries that it has mapped."""
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
    maps = place.text(f"proc/{pid}/maps", MAPS_LIMIT) or ""
    libraries = tuple(sorted({clean_text(path, 300) for path in _LIBRARY.findall(maps)})) if "/libnccl" in maps else ()
    uid = re.search(r"^Uid:\s+(\d+)", place.text(f"proc/{pid}/status", 8192) or "", re.MULTILINE)
    return RankNccl(rank, pid, settings, libraries, int(uid[1]) if uid else -1)


def version_of(place: Place, library: str) -> str:
    """From the name of the library or, where pip installed it, from its package's; empty when neither tells."""
    if named := re.search(r"\.so\.(\d+\.\d+\.\d+)$", library):
        return named[1]
    packages = library.partition("/nvidia/nccl/lib/")[0] if "/nvidia/nccl/lib/" in library else ""
    for name in place.names(packages, "nvidia_nccl_cu*.dist-info") if packages else ():
        return name.removesuffix(".dist-info").partition("-")[2]
    return ""


def names_nothing(value: str, names: Iterable[str]) -> list[str]:
    """Entries of `NCCL_SOCKET_IFNAME` or `NCCL_IB_HCA` that no name fits: prefixes, or with `=` whole names.

    With `^` the entries are left out, and may name what is not there.
    """
    there = list(names)
    if value.startswith("^"):
        return []
    whole = value.startswith("=")
    missing = []
    for entry in value.removeprefix("=").split(","):
        name, _, _port = entry.strip().partition(":")
        if name and not any(found == name if whole else found.startswith(name) for found in there):
            missing.append(name)
    return missing


def judge_names(ranks: Iterable[RankNccl], interfaces: Iterable[str], devices: Iterable[str] | None) -> dict[str, str]:
    """What is wrong, by variable. `devices`: RDMA devices; None when they cannot be known."""
    wrong = {}
    for variable, there, what in (
        ("NCCL_SOCKET_IFNAME", list(interfaces) or None, "network interface"),
        ("NCCL_IB_HCA", None if devices is None else list(devices), "RDMA device"),
    ):
        for each in ranks:
            value = each.settings.get(variable, "")
            missing = names_nothing(value, there) if value and there is not None else []
            whole = variable == "NCCL_IB_HCA" or len(missing) == len(value.split(","))
            if missing and whole:  # of several interfaces one is enough; a missing HCA is bandwidth that is missing
                wrong[variable] = clean_text(f"{variable}={value}: no {what} {', '.join(missing)} on this node", 300)
                break
    return wrong


def judge_agreement(ranks: Iterable[RankNccl]) -> dict[str, str]:
    """Variables that are not the same in all ranks of this node."""
    wrong, all_ranks = {}, list(ranks)
    for variable in MUST_AGREE:
        values: dict[str, list[int]] = {}
        for each in all_ranks:
            values.setdefault(each.settings.get(variable, "not set"), []).append(each.rank)
        if len(values) > 1:
            said = "; ".join(f"{value} in rank {_some(ranks)}" for value, ranks in sorted(values.items()))
            wrong[variable] = clean_text(f"{variable} differs: {said}", 300)
    return wrong


def _some(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered[:4])) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")


def recorder_size(settings: Mapping[str, str]) -> int | None:
    """Entries of torch's flight recorder as it is set; None when it is left to torch (2000 since torch 2.8 or so)."""
    for key in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        if (value := settings.get(key, "")).strip().isdecimal():
            return int(value)
    return None


def dump_folder(settings: Mapping[str, str]) -> str:
    """Folder that torch writes the flight recorder to when a collective times out; empty: its default below /tmp."""
    for key in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        if value := settings.get(key, ""):
            return os.path.dirname(value) or "."
    return ""


def pipe_path(settings: Mapping[str, str], rank: int) -> str:
    """The pipe that makes torch dump the flight recorder of a rank; empty when none was asked for."""
    stem = settings.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
    return f"{stem}{rank}.pipe" if stem else ""


def seen_by(place: Place, pid: int, path: str) -> str:
    """A path of a process, as it is found from here: in its own mount namespace, from its own working folder."""
    return str(place.path(f"proc/{pid}/{'root' if path.startswith('/') else 'cwd'}/{path.lstrip('/')}"))


def trigger_dump(pid: int, rank: int, place: Place | None = None) -> str:
    """Have torch in a rank dump its flight recorder, by a byte in its pipe. Returns why it could not; empty: done.

    Never blocks: a pipe that nobody reads any more is said to be one. The dump goes where the rank's settings say.
    """
    place = place or Place()
    settings = read_settings(place, pid)
    if settings is None:
        return f"the environment of process {pid} cannot be read"
    if not (path := pipe_path(settings, rank)):
        return "TORCH_NCCL_DEBUG_INFO_PIPE_FILE is not set"
    try:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(seen_by(place, pid, path), flags)
    except OSError as error:
        return f"{clean_text(path, 300)}: {error.strerror}"
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return f"{clean_text(path, 300)} is no pipe"
        os.write(descriptor, b"1")
    except OSError as error:
        return f"{clean_text(path, 300)}: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""


def lacks_folder(place: Place, pid: int, folder: str) -> bool:
    """Whether a folder is surely not there for a process; False where its view of the files cannot be had."""
    return os.path.isdir(seen_by(place, pid, "/")) and not os.path.isdir(seen_by(place, pid, folder))


def has_pipe(place: Place, each: RankNccl) -> bool:
    path = pipe_path(each.settings, each.rank)
    try:
        return bool(path) and stat.S_ISFIFO(os.lstat(seen_by(place, each.pid, path)).st_mode)
    except OSError:
        return False
