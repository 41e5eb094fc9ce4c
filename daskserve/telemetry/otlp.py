"""Sends the metrics of a process to an OpenTelemetry collector, for clusters without a Prometheus server.

A separate thread does this at an interval, so a slow or absent collector delays no request. A failed export
is counted, and the next export has newer totals. The exporter is that of OpenTelemetry's SDK (the extra
``tracing``), with all of its environment variables.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskserve._version import __version__
from daskserve.common import settings
from daskserve.common.clock import LoopClock
from daskserve.telemetry.error_log import ErrorLog

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricsData
    from prometheus_client.core import Metric

logger = logging.getLogger("daskserve.metrics")

#: The variable of OpenTelemetry that names the collector.
ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
#: Time limit of one export, including retries.
EXPORT_S = 10.0


class OTLPExport:
    """The thread that exports the metrics of a process.

    Parameters
    ----------
    collect : callable
        Returns all metrics as objects of Prometheus' client.
    is_reported : callable
        Returns whether another process exports these metrics; if so, the thread ends.
    """

    def __init__(
        self,
        collect: Callable[[], Iterable[Metric]],
        is_reported: Callable[[], bool],
        exporter: Callable[[], MetricExporter],
        period_s: float,
    ) -> None:
        self._collect = collect
        self._is_reported = is_reported
        self._exporter = exporter
        self._period_s = period_s
        self._began = _now()
        self._errors = ErrorLog(logger)
        #: How many exports have failed.
        self.failures = 0

    def start(self) -> None:
        """Export at the interval until the process ends."""
        threading.Thread(target=self._run, name="daskserve-otlp", daemon=True).start()

    def _run(self) -> None:
        made: MetricExporter | None = None
        pause = threading.Event()  # never set
        while True:
            pause.wait(self._period_s)
            if self._is_reported():
                return
            try:
                made = made or self._exporter()
                self.export(made)
            except Exception as error:  # raised by the exporter's libraries, or by the network
                self.failures += 1
                self._errors.log(error, "The metrics could not be sent to the OpenTelemetry collector")

    def export(self, exporter: MetricExporter) -> None:
        """Export once, and count a failure."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        data = metrics_data(self._collect(), self._began, _now())
        if exporter.export(data, timeout_millis=1000 * EXPORT_S) is not MetricExportResult.SUCCESS:
            self.failures += 1


def export_of(collect: Callable[[], Iterable[Metric]], is_reported: Callable[[], bool]) -> OTLPExport | None:
    """Start the export of a process, and return it; None if no collector is configured."""
    found = settings.metrics()
    endpoint = found.otlp_endpoint or settings.process_variables().get(ENDPOINT)
    if not endpoint:
        return None
    if (
        importlib.util.find_spec("opentelemetry.exporter") is None
        or importlib.util.find_spec("opentelemetry.sdk") is None
    ):
        logger.warning(
            "Metrics are not sent to %s: OpenTelemetry's SDK is missing; pip install 'daskserve[tracing]'.",
            endpoint,
        )
        return None

    def make() -> MetricExporter:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter(endpoint=endpoint, timeout=EXPORT_S)

    export = OTLPExport(collect, is_reported, make, found.otlp_interval_s)
    export.start()
    return export


def _now() -> int:
    return int(LoopClock().wall() * 1e9)


def metrics_data(families: Iterable[Metric], began: int, now: int) -> MetricsData:
    """Convert metrics of Prometheus' client to OpenTelemetry's form, with times in nanoseconds."""
    from opentelemetry.sdk.metrics import export as sdk
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    total = sdk.AggregationTemporality.CUMULATIVE
    found = []
    for family in families:
        data: Any
        if family.type == "histogram":
            data = sdk.Histogram([_point(each, began, now) for each in _series(family)], total)
        else:
            points = [
                sdk.NumberDataPoint(dict(each.labels), began, now, float(each.value))
                for each in family.samples
            ]
            data = sdk.Sum(points, total, True) if family.type == "counter" else sdk.Gauge(points)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        unit = "s" if "_seconds" in family.name else ""
        found.append(sdk.Metric(name, family.documentation, unit, data))
    scope = sdk.ScopeMetrics(InstrumentationScope("daskserve", __version__), found, "")
    identity = {"service.instance.id": f"{socket.gethostname()}:{os.getpid()}"}
    resource = Resource.create(
        {"service.name": "daskserve", **identity}
        if not settings.process_variables().get("OTEL_SERVICE_NAME")
        else dict(identity)
    )
    return sdk.MetricsData([sdk.ResourceMetrics(resource, [scope], "")])


@dataclass(slots=True)
class _Series:
    """One series of a histogram: its labels, its cumulative counts by bound, its sum, and its exemplars."""

    labels: Mapping[str, str]
    buckets: list[tuple[float, float]] = field(default_factory=list)
    sum: float = 0.0
    examples: list[Any] = field(default_factory=list)


def _series(family: Metric) -> list[_Series]:
    found: dict[frozenset[tuple[str, str]], _Series] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        series = found.setdefault(frozenset(labels.items()), _Series(labels))
        if sample.name.endswith("_bucket"):
            series.buckets.append((float(sample.labels["le"]), sample.value))
            if sample.exemplar is not None:
                series.examples.append(sample.exemplar)
        elif sample.name.endswith("_sum"):
            series.sum = sample.value
    return list(found.values())


def _point(series: _Series, began: int, now: int) -> Any:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    at_most = [0.0, *(count for _, count in series.buckets)]
    counts = [int(high - low) for low, high in itertools.pairwise(at_most)]
    bounds = [bound for bound, _ in series.buckets[:-1]]
    unknown: Any = None  # the minimum and the maximum are unknown
    examples = [*map(_exemplar, series.examples)]
    return HistogramDataPoint(
        dict(series.labels),
        began,
        now,
        int(at_most[-1]),
        series.sum,
        counts,
        bounds,
        unknown,
        unknown,
        examples,
    )


def _exemplar(example: Any) -> Any:
    from opentelemetry.sdk.metrics import Exemplar

    trace_id, span_id = (int(example.labels[name], 16) for name in ("trace_id", "span_id"))
    return Exemplar({}, example.value, int(1e9 * example.timestamp), span_id, trace_id)
