"""One connection under uvicorn, whose parser reads the requests for their exchanges.

uvicorn's own cycle of request and response does not cancel an application whose client disconnects, limits
neither heads nor bodies, and does not check what the application sends. So this class keeps the parser, the
transport and the read flow control of `HTTPProtocol`, and hands each request to the same `Exchange` as under
Tornado. This module handles the rest:

1. A client may send more requests before the first is answered. They wait, and reading pauses.
2. A head that is too large or malformed is answered with 431 or 400, after the responses before it.
3. The parser stops at each head that asks for an upgrade, and assumes that it has no body. That is true of
   WebSockets only; for other requests a new parser starts after the head.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httptools

from daskserve.internals.uvicorn import HTTPProtocol, ProtocolState
from daskserve.proxies.exchange.carrier import Carrier, Connection
from daskserve.proxies.exchange.exchange import LINGER_S, Exchange
from daskserve.proxies.exchange.request_head import FRAMING_HEADERS, MAX_HEADER_BYTES, RequestHead
from daskserve.proxies.exchange.response_head import ResponseWriter, plain_text
from daskserve.proxies.exchange.stream import TransportStream

log = logging.getLogger("daskserve.proxies")

#: How much is parsed at a time. It limits how many requests wait, and how far a body exceeds its buffer.
_PIECE_BYTES = 64 * 1024
#: The limit of what surrounds the parts of a body: chunk extensions and trailers.
_MAX_OVERHEAD_BYTES = 16 * 1024

_FRAMING_NAMES: Mapping[bytes, str] = {name.lower().encode(): name for name in FRAMING_HEADERS}
_TOO_LARGE = (431, "The request's headers are too large.")
_NO_CHUNKS = (400, "The extensions of a chunk, or the trailers, are too long.")
_NO_HTTP = (400, "This is not an HTTP request.")


@dataclass(slots=True)
class _Waiting:
    """A request that waits for its turn, or the refusal of a malformed one."""

    head: RequestHead | None
    refusal: tuple[int, str, str] | None = None
    chunks: list[bytes] = field(default_factory=list)
    is_read: bool = False


class SharedState(ProtocolState):
    """State that the connections of one server share."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier.app)
        self.carrier = carrier
        self.open_streams: set[TransportStream] = set()
        #: What to call when a connection is among the carrier's.
        self.on_made: dict[HTTPProtocol, Callable[[], object]] = {}


class UvicornConnection(HTTPProtocol):
    """Reads the requests of one connection; the `ConnectionReader` of their exchanges."""

    server_state: SharedState
    _connection: Connection
    _stream: TransportStream

    def __init__(self, state: SharedState) -> None:
        super().__init__(state)
        self._carrier = state.carrier
        self._framing: dict[str, str] = {}
        self._part = ""  # what is being received: "head", "body" or nothing
        self._dry_bytes = -1  # received without a callback of the parser; -1 within a piece that had one
        self._is_replaying = False  # a new parser receives a head that was handled already
        self._is_upgrade = False  # the parser has stopped after the current head
        self._exchange: Exchange | None = None
        self._is_busy = False  # the exchange is not finished
        self._is_read = True  # its request is complete
        self._waiting: deque[_Waiting] = deque()
        self._room: asyncio.Future[None] | None = None  # pending while the body's buffer is full
        self._rest = memoryview(b"")  # received and not parsed yet
        self._drops_data = False  # further data is dropped
        self._is_last = False  # the request ends the connection; the parser drops what follows
        self._linger: asyncio.TimerHandle | None = None

    # ---- called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stream = TransportStream(transport, self.server_state.open_streams)
        self._connection = Connection(self._stream, is_encrypted=self._carrier.tls is not None)
        self._carrier.connections.add(self._connection)
        self._carrier.watch.watch(self._connection)
        on_made = self.server_state.on_made.pop(self, None)
        if on_made is not None:
            on_made()

    def data_received(self, data: bytes) -> None:
        if self._drops_data:
            return
        if len(data) <= _PIECE_BYTES and not self._rest:
            self._parse(data)
            if self._rest or self._waiting or self._room is not None:
                self._read_on()
        else:
            self._rest = memoryview(bytes(self._rest) + data) if self._rest else memoryview(data)
            self._read_on()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open: the client may have closed only its own side."""
        if self._carrier.tls is not None or not self._connection.stays_open(self._carrier):
            return False
        if self._waiting and self._waiting[-1].head is not None and not self._waiting[-1].is_read:
            self._waiting.pop()
        self._is_last = True
        return True

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        self._drops_data = True
        self._waiting.clear()
        self._rest = memoryview(b"")
        if self._linger is not None:
            self._linger.cancel()
        connection = self._connection
        self._carrier.connections.discard(connection)
        self._carrier.watch.unwatch(connection)
        if connection.exchange is not None:
            connection.exchange.on_connection_close()
            connection.exchange = None
        self._exchange = None
        self._stream.connection_lost(exc)
        self.parser = None  # type: ignore[assignment]  # it refers to this object

    # ---- called by the parser

    def on_message_begin(self) -> None:
        if self._is_replaying:
            return
        self.url = b""
        self.headers = []
        self._framing = {}
        self._part = "head"
        self._dry_bytes = -1

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part != "head":
            return  # a trailer, or part of a replay
        key = name.lower()
        value = value.rstrip(b" \t")
        self.headers.append((key, value))
        known = _FRAMING_NAMES.get(key)
        if known is not None:
            framing = self._framing
            text = value.decode("latin-1")
            framing[known] = f"{framing[known]},{text}" if known in framing else text

    def on_headers_complete(self) -> None:
        if self._is_replaying:
            return
        if self._drops_data:
            return
        if self._dry_bytes >= 0 and _size_of(self.url, self.headers) > MAX_HEADER_BYTES:
            self._refuse(*_TOO_LARGE)
            return
        parser = self.parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._refuse(*_NO_HTTP)
            return
        self._part = "body"
        self._dry_bytes = 0
        self._is_upgrade = parser.should_upgrade()
        head = (
            parser.get_method().decode("ascii"),
            self.url.decode("latin-1"),
            "HTTP/" + version,
            self.headers,
            self._framing,
        )
        if self._is_busy or self._waiting:
            self._waiting.append(_Waiting(head))
        else:
            self._begin(head)

    def on_body(self, body: bytes) -> None:
        self._dry_bytes = -1
        if self._waiting:
            self._waiting[-1].chunks.append(body)
        elif not self._drops_data and self._exchange is not None:
            self._feed(self._exchange, body)

    def on_message_complete(self) -> None:
        self._part = ""
        if self._is_upgrade:
            return  # the request may still have a body
        if not self.parser.should_keep_alive():
            self._is_last = True
        if self._waiting:
            self._waiting[-1].is_read = True
        elif not self._drops_data and self._exchange is not None and not self._is_read:
            self._is_read = True
            self._exchange.finish()

    # ---- called by the exchange

    def finish(self) -> None:
        """Go on to the next request, or close the connection if this request is incomplete."""
        self._is_busy = False
        if not self._is_read:
            self.close()
        elif self._waiting:
            self.loop.call_soon(self._begin_next)
        elif self._is_last:
            self.close()
        else:
            self._carrier.watch.watch(self._connection)

    def close(self) -> None:
        """Close the connection once everything written is sent."""
        self._drops_data = True
        if self.transport.is_closing():
            return
        self.transport.close()
        if self._stream.writing():
            self._carrier.watch.watch(self._connection)  # the client may not read

    def detach(self) -> TransportStream:
        """Leave the stream to a WebSocket."""
        self.connections.discard(self)
        self._carrier.connections.discard(self._connection)
        self._connection.exchange = None
        self._exchange = None
        self._drops_data = True
        self._stream.take_over()
        return self._stream

    # ---- reading

    def _read_on(self) -> None:
        """Parse what was received, until a request waits or a body's buffer is full."""
        while self._rest and not self._drops_data and not self._waiting and self._room is None:
            piece, self._rest = self._rest[:_PIECE_BYTES], self._rest[_PIECE_BYTES:]
            self._parse(piece)
        if self._drops_data:
            self._rest = memoryview(b"")
        if self.transport.is_closing():
            return
        if self._waiting or self._room is not None:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _parse(self, data: bytes | memoryview) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._rest = memoryview(bytes(data[upgrade.args[0] :]) + bytes(self._rest))
            if not self._waiting:
                self._leave_head()
            return
        except httptools.HttpParserCallbackError:
            log.exception("Reading a request failed")
            self._stream.close()
        except httptools.HttpParserError:
            self._refuse(*_NO_HTTP)
        if self._part:
            self._dry_bytes = 0 if self._dry_bytes < 0 else self._dry_bytes + len(data)
            if self._dry_bytes > _MAX_OVERHEAD_BYTES:
                self._refuse_overhead()

    def _refuse_overhead(self) -> None:
        if self._part == "head":
            if self._dry_bytes > MAX_HEADER_BYTES:
                self._refuse(*_TOO_LARGE)
        elif self._dry_bytes > _MAX_OVERHEAD_BYTES + _size_of(self.url, self.headers):
            self._refuse(*_NO_CHUNKS)  # the piece may include the head

    def _begin(self, head: RequestHead) -> None:
        self._is_busy = True
        self._is_read = False
        self._exchange = exchange = Exchange(self._carrier, self._connection, self)
        length = exchange.begin(head)
        if length != 0 and exchange.wants_body:
            self._carrier.watch.watch(self._connection)

    def _begin_next(self) -> None:
        if not self._waiting or self._is_busy or self.transport.is_closing():
            return
        request = self._waiting.popleft()
        if request.head is None:
            assert request.refusal is not None
            self._say_and_leave(*request.refusal)
            return
        self._begin(request.head)
        exchange = self._exchange
        if exchange is not None:
            for chunk in request.chunks:
                self._feed(exchange, chunk)
            if request.is_read:
                self._is_read = True
                exchange.finish()
        if self._is_upgrade and not self._waiting:
            self._leave_head()
        self._read_on()

    def _feed(self, exchange: Exchange, chunk: bytes) -> None:
        room = exchange.data_received(chunk)
        if room is not None:
            self._room = room
            room.add_done_callback(self._take_room)

    def _take_room(self, room: asyncio.Future[None]) -> None:
        if room is self._room:
            self._room = None
            self._read_on()

    def _leave_head(self) -> None:
        """Continue after a head at which the parser has stopped."""
        self._is_upgrade = False
        if self._exchange is None:  # a WebSocket now
            rest, self._rest = bytes(self._rest), memoryview(b"")
            self.parser = None  # type: ignore[assignment]  # it refers to this object
            if rest:
                self._stream.data_received(rest)
            return
        framing = self._framing
        lines = [
            f"{name}: {framing[name]}" for name in ("Content-Length", "Transfer-Encoding") if name in framing
        ]
        self._part = "body"
        self._dry_bytes = 0
        self.parser = httptools.HttpRequestParser(self)
        self._is_replaying = True
        try:
            self.parser.feed_data("\r\n".join(["POST / HTTP/1.1", *lines, "", ""]).encode("latin-1"))
        except httptools.HttpParserError:
            self.close()  # the exchange has sent the reason
        finally:
            self._is_replaying = False

    # ---- refusing

    def _refuse(self, status: int, text: str) -> None:
        """Refuse a malformed request in its turn, and stop reading."""
        if self._drops_data:
            return  # the parser continues after a refused head
        method = self.parser.get_method().decode("ascii") if self._part == "head" else "GET"
        self._part = ""
        self._drops_data = True
        exchange = self._exchange
        if self._waiting or (self._is_busy and self._is_read):
            if self._waiting and not self._waiting[-1].is_read:
                head = self._waiting.pop().head
                method = head[0] if head is not None else method
            self._waiting.append(_Waiting(None, (status, text, method)))
            if not self._is_busy:
                self._begin_next()
        elif not self._is_busy or exchange is None:
            self._say_and_leave(status, text, method)
        elif exchange.wants_body:
            exchange.reject(text)
        else:
            self.close()

    def _say_and_leave(self, status: int, text: str, method: str) -> None:
        start, body = plain_text(status, text)
        writer = ResponseWriter(start, method=method, is_http11=True, closes=True)
        self._stream.write(b"".join(writer.first(body, False, self._carrier.date.line())))
        # Closing a socket with unread data resets the connection, and may destroy the response.
        if not self.transport.can_write_eof():  # TLS
            self.close()
            return
        try:
            if not self.transport.is_closing():
                self.transport.write_eof()
        except OSError:
            self._stream.close()  # the client has reset the connection
            return
        self._carrier.watch.unwatch(self._connection)
        self._linger = self.loop.call_later(LINGER_S, self._stream.close)


def _size_of(url: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
