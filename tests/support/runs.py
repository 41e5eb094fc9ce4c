"""Pieces of user code that a test starts behind a wall, and awaits, cancels or carries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any

from daskserve.common.clock import LoopClock
from daskserve.common.types import Envelope, EnvelopeKind, Message, Receive, Send
from daskserve.data.replica.execution.executor import Wall
from daskserve.data.replica.execution.message_pipe import MessagePipe
from daskserve.data.replica.execution.runner import CodeRun, RunResult
from daskserve.data.replica.execution.user_threads import UserThreads
from daskserve.data.replica.requests.answer import Answer
from daskserve.data.replica.requests.responders import carry
from daskserve.data.replica.requests.slots import Slots
from daskserve.figures.replica import ReplicaFigures


class Started(RunResult):
    """One run. ``on_end`` is called when its code has really ended."""

    __slots__ = ("_on_end", "is_ended", "run")

    def __init__(self, on_end: Callable[[], None] | None) -> None:
        super().__init__()
        self._on_end = on_end
        self.run: CodeRun | None = None
        self.is_ended = False

    def run_ended(self, value: Any, error: Exception | None) -> None:
        assert not self.is_ended
        self.is_ended = True
        if self._on_end is not None:
            self._on_end()
        super().run_ended(value, error)

    def run_aborted(self, error: Exception) -> None:
        super().run_ended(None, error)

    def cancel(self) -> None:
        if self.run is not None:
            self.run.cancel()

    async def wait(self, run: CodeRun | None = None) -> Any:  # type: ignore[override]
        return await super().wait(self.run)


def start_async(
    wall: Wall,
    function: Callable[..., Awaitable[Any]],
    *args: Any,
    context: Context | None = None,
    on_end: Callable[[], None] | None = None,
) -> Started:
    started = Started(on_end)
    started.run = wall.start(True, function, args, context or wall.context.copy(), started)
    return started


def start_sync(
    wall: Wall,
    function: Callable[..., Any],
    *args: Any,
    context: Context | None = None,
    on_end: Callable[[], None] | None = None,
    threads: UserThreads | None = None,
) -> Started:
    started = Started(on_end)
    runner = wall.threads if threads is None else threads
    started.run = runner.start(function, args, context or wall.context.copy(), started)
    return started


class NoQueue:
    queued = 0


class PipedAnswer(Answer):
    """An answer whose messages are those that one function puts into a pipe."""

    def __init__(self, wall: Wall, pipe: MessagePipe, is_async: bool, function: Callable[..., Any]) -> None:
        figures = ReplicaFigures()
        super().__init__(Envelope(EnvelopeKind.HTTP, {}), Slots("b#AAAAAA", 1, NoQueue(), figures), figures)
        self.slots.is_open = True
        self._wall = wall
        self._function = function
        self._is_async = is_async
        self.pipe = pipe
        pipe.owner = self

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> None:
        context = self._wall.context.copy()
        self.run = self._wall.start(self._is_async, self._function, (), context, self)

    def message(self, value: Any) -> Message | None:
        return None


async def carry_piped(
    wall: Wall, pipe: MessagePipe, function: Callable[..., Any], *, is_async: bool = True
) -> Any:
    """Have user code end while a task passes on what it sends; return or raise what it came to."""
    return await carry_answer(PipedAnswer(wall, pipe, is_async, function))


async def carry_answer(answer: PipedAnswer) -> Any:
    async def unused(*args: Any) -> Message:
        raise AssertionError("the pipe has its own")

    await carry(answer, unused, unused, LoopClock())  # type: ignore[arg-type]
    return answer.value


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what user code does has no event here
        await asyncio.sleep(0.001)
