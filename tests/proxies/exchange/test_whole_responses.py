"""Whole responses, which servers of ours take as one message, beside the same as two messages of ASGI."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import pytest
from http_harness import head, run

from daskserve.common.clock import LoopClock
from daskserve.common.types import WHOLE_RESPONSE, Message, Receive, Send
from daskserve.proxies.asgi import Scope, split_whole
from daskserve.proxies.exchange.exchange import _JOIN_BYTES, Exchange
from daskserve.proxies.exchange.request_head import HeadLimits
from daskserve.proxies.exchange.server_state import Connection, ServerState
from daskserve.proxies.exchange.stream import ConnectionReader, Stream

TEXT = ((b"content-type", b"text/plain"),)
KEEP = ("Connection", "keep-alive")
CLOSE = ("Connection", "close")
CHUNKED = ("Transfer-Encoding", "chunked")


class Wire:
    """What an exchange writes, and how it ends its request: the stream and the connection in one."""

    socket = None

    def __init__(self) -> None:
        self.written = b""
        self.ends: list[str] = []
        self.is_closed = False
        self.held: asyncio.Future[None] | None = None

    def write(self, data: bytes) -> asyncio.Future[None]:
        if self.is_closed:
            raise ConnectionResetError("gone")
        self.written += data
        if self.held is not None:
            return self.held
        flushed = asyncio.get_running_loop().create_future()
        flushed.set_result(None)
        return flushed

    def closed(self) -> bool:
        return self.is_closed

    def leave(self) -> None:
        self.ends.append("leave")

    def finish(self) -> None:
        self.ends.append("finish")

    def close(self) -> None:
        self.ends.append("close")
        self.is_closed = True

    def head(self) -> tuple[bytes, list[bytes], bytes]:
        """Return the status line, the other lines in the order of their names, and the body."""
        head, _, body = self.written.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        return status, sorted(each for each in lines if not each.startswith(b"date: ")), body


def whole(body: bytes = b"hi", *, status: int = 200, headers: Any = TEXT) -> Message:
    return {
        "type": WHOLE_RESPONSE,
        "status": status,
        "headers": headers,
        "body": body,
        "request_id": b"an-id",
    }


class Bench:
    """One request on a wire, and an application that sends these messages and keeps what they raise."""

    def __init__(
        self,
        *messages: Message,
        method: str = "GET",
        version: str = "HTTP/1.1",
        headers: tuple[tuple[str, str], ...] = (),
        is_draining: bool = False,
    ) -> None:
        self.wire = Wire()
        self.messages = messages
        self.raised: BaseException | None = None
        self.server_state = ServerState(
            self._app,
            head_limits=HeadLimits(1 << 16, 100),
            max_body_bytes=1000,
            max_message_bytes=1000,
            idle_timeout_s=60,
            clock=LoopClock(),
        )
        self.server_state.is_draining = is_draining
        # As it is once another request was answered.
        self.server_state.heads.write(whole())
        self.exchange = Exchange(
            self.server_state, Connection(cast(Stream, self.wire)), cast(ConnectionReader, self.wire)
        )
        lines = [f"{name}: {value}" for name, value in headers]
        self.exchange.begin(head("Host: a", *lines, method=method, version=version))

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            for message in self.messages:
                await send(message)
        except BaseException as error:
            self.raised = error
            raise


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def outcome(*messages: Message, **request: Any) -> tuple[Any, ...]:
    bench = Bench(*messages, **request)
    await settle()
    exchange = bench.exchange
    return (
        *bench.wire.head(),
        bench.wire.ends,
        type(bench.raised),
        (exchange.is_begun, exchange.is_whole, exchange.is_over, exchange._is_gone),
        exchange._linger is not None,
        len(bench.server_state.tasks),
    )


def test_whole_responses_and_two_messages_give_the_same_bytes_and_states() -> None:
    async def test() -> None:
        count = usual = 0
        for method, version, status, is_draining, headers, size, extra in itertools.product(
            ("GET", "HEAD", "POST"),
            ("HTTP/1.1", "HTTP/1.0"),
            (200, 204, 304, 500, 299),
            (False, True),
            ((), (KEEP,), (CLOSE,), (CHUNKED,)),
            (0, 2, _JOIN_BYTES, _JOIN_BYTES + 1),
            ((), ((b"connection", b"close"),), ((b"x-request-id", b"own"),), ((b"content-length", b"2"),)),
        ):
            if version == "HTTP/1.0" and CHUNKED in headers:
                continue
            message = whole(b"x" * size, status=status, headers=TEXT + extra)
            request: dict[str, Any] = {
                "method": method,
                "version": version,
                "headers": headers,
                "is_draining": is_draining,
            }
            case = (method, version, status, is_draining, headers, size, extra)
            found = await outcome(message, **request)
            assert found == await outcome(*split_whole(message), **request), case
            _, lines, body, *_ = found
            names = [line.partition(b":")[0] for line in lines]
            for name in (b"content-length", b"x-request-id", b"connection"):
                assert names.count(name) <= 1, case
            if found[4] is type(None):  # it could be sent
                assert b"x-request-id" in names, case
                assert b"content-length" in names or status in (204, 304), case
                assert body == (b"" if method == "HEAD" or status in (204, 304) else b"x" * size), case
            count += 1
            usual += bool(not extra and found[3] == ["finish"])
        assert (count, usual > 100) == (3 * 5 * 2 * (4 + 3) * 4 * 4, True)

    run(test)


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({}, [(b"content-length", b"2"), (b"x-request-id", b"an-id")]),
        ({"body": b""}, [(b"content-length", b"0"), (b"x-request-id", b"an-id")]),
        # A length, or an id, of its own is left as it is, in whatever case.
        ({"headers": ((b"Content-Length", b"9"),)}, [(b"x-request-id", b"an-id")]),
        ({"headers": ((b"X-Request-ID", b"own"),)}, [(b"content-length", b"2")]),
        ({"headers": [(b"Transfer-Encoding", b"chunked")]}, [(b"x-request-id", b"an-id")]),
        # There is no body whose length could be told.
        ({"status": 204, "body": b""}, [(b"x-request-id", b"an-id")]),
        ({"status": 304, "body": b""}, [(b"x-request-id", b"an-id")]),
    ],
)
def test_a_whole_response_is_split_into_two_messages(
    fields: dict[str, Any], added: list[tuple[bytes, bytes]]
) -> None:
    message = whole(**fields)
    before = list(message["headers"])
    start, body = split_whole(message)
    assert start == {
        "type": "http.response.start",
        "status": message["status"],
        "headers": before + added,
    }
    assert body == {"type": "http.response.body", "body": message["body"]}
    assert list(message["headers"]) == before  # they may be shared
    del message["request_id"]
    assert split_whole(message)[0]["headers"] == before + [each for each in added if each[1] != b"an-id"]


def test_a_head_that_cannot_be_sent_is_a_500_and_no_second_response() -> None:
    async def test() -> None:
        for headers in (((b"x-a", b"1\r\nx-b: 2"),), ((b"content-length", b"7"),)):
            status, lines, body, ends, raised, *_ = await outcome(whole(headers=headers))
            assert status == b"HTTP/1.1 500 Internal Server Error"
            assert body == b"Internal Server Error"
            assert not any(b"x-b" in line for line in lines)
            assert (ends, raised) == (["finish"], ValueError)

    run(test)


@pytest.mark.parametrize("second", [whole(b"again"), *split_whole(whole(b"again"))])
def test_nothing_can_follow_a_whole_response(second: Message) -> None:
    async def test() -> None:
        bench = Bench(whole(b"first"), second)
        await settle()
        assert isinstance(bench.raised, RuntimeError)
        assert bench.wire.head()[2] == b"first"
        assert bench.wire.ends == ["finish"]

    run(test)


def test_a_whole_response_cannot_follow_the_start_of_another() -> None:
    async def test() -> None:
        bench = Bench(split_whole(whole())[0], whole())
        await settle()
        assert isinstance(bench.raised, RuntimeError)
        assert bench.wire.head()[0] == b"HTTP/1.1 500 Internal Server Error"

    run(test)


def test_a_whole_response_ends_when_the_client_has_read_it() -> None:
    async def test() -> None:
        bench = Bench(whole(b"first"))
        flushed = bench.wire.held = asyncio.get_running_loop().create_future()
        await settle()
        assert bench.wire.head()[2] == b"first"
        assert (bench.wire.ends, len(bench.server_state.tasks)) == ([], 1)
        flushed.set_result(None)
        await settle()
        assert (bench.wire.ends, len(bench.server_state.tasks)) == (["finish"], 0)

    run(test)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_disconnected_client_is_an_error_of_its_connection(is_held: bool) -> None:
    async def test() -> None:
        bench = Bench(whole(b"first"))
        if is_held:
            held = bench.wire.held = asyncio.get_running_loop().create_future()
            await settle()
            held.set_exception(ConnectionResetError("gone"))
        else:
            bench.wire.is_closed = True
        await settle()
        assert isinstance(bench.raised, ConnectionResetError)
        assert bench.wire.ends == []
        assert not bench.server_state.tasks

    run(test)


def test_the_framing_of_a_request_does_not_change_how_the_next_is_read() -> None:

    def begin(
        connection: Connection, server_state: ServerState, wire: Wire, version: str, *headers: tuple[str, str]
    ) -> Exchange:
        exchange = Exchange(server_state, connection, cast(ConnectionReader, wire))
        exchange.begin(head(*(f"{name}: {value}" for name, value in headers), version=version))
        return exchange

    async def test() -> None:
        host, other = ("Host", "a"), ("Host", "b")
        bench = Bench(whole())
        cases: list[tuple[str, tuple[tuple[str, str], ...]]] = [
            ("HTTP/1.1", (host,)),
            ("HTTP/1.0", (host,)),
            ("HTTP/1.0", ()),
            ("HTTP/1.0", (("Content-Length", "2"),)),
            ("HTTP/1.0", (KEEP,)),
            ("HTTP/1.1", (("Content-Length", "2"),)),
            ("HTTP/1.1", (KEEP,)),
            ("HTTP/1.1", (host, CLOSE)),
            ("HTTP/1.1", (host, CHUNKED)),
            ("HTTP/1.1", (host, ("Content-Length", "2"))),
            ("HTTP/1.1", (host, ("Content-Length", "x"))),
            ("HTTP/1.1", (host, CHUNKED, ("Content-Length", "2"))),
            ("HTTP/1.1", (("Host", "a b"),)),
            ("HTTP/1.1", (("Host", "a,a"),)),
            ("HTTP/1.1", ()),
            ("HTTP/1.1", (("Content-Length", "0"),)),
            ("HTTP/1.1", (other,)),
            ("HTTP/1.1", (host, KEEP)),
        ]

        def read(connection: Connection, case: tuple[str, tuple[tuple[str, str], ...]]) -> tuple[Any, ...]:
            wire = Wire()
            connection.stream = cast(Stream, wire)
            exchange = begin(connection, bench.server_state, wire, case[0], *case[1])
            found = exchange._is_http11, exchange._closes, exchange.body.is_ended, wire.head()[:2]
            exchange.on_connection_close()
            return found

        wire = cast(Stream, Wire())
        for before, after in itertools.product(cases, cases):
            connection = Connection(wire)
            read(connection, before)
            assert read(connection, after) == read(Connection(wire), after), (before, after)
        await settle()

    run(test)


def test_the_scopes_of_a_connection_share_nothing_that_changes() -> None:
    async def test() -> None:
        seen: list[Scope] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(scope)
            scope["path"] = scope["root_path"] = scope["scheme"] = scope["client"] = "changed"
            scope["headers"].append((b"x", b"y"))
            await send(whole())

        bench = Bench()
        connection = bench.exchange._connection
        await settle()
        bench.server_state.app = app
        for _ in range(2):
            wire = Wire()
            connection.stream = cast(Stream, wire)
            exchange = Exchange(bench.server_state, connection, cast(ConnectionReader, wire))
            exchange.begin(head("Host: a", target="/%41?q=%41"))
            before = dict(connection.scope)
            await settle()
            assert connection.scope == before
            assert connection.scope["scheme"] == "http"
        assert len(seen) == 2
        assert seen[0] is not seen[1]
        assert seen[0]["headers"] is not seen[1]["headers"]
        assert seen[1]["headers"] == [(b"host", b"a"), (b"x", b"y")]
        assert (seen[1]["raw_path"], seen[1]["query_string"]) == (b"/%41", b"q=%41")

    run(test)
