"""The links of a program: to the Dask cluster that it uses, that it names, or that is started for it."""

from __future__ import annotations

from typing import Any

from daskserve.client.functions.forms import Form
from daskserve.cluster.dask.connection import DaskLink, connected, dial, link_of
from daskserve.cluster.dask.launch import (
    start_detached_cluster,
    start_detached_cluster_async,
    start_local_cluster,
    start_local_cluster_async,
)
from daskserve.cluster.worker.present import present_link
from daskserve.common import settings
from daskserve.errors import BlockingCallError


async def find_link(form: Form[Any], dask_client: Any, address: str | None) -> DaskLink | None:
    """Return the link of a Dask client, of a scheduler's address, or of this process if neither is given.

    Raises
    ------
    BlockingCallError
        The link runs on the caller's event loop, and the form blocks.
    ClusterUnreachableError
        No Dask scheduler answers at the address.
    """
    if dask_client is not None and address is not None:
        raise ValueError("Give either dask_client or address, not both.")
    if address is not None:
        return await dial_link(form, address)
    if dask_client is None:
        link = present_link()
    else:
        if form.asynchronous and dask_client.asynchronous:
            await connected(dask_client)
        link = link_of(dask_client)
    if link is not None and link.runs_here() and not form.asynchronous:
        raise BlockingCallError("The Dask client runs on the event loop of the caller.")
    return link


async def dial_link(form: Form[Any], address: str) -> DaskLink:
    """Return the link of a new Dask client, connected to a scheduler.

    See `daskserve.cluster.dask.connection.dial`.
    """
    return await dial(address, settings.timeouts().connect_s, asynchronous=form.asynchronous)


async def launch(form: Form[Any], *, detached: bool, dashboard: bool) -> DaskLink:
    """Return the link of a new cluster of processes on this machine; a detached one outlives the program."""
    size = settings.local_cluster_size()
    if detached:
        if form.asynchronous:
            link = link_of(await start_detached_cluster_async(size, has_dashboard=dashboard))
        else:
            link = link_of(start_detached_cluster(size, has_dashboard=dashboard))
        link.owns_client = True
        return link
    if form.asynchronous:
        cluster, client = await start_local_cluster_async(size, has_dashboard=dashboard)
    else:
        cluster, client = start_local_cluster(size, has_dashboard=dashboard)
    link = link_of(client)
    link.started.cluster = cluster
    return link
