"""Proxies whose workers retire, end or die, on real processes under load."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from clusters import Load, nannied_cluster, pids, running, worker_of
from dask_processes import PATIENCE_S, dask_worker, fetch, poll_for
from distributed import Client
from starlette.responses import StreamingResponse

import daskserve as serve

CHUNKS = 20


class Answers:
    """Answers GETs at once, POSTs after a moment, and streams for more than half a second."""

    async def __call__(self, request: Any) -> Any:
        if request.method == "POST":
            await asyncio.sleep(0.05)
            return (await request.body()).decode()
        if request.query_params.get("kind") == "stream":
            return StreamingResponse(self._chunks())
        return "ok"

    async def _chunks(self) -> AsyncIterator[bytes]:
        for number in range(CHUNKS):
            yield f"{number} ".encode()
            await asyncio.sleep(0.03)


class Callers:
    """POSTs and streams, one after another on new connections in each of some threads."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port
        self.answered = {"post": 0, "stream": 0}
        self.failures: list[str] = []
        self._is_over = threading.Event()
        kinds = ["post", "stream", "stream", "stream"]
        self._threads = [threading.Thread(target=self._call, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        poll_for(lambda: self.answered["post"])
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, kind: str) -> None:
        streamed = "".join(f"{number} " for number in range(CHUNKS))
        while not self._is_over.is_set():
            connection = http.client.HTTPConnection(*self._address, timeout=PATIENCE_S)
            try:
                if kind == "post":
                    connection.request("POST", "/e", body="sent")
                else:
                    connection.request("GET", "/e?kind=stream")
                response = connection.getresponse()
                body = response.read().decode()
                if (response.status, body) != (200, "sent" if kind == "post" else streamed):
                    self.failures.append(f"{kind}: {response.status} {body[:100]}")
                self.answered[kind] += 1
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"{kind}: {error!r}")
            finally:
                connection.close()

    def more_streams(self) -> None:
        """Wait until streams that began after this call have ended."""
        until = self.answered["stream"] + 6
        poll_for(lambda: self.answered["stream"] >= until)


@contextmanager
def served(dask: Client, **http_options: Any) -> Iterator[tuple[serve.Client, str]]:
    options = {"port": 0, **http_options}
    with serve.start(dask_client=dask, http_options=options) as client:
        client.create_backend("b", Answers)
        client.create_endpoint("e", backend="b", route="/e", methods=["GET", "POST"])
        yield client, client.http_urls()[0]


@contextmanager
def loaded(url: str) -> Iterator[None]:
    """Call the endpoint in all ways while a block runs; no call may fail."""
    with Load(url) as load, Callers(url) as callers:
        yield
        load.more()
        callers.more_streams()
    assert (load.failures, callers.failures) == ([], [])


def proxy_workers(client: serve.Client) -> set[str]:
    return {each.worker or "" for each in client.status().actors if each.kind == "proxy"}


def test_a_worker_that_retires_fails_no_request_and_cuts_no_stream() -> None:
    with nannied_cluster(3) as dask, served(dask) as (client, url):
        with loaded(url):
            victim = worker_of(client, "proxy")
            dask.retire_workers([victim])
            assert victim not in proxy_workers(client)
        assert list(client.http_urls()) == [url]


@pytest.mark.nightly
def test_adapt_takes_the_workers_that_hold_nothing_but_one_proxy_of_many() -> None:
    with nannied_cluster(4) as dask, served(dask, server="asyncio", location="EveryWorker") as (client, url):
        assert len(proxy_workers(client)) == 4
        with loaded(url):
            needed = {*running(client, "b"), worker_of(client, "controller")}
            dask.cluster.adapt(minimum=0, maximum=4, interval="100ms", wait_count=2)
            poll_for(lambda: proxy_workers(client) == needed)
            poll_for(lambda: set(dask.scheduler_info(n_workers=-1)["workers"]) == needed)
        assert list(client.http_urls()) == [url]


@pytest.mark.nightly
def test_the_only_proxy_comes_back_on_its_host_and_port(tmp_path: Path) -> None:
    # A host of every address, without a forwarder or TLS, causes a warning.
    options = {"host": "0.0.0.0", "trusted_forwarders": ["127.0.0.1"], "return_grace_s": 60}
    with nannied_cluster(1) as dask, served(dask, **options) as (client, url):
        with dask_worker(dask.scheduler.address, tmp_path, name="other", extra=("--host", "127.0.0.2")):
            dask.wait_for_workers(2, timeout=30)
            client.update_backend_config("b", {"num_replicas": 2})
            victim = worker_of(client, "proxy")
            os.kill(pids(dask)[victim], signal.SIGKILL)

            def is_back() -> bool:
                with suppress(OSError):
                    return fetch(f"{url}/e").status == 200 and victim not in proxy_workers(client)
                return False

            poll_for(is_back, 30)
            assert list(client.http_urls()) == [url]
