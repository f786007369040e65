"""The diagnoser on labelled logs, beside what one would do without it; all on the same cases in one run.

A corpus is JSON Lines: `id`, `label` (a failure class), `log` or `files` (name -> text), and where known `also_accept`
(other classes that are right) and `secondary` (classes that are in the log and are not the cause).
"""

from __future__ import annotations

import io
import math
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from diagnosis.signals import Frozen
from diagnosis.taxonomy import FailureClass
from diagnosis.verdict import triage, weights

NONE: Final = FailureClass.NONE.value
UNKNOWN: Final = FailureClass.UNKNOWN.value
CONFUSIONS: Final = 12
BINS: Final = 5


class WrongCorpus(Exception):
    """The corpus cannot be read; the text says where and why."""


class Labelled(Frozen, frozen=True, kw_only=True):
    """One case of a corpus."""

    id: str
    label: FailureClass
    log: str = ""
    files: dict[str, str] = {}
    also_accept: tuple[FailureClass, ...] = ()
    secondary: tuple[FailureClass, ...] = ()
    culprit: str = ""
    """The node, rank or GPU that a reader names; empty: none."""

    @property
    def texts(self) -> dict[str, str]:
        return self.files or {self.id: self.log}

    @property
    def text(self) -> str:
        return "\n".join(self.texts.values())

    def accepts(self, failure_class: str) -> bool:
        return failure_class in (self.label.value, *(one.value for one in self.also_accept))


class Guess(NamedTuple):
    """What somebody says of one case: classes, the likeliest first, and how sure the first is."""

    classes: tuple[str, ...]
    confidence: float | None = None
    took_s: float = 0.0
    culprits: tuple[str, ...] = ()
    """What it names: nodes, `rank 3`, GPUs, `cpu 7`, files."""


Guesser = Callable[[Labelled], Guess]


def load(path: Path) -> list[Labelled]:
    """The cases of a file, or of all `*.jsonl` of a folder. Raises `WrongCorpus`."""
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise WrongCorpus(f"{path}: no *.jsonl in this folder")
    decode = msgspec.json.Decoder(Labelled).decode
    cases = []
    for file in files:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise WrongCorpus(f"{file}: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                cases.append(decode(line))
            except msgspec.DecodeError as error:
                raise WrongCorpus(f"{file}, line {number}: {error}") from error
    if not cases:
        raise WrongCorpus(f"{path}: no case in it")
    return cases


# ----- what one would do without us -----

_EXCEPTION: Final = re.compile(
    r"^(?:\[?\w*\d*\]?:?\s*)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit))\b", re.M
)
_BY_EXCEPTION: Final = {
    "OutOfMemoryError": "gpu_oom",
    "ModuleNotFoundError": "dependency_import_error",
    "ImportError": "dependency_import_error",
    "FileNotFoundError": "data_loading_error",
    "PermissionError": "permission_or_auth",
    "OSError": "storage_error",
    "IOError": "storage_error",
    "ConnectionError": "dns_or_connect",
    "ConnectionRefusedError": "dns_or_connect",
    "MaxRetryError": "dns_or_connect",
    "ValueError": "config_or_argument_error",
    "AssertionError": "config_or_argument_error",
    "DistBackendError": "nccl_network",
    "DistStoreError": "rendezvous_store",
    "UnpicklingError": "checkpoint_corrupt_or_mismatch",
    "KeyboardInterrupt": "preempted_or_cancelled",
    "ChildFailedError": "worker_crash",
}
_KEYWORDS: Final = (
    ("out of memory", "gpu_oom"),
    ("oom-kill", "host_oom"),
    ("no space left", "disk_full"),
    ("no module named", "dependency_import_error"),
    ("nccl", "nccl_network"),
    ("timeout", "nccl_timeout"),
    ("timed out", "nccl_timeout"),
    ("xid", "gpu_driver"),
    ("ecc", "gpu_ecc_uncorrectable"),
    ("illegal memory access", "cuda_illegal_access"),
    ("time limit", "preempted_or_cancelled"),
    ("cancelled", "preempted_or_cancelled"),
    ("connection", "dns_or_connect"),
    ("permission denied", "permission_or_auth"),
    ("segmentation fault", "worker_crash"),
    ("killed", "worker_crash"),
    ("nan", "loss_spike_or_nan"),
    ("traceback", "script_error"),
    ("error", "script_error"),
)


def last_traceback_line(case: Labelled) -> Guess:
    """The exception in the last line that looks like one, by its type."""
    found = _EXCEPTION.findall(case.text)
    if not found:
        return Guess((NONE,))
    return Guess((_BY_EXCEPTION.get(found[-1].rsplit(".", 1)[-1], "script_error"),))


def first_keyword(case: Labelled) -> Guess:
    """The first line that has a word of trouble in it, by that word."""
    for line in case.text.lower().splitlines():
        for word, failure_class in _KEYWORDS:
            if word in line:
                return Guess((failure_class,))
    return Guess((NONE,))


class Nearest:
    """The label of the most similar other case: cosine of weighted words."""

    def __init__(self, cases: Sequence[Labelled]) -> None:
        words = [Counter(re.findall(r"[a-z_]{3,30}", case.text.lower())) for case in cases]
        seen = Counter(word for each in words for word in each)
        self._labels = {case.id: case.label.value for case in cases}
        self._vectors = {
            case.id: _unit(
                {word: (1 + math.log(count)) * math.log(len(cases) / seen[word]) for word, count in each.items()}
            )
            for case, each in zip(cases, words, strict=True)
        }
        self._having: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for name, vector in self._vectors.items():
            for word, weight in vector.items():
                self._having[word].append((name, weight))

    def __call__(self, case: Labelled) -> Guess:
        score: Counter[str] = Counter()
        for word, weight in self._vectors[case.id].items():
            for name, other in self._having[word]:
                score[name] += weight * other  # type: ignore[assignment]  # a Counter of weights
        del score[case.id]
        nearest = [self._labels[name] for name, _ in score.most_common(20)] or [NONE]
        return Guess(tuple(dict.fromkeys(nearest))[:3])


def _unit(vector: dict[str, float]) -> dict[str, float]:
    length = math.sqrt(sum(weight * weight for weight in vector.values())) or 1.0
    return {word: weight / length for word, weight in vector.items()}


def ours(case: Labelled) -> Guess:
    """What `unbroken diagnose` says."""
    from supervisor.cli import diagnose

    started = time.perf_counter()
    logs = [diagnose.read(io.BytesIO(text.encode(errors="replace")), name) for name, text in case.texts.items()]
    answer = diagnose.answer(logs)
    took_s = time.perf_counter() - started
    verdict = answer["verdict"]
    others = [one["failure_class"] for one in answer["alternatives"]]
    named = tuple(
        name
        for one in verdict["culprits"]
        for name in (
            one.get("node"),
            one.get("gpu"),
            f"rank {one['rank']}" if one.get("rank") is not None else "",
            f"{one['kind']} {one['name']}" if one.get("name") else "",
            one.get("name", "") if not one.get("name", "").isdigit() else "",
        )
        if name
    )
    return Guess((verdict["failure_class"], *others), verdict["confidence"], took_s, named)


# ----- other weights -----


def use_weights(file: Path | None, without: Iterable[str]) -> None:
    """From now on verdicts are made with these weights. Raises `WrongCorpus`."""
    try:
        used = weights.packaged() if file is None else weights.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WrongCorpus(f"{file}: {error}") from error
    for name in without:
        if name not in adjustments():
            raise WrongCorpus(f"--without {name}: no factor and no row of that name")
        used = weights.without(used, name)
    weights.use(used)


def adjustments() -> list[str]:
    """The names of all factors and rows."""
    return list(dict.fromkeys([*weights.packaged().factor, *(row.name for row in triage.ADJUSTMENTS)]))


class Removed(Frozen, frozen=True, kw_only=True):
    """What changes without one factor or row. Nothing: no case of the corpus wants it."""

    name: str
    lost: tuple[str, ...] = ()
    """Cases that are right only with it."""
    gained: tuple[str, ...] = ()
    """Cases that are right only without it."""
    changed: int = 0
    """Cases whose verdict is another, or more or less sure."""


def without_each(path: Path) -> list[dict[str, Any]]:
    """The verdicts of a corpus without each factor and row, one at a time."""
    cases, used = load(path), weights.current()
    before = [ours(case) for case in cases]
    found = []
    try:
        for name in adjustments():
            weights.use(weights.without(used, name))
            after = [ours(case) for case in cases]
            pairs = list(zip(cases, before, after, strict=True))
            right = [(one.id, one.accepts(a.classes[0]), one.accepts(b.classes[0])) for one, a, b in pairs]
            removed = Removed(
                name=name,
                lost=tuple(case for case, was, now in right if was and not now),
                gained=tuple(case for case, was, now in right if now and not was),
                changed=sum((a.classes[0], a.confidence) != (b.classes[0], b.confidence) for _, a, b in pairs),
            )
            found.append({"lost": [], "gained": [], "changed": 0} | msgspec.to_builtins(removed))
    finally:
        weights.use(used)
    return found


def show_each(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table of what changes without each factor and row."""
    table = Table("without", "wrong then", "right then", "changed")
    for row in rows:
        table.add_row(row["name"], " ".join(row["lost"]), " ".join(row["gained"]), str(row["changed"]))
    Console().print(table)


# ----- scores -----


def score(cases: Sequence[Labelled], guesses: Sequence[Guess]) -> dict[str, Any]:
    """How good the guesses are."""
    right = [case.accepts(guess.classes[0]) for case, guess in zip(cases, guesses, strict=True)]
    in_three = [any(map(case.accepts, guess.classes[:3])) for case, guess in zip(cases, guesses, strict=True)]
    healthy = [guess for case, guess in zip(cases, guesses, strict=True) if case.label is FailureClass.NONE]
    misses = [(case, guess.classes[0]) for case, guess, good in zip(cases, guesses, right, strict=True) if not good]
    return {
        "top_1": _share(right),
        "top_3": _share(in_three),
        "healthy": len(healthy),
        "false_alarms": sum(guess.classes[0] not in (NONE, UNKNOWN) for guess in healthy),
        "missed": sum(said == NONE for case, said in misses),
        "symptom_for_cause": sum(said in {one.value for one in case.secondary} for case, said in misses),
        "confusions": [
            {"label": label, "said": said, "count": count}
            for (label, said), count in Counter((case.label.value, said) for case, said in misses).most_common(
                CONFUSIONS
            )
        ],
    }


def per_class(cases: Sequence[Labelled], guesses: Sequence[Guess]) -> list[dict[str, Any]]:
    """For each class: cases, how many were found, and how often it was said of another's."""
    said = Counter(guess.classes[0] for guess in guesses)
    rows = []
    for label, count in Counter(case.label.value for case in cases).most_common():
        found = sum(
            case.accepts(guess.classes[0])
            for case, guess in zip(cases, guesses, strict=True)
            if case.label.value == label
        )
        wrongly = sum(
            guess.classes[0] == label and not case.accepts(label) for case, guess in zip(cases, guesses, strict=True)
        )
        rows.append({"label": label, "cases": count, "found": found, "said": said[label], "wrongly": wrongly})
    return rows


def calibration(cases: Sequence[Labelled], guesses: Sequence[Guess]) -> dict[str, Any]:
    """Confidence against how often it was right, in bins; and the mean gap between both, weighted by cases (ECE)."""
    binned: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for case, guess in zip(cases, guesses, strict=True):
        sure = guess.confidence or 0.0
        binned[min(int(sure * BINS), BINS - 1)].append((sure, case.accepts(guess.classes[0])))
    rows = [
        {
            "from": number / BINS,
            "cases": len(members),
            "confidence": statistics.fmean(sure for sure, _ in members),
            "right": _share([good for _, good in members]),
        }
        for number, members in sorted(binned.items())
    ]
    gap = sum(row["cases"] * abs(row["confidence"] - row["right"]) for row in rows) / len(cases)
    return {"bins": rows, "expected_error": gap}


_GPU_FUNCTION: Final = re.compile(r"\.\d$")


def names_same(wanted: str, name: str) -> bool:
    """Whether both name one node, rank or GPU: without domains, a GPU's function, and the word before a number."""
    one, other = (
        _GPU_FUNCTION.sub(
            "",
            text.lower()
            .removeprefix("gpu ")
            .removeprefix("cuda:")
            .removeprefix("rank ")
            .removeprefix("task:")
            .replace("#", " "),
        )
        for text in (wanted, name)
    )
    if one.isdigit() or other.isdigit():
        return one == other
    first, second = (text if re.match(r"[\d.:]+$", text) else text.partition(".")[0] for text in (one, other))
    return first == second or (":" in first and (second.endswith(first) or first.endswith(second)))


def names_all(wanted: str, names: Collection[str]) -> bool:
    """Whether each of `ranks 0 and 2` or `n1,n2` is named; of `GPU 3 on n1`, one of both."""
    listed = [wanted] if "[" in wanted else re.split(r",\s*|\s+and\s+", wanted.removeprefix("ranks "))
    told = [part for name in names for part in (name, *name.split(" on ")[1:])]
    return all(any(names_same(one, name) for one in part.split(" on ") for name in told) for part in listed)


def culprits(cases: Sequence[Labelled], guesses: Sequence[Guess]) -> dict[str, int]:
    """Of the cases whose label names a culprit: how many name it, another one, and none."""
    found = {"right": 0, "wrong": 0, "missing": 0}
    for case, guess in zip(cases, guesses, strict=True):
        if case.culprit:
            found["right" if names_all(case.culprit, guess.culprits) else "wrong" if guess.culprits else "missing"] += 1
    return found


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


def times(guesses: Iterable[Guess]) -> dict[str, float]:
    """Seconds a case."""
    took = sorted(guess.took_s for guess in guesses)
    return {
        "median_s": statistics.median(took),
        "p95_s": took[min(len(took) - 1, math.ceil(0.95 * len(took)) - 1)],
        "max_s": took[-1],
    }


def report(path: Path) -> dict[str, Any]:
    """Everything, for a corpus. Raises `WrongCorpus`."""
    cases = load(path)
    ours(cases[0])  # rules are compiled once
    guesses = [ours(case) for case in cases]
    guessers: dict[str, Guesser] = {
        "last traceback line": last_traceback_line,
        "first keyword": first_keyword,
        "nearest neighbour": Nearest(cases),
    }
    beside = {name: score(cases, [guess(case) for case in cases]) for name, guess in guessers.items()}
    return {
        "schema": 1,
        "cases": len(cases),
        "scores": {"unbroken": score(cases, guesses), **beside},
        "classes": per_class(cases, guesses),
        "calibration": calibration(cases, guesses),
        "culprits": culprits(cases, guesses),
        "times": times(guesses),
        "wrong": [
            {"id": case.id, "label": case.label.value, "said": guess.classes[0], "confidence": guess.confidence}
            for case, guess in zip(cases, guesses, strict=True)
            if not case.accepts(guess.classes[0])
        ],
    }


def show(found: dict[str, Any]) -> None:
    """For people."""
    console = Console(width=110, highlight=False)
    table = Table(title=f"{found['cases']} cases")
    for heading in ("", "top-1", "top-3", "false alarms", "failures missed", "a symptom taken"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in found["scores"].items():
        alarms = f"{row['false_alarms']} of {row['healthy']}"
        others = (str(row[key]) for key in ("missed", "symptom_for_cause"))
        table.add_row(name, f"{row['top_1']:.1%}", f"{row['top_3']:.1%}", alarms, *others)
    console.print(table)
    classes = Table(title="unbroken, by class")
    for heading in ("class", "cases", "found", "said of another"):
        classes.add_column(heading, justify="left" if heading == "class" else "right")
    for row in found["classes"]:
        classes.add_row(row["label"], *(str(row[key]) for key in ("cases", "found", "wrongly")))
    console.print(classes)
    for row in found["scores"]["unbroken"]["confusions"]:
        console.print(f"  {row['label']} taken for {row['said']}: {row['count']}")
    for row in found["calibration"]["bins"]:
        told = f"{row['confidence']:.2f} said, {row['right']:.2f} right"
        console.print(f"confidence from {row['from']:.1f}: {row['cases']} cases, {told}")
    console.print(f"calibration: confidence is {found['calibration']['expected_error']:.3f} off in the mean")
    told = ", ".join(f"{count} {how}" for how, count in found["culprits"].items())
    console.print(f"culprits of the cases that name one: {told}")
    took = {key: f"{1000 * value:.1f}" for key, value in found["times"].items()}
    console.print(f"time per case: median {took['median_s']} ms, 95 % {took['p95_s']} ms, most {took['max_s']} ms")
