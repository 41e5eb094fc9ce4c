"""Tornado's streams, which call back with what they receive.

The stream's ``read_until_regex`` is not used: after each piece that is received it searches all that it has,
and took 2 ms for each byte that a client appended to a head of 60 kB.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, SSLIOStream

#: How much is read at a time, and after how much other connections have their turn.
_PIECE_BYTES = 64 * 1024
_TURN_BYTES = 256 * 1024
#: An argument of ``IOStream.close``: without it, Tornado closes a stream at the end of the client's data.
_NO_ERROR = (None, None, None)


class PlainStream(IOStream):
    """A TCP connection that counts what it has sent, and may outlast the end of the client's data.

    Python reads the attributes of an object faster while there are at most thirty. Tornado's streams have
    almost as many, so the reader is a separate object.
    """

    #: How many bytes the operating system has taken.
    sent_bytes = 0
    #: Returns whether the connection stays open when the client has ended its side.
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
        # The end of the data would be reported in each turn of the event loop.
        if not self.closed():
            self.io_loop.update_handler(self.fileno(), IOLoop.WRITE if self.writing() else IOLoop.NONE)

    def send_now(self, data: Any) -> int:
        """Send as many bytes as the operating system takes at once, and return their number.

        That is all of nearly every response, in a third of the time of `write`. No earlier bytes may be
        unsent. After an error it returns 0, and `write` reports the error.
        """
        if self.closed():
            return 0
        try:
            sent_bytes = self.socket.send(data)
        except OSError:
            return 0
        self.sent_bytes += sent_bytes
        return sent_bytes

    def write_to_fd(self, data: memoryview) -> int:
        try:
            sent_bytes = super().write_to_fd(data)
        finally:
            del data  # Tornado cannot shrink its buffer while something refers to it
        self.sent_bytes += sent_bytes
        return sent_bytes


class StreamReader:
    """Reads a stream, and passes what it receives to a protocol."""

    def __init__(self, stream: PlainStream, protocol: Any) -> None:
        self.protocol = protocol
        self._stream = stream
        self._reading: asyncio.Future[bytes] | None = None
        self._stays_open: bool | None = None  # None until the client has ended its side
        self._is_paused = False

    def start(self) -> None:
        """Begin to read."""
        self._stream.stays_open = self._has_ended
        self._read()

    def pause(self) -> None:
        """Read nothing more for now."""
        self._is_paused = True

    def resume(self) -> None:
        """Read again."""
        if self._is_paused:
            self._is_paused = False
            asyncio.get_running_loop().call_soon(self._read)

    def take_unread(self) -> bytes:
        """Return what was received and not passed on; the connection continues on a copy of the socket."""
        self._is_paused = True
        received, reading, stream = b"", self._reading, self._stream
        if reading is not None:
            if not reading.done() or reading.exception() is not None:
                return b""
            received = reading.result()
        more = asyncio.ensure_future(stream.read_bytes(stream.max_buffer_size, partial=True))
        return received + more.result() if more.done() and more.exception() is None else received

    def end(self) -> None:
        """Pass on nothing from now on, and have the stream close when the client ends its side."""
        self._is_paused = True
        self._stream.__dict__.pop("stays_open", None)

    def _has_ended(self) -> bool:
        if self._stays_open is None:  # Tornado sees the end more than once
            self._stays_open = bool(self.protocol.eof_received())
        return self._stays_open

    def _read(self, _: object = None) -> None:
        """Pass on what is received, until nothing more is there or others have their turn."""
        read_bytes, stream = 0, self._stream
        # A closed stream still returns what it has buffered: that is not served.
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
    """The same over TLS; the first read includes the handshake."""

    def send_now(self, data: Any) -> int:
        """Send nothing: what is written has to wait for the handshake, and may have to be read for."""
        return 0


def open_stream(sock: Any, tls: ssl.SSLContext | None) -> PlainStream:
    """Return the stream of an accepted connection; raise `OSError` if that is lost."""
    if tls is None:
        return PlainStream(sock)
    return TLSStream(tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))
