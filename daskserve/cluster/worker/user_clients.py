"""Dask clients for user code: one for each event loop, and one for all threads.

Problem: ``distributed.get_client()`` returns the worker's client. It is asynchronous on the worker's loop
only: on the loop of a replica, its methods block and return plain values, which cannot be awaited. Choice:
each loop gets a separate asynchronous client on first use, so that ``await get_client().submit(f)`` works the
same on every loop. Code in threads shares the client of the loop on which daskserve itself runs. Futures,
locks and queues that one of these clients created also work in all other places; see `UserClient.sync`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from distributed import Client, Security, futures_of

from daskserve.cluster.distributed_internals import close_client, is_wait_for_futures
from daskserve.cluster.worker.request_tasks import TaskClient
from daskserve.cluster.worker.worker_view import refuse_blocking_lock
from daskserve.loops.event_loop import on_loop, running_loop
from daskserve.loops.tasks import TaskSet
from daskserve.telemetry.tracing.tasks import with_trace

logger = logging.getLogger("daskserve.dask")

#: For each scheduler call that acquires a lock: the call that releases it, and the arguments of that call.
_RELEASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "semaphore_acquire": ("semaphore_release", ("name", "lease_id")),
    "multi_lock_acquire": ("multi_lock_release", ("id",)),
}


class SchedulerCalls:
    """A client's calls of the scheduler; a cancelled one releases the lock that it acquires later."""

    def __init__(self, rpc: Any) -> None:
        self._rpc = rpc
        self._releasing = TaskSet(logger)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._rpc, name)
        return partial(self._acquire, call, *_RELEASES[name]) if name in _RELEASES else call

    async def _acquire(
        self, acquire: Callable[..., Awaitable[Any]], release: str, names: tuple[str, ...], **arguments: Any
    ) -> Any:
        # The scheduler does not notice that the caller was cancelled, and would still grant the lock.
        acquiring = asyncio.ensure_future(acquire(**arguments))
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            giving_up = partial(getattr(self._rpc, release), **{name: arguments[name] for name in names})
            self._releasing.spawn(_release_when_acquired(acquiring, giving_up), "dask-lock-release")
            raise


async def _release_when_acquired(acquiring: Awaitable[Any], release: Callable[[], Awaitable[Any]]) -> None:
    if await acquiring:
        await release()


class UserClient(TaskClient):
    """A client that may be used anywhere: its methods return awaitables on event loops, and block in threads.

    Its methods may be called before it is connected.
    """

    _calls: SchedulerCalls | None = None

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        if self.scheduler is None:
            self.scheduler = self.rpc(address)  # Dask sets this only later

    def submit(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Submit a task, which belongs to the trace of the current request."""
        return super().submit(_traced(func, kwargs), *args, **kwargs)

    def map(self, func: Any, *iterables: Any, **kwargs: Any) -> Any:
        """Submit a task for each item."""
        return super().map(_traced(func, kwargs), *iterables, **kwargs)

    @property
    def asynchronous(self) -> bool:
        """Whether the caller runs on an event loop, of this client or not."""
        return running_loop() is not None

    @property
    def scheduler(self) -> Any:
        """The connection to the scheduler; None if the client is closed."""
        return self._calls

    @scheduler.setter
    def scheduler(self, rpc: Any) -> None:
        self._calls = None if rpc is None else SchedulerCalls(rpc)

    def sync(
        self,
        func: Callable[..., Any],
        *args: Any,
        asynchronous: bool | None = None,
        callback_timeout: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run a coroutine function on the loop of this client; on any event loop, return an awaitable."""
        owner = _only_owner(args[0]) if args and is_wait_for_futures(func) else None
        if isinstance(owner, UserClient) and owner is not self:
            return owner.sync(func, *args, callback_timeout=callback_timeout, **kwargs)
        if not (self.asynchronous if asynchronous is None else asynchronous):
            options = {"asynchronous": False, "callback_timeout": callback_timeout}
            return super().sync(self._when_connected, func, args, kwargs, **options)
        refuse_blocking_lock()
        return super().sync(
            self._on_loop, func, args, kwargs, asynchronous=True, callback_timeout=callback_timeout
        )

    async def _on_loop(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        loop: Any = self.loop
        return await on_loop(loop.asyncio_loop, self._when_connected(func, args, kwargs))

    async def _when_connected(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        await self.connected()
        return await func(*args, **kwargs)

    async def connected(self) -> None:
        """Return once the client is connected; cancelling the caller does not cancel the connection."""
        if self.status in ("newly-created", "connecting"):
            await asyncio.shield(asyncio.ensure_future(self))


def _traced(function: Any, options: Mapping[str, Any]) -> Any:
    return function if options.get("actor") or options.get("actors") else with_trace(function)


def _only_owner(futures: Any) -> Any:
    """Return the client of futures; None if they have more than one client."""
    owners = {future.client for future in futures_of(futures)}
    return owners.pop() if len(owners) == 1 else None


class UserClients:
    """The clients of one process, one for each event loop.

    Parameters
    ----------
    address : str
        The scheduler's address.
    loop : AbstractEventLoop
        The event loop whose client serves code in threads.
    """

    def __init__(self, address: str, security: Security | None, loop: asyncio.AbstractEventLoop) -> None:
        self._address = address
        self._security = security
        self._loop = loop
        self._clients: dict[asyncio.AbstractEventLoop, UserClient] = {}
        self._holding: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}

    def current(self) -> Client:
        """Return the client of the running loop; in a thread without a loop, the client for threads."""
        if running_loop() is not None:
            return self._of_running_loop()
        client = self._clients.get(self._loop)
        if client is not None and client.status == "running":
            return client
        if self._loop.is_closed():
            raise RuntimeError("The Dask clients of this process are closed, because it ends.")
        return asyncio.run_coroutine_threadsafe(self._connected(), self._loop).result()

    async def close(self) -> None:
        """Close the client for threads; call this on its loop. The others end with their loops."""
        client = self._clients.get(self._loop)
        if client is not None:
            await self._holding[self._loop].aclose()

    async def _connected(self) -> Client:
        client = self._of_running_loop()
        await client.connected()
        return client

    def _of_running_loop(self) -> UserClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None or client.status in ("closing", "closed"):
            client = UserClient(
                self._address,
                asynchronous=True,
                set_as_default=False,
                security=self._security,
                direct_to_workers=True,
                name="daskserve-threads" if loop is self._loop else "daskserve-user",
            )
            self._clients[loop] = client
            # Every event loop closes its asynchronous generators before it ends. This generator has no
            # `await` before its `yield`, so that its first step needs no task.
            holding = self._holding[loop] = self._hold(loop, client)
            with suppress(StopIteration):
                holding.__anext__().send(None)
        return client

    async def _hold(self, loop: asyncio.AbstractEventLoop, client: Client) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if self._clients.get(loop) is client:
                del self._clients[loop], self._holding[loop]
            await close_client(client)
