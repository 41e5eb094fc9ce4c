"""The stream of a connection, over an asyncio transport or a `TornadoTransport`."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

Socket: TypeAlias = socket.socket

#: Reading pauses while more bytes than this are unread.
READ_AHEAD_BYTES = 64 * 1024
#: How many bytes are read or parsed at once: few, so that other tasks are not blocked.
READ_BYTES = 16 * 1024
#: How much asyncio's transports receive at a time. Their default is 256 KiB; from 128 KiB on, the C library
#: maps and unmaps memory for each read, which costs 12 µs per request, however small.
_RECEIVED_BYTES = 127 * 1024

GONE = "the client has disconnected"


class Stream(asyncio.Protocol):
    """Writes to a transport, with back-pressure.

    Only WebSockets read from it, after `take_over` has made it the protocol of the transport. Until then, an
    `HTTPConnection` is the protocol, and passes on ``pause_writing``, ``resume_writing`` and
    ``connection_lost``. The stream is in ``open_streams`` until the connection is closed.
    """

    def __init__(self, transport: asyncio.Transport, open_streams: set[Stream]) -> None:
        self.socket = transport.get_extra_info("socket")
        self._transport = transport
        if hasattr(transport, "max_size"):
            transport.max_size = _RECEIVED_BYTES
        self._open_streams = open_streams
        open_streams.add(self)
        self._loop = asyncio.get_running_loop()
        # Shared by all writers, and done while there is room.
        self._room: asyncio.Future[None] = self._loop.create_future()
        self._room.set_result(None)
        self._is_lost = False
        self._accepted_bytes = 0
        self._unread = bytearray()
        self._is_reading_paused = False
        self._on_data: Callable[[bytes], None] | None = None
        self._on_close: Callable[[], None] | None = None
        #: Called at once when the connection is closed.
        self.on_lost: Callable[[], None] | None = None
        #: Held while another thread ends the connection, so that its descriptor is not closed meanwhile.
        self._ending = threading.Lock()

    def write(self, data: bytes | memoryview) -> asyncio.Future[None]:
        """Send data; the returned future is done when there is room for more.

        Raises
        ------
        ConnectionResetError
            The connection is closed.
        """
        if self._transport.is_closing():
            raise ConnectionResetError(GONE)
        self._accepted_bytes += len(data)
        self._transport.write(data)
        return self._room

    def writing(self) -> bool:
        """Return whether written bytes are not sent yet."""
        return not self._is_lost and self._transport.get_write_buffer_size() > 0

    @property
    def sent_bytes(self) -> int:
        """The number of bytes that the operating system has accepted; it grows while a client reads."""
        return self._accepted_bytes - (0 if self._is_lost else self._transport.get_write_buffer_size())

    def set_close_callback(self, callback: Callable[[], None] | None) -> None:
        """Call back when the connection is closed."""
        self._on_close = callback

    def closed(self) -> bool:
        """Return whether the connection is closed."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection now."""
        self._unread.clear()
        self._transport.close()
        if self.writing() or self._transport.get_extra_info("ssl_object") is not None:
            # After the next write by uvloop, at the end of this iteration of the event loop. Unsent data is
            # dropped then, and the client's close of TLS is not awaited.
            self._loop.call_soon(self._transport.abort)

    def take_over(self) -> None:
        """Become the protocol of the transport, and read from it."""
        # There is room only while all data is sent, because pings and closing depend on unsent messages. The
        # limit is 1, because at 0 an empty TLS transport would count as full.
        self._transport.set_write_buffer_limits(1, 0)
        self._transport.set_protocol(self)

    def start_reading(self, on_data: Callable[[bytes], None]) -> None:
        """Call ``on_data(data)`` with all received data, until `pause_reading`."""
        self._on_data = on_data
        self.resume_reading()
        if self._unread:
            data, self._unread = bytes(self._unread), bytearray()
            on_data(data)

    def pause_reading(self) -> None:
        """Pause receiving. Idempotent."""
        if not self._is_reading_paused and not self.closed():
            self._is_reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume receiving. Idempotent."""
        if self._is_reading_paused and not self.closed():
            self._is_reading_paused = False
            self._transport.resume_reading()

    def leave_for(self, loop: asyncio.AbstractEventLoop) -> tuple[Socket, bytes] | None:
        """Close the stream, and return a socket for another one on ``loop``, and the unread bytes.

        Returns None if the connection cannot move, or need not move because it already uses a transport of
        that loop, which is the fastest.
        """
        is_bound = not self.can_move() or self.writing() or self.closed()
        if is_bound or (loop is self._loop and not hasattr(self._transport, "take_unread")):
            return None
        try:
            sock = duplicate(self.socket)
        except OSError:  # the process has no file descriptors left
            return None
        left = sock, bytes(self._unread) + self.take_unread()
        self._on_close = None
        self.close()
        return left

    def can_move(self) -> bool:
        """Return whether the connection can continue on a copy of its socket: it cannot with TLS."""
        return self._transport.can_write_eof()

    def take_unread(self) -> bytes:
        """Stop reading, and return what the transport has received and not passed on."""
        self.pause_reading()
        take_unread = getattr(self._transport, "take_unread", None)  # of a `TornadoTransport`
        if take_unread is not None:
            with suppress(OSError):  # the client has just disconnected
                return bytes(take_unread())
        return b""

    def cut(self, goodbye: bytes) -> None:
        """End the connection from any thread, after ``goodbye`` if that can be sent without waiting."""
        with self._ending:
            if self._is_lost:
                return
            with suppress(OSError), duplicate(self.socket) as sock:
                if not self.writing():
                    sock.send(goodbye)
                sock.shutdown(socket.SHUT_RDWR)

    # ---- called by the transport, or by the protocol that reads before `take_over`

    def data_received(self, data: bytes) -> None:
        if self._on_data is not None:
            self._on_data(data)
            return
        self._unread += data
        if len(self._unread) > READ_AHEAD_BYTES:
            self.pause_reading()

    def pause_writing(self) -> None:
        if self._room.done():
            self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        if not self._room.done():
            self._room.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        with self._ending:
            self._is_lost = True
        self._open_streams.discard(self)
        if self.on_lost is not None:
            self.on_lost()
        if not self._room.done():
            self._room.set_exception(ConnectionResetError(GONE))
            self._room.exception()  # marks it as retrieved, because nothing may await it
        self._on_data = None
        # Called later, so that a reader gets the last bytes before the end.
        self._loop.call_soon(self._notify_closed)

    def _notify_closed(self) -> None:
        callback, self._on_close = self._on_close, None
        if callback is not None:
            callback()


class _Opening(asyncio.Protocol):
    """Makes the stream of a new transport its protocol."""

    stream: Stream

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.stream = Stream(transport, set())
        self.stream.take_over()


async def open_stream(sock: socket.socket) -> Stream:
    """Return a stream over a connected socket; raise `OSError` if the connection is lost."""
    _, opened = await asyncio.get_running_loop().connect_accepted_socket(_Opening, sock)
    return opened.stream


def duplicate(sock: Any) -> socket.socket:
    """Return a copy of a socket, with which the connection stays open when the original is closed."""
    copy = socket.fromfd(sock.fileno(), sock.family, sock.type, sock.proto)
    copy.setblocking(False)
    return copy


def can_detect_disconnects() -> bool:
    """Return whether the operating system can detect that a client has disconnected, as Linux can.

    On other systems, the end of a client's data counts as a disconnect.
    """
    return hasattr(select, "POLLRDHUP")


def addresses_of(
    sock: socket.socket | None,
) -> tuple[tuple[str, int] | None, tuple[str, int | None] | None]:
    """Return the addresses of a connection's client and server; None if they are not known."""
    try:
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None, None
        return sock.getpeername()[:2], sock.getsockname()[:2]
    except OSError:  # reset already
        return None, None
