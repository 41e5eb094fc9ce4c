"""Finds the cluster that code runs in or is connected to."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Client, Status, Worker, get_client, get_worker

from daskserve.cluster.dask.connection import DaskConnection, connection_of, connection_on
from daskserve.cluster.protocols.base import ClusterConnection
from daskserve.cluster.worker.worker_view import WorkerView
from daskserve.common.clock import LoopClock
from daskserve.context import current_replica
from daskserve.errors import InstanceError
from daskserve.internals.current_worker import workers_here
from daskserve.loops.event_loop import running_loop

#: Interval at which to check whether the client of a worker is connected.
CONNECTING_S = 0.02


def find_connection() -> ClusterConnection:
    """Return the caller's connection: from its replica, its Dask task's worker, or its Dask client.

    Raises
    ------
    InstanceError
        The process is not connected to a Dask cluster.
    """
    connection = current_connection()
    if connection is None:
        raise InstanceError(
            "This process is not connected to a Dask cluster; create a distributed.Client, or call "
            "serve.connect()."
        )
    return connection


def default_client() -> Client | None:
    """Return Dask's default client of this process; None if there is none, or if it is closed.

    A client that has lost its scheduler and reconnects is still the program's client.
    """
    try:
        client = Client.current()
    except ValueError:
        return None
    return client if client.status in ("connecting", "running") else None


def current_connection() -> DaskConnection | None:
    """Return the caller's connection: from its replica, its Dask task's worker, or its Dask client.

    A thread that code of a replica or a task has started has no worker or client. It gets that of its
    process's worker, if there is only one.
    """
    replica = current_replica.get()
    if replica is not None and replica.cluster is not None:
        connection: DaskConnection = replica.cluster.connection
        return connection
    found = worker_connection()
    if found is not None:
        return found
    client = default_client()
    if client is not None:
        return connection_of(client)
    workers = [each for each in workers_here() if each.status is Status.running]
    return connection_on(workers[0]) if len(workers) == 1 else None


def worker_connection() -> DaskConnection | None:
    """Return the connection of the worker that the current Dask task or actor runs on.

    A worker that has just joined has no Host yet; then a task in a thread connects through the worker's
    client.
    """
    worker: Any
    try:
        worker = get_worker()
    except ValueError:
        return None
    if isinstance(worker, WorkerView) and worker.find_connection is not None:
        connection: DaskConnection = worker.find_connection()
        return connection
    found = connection_on(worker)
    if found is not None:
        return found
    if not issubclass(type(worker), Worker):
        return None
    loop: Any = worker.loop
    if running_loop() is not None:
        # In a coroutine, the client connects in the background.
        return connection_of(get_client()) if running_loop() is loop.asyncio_loop else None
    return asyncio.run_coroutine_threadsafe(_connect(get_client()), loop.asyncio_loop).result()


async def _connect(client: Client) -> DaskConnection:
    """Return the connection of a worker's client, which another task may just have created."""
    while client.status in ("newly-created", "connecting"):
        await LoopClock().sleep(CONNECTING_S)
    return connection_of(client)
