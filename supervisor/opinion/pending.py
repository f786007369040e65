"""Rules that a model proposed: kept in `pending_rules.toml` of the job folder until an operator decides.

Nothing reads that file but the commands that show it. `approve` appends a rule to `rules.toml`, which processes read
when they start (docs/rules.md); whatever is in that file already stays as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from diagnosis import rules
from diagnosis.incident import RULE_PREFIX, ProposedRule
from diagnosis.llm import rule_row
from diagnosis.signals import clean_line
from supervisor.config import read_toml
from supervisor.errors import ConfigError, RuleNotFound
from supervisor.files import write_atomically

NAME: Final = "pending_rules.toml"
APPROVED: Final = "rules.toml"
MAX_PENDING: Final = 50
TRIED_S: Final = 10.0
"""Seconds of CPU. A rule that needs longer for its samples would delay every process that reads output with it."""
PUMPED: Final = 48
_HEAD: Final = (
    "# Rules that a language model proposed. They do nothing: read them, change them if need be, then\n"
    "# `unbroken approve ID` (or `reject ID`).\n"
)


def rule_id(incident: str) -> str:
    """The id of the rule that is proposed for an incident."""
    return f"{RULE_PREFIX}{incident}"


def add(job_dir: Path, rule: ProposedRule) -> bool:
    """Keep a proposed rule in the place of one of its id; False when there are too many.

    Raises OSError, ConfigError.
    """
    rows = {one["id"]: one for one in read(job_dir)} | {rule.id: rule_row(rule)}
    if len(rows) > MAX_PENDING:
        return False
    _write(job_dir, list(rows.values()))
    return True


def read(job_dir: Path) -> list[dict[str, Any]]:
    """The rules that wait, as TOML has them. Raises ConfigError (not TOML, or not ours)."""
    path = job_dir / NAME
    if not os.path.isfile(path):
        return []
    rows = read_toml(path).get("rule", [])
    if not isinstance(rows, list) or not all(isinstance(one, dict) and isinstance(one.get("id"), str) for one in rows):
        raise ConfigError(f"{path}: each [[rule]] needs an `id`")
    for one in rows:
        for key, value in one.items():
            if not key.isidentifier() or not _is_plain(value):
                name = f"rule.{clean_line(one['id'], 60)}"
                raise ConfigError(f"{path}: {name}: {clean_line(key, 60)!r} is not of a rule")
    return rows


def _is_plain(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, str | int | float) for one in values)


def names(job_dir: Path) -> list[str]:
    """The ids of the rules that wait; none where they cannot be read."""
    try:
        return [clean_line(str(one["id"]), 60) for one in read(job_dir)]
    except ConfigError:
        return []


def approve(job_dir: Path, name: str, by: str, at: str) -> str:
    """Move a rule from those that wait to those in use; a sentence for the operator.

    Raises RuleNotFound, ConfigError (the rule, or those in use already, cannot be used), OSError.
    """
    chosen = find(job_dir, name)
    check(job_dir, chosen)
    path = job_dir / APPROVED
    before = path.read_text(encoding="utf-8") if os.path.isfile(path) else ""
    gap = "" if not before or before.endswith("\n") else "\n"
    text = f"{before}{gap}\n# Proposed by a language model; approved by {clean_line(by, 80)}, {at}.\n{_toml(chosen)}"
    write_atomically(path, text.lstrip("\n").encode())
    _drop(job_dir, name)
    return f"{name} is in {path}: whatever starts from now on reads output with it"


def reject(job_dir: Path, name: str) -> str:
    """Forget a rule that waits; a sentence for the operator. Raises RuleNotFound, ConfigError, OSError."""
    find(job_dir, name)
    _drop(job_dir, name)
    return f"{name} is forgotten"


def check(job_dir: Path, rule: Mapping[str, Any]) -> None:
    """Whether the rule can be used beside those that are in use. In the main thread. Raises ConfigError."""
    path = job_dir / APPROVED
    in_use = read_toml(path).get("rule", []) if os.path.isfile(path) else []
    try:
        with _no_longer_than(TRIED_S):
            _try_hard(rule)
            rules.packaged().with_site([*in_use, rule])
    except TimeoutError:
        why = "its regex takes too long on some lines: it may have a repeat within a repeat"
        raise ConfigError(f"{job_dir / NAME}: rule.{clean_line(str(rule['id']), 60)}: {why}") from None
    except (ValueError, TypeError, AttributeError, re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{job_dir / NAME}: {clean_line(str(error), 300)}") from None


def _try_hard(rule: Mapping[str, Any]) -> None:
    """Search in its samples with each character repeated and an end that does not match: this exposes backtracking."""
    pattern = re.compile(str(rule.get("regex", "")).encode(), re.IGNORECASE)
    for sample in map(str.encode, map(str, rule.get("samples", ()))):
        for end in range(1, min(len(sample), rules.MAX_LINE) + 1):
            pattern.search(sample[:end] + sample[end - 1 : end] * PUMPED + b"\0")


@contextlib.contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Limits CPU time, so that a busy machine does not count. Raises TimeoutError, even within a search of `re`."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def find(job_dir: Path, name: str) -> dict[str, Any]:
    """The rule of this id, as TOML has it. Raises RuleNotFound, ConfigError."""
    rows = read(job_dir)
    for one in rows:
        if one["id"] == name:
            return one
    raise RuleNotFound(f"no rule {name} waits; rules that wait: {', '.join(names(job_dir)) or 'none'}")


def _drop(job_dir: Path, name: str) -> None:
    _write(job_dir, [one for one in read(job_dir) if one["id"] != name])


def _write(job_dir: Path, rows: list[dict[str, Any]]) -> None:
    path = job_dir / NAME
    if rows:
        write_atomically(path, (_HEAD + "".join("\n" + _toml(one) for one in rows)).encode())
    else:
        path.unlink(missing_ok=True)


def _toml(rule: Mapping[str, Any]) -> str:
    """One [[rule]]. JSON writes strings, numbers and lists of these as TOML does, but for DEL."""
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in rule.items()]
    return "\n".join(["[[rule]]", *lines, ""]).replace("\x7f", "\\u007F")
