"""Large bodies over one hop, and their memory."""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from clusters import nannied_cluster, pids, worker_of
from dask_processes import ExternalCluster

import daskserve as serve

MIB = 1 << 20
#: The size of a large body, and the memory that a process may use for it.
BODY_BYTES, LIMIT_BYTES = 128 * MIB, 48 * MIB


def application() -> Any:
    """Return an ASGI application that counts the bytes of a body, and sends a requested number of bytes."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["method"] == "GET":
            for _ in range(int(scope["query_string"]) // (256 * 1024)):
                await send({"type": "http.response.body", "body": bytes(256 * 1024), "more_body": True})
            await send({"type": "http.response.body"})
            return
        count, message = 0, {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            count += len(message.get("body", b""))
        await send({"type": "http.response.body", "body": str(count).encode()})

    return app


@contextmanager
def bounded(processes: list[psutil.Process]) -> Iterator[None]:
    """Fail if one of the processes exceeds its memory limit during the block."""
    before = [each.memory_info().rss for each in processes]
    peaks, is_over = list(before), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            peaks[:] = [
                max(peak, each.memory_info().rss) for peak, each in zip(peaks, processes, strict=True)
            ]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    taken = [(peak - start) // MIB for peak, start in zip(peaks, before, strict=True)]
    assert max(taken) * MIB < LIMIT_BYTES, f"MiB taken: {taken}"


@pytest.mark.parametrize(
    ("server", "kind"),
    [
        ("tornado", "upload"),
        ("asyncio", "download that is read late"),
        pytest.param("asyncio", "upload", marks=pytest.mark.nightly),
        pytest.param("tornado", "download that is read late", marks=pytest.mark.nightly),
    ],
    indirect=["server"],
)
def test_a_large_body_passes_in_bounded_memory(
    kind: str, client: serve.Client, url: str, external: ExternalCluster
) -> None:
    workers = external.client.run(os.getpid)
    apart = [each for each in workers if each != worker_of(client, "proxy")]
    config = {"max_body_bytes": BODY_BYTES}
    client.create_backend("b", application(), config=config, actor_options={"workers": apart})
    client.create_endpoint("e", backend="b", route="/e", methods=["GET", "POST"])
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    with bounded([psutil.Process(pid) for pid in workers.values()]):
        if kind == "upload":
            chunks = (bytes(MIB) for _ in range(BODY_BYTES // MIB))
            connection.request("POST", "/e", chunks, {"Content-Length": str(BODY_BYTES)})
            assert int(connection.getresponse().read()) == BODY_BYTES
        else:
            connection.request("GET", f"/e?{BODY_BYTES}")
            response = connection.getresponse()
            if kind == "download that is read late":
                time.sleep(1)  # long enough for the replica to send everything, to show that it does not
            count = 0
            while part := response.read(MIB):
                count += len(part)
            assert count == BODY_BYTES
    connection.close()


def test_a_download_whose_replica_dies_is_not_mistaken_for_complete() -> None:
    with nannied_cluster(3) as dask, serve.start(dask_client=dask, http_options={"port": 0}) as client:
        workers = pids(dask)
        others = {worker_of(client, "proxy"), worker_of(client, "controller")}
        (victim,) = set(workers) - others
        client.create_backend("b", application(), actor_options={"workers": [victim]})
        client.create_endpoint("e", backend="b", route="/e", methods=["GET"])
        parts = urlsplit(client.http_urls()[0])
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
        connection.request("GET", f"/e?{BODY_BYTES}")
        response = connection.getresponse()
        assert len(response.read(MIB)) == MIB
        os.kill(workers[victim], signal.SIGKILL)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
        connection.close()
