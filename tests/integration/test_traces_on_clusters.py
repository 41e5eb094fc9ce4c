"""Traces and metrics of a real cluster, with a collector that works, hangs or is unreachable."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from clusters import nannied_cluster
from dask_processes import fetch, poll_for
from distributed import Client, get_client
from opentelemetry import trace
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import daskserve as serve

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"

pytestmark = pytest.mark.nightly


class Collector:
    """Receives spans and metrics unless it hangs; keeps the spans of one trace, and counters' totals."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        #: The totals, by process and name.
        self.totals: dict[tuple[str, str], float] = {}
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.requests = 0
        taking = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                taking.requests += 1
                taking.may_answer.wait(60)
                (taking.take_metrics if self.path == "/v1/metrics" else taking.take_spans)(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take_spans(self, body: bytes) -> None:
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in each.scope_spans:
                self.spans += [span for span in scope.spans if span.trace_id.hex() == TRACE]

    def take_metrics(self, body: bytes) -> None:
        for each in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            named = {attribute.key: attribute.value.string_value for attribute in each.resource.attributes}
            for metric in each.scope_metrics[0].metrics:
                total = sum(point.as_double for point in metric.sum.data_points)
                self.totals[named["service.instance.id"], metric.name] = total

    def total(self, name: str) -> float:
        return sum(total for (_, each), total in tuple(self.totals.items()) if each == name)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def leave(self) -> None:
        self.may_answer.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.leave()


@pytest.fixture
def dask(collector: Collector) -> Iterator[Client]:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_BSP_MAX_QUEUE_SIZE": "64",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{collector.url}/v1/metrics",
        "DASK_DASKSERVE__METRICS__OTLP_INTERVAL_S": "0.5",
    }
    with nannied_cluster(2, env=variables) as client:
        yield client


@serve.deployment
async def answer(request: Any) -> int:
    return await get_client().submit(abs, -7)  # type: ignore[no-any-return]


@serve.deployment
async def quick(request: Any) -> str:
    return "ok"


def counted(dask: Client, name: str, of: str = "trace_spans") -> float:
    def total(name: str) -> float:
        from prometheus_client import REGISTRY

        samples = [each for family in REGISTRY.collect() for each in family.samples]
        return sum(each.value for each in samples if each.name == name)

    return sum(dask.run(total, f"daskserve_{of}_{name}_total").values())


def test_a_task_of_dask_is_in_the_trace_of_its_request(dask: Client, collector: Collector) -> None:
    with serve.start(
        dask_client=dask, http_options={"port": 0}, tracing_config={"sampling_ratio": 0}
    ) as client:
        client.run(answer.bind())
        assert fetch(client.http_urls()[0], headers={"traceparent": PARENT}).json == 7
        poll_for(lambda: len(collector.spans) >= 5)
        named = {each.name: each for each in collector.spans}
    task, code = named["dask task abs"], named["user code __call__"]
    assert task.parent_span_id == code.span_id
    assert task.start_time_unix_nano >= code.start_time_unix_nano
    assert task.end_time_unix_nano <= code.end_time_unix_nano


@serve.deployment(isolation="process")
async def apart(request: Any) -> str:
    with trace.get_tracer("mine").start_as_current_span("of the user"):
        return str(os.getpid())


def test_code_in_a_process_of_its_own_has_its_spans_in_the_trace(dask: Client, collector: Collector) -> None:
    http_options = {"port": 0, "replicas_listen": False}  # otherwise there is no route to a replica
    with serve.start(
        dask_client=dask, http_options=http_options, tracing_config={"sampling_ratio": 0}
    ) as client:
        client.run(apart.bind())
        fetch(client.http_urls()[0], headers={"traceparent": PARENT})
        poll_for(lambda: len(collector.spans) >= 5)
        named = {each.name: each for each in collector.spans}
        poll_for(lambda: counted(dask, "exported") >= 5, every_s=0.2)
        assert counted(dask, "exported") == len(collector.spans) == 5
    above = ["of the user", "user code __call__", "replica apart", "route_to_replica apart", "GET /"]
    for name, parent in itertools.pairwise(above):
        assert named[name].parent_span_id == named[parent].span_id


def test_requests_do_not_notice_a_collector_that_hangs_and_one_that_is_away(
    dask: Client, collector: Collector
) -> None:
    with serve.start(
        dask_client=dask, http_options={"port": 0}, tracing_config={"sampling_ratio": 1}
    ) as client:
        client.run(quick.bind())
        url = client.http_urls()[0]
        assert fetch(url).text == "ok"
        poll_for(lambda: counted(dask, "exported"), every_s=0.2)
        poll_for(lambda: collector.total("daskserve_http_requests_total") == 1)
        collector.may_answer.clear()
        for _ in range(300):  # far more than its queue holds
            assert fetch(url, timeout_s=5).text == "ok"
        poll_for(lambda: counted(dask, "dropped"), every_s=0.2)
        collector.leave()
        before = counted(dask, "failed")
        poll_for(lambda: counted(dask, "export_failures", of="otlp"), every_s=0.2)
        for _ in range(30):
            assert fetch(url, timeout_s=5).text == "ok"
        poll_for(lambda: counted(dask, "failed") > before, every_s=0.2)
