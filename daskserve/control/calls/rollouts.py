"""The verbs with which people look at a rollout and steer it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskserve.cluster.protocols.base import verb
from daskserve.control.calls.deciding import DecidingVerbs
from daskserve.control.records.records import BackendRecord, Change
from daskserve.control.verbs import rollouts
from daskserve.control.verbs.scale import named_deployment
from daskserve.control.views.rollouts import rollout_status


class RolloutVerbs(DecidingVerbs):
    """A deployment is named as in `daskserve.control.calls.changing.ChangingVerbs.scale`.

    Each verb returns the state of the rollout after it.
    """

    def _status(self, name: str, application: str) -> dict[str, Any]:
        backend = named_deployment(self._core.state, name, application)
        return rollout_status(self._core.state, self._core.observed, backend)

    async def _change(
        self, name: str, application: str, decide: Callable[[BackendRecord, float], Change]
    ) -> dict[str, Any]:
        async with self._deciding():
            backend = named_deployment(self._core.state, name, application)
            await self._core.writer.commit(decide(backend, self._core.clock.wall()))
        self._core.loop.poke([backend.tag, *self._core.state.apps.members(backend.application)])
        return {**self._status(name, application), "snapshot": await self._core.barrier()}

    @verb
    async def rollout_status(self, name: str, application: str = "") -> dict[str, Any]:
        return self._status(name, application)

    @verb
    async def pause_rollout(self, name: str, application: str = "") -> dict[str, Any]:
        return await self._change(name, application, rollouts.pause)

    @verb
    async def promote_rollout(
        self, name: str, application: str = "", full: bool = False, request_id: str = ""
    ) -> dict[str, Any]:
        return await self._change(
            name,
            application,
            lambda backend, wall: rollouts.promote(backend, wall, full=full, request_id=request_id),
        )

    @verb
    async def abort_rollout(self, name: str, application: str = "", by: str = "") -> dict[str, Any]:
        return await self._change(
            name, application, lambda backend, wall: rollouts.abort(self._core.state, backend, wall, by)
        )
