"""The flight recorder's answer of one living rank, reduced to the entries that tell where it is.

Reads the JSON that torch's worker server gives, and the pickle that torch writes when it is asked through a pipe.
"""

from __future__ import annotations

from diagnosis import flight
from diagnosis.flight.online import MAX_ENTRIES, reduced
from diagnosis.signals import RankFlight, clean_text


def read_flight(data: bytes, rank: int) -> RankFlight:
    """The entries around what is not completed and the last ones, oldest first; `error` says why there are none."""
    try:
        return read_dump(data, rank)
    except ValueError as error:
        return RankFlight(rank=rank, error=f"unreadable flight recorder: {clean_text(str(error), 200)}")


def read_dump(data: bytes, rank: int) -> RankFlight:
    """The same. Raises ValueError while a dump is not whole, or when it is none."""
    return reduced(flight.read_dump(data, rank))


def both(nccl: RankFlight, gloo: RankFlight) -> RankFlight:
    """What the recorders of one rank know: each backend has its own. A build without NCCL has no recorder of it."""
    if nccl.error or gloo.error:
        return gloo if nccl.error else nccl
    entries = dict.fromkeys(gloo.entries + nccl.entries)  # some torch may have one recorder under both names
    return RankFlight(rank=nccl.rank, entries=tuple(entries)[-MAX_ENTRIES:])
