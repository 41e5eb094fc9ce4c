"""Reads folders of models in threads, because a hanging file system may block its thread forever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from daskserve.common.clock import Clock
from daskserve.common.formatting import shown

T = TypeVar("T")

#: Time limit of one reading, including its wait for an earlier reading of the same folder.
READ_S = 60.0
#: Maximum number of folders that are read at the same time. If that many hang, no other folder is read.
MAX_THREADS = 8


class FolderReads:
    """The threads of one controller. Each folder blocks at most one thread, even if reads time out."""

    def __init__(self) -> None:
        # Created at the first reading, because most controllers have no models.
        self._threads: ThreadPoolExecutor | None = None
        #: The readings in progress, by URL.
        self._reading: dict[str, asyncio.Future[Any]] = {}

    async def read(self, url: str, function: Callable[[], T], clock: Clock) -> T:
        """Return the result of a function that reads a folder; raise `TimeoutError` if it takes too long."""
        deadline = clock.now() + READ_S
        try:
            while (earlier := self._reading.get(url)) is not None:
                await clock.wait_for(asyncio.wait([earlier]), deadline - clock.now())
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="daskserve-models")
            future = asyncio.get_running_loop().run_in_executor(self._threads, function)
            self._reading[url] = future
            future.add_done_callback(lambda done: self._ended(url, done))
            return await clock.wait_for(asyncio.shield(future), deadline - clock.now())
        except TimeoutError:
            raise TimeoutError(f"reading {url} has not ended within {shown(READ_S)} s") from None

    def _ended(self, url: str, future: asyncio.Future[Any]) -> None:
        if self._reading.get(url) is future:
            del self._reading[url]
        if not future.cancelled():
            future.exception()  # marks it as retrieved: the reader may have timed out

    def close(self) -> None:
        """Start no more readings."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
