"""Tornado's reading of HTTP/1 requests, where it does not do what RFC 9112 wants.

1. Chunks may have extensions and trailers; both are checked and dropped. Tornado takes them for errors.
2. A CR that ends no line is not to be overlooked.
3. Of a connection that was closed nothing more is to be served, however much of it has come in already.
4. A body that turns out to be malformed is for the exchange to answer. Tornado writes its 400 into whatever
   response has begun, or behind the one that the request has got already.

Chunks are joined before they are handed on, or a client could make each byte cost a message of its own.

With `RequestStream` the next head is waited for as soon as a response is whole, not some turns of the event
loop later: if it comes in between, Tornado stops watching the socket and has to begin anew.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable
from contextlib import suppress

from tornado import httputil
from tornado.http1connection import HTTP1Connection, HTTP1ConnectionParameters, HTTP1ServerConnection
from tornado.iostream import IOStream, StreamClosedError, UnsatisfiableReadError

from daskserve.clock import Clock
from daskserve.proxies.exchange.request_head import MAX_HEADER_BYTES

log = logging.getLogger("daskserve.proxies")

#: A line that announces a chunk, with its extensions, and a trailer may be so long.
_MAX_LINE_BYTES = 4096
#: So long may all trailers be.
_MAX_TRAILER_BYTES = 16 * 1024
#: After so much work others have their turn, and a chunk is this much work besides its data.
_TURN_BYTES = 256 * 1024
_CHUNK_COST_BYTES = 1024
#: Chunks are joined up to this size.
_JOIN_BYTES = 64 * 1024

#: Where a head ends, as Tornado has it.
HEAD_END = b"\r?\n\r?\n"
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t \x21-\x7e\x80-\xff]*)?\r\n")


class RequestStream(IOStream):
    """A connection that reads the head of the next request ahead, and never holds back small writes."""

    _ahead: Awaitable[bytes] | None = None
    _has_nodelay = False

    def read_ahead(self, max_bytes: int) -> None:
        """Begin to read a head; what asks for one next gets it."""
        if self._ahead is None and not self.closed():
            with suppress(OSError):  # it closes the stream, which whoever reads next will see
                self._ahead = super().read_until_regex(HEAD_END, max_bytes=max_bytes)

    def read_until_regex(self, regex: bytes, max_bytes: int | None = None) -> Awaitable[bytes]:
        ahead, self._ahead = self._ahead, None
        return super().read_until_regex(regex, max_bytes) if ahead is None else ahead

    def set_nodelay(self, value: bool) -> None:
        """Switch delays off, for good: a response is written whole, or in parts that are wanted at once."""
        if value and not self._has_nodelay:
            self._has_nodelay = True
            super().set_nodelay(True)


class RequestReader(httputil.HTTPMessageDelegate):
    """What an `IngressConnection` makes of each request; see `start_request` of its delegate."""

    @property
    def has_task(self) -> bool:
        """Whether the request was answered by a task of its own."""
        raise NotImplementedError

    def reject(self, reason: str) -> None:
        """Take note that the body is malformed, so that nothing more can be read from this connection."""
        raise NotImplementedError


class IngressConnection(HTTP1ServerConnection):
    """The requests of one connection, one after the other."""

    def __init__(
        self, stream: IOStream, params: HTTP1ConnectionParameters, context: object, clock: Clock
    ) -> None:
        super().__init__(stream, params, context)
        self._clock = clock

    async def _server_request_loop(self, delegate: httputil.HTTPServerConnectionDelegate) -> None:
        is_open = True
        try:
            while is_open:
                connection = _Connection(self.stream, self.params, self.context, self._clock)
                reader = delegate.start_request(self, connection)
                assert isinstance(reader, RequestReader)
                is_open = await connection.read_response(reader)
                if not reader.has_task:
                    # Requests that have come in already must not keep everybody else waiting.
                    await self._clock.sleep(0)
                # Of a stream that is closed Tornado still reads what it holds: they are not to be served.
                is_open = is_open and not self.stream.closed()
        except (StreamClosedError, UnsatisfiableReadError):
            pass  # the client has gone, or sends lines without an end
        except Exception:
            # Top loop of one connection: a fault of ours, which must not become one of all the others.
            log.exception("The connection of %s failed", self.context)
            self.stream.close()
        finally:
            delegate.on_close(self)


class _Connection(HTTP1Connection):
    """Reads one request."""

    def __init__(
        self, stream: IOStream, params: HTTP1ConnectionParameters, context: object, clock: Clock
    ) -> None:
        super().__init__(stream, False, params, context)
        self._clock = clock

    def finish(self) -> None:
        super().finish()
        if isinstance(self.stream, RequestStream):
            self.stream.read_ahead(self.params.max_header_size or MAX_HEADER_BYTES)

    def _parse_headers(self, data: bytes) -> tuple[str, httputil.HTTPHeaders]:
        # Tornado strips what it finds around the first line.
        if data.count(b"\r") != data.count(b"\r\n"):
            raise httputil.HTTPInputError("A CR stands alone.")
        return super()._parse_headers(data)

    def _read_body(
        self, code: int, headers: httputil.HTTPHeaders, delegate: httputil.HTTPMessageDelegate
    ) -> Awaitable[None] | None:
        assert isinstance(delegate, RequestReader)
        try:
            body = super()._read_body(code, headers, delegate)
        except httputil.HTTPInputError as error:
            delegate.reject(str(error))
            return None
        return None if body is None else self._read_or_reject(body, delegate)

    async def _read_or_reject(self, body: Awaitable[None], reader: RequestReader) -> None:
        try:
            await body
        except httputil.HTTPInputError as error:
            reader.reject(str(error))

    async def _read_chunked_body(self, delegate: httputil.HTTPMessageDelegate) -> None:
        stream = self.stream
        joined = bytearray()
        work_bytes = 0

        async def hand_on() -> None:
            data = bytes(joined)
            joined.clear()
            room = delegate.data_received(data)
            if room is not None:
                await room

        async def completed(reading: Awaitable[bytes]) -> bytes:
            # Nothing that has come in waits for what has not.
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
                    await self._clock.sleep(0)
            if await completed(stream.read_bytes(2)) != b"\r\n":
                raise httputil.HTTPInputError("A chunk is longer than it says.")
        left = _MAX_TRAILER_BYTES
        while (line := await completed(stream.read_until(b"\r\n", max_bytes=_MAX_LINE_BYTES))) != b"\r\n":
            left -= len(line)
            if left < 0:
                raise httputil.HTTPInputError("The trailers are too long.")
            httputil.HTTPHeaders().parse_line(line.decode("latin-1"))
        if joined:
            await hand_on()


def chunk_size(line: bytes) -> int:
    """Return how long a chunk is, by the line that announces it.

    Raises
    ------
    HTTPInputError
        The line is none.
    """
    matched = _CHUNK_LINE.fullmatch(line)
    if matched is None:
        raise httputil.HTTPInputError("A chunk does not say how long it is.")
    return int(matched[1], 16)
