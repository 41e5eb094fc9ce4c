"""The future of one call, which several threads may create, end and wait for.

This is a reduced `concurrent.futures.Future` at a quarter of the cost: the standard one creates a condition
variable per call, which most calls never use. There is no lock either. Anything that two threads may both
claim is in a list: `list.pop` and `list.remove` return it to only one of them. Both threads may append an
end, but only the first one in the list is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from numbers import Real
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PendingCall(Generic[T]):
    """The outcome of a call. Every method may be called from any thread; only the first end is used."""

    __slots__ = ("__weakref__", "_callbacks", "_ends", "_stop", "leaves_value")

    def __init__(self) -> None:
        #: The end of the call, as (value, error). Only the first entry is used, and it is never removed.
        self._ends: list[tuple[Any, BaseException | None]] = []
        self._callbacks: list[Callable[[PendingCall[Any]], object]] = []
        self._stop: list[Callable[[], object]] | None = None
        #: Whether a large value is kept in the process that created it, because no caller waits to read it.
        self.leaves_value = True

    def done(self) -> bool:
        """Return whether the call has ended, with a value or an error."""
        return bool(self._ends)

    def cancelled(self) -> bool:
        """Return whether the call was cancelled before it had a result or an error."""
        return type(self.exception()) is CancelledError

    def cancel(self) -> bool:
        """End the call as cancelled; return whether it is cancelled, by this call or an earlier one."""
        return self._end(None, CancelledError()) or self.cancelled()

    def set_result(self, value: T) -> None:
        """End the call with a value."""
        self._end(value, None)

    def set_error(self, error: BaseException) -> None:
        """End the call with an error."""
        self._end(None, error)

    def result(self, timeout_s: float | None = None) -> T:
        """Block this thread until the call has ended; return its value or raise its error.

        Raises
        ------
        TimeoutError
            The call did not end within ``timeout_s``, or ended with this error.
        concurrent.futures.CancelledError
            The call was cancelled.
        """
        if not self.wait(timeout_s):
            raise TimeoutError
        value, error = self._ends[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until the call has ended, up to ``timeout_s``; return whether it has."""
        if self._ends:
            return True
        if timeout_s is not None:
            given: Any = timeout_s
            if not isinstance(given, Real):
                raise TypeError(f"timeout_s must be a number of seconds, or None; got {given!r}.")
            timeout_s = min(float(given), threading.TIMEOUT_MAX)  # locks refuse more, such as infinity
        ended = threading.Event()

        def wake(_: PendingCall[Any]) -> None:
            ended.set()

        self.add_done_callback(wake)
        if ended.wait(timeout_s):
            return True
        with suppress(ValueError):  # the call is just ending
            self._callbacks.remove(wake)
        return bool(self._ends)

    def exception(self) -> BaseException | None:
        """Return the error of an ended call; None if it has a value or has not ended."""
        return self._ends[0][1] if self._ends else None

    def add_done_callback(self, callback: Callable[[PendingCall[Any]], object]) -> None:
        """Call back once when the call has ended: on the ending thread, or at once on this one."""
        if not self._ends:
            self._callbacks.append(callback)
            # Check after adding, because `_end` checks the callbacks after ending, so one of the two always
            # sees the other.
            if not self.done():
                return
            try:
                self._callbacks.remove(callback)
            except ValueError:
                return  # the ending thread calls it
        callback(self)

    def on_cancel(self, stop: Callable[[], object]) -> None:
        """Call ``stop`` if the call is cancelled, or now if it already is cancelled; holds only one
        function."""
        self._stop = [stop]
        if self._ends:
            self._call_stop()

    def _end(self, value: Any, error: BaseException | None) -> bool:
        if self._ends:
            return False
        ends, end = self._ends, (value, error)
        ends.append(end)
        if ends[0] is not end:
            del ends[1:]  # another thread was first, so release this end's value
            return False
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:
                break  # the thread that added it calls it
            callback(self)
        if self._stop is not None:
            self._call_stop()
        return True

    def _call_stop(self) -> None:
        stop, self._stop = self._stop, None  # `stop` may refer to this call: avoid a reference cycle
        if stop and self.cancelled():
            try:
                only = stop.pop()
            except IndexError:
                return  # another thread has taken it
            only()
