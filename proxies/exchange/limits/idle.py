"""Finds idle connections, with one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class IdleWatch(Generic[T]):
    """Calls ``on_idle(item)`` for each watched item, ``timeout_s`` after its last `watch`."""

    def __init__(self, timeout_s: float, on_idle: Callable[[T], None]) -> None:
        self._timeout_s = timeout_s
        self._on_idle = on_idle
        # All items have the same timeout, so they are due in the order of insertion.
        self._since: dict[T, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    #: The running event loop, set with the first item.
    _loop: asyncio.AbstractEventLoop

    def watch(self, item: T) -> None:
        """Start or restart the timeout of an item. Does nothing after `stop`."""
        if self._is_stopped:
            return
        if self._timer is None:
            self._loop = asyncio.get_running_loop()
            self._timer = self._loop.call_later(self._timeout_s, self._check)
        self._since.pop(item, None)
        self._since[item] = self._loop.time()

    def unwatch(self, item: T) -> None:
        """Stop watching an item. Idempotent."""
        self._since.pop(item, None)

    def longest(self, idle_s: float, may_end: Callable[[T], bool]) -> T | None:
        """Return the item that was idle longest, for at least ``idle_s``, and that may end; None if there is
        none."""
        for item, since in self._since.items():
            if since > self._loop.time() - idle_s:
                return None
            if may_end(item):
                return item
        return None

    def __len__(self) -> int:
        return len(self._since)

    def stop(self) -> None:
        """Stop watching permanently: a connection may have a last request after its server has stopped."""
        self._is_stopped = True
        self._since.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        # A timer may fire one clock tick early.
        due = self._loop.time() - self._timeout_s + 1e-3
        while self._since:
            item, since = next(iter(self._since.items()))
            if since > due:
                self._timer = self._loop.call_at(since + self._timeout_s, self._check)
                return
            del self._since[item]
            self._on_idle(item)
