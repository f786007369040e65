"""Checkpoints as torch writes them, in bytes: what a reader of the format accepts."""

from __future__ import annotations

import functools
import io
import tempfile
from pathlib import Path

from tests.conftest import Later

torch = Later("torch")
torch_dcp = Later("torch.distributed.checkpoint")


@functools.cache
def torch_file(step: int) -> bytes:
    out = io.BytesIO()
    torch.save({"model": {"w": torch.full((1000,), float(step))}, "iter_num": step}, out)
    return out.getvalue()


@functools.cache
def dcp_files(parts: int, step: int, size: int) -> dict[str, bytes]:
    """`.metadata` and one `.distcp` for each of `parts` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        state = {f"w{rank}": torch.full((size // 4,), float(step + rank)) for rank in range(parts)}
        writer = torch_dcp.FileSystemWriter(folder, single_file_per_rank=False, thread_count=1)
        torch_dcp.save(state, storage_writer=writer, no_dist=True)
        written = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    names = sorted(name for name in written if name != ".metadata")
    metadata = written[".metadata"]
    assert len(names) == parts
    files = {}
    for rank, name in enumerate(names):
        new = f"__{rank}_0.distcp"
        assert len(new) == len(name), (new, name)
        metadata = metadata.replace(name.encode(), f"@@{rank}_0.distcp".encode())
        files[new] = written[name]
    return {**files, ".metadata": metadata.replace(b"@@", b"__")}
