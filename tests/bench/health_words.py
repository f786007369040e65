"""Fits the words of `diagnosis/health_words.toml`, and says what they are worth on logs they were not fitted to.

A log is healthy or not; ridge regression gives each word a weight. Lines that the tests and the tables of rules have
made up are learned from, too, and never counted. Only words that stand in this project anyway become part of it: no
name of a site, a host or a person.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from diagnosis import health_words, tables
from tests.bench.diagnosis import NONE, UNKNOWN, WrongCorpus, load, ours
from tests.diagnosis.test_cases import CASES, tomllib

ROOT: Final = Path(__file__).resolve().parents[2]
FILE: Final = ROOT / "diagnosis" / "health_words.toml"
SAMPLES: Final = (*sorted((ROOT / "diagnosis" / "output_rules").glob("*.toml")), ROOT / "diagnosis/kernel/kernel.toml")
MADE_UP: Final = 0.2
"""A line that we made up counts so much of a log."""
RIDGE: Final = 0.33
SEEN: Final = 3
"""A word must stand in so many logs and lines."""
WRAP: Final = 116


class Example(NamedTuple):
    """A log, or a line that somebody made up."""

    words: frozenset[str]
    healthy: bool
    weight: float = 1.0


class Fitted(NamedTuple):
    """Weights as `health_words.toml` has them."""

    bias: float
    weights: dict[str, float]

    def score(self, words: frozenset[str]) -> float:
        return health_words.weigh(words, self.bias, self.weights)


def words_of(text: str) -> frozenset[str]:
    return frozenset(health_words.words(text.splitlines()))


def made_up() -> list[Example]:
    """The samples of the rules, and the tests' cases."""
    found = []
    for file in SAMPLES:
        for rows in tables.parse(file.read_text(encoding="utf-8")).values():
            for row in (one for one in rows if isinstance(one, dict)) if isinstance(rows, list) else ():
                healthy = row.get("severity") == "warning" or bool(row.get("benign"))
                found += [Example(words_of(one), healthy, MADE_UP) for one in row.get("samples", ())]
    for file in CASES:
        story = tomllib.loads(file.read_text(encoding="utf-8"))
        text = "\n".join(one["text"] for one in story["file"])
        found.append(Example(words_of(text), story["expect"]["class"] == NONE, MADE_UP))
    return found


def words_of_project() -> set[str]:
    """All words of our own texts."""
    found = {"#"}
    for pattern in ("*.py", "*.toml", "*.md"):
        for file in ROOT.glob(f"[!.]*/**/{pattern}"):
            if file != FILE:
                text = file.read_text(encoding="utf-8", errors="replace")
                found |= {part.lower() for part in health_words._WORD.findall(text)}
    return found


def fit(examples: Sequence[Example], allowed: set[str]) -> Fitted:
    """Ridge regression: 1 for a healthy log, 0 for others."""
    import numpy as np

    seen = Counter(word for one in examples for word in one.words)
    vocabulary = sorted(word for word, count in seen.items() if count >= SEEN and word in allowed)
    place = {word: at for at, word in enumerate(vocabulary)}
    rows = np.zeros((len(examples), len(vocabulary)))
    for row, one in zip(rows, examples, strict=True):
        known = [place[word] for word in one.words if word in place]
        row[known] = 1 / math.sqrt(len(known) or 1)
    counts = np.array([one.weight for one in examples])
    truth = np.array([float(one.healthy) for one in examples])
    mean = float(counts @ truth / counts.sum())
    root = np.sqrt(counts)
    weighed = rows * root[:, None]
    dual = np.linalg.solve(weighed @ weighed.T + RIDGE * np.eye(len(examples)), (truth - mean) * root)
    weights = dict(zip(vocabulary, map(float, weighed.T @ dual), strict=True))
    return Fitted(round(mean, 3), {word: round(one, 2) for word, one in weights.items() if abs(one) >= 0.005})


def report(paths: Sequence[Path]) -> dict[str, Any]:
    """Each corpus by words that were fitted to the others. Raises WrongCorpus."""
    if len(paths) < 2:
        raise WrongCorpus("give at least two corpora: each is read by words that were fitted to the others")
    sets = {path: load(path) for path in paths}
    logs = {
        path: [Example(words_of(one.text), one.label.value == NONE) for one in cases] for path, cases in sets.items()
    }
    ours_too, allowed = made_up(), words_of_project()
    found = []
    for path, cases in sets.items():
        others = [one for other, said in logs.items() if other != path for one in said]
        fitted = fit([*others, *ours_too], allowed)
        high = [
            case
            for case, log in zip(cases, logs[path], strict=True)
            if fitted.score(log.words) >= health_words.LIKE_A_HEALTHY_LOG
        ]
        silent = [case for case in high if ours(case).classes[0] == UNKNOWN]
        found.append(
            {
                "corpus": str(path),
                "cases": len(cases),
                "healthy": sum(case.label.value == NONE for case in cases),
                "like_healthy": len(high),
                "of_them_healthy": sum(case.accepts(NONE) for case in high),
                "rules_silent": len(silent),
                "of_them_right": sum(case.accepts(NONE) for case in silent),
            }
        )
    return {"sets": found, "fitted": fit([*(one for said in logs.values() for one in said), *ours_too], allowed)}


def write(fitted: Fitted) -> None:
    """The file, the words of one weight on a line."""
    by_weight = defaultdict(list)
    for word, weight in fitted.weights.items():
        by_weight[weight].append(word)
    lines = [
        "# Words of the ends of logs: above 0 they speak for health, below 0 for a failure; `#`: no line complains.",
        "# Fitted by `python -m tests.bench health-words CORPUS... --write`, never written by hand.",
        f"bias = {fitted.bias}",
        "",
        "[words]",
    ]
    for weight, words in sorted(by_weight.items(), reverse=True):
        lines += _row(f'"{weight:.2f}"', sorted(words))
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(name: str, words: Sequence[str]) -> Iterator[str]:
    if len(name) + len(" ".join(words)) < WRAP:
        yield f'{name} = "{" ".join(words)}"'
        return
    line = f'{name} = """'
    for word in words:
        if len(line) + len(word) > WRAP:
            yield line
            line = ""
        line += f"{' ' if line and not line.endswith(chr(34)) else ''}{word}"
    yield f'{line}"""'


def show(found: dict[str, Any]) -> None:
    """For people."""
    for one in found["sets"]:
        print(
            f"{one['corpus']}: {one['healthy']} of {one['cases']} healthy; {one['like_healthy']} read like healthy "
            f"logs, {one['of_them_healthy']} are; rules silent on {one['rules_silent']}, {one['of_them_right']} right"
        )
    print(f"{len(found['fitted'].weights)} words")
