"""The mount table: what is mounted where, from `/proc/self/mountinfo`. Nothing here touches a file system."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from supervisor.node_health.contract import Place

TABLE_LIMIT: Final = 1 << 20
"""A node with thousands of container mounts has a table of some hundred KiB."""
_NETWORK: Final = frozenset(
    "nfs nfs4 lustre gpfs wekafs weka beegfs ceph cifs smb3 glusterfs 9p afs orangefs pvfs2 panfs vastfs".split()
)
_LOCAL_FUSE: Final = tuple(
    (
        "fuse.lxcfs fuse.portal fuse.gvfsd fuse.snapfuse fuse.squashfuse fuse.fuse-overlayfs fuse.rootlesskit"
        " fuse.vmware- fuse.archivemount fuse.encfs fuse.gocryptfs fuse.unionfs fuse.mergerfs fuse.AppImage fuse.xrdp"
    ).split()
)
"""How the names of FUSE file systems without a server far away begin; all others are taken to have one."""
_JOURNALED: Final = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"}
_FAILED_OPTIONS: Final = {"emergency_ro", "shutdown"}
"""What ext4 says of itself since Linux 6.12 once an error made it stop."""


class Mount(NamedTuple):
    point: str
    device: str
    """`major:minor`: the same for every mount of one file system."""
    fstype: str
    source: str
    options: frozenset[str]
    """Of this mount."""
    super_options: frozenset[str]
    """Of the file system."""

    @property
    def read_only(self) -> bool:
        return "ro" in self.options or "ro" in self.super_options or bool(_FAILED_OPTIONS & self.super_options)

    @property
    def failed(self) -> bool:
        """Turned read-only by the kernel after an error: asked for read and write, and does not have it."""
        if _FAILED_OPTIONS & self.super_options:
            return True
        return self.fstype in _JOURNALED and "rw" in self.options and "ro" in self.super_options

    @property
    def disk(self) -> bool:
        """A file system of this node that is written to."""
        return self.fstype in _JOURNALED and not self.read_only

    @property
    def network(self) -> bool:
        """Whether a server far away answers for it."""
        if self.fstype.startswith("fuse."):
            return not self.fstype.startswith(_LOCAL_FUSE)
        return self.fstype in _NETWORK


def read_mounts(place: Place) -> list[Mount] | None:
    """None when there is no table to be read."""
    for path in ("proc/self/mountinfo", "proc/1/mountinfo"):
        text = place.text(path, TABLE_LIMIT)
        if text:
            return parse_mountinfo(text) or None  # there is always a root
    if place.live:
        return None
    text = place.text("proc/mounts", TABLE_LIMIT) or place.text("proc/self/mounts", TABLE_LIMIT)
    return (parse_mounts(text) or None) if text else None


def parse_mountinfo(text: str) -> list[Mount]:
    """proc(5): `36 35 98:0 /root /point rw,noatime [optional fields] - ext3 /dev/root rw,errors=continue`."""
    found = []
    for line in text.split("\n"):
        before, dash, after = line.partition(" - ")
        fields, more = before.split(" "), after.split(" ")
        if not dash or len(fields) < 6 or not more[0]:
            continue
        found.append(
            Mount(
                point=_unescaped(fields[4]),
                device=fields[2],
                fstype=more[0],
                source=_unescaped(more[1]) if len(more) > 1 else "",
                options=frozenset(fields[5].split(",")),
                super_options=frozenset(more[2].split(",")) if len(more) > 2 else frozenset(),
            )
        )
    return found


def parse_mounts(text: str) -> list[Mount]:
    """`/proc/mounts`, where a captured tree has no better: `/dev/root / ext4 rw,relatime 0 0`."""
    found = []
    for number, line in enumerate(text.split("\n")):
        fields = line.split(" ")
        if len(fields) >= 4:
            options = frozenset(fields[3].split(","))
            found.append(
                Mount(_unescaped(fields[1]), f"?:{number}", fields[2], _unescaped(fields[0]), options, options)
            )
    return found


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word) if "\\" in word else word


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that holds `path` (without following links); the last one at a point hides those before it."""
    best: Mount | None = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def mount_at(point: str, mounts: Sequence[Mount]) -> Mount | None:
    """What is mounted exactly there, but for an automounter that still waits."""
    at = point.rstrip("/") or "/"
    return next((mount for mount in reversed(mounts) if mount.point == at and mount.fstype != "autofs"), None)


def automounted(point: str, mounts: Sequence[Mount]) -> bool:
    """Whether an automounter has it: then it comes when it is used, and may go when it is not."""
    return any(
        mount.fstype == "autofs" and (point == mount.point or point.startswith(mount.point.rstrip("/") + "/"))
        for mount in mounts
    )
