"""The awaitable form of every verb, on the event loop of an in-process cluster and on another one."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

import daskserve as serve
from daskserve.client.client import AsyncClient, Client
from daskserve.client.instance.connection import InstanceConnection
from daskserve.errors import (
    BlockingCallError,
    ClosedError,
    NotFoundError,
    NotRegisteredError,
    ServeError,
)
from daskserve.loops.blocking import finish
from daskserve.testing import local_instance, local_instance_async, wait_until

FUNCTIONS = (
    *("connect", "delete", "explain", "get_app_handle", "get_deployment_handle", "run", "run_many", "scale"),
    *("set_target_capacity", "shutdown", "start", "status"),
    *("create_backend", "update_backend_config", "get_backend_config", "list_backends", "delete_backend"),
    *("create_endpoint", "list_endpoints", "set_traffic", "shadow_traffic", "delete_endpoint"),
    *("get_deployment", "list_deployments", "get_deployment_info", "delete_deployment", "wait_for_goal"),
)


class Model:
    async def __call__(self, request: Any) -> Any:
        return request.data

    async def greet(self, name: str) -> str:
        return f"Hello, {name}!"

    async def count(self, number: int) -> AsyncIterator[int]:
        for each in range(number):
            yield each


class Slow:
    """Its constructor waits; each test sets the events."""

    entered: ClassVar[Any]
    released: ClassVar[Any]

    def __init__(self) -> None:
        self.entered.set()
        self.released.wait(20)

    def __call__(self, request: Any) -> None: ...


class AsyncSlow(Slow):
    async def __init__(self) -> None:  # type: ignore[misc]
        self.entered.set()
        await self.released.wait()

    async def __call__(self, request: Any) -> None: ...  # type: ignore[override]


def verbs(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_both_clients_have_the_same_verbs_and_signatures() -> None:
    assert verbs(Client) == verbs(AsyncClient)
    for name in sorted(verbs(Client) - {"get_handle"}):
        blocking, awaited = getattr(Client, name), getattr(AsyncClient, name)
        assert inspect.signature(blocking) == inspect.signature(awaited), name
        assert blocking.__doc__ == awaited.__doc__ is not None, name
        assert inspect.iscoroutinefunction(awaited), name
        assert not inspect.iscoroutinefunction(blocking), name


def test_every_function_has_an_awaitable_form() -> None:
    for name in FUNCTIONS:
        blocking, awaited = getattr(serve, name), getattr(serve, f"{name}_async")
        assert (blocking.__name__, awaited.__name__) == (name, f"{name}_async")
        assert blocking.__module__ == awaited.__module__, name
        assert inspect.signature(blocking) == inspect.signature(awaited), name
        assert "form" not in inspect.signature(blocking).parameters, name
        assert blocking.__doc__ == awaited.__doc__ is not None, name
    assert inspect.iscoroutinefunction(awaited)
    assert not inspect.iscoroutinefunction(blocking)


def test_every_verb_works_on_the_loop_that_runs_the_cluster() -> None:
    async def scenario() -> None:
        async with local_instance_async() as client:
            await client.create_backend("a", Model, config={"event_loop": "worker", "num_replicas": 2})
            await client.create_endpoint("e", backend="a", route="/e")
            handle = await client.get_handle("e")
            assert await handle.remote(3) == 3
            assert await asyncio.gather(*[handle.remote(each) for each in range(50)]) == list(range(50))
            goal = await client.deploy("d", Model, config={"event_loop": "worker"}, _blocking=False)
            assert goal is not None
            assert await client.wait_for_goal(goal)
            deployed = await client.get_handle("d")
            assert await deployed.greet.remote("you") == "Hello, you!"
            assert [each async for each in deployed.options(stream=True).count.remote(3)] == [0, 1, 2]
            assert (await client.status()).backends["a"].running == 2
            assert set(await client.list_endpoints()) == {"d", "e"}
            assert (await client.explain("d")).wanted == 1
            await client.set_traffic("e", {"a": 0.5, "d": 0.5})
            await client.delete_endpoint("e")
            await client.delete_backend("a")
            assert set(await client.list_backends()) == {"d"}
        assert (await client.status()) == serve.Status()
        with pytest.raises(ClosedError):
            await client.list_backends()

    asyncio.run(scenario())


def test_errors_are_those_of_the_blocking_client() -> None:
    async def scenario() -> None:
        async with local_instance_async() as client:
            with pytest.raises(NotFoundError, match=r"no endpoint|does not exist"):
                await client.get_handle("nothing")
            with pytest.raises(TypeError, match="backend must be the tag"):
                await client.create_endpoint("e")
            with pytest.raises(NotRegisteredError):
                await client.create_endpoint("e", backend="nothing")
            with pytest.raises(ServeError, match="cannot be serialized"):
                client.__reduce__()

    asyncio.run(scenario())


def test_the_loop_runs_on_while_a_verb_waits() -> None:
    """A verb waits for a constructor that returns only when the loop has served another call."""

    async def scenario() -> None:
        Slow.entered, Slow.released = threading.Event(), threading.Event()
        async with local_instance_async() as client:
            creating = asyncio.create_task(client.create_backend("slow", Slow))
            await wait_until(Slow.entered.is_set)
            assert (await client.status()).backends["slow"].running == 0
            Slow.released.set()
            await creating

    asyncio.run(scenario())


def test_a_cancelled_creation_leaves_no_backend() -> None:
    async def scenario() -> None:
        AsyncSlow.entered, AsyncSlow.released = asyncio.Event(), asyncio.Event()
        async with local_instance_async() as client:
            creating = asyncio.create_task(
                client.create_backend("slow", AsyncSlow, config={"event_loop": "worker"})
            )
            await AsyncSlow.entered.wait()
            creating.cancel()
            AsyncSlow.released.set()
            with pytest.raises(asyncio.CancelledError):
                await creating
            assert await client.list_backends() == {}

    asyncio.run(scenario())


def test_a_blocking_verb_on_that_loop_names_the_awaitable_one() -> None:
    async def scenario() -> None:
        async with local_instance_async() as client:
            blocking = Client(InstanceConnection(client._connection.cluster_connection, client.instance_name))
            with pytest.raises(BlockingCallError, match=r"`await client.list_backends\(...\)`"):
                blocking.list_backends()
            with pytest.raises(RuntimeError, match=r"`await client.shutdown\(...\)`"):
                blocking.shutdown()
            assert await asyncio.to_thread(blocking.list_backends) == {}

    asyncio.run(scenario())


def test_an_async_client_works_on_any_other_loop() -> None:
    with local_instance() as blocking:

        async def scenario() -> None:
            client = AsyncClient(blocking._connection)
            await client.create_backend("a", Model)
            await client.create_endpoint("a", backend="a")
            assert await (await client.get_handle("a")).remote(1) == 1
            await client.delete_endpoint("a")
            with pytest.raises(NotFoundError):
                await client.get_handle("a")

        asyncio.run(scenario())


def test_a_signal_ends_serving_and_the_instance() -> None:
    async def scenario() -> None:
        previous = signal.getsignal(signal.SIGTERM)
        async with local_instance_async() as client:
            serving = asyncio.create_task(client.serve_until_interrupted())
            await wait_until(lambda: signal.getsignal(signal.SIGTERM) is not previous)
            await client.list_backends()
            signal.raise_signal(signal.SIGTERM)
            await serving
            assert signal.getsignal(signal.SIGTERM) is previous
            with pytest.raises(ClosedError):
                await client.list_backends()

    asyncio.run(scenario())


def test_a_blocking_form_that_suspends_is_an_internal_error() -> None:
    async def suspends() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match=r"Internal error: .*suspends.* suspended"):
        finish(suspends())
