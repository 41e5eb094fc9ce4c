"""Metrics in OpenTelemetry's form, and a collector that is unreachable."""

from __future__ import annotations

import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import dask.config
import pytest
from prometheus_client import CollectorRegistry

from daskserve.common import settings
from daskserve.telemetry.collector import ProcessMetrics
from daskserve.telemetry.histogram import LatencyHistogram
from daskserve.telemetry.otlp import OTLPExport, export_of

pytest.importorskip("opentelemetry.sdk")


class Requests:
    """A source of metrics."""

    def samples(self) -> list[Any]:
        latency = LatencyHistogram()
        for seconds in (0.0002, 0.0002, 100.0):
            latency.observe(seconds)
        latency.note_trace(100.0, SimpleNamespace(ids=f"{7:032x}-{9:016x}"))
        labels = ("i", "shop/model")
        return [
            ("deployment_requests", labels, 3),
            ("router_ongoing_requests", labels, 2),
            ("deployment_request_duration_seconds", labels, latency),
        ]


@pytest.fixture
def received() -> Iterator[tuple[str, list[bytes]]]:
    """The URL of a collector, and its received requests."""
    found: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/metrics", found
    server.shutdown()
    server.server_close()


def test_a_collector_receives_totals_gauges_and_buckets(received: tuple[str, list[bytes]]) -> None:
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    url, bodies = received
    process, source = ProcessMetrics(CollectorRegistry()), Requests()
    process.add(source)
    exporter = OTLPMetricExporter(endpoint=url, compression=Compression.NoCompression)
    export = OTLPExport(process.collect, lambda: False, lambda: exporter, 60)
    export.export(exporter)
    (body,) = bodies
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    found = {each.name: each for each in resource.scope_metrics[0].metrics}
    (requests,) = found["daskserve_deployment_requests_total"].sum.data_points
    assert (requests.as_double, found["daskserve_deployment_requests_total"].sum.is_monotonic) == (3, True)
    assert {each.key: each.value.string_value for each in requests.attributes} == {
        "serve_instance": "i",
        "deployment": "shop/model",
        "application": "shop",
    }
    (ongoing,) = found["daskserve_router_ongoing_requests"].gauge.data_points
    assert ongoing.as_double == 2
    (latency,) = found["daskserve_deployment_request_duration_seconds"].histogram.data_points
    assert (latency.count, latency.sum, len(latency.explicit_bounds)) == (3, pytest.approx(100.0004), 18)
    assert [count for count in latency.bucket_counts if count] == [2, 1]
    assert latency.bucket_counts[1] == 2
    (example,) = latency.exemplars
    assert (example.as_double, example.trace_id[-1], example.span_id[-1]) == (100.0, 7, 9)
    assert export.failures == 0


def test_a_collector_that_is_away_is_counted_and_raises_nothing() -> None:
    from opentelemetry.sdk.metrics.export import MetricExportResult

    class Away:
        def export(self, data: Any, timeout_millis: float) -> Any:
            return MetricExportResult.FAILURE

    export = OTLPExport(list, lambda: False, Away, 60)  # type: ignore[arg-type]
    export.export(Away())  # type: ignore[arg-type]
    assert export.failures == 1


def test_metrics_are_exported_again_and_again_until_another_process_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from opentelemetry.sdk.metrics.export import MetricExportResult

    made: list[Any] = []
    ended = Event()

    class Collector:
        exports = 0

        def export(self, data: Any, timeout_millis: float) -> Any:
            self.exports += 1
            if self.exports == 2:
                raise OSError("away for a moment")
            return MetricExportResult.SUCCESS

    def make() -> Any:
        made.append(Collector())
        if len(made) == 1:
            raise ImportError("no exporter")
        return made[-1]

    def is_reported() -> bool:
        if len(made) > 1 and made[1].exports >= 3:
            ended.set()
        return ended.is_set()

    export = OTLPExport(list, is_reported, make, 0.001)  # type: ignore[arg-type]
    export.start()
    assert ended.wait(20)
    assert (len(made), made[1].exports, export.failures) == (2, 3, 2)
    assert "The metrics could not be sent to the OpenTelemetry collector" in caplog.text


def test_nothing_is_exported_without_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", raising=False)
    assert export_of(list, lambda: False) is None
    for wrong in (0, True, "soon"):
        with (
            dask.config.set({"daskserve.metrics.otlp-interval-s": wrong}),
            pytest.raises(ValueError, match="otlp-interval-s"),
        ):
            settings.metrics()


def test_buckets_are_those_of_the_configuration() -> None:
    assert settings.metrics().latency_buckets_ms is None
    with dask.config.set({"daskserve.metrics.latency-buckets-ms": [1, 50, 1000]}):
        assert settings.metrics().latency_buckets_ms == (1, 50, 1000)
    for wrong in ("1,x", [], {}, [5, 5], [-1, 5], [0, 5], [1, math.inf], [1, math.nan], [*range(1, 102)]):
        with (
            dask.config.set({"daskserve.metrics.latency-buckets-ms": wrong}),
            pytest.raises(ValueError, match="latency-buckets-ms"),
        ):
            settings.metrics()
