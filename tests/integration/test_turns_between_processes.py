"""Fair queueing at a replica with one slot, for which a proxy and a program compete."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest
from dask_processes import ExternalCluster, fetch, poll_for

import daskserve as serve

TOOK_S = 0.05
TURNS = 50


async def slow(request: Any) -> str:
    await asyncio.sleep(TOOK_S)
    return "done"


def refusals(client: serve.Client, external: ExternalCluster) -> float:
    """Return the number of requests that the replicas of this instance have refused."""

    def count(dask_worker: Any) -> int:
        (host,) = (each for each in dask_worker.state.actors.values() if type(each).__name__ == "Host")
        replicas = [entry.actor for name, entry in host.registry.entries.items() if "/replica/" in name]
        return sum(each._metrics.refused for each in replicas)

    return sum(external.client.run(count).values())


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.nightly)])
def test_a_proxy_and_a_program_take_turns_at_a_replica(
    client: serve.Client, url: str, external: ExternalCluster, isolation: str
) -> None:
    config = {"max_concurrent_queries": 1, "isolation": isolation}
    client.create_backend("b", slow, config=config)
    client.create_endpoint("e", backend="b", route="/e")
    handle = client.get_handle("e")
    assert (handle.remote().result(), fetch(f"{url}/e").text) == ("done", "done")
    turns: Counter[str] = Counter()
    errors: list[BaseException] = []

    def keep_asking(name: str) -> None:
        try:
            while turns.total() < TURNS and not errors:
                answer = handle.remote().result() if name == "program" else fetch(f"{url}/e").text
                assert answer == "done"
                turns[name] += 1
        except BaseException as error:
            errors.append(error)

    # The program has more waiting requests, all in one process.
    names = ["program"] * 6 + ["proxy"] * 2
    threads = [threading.Thread(target=keep_asking, args=(name,)) for name in names]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - began
    assert errors == []
    assert 0.35 < turns["proxy"] / turns.total() < 0.65, turns
    assert took_s < 6
    assert refusals(client, external) < 10 + 10 * took_s


#: Sends three requests, reports it, then waits to be killed.
COMPETITOR = """
import sys, time
from distributed import Client
import daskserve as serve

dask = Client(sys.argv[1])
handle = serve.connect().get_handle("e")
calls = [handle.remote() for _ in range(3)]
print("calling", flush=True)
time.sleep(600)
"""


@pytest.mark.nightly
def test_a_killed_program_leaves_the_queue(external: ExternalCluster) -> None:
    async def hold(request: Any) -> str:
        await asyncio.sleep(600 if request.query_params.get("long") else 2)
        return "done"

    with serve.start(detached=True, dask_client=external.client, http_options={"port": 0}) as client:
        client.create_backend("b", hold, config={"max_concurrent_queries": 1})
        client.create_endpoint("e", backend="b")
        handle = client.get_handle("e")
        holding = handle.remote(long="yes")
        command = [sys.executable, "-c", COMPETITOR, external.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            try:
                assert program.stdout is not None
                assert program.stdout.readline() == "calling\n"
                poll_for(lambda: queued_at_replicas(external) == 1)
            finally:
                program.kill()
        # The slot becomes free before the queue timeout of the dead program's request; that request must not
        # get it.
        holding.cancel()
        began = time.monotonic()
        assert handle.remote().result() == "done"
        assert time.monotonic() - began < 3.5
        assert queued_at_replicas(external) == 0
        client.shutdown()


def queued_at_replicas(external: ExternalCluster) -> int:
    """Return the number of requests queued at the replicas."""

    def count(dask_worker: Any) -> int:
        (host,) = (each for each in dask_worker.state.actors.values() if type(each).__name__ == "Host")
        replicas = [entry.actor for name, entry in host.registry.entries.items() if "/replica/" in name]
        return sum(each.slots.waiting for each in replicas)

    return sum(external.client.run(count).values())
