from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from supervisor.errors import LaunchRefused
from supervisor.run.prepare import python_of_script, python_word, training_python


@pytest.mark.parametrize(
    ("head", "word"),
    [
        ("#!/opt/env/bin/python3\nimport re\n", "/opt/env/bin/python3"),
        ("#!/opt/env/bin/python3.11 -sP\n", "/opt/env/bin/python3.11"),
        ("#!/usr/bin/env python3\n", "python3"),
        ("#!/usr/bin/env -S python3 -I\n", "python3"),
        ("#!/bin/sh\n'''exec' \"/a long/path/python\" \"$0\" \"$@\"\n' '''\n", "/a long/path/python"),
        ("#!/bin/sh\n'''exec' /long/path/python3 \"$0\" \"$@\"\n' '''\n", "/long/path/python3"),
        ("#!/usr/bin/env bash\nexec pyenv exec torchrun\n", ""),
        ("#!/bin/sh\nexec torchrun\n", ""),
        ("\x7fELF", ""),
        ("", ""),
        ("#!\n", ""),
    ],
)
def test_the_python_of_a_script_is_read_from_its_first_lines(head: str, word: str) -> None:
    assert python_word(head) == word


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def environment_with_torch(root: Path) -> Path:
    """A virtual environment as far as it matters here; its bin folder."""
    script(root / "lib/python3.11/site-packages/torch/version.py", "")
    (root / "bin").mkdir()
    (root / "bin/python3").symlink_to(sys.executable)
    return root / "bin"


def test_torchruns_own_python_is_found_and_stays_a_link(tmp_path: Path) -> None:
    bin_folder = environment_with_torch(tmp_path)
    script(bin_folder / "torchrun", f"#!{bin_folder}/python3\n")
    assert training_python("torchrun", False, {"PATH": str(bin_folder)}) == f"{bin_folder}/python3"


def test_behind_a_wrapper_the_real_python_is_asked_for(tmp_path: Path) -> None:
    wrapper = script(tmp_path / "shims/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    launcher = script(tmp_path / "torchrun", "#!/usr/bin/env python\n")
    assert python_of_script(launcher, {"PATH": str(wrapper.parent)}) == sys.executable


def test_a_python_without_torch_is_refused(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    with pytest.raises(LaunchRefused, match="has no torch"):
        training_python(str(tmp_path / "env/bin/python"), True, {})
