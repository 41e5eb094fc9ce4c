"""User metrics: `Counter`, `Gauge` and `Histogram`, exported to Prometheus together with daskserve's.

Inside a replica each value automatically gets the labels ``serve_instance``, ``application``, ``deployment``
and ``replica``.
Dask's ``/metrics`` exports the values, including those of replicas with ``isolation="process"``.

Examples
--------
>>> import daskserve as serve
>>> class Model:
...     def __init__(self):
...         self.hits = serve.metrics.Counter("cache_hits", "Answers from the cache.", tag_keys=("model",))
...     def __call__(self, request):
...         self.hits.inc(tags={"model": "a"})
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from daskserve.context import current_replica, current_request
from daskserve.telemetry.collector import PROCESS
from daskserve.telemetry.table import MetricKind
from daskserve.telemetry.user import UserMetric, UserMetrics

__all__ = ["Counter", "Gauge", "Histogram"]

#: Labels that daskserve, Prometheus or the exposition format set.
RESERVED = frozenset(
    {"serve_instance", "deployment", "replica", "application", "instance", "job", "le", "quantile"}
)
#: If user code declares this tag without giving a value, the value is the request's route.
ROUTE = "route"
#: Prefixes of the metrics that daskserve, Dask and Prometheus' client export in the same process.
_TAKEN_PREFIXES = ("daskserve_", "dask_", "python_", "process_")
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")


class Metric:
    """The base class of `Counter`, `Gauge` and `Histogram`; create one of these.

    You can create a metric anywhere, including at module level, and use it from any thread. A metric can be
    pickled; its values stay in the process that measured them.

    Parameters
    ----------
    name : str
        Letters, digits and underscores. A counter is exported with the suffix ``_total``.
    description : str
        Help text of the exported metric.
    tag_keys : tuple of str
        The names of its tags, which become labels. Each needs a value, from ``tags`` or `set_default_tags`.

    Raises
    ------
    TypeError
        ``tag_keys`` is not a tuple of strings.
    ValueError
        A name is invalid or reserved.
    """

    _kind: MetricKind

    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None) -> None:
        self._metric = UserMetric(
            _checked_name(name, self._kind), self._kind, str(description), _checked_keys(tag_keys)
        )
        self._default_tags: dict[str, str] = {}
        # Used for threads that user code starts, because their context has no replica.
        self._maker = _metrics_here()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._metric.name} tags={self._metric.tag_keys}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._metric, self._default_tags)

    @property
    def info(self) -> dict[str, Any]:
        """The name, description, tag keys and default tags."""
        metric = self._metric
        return {
            "name": metric.name,
            "description": metric.description,
            "tag_keys": metric.tag_keys,
            "default_tags": dict(self._default_tags),
        }

    def set_default_tags(self, default_tags: Mapping[str, str]) -> Self:
        """Set the values that tags have when a call does not give them.

        Raises
        ------
        ValueError
            A tag is not among ``tag_keys``, or is reserved.
        """
        self._check_tags(default_tags)
        self._default_tags = dict(default_tags)
        return self

    def _check_tags(self, tags: Mapping[str, str]) -> None:
        known = self._metric.tag_keys
        for key, value in tags.items():
            if key not in known:
                if key in RESERVED:
                    raise ValueError(
                        f"The tag {key!r} is reserved, because daskserve or Prometheus sets it; rename it."
                    )
                raise ValueError(f"Metric {self._metric.name} has no tag {key!r}; declare it in tag_keys.")
            if not isinstance(value, str):
                raise TypeError(f"The value of tag {key!r} must be a string, not {value!r}.")

    def _place(self, tags: Mapping[str, str] | None) -> tuple[UserMetrics, tuple[str, ...]]:
        """Return the store of the value, and the values of all tags."""
        metrics = _metrics_here() or self._maker
        if metrics is None:
            metrics = PROCESS.user
            PROCESS.keep_user_metrics()
        keys = self._metric.tag_keys
        if not keys and not tags:
            return metrics, ()
        if tags:
            self._check_tags(tags)
            if len(tags) == len(keys):
                return metrics, tuple([tags[key] for key in keys])
        found = {**self._default_tags, **(tags or {})}
        if ROUTE in keys and ROUTE not in found:
            request = current_request.get()
            found[ROUTE] = request.route if request is not None else ""
        missing = [key for key in keys if key not in found]
        if missing:
            raise ValueError(
                f"Metric {self._metric.name} has no value for the tags: {', '.join(missing)}; give them in "
                "tags or with set_default_tags()."
            )
        return metrics, tuple(found[key] for key in keys)


class Counter(Metric):
    """A number that only increases. See `Metric` for the parameters."""

    _kind = MetricKind.COUNTER

    def inc(self, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """Add a positive number.

        Raises
        ------
        ValueError
            The number is not positive, or a tag is missing, unknown or reserved.
        """
        if not value > 0:
            raise ValueError(f"The increment of a counter is {value!r}; give a number above 0.")
        metrics, place = self._place(tags)
        metrics.add(self._metric, place, float(value))


class Gauge(Metric):
    """A number that may increase and decrease. See `Metric` for the parameters."""

    _kind = MetricKind.GAUGE

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Set the value; raise `ValueError` if a tag is missing, unknown or reserved."""
        metrics, place = self._place(tags)
        metrics.set(self._metric, place, float(value))


class Histogram(Metric):
    """Counts values in buckets. See `Metric` for the other parameters.

    Parameters
    ----------
    boundaries : sequence of float
        The upper bounds of the buckets: at least one, positive, ascending. The last bucket is unbounded.
    """

    _kind = MetricKind.HISTOGRAM

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: Sequence[float] | None = None,
        tag_keys: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(name, description, tag_keys)
        bounds = tuple(float(each) for each in boundaries or ())
        if not bounds or not all(0 < each < math.inf for each in bounds):
            raise ValueError(f"boundaries must be one or more positive numbers, got {boundaries!r}.")
        if any(low >= high for low, high in itertools.pairwise(bounds)):
            raise ValueError(f"boundaries must be in ascending order, got {boundaries!r}.")
        metric = self._metric
        self._metric = UserMetric(metric.name, metric.kind, metric.description, metric.tag_keys, bounds)

    def observe(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Count a value; raise `ValueError` if a tag is missing, unknown or reserved."""
        metrics, place = self._place(tags)
        metrics.observe(self._metric, place, float(value))


def _checked_name(name: str, kind: MetricKind) -> str:
    if not isinstance(name, str) or not _NAME.match(name):
        raise ValueError(f"The name of a metric is {name!r}; use letters, digits and underscores only.")
    if name.startswith(_TAKEN_PREFIXES):
        raise ValueError(
            f"The name of a metric is {name!r}, whose prefix is reserved; do not start it with "
            f"{', '.join(_TAKEN_PREFIXES)}."
        )
    return name.removesuffix("_total") if kind is MetricKind.COUNTER else name


def _checked_keys(tag_keys: tuple[str, ...] | None) -> tuple[str, ...]:
    if tag_keys is None:
        return ()
    if not isinstance(tag_keys, tuple) or not all(isinstance(key, str) for key in tag_keys):
        raise TypeError(f"tag_keys must be a tuple of strings, not {tag_keys!r}.")
    for key in tag_keys:
        if key in RESERVED or key.startswith("__"):
            raise ValueError(
                f"The tag {key!r} is reserved, because daskserve or Prometheus sets it; rename it."
            )
        if not _NAME.match(key):
            raise ValueError(f"The name of a tag is {key!r}; use letters, digits and underscores only.")
    if len(set(tag_keys)) < len(tag_keys):
        raise ValueError(f"tag_keys is {tag_keys!r}, with a duplicate; list each tag once.")
    return tag_keys


def _metrics_here() -> UserMetrics | None:
    # Keep only the values, so that a module-level metric does not keep a replica's objects alive.
    replica = current_replica.get()
    return None if replica is None or replica.metrics is None else replica.metrics.user


def _rebuild(kind: type[Metric], metric: UserMetric, default_tags: dict[str, str]) -> Metric:
    copy = kind.__new__(kind)
    copy._metric = metric
    copy._default_tags = dict(default_tags)
    copy._maker = _metrics_here()
    return copy
