"""`unbroken diagnose` as a command."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from supervisor.cli.main import main


@pytest.fixture
def run():
    """What it prints."""

    def run(*arguments, stdin=None):
        result = CliRunner().invoke(main, ["diagnose", *map(str, arguments)], input=stdin)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


@pytest.fixture
def answer(run):
    """What it answers with `--json`."""

    def answer(*arguments, stdin=None):
        return json.loads(run(*arguments, "--json", stdin=stdin))

    return answer


@pytest.fixture
def traceback():
    """What Python prints of an exception in a step."""

    def traceback(name="KeyError: 'x'"):
        place = '  File "/home/u/train.py", line 41, in step'
        return "\n".join(["Traceback (most recent call last):", place, "    loss = batch['x']", name, ""])

    return traceback


@pytest.fixture
def dump():
    """A flight recorder's dump of a rank of four."""

    def dump(rank, waits, calls=5, late_s=0.0):
        entry = {
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[8]],
            "output_sizes": [[8]],
            "input_dtypes": ["Float"],
            "output_dtypes": ["Float"],
            "is_p2p": False,
            "frames": [{"name": "f", "filename": "train.py", "line": 3}],
        }
        entries = [
            entry
            | {"record_id": n, "collective_seq_id": n + 1, "state": "completed"}
            | {"time_created_ns": 10**18 + n * 10**9 + int(late_s * 1e9)}
            for n in range(calls)
        ]
        if waits:
            entries.append(
                entry
                | {"record_id": calls, "collective_seq_id": calls + 1, "state": "scheduled"}
                | {"time_created_ns": 10**18 + (calls + 4) * 10**9}
            )
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
        return {"version": "2.10", "pg_config": config, "entries": entries, "rank": rank}

    return dump
