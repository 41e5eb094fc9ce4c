"""The configuration of nginx in SECURITY.md works with daskserve behind it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from blocking_websocket import WebSocketClient
from distributed.security import Security
from ports import free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from wsproto.events import AcceptConnection
from wsproto.events import Request as Handshake

import daskserve as serve
from daskserve.testing import local_instance

DEADLINE_S = 10.0
SECURITY = (Path(__file__).parents[2] / "SECURITY.md").read_text()
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

pytestmark = pytest.mark.skipif(NGINX is None, reason="Debian's package nginx is not installed")


def build() -> Starlette:
    async def info(request: Request) -> JSONResponse:
        size_bytes = len(await request.body())
        assert request.client is not None
        return JSONResponse([request.method, str(request.url), request.client.host, size_bytes])

    async def chat(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(f"{websocket.url.scheme} for {websocket.headers['host']}")
        await websocket.send_text((await websocket.receive_text()).upper())
        await websocket.close()

    return Starlette(routes=[Route("/info", info, methods=["GET", "POST"]), WebSocketRoute("/chat", chat)])


def configuration(folder: Path, front: int, back: int) -> str:
    """Return the page's configuration with other addresses and files, and what makes it a whole one."""
    (text,) = re.findall(r"```nginx\n(.*?)```", SECURITY, re.DOTALL)
    changes = {
        "server 127.0.0.1:8000;": f"server 127.0.0.1:{back};",
        "listen 443 ssl": f"listen 127.0.0.1:{front} ssl",
        "/etc/ssl/models.example.org/fullchain.pem": f"{folder}/cert.pem",
        "/etc/ssl/models.example.org/privkey.pem": f"{folder}/key.pem",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    temporary = "\n".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    return (
        f"{user} daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {temporary}\n{text}\n}}"
    )


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, ssl.SSLContext]]:
    """The port of nginx in front of an instance, and a context that trusts it."""
    folder = tmp_path_factory.mktemp("nginx")
    security = Security.temporary()
    (folder / "cert.pem").write_text(security.tls_scheduler_cert)
    (folder / "key.pem").write_text(security.tls_scheduler_key)
    context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    context.check_hostname = False
    with local_instance(http_options={"port": 0, "trusted_forwarders": ["127.0.0.1"]}) as client:
        client.run(serve.deployment(serve.ingress(build)()).bind())
        back = httpx.URL(client.http_urls()[0]).port
        assert back is not None
        port = free_port()
        (folder / "nginx.conf").write_text(configuration(folder, port, back))
        assert NGINX is not None
        nginx = subprocess.Popen(
            [NGINX, "-p", folder, "-e", folder / "error.log", "-c", folder / "nginx.conf"],
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for_port(nginx, port, folder / "error.log")
            yield port, context
        finally:
            nginx.terminate()
            nginx.wait(DEADLINE_S)


def wait_for_port(process: subprocess.Popen[Any], port: int, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert process.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_requests_arrive_with_the_clients_address_and_scheme(front: tuple[int, ssl.SSLContext]) -> None:
    port, context = front
    with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context) as client:
        forged = {"X-Forwarded-For": "6.6.6.6", "X-Forwarded-Proto": "http"}
        answer = client.get("/info", headers=forged)
        assert answer.json() == ["GET", f"https://127.0.0.1:{port}/info", "127.0.0.1", 0]
        body = b"x" * (3 << 20)
        assert client.post("/info", content=body, headers={"Expect": "100-continue"}).json()[3] == len(body)
        assert client.post("/info", content=iter([body, body])).json()[3] == 2 * len(body)
        assert client.get("/-/healthz").text == "success"
        hidden = client.get("/-/routes")
        assert (hidden.status_code, "info" in hidden.text) == (404, False)


@contextmanager
def connected(front: tuple[int, ssl.SSLContext]) -> Iterator[ssl.SSLSocket]:
    port, context = front
    with (
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as plain,
        context.wrap_socket(plain) as sock,
    ):
        yield sock


def test_a_large_body_is_refused_by_its_head(front: tuple[int, ssl.SSLContext]) -> None:
    with connected(front) as sock:
        sock.sendall(b"POST /info HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % ((100 << 20) + 1))
        assert sock.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_websockets_pass_through(front: tuple[int, ssl.SSLContext]) -> None:
    with connected(front) as sock:
        client = WebSocketClient(sock)
        client.send(Handshake(host="models.example.org", target="/chat"))
        assert isinstance(client.event(), AcceptConnection)
        assert client.message() == "wss for models.example.org"
        assert client.ask("hello") == "HELLO"
        assert client.closed() == 1000
