"""The verbs that let the requests in progress complete before an instance ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from daskserve.cluster.protocols.base import ANSWER_S, StoreChange, verb
from daskserve.cluster.protocols.stores import StoreOwnership
from daskserve.control.core import ControllerCore
from daskserve.control.proxies import shutdown_order as departure
from daskserve.errors import ServeError, StaleEpochError

logger = logging.getLogger("daskserve.controller")

#: Interval of the checks whether everything has stopped, while the instance drains.
POLL_S = 0.01


class DrainingVerbs:
    """The verbs of draining, called once at the instance's end by the supervisor or local cluster."""

    def __init__(self, core: ControllerCore) -> None:
        self._core = core
        self._draining: asyncio.Task[None] | None = None

    @verb
    async def drain(self) -> float:
        """Begin to drain if there may be requests; return the time limit in seconds, or 0.

        From then on no change is written to the store, and verbs that change something are refused.
        """
        core = self._core
        if self._draining is None:
            if not await self._is_busy() and not await self._forget_replicas():
                return 0.0
            async with core.writer:
                core.writer.detach()
            self._draining = core.spawn(self._drain(), "drain")
        return departure.grace_s(core.state) + departure.limit_s(core.state)

    @verb
    async def ongoing(self) -> dict[str, Any]:
        """Return the requests that the end of the instance waits for, and the time limit in seconds."""
        requests = departure.requests_under_way(self._core.state, await self._actors())
        # Requests over HTTP end with the proxies, so replicas do not wait for them again.
        return {"requests": requests, "limit_s": departure.limit_s(self._core.state)}

    @verb
    async def wait_until_drained(self) -> None:
        """Return when the proxies and all replicas have stopped."""
        if self._draining is not None:
            await asyncio.shield(self._draining)

    async def _is_busy(self) -> bool:
        return any(actor.get("ongoing") for actor in await self._actors())

    async def _actors(self) -> list[Mapping[str, Any]]:
        """Return the instance's actors on all workers that answer."""
        core = self._core
        workers = departure.workers_to_ask(core.state, core.observed)
        asking = (core.clock.wait_for(core.cluster.inspect(worker), ANSWER_S) for worker in workers)
        # Ignore workers that do not answer.
        answers = await asyncio.gather(*asking, return_exceptions=True)
        return [actor for found in answers if not isinstance(found, BaseException) for actor in found]

    async def _forget_replicas(self) -> bool:
        """Remove the replicas from the store, and return whether another cluster has taken over.

        The replicas end with the instance. An instance that starts on the store later would treat them as
        lost. The proxies of a cluster that has taken over share the port and continue to serve.
        """
        core = self._core
        change = StoreChange({each.key: None for each in core.state.replicas.values()}, must_last=False)
        try:
            await core.clock.wait_for(core.cluster.store.commit(core.epoch, change), ANSWER_S)
        except StaleEpochError:
            return True
        except (ServeError, OSError, TimeoutError) as error:
            logger.warning("The store did not answer before the end of the instance: %s", error)
        return core.cluster.store.ownership is StoreOwnership.TAKEN

    async def _drain(self) -> None:
        """Stop the proxies, which complete their requests, then the replicas, callers first."""
        core = self._core
        await self._forget_replicas()
        await core.loop.close_proxies(departure.grace_s(core.state))
        async with core.writer:
            await core.writer.commit(departure.leaving(core.state))
        core.loop.enqueue()
        core.resume()
        while core.state.replicas:
            await core.clock.sleep(POLL_S)
