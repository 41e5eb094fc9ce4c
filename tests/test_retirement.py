"""A worker with a proxy retires, with the real data plane in one process."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from dask_processes import fetch, poll_for
from gates import Gates, anew_for_each_test
from ports import free_port

from daskserve.client.client import Client
from daskserve.cluster.local.cluster import LocalCluster
from daskserve.common.types import Location
from daskserve.options.http import HTTPOptions
from daskserve.testing import local_instance

PATIENCE_S = 20.0


class Waits(Gates):
    """Records whether the handler waits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting = threading.Event()


GATES = Waits()
_fresh_gates = anew_for_each_test(GATES)


def answer(request: Any) -> str:
    if request.query_params.get("wait"):
        GATES.is_waiting.set()
        GATES.go.wait(PATIENCE_S)
    return "ok"


def get(url: str) -> str:
    return fetch(url).text


def proxies(client: Client) -> dict[str, str]:
    return {each.name: each.state for each in client.status().actors if each.kind == "proxy"}


@pytest.mark.parametrize("location", [Location.HEAD_ONLY, Location.EVERY_WORKER])
def test_a_proxy_that_leaves_ends_with_its_last_request(location: Location) -> None:
    """Other proxies on its ports get new connections. A second stop, as by a new controller, waits, too."""
    health_port = free_port()
    options = HTTPOptions(port=0, location=location, health_port=health_port)
    with local_instance(http_options=options) as client, ThreadPoolExecutor() as pool:
        cluster: LocalCluster = client._connection.cluster_connection._world  # type: ignore[attr-defined]
        connection = client._connection.cluster_connection
        client.create_backend("b", answer)
        client.create_endpoint("e", backend="b", route="/e")
        (url,) = client.http_urls()
        waiting = pool.submit(get, f"{url}/e?wait=1")
        assert GATES.is_waiting.wait(PATIENCE_S)

        async def retire() -> str:
            (busy,) = [each for each in cluster.actors() if ongoing(cluster, each)]
            cluster.retire_worker(busy.worker)
            return busy.worker

        async def stop_again(worker: str) -> asyncio.Task[None]:
            (actor,) = [each for each in cluster.actors() if each.worker == worker and "/proxy/" in each.name]
            return cluster.spawn(cluster.program.destroy(actor, PATIENCE_S))

        worker = connection.sync(retire())
        poll_for(lambda: "DRAINING" in proxies(client).values() and "RUNNING" in proxies(client).values())
        stopping = connection.sync(stop_again(worker))
        for _ in range(20):
            assert get(f"{url}/e") == "ok"
            assert get(f"http://127.0.0.1:{health_port}/-/healthz") == "success"
        assert list(client.http_urls()) == [url]
        assert "DRAINING" in proxies(client).values()
        assert worker in cluster.reported.in_use
        assert not stopping.done()
        GATES.go.set()
        assert waiting.result(PATIENCE_S) == "ok"
        poll_for(lambda: worker not in cluster.reported.in_use)
        assert set(proxies(client).values()) == {"RUNNING"}


def ongoing(cluster: LocalCluster, address: Any) -> bool:
    if "/proxy/" not in address.name:
        return False
    actor: Any = cluster.actor(address)
    return bool(actor.health()["ongoing"])
