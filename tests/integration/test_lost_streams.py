"""Streams of continuous batches whose replicas are killed, on real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from typing import Any

import psutil
import pytest
from clusters import nannied_cluster, pids
from dask_processes import poll_for
from distributed import Client
from scraping import Metrics

import daskserve as serve
from daskserve.common.clock import seeded_rng
from daskserve.errors import ActorLostError, BackPressureError, UnavailableError

#: How long the random joins, cancellations and kills last: ``DASKSERVE_FUZZ_S=600`` for ten minutes.
FUZZ_S = float(os.environ.get("DASKSERVE_FUZZ_S", "30"))
#: The metrics that are 0 while there are no calls.
GAUGES = (
    "daskserve_continuous_active_requests",
    "daskserve_continuous_queued_requests",
    "daskserve_continuous_queued_cost",
    "daskserve_replica_ongoing_requests",
    "daskserve_replica_queued_requests",
    "daskserve_replica_abandoned_requests",
    "daskserve_router_queued_requests",
    "daskserve_router_ongoing_requests",
)
#: Maximum growth of the callers' memory after the first third of that time.
MAX_GROWTH = 20 * 2**20
#: Maximum duration of a stream; a stream that takes longer hangs.
PATIENCE_S = 90.0


@serve.deployment(num_replicas=2, max_ongoing_requests=400, graceful_shutdown_timeout_s=2)
class Counter:
    """Counts, ten numbers per second and request."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    @serve.batching.continuous_batch(
        max_slots=200, max_queued=50, max_cost=20_000, cost_fn=lambda count, **_: count
    )
    async def generate(self, active: list[serve.batching.ActiveRequest]) -> list[int]:
        await asyncio.sleep(0.02)
        for each in active:
            if len(each.outputs) + 1 >= each.args[0]:
                each.finish()
        return [len(each.outputs) for each in active]

    @generate.prefill
    def _hold(self, new: list[serve.batching.ActiveRequest]) -> None:
        self.held |= {each.number for each in new}

    @generate.release
    def _free(self, left: list[serve.batching.ActiveRequest]) -> None:
        self.held -= {each.number for each in left}

    async def load(self) -> tuple[int, int, int]:
        stats: Any = self.generate.stats()  # type: ignore[attr-defined]
        return stats.active, stats.queued, len(self.held)


def start(dask: Client) -> tuple[serve.Client, Any]:
    client = serve.start(dask_client=dask, http_options=None)
    return client, client.run(Counter.bind())


def kill_a_replica(dask: Client, client: serve.Client) -> None:
    status = client.status().actors
    workers = [each.worker for each in status if each.kind == "replica" and each.state == "RUNNING"]
    others = {each.worker for each in status if each.kind != "replica"}
    victim = next((each for each in workers if each not in others), None)
    if victim is not None:
        os.kill(pids(dask)[victim], signal.SIGKILL)


def is_at_rest(handle: Any) -> bool:
    loads = handle.broadcast("load").results(10, return_exceptions=True)
    return bool(loads) and all(each == (0, 0, 0) for each in loads)


def gauges_not_at_rest(dask: Client) -> dict[str, float]:
    metrics = Metrics(dask)
    assert metrics.values(GAUGES[0])
    return {name: total for name in GAUGES if (total := metrics.total(name))}


def memory() -> int:
    """Return the memory of this process, which runs the callers."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.nightly
def test_a_replica_killed_in_the_middle_of_200_streams() -> None:
    with nannied_cluster(3) as dask:
        client, handle = start(dask)
        ends: list[str] = []

        async def plain() -> None:
            count = 0
            try:
                async for number in handle.options(stream=True).generate.remote(150):
                    assert number == count
                    count += 1
            except ActorLostError:
                ends.append("lost")
            else:
                ends.append("whole" if count == 150 else f"short: {count}")

        async def resumed() -> None:
            found = [each async for each in serve.handle.resume_stream(handle.generate, 150, max_resumes=10)]
            ends.append("resumed" if found == list(range(150)) else f"wrong: {found}")

        async def main() -> None:
            async with asyncio.timeout(PATIENCE_S):
                streams = [asyncio.create_task(each()) for each in (plain, resumed) for _ in range(100)]
                await asyncio.sleep(1)
                await asyncio.to_thread(kill_a_replica, dask, client)
                await asyncio.gather(*streams)

        asyncio.run(main())
        assert set(ends) == {"lost", "whole", "resumed"}
        assert ends.count("resumed") == 100
        poll_for(lambda: is_at_rest(handle))
        client.shutdown()


@pytest.mark.nightly
@pytest.mark.limit_s(FUZZ_S + 2 * PATIENCE_S)
def test_after_random_joins_cancellations_and_kills_nothing_is_left() -> None:
    with nannied_cluster(3) as dask:
        client, handle = start(dask)
        rng = seeded_rng(3)

        async def caller(ends: float) -> None:
            loop = asyncio.get_running_loop()
            while loop.time() < ends:
                count = rng.randrange(1, 200)
                stream = serve.handle.resume_stream(handle.generate, count, max_resumes=20)
                found = []
                leaves = rng.random() < 0.3
                try:
                    async with asyncio.timeout(rng.choice([0.1, 1, 60])):
                        async for number in stream:
                            found.append(number)
                            if leaves and len(found) > count // 2:
                                break
                        else:
                            assert found == list(range(count))
                except (TimeoutError, BackPressureError, UnavailableError):
                    pass
                finally:
                    await stream.aclose()  # type: ignore[attr-defined]
                assert found == list(range(len(found)))

        async def killer(ends: float) -> None:
            loop = asyncio.get_running_loop()
            while loop.time() < ends - 10:
                await asyncio.sleep(rng.uniform(5, 10))
                await asyncio.to_thread(kill_a_replica, dask, client)

        async def part(seconds: float) -> None:
            ends = asyncio.get_running_loop().time() + seconds
            async with asyncio.timeout(seconds + PATIENCE_S):
                await asyncio.gather(killer(ends), *(caller(ends) for _ in range(100)))

        asyncio.run(part(FUZZ_S / 3))
        before = memory()
        asyncio.run(part(FUZZ_S * 2 / 3))
        poll_for(lambda: is_at_rest(handle))
        poll_for(lambda: not gauges_not_at_rest(dask))
        assert memory() - before < MAX_GROWTH
        client.shutdown()
