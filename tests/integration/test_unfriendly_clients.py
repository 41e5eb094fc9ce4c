"""Clients that hold what others need: slots, by bodies that do not come and responses that are not read."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from dask_processes import ExternalCluster, fetch

import daskserve as serve

on_both_servers = pytest.mark.parametrize("server", ["tornado", "asyncio"], indirect=True)


def plain(request: Any) -> str:
    return "at once"


async def download(request: Any) -> AsyncIterator[bytes]:
    for _ in range(256 if "long" in request.query_params else 1):
        yield bytes(65536)


@contextmanager
def clients_that_send(count: int, url: str, data: bytes) -> Iterator[None]:
    """Have clients send something, and then neither read nor write."""
    parts = urlsplit(url)
    with ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection((parts.hostname or "", parts.port or 0)))
            sock.sendall(data)
        yield


def seconds_for_five(url: str) -> float:
    began = time.perf_counter()
    for _ in range(5):
        assert fetch(url).text == "at once"
    return time.perf_counter() - began


@on_both_servers
def test_nine_clients_that_send_one_byte_of_a_body_do_not_stop_a_plain_function(
    client: serve.Client, url: str
) -> None:
    client.create_backend("plain", plain)
    client.create_endpoint("plain", backend="plain", route="/plain", methods=["GET", "POST"])
    usual_s = seconds_for_five(f"{url}/plain")
    with clients_that_send(9, url, b"POST /plain HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nx"):
        time_s = seconds_for_five(f"{url}/plain")
    assert time_s < 3 * usual_s + 0.5


@on_both_servers
def test_downloads_that_are_not_read_give_way_to_others(external: ExternalCluster, server: str) -> None:
    http = {"port": 0, "server": server, "busy_write_stall_timeout_s": 0.2}
    with serve.start(dask_client=external.client, http_options=http) as client:
        client.create_backend("download", download, config={"max_concurrent_queries": 8})
        client.create_endpoint("download", backend="download", route="/download")
        (url,) = client.http_urls()
        with clients_that_send(12, url, b"GET /download?long=1 HTTP/1.1\r\nHost: a\r\n\r\n"):
            for _ in range(3):
                assert len(fetch(f"{url}/download").text) == 65536
