"""A route of daskserve's on the scheduler's HTTP server, which Tornado itself can add but not take away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed import Scheduler
from tornado.web import RequestHandler

from daskserve.cluster.metrics_path import METRICS_PATH, metrics_path


class SchedulerRoute:
    """One handler below the scheduler's own prefix, if it has one.

    Parameters
    ----------
    path : str
        A regular expression for the whole path.
    arguments : mapping
        For the handler's ``initialize``.
    """

    def __init__(
        self, scheduler: Scheduler, path: str, handler: type[RequestHandler], arguments: Mapping[str, Any]
    ) -> None:
        self._scheduler: Any = scheduler
        self._path = path
        self._handler = handler
        self._arguments = dict(arguments)
        self._rule: Any = None

    def install(self) -> None:
        """Add the route; idempotent, and nothing where the scheduler has no HTTP server."""
        application = getattr(self._scheduler, "http_application", None)
        if application is None or self._rule is not None:
            return
        rules = application.default_router.rules
        before = list(rules)
        path = metrics_path(application).removesuffix(METRICS_PATH) + self._path
        application.add_handlers(".*$", [(path, self._handler, self._arguments)])
        (self._rule,) = (rule for rule in rules if rule not in before)

    def uninstall(self) -> None:
        """Take the route away; idempotent."""
        rule, self._rule = self._rule, None
        if rule is not None:
            self._scheduler.http_application.default_router.rules.remove(rule)
