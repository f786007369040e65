"""Checkpoints as trainers write them, read without executing anything in them.

`base` has the protocol and the limits, `registry` the list of formats, `scan` finds the newest again and again for
next to nothing. `places` says where it looks: in folders that were given (`Walk`), or among what ranks were seen to
write (`Seen`). `files` reads single files (torch, safetensors, DCP's metadata), `folders` checkpoints that are folders.
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
