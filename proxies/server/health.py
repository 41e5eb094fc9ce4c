"""The health port of a proxy, for probes by load balancers and Kubernetes.

It answers ``/-/healthz`` and ``/-/readyz`` without TLS and without the user's middlewares. It has separate
limits, so that probes succeed while ``max_connections`` are open. It opens with the proxy's main port, and
closes when the proxy begins to drain. From then on, probes are refused, or reach another proxy on the same
port of the host, such as the successor.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from daskserve.common.types import Receive, Send
from daskserve.proxies.asgi import ASGIApp, Scope, send_whole
from daskserve.proxies.ingress.metrics import HEALTHZ, READYZ
from daskserve.proxies.server.server import HTTPServer

if TYPE_CHECKING:
    from daskserve.options.http import HTTPOptions

#: The limits of the health port, which replace those of the main port.
_LIMITS: Mapping[str, float] = {"max_connections": 100, "max_body_bytes": 0, "keep_alive_timeout_s": 60.0}


class HealthApp:
    """Passes health checks on to the ingress, and refuses other requests."""

    def __init__(self, ingress: ASGIApp) -> None:
        self._ingress = ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        elif scope["path"] in (HEALTHZ, READYZ):
            await self._ingress(scope, receive, send)
        else:
            await send_whole(send, 404, f"This port answers {HEALTHZ} and {READYZ} only.".encode())


def health_server(ingress: ASGIApp, options: HTTPOptions, **arguments: Any) -> HTTPServer | None:
    """Return the server of the health port; None without one.

    Parameters
    ----------
    **arguments
        The arguments of `HTTPServer` for the proxy's main port.
    """
    if options.health_port is None:
        return None
    address = {"host": options.health_host or options.host, "port": options.health_port}
    values = SimpleNamespace(**{**vars(options), **address, **_LIMITS})
    served = cast("HTTPOptions", values)
    return HTTPServer(HealthApp(ingress), served, port_option="health_port", **arguments)
