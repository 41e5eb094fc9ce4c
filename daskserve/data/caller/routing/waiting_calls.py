"""Counts calls that wait for the state of their endpoint, which a process fetches with its first call.

A graceful deletion lets requests finish, but replicas do not know about calls that this process has not sent
yet. So the program that deletes first waits until its own calls have been sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from daskserve.cluster.protocols.base import Process
from daskserve.loops.tasks import pause

T = TypeVar("T")

#: Timeout of a deletion that waits for unsent calls, which time out after a similar time.
WAITING_CALLS_S = 10.0


class WaitingCalls:
    """Counts the calls of a process that wait for the state of their endpoint, or for a connection.

    Use it as a context manager around each wait. Runs on one event loop.
    """

    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Event()

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._count -= 1
        self._changed.set()

    async def during(self, waiting: Awaitable[T]) -> T:
        """Await something that a call needs before it can be sent."""
        with self:
            return await waiting

    async def wait_until_over(self) -> None:
        """Return when no call waits, although each may wait for several things in turn."""
        for _ in range(2):
            await pause()  # lets calls that were made earlier take their first step
        while self._count:
            self._changed.clear()
            await self._changed.wait()
            await pause()


def waiting_calls_of(cluster: Process) -> WaitingCalls:
    """Return the counter of a process for an instance; runs on the connection's loop."""
    waiting_calls: WaitingCalls | None = cluster.shared.get("waiting_calls")
    if waiting_calls is None:
        waiting_calls = cluster.shared["waiting_calls"] = WaitingCalls()
    return waiting_calls


async def wait_until_sent(cluster: Process) -> None:
    """Return when all calls that this process has begun have been sent, or after `WAITING_CALLS_S`."""
    with suppress(TimeoutError):  # late calls fail when they time out
        await cluster.clock.wait_for(waiting_calls_of(cluster).wait_until_over(), WAITING_CALLS_S)
