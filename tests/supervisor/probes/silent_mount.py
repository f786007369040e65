"""Runs the storage probe beside a mount that answers nobody; started by test_storage.py as root.

The mount is a FUSE file system without its server, in a mount namespace of this process alone. Prints, a JSON line for
each look, the readings of that mount; the last look comes after its server "died".
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

from supervisor.probes.mount_asker import Asker
from supervisor.probes.probe import JobView, Moment, Place, Site
from supervisor.probes.storage import StorageProbe

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18


def mount_silent(folder: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "no mount namespace")
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"silent", folder.encode(), b"fuse.silent", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "no FUSE mount")
    return server


def main(folder: str, checkpoints: str) -> None:
    server = mount_silent(folder)
    asker = Asker()
    probe = StorageProbe(asker)
    limits = {"mount_answers": {"unknown_s": 0.3, "hang_s": 1.0}}
    job = JobView(ranks={1: 0}, checkpoint_dirs=(checkpoints,)) if checkpoints else JobView()
    place = Place(site=Site(limits=limits), job=job)
    threads = 0
    for look in range(4):
        if look == 3:
            os.close(server)
            while asker.open:
                asker.collect(0.01)
        began = time.monotonic()
        readings = probe.look(place, Moment(wall=time.time(), mono=time.monotonic()))
        pids = {question.pid for question in asker.open.values()}
        threads = max([threads, *(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids)])
        told = {
            f"{reading.check} {reading.device}": [reading.status, reading.level, reading.text] for reading in readings
        }
        print(json.dumps({"took_s": time.monotonic() - began, "pids": sorted(pids), "threads": threads, "told": told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
