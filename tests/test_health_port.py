"""A proxy with a health port, with the real control and data plane in one process."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from typing import Any

import pytest
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from daskserve.errors import PortInUseError
from daskserve.options.http import HTTPOptions
from daskserve.telemetry.collector import PROCESS
from daskserve.testing import local_instance


class Guard:
    """A middleware that refuses all requests."""

    def __init__(self, app: Any) -> None:
        pass

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("who are you?", 401)(scope, receive, send)


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=20) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_health_has_a_port_outside_of_the_middlewares() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    options = HTTPOptions(port=0, health_port=port, middlewares=[Middleware(Guard)])
    health = f"http://127.0.0.1:{port}/-/healthz"
    with local_instance(http_options=options) as client:
        (url,) = client.http_urls()
        assert status_of(f"{url}/-/healthz") == 401
        assert status_of(health) == 503  # there is no route yet
        client.deploy("d", "builtins.repr")
        assert (status_of(health), status_of(health.replace("healthz", "readyz"))) == (200, 200)
    with pytest.raises(urllib.error.URLError, match="refused"):
        status_of(health)


def test_refusals_at_the_health_port_are_counted_with_the_proxy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with local_instance(http_options=HTTPOptions(port=0, health_port=port)):
        with socket.create_connection(("127.0.0.1", port), 20) as probe:
            probe.sendall(b"POST /-/healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx")
            assert b" 413 " in probe.recv(1000)
        found = {(name, labels[1:]): value for name, labels, value in PROCESS.samples() if value}
        assert found["http_requests", ("", "", "POST", "413")] == 1
        assert found["http_limited_requests", ("max_body_bytes",)] == 1


def test_a_taken_health_port_fails_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match="health_port"):
            with local_instance(http_options=HTTPOptions(port=0, health_port=port)):
                pass
