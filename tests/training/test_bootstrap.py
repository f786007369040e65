"""A forked rank must be what `python -u script` is: each script runs with the real Python and through the stub."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASES = {
    name.strip(): text.strip()
    for name, _, text in (
        case.partition("\n") for case in (Path(__file__).with_name("cases.txt").read_text()).split("### ")[1:]
    )
}


@pytest.mark.parametrize("case", CASES)
def test_same_as_python(case: str, both: Callable[..., Any], script: Callable[..., Path]) -> None:
    path = script(CASES[case])
    real, warm = both(str(path), "--lr", "3e-4", "")
    if case == "environment":
        assert real[0].strip() == "[]"
        assert warm[0].strip() == "['UNBROKEN_ATTEMPT', 'UNBROKEN_HEARTBEAT_FD']"
        return
    if case == "descriptors":  # a test's subprocess leads no session; torchrun's worker does
        assert warm[0].strip() == "True True True"
        return
    assert warm == real


def test_relative_path_and_missing_file(both: Callable[..., Any], script: Callable[..., Path]) -> None:
    script("import sys; print(__file__, sys.argv, sys.path[0]); 1/0", "a.py")
    for path in ("a.py", "./a.py", "missing.py"):
        real, warm = both(path)
        assert warm == real


def test_modules_packages_and_folders(both: Callable[..., Any], tmp_path: Path) -> None:
    package = tmp_path / "pack" / "sub"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("NAME = 'helped'")
    (package / "train.py").write_text(
        "import sys\nfrom . import helper\nfrom ..sub.helper import NAME\n"
        "print(NAME, __name__, __spec__.name, __package__, sys.argv, sys.path[0])\nassert len(sys.argv) < 3"
    )
    (package / "__main__.py").write_text("from pack.sub import helper; print(__package__, __file__, helper.NAME)")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("import sys; print(sys.path[0], sys.argv, __file__, __package__)")
    for arguments in (
        ["-m", "pack.sub.train", "x"],
        ["-m", "pack.sub"],
        ["-m", "pack.sub.train", "a", "b"],
        ["folder"],
    ):
        real, warm = both(*arguments)
        assert warm == real
    real, warm = both("-m", "no.such.module")
    assert warm == real


def test_imports_beside_the_script(both: Callable[..., Any], script: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "bootstrap.py").write_text("WHO = 'the user'")
    (tmp_path / "stub.py").write_text("WHO = 'the user too'")
    real, warm = both(str(script("import bootstrap, stub; print(bootstrap.WHO, stub.WHO)")))
    assert warm == real


CHILDREN = """
import multiprocessing as mp, os, sys, torch
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor(i), os.getpid() != PARENT
PARENT = os.getpid()
def work(q, x):
    ours = os.environ.get("UNBROKEN_KEEPER_SOCKET")
    q.put((x, mp.current_process().name, __name__, ours, mp.parent_process() is not None))
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = mp.get_context(method)
        q = context.Queue()
        p = context.Process(target=work, args=(q, method))
        p.start(); print(q.get(timeout=40)); p.join(); print(p.exitcode)
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2)
    for numbers, other in loader: print(numbers.tolist(), other.tolist())
    print(mp.get_start_method())
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_children_of_every_kind(both: Callable[..., Any], script: Callable[..., Path]) -> None:
    real, warm = both(str(script(CHILDREN)))
    assert real[2] == 0, real[1]
    assert warm == real


def test_ranks_do_not_share_randomness(both: Callable[..., Any], script: Callable[..., Path]) -> None:
    path = script(
        "import random, uuid, numpy; print(random.random(), numpy.random.rand(), uuid.uuid4())\n"
        "import torch; print(torch.initial_seed())"
    )
    one, other = both(str(path), pythons=("", ""))
    assert not set(one[0].split()) & set(other[0].split())


@pytest.mark.e2e
@pytest.mark.parametrize(
    "case",
    [
        "exception",
        "segfault",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("arguments", "exit message", "globals", "orig", "atexit")
        ),
    ],
)
def test_cold_is_the_same_too(case: str, both: Callable[..., Any], script: Callable[..., Path]) -> None:
    real, cold = both(str(script(CASES[case])), "a", UNBROKEN_WARM="0")
    assert cold == real


def test_stdin_and_umask_and_cwd_travel(keeper: Any, script: Callable[..., Path], tmp_path: Path) -> None:
    import subprocess

    path = script("import os, sys, json; print(json.dumps([sys.stdin.read(), os.umask(0), os.getcwd()]))")
    done = subprocess.run(
        [keeper.stub, "-u", path],
        input="hello",
        env={**keeper.environment, "UNBROKEN_KEEPER_SOCKET": str(keeper.socket_path), "RANK": "0"},
        cwd=tmp_path,
        umask=0o027,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert json.loads(done.stdout) == ["hello", 0o027, os.path.realpath(tmp_path)], done.stderr
    assert sys.executable
