"""The answer of `unbroken check`: from the file of a running agent, else from looks of its own.

`selection` has the table of checks, `once` looks, `supervisor/cli/render.py` prints. For users: docs/checks.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from diagnosis.health import OK, UNKNOWN, CheckState, exit_code, unknown
from supervisor.node_health import health_file
from supervisor.node_health import once as check_looks
from supervisor.node_health.contract import ProbeContext
from supervisor.node_health.protocol import FLAW, NOT_LOADED
from supervisor.node_health.selection import OF_RUNNER, CheckRow, Options, chosen, site_problems

From = Literal["agent", "standalone", "root"]


class AnsweredCheck(NamedTuple):
    row: CheckRow
    check_state: CheckState


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


def answer(rows: Mapping[str, CheckRow], options: Options, not_loaded: Sequence[str] = ()) -> CheckAnswer:
    """Within about `timeout_s`. `not_loaded`: probes that could not be, in words. Raises CheckRefused."""
    wanted = chosen(rows, options, all_known=not not_loaded)
    source: From = "agent"
    found = _from_agent(wanted, options)
    if options.root != Path("/"):
        source, found = "root", check_looks.look_at_tree(wanted, options)
    elif found is None:
        source, found = "standalone", check_looks.look_at_node(wanted, options)
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


def _from_agent(wanted: Mapping[str, CheckRow], options: Options) -> check_looks.NodeResults | None:
    """None where no agent has an answer: it never makes preflight checks, and may have just begun."""
    if options.fresh or options.root != Path("/") or any(row.check.when == "preflight" for row in wanted.values()):
        return None
    file = health_file.of_agent(ProbeContext().boot_id, options.local_dir, options.node)
    if file is None or not {row.probe for row in wanted.values()}.isdisjoint(file.waiting):
        return None
    check_states = {check_looks.key_of(one.result): one for one in file.check_states}
    why = {name: f"no answer from {row.probe} to the agent" for name, row in wanted.items()}
    return check_looks.NodeResults(file.node, file.boot_id, file.at, check_states, why, file.problems)


def _complete(wanted: Mapping[str, CheckRow], found: check_looks.NodeResults) -> tuple[AnsweredCheck, ...]:
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
