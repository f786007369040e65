"""The flight recorders of many ranks, read together: who waits for whom, who disagrees, and where it began."""

from __future__ import annotations

from diagnosis.flight.dumps import RankDump, from_rank_flights, read_dump
from diagnosis.flight.judge import analyse
from diagnosis.flight.waits import find_ring

__all__ = ["RankDump", "analyse", "find_ring", "from_rank_flights", "read_dump"]
