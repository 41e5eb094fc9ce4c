"""Answers to calls through a handle: with one result, or with a stream of items."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import Any

from daskserve.data.replica.accept_batch import BatchItem
from daskserve.data.replica.conversion import Unfinished
from daskserve.data.replica.definitions import CALL, Method
from daskserve.data.replica.message_pipe import open_pipe
from daskserve.data.replica.serving import LocalAnswer
from daskserve.data.replica.streaming import finish_stream, finish_stream_in_thread, stream, stream_in_thread
from daskserve.errors import StreamOptionError
from daskserve.types import Message, Receive, Send


class CallAnswer(LocalAnswer):
    """The answer to a call: one pickled result."""

    __slots__ = ()

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> Awaitable[None] | None:
        envelope, servable = self.envelope, self.code.servable
        method = self._method = servable.method(envelope.head.get("method") or CALL)
        if method.accepts_batches:
            return self._submit(method)
        self.runs_in_task = self.is_in_task and envelope.deadline is None
        answer: Any = servable.answer_call if method.is_async else servable.answer_call_in_thread
        context = self._new_context()
        self.run = self.code.wall.start(
            method.is_async,
            answer,
            (method, envelope.head, envelope.payload),
            context,
            self,
            self.runs_in_task,
        )
        return None

    def go_on(self, unfinished: Unfinished) -> None:
        # A copy, because the run before may not quite have left its context yet.
        finish = self.code.servable.finish_call
        self.run = self.code.wall.start(
            True, finish, (self._method, unfinished.result), self._context.copy(), self, self.runs_in_task
        )

    def message(self, value: Any) -> Message | None:
        return {"type": "call.result", "payload": value}

    async def _submit(self, method: Method) -> None:
        item = BatchItem(self.envelope.head, payload=self.envelope.payload)
        outcome = await self.code.batches.submit(method, item, self)
        if isinstance(outcome, Exception):
            raise outcome
        self.accept(outcome)


class StreamAnswer(CallAnswer):
    """The answer to a streaming call: any number of pickled items; see `daskserve.data.replica.streaming`."""

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
        self.pipe = open_pipe(code.wall, "call", receive, send)
        self.pipe.owner = self
        parts = (code.servable, method, envelope.head, envelope.payload, self.pipe)
        context = self._new_context()
        self.run = self.code.wall.start(
            method.is_async,
            stream if method.is_async else stream_in_thread,
            parts,
            context,
            self,
            self.runs_in_task,
        )
        return None

    def go_on(self, unfinished: Unfinished) -> None:
        # Async code may return what only a thread should run, and the other way round.
        is_plain = isinstance(unfinished.result, Iterator)
        finish: Any = finish_stream_in_thread if is_plain else finish_stream
        parts = (self.code.servable.describe(self._method), unfinished.result, self.pipe)
        self.run = self.code.wall.start(
            not is_plain, finish, parts, self._context.copy(), self, self.runs_in_task
        )

    def message(self, value: Any) -> Message | None:
        return None
