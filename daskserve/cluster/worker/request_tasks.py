"""The Dask tasks that the code of a replica submits: their priority, and their end with their request.

Problem: Dask cancels a task by its key, for all futures of a client, and all requests of a process share one
client: two requests that compute the same thing have the same key. Choice: the futures of a cancelled request
are released. The scheduler drops a task that no other future, client or task needs, and a thread that waits
for one of the futures gets its `CancelledError`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from dask.base import get_annotations

from daskserve.cluster.distributed_internals import ScatteringClient
from daskserve.context import current_replica, current_request
from daskserve.internals.checking import needs

with needs("distributed", ">=2025.1,<2026.9") as check:
    from distributed import Client, Future, futures_of
    from distributed.client import FutureState

    check.attributes(Client, "_gather", "_graph_to_futures")
    check.attributes(FutureState, "wait")
    check.fields(Future, "_state")


class RequestTasks:
    """The live futures of one request. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._futures: set[weakref.ref[Future[Any]]] = set()

    def add(self, futures: Iterable[Future[Any]]) -> None:
        """Add futures, without keeping them alive."""
        known = self._futures
        for future in futures:
            known.add(weakref.ref(future, known.discard))

    def cancel(self) -> None:
        """Release the futures whose tasks have not finished."""
        for reference in list(self._futures):
            future = reference()
            if future is not None and not future.done():
                with suppress(RuntimeError):  # the client's loop has ended, because the replica is ending
                    future.release()


def default_priority() -> int:
    """Return the priority of tasks for which neither the call nor ``dask.annotate`` names one."""
    replica = current_replica.get()
    if replica is None or "priority" in get_annotations():
        return 0
    return int(replica.holder.dask_task_config.get("priority", 0))


def end_with_request(futures: Iterable[Future[Any]]) -> None:
    """Release futures when the current request is cancelled; do nothing outside of requests."""
    replica, request = current_replica.get(), current_request.get()
    if request is None or replica is None or not replica.holder.dask_task_config.get("cancel_with_request"):
        return
    tasks: RequestTasks | None = request.dask_tasks
    if tasks is None:  # setdefault is atomic, so all threads get the same object
        tasks = vars(request).setdefault("dask_tasks", RequestTasks())
    tasks.add(futures)
    if request.cancels_new_tasks:
        tasks.cancel()


class _FailedError(Exception):
    """A task has failed."""


class TaskClient(ScatteringClient):
    """A client whose tasks belong to the replica and the request that submitted them."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        """Submit a task."""
        future = super().submit(*args, **kwargs)
        end_with_request([future])  # another request may have submitted the task before
        return future

    def _graph_to_futures(self, *args: Any, **kwargs: Any) -> Any:
        # All methods that submit tasks call this method.
        kwargs["user_priority"] = kwargs.get("user_priority") or default_priority()
        futures = super()._graph_to_futures(*args, **kwargs)
        end_with_request(futures.values())
        return futures

    async def _gather(self, futures: Any, errors: str = "raise", *args: Any, **kwargs: Any) -> Any:
        # If Dask's own wait is cancelled, it leaves behind one task for each future, and each task logs an
        # error.
        mine = [each for each in futures_of(futures) if each.client is self and not each.done()]
        await _settled(mine, errors)
        return await super()._gather(futures, errors, *args, **kwargs)


async def _settled(futures: Iterable[Any], errors: str) -> None:
    """Return once all tasks have ended, or, with ``errors="raise"``, once one has failed."""

    async def wait_for(state: Any) -> None:
        await state.wait()
        if errors == "raise" and state.status != "finished":
            raise _FailedError

    waiting = [asyncio.ensure_future(wait_for(each._state)) for each in futures]
    if waiting:
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
