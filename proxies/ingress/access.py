"""The access log of a proxy: one line for each request that has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from daskserve.common.clock import Clock
from daskserve.proxies.asgi import Scope
from daskserve.proxies.ingress.metrics import CLIENT_GONE
from daskserve.proxies.ingress.request import IngressRequest
from daskserve.telemetry.logs.process import ProcessLogs
from daskserve.telemetry.logs.records import Access, Tags

#: The client of a request over a socket without addresses.
_NO_CLIENT = ("", 0)


class AccessLog:
    """Passes the requests of one proxy to the logs of its process.

    Parameters
    ----------
    name, instance : str
        The names of the proxy and of its instance.
    """

    def __init__(self, logs: ProcessLogs, clock: Clock, name: str, instance: str = "") -> None:
        self._logs = logs
        self._clock = clock
        self._name, self._instance = name, instance
        #: Whether to log requests whose deployment does not set ``enable_access_log``.
        self._is_on = False

    def configure(self, config: Mapping[str, Any] | None) -> None:
        """Apply the logging options of the instance: the fields of `LoggingConfig` that it sets."""
        found = self._logs.configure(self._name, Tags(component="proxy", instance=self._instance), config)
        self._is_on = found is not None and found.enable_access_log

    def refused(
        self, client: tuple[str, int] | None, method: str, target: str, version: str, status: int
    ) -> None:
        """Log a request that the server has refused in place of the ingress."""
        if self._is_on:
            path = target.encode("latin-1", "replace") or b"-"
            now = self._clock.wall()
            # The server has not checked the method.
            name = method if method.isidentifier() and method.isascii() and len(method) < 32 else "-"
            names = {"proxy": self._name, "instance": self._instance}
            self._logs.access((*Access(now, name, path, b"", status, 0.0, client, version, **names),))

    def close(self) -> None:
        """Remove the options of the proxy. Idempotent."""
        self._logs.forget(self._name)

    def note(self, request: IngressRequest, scope: Scope, seconds: float) -> None:
        """Log a request that has ended."""
        route = request.route
        if not (self._is_on if route.access_log is None else route.access_log):
            return
        # The fields of an `Access` in their order: creating one would double the cost of this method.
        self._logs.access(
            (
                self._clock.wall(),
                "WebSocket" if scope["type"] == "websocket" else scope["method"],
                scope.get("raw_path") or scope["path"].encode("utf-8", "replace"),
                scope.get("query_string", b""),
                request.response.status or CLIENT_GONE,
                seconds,
                scope.get("client") or _NO_CLIENT,
                scope.get("http_version", ""),
                request.response.request_id.decode("latin-1"),
                # The id within a "traceparent".
                request.trace[0][3:35] if request.trace else "",
                route.route,
                route.endpoint,
                "",
                self._name,
                self._instance,
            )
        )
