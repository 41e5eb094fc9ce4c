"""An application as a graph: its deployments in the order of their dependencies, ready for the controller.

Problem: other applications are among the arguments of an application, perhaps deep inside objects, and must
arrive as handles. Choice: pickle finds and replaces them, as it reaches every object and keeps the identity
of objects that occur twice. Code is excluded. If a function or class refers to an application by a global
variable, the application would arrive or not, depending on whether the worker has the module; so this is an
error.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

from daskserve.client.definitions.deployments import Application, ApplicationMethod, Deployment, unbound_error
from daskserve.client.definitions.specs import MisplacedObject, make_spec
from daskserve.client.warning import warn_caller
from daskserve.common import settings
from daskserve.common.types import BackendTag, EndpointTag, InstanceName
from daskserve.data.caller.calls.bound import Reduced, reduce_handle, stand_in
from daskserve.data.caller.calls.call_options import CallOptions
from daskserve.data.caller.calls.handle import Handle
from daskserve.data.replica.user_code.class_app import has_app
from daskserve.data.replica.user_code.definitions import inspect_definition, python_methods
from daskserve.errors import BadRequestError
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.deployment_actor import SEPARATOR, DeploymentActorConfig
from daskserve.options.routing.route_variables import check_part_name, check_route
from daskserve.options.specs import ApplicationSpec, DeploymentSpec, actor_tag, deployment_tag
from daskserve.payload.pickling import visit

logger = logging.getLogger("daskserve.client")


class InitArguments(tuple[Any, ...]):
    """Positional arguments of a constructor. In a pickle, they mark the end of the code."""

    __slots__ = ()


@dataclass(eq=False)
class _Node:
    """An application in the graph. ``name`` is empty until its arguments have been visited."""

    application: Application
    needs: list[_Node] = field(default_factory=list)
    name: str = ""


class ApplicationGraph:
    """The deployments of an application, in the order of their dependencies.

    Parameters
    ----------
    target : Application
    name : str
        The application's name.

    Raises
    ------
    TypeError
        A deployment that is not bound is among the arguments of another one.
    BadRequestError
        Applications need each other in a cycle, a name is not valid, or several classes have routes.
    """

    def __init__(self, target: Application, name: str) -> None:
        check_part_name(name, "name")
        self.name = name
        #: The endpoints of handles that are pickled with a deployment, with the deployment's name.
        self.handles: dict[EndpointTag, str] = {}
        self._nodes: dict[Application, _Node] = {}
        self._names: set[str] = set()
        self._order: list[_Node] = []
        self._add(target, [])
        self._check_apps()

    def spec(
        self,
        *,
        route: str | None,
        request_id: str,
        timeout_s: float | None = None,
        changed: Callable[[str, Deployment], Deployment] | None = None,
        modules: Mapping[str, str] | None = None,
        instance: InstanceName = "",
        is_local: bool = False,
    ) -> ApplicationSpec:
        """Return the application's spec for the controller, with user code as bytes.

        Parameters
        ----------
        changed
            Takes the name of a deployment and the deployment; returns the deployment with changed options.
        modules
            See `daskserve.client.definitions.specs.make_spec`.
        instance
            The instance that the spec is for; empty if it does not run yet.
        is_local
            Whether that is the local instance of this process.

        Raises
        ------
        TypeError, ValueError
            An option, argument or callable is wrong, or cannot be pickled.
        """
        check_route(route)
        deployments = []
        for node in self._order:
            deployment = node.application.deployment
            if changed is not None:
                deployment = changed(node.name, deployment)
            if is_local:
                deployment = localized(deployment)
            actors = [
                self._actor(node, deployment, each, timeout_s, instance, is_local=is_local)
                for each in deployment.actors
            ]
            whole = self._deployment(node, deployment, timeout_s, instance, modules)
            deployments += [*actors, with_actors(whole, actors)]
        progress_timeout_s = settings.timeouts().change_s
        return ApplicationSpec(
            self.name, route, tuple(deployments), request_id, timeout_s, progress_timeout_s
        )

    @property
    def deployments(self) -> list[tuple[str, Deployment]]:
        """The deployments in order, each with its name in the application."""
        return [(each.name, each.application.deployment) for each in self._order]

    def _add(self, application: Application, path: list[_Node]) -> _Node:
        """Add an application after its dependencies, and return its node."""
        node = self._nodes.get(application)
        if node is not None:
            if not node.name:
                names = [each.application.deployment.name for each in [*path[path.index(node) :], node]]
                raise BadRequestError(
                    f"Application {self.name!r} has a cycle: {' needs '.join(map(repr, names))}. Let one of "
                    "them get the other's handle at run time, with serve.get_deployment_handle()."
                )
            return node
        node = self._nodes[application] = _Node(application)
        node.needs = [self._add(each, [*path, node]) for each in applications_in(application)]
        node.name = self._free_name(application.deployment.name)
        self._order.append(node)
        return node

    def _check_apps(self) -> None:
        names = [each.name for each in self._order if has_app(each.application.deployment.definition)]
        if len(names) > 1:
            raise BadRequestError(
                f"Application {self.name!r} has several deployments with @serve.ingress (FastAPI or another "
                f"ASGI application): {', '.join(map(repr, names))}. Only the ingress answers HTTP requests: "
                "let one of them have the routes, and call the others by handle."
            )

    def _free_name(self, wanted: str) -> str:
        check_part_name(wanted, "name")
        name, number = wanted, 0
        while name in self._names:
            number += 1
            name = f"{wanted}_{number}"
        self._names.add(name)
        return name

    def _tag(self, node: _Node) -> BackendTag:
        return deployment_tag(self.name, node.name)

    def _deployment(
        self,
        node: _Node,
        deployment: Deployment,
        timeout_s: float | None,
        instance: InstanceName,
        modules: Mapping[str, str] | None,
    ) -> DeploymentSpec:
        application = node.application
        tags = {each.application: self._tag(each) for each in node.needs}
        spec = make_spec(
            self._tag(node),
            deployment.definition,
            InitArguments(application.args),
            application.kwargs,
            actor_options=deployment.actor_options,
            config=deployment.config,
            timeout_s=timeout_s,
            user_version=deployment.version,
            env=deployment.env,
            modules=modules,
            substitution=partial(Substitution, node.name, tags, instance, self.handles),
        )
        methods = tuple(python_methods(deployment.definition))
        return DeploymentSpec(node.name, spec, methods, tuple(dict.fromkeys(tags.values())))

    def _actor(
        self,
        node: _Node,
        deployment: Deployment,
        actor: DeploymentActorConfig,
        timeout_s: float | None,
        instance: InstanceName,
        *,
        is_local: bool,
    ) -> DeploymentSpec:
        name = f"{node.name}{SEPARATOR}{actor.name}"
        facts = inspect_definition(actor.actor_class, actor.init_args, actor.init_kwargs)
        spec = make_spec(
            actor_tag(self.name, node.name, actor.name),
            actor.actor_class,
            InitArguments(actor.init_args),
            actor.init_kwargs,
            actor_options=ActorOptions() if is_local else actor.actor_options,
            config=actor.config(deployment.config, is_blocking=facts.is_blocking),
            timeout_s=timeout_s,
            user_version=deployment.version,
            env=deployment.env,
            substitution=partial(Substitution, name, {}, instance, self.handles),
        )
        version = digest_of(spec.version, sorted(spec.actor_options.demand().items()))
        return DeploymentSpec(
            name,
            replace(spec, tag=f"{spec.tag}{version}"),
            tuple(python_methods(actor.actor_class)),
            actor_of=(node.name, actor.name),
        )


def with_actors(whole: DeploymentSpec, actors: Sequence[DeploymentSpec]) -> DeploymentSpec:
    """Return a deployment that uses these actors; its version includes them, unless the user named one."""
    if not actors:
        return whole
    tags = {each.actor_of[1]: each.spec.tag for each in actors}
    spec = whole.spec
    if spec.user_version is None:
        spec = replace(spec, version=f"{spec.version}{SEPARATOR}{digest_of(sorted(tags.items()))}")
    return replace(whole, spec=spec, needs=(*whole.needs, *tags.values()), actors=tags)


def digest_of(*values: Any) -> str:
    """Return a short digest of plain values."""
    return hashlib.blake2b(repr(values).encode(), digest_size=4).hexdigest()


def localized(deployment: Deployment) -> Deployment:
    """Return a deployment as it runs in the local instance: one replica, in this process."""
    options = deployment.actor_options
    together: dict[str, Any] = {
        name: None
        for name in ("gang_scheduling_config", "placement_group_bundles", "placement_group_strategy")
        if getattr(deployment.config, name) is not None
    }
    ignored = [
        what
        for what, is_set in (("its environment", deployment.env), ("num_gpus", options.num_gpus))
        if is_set
    ]
    ignored += together
    if ignored:
        warn_caller(f"Deployment {deployment.name!r} runs locally without {' and '.join(ignored)}.")
    config = BackendConfig(num_replicas=1, autoscaling_config=None, isolation="thread", **together)
    return replace(
        deployment, config=deployment.config.merged(config), actor_options=ActorOptions(), env=None
    )


def applications_in(application: Application) -> list[Application]:
    """Return the applications among the arguments of an application, in order, each once."""
    found: dict[Application, None] = {}
    unbound: list[Deployment] = []

    def note(value: Any) -> Any:
        if isinstance(value, Deployment):
            unbound.append(value)
        elif isinstance(value, (Application, ApplicationMethod)):
            found[value if isinstance(value, Application) else value.application] = None
        elif not isinstance(value, (FunctionType, type, Handle)):
            return NotImplemented
        return len, ((),)  # a placeholder for the value: any callable with arguments works

    try:
        visit((application.args, application.kwargs), note)
    except Exception as error:
        # A foreign object may raise anything when it is pickled. `make_spec` raises it later, with the place
        # of the object.
        logger.debug("The arguments of %s cannot be pickled: %r", application, error)
    if unbound:
        raise unbound_error(application.deployment.name, unbound[0])
    return list(found)


@dataclass(slots=True)
class Substitution:
    """Decides how the applications and handles among the arguments of a deployment are pickled."""

    _name: str
    _tags: Mapping[Application, BackendTag]
    _instance: InstanceName
    _handles: dict[EndpointTag, str]
    _is_in_code: bool = True

    def __call__(self, value: Any) -> Any:
        """Return what to pickle, as ``__reduce__`` does, or `NotImplemented` for the object itself."""
        if isinstance(value, InitArguments):
            self._is_in_code = False
            return tuple, (list(value),)
        if isinstance(value, Application):
            return self._handle(value, CallOptions())
        if isinstance(value, ApplicationMethod):
            return self._handle(value.application, CallOptions(method_name=value.name))
        if isinstance(value, Handle):
            reduced = stand_in(value, self._instance)
            if reduced is not NotImplemented:
                self._handles[reduced[1][0]] = self._name
            return reduced
        return NotImplemented

    def _handle(self, application: Application, options: CallOptions) -> Reduced:
        tag = self._tags.get(application)
        if self._is_in_code or tag is None:
            other = application.deployment.name
            raise MisplacedObject(
                f"The code of deployment {self._name!r} refers to application {other!r}",
                f"Pass it to bind() as an argument instead, and {self._name!r} gets a handle of it.",
            )
        return reduce_handle(tag, options)
