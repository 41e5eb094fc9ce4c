"""``batch`` in replicas, called over HTTP, by handle and from inside the class."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import daskserve as serve
from daskserve.testing import local_instance

DEADLINE_S = 10.0
LONG_S = 60.0


class Model:
    """All methods are batched. The wait is so long that a batch that is not full makes the test fail."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def reconfigure(self, max_batch_size: int) -> None:
        self.double.set_max_batch_size(max_batch_size)
        self.double.set_batch_wait_timeout_s(LONG_S)

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    async def double(self, numbers: list[int]) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        return [ValueError(f"no {n}") if n < 0 else [2 * n, len(numbers)] for n in numbers]

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    async def __call__(self, requests: list[Any]) -> list[Any]:
        bodies = [await request.body() for request in requests]
        return [[body.decode(), len(requests)] if body != b"bad" else KeyError() for body in bodies]

    async def by_self(self, number: int) -> Any:
        return await self.double(number)


class Counting:
    """Streams the items of a batch of generators over HTTP."""

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def count_to(self, numbers: list[int]) -> AsyncIterator[list[Any]]:
        for n in range(max(numbers)):
            yield [f"{n} of {each};" if n < each else StopIteration for each in numbers]

    async def __call__(self, request: Any) -> Any:
        return self.count_to(int(request.query_params["n"]))


@pytest.fixture(scope="module")
def client() -> Iterator[serve.Client]:
    with local_instance(http_options={"port": 0}) as client:
        yield client


@pytest.fixture(params=["own", "worker"])
def event_loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def deploy(client: serve.Client, name: str, definition: Any, **config: Any) -> serve.Handle:
    client.deploy(name, definition, config=config)
    return client.get_handle(name)


def at_once(function: Callable[..., Any], *argument_lists: Any) -> list[Any]:
    with ThreadPoolExecutor(len(argument_lists)) as threads:
        return [
            future.result(DEADLINE_S) for future in [threads.submit(function, *a) for a in argument_lists]
        ]


def fetch(url: str, body: bytes | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=DEADLINE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_calls_by_handle_and_from_inside_share_a_batch(client: serve.Client, event_loop: str) -> None:
    handle = deploy(client, "model", Model, event_loop=event_loop)
    responses = [handle.double.remote(1), handle.by_self.remote(2), handle.double.remote(-3)]
    assert [each.result(DEADLINE_S) for each in responses[:2]] == [[2, 3], [4, 3]]
    with pytest.raises(ValueError, match="no -3"):
        responses[2].result(DEADLINE_S)


def test_http_requests_are_batched_and_fail_one_by_one(client: serve.Client, event_loop: str) -> None:
    deploy(client, "model", Model, event_loop=event_loop)
    (url,) = client.http_urls()
    bodies = [b"a", b"bad", b"c"]
    replies = at_once(fetch, *((f"{url}/model", body) for body in bodies))
    assert [status for status, _ in replies] == [200, 500, 200]
    assert [json.loads(text) for _, text in replies[::2]] == [["a", 3], ["c", 3]]
    assert replies[1][1] == "Internal Server Error"


def test_batches_of_generators_are_streamed_over_http(client: serve.Client, event_loop: str) -> None:
    deploy(client, "counting", Counting, event_loop=event_loop)
    (url,) = client.http_urls()
    replies = at_once(fetch, (f"{url}/counting?n=3",), (f"{url}/counting?n=1",))
    assert replies == [(200, "0 of 3;1 of 3;2 of 3;"), (200, "0 of 1;")]


def test_reconfigure_changes_the_limits_of_its_replica(client: serve.Client) -> None:
    # A call that waits for its batch counts as running: the change waits for it as long as a stop does.
    handle = deploy(client, "model", Model, user_config=2, graceful_shutdown_timeout_s=0.1)
    assert handle.double._python_methods == handle._python_methods
    responses = [handle.double.remote(n) for n in range(2)]
    assert [each.result(DEADLINE_S) for each in responses] == [[0, 2], [2, 2]]
    response = handle.double.remote(5)
    client.update_backend_config("model", {"user_config": 1})
    assert response.result(DEADLINE_S) == [10, 1]


@serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
async def lengths(requests: list[Any]) -> list[Any]:
    return [[request.data, len(requests)] for request in requests]


def test_a_function_can_be_a_backend(client: serve.Client, event_loop: str) -> None:
    tag = f"lengths-{event_loop}"
    client.create_backend(tag, lengths, config={"event_loop": event_loop})
    client.create_endpoint(tag, backend=tag)
    assert client.get_backend_config(tag).max_concurrent_queries == 100  # it is async
    handle = client.get_handle(tag)
    responses = [handle.remote(n) for n in range(2)]
    assert [each.result(DEADLINE_S) for each in responses] == [[0, 2], [1, 2]]
