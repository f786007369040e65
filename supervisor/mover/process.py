"""The mover: one low-priority process beside an agent. `python -m supervisor.mover.process SETUP` (JSON).

The agent writes `MoverOrders` to its standard input, a line each: always all of what is wanted. The mover answers with
`MoverStatus` lines. It ends when its input does. Threads: one looks at this node's parts, one talks to the peer (one
stream), one publishes, and one for each peer that calls. A file system that hangs holds up only the thread on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from recovery.formats import inspect, inspect_part, load_formats
from recovery.formats.files import SHARD_SUFFIX, step_in_name
from recovery.formats.folders import read_pointer
from recovery.quarantine import NotOurFolder, PreparationError, QuarantineRecord, keep_record, set_aside
from recovery.tiers import (
    PARTS_REPORTED,
    SINGLE_FILES,
    BringBack,
    NodeTiers,
    NotBrought,
    PartFile,
    PartSource,
    Save,
    SaveKey,
    SavePart,
    SnapshotOrders,
    commit_groups,
    tracker_of,
    why_bad_save,
)
from supervisor.files import read_token, write_atomically
from supervisor.logs import configure
from supervisor.mover.copying import CopyError, CopyPace, GaveWay, copy, need_room
from supervisor.mover.parts import LocalParts, Seen
from supervisor.mover.peer import (
    SLOW_AFTER_S,
    USUAL_RATE,
    Mirrors,
    PeerError,
    PeerServer,
    SourcePace,
    TooSlow,
    Wire,
    call,
    fetch_file,
    in_a_hurry,
    send_part,
)
from supervisor.mover.protocol import MoverOrders, MoverSetup, MoverStatus
from supervisor.mover.publish import Publisher, job_digest
from supervisor.mover.snapshots import SnapshotMirror, SnapshotsAsked
from supervisor.wire.authentication import SharedSecret
from supervisor.wire.peers import tls_context

LOOK_EVERY_S: Final = 1.0
AGAIN_S, LONGEST_AGAIN_S = 2.0, 60.0
"""After a failure."""
RECORDS_EVERY_S: Final = 30.0
MARK_EVERY_S, MARK_OLD_S = 20.0, 70.0
"""Of the mark by which nodes see that they share a checkpoint folder."""
FAILED_KEPT: Final = 16
BRING_AGAIN_S, BRING_PAUSE_S = 15.0, 2.0
"""So long a source that does not give what it has is asked again: its mover may just be starting. The agent orders a
save three times, with renewed sources: about a minute in all. Longer, and it takes us for stuck."""
GONE_S: Final = 120.0
"""So long after the script has removed a save, what was staged of it is removed: nobody commits it any more."""
LEFT_S: Final = 3600.0
"""Mirrors so much older than what is published, and their owner sends no newer ones: they are of no use."""
SET_FORWARD: Final = "the checkpoint that it names was brought to this node"
SET_BEFORE: Final = "replaced by the copy that all nodes of the next attempt have"

log = logging.getLogger("unbroken.mover")


class Mover:
    def __init__(self, setup: MoverSetup, say: Callable[[MoverStatus], None]) -> None:
        self._setup = setup
        self._say = say
        self._folder = Path(setup.checkpoint_dir)
        token = read_token(Path(setup.token_file), shared=setup.shared_token)
        self._secret = SharedSecret(token)
        formats, _ = load_formats()
        self._mirrors = Mirrors(self._folder, job_digest(Path(setup.job_dir), token))
        self._others = (0, 0)
        self._parts = LocalParts(
            self._folder,
            self._mirrors.home,
            setup.node,
            lambda path: inspect(path, formats),
            lambda path, names: inspect_part(path, names, formats),
        )
        self._publisher = Publisher(Path(setup.publish_to), Path(setup.job_dir), setup.node)
        self._problems: dict[str, str] = {}
        self._tls_server, self._tls_client = self._tls()
        self._snapshots = SnapshotMirror(setup.node, setup.snapshot_files, self._called, self._tell_snapshots)
        self._server = PeerServer(
            self._mirrors, self._secret, self._offered, tls=self._tls_server, more=self._snapshots.server.handlers
        )
        if "tls" in self._problems:
            self._server.close()  # not without the certificate that was asked for
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._telling = threading.Lock()
        self._orders = MoverOrders()
        self._seen: tuple[Seen, ...] = ()
        self._reported: dict[str, SavePart] = {}
        """Own parts by the save's name, as they last stood still."""
        self._staged: dict[SaveKey, SavePart] = {}
        """As what each was staged: a file may come later."""
        self._gone: dict[SaveKey, float] = {}
        """Staged, but no part of this node any more: since when."""
        self._failed: dict[SaveKey, NotBrought] = {}
        self._counts = {"brought": 0, "mirrored": 0, "published": 0}
        self.bring_again_s = BRING_AGAIN_S
        self.slow_after_s = SLOW_AFTER_S
        self._mirrored: dict[SaveKey, tuple[str, SavePart]] = {}
        """Own part -> the peer that has it, and as what."""
        self._rested = self._brought = 0
        self._cleared = False
        self._bring_problem = ""
        self._shared = False
        self._marked_at = float("-inf")
        self._new_orders = threading.Event()
        self._new_parts = threading.Event()
        self._to_publish = threading.Event()
        self._said: MoverStatus | None = None

    def _tls(self) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
        """Where this node has the certificate of the job; a peer proves itself by the token, not by its name."""
        setup = self._setup
        server = None
        if setup.tls_cert:
            try:
                server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                server.load_cert_chain(setup.tls_cert, setup.tls_key or None)
            except OSError as error:
                self._problem(
                    "tls",
                    f"{setup.node} mirrors for no other node: its certificate {setup.tls_cert} or key cannot be "
                    f"read: {error.strerror or error}",
                )
        client = tls_context(setup.tls_ca) if setup.tls_ca else ssl.create_default_context()
        client.check_hostname = False
        return server, client

    def start(self) -> None:
        if not self._server.stopped:
            self._server.start()
        threads = [self._look_again_and_again, self._serve_peer, self._publish]
        if self._setup.snapshot_files:
            die_first()
            threads += [self._snapshots.run, self._snapshots.run_bringing]
        for target in threads:
            threading.Thread(target=self._guarded, args=(target,), name=target.__name__, daemon=True).start()

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException:
            log.exception("the mover ends, to be started again")
            logging.shutdown()
            os._exit(1)

    def obey(self, orders: MoverOrders) -> None:
        with self._lock:
            self._orders = orders
        for event in (self._new_orders, self._new_parts, self._to_publish):
            event.set()
        self._snapshots.obey(
            SnapshotsAsked(
                orders=orders.snapshots if orders.snapshots is not None and not orders.over else SnapshotOrders(),
                peer=None if self._shared else orders.peer,
                bring=orders.bring_snapshot,
                number=orders.bring_snapshot_number,
            )
        )

    @contextlib.contextmanager
    def _called(self, peer: PartSource) -> Iterator[Wire]:
        wire, connection = call(peer.address, peer.port, self._secret, self._tls_client if peer.tls else None)
        try:
            yield wire
        finally:
            connection.close()

    def _tell_snapshots(self) -> None:
        self._problem("snapshots", self._snapshots.problem)
        self.tell()

    # ----- looking -----

    def _look_again_and_again(self) -> None:
        while True:
            self._new_orders.wait(LOOK_EVERY_S)
            self._new_orders.clear()
            self.look()

    def look(self) -> None:
        with self._looking:
            orders = self._orders
            self._mark()
            seen = tuple(
                self._parts.look(orders.paths, orders.attempt, orders.since, time.monotonic(), at_rest=orders.at_rest)
            )
        with self._lock:
            changed = seen != self._seen
            self._seen = seen
            now = {one.part.key: one.part for one in seen}
            keys = set(now)
            self._staged = {key: part for key, part in self._staged.items() if now.get(key) == part}
            self._report(seen)
            self._mirrors.own_bytes = max((one.part.size_bytes for one in seen[:2]), default=0)
            self._mirrored = {key: peer for key, peer in self._mirrored.items() if key in keys}
            self._rested = orders.rest
        odd = next((one for one in seen if one.odd_name), None)
        self._problem(
            "names",
            f"{odd.part.name} is not copied: the name of {odd.odd_name[:80]!r} in it is not usable elsewhere"
            if odd
            else "",
        )
        if changed:
            self._new_parts.set()
            self._to_publish.set()
        self.tell()

    def _report(self, seen: tuple[Seen, ...]) -> None:
        """What others hear of: parts as they stand still. One that changes is told as it was before."""
        reported: dict[str, SavePart] = {}
        for one in seen:
            before = self._reported.get(one.part.name)
            if one.still or one.part.rewritten:
                reported[one.part.name] = one.part
            elif before is not None and before.key == one.part.key:
                reported[one.part.name] = before
        self._reported = reported

    def _mark(self) -> None:
        """Whether other nodes use this very folder is seen by the marks that they leave in it."""
        now = time.monotonic()
        if now - self._marked_at < MARK_EVERY_S:
            return
        self._marked_at = now
        own = self._mirrors.top / f"here-{self._setup.node}"
        try:
            write_atomically(own, b"", 0o600)
            at = own.stat().st_mtime
            marks = [entry for entry in os.scandir(self._mirrors.top) if entry.name.startswith("here-")]
            others = [entry for entry in marks if entry.name != own.name and at - entry.stat().st_mtime < MARK_OLD_S]
        except OSError as error:
            self._problem("local", f"{self._mirrors.top} cannot be written: {error.strerror}")
            return
        self._problem("local", "")
        self._shared = bool(others)
        if self._shared:
            self._problem(
                "shared",
                f"{self._folder} is shared between nodes ({', '.join(sorted(one.name[5:] for one in others)[:4])}): "
                "nothing is mirrored. Give --checkpoint-dir a folder on each node's own disk",
            )

    def _offered(self, owner: str, key: SaveKey) -> tuple[Path, SavePart] | None:
        """What peers may fetch from the checkpoint folder: own parts, and saves that were brought here whole."""
        if owner == self._setup.node:
            for one in self._seen:
                if one.part.key == key:
                    return self._folder, one.part
        brought = self._parts.brought.get(key.name)
        if brought is None or brought.save.key != key or not self._parts.has_all(brought.save):
            return None
        return self._folder, _part_of(brought.save, owner)

    # ----- the peer: bringing back first, then mirroring -----

    def _serve_peer(self) -> None:
        again_s = AGAIN_S
        while True:
            self._new_parts.clear()
            orders = self._orders
            if orders.bring is not None and orders.bring_number > self._brought:
                self.bring(orders.bring, orders.bring_number)
                continue
            try:
                idle = not self.mirror()
                self._problem("mirror", "")
                again_s = AGAIN_S
            except GaveWay:
                continue
            except (OSError, PeerError, CopyError) as error:
                peer = orders.peer.node if orders.peer is not None else "its peer"
                self._problem("mirror", f"checkpoints of {self._setup.node} are not mirrored to {peer}: {error}")
                idle, again_s = True, min(again_s * 2, LONGEST_AGAIN_S)
            if idle:
                self._new_parts.wait(again_s)

    def mirror(self) -> bool:
        """Send the newest part that the peer lacks. False: there is none. Raises OSError, PeerError, CopyError."""
        peer = self._orders.peer
        if peer is None or self._shared or self._orders.over:
            return False
        todo = next(
            (
                one.part
                for one in self._seen[:2]
                if one.movable and self._mirrored.get(one.part.key) != (peer.node, one.part)
            ),
            None,
        )
        if todo is None:
            return False
        wire, connection = call(peer.address, peer.port, self._secret, self._tls_client if peer.tls else None)
        try:
            send_part(wire, todo, self._folder, CopyPace(), self._count_mirrored)
        finally:
            connection.close()
        with self._lock:
            self._mirrored[todo.key] = (peer.node, todo)
        self.tell()
        return True

    def _count_mirrored(self, more: int) -> None:
        if self._orders.bring is not None and self._orders.bring_number > self._brought:
            raise GaveWay("ranks wait for a checkpoint")
        self._counts["mirrored"] += more

    def _counter(self, tier: str) -> Callable[[int], None]:
        def count(more: int) -> None:
            self._counts[tier] += more

        return count

    def bring(self, wanted: BringBack, number: int) -> None:
        """Have all files of a save here. What cannot be had is told."""
        key = wanted.save.key
        try:
            problem = why_bad_save(wanted.save) or self._fetch_all(wanted, number)
        except (OSError, PeerError, CopyError, PreparationError, NotOurFolder) as error:
            problem = str(error) or repr(error)
        with self._lock:
            if problem and self._orders.bring_number > number:
                pass  # asked anew, with other sources: that one tells how it ends
            elif problem:
                self._failed[key] = NotBrought(name=key.name, attempt=key.attempt, stamp=key.stamp, why=problem[:300])
                while len(self._failed) > FAILED_KEPT:
                    del self._failed[next(iter(self._failed))]
            else:
                self._failed.pop(key, None)
            self._brought, self._bring_problem = number, problem
            self._problem("bring", "")
        self.look()

    def _fetch_all(self, wanted: BringBack, number: int) -> str:
        save = wanted.save
        if not save.files:  # only published: its record has the names
            self._publisher.read_records()
            published = self._publisher.save_of(save.key)
            if published is None:
                return f"{save.name} is not in {self._setup.publish_to} as it was published"
            save = published
        if self._is_shared():
            if self._parts.has_all(save):
                return ""
            return f"{self._folder} is shared between nodes: nothing is replaced there"
        missing = self._missing(save)
        if missing:
            need_room(self._folder, sum(file.size for file in save.files if file.name in missing))
            self._make_way(save, missing)
        deadline = time.monotonic() + self.bring_again_s
        for group in commit_groups(missing):
            problems = self._fetch(wanted, save, group)
            while problems and time.monotonic() < deadline and self._orders.bring_number <= number:
                time.sleep(BRING_PAUSE_S)
                problems = self._fetch(wanted, save, list(problems))
            if problems:
                return f"{next(iter(problems.values()))} ({len(problems)} of {len(missing)} files)"
        self._parts.note_brought(save, missing)
        self._write_tracker(save)
        found = inspect(self._folder / save.name)
        if found is not None and not found.complete:
            return f"{save.name} is not whole although all of it was brought: {found.why}"
        return ""

    def _is_shared(self) -> bool:
        """Looked at once more: a node may have joined just now."""
        with self._looking:
            self._marked_at = float("-inf")
            self._mark()
        return self._shared

    def _missing(self, save: Save) -> list[str]:
        """The files that this node must get. Its own part of this very save stays."""
        own = {one.part.key: one.part for one in self._seen}
        mine = own.get(save.key)
        kept = {file.name: file.size for file in mine.files} if mine is not None else {}
        single = next((part for part in own.values() if part.name == save.name and part.format in SINGLE_FILES), None)
        same = single is not None and single.attempt == save.attempt and single.step == save.step
        if single is not None and same and single.whole and single.step is not None:
            return []  # each node writes a file of its own
        brought = self._parts.brought.get(save.name)
        if brought is not None and brought.save.key == save.key:
            kept |= {name: version[0] for name, version in brought.versions.items()}
        missing: list[str] = []
        for file in save.files:
            try:
                there = os.lstat(self._folder / file.name).st_size
            except OSError:
                there = -1
            if there < 0 or there != file.size or file.name not in kept:
                missing.append(file.name)
        return missing

    def _make_way(self, save: Save, missing: list[str]) -> None:
        """What has the name of a file that is brought is moved aside, not overwritten."""
        for name in missing:
            path = self._folder / name
            if os.path.lexists(path):
                set_aside(path, f"{SET_BEFORE}: step {save.step}")

    def _fetch(self, wanted: BringBack, save: Save, names: list[str], *, patient: bool = False) -> dict[str, str]:
        """The files that could not be had, and why. `patient`: a slow source is kept, the others were slower."""
        sizes = {file.name: (file.size, file.owner) for file in save.files}
        left = list(names)
        problems: dict[str, str] = {}
        rates: dict[PartSource, float] = {}  # of those that were left because they are slow
        for number, source in enumerate(wanted.sources):
            theirs = [name for name in left if sizes[name][1] == source.owner]
            if not theirs or source.node == self._setup.node:
                theirs = self._from_own_mirror(source.owner, save, theirs, sizes)
                left = [name for name in left if name not in theirs]
                continue
            another = wanted.published or any(one.owner == source.owner for one in wanted.sources[number + 1 :])
            others = [rate for one, rate in rates.items() if one.owner == source.owner]
            other_rate = 0.0 if patient else max(USUAL_RATE if another else 0.0, *others, 0.0)
            pace = SourcePace(sum(sizes[name][0] for name in theirs), other_rate, self.slow_after_s)
            try:
                wire, connection = call(
                    source.address, source.port, self._secret, self._tls_client if source.tls else None
                )
                wire.got = pace.count
                try:
                    for name in theirs:
                        fetch_file(
                            wire, source.owner, save.key, name, sizes[name][0], self._folder, self._counter("brought")
                        )
                        left.remove(name)
                finally:
                    connection.close()
            except (OSError, PeerError, CopyError) as error:
                problems[source.owner] = f"{source.node} does not give the part of {source.owner}: {error}"
                if isinstance(error, TooSlow):
                    rates[source] = error.rate
                    self._tell_slow(f"{source.node} gives the part of {source.owner}", error)
        if left and wanted.published:
            left = self._from_published(save, left, problems, max(rates.values(), default=0.0))
        if left and rates:
            quickest = tuple(sorted(wanted.sources, key=lambda source: -rates.get(source, 0.0)))
            slow = msgspec.structs.replace(wanted, sources=quickest, published=False)
            return self._fetch(slow, save, left, patient=True)
        return {name: problems.get(sizes[name][1], f"no node has {name}") for name in left}

    def _tell_slow(self, what: str, slow: TooSlow) -> None:
        self._problem("bring", f"{what} with {slow.rate / 1e6:.1f} MB/s: the rest is taken from elsewhere")
        self.tell()

    def _from_own_mirror(
        self, owner: str, save: Save, names: list[str], sizes: dict[str, tuple[int, str]]
    ) -> list[str]:
        mirror = self._mirrors.get(owner, save.key)
        done: list[str] = []
        for name in names if mirror is not None else []:
            assert mirror is not None
            try:
                copied = copy(
                    self._mirrors.data(owner, save.key), name, self._folder, name, in_a_hurry(), lambda _: None
                )
            except (OSError, CopyError) as error:
                log.warning("our mirror of %s cannot be used: %s", name, error)
                continue
            if copied.crc != mirror.crcs.get(name) or copied.size != sizes[name][0]:
                log.warning("our mirror of %s is damaged", name)
                (self._folder / name).unlink()
                continue
            done.append(name)
        return done

    def _from_published(
        self, save: Save, names: list[str], problems: dict[str, str], other_rate: float = 0.0
    ) -> list[str]:
        """Those that could not be had. `other_rate`: of a peer that could give them."""
        self._publisher.read_records()
        if self._publisher.save_of(save.key) is None:
            return names
        sizes = {file.name: file.size for file in save.files}
        pace = SourcePace(sum(sizes[name] for name in names), other_rate, self.slow_after_s)
        count = self._counter("brought")

        def counted(more: int) -> None:
            count(more)
            pace.count(more)

        left: list[str] = []
        for at, name in enumerate(names):
            try:
                copy(Path(self._setup.publish_to), name, self._folder, name, in_a_hurry(), counted)
            except TooSlow as error:
                self._tell_slow(f"{self._setup.publish_to} gives {save.name}", error)
                return [*left, *names[at:]]
            except (OSError, CopyError) as error:
                problems[next(file.owner for file in save.files if file.name == name)] = str(error)
                left.append(name)
        return left

    def _write_tracker(self, save: Save) -> None:
        """The script looks for the newest save by a file that only the first node had. One that names a newer save is
        corrected when that is moved aside."""
        tracker = tracker_of(save)
        if tracker is None:
            return
        path = self._folder / tracker.name
        if os.path.lexists(path):
            before = read_pointer(path) if path.is_file() and not path.is_symlink() else None
            named = step_in_name(before or "")
            if named is None or save.step is None or named >= save.step:
                return
            record = QuarantineRecord(
                done="pointer", path=str(path), before=before, after=tracker.text, why=SET_FORWARD, at=time.time()
            )
            keep_record(path.parent, path.name, record)
        write_atomically(path, tracker.text.encode())

    # ----- publishing -----

    def _publish(self) -> None:
        again_s, read_at = AGAIN_S, float("-inf")
        while True:
            self._to_publish.clear()
            problem = ""
            try:
                if time.monotonic() - read_at > RECORDS_EVERY_S:
                    self._publisher.read_records()
                    read_at = time.monotonic()
                    self.tidy(read_at)
            except (OSError, CopyError) as error:
                problem = _words(error)
            worked, failed = self.publish()
            problem = failed or problem
            told = f"checkpoints are not published to {self._setup.publish_to}: {problem}" if problem else ""
            self._problem("publish", told)
            again_s = min(again_s * 2, LONGEST_AGAIN_S) if problem else AGAIN_S
            self.tell()
            if not worked and self._orders.over and not self._cleared:
                self.clear()
            elif not worked:
                self._to_publish.wait(again_s)

    def publish(self) -> tuple[bool, str]:
        """Commit and stage one save each: what cannot be committed holds up no other. Whether something was done, and
        what went wrong."""
        worked, problem = False, ""
        for step in (self.commit, self.stage):
            try:
                worked = step() or worked
            except (OSError, CopyError) as error:
                problem = problem or _words(error)
        return worked, problem

    def commit(self) -> bool:
        """Let saves appear, as many as are ordered. False: none is. Raises OSError, CopyError: of the first that
        cannot, after the others."""
        todo = [save for save in self._orders.commit if not self._publisher.is_published(save.key)]
        failed: OSError | CopyError | None = None
        for save in todo:
            try:
                self._publisher.commit(save)
            except (OSError, CopyError) as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return bool(todo)

    def tidy(self, now: float) -> None:
        """Remove what nobody needs any more: staged files of saves that the script has removed, or of nodes that are
        lost, and mirrors of nodes that mirror elsewhere. `now`: monotonic. Raises OSError."""
        staged = self._publisher.staged_by(self._setup.node)
        if not self._staged.keys() <= staged.keys():
            self._publisher.read_records()  # another node has just published it, or has taken this one for lost
        with self._lock:
            needed = {one.part.key for one in self._seen} | {save.key for save in self._orders.commit}
            self._staged = {key: part for key, part in self._staged.items() if key in staged}
        gone = [key for key in staged if key not in needed or self._publisher.is_published(key)]
        self._gone = {key: self._gone.get(key, now) for key in gone}
        for key in gone:
            if now - self._gone[key] >= GONE_S:
                self._publisher.drop(key)
        newest = max((one.modified_at for one in self._publisher.published()), default=0.0)
        newest = min(newest, time.time())  # a file may have a time in the future, or its node a wrong clock
        self._mirrors.drop_left(newest - LEFT_S)
        for node in self._orders.gone:
            for key, at in self._publisher.staged_by(node).items():
                if at < newest - LEFT_S and key not in needed:
                    self._publisher.drop(key, node)
        self._others = self._mirrors.of_other_jobs()

    def clear(self) -> None:
        """The run is over, and its newest save is published: our other copies go. What the script wrote stays. Where
        that save is not in the shared folder as it was published, all stay."""
        try:
            self._publisher.read_records()  # another node may have published it just now
            newest = next(iter(self._publisher.published()), None)
            if newest is not None and self._publisher.save_of(newest.key) is not None:
                self._mirrors.drop_all()
                for node in (self._setup.node, *self._orders.gone):
                    for key in self._publisher.staged_by(node):
                        self._publisher.drop(key, node)
        except OSError as error:
            log.warning("our copies cannot be removed: %s", _words(error))
        self._cleared = True
        self.tell()

    def stage(self) -> bool:
        """Copy the newest own part that is not in the shared folder yet. False: there is none."""
        if self._orders.over:
            return False
        newest = self._seen[:PARTS_REPORTED]  # what nobody hears of is never committed
        todo = (one.part for one in newest if one.movable and self._staged.get(one.part.key) != one.part)
        part = next((part for part in todo if not self._publisher.is_published(part.key)), None)
        if part is None or (self._shared and not self._leads()):
            return False
        if why := self._publisher.why_not_free(Save(name=part.name, format=part.format)):
            raise CopyError(why)

        def wanted() -> bool:
            return any(one.part == part for one in self._seen)

        if self._publisher.stage(part, self._folder, CopyPace(), self._counter("published"), wanted):
            with self._lock:
                self._staged[part.key] = part
        return True  # what is not wanted any more goes with `tidy`; a part that grew is staged anew

    def _leads(self) -> bool:
        """Of the nodes that share a folder, one publishes."""
        marks = sorted(entry.name for entry in os.scandir(self._mirrors.top) if entry.name.startswith("here-"))
        return marks[:1] == [f"here-{self._setup.node}"]

    # ----- telling -----

    def _problem(self, about: str, text: str) -> None:
        if text:
            self._problems[about] = text
        else:
            self._problems.pop(about, None)

    def status(self) -> MoverStatus:
        with self._lock:
            seen, orders = self._seen, self._orders
            own = tuple(self._reported.values())[:PARTS_REPORTED]
            brought = [
                _part_of(one.save, owner)
                for one in self._parts.brought.values()
                if self._parts.has_all(one.save)
                for owner in one.save.owners
                if owner != self._setup.node
            ]
            mirrors = tuple({(one.owner, one.key): one for one in (*brought[-64:], *self._mirrors.parts)}.values())
            asked = {one.part.key for one in seen} | {part.key for part in (*own, *mirrors)}
            asked |= {save.key for save in orders.commit}
            published = self._publisher.published(asked)
            whole = {one.key for one in published}
            staged = set(self._staged) - whole
            waiting = [
                one.part.modified_at
                for one in seen
                if one.movable
                and not (one.part.key in whole | staged and (orders.peer is None or one.part.key in self._mirrored))
            ]
            tiers = NodeTiers(
                parts=own,
                mirrors=mirrors,
                staged=tuple(sorted((key.name, key.attempt, key.stamp) for key in staged)),
                published=published,
                failed=tuple(self._failed.values()),
                port=0 if self._server.stopped else self._server.port,
                tls=self._tls_server is not None,
                shared=self._shared,
                writing=tuple(sorted(one.part.name for one in seen[:PARTS_REPORTED] if _is_being_written(one))),
                others=self._others[0],
                others_bytes=self._others[1],
                rested=self._rested,
                snapshots=self._snapshots.copies.parts,
            )
            return MoverStatus(
                tiers=tiers,
                brought=self._brought,
                bring_problem=self._bring_problem,
                brought_snapshot=self._snapshots.brought,
                bring_snapshot_problem=self._snapshots.bring_problem,
                brought_bytes=self._counts["brought"],
                mirrored_bytes=self._counts["mirrored"],
                published_bytes=self._counts["published"],
                cleared=self._cleared,
                behind_s=round(max(0.0, time.time() - min(waiting)), 1) if waiting else 0.0,
                problems=tuple(self._problems.values()),
            )

    def tell(self) -> None:
        with self._telling:  # else an older status could be the last that is said
            status = self.status()
            before = self._said
            if before is not None and status == before:
                return
            self._said = status
            self._say(status)


def _words(error: OSError | CopyError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _is_being_written(one: Seen) -> bool:
    names = [file.name for file in one.part.files]
    return not one.still and one.part.name not in names and not any(name.endswith(SHARD_SUFFIX) for name in names)


def _part_of(save: Save, owner: str) -> SavePart:
    """One owner's part of a save that lies here whole."""
    files = tuple(PartFile(name=file.name, size=file.size) for file in save.files if file.owner == owner)
    return SavePart(
        name=save.name,
        owner=owner,
        attempt=save.attempt,
        stamp=save.stamp,
        format=save.format,
        step=save.step,
        modified_at=save.modified_at,
        files=files,
        whole=True,
    )


# ----- the process -----


def give_way() -> None:
    """Lowest priority for CPU, the idle class for disks."""
    try:
        os.nice(19)
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = {"x86_64": 251, "aarch64": 30}
        number = numbers.get(os.uname().machine)
        if number is not None:
            libc.syscall(number, 1, 0, 3 << 13)  # ioprio_set(IOPRIO_WHO_PROCESS, this one, IOPRIO_CLASS_IDLE)
    except (OSError, AttributeError):
        pass


def die_first() -> None:
    """Where memory runs out it is this process that is ended, with its copies, and not a rank."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    except OSError as error:
        log.warning("copies of snapshots could outlive ranks where memory runs out: %s", error)


def main(argv: list[str]) -> int:
    configure()
    give_way()
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    lock = threading.Lock()

    def say(status: MoverStatus) -> None:
        with lock:
            out.write(msgspec.json.encode(status) + b"\n")

    try:
        mover = Mover(msgspec.json.decode(argv[1], type=MoverSetup), say)
    except (OSError, CopyError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    mover.start()
    decoder = msgspec.json.Decoder(MoverOrders)
    for line in sys.stdin.buffer:
        try:
            mover.obey(decoder.decode(line))
        except msgspec.DecodeError as error:
            log.error("an order cannot be read: %s", error)
    logging.shutdown()
    os._exit(0)  # a thread that hangs on a dead file system must not keep it


if __name__ == "__main__":
    sys.exit(main(sys.argv))
