"""One HTTP request, and the ASGI application that answers it.

The connection passes the parts of the request to the exchange, and pauses while the future that
`data_received` has returned is pending. The exchange writes the response to the stream, and then lets the
connection continue with the next request. A request ends in one of these ways:

1. Request and response are complete: the connection stays open or is closed.
2. Only the response is complete: the rest of the request is read and dropped for up to `LINGER_S`, because
   closing a socket with unread data resets the connection and may destroy the response.
3. The client disconnects (see `Exchange.probe_client`): sends raise `ConnectionResetError`, and the task is
   cancelled, unless the client has received as many bytes as ``content-length`` says.
4. The application fails: 500, or the connection is closed if a response has begun.
5. The body is too large (413), too slow (408) or exceeds the memory budget (503): this status, or the
   connection is closed if a response has begun. The task is cancelled.
6. The server stops: as 3, and the connection is closed.
7. The head is refused: the server responds, ends its side of the connection, and drops further data.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any
from urllib.parse import unquote_to_bytes

from daskserve.errors import http_status_of
from daskserve.payload.packed_errors import is_logged
from daskserve.proxies.asgi import LOST_REPLICA, Headers, Scope
from daskserve.proxies.exchange.http_response import HTTPResponse
from daskserve.proxies.exchange.limits.limits import LINGER
from daskserve.proxies.exchange.request.body import BodyOnDemand, RequestBody
from daskserve.proxies.exchange.request.head import (
    MALFORMED,
    RefusedRequestError,
    RequestHead,
    asks_to_continue,
    body_length,
    is_handshake,
    keeps_alive,
    split_target,
)
from daskserve.proxies.exchange.server_state import Connection, ServerState
from daskserve.proxies.exchange.stream import Stream
from daskserve.proxies.exchange.taken_connection import TakenConnection
from daskserve.proxies.exchange.websocket.session import BadHandshakeError, WebSocketSession

log = logging.getLogger("daskserve.proxies")

#: How long a client that has its response may continue to send the request body, which is dropped.
LINGER_S = 2.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Exchange:
    """Runs the application on one request.

    The connection that creates an exchange is in the server's watch for idle connections.
    """

    body: RequestBody  # set by `begin`

    def __init__(self, server_state: ServerState, connection: Connection) -> None:
        self._server_state = server_state
        self._connection = connection
        self._response = HTTPResponse(connection)
        connection.exchange = self
        self._is_refused = False  # so it is unclear where the next request begins
        self._target = ""
        self._linger: asyncio.TimerHandle | None = None
        self.is_over = False  # the connection has gone on to the next request, or is closing
        self._task: asyncio.Task[None] | None = None
        self._probes = 0  # number of calls of `probe_client`

    # ---- called by the server, in this order

    def begin(self, head: RequestHead) -> int | None:
        """Start the application, which may respond before the body is received.

        Returns
        -------
        int or None
            The size of the body that the connection has to read; None if it is chunked.
        """
        method, target, version, headers, framing = head
        response = self._response
        response.method = method
        self._target = target
        response.is_http11 = version != "HTTP/1.0"
        connection = self._connection
        try:
            host = framing.get("Host")
            if host is None or host != connection.host:
                connection.check_host(framing, version)
            if "Connection" in framing or not response.is_http11:
                response.closes = not keeps_alive(framing.get("Connection", ""), version)
            length: int | None = 0
            if "Content-Length" in framing or "Transfer-Encoding" in framing:
                length = body_length(framing, version)
            if target[:1] == "/" and method != "CONNECT":
                path, _, query = target.partition("?")
            else:
                path, query = split_target(method, target, host)
                if method == "CONNECT":
                    raise RefusedRequestError(
                        "This server is not a forward proxy: it does not support CONNECT.", 501
                    )
        except RefusedRequestError as error:
            return self.refuse_head(error)
        raw_path = path.encode("latin-1")
        if "%" in path or not path.isascii():
            path = unquote_to_bytes(raw_path).decode("utf-8", "replace")
        if connection.taken is not None and self._goes_back(connection.taken, path):
            return 0
        connection.path = path
        is_on_demand = length != 0 and "Expect" in framing and asks_to_continue(framing, version)
        self.body = BodyOnDemand(self._ask_for_body) if is_on_demand else RequestBody(is_ended=length == 0)
        response.body = self.body
        if length != 0:
            self.body.expect(length, self._server_state.largest_body_bytes(), self._server_state.limits)
        if length is not None and self.body.excess is not None:
            self.refuse(*self.body.excess, is_coming="Expect" not in framing)
            return length
        scope = connection.scope.copy()
        scope["http_version"] = version[5:]
        scope["method"] = method
        scope["path"] = path
        scope["raw_path"] = raw_path
        scope["query_string"] = query.encode("latin-1")
        scope["headers"] = headers
        if connection.lost is not None:
            scope[LOST_REPLICA], connection.lost = connection.lost, None
        if "Upgrade" in framing and response.is_http11 and is_handshake(method, framing):
            if length == 0:
                self._open_socket(scope)
            else:
                self.refuse(400, "The handshake of a WebSocket must not have a body.")
            return length
        self._task = asyncio.get_running_loop().create_task(self._run(scope))
        self._server_state.tasks.add(self._task)
        if is_on_demand:
            self._server_state.idle_watch.unwatch(connection)  # the client waits for the application
        return length

    def data_received(self, chunk: bytes, *, is_last: bool = False) -> asyncio.Future[None] | None:
        """Pass on a part of the body; the connection waits for the returned future before it reads more.

        After the last part, the connection calls `finish` at once.
        """
        room = self.body.feed(chunk)
        return self._note_part(room, is_last=is_last)

    def body_filled(self, size_bytes: int, *, is_last: bool) -> None:
        """Record that a part of the body was received into its buffer."""
        self.body.fill(size_bytes)
        self._note_part(None, is_last=is_last)

    def _note_part(self, room: asyncio.Future[None] | None, *, is_last: bool) -> asyncio.Future[None] | None:
        watch = self._server_state.idle_watch
        if self._response.is_closed or self._response.is_written:
            return None  # the response has ended: the rest of the body is dropped
        if self.body.excess is not None and not self._server_state.make_room(self.body):
            self.refuse(*self.body.excess)
            return None
        if room is not None:
            # The connection waits for the application now, not for the client.
            watch.unwatch(self._connection)
            room.add_done_callback(self._expect_more)
        elif not is_last:
            watch.watch(self._connection)
        return room

    def finish(self) -> None:
        """Record that the request is complete."""
        self._server_state.idle_watch.unwatch(self._connection)
        if not self.body.is_ended:
            self.body.end()
        if self._response.is_written:
            self._continue(is_late=False)

    def finish_response(self) -> None:
        """Record that the response is complete."""
        if self.body.is_ended or self.body.is_withheld:
            self._continue(is_late=False)
        elif not self.is_over:
            self._linger = asyncio.get_running_loop().call_later(
                LINGER_S, partial(self._continue, is_late=True)
            )

    def refuse_head(self, error: RefusedRequestError) -> int:
        """Refuse a request, and read no more: it is unclear where its body ends, or whether it has one."""
        log.info("Refused a request from %s: %s", self._connection, error)
        self._server_state.refusals.causes[error.cause] += 1
        self._response.method = error.method or self._response.method
        self.body = self._response.body = RequestBody(is_ended=True)
        self._response.closes = self._is_refused = True
        self._response.answer(error.status, str(error))
        self._notify_refused(error.method or (self._response.method if self._target else ""), error.status)
        return 0

    def reject(self, reason: str) -> None:
        """Refuse a malformed body with 400, or close the connection if a response has begun."""
        log.info("Refused the body of a request from %s: %s", self._connection, reason)
        self._is_refused = True
        if self._response.is_written:
            self._server_state.refusals.causes[MALFORMED] += 1
            self._continue(is_late=False)
        else:
            self.refuse(400, f"The request body is malformed: {reason}", is_coming=False)

    def on_connection_close(self) -> None:
        """Cancel the request because its client has disconnected. Idempotent, and valid in every state."""
        self._response.is_closed = self.is_over = True
        self._server_state.idle_watch.unwatch(self._connection)
        if self._linger is not None:
            self._linger.cancel()
        if self._task is None:
            return
        self.body.close()
        # An application may send the end of its response late, for example after background tasks.
        if not self._response.is_written and not self._response.is_filled:
            self._server_state.cancel(self._task)

    def probe_client(self, *, is_late: bool) -> None:
        """Write a few bytes to a client whose data has ended; this resets the connection if it has left.

        A half-closed client ignores them: they are 100 Continue (RFC 9110, 15.2.1), or a zero before the size
        of a chunk. Nothing is written if the response follows soon. HTTP/1.0 has neither, so its connection
        is closed if the check ``is_late``.
        """
        self._probes += 1
        response, stream = self._response, self._connection.stream
        if stream.writing():
            return
        if not response.headers_sent and not response.is_http11:
            if self._probes > 1 and is_late:
                self._connection.close()
        elif self._probes == 2 and (not response.headers_sent or response.is_chunked):
            stream.write(b"0" if response.headers_sent else _CONTINUE)

    def refuse(self, status: int, text: str, headers: Headers = (), *, is_coming: bool = True) -> None:
        """Respond in place of the application, or close the connection if a response has begun."""
        self._server_state.refusals.count_body(
            self._response.method, status, is_cut=self._response.headers_sent
        )
        self.body.is_refused = True
        self.body.close()  # the application must not take the received part for the whole body
        self._server_state.idle_watch.unwatch(self._connection)
        if self._task is not None:
            self._server_state.cancel(self._task)
        if self._response.headers_sent:
            return self._cut()
        self._response.closes = True
        if not is_coming:
            self.body.is_ended = True
        self._response.answer(status, text, headers)
        self._notify_refused(self._response.method, status)

    def _notify_refused(self, method: str, status: int) -> None:
        version = "1.1" if self._response.is_http11 else "1.0"
        self._server_state.refusals.notify(self._connection.client, method, self._target, version, status)

    @property
    def response_started(self) -> bool:
        """Whether a part of the response was written."""
        return self._response.headers_sent

    @property
    def response_complete(self) -> bool:
        """Whether the whole response was written."""
        return self._response.is_written

    @property
    def wants_body(self) -> bool:
        """Whether the body is incomplete and still needed, and the client does not wait for 100 Continue."""
        is_done = self.body.is_ended or self._response.is_closed or self._response.is_written
        return self.body.is_asked and not is_done

    @property
    def unread(self) -> Stream | None:
        """The stream, if it is not being read because a complete request is answered; otherwise None."""
        is_waiting = self._task is not None and not self.is_over and self.body.is_ended
        return self._connection.stream if is_waiting else None

    # ---- private

    async def _run(self, scope: Scope) -> None:
        """Run the application; its errors are logged here."""
        body = self.body
        try:
            await self._server_state.app(scope, body, self._response.send)
        except asyncio.CancelledError:
            if not self._response.is_closed and not self._response.is_written:
                self._fail()  # the application cancelled it, or the event loop is ending
            raise
        except Exception as error:
            if self._response.is_closed:
                log.debug("A request failed after its client had disconnected", exc_info=error)
                return
            if not is_logged(error):
                # Errors of daskserve with a status other than 500 need no traceback.
                is_fault = http_status_of(error) == 500
                log.error("%s failed: %r", _request_line(scope), error, exc_info=is_fault)
            self._fail()
        else:
            if not self._response.is_written and not self._response.is_closed:
                log.error("%s ended without a complete response", _request_line(scope))
                self._fail()
        finally:
            # A done callback would cost an iteration of the event loop. If the task never starts,
            # `ServerState.cancel` removes it.
            self._server_state.tasks.discard(self._task)
            if body.received_bytes:
                self._server_state.limits.trimmer.note(body.received_bytes)
                body.release()

    def _open_socket(self, scope: dict[str, Any]) -> None:
        """Hand the connection over to a WebSocket session, or refuse the handshake."""
        del scope["method"]
        scope |= {"type": "websocket", "scheme": "ws" + scope["scheme"].removeprefix("http")}
        scope["extensions"] = {"websocket.http.response": {}}
        server_state = self._server_state
        try:
            session = WebSocketSession(
                server_state.app,
                scope,
                self._connection.stream,
                limits=server_state.limits,
                clock=server_state.clock,
                on_end=partial(_end_socket, self._connection),
                **server_state.websocket_options,
            )
        except BadHandshakeError as error:
            self._response.closes = True
            self._response.answer(error.status, str(error), error.headers)
            return
        self.is_over = True
        server_state.idle_watch.unwatch(self._connection)
        self._connection.detach()
        server_state.sockets.add(session)
        if server_state.is_draining or server_state.moves.gives_back:
            session.go_away()
        server_state.add_task(session.start())

    def _goes_back(self, taken: TakenConnection, path: str) -> bool:
        """Return whether the connection was given back, because another process answers this path."""
        connection = self._connection
        state = self._server_state
        is_new = path != connection.path and not state.is_draining
        if is_new and state.moves.is_elsewhere(path) and connection.give_back():
            return True
        taken.begin()
        return False

    def _ask_for_body(self) -> None:
        """Send 100 Continue, unless the response has begun."""
        if not (self._response.is_closed or self._response.headers_sent or self._connection.stream.closed()):
            self._connection.stream.write(_CONTINUE)
        if self.wants_body:
            self._server_state.idle_watch.watch(self._connection)

    def _continue(self, *, is_late: bool) -> None:
        if self.is_over or self._response.is_unsent:
            return
        self.is_over = True
        if is_late:
            self._server_state.limits.hit(LINGER)
        if self._linger is not None:
            self._linger.cancel()
        if self._is_refused:
            return self._connection.lingering_close()
        self._connection.finish(closes=self._response.closes)

    def _expect_more(self, _: asyncio.Future[None]) -> None:
        if not self._response.is_closed and not self._response.is_written and not self.body.is_ended:
            self._server_state.idle_watch.watch(self._connection)

    def _fail(self) -> None:
        if self._response.headers_sent:
            return self._cut()
        self._response.answer(500, "Internal Server Error")

    def _cut(self) -> None:
        if not self._response.is_written and not self.is_over:
            self._response.is_closed = self.is_over = True
            self.body.close()
            self._connection.close_when_sent()


def _request_line(scope: Scope) -> str:
    # The raw path, because the decoded one may contain line breaks.
    return f"{scope['method']} {scope['raw_path'].decode('latin-1')}"


def _end_socket(connection: Connection, session: WebSocketSession) -> None:
    connection.server_state.sockets.discard(session)
    if connection.taken is not None:
        connection.taken.end()
