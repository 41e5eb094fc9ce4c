"""What an exchange asks of a server, call by call, without a socket: where time or chance decide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from http_harness import head, respond, run

from daskserve.common.clock import LoopClock
from daskserve.common.types import Receive, Send
from daskserve.proxies.asgi import ASGIApp, Scope
from daskserve.proxies.exchange.exchange import LINGER_S, Exchange
from daskserve.proxies.exchange.http_connection import HTTPConnection
from daskserve.proxies.exchange.idle import IdleWatch
from daskserve.proxies.exchange.request_body import HIGH_WATER_BYTES
from daskserve.proxies.exchange.request_head import HeadLimits
from daskserve.proxies.exchange.server_state import Connection, ServerState
from daskserve.proxies.exchange.stream import ConnectionReader, Stream

LIMIT = 4 * HIGH_WATER_BYTES


class FakeStream:
    """A stream that sends everything at once, unless the test holds it back."""

    socket = None

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False
        self.is_slow = False
        self.closes_after = 1000
        self.pending: list[asyncio.Future[None]] = []

    def write(self, data: bytes) -> asyncio.Future[None]:
        if self.is_closed:
            raise ConnectionResetError("gone")
        self.written.append(data)
        self.is_closed = len(self.written) >= self.closes_after
        flushed = asyncio.get_running_loop().create_future()
        if self.is_slow:
            self.pending.append(flushed)
        else:
            flushed.set_result(None)
        return flushed

    def closed(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


class FakeReader:
    """The server's side of one request: notes how it was ended."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.ends: list[str] = []

    def finish(self) -> None:
        self.ends.append("finish")

    def leave(self) -> None:
        self.ends.append("leave")

    def close(self) -> None:
        self.ends.append("close")
        self.stream.close()


class Bench:
    """One exchange between an application that waits for orders and fakes of a server."""

    def __init__(self, *headers: tuple[str, str], method: str = "POST", app: ASGIApp | None = None) -> None:
        self.orders: asyncio.Queue[Callable[[Receive, Send], Any]] = asyncio.Queue()
        self.ended = ""
        self.server_state = ServerState(
            app or self._obey,
            head_limits=HeadLimits(1 << 16, 100),
            max_body_bytes=LIMIT,
            max_message_bytes=1000,
            idle_timeout_s=60,
            clock=LoopClock(),
        )
        self.stream = FakeStream()
        self.reader = FakeReader(self.stream)
        self.connection = Connection(cast(Stream, self.stream))
        self.server_state.watch.watch(self.connection)
        self.exchange = Exchange(self.server_state, self.connection, cast(ConnectionReader, self.reader))
        self.exchange.begin(head("Host: a", *(f"{name}: {value}" for name, value in headers), method=method))
        (self.task,) = self.server_state.tasks

    async def _obey(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while True:
                await (await self.orders.get())(receive, send)
        except BaseException as error:
            self.ended = type(error).__name__
            raise

    async def order(self, order: Callable[[Receive, Send], Any]) -> None:
        self.orders.put_nowait(order)
        await settle()

    def is_watched(self) -> bool:
        return len(self.server_state.watch) == 1


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def bench_test(test: Callable[[], Any]) -> Callable[[], None]:
    """Make an async test an ordinary one; the applications still running are cancelled with its loop."""

    def wrapped() -> None:
        run(test)

    wrapped.__name__ = test.__name__
    wrapped.__doc__ = test.__doc__
    return wrapped


CHUNKED = ("Transfer-Encoding", "chunked")


async def take(receive: Receive, send: Send) -> None:
    await receive()


async def answer(receive: Receive, send: Send) -> None:
    await respond(send, b"whole")


async def begin(receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": b"part", "more_body": True})


async def go_on(receive: Receive, send: Send) -> None:
    await send({"type": "http.response.body", "body": b"part", "more_body": True})


# ---- inactivity


@bench_test
async def test_a_client_is_watched_only_while_the_server_waits_for_it() -> None:
    bench = Bench(CHUNKED)
    assert bench.is_watched()  # 1. for the body
    bench.exchange.data_received(b"data")
    assert bench.is_watched()
    room = bench.exchange.data_received(bytes(HIGH_WATER_BYTES))
    assert room is not None
    assert not bench.is_watched()  # 2. not while the application is the slow one
    await bench.order(take)
    await bench.order(take)
    assert room.done()
    assert bench.is_watched()  # 3. again, once there is room
    bench.exchange.finish()
    assert not bench.is_watched()  # 4. not while the application works


@bench_test
async def test_each_part_of_a_body_restarts_the_timeout() -> None:
    class Counting(IdleWatch[Connection]):
        count = 0

        def watch(self, item: Connection) -> None:
            self.count += 1

    bench = Bench(CHUNKED)
    bench.server_state.watch = watch = Counting(60, Connection.close)
    bench.exchange.data_received(b"a")
    bench.exchange.data_received(b"b")
    assert watch.count == 2


@bench_test
async def test_each_part_of_an_answer_restarts_the_timeout_of_its_request() -> None:
    bench = Bench(CHUNKED)
    bench.server_state.watch.unwatch(bench.connection)
    await bench.order(begin)
    assert bench.is_watched()  # 1. the client may take its time, but not for ever
    room = bench.exchange.data_received(bytes(HIGH_WATER_BYTES + 1))
    assert not bench.is_watched()
    await bench.order(go_on)
    assert not bench.is_watched()  # 2. not while the application is the slow one
    await bench.order(take)
    assert room is not None
    assert room.done()
    assert bench.is_watched()
    bench.exchange.finish()
    await bench.order(go_on)
    assert not bench.is_watched()  # 3. not once the request is whole


@bench_test
async def test_a_disconnected_client_is_not_watched() -> None:
    bench = Bench(CHUNKED)
    bench.exchange.data_received(bytes(HIGH_WATER_BYTES + 1))
    bench.exchange.on_connection_close()
    await settle()
    assert not bench.is_watched()


# ---- bodies that turn out to be malformed


@bench_test
async def test_a_malformed_body_never_looks_complete() -> None:
    cleaned_up: list[str] = []

    async def cleaning_up(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.append((await receive())["type"])

    bench = Bench(CHUNKED, app=cleaning_up)
    await settle()
    bench.exchange.data_received(b"half")
    bench.stream.is_slow = True
    bench.exchange.reject("a reason")
    await settle()
    bench.exchange.finish()  # as Tornado has it
    await settle()
    assert cleaned_up == ["http.disconnect"]
    assert bench.stream.written[0].startswith(b"HTTP/1.1 400 ")
    assert b"a reason" in bench.stream.written[0]


# ---- the end of an exchange


@bench_test
async def test_whichever_of_request_and_response_ends_last_ends_the_exchange() -> None:
    for response_first in (True, False):
        bench = Bench(CHUNKED)
        for step in (response_first, not response_first):
            assert bench.reader.ends == []
            if step:
                await bench.order(answer)
            else:
                bench.exchange.finish()
        assert bench.reader.ends == ["finish"]


@bench_test
async def test_a_client_that_keeps_sending_after_its_answer_is_disconnected() -> None:
    loop = asyncio.get_running_loop()
    delays: list[float] = []
    call_later = loop.call_later

    def at_once(delay: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(0, callback, *args)

    bench = Bench(CHUNKED)
    loop.call_later = at_once  # type: ignore[method-assign,assignment]
    await bench.order(answer)
    assert delays == [LINGER_S]
    assert bench.reader.ends == ["finish"]
    assert bench.server_state.limits.hits["linger"] == 1


@bench_test
async def test_a_client_that_leaves_after_its_answer_leaves_no_timer() -> None:
    bench = Bench(CHUNKED)
    await bench.order(answer)
    timer = bench.exchange._linger
    assert timer is not None
    bench.exchange.on_connection_close()
    assert timer.cancelled()
    assert not bench.task.cancelling()  # what it still does is none of the client's business
    assert bench.reader.ends == []


@bench_test
async def test_a_timer_does_not_outlive_its_exchange() -> None:
    bench = Bench(CHUNKED)
    await bench.order(answer)
    bench.exchange.finish()
    assert bench.exchange._linger is not None
    assert bench.exchange._linger.cancelled()


@bench_test
async def test_data_after_the_answer_is_ignored() -> None:
    bench = Bench(CHUNKED)
    await bench.order(answer)
    assert bench.exchange.data_received(bytes(LIMIT + 1)) is None
    assert not bench.task.cancelling()
    assert bench.reader.ends == []


@bench_test
async def test_a_body_that_is_too_large_ends_the_application_like_a_disconnect() -> None:
    errors: list[OSError] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await respond(send, b"too late")
            except OSError as error:
                errors.append(error)

    bench = Bench(CHUNKED, app=app)
    await settle()
    bench.exchange.data_received(bytes(LIMIT + 1))
    await settle()
    assert len(errors) == 1
    (written,) = bench.stream.written
    assert written.startswith(b"HTTP/1.1 413 ")
    assert bench.reader.ends == []
    bench.exchange.finish()
    assert bench.reader.ends == ["finish", "close"]


@bench_test
async def test_a_refusal_that_the_client_reads_slowly_is_not_cut_short() -> None:
    bench = Bench(CHUNKED)
    bench.stream.is_slow = True
    bench.exchange.data_received(bytes(LIMIT + 1))
    bench.exchange.finish()
    assert bench.reader.ends == []
    bench.stream.pending[0].set_result(None)
    await settle()
    assert bench.reader.ends == ["finish", "close"]


# ---- writing


@bench_test
async def test_small_parts_are_one_write_and_large_ones_are_not_copied() -> None:
    bench = Bench(method="GET")
    large = bytes(1 << 20)

    async def stream(receive: Receive, send: Send) -> None:
        await begin(receive, send)
        await send({"type": "http.response.body", "body": b"small", "more_body": True})
        await send({"type": "http.response.body", "body": large, "more_body": True})

    await bench.order(stream)
    head, small, *rest = bench.stream.written
    assert head.endswith(b"4\r\npart\r\n")
    assert small == b"5\r\nsmall\r\n"
    assert any(part is large for part in rest)


def test_a_closed_stream_is_a_disconnected_client(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        before = Bench(method="GET")
        before.stream.close()
        await before.order(answer)
        while_waiting = Bench(method="GET")
        while_waiting.stream.is_slow = True
        await while_waiting.order(answer)
        while_waiting.stream.pending[0].set_exception(ConnectionResetError("gone"))
        await settle()
        between = Bench(method="GET")
        between.stream.closes_after = 1

        async def stream(receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})

        await between.order(stream)
        assert [bench.ended for bench in (before, while_waiting, between)] == ["ConnectionResetError"] * 3

    run(test)
    assert caplog.records == []


def test_the_date_is_formatted_once_a_second() -> None:
    class SetClock(LoopClock):
        seconds = 0.25

        def now(self) -> float:
            return 1000.5 + self.seconds

        def wall(self) -> float:
            return 86_400 + self.seconds

    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    clock = SetClock()
    server_state = ServerState(
        app,
        head_limits=HeadLimits(1 << 16, 100),
        max_body_bytes=1,
        max_message_bytes=1000,
        idle_timeout_s=1,
        clock=clock,
    )
    midnight = server_state.date.line()
    assert midnight == b"date: Fri, 02 Jan 1970 00:00:00 GMT"
    clock.seconds = 0.75
    assert server_state.date.line() is midnight
    clock.seconds = 1.0
    assert server_state.date.line() == b"date: Fri, 02 Jan 1970 00:00:01 GMT"


def test_the_fakes_have_only_methods_of_the_real_classes() -> None:
    for fake, real in ((FakeStream, Stream), (FakeReader, HTTPConnection)):
        methods = [name for name in vars(fake) if not name.startswith("_") and callable(vars(fake)[name])]
        assert methods
        for name in methods:
            assert callable(getattr(real, name))


@bench_test
async def test_a_client_that_leaves_before_the_application_has_begun_leaves_no_task() -> None:
    bench = Bench()
    bench.exchange.on_connection_close()
    await settle()
    assert bench.task.cancelled()
    assert bench.ended == ""  # it never began
    assert not bench.server_state.tasks
