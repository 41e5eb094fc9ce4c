"""From figures to metrics, at the time of a scrape: one Prometheus collector for each process.

Problem: counting must cost a request next to nothing, and yet be right whoever asks and whatever comes and
goes meanwhile. Choice: components keep plain numbers and say what these are when asked (`Source.samples`).
The collector adds up what has the same labels, as several workers may share a process, and keeps the totals
of what has gone, because counters must not go back. It waits for nothing; any thread may call it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import prometheus_client
from prometheus_client.core import Metric

from daskserve._version import __version__
from daskserve.figures.complaints import Complaint
from daskserve.figures.histogram import Histogram
from daskserve.figures.table import METRICS, MetricKind, MetricSpec, Sample
from daskserve.figures.user import UserFigures, UserMetric, UserSample

logger = logging.getLogger("daskserve.metrics")

#: So many totals of what has gone are kept. Those that grew longest ago go first.
MAX_FOLDED = 10_000

Key = tuple[str, tuple[str, ...]]


class Source(Protocol):
    """Something with figures. May be asked from any thread, also while it starts or ends."""

    def samples(self) -> Iterable[Sample]:
        """Return the figures as they are now, without waiting; histograms may still be written to."""


class _Known:
    """A source, and what is wrong with it."""

    __slots__ = ("figures_complaint", "ref", "user_complaint")

    def __init__(self, source: Source, forget: Callable[[weakref.ref[Source]], None]) -> None:
        self.ref = weakref.ref(source, forget)
        self.figures_complaint = Complaint(logger)
        self.user_complaint = Complaint(logger)

    def samples(self) -> list[Sample]:
        """Return its figures; none if it is gone, or broken."""
        source = self.ref()
        try:
            return [] if source is None else list(source.samples())
        except Exception as error:
            # One that is broken must not take all the others, and Dask's own metrics, along.
            self.figures_complaint.log(error, "The figures of %r could not be read", source)
            return []

    def user_samples(self) -> list[UserSample]:
        """Return what user code measures in it."""
        source = self.ref()
        try:
            return list(getattr(source, "user_samples", list)())
        except Exception as error:
            self.user_complaint.log(error, "What user code measures in %r could not be read", source)
            return []


class ProcessMetrics:
    """The collector; in Prometheus' default registry as long as there is something to collect.

    It holds its sources weakly: they live as long as whoever uses them.
    """

    def __init__(self, registry: prometheus_client.CollectorRegistry | None = None) -> None:
        #: What user code outside of replicas measures.
        self.user = UserFigures()
        self._registry = registry or prometheus_client.REGISTRY
        self._lock = threading.Lock()
        self._sources: dict[int, _Known] = {}
        self._folded: OrderedDict[Key, float | Histogram] = OrderedDict()
        self._is_registered = False

    def add(self, source: Source) -> None:
        """Collect from a source from now on; idempotent."""
        number = id(source)

        def forget(ref: weakref.ref[Source]) -> None:
            # Without the lock: this may run anywhere, even in a thread that holds it.
            known = self._sources.get(number)
            if known is not None and known.ref is ref:
                self._sources.pop(number, None)

        with self._lock:
            known = self._sources.get(number)
            if known is None or known.ref() is not source:
                self._sources[number] = _Known(source, forget)
            self._register()

    def remove(self, source: Source) -> None:
        """Collect from a source no more, and keep the totals of what it has counted; idempotent."""
        with self._lock:
            known = self._sources.get(id(source))
            if known is None or known.ref() is not source:
                return
            for name, labels, value in known.samples():
                if METRICS[name].is_folded:
                    _merge(self._folded, (name, labels), value)
                    self._folded.move_to_end((name, labels))
            while len(self._folded) > MAX_FOLDED:
                self._folded.popitem(last=False)
            del self._sources[id(source)]
            self._unregister_if_idle()

    def forget(self, instance: str) -> None:
        """Drop the totals of an instance that has ended."""
        with self._lock:
            for key in [key for key in self._folded if _instance_of(key) == instance]:
                del self._folded[key]

    def keep_user_metrics(self) -> None:
        """Export what user code outside of replicas measures."""
        if not self._is_registered:
            with self._lock:
                self._register()

    def _register(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            self._registry.register(self)

    def _unregister_if_idle(self) -> None:
        if self._is_registered and not self._sources and self.user.is_empty:
            self._is_registered = False
            self._folded.clear()
            self._registry.unregister(self)

    # ---- called by Prometheus' client

    def describe(self) -> Iterable[Metric]:
        """Claim no names beforehand: the user's are not known yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is now."""
        with self._lock:
            sources = list(self._sources.values())
            found: dict[Key, float | Histogram] = {
                key: value.copy() if isinstance(value, Histogram) else value
                for key, value in self._folded.items()
            }
        users = self.user.samples()
        found[("build_info", (__version__,))] = 1.0
        for source in sources:
            for name, labels, value in source.samples():
                _merge(found, (name, labels), value)
            users += source.user_samples()
        yield from _families(found)
        yield from _user_families(users)

    def samples(self) -> list[Sample]:
        """Return the figures of all sources, for a process that cannot be scraped by itself."""
        with self._lock:
            sources = list(self._sources.values())
        return [sample for source in sources for sample in source.samples()]


#: The collector of this process. The only state that hangs on a module, because Prometheus' registry does.
PROCESS = ProcessMetrics()


def plain_sample(sample: Sample) -> list[Any]:
    """Return a sample in plain values."""
    name, labels, value = sample
    return [name, list(labels), [list(value.counts), value.sum] if isinstance(value, Histogram) else value]


def sample_of(plain: Sequence[Any]) -> Sample:
    """Return what `plain_sample` was made of."""
    name, labels, figures = plain
    spec = METRICS[name]
    if spec.kind is not MetricKind.HISTOGRAM:
        return name, tuple(labels), figures
    value = Histogram(spec.bounds)
    value.add(*figures)
    return name, tuple(labels), value


def _merge(found: dict[Key, float | Histogram], key: Key, value: float | Histogram) -> None:
    known = found.get(key)
    if known is None:
        found[key] = value.copy() if isinstance(value, Histogram) else value
    elif isinstance(known, Histogram):
        assert isinstance(value, Histogram)
        known.add(value.counts, value.sum)
    else:
        assert not isinstance(value, Histogram)
        found[key] = known + value


def _instance_of(key: Key) -> str | None:
    name, labels = key
    return labels[0] if METRICS[name].labels[:1] == ("serve_instance",) else None


def _families(found: dict[Key, float | Histogram]) -> Iterator[Metric]:
    by_name: dict[str, Metric] = {}
    for (name, labels), value in found.items():
        spec: MetricSpec = METRICS[name]
        family = by_name.get(name)
        if family is None:
            family = by_name[name] = Metric(spec.name, spec.meaning, spec.kind.value)
        _add(family, dict(zip(spec.labels, labels, strict=True)), value)
    yield from by_name.values()


def _user_families(samples: Iterable[UserSample]) -> Iterator[Metric]:
    by_name: dict[str, tuple[UserMetric, Metric]] = {}
    for sample in samples:
        metric = sample.metric
        if metric.name not in by_name:
            family = Metric(metric.name, metric.description, metric.kind.value)
            by_name[metric.name] = (metric, family)
        known, family = by_name[metric.name]
        # Two replicas that disagree on what a name means cannot both be exported under it.
        if known.kind is metric.kind:
            _add(family, dict(sample.labels), sample.value)
    for _, family in by_name.values():
        yield family


def _add(family: Metric, labels: dict[str, str], value: float | Histogram) -> None:
    if not isinstance(value, Histogram):
        ending = "_total" if family.type == MetricKind.COUNTER.value else ""
        family.add_sample(family.name + ending, labels, value)
        return
    # A copy of the counts, so that all lines agree while others are counted.
    counts, at_most = list(value.counts), 0
    for bound, count in zip((*value.bounds, float("inf")), counts, strict=True):
        at_most += count
        family.add_sample(f"{family.name}_bucket", {**labels, "le": _bound_text(bound)}, at_most)
    family.add_sample(f"{family.name}_count", labels, at_most)
    family.add_sample(f"{family.name}_sum", labels, value.sum)


def _bound_text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))
