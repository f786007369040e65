"""The frames of threads, out of any tool's words: compiled code told from Python, and what of a process is kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from diagnosis.signals import Frame, clean_line

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
