"""Requests whose ends are observed, and those that are counted during the rollout of a model.

A request counts for the versions of models that were drawn for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from daskserve.common.clock import stopwatch
from daskserve.common.types import ActorRequest, Load, Message, OnAnswer, Receive, Send
from daskserve.context import count_drawn, current_request
from daskserve.data.replica.requests.replica_request import LocalRequest
from daskserve.data.version_counts import is_failed, is_fault, is_socket, sent
from daskserve.loops.deadlines import is_over


class ObservedRequest(ActorRequest):
    """A request whose end is observed. Subclasses define `respond`, `note_end` and `note_leave`."""

    def __init__(self, request: ActorRequest) -> None:
        self._request = request
        self._began = stopwatch()

    def start(self, on_answer: OnAnswer) -> Callable[[], None] | None:
        leave = self._request.start(partial(self._answered, on_answer))
        return None if leave is None else partial(self._leave, leave)

    def _leave(self, leave: Callable[[], None]) -> None:
        self.note_leave()
        leave()

    def _answered(self, on_answer: OnAnswer, message: Message | None, rest: Any) -> None:
        if rest is self._request:
            rest = self  # the request needs a task
        else:
            self.note_end(message, rest if isinstance(rest, Exception) else None)
        on_answer(message, rest)

    def note_end(self, message: Message | None, error: Exception | None) -> None:
        """Record the answer or the error."""
        raise NotImplementedError

    def note_leave(self) -> None:
        """Record that the caller leaves before the answer."""
        raise NotImplementedError


class CountedRequest(ObservedRequest):
    """A `LocalRequest` that is counted, because a model of the replica is rolled out."""

    _request: LocalRequest

    def note_end(self, message: Message | None, error: Exception | None) -> None:
        self._ended(message is not None and is_failed(message) if error is None else is_fault(error))

    def note_leave(self) -> None:
        if is_over(self._request.envelope.deadline, asyncio.get_running_loop().time()):
            self._ended(True)

    async def respond(self, receive: Receive, send: Send) -> Load:
        def call(_: object, receive: Receive, send: Send) -> Any:
            return self._request.respond(receive, send)

        return await sent(call, self._request.envelope, receive, send, self._ended)

    def _ended(self, has_failed: bool) -> None:
        context = getattr(self._request, "context", None)  # no context exists until user code begins
        request = None if context is None else context.get(current_request)
        if request is not None and request.drawn:
            duration_s = None if is_socket(self._request.envelope) else stopwatch() - self._began
            count_drawn(request.drawn, has_failed, duration_s)
