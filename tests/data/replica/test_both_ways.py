"""A request over a channel comes to the same, whether a replica answers it in a task or without one."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from replica_starts import replica_start
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from daskserve.cluster.channel.channel import Channel
from daskserve.cluster.channel.wire.transport import SocketTransport
from daskserve.cluster.protocols.base import ActorContext, ActorSpec
from daskserve.common.clock import LoopClock
from daskserve.common.types import (
    WHOLE_RESPONSE,
    ActorAddress,
    ActorKind,
    Envelope,
    EnvelopeKind,
    Load,
    Message,
)
from daskserve.context import current_request
from daskserve.data.replica.replica import Replica

DEADLINE_S = 10.0
ADDRESS = ActorAddress("local/replica/b#AAAAAA", "there", 1)
began, may_end = threading.Event(), threading.Event()
#: What user code has seen of the request that is under way.
seen: list[Any] = []


def look(request: Any) -> str:
    context = current_request.get()
    assert context is not None
    return (
        f"{request.method} {request.url.path} {request.headers['host']} {context.request_id} {context.route}"
    )


async def text(request: Request) -> str:
    return look(request)


def plain_text(request: Any) -> str:
    return look(request)


def no_argument() -> dict[str, int]:
    return {"a": 1}


async def nothing(request: Request) -> None:
    return None


async def no_json(request: Request) -> object:
    return object()


async def response(request: Request) -> Response:
    answer = JSONResponse({"a": 1}, status_code=201, headers={"x-a": "1"})
    answer.set_cookie("a", "b")
    return answer


def redirect(request: Any) -> Response:
    return RedirectResponse("/there")


async def own_response(request: Request) -> Response:
    class Own(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 299, "headers": []})
            await send({"type": "http.response.body", "body": scope["path"].encode()})

    return Own()


async def half_response(request: Request) -> Response:
    class Half(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

    return Half()


async def background(request: Request) -> Response:
    return JSONResponse(1, background=BackgroundTask(seen.append, "background"))


async def failing_background(request: Request) -> Response:
    def fail() -> None:
        raise KeyError("background")

    return JSONResponse(1, background=BackgroundTask(fail))


async def stream(request: Request) -> StreamingResponse:
    async def parts() -> AsyncIterator[str]:
        for _ in range(40):
            yield "part"

    return StreamingResponse(parts(), status_code=202)


async def generate_async(request: Request) -> AsyncIterator[str]:
    yield "a"
    yield "b"


def generate(request: Any) -> Iterator[Any]:
    for number in range(40):
        yield {"number": number}


def generate_nothing(request: Any) -> Iterator[str]:
    yield from ()


def fail_at_first(request: Any) -> Iterator[str]:
    raise KeyError("first")
    yield ""


def fail_later(request: Any) -> Iterator[str]:
    yield "a"
    raise KeyError("later")


async def fail_later_async(request: Request) -> AsyncIterator[str]:
    yield "a"
    raise KeyError("later")


def exit_later(request: Any) -> Iterator[str]:
    yield "a"
    sys.exit(3)


def awaitable(request: Any) -> Any:
    async def later() -> Any:
        async def parts() -> AsyncIterator[str]:
            yield "in three steps"

        return parts()

    return later()


def failing_awaitable(request: Any) -> Any:
    async def later() -> str:
        raise HTTPException(418, "later")

    return later()


async def fail(request: Request) -> str:
    raise KeyError("no")


def fail_in_thread(request: Any) -> str:
    raise KeyError("no")


async def http_error(request: Request) -> str:
    raise HTTPException(404, "not here", {"X-Why": "1"})


async def leave(request: Request) -> str:
    sys.exit(3)


def leave_thread(request: Any) -> str:
    raise KeyboardInterrupt


async def cancel_itself(request: Request) -> str:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    return "never"


async def raise_cancelled(request: Request) -> str:
    raise asyncio.CancelledError


async def ask_for_the_client(request: Request) -> str:
    gone = [await request.is_disconnected() for _ in range(3)]
    return f"{gone} {await request.body()!r}"


async def ask_while_streaming(request: Request) -> StreamingResponse:
    async def parts() -> AsyncIterator[str]:
        for _ in range(3):
            yield str(await request.is_disconnected())

    return StreamingResponse(parts())


async def listen_behind(request: Request) -> str:
    """Leave a task behind that hears of the end of its request."""

    async def hear() -> None:
        await request.receive()
        seen.append((await request.receive())["type"])

    request.scope["task"] = asyncio.ensure_future(hear())
    await asyncio.sleep(0)
    return "on"


async def listen_behind_the_start(request: Request) -> Response:
    """Say what can be received, twice, while the response is being sent."""

    class Listening(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            first = await receive()
            reading = asyncio.ensure_future(receive())
            done, _ = await asyncio.wait([reading], timeout=0.01)
            said = f"{first['type']} {[each.result()['type'] for each in done]}"
            await send({"type": "http.response.body", "body": said.encode()})

    return Listening()


def listen_from_a_thread(request: Any) -> Any:
    return listen_behind_the_start(request)


async def listening_app(scope: Any, receive: Any, send: Any) -> None:
    await (await listen_behind_the_start(Request(scope)))(scope, receive, send)


WHOLE = (text, plain_text, no_argument, nothing, no_json, response, redirect, own_response, half_response)
FAILING = (fail, fail_in_thread, http_error, leave, leave_thread, cancel_itself, raise_cancelled)
STREAMS = (background, failing_background, stream, generate_async, generate, generate_nothing, fail_at_first)
LATER = (fail_later, fail_later_async, exit_later, awaitable, failing_awaitable)
LISTENING = (ask_for_the_client, ask_while_streaming, listen_behind, listen_behind_the_start)

# ---- what is ended from outside


async def hang(request: Request) -> str:
    began.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise
    return "never"


async def swallow(request: Request) -> str:
    began.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        seen.append("cancelled")
    return "in spite of it"


def hang_in_thread(request: Any) -> str:
    began.set()
    may_end.wait(DEADLINE_S)
    return "late"


async def hang_in_stream(request: Request) -> AsyncIterator[str]:
    try:
        yield "a"
        began.set()
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise


async def swallow_in_stream(request: Request) -> AsyncIterator[str]:
    yield "a"
    began.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        seen.append("cancelled")
    yield "b"


def hang_in_generator(request: Any) -> Iterator[str]:
    yield "a"
    began.set()
    may_end.wait(DEADLINE_S)
    try:
        yield "b"
        yield "c"
    finally:
        seen.append("closed")


def hang_in_awaitable(request: Any) -> Any:
    return hang(request)


async def hang_in_background(request: Request) -> Response:
    return JSONResponse(1, background=BackgroundTask(hang, request))


async def end_in_background() -> None:
    began.set()
    await until(may_end.is_set)
    seen.append("ended")


async def work_in_background(request: Request) -> Response:
    return JSONResponse(1, background=BackgroundTask(end_in_background))


HANGING = (hang, swallow, hang_in_thread, hang_in_stream, swallow_in_stream, hang_in_generator)
HANGING_LATER = (hang_in_awaitable, hang_in_background)


class Play:
    """One request to one replica, as the client and the replica's metrics tell of it."""

    def __init__(self, function: Any, is_taskless: bool, options: dict[str, Any]) -> None:
        start = replica_start(function, concurrency=1, **options)
        spec = ActorSpec(ActorKind.REPLICA, "replica/b#AAAAAA", 1, "an-instance", start.encode())
        cluster: Any = types.SimpleNamespace()
        self.replica = replica = Replica(ActorContext(spec, cluster, LoopClock(), random.Random(0)))
        self.function = function
        self.is_taskless = is_taskless
        self.stopping: asyncio.Task[None] | None = None
        self.sent: list[Message] = []
        self.takes: list[bool] = []

        def dispatch(name: str, incarnation: int, *request: Any) -> Any:
            return replica.handle(*request)

        def answer(name: str, incarnation: int, *request: Any) -> Callable[[], None] | None:
            give_up = replica.handle_nowait(*request)
            self.takes.append(give_up is not None)
            return give_up

        here, there = (SocketTransport(each, "there") for each in socket.socketpair())
        self.here = Channel(here, dispatch, first_stream=0)
        self.there = Channel(there, dispatch, first_stream=1, dispatch_nowait=answer if is_taskless else None)

    async def play(self, method: str, interrupt: str) -> dict[str, Any]:
        await self.replica.start()
        serving = [asyncio.create_task(side.serve()) for side in (self.here, self.there)]
        outcome: Any
        try:
            asking = asyncio.create_task(self._ask(method))
            if interrupt:
                await until(began.is_set)
                # All that was sent before it began to hang, not just the start of the response.
                await until(lambda: "stream" not in interrupt or any(each.get("body") for each in self.sent))
                await self._interrupt(interrupt.removesuffix(" stream"), asking)
            try:
                outcome = await asking
            except asyncio.CancelledError:
                outcome = "cancelled"
            except Exception as error:
                outcome = (type(error).__name__, str(error))
            may_end.set()
            await until(lambda: self.replica.load() == Load(0, 0))
            if self.function is listen_behind:
                await until(lambda: seen)
            metrics = await self.replica.statistics()
        finally:
            may_end.set()
            self.here.close()
            self.there.close()
            await asyncio.gather(*serving)
            await self.replica.stop(DEADLINE_S)
            if self.stopping is not None:
                await self.stopping
        assert self.takes == [True] * self.is_taskless
        assert not self.there._accepted
        assert not self.there._taskless
        del metrics["latency_sum_s"], metrics["threads"]
        metrics["latency_counts"] = sum(metrics["latency_counts"])
        return {"sent": told(self.sent), "outcome": outcome, "seen": seen.copy(), "metrics": metrics}

    async def _ask(self, method: str) -> Load:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": "/x",
            "raw_path": b"/x",
            "root_path": "",
            "query_string": b"a=7",
            "headers": [(b"host", b"h")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "extensions": {"daskserve": {"request_id": "an-id", "route": "/r"}},
        }
        envelope = Envelope(EnvelopeKind.HTTP, scope, has_body=False)

        async def receive() -> Message:
            raise AssertionError("there is no body")

        async def send(message: Message) -> None:
            self.sent.append(message)

        return await self.here.request(ADDRESS, envelope, receive, send)

    async def _interrupt(self, by: str, asking: asyncio.Task[Load]) -> None:
        if by == "client":
            asking.cancel()
        elif by == "connection":
            self.here.close()
        elif by == "stop":
            self.stopping = asyncio.create_task(self.replica.stop(0))
        if by != "stop":
            # The replica is told before code that cannot be stopped ends by itself.
            await until(lambda: self.replica._metrics.cancelled or not self.replica.load().ongoing)


def told(messages: list[Message]) -> list[Any]:
    """Return a response as a client has it: however it was cut into messages."""
    parts: list[Any] = []
    for message in messages:
        if message["type"] in (WHOLE_RESPONSE, "http.response.start"):
            parts.append((message["status"], [tuple(each) for each in message["headers"]]))
        body = re.sub(rb"0x[0-9a-f]+", b"0x", bytes(message.get("body", b"")))
        if parts and parts[-1][0] == message["type"] == "http.response.body":
            body = parts.pop()[1] + body
        parts.append((message["type"], body, message.get("more_body", False)))
    return parts


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what user code does has no event here
        await asyncio.sleep(0.001)


def outcome_of(
    function: Any, is_taskless: bool, method: str = "GET", interrupt: str = "", **options: Any
) -> dict[str, Any]:
    began.clear()
    may_end.clear()
    seen.clear()

    async def main() -> dict[str, Any]:
        async with asyncio.timeout(DEADLINE_S):
            return await Play(function, is_taskless, options).play(method, interrupt)

    return asyncio.run(main())


@pytest.mark.parametrize("function", [*WHOLE, *FAILING, *STREAMS, *LATER, *LISTENING])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_request_comes_to_the_same(function: Any, method: str) -> None:
    by_task, taskless = (outcome_of(function, way, method) for way in (False, True))
    assert taskless == by_task
    assert by_task["metrics"]["handled_total"] == by_task["metrics"]["latency_counts"] == 1


@pytest.mark.parametrize("event_loop", ["own", "worker"])
def test_the_body_that_is_not_there_is_received_once(event_loop: str) -> None:
    ways_of = {
        listen_behind_the_start: (False, event_loop == "own"),
        listen_from_a_thread: (False, True),
    }
    for function, ways in ways_of.items():
        for way in ways:
            (_, *parts) = outcome_of(function, way, event_loop=event_loop)["sent"]
            assert parts[-1][1] == b"http.request []"
    outcome = outcome_of(listening_app, False, event_loop=event_loop)
    assert outcome["sent"][-1][1] == b"http.request []"


@pytest.mark.parametrize("function", [fail, no_json, fail_later, fail_at_first, failing_awaitable])
def test_so_it_does_where_errors_are_told(function: Any) -> None:
    assert outcome_of(function, True, debug=True) == outcome_of(function, False, debug=True)


@pytest.mark.parametrize(
    "function",
    [plain_text, no_argument, redirect, generate, fail_at_first, fail_later, awaitable, failing_awaitable],
)
def test_so_does_plain_code_beside_the_workers_loop(function: Any) -> None:
    by_task, taskless = (outcome_of(function, way, event_loop="worker") for way in (False, True))
    assert taskless == by_task


@pytest.mark.parametrize("interrupt", ["client", "connection"])
def test_a_background_task_survives_a_client_that_has_its_response(interrupt: str) -> None:
    by_task, taskless = (
        outcome_of(work_in_background, way, interrupt=f"{interrupt} stream") for way in (False, True)
    )
    assert taskless == by_task
    assert by_task["seen"] == ["ended"]


@pytest.mark.parametrize(
    ("function", "interrupt"),
    [
        (function, interrupt)
        for function in (*HANGING, *HANGING_LATER)
        for interrupt in ("client", "connection", "stop")
        if function is not hang_in_background or interrupt == "stop"
    ],
)
def test_so_does_what_is_ended_from_outside(function: Any, interrupt: str) -> None:
    if "stream" in function.__name__ or "generator" in function.__name__ or "background" in function.__name__:
        interrupt += " stream"
    by_task, taskless = (outcome_of(function, way, interrupt=interrupt) for way in (False, True))
    assert taskless == by_task
    assert by_task["metrics"]["handled_total"] == by_task["metrics"]["latency_counts"] == 1
