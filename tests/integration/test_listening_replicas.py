"""Processes of replicas that serve connections of the proxy themselves (``replicas_listen``)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
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


def held(request: Any) -> list[int]:
    """Create a file, and wait for another one, if asked."""
    if "mark" in request.query_params:
        Path(request.query_params["mark"]).touch()
        while not Path(request.query_params["go"]).exists():
            time.sleep(0.01)
    return [os.getpid()]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def client(external: ExternalCluster) -> Iterator[serve.Client]:
    options = {"port": 0, "location": "EveryWorker"}
    with serve.start(http_options=options, dask_client=external.client) as started:
        yield started


@pytest.fixture
def url(client: serve.Client) -> str:
    return client.http_urls()[0].rstrip("/")


def servers_of(port: int) -> dict[int, set[int]]:
    """Return the processes that have each accepted connection of a port, by the port of the client.

    A connection that a proxy has given to a replica's process is open in both.
    """
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    accepted = [row for row in rows if row[3] == "01" and row[1].endswith(f":{port:04X}")]
    clients = {f"socket:[{row[9]}]": int(row[2].partition(":")[2], 16) for row in accepted}
    found: dict[int, set[int]] = {}
    for each in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or is another user's
            if (inode := os.readlink(each)) in clients:
                found.setdefault(clients[inode], set()).add(int(each.parts[2]))
    return found


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


class Caller:
    """One connection that stays open."""

    #: The number of answers of all connections.
    answers = 0

    def __init__(self, url: str) -> None:
        self._path = urlsplit(url).path
        self._connection = HTTPConnection("127.0.0.1", port_of(url), timeout=PATIENCE_S)
        self._connection.connect()
        self.port = self._connection.sock.getsockname()[1]
        #: The connection must last, so nothing may open another one.
        self._connection.auto_open = 0

    def send(self, query: str = "", method: str = "GET") -> None:
        self._connection.request(method, self._path + query)

    def receive(self) -> Reply:
        answer = self._connection.getresponse()
        Caller.answers += 1
        return Reply(answer.status, dict(answer.getheaders()), answer.read())

    def call(self, query: str = "", method: str = "GET") -> Reply:
        self.send(query, method)
        return self.receive()

    def close(self) -> None:
        self._connection.close()


def until_served_by(url: str, pids: int) -> set[int]:
    """Wait until connections are served by this many processes of replicas, and return these."""
    callers = [Caller(url) for _ in range(4 * pids)]
    port = port_of(url)

    def served() -> set[int] | None:
        answers = {int(each.call().json[0]) for each in callers}
        servers = servers_of(port)
        return (
            answers
            if len(answers) == pids and all(servers[each.port] & answers for each in callers)
            else None
        )

    try:
        found: set[int] = poll_for(served, what=lambda: f"{servers_of(port)}", every_s=0.05)
    finally:
        for each in callers:
            each.close()
    return found


def deploy(client: serve.Client, name: str, code: Any, replicas: int = 2, **config: Any) -> None:
    client.create_backend(name, code, config={**ISOLATED, "num_replicas": replicas, **config})
    client.create_endpoint(name, backend=name, route=f"/{name}")


def test_children_answer_and_leave_the_rest_to_the_proxy(client: serve.Client, url: str) -> None:
    deploy(client, "who", who)
    until_served_by(f"{url}/who", 2)
    client.create_backend("second", second)
    client.create_endpoint("second", backend="second", route="/second")
    replies = [fetch(f"{url}/who") for _ in range(30)]
    assert {each.status for each in replies} == {200}
    assert len({each.json[0] for each in replies}) == 2
    assert {fetch(f"{url}/second").json[0] for _ in range(30)} == {"second"}
    assert {fetch(f"{url}/nothing").status for _ in range(30)} == {404}
    mixed = Caller(url)
    for _ in range(3):
        assert mixed.call("/who").status == 200
        assert mixed.call("/second").json == ["second"]
    mixed.close()


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


def test_changes_under_load_lose_no_request_no_connection_and_no_count(
    client: serve.Client, url: str, external: ExternalCluster, stack: ExitStack
) -> None:
    counted_before = counted(external.client) - Caller.answers
    deploy(client, "who", who)
    before = until_served_by(f"{url}/who", 2)
    client.create_backend("other", who, config={**ISOLATED, "num_replicas": 2})
    load = Load(f"{url}/who")
    proxies = {*external.client.run(os.getpid).values()}
    kept: list[Caller] = []
    # Each worker has a proxy, and the kernel chooses one for each connection.
    while not proxies <= set().union(*(servers_of(port_of(url)).get(each.port, set()) for each in kept)):
        kept.append(stack.enter_context(closing(Caller(f"{url}/who"))))
        assert kept[-1].call().status == 200

    def served_by() -> set[int]:
        replies = [each.call() for each in kept]
        assert {each.status for each in replies} == {200}
        assert not any("connection" in each.headers for each in replies)
        return {int(each.json[0]) for each in replies}

    try:
        assert served_by() <= before
        client.update_backend_config("who", {"num_replicas": 1})
        poll_for(lambda: len(served_by()) == 1, what="one replica", every_s=0.05)
        client.update_backend_config("who", {"num_replicas": 3})
        poll_for(lambda: served_by() - before, what="new replicas serve old connections", every_s=0.05)
        client.set_traffic("who", {"other": 1.0})
        client.delete_backend("who")
        poll_for(lambda: not served_by() & before, what="the other backend", every_s=0.05)
    finally:
        replies = load.end()
    assert len(replies) > 20
    assert failed(replies) == []
    expected = counted_before + len(replies) + Caller.answers
    poll_for(
        lambda: counted(external.client) >= expected, what=lambda: f"{counted(external.client)} of {expected}"
    )
    assert counted(external.client) == expected


def test_requests_of_a_killed_child_are_answered_on_their_connections(
    client: serve.Client, url: str, tmp_path: Path, stack: ExitStack
) -> None:
    client.create_backend("held", held, config={**ISOLATED, "num_replicas": 2})
    client.create_endpoint("held", backend="held", route="/held", methods=["GET", "POST"])
    victim, _ = until_served_by(f"{url}/held", 2)
    callers: list[Caller] = []
    of_victim: list[Caller] = []
    while len(of_victim) < 4:  # each worker has a proxy, and the kernel chooses one for each connection
        callers.append(stack.enter_context(closing(Caller(f"{url}/held"))))
        if callers[-1].call().json == [victim]:
            of_victim.append(callers[-1])
    reading, posting = of_victim[:2], of_victim[2]
    go = tmp_path / "go"
    for number, each in enumerate((*reading, posting)):
        each.send(f"?mark={tmp_path / str(number)}&go={go}", "POST" if each is posting else "GET")
    poll_for(lambda: len(list(tmp_path.iterdir())) == 3, what="requests that run")
    os.kill(victim, signal.SIGKILL)
    assert posting.receive().status == 502  # it may have had an effect, and is not sent again
    go.touch()
    replies = [each.receive() for each in reading]
    assert {each.status for each in replies} == {200}
    assert all(each.json != [victim] for each in replies)
    replies = [each.call() for each in callers]
    assert {each.status for each in replies} == {200}
    assert all(each.json != [victim] for each in replies)


def test_a_blocked_child_holds_up_only_its_own_connections(client: serve.Client, url: str) -> None:
    deploy(client, "hold", hold, event_loop="worker")  # the loop that reads the connections, too
    until_served_by(f"{url}/hold", 2)

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
