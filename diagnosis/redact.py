"""Secrets taken out of text before anybody else reads it: tokens, keys, passwords, credentials in addresses.

What looks like a secret goes, even where it is none: a digest loses little by a word too many.
"""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "[secret]"

_BLOCK: Final = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", re.DOTALL
)
_KNOWN: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|ya29\.[\w-]{20,})"
)
_NAMED: Final = re.compile(
    r"((?:pass(?:word|wd|phrase)?|secret|token|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|credentials?|auth)"
    r"[\w-]{0,20}['\"]?\s{0,3}[=:]\s{0,3}['\"]?)(?!None\b|null\b|True\b|False\b|\[secret\])([^\s'\",;&}\])]{4,})",
    re.IGNORECASE,
)
_HEADER: Final = re.compile(r"\b(Bearer|Basic|Token)(\s+)(?=[^\s]*[\d=+/_.-])[A-Za-z0-9+/=._~-]{12,}", re.IGNORECASE)
_IN_URL: Final = re.compile(r"(\b[a-z][a-z0-9+.-]{1,15}://[^\s:/@'\"]{0,100}:)[^\s/@'\"]{1,200}(?=@)", re.IGNORECASE)
_SIGNED: Final = re.compile(r"([?&](?:X-Amz-\w+|sig|signature|token|key|code|se|sv)=)[^&\s'\"]{6,}", re.IGNORECASE)


def redact(text: str) -> str:
    """`text` with `[secret]` in the place of each secret."""
    text = _BLOCK.sub(HIDDEN, text)
    text = _KNOWN.sub(HIDDEN, text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    text = _IN_URL.sub(rf"\1{HIDDEN}", text)
    text = _SIGNED.sub(rf"\1{HIDDEN}", text)
    return _NAMED.sub(_named, text)


def _named(match: re.Match[str]) -> str:
    value = match[2]
    # `tokens: 4096`, `auth: 3 tries`: a plain number or a word of the language is no secret.
    if value.replace(".", "").replace(",", "").isdigit() or HIDDEN in value:
        return match[0]
    return match[1] + HIDDEN
