"""Rules that a model proposed: kept in `pending_rules.toml` of the job folder until an operator decides.

Nothing reads that file but the commands that show it. `approve` appends a rule to `rules.toml` of the job folder, or to
the site's `learned_rules.toml`; processes read both when they start (docs/rules.md). `reject` takes it out again.
Whatever else is in these files stays as it is, byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from diagnosis import rules, tables
from diagnosis.incident import RULE_PREFIX, ProposedRule
from diagnosis.proposals import row
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
ORIGIN_CHARS: Final = 300
LEARNED_BYTES: Final = 1 << 20
"""A file of approved rules is not made larger."""
_HEAD: Final = (
    "# Rules that a language model proposed. They do nothing: read them, change them if need be, then\n"
    "# `unbroken approve ID --dry-run` says how to approve what it says then (or `reject ID`).\n"
)


def rule_id(incident: str) -> str:
    return f"{RULE_PREFIX}{incident}"


def add(job_dir: Path, rule: ProposedRule, origin: str) -> bool:
    """Keep a proposed rule in the place of one of its id; False when there are too many.

    Raises OSError, ConfigError.
    """
    made = row(rule) | {"origin": clean_line(origin, ORIGIN_CHARS)}
    rows = {one["id"]: one for one in read(job_dir)} | {rule.id: made}
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
    """The rules that wait, as `approve` takes them; none where they cannot be read."""
    try:
        return [version(one) for one in read(job_dir)]
    except ConfigError:
        return []


def version(rule: Mapping[str, Any]) -> str:
    """`rule-i-3@5f0c...`: the rule, and a digest of what it says. Whoever approves it has seen that."""
    said = {key: value for key, value in rule.items() if key != "origin"}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    return f"{clean_line(str(rule['id']), 60)}@{digest[:12]}"


def as_shown(job_dir: Path, shown: str) -> dict[str, Any]:
    """The rule that waits, as somebody has seen it (`version`). Raises RuleNotFound, ConfigError: it has changed."""
    name, _, digest = shown.partition("@")
    found = find(job_dir, name)
    if version(found) == shown:
        return found
    what = "has changed since it was shown" if digest else "may have changed since you saw it"
    look = f"look at it (`unbroken approve {name} --dry-run`), then `unbroken approve {version(found)}`"
    raise ConfigError(f"{job_dir / NAME}: {name} {what}: {look}")


def approve(job_dir: Path, shown: str, by: str, at: str, into: Path) -> str:
    """Move a rule (`version`) from those that wait to those in use, in the file `into`; a sentence for the operator.

    Raises RuleNotFound, ConfigError (it has changed; it, or those in use already, cannot be used), OSError.
    """
    chosen = as_shown(job_dir, shown)
    name = str(chosen["id"])
    check(job_dir, chosen, into)
    called = _called(job_dir, name, into)
    origin = clean_line(f"{chosen.get('origin', '')}; approved by {by}, {at}".lstrip("; "), 2 * ORIGIN_CHARS)
    before = into.read_text(encoding="utf-8") if os.path.isfile(into) else ""
    text = before.rstrip("\n") + "\n\n" * bool(before.strip()) + toml({**chosen, "id": called, "origin": origin})
    if len(text.encode()) > LEARNED_BYTES:
        raise ConfigError(f"{into} is larger than {LEARNED_BYTES >> 20} MiB: take rules out first")
    write_atomically(into, text.encode())
    _write(job_dir, [one for one in read(job_dir) if one != chosen])
    as_what = "" if called == name else f" as {called}"
    return f"{name} is in {into}{as_what}: whatever starts from now on reads output with it"


def _called(job_dir: Path, name: str, into: Path) -> str:
    """The rule's id among those of `into`: other jobs have rules for their incidents of the same number."""
    if into.parent == job_dir:
        return name
    job = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in job_dir.absolute().name)
    return f"{RULE_PREFIX}{job[:60]}-{name.removeprefix(RULE_PREFIX)}"


def reject(job_dir: Path, name: str, learned: Path) -> str:
    """Forget a rule that waits, or withdraw one that was approved; a sentence for the operator.

    `learned`: the site's file of learned rules. Raises RuleNotFound, ConfigError, OSError.
    """
    _, path = where(job_dir, name, learned)
    if path == job_dir / NAME:
        _drop(job_dir, name)
        return f"{name} is forgotten"
    write_atomically(path, _without(path, name).encode())
    return f"{name} is withdrawn from {path}: whatever starts from now on reads output without it"


def where(job_dir: Path, name: str, learned: Path) -> tuple[dict[str, Any], Path]:
    """A rule that waits or is in use, and its file. Raises RuleNotFound, ConfigError (not as we left it)."""
    for path in (job_dir / NAME, job_dir / APPROVED, learned):
        for one in read(job_dir) if path.name == NAME else rows(path):
            if one.get("id") == name:
                if path.name != NAME:
                    _without(path, name)
                return one, path
    raise _not_found(job_dir, name, learned)


def _without(path: Path, name: str) -> str:
    """The file without this rule: its lines are left out, all others stay. Raises ConfigError."""
    text = path.read_text(encoding="utf-8")
    pieces = re.split(r"(?m)^(?=\[\[rule\]\])", text)
    kept = [piece for number, piece in enumerate(pieces) if not number or not _is_rule(piece, name)]
    try:
        left = tables.parse("".join(kept)).get("rule", [])
    except ValueError:
        left = []
    if left != [one for one in rows(path) if one.get("id") != name]:
        raise ConfigError(f"{path}: {name} cannot be told from what is around it: take its [[rule]] out by hand")
    return "".join(kept)


def _is_rule(piece: str, name: str) -> bool:
    try:
        found = tables.parse(piece).get("rule", [])
    except ValueError:
        return False
    return [one.get("id") for one in found] == [name]


def rows(path: Path) -> list[dict[str, Any]]:
    """The rules in a file of approved ones, as TOML has them; none where it is not. Raises ConfigError."""
    found = read_toml(path).get("rule", []) if os.path.isfile(path) else []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"{path}: [[rule]] tables are expected")
    return found


def check(job_dir: Path, rule: Mapping[str, Any], into: Path) -> None:
    """Whether the rule can be used beside those in the file `into`. In the main thread. Raises ConfigError."""
    in_use, name = rows(into), clean_line(str(rule["id"]), 60)
    if any(one.get("id") == _called(job_dir, name, into) for one in in_use):
        raise ConfigError(f"{into}: a rule of this name is there already: withdraw it first (`unbroken reject`)")
    try:
        with _no_longer_than(TRIED_S):
            _try_hard(rule)
            rules.packaged().with_site([*in_use, rule])
    except TimeoutError:
        why = "its regex takes too long on some lines: it may have a repeat within a repeat"
        raise ConfigError(f"{job_dir / NAME}: rule.{name}: {why}") from None
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
    raise _not_found(job_dir, name)


def _not_found(job_dir: Path, name: str, learned: Path | None = None) -> RuleNotFound:
    in_use: list[str] = []
    for path in [job_dir / APPROVED, *([learned] if learned is not None else [])]:
        with contextlib.suppress(ConfigError):
            in_use += [str(one["id"]) for one in rows(path) if str(one.get("id", "")).startswith(RULE_PREFIX)]
    told = f"; in use: {', '.join(clean_line(one, 80) for one in in_use[-20:])}" if in_use else ""
    return RuleNotFound(f"no rule {name} waits; rules that wait: {', '.join(names(job_dir)) or 'none'}{told}")


def _drop(job_dir: Path, name: str) -> None:
    _write(job_dir, [one for one in read(job_dir) if one["id"] != name])


def _write(job_dir: Path, rows: list[dict[str, Any]]) -> None:
    path = job_dir / NAME
    if rows:
        write_atomically(path, (_HEAD + "".join("\n" + toml(one) for one in rows)).encode())
    else:
        path.unlink(missing_ok=True)


def toml(rule: Mapping[str, Any]) -> str:
    """One [[rule]]. JSON writes strings, numbers and lists of these as TOML does, but for DEL."""
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in rule.items()]
    return "\n".join(["[[rule]]", *lines, ""]).replace("\x7f", "\\u007F")
