"""What a shell offers after Tab, the man page, and the table that both are made from."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.cli import completion

ROOT = Path(__file__).parents[3]
HEAVY = ("click", "msgspec", "rich", "aiohttp", "supervisor.config")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("older", "newer")):
        job = tmp_path / "unbroken-jobs" / name
        (job / "epochs").mkdir(parents=True)
        os.utime(job / "epochs", (number, number))
        lines = '{"event":{"node":"n1"},"id":"i-1"}\n' + '{"event":{"node":"a\\nb"}}\n' * 20_000
        (job / "journal.1.jsonl").write_text(lines)
    (job / "journal.2.jsonl").write_text('{"event":{"node":"n2"},"id":"i-3"}\n')
    return tmp_path


def offered(line: str, cwd: Path) -> list[str]:
    table = completion.json.loads(completion.TABLE.read_bytes())
    *words, begun = line.split(" ")
    return [one.value or one.kind for one in completion.offered(table, words, begun, cwd)]


def test_the_table_and_the_man_page_are_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "docs/make_commands.py"))
    assert made["TABLE"].read_text(encoding="utf-8") == made["table"](), "run: python docs/make_commands.py"
    assert made["MAN"].read_text(encoding="utf-8") == made["man"](), "run: python docs/make_commands.py"


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("incid", ["incidents"]),
        ("why ", ["last", "i-3", "i-2", "i-1"]),
        ("why --json i-", ["i-3", "i-2", "i-1"]),
        ("why --job-dir older ", ["last", "i-1"]),
        ("why --job-dir nowhere ", []),
        ("cordon ", ["n1", "n2"]),
        ("swap --job-dir ol", ["older"]),
        ("status --job-dir ", ["newer", "older"]),
        ("status --job-dir /tm", ["/tm"]),
        ("status --jo", ["--job-dir", "--job"]),
        ("mode ", ["observe", "recommend", "enforce"]),
        ("run --mode re", ["recommend"]),
        ("run --mode enforce -- tor", ["file"]),
        ("export inc", ["incidents"]),
        ("bench reco", ["recovery"]),
        ("docs UnbrokenJobH", ["UnbrokenJobHeld"]),
        ("slurm-template train-", ["train-spares.sbatch"]),
        ("controller --lis", ["--listen"]),
        ("no-such-command ", []),
    ],
)
def test_offers(line: str, values: list[str], folder: Path) -> None:
    assert offered(line, folder) == values


def test_a_shell_is_answered_without_the_commands(folder: Path) -> None:
    code = (
        "import sys, unbroken; sys.argv[1:] = []; unbroken.main(); "
        f"print(*({HEAVY!r} & sys.modules.keys()), file=sys.stderr)"
    ).replace(repr(HEAVY), repr(set(HEAVY)))
    env = os.environ | {"_COMPLETE_UNBROKEN": "zsh_complete", "COMP_WORDS": "unbroken why i-", "COMP_CWORD": "2"}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "plain\ni-3\n_\nplain\ni-2\n_\nplain\ni-1\n_\n"
    assert done.stderr.strip() == ""


def test_bash_completes(folder: Path) -> None:
    unbroken = Path(sys.executable).with_name("unbroken")
    script = f"""
        PATH={unbroken.parent}:$PATH
        eval "$(unbroken completion bash)"
        COMP_WORDS=(unbroken why i-); COMP_CWORD=2
        _unbroken_completion unbroken i- why
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "i-3 i-2 i-1", done.stderr
