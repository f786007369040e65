"""Checkpoints that are folders: every file of a known kind in one must be whole (`Tree`).

torch.distributed.checkpoint, Hugging Face, Megatron-LM, NeMo, DeepSpeed, accelerate, any other.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Container
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import msgspec

from recovery.checkpoint import Checkpoint, RankLayout, says_step
from recovery.formats.dcp import inspect_dcp, ranks_of
from recovery.formats.files import (
    DEFAULT_LIMITS,
    METADATA,
    OURS,
    SHARD_SUFFIX,
    SUFFIXES,
    Budget,
    Limits,
    Report,
    inspect_safetensors,
    inspect_torch_file,
    is_temporary,
    made,
    names_a_save,
    shape,
    step_in_name,
)

DEPTH: Final = 4
_INDEX_LIMIT: Final = 64 << 20
NOT_TORCH: Final = re.compile(r"(?:tokenizer|vocab|args)\w*\.(?:bin|pkl)$")


class Tree:
    """What is in the folder of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, os.stat_result] = {}
        """By path relative to the folder, with slashes."""
        self.truncated = False
        """There are more files than the limits allow."""
        self.numbers: dict[str, int] = {}
        self.step: int | None = None
        self.told: dict[str, dict[str, int]] = {}
        """The numbers that each file tells."""

    @property
    def size(self) -> int:
        return sum(stat.st_size for stat in self.files.values())

    @property
    def modified_at(self) -> float:
        """Of the file written last; of the folder when it is empty."""
        times = [stat.st_mtime for stat in self.files.values()]
        return max(times) if times else self.folder.stat().st_mtime

    def any(self, pattern: str) -> bool:
        """Whether a relative path matches the whole pattern."""
        return any(re.fullmatch(pattern, name) for name in self.files)


def list_tree(folder: Path, entries: int) -> Tree:
    """The files of a checkpoint folder. Raises OSError when the folder itself cannot be read."""
    tree = Tree(folder)
    pending = [(folder, "", 0)]
    while pending:
        current, prefix, depth = pending.pop()
        try:
            listing = list(os.scandir(current))
        except OSError:
            if current == folder:
                raise
            continue
        for entry in listing:
            if len(tree.files) >= entries:
                tree.truncated = True
                return tree
            try:
                if entry.is_dir():
                    if entry.name not in OURS and depth < DEPTH:
                        pending.append((Path(entry.path), f"{prefix}{entry.name}/", depth + 1))
                elif entry.is_file():
                    tree.files[prefix + entry.name] = entry.stat()
            except OSError:
                continue  # it went while we looked
    return tree


def inspect_tree(tree: Tree, budget: Budget) -> str:
    """Why the files are not whole; empty when they are. Fills in the tree's step and numbers. Raises OSError."""
    if not tree.files:
        return "the folder is empty"
    for name in sorted(tree.files):
        base = PurePosixPath(name).name
        if is_temporary(base):
            return f"{name} is still being written"
    for folder in sorted({name.rpartition("/")[0] for name in tree.files}):
        why = _inspect_folder(tree, folder, budget)
        if why:
            return why
    for name in sorted(tree.files):
        try:
            report = inspect_file(tree.folder / name, budget)
        except FileNotFoundError:
            return f"{name} went while it was read"
        if report is None:
            continue
        if report.why:
            return f"{name}: {report.why}"
        if tree.step is None:
            tree.step = report.step
        tree.told[name] = report.numbers
        tree.numbers.update(report.numbers)
    return ""


def inspect_file(path: Path, budget: Budget) -> Report | None:
    """What one file of a known kind is like; None for any other file. Raises OSError."""
    if path.suffix == ".safetensors":
        return inspect_safetensors(path)
    if path.suffix in SUFFIXES and not NOT_TORCH.search(path.name):
        return inspect_torch_file(path, budget)
    return None


def _inspect_folder(tree: Tree, folder: str, budget: Budget) -> str:
    """Torch's distributed checkpoint and sharded weights: files that name other files."""
    prefix = f"{folder}/" if folder else ""
    sizes = {
        name.removeprefix(prefix): stat.st_size
        for name, stat in tree.files.items()
        if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
    }
    if METADATA in sizes or any(name.endswith(SHARD_SUFFIX) for name in sizes):
        why = inspect_dcp(tree.folder / folder, sizes, budget)
        if why:
            return f"{folder}: {why}" if folder else why
    for name in sizes:
        if name.endswith(".index.json"):
            missing = _missing_shards(tree.folder / folder / name, sizes)
            if missing:
                return missing
    return ""


def _missing_shards(index: Path, sizes: dict[str, int]) -> str:
    if sizes[index.name] > _INDEX_LIMIT:
        return ""
    try:
        weights = msgspec.json.decode(index.read_bytes())["weight_map"]
        named = sorted({str(shard) for shard in weights.values()})
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return f"{index.name} is damaged"
    missing = [shard for shard in named if shard not in sizes]
    return f"{missing[0][:80]} is missing ({len(missing)} of {len(named)} shards)" if missing else ""


MEGATRON_TRACKER: Final = "latest_checkpointed_iteration.txt"
DEEPSPEED_TRACKER: Final = "latest"
TRACKERS: Final = {MEGATRON_TRACKER: "megatron", DEEPSPEED_TRACKER: "deepspeed"}
"""Tracker file -> its format."""
_POINTER_LIMIT: Final = 4096
_WEIGHTS: Final = (
    r"(?:adapter_|pytorch_)?model[\w.-]*\.(?:safetensors|bin)(?:\.index\.json)?"
    r"|pytorch_model_fsdp[^/]*/.*|global_step.*"
)

INCOMPLETE_MARK: Final = "checkpoint-is-incomplete.txt"
"""transformers' save at SIGTERM (`enable_jit_checkpoint`) puts it there first and removes it last."""
_OF_TRAINER: Final = re.compile(
    r"trainer_state\.json|training_args\.bin|rng_state(?:_\d+)?\.pth|checkpoint-is-incomplete\.txt"
)


Trusts = Callable[[Path], bool]
"""Whether a file or folder beside a checkpoint (a tracker file, another checkpoint) is this job's, and counts."""


def everything(_: Path) -> bool:
    """All of a folder that was given is the job's."""
    return True


def read_pointer(path: Path) -> str | None:
    """The text of a tracker file; None when there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(_POINTER_LIMIT).decode(errors="replace").strip()
    except OSError:
        return None


class PartReport(NamedTuple):
    """What one node has of a save that ranks on several nodes write, each to its own disk."""

    why: str
    """Why it is not whole, also if others have what it lacks."""
    torn: str
    """Why its own files are not whole."""
    lacks: tuple[str, ...]
    """Files that ranks on other nodes must have written, by the format's rules."""


class _Folder:
    """What folder formats share: the tree is read, then the format's own demands are checked."""

    name = ""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, trusts: Trusts = everything) -> None:
        self.limits = limits
        self.trusts = trusts

    def alike(self, path: Path) -> list[Path]:
        """Folders of this job beside it whose names differ in numbers only."""
        return [other for other in _alike(path) if self.trusts(other)]

    def names(self, path: Path) -> list[str]:
        """What lies in the folder and is this job's: what somebody else put there makes it no checkpoint."""
        names = _names(path)
        return names if self.trusts is everything else [name for name in names if self.trusts(path / name)]

    def inspect(self, path: Path) -> Checkpoint:
        tree = list_tree(path, self.limits.entries)
        if self.trusts is not everything:  # what is not ours in it is not read, and proves nothing
            tree.files = {name: stat for name, stat in tree.files.items() if self.trusts(path / name)}
        why = self.demands(tree) or inspect_tree(tree, Budget(self.limits)) or self.after(tree)
        report = Report(why, self.step(tree))
        return made(path, self.name, report, tree.size, tree.modified_at, self.layout(tree))

    def inspect_part(self, path: Path, names: Container[str]) -> PartReport:
        """The same of one node's part, of the files with these names. Raises OSError."""
        tree = list_tree(path, self.limits.entries)
        tree.files = {name: stat for name, stat in tree.files.items() if name in names}
        torn = inspect_tree(tree, Budget(self.limits)) or self.contradicts(tree)
        why = self.demands(tree) or torn
        lacks = () if why else tuple(sorted(self.lacking(tree)))
        tree.files.update(dict.fromkeys(lacks, next(iter(tree.files.values()), path.stat())))
        return PartReport(why or self.after(tree), torn, lacks)

    def lacking(self, tree: Tree) -> set[str]:  # noqa: ARG002
        """Names that others must have written."""
        return set()

    def contradicts(self, tree: Tree) -> str:  # noqa: ARG002
        """Why its files, each of them whole, cannot be of one save."""
        return ""

    def demands(self, tree: Tree) -> str:  # noqa: ARG002
        """Why it cannot be complete, from the names alone."""
        return ""

    def after(self, tree: Tree) -> str:  # noqa: ARG002
        """Why it is not complete although every file is whole."""
        return ""

    def layout(self, tree: Tree) -> RankLayout | None:
        """Over how many ranks it is spread; None where it does not say."""
        world_size = ranks_of([name.rpartition("/")[2] for name in tree.files])
        return RankLayout(world_size=world_size) if world_size else None

    def step(self, tree: Tree) -> int | None:
        """From the name, else from a file in it."""
        named = step_in_name(tree.folder.name)
        return named if named is not None else tree.step


def _names(path: Path, limit: int = 2000) -> list[str]:
    """Names in a folder; empty when it is none or cannot be read."""
    names: list[str] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) >= limit:
                    break
    except OSError:
        return []
    return names


class DcpFolder(_Folder):
    """A folder of torch.distributed.checkpoint (torchtitan's `step-100`, FSDP2, many others)."""

    name = "dcp"

    def recognize(self, path: Path) -> bool:
        names = self.names(path)
        of_lightning = path.suffix == ".ckpt" and "meta.pt" in names
        return of_lightning or any(name == METADATA or name.endswith(SHARD_SUFFIX) for name in names)

    def demands(self, tree: Tree) -> str:
        """Lightning's sharded `epoch=0-step=10.ckpt`: the loops' state is written when all ranks have saved."""
        if tree.folder.suffix == ".ckpt" and "meta.pt" in tree.files and METADATA not in tree.files:
            return f"it has no {METADATA}"
        if tree.folder.suffix == ".ckpt" and METADATA in tree.files and "meta.pt" not in tree.files:
            beside = (other / "meta.pt" for other in self.alike(tree.folder))
            return "it has no meta.pt, which is written last" if any(path.exists() for path in beside) else ""
        return ""


class HuggingFaceFolder(_Folder):
    """A Trainer's `checkpoint-N`; `trainer_state.json` is written after weights, optimizer and scheduler."""

    name = "hf"

    def recognize(self, path: Path) -> bool:
        """By its name and what only the Trainer writes: others, without a trainer_state.json, name folders so, too."""
        if not re.fullmatch(r"(?:tmp-)?checkpoint-\d{1,12}", path.name) or not path.is_dir():
            return False
        if any(_OF_TRAINER.fullmatch(name) for name in self.names(path)):
            return True
        return any((other / "trainer_state.json").exists() for other in self.alike(path))

    def demands(self, tree: Tree) -> str:
        if not tree.files:
            return "the folder is empty"
        if INCOMPLETE_MARK in tree.files:
            return f"{INCOMPLETE_MARK} is there: the save at the job's end was cut off"
        if not tree.any(_WEIGHTS):
            return "it has no weights"
        if "trainer_state.json" not in tree.files:
            return "it has no trainer_state.json, which is written last"
        try:
            state = msgspec.json.decode((tree.folder / "trainer_state.json").read_bytes())
            tree.step = int(state["global_step"])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
            return "trainer_state.json is damaged"
        return ""

    def lacking(self, tree: Tree) -> set[str]:
        """Each rank writes its own random state; a number in the name says that there are several."""
        found = _numbered(tree, r"rng_state_(\d{1,7})\.pth")
        missing = set(range(max(2, max(found) + 1))) - found if found else set()
        return {f"rng_state_{rank}.pth" for rank in missing} | _lacking_of_zero(tree)

    def after(self, tree: Tree) -> str:
        found = _numbered(tree, r"rng_state_(\d{1,7})\.pth")
        if missing := self.lacking(tree):
            return f"{min(missing)} is missing"
        random = bool(found) or "rng_state.pth" in tree.files
        optimizer = tree.any(r"optimizer.*|global_step.*")
        if random and not optimizer:  # the Trainer writes both, or none (`save_only_model`)
            return "it has no optimizer state"
        return ""

    def layout(self, tree: Tree) -> RankLayout | None:
        found = _numbered(tree, r"rng_state_(\d{1,7})\.pth")
        alone = 1 if "rng_state.pth" in tree.files else None
        world_size = len(found) or alone
        return RankLayout(world_size=world_size) if world_size else None

    def step(self, tree: Tree) -> int | None:
        return tree.step if tree.step is not None else step_in_name(tree.folder.name)


_MODEL_PART: Final = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?(?:/|$)")
_COMMON: Final = "common.pt"
_CONFIG: Final = "metadata.json"


class MegatronFolder(_Folder):
    """Megatron-LM's `iter_0000100`; the tracker file beside it is written when all ranks have saved.

    In it is a folder for each tensor- and pipeline-parallel rank (`torch`), or a distributed checkpoint (`torch_dist`).
    """

    name = "megatron"

    def recognize(self, path: Path) -> bool:
        """By its name and what only Megatron writes: others, who have no tracker file, name folders so, too."""
        if not re.fullmatch(r"iter_\d{7,12}", path.name) or not path.is_dir():
            return False
        names = self.names(path)
        tracker = path.parent / MEGATRON_TRACKER
        return (
            not _names(path)
            or (tracker.exists() and self.trusts(tracker))
            or any(re.match(r"mp_rank_\d\d|common\.pt$|metadata\.json$", name) for name in names)
        )

    def demands(self, tree: Tree) -> str:
        if not tree.files:
            return "the folder is empty"
        tracker = tree.folder.parent / MEGATRON_TRACKER
        tracked = read_pointer(tracker) if not tracker.exists() or self.trusts(tracker) else ""
        if tracked is None:
            return f"there is no {MEGATRON_TRACKER}, which is written last"
        step = step_in_name(tree.folder.name)
        if tracked.isdigit() and step is not None and int(tracked) < step:
            return f"{MEGATRON_TRACKER}, written last, still names {int(tracked)}"
        return why_not_distributed(tree, "")

    def lacking(self, tree: Tree) -> set[str]:
        files = {name.partition("/")[2] for name in tree.files if _MODEL_PART.match(name)}
        return {f"{part}/{file}" for part in _missing_model_parts(tree) for file in files if file}

    def after(self, tree: Tree) -> str:
        """Tensor- and pipeline-parallel ranks are numbered without gaps, have the same files, and the same step."""
        if missing := _missing_model_parts(tree):
            return f"{min(missing)} is missing"
        parts = {name.partition("/")[0] for name in tree.files if _MODEL_PART.match(name)}
        files = {one: {name.partition("/")[2] for name in tree.files if name.startswith(one + "/")} for one in parts}
        every = set[str]().union(*files.values())
        for one in sorted(parts):
            if not any(name.startswith("model") for name in files[one]):
                return f"{one} has no model"
            if every - files[one]:
                return f"{one}/{min(every - files[one])} is missing, which other ranks have"
        return self.contradicts(tree)

    def contradicts(self, tree: Tree) -> str:
        own = step_in_name(tree.folder.name)
        for name, numbers in tree.told.items():
            if name.endswith(("model_optim_rng.pt", _COMMON)) and numbers.get("iteration", own) != own:
                return f"{name} is of step {numbers['iteration']}"
        return ""

    def layout(self, tree: Tree) -> RankLayout | None:
        return megatron_layout(tree, "")


def _missing_model_parts(tree: Tree) -> set[str]:
    """Folders of tensor- and pipeline-parallel ranks that must be there as well."""
    matches = [match for name in tree.files if (match := _MODEL_PART.match(name))]
    found = {tuple(map(int, filter(None, match.groups()))) for match in matches}
    told = [tree.numbers.get(f"args.{axis}_model_parallel_size", 0) for axis in ("tensor", "pipeline", "expert")]
    tensor, pipeline, expert = (size if size <= 1000 else 0 for size in told)
    if pipeline == 1 and all(len(one) == 2 for one in found):  # mp_rank_TT_EEE: a name has what is split only
        pipeline = expert
    wanted = _grid(found, [tensor, pipeline, expert])
    return {f"mp_rank_{one[0]:02d}{''.join(f'_{number:03d}' for number in one[1:])}" for one in wanted - found}


def _grid(found: set[tuple[int, ...]], sizes: list[int]) -> set[tuple[int, ...]]:
    """All places of the grid that has the places found, and these sizes; empty where their names differ in kind."""
    if len({len(one) for one in found}) != 1:
        return set()
    axes = [max(max(axis) + 1, size) for axis, size in zip(zip(*found, strict=True), sizes, strict=False)]
    return set(itertools.product(*map(range, axes)))


def why_not_distributed(tree: Tree, prefix: str) -> str:
    """Why a distributed checkpoint of Megatron-LM is not complete, from the names: `metadata.json` is written last."""
    names = {name.removeprefix(prefix) for name in tree.files if name.startswith(prefix)}
    if METADATA not in names and not any(name.endswith(SHARD_SUFFIX) for name in names):
        backend = _json(tree, prefix + _CONFIG).get("sharded_backend") if _CONFIG in names else ""
        return f"it has no {prefix}{METADATA}" if backend == "torch_dist" else ""
    if _COMMON in names and _CONFIG not in names:
        return f"it has no {prefix}{_CONFIG}, which is written last"
    return f"it has no {prefix}{_COMMON}" if _CONFIG in names and _COMMON not in names else ""


def _json(tree: Tree, name: str) -> dict[str, object]:
    """A small JSON file; empty for one that is damaged."""
    if tree.files[name].st_size > _POINTER_LIMIT:
        return {}
    try:
        return msgspec.json.decode((tree.folder / name).read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def megatron_layout(tree: Tree, prefix: str) -> RankLayout | None:
    """From the arguments of the run that each file of the common state holds, else from the names."""
    size = {name: number for name, number in tree.numbers.items() if 0 < number <= 1_000_000}
    tensor, pipeline = size.get("args.tensor_model_parallel_size"), size.get("args.pipeline_model_parallel_size")
    matches = [match for name in tree.files if (match := _MODEL_PART.match(name.removeprefix(prefix)))]
    if matches:
        tensor = tensor or 1 + max(int(match[1]) for match in matches)
        pipeline = pipeline or 1 + max(int(match[2] or 0) for match in matches)
    world_size = size.get("args.world_size") or ranks_of([name.rpartition("/")[2] for name in tree.files])
    data = size.get("args.data_parallel_size")
    if data is None and world_size and tensor and pipeline and not world_size % (tensor * pipeline):
        data = world_size // (tensor * pipeline)
    return (
        RankLayout(world_size=world_size, tensor=tensor, pipeline=pipeline, data=data) if world_size or tensor else None
    )


UNFINISHED: Final = "-unfinished"
"""NeMo puts a file of this name beside a checkpoint first and removes it last."""


class NemoFolder(_Folder):
    """NeMo 2: `NAME--val_loss=1.5-step=100-.../weights` is a distributed checkpoint, `context` says how to load it."""

    name = "nemo"

    def recognize(self, path: Path) -> bool:
        if not path.is_dir() or not (path / "weights").is_dir():
            return False
        inside = _names(path / "weights")
        return _COMMON in inside or _CONFIG in inside or (path / "context").is_dir()

    def demands(self, tree: Tree) -> str:
        mark = tree.folder.with_name(tree.folder.name + UNFINISHED)
        if mark.exists() and self.trusts(mark):
            return f"{mark.name} is there: NeMo has not finished it"
        if not tree.any(r"weights/.+"):
            return "it has no weights"
        return why_not_distributed(tree, "weights/")

    def layout(self, tree: Tree) -> RankLayout | None:
        return megatron_layout(tree, "weights/")


class DeepSpeedFolder(_Folder):
    """DeepSpeed's `global_step100`; `latest` beside it is written last."""

    name = "deepspeed"

    def recognize(self, path: Path) -> bool:
        if re.fullmatch(r"global_step\d{1,12}", path.name):
            return path.is_dir()
        return any(re.search(r"mp_rank_\d\d_(?:model|optim)_states\.pt$", name) for name in self.names(path))

    def demands(self, tree: Tree) -> str:
        if not tree.any(r".*_states\.pt"):
            return "it has no model states"
        tracker = tree.folder.parent / DEEPSPEED_TRACKER
        tracked = step_in_name(read_pointer(tracker) or "") if self.trusts(tracker) else None
        step = step_in_name(tree.folder.name)
        if tracked is not None and step is not None and tracked < step:
            return f"`latest`, written last, still names step {tracked}"
        return ""

    def lacking(self, tree: Tree) -> set[str]:
        return _lacking_of_zero(tree)

    def after(self, tree: Tree) -> str:
        """Every data-parallel rank has written its part, for every model-parallel one, and all are of one step."""
        parts = _parts(tree, "optim")
        models, pieces = _numbered(tree, r"(?:.*/)?mp_rank_(\d\d)_model_states\.pt"), _parts(tree, "model")
        data, model = _sizes(tree, parts | pieces, models)
        if not parts and (pieces or tree.numbers.get("param_shapes")):
            return "it has no optimizer states, which ZeRO splits over the data-parallel ranks"
        for found, what in ((parts, "part"), (pieces, "model states")):
            lacking = sorted(set(itertools.product(range(data), range(model))) - found) if found else []
            if lacking:
                of = f" for model-parallel rank {lacking[0][1]}" if model > 1 else ""
                return f"the {what} of data-parallel rank {lacking[0][0]}{of} is missing"
        absent = sorted(set(range(model)) - models - {rank for _, rank in pieces})
        if absent:
            return f"the states of model-parallel rank {absent[0]} are missing"
        told = (numbers.get("global_steps") for name, numbers in tree.told.items() if name.endswith("_model_states.pt"))
        steps = sorted({step for step in told if step is not None})
        return f"its files are of steps {steps[0]} and {steps[-1]}" if len(steps) > 1 else ""

    def layout(self, tree: Tree) -> RankLayout | None:
        parts = _parts(tree, "optim")
        models = _numbered(tree, r"(?:.*/)?mp_rank_(\d\d)_model_states\.pt")
        data, model = _sizes(tree, parts | _parts(tree, "model"), models)
        if not data:
            return None
        return RankLayout(world_size=data * model, tensor=model, data=data, fixed=bool(parts))


def _lacking_of_zero(tree: Tree) -> set[str]:
    """Files of ZeRO's other ranks that must be there as well: in DeepSpeed's folder, or in a Trainer's around it."""
    parts, pieces = _parts(tree, "optim"), _parts(tree, "model")
    models = _numbered(tree, r"(?:.*/)?mp_rank_(\d\d)_model_states\.pt")
    data, model = _sizes(tree, parts | pieces, models)
    every = set(itertools.product(range(data), range(model)))
    names = set[str]()
    for found, kind in ((parts, "optim"), (pieces, "model")):
        end = re.compile(rf"zero_pp_rank_\d{{1,7}}_mp_rank_\d\d_{kind}_states\.pt$")
        before = next((name[: one.start()] for name in tree.files if (one := end.search(name)) is not None), "")
        lacking = every - found if found else ()
        names |= {f"{before}zero_pp_rank_{one}_mp_rank_{two:02d}_{kind}_states.pt" for one, two in lacking}
    absent = set(range(model)) - models if models else ()
    before = next((f"{name.rpartition('/')[0]}/" for name in tree.files if "/mp_rank_" in name), "")
    return names | {f"{before}mp_rank_{rank:02d}_model_states.pt" for rank in absent}


def _parts(tree: Tree, kind: str) -> set[tuple[int, int]]:
    """Data- and model-parallel rank of each part of the optimizer's, or with ZeRO-3 of the model's states."""
    pattern = re.compile(rf"zero_pp_rank_(\d{{1,7}})_mp_rank_(\d\d)_{kind}_states\.pt$")
    return {(int(one[1]), int(one[2])) for name in tree.files if (one := pattern.search(name)) is not None}


def _sizes(tree: Tree, parts: set[tuple[int, int]], models: set[int]) -> tuple[int, int]:
    """How many data- and model-parallel ranks there must be; the states tell the numbers."""
    data, model = tree.numbers.get("dp_world_size", 0), tree.numbers.get("mp_world_size", 0)
    data = max(data if data <= 100_000 else 0, 1 + max((rank for rank, _ in parts), default=-1))
    return data, max(1, model if model <= 1000 else 0, 1 + max(models | {rank for _, rank in parts}, default=0))


def _numbered(tree: Tree, pattern: str) -> set[int]:
    """The numbers (the pattern's group) of the files that match."""
    return {int(match[1]) for name in tree.files if (match := re.fullmatch(pattern, name)) is not None}


class AccelerateFolder(_Folder):
    """accelerate's `checkpoint_0` (its number counts saves) or `step_100`; random states are written last."""

    name = "accelerate"

    def recognize(self, path: Path) -> bool:
        names = self.names(path)
        return any(name.startswith("random_states_") for name in names) or (
            "optimizer.bin" in names and path.name.startswith(("checkpoint_", "checkpoint-", "step_", "epoch_"))
        )

    def demands(self, tree: Tree) -> str:
        return "" if tree.any(r"random_states_\d+\.pkl") else "it has no random states, which are written last"

    def lacking(self, tree: Tree) -> set[str]:
        return _lacking_of_zero(tree)

    def after(self, tree: Tree) -> str:
        """Each rank writes its own random state."""
        if absent := self.lacking(tree):
            return f"{min(absent)} is missing"
        found = _numbered(tree, r"random_states_(\d{1,7})\.pkl")
        missing = set(range(max(found, default=-1) + 1)) - found
        return f"random_states_{min(missing)}.pkl is missing" if missing else ""

    def layout(self, tree: Tree) -> RankLayout | None:
        found = _numbered(tree, r"random_states_(\d{1,7})\.pkl")
        return RankLayout(world_size=len(found)) if found else None

    def step(self, tree: Tree) -> int | None:
        return None if tree.folder.name.startswith("checkpoint_") else step_in_name(tree.folder.name)


_STEP_FOLDER: Final = re.compile(
    r"(?:tmp[-_.])?(?:checkpoint|ckpt|model|state)?[-_]?(?:global_?step|step|iteration|iter)?[-_=]?\d{1,12}([-_.]tmp)?"
)
_SIBLINGS: Final = 8
"""Folders beside one that are compared with it."""


class AnyFolder(_Folder):
    """Checkpoint files in a folder whose name is hardly more than a number, or which is one of several alike."""

    name = "folder"

    def recognize(self, path: Path) -> bool:
        if not shape(path.name) or not path.is_dir():
            return False
        names = _names(path)
        alike = self.alike(path)
        if not names:  # made, and nothing written yet
            return bool(_STEP_FOLDER.fullmatch(path.name) or any(_kinds(_names(other)) for other in alike))
        if _holds_saves(path, names):
            return False
        if _kinds(names) and any(_kinds(_names(other)) == _kinds(names) for other in alike):
            return True
        return self.is_one_save(path, names)

    def is_one_save(self, path: Path, names: list[str]) -> bool:
        """Where there is no other to compare it with."""
        if not _STEP_FOLDER.fullmatch(path.name) and not names_a_save(path.name):
            return False
        return bool(_kinds(names)) or _holds_below(path, names)

    def step(self, tree: Tree) -> int | None:
        """What is in it knows better than a number that may count saves."""
        named = step_in_name(tree.folder.name)
        return named if tree.step is None or says_step(tree.folder.name) else tree.step


def _kinds(names: list[str]) -> set[str]:
    """Kinds of checkpoint files: their names with a `#` for each number."""
    return {re.sub(r"\d+", "#", name) for name in names if os.path.splitext(name)[1] in (*SUFFIXES, ".safetensors")}


def _holds_saves(path: Path, names: list[str]) -> bool:
    """Whether a file has a step of its own in its name (`ckpt-4711/step_10.pt`): then the folder is that of a run."""
    own = step_in_name(path.name)
    return any(_kinds([name]) and says_step(name) and step_in_name(name) != own for name in names)


class WrittenFolder(AnyFolder):
    """The same among folders that ranks were seen to make: how they were filled says more than their names."""

    def __init__(self, trusts: Trusts, filled_once: Trusts, limits: Limits = DEFAULT_LIMITS) -> None:
        """`filled_once`: nothing in it was written a second time, nor twice of one kind by the same process."""
        super().__init__(limits, trusts)
        self.filled_once = filled_once

    def recognize(self, path: Path) -> bool:
        """A folder beside others like it may lack files: the rank died before it wrote them."""
        if super().recognize(path):
            return True
        own = self._own_kinds(path) if shape(path.name) and not _holds_saves(path, _names(path)) else set()
        return bool(own and self.filled_once(path) and any(own & self._own_kinds(other) for other in self.alike(path)))

    def after(self, tree: Tree) -> str:
        """What at least two earlier ones beside it have, and all of them, it must have, too."""
        number = _last_number(tree.folder.name)
        earlier = [self._own_kinds(other) for other in self.alike(tree.folder) if _last_number(other.name) < number]
        lacking = set.intersection(*earlier) - self._own_kinds(tree.folder) if len(earlier) > 1 else set()
        return f"a file like {min(lacking)} is missing, which every earlier one has" if lacking else ""

    def _own_kinds(self, path: Path) -> set[str]:
        return _kinds(self.names(path))

    def is_one_save(self, path: Path, names: list[str]) -> bool:
        if not self.filled_once(path) or not names_a_save(path.name):
            return False
        files = [name for name in names if _kinds([name])]
        counted = says_step(path.name) or re.search(r"epoch|ep", path.name, re.IGNORECASE)
        return len(files) > 1 or bool(counted and files) or (not files and _holds_below(path, names))


def _last_number(name: str) -> int:
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else -1


def _holds_below(path: Path, names: list[str]) -> bool:
    """`global_step_40/actor/model.pt`; not a folder that holds numbered checkpoints itself."""
    kinds = [name for folder in names[:_SIBLINGS] for name in _names(path / folder) if _kinds([name])]
    return bool(kinds) and all(step_in_name(name) is None for name in kinds)


def _alike(path: Path) -> list[Path]:
    """Folders beside it whose names differ in numbers only."""
    kind = shape(path.name)
    beside = [name for name in _names(path.parent) if name != path.name and shape(name) == kind]
    return [path.parent / name for name in beside[:_SIBLINGS]]
