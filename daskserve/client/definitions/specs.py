"""Backend specs: the checked arguments of a client, in the form that is sent to the controller."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from daskserve.client.definitions.code_digest import code_digest, names_one_of, settle_ids
from daskserve.common import settings
from daskserve.common.types import ALL_HTTP_METHODS, described
from daskserve.data.replica.environment.working_dir import PackedFolder, pack_folder
from daskserve.data.replica.user_code.class_app import has_app, without_others
from daskserve.data.replica.user_code.definitions import CallableFacts, inspect_definition
from daskserve.errors import BadRequestError
from daskserve.internals.ordered_sets import SetOrder
from daskserve.options.actor import ActorOptions
from daskserve.options.backend import BackendConfig, BackendMetadata
from daskserve.options.environment import Environment, parse_environment
from daskserve.options.fields.base import parse_options, parse_typed
from daskserve.options.fields.pickled import PICKLED
from daskserve.options.http import HTTPOptions
from daskserve.options.placement import check_covered
from daskserve.options.routing.route_variables import check_not_reserved, check_variables
from daskserve.options.specs import BackendSpec
from daskserve.options.start_messages import ControllerStart
from daskserve.payload.importing import ImportPath, ModuleVersions
from daskserve.payload.parcels import pack_code
from daskserve.payload.pickling import Substitute, load_bytes
from daskserve.payload.unpicklable import (
    arguments_of,
    dump_option,
    path_to,
    shown,
    unpicklable_error,
    variable_of,
)

#: The advice for an object in user code that cannot be pickled.
CREATE_THERE = (
    "Create such objects where the replica runs: in the class's __init__, or in the start-up of an ASGI "
    'application. Or pass the import path of the callable, "module:name".'
)


def check_name(name: Any, what: str) -> None:
    """Raise `TypeError` or `BadRequestError` unless the name can be part of replica tags and store keys."""
    check_endpoint_name(name, what)
    if "/" in name:
        raise BadRequestError(f"{what} must be a name without '#' and '/', got {name!r}")


def check_endpoint_name(name: Any, what: str) -> None:
    """Raise `TypeError` or `BadRequestError` unless an endpoint can have the name, which may hold slashes."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a string, got {name!r}")
    if not name or "#" in name:
        raise BadRequestError(f"{what} must be a name without '#', got {name!r}")


def check_version(version: Any, what: str) -> None:
    """Raise `TypeError` unless a version is a string or None."""
    if not (version is None or isinstance(version, str)):
        raise TypeError(f"{what} must be a string or None, got {version!r}")


def check_endpoint_route(route: Any) -> None:
    """Raise `TypeError` or `BadRequestError` unless the route of an endpoint is None or a valid path."""
    if route is None:
        return
    if not isinstance(route, str) or not route.startswith("/"):
        raise TypeError(f"route must be a string that starts with '/', got {route!r}")
    check_variables(route, "route")
    check_not_reserved(route, "route")


def check_methods(methods: Any) -> None:
    """Raise `TypeError` or `BadRequestError` unless the methods are a list of names of HTTP methods."""
    if not isinstance(methods, (list, tuple)) or not all(isinstance(each, str) for each in methods):
        raise TypeError(f"methods must be a list of strings, got {methods!r}")
    if not methods:
        raise BadRequestError("methods must name at least one HTTP method, got an empty list")
    unknown = [each for each in methods if each.upper() not in ALL_HTTP_METHODS]
    if unknown:
        raise BadRequestError(
            f"methods has unknown names {unknown}; the HTTP methods are {', '.join(ALL_HTTP_METHODS)}"
        )


def split_config(
    config: BackendConfig, metadata: BackendMetadata | None = None, **options: Any
) -> tuple[BackendConfig, bytes | None]:
    """Return a config with user code pickled, and the pickled user_config separately.

    Parameters
    ----------
    metadata
        Facts about the callable, if they are known here.
    **options
        Options to set in the copy.
    """
    autoscaling = config.autoscaling_config
    if autoscaling is not None and callable(autoscaling.policy):
        # Only the controller may load user code.
        remedy = 'Name it by its import path, "module:function", if the workers have that module.'
        policy = dump_option("policy", autoscaling.policy, remedy)
        options["autoscaling_config"] = autoscaling.model_copy(update={"policy": policy})
    for option, name, remedy in (
        ("payload_logging", "redact", '"module:function", if the workers have that module.'),
        (
            "request_router_config",
            "request_router_class",
            '"module:Class", if all processes have that module.',
        ),
    ):
        value = getattr(config, option)
        if value is not None and callable(code := getattr(value, name)):
            pickled = dump_option(name, code, f"Name it by its import path, {remedy}")
            text = f"{PICKLED}{base64.b64encode(pickled).decode()}"
            options[option] = value.model_copy(update={name: text})
    hidden: dict[str, Any] = {"user_config": None}
    if metadata is None:
        hidden["internal_metadata"] = BackendMetadata()
    else:
        options["internal_metadata"] = metadata
    user_config = None
    if config.user_config is not None:
        remedy = "Pass the values to create it from, and create it in reconfigure()."
        user_config = dump_option("user_config", config.user_config, remedy)
    sealed = config.model_copy(update=hidden | options)
    sealed.model_fields_set.difference_update(hidden.keys() - options.keys())
    return sealed, user_config


def controller_start(
    options: HTTPOptions,
    *,
    start_id: str,
    opens_with_route: bool = False,
    logging: Mapping[str, Any] | None,
    tracing: Mapping[str, Any],
) -> ControllerStart:
    """Return the start message of a controller, with the middlewares pickled."""
    remedy = "Let the middleware create it when it answers its first request."
    return ControllerStart(
        http=options,
        middlewares=dump_option("middlewares", options.middlewares, remedy) if options.middlewares else None,
        callback=settings.controller().callback,
        start_id=start_id,
        opens_with_route=opens_with_route,
        history_bytes=settings.controller().history_bytes,
        logging=logging,
        tracing=tracing,
    )


def join_config(found: Mapping[str, Any]) -> BackendConfig:
    """Return a config from the controller's plain values, with defaults that depend on the callable."""
    result = join_user_config(BackendConfig(**found["config"]), found["user_config"])
    if result.max_ongoing_requests is None:
        result.max_ongoing_requests = result.concurrency()
    if result.autoscaling_config is not None:
        result.internal_metadata.autoscaling_config = result.autoscaling_config.model_dump()
    return result


class MisplacedObject(Exception):
    """An object can be pickled, but not in this place; becomes a `BadRequestError` with the name of the
    place."""

    def __init__(self, problem: str = "", remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy


def join_user_config(config: BackendConfig, user_config: bytes | None) -> BackendConfig:
    """Return the config that `split_config` split, without user code that only the controller may load."""
    return (
        config if user_config is None else config.model_copy(update={"user_config": load_bytes(user_config)})
    )


def make_spec(
    tag: str,
    definition: Any,
    init_args: Sequence[Any],
    init_kwargs: Mapping[str, Any],
    *,
    actor_options: ActorOptions | Mapping[str, Any] | None,
    config: BackendConfig | Mapping[str, Any] | None,
    timeout_s: float | None,
    version: str | None = None,
    user_version: str | None = None,
    prev_version: str | None = None,
    env: Any = None,
    files: PackedFolder | None = None,
    modules: Mapping[str, str] | None = None,
    substitution: Callable[[], Substitute] | None = None,
    kind: str = "deployment",
) -> BackendSpec:
    """Check a client's arguments and return them as a spec for the controller, with user code as bytes.

    Parameters
    ----------
    tag
        The checked name of the backend.
    version
        The version of the code if there is no ``user_version``. Default: a digest of the code.
    files
        The files of the environment, if it does not name a folder.
    modules
        Modules with their digests. The version of code that names one of them depends on these digests. A
        replica that has imported another version of a module imports it again.
    substitution
        Returns a function that returns the replacement to pickle for an object, and raises `MisplacedObject`
        for an object that must not be there.
    kind
        The word for the backend in errors, see `daskserve.common.types.described`.

    Raises
    ------
    TypeError, ValueError
        The definition, its arguments or its options are wrong, or cannot be pickled.
    """
    check_version(user_version, "version")
    check_version(prev_version, "prev_version")
    facts = inspect_definition(definition, init_args, init_kwargs)
    options = parse_typed(ActorOptions, actor_options, what="actor_options")
    wanted = parse_options(BackendConfig, config, what="config")
    wanted.check_complete()
    check_covered(wanted.placement_group_bundles, options)
    name = described(tag, kind)
    _check_batching(name, wanted, facts, definition)
    metadata = BackendMetadata(
        class_name=_name_of(definition),
        accepts_batches=facts.accepts_batches,
        is_blocking=facts.is_blocking,
        is_asgi_app=facts.is_asgi_app,
        **facts.rare(),
    )
    environment = _environment_of(name, env, wanted)
    isolation: dict[str, Any] = {} if environment is None else {"isolation": "process"}
    if environment is not None and environment.working_dir is not None:
        files = pack_folder(environment.working_dir)
    folder = () if files is None else (files,)
    sealed, user_config = split_config(wanted, metadata, **isolation)
    arguments = _in_order(init_args if substitution else tuple(init_args), init_kwargs)
    if has_app(definition):
        substitution = partial(without_others, definition, substitution)
    definition = ImportPath.of(definition) if isinstance(definition, str) else definition
    code, parts, digest = _packed(name, (*folder, definition, *arguments), substitution, modules)
    return BackendSpec(
        tag=tag,
        code=code,
        parts=parts,
        config=sealed,
        user_config=user_config,
        actor_options=options,
        version=user_version or version or digest,
        user_version=user_version,
        prev_version=prev_version,
        env=None if environment is None else environment.to_text(),
        request_id=uuid.uuid4().hex,
        timeout_s=timeout_s,
        progress_timeout_s=settings.timeouts().change_s,
    )


def _in_order(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return arguments to pickle, with their sets in the same order in each process."""
    sets = SetOrder()
    kind: Any = type(args)
    return kind(map(sets.ordered, args)), sets.order(dict(kwargs))


def _environment_of(name: str, env: Any, config: BackendConfig) -> Environment | None:
    """Return a user's ``env`` as options; raise `BadRequestError` if the config excludes one."""
    environment = parse_environment(env)
    has_thread = "isolation" in config.model_fields_set and config.isolation == "thread"
    if environment is not None and has_thread:
        raise BadRequestError(
            f"env is given for {name}, which cannot have its own environment with isolation='thread'; leave "
            "isolation out, or set it to 'process'."
        )
    return environment


def _packed(
    name: str,
    whole: tuple[Any, ...],
    substitution: Callable[[], Substitute] | None,
    modules: Mapping[str, str] | None = None,
) -> tuple[bytes, tuple[Any, ...], str]:
    """Return pickled code, the parts of its parcel, and its digest."""
    try:
        classes: dict[type, bool] = {}
        code, parts = pack_code(whole, substitution, classes)
        if any(classes.values()):
            settle_ids(classes, partial(_alone, substitution))
            code, parts = pack_code(whole, substitution)
        if modules and names_one_of(bytes(parts[0]) if parts else code, modules):
            return _packed(name, (ModuleVersions(modules), *whole), substitution)
        return code, parts, code_digest(parts or (code,), classes)
    except Exception as error:
        # Pickling an object of a user's class may raise any error; this error adds the place and the remedy.
        *_, definition, args, kwargs = whole
        variable = variable_of(definition, _name_of(definition))
        roots = [(variable, definition), *arguments_of(args, kwargs)]
        if isinstance(error, MisplacedObject):
            place = shown(path_to(whole, roots, substitution))
            raise BadRequestError(f"{error.problem}{place and f' ({place})'}. {error.remedy}") from None
        raise unpicklable_error(
            f"The callable of {name}, or one of its arguments,",
            error,
            whole,
            roots,
            CREATE_THERE,
            substitution,
        ) from error


def _alone(
    substitution: Callable[[], Substitute] | None, cls: type, classes: dict[type, bool]
) -> tuple[Any, ...]:
    code, parts = pack_code((cls,), substitution, classes)
    return parts or (code,)


def _name_of(definition: Any) -> str:
    if isinstance(definition, str):
        return definition
    return str(getattr(definition, "__name__", type(definition).__name__))


def _check_batching(name: str, config: BackendConfig, facts: CallableFacts, definition: Any) -> None:
    wants_batches = config.max_batch_size is not None and config.max_batch_size > 1
    if wants_batches and not facts.accepts_batches and not isinstance(definition, str):
        raise BadRequestError(
            f"max_batch_size is {config.max_batch_size} but the callable of {name} does not take "
            "batches; mark it with @serve.accept_batch."
        )
