"""The listener of a proxy, and the listeners of a replica's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from http_harness import connected, poll_for, respond
from tables import each_case

from daskserve.actors import ProxyActor, replicas_listen
from daskserve.common.clock import LoopClock
from daskserve.common.types import BodyUse, Envelope, Receive, Send
from daskserve.errors import BadRequestError, ServeError
from daskserve.options.http import HTTPOptions
from daskserve.options.start_messages import ProxyStart
from daskserve.proxies.listener import HTTPListener, Requests
from daskserve.proxies.replica_listener import ReplicaListeners
from daskserve.telemetry.logs.process import ProcessLogs


async def test_files_of_a_port_that_a_replica_could_not_open_are_closed_with_it() -> None:
    def fail(config: Mapping[str, Any]) -> None:
        raise RuntimeError("no traces")

    taken = list(os.pipe())
    context = SimpleNamespace(spec=SimpleNamespace(instance="i"), clock=LoopClock(), rng=None, logs=None)
    unused: Any = None
    listeners = ReplicaListeners(
        unused, unused, context, to_worker=unused, take_files=lambda key: taken, trace=fail
    )
    start = ProxyStart(HTTPOptions(), None, False, True, False, "127.0.0.1", {}, None).encode()
    wanted = {"own": [], "rules": {}, "routes": {}, "listeners": {"p#1": start}}
    with pytest.raises(RuntimeError, match="no traces"):
        await listeners.listen(wanted)
    assert await listeners.stop("p#1", 0) == {}
    for each in taken:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)


@each_case(
    ("options", "has_middlewares", "expected"),
    [
        ({}, False, True),
        ({"ssl_certfile": "cert.pem"}, False, False),
        ({"proxy_callback": "module:function"}, False, False),
        ({}, True, False),
        ({"replicas_listen": True}, True, True),
        ({"replicas_listen": False}, False, False),
    ],
)
def test_replicas_listen_by_default_if_connections_can_move_and_middlewares_are_not_split(
    options: Any, has_middlewares: bool, expected: bool
) -> None:
    start = start_of(**options)
    assert replicas_listen(replace(start, middlewares=b"some" if has_middlewares else None)) is expected


class Answers(Requests):
    """Requests that the test answers; at first their endpoints are unknown."""

    def __init__(self) -> None:
        self.heads: list[Mapping[str, Any]] = []
        self.prepared: list[str] = []
        self.rules: tuple[BodyUse, int] | None = None
        self.asked_for: list[str] = []
        self.is_known = asyncio.Event()

    @property
    def largest_body_bytes(self) -> float:
        return 10.0

    @property
    def send(self) -> Any:
        async def call(endpoint: str, envelope: Envelope, receive: Receive, send: Send) -> None:
            self.heads.append(envelope.head)
            await respond(send, endpoint.encode())

        return call

    def prepare(self, endpoint: str) -> None:
        self.prepared.append(endpoint)

    def body_rules(self, endpoint: str, default_max_bytes: int) -> tuple[BodyUse, int] | None:
        self.asked_for.append(endpoint)
        return self.rules

    async def wait_until_published(self, endpoint: str) -> None:
        await self.is_known.wait()

    def check_queue(self, endpoint: str) -> None: ...

    def is_elsewhere(self, endpoint: str) -> bool:
        return False

    def is_crowded(self, endpoint: str) -> bool:
        return False


def start_of(**options: Any) -> ProxyStart:
    made = HTTPOptions(host="127.0.0.1", port=0, **options)
    return ProxyStart(made, None, False, True, False, "127.0.0.1", {}, None)


@contextlib.asynccontextmanager
async def listening(
    requests: Answers, logs: ProcessLogs | None = None, **options: Any
) -> AsyncIterator[HTTPListener]:
    rng, clock = random.Random(1), LoopClock()
    listener = HTTPListener(
        start_of(**options), requests, name="p", instance="i", clock=clock, rng=rng, logs=logs
    )
    assert listener.samples() == []
    listener.configure_logs({"enable_access_log": True})
    await listener.bind(None)
    listener.update_routes({"/a": {"endpoint": "e", "methods": ["GET", "POST"]}})
    listener.start()
    try:
        yield listener
    finally:
        await listener.stop(0)


@pytest.mark.parametrize("has_logs", [True, False])
async def test_a_listener_logs_requests_where_the_process_has_logs(has_logs: bool) -> None:
    lines: list[str] = []
    out: Any = SimpleNamespace(write=lines.extend, close=lambda: None, lost=0)
    logs, requests = ProcessLogs(out), Answers()
    logs.wake = lambda *gone: None
    async with listening(requests, logs if has_logs else None) as listener:
        assert listener.server is not None
        async with connected(listener.server) as client:
            assert (await client.get("/a")).body == b"e"
        async with connected(listener.server) as client:
            assert (await client.get("a", method="G(T")).status == 400
        counts = {name: value for name, labels, value in listener.samples() if labels == ("i",)}
        assert (counts["http_ongoing_requests"], requests.prepared) == (0, ["e"])
        logs.drain()
    logs.close()
    assert [line.split('"')[2].split()[0] for line in lines] == (["200", "400"] if has_logs else [])


@pytest.mark.parametrize(
    ("trusted", "client"), [([], "127.0.0.1"), (["10.0.0.0/8"], "127.0.0.1"), (["127.0.0.0/8"], "1.2.3.4")]
)
async def test_only_forwarders_that_are_trusted_name_the_client(trusted: list[str], client: str) -> None:
    requests = Answers()
    async with listening(requests, trusted_forwarders=trusted) as listener:
        assert listener.server is not None
        async with connected(listener.server) as connection:
            assert (await connection.get("/a", "X-Forwarded-For: 1.2.3.4")).status == 200
    assert requests.heads[0]["client"][0] == client


async def test_a_body_waits_until_it_is_known_how_large_it_may_be() -> None:
    requests = Answers()
    async with listening(requests) as listener:
        assert listener.server is not None
        async with connected(listener.server) as connection:
            for size, status in ((10, 200), (11, 413)):
                requests.rules = None
                requests.asked_for.clear()
                await connection.send(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size)
                await poll_for(lambda: requests.asked_for)
                requests.rules = ("gather", 10)
                requests.is_known.set()
                await connection.send(b"x" * size)
                assert (await connection.response()).status == status
                requests.is_known.clear()


def test_a_proxy_that_does_not_listen_yet_says_so() -> None:
    context: Any = SimpleNamespace(cluster=None, spec=SimpleNamespace(payload=start_of().encode(), name="p"))
    proxy = ProxyActor(context)
    assert (proxy.health(), proxy.metrics(), proxy.samples()) == ({}, {"ended": 0}, [])
    with pytest.raises(ServeError, match="The proxy is still starting"):
        asyncio.run(proxy.statistics())
    with pytest.raises(BadRequestError, match="accepts requests only over HTTP"):
        proxy.handle(None)  # type: ignore[arg-type]
    asyncio.run(proxy.stop(1.0))
