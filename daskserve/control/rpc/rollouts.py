"""The verbs that show, pause, promote and abort a rollout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from daskserve.cluster.protocols.base import verb
from daskserve.control.decisions import rollouts
from daskserve.control.decisions.model_rollouts import steered
from daskserve.control.decisions.scale import named_deployment
from daskserve.control.records.models import ModelsRecord
from daskserve.control.records.records import BackendRecord, Change
from daskserve.control.rpc.locking import LockingVerbs
from daskserve.control.views.rollouts import model_rollout_status, rollout_status


class RolloutVerbs(LockingVerbs):
    """The verbs for rollouts. Deployments are named as in `ChangingVerbs.scale`.

    With ``model``, the verbs are about the rollout of that model of its ``model_repository``. Each verb
    returns the state of the rollout after it.
    """

    def _status(self, name: str, application: str, model: str) -> dict[str, Any]:
        state, observed = self._core.state, self._core.observed
        backend = named_deployment(state, name, application)
        if model:
            return model_rollout_status(state, observed, backend, model)
        return rollout_status(state, observed, backend)

    async def _change(
        self, name: str, application: str, decide: Callable[[BackendRecord, float], Change], model: str = ""
    ) -> dict[str, Any]:
        async with self._deciding():
            backend = named_deployment(self._core.state, name, application)
            await self._core.writer.commit(decide(backend, self._core.clock.wall()))
        self._core.loop.enqueue([backend.tag, *self._core.state.apps.members(backend.application)])
        return {**self._status(name, application, model), "snapshot": await self._core.barrier()}

    def _of_model(self, verb: str, model: str, **options: Any) -> Callable[[BackendRecord, float], Change]:
        def decide(backend: BackendRecord, wall: float) -> Change:
            before = self._core.state.models.get(backend.tag, ModelsRecord(backend.tag))
            repository = backend.config.model_repository
            plan = None if repository is None else repository.rollout
            after = steered(before, plan, model, verb, wall, **options)
            return {} if after == before else {after.key: after}

        return decide

    @verb
    async def rollout_status(self, name: str, application: str = "", model: str = "") -> dict[str, Any]:
        return self._status(name, application, model)

    @verb
    async def pause_rollout(
        self, name: str, application: str = "", by: str = "", model: str = ""
    ) -> dict[str, Any]:
        decide = self._of_model("pause", model, by=by) if model else partial(rollouts.pause, by=by)
        return await self._change(name, application, decide, model)

    @verb
    async def promote_rollout(
        self,
        name: str,
        application: str = "",
        full: bool = False,
        request_id: str = "",
        by: str = "",
        model: str = "",
    ) -> dict[str, Any]:
        options: dict[str, Any] = {"full": full, "request_id": request_id, "by": by}
        decide = (
            self._of_model("promote", model, **options) if model else partial(rollouts.promote, **options)
        )
        return await self._change(name, application, decide, model)

    @verb
    async def abort_rollout(
        self, name: str, application: str = "", by: str = "", model: str = ""
    ) -> dict[str, Any]:
        def decide(backend: BackendRecord, wall: float) -> Change:
            return rollouts.abort(self._core.state, backend, wall, by)

        steering = self._of_model("abort", model, by=by) if model else decide
        return await self._change(name, application, steering, model)
