"""Batch jobs on real clusters: maps, tasks and collections of Dask that call a deployment."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array
import dask.bag
import pytest
from clusters import nannied_cluster, pids
from dask_processes import ExternalCluster, dask_worker, poll_for
from distributed import Client, as_completed, get_client

import daskserve as serve


@serve.deployment(max_ongoing_requests=8)
class Model:
    """Doubles numbers in several ways."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def double(self, value: Any) -> Any:
        return value * 2

    def by_task(self, value: int) -> int:
        """Let the cluster do it, on the threads that may all wait for this deployment."""
        found: int = get_client().submit(lambda each: each * 2, value, pure=False).result()
        return found

    async def marked(self, value: int) -> tuple[int, str, int | str]:
        request = serve.context.get_request_context()
        return value, request.item_id, request.priority

    async def endless(self, value: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1

    async def count_cancelled(self) -> int:
        return self.cancelled


@serve.deployment(max_ongoing_requests=8)
class Slow:
    def __call__(self, value: int) -> int:
        time.sleep(0.01)
        return value


def by_result(value: int, handle: Any) -> Any:
    return handle.remote(value).result()


@pytest.fixture(scope="module")
def handle(dask_cluster: ExternalCluster) -> Iterator[Any]:
    with serve.start(dask_client=dask_cluster.client, http_options={"port": 0}, name="batch") as client:
        yield client.run(Model.bind())


def test_tasks_that_wait_for_answers_hold_no_thread(handle: Any, dask_cluster: ExternalCluster) -> None:
    client, count = dask_cluster.client, 10
    expected = [2 * each for each in range(count)]
    assert client.gather(client.map(handle.by_task, range(count))) == expected
    assert client.gather(client.map(by_result, range(count), handle=handle.by_task)) == expected
    delayed = [dask.delayed(handle.double)(each) for each in range(3)]
    total = dask.delayed(sum)(delayed)
    assert client.compute(total).result() == 6
    assert total.key.startswith("sum")
    assert delayed[0].key.startswith("Model.double-")


def test_collections_stay_lazy_and_each_part_has_an_id(handle: Any, dask_cluster: ExternalCluster) -> None:
    client = dask_cluster.client
    bag = handle.marked.map_bag(dask.bag.from_sequence(range(20), npartitions=2))
    assert isinstance(bag, dask.bag.Bag)
    found = client.compute(bag).result()
    assert [value for value, _, _ in found] == list(range(20))
    assert len({item_id for _, item_id, _ in found}) == 20
    assert {priority for _, _, priority in found} == {-50}
    blocks = handle.double.map_blocks(dask.array.ones((20, 2), chunks=(5, 2)), dtype=float)
    assert client.compute((blocks + 1).sum()).result() == 120


def test_more_items_than_replicas_queue_wait_their_turn(handle: Any, dask_cluster: ExternalCluster) -> None:
    with serve.start(dask_client=dask_cluster.client, http_options={"location": "NoServer"}) as client:
        slow = client.run(Slow.bind(), route_prefix=None)
        bag = dask.bag.from_sequence(range(200), npartitions=10)
        found: Any = slow.map_bag(bag).sum()
        assert dask_cluster.client.compute(found).result() == sum(range(200))


def test_the_calls_of_a_cancelled_task_are_cancelled(handle: Any, dask_cluster: ExternalCluster) -> None:
    client = dask_cluster.client
    futures = [client.submit(handle.endless, 0), client.submit(by_result, 1, handle=handle.endless)]
    time.sleep(0.3)
    client.cancel(futures)
    poll_for(lambda: handle.count_cancelled.remote().result() == 2, timeout_s=10)


class Marking:
    """Scores items; a name in the store of the test marks what is done."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, value: Any) -> Any:
        time.sleep(0.02)
        name = serve.context.get_request_context().item_id.replace("/", "-")
        with open(f"{self.folder}/{name}", "a") as file:
            file.write("x")
        return value * 2


@pytest.mark.nightly
@pytest.mark.limit_s(180.0)
def test_kills_in_the_middle_cost_no_item(tmp_path: Any) -> None:
    with nannied_cluster(3) as dask_client:
        with serve.start(dask_client=dask_client, http_options={"port": 0}) as client:
            deployment = serve.deployment(Marking, num_replicas=2, health_check_period_s=1)
            handle = client.run(deployment.bind(str(tmp_path)))

            def kill(kind: str) -> None:
                actors = client.status().actors
                worker = next(each.worker for each in actors if each.kind == kind)
                os.kill(pids(dask_client)[worker], signal.SIGKILL)

            results = handle.map(range(600), errors="return")
            found = []
            for index, result in enumerate(results):
                found.append(result)
                if index in (100, 300):
                    kill("replica")
                if index == 200:
                    kill("controller")
            assert found == [2 * each for each in range(600)]

            array = dask.array.arange(300, chunks=3)
            future = dask_client.compute(handle.map_blocks(array, dtype=array.dtype).sum())
            time.sleep(1)
            kill("replica")
            time.sleep(0.5)
            kill("controller")
            assert future.result(timeout=90) == 2 * sum(range(300))
            bag = handle.map_bag(dask.bag.from_sequence(range(200), npartitions=10))
            partial = dask_client.compute(bag)
            time.sleep(0.5)
            kill("replica")
            assert sum(partial.result(timeout=60)) == 2 * sum(range(200))
            tasks = as_completed(dask_client.map(handle, range(1000, 1300)), loop=dask_client.loop)
            values: Counter[int] = Counter()
            for number, task in enumerate(tasks):
                values[task.result()] += 1
                if number == 50:
                    kill("replica")
            assert values == Counter(2 * each for each in range(1000, 1300))


@pytest.mark.nightly
@pytest.mark.limit_s(180.0)
def test_a_thousand_tasks_on_two_threads_call_what_needs_these_threads() -> None:
    with nannied_cluster(2) as dask_client:
        with serve.start(dask_client=dask_client, http_options={"port": 0}) as client:
            handle = client.run(Model.bind())
            futures = dask_client.map(handle.by_task, range(1000))
            assert sum(dask_client.gather(futures)) == 2 * sum(range(1000))
            array = dask.array.arange(1000, chunks=10)
            found = handle.double.map_blocks(array, dtype=array.dtype).sum()
            assert dask_client.compute(found).result() == 2 * sum(range(1000))


def test_the_reader_of_a_map_may_be_a_task(handle: Any, dask_cluster: ExternalCluster) -> None:
    def job(count: int, handle: Any) -> int:
        return sum(handle.by_task.map(range(count)))

    client: Client = dask_cluster.client
    assert client.gather([client.submit(job, each, handle) for each in (5, 6, 7)]) == [20, 30, 42]


def test_coroutines_as_tasks_give_their_places_to_what_the_deployment_needs(
    handle: Any, dask_cluster: ExternalCluster
) -> None:
    async def call(number: int, handle: Any) -> int:
        first = await handle.by_task.remote(number)
        return first + int(await handle.by_task.remote(number))

    async def read(number: int, handle: Any) -> int:
        return sum([each async for each in handle.by_task.map(range(number))])

    client: Client = dask_cluster.client
    numbers = range(12)
    assert client.gather(client.map(call, numbers, handle=handle, pure=False)) == [
        4 * each for each in numbers
    ]
    assert client.gather(client.map(read, (3, 4, 5), handle=handle, pure=False)) == [6, 12, 20]


def test_coroutines_call_from_a_worker_that_has_just_joined(
    handle: Any, dask_cluster: ExternalCluster, tmp_path: Path
) -> None:
    async def read(count: int, handle: Any) -> list[int]:
        return [await handle.double.remote(count), *[each async for each in handle.double.map(range(count))]]

    client: Client = dask_cluster.client
    # They wait for this worker, so they run before it has anything of an instance.
    late = {"late": 1}
    found = client.map(read, (2, 3), handle=handle, pure=False, resources=late)
    with dask_worker(dask_cluster.address, tmp_path, extra=("--resources", "late=2")):
        assert client.gather(found) == [[4, 0, 2], [6, 0, 2, 4]]
        del found
