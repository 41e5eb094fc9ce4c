"""The future of one call: made on one thread, ended on another, waited for on a third.

`concurrent.futures.Future` with what calls need and no more, at a quarter of the price: that one makes a
condition variable for each call, though nobody blocks a thread on it. Nor is there a lock: what two threads
may both be after is in a list, and `list.pop` and `list.remove` give it to one of them; and both may append
their end, but there is one that stands first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PendingCall(Generic[T]):
    """What a call comes to. Every method may be called from any thread; the first end counts."""

    __slots__ = ("__weakref__", "_callbacks", "_ends", "_stop")

    def __init__(self) -> None:
        #: The call's end, a value and an error, once it has one. The first counts, and nothing removes it.
        self._ends: list[tuple[Any, BaseException | None]] = []
        self._callbacks: list[Callable[[PendingCall[Any]], object]] = []
        self._stop: list[Callable[[], object]] | None = None

    def done(self) -> bool:
        """Whether the call has ended, well or not."""
        return bool(self._ends)

    def cancelled(self) -> bool:
        """Whether it was cancelled before it ended otherwise."""
        return type(self.exception()) is CancelledError

    def cancel(self) -> bool:
        """End it as cancelled; return whether that is, or was before, how it ended."""
        return self._end(None, CancelledError()) or self.cancelled()

    def set_result(self, value: T) -> None:
        """End it with a value."""
        self._end(value, None)

    def set_error(self, error: BaseException) -> None:
        """End it with an error."""
        self._end(None, error)

    def result(self, timeout_s: float | None = None) -> T:
        """Return or raise what the call has come to, blocking this thread until then.

        Raises
        ------
        TimeoutError
            It has not ended within ``timeout_s``, or it ended with one.
        concurrent.futures.CancelledError
            It was cancelled.
        """
        if not self._ends:
            ended = threading.Event()
            self.add_done_callback(lambda _: ended.set())
            if not ended.wait(timeout_s):
                raise TimeoutError
        value, error = self._ends[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def exception(self) -> BaseException | None:
        """Return the error of a call that has ended; None if it ended well, or has not ended."""
        return self._ends[0][1] if self._ends else None

    def add_done_callback(self, callback: Callable[[PendingCall[Any]], object]) -> None:
        """Call back once, when the call has ended: on the thread that ends it, or at once on this one."""
        if not self._ends:
            self._callbacks.append(callback)
            # Looked at after joining, as `_end` looks at the callbacks last: one of the two sees the other.
            if not self.done():
                return
            try:
                self._callbacks.remove(callback)
            except ValueError:
                return  # it is being called
        callback(self)

    def on_cancel(self, stop: Callable[[], object]) -> None:
        """Have what would end the call stopped when it is cancelled, or now, if it has been; for one only."""
        self._stop = [stop]
        if self._ends:
            self._call_stop()

    def _end(self, value: Any, error: BaseException | None) -> bool:
        if self._ends:
            return False
        ends, end = self._ends, (value, error)
        ends.append(end)
        if ends[0] is not end:
            del ends[1:]  # another thread was first; its end keeps nothing of this one's alive
            return False
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:
                break  # who has added it calls it
            callback(self)
        if self._stop is not None:
            self._call_stop()
        return True

    def _call_stop(self) -> None:
        stop, self._stop = self._stop, None  # it may refer to this call
        if stop and self.cancelled():
            try:
                only = stop.pop()
            except IndexError:
                return  # another thread has it
            only()
