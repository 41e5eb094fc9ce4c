"""CPU time of a request, part by part, in one process.

The only sockets are a pair for each channel, and the only threads are those of user code. A simulated
transport feeds requests as bytes to the server's protocol, over 32 connections or as 64 concurrent calls. All
requests of a round differ. Each line adds one part to the line before. The value is the minimum of many short
rounds, on which other work on the machine has little effect. Two runs differ by 2%, so a change of one
microsecond is visible. In production each part takes longer, because caches are colder and system calls are
added.

Run: ``python benchmarks/bench_path.py [--rounds N]``; it needs uvicorn, httptools and uvloop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import uvloop
from span_costs import export_s, sdk_processor, sdk_s
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState as UvicornState

from daskserve.cluster.channel.channel import Channel
from daskserve.cluster.channel.wire.transport import SocketTransport
from daskserve.cluster.dask.tasks import current_task
from daskserve.cluster.protocols.base import ActorContext, ActorSpec, Process, TaskRequest
from daskserve.common.clock import OneLoopClock, RequestIds
from daskserve.common.types import (
    DONE,
    WHOLE_RESPONSE,
    ActorAddress,
    ActorKind,
    ActorRequest,
    Envelope,
    EnvelopeKind,
    Load,
    Message,
    Reachability,
    Receive,
    Send,
)
from daskserve.data.batching.decorator import batch
from daskserve.data.caller.calls import handle as caller
from daskserve.data.caller.routing.router import Routers
from daskserve.data.caller.routing.waiting_calls import WaitingCalls
from daskserve.data.replica.replica import Replica
from daskserve.loops.thread_calls import LoopQueues
from daskserve.options.backend import BackendConfig
from daskserve.options.http import HTTPOptions
from daskserve.options.start_messages import ReplicaStart
from daskserve.payload.pickling import dump, dump_bytes
from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.proxies.exchange.http_connection import HTTPConnection
from daskserve.proxies.exchange.limits.limits import Limits
from daskserve.proxies.exchange.request.head import HeadLimits
from daskserve.proxies.exchange.server_state import ServerState
from daskserve.proxies.ingress.app import IngressApp
from daskserve.proxies.ingress.routes import RouteTable
from daskserve.telemetry.tracing.process import KEY, Tracing

#: The load: the distinct requests of a round.
REQUESTS = tuple(
    b"GET /b?n=%d HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nX-Client: %08x\r\n\r\n" % (number, number * 65537)
    for number in range(512)  # chosen so that their spans just fit in the queue of the exporting thread
)
#: The same number of requests with a small image as the body; head and body arrive together.
IMAGES = tuple(
    b"POST /b?n=%d HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Length: %d\r\n\r\n%s"
    % (number, len(body), body)
    for number in range(512)
    for body in (b'{"pixels": [%s]}' % b", ".join(b"%d" % (number * place % 17) for place in range(64)),)
)
CONNECTIONS, CALLS = 32, 64
#: The output line for the cost of a traced request in the thread that exports its spans, without the
#: connection.
EXPORT = "the thread of traces, for a traced request"
#: The output line for the same number of spans in OpenTelemetry's SDK alone, with its own encoder and no
#: connection.
PEER = "OpenTelemetry's SDK, four spans and their export"
PER_ROUND = len(REQUESTS)
HEADERS = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"2")]
ADDRESS = ActorAddress("i/replica/b#AAAAAA", "worker", 1)
BACKEND = {
    "replicas": [("b#AAAAAA", "worker", 1)],
    "concurrency": 100,
    "max_queued": 1000,
    "max_crash_retries": 1,
}

TakeRequest = Callable[[Envelope], ActorRequest]


async def answer_call(value: Any) -> Any:
    return value


async def answer_http(request: Any) -> str:
    return "ok"


class SizedImages:
    """Reads the body of each request as JSON, and answers in batches."""

    @batch(max_batch_size=32, batch_wait_timeout_s=0.002)
    async def sizes(self, images: list[list[int]]) -> list[int]:
        return [len(each) for each in images]

    async def __call__(self, request: Any) -> str:
        await self.sizes((await request.json())["pixels"])
        return "ok"


class Published:
    """The controller's updates for routers: one endpoint, one backend, one replica."""

    is_started = True

    def __init__(self, *, is_legacy: bool) -> None:
        self._is_legacy = is_legacy

    def watch(self, key: str, update: Callable[[Any], None]) -> Callable[[], None]:
        if key.startswith("endpoint/"):
            update({"legacy": self._is_legacy, "traffic": {"b": 1.0}, "shadows": {}})
        elif key.startswith("backend/"):
            update(BACKEND)
        return lambda: None

    def on_worker_left(self, forget: Callable[[str], None]) -> None: ...

    def on_ended(self, close: Callable[[], None]) -> None: ...


class OneConnection:
    """A link for a process with the running event loop."""

    is_closed = False
    current_task = staticmethod(current_task)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.loop_queues = LoopQueues()
        self.thread_calls = self.loop_queues.get(loop)
        self.rng = random.Random(0)
        self.request_ids = RequestIds(self.rng)

    def runs_here(self) -> bool:
        return True


class OneRoute:
    """The routes to the only worker, which is always reached directly."""

    def to(self, worker: str) -> Reachability:
        return Reachability.DIRECT

    def watch(self, note: object, is_used: object) -> None:
        pass

    def close(self) -> None:
        pass


class Seam:
    """A cluster with one replica, whose requests a given function takes."""

    instance = "i"
    is_ended = False

    def __init__(
        self,
        handle: TakeRequest,
        *,
        is_local: bool,
        is_legacy: bool = True,
        tracing: Tracing | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._handle = handle
        self._is_local = is_local
        self.shared: dict[str, Any] = {} if tracing is None else {KEY: tracing}
        self.connection = OneConnection(loop)
        self.clock = OneLoopClock(loop)
        self.listener = Published(is_legacy=is_legacy)
        self.routes = OneRoute()

    def is_local(self, address: ActorAddress) -> bool:
        return self._is_local

    def handler_of(self, address: ActorAddress) -> TakeRequest:
        return self._handle


class SimulatedTransport(asyncio.Transport):
    """A transport whose client sends its next request once it has an answer."""

    def __init__(self, protocol: Any, requests: Iterable[bytes]) -> None:
        super().__init__()
        self._protocol = protocol
        self._requests = iter(requests)
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket()
        self.ended = self._loop.create_future()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default

    def begin(self) -> bool:
        """Send the next request; return False if there is none left."""
        request = next(self._requests, None)
        if request is not None:
            self._loop.call_soon(self._protocol.data_received, request)
        return request is not None

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if data.endswith(b"ok") and not self.begin():
            self._socket.close()
            self.ended.set_result(None)

    def close(self) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


async def three_lines(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": b"ok"})


def floor_protocols() -> Callable[[], Any]:
    config = Config(three_lines, loop="none", http="httptools", ws="none", lifespan="off", log_config=None)
    config.access_log = False
    config.load()
    state = UvicornState()
    return lambda: HttpToolsProtocol(config, state, {}, asyncio.get_running_loop())


def our_protocols(app: ASGIApp) -> Callable[[], Any]:
    clock = OneLoopClock(asyncio.get_running_loop())
    server_state = ServerState(
        app,
        head_limits=HeadLimits(1 << 16, 100),
        max_body_bytes=1 << 30,
        max_message_bytes=1 << 20,
        idle_timeout_s=60,
        clock=clock,
        deflates_messages=False,
        limits=Limits(),
    )
    return lambda: HTTPConnection(server_state, lambda: None)


async def http_round(protocols: Callable[[], Any], requests: Sequence[bytes] = REQUESTS) -> None:
    pretenders = []
    for number in range(CONNECTIONS):
        protocol = protocols()
        pretender = SimulatedTransport(protocol, requests[number::CONNECTIONS])
        protocol.connection_made(pretender)
        pretenders.append((protocol, pretender))
        pretender.begin()
    for protocol, pretender in pretenders:
        await pretender.ended
        protocol.connection_lost(None)


async def call_round(call: Callable[[], Awaitable[Any]]) -> None:
    async def one_after_the_other() -> None:
        for _ in range(PER_ROUND // CALLS):
            await call()

    await asyncio.gather(*(one_after_the_other() for _ in range(CALLS)))


async def whole_answer(receive: Receive, send: Send) -> Load:
    await send({"type": WHOLE_RESPONSE, "status": 200, "headers": tuple(HEADERS[:1]), "body": b"ok"})
    return Load(1)


class Bench:
    """The cases, and the objects to close after them."""

    def __init__(self) -> None:
        self.clock = OneLoopClock(asyncio.get_running_loop())
        self.replicas: list[Replica] = []
        self.channels: list[Channel] = []
        self.routers: list[Routers] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def replica(self, function: Any, event_loop: str, tracing: Tracing | None = None) -> Replica:
        code = dump_bytes((function, (), {}))
        start = ReplicaStart(
            tracing={},
            backend_tag="b",
            replica_tag="b#AAAAAA",
            code=code,
            config=BackendConfig(event_loop=event_loop),
            concurrency=100,
            user_config=None,
            environment=None,
            debug=False,
            is_async=False,
            code_name="b@1",
            rank_info=(0, 0, 0, 1),
            actors={},
            actor_of=(),
            gang=(),
            bundles=(),
            is_deployment=False,
            models=None,
            is_exact=False,
        )
        spec = ActorSpec(ActorKind.REPLICA, ADDRESS.name, 1, "i", start.encode())
        cluster: Any = SimpleNamespace(shared={KEY: tracing})
        replica = Replica(ActorContext(spec, cluster, self.clock, random.Random(0)))
        await replica.start()
        self.replicas.append(replica)
        return replica

    def over_channel(self, handle: TakeRequest) -> TakeRequest:
        """Return the function that takes requests at the other end of a channel."""

        def dispatch(name: str, incarnation: int, envelope: Envelope) -> ActorRequest:
            return handle(envelope)

        ends = socket.socketpair()
        for number, end in enumerate(ends):
            end.setblocking(False)
            channel = Channel(SocketTransport(end, "the other end"), dispatch, first_stream=number)
            self.tasks.append(asyncio.create_task(channel.serve()))
            self.channels.append(channel)
        return partial(self.channels[-2].request, ADDRESS)

    def ingress(self, dispatch: Any, tracing: Tracing | None = None) -> IngressApp:
        table = RouteTable({"/b": {"endpoint": "e", "methods": ["GET", "POST"]}})
        return IngressApp(
            options=HTTPOptions(),
            routes=table,
            dispatch=dispatch,
            rng=random.Random(0),
            is_direct=True,
            tracing=tracing,
        )

    def app(
        self, handle: TakeRequest, *, is_local: bool = True, tracing: Tracing | None = None
    ) -> IngressApp:
        """Return an ingress whose router calls its replica through the given function."""
        seam: Any = Seam(handle, is_local=is_local, tracing=tracing)
        routers = Routers(seam, seam.listener, self.clock, random.Random(0), seam.routes, WaitingCalls(), {})
        self.routers.append(routers)

        def dispatch(
            endpoint: str, envelope: Envelope, receive: Receive, send: Send
        ) -> Coroutine[Any, Any, None]:
            return routers.router(endpoint).send(envelope, receive, send)

        return self.ingress(dispatch, tracing)

    async def cases(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return a function per HTTP case that runs one round."""

        async def dispatch_at_once(_: str, envelope: Envelope, receive: Receive, send: Send) -> None:
            await whole_answer(receive, send)

        near = await self.replica(answer_http, "worker")
        own = await self.replica(answer_http, "own")
        sized = await self.replica(SizedImages, "own")
        # Their spans are recorded, but not exported.
        config = {"sampling_ratio": 1.0, "exporter_import_path": ""}
        self.tracing = tracing = Tracing("i", config, {}, lambda *_: None, lambda _: None)
        traced_near = await self.replica(answer_http, "worker", tracing)
        traced_own = await self.replica(answer_http, "own", tracing)
        protocols = {
            "uvicorn, an application of three lines": floor_protocols(),
            "our server, the same application": our_protocols(three_lines),
            "+ ingress": our_protocols(self.ingress(dispatch_at_once)),
            "+ router": our_protocols(self.app(lambda _: TaskRequest(whole_answer))),
            "+ replica, on the worker's loop": our_protocols(self.app(near.handle)),
            "+ channel": our_protocols(self.app(self.over_channel(near.handle), is_local=False)),
            "+ a loop of the replica's own": our_protocols(
                self.app(self.over_channel(own.handle), is_local=False)
            ),
            "replica on the worker's loop, traced": our_protocols(
                self.app(traced_near.handle, tracing=tracing)
            ),
            "+ channel, traced": our_protocols(
                self.app(self.over_channel(traced_near.handle), is_local=False, tracing=tracing)
            ),
            "+ a loop of the replica's own, traced": our_protocols(
                self.app(self.over_channel(traced_own.handle), is_local=False, tracing=tracing)
            ),
        }
        batched = our_protocols(self.app(sized.handle))
        return {
            **{name: lambda each=each: http_round(each) for name, each in protocols.items()},  # type: ignore[misc]
            "bodies of JSON in batches, a loop of its own": lambda: http_round(batched, IMAGES),
            **await self.call_cases(),
        }

    async def call_cases(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return a function per case of handle calls that runs one round."""

        def echo(envelope: Envelope) -> ActorRequest:
            async def respond(receive: Receive, send: Send) -> Load:
                await send({"type": "call.result", "payload": envelope.payload})
                return Load(1)

            return TaskRequest(respond)

        async def nothing() -> Message:
            return {"type": "http.disconnect"}

        def keep(message: Message) -> Awaitable[None]:
            return DONE

        payload = dump(((bytes(100),), {}))

        def by(handle: TakeRequest) -> Callable[[], Awaitable[Any]]:
            head = {"method": "__call__", "request_id": "some-id"}
            return lambda: handle(Envelope(EnvelopeKind.CALL, head, payload)).respond(nothing, keep)

        near = self.over_channel((await self.replica(answer_call, "worker")).handle)
        own = self.over_channel((await self.replica(answer_call, "own")).handle)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "a bare channel, 64 calls": by(self.over_channel(echo)),
            "+ replica, on the worker's loop, 64 calls": by(near),
        }
        for name, over in (("", near), (", a loop of the replica's own", own)):
            seam = Seam(over, is_local=False, is_legacy=False)
            handle = caller.Handle("i", "e", is_legacy=False, cluster=cast(Process, seam))
            calls[f"+ router and handle{name}, 64 calls"] = lambda handle=handle: handle.remote(bytes(100))  # type: ignore[misc]
        return {name: lambda call=call: call_round(call) for name, call in calls.items()}  # type: ignore[misc]

    async def close(self) -> None:
        for routers in self.routers:
            routers.close()
        for channel in self.channels:
            channel.close()
        await asyncio.wait(self.tasks)
        for replica in self.replicas:
            await replica.stop(1)


async def measure(rounds: int) -> dict[str, float]:
    """Return the minimum CPU seconds per request of each case."""
    bench = Bench()
    cases = await bench.cases()
    await asyncio.sleep(0.1)  # until the channels are open
    best = dict.fromkeys(cases, float("inf"))
    processor = sdk_processor()
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        best[PEER] = min(best.get(PEER, float("inf")), sdk_s(processor))
        for name, one_round in cases.items():
            began = time.process_time()
            await one_round()
            best[name] = min(best[name], (time.process_time() - began) / PER_ROUND)
            if bench.tracing.queue.pending:
                exported = min(best.get(EXPORT, float("inf")), export_s(bench.tracing))
                best[EXPORT] = exported
    processor.force_flush()  # its thread ends with the process
    await bench.close()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    best = uvloop.run(measure(parser.parse_args().rounds))
    for name, seconds in best.items():
        print(f"{name:60} {seconds * 1e6:6.1f} us")


if __name__ == "__main__":
    main()
