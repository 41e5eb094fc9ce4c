"""What the layers above ask of a cluster, as protocols.

`daskserve.cluster.dask` answers them on a real Dask cluster, `daskserve.cluster.local.cluster` in one process
and one event loop. Nothing above this layer knows which.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from daskserve.clock import Clock
from daskserve.figures.table import Sample
from daskserve.loops.hops import Landing
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


@dataclass(frozen=True, slots=True)
class ActorContext:
    """What an actor's factory gets: its spec and its process's seam to everything else."""

    spec: ActorSpec
    cluster: Cluster
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

    def samples(self) -> Iterable[Sample]:
        """Return its figures as metrics; see `daskserve.figures.collector.Source`."""


ActorFactory = Callable[[ActorContext], Hosted]


@dataclass(frozen=True, slots=True)
class News:
    """One change of a published key. ``value`` is None when it is too large to travel with the news."""

    key: str
    counter: int
    value: Any = None
    is_inline: bool = True


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


class WorkerListener(Protocol):
    """Told of workers as they come and go."""

    def __call__(self, joined: Sequence[WorkerInfo], left: Sequence[WorkerAddress]) -> None: ...


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


class LongPollSource(Protocol):
    """Where a listener fetches published values."""

    async def fetch(self, keys: Sequence[str]) -> tuple[SnapshotId, Mapping[str, tuple[int, Any]]]: ...
