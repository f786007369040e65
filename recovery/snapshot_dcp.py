"""Snapshots as torch's distributed checkpoints see them: a `StorageReader`, and a writer for older torch."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, StorageReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

__all__ = ["FileSystemReader", "MemoryReader", "StagedWriter"]


class MemoryReader(StorageReader):  # type: ignore[misc]
    """Gives each rank its own part. All ranks and their parts are as they were when it was written."""

    def __init__(self, found: Any) -> None:
        """`found`: `recovery.snapshot.read()`."""
        self._found = found
        tensors = [_Piece(tensor, leaf) for tensor, leaf in zip(found.tensors, found.leaves)]
        planner = DefaultSavePlanner()  # it knows the names that a load asks for
        planner.set_up_planner(found.tree(tensors), None, True)
        self._values = planner.state_dict
        self._mappings = planner.mappings

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is but one."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        described = {
            name: value.described() if isinstance(value, _Piece) else BytesStorageMetadata()
            for name, value in self._values.items()
        }
        return Metadata(state_dict_metadata=described, planner_data=self._mappings)

    def set_up_storage_reader(self, *_: Any, **__: Any) -> None:
        """Nothing is to be opened."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        try:
            self._read(plan, planner)
        except Exception as error:
            raise self._found.refused(error) from error
        done: Any = Future()
        done.set_result(None)
        return done

    def _read(self, plan: Any, planner: Any) -> None:
        for item in plan.items:
            value = self._values[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(value, data)
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            source = value.tensor
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                source = source.narrow(dimension, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, *_: Any) -> bool:
        return True


class _Piece:
    """A tensor, or this rank's part of one."""

    def __init__(self, tensor: Any, leaf: Any) -> None:
        self.tensor = tensor
        self._leaf = leaf

    def described(self) -> TensorStorageMetadata:
        leaf = self._leaf
        whole = torch.Size(leaf.shape if leaf.global_shape is None else leaf.global_shape)
        chunks = []
        if leaf.global_shape is None:
            chunks = [ChunkStorageMetadata(offsets=torch.Size([0] * len(whole)), sizes=whole)]
        elif leaf.chunk is not None:
            chunks = [ChunkStorageMetadata(offsets=torch.Size(leaf.chunk[0]), sizes=torch.Size(leaf.chunk[1]))]
        return TensorStorageMetadata(properties=TensorProperties(dtype=leaf.dtype), size=whole, chunks=chunks)


class StagedWriter(FileSystemWriter):  # type: ignore[misc]
    """A `FileSystemWriter` that has the stager copy."""

    def __init__(self, path: Any, stager: Any) -> None:
        super().__init__(path)
        self._stager = stager

    def stage(self, state_dict: Any) -> Any:
        return self._stager.stage(state_dict)
