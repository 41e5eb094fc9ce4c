"""One request as the ingress follows it: what its headers ask for, and how far its response is."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable
from typing import Literal

from daskserve.common.types import DONE, ON_DEMAND, WHOLE_RESPONSE, Message, Send
from daskserve.proxies.asgi import REQUEST_ID, begin_response
from daskserve.proxies.ingress.metrics import NO_ROUTE

REQUEST_TIMEOUT = b"x-request-timeout-seconds"
#: The key of a scope whose `REQUEST_TIMEOUT` was sent by a trusted forwarder.
TRUSTED_TIMEOUT = "daskserve.trusted_timeout"
SHARD_KEY = b"x-serve-shard-key"
HOST = b"host"
CONTENT_LENGTH = b"content-length"
TRANSFER_ENCODING = b"transfer-encoding"
EXPECT = b"expect"
_HEADERS_READ = frozenset(
    (REQUEST_ID, REQUEST_TIMEOUT, SHARD_KEY, HOST, CONTENT_LENGTH, TRANSFER_ENCODING, EXPECT)
)

#: An id that a client may choose: it stands in headers, in logs and in user code. Heroku and Rails have
#: similar rules; the punctuation is that of UUIDs, base64 and the trace ids of AWS.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9\-._~+/=:@]{1,128}")


class IngressRequest:
    """An HTTP request.

    Parameters
    ----------
    headers : iterable of pairs
        From its scope.
    send : callable
        The server's.
    takes_whole : bool
        Whether ``send`` accepts a `WHOLE_RESPONSE`.

    Attributes
    ----------
    status : int
        The status of the response that was passed on; 0 before.
    is_gone : bool
        Whether the client has disconnected.
    is_complete : bool
        Whether the whole response was passed on.
    route : Route
        What answers the request, for the metrics.
    cause : str
        What went wrong, for the metrics.
    """

    is_socket = False

    # Most requests neither read nor change these.
    #: Whether a trusted forwarder sent the timeout.
    has_trusted_timeout = False
    host = b""
    #: Whether its own id is not used.
    has_bad_id = False
    is_gone = False
    is_complete = False

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], send: Send, takes_whole: bool = False) -> None:
        self._send = send
        self._takes_whole = takes_whole
        self._start: Message | None = None
        self.request_id = b""
        self.shard_key: bytes | None = None
        self.timeout: bytes | None = None
        self.has_body: bool | Literal[2] = False
        self.route = NO_ROUTE
        self.status = 0
        self.cause = ""
        for name, value in headers:
            if name in _HEADERS_READ:
                if name == HOST:
                    self.host = value
                elif name == REQUEST_ID:
                    if _REQUEST_ID.fullmatch(value) is None:
                        self.has_bad_id = True
                    elif not self.request_id:
                        self.request_id = value
                elif name == SHARD_KEY:
                    self.shard_key = value
                elif name == REQUEST_TIMEOUT:
                    self.timeout = value
                elif name == EXPECT:
                    self.has_body = ON_DEMAND
                else:
                    self.has_body = self.has_body or value != b"0"

    def has_started(self) -> bool:
        """Return whether a part of the response is here, passed on or not."""
        return bool(self.status) or self._start is not None

    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message on to the server; a response without a request id gets one.

        The start of a response is passed on with its first bytes; see `begin_response`.
        """
        kind = message["type"]
        if kind == "http.response.start" or kind == WHOLE_RESPONSE:
            status = message["status"]
            if not isinstance(status, int):
                raise TypeError(f"the status of a response is a number, not {status!r}")
            if kind == WHOLE_RESPONSE:
                message = {**message, "request_id": self.request_id}
            else:
                message = self._named(message)
            if kind == WHOLE_RESPONSE and self._takes_whole and self._start is None:
                self._start = message
                self.status = status
            else:
                self._start, body = begin_response(self._start, message)
                if body is None:
                    return DONE
                message = body
        self.is_complete = not message.get("more_body", False)
        try:
            if not self.status and self._start is not None:
                self.status = self._start["status"]
                sent = self._send(self._start)
                if sent is not DONE:
                    return self._send_after(sent, message)
            sent = self._send(message)
        except OSError:
            self.is_gone = True
            raise
        return DONE if sent is DONE else self._send_after(sent)

    def _named(self, message: Message) -> Message:
        headers = message.get("headers", ())
        for name, _ in headers:
            if name == REQUEST_ID or name.lower() == REQUEST_ID:
                return message
        return {**message, "headers": [*headers, (REQUEST_ID, self.request_id)]}

    async def _send_after(self, sent: Awaitable[None], message: Message | None = None) -> None:
        try:
            await sent
            if message is not None:
                await self._send(message)
        except OSError:
            self.is_gone = True
            raise

    def drop_start(self) -> None:
        """Forget the start of a response that will not follow."""
        self._start = None


class IngressWebSocket(IngressRequest):
    """A WebSocket; an HTTP response to its handshake denies it."""

    is_socket = True

    async def send(self, message: Message) -> None:
        """Pass a message on to the server."""
        kind = message["type"]
        if kind.startswith("http.response."):
            kind = f"websocket.{kind}"
            message = {**message, "type": kind}
        try:
            await self._send(message)
        except OSError:
            self.is_gone = True
            if self.status != 101:
                raise
            return  # the application gets a disconnect, and may have to clean up then
        if not self.status:
            answers = {"websocket.accept": 101, "websocket.close": 403}
            self.status = answers.get(kind) or message.get("status", 0)


def parse_timeout(value: bytes, *, limit_s: float | None, is_trusted: bool = False) -> float | None:
    """Return the seconds that a request may take: what its header asks for, within the operator's limit.

    A value that is not positive, or infinite, asks for no limit, and so does None. An unreadable one counts
    as none. Only a trusted sender gets more than the operator's limit.
    """
    try:
        seconds = float(value)
    except ValueError:
        return limit_s
    if seconds != seconds:  # "nan" is a float, but no time
        return limit_s
    wanted_s = seconds if 0 < seconds < float("inf") else None
    if is_trusted or limit_s is None:
        return wanted_s
    return limit_s if wanted_s is None else min(wanted_s, limit_s)
