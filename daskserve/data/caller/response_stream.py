"""The caller's end of a streaming call: items from the loop of the process's link to any thread or loop.

The link's loop puts items into a `Pipe`, as they arrive and ahead of need, but no more than `AHEAD_BYTES` of
them: then it waits, and with it, over the channel's flow control, the generator. Whoever iterates takes them
out. There is one thread switch for all the items that have come meanwhile, not one for each.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Self

from daskserve.cluster.base import Link
from daskserve.loops.pending_call import PendingCall
from daskserve.payload import load, message_bytes
from daskserve.types import Message, Payload

#: How much may wait for whoever iterates; one item may, however large.
AHEAD_BYTES = 64 * 1024


class _Cancelled(concurrent.futures.CancelledError):
    """The stream itself was cancelled, not something that user code met."""


class Pipe:
    """Items on their way out of an event loop. Each method says where it may be called."""

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
            # The reader of a closed one has left: wait for the cancellation that is on its way. A generator
            # on this very loop that never waits for anything would not let it come through otherwise.
            if self._is_closed or self._held_bytes >= AHEAD_BYTES:
                room = self._room = asyncio.get_running_loop().create_future()
            wake = self._take_reader()
        wake()
        if room is not None:
            await room

    # ---- anywhere

    def close_after(self, call: PendingCall[None]) -> None:
        """Close as a call has ended: with its error, if it has one."""
        if call.cancelled():
            self.close(_Cancelled("The call was cancelled."), at_once=True)
        else:
            self.close(call.exception())

    def close(self, error: BaseException | None = None, *, at_once: bool = False) -> None:
        """Take no more items, and say why if it is an error; with ``at_once`` forget those there are."""
        with self._lock:
            if at_once:
                self._items.clear()
            if not self._is_closed:
                self._is_closed = True
                self._error = error
            room, self._room = self._room, None
            wake = self._take_reader()
        wake()
        _let_on(room)

    def take(self, wake: Callable[[], None]) -> Payload | None:
        """Return the next item; None if there is none yet, and then ``wake`` is called when there is news.

        Raises
        ------
        StopIteration
            There are no more.
        Exception
            What the stream was closed with, once.
        """
        with self._lock:
            if self._wake_reader is not None:
                raise RuntimeError(
                    "Two iterate over the same stream at the same time; let one of them do it."
                )
            if not self._items:
                if self._is_closed:
                    error, self._error = self._error, None
                    raise StopIteration if error is None else error
                self._wake_reader = wake
                return None
            payload, size_bytes = self._items.popleft()
            self._held_bytes -= size_bytes
            room = None
            if self._room is not None and self._held_bytes < AHEAD_BYTES:
                room, self._room = self._room, None
        _let_on(room)
        return payload

    def forget_reader(self) -> None:
        """Wake nobody."""
        with self._lock:
            self._wake_reader = None

    def _take_reader(self) -> Callable[[], None]:
        wake, self._wake_reader = self._wake_reader, None
        return wake or _nobody


def _nobody() -> None:
    pass


def _let_on(room: asyncio.Future[None] | None) -> None:
    if room is not None:
        with suppress(RuntimeError):  # what a closed loop raises
            room.get_loop().call_soon_threadsafe(_settle, room)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _wake_on(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the reader's loop is closed, and the reader gone with it
        loop.call_soon_threadsafe(_settle, future)


class ResponseGenerator:
    """The items of a streaming call: iterate over it, with ``async for`` or, outside of event loops, ``for``.

    The call begins at once. It ends with its last item, with an error, by `cancel` or `close`, or when
    nobody holds this any more; in all but the first case the generator in the replica is closed.
    """

    def __init__(self, pipe: Pipe, future: PendingCall[None], link: Link, request_id: str) -> None:
        self._future = future
        self._pipe = pipe
        self._link = link
        self.request_id = request_id
        # Nothing that runs holds this object, only its pipe: so it is seen when nobody wants items any more.
        future.add_done_callback(pipe.close_after)

    def __repr__(self) -> str:
        state = "cancelled" if self._future.cancelled() else "done" if self._future.done() else "pending"
        return f"<ResponseGenerator {self.request_id} {state}>"

    def __del__(self) -> None:
        # By way of the loop, because this may be called anywhere, in the middle of anything.
        if not self._future.done():
            with suppress(RuntimeError):  # what a closed loop raises
                self._link.loop.call_soon_threadsafe(self._future.cancel)

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "A stream belongs to the code that made the call: it cannot be pickled, or passed to another "
            "handle. Iterate over it, and pass its items on."
        )

    def __await__(self) -> NoReturn:
        raise TypeError("A stream has many results: use `async for` on it, or call without stream=True.")

    def result(self, timeout_s: float | None = None) -> NoReturn:
        """There is no single result: raises `TypeError`."""
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
            except _Cancelled:
                raise asyncio.CancelledError(f"Request {self.request_id} was cancelled.") from None
            if payload is not None:
                return load(payload)
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
            payload = self._pipe.take(changed.set)
            if payload is not None:
                return load(payload)
            try:
                if self._link.runs_here():
                    raise RuntimeError(
                        "`for` would block the event loop that has to produce the items; use `async for`."
                    )
                changed.wait()
            finally:
                self._pipe.forget_reader()
            changed.clear()

    # ---- the end

    def done(self) -> bool:
        """Whether the call has ended; there may be items left to take."""
        return self._future.done()

    def cancel(self) -> bool:
        """Give the call up; whoever iterates gets a ``CancelledError``. Returns whether it still went on."""
        if self._future.done() or self._link.loop.is_closed():
            return False
        return self._future.cancel()

    def close(self) -> None:
        """Give the call up, if it still goes on; there are no more items."""
        self._pipe.close(at_once=True)
        self.cancel()

    async def aclose(self) -> None:
        """Do as `close` does; for `contextlib.aclosing`."""
        self.close()
