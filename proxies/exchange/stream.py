"""The protocols of a connection that exchanges and WebSockets use, and a stream over an asyncio transport."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from tornado.iostream import StreamClosedError

#: With more unread bytes than this, reading from the transport pauses.
READ_AHEAD_BYTES = 64 * 1024


class Stream(Protocol):
    """A byte stream; Tornado's ``IOStream`` is the model."""

    @property
    def socket(self) -> Any:
        """The socket, which knows its addresses."""

    def write(self, data: bytes | memoryview, /) -> asyncio.Future[None]:
        """Send; the future is done when there is room for more. Raises ``StreamClosedError``."""

    def writing(self) -> bool:
        """Whether written bytes are not sent yet."""

    @property
    def sent_bytes(self) -> int:
        """How many bytes the operating system has taken; it grows while a client reads a long message."""

    def read_bytes(self, num_bytes: int, *, partial: bool) -> Awaitable[bytes]:
        """Return the next bytes. Raises ``StreamClosedError``."""

    def set_nodelay(self, value: bool, /) -> None:
        """Send small parts at once."""

    def set_close_callback(self, callback: Callable[[], None] | None, /) -> None:
        """Call back when the connection is closed."""

    def closed(self) -> bool:
        """Whether the connection is closed."""

    def close(self) -> None:
        """Close the connection now."""


class ConnectionReader(Protocol):
    """Reads the requests of one connection."""

    def finish(self) -> None:
        """Go on to the next request; close the connection if this one was not read to its end."""

    def close(self) -> None:
        """Close the connection."""

    def detach(self) -> Any:
        """Stop reading, and leave the stream to a WebSocket."""


class TransportStream(asyncio.Protocol):
    """A `Stream` over an asyncio transport.

    Only a WebSocket reads from it, after `take_over` has made it the transport's protocol. Until then another
    protocol reads, and passes on ``pause_writing``, ``resume_writing`` and ``connection_lost``. The stream is
    in ``open_streams`` until the connection is closed.
    """

    def __init__(self, transport: asyncio.Transport, open_streams: set[TransportStream]) -> None:
        self.socket = transport.get_extra_info("socket")
        self._transport = transport
        self._open_streams = open_streams
        open_streams.add(self)
        self._loop = asyncio.get_running_loop()
        # One future for all writers, done while there is room.
        self._room: asyncio.Future[None] = self._loop.create_future()
        self._room.set_result(None)
        self._is_lost = False
        self._accepted_bytes = 0
        self._unread = bytearray()
        self._is_reading_paused = False
        self._reading: tuple[int, asyncio.Future[bytes]] | None = None
        self._on_close: Callable[[], None] | None = None

    def write(self, data: bytes | memoryview, /) -> asyncio.Future[None]:
        if self._transport.is_closing():
            raise StreamClosedError
        self._accepted_bytes += len(data)
        self._transport.write(data)
        return self._room

    def writing(self) -> bool:
        return not self._is_lost and self._transport.get_write_buffer_size() > 0

    @property
    def sent_bytes(self) -> int:
        """How many bytes the operating system has taken."""
        return self._accepted_bytes - (0 if self._is_lost else self._transport.get_write_buffer_size())

    def set_nodelay(self, value: bool, /) -> None:
        """Do nothing: asyncio's TCP transports never delay."""

    def set_close_callback(self, callback: Callable[[], None] | None, /) -> None:
        self._on_close = callback

    def closed(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._unread.clear()
        self._transport.close()
        if self.writing() or self._transport.get_extra_info("ssl_object") is not None:
            # uvloop writes at the end of the loop's turn; what the client does not take then is dropped. The
            # client's answer to the end of TLS is not waited for either.
            self._loop.call_soon(self._transport.abort)

    def take_over(self) -> None:
        """Read from the transport from now on."""
        # There is room only if nothing waits: unread messages of a WebSocket count for pings and for closing.
        # The limit is not 0, because an empty TLS transport would be at that limit.
        self._transport.set_write_buffer_limits(1, 0)
        self._transport.set_protocol(self)

    def read_bytes(self, num_bytes: int, *, partial: bool) -> asyncio.Future[bytes]:
        """Return up to ``num_bytes`` as soon as there are any."""
        future: asyncio.Future[bytes] = self._loop.create_future()
        if not self._unread and self.closed():
            raise StreamClosedError
        self._reading = (num_bytes, future)
        self._hand_over()
        return future

    # ---- called by the transport, or by the protocol that reads before `take_over`

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._hand_over()
        if len(self._unread) > READ_AHEAD_BYTES and not self._is_reading_paused and not self.closed():
            self._is_reading_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        if self._room.done():
            self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        if not self._room.done():
            self._room.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._open_streams.discard(self)
        if not self._room.done():
            self._room.set_exception(StreamClosedError())
            self._room.exception()  # retrieved here: it may have no waiter
        if self._reading is not None:
            _, future = self._reading
            self._reading = None
            if not future.done():
                future.set_exception(StreamClosedError())
        # Later, so that a reader of the last bytes sees them before the end.
        self._loop.call_soon(self._tell)

    def _hand_over(self) -> None:
        if self._reading is None or not self._unread:
            return
        num_bytes, future = self._reading
        self._reading = None
        if future.done():
            return  # cancelled
        future.set_result(bytes(self._unread[:num_bytes]))
        del self._unread[:num_bytes]
        if self._is_reading_paused and len(self._unread) <= READ_AHEAD_BYTES // 2 and not self.closed():
            self._is_reading_paused = False
            self._transport.resume_reading()

    def _tell(self) -> None:
        callback, self._on_close = self._on_close, None
        if callback is not None:
            callback()


def addresses_of(
    sock: socket.socket | None,
) -> tuple[tuple[str, int] | None, tuple[str, int | None] | None]:
    """Return the addresses of a connection's client and server; None if it has none."""
    try:
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None, None
        return sock.getpeername()[:2], sock.getsockname()[:2]
    except OSError:  # reset already
        return None, None
