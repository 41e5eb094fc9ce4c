"""The values of user metrics, which user code declares with `daskserve.metrics`.

Each replica keeps the values of its own code, so they end with the replica. The process keeps the values of
code outside replicas. Any thread may write them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from daskserve.telemetry.histogram import HistogramCounts
from daskserve.telemetry.table import MetricKind


@dataclass(frozen=True, slots=True)
class UserMetric:
    """A metric as user code declares it. Equal declarations are the same metric."""

    name: str
    kind: MetricKind
    description: str = ""
    tag_keys: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()
    # Computed once, because each measurement looks the metric up.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._declared()))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the hash, which differs between processes.
        return UserMetric, self._declared()

    def _declared(self) -> tuple[Any, ...]:
        return self.name, self.kind, self.description, self.tag_keys, self.boundaries


@dataclass(frozen=True, slots=True)
class UserSample:
    """One value of a user metric, with all of its labels."""

    metric: UserMetric
    labels: tuple[tuple[str, str], ...]
    value: float | HistogramCounts

    def plain(self) -> list[Any]:
        """Return the sample as plain values."""
        metric, value = self.metric, self.value
        metrics = [list(value.counts), value.sum] if isinstance(value, HistogramCounts) else value
        return [
            metric.name,
            metric.kind.value,
            metric.description,
            list(metric.tag_keys),
            list(metric.boundaries),
            [list(pair) for pair in self.labels],
            metrics,
        ]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> UserSample:
        """Return the sample that `plain` converted."""
        name, kind, description, tag_keys, boundaries, labels, metrics = plain
        metric = UserMetric(name, MetricKind(kind), description, tuple(tag_keys), tuple(boundaries))
        value: float | HistogramCounts
        if metric.kind is MetricKind.HISTOGRAM:
            value = HistogramCounts(metric.boundaries)
            value.add(*metrics)
        else:
            value = float(metrics)
        return cls(metric, tuple((key, text) for key, text in labels), value)


class UserMetrics:
    """The user metrics of a replica, or of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[UserMetric, tuple[str, ...]], float | HistogramCounts] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been measured."""
        return not self._values

    def add(self, metric: UserMetric, tags: tuple[str, ...], value: float) -> None:
        """Increase a counter."""
        key = (metric, tags)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + value  # type: ignore[operator]

    def set(self, metric: UserMetric, tags: tuple[str, ...], value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[(metric, tags)] = value

    def observe(self, metric: UserMetric, tags: tuple[str, ...], value: float) -> None:
        """Add a value to a histogram."""
        key = (metric, tags)
        with self._lock:
            histogram = self._values.get(key)
            if not isinstance(histogram, HistogramCounts):
                histogram = self._values[key] = HistogramCounts(metric.boundaries)
            histogram.observe(value)

    def samples(self, *own: tuple[str, str]) -> list[UserSample]:
        """Return all current values, labelled with ``own`` followed by their tags."""
        with self._lock:
            return [
                UserSample(
                    metric,
                    (*own, *zip(metric.tag_keys, tags, strict=True)),
                    value.copy() if isinstance(value, HistogramCounts) else value,
                )
                for (metric, tags), value in self._values.items()
            ]
