"""Movers of two nodes: the one that calls sends its node's parts, or fetches what it lacks; the other answers.

Both prove that they know the job's token before anything else is said, and every frame carries a MAC of the session.
What a peer says is bounded and checked all the same: names are relative and lead nowhere but into our own folder, sizes
are announced, and only what was offered can be read.

A frame is 4 bytes of length, 16 of MAC, one of kind (`J`: JSON, `D`: data), then the content.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import ssl
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from recovery.tiers import (
    MIRRORS,
    MIRRORS_KEPT,
    NODE_NAME,
    Save,
    SaveKey,
    SavePart,
    mirrors_to_drop,
    why_bad_name,
    why_bad_save,
)
from supervisor.errors import InternalError
from supervisor.mover.copying import (
    CopyError,
    CopyPace,
    NewFile,
    checksum,
    look,
    make_private,
    need_room,
    pieces,
    reading,
    remove_ours,
    sync_folder,
)
from supervisor.wire.authentication import (
    FRAME_MAC_BYTES,
    Exchange,
    Forged,
    Session,
    SharedSecret,
    equal,
    is_nonce,
    new_nonce,
)

TIMEOUT_S: Final = 30.0
"""Of one read or write."""
PROOF_S: Final = 10.0
HOLD_S: Final = 3.0
"""A caller that gave way may come back before its last call has ended here."""
AT_ONCE: Final = 64
"""Connections; more are refused."""
JSON_BYTES: Final = 8 << 20
MANIFEST: Final = "manifest.json"
MANIFEST_BYTES: Final = 8 << 20
OTHERS_READ: Final = 256
"""Mirrors of other jobs, to add up their sizes."""
OWNERS: Final = 64
"""Nodes whose parts are kept here."""

KEEP_FREE_OF_MIRRORS: Final = 0.1
"""So much of the disk that the script saves to stays free of others' parts."""
WORD_EVERY_S: Final = 5.0
"""While a file is summed up, the caller hears so often that we are at it."""

SLOW_AFTER_S: Final = 30.0
SLOW_MORE_S: Final = 60.0
SLOW_TIMES: Final = 4.0
"""So often it is looked at how fast a source was since the last look. It is left where the rest would take this much
longer, and so many times as long, as from another one: what is half here comes again."""
USUAL_RATE: Final = 100 << 20
"""Bytes a second that a source is taken to give before it was tried."""

_LENGTH = struct.Struct("!I")

log = logging.getLogger("unbroken.mover")


class PeerError(InternalError):
    """The other mover does not do what was asked, or is gone. The text says why."""


class TooSlow(PeerError):
    """Another source will be quicker."""

    def __init__(self, rate: float) -> None:
        super().__init__(f"it gives {rate / 1e6:.1f} MB/s")
        self.rate = rate


class SourcePace:
    """How fast a source gives what is wanted of it; `count` raises TooSlow where another one will be much quicker."""

    def __init__(
        self,
        size: int,
        other_rate: float,
        after_s: float = SLOW_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`other_rate`: what the other one gives in a second; 0: there is no other."""
        self._left, self._moved, self._other_rate = size, 0, other_rate
        self._after_s, self._clock, self._since = after_s, clock, clock()

    def count(self, more: int) -> None:
        self._left, self._moved, now = max(0, self._left - more), self._moved + more, self._clock()
        if self._other_rate <= 0 or now - self._since < self._after_s:
            return
        rate = self._moved / (now - self._since)
        self._moved, self._since = 0, now  # the rate of now counts: a link may become slow
        if self._left > rate * (SLOW_MORE_S + SLOW_TIMES * self._left / self._other_rate):
            raise TooSlow(rate)


class Mirror(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json` of a whole mirror: written last."""

    part: SavePart
    crcs: dict[str, int]


# ----- frames -----


class Wire:
    """Frames over one connection, once both ends have proven themselves."""

    def __init__(self, connection: socket.socket, session: Session) -> None:
        self._connection = connection
        self._session = session
        self.got: Callable[[int], None] = lambda _: None
        """Called with each piece that comes, however small; what it raises ends the frame."""

    def send(self, message: dict[str, Any]) -> None:
        self._put(b"J" + msgspec.json.encode(message))

    def send_data(self, data: bytes) -> None:
        self._put(b"D" + data)

    def _put(self, body: bytes) -> None:
        sealed = self._session.out.seal(body)
        self._connection.sendall(_LENGTH.pack(len(sealed)) + sealed)

    def _next(self) -> bytes | None:
        """None where the other end has hung up between two frames."""
        head = _exactly(self._connection, _LENGTH.size, may_end=True)
        if not head:
            return None
        length = _LENGTH.unpack(head)[0]
        if not FRAME_MAC_BYTES < length <= JSON_BYTES:
            raise PeerError("it sends a frame of an impossible length")
        try:
            return self._session.into.open(_exactly(self._connection, length, self.got))
        except Forged as error:
            raise PeerError(str(error)) from None

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when there will be none. Raises PeerError, OSError."""
        body = self._next()
        if body is None:
            return None
        if body[:1] != b"J":
            raise PeerError("it sends data where a message was expected")
        try:
            message = msgspec.json.decode(body[1:])
        except msgspec.DecodeError as error:
            raise PeerError(f"it sends no JSON: {error}") from None
        if not isinstance(message, dict):
            raise PeerError("it sends no message")
        return message

    def answer(self) -> dict[str, Any]:
        message = self.receive()
        if message is None:
            raise PeerError("it hung up")
        if error := message.get("error"):
            raise PeerError(str(error)[:300])
        return message

    def data(self, size: int) -> Iterator[bytes]:
        """So many bytes of data frames."""
        while size > 0:
            body = self._next()
            if body is None or body[:1] != b"D" or not 1 < len(body) <= size + 1:
                raise PeerError("it does not send the data that it announced")
            size -= len(body) - 1
            yield body[1:]


def _exactly(
    connection: socket.socket, count: int, counted: Callable[[int], None] | None = None, *, may_end: bool = False
) -> bytes:
    data = bytearray(count)
    view, have = memoryview(data), 0
    while have < count:
        got = connection.recv_into(view[have:])
        if not got:
            if may_end and not have:
                return b""
            raise PeerError("it hung up")
        have += got
        if counted is not None:
            counted(got)
    return bytes(data)


def _line(connection: socket.socket) -> dict[str, Any]:
    """A short unproven message."""
    length = _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]
    if length > 1024:
        raise PeerError("it does not speak as a mover does")
    try:
        message = msgspec.json.decode(_exactly(connection, length))
    except msgspec.DecodeError:
        raise PeerError("it does not speak as a mover does") from None
    if not isinstance(message, dict):
        raise PeerError("it does not speak as a mover does")
    return message


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    body = msgspec.json.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def call(address: str, port: int, secret: SharedSecret, tls: ssl.SSLContext | None) -> tuple[Wire, socket.socket]:
    """Connect, and see that a mover of this job answers. Raises OSError, PeerError."""
    connection = socket.create_connection((address, port), timeout=PROOF_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            connection = tls.wrap_socket(connection, server_hostname=address)
        nonce = new_nonce()
        _say(connection, {"nonce": nonce})
        answer = _line(connection)
        exchange = Exchange(nonce, str(answer.get("nonce", "")), 0)
        if not is_nonce(exchange.server) or not equal(str(answer.get("proof", "")), secret.mover_proof(exchange)):
            raise PeerError("what answers there cannot prove that it belongs to this job")
        connection.settimeout(TIMEOUT_S)
        return Wire(connection, secret.mover_session(exchange, answers=False)), connection
    except BaseException:
        connection.close()
        raise


def accept(connection: socket.socket, secret: SharedSecret) -> Wire:
    """The other side of `call`. The caller's first frame is its proof. Raises OSError, PeerError."""
    nonce = str(_line(connection).get("nonce", ""))
    if not is_nonce(nonce):
        raise PeerError("it does not speak as a mover does")
    exchange = Exchange(nonce, new_nonce(), 0)
    _say(connection, {"nonce": exchange.server, "proof": secret.mover_proof(exchange)})
    return Wire(connection, secret.mover_session(exchange, answers=True))


# ----- where mirrors lie -----


def folder_of(owner: str, key: SaveKey) -> str:
    """The name of a mirror's folder: no character of a foreign name is in it."""
    digest = hashlib.blake2b(f"{key.name}\0{key.attempt}\0{key.stamp}".encode(), digest_size=16).hexdigest()
    return f"{owner}/{digest}"


class Mirrors:
    """Other nodes' parts on this node's disk. Several threads. Each job has its own folder: what another job left is
    neither used nor removed."""

    def __init__(self, folder: Path, job: str) -> None:
        self.top = make_private(folder / MIRRORS)
        self.home = make_private(self.top / job)
        self.own_bytes = 0
        """Of this node's newest save: there must be room for two more."""
        self._whole: dict[tuple[str, SaveKey], Mirror] = {}
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._let_go = threading.Condition(self._lock)
        self.changes = 0
        self._find()

    def of_other_jobs(self) -> tuple[int, int]:
        """How many others have left mirrors in this folder, and how many bytes. Raises OSError."""
        manifests = [path for path in self.top.glob(f"*/*/*/{MANIFEST}") if not path.is_relative_to(self.home)]
        mirrors = (_read_mirror(path.parent) for path in manifests[:OTHERS_READ])
        size = sum(mirror.part.size_bytes for mirror in mirrors if mirror is not None)
        return len({path.parents[2] for path in manifests}), size

    @property
    def parts(self) -> tuple[SavePart, ...]:
        with self._lock:
            return tuple(mirror.part for mirror in self._whole.values())

    def get(self, owner: str, key: SaveKey) -> Mirror | None:
        with self._lock:
            return self._whole.get((owner, key))

    def data(self, owner: str, key: SaveKey) -> Path:
        return self.home / folder_of(owner, key) / "data"

    def begin(self, owner: str, key: SaveKey) -> Path:
        """The folder for the data of a new mirror. Raises OSError, CopyError."""
        if not NODE_NAME.fullmatch(owner) or why_bad_name(key.name):
            raise CopyError("it names no node or no save")
        own = self.home / owner
        if not own.exists() and sum(entry.is_dir() for entry in os.scandir(self.home)) >= OWNERS:
            raise CopyError("this node mirrors for too many others already")
        make_private(own)
        self._drop_half(owner, but=key)
        make_private(self.home / folder_of(owner, key))
        return make_private(self.data(owner, key))

    def finish(self, mirror: Mirror) -> None:
        """All files are there: from now on it counts. Raises OSError, CopyError."""
        part = mirror.part
        if why := why_bad_save(Save(name=part.name, format="", files=())) or _why_not_all(
            self.data(part.owner, part.key), mirror
        ):
            raise CopyError(why)
        folder = self.home / folder_of(part.owner, part.key)
        body = msgspec.json.encode(mirror)
        with NewFile(folder, MANIFEST, len(body)) as file:
            file.write(body)
            file.finish()
        sync_folder(folder.parent)
        with self._lock:
            self._whole[part.owner, part.key] = mirror
            self.changes += 1
        self._drop_old(part.owner)

    def hold(self, owner: str) -> bool:
        """One writer for each owner. False: there is one, and not just until it sees that its caller has hung up."""
        with self._let_go:
            if not self._let_go.wait_for(lambda: owner not in self._busy, HOLD_S):
                return False
            self._busy.add(owner)
            return True

    def let_go(self, owner: str) -> None:
        with self._let_go:
            self._busy.discard(owner)
            self._let_go.notify_all()

    def make_room(self, owner: str, key: SaveKey, data: Path, size: int) -> None:
        """On a disk that is nearly full the oldest mirror goes before the new one is whole; one always stays."""
        try:
            self._need_room(data, size)
        except OSError:
            with self._lock:
                held = [one for name, one in self._whole if name == owner and one != key]
                if len(held) < MIRRORS_KEPT:
                    raise
                oldest = min(held, key=lambda one: (one.attempt, self._whole[owner, one].part.modified_at))
                del self._whole[owner, oldest]
                self.changes += 1
            self._remove(self.home / folder_of(owner, oldest))
            self._need_room(data, size)

    def _need_room(self, data: Path, size: int) -> None:
        need_room(data, size, reserve=2 * self.own_bytes, share=KEEP_FREE_OF_MIRRORS)

    def drop_left(self, before: float) -> None:
        """Mirrors of owners that no longer mirror here. `before`: a newer save than of that time (Unix) is published;
        an owner of which nothing newer is here has gone, or mirrors elsewhere."""
        with self._lock:
            newest: dict[str, float] = {}
            for (owner, _), mirror in self._whole.items():
                newest[owner] = max(newest.get(owner, 0.0), mirror.part.modified_at)
            for owner, key in self._whole:  # by this node's clock: the owner's may be wrong
                newest[owner] = max(newest[owner], self._arrived(owner, key))
            left = [at for at in self._whole if newest[at[0]] < before and at[0] not in self._busy]
            for at in left:
                del self._whole[at]
                self.changes += 1
        for owner, key in left:
            self._remove(self.home / folder_of(owner, key))

    def _arrived(self, owner: str, key: SaveKey) -> float:
        try:
            return os.lstat(self.home / folder_of(owner, key) / MANIFEST).st_mtime
        except OSError:
            return 0.0

    def drop_all(self) -> None:
        """The run is over, and nobody will ask for one."""
        with self._lock:
            left = [at for at in self._whole if at[0] not in self._busy]
            for at in left:
                del self._whole[at]
                self.changes += 1
        for owner, key in left:
            self._remove(self.home / folder_of(owner, key))
        for owner in {owner for owner, _ in left}:
            with contextlib.suppress(OSError):  # something else is in it
                os.rmdir(self.home / owner)

    @staticmethod
    def _remove(folder: Path) -> None:
        if folder.is_symlink():
            return  # not made by us: what it leads to is not ours
        (folder / MANIFEST).unlink(missing_ok=True)  # first: what is half removed is not whole
        remove_ours(folder)

    def _drop_half(self, owner: str, but: SaveKey) -> None:
        """What was left half: of one owner there is never more than one that may become whole."""
        with self._lock:
            kept = {folder_of(owner, key) for name, key in self._whole if name == owner}
        kept.add(folder_of(owner, but))
        for entry in list(os.scandir(self.home / owner)):
            if f"{owner}/{entry.name}" not in kept and entry.is_dir(follow_symlinks=False):
                self._remove(Path(entry.path))

    def _drop_old(self, owner: str) -> None:
        """Only whole newer ones push out old ones."""
        with self._lock:
            held = [(key, mirror.part.modified_at) for (name, key), mirror in self._whole.items() if name == owner]
            old = mirrors_to_drop(held)
            for key in old:
                del self._whole[owner, key]
        for key in old:
            self._remove(self.home / folder_of(owner, key))

    def _find(self) -> None:
        """What an earlier mover left whole."""
        for owner in [entry.name for entry in os.scandir(self.home) if entry.is_dir(follow_symlinks=False)]:
            for entry in list(os.scandir(self.home / owner)):
                mirror = _read_mirror(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else None
                if mirror is None:
                    continue
                part = mirror.part
                if folder_of(part.owner, part.key) == f"{owner}/{entry.name}" and not _why_not_all(
                    Path(entry.path) / "data", mirror
                ):
                    self._whole[owner, part.key] = mirror


def _read_mirror(folder: Path) -> Mirror | None:
    try:
        with reading(folder, MANIFEST) as descriptor:
            return msgspec.json.decode(os.read(descriptor, MANIFEST_BYTES), type=Mirror)
    except (OSError, CopyError, msgspec.DecodeError):
        return None


def _why_not_all(data: Path, mirror: Mirror) -> str:
    for file in mirror.part.files:
        found = look(data, file.name)
        if found is None or found.st_size != file.size or file.name not in mirror.crcs:
            return f"{file.name[:80]!r} is not there as announced"
    return ""


# ----- the one that is called -----

Offered = Callable[[str, SaveKey], "tuple[Path, SavePart] | None"]
"""Where this node's own part of a save lies (or one that was brought here), by owner and key."""

Handler = Callable[[Wire, "dict[str, Any]", str, SaveKey], None]
"""Answers a request, which is about a save's part of an owner."""


class PeerServer:
    """Answers other movers; a thread for each connection."""

    def __init__(
        self,
        mirrors: Mirrors,
        secret: SharedSecret,
        offered: Offered,
        host: str = "",
        tls: ssl.SSLContext | None = None,
        proof_s: float = PROOF_S,
        more: Mapping[str, Handler] | None = None,
    ) -> None:
        """`proof_s`: so long a caller may take in all until it has proven itself. `more`: what else is answered."""
        own: dict[str, Handler] = {
            "have": self._have,
            "put": self._put,
            "whole": self._whole,
            "list": self._list,
            "get": self._get,
        }
        self._handlers = {**own, **(more or {})}
        self._proof_s = proof_s
        self._mirrors = mirrors
        self._secret = secret
        self._offered = offered
        self._tls = tls
        self._listening = socket.create_server((host, 0), backlog=AT_ONCE)
        self._free = threading.Semaphore(AT_ONCE)
        self.port: int = self._listening.getsockname()[1]
        self.stopped = False

    def start(self) -> None:
        threading.Thread(target=self._accept, name="peers", daemon=True).start()

    def close(self) -> None:
        self.stopped = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # `close` alone does not wake who waits in `accept`
        self._listening.close()

    def _accept(self) -> None:
        while not self.stopped:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if not self.stopped:
                    time.sleep(1.0)  # no descriptors: tried again
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        watched = connection.dup()
        deadline = threading.Timer(self._proof_s, _hang_up, (watched,))
        try:
            connection.settimeout(self._proof_s)
            deadline.daemon = True
            deadline.start()
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            wire = accept(connection, self._secret)
            request = wire.receive()
            deadline.cancel()
            connection.settimeout(TIMEOUT_S)
            while request is not None:
                self._answer(wire, request)
                request = wire.receive()
        except (OSError, PeerError, CopyError) as error:
            log.info("a peer's connection ended: %s", error)
        except Exception:
            log.exception("a peer's request failed")
        finally:
            deadline.cancel()
            watched.close()
            connection.close()
            self._free.release()

    def _answer(self, wire: Wire, request: dict[str, Any]) -> None:
        handler = self._handlers.get(str(request.get("op", "")))
        if handler is None:
            raise PeerError("it asks for something unknown")
        try:
            owner = str(request["owner"])
            key = SaveKey(str(request["name"]), int(request["attempt"]), int(request["stamp"]))
        except (KeyError, TypeError, ValueError):
            raise PeerError("its request is incomplete") from None
        handler(wire, request, owner, key)

    def _have(self, wire: Wire, _: dict[str, Any], owner: str, key: SaveKey) -> None:
        mirror = self._mirrors.get(owner, key)
        wire.send({"files": [[file.name, file.size] for file in mirror.part.files] if mirror is not None else None})

    def _put(self, wire: Wire, request: dict[str, Any], owner: str, key: SaveKey) -> None:
        """One file of a part. One that is here already, with the same size and time, is not sent again."""
        if not self._mirrors.hold(owner):
            wire.send({"error": "this node's parts are being received already"})
            return
        try:
            name, size, mtime_ns = str(request["file"]), int(request["size"]), int(request["mtime_ns"])
            data = self._mirrors.begin(owner, key)
            there = look(data, name)
            if there is not None and (there.st_size, there.st_mtime_ns) == (size, mtime_ns):
                wire.send({"crc": checksum(data, name, lambda: wire.send({"wait": True}), WORD_EVERY_S).crc})
                return
            self._mirrors.make_room(owner, key, data, size)
            with NewFile(data, name, size) as file:
                wire.send({"send": True})
                for piece in wire.data(size):
                    file.write(piece)
                end = wire.answer()
                file.finish(int(end["crc"]), mtime_ns)
                wire.send({"crc": file.crc})
        except (KeyError, TypeError, ValueError):
            raise PeerError("its request is incomplete") from None
        except (OSError, CopyError) as error:
            wire.send({"error": str(error)})
            raise
        finally:
            self._mirrors.let_go(owner)

    def _whole(self, wire: Wire, request: dict[str, Any], owner: str, key: SaveKey) -> None:
        """All files of a part have arrived."""
        try:
            mirror = msgspec.convert(request["mirror"], Mirror)
            if mirror.part.owner != owner or mirror.part.key != key or len(mirror.part.files) > len(mirror.crcs):
                raise CopyError("its manifest is another part's")
            for file in mirror.part.files:
                if why := why_bad_name(file.name):
                    raise CopyError(why)
            self._mirrors.finish(mirror)
        except (KeyError, msgspec.ValidationError, CopyError, OSError) as error:
            wire.send({"error": str(error)[:300]})
            return
        wire.send({"ok": True})

    def _list(self, wire: Wire, _: dict[str, Any], owner: str, key: SaveKey) -> None:
        found = self._found(owner, key)
        if found is None:
            wire.send({"error": "that part is not here"})
            return
        wire.send({"files": [[file.name, file.size] for file in found[1].files]})

    def _get(self, wire: Wire, request: dict[str, Any], owner: str, key: SaveKey) -> None:
        found = self._found(owner, key)
        name = str(request.get("file", ""))
        if found is None or name not in {file.name for file in found[1].files}:
            wire.send({"error": "that file is not here"})
            return
        mirror = self._mirrors.get(owner, key)
        try:
            with reading(found[0], name) as descriptor:
                about = os.fstat(descriptor)
                wire.send({"size": about.st_size, "mtime_ns": about.st_mtime_ns})
                crc = send_content(wire, descriptor, in_a_hurry())
        except (OSError, CopyError) as error:
            raise PeerError(str(error)) from error  # in the middle of data there is no answer but to hang up
        good = mirror is None or found[0] != self._mirrors.data(owner, key) or mirror.crcs.get(name) == crc
        wire.send({"crc": crc} if good else {"error": f"the copy of {name[:80]!r} is damaged"})

    def _found(self, owner: str, key: SaveKey) -> tuple[Path, SavePart] | None:
        mirror = self._mirrors.get(owner, key)
        own = self._offered(owner, key)
        if own is not None:
            return own
        return (self._mirrors.data(owner, key), mirror.part) if mirror is not None else None


def _hang_up(connection: socket.socket) -> None:
    """Whoever waits on it is woken, and finds it closed."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def in_a_hurry() -> CopyPace:
    """Who fetches is waited for by ranks."""
    pace = CopyPace()
    pace.hurry = True
    return pace


def send_content(wire: Wire, descriptor: int, pace: CopyPace, count: Callable[[int], None] = lambda _: None) -> int:
    crc = 0
    for piece in pieces(descriptor, pace):
        crc = zlib.crc32(piece, crc)
        wire.send_data(piece)
        count(len(piece))
    return crc


# ----- the one that calls -----


def _request(op: str, owner: str, key: SaveKey, **more: object) -> dict[str, Any]:
    return {"op": op, "owner": owner, "name": key.name, "attempt": key.attempt, "stamp": key.stamp, **more}


def send_part(wire: Wire, part: SavePart, folder: Path, pace: CopyPace, count: Callable[[int], None]) -> bool:
    """Mirror a part. False: the peer has it already. Raises OSError, PeerError, CopyError."""
    wire.send(_request("have", part.owner, part.key))
    if wire.answer().get("files") == [[file.name, file.size] for file in part.files]:
        return False
    crcs: dict[str, int] = {}
    for file in part.files:
        with reading(folder, file.name) as descriptor:
            about = os.fstat(descriptor)
            if about.st_size != file.size:
                raise CopyError(f"{file.name} has changed")
            more = {"file": file.name, "size": file.size, "mtime_ns": about.st_mtime_ns}
            wire.send(_request("put", part.owner, part.key, **more))
            while (answer := wire.answer()).get("wait"):
                count(0)
            if answer.get("send"):
                wire.send({"crc": send_content(wire, descriptor, pace, count)})
                answer = wire.answer()
            crcs[file.name] = int(answer["crc"])
    mirror = Mirror(part=part, crcs=crcs)
    wire.send(_request("whole", part.owner, part.key, mirror=msgspec.to_builtins(mirror)))
    wire.answer()
    return True


def fetch_file(
    wire: Wire, owner: str, key: SaveKey, name: str, size: int, folder: Path, count: Callable[[int], None]
) -> None:
    """Bring one file into `folder`. Raises OSError, PeerError, CopyError."""
    wire.send(_request("get", owner, key, file=name))
    about = wire.answer()
    if about.get("size") != size:
        raise PeerError(f"its copy of {name[:80]!r} has {about.get('size')} bytes instead of {size}")
    with NewFile(folder, name, size) as file:
        for piece in wire.data(size):
            file.write(piece)
            count(len(piece))
        file.finish(int(wire.answer()["crc"]), int(about["mtime_ns"]))
