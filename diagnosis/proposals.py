"""A rule of output that a model proposes: words of a line that was shown. It has to be a good one to be kept at all.

Whatever is kept does nothing by itself: an operator reads it and approves it (`unbroken approve`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from diagnosis import rules
from diagnosis.incident import ProposedRule
from diagnosis.logs.progress import ProgressReader
from diagnosis.redact import HIDDEN
from diagnosis.shown import ShownLine
from diagnosis.signals import clean_line
from diagnosis.taxonomy import TAXONOMY, FailureClass

MIN_CHARS: Final = 12
MAX_CHARS: Final = 160
MIN_WORDS: Final = 2
CONFIDENCE: Final = 0.6
"""Of a rule that a person has read and approved, and nobody has tried."""
_WORD: Final = re.compile(r"[A-Za-z]{3,}")
_DIGITS: Final = re.compile(r"\d+")


def propose(given: object, failure_class: FailureClass, lines: Sequence[ShownLine], id: str) -> ProposedRule | None:
    """The proposed rule, if it is worth a person's time; None for anything else."""
    if not isinstance(given, Mapping) or TAXONOMY[failure_class].kind not in ("cause", "symptom"):
        return None
    number, text = given.get("line"), given.get("text")
    if type(number) is not int or not 1 <= number <= len(lines) or not isinstance(text, str):
        return None
    line, text = lines[number - 1], clean_line(text, MAX_CHARS + 1).strip()
    if not line.said or text not in line.text or HIDDEN in text or not MIN_CHARS <= len(text) <= MAX_CHARS:
        return None
    rule = ProposedRule(id=id, failure_class=failure_class, text=text, line=line.text)
    return rule if not flaw(rule) else None


def row(rule: ProposedRule) -> dict[str, object]:
    """As a `[[rule]]` of a file of rules: the words as they stand, any number in the place of each number."""
    return {
        "id": rule.id,
        "class": rule.failure_class.value,
        "regex": r"\d+".join(re.escape(part) for part in _DIGITS.split(rule.text)),
        "literals": [max(_DIGITS.split(rule.text), key=len).strip()],
        "role": "cause" if TAXONOMY[rule.failure_class].kind == "cause" else "symptom",
        "severity": "error",
        "confidence": CONFIDENCE,
        "samples": [rule.line],
    }


def flaw(rule: ProposedRule) -> str:
    """Why the rule is no good, in words; empty for one that may be put before a person."""
    if len(_WORD.findall(rule.text)) < MIN_WORDS:
        return "too few words to mean anything"
    made = row(rule)
    packaged = rules.packaged()
    try:  # alone: compiling all the others takes longer than everything else here
        rules.Rules(rules.RuleFile(noise=packaged.file.noise)).with_site([made])
    except ValueError as error:
        return str(error)
    known = {match.rule.id for match in packaged.scan(rule.line.encode()) if match.rule.severity != "warning"}
    if known:
        return f"the line is known already: {', '.join(sorted(known))}"
    if rules.is_mild(rule.line.encode()):
        return "the line calls itself a warning"
    progress = ProgressReader()
    progress.feed(rule.line.encode(), 1)
    if progress.step is not None or progress.finished_line is not None:
        return "the line shows that training goes on"
    pattern = re.compile(str(made["regex"]), re.IGNORECASE)
    for harmless in _harmless(packaged, rule.failure_class):
        if pattern.search(harmless):
            return f"it matches a line that means something else: {clean_line(harmless, 120)!r}"
    return ""


def _harmless(packaged: rules.Rules, failure_class: FailureClass) -> list[str]:
    """Lines that a rule of this class must not match: healthy ones, noise, and what tells of other classes."""
    lines = [*rules.healthy(), *(line for noise in packaged.file.noise for line in noise.samples)]
    for rule in packaged.rules:
        lines += rule.others
        lines += rule.samples if rule.failure_class is not failure_class else ()
    return lines
