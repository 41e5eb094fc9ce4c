"""The state of a response while an application sends it."""

from __future__ import annotations

from collections.abc import Awaitable

from daskserve.common.types import DONE, MATCHED_ROUTE, WHOLE_RESPONSE, Message
from daskserve.proxies.asgi import REQUEST_ID
from daskserve.proxies.exchange.stream import GONE


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
