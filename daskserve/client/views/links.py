"""Where instances can be looked at in a browser: links for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

#: What is beside Dask's dashboard on the scheduler's HTTP server, by name.
_PATHS: Mapping[str, str] = {"page": "daskserve", "panels": "daskserve-panels", "Dask": "status"}


def links_of(dashboard_link: str | None) -> dict[str, str]:
    """Return the addresses of the page of daskserve, its panels, and Dask's dashboard; empty without one.

    Dask's link may lead through a reverse proxy, by its setting ``distributed.dashboard.link``.
    """
    if dashboard_link is None:
        return {}
    base = dashboard_link.rstrip("/").removesuffix("/status")
    return {name: f"{base}/{path}" for name, path in _PATHS.items()}


def html_links(links: Mapping[str, str]) -> str:
    """Return links as HTML; only those of the web, because their addresses come from a configuration."""
    return " · ".join(
        f'<a href="{escape(url)}" target="_blank" rel="noopener">{escape(name)}</a>'
        for name, url in links.items()
        if url.startswith(("http://", "https://", "/"))
    )
