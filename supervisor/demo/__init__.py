"""`unbroken demo`: a real pretraining run under supervision, with six faults, and the proof that nothing was lost."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    """Run the demo; its exit code (0: recovered from everything, and the final weights are equal)."""
    from supervisor.demo.demo import command

    result = command.main(args=argv, prog_name="unbroken demo", standalone_mode=False)
    return int(result or 0)
