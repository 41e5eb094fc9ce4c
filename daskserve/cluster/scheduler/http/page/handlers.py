"""Handlers of the page: its files, the list of instances, and the stream with an instance's content.

A browser opens at most six connections to a host over HTTP/1.1, and each stream occupies one. So a page gets
all its content from one stream.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from distributed import Scheduler
from tornado.iostream import StreamClosedError

from daskserve._version import __version__
from daskserve.cluster.protocols.started import common_instance
from daskserve.cluster.scheduler.controllers import Instance, list_instances
from daskserve.cluster.scheduler.http.api.access import ControllerAccess
from daskserve.cluster.scheduler.http.api.live import LiveFeeds
from daskserve.cluster.scheduler.http.page.feed import Feed, Feeds
from daskserve.cluster.scheduler.http.page.menu import add_to_menu, remove_from_menu
from daskserve.cluster.scheduler.http.route import GuardedHandler, SchedulerRoutes
from daskserve.cluster.scheduler.http.site_guard import SiteGuard
from daskserve.common.types import InstanceName

#: Address of the page in the menu of Dask's dashboard, which uses relative addresses.
_MENU = "daskserve"
#: Path of the page, below the scheduler's URL prefix.
PATH = f"/{_MENU}"
#: Maximum number of open streams of pages; any further stream is refused with 503.
MAX_STREAMS = 100
#: Time limit for a browser to read sent data. After it, the stream ends, and the browser may connect again.
FLUSH_S = 60.0
#: Longest silence of a stream. After it, the time is sent, so that proxies keep the connection and pages know
#: that it is alive.
SILENCE_S = 3.0
#: Minimum time between two messages of a stream.
PAUSE_S = 0.1
#: Forbids content of other sites, inline code, and text that becomes markup.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
#: The files of the page, with their content types.
_FILES: Mapping[str, str] = {
    "style.css": "text/css; charset=utf-8",
    "script.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
#: Placeholder in the page for the path of its files.
_BASE = "BASE/"


@dataclass(frozen=True)
class Sources:
    """The data sources of the page's handlers."""

    instances: Mapping[InstanceName, Instance]
    feeds: Feeds


class Page:
    """The routes of the page, and its link in Dask's dashboard."""

    def __init__(
        self,
        scheduler: Scheduler,
        instances: Mapping[InstanceName, Instance],
        access: ControllerAccess,
        live: LiveFeeds,
        guard: SiteGuard,
        spawn: Callable[..., asyncio.Task[Any]],
    ) -> None:
        self._scheduler = scheduler
        self._feeds = Feeds(access, live, spawn)
        arguments = {"guard": guard, "sources": Sources(instances, self._feeds)}
        names = "|".join(each.replace(".", r"\.") for each in _FILES)
        self._routes = SchedulerRoutes(
            scheduler,
            (f"{PATH}/?", PageHandler, arguments),
            (f"{PATH}/(?P<name>{names})", PageHandler, arguments),
            (f"{PATH}/instances", InstancesHandler, arguments),
            (f"{PATH}/(?P<instance>[^/]+)/stream", StreamHandler, arguments),
        )

    def install(self) -> None:
        """Add the routes and the link; idempotent."""
        self._routes.install()
        add_to_menu(self._scheduler, _MENU)

    def uninstall(self) -> None:
        """Remove the routes and end the streams; idempotent."""
        self._routes.uninstall()
        remove_from_menu(self._scheduler, _MENU)
        self._feeds.close()


class _Handler(GuardedHandler):
    def initialize(self, guard: SiteGuard, sources: Sources) -> None:
        self._guard = guard
        self._sources = sources

    def set_default_headers(self) -> None:
        super().set_default_headers()
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("Referrer-Policy", "no-referrer")
        # Browsers revalidate each time, so that all files of a page have the same version.
        self.set_header("Cache-Control", "no-cache")


class PageHandler(_Handler):
    """Answers with the page or one of its files."""

    def get(self, name: str = "") -> None:
        if self.is_refused():
            return
        body = (files(__package__) / (name or "index.html")).read_bytes()
        if not name:
            # Relative, because a reverse proxy may have added a path prefix.
            base = "" if self.request.path.endswith("/") else f"{_MENU}/"
            body = body.replace(_BASE.encode(), base.encode())
        self.set_header("Content-Type", _FILES.get(name, "text/html; charset=utf-8"))
        self.finish(body)

    head = get


class InstancesHandler(_Handler):
    """Answers with the data that a page needs before its stream.

    The data are the names of all instances and of the shared one, the version of daskserve, and whether the
    limit of streams is reached.
    """

    async def get(self) -> None:
        if not self.is_refused():
            found = await list_instances(self._sources.instances)
            names = {"instances": sorted(found), "common": common_instance(found)}
            is_full = self._sources.feeds.readers >= MAX_STREAMS
            self.answer(200, {**names, "version": __version__, "is_full": is_full})


class StreamHandler(_Handler):
    """Streams the content of an instance's pages as server-sent events.

    An event ``ping`` contains the time in seconds since the epoch. An event ``parts`` contains ``parts`` by
    name, as JSON, and ``is_all``: whether all other parts were removed. An event ``events`` contains a list
    of events, oldest first. An event ``ended`` reports the end of the instance.
    """

    async def get(self, instance: str) -> None:
        if self.is_refused():
            return
        found = await list_instances(self._sources.instances)
        if instance not in found:
            self.answer(404, {"message": f"Instance {instance!r} does not run on this cluster."})
            return
        feeds = self._sources.feeds
        if feeds.readers >= MAX_STREAMS:
            self.set_header("Retry-After", "1")
            self.answer(503, {"message": f"There are {MAX_STREAMS} open pages already; retry later."})
            return
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("X-Accel-Buffering", "no")  # for nginx
        feed = feeds.enter(instance)
        try:
            await self._send(feed)
        except (StreamClosedError, TimeoutError):
            pass  # the browser has left or does not read
        finally:
            feeds.leave(instance)
            self.finish()

    async def _send(self, feed: Feed) -> None:
        number, last = 0, 0
        while True:
            self.write(f"event: ping\ndata: {time.time()}\n\n")
            changed = feed.changed
            if feed.has_ended:
                self.write("event: ended\ndata: {}\n\n")
                return
            is_all, parts = feed.parts.since(number)
            if parts:
                # The parts are JSON already.
                texts = ",".join(f"{json.dumps(name)}:{text}" for name, text in parts.items())
                self.write(f'event: parts\ndata: {{"is_all":{json.dumps(is_all)},"parts":{{{texts}}}}}\n\n')
                number = feed.parts.number
            events = [each for each in feed.events if each["number"] > last]
            if events:
                self.write(f"event: events\ndata: {json.dumps(events)}\n\n")
                last = events[-1]["number"]
            async with asyncio.timeout(FLUSH_S):
                await self.flush()
            await asyncio.sleep(PAUSE_S)
            try:
                async with asyncio.timeout(SILENCE_S):
                    await changed.wait()
            except TimeoutError:
                pass

    def on_connection_close(self) -> None:
        """Do nothing: the next write of a stream finds that it is closed."""
