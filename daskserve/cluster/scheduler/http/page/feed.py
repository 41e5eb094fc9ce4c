"""The content of an instance's open pages: one task reads it from the controller as long as pages are
open."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from daskserve.cluster.scheduler.controllers import Instance
from daskserve.cluster.scheduler.http.api.access import ControllerAccess
from daskserve.cluster.scheduler.http.api.live import LiveFeeds
from daskserve.common.changed_parts import ChangedParts
from daskserve.common.types import InstanceName
from daskserve.errors import NotFoundError, ServeError

#: How long the controller waits for a change before it answers, and the timeout of its answer. The latter
#: doubles with each failure, up to a maximum, because a large instance on a busy machine is slow.
WAIT_S, LATE_S, MAX_LATE_S = 1.0, 1.5, 6.0
#: Pause after a call that failed.
RETRY_S = 0.5
#: Number of events that a new page gets.
KEPT_EVENTS = 500
#: Name of the part about the controller, and prefix of the names of parts with live metrics.
CONTROLLER, LIVE = "controller", "live/"


class Feed:
    """The newest overview, events and live metrics of one instance.

    Attributes
    ----------
    parts : ChangedParts
        JSON by name.
    events : deque
        The newest events, oldest first.
    changed : asyncio.Event
        Set once parts or events have changed, and replaced by another one.
    has_ended : bool
        Whether the instance no longer runs.
    """

    def __init__(self, instance: InstanceName, access: ControllerAccess, live: LiveFeeds) -> None:
        self._instance = instance
        self._access = access
        self._live = live
        self.parts = ChangedParts()
        self.events: deque[Mapping[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self.changed = asyncio.Event()
        self.has_ended = False

    async def run(self) -> None:
        """Read until the instance ends, or the task is cancelled."""
        live = asyncio.ensure_future(self._read_live())
        try:
            await self._read_overview()
        finally:
            live.cancel()
            self.end()  # also after an error: the pages connect again

    def end(self) -> None:
        """Notify the pages that the instance has ended."""
        self.has_ended = True
        self._wake()

    async def _read_overview(self) -> None:
        number, events_after = 0, None
        entry: Instance | None = None
        late_s = LATE_S
        while True:
            message = {"after": number, "events_after": events_after, "timeout_s": WAIT_S}
            try:
                async with asyncio.timeout(WAIT_S + late_s):
                    current = await self._access.find(self._instance)
                    if entry is not None and entry is not current:
                        return  # a new instance of the same name, whose event numbers start at the beginning
                    entry = current
                    found = await self._access.call(self._instance, "next_overview", message)
            except NotFoundError:
                return
            except (ServeError, OSError) as error:
                self._set({CONTROLLER: {"is_online": False, "message": _why(error)}})
                await asyncio.sleep(RETRY_S)
                late_s = min(2 * late_s, MAX_LATE_S)
                continue
            number, events_after = found["number"], found["next"]
            late_s = max(LATE_S, late_s / 2)
            self.events.extend(found["events"])
            own = {**found["parts"], CONTROLLER: _ONLINE}
            is_changed = found["is_all"] and self.parts.keep({*own, *filter(_is_live, self.parts.names())})
            if self.parts.update(own) or is_changed or found["events"]:
                self._wake()

    async def _read_live(self) -> None:
        """Read the live metrics; each deployment is a separate part, because most deployments do not change
        each second."""
        try:
            async with self._live.watch(self._instance) as feed:
                number = 0
                while True:
                    number = await feed.after(number)
                    if feed.found is not None:  # otherwise the overview shows the reason
                        self._set_live(feed.found)
        except ServeError:
            pass  # the instance has ended, or its controller is of an older version

    def _set_live(self, found: Mapping[str, Any]) -> None:
        replicas: dict[str, dict[str, Any]] = {}
        for name, each in found["replicas"].items():
            replicas.setdefault(each["deployment"], {})[name] = each
        values = {
            f"{LIVE}{tag}": {**each, "by_replica": replicas.get(tag, {})}
            for tag, each in found["deployments"].items()
        }
        calls = {"http": found["http"], "calls": found["calls"]}
        parts = {name: json.dumps(each) for name, each in {**values, LIVE: calls}.items()}
        is_changed = self.parts.keep({*parts, *(name for name in self.parts.names() if not _is_live(name))})
        if self.parts.update(parts) or is_changed:
            self._wake()

    def _set(self, parts: Mapping[str, Any]) -> None:
        if self.parts.update({name: json.dumps(each) for name, each in parts.items()}):
            self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


_ONLINE = '{"is_online": true, "message": ""}'


def _is_live(name: str) -> bool:
    return name.startswith(LIVE)


def _why(error: BaseException) -> str:
    # Until the deadline, calls are retried while the controller is being replaced.
    return "The controller does not answer." if isinstance(error, TimeoutError) else str(error)


class Feeds:
    """The feeds of the instances with open pages.

    Attributes
    ----------
    readers : int
        The number of open pages.
    """

    def __init__(
        self, access: ControllerAccess, live: LiveFeeds, spawn: Callable[..., asyncio.Task[Any]]
    ) -> None:
        self._access = access
        self._live = live
        self._spawn = spawn
        self._feeds: dict[InstanceName, tuple[Feed, asyncio.Task[Any]]] = {}
        self._readers: dict[InstanceName, int] = {}

    @property
    def readers(self) -> int:
        return sum(self._readers.values())

    def enter(self, instance: InstanceName) -> Feed:
        """Return the feed of an instance; each call is followed by one of `leave`."""
        if instance not in self._feeds or self._feeds[instance][0].has_ended:
            feed = Feed(instance, self._access, self._live)
            self._feeds[instance] = (feed, self._spawn(feed.run()))
        self._readers[instance] = self._readers.get(instance, 0) + 1
        return self._feeds[instance][0]

    def leave(self, instance: InstanceName) -> None:
        """End the feed of an instance after its last reader has left."""
        self._readers[instance] -= 1
        if not self._readers[instance]:
            del self._readers[instance]
            self._feeds.pop(instance)[1].cancel()

    def close(self) -> None:
        """End all feeds, and so their streams."""
        for feed, task in self._feeds.values():
            task.cancel()
            feed.end()
