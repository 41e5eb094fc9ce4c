"""How long a leaving worker waits for its actors, and the answers to a worker that got SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from daskserve.cluster.protocols.retirement import RetirementStatus
from daskserve.cluster.scheduler.evacuation import EVACUATION_S, REPLACING_SHARE, Evacuations

pytestmark = pytest.mark.virtual_time


class Cluster:
    """Workers whose actors are replaced elsewhere after some seconds."""

    def __init__(self, workers: Iterable[str], *, free_after_s: float, grace_s: float = 0.0) -> None:
        self.loop = asyncio.get_running_loop()
        #: The end of each Host, and when Dask moved the data of a worker.
        self.released: list[float] = []
        self.admitted: list[str] = []
        self.retired: list[tuple[float, dict[str, Any]]] = []
        #: The workers that the controllers had to leave, and when.
        self.received: list[tuple[float, list[str]]] = []
        self.replaced: list[str] = []
        self.left: list[str] = []
        self.scheduler = SimpleNamespace(workers=dict.fromkeys(workers))
        self.capacity = SimpleNamespace(
            is_free=lambda *_: self.loop.time() >= free_after_s,
            grace_s=grace_s,
            retire=self._retire,
            is_adaptive=False,
        )
        self.starting: set[str] = set()
        self.hosts = SimpleNamespace(
            has=lambda worker: worker in self.scheduler.workers.keys() - self.starting,
            retiring=set(),
            release=self._release,
            refused=dict,
        )
        controller = SimpleNamespace(worker="w1")
        instances: Any = {"i": SimpleNamespace(name="i", controller=controller)}
        controllers = SimpleNamespace(expected=lambda leaving: ["i"], replace=self._replace)
        self.evacuations = Evacuations(
            self.scheduler,  # type: ignore[arg-type]
            self.hosts,  # type: ignore[arg-type]
            instances,
            capacity=self.capacity,  # type: ignore[arg-type]
            controllers=controllers,  # type: ignore[arg-type]
            publish=self._publish,
            spawn=asyncio.ensure_future,
            admit=self._admit,
        )

    def _publish(self, instance: str, message: Mapping[str, Any]) -> None:
        self.left += message["left"]
        if "retiring" in message:
            self.received.append((self.loop.time(), message["retiring"]))

    async def _release(self, worker: str) -> None:
        self.released.append(self.loop.time())

    async def _retire(self, **options: Any) -> None:
        self.retired.append((self.loop.time(), options))

    async def _admit(self, worker: str) -> None:
        self.admitted.append(worker)

    async def _replace(self, entry: Any, excluded: set[str]) -> None:
        self.replaced.append(entry.name)

    async def until(self, task: asyncio.Future[Any]) -> Any:
        """Return the result of a task; controllers report once a second meanwhile."""
        while not task.done():
            await asyncio.sleep(1)
            self.evacuations.wake()
        return await task

    def leaving(self, worker: str, within_s: float) -> asyncio.Future[list[str]]:
        """Ask like a worker that got SIGTERM; return all answers."""

        async def ask() -> list[str]:
            answers = []
            while not answers or answers[-1] == RetirementStatus.MOVING:
                answers.append(await self.evacuations.leave(worker, within_s))
            return answers

        return asyncio.ensure_future(ask())


@pytest.mark.parametrize(("grace_s", "released_at"), [(0.0, EVACUATION_S), (300.0, 200.0), (100.0, 160.0)])
async def test_a_retiring_worker_waits_for_the_grace_period_of_its_requests(
    grace_s: float, released_at: float
) -> None:
    """Its actors have ended after 200 s."""
    cluster = Cluster(["w1", "w2"], free_after_s=200, grace_s=grace_s)
    await cluster.until(asyncio.ensure_future(cluster.evacuations.evacuate(["w1"])))
    assert cluster.released == [released_at]
    assert (cluster.received, cluster.replaced) == ([(0, ["w1"])], ["i"])


async def test_a_host_that_is_starting_on_a_retiring_worker_is_released() -> None:
    """Dask would not retire the worker because of an actor that nothing uses yet."""
    cluster = Cluster(["w1", "w2"], free_after_s=0)
    cluster.starting = {"w1"}
    await cluster.evacuations.evacuate(["w1"])
    assert (cluster.released, cluster.hosts.retiring) == ([0], {"w1"})
    assert cluster.received == cluster.replaced == []


async def test_a_worker_that_dask_did_not_retire_may_hold_actors_again() -> None:
    """For example, the worker holds data that no other worker may have."""
    cluster = Cluster(["w1", "w2"], free_after_s=0)
    await cluster.evacuations.evacuate(["w1"])
    cluster.evacuations.stay({"w1", "w3"})
    await asyncio.sleep(0)
    assert (cluster.admitted, cluster.hosts.retiring) == (["w1"], set())


async def test_a_worker_that_got_sigterm_is_notified_when_all_actors_have_moved() -> None:
    """Its process ends by itself, and its nanny decides whether another one starts."""
    cluster = Cluster(["w1", "w2"], free_after_s=3)
    answers = await cluster.until(cluster.leaving("w1", 30))
    assert answers == [RetirementStatus.MOVING] * (len(answers) - 1) + [RetirementStatus.MOVED]
    assert (cluster.released, cluster.replaced) == ([pytest.approx(3)], ["i"])
    options = {"workers": ["w1"], "close_workers": False, "remove": False}
    assert cluster.retired == [(pytest.approx(3), options)]
    assert await cluster.evacuations.leave("w1", 30) == RetirementStatus.MOVED
    assert len(cluster.released) == 1


@pytest.mark.parametrize(("grace_s", "after_s"), [(0.0, 30), (20.0, 30 - 20), (60.0, 30 * REPLACING_SHARE)])
async def test_its_requests_have_their_time_even_if_its_actors_have_no_other_place(
    grace_s: float, after_s: float
) -> None:
    cluster = Cluster(["w1", "w2"], free_after_s=1000, grace_s=grace_s)
    began = cluster.loop.time()
    assert (await cluster.leaving("w1", 30))[-1] == RetirementStatus.STAYED
    assert cluster.loop.time() - began == pytest.approx(after_s, abs=0.1)
    assert cluster.released == cluster.retired == []


async def test_all_workers_of_a_host_are_known_before_anything_moves() -> None:
    cluster = Cluster(["w1", "w2", "w3"], free_after_s=3)
    both = asyncio.gather(cluster.leaving("w1", 30), cluster.leaving("w2", 30))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (cluster.hosts.retiring, cluster.received) == ({"w1", "w2"}, [])
    assert [answers[-1] for answers in await cluster.until(both)] == [RetirementStatus.MOVED] * 2
    assert [sorted(received) for _, received in cluster.received] == [["w1"], ["w2"]]


@pytest.mark.parametrize("late_s", [0.0, 5.0])
async def test_the_last_workers_do_not_wait_for_a_place(late_s: float) -> None:
    cluster = Cluster(["w1", "w2"], free_after_s=1000)
    one = cluster.leaving("w1", 30)
    await asyncio.sleep(late_s)
    other = cluster.leaving("w2", 30)
    assert [(await each)[-1] for each in (one, other)] == [RetirementStatus.STAYED] * 2
    assert cluster.loop.time() < late_s + 1


@pytest.mark.parametrize("is_adaptive", [False, True])
async def test_a_worker_without_a_host_yet_and_one_that_an_adaptive_cluster_may_start_are_places(
    is_adaptive: bool,
) -> None:
    cluster = Cluster(["w1"] if is_adaptive else ["w1", "w2"], free_after_s=3)
    cluster.capacity.is_adaptive = is_adaptive
    cluster.hosts.has = lambda worker: worker == "w1"
    assert (await cluster.until(cluster.leaving("w1", 30)))[-1] == RetirementStatus.MOVED


async def test_a_worker_without_daskserve_is_no_place() -> None:
    cluster = Cluster(["w1", "w2"], free_after_s=1000)
    cluster.hosts.refused = lambda: {"w2": "it has no daskserve"}
    assert await cluster.leaving("w1", 30) == [RetirementStatus.STAYED]


async def test_a_worker_of_which_a_new_scheduler_knows_nothing_yet_lets_its_requests_complete_itself() -> (
    None
):
    cluster = Cluster(["w2"], free_after_s=0)
    assert await cluster.evacuations.leave("w1", 30) == RetirementStatus.STAYED


async def test_all_are_notified_of_a_worker_without_actors_before_it_ends() -> None:
    cluster = Cluster(["w1", "w2"], free_after_s=1000)
    await cluster.evacuations.depart("w1")
    assert cluster.left == ["w1"]


async def test_an_address_that_is_used_again_leaves_again() -> None:
    cluster = Cluster(["w1", "w2"], free_after_s=0)
    assert await cluster.leaving("w1", 30) == [RetirementStatus.MOVED]
    cluster.evacuations.forget("w1")
    cluster.hosts.retiring.clear()
    assert await cluster.leaving("w1", 30) == [RetirementStatus.MOVED]
    assert len(cluster.retired) == 2


async def test_no_worker_waits_for_a_supervisor_that_ends() -> None:
    cluster = Cluster(["w1", "w2"], free_after_s=1000)
    waiting = asyncio.ensure_future(cluster.evacuations.evacuate(["w1"]))
    await asyncio.sleep(1)
    cluster.evacuations.close()
    await waiting
    assert cluster.loop.time() == 1
