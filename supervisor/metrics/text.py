"""Samples as Prometheus reads them, by prometheus-client, which is imported at the first scrape and not before."""

from __future__ import annotations

import functools
import gzip
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from supervisor.files import version_of
from supervisor.metrics.table import Family, Sample

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class Page(NamedTuple):
    body: bytes
    headers: dict[str, str]


class SampleCollector:
    """A collector of prometheus-client over samples that were read a moment ago."""

    def __init__(
        self,
        families: Sequence[Family],
        samples: Iterable[Sample],
        common: Sequence[tuple[str, str]],
    ) -> None:
        """`common`: labels that every sample has, with their values."""
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
    families: Sequence[Family],
    samples: Iterable[Sample],
    common: Sequence[tuple[str, str]],
    accept: str,
    accept_encoding: str,
) -> Page:
    """The answer to a scrape: OpenMetrics where the scraper takes it, else the text format; compressed likewise."""
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
