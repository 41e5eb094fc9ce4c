"""Answers to calls through a handle: with one result, or with a stream of items."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from daskserve.common.clock import stopwatch
from daskserve.common.types import Envelope, Message, Receive, Send
from daskserve.context import RequestContext
from daskserve.data.replica.execution.message_pipe import open_pipe
from daskserve.data.replica.requests.accept_batch import BatchItem
from daskserve.data.replica.requests.replica_request import LocalRequest, set_context, start_next
from daskserve.data.replica.requests.streaming import (
    finish_stream,
    finish_stream_in_thread,
    stream,
    stream_in_thread,
)
from daskserve.data.replica.user_code.definitions import CALL, Method
from daskserve.data.replica.user_code.responses import Unfinished
from daskserve.errors import ServeError, StreamOptionError


def _request_context(envelope: Envelope) -> RequestContext:
    head = envelope.head
    context = RequestContext(head.get("request_id") or "", deadline=envelope.deadline)
    if "facts" in head:
        context.add_facts(head["facts"])
    return context


class CallRequest(LocalRequest):
    """The answer to a call: one pickled result."""

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
        answer: Any = servable.answer_call if method.is_async else servable.answer_call_in_thread
        set_context(self)
        self.start_code(method.is_async, answer, method, envelope.head, envelope.payload)
        return None

    def go_on(self, unfinished: Unfinished) -> None:
        start_next(self, True, self.code.servable.finish_call, self._method, unfinished.result)

    def message(self, value: Any) -> Message | None:
        return {"type": "call.result", "payload": value}


async def _submit(answer: CallRequest, method: Method) -> None:
    item = BatchItem(answer.envelope.head, payload=answer.envelope.payload)
    answer.accept(await answer.code.batches.submit(method, item, answer))


class StreamRequest(CallRequest):
    """The answer to a streaming call: any number of pickled items.

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
        self.pipe.owner = self
        produce: Any = stream if method.is_async else stream_in_thread
        set_context(self)
        self.start_code(
            method.is_async, produce, code.servable, method, envelope.head, envelope.payload, self.pipe
        )
        return None

    def go_on(self, unfinished: Unfinished) -> None:
        # Async code may return what only a thread should run, and the other way round.
        is_plain = isinstance(unfinished.result, Iterator)
        finish: Any = finish_stream_in_thread if is_plain else finish_stream
        description = self.code.servable.describe(self._method)
        start_next(self, not is_plain, finish, description, unfinished.result, self.pipe)

    def message(self, value: Any) -> Message | None:
        return None


class ValuesRequest(LocalRequest):
    """The answer to a call with responses or values of Dask among its arguments, which are fetched first."""

    __slots__ = ()

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> Awaitable[None] | None:
        if "values" not in self.envelope.head:
            return super().begin(receive, send)
        return self._fetch_and_begin(receive, send)

    async def _fetch_and_begin(self, receive: Receive | None, send: Send | None) -> None:
        envelope = self.envelope
        payload = envelope.payload
        assert payload is not None
        try:
            payload = await self.code.fill(payload, envelope.head["values"])
        except ServeError:
            raise
        except Exception as error:  # of a task of Dask
            executor = self.code.executor
            raise await executor.packers.pack(error, executor.context) from None
        self.envelope = replace(envelope, payload=payload)
        preparing = super().begin(receive, send)
        if preparing is not None:
            await preparing


class ValuesCallRequest(ValuesRequest, CallRequest):
    """The answer to a call with one result."""

    __slots__ = ()


class ValuesStreamRequest(ValuesRequest, StreamRequest):
    """The answer to a streaming call."""

    __slots__ = ()


class ReservedRequest(ValuesRequest):
    """The answer to a call whose arguments follow once its caller has the slot.

    See `daskserve.data.caller.calls.replica_choice`.
    """

    __slots__ = ()

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> Awaitable[None] | None:
        assert receive is not None
        assert send is not None
        return self._reserve_and_begin(receive, send)

    async def _reserve_and_begin(self, receive: Receive, send: Send) -> None:
        await send({"type": "call.reserved", "replica": self.code.place})
        message = await self.code.arguments_of(receive)
        self.envelope = replace(self.envelope, head=message["head"], payload=message["payload"])
        self._began = stopwatch()  # until now, the caller has not asked for anything
        preparing = super().begin(receive, send)
        if preparing is not None:
            await preparing


class ReservedCallRequest(ReservedRequest, CallRequest):
    """The answer to a call with one result."""

    __slots__ = ()


class ReservedStreamRequest(ReservedRequest, StreamRequest):
    """The answer to a streaming call."""

    __slots__ = ()


class BroadcastRequest(ValuesCallRequest):
    """The answer to a call that runs beyond the limit of the replica, with a thread of its own if need be."""

    __slots__ = ()

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> Awaitable[None] | None:
        self.code.executor.threads.make_room(self.slots.ongoing)
        return super().begin(receive, send)


def call_answer_for(head: Mapping[str, Any]) -> type[CallRequest]:
    """Return the kind of answer to a call whose head has ``"stream"``."""
    if "reserve" in head:
        return ReservedStreamRequest if head["stream"] else ReservedCallRequest
    if "broadcast" in head:
        return BroadcastRequest
    if "values" not in head:
        return StreamRequest
    return ValuesStreamRequest if head["stream"] else ValuesCallRequest
