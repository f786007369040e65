"""`unbroken llm check`: which language model is configured, and whether it answers."""

from __future__ import annotations

import os
import time
from typing import Any, Final

import click

from supervisor import config
from supervisor.cli.output import print_answer
from supervisor.config import OpinionSettings
from supervisor.errors import ConfigError, LaunchRefused, ModelUnavailable, UnbrokenError

KNOWN: Final = "gpu_oom"
_WORDS: Final = (
    "step 41 loss 2.31",
    "Traceback (most recent call last):",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.20 GiB free.",
)


@click.group()
def llm() -> None:
    """The language model that may be asked about incidents."""


@llm.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def check(as_json: bool) -> None:
    """Say which model is configured, and ask it about a failure that is known.

    It waits for opinion.timeout_s at most. Exit code 1: no answer that can be used. Nothing of yours is sent.
    """
    import asyncio  # no other command needs it

    answer = asyncio.run(_checked(config.load_here().settings.opinion))
    print_answer(answer, as_json, lambda found: click.echo("\n".join(found["lines"])))
    if not answer["answers"]:
        raise UnbrokenError("the model cannot be used: see above, and `unbroken docs opinion`")


async def _checked(given: OpinionSettings) -> dict[str, Any]:
    found: dict[str, Any] = {"schema": 1, "backend": given.backend, "model": given.model, "url": given.url}
    lines = [f"configured: {_configured(given)}"]
    began = time.monotonic()
    try:
        problem, said = "", await _said(given)
        lines += said
    except (ConfigError, LaunchRefused, ModelUnavailable) as error:
        problem = str(error)
        lines.append(f"no answer: {problem}")
    took_s = round(time.monotonic() - began, 2)
    return found | {"answers": not problem, "problem": problem, "took_s": took_s, "lines": [*lines, f"took {took_s} s"]}


def _configured(given: OpinionSettings) -> str:
    if given.backend == "none":
        return "no model (opinion.backend is none)"
    if given.backend == "transformers":
        return f"the model in {given.model}, through transformers"
    key = f", with the key in {given.key_file}" if given.key_file else ", without a key"
    return f"{given.model} at {given.url}{key}"


async def _said(given: OpinionSettings) -> list[str]:
    """What came of a question, in words. Raises ConfigError, LaunchRefused, ModelUnavailable."""
    from diagnosis import llm as questions
    from diagnosis.incident import Incident
    from diagnosis.signals import ExitRecord, NodeEvidence, RankOutput
    from supervisor.opinion.queue import backend_of
    from supervisor.run.prepare import training_python

    config.check_opinion(given)
    price = config.opinion_price(os.environ)
    if missing := config.missing_for_opinion(given, config.working_folder()):
        raise ConfigError(missing)
    python = training_python("python", True, os.environ) if given.backend == "transformers" else ""
    backend = backend_of(given, python)
    if backend is None:
        raise ConfigError("there is no model to ask: set opinion.backend")
    end = ExitRecord(rank=0, local_rank=0, pid=7, code=1, signal=None, ended_at=1.0)
    evidence = NodeEvidence(node="n0", attempt=1, exits=(end,), outputs=(RankOutput(rank=0, tail=_WORDS),))
    known = Incident(id="i-1", opened_at=0.0, attempt=1, trigger="exit", evidence=(evidence,), world_size=1)
    shown = questions.shown_evidence(known)
    answer = await backend.ask(questions.question(shown))
    opinion = questions.ground(answer.text, shown, lines=answer.lines, model=answer.model)
    if opinion.problem:
        raise ModelUnavailable(f"it answers, but {opinion.problem}")
    right = opinion.failure_class.value == KNOWN
    said = "which is right" if right else f"which is wrong: {KNOWN} is right. It may be too small a model"
    tokens = f"{answer.tokens_read} read, {answer.tokens_written} written" if answer.tokens_read else "it does not say"
    answered = [f"it answers: {opinion.failure_class.value}, {said}", f"tokens: {tokens}"]
    if price is None:
        return [*answered, "price: not known; UNBROKEN_OPINION_PRICE=READ/WRITTEN says what a million tokens cost"]
    cost = f"; this question cost {price.of(answer.tokens_read, answer.tokens_written):.2g}" * bool(answer.tokens_read)
    return [*answered, f"price: {price.read:g} for a million tokens read, {price.written:g} written{cost}"]
