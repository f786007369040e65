"""Would a second reader help where the rules say `unknown`? Three kinds of it, beside the rules' own alternatives.

A linear classifier of hashed n-grams (ridge regression), BM25 over the labelled cases, and MiniLM's embeddings. Each
reads the complaints and the end of a log. Each case is read by a reader that has seen no case of its repository. What
the tests have made up (`tests/diagnosis/cases`) is learned from, and never counted. Nothing of
this is part of the program: docs/benchmarks.md says why.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from diagnosis import exceptions
from diagnosis.logs.templates import mask
from diagnosis.text import shape
from tests.bench.diagnosis import NONE, UNKNOWN, Guess, Labelled, WrongCorpus, load, ours
from tests.diagnosis.test_cases import CASES, tomllib

TAIL: Final = 40
COMPLAINTS: Final = 40
FEATURES: Final = 1 << 16
RIDGE: Final = 0.3
K1, B = 1.2, 0.75
NEIGHBOURS: Final = 5
MINILM_TOKENS: Final = 128
CONFIDENCES: Final = (0.0, 0.25, 0.5, 0.75)
"""A reader speaks only if it is so sure: shares of cases, the surest first."""


class Example(NamedTuple):
    """A labelled case as a reader sees it."""

    id: str
    repository: str
    label: str
    text: str
    case: Labelled | None = None
    """None: it is only learned from."""


class _Source(msgspec.Struct):
    id: str
    source: str = ""


def examples(paths: Sequence[Path]) -> list[Example]:
    """The cases of these corpora with their repositories, then those of the tests. Raises WrongCorpus."""
    found = []
    for path in paths:
        sources = [msgspec.json.decode(line, type=_Source) for line in path.read_bytes().splitlines() if line.strip()]
        for case, source in zip(load(path), sources, strict=True):
            name = re.split(r"[@#]", source.source.removeprefix("github:"))[0]
            repository = "/".join(re.split(r"[:/]", name)[:2]) or case.id
            found.append(Example(case.id, repository, case.label.value, seen(case.text), case))
    for file in CASES:
        story = tomllib.loads(file.read_text(encoding="utf-8"))
        text = "\n".join(one["text"] for one in story["file"])
        found.append(Example(file.stem, "tests", story["expect"]["class"], seen(text)))
    return found


def seen(text: str) -> str:
    """The complaints and the end of a log, without numbers."""
    lines = [line for line in text.splitlines() if line.strip()]
    chosen = [*[line for line in lines[:-TAIL] if exceptions.complains(line)][-COMPLAINTS:], *lines[-TAIL:]]
    return "\n".join(mask(shape(line.encode(errors="replace"))) for line in chosen)


Reader = Callable[[Example, Sequence[Example]], list[tuple[str, float]]]
"""A case, the cases that may be learned from -> classes with their weights, the best first."""


# ----- the readers -----


def _ngrams(text: str) -> Counter[int]:
    words = re.findall(r"[a-z_]{2,}|#", text.lower())
    grams = [*words, *(" ".join(pair) for pair in itertools.pairwise(words))]
    grams += [word[at : at + 4] for word in words for at in range(max(len(word) - 3, 0))]
    return Counter(zlib.crc32(gram.encode()) % FEATURES for gram in grams)


class Linear:
    """Ridge regression on vectors of the cases, one class against all others."""

    def __init__(self, vectors: dict[str, Any]) -> None:
        import numpy

        self._np = numpy
        self._place = {name: number for number, name in enumerate(vectors)}
        rows = numpy.stack(list(vectors.values()))
        self._products = rows @ rows.T

    def __call__(self, one: Example, known: Sequence[Example]) -> list[tuple[str, float]]:
        np = self._np
        places = [self._place[other.id] for other in known]
        labels = sorted({other.label for other in known})
        truth = np.array([[1.0 if other.label == label else 0.0 for label in labels] for other in known])
        gram = self._products[np.ix_(places, places)]
        dual = np.linalg.solve(gram + RIDGE * np.eye(len(known)), truth - truth.mean(axis=0))
        scores = self._products[self._place[one.id], places] @ dual + truth.mean(axis=0)
        return sorted(zip(labels, map(float, scores), strict=True), key=lambda pair: -pair[1])


def hashed(cases: Sequence[Example]) -> Linear:
    """Vectors of hashed words, pairs of words and parts of words."""
    import numpy as np

    vectors = {}
    for one in cases:
        vector = np.zeros(FEATURES, dtype=np.float32)
        for feature, count in _ngrams(one.text).items():
            vector[feature] = 1 + math.log(count)
        vectors[one.id] = vector / (np.linalg.norm(vector) or 1.0)
    return Linear(vectors)


def bm25(one: Example, known: Sequence[Example]) -> list[tuple[str, float]]:
    """The labels of the cases with the same rare words."""
    texts = [Counter(re.findall(r"[a-z_]{3,}", other.text.lower())) for other in known]
    having = Counter(word for words in texts for word in words)
    mean = sum(words.total() for words in texts) / len(texts)
    asked = set(re.findall(r"[a-z_]{3,}", one.text.lower()))
    scores = []
    for other, words in zip(known, texts, strict=True):
        norm = K1 * (1 - B + B * words.total() / mean)
        score = sum(
            math.log(1 + (len(known) - having[word] + 0.5) / (having[word] + 0.5))
            * words[word]
            * (K1 + 1)
            / (words[word] + norm)
            for word in asked & words.keys()
        )
        scores.append((score, other.label))
    votes: dict[str, float] = defaultdict(float)
    for score, label in sorted(scores, reverse=True)[:NEIGHBOURS]:
        votes[label] += score
    total = sum(votes.values()) or 1.0
    return sorted(((label, weight / total) for label, weight in votes.items()), key=lambda pair: -pair[1])


def minilm(cases: Sequence[Example], folder: Path) -> Linear:
    """Embeddings of the last complaints by a sentence model in this folder."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    vectors = {}
    for one in cases:
        lines = one.text.splitlines()
        told = [line for line in lines if exceptions.complains(line)][-8:] or lines[-8:]
        tokens = tokenizer(
            told or [""], padding=True, truncation=True, max_length=MINILM_TOKENS // 2, return_tensors="pt"
        )
        with torch.no_grad():
            states = model(**tokens).last_hidden_state
        weights = tokens["attention_mask"].unsqueeze(-1)
        pooled = torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1).mean(0)
        vectors[one.id] = torch.nn.functional.normalize(pooled, dim=0).numpy()
    return Linear(vectors)


# ----- the measurement -----


def report(paths: Sequence[Path], model: Path | None) -> dict[str, Any]:
    """How often each reader is right: on all cases, and where the rules say `unknown`. Raises WrongCorpus."""
    cases = examples(paths)
    counted = [one for one in cases if one.case is not None]
    if not counted:
        raise WrongCorpus("no case that counts")
    rules = {one.id: ours(one.case) for one in counted if one.case is not None}
    readers: dict[str, Reader] = {"hashed n-grams, linear": hashed(cases), "BM25": bm25}
    if model is not None:
        readers["MiniLM, linear"] = minilm(cases, model)
    silent = [one for one in counted if rules[one.id].classes[0] == UNKNOWN]
    found: dict[str, Any] = {
        "cases": len(counted),
        "repositories": len({one.repository for one in counted}),
        "rules": _share([(one, rules[one.id].classes[0], 1.0) for one in counted]),
        "silent": len(silent),
        "silent_failures": sum(one.label not in (NONE, UNKNOWN) for one in silent),
        "silent_healthy": sum(one.label == NONE for one in silent),
        "readers": {"the rules' first alternative": _silent([(one, *_first(rules[one.id])) for one in silent])},
    }
    for name, reader in readers.items():
        said = []
        for one in counted:
            known = [other for other in cases if other.repository != one.repository]
            label, weight = reader(one, known)[0]
            said.append((one, label, weight))
        mute = {one.id for one in silent}
        found["readers"][name] = _silent([row for row in said if row[0].id in mute]) | {"alone": _share(said)}
    return found


def _first(guess: Guess) -> tuple[str, float]:
    return (guess.classes[1], 1.0) if len(guess.classes) > 1 else (UNKNOWN, 0.0)


Said = Sequence[tuple[Example, str, float]]


def _share(said: Said) -> float:
    return sum(_is_right(one, label) for one, label, _ in said) / len(said)


def _is_right(one: Example, label: str) -> bool:
    return one.case is not None and one.case.accepts(label)


def _silent(said: Said) -> dict[str, Any]:
    """Right and wrong words where the rules are silent, of the surest share of the cases; `none` is no word."""
    ordered = sorted(said, key=lambda row: -row[2])
    rows = []
    for left_out in CONFIDENCES:
        kept = [row for row in ordered[: math.ceil(len(ordered) * (1 - left_out))] if row[1] not in (NONE, UNKNOWN)]
        right = sum(_is_right(one, label) for one, label, _ in kept)
        rows.append({"of_the_surest": 1 - left_out, "right": right, "wrong": len(kept) - right})
    return {"speaks": rows}


def show(found: dict[str, Any]) -> None:
    """For people."""
    print(f"{found['cases']} cases of {found['repositories']} repositories; rules right: {found['rules']:.3f}")
    print(f"rules silent: {found['silent']} ({found['silent_failures']} failures, {found['silent_healthy']} healthy)")
    for name, row in found["readers"].items():
        words = ", ".join(f"{one['right']} right {one['wrong']} wrong" for one in row["speaks"])
        alone = f"; alone on all cases {row['alone']:.3f}" if "alone" in row else ""
        print(f"{name}: all, 3/4, 1/2, 1/4 of the silent cases: {words}{alone}")
