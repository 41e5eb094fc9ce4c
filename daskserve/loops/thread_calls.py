"""Posting functions to an event loop from other threads, with one wake-up for many posts."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from daskserve.common.clock import stopwatch

logger = logging.getLogger("daskserve.replica")


_ASLEEP, _TO_BE_WOKEN, _WOKEN = range(3)
#: How long `ThreadCalls.post_soon` delays a wake-up while the calling thread's loop is busy.
MAX_DELAY_S = 0.002


class CallInbox:
    """Queues of calls to run on one event loop. Threads that share an inbox share its wake-ups."""

    __slots__ = ("_arrived", "_is_woken", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[ThreadCalls] = deque()
        self._is_woken = False

    def wake_for(self, thread_calls: ThreadCalls) -> None:
        """Make the loop run these calls soon. Call this from any thread; a closed loop ignores it."""
        self._arrived.append(thread_calls)
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def catch_up(self) -> None:
        """Run all arrived calls now, on the loop, before other work.

        Without this call, the loop drains them after all other callbacks of the current iteration.
        """
        arrived = self._arrived
        for _ in range(len(arrived)):
            if arrived:  # a drained function may itself have called this method
                arrived.popleft().drain()

    def _wake(self) -> None:
        # Reset first: a call that arrives after this line wakes the loop again.
        self._is_woken = False
        try:
            self.catch_up()
        finally:
            # After an error such as SystemExit in one call, the remaining calls still need a wake-up.
            if self._arrived and not self._is_woken:
                self._is_woken = True
                self._loop.call_soon(self._wake)


class ThreadCalls:
    """Posts functions to an event loop from other threads. Posts that the loop has not run share a wake-up.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
        The loop that runs the functions.
    inbox : CallInbox, optional
        An inbox of that loop. Default: a new one.
    """

    __slots__ = ("_inbox", "_posts", "_since", "_state", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: CallInbox | None = None) -> None:
        self.loop = loop
        self._inbox = inbox or CallInbox(loop)
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._state = _ASLEEP
        self._since = 0.0

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function(*args)`` on the loop, in the order of posts; a closed loop drops the post."""
        self._posts.append((function, args))
        if self._state != _WOKEN:
            self._wake()

    def post_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Post like `post`, but wake the loop when the calling thread's loop has no more posts for now.

        A woken thread needs the interpreter lock. If the waking thread still holds the lock, the woken thread
        sleeps again, and takes the lock as soon as the waking thread releases it for a moment, as NumPy does.
        Each of these switches costs more than everything else. So the wake-up waits for the first iteration
        of this loop without a post, or for `MAX_DELAY_S`. Measured with FastAPI, 32 connections, CPU time for
        a request: 530 to 640 µs instead of 780 with scikit-learn in an async endpoint, and 0.9 instead of 1.2
        times uvicorn's for 50 server-sent events.
        """
        self._posts.append((function, args))
        if self._state == _TO_BE_WOKEN:
            if stopwatch() - self._since > MAX_DELAY_S:
                self._wake()
        elif self._state == _ASLEEP:
            try:
                current = asyncio.get_running_loop()
            except RuntimeError:  # the loop has ended, and one of its coroutines is being closed
                self._wake()
            else:
                self._state = _TO_BE_WOKEN
                self._since = stopwatch()
                current.call_soon(self._wake_if_quiet, current, len(self._posts))

    def _wake_if_quiet(self, current: asyncio.AbstractEventLoop, count: int) -> None:
        if self._state != _TO_BE_WOKEN:
            return
        if len(self._posts) == count or stopwatch() - self._since > MAX_DELAY_S:
            self._wake()
        else:
            current.call_soon(self._wake_if_quiet, current, len(self._posts))

    def _wake(self) -> None:
        self._state = _WOKEN
        self._inbox.wake_for(self)

    def drain(self) -> None:
        """Run the posted functions. Call this on the loop."""
        # Reset the state before counting: a post after this line wakes the loop again, and a post before it
        # is in the count.
        self._state = _ASLEEP
        for _ in range(len(self._posts)):
            function, args = self._posts.popleft()
            try:
                function(*args)
            except (Exception, asyncio.CancelledError):
                logger.exception("Internal error: a function posted from another thread failed: %r", function)


class LoopQueues:
    """One `ThreadCalls` per event loop; any thread may use it."""

    def __init__(self) -> None:
        #: Keyed by the loop's ``id``, because a call needs this lookup several times.
        self._by_loop: dict[int, ThreadCalls] = {}

    def get(self, loop: asyncio.AbstractEventLoop, inbox: CallInbox | None = None) -> ThreadCalls:
        """Return the queue of a loop; the first call creates it, with this inbox or a new one."""
        thread_calls = self._by_loop.get(id(loop))
        if thread_calls is not None and thread_calls.loop is loop:
            return thread_calls
        # Two threads may do this at once; in that case, some posts share a wake-up with fewer others. Queues
        # of closed loops are dropped, because programs may run one loop after another.
        by_loop = {key: each for key, each in list(self._by_loop.items()) if not each.loop.is_closed()}
        thread_calls = by_loop[id(loop)] = ThreadCalls(loop, inbox)
        self._by_loop = by_loop
        return thread_calls
