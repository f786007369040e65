"""Rules that a language model proposes: what they are made of, and the gates that each must pass.

A model chooses words of a line that was shown; it never writes a pattern. The words become a `[[rule]]` in which every
number and path stands for any other. A proposal for an incident that was no failure becomes a filter of noise (a rule
of class `none`). Every gate is deterministic, and says in words why it rejects. What passes waits for an operator.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from diagnosis import rules
from diagnosis.incident import ProposedRule, Verdict
from diagnosis.logs.steps import ProgressReader
from diagnosis.signals import clean_line
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.text import HIDDEN, shape

TEXT_CHARS: Final = 160
MIN_CHARS: Final = 12
MIN_WORDS: Final = 2
"""Words that tell something; see `_common_words`."""
COMMON_CLASSES: Final = 3
"""A word that samples of so many classes have tells none of them."""
CONFIDENCE: Final = 0.6
"""Of a rule that a person has read and approved, and that nobody has tried."""
_WORD: Final = re.compile(r"[a-z]{3,}")
_DIGITS: Final = re.compile(r"\d{1,12}", re.ASCII)
_VARIABLE: Final = re.compile(
    r"(?P<hex>\b0[xX][0-9a-fA-F]{1,16}\b)|(?P<number>[0-9]+)|(?P<path>(?<![\w./])/[^\s:,;'\"()\[\]]+)"
)
_STANDS_FOR: Final = {
    "hex": "0x[0-9a-f]{1,16}",
    "number": "[0-9]{1,20}",
    "path": r"/[^\s:,;'\"()\[\]]{1,200}",
}
"""Bounded, and none can go on with what follows it in the text: nothing to backtrack into."""


class Tried(NamedTuple):
    """What a proposal is tried on, beyond the lines that come with the rules."""

    healthy: tuple[str, ...] = ()
    """Lines after which training went on."""
    cases: tuple[tuple[FailureClass, str], ...] = ()
    """Lines of incidents whose class is known."""
    hosts: frozenset[str] = frozenset()


NOTHING: Final = Tried()


class Rejected(NamedTuple):
    gate: str
    why: str


def may_learn(verdict: Verdict | None, settled: FailureClass | None) -> bool:
    """Whether an incident may teach a rule: no cause was found, or an operator has corrected the class."""
    return settled is not None or verdict is None or verdict.kind in ("unknown", "symptom")


def row(rule: ProposedRule) -> dict[str, Any]:
    """As a `[[rule]]` of a file of rules."""
    pattern, fixed = _generalized(rule.text)
    kind = TAXONOMY[rule.failure_class].kind
    found: dict[str, Any] = {
        "id": rule.id,
        "class": rule.failure_class.value,
        "regex": pattern,
        "literals": [max(fixed, key=len)],
        "samples": [rule.line],
    }
    if rule.failure_class is FailureClass.NONE:
        return found
    return found | {
        "role": "cause" if kind == "cause" else "symptom",
        "severity": "error",
        "confidence": CONFIDENCE,
    }


def _generalized(text: str) -> tuple[str, list[str]]:
    """The pattern, and the words that stand in it as they are."""
    pattern, fixed, at = "", [], 0
    for match in _VARIABLE.finditer(text):
        pattern += re.escape(text[at : match.start()]) + _STANDS_FOR[str(match.lastgroup)]
        fixed.append(text[at : match.start()].strip())
        at = match.end()
    return pattern + re.escape(text[at:]), [*fixed, text[at:].strip()]


# ----- the gates -----


def rejected(rule: ProposedRule, tried: Tried = NOTHING) -> Rejected | None:
    """The first gate that rejects the proposal; None: it may be put before a person."""
    for name, gate in GATES:
        if why := gate(rule, tried):
            return Rejected(name, why)
    return None


def _class(rule: ProposedRule, _: Tried) -> str:
    if rule.failure_class is FailureClass.NONE or TAXONOMY[rule.failure_class].kind in ("cause", "symptom"):
        return ""
    return f"{rule.failure_class.value} is no cause of a failure"


def _words(rule: ProposedRule, _: Tried) -> str:
    if rule.text not in rule.line or HIDDEN in rule.text:
        return "its words do not stand in the line, or something secret stood between them"
    if not MIN_CHARS <= len(rule.text) <= TEXT_CHARS:
        return f"{MIN_CHARS} to {TEXT_CHARS} characters are allowed"
    return ""


def _general(rule: ProposedRule, _: Tried) -> str:
    words = {word for part in _generalized(rule.text)[1] for word in _WORD.findall(part.lower())}
    telling = words - _common_words()
    if len(telling) >= MIN_WORDS:
        return ""
    return f"too general: only {', '.join(sorted(telling)) or 'nothing'} in it tells this failure from others"


def _host(rule: ProposedRule, tried: Tried) -> str:
    found = [name for name in tried.hosts if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", rule.text)]
    return f"it names {min(found)}, and would match nowhere else" if found else ""


def _compiles(rule: ProposedRule, _: Tried) -> str:
    try:  # alone: compiling all the others takes longer than everything else here
        made = rules.Rules(rules.RuleFile()).with_site([row(rule)])
    except ValueError as error:
        return str(error)
    is_found = rule.failure_class is FailureClass.NONE or made.may_mean(shape(rule.line.lower().encode()))
    return "" if is_found else "the scanner does not find its own line with it"


def _known(rule: ProposedRule, _: Tried) -> str:
    known = {one.rule for one in rules.default().scan(rule.line.encode()) if one.severity != "warning"}
    if rule.failure_class is FailureClass.NONE:
        return "" if known else "no rule matches its line: there is nothing to filter"
    return f"the line is known already: {', '.join(sorted(known))}" if known else ""


def _warning(rule: ProposedRule, _: Tried) -> str:
    is_filter = rule.failure_class is FailureClass.NONE
    return "the line calls itself a warning" if not is_filter and rules.is_mere_warning(rule.line.encode()) else ""


def _progress(rule: ProposedRule, _: Tried) -> str:
    progress = ProgressReader()
    following = _DIGITS.sub(lambda match: str(int(match[0]) + 1), rule.line)  # one line alone shows no step
    for number, line in enumerate((rule.line, following), 1):
        progress.feed(line.encode(), number)
    shows = progress.step is not None or progress.finished_line is not None
    return "the line shows that training goes on" if shows else ""


def _healthy(rule: ProposedRule, tried: Tried) -> str:
    if rule.failure_class is FailureClass.NONE:
        return ""
    noise = (line for one in rules.default().file.noise for line in one.samples)
    return _hit(rule, (*rules.healthy(), *noise, *tried.healthy), "a line of healthy runs")


def _other_classes(rule: ProposedRule, tried: Tried) -> str:
    own = rule.failure_class
    lines = [line for found, line in tried.cases if found is not own]
    for one in rules.default().rules:
        lines += one.others if own is not FailureClass.NONE else ()
        lines += one.samples if one.failure_class is not own else ()
    return _hit(rule, lines, "a line that means something else")


def _hit(rule: ProposedRule, lines: Iterable[str], what: str) -> str:
    pattern = re.compile(str(row(rule)["regex"]), re.IGNORECASE)
    found = next((line for line in lines if pattern.search(line[: rules.MAX_LINE])), None)
    return "" if found is None else f"it matches {what}: {clean_line(found, 120)!r}"


GATES: Final[tuple[tuple[str, Callable[[ProposedRule, Tried], str]], ...]] = (
    ("class", _class),
    ("words", _words),
    ("general", _general),
    ("host", _host),
    ("compiles", _compiles),
    ("known", _known),
    ("warning", _warning),
    ("progress", _progress),
    ("healthy", _healthy),
    ("other classes", _other_classes),
)
"""In this order. A further one needs time: `supervisor.opinion.pending.check` measures it when a rule is approved."""


@functools.cache
def _common_words() -> frozenset[str]:
    """Words that tell nothing: healthy lines have them, or samples of several classes."""
    classes: Mapping[str, set[FailureClass]] = defaultdict(set)
    for rule in rules.packaged().rules:
        for word in _WORD.findall(" ".join(rule.samples).lower()):
            classes[word].add(rule.failure_class)
    common = {word for word, found in classes.items() if len(found) >= COMMON_CLASSES}
    return frozenset(common | set(_WORD.findall("\n".join(rules.healthy()).lower())))
