"""Stragglers and slow-downs: which rank, link or input makes steps long, since when, and what it costs."""

from __future__ import annotations

from diagnosis.signals import Word


class RankTiming(Word, frozen=True, kw_only=True):
    """When one rank came to the collectives of one process group (flight recorder), oldest first.

    The tuples are of one length: at most the newest 2,000 collectives of a group on a rank, fewer where many ranks
    are given (some 4 million entries in all are plenty). Times are the rank's own clock; 0 is a time not known.
    """

    rank: int
    group: str
    """Equal on every member (by its ranks, else its name)."""
    seqs: tuple[int, ...]
    """`collective_seq_id`; ascending. Point-to-point entries are a group of their own: `p2p 3->4`, told by both."""
    created_ns: tuple[int, ...]
    """Enqueued by the CPU."""
    started_ns: tuple[int, ...] = ()
    """Seen to run; empty where no entry tells."""
    completed_ns: tuple[int, ...] = ()
    """Seen to be complete; empty where no entry tells."""
    duration_us: tuple[int, ...] = ()
    """As the GPU measured it (`duration_ms`); empty where timing was off."""
    ops: tuple[str, ...] = ()
    """`nccl:all_reduce`, ...: the names of these collectives (one for all, or one for each)."""
