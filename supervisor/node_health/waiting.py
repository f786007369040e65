"""What a thread waits in, as its folder in /proc says: two files whose reading never blocks."""

from __future__ import annotations

import os

from diagnosis.signals import clean_text


def waiting_in(task: str) -> tuple[str, str]:
    """State letter and wait channel of a thread, from its folder in /proc (these two never block); `?` and empty."""
    found = []
    for name in ("stat", "wchan"):
        try:
            descriptor = os.open(f"{task}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            found.append("")
            continue
        try:
            found.append(os.read(descriptor, 512).decode(errors="replace"))
        except OSError:
            found.append("")
        finally:
            os.close(descriptor)
    stat, wchan = found
    fields = stat[stat.rfind(")") + 1 :].split()
    return (fields[0] if fields else "?"), ("" if wchan.strip() == "0" else clean_text(wchan.strip(), 64))
