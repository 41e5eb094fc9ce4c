"""The load of one model: its task, and the callers that wait for it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any

from daskserve.context import RequestContext, current_members, current_request
from daskserve.data.multiplexing.cache import CachedModel
from daskserve.loops.event_loop import running_loop


class LoadEndedError(Exception):
    """The load ended because its caller or event loop ended. Try again."""


class Load:
    """The load of one model."""

    __slots__ = ("context", "entry", "is_cancelled", "loop", "priority", "requesters", "task", "waiters")

    def __init__(self, entry: CachedModel, loop: asyncio.AbstractEventLoop) -> None:
        self.entry = entry
        self.loop = loop
        #: The context of user code in the replica. Other code may start the load, such as the end of a
        #: request.
        self.context = context_of(entry.id)
        self.task: asyncio.Task[None] | None = None
        #: The future of each caller, with the caller's event loop.
        self.waiters: dict[asyncio.Future[Any], asyncio.AbstractEventLoop] = {}
        #: The number of waits of each request, by the ``id`` of the request, which Python may reuse later.
        self.requesters: Counter[int] = Counter()
        #: The greatest priority of these requests.
        self.priority: float = -math.inf
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancel the task, even if it has not begun; any thread may call this."""
        self.is_cancelled = True
        if self.task is not None:
            with suppress(RuntimeError):  # the loop is closed, and its tasks have ended
                self.loop.call_soon_threadsafe(self.task.cancel)


def start_load(
    loop: asyncio.AbstractEventLoop,
    function: Callable[[Load, Sequence[CachedModel]], Coroutine[Any, Any, None]],
    load: Load,
    victims: Sequence[CachedModel],
) -> bool:
    """Run a load in a task on a loop, in the load's context; return False if the loop is closed."""

    def start() -> None:
        code = function(load, victims)
        load.task = loop.create_task(code, name="daskserve-load-model", context=load.context)

    if running_loop() is loop:
        start()
        return True
    try:
        loop.call_soon_threadsafe(start)
    except RuntimeError:
        return False
    return True


def context_of(model_id: str) -> Context:
    """Return a copy of the current context, without the request, for code that loads or unloads a model."""
    context = copy_context()
    context.run(_enter, model_id)
    return context


def _enter(model_id: str) -> None:
    """Replace the current request with one that has only the model's id."""
    context = RequestContext()
    context.add_facts({"multiplexed_model_id": model_id})
    current_request.set(context)
    current_members.set(())
