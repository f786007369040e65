"""The job's own work, by the shapes in a trace: the events are as torch 2.13 writes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from supervisor.active.shapes import COLLECTIVES, PRODUCTS, shapes_of


def product(name: str, *dims: list[int], dtype: str = "float") -> dict[str, Any]:
    return {"name": name, "args": {"Input Dims": list(dims), "Input type": [dtype] * len(dims)}}


def collective(name: str, elements: int, dtype: str = "BFloat16") -> dict[str, Any]:
    arguments = {"Collective name": name, "In msg nelems": elements, "dtype": dtype}
    return {"name": "record_param_comms", "args": arguments}


def test_products_of_a_step_the_costliest_first() -> None:
    found = shapes_of(
        [
            product("aten::addmm", [128], [32, 64], [64, 128]),
            product("aten::bmm", [4, 8, 16], [4, 16, 8]),
            product("aten::mm", [4096, 4096], [4096, 11008], dtype="c10::BFloat16"),
            product("aten::relu", [32, 128]),
            {"name": "ProfilerStep#3"},
        ]
    )
    assert found.products == (
        {"dtype": "bfloat16", "shape": [1, 4096, 4096, 11008]},
        {"dtype": "float32", "shape": [1, 32, 64, 128]},
        {"dtype": "float32", "shape": [4, 8, 16, 8]},
    )


def test_collectives_of_nccl_and_gloo() -> None:
    gloo = {"name": "gloo:all_reduce", "args": {"Input Dims": [[128, 64]], "Input type": ["float"]}}
    found = shapes_of([collective("allreduce", 1 << 20), collective("_allgather_base", 1000), gloo])
    assert found.collectives == (
        {"name": "all_reduce", "bytes": 1 << 21},
        {"name": "all_reduce", "bytes": 1 << 15},
        {"name": "all_gather", "bytes": 2048},
    )


def test_a_reduce_scatter_is_one() -> None:
    found = shapes_of([collective("_reduce_scatter_base", 1 << 20)])
    assert found.collectives == ({"name": "reduce_scatter", "bytes": 1 << 21},)


def test_what_is_impossible_is_left_out() -> None:
    hostile: list[dict[str, Any]] = [
        product("aten::mm", [2, 3], [4, 5]),
        product("aten::mm", [-1, 3], [3, 5]),
        product("aten::mm", [1 << 40, 3], [3, 5]),
        product("aten::mm", [2, 3], [3, 5], dtype="__import__"),
        {"name": "aten::mm", "args": {"Input Dims": "x", "Input type": None}},
        {"name": "aten::mm", "args": []},
        collective("allreduce", 1 << 60),
        collective("allreduce", -5),
        collective("os.system", 5),
    ]
    assert shapes_of(hostile) == ((), ())


def test_only_the_most_are_taken() -> None:
    many = [product("aten::mm", [number, 8], [8, 8]) for number in range(1, 100)]
    many += [collective("allreduce", 1 << number) for number in range(1, 30)]
    found = shapes_of(many)
    assert len(found.products) == PRODUCTS
    assert found.products[0]["shape"][1] == 99
    assert len(found.collectives) == COLLECTIVES


RANK = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as distributed
from supervisor.training.active_tests import Device, of_jobs, _one_call
rank = int(sys.argv[3])
distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
test = of_jobs({"rank": rank, "world": 2}, Device("cpu", 1), distributed, 1 << 12)["reduce_scatter"]
assert _one_call(test, Device("cpu", 1))[0]
test.work = lambda: None
assert not _one_call(test, Device("cpu", 1))[0], "what did not arrive is not missed"
distributed.barrier()
"""


@pytest.mark.slow
def test_a_reduce_scatter_of_real_ranks(tmp_path: Path) -> None:
    repository = str(Path(__file__).parents[3])
    command = [sys.executable, "-W", "error::FutureWarning", "-c", RANK, repository, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
