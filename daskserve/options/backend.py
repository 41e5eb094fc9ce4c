"""The options of a backend, and the facts about its callable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, Field, ValidationInfo, field_validator, model_validator

from daskserve.common.formatting import as_whole
from daskserve.common.types import BodyUse
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.environment import DaskTaskConfig, ModelRepository
from daskserve.options.fields.base import CONTROLLER_ONLY, REPLACES, ByteCount, Masked, Options
from daskserve.options.fields.bounds import share_or_number
from daskserve.options.fields.ray_names import translated
from daskserve.options.fields.secrets import masked
from daskserve.options.logging import LoggingConfig
from daskserve.options.payload_logging import PayloadLoggingConfig
from daskserve.options.placement import Bundles, GangSchedulingConfig, Strategy, check_whole
from daskserve.options.rollout import RolloutConfig
from daskserve.options.routing.hedging import HedgingConfig
from daskserve.options.routing.priorities import PriorityConfig
from daskserve.options.routing.request_router import RequestRouterConfig

#: Concurrency of a replica whose callable is a plain function, and of one that is ``async def``.
SYNC_CONCURRENCY = 8
ASYNC_CONCURRENCY = 100
#: Default maximum number of replicas with ``num_replicas="auto"``.
AUTO_MAX_REPLICAS = 100
#: Number of failed starts per target replica after which a change fails.
STARTS_PER_REPLICA = 3


class BackendMetadata(Options):
    """Facts about a backend's callable (the classic ``internal_metadata``)."""

    accepts_batches: bool = Field(False, description="The callable is marked with ``accept_batch``.")
    is_blocking: bool = Field(True, description="The callable is a plain function, not ``async def``.")
    is_asgi_app: bool = Field(False, description="The callable is an ASGI application.")
    ignores_bodies: bool = Field(False, description="The callable takes no argument, so it reads no body.")
    docs_path: str = Field("", description="Where a FastAPI application describes itself, below its route.")
    class_name: str = Field("", description="The name of the class, function or import path.")
    autoscaling_config: Annotated[dict[str, Any] | None, Masked(masked)] = Field(
        None, description="Bounds and target of the classic autoscaler."
    )


def _blocks_no_worker(run_sync_in_threadpool: bool, info: ValidationInfo) -> bool:
    if not run_sync_in_threadpool and info.data.get("event_loop") == "worker":
        raise ValueError(
            "it cannot be combined with event_loop='worker', where plain methods would block the whole "
            "worker; leave one out"
        )
    return run_sync_in_threadpool


class BackendConfig(Options):
    """How a backend runs. Only the fields that were set are merged by ``update_backend_config``."""

    place: ClassVar[str] = "config"

    num_replicas: Annotated[int, CONTROLLER_ONLY] = Field(
        1,
        ge=1,
        description='Number of replicas. ``"auto"``: depends on the load, from 1 to '
        f"{AUTO_MAX_REPLICAS} or within the bounds of ``autoscaling_config``.",
    )
    autoscaling_config: Annotated[AutoscalingConfig | None, CONTROLLER_ONLY] = Field(
        None,
        description="Options of autoscaling by load, see [Autoscaling](docs/autoscaling.md).",
    )
    external_scaler_enabled: Annotated[bool, CONTROLLER_ONLY] = Field(
        False,
        description="Whether external programs may set the number of replicas, with a POST to the "
        "scheduler's HTTP server or with ``serve.scale``, see [Scaling from "
        "outside](docs/autoscaling.md#scaling-from-outside). Cannot be combined with "
        "``autoscaling_config``.",
    )
    max_batch_size: int | None = Field(
        None, ge=1, description="Maximum batch size for a callable marked with ``accept_batch``."
    )
    batch_wait_timeout: float = Field(
        0, ge=0, description="Maximum time to wait for a batch to fill, in seconds."
    )
    max_ongoing_requests: int | None = Field(
        None,
        ge=1,
        description="Maximum number of requests that one replica runs concurrently. None: "
        f"{SYNC_CONCURRENCY} for plain functions (or twice the batch size), {ASYNC_CONCURRENCY} for async "
        "ones.",
        validation_alias=AliasChoices("max_ongoing_requests", "max_concurrent_queries"),
    )
    max_queued_requests: Annotated[int, CONTROLLER_ONLY] = Field(
        1000,
        ge=-1,
        description="Maximum number of requests for this backend that wait in each router; -1: no limit.",
    )
    request_router_config: RequestRouterConfig | None = Field(
        None,
        description="How the replica for a request is chosen, see [Routers](docs/routers.md). None: the "
        "less loaded of two replicas, near ones first.",
    )
    priority_config: Annotated[PriorityConfig | None, CONTROLLER_ONLY] = Field(
        None,
        description="The order of waiting requests, see [Priorities](docs/routers.md#priorities). None: "
        "by the ``priority`` of calls, then by order of arrival.",
    )
    hedging_config: Annotated[HedgingConfig | None, CONTROLLER_ONLY] = Field(
        None,
        description="Second attempts for slow requests, see [Hedging](docs/routers.md#hedged-requests). "
        "None: no request is sent twice.",
    )
    max_body_bytes: Annotated[ByteCount | None, CONTROLLER_ONLY] = Field(
        None,
        ge=0,
        description="Maximum size of a request body, in bytes; a larger one gets 413. None: that of "
        "``http_options``.",
    )
    max_crash_retries: Annotated[int, CONTROLLER_ONLY] = Field(
        1,
        ge=0,
        le=3,
        description="Maximum number of retries of an idempotent HTTP request or call whose replica died "
        "or hung while it ran; 0: none. See [Faults of user code](docs/faults.md#poisonous-requests).",
    )
    max_surge: Annotated[int | str, CONTROLLER_ONLY] = Field(
        1,
        description="Maximum number of additional replicas during an update: a number, or a percentage "
        'such as ``"25%"``, rounded up. With 0, or without room for an additional replica, old replicas '
        "stop first, one at a time or up to ``max_unavailable``, and new ones take their room.",
    )
    max_unavailable: Annotated[int | str, CONTROLLER_ONLY] = Field(
        0,
        description="Maximum number of old replicas that may stop before their replacements run: a "
        'number, or a percentage such as ``"25%"``, rounded down. A change of ``user_config`` reconfigures '
        "this many replicas at a time, but at least one.",
    )
    rollout: Annotated[RolloutConfig | None, CONTROLLER_ONLY] = Field(
        None,
        description="Plan for shifting traffic to a new version step by step, with comparisons against "
        "the old one, see [Rollouts](docs/rollouts.md). None: replicas are replaced one by one, within "
        "``max_surge``.",
    )
    max_replicas_per_node: Annotated[int | None, CONTROLLER_ONLY, REPLACES] = Field(
        None,
        ge=1,
        le=100,
        description="Maximum number of replicas on the workers of one host. Further replicas wait, and "
        "the status reports this. None: no limit.",
    )
    placement: Annotated[Literal["SPREAD", "PACK"], CONTROLLER_ONLY, REPLACES] = Field(
        "SPREAD",
        description="Placement of replicas among the workers that have room: ``SPREAD`` over as many "
        "workers and hosts as possible, or ``PACK`` onto as few as possible.",
    )
    rebalance_after_s: Annotated[float | None, CONTROLLER_ONLY] = Field(
        30,
        ge=0,
        description="Time in seconds for which better workers must have been available before replicas "
        "move to them, see [Spreading again](docs/deployments.md#spreading-again). None: replicas never "
        "move.",
    )
    gang_scheduling_config: Annotated[GangSchedulingConfig | None, CONTROLLER_ONLY, REPLACES] = Field(
        None,
        description="Groups of replicas that start together or not at all, and end together, see "
        "[Gangs](docs/deployments.md#gangs). With it, ``max_surge`` and ``max_unavailable`` count gangs.",
    )
    placement_group_bundles: Annotated[Bundles | None, CONTROLLER_ONLY, REPLACES] = Field(
        None,
        description="Bundles of resources that each replica reserves, all or none, see [Placement "
        "groups](docs/deployments.md#placement-groups). The replica runs in the first bundle, which must "
        "cover its ``actor_options``; the others are for its Dask tasks. Cannot be combined with "
        "``max_replicas_per_node``.",
    )
    placement_group_strategy: Annotated[Strategy | None, CONTROLLER_ONLY, REPLACES] = Field(
        None,
        description="How the bundles of a replica are placed: ``STRICT_PACK`` on one host, ``PACK`` on "
        "as few workers and hosts as possible, ``SPREAD`` on as many as possible, ``STRICT_SPREAD`` each "
        "on another host. None: ``PACK``, or the strategy of the gang.",
    )
    max_constructor_retry_count: Annotated[int, CONTROLLER_ONLY] = Field(
        20,
        ge=1,
        description=(
            "Number of consecutive failures after which a change is rolled back: failed starts, "
            f"and losses of new replicas. It is at most {STARTS_PER_REPLICA} for each replica of the target."
        ),
    )
    start_timeout_s: Annotated[float, CONTROLLER_ONLY] = Field(
        600,
        gt=0,
        description="Maximum time in seconds for a replica to load and construct the callable, for the "
        "installation of its environment before that, and for ``reconfigure``. A change with a slower "
        "replica fails and is rolled back, see [Slow starts](docs/deployments.md#slow-starts).",
    )
    model_repository: Annotated[ModelRepository | None, REPLACES] = Field(
        None,
        description="Folder or bucket of models that replicas load and unload while they serve, see "
        "[Models](docs/models.md).",
    )
    user_config: Any = Field(
        None,
        description="Argument of the callable's ``reconfigure`` method, which is called when a replica "
        "starts, and for a change, replica by replica, see [Changes of "
        "user_config](docs/deployments.md#changes-of-user_config). If the method has a parameter ``rank``, "
        "it also gets the replica's rank, and is called again when the rank changes. None: it is not "
        "called.",
    )
    experimental_graceful_shutdown_wait_loop_s: Annotated[float, CONTROLLER_ONLY] = Field(
        2,
        ge=0,
        description="Accepted for compatibility, without effect: a stopping replica is notified when its "
        "last request ends, so there is no polling interval.",
        validation_alias=AliasChoices(
            "experimental_graceful_shutdown_wait_loop_s", "graceful_shutdown_wait_loop_s"
        ),
    )
    experimental_graceful_shutdown_timeout_s: Annotated[float, CONTROLLER_ONLY] = Field(
        20,
        ge=0,
        description="Time in seconds for a stopping replica to complete its requests and run its "
        "destructor; after that, it is killed.",
        validation_alias=AliasChoices(
            "experimental_graceful_shutdown_timeout_s", "graceful_shutdown_timeout_s"
        ),
    )
    liveness: Literal["default"] | None = Field(
        "default",
        description="Probe of a replica's thread or event loop; a replica that cannot run user code is "
        "replaced. None: only ``check_health`` is used, for handlers that block on purpose.",
    )
    health_check_period_s: float = Field(
        5, gt=0, description="Interval between the starts of two health probes, in seconds."
    )
    health_check_timeout_s: float = Field(10, gt=0, description="Timeout of a health probe, in seconds.")
    health_check_threshold: int = Field(
        3, ge=1, description="Number of consecutive failed probes after which a replica is replaced."
    )
    logging_config: LoggingConfig | None = Field(
        None,
        description="How the deployment logs, see [Logging](docs/logging.md). Fields that are not set "
        "are inherited from its application or instance. A change takes effect without a restart.",
    )
    payload_logging: PayloadLoggingConfig | None = Field(
        None,
        description="Logging of request and response bodies to a sink, see [Payload "
        "logging](docs/payload_logging.md). None: no bodies are logged.",
    )
    method_header: bool = Field(
        False,
        description="Whether the header ``X-SERVE-CALL-METHOD`` of an HTTP request selects the public "
        "method that answers it, except ``reconfigure``, ``check_health`` and the ``record_...`` methods "
        "that daskserve calls.",
    )
    on_disconnect: Literal["cancel", "disconnect"] | None = Field(
        None,
        description="Effect of a client's disconnect on a request whose response is incomplete. "
        "``cancel``: user code is cancelled. ``disconnect``: it receives ``http.disconnect`` and continues, "
        "as under uvicorn. None: ``disconnect`` for ASGI applications, ``cancel`` for everything else.",
    )
    event_loop: Annotated[Literal["own", "worker"], REPLACES] = Field(
        "own",
        description="Event loop of async user code: its own loop in its own thread, or the loop of the "
        "worker, which is faster. On the worker's loop, user code can block everything else in the "
        "process.",
    )
    run_sync_in_threadpool: Annotated[bool, AfterValidator(_blocks_no_worker), REPLACES] = Field(
        True,
        description="Whether plain (``def``) methods run in threads, several at a time. False: all code "
        "of a replica runs in the thread of its event loop; plain methods run one at a time, and block "
        "async code. Use this for objects that work only in one thread, such as SQLite connections. Cannot "
        "be combined with ``event_loop='worker'``.",
    )
    isolation: Annotated[Literal["thread", "process"], REPLACES] = Field(
        "thread",
        description="Where user code runs: in threads of the Dask worker, or in a child process with its "
        "own interpreter lock and memory, which loads and constructs the code in its main thread. If the "
        "child process crashes, the worker is not affected; if it does not end, it is killed.",
    )
    dask_task_config: DaskTaskConfig = Field(
        default_factory=DaskTaskConfig,
        description="Options of the Dask tasks that user code submits, see [Dask "
        "tasks](docs/tasks_beside_serving.md).",
    )
    internal_metadata: Annotated[BackendMetadata, CONTROLLER_ONLY] = Field(
        default_factory=BackendMetadata, description="Set by daskserve; read-only for users."
    )

    @field_validator("max_queued_requests")
    @classmethod
    def _some_may_wait(cls, value: int) -> int:
        if value == 0:
            raise ValueError(
                "a router must be able to queue a request; give a number from 1, or -1 for no limit"
            )
        return value

    @field_validator("max_surge", "max_unavailable", mode="before")
    @classmethod
    def _is_a_number_or_share(cls, value: Any) -> Any:
        share_or_number(value, 1)
        return value if isinstance(value, str) else as_whole(value)

    @model_validator(mode="before")
    @classmethod
    def _other_spellings(cls, values: Any) -> Any:
        """Accept ``num_replicas="auto"``, the classic form of autoscaling, and Ray Serve's spellings."""
        if not isinstance(values, Mapping):
            return values
        found = translated(values)
        if found.get("num_replicas", ...) is None:
            del found["num_replicas"]
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
                "external_scaler_enabled=True cannot be combined with autoscaling_config, because only one "
                "of them can set the number of replicas; set autoscaling_config=None to scale from "
                "outside, or external_scaler_enabled=False to scale by load"
            )
        if config is not None and "num_replicas" in self.model_fields_set and not config.dry_run:
            raise ValueError(
                f"num_replicas={self.num_replicas} cannot be combined with autoscaling_config, which sets "
                "the number of replicas; leave one out, or set autoscaling_config=None to scale by hand"
            )
        return self

    @model_validator(mode="after")
    def _gangs_are_whole(self) -> BackendConfig:
        gangs, scaling = self.gang_scheduling_config, self.autoscaling_config
        size = 1 if gangs is None else gangs.gang_size
        if scaling is not None and "multiple_of" not in scaling.model_fields_set:
            # Not assigned normally, because that would validate all fields again. The field stays unset, so
            # that it follows the gang size.
            vars(self)["autoscaling_config"] = scaling.in_groups_of(size)
        elif scaling is not None and scaling.multiple_of % size:
            raise ValueError(
                f"autoscaling_config has multiple_of={scaling.multiple_of}, which must be a multiple of "
                f"gang_size={size}; set multiple_of={size}"
            )
        if "num_replicas" in self.model_fields_set and size > 1:
            check_whole(self.num_replicas, size)
        return self

    @model_validator(mode="after")
    def _one_places(self) -> BackendConfig:
        strategy = self.placement_group_strategy
        if strategy is not None and self.gang_scheduling_config is not None:
            raise ValueError(
                f"placement_group_strategy={strategy!r} is given together with gang_scheduling_config, "
                "whose gang_placement_strategy places all bundles of a gang; leave one out, or set it to "
                "None"
            )
        if self.placement_group_bundles is not None and self.max_replicas_per_node is not None:
            raise ValueError(
                f"max_replicas_per_node={self.max_replicas_per_node} is given together with "
                "placement_group_bundles, whose bundles may be on several hosts; leave one out, or set it to "
                "None"
            )
        return self

    def check_complete(self) -> None:
        """Raise `ValueError` if an option needs another one that is missing.

        Validation does not check this, because options may be given in several calls, in any order.
        """
        if self.placement_group_strategy is not None and self.placement_group_bundles is None:
            raise ValueError(
                f"placement_group_strategy={self.placement_group_strategy!r} is given without "
                "placement_group_bundles; give both, or use placement, which places the replicas"
            )
        if self.gang_scheduling_config is not None and self.autoscaling_config is None:
            check_whole(self.num_replicas, self.gang_scheduling_config.gang_size)

    def for_replicas(self, **how: Any) -> dict[str, Any]:
        """Return the options that a replica reads; ``how`` goes to ``model_dump``.

        They do not include ``user_config``, which is user code and is sent to replicas pickled.
        """
        others = {n for n, each in type(self).model_fields.items() if CONTROLLER_ONLY in each.metadata}
        return self.model_dump(exclude={"user_config", *others}, **how)

    @property
    def packs(self) -> bool:
        """Whether replicas (of each gang, or all of the backend) are packed onto few workers."""
        gangs = self.gang_scheduling_config
        return self.placement == "PACK" if gangs is None else gangs.gang_placement_strategy == "PACK"

    @property
    def strategy(self) -> Strategy:
        """How the bundles of a gang, or of one replica, are placed."""
        gangs = self.gang_scheduling_config
        return self.placement_group_strategy or "PACK" if gangs is None else gangs.gang_placement_strategy

    def surge(self, replicas: int) -> int:
        """Return the number of extra replicas allowed during an update."""
        return share_or_number(self.max_surge, replicas)

    def unavailable(self, replicas: int) -> int:
        """Return the number of these replicas that may be missing during an update."""
        return share_or_number(self.max_unavailable, replicas, rounded="down")

    def allowed_failures(self, replicas: int) -> int:
        """Return the number of failed starts in a row after which a change fails."""
        return min(self.max_constructor_retry_count, STARTS_PER_REPLICA * max(1, replicas))

    def fixed(self) -> dict[str, Any]:
        """Return the non-default options that are fixed for the life of a replica."""
        return {
            name: value.to_plain() if isinstance(value, Options) else value
            for name, default in _fixed_defaults()
            if (value := getattr(self, name)) != default
        }

    #: The classic name of ``max_ongoing_requests``.
    max_concurrent_queries = property(  # type: ignore[pydantic-field]
        lambda self: self.max_ongoing_requests,
        lambda self, value: setattr(self, "max_ongoing_requests", value),
    )

    def concurrency(self) -> int:
        """Return the maximum number of concurrent requests of a replica, with defaults filled in."""
        if self.max_ongoing_requests is not None:
            return self.max_ongoing_requests
        if self.max_batch_size is not None and (
            self.internal_metadata.is_blocking or self.batch_wait_timeout > 0
        ):
            return 2 * self.max_batch_size
        return SYNC_CONCURRENCY if self.internal_metadata.is_blocking else ASYNC_CONCURRENCY

    def with_facts(self, facts: Mapping[str, Any]) -> BackendConfig:
        """Return a copy with the facts about the callable that a started replica reports."""
        metadata = self.internal_metadata
        names = ("accepts_batches", "is_blocking", "is_asgi_app")
        known = {"ignores_bodies": False, "docs_path": ""} | {
            name: facts[name] for name in (*names, "ignores_bodies", "docs_path") if name in facts
        }
        if all(getattr(metadata, name) == value for name, value in known.items()):
            return self
        return self.model_copy(update={"internal_metadata": metadata.model_copy(update=known)})

    @property
    def bodies(self) -> BodyUse:
        """How a proxy handles the bodies of HTTP requests to the backend."""
        facts = self.internal_metadata
        if facts.is_asgi_app:
            return "stream"
        if self.method_header:
            return "gather"  # a request may name any method
        if facts.ignores_bodies:
            return "drop"
        return "gather" if facts.is_blocking or facts.accepts_batches else "stream"

    def merged(self, changes: BackendConfig, *, ends_autoscaling: bool = False) -> BackendConfig:
        """Return a copy in which the fields that ``changes`` sets are replaced.

        Autoscaling replaces a fixed number of replicas. A number replaces autoscaling only with
        ``ends_autoscaling``; otherwise, giving both is an error.
        """
        named = changes.model_fields_set - {"internal_metadata"}
        if not named:
            return self.model_copy()
        if not self.model_fields_set and named == changes.model_fields_set:
            return changes.model_copy()  # already validated as a whole
        values = {name: getattr(self, name) for name in self.model_fields_set}
        config = changes.autoscaling_config
        if config is not None and not config.dry_run:
            values.pop("num_replicas", None)  # the previous number, which autoscaling replaces
        before, has_number = self.autoscaling_config, "num_replicas" in named
        if ends_autoscaling and has_number and before is not None and not before.dry_run:
            values["autoscaling_config"] = None
        values |= {name: getattr(changes, name) for name in named}
        return BackendConfig(**values)  # not model_copy, which skips validation


@cache
def _fixed_defaults() -> Sequence[tuple[str, Any]]:
    """Return the options that are fixed for the life of a replica, with their defaults."""
    fields = BackendConfig.model_fields.items()
    return [(name, field.default) for name, field in fields if REPLACES in field.metadata]
