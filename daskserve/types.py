"""The nouns every layer shares: tags, states, addresses and the messages of one request.

This module imports nothing of daskserve. Messages are slotted dataclasses: they are made per request, so they
must be cheap, and they cross threads, so nobody changes them. Those of which each request makes several are
not frozen, because making a frozen one takes three times as long.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

InstanceName: TypeAlias = str
BackendTag: TypeAlias = str
EndpointTag: TypeAlias = str
ReplicaTag: TypeAlias = str
GoalId: TypeAlias = str
WorkerAddress: TypeAlias = str

#: (controller epoch, counter). Tuples compare in that order, so a new controller is always newer.
SnapshotId: TypeAlias = tuple[int, int]

#: One ASGI message, or one of the ``call.*`` messages that Python calls add (see `Envelope`).
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class _Done(tuple[()]):
    """Awaiting it comes to None at once. Stateless, so one will do for everybody."""

    __slots__ = ()
    __await__ = tuple.__iter__  # in C, and over at once


#: The type of a message that ASGI does not have: a whole response, with ``status``, ``headers`` and ``body``,
#: which says its length itself. Replicas send it. The ingress adds its ``request_id``, and for all but our
#: own servers makes two messages of it. Headers that many responses share are best a tuple: it is looked up.
WHOLE_RESPONSE = "daskserve.response"

#: What a `Send` may return that has nothing to wait for: a coroutine costs several times as much to make.
DONE: Awaitable[None] = cast(Awaitable[None], _Done())

#: The name under which ``serve.start(detached=True)`` is found by ``serve.connect()``.
DEFAULT_INSTANCE: InstanceName = "daskserve"

ALL_HTTP_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")


class ActorKind(enum.StrEnum):
    """What an actor is. Its value is the first part of the actor's name."""

    CONTROLLER = "controller"
    PROXY = "proxy"
    REPLICA = "replica"


#: Where the Host finds the class of each kind. Import paths, because the cluster layer may not import
#: the layers above it.
ACTOR_FACTORIES: Mapping[ActorKind, str] = {
    ActorKind.CONTROLLER: "daskserve.actors:make_controller",
    ActorKind.PROXY: "daskserve.actors:ProxyActor",
    ActorKind.REPLICA: "daskserve.actors:make_replica",
}


class ReplicaState(enum.StrEnum):
    """Where a replica is in its life; names follow the classic controller."""

    SHOULD_START = "SHOULD_START"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SHOULD_STOP = "SHOULD_STOP"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


class Location(enum.StrEnum):
    """Which workers get an HTTP proxy."""

    HEAD_ONLY = "HeadOnly"
    EVERY_NODE = "EveryNode"
    EVERY_WORKER = "EveryWorker"
    NO_SERVER = "NoServer"


@dataclass(frozen=True, slots=True)
class ActorAddress:
    """Where one incarnation of an actor lives.

    ``incarnation`` tells a restarted actor from the one whose name it took over: a message for an
    older incarnation is refused, never delivered to the newer one.
    """

    name: str
    worker: WorkerAddress
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}@{self.worker}/{self.incarnation}"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One Dask worker as placement sees it. ``resources`` are the declared ones, not what is free."""

    address: WorkerAddress
    host: str
    threads: int
    memory_bytes: int
    resources: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
    pid: int = 0
    is_available: bool = True
    is_head: bool = False
    #: It is to leave the cluster in order: what it holds has to move.
    is_retiring: bool = False


@dataclass(slots=True)
class Payload:
    """A pickled Python value: the pickle and its out-of-band buffers (pickle protocol 5)."""

    data: bytes
    buffers: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        if not self.buffers:
            return len(self.data)
        return len(self.data) + sum(memoryview(b).nbytes for b in self.buffers)


class EnvelopeKind(enum.StrEnum):
    """What a request stream carries.

    - HTTP: ``head`` is an ASGI scope; both directions carry ASGI messages.
    - CALL: ``head`` is a `CallHead` as a dict, ``payload`` holds ``(args, kwargs)``; the answer is one
      ``{"type": "call.result", "payload": Payload}``, or, for a head with ``"stream"``, any number of
      ``{"type": "call.item", "payload": Payload}``.
    - CONTROL: ``head`` is ``{"method", "message"}`` of plain values; the answer is one
      ``{"type": "control.result", "value": ...}``. Nothing in it is ever unpickled.
    """

    HTTP = "http"
    CALL = "call"
    CONTROL = "control"


#: The type of the message by which a replica tells a router that a request with `Patience` has its slot, and
#: what the replica now has to do: ``ongoing`` and ``queued``, as in `Load`.
SLOT_TAKEN = "slot.taken"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request may wait in line at a replica that is full, and how long it has done so before."""

    left_s: float
    waited_s: float = 0.0


@dataclass(slots=True)
class Envelope:
    """The opening message of one request to one actor.

    ``deadline`` is when it must have been answered, on the clock of this process's event loop. ``has_body``
    is whether messages of the caller follow; without it, one that says the body is empty is taken as read.
    Without ``patience`` a replica that is full refuses it at once.
    """

    kind: EnvelopeKind
    head: Mapping[str, Any]
    payload: Payload | None = None
    deadline: float | None = None
    has_body: bool = True
    patience: Patience | None = None


@dataclass(slots=True)
class Load:
    """What a replica says of itself with every answer."""

    ongoing: int = 0
    queued: int = 0


class Rest(Protocol):
    """A request for one answer that turned out to need more: the remainder, for a task to carry."""

    def carry(self, receive: Receive, send: Send) -> Coroutine[Any, Any, Load]:
        """Answer it."""

    def drop(self) -> None:
        """Let go of it, if `carry` has not been entered, or has not done that already."""


#: Is told how a request has ended that one answer was asked of: with that, if it came, and with the actor's
#: load or an error; or, of a request over HTTP, how it goes on. It must not raise.
OnAnswer: TypeAlias = Callable[[Message | None, Load | Exception | Rest], None]
