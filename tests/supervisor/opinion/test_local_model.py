"""A model in a process of its own: whatever its weights say, the answer has the form; and it never stays."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from diagnosis import llm
from diagnosis.incident import Culprit
from diagnosis.taxonomy import FailureClass
from supervisor.errors import ModelUnavailable
from supervisor.opinion import client, local_model
from supervisor.opinion.client import LocalModel

pytestmark = pytest.mark.timeout(400)  # a loaded machine imports torch and teaches the model for minutes
WORDS = ('{"', '": ', '", "', "lines", "rank ", "class", "Error: ", "governor", "null", "12")
TOKENS = {chr(code): [code] for code in range(32, 127)} | {text: [1000 + n] for n, text in enumerate(WORDS)}
OF_ID = {id: text for text, ids in TOKENS.items() for id in ids}


def request(question: llm.Question) -> dict[str, Any]:
    """As it reaches the process."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(LocalModel("m", "python", 60.0)._request(question)))
    return found


def written(question: llm.Question, rng: random.Random, *, hurry_after: int = 10_000) -> str:
    """What a model gives whose every choice is a throw of dice."""
    form = local_model.AnswerForm(local_model.answer_form(request(question), len(question.lines)), TOKENS)
    steps = 0
    while not form.done:
        form.hurry = steps >= hurry_after
        form.take(OF_ID[rng.choice(form.possible())])
        steps += 1
        assert steps < 2000
    return form.text


@pytest.mark.parametrize("seed", range(40))
def test_any_model_gives_the_form_and_what_is_in_it_is_grounded(
    question: llm.Question, seen: llm.ShownEvidence, seed: int
) -> None:
    text = written(question, random.Random(seed))
    answer = json.loads(text)
    assert list(answer) == ["lines", "failure_class", "culprits", "why", "rule"]
    assert len(answer["lines"]) == len(set(answer["lines"]))
    assert len(answer["why"]) <= llm.WHY_CHARS
    opinion = llm.ground(text, seen)
    assert not opinion.problem
    assert len(opinion.lines) == len(answer["lines"]) <= llm.MAX_LINES
    assert len(opinion.culprits) == len(answer["culprits"]) <= llm.MAX_CULPRITS
    if answer["rule"] is not None:
        assert answer["rule"]["text"] in seen.lines[answer["rule"]["line"] - 1].text


def test_a_vocabulary_that_cannot_write_the_form(question: llm.Question) -> None:
    form = local_model.AnswerForm(local_model.answer_form(request(question), 3), {"a": [1], "[": [2]})
    with pytest.raises(local_model.CannotAnswer, match="vocabulary"):
        form.possible()


def byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made, trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )


def sentence_piece() -> Any:
    """As Llama 2, Mistral and Gemma write: a mark for spaces, bytes where letters are missing."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    letters = [chr(code) for code in range(33, 127)]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return made, trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=letters, special_tokens=["<unk>", *bytes_], show_progress=False
    )


@pytest.mark.parametrize("kind", [byte_level, sentence_piece])
def test_what_is_written_is_what_the_tokenizer_reads(question: llm.Question, kind: Any) -> None:
    """In the vocabularies of real models, whose tokens have their own ideas of spaces."""
    transformers = pytest.importorskip("transformers")
    made, trainer = kind()
    made.train_from_iterator([llm.prompt(question)], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    texts = local_model.token_texts(tokenizer, len(tokenizer))
    of_id = {id: text for text, ids in texts.items() for id in ids}
    assert {" ", '"', "{", "a"} < set(texts)
    (before,) = tokenizer.encode("a", add_special_tokens=False)[-1:]
    for seed in range(10):
        rng = random.Random(seed)
        form = local_model.AnswerForm(local_model.answer_form(request(question), len(question.lines)), texts)
        ids = []
        while not form.done:
            ids.append(rng.choice(form.possible()))
            form.take(of_id[ids[-1]])
        assert tokenizer.decode([before, *ids], clean_up_tokenization_spaces=False) == "a" + form.text


# ----- the process -----


def ask(folder: Path, question: llm.Question, timeout_s: float = 90.0) -> llm.Opinion:
    async def scenario() -> Any:
        return await LocalModel(str(folder), sys.executable, timeout_s).ask(question)

    answer = asyncio.run(scenario())
    assert answer.model == folder.name
    assert answer.lines == len(question.lines)
    return llm.ground(answer.text, SEEN[0], lines=answer.lines, model=answer.model, id="rule-i-1")


SEEN: list[llm.ShownEvidence] = []


@pytest.fixture(autouse=True)
def _remember(seen: llm.ShownEvidence) -> None:
    SEEN[:] = [seen]


@pytest.mark.slow
@pytest.mark.lasts(50)
def test_what_the_model_has_learnt_comes_back(model_folder: Path, question: llm.Question) -> None:
    opinion = ask(model_folder, question)
    assert opinion.failure_class is FailureClass.SCRIPT_ERROR
    assert opinion.culprits == (Culprit(node="n1", rank=1),)
    assert opinion.lines == ("n1 rank 1: FluxError: governor 17 lost its balance",)
    assert opinion.why == "The governor lost its balance."
    assert opinion.rule is not None
    assert opinion.rule.text == "FluxError: governor 17 lost its balance"


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if str(client.PROGRAM) in " ".join(one.cmdline())]


@pytest.mark.slow
def test_what_takes_too_long_is_killed(model_folder: Path, question: llm.Question, monkeypatch: Any) -> None:
    monkeypatch.setattr(client, "GRACE_S", 0.0)
    with pytest.raises(ModelUnavailable, match=r"no answer within 0|complete in time"):
        ask(model_folder, question, 0.3)
    assert children() == []


@pytest.mark.slow
def test_what_takes_too_much_memory_is_killed(model_folder: Path, question: llm.Question, monkeypatch: Any) -> None:
    monkeypatch.setattr(client, "OVERHEAD_BYTES", 20 << 20)
    monkeypatch.setattr(client, "LOOK_S", 0.05)
    with pytest.raises(ModelUnavailable, match="memory"):
        ask(model_folder, question)


def test_a_model_larger_than_the_memory_that_is_left_is_not_loaded(tmp_path: Path, question: llm.Question) -> None:
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(psutil.virtual_memory().total)
    with pytest.raises(ModelUnavailable, match="memory are left"):
        ask(tmp_path, question)


ASKS = """
import asyncio, sys
from diagnosis import llm
from diagnosis.incident import Incident
from supervisor.opinion.client import LocalModel
asked = llm.question(llm.shown_evidence(Incident(id="i-1", opened_at=0.0, attempt=1, trigger="exit")))
asyncio.run(LocalModel(sys.argv[1], sys.executable, 60.0).ask(asked))
"""


@pytest.mark.slow
def test_the_process_has_the_lowest_priority_and_ends_with_the_process_that_asks(model_folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ASKS, str(model_folder)], cwd=Path(__file__).parents[3]) as asking:
        deadline = time.monotonic() + 90
        found: list[psutil.Process] = []
        while not (found and found[0].nice() == 19):
            assert time.monotonic() < deadline
            time.sleep(0.02)
            found = psutil.Process(asking.pid).children()
        while Path(f"/proc/{found[0].pid}/oom_score_adj").read_text() != "1000\n":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        environment = found[0].environ()
        assert (environment["CUDA_VISIBLE_DEVICES"], environment["HF_HUB_OFFLINE"]) == ("", "1")
        asking.kill()
    while found[0].is_running() and found[0].status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), r"\S"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), r"\S"),
        (lambda folder: os.rename(folder / "model.safetensors", folder / "pytorch_model.bin"), "safetensors"),
    ],
)
def test_a_folder_that_cannot_be_used(
    model_folder: Path, question: llm.Question, tmp_path: Path, spoil: Any, problem: str
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(model_folder, folder)
    spoil(folder)
    with pytest.raises(ModelUnavailable, match=problem):
        ask(folder, question)


@pytest.mark.slow
def test_code_of_the_folder_is_not_run(model_folder: Path, question: llm.Question, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelUnavailable):
        ask(folder, question)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_python_that_is_none(model_folder: Path, question: llm.Question, tmp_path: Path) -> None:
    async def scenario(python: str) -> None:
        await LocalModel(str(model_folder), python, 10.0).ask(question)

    with pytest.raises(ModelUnavailable, match="cannot be started"):
        asyncio.run(scenario(str(tmp_path / "nowhere")))
    with pytest.raises(ModelUnavailable, match=r"without an answer|it wrote no error"):
        asyncio.run(scenario("/bin/true"))
    with pytest.raises(ModelUnavailable, match=r"too much|ended with"):
        asyncio.run(scenario("/usr/bin/yes"))


def test_nobody_to_be_named(question: llm.Question) -> None:
    alone = msgspec.structs.replace(question, culprits=())
    assert json.loads(written(alone, random.Random(1)))["culprits"] == []
