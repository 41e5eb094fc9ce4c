"""The body of a request, between the connection that adds parts and the application that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from daskserve.common.types import Message
from daskserve.errors import BodyTooLargeError
from daskserve.proxies.asgi import Headers
from daskserve.proxies.exchange.limits.limits import BODY_SIZE, Limits
from daskserve.proxies.exchange.request.body_buffer import BodyBuffer

#: Reading from the connection pauses while more bytes than this are unread.
HIGH_WATER_BYTES = 256 * 1024

#: The status, the text and the headers of an error response.
Refusal: TypeAlias = tuple[int, str, Headers]
NO_MEMORY: Refusal = (
    503,
    "The server holds as many request bodies as max_buffered_bytes allows; try again later.",
    ((b"retry-after", b"1"),),
)
#: Bodies up to this size are received even if the budget is used up.
SMALL_BYTES = 64 * 1024


class RequestBody:
    """The body of one request: the only place where a proxy keeps it in memory.

    The object itself is the application's ``receive``, so that the ingress can find it.

    Attributes
    ----------
    excess : tuple or None
        The error response if the body exceeds a limit.
    received_bytes : int
        The size of all parts received so far.
    held_bytes : int
        How many bytes of the budget the body uses.
    is_ended : bool
        Whether the body is complete.
    is_asked : bool
        Whether the client does not wait for 100 Continue, or was sent it.
    is_withheld : bool
        Whether the client still waits for 100 Continue before it sends the body.
    is_refused : bool
        Whether the server has ended the request because of its body.
    """

    def __init__(self, *, is_ended: bool) -> None:
        self.is_ended = is_ended
        self.received_bytes = 0
        self.held_bytes = 0
        self._is_closed = False
        self._chunks: deque[bytes] | None = None
        self._room: asyncio.Future[None] | None = None
        self._changed: asyncio.Event | None = None
        self.excess: Refusal | None = None
        self._limits: Limits | None = None
        # The declared size, if there is one, and the maximum size.
        self._length: int | None = None
        self._max_bytes = float("inf")
        # The received parts, while the body is being gathered.
        self._gathered: BodyBuffer | None = None
        # Whether parts are dropped on arrival.
        self._drops = False
        # Whether the body counts in the budget until `release`, because it is passed on as a whole.
        self._is_kept = False
        self.is_asked = True
        self.is_withheld = False
        self.is_refused = False
        self._buffered_bytes = 0
        self._is_taken = False

    @property
    def is_full(self) -> bool:
        """Whether reading from the connection pauses until the application reads."""
        return self._room is not None

    def feed(self, chunk: bytes) -> asyncio.Future[None] | None:
        """Add a part of the body; return a future to await before reading more, or None."""
        size_bytes = len(chunk)
        if not self._count(size_bytes):
            return None
        if self._gathered is not None:
            self._gathered.write(chunk)
            return None
        if self._chunks is None:
            self._chunks = deque()
        self._chunks.append(chunk)
        self._buffered_bytes += size_bytes
        self._wake()
        if self._buffered_bytes <= HIGH_WATER_BYTES:
            return None
        self._room = asyncio.get_running_loop().create_future()
        return self._room

    def _count(self, size_bytes: int) -> bool:
        """Count a received part; return whether to keep it."""
        self.received_bytes += size_bytes
        if self._is_closed:
            return False
        if self.received_bytes > self._max_bytes:
            self._exceed_size()
        if self._drops:
            return False
        if self._limits is not None:
            self.held_bytes += size_bytes
            budget = self._limits.received
            budget.own_bytes += size_bytes
            if self.held_bytes > SMALL_BYTES and budget.used_bytes > budget.size_bytes:
                self.excess = self.excess or NO_MEMORY
        return True

    @property
    def takes_room(self) -> bool:
        """Whether the next part can be received into the memory that `room` returns."""
        return self._gathered is not None and self._gathered.size_bytes < (self._length or 0)

    def room(self) -> memoryview | None:
        """Return the memory for the next part; None if the body is not gathered, or is longer than
        declared."""
        return None if self._gathered is None else self._gathered.room()

    def fill(self, size_bytes: int) -> None:
        """Add a part that was received into this memory."""
        if self._count(size_bytes) and self._gathered is not None:
            self._gathered.filled(size_bytes)

    def end(self) -> None:
        """Record that the body is complete."""
        self.is_ended = True
        self._wake()

    def close(self) -> None:
        """Drop all parts, and return ``http.disconnect`` from all further calls of `receive`."""
        self._is_closed = True
        self._gathered = None
        if self._chunks:
            self._chunks.clear()
            self._buffered_bytes = 0
        if self.held_bytes and not (self._is_kept and self._is_taken):
            self.release()
        if self._room is not None:
            self._make_room()
        if self._changed is not None:
            self._wake()

    def release(self) -> None:
        """Release the body's share of the budget, because the application has ended."""
        if self.held_bytes and self._limits is not None:
            self._limits.received.own_bytes -= self.held_bytes
            self.held_bytes = 0

    def expect(self, length: int | None, max_bytes: float, limits: Limits) -> None:
        """Set the declared size (None for a chunked body), the maximum size, and the limits."""
        self._limits, self._length, self._max_bytes = limits, length, max_bytes
        if length is not None and length > max_bytes:
            self._exceed_size()

    def limit_to(self, max_bytes: float) -> None:
        """Set the maximum size of the backend that gets the body.

        Raises
        ------
        BodyTooLargeError
            The declared or received size is larger.
        """
        self._max_bytes = max_bytes
        if self.received_bytes > max_bytes or (self._length or 0) > max_bytes:
            self._exceed_size()
        if self.excess is not None:
            raise BodyTooLargeError(self.excess[1])

    def _exceed_size(self) -> None:
        if self.excess is None:
            text = f"The request body is larger than the {self._max_bytes} bytes that max_body_bytes allows."
            self.excess = 413, text, ()
            if self._limits is not None:
                self._limits.hit(BODY_SIZE)

    async def gather(self, *, drops: bool = False) -> None:
        """Wait until the body is complete or its client has disconnected.

        `receive` then returns the body as one message, which is empty if ``drops``.
        """
        chunks, self._chunks = self._chunks, None
        self._buffered_bytes = 0
        if drops:
            self._drops = True
            self.release()
        else:
            self._is_kept = True
            self._gathered = BodyBuffer(self._length or 0)
            for chunk in chunks or ():
                self._gathered.write(chunk)
        self._make_room()
        while not self.is_ended and not self._is_closed:
            await self._wait()
        if self._gathered is not None:
            self._chunks, self._gathered = deque((self._gathered.take(),)), None

    async def receive(self) -> Message:
        """Wait for the next ASGI message and return it."""
        while True:
            if self._is_closed:
                return {"type": "http.disconnect"}
            if self._chunks:
                chunk = self._chunks.popleft()
                self._buffered_bytes -= len(chunk)
                if self._limits is not None and not self._is_kept:
                    self.held_bytes -= len(chunk)
                    self._limits.received.own_bytes -= len(chunk)
                if self._buffered_bytes <= HIGH_WATER_BYTES // 2:
                    self._make_room()
                self._is_taken = self.is_ended and not self._chunks
                return {"type": "http.request", "body": chunk, "more_body": not self._is_taken}
            if self.is_ended and not self._is_taken:
                self._is_taken = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await self._wait()

    __call__ = receive

    async def _wait(self) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.clear()
        await self._changed.wait()

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()


class BodyOnDemand(RequestBody):
    """A body whose client waits for 100 Continue, which the application's first read sends by calling
    ``ask``."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__(is_ended=False)
        self._ask = ask
        self.is_asked = False
        self.is_withheld = True

    def feed(self, chunk: bytes) -> asyncio.Future[None] | None:
        self.is_withheld = False
        return super().feed(chunk)

    async def receive(self) -> Message:
        self._ask_once()
        return await super().receive()

    __call__ = receive

    async def gather(self, *, drops: bool = False) -> None:
        self._ask_once()
        await super().gather(drops=drops)

    def _ask_once(self) -> None:
        if not self.is_asked:
            self.is_asked = True
            self.is_withheld = False
            self._ask()
