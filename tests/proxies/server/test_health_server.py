"""The health port beside the port of a proxy."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from http_harness import HANDSHAKE, connected, hello, make_server, request
from ports import free_port
from tables import each_case

from daskserve.common.types import Envelope, Receive, Send
from daskserve.errors import PortInUseError
from daskserve.options.http import HTTPOptions
from daskserve.proxies.asgi import ASGIApp
from daskserve.proxies.ingress.app import IngressApp
from daskserve.proxies.ingress.routes import RouteTable
from daskserve.proxies.server.health import health_server
from daskserve.proxies.server.server import HTTPServer

ROUTES = RouteTable({"/": {"endpoint": "e", "methods": ["GET"]}})


def make_ingress(table: RouteTable | None) -> IngressApp:
    async def dispatch(endpoint: str, envelope: Envelope, receive: Receive, send: Send) -> None:
        raise AssertionError("no request of the health port goes to user code")

    return IngressApp(options=HTTPOptions(), routes=table, dispatch=dispatch, rng=random.Random(1))


def make_health(app: ASGIApp, *, claims_port: bool = True, port: int = 0) -> HTTPServer:
    options = HTTPOptions(health_port=port or free_port())
    found = health_server(app, options, reuse_port=True, claims_port=claims_port)
    assert found is not None
    return found


@contextlib.asynccontextmanager
async def open_health(app: ASGIApp, *, claims_port: bool = True, port: int = 0) -> AsyncIterator[HTTPServer]:
    server = make_health(app, claims_port=claims_port, port=port)
    await server.bind()
    server.start()
    try:
        yield server
    finally:
        await server.stop()


async def test_it_answers_what_the_ingress_says_of_its_health() -> None:
    for path, table, status in (
        ("/-/healthz", ROUTES, 200),
        ("/-/readyz", ROUTES, 200),
        ("/-/healthz", RouteTable({}), 503),
        ("/-/readyz", None, 503),
    ):
        ingress = make_ingress(table)
        async with open_health(ingress) as server, connected(server) as client:
            assert (await client.get(path)).status == status
            assert (await client.get(path, method="HEAD")).status == status
            assert (await client.get(path, method="DELETE")).status == 405
            ingress.start_draining()
            assert (await client.get(path)).status == 503


@each_case("path", ["/", "/a", "/-/routes", "/-/healthz/x"])
async def test_it_answers_nothing_else(path: str) -> None:
    async with open_health(make_ingress(ROUTES)) as server, connected(server) as client:
        response = await client.get(path)
        assert (response.status, response.body) == (
            404,
            b"This port answers /-/healthz and /-/readyz only.",
        )
        await client.send(request("/-/healthz", "Content-Length: 1", method="GET") + b"x")
        assert (await client.response()).status == 413


async def test_it_opens_no_websockets() -> None:
    async with open_health(make_ingress(RouteTable({}))) as server, connected(server) as client:
        assert (await client.get("/-/healthz", *HANDSHAKE)).status == 403


def test_there_is_none_by_default() -> None:
    assert health_server(hello, HTTPOptions()) is None


def test_it_listens_where_the_options_say() -> None:
    place = {"port": 80, "health_port": 81, "max_connections": 1, "ssl_certfile": "x.pem"}
    for more, url in (
        ({"host": "10.0.0.1"}, "http://10.0.0.1:81"),
        ({"health_host": "10.0.0.2"}, "http://10.0.0.2:81"),
    ):
        found = health_server(hello, HTTPOptions(**place, **more))
        assert found is not None
        assert found.urls == (url,)
        assert found._acceptor._max_connections == 100
    with pytest.raises(ValueError, match="health_port and port are both 8000"):
        HTTPOptions(health_port=8000)


async def test_a_taken_health_port_is_an_error_that_names_the_option() -> None:
    proxy = make_server(hello)
    await proxy.bind()
    with pytest.raises(PortInUseError, match=r'http_options=\{"health_port": ...\}\.'):
        await make_health(hello, port=proxy.port).bind()
    await proxy.stop()


async def test_a_successor_answers_from_the_moment_in_which_a_proxy_drains() -> None:
    old, new = make_ingress(None), make_ingress(ROUTES)

    async with open_health(old) as first:
        async with open_health(new, claims_port=False, port=first.port):
            await first.drain(1)
            for _ in range(20):
                async with connected(first) as client:
                    assert (await client.get("/-/healthz")).status == 200
        with pytest.raises(ConnectionRefusedError):
            async with connected(first):
                pass
