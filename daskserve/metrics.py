"""Metrics of your own: `Counter`, `Gauge` and `Histogram`, exported to Prometheus with daskserve's.

Inside a replica each value gets the labels ``serve_instance``, ``deployment`` and ``replica`` by itself.
Dask's ``/metrics`` exports them, also those of replicas with ``isolation="process"``.

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
from daskserve.figures.collector import PROCESS
from daskserve.figures.table import MetricKind
from daskserve.figures.user import UserFigures, UserMetric

__all__ = ["Counter", "Gauge", "Histogram"]

#: Labels that daskserve, Prometheus or the exposition format give by themselves.
RESERVED = frozenset(
    {"serve_instance", "deployment", "replica", "application", "instance", "job", "le", "quantile"}
)
#: Filled in by the request's route where user code declares it and does not give it.
ROUTE = "route"
#: Names that begin like this are exported by others in the same process.
_TAKEN_PREFIXES = ("daskserve_", "dask_", "python_", "process_")
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")


class Metric:
    """What the three kinds have in common; make one of those.

    A metric may be made anywhere, also at a module's top, and used from any thread. It may be pickled; the
    values stay where they were measured.

    Parameters
    ----------
    name : str
        Letters, digits and underscores. A counter is exported with ``_total`` behind it.
    description : str
    tag_keys : tuple of str
        The names of its tags, which become labels. Each needs a value, by ``tags`` or by `set_default_tags`.

    Raises
    ------
    TypeError
        ``tag_keys`` is no tuple of strings.
    ValueError
        A name is no name, or is reserved.
    """

    _kind: MetricKind

    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None) -> None:
        self._metric = UserMetric(
            _checked_name(name, self._kind), self._kind, str(description), _checked_keys(tag_keys)
        )
        self._default_tags: dict[str, str] = {}
        # For threads that user code starts by itself, which know no replica.
        self._maker = _figures_here()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._metric.name} tags={self._metric.tag_keys}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._metric, self._default_tags)

    @property
    def info(self) -> dict[str, Any]:
        """Its name, description, tag keys and default tags."""
        metric = self._metric
        return {
            "name": metric.name,
            "description": metric.description,
            "tag_keys": metric.tag_keys,
            "default_tags": dict(self._default_tags),
        }

    def set_default_tags(self, default_tags: Mapping[str, str]) -> Self:
        """Give tags the values that they have unless a call says otherwise.

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
                    raise ValueError(f"The tag {key!r} is reserved: daskserve or Prometheus sets it.")
                raise ValueError(f"Metric {self._metric.name} has no tag {key!r}; declare it in tag_keys.")
            if not isinstance(value, str):
                raise TypeError(f"The value of tag {key!r} must be a string, not {value!r}.")

    def _place(self, tags: Mapping[str, str] | None) -> tuple[UserFigures, tuple[str, ...]]:
        """Return where the value goes, and the values of all tags."""
        figures = _figures_here() or self._maker
        if figures is None:
            figures = PROCESS.user
            PROCESS.keep_user_metrics()
        keys = self._metric.tag_keys
        if not keys and not tags:
            return figures, ()
        if tags:
            self._check_tags(tags)
            if len(tags) == len(keys):
                return figures, tuple([tags[key] for key in keys])
        found = {**self._default_tags, **(tags or {})}
        if ROUTE in keys and ROUTE not in found:
            request = current_request.get()
            found[ROUTE] = request.route if request is not None else ""
        missing = [key for key in keys if key not in found]
        if missing:
            raise ValueError(f"Metric {self._metric.name} needs a value for: {', '.join(missing)}.")
        return figures, tuple(found[key] for key in keys)


class Counter(Metric):
    """A number that only grows. See `Metric` for the parameters."""

    _kind = MetricKind.COUNTER

    def inc(self, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """Add a positive number.

        Raises
        ------
        ValueError
            It is not positive, or a tag is missing, unknown or reserved.
        """
        if not value > 0:
            raise ValueError(f"A counter only grows: {value!r} is not more than 0.")
        figures, place = self._place(tags)
        figures.add(self._metric, place, float(value))


class Gauge(Metric):
    """A number that may be anything. See `Metric` for the parameters."""

    _kind = MetricKind.GAUGE

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Let it have a value from now on; `ValueError` if a tag is missing, unknown or reserved."""
        figures, place = self._place(tags)
        figures.set(self._metric, place, float(value))


class Histogram(Metric):
    """Counts values by size. See `Metric` for the other parameters.

    Parameters
    ----------
    boundaries : sequence of float
        The upper bounds of its buckets: positive, ascending, at least one. A last one has no bound.
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
            raise ValueError(f"boundaries must be positive numbers, at least one, not {boundaries!r}.")
        if any(low >= high for low, high in itertools.pairwise(bounds)):
            raise ValueError(f"boundaries must ascend, not {boundaries!r}.")
        metric = self._metric
        self._metric = UserMetric(metric.name, metric.kind, metric.description, metric.tag_keys, bounds)

    def observe(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Count a value; `ValueError` if a tag is missing, unknown or reserved."""
        figures, place = self._place(tags)
        figures.observe(self._metric, place, float(value))


def _checked_name(name: str, kind: MetricKind) -> str:
    if not isinstance(name, str) or not _NAME.match(name):
        raise ValueError(f"A metric's name consists of letters, digits and underscores, unlike {name!r}.")
    if name.startswith(_TAKEN_PREFIXES):
        raise ValueError(f"Names like {name!r} are exported by others; begin it otherwise.")
    return name.removesuffix("_total") if kind is MetricKind.COUNTER else name


def _checked_keys(tag_keys: tuple[str, ...] | None) -> tuple[str, ...]:
    if tag_keys is None:
        return ()
    if not isinstance(tag_keys, tuple) or not all(isinstance(key, str) for key in tag_keys):
        raise TypeError(f"tag_keys must be a tuple of strings, not {tag_keys!r}.")
    for key in tag_keys:
        if key in RESERVED or key.startswith("__"):
            raise ValueError(f"The tag {key!r} is reserved: daskserve or Prometheus sets it.")
        if not _NAME.match(key):
            raise ValueError(f"A tag's name consists of letters, digits and underscores, unlike {key!r}.")
    if len(set(tag_keys)) < len(tag_keys):
        raise ValueError(f"tag_keys names a tag twice: {tag_keys!r}.")
    return tag_keys


def _figures_here() -> UserFigures | None:
    # Only the figures, so that a metric at a module's top does not keep a replica's objects alive.
    replica = current_replica.get()
    return None if replica is None or replica.figures is None else replica.figures.user


def _rebuild(kind: type[Metric], metric: UserMetric, default_tags: dict[str, str]) -> Metric:
    copy = kind.__new__(kind)
    copy._metric = metric
    copy._default_tags = dict(default_tags)
    copy._maker = _figures_here()
    return copy
