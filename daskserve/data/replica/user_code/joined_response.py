"""The messages of an ASGI application's response, joined where they belong together.

An application sends the start of a response, then its body. Most responses have one body message, so both
cross to the worker's loop, and to another process, as one `daskserve.common.types.WHOLE_RESPONSE`.

A stream may have its first part much later than its start, and its client waits for the start: the
``onopen`` of an ``EventSource`` is one example. The start of a response without a ``content-length`` is
therefore held back for the current iteration of the loop only. With a ``content-length`` the body is at hand,
and most responses save the callback.

Starlette answers an error that no code handles with 500, and raises it again at once. That answer is held
back for the same moment: an error of another deployment may have a better one, see `servable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from daskserve.common.types import DONE, MATCHED_ROUTE, WHOLE_RESPONSE, Message

_INTERNAL_ERROR = b"Internal Server Error"
#: Characters of a route that are told; it becomes a label.
MAX_ROUTE = 200


class ResponseSink(Protocol):
    """Takes the messages of a response; see `daskserve.data.replica.execution.message_pipe.MessagePipe`."""

    #: Whether it has got any.
    is_started: bool

    def send(self, message: Message) -> Awaitable[None]:
        """Take a message."""

    def send_nowait(self, *messages: Message) -> Awaitable[None] | None:
        """Take messages from a callback; return what the next message has to wait for."""


class JoinedResponse:
    """Holds the start of a response back until its first body message, or for a moment.

    Parameters
    ----------
    sink : ResponseSink
        Takes the messages that are passed on.
    scope : mapping
        The scope of the request, in which Starlette and FastAPI leave the route that they have matched.

    Attributes
    ----------
    start : Message or None
        The start, while it is held back.
    held : Message or None
        An answer of Starlette's to an error, while it is held back.
    """

    __slots__ = ("_passing", "_scope", "_sink", "held", "start")

    def __init__(self, sink: ResponseSink, scope: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._sink = sink
        self._scope = scope
        self._passing: Awaitable[None] | None = None
        self.start: Message | None = None
        self.held: Message | None = None

    def drop(self) -> None:
        """Pass on nothing more of what is held back."""
        self.start = self.held = None

    async def end(self) -> None:
        """Pass on an answer that is held back; the application has ended."""
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
            # A new dictionary, because the application's may be one that it uses again.
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
    # Servers pass the start of a response on with the first part of its body.
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
    """Return the whole response that two messages make; None if they make none, or not a valid one."""
    if message["type"] != "http.response.body" or message.get("more_body", False):
        return None
    route = start.get(MATCHED_ROUTE)
    if len(start) > 3 + (route is not None):
        return None
    status, body = start["status"], message.get("body", b"")
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
