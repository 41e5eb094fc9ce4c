"""Continuous batches in deployments: over HTTP and by handle, and their metrics."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

import daskserve as serve
from daskserve.common.types import Load
from daskserve.data.caller.calls.resuming import resume_stream
from daskserve.errors import ActorLostError, BackPressureError, DeploymentUnavailableError
from daskserve.testing import local_instance, run_virtual, wait_until


class Plain:
    """Yields the numbers up to a count; with a count of 0, it waits until the test lets it continue."""

    models: list[Plain]

    def __init__(self) -> None:
        self.go = threading.Event()
        self.released: list[int] = []
        self.made = 0
        self.metrics = serve.get_replica_context().metrics
        type(self).models = [self]

    @serve.batching.continuous_batch(max_slots=4, max_queued=4, cost_fn=len)
    def generate(self, active: list[serve.batching.ActiveRequest]) -> list[Any]:
        if active[0].args[0] == [0]:
            self.go.wait(20)
        time.sleep(0.001)
        for each in active:
            if len(each.outputs) + 1 >= len(each.args[0]) or self.go.is_set():
                each.finish()
        return [each.args[0][len(each.outputs)] for each in active]

    @generate.release
    def _release(self, left: list[serve.batching.ActiveRequest]) -> None:
        self.released += [len(each.args[0]) for each in left]
        self.made = sum(len(each.outputs) for each in left)

    async def __call__(self, request: Any) -> Any:
        numbers = [int(each) for each in request.query_params["numbers"].split(",")]
        if "stream" in request.query_params:
            return self.text(numbers)
        return [each async for each in self.generate(numbers)]

    async def text(self, numbers: list[int]) -> AsyncIterator[str]:
        async for each in self.generate(numbers):
            yield f"{each}\n"


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    with local_instance(http_options={"port": 0}) as client:
        client.run(serve.deployment(Plain, max_ongoing_requests=50).bind())
        yield client
    # The thread of its steps ends with the replica's object.
    Plain.models = []
    gc.collect()
    asyncio.run(wait_until(lambda: "daskserve-steps" not in [each.name for each in threading.enumerate()]))


def test_clients_of_all_kinds_share_the_slots(client: serve.Client) -> None:
    (url,) = client.http_urls()
    handle = client.get_app_handle("default").options(stream=True)

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            whole = [http.get("/?numbers=1,2,3") for _ in range(3)]
            streamed = [http.get("/?numbers=4,5&stream") for _ in range(3)]
            return [each.text for each in await asyncio.gather(*whole, *streamed)]

    streams = [handle.generate.remote(list(range(1, n))) for n in (3, 5)]
    assert asyncio.run(ask()) == ["[1,2,3]"] * 3 + ["4\n5\n"] * 3
    assert [list(each) for each in streams] == [[1, 2], [1, 2, 3, 4]]


def test_a_full_batch_answers_503_and_is_counted(client: serve.Client) -> None:
    (url,) = client.http_urls()
    handle = client.get_app_handle("default").options(stream=True)
    (model,) = Plain.models
    generate: Any = model.generate
    model.released.clear()
    first = handle.generate.remote([0])
    asyncio.run(wait_until(lambda: generate.stats().active == 1))
    others = [handle.generate.remote([1] * 10) for _ in range(7)]
    asyncio.run(wait_until(lambda: generate.stats().queued == 7))
    assert httpx.get(url, params={"numbers": "1"}).status_code == 503
    with pytest.raises(BackPressureError, match=r"\(max_queued\)"):
        list(handle.generate.remote([1]))
    assert model.metrics is not None
    states = model.metrics.states(
        ("i", "d", "r"),
        load=Load(0, 0),
        concurrency=50,
        abandoned=0,
        loop_blocks=0,
        probe_failures=0,
        is_healthy=True,
    )
    values = {name: value for name, _, value in states}
    assert values["continuous_active_requests"] == 1
    assert values["continuous_queued_requests"] == values["replica_queued_requests"] == 7
    assert values["continuous_queued_cost"] == 70
    brief = model.metrics.brief(lambda: Load(0, 0), lambda: {"custom": {"mine": 5.0}})
    own = {"continuous_queued_requests": 7, "continuous_queued_cost": 70.0}
    assert brief["custom"] == {**own, "mine": 5.0}
    load = {
        "active": 1,
        "slots": 4,
        "queued": 7,
        "queued_cost": 70.0,
    }
    assert brief["continuous"] == {**load, "outputs": generate.stats().outputs}
    others[0].cancel()
    asyncio.run(wait_until(lambda: generate.stats().queued == 6))
    model.go.set()
    for each in (first, *others[1:]):
        list(each)
    asyncio.run(wait_until(lambda: generate.stats().active == 0))
    assert sorted(model.released) == [1] + [10] * 6
    totals = {name: value for name, _, value in model.metrics.samples(("i", "d", "r"))}
    assert totals["continuous_outputs"] == generate.stats().outputs
    assert totals["continuous_preemptions"] == 0
    assert totals["continuous_step_duration_seconds"].count == generate.stats().steps


def test_a_client_that_disconnects_leaves_the_batch(client: serve.Client) -> None:
    (url,) = client.http_urls()
    (model,) = Plain.models
    model.go.clear()
    model.released.clear()
    generate: Any = model.generate
    numbers = ",".join(["1"] * 500)
    with httpx.Client(timeout=30) as http, http.stream("GET", f"{url}/?numbers={numbers}&stream") as response:
        assert next(response.iter_text())[:2] == "1\n"
    asyncio.run(wait_until(lambda: model.released == [500]))
    assert model.made < 500
    assert generate.stats().active == 0


# ---- resumed streams


class Losing:
    """Replaces the handle of a stream; each of its replicas is lost after two outputs."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls: list[Any] = []

    def options(self, *, stream: bool) -> Losing:
        return self

    def remote(self, count: int, resume_from: Any = ()) -> Any:
        self.calls.append(list(resume_from))
        outer = self

        class Stream:
            def cancel(self) -> None:
                outer.calls.append("cancelled")

            async def __aiter__(self) -> AsyncIterator[int]:
                for number in range(len(resume_from), count):
                    if number == len(resume_from) + 2:
                        raise outer.error
                    yield number

        return Stream()


def test_a_stream_continues_at_another_replica() -> None:
    async def main() -> None:
        handle: Any = Losing(ActorLostError("its worker died"))
        assert [each async for each in resume_stream(handle, 5)] == [0, 1, 2, 3, 4]
        assert handle.calls == [[], "cancelled", [0, 1], "cancelled", [0, 1, 2, 3], "cancelled"]
        read = []
        for error, most, expected in (
            (ActorLostError("lost"), 1, 4),
            (DeploymentUnavailableError("gone"), 9, 2),
            (ValueError("bad"), 9, 2),
        ):
            read.clear()
            handle = Losing(error)
            with suppress(type(error)):
                async for each in resume_stream(handle, 9, max_resumes=most):
                    read.append(each)
                raise AssertionError
            assert len(read) == expected

    run_virtual(main)
