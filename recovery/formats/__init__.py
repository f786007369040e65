"""Checkpoints as trainers write them, read without executing anything in them.

`base` has the protocol and the limits, `registry` the list of formats, `scan` finds the newest again and again for
next to nothing: in folders that were given (`walk`), or among what ranks were seen to write (`seen`). The rest is one
file for each kind: `torch_files`, `safetensors_files`, `dcp_files`, and `folders` over `trees`. `pickles` reads pickles
with inert values.
"""

from recovery.formats.base import CheckpointFormat, Limits
from recovery.formats.registry import BUILT_IN, inspect, load_formats, recognize
from recovery.formats.scan import CheckpointScanner, discover

__all__ = [
    "BUILT_IN",
    "CheckpointFormat",
    "CheckpointScanner",
    "Limits",
    "discover",
    "inspect",
    "load_formats",
    "recognize",
]
