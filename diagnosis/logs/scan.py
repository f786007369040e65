"""Which lines of a block may match a rule: most of a log is never read further than this.

Two engines find the same lines. One scans for all patterns at once (hyperscan, if it is installed). The other looks up
the shapes of lines (`diagnosis.text`): it compiles nothing, and serves small inputs and agents. Both may give a line
too many, and never one too few, so the same lines match in the end. Patterns are simplified for the scan: limits of
repeats, lookarounds and anchors are slow to scan, and are checked when the line is read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from diagnosis import rules
from diagnosis.kernel import log as kernel_rules
from diagnosis.kernel.log import KernelRules, read_stamp
from diagnosis.logs import launchers
from diagnosis.text import blind, closing, literal
from diagnosis.text import shape as shape_of
from diagnosis.text import tokens as tokens_of

_AROUND: Final = ("(?=", "(?!", "(?<=", "(?<!")
_LIMITS: Final = re.compile(r"\{(\d*),(\d*)\}")
COMMON: Final = (
    "number of nan iterations",
    "loss",
    "grad",
    "scale",
    "state",
    "step",
    "iter",
    "mlx5",
    "nvme",
    "timeout",
    "failed",
    "checkpoint",
    "not found",
)
"""Healthy lines are full of these words."""
LETTERS: Final = 5
FEW_LETTERS: Final = 3
"""Letters that are enough to look for; and where none of the common words is near."""

NO_NUMBERS: Final = frozenset({"nan", "inf", "non-finite", "nonfinite"})
_NAN: Final = r"^f? ?nan|(?:[^ ]|[^f] |[^o]f )nan|of nan .*(?:loss|grad)"
"""Not that of "number of nan iterations: 0", which Megatron-LM writes at the end of each line."""
_FEW_BYTES: Final = 20
"""A class of so many at most a scan takes for part of a word."""


def scanned(expression: str, words: Sequence[str]) -> list[str]:
    """What to scan for instead of a pattern: `simplified`, or what costs less by the words one of which it needs.

    That a loss is no number begins with words of every line, and ends in one that others begin with (INFO): then the
    ends of the word are told apart.
    """
    if not set(words) <= NO_NUMBERS:
        return [simplified(expression)]
    ends = [byte for byte in range(256) if not re.match(rb"\w", bytes([byte]))]
    classes = [
        "".join(f"\\x{byte:02x}" for byte in ends[at : at + _FEW_BYTES]) for at in range(0, len(ends), _FEW_BYTES)
    ]
    return [f"{_NAN}|infinity|inf$|finite", *(f"inf[{one}]" for one in classes)]


def simplified(expression: str) -> str:
    """Finds something in every line in which `expression` does, and more; scanned faster.

    Of each alternative the most telling part without a gap, where one says enough. Of others limits of repeats are
    lifted, as counting is what costs a scan most; lookarounds and anchors are left out.
    """
    alternatives = _split(_plain_tokens(tokens_of(expression)), lambda token, _: token == "|")
    return "|".join("".join(_most_telling(one)) for one in alternatives)


def _plain_tokens(tokens: Sequence[str]) -> list[str]:
    told: list[str] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token in _AROUND:
            at = closing(tokens, at)
            if at < len(tokens) and (tokens[at] in "*+?" or _LIMITS.fullmatch(tokens[at])):
                at += 1
            continue
        at += 1
        limits = _LIMITS.fullmatch(token)
        if token.startswith("(?P<"):
            told.append("(?:")
        elif token in ("^", "$", r"\A", r"\Z"):
            continue
        elif limits is not None:
            low = int(limits[1] or 0)
            few = limits[2].isdigit() and int(limits[2]) <= 3
            told.append(token if few else ("*", "+")[low] if low < 2 else f"{{{low},}}")
        else:
            told.append(token)
        if (limits is not None or token in ("*", "+", "?")) and at < len(tokens) and tokens[at] in ("?", "+"):
            at += 1  # lazy or greedy: all the same to a scan
    return told


def _split(tokens: Sequence[str], divides: Callable[[str, str], bool]) -> list[list[str]]:
    """Parts of a pattern, outside of groups; `divides` is asked of each token and the one after it."""
    parts: list[list[str]] = [[]]
    depth = 0
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        depth += (token[0] == "(") - (token == ")")
        if depth == 0 and divides(token, following):
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _most_telling(tokens: list[str]) -> list[str]:
    """The part without a gap that says most, where it says enough: a scan that waits for the end of a gap costs more,
    and Vectorscan 5.4.12 (which the wheel of hyperscan is made of) now and then jumps over it.
    """
    found = _sure(tokens)
    enough = LETTERS if _telling_letters(tokens) < _letters(tokens) else FEW_LETTERS
    return found.tokens if found.letters >= enough else tokens


class _Part(NamedTuple):
    """Something is in every text that matches."""

    letters: int
    tokens: list[str]


def _sure(tokens: Sequence[str]) -> _Part:
    """Of the parts without a gap the one with the most letters; of groups with gaps, one for each of their options."""
    parts = [_Part(0, [])]
    run: list[str] = []
    at = 0
    while at < len(tokens):
        end = closing(tokens, at) if tokens[at][0] == "(" else at + 1
        repeat = tokens[end] if end < len(tokens) and (tokens[end] in "*+?" or _LIMITS.fullmatch(tokens[end])) else ""
        element, at = tokens[at:end], end + bool(repeat)
        if not (_is_loose(repeat) or any(map(_is_loose, element))):
            run += [*element, *([repeat] if repeat else [])]
            continue
        parts.append(_Part(_telling_letters(run), run))
        run = []
        if element[0][0] == "(" and (not repeat or repeat == "+"):
            options = [_sure(one) for one in _split(element[1:-1], lambda token, _: token == "|")]
            joined = [token for one in options for token in ("|", *one.tokens)][1:]
            parts.append(_Part(min(one.letters for one in options), ["(?:", *joined, ")"]))
    parts.append(_Part(_telling_letters(run), run))
    return max(parts, key=lambda one: one.letters)


def _is_loose(token: str) -> bool:
    """It repeats what stands before it as often as that comes."""
    return token in ("*", "+") or (_LIMITS.fullmatch(token) is not None and token.endswith(",}"))


def _telling_letters(tokens: Sequence[str]) -> int:
    """How many, without those of common words."""
    text = "".join(tokens).lower()
    return _letters(tokens) - sum(len(word) for word in COMMON if word in text)


def _letters(tokens: Sequence[str]) -> int:
    """How many letters each text that matches has at least."""
    count = at = 0
    while at < len(tokens):
        token = tokens[at]
        end = closing(tokens, at) if token[0] == "(" else at + 1
        following = tokens[end] if end < len(tokens) else ""
        if following not in ("?", "*") and not following.startswith("{0"):
            if token[0] == "(":
                inside = tokens[at + 1 : end - 1]
                count += min(_letters(one) for one in _split(inside, lambda token, _: token == "|"))
            else:
                count += token.isalpha()
        at = end
    return count


OUTPUT: Final = 1
"""A rule of output may match the line."""
KERNEL: Final = 2
"""It may be a message of the kernel."""
REPORT: Final = 4
"""A traceback or a launcher's report begins here or goes on."""
FRAME: Final = 8
"""A block has a frame of a traceback, with or without its beginning."""

CHUNK: Final = 16 * 1024
"""Bytes for which a scan tells whether a pattern is in them; its lines are then looked for one by one."""
FLOOD: Final = 400
"""A rule of output with more lines than this in one log: of each later block only its last chunk is read."""
SHAPES_KEPT: Final = 20_000
SHAPE_BYTES: Final = 500
"""Shapes of harmless lines: so many (and a block more), so long."""

NEAR_MISSES_KEPT: Final = 500
PATTERNS_KEPT: Final = 500

REPORT_WORDS: Final = ("traceback (most recent call last)", *launchers.WORDS)
FRAME_WORD: Final = b'File "'


class LogLine(NamedTuple):
    """One line of a block, and the readers that should read it."""

    start: int
    end: int
    readers: int


class Engine(Protocol):
    """Finds the lines that may match. An engine serves one log, because it remembers what it has seen."""

    has_frames: bool
    """The last block may contain a frame of a traceback; False is certain."""

    def lines(self, block: bytes) -> list[LogLine]:
        """In order, each once. `block`: whole lines, without the last newline."""

    def left_out(self) -> dict[str, int]:
        """Rule -> about so many of its lines were not given (of a flood)."""


# ----- shapes -----


class Shapes:
    """The portable engine."""

    def __init__(self, output: rules.Rules | None = None, kernel: KernelRules | None = None) -> None:
        self._output = output or rules.default()
        self._kernel = kernel or kernel_rules.default()
        self._kernel_words = tuple(sorted({literal(word).encode() for word in self._kernel.literals}))
        self._gates = self._output.gate_shapes
        self._reports = re.compile(b"|".join(re.escape(literal(word).encode()) for word in REPORT_WORDS))
        self._harmless: set[bytes] = set()
        self.has_frames = False

    def lines(self, block: bytes) -> list[LogLine]:
        self.has_frames = FRAME_WORD in block
        here = shape_of(block).split(b"\n")
        unknown = set(here) - self._harmless
        if not unknown:
            return []
        spoken = self._may_mean(unknown)
        found, start = [], 0
        for shape in here:
            end = start + len(shape)
            if shape in spoken:
                found.append(LogLine(start, end, spoken[shape]))
            start = end + 1
        return found

    def left_out(self) -> dict[str, int]:
        return {}

    def _may_mean(self, unknown: set[bytes]) -> dict[bytes, int]:
        """The readers of the lines of these shapes; shapes without a reader are remembered as harmless."""
        text = b"\n".join(unknown).lower()
        of_kernel = [word for word in self._kernel_words if word in text]
        of_output = [gate for gate in self._gates if gate in text]
        reports = self._reports.search(text) is not None
        spoken = {}
        for shape in unknown:
            readers = self._readers(shape, of_kernel, of_output, reports)
            if readers:
                spoken[shape] = readers
        if len(self._harmless) > SHAPES_KEPT:
            self._harmless.clear()
        self._harmless.update(shape for shape in unknown if shape not in spoken and len(shape) <= SHAPE_BYTES)
        return spoken

    def _readers(self, shape: bytes, of_kernel: list[bytes], of_output: list[bytes], reports: bool) -> int:
        low = shape.lower()
        report = REPORT if reports and self._reports.search(low) is not None else 0
        told_by_kernel = any(word in low for word in of_kernel)
        if not told_by_kernel and not any(gate in low for gate in of_output):
            return report
        if len(shape) > SHAPE_BYTES or b"\\x" in low or self._output.may_mean(low):
            return report | OUTPUT | KERNEL
        if told_by_kernel and self._kernel.may_mean(read_stamp(shape.decode(errors="replace")).text.lower()):
            return report | OUTPUT | KERNEL
        return report


# ----- one scan -----


class Pattern(NamedTuple):
    """One pattern of the scan. Every line that it matches has one of the `literals` (in lower case)."""

    id: str
    expression: str
    literals: tuple[bytes, ...]
    reader: int
    scanned: str
    """What is scanned for instead: it is in every line that the expression matches."""


def patterns(output: rules.Rules | None = None, kernel: KernelRules | None = None) -> list[Pattern]:
    """All patterns of the scan."""
    kernel = kernel or kernel_rules.default()
    found = [
        Pattern(rule.id, rule.regex, _lowered(rule.literals), OUTPUT, expression)
        for rule in (output or rules.default()).rules
        if "output" in rule.sources
        for expression in scanned(rule.regex, rule.literals)
    ]
    # Lines of a chunk that may have a message of the kernel are all looked at: such a chunk should be rare.
    found += [_whole(one.rule.id, one.regex.pattern, one.literals, KERNEL) for one in kernel.compiled]
    # A record of /dev/kmsg has its newlines escaped: what follows one is a line of its own.
    found.append(_whole("newline", r"\\x0a", (r"\x0a",), KERNEL))
    found.append(_whole("own", kernel_rules.OWN.pattern, kernel_rules.OWN_LITERALS, KERNEL))
    found += [_whole(word, re.escape(word), (word,), REPORT) for word in REPORT_WORDS]
    found.append(_whole("frame", re.escape(FRAME_WORD.decode()), (FRAME_WORD.decode(),), FRAME))
    return found


def _whole(name: str, expression: str, words: Iterable[str], reader: int) -> Pattern:
    return Pattern(name, expression, _lowered(words), reader, simplified(expression))


def _lowered(words: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(word.lower().encode() for word in words)


class Scan:
    """A compiled scan, shared by the logs of one process. Raises ImportError where hyperscan is not installed."""

    def __init__(self, looked_for: Sequence[Pattern], compiled: bytes = b"") -> None:
        import hyperscan  # 6 MB that agents never need

        self.patterns = tuple(looked_for)
        self._hyperscan = hyperscan
        if compiled:
            self.database: Any = hyperscan.loadb(compiled, hyperscan.HS_MODE_BLOCK)
            self.scratch: Any = hyperscan.Scratch(self.database)
            self.database.scratch = self.scratch
            return
        self.database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
        expressions = [one.scanned.encode() for one in looked_for]
        try:
            self._compile(expressions)
        except hyperscan.error:
            self._compile([self._possible(one, expr) for one, expr in zip(looked_for, expressions, strict=True)])

    def _compile(self, expressions: Sequence[bytes], database: Any = None) -> None:
        hs = self._hyperscan
        flags = hs.HS_FLAG_CASELESS | hs.HS_FLAG_PREFILTER | hs.HS_FLAG_SINGLEMATCH | hs.HS_FLAG_ALLOWEMPTY
        (database or self.database).compile(
            expressions=list(expressions),
            ids=list(range(len(expressions))),
            elements=len(expressions),
            flags=[flags] * len(expressions),
        )

    def _possible(self, one: Pattern, expression: bytes) -> bytes:
        """A pattern that cannot be scanned is replaced by its words."""
        try:
            self._compile([expression], self._hyperscan.Database(mode=self._hyperscan.HS_MODE_BLOCK))
        except self._hyperscan.error:
            return b"|".join(map(re.escape, one.literals))
        return expression

    def dump(self) -> bytes:
        """For another process on this machine (`compiled`)."""
        return bytes(self._hyperscan.dumpb(self.database))

    def hits(self, chunk: memoryview, note: Callable[..., None]) -> None:
        """Calls `note` with the number of each pattern that is in the chunk, once."""
        self.database.scan(chunk, match_event_handler=note)


class AtOnce:
    """The engine that scans for everything at once."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._regexes: dict[int, re.Pattern[bytes]] = {}
        self._harmless: dict[int, set[bytes]] = {}
        """Pattern -> shapes of lines that have its words, and that it cannot mean: near misses repeat."""
        self._given = [0] * len(scan.patterns)
        self.has_frames = False
        self._left_out: dict[str, int] = {}

    def lines(self, block: bytes) -> list[LogLine]:
        chunks: dict[int, list[tuple[int, int]]] = {}
        patterns, view = self._scan.patterns, memoryview(block)
        hits: list[int] = []
        self.has_frames = False

        def note(number: int, *_: object) -> None:
            hits.append(number)

        for start, end in _chunks(block):
            self._scan.hits(view[start:end], note)
            if not hits:
                continue
            for number in hits:
                if patterns[number].reader == FRAME:
                    self.has_frames = True
                else:
                    chunks.setdefault(number, []).append((start, end))
            hits.clear()
        found: dict[int, LogLine] = {}
        lowered: dict[int, bytes] = {}
        for number, places in chunks.items():
            self._locate(number, places, block, lowered, found)
        return [found[start] for start in sorted(found)]

    def _locate(
        self,
        number: int,
        places: list[tuple[int, int]],
        block: bytes,
        lowered: dict[int, bytes],
        found: dict[int, LogLine],
    ) -> None:
        """The lines of one pattern in the chunks that it is in."""
        one = self._scan.patterns[number]
        before, read = self._given[number], 0
        for start, end in places:
            is_last = end == places[-1][1]
            if one.reader == OUTPUT and self._given[number] > FLOOD and not is_last:
                continue
            low = lowered.get(start)
            if low is None:
                low = lowered[start] = block[start:end].lower()
            for line_start, line_end in _lines_with(low, one.literals):
                if self._may_mean(number, one, block[start + line_start : start + line_end]):
                    _add(found, start + line_start, start + line_end, one.reader)
                    self._given[number] += 1
            read += end - start
        left_out = sum(end - start for start, end in places) - read
        if left_out:
            given = self._given[number] - before
            self._left_out[one.id] = self._left_out.get(one.id, 0) + given * left_out // read

    def _may_mean(self, number: int, one: Pattern, line: bytes) -> bool:
        """A second look at a line that has a pattern's words, where the chunk has the pattern."""
        if one.reader == REPORT or len(line) > rules.MAX_LINE:
            return True
        harmless = self._harmless.setdefault(number, set())
        form = shape_of(line)
        if form in harmless:
            return False
        # Only the reader of kernel messages knows the prefix of a line: anchors do not hold here.
        expression = one.expression if one.reader == OUTPUT else one.scanned
        regex = self._regexes.get(number)
        if regex is None:
            regex = self._regexes[number] = re.compile(expression.encode(), re.IGNORECASE)
        if regex.search(line) is not None:
            return True
        if len(form) <= SHAPE_BYTES and _blind(expression).search(form) is None:
            if len(harmless) >= NEAR_MISSES_KEPT:
                harmless.clear()
            harmless.add(form)
        return False

    def left_out(self) -> dict[str, int]:
        return dict(self._left_out)


@functools.lru_cache(PATTERNS_KEPT)
def _blind(expression: str) -> re.Pattern[bytes]:
    return re.compile(blind(expression).encode(), re.IGNORECASE)


def _add(found: dict[int, LogLine], start: int, end: int, reader: int) -> None:
    before = found.get(start)
    found[start] = LogLine(start, end, reader | (before.readers if before is not None else 0))


def _chunks(block: bytes) -> Iterable[tuple[int, int]]:
    """(start, end) of pieces of whole lines, each with its last newline."""
    start, size = 0, len(block)
    while start < size:
        end = block.rfind(b"\n", start, start + CHUNK) + 1
        if end == 0 and start + CHUNK < size:
            end = block.find(b"\n", start + CHUNK) + 1  # a line longer than a chunk
        if end == 0 or start + CHUNK >= size:
            end = size
        yield start, end
        start = end


def _lines_with(low: bytes, words: Sequence[bytes]) -> Iterable[tuple[int, int]]:
    """(start, end) of the lines that have one of the words; a line may be given twice."""
    for word in words:
        at = low.find(word)
        while at >= 0:
            start = low.rfind(b"\n", 0, at) + 1
            end = low.find(b"\n", at)
            end = len(low) if end < 0 else end
            yield start, end
            at = low.find(word, end)


def at_once(looked_for: Sequence[Pattern], compiled: bytes = b"") -> Scan | None:
    """The scan for all patterns; None if hyperscan is not installed or does not work on this machine."""
    try:
        return Scan(looked_for, compiled)
    except Exception:  # a processor without SSE4.2, another version's dump: the portable engine does the same
        return None
