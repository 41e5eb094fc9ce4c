"""Ownership of an instance's records in a store that other clusters may also use.

Problem: a second cluster that starts on the store must not harm the running instance before it has started to
serve in its place. Until then, the start may still fail: ports may be in use, replicas may not start, and it
may be killed at any moment. Choice: it starts as a *trial*. It reads the records and keeps its changes in
memory. Once it serves, it claims the next epoch, so that the other instance can no longer write. It then
reads the later changes of the other instance, and writes its own changes in one transaction. If it ends
before it serves, for any reason, the store is unchanged.

An instance whose records were taken over continues with the records in memory: it replaces lost actors, and
refuses changes. If the start of the other instance fails after all, it gets the store back.

When a trial may claim depends on whether the owner is alive. The trial sends a query
(`BlockingStore.query_owner`), which owners answer within `CHECK_S`. A live owner keeps the store until all
backends of the trial run. If the owner is dead, the trial may claim the store earlier, because a broken
backend must not keep the others from returning. Of two instances that start at the same time, only one gets
the epoch.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from daskserve.cluster.protocols.stores import (
    Claim,
    InstanceStore,
    OwnershipEvent,
    StoreChange,
    StoreOwnership,
    next_ownership,
)
from daskserve.cluster.scheduler.parcels import is_row
from daskserve.cluster.store.errors import stale
from daskserve.cluster.store.opening import MemoryStore
from daskserve.cluster.store.thread import ThreadedStore
from daskserve.common.clock import Clock, LoopClock
from daskserve.errors import ServeError, StaleEpochError, StoreTakenError, UnavailableError

logger = logging.getLogger("daskserve.store")

#: Interval at which an instance checks that it still owns the store, and answers queries of other clusters.
CHECK_S = 2.0
#: Time after which an owner that does not answer counts as dead.
PATIENCE_S = 7.0
REFUSAL = (
    "Another cluster has taken over the store of this instance. It keeps serving and replaces lost "
    "replicas and proxies, but accepts no changes: make them at the instance on the other cluster, and "
    "shut this one down."
)


def is_same_instance(owner: str | None, other: str | None) -> bool:
    """Return whether two owners are the same instance, perhaps under two schedulers."""
    return (owner or "").partition(".")[0] == (other or "").partition(".")[0]


def _refused(ownership: StoreOwnership) -> ServeError:
    if ownership in (StoreOwnership.TAKEN, StoreOwnership.REFUSED):
        return StoreTakenError(REFUSAL)
    return UnavailableError(
        "The instance is still starting or has ended, so it does not own the store; try again."
    )


class Mirror:
    """The records of an instance, in memory.

    The rows of parcels, which are large, are included only while the instance does not hold the store.
    """

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}

    def know(self, stored: Mapping[str, bytes | None], *, rows: bool = False) -> None:
        """Replace all records."""
        self.records = {}
        self.apply(stored, rows=rows)

    def apply(self, change: Mapping[str, bytes | None], *, rows: bool = True) -> None:
        """Write and remove some records."""
        for key, value in change.items():
            if value is None:
                self.records.pop(key, None)
            elif rows or not is_row(key):
                self.records[key] = bytes(value)

    def keep_rows(self, stored: Mapping[str, bytes]) -> None:
        """Add the contents of parcels, which a new owner of the store removes with the code."""
        self.apply({key: each for key, each in stored.items() if is_row(key)})

    def difference(self, stored: Mapping[str, bytes]) -> dict[str, bytes | None]:
        """Return the change that turns ``stored`` into this store's records."""
        change: dict[str, bytes | None] = {key: None for key in stored if key not in self.records}
        return change | {key: each for key, each in self.records.items() if stored.get(key) != each}


def owned_store(store: MemoryStore | ThreadedStore, start_id: str) -> InstanceStore:
    """Return the store of an instance that is starting, given the start's id and the records' place."""
    if isinstance(store, MemoryStore):
        return store  # no other cluster can use it
    return OwnedStore(store, f"{start_id or uuid.uuid4().hex}.{uuid.uuid4().hex[:8]}", LoopClock())


class OwnedStore:
    """An `InstanceStore` in a store that other clusters may also use.

    Parameters
    ----------
    owner
        The name of this instance under this scheduler: that of the instance, a dot and a random part. It can
        be a part of a file name.
    """

    def __init__(self, shared: ThreadedStore, owner: str, clock: Clock) -> None:
        self.shared = shared
        self._owner = owner
        self._clock = clock
        self._ownership: StoreOwnership | None = None  # before `begin`
        self._lock = asyncio.Lock()
        #: The epoch that commits are written with; controllers' epochs also grow while the store is not held.
        self._claimed = 0
        self._epoch = 0
        self._mirror = Mirror()
        #: During a trial: the claim at its beginning, and the records at that time.
        self._before = Claim(0, "")
        self._base: Mapping[str, bytes] = {}
        #: When the owner was last known to be alive.
        self._lived_at = 0.0
        self._lacks_rows = False
        #: Why the last write failed.
        self._obstacle = ""

    @property
    def ownership(self) -> StoreOwnership:
        return StoreOwnership.HELD if self._ownership is None else self._ownership

    def problems(self) -> Mapping[str, str]:
        found = dict(self.shared.problems())
        if self._obstacle:
            found["store"] = f"The last change could not be written. {self._obstacle}"
        if self._ownership is StoreOwnership.TAKEN:
            found["store"] = REFUSAL
        return found

    def learn(self, condition: Mapping[str, Any]) -> None:
        """Do nothing: this object determines the condition."""

    # Lifecycle

    async def open(self) -> None:
        await self.shared.open()

    async def close(self) -> None:
        await self.shared.close()

    async def begin(
        self, *, reconnects: bool = False, epoch: int = 0, records: Mapping[str, bytes] | None = None
    ) -> None:
        """Determine whether the instance owns the records; until then, the store is used directly.

        Parameters
        ----------
        reconnects
            Whether the instance has outlived another scheduler.
        epoch, records
            Its newest epoch and its records under that scheduler, as far as known.
        """
        found = await self.shared.newest_claim()
        stored = await self.shared.load()
        self._epoch = max(found.epoch, epoch)
        self._lived_at = self._clock.now()
        if not reconnects:
            self._ownership, self._before = StoreOwnership.TRIAL, found
            self._base = stored
            self._mirror.know(stored, rows=True)
        elif not found.owner or is_same_instance(found.owner, self._owner):
            self._ownership, self._claimed = StoreOwnership.HELD, found.epoch
            self._mirror.know(stored)
        else:
            self._ownership = StoreOwnership.TAKEN
            self._mirror.know(stored if records is None else records, rows=True)
            self._mirror.keep_rows(stored)
            logger.error("Store %r: %s", self.shared, REFUSAL)

    async def release(self, *, gives_back: bool = False) -> None:
        async with self._lock:
            if self.ownership.is_ours and self._ownership is not None:
                owner = (self._before.owner or "") if gives_back else ""
                await self.shared.claim_epoch(self._claimed, owner)
                self._apply(OwnershipEvent.RELEASE)
            elif self._ownership in (StoreOwnership.TRIAL, StoreOwnership.REFUSED):
                await self.shared.forget_query(self._owner)

    async def watch(self) -> None:
        """Check the store periodically; return if the trial has failed."""
        while self._ownership is not StoreOwnership.REFUSED:
            await self._clock.sleep(CHECK_S)
            try:
                await self.check()
            except (OSError, ServeError) as error:
                logger.info("Store %r could not be checked: %s", self.shared, error)

    async def check(self) -> None:
        """Check the store once: answer queries of other clusters, query the owner, or notice a new owner."""
        async with self._lock:
            if self.ownership is StoreOwnership.TRIAL:
                if self._before.owner and await self.shared.query_owner(self._owner):
                    self._lived_at = self._clock.now()
                    await self.shared.forget_query(self._owner)  # to ask again the next time
            elif self.ownership is StoreOwnership.TAKEN:
                if self._lacks_rows:
                    await self._fetch_rows()
                await self._come_back()
            elif self.ownership.is_ours:
                found = await self.shared.newest_claim(answers=True)
                if found.epoch != self._claimed:
                    await self._overtaken()
                elif self.ownership is StoreOwnership.CLAIMED and not self._base:
                    await self._write()  # write to the store that was given back

    # Records

    async def load(self) -> Mapping[str, bytes]:
        if self._ownership is None:
            return await self.shared.load()
        async with self._lock:
            if self._ownership is StoreOwnership.HELD:
                stored = await self.shared.load()
                if (await self.shared.newest_claim()).epoch == self._claimed:
                    self._mirror.know(stored)
                    return stored
                await self._overtaken()  # the store may contain another instance's records
            return dict(self._mirror.records)

    async def commit(self, epoch: int, change: StoreChange) -> None:
        if self._ownership is None:
            return await self.shared.commit(epoch, change)
        async with self._lock:
            self._check_epoch(epoch)
            if self._ownership is StoreOwnership.HELD and await self._is_written(
                lambda: self.shared.commit(self._claimed, change)
            ):
                self._mirror.apply(change.records, rows=False)
                return None
            if change.must_last:
                raise _refused(self.ownership)
            self._mirror.apply(change.records)

    async def rewrite(self, epoch: int, change: StoreChange, unreadable: Sequence[str] = ()) -> None:
        if self._ownership is None:
            return await self.shared.rewrite(epoch, change, unreadable)
        async with self._lock:
            self._check_epoch(epoch)
            if self._ownership is not StoreOwnership.HELD or not await self._is_written(
                lambda: self.shared.rewrite(self._claimed, change, unreadable)
            ):
                raise _refused(self.ownership)
            # The rewritten store may be a new file or folder, which does not know the owner.
            self._claimed = await self.shared.claim_epoch(self._claimed, self._owner)
            self._mirror.know(change.records)

    async def _is_written(self, write: Callable[[], Awaitable[None]]) -> bool:
        """Write, and write again if the store was given back in the meantime; return False if another cluster
        owns it."""
        for _ in range(2):
            try:
                await write()
            except StaleEpochError:
                await self._overtaken()
                if self._ownership is not StoreOwnership.HELD:
                    return False
            except ServeError as error:
                self._obstacle = str(error)
                raise
            else:
                self._obstacle = ""
                return True
        return False

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise stale(epoch, self._epoch)
        self._epoch = epoch

    # Epochs

    async def newest_epoch(self) -> int:
        return await self.shared.newest_epoch() if self._ownership is None else self._epoch

    async def claim_epoch(self) -> int:
        async with self._lock:
            if self.ownership.is_ours and self._ownership is not None:
                try:
                    await self._claim(self._claimed)
                except StaleEpochError:
                    await self._overtaken()
            self._epoch = max(self._epoch + 1, self._claimed)
            return self._epoch

    async def take_over(
        self, epoch: int, *, is_complete: bool, own: Sequence[str]
    ) -> Mapping[str, bytes | None] | None:
        async with self._lock:
            self._check_epoch(epoch)
            if self._ownership is StoreOwnership.TRIAL and not await self._is_claimed(is_complete):
                return None
            if self._ownership in (StoreOwnership.TAKEN, StoreOwnership.REFUSED):
                raise StoreTakenError(
                    "Another cluster has taken over the store since this instance began to start."
                )
            if self._ownership is not StoreOwnership.CLAIMED:
                return {}
            # The previous owner cannot change the store from now on.
            latest = await self.shared.load()
            keys = {*latest, *self._base}
            changed = {key: latest.get(key) for key in keys if latest.get(key) != self._base.get(key)}
            changed = {key: each for key, each in changed.items() if not key.startswith(tuple(own))}
            self._mirror.apply(changed)
            if not await self._write(latest):
                raise _refused(self.ownership)
            self._base = {}
            return changed

    async def _is_claimed(self, is_complete: bool) -> bool:
        """Claim the store at the end of a trial; return False if it is too early."""
        found = await self.shared.newest_claim()
        is_another = found.owner != "" and not is_same_instance(found.owner, self._before.owner)
        if found.epoch != self._before.epoch and is_another:
            self._apply(OwnershipEvent.OVERTAKEN)
            return True
        may_live = bool(found.owner) and self._clock.now() < self._lived_at + PATIENCE_S
        if may_live and not is_complete:
            return False
        try:
            await self._claim(found.epoch)
        except StaleEpochError:
            return False  # by a new controller of the owner, or by another cluster; look again
        self._apply(OwnershipEvent.CLAIM)
        return True

    async def _claim(self, after: int) -> None:
        self._claimed = await self.shared.claim_epoch(after, self._owner)
        while self._claimed < self._epoch:  # a controller already has this epoch, and no other may get it
            self._claimed = await self.shared.claim_epoch(self._claimed, self._owner)

    async def _write(self, latest: Mapping[str, bytes] | None = None) -> bool:
        """Write the records in memory to the store; return False if another cluster has come to own it."""
        known = await self.shared.load() if latest is None else latest
        try:
            await self.shared.commit(self._claimed, StoreChange(self._mirror.difference(known)))
        except StaleEpochError:
            self._apply(OwnershipEvent.OVERTAKEN)
            return False
        self._apply(OwnershipEvent.WRITE)
        self._mirror.know(self._mirror.records)
        return True

    async def _overtaken(self) -> None:
        """Record that another cluster has claimed the store."""
        self._apply(OwnershipEvent.OVERTAKEN)
        self._lacks_rows = True
        try:
            await self._fetch_rows()
            await self._come_back()
        except (OSError, ServeError) as error:
            logger.warning("Store %r could not be read: %s", self.shared, error)

    async def _fetch_rows(self) -> None:
        self._mirror.keep_rows(await self.shared.load())
        self._lacks_rows = False

    async def _come_back(self) -> None:
        """Own the store again if it was given back."""
        found = await self.shared.newest_claim()
        if found.owner != self._owner:
            return
        try:
            await self._claim(found.epoch)
        except StaleEpochError:
            return
        self._apply(OwnershipEvent.GIVEN_BACK)
        await self._write()

    def _apply(self, event: OwnershipEvent) -> None:
        before, self._ownership = self._ownership, next_ownership(self.ownership, event)
        if self._ownership is before:
            return
        if self._ownership in (StoreOwnership.TAKEN, StoreOwnership.REFUSED):
            logger.error("Store %r: %s", self.shared, REFUSAL)
        else:
            logger.info("Store %r: %s, it was %s", self.shared, self._ownership, before)
