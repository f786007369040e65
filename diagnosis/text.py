"""Text from outside, made safe and short: secrets taken out of it, and the shapes of its lines.

`redact` takes out tokens, keys, passwords, credentials in addresses (`secrets.toml`). `signals.clean_text` calls it for
everything that comes from outside, before it cuts: what becomes evidence holds no secret, and so nothing does that is
made of it. What looks like a secret goes even where it is none; hashes, UUIDs, PCI addresses, host names and paths
stay, as nobody could say anything without them.

The shape of a line is the line with every digit a zero: what one line of a shape can never mean, none of them can. A
log of a gigabyte has some thousand shapes, so most of its lines are read by looking their shapes up in a set. A pattern
that is `blind` to digits finds something in a shape whenever the pattern itself finds something in any line of that
shape (the reverse need not hold).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from diagnosis.tables import load

HIDDEN: Final = "[secret]"

_BEGIN: Final = re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY")
_END: Final = re.compile(r"-----END [A-Z0-9 ]{0,30}PRIVATE KEY")
_TABLE: Final = load("diagnosis", "secrets.toml")
_TOKENS: Final[dict[str, Any]] = {
    "marks": [mark for row in _TABLE["token"] for mark in row["marks"]],
    "regex": "(?<![A-Za-z0-9])(?:" + "|".join(row["regex"] for row in _TABLE["token"]) + ")",
}
_SHAPES: Final = tuple(
    (tuple(row["marks"]), re.compile(row["regex"]))
    for row in (_TOKENS if row["id"] == "tokens" else row for row in _TABLE["place"])
)
"""What secrets look like, wherever they stand; and of each, in lower case, what it cannot be without."""

# ----- names and values -----

_NAMES: Final = _TABLE["names"]
_NAME: Final = re.compile(_NAMES["any"])
_NOT: Final = _NAMES["no_value"]
_BETWEEN: Final = (
    r"(?:\\{0,2}['\"]?\s{0,3}(?:=>|:=|[=:])\s{0,3}[bru]{0,2}\\{0,2}['\"]?"
    r"|\\{0,2}['\"]\s{0,3},\s{0,3}[bru]{0,2}\\{0,2}(?=['\"])['\"]|\s{1,3}(?=['\"])['\"])"
)
"""`=`, `: `, `": "`, `', '`: what stands between a name and its value."""
_VALUE: Final = r"((?<=['\"])[^'\"\\]{3,}|[^\s'\"&\\]{3,}[^\s'\"&\\,;)\]}])"
_AFTER: Final = re.compile(
    rf"((?:{_NAME.pattern})s?(?:[_-](?:id|value|b64|base64|\d{{1,3}}))?{_BETWEEN}){_NOT}{_VALUE}", re.IGNORECASE
)
_SPACED: Final = re.compile(rf"((?:{_NAME.pattern})s?\s{{1,3}})(?!-){_NOT}([^\s'\",;]{{4,}})", re.IGNORECASE)
_OPTION: Final = re.compile(r"(?<![\w-])--?[\w-]{0,30}$")
"""Before the last word of an option's name."""
_SURE: Final = tuple(_NAMES["sure"])
_KEY_OF: Final = re.compile(_NAMES["key_of"])
_TOKEN_OF: Final = re.compile(_NAMES["token_of"])
_NUMBER: Final = re.compile(r"[\d.,+-]+(?:e[+-]?\d+)?[A-Za-z/%]{0,6}$", re.IGNORECASE)
_RANDOM_KEY: Final = re.compile(r"[\w+/=-]{20,}")
RANDOM_CHARS: Final = 8
MAX_TRIES: Final = 64
"""Values that are read and found to be none, in one text: what stands after so many of them goes unread."""

# ----- keys over several lines -----

_KEY_LINE: Final = re.compile(
    r"\s*(?:\[[^\]]{1,40}\]:?\s+|\S{1,20}[:|>]\s+)?['\"]?([A-Za-z0-9+/]+={0,2})(?:\\n)?['\"]?,?\s*"
)
_MIXED: Final = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[^/]")
KEY_CHARS: Final = 60
"""A line of nothing but so many letters and digits is a part of a key, or of something else that tells nobody."""
NO_KEY_LINES: Final = 8
"""After so many lines that cannot be of a key it is over, though its end was not seen."""
_LOWER: Final = {capital: capital + 32 for capital in range(ord("A"), ord("Z") + 1)}


def redact(text: str) -> str:
    """`text` with `[secret]` in the place of each secret."""
    lowered = text.translate(_LOWER)
    changed = text
    for hints, shape in _SHAPES:
        for hint in hints:
            if hint in lowered:
                changed = shape.sub(_hidden, changed)
                break
    if _NAME.search(lowered) is None:
        return changed
    return _without_values(changed, lowered if changed is text else changed.translate(_LOWER))


def _without_values(text: str, lowered: str) -> str:
    """What stands after names of secrets goes."""
    kept: list[str] = []
    done, tries = 0, 0
    for name in _NAME.finditer(lowered):
        start = name.start()
        if start < done:
            continue
        before = text[max(0, start - 40) : start]
        match = _AFTER.match(text, start)
        if match is None and _OPTION.search(before) is not None:
            match = _SPACED.match(text, start)
            hide = match is not None and not match[2].isdigit()
        else:
            hide = match is not None and _is_secret(name[0], before, match)
        tries += match is not None and not hide
        if tries > MAX_TRIES:
            return "".join([*kept, text[done:start], HIDDEN])
        if match is not None and hide:
            kept += [text[done : match.start(2)], HIDDEN]
            done = match.end()
    return "".join([*kept, text[done:]]) if kept else text


def _is_secret(name: str, before: str, match: re.Match[str]) -> bool:
    """Whether `name`, with what stands before and after it, is followed by a secret."""
    value = match[2]
    if HIDDEN in value:
        return False
    sure = (
        name.startswith(_SURE)
        or (name == "key" and _KEY_OF.search(before) is not None)
        or (name == "token" and _TOKEN_OF.search(before) is not None)
        or (name == "pwd" and before.endswith(("_", "-")))
    )
    if sure:
        return True
    written = match[0][: len(name)]
    # `MAX_TOKEN=4096`, a file's path.
    plain = value.startswith(("/", "(", "[", "{")) or _NUMBER.match(value) is not None
    if written.isupper() and (before.endswith("_") or name != "key") and not before[-1:].islower():
        return not plain and name != "pwd"  # a variable of an environment
    if name == "key":
        return not before[-1:].isalnum() and _RANDOM_KEY.fullmatch(value) is not None and _is_mixed(value)
    loose = name in ("token", "credential", "auth", "jwt", "signature")
    return loose and not plain and len(value) >= RANDOM_CHARS and _is_mixed(value)


def _is_mixed(value: str) -> bool:
    return any(map(str.isdigit, value)) and any(map(str.isalpha, value))


def hide_keys(lines: Sequence[str]) -> list[str]:
    """As many lines without those of private keys, also of ones that are cut off. For lines that are redacted."""
    hidden = [False] * len(lines)
    others = NO_KEY_LINES
    for number, line in enumerate(lines):
        names = "PRIVATE KEY" in line
        begins, ends = names and _BEGIN.search(line) is not None, names and _END.search(line) is not None
        of_key = _KEY_LINE.fullmatch(line) is not None
        if ends and others >= NO_KEY_LINES and not begins:  # its beginning was cut off
            for before in range(number - 1, -1, -1):
                if _KEY_LINE.fullmatch(lines[before]) is None:
                    break
                hidden[before] = True
        others = 0 if begins or (of_key and others < NO_KEY_LINES) else others + 1
        hidden[number] = begins or ends or (of_key and (others == 0 or _is_key_line(line)))
        others = NO_KEY_LINES if ends else others
    return [HIDDEN if hide else line for line, hide in zip(lines, hidden, strict=True)]


def redact_words(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command line; what follows `--password` is a secret, too."""
    found: list[str] = []
    for number, word in enumerate(words):
        pair = f" {words[number - 1]} " if number else ""
        value = redact(pair + word).removeprefix(redact(pair)) if pair.startswith(" -") else redact(word)
        found.append(value)
    return tuple(found)


def _is_key_line(line: str) -> bool:
    match = _KEY_LINE.fullmatch(line)
    return match is not None and len(match[1]) >= KEY_CHARS and _MIXED.match(match[1]) is not None


def _hidden(match: re.Match[str]) -> str:
    return (match[1] if match.re.groups else "") + HIDDEN


_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_TOKEN: Final = re.compile(
    r"\\x[0-9a-f]{2}|\\.|\(\?P<\w+>|\(\?<?[!=]|\(\?[a-z:]|\{\d*,?\d*\}|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL
)
_DIGITS: Final = re.compile(r"(\\x[0-9a-f]{2}|\\.)|\d-\d|\d")


def shape(text: bytes) -> bytes:
    """The shape of a line, or of several."""
    return text.translate(_ZEROS)


def literal(text: str) -> str:
    """What a literal looks like in a shape, in lower case."""
    return re.sub(r"\d", "0", text.lower())


def tokens(pattern: str) -> list[str]:
    """A pattern's pieces: escapes, classes, openings of groups, repeats and single characters."""
    return _TOKEN.findall(pattern)


def blind(pattern: str) -> str:
    """The pattern with every digit in it standing for any digit; empty (finds everything) where that cannot be had."""
    parts = _blind(tokens(pattern))
    try:
        re.compile(parts)
    except re.error:
        return ""
    return parts


def _blind(tokens: Sequence[str]) -> str:
    parts: list[str] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        end = at + 1
        if token in ("(?!", "(?<!"):
            end = closing(tokens, at)
            # What must not be there, and has a digit, may be missed: then more is found, which is safe.
            if not any(_has_own_digits(one) for one in tokens[at:end]):
                parts += tokens[at:end]
        elif token[0] == "[" and _has_own_digits(token):
            without = _DIGITS.sub(lambda match: match[1] or "", token).replace("[^]", r"[\s\S]")
            parts.append(without if token[1] == "^" else _DIGITS.sub(lambda match: match[1] or "0-9", token))
        else:
            parts.append(r"\d" if token.isdigit() else token)
        at = end
    return "".join(parts)


def closing(tokens: Sequence[str], at: int) -> int:
    """Where what follows the group that is opened at `at` begins."""
    depth = 0
    for end in range(at, len(tokens)):
        depth += (tokens[end][0] == "(") - (tokens[end] == ")")
        if depth == 0:
            return end + 1
    return len(tokens)


def _has_own_digits(token: str) -> bool:
    """Whether it tells digits from each other."""
    if token[0] == "[":
        return any(match[1] is None for match in _DIGITS.finditer(token.replace("0-9", "")))
    return token.isdigit()


class Words:
    """Which of many rules a text may match: those of whose literals it has one. Each word is looked for once."""

    def __init__(self, rules: Sequence[Sequence[str]]) -> None:
        literals = {literal for rule in rules for literal in rule}
        self.words: tuple[str, ...] = tuple(
            sorted(one for one in literals if not any(o in one for o in literals - {one}))
        )
        """Every literal has one of them in it."""
        self._rules: dict[str, list[int]] = {
            word: [n for n, rule in enumerate(rules) if any(word in literal for literal in rule)] for word in self.words
        }

    def rules_for(self, text: str) -> list[int] | None:
        """The numbers of the rules that may match, in order; None where no word is in the text."""
        found = [word for word in self.words if word in text]
        if not found:
            return None
        return self._rules[found[0]] if len(found) == 1 else sorted({n for word in found for n in self._rules[word]})
