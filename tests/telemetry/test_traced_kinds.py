"""The spans of each kind of request, and the waits of slow requests as their traces show them."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from collected_spans import CONFIG, Collected, collected, path_of, until
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link, SpanContext, Status, StatusCode

import daskserve as serve
from daskserve.errors import ActorLostError, ReplicaBusyError, RequestTimeoutError
from daskserve.internals.otlp_exporter import post_of
from daskserve.telemetry.tracing.carrier import NO_PARENT, TRACE
from daskserve.telemetry.tracing.process import KEY, Tracing
from daskserve.telemetry.tracing.routing import start_routing_span
from daskserve.telemetry.tracing.span import MAX_ATTRIBUTES, MAX_EVENTS, MAX_PENDING, RecordedSpan
from daskserve.telemetry.tracing.user import UserTracer, UserTracerProvider
from daskserve.testing import local_instance

__all__ = ["collected"]


def named(found: Collected, name: str) -> Any:
    """Return the only span of a name."""
    until(lambda: any(each.name == name for each in found.spans))
    (span,) = [each for each in found.spans if each.name == name]
    return span


BEGAN, MAY_END = threading.Event(), threading.Event()


@serve.deployment
class Streams:
    def numbers(self) -> Any:
        async def items() -> Any:
            for each in range(3):
                with trace.get_tracer("mine").start_as_current_span(f"item {each}"):
                    yield each

        return items()  # from a thread, so the items are a second step

    def stopped(self) -> Any:
        async def items() -> Any:
            yield 1
            await asyncio.Event().wait()

        return items()

    def lingers(self) -> Any:
        async def items() -> Any:
            yield 1
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.1)
                self.ended_at = time.time_ns()

        return items()

    def late(self) -> Any:
        BEGAN.set()
        MAY_END.wait(10)
        return self.numbers()

    async def ended(self) -> int:
        return self.ended_at


def test_a_stream_has_one_span_of_user_code_to_its_end(collected: Collected) -> None:
    with local_instance(tracing_config=CONFIG) as client:
        handle = client.run(Streams.bind()).options(stream=True)
        assert list(handle.numbers.remote()) == [0, 1, 2]
        code = named(collected, "user code numbers")
        last = named(collected, "item 2")
        assert last.parent.span_id == code.context.span_id
        assert code.end_time >= last.end_time
        until(lambda: any(each.name == "replica Streams.numbers" for each in collected.spans))
        stream = handle.stopped.remote()
        assert next(iter(stream)) == 1
        stream.cancel()
        assert named(collected, "user code stopped").end_time
        stream = handle.lingers.remote()
        assert next(iter(stream)) == 1
        stream.cancel()
        stream = handle.late.remote()
        assert BEGAN.wait(10)
        stream.cancel()
        named(collected, "replica Streams.late")
        MAY_END.set()
        assert named(collected, "user code late").end_time, "although its next step never begins"
        lingering = named(collected, "user code lingers")
        assert lingering.end_time >= client.get_handle("Streams").ended.remote().result(timeout_s=10)
    assert Counter(each.name for each in collected.spans)["user code numbers"] == 1


@serve.deployment(num_replicas=2, max_ongoing_requests=1)
class Pair:
    async def hello(self) -> int:
        return 1


@serve.deployment
class Caller:
    def __init__(self, pair: Any) -> None:
        self.pair = pair

    async def __call__(self) -> list[int]:
        return await self.pair.broadcast("hello").results_async()  # type: ignore[no-any-return]


def test_a_broadcast_has_a_span_at_each_replica_under_the_code_that_calls(collected: Collected) -> None:
    with local_instance(tracing_config=CONFIG) as client:
        assert client.run(Caller.bind(Pair.bind())).remote().result(timeout_s=10) == [1, 1]
        until(lambda: any(each.name == "route_to_replica Caller.__call__" for each in collected.spans))
        spans = collected.spans
    replicas = [each for each in spans if each.name == "replica Pair.hello"]
    assert len({each.attributes["daskserve.replica"] for each in replicas if each.attributes}) == 2
    assert all("< user code __call__ < replica Caller.__call__" in path_of(each, spans) for each in replicas)


@serve.deployment(max_ongoing_requests=4)
class Models:
    def __init__(self) -> None:
        self.may_load = asyncio.Event()

    @serve.multiplexed(max_num_models_per_replica=2)
    async def load(self, model_id: str) -> str:
        await self.may_load.wait()
        return model_id

    async def ask(self) -> str:
        return await self.load("m")  # type: ignore[no-any-return]

    async def release(self) -> None:
        self.may_load.set()


def test_a_wait_for_a_model_has_a_span_that_says_what_loads(collected: Collected) -> None:
    with local_instance(tracing_config=CONFIG) as client:
        handle = client.run(Models.bind())
        asked = [handle.ask.remote() for _ in range(2)]
        handle.release.remote().result(timeout_s=10)
        assert [each.result(timeout_s=10) for each in asked] == ["m", "m"]
        until(lambda: sum(each.name == "replica Models.ask" for each in collected.spans) == 2)
        waits = [each for each in collected.spans if each.name.startswith("model of ")]
    assert sorted(each.attributes["daskserve.queue.waiting_before"] for each in waits) == [0, 1]
    assert {each.attributes["daskserve.model"] for each in waits} == {"m"}
    assert path_of(waits[0], collected.spans).split(" < ")[1] == "user code ask"


@serve.deployment(max_ongoing_requests=8)
class Batched:
    @serve.batch(max_batch_size=3, batch_wait_timeout_s=5)
    async def together(self, values: list[int]) -> list[int]:
        return values

    async def __call__(self) -> list[int]:
        return await asyncio.gather(*map(self.together, range(3)))


def test_a_call_of_a_batch_says_how_many_were_before_it(collected: Collected) -> None:
    with local_instance(tracing_config=CONFIG) as client:
        assert client.run(Batched.bind()).remote().result(timeout_s=10) == [0, 1, 2]
        named(collected, "replica Batched.__call__")
    calls = [each for each in collected.spans if each.name == "batched call Batched.together"]
    before = sorted((each.start_time, each.attributes["daskserve.queue.waiting_before"]) for each in calls)
    assert [number for _, number in before] == [0, 1, 2]
    assert {each.name for each in calls[0].events} == {"batch begins"}
    assert len(named(collected, "batch Batched.together").links) == 3


@serve.accept_batch
def sizes(requests: list[Any]) -> list[int]:
    return [len(requests) for _ in requests]


@pytest.mark.parametrize("way", ["handle", "HTTP"])
def test_a_batch_of_requests_has_a_span_that_links_to_each(way: str, collected: Collected) -> None:
    with local_instance(tracing_config=CONFIG, http_options={"port": 0}) as client:
        client.create_backend("sizes", sizes, config={"max_batch_size": 2, "batch_wait_timeout": 5})
        client.create_endpoint("sizes", backend="sizes", route="/sizes")
        if way == "handle":
            handle = client.get_handle("sizes")
            asked = [handle.remote(), handle.remote()]
            assert [each.result(timeout_s=10) for each in asked] == [2, 2]
        else:
            url = f"{client.http_urls()[0]}/sizes"
            with ThreadPoolExecutor() as pool:
                answers = pool.map(lambda _: urllib.request.urlopen(url, timeout=10).read(), range(2))
                assert list(answers) == [b"2", b"2"]
        batch = named(collected, "batch __call__")
        until(lambda: sum(each.name.startswith("replica ") for each in collected.spans) == 2)
    calls = [each for each in collected.spans if each.name == "batched call __call__"]
    assert {each.context.span_id for each in batch.links} == {each.context.span_id for each in calls}
    assert len(calls) == 2
    assert path_of(calls[0], collected.spans).split(" < ")[1].startswith("replica sizes")


def test_a_call_that_leaves_before_its_batch_runs_ends_its_span(collected: Collected) -> None:
    with local_instance(tracing_config=CONFIG) as client:
        client.create_backend("sizes", sizes, config={"max_batch_size": 2, "batch_wait_timeout": 60})
        client.create_endpoint("sizes", backend="sizes")
        app = client.run(Batched.bind())
        for call in (
            client.get_handle("sizes").options(timeout_s=0.1).remote(),
            app.together.options(timeout_s=0.1).remote(1),
        ):
            with pytest.raises(RequestTimeoutError):
                call.result()
        for name in ("__call__", "Batched.together"):
            assert not named(collected, f"batched call {name}").links


def echo(request: Any) -> int:
    return 1


def test_the_copy_of_a_request_for_a_shadow_is_in_its_trace(collected: Collected) -> None:
    with local_instance(tracing_config=CONFIG, http_options={"port": 0}) as client:
        for name in ("one", "two"):
            client.create_backend(name, echo)
        client.create_endpoint("e", backend="one", route="/e")
        client.shadow_traffic("e", "two", 1.0)
        with urllib.request.urlopen(f"{client.http_urls()[0]}/e", timeout=10) as answer:
            assert answer.read() == b"1"
        one, two = named(collected, "replica one"), named(collected, "replica two")
        assert one.context.trace_id == two.context.trace_id
        root = named(collected, "GET /e")
    ways = {path_of(each, collected.spans) for each in (one, two)}
    assert ways == {f"replica {name} < route_to_replica {name} < {root.name}" for name in ("one", "two")}


@serve.deployment(max_ongoing_requests=2)
class Blocking:
    def __init__(self) -> None:
        self.is_blocked, self.may_end = threading.Event(), threading.Event()

    async def block(self) -> None:
        self.is_blocked.set()
        self.may_end.wait(0.05)

    async def quick(self) -> int:
        return 1


def test_a_wait_for_a_blocked_event_loop_is_an_event_that_names_it(collected: Collected) -> None:
    with local_instance(tracing_config=CONFIG) as client:
        handle = client.run(Blocking.bind())
        blocking, quick = handle.block.remote(), handle.quick.remote()
        assert (blocking.result(timeout_s=10), quick.result(timeout_s=10)) == (None, 1)
        events = named(collected, "user code quick").events
    assert [each.name for each in events] == ["waited"]
    assert events[0].attributes["daskserve.wait.for"] == "an event loop that other code blocks"
    assert events[0].attributes["daskserve.replica.ongoing"] == 2


@pytest.fixture
def tracing() -> tuple[Tracing, Any]:
    made = Tracing("i", {"sampling_ratio": 1, "exporter_import_path": ""}, {}, lambda *_: None, post_of)
    return made, made.queue.pending


def test_each_refusal_of_a_request_is_an_event_of_its_way(tracing: tuple[Tracing, Any]) -> None:
    made, kept = tracing
    head = {TRACE: [made.span("root", NO_PARENT, {}).traceparent, "", ""], "method": "", "type": "http"}
    way = start_routing_span({KEY: made}, head, "b")
    assert way is not None
    errors = [ReplicaBusyError("full", ongoing=3), ActorLostError("lost")]
    for number, error in enumerate(errors):
        way.sent(f"b#{number}", "tcp://w", is_queued=False)
        way.refused(error, f"b#{number}")
    way.sent("b#2", "tcp://w", is_queued=True)
    way.finish(None)
    (span,) = kept
    assert [(name, facts["daskserve.replica"]) for name, facts, _ in span.events] == [
        ("retry", "b#0"),
        ("retry", "b#1"),
        ("queued at a full replica", "b#2"),
    ]
    assert (span.attributes["daskserve.retries"], span.attributes["daskserve.replica"]) == (2, "b#2")


def test_the_end_of_a_way_has_the_error_of_its_request(tracing: tuple[Tracing, Any]) -> None:
    made, kept = tracing
    root = made.span("root", NO_PARENT, {})
    for carrier in ([root.traceparent, "a=b", "c=d"], ["new", "", "", 5]):
        way = start_routing_span({KEY: made}, {TRACE: carrier, "method": "ask"}, "b")
        assert way is not None
        way.sent("b#1", "tcp://w", is_queued=False)
        way.finish(KeyError("no"))
    under, new = kept
    assert (under.trace_id, under.tracestate, under.attributes["error.type"]) == (
        root.trace_id,
        "a=b",
        "KeyError",
    )
    assert (under.status, "daskserve.retries" in under.attributes) == ((StatusCode.ERROR, "KeyError"), False)
    assert (new.trace_id != root.trace_id, new.start_ns) == (True, 5)
    for carrier in ([root.traceparent[:-1] + "0", "", ""], ["", "", ""]):
        assert start_routing_span({KEY: made}, {TRACE: carrier}, "b") is None, carrier


async def test_a_wait_in_a_router_has_a_span_with_the_reason_and_its_end(
    tracing: tuple[Tracing, Any],
) -> None:
    made, kept = tracing
    way = start_routing_span(
        {KEY: made}, {TRACE: [made.span("root", NO_PARENT, {}).traceparent, "", ""]}, "b"
    )
    assert way is not None

    async def turn() -> int:
        return 1

    async def never() -> int:
        raise ReplicaBusyError("full", ongoing=1)

    assert await way.wait(turn(), waiting=2, ongoing=3, replicas=4, is_known=True) == 1
    assert await way.wait(turn(), waiting=0, ongoing=0, replicas=0, is_known=True) == 1
    with pytest.raises(ReplicaBusyError):
        await way.wait(never(), waiting=0, ongoing=0, replicas=0, is_known=False)
    assert [each.attributes["daskserve.queue.reason"] for each in kept] == [
        "every replica is full",
        "no replica runs",
        "the replicas are not known yet",
    ]
    names = ("waiting_before", "ongoing", "replicas")
    assert [kept[0].attributes[f"daskserve.queue.{each}"] for each in names] == [2, 3, 4]
    assert [each.status[0] for each in kept] == [StatusCode.UNSET, StatusCode.UNSET, StatusCode.ERROR]


def test_the_spans_of_a_program_that_traces_itself_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found, provider = Collected(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    head = {TRACE: [PARENT, "", "a=b"], "method": "ask"}
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    assert start_routing_span({}, head, "b") is None, "a program that does not trace"
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    assert start_routing_span({}, {**head, TRACE: [PARENT[:-1] + "0", "", ""]}, "b") is None, "not sampled"
    way = start_routing_span({}, head, "b")
    assert way is not None
    assert (way.carrier[0][3:35], way.carrier[0] != PARENT, way.carrier[2]) == (PARENT[3:35], True, "a=b")

    async def turn() -> int:
        return 1

    assert asyncio.run(way.wait(turn(), waiting=0, ongoing=0, replicas=1, is_known=True)) == 1
    way.sent("b#1", "tcp://w", is_queued=False)
    way.refused(ReplicaBusyError("full", ongoing=1), "b#1")
    way.sent("b#2", "tcp://w", is_queued=True)
    way.finish(ActorLostError("lost"))
    queue, whole = found.spans
    assert queue.parent is not None
    assert queue.parent.span_id == int(way.carrier[0][36:52], 16)
    assert whole.attributes is not None
    assert (whole.attributes["daskserve.replica"], whole.attributes["error.type"]) == (
        "b#2",
        "daskserve.errors.ActorLostError",
    )
    assert [each.name for each in whole.events] == ["retry", "queued at a full replica"]


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_span_has_the_interface_of_opentelemetry(
    tracing: tuple[Tracing, Any], caplog: pytest.LogCaptureFixture
) -> None:
    made, kept = tracing
    span = made.span("root", NO_PARENT, {"a": 1})
    assert span.is_recording()
    span.update_name("other")
    span.set_attributes({"a": 2, "list": [1, "b"], "b": 2.5, "bad": object()})
    assert "Attribute 'bad' of a span has a value of type" in caplog.text
    span.add_event("event", {"x": 1}, 7)
    span.record_exception(KeyError("no"), {"y": 2}, 8)
    context = SpanContext(1, 2, is_remote=True)
    span.add_link(context, {"z": 3})
    span.add_link(SpanContext(0, 0, is_remote=True))
    span.set_status(Status(StatusCode.ERROR, "why"))
    assert span.status == (StatusCode.ERROR, "why")
    span.set_status(StatusCode.UNSET)
    assert span.status == (StatusCode.ERROR, "why")
    span.set_status(StatusCode.OK, "of no use")
    span.set_status(StatusCode.ERROR, "too late")
    assert span.status == (StatusCode.OK, "")
    span.start_ns = 10
    span.end(20)
    assert (span.end_ns, list(kept)) == (20, [span])
    span.end(30)
    span.update_name("late")
    span.set_attributes({"late": 1})
    span.add_event("late")
    span.add_link(context)
    span.fail("late")
    assert (span.is_recording(), span.end_ns, len(kept), span.name) == (False, 20, 1, "other")
    assert span.attributes == {"a": 2, "list": (1, "b"), "b": 2.5}
    assert span.events == [
        ("event", {"x": 1}, 7),
        ("exception", {"exception.type": "KeyError", "exception.message": "'no'", "y": 2}, 8),
    ]
    assert [each.context for each in span.links] == [context]
    assert span.status == (StatusCode.OK, "")


def test_a_span_is_bounded_and_ends_no_earlier_than_it_began(tracing: tuple[Tracing, Any]) -> None:
    made, kept = tracing
    span = made.span("root", NO_PARENT, {})
    for number in range(MAX_EVENTS + 1):
        span.add_event(str(number))
        span.add_link(SpanContext(1, 2, is_remote=True))
    span.set_attributes({str(number): number for number in range(MAX_ATTRIBUTES + 1)})
    span.set_attribute("0", "again")
    span.set_attribute("more", 1)
    assert (len(span.events), len(span.links), len(span.attributes)) == (
        MAX_EVENTS,
        MAX_EVENTS,
        MAX_ATTRIBUTES,
    )
    assert (span.attributes["0"], "more" in span.attributes) == ("again", False)
    span.end(span.start_ns - 5)
    assert span.end_ns == span.start_ns
    kept.extend(kept[0] for _ in range(MAX_PENDING - 1))
    made.span("one too many", NO_PARENT, {}).end()
    assert (len(kept), made.queue.dropped) == (MAX_PENDING, 1)
    kept.clear()
    made.queue.is_closed = True
    made.span("too late", NO_PARENT, {}).end()
    assert (len(kept), made.queue.dropped) == (0, 2)


def test_a_block_that_raises_ends_its_span_with_the_error(tracing: tuple[Tracing, Any]) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    made, kept = tracing
    with made.span("fine", NO_PARENT, {}):
        pass
    for error in (Odd(), ValueError("x" * 2000)):
        with pytest.raises(type(error)), made.span("failed", NO_PARENT, {}):
            raise error
    fine, odd, long = kept
    assert (fine.status[0], list(fine.events)) == (StatusCode.UNSET, [])
    assert odd.events[0][1]["exception.message"] == ""
    assert long.events[0][1] == {"exception.type": "ValueError", "exception.message": "x" * 1024}
    assert (long.status, long.attributes["error.type"]) == ((StatusCode.ERROR, "ValueError"), "ValueError")


async def test_the_tracers_of_user_code_begin_spans_below_those_of_requests_only(
    tracing: tuple[Tracing, Any],
) -> None:
    made, kept = tracing
    provider = UserTracerProvider()
    tracer = provider.get_tracer("mine")
    root = made.span("root", NO_PARENT, {})
    root.tracestate = "a=b"
    assert not tracer.start_span("of nobody").get_span_context().is_valid
    below = trace.set_span_in_context(root)
    link = Link(SpanContext(1, 2, is_remote=True), {"c": 1})
    span = tracer.start_span("one", below, attributes={"d": 2}, links=[link], start_time=5)
    assert isinstance(span, RecordedSpan)
    assert (span.trace_id, span.tracestate, span.start_ns) == (root.trace_id, "a=b", 5)
    assert span.attributes == {"otel.scope.name": "mine", "d": 2}
    assert [(each.context.trace_id, each.attributes) for each in span.links] == [(1, {"c": 1})]
    remote = trace.NonRecordingSpan(SpanContext(7, 8, True, trace.TraceFlags(1)))
    assert not tracer.start_span("no instance", trace.set_span_in_context(remote)).is_recording()
    provider.add(made.queue)
    assert tracer.start_span("the latest instance", trace.set_span_in_context(remote)).is_recording()
    unsampled = trace.NonRecordingSpan(SpanContext(7, 8, True))
    assert not tracer.start_span("not sampled", trace.set_span_in_context(unsampled)).is_recording()
    made.queue.is_closed = True
    assert not tracer.start_span("an ended instance", trace.set_span_in_context(remote)).is_recording()
    made.queue.is_closed = False

    @tracer.start_as_current_span("plain", below)
    def plain(value: int) -> int:
        return value + trace.get_current_span().is_recording()

    @tracer.start_as_current_span("asynchronous", below)
    async def asynchronous(value: int) -> int:
        await asyncio.sleep(0)
        return value + trace.get_current_span().is_recording()

    kept.clear()
    assert (plain(1), await asynchronous(2), plain(3)) == (2, 3, 4)
    with pytest.raises(KeyError), tracer.start_as_current_span("failed", below):
        raise KeyError("no")
    with tracer.start_as_current_span("open", below, end_on_exit=False) as left:
        pass
    assert [each.name for each in kept] == ["plain", "asynchronous", "plain", "failed"]
    assert (kept[3].status[0], [each[0] for each in kept[3].events]) == (StatusCode.ERROR, ["exception"])
    assert left.is_recording()
    with (
        pytest.raises(KeyError),
        tracer.start_as_current_span("quiet", below, record_exception=False, set_status_on_exception=False),
    ):
        raise KeyError("no")
    assert (kept[4].status[0], list(kept[4].events)) == (StatusCode.UNSET, [])
    for name in ("start_span", "start_as_current_span"):
        theirs = inspect.signature(getattr(trace.Tracer, name)).parameters
        for parameter in inspect.signature(getattr(UserTracer, name)).parameters.values():
            assert parameter.default == theirs[parameter.name].default, parameter.name


@serve.deployment
class Failing:
    async def __call__(self, request: Any) -> Any:
        if request.query_params.get("raises"):
            raise KeyError("no")
        return "fine"


def test_the_span_of_a_request_says_how_it_has_failed(collected: Collected) -> None:
    with local_instance(tracing_config=CONFIG, http_options={"port": 0}) as client:
        client.run(Failing.bind())
        (url,) = client.http_urls()
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.status == 200
        fine = named(collected, "GET /")
        assert (fine.status.status_code, "error.type" in fine.attributes) == (StatusCode.UNSET, False)
        collected.spans.clear()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}?raises=1", timeout=10)
        failed = named(collected, "GET /")
        assert failed.attributes["http.response.status_code"] == 500
        assert (failed.status.status_code, failed.attributes["error.type"]) == (
            StatusCode.ERROR,
            "500",
        )
        collected.spans.clear()
        with urllib.request.urlopen(urllib.request.Request(url, method="BREW"), timeout=10) as answer:
            assert answer.status == 200
        odd = named(collected, "HTTP /")
        method = [odd.attributes[f"http.request.{each}"] for each in ("method", "method_original")]
        assert method == ["_OTHER", "BREW"]
