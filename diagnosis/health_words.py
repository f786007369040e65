"""Whether the end of a log reads like that of a healthy one: single words with weights, fitted to labelled logs.

Asked only where no rule speaks, no line sounds of trouble, and no step and no end shows that all is well. The weights
are data (`health_words.toml`); `python -m tests.bench health-words` fits them, and says what they are worth on logs
that they were not fitted to.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from diagnosis import exceptions
from diagnosis.tables import load
from diagnosis.tracebacks import split_prefix

LIKE_A_HEALTHY_LOG: Final = 0.3
"""From this score on: of the logs that nobody had fitted the words to, each that reached it was healthy."""
END: Final = 40
LAST: Final = 10
"""Of the last 40 lines that are not empty: the last 10, and those before that complain."""
LEAST_WORDS: Final = 4
"""Fewer known words tell nothing."""
MAX_WORDS: Final = 60
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
"""Names are read by their parts: `ProcessGroup`, `max_steps`."""


@functools.cache
def _weights() -> tuple[float, dict[str, float]]:
    """What speaks for a healthy log before anything was read, and the weight of each word."""
    table = load("diagnosis", "health_words.toml")
    return table["bias"], {word: float(weight) for weight, words in table["words"].items() for word in words.split()}


def words(lines: Sequence[str]) -> set[str]:
    """The words of a log's end; `#` if none of its lines complains."""
    end = [line[:1000] for line in lines if line.strip()][-END:]
    complaints = [exceptions.complains(line) for line in end]
    read = (line for at, line in enumerate(end) if complaints[at] or at >= len(end) - LAST)
    parts = ([part.lower() for part in _WORD.findall(split_prefix(line)[1]) if len(part) > 1] for line in read)
    return {part for line in parts for part in line[:MAX_WORDS]} | ({"#"} if not any(complaints) else set())


def score(lines: Sequence[str]) -> float:
    """How much they read like the end of a healthy log: near 1 if they do, near 0 if not, or if few words are known."""
    return weigh(words(lines), *_weights())


def weigh(said: Collection[str], bias: float, weights: Mapping[str, float]) -> float:
    """The score of these words."""
    known = [weights[word] for word in said if word in weights]
    return bias + sum(known) / math.sqrt(len(known)) if len(known) >= LEAST_WORDS else 0.0


def reads_healthy(lines: Sequence[str]) -> bool:
    """Whether the end of a log reads like that of a healthy one."""
    return score(lines) >= LIKE_A_HEALTHY_LOG
