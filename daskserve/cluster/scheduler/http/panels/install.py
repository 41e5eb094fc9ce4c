"""Adds the panels to the dashboard of a scheduler that runs, and removes them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from distributed import Scheduler

from daskserve.cluster.scheduler.http.dashboard import template_variables
from daskserve.cluster.scheduler.http.panels.feed import PanelFeed
from daskserve.cluster.scheduler.http.panels.series import PATH
from daskserve.cluster.scheduler.http.route import GuardedHandler, SchedulerRoutes
from daskserve.common.clock import LoopClock
from daskserve.errors import LibraryVersionError

logger = logging.getLogger("daskserve.scheduler")


class NoPanelsHandler(GuardedHandler):
    """A page that explains why there are no panels. Links to panels lead to it."""

    def get(self) -> None:
        text = (
            "The panels are pages of Dask's dashboard, which needs bokeh on the scheduler: "
            'pip install "bokeh>=3.1". The page at /daskserve needs nothing.'
        )
        self.answer(404, {"message": text})


class Panels:
    """The panels of all instances in Dask's dashboard, if there is one.

    Parameters
    ----------
    instances, ask
        As `PanelFeed` takes them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        instances: Callable[[], Collection[str]],
        ask: Callable[[str], Awaitable[Mapping[str, Any]]],
    ) -> None:
        self._scheduler: Any = scheduler
        self._make_feed = lambda: PanelFeed(instances, ask, LoopClock())
        self._feed = self._make_feed()
        self._pages: Any = None
        self._none = SchedulerRoutes(scheduler, (PATH, NoPanelsHandler, {}))
        self._plots: list[dict[str, str]] = []

    def install(self) -> None:
        """Add the panels; without a dashboard, add a page that explains this. Idempotent."""
        if self._pages is not None:
            return
        variables = template_variables(self._scheduler)
        if variables is None:
            self._none.install()
            return
        try:
            self._add(variables)
        except (ImportError, LibraryVersionError, AttributeError, TypeError, KeyError) as error:
            # A newer bokeh or dashboard may raise any of these. An instance must start even without panels.
            logger.warning("Dask's dashboard has no panels of daskserve: %s", error)
            self.uninstall()

    def _add(self, variables: dict[str, Any]) -> None:
        # Only now, because schedulers without a dashboard need no bokeh.
        from daskserve.cluster.scheduler.http.panels.documents import documents
        from daskserve.internals.bokeh import AddedPages, server_among

        server = server_among(self._scheduler.http_application.applications)
        if server is None:
            return
        # a new feed, because old sessions still call `leave` on the previous one
        self._feed = self._make_feed()
        pages = documents(self._feed, {"prefix": server.prefix or "/", **variables})
        self._pages = AddedPages(server, pages)
        # All pages of the scheduler share this list: the menu.
        for path in pages:
            name = "Daskserve" if path == PATH else " ".join(path.strip("/").split("-")[1:]).title()
            plot = {"url": path.strip("/"), "name": name}
            self._plots.append(plot)
            variables["plots"].append(plot)
        variables["plots"].sort(key=lambda each: each["name"])

    def uninstall(self) -> None:
        """Remove the panels, and end their sessions; idempotent."""
        self._feed.close()
        self._none.uninstall()
        pages, self._pages = self._pages, None
        if pages is not None:
            pages.remove()
        plots, self._plots = self._plots, []
        variables = template_variables(self._scheduler)
        if variables is not None and plots:
            listed = variables["plots"]
            listed[:] = [each for each in listed if not any(each is plot for plot in plots)]
