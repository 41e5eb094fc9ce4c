"""What user code measures: the values behind `daskserve.metrics`, kept where they belong.

A replica keeps those of its own code, so that they go when it goes; a process keeps those of code outside
of replicas. Written from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from daskserve.figures.histogram import Histogram
from daskserve.figures.table import MetricKind


@dataclass(frozen=True, slots=True)
class UserMetric:
    """A metric as user code declares it; equal declarations mean the same metric."""

    name: str
    kind: MetricKind
    description: str = ""
    tag_keys: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()
    # Computed once: it is looked up each time that something is measured.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = (self.name, self.kind, self.description, self.tag_keys, self.boundaries)
        object.__setattr__(self, "_hash", hash(own))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Not with the hash, which differs from process to process.
        own = (self.name, self.kind, self.description, self.tag_keys, self.boundaries)
        return UserMetric, own


@dataclass(frozen=True, slots=True)
class UserSample:
    """One value of a user's metric, with all of its labels."""

    metric: UserMetric
    labels: tuple[tuple[str, str], ...]
    value: float | Histogram

    def plain(self) -> list[Any]:
        """Return it in plain values."""
        metric, value = self.metric, self.value
        figures = [list(value.counts), value.sum] if isinstance(value, Histogram) else value
        return [
            metric.name,
            metric.kind.value,
            metric.description,
            list(metric.tag_keys),
            list(metric.boundaries),
            [list(pair) for pair in self.labels],
            figures,
        ]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> UserSample:
        """Return what `plain` was made of."""
        name, kind, description, tag_keys, boundaries, labels, figures = plain
        metric = UserMetric(name, MetricKind(kind), description, tuple(tag_keys), tuple(boundaries))
        value: float | Histogram
        if metric.kind is MetricKind.HISTOGRAM:
            value = Histogram(metric.boundaries)
            value.add(*figures)
        else:
            value = float(figures)
        return cls(metric, tuple((key, text) for key, text in labels), value)


class UserFigures:
    """The values of one replica's metrics, or of a process's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[UserMetric, tuple[str, ...]], float | Histogram] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been measured."""
        return not self._values

    def add(self, metric: UserMetric, tags: tuple[str, ...], value: float) -> None:
        """Make a counter grow."""
        key = (metric, tags)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + value  # type: ignore[operator]

    def set(self, metric: UserMetric, tags: tuple[str, ...], value: float) -> None:
        """Let a gauge have a value."""
        with self._lock:
            self._values[(metric, tags)] = value

    def observe(self, metric: UserMetric, tags: tuple[str, ...], value: float) -> None:
        """Count a value in a histogram."""
        key = (metric, tags)
        with self._lock:
            histogram = self._values.get(key)
            if not isinstance(histogram, Histogram):
                histogram = self._values[key] = Histogram(metric.boundaries)
            histogram.observe(value)

    def samples(self, *own: tuple[str, str]) -> list[UserSample]:
        """Return all values as they are now, labelled with their tags and, before these, with ``own``."""
        with self._lock:
            return [
                UserSample(
                    metric,
                    (*own, *zip(metric.tag_keys, tags, strict=True)),
                    value.copy() if isinstance(value, Histogram) else value,
                )
                for (metric, tags), value in self._values.items()
            ]
