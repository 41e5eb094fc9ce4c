"""The records of an instance: the part of its controller's state that must outlive it.

Each record is one row of the store, keyed by kind and name, so that a change writes only changed records.
Records are immutable; the pure parts of the control plane return new ones in a `Change`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias, get_args

from daskserve.common.types import (
    ActorAddress,
    BackendTag,
    EndpointTag,
    GoalId,
    ReplicaState,
    ReplicaTag,
    WorkerAddress,
    described,
)
from daskserve.control.records.deaths import DeathsRecord
from daskserve.control.records.declared import ConfigRecord, DeclarationRecord
from daskserve.control.records.events import EventsRecord
from daskserve.control.records.models import ModelsRecord
from daskserve.control.records.proxy import ProxyRecord
from daskserve.control.records.revisions import RevisionRecord
from daskserve.control.records.rollout import RolloutState, replicas_of_step
from daskserve.control.records.versions import unmarked
from daskserve.options.actor import ActorOptions
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.backend import BackendConfig
from daskserve.options.fields.base import Options
from daskserve.options.fields.bounds import share_of
from daskserve.payload.parcels import Parcel


@dataclass(frozen=True, slots=True)
class BackendRecord:
    """The target state of a backend.

    Attributes
    ----------
    version : str
        Version of the code; replicas of another version are replaced.
    code_key : str
        The `CodeRecord` that holds the callable.
    config, user_config, actor_options, env
        As in `daskserve.options.specs.BackendSpec`.
    config_id : str
        Id of the config; running replicas with another one are reconfigured in place.
    request_id : str
        Id of the client's call that created this backend, which distinguishes a retry from a second call.
    goal : str or None
        The pending goal of this backend.
    scaled_to : int or None
        Target number of the autoscaler or an external scaler; None if the config's number applies.
    scalings : tuple
        The last changes of that number, oldest first: seconds since the epoch, from, to, reason.
    capacity, capacity_direction
        A copy of the instance's `CapacityRecord`, so that one record determines the number of replicas.
    application : str
        The application that it belongs to; empty for backends of the classic verbs.
    needs : tuple of str
        The backends of its application that it calls. They start before it and stop after it.
    actors, actor_of
        As in `daskserve.options.specs.DeploymentSpec`.
    """

    KIND: ClassVar[str] = "backend"

    tag: BackendTag
    version: str
    code_key: str
    config: BackendConfig
    config_id: str
    actor_options: ActorOptions
    user_config: bytes | None = field(default=None, repr=False)
    env: str | None = field(default=None, repr=False)
    request_id: str = ""
    #: The version that the user named; None if it was derived from the code.
    user_version: str | None = None
    #: When the current spec was accepted, in seconds since the epoch; for information only.
    deployed_at: float = 0.0
    #: Why the last goal failed, until another goal is opened.
    last_error: str = ""
    goal: GoalId | None = None
    is_deleting: bool = False
    is_forced: bool = False
    is_deployment: bool = False
    scaled_to: int | None = None
    scalings: tuple[tuple[float, int, int, str], ...] = ()
    capacity: float | None = None
    capacity_direction: str | None = None
    application: str = ""
    needs: tuple[BackendTag, ...] = ()
    actors: Mapping[str, BackendTag] = field(default_factory=dict)
    actor_of: tuple[str, ...] = ()
    #: The kind of the last change: UPSCALE, DOWNSCALE or CONFIG_UPDATE.
    last_change: str = "CONFIG_UPDATE"
    #: Whether a rollback deployed it. Code given by import path must then equal the revision's code.
    is_exact: bool = False
    #: The active rollout of this version, or how the last rollout ended.
    rollout: RolloutState | None = None

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.tag}"

    def __eq__(self, other: object) -> bool:
        # Two pydantic models are equal even if an option is set in only one of them, to its default value.
        # But later changes depend on which options were set.
        return isinstance(other, BackendRecord) and to_plain(self) == to_plain(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def kind(self) -> str:
        """``"deployment"``, or ``"backend"`` in the classic system."""
        return "deployment" if self.is_deployment else "backend"

    @property
    def display_name(self) -> str:
        """The name in messages, such as ``deployment 'model' of application 'shop'``."""
        return described(self.tag, self.kind)

    @property
    def autoscaling(self) -> AutoscalingConfig | None:
        """The autoscaler's options; None without autoscaling."""
        return self.config.autoscaling_config

    @property
    def place_options(self) -> dict[str, Any]:
        """The options that are fixed for the life of a replica; a change of them replaces the replicas."""
        found = {**self.actor_options.to_plain(), "demand": self.actor_options.demand()} | self.config.fixed()
        if self.config.isolation != "thread":
            found["env"] = self.env
        return found

    @property
    def is_scaled_externally(self) -> bool:
        """Whether an external scaler may set the number of replicas."""
        return self.config.external_scaler_enabled

    @property
    def gang_size(self) -> int:
        """The number of replicas that start and end together."""
        gangs = self.config.gang_scheduling_config
        return 1 if gangs is None else gangs.gang_size

    @property
    def bundles(self) -> tuple[Mapping[str, float], ...]:
        """The bundles that each replica reserves; empty without a placement group."""
        return tuple(self.config.placement_group_bundles or ())

    @property
    def num_replicas(self) -> int:
        """The current target number of replicas."""
        if self.is_deleting:
            return 0
        if self.scaled_to is None:
            return share_of(self.configured_replicas, self.capacity, self.gang_size)
        return share_of(self.scaled_to, self.capacity, self.gang_size) if self.is_held else self.scaled_to

    @property
    def canary(self) -> RolloutState | None:
        """The active rollout; None if there is none."""
        return self.rollout if self.rollout is not None and self.rollout.is_active else None

    @property
    def version_replicas(self) -> int:
        """The target number of replicas of this version, which is smaller during a rollout."""
        rollout, plan = self.canary, self.config.rollout
        if rollout is None or plan is None or self.is_deleting or self.capacity == 0:
            return self.num_replicas
        share = plan.shares[min(rollout.step, len(plan.steps) - 1)]
        return replicas_of_step(share, self.num_replicas, self.gang_size)

    @property
    def full_replicas(self) -> int:
        """The target number of replicas at full capacity."""
        if self.scaled_to is None:
            return self.configured_replicas
        if self.is_held or not self.capacity:
            return self.scaled_to
        return math.floor(round(self.scaled_to * 100 / self.capacity, 9))

    @property
    def configured_replicas(self) -> int:
        """The number of replicas from the config, at full capacity."""
        return self.config.num_replicas

    @property
    def is_held(self) -> bool:
        """Whether ``scaled_to`` is a number at full capacity, set by an external scaler or a dry run."""
        options = self.autoscaling
        return self.scaled_to is not None and (options is None or options.dry_run)

    @property
    def needed_replicas(self) -> int:
        """The number of running replicas that completes a change; the autoscaler may want more."""
        if self.scaled_to is None or self.canary is not None:
            return self.version_replicas
        options = self.autoscaling
        if options is None:
            return min(self.num_replicas, share_of(self.configured_replicas, self.capacity, self.gang_size))
        first = options.min_replicas if options.initial_replicas is None else options.initial_replicas
        return min(self.num_replicas, share_of(first, self.capacity, options.multiple_of))


@dataclass(frozen=True, slots=True)
class CapacityRecord:
    """The target capacity in percent, the direction of its last change, and how the instance logs."""

    KIND: ClassVar[str] = "capacity"

    percent: float | None = None
    direction: str | None = None
    #: The changed logging options, and the id of the start since which they were changed; None if unchanged.
    logging: Mapping[str, Any] | None = None
    logging_of: str = ""

    @property
    def key(self) -> str:
        return f"{self.KIND}/target"


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """A pickled callable, separate from the backend, so that a config change does not write it again."""

    KIND: ClassVar[str] = "code"

    name: str
    backend: BackendTag
    code: bytes

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.name}"

    @property
    def size_bytes(self) -> int:
        """The size of the code, with its large constructor arguments."""
        parcel = Parcel.labelled(self.code)
        return len(self.code) if parcel is None else parcel.size_bytes


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """One replica and its state.

    Attributes
    ----------
    config_id : str
        The id of the config it runs with; empty during a reconfiguration.
    rank : tuple of int
        The numbers of its `daskserve.common.types.ReplicaRank`; empty until it is placed.
    gang : tuple of str
        The tags of all replicas of its gang, in order; empty without a gang.
    bundles, bundle_workers : tuple
        The bundles of its placement group, ``demand`` first, and their workers, ``worker`` first. ``bundles``
        is empty without a group, and ``bundle_workers`` also until the replica is placed.
    metadata : dict
        The result of the user's ``record_replica_metadata``.
    events : tuple
        The values of its `ReplicaEvent` so far, oldest first: at most five, each once.
    moved_at : float
        When it entered its state, in seconds since the epoch.
    """

    KIND: ClassVar[str] = "replica"

    tag: ReplicaTag
    backend: BackendTag
    version: str
    config_id: str
    state: ReplicaState
    demand: Mapping[str, float]
    worker: WorkerAddress | None = None
    incarnation: int = 0
    is_forced: bool = False
    events: tuple[str, ...] = ()
    rank: tuple[int, ...] = ()
    gang: tuple[ReplicaTag, ...] = ()
    bundles: tuple[Mapping[str, float], ...] = ()
    bundle_workers: tuple[WorkerAddress, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    moved_at: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.tag}"

    @property
    def named_version(self) -> str:
        """The version without the mark of its options, as users know it."""
        return unmarked(self.version)

    def address(self, instance: str) -> ActorAddress:
        """Return the address of the replica's actor; raise `ValueError` before it is placed."""
        if self.worker is None:
            raise ValueError(f"replica {self.tag} has not been placed")
        return ActorAddress(f"{instance}/replica/{self.tag}", self.worker, self.incarnation)


@dataclass(frozen=True, slots=True)
class EndpointRecord:
    """An endpoint: its route, and the backends that get its traffic."""

    KIND: ClassVar[str] = "endpoint"

    name: EndpointTag
    route: str | None
    methods: tuple[str, ...]
    traffic: Mapping[BackendTag, float]
    shadows: Mapping[BackendTag, float] = field(default_factory=dict)
    request_id: str = ""
    is_legacy: bool = True
    python_methods: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.name}"


@dataclass(frozen=True, slots=True)
class AppRecord:
    """The target state of an application: deployments that change together.

    Attributes
    ----------
    route : str or None
        The route of the ingress. It is reserved until the change is complete; then the ingress's endpoint
        gets it.
    deployments : dict
        The tags of its deployments by name. Each comes after those that it needs, and the ingress is the
        last. Empty if the first deploy failed; the record then only holds the reason.
    request_id : str
        Id of the client's call that set this state.
    goal : str or None
        The pending goal of the application.
    last_error, failed, tried
        Why the last deploy failed, the name of the deployment that failed, and the names of all deployments
        in it. They are cleared by the next deploy.
    is_declared : bool
        Whether it was deployed from a configuration file. The next file may remove it.
    """

    KIND: ClassVar[str] = "app"

    name: str
    route: str | None
    deployments: Mapping[str, BackendTag]
    request_id: str = ""
    deployed_at: float = 0.0
    goal: GoalId | None = None
    last_error: str = ""
    failed: str = ""
    is_deleting: bool = False
    tried: Sequence[str] = field(default_factory=list)
    is_declared: bool = False

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.name}"

    @property
    def tags(self) -> tuple[BackendTag, ...]:
        """The tags of the application's deployments, the ingress last."""
        return tuple(self.deployments.values())

    @property
    def ingress(self) -> BackendTag:
        """The tag of the deployment that handles the application's requests; empty if there is none."""
        return self.tags[-1] if self.deployments else ""


class GoalState(enum.StrEnum):
    """The state of a goal."""

    PENDING = "PENDING"
    DONE = "DONE"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class GoalRecord:
    """A requested change, until it is complete or rolled back.

    Attributes
    ----------
    backend, application : str
        The target of the change: one backend, or (with ``backend`` empty) an application.
    timeout_s : float or None
        Time in seconds within which the change must be complete.
    progress_timeout_s : float or None
        Time in seconds without progress after which the change fails, if ``timeout_s`` is None. A change with
        neither limit, such as a deletion, never fails.
    opened_at : float
        When the change was requested, in seconds since the epoch.
    previous : dict
        The records before the change, by key, for a rollback; None for records that the change created.
    failures : dict
        The number of replicas of each backend that failed or were lost since the last progress.
    error : bytes or None
        The error of a FAILED goal, packed by `daskserve.payload.packed_errors.dump_error`. A DONE goal has an
        error if a later change superseded it; the classic system calls this complete.
    by : str
        The program that requested the change.
    request_id : str
        Id of the client's call that requested the change and may withdraw it; empty if no call may.
    successor : str
        The goal that superseded this one; empty if none did.
    rollback_of : int
        The number of the revision that a rollback deploys again; 0 for any other change.
    """

    KIND: ClassVar[str] = "goal"

    goal_id: GoalId
    backend: BackendTag
    state: GoalState
    number: int
    timeout_s: float | None
    previous: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict, repr=False)
    failures: Mapping[BackendTag, int] = field(default_factory=dict)
    error: bytes | None = None
    application: str = ""
    by: str = ""
    successor: GoalId = ""
    progress_timeout_s: float | None = None
    opened_at: float = 0.0
    request_id: str = ""
    rollback_of: int = 0

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.goal_id}"

    @property
    def limit_s(self) -> float | None:
        """The time limit in force."""
        return self.progress_timeout_s if self.timeout_s is None else self.timeout_s

    @property
    def is_pending(self) -> bool:
        """Whether the change is still in progress."""
        return self.state is GoalState.PENDING


Record: TypeAlias = (
    AppRecord
    | BackendRecord
    | CodeRecord
    | ReplicaRecord
    | EndpointRecord
    | ProxyRecord
    | GoalRecord
    | CapacityRecord
    | ConfigRecord
    | DeclarationRecord
    | RevisionRecord
    | EventsRecord
    | ModelsRecord
    | DeathsRecord
)
#: Store key -> the new record, or None to remove it. One change is one transaction.
Change: TypeAlias = dict[str, Record | None]

#: The class of each kind of record.
KINDS: Mapping[str, type[Any]] = {kind.KIND: kind for kind in get_args(Record)}
#: Fields that are tuples; msgpack returns lists.
TUPLES = frozenset(
    each.name for kind in KINDS.values() for each in fields(kind) if str(each.type).startswith("tuple[")
)


def fields_of(record: Record) -> dict[str, Any]:
    """Return the fields of a record, with plain options."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return {
        name: value.to_plain() if isinstance(value, (Options, RolloutState)) else value
        for name, value in values.items()
    }


def to_plain(record: Record) -> dict[str, Any]:
    """Return a record as plain values."""
    values = fields_of(record)
    # Convert to the types that a round trip through the store gives. The record may be inside another one.
    for name in TUPLES:
        if name in values:
            values[name] = list(values[name])
    if "scalings" in values:
        values["scalings"] = [list(each) for each in values["scalings"]]
    return values
