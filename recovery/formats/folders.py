"""Checkpoints that are folders: every file of a known kind in one must be whole (`Tree`).

torch.distributed.checkpoint, Hugging Face, Megatron-LM, DeepSpeed, accelerate, any other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from recovery.checkpoint import Checkpoint
from recovery.formats.files import (
    DEFAULT_LIMITS,
    METADATA,
    OURS,
    SHARD_SUFFIX,
    SUFFIXES,
    Budget,
    Limits,
    Report,
    inspect_dcp,
    inspect_safetensors,
    inspect_torch_file,
    is_temporary,
    made,
    names_a_save,
    says_step,
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

_OF_TRAINER: Final = re.compile(r"trainer_state\.json|training_args\.bin|rng_state(?:_\d+)?\.pth")


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
        return made(path, self.name, Report(why, self.step(tree)), tree.size, tree.modified_at)

    def demands(self, tree: Tree) -> str:  # noqa: ARG002
        """Why it cannot be complete, from the names alone."""
        return ""

    def after(self, tree: Tree) -> str:  # noqa: ARG002
        """Why it is not complete although every file is whole."""
        return ""

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
        return any(name == METADATA or name.endswith(SHARD_SUFFIX) for name in self.names(path))


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

    def after(self, tree: Tree) -> str:
        """Each rank writes its own random state; a number in the name says that there are several."""
        found = {int(name[10:-4]) for name in tree.files if re.fullmatch(r"rng_state_\d{1,7}\.pth", name)}
        missing = set(range(max(2, max(found) + 1))) - found if found else set()
        return f"rng_state_{min(missing)}.pth is missing" if missing else ""

    def step(self, tree: Tree) -> int | None:
        return tree.step if tree.step is not None else step_in_name(tree.folder.name)


class MegatronFolder(_Folder):
    """Megatron-LM's `iter_0000100`; the tracker file beside it is written when all ranks have saved."""

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
        return ""

    def after(self, tree: Tree) -> str:
        """Ranks are numbered without gaps."""
        found = {int(name[8:10]) for name in tree.files if re.match(r"mp_rank_\d\d", name)}
        missing = set(range(max(found, default=-1) + 1)) - found
        return f"mp_rank_{min(missing):02d} is missing" if missing else ""


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

    def after(self, tree: Tree) -> str:
        """Every data-parallel rank has written its part."""
        matches = (re.search(r"zero_pp_rank_(\d{1,7})_mp_rank", name) for name in tree.files)
        found = {int(match.group(1)) for match in matches if match}
        wanted = max(found, default=-1) + 1
        if found and 0 < tree.numbers.get("dp_world_size", 0) <= 100_000:
            wanted = max(wanted, tree.numbers["dp_world_size"])
        missing = set(range(wanted)) - found
        return f"the part of data-parallel rank {min(missing)} is missing" if missing else ""


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
