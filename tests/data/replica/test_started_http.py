"""HTTP requests that a replica answers without a task: how they end, and go on in a task."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from started_requests import DEADLINE_S, Answers, began, held, run_replica, until

from daskserve.common.types import DONE, WHOLE_RESPONSE, Envelope, EnvelopeKind, Load, Message
from daskserve.data.replica.execution.message_pipe import MessagePipe
from daskserve.data.replica.replica import Replica
from daskserve.data.replica.requests.replica_request import ReplicaRequest
from daskserve.errors import ActorLostError

pytestmark = pytest.mark.smoke


async def quick(request: Request) -> str:
    assert await request.body() == b""
    return f"{request.method} {request.query_params['a']}"


def plain(request: Any) -> str:
    return f"{request.method} {request.query_params['a']} {len(request.body_bytes)}"


async def by_response(request: Request) -> JSONResponse:
    return JSONResponse({"a": 1}, status_code=201)


async def fail(request: Request) -> str:
    raise KeyError("no")


async def stream(request: Request) -> StreamingResponse:
    async def parts() -> AsyncIterator[str]:
        yield "a"
        await request.is_disconnected()
        yield "b"

    return StreamingResponse(parts())


def generate(request: Any) -> Iterator[str]:
    yield "a"
    yield "b"


async def two_steps(request: Request) -> Any:
    async def later() -> str:
        return "later"

    return later()


async def held_stream(request: Request) -> StreamingResponse:
    async def parts() -> AsyncIterator[str]:
        yield "a"
        began.set()
        await asyncio.Event().wait()

    return StreamingResponse(parts())


async def hang(request: Request) -> str:
    began.set()
    await asyncio.Event().wait()
    return "never"


def hang_in_thread(request: Any) -> str:
    began.set()
    held.wait(DEADLINE_S)
    return "late"


async def listen(request: Request) -> str:
    """Return the empty body, and then wait until the client disconnects."""
    first = await request.receive()
    reading = asyncio.ensure_future(request.receive())
    await asyncio.sleep(0.01)
    return f"{first['type']} {reading.done()}"


async def listen_while_streaming(request: Request) -> StreamingResponse:
    """Begin to listen for the end of the client before there is anything to listen to."""
    await request.receive()
    reading = asyncio.ensure_future(request.receive())
    await asyncio.sleep(0.01)

    async def parts() -> AsyncIterator[str]:
        yield (await reading)["type"]

    return StreamingResponse(parts())


async def wait_for_the_client(request: Request) -> str:
    await request.receive()
    began.set()
    try:
        await request.receive()
    except asyncio.CancelledError:
        held.set()
        raise
    return "told"


def get(**changes: Any) -> Envelope:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": "GET",
        "path": "/x",
        "root_path": "",
        "query_string": b"a=7",
        "headers": ((b"host", b"h"),),
        **changes,
    }
    return Envelope(EnvelopeKind.HTTP, scope, has_body=False)


def run(function: Any, scenario: Callable[[Replica], Awaitable[None]], **options: Any) -> None:
    run_replica(function, get(), scenario, **options)


@pytest.mark.parametrize(
    ("function", "status", "body"),
    [
        (quick, 200, b"GET 7"),
        (plain, 200, b"GET 7 0"),
        (by_response, 201, b'{"a":1}'),
        (fail, 500, None),
        (listen, 200, b"http.request False"),
    ],
)
def test_a_whole_response_comes_with_the_load_after_it(function: Any, status: int, body: Any) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        assert replica.handle(get()).start(answers) is not None
        assert replica.load() == Load(1, 0)
        message, load = await answers.end()
        assert message is not None
        assert (message["type"], message["status"]) == (WHOLE_RESPONSE, status)
        assert body is None or message["body"] == body
        assert load == replica.load() == Load(0, 0)
        metrics = await replica.statistics()
        assert (metrics["handled_total"], metrics["failed_total"]) == (1, int(status == 500))

    run(function, scenario)


async def carry(rest: Any) -> tuple[list[Message], Load]:
    """Have a task respond to the rest of a request; return what it sends."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    def send(message: Message) -> Awaitable[None]:
        sent.append(message)
        return DONE

    return sent, await rest.respond(receive, send)


@pytest.mark.parametrize(
    ("function", "body"),
    [
        (stream, b"ab"),
        (generate, b"ab"),
        (two_steps, b"later"),
        (listen_while_streaming, b"http.disconnect"),
    ],
)
def test_what_needs_more_goes_on_in_a_task_and_keeps_its_slot_until_then(function: Any, body: bytes) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        assert replica.handle(get()).start(answers) is not None
        message, rest = await answers.end()
        assert message is None
        assert replica.load() == Load(1, 0)
        sent, load = await carry(rest)
        assert b"".join(each.get("body", b"") for each in sent) == body
        assert load == replica.load() == Load(0, 0)
        rest.leave()
        assert replica.load() == Load(0, 0)
        metrics = await replica.statistics()
        assert (metrics["handled_total"], metrics["cancelled_total"]) == (1, 0)

    run(function, scenario)


def test_a_rest_whose_task_never_runs_is_let_go() -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        replica.handle(get()).start(answers)
        _, rest = await answers.end()
        assert replica.load() == Load(1, 0)
        rest.leave()
        rest.leave()
        assert replica.load() == Load(0, 0)
        assert (await replica.statistics())["cancelled_total"] == 1

    run(stream, scenario)


def test_a_rest_that_is_cancelled_ends_its_code() -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        replica.handle(get()).start(answers)
        _, rest = await answers.end()
        carrying = asyncio.ensure_future(carry(rest))
        await until(began.is_set)
        carrying.cancel()
        await asyncio.wait([carrying])
        await until(lambda: replica.load() == Load(0, 0))
        assert (await replica.statistics())["cancelled_total"] == 1

    run(held_stream, scenario)


@pytest.mark.parametrize("function", [hang, hang_in_thread])
def test_what_is_given_up_tells_nobody_and_keeps_its_slot_until_its_code_ends(function: Any) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        give_up = replica.handle(get()).start(answers)
        assert give_up is not None
        await until(began.is_set)
        give_up()
        give_up()
        if function is hang_in_thread:
            assert replica.load().ongoing == 1
        held.set()
        await until(lambda: replica.load().ongoing == 0)
        assert answers.ends == []
        assert (await replica.statistics())["cancelled_total"] == 1

    run(function, scenario)


@pytest.mark.parametrize("function", [quick, plain, fail, stream])
def test_nothing_of_a_request_is_left_for_the_garbage_collector(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps all log records, and so the frames of their exceptions.
    monkeypatch.setattr(logging.getLogger("daskserve.replica"), "filters", [lambda record: False])

    async def scenario(replica: Replica) -> None:
        for _ in range(3):
            answers = Answers()
            replica.handle(get()).start(answers)
            _, outcome = await answers.end()
            if function is stream:
                await carry(outcome)
            answers.ends.clear()
            del outcome

        def left() -> list[Any]:
            return [each for each in gc.get_objects() if isinstance(each, (ReplicaRequest, MessagePipe))]

        # A thread that packs an error holds its request for a moment more; a cycle would hold it for ever.
        deadline = asyncio.get_running_loop().time() + 5
        while left() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert left() == []

    gc.collect()
    gc.disable()
    try:
        run(function, scenario)
    finally:
        gc.enable()


def test_code_that_waits_for_the_end_of_its_client_is_cancelled_and_not_told() -> None:
    """A cancellation is reported as it is in a task."""

    async def scenario(replica: Replica) -> None:
        give_up = replica.handle(get()).start(Answers())
        assert give_up is not None
        await until(began.is_set)
        give_up()
        await until(held.is_set)

    run(wait_for_the_client, scenario)


def test_a_replica_that_stops_ends_its_requests() -> None:
    answers = Answers()

    async def scenario(replica: Replica) -> None:
        replica.handle(get()).start(answers)
        await until(began.is_set)
        await replica.stop(0)
        message, error = await answers.end()
        assert message is None
        assert isinstance(error, ActorLostError)

    run(hang, scenario)


def test_it_takes_only_what_has_to_wait_for_nothing() -> None:
    async def scenario(replica: Replica) -> None:
        with_body = get(method="POST")
        with_body.has_body = True
        for refused in (with_body, get(type="websocket")):
            assert replica.handle(refused).start(Answers()) is None
        answers = [Answers(), Answers()]
        for each in answers:
            assert replica.handle(get()).start(each) is not None
        assert replica.handle(get()).start(Answers()) is None  # it is full
        held.set()
        for each in answers:
            await each.end()

    run(hang_in_thread, scenario)


def test_neither_code_on_the_workers_loop_nor_named_methods_go_that_way() -> None:
    async def scenario(replica: Replica) -> None:
        assert replica.handle(get()).start(Answers()) is None

    run(quick, scenario, event_loop="worker")
    run(quick, scenario, method_header=True)
