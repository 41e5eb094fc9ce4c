"""The client's methods for deployments: a backend and an endpoint of the same name, managed together."""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from daskserve.client.definitions.deployments import UNSET
from daskserve.client.definitions.specs import check_name, make_spec
from daskserve.client.definitions.unwrapping import unwrapped
from daskserve.client.instance.connection import Verbs
from daskserve.client.verbs.stored_code import StoredCode
from daskserve.common.types import ALL_HTTP_METHODS, GoalId
from daskserve.data.replica.user_code.definitions import python_methods
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.routing.route_variables import check_route
from daskserve.options.specs import BackendSpec

logger = logging.getLogger("daskserve.client")


class DefaultRoute(enum.Enum):
    """Stands for an omitted route, because None means no route. Pickling keeps its identity."""

    NAME = "a slash and the name"


NAME_AS_ROUTE: Any = DefaultRoute.NAME


@dataclass(frozen=True, slots=True)
class DeploymentInfo:
    """Facts about a deployment. ``version`` is None if it was deployed without a version."""

    name: str
    version: str | None
    config: Mapping[str, Any]
    actor_options: Mapping[str, Any]
    python_methods: tuple[str, ...]
    deployed_at: float
    running: int


class StoredDeployment(NamedTuple):
    """A deployment as its instance keeps it."""

    spec: BackendSpec
    route: str | None
    code: StoredCode


def _info_of(found: Mapping[str, Any]) -> tuple[DeploymentInfo, str | None]:
    known = {field.name: found[field.name] for field in fields(DeploymentInfo)}
    known["python_methods"] = tuple(known["python_methods"])
    return DeploymentInfo(**known), found["route"]


def new_version() -> str:
    """Return a version for a deploy without one, which always replaces the replicas."""
    return f"unversioned-{uuid.uuid4().hex[:16]}"


class DeploymentVerbs(Verbs):
    """Methods of a `Client` that deploy callables, with versions."""

    async def deploy(
        self,
        /,
        name: str,
        deployment_def: Any,
        *init_args: Any,
        version: str | None = None,
        prev_version: str | None = None,
        route_prefix: str | None = NAME_AS_ROUTE,
        config: BackendConfig | Mapping[str, Any] | None = None,
        actor_options: ActorOptions | Mapping[str, Any] | None = None,
        env: Any = None,
        timeout_s: float | None = None,
        ray_actor_options: Mapping[str, Any] | None = None,
        blocking: bool = True,
        _blocking: bool = True,
        **init_kwargs: Any,
    ) -> GoalId | bool | None:
        """Deploy a callable under a name, or update the deployment of that name to this code and config.

        The same version with the same config changes nothing. The same version with another config
        reconfigures the replicas in place. Another version, or none, replaces the replicas one by one: each
        new replica starts before an old one stops.

        Parameters
        ----------
        deployment_def
            See `create_backend`.
        version : str, optional
            Version of the code. Without one, every call replaces the replicas.
        prev_version : str, optional
            The version that must be deployed now for this call to succeed.
        route_prefix : str, optional
            Path prefix for HTTP requests, by default a slash and the name; it may have variables, such as
            ``/users/{id:int}``. None makes it reachable by handle only.
        config, actor_options, env, timeout_s, ray_actor_options
            See `create_backend`.
        blocking : bool
            Whether to wait; see the return value. ``_blocking`` is an alias.

        Returns
        -------
        bool, str or None
            Whether the deployment was updated, or was already at this version and config. With
            ``blocking=False``, the call returns immediately, with the goal for `wait_for_goal`, or None if
            nothing changes.

        Raises
        ------
        BadRequestError
            A `ValueError`: ``prev_version`` is not the current version, or the version is reserved.
        ReplicaStartError, NoCapacityError
            The new version did not start; the old version, if any, keeps running. See `create_backend`.
        SupersededError, DeletedError
            Another call deployed something else under this name, or deleted it, before this was complete.
        """
        check_name(name, "backend_tag")
        found, args, kwargs = unwrapped(name, deployment_def, init_args, init_kwargs)
        deployment = found.options(
            config=config,
            actor_options=actor_options,
            ray_actor_options=ray_actor_options,
            version=version,
            env=UNSET if env is None else env,
        )
        if route_prefix is NAME_AS_ROUTE:
            route_prefix = getattr(found, "given_route", NAME_AS_ROUTE)
        return await self.deploy_spec(
            make_spec(
                name,
                deployment.definition,
                args,
                kwargs,
                actor_options=deployment.actor_options,
                config=deployment.config,
                timeout_s=timeout_s,
                env=deployment.env,
                files=getattr(deployment, "files", None),
                version=new_version(),
                user_version=deployment.version,
                prev_version=prev_version or getattr(found, "prev_version", None),
            ),
            route=f"/{name}" if route_prefix is NAME_AS_ROUTE else route_prefix,
            methods=python_methods(deployment.definition),
            blocking=blocking and _blocking,
        )

    async def deploy_spec(
        self, spec: BackendSpec, *, route: str | None, methods: list[str], blocking: bool = True
    ) -> GoalId | bool | None:
        """Deploy a spec that `daskserve.client.definitions.specs.make_spec` returned; see `deploy`."""
        check_route(route)
        await self._share()
        async with self._withdrawn_if_interrupted(spec.request_id):
            answer = await self._submit(
                "deploy", spec=spec, route=route, methods=list(ALL_HTTP_METHODS), python_methods=methods
            )
            version = "no version" if spec.user_version is None else f"version {spec.user_version!r}"
            if answer["updating"]:
                logger.info("Deployment %s is updated to %s", spec.tag, version)
            else:
                logger.info("Deployment %s is already at %s and is not updated", spec.tag, version)
            goal = await self._complete(answer, blocking=blocking)
            return bool(answer["updating"]) if blocking else goal

    async def delete_deployment(
        self, name: str, force: bool = False, *, blocking: bool = True
    ) -> GoalId | None:
        """Remove a deployment, its backend and its endpoint; do nothing if the name is unknown."""
        if not force:
            await self._let_calls_leave()
        return await self._change("delete_deployment", blocking=blocking, name=name, force=force)

    async def get_deployment_info(self, name: str) -> tuple[DeploymentInfo, str | None]:
        """Return a deployment's info and route; raise `NotFoundError` (a `KeyError`) if there is none."""
        return _info_of(await self._call("get_deployment_info", name=name))

    async def list_deployments(self) -> dict[str, tuple[DeploymentInfo, str | None]]:
        """Return the info and route of every deployment, by name."""
        found = await self._call("view", name="list_deployments")
        return {name: _info_of(each) for name, each in found.items()}

    async def stored_deployments(self, name: str | None = None) -> dict[str, StoredDeployment]:
        """Return the deployments by name, all or one, as they were deployed; for `daskserve.get_deployment`.

        Raises
        ------
        NotFoundError
            A `KeyError`: there is no deployment of this name.
        """
        found = await self._call("stored_deployments", name=name)
        return {each: self._stored(values) for each, values in found.items()}

    def _stored(self, found: Mapping[str, Any]) -> StoredDeployment:
        spec = BackendSpec.from_plain(found["spec"])
        code = StoredCode(spec.tag, spec.code, found["code_name"], self._connection)
        return StoredDeployment(spec, found["route"], code)
