"""HTTP requests and WebSockets in their replica."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

from daskserve.common.types import ON_DEMAND, Envelope, Message, Receive, Send
from daskserve.context import RequestContext
from daskserve.data.replica.errors.log import is_http_failure, is_refusal
from daskserve.data.replica.execution.message_pipe import MessagePipe, open_pipe
from daskserve.data.replica.execution.socket_pipe import open_socket_pipe
from daskserve.data.replica.requests.accept_batch import BatchItem
from daskserve.data.replica.requests.method_header import named_method, no_call_error
from daskserve.data.replica.requests.replica_request import LocalRequest, set_context, start_next
from daskserve.data.replica.requests.states import OPEN_STATES
from daskserve.data.replica.user_code.definitions import CALL, Method
from daskserve.data.replica.user_code.request_objects import read_body, receive_nothing
from daskserve.data.replica.user_code.responses import (
    ConvertedResponse,
    Unfinished,
    failed_response,
    finish,
    finish_in_thread,
)
from daskserve.loops.tasks import within
from daskserve.payload.packed_errors import PackedError
from daskserve.telemetry.tracing.batches import span_of_item

#: How long async code waits for the first part of a body, which most clients send with the head. Starting
#: with this part saves one crossing to the user-code loop. The wait is short, because the code may not need
#: the body.
FIRST_PART_S = 0.05
#: From version 2.4 on, ``send`` fails once the client has left, which users of uvicorn do not expect.
_ASGI_OF_UVICORN: Mapping[str, str] = {"version": "3.0", "spec_version": "2.3"}


def _request_context(envelope: Envelope) -> RequestContext:
    try:
        ours = envelope.head["extensions"]["daskserve"]
        context = RequestContext(ours["request_id"], ours["route"], envelope.deadline)
        if "model_id" in ours:
            context.add_facts({"multiplexed_model_id": ours["model_id"]})
        if "session_id" in ours:
            context.add_facts({"session_id": ours["session_id"]})
        if "priority" in ours:
            context.add_facts({"priority": ours["priority"], "priority_number": ours["priority"]})
        return context
    except (KeyError, TypeError):  # the request did not pass the ingress
        return RequestContext(deadline=envelope.deadline)


class LocalHTTPRequest(LocalRequest):
    """An HTTP request or a WebSocket.

    Plain user code, and code that runs in the request's task, need a `MessagePipe` only for responses of more
    than one step.
    """

    __slots__ = ("_scope",)

    _scope: dict[str, Any]

    needs_task_to_go_on = True
    is_failure = staticmethod(is_http_failure)
    request_context = staticmethod(_request_context)

    def needs_task(self) -> bool:
        envelope, code = self.envelope, self.code
        if (
            envelope.head["type"] != "http"
            or envelope.has_body
            or code.has_method_header
            or code.executor.is_closed
        ):
            return True
        method = code.servable.methods.get(CALL)
        if method is None or method.is_asgi or method.accepts_batches:
            return True
        # On the worker's loop, a task for the request makes a task for user code unnecessary.
        return method.is_async and code.executor.is_on_worker_loop

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> Awaitable[None] | None:
        envelope, code = self.envelope, self.code
        self._scope = scope = dict(envelope.head)
        self._receive = receive
        self._send = send
        servable = code.servable
        method = named_method(servable, scope) if code.has_method_header else servable.methods.get(CALL)
        if method is None:
            raise no_call_error()
        self._method = method
        is_websocket = scope["type"] == "websocket"
        if method.is_asgi if code.on_disconnect is None else code.on_disconnect == "disconnect":
            # The server gives the code of a WebSocket some time after the disconnect, and cancels it
            # afterwards.
            self.survives_caller = not is_websocket
            if not is_websocket:
                scope["asgi"] = _ASGI_OF_UVICORN
        self.runs_in_task = runs_in_task = (
            code.executor.is_on_worker_loop
            and self.is_in_task
            and envelope.deadline is None
            and not is_websocket
            and not self.survives_caller
        )
        if envelope.has_body or is_websocket or (method.accepts_batches and not method.is_asgi):
            assert receive is not None
            assert send is not None
            return self._prepare(method, receive, send)
        set_context(self)
        if runs_in_task and method.is_async and not (method.is_asgi or self.is_traced):
            # User code gets the caller's `receive`, because there is no body and no thread to cross.
            parts = (method, scope, receive, b"")
            self.run = code.executor.enter(servable.answer_http, parts, self.context, self)
        else:
            self._begin(b"", _no_body())
        return None

    def resume(self, unfinished: Unfinished) -> None:
        pipe = self.pipe or _open_pipe(self, None)
        if unfinished.is_stream:
            # the response may be endless, and the code cannot receive a disconnect
            self.survives_caller = False
        if unfinished.needs_thread:
            start_next(self, False, finish_in_thread, unfinished.result, pipe)
        else:
            start_next(self, True, finish, self._scope, pipe, unfinished.result)

    def message(self, value: ConvertedResponse) -> Message | None:
        if value.is_failure:
            self.metrics.failed += 1
        return value.message

    def accept(self, value: Any) -> None:
        """Store the result of user code; an error becomes a response with 500, unless it is a refusal."""
        super().accept(value)
        if type(value) is PackedError:
            is_started = self.pipe is not None and self.pipe.is_started
            if not is_started and not is_refusal(value) and self._scope["type"] == "http":
                self.error = None
                self.value = failed_response(value, is_debug=self.code.servable.is_debug)

    def release(self) -> None:
        if self.pipe is not None and self.code.sockets:
            self.code.sockets.discard(self.pipe)
        super().release()

    async def _prepare(self, method: Method, receive: Receive, send: Send) -> None:
        if self._scope["type"] == "websocket" and not method.is_asgi:
            await receive()
            await send({"type": "websocket.close", "code": 1003, "reason": "not an ASGI application"})
            self.value = ConvertedResponse()
            return
        needs_whole = not method.is_asgi and (not method.is_async or method.accepts_batches)
        if self.envelope.has_body == ON_DEMAND and not needs_whole:
            set_context(self)
            self._begin(None, None)
            return
        if not self.envelope.has_body:
            first: Message | None = _no_body()
        elif needs_whole:
            first = await receive()
        else:
            first = await within(FIRST_PART_S, receive())
        if first is None:
            set_context(self)
            self._begin(None, None)
            return
        is_whole = first["type"] == "http.request" and not first.get("more_body", False)
        body = first.get("body", b"") if is_whole else None
        if body is None and needs_whole:
            body = await read_body(receive, first)
            if body is None:  # the client left
                self.value = ConvertedResponse()
                return
        if method.accepts_batches and not method.is_asgi:
            set_context(self)
            _open_pipe(self, first)
            item = BatchItem(
                self._scope,
                self._scope,
                body or b"",
                span=None if self.span is None else span_of_item(method.name, self.span),
            )
            try:
                number = _request_context(self.envelope).priority_number
                self.accept(await self.code.batches.submit(method, item, self.hold, number))
            except PackedError as error:
                self.accept(error)
        else:
            set_context(self)
            self._begin(body, first)

    def _begin(self, body: bytes | None, first: Message | None) -> None:
        """Start user code with the whole body, or with its first part if that was read."""
        servable, method, scope = self.code.servable, self._method, self._scope
        if method.is_async and not method.is_asgi and body is not None and self.runs_in_task:
            self.start_code(True, servable.answer_http, method, scope, self._receive, body)
            return
        if not method.is_async and not method.is_asgi:
            plain = servable.answer_http_in_thread
            self.start_code(
                False, plain, method, scope, partial(_receive, self), partial(_has_left, self), body
            )
            return
        pipe = _open_pipe(self, first)
        if method.is_asgi:
            self.start_code(True, servable.answer_app, scope, pipe)
        else:
            self.start_code(True, servable.answer_http, method, scope, pipe.receive, body)


def _open_pipe(request: LocalHTTPRequest, first: Message | None) -> MessagePipe:
    kind = request._scope["type"]
    code, receive, send = request.code, request._receive, request._send
    pipe: MessagePipe
    if kind == "websocket":
        pipe = open_socket_pipe(code.executor, request.envelope, receive, send, first)
        code.sockets.add(pipe)
    else:
        pipe = open_pipe(code.executor, kind, receive, send, first)
    request.pipe = pipe
    pipe.is_body_assumed = first is not None and not request.envelope.has_body
    pipe.on_message = request.partial
    return pipe


async def _receive(request: LocalHTTPRequest) -> Message:
    """Return the next message of the client, in the coroutine that plain user code has returned."""
    if _has_left(request):
        return {"type": "http.disconnect"}
    # Without a pipe, plain code runs this coroutine itself.
    return await (receive_nothing() if request.pipe is None else request.pipe.receive())


def _has_left(request: LocalHTTPRequest) -> bool:
    """Return whether the client has left, or the request has ended; any thread may call this."""
    return request.state not in OPEN_STATES


def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}
