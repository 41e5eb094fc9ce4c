"""Routes of daskserve on the scheduler's HTTP server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distributed import Scheduler
from tornado.web import RequestHandler

from daskserve.cluster.metrics_path import METRICS_PATH, metrics_path
from daskserve.cluster.scheduler.http.site_guard import SiteGuard
from daskserve.internals.tornado import add_route, remove_route


class GuardedHandler(RequestHandler):
    """A handler that refuses requests of other sites' pages; ``initialize`` of its class sets the guard."""

    _guard: SiteGuard

    def set_default_headers(self) -> None:
        self.set_header("X-Content-Type-Options", "nosniff")

    def is_refused(self) -> bool:
        """Return whether the request was answered with 403."""
        text = self._guard.refusal(self.request)
        if text is None:
            return False
        self.answer(403, {"message": text})
        return True

    def answer(self, status: int, body: Any) -> None:
        """Answer in JSON."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(body))


class SchedulerRoutes:
    """Routes below the scheduler's URL prefix.

    Parameters
    ----------
    routes : tuple
        Each has a regular expression for the whole path, the handler, and the arguments of the handler's
        ``initialize``, the guard included.
    """

    def __init__(
        self, scheduler: Scheduler, *routes: tuple[str, type[GuardedHandler], Mapping[str, Any]]
    ) -> None:
        self._scheduler: Any = scheduler
        self._routes = routes
        self._rules: list[Any] = []

    def install(self) -> None:
        """Add the routes; idempotent, and does nothing if the scheduler has no HTTP server."""
        application = getattr(self._scheduler, "http_application", None)
        if application is None or self._rules:
            return
        prefix = metrics_path(application).removesuffix(METRICS_PATH)
        self._rules = [
            add_route(application, prefix + path, handler, arguments)
            for path, handler, arguments in self._routes
        ]

    def uninstall(self) -> None:
        """Remove the routes; idempotent."""
        rules, self._rules = self._rules, []
        for each in rules:
            remove_route(self._scheduler.http_application, each)
