"""Where a line comes from: the rank and node, by its prefix or by the name of its file.

Launchers write prefixes of many kinds before the lines of their ranks. Some are clear (`[rank3]:`). Others
(`3: `, `node7: `) could be anything: they count if most lines of a file have one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from diagnosis.kernel.log import moment


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
_MOST: Final = 0.7
"""A prefix counts if this share of a file's lines has one."""
SAMPLE: Final = 400
_ENOUGH: Final = 4


class Prefixes:
    """The prefixes of the lines of one file, learned from some of them."""

    def __init__(self, sample: Iterable[str] = ()) -> None:
        self._learned = ""
        lines = [_plain(line) for line in sample if line.strip()][:SAMPLE]
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
            node = told.get("node") or node
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
_RANK: Final = re.compile(
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
    rank, node = _RANK.search(name), _NODE.search(name)
    node_name = node["node"] if node is not None else ""
    if rank is not None and rank[0].strip("/_.-") == node_name:
        node_name = ""
    return Place(int(rank["rank"]) if rank is not None else None, node_name)


def places(paths: Sequence[str]) -> dict[str, Place]:
    """The same for several files: Slurm's `%j_%t` shows only among files of the same job that count from 0."""
    found = {path: place(path) for path in paths}
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
