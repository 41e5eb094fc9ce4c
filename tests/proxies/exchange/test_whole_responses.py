"""Whole responses that daskserve's servers accept as one message, compared with two messages of ASGI."""

from __future__ import annotations

import asyncio
import http
import itertools
from typing import Any, cast

from memory_transport import MemoryTransport, connect, serving_in_memory
from tables import each_case

from daskserve.common.clock import LoopClock
from daskserve.common.types import WHOLE_RESPONSE, Message, Receive, Send
from daskserve.proxies.asgi import Scope
from daskserve.proxies.exchange.http_response import JOIN_BYTES, split_whole
from daskserve.proxies.exchange.response import head as response_head
from daskserve.proxies.exchange.response.head import DateHeader, HeadCache
from daskserve.proxies.server.server import HTTPServer

TEXT = ((b"content-type", b"text/plain"),)
REQUEST_ID = b"an-id"


def whole(body: bytes = b"hi", *, status: Any = 200, headers: Any = TEXT) -> Message:
    return {"type": WHOLE_RESPONSE, "status": status, "headers": headers, "body": body}


class Application:
    """Sends some messages, and keeps their errors."""

    def __init__(self) -> None:
        self.messages: tuple[Message, ...] = ()
        self.raised: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cast(Any, send).__self__.request_id = REQUEST_ID  # as the ingress does
        self.raised = None
        try:
            for message in self.messages:
                await send(message)
        except BaseException as error:
            self.raised = error
            raise


def request(method: str = "GET", version: str = "HTTP/1.1", *lines: str) -> bytes:
    return "\r\n".join((f"{method} / {version}", "Host: a", *lines, "", "")).encode()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def parts_of(written: bytes) -> tuple[bytes, list[bytes], bytes]:
    """Return the status line, the other lines except the date in the order of their names, and the body."""
    head, _, body = written.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return status, sorted(each for each in lines if not each.startswith(b"date: ")), body


async def outcome(server: HTTPServer, app: Application, data: bytes, *messages: Message) -> tuple[Any, ...]:
    """Return the response, whether it ends the connection, the application's errors, and leftovers."""
    app.messages = messages
    with connect(server) as client:
        client.send(data)
        await settle()
        found = client.is_over, type(app.raised), len(server.state.tasks), len(server.state.idle_watch)
    await settle()
    return *parts_of(bytes(client.received)), *found


@each_case("status", [200, 204, 304, 500, 299])
async def test_whole_responses_and_two_messages_give_the_same_bytes_and_states(status: int) -> None:
    app = Application()
    count = 0
    async with serving_in_memory(app) as server:
        for method, version, is_draining, line, size, extra in itertools.product(
            ("GET", "HEAD"),
            ("HTTP/1.1", "HTTP/1.0"),
            (False, True),
            ("", "Connection: keep-alive", "Connection: close", "Transfer-Encoding: chunked"),
            (0, 2, JOIN_BYTES, JOIN_BYTES + 1),
            (
                (),
                ((b"connection", b"close"),),
                ((b"x-request-id", b"own"),),
                ((b"content-length", b"2"),),
            ),
        ):
            if version == "HTTP/1.0" and "chunked" in line:
                continue
            server.state.is_draining = is_draining
            message = whole(b"x" * size, status=status, headers=TEXT + extra)
            data = request(method, version, *filter(None, [line]))
            case = (data, is_draining, message)
            found = await outcome(server, app, data, message)
            assert found == await outcome(server, app, data, *split_whole(message, REQUEST_ID)), case
            _, lines, body, _, raised, *_ = found
            names = [each.partition(b":")[0] for each in lines]
            for name in (b"content-length", b"x-request-id", b"connection"):
                assert names.count(name) <= 1, case
            if raised is type(None):  # it could be sent
                assert b"x-request-id" in names, case
                assert b"content-length" in names or status in (204, 304), case
                assert body == (b"" if method == "HEAD" or status in (204, 304) else b"x" * size), case
            count += 1
    assert count == 2 * 2 * (4 + 3) * 4 * 4


HEADS: list[dict[str, Any]] = [
    {},
    {"body": b"\r\n\r\n"},
    {"body": b"x" * 999},
    {"body": b"x" * 1000},
    {"headers": ()},
    *({"status": status} for status in (404, 500, 205, http.HTTPStatus.OK)),
    {"headers": ((b"Content-Type", b"a/b"), (b"X-A", b"1"), (b"x-a", b"2"), (b"set-cookie", b"a=b"))},
    {"headers": tuple((b"x-%d" % number, b"v" * 128) for number in range(8))},
    # 1. The headers cannot be looked up in the cache of heads.
    {"headers": list(TEXT)},
    {"headers": ([b"content-type", b"a/b"],)},
    {"headers": ((b"content-type", bytearray(b"a/b")),)},
    # 2. They belong to the connection or to one response, in upper or lower case.
    *(
        {"headers": (*TEXT, (name, b"1"))}
        for name in (b"connection", b"Content-Length", b"date", b"Transfer-Encoding", b"X-Request-ID")
    ),
    # 3. They are too many, or too long.
    {"headers": tuple((b"x-%d" % number, b"1") for number in range(9))},
    {"headers": ((b"x-a", b"v" * 129),)},
    {"headers": ((b"x" * 129, b"v"),)},
    # 4. The status is unknown, or not that of a final response.
    *({"status": status} for status in (0, 100, 199, 299, 1000, -1)),
    # 5. The value would end the head, or be read as two lines.
    *(
        {"headers": ((b"x-a", b"1"), header)}
        for control in (b"\r", b"\n", b"\r\n", b"\0")
        for header in ((b"x-b", b"1" + control + b"2"), (b"x" + control + b"b", b"1"))
    ),
]


async def test_a_head_has_the_same_bytes_whether_it_can_be_cached_or_not() -> None:
    app = Application()
    async with serving_in_memory(app) as server:
        for fields in HEADS:
            message = whole(**fields)
            found = [
                await outcome(server, app, request(), *messages)
                for messages in ((message,), (message,), split_whole(message, REQUEST_ID))
            ]
            assert found == found[:1] * 3, fields
            is_valid = found[0][4] is type(None)
            assert found[0][0].startswith(b"HTTP/1.1 %d " % (fields.get("status", 200) if is_valid else 500))
            assert is_valid or found[0][2:5] == (b"Internal Server Error", False, ValueError), fields


@each_case(
    ("fields", "added"),
    [
        ({}, [(b"content-length", b"2"), (b"x-request-id", REQUEST_ID)]),
        ({"body": b""}, [(b"content-length", b"0"), (b"x-request-id", REQUEST_ID)]),
        # The application's own length or id stays unchanged, in upper or lower case.
        ({"headers": ((b"Content-Length", b"9"),)}, [(b"x-request-id", REQUEST_ID)]),
        ({"headers": ((b"X-Request-ID", b"own"),)}, [(b"content-length", b"2")]),
        ({"headers": [(b"Transfer-Encoding", b"chunked")]}, [(b"x-request-id", REQUEST_ID)]),
        # There is no body, so there is no length.
        ({"status": 204, "body": b""}, [(b"x-request-id", REQUEST_ID)]),
        ({"status": 304, "body": b""}, [(b"x-request-id", REQUEST_ID)]),
    ],
)
def test_a_whole_response_is_split_into_two_messages(
    fields: dict[str, Any], added: list[tuple[bytes, bytes]]
) -> None:
    message = whole(**fields)
    before = list(message["headers"])
    start, body = split_whole(message, REQUEST_ID)
    assert start == {
        "type": "http.response.start",
        "status": message["status"],
        "headers": before + added,
    }
    assert body == {"type": "http.response.body", "body": message["body"]}
    assert list(message["headers"]) == before  # they may be shared
    assert split_whole(message)[0]["headers"] == before + [each for each in added if each[1] != REQUEST_ID]


async def test_messages_after_a_whole_response_or_within_another_are_errors() -> None:
    app = Application()
    async with serving_in_memory(app) as server:
        for second in (whole(b"again"), *split_whole(whole(b"again"))):
            found = await outcome(server, app, request(), whole(b"first"), second)
            assert found[2:5] == (b"first", False, RuntimeError), second
        found = await outcome(server, app, request(), split_whole(whole())[0], whole())
        assert found[0] == b"HTTP/1.1 500 Internal Server Error"
        assert found[4] is RuntimeError


async def test_a_whole_response_ends_when_the_client_has_read_it() -> None:
    app = Application()
    async with serving_in_memory(app) as server:
        app.messages = (whole(b"first"),)
        client = connect(server)
        client.stop_reading()
        client.send(request() * 2)
        await settle()
        assert client.received.count(b"first") == len(server.state.tasks) == 1
        client.read_on()
        await settle()
        assert (client.received.count(b"first"), len(server.state.tasks)) == (2, 0)


async def test_a_disconnected_client_is_an_error_of_its_connection() -> None:
    app = Application()
    async with serving_in_memory(app) as server:
        app.messages = (whole(b"first"),)
        client: MemoryTransport = connect(server)
        client.send(request())
        client.close()  # the application runs before the connection notices
        await settle()
        assert isinstance(app.raised, ConnectionResetError)
        assert not server.state.tasks


async def test_the_framing_of_a_request_does_not_change_how_the_next_is_read() -> None:
    heads = [
        b"HTTP/1.1\r\n%b\r\n" % b"".join(b"%b\r\n" % line for line in lines)
        for lines in (
            [b"Host: a"],
            [b"Host: b"],
            [b"Host: a", b"Connection: keep-alive"],
            [b"Host: a", b"Connection: close"],
            [b"Host: a", b"Transfer-Encoding: chunked"],
            [b"Host: a", b"Content-Length: 2"],
            [b"Host: a", b"Content-Length: x"],
            [b"Host: a", b"Transfer-Encoding: chunked", b"Content-Length: 2"],
            [b"Host: a b"],
            [b"Host: a,a"],
            [b"Content-Length: 0"],
            [],
        )
    ]
    heads += [each.replace(b"HTTP/1.1", b"HTTP/1.0") for each in heads]

    app = Application()
    async with serving_in_memory(app) as server:
        app.messages = (whole(b"first"),)

        async def answers(*requests: bytes) -> bytes:
            with connect(server) as client:
                for each in requests:
                    client.send(each)
                    await settle()
            await settle()
            return bytes(client.received)

        def complete(head: bytes) -> bytes:
            body = b"0\r\n\r\n" if b"chunked" in head else b"hi" if b"Length: 2" in head else b""
            return b"GET / " + head + body

        alone = {head: await answers(complete(head)) for head in heads}
        for before, after in itertools.product(heads, heads):
            is_last = alone[before].count(b"connection: close") or (
                b"HTTP/1.0" in before and b"keep-alive" not in before
            )
            expected = alone[before] + (b"" if is_last else alone[after])
            found = await answers(complete(before), complete(after))
            assert without_dates(found) == without_dates(expected), (before, after)


def without_dates(written: bytes) -> list[bytes]:
    return [line for line in written.split(b"\r\n") if not line.startswith(b"date: ")]


# ---- the cache of heads


class Clock(LoopClock):
    """A clock that the test sets: its time, and the offset of the wall clock."""

    def __init__(self) -> None:
        self.shown = 100.0
        self.wall_offset_s = 0.25

    def now(self) -> float:
        return self.shown

    def wall(self) -> float:
        return self.shown + self.wall_offset_s


def test_each_second_has_its_own_date() -> None:
    clock = Clock()
    line = DateHeader(clock)
    cache = HeadCache(line)

    def date() -> bytes:
        written = cache.write(whole(), REQUEST_ID)
        assert written is not None
        (found,) = (line for line in written.split(b"\r\n") if line.startswith(b"date: "))
        assert found == line.line()
        return found[-12:]

    assert date() == b"00:01:40 GMT"
    assert line.line() == b"date: Thu, 01 Jan 1970 00:01:40 GMT"
    clock.shown += 0.74
    assert date() == b"00:01:40 GMT"
    clock.shown += 0.02  # the wall's second ends before that of the clock that only goes forward
    assert date() == b"00:01:41 GMT"
    clock.shown += 60
    assert date() == b"00:02:41 GMT"
    clock.wall_offset_s += 3600  # the wall's clock was set
    assert date() == b"00:02:41 GMT"
    clock.shown += 1
    assert date() == b"01:02:42 GMT"


def test_the_cache_is_bounded_and_holds_no_large_heads() -> None:
    clock = Clock()
    cache = HeadCache(DateHeader(clock))
    limit = response_head._MAX_HEADS

    def write(value: bytes) -> bytes | None:
        return cache.write(whole(headers=((b"x-n", value),)), REQUEST_ID)

    assert [write(b"%1000d" % number) for number in range(3)] == [None] * 3
    for number in range(limit):
        assert write(b"%d" % number) is not None
    # Cached heads are used; other heads are written without the cache.
    assert write(b"%d" % limit) is None
    assert write(b"0") is not None
    # In the next second, the cache has room again.
    clock.shown += 1
    assert write(b"%d" % limit) is not None
