"""The interface of request routers, with the names of Ray Serve.

A router chooses replicas for one process and one deployment. It is a plain object: its methods are called
when the replicas change, to choose a replica for each request, and when requests end.
`daskserve.data.caller.request_routers.routing` calls it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from daskserve.common.clock import seeded_rng
from daskserve.common.types import Envelope, EnvelopeKind
from daskserve.data.caller.pool.pooled_replica import PooledReplica
from daskserve.data.multiplexing.ids import short_id

#: If the arguments of a call are larger than this, they are not unpickled for a router.
MAX_ARGUMENT_BYTES = 1 << 20
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DeploymentID:
    """The name of a deployment and of its application."""

    name: str
    app_name: str = ""

    @classmethod
    def of(cls, tag: str) -> DeploymentID:
        """Return the id for a backend's tag."""
        app_name, _, name = tag.rpartition("/")
        return cls(name, app_name)

    def __str__(self) -> str:
        return f"{self.app_name}/{self.name}" if self.app_name else self.name


@dataclass(frozen=True, slots=True)
class ReplicaID:
    """The id of a replica; ``unique_id`` is its tag."""

    unique_id: str
    deployment_id: DeploymentID

    def to_full_id_str(self) -> str:
        """Return the id as one string."""
        return self.unique_id

    def __str__(self) -> str:
        return self.unique_id


class RunningReplica:
    """A replica to choose from; the object stays the same while the replica runs.

    Attributes
    ----------
    replica_id : ReplicaID
    node_id : str
        The host of its worker.
    availability_zone : None
        Dask does not know zones.
    routing_stats : dict
        The last result of the replica's ``record_routing_stats``.
    multiplexed_model_ids : set of str
        The models that it has.
    latency_s : float
        Mean latency of its recent requests from this process, in seconds; 0 before the first.
    """

    __slots__ = (
        "_entry",
        "_now",
        "availability_zone",
        "latency_s",
        "multiplexed_model_ids",
        "node_id",
        "replica_id",
        "routing_stats",
    )

    def __init__(self, entry: PooledReplica, deployment: DeploymentID, now: Callable[[], float]) -> None:
        self._entry = entry
        self._now = now
        self.replica_id = ReplicaID(entry.tag, deployment)
        self.node_id = host_of(entry.address.worker)
        self.availability_zone: str | None = None
        self.routing_stats: Mapping[str, Any] = _NOTHING
        self.multiplexed_model_ids: frozenset[str] = frozenset()
        self.latency_s = 0.0

    @property
    def max_ongoing_requests(self) -> int:
        """How many requests the replica runs concurrently."""
        return self._entry.concurrency

    @property
    def ongoing_requests(self) -> int:
        """The number of this process's requests at the replica."""
        return self._entry.in_flight

    @property
    def queue_len(self) -> float:
        """The number of requests from all processes, as last reported by the replica."""
        return self._entry.score(self._now())

    @property
    def has_room(self) -> bool:
        """Whether the replica can take a request now."""
        entry = self._entry
        return entry.index >= 0 and not entry.is_full

    def __repr__(self) -> str:
        return f"<RunningReplica {self.replica_id}>"


def host_of(worker: str) -> str:
    """Return the host in a worker's address."""
    place = worker.rpartition("://")[2]
    return place.rpartition(":")[0] or place


@dataclass(slots=True)
class RequestRoutingContext:
    """The earlier attempts of routers for a request; used only by routers."""

    multiplexed_start_matching_time: float | None = None
    tried_fewest_multiplexed_models: bool = False
    tried_first_multiplexed_models: bool = False
    tried_same_node: bool = False
    tried_same_az: bool = False
    should_backoff: bool = False


class RequestMetadata:
    """The facts about a request."""

    __slots__ = ("_envelope", "session_id")

    def __init__(self, envelope: Envelope, session_id: str) -> None:
        self._envelope = envelope
        self.session_id = session_id

    @property
    def is_http_request(self) -> bool:
        """Whether the request is an HTTP request, rather than a handle call."""
        return self._envelope.kind is EnvelopeKind.HTTP

    @property
    def _facts(self) -> Mapping[str, Any]:
        head = self._envelope.head
        if self.is_http_request:
            found: Mapping[str, Any] = head.get("extensions", _NOTHING).get("daskserve", _NOTHING)
        else:
            found = head.get("facts", _NOTHING)
        return found

    @property
    def request_id(self) -> str:
        """The id of the request."""
        head = self._facts if self.is_http_request else self._envelope.head
        return str(head.get("request_id", ""))

    @property
    def internal_request_id(self) -> str:
        """The same as ``request_id``, which is already unique."""
        return self.request_id

    @property
    def call_method(self) -> str:
        """The method that a call names; ``__call__`` for HTTP."""
        return "__call__" if self.is_http_request else str(self._envelope.head.get("method", "__call__"))

    @property
    def route(self) -> str:
        """The route of the HTTP request, or of the HTTP request that a call belongs to."""
        return str(self._facts.get("route") or "")

    @property
    def multiplexed_model_id(self) -> str:
        """The id of the model that the request names."""
        return str(self._facts.get("model_id") or self._facts.get("multiplexed_model_id") or "")

    @property
    def is_streaming(self) -> bool:
        """Whether the call streams its results."""
        return bool(self._envelope.head.get("stream"))

    @property
    def method(self) -> str:
        """The HTTP method; empty for a call."""
        return str(self._envelope.head.get("method", "")) if self.is_http_request else ""

    @property
    def path(self) -> str:
        """The path of the URL; empty for a call."""
        return str(self._envelope.head.get("path", "")) if self.is_http_request else ""

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """The headers of the HTTP request; empty for a call."""
        found: Sequence[tuple[bytes, bytes]] = self._envelope.head.get("headers", ())
        return found if self.is_http_request else ()


class PendingRequest:
    """A request that needs a replica.

    Attributes
    ----------
    metadata : RequestMetadata
    created_at : float
        When the request first needed a replica, on the clock of the event loop.
    body : bytes
        The first part of an HTTP request's body, if the router has ``wants_body``.
    """

    __slots__ = (
        "_arguments",
        "_context",
        "_envelope",
        "body",
        "created_at",
        "has_failed",
        "metadata",
        "replica",
        "sent_at",
        "sent_by",
        "session_place",
    )

    def __init__(self, envelope: Envelope, session_id: str, now: float) -> None:
        self._envelope = envelope
        self._arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = None
        self._context: RequestRoutingContext | None = None
        self.metadata = RequestMetadata(envelope, session_id)
        self.created_at = now
        self.body = b""
        #: The replica that has the request; None before one is chosen, or if no router chose it.
        self.replica: RunningReplica | None = None
        #: Where the session was read from: the value of `Setup.session` at that time.
        self.session_place = ""
        #: The `RequestRouting` that chose the replica; a new one is made when the options change.
        self.sent_by: object = None
        self.sent_at = now
        #: Whether the response has a status of 500 or more.
        self.has_failed = False

    @property
    def routing_context(self) -> RequestRoutingContext:
        """The earlier attempts of routers for the request."""
        if self._context is None:
            self._context = RequestRoutingContext()
        return self._context

    @property
    def args(self) -> Sequence[Any]:
        """The positional arguments of a call, copied; empty for HTTP, and if they are large."""
        return self._unpickled()[0]

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The keyword arguments of a call, copied; empty for HTTP, and if they are large."""
        return self._unpickled()[1]

    def _unpickled(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        if self._arguments is None:
            payload = self._envelope.payload
            self._arguments = (), _NOTHING
            if payload is not None and payload.nbytes <= MAX_ARGUMENT_BYTES:
                args, kwargs = payload.load()
                self._arguments = args, kwargs
        return self._arguments


@dataclass(slots=True)
class ReplicaResult:
    """Names a request that was sent to a replica. Not frozen, because that takes three times as long."""

    replica_id: ReplicaID
    request_id: str


class RequestRouter:
    """Base class of request routers.

    Derive from it and define ``choose_replicas``. Each process that sends requests has one router, which runs
    in its own thread. So its methods are never called concurrently, and must not wait for anything.
    """

    #: Whether `PendingRequest.body` is read before a router is asked for an HTTP request.
    wants_body = False
    #: The weight of the newest request in `RunningReplica.latency_s`; set by built-in routers.
    latency_weight = 0.2

    def __init__(
        self,
        deployment_id: DeploymentID,
        self_node_id: str = "",
        rng: random.Random | None = None,
        count_ongoing: Callable[[], int] = int,
    ) -> None:
        self._deployment_id = deployment_id
        self._self_node_id = self_node_id
        self._count_ongoing = count_ongoing
        #: The source of random numbers.
        self.rng = rng or seeded_rng(0)
        self._replicas: dict[ReplicaID, RunningReplica] = {}
        self._replicas_list: list[RunningReplica] = []
        self._replica_id_set: set[ReplicaID] = set()

    def initialize_state(self, *args: Any, **kwargs: Any) -> None:
        """Take the ``request_router_kwargs``; called once, before all other methods."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Record the running replicas; called at the beginning and whenever they change."""
        self._replicas = {each.replica_id: each for each in replicas}
        self._replicas_list = replicas
        self._replica_id_set = set(self._replicas)

    def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Any:
        """Return lists of replicas, the best list first; may be ``async`` as long as it awaits nothing.

        The request goes to the least loaded replica with room in the first list that has one. If no list has
        such a replica, the request waits, and the router is called again later.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method choose_replicas")

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Record that a request is sent to a replica."""

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record that a request has ended, with or without an error."""

    @property
    def total_ongoing(self) -> int:
        """The number of requests of this process at all replicas."""
        return self._count_ongoing()

    @property
    def curr_replicas(self) -> dict[ReplicaID, RunningReplica]:
        """The replicas that run, by their ids."""
        return self._replicas

    @property
    def app_name(self) -> str:
        """The application of the deployment."""
        return self._deployment_id.app_name

    def select_available_replicas(
        self, candidates: Iterable[RunningReplica] | None = None
    ) -> list[RunningReplica]:
        """Return the replicas that have room."""
        return [each for each in (self._replicas_list if candidates is None else candidates) if each.has_room]


class FIFOMixin:
    """Has no effect: requests always wait in the order of their arrival. For routers of Ray Serve."""


class SessionMixin:
    """Has no effect: each request has its ``metadata.session_id``. For routers of Ray Serve."""


class LocalityMixin(RequestRouter):
    """Methods for a router that prefers replicas on its own host."""

    def apply_locality_routing(self, pending_request: PendingRequest | None = None) -> set[ReplicaID]:
        """For a request's first call, return the ids of the replicas on this host; for later calls, the ids
        of all."""
        if pending_request is not None and not pending_request.routing_context.tried_same_node:
            pending_request.routing_context.tried_same_node = True
            near = {each.replica_id for each in self._replicas_list if each.node_id == self._self_node_id}
            if near:
                return near
        return set(self._replica_id_set)

    def rank_replicas_via_locality(self, replicas: Iterable[RunningReplica]) -> list[list[RunningReplica]]:
        """Return three lists: the replicas on this host, an empty list (for Ray's zones), and the rest."""
        ranks: list[list[RunningReplica]] = [[], [], []]
        for each in replicas:
            ranks[0 if each.node_id == self._self_node_id else 2].append(each)
        return ranks


class MultiplexMixin(RequestRouter):
    """Methods for a router that prefers replicas that have a request's model."""

    def apply_multiplex_routing(self, pending_request: PendingRequest | None = None) -> set[ReplicaID]:
        """Return the ids of the replicas that have a request's model, or of those with the fewest models."""
        model_id = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        model_id = short_id(model_id)
        if not model_id:
            return set(self._replica_id_set)
        having = {each.replica_id for each in self._replicas_list if model_id in each.multiplexed_model_ids}
        if having:
            return having
        fewest = min((len(each.multiplexed_model_ids) for each in self._replicas_list), default=0)
        return {each.replica_id for each in self._replicas_list if len(each.multiplexed_model_ids) == fewest}

    def rank_replicas_via_multiplex(
        self, replicas: Iterable[RunningReplica], multiplexed_model_id: str
    ) -> list[list[RunningReplica]]:
        """Return the replicas that have a model, then the other replicas by their number of models."""
        having, model_id = [], short_id(multiplexed_model_id)
        others: dict[int, list[RunningReplica]] = {}
        for each in replicas:
            if model_id in each.multiplexed_model_ids:
                having.append(each)
            else:
                others.setdefault(len(each.multiplexed_model_ids), []).append(each)
        return [having, *(others[count] for count in sorted(others))]


@dataclass(slots=True)
class Setup:
    """The options of a deployment's request router, as the controller publishes them.

    Attributes
    ----------
    router : str
        The name of a built-in router, an import path, or a pickled class.
    session : str
        The part of HTTP requests that names the session: ``"header:NAME"`` or ``"cookie:NAME"``.
    """

    router: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    session: str = "header:x-session-id"
    initial_backoff_s: float = 0.025
    backoff_multiplier: float = 2.0
    max_backoff_s: float = 0.5
