"""Runs the storage probe beside a mount that answers nobody; started by test_storage.py as root.

The mount is a FUSE file system without its server, in a mount namespace of this process alone. Prints a JSON line
for each look: three of one probe, one of a second probe beside it, and one of that after the server "died".
"""

import ctypes
import json
import os
import stat
import sys
import time
from pathlib import Path

from supervisor.node_health.contract import JobInfo, Moment, ProbeContext, Site
from supervisor.node_health.storage import Asker, StorageProbe

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18


def mount_silent(folder: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "no mount namespace")
    device = Path("/dev/fuse")
    if not device.exists():  # a container has fewer device files than its kernel has devices
        device = Path(f"{folder}.device")
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(10, 229))
    server = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"silent", folder.encode(), b"fuse.silent", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "no FUSE mount")
    return server


def count(pids: set[int]) -> int:
    return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids)


def look(probe: StorageProbe, place: ProbeContext, askers: list[Asker]) -> None:
    began = time.monotonic()
    results = probe.look(place, Moment(wall=time.time(), mono=time.monotonic()))
    took_s = time.monotonic() - began
    pids = {question.pid for asker in askers for question in asker.open.values()}
    patience = time.monotonic() + 5.0
    while (threads := count(pids)) > 2 * len(pids) and time.monotonic() < patience:
        time.sleep(0.01)  # those that have answered are about to end
    told = {f"{one.check} {one.device}": [one.status, one.level, one.text] for one in results}
    print(json.dumps({"took_s": took_s, "pids": sorted(pids), "threads": threads, "told": told}))


def main(folder: str, state: str, *checkpoints: str) -> None:
    server = mount_silent(folder)
    asker, next_asker = Asker(), Asker()
    limits = {"mount_answers": {"unknown_s": 1.5, "hang_s": 2.5}}
    job = JobInfo(ranks={1: 0}, checkpoint_dirs=checkpoints) if checkpoints else JobInfo()
    place = ProbeContext(site=Site(limits=limits), job=job, state_dir=Path(state))
    probe = StorageProbe(asker)
    for _ in range(3):
        look(probe, place, [asker])
    next_probe = StorageProbe(next_asker)  # another probe worker, while the child of the first is stuck
    look(next_probe, place, [asker, next_asker])
    os.close(server)
    while asker.open:
        asker.collect(0.01)
    look(next_probe, place, [asker, next_asker])


if __name__ == "__main__":
    main(*sys.argv[1:])
