"""The lock of the verbs that change an instance: they decide under it, as the newest controller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from daskserve.cluster.protocols.stores import StoreOwnership
from daskserve.common.types import GoalId
from daskserve.control.core import ControllerCore
from daskserve.errors import DeployError, NotRunningError, ServeError, StoreTakenError, UnavailableError


class LockingVerbs:
    """Base class of the verbs that change an instance."""

    def __init__(self, core: ControllerCore) -> None:
        self._core = core

    @asynccontextmanager
    async def _deciding(self, requests: Iterable[str] = ()) -> AsyncIterator[None]:
        """Hold the lock for one decision, and check that this is the newest controller.

        ``requests`` are the ids of the calls; a withdrawn call is refused.

        The store rejects changes from a replaced controller. If a call changes nothing, the store cannot
        reject it, and a replaced controller would answer from outdated state. So this first checks that the
        controller is the newest one.
        """
        store = self._core.cluster.store
        if store.ownership is StoreOwnership.TAKEN:
            raise StoreTakenError(store.problems()["store"])
        try:
            async with self._core.writer:
                if self._core.writer.is_detached:
                    raise NotRunningError(f"Instance {self._core.cluster.instance!r} is being shut down.")
                if not set(self._core.observed.withdrawn).isdisjoint(requests):
                    raise DeployError("The change was undone before it began.")
                changes = self._core.writer.changes
                yield
                is_written = self._core.writer.changes > changes
        except UnavailableError:
            raise
        except ServeError:
            await self._core.confirm_reign()
            raise
        if not is_written:
            await self._core.confirm_reign()

    def _goal_id(self) -> GoalId:
        return f"{self._core.rng.getrandbits(128):032x}"
