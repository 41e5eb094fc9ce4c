"""The Prometheus collector of a process, which turns counters into metrics at the time of a scrape.

Counting must cost almost no time per request, and a scrape must be correct while replicas come and go.
Components therefore keep plain numbers and return them as samples on request (`Source.samples`). The
collector adds up samples with the same labels, because several workers may share a process. It keeps the
totals of removed sources, because counters must not decrease. It never blocks, and any thread may call it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from daskserve._version import __version__
from daskserve.common.formatting import encodable
from daskserve.common.types import split_deployment_tag
from daskserve.telemetry.error_log import ErrorLog
from daskserve.telemetry.histogram import Example, HistogramCounts
from daskserve.telemetry.otlp import OTLPExport, export_of
from daskserve.telemetry.table import APPLICATION, METRICS, MetricKind, MetricSample, MetricSpec, Source
from daskserve.telemetry.user import UserMetric, UserMetrics, UserSample

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Exemplar, Metric

logger = logging.getLogger("daskserve.metrics")

#: Maximum number of totals that are kept for removed sources, because each scrape contains them all. The
#: second number limits the totals that no other source continues, such as those of deleted deployments. The
#: least recently updated totals are dropped first. Totals that another source continues are dropped last,
#: because Prometheus would count all of them again.
MAX_FOLDED, MAX_ENDED = 10_000, 1000
#: How many totals are added between two searches for those that no source continues.
SWEEP_EVERY = 500

Key = tuple[str, tuple[str, ...]]


class _Known:
    """A source and the log of its errors."""

    __slots__ = ("_errors", "ref")

    def __init__(self, source: Source, forget: Callable[[weakref.ref[Source]], None]) -> None:
        self.ref = weakref.ref(source, forget)
        self._errors = {"samples": ErrorLog(logger), "user_samples": ErrorLog(logger)}

    def samples(self) -> list[MetricSample]:
        """Return the samples of the source; empty if it no longer exists or raises an error."""
        return self._read("samples", "metrics")

    def user_samples(self) -> list[UserSample]:
        """Return the user metrics of the source; empty if it has none, no longer exists or raises an
        error."""
        return self._read("user_samples", "user metrics")

    def _read(self, method: str, what: str) -> list[Any]:
        source = self.ref()
        try:
            return list(getattr(source, method, list)())
        except Exception as error:
            # One broken source must not break the scrape of all others and of Dask's own metrics.
            self._errors[method].log(error, "Could not read the %s of %r", what, source)
            return []


class FoldedTotals:
    """The totals of removed sources, at most `MAX_FOLDED`. One thread at a time may change them."""

    def __init__(self) -> None:
        self._totals: OrderedDict[Key, float | HistogramCounts] = OrderedDict()
        self._sweep_at = MAX_ENDED

    def add(self, samples: Iterable[MetricSample], others: Callable[[], Iterable[MetricSample]]) -> None:
        """Add the last samples of a source to the totals, apart from those that end with it.

        ``others`` returns the samples of the remaining sources.
        """
        for name, labels, value in samples:
            if METRICS[name].is_folded:
                merge(self._totals, (name, labels), value)
                self._totals.move_to_end((name, labels))
        if len(self._totals) > self._sweep_at:
            self._sweep({(name, labels) for name, labels, _ in others()})

    def _sweep(self, continued: Container[Key]) -> None:
        ended = [key for key in self._totals if key not in continued]
        for key in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._totals[key]
        while len(self._totals) > MAX_FOLDED:
            self._totals.popitem(last=False)
        self._sweep_at = min(MAX_FOLDED, len(self._totals) + SWEEP_EVERY)

    def forget(self, instance: str) -> None:
        """Drop the totals of an instance."""
        for key in [key for key in self._totals if _instance_of(key) == instance]:
            del self._totals[key]

    def clear(self) -> None:
        """Drop all totals."""
        self._totals.clear()

    def samples(self) -> list[MetricSample]:
        """Return the totals."""
        return [(name, labels, value) for (name, labels), value in self._totals.copy().items()]


class ProcessMetrics:
    """The collector, registered with Prometheus' default registry while there is something to collect.

    It holds weak references to its sources.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        #: The user metrics of code outside replicas.
        self.user = UserMetrics()
        self._own_registry = registry
        self._lock = threading.Lock()
        self._sources: dict[int, _Known] = {}
        self._folded = FoldedTotals()
        self._is_registered = False
        #: Whether another process exports these metrics: a worker exports those of its child processes.
        self.is_reported = False
        self._export: OTLPExport | None = None

    def add(self, source: Source) -> None:
        """Start collecting from a source; idempotent."""
        number = id(source)

        def forget(ref: weakref.ref[Source]) -> None:
            # Without the lock, because garbage collection may run this in a thread that holds the lock.
            known = self._sources.get(number)
            if known is not None and known.ref is ref:
                self._sources.pop(number, None)

        with self._lock:
            known = self._sources.get(number)
            if known is None or known.ref() is not source:
                self._sources[number] = _Known(source, forget)
            self._register()

    def remove(self, source: Source) -> None:
        """Stop collecting from a source, and keep its totals; idempotent."""
        with self._lock:
            known = self._sources.get(id(source))
            if known is None or known.ref() is not source:
                return
            del self._sources[id(source)]
            others = list(self._sources.values())
            self._folded.add(
                known.samples(), lambda: [sample for each in others for sample in each.samples()]
            )
            self._unregister_if_idle()

    def forget(self, instance: str) -> None:
        """Drop the kept totals of an instance that has ended."""
        with self._lock:
            self._folded.forget(instance)

    def keep_user_metrics(self) -> None:
        """Export the user metrics of code outside replicas."""
        if not self._is_registered:
            with self._lock:
                self._register()

    def _register(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            self._registry.register(self)
            if self._own_registry is None and self._export is None:
                self._export = export_of(self.collect, lambda: self.is_reported)

    @property
    def _registry(self) -> CollectorRegistry:
        from prometheus_client import REGISTRY  # slow to import, and child processes are not scraped

        return self._own_registry or REGISTRY

    def _unregister_if_idle(self) -> None:
        if self._is_registered and not self._sources and self.user.is_empty:
            self._is_registered = False
            self._folded.clear()
            self._registry.unregister(self)

    # ---- called by Prometheus' client

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, because the names of user metrics are not known beforehand."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its current values."""
        with self._lock:
            sources = list(self._sources.values())
            found: dict[Key, float | HistogramCounts] = {
                (name, labels): value.copy() if isinstance(value, HistogramCounts) else value
                for name, labels, value in self._folded.samples()
            }
        users = self.user.samples()
        found[("build_info", (__version__,))] = 1.0
        if self._export is not None:
            found[("otlp_export_failures", ())] = float(self._export.failures)
        for source in sources:
            for name, labels, value in source.samples():
                merge(found, (name, labels), value)
            users += source.user_samples()
        yield from _families(found)
        yield from _user_families(users)

    def samples(self) -> list[MetricSample]:
        """Return the samples of all sources, for a process that cannot be scraped directly."""
        with self._lock:
            sources = list(self._sources.values())
        return [sample for source in sources for sample in source.samples()]


#: The collector of this process. It is module-level state because Prometheus' registry is as well.
PROCESS = ProcessMetrics()


def plain_sample(sample: MetricSample) -> list[Any]:
    """Return a sample as plain values."""
    name, labels, value = sample
    return [
        name,
        list(labels),
        [list(value.counts), value.sum] if isinstance(value, HistogramCounts) else value,
    ]


def sample_of(plain: Sequence[Any]) -> MetricSample:
    """Return the sample that `plain_sample` converted."""
    name, labels, metrics = plain
    spec = METRICS[name]
    if spec.kind is not MetricKind.HISTOGRAM:
        return name, tuple(labels), metrics
    value = spec.histogram()
    value.add(*metrics)
    return name, tuple(labels), value


def merge(found: dict[Key, float | HistogramCounts], key: Key, value: float | HistogramCounts) -> None:
    known = found.get(key)
    if known is None:
        found[key] = value.copy() if isinstance(value, HistogramCounts) else value
    elif isinstance(known, HistogramCounts):
        assert isinstance(value, HistogramCounts)
        known.add(value.counts, value.sum)
        if value.examples:
            known.examples = {**(known.examples or {}), **value.examples}
    else:
        assert not isinstance(value, HistogramCounts)
        found[key] = known + value


def _instance_of(key: Key) -> str | None:
    name, labels = key
    return labels[0] if METRICS[name].labels[:1] == ("serve_instance",) else None


def _families(found: dict[Key, float | HistogramCounts]) -> Iterator[Metric]:
    from prometheus_client.core import Metric

    by_name: dict[str, Metric] = {}
    for (name, labels), value in found.items():
        spec: MetricSpec = METRICS[name]
        family = by_name.get(name)
        if family is None:
            family = by_name[name] = Metric(spec.name, spec.meaning, spec.kind.value)
        _add(family, _with_application(dict(zip(spec.labels, labels, strict=True))), value)
    yield from by_name.values()


def _user_families(samples: Iterable[UserSample]) -> Iterator[Metric]:
    from prometheus_client.core import Metric

    by_name: dict[str, tuple[UserMetric, Metric]] = {}
    for sample in samples:
        metric = sample.metric
        if metric.name not in by_name:
            family = Metric(metric.name, encodable(metric.description), metric.kind.value)
            by_name[metric.name] = (metric, family)
        known, family = by_name[metric.name]
        # If replicas declare a name with different kinds of metrics, only the first kind is exported.
        if known.kind is metric.kind:
            found = dict(sample.labels)
            # A user's tag may be called "endpoint", whereas "deployment" is reserved.
            _add(family, _with_application(found) if "deployment" in found else found, sample.value)
    for _, family in by_name.values():
        yield family


def _with_application(labels: dict[str, str]) -> dict[str, str]:
    """Add the application in the tag of a deployment or an endpoint; "" if there is none."""
    tag = labels.get("deployment", labels.get("endpoint"))
    if tag is not None:
        labels[APPLICATION] = split_deployment_tag(tag)[0] if tag else ""
    return labels


def _add(family: Metric, labels: dict[str, str], value: float | HistogramCounts) -> None:
    # One value that cannot be encoded would break the scrape.
    labels = {name: encodable(each) for name, each in labels.items()}
    if not isinstance(value, HistogramCounts):
        ending = "_total" if family.type == MetricKind.COUNTER.value else ""
        family.add_sample(family.name + ending, labels, value)
        return
    # A copy of the counts, so that all lines are consistent while other threads count.
    counts, at_most = list(value.counts), 0
    examples = value.examples or {}
    for number, (bound, count) in enumerate(zip((*value.bounds, float("inf")), counts, strict=True)):
        at_most += count
        bucket = {**labels, "le": _bound_text(bound)}
        example = examples.get(number)
        exemplar = None if example is None else _exemplar(example)
        family.add_sample(f"{family.name}_bucket", bucket, at_most, exemplar=exemplar)
    family.add_sample(f"{family.name}_count", labels, at_most)
    family.add_sample(f"{family.name}_sum", labels, value.sum)


def _exemplar(example: Example) -> Exemplar:
    from prometheus_client.core import Exemplar

    value, span, at_ns = example
    trace_id, _, span_id = span.ids.partition("-")
    return Exemplar({"trace_id": trace_id, "span_id": span_id}, value, at_ns / 1e9)


def _bound_text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))
