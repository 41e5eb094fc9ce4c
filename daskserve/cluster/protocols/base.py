"""The protocols through which the layers above use a cluster.

`daskserve.cluster.dask.cluster` implements them on a real Dask cluster, `daskserve.cluster.local.cluster` in
one process and one event loop. The layers above work with both and see no difference.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from daskserve.cluster.protocols.started import Started
from daskserve.cluster.protocols.stores import InstanceStore as InstanceStore
from daskserve.cluster.protocols.stores import Store as Store
from daskserve.cluster.protocols.stores import StoreChange as StoreChange
from daskserve.cluster.protocols.subscriptions import Listener as Listener
from daskserve.cluster.protocols.tasks import CurrentTask as CurrentTask
from daskserve.cluster.protocols.tasks import TaskQueueHost as TaskQueueHost
from daskserve.cluster.protocols.usage import UsageReport
from daskserve.common.clock import Clock, RequestIds
from daskserve.common.types import (
    ActorAddress,
    ActorKind,
    ActorRequest,
    Envelope,
    InstanceName,
    KeptPayload,
    Load,
    OnAnswer,
    Payload,
    Reachability,
    Receive,
    Send,
    WorkerAddress,
    WorkerInfo,
)
from daskserve.common.value_places import ValuePlaces
from daskserve.context import HasConnection
from daskserve.errors import ServeError
from daskserve.loops.thread_calls import CallInbox, LoopQueues, ThreadCalls
from daskserve.loops.threads import StartThread, start_daemon
from daskserve.payload.parcels import Parcel
from daskserve.telemetry.logs.ended import ProcessFile
from daskserve.telemetry.logs.process import ProcessLogs
from daskserve.telemetry.table import Source

T = TypeVar("T")

#: The lower bits of an incarnation count the actors of one controller. The bits above them are the epoch, so
#: incarnations also grow from epoch to epoch.
EPOCH_BITS = 32


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """All that a Host needs to create one actor. Only the actor's own layer reads ``payload``."""

    kind: ActorKind
    name: str
    incarnation: int
    instance: InstanceName
    payload: bytes = field(default=b"", repr=False)  # may hold passwords
    start_timeout_s: float | None = None  # for each stage of the start, see `ReportsStart`

    @property
    def epoch(self) -> int:
        """The epoch of the controller that created the actor; if the actor is a controller, its own epoch."""
        return self.incarnation if self.kind is ActorKind.CONTROLLER else self.incarnation >> EPOCH_BITS


ViewT_co = TypeVar("ViewT_co", bound=HasConnection, covariant=True)


@dataclass(frozen=True)  # no slots: with them, the alias `ActorContext` could not be called
class ContextWith(Generic[ViewT_co]):
    """An actor's spec and its view of the cluster; a replica in a child process has only a connection."""

    spec: ActorSpec
    cluster: ViewT_co
    clock: Clock
    rng: random.Random
    worker: WorkerAddress = ""
    #: How calls from user threads reach this loop; None means no fixed inbox.
    inbox: CallInbox | None = None
    #: Starts the first thread of user code; in a child process, that is its main thread.
    start_thread: StartThread = start_daemon
    #: The logs of this process; None if it keeps no logs.
    logs: ProcessLogs | None = None

    @property
    def owns_process(self) -> bool:
        """Whether this process runs only daskserve and Dask, and not a user's program."""
        is_child = self.start_thread is not start_daemon
        return is_child or not self.worker.startswith(("local://", "inproc://"))


#: Key of an unhealthy actor's last log lines in the result of `Cluster.inspect`. An error that an actor
#: raised while starting has its last log lines in the attribute of this name.
LAST_LINES = "last_lines"
#: Time beyond the grace period after which a stop is abandoned and the actor is removed.
STOP_MARGIN_S = 10.0

#: Timeout of `Cluster.inspect`, which normally takes milliseconds. It is less than a second, so that queries
#: that are sent once a second do not overlap.
ANSWER_S = 0.9

#: A method that `Cluster.call` may reach: ``async``, with plain values as keyword arguments.
Verb: TypeAlias = Callable[..., Awaitable[Any]]
VerbT = TypeVar("VerbT", bound=Verb)


def verb(method: VerbT) -> VerbT:
    """Mark a method as a verb, for `verbs_of` to find."""
    method.is_verb = True  # type: ignore[attr-defined]
    return method


def early_verb(method: VerbT) -> VerbT:
    """Mark a method as a verb that may be called before the actor has started, and while it stops."""
    method.is_early = True  # type: ignore[attr-defined]
    return verb(method)


def verbs_of(*parts: object) -> Mapping[str, Verb]:
    """Return the verbs of an actor by name: the methods marked with `verb` in it and in its parts."""
    return {
        name: getattr(part, name)
        for part in parts
        for kind in type(part).__mro__
        for name, value in vars(kind).items()
        if getattr(value, "is_verb", False)
    }


@dataclass(slots=True)
class TaskRequest:
    """An `ActorRequest` that a coroutine function responds to."""

    respond: Callable[[Receive, Send], Coroutine[Any, Any, Load]]

    def start(self, on_answer: OnAnswer) -> None:
        """Return None, because the request needs a task."""


class Parent(NamedTuple):
    """The parent process, as the code of a child process sees it."""

    #: Returns a request to the parent, not sent yet, to the actor or purpose with this name.
    request: Callable[[str, Envelope], ActorRequest]
    #: Returns the file descriptors that the parent has handed over under a name.
    take_files: Callable[[str], list[int]]


class HostedActor(Source, Protocol):
    """An actor that a Host can run."""

    @property
    def verbs(self) -> Mapping[str, Verb]:
        """The verbs that `Cluster.call` may call, see `verbs_of`."""

    async def start(self) -> Mapping[str, Any]:
        """Prepare the actor and return plain facts about it; raise if that fails."""

    def handle(self, envelope: Envelope) -> ActorRequest:
        """Take a request; raise if the actor does not support its kind."""

    async def stop(self, grace_s: float) -> None:
        """Stop; running requests may finish for up to ``grace_s``. Idempotent; cancelled only if late."""


@runtime_checkable
class ReportsStart(Protocol):
    """An actor whose start has stages, such as a replica."""

    def stage(self) -> tuple[str, float]:
        """Return the current stage of its start, such as "loading its code", and when that stage began."""


@runtime_checkable
class ReportsHealth(Protocol):
    """An actor that checks its own health, such as a replica."""

    def health(self) -> Mapping[str, Any]:
        """Return ``is_healthy``, ``detail`` and further facts for the result of `Cluster.inspect`."""


@runtime_checkable
class ReportsLogs(Protocol):
    """An actor whose code may log in another process, such as a replica."""

    def log_file(self) -> ProcessFile | None:
        """Return the file to which the actor's process logs; None if there is none."""


@runtime_checkable
class ReportsMetrics(Protocol):
    """An actor with metrics for autoscaling, such as a replica."""

    def metrics(self) -> dict[str, Any]:
        """Return the metrics, in plain values."""


TopicHandler = Callable[[Any], None]


class TaskQueues(Protocol):
    """The task queues of an instance, in the process of its store."""

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of `daskserve.data.tasks.queues.hosted.HostedQueues` with plain values."""


class Cluster(Protocol):
    """One process's view of the cluster, for one instance."""

    instance: InstanceName
    #: The time at which a scheduler replaced a lost one, by the clock; None if this has not happened.
    resumed_at: float | None

    @property
    def routes(self) -> Routes: ...

    @property
    def store(self) -> Store: ...

    @property
    def tasks(self) -> TaskQueues: ...

    async def workers(self) -> Sequence[WorkerInfo]:
        """Return the workers that may hold actors, as the scheduler knows them now."""

    async def refused_workers(self) -> Mapping[WorkerAddress, str]:
        """Return the workers that may not hold actors, each with the reason."""

    async def create(self, spec: ActorSpec, worker: WorkerAddress) -> Mapping[str, Any]:
        """Create an actor, wait until it is ready and return its facts.

        Idempotent by name and incarnation: a second call for an actor that runs or starts returns the same
        facts. Raises the error of the actor's ``start``, or `ActorLostError`.
        """

    async def destroy(self, address: ActorAddress, grace_s: float) -> None:
        """Stop and remove an actor; do nothing if it does not exist."""

    async def call(self, address: ActorAddress, verb: str, **message: Any) -> Any:
        """Call one of an actor's verbs with plain values and return a plain value."""

    def request(self, address: ActorAddress, envelope: Envelope) -> ActorRequest:
        """Return a request to an actor, not sent yet; without a connection to the actor, it needs a task."""

    def handler_of(self, address: ActorAddress) -> Callable[[Envelope], ActorRequest]:
        """Return the function that takes an actor's requests: its own ``handle`` if it is in this process.

        For other actors it belongs to the current connection, and is outdated when the route changes.
        """

    async def inspect(
        self, worker: WorkerAddress, *, metrics_of: Collection[str] = (), by_scheduler: bool = False
    ) -> Sequence[Mapping[str, Any]]:
        """Return the current actors of the instance on a worker, queried directly or through the scheduler.

        Each is ``{"name", "kind", "incarnation", "is_ready", "is_healthy", "detail", "worker", "pid"}``, with
        ``"metrics"`` if the actor has any and is named in ``metrics_of``, ``"broken_routes"`` if there are
        workers that its process does not reach directly, ``"busy"`` while it starts or stops (what it does,
        and for how many seconds), and further facts of its health. Raises `ActorLostError` if the worker has
        left, and never returns if its process is stopped.
        """

    async def report(self, epoch: int, report: UsageReport) -> bool:
        """Report the resources of the instance to the scheduler, which ignores reports of older controllers.

        Returns whether the cluster is adaptive: it adds workers for waiting replicas and removes empty ones.
        """

    async def restart_worker(self, epoch: int, worker: WorkerAddress) -> None:
        """Request the restart of a worker that does not answer; return before the worker restarts."""

    async def send_parcel(self, parcel: Parcel, parts: Sequence[Any]) -> None:
        """Send the content of a parcel to the scheduler's process, before a change that refers to it."""

    async def fetch_parcel(self, code: str, parcel: Parcel) -> Sequence[Any]:
        """Return the parts of the parcel with some code, given the code's name."""

    async def fetch_answer(self, worker: WorkerAddress, token: str) -> Payload:
        """Return an answer that stayed in a worker, by its token; raise `UnavailableError` if it is lost.

        See `daskserve.common.types.KeptPayload`.
        """

    async def controller(self) -> ActorAddress:
        """Return the address of the instance's controller; raise `NotRunningError` if there is none."""

    def forget_controller(self) -> None:
        """Look up the controller again at the next call of `controller`, because a call to it failed."""

    def publish(self, message: Any) -> None:
        """Send plain values to every listener of the instance's topic."""

    async def subscribe(self, handler: TopicHandler) -> Callable[[], Awaitable[None]]:
        """Subscribe to the instance's topic and return a function that unsubscribes.

        The handler gets every message that is published after this returns.
        """

    @property
    def is_ended(self) -> bool:
        """Whether this process knows that the instance was shut down."""

    def is_local(self, address: ActorAddress) -> bool:
        """Return whether the actor is in this process."""


class Routes(Protocol):
    """The routes from one process to the workers; see `daskserve.cluster.routes.WorkerRoutes`."""

    def watch(
        self, note: Callable[[WorkerAddress, Reachability], object], is_used: Callable[[WorkerAddress], bool]
    ) -> None:
        """Call ``note(worker, route)`` when a route changes; a lost worker is dialled while it is used."""

    def to(self, worker: WorkerAddress) -> Reachability | None:
        """Return the route to a worker; None if it is not known yet."""

    async def connect(self, worker: WorkerAddress) -> None:
        """Connect to a worker if necessary; raise `ActorLostError` if it cannot be reached at once."""

    def break_off(self, worker: WorkerAddress) -> None:
        """Fail the requests in flight at a worker, because it does not answer."""

    def broken(self) -> Mapping[WorkerAddress, Reachability]:
        """Return the workers that are not reached directly, each with its route."""

    def close(self) -> None:
        """Stop dialling and reporting changes. Idempotent."""


class Process(Cluster, Protocol):
    """A process's view of the cluster, with the state that callers in the process share."""

    @property
    def clock(self) -> Clock: ...

    @property
    def connection(self) -> ClusterConnection: ...

    @property
    def listener(self) -> Listener:
        """The process's listener for the instance; created on first use, not yet started."""

    @property
    def shared(self) -> dict[str, Any]:
        """Objects that the layers above create once per process and instance, by name."""


#: The argument of an actor's factory.
ActorContext: TypeAlias = ContextWith[Process]
ActorFactory: TypeAlias = Callable[[ActorContext], HostedActor]


class RemoteValues(Protocol):
    """The values that were taken out of the arguments of one call; keep this object until the call is
    answered."""

    #: The arguments without the values.
    payload: Payload
    #: How the replica finds the values, in plain values: a pickled list of keys, or a mapping of
    #: `daskserve.data.caller.calls.chaining`.
    keys: Any

    async def wait(self) -> None:
        """Return when all values exist; raise the error of a task that failed."""

    async def places(self) -> ValuePlaces | None:
        """Return where the values are; None if that is not known, or does not matter."""


class ValueTransfer(Protocol):
    """Sends Dask's values among the arguments of calls."""

    def take(self, payload: Payload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RemoteValues | None:
        """Take Dask's values out of a call's arguments and start computing them; None if there are none."""

    def is_value(self, value: Any) -> bool:
        """Return whether a value is one of Dask's."""

    def hold(self, payload: Payload, values: Sequence[Any]) -> RemoteValues:
        """Start computing values that the caller took out of a call's arguments, which are ``payload``."""

    async def fetch(self, keys: bytes) -> list[Any]:
        """Return the values that `take` took out in another process."""

    async def keep(self, result: Payload | KeptPayload) -> Any:
        """Put the result of a call into the memory of its worker; return its future, of this connection."""

    def as_read(self, future: Any) -> Any:
        """Return a future from `keep` in a form that its reader can use in any thread or loop."""


class ClusterConnection(Protocol):
    """The event loop of a process's connections, and the calls to it from other threads.

    See `daskserve.cluster.dask.connection.DaskConnection`.
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def rng(self) -> random.Random: ...

    @property
    def request_ids(self) -> RequestIds: ...

    @property
    def loop_queues(self) -> LoopQueues:
        """Calls to event loops: this connection's own, and those of its callers."""

    @property
    def thread_calls(self) -> ThreadCalls:
        """Calls to the connection's loop from other threads."""

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed, so that all calls fail."""

    def closed_error(self) -> ServeError:
        """Return the error to raise if `is_closed`."""

    def runs_here(self) -> bool:
        """Return whether the caller is on the connection's own loop."""

    def current_task(self) -> CurrentTask | None:
        """Return the Dask task that the caller's code belongs to; None elsewhere."""

    @property
    def values(self) -> ValueTransfer:
        """Sends Dask's values among the arguments of calls."""

    def cluster(self, instance: InstanceName) -> Process:
        """Return this process's view of an instance."""


class ClientConnection(ClusterConnection, Protocol):
    """The additional methods that a `daskserve.client.client.Client` needs."""

    #: The connection to the instance that `daskserve.run` uses in this process, if there is one.
    default_instance: Any

    @property
    def started(self) -> Started: ...

    @property
    def scheduler_address(self) -> str: ...

    @property
    def dashboard_link(self) -> str | None:
        """The address of the Dask dashboard; None if there is none."""

    @property
    def is_open(self) -> bool:
        """Whether blocking calls are possible."""

    def sync(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run a coroutine on the connection's loop and return its result to this thread."""

    async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the connection's loop and return its result to a coroutine on any loop."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the connection's loop without waiting for it; call on the loop only."""

    async def ask(self, verb: str, **message: Any) -> Any:
        """Call a verb of the supervisor."""

    async def drop_cluster(self, instance: InstanceName) -> None:
        """Forget an instance."""

    def release_default(self, instance: InstanceName) -> None:
        """Clear the default instance if it is this one."""

    async def instance_ended(self, instance: InstanceName, *, asynchronous: bool) -> None:
        """Close the cluster or client that daskserve created, if this was the connection's last instance."""

    async def disconnect(self, instance: InstanceName = "", *, asynchronous: bool) -> None:
        """Close the connection; also its Dask client if daskserve created it and nothing else needs it."""
