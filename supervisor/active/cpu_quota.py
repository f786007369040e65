"""How long a CPU quota kept a process from computing.

The kernel counts a process as waiting for a CPU also while the quota of its control group is used up. The group itself
says how much of that was the quota: its node is slow by itself, and not because of others. But the group may have other
processes, which use its quota up: then it is they for whom the process waited, as on any busy node.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

CGROUPS: Final = Path("/sys/fs/cgroup")
STAT_BYTES: Final = 65536
DIGITS: Final = 20
"""Of a counter of 64 bits."""
QUOTA_FILES: Final = ("cpu.max", "cpu.cfs_quota_us")
"""Beside `cpu.stat`, of v2 and v1."""
OWN_SHARE: Final = 0.6
"""Of what the quota gave while it was used up. Whoever got less of it waited for the others of the group."""


class Throttled(NamedTuple):
    """What a group's `cpu.stat` has counted since it was made."""

    seconds: float
    """Of all its CPUs together."""
    periods: int
    of_periods: int
    given_s: float = 0.0
    """What the quota gave in those `periods` that were watched."""
    own_s: float = 0.0
    """What the watched process got meanwhile."""


def read_stat(text: str) -> Throttled:
    """Of cgroup v1 or v2. A group without a quota counts nothing."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if number.isascii() and number.isdigit() and len(number) <= DIGITS:
            found[name] = int(number)
    seconds = found.get("throttled_usec", 0) / 1e6 + found.get("throttled_time", 0) / 1e9
    return Throttled(seconds, found.get("nr_throttled", 0), found.get("nr_periods", 0))


def quota_s(text: str) -> float:
    """What a period gives, of v1's `cpu.cfs_quota_us` or v2's `cpu.max`. 0: there is no quota, or it is not known."""
    number = text.split(" ", 1)[0].strip()
    return int(number) / 1e6 if number.isascii() and number.isdigit() and len(number) <= DIGITS else 0.0


def throttled_s(before: Throttled, after: Throttled, took_s: float, waited_s: float, processes: int) -> float:
    """How much of the `waited_s` that the threads of one of several equal processes waited within `took_s` the quota of
    their group made.

    It is not told for each process. At most all of the periods in which the quota was used up; nothing where others of
    the group used it up.
    """
    processes = max(1, processes)
    given_s = after.given_s - before.given_s
    if given_s <= 0.0 or (after.own_s - before.own_s) * processes < OWN_SHARE * given_s:
        return 0.0
    of_periods = after.of_periods - before.of_periods
    share = (after.periods - before.periods) / of_periods if of_periods > 0 else 0.0
    own_s = (after.seconds - before.seconds) / processes
    return max(0.0, min(waited_s, own_s, share * max(took_s, waited_s)))


def stat_files(groups: str, root: Path = CGROUPS) -> tuple[Path, ...]:
    """`groups`: /proc/PID/cgroup. The group of its CPU controller, and those above it, as far as they are seen here.

    In a container the path may be the host's, and its own group is the root.
    """
    found: dict[Path, None] = {}
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / (controllers or ("unified" if (root / "unified").is_dir() else ""))
        place = base / path.strip("/")
        if ".." not in place.parts:
            levels = (place, *(one for one in place.parents if one.is_relative_to(base)))
            found |= dict.fromkeys(file for level in levels if os.path.isfile(file := level / "cpu.stat"))
    return tuple(found)


class QuotaWatch:
    """Of the groups that a process is in when it is first looked at. Never raises."""

    def __init__(self, pid: int, proc: Path = Path("/proc"), *, files: tuple[Path, ...] | None = None) -> None:
        """`files`: else those that `stat_files` finds."""
        self._stat = proc / str(pid) / "stat"
        self._files = files if files is not None else stat_files(_text(proc / str(pid) / "cgroup"))
        self._ran_s = self._ran()
        self._seen = tuple(read_stat(_text(file)) for file in self._files)

    def look(self) -> tuple[Throttled, ...]:
        """Each time also how much of the quota the process itself has got since the time before."""
        ran_s = max(self._ran_s, self._ran())
        self._seen = tuple(
            _went_on(seen, file, ran_s - self._ran_s) for seen, file in zip(self._seen, self._files, strict=True)
        )
        self._ran_s = ran_s
        return self._seen

    def _ran(self) -> float:
        """CPU time of all its threads, also of those that have ended."""
        try:
            user, system = _text(self._stat).rpartition(")")[2].split()[11:13]
            return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        except ValueError:
            return 0.0


def _went_on(seen: Throttled, file: Path, ran_s: float) -> Throttled:
    now = read_stat(_text(file))
    periods = now.periods - seen.periods
    if periods <= 0:
        return now._replace(given_s=seen.given_s, own_s=seen.own_s)
    quota = next((text for name in QUOTA_FILES if (text := _text(file.with_name(name)))), "")
    return now._replace(given_s=seen.given_s + periods * quota_s(quota), own_s=seen.own_s + ran_s)


def throttled_most_s(
    before: tuple[Throttled, ...], after: tuple[Throttled, ...], took_s: float, waited_s: float, processes: int
) -> float:
    """Of the group and those above it, the one that kept it waiting longest."""
    each = (throttled_s(*pair, took_s, waited_s, processes) for pair in zip(before, after, strict=True))
    return max(each, default=0.0)


def _text(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            return opened.read(STAT_BYTES).decode(errors="replace")
    except OSError:
        return ""
