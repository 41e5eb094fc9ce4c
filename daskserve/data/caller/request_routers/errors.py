"""The errors of a user's router: logged once for each kind, counted, and reported to the controller."""

from __future__ import annotations

import logging
from collections.abc import Callable

from daskserve.common.types import BackendTag, described
from daskserve.data.caller.request_routers.thread import RouterError
from daskserve.telemetry.table import MetricSample

logger = logging.getLogger("daskserve.router")

#: How long an error of the router is reported to the controller.
ERROR_S = 60.0


class RouterErrors:
    """Records the errors of one router.

    Attributes
    ----------
    fallbacks : dict
        The number of requests for which the router did not choose a replica, by kind of error.
    text : str
        The first error, or the first one of a new kind; empty without one. It is not the last error, because
        each change of the text is an event, and errors that name requests always differ.
    on_new : callable
        Called at the first error of a kind.
    """

    def __init__(self, name: str, tag: BackendTag, now: Callable[[], float]) -> None:
        self._name, self._tag, self._now = name, tag, now
        self._logged: set[str] = set()
        self._failed_at = 0.0
        self.fallbacks: dict[str, int] = {}
        self.text = ""
        self.on_new: Callable[[], object] = bool

    def note(self, error: RouterError) -> None:
        """Record an error."""
        now = self._now()
        if error.kind not in self._logged or now - self._failed_at >= ERROR_S:
            self.text = f"{self._name} {error.text}; its requests go to the replicas with the least load"
        self._failed_at = now
        if error.kind in self._logged:
            return
        self._logged.add(error.kind)
        logger.error("%s: %s", described(self._tag), self.text, exc_info=error.__cause__)
        self.on_new()

    def count(self, kind: str) -> None:
        """Count a request for which the router did not choose."""
        self._failed_at = self._now()
        self.fallbacks[kind] = self.fallbacks.get(kind, 0) + 1

    def current(self, *, is_made: bool) -> str:
        """Return the current error; empty if there is none. ``is_made`` says whether a router is loaded."""
        is_over = is_made and self._now() - self._failed_at >= ERROR_S
        return "" if is_over else self.text

    def samples(self, labels: tuple[str, ...]) -> list[MetricSample]:
        """Return the metric samples."""
        return [("router_fallbacks", (*labels, kind), count) for kind, count in self.fallbacks.items()]
