"""Secrets taken out of text before anybody reads it: tokens, keys, passwords, credentials in addresses.

`signals.clean_text` calls this for everything that comes from outside, before it cuts: what becomes evidence holds no
secret, and so nothing does that is made of it. What looks like a secret goes even where it is none; hashes, UUIDs, PCI
addresses, host names and paths stay, as nobody could say anything without them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

HIDDEN: Final = "[secret]"

_BEGIN: Final = re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY")
_END: Final = re.compile(r"-----END [A-Z0-9 ]{0,30}PRIVATE KEY")
_BLOCK: Final = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:.{1,8000}?-----END [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----|(?:(?:\s|\\n)*[A-Za-z0-9+/=]{16,})+)",
    re.DOTALL,
)
"""Its first line alone is none: `hide_keys` knows by it what follows."""
_KNOWN: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|[sr]k_(?:live|test)_\w{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}|eyJ[\w-]{8,1000}\.[\w-]{8,}\.[\w-]*"
    r"|nvapi-[\w-]{16,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,}|r8_[A-Za-z0-9]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|hvs\.[\w-]{20,}|dckr_pat_[\w-]{20,}|dop_v1_[0-9a-f]{40,}|\d{8,10}:AA[\w-]{33})"
)
_AWS_KEY: Final = re.compile(
    r"((?:AKIA|ASIA)[A-Z0-9]{16}\W{1,8}(?:\w{1,30}\W{1,8}){0,2})(?<![\w/+=-])[A-Za-z0-9/+]{40}(?![\w/+=-])"
)
"""It has no mark of its own, but most often stands beside its id."""
_LOGIN: Final = re.compile(
    r"(\blogin\s{1,3}\S{1,80}\s{1,3}password\s{1,3}|\s(?:-u|--user)\s{1,3}[^\s:]{1,80}:|\bsshpass\s{1,3}-p\s{0,3}"
    r"|\bwandb\s{1,3}login\s{1,3}(?:--\S{1,80}\s{1,3}){0,4}(?!-)(?=\S{20})"
    r"|\bauth\s{0,2}=\s{0,2}[(\[]\s{0,2}['\"][^'\"]{0,80}['\"]\s{0,2},\s{0,3}['\"])(?!\[secret\])[^\s'\"]{3,}",
    re.IGNORECASE,
)
"""netrc, curl, sshpass, wandb, requests."""
_HOOK: Final = re.compile(r"(hooks\.[\w.-]{1,40}/(?:services|api|workflows)/)[\w/-]{8,}", re.IGNORECASE)
_COOKIE: Final = re.compile(
    r"\b((?:Set-)?Cookie\\?['\"]?\s{0,3}[:=,]\s{0,3}[bru]?\\?['\"]?)(?!\[secret\])[^\s'\"][^'\"\n]{2,}", re.IGNORECASE
)
_AUTHORIZATION: Final = re.compile(
    r"(Authorization\\?['\"]?\s{0,3}[:=,]\s{0,3}[bru]?\\?['\"]?(?:Bearer|Basic|Token|Digest|ApiKey|Negotiate|AWS4[\w-]+)\s+)"
    r"(?!\[secret\])[^'\"\\\n]{4,}",
    re.IGNORECASE,
)
_HEADER: Final = re.compile(
    r"\b(Bearer\s+(?=[^\s]{16}|[^\s]*[\d=+/_.-])|(?:Basic|Token)\s+(?=[^\s]*[\d=+/_.-]))(?!\[)[A-Za-z0-9+/=._~-]{12,}",
    re.IGNORECASE,
)
_IN_URL: Final = re.compile(
    r"(\b[a-z][a-z0-9+.-]{1,15}://(?:[^\s:/@'\"]{0,100}:(?!\[secret\]@)|(?=[^\s:/@'\"]{16})))[^\s/'\"]{1,200}(?=@)",
    re.IGNORECASE,
)
_SIGNED: Final = re.compile(
    r"([?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|sig|signature|token|key|code|secret)=)"
    r"(?!\[secret\])[^&\s'\"]{6,}",
    re.IGNORECASE,
)
_MARKS: Final = (
    *("hf_", "api_org_", "sk-", "k_live", "k_test", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat", "glpat-"),
    *("xox", "xapp-", "akia", "asia", "aiza", "ya29.", "gocspx", "eyj", "nvapi-", "npm_", "pypi-", "r8_", "sg."),
    *("hvs.", "dckr_pat", "dop_v1", ":aa"),
)
_SHAPES: Final = (
    (("private key",), _BLOCK),
    (("akia", "asia"), _AWS_KEY),
    (_MARKS, _KNOWN),
    (("authorization",), _AUTHORIZATION),
    (("bearer ", "basic ", "token "), _HEADER),
    (("://",), _IN_URL),
    (("sig=", "signature=", "credential=", "token=", "key=", "code=", "secret="), _SIGNED),
    (("hooks.",), _HOOK),
    (("cookie",), _COOKIE),
    (("login", " -u ", " --user ", "sshpass", "auth"), _LOGIN),
)
"""What secrets look like, wherever they stand; and of each, in lower case, what it cannot be without."""

# ----- names and values -----

_NAME: Final = re.compile(
    "password|passwd|passphrase|passcode|pass|pwd|secret|token|key|credential|auth|jwt|signature|dsn|_pat|_sas|_pw(?!d)"
    "|connection.?string"
)
_NOT: Final = (
    r"(?!\\?['\"]?(?:None|null|nil|True|False|not|is|missing|unset|empty|invalid|expired|incorrect|wrong|required|denied"
    r"|failed|error|unable|cannot)\b|\[secret\]|<)"
)
"""Words after a name that are no value of it: what is wrong with it."""
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
_OPTION: Final = re.compile(r"(?:^|\s)--?[\w-]{0,30}$")
"""Before the last word of an option's name."""
_SURE: Final = ("password", "passwd", "passphrase", "passcode", "secret", "connection")
_KEY_OF: Final = re.compile(
    r"(?:api|access|private|secret|account|auth|encryption|signing|master|storage|license|client|service|shared|deploy"
    r")[ _-]?$",
    re.IGNORECASE,
)
_TOKEN_OF: Final = re.compile(
    r"(?:auth|access|refresh|session|security|bearer|api|hub|hf|bot|deploy|private|(?<![a-z])(?:id|job|user))[_-]?$",
    re.IGNORECASE,
)
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
    said = match[0][: len(name)]
    # `MAX_TOKEN=4096`, a file's path.
    plain = value.startswith(("/", "(", "[", "{")) or _NUMBER.match(value) is not None
    if said.isupper() and (before.endswith("_") or name != "key") and not before[-1:].islower():
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
