"""The start messages of actors, which the control layer and the client write and the actors' layers read.

Messages are plain values in msgpack, with user code as opaque ``bytes``. They are the ``payload`` of a
`daskserve.cluster.protocols.base.ActorSpec`. Fields have no defaults: the option models define the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import msgpack

from daskserve.common.types import RankInfo, described

if TYPE_CHECKING:
    from daskserve.options.backend import BackendConfig
    from daskserve.options.http import HTTPOptions


class OptionValues:
    """The values of an option model, including defaults, as attributes.

    The writer has validated them. Workers read them without pydantic, which takes 0.1 s to import.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def __repr__(self) -> str:
        return f"<OptionValues {', '.join(vars(self))}>"


def dump_config(config: BackendConfig) -> dict[str, Any]:
    """Return all options that a replica reads, as plain values."""
    return config.for_replicas(mode="json")


def dump_config_in(config: BackendConfig, logging: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the result of `dump_config`, with unset logging options taken from the instance."""
    found = dump_config(config)
    if logging is not None:
        found["logging_config"] = {**logging, **(found["logging_config"] or {})}
    return found


def dump_http(options: HTTPOptions) -> dict[str, Any]:
    """Return all HTTP options except the middlewares, as plain values."""
    return options.model_dump(mode="json", exclude={"middlewares"})


def read_config(values: Mapping[str, Any]) -> BackendConfig:
    """Wrap the values of `dump_config` in an object with the model's attributes, but none of its methods."""
    return cast("BackendConfig", OptionValues(values))


def read_http(values: Mapping[str, Any]) -> HTTPOptions:
    """Wrap the values of `dump_http` in an object with the model's attributes, but none of its methods."""
    return cast("HTTPOptions", OptionValues(values))


@dataclass(frozen=True, slots=True)
class StartMessage:
    """Base class: encodes to and decodes from bytes. Fields hold msgpack values or options."""

    #: The function that dumps the options in a field, by the field's name.
    OPTIONS: ClassVar[Mapping[str, Any]] = {}

    def encode(self) -> bytes:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, dump in self.OPTIONS.items():
            options = values[name]
            values[name] = vars(options) if isinstance(options, OptionValues) else dump(options)
        return bytes(msgpack.packb(values))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        values = msgpack.unpackb(data)
        return cls(**values | {name: OptionValues(values[name]) for name in cls.OPTIONS})


@dataclass(frozen=True, slots=True)
class ReplicaStart(StartMessage):
    """The start message of a replica.

    Attributes
    ----------
    code : bytes
        `daskserve.payload.parcels.pack_code` of ``(definition, init_args, init_kwargs)``; the definition is a
        function, a class, an ASGI application or an import path such as ``"pkg.mod.Name"``. The files of its
        environment, if it has any, come first
        (`daskserve.data.replica.environment.working_dir.PackedFolder`).
    code_name : str
        The name of the code's record, ``tag@version``, by which its parcel is found.
    rank_info : tuple of int
        The replica's rank, and how many replicas are wanted.
    config : BackendConfig
        After decoding, the options that a replica reads, as attributes.
    concurrency : int
        Maximum number of concurrent requests: ``config.concurrency()``.
    user_config : bytes or None
        ``dump_bytes`` of the argument of ``reconfigure``; None means that it is not called.
    environment : str or None
        The environment of a child process, as `daskserve.options.environment.Environment.to_text` returns
        it; None means the worker's environment.
    debug : bool
        Whether HTTP responses to failed requests contain the user's traceback.
    is_async : bool
        Whether the callable is known to answer on an event loop.
    actors : dict
        The tags of the deployment's actors, by name.
    gang : list of str
        The tags of the replicas of its gang, in order; empty without one.
    bundles : list of (str, dict)
        The worker and the amounts of each bundle of its placement group, in order; empty without one.
    actor_of : list of str
        For a deployment actor: the names of its deployment and of the actor.
    is_deployment : bool
        Whether its backend is a deployment to users, rather than a backend of the classic system.
    models : dict or None
        The models with which it starts, as in `daskserve.data.replica.models.Models.want`; None if the
        controller knows of none yet.
    is_exact : bool
        Whether code given by import path must equal the deployed code: the files of a worker must not differ.
    tracing : dict
        The values of `daskserve.options.tracing.TracingConfig`; empty without traces.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {"config": dump_config}

    backend_tag: str
    replica_tag: str
    code: bytes = field(repr=False)
    config: BackendConfig
    concurrency: int
    user_config: bytes | None = field(repr=False)
    environment: str | None = field(repr=False)
    debug: bool
    is_async: bool
    code_name: str
    rank_info: RankInfo
    actors: Mapping[str, str]
    actor_of: Sequence[str]
    gang: Sequence[str]
    bundles: Sequence[tuple[str, Mapping[str, float]]]
    is_deployment: bool
    models: Mapping[str, Any] | None
    is_exact: bool
    tracing: Mapping[str, Any]

    def labels(self, instance: str) -> tuple[str, str, str]:
        """Return the values of the labels of the replica's metrics."""
        return instance, self.backend_tag, self.replica_tag

    @property
    def kind(self) -> str:
        """``"deployment"``, or ``"backend"`` in the classic system."""
        return "deployment" if self.is_deployment else "backend"

    @property
    def display_name(self) -> str:
        """The name in messages, such as ``deployment 'model' of application 'shop'``."""
        return described(self.backend_tag, self.kind)


@dataclass(frozen=True, slots=True)
class ProxyStart(StartMessage):
    """The start message of an HTTP proxy.

    Attributes
    ----------
    options : HTTPOptions
        After decoding, the options as attributes, without the middlewares.
    middlewares : bytes or None
        ``dump_bytes`` of the list of Starlette ``Middleware`` objects.
    reuse_port : bool
        Whether several proxies of a host share the port. If not, a proxy shares it only with its successor,
        where the platform allows that.
    claims_port : bool
        Whether the port must be free of every other listener; False if others of the instance share it.
    may_move : bool
        Whether the proxy may use another free port if this one is taken.
    public_host : str
        The host name in the proxy's URLs if ``options.host`` means every address.
    tracing : dict
        As in `ReplicaStart`.
    logging : dict or None
        How the instance logs: the fields of `daskserve.options.logging.LoggingConfig` that are set.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {"options": dump_http}

    options: HTTPOptions
    middlewares: bytes | None
    reuse_port: bool
    claims_port: bool
    may_move: bool
    public_host: str
    tracing: Mapping[str, Any]
    logging: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class BuilderStart(StartMessage):
    """The start message of an actor that builds applications.

    Attributes
    ----------
    configs : list of dict
        The plain values of `daskserve.config_file.model.ApplicationConfig`, one for each application.
    """

    configs: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ControllerStart(StartMessage):
    """The start message of an instance's controller.

    Attributes
    ----------
    http : HTTPOptions
        After decoding, the options as attributes, without the middlewares.
    middlewares : bytes or None
        As in `ProxyStart`; the controller passes them on without decoding them.
    callback : str or None
        Import path of a function that the controller calls when it starts.
    start_id : str
        The id of this start of the instance; all of its controllers have the same.
    opens_with_route : bool
        Whether the proxies start only once there is a route.
    history_bytes : int
        Maximum size of the code that is kept only for old revisions of applications.
    tracing : dict
        As in `ReplicaStart`.
    logging : dict or None
        As in `ProxyStart`.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {"http": dump_http}

    http: HTTPOptions
    middlewares: bytes | None
    callback: str | None
    start_id: str
    opens_with_route: bool
    history_bytes: int
    tracing: Mapping[str, Any]
    logging: Mapping[str, Any] | None
