"""Tornado's streams, which pass the data that they receive to a protocol.

The stream's ``read_until_regex`` is not used: it searches its whole buffer whenever it receives data, and
took 2 ms for each byte that a client appended to a head of 60 kB.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, SSLIOStream

from daskserve.proxies.exchange.taken_connection import TakenConnection

#: How much is read at a time, and how much in one iteration of the event loop.
_PIECE_BYTES = 64 * 1024
_TURN_BYTES = 256 * 1024
#: Argument of ``IOStream.close`` that distinguishes daskserve's calls from Tornado's own, at the end of the
#: client's data.
_NO_ERROR = (None, None, None)


class PlainStream(IOStream):
    """A TCP connection that counts the bytes it has sent, and may stay open after the client's data ends.

    The reader is a separate object, because Python reads attributes faster if an object has at most thirty,
    and Tornado's streams have almost as many.
    """

    #: The number of bytes that the operating system has accepted.
    sent_bytes = 0
    #: The record into which data is received, if a proxy has given the connection to this process.
    record: TakenConnection | None = None
    #: Returns whether the connection stays open after the client has ended its side.
    stays_open: Callable[[], bool] = staticmethod(lambda: False)

    def abort(self) -> None:
        """Close the connection now."""
        self.close(_NO_ERROR)

    def close(self, exc_info: Any = False) -> None:
        if exc_info is False and self.stays_open():
            asyncio.get_running_loop().call_soon(self._stop_reading)
        else:
            super().close(exc_info)

    def _stop_reading(self) -> None:
        # Otherwise the end of the data would be reported in each iteration of the event loop.
        if not self.closed():
            self.io_loop.update_handler(self.fileno(), IOLoop.WRITE if self.writing() else IOLoop.NONE)

    def send_now(self, data: Any) -> int:
        """Send as many bytes as the operating system accepts at once, and return their number.

        Nearly all responses are sent whole, in a third of the time of `write`. Call this only if no earlier
        bytes are unsent. After an error it returns 0, and `write` reports the error.
        """
        if self.closed():
            return 0
        try:
            sent_bytes = self.socket.send(data)
        except OSError:
            return 0
        self.sent_bytes += sent_bytes
        return sent_bytes

    def close_fd(self) -> None:
        if self.record is not None:
            self.record.shut_down()
        super().close_fd()

    def read_from_fd(self, buf: Any) -> int | None:
        record = self.record
        room = None if record is None else record.room()
        if record is None or room is None:
            size_bytes = super().read_from_fd(buf)
            if record is not None and size_bytes:
                record.note_received(size_bytes, is_recorded=False)
            return size_bytes
        try:
            size_bytes = self.socket.recv_into(room)
        except BlockingIOError:
            return None
        buf[:size_bytes] = room[:size_bytes]
        record.note_received(size_bytes, is_recorded=True)
        return size_bytes

    def write_to_fd(self, data: memoryview) -> int:
        try:
            sent_bytes = super().write_to_fd(data)
        finally:
            del data  # Tornado cannot shrink its buffer while a view of it exists
        self.sent_bytes += sent_bytes
        return sent_bytes


class StreamReader:
    """Reads a stream, and passes the data to a protocol."""

    def __init__(self, stream: PlainStream, protocol: Any) -> None:
        self.protocol = protocol
        self._stream = stream
        self._reading: asyncio.Future[bytes] | None = None
        self._stays_open: bool | None = None  # None until the client has ended its side
        self._is_paused = False

    def start(self) -> None:
        """Start reading."""
        self._stream.stays_open = self._has_ended
        self._read()

    def pause(self) -> None:
        """Pause reading."""
        self._is_paused = True

    def resume(self) -> None:
        """Resume reading. Idempotent."""
        if self._is_paused:
            self._is_paused = False
            asyncio.get_running_loop().call_soon(self._read)

    def take_unread(self) -> bytes:
        """Return unprocessed data while paused, so that a connection on a copy of the socket continues."""
        received, reading, stream = b"", self._reading, self._stream
        if reading is not None:
            if not reading.done() or reading.exception() is not None:
                return b""
            received, self._reading = reading.result(), None
        more = asyncio.ensure_future(stream.read_bytes(stream.max_buffer_size, partial=True))
        if not more.done():
            self._reading = more  # for `resume`, because a stream has one read at a time
            more.add_done_callback(self._read)
            return received
        return received if more.exception() is not None else received + more.result()

    def end(self) -> None:
        """Stop passing on data, and let the stream close when the client ends its side."""
        self._is_paused = True
        self._stream.__dict__.pop("stays_open", None)

    def _has_ended(self) -> bool:
        if self._stays_open is None:  # Tornado reports the end more than once
            self._stays_open = bool(self.protocol.eof_received())
        return self._stays_open

    def _read(self, _: object = None) -> None:
        """Pass on data until there is no more, or until `_TURN_BYTES` were read."""
        read_bytes, stream = 0, self._stream
        # A closed stream still returns its buffered data, which is not served.
        while not self._is_paused and not stream.closed():
            if self._reading is None:
                try:
                    reading = asyncio.ensure_future(stream.read_bytes(_PIECE_BYTES, partial=True))
                except OSError:
                    return  # the client has disconnected, which the close callback reports
                self._reading = reading
                if not reading.done() or read_bytes >= _TURN_BYTES:
                    reading.add_done_callback(self._read)
                    return
            elif not self._reading.done():
                return
            received, self._reading = self._reading, None
            if received.exception() is not None:
                return  # the client has reset the connection
            data = received.result()
            read_bytes += len(data)
            self.protocol.data_received(data)


class TLSStream(PlainStream, SSLIOStream):
    """A `PlainStream` over TLS; the first read includes the handshake."""

    def send_now(self, data: Any) -> int:
        """Send nothing: writes have to wait for the handshake, and may need reads."""
        return 0


def open_stream(sock: Any, tls: ssl.SSLContext | None) -> PlainStream:
    """Return the stream of an accepted connection; raise `OSError` if the connection is lost."""
    if tls is None:
        return PlainStream(sock)
    return TLSStream(tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))
