"""The replica and the request that the current code runs for.

These are context variables, so each request sees its own values on any thread or event loop. The replica sets
them in a copy of its actor's context before user code runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from daskserve.common.clock import system_rng
from daskserve.common.types import (
    DEFAULT_APPLICATION,
    BackendTag,
    InstanceName,
    RankInfo,
    ReplicaRank,
    ReplicaTag,
    WorkerAddress,
    described,
    split_deployment_tag,
)
from daskserve.errors import NotFoundError, NotInReplicaError
from daskserve.loops.event_loop import running_loop
from daskserve.loops.pending_call import PendingCall
from daskserve.telemetry.histogram import VersionCounter
from daskserve.telemetry.replica import ReplicaMetrics


class HasConnection(Protocol):
    """The part of a process's view of the cluster that this module uses.

    See `daskserve.cluster.protocols.base.Process`.
    """

    @property
    def connection(self) -> Any: ...

    @property
    def shared(self) -> dict[str, Any]: ...

    async def fetch_parcel(self, code: str, parcel: Any) -> Any: ...


class DeploymentID(NamedTuple):
    """The name of a deployment, and the name of its application."""

    name: str
    app_name: str


@dataclass(frozen=True, slots=True)
class DeploymentActorContext:
    """The deployment actor that the current code belongs to."""

    actor_name: str
    deployment: str
    app_name: str

    @property
    def deployment_id(self) -> DeploymentID:
        """The deployment whose replicas share the actor."""
        return DeploymentID(self.deployment, self.app_name)


@dataclass(frozen=True, slots=True)
class ReplicaID:
    """The id of a replica. ``unique_id`` and ``str()`` return the replica's tag."""

    app_name: str
    deployment: str
    unique_id: ReplicaTag

    def __str__(self) -> str:
        return self.unique_id


@dataclass(frozen=True, slots=True)
class GangContext:
    """The gang of a replica.

    Attributes
    ----------
    gang_id : str
        Changes whenever the gang restarts.
    rank, world_size : int
        The replica's number in the gang, and how many replicas it has.
    member_replica_ids : list of str
        The tags of its replicas, by rank.
    pg_name : str
        Always empty: groups have no names on Dask.
    """

    gang_id: str
    rank: int
    world_size: int
    member_replica_ids: list[ReplicaTag]
    pg_name: str = ""


@dataclass(frozen=True, slots=True)
class PlacementBundle:
    """One bundle of a placement group.

    Attributes
    ----------
    worker : str
        The address of the Dask worker on which it is reserved.
    resources : dict
        The amounts, as in ``placement_group_bundles``.
    """

    worker: WorkerAddress
    resources: Mapping[str, float]

    @property
    def dask_resources(self) -> dict[str, float]:
        """The amounts that ``resources=`` of ``Client.submit`` takes: without CPU and memory."""
        return {name: each for name, each in self.resources.items() if name not in ("CPU", "memory")}


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """The bundles that a replica has reserved, in the order of ``placement_group_bundles``.

    The replica runs in the first one. The others are for its own Dask tasks::

        bundle = serve.get_replica_context().placement_group.bundles[1]
        get_client().submit(f, workers=[bundle.worker], resources=bundle.dask_resources)
    """

    bundles: tuple[PlacementBundle, ...]


class RankHolder:
    """Holds a replica's rank and options, so that long-running code sees the current values."""

    def __init__(
        self, rank_info: RankInfo = (0, 0, 0, 1), dask_task_config: Mapping[str, Any] | None = None
    ) -> None:
        self.rank_info = rank_info
        #: The values of `daskserve.options.environment.DaskTaskConfig`; empty in a fake replica.
        self.dask_task_config = dask_task_config or {}


class ModelSplit:
    """The versions of a model at one step of its rollout, and the outcomes of their requests in this replica.

    Parameters
    ----------
    key : str
        Names the step.
    version : str
        The new version.
    share : float
        The share of requests that get it instead of the default version.
    """

    def __init__(self, key: str, version: str, share: float) -> None:
        self.key, self.version, self.share = key, version, share
        self.new, self.old = VersionCounter(), VersionCounter()

    def plain(self) -> dict[str, Any]:
        """Return the totals for the controller, in the form that routers use."""
        return {"key": self.key, "new": self.new.plain(), "old": self.old.plain()}


#: The versions of models that one request or batch is randomly assigned, by model name.
Drawn: TypeAlias = dict[str, tuple[ModelSplit, bool]]


class LoadedModels:
    """The models that a replica has loaded from its ``model_repository``; see `get_model`."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or system_rng()
        self.versions: dict[str, dict[str, Any]] = {}
        self.defaults: dict[str, str] = {}
        #: The models that are rolled out.
        self.splits: dict[str, ModelSplit] = {}

    def get(self, name: str, version: str | None) -> Any:
        """Return a model; raise `NotFoundError` if it is not loaded."""
        versions = self.versions.get(name, {})
        wanted = self.defaults.get(name) if version is None else str(version)
        if version is None and (split := self.splits.get(name)) is not None:
            drawn = drawn_here()
            # The version is drawn once per request. Code outside of requests gets the default version.
            if drawn is not None and split.version in versions and wanted in versions:
                chosen = drawn.setdefault(name, (split, self._rng.random() < split.share))
                wanted = chosen[0].version if chosen[1] and chosen[0].version in versions else wanted
        if wanted is None or wanted not in versions:
            known = ", ".join(f"{each}/{one}" for each, ones in self.versions.items() for one in ones)
            what = f"Model {name!r}" if version is None else f"Version {version!r} of model {name!r}"
            raise NotFoundError(f"{what} is not loaded; loaded: {known or 'none'}.")
        return versions[wanted]


def count_drawn(drawn: Drawn, has_failed: bool, duration_s: float | None) -> None:
    """Count an ended request or batch once, for the versions of models that it was assigned."""
    for split, is_new in drawn.values():
        (split.new if is_new else split.old).count(has_failed, duration_s)
    drawn.clear()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ReplicaContext:
    """The replica that the current code belongs to.

    Attributes
    ----------
    servable_object : object
        The user's object; None in its constructor.
    code_version : str
        The version of the code that the replica runs.
    """

    instance: InstanceName
    backend_tag: BackendTag
    replica_tag: ReplicaTag
    servable_object: Any = None
    #: The process's view of the cluster; None in a fake replica.
    cluster: HasConnection | None = None
    #: Maximum number of concurrent requests of the replica; 0 if unknown.
    max_ongoing_requests: int = 0
    #: The replica's counters; None in a fake replica.
    metrics: ReplicaMetrics | None = None
    code_version: str = ""
    #: The rank and options that change while the replica lives.
    holder: RankHolder = field(default_factory=RankHolder)
    #: The tags of the deployment's actors, by name.
    actors: Mapping[str, BackendTag] = field(default_factory=dict)
    #: For a deployment actor: the names of its deployment and of the actor.
    actor_of: tuple[str, ...] = ()
    #: ``"deployment"``, or ``"backend"`` for a replica of the classic system.
    kind: str = "deployment"
    #: The tags of the replicas of its gang, in order; empty if it has no gang.
    gang: tuple[ReplicaTag, ...] = ()
    #: The bundles of its placement group; empty if it has none.
    bundles: tuple[PlacementBundle, ...] = ()
    #: The models of its ``model_repository``.
    models: LoadedModels = field(default_factory=LoadedModels)
    #: Returns how many of its slots are taken, and how many it has; None in a fake replica.
    slots: Callable[[], tuple[int, int]] | None = None
    #: The models that its multiplexed functions have loaded
    #: (`daskserve.data.multiplexing.multiplexer.Multiplexer`).
    multiplexer: Any = None

    @property
    def display_name(self) -> str:
        """The name in messages, such as ``deployment 'model' of application 'shop'``."""
        return described(self.backend_tag, self.kind)

    @property
    def max_concurrent_queries(self) -> int:
        """The classic name of ``max_ongoing_requests``."""
        return self.max_ongoing_requests

    @property
    def placement_group(self) -> PlacementGroup | None:
        """The bundles that the replica has reserved; None without ``placement_group_bundles``."""
        return PlacementGroup(self.bundles) if self.bundles else None

    @property
    def gang_context(self) -> GangContext | None:
        """The replica's gang; None if it has none."""
        if not self.gang:
            return None
        rank = self.gang.index(self.replica_tag)
        return GangContext(self.gang[0].rpartition("#")[2], rank, len(self.gang), list(self.gang))

    @property
    def app_name(self) -> str:
        """The application of the deployment; a classic backend belongs to the default one."""
        return split_deployment_tag(self.backend_tag)[0]

    @property
    def deployment(self) -> str:
        """The name of the deployment within its application."""
        return split_deployment_tag(self.backend_tag)[1]

    @property
    def replica_id(self) -> ReplicaID:
        """The replica's id."""
        return ReplicaID(self.app_name, self.deployment, self.replica_tag)

    @property
    def rank(self) -> ReplicaRank:
        """The replica's place among the running replicas of its deployment, at this moment."""
        return ReplicaRank(*self.holder.rank_info[:3])

    @property
    def world_size(self) -> int:
        """The number of replicas that the deployment should have, at this moment."""
        return self.holder.rank_info[3]


@dataclass
class RequestContext:
    """The request that the current code answers, and the calls that this code makes through handles.

    When the request is cancelled, its unanswered calls and its Dask tasks are cancelled as well. Async code
    receives a `CancelledError` and may make further calls to clean up. A plain function cannot be
    interrupted, so its later calls are cancelled as well.
    """

    # One object is created per request: for speed it is not frozen, and the first call creates its set.
    request_id: str = ""
    route: str = ""
    #: The deadline, on the clock of the replica's event loop; None if there is none.
    deadline: float | None = None
    # These are class attributes, which an instance overrides only if needed; this saves time per request.
    # This one and the following are the options of the handle's call; empty if the caller set none.
    multiplexed_model_id: ClassVar[str] = ""
    session_id: ClassVar[str] = ""
    priority: ClassVar[int | str] = 0
    #: The number of a named priority, from ``priority_config``.
    priority_number: ClassVar[int] = 0
    idempotent: ClassVar[bool] = False
    #: The id of an item of `Handle.map`, the same for each attempt; empty for other calls.
    item_id: ClassVar[str] = ""
    #: How the result is serialized; empty for the default.
    response_serialization: ClassVar[str] = ""
    #: Whether the caller, a notebook, shows an error to its user at once.
    is_shown: ClassVar[bool] = False
    #: The versions of models that the request is assigned; None before the first is drawn.
    drawn: ClassVar[Drawn | None] = None
    #: The functions that release its multiplexed models, called at its end; None if there are none.
    held: ClassVar[dict[Hashable, Callable[[], None]] | None] = None
    #: The id, name, queue and attempt, if the request is a queued task; see `daskserve.data.tasks.current`.
    task: ClassVar[Sequence[Any] | None] = None
    #: Its Dask tasks (`daskserve.cluster.worker.request_tasks.RequestTasks`); None before the first.
    dask_tasks: ClassVar[Any] = None
    _calls: ClassVar[Set[PendingCall[Any]]] = frozenset()
    _is_cancelled: ClassVar[bool] = False

    @property
    def app_name(self) -> str:
        """The application whose deployment answers the request."""
        replica = current_replica.get()
        return DEFAULT_APPLICATION if replica is None else replica.app_name

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Set the options of the handle's call."""
        vars(self).update(facts)

    def add_call(self, call: PendingCall[Any]) -> None:
        """Record a call; any thread may call this."""
        calls: Any = self._calls
        if not calls:  # setdefault is atomic, so all threads get the same set
            calls = vars(self).setdefault("_calls", set())
        calls.add(call)
        call.add_done_callback(calls.discard)
        # Checked after adding the call. `cancel_calls` sets the flag before it reads the calls, so one of the
        # two always sees the other.
        if self._is_cancelled and running_loop() is None:
            call.cancel()

    @property
    def cancels_new_tasks(self) -> bool:
        """Whether the request is cancelled and its code is a plain function, which cannot be stopped."""
        return self._is_cancelled and running_loop() is None

    def cancel_calls(self) -> None:
        """Cancel the unanswered calls and the unfinished Dask tasks."""
        vars(self)["_is_cancelled"] = True
        for call in list(self._calls):
            call.cancel()
        if self.dask_tasks is not None:
            self.dask_tasks.cancel()


#: The instance whose actor the current code belongs to; empty outside of actors.
current_instance: ContextVar[InstanceName] = ContextVar("daskserve_instance", default="")
current_replica: ContextVar[ReplicaContext | None] = ContextVar("daskserve_replica", default=None)
current_request: ContextVar[RequestContext | None] = ContextVar("daskserve_request", default=None)
#: The versions of models that the current batch is assigned; a batch does not belong to a single request.
current_batch: ContextVar[Drawn | None] = ContextVar("daskserve_batch", default=None)
#: The requests of the current batch of `batch`.
current_members: ContextVar[Sequence[RequestContext]] = ContextVar("daskserve_members", default=())


def drawn_here() -> Drawn | None:
    """Return the versions of models that the current request or batch is assigned; None outside of both."""
    request = current_request.get()
    if request is None:
        return current_batch.get()
    if request.drawn is None:
        vars(request)["drawn"] = {}
    return request.drawn


def get_replica_context() -> ReplicaContext:
    """Return the replica this code runs in: its names, its rank, and the user's object.

    Raises
    ------
    NotInReplicaError
        A `RuntimeError`: the code runs outside a replica, or in a thread without the replica's context.
    """
    replica = current_replica.get()
    if replica is None:
        raise NotInReplicaError(
            "This code does not run in a daskserve replica; call it from a deployment's constructor or "
            "methods. A thread of your own needs their context: "
            "Thread(target=contextvars.copy_context().run, ...)."
        )
    return replica


def get_model(name: str, version: str | None = None) -> Any:
    """Return a model of the deployment's ``model_repository``: the result of its ``load_model``.

    Parameters
    ----------
    version : str, optional
        Default: the default version, or during a rollout the one that was drawn for the request.

    Raises
    ------
    NotFoundError
        It is not loaded in this replica. HTTP clients get 500 unless you catch it.
    NotInReplicaError
        As for `get_replica_context`.
    """
    return get_replica_context().models.get(name, version)


def get_request_context() -> RequestContext:
    """Return the request that the current code answers, with its id, route and application.

    Raises
    ------
    NotInReplicaError
        The code does not answer a request.
    """
    request = current_request.get()
    if request is None:
        raise NotInReplicaError(
            "This code does not answer a daskserve request; call it from a deployment's methods."
        )
    return request


def get_batch_request_contexts() -> list[RequestContext]:
    """Return the requests whose calls the current batch of `batch` answers, in order; empty elsewhere.

    All of them have the same ``multiplexed_model_id``.
    """
    return list(current_members.get())


def requests_here() -> Sequence[RequestContext]:
    """Return the requests that the current code answers: one, those of a batch, or none."""
    request = current_request.get()
    return current_members.get() if request is None else (request,)


def get_multiplexed_model_id() -> str:
    """Return the multiplexed model id of the current request; empty if the request has none.

    The caller names it in the header ``serve_multiplexed_model_id``, or with
    ``handle.options(multiplexed_model_id=...)``. Calls that a request makes do not inherit it.
    """
    requests = requests_here()
    return requests[0].multiplexed_model_id if requests else ""


def get_deployment_actor_context() -> DeploymentActorContext:
    """Return the deployment actor this code runs in.

    Raises
    ------
    NotInReplicaError
        The code runs elsewhere, such as in a replica.
    """
    replica = current_replica.get()
    if replica is None or not replica.actor_of:
        raise NotInReplicaError(
            "This code does not run in a deployment actor; call it from the constructor or the methods of an "
            "actor_class."
        )
    deployment, actor = replica.actor_of
    return DeploymentActorContext(actor, deployment, replica.app_name)


def get_current_backend_tag() -> BackendTag:
    """Return the tag of the backend this code runs in; `NotInReplicaError` outside a replica."""
    return get_replica_context().backend_tag


def get_current_replica_tag() -> ReplicaTag:
    """Return the tag (``backend#SUFFIX``) of the replica this code runs in; raises outside one."""
    return get_replica_context().replica_tag
