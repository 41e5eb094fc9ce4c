"""The records of an instance: all that its controller knows that must outlive it.

Each is one row of the store, keyed by kind and name, so that a change writes what changed and nothing
else. Records are immutable; the pure parts of the control plane return new ones in a `Change`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

import msgpack

from daskserve.errors import InstanceError
from daskserve.options.autoscaling import AutoscalingConfig
from daskserve.options.bounds import share_of
from daskserve.options.config import ActorOptions, BackendConfig, Options
from daskserve.types import (
    ActorAddress,
    BackendTag,
    EndpointTag,
    GoalId,
    ReplicaState,
    ReplicaTag,
    WorkerAddress,
)


@dataclass(frozen=True, slots=True)
class BackendRecord:
    """A backend as it is wanted.

    Attributes
    ----------
    version : str
        Names the code; replicas of another version are replaced.
    code_key : str
        The `CodeRecord` that holds the callable.
    config, user_config, actor_options, env
        As in `daskserve.options.backend_spec.BackendSpec`.
    config_id : str
        Names the config; running replicas of another one are reconfigured in place.
    request_id : str
        The client's call that made this backend, so that its retry is told from a second call.
    goal : str or None
        The goal that waits for this backend to come about.
    scaled_to : int or None
        How many replicas the autoscaler, or an external scaler, wants; None if the number is the config's.
    scalings : tuple
        The last changes of that number, oldest first: seconds since the epoch, from, to, why.
    capacity, capacity_direction
        What the instance's `CapacityRecord` says, so that one record tells how many replicas are wanted.
    """

    KIND: ClassVar[str] = "backend"

    tag: BackendTag
    version: str
    code_key: str
    config: BackendConfig
    config_id: str
    actor_options: ActorOptions
    user_config: bytes | None = None
    env: str | None = None
    request_id: str = ""
    #: The version the user named; None for one that was made up from the code.
    user_version: str | None = None
    #: When the present spec was accepted, in seconds since the epoch, for people to read.
    deployed_at: float = 0.0
    #: Why the last goal failed, until another one is opened.
    last_error: str = ""
    goal: GoalId | None = None
    is_deleting: bool = False
    is_forced: bool = False
    is_deployment: bool = False
    scaled_to: int | None = None
    scalings: tuple[tuple[float, int, int, str], ...] = ()
    capacity: float | None = None
    capacity_direction: str | None = None

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.tag}"

    def __eq__(self, other: object) -> bool:
        # Models are equal though an option is a default in one and was set to the same in the other, and
        # what was set decides what a later change means.
        return isinstance(other, BackendRecord) and to_plain(self) == to_plain(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def autoscaling(self) -> AutoscalingConfig | None:
        """The autoscaler's options; None: it is not autoscaled."""
        return self.config.autoscaling_config

    @property
    def place_options(self) -> dict[str, Any]:
        """What decides where replicas run: those with other such options must be replaced."""
        found = {**self.actor_options.to_plain(), "demand": self.actor_options.demand()}
        if self.config.isolation != "thread":
            found |= {"isolation": self.config.isolation, "env": self.env}
        return found

    @property
    def is_scaled_externally(self) -> bool:
        """Whether a scaler outside of the cluster may say how many replicas there are."""
        return self.config.external_scaler_enabled

    @property
    def num_replicas(self) -> int:
        """How many replicas are wanted now."""
        if self.is_deleting:
            return 0
        if self.scaled_to is None:
            return share_of(self.configured_replicas, self.capacity)
        return share_of(self.scaled_to, self.capacity) if self.is_held else self.scaled_to

    @property
    def full_replicas(self) -> int:
        """The number of which the backend has a share now."""
        if self.scaled_to is None:
            return self.configured_replicas
        if self.is_held or not self.capacity:
            return self.scaled_to
        return math.floor(round(self.scaled_to * 100 / self.capacity, 9))

    @property
    def configured_replicas(self) -> int:
        """The number that the config names, at full capacity."""
        return self.config.num_replicas

    @property
    def is_held(self) -> bool:
        """Whether the number is one at full capacity: an external scaler's, or what a dry run keeps."""
        options = self.autoscaling
        return self.scaled_to is not None and (options is None or options.dry_run)

    @property
    def needed_replicas(self) -> int:
        """How many must run for a change to have come about: not all that the load of the moment wants."""
        if self.scaled_to is None:
            return self.num_replicas
        options = self.autoscaling
        if options is None:
            return min(self.num_replicas, share_of(self.configured_replicas, self.capacity))
        first = options.min_replicas if options.initial_replicas is None else options.initial_replicas
        return min(self.num_replicas, share_of(first, self.capacity, options.multiple_of))


@dataclass(frozen=True, slots=True)
class CapacityRecord:
    """The share of its replicas that an instance is to have, in percent, and where that has gone last."""

    KIND: ClassVar[str] = "capacity"

    percent: float | None = None
    direction: str | None = None

    @property
    def key(self) -> str:
        return f"{self.KIND}/target"


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """A pickled callable. Apart from the backend, so that a config change does not write it again."""

    KIND: ClassVar[str] = "code"

    name: str
    backend: BackendTag
    code: bytes

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.name}"


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """One replica and where it is in its life.

    Attributes
    ----------
    config_id : str
        The config it runs with; empty while it is told another one.
    events : tuple
        What has happened to it, oldest first: the `replica_lifecycle.ReplicaEvent` values. No replica has
        more than five, as no state comes twice.
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

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.tag}"

    def address(self, instance: str) -> ActorAddress:
        """Return where the replica's actor lives; only for one that has been placed."""
        if self.worker is None:
            raise ValueError(f"replica {self.tag} has not been placed")
        return ActorAddress(f"{instance}/replica/{self.tag}", self.worker, self.incarnation)


@dataclass(frozen=True, slots=True)
class EndpointRecord:
    """An endpoint: its route and what its traffic goes to."""

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
class ProxyRecord:
    """One HTTP proxy. ``port`` is the one it got, so that its replacement takes the same."""

    KIND: ClassVar[str] = "proxy"

    name: str
    worker: WorkerAddress
    host: str
    incarnation: int
    port: int

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.name}"

    def address(self, instance: str) -> ActorAddress:
        """Return where the proxy's actor lives."""
        return ActorAddress(f"{instance}/proxy/{self.name}", self.worker, self.incarnation)


class GoalState(enum.StrEnum):
    """How far a goal is."""

    PENDING = "PENDING"
    DONE = "DONE"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class GoalRecord:
    """A change that was asked for, until it has come about or was taken back.

    Attributes
    ----------
    previous : dict or None
        The backend's record before the change, to go back to; None if the change made the backend.
    previous_endpoint : dict or None
        The record of a deployment's endpoint at that time.
    failures : int
        Constructors that failed in a row while this goal was pending.
    error : bytes or None
        Why a FAILED goal failed, as `daskserve.payload.dump_error` packs it.
    """

    KIND: ClassVar[str] = "goal"

    goal_id: GoalId
    backend: BackendTag
    state: GoalState
    number: int
    timeout_s: float | None
    previous: Mapping[str, Any] | None = None
    failures: int = 0
    error: bytes | None = None
    previous_endpoint: Mapping[str, Any] | None = None

    @property
    def key(self) -> str:
        return f"{self.KIND}/{self.goal_id}"


Record: TypeAlias = (
    BackendRecord | CodeRecord | ReplicaRecord | EndpointRecord | ProxyRecord | GoalRecord | CapacityRecord
)
#: Store key -> the new record, or None to remove it. One change is one transaction.
Change: TypeAlias = dict[str, Record | None]

FORMAT = 1
_KINDS: Mapping[str, type[Any]] = {
    kind.KIND: kind
    for kind in (
        BackendRecord,
        CodeRecord,
        ReplicaRecord,
        EndpointRecord,
        ProxyRecord,
        GoalRecord,
        CapacityRecord,
    )
}
_ENUMS: Mapping[str, type[enum.StrEnum]] = {"replica": ReplicaState, "goal": GoalState}


#: Fields that are tuples; msgpack returns lists.
_TUPLES = ("methods", "python_methods", "events")


class CorruptRecordError(InstanceError):
    """A stored record cannot be read."""


def encode(record: Record) -> bytes:
    """Return a record as bytes that any later version can tell the format of."""
    return bytes(msgpack.packb({"format": FORMAT, "fields": _fields(record)}))


def decode(key: str, data: bytes) -> Record:
    """Return the record stored under ``key``.

    Raises
    ------
    CorruptRecordError
        The bytes are not a record, or a newer daskserve wrote them.
    """
    kind = key.partition("/")[0]
    try:
        stored = msgpack.unpackb(data)
        if stored["format"] > FORMAT:
            raise CorruptRecordError(
                f"Record {key!r} has format {stored['format']}; this daskserve reads up to {FORMAT}. "
                "Use a newer one."
            )
        record: Record = from_plain(kind, stored["fields"])
        return record
    except CorruptRecordError:
        raise
    except Exception as error:
        raise CorruptRecordError(f"Record {key!r} cannot be read: {error!r}") from error


def _fields(record: Record) -> dict[str, Any]:
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return {name: value.to_plain() if isinstance(value, Options) else value for name, value in values.items()}


def from_plain(kind: str, values: Mapping[str, Any]) -> Any:
    """Return a record made of plain values, as `to_plain` gives them."""
    changed = dict(values)
    if kind in _ENUMS:
        changed["state"] = _ENUMS[kind](changed["state"])
    for name in _TUPLES:
        if name in changed:
            changed[name] = tuple(changed[name])
    if "scalings" in changed:
        changed["scalings"] = tuple(tuple(each) for each in changed["scalings"])
    if kind == BackendRecord.KIND:
        changed["config"] = BackendConfig(**changed["config"])
        changed["actor_options"] = ActorOptions(**changed["actor_options"])
    return _KINDS[kind](**changed)


def to_plain(record: Record) -> dict[str, Any]:
    """Return a record as plain values."""
    values = _fields(record)
    # As they come back from a store, where they may have been within another record meanwhile.
    for name in _TUPLES:
        if name in values:
            values[name] = list(values[name])
    if "scalings" in values:
        values["scalings"] = [list(each) for each in values["scalings"]]
    return values
