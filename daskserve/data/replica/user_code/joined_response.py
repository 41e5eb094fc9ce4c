"""Joins the start and the body of an ASGI application's response.

An application sends the start of a response, then its body. Most responses have one body message. Then both
messages cross to the worker's loop, and to another process, as one `daskserve.common.types.WHOLE_RESPONSE`.

The first part of a stream may come much later than its start, and the client may wait for the start, as the
``onopen`` of an ``EventSource`` does. So the start of a response without a ``content-length`` is delayed only
until the next iteration of the loop. With a ``content-length``, the body follows at once, and needs no
callback.

If no code handles an error, Starlette answers with 500 and raises the error again. This answer is delayed in
the same way, because an error of another deployment may have a better one; see `servable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from daskserve.common.types import DONE, MATCHED_ROUTE, WHOLE_RESPONSE, Message

_INTERNAL_ERROR = b"Internal Server Error"
#: Maximum length of a route, which becomes a label.
MAX_ROUTE = 200


class ResponseSink(Protocol):
    """Takes the messages of a response; see `daskserve.data.replica.execution.message_pipe.MessagePipe`."""

    #: Whether it has received any message.
    is_started: bool

    def send(self, message: Message) -> Awaitable[None]:
        """Take a message."""

    def send_nowait(self, *messages: Message) -> Awaitable[None] | None:
        """Take messages from a callback; return an awaitable to await before the next message."""


class JoinedResponse:
    """Delays the start of a response until its first body message, or the next iteration of the loop.

    Parameters
    ----------
    sink : ResponseSink
        Takes the resulting messages.
    scope : mapping
        The scope of the request, in which Starlette and FastAPI store the matched route.

    Attributes
    ----------
    start : Message or None
        The start, while it is delayed.
    held : Message or None
        Starlette's answer to an error, while it is delayed.
    """

    __slots__ = ("_passing", "_scope", "_sink", "held", "start")

    def __init__(self, sink: ResponseSink, scope: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._sink = sink
        self._scope = scope
        self._passing: Awaitable[None] | None = None
        self.start: Message | None = None
        self.held: Message | None = None

    def drop(self) -> None:
        """Drop the delayed messages."""
        self.start = self.held = None

    async def end(self) -> None:
        """Send a delayed answer, because the application has ended."""
        held, self.held = self.held, None
        if held is not None:
            await self._sink.send(held)

    def send(self, message: Message) -> Awaitable[None]:
        """Take a message of the application; the ``send`` of its interface."""
        start = self.start
        if start is None:
            if self._passing is not None:
                return self._send_later(message)
            if "headers" in message:
                message = _with_repeatable_headers(message)
            if self._sink.is_started or message["type"] != "http.response.start":
                return self._sink.send(message)
            # A new dictionary, because the application may reuse its own.
            route = getattr(self._scope.get("route"), "path", None)
            if type(route) is str:
                message = {**message, MATCHED_ROUTE: route[:MAX_ROUTE]}
            self.start = message
            if not _has_length(message):
                asyncio.get_running_loop().call_soon(self._pass_on)
            return DONE
        self.start = None
        whole = join(start, message)
        if whole is None:
            return self._send_both(start, message)
        if whole["status"] == 500 and whole["body"] == _INTERNAL_ERROR:
            self.held = whole
            asyncio.get_running_loop().call_soon(self._pass_on)
            return DONE
        return self._sink.send(whole)

    def _pass_on(self) -> None:
        start, self.start = self.start, None
        held, self.held = self.held, None
        if start is not None:
            self._passing = self._sink.send_nowait(start, _no_part_yet())
        elif held is not None:
            self._passing = self._sink.send_nowait(held)

    async def _send_later(self, message: Message) -> None:
        passing, self._passing = self._passing, None
        if passing is not None:
            await passing
        await self._sink.send(message)

    async def _send_both(self, start: Message, message: Message) -> None:
        await self._sink.send(start)
        await self._sink.send(message)


def _no_part_yet() -> Message:
    # Servers send the start of a response with the first part of its body.
    return {"type": "http.response.body", "body": b"", "more_body": True}


def _with_repeatable_headers(message: Message) -> Message:
    """Return a message whose headers can be read more than once: ASGI allows any iterable."""
    headers = message["headers"]
    return message if isinstance(headers, (list, tuple)) else {**message, "headers": list(headers)}


def _has_length(start: Message) -> bool:
    for name, _ in start.get("headers", ()):  # noqa: SIM110 - each request pays for it
        if name.lower() == b"content-length":
            return True
    return False


def join(start: Message, message: Message) -> Message | None:
    """Return the whole response of two messages; None if it has further parts, or is not valid."""
    if message["type"] != "http.response.body" or message.get("more_body", False):
        return None
    route = start.get(MATCHED_ROUTE)
    if len(start) > 3 + (route is not None):
        return None
    status, body = start.get("status"), message.get("body", b"")
    if type(body) is not bytes or status in (204, 304):
        return None
    headers = []
    for pair in start.get("headers", ()):
        name, value = pair
        if name.lower() != b"content-length":
            headers.append((name, value))
        elif value != b"%d" % len(body):
            return None
    whole = {"type": WHOLE_RESPONSE, "status": status, "headers": tuple(headers), "body": body}
    if route is not None:
        whole[MATCHED_ROUTE] = route
    return whole
