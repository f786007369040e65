"""`async with timeout(seconds)`: a deadline that raises asyncio.TimeoutError and never swallows a cancellation.

`asyncio.wait_for` before Python 3.12 does: a task cancelled in the moment its call returns goes on as if nothing had
been said, and whoever waits for its end does so for ever.
"""

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["timeout"]
