"""Deployments: a callable with its options, and the application that binds its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

from daskserve.data.replica.user_code.definitions import inspect_definition, python_methods
from daskserve.options.actor import ActorOptions, parse_actor_options
from daskserve.options.backend import BackendConfig
from daskserve.options.deployment_actor import DeploymentActorConfig
from daskserve.options.environment import parse_environment
from daskserve.options.fields.base import parse_options, spellings_of
from daskserve.options.fields.ray_names import TRANSLATED
from daskserve.options.placement import check_covered
from daskserve.options.routing.route_variables import check_part_name

#: The option that has another default for each kind of callable.
CONCURRENCY = "max_ongoing_requests"
#: Distinguishes an omitted argument from None.
UNSET: Any = object()
#: The actors of a deployment, as users pass them.
DeploymentActors: TypeAlias = Sequence[DeploymentActorConfig | Mapping[str, Any]]


@dataclass(frozen=True)
class Deployment:
    """A class or function with its deployment options; `bind` its arguments to run it."""

    __daskserve_remedy__ = (
        "It is a deployment: pass its class or function, change it with its options(), or run the result "
        "of its bind() with serve.run()."
    )

    definition: Any
    name: str
    config: BackendConfig = field(default_factory=BackendConfig)
    actor_options: ActorOptions = field(default_factory=ActorOptions)
    version: str | None = None
    env: Any = None
    actors: tuple[DeploymentActorConfig, ...] = ()

    def __post_init__(self) -> None:
        check_part_name(self.name, "name")
        parse_environment(self.env)
        check_covered(self.config.placement_group_bundles, self.actor_options)
        for each in self.actors:
            inspect_definition(each.actor_class, each.init_args, each.init_kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"Deployment {self.name!r} cannot be constructed directly; "
            f"use {self.name}.bind(...) and serve.run()."
        )

    def __getattr__(self, name: str) -> Any:
        # Only called for names that are not attributes: options, including their aliases.
        option = spellings_of(BackendConfig).get(name, name)
        if "config" not in vars(self) or option not in BackendConfig.model_fields or name in TRANSLATED:
            raise AttributeError(f"A deployment has no attribute {name!r}.")
        return self.config.concurrency() if option == CONCURRENCY else getattr(self.config, option)

    @property
    def deployment_actors(self) -> tuple[DeploymentActorConfig, ...]:
        """The actors that its replicas share."""
        return self.actors

    def options(
        self,
        *,
        name: str | None = None,
        config: BackendConfig | Mapping[str, Any] | None = None,
        actor_options: ActorOptions | Mapping[str, Any] | None = None,
        ray_actor_options: Mapping[str, Any] | None = None,
        version: str | None = None,
        env: Any = UNSET,
        deployment_actors: DeploymentActors | None = UNSET,
        **options: Any,
    ) -> Self:
        """Return a copy with the given options changed; see `daskserve.deployment`."""
        changes = config_of(config, options)
        resources, environment = parse_actor_options(
            actor_options, ray_actor_options, None if env is UNSET else env
        )
        has_resources = actor_options is not None or ray_actor_options is not None
        return replace(
            self,
            name=self.name if name is None else name,
            config=self.config.merged(changes, ends_autoscaling=True),
            actor_options=resources if has_resources else self.actor_options,
            version=self.version if version is None else version,
            env=self.env if env is UNSET and environment is None else environment,
            actors=self.actors
            if deployment_actors is UNSET
            else DeploymentActorConfig.parse_all(deployment_actors),
        )

    def bind(self, /, *args: Any, **kwargs: Any) -> Application:
        """Return this deployment with its constructor's arguments: an application that `run` deploys.

        The arguments may contain other applications and their methods (``other.method``), also in lists,
        tuples, sets, dicts and attributes of objects. Each is deployed with this one, once, and the
        constructor gets a `Handle` in its place.

        Raises
        ------
        TypeError
            The callable cannot be served, or an argument contains a deployment that is not bound.
        ValueError There are arguments, but the callable is not a class; or an option needs another one that
        is not set.
        """
        inspect_definition(self.definition, args, kwargs)
        self.config.check_complete()
        unbound = found_in((args, kwargs), Deployment)
        if unbound is not None:
            raise unbound_error(self.name, unbound)
        return Application(self, args, kwargs)


@dataclass(frozen=True, eq=False)
class Application:
    """A deployment with the arguments of its replicas' constructor, which may contain other applications.

    Two applications are equal only if they are the same object: each is a separate deployment. The
    attributes of an application are the methods of its class, to bind to other deployments.
    """

    __daskserve_remedy__ = "It is an application: run it with serve.run(), or pass its class."

    deployment: Deployment
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> ApplicationMethod:
        if name.startswith("_"):
            raise AttributeError(f"An application has no attribute {name!r}.")
        definition = self.deployment.definition
        methods = python_methods(definition)
        if name in methods or isinstance(definition, str):
            return ApplicationMethod(self, name)
        raise AttributeError(
            f"Application {self.deployment.name!r} has no method {name!r}; it has: "
            f"{', '.join(methods) or 'none'}."
        )

    def __repr__(self) -> str:
        return f"<Application {self.deployment.name!r}>"


@dataclass(frozen=True)
class ApplicationMethod:
    """A method of an application. If it is an argument of another application, that application gets a handle
    of the method."""

    application: Application
    name: str

    def __repr__(self) -> str:
        return f"<method {self.name!r} of application {self.application.deployment.name!r}>"


def unbound_error(name: str, unbound: Deployment) -> TypeError:
    """Return the error for a deployment whose arguments contain a deployment that is not bound."""
    return TypeError(
        f"Deployment {name!r} has the deployment {unbound.name!r} as an argument, which is not bound; pass "
        f"{unbound.name}.bind(...), and {name!r} gets a handle of it."
    )


def found_in(arguments: tuple[Any, ...], kinds: type[Any] | tuple[type[Any], ...]) -> Any:
    """Return an object of one of these types among arguments or inside containers in them; None if there is
    none."""
    found: list[Any] = [arguments]
    seen: set[int] = set()
    while found:
        value = found.pop()
        if isinstance(value, kinds):
            return value
        if isinstance(value, (list, tuple, set, frozenset, Mapping)) and id(value) not in seen:
            seen.add(id(value))  # a container may contain itself
            found.extend(value.values() if isinstance(value, Mapping) else value)
    return None


def default_name(definition: Any) -> str:
    """Return the default name of a deployment: the name of its callable."""
    if isinstance(definition, str):
        return definition.replace(":", ".").rpartition(".")[2]
    return str(getattr(definition, "__name__", type(definition).__name__))


def config_of(config: BackendConfig | Mapping[str, Any] | None, options: Mapping[str, Any]) -> BackendConfig:
    """Return a copy of a config with some options changed."""
    if config is None:
        return BackendConfig(**options)
    base = parse_options(BackendConfig, config, what="config")
    return base.merged(BackendConfig(**options), ends_autoscaling=True) if options else base
