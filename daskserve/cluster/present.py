"""How code finds the cluster that it runs in or is connected to."""

from __future__ import annotations

from daskserve.cluster.base import Link
from daskserve.cluster.link import present_link
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
