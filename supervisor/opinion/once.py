"""An opinion without a controller: on an incident of a job that has ended, from its journal and its folder.

Nothing is journalled: there is nobody left to do that. A proposed rule is kept all the same.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from diagnosis import llm
from diagnosis.incident import Opinion
from supervisor.config import OpinionSettings
from supervisor.job.job import Job
from supervisor.opinion.inquirer import Inquirer, backend_of
from supervisor.opinion.wiring import asked_of
from supervisor.run.interpreter import training_python
from supervisor.run.torchrun_options import CommandRefused


def ask_here(job: Job, job_dir: Path, incident: str, settings: OpinionSettings) -> Opinion:
    """The opinion, when it comes or its time is up; what is missing for one is its `problem`."""
    try:
        python = _python(job) if settings.backend == "transformers" else ""
    except CommandRefused as error:
        return llm.no_opinion(str(error))
    return asyncio.run(_ask(job, job_dir, incident, settings, python))


async def _ask(job: Job, job_dir: Path, incident: str, settings: OpinionSettings, python: str) -> Opinion:
    answer: asyncio.Future[Opinion] = asyncio.get_running_loop().create_future()
    backend = backend_of(settings, python)
    asks = Inquirer(backend, job_dir, lambda name: asked_of(job, name), lambda _, told: answer.set_result(told))
    problem = asks.want(incident)
    try:
        return llm.no_opinion(problem) if problem else await answer
    finally:
        await asks.close()


def _python(job: Job) -> str:
    """The interpreter that the job's command would run with here. Raises CommandRefused."""
    program = job.spec.command[0] if job.spec.command else "python"
    return training_python(program, os.path.basename(program).startswith("python"), os.environ)
