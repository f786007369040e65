"""The answer of `unbroken check`: from the file of a running agent, else from looks of its own at the node, or at a
captured tree. For users: docs/checks.md. `supervisor/cli/render.py` prints it.

Without an agent, what stands is kept for the next look of this boot. So a program that runs every few minutes has rates
and hysteresis as an agent has; and within one call, what one look does not settle is looked at again.
"""

from __future__ import annotations

import difflib
import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from diagnosis.health import (
    CRITICAL,
    OK,
    UNKNOWN,
    WARNING,
    Check,
    CheckResult,
    CheckState,
    exit_code,
    not_applicable,
    settle,
    unknown,
)
from diagnosis.signals import Frozen, clean_text
from supervisor.errors import CheckRefused, TreeNotFound
from supervisor.node_health import contract, health_file
from supervisor.node_health.contract import NOT_LOADED, ProbeContext, Site, fits, is_asked_for, keep_file
from supervisor.node_health.health_file import HealthFile, read
from supervisor.node_health.protocol import FLAW, Setup, TimedOut
from supervisor.node_health.runner import DYING_S, WorkerAnswer, run_once
from supervisor.node_health.state import GPU_CALL_S, RESPONDS, responded, responds

# ----- which checks there are, and which are asked for -----

OF_RUNNER = "station"
"""The probe name of checks that the runner of the probe workers makes. It is in the JSON of `unbroken check`."""


class CheckRow(NamedTuple):
    check: Check
    probe: str
    group: str
    """Its probe worker."""
    deadline_s: float
    """A look of its probe must not take longer."""

    @property
    def failure_class(self) -> str:
        return str(getattr(self.check.failure_class, "value", self.check.failure_class))


class Options(Frozen, frozen=True, kw_only=True):
    """What is asked for."""

    only: tuple[str, ...] = ()
    """Patterns of check ids and probe names."""
    skip: tuple[str, ...] = ()
    root: Path = Path("/")
    """`/`, or a captured tree."""
    preflight: bool = False
    site: Site = Site()
    fresh: bool = False
    """Not from an agent's file."""
    timeout_s: float = 20.0
    local_dir: str = ""
    """Local folder of the agent, or the folder above all; empty: where they are by default."""
    node: str = ""
    state_dir: Path | None = None
    """Where check states and counters are kept; None: where they are by default."""


def table(problems: list[str] | None = None) -> dict[str, CheckRow]:
    """All checks, in order. Appends a sentence to `problems` for each probe that cannot be loaded."""
    rows = {}
    for group in contract.WORKERS:
        rows[RESPONDS[group].id] = CheckRow(RESPONDS[group], OF_RUNNER, group, 0.0)
        probes, flaws = contract.load(group)
        if problems is not None:
            problems += flaws
        for probe in probes:
            rows |= {check.id: CheckRow(check, probe.name, group, probe.deadline_s) for check in probe.checks}
    return rows


def chosen(rows: Mapping[str, CheckRow], options: Options, *, all_known: bool = True) -> dict[str, CheckRow]:
    """The checks that are asked for. Raises CheckRefused for a pattern that fits none, if `all_known` are in `rows`."""
    for pattern in (*options.only, *options.skip) if all_known else ():
        refuse_unknown(rows, pattern)
    skip = (*options.skip, *options.site.skip)
    return {
        name: row
        for name, row in rows.items()
        if is_asked_for(row.check, row.probe, options.only, skip, preflight=options.preflight)
    }


def refuse_unknown(rows: Mapping[str, CheckRow], pattern: str) -> None:
    """Raises CheckRefused for a pattern that fits nothing."""
    known = {name for row in rows.values() for name in (row.check.id, row.probe)}
    if not fits(known, (pattern,)):
        raise CheckRefused(f"no check or probe is called {clean_text(pattern, 80)}{_hint(pattern, known)}")


def _hint(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word.strip("*"), sorted(known), 3, 0.5)
    return f": did you mean {' or '.join(near)}?" if near else "; `unbroken check --list` shows all"


def site_problems(rows: Mapping[str, CheckRow], site: Site) -> list[str]:
    """A sentence for each check or limit of the site file that does not exist."""
    names = {*rows, *(row.probe for row in rows.values())}
    problems = [
        f"the site file skips {clean_text(pattern, 80)}, and no check or probe is called so"
        for pattern in site.skip
        if not fits(names, (pattern,))
    ]
    for name, numbers in site.limits.items():
        if name not in rows:
            problems.append(
                f"the site file sets limits of {clean_text(name, 80)}, which is no check{_hint(name, rows)}"
            )
            continue
        for number in numbers.keys() - rows[name].check.limits.keys():
            known = ", ".join(rows[name].check.limits) or "none"
            problems.append(f"the site file sets {clean_text(number, 80)} of {name}, whose limits are: {known}")
    return problems


# ----- looks of its own -----

AGAIN_S: Final = 1.0
"""Between two looks, for checks that need several."""
MOST_LOOKS: Final = 3
TREE: Final = ("proc", "sys", "etc", "var", "dev", "run")
"""What a captured tree has at least one of."""

Key = tuple[str, str]
"""Check and device."""


class NodeResults(NamedTuple):
    node: str
    boot_id: str
    at: float
    check_states: dict[Key, CheckState]
    why: dict[str, str]
    """Check -> why there is no result."""
    problems: tuple[str, ...]


def key_of(result: CheckResult) -> Key:
    return result.check, result.device


def look_at_node(wanted: Mapping[str, CheckRow], options: Options) -> NodeResults:
    """Looks up to three times, until checks that need several looks are settled; for `timeout_s` at most."""
    began, at, boot_id = time.monotonic(), time.time(), ProbeContext().boot_id
    dying_s = min(DYING_S, options.timeout_s / 4)
    until = began + options.timeout_s - dying_s
    state_dir = options.state_dir or default_state_dir()
    kept = read(state_dir / "check.json", boot_id) if state_dir is not None else None
    check_states = {key_of(one.result): one for one in kept.check_states} if kept is not None else {}
    ask: Mapping[str, CheckRow] = wanted
    problems: dict[str, None] = {}
    why: dict[str, str] = {}
    spoken: set[Key] = set()
    seen: set[Key] = set()
    """Those with a result other than unknown."""
    for turn in range(MOST_LOOKS):
        looked = time.monotonic()
        setups = _setups(ask, options, state_dir, named=() if turn == 0 else tuple(ask))
        answers = run_once(setups, until, dying_s, state_dir)
        problems |= {problem: None for one in answers for problem in one.problems}
        results, silent = _results(answers, ask, options.site)
        why |= silent
        spoken |= {key_of(result) for result in results}
        seen |= {key_of(result) for result in results if result.status != "unknown"}
        ask = _settle(ask, check_states, results, MOST_LOOKS - 1 - turn)
        now = time.monotonic()
        if not ask or now + AGAIN_S + 2 * (now - looked) > until:
            break
        time.sleep(AGAIN_S)
    _forget(wanted, check_states, spoken)
    node = options.node or os.environ.get("SLURMD_NODENAME", "") or socket.gethostname()
    file = HealthFile(
        schema=1,
        node=node,
        boot_id=boot_id,
        at=at,
        mono=time.monotonic(),
        pid=os.getpid(),
        check_states=tuple(check_states.values()),
    )
    if state_dir is not None:
        keep_file(state_dir / "check.json", file)
    shown = {
        key: _shown(wanted[key[0]].check, one, seen=key in seen)
        for key, one in check_states.items()
        if key[0] in wanted
    }
    return NodeResults(node, boot_id, at, shown, why, tuple(problems))


def default_state_dir() -> Path | None:
    """One for each node, because home directories are shared between nodes. None without a home directory."""
    if os.geteuid() == 0:
        return Path("/var/lib/unbroken/check")
    base = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    node = clean_text(socket.gethostname(), 64).replace("/", "_") or "node"
    return base / "unbroken" / node if base.is_absolute() else None


def _setups(
    ask: Mapping[str, CheckRow], options: Options, state_dir: Path | None, named: tuple[str, ...] = ()
) -> dict[str, Setup]:
    """Probe worker -> its setup, for those that have something to do. `named`: only these checks."""
    setups = {}
    for group in contract.WORKERS:
        ids = [name for name, row in ask.items() if row.group == group]
        if not ids:
            continue
        # Whether a probe worker answers shows only when it has something to do.
        only = () if RESPONDS[group].id in ids else named or options.only
        setups[group] = Setup(
            root=str(options.root),
            node=options.node,
            state_dir=str(state_dir) if state_dir is not None else "",
            site=options.site,
            preflight=options.preflight or any(row.check.when == "preflight" for row in ask.values()),
            only=only,
            skip=options.skip,
        )
    return setups


def _results(
    answers: Sequence[WorkerAnswer], ask: Mapping[str, CheckRow], site: Site
) -> tuple[list[CheckResult], dict[str, str]]:
    """The results that were asked for; and check -> why there is no result."""
    results: list[CheckResult] = []
    why: dict[str, str] = {}
    for one in answers:
        deadlines = {row.probe: row.deadline_s for row in ask.values()}
        for report in one.reports.values():
            results += [*report.results, responded(one.group, report)]
        for word in one.timed_out.values():
            results.append(_timed_out(one.group, word, deadlines.get(word.probe, 0.0), site))
        if one.unkillable is not None:
            results.append(one.unkillable)
        why |= {name: _silence(one, row) for name, row in ask.items() if row.group == one.group}
    asked = {key_of(result): result for result in results if result.check in ask}
    return list(asked.values()), why


def _timed_out(group: str, word: TimedOut, deadline_s: float, site: Site) -> CheckResult:
    """A look that was cut short is unhealthy only if it took longer than its own deadline."""
    check = RESPONDS[group]
    own = site.limits.get(check.id, {})
    if group == "gpu" and not word.doing.startswith("nvmlInit"):
        deadline_s = min(deadline_s, GPU_CALL_S, own.get("seconds", GPU_CALL_S))
    result = responds(group, word, own)
    return result if word.since_s >= deadline_s else unknown(check.id, result.text, result.device)


def _silence(answer: WorkerAnswer, row: CheckRow) -> str:
    """Why a probe worker has no result for a check."""
    late = answer.timed_out.get(row.probe)
    if late is not None:
        doing = f" (in {late.doing})" if late.doing else ""
        return f"no answer from {row.probe} within {late.since_s:.0f} s{doing}"
    if answer.unkillable is not None:
        return answer.unkillable.text
    if answer.ready is None and answer.problems:
        return answer.problems[-1]
    return f"no answer from {row.probe}"


def _settle(
    ask: Mapping[str, CheckRow], check_states: dict[Key, CheckState], results: Sequence[CheckResult], more: int
) -> dict[str, CheckRow]:
    """Updates `check_states`. Returns the checks that `more` looks can settle."""
    now, open_ones = time.time(), {}
    for result in results:
        key, row = key_of(result), ask[result.check]
        after = check_states[key] = settle(row.check, check_states.get(key), result, now)
        if not after.against or result.status not in ("healthy", "unhealthy"):
            continue
        needed = row.check.looks if result.status == "unhealthy" else row.check.calm_looks
        if needed - after.against <= more and (row.check.clears or result.status == "unhealthy"):
            open_ones[row.check.id] = row
        if after.status == "unknown":
            why = f"seen in {after.against} of the {needed} looks that it takes: {result.text}"
            check_states[key] = msgspec.structs.replace(after, result=unknown(row.check.id, why, result.device))
    return open_ones


def _forget(wanted: Mapping[str, CheckRow], check_states: dict[Key, CheckState], spoken: set[Key]) -> None:
    """Forget devices that are no longer reported, and healthy states of checks that have no result now."""
    answered = {check for check, _ in spoken}
    for key in [key for key in check_states if key not in spoken and key[0] in wanted]:
        clears = key[0] in answered and wanted[key[0]].check.clears
        if clears or check_states[key].status != "unhealthy":
            del check_states[key]


def _shown(check: Check, check_state: CheckState, *, seen: bool) -> CheckState:
    """The text of an unhealthy state that the last look did not confirm says so."""
    if check_state.status != "unhealthy" or (seen and not check_state.against):
        return check_state
    more = "" if check.clears else "; it stands until the node is booted anew"
    why = f"not seen at the last look{more}" if seen else "seen earlier, no answer now"
    text = f"{check_state.result.text} ({why})"
    return msgspec.structs.replace(check_state, result=msgspec.structs.replace(check_state.result, text=text))


def look_at_tree(wanted: Mapping[str, CheckRow], options: Options) -> NodeResults:
    """One look is enough, because a tree does not change. Raises TreeNotFound if it is no captured tree."""
    _refuse_no_tree(options.root)
    place, at = ProbeContext(root=options.root), time.time()
    probed = {name: row for name, row in wanted.items() if row.probe != OF_RUNNER}
    answers = run_once(_setups(probed, options, None), time.monotonic() + options.timeout_s)
    results, why = _results(answers, probed, options.site)
    results += [not_applicable(name, "a captured tree") for name in wanted if name not in probed]
    check_states = {
        key_of(one): CheckState(result=one, status=one.status, level=one.level, since=at, looked_at=at)
        for one in results
    }
    name = place.text("proc/sys/kernel/hostname") or place.text("etc/hostname") or ""
    problems = tuple(problem for one in answers for problem in one.problems)
    return NodeResults(options.node or clean_text(name.strip(), 64), place.boot_id, at, check_states, why, problems)


def _refuse_no_tree(root: Path) -> None:
    try:
        names = set(os.listdir(root))
    except OSError as error:
        raise TreeNotFound(f"--root {root} cannot be read: {error.strerror}") from None
    if not names.intersection(TREE):
        raise TreeNotFound(f"--root {root} is no captured tree: it has none of {', '.join(TREE)}")


# ----- the answer -----

From = Literal["agent", "standalone", "root"]


class AnsweredCheck(NamedTuple):
    row: CheckRow
    check_state: CheckState

    @property
    def name(self) -> str:
        return f"{self.row.check.id} {self.check_state.result.device}".rstrip()

    @property
    def text(self) -> str:
        """Without the device in front, which `name` has."""
        result = self.check_state.result
        return result.text.removeprefix(f"{result.device}: ") if result.device else result.text

    @property
    def word(self) -> str:
        """`critical`, `warning`, else the status."""
        return self.check_state.level if self.check_state.status == "unhealthy" else self.check_state.status


class CheckAnswer(NamedTuple):
    """At least one `AnsweredCheck` for each check that was asked for, in the order of the table."""

    source: From
    node: str
    boot_id: str
    at: float
    """Unix seconds: when it was seen."""
    problems: tuple[str, ...]
    """What is wrong with the probes themselves, in sentences."""
    seen: tuple[AnsweredCheck, ...]
    flaws: tuple[str, ...] = ()
    """Those of `problems` that kept something from being looked at: then the node is not known to be healthy."""

    @property
    def exit_code(self) -> int:
        code = exit_code([(one.check_state.status, one.check_state.level) for one in self.seen])
        return UNKNOWN if self.flaws and code == OK else code

    @property
    def word(self) -> str:
        return {OK: "OK", WARNING: "WARNING", CRITICAL: "CRITICAL", UNKNOWN: "UNKNOWN"}[self.exit_code]

    @property
    def unhealthy(self) -> list[AnsweredCheck]:
        """What is critical, then what is a warning."""
        return [one for word in ("critical", "warning") for one in self.seen if one.word == word]


def answer(rows: Mapping[str, CheckRow], options: Options, not_loaded: Sequence[str] = ()) -> CheckAnswer:
    """Within about `timeout_s`. `not_loaded`: probes that could not be, in words. Raises CheckRefused."""
    wanted = chosen(rows, options, all_known=not not_loaded)
    source: From = "agent"
    found = _from_agent(wanted, options)
    if options.root != Path("/"):
        source, found = "root", look_at_tree(wanted, options)
    elif found is None:
        source, found = "standalone", look_at_node(wanted, options)
    seen = _complete(wanted, found)
    # Others of an agent's problems may be over, or concern what it hears between its looks.
    flaws = dict.fromkeys(not_loaded)
    flaws |= dict.fromkeys(one for one in found.problems if source != "agent" or NOT_LOADED in one)
    reported = {check for check, _ in found.check_states}
    if (
        source == "agent"
    ):  # its site file may skip other checks: only a probe worker that tells nothing at all is silent
        groups = {rows[check].group for check in reported if check in rows}
        reported |= {name for name, row in wanted.items() if row.group in groups}
    flaws |= dict.fromkeys(_not_looked_at(seen, reported))
    problems = dict.fromkeys([*site_problems(rows, options.site), *found.problems, *flaws])
    return CheckAnswer(source, found.node, found.boot_id, found.at, tuple(problems), seen, tuple(flaws))


def _not_looked_at(seen: Sequence[AnsweredCheck], reported: Collection[str]) -> list[str]:
    """Sentences about probes that raised or did not answer; not what we may not read, or what needs more looks."""
    silent = [one for one in seen if one.row.check.id not in reported and one.row.probe != OF_RUNNER]
    raised = [
        one for one in seen if one.check_state.status == "unknown" and one.check_state.result.text.startswith(FLAW)
    ]
    return [one.check_state.result.text for one in (*raised, *silent)]


def _from_agent(wanted: Mapping[str, CheckRow], options: Options) -> NodeResults | None:
    """None where no agent has an answer: it never makes preflight checks, and may have just begun."""
    if options.fresh or options.root != Path("/") or any(row.check.when == "preflight" for row in wanted.values()):
        return None
    file = health_file.of_agent(ProbeContext().boot_id, options.local_dir, options.node)
    if file is None or not {row.probe for row in wanted.values()}.isdisjoint(file.waiting):
        return None
    check_states = {key_of(one.result): one for one in file.check_states}
    why = {
        name: f"the agent of a job has no answer from {row.probe} (--fresh looks now)" for name, row in wanted.items()
    }
    return NodeResults(file.node, file.boot_id, file.at, check_states, why, file.problems)


def _complete(wanted: Mapping[str, CheckRow], found: NodeResults) -> tuple[AnsweredCheck, ...]:
    """In the order of the table. A check without a result is `unknown`."""
    by_check: dict[str, list[CheckState]] = {}
    for (check, _), check_state in sorted(found.check_states.items()):
        by_check.setdefault(check, []).append(check_state)
    seen = []
    for name, row in wanted.items():
        why = found.why.get(name, "" if row.probe == OF_RUNNER else f"no answer from {row.probe}")
        none = CheckState(result=unknown(name, why), status="unknown", since=found.at)
        seen += [AnsweredCheck(row, one) for one in by_check.get(name, [none])]
    return tuple(seen)
