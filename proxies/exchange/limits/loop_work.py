"""Shares an event loop fairly among connections with much to do.

Received data may take long to process: a kilobyte may become a megabyte when it is decompressed, or contain
hundreds of frames or chunks. A connection processes a small slice at a time, and queues the rest here. Each
iteration of the event loop processes a bounded part of the queue, so that other connections, user code and
health checks run in between.

The model is Linux' NAPI: ready devices are polled in turn, each for at most 64 packets, and all of them for
at most 300 packets or 2 ms before other work runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias
from weakref import WeakKeyDictionary

#: The size of a slice: how much one connection processes at a time.
SLICE_BYTES = 32 * 1024
#: Minimum cost of a frame or of a call of zlib, in bytes that take as long to process.
STEP_BYTES = 2 * 1024
#: Compressing a byte, or reading it in small chunks, takes about as long as decompressing this many bytes.
SLOW = 8
#: Maximum work of all connections in one iteration of the event loop (a turn), in bytes and in time.
TURN_BYTES = 1024 * 1024
TURN_S = 0.002
#: If the other work of an iteration takes longer than this, the next turn is smaller: the data that was read
#: causes work, too.
BUSY_S = 0.004
#: Work that is done on arrival has a separate budget of `TURN_BYTES` per this time.
WINDOW_S = 0.004

#: Does a slice of work and returns its cost; calls `LoopWork.add` again if there is more to do.
Work: TypeAlias = Callable[[], int]


class LoopWork:
    """The queued work of one event loop.

    Parameters
    ----------
    on_full : callable
        Called when a turn ends with work left.
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
        #: The current budget of a turn, and when the last turn ended.
        self._budget_bytes = TURN_BYTES
        self._turn_ended = 0.0

    def do(self, work: Work) -> None:
        """Do a slice of work now, or queue it if the budget for work on arrival is used up."""
        now = self._time()
        if now - self._window_began >= WINDOW_S:
            self._window_began = now
            self._window_bytes = 0
        if self._window_bytes < self._budget_bytes:
            self._window_bytes += work()
        else:
            self.add(work)

    def add(self, work: Work) -> None:
        """Queue a slice of work."""
        self._waiting.append(work)
        if not self._is_posted:
            self._is_posted = True
            self._turn_ended = self._time()
            self._post(self._take_turn)

    def turn(self, cost: int) -> asyncio.Future[None]:
        """Queue work with this cost; return a future that is done when the work may begin."""
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
        finally:  # an error of one connection does not stop the others
            self._turn_ended = now
            self._is_posted = bool(waiting)
            if waiting:
                self._post(self._take_turn)
                self._on_full()


class WorkByLoop:
    """The queues of all event loops of a server's connections: WebSockets can move to loops of user code."""

    def __init__(self, on_full: Callable[[], None]) -> None:
        self._on_full = on_full
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWork] = WeakKeyDictionary()

    def current(self) -> LoopWork:
        """Return the queue of the running event loop."""
        loop = asyncio.get_running_loop()
        work = self._by_loop.get(loop)
        if work is None:
            work = self._by_loop[loop] = LoopWork(loop, self._on_full)
        return work
