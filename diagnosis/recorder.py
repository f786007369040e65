"""The flight recorder's answer of one living rank, reduced to its last entries; `flight` compares ranks by them.

Reads the JSON that torch's worker server gives, and the pickle that torch writes when it is asked through a pipe. gloo
never marks an entry completed: `retired` does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from diagnosis import plain_pickle
from diagnosis.signals import CollectiveEntry, RankFlight, Word, clean_text

ENTRIES_PER_GROUP = 4
MAX_ENTRIES = 64


class _Entry(Word, frozen=True, kw_only=True):
    pg_id: int | str = 0
    process_group: tuple[Any, ...] = ()
    collective_seq_id: int | str = 0
    profiling_name: str = ""
    input_sizes: Any = None
    input_dtypes: Any = None
    state: str = ""
    retired: bool = False


class _Trace(Word, frozen=True, kw_only=True):
    pg_config: dict[str, dict[str, Any]] = {}
    entries: tuple[_Entry, ...] = ()


_decode = msgspec.json.Decoder(_Trace).decode


def read_flight(data: bytes, rank: int) -> RankFlight:
    """The last entries of each process group, oldest first; `error` says why there are none."""
    try:
        return _reduced(_decode(data), rank)
    except (msgspec.DecodeError, ValueError) as error:
        return RankFlight(rank=rank, error=f"unreadable flight recorder: {clean_text(str(error), 200)}")


def read_dump(data: bytes, rank: int) -> RankFlight:
    """The same of a dump, which is a pickle. Raises ValueError while it is not whole, or when it is none."""
    try:
        return _reduced(msgspec.convert(plain_pickle.loads(data), _Trace), rank)
    except msgspec.ValidationError as error:
        raise ValueError(f"a pickle that is no flight recorder's: {error}") from None


def both(nccl: RankFlight, gloo: RankFlight) -> RankFlight:
    """What the recorders of one rank know: each backend has its own. A build without NCCL has no recorder of it."""
    if nccl.error or gloo.error:
        return gloo if nccl.error else nccl
    entries = dict.fromkeys(gloo.entries + nccl.entries)  # some torch may have one recorder under both names
    return RankFlight(rank=nccl.rank, entries=tuple(entries)[-MAX_ENTRIES:])


def _reduced(trace: _Trace, rank: int) -> RankFlight:
    kept: dict[str, list[CollectiveEntry]] = {}
    for entry in reversed(trace.entries):
        group = _group(entry, trace.pg_config)
        entries = kept.setdefault(group, [])
        if len(entries) < ENTRIES_PER_GROUP:
            entries.append(_reduce(entry, group))
    newest_first = [entry for entries in kept.values() for entry in entries][:MAX_ENTRIES]
    return RankFlight(rank=rank, entries=tuple(reversed(newest_first)))


def _group(entry: _Entry, groups: dict[str, dict[str, Any]]) -> str:
    """The group by its members, as ids are each rank's own; by its id where the trace does not tell (gloo)."""
    known = groups.get(str(entry.process_group[0]), {}) if entry.process_group else {}
    ranks = str(known.get("ranks", ""))
    return clean_text(ranks, 200) if ranks.strip("[] ") else clean_text(str(entry.pg_id), 40)


def _reduce(entry: _Entry, group: str) -> CollectiveEntry:
    return CollectiveEntry(
        group=group,
        seq=min(max(int(entry.collective_seq_id or 0), -1), 1 << 62),  # what JSON has room for
        op=clean_text(entry.profiling_name, 80),
        sizes=clean_text(str(entry.input_sizes), 120),
        dtypes=clean_text(str(entry.input_dtypes), 80),
        completed=entry.retired or entry.state == "completed",
    )
