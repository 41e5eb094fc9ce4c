"""Processes of replicas that accept connections themselves (``http_options={"replicas_listen": True}``)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from dask_processes import PATIENCE_S, ExternalCluster, Reply, fetch, poll_for
from distributed import Client

import daskserve as serve

ISOLATED = {"isolation": "process"}


def who(request: Any) -> list[int]:
    return [os.getpid()]


def second(request: Any) -> list[str]:
    return ["second"]


async def hold(request: Any) -> list[int]:
    """Block the event loop for the requested time."""
    time.sleep(float(request.query_params.get("s", "0")))
    return [os.getpid()]


@pytest.fixture
def client(external: ExternalCluster) -> Iterator[serve.Client]:
    options = {"port": 0, "location": "EveryWorker", "replicas_listen": True}
    with serve.start(http_options=options, dask_client=external.client) as started:
        yield started


@pytest.fixture
def url(client: serve.Client) -> str:
    return client.http_urls()[0].rstrip("/")


def listeners_of(port: int) -> set[int]:
    """Return the processes that have a listening socket of a port; several may share it."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    found = set()
    for each in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.readlink(each) in sockets:
                found.add(int(each.parts[2]))
    return found


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def until_listening(url: str, count: int) -> set[int]:
    """Wait until this many processes listen, and return them."""
    port = port_of(url)

    def found() -> set[int] | None:
        pids = listeners_of(port)
        return pids if len(pids) == count else None

    pids: set[int] = poll_for(found, what=lambda: f"{listeners_of(port)} listen", every_s=0.05)
    return pids


def deploy(client: serve.Client, name: str, code: Any, replicas: int = 2, **config: Any) -> None:
    client.create_backend(name, code, config={**ISOLATED, "num_replicas": replicas, **config})
    client.create_endpoint(name, backend=name, route=f"/{name}")


def test_children_answer_and_pass_on_what_is_not_theirs(client: serve.Client, url: str) -> None:
    deploy(client, "who", who)
    client.create_backend("second", second)
    client.create_endpoint("second", backend="second", route="/second")
    until_listening(url, 4)
    replies = [fetch(f"{url}/who") for _ in range(30)]
    assert {each.status for each in replies} == {200}
    assert len({each.json[0] for each in replies}) == 2
    assert {fetch(f"{url}/second").json[0] for _ in range(30)} == {"second"}
    assert {fetch(f"{url}/nothing").status for _ in range(30)} == {404}


class Load:
    """Requests from several threads until the end of a block; half of the threads keep their connections."""

    def __init__(self, url: str, threads: int = 8) -> None:
        self.replies: list[Reply | Exception] = []
        self._place = urlsplit(url)
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(threads)
        for number in range(threads):
            self._pool.submit(self._run, number % 2 == 0)

    def _run(self, keeps: bool) -> None:
        # After a response that closes the connection, the next request opens another.
        connection = HTTPConnection(self._place.hostname or "", self._place.port, timeout=PATIENCE_S)
        while not self._is_over.is_set():
            try:
                connection.request("GET", self._place.path)
                answer = connection.getresponse()
                self.replies.append(Reply(answer.status, dict(answer.getheaders()), answer.read()))
            except Exception as error:
                self.replies.append(error)
                connection.close()
            if not keeps:
                connection.close()
        connection.close()

    def end(self) -> list[Reply | Exception]:
        self._is_over.set()
        self._pool.shutdown()
        return self.replies


def counted(client: Client) -> float:
    """Return the number of requests with status 200 that all workers have counted."""

    def count() -> float:
        from daskserve.telemetry.collector import PROCESS

        found = [each for each in PROCESS.collect() if each.name == "daskserve_http_requests"]
        return sum(each.value for family in found for each in family.samples if "200" in each.labels.values())

    return sum(client.run(count).values())


def failed(replies: list[Reply | Exception]) -> list[Any]:
    return [each for each in replies if isinstance(each, Exception) or each.status != 200]


def test_changes_under_load_lose_no_request_and_no_count(
    client: serve.Client, url: str, external: ExternalCluster
) -> None:
    deploy(client, "who", who)
    before = until_listening(url, 4)
    client.create_backend("other", who, config={**ISOLATED, "num_replicas": 2})
    load = Load(f"{url}/who")
    try:
        client.update_backend_config("who", {"num_replicas": 1})
        until_listening(url, 3)
        client.update_backend_config("who", {"num_replicas": 3})
        after = until_listening(url, 5)
        client.set_traffic("who", {"other": 1.0})  # the three leave the port, and those of the other open it
        poll_for(lambda: len(listeners_of(port_of(url)) - after - before) == 2, what="others that listen")
        client.delete_backend("who")
        until_listening(url, 4)
    finally:
        replies = load.end()
    assert len(after - before) >= 1
    assert len(replies) > 20
    assert failed(replies) == []
    poll_for(
        lambda: counted(external.client) >= len(replies),
        what=lambda: f"{counted(external.client)} of {len(replies)}",
    )
    assert counted(external.client) == len(replies)


def test_a_killed_child_is_replaced_and_the_others_answer(client: serve.Client, url: str) -> None:
    deploy(client, "who", who)
    listening = until_listening(url, 4)
    victim = fetch(f"{url}/who").json[0]
    assert victim in listening
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        now = listeners_of(port_of(url))
        return victim not in now and len(now) == 4

    poll_for(replaced, what="a new child that listens")
    assert {fetch(f"{url}/who").status for _ in range(20)} == {200}


def test_a_blocked_child_holds_up_only_its_own_connections(client: serve.Client, url: str) -> None:
    deploy(client, "hold", hold, event_loop="worker")  # the loop that reads the connections, too
    until_listening(url, 4)

    def ask(query: str) -> tuple[int, float]:
        reply = fetch(f"{url}/hold{query}")
        assert reply.status == 200, reply
        return int(reply.json[0]), time.monotonic()

    with ThreadPoolExecutor(17) as pool:
        blocking = pool.submit(ask, "?s=3")
        asked = [pool.submit(ask, "") for _ in range(16)]
        blocked, unblocked_at = blocking.result()
        others = [at for pid, at in (each.result() for each in asked) if pid != blocked]
    assert others
    assert max(others) < unblocked_at
