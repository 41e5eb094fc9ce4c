"""Build PromQL expressions over daskserve's own metrics.

Names and labels come from `daskserve.telemetry.table`. After a metric is renamed, expressions with its old
name fail at import.
"""

from __future__ import annotations

from collections.abc import Sequence

from daskserve.telemetry.table import METRICS, MetricKind

#: Labels that a dashboard filters by, if a metric has them. Grafana fills in the selected values.
VARIABLES: Sequence[str] = ("serve_instance", "deployment")
#: Grafana makes this window at least four scrapes long, so that a rate has enough values.
RATE_WINDOW = "$__rate_interval"

RUNNING = 'state="RUNNING"'
SERVER_ERRORS = 'code=~"5.."'


def selector(short_name: str, where: str = "") -> str:
    """Return a selector of a metric's series, filtered by the dashboard's variables."""
    chosen = [name for name in VARIABLES if name in METRICS[short_name].exported_labels]
    matchers = ['job=~"$job"', *(f'{name}=~"${name}"' for name in chosen), *([where] if where else [])]
    return f"{{{','.join(matchers)}}}"


def gauge(short_name: str, by: Sequence[str] = (), where: str = "", *, how: str = "sum") -> str:
    """Return an expression for a gauge, or the total of a counter, by labels."""
    _check(short_name, by)
    return f"{how}{_by(by)}({METRICS[short_name].exported_name}{selector(short_name, where)})"


def rate(short_name: str, by: Sequence[str] = (), where: str = "") -> str:
    """Return an expression for the growth per second of a counter, or of a histogram's count, by labels."""
    kind = METRICS[short_name].kind
    assert kind is not MetricKind.GAUGE
    _check(short_name, by)
    return _grown(short_name, "_count" if kind is MetricKind.HISTOGRAM else "", by, where)


def quantile(share: float, short_name: str, by: Sequence[str] = ()) -> str:
    """Return an expression for a quantile of a histogram within the window, by labels."""
    return f"histogram_quantile({share:g}, {buckets(short_name, by)})"


def buckets(short_name: str, by: Sequence[str] = (), *, function: str = "rate") -> str:
    """Return an expression for the growth of a histogram's buckets within the window, by labels."""
    assert METRICS[short_name].kind is MetricKind.HISTOGRAM
    _check(short_name, by)
    return _grown(short_name, "_bucket", [*by, "le"], function=function)


def mean(short_name: str, by: Sequence[str] = ()) -> str:
    """Return an expression for the mean of a histogram within the window, by labels."""
    return f"{busy(short_name, by)} / {rate(short_name, by)}"


def busy(short_name: str, by: Sequence[str] = ()) -> str:
    """Return an expression for the growth per second of a histogram's sum, by labels.

    For a histogram of durations, this is the mean number of operations in progress.
    """
    assert METRICS[short_name].kind is MetricKind.HISTOGRAM
    _check(short_name, by)
    return _grown(short_name, "_sum", by)


def _grown(
    short_name: str, ending: str, by: Sequence[str], where: str = "", *, function: str = "rate"
) -> str:
    series = f"{METRICS[short_name].exported_name}{ending}{selector(short_name, where)}"
    return f"sum{_by(by)}({function}({series}[{RATE_WINDOW}]))"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""


#: Labels that Prometheus adds to every series with the configuration of `daskserve metrics scrape-config`.
TARGET_LABELS = frozenset({"job", "instance", "dask_role", "dask_name"})


def _check(short_name: str, labels: Sequence[str]) -> None:
    unknown = set(labels) - set(METRICS[short_name].exported_labels) - TARGET_LABELS
    if unknown:
        raise ValueError(f"{short_name} has no labels {sorted(unknown)}; use labels of its definition")
