"""The test of learning: labelled cases one after the other, and what rules that were learned on the way are worth.

For each case: rules first. Where they name no cause, a model is asked; an operator, who is a script and knows the
label, corrects its class; the rule that it proposes must pass the gates, and is approved. Then the next case. Each
verdict is compared with the one that the packaged rules alone give.

The answers are those of a file (recorded from a model before), of a model that is configured, or of a stand-in. The
stand-in proposes a whole line, chosen by a fixed rule: it tests this way of learning, and says nothing about a model.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from diagnosis import llm, rules
from diagnosis.incident import Incident
from diagnosis.llm import ShownEvidence
from diagnosis.proposals import Tried
from diagnosis.signals import ExitRecord, Frozen, NodeEvidence, RankOutput
from diagnosis.taxonomy import TAXONOMY, FailureClass
from supervisor.errors import ConfigError, ModelUnavailable
from supervisor.opinion import pending
from supervisor.opinion.client import Endpoint, LocalModel
from tests.bench.diagnosis import Guess, Labelled, WrongCorpus, ours

TROUBLE: Final = re.compile(
    r"error|fail|fatal|exceed|abort|exception|unable|cannot|could not|timeout|timed out|killed|denied|refused"
    r"|not found",
    re.IGNORECASE,
)
EARLIER, LAST = 12, 20
"""Lines with words of trouble before the last ones, and last lines, that the model is shown."""
HEALTHY_LINES: Final = 400
"""Of each healthy case, for the gates."""


class Case(Labelled, frozen=True, kw_only=True):
    """A labelled case, and where it comes from. `at`: when it happened, if that is known."""

    source: str = ""
    at: str = ""

    @property
    def repository(self) -> str:
        return re.split(r"[@#]", self.source.removeprefix("github:"))[0] or "unknown"


class Step(Frozen, frozen=True, kw_only=True):
    """What happened with one case. `alone`: the verdict of the packaged rules; `learned`: with what was learned."""

    id: str
    repository: str
    label: str
    alone: str
    learned: str
    right_alone: bool
    right: bool
    asked: bool = False
    opinion: str = ""
    proposed: bool = False
    gate: str = ""
    """Which gate rejected the rule that was proposed."""
    approved: str = ""
    """The id of the rule that this case taught."""


Answerer = Callable[[Case, llm.Question, ShownEvidence], str]


def load(path: Path) -> list[Case]:
    """The cases in order of time, where it is known; else of repository and file. Raises `WrongCorpus`."""
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    try:
        lines = [line for file in files for line in file.read_bytes().splitlines() if line.strip()]
        cases = [msgspec.json.decode(line, type=Case) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise WrongCorpus(f"{path}: {error}") from error
    if not cases:
        raise WrongCorpus(f"{path}: no case in it")
    return sorted(cases, key=lambda one: (one.at, one.repository))


def of_samples() -> list[Case]:
    """The samples of the packaged rules as cases, those of one rule after each other: for `--from-nothing`."""
    return [
        Case(id=f"{rule.id}-{number}", label=rule.failure_class, log=_failed_with(sample), source=rule.id)
        for rule in rules.packaged().rules
        if "output" in rule.sources and rule.severity != "warning" and rule.role == "cause"
        for number, sample in enumerate(rule.samples)
    ]


def _failed_with(line: str) -> str:
    return f"step 1 loss 3.1\nstep 2 loss 3.0\n{line}\nsrun: error: n1: task 0: Exited with exit code 1\n"


# ----- one case -----


def incident_of(case: Case) -> Incident:
    """The case as the model is shown it: the end of its log, and the lines of trouble before that."""
    lines = [line for line in case.text.splitlines() if line.strip()]
    before = [line for line in lines[:-LAST] if TROUBLE.search(line)][-EARLIER:]
    end = ExitRecord(rank=0, local_rank=0, pid=7, code=1, signal=None, ended_at=1.0)
    output = RankOutput(rank=0, tail=tuple(lines[-LAST:]), error_file="\n".join(before))
    evidence = NodeEvidence(node="node", attempt=1, exits=(end,), outputs=(output,))
    return Incident(id="i-1", opened_at=0.0, attempt=1, trigger="exit", evidence=(evidence,), world_size=1)


def names_a_cause(guess: Guess) -> bool:
    """Whether nobody need be asked: a cause or an outcome is named, or the log is healthy."""
    return TAXONOMY[FailureClass(guess.classes[0])].kind in ("cause", "outcome", "none")


class Learner:
    """The rules learned so far, in a folder as a job's."""

    def __init__(self, folder: Path, base: rules.Rules | None, healthy: Iterable[Case]) -> None:
        """`base`: what is used instead of the packaged rules. `healthy`: what no rule may match."""
        self._folder = folder
        self._into = folder / pending.APPROVED
        self._base = base
        self._healthy = tuple(line for case in healthy for line in case.text.splitlines()[:HEALTHY_LINES])
        self._seen: list[tuple[FailureClass, str]] = []

    def use(self) -> None:
        rules.use(pending.rows(self._into), self._base)

    def learn(self, case: Case, answer: str, shown: ShownEvidence, lines: int) -> tuple[str, str, str]:
        """The class of the answer, the gate that rejected the rule (or "none proposed"), and the id of a new rule."""
        name = f"rule-{case.id}"
        tried = Tried(healthy=self._healthy, cases=tuple(self._seen))
        opinion = llm.ground(answer, shown, lines=lines, model="bench", id=name, settled=case.label, tried=tried)
        said = opinion.problem or opinion.failure_class.value
        if opinion.rule is None:
            return said, opinion.rule_rejected.partition(":")[0] or "none proposed", ""
        pending.add(self._folder, opinion.rule, "proposed in a bench")
        try:
            pending.approve(
                self._folder, pending.version(pending.find(self._folder, name)), "script", "now", self._into
            )
        except ConfigError:
            pending.reject(self._folder, name, self._into)
            return said, "approve", ""
        self.use()
        return said, "", name

    def remember(self, case: Case) -> None:
        """From now on no rule of another class may match its lines of trouble."""
        lines = [line for line in case.text.splitlines() if TROUBLE.search(line)]
        self._seen += [(case.label, line) for line in lines[-HEALTHY_LINES:]]


# ----- who answers -----


def stand_in(_: Case, question: llm.Question, shown: ShownEvidence) -> str:
    """Proposes the first line of trouble of a rank that no rule knows, without what stands before its message."""
    of_ranks = [n for n, line in enumerate(shown.lines[: len(question.lines)], 1) if line.said]
    texts = {n: shown.lines[n - 1].text for n in of_ranks}
    telling = [n for n in of_ranks if TROUBLE.search(texts[n]) and not rules.default().scan_text([texts[n]])]
    number = next(iter(telling or of_ranks[-1:]), 1)
    text = re.sub(r"^(?:\S{0,40}\d\S{0,40}\s+|\[[^\]]{1,40}\]:?\s*)+", "", texts.get(number, ""))[:150].strip()
    rule = {"line": number, "text": text}
    return json.dumps({"lines": [number], "failure_class": "unknown", "culprits": [], "why": "", "rule": rule})


def recorded(file: Path) -> Answerer:
    """Answers of a file: one JSON object a line, with `question` (its hash) and `answer`. Raises `WrongCorpus`."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        answers = {str(one["question"]): str(one["answer"]) for one in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WrongCorpus(f"{file}: {error}") from error

    def answer(case: Case, question: llm.Question, _: ShownEvidence) -> str:
        if key_of(question) not in answers:
            raise ModelUnavailable(f"{file} has no answer on {case.id}")
        return answers[key_of(question)]

    return answer


def recording(backend: Endpoint | LocalModel, file: Path | None) -> Answerer:
    """Ask a model, and keep what it says in `file`."""

    def answer(_: Case, question: llm.Question, __: ShownEvidence) -> str:
        text = asyncio.run(backend.ask(question)).text
        if file is not None:
            with open(file, "a", encoding="utf-8") as kept:
                kept.write(json.dumps({"question": key_of(question), "answer": text}) + "\n")
        return text

    return answer


def key_of(question: llm.Question) -> str:
    return hashlib.sha256(llm.prompt(question).encode()).hexdigest()[:16]


# ----- the report -----


@contextmanager
def _rules_as_before() -> Iterator[None]:
    try:
        yield
    finally:
        rules.use(())


def run(cases: Sequence[Case], answerer: Answerer, *, from_nothing: bool, note: Callable[[str], None]) -> list[Step]:
    """All cases in their order. `from_nothing`: the packaged rules of output are switched off before."""
    base = rules.Rules(msgspec.structs.replace(rules.packaged().file, rule=())) if from_nothing else None
    healthy = [one for one in cases if one.label is FailureClass.NONE]
    steps = []
    with _rules_as_before(), tempfile.TemporaryDirectory(prefix="unbroken-bench-") as folder:
        rules.use((), base)
        alone = [ours(case) for case in cases]
        learner = Learner(Path(folder), base, healthy)
        for number, (case, before) in enumerate(zip(cases, alone, strict=True), 1):
            steps.append(_step(case, before, learner, answerer))
            if number % 50 == 0:
                note(f"{number} of {len(cases)}")
    return steps


def _step(case: Case, alone: Guess, learner: Learner, answerer: Answerer) -> Step:
    now = ours(case)
    step = Step(
        id=case.id,
        repository=case.repository,
        label=case.label.value,
        alone=alone.classes[0],
        learned=now.classes[0],
        right_alone=case.accepts(alone.classes[0]),
        right=case.accepts(now.classes[0]),
    )
    if names_a_cause(now):
        learner.remember(case)
        return step
    shown = llm.shown_evidence(incident_of(case))
    question = llm.question(shown)
    try:
        said, gate, name = learner.learn(case, answerer(case, question, shown), shown, len(question.lines))
    except ModelUnavailable as error:
        said, gate, name = str(error), "none proposed", ""
    learner.remember(case)
    return msgspec.structs.replace(
        step, asked=True, opinion=said, proposed=gate != "none proposed", gate=gate if not name else "", approved=name
    )


def report(steps: Sequence[Step]) -> dict[str, Any]:
    """What learning was worth, over all and per repository."""
    rows: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        rows[step.repository].append(step)
    return {
        "schema": 1,
        "all": _sums(steps),
        "repositories": {name: _sums(some) for name, some in rows.items()},
        "gates": dict(Counter(one.gate for one in steps if one.asked and one.gate)),
        "changed": [msgspec.to_builtins(one) for one in steps if one.alone != one.learned],
    }


def _sums(steps: Sequence[Step]) -> dict[str, int]:
    changed = [one for one in steps if one.alone != one.learned]
    return {
        "cases": len(steps),
        "right_alone": sum(one.right_alone for one in steps),
        "right": sum(one.right for one in steps),
        "settled_by_learned": sum(one.right and not one.right_alone for one in changed),
        "wrong_by_learned": sum(not one.right and (one.right_alone or not _is_cause(one.alone)) for one in changed),
        "asked": sum(one.asked for one in steps),
        "calls_saved": sum(not one.asked for one in changed),
        "rules": sum(bool(one.approved) for one in steps),
    }


def _is_cause(name: str) -> bool:
    return TAXONOMY[FailureClass(name)].kind == "cause"


def show(found: Mapping[str, Any]) -> None:
    """The report as tables."""
    console = Console()
    table = Table("repository", *found["all"])
    for name, row in [*found["repositories"].items(), ("all", found["all"])]:
        table.add_row(name, *map(str, row.values()))
    console.print(table)
    gates = ", ".join(f"{gate} {count}" for gate, count in sorted(found["gates"].items()))
    console.print(f"rejected, by gate: {gates or 'none'}", markup=False)
    for one in found["changed"]:
        console.print(f"{one['id']} ({one['label']}): {one['alone']} -> {one['learned']}", markup=False)
