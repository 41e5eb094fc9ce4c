"""How a replica has user code answer one request, once the request has its slot.

Which of the ways is taken depends on the user's code and on the request:

======================================  ================================================================
async code on the worker's own loop     in the request's own task, with nothing in between
other async code                        on the user's loop, behind the wall
plain code                              in one of the user's threads
code that takes batches                 with others, see `daskserve.data.replica.batches`
an ASGI application                     on the user's loop, its messages carried to and fro as they come
======================================  ================================================================
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from daskserve.context import current_request
from daskserve.data.replica.accept_batch import BatchItem
from daskserve.data.replica.batches import ReplicaBatches
from daskserve.data.replica.conversion import Answer, Unfinished, finish, finish_in_thread
from daskserve.data.replica.crossing import Exchange, open_exchange
from daskserve.data.replica.definitions import CALL, Method
from daskserve.data.replica.method_header import named_method
from daskserve.data.replica.requests import read_body, request_context
from daskserve.data.replica.servable import Servable
from daskserve.data.replica.slots import Slot
from daskserve.data.replica.streaming import stream_call
from daskserve.data.replica.wall import Call, InPlaceCall, Wall
from daskserve.errors import BadRequestError
from daskserve.figures.replica import ReplicaFigures
from daskserve.types import Envelope, EnvelopeKind, Message, Receive, Send


class Answering:
    """Has one replica's user code answer requests, whose slots are held until it has really ended."""

    def __init__(
        self, wall: Wall, servable: Servable, batches: ReplicaBatches, figures: ReplicaFigures
    ) -> None:
        self._wall = wall
        self._servable = servable
        self._batches = batches
        self.figures = figures
        self._sockets: set[Exchange] = set()
        #: Whether HTTP requests name the method that they are for in a header.
        self.has_method_header = False

    def answer(self, envelope: Envelope, receive: Receive, send: Send, slot: Slot) -> Awaitable[None]:
        """Answer a request of any kind."""
        if envelope.kind is EnvelopeKind.HTTP:
            head, servable = envelope.head, self._servable
            method = named_method(servable, head) if self.has_method_header else servable.methods[CALL]
            # Nobody has to be told in time that it is over: there is no deadline, and no socket to close.
            if self._wall.is_on_worker_loop and envelope.deadline is None and head["type"] == "http":
                if method.is_async and not method.is_asgi and not method.accepts_batches:
                    return self._answer_in_place(method, envelope, receive, send, slot)
                return self._answer_http(method, True, envelope, receive, send, slot)
            return self._answer_http(method, False, envelope, receive, send, slot)
        if envelope.kind is EnvelopeKind.CALL:
            return self._answer_call(envelope, send, slot)
        raise BadRequestError(f"A replica takes no requests of kind {envelope.kind!r}.")

    def send_away(self) -> None:
        """Close the WebSockets, which would never end by themselves, with code 1001."""
        for exchange in list(self._sockets):
            exchange.leave()

    # ---- HTTP

    async def _answer_in_place(
        self, method: Method, envelope: Envelope, receive: Receive, send: Send, slot: Slot
    ) -> None:
        # What most requests need and no more: this is the fast way, and each object made is a part of it.
        scope = dict(envelope.head)
        exchange: Exchange | None = None
        body: bytes | None = b""
        if envelope.has_body:
            first = await receive()
            if first["type"] == "http.request" and not first.get("more_body", False):
                body = first.get("body", b"")
            else:
                body = None
                exchange = open_exchange(self._wall, scope, receive, send, first)
                receive = exchange.receive
        context = self._wall.context.copy()
        context.run(current_request.set, request_context(envelope))
        try:
            answer: Answer | Unfinished | InPlaceCall[Answer | Unfinished] = self._wall.enter(
                self._servable.answer_http, method, scope, receive, body, context=context
            )
            if isinstance(answer, InPlaceCall):
                answer = await answer
            if isinstance(answer, Unfinished):
                if exchange is None:
                    exchange = open_exchange(self._wall, scope, receive, send)
                begin = partial(self._begin, slot, True)
                answer = await self._finish(answer, begin, context, scope, exchange)
        finally:
            if exchange is not None:
                exchange.close()
        self.figures.failed += answer.is_failure
        if answer.message is not None:
            await send(answer.message)

    async def _answer_http(
        self, method: Method, in_place: bool, envelope: Envelope, receive: Receive, send: Send, slot: Slot
    ) -> None:
        servable = self._servable
        scope = dict(envelope.head)
        if scope["type"] == "websocket" and not method.is_asgi:
            await receive()
            await send({"type": "websocket.close", "code": 1003, "reason": "not an ASGI application"})
            return
        first = await receive() if envelope.has_body else _no_body()
        is_whole = first["type"] == "http.request" and not first.get("more_body", False)
        body = first.get("body", b"") if is_whole else None
        if body is None and not method.is_asgi and (not method.is_async or method.accepts_batches):
            body = await read_body(receive, first)
            if body is None:
                return  # the client left
        context = self.context_of(envelope)
        exchange = open_exchange(self._wall, scope, receive, send, first)
        exchange.is_body_assumed = not envelope.has_body
        if scope["type"] == "websocket":
            self._sockets.add(exchange)
        begin = partial(self._begin, slot, in_place)
        answer: Answer | Unfinished
        try:
            if method.accepts_batches and not method.is_asgi:
                outcome = await self._batches.submit(method, BatchItem(scope, scope, body or b""), slot)
                assert isinstance(outcome, (Answer, Unfinished))
                answer = outcome
            elif method.is_asgi:
                answer = await exchange.carry(begin(context, False, servable.answer_app, scope, exchange))
            else:
                function = servable.answer_http if method.is_async else servable.answer_http_in_thread
                answer = await begin(
                    context, not method.is_async, function, method, scope, exchange.receive, body
                ).wait()
            if isinstance(answer, Unfinished):
                answer = await self._finish(answer, begin, context, scope, exchange)
        finally:
            exchange.close()
            if self._sockets:
                self._sockets.discard(exchange)
        self.figures.failed += answer.is_failure
        if answer.message is not None:
            await send(answer.message)

    async def _finish(
        self,
        answer: Answer | Unfinished,
        begin: Callable[..., Call[Any]],
        context: contextvars.Context,
        scope: dict[str, Any],
        exchange: Exchange,
    ) -> Answer:
        is_debug = self._servable.is_debug
        while isinstance(answer, Unfinished):
            # A copy, because the call before may not quite have left its context yet.
            context = context.copy()
            if answer.needs_thread:
                rest = begin(
                    context, True, partial(finish_in_thread, is_debug=is_debug), answer.result, exchange
                )
            else:
                rest = begin(
                    context, False, partial(finish, is_debug=is_debug), scope, exchange, answer.result
                )
            answer = await exchange.carry(rest)
        return answer

    # ---- calls

    async def _answer_call(self, envelope: Envelope, send: Send, slot: Slot) -> None:
        servable = self._servable
        head = envelope.head
        method = servable.method(head.get("method") or CALL)
        if "stream" in head:
            begin = partial(self._begin, slot, False)
            context = self.context_of(envelope)
            await stream_call(self._wall, servable, method, envelope, send, begin, context)
            return
        result: Any
        if method.accepts_batches:
            result = await self._batches.submit(method, BatchItem(head, payload=envelope.payload), slot)
            if isinstance(result, Exception):
                raise result
        else:
            context = self.context_of(envelope)
            in_place = envelope.deadline is None and self._wall.is_on_worker_loop
            parts = (method, head, envelope.payload)
            if not method.is_async:
                result = await self._begin(
                    slot, False, context, True, servable.answer_call_in_thread, *parts
                ).wait()
            elif in_place:
                result = self._wall.enter(servable.answer_call, *parts, context=context)
                if isinstance(result, InPlaceCall):
                    result = await result
            else:
                result = await self._begin(slot, False, context, False, servable.answer_call, *parts).wait()
            if isinstance(result, Unfinished):
                rest = (servable.finish_call, method, result.result)
                result = await self._begin(slot, in_place, context.copy(), False, *rest).wait()
        await send({"type": "call.result", "payload": result})

    # ---- either, without a task on the worker's loop

    def straight_method(self, envelope: Envelope) -> Method | None:
        """Return the method that a request is for, if all it takes is to cross the wall; else None."""
        head, servable = envelope.head, self._servable
        if envelope.kind is EnvelopeKind.HTTP:
            is_simple = head["type"] == "http" and not envelope.has_body and not self.has_method_header
            method = servable.methods.get(CALL) if is_simple else None
        else:
            method = None if "stream" in head else servable.methods.get(head.get("method") or CALL)
        if method is None or method.is_asgi or method.accepts_batches:
            return None
        if self._wall.is_closed or (method.is_async and self._wall.is_on_worker_loop):
            return None
        return method

    def begin_call(self, method: Method, envelope: Envelope) -> Call[Any]:
        """Have user code answer a call of a `straight_method`: with a pickled result, or `Unfinished`."""
        servable, wall = self._servable, self._wall
        context = self.context_of(envelope)
        parts = (method, envelope.head, envelope.payload)
        if method.is_async:
            return wall.start_async(servable.answer_call, *parts, context=context)
        return wall.start_sync(servable.answer_call_in_thread, *parts, context=context)

    def finish_call(self, method: Method, envelope: Envelope, result: Any) -> Call[Any]:
        """Have user code go on with an `Unfinished` result of `begin_call`."""
        context = self.context_of(envelope)
        return self._wall.start_async(self._servable.finish_call, method, result, context=context)

    def begin_http(
        self, method: Method, scope: dict[str, Any], exchange: Exchange, context: contextvars.Context
    ) -> Call[Answer | Unfinished]:
        """Have user code answer a request of a `straight_method`."""
        servable, wall = self._servable, self._wall
        parts = (method, scope, exchange.receive, b"")
        if method.is_async:
            return wall.start_async(servable.answer_http, *parts, context=context)
        return wall.start_sync(servable.answer_http_in_thread, *parts, context=context)

    async def finish_http(
        self,
        answer: Unfinished,
        scope: dict[str, Any],
        exchange: Exchange,
        context: contextvars.Context,
        send: Send,
        slot: Slot,
    ) -> None:
        """Answer the rest of a request that `begin_http` has left unfinished."""
        begin = partial(self._begin, slot, self._wall.is_on_worker_loop)  # as `answer` does it
        finished = await self._finish(answer, begin, context, scope, exchange)
        self.figures.failed += finished.is_failure
        if finished.message is not None:
            await send(finished.message)

    def open_exchange(self, scope: dict[str, Any], receive: Receive, send: Send) -> Exchange:
        """Return the messages of a request without a body."""
        exchange = open_exchange(self._wall, scope, receive, send, _no_body())
        exchange.is_body_assumed = True
        return exchange

    # ---- both

    def context_of(self, envelope: Envelope) -> contextvars.Context:
        """Return the context in which user code is to answer a request."""
        context = self._wall.context.copy()
        context.run(current_request.set, request_context(envelope))
        return context

    def _begin(
        self,
        slot: Slot,
        in_place: bool,
        context: contextvars.Context,
        in_thread: bool,
        function: Callable[..., Any],
        *args: Any,
    ) -> Call[Any]:
        wall = self._wall
        if in_thread:
            start: Callable[..., Call[Any]] = wall.start_sync
        else:
            start = wall.start_in_place if in_place else wall.start_async
        call = start(function, *args, context=context, on_end=slot.release)
        slot.hold()
        return call


def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}
