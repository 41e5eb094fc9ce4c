"""Types that all layers share: tags, states, addresses and the messages of a request.

This module imports nothing from daskserve. Messages are slotted dataclasses: they are created per request, so
they must be cheap, and they cross threads, so they must not be changed. Types that a request creates several
times are not frozen, because creating a frozen dataclass takes three times as long.
"""

from __future__ import annotations

import asyncio
import enum
import pickle
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast

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


async def nothing_to_receive() -> Message:
    """Receive nothing: a `Receive` for requests without messages after the envelope."""
    return {"type": "http.disconnect"}


class _Done(tuple[()]):
    """An awaitable that returns None at once. It has no state, so one object is enough for all callers."""

    __slots__ = ()
    __await__ = tuple.__iter__  # implemented in C; ends at once


#: A message type that is not part of ASGI: a complete response with ``status``, ``headers`` and ``body``. The
#: length of the body is the response's length; no ``content-length`` header is needed. Replicas send it. The
#: ingress adds its ``request_id`` and splits it into two ASGI messages for servers other than daskserve's
#: own. Pass headers that many responses share as a tuple, so that the encoded head can be cached.
WHOLE_RESPONSE = "daskserve.response"
#: The key of the route, such as ``/items/{id}``, in the first message of an ASGI application's response.
MATCHED_ROUTE = "daskserve.route"

#: The return value of a `Send` that need not wait; creating a coroutine costs several times as much.
DONE: Awaitable[None] = cast(Awaitable[None], _Done())


class OpenSocket(NamedTuple):
    """An open WebSocket whose connection user code uses directly, on one event loop."""

    #: Returns the client's next message; after the end, every call returns the disconnect.
    receive: Callable[[], Awaitable[Message]]
    #: Sends a message, and waits until the client has room for more. Raises ``OSError`` after the end.
    send: Callable[[Message], Awaitable[None]]
    #: Closes the connection with code 1001. Idempotent.
    go_away: Callable[[], None]
    #: Ends the connection at once.
    abort: Callable[[], None]


class SocketReceiver(Protocol):
    """The event loop of user code, to which the connection of a WebSocket can move."""

    loop: asyncio.AbstractEventLoop

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on `loop`, from any thread."""

    def expect_socket(self) -> None:
        """Prepare for the socket: after the accept, nothing more may be sent through the pipe."""

    def take_socket(self, socket: OpenSocket) -> None:
        """Take the open socket; called once, on `loop`, after `expect_socket`."""

    def drop_socket(self, socket: OpenSocket) -> None:
        """Record that the connection has ended; called on `loop`."""


#: The key of a ``websocket.accept`` whose value is the `SocketReceiver` of user code in the proxy's process.
SOCKET_RECEIVER = "daskserve.place"

#: The name under which ``serve.start(detached=True)`` is found by ``serve.connect()``.
DEFAULT_INSTANCE: InstanceName = "daskserve"
#: The application that ``serve.run`` deploys unless it names another one.
DEFAULT_APPLICATION = "default"


def tag_part(name: str) -> str:
    """Return a name as a part of a tag, with slashes and ``#`` escaped.

    Names without these characters are not changed, unless they contain an escape such as ``%2F``.
    """
    if "%" in name:
        name = re.sub("%(?=2F|23|25)", "%25", name)
    return name.replace("/", "%2F").replace("#", "%23")


def name_in(part: str) -> str:
    """Return the name of a part of a tag; the inverse of `tag_part`."""
    return re.sub("%(2F|23|25)", lambda found: _QUOTED[found[1]], part) if "%" in part else part


_QUOTED: Mapping[str, str] = {"2F": "/", "23": "#", "25": "%"}


def split_deployment_tag(tag: BackendTag) -> tuple[str, str]:
    """Return the application and the name in a deployment's tag."""
    application, _, name = tag.rpartition("/")
    return name_in(application) or DEFAULT_APPLICATION, name_in(name)


def split_import_path(path: str) -> tuple[str, str]:
    """Return the module and the name of ``"pkg.mod.Name"`` or ``"pkg.mod:Name"``; empty if it is neither."""
    module, colon, name = path.partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    is_path = all(part.isidentifier() for part in [*module.split("."), *name.split(".")])
    return (module, name) if is_path else ("", "")


#: The tag of a deployment's actor (`daskserve.options.specs.actor_tag`), or of its replica.
_ACTOR_TAG = re.compile(r"((.+):([^:/#]+))::[0-9a-f]*(?=#|$)")


def short_tag(tag: str) -> str:
    """Return the tag of a backend or replica; that of an actor loses the digest of its version."""
    return _ACTOR_TAG.sub(r"\1", tag)


def described(tag: BackendTag, kind: str = "deployment") -> str:
    """Return a description of a tag, for a message, with the names that the user gave.

    Parameters
    ----------
    kind : str
        The noun for a tag without an application: ``"backend"`` for those of the classic system. With a
        capital letter, the description begins a sentence.
    """
    application, slash, name = tag.rpartition("/")
    actor = _ACTOR_TAG.fullmatch(name)
    shown = name_in(name if actor is None else actor[2])
    if actor is None and not slash:
        return f"{kind} {shown!r}"
    text = f"deployment {shown!r}" if actor is None else f"actor {actor[3]!r} of deployment {shown!r}"
    if slash:
        text += f" of application {name_in(application)!r}"
    return text[0].upper() + text[1:] if kind[0].isupper() else text


def described_actor(name: str) -> str:
    """Return a description of an actor by its name, such as ``Replica 'model#x'``, to begin a sentence."""
    _, _, what = name.partition("/")
    kind, slash, tag = what.partition("/")
    return f"{kind.capitalize()} {short_tag(tag)!r}" if slash else f"Actor {name!r}"


ALL_HTTP_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")


class ActorKind(enum.StrEnum):
    """Kinds of actors. The value is the first part of an actor's name."""

    CONTROLLER = "controller"
    PROXY = "proxy"
    REPLICA = "replica"
    BUILDER = "builder"


class ReplicaState(enum.StrEnum):
    """States in a replica's life cycle; the names follow the classic controller."""

    SHOULD_START = "SHOULD_START"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SHOULD_STOP = "SHOULD_STOP"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """A replica's place among the running replicas of its backend, for code that divides work.

    Attributes
    ----------
    rank : int
        Its number among all replicas, from 0 on.
    node_rank : int
        The number of its host among the hosts of these replicas.
    local_rank : int
        Its number among the replicas on its host.
    """

    rank: int
    node_rank: int
    local_rank: int


#: The three numbers of a `ReplicaRank` and the target number of replicas, as sent to a replica.
RankInfo: TypeAlias = tuple[int, int, int, int]


def as_rank_info(values: Iterable[int]) -> RankInfo:
    """Return a rank info that arrived as a list."""
    rank, node_rank, local_rank, world_size = values
    return rank, node_rank, local_rank, world_size


#: The key of the long poll's list of workers whose process does not answer.
SILENT_WORKERS: Final = "silent_workers"
#: The key of the published list of backends that should run and have no replica.
UNREADY: Final = "unready"
#: The key of the published fact whether another cluster has taken over the instance's store.
STORE_TAKEN: Final = "store_taken"
#: The key of the published share of requests that begin a trace; None if tracing is off.
TRACING: Final = "tracing"
#: Hosts that mean every address of a machine, to listen on.
EVERY_ADDRESS: Final = frozenset(("", "0.0.0.0", "::", "[::]"))


class Reachability(enum.StrEnum):
    """How a process reaches a worker: directly, through the scheduler, or not at all."""

    DIRECT = "direct"
    SCHEDULER = "scheduler"
    NONE = "none"


class Location(enum.StrEnum):
    """Which workers run an HTTP proxy."""

    HEAD_ONLY = "HeadOnly"
    EVERY_NODE = "EveryNode"
    EVERY_WORKER = "EveryWorker"
    NO_SERVER = "NoServer"
    # Ray Serve's names.
    HeadOnly = HEAD_ONLY
    EveryNode = EVERY_NODE
    Disabled = NO_SERVER

    @classmethod
    def _missing_(cls, value: object) -> Location | None:
        return cls.NO_SERVER if value == "Disabled" else None  # Ray Serve's value


@dataclass(frozen=True, slots=True)
class ActorAddress:
    """The address of one incarnation of an actor.

    ``incarnation`` distinguishes a restarted actor from the earlier one of the same name. A message for an
    older incarnation is refused, never delivered to the newer one.
    """

    name: str
    worker: WorkerAddress
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}@{self.worker}/{self.incarnation}"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One Dask worker, as placement sees it. ``resources`` are the declared ones, not the free ones."""

    address: WorkerAddress
    host: str
    threads: int
    memory_bytes: int
    resources: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
    pid: int = 0
    is_available: bool = True
    is_head: bool = False
    #: The worker is being retired; its actors must move.
    is_retiring: bool = False
    #: Whether the worker's process has not answered the supervisor recently.
    is_suspect: bool = False
    #: The worker is kept for the controller and the proxies.
    is_system: bool = False
    #: The amounts of the worker's resources that Dask tasks hold.
    taken_by_tasks: Mapping[str, float] = field(default_factory=dict)

    def matches(self, names: Collection[str]) -> bool:
        """Return whether one of the names is the worker's address, name or host, or one of its resources."""
        return not {self.address, self.name, self.host, *self.resources}.isdisjoint(names)


#: Answers of at least this size stay at the actor until the caller reads them, because it may only pass them
#: on.
KEPT_BYTES = 4 * 1024 * 1024

#: Buffers of at least this size travel through shared memory where that is possible.
SHARED_BYTES = 1024 * 1024


def _guarded(buffer: Any) -> Any:
    view = memoryview(buffer)
    return view.toreadonly() if view.nbytes >= SHARED_BYTES else buffer


@dataclass(slots=True)
class Payload:
    """A pickled Python value: the pickle and its out-of-band buffers (pickle protocol 5)."""

    data: bytes | memoryview
    buffers: tuple[Any, ...] = ()

    def load(self) -> Any:
        """Unpickle the value. A pickle can run any code, so never call this on untrusted data."""
        return pickle.loads(self.data, buffers=self.guarded_buffers())

    def guarded_buffers(self) -> tuple[Any, ...]:
        """Return the buffers for unpickling; those large enough to be shared are always read-only."""
        return tuple(map(_guarded, self.buffers)) if self.buffers else ()

    @property
    def nbytes(self) -> int:
        if not self.buffers:
            return len(self.data)
        return len(self.data) + sum(memoryview(b).nbytes for b in self.buffers)


@dataclass(slots=True, eq=False)
class KeptPayload:
    """A large answer that stays in its actor's process until the caller drops this object.

    Attributes
    ----------
    release : callable
        Lets the actor's process drop the answer; any thread may call it.
    """

    worker: WorkerAddress
    token: str
    nbytes: int
    release: Callable[[], None]

    def __del__(self) -> None:
        self.release()


class MayLeaveAnswer(Protocol):
    """A call whose caller decides, once the answer exists, whether a large answer stays in its actor's
    process."""

    @property
    def leaves_value(self) -> bool: ...


class EnvelopeKind(enum.StrEnum):
    """Kinds of request streams.

    - HTTP: ``head`` is an ASGI scope; both directions carry ASGI messages.
    - CALL: ``head`` is ``{"method", "request_id"}`` and, for classic backends, the replacement of HTTP;
      ``payload`` holds ``(args, kwargs)``; the answer is one
      ``{"type": "call.result", "payload": Payload}``, or, if ``head["stream"]`` is true, any number of
      ``{"type": "call.item", "payload": Payload}``. A head with ``"values"`` also has ``"stream"``: values of
      Dask were taken out of the payload, see `daskserve.cluster.dask.values`. With ``"reserve"``, the answer
      begins with ``{"type": "call.reserved", "replica": ...}``, and the caller's only message,
      ``{"type": "call.dispatch", "head": ..., "payload": ...}``, replaces head and payload. With
      ``"broadcast"``, the replica runs the call beyond its limit.
    - CONTROL: ``head`` is ``{"verb", "message"}`` of plain values; the answer is one
      ``{"type": "control.result", "value": ...}``. Nothing in it is ever unpickled.
    """

    HTTP = "http"
    CALL = "call"
    CONTROL = "control"


#: Type of the message with which a replica informs a router that a request with `QueueTimeout` has got a
#: slot. The message carries the replica's load: ``ongoing`` and ``queued``, as in `Load`.
SLOT_TAKEN = "slot.taken"


@dataclass(frozen=True, slots=True)
class QueueTimeout:
    """How long a request may still wait in a replica's queue, how long it has waited, and its priority."""

    left_s: float
    waited_s: float = 0.0
    priority: int = 0


#: How a router's process handles the bodies of HTTP requests to a backend. ``"gather"``: a request is sent
#: once its whole body has arrived, and takes no slot until then, because a plain callable cannot wait for the
#: body. ``"drop"``: the same, but the body is discarded, because the callable cannot read it. ``"stream"``:
#: parts are passed on at once.
BodyUse: TypeAlias = Literal["gather", "drop", "stream"]

#: The `Envelope.has_body` of a request whose client sends the body only on request (``Expect:
#: 100-continue``).
ON_DEMAND: Final = 2


@dataclass(slots=True)
class Envelope:
    """The opening message of one request to one actor.

    ``deadline`` is the time by which it must be answered, on the clock of this process's event loop.
    ``has_body`` says whether messages of the caller follow; if not, the handler reads one message with an
    empty body. If it is `ON_DEMAND`, the caller's ``receive`` is called only once user code reads. Without
    ``queue_timeout``, a full replica refuses the request at once. In a WebSocket that ``is_direct``, nothing
    between the server and a replica in its process needs to see the messages. ``note_turn`` is called, from
    any thread, with the seconds that user code took for each message of a WebSocket. ``is_direct`` and
    ``note_turn`` stay in this process.
    """

    kind: EnvelopeKind
    head: Mapping[str, Any]
    payload: Payload | None = None
    deadline: float | None = None
    has_body: bool | Literal[2] = True
    queue_timeout: QueueTimeout | None = None
    is_direct: bool = False
    note_turn: Callable[[float], object] | None = None
    #: The call that the answer is for; stays in this process.
    call: MayLeaveAnswer | None = None
    #: Returns whether the caller has received a part of the HTTP response; also stays in this process.
    has_started: Callable[[], bool] = bool
    #: The request's model, routing state, `ValuePlaces` and `daskserve.loops.connection_table.LostAttempt`,
    #: if any. They also stay in this process.
    model_id: str = ""
    routed: Any = None
    places: Any = None
    lost: Any = None

    def is_idempotent_call(self) -> bool:
        """Return whether the options of a call say that it may run twice; streams never may."""
        facts, head = self.head.get("facts"), self.head
        return bool(facts and facts.get("idempotent")) and not head.get("stream") and "reserve" not in head

    def with_head(self, head: Mapping[str, Any]) -> Envelope:
        """Return the request with another head, in a fifth of the time of `dataclasses.replace`."""
        return Envelope(
            self.kind,
            head,
            self.payload,
            self.deadline,
            self.has_body,
            self.queue_timeout,
            self.is_direct,
            self.note_turn,
            self.call,
            self.has_started,
            self.model_id,
            self.routed,
            self.places,
            self.lost,
        )


@dataclass(slots=True)
class Load:
    """The load that a replica reports with every answer."""

    ongoing: int = 0
    queued: int = 0


class ActorRequest(Protocol):
    """A request to one actor that has not begun: the actor is in this process, or behind a channel.

    Call `start` for a request that has one answer; if that returns None, or later passes the request itself
    to its callback, call `respond`.
    """

    def start(self, on_answer: OnAnswer) -> Callable[[], None] | None:
        """Begin without a task, and return a function that cancels the request.

        Returns None, without any effect, if the request may have to wait.
        """

    def respond(self, receive: Receive, send: Send) -> Coroutine[Any, Any, Load]:
        """Respond to the request in the current task; cancelling the task cancels the request."""


#: Called once at the end of a request that was started, with the answer, if there is one, and the actor's
#: load or an error; or with the request itself, whose next step needs a task. It must not raise.
OnAnswer: TypeAlias = Callable[[Message | None, Load | Exception | ActorRequest], None]
