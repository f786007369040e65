"""Has the kernel read a checkpoint into the page cache: `prefetch_child.py PATH RANKS NODES`, a child of the agent.

A process of its own, because a file system that hangs would take the agent along; only what Python has loaded anyway is
imported. RANKS are those of this node (`0,1`), NODES is how many the job has, 0 if that is not known. From storage that
nodes share, a node reads what its ranks will read as the names prove; of the rest, the node of rank 0 reads all.
It keeps `MARGIN_BYTES` of memory free, copies nothing (WILLNEED), and waits for each window before the next.
"""

import os
import re
import stat
import sys

MARGIN_BYTES = 4 << 30
"""Of memory that stays available, of the machine and within the limits of the cgroup."""
WINDOW_BYTES = 64 << 20
CHUNK_BYTES = 8 << 20
"""The kernel takes about so much at once."""
MOST_FILES = 100_000
NICENESS = 10
SHARD = re.compile(rb"(?:.*/)?_*(\d{1,9})_.*\.distcp", re.DOTALL)
"""Of torch.distributed.checkpoint: the rank that wrote it."""
ZERO = re.compile(rb".*zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_.*", re.DOTALL)
"""Of DeepSpeed: the place among those with the same part of the model, and the part."""
MODEL_PART = re.compile(rb"(?:.*/)?mp_rank_(\d{1,9})(?:_(\d{1,9}))?(_\d+)?/.*", re.DOTALL)
"""A folder of Megatron-LM: tensor parallel rank, pipeline stage, expert."""
OF_RANK = re.compile(rb".*(?<!mp_)(?<!pp_)rank_?(\d{1,9})(?!\d).*", re.DOTALL)
OPTIMIZER_OF_ALL = b"distrib_optim.pt"
"""Of Megatron-LM: the first replica reads it for all."""


def main() -> None:
    path = os.fsencode(sys.argv[1])
    ranks = {int(number) for number in sys.argv[2].split(",") if number}
    parent = os.getppid()
    os.nice(NICENESS)
    for number, file in enumerate(_files(path, ranks, int(sys.argv[3]))):
        if number >= MOST_FILES or not _read(file, parent):
            return


def _files(path: bytes, ranks: "set[int]", nodes: int) -> "list[bytes]":
    """The largest first: optimizer state and weights are what loading waits for."""
    alone = nodes == 1 or os.major(os.stat(path).st_dev) != 0  # file systems of other machines have no device
    if not os.path.isdir(path):
        return [path] if alone or 0 in ranks else []
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            found[os.path.relpath(file, path)] = os.lstat(file).st_size
        if len(found) > MOST_FILES:
            break
    mine = sorted(found) if alone and not ranks else own_files(sorted(found), ranks, nodes * len(ranks), alone)
    return [os.path.join(path, name) for name in sorted(mine, key=found.__getitem__, reverse=True)]


def own_files(names: "list[bytes]", ranks: "set[int]", world: int, alone: bool) -> "list[bytes]":
    """Those that `ranks` will read. `alone`: no other node reads here, so that all may be read but others' shards.

    Where names tell of a rank, but not of which, nobody reads.
    """
    zero = [found for found in map(ZERO.fullmatch, names) if found]
    parts = {(int(found[1]), int(found[2] or 0)) for found in map(MODEL_PART.fullmatch, names) if found}
    in_order = world == len({found[1] for found in zero}) and {int(found[2]) for found in zero} == {0}
    mine = []
    for name in names:
        shard, place, part = SHARD.fullmatch(name), ZERO.fullmatch(name), MODEL_PART.fullmatch(name)
        of_rank = OF_RANK.fullmatch(name)
        if shard:
            ours = int(shard[1]) in ranks
        elif alone:
            ours = True
        elif place:
            ours = in_order and int(place[1]) in ranks
        elif part:
            one = int(part[1]), int(part[2] or 0)
            ours = not part[3] and any(_part_of(rank, parts, world, name) == one for rank in ranks)
        elif of_rank:
            ours = int(of_rank[1]) in ranks
        else:
            ours = 0 in ranks
        if ours:
            mine.append(name)
    return mine


def _part_of(rank: int, parts: "set[tuple[int, int]]", world: int, name: bytes) -> "tuple[int, int] | None":
    """Which model part a rank of Megatron-LM reads: tensor parallel ranks are neighbours, stages lie farthest apart."""
    width, stages = max(one for one, _ in parts) + 1, max(stage for _, stage in parts) + 1
    if len(parts) != width * stages or not world or world % len(parts):
        return None
    stage, within = divmod(rank, world // stages)
    if name.endswith(OPTIMIZER_OF_ALL) and within >= width:
        return None
    return within % width, stage


def _read(path: bytes, parent: int) -> bool:
    """Whether to go on with the next file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True
    about = os.fstat(descriptor)
    size = about.st_size if stat.S_ISREG(about.st_mode) else 0
    for start in range(0, size, WINDOW_BYTES):
        end = min(size, start + WINDOW_BYTES)
        if os.getppid() != parent or bytes_to_spare() < end - start:
            return False
        for at in range(start, end, CHUNK_BYTES):
            os.posix_fadvise(descriptor, at, min(CHUNK_BYTES, end - at), os.POSIX_FADV_WILLNEED)
        os.pread(descriptor, 1, end - 1)  # wait for it
    os.close(descriptor)
    return True


def bytes_to_spare() -> int:
    """What may still be read without anything being short of memory."""
    available = _field(b"/proc/meminfo", b"MemAvailable:") << 10
    return min(available, _left_in_cgroup(available)) - MARGIN_BYTES


def _left_in_cgroup(most: int, root: bytes = b"/sys/fs/cgroup", own: bytes = b"/proc/self/cgroup") -> int:
    """Page cache counts there; what was not used lately is given back first."""
    left = most
    for line in _lines(own):
        number, controllers, path = line.strip().split(b":", 2)
        if number == b"0":
            top, files = root, (b"memory.max", b"memory.current", b"inactive_file")
        elif b"memory" in controllers.split(b","):
            top, files = root + b"/memory", (b"memory.limit_in_bytes", b"memory.usage_in_bytes", b"total_inactive_file")
        else:
            continue
        folder = os.path.normpath(top + b"/" + path)
        while folder.startswith(top):
            limit = b"".join(_lines(folder + b"/" + files[0])).strip()
            if limit.isdigit():
                used = int(b"".join(_lines(folder + b"/" + files[1])) or 0)
                left = min(left, int(limit) - used + _field(folder + b"/memory.stat", files[2]))
            folder = os.path.dirname(folder)
    return left


def _field(path: bytes, name: bytes) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.split()[:1] == [name]), 0)


def _lines(path: bytes) -> "list[bytes]":
    try:
        with open(path, "rb") as file:
            return file.readlines()
    except OSError:
        return []


if __name__ == "__main__":
    main()
