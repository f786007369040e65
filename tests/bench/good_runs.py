"""What a comparison with good runs does to verdicts, on labelled logs that nobody wrote for it.

`noisy start`: a failure as labelled, after the first lines of a healthy log of the corpus; the good run is that healthy
log. `unrelated`: the same failure beside three healthy logs that have nothing to do with it. `healthy`: a healthy log
beside three such. No verdict may change for the worse.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from diagnosis.logs.compare import GoodRun, good_run
from diagnosis.logs.templates import TemplateBook
from supervisor.cli import diagnose
from supervisor.diagnose.read import Reading, joined_book
from tests.bench.diagnosis import NONE, UNKNOWN, Labelled, WrongCorpus, load

START_LINES: Final = 60
GOOD_RUNS: Final = 3


class Trial(NamedTuple):
    """A log to be diagnosed, alone and beside good ones."""

    kind: str
    case: Labelled
    text: str
    good: list[str]


def trials(paths: Sequence[Path], seed: int = 1) -> Iterator[Trial]:
    """All trials with these corpora. Raises WrongCorpus."""
    cases = [case for path in paths for case in load(path)]
    chance = random.Random(seed)
    healthy = [case for case in cases if case.label.value == NONE]
    if len(healthy) <= GOOD_RUNS:
        raise WrongCorpus("too few healthy logs")
    for case in cases:
        others = [one for one in healthy if one.id != case.id]
        beside = chance.sample(others, GOOD_RUNS)
        if case.label.value == NONE:
            yield Trial("healthy", case, case.text, [one.text for one in beside])
            continue
        yield Trial("unrelated", case, case.text, [one.text for one in beside])
        noise = beside[0].text.split("\n")
        yield Trial("noisy start", case, "\n".join([*noise[:START_LINES], case.text]), [beside[0].text])


def _read(text: str, name: str) -> Reading:
    data = text.encode(errors="replace")
    book = TemplateBook()
    book.feed(name, data, 1)
    return diagnose.read(io.BytesIO(data), name)._replace(book=book)


def _good(texts: Sequence[str]) -> list[GoodRun]:
    runs = []
    for number, text in enumerate(texts):
        name = f"good-{number}"
        reading = _read(text, name)
        runs.append(good_run(name, reading.logs, joined_book([reading]).templates(), until_progress=False))
    return runs


def report(paths: Sequence[Path]) -> dict[str, Any]:
    """How verdicts change beside good runs. Raises WrongCorpus."""
    rows: dict[str, dict[str, Any]] = {}
    for one in trials(paths):
        reading = _read(one.text, one.case.id)
        row = rows.setdefault(
            one.kind, {"cases": 0, "alone": [0, 0, 0], "beside": [0, 0, 0], "lost": [], "gained": [], "sure": []}
        )
        row["cases"] += 1
        found = []
        for name, runs in (("alone", []), ("beside", _good(one.good))):
            verdict = diagnose.answer([reading], runs)["verdict"]
            said = verdict["failure_class"]
            place = 0 if one.case.accepts(said) else 2 if said == UNKNOWN else 1
            row[name][place] += 1
            found.append((place, verdict["confidence"]))
        if found[0][0] == 0 != found[1][0]:
            row["lost"].append(one.case.id)
        if found[1][0] == 0 != found[0][0]:
            row["gained"].append(one.case.id)
        if found[1][0] == 1 and found[1][1] >= 0.9 and found[0][0] != 1:
            row["sure"].append(one.case.id)
    return {"schema": 1, "trials": rows}


def show(found: dict[str, Any]) -> None:
    """For people."""
    for kind, row in found["trials"].items():
        alone, beside = ("/".join(map(str, row[name])) for name in ("alone", "beside"))
        print(f"{kind}: {row['cases']} cases; right/wrong/unknown alone {alone}, beside good runs {beside}")
        print(
            f"  right before, not now: {row['lost']}; right now: {row['gained']}; newly wrong and sure: {row['sure']}"
        )
