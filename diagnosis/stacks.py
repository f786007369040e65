"""Stacks: read as tools write them, and what a rank is doing by the stack of its main thread.

Tools are py-spy (text and JSON, native too), faulthandler, gdb, pstack, eu-stack, lldb and pystack. One file
may hold one process or those of a whole node, one sample or several. Of each process the main thread is
kept; where that only waits for autograd's own thread, the frames of this thread stand before its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal

import msgspec

from diagnosis.signals import Frame, Frozen, RankStack, clean_line, clean_text

MAX_FRAMES: Final = 40
RAW_FRAMES: Final = 400
"""Frames of a thread that are looked at before the interpreter's own are left out."""
NATIVE: Final = "native"
"""The file of a frame of compiled code of which no more is known."""
_NATIVE: Final = re.compile(r"\.so(?:\.[\w.]+)?$|\.(?:c|cc|cpp|cxx|h|hpp|cu|S|rs)$|/(?:python\d?[\d.]*|ld-[\w.-]+)$")
_INTERPRETER: Final = re.compile(
    r"_?_?Py[A-Z_]|cfunction_|method_vectorcall|do_call_core|run_(?:eval_code_obj|mod)\b|pyrun_|pymain_|slot_tp_|type_call|"
    r"function_code_fastcall|object_vacall|call_function|builtin_exec|context_run|THPFunction_|_start$|main$|__libc_start|"
    r"start_thread$|clone3?$|__clone|execute_native_thread_routine|thread_run$|pythread_wrapper|pybind11::|"
    r"partial_call|_?vectorcall|0x[0-9a-f]+$"
)
_CALLED_FROM_PYTHON: Final = re.compile(r"_engine_run_backward|run_backward|(?:Tensor\.)?backward|grad")


class Thread:
    """One thread as a tool wrote it; its frames innermost first."""

    __slots__ = ("current", "frames", "name", "number", "tid")

    def __init__(self, *, tid: int | None = None, name: str = "", number: int | None = None) -> None:
        self.tid = tid
        self.name = name
        self.number = number
        """gdb's: the main thread is number 1."""
        self.current = False
        self.frames: list[Frame] = []

    def add(self, function: str, file: str, line: int) -> None:
        if len(self.frames) < RAW_FRAMES:
            self.frames.append(frame_of(function, file, line))

    def add_before(self, function: str, file: str, line: int) -> None:
        """The next frame where the innermost is written last: the outermost ones are given up when there are many."""
        self.frames.insert(0, frame_of(function, file, line))
        del self.frames[RAW_FRAMES:]


def is_native(file: str) -> bool:
    """Compiled code, by the file of a frame: a library, or a C or C++ source."""
    return file == NATIVE or _NATIVE.search(file) is not None


def frame_of(function: str, file: str, line: int) -> Frame:
    """A frame out of hostile text; without template arguments and parameters where it is compiled code."""
    file = clean_line(file, 300)
    if not file or is_native(file):
        function = _bare_native(function)
    return Frame(function=clean_line(function, 120), file=file, line=max(0, line))


def _bare_native(function: str) -> str:
    """`c10d::Work::wait(std::chrono::...) ()` -> `c10d::Work::wait`."""
    if function.startswith("<"):
        return function
    function = function.strip().replace("(anonymous namespace)::", "").removeprefix("__GI_")
    ends = [at for at in (function.find(mark, 1) for mark in ("(", "<", " ", "@")) if at > 0]
    return function[: min(ends)] if ends else function


def kept(threads: list[Thread], pid: int | None) -> tuple[Frame, ...]:
    """The frames of the main thread that matter, innermost first."""
    main = _main(threads, pid)
    if main is None:
        return ()
    frames = list(_telling(main.frames))
    if frames and _CALLED_FROM_PYTHON.fullmatch(frames[0].function.rsplit(".", 1)[-1]):
        frames = [*_autograd(threads, main), *frames]
    return tuple(frames[:MAX_FRAMES])


def _telling(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Without the interpreter's own, and what a library does not name only once."""
    last = None
    for frame in frames:
        native = is_native(frame.file) or not frame.file
        if native and (_INTERPRETER.match(frame.function) or "libpython" in frame.file):
            if not ("libcuda" in frame.file or "libnccl" in frame.file):
                continue
            frame = Frame(function="??", file=frame.file, line=0)
        if not (frame.function == "??" and (last == frame or not frame.file or frame.file == NATIVE)):
            yield frame
        last = frame


def _main(threads: list[Thread], pid: int | None) -> Thread | None:
    if not threads:
        return None
    for thread in threads:
        if thread.name == "MainThread" or (pid is not None and thread.tid == pid and thread.frames):
            return thread
    for thread in threads:
        if thread.number == 1:
            return thread
    scripts = [one for one in threads if _outermost(one) in ("<module>", "_run_module_as_main")]
    if scripts:
        return scripts[-1]
    current = [one for one in threads if one.current]
    return current[0] if current else threads[0]


def _autograd(threads: list[Thread], main: Thread) -> list[Frame]:
    """What autograd's thread runs for the main thread: the hooks of FSDP and DeepSpeed."""
    for thread in threads:
        if thread is not main and _outermost(thread) not in ("", "_bootstrap", "<module>"):
            return list(_telling(thread.frames))[: MAX_FRAMES // 2]
    return []


def _outermost(thread: Thread) -> str:
    """The name of its outermost Python function."""
    python = (frame for frame in reversed(thread.frames) if frame.file and not is_native(frame.file))
    return next((frame.function.rsplit(".", 1)[-1] for frame in python), "")


MAX_BYTES: Final = 64 << 20
MAX_THREADS: Final = 50_000
MAX_LINE: Final = 4000

_HEAD: Final = re.compile(
    rb'"thread_name"|^(?:\S+ )?Process \d+: |most recent call first\)|^Traceback for thread \d'
    rb"|^Thread (?:0x[0-9A-Fa-f]+|\d+)(?:/0x[0-9A-Fa-f]+)? \((?:idle|active)[ +\w]*\)"
    rb"|^#\d{1,3} +0x[0-9a-f]{6,}|^#0 +\S+ \(|^TID \d+:|^ *\* thread #\d+",
    re.MULTILINE,
)
_HEAD_WORDS: Final = (
    b'"thread_name"',
    b" (idle",
    b" (active",
    b"Process ",
    b"call first)",
    b"for thread ",
    b"\n#",
    b"TID ",
    b" thread #",
)
_PREFIX: Final = re.compile(
    r"\[(?:rank|default|trainer)(\d{1,6})\]:|\[\d{1,6},(\d{1,6})\]<std\w{3}>:| {0,4}(\d{1,6}):(?= \D)"
)
_PROCESS: Final = re.compile(
    r"(?:.{0,40}\W)?Process (\d{1,9}): |PID (\d{1,9}) - process|.*process (\d{1,9})\) detached"
)
_RANK: Final = re.compile(r"[\s=#*>\-[]{0,60}(?:[\w.-]{1,64}[\s:]{1,3})?[Rr]ank[\s_:=#]{0,3}(\d{1,6})\b(?!.*\bin\b)")
_PYSPY: Final = re.compile(r'Thread (0x[0-9A-Fa-f]+|\d+)(?:/0x[0-9A-Fa-f]+)? \((\w[\w+ ]*)\)(?:: "(.{0,100})")?')
_FAULT: Final = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.{0,40})\])? \(most recent call first\):")
_PYBT: Final = re.compile(r"Traceback \(most recent call first\):")
_PYSTACK: Final = re.compile(r"Traceback for thread (\d+)(?: \(([^)]{0,40})\))?[^(]{0,200}\(most recent call last\):")
_PYSTACK_FRAME: Final = re.compile(
    r' {0,8}\((?:Python|C)\) File "(.{0,1000})", line (\d{1,9}), in (.{1,300}?)(?: \((\S+)\))?$'
)
_GDB: Final = re.compile(r'Thread (\d+) \((?:Thread 0x[0-9a-f]+ \()?LWP (\d+)\)?(?: "(.{0,40})")?\)')
_EU: Final = re.compile(r"TID (\d+):$")
_LLDB: Final = re.compile(r"[* ]{0,4}thread #(\d+)(?:, name = '(.{0,40})')?")
_FILE: Final = re.compile(r' {0,4}File "(.{0,1000})", line (\d+|\?\?\?),? in (.{1,300})')
_NUMBERED: Final = re.compile(r"#\d{1,4} +(?:0x[0-9a-f]+ (?:in |- \d )?)?(.+)")
_LLDB_FRAME: Final = re.compile(r" {0,8}\*? {0,4}frame #\d{1,4}: 0x[0-9a-f]+ ([^`]{1,200})`(.+)")
_MORE: Final = re.compile(r" {1,8}(?:at|from) (\S+)")
_PYTHON_IN_GDB: Final = re.compile(r"for file (\S{1,500}), line (\d{1,9}), in (\w{1,200})")
_HELPER: Final = re.compile(
    r"torch/utils/data/_utils/worker\.py|multiprocessing/(?:resource_tracker|forkserver)\.py|compile_worker/|"
    r"torch/distributed/elastic/|torch/distributed/(?:run|launch)\.py"
)
_NAME_RANK: Final = re.compile(r"rank[\s_\-.=:]{0,2}(\d{1,6})(?!\d)", re.IGNORECASE)
_NAME_NUMBER: Final = re.compile(
    r"(?:stacks?|py-?spy|dump|trace(?:back)?|threads?|bt|gdb|pstack)[_\-.](\d{1,4})(?:\.[a-z]\w*)*$", re.IGNORECASE
)

_OUR_BEACON: Final = re.compile(r"supervisor/training/beacon\.py$")

_NO_JSON_DUMP: Final = (
    msgspec.DecodeError,
    UnicodeError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    OverflowError,
)


class _Process:
    __slots__ = ("pid", "rank", "threads")

    def __init__(self, rank: int | None = None, pid: int | None = None) -> None:
        self.rank = rank
        self.pid = pid
        self.threads: list[Thread] = []


def is_dump(head: bytes) -> bool:
    """Whether a file that begins with `head` (some KiB) looks like stacks; a log that quotes some does too."""
    few = any(word in head for word in _HEAD_WORDS) or head.startswith(b"#")  # most files are logs: 4 ms less for each
    return few and _HEAD.search(head) is not None


def parse(
    rank: int, dump: bytes | str, *, sample: int = 0, waits: Callable[[int], bool] = lambda _: False
) -> RankStack:
    """The main thread of `py-spy dump --json` output. Text that is not such a dump becomes `error`.

    `waits`: whether a thread (its number) can only go on when another one of the process wakes it.
    """
    try:
        threads = _json_processes(msgspec.json.decode(dump))[0].threads
        frames = kept(threads, None)
    except _NO_JSON_DUMP as error:
        return RankStack(rank=rank, frames=(), sample=sample, error=f"no stack: {clean_text(str(error), 200)}")
    others = sum(1 for one in threads if _may_go_on(one, waits)) if frames else 0
    return RankStack(rank=rank, frames=frames, sample=sample, error="" if frames else "no Python frames", others=others)


def _may_go_on(thread: Thread, waits: Callable[[int], bool]) -> bool:
    """A further thread of the script that runs, or may run again without another thread's help."""
    if thread.name == "MainThread" or not thread.frames or _OUR_BEACON.search(thread.frames[-1].file):
        return False
    return thread.tid is None or not waits(thread.tid)


def read_dump(data: bytes, name: str) -> list[RankStack]:
    """The stacks in a file, one for each process and sample, in the order of the file; empty when there are none.

    The rank is told by the lines' prefix, a header in the file, or the file's name. A process whose rank nobody tells
    gets minus its pid, so that it is apart from the others and never taken for a rank (`stacks.names` says "process").
    """
    data = data[:MAX_BYTES]
    rank = _rank_of(name)
    processes = list(_processes(data, rank))
    found: list[RankStack] = []
    samples: dict[int, int] = {}
    for count, process in enumerate(processes, 1):
        frames = kept(process.threads, process.pid)
        if not frames or any(_HELPER.search(frame.file) for frame in frames):
            continue
        number = process.rank
        if number is None:
            number = -(process.pid or count)
        sample = samples[number] = samples.get(number, -1) + 1
        found.append(RankStack(rank=number, frames=frames, sample=sample))
    return found


def _rank_of(name: str) -> int | None:
    parts = name.replace("\\", "/").split("/")[-3:]
    for part in reversed(parts):
        match = _NAME_RANK.search(part)
        if match is not None:
            return int(match[1])
    match = _NAME_NUMBER.search(parts[-1])
    return int(match[1]) if match is not None else None


def _processes(data: bytes, rank: int | None) -> Iterator[_Process]:
    """The processes of a file; `rank` goes to the first of them (others belong to it: loaders, helpers)."""
    reading = _from_json(data)
    if reading is None:
        reading = _from_text(data.decode(errors="replace"), rank)
    elif rank is not None and reading:
        reading = reading[:1]
        reading[0].rank = rank
    yield from reading


# ----- py-spy's JSON -----


def _from_json(data: bytes) -> list[_Process] | None:
    if data[:64].lstrip()[:1] not in (b"[", b"{"):
        return None
    for pieces in ([data], data.splitlines()):
        try:
            return [one for piece in pieces if piece.strip() for one in _json_processes(msgspec.json.decode(piece))]
        except _NO_JSON_DUMP:
            continue
    return None


def _json_processes(threads: list[dict[str, Any]]) -> list[_Process]:
    by_pid: dict[int, _Process] = {}
    for raw in threads[:MAX_THREADS]:
        pid = int(raw.get("pid") or 0)
        process = by_pid.setdefault(pid, _Process(pid=pid))
        # py-spy leaves the thread id of a busy process at None sometimes: then only the name tells.
        thread = Thread(tid=raw.get("os_thread_id"), name=str(raw.get("thread_name") or ""))
        for frame in raw["frames"][:RAW_FRAMES]:
            file = frame.get("filename") or frame.get("short_filename") or ""
            thread.add(str(frame.get("name", "")), str(file), int(frame.get("line") or 0))
        process.threads.append(thread)
    return list(by_pid.values())


# ----- text -----


def _from_text(text: str, rank: int | None) -> list[_Process]:
    readers: dict[str, _TextReader] = {}
    for raw in text.splitlines():
        prefix = _PREFIX.match(raw)
        reading = next((int(group) for group in prefix.groups() if group), None) if prefix is not None else None
        key = "" if reading is None else str(reading)
        if key not in readers:
            if len(readers) >= MAX_THREADS:
                continue
            readers[key] = _TextReader(rank if reading is None else reading, fixed=reading is not None)
        readers[key].read(raw[prefix.end() if prefix is not None else 0 :][:MAX_LINE])
    return [one for reader in readers.values() for one in reader.processes if one.threads]


class _TextReader:
    """Reads the lines of one stream, whatever tool wrote them."""

    def __init__(self, rank: int | None, *, fixed: bool) -> None:
        self.processes = [_Process(rank)]
        self._rank = rank
        """Of the next process without a header of its own; a file's rank is its first process's only."""
        self._fixed = fixed
        self._thread: Thread | None = None
        self._count = 0
        self._kind = ""
        self._indent = 0
        """Of the last header: a label before the lines may end in a space."""

    def read(self, line: str) -> None:
        if not line.strip():
            return
        if not self._frame(line[self._indent :] if line[: self._indent].isspace() else line):
            self._header(line)

    def _header(self, line: str) -> None:
        self._indent = len(line) - len(line.lstrip())
        line = line[self._indent :]
        match = _FAULT.match(line)
        if match is not None:
            thread = Thread(tid=int(match[2], 16), name=match[3] or "")
            thread.current = match[1] == "Current thread"
            self._open("file", thread)
        elif (match := _PYSPY.match(line)) is not None:
            self._open("py-spy", Thread(tid=int(match[1], 0), name=match[3] or ""))
        elif _PYBT.match(line):
            self._open("file", Thread(number=1))
        elif (match := _PYSTACK.match(line)) is not None:
            self._open("pystack", Thread(tid=int(match[1])))
        elif (match := _GDB.match(line)) is not None:
            self._open("#", Thread(tid=int(match[2]), name=match[3] or "", number=int(match[1])))
        elif (match := _EU.match(line)) is not None:
            self._open("#", Thread(tid=int(match[1])))
        elif (match := _LLDB.match(line)) is not None:
            self._open("#", Thread(number=int(match[1]), name=match[2] or ""))
        elif (match := _PROCESS.match(line)) is not None:
            self._new(int(next(group for group in match.groups() if group)), ended=match[3] is not None)
        elif (match := _RANK.match(line)) is not None and not self._fixed:
            self._rank = int(match[1])
            self._new(None)
        elif line.startswith("Timeout ("):
            self._new(self.processes[-1].pid, again=True)

    def _new(self, pid: int | None, *, again: bool = False, ended: bool = False) -> None:
        """A process begins (`ended`: gdb names it at its end; `again`: another sample of the same one)."""
        self._thread = None
        last = self.processes[-1]
        if ended or not last.threads:
            last.pid = last.pid or pid
            last.rank = self._rank if last.rank is None or not last.threads else last.rank
            return
        known = self._fixed or again or pid == last.pid or last.rank != self._rank
        self.processes.append(_Process(self._rank if known else None, pid))

    def _open(self, kind: str, thread: Thread) -> None:
        process = self.processes[-1]
        same = thread.tid is not None and any(one.tid == thread.tid for one in process.threads)
        if same:  # the same thread once more: another sample
            self._new(process.pid, again=True)
            process = self.processes[-1]
        self._count += 1
        if self._count > MAX_THREADS:
            self._thread = None
            return
        self._kind = kind
        self._thread = thread
        process.threads.append(thread)

    def _frame(self, line: str) -> bool:
        """Whether the line was a frame, and taken."""
        if line.startswith("#"):
            return self._numbered(line)
        thread = self._thread
        if thread is None:
            return False
        if self._kind == "py-spy":
            return _pyspy_frame(thread, line)
        if self._kind == "file":
            match = _FILE.match(line)
            if match is not None:
                thread.add(match[3], match[1], int(match[2]) if match[2] != "???" else 0)
            return match is not None
        if self._kind == "pystack":
            match = _PYSTACK_FRAME.match(line)
            if match is not None:  # the innermost comes last
                thread.add_before(match[3], match[4] or match[1], 0 if match[4] else int(match[2]))
            return match is not None
        match = _LLDB_FRAME.match(line)
        if match is not None:
            thread.add(match[2].partition(" at ")[0], match[1], 0)
        elif (match := _MORE.match(line)) is not None and thread.frames:
            last = thread.frames[-1]
            thread.frames[-1] = frame_of(last.function, *_place(match[1]))
        return match is not None

    def _numbered(self, line: str) -> bool:
        match = _NUMBERED.match(line)
        if match is None:
            return False
        if self._thread is None or self._kind != "#" or (line.startswith("#0 ") and self._thread.frames):
            known = self._thread is not None and self._kind == "#"
            if known:
                self._new(None)
            self._open("#", Thread(number=1))
        if self._thread is not None:
            _gdb_frame(self._thread, match[1])
        return True


def _pyspy_frame(thread: Thread, line: str) -> bool:
    if line[:4] != "    " or line[4:5] == " " or not line.rstrip().endswith(")"):
        return line.startswith("        ")  # --locals
    function, _, where = line.strip()[:-1].rpartition(" (")
    thread.add(function, *_place(where))
    return True


def _gdb_frame(thread: Thread, text: str) -> None:
    python = _PYTHON_IN_GDB.search(text)
    if python is not None:
        thread.add(python[3], python[1], int(python[2]))
        return
    for word in (" from ", " at ", " - "):
        head, found, where = text.rpartition(word)
        if found and " " not in where.strip() and ("/" in where or ":" in where or ".so" in where):
            text = head
            break
    else:
        where = ""
    thread.add(text, *_place(where.strip() or NATIVE))


def _place(where: str) -> tuple[str, int]:
    """`train.py:12` -> its file and line; a library has no line."""
    file, colon, line = where.rpartition(":")
    return (file, int(line)) if colon and line.isdigit() and len(line) < 10 else (where, 0)


Activity = Literal[
    "collective",
    "checkpoint",
    "evaluation",
    "data",
    "compile",
    "teardown",
    "sleep",
    "lock",
    "gpu_sync",
    "compute",
    "unknown",
]
"""`gpu_sync`: the CPU waits for what it gave the GPU, which may be a collective, a kernel or a copy."""

# A word is a part of an identifier between underscores: `save_checkpoint`, `_save`, `Trainer.evaluate`.
_CHECKPOINT: Final = re.compile(
    r"(?:^|[_.])(?:save|saves|saving|load|loading|restore|restoring|resume|upload|download|snapshot|write)(?:$|_)"
    r"|checkpoint|ckpt|state_?dict|(?:^|[_.])(?:torch_)?(?:load|save)$|safetensors|snapshot",
    re.IGNORECASE,
)
_EVALUATION: Final = re.compile(
    r"(?:^|[_.])(?:eval|evaluate|evaluation|evaluating|validate|validation|validating|valid|val|test|testing|"
    r"predict|generate|sample|benchmark)(?:$|_)|estimate_loss|eval_loop|run_eval",
    re.IGNORECASE,
)
_CHECKPOINT_FILE: Final = re.compile(
    r"torch/serialization\.py$|torch/distributed/checkpoint/|safetensors/|dist_checkpointing/|orbax/|/checkpointing?\.py$"
)
_COMPILE_FILE: Final = re.compile(
    r"torch/(?:_dynamo|_inductor|_functorch/(?!_?vmap)|fx/|utils/cpp_extension)|(?:^|/)triton/(?:compiler|runtime)/|ninja"
    r"|numba/|tvm/|/jax/_src/compiler"
)
_DATA_FILE: Final = re.compile(
    r"torch/utils/data/|(?:^|/)datasets/(?!__main__)|torchdata/|webdataset/|streaming/base/|/tokenizers/|nvidia/dali|grain/"
    r"|huggingface_hub/|(?:^|/)filelock/|urllib3/|requests/|botocore/|fsspec/|s3fs/|gcsfs/"
    r"|(?:^|/)subprocess\.py$"  # a program that it started: an upload, as a rule
)
_DATA_NAME: Final = re.compile(
    r"(?:^|[_.])(?:dataloader|data_loader|dataset|tokenize|tokenizer|preprocess|prefetch|(?:get|next|load|read|fetch)_"
    r"(?:batch|data|shard|sample)|batch_generator|fetch|collate)(?:$|_|s$)|_next_data|_try_get_data|_get_data|DataLoader",
    re.IGNORECASE,
)
_COLLECTIVE_NAME: Final = re.compile(
    r"^(?:all_reduce|all_gather\w*|all_to_all\w*|reduce_scatter\w*|_?reduce|_?broadcast\w*|barrier|monitored_barrier|"
    r"gather\w*|scatter\w*|send|recv|isend|irecv|batch_isend_irecv|_all_gather_base|_reduce_scatter_base|allreduce\w*|"
    r"all_gather_object|_object_to_tensor|wait|synchronize|wait_for_everyone|_sync_params_and_buffers|"
    r"_verify_param_shape_across_processes|_store_based_barrier|store_based_barrier|_wait_for_work)$"
)
_DISTRIBUTED_FILE: Final = re.compile(r"torch/distributed/|torch/nn/parallel/|deepspeed/(?:comm|runtime)/|accelerate/")
_TEARDOWN_NAME: Final = re.compile(
    r"^(?:destroy_process_group|_shutdown_backend|_shutdown|_run_exitfuncs|_exit_function|shutdown|_finalize_\w+|"
    r"end_training|_python_exit|cleanup|teardown)$"
)
_SLEEP_NAME: Final = frozenset({"sleep", "pause", "sigwait", "nanosleep"})
_LOCK_NAME: Final = frozenset(
    {"acquire", "_wait_for_tstate_lock", "join", "get", "poll", "select", "communicate", "_wait"}
)
_LOCK_FILE: Final = re.compile(r"(?:^|/)(?:threading|queue|selectors|socket|ssl)\.py$|multiprocessing/")


_GPU_SYNC: Final = re.compile(
    r"p?(?:cuda|hip)(?:Stream|Device|Event)Synchronize|(?:cu|cuda|hip)Memcpy|cu(?:Stream|Ctx|Event)Synchronize|"
    r"at::native::(?:_local_scalar_dense|nonzero|copy)_?\w*cuda"
)
_GPU_SYNC_FILE: Final = re.compile(r"torch/(?:cuda|xpu|accelerator)/(?:__init__|streams)\.py$")
_NATIVE_ACTIVITY: Final[tuple[tuple[Activity, re.Pattern[str]], ...]] = (
    (
        "teardown",
        re.compile(
            r"p?ncclComm(?:Abort|Destroy|Finalize)|c10d::NCCLComm::(?:abort|ncclCommAbort|destroy|finalize)|"
            r"c10d::ProcessGroup\w*::(?:abort|shutdown|~)"
        ),
    ),
    ("collective", re.compile(r"p?nccl[A-Z]|c10d::|gloo::|MPI_[A-Z]|p?rcclx?[A-Z]")),
    ("gpu_sync", _GPU_SYNC),
)
"""What a compiled function tells, wherever it stands in a stack."""
_NATIVE_LEAF: Final[tuple[tuple[Activity, re.Pattern[str]], ...]] = (
    ("sleep", re.compile(r"_*(?:clock_)?nanosleep|usleep|sleep$")),
    (
        "lock",
        re.compile(
            r"_*(?:futex|pthread_(?:cond|mutex|join)|lll_lock|sem_|new_sem|poll|ppoll|epoll|select|accept|recv|"
            r"std::condition|waitpid|wait4|sched_yield|sigwait|do_futex)"
        ),
    ),
    ("data", re.compile(r"_*(?:libc_)?p?read(?:v|64)?$|_*open(?:at)?(?:64)?$|_*[fl]?stat")),
    ("checkpoint", re.compile(r"_*(?:libc_)?p?write(?:v|64)?$|_*f(?:data)?sync$|_*ftruncate|_*rename")),
)
"""What the innermost function tells where no Python frame does."""


def activity(stack: RankStack) -> Activity:
    """What the main thread is doing.

    Phases that may honestly last (checkpoint, evaluation, compiling) win over what happens inside them; a collective
    inside them wins over both, because then the rank is only waiting for others.
    """
    frames = tuple(frame for frame in stack.frames if not is_native(frame.file))
    native = tuple(frame for frame in stack.frames if is_native(frame.file)) if len(frames) < len(stack.frames) else ()
    if any(_TEARDOWN_NAME.match(bare(frame)) and not _is_user_loop(frame) for frame in frames):
        return "teardown"
    deep = _native_activity(native)
    if _in_collective(frames) or deep in ("collective", "teardown"):
        return "teardown" if deep == "teardown" else "collective"
    if not frames:
        return deep or (_native_leaf(native[0]) if native else "unknown")
    if any(_COMPILE_FILE.search(frame.file) for frame in frames):
        return "compile"
    for frame in frames:  # innermost first: an evaluation that saves is saving
        if _CHECKPOINT_FILE.search(frame.file) or _CHECKPOINT.search(bare(frame)):
            return "data" if _DATA_NAME.search(frame.function) else "checkpoint"
        if _EVALUATION.search(bare(frame)):
            return "evaluation"
        if _DATA_FILE.search(frame.file) or _DATA_NAME.search(frame.function):
            return "data"
    if deep is not None or (bare(frames[0]) == "synchronize" and _GPU_SYNC_FILE.search(frames[0].file)):
        return "gpu_sync"
    leaf = _leaf(frames[0])
    if leaf == "compute" and native and native[0] == stack.frames[0]:
        reading = _native_leaf(native[0])
        return reading if reading in ("sleep", "lock") else leaf
    return leaf


def _native_activity(frames: tuple[Frame, ...]) -> Activity | None:
    if frames and "libcuda.so" in frames[0].file:
        return next((reading for reading in map(tells_of, frames) if reading in ("collective", "teardown")), "gpu_sync")
    return next((reading for reading in map(tells_of, frames) if reading is not None), None)


def tells_of(frame: Frame) -> Activity | None:
    """What a compiled function tells, wherever it stands in a stack."""
    return next((reading for reading, pattern in _NATIVE_ACTIVITY if pattern.match(frame.function)), None)


def _native_leaf(frame: Frame) -> Activity:
    return next((reading for reading, pattern in _NATIVE_LEAF if pattern.match(frame.function)), "unknown")


def _leaf(frame: Frame) -> Activity:
    name = bare(frame)
    if name in _SLEEP_NAME:
        return "sleep"
    if name in _LOCK_NAME and (_LOCK_FILE.search(frame.file) or not frame.file):
        return "lock"
    if _LOCK_FILE.search(frame.file):
        return "lock"
    return "compute"


def _in_collective(frames: tuple[Frame, ...]) -> bool:
    """In a call of torch.distributed that waits for other ranks (the innermost few frames tell)."""
    return any(_COLLECTIVE_NAME.match(bare(frame)) and _DISTRIBUTED_FILE.search(frame.file) for frame in frames[:8])


_CALLS_FILE: Final = re.compile(r"torch/distributed/(?:distributed_c10d|_functional_collectives|nn/functional)\.py$")
_OWN_WORK: Final = re.compile(r"_object_to_tensor|\w+_object(?:_list)?$")
"""What pickles objects or reads them back besides."""


def waits_in_collective(stack: RankStack) -> bool:
    """It stands in the very call that waits for other ranks: not in what a call of torch.distributed does of its own
    (pickling an object to be broadcast), and not in a wait that its stack does not show (`work.wait()`)."""
    inner = next((frame for frame in stack.frames if not is_native(frame.file)), None)
    if inner is None or not _CALLS_FILE.search(inner.file):
        return False
    return _COLLECTIVE_NAME.match(bare(inner)) is not None and _OWN_WORK.match(bare(inner)) is None


def in_send_or_receive(stack: RankStack) -> bool:
    """It stands in a call that waits for one other rank, which gloo's flight recorder does not know."""
    inner = next((frame for frame in stack.frames if not is_native(frame.file)), None)
    return inner is not None and bare(inner) in {"send", "recv"} and _CALLS_FILE.search(inner.file) is not None


def in_teardown(stack: RankStack) -> bool:
    """In torch's own destruction or abort of process groups, not merely in some handler at exit (which may upload)."""
    return any(
        (bare(frame) in _GROUP_ENDS and _DISTRIBUTED_FILE.search(frame.file) is not None)
        or (is_native(frame.file) and tells_of(frame) == "teardown")
        for frame in stack.frames
    )


_GROUP_ENDS: Final = frozenset({"destroy_process_group", "_shutdown_backend", "_abort_process_group"})


def own_frames(stack: RankStack) -> tuple[Frame, ...]:
    """The frames of the script's own code, the outermost first."""
    return tuple(
        frame for frame in reversed(stack.frames) if not is_library(frame.file) and not _LAUNCHING.search(frame.file)
    )


_LAUNCHING: Final = re.compile(r"supervisor/training/(?:bootstrap|keeper|stub)\.py$")


def _is_user_loop(frame: Frame) -> bool:
    """`cleanup` and the like in the user's own code are only teardown when the library is being torn down."""
    return bare(frame) in {"cleanup", "teardown", "shutdown"} and not (
        frame.file.startswith("/usr/lib") or "site-packages" in frame.file or "/lib/python" in frame.file
    )


def bare(frame: Frame) -> str:
    """`Trainer.evaluate` -> `evaluate`; `f.<locals>.inner` -> `inner`."""
    return frame.function.rsplit(".", 1)[-1]


def in_barrier(stack: RankStack) -> bool:
    """Waiting in a barrier, as scripts do at their end."""
    return any(bare(frame) in {"barrier", "monitored_barrier", "wait_for_everyone"} for frame in stack.frames[:8])


def signature(stack: RankStack) -> tuple[Frame, ...]:
    """Equal for two samples that show the same place."""
    return stack.frames


class StackGroup(Frozen, frozen=True, kw_only=True):
    """Ranks whose stacks are the same."""

    ranks: tuple[int, ...]
    activity: Activity
    frames: tuple[Frame, ...]


def group(stacks: Iterable[RankStack]) -> list[StackGroup]:
    """Equal stacks together, the largest group first; of several samples of a rank the newest counts."""
    newest: dict[int, RankStack] = {}
    for stack in stacks:
        if stack.frames and (stack.rank not in newest or newest[stack.rank].sample <= stack.sample):
            newest[stack.rank] = stack
    by_place: dict[tuple[str, ...], list[RankStack]] = {}
    for stack in newest.values():
        # Lines inside a library differ between ranks by chance; functions tell where somebody is.
        key = tuple(f"{frame.file}:{frame.function}" for frame in stack.frames)
        by_place.setdefault(key, []).append(stack)
    groups = [
        StackGroup(
            ranks=tuple(sorted(stack.rank for stack in members)),
            activity=activity(members[0]),
            frames=members[0].frames,
        )
        for members in by_place.values()
    ]
    return sorted(groups, key=lambda one: (-len(one.ranks), one.ranks))


def place(stack: RankStack) -> str:
    """`evaluate (train.py:41)`: the innermost frame of the user's own code, else the innermost one."""
    if not stack.frames:
        return stack.error or "unknown place"
    own = (frame for frame in stack.frames if not is_library(frame.file))
    reading = (frame for frame in stack.frames if tells_of(frame) is not None)
    frame = next(own, None) or next(reading, stack.frames[0])
    line = f":{frame.line}" if frame.line or not is_native(frame.file) else ""
    return f"{bare(frame)} ({frame.file.rsplit('/', 1)[-1]}{line})"


_LIBRARY: Final = re.compile(
    r"^(?:torch|torchvision|torchdata|numpy|deepspeed|accelerate|transformers|lightning|pytorch_lightning|"
    r"lightning_fabric|triton|transformer_engine|multiprocessing|concurrent|asyncio|importlib|tqdm|wandb)/"
    r"|^(?:threading|queue|selectors|socket|ssl|subprocess|runpy|contextlib|functools)\.py$"
)
"""As py-spy shortens the names of installed code."""


def is_library(file: str) -> bool:
    """Installed code or the standard library, not the user's."""
    return (
        "site-packages/" in file
        or "dist-packages/" in file
        or "/lib/python" in file
        or file.startswith("<")
        or is_native(file)
        or _LIBRARY.match(file) is not None
    )
