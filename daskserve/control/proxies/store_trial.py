"""The end of a trial: an instance takes over the store once it serves.

See `daskserve.cluster.protocols.stores`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from daskserve.cluster.protocols.base import Store
from daskserve.cluster.protocols.stores import StoreOwnership
from daskserve.common.clock import Clock
from daskserve.control.observed.observed import Observed
from daskserve.control.proxies.take_over import all_run, listens
from daskserve.control.records.state import State
from daskserve.control.records.storing.checkpoint import TRANSIENT
from daskserve.errors import ServeError, StaleEpochError, StoreTakenError
from daskserve.loops.tasks import TaskSet

logger = logging.getLogger("daskserve.controller")

#: Interval of the checks whether the instance serves, and of the attempts before all replicas run.
CHECK_S = 0.02
ATTEMPT_S = 0.5


class StoreTrial:
    """Takes over the store as soon as possible.

    Parameters
    ----------
    lock
        Held while changes are decided and committed.
    adopt
        Applies the changes that the previous owner has made meanwhile; called with the lock.
    has_proxies
        Whether the instance listens.

    Attributes
    ----------
    error : StoreTakenError or None
        Why the start has failed.
    """

    def __init__(
        self,
        store: Store,
        epoch: int,
        state: State,
        observed: Observed,
        clock: Clock,
        *,
        lock: AbstractAsyncContextManager[Any],
        adopt: Callable[[Mapping[str, bytes | None]], Awaitable[None]],
        has_proxies: bool,
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._state = state
        self._observed = observed
        self._clock = clock
        self._lock = lock
        self._adopt = adopt
        self._has_proxies = has_proxies
        self.error: StoreTakenError | None = None
        #: Why the last attempt failed; empty if it succeeded.
        self._failure = ""
        self._tasks = TaskSet(logger)

    def begin(self) -> None:
        """Run in the background."""
        self._tasks.spawn(self.run(), "trial")

    async def stop(self) -> None:
        """Stop the task that `begin` has started."""
        await self._tasks.close(timeout_s=2)

    @property
    def is_over(self) -> bool:
        """Whether the instance owns the store."""
        return self._store.ownership not in (
            StoreOwnership.TRIAL,
            StoreOwnership.CLAIMED,
            StoreOwnership.REFUSED,
        )

    @property
    def waits_for(self) -> str:
        """The condition that the take-over waits for; empty once the trial is over."""
        if self.is_over:
            return ""
        if not self._listens():
            return "the HTTP proxies do not listen"
        if self._failure:
            return self._failure
        return "not all replicas run, and the instance that has the store until then is alive"

    async def run(self) -> None:
        """Return once the instance or another cluster owns the store."""
        attempted_at = 0.0
        while not self.is_over and self.error is None:
            is_complete = all_run(self._state, self._observed)
            now = self._clock.now()
            if self._listens() and (is_complete or now >= attempted_at + ATTEMPT_S):
                attempted_at = now
                try:
                    await self._attempt(is_complete)
                    self._failure = ""
                except StoreTakenError as error:
                    logger.error("The start has failed: %s", error)
                    self.error = error
                except StaleEpochError:
                    return  # a newer controller continues the trial
                except (ServeError, OSError) as error:
                    if self._failure != str(error):
                        logger.warning("The store could not be taken over yet: %s", error)
                    self._failure = str(error)
                    await self._clock.sleep(ATTEMPT_S)
                except Exception:
                    # Without another attempt, the instance would never serve.
                    logger.exception("The store could not be taken over; this is retried")
                    await self._clock.sleep(ATTEMPT_S)
            await self._clock.sleep(CHECK_S)

    async def _attempt(self, is_complete: bool) -> None:
        async with self._lock:
            changed = await self._store.take_over(self._epoch, is_complete=is_complete, own=TRANSIENT)
            if changed is not None:
                logger.info("The store is this instance's own")
                await self._adopt(changed)

    def _listens(self) -> bool:
        return not self._has_proxies or listens(self._state, self._observed)
