"""Connects a program to a Dask cluster: the one it already uses, a given one, or a new one."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import dask.config

from daskserve.client.functions.forms import Form
from daskserve.client.functions.scheduler_address import is_http, scheduler_behind
from daskserve.cluster.dask.connection import DaskConnection, connected, connection_of, dial
from daskserve.cluster.dask.launch import (
    start_detached_cluster,
    start_detached_cluster_async,
    start_local_cluster,
    start_local_cluster_async,
)
from daskserve.cluster.worker.current import current_connection
from daskserve.common import settings
from daskserve.errors import BlockingCallError, ClusterUnreachableError


async def find_connection(form: Form[Any], dask_client: Any, address: str | None) -> DaskConnection | None:
    """Return the connection of a Dask client, to a scheduler's address, or of this process by default.

    Raises
    ------
    BlockingCallError
        The connection runs on the caller's event loop, and the form blocks.
    ClusterUnreachableError
        No Dask scheduler answers at the address.
    """
    if dask_client is not None and address is not None:
        raise ValueError("Give either dask_client or address, not both.")
    if address is not None:
        return await dial_connection(form, address)
    if dask_client is None:
        cluster_connection = current_connection()
    else:
        if form.asynchronous and dask_client.asynchronous:
            await connected(dask_client)
        cluster_connection = connection_of(dask_client)
    if cluster_connection is not None and cluster_connection.runs_here() and not form.asynchronous:
        raise BlockingCallError(
            "This blocking call would block the event loop of its own Dask client; await the ..._async form."
        )
    return cluster_connection


async def join_configured(form: Form[Any]) -> DaskConnection | None:
    """Connect this process to the cluster of Dask's ``scheduler-address``, as ``distributed.Client()`` does.

    Return None if no address is configured. Afterwards the process uses this cluster by default.
    """
    address = dask.config.get("scheduler-address", None)
    return None if address is None else await dial_connection(form, address)


async def dial_connection(form: Form[Any], address: str) -> DaskConnection:
    """Return the connection of a new Dask client, connected to a scheduler.

    The address may be that of the scheduler's HTTP server. See `daskserve.cluster.dask.connection.dial`.
    """
    timeout_s, asynchronous = settings.timeouts().connect_s, form.asynchronous
    if not is_http(address):
        return await dial(address, timeout_s, asynchronous=asynchronous)
    find = partial(scheduler_behind, address, timeout_s)
    found = await asyncio.to_thread(find) if asynchronous else find()
    try:
        return await dial(found, timeout_s, asynchronous=asynchronous)
    except ClusterUnreachableError as error:
        raise ClusterUnreachableError(
            f"The server at {address!r} names the scheduler {found!r}, which this machine cannot reach: "
            f"{error}"
        ) from error


async def launch(form: Form[Any], *, detached: bool, dashboard: bool) -> DaskConnection:
    """Return the connection to a new cluster on this machine; a detached one outlives the program."""
    size, waits = settings.local_cluster_size(), form.asynchronous
    cluster = None
    if detached and waits:
        client = await start_detached_cluster_async(size, has_dashboard=dashboard)
    elif detached:
        client = start_detached_cluster(size, has_dashboard=dashboard)
    elif waits:
        cluster, client = await start_local_cluster_async(size, has_dashboard=dashboard)
    else:
        cluster, client = start_local_cluster(size, has_dashboard=dashboard)
    cluster_connection = connection_of(client)
    cluster_connection.owns_client |= detached
    cluster_connection.started.cluster = cluster
    return cluster_connection
