"""Deployments: a callable with its options, and the application that binds its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, overload

from daskserve.data.replica.definitions import inspect_definition
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig
from daskserve.options.base import parse_options
from daskserve.options.environment import parse_environment

#: Distinguishes an omitted argument from None.
_UNSET: Any = object()


@dataclass(frozen=True)
class Deployment:
    """A class or function with its deployment options; `bind` its arguments to run it."""

    definition: Any
    name: str
    config: BackendConfig = field(default_factory=BackendConfig)
    actor_options: ActorOptions = field(default_factory=ActorOptions)
    version: str | None = None
    env: Any = None

    def __post_init__(self) -> None:
        parse_environment(self.env)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"Deployment {self.name!r} cannot be constructed directly; "
            f"use {self.name}.bind(...) and serve.run()."
        )

    def options(
        self,
        *,
        name: str | None = None,
        config: BackendConfig | Mapping[str, Any] | None = None,
        actor_options: ActorOptions | Mapping[str, Any] | None = None,
        version: str | None = None,
        env: Any = _UNSET,
        **options: Any,
    ) -> Deployment:
        """Return a copy with the given options changed."""
        changes = _config_of(config, options)
        return replace(
            self,
            name=self.name if name is None else name,
            config=self.config.merged(changes),
            actor_options=self.actor_options
            if actor_options is None
            else parse_options(ActorOptions, actor_options, what="actor_options"),
            version=self.version if version is None else version,
            env=self.env if env is _UNSET else env,
        )

    def bind(self, *args: Any, **kwargs: Any) -> Application:
        """Return the application that `run` deploys: this deployment with its constructor's arguments.

        Raises
        ------
        TypeError
            An argument is or contains another deployment or application: an application is one deployment.
        """
        inspect_definition(self.definition, args, kwargs)
        other = _deployment_in((args, kwargs))
        if other is not None:
            raise TypeError(
                f"Deployment {self.name!r} cannot have {other!r} as an argument: an application is one "
                f"deployment. Run {other!r} separately, and get its handle in the constructor of "
                f"{self.name!r} with serve.connect().get_handle({other!r})."
            )
        return Application(self, args, kwargs)


@dataclass(frozen=True)
class Application:
    """A deployment with the arguments its replicas are constructed with."""

    deployment: Deployment
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def _deployment_in(arguments: tuple[Any, ...]) -> str | None:
    """Return the name of a deployment among arguments or inside containers in them; None without one."""
    found: list[Any] = [arguments]
    seen: set[int] = set()
    while found:
        value = found.pop()
        if isinstance(value, Application):
            return value.deployment.name
        if isinstance(value, Deployment):
            return value.name
        if isinstance(value, (list, tuple, set, frozenset, Mapping)) and id(value) not in seen:
            seen.add(id(value))  # it may contain itself
            found.extend(value.values() if isinstance(value, Mapping) else value)
    return None


def _config_of(config: BackendConfig | Mapping[str, Any] | None, options: Mapping[str, Any]) -> BackendConfig:
    base = parse_options(BackendConfig, config, what="config")
    return base.merged(BackendConfig(**options)) if options else base


@overload
def deployment(definition: Callable[..., Any], /) -> Deployment: ...


@overload
def deployment(
    *,
    name: str | None = None,
    config: BackendConfig | Mapping[str, Any] | None = None,
    actor_options: ActorOptions | Mapping[str, Any] | None = None,
    version: str | None = None,
    env: Any = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Deployment]: ...


def deployment(
    definition: Any = None,
    /,
    *,
    name: str | None = None,
    config: BackendConfig | Mapping[str, Any] | None = None,
    actor_options: ActorOptions | Mapping[str, Any] | None = None,
    version: str | None = None,
    env: Any = None,
    **options: Any,
) -> Any:
    """Turn a class or function into a `Deployment`; usable as a decorator with or without arguments.

    Parameters
    ----------
    name : str, optional
        Name of the deployment; by default, that of the class or function.
    config : BackendConfig or dict, optional
    actor_options : ActorOptions or dict, optional
    version : str, optional
        Version of the code; without it, every change of the code is a new version.
    env : Environment, dict, CondaEnv, str or path, optional
        The environment of its replicas, see `daskserve.client.client.Client.create_backend`.
    **options
        Single options of `BackendConfig`, such as ``num_replicas=2``.
    """

    def decorate(target: Any) -> Deployment:
        inspect_definition(target)
        return Deployment(
            definition=target,
            name=name or str(getattr(target, "__name__", type(target).__name__)),
            config=_config_of(config, options),
            actor_options=parse_options(ActorOptions, actor_options, what="actor_options"),
            version=version,
            env=env,
        )

    return decorate if definition is None else decorate(definition)
