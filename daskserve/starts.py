"""The start messages of actors: what the control layer and the client write and the actors' own layers read.

Plain values in msgpack; user code inside them is opaque ``bytes``. They are the ``payload`` of an
`daskserve.cluster.base.ActorSpec`. No field has a default: options have theirs in their models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import msgpack

if TYPE_CHECKING:
    from daskserve.options.config import BackendConfig, HTTPOptions

#: Options of a backend that its replicas do not read: code and credentials stay with the controller.
NOT_FOR_REPLICAS = frozenset({"autoscaling_config", "internal_metadata", "user_config"})


class OptionValues:
    """Options as their model dumped them, the defaults included, by attribute.

    Their writer has checked them. Workers read them without pydantic, which takes 0.1 s to import.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def __repr__(self) -> str:
        return f"<OptionValues {', '.join(vars(self))}>"

    def model_dump(self, **how: Any) -> dict[str, Any]:
        """Return the options by name, as the model does."""
        return dict(vars(self))


def dump_config(config: BackendConfig) -> dict[str, Any]:
    """Return all options that a replica may read, as plain values."""
    return config.model_dump(mode="json", exclude=set(NOT_FOR_REPLICAS))


def dump_http(options: HTTPOptions) -> dict[str, Any]:
    """Return all HTTP options but the middlewares, as plain values."""
    return options.model_dump(mode="json", exclude={"middlewares"})


def read_config(values: Mapping[str, Any]) -> BackendConfig:
    """Return what `dump_config` gave, with the attributes of the model and without its methods."""
    return cast("BackendConfig", OptionValues(values))


@dataclass(frozen=True, slots=True)
class StartMessage:
    """Base: encode to and decode from bytes. Fields hold msgpack values, or options by name of their dump."""

    #: How the fields that hold options are written.
    OPTIONS: ClassVar[Mapping[str, Any]] = {}

    def encode(self) -> bytes:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return bytes(
            msgpack.packb(values | {name: dump(values[name]) for name, dump in self.OPTIONS.items()})
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        values = msgpack.unpackb(data)
        return cls(**values | {name: OptionValues(values[name]) for name in cls.OPTIONS})


@dataclass(frozen=True, slots=True)
class ReplicaStart(StartMessage):
    """How to make one replica.

    Attributes
    ----------
    code : bytes
        `daskserve.payload.dump_bytes` of ``(definition, init_args, init_kwargs)``; the definition is a
        function, a class, an ASGI application or an import path such as ``"pkg.mod.Name"``.
    config : BackendConfig
        Decoded: its options by attribute, without those `NOT_FOR_REPLICAS`.
    concurrency : int
        How many requests may run at a time: ``config.concurrency()``.
    user_config : bytes or None
        ``dump_bytes`` of what ``reconfigure`` gets; None: do not call it.
    environment : str or None
        The Python environment of a process, as `daskserve.options.environment.parse_environment` returns it;
        None is the worker's own.
    debug : bool
        Whether HTTP answers to failed requests show the user's traceback.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {"config": dump_config}

    backend_tag: str
    replica_tag: str
    code: bytes
    config: BackendConfig
    concurrency: int
    user_config: bytes | None
    environment: str | None
    debug: bool


@dataclass(frozen=True, slots=True)
class ProxyStart(StartMessage):
    """How to make one HTTP proxy.

    Attributes
    ----------
    options : HTTPOptions
        Decoded: its options by attribute, without the middlewares.
    middlewares : bytes or None
        ``dump_bytes`` of the list of Starlette ``Middleware`` objects.
    claims_port : bool
        Whether the port must be free of every other listener; False if others of the instance share it.
    public_host : str
        How clients reach the proxy's host, where ``options.host`` means every address.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {"options": dump_http}

    options: HTTPOptions
    middlewares: bytes | None
    reuse_port: bool
    claims_port: bool
    public_host: str


@dataclass(frozen=True, slots=True)
class ControllerStart(StartMessage):
    """How to make an instance's controller.

    Attributes
    ----------
    http : HTTPOptions
        Decoded: its options by attribute, without the middlewares.
    middlewares : bytes or None
        As in `ProxyStart`; the controller passes them on unread.
    start_timeout_s : float
        How long a replica's start or reconfiguration may take.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {"http": dump_http}

    http: HTTPOptions
    middlewares: bytes | None
    start_timeout_s: float
