"""The kind of event loop in daskserve's threads and in the processes that it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from daskserve.common import settings

T = TypeVar("T")


def uses_uvloop() -> bool:
    """Return whether daskserve uses uvloop: it is installed and not disabled."""
    if not settings.process().uvloop:
        return False
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True


#: Returns the event loop that runs in this thread; None if there is none.
running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop


def settle(future: asyncio.Future[None]) -> None:
    """Complete a future of this loop, unless it is already done."""
    if not future.done():
        future.set_result(None)


async def on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop and return its result to a coroutine on this or another loop."""
    if running_loop() is loop:
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, uvloop's if `uses_uvloop`; see `daskserve.common.settings.ProcessSettings`."""
    if not uses_uvloop():
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()
