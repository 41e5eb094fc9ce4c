"""The spans of each kind of request, and what a slow one waited for, told by its trace alone."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from collected_spans import CONFIG, Collected, collected, path_of, until
from opentelemetry import trace

import daskserve as serve
from daskserve.errors import ActorLostError, ReplicaBusyError, RequestTimeoutError
from daskserve.internals.otlp_exporter import post_of
from daskserve.telemetry.tracing.carrier import NO_PARENT, TRACE
from daskserve.telemetry.tracing.process import KEY, Tracing
from daskserve.telemetry.tracing.routing import way_of
from daskserve.testing import local_instance

__all__ = ["collected"]


def named(found: Collected, name: str) -> Any:
    """Return the one span of a name."""
    until(lambda: any(each.name == name for each in found.spans))
    (span,) = [each for each in found.spans if each.name == name]
    return span


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
    return made, made.pending


def test_each_refusal_of_a_request_is_an_event_of_its_way(tracing: tuple[Tracing, Any]) -> None:
    made, kept = tracing
    head = {TRACE: [made.span("root", NO_PARENT, {}).traceparent, "", ""], "method": "", "type": "http"}
    way = way_of({KEY: made}, head, "b")
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
