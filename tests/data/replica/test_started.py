"""Requests that a replica answers without a task: how they end, or continue in a task."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from replica_harness import make, until
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from daskserve.common.types import DONE, WHOLE_RESPONSE, ActorRequest, Envelope, EnvelopeKind, Load, Message
from daskserve.data.replica.execution.message_pipe import MessagePipe
from daskserve.data.replica.execution.user_threads import UserThreads
from daskserve.data.replica.replica import Replica
from daskserve.data.replica.requests.replica_request import ReplicaRequest
from daskserve.errors import ActorLostError, UserCodeError
from daskserve.payload import pickling
from daskserve.payload.packed_errors import PackedError

pytestmark = pytest.mark.smoke

DEADLINE_S = 10.0
#: The events with which hanging user code reports its begin and waits for its end.
held, began = threading.Event(), threading.Event()


class Answers:
    """Receives the outcome of one request."""

    def __init__(self) -> None:
        self.ends: list[tuple[Message | None, Any]] = []

    def __call__(self, message: Message | None, outcome: Load | Exception | ActorRequest) -> None:
        self.ends.append((message, outcome))

    async def end(self) -> tuple[Message | None, Any]:
        await until(lambda: self.ends)
        (only,) = self.ends
        return only


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
    """Begin to wait for the client's disconnect before the response begins."""
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


class Backend:
    """Answers calls."""

    def __call__(self, request: Any) -> Any:
        return request

    def plain(self, value: Any) -> Any:
        return value

    async def coroutine(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    def awaitable(self, value: Any) -> Awaitable[Any]:
        return self.coroutine(value)

    def fail(self, value: Any) -> Any:
        raise KeyError(value)

    async def cancel_itself(self, value: Any) -> Any:
        raise asyncio.CancelledError

    def hang(self, value: Any) -> Any:
        hang_in_thread(value)

    async def sleep(self, value: Any) -> Any:
        await hang(value)


def call(method: str, **head: Any) -> Envelope:
    return Envelope(EnvelopeKind.CALL, {"method": method, **head}, pickling.dump(((7,), {})))


def run(
    definition: Any, scenario: Callable[[Replica], Awaitable[None]], place: str = "thread", **options: Any
) -> None:
    """Start a replica, run the scenario, and check that it leaves nothing behind.

    No request is answered before the replica has started, or once it has stopped.
    """
    envelope = call("plain") if definition is Backend else get()
    held.clear()
    began.clear()

    async def main() -> None:
        replica = make(definition, place=place, concurrency=2, **options)
        with pytest.raises(ActorLostError):
            replica.handle(envelope)
        async with asyncio.timeout(DEADLINE_S):
            await replica.start()
            try:
                await scenario(replica)
            finally:
                held.set()
                await replica.stop(DEADLINE_S)
        assert replica.handle(envelope).start(Answers()) is None
        assert replica.load() == Load(0, 0)

    asyncio.run(main())


places = pytest.mark.parametrize("place", ["thread", "worker"])

# ---- answers


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


@places
@pytest.mark.parametrize("method", ["plain", "coroutine", "awaitable"])
def test_the_result_of_a_call_comes_with_the_load_after_it(method: str, place: str) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        give_up = replica.handle(call(method)).start(answers)
        assert give_up is not None
        assert replica.load() == Load(1, 0)
        message, load = await answers.end()
        assert message is not None
        assert message["payload"].load() == 7
        assert load == replica.load() == Load(0, 0)
        give_up()  # has no effect any more
        assert len(answers.ends) == 1
        assert replica.load() == Load(0, 0)

    run(Backend, scenario, place)


@places
@pytest.mark.parametrize(("method", "kind"), [("fail", KeyError), ("cancel_itself", UserCodeError)])
def test_errors_are_outcomes(method: str, kind: type[Exception], place: str) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        replica.handle(call(method)).start(answers)
        message, error = await answers.end()
        assert message is None
        assert isinstance(error, PackedError)
        assert isinstance(error.load(), kind)
        assert replica.load() == Load(0, 0)

    run(Backend, scenario, place)


# ---- what needs more


async def carry(rest: Any) -> tuple[list[Message], Load]:
    """Let a task send the rest of a response; return the messages."""
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
def test_a_request_with_another_step_continues_in_a_task_and_keeps_its_slot(
    function: Any, body: bytes
) -> None:
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


# ---- other ends


@pytest.mark.parametrize(
    ("definition", "envelope", "place"),
    [
        (hang, get(), "thread"),
        (hang_in_thread, get(), "thread"),
        (Backend, call("sleep"), "thread"),
        (Backend, call("sleep"), "worker"),
        (Backend, call("hang"), "thread"),
    ],
)
def test_a_request_that_is_given_up_has_no_answer_and_keeps_its_slot_until_its_code_ends(
    definition: Any, envelope: Envelope, place: str
) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        give_up = replica.handle(envelope).start(answers)
        assert give_up is not None
        await until(began.is_set)
        give_up()
        give_up()
        if definition is hang_in_thread or envelope.head.get("method") == "hang":
            assert replica.load().ongoing == 1
        held.set()
        await until(lambda: replica.load().ongoing == 0)
        give_up()
        assert answers.ends == []
        assert (await replica.statistics())["cancelled_total"] == 1

    run(definition, scenario, place)


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

        # A thread that packs an error refers to its request for a moment longer; a cycle would keep it for
        # ever.
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


def test_code_that_waits_for_the_end_of_its_client_is_cancelled_and_gets_no_disconnect() -> None:
    """A cancellation is reported as it is in a task."""

    async def scenario(replica: Replica) -> None:
        give_up = replica.handle(get()).start(Answers())
        assert give_up is not None
        await until(began.is_set)
        give_up()
        await until(held.is_set)

    run(wait_for_the_client, scenario)


def test_neither_code_on_the_workers_loop_nor_named_methods_go_that_way() -> None:
    async def scenario(replica: Replica) -> None:
        assert replica.handle(get()).start(Answers()) is None

    run(quick, scenario, "worker")
    run(quick, scenario, method_header=True)


@pytest.mark.parametrize(
    ("definition", "envelope", "place"),
    [
        (hang, get(), "thread"),
        (Backend, call("sleep"), "thread"),
        (Backend, call("sleep"), "worker"),
    ],
)
def test_a_replica_that_stops_ends_its_requests(definition: Any, envelope: Envelope, place: str) -> None:
    async def scenario(replica: Replica) -> None:
        answers = Answers()
        replica.handle(envelope).start(answers)
        await until(began.is_set)
        await replica.stop(0)
        message, error = await answers.end()
        assert message is None
        assert isinstance(error, ActorLostError)

    run(definition, scenario, place)


def with_body() -> Envelope:
    envelope = get(method="POST")
    envelope.has_body = True
    return envelope


@pytest.mark.parametrize(
    ("definition", "envelope", "others"),
    [
        (hang_in_thread, get(), [with_body(), get(type="websocket")]),
        (Backend, call("hang"), [call("plain", stream=True), call("unknown")]),
    ],
)
def test_requests_that_may_have_to_wait_need_a_task(
    definition: Any, envelope: Envelope, others: list[Envelope]
) -> None:
    async def scenario(replica: Replica) -> None:
        assert [replica.handle(each).start(Answers()) for each in others] == [None, None]
        answers = [Answers(), Answers()]
        for each in answers:
            assert replica.handle(envelope).start(each) is not None
        assert replica.handle(envelope).start(Answers()) is None  # it is full
        assert replica.load().ongoing == 2
        held.set()
        for each in answers:
            await each.end()

    run(definition, scenario)


def test_a_call_that_cannot_be_started_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    async def scenario(replica: Replica) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(UserThreads, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                replica.handle(call("plain")).start(Answers())
        assert replica.load() == Load(0, 0)

    run(Backend, scenario)
