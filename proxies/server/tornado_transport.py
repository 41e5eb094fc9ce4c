"""Connections on Tornado's ``IOStream``, behind the interface of asyncio's transports.

The stream's ``read_until_regex`` is not used: after each piece that is received it searches all that it has,
and took 2 ms for each byte that a client appended to a head of 60 kB.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, SSLIOStream, StreamClosedError

from daskserve.proxies.exchange.http_connection import HTTPConnection
from daskserve.proxies.exchange.server_state import ServerState
from daskserve.proxies.exchange.stream import Stream

log = logging.getLogger("daskserve.proxies")

#: How much is read at a time, and after how much other connections have their turn.
_PIECE_BYTES = 64 * 1024
_TURN_BYTES = 256 * 1024
#: An argument of ``IOStream.close``: without it, Tornado closes a stream at the end of the client's data.
_NO_ERROR = (None, None, None)


class PlainStream(IOStream):
    """A TCP connection that counts what it has sent, and may outlast the end of the client's data."""

    #: How many bytes the operating system has taken.
    sent_bytes = 0
    #: Returns whether the connection stays open when the client has ended its side.
    stays_open: Callable[[], bool] = staticmethod(lambda: False)

    def write_to_fd(self, data: memoryview) -> int:
        try:
            sent_bytes = super().write_to_fd(data)
        finally:
            del data  # Tornado cannot shrink its buffer while something refers to it
        self.sent_bytes += sent_bytes
        return sent_bytes

    def close(self, exc_info: Any = False) -> None:
        if exc_info is False and self.stays_open():
            asyncio.get_running_loop().call_soon(self._stop_reading)
        else:
            super().close(exc_info)

    def _stop_reading(self) -> None:
        # The end of the data would be reported in each turn of the event loop.
        if not self.closed():
            self.io_loop.update_handler(self.fileno(), IOLoop.WRITE if self.writing() else IOLoop.NONE)


class TLSStream(PlainStream, SSLIOStream):
    """The same over TLS; the first read includes the handshake."""


class TornadoTransport(asyncio.Transport):
    """Reads and writes a stream for a protocol, which has to pause while anything is unsent."""

    def __init__(self, stream: PlainStream, protocol: asyncio.Protocol) -> None:
        super().__init__({"socket": stream.socket, "io_loop": stream.io_loop})
        self._stream = stream
        self._protocol: Any = protocol
        self._accepted_bytes = 0
        self._reading: asyncio.Future[bytes] | None = None
        self._unsent: asyncio.Future[None] | None = None  # the last write, until it is sent
        self._when_sent: Callable[[], None] | None = None
        self._stays_open: bool | None = None  # None until the client has ended its side
        self._is_paused = self._is_closing = False
        stream.set_nodelay(True)  # a response is written whole, or in parts that are wanted at once
        protocol.connection_made(self)
        stream.stays_open = self._has_ended
        stream.set_close_callback(self._note_lost)
        self._read()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            asyncio.get_running_loop().call_soon(self._read)

    def take_unread(self) -> bytes:
        """Return what was received and not passed on; the connection continues on a copy of the socket."""
        self._is_paused = True
        received, reading = b"", self._reading
        if reading is not None:
            if not reading.done() or reading.exception() is not None:
                return b""
            received = reading.result()
        more = asyncio.ensure_future(self._stream.read_bytes(self._stream.max_buffer_size, partial=True))
        return received + more.result() if more.done() and more.exception() is None else received

    def _read(self, _: object = None) -> None:
        """Pass on what is received, until nothing more is there or others have their turn."""
        read_bytes = 0
        # A closed stream still returns what it has buffered: that is not served.
        while not self._is_paused and not self.is_closing():
            if self._reading is None:
                try:
                    reading = asyncio.ensure_future(self._stream.read_bytes(_PIECE_BYTES, partial=True))
                except OSError:
                    return  # the client has disconnected, which `_note_lost` reports
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
            self._protocol.data_received(data)

    def _has_ended(self) -> bool:
        if self._stays_open is None:  # Tornado sees the end more than once
            self._stays_open = not self._is_closing and bool(self._protocol.eof_received())
        return self._stays_open and not self._is_closing

    def write(self, data: Any) -> None:
        self._accepted_bytes += len(data)
        try:
            written = self._stream.write(data)
        except StreamClosedError:
            return
        if not written.done():
            is_first, self._unsent = self._unsent is None, written
            written.add_done_callback(self._note_sent)
            if is_first:
                self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return 0 if self._stream.closed() else self._accepted_bytes - self._stream.sent_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: the protocol pauses while anything is unsent."""

    def can_write_eof(self) -> bool:
        return not isinstance(self._stream, SSLIOStream)

    def write_eof(self) -> None:
        self._end(partial(self._stream.socket.shutdown, socket.SHUT_WR))

    def is_closing(self) -> bool:
        return self._is_closing or self._stream.closed()

    def close(self) -> None:
        self._is_closing = True
        self._end(self.abort)

    def abort(self) -> None:
        self._is_closing = True
        self._stream.close(_NO_ERROR)

    def _end(self, end: Callable[[], None]) -> None:
        """End this side, or both, once all is sent."""
        if self._unsent is None:
            end()
        else:
            self._when_sent = end

    def _note_sent(self, written: asyncio.Future[None]) -> None:
        if written is self._unsent and not self._stream.closed():
            self._unsent = None
            self._protocol.resume_writing()
            if self._when_sent is not None:
                with suppress(OSError):  # the client has reset the connection
                    self._when_sent()

    def _note_lost(self) -> None:
        protocol, self._protocol = self._protocol, asyncio.Protocol()
        self._when_sent = None
        del self._stream.stays_open
        protocol.connection_lost(self._stream.error)


class TornadoListener:
    """Sets up connections, which Tornado's streams read."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._open_streams: set[Stream] = set()

    def take(self, sock: socket.socket, made: Callable[[], object]) -> None:
        server_state, tls = self._server_state, self._server_state.tls
        try:
            if tls is None:
                stream = PlainStream(sock)
            else:
                stream = TLSStream(tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))
        except OSError as error:
            log.debug("A client disconnected before its connection was set up: %r", error)
            sock.close()
            return
        TornadoTransport(stream, HTTPConnection(server_state, self._open_streams, made))

    async def wait_made(self) -> None:
        """Return: connections are set up when they are accepted."""

    async def wait_closed(self) -> None:
        while self._open_streams:
            await self._server_state.clock.sleep(0)
