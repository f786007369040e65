"""Imported by a station before anything else: msgspec takes typing_extensions (1.4 MiB) where it finds it, and can do
without. What imports it afterwards gets it as ever.
"""

import sys

_HIDDEN = sys.modules.setdefault("typing_extensions", None) is None  # type: ignore[arg-type]

import msgspec  # noqa: E402, F401

if _HIDDEN:
    del sys.modules["typing_extensions"]
