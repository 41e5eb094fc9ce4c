"""The path at which the HTTP server of a Dask process serves its metrics."""

from __future__ import annotations

from typing import Any

from daskserve.internals.tornado import path_patterns

METRICS_PATH = "/metrics"


def metrics_path(application: Any) -> str:
    """Return the path of a Dask server's metrics, which may have a prefix."""
    for pattern in path_patterns(application):
        path = pattern.rstrip("$")
        if path.endswith(METRICS_PATH):
            return path
    return METRICS_PATH


def facts_of_server(server: Any) -> dict[str, Any]:
    """Return where the HTTP server of a Dask worker listens, and the path of its metrics."""
    return {
        "http_address": server.http_server.address,
        "metrics_path": metrics_path(server.http_application),
    }
