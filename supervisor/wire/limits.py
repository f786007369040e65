"""How many connections a port keeps of those whose other end has proven nothing, and for how long.

Pure but for `raise_descriptor_limit`: time comes in arguments.
"""

from __future__ import annotations

import resource
from typing import Final, Generic, TypeVar

REQUEST_S: Final = 10.0
"""From the connection to its first whole request, or (of a request that proves nothing) to its whole answer."""
IDLE_S: Final = 60.0
"""From an answer to the next request: a scraper comes several times a minute."""
RESERVED: Final = 128
"""Descriptors kept back for the journal, evidence, threads and the unix socket."""
MOST: Final = 4096
DESCRIPTORS_WANTED: Final = 65536

Key = TypeVar("Key")


def raise_descriptor_limit() -> int:
    """As far as it may be; the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return soft  # not allowed here: then it stays as it is
        return wanted
    return DESCRIPTORS_WANTED if soft == resource.RLIM_INFINITY else soft


def descriptor_limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return DESCRIPTORS_WANTED if soft == resource.RLIM_INFINITY else soft


class UnprovenConnections(Generic[Key]):
    """Connections that have proven nothing. The newest is always taken; when there are too many the oldest goes of the
    address that has the most: whoever is quick gets through, whatever a crowd does."""

    def __init__(self, at_once: int, per_address: int) -> None:
        self.at_once = at_once
        self.per_address = per_address
        self._deadlines: dict[Key, tuple[str, float]] = {}
        self._of_address: dict[str, dict[Key, None]] = {}

    @classmethod
    def for_descriptors(cls, limit: int) -> UnprovenConnections[Key]:
        """As many as leave room for as many others."""
        at_once = max(8, min(MOST, (limit - RESERVED) // 2))
        return cls(at_once, max(4, at_once // 2))

    def __len__(self) -> int:
        return len(self._deadlines)

    def came(self, key: Key, address: str, now: float, within_s: float) -> list[Key]:
        """Whom to put out for it. It has `within_s` to prove itself."""
        self._deadlines[key] = (address, now + within_s)
        theirs = self._of_address.setdefault(address, {})
        theirs[key] = None
        if len(theirs) > self.per_address:
            return [self._oldest(theirs)]
        if len(self._deadlines) > self.at_once:
            return [self._oldest(max(self._of_address.values(), key=len))]
        return []

    def gone(self, key: Key) -> None:
        """It ended, or has proven itself."""
        found = self._deadlines.pop(key, None)
        if found is None:
            return
        theirs = self._of_address[found[0]]
        del theirs[key]
        if not theirs:
            del self._of_address[found[0]]

    def oldest(self) -> Key | None:
        """Of the address with the most; None when there are none."""
        return self._oldest(max(self._of_address.values(), key=len)) if self._of_address else None

    def timed_out(self, now: float) -> list[Key]:
        return [key for key, (_, deadline) in self._deadlines.items() if deadline <= now]

    def _oldest(self, theirs: dict[Key, None]) -> Key:
        return next(iter(theirs))
