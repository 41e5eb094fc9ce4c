"""The scheduler's decisions, based on the reports of instances."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from daskserve.cluster.protocols.usage import UsageReport
from daskserve.cluster.scheduler.capacity import ADAPTIVE_S, REQUEST_WAIT_S, Capacity
from daskserve.cluster.scheduler.hosts import HOST_KEY

pytestmark = pytest.mark.virtual_time


W1, W2 = "tcp://w1", "tcp://w2"


async def _evacuate(workers: list[str]) -> None:
    raise AssertionError("not in these tests")


class Scheduler:
    """The part of a scheduler that is used, with two workers that hold a Host each."""

    def __init__(self) -> None:
        host = SimpleNamespace(key=f"{HOST_KEY}1")
        self.workers = {
            address: SimpleNamespace(
                address=address, processing=[], long_running=[], has_what=[host], memory_limit=1000, nbytes=10
            )
            for address in (W1, W2)
        }
        self.idle_timeout = 300
        self.queued: list[Any] = []
        self.unrunnable: dict[str, Any] = {}
        self.plugins = {"ours": self}
        #: Dask's own target.
        self.by_tasks = 1
        self.held: set[str] = set()
        self.instances: list[str] = []
        self.handlers: dict[str, Any] = {
            "adaptive_target": lambda *args, **kwargs: self.by_tasks,
            "retire_workers": None,
        }

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        return [each for each in workers if each.address not in self.held]


@pytest.fixture
def scheduler() -> Any:
    return Scheduler()


@pytest.fixture
def became_adaptive() -> list[bool]:
    return []


@pytest.fixture
def capacity(scheduler: Any, became_adaptive: list[bool]) -> Capacity:
    capacity = Capacity(
        scheduler,
        _evacuate,
        lambda workers: None,
        became_adaptive=lambda: became_adaptive.append(True),
        has_instances=lambda: bool(scheduler.instances),
    )
    capacity.install()
    return capacity


def test_a_retiring_worker_is_free_once_every_instance_knows_and_has_no_actors_there(
    capacity: Capacity,
) -> None:
    """An earlier report may lack a replica that the instance was just placing."""
    assert not capacity.is_free({W1}, ["a"])
    capacity.report("a", UsageReport(in_use=frozenset({W2})))
    assert not capacity.is_free({W1}, ["a"])
    capacity.report("a", UsageReport(in_use=frozenset({W1, W2}), retiring=frozenset({W1})))
    assert not capacity.is_free({W1}, ["a"])
    capacity.report("a", UsageReport(in_use=frozenset({W2}), retiring=frozenset({W1})))
    assert capacity.is_free({W1}, ["a"])
    assert not capacity.is_free({W1}, ["a", "b"])
    assert not capacity.is_free({W1, W2}, ["a"])


def test_the_report_of_an_instance_without_a_controller_still_counts(capacity: Capacity) -> None:
    capacity.report("a", UsageReport(in_use=frozenset({W1})))
    assert not capacity.is_free({W1}, [])
    assert capacity.is_free({W2}, [])


def test_the_target_covers_the_workers_of_all_instances_and_waiting_replicas(
    capacity: Capacity, scheduler: Any
) -> None:
    scheduler.unrunnable = {"a task": None}
    assert capacity.adaptive_target() == 1
    capacity.report("a", UsageReport(in_use=frozenset({W1}), held=frozenset({W1})))
    both = frozenset({W1, W2})
    capacity.report("b", UsageReport(in_use=both, held=both, waiting_workers=2))
    assert capacity.in_use() == {W1, W2}
    assert capacity.adaptive_target() == 2 + 2
    capacity.forget("b")
    assert capacity.in_use() == {W1}
    assert capacity.adaptive_target() == 1


@pytest.mark.parametrize(
    ("nbytes", "limit", "target"),
    [
        (None, 1000, 1),
        (None, 0, 1),
        (0, 1000, 1),
        (490, 1000, 1),
        (491, 1000, 2),
        (10**9, 0, 1),  # without a limit
    ],
)
def test_a_worker_may_be_closed_if_the_workers_that_stay_have_room_for_its_data(
    capacity: Capacity, scheduler: Any, nbytes: int | None, limit: int, target: int
) -> None:
    """Dask also counts the data of workers that may be closed, and would keep one worker too many."""
    scheduler.held, scheduler.by_tasks = {W1}, 2
    capacity.report("a", UsageReport(in_use=frozenset({W1})))
    worker = scheduler.workers[W2]
    if nbytes is not None:
        worker.has_what.append(SimpleNamespace(key=("data of a user", 1)))
        worker.nbytes = nbytes
    for each in scheduler.workers.values():
        each.memory_limit = limit
    assert capacity.adaptive_target() == target


def test_an_instance_needs_a_worker_even_before_it_has_a_controller(
    capacity: Capacity, scheduler: Any
) -> None:
    scheduler.workers.clear()
    scheduler.by_tasks = 0
    assert capacity.adaptive_target() == 0
    scheduler.instances.append("a")
    assert capacity.adaptive_target() == 1
    both = frozenset({W1, W2})
    capacity.report("a", UsageReport(in_use=both, held=both))
    assert capacity.adaptive_target() == 2


def test_a_worker_in_use_that_is_not_held_may_leave_once_it_is_free(
    capacity: Capacity, scheduler: Any
) -> None:
    """It has one of several proxies: an adaptive cluster may close it after the proxy's requests."""
    scheduler.held, scheduler.by_tasks = {W1}, 2
    both = frozenset({W1, W2})
    capacity.report("a", UsageReport(in_use=both, held=frozenset({W1})))
    assert capacity.adaptive_target() == 1
    assert capacity.held() == {W1}
    capacity.report("a", UsageReport(in_use=both, held=frozenset({W1}), retiring=frozenset({W2}), grace_s=20))
    assert not capacity.is_free({W2}, ["a"])
    assert capacity.grace_s == 20


@pytest.mark.parametrize("is_adaptive", [False, True])
async def test_the_first_instance_waits_for_the_worker_of_an_adaptive_cluster(
    capacity: Capacity, scheduler: Any, is_adaptive: bool
) -> None:
    workers = dict(scheduler.workers)
    scheduler.workers.clear()
    loop = asyncio.get_running_loop()
    began = loop.time()
    waiting = asyncio.create_task(capacity.wait_for_worker(60.0))
    await asyncio.sleep(REQUEST_WAIT_S - 1)
    if is_adaptive:
        scheduler.handlers["adaptive_target"]()
        await asyncio.sleep(30.0)
        assert not waiting.done()
        scheduler.workers.update(workers)
    await waiting
    assert loop.time() - began == pytest.approx(REQUEST_WAIT_S + (29.0 if is_adaptive else 0.0), abs=0.1)


async def test_an_adaptive_cluster_has_until_the_timeout_to_start_a_worker(
    capacity: Capacity, scheduler: Any
) -> None:
    scheduler.workers.clear()
    scheduler.handlers["adaptive_target"]()
    began = asyncio.get_running_loop().time()
    await capacity.wait_for_worker(20.0)
    assert asyncio.get_running_loop().time() - began == pytest.approx(20.0, abs=0.1)


@pytest.mark.parametrize("what", ["queued", "unrunnable", "processing", "more wanted"])
def test_the_target_for_tasks_is_left_to_dask(capacity: Capacity, scheduler: Any, what: str) -> None:
    scheduler.held, scheduler.by_tasks = {W1}, 2
    if what == "queued":
        scheduler.queued.append("a task")
    elif what == "unrunnable":
        scheduler.unrunnable["a task"] = None
    elif what == "processing":
        scheduler.workers[W1].processing.append("a task")
    else:
        scheduler.by_tasks = 3
    assert capacity.adaptive_target() == scheduler.by_tasks


async def test_a_cluster_is_adaptive_while_its_target_is_requested(
    capacity: Capacity, scheduler: Any, became_adaptive: list[bool]
) -> None:
    assert not capacity.is_adaptive
    scheduler.adaptive_target()  # as metrics call it
    assert not capacity.is_adaptive
    scheduler.handlers["adaptive_target"]()
    assert capacity.is_adaptive
    await asyncio.sleep(ADAPTIVE_S - 1)
    scheduler.handlers["adaptive_target"]()
    assert became_adaptive == [True]
    await asyncio.sleep(ADAPTIVE_S + 1)
    assert not capacity.is_adaptive


@pytest.mark.parametrize("fails_in", ["evacuation", "Dask"])
async def test_a_worker_whose_retirement_fails_may_hold_actors_again(scheduler: Any, fails_in: str) -> None:
    stayed: list[set[str]] = []

    async def fail(*args: Any, **kwargs: Any) -> Any:
        raise asyncio.CancelledError

    async def succeed(workers: list[str]) -> None:
        pass

    scheduler.handlers["retire_workers"] = fail
    capacity = Capacity(
        scheduler,
        succeed if fails_in == "Dask" else fail,
        lambda workers: stayed.append(set(workers)),
        became_adaptive=lambda: None,
        has_instances=lambda: True,
    )
    capacity.install()
    with pytest.raises(asyncio.CancelledError):
        await capacity.retire_workers([W1])
    assert stayed == [{W1}]
