"""The verbs that change an instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daskserve.cluster.protocols.base import verb
from daskserve.control.decisions import applications as app_decisions
from daskserve.control.decisions import backends as backend_decisions
from daskserve.control.decisions import endpoints as endpoint_state
from daskserve.control.decisions import goals, target_capacity
from daskserve.control.decisions import scale as scale_decisions
from daskserve.control.decisions.backends import Outcome
from daskserve.control.decisions.goals import ChangeLimits
from daskserve.control.decisions.history.events import WHOLE
from daskserve.control.declared.apply import check_version
from daskserve.control.records.records import BackendRecord, Change
from daskserve.control.rpc.locking import LockingVerbs
from daskserve.options.backend import BackendConfig
from daskserve.options.specs import ApplicationSpec, BackendSpec


class ChangingVerbs(LockingVerbs):
    """The verbs that change an instance: each takes the lock, calls a pure function and commits.

    The argument ``by`` names the calling program, for the errors of programs whose changes it replaces.
    """

    async def _commit_outcome(self, outcome: Outcome, tag: str) -> dict[str, Any]:
        await self._core.writer.commit(outcome.change)
        self._core.loop.enqueue([tag])
        return {"goal": outcome.goal}

    # Verbs: backends

    @verb
    async def create_backend(self, spec: Mapping[str, Any], by: str = "") -> dict[str, Any]:
        wanted = BackendSpec.from_plain(spec)
        async with self._deciding([wanted.request_id]):
            outcome = backend_decisions.create_backend(
                self._core.state, wanted, goal_id=self._goal_id(), now=self._core.clock.wall(), by=by
            )
            return await self._commit_outcome(outcome, wanted.tag)

    @verb
    async def update_backend_config(
        self,
        tag: str,
        config: Mapping[str, Any],
        user_config: bytes | None,
        sets_user_config: bool,
        timeout_s: float | None,
        progress_timeout_s: float | None = None,
        by: str = "",
    ) -> dict[str, Any]:
        async with self._deciding():
            outcome = backend_decisions.update_backend_config(
                self._core.state,
                tag,
                BackendConfig(**config),
                user_config,
                sets_user_config=sets_user_config,
                goal_id=self._goal_id(),
                limits=ChangeLimits(timeout_s, progress_timeout_s),
                now=self._core.clock.wall(),
                by=by,
            )
            return await self._commit_outcome(outcome, tag)

    @verb
    async def delete_backend(self, tag: str, force: bool, by: str = "") -> dict[str, Any]:
        async with self._deciding():
            app_decisions.check_separate(self._core.state, tag)
            outcome = backend_decisions.delete_backend(
                self._core.state, tag, is_forced=force, goal_id=self._goal_id(), by=by
            )
            return await self._commit_outcome(outcome, tag)

    @verb
    async def scale(self, name: str, number: int, application: str = "", by: str = "") -> int:
        """Record the number that an external scaler or an operator requests; replicas follow it."""
        async with self._deciding():
            change = scale_decisions.scale(
                self._core.state, name, number, self._core.clock.wall(), application=application, by=by
            )
            await self._core.writer.commit(change)
        self._core.loop.enqueue([each.tag for each in change.values() if isinstance(each, BackendRecord)])
        return number

    @verb
    async def get_backend_config(self, tag: str) -> dict[str, Any]:
        return backend_decisions.describe(self._core.state, tag)

    @verb
    async def list_backends(self) -> dict[str, Any]:
        return {
            tag: backend_decisions.describe(self._core.state, tag)
            for tag, backend in self._core.state.backends.items()
            if not backend.is_deleting
        }

    # Verbs: deployments

    @verb
    async def deploy(
        self,
        spec: Mapping[str, Any],
        route: str | None,
        methods: Sequence[str],
        python_methods: Sequence[str],
        by: str = "",
    ) -> dict[str, Any]:
        """Create or update a deployment (a backend and an endpoint of one name) in one transaction."""
        wanted = BackendSpec.from_plain(spec)
        async with self._deciding([wanted.request_id]):
            outcome = backend_decisions.deploy(
                self._core.state,
                wanted,
                goal_id=self._goal_id(),
                now=self._core.clock.wall(),
                by=by,
                unloadable=self._core.observed.unloadable.keys(),
            )
            change = dict(outcome.change)
            change.update(
                endpoint_state.deploy_endpoint(
                    self._core.state, wanted.tag, route=route, methods=methods, python_methods=python_methods
                )
            )
            await self._core.writer.commit(change)
        self._core.loop.enqueue([wanted.tag])
        return {
            "goal": outcome.goal,
            "updating": outcome.is_update,
            "snapshot": await self._core.barrier() if outcome.goal is None else None,
        }

    @verb
    async def delete_deployment(self, name: str, force: bool = False, by: str = "") -> dict[str, Any]:
        async with self._deciding():
            app_decisions.check_separate(self._core.state, name)
            outcome = backend_decisions.delete_backend(
                self._core.state, name, is_forced=force, goal_id=self._goal_id(), leaving=name, by=by
            )
            outcome.change.update(endpoint_state.delete_endpoint(self._core.state, name))
            answer = await self._commit_outcome(outcome, name)
        return {**answer, "snapshot": await self._core.barrier()}

    # Verbs: applications

    @verb
    async def deploy_applications(
        self, apps: Sequence[Mapping[str, Any]], expected: Mapping[str, str] | None = None, by: str = ""
    ) -> dict[str, Any]:
        """Create or update applications in one transaction; return the goals and updates by name."""
        specs = [ApplicationSpec.from_plain(each) for each in apps]
        async with self._deciding([each.request_id for each in specs]):
            deployed = app_decisions.deploy(
                self._core.state,
                specs,
                new_goal=self._goal_id,
                now=self._core.clock.wall(),
                expected=expected,
                by=by,
                unloadable=self._core.observed.unloadable.keys(),
            )
            await self._core.writer.commit(deployed.change)
        self._core.loop.enqueue(deployed.tags)
        is_waiting = any(goal is not None for goal in deployed.goals.values())
        return {
            "goals": deployed.goals,
            "updating": deployed.updating,
            "snapshot": None if is_waiting else await self._core.barrier(),
        }

    @verb
    async def delete_application(
        self,
        name: str,
        request_id: str | None = None,
        by: str = "",
        expected_version: int | None = None,
        missing_ok: bool = True,
    ) -> dict[str, Any]:
        async with self._deciding():
            app = self._core.state.apps.get(name)
            # otherwise this may be the retry of a call whose answer was lost
            if app is not None and not app.is_deleting:
                check_version(self._core.state, expected_version)
            outcome = app_decisions.delete(
                self._core.state,
                name,
                goal_id=self._goal_id(),
                request_id=request_id,
                by=by,
                now=self._core.clock.wall(),
                missing_ok=missing_ok,
            )
            await self._core.writer.commit(outcome.change)
        self._core.loop.enqueue(self._core.state.apps.members(name))
        return {"goal": outcome.goal, "snapshot": await self._core.barrier()}

    @verb
    async def withdraw(self, requests: Sequence[str], by: str = "") -> dict[str, Any]:
        """Undo the incomplete changes of some calls; idempotent.

        Calls that have not arrived yet, because they travel on another connection, are refused later.
        """
        self._core.observed.withdrawn.extend(requests)
        async with self._deciding():
            change = goals.withdrawn(self._core.state, requests, by, self._core.clock.wall())
            await self._core.writer.commit(change)
        self._core.loop.enqueue()
        return {"snapshot": await self._core.barrier()}

    @verb
    async def get_application(self, name: str) -> dict[str, Any]:
        return app_decisions.get(self._core.state, name)

    # Verbs: endpoints

    async def _change(
        self, by: str, decide: Callable[..., Change], *args: Any, **options: Any
    ) -> dict[str, Any]:
        """Apply the change that a function returns; return when the proxies have applied it."""
        async with self._deciding():
            change = decide(self._core.state, *args, **options)
            await self._core.writer.commit(change, causes={WHOLE: by})
        return {"snapshot": await self._core.barrier()}

    @verb
    async def create_endpoint(
        self,
        name: str,
        route: str | None,
        methods: Sequence[str],
        backend: str,
        request_id: str,
        by: str = "",
    ) -> dict[str, Any]:
        return await self._change(
            by,
            endpoint_state.create_endpoint,
            name,
            route=route,
            methods=methods,
            backend=backend,
            request_id=request_id,
        )

    @verb
    async def delete_endpoint(self, name: str, by: str = "") -> dict[str, Any]:
        return await self._change(by, endpoint_state.delete_endpoint, name)

    @verb
    async def set_traffic(self, name: str, traffic: Mapping[str, float], by: str = "") -> dict[str, Any]:
        return await self._change(by, endpoint_state.set_traffic, name, traffic)

    @verb
    async def shadow_traffic(
        self, name: str, backend: str, proportion: float, by: str = ""
    ) -> dict[str, Any]:
        return await self._change(by, endpoint_state.shadow_traffic, name, backend, proportion)

    # Verbs: the instance

    @verb
    async def set_target_capacity(self, percent: float | None, by: str = "") -> dict[str, Any]:
        """Set the target capacity; return when routers have applied it, before replicas start or stop."""
        wall = self._core.clock.wall()
        found = await self._change(by, target_capacity.set_target_capacity, percent, wall)
        self._core.loop.enqueue()
        return found

    @verb
    async def rewrite_store(self) -> int:
        """Write all records to the store again, at the place that its URL names; return their number."""
        async with self._deciding():
            return await self._core.writer.rewrite(self._core.corrupt)

    @verb
    async def list_endpoints(self) -> dict[str, Any]:
        return {
            name: backend_decisions.get_endpoint(self._core.state, name)
            for name in self._core.state.endpoints
        }

    @verb
    async def get_endpoint(self, name: str) -> dict[str, Any]:
        return backend_decisions.get_endpoint(self._core.state, name)
