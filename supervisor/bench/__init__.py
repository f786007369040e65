"""`unbroken bench`: recovery times beside plain torchrun's, and a run whose supervisors are killed at random."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """Run a benchmark; its exit code (0: it ran through and what it asserts held)."""
    from supervisor.bench.command import group

    result = group.main(args=argv, prog_name="unbroken bench", standalone_mode=False)
    return int(result or 0)
