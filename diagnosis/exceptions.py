"""What a Python exception means: by its words (rules), its type, and the code it came through (`Where`).

The words come first, because libraries say what is wrong in much the same words whatever the type. Without such words
the place decides: input pipeline, checkpoint, configuration; and only then the type. Names and words are data:
`exceptions.toml`. A log may also end with an error that no rule and no traceback tells: `last_words`, `last_exception`
and `last_sleeper` say what its last lines are mostly about. They are a last resort, and never sure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from diagnosis import complaints, rules
from diagnosis.rules import RuleMatch
from diagnosis.signals import Frame, Frozen
from diagnosis.stacks import is_library
from diagnosis.tables import load
from diagnosis.taxonomy import TAXONOMY, FailureClass
from diagnosis.tracebacks import CUT_OFF, FATAL, Traceback, split_prefix

_PLACES: Final = {
    name: {kind: re.compile(row[kind]) for kind in ("file", "function", "code")}
    for name, row in load("diagnosis", "exceptions.toml")["place"].items()
}


class Where(Frozen, frozen=True, kw_only=True):
    """Where an exception came from."""

    frames: tuple[Frame, ...]
    """Outermost first."""
    code: str = ""
    """The innermost line of the user's own code."""

    def near(self, count: int) -> Where:
        """The innermost frames only."""
        return msgspec.structs.replace(self, frames=self.frames[-count:])

    @property
    def file(self) -> str:
        """That of the innermost frame."""
        return self.frames[-1].file if self.frames else ""

    @property
    def in_data(self) -> bool:
        """It came through the input pipeline."""
        data = _PLACES["data"]
        if data["code"].search(self.code) is not None or any(data["file"].search(one.file) for one in self.frames):
            return True
        # A loop over data calls the model: what it raises is not the data's.
        models = [number for number, one in enumerate(self.frames) if one.file.endswith("nn/modules/module.py")]
        inside = self.frames[models[-1] + 1 if models else 0 :]
        return any(data["function"].search(_bare(one)) for one in inside)

    @property
    def in_checkpoint(self) -> bool:
        """It came through code that loads or saves a checkpoint."""
        return self._is_in("checkpoint", self.frames)

    @property
    def in_config(self) -> bool:
        """The innermost few frames read or check arguments and configuration."""
        return self._is_in("config", self.frames[-4:])

    def _is_in(self, name: str, frames: tuple[Frame, ...]) -> bool:
        place = _PLACES[name]
        if place["code"].search(self.code) is not None:
            return True
        return any(place["file"].search(one.file) or place["function"].search(_bare(one)) for one in frames)


def _bare(frame: Frame) -> str:
    return frame.function.rsplit(".", 1)[-1]


C = FailureClass
Guess = tuple[FailureClass, float]

SURE: Final = 0.75
NAMED_CONFIDENCE: Final = 0.68
_HUMPS: Final = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_KIND: Final = re.compile(r"(?:Error|Exception)$")
"""Where a new word of a type's name begins, and what every type has."""
SOMETHING_IS_WRONG: Final = 0.65
VAGUE: Final = 0.5
"""What is said of a type that no table knows is at most so sure."""

_TABLE: Final = load("diagnosis", "exceptions.toml")
_WORDS: Final = {name: re.compile(row["regex"]) for name, row in _TABLE["words"].items()}
_FILES: Final = {name: re.compile(row["regex"]) for name, row in _TABLE["file"].items()}


def _by_names(rows: list[dict[str, Any]]) -> dict[str, Guess]:
    return {name: (C(row["class"]), row["confidence"]) for row in rows for name in row["names"]}


_BY_NAME: Final = _by_names(_TABLE["type"])
_BY_MODULE: Final = _by_names(_TABLE["module"])
"""By the module in which its type is defined, where the type says nothing."""
_CODE: Final[dict[str, Callable[[Where], bool]]] = {
    "in_data": lambda where: where.in_data,
    "in_config": lambda where: where.in_config,
    "in_checkpoint": lambda where: where.in_checkpoint,
    "near_data": lambda where: where.near(3).in_data,
    "near_checkpoint": lambda where: where.near(2).in_checkpoint,
    "in_compiler": lambda where: _FILES["compiler"].search(where.file) is not None,
    "in_environment": lambda where: where.file.endswith("os.py"),
    "in_model_hub": lambda where: any(_FILES["model_hub"].search(one.file) for one in where.frames[-3:]),
    "in_subprocess": lambda where: any(one.file.endswith("subprocess.py") for one in where.frames),
}
"""Conditions of `[[decision]]` that ask for the code it came through; all others are `[words]` of the message."""


class _Decision(NamedTuple):
    guess: Guess
    conditions: list[str]


_DECISIONS: Final = {
    name: [_Decision((C(kind), confidence), conditions) for kind, confidence, *conditions in table["rows"]]
    for table in _TABLE["decision"]
    for name in table["names"]
}
"""Types whose meaning depends on the message and on the code they came through; `*`: all that nobody knows."""
_NOT_RAISED: Final = (C.PREEMPTED_OR_CANCELLED, *(one for one, entry in TAXONOMY.items() if entry.retry == "exclude"))
"""Words of an exception are no proof of these: nothing is cordoned because a program says so."""
_NO_ARGUMENTS: Final = (
    C.CHECKPOINT_CORRUPT_OR_MISMATCH,
    C.STORAGE_ERROR,
    C.RENDEZVOUS_STORE,
    C.NCCL_NETWORK,
)
"""What a message is about that is no argument, whatever words of arguments it has."""
_PLAIN_BUGS: Final = frozenset(_TABLE["types"]["plain_bugs"])
_PEERS_GONE: Final = frozenset(_TABLE["types"]["peers_gone"])
_PIPES_GONE: Final = frozenset(_TABLE["types"]["pipes_gone"])


class ExceptionReading(Frozen, frozen=True, kw_only=True):
    """What an exception says."""

    failure_class: FailureClass
    confidence: float
    is_cascade: bool = False
    by_words: bool = False
    """By what its message complains of: its type, its place and all rules are silent."""


def read(traceback: Traceback) -> ExceptionReading:
    """The meaning of a rank's last exception."""
    if traceback.name == "KeyboardInterrupt" and traceback.causes:
        # Somebody lost patience with a run that had failed; what failed for good counts, not a look-up in vain.
        name, _, message = traceback.causes[-1].partition(": ")
        before = msgspec.structs.replace(traceback, exception=name, message=message, causes=traceback.causes[:-1])
        reading = read(before)
        if reading.confidence >= SURE and name.rsplit(".", 1)[-1] not in ("KeyError", "IndexError", "Empty"):
            return reading
    if _is_echo_of_parent(traceback):
        return ExceptionReading(failure_class=C.WORKER_CRASH, confidence=0.4, is_cascade=True)
    own = rules.default().scan_text([*traceback.causes, traceback.line])
    if traceback.name == FATAL and all(one.role == "symptom" for one in own):
        own = []  # the place of a crash says more than its signal
    serious = [one for one in own if one.confidence >= 0.5]
    causes = [one for one in serious if one.role not in ("cascade", "symptom")]
    if causes:
        failure_class, confidence = _in_place(max(causes, key=lambda one: one.confidence), traceback)
        return ExceptionReading(failure_class=failure_class, confidence=confidence)
    if serious:
        first = serious[0]
        return ExceptionReading(
            failure_class=first.failure_class, confidence=first.confidence, is_cascade=first.role == "cascade"
        )
    return _by_type(traceback)


def _is_echo_of_parent(traceback: Traceback) -> bool:
    """A child process could not read what its parent was about to send: the parent was interrupted, or had failed."""
    starting = any(frame.function in ("spawn_main", "_serve_one") for frame in traceback.frames)
    return starting and traceback.name in ("UnpicklingError", "EOFError", "FileNotFoundError", *_PIPES_GONE)


def _in_place(match: RuleMatch, traceback: Traceback) -> Guess:
    """What a rule says of an exception, given the code that raised it."""
    where = _where(traceback)
    failure_class = match.failure_class
    in_shared_memory = _FILES["shared_memory"].search(where.file) is not None
    shared = in_shared_memory and "'/" not in traceback.message.replace("'/dev/shm", "")
    if failure_class is C.DISK_FULL and (shared or _WORDS["shared_file"].search(traceback.message)):
        return C.SHM_EXHAUSTED, 0.85
    if match.rule == "unpickle" and not where.in_checkpoint:
        return (C.DATA_LOADING_ERROR, 0.65) if where.in_data else (failure_class, match.confidence)
    return failure_class, match.confidence


def _by_type(traceback: Traceback) -> ExceptionReading:
    where = _where(traceback)
    gone = _consequence(traceback, where)
    if gone is not None:
        return ExceptionReading(failure_class=gone[0], confidence=gone[1], is_cascade=True)
    (failure_class, confidence), by_words = _classify(traceback.exception, traceback.message, where)
    for cause in reversed(traceback.causes):
        # What wraps it is often a plain error: the exception before says more.
        name, _, message = cause.partition(": ")
        (before, certain), of_words = _classify(name, message, where)
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
            failure_class, confidence, by_words = before, certain - (0.0 if interrupted else 0.1), of_words
    return ExceptionReading(failure_class=failure_class, confidence=round(confidence, 3), by_words=by_words)


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


class _Typed(NamedTuple):
    """What an exception's type, place and fixed words tell."""

    guess: Guess
    vague: float | None = None
    """A guess that is no surer gives way to what the message complains of; None: no word of it counts."""


def _classify(exception: str, message: str, where: Where) -> tuple[Guess, bool]:
    """The guess, and whether it rests on what the message complains of, in words that no rule knows."""
    typed = _by_type_and_place(exception, message, where)
    if typed.vague is None:
        return typed.guess, False
    named = complaints.named(f"{exception}: {message}")
    if named is not None and (named is C.GPU_DRIVER or named not in _NOT_RAISED):
        return (named, NAMED_CONFIDENCE), True
    name = exception.partition("(")[0].rsplit(".", 1)[-1]
    told = _by_words(typed.guess, f"{_HUMPS.sub(' ', _KIND.sub('', name))}: {message}", typed.vague)
    return (typed.guess, False) if told is None else (told, True)


def _by_type_and_place(exception: str, message: str, where: Where) -> _Typed:
    name = exception.partition("(")[0].rsplit(".", 1)[-1]
    if name == FATAL:
        inside = is_library(where.file) and "ctypes" not in where.file
        return _Typed((C.FRAMEWORK_BUG, 0.65) if inside and message.startswith("Segm") else (C.WORKER_CRASH, 0.6))
    if name == "KeyboardInterrupt":
        return _Typed((C.PREEMPTED_OR_CANCELLED, 0.75))
    if name == CUT_OFF:
        return _Typed((C.DATA_LOADING_ERROR if where.in_data else C.SCRIPT_ERROR, 0.3))
    if name not in _PLAIN_BUGS and _WORDS["package"].search(message):
        return _Typed((C.DEPENDENCY_IMPORT_ERROR, 0.7))
    if name == "ParserError":  # of YAML, else of tables and dates
        of_yaml = exception.startswith("yaml")
        return _Typed((C.CONFIG_OR_ARGUMENT_ERROR, 0.8) if of_yaml else (C.DATA_LOADING_ERROR, 0.75))
    if name in _PLAIN_BUGS:
        return _Typed(_plain_bug(message))
    if name in _DECISIONS:
        return _Typed(_decide(_DECISIONS[name], message, where), VAGUE)
    if name in _BY_NAME:
        return _Typed(_BY_NAME[name], 0.0)
    top, _, rest = exception.rpartition(".")[0].partition(".")
    by_module = _BY_MODULE.get(top) or _BY_MODULE.get(f"{top}.{rest.partition('.')[0]}")
    if by_module is None:
        return _Typed(_decide(_DECISIONS["*"], message, where), VAGUE)
    # A compiler or a runtime repeats what went wrong beneath it.
    repeats = by_module[0] is C.FRAMEWORK_BUG and not message.startswith("INTERNAL")
    return _Typed(by_module, by_module[1] if repeats else 0.0)


def _by_words(guess: Guess, text: str, vague: float) -> Guess | None:
    """Where the type and the place say next to nothing: what the message complains of."""
    found = (one for one in complaints.readings(text) if one.confidence >= complaints.BY_WORDS)
    told = next((one for one in found if one.failure_class not in _NOT_RAISED), None)
    config = vague > 0.0 and guess[0] is C.CONFIG_OR_ARGUMENT_ERROR and guess[1] <= SOMETHING_IS_WRONG
    if told is None or not (guess[1] <= vague or (config and told.failure_class in _NO_ARGUMENTS)):
        return None
    return told.failure_class, told.confidence + 0.1


def _decide(rows: list[_Decision], message: str, where: Where) -> Guess:
    """The first row of which all conditions hold; the last row of each type has none."""
    return next(row.guess for row in rows if all(_holds(one, message, where) for one in row.conditions))


def _holds(condition: str, message: str, where: Where) -> bool:
    name = condition.removeprefix("not ")
    of_code = _CODE.get(name)
    found = of_code(where) if of_code is not None else _WORDS[name].search(message) is not None
    return found is (name == condition)


def _plain_bug(message: str) -> Guess:
    if _WORDS["library_lacks"].search(message):
        return C.DEPENDENCY_IMPORT_ERROR, 0.7
    return C.SCRIPT_ERROR, 0.85


def _where(traceback: Traceback) -> Where:
    return Where(frames=(*traceback.cause_frames, *traceback.frames), code=traceback.code)


LAST_LINES: Final = 6
"""Lines that are not empty, at the end of a log."""
FINALIZER_LINES: Final = 24
MAX_WORDS: Final = 1000
_MARK: Final = re.compile(
    r"^.{0,80}?(?:\b(?:FATAL|CRITICAL|PANIC|EMERG)\b"
    r"|(?<![\w.-])(?:ERROR|Error|error|fatal|panic|Fatal error)(?:\[\w+\])?[:\]|>)]"
    r"|\b(?:failed to|cannot|could not|unable to|refusing to)\b)"
)
_TROUBLE: Final = re.compile(r"fail|error|warn|unable|cannot|could not|invalid|lost|timed? ?out|exceed", re.IGNORECASE)
_LEVEL: Final = re.compile(
    r"\*ERROR\*|<ERROR>|\[[EXF]\]|^[EF]\d{4} |(?<!\w)ERR(?!\w)"
    r"|\b(?:CommandException|\w{2,60}(?:Error|Exception|Failure))\b: "
)
"""More marks of an error, at any place."""
_HARMLESS: Final = re.compile(
    r"retry|ignor|skip|fall(?:ing)?[ -]?back|warn|deprecat|will be|using default|\bINFO\b|\bDEBUG\b|loss|accuracy"
    r"|epoch|\b(?:failed|error)[,;] (?:using|trying)\b|not (?:an )?error|no error|0 errors|register|factory",
    re.IGNORECASE,
)
_DEALT_WITH: Final = re.compile(
    r"retry|ignor|skip|fall(?:ing)?[ -]?back|deprecat|using default|\bINFO\b|\bDEBUG\b|succe(?:ss|ed)|recovered"
    r"|\b(?:no|0|zero|without|not an|isn't an?)\s+(?:\w+\s+){0,2}(?:errors?|failures?|nans?|issues?|faults?)\b"
    r"|\b(?:if|unless|whether|in case|to avoid|to prevent)\b",
    re.IGNORECASE,
)
"""A name of an error in a line that tells of none."""
_GIVES_UP: Final = re.compile(
    r"max(?:imum)?[ _]?retries|giv(?:ing|es?|en) up|(?:after|exceeded|reached) .{0,30}\b(?:retries|attempts|tries)"
    r"|retries? .{0,12}(?:exceeded|exhausted|failed)",
    re.IGNORECASE,
)
_STOPPED: Final = re.compile(
    r"timed[- ]?out|timeout after|\b(?:hung|stuck|unreachable|unavailable|lost|refused|mismatch|truncated|damaged"
    r"|denied|died|incompatible|(?:do|does|did) not (?:match|complete|find|answer)|gave up|err-?disabled|flap\w*"
    r"|throttl(?:ed|ing)|asserted|enforced|killed|expired|exhausted|stalled|cancell?ed|disagree|malformed|diverged"
    r"|(?:being|was|were|been) (?:preempted|reclaimed|evicted|deleted|revoked))\b"
    r"|\b(?:deleted|aborted|stopped) (?:by|via)\b",
    re.IGNORECASE,
)
"""Words of trouble for a line that has a subject of its own."""
_LACKS: Final = re.compile(
    r"\b(?:do|does|did|could|can|is|are) ?not (?!an\b)|there is no\b|no (?=package|connection|route)", re.I
)
"""Something is not as it should be: no sign that all is well."""
_OPTIONAL: Final = (C.DEPENDENCY_IMPORT_ERROR, C.DNS_OR_CONNECT, C.PERMISSION_OR_AUTH)
"""A program often goes on without what these are about."""
_UNRESOLVED: Final = re.compile(
    r"name resolution|name or service not known|(?:could not|cannot|failed to|unable to) resolve|getaddrinfo|"
    r"network is unreachable|no route to host",
    re.IGNORECASE,
)
_UNREACHED: Final = re.compile(
    r"Max retries exceeded with url|NewConnectionError|ConnectTimeout|ReadTimeoutError|getaddrinfo"
)
_TRIES_AGAIN: Final = re.compile(r"\bRetry(?:ing)?\b.{0,60}\b\d", re.IGNORECASE)
"""Nobody is there, and the log ends while it is tried again."""
_ANSWERS_LATE: Final = re.compile(
    r"^(?!.*(?:Max retries exceeded|NewConnectionError|ConnectTimeout)).*ReadTimeoutError"
)
"""Somebody is there, and may still answer."""
_TRIES_LEFT: Final = re.compile(
    r"\b(?:total|retries_left|remaining|left)[=: ]{1,3}(?P<left>\d{1,6})"
    r"|\b(?P<left2>\d{1,6}) (?:more )?(?:retries|tries|attempts) (?:left|remain)"
    r"|\b(?:retry|attempt|try)\W{1,2}(?P<done>\d{1,6}) ?(?:/|of) ?(?P<of>\d{1,6})",
    re.IGNORECASE,
)
"""Of what is tried again: how often yet."""
_IGNORED: Final = re.compile(
    r"Exception ignored in|Error in (?:atexit|sys\.excepthook|sitecustomize)|Exception in thread (?!MainThread)"
)
_ASLEEP: Final = re.compile(r"\b__schedule\+0x[0-9a-f]{1,6}")
"""The top of the kernel's stack of a task that sleeps; the kernel writes it of those that sleep for too long."""
_SLEEPER: Final = re.compile(
    r"\b(?:io_schedule|rwsem_down|__mutex_lock|wait_on_page|rpc_wait|nfs|lustre|cl_sync|blk_)\w*"
)
_EXCEPTION_LINE: Final = re.compile(
    r"^((?:[a-z_]\w{0,40}\.){0,6}[A-Z]\w{1,60}(?:Error|Exception|Timeout)|[a-z_]\w{1,20}\.error): (\S.{2,})$"
    r"|^((?:[a-z_]\w{0,40}\.){1,6}[A-Z]\w{3,60})(?:: (\S.{2,}))?$"
)
_CAUGHT: Final = re.compile(r"retry|ignor|skip|fall(?:ing)?[ -]?back|will be|using default|caught|continu", re.I)
_ABOUT: Final = tuple(
    (FailureClass(row["class"]), re.compile(row["regex"])) for row in load("diagnosis", "exceptions.toml")["about"]
)
"""The first that fits: what is told in few words comes before what many errors say."""


_DOUBT: Final = re.compile(
    r"\b(?:FATAL|CRITICAL|PANIC|ERROR|UNHEALTHY|FAIL(?:ED|URE)?|[Ff]atal|[Ff]ail(?:ed|ure|ing|s)?|[Uu]nhealthy|[Ee]rror"
    r"|exceed(?:ed|s)|abort(?:ed|ing)?|[Dd]efunct|[Cc]rash(?:ed)?|[Uu]nrecoverable|[Uu]ncorrectable|wrong type"
    r"|[Cc]orrupt(?:ed|ion)?|[Ii]nvalid)\b"
    r"|\b(?:rc|[Rr]eturn ?code|exit(?: ?code|ed with(?: code)?)?|status|code)\s{0,2}[=: ]\s{0,2}-?[1-9]\d{0,2}\s*$"
)
"""Words of trouble that no rule knows, and a code that is not 0 at the end of a line."""
_NO_DOUBT: Final = re.compile(
    r"\b(?:retry\w*|ignor\w+|skip\w*|fall(?:ing)? ?back|deprecat\w+|warn\w*|accuracy|loss|perplexity)\b"
    r"|\b(?:errors?|fail(?:ed|ures?)?|corrected|uncorrectable|invalid)\w{0,12}(?: \w{1,12}){0,2}"
    r"\s{0,40}[=:]\s{0,2}(?:0|none|false|null|no)\b"
    r"|\bINFO\b|\bDEBUG\b|^I \w[\w/.-]{3,200}:\d{1,6}\] |\bbusbw\b|NOT been destroyed"
    r"|fail[- ]?(?:over|fast|safe)|error[_ ](?:rate|bars?|handl\w+|feedback|analysis)"
    r"|\b(?:failed|error)[,;] (?:using|trying)\b"
    r"|\s:\s(?:n/?a|none|no|not active|not supported|0|[\d.]{1,12} ?(?:w|c|mhz|[kmg]i?b(?:/s)?|%|x))\s*$",
    re.IGNORECASE,
)


_NEGATED: Final = re.compile(r"(?i)\b(?:no|not|(?<![.\d-])(?<!\d:)0(?![.:])|zero|without|any|if)\b[^.;:]{0,80}$")
"""Before a word of trouble: there is none."""


def _sounds(text: str, *words: re.Pattern[str]) -> bool:
    """A word of trouble that is not said to be absent."""
    if _NO_DOUBT.search(text) is not None:
        return False
    text = complaints.without_zeros(text)
    told = (match.start() for one in words for match in one.finditer(text))
    return any(_NEGATED.search(text[:start]) is None for start in told)


def trouble(lines: Sequence[str], *, of_kernel: bool = False) -> int | None:
    """The first of these lines that sounds of trouble, though no rule knows it; None: there is none.

    The kernel tells of much that stops and goes on: fewer words count there.
    """
    words = (_DOUBT,) if of_kernel else (_DOUBT, _STOPPED)
    said = (split_prefix(line[:1000])[1] for line in lines)
    is_noise = rules.default().is_noise
    return next(
        (at for at, text in enumerate(said) if _sounds(text, *words) and not is_noise(text.encode(errors="replace"))),
        None,
    )


def complains(line: str) -> bool:
    """A reader of a log's end may take this line for a complaint."""
    text = split_prefix(line[:1000])[1].strip()
    marks = (_DOUBT, _MARK, _TROUBLE, _UNRESOLVED, _UNREACHED, _EXCEPTION_LINE)
    return any(mark.search(text) is not None for mark in marks)


def about(text: str) -> tuple[FailureClass, ...]:
    """What a line may be about by its words, the most telling first."""
    return tuple(failure_class for failure_class, words in _ABOUT if words.search(text[:1000]))


def clues(lines: Sequence[str]) -> Counter[FailureClass]:
    """How often lines that sound of trouble, though none tells of a failure, are about a class."""
    troubled = (line for line in lines if _TROUBLE.search(line[:1000]) is not None)
    return Counter(one for line in troubled for one in about(line)[:2])


class LastWords(NamedTuple):
    """A reading of a log's end."""

    failure_class: FailureClass
    text: str
    line: int
    """Position among the lines given."""
    confidence: float = 0.4
    is_asleep: bool = False


def last_words(lines: Sequence[str], tiers: int = 3, known: Collection[str] = ()) -> LastWords | None:
    """What the end of a log complains of.

    `tiers`: 1: only names of errors with a fixed meaning count; 2: words of a line that calls itself an error, too.
    `known`: lines that others have read.
    """
    last = [index for index, line in enumerate(lines) if line.strip()][-LAST_LINES:]
    unresolved = [index for index in last if _UNRESOLVED.search(lines[index])]
    if len(unresolved) > 1 and unresolved[-1] == last[-1]:
        return LastWords(FailureClass.DNS_OR_CONNECT, split_prefix(lines[last[-1]])[1].strip(), last[-1])
    tried = [index for index in last if _UNREACHED.search(lines[index])]
    tries_again = bool(tried) and _TRIES_AGAIN.search(lines[last[-1]]) is not None
    if tries_again and not (_tries_left(lines[last[-1]]) and all(_ANSWERS_LATE.search(lines[one]) for one in tried)):
        return LastWords(FailureClass.DNS_OR_CONNECT, split_prefix(lines[tried[-1]])[1].strip(), tried[-1])
    said = [split_prefix(line)[1].strip() for line in lines]
    ignored = [index for index, line in enumerate(lines) if _IGNORED.search(line)]
    new = (
        index
        for index, text in enumerate(said)
        if text not in known and not any(0 <= index - one < FINALIZER_LINES for one in ignored)
    )
    told = ((one[0], index, one[1]) for index in new if (one := _complaint(said[index], index in last)) is not None)
    tier, index, reading = min(told, default=(tiers, 0, None))
    if reading is None or tier >= tiers:
        return _last_word(lines) if tiers > 1 else None
    return LastWords(reading.failure_class, said[index], index, reading.confidence)


_INTERRUPTED: Final = re.compile(
    r"^\^[CZ]|\bkeyboard ?interrupt(?:s|ed|ion)?\b|\bSIGINT\b|\bctrl ?[+-] ?c\b"
    r"|\b(?:signal|sig)[ :=]{0,3}(?:2|15)\b(?![.\d])(?!\s?(?:dB|%|of \d|m?V\b))"
    r"|\b(?:got|caught|received|receives|on) (?:a )?SIGTERM\b"
    r"|\b(?:interrupt(?:ed)?|abort(?:ed)?|cancell?ed|stopped|killed|terminated|halted|ended)\b.{0,20}"
    r"\bby (?:(?:the |an )?(?:user|operator|person|admin\w*|hand)|SIG(?:TERM|INT|HUP))\b"
    r"|\b(?:user|manual)(?:ly)?[- ](?:interrupt|abort|cancel|stop)\w*"
    r"|\binterrupted (?:manually|from(?! compil))\b|\binterrupt (?:was |is )?(?:received|caught|detected|signal)\b"
    r"|\b(?:got|caught|received|on) (?:an? )?interrupt\b"
    r"|^(?:\S{1,40}[:\]] ?)?interrupted\b[.!, ]{0,2}(?:exiting|stopping|saving|leaving|shutting|cleaning|$)"
    r"|\b(?:run|study|training|trial|search|sweep|tuning|job|session)\b (?:was |is |has been )?interrupted\b",
    re.IGNORECASE,
)
"""Somebody stopped it, as programs say it of themselves."""
_HOW_TO: Final = re.compile(
    r"\b(?:press|hit|use|type|send|to (?:stop|quit|exit|abort|cancel|interrupt)|you (?:can|may)|will|would|handlers?"
    r"|(?:stop|quit|exit|abort|cancel|interrupt|end)(?: \w{1,12}){0,3} (?:with|by|using|via)"
    r"|install\w*|register\w*|ignor\w+|if|when|whether|on_\w+|except|unless|catch(?:es|ing)?)\b(?! (?:be|have) )",
    re.IGNORECASE,
)
"""What tells of an interrupt that may come."""
_OF_INTERRUPTS: Final = re.compile(
    r"^[\]) ]{0,3}(?:to|will|is used|(?:/ ?)?(?:SIG\w{3,5} )?(?:hand(?:ler|ling)|hook|trap|callback)s?)\b"
    r"|^(?:s? \w{1,12})?s? (?:(?:is|are|was|were) )?"
    r"(?:ignored|disabled|enabled|allowed|blocked|masked|restored|installed|removed|registered|active)\b"
    r"|^(?: \w{1,16}){0,2}s?['\"]?\s{0,3}[:=]\s{0,3}(?:0|no|none|false)\b",
    re.IGNORECASE,
)
"""Behind the word: it is of interrupts, or counts that there was none."""


def _was_interrupted(text: str) -> bool:
    found = _INTERRUPTED.search(text)
    if found is None or _HOW_TO.search(text[: found.end()]) or _NEGATED.search(text[: found.start()]):
        return False
    return _OF_INTERRUPTS.search(text[found.end() :]) is None


def _complaint(text: str, is_last: bool) -> tuple[int, complaints.Complaint] | None:
    """What a line complains of, and how telling that is: a name (0), words of an error (1), other words (2)."""
    text = text[:MAX_WORDS]
    if is_last and _was_interrupted(text):
        return 1, complaints.Complaint(C.PREEMPTED_OR_CANCELLED, complaints.BY_NAME)
    gives_up = _GIVES_UP.search(text) is not None
    line = text.encode(errors="replace")
    if not text or rules.default().is_noise(line) or (rules.is_mere_warning(line) and not gives_up):
        return None
    found = complaints.readings(text)
    marked = _MARK.search(text[:300]) is not None or _LEVEL.search(text) is not None
    named = found[0] if found and found[0].by_name and (gives_up or _DEALT_WITH.search(text) is None) else None
    if named is not None and (named.failure_class not in _OPTIONAL or (marked and is_last)):
        return 0, named
    of_words = next((one for one in found if not one.by_name), None)
    if of_words is None or (_HARMLESS.search(text) is not None and not gives_up):
        return None
    by_words = of_words.confidence >= complaints.BY_WORDS
    if marked:
        return (1, of_words) if by_words or is_last else None
    sounds = gives_up or _sounds(_LACKS.sub("", text), _DOUBT, _STOPPED)
    return (2, of_words) if sounds and is_last and by_words and of_words.failure_class not in _OPTIONAL else None


_KILLED: Final = re.compile(
    r"^(?:\w{1,12}: )?(?:killed|segmentation fault|bus error|aborted|crashed)(?:  +\S.{0,200}|[.!]?)$"
    r"|\b(?:rc|return(?:ed|code)?|exit(?:ed|code)?|terminated)\b(?: (?:code|status|value|with|non-?zero)){0,3}"
    r"\s?[:=]?\s?(?:-(?:4|6|7|8|9|11)|13[1-9])\.?$"
    r"|\b(?:rc ?=|(?:return|exit|exited|terminated)(?: with)?(?: non-?zero)? (?:code|status)|exited)"
    r"[ :=]{0,3}[1-9]\d?\.?$"
    r"|^make: \*\*\* .{1,200} Error [1-9]\d{0,2}$",
    re.IGNORECASE,
)
_ASKED_TO_END: Final = re.compile(
    r"^(?:\^[CZ]|Aborted!|hangup|terminated|interrupted?|(?:\w{1,12}: )(?:hangup|terminated|interrupt)\b.{0,200})$"
    r"|\b(?:rc|return(?:ed|code)?|exit(?:ed|code)?|terminated)\b(?: (?:code|status|value|with)){0,3}"
    r"\s?[:=]?\s?(?:-(?:1|2|15)|129|130|143)\.?$",
    re.IGNORECASE,
)
"""The last word of a shell or a launcher, or the number with which it says that a process ended."""
_OF_SHELL: Final = re.compile(
    r"^(?:\[\d{1,4}\]\s{0,3}[+-]?\s{1,4}(?:\d{1,9} )?|(?:zsh|fish|bash|ksh|sh): )"
    r"(?:(?P<asked>stopped|suspended|terminated|hangup|interrupt)"
    r"|(?P<ended>killed|exit:? [1-9]\d{0,2}|segmentation fault|aborted|bus error|illegal instruction"
    r"|floating point exception|broken pipe))\b",
    re.IGNORECASE,
)
"""How a shell tells what became of a job: `[1]+  Stopped   python train.py`."""
_PROMPT: Final = re.compile(r"^\S{0,80}[$#%>]\s*$")


def _last_word(lines: Sequence[str]) -> LastWords | None:
    """How the process ended, where the last line alone tells."""
    said = (
        index for index in range(len(lines) - 1, -1, -1) if lines[index].strip() and not _PROMPT.match(lines[index])
    )
    last = next(said, None)
    text = "" if last is None else split_prefix(lines[last])[1].strip()[:MAX_WORDS]
    job = None if last is None else _OF_SHELL.match(lines[last].strip()[:MAX_WORDS])
    asked = _ASKED_TO_END.search(text) is not None or (job is not None and job["asked"] is not None)
    if last is None or not (asked or job is not None or _KILLED.search(text)):
        return None
    return LastWords(C.PREEMPTED_OR_CANCELLED if asked else C.WORKER_CRASH, text, last, 0.5)


def _tries_left(line: str) -> int:
    """How often it will be tried once more; 0 where that is not said."""
    said = _TRIES_LEFT.search(line)
    if said is None:
        return 0
    if said["done"] is not None:
        return max(int(said["of"]) - int(said["done"]), 0)
    return int(said["left"] or said["left2"])


def last_exception(lines: Sequence[str], among: int = 1) -> LastWords | None:
    """The exception with which a log ends whose traceback is not there, among so many last lines with words."""
    last = [index for index, line in enumerate(lines) if line.strip()][-among:]
    for index in reversed(last):
        text = split_prefix(lines[index])[1].strip()
        match = _EXCEPTION_LINE.match(text)
        name, message = (match[1] or match[3], match[2] or match[4] or "") if match is not None else ("", "")
        if not name or _CAUGHT.search(message) is not None:
            continue
        if any(_IGNORED.search(line) for line in lines[max(0, index - FINALIZER_LINES) : index]):
            return None
        reading = read(Traceback(exception=name, message=message))
        if match is not None and match[3] is not None and reading.failure_class is C.SCRIPT_ERROR:
            continue  # a name with dots and a capital may be anything
        sure = min(reading.confidence, complaints.BY_NAME)
        return None if reading.is_cascade else LastWords(reading.failure_class, text, index, sure)
    return None


def last_sleeper(lines: Sequence[str]) -> LastWords | None:
    """A stack of a task in uninterruptible sleep whose headline is not there."""
    start = next((index for index, line in enumerate(lines) if _ASLEEP.search(line)), None)
    if start is None or not any(_SLEEPER.search(line) for line in lines[start : start + 2 * LAST_LINES]):
        return None
    head = next((index for index in range(start, max(start - LAST_LINES, -1), -1) if " state:D" in lines[index]), start)
    return LastWords(FailureClass.KERNEL_FAULT, lines[head].strip(), head, is_asleep=True)
