"""What a Python exception means: by its words (rules), its type, and the code it came through."""

from __future__ import annotations

import re
from typing import Final

from diagnosis import rules
from diagnosis.rules import RuleMatch
from diagnosis.signals import Frame, Word
from diagnosis.stacks import is_library
from diagnosis.taxonomy import FailureClass
from diagnosis.tracebacks import CUT_OFF, Traceback

_SCRIPT: Final = frozenset(
    "AttributeError TypeError NameError KeyError IndexError SyntaxError IndentationError TabError ZeroDivisionError "
    "UnboundLocalError NotImplementedError RecursionError StopIteration LookupError ArithmeticError OverflowError "
    "RuntimeError Exception AssertionError ValueError".split()
)
_CONFIG_FILE: Final = re.compile(r"\.(?:ya?ml|json|toml|cfg|ini)\b|config", re.IGNORECASE)
_DATA_PATH: Final = re.compile(
    r"torch/utils/data/|/datasets/|torchdata/|webdataset/|data_?loader|dataset|/data/|tokeniz|collate", re.IGNORECASE
)
_LOAD_PLACE: Final = re.compile(
    r"torch/serialization\.py|torch/distributed/checkpoint/|safetensors|load_checkpoint|load_state|resume|restore|from_pretrained"
)

_ARGUMENT_WORDS: Final = re.compile(
    r"\b(?:must be|should be|invalid|unsupported|not supported|unrecognized|expected|argument|option|config\w*|"
    r"divisible|block.?size|already exists|unknown (?:option|model|arch\w*)|cannot forward|only supports?)\b",
    re.IGNORECASE,
)


class Reading(Word, frozen=True, kw_only=True):
    """What an exception says."""

    failure_class: FailureClass
    confidence: float
    is_cascade: bool = False
    symptoms: tuple[FailureClass, ...] = ()


def read(traceback: Traceback, matches: list[RuleMatch]) -> Reading:
    """The meaning of a rank's last exception; `matches`: what rules read in all of its output."""
    symptoms = tuple(dict.fromkeys(one.failure_class for one in matches if one.rule.role in ("symptom", "cascade")))
    own = rules.default().scan_text([*traceback.causes, traceback.line])
    serious = [one for one in own if one.confidence >= 0.5]
    causes = [one for one in serious if one.rule.role not in ("cascade", "symptom")]
    if causes:
        best = max(causes, key=lambda one: one.confidence)
        return Reading(failure_class=best.failure_class, confidence=best.confidence, symptoms=symptoms)
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


def _by_type(traceback: Traceback, symptoms: tuple[FailureClass, ...]) -> Reading:
    frames = (*traceback.cause_frames, *traceback.frames)
    failure_class, confidence = _classify(traceback.name, traceback.message, frames)
    if failure_class is FailureClass.SCRIPT_ERROR and traceback.causes:
        # What wraps it is often a plain error; the first exception says more.
        cause, _, message = traceback.causes[0].partition(": ")
        by_cause, certain = _classify(cause.rsplit(".", 1)[-1], message, frames)
        if by_cause is not FailureClass.SCRIPT_ERROR:
            failure_class, confidence = by_cause, certain - 0.1
    return Reading(failure_class=failure_class, confidence=confidence, symptoms=symptoms)


def _classify(name: str, message: str, frames: tuple[Frame, ...]) -> tuple[FailureClass, float]:
    data = _through(frames, _DATA_PATH)
    if name == "KeyboardInterrupt":
        return FailureClass.PREEMPTED_OR_CANCELLED, 0.75
    if name in ("EOFError", "UnpicklingError", "BadZipFile") and _through(frames, _LOAD_PLACE):
        return FailureClass.CHECKPOINT_CORRUPT_OR_MISMATCH, 0.85
    if name in ("FileNotFoundError", "IsADirectoryError", "NotADirectoryError", "FileExistsError"):
        return _missing_file(message, frames)
    if name in ("JSONDecodeError", "ParserError", "ScannerError", "YAMLError"):
        if data:
            return FailureClass.DATA_LOADING_ERROR, 0.75
        return FailureClass.CONFIG_OR_ARGUMENT_ERROR, 0.7
    if name in ("UnicodeDecodeError", "BadGzipFile", "ArrowInvalid") or (
        data and name in ("EOFError", "OSError", "IOError")
    ):
        return FailureClass.DATA_LOADING_ERROR, 0.7
    if name in ("OSError", "IOError", "BlockingIOError"):
        return FailureClass.STORAGE_ERROR, 0.6
    if name in ("ConnectionError", "ConnectionRefusedError", "HTTPError", "gaierror", "URLError", "ConnectTimeout"):
        return FailureClass.DNS_OR_CONNECT, 0.75
    if name in ("ArgumentError", "ValidationError", "ConfigAttributeError", "MissingMandatoryValue", "UsageError"):
        return FailureClass.CONFIG_OR_ARGUMENT_ERROR, 0.85
    if name == "FloatingPointError":
        return FailureClass.LOSS_SPIKE_OR_NAN, 0.7
    if name in ("ValueError", "AssertionError") and not data:
        if _ARGUMENT_WORDS.search(message):
            return FailureClass.CONFIG_OR_ARGUMENT_ERROR, 0.65
        if frames and is_library(frames[-1].file):
            return FailureClass.CONFIG_OR_ARGUMENT_ERROR, 0.55
    if name == CUT_OFF:
        return (FailureClass.DATA_LOADING_ERROR if data else FailureClass.SCRIPT_ERROR), 0.5
    if name in ("IndexError", "KeyError", "ValueError") and data and frames and is_library(frames[-1].file):
        return FailureClass.DATA_LOADING_ERROR, 0.6
    return FailureClass.SCRIPT_ERROR, 0.85 if name in _SCRIPT else 0.65


def _missing_file(message: str, frames: tuple[Frame, ...]) -> tuple[FailureClass, float]:
    if _through(frames, _LOAD_PLACE):
        return FailureClass.CHECKPOINT_CORRUPT_OR_MISMATCH, 0.65
    if _CONFIG_FILE.search(message):
        return FailureClass.CONFIG_OR_ARGUMENT_ERROR, 0.65
    return FailureClass.DATA_LOADING_ERROR, 0.65


def _through(frames: tuple[Frame, ...], pattern: re.Pattern[str]) -> bool:
    """The exception came through such code."""
    return any(pattern.search(frame.file) or pattern.search(frame.function) for frame in frames)
