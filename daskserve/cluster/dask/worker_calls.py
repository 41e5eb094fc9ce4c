"""Calls of functions in a worker's process, which imports the user's code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distributed import Worker

from daskserve.cluster.dask.connection import DaskConnection, connection_on
from daskserve.common.types import WorkerAddress
from daskserve.errors import ActorLostError, UnavailableError
from daskserve.payload.packed_errors import dump_error, load_error


async def call_in_worker(
    connection: DaskConnection, worker: WorkerAddress, function: Callable[..., Any], **arguments: Any
) -> Any:
    """Call a function with the connection in a thread of a worker's process, and return its result.

    The thread does not belong to Dask's task threads, so the call does not wait for tasks.

    Raises
    ------
    ActorLostError
        The worker has left the cluster.
    Exception
        The error that the function raises there.
    """
    answers = await connection.client.run(_call_in_thread, function, arguments, workers=[worker])
    if worker not in answers:
        raise ActorLostError(f"Worker {worker} has left the cluster.", begun=False)
    answer = answers[worker]
    if "error" in answer:
        raise load_error(answer["error"])
    return answer["value"]


async def call_in_all_workers(
    connection: DaskConnection, function: Callable[..., Any], *arguments: Any, timeout_s: float
) -> None:
    """Call a quick function on the event loop of every worker that answers in time."""
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(timeout_s):
            await connection.client.run(function, *arguments, on_error="return")


async def _call_in_thread(
    function: Callable[..., Any], arguments: dict[str, Any], dask_worker: Worker
) -> dict[str, Any]:
    connection = connection_on(dask_worker)
    try:
        if connection is None:
            raise UnavailableError(f"Worker {dask_worker.address} does not run daskserve yet.")
        return {"value": await asyncio.to_thread(function, connection, **arguments)}
    except Exception as error:
        # Every error goes back to the caller, which raises it.
        return {"error": dump_error(error)}
