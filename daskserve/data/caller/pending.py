"""Calls under way on the loop of a process's link, for callers on any thread or loop.

What `asyncio.run_coroutine_threadsafe` and `asyncio.wrap_future` do, at less than half the price for 64 calls
at a time, and a third of it where both loops are the same: loops wake each other once for all the calls that
have come meanwhile, or not at all.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from contextvars import Context
from functools import partial
from typing import Any, TypeVar

from daskserve.cluster.base import Link
from daskserve.loops.event_loop import running_loop
from daskserve.loops.pending_call import PendingCall

T = TypeVar("T")


def start_call(link: Link, coroutine: Coroutine[Any, Any, T]) -> PendingCall[T]:
    """Run a coroutine on the link's loop; cancelling what this returns cancels it.

    It does not see the caller's context variables.

    Raises
    ------
    ClusterUnreachableError
        The Dask client was closed.
    """
    if link.is_closed:
        coroutine.close()
        raise link.closed_error()
    call: PendingCall[T] = PendingCall()
    if link.runs_here():
        begin_call(link, coroutine, call)
    else:
        link.hop.post(begin_call, link, coroutine, call)
    return call


def waiter_for(link: Link, call: PendingCall[Any]) -> asyncio.Future[None]:
    """Return a future of the present loop that ends when a call does, with or without success.

    Whoever is cancelled while awaiting it should cancel the call.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: PendingCall[Any]) -> None:
        # The call may be cancelled from any thread.
        running = running_loop()
        if running is loop:
            _settle(waiter)
        elif running is link.loop:
            link.hops.onto(loop).post_soon(_settle, waiter)
        else:
            link.hops.onto(loop).post(_settle, waiter)

    call.add_done_callback(wake)
    return waiter


def begin_call(
    link: Link, coroutine: Coroutine[Any, Any, T], call: PendingCall[T], *, pauses_itself: bool = False
) -> None:
    """Have a coroutine end a call; on the link's loop.

    A coroutine that has to learn of its end, whenever that comes, begins with `pause` and says so.
    """
    if call.cancelled() and not pauses_itself:
        coroutine.close()
        return
    carrying = _carry(coroutine, call, pauses_itself)
    # Begun by hand: it is to learn of its end even if its loop cancels the task before the first step of it.
    carrying.send(None)
    task = link.loop.create_task(carrying, context=Context())
    call.on_cancel(partial(_cancel, link, task))


async def _carry(coroutine: Coroutine[Any, Any, T], call: PendingCall[T], pauses_itself: bool) -> None:
    try:
        if not pauses_itself:
            await pause()
        call.set_result(await coroutine)
    except asyncio.CancelledError:
        coroutine.close()
        call.cancel()
        raise
    except Exception as error:
        call.set_error(error)


@types.coroutine
def pause() -> Generator[None, None, None]:
    """Let everything else have a turn; the first step of a coroutine that is begun by hand ends here."""
    yield


def _cancel(link: Link, task: asyncio.Task[None]) -> None:
    if not task.done():
        link.hop.post(task.cancel)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
