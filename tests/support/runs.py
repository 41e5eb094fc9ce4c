"""Runs of user code that a test starts in an executor, and awaits or cancels."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any

from daskserve.common.types import Envelope, EnvelopeKind, Message, Receive, Send
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.execution.message_pipe import MessagePipe
from daskserve.data.replica.execution.runner import CodeRun, RunResult
from daskserve.data.replica.execution.user_threads import UserThreads
from daskserve.data.replica.requests.replica_request import ReplicaRequest
from daskserve.data.replica.requests.slots import Slots
from daskserve.telemetry.replica import ReplicaMetrics

DEADLINE_S = 10.0


def run(scenario: Callable[[UserExecutor], Awaitable[None]], **options: Any) -> None:
    """Run a scenario on a worker's loop with an executor, which it may leave open."""

    async def main() -> None:
        executor = UserExecutor("b#AAAAAA", contextvars.copy_context(), **{"event_loop": "own", **options})
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scenario(executor)
        finally:
            assert await executor.close(DEADLINE_S)

    asyncio.run(main())


class Started(RunResult):
    """One run. ``on_end`` is called once its code has ended."""

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
    executor: UserExecutor,
    function: Callable[..., Awaitable[Any]],
    *args: Any,
    context: Context | None = None,
    on_end: Callable[[], None] | None = None,
) -> Started:
    started = Started(on_end)
    started.run = executor.start(True, function, args, context or executor.context.copy(), started)
    return started


def start_sync(
    executor: UserExecutor,
    function: Callable[..., Any],
    *args: Any,
    context: Context | None = None,
    on_end: Callable[[], None] | None = None,
    threads: UserThreads | None = None,
) -> Started:
    started = Started(on_end)
    runner = executor.threads if threads is None else threads
    started.run = runner.start(function, args, context or executor.context.copy(), started)
    return started


class PipedRequest(ReplicaRequest):
    """A request that a function answers with the messages that it puts into a pipe."""

    def __init__(
        self, executor: UserExecutor, pipe: MessagePipe, is_async: bool, function: Callable[..., Any]
    ) -> None:
        metrics = ReplicaMetrics()
        super().__init__(Envelope(EnvelopeKind.HTTP, {}), Slots("b#AAAAAA", 1, metrics), metrics)
        self.slots.is_open = True
        self._executor = executor
        self._function = function
        self._is_async = is_async
        self.pipe = pipe
        pipe.on_message = self.partial

    def begin(self, receive: Receive | None = None, send: Send | None = None) -> None:
        context = self._executor.context.copy()
        self.run = self._executor.start(self._is_async, self._function, (), context, self)

    def message(self, value: Any) -> Message | None:
        return None


async def respond_piped(
    executor: UserExecutor, pipe: MessagePipe, function: Callable[..., Any], *, is_async: bool = True
) -> Any:
    """Run user code while a task passes on its messages; return its result or raise its error."""
    return await respond_to(PipedRequest(executor, pipe, is_async, function))


async def respond_to(answer: PipedRequest) -> Any:
    async def unused(*args: Any) -> Message:
        raise AssertionError("the pipe has its own")

    await answer.respond(unused, unused)  # type: ignore[arg-type]
    return answer.value


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what user code does has no event here
        await asyncio.sleep(0.001)
