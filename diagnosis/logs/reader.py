"""What a log file tells by itself, as a `LogSummary`: rules of output, tracebacks, launchers, kernel events, curves.

Blocks of whole lines go in, so that a file of any size is read in bounded memory. An engine (`diagnosis.logs.scan`)
says which lines may mean something; of the others only their number, and now and then a step, is looked at. The end of
a log tells most of a failure: it is kept, and read in full.

Rank and node of a line stand in its prefix, or in the name of its file. Launchers write prefixes of many kinds. Some
are clear (`[rank3]:`). Others (`3: `, `node7: `) could be anything: they count if most lines of a file have one.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from diagnosis import rules, tracebacks
from diagnosis.incident import LauncherFailure, LoggedTraceback, LogKind, LogSummary
from diagnosis.kernel import log as kernel_rules
from diagnosis.kernel.log import KernelReader, KernelRules, moment, read_stamp
from diagnosis.kernel.xid import Tables
from diagnosis.logs import curves, launchers, scan
from diagnosis.logs.steps import WORDS as PROGRESS_WORDS
from diagnosis.logs.steps import ProgressReader
from diagnosis.rules import RuleMatch
from diagnosis.signals import KernelEvent, clean_text
from diagnosis.text import hide_keys


class Origin(NamedTuple):
    """A line without its prefix."""

    text: str
    rank: int | None = None
    node: str = ""
    at: float | None = None


_STAMP: Final = re.compile(
    r"\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:? ?(?:std(?:out|err) [FP] )?"
)
_COLOUR: Final = re.compile(r"(?:\x1b\[[0-9;]{0,20}m)+")
_SURE: Final = (
    re.compile(r"\s?\[(?:rank|default)[ :=]?(?P<rank>\d{1,6})\]:? ?", re.IGNORECASE),
    re.compile(r"\[\d{1,9},(?P<rank>\d{1,6})\]<std(?:out|err)>: ?"),  # mpirun --tag-output
    re.compile(
        r"\((?P<actor>[\w.]{1,80}),?(?: rank=(?P<rank>\d{1,6}),?)? pid=\d{1,9}(?:, ip=(?P<node>[\w.:-]{1,80}))?\) ?"
    ),
    re.compile(r"\[pod/(?P<node>[\w.-]{1,120})/[\w.-]{1,80}\] ?"),  # kubectl logs --prefix
)
_LEARNED: Final = {
    "srun": re.compile(r" {0,6}(?P<rank>\d{1,5}): ?"),
    "pair": re.compile(r"\[(?P<rank>\d{1,5})/\d{1,5}\]:? "),
    "numbered": re.compile(r"\[(?P<rank>\d{1,5})\]:? "),
    "worker": re.compile(
        r"\[?(?P<node>(?:[\w.-]{0,80}?[-_.])?(?:worker|trainer|replica|launcher|master|rank|task|proc(?:ess)?)"
        r"[-_ ]?(?P<rank>\d{1,5})?)\]?\s{0,8}[:|] ?",
        re.IGNORECASE,
    ),
    "host": re.compile(r"(?P<node>[A-Za-z][\w-]{0,60}\d[\w.-]{0,60})\s{0,4}[:|] "),
}
_NO_NODES: Final = ("", "rank", "task", "proc", "process", "worker", "trainer", "replica", "launcher", "master")
"""A word of such a prefix without a number names nobody."""
_PROMPT: Final = re.compile(r"^\[?(?:[\w-]{1,40})@(?P<node>[A-Za-z][\w-]{0,60}\d[\w.-]{0,60})[ :][^#$%\n]{0,80}[#$%] ")
"""The prompt of a shell on the node whose state somebody asked for."""
_MOST: Final = 0.7
"""A prefix counts if this share of a file's lines has one."""
SAMPLED_LINES: Final = 400
_ENOUGH: Final = 4


class Prefixes:
    """The prefixes of the lines of one file, learned from some of them."""

    def __init__(self, sample: Iterable[str] = ()) -> None:
        self._learned = ""
        lines = [_plain(line) for line in sample if line.strip()][:SAMPLED_LINES]
        lines = [line for line in lines if line]
        for name, pattern in _LEARNED.items():
            found = [match for line in lines if (match := pattern.match(line)) is not None]
            told = Counter(match[0] for match in found)
            several = len(told) > 1 or (name == "worker" and len(found) >= _ENOUGH)
            # Numbered lines count up; ranks come again and again.
            again = max(told.values(), default=0) > 1
            if len(found) >= max(_ENOUGH, _MOST * len(lines)) and several and again:
                self._learned = name
                break

    def read(self, line: str) -> Origin:
        """The text of a line, and its rank and node."""
        rank: int | None = None
        node = ""
        text = _COLOUR.sub("", line) if "\x1b" in line[:80] else line
        for _ in range(5):
            match = _STAMP.match(text) or self._prefix(text)
            if match is None:
                break
            told = match.groupdict()
            if told.get("rank"):
                rank = int(told["rank"])
            named = told.get("node") or ""
            node = named if named.rstrip("[]:= ").lower() not in _NO_NODES else node
            text = text[match.end() :]
        return Origin(text, rank, node)

    def origin(self, line: bytes, year: int | None = None) -> Origin:
        """The same for raw bytes, with the time of the line."""
        text = line[:4000].decode(errors="replace")
        return self.read(text)._replace(at=moment(text, year))

    def _prefix(self, text: str) -> re.Match[str] | None:
        for pattern in _SURE:
            match = pattern.match(text)
            if match is not None:
                return match
        if self._learned:
            return _LEARNED[self._learned].match(text)
        return None


def _plain(line: str) -> str:
    text = _COLOUR.sub("", line)
    match = _STAMP.match(text)
    return text[match.end() :] if match is not None else text


class Place(NamedTuple):
    """The rank and node that wrote a file, by its name."""

    rank: int | None = None
    node: str = ""
    attempt: int | None = None


_ELASTIC: Final = re.compile(
    r"(?:^|/)attempt_(?P<attempt>\d{1,6})/(?P<rank>\d{1,6})/(?:stdout\.log|stderr\.log|error\.json)$"
)
_OURS: Final = re.compile(
    r"(?:^|/)attempts/(?P<attempt>\d{1,6})/(?:(?P<node>[^/]+)/)?(?:rank(?P<rank>\d{1,6})\.(?:out|err|exit|error\.json)|evidence-)"
)
_RANK_IN_NAME: Final = re.compile(
    r"(?:^|[/_.-])(?:global[-_]?)?(?:rank|proc(?:ess)?|task|worker|trainer|replica)[-_]?(?P<rank>\d{1,6})(?=[/_.-]|$)",
    re.IGNORECASE,
)
_NODE: Final = re.compile(
    r"(?:^|[/_.])(?P<node>(?:(?:node|host|gpu|compute|dgx|hgx|ip|h100|a100|worker|slurm-node)[-_]?[a-z]{0,8}|"
    r"(?:cn|nid|n|c)[-_]?)\d[\w-]{0,40}?)"
    r"(?=[/_.]|-(?:dmesg|kern|kmsg|syslog|messages|journal|console|nvidia|dcgm|rank|out|err|log|stdout|stderr)|$)",
    re.IGNORECASE,
)
_SLURM: Final = re.compile(
    r"(?:^|[/_.-])(?P<job>\d{2,10})[_.-](?P<rank>\d{1,5})\.(?:out|err|log|txt)(?:\.(?:gz|zst))?$"
)


def place(path: str) -> Place:
    """The rank and node by the name of one file alone."""
    path = path[-500:]
    elastic = _ELASTIC.search(path)
    if elastic is not None:
        return Place(int(elastic["rank"]), "", int(elastic["attempt"]))
    ours = _OURS.search(path)
    if ours is not None:
        return Place(int(ours["rank"]) if ours["rank"] else None, ours["node"] or "", int(ours["attempt"]))
    name = "/".join(path.rsplit("/", 2)[-2:])
    rank, node = _RANK_IN_NAME.search(name), _NODE.search(name)
    node_name = node["node"] if node is not None else ""
    if rank is not None and rank[0].strip("/_.-") == node_name:
        node_name = ""
    return Place(int(rank["rank"]) if rank is not None else None, node_name)


def places(paths: Sequence[str]) -> dict[str, Place]:
    """The same for several files: Slurm's `%j_%t` shows only among files of the same job that count from 0."""
    found = {path: place(path) for path in paths}
    if len(paths) == 1 and _OURS.search(paths[0][-500:]) is None:  # the name of one file may mean anything
        found = {path: told._replace(node="") for path, told in found.items()}
    found |= _local_ranks(found)
    jobs: dict[str, dict[str, int]] = {}
    for path, told in found.items():
        match = _SLURM.search(path) if told.rank is None else None
        if match is not None:
            jobs.setdefault(f"{path[: match.start()]} {match['job']}", {})[path] = int(match["rank"])
    for ranks in jobs.values():
        if len(set(ranks.values())) > 1 and 0 in ranks.values():
            for path, rank in ranks.items():
                found[path] = found[path]._replace(rank=rank)
    return found


def _local_ranks(found: dict[str, Place]) -> dict[str, Place]:
    """torchrun's folders count ranks within a node: with folders of several nodes the numbers name no rank."""
    folders: dict[str, list[str]] = {}
    for path in found:
        match = _ELASTIC.search(path)
        if match is not None:
            folders.setdefault(path[match.start() :], []).append(path)
    told: dict[str, Place] = {}
    for end, paths in folders.items():
        nodes = {path: _node_above(path[: -len(end)]) for path in paths}
        if len(set(nodes.values())) > 1:
            told |= {path: found[path]._replace(rank=None, node=node) for path, node in nodes.items()}
    return told


def _node_above(folder: str) -> str:
    """The node that the innermost of these folders is named after."""
    return next((name for part in reversed(folder.split("/")) if (name := place(f"{part}.log").node)), "")


SAMPLE: Final = 3
SAMPLE_BYTES: Final = 16 * 1024
"""Of a block before the last lines: so many lines that may tell of progress, of its first bytes."""
BEFORE_REPORT: Final = 3
AFTER_REPORT: Final = 120
"""Lines around the beginning of a traceback or a launcher's report that are read with it."""


class Block(NamedTuple):
    """Whole lines of a log."""

    text: bytes
    lines: int
    has_frames: bool
    """It may contain frames of tracebacks."""


def lines_of_progress(block: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """The first few lines of a block that may show progress, with their numbers (that of its first is `first`)."""
    text = block[: block.rfind(b"\n", 0, SAMPLE_BYTES) + 1]
    low = text.lower()
    told = at = 0
    number = first
    while told < SAMPLE:
        found = _first_of(PROGRESS_WORDS, low, at)
        if found < 0:
            return
        start, end = low.rfind(b"\n", 0, found) + 1, low.find(b"\n", found)
        number += low.count(b"\n", at, start)
        if ProgressReader.may_tell(line := text[start:end]):
            told += 1
            yield number, line
        at, number = end + 1, number + 1


def _first_of(words: Iterable[bytes], text: bytes, at: int) -> int:
    """Where the first of any of these words is; -1: nowhere."""
    found, end = -1, len(text)
    for word in words:
        place = text.find(word, at, end)
        if place >= 0:
            found, end = place, place + len(word) - 1
    return found


def last_lines(block: bytes, count: int) -> list[bytes]:
    """The last lines of a block."""
    return block.rsplit(b"\n", count)[-count:] if count > 0 else []


def end_of_lines(block: bytes, at: int, lines: int) -> tuple[int, int]:
    """Where this many lines from `at` on end, and how many of them are beyond the block."""
    end = at - 1
    for taken in range(lines):
        end = block.find(b"\n", at)
        if end < 0:
            return len(block), lines - taken - 1
        at = end + 1
    return end, 0


def start_of_lines(block: bytes, start: int) -> int:
    """Where the lines before the one at `start` begin."""
    for _ in range(BEFORE_REPORT):
        if start <= 0:
            return 0
        start = block.rfind(b"\n", 0, start - 1) + 1
    return start


MAX_EVENTS: Final = 20_000
RARE_EVENTS: Final = 16
"""Of each kind and device this many are kept even then, so that a flood of one hides no other."""
MAX_FLOODS: Final = 20_000
_VARIES: Final = re.compile(
    rb"0x[0-9a-f]{1,16}|\d{4,20}(?![\d:])|(?<!\d)\d\d:\d\d:\d\d(?!\d)|(?<=:\d\d)[.,]\d{1,9}", re.IGNORECASE
)
"""What varies in messages of one rule and one device: addresses, long numbers, times, fractions."""


class Messages:
    """Reads one log. After `end`, `events` has them in order."""

    def __init__(self, tables: Tables | None = None, rules: KernelRules | None = None) -> None:
        self.events: list[KernelEvent] = []
        self.left_out = 0
        self._of_event: Counter[tuple[str, str]] = Counter()
        self._flood: dict[bytes, list[KernelEvent]] = {}
        """Lines that were left out, without what varies -> their events."""
        self._reader = KernelReader(tables, rules)

    @property
    def is_open(self) -> bool:
        """None of the next lines may be left out."""
        return self._reader.is_open

    def skip(self, lines: int) -> None:
        """This many lines were left out."""
        self._reader.skip(lines)

    def feed(self, line: bytes, number: int) -> list[KernelEvent]:
        """The events that the next line completes; in a flood, those of an earlier line of the same form."""
        is_flood = len(self.events) >= MAX_EVENTS and not self.is_open
        like = _VARIES.sub(b"", line) if is_flood else b""
        if like in self._flood:
            self.skip(1)
            told = self._flood[like]
            self.left_out += len(told)
            return [msgspec.structs.replace(event, line=number) for event in told]
        kept = len(self.events)
        events = self._reader.feed(line.decode(errors="replace"))
        for event in events:
            self._note(event)
        is_whole = not self.is_open and all(event.line == number for event in events)
        if is_flood and events and is_whole and len(self.events) == kept and len(self._flood) < MAX_FLOODS:
            self._flood[like] = events
        return events

    def end(self) -> None:
        """Nothing more comes."""
        for event in self._reader.end():
            self._note(event)
        self.events.sort(key=lambda event: event.line)  # an event of several lines is complete only at its last line

    def _note(self, event: KernelEvent) -> None:
        key = event.rule, event.device
        if len(self.events) < MAX_EVENTS or (self._of_event[key] < RARE_EVENTS and len(self.events) < 2 * MAX_EVENTS):
            self.events.append(event)
            self._of_event[key] += 1
        else:
            self.left_out += 1


MAX_MATCHES: Final = 400
MATCHES_OF_A_RULE: Final = 64
FIRST_OF_A_RULE: Final = 4
"""So many of each rule are kept also when there are that many: the consequences on many ranks hide no cause."""
DETAIL_LINES: Final = 3000
"""The end of a file is kept, this many bytes."""
IN_FULL: Final = 600
"""Of so many of them all numbers are read, and of a file that has no more than all of them."""
MAX_TRACEBACKS: Final = 64
"""The first and the last few of each rank, and the first and the last of all of them."""
OF_A_RANK: Final = 4
MAX_LINE: Final = 4000
"""This many bytes of a line are kept."""
TAIL: Final = 40
HEAD_LINES: Final = 120
"""The prefixes of lines, and the ranks that write them, are learned from this many lines."""

REPORT_LINES: Final = 12_000
"""Of reports, from the beginning of a file, and again from its end."""

_RANK: Final = re.compile(rb"\[rank[ :=]?(\d{1,5})\]|(?:^|\])\s?rank[ :=]?(\d{1,5})\b", re.IGNORECASE)
_NCCL: Final = re.compile(r"(?P<node>[\w.-]{1,80}):\d{1,9}:\d{1,9} \[\d{1,3}\] NCCL ")
_KERNEL_HOST: Final = re.compile(r"\d\d:\d\d:\d\d\S{0,20} (?P<node>[\w.-]{1,128}) kernel(?:\[\d+\])?: ")
_SCHEDULER: Final = re.compile(
    r"^(?:\[\S{10,40}\] |\S{3} +\d+ \S{8} \S+ )?(?:slurm(?:ctld|d|stepd|dbd)|sched|error: Node|job_complete)\b"
    r"|^\[\d{4}-\d\d-\d\dT[\d:.]{8,20}\] \[\d{1,12}\.\w{1,12}\] "
)
_TELLING: Final = ("rank", "about", "gpu", "device", "peer", "host", "node", "errno", "op")
"""Two lines of one rule with different values of these fields are two matches."""


class LogReader:
    """Reads one log. After `end`, `summary` has all of it."""

    def __init__(
        self,
        name: str,
        tables: Tables | None = None,
        messages: kernel_rules.KernelRules | None = None,
        *,
        engine: scan.Engine | None = None,
        place: Place | None = None,
        year: int | None = None,
        in_full: int = IN_FULL,
    ) -> None:
        self.name = name
        self.lines = 0
        self._engine = engine or scan.Shapes(kernel=messages)
        self._kernel = Messages(tables, messages)
        self._place, self._year = place or Place(), year
        self._in_full = in_full
        """Of so many of the last lines all numbers are read, before them only samples."""
        self._head: list[str] = []
        self._prefixes = Prefixes()
        self._matches: dict[tuple[str, ...], RuleMatch] = {}
        self._first: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Rule, severity and class -> the first match of them."""
        self._of_rule: Counter[str] = Counter()
        self._tail: deque[Block] = deque()
        """The last blocks, with at least DETAIL_LINES lines together."""
        self._tail_lines = 0
        self.size_bytes = 0
        self._report_head: list[tuple[int, bytes]] = []
        self._report_tail: deque[tuple[int, bytes]] = deque(maxlen=REPORT_LINES)
        self._report_left = 0
        """So many of the next lines belong to a report."""
        self._progress = ProgressReader()
        self._curves = curves.CurveReader()

    # ----- reading -----

    def feed(self, block: bytes) -> None:
        """The next lines, whole ones, without the last newline."""
        if not self.lines:
            self._learn(block)
        spoken = self._engine.lines(block)
        count = block.count(b"\n") + 1
        self._read(block, count, spoken)
        if spoken or self._report_left:
            self._keep_reports(block, [line for line in spoken if line.readers & scan.REPORT])
        self.lines += count
        self.size_bytes += len(block) + 1
        self._tail.append(Block(block, count, self._engine.has_frames))
        self._tail_lines += count
        while self._tail_lines - self._tail[0].lines >= DETAIL_LINES:
            old = self._tail.popleft()
            self._progress_of(lines_of_progress(old.text, self.lines - self._tail_lines + 1))
            self._tail_lines -= old.lines

    def _learn(self, block: bytes) -> None:
        """The prefixes of the lines of this file."""
        lines = block[: 256 * HEAD_LINES].split(b"\n")[:HEAD_LINES]
        self._head = [line[:500].decode(errors="replace") for line in lines]
        self._prefixes = Prefixes(self._head)
        stamped = (moment(line) for line in self._head)
        at = next((one for one in stamped if one is not None), None)
        if self._year is None and at is not None:
            self._year = 1970 + int(at // 31_556_952)

    def _read(self, block: bytes, count: int, spoken: list[scan.LogLine]) -> None:
        """Read the lines that may mean something, and those that belong to a message of the kernel that is open."""
        at, number = 0, self.lines + 1
        for line in spoken:
            at, number = self._read_open(block, at, number, line.start)
            skipped = block.count(b"\n", at, line.start)
            self._kernel.skip(skipped)
            number += skipped
            self._read_line(block[line.start : line.end], number, line.readers)
            at, number = line.end + 1, number + 1
        at, number = self._read_open(block, at, number, len(block) + 1)
        if at <= len(block):
            self._kernel.skip(count - (number - self.lines - 1))

    def _read_open(self, block: bytes, at: int, number: int, until: int) -> tuple[int, int]:
        """Lines that nothing speaks for, as long as they may belong to an open message."""
        while self._kernel.is_open and at < until:
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            self._read_line(block[at:end], number, scan.KERNEL)
            at, number = end + 1, number + 1
        return at, number

    def _read_line(self, line: bytes, number: int, readers: int) -> None:
        events: list[KernelEvent] = []
        if readers & scan.KERNEL or self._kernel.is_open:
            events = self._kernel.feed(line, number)
        else:
            self._kernel.skip(1)
        if readers & scan.OUTPUT and all(event.line != number for event in events):
            self._read_output(line, number)

    def _read_output(self, line: bytes, number: int) -> None:
        matches = list(rules.default().scan(line))
        if not matches or _is_of_kernel(line):
            return
        origin = self._prefixes.origin(line, self._year)
        rank, node = origin.rank, origin.node
        if rank is None and (told := _RANK.search(line[: rules.MAX_LINE])) is not None:
            rank = int(told[1] or told[2])
        if not node and (nccl := _NCCL.search(origin.text[:200])) is not None:
            node = nccl["node"]
        for match in matches:
            self._note_match(match, number, rank, node, origin.at)

    def _note_match(self, match: RuleMatch, number: int, rank: int | None, node: str, at: float | None) -> None:
        told = (match.fields.get(name, "") for name in _TELLING)
        key = (match.rule, match.severity, match.failure_class.value, str(rank), node, *told)
        known = self._matches.get(key)
        room = MATCHES_OF_A_RULE if len(self._matches) < MAX_MATCHES else FIRST_OF_A_RULE
        if known is None and self._of_rule[match.rule] >= room:
            key = self._first.get(key[:3], ())
            known = self._matches.get(key)
            if known is None:
                return
        if known is not None:
            self._matches[key] = msgspec.structs.replace(known, count=known.count + 1, last_line=number)
            return
        self._of_rule[match.rule] += 1
        self._first.setdefault(key[:3], key)
        self._matches[key] = msgspec.structs.replace(match, line=number, rank=rank, node=node, at=at)

    def _keep_reports(self, block: bytes, spoken: list[scan.LogLine]) -> None:
        """Keep the lines around tracebacks and reports of launchers."""
        at, number = 0, self.lines + 1
        if self._report_left:
            end, self._report_left = end_of_lines(block, 0, self._report_left)
            number = self._keep(block[:end], number)
            at = end + 1
        inside: scan.LogLine | None = None
        for line in [*spoken, None]:
            if line is not None and line.start < at:
                inside = line
                continue
            for one in (inside, line):  # of those in what is kept already only the last makes it longer
                if one is None:
                    continue
                end, left = end_of_lines(block, one.end + 1, AFTER_REPORT)
                if end < at:
                    continue
                start = max(at, start_of_lines(block, one.start))
                number = self._keep(block[start:end], number + block.count(b"\n", at, start))
                at, self._report_left = end + 1, left
            inside = None

    def _keep(self, text: bytes, number: int) -> int:
        """Keep lines; the number of the next one."""
        for line in text.split(b"\n"):
            kept = self._report_head if len(self._report_head) < REPORT_LINES else self._report_tail
            kept.append((number, line[:MAX_LINE]))
            number += 1
        return number

    def _progress_of(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Read the progress of the training from lines."""
        for number, line in lines:
            if self._progress.may_tell(line):
                origin = self._prefixes.origin(line[:MAX_LINE], self._year)
                self._progress.feed(line[:MAX_LINE], number, origin.rank)
                self._curves.feed(line[:MAX_LINE], number, origin.rank, origin.at)

    def end(self) -> None:
        """Nothing more comes."""
        self._kernel.end()
        first = self.lines - self._tail_lines + 1
        few = self.lines <= DETAIL_LINES and self._in_full >= IN_FULL
        full = 1 if few else self.lines - self._in_full + 1
        for block in self._tail:
            if first < full:
                self._progress_of(lines_of_progress(block.text, first))
            if first + block.lines > full:
                skipped = max(full - first, 0)
                self._progress_of(enumerate(last_lines(block.text, block.lines - skipped), first + skipped))
            first += block.lines

    # ----- the summary -----

    def summary(self) -> LogSummary:
        """All of it, after `end`."""
        has_frames = any(block.has_frames and b'File "' in block.text for block in self._tail)
        tail = self._last(DETAIL_LINES if has_frames else TAIL * 5)
        reports = self._reports(tail if has_frames else [])
        rank, node = self._speaker()
        left_out = self._engine.left_out()
        return LogSummary(
            source=self.name,
            kind=self._kind(),
            node=node,
            rank=rank,
            lines=self.lines,
            size_bytes=self.size_bytes,
            first_at=next((at for line in self._head if (at := moment(line, self._year)) is not None), None),
            last_at=next((at for _, line in reversed(tail[-TAIL * 5 :]) if (at := self._at(line)) is not None), None),
            matches=tuple(_with_left_out(match, left_out) for match in self._matches.values()),
            tracebacks=self._tracebacks(reports),
            launcher=_launcher(reports),
            events=tuple(self._kernel.events),
            events_left_out=self._kernel.left_out,
            progress_line=self._progress.line,
            step=self._progress.step,
            last_step=self._progress.last_step,
            finished_line=self._progress.finished_line,
            starts=launchers.starts([*reports, *((number, line.decode(errors="replace")) for number, line in tail)]),
            tail=tuple(hide_keys([clean_text(line.decode(errors="replace")) for _, line in tail[-TAIL:]])),
            curves=self._curves.curves(),
        )

    def last_lines(self, count: int) -> list[tuple[int, bytes]]:
        """The last lines with their numbers."""
        return self._last(min(count, DETAIL_LINES))

    def _last(self, count: int) -> list[tuple[int, bytes]]:
        lines: list[bytes] = []
        for block in reversed(self._tail):
            if len(lines) >= count:
                break
            lines = [line[:MAX_LINE] for line in last_lines(block.text, count - len(lines))] + lines
        return list(enumerate(lines, self.lines - len(lines) + 1))

    def _at(self, line: bytes) -> float | None:
        return moment(line[:500].decode(errors="replace"), self._year)

    def _reports(self, tail: list[tuple[int, bytes]]) -> list[tuple[int, str]]:
        """The lines in which tracebacks and launchers' reports are, by number; with those of a tail that has frames,
        as they may have lost their beginning.
        """
        kept = dict([*self._report_head, *self._report_tail]) | dict(tail)
        return [(number, kept[number].decode(errors="replace")) for number in sorted(kept)]

    def _tracebacks(self, lines: list[tuple[int, str]]) -> tuple[LoggedTraceback, ...]:
        """The first and the last of each rank."""
        speakers: dict[tuple[int | None, str], list[tuple[int, str, str]]] = {}
        for number, line in lines:
            origin = self._prefixes.read(line)
            speakers.setdefault((origin.rank, origin.node), []).append((number, origin.text, line))
        found: list[LoggedTraceback] = []
        for (rank, node), said in speakers.items():
            told = tracebacks.read(text for _, text, _ in said)
            half = OF_A_RANK // 2
            for one in told if len(told) <= OF_A_RANK else [*told[:half], *told[-half:]]:
                near = (
                    moment(line, self._year) for _, _, line in reversed(said[max(one.index - 3, 0) : one.index + 1])
                )
                found.append(
                    LoggedTraceback(
                        traceback=one,
                        line=said[one.index][0],
                        rank=one.rank if rank is None else rank,
                        node=node,
                        at=next((at for at in near if at is not None), None),
                    )
                )
        found.sort(key=lambda one: one.line)
        half = MAX_TRACEBACKS // 2
        return tuple(found if len(found) <= MAX_TRACEBACKS else [*found[:half], *found[-half:]])

    def _speaker(self) -> tuple[int | None, str]:
        """The rank and node that wrote all of it, by its lines, else by its name."""
        origins = [self._prefixes.read(line) for line in self._head]
        ranks = {one.rank for one in origins if one.rank is not None}
        hosts = Counter(match["node"] for line in self._head if (match := _KERNEL_HOST.search(line[:200])) is not None)
        asked = {match["node"] for line in self._head if (match := _PROMPT.match(line[:300])) is not None}
        nodes = {one.node for one in origins if one.node} | set(hosts) | asked
        told = sum(one.rank is not None for one in origins)
        most = 2 * told >= sum(1 for line in self._head if line.strip())
        named = self._place.rank
        alone = len(ranks) == 1 and (most or ranks == {named})
        rank = named if not ranks else next(iter(ranks)) if alone else None
        node = self._place.node or (next(iter(nodes)) if len(nodes) == 1 else "")
        return rank, node

    def _kind(self) -> LogKind:
        lines = [line for line in self._head if line.strip()]
        half = max(len(lines) / 2, 1)
        if sum(_is_of_kernel(line.encode(errors="replace")) for line in lines) >= half:
            return "kernel"
        if sum(_SCHEDULER.search(line[:300]) is not None for line in lines) >= half:
            return "scheduler"
        if self._kernel.events:
            return "mixed" if self._matches or self._progress.line is not None else "kernel"
        return "output"


def _with_left_out(match: RuleMatch, left_out: dict[str, int]) -> RuleMatch:
    """The match with the count of a flood, estimated by a sample of it."""
    count = left_out.pop(match.rule, 0)
    return msgspec.structs.replace(match, count=match.count + count) if count else match


def _launcher(lines: list[tuple[int, str]]) -> tuple[LauncherFailure, ...]:
    found: list[LauncherFailure] = []
    start = 0
    for index in range(1, len(lines) + 1):
        if index == len(lines) or lines[index][0] != lines[index - 1][0] + 1:
            found += launchers.read([line for _, line in lines[start:index]], lines[start][0])
            start = index
    return tuple(found[: launchers.MAX_FAILURES])


_OF_STEP: Final = re.compile(r"\[\d{4}-\d\d-\d\dT[\d:.]{8,20}\] \[\d{1,12}\.\w{1,12}\] ")
"""slurmd writes the step behind the time: it is no time since a boot."""


def _is_of_kernel(line: bytes) -> bool:
    text = line[:300].decode(errors="replace")
    if _OF_STEP.match(text) is not None:
        return False
    return " kernel: " in text or read_stamp(text).uptime is not None
