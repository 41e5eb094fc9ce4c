"""The caller's end of a streaming call: passes items from the connection's loop to any thread or loop.

The connection's loop puts items into a `Pipe` as they arrive, up to `MAX_BUFFERED_BYTES`. Then the loop
waits, and the channel's flow control makes the generator wait as well. One switch to the reader's thread
serves all items that have arrived in the meantime.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Self

from daskserve.cluster.protocols.base import ClusterConnection
from daskserve.common.types import Message, Payload
from daskserve.data.caller.blocking import refuse_in_loop
from daskserve.data.caller.calls.naming import as_read
from daskserve.data.caller.calls.response import cancelled_error
from daskserve.errors import PassedResponseError
from daskserve.loops.event_loop import settle
from daskserve.loops.pending_call import PendingCall
from daskserve.payload.pickling import message_bytes
from daskserve.payload.shown_errors import shown_in_notebook

#: Maximum size of the items that wait for the reader; a single item may be larger.
MAX_BUFFERED_BYTES = 64 * 1024


class Pipe:
    """A bounded buffer between an event loop and a reader; comments say where each method may run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[tuple[Payload, int]] = deque()
        self._held_bytes = 0
        self._is_closed = False
        self._error: BaseException | None = None
        self._wake_reader: Callable[[], None] | None = None
        self._room: asyncio.Future[None] | None = None

    # ---- on the loop

    async def put(self, message: Message) -> None:
        """Add an item; return when there is room for another."""
        size_bytes = message_bytes(message)
        room = None
        with self._lock:
            if not self._is_closed:
                self._items.append((message["payload"], size_bytes))
                self._held_bytes += size_bytes
            # If the pipe is closed, its reader has left: wait here for the cancellation that follows.
            # Otherwise a generator on this loop that never waits would block the cancellation.
            if self._is_closed or self._held_bytes >= MAX_BUFFERED_BYTES:
                room = self._room = asyncio.get_running_loop().create_future()
            wake = self._take_reader()
        wake()
        if room is not None:
            await room

    # ---- anywhere

    def close_after(self, request_id: str, call: PendingCall[None]) -> None:
        """Close the pipe with the outcome of a call that has ended."""
        if call.cancelled():
            self.close(cancelled_error(request_id), at_once=True)
        else:
            self.close(call.exception())

    def close(self, error: BaseException | None = None, *, at_once: bool = False) -> None:
        """Accept no more items; raise ``error`` after the last one. ``at_once`` drops waiting items."""
        with self._lock:
            if at_once:
                self._items.clear()
            if not self._is_closed:
                self._is_closed = True
                self._error = error
            room, self._room = self._room, None
            wake = self._take_reader()
        wake()
        _resume(room)

    def take(self, wake: Callable[[], None]) -> Payload | None:
        """Return the next item; if there is none yet, return None and call ``wake`` on the next change.

        Raises
        ------
        StopIteration
            There are no more items.
        Exception
            The error that the stream was closed with; raised once.
        """
        payload = error = room = None
        with self._lock:
            if self._wake_reader is not None:
                raise RuntimeError(
                    "Two readers iterate over the same stream at the same time; use one reader."
                )
            if self._items:
                payload, size_bytes = self._items.popleft()
                self._held_bytes -= size_bytes
                if self._room is not None and self._held_bytes < MAX_BUFFERED_BYTES:
                    room, self._room = self._room, None
            elif self._is_closed:
                error, self._error = self._error or StopIteration(), None
            else:
                self._wake_reader = wake
        if error is not None:
            try:
                raise shown_in_notebook(as_read(error))  # not under the lock: this may run user code
            finally:
                del error  # as in `Response._check`
        _resume(room)
        return payload

    def forget_reader(self) -> None:
        """Remove the waiting reader, so that no change wakes it."""
        with self._lock:
            self._wake_reader = None

    def _take_reader(self) -> Callable[[], None]:
        wake, self._wake_reader = self._wake_reader, None
        return wake or _do_nothing


def _do_nothing() -> None:
    pass


def _resume(room: asyncio.Future[None] | None) -> None:
    if room is not None:
        with suppress(RuntimeError):  # raised by a closed loop
            room.get_loop().call_soon_threadsafe(settle, room)


def _wake_on(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the reader's loop is closed
        loop.call_soon_threadsafe(settle, future)


class ResponseGenerator:
    """The items of a streaming call: iterate over it, with ``async for`` or, outside of event loops, ``for``.

    The call begins at once. It ends with its last item, with an error, by `cancel` or `close`, or when this
    object is garbage collected. In all but the first case the generator in the replica is closed.
    """

    def __init__(
        self, pipe: Pipe, future: PendingCall[None], connection: ClusterConnection, request_id: str
    ) -> None:
        self._future = future
        self._pipe = pipe
        self._connection = connection
        self.request_id = request_id
        # Only the pipe is referenced here, so this object is collected when its reader drops it.
        future.add_done_callback(partial(pipe.close_after, request_id))

    def __repr__(self) -> str:
        state = "cancelled" if self._future.cancelled() else "done" if self._future.done() else "pending"
        return f"<ResponseGenerator {self.request_id} {state}>"

    def __del__(self) -> None:
        # Scheduled on the loop, because the garbage collector may call this on any thread at any time.
        if not self._future.done():
            with suppress(RuntimeError):  # raised by a closed loop
                self._connection.loop.call_soon_threadsafe(self._future.cancel)

    def __reduce__(self) -> NoReturn:
        raise PassedResponseError(
            "A stream belongs to the code that made the call: it cannot be pickled, or passed to another "
            "handle. Iterate over it, and pass its items on."
        )

    def __await__(self) -> NoReturn:
        raise TypeError("A stream has many results: use `async for` on it, or call without stream=True.")

    def result(self, timeout_s: float | None = None) -> NoReturn:
        """Raise `TypeError`: a stream has no single result."""
        raise TypeError("A stream has many results: iterate over it, or call without stream=True.")

    # ---- iteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        loop = asyncio.get_running_loop()
        changed: asyncio.Future[None] = loop.create_future()
        while True:
            try:
                payload = self._pipe.take(partial(_wake_on, loop, changed))
            except StopIteration:
                raise StopAsyncIteration from None
            except BaseException:
                del self  # as in `Response._check`
                raise
            if payload is not None:
                return payload.load()
            try:
                await changed
            except asyncio.CancelledError:
                self.close()
                raise
            changed = loop.create_future()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        changed = threading.Event()
        while True:
            try:
                payload = self._pipe.take(changed.set)
            except BaseException:
                del self  # as in `Response._check`
                raise
            if payload is not None:
                return payload.load()
            try:
                refuse_in_loop(self._connection, "`for`", "use `async for`")
                changed.wait()
            finally:
                self._pipe.forget_reader()
            changed.clear()

    # ---- closing

    def done(self) -> bool:
        """Return whether the call has ended; items may still wait for the reader."""
        return self._future.done()

    def cancelled(self) -> bool:
        """Return whether the call was cancelled before it ended."""
        return self._future.cancelled()

    def cancel(self) -> bool:
        """Cancel the call; its reader gets a `RequestCancelledError`. Return whether it still ran."""
        if self._future.done() or self._connection.loop.is_closed():
            return False
        return self._future.cancel()

    def close(self) -> None:
        """Cancel the call if it still runs; there are no more items."""
        self._pipe.close(at_once=True)
        self.cancel()

    async def aclose(self) -> None:
        """Close the stream like `close`; for `contextlib.aclosing`."""
        self.close()
