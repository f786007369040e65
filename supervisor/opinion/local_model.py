"""Asks a language model in a folder, once: a question as JSON on stdin, the answer as JSON on stdout, then the end.

Runs in the training environment (torch, transformers, the standard library, nothing of ours). The model cannot give
anything but the form that was asked for: at every step only tokens that continue it are possible (`AnswerForm`). It is
never fetched from anywhere, executes no code of its folder, and reads safetensors only.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
LONGEST_TOKEN = 24
"""Characters; longer tokens are not used."""
NEW_TOKENS = 1400
"""Enough for an answer of the greatest length in a vocabulary of single letters."""
SHORT, FEW = 3, 8
"""What ends within so many characters is looked beyond, where it is so few."""
RULE_MIN_CHARS, RULE_MAX_CHARS = 12, 160
IN_A_HURRY = 0.8
"""After this part of its time it says no more than it must."""


class CannotAnswer(Exception):
    """In words for a person."""


class Part(NamedTuple):
    """A place in the answer: one of `options` follows, or free text, or words of a line."""

    options: tuple[str, ...] = ()
    """None is the beginning of another."""
    then: Callable[[str], Part | None] = lambda _: None
    """What follows the option that was chosen (or the text that was written); None: the end."""
    free_chars: int = 0
    """Free text of at most so many characters, up to a quotation mark."""
    line: str = ""
    """Words of this line, as they stand there, up to a quotation mark."""


def answer_form(question: dict[str, Any], lines: int) -> Part:
    """The first place of an answer to `question` of which `lines` lines are shown."""
    classes, culprits = question["classes"], question["culprits"]
    texts = [plain_words(text) for text in question["texts"][:lines]]

    def numbers(left: list[int], count: int) -> Part:
        options = [f"{number}]" for number in left]
        options += [f"{number}, " for number in left] if count + 1 < min(question["max_lines"], lines) else []

        def then(chosen: str) -> Part:
            number = int(chosen.rstrip("], "))
            return named() if chosen.endswith("]") else numbers([one for one in left if one != number], count + 1)

        return Part(tuple(options), then)

    def named() -> Part:
        options = tuple(f', "failure_class": "{name}", "culprits": [' for name in classes)
        return Part(options, lambda _: blamed(list(culprits), 0))

    def blamed(left: list[str], count: int) -> Part:
        more = left and count + 1 < question["max_culprits"]
        options = [f"{json.dumps(label)}]" for label in left] + ["]"] * (count == 0)
        options += [f"{json.dumps(label)}, " for label in left] if more and len(left) > 1 else []

        def then(chosen: str) -> Part:
            if chosen.endswith("]"):
                return Part((', "why": "',), lambda _: Part(free_chars=question["why_chars"], then=ruled))
            label = json.loads(chosen.rstrip(", "))
            return blamed([one for one in left if one != label], count + 1)

        return Part(tuple(options), then)

    def ruled(_: str) -> Part:
        options = [', "rule": null}']
        options += [f', "rule": {{"line": {n}, "text": "' for n, text in enumerate(texts, 1) if text]

        def then(chosen: str) -> Part | None:
            if chosen.endswith("}"):
                return None
            number = int(chosen.partition('"line": ')[2].partition(",")[0])
            return Part(line=texts[number - 1], then=lambda _: Part(("}}",)))

        return Part(tuple(options), then)

    return Part(('{"lines": [',), lambda _: numbers(list(range(1, lines + 1)), 0))


def plain_words(line: str) -> str:
    """The longest piece of a line that needs no escapes in JSON; empty when it is too short to tell anything."""
    pieces = "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "\n" for c in line).split("\n")
    longest = max(pieces, key=len).strip()
    return longest if len(longest) >= RULE_MIN_CHARS else ""


class AnswerForm:
    """Follows an answer as it is written; `text` is what was written so far, `done` that it is complete."""

    def __init__(self, first: Part, tokens: dict[str, list[int]]) -> None:
        """`tokens`: text -> the ids of the tokens that are just that text."""
        self.text = ""
        self.done = False
        self.hurry = False
        """From now on only the shortest way to the end is open."""
        self._tokens = tokens
        self._free = [(len(text), ids) for text, ids in tokens.items() if '"' not in text and "\\" not in text]
        self._closes: list[tuple[int, list[int]]] | None = None
        self._text: list[int] = []
        self._part: Part | None = first
        self._since = 0
        """Where in `text` the part begins."""

    @property
    def _written(self) -> str:
        return self.text[self._since :]

    def possible(self) -> list[int]:
        """Ids of the tokens that may come next. Raises CannotAnswer when the vocabulary has none."""
        found = self._possible()
        if not found:
            raise CannotAnswer("the model's vocabulary cannot form the answer")
        return found

    def _possible(self) -> list[int]:
        part, written = self._part, self._written
        assert part is not None
        if part.free_chars:
            if self.hurry:
                return self._ids(('"',))
            left = part.free_chars - len(written)
            if left < LONGEST_TOKEN:
                return [id for length, ids in (*self._free, *self._closing(part)) if length <= left for id in ids]
            if not self._text:  # the same at every step: a hundred thousand in many vocabularies
                self._text = [id for _, ids in (*self._free, *self._closing(part)) for id in ids]
            return self._text
        if part.line:
            rests = () if self.hurry and len(written) >= RULE_MIN_CHARS else _rests(part.line, written)
            enough = len(written) >= RULE_MIN_CHARS or not any(rests)
            return self._ids((*rests, *(_ahead('"', part.then(written + '"')) if enough else ())))
        options = [option for option in part.options if option.startswith(written)]
        if self.hurry and not written:
            options = [min(options, key=len)]
        rests = [option[len(written) :] for option in options]
        if sum(len(rest) <= SHORT for rest in rests) <= FEW and not self.hurry:
            # Tokens do not end where parts do: a model that may not use the one it is used to says something else.
            for option in options:
                rest = option[len(written) :]
                rests += _ahead(rest, part.then(option)) if len(rest) <= SHORT else ()
        return self._ids(rests)

    def _closing(self, part: Part) -> list[tuple[int, list[int]]]:
        """Tokens that end free text, with what they say of it before that: length of that, ids."""
        if self._closes is None:
            nexts = _ahead('"', part.then('"'))
            split = ((text.partition('"'), ids) for text, ids in self._tokens.items() if '"' in text)
            self._closes = [
                (len(said), ids)
                for (said, mark, rest), ids in split
                if "\\" not in said and any(one.startswith(mark + rest) for one in nexts)
            ]
        return self._closes

    def _ids(self, rests: Iterable[str]) -> list[int]:
        """Of every token that begins one of `rests`."""
        starts = {rest[:length] for rest in rests for length in range(1, min(len(rest), LONGEST_TOKEN) + 1)}
        return [id for start in starts for id in self._tokens.get(start, ())]

    def take(self, text: str) -> None:
        """A token was chosen."""
        for character in text:
            self.text += character
            part, written = self._part, self._written
            assert part is not None
            is_text = bool(part.free_chars or part.line)
            if written.endswith('"') if is_text else written in part.options:
                self._part = part.then(written)
                self._since = len(self.text)
        self.done = self._part is None


def _ahead(rest: str, following: Part | None) -> list[str]:
    """`rest` and what may stand after it."""
    return [rest, *(rest + option for option in (following.options if following is not None else ()))]


def _rests(line: str, written: str) -> list[str]:
    """How `line` goes on wherever `written` stands in it, within the longest text of a rule."""
    left = RULE_MAX_CHARS - len(written)
    if not written:
        return [line[at : at + LONGEST_TOKEN] for at in range(len(line)) if line[at] != " "]
    rests, at = [], line.find(written)
    while at >= 0:
        end = at + len(written)
        rests.append(line[end : end + min(left, LONGEST_TOKEN)])
        at = line.find(written, at + 1)
    return rests


# ----- the model -----


def token_texts(tokenizer: Any, size: int) -> dict[str, list[int]]:
    """Text -> ids of the tokens that add just this text to what stands before them; ASCII only."""
    anchor = next(
        (ids[-1] for ids in (tokenizer.encode(word, add_special_tokens=False) for word in ("a", "x", "0")) if ids), None
    )
    if anchor is None:
        raise CannotAnswer("the tokenizer knows no letters")
    before = tokenizer.decode([anchor])
    special = set(tokenizer.all_special_ids)
    found: dict[str, list[int]] = {}
    for id in range(min(size, len(tokenizer))):
        if id in special:
            continue
        whole = tokenizer.decode([anchor, id], clean_up_tokenization_spaces=False)
        text = whole[len(before) :] if whole.startswith(before) else ""
        if text and len(text) <= LONGEST_TOKEN and text.isascii() and text.isprintable():
            found.setdefault(text, []).append(id)
    return found


def prompt_ids(tokenizer: Any, question: dict[str, Any], lines: list[str]) -> list[int]:
    user = "\n".join([question["head"], *lines, question["tail"]])
    if getattr(tokenizer, "chat_template", None):
        turns = [[{"role": "system", "content": question["system"]}, {"role": "user", "content": user}]]
        turns += [[{"role": "user", "content": question["system"] + "\n\n" + user}]]  # not all know a system's part
        for turn in turns:
            try:
                text = tokenizer.apply_chat_template(
                    turn, add_generation_prompt=True, tokenize=False, enable_thinking=False
                )
                return list(tokenizer(text, add_special_tokens=False)["input_ids"])
            except Exception as error:
                problem = error
        raise CannotAnswer(f"the model's chat template fails: {problem}")
    return list(tokenizer(f"{question['system']}\n\n{user}\n\nAnswer: ")["input_ids"])


def fitting(tokenizer: Any, question: dict[str, Any], room: int) -> tuple[list[int], int]:
    """The prompt with as many lines as there is room for (tokens), and their number."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    lines, past = ([_unmarked(line, special) for line in question[name]] for name in ("lines", "past"))
    count = len(lines)
    while count:
        ids = prompt_ids(tokenizer, question, [*lines[:count], *past])
        if len(ids) <= room:
            return ids, count
        count = min(count - 1, count * room // len(ids))
    raise CannotAnswer(f"the question does not fit into the model's context ({room} tokens are left for it)")


def _unmarked(line: str, special: list[str]) -> str:
    """A line of a log is no place for what a tokenizer takes for the end of a turn."""
    for token in special:
        if len(token) > 1:
            line = line.replace(token, token[0] + " " + token[1:])
    return line


def ask(question: dict[str, Any]) -> dict[str, Any]:
    """Raises CannotAnswer, and whatever torch and transformers raise."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    began = time.monotonic()
    torch.set_num_threads(int(question["threads"]))
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(question["model"], **safe)
    model = AutoModelForCausalLM.from_pretrained(question["model"], use_safetensors=True, torch_dtype="auto", **safe)
    config = model.config.get_text_config()
    room = int(getattr(config, "max_position_embeddings", None) or 4096)
    new_tokens = min(NEW_TOKENS, room // 3)
    ids, lines = fitting(tokenizer, question, room - new_tokens)
    texts = token_texts(tokenizer, int(config.vocab_size))
    writing = Writing(AnswerForm(answer_form(question, lines), texts), texts, len(ids), new_tokens)
    writing.deadline(began, float(question["seconds"]))
    with torch.inference_mode():
        model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            prefix_allowed_tokens_fn=lambda _, written: writing.next(written.shape[-1], int(written[-1])),
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=writing.end,
            pad_token_id=writing.end,
        )
    if not writing.form.done:
        raise CannotAnswer("the answer was not complete in time")
    return {"answer": writing.form.text, "lines": lines}


class Writing:
    """One answer, token by token. `end`: a token that no answer has, which ends it."""

    def __init__(self, form: AnswerForm, texts: dict[str, list[int]], prompt: int, new_tokens: int) -> None:
        self.form = form
        self._of_id = {id: text for text, ids in texts.items() for id in ids}
        self.end = next(id for id in range(len(self._of_id) + 1) if id not in self._of_id)
        self._length = self._prompt = prompt
        self._hurry_after = max(new_tokens // 2, new_tokens - 500)
        self._hurry_at = self._deadline = float("inf")

    def deadline(self, began: float, seconds: float) -> None:
        self._hurry_at, self._deadline = began + IN_A_HURRY * seconds, began + seconds

    def next(self, length: int, newest: int) -> list[int]:
        """What may come after `length` tokens, the last of which is `newest`. Raises CannotAnswer."""
        if length > self._length:
            self._length = length
            self.form.take(self._of_id[newest])
        now = time.monotonic()
        if now > self._deadline:
            raise CannotAnswer("the answer was not complete in time")
        self.form.hurry = now > self._hurry_at or length - self._prompt > self._hurry_after
        return [self.end] if self.form.done else self.form.possible()


# ----- the process -----


def stay_small(parent: int) -> None:
    """The training comes first: we end with the process that asks, and memory that runs short is taken from us."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("whoever asked is gone")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(19)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # then the kernel chooses as it likes


def main() -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    question = json.loads(sys.stdin.read())
    stay_small(question["parent"])
    try:
        answer = ask(question)
    except Exception as error:
        words = str(error) if isinstance(error, CannotAnswer) else f"{type(error).__name__}: {error}"
        answer = {"problem": words.strip().split("\n", 1)[0][:300]}
    json.dump(answer, out)
    out.flush()
    return 0


if __name__ == "__main__":
    sys.path[:] = [
        entry for entry in sys.path if os.path.realpath(entry) != os.path.dirname(os.path.realpath(__file__))
    ]
    sys.exit(main())
