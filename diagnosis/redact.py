"""Secrets taken out of text before anybody else reads it: tokens, keys, passwords, credentials in addresses.

What looks like a secret goes, even where it is none: a digest loses little by a word too many.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

HIDDEN: Final = "[secret]"

_BLOCK: Final = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", re.DOTALL
)
_KNOWN: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|ya29\.[\w-]{20,}"
    r"|nvapi-[\w-]{16,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,}|r8_[A-Za-z0-9]{20,}|xapp-[\w-]{10,}|SK[0-9a-f]{32})"
)
_NAMED: Final = re.compile(
    r"((?:pass(?:word|wd|phrase)?|secret|token|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|credentials?|auth)"
    r"[\w-]{0,20}['\"]?\s{0,3}[=:]\s{0,3}['\"]?)(?!None\b|null\b|True\b|False\b|\[secret\])([^\s'\",;&}\])]{4,})",
    re.IGNORECASE,
)
_FLAG: Final = re.compile(
    r"((?:^|\s)--?[\w-]{0,30}(?:password|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|auth[_-]?key)\s{1,3})"
    r"(?![-\[])([^\s'\",;]{4,})",
    re.IGNORECASE,
)
"""An option of a command line and its value."""
_HOOK: Final = re.compile(r"(hooks\.[\w.-]{1,40}/(?:services|api|workflows)/)[\w/-]{8,}", re.IGNORECASE)
_COOKIE: Final = re.compile(r"\b((?:Set-)?Cookie:\s{0,3})(?!\[secret\])\S.*", re.IGNORECASE)
_HEADER: Final = re.compile(r"\b(Bearer|Basic|Token)(\s+)(?=[^\s]*[\d=+/_.-])[A-Za-z0-9+/=._~-]{12,}", re.IGNORECASE)
_IN_URL: Final = re.compile(r"(\b[a-z][a-z0-9+.-]{1,15}://[^\s:/@'\"]{0,100}:)[^\s/@'\"]{1,200}(?=@)", re.IGNORECASE)
_SIGNED: Final = re.compile(r"([?&](?:X-Amz-\w+|sig|signature|token|key|code|se|sv)=)[^&\s'\"]{6,}", re.IGNORECASE)
_BEGIN: Final = re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY")
_END: Final = re.compile(r"-----END [A-Z ]{0,30}PRIVATE KEY")
_KEY_LINE: Final = re.compile(r"[\s|>]*[A-Za-z0-9+/]+={0,2}\s*")
KEY_CHARS: Final = 60
"""A line of nothing but so many letters and digits is a part of a key, or of something else that tells nobody."""


def redact(text: str) -> str:
    """`text` with `[secret]` in the place of each secret."""
    text = _BLOCK.sub(HIDDEN, text)
    text = _KNOWN.sub(HIDDEN, text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    text = _IN_URL.sub(rf"\1{HIDDEN}", text)
    text = _SIGNED.sub(rf"\1{HIDDEN}", text)
    text = _HOOK.sub(rf"\1{HIDDEN}", text)
    text = _COOKIE.sub(rf"\1{HIDDEN}", text)
    text = _FLAG.sub(_named, text)
    return _NAMED.sub(_named, text)


def redact_lines(lines: Sequence[str]) -> list[str]:
    """As many lines without secrets, those that run over several included: private keys, also ones cut off."""
    hidden = [False] * len(lines)
    in_key = False
    for number, line in enumerate(lines):
        begins, ends = _BEGIN.search(line) is not None, _END.search(line) is not None
        if ends and not in_key and not begins:  # its beginning was cut off
            for before in range(number - 1, -1, -1):
                if _KEY_LINE.fullmatch(lines[before]) is None:
                    break
                hidden[before] = True
        in_key = in_key or begins
        hidden[number] = in_key or ends or (_KEY_LINE.fullmatch(line) is not None and len(line.strip()) >= KEY_CHARS)
        in_key = in_key and not ends
    return [HIDDEN if hide else redact(line) for line, hide in zip(lines, hidden, strict=True)]


def _named(match: re.Match[str]) -> str:
    value = match[2]
    # `tokens: 4096`, `auth: 3 tries`: a plain number or a word of the language is no secret.
    if value.replace(".", "").replace(",", "").isdigit() or HIDDEN in value:
        return match[0]
    return match[1] + HIDDEN
