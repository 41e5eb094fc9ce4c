"""Expressions of PromQL over daskserve's own metrics. What is not exported cannot be asked for.

Names and labels are looked up in `daskserve.metric_table`, so that a metric which is renamed takes its panels
and alerts along, or fails them in the first test that imports them.
"""

from __future__ import annotations

from collections.abc import Sequence

from daskserve.metric_table import METRICS, MetricKind

#: What a dashboard filters by, as far as a metric has the label. Grafana puts in what was chosen.
VARIABLES: Sequence[str] = ("serve_instance", "deployment")
#: Grafana makes it at least four scrapes long, so that a rate has values to go by.
RATE_WINDOW = "$__rate_interval"

RUNNING = 'state="RUNNING"'
SERVER_ERRORS = 'code=~"5.."'


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


def rate(
    short_name: str,
    by: Sequence[str] = (),
    where: str = "",
    *,
    window: str = RATE_WINDOW,
    filters: bool = True,
    function: str = "rate",
) -> str:
    """Return how fast a counter, or the count of a histogram, grows, by labels."""
    _check(short_name, by)
    spec = METRICS[short_name]
    assert spec.kind is not MetricKind.GAUGE
    name = spec.exported_name + ("_count" if spec.kind is MetricKind.HISTOGRAM else "")
    return f"sum{_by(by)}({function}({name}{selector(short_name, where, filters=filters)}[{window}]))"


def quantile(
    share: float,
    short_name: str,
    by: Sequence[str] = (),
    where: str = "",
    *,
    window: str = RATE_WINDOW,
    filters: bool = True,
) -> str:
    """Return a quantile of what a histogram counted within the window, by labels."""
    return f"histogram_quantile({share:g}, {buckets(short_name, by, where, window=window, filters=filters)})"


def buckets(
    short_name: str,
    by: Sequence[str] = (),
    where: str = "",
    *,
    window: str = RATE_WINDOW,
    filters: bool = True,
    function: str = "rate",
) -> str:
    """Return a histogram's buckets over the window, by labels."""
    _check(short_name, by)
    spec = METRICS[short_name]
    assert spec.kind is MetricKind.HISTOGRAM
    chosen = selector(short_name, where, filters=filters)
    return f"sum{_by([*by, 'le'])}({function}({spec.name}_bucket{chosen}[{window}]))"


def mean(short_name: str, by: Sequence[str] = ()) -> str:
    """Return the mean of what a histogram counted within the window, by labels."""
    spec = METRICS[short_name]
    assert spec.kind is MetricKind.HISTOGRAM
    total = f"sum{_by(by)}(rate({spec.name}_sum{selector(short_name)}[{RATE_WINDOW}]))"
    return f"{total} / {rate(short_name, by)}"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""


#: Labels that Prometheus adds to every series, by the discovery of `daskserve metrics scrape-config`.
TARGET_LABELS = frozenset({"job", "instance", "dask_role", "dask_name"})


def _check(short_name: str, labels: Sequence[str]) -> None:
    unknown = set(labels) - set(METRICS[short_name].labels) - TARGET_LABELS
    if unknown:
        raise ValueError(f"{short_name} has no labels {sorted(unknown)}")
