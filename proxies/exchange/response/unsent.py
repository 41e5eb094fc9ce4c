"""Parts of a response that wait for the client while the application continues.

An application that waits for a slow client occupies its slot. So applications continue earlier: a stream may
be ``max_unsent_bytes`` ahead of its client, and an application that has sent its last part does not wait at
all, as long as all responses are within their budget. nginx buffers responses for the same reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from daskserve.proxies.exchange.limits.limits import UNSENT, Limits
from daskserve.proxies.exchange.stream import GONE


class UnsentParts:
    """The parts of one response that the stream has not sent."""

    __slots__ = ("_allowed_bytes", "_limits", "_room", "_size_bytes")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._size_bytes = 0
        self._allowed_bytes = 0
        self._room: asyncio.Future[None] | None = None

    def add(
        self, flushed: asyncio.Future[None], size_bytes: int, *, is_last: bool
    ) -> asyncio.Future[None] | None:
        """Add a written part; return a future to await, or None if the application need not wait."""
        limits = self._limits
        self._size_bytes += size_bytes
        is_within = limits.unsent.acquire(size_bytes)
        flushed.add_done_callback(partial(self._sent, size_bytes))
        if is_within and (is_last or self._size_bytes <= limits.max_unsent_bytes):
            return None
        if self._room is None:  # counted once for each response
            limits.hit(UNSENT)
        self._allowed_bytes = limits.max_unsent_bytes if is_within and not is_last else 0
        self._room = asyncio.get_running_loop().create_future()
        return self._room

    async def send_rest(self, on_sent: Callable[[], object]) -> None:
        """Wait until all parts are sent, and call ``on_sent``, unless the client disconnects."""
        self._allowed_bytes = 0
        with suppress(ConnectionResetError):
            if self._size_bytes:
                self._room = asyncio.get_running_loop().create_future()
                await self._room
            on_sent()

    def _sent(self, size_bytes: int, flushed: asyncio.Future[None]) -> None:
        self._size_bytes -= size_bytes
        self._limits.unsent.release(size_bytes)
        room = self._room
        if room is None or room.done():
            return
        if flushed.cancelled() or flushed.exception() is not None:
            room.set_exception(ConnectionResetError(GONE))
        elif self._size_bytes <= self._allowed_bytes:
            room.set_result(None)
