"""The scheduler counts the resources that replicas occupy, on a Dask cluster in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

import dask.config
import pytest
from distributed import Client, LocalCluster, Scheduler, get_worker
from tables import each_case

from daskserve.cluster.protocols.usage import UsageReport
from daskserve.cluster.reserved_resources import PLUGIN_NAME, Offer, ReservedResources

#: How long to wait for a condition that takes milliseconds.
LIMIT_S = 20


@each_case(
    ("occupied", "left"),
    [
        ({}, Offer(2, {"GPU": 1})),
        ({"CPU": 0.9}, Offer(2, {"GPU": 1})),
        ({"CPU": 1 - 1e-12}, Offer(1, {"GPU": 1})),
        ({"CPU": 2.0}, Offer(1, {"GPU": 1}, is_cordoned=True)),
        ({"CPU": 3.0, "GPU": 0.25}, Offer(1, {"GPU": 0.75}, is_cordoned=True)),
        ({"GPU": sum([0.1] * 10)}, Offer(2, {"GPU": 0})),
        ({"GPU": 2}, Offer(2, {"GPU": 0})),
        ({"license": 1, "memory": 1e9}, Offer(2, {"GPU": 1})),
    ],
)
def test_the_resources_of_replicas_are_subtracted(occupied: Mapping[str, float], left: Offer) -> None:
    assert Offer(2, {"GPU": 1}).without(occupied) == left


def test_a_declared_resource_named_cpu_stands_for_the_threads() -> None:
    assert Offer(2, {"CPU": 8}).without({"CPU": 2}) == Offer(2, {"CPU": 6})


class Bench:
    """Three workers with two threads and a GPU each, and the reservations on them."""

    def __init__(self, client: Any, scheduler: Any, reserved: ReservedResources) -> None:
        self.client, self.scheduler, self.reserved = client, scheduler, reserved
        self.first, *self.others = self.addresses = sorted(scheduler.workers)

    def reserve(self, instance: str, occupied: Mapping[str, Any], **claimed: Any) -> None:
        report = UsageReport(occupied=occupied, claimed={self.first: claimed} if claimed else {})
        self.reserved.reserve(instance, report)

    async def places(self, count: int, **options: Any) -> set[str]:
        """Return the workers on which this many tasks run."""
        tasks = self.client.map(place, range(count), pure=False, **options)
        async with asyncio.timeout(LIMIT_S):
            return set(await self.client.gather(tasks))

    def hold(self, workers: Collection[str], count: int) -> Callable[[], Awaitable[None]]:
        """Let tasks hold the GPU of some workers until the returned function is called."""
        name = str(len(MAY_END))
        ends = MAY_END[name] = asyncio.Event()
        options = {"workers": list(workers), "resources": {"GPU": 1}, "pure": False}
        tasks = self.client.map(hold, [name] * count, range(count), **options)

        async def release() -> None:
            ends.set()
            async with asyncio.timeout(LIMIT_S):
                await self.client.gather(tasks)

        return release

    def counts(self) -> dict[str, tuple[int, dict[str, float]]]:
        return {
            each.address: (each.nthreads, dict(each.resources)) for each in self.scheduler.workers.values()
        }


#: Ends `hold`, by the name of the event; all workers are in this process.
MAY_END: dict[str, asyncio.Event] = {}


async def hold(name: str, _: int) -> None:
    await MAY_END[name].wait()


def place(_: Any) -> str:
    return str(get_worker().address)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - Dask has no event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def bench(announced: list[Any] | None = None, **config: Any) -> AsyncIterator[Bench]:
    checked: dict[str, Any] = {"distributed.scheduler.validate": True, **config}
    options: dict[str, Any] = {"n_workers": 3, "threads_per_worker": 2, "resources": {"GPU": 1}}
    with dask.config.set(checked):
        async with (
            LocalCluster(processes=False, asynchronous=True, dashboard_address=":0", **options) as cluster,
            Client(cluster, asynchronous=True, set_as_default=False) as client,
        ):
            scheduler: Any = cluster.scheduler
            reserved = ReservedResources(scheduler, [].append if announced is None else announced.append)
            reserved.install()
            yield Bench(client, scheduler, reserved)
            reserved.uninstall()
            assert PLUGIN_NAME not in scheduler.plugins
            changed = ("check_idle_saturated", "valid_workers", "worker_objective")
            assert vars(scheduler).keys().isdisjoint(changed)
            assert {threads for threads, _ in Bench(client, scheduler, reserved).counts().values()} == {2}
            assert scheduler.total_nthreads == 2 * len(scheduler.workers)


@pytest.mark.parametrize("saturation", [1.1, "inf"])
async def test_a_worker_whose_threads_are_occupied_gets_only_tasks_that_no_other_may_run(
    saturation: Any,
) -> None:
    scheduler = "distributed.scheduler"
    async with bench(
        **{f"{scheduler}.worker-saturation": saturation, f"{scheduler}.validate": saturation != "inf"}
    ) as there:
        there.reserve("a", {there.first: {"CPU": 1}})
        there.reserve("b", {there.first: {"CPU": 1}})
        assert there.scheduler.total_nthreads == 5
        # Many tasks wait in the scheduler's queue, few do not.
        for count in 20, 4, 1:
            assert await there.places(count) <= set(there.others)
        assert await there.places(2, workers=[there.first]) == {there.first}
        value = await there.client.scatter(1, workers=[there.first])
        assert await there.client.submit(place, value) in there.others


async def test_tasks_go_to_all_workers_if_none_has_a_thread_left() -> None:
    async with bench() as there:
        one = {each: {"CPU": 1} for each in there.addresses}
        there.reserve("a", one)
        there.reserve("b", {there.first: one[there.first]})
        assert await there.places(20) == set(there.others)
        there.reserve("b", one)
        assert await there.places(20) == set(there.addresses)
        assert there.scheduler.total_nthreads == 3
        there.reserved.forget("b")
        there.reserved.forget("a")
        assert await there.places(20) == set(there.addresses)


async def test_tasks_go_to_a_worker_without_threads_while_all_others_are_paused() -> None:
    async with bench() as there:
        there.reserve("a", {there.first: {"CPU": 2}})
        for status, expected in (("paused", {there.first}), ("running", set(there.others))):
            for each in there.others:
                there.scheduler.handle_worker_status_change(status, each, "test")
            assert await there.places(20) == expected


async def test_a_task_waits_for_a_resource_that_replicas_occupy() -> None:
    async with bench() as there:
        there.reserve("a", {each: {"GPU": 1} for each in there.addresses})
        task = there.client.submit(place, 0, resources={"GPU": 1})
        await until(lambda: there.scheduler.unrunnable)
        assert await there.places(20) == set(there.addresses), "their threads are free"
        there.reserve("a", {each: {"GPU": 1} for each in there.others})
        async with asyncio.timeout(LIMIT_S):
            assert await task == there.first


async def test_workers_leave_and_join_while_their_resources_are_reserved() -> None:
    async with bench() as there:
        everywhere = {each: {"CPU": 2, "GPU": 1} for each in there.addresses}
        there.reserve("a", {each: everywhere[each] for each in there.others})
        assert await there.places(20) == {there.first}
        await there.scheduler.remove_worker(there.first, stimulus_id="test")
        # The last worker with a free thread is gone.
        assert await there.places(20) == set(there.others)
        declared = [there.reserved.declared(each) for each in there.scheduler.workers.values()]
        assert declared == [Offer(2, {"GPU": 1})] * 2


async def test_resources_that_tasks_hold_are_announced() -> None:
    announced: list[Any] = []
    async with bench(announced) as there:
        release = there.hold([there.first], 5)
        await until(lambda: announced)
        await release()
        await until(lambda: announced[-1] == {there.first: {}})
        # The tasks that wait at the worker hold at most the worker's resources.
        assert announced[0] == {there.first: {"GPU": 1}}
        assert not there.reserved.taken_by_tasks(there.scheduler.workers[there.first])


async def test_a_claimed_resource_goes_to_no_further_task() -> None:
    async with bench() as there:
        release = there.hold(there.addresses, 9)
        scheduler = there.scheduler
        first, *others = (scheduler.workers[each] for each in there.addresses)
        await until(lambda: [len(each.processing) for each in (first, *others)] == [3, 3, 3])
        there.reserve("a", {}, GPU=1)
        # The running task stays, and the tasks that wait there move.
        await until(lambda: len(first.processing) == 1)
        assert there.reserved.taken_by_tasks(first) == {"GPU": 1}
        assert there.counts()[there.first] == (2, {"GPU": 0})
        await release()
        assert not there.reserved.taken_by_tasks(first)
        assert await there.places(4, resources={"GPU": 1}) <= set(there.others)
        there.reserve("a", {there.first: {"GPU": 1}})
        assert await there.places(4, resources={"GPU": 1}) <= set(there.others)


async def test_resources_that_a_worker_declares_later_are_offered() -> None:
    async with bench() as there:
        there.reserve("a", {there.first: {"GPU": 1}})
        scheduler: Scheduler = there.scheduler
        scheduler.add_resources(there.first, {"GPU": 3})
        found = there.reserved.declared(there.scheduler.workers[there.first])
        assert found == Offer(2, {"GPU": 3})
        there.reserve("a", {there.first: {"GPU": 2}})
        assert there.counts()[there.first] == (2, {"GPU": 1})
