"""Links to the pages that show instances, for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

#: Paths on the scheduler's HTTP server, by the name of the page.
_PATHS: Mapping[str, str] = {"page": "daskserve", "panels": "daskserve-panels", "Dask": "status"}


def links_of(dashboard_link: str | None) -> dict[str, str]:
    """Return the addresses of the page of daskserve, its panels, and Dask's dashboard; only those that exist.

    Dask's setting ``distributed.dashboard.link`` may make the last link lead through a reverse proxy.
    """
    if dashboard_link is None:
        return {}
    base = dashboard_link.rstrip("/").removesuffix("/status")
    return {name: f"{base}/{path}" for name, path in _PATHS.items()}


def html_links(links: Mapping[str, str]) -> str:
    """Return links as HTML; links that are not HTTP are dropped, because a configuration can set them."""
    return " · ".join(
        f'<a href="{escape(url)}" target="_blank" rel="noopener">{escape(name)}</a>'
        for name, url in links.items()
        if url.startswith(("http://", "https://", "/"))
    )
