"""The response to one request: its state while an application sends it, and how it is written.

`HTTPResponse` writes to the stream of a connection. The ingress has other subclasses of `Response`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from daskserve.common.types import DONE, MATCHED_ROUTE, WHOLE_RESPONSE, Message
from daskserve.proxies.asgi import REQUEST_ID, Headers
from daskserve.proxies.exchange.request.body import RequestBody
from daskserve.proxies.exchange.response.head import BodyPart, ResponseWriter, as_buffer, plain_text
from daskserve.proxies.exchange.response.unsent import UnsentParts
from daskserve.proxies.exchange.server_state import Connection
from daskserve.proxies.exchange.stream import GONE

#: Parts of a response up to this size are joined into one write.
JOIN_BYTES = 64 * 1024


class Response:
    """The state of one response; `send` is the ``send`` of the application.

    The start is kept until the first part of the body, so that an earlier failure can still be answered with
    another response. Subclasses write the parts.

    Attributes
    ----------
    request_id : bytes
        The value of ``x-request-id``, unless the application sets that header; empty for none.
    status : int
        The status of the application's response; 0 until its first part was written.
    matched_route : str
        The application's own route that matched, such as ``/items/{id}``; empty if it reports none.
    is_complete : bool
        Whether the application has sent the last part.
    is_closed : bool
        Whether the application can send no more parts.
    is_gone : bool
        Whether a part could not be sent because the client has disconnected.
    """

    # Class attributes, because few requests change them early.
    _start: Message | None = None
    request_id = b""
    status = 0
    matched_route = ""
    is_complete = is_closed = is_gone = False

    def has_started(self) -> bool:
        """Return whether the application has sent a part of the response, even if it was not written yet."""
        return self._start is not None

    def drop_start(self) -> None:
        """Drop a start that was not written, because another response follows."""
        self._start = None

    def send(self, message: Message) -> Awaitable[None]:
        """Write one ASGI message, and wait while the client is too slow.

        Raises
        ------
        OSError
            The client has disconnected.
        RuntimeError, TypeError, ValueError
            The message is not valid, or not valid at this point.
        """
        if self.is_closed:
            self.is_gone = True
            raise ConnectionResetError(GONE)
        kind = message["type"]
        if kind == "http.response.body":
            if self._start is None or self.is_complete:
                raise RuntimeError(
                    "a response body was sent before the start of the response or after its end"
                )
            return self._send_body(message)
        if kind != "http.response.start" and kind != WHOLE_RESPONSE:
            raise RuntimeError(f"a message of type {kind!r} is not part of an HTTP response")
        if self._start is not None:
            raise RuntimeError("a response was started a second time")
        if not isinstance(message.get("status"), int):
            raise TypeError(f"the status of a response must be an integer, not {message.get('status')!r}")
        if MATCHED_ROUTE in message:
            self.matched_route = message[MATCHED_ROUTE]
        if kind == WHOLE_RESPONSE:
            sent = self._send_whole(message)
            if sent is not None:
                return sent
            self._start, body = split_whole(message, self.request_id)
            return self._send_body(body)
        self._start = self._with_request_id(message) if self.request_id else message
        return DONE

    def _with_request_id(self, start: Message) -> Message:
        headers = start.get("headers", ())
        for name, _ in headers:
            if name == REQUEST_ID or name.lower() == REQUEST_ID:
                return start
        return {**start, "headers": [*headers, (REQUEST_ID, self.request_id)]}

    def _send_body(self, message: Message) -> Awaitable[None]:
        """Write a part of the body; the first one together with the start."""
        raise NotImplementedError

    def _send_whole(self, message: Message) -> Awaitable[None] | None:
        """Write a whole response at once; return None if it has to be written as two messages."""
        return None


class HTTPResponse(Response):
    """An HTTP/1 response.

    Attributes
    ----------
    body : RequestBody
        The body of the request.
    closes : bool
        Whether the connection is closed after the response.
    headers_sent : bool
        Whether the head and the first part were written.
    is_written : bool
        Whether all parts were written.
    is_unsent : bool
        Whether all parts were written, some wait for the client, and the application has ended.
    """

    body: RequestBody

    method = ""
    is_http11 = True
    closes = headers_sent = is_written = is_unsent = False
    _writer: ResponseWriter | None = None
    _unsent: UnsentParts | None = None

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._server_state = connection.server_state
        self._stream = connection.stream

    @property
    def is_chunked(self) -> bool:
        """Whether the body is written in chunks."""
        return self._writer is not None and self._writer.is_chunked

    @property
    def is_filled(self) -> bool:
        """Whether as many bytes were written as ``content-length`` says."""
        return self._writer is not None and self._writer.is_filled

    def answer(self, status: int, text: str, headers: Headers = ()) -> None:
        """Write a response in place of the application's."""
        self._start, body = plain_text(status, text)
        self._start["headers"] += headers
        if self._stream.closed():
            return
        flushed = self._write(body, False)
        self.is_closed = True
        if flushed is None or flushed.done():
            self._complete()
        else:
            flushed.add_done_callback(lambda _: self._complete())

    def _send_body(self, message: Message) -> Awaitable[None]:
        more_body = bool(message.get("more_body", False))
        try:
            flushed = self._write(as_buffer(message.get("body", b"")), more_body)
        except ConnectionResetError:
            self.is_closed = self.is_gone = True
            raise
        if not self.status and self._start is not None:
            self.status = self._start["status"]
        self.is_complete = not more_body
        if flushed is not None and not flushed.done():
            return self._wait_for_client(flushed, len(message.get("body", b"")), more_body)
        if not more_body:
            self._complete()
        return DONE

    def _send_whole(self, message: Message) -> Awaitable[None] | None:
        server_state, body = self._server_state, self.body
        is_usual = self.is_http11 and body.is_ended and self.method != "HEAD" and not self.closes
        if not is_usual or len(message["body"]) > JOIN_BYTES or server_state.is_draining:
            return None
        data = server_state.heads.write(message, self.request_id)
        if data is None:
            return None
        self._start = message
        self._connection.note_answer(len(data))
        self.headers_sent = self.is_complete = True
        self.status = message["status"]
        try:
            flushed = self._stream.write(data)
        except ConnectionResetError:
            self.is_closed = self.is_gone = True
            raise
        if not flushed.done():
            return self._wait_for_client(flushed, len(data), False)
        self._complete()
        return DONE

    def _wait_for_client(
        self, flushed: asyncio.Future[None], size_bytes: int, more_body: bool
    ) -> Awaitable[None]:
        """Return what the application has to await before it continues."""
        if self._unsent is None:
            self._unsent = UnsentParts(self._server_state.limits)
        room = self._unsent.add(flushed, size_bytes, is_last=not more_body)
        if room is not None:
            return self._flush(room, more_body)
        if not more_body:
            self.is_written = self.is_unsent = True
            self.body.close()
            sending = self._unsent.send_rest(self._complete)
            self._server_state.add_task(asyncio.get_running_loop().create_task(sending))
        return DONE

    async def _flush(self, room: asyncio.Future[None], more_body: bool) -> None:
        try:
            await room
        except ConnectionResetError:
            self.is_closed = self.is_gone = True
            raise
        if not more_body:
            self._complete()

    def _write(self, body: BodyPart, more_body: bool) -> asyncio.Future[None] | None:
        writer = self._writer
        if writer is None:
            assert self._start is not None
            self.closes = self.closes or self.body.is_withheld
            writer = ResponseWriter(
                self._start,
                method=self.method,
                is_http11=self.is_http11,
                closes=self.closes or self._server_state.is_draining,
            )
            parts = writer.first(body, more_body, self._server_state.heads.date.line())
            self._writer = writer  # only now: if the head is invalid, a 500 can still be sent
            is_last = not (more_body or writer.closes) and self.body.is_ended
            self._connection.note_answer(sum(map(len, parts)) if is_last else 0)
            self.headers_sent = True
            self.closes = writer.closes
        else:
            parts = writer.next(body, more_body)
        if not self.body.is_ended and not self.body.is_full and not self.body.is_withheld:
            # A client may send its body slowly while it receives the response; it is idle only if neither
            # makes progress.
            self._server_state.idle_watch.watch(self._connection)
        if not parts:
            return None
        if len(body) <= JOIN_BYTES:
            parts = [b"".join(parts)]
        else:
            self._server_state.limits.trimmer.note(len(body))
        for part in parts[:-1]:
            self._stream.write(part)
        return self._stream.write(parts[-1])

    def _complete(self) -> None:
        self.is_written, self.is_unsent = True, False
        self.body.close()
        exchange = self._connection.exchange
        if exchange is not None:  # otherwise the connection was lost
            exchange.finish_response()


def split_whole(message: Message, request_id: bytes = b"") -> tuple[Message, Message]:
    """Split a `daskserve.common.types.WHOLE_RESPONSE` into the two messages of ASGI."""
    status, body = message["status"], message["body"]
    headers = list(message["headers"])
    names = {name.lower() for name, _ in headers}
    if b"content-length" not in names and b"transfer-encoding" not in names and status not in (204, 304):
        headers.append((b"content-length", b"%d" % len(body)))
    if request_id and REQUEST_ID not in names:
        headers.append((REQUEST_ID, request_id))
    start = {"type": "http.response.start", "status": status, "headers": headers}
    return start, {"type": "http.response.body", "body": body}
