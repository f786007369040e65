"""How launchers report the ends of their workers: torchrun, DeepSpeed, srun, mpirun, Lightning, shells.

A launcher sees only exit codes and signals, but all of them. Its report often names the worker that ended first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from diagnosis.incident import LauncherFailure
from diagnosis.kernel.log import read_stamp
from diagnosis.signals import clean_text

MAX_FAILURES: Final = 2048
MAX_MESSAGE_LINES: Final = 60
OUT_OF_MEMORY: Final = "out of memory"
"""The message of a worker that Slurm reports as killed for its memory."""
_MAX_RANGE: Final = 4096

WORDS: Final = (
    "exitcode",
    "root cause",
    "local_rank:",
    "exits with return code",
    "srun: error",
    "mpirun noticed",
    "process name: [[",
    "mpi_abort",
    "running at",
    "killed by signal",
    "exit code",
    "exit_status=",
    "main process exited",
    "exited with signal",
    "child process with pid",
    "terminated with",
    "non-zero exit status",
    "died with",
    "slurm_script: line",
    ": line ",
)
"""Every line of a report contains one of these words (in lower case)."""

_SECTION: Final = re.compile(r"(Root Cause|Other Failures|Failures:)")
_FIELD: Final = re.compile(r"(?:^|[\s:\]])(time|host|rank|exitcode|error_file|traceback|msg)\s*: ?(.*)")
_RANK: Final = re.compile(r"(\d{1,6}) \(local_rank: (\d{1,4})\)")
_CODE: Final = re.compile(r"(-?\d{1,10}) ?\(pid: (\d{1,10})\)")
_RULER: Final = re.compile(r"[-=*]{8,}\s*$")
_MARK: Final = re.compile(r"\[\d{1,6}\]:\s*$")

_AGENT: Final = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)")
_DEEPSPEED: Final = re.compile(
    r"--local_rank[=', ]{1,5}(?P<local>\d+).{0,4000}exits with return code = (?P<code>-?\d+)"
)
_DEEPSPEED_PLAIN: Final = re.compile(r"exits with return code = (?P<code>-?\d+)")
_SRUN: Final = re.compile(
    r"srun: error: (?P<host>[\w.,\[\]-]{1,400}): tasks? (?P<ranks>[\d,-]{1,400}): (?P<how>.{3,200})"
)
_MPIRUN: Final = re.compile(
    r"mpirun noticed that (?:process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<host>\S+)|the job) "
    r"(?:exited on signal (?P<signal>\d+)|aborted)"
)
_MPI_ABORT: Final = re.compile(r"MPI_ABORT was invoked on rank (?P<rank>\d+)")
_ORTE: Final = re.compile(r"Process name: \[\[\S{1,40}\],(?P<rank>\d+)\]")
_HYDRA: Final = re.compile(r"RANK (?P<rank>\d+) PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)")
_HYDRA_HOW: Final = re.compile(r"KILLED BY SIGNAL: (?P<signal>\d+)|EXIT CODE:\s{1,8}(?P<code>\d+)", re.IGNORECASE)
_LIGHTNING: Final = re.compile(
    r"(?:\[rank: (?P<rank>\d+)\] )?Child process with PID (?P<pid>\d+) terminated with code (?P<code>-?\d+)"
)
_SPAWN: Final = re.compile(
    r"[Pp]rocess (?P<local>\d+) terminated with (?:signal (?P<name>SIG\w+)|exit code (?P<code>\d+)|the following error)"
)
_CALLED: Final = re.compile(
    r"Command .{0,400}(?:python|torchrun|\.py\b).{0,6000}"
    r"(?:returned non-zero exit status (?P<code>\d+)|died with <Signals\.(?P<name>SIG\w+)\b)"
)
_SHELL: Final = re.compile(
    r"(?:\w{2,}(?:\.\w+)?|/\S{1,300}): line \d+: +(?P<pid>\d+) (?P<how>(?:Killed|Segmentation fault|Aborted|Bus error|"
    r"Terminated|Floating point exception|Illegal instruction)\b.{0,200})"
)
_PLAIN: Final = re.compile(
    r"^Exited with (?:exit code|signal) (?P<code>\d+)\.?$|Process finished with exit code (?P<code2>-?\d+)|"
    r"command terminated with exit code (?P<code3>\d+)|\bExit_status=(?P<code4>-?\d+)|"
    r"Main process exited, code=\w+, status=(?P<code5>\d+)"
)
"""LSF, an editor, kubectl, PBS, systemd."""
_FLAT: Final = re.compile(
    r"(?:\bhost\s*: ?(?P<host>\S{1,120})\s+)?\brank\s*: ?(?P<rank>\d{1,6}) \(local_rank: (?P<local>\d{1,4})\)"
    r".{0,120}?exitcode\s*: ?(?P<code>-?\d{1,10}) ?\(pid: (?P<pid>\d{1,10})\)"
)
"""An entry of torchrun's report of which a log collector made one line."""
_LINES: Final = (
    _FLAT,
    _AGENT,
    _DEEPSPEED,
    _DEEPSPEED_PLAIN,
    _SRUN,
    _MPIRUN,
    _MPI_ABORT,
    _LIGHTNING,
    _SPAWN,
    _CALLED,
    _SHELL,
    _PLAIN,
)

_SIGNALS: Final = {
    "SIGHUP": 1, "SIGINT": 2, "SIGILL": 4, "SIGABRT": 6, "SIGBUS": 7, "SIGFPE": 8, "SIGKILL": 9, "SIGUSR1": 10,
    "SIGSEGV": 11, "SIGUSR2": 12, "SIGPIPE": 13, "SIGTERM": 15,
}  # fmt: skip
_BY_WORDS: Final = (
    ("killed", 9),
    ("segmentation fault", 11),
    ("aborted", 6),
    ("bus error", 7),
    ("terminated", 15),
    ("floating point", 8),
    ("illegal instruction", 4),
    ("out of memory", 9),
)


def is_wrapper(exception: str, message: str) -> bool:
    """An exception by which a launcher says that a worker failed, and not why."""
    name = exception.rsplit(".", 1)[-1]
    return name in ("ChildFailedError", "SignalException", "ProcessExitedException") or (
        name == "CalledProcessError" and _CALLED.search(f"{message[:6500]}") is not None
    )


_START: Final = re.compile(
    r"^(?:\+{1,3} |(?:\([\w.-]{1,40}\) )?[^\s'\"]{0,80}(?: ?[\w~/.-]{0,80}\]?)?[$#%>] )"
    r"(?:time |nohup |exec |srun (?:-\S+ ){0,20}|\w{1,40}=\S{0,200} ){0,12}"
    r"\S{0,200}(?:torchrun|python[\d.]*|accelerate launch|deepspeed|mpirun|horovodrun|\w[\w.-]{0,80}\.sh|sbatch)(?: |$)"
)
"""A command that starts a program, at the prompt of a shell or as `set -x` prints it."""
MAX_STARTS: Final = 20


def starts(lines: Iterable[tuple[int, str]]) -> tuple[int, ...]:
    """The lines, by number, at which somebody started the program; the last ones."""
    found = {number for number, text in lines if text[:1] not in (" ", "\t") and _START.match(text[:1000])}
    return tuple(sorted(found)[-MAX_STARTS:])


def read(lines: Sequence[str], first_line: int = 1) -> tuple[LauncherFailure, ...]:
    """The workers whose bad ends these lines report, in the order of the lines; each worker once. Never raises."""
    found = [*_reports(lines, first_line), *_single_lines(lines, first_line)]
    return _merged(sorted(found[: 2 * MAX_FAILURES], key=lambda one: one.line))[:MAX_FAILURES]


# ----- torchrun's report -----


def _reports(lines: Sequence[str], first_line: int) -> list[LauncherFailure]:
    """Entries of ChildFailedError reports: `time`, `host`, `rank`, `exitcode`, `error_file`, `traceback` or `msg`."""
    found: list[LauncherFailure] = []
    fields: dict[str, str] = {}
    is_root = False
    start = 0
    field = ""

    def close() -> None:
        entry = _entry(fields, is_root, start)
        if entry is not None:
            found.append(entry)
        fields.clear()

    for index, line in enumerate(lines):
        section, match = _SECTION.search(line[:200]), _FIELD.search(line[:4000])
        if section is not None or _RULER.search(line[:300]) or _MARK.search(line[:300]):
            close()
            is_root = section[1] == "Root Cause" if section is not None else is_root
            field = ""
        elif match is not None and not (field in ("traceback", "msg") and match[1] in fields):
            field = match[1]
            if field == "time" or not fields:
                start = first_line + index
            fields[field] = match[2].strip()
        elif field in ("traceback", "msg") and fields[field].count("\n") < MAX_MESSAGE_LINES:
            fields[field] += "\n" + line.rstrip().removeprefix("  ")
    close()
    return found


def _entry(fields: dict[str, str], is_root: bool, line: int) -> LauncherFailure | None:
    rank, code = _RANK.match(fields.get("rank", "")), _CODE.match(fields.get("exitcode", ""))
    if rank is None or code is None:
        return None
    message = fields.get("traceback", "") or fields.get("msg", "")
    error_file = fields.get("error_file", "")
    return _failure(
        line,
        f"rank {rank[1]} (local rank {rank[2]}) on {fields.get('host') or 'its node'}: exit code {code[1]}",
        rank=int(rank[1]),
        local_rank=int(rank[2]),
        host=clean_text(fields.get("host", ""), 120),
        pid=int(code[2]),
        code=int(code[1]),
        at=read_stamp(fields.get("time", "").replace("_", " ")).at,
        is_root=is_root,
        error_file="" if "N/A" in error_file else clean_text(error_file, 300),
        message="" if message.startswith("To enable traceback") else message.strip()[:8000],
    )


# ----- reports of one line -----


def _single_lines(lines: Sequence[str], first_line: int) -> list[LauncherFailure]:
    found: list[LauncherFailure] = []
    for index, line in enumerate(lines):
        low = line[:8000].lower()
        if not any(word in low for word in WORDS):
            continue
        for pattern in _LINES:
            match = pattern.search(line[:8000])
            if match is not None:
                found += _of_line(match, first_line + index, line)
                break
        else:
            found += _of_block(lines, index, first_line)
        if len(found) >= MAX_FAILURES:
            break
    return found


def _of_line(match: re.Match[str], line: int, text: str) -> list[LauncherFailure]:
    groups = match.groupdict()
    how = groups.get("how") or ""
    code = _code(groups, how)
    if code == 0:
        return []
    at = read_stamp(text[:120]).at
    numbers = _ranks(groups.get("ranks") or groups.get("rank") or "") or [None]
    return [
        _failure(
            line,
            text,
            rank=rank,
            local_rank=_int(groups.get("local")),
            host="" if "[" in (groups.get("host") or "") else groups.get("host") or "",
            pid=_int(groups.get("pid")),
            code=code,
            at=at,
            message=OUT_OF_MEMORY if OUT_OF_MEMORY in how.lower() else "",
        )
        for rank in numbers
    ]


def _code(groups: dict[str, str | None], how: str) -> int | None:
    """The exit code, negative for a signal, as torchrun writes it."""
    if groups.get("signal"):
        return -int(groups["signal"] or 0)
    if groups.get("name"):
        return -_SIGNALS.get(groups["name"] or "", 0) or None
    code = next((value for name, value in groups.items() if name.startswith("code") and value), None)
    if code is not None:
        return int(code)
    by_code = re.search(r"exit(?:ed with exit)? code (\d+)", how)
    if by_code is not None:
        return int(by_code[1])
    return next((-number for words, number in _BY_WORDS if words in how.lower()), None)


def _of_block(lines: Sequence[str], index: int, first_line: int) -> list[LauncherFailure]:
    """mpirun and Hydra report rank and exit status in separate lines."""
    match = _ORTE.search(lines[index][:400]) or _HYDRA.search(lines[index][:400])
    if match is None:
        return []
    groups = match.groupdict()
    how = next((found for line in lines[index + 1 : index + 5] if (found := _HYDRA_HOW.search(line[:400]))), None)
    return [
        _failure(
            first_line + index,
            lines[index],
            rank=int(groups["rank"]),
            host=groups.get("host") or "",
            pid=_int(groups.get("pid")),
            code=_code(how.groupdict(), "") if how is not None else None,
        )
    ]


def _failure(
    line: int,
    text: str,
    *,
    rank: int | None = None,
    local_rank: int | None = None,
    host: str = "",
    pid: int | None = None,
    code: int | None = None,
    at: float | None = None,
    is_root: bool = False,
    error_file: str = "",
    message: str = "",
) -> LauncherFailure:
    return LauncherFailure(
        rank=rank,
        line=line,
        text=clean_text(text.strip(), 300),
        local_rank=local_rank,
        host=host,
        pid=pid,
        code=None if code is None or code < 0 else code,
        signal=-code if code is not None and code < 0 else None,
        at=at,
        is_root=is_root,
        error_file=error_file,
        message=message,
    )


def _ranks(text: str) -> list[int | None]:
    """`0-2,5` as numbers."""
    numbers: list[int | None] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers += range(int(first), min(int(last) if last.isdigit() else int(first), int(first) + _MAX_RANGE) + 1)
    return numbers[:_MAX_RANGE]


def _int(text: str | None) -> int | None:
    return int(text) if text else None


def _merged(found: list[LauncherFailure]) -> tuple[LauncherFailure, ...]:
    """One entry for each worker: the agent's log line and its report may name the same end."""
    known: dict[tuple[str, int], LauncherFailure] = {}
    for one in found:
        names = [("pid", one.pid), ("rank", one.rank)]
        keys = [(name, value) for name, value in names if value is not None] or [("line", one.line)]
        before = next((known[key] for key in keys if key in known), None)
        if before is not None and before.pid is not None and one.pid is not None and before.pid != one.pid:
            before, keys = None, keys[:1]  # the same rank of another attempt
        kept = one if before is None else _joined(before, one)
        for key in [*keys, *(key for key, value in known.items() if value is before)]:
            known[key] = kept
    return tuple(sorted({id(one): one for one in known.values()}.values(), key=lambda one: one.line))


def _joined(first: LauncherFailure, second: LauncherFailure) -> LauncherFailure:
    changes = {
        name: getattr(second, name)
        for name in ("rank", "local_rank", "host", "pid", "at", "error_file", "message")
        if getattr(first, name) in (None, "") and getattr(second, name) not in (None, "")
    }
    if first.code is None and first.signal is None:
        changes |= {"code": second.code, "signal": second.signal}
    return msgspec.structs.replace(first, is_root=first.is_root or second.is_root, **changes)
