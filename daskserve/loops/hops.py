"""Ways onto an event loop from other threads, at one wake-up for many."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

logger = logging.getLogger("daskserve.replica")


_ASLEEP, _TO_BE_WOKEN, _WOKEN = range(3)


class Landing:
    """Where hops onto an event loop arrive. All that share one share its wake-ups, too."""

    __slots__ = ("_arrived", "_is_woken", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[Hop] = deque()
        self._is_woken = False

    def wake_for(self, hop: Hop) -> None:
        """Have the loop look after a hop, soon; from any thread. A closed loop will not."""
        self._arrived.append(hop)
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def catch_up(self) -> None:
        """Do at once what has arrived, on the loop; for who is about to do what can wait for it.

        The loop itself would come to it after all else that it was woken for.
        """
        arrived = self._arrived
        for _ in range(len(arrived)):
            if arrived:  # what is done may have caught up as well
                arrived.popleft().drain()

    def _wake(self) -> None:
        # First: whoever comes after this line wakes the loop again.
        self._is_woken = False
        try:
            self.catch_up()
        finally:
            # As after a sys.exit() in one of them: the others believe that they are on their way.
            if self._arrived and not self._is_woken:
                self._is_woken = True
                self._loop.call_soon(self._wake)


class Hop:
    """A way onto an event loop from other threads. N posts before the loop gets to them cost one wake-up.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
    landing : Landing, optional
        Of that loop; default: one of its own.
    """

    __slots__ = ("_landing", "_posts", "_state", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, landing: Landing | None = None) -> None:
        self.loop = loop
        self._landing = landing or Landing(loop)
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._state = _ASLEEP

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function(*args)`` on the loop, in the order of posts; a closed loop drops it."""
        self._posts.append((function, args))
        if self._state != _WOKEN:
            self._wake()

    def post_soon(self, function: Callable[..., object], *args: Any) -> None:
        """As `post`, from the thread of another loop that is at the end of what it has to do.

        A thread that is woken wants the interpreter's lock. If it comes before the one that woke it lets go
        of that, it falls asleep again, and waking up takes longer than all the rest. So the wake-up waits for
        the end of this turn of the present loop.
        """
        self._posts.append((function, args))
        if self._state == _ASLEEP:
            try:
                present = asyncio.get_running_loop()
            except RuntimeError:  # it has ended, and one of its coroutines is being closed
                self._wake()
            else:
                self._state = _TO_BE_WOKEN
                present.call_soon(self._wake_if_asleep)

    def _wake_if_asleep(self) -> None:
        if self._state == _TO_BE_WOKEN:
            self._wake()

    def _wake(self) -> None:
        self._state = _WOKEN
        self._landing.wake_for(self)

    def drain(self) -> None:
        """Do what was posted; on the loop."""
        # The state first, the count second: whoever posts after this line wakes the loop again, and whatever
        # was posted before it is in the count.
        self._state = _ASLEEP
        for _ in range(len(self._posts)):
            function, args = self._posts.popleft()
            try:
                function(*args)
            except (Exception, asyncio.CancelledError):
                logger.exception("Internal error while crossing between threads in %r", function)


class Hops:
    """One `Hop` for each event loop that somebody waits on; for use from any thread."""

    def __init__(self) -> None:
        #: By the identity of the loop, which is looked up several times a call.
        self._hops: dict[int, Hop] = {}

    def onto(self, loop: asyncio.AbstractEventLoop, landing: Landing | None = None) -> Hop:
        """Return the way onto a loop; made on first use, to arrive at a landing of its own or at this one."""
        hop = self._hops.get(id(loop))
        if hop is not None and hop.loop is loop:
            return hop
        # Two threads may do this at once; then some posts share a wake-up with fewer others. Programs may run
        # loop after loop.
        hops = {key: each for key, each in list(self._hops.items()) if not each.loop.is_closed()}
        hop = hops[id(loop)] = Hop(loop, landing)
        self._hops = hops
        return hop
