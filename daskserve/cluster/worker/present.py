"""How code finds the cluster that it runs in or is connected to."""

from __future__ import annotations

from typing import Any

from distributed import Client, get_worker

from daskserve.cluster.dask.connection import DaskLink, link_of
from daskserve.cluster.distributed_internals import actors_on
from daskserve.cluster.protocols.base import Link
from daskserve.cluster.worker.worker_view import WorkerView
from daskserve.context import current_replica
from daskserve.errors import InstanceError


def find_link() -> Link:
    """Return the caller's link: that of its replica, its Dask task's worker, or its Dask client.

    Raises
    ------
    InstanceError
        The process is not connected to a Dask cluster.
    """
    link = present_link()
    if link is None:
        raise InstanceError(
            "This process is not connected to a Dask cluster; create a distributed.Client, or call "
            "serve.connect()."
        )
    return link


def default_client() -> Client | None:
    """Return Dask's default client of this process if it is running; otherwise None."""
    try:
        client = Client.current()
    except ValueError:
        return None
    return client if client.status == "running" else None


def present_link() -> DaskLink | None:
    """Return the caller's link: that of its replica, its Dask task's worker, or its Dask client."""
    replica = current_replica.get()
    if replica is not None and replica.cluster is not None:
        link: DaskLink = replica.cluster.link
        return link
    found = worker_link()
    if found is not None:
        return found
    client = default_client()
    return None if client is None else link_of(client)


def worker_link() -> DaskLink | None:
    """Return the link of the worker that the current Dask task or actor runs on, if it has a Host."""
    worker: Any
    try:
        worker = get_worker()
    except ValueError:
        return None
    if isinstance(worker, WorkerView) and worker.find_link is not None:
        link: DaskLink = worker.find_link()
        return link
    for actor in actors_on(worker):
        found = getattr(actor, "link", None)
        if isinstance(found, DaskLink):
            return found
    return None
