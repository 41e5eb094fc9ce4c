"""A proxy and children whose connections move between them.

All servers run in one process, so a "child" here is another server with its own copies of the sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from http_harness import (
    Client,
    make_server,
    respond,
    serving,
)

from daskserve.common.types import Receive, Send
from daskserve.data.replica.process.given_connections import GivenConnections
from daskserve.data.replica.process.listening import Port
from daskserve.errors import ActorLostError
from daskserve.loops.connection_table import (
    LostAttempt,
    MovedConnection,
)
from daskserve.proxies.asgi import LOST_REPLICA, ASGIApp, Scope
from daskserve.proxies.server.server import HTTPServer

LOST = LostAttempt(ActorLostError("gone", begun=True), "tcp://w:1")


def named(name: str, gate: asyncio.Event | None = None) -> ASGIApp:
    """Return an application that answers with its name and the size of the body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        if scope["path"] == "/held" and gate is not None:
            await gate.wait()
        lost = " lost" if LOST_REPLICA in scope else ""
        await respond(send, f"{name} {size}{lost}".encode())

    return app


class Proxy:
    """A server that gives connections to children, which answer all paths but ``/elsewhere``."""

    def __init__(self, server: HTTPServer) -> None:
        self.server = server
        self.port = Port("proxy", b"start", 200, server.serve)
        self.endpoints: dict[str | None, str | None] = {"/elsewhere": "other", None: None}
        server.give_to(self._taker_of, self.port.given, self.port.evict)
        self.port.on_offer = server.set_giving

    def _taker_of(self, path: str | None) -> Callable[[MovedConnection], bool] | None:
        return self.port.taker_of(self.endpoints.get(path, "e"))

    @contextlib.asynccontextmanager
    async def child(self, app: ASGIApp, **options: Any) -> AsyncIterator[tuple[HTTPServer, GivenConnections]]:
        given = self.port.connections()
        server = make_server(app, **options)
        server.receive(given.files, lambda path: path == "/elsewhere")
        server.start()
        self.port.offer(given, frozenset("e"))
        try:
            yield server, given
        finally:
            self.port.withdraw(given)
            await server.stop()
            self.port.drop(given)


@contextlib.asynccontextmanager
async def proxy_of(app: ASGIApp, **options: Any) -> AsyncIterator[Proxy]:
    async with serving(app, **options) as server:
        yield Proxy(server)


async def body(client: Client, path: str = "/") -> str:
    response = await client.get(path)
    assert "connection" not in response.headers
    return response.body.decode()
