"""Every option a user can set, each defined once.

A pydantic field and its description are the only definition: the API, the documentation and the errors
come from it. Defaults that an operator may want to change for a whole site are read from Dask's own
configuration (`daskserve.settings`). Pydantic stays off the request path.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.credentials import masked, validated
from daskserve.types import Location

#: Concurrency of a replica whose callable is a plain function, and of one that is ``async def``.
SYNC_CONCURRENCY = 8
ASYNC_CONCURRENCY = 100
#: The most replicas that ``num_replicas="auto"`` makes, unless its ``autoscaling_config`` says otherwise.
AUTO_MAX_REPLICAS = 100


class Options(BaseModel):
    """Base of all option models: unknown keys are errors, and so are bad assignments."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, populate_by_name=True)

    def to_plain(self) -> dict[str, Any]:
        """Return the options that were set, as plain values from which the model can be made again."""
        return self.model_dump(exclude_unset=True)


ModelT = TypeVar("ModelT", bound=Options)


class HTTPOptions(Options):
    """How an instance listens for HTTP."""

    host: str | None = Field(
        "127.0.0.1", description="Address the proxies listen on. None: no proxies, as with NoServer."
    )
    port: int = Field(8000, ge=0, le=65535, description="Port of the proxies; 0 picks a free one.")
    middlewares: list[Any] = Field(
        default_factory=list,
        description="Starlette ``Middleware`` objects wrapped around the ingress, first one outermost.",
    )
    server: Literal["tornado", "uvicorn"] = Field(
        "tornado",
        description="What carries HTTP: Tornado, which is there in any case, or uvicorn, which is faster and "
        "comes with ``daskserve[uvicorn]``; the workers need it.",
    )
    location: Location | None = Field(
        Location.HEAD_ONLY, description="Which workers get a proxy. None: no proxies, as with NoServer."
    )
    root_path: str = Field(
        "", description="Path under which a reverse proxy in front of daskserve publishes it."
    )
    request_timeout_s: float | None = Field(
        None, gt=0, description="Answer 408 after this many seconds; None waits for ever."
    )
    max_body_bytes: int = Field(
        1 << 30, ge=0, description="A request body larger than this is answered with 413."
    )
    max_websocket_message_bytes: int = Field(
        16 << 20,
        gt=0,
        description="A WebSocket whose client sends a larger message is closed with code 1009.",
    )
    keep_alive_timeout_s: float = Field(
        90.0,
        gt=0,
        description="Close a connection on which nothing came in for this long, between requests or within "
        "one that is not whole and is not being answered either.",
    )
    trusted_forwarders: list[str] = Field(
        default_factory=list,
        description="Addresses and networks of reverse proxies whose ``X-Forwarded-For`` and "
        "``X-Forwarded-Proto`` are believed.",
    )
    ssl_certfile: str | None = Field(
        None,
        description="Certificate in PEM, with those that lead to its authority; the proxies then speak HTTPS "
        "and nothing else. A path on the hosts of the proxies.",
    )
    ssl_keyfile: str | None = Field(
        None, description="The certificate's private key in PEM. None: it is in ``ssl_certfile``."
    )
    ssl_keyfile_password: str | None = Field(
        None, repr=False, description="Opens the private key, if it is encrypted."
    )
    debug: bool = Field(
        False, description="Answer errors of user code with their traceback. Never on an open port."
    )

    @field_validator("trusted_forwarders")
    @classmethod
    def _are_networks(cls, names: list[str]) -> list[str]:
        for name in names:
            ipaddress.ip_network(name, strict=False)
        return names

    @model_validator(mode="after")
    def _key_has_a_certificate(self) -> HTTPOptions:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password):
            raise ValueError("ssl_keyfile and ssl_keyfile_password need an ssl_certfile")
        return self

    @property
    def has_proxies(self) -> bool:
        """Whether these options ask for any listener at all."""
        return self.host is not None and self.location not in (None, Location.NO_SERVER)


class BackendMetadata(Options):
    """What daskserve found out about a backend's callable (the classic ``internal_metadata``)."""

    accepts_batches: bool = Field(False, description="The callable is marked with ``accept_batch``.")
    is_blocking: bool = Field(True, description="The callable is a plain function, not ``async def``.")
    is_asgi_app: bool = Field(False, description="The callable is an ASGI application.")
    class_name: str = Field("", description="The name of the class, function or import path.")
    autoscaling_config: dict[str, Any] | None = Field(
        None, description="Bounds and target of the classic autoscaler."
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, masked(value) if name == "autoscaling_config" else value


class BackendConfig(Options):
    """How a backend runs. Only the fields that were set are merged by ``update_backend_config``."""

    num_replicas: int = Field(
        1,
        ge=1,
        description='How many replicas run. ``"auto"``: as many as the load wants, from 1 to 100 or as '
        "``autoscaling_config`` says.",
    )
    autoscaling_config: AutoscalingConfig | None = Field(
        None, description="Let the load decide how many replicas run, see [Autoscaling](#autoscaling)."
    )
    external_scaler_enabled: bool = Field(
        False,
        description="Let programs outside say how many replicas run, by a POST to the scheduler's HTTP "
        "server or ``serve.scale``, see [Scaling from outside](docs/autoscaling.md#scaling-from-outside). "
        "Not together with ``autoscaling_config``.",
    )
    max_batch_size: int | None = Field(
        None, ge=1, description="Largest batch handed to a callable marked with ``accept_batch``."
    )
    batch_wait_timeout: float = Field(
        0, ge=0, description="Seconds to wait for a batch to fill before running it."
    )
    max_concurrent_queries: int | None = Field(
        None,
        ge=1,
        description="Requests one replica runs at a time. None: 8 for plain functions (or twice the batch "
        "size), 100 for async ones.",
        validation_alias=AliasChoices("max_concurrent_queries", "max_ongoing_requests"),
    )
    max_queued_requests: int = Field(
        1000, ge=-1, description="Requests a router may hold for this backend; -1 for no limit."
    )
    user_config: Any = Field(None, description="Handed to the callable's ``reconfigure`` method.")
    experimental_graceful_shutdown_wait_loop_s: float = Field(
        2,
        ge=0,
        description="Accepted for compatibility and not used: a stopping replica is told when its last "
        "request ends, so there is no polling interval.",
        validation_alias=AliasChoices(
            "experimental_graceful_shutdown_wait_loop_s", "graceful_shutdown_wait_loop_s"
        ),
    )
    experimental_graceful_shutdown_timeout_s: float = Field(
        20,
        ge=0,
        description="How long a stopping replica may finish its requests before it is killed.",
        validation_alias=AliasChoices(
            "experimental_graceful_shutdown_timeout_s", "graceful_shutdown_timeout_s"
        ),
    )
    liveness: Literal["default"] | None = Field(
        "default",
        description="Probe whether user code can run where it runs, and replace a replica where it cannot. "
        "None: only ``check_health`` counts, for handlers that block on purpose.",
    )
    health_check_period_s: float = Field(
        5, gt=0, description="Seconds from the start of one health probe to the start of the next."
    )
    health_check_timeout_s: float = Field(10, gt=0, description="A probe that takes longer counts as failed.")
    health_check_threshold: int = Field(
        3, ge=1, description="So many failed probes in a row take a replica out of service."
    )
    method_header: bool = Field(
        False,
        description="Let the header ``X-SERVE-CALL-METHOD`` of an HTTP request name the public method of the "
        "class that answers it; ``reconfigure`` and ``check_health`` are never among them.",
    )
    event_loop: Literal["own", "worker"] = Field(
        "own",
        description="Where async user code runs: on an event loop and thread of its own, or, faster but "
        "able to hold up everything else in the process, on the worker's.",
    )
    isolation: Literal["thread", "process"] = Field(
        "thread",
        description="Where user code runs: in threads of its Dask worker, or in a process of its own, apart "
        "from the worker in crashes, interpreter lock and memory, and killed if it does not end. Fixed for "
        "the life of a backend.",
    )
    internal_metadata: BackendMetadata = Field(
        default_factory=BackendMetadata, description="Set by daskserve; read-only for users."
    )

    @model_validator(mode="before")
    @classmethod
    def _other_spellings(cls, values: Any) -> Any:
        """Accept ``num_replicas="auto"``, and the autoscaler's options where the classic system has them."""
        if not isinstance(values, Mapping):
            return values
        found = dict(values)
        metadata = found.get("internal_metadata")
        classic = metadata.get if isinstance(metadata, Mapping) else partial(getattr, metadata)
        options = found.get("autoscaling_config", classic("autoscaling_config", None))
        if found.get("num_replicas") == "auto":
            del found["num_replicas"]
            options = {} if options is None else options
            if isinstance(options, AutoscalingConfig):
                options = options.model_dump(exclude_unset=True)
            if isinstance(options, Mapping):
                options = {"max_replicas": AUTO_MAX_REPLICAS, **options}
        if options is not None:
            found["autoscaling_config"] = options
        return found

    @model_validator(mode="after")
    def _one_decides(self) -> BackendConfig:
        config = self.autoscaling_config
        if config is not None and self.external_scaler_enabled:
            raise ValueError(
                "external_scaler_enabled=True is given together with autoscaling_config, and only one of "
                "them can decide how many replicas there are; set autoscaling_config=None to scale from "
                "outside, or external_scaler_enabled=False to scale by load"
            )
        if config is not None and "num_replicas" in self.model_fields_set and not config.dry_run:
            raise ValueError(
                f"num_replicas={self.num_replicas} is given together with autoscaling_config, which decides "
                "how many replicas there are; leave one out, or set autoscaling_config=None to scale by hand"
            )
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _errors_without_credentials(cls, values: Any, validate: Any) -> Any:
        return validated(values, validate)

    def concurrency(self) -> int:
        """Return how many requests one replica may run, with the defaults filled in."""
        if self.max_concurrent_queries is not None:
            return self.max_concurrent_queries
        if self.max_batch_size is not None and (
            self.internal_metadata.is_blocking or self.batch_wait_timeout > 0
        ):
            return 2 * self.max_batch_size
        return SYNC_CONCURRENCY if self.internal_metadata.is_blocking else ASYNC_CONCURRENCY

    def merged(self, changes: BackendConfig) -> BackendConfig:
        """Return a copy in which the fields that ``changes`` sets are replaced."""
        # Not model_copy: that skips validation.
        values = {name: getattr(self, name) for name in self.model_fields_set}
        config = changes.autoscaling_config
        if config is not None and not config.dry_run:
            values.pop("num_replicas", None)  # it was so many until now
        values |= {
            name: getattr(changes, name) for name in changes.model_fields_set if name != "internal_metadata"
        }
        return BackendConfig(**values)


class ActorOptions(Options):
    """What one replica occupies, held against what the workers declare (daskserve keeps the ledger)."""

    num_cpus: float = Field(
        0.1, ge=0, description="Share of a worker's threads. The default lets ten replicas share one."
    )
    num_gpus: float = Field(0, ge=0, description="Amount of the worker resource ``GPU``.")
    memory: int = Field(0, ge=0, description="Bytes of the worker's memory limit.")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Amounts of declared Dask worker resources."
    )
    workers: list[str] | None = Field(
        None, description="Addresses, names or hosts of the only workers allowed; None allows all."
    )

    @field_validator("resources")
    @classmethod
    def _amounts_are_positive(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if amount < 0:
                raise ValueError(f"resource {name!r} asks for {amount}; an amount cannot be negative")
        return value

    def demand(self) -> dict[str, float]:
        """Return the amounts by resource name, the built-in ones included."""
        wanted = dict(self.resources)
        for name, amount in (("CPU", self.num_cpus), ("GPU", self.num_gpus), ("memory", self.memory)):
            if amount:
                wanted[name] = wanted.get(name, 0) + amount
        return wanted


def parse_options(model: type[ModelT], value: Any, *, what: str) -> ModelT:
    """Return ``value`` as an option model.

    Parameters
    ----------
    model
        The model wanted.
    value : model, mapping or None
        None means all defaults.
    what : str
        Names the argument in errors.

    Raises
    ------
    TypeError
        The value is neither the model nor a mapping.
    pydantic.ValidationError
        A `ValueError` that names the option and what is wrong with it.
    """
    if value is None:
        return model()
    if isinstance(value, model):
        return value
    if isinstance(value, Mapping):
        return model(**value)
    raise TypeError(
        f"{what} must be a {model.__name__} or a dict of its options, got {type(value).__name__}: {value!r}"
    )
