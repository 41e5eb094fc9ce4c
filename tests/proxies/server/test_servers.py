"""The life of the server: bind, start, drain, stop; and the ingress behind it."""

from __future__ import annotations

import asyncio
import random
import socket

import httpx
import pytest
from http_harness import (
    HANDSHAKE,
    Hanging,
    advance,
    connected,
    hello,
    make_server,
    on_each_loop,
    on_each_transport,
    poll_for,
    request,
    respond,
    run,
    serving,
)
from tables import each_case

from daskserve.common.clock import LoopClock
from daskserve.common.types import Envelope, Receive, Send
from daskserve.errors import BackPressureError, BadRequestError, PortInUseError
from daskserve.options.http import HTTPOptions
from daskserve.proxies.exchange.websocket.session import DISCONNECT_GRACE_S
from daskserve.proxies.ingress.app import IngressApp
from daskserve.proxies.ingress.routes import RouteTable
from daskserve.proxies.server.disconnects import PERIOD_S

pytestmark = pytest.mark.smoke


@each_case("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1", "[::1]"])
async def test_urls_reach_the_server(host: str) -> None:
    if ":" in host:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 here")
    async with serving(hello, host=host) as server:
        async with httpx.AsyncClient(trust_env=False) as client:
            for url in server.urls:
                assert (await client.get(f"{url}/x")).text == "/x"


def test_urls_name_the_public_host_for_a_wildcard() -> None:
    assert make_server(hello, host="0.0.0.0", port=80).urls == ("http://127.0.0.1:80",)
    assert make_server(hello, host="::", port=80, public_host="fe80::1").urls == ("http://[fe80::1]:80",)
    assert make_server(hello, host="10.0.0.1", port=80, public_host="x").urls == ("http://10.0.0.1:80",)


@each_case("reuse_port", [False, True])
async def test_a_taken_port_is_refused_when_binding_unless_another_does_as_well(reuse_port: bool) -> None:
    async with serving(hello, reuse_port=reuse_port) as server:
        second = make_server(hello, port=server.port, reuse_port=reuse_port)
        with pytest.raises(PortInUseError, match=str(server.port)):
            await second.bind()
        await second.bind(may_move=True)
        second.start()
        assert second.port not in (0, server.port)
        async with connected(second) as client:
            assert (await client.get()).status == 200
        await second.stop()


async def test_servers_of_one_instance_share_their_port() -> None:
    async with serving(hello, reuse_port=True) as first:
        second = make_server(hello, host="127.0.0.1", port=first.port, reuse_port=True, claims_port=False)
        await second.bind()
        second.start()
        async with connected(first) as client:
            assert (await client.get()).status == 200
        await second.stop()


def test_a_foreign_host_is_refused_when_binding() -> None:
    with pytest.raises(BadRequestError, match="not an address of this machine"):
        asyncio.run(make_server(hello, host="192.0.2.1", port=0).bind())


async def test_a_server_that_never_started_releases_its_port() -> None:
    server = make_server(hello)
    await server.bind()
    with socket.create_connection(("127.0.0.1", server.port)):
        await server.drain(60)
    await server.stop()
    await server.stop()
    again = make_server(hello, port=server.port)
    await again.bind()
    await again.stop()


@on_each_loop
async def test_stop_cancels_requests_and_closes_connections() -> None:
    app = Hanging()
    async with serving(app) as server:
        async with connected(server) as idle, connected(server) as busy, connected(server) as uploading:
            await busy.send(request())
            await uploading.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n")
            uploading.writer.write(bytes(1_000_000))
            await poll_for(lambda: app.running == 2)
            await server.stop()
            assert (app.running, app.cancelled) == (0, 2)
            for client in (idle, busy, uploading):
                assert await client.rest() == b""


async def test_stop_does_not_wait_for_a_request_that_will_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("daskserve.proxies.server.server._CANCEL_S", 0.01)

    entered, released = asyncio.Event(), asyncio.Event()

    async def app(scope: object, receive: Receive, send: Send) -> None:
        try:
            entered.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await released.wait()
            raise

    server = make_server(app)
    await server.bind()
    server.start()
    async with connected(server) as client:
        await client.send(request())
        await entered.wait()
        await server.stop()
    assert "1 requests did not end" in caplog.text
    released.set()
    await poll_for(lambda: len(asyncio.all_tasks()) == 1)


@on_each_transport
async def test_a_connection_that_has_ended_is_not_watched() -> None:
    async with serving(hello) as server:
        async with connected(server) as client:
            assert (await client.get("/", "Connection: close")).status == 200
            assert await client.rest() == b""
        await poll_for(lambda: "0 connections" in repr(server))
        assert len(server.state.idle_watch) == 0


@on_each_loop
async def test_a_connection_being_accepted_during_stop_is_closed() -> None:
    for turns in range(6):
        async with serving(hello) as server:
            clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop()
            for client in clients:
                with client:
                    client.settimeout(5)
                    try:
                        assert client.recv(1) == b""
                    except ConnectionResetError:
                        pass  # it was still in the backlog


# ---- clients that hang up unheard


@on_each_transport
@pytest.mark.parametrize("pieces", [(request() + b"GET /",), (request(), b"GET /"), (request() + request(),)])
async def test_a_disconnect_after_unread_data_is_detected(pieces: tuple[bytes, ...]) -> None:
    app = Hanging()
    async with serving(app) as server:
        async with connected(server) as client:
            await client.send(pieces[0])
            await poll_for(lambda: app.running)
            for piece in pieces[1:]:
                await client.send(piece)
            advance(PERIOD_S)
            await poll_for(lambda: server.state.connections)
            assert app.cancelled == 0  # 1. it is still there
        advance(2 * PERIOD_S)
        await poll_for(lambda: app.cancelled)  # 2. and now it is not
        assert app.running == 0


@on_each_transport
async def test_a_disconnect_before_a_websocket_is_accepted_is_detected() -> None:
    app = Hanging()
    handshake = request("/", *HANDSHAKE)
    async with serving(app) as server:
        async with connected(server) as client:
            await client.send(handshake + b"\x81\x82maskhi")
            await poll_for(lambda: app.running)
        advance(2 * PERIOD_S)
        await poll_for(lambda: server.state.sockets and "gone" in repr(*server.state.sockets))
        advance(DISCONNECT_GRACE_S)
        await poll_for(lambda: app.cancelled)


# ---- draining


@on_each_loop
async def test_draining_finishes_requests_and_announces_the_close() -> None:
    app = Hanging()
    async with serving(app) as server, connected(server) as client:
        await client.send(request())
        await poll_for(lambda: app.running)
        draining = asyncio.create_task(server.drain(5))
        await poll_for(lambda: _is_refused(server.port))
        assert not draining.done()
        app.go.set()
        response = await client.response()
        assert (response.body, response.headers["connection"]) == (b"at last", "close")
        await draining


def test_draining_answers_a_kept_connection_once_more() -> None:
    class Gated(LoopClock):
        async def sleep(self, delay_s: float) -> None:
            await (gate.wait() if delay_s else super().sleep(0))

    async def test() -> None:
        async with serving(hello, clock=Gated()) as server, connected(server) as client:
            assert "connection" not in (await client.get()).headers
            draining = asyncio.create_task(server.drain(5))
            await poll_for(lambda: _is_refused(server.port))
            response = await client.get("/again")
            assert (response.body, response.headers["connection"]) == (b"/again", "close")
            assert await client.rest() == b""
            gate.set()
            await draining

    gate = asyncio.Event()

    run(test)


async def test_draining_ends_with_its_grace() -> None:
    app = Hanging()
    async with serving(app) as server, connected(server) as client:
        await client.send(request())
        await poll_for(lambda: app.running)
        await server.drain(0.01)
        assert app.running == 1
        await server.stop()
        assert app.cancelled == 1


async def test_draining_an_idle_server_takes_no_time() -> None:
    async with serving(hello) as server:
        started = asyncio.get_running_loop().time()
        await server.drain(60)
        assert asyncio.get_running_loop().time() - started < 1


async def test_draining_closes_idle_connections_after_a_moment() -> None:
    class Watched(LoopClock):
        slept_s = 0.0

        async def sleep(self, delay_s: float) -> None:
            self.slept_s += delay_s
            await super().sleep(0)

    clock = Watched()
    async with serving(hello, clock=clock) as server, connected(server) as client:
        assert (await client.get()).status == 200
        await server.drain(60)
    assert 0.05 <= clock.slept_s <= 1


@on_each_loop
@pytest.mark.parametrize("is_late", [False, True])
async def test_draining_serves_existing_connections(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    """Connections in the backlog were accepted by the kernel: their clients believe they are served.

    Late connections arrive between the last check of the backlog and the end of the socket.
    """
    if is_late:
        monkeypatch.setattr("daskserve.proxies.server.server.is_readable", lambda sockets: False)

    async with serving(hello) as server:
        clients = []
        for _ in range(20):
            client = socket.create_connection(("127.0.0.1", server.port))
            client.sendall(request())
            client.setblocking(False)
            clients.append(client)
        await server.drain(5)
        loop = asyncio.get_running_loop()
        for client in clients:
            with client:
                assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 200")


@on_each_transport
async def test_closing_one_of_several_servers_on_a_port_loses_no_request() -> None:
    """Clients connect all the time, each for one request, while servers start and stop."""

    answers: list[bytes] = []
    is_over = False

    async def ask(port: int) -> None:
        while not is_over:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request())
            answers.append(await reader.readline())
            writer.close()
            await writer.wait_closed()

    async with serving(hello, reuse_port=True) as first:
        clients = [asyncio.create_task(ask(first.port)) for _ in range(4)]
        for count in range(1, 11):
            second = make_server(hello, port=first.port, reuse_port=True, claims_port=False)
            await second.bind()
            second.start()
            await poll_for(lambda least=20 * count: len(answers) >= least)  # type: ignore[misc]
            await second.drain(5)
            await second.stop()
        is_over = True
        await asyncio.gather(*clients)
    assert set(answers) == {b"HTTP/1.1 200 OK\r\n"}


def _is_refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


# ---- with the ingress


async def test_the_ingress_over_http() -> None:
    async def dispatch(endpoint: str, envelope: Envelope, receive: Receive, send: Send) -> None:
        if endpoint == "busy":
            raise BackPressureError("The queue is full.", retry_after_s=1.5)
        if endpoint == "slow":
            await asyncio.Event().wait()
        await respond(send, envelope.head["path"].encode())

    table = RouteTable(
        {f"/{name}": {"endpoint": name, "methods": ["GET"]} for name in ("ok", "busy", "slow")}
    )
    ingress = IngressApp(
        options=HTTPOptions(),
        routes=table,
        dispatch=dispatch,
        rng=random.Random(1),
    )
    async with serving(ingress) as server:
        async with httpx.AsyncClient(base_url=server.urls[0], trust_env=False) as client:
            found = [
                (response.status_code, response.text)
                for response in [
                    await client.get("/ok/x"),
                    await client.get("/none"),
                    await client.post("/ok", content=b"x"),
                    await client.get(
                        "/slow", headers={"x-request-id": "7", "x-request-timeout-seconds": "0.02"}
                    ),
                    await client.get("/busy"),
                    await client.get("/-/healthz"),
                    await client.head("/-/healthz"),
                ]
            ]
    where = f"Ping http://127.0.0.1:{server.port}/-/routes for available routes."
    assert found == [
        (200, "/ok/x"),
        (404, f"Path '/none' not found. {where}"),
        (405, "Methods POST not allowed. Available HTTP methods are ['GET']."),
        (408, "Request 7 timed out after 0.02s."),
        (503, "The queue is full."),
        (200, "success"),
        (200, ""),
    ]
    assert ingress.responses() == {"2xx": 3, "4xx": 3, "5xx": 1}
