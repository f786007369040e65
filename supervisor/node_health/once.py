"""Looks of our own at a node or a captured tree, where there is no agent to ask: readings become standings.

What stands is kept for the next look of this boot. So a program that runs every few minutes has rates and hysteresis
as an agent has; and within one call, what one look does not settle is looked at again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from diagnosis.health import Check, Reading, Standing, not_applicable, settle, unknown
from diagnosis.signals import clean_text
from supervisor.node_health import registry
from supervisor.node_health.contract import Place, Site
from supervisor.node_health.health_file import keep, read
from supervisor.node_health.one_look import REAP_S, Told, look
from supervisor.node_health.protocol import Overdue, Setup
from supervisor.node_health.selection import STATION, NoTree, Options, Row
from supervisor.node_health.state import RESPONDS, HealthFile, responded, responds

AGAIN_S: Final = 1.0
"""Between two looks at what one look does not settle."""
MOST_LOOKS: Final = 3
GPU_PATIENCE_S: Final = 10.0
"""A call of the GPU driver takes milliseconds; only the first one, which loads it, may take tens of seconds."""
TREE: Final = ("proc", "sys", "etc", "var", "dev", "run")
"""What a captured tree has at least one of."""

Key = tuple[str, str]
"""Check and device."""


class Found(NamedTuple):
    node: str
    boot_id: str
    at: float
    standings: dict[Key, Standing]
    why: dict[str, str]
    """Check -> why nothing was told of it."""
    problems: tuple[str, ...]


def key_of(reading: Reading) -> Key:
    return reading.check, reading.device


# ----- the running node -----


def look_at_node(wanted: Mapping[str, Row], options: Options) -> Found:
    """Looks until everything is settled that a few looks settle; for `timeout_s` at most."""
    began, at, boot_id = time.monotonic(), time.time(), Place().boot_id
    reap_s = min(REAP_S, options.timeout_s / 4)
    until = began + options.timeout_s - reap_s
    state_dir = options.state_dir or default_state_dir()
    kept = read(state_dir / "check.json", boot_id) if state_dir is not None else None
    standings = {key_of(one.reading): one for one in kept.standings} if kept is not None else {}
    ask: Mapping[str, Row] = wanted
    problems: dict[str, None] = {}
    why: dict[str, str] = {}
    spoken: set[Key] = set()
    seen: set[Key] = set()
    """Those that a look could tell anything of."""
    for turn in range(MOST_LOOKS):
        looked = time.monotonic()
        setups = _setups(ask, options, state_dir, named=() if turn == 0 else tuple(ask))
        told = look(setups, until, reap_s, state_dir / "left.json" if state_dir is not None else None)
        problems |= {problem: None for one in told for problem in one.problems}
        readings, silent = _readings(told, ask, options.site)
        why |= silent
        spoken |= {key_of(reading) for reading in readings}
        seen |= {key_of(reading) for reading in readings if reading.status != "unknown"}
        ask = _settle(ask, standings, readings, MOST_LOOKS - 1 - turn)
        now = time.monotonic()
        if not ask or now + AGAIN_S + 2 * (now - looked) > until:
            break
        time.sleep(AGAIN_S)
    _forget(wanted, standings, spoken)
    node = options.node or os.environ.get("SLURMD_NODENAME", "") or socket.gethostname()
    file = HealthFile(
        schema=1,
        node=node,
        boot_id=boot_id,
        at=at,
        mono=time.monotonic(),
        pid=os.getpid(),
        standings=tuple(standings.values()),
    )
    if state_dir is not None:
        keep(state_dir / "check.json", file)
    shown = {
        key: _shown(wanted[key[0]].check, one, seen=key in seen) for key, one in standings.items() if key[0] in wanted
    }
    return Found(node, boot_id, at, shown, why, tuple(problems))


def default_state_dir() -> Path | None:
    """By node: home directories are shared between nodes. None for who has no home."""
    if os.geteuid() == 0:
        return Path("/var/lib/unbroken/check")
    base = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    node = clean_text(socket.gethostname(), 64).replace("/", "_") or "node"
    return base / "unbroken" / node if base.is_absolute() else None


def _setups(
    ask: Mapping[str, Row], options: Options, state_dir: Path | None, named: tuple[str, ...] = ()
) -> dict[str, Setup]:
    """Station -> what it is to look at; without those that have nothing to do. `named`: these checks and no others."""
    setups = {}
    for group in registry.STATIONS:
        ids = [name for name, row in ask.items() if row.group == group]
        if not ids:
            continue
        # Whether a station answers shows only when it has something to do.
        only = () if RESPONDS[group].id in ids else named or options.only
        setups[group] = Setup(
            root=str(options.root),
            node=options.node,
            state_dir=str(state_dir) if state_dir is not None else "",
            site=options.site,
            preflight=any(row.check.when == "preflight" for row in ask.values()),
            only=only,
            skip=options.skip,
        )
    return setups


def _readings(told: Sequence[Told], ask: Mapping[str, Row], site: Site) -> tuple[list[Reading], dict[str, str]]:
    """What was asked for of what was told; and check -> why nothing was told of it."""
    readings: list[Reading] = []
    why: dict[str, str] = {}
    for one in told:
        deadlines = {row.probe: row.deadline_s for row in ask.values()}
        for report in one.reports.values():
            readings += [*report.readings, responded(one.group, report)]
        for word in one.overdue.values():
            readings.append(_overdue(one.group, word, deadlines.get(word.probe, 0.0), site))
        if one.undying is not None:
            readings.append(one.undying)
        why |= {name: _silence(one, row) for name, row in ask.items() if row.group == one.group}
    asked = {key_of(reading): reading for reading in readings if reading.check in ask}
    return list(asked.values()), why


def _overdue(group: str, word: Overdue, deadline_s: float, site: Site) -> Reading:
    """A look that we cut short is no sign of trouble before it has taken longer than any should."""
    check = RESPONDS[group]
    own = site.limits.get(check.id, {})
    if group == "gpu" and not word.doing.startswith("nvmlInit"):
        deadline_s = min(deadline_s, GPU_PATIENCE_S, own.get("seconds", GPU_PATIENCE_S))
    reading = responds(group, word, own)
    return reading if word.since_s >= deadline_s else unknown(check.id, reading.text, reading.device)


def _silence(told: Told, row: Row) -> str:
    """Why a station said nothing of a check."""
    word = told.overdue.get(row.probe)
    if word is not None:
        doing = f" (in {word.doing})" if word.doing else ""
        return f"no answer from {row.probe} within {word.since_s:.0f} s{doing}"
    if told.undying is not None:
        return told.undying.text
    if told.hello is None and told.problems:
        return told.problems[-1]
    return f"no answer from {row.probe}"


def _settle(
    ask: Mapping[str, Row], standings: dict[Key, Standing], readings: Sequence[Reading], more: int
) -> dict[str, Row]:
    """Brings `standings` up to date; gives the checks that `more` looks can settle."""
    now, open_ones = time.time(), {}
    for reading in readings:
        key, row = key_of(reading), ask[reading.check]
        after = standings[key] = settle(row.check, standings.get(key), reading, now)
        if not after.against or reading.status not in ("healthy", "unhealthy"):
            continue
        needed = row.check.looks if reading.status == "unhealthy" else row.check.calm_looks
        if needed - after.against <= more and (row.check.clears or reading.status == "unhealthy"):
            open_ones[row.check.id] = row
        if after.status == "unknown":
            why = f"seen in {after.against} of the {needed} looks that it takes: {reading.text}"
            standings[key] = msgspec.structs.replace(after, reading=unknown(row.check.id, why, reading.device))
    return open_ones


def _forget(wanted: Mapping[str, Row], standings: dict[Key, Standing], spoken: set[Key]) -> None:
    """Devices that a probe no longer speaks of, and what earlier looks saw well of checks that are silent now."""
    answered = {check for check, _ in spoken}
    for key in [key for key in standings if key not in spoken and key[0] in wanted]:
        clears = key[0] in answered and wanted[key[0]].check.clears
        if clears or standings[key].status != "unhealthy":
            del standings[key]


def _shown(check: Check, standing: Standing, *, seen: bool) -> Standing:
    """An unhealthy standing that was not seen at the last look says so."""
    if standing.status != "unhealthy" or (seen and not standing.against):
        return standing
    more = "" if check.clears else "; it stands until the node is booted anew"
    why = f"not seen at the last look{more}" if seen else "seen earlier, no answer now"
    text = f"{standing.reading.text} ({why})"
    return msgspec.structs.replace(standing, reading=msgspec.structs.replace(standing.reading, text=text))


# ----- a captured tree -----


def look_at_tree(wanted: Mapping[str, Row], options: Options) -> Found:
    """One look: a tree does not change, so what is seen in it stands. Raises NoTree when it is none."""
    _refuse_no_tree(options.root)
    place, at = Place(root=options.root), time.time()
    probed = {name: row for name, row in wanted.items() if row.probe != STATION}
    told = look(_setups(probed, options, None), time.monotonic() + options.timeout_s, REAP_S)
    readings, why = _readings(told, probed, options.site)
    readings += [not_applicable(name, "a captured tree") for name in wanted if name not in probed]
    standings = {
        key_of(one): Standing(reading=one, status=one.status, level=one.level, since=at, looked_at=at)
        for one in readings
    }
    name = place.text("proc/sys/kernel/hostname") or place.text("etc/hostname") or ""
    problems = tuple(problem for one in told for problem in one.problems)
    return Found(options.node or clean_text(name.strip(), 64), place.boot_id, at, standings, why, problems)


def _refuse_no_tree(root: Path) -> None:
    try:
        names = set(os.listdir(root))
    except OSError as error:
        raise NoTree(f"--root {root} cannot be read: {error.strerror}") from None
    if not names.intersection(TREE):
        raise NoTree(f"--root {root} is no captured tree: it has none of {', '.join(TREE)}")
