"""The address of the page that shows the instances of a cluster."""

from __future__ import annotations


def page_of(dashboard_link: str | None) -> str | None:
    """Return the address of the page, which is beside Dask's dashboard on the scheduler's HTTP server.

    Dask's link may lead through a reverse proxy, by its setting ``distributed.dashboard.link``.
    """
    if dashboard_link is None:
        return None
    return f"{dashboard_link.rstrip('/').removesuffix('/status')}/daskserve"
