"""Alerts from outside: Alertmanager's webhook (version 4; Grafana posts the same form) becomes events of the job.

What an alert means is said by rules (`alert_rules.toml`, and `[[alert]]` of the site file). An alert is no proof: it
stands beside the evidence. Where a site's rule says so, it has a node tested before the next restart, or replaced at a
checkpoint (docs/access.md, docs/adr/0054, docs/adr/0055).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from diagnosis.kernel.xid import default_tables
from diagnosis.signals import clean_line
from diagnosis.taxonomy import FailureClass
from supervisor.blocking import timeout
from supervisor.errors import AccessRefused, ConfigError
from supervisor.messages import AlertsSeen, OutsideAlert

BODY_BYTES: Final = 1 << 20
MOST_READ: Final = 500
"""Alerts of one post; Alertmanager says itself how many it left out (`max_alerts`)."""
POSTS: Final = 60
"""So many at once, and as many again in a minute."""
NEW_ALERTS: Final = 512
"""That the journal takes at once, and `POSTS` more in a minute: one who alternates would fill it."""
HEARD_S: Final = 3600.0
"""An alert that still fires is told again to the job so often."""
ANSWER_S: Final = 4.0
TEXT_LIMIT: Final = 200
SHOWN: Final = 20
"""Names in an answer."""
_REGEX: Final = re.compile(r"[\\^$+?()\[\]{}|]|\.\*")
_HEAD: Final = re.compile(r"\s*\[\[\s*[\"']?alert[\"']?\s*\]\]")
NO_REGEX: Final = (
    "`*` stands for any text, and nothing else is special: "
    'in place of "Port(Flap|Down).*" write ["PortFlap*", "PortDown*"]'
)
RULES: Final = Path(__file__).with_name("alert_rules.toml")
NODE_LABELS: Final = ("Hostname", "node", "nodename", "kubernetes_node", "node_name", "host", "hostname", "instance")
GPU_LABELS: Final = ("pci_bus_id", "UUID", "gpu", "device")


class PostedAlert(msgspec.Struct, kw_only=True, frozen=True):
    """One of a post. Unknown fields are left out; Grafana has more."""

    status: Literal["firing", "resolved"]
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Webhook(msgspec.Struct, kw_only=True, frozen=True):
    """Body of POST /v1/alerts."""

    alerts: list[PostedAlert]


class AlertsPosted(msgspec.Struct, kw_only=True):
    """What became of them."""

    schema: int = 1
    ok: bool = True
    firing: int = 0
    """Of nodes of the job."""
    ended: int = 0
    unmatched: int = 0
    """No rule is about them, or one says that they are dropped."""
    unknown_nodes: tuple[str, ...] = ()
    """The job has no such node: these were dropped. At most 20."""
    left_out: int = 0
    """More than are read of one post, or than the journal takes in a minute."""


class AlertRule(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One `[[alert]]`."""

    id: str
    match: dict[str, str | tuple[str, ...]]
    """Label -> its value, or several; `*` stands for any text, and small and capital letters are the same."""
    failure_class: FailureClass = msgspec.field(name="class", default=FailureClass.UNKNOWN)
    severity: Literal["drop", "tell", "suspect", "swap"] = "tell"
    node: tuple[str, ...] = NODE_LABELS
    """The first of these labels that is there names the node."""
    gpu: tuple[str, ...] = GPU_LABELS
    xid: tuple[str, ...] = ()
    """Labels that may hold the code of an Xid: then its class counts."""


class KnownNode(NamedTuple):
    """A node of the job, under all names that alerts may give it."""

    name: str
    others: tuple[str, ...] = ()


class Translated(NamedTuple):
    firing: tuple[OutsideAlert, ...]
    ended: tuple[str, ...]
    answer: AlertsPosted


class SiteRules(NamedTuple):
    rules: tuple[AlertRule, ...]
    problems: tuple[str, ...]
    """What is wrong with each rule that is not used: file and line."""


class _RuleFile(msgspec.Struct, forbid_unknown_fields=True):
    alert: list[AlertRule] = []


# ----- rules (pure) -----


def read_rules(rows: Sequence[Mapping[str, Any]], where: str) -> tuple[AlertRule, ...]:
    """`[[alert]]` as TOML has them. Raises ConfigError, which names the rule."""
    try:
        found = msgspec.convert({"alert": list(rows)}, _RuleFile).alert
        for rule in found:
            if not rule.match or not rule.node:
                raise ValueError(f"alert {rule.id!r}: `match` and `node` must name at least one label")
            for pattern in itertools.chain.from_iterable(map(_patterns, rule.match.values())):
                if len(pattern) > TEXT_LIMIT or _REGEX.search(pattern):
                    raise ValueError(f"alert {rule.id!r}: {pattern[:60]!r}: {NO_REGEX}")
    except ValueError as error:
        raise ConfigError(f"{where}: {str(error).replace('`$.', '`')}") from None
    return tuple(found)


def site_rules(rows: Sequence[Mapping[str, Any]], path: str) -> SiteRules:
    """The rules of the site file at `path` that can be used, and what is wrong with each other one.

    Behind one that cannot be used no rule proposes a swap: that one may have been there to prevent it.
    """
    lines = _places(Path(path), len(rows)) if rows else ()
    found: list[AlertRule] = []
    problems: list[str] = []
    for number, row in enumerate(rows):
        where = f"{path}, line {lines[number]}" if lines else f"{path}, [[alert]] {number + 1}"
        try:
            (rule,) = read_rules([row], where)
        except ConfigError as error:
            name = "" if not isinstance(row.get("id"), str) else f" (alert {clean_line(row['id'], 60)!r})"
            problems.append(f"{str(error).replace('[0]`', '`')}{name}: this rule is not used")
            continue
        is_bound = rule.severity == "swap" and bool(problems)
        found.append(msgspec.structs.replace(rule, severity="tell") if is_bound else rule)
    return SiteRules(tuple(found), tuple(problems))


def _places(path: Path, count: int) -> tuple[int, ...]:
    """The line of each `[[alert]]`; empty: they cannot be told."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ()
    found = tuple(number for number, line in enumerate(text.splitlines(), 1) if _HEAD.match(line))
    return found if len(found) == count else ()


def _patterns(given: str | tuple[str, ...]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given


def is_like(value: str, pattern: str) -> bool:
    """Whether it is the pattern, in which `*` stands for any text. One pass: no pattern can hold the controller up."""
    value, pattern = value.lower(), pattern.lower()
    first, *others = pattern.split("*")
    if not others:
        return value == pattern
    if not value.startswith(first):
        return False
    at = len(first)
    for part in others[:-1]:
        found = value.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return value.endswith(others[-1]) and len(value) - len(others[-1]) >= at


def rule_for(labels: Mapping[str, str], rules: Iterable[AlertRule]) -> AlertRule | None:
    for rule in rules:
        values = ((labels.get(name, "")[:TEXT_LIMIT], _patterns(given)) for name, given in rule.match.items())
        if all(any(is_like(value, pattern) for pattern in patterns) for value, patterns in values):
            return rule
    return None


def translate(posted: Webhook, rules: Sequence[AlertRule], nodes: Sequence[KnownNode], now: float) -> Translated:
    """What a post says of the job's nodes."""
    by_name = _names(nodes)
    firing: dict[str, OutsideAlert] = {}
    ended: dict[str, None] = {}
    unmatched, unknown = 0, dict[str, None]()
    for one in posted.alerts[:MOST_READ]:
        rule = rule_for(one.labels, rules)
        if rule is None or rule.severity == "drop":
            unmatched += 1
            continue
        named = next((one.labels[label] for label in rule.node if one.labels.get(label)), "")
        node_name = _find(named, by_name)
        if not node_name:
            unknown[clean_line(named, 60) or "(none)"] = None
            continue
        alert = _alert(one, rule, node_name, now)
        if one.status == "firing":
            firing[alert.key] = alert
            ended.pop(alert.key, None)
        elif alert.key not in firing:
            ended[alert.key] = None
    answer = AlertsPosted(
        firing=len(firing),
        ended=len(ended),
        unmatched=unmatched,
        unknown_nodes=tuple(unknown)[:SHOWN],
        left_out=max(0, len(posted.alerts) - MOST_READ),
    )
    return Translated(tuple(firing.values()), tuple(ended), answer)


def _names(nodes: Sequence[KnownNode]) -> dict[str, str]:
    """Every name, in small letters, that means one node alone -> that node. Its own name comes before others'."""
    found: dict[str, set[str]] = {}
    for node in nodes:
        for name in map(str.lower, (node.name, *node.others)):
            for each in (name,) if _is_ip(name) else (name, name.partition(".")[0]):
                found.setdefault(each, set()).add(node.name)
    return {name: min(of) for name, of in found.items() if len(of) == 1} | {one.name.lower(): one.name for one in nodes}


def _find(named: str, by_name: Mapping[str, str]) -> str:
    """The job's node of that name, with or without a port and a domain; empty: there is none."""
    name = named.strip().lower()[:TEXT_LIMIT]
    host, _, port = name.rpartition(":")
    for each in (name, host.strip("[]") if port.isdecimal() else ""):
        if each and (found := by_name.get(each) or (by_name.get(each.partition(".")[0]) if not _is_ip(each) else "")):
            return found
    return ""


def _is_ip(name: str) -> bool:
    return name.replace(".", "").isdecimal() or ":" in name


def _alert(one: PostedAlert, rule: AlertRule, node: str, now: float) -> OutsideAlert:
    told = one.annotations
    text = told.get("summary") or told.get("description") or told.get("message") or ""
    key = hashlib.sha256(msgspec.json.encode([node, sorted(one.labels.items())])).hexdigest()[:16]
    return OutsideAlert(
        key=key,
        node=node,
        name=clean_line(one.labels.get("alertname", "") or rule.id, 80),
        text=clean_line(text, TEXT_LIMIT),
        failure_class=_class(one.labels, rule),
        gpu=clean_line(next((one.labels[label] for label in rule.gpu if one.labels.get(label)), ""), 64),
        suspect=rule.severity == "suspect",
        swap=rule.severity == "swap",
        at=now,
    )


def _class(labels: Mapping[str, str], rule: AlertRule) -> FailureClass:
    code = next((labels[label] for label in rule.xid if labels.get(label, "").isdecimal()), "")[:6]
    row = default_tables().xid.get(int(code)) if code else None
    return row.failure_class if row is not None else rule.failure_class


def changed(
    found: Translated, firing: Mapping[str, OutsideAlert], now: float, most: int = NEW_ALERTS
) -> AlertsSeen | None:
    """What the job does not know yet, of those that fire by its knowledge; None: nothing. `most`: that are new."""
    new = tuple(itertools.islice((one for one in found.firing if one.key not in firing), most))
    again = tuple(one for one in found.firing if one.key in firing and now - firing[one.key].at >= HEARD_S)
    ended = tuple(key for key in found.ended if key in firing)
    return AlertsSeen(at=now, firing=new + again, ended=ended) if new or again or ended else None


# ----- receiving -----


class JobOfAlerts(NamedTuple):
    """What the receiver asks of the job."""

    nodes: Callable[[], Sequence[KnownNode]]
    firing: Callable[[], Mapping[str, OutsideAlert]]
    submit: Callable[[AlertsSeen], asyncio.Future[Any]]
    stall: Callable[[], str]
    """Why the journal cannot be written; empty: it can."""
    is_over: Callable[[], bool]


class AlertReceiver:
    """Takes posts, not too many, and answers when the job has them."""

    def __init__(self, rules: Sequence[AlertRule], job: JobOfAlerts) -> None:
        self._rules, self._job = tuple(rules), job
        self._left, self._new_left, self._at = float(POSTS), float(NEW_ALERTS), 0.0

    async def take(self, body: bytes, now: float) -> AlertsPosted:
        """Raises AccessRefused for what is too much or cannot be kept now, DecodeError for what is no post."""
        more = max(0.0, now - self._at) * POSTS / 60.0
        self._left = min(float(POSTS), self._left + more)
        self._new_left = min(float(NEW_ALERTS), self._new_left + more)
        self._at = now
        if self._left < 1.0:
            raise AccessRefused(429, f"more than {POSTS} posts of alerts in a minute: group them (`group_interval`)")
        self._left -= 1.0
        if self._job.is_over():
            raise AccessRefused(400, "the job has ended already")
        posted = msgspec.json.decode(body, type=Webhook)
        found = translate(posted, self._rules, self._job.nodes(), now)
        known = self._job.firing()
        event = changed(found, known, now, int(self._new_left))
        new = sum(one.key not in known for one in event.firing) if event is not None else 0
        found.answer.left_out += sum(one.key not in known for one in found.firing) - new
        self._new_left -= new
        if event is not None:
            if stall := self._job.stall():
                raise AccessRefused(503, f"the journal cannot be written ({stall}): post it again")
            try:
                async with timeout(ANSWER_S):
                    await asyncio.shield(self._job.submit(event))
            except asyncio.TimeoutError:
                raise AccessRefused(503, "the journal has not taken the alerts in time: post them again") from None
        return found.answer
