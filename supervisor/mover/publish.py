"""Publishing: saves appear in the shared folder under their own names, whole or not at all.

Every node copies its own part into our folder there (`.unbroken-publishing`), file after file: a file has its name only
once it is whole. When all parts lie there one node commits: it moves the files to their final names, data first, and
last the file that says that the data is there. A record in the job folder is written before, so that whoever goes on
after a crash knows what is ours; what is not ours is never replaced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Final, Literal

import msgspec

from recovery.tiers import (
    ENDS_IN_A_FILE,
    PUBLISHING,
    PublishedSave,
    Save,
    SaveKey,
    SavePart,
    commit_groups,
    tracker_of,
    why_bad_name,
    why_bad_save,
)
from supervisor.files import write_atomically
from supervisor.mover.copying import (
    KEEP_FREE,
    CopyError,
    CopyPace,
    checked,
    copy,
    look,
    make_private,
    need_room,
    open_folder,
    remove_ours,
    sync_folder,
)
from supervisor.mover.parts import Version

RECORDS: Final = "published"
"""In the job folder."""
RECORD_BYTES: Final = 16 << 20
RECORDS_READ: Final = 512
"""The newest; an older one is read when its save is asked for."""
PUBLISHED_REPORTED: Final = 4
COMMITTING: Final = "committing"
"""In our folder there, of all jobs: a link for each name under which a save is about to appear. It leads nowhere, and
says which job that is. It goes when the save is there."""
NO_LINKS: Final = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, 524))
"""A file system that knows no links (524: as Linux' NFS says it): two jobs are not told apart there."""


class PublishRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`published/<digest>.json` in the job folder: what is, or is about to be, under a save's final name."""

    save: Save
    state: Literal["begun", "whole"]
    at: float
    versions: dict[str, Version] = {}
    """Of the files under their final names, once it is whole."""


class StagedPart(msgspec.Struct, frozen=True, kw_only=True):
    """`part-<node>.json` beside the staged files of a save: which of them are this node's."""

    name: str
    attempt: int
    stamp: int
    files: tuple[str, ...]

    @property
    def key(self) -> SaveKey:
        return SaveKey(self.name, self.attempt, self.stamp)


def job_digest(job_dir: Path, token: str) -> str:
    """Tells one job from another that used the same folders before."""
    key = hashlib.sha256(token.encode()).digest()
    return hashlib.blake2b(os.fsencode(os.path.realpath(job_dir)), digest_size=16, key=key).hexdigest()


def key_folder(key: SaveKey) -> str:
    return hashlib.blake2b(f"{key.name}\0{key.attempt}\0{key.stamp}".encode(), digest_size=16).hexdigest()


class Publisher:
    """One thread stages and commits; `is_published` and `published` may be asked by others."""

    def __init__(self, target: Path, job_dir: Path, node: str) -> None:
        self.target = target
        self._records = job_dir / RECORDS
        self._node = node
        job = hashlib.blake2b(os.fsencode(os.path.realpath(job_dir)), digest_size=8).hexdigest()
        self._home = target / PUBLISHING / job
        self._known: dict[str, PublishRecord] = {}
        """By the name of the save."""
        self._read: dict[str, int] = {}
        self._whole: dict[SaveKey, PublishedSave] = {}
        """What is published, the newest first. Replaced, never changed."""

    def is_published(self, key: SaveKey) -> bool:
        return key in self._whole

    def published(self, also: Set[SaveKey] = frozenset()) -> tuple[PublishedSave, ...]:
        """The newest ones, and those of `also`."""
        whole = self._whole
        return tuple(one for at, (key, one) in enumerate(whole.items()) if at < PUBLISHED_REPORTED or key in also)

    # ----- staging -----

    def stage(
        self, part: SavePart, source: Path, pace: CopyPace, count: Callable[[int], None], wanted: Callable[[], bool]
    ) -> bool:
        """Copy this node's part into our folder there. False: it is not `wanted` any more.

        Raises OSError, CopyError.
        """
        data = self._data(part.key)
        self._note_staged(part, data)
        missing = [file for file in part.files if not self._is_staged(source, data, file.name)]
        need_room(data, sum(file.size for file in missing))
        for file in missing:
            if not wanted():
                return False
            copied = copy(source, file.name, data, file.name, pace, count)
            if copied.size != file.size:
                raise CopyError(f"{file.name} has changed")
        return True

    @staticmethod
    def _is_staged(source: Path, data: Path, name: str) -> bool:
        there, here = look(data, name), look(source, name)
        if here is None:
            raise CopyError(f"{name[:80]!r} is gone")
        return there is not None and (there.st_size, there.st_mtime_ns) == (here.st_size, here.st_mtime_ns)

    def _data(self, key: SaveKey) -> Path:
        """Where the files of a save wait. Made for this user alone. Raises OSError, CopyError."""
        make_private(self.target / PUBLISHING)
        make_private(self._home)
        make_private(self._home / key_folder(key))
        return make_private(self._home / key_folder(key) / "data")

    def _note_staged(self, part: SavePart, data: Path) -> None:
        """Whose files these will be; what this node put there before, and its part has no more, goes."""
        note = data.parent / f"part-{self._node}.json"
        names = tuple(file.name for file in part.files)
        before = _read_note(note)
        if before is None or before.files != names:
            _remove_files(data, [name for name in before.files if name not in names] if before is not None else [])
            staged = StagedPart(name=part.name, attempt=part.attempt, stamp=part.stamp, files=names)
            write_atomically(note, msgspec.json.encode(staged), 0o600)
        (data.parent / f"going-{self._node}.json").unlink(missing_ok=True)  # it is wanted after all

    def staged_by(self, node: str) -> dict[SaveKey, float]:
        """Saves of which a node, or an earlier mover of it, has put files there, and the time (Unix) of its newest."""
        try:
            folders = [entry.path for entry in os.scandir(self._home) if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return {}
        if self._home.is_symlink() or self._home.parent.is_symlink():
            return {}  # not made by us
        found: dict[SaveKey, float] = {}
        for folder in folders:
            note, listed = self._note_of(Path(folder), node)
            if note is not None:
                there = [look(Path(folder) / "data", name) for name in note.files]
                there.append(look(Path(folder), listed))  # the node's own clock may be wrong
                found[note.key] = max((about.st_mtime for about in there if about is not None), default=0.0)
        return found

    @staticmethod
    def _note_of(folder: Path, node: str) -> tuple[StagedPart | None, str]:
        """What a node has staged of a save, also where its removal has begun; the name of the note."""
        for listed in (f"part-{node}.json", f"going-{node}.json"):
            if (note := _read_note(folder / listed)) is not None:
                return note, listed
        return None, ""

    def drop(self, key: SaveKey, node: str = "") -> None:
        """Remove what this node, or another one, staged of a save that will not be published. Others' files stay. A
        save whose commit has begun is left to it: each side first says what it is about to do, then looks at what the
        other one has said. Raises OSError."""
        node = node or self._node
        if self._is_begun(key):
            return
        folder = self._home / key_folder(key)
        note, listed = self._note_of(folder, node)
        if note is None or note.key != key or folder.is_symlink():
            return
        going = folder / f"going-{node}.json"
        try:
            os.rename(folder / listed, going)
            if self._claimant(key.name) or self._is_begun(key):
                os.rename(going, folder / f"part-{node}.json")
                return
        except FileNotFoundError:
            return  # of a node that is gone: another one removes it as well
        _remove_files(folder / "data", note.files)
        going.unlink(missing_ok=True)  # last: it says what is still to be removed
        for empty in (folder / "data", folder):
            with contextlib.suppress(OSError):  # another node's files are in it
                os.rmdir(empty)

    # ----- the record -----

    def read_records(self) -> None:
        """What the job has published, whoever did it. Raises OSError."""
        try:
            names = [entry.name for entry in os.scandir(self._records) if entry.name.endswith(".json")]
        except FileNotFoundError:
            return
        found: list[tuple[int, str]] = []
        for name in names:
            try:
                found.append((os.lstat(self._records / name).st_mtime_ns, name))
            except FileNotFoundError:
                continue
        newest = sorted(found)[-RECORDS_READ:]
        for changed, name in newest:
            if self._read.get(name) != changed:
                self._read_record(name)
        self._read = {name: changed for changed, name in newest}
        self._tell()

    def _read_record(self, file: str) -> None:
        path = self._records / file
        try:
            about = os.lstat(path)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_size > RECORD_BYTES:
                return
            record = msgspec.json.decode(path.read_bytes(), type=PublishRecord)
        except (FileNotFoundError, msgspec.DecodeError):
            return
        if not why_bad_save(record.save) and record_file(record.save.name) == file:
            self._known[record.save.name] = record

    def _record(self, name: str) -> PublishRecord | None:
        """The newest one of a save, whoever wrote it. Raises OSError."""
        self._read_record(record_file(name))
        return self._known.get(name)

    def _keep(self, record: PublishRecord) -> None:
        self._records.mkdir(mode=0o700, exist_ok=True)
        write_atomically(self._records / record_file(record.save.name), msgspec.json.encode(record), 0o600)
        self._known[record.save.name] = record
        self._tell()

    def _tell(self) -> None:
        oldest = sorted(self._known.values(), key=lambda record: record.at)[: -2 * RECORDS_READ]
        for record in oldest:
            del self._known[record.save.name]
        whole = [record for record in self._known.values() if record.state == "whole"]
        whole.sort(key=lambda record: (record.save.modified_at, record.at), reverse=True)
        self._whole = {
            record.save.key: PublishedSave(
                name=record.save.name,
                attempt=record.save.attempt,
                stamp=record.save.stamp,
                format=record.save.format,
                step=record.save.step,
                modified_at=record.save.modified_at,
                size_bytes=record.save.size_bytes,
            )
            for record in whole
        }

    def save_of(self, key: SaveKey) -> Save | None:
        """A published save with its files, if they are there as they were published."""
        record = self._record(key.name)
        if record is None or record.state != "whole" or record.save.key != key:
            return None
        return record.save if self._is_as_recorded(record) else None

    def _is_as_recorded(self, record: PublishRecord) -> bool:
        return all(
            (found := look(self.target, name)) is not None and (found.st_size, found.st_mtime_ns) == tuple(version)
            for name, version in record.versions.items()
        )

    # ----- committing -----

    def why_not_free(self, save: Save) -> str:
        """Why the final name cannot be used; empty when it can, or when what is there is ours."""
        if not os.path.lexists(self.target / save.name):
            return ""
        record = self._record(save.name)
        if record is not None and (record.state == "begun" or self._is_as_recorded(record)):
            return ""
        return f"{self.target / save.name} is there already, and this job did not put it there"

    def commit(self, save: Save) -> None:
        """All parts are staged: let the save appear. May be repeated after a crash at any point.

        Raises OSError; CopyError where something is missing, or somebody else's is in the way.
        """
        self.read_records()
        record = self._record(save.name)
        if record is not None and record.save.key == save.key and record.state == "whole":
            self._let_go(save.name)
            self._end_commit(save)
            return
        if why := why_bad_save(save):
            raise CopyError(why)
        self._claim(save.name)
        if record is None or record.save.key != save.key:
            try:
                self._begin_commit(save, record)
            except BaseException:
                self._let_go(save.name)
                raise
        self._move(save, self._data(save.key))
        versions = {file.name: self._version(file.name, file.size) for file in save.files}
        self._let_go(save.name)  # before: what is published already is not committed once more after a crash
        self._keep(PublishRecord(save=save, state="whole", at=time.time(), versions=versions))
        self._end_commit(save)

    def _begin_commit(self, save: Save, record: PublishRecord | None) -> None:
        if why := self.why_not_free(save):
            raise CopyError(why)
        data = self._data(save.key)
        if going := next((one.name for one in data.parent.glob("going-*.json")), ""):
            raise CopyError(f"{save.name} is being removed: {data.parent / going}")
        self._require(save, data)
        self._set_back(save, record)
        self._keep(PublishRecord(save=save, state="begun", at=time.time()))

    def _end_commit(self, save: Save) -> None:
        self._tell()
        self._point(save)
        remove_ours(self._home / key_folder(save.key))

    def _is_begun(self, key: SaveKey) -> bool:
        record = self._record(key.name)
        return record is not None and record.save.key == key and record.state == "begun"

    def _claims(self) -> Path:
        return self.target / PUBLISHING / COMMITTING

    def _claim(self, name: str) -> None:
        """Until `_let_go` no other job lets a save of this name appear. Raises OSError, CopyError."""
        make_private(self.target / PUBLISHING)
        claim = make_private(self._claims()) / record_file(name)
        try:
            os.symlink(self._home.name, claim)  # made with what it says, in one step
        except FileExistsError:
            if self._claimant(name) == self._home.name:
                return  # of a commit that was cut off
            raise CopyError(
                f"another job is publishing {self.target / name} as well: name another --publish-to for one of them. "
                f"If no other job uses this folder, remove {claim}"
            ) from None
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise

    def _claimant(self, name: str) -> str:
        """The job that lets a save of this name appear; empty: none."""
        try:
            return os.readlink(self._claims() / record_file(name))
        except FileNotFoundError:
            return ""

    def _let_go(self, name: str) -> None:
        if self._claimant(name) == self._home.name:
            (self._claims() / record_file(name)).unlink(missing_ok=True)

    def _require(self, save: Save, data: Path) -> None:
        for file in save.files:
            found = look(data, file.name)
            if found is None or found.st_size != file.size:
                raise CopyError(f"{file.name} is not staged yet")

    def _set_back(self, save: Save, record: PublishRecord | None) -> None:
        """An older version of ours makes room; it is kept until the next one does."""
        final = self.target / save.name
        if record is None or not os.path.lexists(final) or not final.is_dir():
            return  # a file is replaced in one step
        replaced = make_private(self._home / "replaced") / key_folder(SaveKey(save.name, 0, 0))
        remove_ours(replaced)
        os.rename(final, replaced)

    def _move(self, save: Save, data: Path) -> None:
        """Every step leaves what a reader takes for no save, or the whole one."""
        single = [file.name for file in save.files] == [save.name]
        parts = tuple(save.name.split("/"))
        os.close(open_folder(self.target, parts[:-1], make=True))
        if not single and save.format not in ENDS_IN_A_FILE:
            there = all((found := look(self.target, one.name)) and found.st_size == one.size for one in save.files)
            if os.path.lexists(data / save.name) and not there:  # else it was moved, and staged once more
                self._require(save, data)
                os.rename(data / save.name, self.target / save.name)
                sync_folder((self.target / save.name).parent)
            return
        sizes = {file.name: file.size for file in save.files}
        for group in commit_groups(sizes):
            folders: set[Path] = set()
            for name in group:
                os.close(open_folder(self.target, tuple(name.split("/"))[:-1], make=True))
                final = self.target / name
                if os.path.lexists(data / name):
                    os.rename(data / name, final)
                folders.add(final.parent)
            for folder in folders:
                sync_folder(folder)
            for name in group:  # before the file that says that they are there
                self._version(name, sizes[name])

    def _version(self, name: str, size: int) -> Version:
        found = look(self.target, name)
        if found is None or found.st_size != size:
            raise CopyError(f"{name} is not in {self.target} as it was put there")
        return found.st_size, found.st_mtime_ns

    def _point(self, save: Save) -> None:
        """The tracker file names the newest published save: only forward, and only if it is ours, or not there."""
        tracker = tracker_of(save)
        if tracker is None or self._newer_published(save):
            return
        path = self.target / tracker.name
        texts = {named.text for one in self._known.values() if (named := tracker_of(one.save)) is not None}
        try:
            before = path.read_text(errors="replace").strip() if path.exists() else None
        except OSError as error:
            raise CopyError(f"{path} cannot be read: {error.strerror}") from error
        if before is not None and before not in texts:
            raise CopyError(f"{path} names {before[:40]!r}, which this job did not publish: it is left as it is")
        if before != tracker.text:
            write_atomically(path, tracker.text.encode())

    def _newer_published(self, save: Save) -> bool:
        folder = save.name.rpartition("/")[0]
        return any(
            one.save.format == save.format
            and one.save.name.rpartition("/")[0] == folder
            and one.state == "whole"
            and (one.save.step or -1) > (save.step or -1)
            and one.save.attempt >= save.attempt
            for one in self._known.values()
        )


def record_file(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest() + ".json"


def _read_note(path: Path) -> StagedPart | None:
    try:
        with open(path, "rb") as file:
            note = msgspec.json.decode(file.read(RECORD_BYTES), type=StagedPart)
    except (OSError, msgspec.DecodeError):
        return None
    return None if any(why_bad_name(name) for name in (note.name, *note.files)) else note


def _remove_files(data: Path, names: Sequence[str]) -> None:
    """Files of ours, and the folders that are empty then. Raises OSError."""
    if data.is_symlink() or data.parent.is_symlink():
        return  # not made by us: what it leads to is not ours
    for name in names:
        parts = checked(name)
        try:
            folder = open_folder(data, parts[:-1])
        except FileNotFoundError:
            continue
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(parts[-1], dir_fd=folder)
        finally:
            os.close(folder)
        for depth in range(len(parts) - 1, 0, -1):
            try:
                os.rmdir(data.joinpath(*parts[:depth]))
            except OSError:
                break  # something else is in it


# ----- before anything runs -----


def why_not_published(publish_to: Path, checkpoint_dir: Path) -> str:
    """Why nothing can be published to a folder, in words and with what to do; empty when it can."""
    try:
        about = os.stat(publish_to)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return f"{publish_to} does not exist: make it, or name another folder"
        return f"{publish_to} cannot be looked at: {error.strerror}"
    if not stat.S_ISDIR(about.st_mode):
        return f"{publish_to} is a file: name a folder"
    target, local = os.path.realpath(publish_to), os.path.realpath(checkpoint_dir)
    if target == local or target.startswith(f"{local}/"):
        return f"{publish_to} is the same folder as --checkpoint-dir {checkpoint_dir}, or in it: name another one"
    if local.startswith(f"{target}/"):
        return f"--checkpoint-dir {checkpoint_dir} is in {publish_to}: name a folder on this node's own disk"
    try:
        with tempfile.TemporaryFile(dir=publish_to):
            pass
    except OSError as error:
        return f"{publish_to} cannot be written: {error.strerror}. Give it write permission, or name another folder"
    return why_full(publish_to)


def why_full(folder: Path) -> str:
    """Why nothing is copied to a folder that can be written; empty when there is room."""
    try:
        need_room(folder, 0)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            return f"{folder} cannot be looked at: {error.strerror}"
        return f"{folder} has less than {KEEP_FREE:.0%} free, which copies of checkpoints leave free: make room"
    return ""


def same_file_system(one: Path, other: Path) -> bool:
    try:
        return os.stat(one).st_dev == os.stat(other).st_dev
    except OSError:
        return False
