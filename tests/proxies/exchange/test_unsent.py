"""Responses that wait for their client while their application continues."""

from __future__ import annotations

import asyncio

from http_harness import connected, hits, poll_for, request, respond, serving
from tables import each_case

from daskserve.common.types import Receive, Send
from daskserve.proxies.asgi import Scope
from daskserve.proxies.server.server import HTTPServer

MIB = 1 << 20
#: More bytes than the operating system buffers for a client that does not read.
LARGE = bytes(8 * MIB)


def unsent_bytes(server: HTTPServer) -> float:
    return next(value for name, labels, value in server.samples("i") if labels[1:] == ("unsent",))


class Large:
    """Sends a large response, and records when the application has ended."""

    def __init__(self) -> None:
        self.has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, LARGE)
        self.has_ended = True


async def test_an_application_that_has_sent_its_response_does_not_wait_for_the_client() -> None:
    app = Large()
    async with serving(app) as server, connected(server) as client:
        client.writer.transport.pause_reading()
        await client.send(request())
        await poll_for(lambda: app.has_ended)
        assert unsent_bytes(server) >= len(LARGE)
        client.writer.transport.resume_reading()
        assert (await client.response()).body == LARGE
        await poll_for(lambda: unsent_bytes(server) == 0)
        assert (await client.get("/next")).body == LARGE


async def test_a_draining_server_sends_what_waits_for_its_client() -> None:
    app = Large()
    async with serving(app) as server, connected(server) as client:
        client.writer.transport.pause_reading()
        await client.send(request())
        await poll_for(lambda: app.has_ended)
        draining = asyncio.create_task(server.drain(5))
        await asyncio.sleep(0.01)
        client.writer.transport.resume_reading()
        assert (await client.response()).body == LARGE
        await draining


async def test_an_application_waits_if_too_much_waits_already() -> None:
    app = Large()
    async with serving(app, max_buffered_bytes=MIB) as server, connected(server) as client:
        client.writer.transport.pause_reading()
        await client.send(request())
        await poll_for(lambda: unsent_bytes(server))
        await asyncio.sleep(0.02)
        assert not app.has_ended
        client.writer.transport.resume_reading()
        assert (await client.response()).body == LARGE
        assert app.has_ended
        assert unsent_bytes(server) == 0


async def test_a_client_that_leaves_with_its_response_unread_leaves_nothing() -> None:
    app = Large()
    async with serving(app) as server, connected(server) as client:
        client.writer.transport.pause_reading()
        await client.send(request())
        await poll_for(lambda: app.has_ended)
        client.reset()
        await poll_for(lambda: unsent_bytes(server) == 0)


@each_case(("max_unsent_bytes", "ends"), [(64 * MIB, True), (MIB, False)])
async def test_a_stream_runs_ahead_of_its_client_as_far_as_it_may(max_unsent_bytes: int, ends: bool) -> None:
    parts = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal parts
        await send({"type": "http.response.start", "status": 200})
        for _ in range(12):
            await send({"type": "http.response.body", "body": bytes(MIB), "more_body": True})
            parts += 1
        await send({"type": "http.response.body", "body": b""})

    async with serving(app, max_unsent_bytes=max_unsent_bytes) as server, connected(server) as client:
        client.writer.transport.pause_reading()
        await client.send(request())
        await poll_for(lambda: unsent_bytes(server) > MIB)
        if ends:
            await poll_for(lambda: parts == 12)
        else:
            await asyncio.sleep(0.02)
            assert parts < 12
            assert unsent_bytes(server) <= max_unsent_bytes + 2 * MIB
        client.writer.transport.resume_reading()
        assert len((await client.response()).body) == 12 * MIB
        assert hits(server) == ({} if ends else {"max_unsent_bytes": 1})
        await poll_for(lambda: unsent_bytes(server) == 0)
