"""The stream of live metrics: the controller is asked once a second, however many watch, if anybody does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from daskserve.cluster.scheduler.http.api.access import ControllerAccess
from daskserve.errors import ServeError, UnavailableError
from daskserve.loops.tasks import TaskSet

logger = logging.getLogger("daskserve.scheduler")

PERIOD_S = 1.0
#: What a stream has while no controller answers.
SILENT = ":\n\n"


class LiveFeed:
    """The messages for all who watch one instance.

    Parameters
    ----------
    ask : callable
        Returns the live metrics.
    """

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self._ask = ask
        self.watchers = 0
        self._tasks = TaskSet(logger)
        self._number = 0
        self._text = ""
        self._error: ServeError | None = None
        self._changed = asyncio.Event()

    def join(self) -> None:
        """Begin to watch."""
        self.watchers += 1
        if self.watchers == 1:
            self._tasks.spawn(self._run(), "live-metrics")

    def leave(self) -> None:
        """Stop asking once the last watcher has left."""
        self.watchers -= 1
        if not self.watchers:
            self._tasks.cancel()

    async def after(self, seen: int) -> tuple[int, str]:
        """Return the newest message and its number, once that is higher; who is slow misses some.

        Raises
        ------
        ServeError
            The instance has ended.
        """
        while self._number <= seen:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self._number, self._text

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD_S
            try:
                self._text = (
                    f"event: metrics\ndata: {json.dumps(await self._ask(), separators=(',', ':'))}\n\n"
                )
            except UnavailableError:
                self._text = SILENT
            except (ServeError, OSError) as error:
                self._error = error if isinstance(error, ServeError) else UnavailableError(str(error))
                self._wake()
                return
            self._number += 1
            self._wake()
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class LiveFeeds:
    """The feed of each instance that is watched, by the name in the path."""

    def __init__(self, access: ControllerAccess) -> None:
        self._access = access
        self._feeds: dict[str | None, LiveFeed] = {}

    @asynccontextmanager
    async def watch(self, instance: str | None) -> AsyncIterator[LiveFeed]:
        """Have the feed of an instance while the block runs."""
        feed = self._feeds.get(instance)
        if feed is None:
            feed = LiveFeed(lambda: self._access.call(instance, "live_metrics", {}))
            self._feeds[instance] = feed
        feed.join()
        try:
            yield feed
        finally:
            feed.leave()
            if not feed.watchers and self._feeds.get(instance) is feed:
                del self._feeds[instance]
