"""Background tasks of an object: kept alive, logged on failure, cancelled with the object."""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Awaitable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class TaskSet:
    """The background tasks of one object."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Run a coroutine in a background task and return the task; a failure is logged."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"daskserve-{name}" if name else None)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in list(self._tasks):
            task.cancel()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return when all current tasks have ended, or after the timeout."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def close(self, timeout_s: float | None = None) -> None:
        """Cancel all tasks and wait until they have ended, for up to ``timeout_s``."""
        self.cancel()
        await self.wait(timeout_s)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._logger.error("A background task failed", exc_info=task.exception())


@types.coroutine
def pause() -> Generator[None, None, None]:
    """Let the event loop run once; a pending cancellation is raised here."""
    yield


async def within(timeout_s: float, work: Awaitable[T]) -> T | None:
    """Return the result of the work; if it takes longer, cancel it and return None.

    Work that never waits gets no timer, which would cost 5 µs.
    """
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await _go_on(steps, waits_for)  # type: ignore[no-any-return]
    except TimeoutError:
        if not limit.expired():
            raise
        return None


@types.coroutine
def _go_on(steps: Generator[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, Any]:
    """Await a coroutine that has already run until its first wait."""
    while True:
        try:
            answer = yield waits_for
        except BaseException as thrown:  # thrown into the work
            step = partial(steps.throw, thrown)
        else:
            step = partial(steps.send, answer)
        try:
            waits_for = step()
        except StopIteration as end:
            return end.value


def is_cancelling() -> bool:
    """Return whether the current task has a pending cancellation, which other errors must not hide."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
