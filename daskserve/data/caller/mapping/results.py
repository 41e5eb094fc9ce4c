"""The results of `Handle.map`, which calls the items of an iterable while the results are read.

The thread or the event loop that reads the results does all the work: it takes items from the source, starts
their calls and waits for the first one to end. The source is read only while there is room, so the memory
does not depend on its length.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from operator import length_hint
from typing import Any, NoReturn, Self

from daskserve.common.clock import stopwatch
from daskserve.data.caller.mapping.rules import Rules, ends_all, named
from daskserve.data.caller.mapping.target import MapTarget
from daskserve.data.caller.mapping.window import Item, Window
from daskserve.errors import BadRequestError
from daskserve.loops.event_loop import settle

#: Interval at which the number of calls is adjusted while no call ends.
REFRESH_S = 0.25
#: Number of calls in flight while the replicas are not known yet.
FIRST_CALLS = 2


class MapResults:
    """The results of `Handle.map`: iterate over them, with ``async for`` or, outside of event loops, ``for``.

    Calls start when the first result is read. `close`, an error, and the garbage collection of this object
    cancel the calls in flight.
    """

    def __init__(
        self, source: Any, target: MapTarget, window: Window, rules: Rules, max_in_flight: int | None
    ) -> None:
        self._target = target
        self._window = window
        self._rules = rules
        self._max_in_flight = max_in_flight
        self._length = length_hint(source, -1)
        #: The items that have not been taken yet; None once there are no more.
        self._source: Iterator[Any] | None = None
        self._asynchronous_source: AsyncIterator[Any] | None = None
        if hasattr(source, "__aiter__"):
            self._asynchronous_source = source.__aiter__()
        else:
            try:
                self._source = iter(source)
            except TypeError:
                raise BadRequestError(f"map() needs an iterable of items; got {source!r}.") from None
        #: The next item of an asynchronous source.
        self._arriving: asyncio.Task[Any] | None = None
        #: The error with which the source has ended.
        self._source_error: BaseException | None = None
        self._is_busy = False
        target.on_release(window.cancel_calls)

    def __repr__(self) -> str:
        return f"<MapResults in_flight={self._window.in_flight} started={self._window.started}>"

    def __del__(self) -> None:
        window = getattr(self, "_window", None)
        if window is None or not window.in_flight:
            return
        # Scheduled on the loop, because the garbage collector may call this on any thread at any time.
        with suppress(RuntimeError):  # raised by a closed loop
            self._target.connection.loop.call_soon_threadsafe(window.cancel)

    def __reduce__(self) -> NoReturn:
        raise BadRequestError(
            "The results of map() belong to the code that reads them; pass on a list of them."
        )

    def close(self) -> None:
        """Cancel the calls in flight; there are no more results. Idempotent."""
        self._source = self._asynchronous_source = self._source_error = None
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None
        self._window.cancel()
        self._target.end()

    async def aclose(self) -> None:
        """Close the results like `close`; for `contextlib.aclosing`."""
        self.close()

    # ---- for both kinds of readers

    @property
    def _is_exhausted(self) -> bool:
        return self._source is None and self._asynchronous_source is None

    def _limit(self) -> int:
        """Return how many calls may be in flight."""
        return self._max_in_flight or self._target.room() or FIRST_CALLS

    def _fill(self) -> None:
        """Take items from the source while there is room."""
        limit = self._limit()
        while self._source is not None and self._window.may_add(limit):
            try:
                value = next(self._source)
            except StopIteration:
                self._source = None
            except Exception as error:  # raised after the results of the earlier items
                self._source, self._source_error = None, error
            else:
                self._window.add(value)
        if self._is_exhausted:
            self._window.backlog = 0
        # for an unknown length, count as many items as are in flight, so that autoscaling sees more work
        else:
            left = self._length - self._window.started if self._length >= 0 else limit
            self._window.backlog = max(0, left)

    def _next_ended(self) -> Item | None:
        self._window.advance(stopwatch())
        self._fill()
        return self._window.take()

    def _outcome(self, item: Item) -> Any:
        """Return the result of an item, or its error if the map returns errors."""
        failure = item.response.failure()
        try:
            return item.response.result()
        except Exception as error:
            self._name(error, item)
            if failure is not None and self._rules.errors == "return" and not ends_all(failure):
                return error
            raise

    def _name(self, error: Exception, item: Item) -> None:
        named(error, item.index)

    def _finish(self) -> None:
        """Raise the error with which the source has ended, if there is one."""
        error, self._source_error = self._source_error, None
        self.close()
        if error is not None:
            raise error

    def _pause_s(self) -> float | None:
        """Return how long to wait for a call to end before the next check."""
        at = self._window.next_at()
        left = None if at is None else max(0.0, at - stopwatch())
        if self._is_exhausted or self._max_in_flight is not None:
            return left
        return REFRESH_S if left is None else min(left, REFRESH_S)

    def _claim(self) -> None:
        if self._is_busy:
            raise RuntimeError("Two readers iterate over the same results at the same time; use one reader.")
        self._is_busy = True

    # ---- threads

    def __iter__(self) -> Self:
        if self._asynchronous_source is not None:
            raise TypeError("The items come from an asynchronous iterable: use `async for` on the results.")
        return self

    def __next__(self) -> Any:
        self._target.check()
        self._claim()
        try:
            while True:
                item = self._next_ended()
                if item is None:
                    if self._is_exhausted and self._window.is_empty:
                        self._finish()
                        raise StopIteration
                    self._wait()
                elif not _is_skipped(self._rules, item):
                    return self._outcome(item)
        except BaseException:  # even at the end and at Ctrl-C, because this object may stay referenced
            self.close()
            raise
        finally:
            self._is_busy = False

    def _wait(self) -> None:
        changed = threading.Event()
        self._window.wake = changed.set
        try:
            if not self._window.has_results():
                self._target.wait(changed.wait, self._pause_s())
        finally:
            self._window.wake = None

    # ---- event loops

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        self._claim()
        try:
            while True:
                self._take_arrived()
                item = self._next_ended()
                if item is None:
                    if self._is_exhausted and self._window.is_empty:
                        self._finish()
                        raise StopAsyncIteration
                    await self._wait_on_loop()
                elif not _is_skipped(self._rules, item):
                    return self._outcome(item)
        except BaseException:
            self.close()
            raise
        finally:
            self._is_busy = False

    async def _wait_on_loop(self) -> None:
        loop = asyncio.get_running_loop()
        changed: asyncio.Future[None] = loop.create_future()
        queue = self._target.connection.loop_queues.get(loop)
        self._window.wake = lambda: queue.post(settle, changed)
        waiting: set[asyncio.Future[Any]] = {changed}
        if self._arriving is not None:
            waiting.add(self._arriving)
        task = self._target.connection.current_task()
        if task is not None:  # this coroutine runs as a Dask task
            task.secede()
        try:
            if not self._window.has_results():
                await asyncio.wait(waiting, timeout=self._pause_s(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._window.wake = None
            if task is not None:
                task.rejoin()

    def _take_arrived(self) -> None:
        """Start the call of an item that an asynchronous source has yielded, and request the next item."""
        arriving = self._arriving
        if arriving is not None and arriving.done():
            self._arriving = None
            try:
                self._window.add(arriving.result())
            except StopAsyncIteration:
                self._asynchronous_source = None
            except Exception as error:  # raised after the results of the earlier items
                self._asynchronous_source, self._source_error = None, error
        source = self._asynchronous_source
        if self._arriving is None and source is not None and self._window.may_add(self._limit()):
            self._arriving = asyncio.ensure_future(_next_of(source))


class OneResult(MapResults):
    """The result of a single item; its errors do not name an item."""

    def _name(self, error: Exception, item: Item) -> None:
        pass


def _is_skipped(rules: Rules, item: Item) -> bool:
    error = item.response.failure()
    return error is not None and rules.errors == "skip" and not ends_all(error)


async def _next_of(source: AsyncIterator[Any]) -> Any:
    return await anext(source)
