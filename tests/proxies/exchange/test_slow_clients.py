"""Clients that stop in the middle of a request body, or do not read their response."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from http_harness import connected, echo, hits, poll_for, request, respond, serving
from scripted_exchange import ScriptedExchange
from tables import each_case

from daskserve.common.types import Receive, Send
from daskserve.options.http import HTTPOptions
from daskserve.proxies.asgi import Scope
from daskserve.proxies.exchange.limits.limits import BODY_RATE, BUSY_WRITE_STALL, UNSENT, WRITE_STALL, Limits
from daskserve.proxies.exchange.request.body import NO_MEMORY, RequestBody
from daskserve.proxies.exchange.server_state import ServerState
from daskserve.proxies.exchange.slow_clients import BodyRate, SlowClientWatch

MIB = 1 << 20
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nx"


class Watched:
    """An application that runs given code, and records how the code ends."""

    def __init__(self, application: Any) -> None:
        self.application = application
        self.ended: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.application(scope, receive, send)
            self.ended.append("")
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise


async def flood(scope: Scope, receive: Receive, send: Send) -> None:
    """Stream without end."""
    await send({"type": "http.response.start", "status": 200})
    while True:
        await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})


async def whole(scope: Scope, receive: Receive, send: Send) -> None:
    """Gather the body, as the ingress does, and answer it."""
    assert isinstance(receive, RequestBody)
    await receive.gather()
    await echo(scope, receive, send)


# ---- over both servers


async def test_a_stalled_body_gets_408_and_the_connection_closes() -> None:
    app = Watched(echo)
    async with serving(app, body_grace_s=0.04) as server, connected(server) as client:
        await client.send(POST)
        response = await client.response()
        assert (response.status, response.headers["connection"]) == (408, "close")
        assert b"240 bytes per second" in response.body
        await poll_for(lambda: app.ended == ["CancelledError"])
        assert hits(server) == {BODY_RATE: 1}
        samples = server.samples("i")
        assert ("http_requests", ("i", "", "", "POST", "408"), 1) in samples
        assert ("http_errors", ("i", "", "", BODY_RATE), 1) in samples


async def test_a_response_that_is_not_read_is_aborted_and_its_application_cancelled() -> None:
    app = Watched(flood)
    async with serving(app, write_stall_timeout_s=0.1) as server, connected(server) as client:
        await client.send(request())
        client.writer.transport.pause_reading()
        await poll_for(lambda: app.ended == ["CancelledError"])
        assert hits(server) == {WRITE_STALL: 1, UNSENT: 1}


async def test_a_whole_response_that_is_not_read_is_dropped() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, bytes(8 * MIB))

    async with serving(app, write_stall_timeout_s=0.1) as server, connected(server) as client:
        await client.send(request())
        client.writer.transport.pause_reading()
        await poll_for(lambda: hits(server) == {WRITE_STALL: 1})
        await poll_for(lambda: "0 connections, 0 tasks" in repr(server))
        assert ("http_buffered_bytes", ("i", "unsent"), 0) in server.samples("i")


async def test_a_response_that_is_not_read_gives_way_to_requests_that_wait_for_its_slot() -> None:
    app = Watched(flood)
    async with serving(app, busy_write_stall_timeout_s=0.1) as server, connected(server) as client:
        server.set_callbacks(lambda: MIB, lambda path: path == "/")
        await client.send(request())
        client.writer.transport.pause_reading()
        await poll_for(lambda: app.ended == ["CancelledError"])
        assert hits(server) == {BUSY_WRITE_STALL: 1, UNSENT: 1}


# ---- what is late


@each_case(
    ("steps", "is_late"),
    [
        ([(0, 19.9)], False),
        ([(0, 20)], True),
        ([(4800, 20), (0, 39.9)], False),  # 4800 bytes are 20 s
        ([(4800, 20), (0, 40.1)], True),
        ([(1_000_000, 1), (0, 20.9)], False),
        ([(1_000_000, 1), (0, 21.1)], True),  # a large part does not pay for a long pause
        ([(240 * n, n) for n in range(1, 200)], False),
        ([(200 * n, n) for n in range(1, 200)], True),
    ],
)
def test_a_body_is_late_once_it_is_behind_its_rate_by_the_grace(
    steps: list[tuple[int, float]], is_late: bool
) -> None:
    pace, received_bytes, found = BodyRate(240, 20, 0, 0.0), 0, False
    for index, (total, now) in enumerate(steps):
        received_bytes = max(received_bytes, total)
        found = pace.is_late(received_bytes, now)
        assert not found or index == len(steps) - 1 or len(steps) > 2
        if found:
            break
    assert found is is_late


class Line(SimpleNamespace):
    """A connection."""

    __hash__ = object.__hash__


class Watching:
    """A watch of one connection, with the options of these tests."""

    def __init__(
        self, request: ScriptedExchange, *, is_unread: bool = False, is_crowded: bool = False
    ) -> None:
        self.is_closed = False
        self.stream = SimpleNamespace(writing=lambda: is_unread, sent_bytes=5)
        connection = Line(exchange=request, stream=self.stream, path="/e", close=self._close)
        limits = Limits(HTTPOptions(body_grace_s=4, write_stall_timeout_s=8, busy_write_stall_timeout_s=2))
        server_state = SimpleNamespace(
            limits=limits, connections={connection}, is_crowded=lambda path: is_crowded
        )
        self.watch = SlowClientWatch(cast(ServerState, server_state))
        self.now = 0

    def _close(self) -> None:
        self.is_closed = True

    def pass_s(self, seconds: int, sent_bytes: int = 0) -> None:
        """Let time pass, with a check every second."""
        for _ in range(seconds):
            self.watch.check(float(self.now))
            self.now += 1
            self.stream.sent_bytes += sent_bytes


def test_a_body_has_its_grace_before_it_is_refused() -> None:
    request = ScriptedExchange(wants_body=True)
    watching = Watching(request)
    watching.pass_s(4)
    assert request.refused == []
    watching.pass_s(1)
    assert request.refused == [408]


@each_case(
    "state",
    [
        {"wants_body": False},
        {"wants_body": True, "response_started": True},  # neither side has a time limit
        {"wants_body": True, "body": SimpleNamespace(received_bytes=10, is_full=True)},
    ],
)
def test_a_body_that_the_client_does_not_owe_has_no_rate(state: dict[str, Any]) -> None:
    request = ScriptedExchange(**state)
    Watching(request).pass_s(100)
    assert request.refused == []


def test_the_time_in_which_the_application_does_not_read_counts_for_nothing() -> None:
    request = ScriptedExchange(wants_body=True)
    watching = Watching(request)
    watching.pass_s(3)
    request.body.is_full = True
    watching.pass_s(50)
    request.body.is_full = False
    watching.pass_s(4)
    assert request.refused == []
    watching.pass_s(1)
    assert request.refused == [408]


@each_case(
    ("is_crowded", "response_complete", "seconds"),
    [(False, False, 8), (True, False, 2), (True, True, 8)],  # a whole response holds no slot
)
def test_how_long_a_response_may_wait_for_its_client(
    is_crowded: bool, response_complete: bool, seconds: int
) -> None:
    watching = Watching(
        ScriptedExchange(response_started=True, response_complete=response_complete),
        is_unread=True,
        is_crowded=is_crowded,
    )
    watching.pass_s(seconds)
    assert not watching.is_closed
    watching.pass_s(1)
    assert watching.is_closed


def test_a_client_that_reads_slowly_is_left_alone() -> None:
    watching = Watching(ScriptedExchange(response_started=True), is_unread=True, is_crowded=True)
    watching.pass_s(100, sent_bytes=1)
    assert not watching.is_closed


def test_a_connection_without_a_request_is_left_alone() -> None:
    connection = Line(
        exchange=None, stream=SimpleNamespace(writing=lambda: True, sent_bytes=0), close=lambda: None
    )
    server_state = SimpleNamespace(
        limits=Limits(HTTPOptions()), connections={connection}, is_crowded=lambda _: True
    )
    for now in range(10):
        SlowClientWatch(cast(ServerState, server_state)).check(float(now))


# ---- who gives way when the memory of all is used


def short_of_memory() -> RequestBody:
    body = RequestBody(is_ended=False)
    body.excess = NO_MEMORY
    return body


def holding(held_bytes: int) -> ScriptedExchange:
    body = SimpleNamespace(received_bytes=held_bytes, held_bytes=held_bytes, is_full=False)
    return ScriptedExchange(wants_body=True, body=body)


def watching_all(requests: list[ScriptedExchange], sent_bytes: list[int]) -> SlowClientWatch:
    """Return a watch after each request has sent a number of bytes within a second."""
    stream = SimpleNamespace(writing=lambda: False)
    lines = [Line(exchange=each, stream=stream) for each in requests]
    watch = SlowClientWatch(
        cast(ServerState, SimpleNamespace(limits=Limits(HTTPOptions()), connections=lines))
    )
    watch.check(0.0)
    for each, sent in zip(requests, sent_bytes, strict=True):
        each.body.received_bytes += sent
    watch.check(1.0)
    return watch


def test_the_body_that_holds_most_for_its_rate_gives_way_to_another() -> None:
    requests = [holding(60 * MIB), holding(60 * MIB), holding(10_000)]
    watch = watching_all(requests, [30 * MIB, 1000, 0])
    body = short_of_memory()
    assert watch.make_room(body)
    assert body.excess is None
    assert [each.refused for each in requests] == [[], [503], []]


@each_case("sent_bytes", [30 * MIB, 7 * MIB])
def test_bodies_that_come_fast_do_not_give_way(sent_bytes: int) -> None:
    requests = [holding(60 * MIB)]
    body = short_of_memory()
    assert not watching_all(requests, [sent_bytes]).make_room(body)
    assert body.excess is NO_MEMORY
    assert requests[0].refused == []


def test_no_body_gives_way_to_one_that_is_too_large() -> None:
    requests = [holding(60 * MIB)]
    body = RequestBody(is_ended=False)
    body.excess = 413, "too large", ()
    assert not watching_all(requests, [0]).make_room(body)


async def test_a_client_that_keeps_nearly_all_of_a_body_does_not_keep_out_others() -> None:
    options = {"max_buffered_bytes": 400_000, "busy_write_stall_timeout_s": 0.04}
    async with serving(whole, **options) as server, connected(server) as greedy:
        server.set_callbacks(lambda: MIB, lambda path: False)
        await greedy.send(POST + bytes(250_000))
        await poll_for(lambda: ("http_buffered_bytes", ("i", "received"), 250_001) in server.samples("i"))
        status = 503
        while status != 200:  # until the other client is known to be slow
            async with connected(server) as client:
                await client.send(request(method="POST", body=bytes(200_000)))
                status = (await client.response()).status
                assert status in (200, 503)
        assert (await greedy.response()).status == 503
