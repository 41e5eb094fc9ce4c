"""What the layers above ask of a cluster, as protocols.

`daskserve.cluster.dask` answers them on a real Dask cluster, `daskserve.cluster.local.cluster` in one process
and one event loop. Nothing above this layer knows which.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from daskserve.clock import Clock, RequestIds
from daskserve.context import HasLink
from daskserve.errors import ClusterUnreachableError
from daskserve.figures.table import MetricSample
from daskserve.loops.hops import Hop, Hops, Landing
from daskserve.types import (
    ActorAddress,
    ActorKind,
    Envelope,
    InstanceName,
    Load,
    OnAnswer,
    Receive,
    Send,
    SnapshotId,
    WorkerAddress,
    WorkerInfo,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """All that a Host needs to make one actor. ``payload`` is opaque to every layer but the actor's own."""

    kind: ActorKind
    name: str
    incarnation: int
    instance: InstanceName
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class UseReport:
    """What a controller tells the scheduler of its instance.

    Attributes
    ----------
    in_use : frozenset
        The workers that hold replicas or proxies, or are about to.
    retiring : frozenset
        The workers that it knows are to leave, and so puts nothing new on.
    waiting_workers : int
        How many more workers the replicas that found no room would fill.
    """

    in_use: frozenset[WorkerAddress] = frozenset()
    retiring: frozenset[WorkerAddress] = frozenset()
    waiting_workers: int = 0


ViewT_co = TypeVar("ViewT_co", bound=HasLink, covariant=True)


@dataclass(frozen=True)  # without slots, which the alias `ActorContext` could not be called with
class ContextWith(Generic[ViewT_co]):
    """An actor's spec and its view of the cluster; a replica in a child process has only a link of that."""

    spec: ActorSpec
    cluster: ViewT_co
    clock: Clock
    rng: random.Random
    worker: WorkerAddress = ""
    #: Where what user code's threads have for this loop is to arrive; None: anywhere.
    landing: Landing | None = None


#: What stopping may take beyond its grace; then it is given up, and the actor forgotten.
STOP_MARGIN_S = 10.0


#: A method that `Cluster.call` may reach: ``async``, with plain values as keyword arguments.
Verb: TypeAlias = Callable[..., Awaitable[Any]]
VerbT = TypeVar("VerbT", bound=Verb)


def verb(method: VerbT) -> VerbT:
    """Mark a method as a verb, for `verbs_of` to find."""
    method.is_verb = True  # type: ignore[attr-defined]
    return method


def verbs_of(*parts: object) -> Mapping[str, Verb]:
    """Return the verbs of an actor by name: the methods marked with `verb` in it and in its parts."""
    return {
        name: getattr(part, name)
        for part in parts
        for kind in type(part).__mro__
        for name, value in vars(kind).items()
        if getattr(value, "is_verb", False)
    }


class Hosted(Protocol):
    """An object that a Host can carry."""

    @property
    def verbs(self) -> Mapping[str, Verb]:
        """What `Cluster.call` may reach, see `verbs_of`."""

    async def start(self) -> Mapping[str, Any]:
        """Get ready and return plain facts about it; raise to say that it cannot."""

    def handle(self, envelope: Envelope, receive: Receive, send: Send) -> Coroutine[Any, Any, Load]:
        """Answer one request stream; cancelled when the caller goes away."""

    async def stop(self, grace_s: float) -> None:
        """End, letting running requests finish for up to ``grace_s``; idempotent. Cancelled only if late."""

    def samples(self) -> Iterable[MetricSample]:
        """Return its figures as metrics; see `daskserve.figures.collector.Source`."""


@dataclass(frozen=True, slots=True)
class StoreChange:
    """One transaction: records to write (bytes) and to remove (None)."""

    records: Mapping[str, bytes | None] = field(default_factory=dict)


class Store(Protocol):
    """The durable records of one instance."""

    async def load(self) -> Mapping[str, bytes]:
        """Return all records."""

    async def commit(self, epoch: int, change: StoreChange) -> None:
        """Write one transaction, whole or not at all; raise if ``epoch`` is not the newest."""

    def problems(self) -> Mapping[str, str]:
        """Return what could not be read of the store, each with the reason and where it is kept."""


class InstanceStore(Store, Protocol):
    """A store as its owner holds it: the process that starts the instance's controllers."""

    async def open(self) -> None:
        """Get ready; nothing else may be called before. Idempotent.

        Raises a `ServeError` that names the place and what to do: retryable if it may pass.
        """

    async def close(self) -> None:
        """Finish what was asked for and leave nothing open: no file, no thread. Idempotent."""

    async def newest_epoch(self) -> int:
        """Return the newest epoch that was claimed or has written; 0 if there is none."""

    async def claim_epoch(self) -> int:
        """Return a new epoch, higher than any before, for good; commits of older ones fail from now on."""


TopicHandler = Callable[[Any], None]


class Cluster(Protocol):
    """One process's view of the cluster, for one instance."""

    instance: InstanceName

    @property
    def store(self) -> Store: ...

    async def workers(self) -> Sequence[WorkerInfo]:
        """Return the workers that may hold actors, as the scheduler knows them now."""

    async def refused_workers(self) -> Mapping[WorkerAddress, str]:
        """Return the workers that may not hold actors, each with the reason."""

    async def create(self, spec: ActorSpec, worker: WorkerAddress) -> Mapping[str, Any]:
        """Make an actor, wait until it is ready and return its facts.

        Idempotent by name and incarnation: asking again for one that is there (or starting) returns the
        same facts. Raises what the actor's ``start`` raised, or `ActorLostError`.
        """

    async def destroy(self, address: ActorAddress, grace_s: float) -> None:
        """Stop an actor and forget it; one that is gone already is no error."""

    async def call(self, address: ActorAddress, verb: str, **message: Any) -> Any:
        """Call one of an actor's verbs with plain values and return a plain value."""

    def request(
        self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send
    ) -> Coroutine[Any, Any, Load]:
        """Carry one request stream to an actor, directly if it lives in this process."""

    def ask(
        self, address: ActorAddress, envelope: Envelope, on_answer: OnAnswer
    ) -> Callable[[], None] | None:
        """Carry a request that has one answer and no deadline to an actor, without a task.

        Returns what gives it up; None, and nothing has happened, if that cannot be done: nothing connects
        this process to the actor yet, or it lives here and has to wait for something.
        """

    async def inspect(
        self, worker: WorkerAddress, *, figures_of: Collection[str] = ()
    ) -> Sequence[Mapping[str, Any]]:
        """Return the instance's actors on a worker, as they are there now.

        Each as ``{"name", "kind", "incarnation", "is_ready", "is_healthy", "detail", "worker", "pid"}``, and,
        for those named in ``figures_of`` that have any, ``"figures"``.
        Raises `ActorLostError` if the worker is gone, and never returns if its process is stopped.
        """

    async def report(self, epoch: int, report: UseReport) -> bool:
        """Tell the scheduler what the instance uses; one of an older controller is ignored.

        Returns whether the cluster is adaptive: it grows for what waits, and takes back what is empty.
        """

    async def restart_worker(self, worker: WorkerAddress) -> None:
        """Have a worker that does not answer killed and started anew; returns before that is done."""

    async def controller(self) -> ActorAddress:
        """Return where the instance's controller lives now; raise `NotRunningError` if there is none."""

    def forget_controller(self) -> None:
        """Look the controller up anew at the next call of `controller`, because a call to it failed."""

    def publish(self, message: Any) -> None:
        """Send plain values to every listener of the instance's topic."""

    async def subscribe(self, handler: TopicHandler) -> Callable[[], Awaitable[None]]:
        """Hear the instance's topic; returns what ends it.

        When this returns, no message published afterwards is missed.
        """

    @property
    def is_ended(self) -> bool:
        """Whether this process knows that the instance was shut down."""

    def is_local(self, address: ActorAddress) -> bool:
        """Whether the actor lives in this process."""


class Listener(Protocol):
    """How a process learns of changes of an instance; see `daskserve.cluster.long_poll.LongPollClient`."""

    @property
    def is_started(self) -> bool:
        """Whether `start` has returned already."""

    async def start(self) -> None:
        """Subscribe; idempotent. When it returns, no later change is missed."""

    async def stop(self) -> None:
        """Unsubscribe and forget everything; idempotent."""

    def watch(self, key: str, watcher: Callable[[Any], None]) -> Callable[[], None]:
        """Call ``watcher(value)`` now if it is known, and whenever it changes; returns what ends it."""

    def on_worker_left(self, callback: Callable[[WorkerAddress], None]) -> None:
        """Call ``callback(worker)`` when the scheduler sees a worker go."""

    def on_ended(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` when the instance has been shut down."""

    async def wait_for_snapshot(self, snapshot_id: SnapshotId, timeout_s: float) -> None:
        """Return when this process has applied that change or a newer one; `TimeoutError` if it does not."""


class Process(Cluster, Protocol):
    """A process's view of the cluster, with what the process keeps for those who call actors from it."""

    @property
    def clock(self) -> Clock: ...

    @property
    def link(self) -> Link: ...

    @property
    def listener(self) -> Listener:
        """The process's listener for the instance; made on first use, not yet started."""

    @property
    def shared(self) -> dict[str, Any]:
        """What the layers above keep once per process and instance, by name."""


#: What an actor's factory gets.
ActorContext: TypeAlias = ContextWith[Process]
ActorFactory: TypeAlias = Callable[[ActorContext], Hosted]


class Link(Protocol):
    """The event loop of a process's connections, and how callers on any thread get onto it.

    See `daskserve.cluster.link.Link`.
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
    def hops(self) -> Hops:
        """Ways onto event loops: this link's own, and those of its callers."""

    @property
    def hop(self) -> Hop:
        """The way onto the link's loop from other threads."""

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be carried out any more."""

    def closed_error(self) -> ClusterUnreachableError:
        """Return what to raise if `is_closed`."""

    def runs_here(self) -> bool:
        """Whether the caller is on the link's own loop."""

    def cluster(self, instance: InstanceName) -> Process:
        """Return this process's view of an instance."""


class ClientLink(Link, Protocol):
    """What a `daskserve.client.client.Client` asks of its process besides."""

    #: The client that `daskserve.run` uses in this process, if there is one.
    default_instance: Any

    @property
    def scheduler_address(self) -> str: ...

    @property
    def dashboard_link(self) -> str | None:
        """The address of the Dask dashboard; None if there is none."""

    @property
    def is_open(self) -> bool:
        """Whether blocking calls can still be carried out."""

    def sync(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run a coroutine on the link's loop and return its result to this thread."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the link's loop without waiting for it; call on the loop only."""

    async def ask(self, verb: str, **message: Any) -> Any:
        """Call a verb of the supervisor."""

    async def drop_cluster(self, instance: InstanceName) -> None:
        """Forget an instance."""

    def release_default(self, instance: InstanceName) -> None:
        """Let go of the default instance if it is this one."""

    def instance_ended(self, instance: InstanceName) -> None:
        """Close the Dask cluster that was made for this link with its last instance."""
