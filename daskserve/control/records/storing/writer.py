"""The only path for changes: a change is decided under a lock, written in one transaction, then applied.

Two failures must not make the store and the memory differ, or later decisions would use a wrong state:

1. The caller is cancelled during the write. So the write is a separate task, and the lock is held until it
   has ended.
2. The store or the connection fails, and it is unknown whether the write succeeded. So no further decision is
   made until all records have been read again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Self, TypeAlias

from daskserve.cluster.protocols.base import Store
from daskserve.control.records.records import Change
from daskserve.control.records.state import State
from daskserve.control.records.storing import checkpoint
from daskserve.errors import StaleEpochError

logger = logging.getLogger("daskserve.controller")

#: The effects of a change on state in memory that is not in any record.
Then: TypeAlias = Callable[[], None]
#: Causes of changes that are not in any record, by key.
Causes: TypeAlias = Mapping[str, str]
Accompany: TypeAlias = Callable[[Change, Causes], Change]
NO_CAUSES: Causes = MappingProxyType({})


class Writer:
    """A lock and the commits under it. Use ``async with writer:`` around a decision and its `commit`.

    Parameters
    ----------
    apply
        Applies a stored change in memory and notifies the listeners.
    accompany
        Returns the history records that are written together with a change. Gets the change and the causes by
        key.

    Attributes
    ----------
    changes : int
        Number of written changes.
    is_detached : bool
        Whether changes are no longer written.
    """

    def __init__(
        self,
        store: Store,
        epoch: int,
        state: State,
        apply: Callable[[Change], None],
        accompany: Accompany = lambda change, causes: {},
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._state = state
        self._apply = apply
        self._accompany = accompany
        self._lock = asyncio.Lock()
        #: The change that may or may not be in the store, with the effects that follow it.
        self._doubtful: tuple[Change, Then | None] | None = None
        self.changes = 0
        #: Set, and replaced by a new event, with each change.
        self.changed = asyncio.Event()
        self.is_detached = False

    def detach(self) -> None:
        """From now on, apply changes in memory only, because the instance ends; call under the lock."""
        self.is_detached = True

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

    async def note(self, change: Change, then: Then | None = None, causes: Causes = NO_CAUSES) -> None:
        """Commit a change that no client requested; it may be lost if the store's machine loses power."""
        await self.commit(change, then, must_last=False, causes=causes)

    async def rewrite(self, unreadable: Collection[str]) -> int:
        """Write all records again and return their number; call under the lock."""
        return await checkpoint.rewrite(self._store, self._epoch, self._state, unreadable)

    async def commit(
        self,
        change: Change,
        then: Then | None = None,
        *,
        must_last: bool = True,
        causes: Causes = NO_CAUSES,
    ) -> None:
        """Write a change with its history, apply it and call ``then``, or raise.

        The change may be in the store even if this raises. If the change is in the store, it is applied and
        ``then`` is called when the records are read again.
        """
        if not change:
            if then is not None:
                then()
            return
        change = change | self._accompany(change, causes)
        writing = asyncio.create_task(self._write(change, then, must_last), name="daskserve-write")
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            while not writing.done():
                try:
                    await asyncio.wait([writing])
                except asyncio.CancelledError:
                    pass  # an error is raised below, once the outcome is known
            if not writing.cancelled() and writing.exception() is not None:
                logger.warning("A change whose caller was cancelled was not written: %r", writing.exception())
            raise

    async def _write(self, change: Change, then: Then | None, must_last: bool) -> None:
        try:
            if not self.is_detached:
                change = await checkpoint.write(self._store, self._epoch, change, must_last=must_last)
        except StaleEpochError:
            raise
        except BaseException:
            self._doubtful = change, then
            raise
        self.changes += 1
        self._apply(change)
        if then is not None:
            then()
        self.changed.set()
        self.changed = asyncio.Event()

    async def _read_again(self, change: Change, then: Then | None) -> None:
        stored, unreadable = checkpoint.read(await self._store.load())
        known = self._state.records()
        # A record that was damaged since it was read is still in memory.
        damaged = {*unreadable, *self._store.problems()} - stored.keys()
        if saved := {key: known[key] for key in sorted(damaged) if key in known}:
            logger.warning("Stored records were damaged and are rewritten: %s", ", ".join(saved))
            await checkpoint.write(self._store, self._epoch, dict(saved), must_last=False)
        difference: Change = {key: None for key in known if key not in stored and key not in damaged}
        difference.update({key: each for key, each in stored.items() if each != known.get(key)})
        self._doubtful = None
        if difference:
            logger.info("The store contains a change whose commit failed: %s", ", ".join(sorted(difference)))
            self._apply(difference)
        if then is not None and all(stored.get(key) == record for key, record in change.items()):
            then()
