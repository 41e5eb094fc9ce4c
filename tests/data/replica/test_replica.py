"""A replica from start to stop: the actions of user code, and their effects on callers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
from anyio.to_thread import current_default_thread_limiter
from gates import Gates, anew_for_each_test
from replica_harness import Reply, body_messages, http, make, our_threads, replica_of, scope, until
from replica_harness import call as call_method
from replica_starts import reconfiguration, replica_start
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from daskserve import context as serve_context
from daskserve import metrics
from daskserve.common.types import Envelope, EnvelopeKind, Load, Message
from daskserve.data.batching.decorator import batch
from daskserve.data.replica.execution.message_pipe import WINDOW
from daskserve.data.replica.replica import Replica
from daskserve.data.replica.requests.accept_batch import accept_batch
from daskserve.errors import (
    ActorLostError,
    CodeLoadError,
    ReplicaBusyError,
    ReplicaStartError,
    ServeError,
    UnavailableError,
    UserCodeError,
)
from daskserve.payload import packed_errors, pickling
from daskserve.telemetry.histogram import HistogramCounts

DEADLINE_S = 10.0


class SharedGates(Gates):
    """Values and events that user code and the test share."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Semaphore(0)
        self.notes: list[Any] = []
        self.objects: list[Any] = []


GATES = SharedGates()
_fresh_gates = anew_for_each_test(GATES)


def run(scenario: Callable[[Replica], Awaitable[None]], definition: Any, *args: Any, **options: Any) -> None:
    """Start a replica, run the scenario, stop the replica, and check that it leaves nothing behind."""

    async def main() -> None:
        replica = make(definition, *args, **options)
        async with asyncio.timeout(DEADLINE_S):
            await replica.start()
            try:
                await scenario(replica)
            finally:
                GATES.go.set()
                await replica.stop(DEADLINE_S)
        assert replica.load() == Load(0, 0)
        assert our_threads() == []

    asyncio.run(main())


async def call(replica: Replica, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
    return await call_method(replica, method, *args, **kwargs)


async def begun(count: int = 1) -> None:
    """Return once user code has begun that often."""
    for _ in range(count):
        await until(lambda: GATES.began.acquire(blocking=False))


# ---- user code of all kinds


def where() -> str:
    return threading.current_thread().name


def plain(request: Any) -> str:
    return f"{where()} {request.query_params.get('n')}"


async def coroutine(request: Any) -> str:
    return f"{where()} {request.query_params.get('n')}"


def held(request: Any = None) -> str:
    GATES.began.release()
    GATES.go.wait(DEADLINE_S)
    return "held"


async def held_async(request: Any = None) -> str:
    GATES.began.release()
    try:
        await until(GATES.go.is_set)
    except asyncio.CancelledError:
        GATES.notes.append("cancelled")
        raise
    return "held"


class Model:
    def __init__(self, word: str = "word") -> None:
        self.word = word
        GATES.notes.append(("init", where(), serve_context.get_current_replica_tag()))

    def reconfigure(self, config: Any) -> None:
        if config == "bad":
            raise ValueError("bad config")
        self.word = config
        GATES.notes.append(("reconfigure", where(), serve_context.get_current_replica_tag()))

    def __call__(self, request: Any) -> str:
        return self.word

    async def shout(self, text: str) -> str:
        return text.upper()

    def _secret(self) -> None: ...

    def __del__(self) -> None:
        GATES.notes.append(("del", where()))


class AsyncModel:
    async def __init__(self, word: str = "word") -> None:  # type: ignore[misc]
        self.word = word
        self.lock_loop = asyncio.get_running_loop()
        GATES.notes.append(("init", where()))

    async def reconfigure(self, config: Any) -> None:
        self.word = config

    async def __call__(self, request: Any) -> str:
        assert asyncio.get_running_loop() is self.lock_loop
        return self.word

    async def __del__(self) -> None:
        GATES.notes.append(("del", where()))


# ---- start


def test_user_code_is_constructed_off_the_workers_loop_and_knows_its_replica() -> None:
    async def scenario(replica: Replica) -> None:
        init, reconfigure = GATES.notes
        for name, thread, tag in (init, reconfigure):
            assert thread.startswith("daskserve-b#AAAAAA"), name
            assert tag == "b#AAAAAA"
        assert await call(replica) == "configured"

    run(scenario, Model, "word", user_config="configured")
    assert GATES.notes[-1][0] == "del"
    assert GATES.notes[-1][1].startswith("daskserve-b#AAAAAA")


@pytest.mark.parametrize("event_loop", ["own", "worker"])
def test_an_async_class_lives_on_one_loop_from_constructor_to_destructor(event_loop: str) -> None:
    async def scenario(replica: Replica) -> None:
        assert await call(replica) == "configured"
        assert (await http(replica)).body == b"configured"

    run(scenario, AsyncModel, user_config="configured", event_loop=event_loop)
    assert [note[0] for note in GATES.notes] == ["init", "del"]
    thread = "daskserve-b#AAAAAA" if event_loop == "own" else threading.main_thread().name
    assert [note[1] for note in GATES.notes] == [thread] * 2


class Configured:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def reconfigure(self, config: Any) -> None:
        self.calls.append(config)
        if config == "bad":
            raise ValueError("bad config")

    def __call__(self) -> list[Any]:
        return self.calls


def test_reconfigure_is_called_once_for_each_change() -> None:
    async def scenario(replica: Replica) -> None:
        for config in ("first", "first", "second", "second"):
            await replica.reconfigure(**reconfiguration(user_config=pickling.dump_bytes(config)))
        for _ in range(2):
            with pytest.raises(ReplicaStartError, match="bad config"):
                await replica.reconfigure(**reconfiguration(user_config=pickling.dump_bytes("bad")))
        await replica.reconfigure(**reconfiguration(user_config=pickling.dump_bytes("second")))
        assert await call(replica) == ["first", "second", "bad", "bad", "second"]

    run(scenario, Configured, user_config="first")


class SlowToReconfigure:
    def reconfigure(self, config: Any) -> None:
        held()

    def __call__(self) -> None: ...


class TwoFields:
    """Applies a config in two parts, with a pause in between."""

    def __init__(self) -> None:
        self.first = self.second = "old"

    async def reconfigure(self, config: str) -> None:
        self.first = config
        await asyncio.sleep(0.02)
        self.second = config

    async def __call__(self) -> tuple[str, str]:
        first = self.first
        await asyncio.sleep(0.01)
        return first, self.second


def test_no_request_sees_half_of_a_reconfiguration() -> None:
    """Running requests end first. Later ones are refused at once, so that routers choose other replicas."""

    async def scenario(replica: Replica) -> None:
        running = asyncio.create_task(call(replica))
        await asyncio.sleep(0)
        message = reconfiguration(user_config=pickling.dump_bytes("new"))
        reconfiguring = asyncio.create_task(replica.reconfigure(**message, patience_s=5.0))
        await asyncio.sleep(0)
        with pytest.raises(ReplicaBusyError):
            await call(replica)
        assert not reconfiguring.done()
        assert await running == ("old", "old")
        await reconfiguring
        assert await call(replica) == ("new", "new")

    run(scenario, TwoFields)


class HeldWhileConfigured(Configured):
    def __call__(self) -> list[Any]:
        held()
        return self.calls


def test_a_reconfiguration_waits_no_longer_than_it_should_and_a_failed_one_ends_the_pause() -> None:
    async def scenario(replica: Replica) -> None:
        running = asyncio.create_task(call(replica))
        await begun()
        for config in ("bad", "good"):
            message = reconfiguration(user_config=pickling.dump_bytes(config))
            with pytest.raises(ReplicaStartError) if config == "bad" else nullcontext():
                await replica.reconfigure(**message, patience_s=0.01)
        assert not running.done()
        GATES.go.set()
        await running
        assert await call(replica) == ["bad", "good"]

    run(scenario, HeldWhileConfigured)


def test_the_health_of_a_replica_says_that_reconfigure_runs() -> None:
    async def scenario(replica: Replica) -> None:
        message = reconfiguration(user_config=pickling.dump_bytes("new"))
        reconfiguring = asyncio.create_task(replica.reconfigure(**message))
        await begun()
        what, for_s = replica.health()["busy"]
        assert (what, for_s >= 0) == ("running reconfigure()", True)
        GATES.go.set()
        await reconfiguring
        assert "busy" not in replica.health()

    run(scenario, SlowToReconfigure)


class Broken:
    def __init__(self) -> None:
        raise ZeroDivisionError("in the constructor")

    def __call__(self) -> None: ...


class Quits(Broken):
    def __init__(self) -> None:
        raise SystemExit(3)


class MuteError(Exception):
    def __str__(self) -> str:
        return 402  # type: ignore[return-value]


class Mute:
    fails = "init"

    def __init__(self) -> None:
        self.fail("init")

    def fail(self, hook: str) -> None:
        if hook == self.fails:
            raise MuteError

    def reconfigure(self, config: Any) -> None:
        self.fail("reconfigure")

    def check_health(self) -> None:
        self.fail("check_health")

    def __call__(self) -> None: ...


class MuteReconfigure(Mute):
    fails = "reconfigure"

    def __del__(self) -> None:
        raise MuteError


class MuteCheck(MuteReconfigure):
    fails = "check_health"


@asynccontextmanager
async def broken_lifespan(app: Any) -> AsyncIterator[None]:
    raise LookupError("no database")
    yield


class BrokenAsync(Broken):
    async def __init__(self) -> None:  # type: ignore[misc]
        raise ZeroDivisionError("in the constructor")


@pytest.mark.parametrize(
    ("definition", "options", "texts"),
    [
        (Broken, {}, ["'b' failed in its constructor: ZeroDivisionError: in the constructor"]),
        (BrokenAsync, {}, ["'b' failed in its constructor: ZeroDivisionError: in the constructor"]),
        (Quits, {}, ["failed in its constructor", "SystemExit: 3"]),
        (Starlette(lifespan=broken_lifespan), {}, ["'b' failed in its lifespan: LookupError: no database"]),
        (Mute, {}, ["failed in its constructor: MuteError: <its text cannot be made: TypeError>"]),
        (MuteReconfigure, {"user_config": 1}, ["failed in reconfigure(): MuteError: <its text cannot"]),
        (MuteCheck, {}, ["failed its first health check", "'b' raised MuteError: <its text cannot be"]),
        ("absent_module.Name", {}, ["could not be loaded", "there is no module 'absent_module'"]),
        (Model, {"user_config": "bad"}, [r"failed in reconfigure(): ValueError: bad config"]),
        (plain, {"user_config": 1}, ["failed in reconfigure()", "has no reconfigure() method"]),
        (plain, {"max_batch_size": 2}, ["max_batch_size is 2", "@accept_batch"]),
    ],
)
def test_a_failed_start_reports_where_and_why_and_cleans_up(
    definition: Any, options: dict[str, Any], texts: list[str]
) -> None:
    async def main() -> None:
        replica = make(definition, **options)
        with pytest.raises(ReplicaStartError) as caught:
            await replica.start()
        for text in texts:
            assert text in str(caught.value)
        assert our_threads() == []
        with pytest.raises(ActorLostError):
            await call(replica)
        await replica.stop(1)

    asyncio.run(main())


CODE = pickling.dump_bytes((Model, (), {}))


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b"garbage",
        CODE[: len(CODE) // 2],
        pickling.dump_bytes("one value only"),
        b"\x80\x63",  # the pickle protocol of a later Python
        b"cno_such_module_of_ours\nModel\n.",
    ],
    ids=["empty", "garbage", "cut off", "something else", "newer", "not importable"],
)
def test_code_that_cannot_be_loaded_is_distinguished_from_user_code_that_fails(code: bytes) -> None:
    async def main() -> None:
        replica = replica_of(replace(replica_start(Model, concurrency=1), code=code))
        with pytest.raises(CodeLoadError, match="'b' could not be loaded: "):
            await replica.start()
        await replica.stop(1)

    asyncio.run(main())


def test_a_failed_start_carries_the_users_traceback() -> None:
    async def main() -> None:
        with pytest.raises(ReplicaStartError) as caught:
            await make(Broken).start()
        text = caught.value.user_traceback
        assert "test_replica.py" in text
        assert text.rstrip().endswith("ZeroDivisionError: in the constructor")
        assert "daskserve/data/replica/execution/executor.py" not in text
        copy = packed_errors.load_error(packed_errors.dump_error(caught.value))
        assert isinstance(copy, ReplicaStartError)
        assert copy.user_traceback == text

    asyncio.run(main())


class SlowToStart:
    async def __init__(self) -> None:  # type: ignore[misc]
        GATES.began.release()
        await asyncio.get_running_loop().create_future()

    def __call__(self) -> None: ...


def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    async def main() -> None:
        replica = make(SlowToStart)
        assert replica.stage() == ("loading its code", 0.0)
        starting = asyncio.create_task(replica.start())
        await begun()
        assert replica.stage() == ("running its constructor", 0.0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert our_threads() == []

    asyncio.run(main())


# ---- HTTP


@pytest.mark.parametrize("event_loop", ["own", "worker"])
@pytest.mark.parametrize("definition", [plain, coroutine])
def test_a_plain_callable_gets_a_request_and_its_result_is_a_response(
    definition: Any, event_loop: str
) -> None:
    async def scenario(replica: Replica) -> None:
        reply = await http(replica, query=b"n=7")
        thread, number = reply.body.decode().split()
        assert number == "7"
        on_worker = event_loop == "worker" and definition is coroutine
        assert thread.startswith("daskserve-") is not on_worker
        assert (reply.status, reply.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        assert reply.load == Load(0, 0)

    run(scenario, definition, event_loop=event_loop)


def plain_routes() -> Starlette:
    return Starlette(routes=[Route("/", held_response)])


def held_response(request: Request) -> PlainTextResponse:
    return PlainTextResponse(held())


def thread_limit() -> Starlette:
    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(current_default_thread_limiter().total_tokens))

    return Starlette(routes=[Route("/", answer)])


@pytest.mark.parametrize("event_loop", ["own", "worker"])
def test_plain_routes_of_an_application_run_as_many_at_once_as_there_are_slots(event_loop: str) -> None:
    async def scenario(replica: Replica) -> None:
        running = [asyncio.create_task(http(replica)) for _ in range(60)]
        await begun(60)
        GATES.go.set()
        assert {(await each).body for each in running} == {b"held"}

    run(scenario, plain_routes(), concurrency=60, event_loop=event_loop)


@pytest.mark.parametrize("event_loop", ["own", "worker"])
def test_the_threads_of_an_application_follow_its_slots(event_loop: str) -> None:
    async def scenario(replica: Replica) -> None:
        assert (await http(replica)).body == b"50"
        await replica.reconfigure(**reconfiguration(concurrency=200))
        assert (await http(replica)).body == b"240"

    run(scenario, thread_limit(), concurrency=10, event_loop=event_loop)


def no_parameters() -> None:
    return None


def test_a_callable_without_parameters_is_called_without() -> None:
    async def scenario(replica: Replica) -> None:
        reply = await http(replica)
        assert (reply.status, reply.body, reply.headers["content-type"]) == (200, b"", "text/plain")

    run(scenario, no_parameters)


def read_plain(request: Any) -> bytes:
    return bytes(request.body_bytes)


async def read_async(request: Any) -> bytes:
    return bytes(await request.body())


async def read_stream(request: Any) -> bytes:
    return b"".join([chunk async for chunk in request.stream()])


@pytest.mark.parametrize("event_loop", ["own", "worker"])
@pytest.mark.parametrize("definition", [read_plain, read_async, read_stream])
@pytest.mark.parametrize("chunks", [(b"",), (b"whole",), tuple(b"%d," % n for n in range(5 * WINDOW))])
def test_every_callable_can_read_the_body(
    definition: Any, event_loop: str, chunks: tuple[bytes, ...]
) -> None:
    async def scenario(replica: Replica) -> None:
        assert (await http(replica, *chunks, method="POST")).body == b"".join(chunks)

    run(scenario, definition, event_loop=event_loop)


def json_in_a_thread(request: Any) -> Any:
    return request.json()["a"]


async def json_on_a_loop(request: Any) -> Any:
    return (await request.json())["a"]


def json_by_a_wrapper(request: Any) -> Any:
    return json_on_a_loop(request)  # a coroutine, which the loop awaits


def json_on_a_loop_of_its_own(request: Any) -> Any:
    return asyncio.run(json_on_a_loop(request))


@accept_batch
def json_in_a_batch(requests: list[Any]) -> list[Any]:
    return [request.json()["a"] for request in requests]


def json_in_a_generator(request: Any) -> Iterator[str]:
    yield str(request.json()["a"])


@pytest.mark.parametrize("event_loop", ["own", "worker"])
@pytest.mark.parametrize(
    "definition",
    [
        json_in_a_thread,
        json_on_a_loop,
        json_by_a_wrapper,
        json_on_a_loop_of_its_own,
        json_in_a_batch,
        json_in_a_generator,
    ],
)
def test_plain_and_async_code_read_json_in_their_own_way(definition: Any, event_loop: str) -> None:
    async def scenario(replica: Replica) -> None:
        reply = await http(replica, b'{"a"', b": 7}", method="POST")
        assert (reply.status, reply.body) == (200, b"7")
        if definition is not json_in_a_generator:
            assert await call(replica, {"a": 7}) == 7

    run(scenario, definition, event_loop=event_loop)


def a_coroutine_that_asks(request: Any) -> Any:
    async def ask_once() -> bool:
        return bool(await request.is_disconnected())

    async def ask() -> None:
        GATES.began.release()
        while not await request.is_disconnected():  # noqa: ASYNC110 - this is what is tested
            await asyncio.sleep(0.001)
        GATES.notes.append("left")

    assert asyncio.run(ask_once()) is False
    return ask()


def test_the_coroutine_of_a_plain_function_can_ask_whether_its_client_has_left() -> None:
    async def scenario(replica: Replica) -> None:
        task = asyncio.create_task(http(replica))
        await until(lambda: GATES.began.acquire(blocking=False))
        assert GATES.notes == []
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: GATES.notes)
        assert GATES.notes == ["left"]

    run(scenario, a_coroutine_that_asks, on_disconnect="disconnect")


def ask_until_it_has_left(request: Any) -> None:
    assert request.is_disconnected() is False
    GATES.began.release()
    GATES.go.wait(DEADLINE_S)
    GATES.notes.append(request.is_disconnected())


def test_a_plain_function_can_ask_whether_its_client_has_left() -> None:
    async def scenario(replica: Replica) -> None:
        task = asyncio.create_task(http(replica))
        await until(lambda: GATES.began.acquire(blocking=False))
        task.cancel()
        await asyncio.wait([task])
        GATES.go.set()
        await until(lambda: GATES.notes)
        assert GATES.notes == [True]

    run(scenario, ask_until_it_has_left)


def test_a_plain_function_is_not_called_for_a_client_that_left_while_sending() -> None:
    async def scenario(replica: Replica) -> None:
        reply = await http(replica, messages=(*body_messages(b"a", b"")[:1], {"type": "http.disconnect"}))
        assert reply.sent == []
        assert GATES.notes == []

    run(scenario, noting)


def noting(request: Any) -> None:
    GATES.notes.append("called")


def chunks_plain(request: Any) -> Iterator[str]:
    for number in range(40):
        yield f"{number},"


async def chunks_async(request: Any) -> AsyncIterator[str]:
    for number in range(40):
        yield f"{number},"


def response_plain(request: Any) -> Response:
    return StreamingResponse(chunks_plain(None), headers={"x-key": "v"})


async def response_async(request: Any) -> Response:
    return StreamingResponse(chunks_async(None), headers={"x-key": "v"})


def awaitable(request: Any) -> Any:
    return response_async(request)


@pytest.mark.parametrize("event_loop", ["own", "worker"])
@pytest.mark.parametrize(
    "definition", [chunks_plain, chunks_async, response_plain, response_async, awaitable]
)
def test_results_may_be_streamed(definition: Any, event_loop: str) -> None:
    async def scenario(replica: Replica) -> None:
        reply = await http(replica)
        assert reply.body.decode() == "".join(f"{number}," for number in range(40))
        assert len(reply.sent) > 2  # parts that are ready together are joined
        assert reply.load == Load(0, 0)

    run(scenario, definition, event_loop=event_loop)


def mixed_chunks(request: Any) -> Iterator[Any]:
    yield "a"
    yield b"b"
    yield {"c": 1}


async def mixed_chunks_async(request: Any) -> AsyncIterator[Any]:
    for chunk in mixed_chunks(request):
        yield chunk


@pytest.mark.parametrize("definition", [mixed_chunks, mixed_chunks_async])
def test_the_items_of_a_generator_are_encoded_one_by_one(definition: Any) -> None:
    async def scenario(replica: Replica) -> None:
        reply = await http(replica)
        assert (reply.headers["content-type"], reply.body) == ("text/plain; charset=utf-8", b'ab{"c":1}')
        more = [message["more_body"] for message in reply.sent[1:]]
        assert more == [True] * (len(more) - 1) + [False]

    run(scenario, definition)


def fails(request: Any = None) -> None:
    raise KeyError("secret")


async def fails_async(request: Any = None) -> None:
    raise KeyError("secret")


async def fails_as_app(scope: Any, receive: Any, send: Any) -> None:
    raise KeyError("secret")


def fails_first(request: Any) -> Iterator[str]:
    raise KeyError("secret")
    yield


async def fails_first_async(request: Any) -> AsyncIterator[str]:
    raise KeyError("secret")
    yield


@pytest.mark.parametrize("definition", [fails, fails_async, fails_as_app, fails_first, fails_first_async])
@pytest.mark.parametrize("debug", [False, True])
def test_an_error_is_a_500_with_details_only_in_debug_mode(
    definition: Any, debug: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(replica: Replica) -> None:
        reply = await http(replica)
        assert reply.status == 500
        assert reply.headers["content-type"].startswith("text/plain")
        if debug:
            assert reply.body.startswith(b"Task Error. Traceback: ")
            assert b"KeyError: 'secret'" in reply.body
        else:
            assert reply.body == b"Internal Server Error"
        metrics = await replica.statistics()
        assert (metrics["handled_total"], metrics["failed_total"]) == (1, 1)

    with caplog.at_level(logging.ERROR, "daskserve.replica"):
        run(scenario, definition, debug=debug)
    assert "Request request-1 to b#AAAAAA failed" in caplog.text
    assert "KeyError: 'secret'" in caplog.text


def fails_late(request: Any) -> Iterator[str]:
    yield "half"
    raise KeyError("late")


async def fails_late_async(request: Any) -> AsyncIterator[str]:
    yield "half"
    raise KeyError("late")


@pytest.mark.parametrize("definition", [fails_late, fails_late_async])
def test_an_error_of_a_generator_cuts_its_response_off(
    definition: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(replica: Replica) -> None:
        with pytest.raises(packed_errors.PackedError, match="KeyError: 'late'"):
            await http(replica)
        assert replica.load() == Load(0, 0)

    run(scenario, definition)
    assert "KeyError: 'late'" in caplog.text


async def silent(scope: Any, receive: Any, send: Any) -> None: ...


def test_an_application_that_answers_nothing_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(replica: Replica) -> None:
        assert (await http(replica)).status == 500

    run(scenario, silent)
    assert "without a response" in caplog.text


async def listens_on(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        return
    await receive()
    GATES.objects.append(asyncio.create_task(receive()))  # for a disconnect, as streaming responses do
    await asyncio.sleep(0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_nothing_listens_to_the_client_once_the_request_has_been_answered() -> None:
    async def scenario(replica: Replica) -> None:
        listening = asyncio.Event()
        given_up = asyncio.Event()
        messages = body_messages(b"")

        async def receive() -> Message:
            if messages:
                return messages.pop(0)
            listening.set()
            try:
                nothing: Message = await asyncio.get_running_loop().create_future()
                return nothing
            finally:
                given_up.set()

        async def send(message: Message) -> None:
            await listening.wait()

        await replica.handle(Envelope(EnvelopeKind.HTTP, scope())).respond(receive, send)
        await given_up.wait()
        (disconnect,) = GATES.objects
        await until(disconnect.done)
        assert disconnect.result() == {"type": "http.disconnect"}

    run(scenario, listens_on)


def test_a_plain_callable_rejects_web_sockets() -> None:
    async def scenario(replica: Replica) -> None:
        reply = await http(replica, kind="websocket", messages=[{"type": "websocket.connect"}])
        assert [message["type"] for message in reply.sent] == ["websocket.close"]

    run(scenario, plain)


# ---- calls


class Unreadable:
    def __reduce__(self) -> Any:
        return fail_to_load, (threading.main_thread().name,)


def fail_to_load(main: str) -> None:
    raise LookupError(f"loaded in {where()}, not in {main}")


@pytest.mark.parametrize("definition", [plain, coroutine])
def test_arguments_are_unpickled_on_the_users_side(definition: Any) -> None:
    async def scenario(replica: Replica) -> None:
        with pytest.raises(LookupError, match="loaded in daskserve-b#AAAAAA"):
            await call(replica, Unreadable())

    run(scenario, definition)


# ---- slots


@pytest.mark.parametrize("event_loop", ["own", "worker"])
def test_a_cancelled_async_request_over_http_is_cancelled_and_frees_its_slot(event_loop: str) -> None:
    async def scenario(replica: Replica) -> None:
        request = asyncio.create_task(http(replica))
        await begun()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await until(lambda: replica.load() == Load(0, 0))
        assert GATES.notes == ["cancelled"]

    run(scenario, held_async, concurrency=1, event_loop=event_loop)


async def stream_for_ever(request: Any) -> AsyncIterator[str]:
    try:
        while True:
            GATES.began.release()
            yield "more"
            await asyncio.sleep(0)
    finally:
        GATES.notes.append("closed")


async def stream_without_a_pause(request: Any) -> AsyncIterator[str]:
    while True:
        GATES.began.release()
        yield "more"


def stream_for_ever_plain(request: Any) -> Iterator[str]:
    try:
        while True:
            GATES.began.release()
            yield "more"
    finally:
        GATES.notes.append("closed")


@pytest.mark.parametrize("definition", [stream_for_ever, stream_for_ever_plain])
def test_a_cancelled_stream_is_closed(definition: Any) -> None:
    async def scenario(replica: Replica) -> None:
        request = asyncio.create_task(http(replica))
        await begun(20)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await until(lambda: replica.load() == Load(0, 0))
        assert GATES.notes == ["closed"]

    run(scenario, definition)


def test_a_stream_that_never_pauses_is_cancelled_at_any_moment() -> None:
    """It continues, without a reader, until its cancellation reaches the loop that it occupies."""

    async def scenario(replica: Replica) -> None:
        for number in range(1, 40):
            request = asyncio.create_task(http(replica))
            await begun(number)
            request.cancel()
            await asyncio.wait([request])
            await until(lambda: replica.load() == Load(0, 0))

    run(scenario, stream_without_a_pause)


# ---- batches


@accept_batch
def double(requests: list[Any]) -> list[Any]:
    GATES.notes.append(len(requests))
    return [2 * int(request.query_params["n"]) for request in requests]


@accept_batch
def refuse(requests: list[Any]) -> list[Any]:
    raise HTTPException(418, "teapots only")


def test_an_http_error_for_a_batch_is_the_response_to_each_of_its_requests() -> None:
    async def scenario(replica: Replica) -> None:
        answers = await asyncio.gather(http(replica), http(replica))
        assert [(each.status, each.body) for each in answers] == [(418, b"teapots only")] * 2

    run(scenario, refuse, max_batch_size=2, batch_wait_timeout=60.0)


@accept_batch
async def double_async(requests: list[Any]) -> list[Any]:
    return double(requests)


@accept_batch
def one_too_few(requests: list[Any]) -> list[Any]:
    return list(requests[1:])


class BatchModel:
    @accept_batch
    def __call__(self, requests: list[Any]) -> list[Any]:
        return double(requests)

    def single(self, request: Any) -> str:
        return "single"


@pytest.mark.parametrize("definition", [double, double_async, BatchModel])
def test_requests_of_both_kinds_are_batched_together(definition: Any) -> None:
    async def scenario(replica: Replica) -> None:
        one, two, three = await asyncio.gather(
            call(replica, n=1), http(replica, query=b"n=2"), call(replica, n=3)
        )
        assert (one, two.body, three) == (2, b"4", 6)
        assert GATES.notes == [3]

    run(scenario, definition, max_batch_size=3, batch_wait_timeout=60.0)


def test_without_a_batch_size_a_marked_callable_gets_lists_of_one() -> None:
    async def scenario(replica: Replica) -> None:
        assert list(await asyncio.gather(call(replica, n=1), call(replica, n=2))) == [2, 4]
        assert GATES.notes == [1, 1]

    run(scenario, double)


def test_methods_that_are_not_marked_are_called_singly() -> None:
    async def scenario(replica: Replica) -> None:
        assert await call(replica, None, method="single") == "single"

    run(scenario, BatchModel, max_batch_size=3)


def test_a_batch_answered_wrongly_fails_all_its_requests() -> None:
    async def scenario(replica: Replica) -> None:
        outcomes: Any = await asyncio.gather(call(replica), http(replica), return_exceptions=True)
        called, answered = outcomes
        assert isinstance(called, ServeError)
        assert isinstance(answered, Reply)
        assert answered.status == 500
        assert replica.load() == Load(0, 0)

    run(scenario, one_too_few, max_batch_size=2, batch_wait_timeout=60.0)


def test_requests_that_wait_for_their_batch_are_reported_and_can_be_cancelled() -> None:
    async def scenario(replica: Replica) -> None:
        waiting = [asyncio.create_task(call(replica, n=n)) for n in range(2)]
        await until(lambda: replica.load() == Load(2, 2))
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert replica.load() == Load(1, 1)
        assert list(await asyncio.gather(call(replica, n=5), call(replica, n=6))) == [10, 12]
        assert await waiting[1] == 2
        assert GATES.notes == [3]

    run(scenario, double, max_batch_size=3, batch_wait_timeout=60.0)


@accept_batch
def held_batch(requests: list[Any]) -> list[Any]:
    held()
    return [None] * len(requests)


def test_a_cancelled_batch_keeps_its_slots_until_it_returns() -> None:
    async def scenario(replica: Replica) -> None:
        requests = [asyncio.create_task(call(replica)) for _ in range(2)]
        await begun()
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)
        await until(lambda: replica.load() == Load(2, 0))
        GATES.go.set()
        await until(lambda: replica.load() == Load(0, 0))

    run(scenario, held_batch, max_batch_size=2, batch_wait_timeout=60.0)


# ---- verbs


def test_verbs_are_those_that_can_be_called() -> None:
    replica = make(len)
    verbs = replica.verbs
    assert replica.verbs is verbs, "every call of a verb reads them"
    assert set(verbs) == {"reconfigure", "want_models", "statistics", "probe", "profile", "stacks"}
    assert all(asyncio.iscoroutinefunction(verb) for verb in verbs.values())


def test_a_kept_error_does_not_keep_the_users_object() -> None:
    kept: list[ReplicaStartError] = []

    async def scenario(replica: Replica) -> None:
        with pytest.raises(ReplicaStartError) as caught:
            await replica.reconfigure(
                **reconfiguration(user_config=pickling.dump_bytes("bad"), concurrency=9)
            )
        kept.append(caught.value)

    async def failing_start() -> None:
        with pytest.raises(ReplicaStartError) as caught:
            await make(Model, user_config="bad").start()
        kept.append(caught.value)

    run(scenario, Model)
    asyncio.run(failing_start())
    destructions = [note[1] for note in GATES.notes if note[0] == "del"]
    assert len(destructions) == 2
    assert all(thread.startswith("daskserve-b#AAAAAA") for thread in destructions)
    assert all(error.__cause__ is None and error.__context__ is None for error in kept)


def test_batching_limits_can_be_changed() -> None:
    async def scenario(replica: Replica) -> None:
        assert await call(replica, n=1) == 2
        await replica.reconfigure(
            **reconfiguration(user_config=None, concurrency=4, max_batch_size=2, batch_wait_timeout=60.0)
        )
        assert list(await asyncio.gather(call(replica, n=1), call(replica, n=2))) == [2, 4]
        assert GATES.notes == [1, 2]

    run(scenario, double)


def test_a_probe_passes_while_slots_are_busy_and_fails_when_all_are_abandoned() -> None:
    async def scenario(replica: Replica) -> None:
        requests = [asyncio.create_task(call(replica)) for _ in range(2)]
        await begun(2)
        await replica.probe()
        requests[0].cancel()
        await asyncio.wait(requests[:1])
        await replica.probe()
        requests[1].cancel()
        await asyncio.wait(requests[1:])
        with pytest.raises(UnavailableError, match="All 2 slots"):
            await replica.probe()
        GATES.go.set()
        await until(lambda: replica.load() == Load(0, 0))
        await replica.probe()

    run(scenario, held, concurrency=2)


async def blocking(request: Any) -> None:
    held()


def test_a_probe_does_not_return_while_user_code_blocks_its_loop() -> None:
    async def scenario(replica: Replica) -> None:
        request = asyncio.create_task(call(replica))
        await begun()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(replica.probe(), 0.03)
        GATES.go.set()
        await request
        await replica.probe()

    run(scenario, blocking)


class Ill:
    checks = 0

    def check_health(self) -> None:
        GATES.notes.append(where())
        self.checks += 1
        if self.checks > 1:  # the first one decides whether the replica starts at all
            raise RuntimeError("feverish")

    def __call__(self) -> None: ...


class IllAsync(Ill):
    async def check_health(self) -> None:  # type: ignore[override]
        super().check_health()


@pytest.mark.parametrize("definition", [Ill, IllAsync])
def test_the_users_health_check_is_part_of_the_probe(definition: Any) -> None:
    async def scenario(replica: Replica) -> None:
        with pytest.raises(
            UserCodeError, match=r"check_health\(\) of backend 'b' raised RuntimeError: feverish"
        ):
            await replica.probe()
        assert GATES.notes[0].startswith("daskserve-b#AAAAAA")

    run(scenario, definition)


class LeavesATask:
    """Its constructor leaves a task that blocks the loop."""

    def __init__(self) -> None:
        self.task = asyncio.ensure_future(self.block())

    async def block(self) -> None:
        GATES.began.release()
        GATES.go.wait(DEADLINE_S)

    async def __call__(self) -> None: ...


@pytest.mark.parametrize("is_async", [True, False])
def test_a_replica_whose_loop_is_blocked_from_the_beginning_does_not_start(is_async: bool) -> None:
    async def main() -> None:
        replica = make(LeavesATask, is_async=is_async, health_check_timeout_s=0.05)
        starting = asyncio.create_task(replica.start())
        await until(lambda: series(replica)[("deployment_replica_start_failures",)] == 1)
        assert GATES.began.acquire(blocking=False)
        GATES.go.set()
        with pytest.raises(ReplicaStartError, match="failed its first health check: TimeoutError"):
            await starting

    asyncio.run(main())


def test_blocking_the_loop_on_purpose_does_not_fail_the_start() -> None:
    async def scenario(replica: Replica) -> None:
        GATES.go.set()
        await call(replica)

    run(scenario, LeavesATask, is_async=True, health_check_timeout_s=0.05, liveness=None)


# ---- where it is loaded and constructed


class NotesWhere:
    """Records the thread in which it is unpickled, and whether an event loop runs there."""

    def __reduce__(self) -> Any:
        return note_where, ()


class AsyncNotesWhere:
    def __init__(self, argument: Any) -> None:
        note_where()

    async def __call__(self) -> None:
        note_where()


class PlainNotesWhere(AsyncNotesWhere):
    def __call__(self) -> None:  # type: ignore[override]
        note_where()


def note_where() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        GATES.notes.append((threading.current_thread(), False))
    else:
        GATES.notes.append((threading.current_thread(), True))


@pytest.mark.parametrize("is_async", [True, False])
def test_async_code_is_loaded_in_the_thread_of_its_loop_before_that_runs(is_async: bool) -> None:
    async def scenario(replica: Replica) -> None:
        await call(replica)
        threads, has_loop = zip(*GATES.notes, strict=True)
        assert has_loop == (False, True, True)
        assert len(set(threads)) == 1

    run(scenario, AsyncNotesWhere, NotesWhere(), is_async=is_async)


@pytest.mark.parametrize("is_async", [True, False])
def test_plain_code_is_loaded_and_constructed_in_a_thread_without_a_loop(is_async: bool) -> None:
    async def scenario(replica: Replica) -> None:
        await call(replica)
        threads, has_loop = zip(*GATES.notes, strict=True)
        assert has_loop == (False, False, False)
        assert threads[0] is threads[1]

    run(scenario, PlainNotesWhere, NotesWhere(), is_async=is_async)


class Unloadable:
    def __reduce__(self) -> Any:
        return int, ("many",)


@pytest.mark.parametrize("is_async", [True, False])
def test_an_error_while_code_is_loaded_says_so(is_async: bool) -> None:
    async def main() -> None:
        replica = make(AsyncNotesWhere, Unloadable(), is_async=is_async)
        with pytest.raises(ReplicaStartError, match="'b' could not be loaded: ValueError: invalid literal"):
            await replica.start()
        await until(lambda: our_threads() == [])

    asyncio.run(main())


# ---- stop


def test_a_stop_that_is_cancelled_still_leaves_nothing_behind() -> None:
    async def scenario(replica: Replica) -> None:
        request = asyncio.create_task(call(replica))
        await begun()
        stopping = asyncio.create_task(replica.stop(0))
        await until(lambda: replica._ending is not None)
        stopping.cancel()
        await asyncio.wait([stopping])
        await asyncio.wait([request])
        assert our_threads() != []
        GATES.go.set()
        await until(lambda: our_threads() == [])

    run(scenario, held)


def test_stuck_plain_code_does_not_hold_up_the_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("daskserve.data.replica.local_code.CLOSE_GRACE_S", 0.02)
    monkeypatch.setattr("daskserve.data.replica.replica.CLOSE_GRACE_S", 0.02)

    async def main() -> None:
        replica = make(held)
        await replica.start()
        request = asyncio.create_task(call(replica))
        await begun()
        async with asyncio.timeout(2):
            await replica.stop(0.01)
        assert isinstance((await asyncio.gather(request, return_exceptions=True))[0], ActorLostError)
        async with asyncio.timeout(DEADLINE_S):
            # Threads that are not stuck end too, although no code waited for them.
            await until(lambda: len(our_threads()) == 1)
            GATES.go.set()
            await until(lambda: our_threads() == [])

    asyncio.run(main())
    assert "does not end; its threads are abandoned" in caplog.text


class SlowEnd:
    """Its destructor waits until the test lets it go."""

    def __call__(self) -> None: ...

    async def __del__(self) -> None:
        while not GATES.go.is_set():  # noqa: ASYNC110 - an event of threads
            await asyncio.sleep(0.001)
        GATES.notes.append("destructed")


def test_a_destructor_has_the_rest_of_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskserve.data.replica.replica.CLOSE_GRACE_S", 0.01)

    async def scenario(replica: Replica) -> None:
        stopping = asyncio.create_task(replica.stop(DEADLINE_S))
        await until(lambda: replica._limit is not None)
        await asyncio.sleep(0.05)
        assert not stopping.done()
        GATES.go.set()
        await stopping
        assert GATES.notes == ["destructed"]

    run(scenario, SlowEnd)


def test_an_impatient_stop_cuts_a_destructor_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("daskserve.data.replica.replica.CLOSE_GRACE_S", 0.01)

    async def scenario(replica: Replica) -> None:
        stopping = asyncio.create_task(replica.stop(DEADLINE_S))
        await until(lambda: replica._limit is not None)
        async with asyncio.timeout(DEADLINE_S / 2):
            await replica.stop(0)
        await stopping
        assert GATES.notes == []

    run(scenario, SlowEnd)
    assert "does not end" in caplog.text


def test_a_destructor_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        def __call__(self) -> None: ...

        async def __del__(self) -> None:
            raise RuntimeError("in the destructor")

    async def scenario(replica: Replica) -> None: ...

    run(scenario, Fails)
    assert "in the destructor" in caplog.text


def test_a_replica_that_was_never_started_can_be_stopped() -> None:
    async def main() -> None:
        replica = make(plain)
        await replica.stop(1)
        assert "closed" in repr(replica)
        with pytest.raises(ActorLostError):
            await replica.probe()

    asyncio.run(main())


# ---- metrics


def series(replica: Replica) -> dict[tuple[str, ...], float]:
    """Return the samples by name, and by labels other than instance and backend."""
    found = {}
    for name, labels, value in replica.samples():
        assert labels[:2] == ("an-instance", "b")
        found[(name, *labels[2:])] = value.count if isinstance(value, HistogramCounts) else value
    return found


def test_a_replica_that_does_not_start_is_counted_and_has_no_state() -> None:
    class Broken:
        def __init__(self) -> None:
            raise RuntimeError("no")

    replica = make(Broken)
    with pytest.raises(ReplicaStartError):
        asyncio.run(replica.start())
    found = series(replica)
    assert found[("deployment_replica_start_failures",)] == 1
    assert found[("deployment_replica_starts",)] == 0
    assert [key for key in found if key[0].startswith("replica_")] == []


def test_requests_that_are_cancelled_are_counted_and_late_ones_twice() -> None:
    async def forever(request: Any) -> None:
        await asyncio.Event().wait()

    async def give_up(replica: Replica, deadline: float | None) -> None:
        task = asyncio.create_task(http(replica, deadline=deadline))
        await until(lambda: bool(replica.load().ongoing))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not replica.load().ongoing)

    async def scenario(replica: Replica) -> None:
        now = asyncio.get_running_loop().time()
        await give_up(replica, None)
        await give_up(replica, now + 1000)
        await give_up(replica, now)
        found = series(replica)
        assert (found[("deployment_cancellations",)], found[("deployment_timeouts",)]) == (3, 1)

    run(scenario, forever)


def test_batches_of_both_kinds_are_counted_by_method() -> None:
    class Batches:
        @batch(max_batch_size=2, batch_wait_timeout_s=60.0)
        async def double(self, numbers: list[int]) -> list[int]:
            return [2 * number for number in numbers]

        @accept_batch
        async def __call__(self, requests: list[Any]) -> list[int]:
            return await asyncio.gather(*(self.double(number) for number in range(len(requests))))

    async def scenario(replica: Replica) -> None:
        await asyncio.gather(http(replica), http(replica))
        found = series(replica)
        for method in ("double", "__call__"):
            assert found[("batch_size", method)] == 1
            assert found[("batch_wait_seconds", method)] == 2

    run(scenario, Batches, max_batch_size=2, batch_wait_timeout=60.0)


@pytest.mark.parametrize("event_loop", ["own", "worker"])
def test_requests_that_wait_for_their_batch_are_counted_as_queued(event_loop: str) -> None:
    class Batches:
        @batch(max_batch_size=3, batch_wait_timeout_s=60.0)
        async def double(self, numbers: list[int]) -> list[int]:
            return [2 * number for number in numbers]

        @batch(max_batch_size=3, batch_wait_timeout_s=60.0)
        async def halves(self, numbers: list[int]) -> AsyncIterator[list[float]]:
            yield [number / 2 for number in numbers]

        @accept_batch
        async def __call__(self, requests: list[Any]) -> list[int]:
            return await asyncio.gather(*(self.double(number) for number in range(len(requests))))

        async def half(self, number: int) -> list[float]:
            return [each async for each in self.halves(number)]

    async def scenario(replica: Replica) -> None:
        def queued() -> float:
            return series(replica)[("replica_queued_requests", "b#AAAAAA")]

        assert queued() == 0
        first = asyncio.create_task(http(replica))
        await until(lambda: queued() == 1)  # of accept_batch
        second = asyncio.create_task(http(replica))
        await until(lambda: queued() == 2 and not replica.load().queued)  # of serve.batch
        third = asyncio.create_task(call(replica, 4, method="half"))
        await until(lambda: queued() == 3)  # of a generator
        third.cancel()
        await until(lambda: queued() == 2)
        assert await call(replica, 4, method="double") == 8
        await asyncio.gather(first, second)
        assert queued() == 0

    run(scenario, Batches, max_batch_size=2, batch_wait_timeout=60.0, event_loop=event_loop)


def test_user_code_of_all_kinds_measures_for_its_replica() -> None:
    class Model:
        def __init__(self) -> None:
            self.calls = metrics.Counter("calls", tag_keys=("kind", "route"))
            self.calls.inc(tags={"kind": "constructor"})

        async def __call__(self, request: Any) -> None:
            self.calls.inc(tags={"kind": "async"})
            await asyncio.to_thread(self.calls.inc, tags={"kind": "thread"})

        def plain(self) -> None:
            self.calls.inc(tags={"kind": "plain"})

    async def scenario(replica: Replica) -> None:
        await http(replica)
        await call(replica, method="plain")
        found = {sample.labels[3:]: sample.value for sample in replica.user_samples()}
        assert found == {
            (("kind", kind), ("route", route)): 1.0
            for kind, route in (("constructor", ""), ("async", "/r"), ("thread", "/r"), ("plain", ""))
        }
        assert replica.user_samples()[0].labels[:3] == (
            ("serve_instance", "an-instance"),
            ("deployment", "b"),
            ("replica", "b#AAAAAA"),
        )

    run(scenario, Model)


async def spins(request: Any) -> None:
    """Lets others run, and waits for nothing that could be cancelled."""
    ends_at = time.monotonic() + DEADLINE_S / 2
    GATES.began.release()
    try:
        while time.monotonic() < ends_at:  # noqa: ASYNC110 - it spins on purpose
            await asyncio.sleep(0)
        GATES.notes.append("not cancelled")
    except asyncio.CancelledError:
        GATES.notes.append("cancelled")
        raise


@pytest.mark.parametrize("event_loop", ["own", "worker"])
def test_code_that_waits_for_nothing_is_cancelled_with_its_replica(event_loop: str) -> None:
    async def scenario(replica: Replica) -> None:
        spinning = asyncio.ensure_future(call(replica))
        await begun()
        await replica.stop(0)
        await asyncio.wait([spinning])
        assert GATES.notes == ["cancelled"]

    run(scenario, spins, event_loop=event_loop)
