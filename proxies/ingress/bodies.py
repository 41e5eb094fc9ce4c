"""Prepares the body of a request before the request is sent to a replica.

A plain function cannot wait for its body, so the body is gathered first. A client that sends it slowly, or
not at all, then occupies a connection, but no slot of a replica. The endpoint also sets the maximum size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from weakref import ref

from daskserve.common.types import BodyUse, Message, Receive, Send
from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.proxies.exchange.request.body import RequestBody

#: The body of the request that the current task answers, because middlewares may hide it. The reference is
#: weak, because long-lived tasks, such as those of a channel, keep the context in which they were created.
_hidden_body: ContextVar[ref[RequestBody] | None] = ContextVar("daskserve_body", default=None)


class BodyMiddleware:
    """The outermost middleware: remembers the body, because others may replace ``receive`` and the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if isinstance(receive, RequestBody):
            _hidden_body.set(ref(receive))
        return self._app(scope, receive, send)


def _body_of(receive: Receive) -> RequestBody | None:
    if isinstance(receive, RequestBody):
        return receive
    hidden = _hidden_body.get()
    return None if hidden is None else hidden()


def is_refused(receive: Receive) -> bool:
    """Return whether the server has ended a request because of its body."""
    body = _body_of(receive)
    return body is not None and body.is_refused


class CancellableReceive:
    """Wraps a middleware's ``receive`` so that a cancelled call loses no message: the next call returns it.

    `RequestBody.receive` loses nothing if it is cancelled, but a middleware's ``receive`` may. It may also
    require that each call ends in the task in which it began.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._reading: asyncio.Future[Message] | None = None

    async def __call__(self) -> Message:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._receive())
            self._reading.add_done_callback(_note_error)
        message = await asyncio.shield(self._reading)
        self._reading = None
        return message


def _note_error(reading: asyncio.Future[Message]) -> None:
    # Otherwise asyncio logs the error if no further call awaits it.
    if not reading.cancelled():
        reading.exception()


def cancellable(receive: Receive) -> Receive:
    """Return a ``receive`` whose calls lose no message if they are cancelled."""
    return receive if isinstance(receive, RequestBody) else CancellableReceive(receive)


class BodyPreparation:
    """Prepares the bodies of one ingress.

    Parameters
    ----------
    rules_of : callable
        Returns how the bodies of an endpoint are read, and their maximum size; None if not known yet.
    wait_for_rules : callable
        Returns an awaitable that ends when these rules are known.
    check_queue : callable
        Raises `BackPressureError` if no further request to an endpoint may wait for a slot.
    """

    def __init__(
        self,
        rules_of: Callable[[str], tuple[BodyUse, int] | None],
        wait_for_rules: Callable[[str], Awaitable[None]],
        check_queue: Callable[[str], None],
    ) -> None:
        self._rules_of = rules_of
        self._wait_for_rules = wait_for_rules
        self._check_queue = check_queue

    def prepare(self, endpoint: str, receive: Receive) -> Awaitable[None] | None:
        """Apply the rules of an endpoint to a body.

        Returns an awaitable that ends when the request can be sent, and may raise the same errors; None if
        the request can be sent at once.

        Raises
        ------
        BodyTooLargeError
            The body exceeds the maximum size.
        BackPressureError
            The body is incomplete, and no further request may wait for a slot.
        """
        body = _body_of(receive)
        if body is None:
            return None
        rules = self._rules_of(endpoint)
        if rules is None:
            return self._prepare_when_known(endpoint, body)
        return self._prepare(endpoint, body, *rules)

    def _prepare(
        self, endpoint: str, body: RequestBody, use: BodyUse, max_bytes: int
    ) -> Awaitable[None] | None:
        if body.is_ended and body.received_bytes <= max_bytes:
            return None
        body.limit_to(max_bytes)
        if use == "stream":
            return None
        self._check_queue(endpoint)
        return body.gather(drops=use == "drop")

    async def _prepare_when_known(self, endpoint: str, body: RequestBody) -> None:
        while (rules := self._rules_of(endpoint)) is None:
            await self._wait_for_rules(endpoint)
        gathering = self._prepare(endpoint, body, *rules)
        if gathering is not None:
            await gathering
