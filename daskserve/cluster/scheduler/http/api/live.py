"""Live metrics for watchers: one query of the controller per second serves all of them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from daskserve.cluster.scheduler.http.api.access import ControllerAccess
from daskserve.common.types import InstanceName
from daskserve.errors import ServeError, UnavailableError
from daskserve.loops.tasks import TaskSet

logger = logging.getLogger("daskserve.scheduler")

PERIOD_S = 1.0
#: Sent on a stream while no controller answers.
SILENT = ":\n\n"


class LiveFeed:
    """The live metrics of one instance, for all its watchers.

    Parameters
    ----------
    ask : callable
        Returns the live metrics.

    Attributes
    ----------
    found : dict or None
        The newest live metrics; None while no controller answers.
    error : ServeError or None
        Why there will be no further live metrics.
    """

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self._ask = ask
        self.watchers = 0
        self._tasks = TaskSet(logger)
        self._number = 0
        self.found: dict[str, Any] | None = None
        self.error: ServeError | None = None
        self._text = ""
        self._text_of = 0
        self._changed = asyncio.Event()

    def join(self) -> None:
        """Begin to watch."""
        self.watchers += 1
        if self.watchers == 1:
            self._tasks.spawn(self._run(), "live-metrics")

    def leave(self) -> None:
        """Stop querying once the last watcher has left."""
        self.watchers -= 1
        if not self.watchers:
            self._tasks.cancel()

    async def after(self, seen: int) -> int:
        """Wait for an answer newer than number ``seen``; return its number. Slow watchers skip answers.

        Raises
        ------
        ServeError
            The instance has ended.
        """
        while self._number <= seen:
            if self.error is not None:
                raise self.error
            await self._changed.wait()
        return self._number

    def text(self) -> str:
        """Return the newest answer as a message of a stream; it is encoded once for all watchers."""
        if self._text_of != self._number:
            body = json.dumps(self.found, separators=(",", ":"))
            self._text = SILENT if self.found is None else f"event: metrics\ndata: {body}\n\n"
            self._text_of = self._number
        return self._text

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD_S
            try:
                self.found = await self._ask()
            except UnavailableError:
                self.found = None
            except (ServeError, OSError) as error:
                self.error = error if isinstance(error, ServeError) else UnavailableError(str(error))
                self._wake()
                return
            self._number += 1
            self._wake()
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class LiveFeeds:
    """The feed of each instance that is watched."""

    def __init__(self, access: ControllerAccess) -> None:
        self._access = access
        self._feeds: dict[InstanceName, LiveFeed] = {}

    @asynccontextmanager
    async def watch(self, instance: str | None) -> AsyncIterator[LiveFeed]:
        """Watch an instance in the body of a ``with`` statement.

        Raises
        ------
        NotFoundError
            The instance does not run.
        """
        name = (await self._access.find(instance)).name
        feed = self._feeds.get(name)
        if feed is None or feed.error is not None:
            feed = self._feeds[name] = LiveFeed(lambda: self._access.call(name, "live_metrics", {}))
        feed.join()
        try:
            yield feed
        finally:
            feed.leave()
            if not feed.watchers and self._feeds.get(name) is feed:
                del self._feeds[name]

    async def ask(self, instance: InstanceName) -> Any:
        """Return the live metrics of an instance, from a watched feed or from the controller."""
        feed = self._feeds.get(instance)
        if feed is not None and feed.found is not None:
            return feed.found
        return await self._access.call(instance, "live_metrics", {})
