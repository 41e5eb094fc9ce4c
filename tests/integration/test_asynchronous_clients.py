"""The awaitable verbs on Dask clients made with ``asynchronous=True``, and on the loops of replicas."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask.config
import pytest
from dask_processes import ExternalCluster, fetch
from distributed import Client, default_client

import daskserve as serve
from daskserve.errors import AlreadyRunningError, BlockingCallError, ClosedError, ClusterUnreachableError
from daskserve.testing import wait_until

HTTP = {"port": 0}


@serve.deployment
class Greeter:
    def __call__(self, request: Any) -> str:
        return "hello"

    def greet(self, name: str) -> str:
        return f"Hello, {name}!"


class Inspector:
    """Uses the awaitable verbs inside a replica."""

    async def __call__(self, request: Any) -> Any:
        client = await serve.connect_async()
        other = await client.get_handle("Greeter")
        return sorted(await client.list_backends()), await other.greet.remote("replica")


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Check that no thread stays; Dask has one for large messages, which may start at any time."""
    before = set(threading.enumerate())
    yield
    new = {each for each in set(threading.enumerate()) - before if not each.name.startswith("Dask-Offload")}
    for thread in new:
        if thread.name.startswith("asyncio-waitpid"):
            thread.join(timeout=5)  # asyncio's thread for a process ends a moment after the process
    assert [thread.name for thread in new if thread.is_alive()] == []


def test_every_function_works_on_the_loop_of_an_asynchronous_client(external: ExternalCluster) -> None:
    """Each call of the runner is a cell of a notebook: the loop stops between them."""

    async def start() -> serve.Handle:
        await Client(external.address, asynchronous=True)
        return await serve.run_async(Greeter.bind(), http_options=HTTP)

    async def use(handle: serve.Handle) -> None:
        assert await handle.greet.remote("loop") == "Hello, loop!"
        assert len(set(await asyncio.gather(*[handle.greet.remote(each) for each in range(100)]))) == 100
        with pytest.raises(BlockingCallError, match=r"serve.run\(\) would block .* `await serve.run_async"):
            serve.run(Greeter.bind())
        with pytest.raises(RuntimeError, match="await the response"):
            handle.greet.remote("loop").result()
        status = await serve.status_async()
        assert status.backends["Greeter"].running == 1
        assert fetch(status.http_urls[0]).text == "hello"
        assert (await serve.explain_async("Greeter")).running == 1
        await serve.set_target_capacity_async(100)

        async with await serve.start_async(http_options=HTTP) as other:
            await other.create_backend("b", Greeter.definition)
            assert set((await other.status()).backends) == {"b"}
        assert "open" not in repr(other)

    async def inspect() -> None:
        client = await serve.start_async(http_options=HTTP)
        await client.deploy("Greeter", Greeter.definition)
        for event_loop in ("own", "worker"):
            await client.deploy("inspector", Inspector, config={"event_loop": event_loop})
            handle = await client.get_handle("inspector")
            assert await handle.remote(0) == (["Greeter", "inspector"], "Hello, replica!")
        await client.shutdown()

    async def end() -> None:
        await serve.shutdown_async()
        assert await serve.status_async() == serve.Status()
        await default_client().close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner() as runner, no_new_threads():
        handle = runner.run(start())
        runner.run(use(handle))
        runner.run(inspect())
        runner.run(end())


def test_a_client_by_address_closes_its_connection(external: ExternalCluster) -> None:
    async def scenario() -> None:
        with pytest.raises(ClusterUnreachableError, match="No Dask scheduler answers at 'nonsense://x'"):
            await serve.connect_async(address="nonsense://x")
        owner = await serve.start_async(detached=True, address=external.address, http_options=HTTP)
        with pytest.raises(AlreadyRunningError):
            await serve.start_async(detached=True, address=external.address)
        guest = await serve.connect_async(address=external.address)
        await guest.create_backend("b", Greeter.definition)
        await guest.disconnect()
        with pytest.raises(ClosedError):
            await guest.list_backends()
        assert list(await owner.list_backends()) == ["b"]
        await owner.shutdown()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with no_new_threads():
        asyncio.run(scenario())


def test_an_owner_that_is_forgotten_ends_its_instance_if_it_was_used(external: ExternalCluster) -> None:
    async def scenario() -> None:
        async with Client(external.address, asynchronous=True):
            await (await serve.start_async(http_options=HTTP)).list_backends()  # the client is dropped here
            await wait_until(lambda: is_unused(external))

            await serve.start_async(http_options=HTTP)
            assert await (await serve.run_async(Greeter.bind())).greet.remote("you") == "Hello, you!"
            assert len([each for each in external.leftovers() if ": listens " in each]) == 1
            await serve.shutdown_async()
            await wait_until(lambda: is_unused(external))

    asyncio.run(scenario())


def is_unused(external: ExternalCluster) -> bool:
    return not [each for each in external.leftovers() if ": topics " not in each]


def test_without_a_cluster_one_starts_on_the_loop_and_ends_with_its_instance() -> None:
    async def scenario() -> None:
        handle = await serve.run_async(Greeter.bind(), http_options=HTTP)
        assert await handle.greet.remote("you") == "Hello, you!"
        await serve.shutdown_async()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with dask.config.set({"daskserve.local-cluster": {"n-workers": 1, "threads-per-worker": 1}}):
        with no_new_threads():
            asyncio.run(scenario())


def test_a_blocking_client_of_the_program_serves_awaitable_verbs_too(external: ExternalCluster) -> None:
    async def scenario() -> None:
        async with await serve.start_async(dask_client=external.client, http_options=HTTP) as client:
            await client.deploy("Greeter", Greeter.definition)
            assert await (await client.get_handle("Greeter")).greet.remote("you") == "Hello, you!"

    asyncio.run(scenario())
    assert is_unused(external)
