"""HTTP/1.1 over a real socket, byte by byte."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_harness import (
    Client,
    Hanging,
    advance,
    connected,
    echo,
    hello,
    hits,
    poll_for,
    read_body,
    request,
    respond,
    run,
    serving,
    tracebacks,
)
from tables import each_case

from daskserve.common.types import Message, Receive, Send
from daskserve.errors import ActorLostError
from daskserve.proxies.asgi import Scope
from daskserve.proxies.exchange import http_connection
from daskserve.proxies.exchange.response.head import as_buffer

MIB = 1 << 20


# ---- connections


async def test_a_connection_is_kept_and_requests_may_be_pipelined() -> None:
    async with serving(hello) as server, connected(server) as client:
        assert (await client.get("/one")).body == b"/one"
        await client.send(request("/two") + request("/three", method="POST", body=b"x") + request("/four"))
        assert [(await client.response()).body for _ in range(3)] == [b"/two", b"/three", b"/four"]


async def test_many_pipelined_requests_with_bodies_are_answered_in_order() -> None:
    bodies = [b"%d" % number * 300 for number in range(2000)]
    async with serving(echo) as server, connected(server) as client:
        client.writer.write(b"".join(request(method="POST", body=body) for body in bodies))
        for body in bodies:
            assert (await client.response()).body == body


async def test_a_request_that_waits_for_its_turn_may_have_a_large_body() -> None:
    async with serving(echo) as server, connected(server) as client:
        body = bytes(range(256)) * 16 * 1024
        client.writer.write(b"".join([request(), request(method="POST", body=body), request()]))
        assert [(await client.response()).body for _ in range(3)] == [b"", body, b""]


async def test_an_invalid_request_is_refused_after_the_answers_before_it() -> None:
    app = Hanging()
    async with serving(app) as server, connected(server) as client:
        await client.send(request() + b"no request\r\n\r\n")
        await poll_for(lambda: app.running)
        app.go.set()
        assert (await client.response()).body == b"at last"
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")


async def test_a_client_that_reads_its_last_response_late_gets_all_of_it() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, bytes(8 * MIB))

    async with serving(app) as server, connected(server) as client:
        await client.send(request("/", "Connection: close"))
        status, headers = await client.head()
        await asyncio.sleep(0.05)
        assert len(await client.rest()) == int(headers["content-length"]) == 8 * MIB
        assert status == 200


@each_case(
    ("data", "header"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", "close"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: TE, Close\r\n\r\n", "close"),
        (b"GET / HTTP/1.0\r\n\r\n", "close"),
    ],
)
async def test_a_connection_ends_when_the_client_wants_it(data: bytes, header: str) -> None:
    async with serving(hello) as server, connected(server) as client:
        await client.send(data)
        response = await client.response()
        assert response.body == b"/"
        if b"1.1" in data:
            assert response.headers["connection"] == header
        assert await client.rest() == b""


async def test_http_1_0_can_keep_its_connection() -> None:
    async with serving(hello) as server, connected(server) as client:
        for _ in range(2):
            await client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert (await client.response()).headers["connection"] == "keep-alive"


async def test_a_silent_connection_is_closed() -> None:
    async with serving(hello, keep_alive_timeout_s=3) as server:
        async with connected(server) as silent, connected(server) as once:
            assert (await once.get()).status == 200
            await once.send(b"GET / HT")
            advance(4)
            assert await silent.rest() == b""
            advance(4)  # the time of a head begins when its first bytes are read
            assert await once.rest() == b""
        assert hits(server) == {"keep_alive_timeout_s": 2}


async def test_a_slow_application_does_not_make_its_connection_silent() -> None:
    app = Hanging()
    async with serving(app, keep_alive_timeout_s=4) as server, connected(server) as client:
        await client.send(request())
        await poll_for(lambda: app.running)
        advance(5)
        await asyncio.sleep(0.001)
        app.go.set()
        assert (await client.response()).body == b"at last"


async def test_an_upload_that_stalls_is_closed_and_its_task_cancelled() -> None:
    app = Hanging()
    async with serving(app, keep_alive_timeout_s=5) as server, connected(server) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab")
        await poll_for(lambda: app.running)
        advance(6)
        assert await client.rest() == b""
        await poll_for(lambda: app.cancelled)


# ---- the scope


def capturing(scopes: list[Scope]) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await respond(send)

    return app


async def test_the_scope_follows_asgi() -> None:
    scopes: list[Scope] = []
    async with serving(capturing(scopes)) as server, connected(server) as client:
        await client.get("/a%20b/%C3%A4?x=1&y=%20?", "X-Two: 1", "x-tWO: 2", "X-Text: \xe4")
        local = client.writer.get_extra_info("sockname")
    (scope,) = scopes
    assert sorted(scope.pop("headers")) == [
        (b"host", b"test"),
        (b"x-text", b"\xe4"),
        (b"x-two", b"1"),
        (b"x-two", b"2"),
    ]
    assert scope == {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/a b/ä",
        "raw_path": b"/a%20b/%C3%A4",
        "query_string": b"x=1&y=%20?",
        "root_path": "",
        "client": local,
        "server": ("127.0.0.1", server.port),
    }


async def test_a_changed_scope_does_not_reach_the_next_request() -> None:
    """An application may change its scope in place; the same request sent again gets a new scope."""
    seen: list[Scope] = []

    async def change(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append({**scope, "headers": list(scope["headers"])})
        scope["headers"].append((b"x-own", b"1"))
        scope["path"] = "/elsewhere"
        scope["extensions"] = {"own": {}}
        await respond(send, seen[-1]["path"].encode())

    async with serving(change) as server, connected(server) as client:
        for _ in range(4):
            assert (await client.get("/same?a=1", "X-A: 1")).body == b"/same"
        await client.send(request("/same?a=1", "X-A: 1") * 3)
        assert [(await client.response()).body for _ in range(3)] == [b"/same"] * 3
    assert len(seen) == 7
    assert all(each == seen[0] for each in seen)


# ---- request bodies


async def test_bodies_come_whole_by_length_and_in_chunks() -> None:
    async with serving(echo) as server, connected(server) as client:
        for size in (0, 1, 70_000, 3 * MIB):
            body = bytes(range(256)) * (size // 256 + 1)
            await client.send(request(method="POST", body=body))
            assert (await client.response()).body == body
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        await client.send(b"2\r\nhi\r\n3\r\nyou\r\n0\r\n\r\n")
        assert (await client.response()).body == b"hiyou"


async def test_both_directions_stream_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        while (message := await receive())["more_body"]:
            await send({"type": "http.response.body", "body": message["body"].upper(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as server, connected(server) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\n")
        await client.send(b"ab")
        await client.head()
        assert await client.chunk() == b"AB"
        await client.send(b"cd")
        assert await client.chunk() == b"CD"
        await client.send(b"ef")
        while await client.chunk():
            pass
        assert (await client.get()).status == 200


async def test_a_body_that_is_not_read_stays_in_the_socket() -> None:
    app = Hanging()
    async with serving(app) as server, connected(server) as client:
        size = 64 * MIB
        client.writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
        client.writer.write(bytes(size))
        await poll_for(lambda: app.running)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.writer.drain(), 0.05)
        app.go.set()  # an answer without reading: the rest is dropped, and the connection goes on
        assert (await client.response()).body == b"at last"
        assert (await client.get()).body == b"at last"


async def test_a_large_upload_is_read_as_fast_as_the_application_reads() -> None:
    async def content() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield bytes(MIB // 2)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        total = 0
        while True:
            message = await receive()
            total += len(message["body"])
            if not message["more_body"]:
                break
        await respond(send, str(total).encode())

    async with serving(app) as server:
        async with httpx.AsyncClient(trust_env=False) as client:
            response = await client.post(server.urls[0], content=content())
    assert response.text == str(32 * MIB)


EXPECTING = b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"


async def test_100_continue_is_sent_when_the_application_first_reads() -> None:
    go = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await echo(scope, receive, send)

    async with serving(app) as server, connected(server) as client:
        for body in (b"hi", b"ho"):
            go.clear()
            await client.send(EXPECTING)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.reader.read(1), 0.05)
            go.set()
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(body)
            assert (await client.response()).body == body


async def test_an_application_that_rejects_by_headers_never_asks_for_the_body() -> None:
    async with serving(hello) as server, connected(server) as client:
        await client.send(EXPECTING)
        response = await client.response()
        # The client may or may not send the announced body, so only a new connection is safe.
        assert (response.status, response.headers["connection"]) == (200, "close")
        assert await client.rest() == b""


async def test_an_application_that_begins_its_response_before_it_reads_does_not_ask() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        await send({"type": "http.response.body", "body": await read_body(receive)})

    async with serving(app) as server, connected(server) as client:
        await client.send(EXPECTING)
        assert (await client.head())[0] == 200
        assert await client.chunk() == b"begun "
        await client.send(b"hi")
        assert await client.chunk() == b"hi"


async def test_a_client_that_waits_to_be_asked_is_not_idle() -> None:
    app = Hanging()
    async with serving(app, keep_alive_timeout_s=1) as server, connected(server) as client:
        await client.send(EXPECTING)
        await poll_for(lambda: app.running)
        advance(3)
        await asyncio.sleep(0.01)
        app.go.set()
        assert (await client.response()).body == b"at last"


# ---- bodies that are too large


@each_case("sent", [b"", b"x" * 100])
async def test_a_declared_length_beyond_the_limit_is_a_413_without_the_application(
    sent: bytes,
) -> None:
    scopes: list[Scope] = []
    async with serving(capturing(scopes), max_body_bytes=10) as server, connected(server) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1073741824\r\n\r\n" + sent)
        response = await client.response()
        assert (response.status, response.headers["connection"]) == (413, "close")
        assert b"10 bytes that max_body_bytes allows" in response.body
    assert scopes == []


async def test_a_client_that_sends_more_after_a_bad_body_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connection, "LINGER_S", 0.05)

    async with serving(echo) as server, connected(server) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert (await client.response()).status == 400
        await poll_for(lambda: hits(server) == {"linger": 1})


@each_case(("host", "is_kept"), [("a" * 255, True), ("a" * 256, False)])
async def test_only_a_host_of_a_usual_length_is_kept_with_its_connection(host: str, is_kept: bool) -> None:
    async with serving(hello) as server, connected(server) as client:
        await client.send(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert (await client.response()).status == 200
        assert [each.host for each in server.state.connections] == [host if is_kept else None]
        await client.send(b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n")
        assert (await client.response()).status == 400


# ---- responses


async def test_a_stream_arrives_part_by_part() -> None:
    step = asyncio.Semaphore(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        for part in (b"one", b"two", b""):
            await step.acquire()
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})

    async with serving(app) as server, connected(server) as client:
        await client.send(request())
        step.release()
        assert (await client.head())[1]["transfer-encoding"] == "chunked"
        assert await client.chunk() == b"one"
        step.release()
        assert await client.chunk() == b"two"
        step.release()
        assert await client.chunk() == b""


async def test_a_stream_goes_as_fast_as_the_client_reads() -> None:
    parts = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal parts
        await send({"type": "http.response.start", "status": 200})
        for _ in range(64):
            await send({"type": "http.response.body", "body": bytes(MIB), "more_body": True})
            parts += 1
        await send({"type": "http.response.body"})

    async with serving(app) as server, connected(server) as client:
        await client.send(request())
        await client.head()
        await asyncio.sleep(0.05)
        assert parts < 64
        total = 0
        while data := await client.chunk():
            total += len(data)
        assert total == 64 * MIB


@each_case(
    "body",
    [bytearray(b"data"), memoryview(b"data"), memoryview(b"data")[::2], memoryview(b"data" * 50_000)],
)
async def test_buffers_of_all_kinds_are_bodies(body: bytearray | memoryview) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, body)  # type: ignore[arg-type]

    async with serving(app) as server, connected(server) as client:
        assert (await client.get()).body == bytes(body)


def test_memoryviews_are_measured_in_bytes() -> None:
    assert len(as_buffer(memoryview(b"12345678").cast("I"))) == 8
    with pytest.raises(TypeError, match="not str"):
        as_buffer("text")


async def test_head_has_no_body() -> None:
    async with serving(hello) as server, connected(server) as client:
        response = await client.get("/path", method="HEAD")
        assert (response.status, response.headers["content-length"]) == (200, "5")
        assert (await client.get("/next")).body == b"/next"


@each_case("status", [204, 304])
async def test_statuses_without_a_body(status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, b"ignored", status)

    async with serving(app) as server, connected(server) as client:
        for _ in range(2):
            assert (await client.get()).status == status


async def test_a_response_without_a_body_message_key_is_empty() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    async with serving(app) as server, connected(server) as client:
        response = await client.get()
        assert (response.body, response.headers["content-length"]) == (b"", "0")
        assert "date" in response.headers


# ---- failures of the application


async def raise_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("why")


async def raise_after_start(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})
    raise ValueError("why")


async def return_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    pass


async def cancel_itself(scope: Scope, receive: Receive, send: Send) -> None:
    raise asyncio.CancelledError


async def send_body_first(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.body", "body": b"x"})


async def send_nonsense(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.nonsense"})


async def start_twice(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.start", "status": 200})


async def send_text(scope: Scope, receive: Receive, send: Send) -> None:
    await respond(send, "text")  # type: ignore[arg-type]


async def break_a_header(scope: Scope, receive: Receive, send: Send) -> None:
    await respond(send, b"x", headers=((b"x-a", b"1\r\nx-b: 2"),))


async def promise_more(scope: Scope, receive: Receive, send: Send) -> None:
    await respond(send, b"x", headers=((b"content-length", b"2"),))


@each_case(
    "app",
    [
        raise_at_once,
        raise_after_start,
        return_at_once,
        cancel_itself,
        send_body_first,
        send_nonsense,
        start_twice,
        send_text,
        break_a_header,
        promise_more,
    ],
)
async def test_a_failure_before_the_first_byte_is_a_500_and_keeps_the_connection(app: Any) -> None:
    async with serving(app) as server, connected(server) as client:
        for _ in range(2):
            response = await client.get()
            assert (response.status, response.body) == (500, b"Internal Server Error")


async def test_a_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(raise_at_once) as server, connected(server) as client:
        await client.get("/where%0Afrom")
    (record,) = tracebacks(caplog)
    assert record.getMessage() == "GET /where%0Afrom failed: ValueError('why')"


async def test_an_error_that_explains_itself_is_logged_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ActorLostError("The replica is gone.")

    async with serving(app) as server, connected(server) as client:
        await client.get()
    assert "The replica is gone." in caplog.text
    assert tracebacks(caplog) == []


@each_case("ending", ["raise", "return", "too short", "too long", "cancel"])
async def test_a_failure_within_the_response_cuts_the_connection(ending: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"9")] if ending.startswith("too") else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if ending == "raise":
            raise ValueError("why")
        if ending == "cancel":
            raise asyncio.CancelledError
        if ending.startswith("too"):
            body = b"x" if ending == "too short" else b"far too long"
            await send({"type": "http.response.body", "body": body})

    async with serving(app) as server, connected(server) as client:
        await client.send(request())
        assert (await client.head())[0] == 200
        rest = await client.rest()
        assert b"half" in rest
        assert not rest.endswith(b"0\r\n\r\n")
        assert len(rest) < 12


async def test_a_failure_after_the_response_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, b"whole")
        assert await receive() == {"type": "http.disconnect"}
        await respond(send, b"more")

    async with serving(app) as server, connected(server) as client:
        for _ in range(2):
            assert (await client.get()).body == b"whole"
    assert len(tracebacks(caplog)) == 2


# ---- clients that go away


async def vanish(client: Client, how: str) -> None:
    if how == "close":
        client.writer.close()
    else:
        client.reset()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(
    "data",
    [
        request(),
        request(method="POST", body=b"whole"),
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
async def test_a_disconnect_cancels_the_request(
    data: bytes, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Hanging()
    async with serving(app) as server, connected(server) as client:
        await client.send(data)
        await poll_for(lambda: app.running)
        await vanish(client, how)
        await poll_for(lambda: app.cancelled)
    assert caplog.records == []


async def test_an_application_that_survives_its_cancellation_receives_the_disconnect() -> None:
    heard: list[Message] = []
    errors: list[BaseException] = []
    running = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            heard.append(await receive())
            try:
                await respond(send, b"too late")
            except OSError as error:
                errors.append(error)

    async with serving(app) as server, connected(server) as client:
        await client.send(request())
        await running.wait()
        client.writer.close()
        await poll_for(lambda: errors)
    assert heard == [{"type": "http.disconnect"}]


async def test_an_application_may_return_on_its_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        events.append("running")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("returned")

    async with serving(app) as server, connected(server) as client:
        await client.send(request())
        await poll_for(lambda: events)
        client.writer.close()
        await poll_for(lambda: len(events) == 2)
    assert caplog.records == []


def test_a_disconnect_within_a_stream_ends_it_quietly(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        ended = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await send({"type": "http.response.start", "status": 200})
                while True:
                    await send({"type": "http.response.body", "body": bytes(MIB), "more_body": True})
            finally:
                ended.append(True)

        async with serving(app) as server, connected(server) as client:
            await client.send(request())
            await client.head()
            client.reset()
            await poll_for(lambda: ended)

    with caplog.at_level(logging.INFO, logger="daskserve"):
        run(test)
    assert tracebacks(caplog) == []


async def test_work_after_the_response_outlives_the_connection() -> None:
    done = []
    gone = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send)
        await gone.wait()
        done.append(True)

    async with serving(app) as server:
        async with connected(server) as client:
            assert (await client.get()).status == 200
        async with connected(server) as other:
            await other.send(request())
            assert (await other.response()).status == 200
        gone.set()
        await poll_for(lambda: len(done) == 2)
