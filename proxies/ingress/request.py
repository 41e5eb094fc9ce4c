"""One request in the ingress: the headers that the ingress reads, and the response."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote_plus

from daskserve.common.types import ON_DEMAND, Message, Send
from daskserve.loops.connection_table import LostAttempt
from daskserve.proxies.asgi import REQUEST_ID
from daskserve.proxies.exchange.http_response import Response
from daskserve.proxies.ingress.metrics import NO_ROUTE
from daskserve.telemetry.tracing.carrier import TRACE_HEADERS, Carrier

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.span import RecordedSpan

REQUEST_TIMEOUT = b"x-request-timeout-seconds"
#: The key of a scope whose `REQUEST_TIMEOUT` was sent by a trusted forwarder.
TRUSTED_TIMEOUT = "daskserve.trusted_timeout"
SHARD_KEY = b"x-serve-shard-key"
HOST = b"host"
CONTENT_LENGTH = b"content-length"
TRANSFER_ENCODING = b"transfer-encoding"
EXPECT = b"expect"
#: The headers that name the multiplexed model; reverse proxies may have changed underscores to hyphens.
MODEL_ID = frozenset(
    b"serve%bmultiplexed%bmodel%bid" % each for each in itertools.product((b"_", b"-"), repeat=3)
)
#: The header that names the session, unless the deployment's router has another source.
SESSION_ID = b"x-session-id"
MAX_SESSION = 1024
_HEADERS_READ = frozenset(
    (
        REQUEST_ID,
        REQUEST_TIMEOUT,
        SHARD_KEY,
        HOST,
        CONTENT_LENGTH,
        TRANSFER_ENCODING,
        EXPECT,
        SESSION_ID,
        *TRACE_HEADERS,
        *MODEL_ID,
    )
)

#: A valid id from a client: it appears in headers, in logs and in user code. Heroku and Rails have similar
#: rules. The punctuation is that of UUIDs, base64 and the trace ids of AWS.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9\-._~+/=:@]{1,128}")


class IngressRequest:
    """The headers of a request that the ingress reads, and its response.

    Attributes
    ----------
    route : Route
        The route that matched, for the metrics.
    cause : str
        The cause of an error, for the metrics; empty without one.
    """

    # Most requests neither read nor change these.
    #: Whether a trusted forwarder sent the timeout.
    has_trusted_timeout = False
    host = b""
    #: The trace context to pass on; None without one.
    trace: Carrier | None = None
    #: The span, if the request is sampled.
    span: RecordedSpan | None = None
    has_trace_headers = False
    #: Whether the client's id is not valid.
    has_bad_id = False
    #: Set if the request had begun at a replica that is lost.
    lost: LostAttempt | None = None
    #: The multiplexed model; empty if none is named.
    model_id = ""
    #: The session; empty without one.
    session_id = ""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], response: Response) -> None:
        self.response = response
        self.is_socket = isinstance(response, WebSocketResponse)
        self.shard_key: bytes | None = None
        self.timeout: bytes | None = None
        self.has_body: bool | Literal[2] = False
        self.route = NO_ROUTE
        self.cause = ""
        for name, value in headers:
            if name in _HEADERS_READ:
                if name in TRACE_HEADERS:
                    self.has_trace_headers = True
                elif name == HOST:
                    self.host = value
                elif name == REQUEST_ID:
                    if _REQUEST_ID.fullmatch(value) is None:
                        self.has_bad_id = True
                    elif not response.request_id:
                        response.request_id = value
                elif name == SHARD_KEY:
                    self.shard_key = value
                elif name == REQUEST_TIMEOUT:
                    self.timeout = value
                elif name in MODEL_ID:
                    self.model_id = text_of(value)
                elif name == SESSION_ID:
                    self.session_id = value.decode("latin-1")[:MAX_SESSION]
                elif name == EXPECT:
                    self.has_body = ON_DEMAND
                else:
                    self.has_body = self.has_body or value != b"0"


def text_of(value: bytes) -> str:
    """Return the value of a header as a string."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def parameter_of(scope: Mapping[str, Any], name: str) -> str:
    """Return the first value of a query parameter; empty if there is none."""
    query = scope.get("query_string") or b""
    for each in query.split(b"&"):
        key, _, value = each.partition(b"=")
        if unquote_plus(key.decode("latin-1")) == name:
            return unquote_plus(value.decode("latin-1"))
    return ""


def response_to(send: Send) -> Response:
    """Return the server's own response if ``send`` is its method; otherwise one that calls ``send``."""
    found = getattr(send, "__self__", None)
    return found if isinstance(found, Response) else PassedResponse(send)


class PassedResponse(Response):
    """A response that is sent through middlewares, as ASGI messages."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def _send_body(self, message: Message) -> None:
        self.is_complete = not message.get("more_body", False)
        try:
            if not self.status and self._start is not None:
                self.status = self._start["status"]
                await self._send(self._start)
            await self._send(message)
        except OSError:
            self.is_gone = True
            raise


class WebSocketResponse(Response):
    """The messages that a WebSocket sends; an HTTP response to the handshake denies it."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def send(self, message: Message) -> None:
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
            return  # the application receives a disconnect, and can clean up then
        if not self.status:
            answers = {"websocket.accept": 101, "websocket.close": 403}
            self.status = answers.get(kind) or message.get("status", 0)

    def has_started(self) -> bool:
        return bool(self.status)


def parse_timeout(value: bytes, *, limit_s: float | None, is_trusted: bool = False) -> float | None:
    """Return the timeout of a request in seconds, given its header and the operator's limit; None if there is
    no timeout.

    Zero, negative and infinite values mean no limit. Values that are not numbers are ignored. Only a trusted
    sender may exceed the operator's limit.
    """
    try:
        seconds = float(value)
    except ValueError:
        return limit_s
    if seconds != seconds:  # float() accepts "nan"
        return limit_s
    wanted_s = seconds if 0 < seconds < float("inf") else None
    if is_trusted or limit_s is None:
        return wanted_s
    return limit_s if wanted_s is None else min(wanted_s, limit_s)
