"""Lets torch's profiler in this rank ask the agent whether to make a trace (`unbroken run --traceable`).

Stock torch does this by itself when it is loaded with KINETO_USE_DAEMON. A rank that was forked has torch already, and
a thread of the keeper would not be in the fork: so it is begun here, before the script.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

VARIABLE = "KINETO_USE_DAEMON"
LEVEL = "KINETO_LOG_LEVEL"
SILENT = "5"
"""The profiler tells every phase of a trace on stderr otherwise. A user's own level stays."""
OLDEST = (2, 7)
BEGIN = "_ZN5torch18global_kineto_initEv"
"""What `import torch` calls for this: `torch::global_kineto_init()`."""


def start(ours: bool) -> None:
    """`ours`: the job is traceable. Else the variable is the user's own, for a daemon of theirs: it stays."""
    if not os.environ.get(VARIABLE):
        return
    if ours:
        os.environ.setdefault(LEVEL, SILENT)
    if version() < OLDEST:  # its profiler may crash here
        if ours:
            del os.environ[VARIABLE]
        return
    torch: Any = sys.modules.get("torch")
    if torch is None:  # the script will load it
        return
    getattr(ctypes.CDLL("libtorch_cpu.so"), BEGIN)()
    profiler, optimizer = sys.modules["torch.profiler"], sys.modules["torch.optim.optimizer"]
    optimizer.register_optimizer_step_post_hook(profiler._optimizer_post_hook)


def version() -> tuple[int, ...]:
    """Of the torch that is loaded, or will be."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        text = str(torch.__version__)
    else:
        from importlib import metadata

        try:
            text = metadata.version("torch")
        except metadata.PackageNotFoundError:
            return (0,)
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
