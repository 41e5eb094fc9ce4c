"""The start messages of actors: what the control layer and the client write and the actors' own layers read.

Plain values in msgpack; user code inside them is opaque ``bytes``. They are the ``payload`` of an
`daskserve.cluster.base.ActorSpec`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

import msgpack


@dataclass(frozen=True, slots=True)
class StartMessage:
    """Base: encode to and decode from bytes. Fields hold msgpack values only."""

    def encode(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return cls(**msgpack.unpackb(data))


@dataclass(frozen=True, slots=True)
class ReplicaStart(StartMessage):
    """How to make one replica.

    Attributes
    ----------
    code : bytes
        `daskserve.payload.dump_bytes` of ``(definition, init_args, init_kwargs)``; the definition is a
        function, a class, an ASGI application or an import path such as ``"pkg.mod.Name"``.
    concurrency : int
        How many requests may run at a time.
    user_config : bytes or None
        ``dump_bytes`` of what ``reconfigure`` gets; None: do not call it.
    event_loop : str
        ``"own"`` or ``"worker"``, see `daskserve.options.config.BackendConfig`.
    has_liveness : bool
        Whether to probe that user code can run at all; the user's ``check_health`` is asked in any case.
    method_header : bool
        Whether HTTP requests may name the method that answers them.
    debug : bool
        Whether HTTP answers to failed requests show the user's traceback.
    isolation : str
        ``"thread"`` or ``"process"``, see `daskserve.options.config.BackendConfig`.
    environment : str or None
        The Python environment of a process, as `daskserve.options.environment.parse_environment` returns it;
        None is the worker's own.
    """

    backend_tag: str
    replica_tag: str
    code: bytes
    concurrency: int
    user_config: bytes | None = None
    event_loop: str = "own"
    max_batch_size: int = 0
    batch_wait_timeout_s: float = 0.0
    wait_loop_s: float = 2.0
    method_header: bool = False
    debug: bool = False
    has_liveness: bool = True
    health_period_s: float = 5.0
    health_timeout_s: float = 10.0
    health_threshold: int = 3
    isolation: str = "thread"
    environment: str | None = None


@dataclass(frozen=True, slots=True)
class ProxyStart(StartMessage):
    """How to make one HTTP proxy.

    Attributes
    ----------
    options : dict
        `daskserve.options.config.HTTPOptions` without the middlewares, as plain values.
    middlewares : bytes or None
        ``dump_bytes`` of the list of Starlette ``Middleware`` objects.
    claims_port : bool
        Whether the port must be free of every other listener; False if others of the instance share it.
    public_host : str
        How clients reach the proxy's host, where ``options["host"]`` means every address.
    """

    options: dict[str, Any]
    middlewares: bytes | None = None
    reuse_port: bool = False
    claims_port: bool = True
    public_host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ControllerStart(StartMessage):
    """How to make an instance's controller.

    Attributes
    ----------
    http : dict
        `daskserve.options.config.HTTPOptions` without the middlewares, as plain values.
    middlewares : bytes or None
        As in `ProxyStart`; the controller passes them on unread.
    """

    http: dict[str, Any]
    middlewares: bytes | None = None
    settings: dict[str, float] = field(default_factory=dict)

    #: The record under which the supervisor keeps this message.
    RECORD: ClassVar[str] = "instance"
