"""The body of a request, between the socket that pushes it and the application that pulls it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from daskserve.types import Message

#: With more unread bytes than this, reading from the socket pauses.
HIGH_WATER_BYTES = 256 * 1024


class RequestBody:
    """The receiving side of one ASGI request.

    Attributes
    ----------
    received_bytes : int
        The size of all parts received so far.
    is_ended : bool
        Whether the body is complete.
    is_asked : bool
        Whether the client has been asked for the body, or sends it without.
    is_withheld : bool
        Whether the client keeps the body, because it was not asked for it.
    """

    def __init__(self, *, is_ended: bool) -> None:
        self.is_ended = is_ended

    # Class attributes, because most requests have no body and change none of them.
    _chunks: deque[bytes] | None = None
    received_bytes = 0
    is_asked = True
    is_withheld = False
    _buffered_bytes = 0
    _is_taken = False
    _is_closed = False
    _news: asyncio.Event | None = None
    _room: asyncio.Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether reading is paused until the application reads."""
        return self._room is not None

    def feed(self, chunk: bytes) -> asyncio.Future[None] | None:
        """Add a part of the body; returns a future to wait for before reading more, or None."""
        self.received_bytes += len(chunk)
        if self._is_closed:
            return None
        if self._chunks is None:
            self._chunks = deque()
        self._chunks.append(chunk)
        self._buffered_bytes += len(chunk)
        self._wake()
        if self._buffered_bytes <= HIGH_WATER_BYTES:
            return None
        self._room = asyncio.get_running_loop().create_future()
        return self._room

    def end(self) -> None:
        """Note that the body is complete."""
        self.is_ended = True
        self._wake()

    def close(self) -> None:
        """Return ``http.disconnect`` from `receive` from now on, and drop all further parts."""
        self._is_closed = True
        if self._chunks:
            self._chunks.clear()
            self._buffered_bytes = 0
        if self._room is not None:
            self._make_room()
        if self._news is not None:
            self._wake()

    async def receive(self) -> Message:
        """Return the next ASGI message; wait until there is one."""
        while True:
            if self._is_closed:
                return {"type": "http.disconnect"}
            if self._chunks:
                chunk = self._chunks.popleft()
                self._buffered_bytes -= len(chunk)
                if self._buffered_bytes <= HIGH_WATER_BYTES // 2:
                    self._make_room()
                self._is_taken = self.is_ended and not self._chunks
                return {"type": "http.request", "body": chunk, "more_body": not self._is_taken}
            if self.is_ended and not self._is_taken:
                self._is_taken = True
                return {"type": "http.request", "body": b"", "more_body": False}
            if self._news is None:
                self._news = asyncio.Event()
            self._news.clear()
            await self._news.wait()

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()


class BodyOnDemand(RequestBody):
    """A body whose client waits to be asked for it; ``ask`` is called when the application first reads."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__(is_ended=False)
        self._ask = ask
        self.is_asked = False
        self.is_withheld = True

    def feed(self, chunk: bytes) -> asyncio.Future[None] | None:
        self.is_withheld = False
        return super().feed(chunk)

    async def receive(self) -> Message:
        if not self.is_asked:
            self.is_asked = True
            self.is_withheld = False
            self._ask()
        return await super().receive()
