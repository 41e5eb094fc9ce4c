"""The one way in which anything changes: decided under a lock, in the store as one transaction, then applied.

Two things must not come between a change in the store and the same change in memory, or all that follows is
decided on what is not true:

1. Who asked goes away in the middle of the write, and takes the task with it. So the write is a task of its
   own, and the lock is kept until it has ended.
2. The store fails, or the way to it does, after the write or before: nobody knows. So nothing more is decided
   until all records have been read again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Self, TypeAlias

from daskserve.cluster.base import Store
from daskserve.control import checkpoint
from daskserve.control.records import Change
from daskserve.control.state import State
from daskserve.errors import StaleEpochError

logger = logging.getLogger("daskserve.controller")

#: What follows a change in memory that no record holds.
Then: TypeAlias = Callable[[], None]


class Writer:
    """A lock, and what may be done under it. Use it as ``async with writer:`` around deciding and `commit`.

    Parameters
    ----------
    apply
        Takes over into memory what is in the store, and tells of it.

    Attributes
    ----------
    changes : int
        How many have been written.
    """

    def __init__(self, store: Store, epoch: int, state: State, apply: Callable[[Change], None]) -> None:
        self._store = store
        self._epoch = epoch
        self._state = state
        self._apply = apply
        self._lock = asyncio.Lock()
        #: The change that may or may not be in the store, with what is to follow it.
        self._doubtful: tuple[Change, Then | None] | None = None
        self.changes = 0

    async def __aenter__(self) -> Self:
        await self._lock.acquire()
        try:
            if self._doubtful is not None:
                await self._read_again(*self._doubtful)
        except BaseException:
            self._lock.release()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._lock.release()

    async def commit(self, change: Change, then: Then | None = None) -> None:
        """Write a change, apply it and call ``then``, or raise: it may be in the store all the same.

        If it turns out to be in the store, it is applied and ``then`` called when the records are read again.
        """
        if not change:
            if then is not None:
                then()
            return
        writing = asyncio.create_task(self._write(change, then), name="daskserve-write")
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            while not writing.done():
                try:
                    await asyncio.wait([writing])
                except asyncio.CancelledError:
                    pass  # raised below, when the outcome is known
            if not writing.cancelled() and writing.exception() is not None:
                logger.warning("A change that nobody waits for was not written: %r", writing.exception())
            raise

    async def _write(self, change: Change, then: Then | None) -> None:
        try:
            await checkpoint.write(self._store, self._epoch, change)
        except StaleEpochError:
            raise
        except BaseException:
            self._doubtful = change, then
            raise
        self.changes += 1
        self._apply(change)
        if then is not None:
            then()

    async def _read_again(self, change: Change, then: Then | None) -> None:
        stored, unreadable = checkpoint.read(await self._store.load())
        known = self._state.records()
        difference: Change = {key: None for key in known if key not in stored and key not in unreadable}
        difference.update({key: each for key, each in stored.items() if each != known.get(key)})
        self._doubtful = None
        if difference:
            logger.info("The store holds what was not known to be written: %s", ", ".join(sorted(difference)))
            self._apply(difference)
        if then is not None and all(stored.get(key) == record for key, record in change.items()):
            then()
