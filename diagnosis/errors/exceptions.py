"""What a Python exception means: by its words (rules), its type, and the code it came through.

The words come first, because libraries say what is wrong in much the same words whatever the type. Without such words
the place decides: input pipeline, checkpoint, configuration; and only then the type.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from diagnosis import rules
from diagnosis.errors.blocks import FATAL
from diagnosis.errors.places import Where
from diagnosis.errors.tracebacks import CUT_OFF, Traceback
from diagnosis.rules import RuleMatch
from diagnosis.signals import Frozen
from diagnosis.stacks import is_library
from diagnosis.taxonomy import FailureClass

C = FailureClass
Guess = tuple[FailureClass, float]

SURE: Final = 0.75

_CONFIG_FILE: Final = re.compile(
    r"\.(?:ya?ml|toml|cfg|ini|conf|gin)\b|config|\bcfg|hparams|deepspeed|ds_\w*\.json|\.py\b"
)
_CHECKPOINT_FILE: Final = re.compile(
    r"checkpoint|ckpt|\.(?:pt|pth|safetensors|distcp|ckpt|msgpack)\b|pretrained|weights|_model\w*\.bin|global_step",
    re.IGNORECASE,
)
_OUTPUT_FILE: Final = re.compile(r"(?:^|[/'\"_])(?:logs?|outputs?|results?|runs?|save[ds]?|tensorboard)[/'\"_]")
_VARIABLE: Final = re.compile(r"^['\"](?:[A-Z][A-Z0-9]*_[A-Z0-9_]+|RANK|HOME|USER|HOSTNAME)['\"]$")

_SAVED: Final = re.compile(
    r"""['"](?:optimizers?|(?:model_|optimizer_)?state_dict|param_groups|lr_schedulers?|global_step|ema|"""
    r"""(?:param 'initial_lr' is not|Trying to restore) .{1,200})['"]$"""
)
"""What checkpoints have in them."""

_BUG_WORDS: Final = re.compile(
    r"values to unpack|could not be broadcast|could not convert string|invalid literal for|not aligned|"
    r"setting an array element|is not in list|substring not found|truth value of|closed file|"
    r"size must be the same|input batch_size|inconsistent numbers|has not been initialized|shape mismatch|"
    r"cannot reshape|"
    r"shapes? .{1,60}(?:mismatch|do not match|must match|cannot be multiplied)|zero-size array|math domain|"
    r"format (?:character|specifier)|size of tensor|(?:input|output|tensor)s? (?:shape|dim|size)|"
    r"one element tensors|must match exactly|non-leaf|empty parameter list",
    re.IGNORECASE,
)
_ARGUMENT_WORDS: Final = re.compile(
    r"\b(?:must|should|invalid|unsupported|not supported|unrecognized|expected|argument|option|config\w*|"
    r"cannot be used|divisible|block.?size|already exists|unknown|cannot forward|only supports?|requires?|"
    r"specif(?:y|ied)|please|is not (?:available|allowed|a valid)|not in \[|choose|one of|mutually exclusive|"
    r"incompatible|larger than|less than|greater than|too (?:small|large|long)|not found|not implemented for|"
    r"set to|mismatch|does not match|!=)",
    re.IGNORECASE,
)
_STRONG_ARGUMENT_WORDS: Final = re.compile(
    r"is not supported|unsupported|not a valid|invalid (?:value|argument|choice|option)|must be (?:set|"
    r"specified|one of)|please (?:set|specify|use|provide)|unknown (?:option|model|arch\w*|optimizer|"
    r"scheduler|dataset)|cannot be used (?:with|together)|only supports?\b",
    re.IGNORECASE,
)
_PACKAGE_WORDS: Final = re.compile(
    r"pip3? install|find a working|conda install|(?:is|are) not installed|please (?:re)?install|need to (?:re)?install|"
    r"not compiled with|requires? (?:the )?[\w-]+ ?(?:>=|==|version|library|package)|incompatible (?:version|"
    r"with (?:torch|numpy|transformers))|upgrade (?:to|your|the)|version .{1,40}(?:is required|or (?:higher|"
    r"later|newer))",
    re.IGNORECASE,
)
_LIBRARY_LACKS: Final = re.compile(
    r"module '(?:torch\w*|numpy|transformers|tensorflow|keras|jax\w*|scipy|PIL|deepspeed|apex|flash_attn|"
    r"triton|datasets|accelerate|peft|trl|diffusers|pandas|sklearn|bitsandbytes|xformers|lightning|"
    r"pytorch_lightning|wandb|collections|inspect|importlib|pkgutil|distutils|setuptools|typing|ssl|time|yaml|"
    r"cv2|matplotlib|networkx|dgl|megatron)\b[\w.]*' has no attribute"
)
_COMPILERS: Final = re.compile(r"\b(?:nvcc|ninja|gcc|g\+\+|cc1plus|c\+\+|x86_64-\S+-gcc|make|cmake|pip|setup\.py)\b")
_SHARED_MEMORY: Final = re.compile(r"multiprocessing/(?:heap|shared_memory|synchronize|reductions)\.py$")
_SHARED_FILE: Final = re.compile(r"</?torch_\d+_\d+_\d+>")
"""How torch calls the tensors that its processes share."""
_COMPILER_FILE: Final = re.compile(r"-packages/(?:triton|torch/_(?:inductor|dynamo|functorch))/")
_CLOSING: Final = re.compile(
    r"interpreter shutdown|(?:handle|queue|loop|pool) (?:is )?(?:closed|not running)|new futures after", re.IGNORECASE
)
"""What helpers say when the process ends around them."""
_MULTIPROCESSING: Final = re.compile(r"multiprocessing/|concurrent/futures/|torch/multiprocessing/")

_BY_MODULE: Final[tuple[tuple[str, Guess], ...]] = (
    ("requests urllib3 urllib aiohttp httpx httpcore http huggingface_hub wandb ssl", (C.DNS_OR_CONNECT, 0.65)),
    (
        (
            "pyarrow PIL h5py lmdb datasets pandas soundfile webdataset cv2 decord av librosa tarfile gzip zlib "
            "csv tokenizers"
        ),
        (C.DATA_LOADING_ERROR, 0.7),
    ),
    ("omegaconf hydra pydantic pydantic_core argparse click tyro absl yaml", (C.CONFIG_OR_ARGUMENT_ERROR, 0.8)),
    ("triton jaxlib torch._inductor torch._dynamo", (C.FRAMEWORK_BUG, 0.65)),
)
"""By the module in which its type is defined, where the type says nothing."""
_MODULES: Final = {module: guess for modules, guess in _BY_MODULE for module in modules.split()}
_BY_NAME: Final[dict[str, Guess]] = {
    **dict.fromkeys(
        "ArgumentError ValidationError ConfigAttributeError ConfigKeyError MissingMandatoryValue UsageError YAMLError "
        "ScannerError ConstructorError DeepSpeedConfigError MisconfigurationException".split(),
        (C.CONFIG_OR_ARGUMENT_ERROR, 0.85),
    ),
    **dict.fromkeys(
        "ConnectionError ConnectionRefusedError HTTPError gaierror URLError ConnectTimeout CommError SSLError "
        "HfHubHTTPError TimeoutError ReadTimeout".split(),
        (C.DNS_OR_CONNECT, 0.65),
    ),
    **dict.fromkeys(
        "BadGzipFile ArrowInvalid EmptyDataError UnidentifiedImageError LibsndfileError DECORDError "
        "DecompressionBombError DatasetNotFoundError DatasetGenerationError ReadError".split(),
        (C.DATA_LOADING_ERROR, 0.75),
    ),
    **dict.fromkeys("ConnectionResetError ConnectionAbortedError".split(), (C.DNS_OR_CONNECT, 0.5)),
    "FileExistsError": (C.CONFIG_OR_ARGUMENT_ERROR, 0.6),
    "FloatingPointError": (C.LOSS_SPIKE_OR_NAN, 0.75),
    "PermissionError": (C.PERMISSION_OR_AUTH, 0.85),
    "MemoryError": (C.HOST_OOM, 0.85),
    "ModuleNotFoundError": (C.DEPENDENCY_IMPORT_ERROR, 0.9),
    "ImportError": (C.DEPENDENCY_IMPORT_ERROR, 0.88),
    **dict.fromkeys(
        "BrokenProcessPool ActorDiedError ActorUnavailableError WorkerCrashedError RayActorError NodeDiedError".split(),
        (C.WORKER_CRASH, 0.5),
    ),
    "CancelledError": (C.WORKER_CRASH, 0.3),
    **dict.fromkeys("Unsupported TorchRuntimeError UserError".split(), (C.SCRIPT_ERROR, 0.55)),
}
_PLAIN_BUGS: Final = frozenset(
    "AttributeError TypeError NameError SyntaxError IndentationError TabError ZeroDivisionError UnboundLocalError "
    "RecursionError ArithmeticError OverflowError".split()
)
_PEERS_GONE: Final = frozenset("DistBackendError DistNetworkError DistStoreError DistError".split())
_PIPES_GONE: Final = frozenset("BrokenPipeError ConnectionResetError ConnectionAbortedError EOFError".split())


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
    in_shared_memory = _SHARED_MEMORY.search(where.file) is not None
    shared = in_shared_memory and "'/" not in traceback.message.replace("'/dev/shm", "")
    if failure_class is C.DISK_FULL and (shared or _SHARED_FILE.search(traceback.message)):
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
    inside = any(_MULTIPROCESSING.search(one.file) for one in where.frames[-3:])
    if (traceback.name in _PIPES_GONE and inside) or _CLOSING.search(traceback.message):
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
    if name not in _PLAIN_BUGS and _PACKAGE_WORDS.search(message):
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
    by_module = _MODULES.get(top) or _MODULES.get(f"{top}.{rest.partition('.')[0]}")
    return by_module or _by_place(message, where) or (C.SCRIPT_ERROR, 0.5)


def _plain_bug(message: str) -> Guess:
    if _LIBRARY_LACKS.search(message):
        return C.DEPENDENCY_IMPORT_ERROR, 0.7
    return C.SCRIPT_ERROR, 0.85


def _by_place(message: str, where: Where) -> Guess | None:
    if where.in_data:
        return C.DATA_LOADING_ERROR, 0.6
    if where.in_config:
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.7
    if _STRONG_ARGUMENT_WORDS.search(message):
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.6
    return None


def _value(message: str, where: Where) -> Guess:
    """ValueError and AssertionError: what the code was given, unless it is about shapes and the like."""
    if where.in_config:
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.75
    if where.in_data:
        return C.DATA_LOADING_ERROR, 0.6
    if _BUG_WORDS.search(message):
        return C.SCRIPT_ERROR, 0.7
    if _ARGUMENT_WORDS.search(message):
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.65
    return C.CONFIG_OR_ARGUMENT_ERROR, 0.5


def _runtime(message: str, where: Where) -> Guess:
    if _COMPILER_FILE.search(where.file):
        return C.FRAMEWORK_BUG, 0.6
    if _BUG_WORDS.search(message):
        return C.SCRIPT_ERROR, 0.8
    return _by_place(message, where) or (C.SCRIPT_ERROR, 0.65)


def _key(message: str, where: Where) -> Guess:
    if _VARIABLE.match(message.strip()) and where.file.endswith("os.py"):
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.8
    if where.in_data:
        return C.DATA_LOADING_ERROR, 0.6
    if where.in_config:
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.65
    if where.near(2).in_checkpoint or _SAVED.match(message):
        return C.CHECKPOINT_CORRUPT_OR_MISMATCH, 0.6
    return C.SCRIPT_ERROR, 0.8


def _index(_: str, where: Where) -> Guess:
    return (C.DATA_LOADING_ERROR, 0.6) if where.in_data else (C.SCRIPT_ERROR, 0.8)


def _missing_file(message: str, where: Where) -> Guess:
    if any(frame.file.endswith("subprocess.py") for frame in where.frames):
        return C.DEPENDENCY_IMPORT_ERROR, 0.65
    if (_CHECKPOINT_FILE.search(message) or where.in_checkpoint) and not where.near(3).in_data:
        return C.CHECKPOINT_CORRUPT_OR_MISMATCH, 0.65
    if _CONFIG_FILE.search(message) or (where.in_config and not where.in_data):
        return C.CONFIG_OR_ARGUMENT_ERROR, 0.65
    if _OUTPUT_FILE.search(message) and not where.in_data:
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
    if _COMPILERS.search(message[:300]):
        return C.DEPENDENCY_IMPORT_ERROR, 0.65
    return C.WORKER_CRASH, 0.4


def _exit(message: str, _: Where) -> Guess:
    return (C.CONFIG_OR_ARGUMENT_ERROR, 0.6) if message.strip() == "2" else (C.WORKER_CRASH, 0.3)


def _not_implemented(message: str, where: Where) -> Guess:
    if where.in_config or _ARGUMENT_WORDS.search(message):
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
