"""Expressions of PromQL over daskserve's own metrics. What is not exported cannot be asked for.

Names and labels are looked up in `daskserve.figures.table`, so that a metric which is renamed takes its
panels and alerts along, or fails them in the first test that imports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from daskserve.figures.table import METRICS, MetricKind

#: What a dashboard filters by, as far as a metric has the label. Grafana puts in what was chosen.
VARIABLES: Sequence[str] = ("serve_instance", "deployment")
#: Grafana makes it at least four scrapes long, so that a rate has values to go by.
RATE_WINDOW = "$__rate_interval"

RUNNING = 'state="RUNNING"'
SERVER_ERRORS = 'code=~"5.."'


class Growth(TypedDict, total=False):
    """How growth is measured, if not as a dashboard does it."""

    window: str
    #: Whether only what the dashboard's variables let through is counted.
    filters: bool
    #: ``rate``, which is growth per second, or ``increase``.
    function: str


def selector(short_name: str, where: str = "", *, filters: bool = True) -> str:
    """Return a selector of all series of a metric that the dashboard's variables let through."""
    spec = METRICS[short_name]
    matchers = []
    if filters:
        matchers = ['job=~"$job"', *(f'{name}=~"${name}"' for name in VARIABLES if name in spec.labels)]
    matchers += [where] if where else []
    return f"{{{','.join(matchers)}}}" if matchers else ""


def gauge(
    short_name: str, by: Sequence[str] = (), where: str = "", *, how: str = "sum", filters: bool = True
) -> str:
    """Return a gauge, or what a counter has come to, by labels."""
    _check(short_name, by)
    return (
        f"{how}{_by(by)}({METRICS[short_name].exported_name}{selector(short_name, where, filters=filters)})"
    )


def rate(short_name: str, by: Sequence[str] = (), where: str = "", **growth: Unpack[Growth]) -> str:
    """Return how fast a counter, or the count of a histogram, grows, by labels."""
    _check(short_name, by)
    kind = METRICS[short_name].kind
    assert kind is not MetricKind.GAUGE
    return _grown(short_name, "_count" if kind is MetricKind.HISTOGRAM else "", by, where, growth)


def quantile(
    share: float, short_name: str, by: Sequence[str] = (), where: str = "", **growth: Unpack[Growth]
) -> str:
    """Return a quantile of what a histogram counted within the window, by labels."""
    return f"histogram_quantile({share:g}, {buckets(short_name, by, where, **growth)})"


def buckets(short_name: str, by: Sequence[str] = (), where: str = "", **growth: Unpack[Growth]) -> str:
    """Return a histogram's buckets over the window, by labels."""
    _check(short_name, by)
    assert METRICS[short_name].kind is MetricKind.HISTOGRAM
    return _grown(short_name, "_bucket", [*by, "le"], where, growth)


def mean(short_name: str, by: Sequence[str] = ()) -> str:
    """Return the mean of what a histogram counted within the window, by labels."""
    assert METRICS[short_name].kind is MetricKind.HISTOGRAM
    return f"{_grown(short_name, '_sum', by, '', {})} / {rate(short_name, by)}"


def _grown(short_name: str, ending: str, by: Sequence[str], where: str, growth: Growth) -> str:
    name = METRICS[short_name].exported_name + ending
    chosen = selector(short_name, where, filters=growth.get("filters", True))
    window, function = growth.get("window", RATE_WINDOW), growth.get("function", "rate")
    return f"sum{_by(by)}({function}({name}{chosen}[{window}]))"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""


#: Labels that Prometheus adds to every series, by the discovery of `daskserve metrics scrape-config`.
TARGET_LABELS = frozenset({"job", "instance", "dask_role", "dask_name"})


def _check(short_name: str, labels: Sequence[str]) -> None:
    unknown = set(labels) - set(METRICS[short_name].labels) - TARGET_LABELS
    if unknown:
        raise ValueError(f"{short_name} has no labels {sorted(unknown)}")
