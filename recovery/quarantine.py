"""The only part of recovery that changes files: moving bad checkpoints aside, mending tracker files, keeping copies.

It changes only what `Bounds` says is the job's, and asks again in the moment of the change. It deletes only our own
superseded copies, and a torn file when another torn one of its name comes. What it moves can be moved back: beside it
lies a record that `undo` reads. Every step may be cut off at any moment and repeated.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import msgspec

from diagnosis.signals import Frozen
from recovery.checkpoint import INCOMPLETE, ROLLED_BACK, Checkpoint, Preparation, PutBack, Restore, SetAside, newest
from recovery.formats import inspect
from recovery.formats.files import COPIES, SET_ASIDE, shape, step_in_name
from recovery.formats.folders import TRACKERS, read_pointer
from recovery.formats.scan import CheckpointScanner, WrittenCheckpoints, stale_pointer
from recovery.provenance import Provenance


class Bounds(Protocol):
    """Which files on storage this job may change, whoever asks for it."""

    job: str
    """Its folder; empty where it does not matter."""
    marks: tuple[bytes, ...]
    """Each process of the job has one of these words in its command line or environment; empty: all are the job's."""
    placed: list[str]
    """Paths that were put there for the job, where that has to be remembered."""

    def why_not(self, path: Path) -> str:
        """Why a checkpoint, or a file beside it, may not be touched; empty when it may."""

    def why_not_placed(self, copy: Path, path: Path) -> str:
        """Why a safe copy may not be put at `path`; empty when it may."""

    def smallest(self, path: Path) -> Path:
        """What is moved so that no script finds `path`: itself, or the folder that was made for it alone."""

    def inside(self, folder: Path) -> list[Checkpoint]:
        """The job's checkpoints in a folder."""

    def changed(self, path: Path) -> None:
        """Record that the file was put there for the job."""


class GivenFolders:
    """Everything below folders that the user gave; no link leads out of them."""

    def __init__(self, folders: Sequence[str | Path] = ("/",), job: str = "", marks: tuple[bytes, ...] = ()) -> None:
        self.job, self.marks, self.placed = job, marks, list[str]()
        self._folders = [os.path.realpath(folder) for folder in folders]

    def why_not(self, path: Path) -> str:
        folder = os.path.realpath(path.parent)
        there = os.path.join(folder, path.name)
        if path.name in ("", ".", "..") or not any(_is_in(there, given) for given in self._folders):
            return "it is not in a folder given by --checkpoint-dir"
        return ""

    def why_not_placed(self, copy: Path, path: Path) -> str:
        return "the copy is a link" if copy.is_symlink() else self.why_not(path)

    def smallest(self, path: Path) -> Path:
        return path

    def inside(self, folder: Path) -> list[Checkpoint]:
        found = CheckpointScanner().scan([folder], time.time(), at_rest=True)
        return [one for one in found if Path(one.path).parent == folder]

    def changed(self, path: Path) -> None:
        pass


class WrittenByRanks:
    """What ranks of the job were seen to write, as long as nobody else has touched it."""

    def __init__(self, provenance: Provenance, job: str = "", marks: tuple[bytes, ...] = ()) -> None:
        self.job, self.marks = job, marks
        self._provenance = provenance
        self.placed: list[str] = []

    def why_not(self, path: Path) -> str:
        return self._provenance.why_not_ours(str(path))

    def why_not_placed(self, copy: Path, path: Path) -> str:
        item = self._provenance.items.get(str(copy))
        return "" if item is not None and item.copy_of == str(path) else "the copy is not of this file"

    def smallest(self, path: Path) -> Path:
        """A folder that was made for this save alone (`save40/state.pt`) goes, too: a script would pick it, empty."""
        folder = path.parent
        if path.is_dir() or not shape(folder.name) or self.why_not(folder):
            return path
        return folder if os.listdir(folder) == [path.name] else path

    def inside(self, folder: Path) -> list[Checkpoint]:
        scanner = CheckpointScanner(seen=WrittenCheckpoints(self._provenance))
        found = scanner.scan([], time.time(), at_rest=True)
        return [one for one in found if Path(one.path).parent == folder and not one.copy_of]

    def changed(self, path: Path) -> None:
        self.placed.append(str(path))
        self._provenance.adopt(str(path), time.time_ns())


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def user_of(path: Path, marks: tuple[bytes, ...]) -> tuple[str, bool]:
    """A live process of this node that forbids a move, in words (empty for none), and whether it is ours.

    Of ours it is one that writes there; of somebody else's one that has anything of it open.
    """
    target = os.path.realpath(path)
    found = ""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            for descriptor in os.scandir(folder / "fd"):
                opened = os.readlink(descriptor.path)
                if opened != target and not opened.startswith(target + "/"):
                    continue
                ours = not marks or _is_of(folder, marks)
                if not ours or _is_writing(folder, descriptor.name):
                    name = f"process {folder.name} ({(folder / 'comm').read_text(errors='replace').strip()})"
                    if not ours:
                        return name, False
                    found = name
        except OSError:
            continue  # not ours to look into, or gone
    return found, True


def _is_of(process: Path, marks: tuple[bytes, ...]) -> bool:
    """A fork of the keeper has the keeper's command line; what a rank starts has the rank's environment."""
    words = (process / "cmdline").read_bytes().split(b"\0") + (process / "environ").read_bytes().split(b"\0")
    return not set(marks).isdisjoint(words)


def _is_writing(process: Path, descriptor: str) -> bool:
    for line in (process / "fdinfo" / descriptor).read_text().splitlines():
        if line.startswith("flags:"):
            return bool(int(line.split()[1], 8) & (os.O_WRONLY | os.O_RDWR))
    return False


# ----- our folders beside checkpoints, held open: others may write in the folder around them, and plant a link -----


class NotOurFolder(Exception):
    """Our folder cannot be used: it is a link, belongs to somebody else, or others may write to it."""


@contextmanager
def own_folder(path: Path, *, make: bool = True) -> Iterator[Path]:
    """A name for the folder at `path` that no rename and no link leads elsewhere, while it is held.

    Only a real folder of this user that nobody else may write to; `make`: made, for this user alone, where nothing
    is. Raises NotOurFolder, OSError.
    """
    around = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if make:
            try:
                os.mkdir(path.name, 0o700, dir_fd=around)
            except FileExistsError:
                pass
        held = _opened(path, around)
    finally:
        os.close(around)
    try:
        about = os.fstat(held)
        if about.st_uid != os.geteuid():
            raise NotOurFolder(f"{path} belongs to user {about.st_uid}, not to {os.geteuid()}")
        if stat.S_IMODE(about.st_mode) & 0o022:
            raise NotOurFolder(f"{path} can be written to by others: remove it, or `chmod go-w` it")
        yield Path(f"/proc/self/fd/{held}")
    finally:
        os.close(held)


@contextmanager
def around_of(path: Path) -> Iterator[Path]:
    """The same for a path in a folder of whatever owner: it stays the folder that it is now."""
    held = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{held}") / path.name
    finally:
        os.close(held)


def _opened(path: Path, around: int) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path.name, flags, dir_fd=around)
    except OSError:
        found = os.stat(path.name, dir_fd=around, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            what = "a link" if stat.S_ISLNK(found.st_mode) else "no folder"
            raise NotOurFolder(f"{path} is {what}, which this job did not put there") from None
        raise


# ----- moving aside, with a record from which it is undone -----

RECORD_SUFFIX: Final = ".why.json"


class PreparationError(Exception):
    """A preparation could not be done. The message says which, why, and what a person can do."""


class QuarantineRecord(Frozen, frozen=True, kw_only=True):
    """What was done to a path, kept as JSON beside what was moved; `undo` reverses it."""

    done: str
    """`set_aside`, `pointer` (a tracker file) or `link`."""
    path: str
    """Where it was."""
    moved_to: str = ""
    why: str = ""
    """Of a `pointer`: only where no rollback, or torn checkpoint, was the reason."""
    before: str | None = None
    """For `pointer` and `link`: its text or target before; None when there was none."""
    after: str | None = None
    at: float = 0.0
    job: str = ""
    """The job's folder."""


def set_aside(path: Path, why: str, bounds: Bounds | None = None) -> QuarantineRecord:
    """Move a checkpoint to `.unbroken-set-aside/` next to it; what was done. Raises OSError.

    The record is written first, so that whatever has been moved can be explained and moved back. A torn file takes
    the place of an earlier torn one of the same name, which the script would have overwritten: on a full disk every
    attempt leaves another. Should it turn out to be somebody else's in the moment of the move, it is put back.
    Raises NotOurFolder where that folder cannot be used.
    """
    bounds = bounds or GivenFolders()
    home = path.parent / SET_ASIDE
    with own_folder(home) as held, around_of(path) as there:
        again = why.startswith(INCOMPLETE) and path.is_file() and _is_torn(held / path.name, bounds.job)
        name = path.name if again else _unused(held, path.name)
        moved_to = str(home / name)
        record = QuarantineRecord(
            done="set_aside", path=str(path), moved_to=moved_to, why=why, at=time.time(), job=bounds.job
        )
        note = held / (name + RECORD_SUFFIX)
        try:
            replace(note, msgspec.json.encode(record))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # on a full disk the move itself still works
        strange, before = bounds.why_not(path), os.lstat(path)
        try:
            if strange:
                raise PreparationError(f"{path} is not this job's any more: {strange}")
            os.rename(there, held / name)
        except (OSError, PreparationError):
            note.unlink(missing_ok=True)
            raise
        if not _same_file(before, os.lstat(held / name)):
            _put_back(held / name, there)
            note.unlink(missing_ok=True)
            raise PreparationError(f"{path} was written by somebody else just now")
        sync_folder(held)
        sync_folder(there.parent)
    return record


def point(link: Path, target: str) -> None:
    """Point a symbolic link elsewhere, atomically."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def undo(record: QuarantineRecord) -> None:
    """Reverse what a record says was done. Raises PreparationError when something else is in its place."""
    path = Path(record.path)
    if record.done == "set_aside":
        home, name = Path(record.moved_to).parent, Path(record.moved_to).name
        try:
            with own_folder(home, make=False) as held, around_of(path) as there:
                if os.path.lexists(there) and os.path.lexists(held / name):
                    raise PreparationError(f"{path} is there again: move it away first, then undo")
                if os.path.lexists(held / name):
                    os.rename(held / name, there)
                (held / (name + RECORD_SUFFIX)).unlink(missing_ok=True)
        except NotOurFolder as error:
            raise PreparationError(f"{path} is not put back: {error}") from error
    elif record.done == "pointer" and record.before is not None:
        replace(path, record.before.encode())
    elif record.done == "link" and record.before is not None:
        point(path, record.before)


def read_records(folder: Path) -> list[QuarantineRecord]:
    """The records in a folder's `.unbroken-set-aside/`, oldest first."""
    records = []
    try:
        with own_folder(folder / SET_ASIDE, make=False) as held:
            for note in held.glob("*" + RECORD_SUFFIX):
                try:
                    records.append(msgspec.json.decode(note.read_bytes(), type=QuarantineRecord))
                except (OSError, msgspec.DecodeError):
                    continue
    except (OSError, NotOurFolder):
        return []  # there are none of ours
    return sorted(records, key=lambda record: record.at)


# ----- small file operations -----


def _same_file(one: os.stat_result, other: os.stat_result) -> bool:
    same = (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
    return same and (stat.S_ISDIR(one.st_mode) or one.st_mtime_ns == other.st_mtime_ns)


def _put_back(moved: Path, path: Path) -> None:
    """Move it back, unless something is there again."""
    if not os.path.lexists(path):
        os.rename(moved, path)


def _is_torn(moved: Path, job: str) -> bool:
    """Whether what this job moved aside under this name is a file that is of no use."""
    note = moved.with_name(moved.name + RECORD_SUFFIX)
    try:
        if msgspec.json.decode(note.read_bytes(), type=QuarantineRecord).job != job:
            return False
    except (OSError, msgspec.DecodeError):
        return False
    found = inspect(moved) if moved.is_file() else None
    return found is not None and not found.complete


def _unused(home: Path, name: str) -> str:
    unused, number = name, 1
    while os.path.lexists(home / unused):
        number += 1
        unused = f"{name}.{number}"
    return unused


def replace(path: Path, data: bytes) -> None:
    """Replace a small file atomically and durably."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:  # never through a link that somebody has put there
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def keep_record(folder: Path, name: str, record: QuarantineRecord) -> None:
    with own_folder(folder / SET_ASIDE) as held:
        replace(held / _unused(held, f"{name}{RECORD_SUFFIX}"), msgspec.json.encode(record))


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse it
    finally:
        os.close(descriptor)


# ----- safe copies of single files that a script overwrites in place -----

COPIES_KEPT: Final = 2
_PASSING: Final = ".tmp-"
_ABANDONED_S: Final = 900.0
"""After so long, what another node began to copy is no reason to wait."""
_FICLONE: Final = 0x40049409
_FREE_SHARE: Final = 0.1
"""Share of the file system that copies leave free."""


def keep_copy(path: Path, is_own: Callable[[Path], bool] = lambda _: True) -> Checkpoint | None:
    """A copy of a complete single file that is overwritten in place; None when none was made, or there is one already.

    It is a reflink where the file system can, else a plain copy where space allows. The file must not change
    meanwhile, and the copy is read like any checkpoint before it counts. The two newest copies are kept, so one is
    always whole. They are in `.unbroken-copies/` next to the file. `is_own`: whether an earlier copy is this job's, and
    may be deleted. Never raises OSError: without space or permission the run goes on without a copy.
    """
    folder = path.parent / COPIES
    try:
        with own_folder(folder) as held:
            return _kept(path, folder, held / path.name, is_own)
    except (OSError, NotOurFolder):
        return None


def _kept(path: Path, folder: Path, home: Path, is_own: Callable[[Path], bool]) -> Checkpoint | None:
    """`home`: in `folder`, which is held."""
    passing = passing_folder(home)
    try:
        before = path.stat()
        target = home / f"{before.st_mtime_ns}{path.suffix}"
        if os.path.lexists(target) or _another_copies(home):
            return None
        passing.mkdir(parents=True, exist_ok=True)
        temporary = passing / f"copy{path.suffix}"
        if not copy_file(path, temporary, before) or _changed(path, before):
            return None
        found = inspect(temporary)
        if found is None or not found.complete:
            return None
        os.rename(temporary, target)
        named = folder / path.name
        _drop_old_copies(home, target, lambda copy: is_own(named / copy.name))
        step = found.step if found.step is not None else step_in_name(path.name)
        return msgspec.structs.replace(found, path=str(named / target.name), step=step, copy_of=str(path))
    finally:
        shutil.rmtree(passing, ignore_errors=True)


def passing_folder(home: Path) -> Path:
    """Where this process writes before it renames; agents of other nodes may use the same shared folder."""
    return home / f"{_PASSING}{os.uname().nodename}-{os.getpid()}"


def _another_copies(home: Path) -> bool:
    """Whether another node copies the same file just now. What an agent that died left behind is cleared away."""
    own = f"{_PASSING}{os.uname().nodename}-"
    busy = False
    for folder in home.glob(_PASSING + "*"):
        if folder.name.startswith(own) and not os.path.exists(f"/proc/{folder.name.removeprefix(own)}"):
            shutil.rmtree(folder, ignore_errors=True)
        elif time.time() - folder.stat().st_mtime < _ABANDONED_S:
            busy = True
    return busy


def copy_file(source: Path, target: Path, stat: os.stat_result, spare_space: bool = True) -> bool:
    """Copy content, mode and times; False when there is no space for it or the length differs.

    Not synced: that would take ten times as long, and whatever a crash of the node leaves is read before it is used.
    """
    if not _clone(source, target):
        if spare_space and not _has_space(target, stat.st_size):
            return False
        shutil.copyfile(source, target)
    os.chmod(target, stat.st_mode & 0o777)
    os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return os.stat(target).st_size == stat.st_size


def _clone(source: Path, target: Path) -> bool:
    """Share the file's blocks, where the file system can (btrfs, XFS): no time, no space."""
    with open(source, "rb") as reader, open(target, "wb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            return False
    return True


def _has_space(near: Path, size: int) -> bool:
    """Whether the file system stays a tenth free, or holds two more of these."""
    usage = os.statvfs(near.parent)
    left = usage.f_bavail * usage.f_frsize - size
    return left >= min(_FREE_SHARE * usage.f_blocks * usage.f_frsize, 2 * size)


def _changed(path: Path, before: os.stat_result) -> bool:
    now = path.stat()
    return (now.st_mtime_ns, now.st_size, now.st_ino) != (before.st_mtime_ns, before.st_size, before.st_ino)


def same_version(copy: os.stat_result, path: Path) -> bool:
    try:
        now = path.stat()
    except OSError:
        return False
    return (now.st_size, now.st_mtime_ns) == (copy.st_size, copy.st_mtime_ns)


def _drop_old_copies(home: Path, newest: Path, is_own: Callable[[Path], bool]) -> None:
    """Keep the newest copies by the time in their names."""
    copies = [entry for entry in home.iterdir() if not entry.name.startswith(".") and entry.stem.isdigit()]
    copies = [entry for entry in copies if entry == newest or is_own(entry)]
    copies.sort(key=lambda entry: int(entry.stem), reverse=True)
    for old in copies[COPIES_KEPT:]:
        old.unlink(missing_ok=True)


# ----- tracker files, small files and links that name a checkpoint that was moved aside -----


def mend_pointers(folder: Path, chosen: Checkpoint | None, bounds: Bounds | None = None) -> list[QuarantineRecord]:
    """Make what names a checkpoint in a folder name `chosen`; without one, what names nothing moves aside.

    Links (`latest -> step-100`) and small files (`latest.txt`) are mended where this job moved away what they name.
    Tracker files that are missing are written where the format needs one (`chosen.format`). What is not the job's is
    left as it is. Raises OSError.
    """
    bounds = bounds or GivenFolders()
    if chosen is not None and Path(chosen.path).parent != folder:
        chosen = None
    name = Path(chosen.path).name if chosen is not None else ""
    records: list[QuarantineRecord] = []
    aside = {one.path for one in read_records(folder) if one.done == "set_aside" and one.job == bounds.job}
    inside = sorted(folder.iterdir()) if aside else []
    for link in filter(Path.is_symlink, inside):
        before = os.readlink(link)
        if not link.exists() and str(folder / before) in aside and not bounds.why_not(link):
            why = f"it points to {before}, which was moved aside"
            records.append(_mended("link", link, before, name, why, bounds))
    names = {os.path.basename(path) for path in (*aside, *(one.path for one in records if one.done == "set_aside"))}
    for path in inside:
        if path.suffix not in ("", ".txt") or path.name in TRACKERS or path.is_symlink() or not path.is_file():
            continue
        text = "" if bounds.why_not(path) else read_pointer(path) or ""
        named = os.path.basename(text)
        if named in names and not os.path.lexists(folder / named):
            why = f"it names {named}, which was moved aside, and there is no complete one"
            records.append(_mended("pointer", path, text, name and text.removesuffix(named) + name, why, bounds))
    for path in (folder / tracker for tracker in TRACKERS if not (folder / tracker).is_symlink()):
        records += () if bounds.why_not(path) else _mended_tracker(path, chosen, bounds)
    return records


def _mended_tracker(path: Path, chosen: Checkpoint | None, bounds: Bounds) -> list[QuarantineRecord]:
    before, after = read_pointer(path), ""
    stale = stale_pointer(path) is not None
    if chosen is not None and chosen.format == TRACKERS[path.name]:
        after = str(chosen.step) if chosen.format == "megatron" else Path(chosen.path).name
    elif chosen is not None and before and chosen.step is not None and stale:  # others use these names, too
        after = str(chosen.step) if before.isdigit() else Path(chosen.path).name
    if (after and after == before) or not (after or stale):
        return []
    why = "it names a checkpoint that is not there, and there is no complete one"
    return [_mended("pointer", path, before, after, why, bounds)]


def _mended(done: str, path: Path, before: str | None, after: str, why: str, bounds: Bounds) -> QuarantineRecord:
    """Have a link or a small file name `after`; where that is empty, move it aside."""
    if not after:
        return set_aside(path, why, bounds)
    record = QuarantineRecord(done=done, path=str(path), before=before, after=after, at=time.time())
    if done == "link":
        point(path, after)
    else:
        replace(path, after.encode())
    bounds.changed(path)
    keep_record(path.parent, path.name, record)
    return record


def restore(copy: Path, path: Path, bounds: Bounds | None = None) -> bool:
    """Put a safe copy where the script expects its checkpoint; the copy stays. Raises OSError, PreparationError.

    What stands there now is moved aside first. Repeating it changes nothing: False.
    """
    bounds = bounds or GivenFolders()
    if same_version(copy.stat(), path):
        return False
    with own_folder(copy.parents[1], make=False) as held, around_of(path) as there:
        kept_in = held / copy.parent.name
        passing = passing_folder(kept_in)
        passing.mkdir(exist_ok=True)
        try:
            temporary = passing / f"restored{path.suffix}"
            kept = os.stat(kept_in / copy.name, follow_symlinks=False)
            if not copy_file(kept_in / copy.name, temporary, kept, spare_space=False):
                raise PreparationError(f"the safe copy {copy} changed while it was read: is another job using it?")
            if os.path.lexists(path):
                set_aside(path, f"replaced by its safe copy {copy.name}", bounds)
            _place(temporary, there)
            bounds.changed(path)
            sync_folder(there.parent)
        finally:
            shutil.rmtree(passing, ignore_errors=True)
    return True


def _place(temporary: Path, path: Path) -> None:
    """Never over what somebody else has put there meanwhile."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if not os.path.lexists(path):
            os.rename(temporary, path)


# ----- before a restart -----

WRITER_WAIT_S: Final = 10.0
"""How long a checkpoint that a live process writes is waited for."""


def prepare(preparations: Sequence[Preparation], bounds: Bounds | None = None) -> list[str]:
    """Carry out preparations in their order, then mend tracker files; what was done, one sentence each.

    What is outside `bounds`, whoever asked for it, is left in place, and so is what a process of somebody else's has
    open. May be repeated after a crash in the middle. The ranks must be dead: a checkpoint that a live process of the
    job still writes is refused. Raises PreparationError.
    """
    bounds = bounds or GivenFolders()
    done: list[str] = []
    mend: set[Path] = set()
    left: set[str] = set()
    restored = {step.path: Path(step.copy) for step in preparations if isinstance(step, Restore)}
    for step in preparations:
        path = Path(step.path)
        try:
            if isinstance(step, Restore):
                done += _bring_back(step, bounds) if step.path not in left else []
            elif isinstance(step, PutBack):
                sentences, folder = _put_back_again(path, bounds)
                done += sentences
                mend |= {folder} if folder is not None else set()
            elif path.name in TRACKERS:
                strange = bounds.why_not(path) if os.path.lexists(path) else "it is not there"
                done += [f"{path} was left in place: {strange}"] if strange else []
                mend |= set() if strange else {path.parent}
            else:
                sentences, moved = _put_aside(path, step, restored.get(step.path), bounds)
                done += sentences
                mend |= {path.parent} if moved or not bounds.why_not(path) else set()
                left |= set() if moved else {step.path}
        except OSError as error:
            raise _explained(step, error) from error
    for folder in sorted(mend):
        try:
            done += [_described(record) for record in mend_pointers(folder, newest(bounds.inside(folder)), bounds)]
        except NotOurFolder as error:
            done.append(f"the tracker files in {folder} were left as they are: {error}")
        except OSError as error:
            raise PreparationError(f"could not mend the tracker files in {folder}: {error}") from error
    return done


def _bring_back(step: Restore, bounds: Bounds) -> list[str]:
    copy, path = Path(step.copy), Path(step.path)
    strange = _why_not_brought_back(copy, path, bounds)
    strange = strange or (bounds.why_not(path) if os.path.lexists(path) else "")
    if strange:
        return [f"{path} was left in place, and not replaced by {copy}: {strange}"]
    try:
        if not restore(copy, path, bounds):
            return []
    except NotOurFolder as error:
        return [f"{path} was left in place, and not replaced by {copy}: {error}"]
    return [f"{path} was restored from its safe copy {copy}"]


def _why_not_brought_back(copy: Path, path: Path, bounds: Bounds) -> str:
    """Why a safe copy cannot be restored to `path`; empty when it can."""
    strange = bounds.why_not(copy) or bounds.why_not_placed(copy, path)
    if strange:
        return strange
    try:
        with own_folder(copy.parents[1], make=False):
            return ""
    except (OSError, NotOurFolder) as error:
        return str(error)


def _put_aside(path: Path, step: SetAside, copy: Path | None, bounds: Bounds) -> tuple[list[str], bool]:
    """What was done, in words, and whether the path is free now."""
    if not os.path.lexists(path) or (copy is not None and copy.exists() and same_version(copy.stat(), path)):
        return [], True
    if copy is not None and (strange := _why_not_brought_back(copy, path, bounds)):
        return [f"{path} was left in place, and not replaced by {copy}: {strange}"], False
    until = time.monotonic() + WRITER_WAIT_S
    while True:
        strange = bounds.why_not(path)
        writer, is_ours = ("", True) if strange else user_of(path, bounds.marks)
        if strange or not is_ours:
            return [f"{path} was left in place: {strange or f'{writer} has it open'}"], False
        if not writer:
            break
        if time.monotonic() > until:
            raise PreparationError(
                f"{path} is still being written by {writer}: wait for it or end it, then `unbroken restart`"
            )
        time.sleep(0.1)  # a process that saves in the background may outlive its rank
    why = step.why
    if why.startswith(INCOMPLETE):
        found = inspect(path)
        if found is not None and found.complete:
            return [f"{path} was left in place: it has become complete"], False
        why = INCOMPLETE + found.why if found is not None else why
    path = bounds.smallest(path)
    try:
        record = set_aside(path, why, bounds)
    except NotOurFolder as error:
        return [f"{path} was left in place, although it cannot be used ({why}): {error}"], False
    return [f"{path} was moved to {record.moved_to}: {why}"], True


def _put_back_again(path: Path, bounds: Bounds) -> tuple[list[str], Path | None]:
    """Undo a rollback's move: what was done, in words, and the folder whose tracker files are to be mended.

    With it go the small files and links that the rollback changed, where nobody has changed them since.
    """
    record = next(filter(None, (_rolled_back(one, bounds) for one in (path, path.parent))), None)
    if record is None:
        return [], None  # it is back already, or never was moved
    there, folder = Path(record.path), Path(record.path).parent
    if os.path.lexists(there):
        kept = folder / COPIES / there.name
        copies = list(kept.iterdir()) if kept.is_dir() and not kept.is_symlink() else []
        if not any(same_version(os.lstat(copy), there) for copy in copies) or bounds.why_not(there):
            return [f"{record.moved_to} was not put back: {there} was written again since. Both are kept"], None
        set_aside(there, "it was the copy of an earlier step, and the rollback to it is undone", bounds)
    undo(record)
    done = [f"{record.path} was put back from {record.moved_to}"]
    for pointer in read_records(folder):
        if pointer.done in ("pointer", "link") and pointer.at >= record.at and not pointer.why:
            done += _pointed_back(pointer, bounds)
    return done, folder


def _rolled_back(path: Path, bounds: Bounds) -> QuarantineRecord | None:
    """The newest record of a whole checkpoint of this job that a rollback moved away from there."""
    home = path.parent / SET_ASIDE
    found = [
        record
        for record in read_records(path.parent)
        if record.done == "set_aside" and record.path == str(path) and record.job == bounds.job
        if record.why.startswith(ROLLED_BACK) and Path(record.moved_to).parent == home
    ]
    return found[-1] if found else None


def _pointed_back(record: QuarantineRecord, bounds: Bounds) -> list[str]:
    path = Path(record.path)
    if not record.before or not os.path.lexists(path) or bounds.why_not(path):
        return []
    now = os.readlink(path) if record.done == "link" else read_pointer(path)
    named = path.parent / record.before
    if now != record.after or path.is_symlink() != (record.done == "link") or not named.exists():
        return []
    undo(record)
    bounds.changed(path)
    return [f"{path} names {record.before} again"]


def _described(record: QuarantineRecord) -> str:
    if record.done != "set_aside":
        return f"{record.path} names {record.after} now; before: {record.before or 'nothing'}"
    return f"{record.path} was moved to {record.moved_to}: no complete checkpoint is left for it to name"


def _explained(step: Preparation, error: OSError) -> PreparationError:
    what = {SetAside: "move aside", Restore: "put back the safe copy for", PutBack: "put back"}[type(step)]
    hint = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some of your quota",
        errno.EACCES: "give this user write permission to its folder",
        errno.EPERM: "give this user write permission to its folder",
        errno.EROFS: "the file system is mounted read-only",
        errno.ENOENT: "it is gone: choose another checkpoint",
    }.get(error.errno or 0, "check the storage")
    return PreparationError(f"could not {what} {step.path}: {error.strerror or error}; {hint}, then `unbroken restart`")
