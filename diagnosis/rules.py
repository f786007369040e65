"""Rules as data (`output_rules/*.toml`): what a line of output means (docs/rules.md). Kernel: `diagnosis.kernel.log`.

Healthy output must cost little: a block of bytes is searched for a few short literals (`gates`) first. Only a line that
contains one is matched rule by rule. The files are read once, as package data. A line that calls itself a warning, or
says that the problem was dealt with (a retry, a skip), is never more than a warning.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

import msgspec

from diagnosis import tables
from diagnosis.kernel.xid import details, read_sxid, read_xid
from diagnosis.signals import Evidence, Finding, Frozen, KernelEvent, Scope, Severity, Signal, clean_text
from diagnosis.taxonomy import FailureClass
from diagnosis.text import HIDDEN, Words, blind, shape

MAX_LINE: Final = 2048
MAX_BEFORE: Final = 300
"""Rules see this many bytes of a line."""
WINDOWS: Final = 8
"""At most this many pieces of a longer line are matched."""
MAX_MATCHES: Final = 200
"""One scan yields at most this many matches: a flood says no more than its beginning."""
BLOCK_OF_SHAPES: Final = 8192
SHAPE_BYTES: Final = 600
SHAPES_KEPT: Final = 256
"""Shapes of lines without a gate: in blocks of so many bytes, so long, so many (and a block more)."""
MIN_LITERAL: Final = 3
"""Characters; a shorter word is in every line."""
_DIGITS: Final = b"0123456789"
_ZEROS: Final = str.maketrans("123456789", "0" * 9)
WARNING_CONFIDENCE: Final = 0.4
UNVERIFIED_CONFIDENCE: Final = 0.5
"""A driver's message that a rank prints has at most this confidence: any program can print such a line."""
_OF_DRIVER: Final = re.compile(rb"NVRM: |SXid \(PCI")
_SERIOUS: Final[tuple[Severity, ...]] = ("warning", "error", "fatal")
LEVEL_BYTES: Final = 160
_MILD: Final = re.compile(
    rb"(?<![\w.-])(?:WARNING|WARN|INFO|DEBUG|NOTICE)(?![\w-])|\b[Ww]arning: |\[(?:warn|warning|info|debug)\]"
    rb"|\b[A-Za-z]\w{0,40}Warning:|^(?:\[\w+\]:? ?)?\[?[WID]\d{4}[ \]]|\[W |(?<![\w.-])[WID]\d{4} \d\d:\d\d:"
    rb"|: [WIE] (?:tensorflow|external)/"
)
"""A level below error: of logging, glog, torch, TensorFlow (whose C++ errors are none), Python's warnings."""
_SEVERE: Final = re.compile(rb"NCCL WARN|slurmstepd: error|srun: error|\b(?:CRITICAL|FATAL)\b")
_DEALT_WITH: Final = re.compile(
    rb"\b(?:retrying|will retry|retry (?:attempt )?#?\d+|skipping|ignoring|ignored|falling back|fall back to|"
    rb"recovered from|attempt \d+ succeeded|(?:then|but) succeeded|"
    rb"using (?:the )?cached?|from (?:the )?(?:local )?cache|continuing)\b",
    re.IGNORECASE,
)
_PEER: Final = re.compile(
    rb"(?:remote=|(?:closed by peer|Read error|writev|Connect timeout) )\[(?:::ffff:)?([\w.:-]{1,80})\]:\d"
    rb"|peer (?:\[(?:::ffff:)?)?([A-Za-z0-9][\w.-]{1,80})(?:\]|:|<)",
    re.IGNORECASE,
)
"""The other end of a connection, as torch, gloo and NCCL write it."""
_PADDING: Final = b" " * 24
"""A terminal joins lines with this many spaces."""
_COLOUR: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_RAISED: Final = re.compile(rb"\s*(?:\[\w+\]:? ?)?[A-Za-z_][\w.]*(?:Error|Exception|Timeout)\b")
"""An exception's own line may quote such words."""

Role = Literal["cause", "symptom", "cascade", "outcome"]
"""`cause` and `symptom` as in the taxonomy; `outcome`: how the job ended; `cascade`: what a rank says when another one
has died (connection closed, store gone): it names a class only if no other rank failed first."""


class Rule(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"failure_class": "class"}):
    """One rule as written in a file of rules."""

    id: str
    failure_class: FailureClass
    regex: str
    literals: tuple[str, ...]
    """One of them (in lower case) is in every line that matches."""
    role: Role = "cause"
    scope: Scope = "rank"
    severity: Severity = "fatal"
    confidence: float = 0.8
    sources: tuple[str, ...] = ("output",)
    any_level: bool = False
    """Whatever level the line is logged at, and whatever was done about it."""
    if_mild: float = 0.0
    """The confidence as an error in a line that calls itself a warning; 0: it stays a warning."""
    samples: tuple[str, ...] = ()
    """Lines that must match."""
    others: tuple[str, ...] = ()
    """Lines that must not."""
    origin: str = ""
    """Who proposed and approved it, if no person wrote it."""


class Noise(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lines that mean nothing, whatever they contain."""

    id: str
    regex: str
    samples: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


class RuleFile(Frozen, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of rules."""

    gates: tuple[str, ...] = ()
    """One of them (in lower case) is in every line of output that means something."""
    rule: tuple[Rule, ...] = ()
    noise: tuple[Noise, ...] = ()


class RuleMatch(Frozen, frozen=True, kw_only=True):
    """A rule matched a line. `scan` does not know where the line stands: readers of logs fill in the rest."""

    rule: str
    role: Role
    failure_class: FailureClass
    confidence: float
    severity: Severity
    """These two as they are on this line."""
    scope: Scope
    text: str
    fields: dict[str, str] = {}
    """What the rule extracted: device, peer, port, rank, errno, path, step, ..."""
    line: int = 0
    """From 1, in its file."""
    rank: int | None = None
    node: str = ""
    at: float | None = None
    count: int = 1
    """How many lines (of this rank) match; `line` is the first."""
    last_line: int | None = None
    """The last of them, if there are several."""


class _Compiled:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        # As text of one byte a character: looking for text in text costs a fifth of looking for bytes in bytes.
        self.words = tuple(literal.lower().encode().decode("latin-1") for literal in rule.literals)

    @functools.cached_property
    def regex(self) -> re.Pattern[bytes]:
        """Compiled when a line needs it: most never are."""
        return re.compile(self.rule.regex.encode(), re.IGNORECASE)

    @functools.cached_property
    def blind(self) -> re.Pattern[bytes]:
        """Finds something in the shape of every line that matches."""
        return re.compile(blind(self.rule.regex).encode(), re.IGNORECASE)


class Rules:
    """A compiled set of rules for one or more sources."""

    def __init__(self, file: RuleFile) -> None:
        self.file = file
        self.rules = file.rule
        self._noise = re.compile("|".join(f"(?:{one.regex})" for one in file.noise).encode() or b"(?!)", re.IGNORECASE)
        gates = {gate.lower() for gate in file.gates}
        self._gates = tuple(sorted(g.encode() for g in gates if not any(other in g for other in gates - {g})))
        self._with_digits = tuple(shape(gate) for gate in self._gates if gate.translate(None, _DIGITS) != gate)
        self._harmless: set[bytes] = set()
        """Lines without a gate, every digit a zero: a log is full of lines that differ in their numbers only."""
        self._by_source: dict[str, list[_Compiled]] = {}
        for rule in file.rule:
            compiled = _Compiled(rule)
            for source in rule.sources:
                self._by_source.setdefault(source, []).append(compiled)
        self._words = {source: Words([one.words for one in compiled]) for source, compiled in self._by_source.items()}
        self._shapes = Words(
            [tuple(word.translate(_ZEROS) for word in one.words) for one in self._by_source.get("output", [])]
        )

    def with_site(self, rows: Iterable[Mapping[str, object]]) -> Rules:
        """These rules with a site's over them, as TOML has them (`[[rule]]`): one whose id is known changes what it
        names, another is new, and one of class `none` is noise. Raises `ValueError`, which names rule and key.
        """
        merged = {rule.id: rule for rule in self.rules}
        noise = {one.id: one for one in self.file.noise}
        gates = list(self.file.gates)
        rows = list(rows)
        for row in rows:
            rule = _site_rule(row, merged)
            if rule.failure_class is FailureClass.NONE:
                noise[rule.id] = Noise(id=rule.id, regex=rule.regex, samples=rule.samples, others=rule.others)
                _check_noise(noise[rule.id])
                continue
            merged[rule.id] = rule
            gates += [low for low in map(str.lower, rule.literals) if not any(gate in low for gate in gates)]
        changed = {"gates": tuple(gates), "rule": tuple(merged.values()), "noise": tuple(noise.values())}
        made = Rules(msgspec.structs.replace(self.file, **changed))
        for row in rows:
            if row["id"] in merged:
                made.check(str(row["id"]))
        return made

    def check(self, name: str) -> None:
        """Raises `ValueError` where a sample of a rule does not match, or another line does."""
        rule = next(one for one in self.rules if one.id == name)
        for source in rule.sources:
            for wanted, lines in ((True, rule.samples), (False, rule.others)):
                for line in lines:
                    found = any(match.rule == name for match in self.scan(line.encode(), source))
                    if found is not wanted:
                        key = "samples" if wanted else "others"
                        how = "does not match" if wanted else "matches"
                        raise ValueError(f"rule.{name}: `{key}`: it {how} {clean_text(line, 120)!r}")

    def is_noise(self, line: bytes) -> bool:
        """The line means nothing, whatever words are in it."""
        return self._noise.search(line) is not None

    def scan(self, data: bytes, source: str = "output") -> Iterator[RuleMatch]:
        """Matches in a block of whole lines, in order, at most one for each rule and line. Never raises."""
        lowered = data.lower()
        compiled, words = self._by_source.get(source, []), self._words.get(source)
        matches = 0
        lines = self._gated_lines(lowered) if source == "output" else _lines(lowered)
        for start, end in lines:
            end = min(end, start + MAX_LINE)
            low = lowered[start:end]
            for number in words.rules_for(low.decode("latin-1")) or () if words is not None else ():
                one = compiled[number]
                line = data[start:end]
                if b"\x1b" in line:
                    line = _COLOUR.sub(b"", line)
                match = one.regex.search(line)
                padded = match is not None and _PADDING in line
                if padded:
                    line, match = _apart(line, one.regex)
                if match is None:
                    continue
                if self._noise.search(line) is not None:
                    if padded:
                        continue
                    break
                yield _matched(one.rule, match, line)
                matches += 1
                if matches >= MAX_MATCHES:
                    return

    def may_mean(self, shape: bytes) -> bool:
        """Whether a line of output of this shape may mean something."""
        compiled = self._by_source.get("output", [])
        return any(
            compiled[n].blind.search(shape) is not None for n in self._shapes.rules_for(shape.decode("latin-1")) or ()
        )

    @property
    def gate_shapes(self) -> tuple[bytes, ...]:
        """One of them is in the shape of every line of output that means something."""
        return tuple(map(shape, self._gates))

    def _gated_lines(self, lowered: bytes) -> list[tuple[int, int]]:
        """(start, end) of the lines that contain a gate, in order."""
        zeroed = shape(lowered) if len(lowered) <= BLOCK_OF_SHAPES else b""
        here = set(zeroed.split(b"\n"))
        if zeroed and here <= self._harmless:
            return []
        found: dict[int, int] = {}
        for gate in self._gates:
            at = lowered.find(gate)
            while at >= 0:
                start = max(lowered.rfind(b"\n", 0, at), lowered.rfind(b"\r", max(0, at - MAX_LINE), at)) + 1
                end = lowered.find(b"\n", at)
                end = len(lowered) if end < 0 else end
                if at - start > MAX_LINE // 2:
                    start = at - MAX_LINE // 2  # a huge line: the neighbourhood of the gate
                found[start] = end
                at = lowered.find(gate, min(end, start + MAX_LINE))
        if not found and zeroed and max(map(len, here)) <= SHAPE_BYTES:
            if len(self._harmless) >= SHAPES_KEPT:
                self._harmless.clear()
            if not any(gate in zeroed for gate in self._with_digits):
                self._harmless |= here
        return _few(found) if len(found) > WINDOWS else sorted(found.items())

    def scan_text(self, lines: Iterable[str], source: str = "output") -> list[RuleMatch]:
        """`scan` for lines that are text already."""
        return list(self.scan("\n".join(lines).encode(errors="replace"), source))

    def match(self, signal: Signal) -> Finding | None:
        """The strongest reading of one signal."""
        found = self.scan(signal.text.encode(errors="replace"), signal.source)
        best = max(found, key=lambda one: one.confidence, default=None)
        if best is None:
            return None
        return finding(best, signal.source, at=signal.at, node=signal.node, rank=signal.rank)


def _matched(rule: Rule, match: re.Match[bytes], line: bytes) -> RuleMatch:
    fields = {
        name: clean_text(value.decode(errors="replace"), 120)
        for name, value in match.groupdict().items()
        if value is not None
    }
    for name in [name for name in fields if name[-1].isdigit()]:  # host2: another way to say host
        fields.setdefault(name.rstrip("0123456789"), fields[name])
    if rule.role == "cascade" and "peer" not in fields and (peer := _PEER.search(line)) is not None:
        fields["peer"] = (peer[1] or peer[2]).decode(errors="replace")
    text = _said(line, match.start())
    if HIDDEN in text:
        whole = clean_text(line.decode(errors="replace"), MAX_LINE)
        fields = {name: value if value in whole else HIDDEN for name, value in fields.items()}
    failure_class, confidence, severity = rule.failure_class, rule.confidence, rule.severity
    if not rule.any_level and is_mere_warning(line):
        severity = "error" if rule.if_mild else "warning"
        confidence = rule.if_mild or min(confidence, WARNING_CONFIDENCE)
    reading = _driver_error(rule.id, line)
    if reading is not None:
        failure_class, confidence = reading.failure_class, reading.confidence
        fields = {**details(reading), **fields, "code": str(reading.code)}
        if reading.device:
            fields["pci"] = reading.device
    if _OF_DRIVER.search(line) is not None:
        severity = min(severity, "error", key=_SERIOUS.index)
        confidence = min(confidence, UNVERIFIED_CONFIDENCE)
    return RuleMatch(
        rule=rule.id,
        role=rule.role,
        failure_class=failure_class,
        confidence=confidence,
        severity=severity,
        scope=rule.scope,
        text=text,
        fields=fields,
    )


def _apart(line: bytes, regex: re.Pattern[bytes]) -> tuple[bytes, re.Match[bytes] | None]:
    """Of lines that a terminal joined, with spaces up to its width, the first that matches; a match over several lines
    is of the whole."""
    for piece in re.split(rb" {%d,}" % len(_PADDING), line):
        match = regex.search(piece)
        if match is not None:
            return piece, match
    return line, regex.search(line)


def _few(found: Mapping[int, int]) -> list[tuple[int, int]]:
    """Of the neighbourhoods of gates in a huge line the first and the last: they overlap, and say the same."""
    lines: dict[int, list[int]] = {}
    for start in sorted(found):
        lines.setdefault(found[start], []).append(start)
    half = WINDOWS // 2
    return [
        (start, end)
        for end, starts in lines.items()
        for start in (starts if len(starts) <= WINDOWS else [*starts[:half], *starts[-half:]])
    ]


def is_of_driver(text: str) -> bool:
    """Whether the text has a message of NVIDIA's driver as the kernel log has it."""
    return _OF_DRIVER.search(text.encode(errors="replace")) is not None


def is_mere_warning(line: bytes) -> bool:
    """The line says that it is no error, or that the problem was dealt with."""
    head = line[:LEVEL_BYTES]
    if _SEVERE.search(head) is not None or _RAISED.match(line) is not None:
        return False
    return _MILD.search(head) is not None or _DEALT_WITH.search(line) is not None


def _said(line: bytes, start: int) -> str:
    """The text around a match: what is far before it in the line (bars, arguments) says nothing."""
    bar = max(line.rfind(b"it/s]", 0, start), line.rfind(b"s/it]", 0, start))
    begin = bar + 5 if bar >= 0 else 0
    if start - begin > MAX_BEFORE:
        # Cleaned before it is cut: a secret is not known without the name before it.
        before = clean_text(line[begin:start].decode(errors="replace"), MAX_LINE)[-MAX_BEFORE // 2 :]
        gap = " " * line[start - 1 : start].isspace()
        return clean_text(f"…{before}{gap}{line[start:].decode(errors='replace')}")
    return clean_text(line[begin:].decode(errors="replace"))


def _driver_error(rule: str, line: bytes) -> KernelEvent | None:
    if rule not in ("xid", "sxid"):
        return None
    text = line.decode(errors="replace")
    return read_xid(text) if rule == "xid" else read_sxid(text)


def _lines(data: bytes) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        yield start, end
        start = end + 1


def finding(
    match: RuleMatch, source: str, *, at: float, node: str = "", rank: int | None = None, attempt: int = 0
) -> Finding:
    """The finding of a match in what a source said at this time."""
    return Finding(
        rule=match.rule,
        failure_class=match.failure_class,
        confidence=match.confidence,
        scope=match.scope,
        severity=match.severity if match.confidence >= 0.5 else "warning",
        evidence=Evidence(text=match.text, source=source, node=node, rank=rank, at=at),
        node=node,
        rank=rank,
        gpu=match.fields.get("pci", "").lower().split(".")[0],  # without the function of the device
        fields=match.fields,
        at=at,
        attempt=attempt,
    )


def _site_rule(row: Mapping[str, object], known: Mapping[str, Rule]) -> Rule:
    name = row.get("id")
    if not isinstance(name, str) or not name:
        raise ValueError("rule: each needs an `id`")
    before: dict[str, object] = msgspec.to_builtins(known[name]) if name in known else {}
    if {"regex", "literals"} & row.keys():
        before.update(samples=[], others=[])  # those of ours were for our pattern
    try:
        rule = msgspec.convert({**before, **row}, Rule)
        re.compile(rule.regex.encode())
    except (msgspec.ValidationError, re.error) as error:
        raise ValueError(f"rule.{name}: {error}") from None
    if not rule.literals or any(len(one) < MIN_LITERAL for one in rule.literals):
        raise ValueError(f"rule.{name}: `literals`: at least one, of {MIN_LITERAL} characters or more")
    return rule


def _check_noise(noise: Noise) -> None:
    pattern = re.compile(noise.regex.encode(), re.IGNORECASE)
    for key, wanted, lines in (("samples", True, noise.samples), ("others", False, noise.others)):
        for line in lines:
            if (pattern.search(line.encode()) is not None) is not wanted:
                how = "does not match" if wanted else "matches"
                raise ValueError(f"rule.{noise.id}: `{key}`: it {how} {clean_text(line, 120)!r}")


def parse(*texts: str) -> Rules:
    """Rules from TOML. Raises `msgspec.ValidationError` or `tomllib.TOMLDecodeError` with the place."""
    files = [msgspec.convert(tables.parse(text), RuleFile) for text in texts]
    return Rules(
        RuleFile(
            gates=tuple(dict.fromkeys(gate for file in files for gate in file.gates)),
            rule=tuple(rule for file in files for rule in file.rule),
            noise=tuple(noise for file in files for noise in file.noise),
        )
    )


_FOLDER: Final = tables.folder("diagnosis.output_rules")


@functools.cache
def packaged() -> Rules:
    """The rules that come with the package."""
    return parse(*(file.read_text(encoding="utf-8") for file in sorted(_FOLDER.glob("*.toml"))))


@functools.cache
def healthy() -> tuple[str, ...]:
    """Lines of healthy logs: no rule may match one as an error."""
    return tuple(_FOLDER.joinpath("healthy.txt").read_text(encoding="utf-8").splitlines())


_in_use: list[Rules] = []
"""The packaged rules with a site's rows over them, once a process has read them."""


def default() -> Rules:
    """The rules of this process: the packaged ones, with those of the site where it has any."""
    return _in_use[0] if _in_use else packaged()


def use(rows: Iterable[Mapping[str, object]], base: Rules | None = None) -> Rules:
    """From now on, `default` is `base` (the packaged rules) with these rows over it. For the start of a process."""
    rows = list(rows)
    _in_use[:] = [(base or packaged()).with_site(rows)] if rows or base is not None else []
    return default()
