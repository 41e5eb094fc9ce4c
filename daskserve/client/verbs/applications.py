"""The client's methods for applications: deployments that call each other, deployed as one change."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskserve.client.definitions.deployments import Deployment
from daskserve.client.definitions.graph import ApplicationGraph
from daskserve.client.definitions.overrides import logging_in
from daskserve.client.definitions.targets import application_of
from daskserve.client.verbs.handles import HandleVerbs
from daskserve.common.formatting import shown
from daskserve.common.types import (
    DEFAULT_APPLICATION,
    EndpointTag,
    GoalId,
    InstanceName,
    short_tag,
    split_deployment_tag,
)
from daskserve.context import current_replica
from daskserve.data.caller.calls.handle import Handle
from daskserve.errors import BadRequestError, DeployError, NotFoundError, RequestTimeoutError, ServeError
from daskserve.options.fields.base import parse_options
from daskserve.options.logging import LoggingConfig
from daskserve.options.routing.route_variables import check_part_name, check_route
from daskserve.options.specs import ApplicationSpec, deployment_tag

#: How long the deletion of an application may take.
DELETE_S = 60.0


@dataclass(frozen=True)
class RunTarget:
    """One application for `daskserve.run_many`; the fields are arguments of `daskserve.run`."""

    target: Any
    name: str = DEFAULT_APPLICATION
    route_prefix: str | None = "/"
    args: Mapping[str, Any] | None = None
    external_scaler_enabled: bool = False
    logging_config: LoggingConfig | Mapping[str, Any] | None = None


class ApplicationVerbs(HandleVerbs):
    """Methods of a `Client` that run, find and delete applications."""

    async def run(
        self,
        target: Any,
        *,
        name: str = DEFAULT_APPLICATION,
        route_prefix: str | None = "/",
        args: Mapping[str, Any] | None = None,
        external_scaler_enabled: bool = False,
        logging_config: LoggingConfig | Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Handle:
        """Deploy an application and return its handle once it answers requests; see `daskserve.run`."""
        one = RunTarget(target, name, route_prefix, args, external_scaler_enabled, logging_config)
        (handle,) = await self.run_many([one], timeout_s=timeout_s)
        return handle

    async def run_many(
        self, targets: Sequence[RunTarget], *, timeout_s: float | None = None, blocking: bool = True
    ) -> list[Handle]:
        """Deploy several applications in one change and return their handles; see `daskserve.run_many`.

        With ``blocking=False``, the call returns as soon as the change is accepted.
        """
        self._connection.check_open()
        built = build(targets, instance=self._connection.instance, timeout_s=timeout_s)
        return await self._deploy_built(built, blocking=blocking)

    async def _deploy_built(
        self,
        applications: Sequence[BuiltApplication],
        *,
        blocking: bool = True,
        expected: Mapping[str, str] | None = None,
    ) -> list[Handle]:
        """Deploy applications; undo the change if the call is interrupted before it is complete.

        Parameters
        ----------
        expected
            The ids of the calls whose deployments may be replaced, by application; see
            `daskserve.control.decisions.applications.deploy`.
        """
        for each in applications:
            await self._check_handles(each)
        await self._share()
        specs = [each.spec for each in applications]
        async with self._withdrawn_if_interrupted(*(each.request_id for each in specs)):
            answer = await self._submit("deploy_applications", apps=specs, expected=expected)
            if blocking:
                # Wait for all goals, even if one fails.
                goals = [(name, goal) for name, goal in answer["goals"].items() if goal is not None]
                failures = [await self._failure(name, goal) for name, goal in goals]
                for failure in filter(None, failures):
                    raise failure
            await self._run(self._connection.calls.wait_until_applied(answer["snapshot"]))
            return [await self.get_handle(each.ingress.spec.tag) for each in specs]

    async def _request_of(self, name: str) -> str:
        """Return the id of the call that deployed an application; empty if there is none."""
        try:
            return str((await self._call("get_application", name=name))["request_id"])
        except NotFoundError:
            return ""

    async def delete_application(
        self, name: str, *, blocking: bool = True, timeout_s: float = DELETE_S, missing_ok: bool = True
    ) -> None:
        """Stop an application and remove it; do nothing if there is no application of this name.

        Raises
        ------
        NotFoundError
            There is none, and ``missing_ok`` is false.
        RequestTimeoutError
            A `TimeoutError`: it took longer than ``timeout_s``. The deletion continues.
        SupersededError
            The application was deployed again before it was deleted.
        """
        await self._delete_application(
            name, None, blocking=blocking, timeout_s=timeout_s, missing_ok=missing_ok
        )

    async def _delete_application(
        self,
        name: str,
        request_id: str | None,
        *,
        blocking: bool = True,
        timeout_s: float = DELETE_S,
        missing_ok: bool = True,
    ) -> None:
        """Delete an application, with a ``request_id`` only if that call has deployed it."""
        await self._let_calls_leave()
        answer = await self._submit(
            "delete_application", name=name, request_id=request_id, missing_ok=missing_ok
        )
        goal: GoalId | None = answer["goal"]
        calls = self._connection.calls
        if goal is not None and blocking and not await self._run(calls.wait_until_reached(goal, timeout_s)):
            raise RequestTimeoutError(
                f"Application {name!r} was not deleted within {shown(timeout_s)} s; its requests may still "
                "be running. See serve.status()."
            )
        await self._run(calls.wait_until_applied(answer["snapshot"]))

    async def get_app_handle(self, name: str = DEFAULT_APPLICATION) -> Handle:
        """Return a handle of an application's ingress.

        Raises
        ------
        NotFoundError
            There is no such application.
        """
        return await self.get_handle((await self._call("get_application", name=name))["ingress"])

    async def get_deployment_handle(self, deployment_name: str, app_name: str | None = None) -> Handle:
        """Return a handle of an application's deployment.

        Parameters
        ----------
        app_name : str, optional
            Default: the application of the replica that calls this.

        Raises
        ------
        BadRequestError
            There is no ``app_name``, and the caller is not a replica.
        NotFoundError
            A `KeyError`: there is no such deployment.
        """
        replica = current_replica.get()
        if app_name is None and replica is None:
            raise BadRequestError(
                f"The application of deployment {deployment_name!r} is missing; pass app_name=... "
                "(only code in a replica has a default, its own application)."
            )
        name = replica.app_name if app_name is None and replica is not None else str(app_name)
        try:
            return await self.get_handle(deployment_tag(name, deployment_name))
        except NotFoundError as error:
            what = f"Deployment {deployment_name!r} in application {name!r} does not exist."
            error.args = (f"{what} {error.reason}".rstrip(),)
            raise

    async def _check_handles(self, built: BuiltApplication) -> None:
        """Raise `BadRequestError` if a deployment has a handle of a deployment that this change removes."""
        name, kept = built.spec.name, {each.spec.tag for each in built.spec.deployments}
        suspects = [tag for tag in built.handles if split_deployment_tag(tag)[0] == name and tag not in kept]
        if not suspects:
            return
        try:
            running = set((await self._call("get_application", name=name))["deployments"].values())
        except NotFoundError:
            return
        for tag in suspects:
            if tag in running:
                raise BadRequestError(
                    f"Deployment {built.handles[tag]!r} refers to a handle of {short_tag(tag)!r}, which this "
                    f"change removes from application {name!r}. Pass the bound deployment to bind() instead "
                    "of its handle, or run the two as applications of different names."
                )

    async def _failure(self, name: str, goal: GoalId) -> ServeError | None:
        """Wait for an application's goal and return its error; None if it was reached."""
        try:
            await self._wait_visibly(goal)
        except (DeployError, RequestTimeoutError) as error:
            error.args = (f"Deploying application {name!r} failed: {error}",)
            return error
        return None


@dataclass(frozen=True)
class BuiltApplication:
    """An application that is ready to be deployed; ``handles`` are those of `ApplicationGraph`."""

    spec: ApplicationSpec
    handles: Mapping[EndpointTag, str]


def build(
    targets: Sequence[RunTarget],
    *,
    instance: InstanceName = "",
    timeout_s: float | None = None,
    is_local: bool = False,
) -> list[BuiltApplication]:
    """Check the targets of `run_many` and return them ready to be deployed.

    Parameters
    ----------
    instance, is_local
        See `ApplicationGraph.spec`.

    Raises
    ------
    TypeError, BadRequestError A target is not a `RunTarget` or cannot be deployed, there are no targets, or
    two have the same name or route.
    """
    check_targets(targets)
    built = []
    for each in targets:
        graph = ApplicationGraph(application_of(each.target, each.args), each.name)
        spec = graph.spec(
            route=each.route_prefix,
            request_id=uuid.uuid4().hex,
            timeout_s=timeout_s,
            changed=_changed_by(each),
            instance=instance,
            is_local=is_local,
        )
        built.append(BuiltApplication(spec, graph.handles))
    return built


def _changed_by(target: RunTarget) -> Callable[[str, Deployment], Deployment] | None:
    """Return the function that applies the options of a target to its deployments; None if the target has no
    options."""
    logs = target.logging_config
    outer = None if logs is None else parse_options(LoggingConfig, logs, what="logging_config")
    if outer is None and not target.external_scaler_enabled:
        return None

    def changed(name: str, deployment: Deployment) -> Deployment:
        found = logging_in(deployment, outer)
        # External programs may set the number of its replicas.
        return found.options(external_scaler_enabled=True) if target.external_scaler_enabled else found

    return changed


def check_targets(targets: Sequence[Any]) -> None:
    """Raise `TypeError` or `BadRequestError` for mistakes that can be found without building the targets."""
    if not targets:
        raise BadRequestError("No applications provided; pass a list of serve.RunTarget(...).")
    names = set()
    for each in targets:
        if not isinstance(each, RunTarget):
            hint = f": serve.RunTarget({each!r})" if isinstance(each, Deployment) else ""
            raise TypeError(f"serve.run_many() takes serve.RunTarget(...) objects, got {each!r}{hint}")
        if each.name in names:
            raise BadRequestError(f"Two applications have the name {each.name!r}; give each its own name=.")
        check_part_name(each.name, "name")
        check_route(each.route_prefix)
        names.add(each.name)
