from __future__ import annotations

import asyncio
from importlib.metadata import EntryPoint

from recovery.schedulers import GROUP, load_schedulers
from recovery.scheduling import Answer, Local


class Other(Local):
    name = "other"

    async def drain(self, node: str, reason: str) -> Answer:
        return Answer(outcome="done", text=f"{node} {reason}")


class Slurm(Other):
    name = "slurm"


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, GROUP)


def test_the_built_in_ones_need_no_plug_in() -> None:
    found, problems = load_schedulers([])
    assert (set(found), problems) == ({"local", "slurm"}, ())
    assert asyncio.run(found["local"].drain("n1", "why")).outcome == "unsupported"


def test_plug_ins_are_taken_and_broken_ones_told_of() -> None:
    here = __name__
    found, problems = load_schedulers(
        [
            point("mine", f"{here}:Other"),
            point("absent", "no_such_module:X"),
            point("no_scheduler", "builtins:dict"),
            point("double", f"{here}:Slurm"),
        ]
    )
    assert set(found) == {"local", "slurm", "other"}
    assert asyncio.run(found["other"].drain("n1", "why")).text == "n1 why"
    assert [problem.split()[1] for problem in problems] == ["absent", "no_scheduler", "double"]
