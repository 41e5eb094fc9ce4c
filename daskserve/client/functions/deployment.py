"""The deployments of programs: with the classic verbs ``deploy``, ``get_handle`` and ``delete``.

`daskserve.client.definitions.deployments.Deployment` is the value that applications consist of; this class
also knows the instance. A client needs that class, and this class needs a client.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar, overload

from daskserve.client.classic_handles import classic_handle
from daskserve.client.definitions.deployments import (
    Application,
    Deployment,
    DeploymentActors,
    config_of,
    default_name,
)
from daskserve.client.definitions.specs import check_version, make_spec
from daskserve.client.functions.discovery import default_verbs
from daskserve.client.functions.forms import Form, awaitable, blocking
from daskserve.client.verbs.deployments import NAME_AS_ROUTE, new_version
from daskserve.client.verbs.stored_code import CODE_FIELDS, StoredCode
from daskserve.common.types import GoalId, tag_part
from daskserve.data.caller.calls.handle import Handle
from daskserve.data.replica.environment.working_dir import PackedFolder
from daskserve.data.replica.user_code.definitions import inspect_definition, python_methods
from daskserve.errors import BadRequestError
from daskserve.loops.blocking import finish
from daskserve.options.actor import ActorOptions, parse_actor_options
from daskserve.options.backend import BackendConfig
from daskserve.options.deployment_actor import DeploymentActorConfig
from daskserve.options.environment import parse_environment
from daskserve.options.fields.base import names_of
from daskserve.options.routing.route_variables import check_part_name, check_route


async def _deploy(
    form: Form[Any], self: ClassicDeployment, /, *init_args: Any, _blocking: bool = True, **init_kwargs: Any
) -> GoalId | bool | None:
    """Deploy or update this deployment; see `daskserve.client.client.Client.deploy`.

    It uses the instance of `daskserve.run`, which must be running; `daskserve.start` starts one.

    Parameters
    ----------
    *init_args, **init_kwargs
        Arguments for the constructor. By default, the options ``init_args`` and ``init_kwargs`` are used.

    Returns
    -------
    bool, str or None
        Whether anything was updated; with ``_blocking=False`` the goal for `Client.wait_for_goal`, or None if
        nothing changes.
    """
    if self.actors:
        raise BadRequestError(
            f"Deployment {self.name!r} has deployment_actors, which are deployments of the same application; "
            f"run it with serve.run({self.name}.bind(...)) instead of deploy()."
        )
    verbs = await default_verbs(form)
    await self._load(asynchronous=form.asynchronous)
    has_arguments = bool(init_args or init_kwargs)
    spec = make_spec(
        tag_part(self.name),
        self.definition,
        init_args if has_arguments else self.init_args,
        init_kwargs if has_arguments else self.init_kwargs,
        actor_options=self.actor_options,
        config=self.config,
        timeout_s=None,
        version=new_version(),
        user_version=self.version,
        prev_version=self.prev_version,
        env=self.env,
        files=self.files,
    )
    return await verbs.deploy_spec(
        spec, route=self.route_prefix, methods=python_methods(self.definition), blocking=_blocking
    )


async def _delete(form: Form[Any], self: ClassicDeployment, /) -> None:
    """Delete the deployment of this name; do nothing if there is none."""
    await (await default_verbs(form)).delete_deployment(tag_part(self.name))


async def _get_handle(form: Form[Any], self: ClassicDeployment, /) -> Handle:
    """Return a handle of the deployment of this name, which need not be deployed yet."""
    return await (await default_verbs(form)).get_handle(tag_part(self.name), missing_ok=True)


async def _url(form: Form[Any], self: ClassicDeployment, /) -> str | None:
    """Return the URL of the deployment of this name; None if it has no route, or no proxy listens."""
    urls = await (await default_verbs(form)).http_urls()
    if self.route_prefix is None or not urls:
        return None
    return f"{urls[0].rstrip('/')}{self.route_prefix}"


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
#: Options of Ray Serve's decorator without a counterpart: None is accepted, other values are refused.
RAY_OPTIONS = (
    "placement_group_bundle_label_selector",
    "backpressure_config",
)

_get_handle_now = blocking(_get_handle, owner="deployment")


@dataclass(frozen=True, eq=False, repr=False)
class ClassicDeployment(Deployment):
    """A class or function with its deployment options; `daskserve.deployment` returns one.

    Bind its arguments and run the application, or deploy it alone, as in the classic system. Each classic
    verb has an awaitable form with the suffix ``_async``.
    """

    # No class defaults: `get_deployment` leaves these fields unset, and `__getattr__` loads them.
    init_args: tuple[Any, ...] = field(default_factory=tuple)
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prev_version: str | None = None
    given_route: str | None = NAME_AS_ROUTE
    # The files of ``env`` as the instance has stored them, if the deployment comes from there.
    files: PackedFolder | None = field(default_factory=lambda: None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_part_name(self.name, "name")
        check_version(self.version, "version")
        check_version(self.prev_version, "prev_version")
        if self.given_route is not NAME_AS_ROUTE:
            check_route(self.given_route)
        # Fields that are loaded later are not checked.
        values = vars(self)
        if "definition" in values and not (callable(self.definition) or isinstance(self.definition, str)):
            raise TypeError(
                f"A deployment is made of a function, a class, an ASGI application or an import path, got "
                f"{self.definition!r}"
            )
        if not isinstance(values.get("init_args", ()), tuple):
            raise TypeError(f"init_args must be a tuple, got {self.init_args!r}")
        if not isinstance(values.get("init_kwargs", {}), Mapping):
            raise TypeError(f"init_kwargs must be a dict, got {self.init_kwargs!r}")

    @classmethod
    def stored(cls, code: StoredCode, *, route: str | None, **options: Any) -> Self:
        """Return a deployment as its instance keeps it; its code is unpickled on first use."""
        self = cls.__new__(cls)
        route = NAME_AS_ROUTE if route == f"/{options['name']}" else route
        vars(self).update(options, prev_version=None, given_route=route, _code=code)
        return self

    def __getattr__(self, name: str) -> Any:
        if name in CODE_FIELDS and "_code" in vars(self):
            finish(self._load(asynchronous=False))
            return vars(self)[name]
        return super().__getattr__(name)

    async def _load(self, *, asynchronous: bool) -> None:
        if "_code" in vars(self) and "definition" not in vars(self):
            vars(self).update(await vars(self)["_code"].load(asynchronous=asynchronous))

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __repr__(self) -> str:
        return f"Deployment(name={self.name},version={self.version},route_prefix={self.route_prefix})"

    def __eq__(self, other: object) -> bool:
        # The code is not compared, because an instance returns a copy of it.
        return isinstance(other, ClassicDeployment) and self._facts() == other._facts()

    __hash__ = None  # type: ignore[assignment]

    def _facts(self) -> tuple[Any, ...]:
        names = ("name", "version", "config", "actor_options", "init_args", "route_prefix")
        env = parse_environment(self.env)
        env_text = None if env is None else env.to_text()
        return (*(getattr(self, each) for each in names), dict(self.init_kwargs), env_text)

    def options(
        self,
        func_or_class: Any = None,
        *,
        init_args: tuple[Any, ...] | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
        prev_version: str | None = None,
        route_prefix: str | None = NAME_AS_ROUTE,
        **options: Any,
    ) -> Self:
        """Return a copy with the given options changed; see `deployment`.

        ``prev_version`` is not copied, because it is a condition for one deploy only.
        """
        given = {"definition": func_or_class, "init_args": init_args, "init_kwargs": init_kwargs}
        changes = {name: value for name, value in given.items() if value is not None}
        if route_prefix is not NAME_AS_ROUTE:
            changes["given_route"] = route_prefix
        ray = options.get("ray_actor_options")
        renews_env = "env" in options or (isinstance(ray, Mapping) and bool(ray.get("runtime_env")))
        if renews_env or set(CODE_FIELDS) - {"files"} <= set(changes):
            # The stored files go with the environment, or with the code that they are stored with.
            changes["files"] = None
        changed = replace(self, **changes, prev_version=prev_version)
        return Deployment.options(changed, **options)

    def bind(self, /, *args: Any, **kwargs: Any) -> Application:
        """Return this deployment with its arguments, as `Deployment.bind` does.

        Without arguments, it binds the options ``init_args`` and ``init_kwargs``.

        Raises
        ------
        BadRequestError
            It has a ``route_prefix``, which only `deploy` uses.
        """
        if self.given_route is not NAME_AS_ROUTE:
            raise BadRequestError(
                f"Deployment {self.name!r} has route_prefix={self.given_route!r}, which is for deploy(); "
                "leave it out, and pass it to serve.run(..., route_prefix=...)."
            )
        if args or kwargs:
            return super().bind(*args, **kwargs)
        return super().bind(*self.init_args, **self.init_kwargs)

    # ---- the classic properties

    @property
    def route_prefix(self) -> str | None:
        """The path prefix of `deploy`; by default a slash and the name. None: by handle only."""
        return f"/{self.name}" if self.given_route is NAME_AS_ROUTE else self.given_route

    @property
    def func_or_class(self) -> Any:
        """The callable."""
        return self.definition

    @property
    def ray_actor_options(self) -> dict[str, Any]:
        """The options of each replica's actor that were set."""
        return self.actor_options.to_plain()

    # ---- the classic verbs

    deploy = blocking(_deploy, owner="deployment")
    deploy_async = awaitable(_deploy)
    delete = blocking(_delete, owner="deployment")
    delete_async = awaitable(_delete)
    get_handle_async = awaitable(_get_handle)
    url = property(blocking(_url, owner="deployment"), doc=_url.__doc__)
    url_async = awaitable(_url)

    def get_handle(self, sync: bool = True) -> Handle:
        """Return a handle of the deployment of this name, which need not be deployed yet.

        Parameters
        ----------
        sync : bool
            Whether you will call ``.result()``; see `daskserve.client.client.Client.get_handle`.
        """
        return classic_handle(_get_handle_now(self), sync)


def _with_options(function: FunctionT) -> FunctionT:
    """Add each option to a function's signature as a keyword; aliases have the default ``...``."""
    plain = inspect.signature(function)
    own = [each for each in plain.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    fields = BackendConfig.model_fields
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=fields[name].get_default(call_default_factory=True) if name in fields else ...,
        )
        for name in names_of(BackendConfig)
        if name != "internal_metadata"
    ]
    options += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in RAY_OPTIONS]
    vars(function)["__signature__"] = plain.replace(parameters=[*own, *options])
    return function


@overload
def deployment(definition: Callable[..., Any] | str, /) -> ClassicDeployment: ...


@overload
def deployment(**options: Any) -> Callable[[Callable[..., Any]], ClassicDeployment]: ...


@_with_options
def deployment(
    definition: Any = None,
    /,
    *,
    name: str | None = None,
    config: BackendConfig | Mapping[str, Any] | None = None,
    actor_options: ActorOptions | Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    version: str | None = None,
    env: Any = None,
    deployment_actors: DeploymentActors | None = None,
    init_args: tuple[Any, ...] | None = None,
    init_kwargs: Mapping[str, Any] | None = None,
    prev_version: str | None = None,
    route_prefix: str | None = NAME_AS_ROUTE,
    **options: Any,
) -> Any:
    """Turn a class or function into a `Deployment`; usable as a decorator with or without arguments.

    Or pass it an ASGI application, or the import path of any of these, such as ``"module:name"``.

    Parameters
    ----------
    name : str, optional
        Name of the deployment; by default, that of the class or function, or the last part of an import path.
    config : BackendConfig or dict, optional
    actor_options : ActorOptions or dict, optional
        Resources of each replica. ``ray_actor_options`` is an alias, whose ``runtime_env`` is ``env``.
    version : str, optional
        Version of the code; without it, every change of the code is a new version.
    env : Environment, dict, CondaEnv, str or path, optional
        The environment of its replicas, see `daskserve.client.client.Client.create_backend`.
    deployment_actors : list of DeploymentActorConfig, optional
        Actors that its replicas share; they get them from `daskserve.get_deployment_actor`.
    init_args, init_kwargs, prev_version, route_prefix
        Defaults for ``deploy``, see `daskserve.client.client.Client.deploy`. In an application, pass
        arguments to ``bind``, and a route to `daskserve.run`.
    **options
        Single options of `BackendConfig`, such as ``num_replicas=2``.

    Raises
    ------
    TypeError, ValueError The name or an option is wrong or does not exist.
    """
    checked = config_of(config, options)
    resources, environment = parse_actor_options(actor_options, ray_actor_options, env)

    def decorate(target: Any) -> ClassicDeployment:
        if not inspect.isclass(target):  # a class is checked when it is bound or deployed
            inspect_definition(target)
        return ClassicDeployment(
            definition=target,
            name=name if name is not None else default_name(target),
            config=checked,
            actor_options=resources,
            version=version,
            env=environment,
            init_args=() if init_args is None else init_args,
            init_kwargs={} if init_kwargs is None else init_kwargs,
            prev_version=prev_version,
            given_route=route_prefix,
            actors=actors,
        )

    actors = DeploymentActorConfig.parse_all(deployment_actors)
    return decorate if definition is None else decorate(definition)
