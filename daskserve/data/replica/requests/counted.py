"""Requests that are counted for the rollouts of models: how each ends, at the versions drawn for it.

Only while a model of the replica is rolled out are requests counted here.
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


class CountedRequest(ActorRequest):
    """A `LocalRequest` whose end is counted."""

    def __init__(self, request: LocalRequest) -> None:
        self._request = request
        self._began = stopwatch()

    def start(self, on_answer: OnAnswer) -> Callable[[], None] | None:
        leave = self._request.start(partial(self._answered, on_answer))
        return None if leave is None else partial(self._leave, leave)

    def _leave(self, leave: Callable[[], None]) -> None:
        if is_over(self._request.envelope.deadline, asyncio.get_running_loop().time()):
            self._ended(True)
        leave()

    def _answered(self, on_answer: OnAnswer, message: Message | None, rest: Any) -> None:
        if rest is self._request:
            rest = self  # it needs a task
        elif isinstance(rest, Exception):
            self._ended(is_fault(rest))
        else:
            self._ended(message is not None and is_failed(message))
        on_answer(message, rest)

    async def respond(self, receive: Receive, send: Send) -> Load:
        def call(_: object, receive: Receive, send: Send) -> Any:
            return self._request.respond(receive, send)

        return await sent(call, self._request.envelope, receive, send, self._ended)

    def _ended(self, has_failed: bool) -> None:
        context = getattr(self._request, "context", None)  # there is none until user code begins
        request = None if context is None else context.get(current_request)
        if request is not None and request.drawn:
            duration_s = None if is_socket(self._request.envelope) else stopwatch() - self._began
            count_drawn(request.drawn, has_failed, duration_s)
