"""Traces in one process: spans have the right parents, contexts are passed on, and exporters may fail."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from collected_spans import CONFIG, Collected, collected, path_of, until
from opentelemetry import baggage, trace
from tables import each_case

import daskserve as serve
from daskserve.common.error_types import error_type
from daskserve.internals.otlp_exporter import post_of
from daskserve.payload.packed_errors import pack_all, received_error
from daskserve.proxies.exchange.http_response import Response
from daskserve.proxies.ingress.request import IngressRequest
from daskserve.proxies.ingress.tracing import begin_trace, end_trace
from daskserve.telemetry.histogram import LatencyHistogram
from daskserve.telemetry.tracing import process as process_module
from daskserve.telemetry.tracing import span as span_module
from daskserve.telemetry.tracing.carrier import NO_PARENT, parse_parent, read_headers, traceparent
from daskserve.telemetry.tracing.current import current_trace_id
from daskserve.telemetry.tracing.process import Tracing
from daskserve.telemetry.tracing.span import MAX_PENDING
from daskserve.testing import local_instance

__all__ = ["collected"]

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-2] + "00"


def get(url: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as response:
        return json.load(response)


def current_span_id() -> str:
    return format(trace.get_current_span().get_span_context().span_id, "016x")


@trace.get_tracer("mine").start_as_current_span("matrix")
async def matrix() -> None:
    await asyncio.sleep(0.01)


@serve.deployment(max_ongoing_requests=8)
class Model:
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=5)
    async def predict(self, values: list[int]) -> list[int]:
        await matrix()
        return [2 * each for each in values]

    async def __call__(self, value: int) -> int:
        return await self.predict(value)  # type: ignore[no-any-return]


@serve.deployment
class Middle:
    def __init__(self, model: Any) -> None:
        self.model = model

    async def both(self, value: int) -> int:
        return sum(await asyncio.gather(self.model.remote(value), self.model.remote(value + 1)))


@serve.deployment
class Front:
    def __init__(self, middle: Any) -> None:
        self.middle = middle

    async def __call__(self, request: Any) -> dict[str, Any]:
        trace.get_current_span().set_attribute("of.user", "yes")
        return {
            "sum": await self.middle.both.remote(1),
            "trace": current_trace_id(),
            "is_passed_on": current_span_id() in request.headers["traceparent"],
            "baggage": dict(baggage.get_all()),
        }


class Steps:
    """Answers two calls at once, in steps that each have a span of the user's."""

    @serve.batching.continuous_batch(max_slots=2)
    def in_thread(self, active: list[serve.batching.ActiveRequest]) -> list[str]:
        return self.step(active)

    @in_thread.prefill
    def _read(self, new: list[serve.batching.ActiveRequest]) -> None: ...

    @serve.batching.continuous_batch(max_slots=2)
    async def on_loop(self, active: list[serve.batching.ActiveRequest]) -> list[str]:
        return self.step(active)

    def step(self, active: list[serve.batching.ActiveRequest]) -> list[str]:
        with trace.get_tracer("mine").start_as_current_span("step"):
            for each in active:
                if len(each.outputs) == each.args[0] - 1:
                    each.finish()
            return [current_trace_id()] * len(active)

    async def __call__(self, request: Any) -> Any:
        function = self.in_thread if request.query_params["place"] == "thread" else self.on_loop

        async def outputs(count: int) -> list[str]:
            return [each async for each in function(count)]

        return await asyncio.gather(outputs(3), outputs(5))


@pytest.mark.parametrize(("place", "name"), [("thread", "Steps.in_thread"), ("loop", "Steps.on_loop")])
def test_steps_of_a_continuous_batch_link_to_their_calls(collected: Collected, place: str, name: str) -> None:
    with local_instance(http_options={"port": 0}, tracing_config=CONFIG) as client:
        client.run(serve.deployment(Steps).bind())
        url = f"{client.http_urls()[0]}?place={place}"
        assert get(url, traceparent=PARENT) == [[PARENT[3:35]] * count for count in (3, 5)]
        until(lambda: any(each.name == "GET /" for each in collected.spans))
    spans = collected.spans
    calls = [each for each in spans if each.name == f"batched call {name}"]
    assert sorted(each.attributes["daskserve.outputs"] for each in calls) == [3, 5]
    assert all(path_of(each, spans).split(" < ")[1] == "user code __call__" for each in calls)
    batches = [each for each in spans if each.name == f"batch {name}"]
    # There is a span for each set of calls, not for each step. The two calls may have begun one after the
    # other.
    assert sum(each.attributes["daskserve.batch.steps"] for each in batches) in (5, 6)
    assert len(batches) in (2, 3)
    ids = {each.context.span_id for each in calls}
    both = [each for each in batches if each.attributes["daskserve.batch.size"] == 2]
    assert [{link.context.span_id for link in each.links} for each in both] == [ids]
    assert {link.context.span_id for each in calls for link in each.links} >= {both[0].context.span_id}
    steps = [each for each in spans if each.name == "step"]
    assert {path_of(each, spans).split(" < ")[1] for each in steps} == {f"batch {name}"}
    assert any(each.name == f"prefill {name}" for each in spans) == (place == "thread")
    assert all("first output" in [event.name for event in each.events] for each in calls)


def test_a_chain_with_a_batch_is_one_trace_whose_times_are_those_of_the_metrics(collected: Collected) -> None:
    with local_instance(http_options={"port": 0}, tracing_config=CONFIG) as client:
        client.run(Front.bind(Middle.bind(Model.bind())))
        found = get(client.http_urls()[0], traceparent=PARENT, baggage="tenant=a", tracestate="v=1")
        assert found == {
            "sum": 6,
            "trace": PARENT[3:35],
            "baggage": {"tenant": "a"},
            "is_passed_on": True,
        }
        until(lambda: len(collected.spans) >= 17)
        text = client_metrics()
        assert 'daskserve_application_status{application="default"' in text
    spans = collected.spans
    assert {each.context.trace_id for each in spans} == {int(PARENT[3:35], 16)}
    assert all(each.context.trace_state.to_header() == "v=1" for each in spans)
    above = (
        "user code __call__ < replica Model.__call__ < route_to_replica Model < user code both < "
        "replica Middle.both < route_to_replica Middle < user code __call__ < replica Front < "
        "route_to_replica Front < GET /"
    )
    paths = sorted(path_of(each, spans) for each in spans if each.name.startswith(("matrix", "batched")))
    call = f"batched call Model.predict < {above}"
    assert paths == [call, call, f"matrix < batch Model.predict < {call}"]
    named = {each.name: each for each in spans}
    assert len(named["batch Model.predict"].links) == 2
    root = named["GET /"]
    assert root.parent is not None
    assert root.parent.span_id == int(PARENT[36:52], 16)
    assert root.attributes is not None
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["http.route"] == "/"
    assert str(root.attributes["user_agent.original"]).startswith("Python-urllib/")
    assert any((each.attributes or {}).get("of.user") == "yes" for each in spans)
    # The metrics have the same durations, with the trace as their exemplar.
    replica = named["replica Front"]
    seconds = (replica.end_time - replica.start_time) / 1e9
    [line] = [each for each in text.splitlines() if _is_bucket(each, "daskserve_replica_request", "Front")]
    assert abs(float(line.split("# ")[1].split()[1]) - seconds) < 0.02
    assert f'trace_id="{PARENT[3:35]}"' in line


def client_metrics() -> str:
    from prometheus_client import REGISTRY
    from prometheus_client.openmetrics.exposition import generate_latest

    return generate_latest(REGISTRY).decode()


def a_request_waits() -> bool:
    lines = client_metrics().splitlines()
    return any(
        each.startswith("daskserve_router_queued_requests{") and each.endswith(" 1.0") for each in lines
    )


def _is_bucket(line: str, name: str, deployment: str) -> bool:
    return (
        line.startswith(f"{name}_duration_seconds_bucket")
        and f'deployment="{deployment}"' in line
        and "# " in line
    )


@serve.deployment
async def echo(request: Any) -> dict[str, Any]:
    return {"trace": current_trace_id(), "context": serve.get_trace_context() is not None}


def test_a_trace_that_is_not_sampled_is_passed_on_and_makes_no_spans(collected: Collected) -> None:
    for config in (CONFIG, {**CONFIG, "enabled": False}, None):
        with local_instance(http_options={"port": 0}, tracing_config=config) as client:
            client.run(echo.bind())
            url = client.http_urls()[0]
            assert get(url, traceparent=UNSAMPLED) == {"trace": PARENT[3:35], "context": True}
    assert collected.spans == []


@serve.deployment(max_ongoing_requests=1)
class Slow:
    def __init__(self) -> None:
        self.ends = asyncio.Event()

    async def hold(self) -> None:
        await self.ends.wait()

    async def release(self) -> None:
        self.ends.set()

    async def free(self) -> None:
        raise KeyError("no")

    def plain(self) -> None:
        raise ValueError("no")


def test_a_call_of_a_program_begins_a_trace_and_an_error_has_its_type(collected: Collected) -> None:
    with local_instance(tracing_config=CONFIG) as client:
        handle = client.run(Slow.bind())
        first = handle.hold.remote()
        second = handle.free.remote()
        until(a_request_waits)
        first.cancel()
        with pytest.raises(KeyError) as raised:
            second.result(timeout_s=10)
        assert error_type(received_error(pack_all(raised.value).data)) == "KeyError", "as a router gets it"
        with pytest.raises(ValueError, match="no"):
            handle.plain.remote().result(timeout_s=10)
        until(
            lambda: (
                {
                    ("replica Slow.hold", "cancelled"),
                    ("replica Slow.free", "KeyError"),
                    ("user code free", "KeyError"),
                    ("replica Slow.plain", "ValueError"),
                    ("user code plain", "ValueError"),
                }
                <= {(each.name, (each.attributes or {}).get("error.type")) for each in collected.spans}
            )
        )


@serve.deployment(max_ongoing_requests=8)
class Caller:
    def __init__(self, slow: Any) -> None:
        self.slow = slow

    async def __call__(self, request: Any) -> int:
        await asyncio.gather(self.slow.hold.remote(), self.slow.hold.remote())
        return 1


def test_a_wait_says_for_what(collected: Collected) -> None:
    with local_instance(http_options={"port": 0}, tracing_config=CONFIG) as client:
        client.run(Caller.bind(Slow.bind()))
        with ThreadPoolExecutor() as pool:
            asking = pool.submit(get, client.http_urls()[0])
            until(a_request_waits)
            client.get_deployment_handle("Slow", "default").broadcast("release").results(timeout_s=10)
            assert asking.result() == 1
        until(lambda: any(each.name == "GET /" for each in collected.spans))
    waits = [each.attributes or {} for each in collected.spans if each.name == "queue"]
    assert any(
        each["daskserve.queue.ongoing"] == 1 and each["daskserve.queue.place"] == "router" for each in waits
    )


@each_case(
    ("host", "address"),
    [
        (b"shop.example.com", "shop.example.com"),
        (b"shop.example.com:80", "shop.example.com"),
        (b"[::1]", "::1"),
        (b"[::1]:8000", "::1"),
        (b"", "10.0.0.5"),
    ],
)
def test_the_address_of_the_server_is_the_host_that_the_client_names(host: bytes, address: str) -> None:
    tracing = Tracing("one", {"sampling_ratio": 1, **CONFIG}, {}, lambda *_: None, post_of)
    scope: Any = {"type": "http", "path": "/", "headers": [(b"host", host)], "server": ("10.0.0.5", 8000)}
    request = IngressRequest(scope["headers"], Response())
    begin_trace(tracing, request, scope)
    assert request.span is not None
    end_trace(tracing, request.span, request, scope)
    assert request.span.attributes["server.address"] == address
    assert request.span.attributes["server.port"] == 8000


def test_requests_do_not_notice_a_collector_that_hangs_and_the_counters_do(collected: Collected) -> None:
    collected.may_go_on.clear()
    tracing = Tracing("one", {"sampling_ratio": 1, **CONFIG}, {}, lambda path, option: collected, post_of)
    tracing.start()
    for _ in range(3 * MAX_PENDING):
        tracing.span("x", NO_PARENT, {}).end()
    until(lambda: not tracing.queue.pending)
    for _ in range(MAX_PENDING):
        tracing.span("x", NO_PARENT, {}).end()
    until(lambda: not tracing.queue.pending)
    samples = {name: value for name, _, value in tracing.samples()}
    assert samples["trace_spans"] == 4 * MAX_PENDING
    assert samples["trace_spans_dropped"] >= 2 * MAX_PENDING
    collected.fails = True
    collected.may_go_on.set()
    tracing.close()
    tracing.join(10)
    samples = {name: value for name, _, value in tracing.samples()}
    assert samples["trace_spans_failed"] + samples["trace_spans_dropped"] == 4 * MAX_PENDING


def test_the_code_that_ends_spans_exports_those_that_are_encoded_quickly(
    collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "GATHER_S", 60)  # the thread takes none
    monkeypatch.setattr(span_module, "BATCH", 2)
    tracing = Tracing("one", {"sampling_ratio": 1, **CONFIG}, {}, lambda path, option: collected, post_of)
    tracing.start()
    until(lambda: tracing.export is not None)
    slow, quick = tracing.span("slow", NO_PARENT, {}), tracing.span("quick", NO_PARENT, {})
    slow.add_event("waited")
    slow.end()
    quick.end()
    until(lambda: collected.spans)
    assert [each.name for each in collected.spans] == ["quick"]
    assert ("trace_spans", ("one",), 2) in tracing.samples()
    tracing.close()
    tracing.join(10)
    assert [each.name for each in collected.spans] == ["quick", "slow"]
    assert ("trace_spans", ("one",), 2) in tracing.samples()


def test_an_exporter_that_cannot_be_made_only_costs_the_spans(caplog: pytest.LogCaptureFixture) -> None:
    config = {"exporter_import_path": "no_such_module:f", "sampling_ratio": 1}
    with local_instance(http_options={"port": 0}, tracing_config=config) as client:
        client.run(echo.bind())
        assert get(client.http_urls()[0])["trace"]
        until(lambda: "no_such_module" in caplog.text)


@each_case(
    ("headers", "carrier"),
    [
        ([], None),
        ([("traceparent", PARENT)], [PARENT, "", ""]),
        ([("traceparent", PARENT), ("traceparent", PARENT)], None),
        ([("traceparent", "00-" + "0" * 32 + PARENT[35:])], None),
        ([("traceparent", PARENT.upper()), ("baggage", "a=1")], ["", "", "a=1"]),
        ([("traceparent", "ff" + PARENT[2:])], None),
        ([("traceparent", PARENT + "-more")], None),
        ([("traceparent", "01" + PARENT[2:] + "-more")], [PARENT, "", ""]),
        ([("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")], [PARENT, "a=1,b=2", ""]),
        ([("traceparent", PARENT), ("tracestate", "a" * 600)], [PARENT, "", ""]),
        ([("traceparent", PARENT), ("tracestate", "a=1,A=2")], [PARENT, "", ""]),
        ([("traceparent", PARENT), ("tracestate", "a=1, ,a=2")], [PARENT, "", ""]),
        ([("baggage", "a=1;b;c=2 , bad,=3,d=\\,e = 5, f=%20")], ["", "", "a=1;b;c=2,e = 5,f=%20"]),
        ([("baggage", "," * 8000)], None),
        ([("baggage", "a=" + " " * 8000 + "\x01")], None),
        ([("baggage", "a" * 9000)], None),
        ([("baggage", "a\xff")], None),
    ],
)
def test_headers_are_read_strictly(headers: list[tuple[str, str]], carrier: list[str] | None) -> None:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    assert read_headers(encoded) == carrier


def test_a_traceparent_is_the_text_of_a_parent() -> None:
    assert traceparent(parse_parent(PARENT)) == PARENT
    assert traceparent(NO_PARENT) == ""


def test_a_histogram_keeps_one_example_of_each_bucket() -> None:
    histogram = LatencyHistogram()
    for value in (0.3, 0.4, 2.0):
        histogram.observe(value)
        histogram.note_trace(value, SimpleNamespace(ids="7-8"))
    assert histogram.examples is not None
    assert sorted(value for value, _, _ in histogram.examples.values()) == [0.4, 2.0]
