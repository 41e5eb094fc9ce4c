"""The items of one map whose calls are in flight, or whose results have not been read yet.

The thread or the event loop that reads the results owns the window. Calls end on other threads, which only
put the item into `_ended` and wake the reader, so the window needs no lock, and items need no threads. Time
is an argument.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from daskserve.common.types import EndpointTag
from daskserve.data.caller.mapping.rules import Attempts, Rules

#: Maximum number of results that wait for an earlier one, as a multiple of the calls in flight.
ORDERED_AHEAD = 2


class NotSent:
    """The response of an item whose call could not start."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def failure(self) -> BaseException | None:
        """Return the error."""
        return self._error

    def fetch_rest(self) -> bool:
        """Return False: there is nothing to fetch."""
        return False

    def result(self) -> Any:
        """Raise the error."""
        raise self._error


class Item:
    """One item: its number, its value for retries, and its current call."""

    __slots__ = ("attempts", "has_ended", "index", "response", "value")

    def __init__(self, index: int, value: Any) -> None:
        self.index = index
        self.value = value
        self.response: Any = None
        self.attempts = Attempts()
        self.has_ended = False


class Window:
    """The items of a map that were taken from its source and not yet read.

    Parameters
    ----------
    endpoint : str
        The endpoint that is called.
    send : callable
        Starts the call of an item and returns its `daskserve.data.caller.calls.response.Response`.
    """

    def __init__(
        self, endpoint: EndpointTag, send: Callable[[Item], Any], rules: Rules, *, ordered: bool
    ) -> None:
        self.endpoint = endpoint
        self.in_flight = 0
        #: The number of items that are left in the source, if it is known.
        self.backlog = 0
        #: Wakes the reader, from any thread.
        self.wake: Callable[[], object] | None = None
        self._send = send
        self._rules = rules
        self._is_ordered = ordered
        #: Items whose call has ended since the reader looked.
        self._ended: deque[Item] = deque()
        #: Items to be called again, with the time.
        self._again: list[tuple[float, int, Item]] = []
        #: The items that may have killed replicas, including the item that is being tried now.
        self._suspects: deque[Item] = deque()
        self._suspect: Item | None = None
        #: The items to read: in order, all that were started; otherwise, only those that have ended.
        self._items: deque[Item] = deque()
        self._started = 0
        self._calls: dict[int, Item] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no call is in flight or waits, and no result can be read."""
        return not (self._items or self._calls or self._again or self._suspects)

    @property
    def waiting(self) -> int:
        """The backlog; 0 while no call is in flight, because a paused reader does not need replicas."""
        return self.backlog if self.in_flight > len(self._ended) else 0

    def has_results(self) -> bool:
        """Return whether a call has ended since `advance`."""
        return bool(self._ended)

    def may_add(self, limit: int) -> bool:
        """Return whether another item may be taken from the source."""
        pending = self.in_flight + len(self._again) + len(self._suspects)
        ahead = ORDERED_AHEAD * limit if self._is_ordered else limit
        return pending < limit and len(self._items) < ahead

    def add(self, value: Any) -> None:
        """Start the call of the next item."""
        item = Item(self._started, value)
        self._started += 1
        if self._is_ordered:
            self._items.append(item)
        self._begin(item)

    @property
    def started(self) -> int:
        """How many items were taken from the source."""
        return self._started

    def _begin(self, item: Item) -> None:
        self.in_flight += 1
        self._calls[item.index] = item
        try:
            item.response = self._send(item)
        # the arguments cannot be pickled, or the connection is closed: the item has failed
        except Exception as error:
            item.response = NotSent(error)
            self._ended.append(item)
        else:
            self._follow(item)

    def _follow(self, item: Item) -> None:
        def note(_: Any) -> None:
            self._ended.append(item)
            if (wake := self.wake) is not None:
                wake()

        item.response.follow(note)

    def advance(self, now: float) -> None:
        """Process the calls that have ended, and repeat calls whose pause is over."""
        for _ in range(len(self._ended)):
            item = self._ended.popleft()
            if item.index not in self._calls:
                continue  # the call was cancelled
            if item.response.fetch_rest():
                self._follow(item)
            else:
                self._end(item, now)
        while self._again and self._again[0][0] <= now:
            self._begin(heapq.heappop(self._again)[-1])
        if self._suspect is None and self._suspects:
            self._suspect = self._suspects.popleft()
            self._begin(self._suspect)

    def _end(self, item: Item, now: float) -> None:
        self.in_flight -= 1
        del self._calls[item.index]
        if item is self._suspect:
            self._suspect = None
        error = item.response.failure()
        again = None if error is None else self._rules.after(error, item.attempts)
        if again is None:
            item.has_ended = True
            item.value = None
            if not self._is_ordered:
                self._items.append(item)
        elif again.is_suspect:
            self._suspects.append(item)
        else:
            heapq.heappush(self._again, (now + again.pause_s, item.index, item))

    def next_at(self) -> float | None:
        """Return when the next call is to be repeated; None if there is none."""
        return self._again[0][0] if self._again else None

    def take(self) -> Item | None:
        """Return the next item whose call has ended; None if there is none yet."""
        return self._items.popleft() if self._items and self._items[0].has_ended else None

    def cancel(self) -> None:
        """Cancel all calls, and forget all items."""
        self.backlog = 0
        self._again.clear()
        self._suspects.clear()
        self._items.clear()
        self.cancel_calls()
        self._calls = {}

    def cancel_calls(self) -> None:
        """Cancel the calls that are in flight, so that their reader gets an error; from any thread."""
        for item in list(self._calls.values()):
            if not isinstance(item.response, NotSent):
                item.response.cancel()
