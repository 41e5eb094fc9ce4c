"""One connection under Tornado: reads requests from an ``IOStream`` for their exchanges.

Tornado reads the socket. What reads a request from that is `read_head` and `ChunkReader`, because Tornado's
``HTTP1Connection`` differs from RFC 9112 and has no public way to change it: it takes chunk extensions and
trailers for errors, accepts a bare LF, and serves requests of a connection that is closed. It also answers a
malformed body itself, into a response that may have begun.

h11 does not fit here. It must be told of each response, and takes eight times the CPU time for a head.

The stream's ``read_until_regex`` is not used either: after each piece that is received it searches all that
it has, and took 2 ms for each byte that a client appended to a head of 60 kB.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, SSLIOStream, StreamClosedError

from daskserve.common.clock import LoopClock
from daskserve.proxies.exchange.chunks import ChunkReader
from daskserve.proxies.exchange.exchange import LINGER_S, Exchange
from daskserve.proxies.exchange.limits import LINGER
from daskserve.proxies.exchange.request_head import RefusedRequestError, RequestHead, read_head
from daskserve.proxies.exchange.server_state import Connection, ServerState
from daskserve.proxies.exchange.stream import READ_BYTES, duplicate
from daskserve.proxies.exchange.turns import SLICE_BYTES, SLOW

log = logging.getLogger("daskserve.proxies")

#: After this much work other connections have their turn.
_TURN_BYTES = 256 * 1024
#: How much of a request is read at a time.
_PIECE_BYTES = 64 * 1024


class RequestStream(IOStream):
    """A TCP connection that counts what it has sent, and never holds back small writes."""

    #: How many bytes the operating system has taken.
    sent_bytes = 0
    _has_nodelay = False
    _on_data: Callable[[bytes], None]
    _reading: asyncio.Task[None] | None = None
    _is_reading_paused = False
    #: Returns whether a response is still to be written when the client ends its side of the connection.
    stays_open: Callable[[], bool] = staticmethod(lambda: False)
    #: Data that was read from the stream, and comes before what follows: for a WebSocket.
    unread = b""

    def write_to_fd(self, data: memoryview) -> int:
        try:
            sent_bytes = super().write_to_fd(data)
        finally:
            del data  # Tornado cannot shrink its buffer while something refers to it
        self.sent_bytes += sent_bytes
        return sent_bytes

    def close(self, exc_info: Any = False) -> None:
        """Close the connection, unless only the client's side has ended, and the other is still needed.

        Tornado closes a stream at the end of its data, without ``exc_info``.
        """
        if exc_info is False and self.stays_open():
            asyncio.get_running_loop().call_soon(self._stop_reading)
        else:
            super().close(exc_info)

    def _stop_reading(self) -> None:
        # The end of the data would be reported in each iteration of the event loop.
        if not self.closed():
            self.io_loop.update_handler(self.fileno(), IOLoop.WRITE if self.writing() else IOLoop.NONE)

    def set_nodelay(self, value: bool) -> None:
        """Switch delays off permanently: a response is written whole, or in parts that are wanted at once."""
        if value and not self._has_nodelay:
            self._has_nodelay = True
            super().set_nodelay(True)

    def write_eof(self) -> None:
        """End this side of the connection."""
        with suppress(OSError):  # the client has reset the connection
            self.socket.shutdown(socket.SHUT_WR)

    # ---- for a WebSocket

    def start_reading(self, on_data: Callable[[bytes], None]) -> None:
        """Call ``on_data(data)`` with all that is received."""
        self._on_data = on_data
        self.resume_reading()

    def pause_reading(self) -> None:
        """Receive nothing more for now, at most what is being received."""
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        """Receive again."""
        self._is_reading_paused = False
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        if self.unread:
            data, self.unread = self.unread, b""
            self._on_data(data)
        with suppress(StreamClosedError):
            while not self._is_reading_paused:
                reading = asyncio.ensure_future(self.read_bytes(READ_BYTES, partial=True))
                if reading.done():  # buffered data: yield to other tasks
                    await LoopClock().sleep(0)
                self._on_data(await reading)

    def leave_for(self, loop: asyncio.AbstractEventLoop) -> tuple[socket.socket, bytes] | None:
        """Return a copy of the socket and what was received; see `daskserve.proxies.exchange.stream.Stream`.

        An asyncio transport takes less time for a message, also on the same loop.
        """
        if self.writing() or self.closed():
            return None
        try:
            sock, unread = duplicate(self.socket), self.unread
        except OSError:  # the process has no file descriptors left
            return None
        # The whole buffer, or else at most one piece of what the socket has.
        received = asyncio.ensure_future(self.read_bytes(self.max_buffer_size, partial=True))
        self.set_close_callback(None)
        self.close((None, None, None))  # not for the end of the client's data
        if received.done() and received.exception() is None:
            return sock, unread + received.result()
        received.add_done_callback(asyncio.Future.exception)  # retrieved
        return sock, unread


class TLSRequestStream(RequestStream, SSLIOStream):
    """The same over TLS; the first read includes the handshake."""

    def leave_for(self, loop: asyncio.AbstractEventLoop) -> None:
        """Return None: the state of TLS cannot leave the stream."""


class TornadoConnection:
    """Reads the requests of one connection, one by one: the `ConnectionReader` of their exchanges."""

    def __init__(self, server_state: ServerState, stream: RequestStream) -> None:
        self._server_state = server_state
        self._stream = stream
        self._connection = Connection(stream, is_encrypted=server_state.tls is not None)
        if server_state.tls is None:
            stream.stays_open = partial(self._connection.stays_open, server_state)
        server_state.connections.add(self._connection)
        self._reading: Awaitable[bytes] | None = None  # of the next request
        self._rest = b""  # received and not read yet
        self._is_read = False  # the current request is complete
        self._is_detached = False
        self._is_leaving = False
        self._answered: asyncio.Future[None] | None = None

    async def serve(self) -> None:
        """Top loop of one connection: return when it is closed, or left to a WebSocket."""
        try:
            # A closed stream still returns what it has buffered: that is not served.
            while not self._is_detached and not self._is_leaving and not self._stream.closed():
                self._server_state.watch.watch(self._connection)
                await self._serve_request()
            if self._is_leaving:
                await self._drop_rest()
        except StreamClosedError:
            pass  # the client has disconnected
        except Exception:
            log.exception("The connection of %s failed", self._connection)
            self._connection.close()
        finally:
            self._server_state.connections.discard(self._connection)
            self._server_state.watch.unwatch(self._connection)
            if self._connection.exchange is not None:
                self._connection.exchange.on_connection_close()
                self._connection.exchange = None

    async def _serve_request(self) -> None:
        try:
            head = await self._read_head()
        except RefusedRequestError as error:
            self._begin_exchange().refuse_head(error)
        else:
            exchange = self._begin_exchange()
            length = exchange.begin(head)
            if self._is_detached:
                return
            try:
                if length is None:
                    await self._read_chunks(exchange)
                elif length:
                    await self._read_bytes(length, exchange)
            except RefusedRequestError as error:
                exchange.reject(str(error))
            self._is_read = True
            if not self._has_answered():
                exchange.finish()
        if not self._has_answered() and not self._stream.closed():
            self._stream.set_close_callback(self._note_closed)
            assert self._answered is not None
            await self._answered

    def _begin_exchange(self) -> Exchange:
        self._is_read = False
        self._answered = asyncio.get_running_loop().create_future()
        return Exchange(self._server_state, self._connection, self)

    def _has_answered(self) -> bool:
        return self._answered is not None and self._answered.done()

    async def _read_head(self) -> RequestHead:
        searched = 0
        while True:
            if self._rest:
                found = read_head(self._rest, searched, self._server_state.head_limits)
                if found is not None:
                    head, end = found
                    self._rest = self._rest[end:]
                    self._connection.awaits_head = False
                    return head
                self._connection.await_head(self._server_state.watch)
                searched = len(self._rest)
            reading, self._reading = self._reading, None
            data = await (self._receive() if reading is None else reading)
            self._rest = self._rest + data if self._rest else data

    def _receive(self, max_bytes: int = _PIECE_BYTES) -> Awaitable[bytes]:
        return self._stream.read_bytes(max_bytes, partial=True)

    async def _read_bytes(self, left: int, exchange: Exchange) -> None:
        work_bytes = 0
        while left:
            if self._rest:
                part, self._rest = self._rest[:left], self._rest[left:]
            else:
                part = await self._receive(min(left, _PIECE_BYTES))
            left -= len(part)
            work_bytes += len(part)
            room = exchange.data_received(part)
            if room is not None:
                await room
            if work_bytes >= _TURN_BYTES:
                work_bytes = 0
                await self._server_state.clock.sleep(0)

    async def _read_chunks(self, exchange: Exchange) -> None:
        chunks = ChunkReader()
        work_bytes = 0
        while not chunks.is_ended:
            if not self._rest:
                self._rest = await self._receive()
                work_bytes += len(self._rest)
            part, self._rest = chunks.read(self._rest)
            room = exchange.data_received(part) if part else None
            if room is not None:
                await room
            if self._rest and not chunks.is_ended:  # there are very many
                await self._server_state.limits.turns.here().turn(SLOW * SLICE_BYTES)
            elif work_bytes >= _TURN_BYTES and not chunks.is_ended:
                work_bytes = 0
                await self._server_state.clock.sleep(0)

    async def _drop_rest(self) -> None:
        self._server_state.watch.unwatch(self._connection)
        if self._server_state.tls is None:
            self._stream.write_eof()
            try:
                async with asyncio.timeout(LINGER_S):
                    while True:
                        await self._receive()
                        await self._server_state.clock.sleep(0)  # what is buffered already is not waited for
            except TimeoutError:
                self._server_state.limits.hit(LINGER)
        self._connection.close()

    # ---- called by the exchange

    def finish(self) -> None:
        """Go on to the next request, or close the connection if this request is incomplete."""
        if not self._is_read:
            self.close()
            return
        self._stream.set_close_callback(None)
        if not self._rest and not self._stream.closed():
            # At once, not some turns of the event loop later: if the next request arrives in between, Tornado
            # stops watching the socket and has to start again.
            with suppress(OSError):  # the stream is closed then, which `serve` checks
                self._reading = self._receive()
        self._end_request()

    def close(self) -> None:
        """Close the connection."""
        if self._rest and self._is_read:
            self.leave()  # there may be more
            return
        self._stream.set_close_callback(None)
        self._stream.close()
        self._end_request()

    def leave(self) -> None:
        """End this side of the connection, and drop what the client sends."""
        self._stream.set_close_callback(None)
        self._is_leaving = True
        self._end_request()

    def detach(self) -> RequestStream:
        """Leave the stream to a WebSocket."""
        self._is_detached = True
        self._stream.unread, self._rest = self._rest, b""
        self._stream.set_close_callback(None)
        self._end_request()
        return self._stream

    # ---- the rest

    def _note_closed(self) -> None:
        if self._connection.exchange is not None:
            self._connection.exchange.on_connection_close()
        self._end_request()

    def _end_request(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)
