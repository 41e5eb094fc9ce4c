"""A replica without a controller, and requests to it, for the tests of replicas."""

from __future__ import annotations

import asyncio
import random
import threading
import types
from collections.abc import Callable
from typing import Any

from replica_starts import replica_start

from daskserve.cluster.protocols.base import ActorContext, ActorSpec, HostedActor
from daskserve.common.clock import Clock, LoopClock
from daskserve.common.types import ActorKind, Envelope, EnvelopeKind, Load, Message
from daskserve.data.replica.local_code import LocalCode
from daskserve.data.replica.process.code import ChildCode
from daskserve.data.replica.replica import Replica
from daskserve.options.start_messages import ReplicaStart
from daskserve.payload import pickling
from daskserve.payload.packed_errors import PackedError, load_error

#: The options of the places where user code runs.
PLACES: dict[str, dict[str, Any]] = {
    "thread": {},
    "worker": {"event_loop": "worker"},
    "process": {"isolation": "process"},
}


def make(
    definition: Any,
    *args: Any,
    place: str = "thread",
    init_kwargs: dict[str, Any] | None = None,
    clock: Clock | None = None,
    **options: Any,
) -> Replica:
    """Return the replica ``b#AAAAAA`` of a definition, not started."""
    options = {"concurrency": 4, **PLACES[place], **options}
    if "user_config" in options:
        options["user_config"] = pickling.dump_bytes(options["user_config"])
    return replica_of(replica_start(definition, args, init_kwargs, **options), clock)


def replica_of(start: ReplicaStart, clock: Clock | None = None) -> Replica:
    """Return the replica of a start message, not started."""
    spec = ActorSpec(ActorKind.REPLICA, "an-instance/replica/b#AAAAAA", 1, "an-instance", start.encode())
    cluster: Any = types.SimpleNamespace(connection=None, shared={})
    context = ActorContext(spec, cluster, clock or LoopClock(), random.Random(0))
    return Replica(context, ChildCode if start.config.isolation == "process" else LocalCode)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("daskserve-")]


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - another thread or process decides
        await asyncio.sleep(0.001)


class Reply:
    """The caller's side of one request: the messages to send, and the received ones."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.sent: list[Message] = []
        self.load: Load | None = None

    async def receive(self) -> Message:
        if not self.messages:
            await asyncio.get_running_loop().create_future()
        return self.messages.pop(0)

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(bytes(message.get("body", b"")) for message in self.sent)


def body_messages(*chunks: bytes) -> list[Message]:
    """Return the messages of a request's body."""
    last = len(chunks) - 1
    return [
        {"type": "http.request", "body": chunk, "more_body": number < last}
        for number, chunk in enumerate(chunks)
    ]


def scope(path: str = "/", query: bytes = b"", method: str = "GET", kind: str = "http") -> dict[str, Any]:
    return {
        "type": kind,
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": [(b"host", b"test")],
        "extensions": {"daskserve": {"request_id": "request-1", "route": "/r"}},
    }


async def http(
    replica: HostedActor,
    *chunks: bytes,
    kind: str = "http",
    messages: Any = (),
    reply: Reply | None = None,
    deadline: float | None = None,
    **parts: Any,
) -> Reply:
    """Send an HTTP request with a body in chunks, or a WebSocket with its messages; return the reply."""
    bodies = chunks or ((b"",) if kind == "http" and not messages else ())
    reply = reply or Reply(*body_messages(*bodies), *messages)
    envelope = Envelope(EnvelopeKind.HTTP, scope(kind=kind, **parts), deadline=deadline)
    reply.load = await replica.handle(envelope).respond(reply.receive, reply.send)
    return reply


async def call(replica: HostedActor, method: str, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a Python call, as a handle does; calls of ``__call__`` are classic ones."""
    head = {"method": method, "legacy": method == "__call__", "request_id": "request-1"}
    reply = Reply()
    envelope = Envelope(EnvelopeKind.CALL, head, pickling.dump((args, kwargs)))
    try:
        await replica.handle(envelope).respond(reply.receive, reply.send)
    except PackedError as packed:
        error = load_error(packed.data)
        raise error from error.__cause__
    (answer,) = reply.sent
    assert answer["type"] == "call.result"
    return answer["payload"].load()
