"""The agent's small port for Prometheus: `GET /metrics` and nothing else; `page` is what a scrape of any daemon reads.

h11 (which the agent's WebSocket has loaded anyway) reads the requests; aiohttp would be a third of the agent's memory.
Nothing here can end the agent or hold its loop up: a scrape reads numbers that are there, a thread makes the text.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import h11

from supervisor.blocking import timeout
from supervisor.files import version_of
from supervisor.metrics.table import Family, Sample
from supervisor.metrics.targets import AGAIN_S, RETRY_S, TargetFile

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


log = logging.getLogger("unbroken.metrics")

SCRAPES_AT_ONCE: Final = 4
CONNECTIONS: Final = 32
"""Connections open at once; for one more the oldest is closed: the agent needs its descriptors for its own work."""
ACCEPTS_AT_ONCE: Final = 16
PATIENCE_S: Final = 10.0
"""Seconds for one connection, from its first byte to the last byte of the answer."""
HEADERS_LIMIT: Final = 16 << 10
LAST_WORDS_S: Final = 2.0


class Exposed(NamedTuple):
    """What a scrape is answered with."""

    families: Sequence[Family]
    read: Callable[[], Sequence[Sample]]
    """Called on the loop."""
    common: Sequence[tuple[str, str]]


class MetricsPort:
    """`start` once, `tell` whenever the address may have changed, `stop` when the job has ended."""

    def __init__(self, exposed: Exposed, target: TargetFile, job: str, where: tuple[str, int] | None) -> None:
        """`where`: host and port to listen on (port 0: any free one); None: never."""
        self._exposed = exposed
        self._target = target
        self._job = job
        self._server: asyncio.AbstractServer | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}
        """The oldest first."""
        self._scrapes = 0
        self._written: tuple[str, int] = ("", 0)
        """Address and connection for which the target file was written last."""
        self._writing: asyncio.Task[None] | None = None
        self._write_at = float("-inf")
        """Not tried again before this."""
        self._again_at = float("-inf")
        """Written again at this time."""
        self.port = 0
        self._where = where

    async def start(self) -> None:
        """Listen; on port 0 that is the one that the last agent of this node had, else a free one. Never raises."""
        if self._where is None:
            return
        host, port = self._where
        for one in dict.fromkeys([port] if port else [await self._last_port(), 0]):
            try:
                self._server = await asyncio.start_server(
                    self._serve, host, one, limit=HEADERS_LIMIT, backlog=ACCEPTS_AT_ONCE
                )
                self.port = int(self._server.sockets[0].getsockname()[1])
                return
            except OSError as error:
                log.info("no metrics on %s:%d: %s", host, one, error)

    async def _last_port(self) -> int:
        try:
            async with timeout(LAST_WORDS_S):
                return await asyncio.to_thread(self._target.port)
        except (asyncio.TimeoutError, RuntimeError):  # a file system that hangs; no thread left
            return 0

    def update_target(self, address: str, connections: int = 0) -> None:
        """Write the target file: when others reach this node at an `address` that is new, after each new connection
        (a job that begins anew removes what the last one left), and every hour. Costs nothing otherwise.
        """
        if not self.port or self._where is None:
            return
        host = address if self._where[0] in ("0.0.0.0", "::") else self._where[0]
        now = time.monotonic()
        if not host or ((host, connections) == self._written and now < self._again_at):
            return
        if now < self._write_at or (self._writing is not None and not self._writing.done()):
            return
        self._writing = asyncio.create_task(self._write_target(host, connections))

    async def _write_target(self, host: str, connections: int) -> None:
        shown = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        try:
            written = await asyncio.to_thread(self._target.write, self._job, shown)
        except RuntimeError:  # no thread left
            written = False
        now = time.monotonic()
        self._written = (host, connections) if written else ("", 0)
        self._write_at = float("-inf") if written else now + RETRY_S
        self._again_at = now + AGAIN_S

    async def stop(self) -> None:
        """Close the port and remove the target file."""
        if self._server is None:
            return
        self._server.close()
        try:
            async with timeout(LAST_WORDS_S):
                if self._writing is not None:
                    await self._writing
                await asyncio.to_thread(self._target.remove)
        except (asyncio.TimeoutError, RuntimeError):
            log.warning("%s cannot be removed: its file system does not answer", self._target.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            async with timeout(PATIENCE_S):
                await self._answer(reader, writer)
        except (asyncio.TimeoutError, OSError, h11.ProtocolError):
            pass  # a scraper that is slow, gone or none
        finally:
            self._open.pop(writer, None)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADERS_LIMIT)
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await reader.read(4096))
        if not isinstance(event, h11.Request):
            return
        try:
            status, headers, body = await self._page(event)
        except Exception:  # a defect of ours: the scrape fails, and nothing else
            log.exception("a scrape failed")
            status, headers, body = 500, {}, b""
        length = [("Content-Length", str(len(body))), ("Connection", "close")]
        writer.write(connection.send(h11.Response(status_code=status, headers=[*headers.items(), *length])) or b"")
        writer.write(connection.send(h11.Data(data=b"" if event.method == b"HEAD" else body)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()

    async def _page(self, request: h11.Request) -> tuple[int, dict[str, str], bytes]:
        plain = {"Content-Type": "text/plain; charset=utf-8"}
        if request.method not in (b"GET", b"HEAD"):
            return 405, {**plain, "Allow": "GET, HEAD"}, b"only GET is answered\n"
        if request.target.partition(b"?")[0] != b"/metrics":
            return 404, plain, b"/metrics is what there is\n"
        if self._scrapes >= SCRAPES_AT_ONCE:
            return 503, plain, b"too many scrapes at once\n"
        asked = {name: value.decode("latin-1") for name, value in request.headers}
        given = asked.get(b"accept", ""), asked.get(b"accept-encoding", "")
        exposed = self._exposed
        self._scrapes += 1
        try:
            found = await asyncio.to_thread(page, exposed.families, exposed.read(), exposed.common, *given)
        finally:
            self._scrapes -= 1
        return 200, found.headers, found.body


def process_samples(kind: str, pid: int) -> Iterator[Sample]:
    """CPU time and resident memory of a process; nothing when it has just ended."""
    try:
        cpu_s = time.clock_gettime_ns((~pid << 3) | 2) / 1e9  # the clock of another process: CPUCLOCK_SCHED of its pid
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return
    yield Sample("unbroken_process_cpu_seconds_total", cpu_s, (kind,))
    yield Sample("unbroken_process_resident_memory_bytes", pages * os.sysconf("SC_PAGE_SIZE"), (kind,))


# ----- what a scrape reads, by prometheus-client, which is imported at the first scrape and not before -----

Labels = Sequence[tuple[str, str]]
"""Labels that every sample has, with their values."""


class Page(NamedTuple):
    body: bytes
    headers: dict[str, str]


class SampleCollector:
    """A collector of prometheus-client over samples that were read a moment ago."""

    def __init__(self, families: Sequence[Family], samples: Iterable[Sample], common: Labels) -> None:
        self._families = {family.name: family for family in families}
        self._samples = samples
        self._common = common

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import Metric

        common = dict(self._common)
        found: dict[str, Metric] = {}
        for sample in self._samples:
            family = self._families[sample.name]
            metric = found.get(sample.name)
            if metric is None:
                metric = found[sample.name] = Metric(_base(family), family.help, family.kind)
            labels = {**common, **dict(zip(family.labels, sample.labels, strict=True))}
            metric.add_sample(sample.name + sample.suffix, labels, float(sample.value))
        yield from found.values()


def _base(family: Family) -> str:
    """The family's name as the library wants it: it adds what belongs to the type."""
    if family.kind == "counter":
        return family.name.removesuffix("_total")
    return family.name.removesuffix("_info") if family.kind == "info" else family.name


def page(
    families: Sequence[Family], samples: Iterable[Sample], common: Labels, accept: str, accept_encoding: str
) -> Page:
    """The answer to a scrape: OpenMetrics where the scraper takes it, else the text format; compressed likewise."""
    import gzip

    from prometheus_client.exposition import choose_encoder

    build = Sample("unbroken_build_info", 1, (_version(),))
    encoder, content_type = choose_encoder(accept)
    body = encoder(SampleCollector(families, [build, *samples], common))
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if _takes_gzip(accept_encoding):
        body = gzip.compress(body, 5)
        headers["Content-Encoding"] = "gzip"
    return Page(body, headers)


@functools.cache
def _version() -> str:
    return version_of("unbroken", sys.path) or "unknown"


def _takes_gzip(accept_encoding: str) -> bool:
    for part in accept_encoding.split(","):
        coding, _, weight = part.replace(" ", "").partition(";")
        if coding.lower() == "gzip":
            return weight not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
