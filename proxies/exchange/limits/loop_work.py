"""Shares an event loop among the connections that have much to do.

What a client sends may take long to read: a kilobyte becomes a megabyte when it is decompressed, or holds
hundreds of frames or chunks. One connection does a small slice at a time. The rest waits here, in the order
of arrival. Each turn of the loop does a bounded part of it, so that other connections, user code and health
probes on the loop run in between.

The model is Linux' NAPI: devices that are ready are polled in turns, each for at most 64 packets, and all for
at most 300 packets or 2 ms before others run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias
from weakref import WeakKeyDictionary

#: The size of a slice: what one connection does at a time.
SLICE_BYTES = 32 * 1024
#: Minimum cost of a frame or a call of zlib, as the number of bytes that take about as long.
STEP_BYTES = 2 * 1024
#: Compressing a byte, or reading it in small chunks, costs about as much as decompressing this many.
SLOW = 8
#: The most that is done in one turn of the loop, for all connections, in bytes and in time.
TURN_BYTES = 1024 * 1024
TURN_S = 0.002
#: If the rest of a turn takes longer than this, less is done in the next one: what was read causes work, too.
BUSY_S = 0.004
#: Work that is done as soon as it arrives has a separate budget: `TURN_BYTES` in this time.
WINDOW_S = 0.004

#: Does a slice of work and returns its cost; calls `LoopWork.add` again if there is more to do.
Work: TypeAlias = Callable[[], int]


class LoopWork:
    """The work that waits on one event loop.

    Parameters
    ----------
    on_full : callable
        Called when there is more to do than a turn allows.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_full: Callable[[], None]) -> None:
        self._on_full = on_full
        self._post = loop.call_soon
        self._time = loop.time
        self._future = loop.create_future
        self._waiting: deque[Work] = deque()
        self._is_posted = False
        self._window_began = float("-inf")
        self._window_bytes = 0
        #: The present budget of a turn, and when the last turn ended.
        self._budget_bytes = TURN_BYTES
        self._turn_ended = 0.0

    def __repr__(self) -> str:
        return f"<LoopWork {len(self._waiting)} waiting>"

    def do(self, work: Work) -> None:
        """Do a slice now, or in a later turn if much was done lately."""
        now = self._time()
        if now - self._window_began >= WINDOW_S:
            self._window_began = now
            self._window_bytes = 0
        if self._window_bytes < self._budget_bytes:
            self._window_bytes += work()
        else:
            self.add(work)

    def add(self, work: Work) -> None:
        """Have a slice done in a later turn."""
        self._waiting.append(work)
        if not self._is_posted:
            self._is_posted = True
            self._turn_ended = self._time()
            self._post(self._take_turn)

    def turn(self, cost: int) -> asyncio.Future[None]:
        """Return a future that is done when it is the turn of work with this cost."""
        turn: asyncio.Future[None] = self._future()

        def begin() -> int:
            if turn.cancelled():
                return 0
            turn.set_result(None)
            return cost

        self.add(begin)
        return turn

    def _take_turn(self) -> None:
        now = self._time()
        if now - self._turn_ended > BUSY_S:
            self._budget_bytes = max(SLICE_BYTES, self._budget_bytes // 2)
        else:
            self._budget_bytes = min(TURN_BYTES, self._budget_bytes * 2)
        waiting, left_bytes = self._waiting, self._budget_bytes
        try:
            until = now + TURN_S
            while waiting and left_bytes > 0 and now < until:
                left_bytes -= waiting.popleft()()
                now = self._time()
        finally:  # a connection that fails does not stop the others
            self._turn_ended = now
            self._is_posted = bool(waiting)
            if waiting:
                self._post(self._take_turn)
                self._on_full()


class WorkByLoop:
    """The work of each event loop that a server's connections use: WebSockets move to those of user code."""

    def __init__(self, on_full: Callable[[], None]) -> None:
        self._on_full = on_full
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWork] = WeakKeyDictionary()

    def current(self) -> LoopWork:
        """Return the work of the running event loop."""
        loop = asyncio.get_running_loop()
        work = self._by_loop.get(loop)
        if work is None:
            work = self._by_loop[loop] = LoopWork(loop, self._on_full)
        return work
