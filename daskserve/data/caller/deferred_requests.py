"""Requests of batch jobs that are deferred while their replica keeps its free slots for live requests."""

from __future__ import annotations

import asyncio
from collections import deque

#: Maximum number of deferred requests in the replica's own queue. They fill free slots at once, and leave
#: room for the requests of other processes.
MAX_SENT = 8


class DeferredRequests:
    """A queue of deferred requests, of which the first `MAX_SENT` also wait in the queue of the replica."""

    def __init__(self) -> None:
        #: Number of deferred requests, sent or not.
        self.count = 0
        self._sent = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait until the request may be sent; call `release` once the request has a slot or is refused."""
        if self._sent < MAX_SENT:
            self._sent += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Let the next request be sent."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._sent -= 1
