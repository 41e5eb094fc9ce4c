"""Connections without sockets: a test passes bytes to the protocol, and reads the bytes that it writes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from daskserve.options.http import HTTPOptions
from daskserve.proxies.asgi import ASGIApp
from daskserve.proxies.exchange.http_connection import HTTPConnection
from daskserve.proxies.server.server import HTTPServer

#: Maximum number of bytes that a transport passes on at a time.
_PIECE_BYTES = 64 * 1024


class MemoryTransport(asyncio.Transport):
    """The methods are the client's end. The socket answers the protocol's queries of the operating system.

    Attributes
    ----------
    received : bytearray
        The bytes that the protocol has written.
    writes : list of bytes
        The same bytes, by write.
    is_over : bool
        Whether the protocol has ended its side.
    is_paused : bool
        Whether the protocol has paused reading.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        sock, self._peer = socket.socketpair()
        super().__init__({"socket": sock})
        self._loop = asyncio.get_running_loop()
        self._protocol: Any = protocol
        self.is_paused = self._is_closing = self._has_finished = self.is_over = False
        self.received = bytearray()
        self.writes: list[Any] = []
        self._unread_bytes: int | None = None  # size of the data that is left unread; None while reading
        protocol.connection_made(self)

    # ---- the client's end

    def move(self, data: memoryview) -> memoryview:
        """Send as much as the protocol accepts; return the rest."""
        if self._is_closing or self.is_over:
            return data[:0]
        if not self.is_paused and data:
            self._pass_on(bytes(data[:_PIECE_BYTES]))
            return data[_PIECE_BYTES:]
        return data

    def send(self, data: bytes) -> None:
        """Send everything at once, even if the protocol is paused."""
        self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        if not isinstance(self._protocol, asyncio.BufferedProtocol):
            self._protocol.data_received(data)
            return
        while data:
            buffer = memoryview(self._protocol.get_buffer(-1))
            part, data = data[: len(buffer)], data[len(buffer) :]
            buffer[: len(part)] = part
            self._protocol.buffer_updated(len(part))

    def stop_reading(self) -> None:
        """Stop reading: all data that the protocol writes stays in its buffer."""
        self._unread_bytes = 0

    def read_on(self) -> None:
        """Read all data in the buffer, and continue reading."""
        if self._unread_bytes:
            self._protocol.resume_writing()
        self._unread_bytes = None

    def finish(self) -> None:
        """End the client's side."""
        self._has_finished = True
        if self._is_closing:
            return
        self._peer.shutdown(socket.SHUT_WR)
        if not self._protocol.eof_received():
            self.close()

    def reset(self) -> None:
        """Drop the connection."""
        self.is_over = True
        self._peer.close()
        if not self._is_closing:
            self._is_closing = True
            self._end(ConnectionResetError())

    def __enter__(self) -> MemoryTransport:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_closing and not self._has_finished:
            self.finish()
        self._peer.close()

    # ---- the server's end

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def write(self, data: Any) -> None:
        assert not self._is_closing
        self.received += data
        self.writes.append(data)
        if self._unread_bytes is not None:
            if not self._unread_bytes:
                self._protocol.pause_writing()
            self._unread_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        return self._unread_bytes or 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_over = True

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self.is_over = True
        self._lose(None)

    def abort(self) -> None:
        self.close()

    def _lose(self, error: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        protocol, self._protocol = self._protocol, asyncio.Protocol()
        protocol.connection_lost(error)
        self.get_extra_info("socket").close()
        self._peer.close()


def connect(server: HTTPServer) -> MemoryTransport:
    """Return a new connection of a server."""
    return MemoryTransport(HTTPConnection(server.state, lambda: None))


@contextlib.asynccontextmanager
async def serving_in_memory(app: ASGIApp, **options: Any) -> AsyncIterator[HTTPServer]:
    """Run a server whose connections the test makes."""
    server = HTTPServer(app, HTTPOptions(port=0, **options))
    server.start()
    try:
        yield server
    finally:
        await server.stop()
