"""Whom the words of old logs blame, where no account and no finding tells: a table of phrases, read near the evidence.

A phrase says that something failed, and names it: `Rank 1 crashed`, `error on DIMM_A1`, `server nfs2 not responding`.
The name of who waits, of who reports, or of who was asked to end is no such phrase. Nothing here is read for a live
job, and the action of the verdict stays what it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, cast

import msgspec

from diagnosis.incident import Candidate, Culprit, LogSummary, PartKind, Verdict
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.text import redact

LINES_AFTER: Final = 12
"""So many lines after the evidence may name the culprit."""
LINES_AT_THE_END: Final = 40
"""Where the class is not known, so many last lines may."""
MAX_RANKS: Final = 16
MAX_NAME: Final = 200
_F = FailureClass
_OF_DEVICES: Final = tuple(one for one, entry in TAXONOMY.items() if entry.domain == "accelerator")
_OF_HOSTS: Final = (_F.CPU_OR_MEMORY_HW, _F.KERNEL_FAULT, _F.HOST_OOM, _F.DISK_FULL, _F.SHM_EXHAUSTED, _F.PCIE_ERROR)
_OF_GPUS: Final = (*_OF_DEVICES, _F.CUDA_ILLEGAL_ACCESS, _F.GPU_OOM, _F.PCIE_ERROR)
_OF_HANGS: Final = (_F.NCCL_TIMEOUT, _F.SILENT_HANG, _F.EXIT_HANG)
_OF_FILES: Final = (
    _F.STORAGE_ERROR,
    _F.DISK_FULL,
    _F.CHECKPOINT_CORRUPT_OR_MISMATCH,
    _F.DATA_LOADING_ERROR,
    _F.CONFIG_OR_ARGUMENT_ERROR,
    _F.PERMISSION_OR_AUTH,
)
_OF_DISKS: Final = (_F.STORAGE_ERROR, _F.DISK_FULL, _F.DATA_LOADING_ERROR, _F.CHECKPOINT_CORRUPT_OR_MISMATCH)
_RANKS: Final = r"\d{1,6}\b(?:,? (?:and )?\d{1,6}\b){0,31}"
_PATH: Final = r"(?P<name>(?:~|\.{1,2})?/[^\s'\":;,<>()\x00]{2,400})"
_POD: Final = r"(?:[\w-]{1,60}[/.])?(?P<name>[a-z0-9][a-z0-9-]{1,120})\b"


class _Phrase(NamedTuple):
    kind: str
    """`rank`, `gpu` and `node` have fields of their own."""
    classes: tuple[FailureClass, ...]
    pattern: re.Pattern[str]


def _phrases(kind: str, classes: tuple[FailureClass, ...], *patterns: str) -> list[_Phrase]:
    return [_Phrase(kind, classes, re.compile(one)) for one in patterns]


PHRASES: Final = (
    *_phrases(
        "rank",
        (_F.NCCL_SETUP,),
        r"Duplicate GPU detected ?: rank (?P<name>\d{1,6} and rank \d{1,6})\b",
    ),
    *_phrases("rank", (_F.COLLECTIVE_MISMATCH,), rf"\bat and around rank (?P<name>{_RANKS})"),
    *_phrases("rank", (*_OF_HANGS, _F.UNKNOWN), rf"(?i:\bmissing ranks?) ?[:=] ?[\[({{]?(?P<name>{_RANKS})"),
    *_phrases(
        "rank",
        (_F.WORKER_CRASH, *_OF_HANGS),
        rf"(?i:\branks?)[ =:#]{{0,2}}\[?(?P<name>{_RANKS})\]?(?: (?:was|were|has|have|is|are|status|process)){{0,2}} "
        r"(?:crashed|failed|aborted|died|exited|killed|disappeared|dead|gone|missing|unresponsive"
        r"|did not (?:respond|join|enter|reach|arrive))\b"
        r"(?! to (?:connect|send|recv|receive|read|reach|get|communicate|initiali[sz]e)| (?:waiting|because|due|after)"
        r"| with (?:exit )?(?:code|status) 0\b)(?![^\n]{0,60}(?:SIGTERM|signal 15|-15)\b)",
    ),
    *_phrases(
        "gpu",
        _OF_GPUS,
        r"\bby GPU (?P<name>node-\d{1,3}|\d{1,3})\b",
        r"\bGPU (?P<name>\d{1,3}) has a total capacity\b",
        r"\((?:GPU|NPU) (?P<name>\d{1,3}); \d",
        r"\bfor (?:CUDA|cuda|GPU|gpu|hip|npu):(?P<name>\d{1,3})\b",
        r"\bdevice ordinal (?P<name>\d{1,3})\b",
        r"(?P<name>\bGPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b",
    ),
    *_phrases("chip", (*_OF_GPUS, _F.UNKNOWN), r"\berror from device ?\(chip[ _]?[iI]d ?[:=] ?(?P<name>\d{1,4})\b"),
    *_phrases(
        "dimm",
        (_F.CPU_OR_MEMORY_HW,),
        r"\berror on (?P<name>[\w#]{0,80}(?:DIMM|dimm|csrow)[\w#]{1,60})",
        r"\b(?P<name>(?:P\d-?)?DIMM[ _-]?[A-Z]\d{1,2})\b",
    ),
    *_phrases(
        "cpu",
        (_F.CPU_OR_MEMORY_HW, _F.KERNEL_FAULT),
        r"\bCPU ?#?(?P<name>\d{1,4})(?::? Machine Check|:? BANK| stuck for)",
        r"\bLOCKUP on cpu (?P<name>\d{1,4})\b",
    ),
    *_phrases(
        "server",
        (_F.STORAGE_ERROR,),
        r"\bserver (?P<name>[\w.:-]{1,120}) not responding",
        r"\bto node (?P<name>[\w.:-]{1,80}@\w{2,10}) failed",
        r"\bConnection to \S{1,80} \(at (?P<name>[\w.:-]{1,80}@\w{2,10})\) was lost",
    ),
    *_phrases(
        "disk",
        _OF_DISKS,
        r"\bdev (?P<name>[a-z][\w-]{1,20}), sector\b",
        r"\bI/O error on dev(?:ice)? (?P<name>[a-z][\w-]{1,20})\b",
        r"-fs error \(device (?P<name>[\w-]{2,20})\)",
        r"\bBTRFS(?: error)? \(device (?P<name>[\w-]{2,20})(?: state \w{1,8})?\)",
        r"\bXFS \((?P<name>[\w-]{2,20})\): [^\n]{0,80}(?:[Ee]rror|[Cc]orrupt|[Ss]hut)",
        r"\bnvme (?P<name>nvme\d{1,3}): (?:I/O|controller|Device not ready|Abort|Removing)",
        r"\bDisk failure on (?P<name>[\w-]{2,20})\b",
    ),
    *_phrases(
        "file",
        _OF_FILES,
        rf"\[Errno \d{{1,3}}\] [^:'\"\n]{{3,60}}: b?['\"](?P<name>[^'\"\n]{{2,{MAX_NAME}}})['\"]",
        rf"(?i:can't open file|cannot open|unable to open|failed to open|could not open)[^'\"\n/]{{0,20}} "
        rf"['\"](?P<name>[^'\"\n]{{2,{MAX_NAME}}})['\"]",
        r"cannot identify image file (?:<[^>\n]{0,40}name=)?['\"]?(?P<name>[^\s'\">]{2,300})",
        rf"(?i:error (?:writing|reading|opening|loading))[^:/\n]{{0,40}}[: ] ?['\"]?{_PATH}",
        r"(?i:no such file or directory|file not found|cannot open|failed to open|unable to open)[^/\n]{0,12}" + _PATH,
    ),
    *_phrases(
        "pod",
        (_F.WORKER_CRASH,),
        rf"\b[Pp]od: {_POD} exited with code [1-9]",
        rf"\b[Pp]od \"?{_POD}\"? (?:has )?(?:failed|crashed|exited with|terminated with (?:exit )?code [1-9])",
        r"\brestarting failed container=\S{1,80} pod=(?P<name>[a-z0-9-]{1,120})_",
    ),
    *_phrases("pid", (_F.HOST_OOM,), r"\bKilled process (?P<name>\d{1,9} \([^()\n]{1,40}\))"),
    *_phrases(
        "job",
        (_F.PREEMPTED_OR_CANCELLED,),
        r"\*\*\* (?:JOB|STEP) (?P<name>\d[\w.+]{0,30} ON [\w.-]{1,120}) CANCELLED AT \S{1,40} "
        r"DUE TO TIME LIMIT",
    ),
    *_phrases(
        "node",
        (*_OF_DEVICES, *_OF_HOSTS, _F.NODE_FAILURE),
        r"\bNode (?P<name>[a-z0-9][\w.-]{0,120}) status is now: Node(?:Has\w{2,20}Pressure|NotReady)",
        r"\bkubelet, (?P<name>[a-z0-9][\w.-]{0,120})\s",
    ),
    *_phrases(
        "node",  # syslog: the host that writes about its own devices and memory
        (*_OF_DEVICES, *_OF_HOSTS),
        r"^(?:<\d{1,3}>)?(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.Z+-]{8,22}) "
        r"(?P<name>[A-Za-z][\w.-]{1,120}) [\w./@-]{2,60}\[\d{1,9}\]: ",
    ),
)
_MET: Final = ("file", "disk", "server", "dimm", "pid")
"""Kinds that say more about a culprit that is known: what the rank could not read, what the node lacks."""
_NUMBER: Final = re.compile(r"\d+")
_LISTED: Final = re.compile(
    r"^(?P<reason>\S[^\n]{0,200}?)\s{1,40}\S{1,32}\s{1,12}\d{4}-\d\d-\d\dT[\d:]{8}\s{1,12}"
    r"(?P<node>[A-Za-z][\w.,\[\]-]{0,120})\s*$"
)
"""A row of `sinfo -R`: reason, user, time, nodes."""


def with_named(found: Verdict, best: Candidate, logs: Sequence[LogSummary]) -> Verdict:
    """The verdict on old logs, with the culprits that their words name. `best`: its reading."""
    if found.failure_class is _F.NONE or best.is_of_all:
        return found
    lines = list(_lines(found, best, logs))
    named = _culprits(found.failure_class, lines)
    if not found.culprits:
        return msgspec.structs.replace(found, culprits=named) if named else found
    known = found.culprits[0]
    if len(found.culprits) > 1:
        return found
    if found.failure_class is _F.NODE_FAILURE and known.node and known.rank is None:
        return msgspec.structs.replace(found, culprits=_listed(known, best, logs))
    more = named[0] if len(named) == 1 and named[0].kind in _MET and named[0].rank is None else None
    if more is None:
        return found
    return msgspec.structs.replace(found, culprits=(msgspec.structs.replace(known, kind=more.kind, name=more.name),))


def _lines(found: Verdict, best: Candidate, logs: Sequence[LogSummary]) -> Iterator[str]:
    """The evidence of the reading, the lines as they stand in the log, and the lines after it."""
    for one in best.evidence:
        yield one.text
    for one in best.evidence[:1]:
        for log in logs:
            first = log.lines - len(log.tail)
            if log.source == one.source and one.line and one.line > first:
                yield from log.tail[one.line - first - 1 : one.line - first + LINES_AFTER]
    if found.failure_class is _F.UNKNOWN:  # the last word counts: a list of who is missing gets shorter
        for log in logs:
            yield from reversed(log.tail[-LINES_AT_THE_END:])


def _culprits(failure_class: FailureClass, lines: Sequence[str]) -> tuple[Culprit, ...]:
    told: dict[str, tuple[str, re.Match[str]]] = {}
    """Field of `Culprit` -> the first phrase that tells it."""
    for phrase in PHRASES:
        field = phrase.kind if phrase.kind in ("rank", "gpu", "node") else "name"
        match = _first(phrase.pattern, lines) if failure_class in phrase.classes and field not in told else None
        if match is not None:
            told[field] = (phrase.kind, match)
    names = {field: redact(match["name"])[:MAX_NAME] for field, (_, match) in told.items()}
    if "rank" in names:
        ranks = dict.fromkeys(map(int, _NUMBER.findall(names["rank"])))
        return tuple(Culprit(rank=rank) for rank in list(ranks)[:MAX_RANKS])
    if not names:
        return ()
    known = Culprit(node=names.get("node", ""), gpu=names.get("gpu", ""))
    if "name" not in names:
        return (known,)
    part = cast("PartKind", told["name"][0])
    return (msgspec.structs.replace(known, kind=part, name=names["name"].replace(" ON ", " on ")),)


def _first(pattern: re.Pattern[str], lines: Iterable[str]) -> re.Match[str] | None:
    """Its first match; none where a line names several by it, because one of them may be a victim."""
    for line in lines:
        found = list(pattern.finditer(line))
        if found:
            return found[0] if len({one["name"] for one in found}) == 1 else None
    return None


def _listed(known: Culprit, best: Candidate, logs: Sequence[LogSummary]) -> tuple[Culprit, ...]:
    """The nodes of all rows of a list of drained nodes that give the reason of the evidence."""
    row = _LISTED.match(best.evidence[0].text.strip()) if best.evidence else None
    rows = [_LISTED.match(line) for log in logs if log.source == best.evidence[0].source for line in log.tail]
    nodes = [one["node"] for one in rows if row is not None and one is not None and one["reason"] == row["reason"]]
    return tuple(Culprit(node=node) for node in dict.fromkeys(nodes))[:MAX_RANKS] or (known,)
