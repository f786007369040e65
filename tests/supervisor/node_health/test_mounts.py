"""The mount table, as kernels write it."""

from pathlib import Path

import pytest

from supervisor.node_health.contract import ProbeContext
from supervisor.node_health.storage import Mount, automounted, mount_at, mount_of, parse_mountinfo, read_mounts
from tests.tables import table

CASES = table(__file__)

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
28 27 0:25 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64
61 27 0:52 / /lustre rw,flock,relatime shared:9 - lustre 10.0.0.1@o2ib:10.0.0.2@o2ib:/scratch rw,checksum,flock
62 27 0:53 /export /home rw,relatime shared:30 master:2 - nfs4 filer:/export/home rw,vers=4.2,rsize=1048576,hard
63 27 0:54 / /mnt/my\040data ro,relatime - fuse.gcsfuse bucket ro,user_id=0,group_id=0,default_permissions
64 27 0:55 / /run/user/0/doc rw,nosuid - fuse.portal portal rw,user_id=0
65 27 0:56 / /auto rw,relatime - autofs /etc/auto.misc rw,fd=7,pgrp=1,timeout=300
66 27 7:1 / /snap/core ro,nodev,relatime shared:11 - squashfs /dev/loop1 ro,errors=continue
67 27 0:57 / /gpfs rw,relatime - gpfs fs1 rw,relatime
68 27 0:58 / /weka rw,relatime - wekafs default rw,writecache
"""


def table() -> list[Mount]:
    return parse_mountinfo(TABLE)


def test_every_mount_is_read() -> None:
    found = {mount.point: mount for mount in table()}
    assert len(found) == 11
    assert found["/lustre"].source == "10.0.0.1@o2ib:10.0.0.2@o2ib:/scratch"
    assert found["/home"].device == "0:53"
    assert found["/mnt/my data"].read_only
    assert {mount.point for mount in table() if mount.network} == {"/lustre", "/home", "/mnt/my data", "/gpfs", "/weka"}


@pytest.mark.parametrize(
    ("path", "point"),
    [("/", "/"), ("/lustre", "/lustre"), ("/lustre/a/b", "/lustre"), ("/lustrefoo", "/"), ("/home/u/x", "/home")],
)
def test_the_mount_of_a_path(path: str, point: str) -> None:
    assert mount_of(path, table()).point == point


def test_the_last_mount_at_a_point_hides_the_others() -> None:
    over = parse_mountinfo(TABLE + "90 61 0:77 / /lustre rw - tmpfs tmpfs rw\n")
    assert [mount.fstype for mount in (mount_at("/lustre", over), mount_of("/lustre/x", over)) if mount] == [
        "tmpfs"
    ] * 2


def test_automounters() -> None:
    assert mount_at("/auto", table()) is None
    assert automounted("/auto/data", table())
    assert not automounted("/automatic", table())


@pytest.mark.parametrize(
    ("line", "failed"),
    CASES["a_file_system_that_an_error_made_read_only_is_told_from_one_that_was_mounted_so"],
)
def test_a_file_system_that_an_error_made_read_only_is_told_from_one_that_was_mounted_so(
    line: str, failed: bool
) -> None:
    (mount,) = parse_mountinfo(line)
    assert mount.failed == failed


def test_rubbish_is_no_mount() -> None:
    assert parse_mountinfo("\n - \n1 2 3\n27 1 0:1 / /x rw - \n\x00\x00") == []


def test_trees_may_have_a_poorer_table_or_none(tmp_path: Path) -> None:
    place = ProbeContext(root=tmp_path)
    assert read_mounts(place) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/mounts").write_text("filer:/x /data nfs4 ro,vers=4.2 0 0\n/dev/sda1 / ext4 rw,relatime 0 0\n")
    found = read_mounts(place)
    assert found is not None
    assert [(mount.point, mount.fstype, mount.read_only) for mount in found] == [
        ("/data", "nfs4", True),
        ("/", "ext4", False),
    ]
    assert len({mount.device for mount in found}) == 2
