"""HTTPS: certificates and their errors, and the ingress behind TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from distributed import Security
from http_harness import (
    HANDSHAKE,
    Client,
    advance,
    connected,
    hits,
    on_each_transport,
    poll_for,
    request,
    serving,
)

from daskserve.common.types import Receive, Send
from daskserve.errors import BadRequestError
from daskserve.options.http import HTTPOptions
from daskserve.proxies.asgi import Scope
from daskserve.proxies.server.tls import server_context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate, its key, and the key of another certificate."""
    folder = tmp_path_factory.mktemp("certificates")
    mine, other = Security.temporary(), Security.temporary()
    (folder / "cert.pem").write_text(mine.tls_scheduler_cert)
    (folder / "key.pem").write_text(mine.tls_scheduler_key)
    (folder / "other.pem").write_text(other.tls_scheduler_key)
    (folder / "locked.pem").write_bytes(locked(mine.tls_scheduler_key))
    return folder


def locked(key: str) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return serialization.load_pem_private_key(key.encode(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"sesame"),
    )


def trusting(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    context.check_hostname = False
    return context


async def tell_scheme(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": scope["scheme"]})
        await send({"type": "websocket.close"})
        return
    count, more = 0, True
    while more:
        message = await receive()
        count, more = count + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(4):
        await send({"type": "http.response.body", "body": bytes(count // 4), "more_body": True})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


def context_of(folder: Path) -> Any:
    return server_context(str(folder / "cert.pem"), str(folder / "key.pem"))


@on_each_transport
async def test_handshakes_that_clients_do_not_complete_give_way_at_the_limit(folder: Path) -> None:
    async with serving(tell_scheme, tls=context_of(folder), max_connections=2) as server:
        async with connected(server) as silent, connected(server) as second:
            await poll_for(lambda: ("http_connections", ("i",), 2) in server.samples("i"))
            advance(2)
            streams = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting(folder))
            client = Client(*streams)
            await client.send(request())
            assert (await client.response()).body == b"https"
            assert await silent.rest() == b""
            assert ("http_evicted_connections", ("i",), 1) in server.samples("i")
            assert not second.reader.at_eof()
            client.writer.close()


@on_each_transport
async def test_requests_work_over_tls(folder: Path) -> None:
    """Two requests on one connection, with bodies larger than any buffer."""

    async with serving(tell_scheme, tls=context_of(folder)) as server:
        assert server.urls == (f"https://127.0.0.1:{server.port}",)
        streams = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting(folder))
        client = Client(*streams)
        for _ in range(2):
            await client.send(request("/", "Content-Length: 4000000", method="POST") + bytes(4_000_000))
            response = await client.response()
            assert (response.status, len(response.body)) == (200, 4_000_005)
            assert response.body.endswith(b"https")
        client.writer.close()
        await client.writer.wait_closed()


@on_each_transport
async def test_a_malformed_request_over_tls_is_refused(folder: Path) -> None:
    async with serving(tell_scheme, tls=context_of(folder)) as server:
        streams = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting(folder))
        client = Client(*streams)
        await client.send(b"no request\r\n\r\n")
        assert (await client.response()).status == 400
        assert await client.rest() == b""
        client.writer.close()
        await poll_for(lambda: "0 connections" in repr(server))


@on_each_transport
async def test_websockets_work_over_tls(folder: Path) -> None:
    async with serving(tell_scheme, tls=context_of(folder)) as server:
        streams = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting(folder))
        client = Client(*streams)
        await client.send(request("/", *HANDSHAKE))
        assert (await client.head())[0] == 101
        assert await client.reader.readexactly(5) == b"\x81\x03wss"
        client.writer.close()
        await client.writer.wait_closed()


@on_each_transport
async def test_plain_http_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tell_scheme, tls=context_of(folder)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request("/"))
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
        assert b"HTTP/" not in answer
        writer.close()
        await poll_for(lambda: "0 connections" in repr(server))


@on_each_transport
async def test_a_client_without_a_tls_handshake_is_disconnected(folder: Path) -> None:
    async with serving(tell_scheme, tls=context_of(folder), keep_alive_timeout_s=0.05) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await reader.read() == b""
        assert hits(server) == {"keep_alive_timeout_s": 1}
        writer.close()


def test_an_encrypted_key_is_opened_with_its_password(folder: Path) -> None:
    files = str(folder / "cert.pem"), str(folder / "locked.pem")
    assert server_context(*files, "sesame") is not None
    for password, hint in (("wrong", "does not open it"), (None, "may need ssl_keyfile_password")):
        with pytest.raises(BadRequestError, match=hint):
            server_context(*files, password)


@pytest.mark.parametrize("option", ["ssl_certfile", "ssl_keyfile"])
def test_a_missing_file_is_named_in_the_error(option: str, folder: Path) -> None:
    files = {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}
    files[option] = str(folder / "nowhere.pem")
    with pytest.raises(BadRequestError, match=rf"{option}='.*nowhere\.pem' cannot be read on .*No such file"):
        server_context(files["ssl_certfile"], files["ssl_keyfile"])


def test_a_key_of_another_certificate_is_refused(folder: Path) -> None:
    with pytest.raises(BadRequestError, match=r"other\.pem' on .* are not a certificate and its key"):
        server_context(str(folder / "cert.pem"), str(folder / "other.pem"))


def test_a_key_needs_a_certificate() -> None:
    with pytest.raises(ValueError, match="need an ssl_certfile"):
        HTTPOptions(ssl_keyfile="key.pem")


def test_without_a_certificate_there_is_no_tls() -> None:
    assert server_context(None) is None


def test_the_password_is_not_shown() -> None:
    options = HTTPOptions(ssl_certfile="cert.pem", ssl_keyfile_password="sesame")
    assert "sesame" not in repr(options)
