"""Ways onto an event loop from other threads, at one wake-up for many."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

logger = logging.getLogger("daskserve.replica")


class Hop:
    """A way onto an event loop from other threads. N posts before the loop gets to them cost one wake-up."""

    __slots__ = ("_is_armed", "_loop", "_posts")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_armed = False

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function(*args)`` on the loop, in the order of posts; a closed loop drops it."""
        self._posts.append((function, args))
        if not self._is_armed:
            self._is_armed = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                pass  # the loop is closed

    def _drain(self) -> None:
        # Disarm first, count second: whoever posts after this line wakes the loop again, and whatever was
        # posted before it is in the count.
        self._is_armed = False
        for _ in range(len(self._posts)):
            function, args = self._posts.popleft()
            try:
                function(*args)
            except Exception:
                logger.exception("Internal error while crossing between threads in %r", function)


class Hops:
    """One `Hop` for each event loop that somebody waits on; for use from any thread."""

    def __init__(self) -> None:
        self._hops: WeakKeyDictionary[asyncio.AbstractEventLoop, Hop] = WeakKeyDictionary()

    def onto(self, loop: asyncio.AbstractEventLoop) -> Hop:
        """Return the way onto a loop."""
        hop = self._hops.get(loop)
        if hop is None:
            # Two threads may do this at once; then some posts share a wake-up with fewer others.
            hop = self._hops[loop] = Hop(loop)
        return hop
