"""Asks file systems that may never answer: the child process of the storage probe.

`python mount_child.py`; one request a line on standard input, `NUMBER KIND PATH` with the path in hex, each taken on a
thread of its own. On standard output `NUMBER began TID` at once, then one of

    NUMBER ok SIZE FREE FILES FILES_AVAILABLE REAL_PATH     (`stat`, `real`; bytes)
    NUMBER ok                                               (`write`)
    NUMBER error ERRNO

It ends when standard input is closed, whatever its threads wait for. Only what Python has loaded anyway is imported: it
starts in some 10 ms.
"""

import os
import sys
from _thread import allocate_lock, get_native_id, start_new_thread

_PROBE_BYTES = 4096
_ENOENT, _ENOTDIR = 2, 20

_speaking = allocate_lock()


def _say(*words: object) -> None:
    with _speaking:
        try:
            os.write(1, (" ".join(map(str, words)) + "\n").encode())
        except OSError:
            os._exit(0)


def _existing(path: bytes) -> bytes:
    """`path`, or what exists of it: a checkpoint folder may still have to be made."""
    while True:
        try:
            os.lstat(path)
            return os.path.realpath(path)
        except OSError as error:
            if error.errno not in (_ENOENT, _ENOTDIR) or path in (b"/", b""):
                raise
            path = os.path.dirname(path)


def _stat(number: str, path: bytes, real: bool) -> None:
    place = _existing(path) if real else path
    found = os.statvfs(place)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    _say(number, "ok", size, free, found.f_files, found.f_favail, place.hex())


def _write(number: str, path: bytes) -> None:
    """Write, sync, read and remove a small file."""
    name = os.path.join(_existing(path), b".unbroken-probe-%d-%s" % (os.getpid(), number.encode()))
    data = os.urandom(_PROBE_BYTES)
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
        same = os.pread(descriptor, _PROBE_BYTES, 0) == data
    finally:
        os.close(descriptor)
        os.unlink(name)
    _say(number, *(("ok",) if same else ("error", 5)))


def _take(number: str, kind: str, path: bytes) -> None:
    _say(number, "began", get_native_id())
    try:
        if kind == "write":
            _write(number, path)
        else:
            _stat(number, path, real=kind == "real")
    except OSError as error:
        _say(number, "error", error.errno or 5)
    except ValueError:
        _say(number, "error", _ENOENT)


def main() -> None:
    for line in sys.stdin:
        words = line.split()
        if len(words) == 3:
            start_new_thread(_take, (words[0], words[1], bytes.fromhex(words[2])))
    os._exit(0)


if __name__ == "__main__":
    main()
