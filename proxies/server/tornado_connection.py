"""One connection under Tornado: reads requests from an ``IOStream`` for their exchanges.

Tornado reads the socket and parses the lines of a head (``HTTPHeaders``, ``parse_request_start_line``). What
reads a request from that is here, because ``HTTP1Connection`` differs from RFC 9112 and has no public way to
change it: it takes chunk extensions and trailers for errors, overlooks a CR that ends no line, and serves
requests of a connection that is closed. It also answers a malformed body itself, into a response that may
have begun.

h11 and httptools do not fit here. Both take bytes and keep what they do not consume, so they replace
``IOStream`` too; httptools does so with ``http_options={"server": "uvicorn"}``. CPU time to read a GET with
six headers, 500 different ones, median of seven interleaved runs: 18 µs here, checks included; 28 µs by h11,
which must be told of each response; 2.4 µs by httptools with uvicorn's callbacks. A whole request takes 39 µs
under Tornado. A chunk's framing: 0.3, 4.9 and 0.1 µs. So h11 is slower, and httptools is an extension module,
which the default installation does without.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from tornado.httputil import HTTPHeaders, HTTPInputError, parse_request_start_line
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream, SSLIOStream, StreamClosedError, UnsatisfiableReadError

from daskserve.clock import LoopClock
from daskserve.proxies.exchange.carrier import Carrier, Connection
from daskserve.proxies.exchange.exchange import Exchange
from daskserve.proxies.exchange.request_head import FRAMING_HEADERS, MAX_HEADER_BYTES, RequestHead
from daskserve.proxies.exchange.stream import READ_BYTES, duplicate

log = logging.getLogger("daskserve.proxies")

#: The longest line that announces a chunk, with its extensions, and the longest trailer.
_MAX_LINE_BYTES = 4096
#: The size of all trailers together.
_MAX_TRAILER_BYTES = 16 * 1024
#: After this much work other connections have their turn; a chunk counts as some work besides its data.
_TURN_BYTES = 256 * 1024
_CHUNK_COST_BYTES = 1024
#: Chunks are joined up to this size, or each byte of a client could cost a message of its own.
_JOIN_BYTES = 64 * 1024

_HEAD_END = b"\r?\n\r?\n"
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t \x21-\x7e\x80-\xff]*)?\r\n")
_MALFORMED = b"HTTP/1.1 400 Bad Request\r\n\r\n"


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
            sock = duplicate(self.socket)
        except OSError:  # the process has no file descriptors left
            return None
        # The whole buffer, or else at most one piece of what the socket has.
        received = asyncio.ensure_future(self.read_bytes(self.max_buffer_size, partial=True))
        self.set_close_callback(None)
        self.close((None, None, None))  # not for the end of the client's data
        if received.done() and received.exception() is None:
            return sock, received.result()
        received.add_done_callback(asyncio.Future.exception)  # retrieved
        return sock, b""


class TLSRequestStream(RequestStream, SSLIOStream):
    """The same over TLS; the first read includes the handshake."""

    def leave_for(self, loop: asyncio.AbstractEventLoop) -> None:
        """Return None: the state of TLS cannot leave the stream."""


class TornadoConnection:
    """Reads the requests of one connection, one by one: the `ConnectionReader` of their exchanges."""

    def __init__(self, carrier: Carrier, stream: RequestStream) -> None:
        self._carrier = carrier
        self._stream = stream
        self._connection = Connection(stream, is_encrypted=carrier.tls is not None)
        if carrier.tls is None:
            stream.stays_open = partial(self._connection.stays_open, carrier)
        carrier.connections.add(self._connection)
        self._next_head: Awaitable[bytes] | None = None
        self._is_read = False  # the current request is complete
        self._is_detached = False
        self._answered: asyncio.Future[None] | None = None

    async def serve(self) -> None:
        """Top loop of one connection: return when it is closed, or left to a WebSocket."""
        try:
            # A closed stream still returns what it has buffered: that is not served.
            while not self._is_detached and not self._stream.closed():
                self._carrier.watch.watch(self._connection)
                await self._serve_request()
        except (StreamClosedError, UnsatisfiableReadError):
            pass  # the client has disconnected, or a line is too long
        except Exception:
            log.exception("The connection of %s failed", self._connection)
            self._connection.close()
        finally:
            self._carrier.connections.discard(self._connection)
            self._carrier.watch.unwatch(self._connection)
            if self._connection.exchange is not None:
                self._connection.exchange.on_connection_close()
                self._connection.exchange = None

    async def _serve_request(self) -> None:
        reading, self._next_head = self._next_head, None
        data = await (self._read_head() if reading is None else reading)
        try:
            head = parse_head(data)
        except HTTPInputError as error:
            log.info("Malformed request from %s: %s", self._connection, error)
            await self._stream.write(_MALFORMED)
            self._stream.close()
            return
        self._is_read = False
        self._answered = asyncio.get_running_loop().create_future()
        exchange = Exchange(self._carrier, self._connection, self)
        length = exchange.begin(head)
        if self._is_detached:
            return
        try:
            if length is None:
                await self._read_chunks(exchange)
            elif length:
                await self._read_bytes(length, exchange)
        except HTTPInputError as error:
            exchange.reject(str(error))
        self._is_read = True
        if not self._answered.done():
            exchange.finish()
        if not self._answered.done() and not self._stream.closed():
            self._stream.set_close_callback(self._note_closed)
            await self._answered

    def _read_head(self) -> Awaitable[bytes]:
        return self._stream.read_until_regex(_HEAD_END, max_bytes=MAX_HEADER_BYTES)

    async def _read_bytes(self, left: int, exchange: Exchange) -> None:
        work_bytes = 0
        while left:
            part = await self._stream.read_bytes(min(left, _JOIN_BYTES), partial=True)
            left -= len(part)
            work_bytes += len(part)
            room = exchange.data_received(part)
            if room is not None:
                await room
            if work_bytes >= _TURN_BYTES:
                work_bytes = 0
                await self._carrier.clock.sleep(0)

    async def _read_chunks(self, exchange: Exchange) -> None:
        stream = self._stream
        joined = bytearray()
        work_bytes = 0

        async def hand_on() -> None:
            data = bytes(joined)
            joined.clear()
            room = exchange.data_received(data)
            if room is not None:
                await room

        async def completed(reading: Awaitable[bytes]) -> bytes:
            # Data that was received does not wait for more.
            if joined and isinstance(reading, asyncio.Future) and not reading.done():
                await hand_on()
            return await reading

        while left := chunk_size(await completed(stream.read_until(b"\r\n", max_bytes=_MAX_LINE_BYTES))):
            work_bytes += _CHUNK_COST_BYTES
            while left:
                part = await completed(stream.read_bytes(min(left, _JOIN_BYTES), partial=True))
                left -= len(part)
                joined += part
                if len(joined) >= _JOIN_BYTES:
                    await hand_on()
                work_bytes += len(part)
                if work_bytes >= _TURN_BYTES:
                    work_bytes = 0
                    await self._carrier.clock.sleep(0)
            if await completed(stream.read_bytes(2)) != b"\r\n":
                raise HTTPInputError("A chunk is longer than it says.")
        left = _MAX_TRAILER_BYTES
        while (line := await completed(stream.read_until(b"\r\n", max_bytes=_MAX_LINE_BYTES))) != b"\r\n":
            left -= len(line)
            if left < 0:
                raise HTTPInputError("The trailers are too long.")
            HTTPHeaders().parse_line(line.decode("latin-1"))
        if joined:
            await hand_on()

    # ---- called by the exchange

    def finish(self) -> None:
        """Go on to the next request, or close the connection if this request is incomplete."""
        if not self._is_read:
            self.close()
            return
        self._stream.set_close_callback(None)
        if not self._stream.closed():
            # At once, not some turns of the event loop later: if the next request arrives in between, Tornado
            # stops watching the socket and has to start again.
            with suppress(OSError):  # the stream is closed then, which `serve` checks
                self._next_head = self._read_head()
        self._end_request()

    def close(self) -> None:
        """Close the connection."""
        self._stream.set_close_callback(None)
        self._stream.close()
        self._end_request()

    def detach(self) -> RequestStream:
        """Leave the stream to a WebSocket."""
        self._is_detached = True
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


def parse_head(data: bytes) -> RequestHead:
    """Return the parts of a request's head.

    Raises
    ------
    HTTPInputError
        It is malformed.
    """
    if data.count(b"\r") != data.count(b"\r\n"):
        raise HTTPInputError("A CR stands alone.")
    # Clients may send empty lines between requests; see RFC 9112, 2.2.
    first, _, lines = data.decode("latin-1").lstrip("\r\n").partition("\n")
    method, target, version = parse_request_start_line(first.rstrip("\r"))
    headers: list[tuple[bytes, bytes]] = []
    framing: dict[str, str] = {}
    for name, value in HTTPHeaders.parse(lines).get_all():
        headers.append((name.lower().encode("latin-1"), value.encode("latin-1")))
        if name in FRAMING_HEADERS:
            framing[name] = f"{framing[name]},{value}" if name in framing else value
    return method, target, version, headers, framing


def chunk_size(line: bytes) -> int:
    """Return the size of a chunk from its first line.

    Raises
    ------
    HTTPInputError
        The line is malformed.
    """
    matched = _CHUNK_LINE.fullmatch(line)
    if matched is None:
        raise HTTPInputError("A chunk does not say how long it is.")
    return int(matched[1], 16)
