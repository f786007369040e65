"""Programs of the node, run under a deadline: each may be stuck in the kernel, and then nobody waits for it."""

from __future__ import annotations

import os
import subprocess

_OUTPUT_LIMIT = 1 << 20


def find_program(name: str) -> str:
    """Path of a program of PATH, of the system's folders or of where Slurm is usually put; empty when there is none."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += ["/usr/bin", "/usr/sbin", "/usr/local/bin", "/opt/slurm/bin"]
    paths = (os.path.join(folder, name) for folder in folders if folder.startswith("/"))
    return next((path for path in paths if os.access(path, os.X_OK)), "")


def run(arguments: list[str], seconds: float) -> tuple[int, str] | None:
    """Exit status, and the end of what it said; None when it did not end in time. Raises OSError."""
    child = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/"
    )
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()  # and no wait for its end, which may never come
        return None
    return child.returncode, output[-_OUTPUT_LIMIT:].decode(errors="replace")
