"""What a user's command means, and the torchrun arguments we run in its place. Pure; torch is not imported.

torchrun's own command line is read with its rules (both spellings, `=`, abbreviations, `PET_*` variables). Options that
say how nodes find each other are ours to answer and are dropped; everything else is passed on as it stands.
docs/torchrun.md has the whole table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from supervisor.errors import LaunchRefused
from supervisor.run.other_launchers import ACCELERATE, DEEPSPEED, advice

RESTARTS_OUT_OF_THE_WAY = "1000000"
"""torchrun's own budget: the controller's budgets decide."""

MONITOR_INTERVAL_S = "0.01"
"""Costs nothing: the launcher is blocked in `num_nodes_waiting` while workers run."""


Treatment = Literal["kept", "budget", "ours", "rendezvous", "silent"]
"""`kept`: passed on. `budget`, `ours`: read and replaced. `rendezvous`: dropped, and said. `silent`: dropped."""


@dataclass(frozen=True)
class Option:
    """One option of torchrun."""

    name: str
    """As torchrun's help spells it, `--nproc-per-node`."""
    treatment: Treatment = "kept"
    flag: bool = False
    short: str = ""
    in_environment: bool = True
    """Whether `PET_NAME` gives its default."""

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        both = dict.fromkeys([self.name, "--" + self.key])
        return (*both, self.short) if self.short else tuple(both)


OPTIONS = (
    Option("--nnodes"),
    Option("--nproc-per-node"),
    Option("--rdzv-backend", "silent"),
    Option("--rdzv-endpoint", "rendezvous"),
    Option("--rdzv-id", "ours"),
    Option("--rdzv-conf", "rendezvous"),
    Option("--standalone", "silent", flag=True),
    Option("--max-restarts", "budget"),
    Option("--monitor-interval", "silent"),
    Option("--start-method"),
    Option("--event-log-handler"),
    Option("--role"),
    Option("--module", flag=True, short="-m"),
    Option("--no-python", flag=True),
    Option("--run-path", "silent", flag=True),
    Option("--log-dir"),
    Option("--redirects", short="-r"),
    Option("--tee", short="-t"),
    Option("--local-ranks-filter"),
    Option("--duplicate-stdout-filters"),
    Option("--duplicate-stderr-filters"),
    Option("--node-rank", "ours"),
    Option("--master-addr", "rendezvous"),
    Option("--master-port", "rendezvous"),
    Option("--local-addr"),
    Option("--logs-specs", "ours", in_environment=False),
    Option("--numa-binding", in_environment=False),
    Option("--signals-to-handle"),
    Option("--shutdown-timeout"),
    Option("--virtual-local-rank", flag=True),
    Option("--help", flag=True, short="-h", in_environment=False),
)
_BY_SPELLING = {spelling: option for option in OPTIONS for spelling in option.spellings}
_NEGATIVE_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")


@dataclass(frozen=True)
class TorchrunCommand:
    """A user's command, understood."""

    program: str
    """The word that names the training environment: `torchrun`, or a Python."""
    program_is_python: bool
    kept: tuple[str, ...]
    """torchrun options that are passed on."""
    script: str
    script_args: tuple[str, ...] = ()
    kind: Literal["script", "module", "program"] = "script"
    nodes_min: int = 1
    nodes_max: int = 1
    nproc_per_node: str = "1"
    """A number, or `auto`, `cpu`, `gpu`, `xpu`, ..."""
    max_restarts: int | None = None
    """The user's restart budget; None: not given."""
    node_rank: int | None = None
    run_id: str = ""
    """The user's `--rdzv-id`."""
    logs_specs: str = "unbroken"
    wants_help: bool = False
    has_unknown_options: bool = False
    """What `script` and `script_args` are is then a guess."""
    notices: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that take `PET_*` defaults back which would undo our options."""

    def launcher_argv(self, run_id: str) -> tuple[str, ...]:
        """torchrun's arguments. Ours come first, so that an option unknown to us cannot swallow one of them."""
        ours = {
            "--rdzv-backend": "unbroken",
            "--rdzv-endpoint": "localhost:0",  # not used; without it torchrun prints a warning that misleads
            "--rdzv-id": self.run_id or run_id,
            "--max-restarts": RESTARTS_OUT_OF_THE_WAY,
            "--monitor-interval": MONITOR_INTERVAL_S,
            "--logs-specs": self.logs_specs,
        }
        flat = [word for pair in ours.items() for word in pair]
        return (*flat, *self.kept, self.script, *self.script_args)

    @property
    def label(self) -> str:
        """A short name for the job, from the script's."""
        if self.kind == "module":
            parts = [part for part in self.script.split(".") if part not in {"__main__", "train"}]
            return parts[-1] if parts else self.script
        return PurePath(self.script).stem


def read_command(
    command: Sequence[str], *, nproc_per_node: str | None, environment: Mapping[str, str]
) -> TorchrunCommand:
    """The meaning of `command`. `nproc_per_node` is `unbroken run`'s own option.

    Raises LaunchRefused, with one sentence that names the option.
    """
    if not command:
        raise LaunchRefused("there is no command: unbroken run [options] -- torchrun [options] train.py [arguments]")
    program, rest = command[0], list(command[1:])
    name = PurePath(program).name
    if name == "torchrun":
        return _read_torchrun(program, False, rest, nproc_per_node, environment)
    if re.fullmatch(r"(python|pypy)[0-9.]*", name):
        return _read_python(program, rest, nproc_per_node, environment)
    raise LaunchRefused(_why_not(program, name, rest))


def _why_not(program: str, name: str, rest: Sequence[str]) -> str:
    if name == "accelerate":
        return advice(ACCELERATE, rest[1:] if rest[:1] == ["launch"] else rest)
    if name == "deepspeed":
        return advice(DEEPSPEED, rest)
    if name == "unbroken":
        return "unbroken run inside unbroken run: give the torchrun command itself"
    if name in {"srun", "mpirun", "mpiexec", "orterun", "flux", "sbatch"}:
        return f"{name} must come first: {name} ... unbroken run -- torchrun ..."
    if any(PurePath(word).name == "torchrun" or re.fullmatch(r"python[0-9.]*", PurePath(word).name) for word in rest):
        return f"`{program}` must come before unbroken: {program} ... unbroken run -- torchrun ..."
    return f"`{program}` is not a launcher that unbroken knows: give a torchrun or python command"


def _read_python(
    program: str, rest: list[str], nproc_per_node: str | None, environment: Mapping[str, str]
) -> TorchrunCommand:
    """`python [-u] train.py`, `python -m module`, `python -m torch.distributed.run`."""
    while rest and rest[0] == "-u":  # torchrun starts its workers with -u anyway
        rest.pop(0)
    if not rest:
        raise LaunchRefused(f"`{program}` needs a script")
    word = rest[0]
    if word == "-m" or (word.startswith("-m") and not word.startswith("--")):
        module, arguments = (word[2:], rest[1:]) if len(word) > 2 else (rest[1] if len(rest) > 1 else "", rest[2:])
        return _read_module(program, module, arguments, nproc_per_node, environment)
    if word.startswith("-"):
        raise LaunchRefused(
            f"`{program} {word}` is not supported: give a script or -m module, and interpreter flags as variables "
            "(PYTHONOPTIMIZE, PYTHONWARNINGS, ...)"
        )
    return _read_torchrun(program, True, rest, nproc_per_node, environment)


def _read_module(
    program: str, module: str, arguments: list[str], nproc_per_node: str | None, environment: Mapping[str, str]
) -> TorchrunCommand:
    if not module:
        raise LaunchRefused("-m needs the name of a module")
    if module in {"torch.distributed.run", "torch.distributed.elastic.run"}:
        return _read_torchrun(program, True, arguments, nproc_per_node, environment)
    if module == "torch.distributed.launch":
        raise LaunchRefused("torch.distributed.launch is deprecated: use torchrun (the script reads LOCAL_RANK itself)")
    if module.startswith("accelerate.") and "launch" in module:
        raise LaunchRefused(advice(ACCELERATE, arguments))
    if module.startswith("deepspeed.") and "launch" in module:
        raise LaunchRefused(advice(DEEPSPEED, arguments))
    return _read_torchrun(program, True, ["-m", module, *arguments], nproc_per_node, environment)


@dataclass
class _Scan:
    """torchrun's arguments, cut at the script."""

    values: dict[str, str] = field(default_factory=dict)
    """Option name -> the last value given (a flag's is `1`)."""
    kept: list[str] = field(default_factory=list)
    unknown: bool = False
    script: str = ""
    script_args: list[str] = field(default_factory=list)


def _scan(arguments: list[str]) -> _Scan:
    scan = _Scan()
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if word == "--" or not _looks_like_option(word):
            if word == "--":
                scan.kept.append(word)  # argparse takes the first one away, before or behind the script
            else:
                position -= 1
            scan.script, scan.script_args = "".join(arguments[position : position + 1]), arguments[position + 1 :]
            break
        option, value = _option(word)
        if option is None:
            scan.unknown = True
            scan.kept.append(word)  # of a torchrun that knows more than we do, or it will say that it does not
            continue
        if option.flag:
            value = "1"
        elif value is None:
            if position == len(arguments) or _looks_like_option(arguments[position]):
                raise LaunchRefused(f"torchrun's {option.name} needs a value")
            value = arguments[position]
            position += 1
        scan.values[option.name] = value
        if option.treatment == "kept":
            scan.kept += [option.name] if option.flag else [f"{option.name}={value}"]
    return scan


def _looks_like_option(word: str) -> bool:
    """argparse's rule for a word that cannot be a value."""
    return len(word) > 1 and word[0] == "-" and not _NEGATIVE_NUMBER.match(word) and " " not in word


def _option(word: str) -> tuple[Option | None, str | None]:
    """The option that `word` names, and its value where `word` carries it. None: unknown."""
    if word in _BY_SPELLING:
        return _BY_SPELLING[word], None
    name, equals, value = word.partition("=")
    given = value if equals else None
    if name in _BY_SPELLING:
        option = _BY_SPELLING[name]
        if option.flag and equals:
            raise LaunchRefused(f"torchrun's {option.name} takes no value")
        return option, given
    if word.startswith("--"):
        found = {option.name: option for text, option in _BY_SPELLING.items() if text.startswith(name)}
        if len(found) > 1:
            raise LaunchRefused(f"torchrun's option {name} could be {', '.join(found)}")
        return (next(iter(found.values())), given) if found else (None, None)
    option_or_none = _BY_SPELLING.get(word[:2])
    if option_or_none is None or option_or_none.flag:
        return None, None
    return option_or_none, word[2:]  # -r3, -t0:1


def _undo(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep `PET_STANDALONE` and the like from undoing our options."""
    switches = ("PET_NODE_RANK", "PET_RUN_PATH", "PET_STANDALONE")
    return {name: "0" for name in switches if environment.get(name, "0") != "0"}


def _read_torchrun(
    program: str, is_python: bool, arguments: list[str], nproc_per_node: str | None, environment: Mapping[str, str]
) -> TorchrunCommand:
    scan = _scan(arguments)
    given = dict(scan.values)
    for option in OPTIONS:
        variable = environment.get(f"PET_{option.key.upper()}", "") if option.in_environment else ""
        if variable and option.name not in given and not (option.flag and variable == "0"):
            given[option.name] = variable
    if "--help" in given:
        return TorchrunCommand(program, is_python, (), "", wants_help=True)
    if not scan.script:
        raise LaunchRefused("torchrun needs a script")
    kept, kind = _how_to_start(scan.kept, given)
    nproc, kept = _processes(scan.values, given, kept, nproc_per_node)
    nodes_min, nodes_max = _nodes(given.get("--nnodes", "1"))
    budget = _whole(given, "--max-restarts")
    notices = _notices(given, budget)
    return TorchrunCommand(
        program,
        is_python,
        tuple(kept),
        scan.script,
        tuple(scan.script_args),
        kind,
        nodes_min,
        nodes_max,
        nproc,
        budget or None,
        _whole(given, "--node-rank"),
        "" if "--standalone" in given else given.get("--rdzv-id", ""),
        given.get("--logs-specs", "unbroken"),
        has_unknown_options=scan.unknown,
        notices=notices,
        environment=_undo(environment),
    )


def _how_to_start(
    kept: list[str], given: Mapping[str, str]
) -> tuple[list[str], Literal["script", "module", "program"]]:
    if "--run-path" in given:  # runs the script as __main__ in a process torchrun made: what ours do anyway
        return [word for word in kept if word not in ("--module", "--no-python")], "script"
    if "--no-python" in given:
        if "--module" in given:
            raise LaunchRefused("torchrun's --no-python and --module exclude each other")
        return kept, "program"
    return kept, "module" if "--module" in given else "script"


def _processes(
    on_line: Mapping[str, str], given: Mapping[str, str], kept: list[str], ours: str | None
) -> tuple[str, list[str]]:
    theirs = on_line.get("--nproc-per-node")
    if ours and theirs and ours != theirs:
        raise LaunchRefused(f"--nproc-per-node is given twice: {ours} to unbroken and {theirs} to torchrun")
    nproc = ours or given.get("--nproc-per-node", "1")
    if nproc.lstrip("-").isdigit() and int(nproc) < 1:
        raise LaunchRefused(f"--nproc-per-node {nproc} starts no process")
    return nproc, [f"--nproc-per-node={nproc}", *kept] if ours and not theirs else kept


def _nodes(text: str) -> tuple[int, int]:
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not 0 < numbers[0] <= numbers[-1]:
        raise LaunchRefused(f"torchrun's --nnodes {text} is neither a number of nodes nor MIN:MAX")
    return numbers[0], numbers[-1]


def _whole(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal():
        raise LaunchRefused(f"torchrun's {name} {text} is not a number from 0 up")
    return int(text)


def _notices(given: Mapping[str, str], budget: int | None) -> tuple[str, ...]:
    notices = []
    unused = [option.name for option in OPTIONS if option.treatment == "rendezvous" and option.name in given]
    if unused and "--standalone" not in given:
        notices.append(f"{', '.join(unused)}: not used, the controller is the rendezvous")
    if budget:
        notices.append(f"--max-restarts {budget} is now unbroken's budget: restarts without progress in between")
    elif budget == 0:
        notices.append("--max-restarts 0 is replaced by unbroken's own budget (unbroken run --max-restarts 0 for none)")
    if "--logs-specs" in given:
        notices.append(f"--logs-specs {given['--logs-specs']} is used: the ranks' output is neither watched nor shown")
    return tuple(notices)


def starts_with_omp_default(processes: int | None, environment: Mapping[str, str]) -> bool:
    """Whether torchrun sets OMP_NUM_THREADS=1 for its workers. `processes` per node; None: not known."""
    return "OMP_NUM_THREADS" not in environment and processes != 1
