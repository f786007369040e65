"""What a Python exception means: by its words (rules), its type, and the code it came through.

The words come first, because libraries say what is wrong in much the same words whatever the type. Without such words
the place decides: input pipeline, checkpoint, configuration; and only then the type.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from diagnosis import rules
from diagnosis.errors.blocks import FATAL
from diagnosis.errors.places import Where
from diagnosis.errors.tracebacks import CUT_OFF, Traceback
from diagnosis.rules import RuleMatch
from diagnosis.signals import Frozen
from diagnosis.stacks import is_library
from diagnosis.tables import load
from diagnosis.taxonomy import FailureClass

C = FailureClass
Guess = tuple[FailureClass, float]

SURE: Final = 0.75

_TABLE: Final = load("diagnosis", "exceptions.toml")
_WORDS: Final = {name: re.compile(row["regex"]) for name, row in _TABLE["words"].items()}
_FILES: Final = {name: re.compile(row["regex"]) for name, row in _TABLE["file"].items()}


def _by_names(rows: list[dict[str, Any]]) -> dict[str, Guess]:
    return {name: (C(row["class"]), row["confidence"]) for row in rows for name in row["names"]}


_BY_NAME: Final = _by_names(_TABLE["type"])
_BY_MODULE: Final = _by_names(_TABLE["module"])
"""By the module in which its type is defined, where the type says nothing."""
_PLAIN_BUGS: Final = frozenset(_TABLE["types"]["plain_bugs"])
_PEERS_GONE: Final = frozenset(_TABLE["types"]["peers_gone"])
_PIPES_GONE: Final = frozenset(_TABLE["types"]["pipes_gone"])


class Reading(Frozen, frozen=True, kw_only=True):
    """What an exception says."""

    failure_class: FailureClass
    confidence: float
    is_cascade: bool = False
    symptoms: tuple[FailureClass, ...] = ()


def read(traceback: Traceback, matches: list[RuleMatch]) -> Reading:
    """The meaning of a rank's last exception; `matches`: what rules read in all of its output."""
    if traceback.name == "KeyboardInterrupt" and traceback.causes:
        # Somebody lost patience with a run that had failed; what failed for good counts, not a look-up in vain.
        name, _, message = traceback.causes[-1].partition(": ")
        before = msgspec.structs.replace(traceback, exception=name, message=message, causes=traceback.causes[:-1])
        reading = read(before, matches)
        if reading.confidence >= SURE and name.rsplit(".", 1)[-1] not in ("KeyError", "IndexError", "Empty"):
            return reading
    symptoms = tuple(dict.fromkeys(one.failure_class for one in matches if one.rule.role in ("symptom", "cascade")))
    own = rules.default().scan_text([*traceback.causes, traceback.line])
    if traceback.name == FATAL and all(one.rule.role == "symptom" for one in own):
        own = []  # the place of a crash says more than its signal
    serious = [one for one in own if one.confidence >= 0.5]
    causes = [one for one in serious if one.rule.role not in ("cascade", "symptom")]
    if causes:
        best = max(causes, key=lambda one: one.confidence)
        failure_class, confidence = _in_place(best, traceback)
        return Reading(failure_class=failure_class, confidence=confidence, symptoms=symptoms)
    if serious:
        best = serious[0]
        # The exception itself is only a consequence; a cause that the rank wrote before it counts.
        written = [
            one
            for one in matches
            if one.rule.role == "cause" and one.rule.severity == "fatal" and one.confidence >= 0.8
        ]
        if written:
            return Reading(failure_class=written[0].failure_class, confidence=0.7, symptoms=symptoms)
        return Reading(
            failure_class=best.failure_class,
            confidence=best.confidence,
            is_cascade=best.rule.role == "cascade",
            symptoms=symptoms,
        )
    return _by_type(traceback, symptoms)


def _in_place(match: RuleMatch, traceback: Traceback) -> Guess:
    """What a rule says of an exception, given the code that raised it."""
    where = _where(traceback)
    failure_class = match.failure_class
    in_shared_memory = _FILES["shared_memory"].search(where.file) is not None
    shared = in_shared_memory and "'/" not in traceback.message.replace("'/dev/shm", "")
    if failure_class is C.DISK_FULL and (shared or _WORDS["shared_file"].search(traceback.message)):
        return C.SHM_EXHAUSTED, 0.85
    if match.rule.id == "unpickle" and not where.in_checkpoint:
        return (C.DATA_LOADING_ERROR, 0.65) if where.in_data else (failure_class, match.confidence)
    return failure_class, match.confidence


def _by_type(traceback: Traceback, symptoms: tuple[FailureClass, ...]) -> Reading:
    where = _where(traceback)
    gone = _consequence(traceback, where)
    if gone is not None:
        return Reading(failure_class=gone[0], confidence=gone[1], is_cascade=True, symptoms=symptoms)
    (failure_class, confidence) = _classify(traceback.exception, traceback.message, where)
    for cause in reversed(traceback.causes):
        # What wraps it is often a plain error: the exception before says more.
        name, _, message = cause.partition(": ")
        before, certain = _classify(name, message, where)
        interrupted = before is C.PREEMPTED_OR_CANCELLED
        if (
            interrupted
            or traceback.name == "KeyboardInterrupt"
            or (
                failure_class is C.SCRIPT_ERROR
                and before is not C.SCRIPT_ERROR
                and name.rsplit(".", 1)[-1] != "KeyError"
            )
        ):
            failure_class, confidence = before, certain - (0.0 if interrupted else 0.1)
    return Reading(failure_class=failure_class, confidence=round(confidence, 3), symptoms=symptoms)


def _consequence(traceback: Traceback, where: Where) -> Guess | None:
    """What it says of somebody else who is gone."""
    if traceback.name in _PEERS_GONE:
        return C.NCCL_NETWORK, 0.5
    if traceback.causes:
        return None
    inside = any(_FILES["multiprocessing"].search(one.file) for one in where.frames[-3:])
    if (traceback.name in _PIPES_GONE and inside) or _WORDS["closing"].search(traceback.message):
        return C.WORKER_CRASH, 0.4
    return None


def _classify(exception: str, message: str, where: Where) -> Guess:
    name = exception.partition("(")[0].rsplit(".", 1)[-1]
    if name == FATAL:
        inside = is_library(where.file) and "ctypes" not in where.file
        return (C.FRAMEWORK_BUG, 0.65) if inside and message.startswith("Segm") else (C.WORKER_CRASH, 0.6)
    if name == "KeyboardInterrupt":
        return C.PREEMPTED_OR_CANCELLED, 0.75
    if name == CUT_OFF:
        return (C.DATA_LOADING_ERROR if where.in_data else C.SCRIPT_ERROR), 0.3
    if name not in _PLAIN_BUGS and _WORDS["package"].search(message):
        return C.DEPENDENCY_IMPORT_ERROR, 0.7
    if name == "ParserError":  # of YAML, else of tables and dates
        return (C.CONFIG_OR_ARGUMENT_ERROR, 0.8) if exception.startswith("yaml") else (C.DATA_LOADING_ERROR, 0.75)
    special = _SPECIAL.get(name)
    if special is not None:
        return special(message, where)
    if name in _PLAIN_BUGS:
        return _plain_bug(message)
    if name in _BY_NAME:
        return _BY_NAME[name]
    top, _, rest = exception.rpartition(".")[0].partition(".")
    by_module = _BY_MODULE.get(top) or _BY_MODULE.get(f"{top}.{rest.partition('.')[0]}")
    return by_module or _by_place(message, where) or (C.SCRIPT_ERROR, 0.5)


def _plain_bug(message: str) -> Guess:
    if _WORDS["library_lacks"].search(message):
        return C.DEPENDENCY_IMPORT_ERROR, 0.7
    return C.SCRIPT_ERROR, 0.85


def _by_place(message: str, where: Where) -> Guess | None:
    if where.in_data:
        return C.DATA_LOADING_ERROR, 0.6
    if where.in_config:
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.7
    if _WORDS["strong_argument"].search(message):
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.6
    return None


def _value(message: str, where: Where) -> Guess:
    """ValueError and AssertionError: what the code was given, unless it is about shapes and the like."""
    if where.in_config:
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.75
    if where.in_data:
        return C.DATA_LOADING_ERROR, 0.6
    if _WORDS["bug"].search(message):
        return C.SCRIPT_ERROR, 0.7
    if _WORDS["argument"].search(message):
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.65
    return C.CONFIG_OR_ARGUMENT_ERROR, 0.5


def _runtime(message: str, where: Where) -> Guess:
    if _FILES["compiler"].search(where.file):
        return C.FRAMEWORK_BUG, 0.6
    if _WORDS["bug"].search(message):
        return C.SCRIPT_ERROR, 0.8
    return _by_place(message, where) or (C.SCRIPT_ERROR, 0.65)


def _key(message: str, where: Where) -> Guess:
    if _WORDS["variable"].match(message.strip()) and where.file.endswith("os.py"):
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.8
    if where.in_data:
        return C.DATA_LOADING_ERROR, 0.6
    if where.in_config:
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.65
    if where.near(2).in_checkpoint or _WORDS["saved_key"].match(message):
        return C.CHECKPOINT_CORRUPT_OR_MISMATCH, 0.6
    return C.SCRIPT_ERROR, 0.8


def _index(_: str, where: Where) -> Guess:
    return (C.DATA_LOADING_ERROR, 0.6) if where.in_data else (C.SCRIPT_ERROR, 0.8)


def _missing_file(message: str, where: Where) -> Guess:
    if any(frame.file.endswith("subprocess.py") for frame in where.frames):
        return C.DEPENDENCY_IMPORT_ERROR, 0.65
    if (_WORDS["checkpoint_file"].search(message) or where.in_checkpoint) and not where.near(3).in_data:
        return C.CHECKPOINT_CORRUPT_OR_MISMATCH, 0.65
    if _WORDS["config_file"].search(message) or (where.in_config and not where.in_data):
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.65
    if _WORDS["output_file"].search(message) and not where.in_data:
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.5
    return C.DATA_LOADING_ERROR, 0.65


def _decoding(_: str, where: Where) -> Guess:
    """JSON, YAML and text that cannot be read."""
    if where.in_data:
        return C.DATA_LOADING_ERROR, 0.75
    if where.in_checkpoint:
        return C.CHECKPOINT_CORRUPT_OR_MISMATCH, 0.65
    return C.CONFIG_OR_ARGUMENT_ERROR, 0.6


def _text(_: str, where: Where) -> Guess:
    if where.in_checkpoint:
        return C.CHECKPOINT_CORRUPT_OR_MISMATCH, 0.7
    return C.DATA_LOADING_ERROR, 0.65


def _archive(message: str, where: Where) -> Guess:
    if "reading a line" in message:
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.55  # a question, and nobody there to answer it
    if where.in_checkpoint:
        return C.CHECKPOINT_CORRUPT_OR_MISMATCH, 0.85
    return (C.DATA_LOADING_ERROR, 0.65) if where.in_data else (C.CHECKPOINT_CORRUPT_OR_MISMATCH, 0.5)


def _os(message: str, where: Where) -> Guess:
    if any("-packages/transformers/" in frame.file or "huggingface_hub/" in frame.file for frame in where.frames[-3:]):
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.6  # a name of a model, or of a file in it
    if where.in_data:
        return C.DATA_LOADING_ERROR, 0.7
    if where.in_checkpoint and "[Errno" not in message:
        return C.CHECKPOINT_CORRUPT_OR_MISMATCH, 0.6
    return C.STORAGE_ERROR, 0.55


def _program(message: str, _: Where) -> Guess:
    """A program that it started failed: what that program said counts for more."""
    if _WORDS["compiler"].search(message[:300]):
        return C.DEPENDENCY_IMPORT_ERROR, 0.65
    return C.WORKER_CRASH, 0.4


def _exit(message: str, _: Where) -> Guess:
    return (C.CONFIG_OR_ARGUMENT_ERROR, 0.6) if message.strip() == "2" else (C.WORKER_CRASH, 0.3)


def _not_implemented(message: str, where: Where) -> Guess:
    if where.in_config or _WORDS["argument"].search(message):
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.6
    return C.SCRIPT_ERROR, 0.65


_SPECIAL: Final = {
    "ValueError": _value,
    "AssertionError": _value,
    "RuntimeError": _runtime,
    "Exception": _runtime,
    "KeyError": _key,
    "IndexError": _index,
    "FileNotFoundError": _missing_file,
    "IsADirectoryError": _missing_file,
    "NotADirectoryError": _missing_file,
    "JSONDecodeError": _decoding,
    "UnicodeDecodeError": _text,
    "EOFError": _archive,
    "UnpicklingError": _archive,
    "BadZipFile": _archive,
    "OSError": _os,
    "IOError": _os,
    "BlockingIOError": _os,
    "CalledProcessError": _program,
    "SystemExit": _exit,
    "NotImplementedError": _not_implemented,
}


def _where(traceback: Traceback) -> Where:
    return Where(frames=(*traceback.cause_frames, *traceback.frames), code=traceback.code)
