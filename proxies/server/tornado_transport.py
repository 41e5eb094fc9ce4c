"""Connections on Tornado's ``IOStream``, with the interface of asyncio's transports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tornado.iostream import StreamClosedError

from daskserve.proxies.exchange.http_connection import HTTPConnection
from daskserve.proxies.exchange.taken_connection import TakenConnection
from daskserve.proxies.server.tornado_stream import PlainStream, StreamReader, TLSStream, open_stream


def connect(connection: HTTPConnection, sock: socket.socket) -> None:
    """Set up an accepted connection; raise `OSError` if it is lost."""
    TornadoTransport(open_stream(sock, connection.server_state.tls), connection)


class TornadoTransport(asyncio.Transport):
    """Reads and writes a stream for a protocol, which pauses writing while any data is unsent."""

    def __init__(self, stream: PlainStream, protocol: asyncio.Protocol) -> None:
        super().__init__({"socket": stream.socket})
        self._stream = stream
        self._protocol: Any = protocol
        self._reader = StreamReader(stream, protocol)
        self._accepted_bytes = 0
        self._unsent: asyncio.Future[None] | None = None  # the last write, until it is sent
        self._when_sent: Callable[[], None] | None = None
        self._is_closing = False
        stream.set_nodelay(True)  # a response is written whole, or in parts to be sent at once
        stream.set_close_callback(self._note_lost)
        protocol.connection_made(self)
        self._reader.start()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._stream.record = None  # only HTTP requests are recorded
        self._protocol = self._reader.protocol = protocol

    def record_to(self, record: TakenConnection) -> None:
        """Receive data into the record of a connection."""
        self._stream.record = record

    def pause_reading(self) -> None:
        self._reader.pause()

    def resume_reading(self) -> None:
        self._reader.resume()

    def take_unread(self) -> bytes:
        """Return unprocessed data, so that the connection can continue on a copy of the socket."""
        return self._reader.take_unread()

    def write(self, data: Any) -> None:
        self._accepted_bytes += len(data)
        if self._unsent is None and (sent_bytes := self._stream.send_now(data)):
            if sent_bytes == len(data):
                return
            data = memoryview(data)[sent_bytes:]
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
        """Do nothing: the protocol pauses while any data is unsent."""

    def can_write_eof(self) -> bool:
        return not isinstance(self._stream, TLSStream)

    def write_eof(self) -> None:
        self._end(partial(self._stream.socket.shutdown, socket.SHUT_WR))

    def is_closing(self) -> bool:
        return self._is_closing or self._stream.closed()

    def close(self) -> None:
        self._is_closing = True
        self._reader.end()
        self._end(self._stream.abort)

    def abort(self) -> None:
        self._is_closing = True
        self._stream.abort()

    def _end(self, end: Callable[[], None]) -> None:
        """Call ``end`` once all data is sent."""
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
        self._reader.end()
        protocol.connection_lost(self._stream.error)
