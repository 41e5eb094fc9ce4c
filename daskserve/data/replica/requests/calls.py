"""Handle calls in their replica: with one result, or with a stream of items."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from daskserve.common.clock import stopwatch
from daskserve.common.types import Envelope, Message, Payload, Receive, Send
from daskserve.context import RequestContext
from daskserve.data.replica.execution.message_pipe import open_pipe
from daskserve.data.replica.requests.accept_batch import BatchItem
from daskserve.data.replica.requests.replica_request import LocalRequest, set_context, start_next
from daskserve.data.replica.requests.states import LATE, LEFT, WAITING, RequestEvent
from daskserve.data.replica.requests.streaming import (
    finish_stream,
    finish_stream_in_thread,
    stream,
    stream_in_thread,
)
from daskserve.data.replica.user_code.definitions import CALL, Method
from daskserve.data.replica.user_code.responses import Unfinished
from daskserve.errors import ServeError, StreamOptionError
from daskserve.telemetry.tracing.batches import span_of_item

#: The status in the access log for a call whose caller left.
CANCELLED = 499


def _request_context(envelope: Envelope) -> RequestContext:
    head = envelope.head
    context = RequestContext(head.get("request_id") or "", deadline=envelope.deadline)
    if "facts" in head:
        facts = head["facts"]
        context.add_facts(facts)
        if type(number := facts.get("priority")) is int:
            context.add_facts({"priority_number": number})
    return context


class CallRequest(LocalRequest):
    """A call, whose answer is one pickled result."""

    __slots__ = ()

    request_context = staticmethod(_request_context)

    def needs_task(self) -> bool:
        head, code = self.envelope.head, self.code
        method = None if "stream" in head else code.servable.methods.get(head.get("method") or CALL)
        return method is None or method.is_asgi or method.accepts_batches or code.executor.is_closed

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> Awaitable[None] | None:
        envelope, servable = self.envelope, self.code.servable
        method = self._method = servable.method(envelope.head.get("method") or CALL)
        if method.accepts_batches:
            return _submit(self, method)
        self.runs_in_task = (
            self.is_in_task and envelope.deadline is None and self.code.executor.is_on_worker_loop
        )
        function: Any = servable.answer_call if method.is_async else servable.answer_call_in_thread
        set_context(self)
        self.start_code(method.is_async, function, method, envelope.head, envelope.payload)
        return None

    def resume(self, unfinished: Unfinished) -> None:
        start_next(self, True, self.code.servable.finish_call, self._method, unfinished.result)

    def message(self, value: Any) -> Message | None:
        return {"type": "call.result", "payload": value}

    def answered(self) -> None:
        super().answered()
        if self.code.note_call is not None:
            _note(self, 200)

    def _close(self, event: RequestEvent) -> None:
        was_begun = self.state != WAITING
        super()._close(event)
        if was_begun and self.code.note_call is not None:
            _note(self, CANCELLED if event in (LEFT, LATE) else 500)


def _note(request: CallRequest, status: int) -> None:
    head, note = request.envelope.head, request.code.note_call
    assert note is not None
    method = head.get("method") or CALL
    note(method, head.get("request_id") or "", status, stopwatch() - request._began)


async def _submit(request: CallRequest, method: Method) -> None:
    head, payload = request.envelope.head, request.envelope.payload
    item = BatchItem(
        head, payload=payload, span=None if request.span is None else span_of_item(method.name, request.span)
    )
    number = _request_context(request.envelope).priority_number
    request.accept(await request.code.batches.submit(method, item, request.hold, number))


class StreamRequest(CallRequest):
    """A streaming call, whose answer is any number of pickled items.

    See `daskserve.data.replica.requests.streaming`.
    """

    __slots__ = ()

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> Awaitable[None] | None:
        envelope, code = self.envelope, self.code
        method = self._method = code.servable.method(envelope.head.get("method") or CALL)
        if method.accepts_batches:
            raise StreamOptionError(
                f"{code.servable.describe(method)} takes batches of requests and cannot be called with "
                "stream=True."
            )
        self.runs_in_task = False
        self.pipe = open_pipe(code.executor, "call", receive, send)
        self.pipe.on_message = self.partial
        produce: Any = stream if method.is_async else stream_in_thread
        set_context(self)
        self.start_code(
            method.is_async, produce, code.servable, method, envelope.head, envelope.payload, self.pipe
        )
        return None

    def resume(self, unfinished: Unfinished) -> None:
        # An async method may return a plain generator, which needs a thread, and a plain method an async one.
        is_plain = isinstance(unfinished.result, Iterator)
        finish: Any = finish_stream_in_thread if is_plain else finish_stream
        description = self.code.servable.describe(self._method)
        start_next(self, not is_plain, finish, description, unfinished.result, self.pipe)

    def message(self, value: Any) -> Message | None:
        return None


class _PreparedRequest(LocalRequest):
    """A call that needs preparation before user code begins.

    - A broadcast may exceed the limit of the replica, and gets an additional thread if necessary.
    - The arguments of a reserved call arrive once its caller has the slot; see
      `daskserve.data.caller.calls.replica_choice`.
    - Responses and Dask's values among the arguments are fetched.
    """

    __slots__ = ()

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> Awaitable[None] | None:
        head = self.envelope.head
        if "broadcast" in head:
            self.code.executor.threads.make_room(self.slots.ongoing)
        if "reserve" in head or "values" in head:
            assert receive is not None
            assert send is not None
            return self._prepare_and_begin(receive, send)
        return super().begin(receive, send)

    async def _prepare_and_begin(self, receive: Receive, send: Send) -> None:
        if "reserve" in self.envelope.head:
            await send({"type": "call.reserved", "replica": self.code.place})
            message = await self.code.arguments_of(receive)
            self.envelope = replace(self.envelope, head=message["head"], payload=message["payload"])
            self._began = stopwatch()  # the duration does not include the reservation
        if "values" in self.envelope.head:
            self.envelope = replace(self.envelope, payload=await self._fetch_values())
        preparing = super().begin(receive, send)
        if preparing is not None:
            await preparing

    async def _fetch_values(self) -> Payload:
        payload = self.envelope.payload
        assert payload is not None
        try:
            return await self.code.fill(payload, self.envelope.head["values"])
        except ServeError:
            raise
        except Exception as error:  # a Dask task may have failed with any error
            executor = self.code.executor
            raise await executor.packers.pack(error, executor.context) from None


class PreparedCallRequest(_PreparedRequest, CallRequest):
    """A prepared call with one result."""

    __slots__ = ()


class PreparedStreamRequest(_PreparedRequest, StreamRequest):
    """A prepared streaming call."""

    __slots__ = ()


def request_class_for(head: Mapping[str, Any]) -> type[CallRequest]:
    """Return the class of requests for a call whose head has ``"stream"``."""
    if "reserve" in head or "broadcast" in head or "values" in head:
        return PreparedStreamRequest if head["stream"] else PreparedCallRequest
    return StreamRequest
