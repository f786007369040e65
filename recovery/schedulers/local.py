"""No scheduler: what happens to nodes outside the job is for a person to do."""

from __future__ import annotations

from collections.abc import Mapping

from recovery.scheduling import Answer, JobThere

_NONE = Answer(outcome="unsupported", text="there is no scheduler: this holds for this job only")


class Local:
    name = "local"

    def job_of(self, environment: Mapping[str, str]) -> JobThere | None:  # noqa: ARG002
        return None

    async def drain(self, node: str, reason: str) -> Answer:  # noqa: ARG002 (the protocol's)
        return _NONE

    async def undrain(self, node: str, job: str) -> Answer:  # noqa: ARG002
        return _NONE

    async def requeue(self, job: str, exclude: tuple[str, ...], avoid: tuple[str, ...] = ()) -> Answer:  # noqa: ARG002
        return _NONE

    async def cancel(self, job: str) -> Answer:  # noqa: ARG002
        return _NONE

    async def end_step(self, job: str, nodes: tuple[str, ...]) -> Answer:  # noqa: ARG002
        return _NONE

    async def comment(self, job: str, text: str) -> Answer:  # noqa: ARG002
        return _NONE

    async def starts_again(self, job: str, requeues: int) -> bool:  # noqa: ARG002
        return False

    async def headless(self, job: str) -> str:  # noqa: ARG002
        return ""
