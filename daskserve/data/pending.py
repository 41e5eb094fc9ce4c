"""Calls under way on the loop of a process's link, for callers on any thread or loop.

What `asyncio.run_coroutine_threadsafe` and `asyncio.wrap_future` do, at a third of the price: the two loops
wake each other once for all the calls that have come meanwhile, and not at all where they are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from contextvars import Context
from typing import Any, TypeVar

from daskserve.cluster.link import Link

T = TypeVar("T")


def start_call(link: Link, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the link's loop; cancelling the future cancels it.

    It does not see the caller's context variables.

    Raises
    ------
    ClusterUnreachableError
        The Dask client was closed.
    """
    if link.is_closed:
        coroutine.close()
        raise link.closed_error()
    future: Future[T] = Future()
    if link.runs_here():
        _begin(link, coroutine, future)
    else:
        link.hops.onto(link.loop).post(_begin, link, coroutine, future)
    return future


async def wait_for_call(link: Link, future: Future[Any]) -> None:
    """Return when a call has ended, with or without success; cancelling this cancels the call."""
    if future.done():
        return
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: Future[Any]) -> None:
        # The call may be cancelled from any thread.
        if asyncio._get_running_loop() is loop:
            _settle(waiter)
        else:
            link.hops.onto(loop).post(_settle, waiter)

    future.add_done_callback(wake)
    try:
        await waiter
    except asyncio.CancelledError:
        future.cancel()
        raise


def _begin(link: Link, coroutine: Coroutine[Any, Any, T], future: Future[T]) -> None:
    if future.cancelled():
        coroutine.close()
        return
    task = link.loop.create_task(_carry(coroutine, future), context=Context())

    def pass_on(_: Future[T]) -> None:
        if future.cancelled() and not task.done():
            link.hops.onto(link.loop).post(task.cancel)

    future.add_done_callback(pass_on)


async def _carry(coroutine: Coroutine[Any, Any, T], future: Future[T]) -> None:
    try:
        value = await coroutine
    except asyncio.CancelledError:
        future.cancel()
        future.set_running_or_notify_cancel()
        raise
    except BaseException as error:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        if future.set_running_or_notify_cancel():
            future.set_result(value)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
