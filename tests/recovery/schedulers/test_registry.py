from __future__ import annotations

import asyncio
from importlib.metadata import EntryPoint

from recovery.schedulers import CALLS, GROUP, Local, load_schedulers
from recovery.scheduling import Answer


class Other(Local):
    name = "other"

    async def drain(self, node: str, reason: str) -> Answer:
        return Answer(outcome="done", text=f"{node} {reason}")


class Slurm(Other):
    name = "slurm"


class Partly:
    name = "partly"

    def job_of(self, environment: object) -> None: ...

    async def drain(self, node: str, reason: str) -> None: ...


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


def test_what_a_plug_in_must_have_keeps_its_names() -> None:
    """Plug-ins of others have these: a name that changes breaks them."""
    assert set(CALLS) == {
        "drain", "undrain", "requeue", "cancel", "end_step", "comment", "starts_again", "headless",
    }  # fmt: skip


def test_a_plug_in_that_lacks_a_call_is_skipped() -> None:
    found, problems = load_schedulers([point("partly", f"{__name__}:Partly")])
    assert ("partly" in found, len(problems)) == (False, 1)
