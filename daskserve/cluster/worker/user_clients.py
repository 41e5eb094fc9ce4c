"""Dask clients for asynchronous user code on event loops that are not the worker's.

Problem: ``distributed.get_client()`` returns the worker's client. It is asynchronous on the worker's loop
only: on the loop of a replica, its methods block and return plain values, which cannot be awaited. Choice:
each other loop gets an asynchronous client of its own, on first use. So ``await get_client().submit(f)``
means the same on every loop. Code without a running loop, in threads, has the worker's client as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from distributed import Client, Security


class LoopClient(Client):
    """An asynchronous client whose methods may be called before it is connected."""

    def sync(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that the client runs on its loop; when it is called there, return an awaitable."""
        answer = super().sync(func, *args, **kwargs)
        if self.status in ("newly-created", "connecting") and self.asynchronous:
            return self._after_start(answer)
        return answer

    async def _after_start(self, answer: Awaitable[Any]) -> Any:
        await self
        return await answer


class UserClients:
    """The clients of one process, one for each event loop.

    Parameters
    ----------
    address : str
        The scheduler's address.
    """

    def __init__(self, address: str, security: Security | None) -> None:
        self._address = address
        self._security = security
        self._clients: dict[asyncio.AbstractEventLoop, Client] = {}
        self._holding: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}

    def of_running_loop(self) -> Client:
        """Return the client of the running loop, which ends with the loop."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None or client.status in ("closing", "closed"):
            client = LoopClient(
                self._address,
                asynchronous=True,
                set_as_default=False,
                security=self._security,
                direct_to_workers=True,
                name="daskserve-user",
            )
            self._clients[loop] = client
            # Loops close their asynchronous generators before they end, wherever they are run. This one has
            # no `await` before its `yield`, so that its first step needs no task.
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
            await client.close()
