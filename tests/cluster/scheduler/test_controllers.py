"""The supervisor keeps a controller running for each instance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from daskserve.cluster.actors.registry import ActorRegistry
from daskserve.cluster.protocols.base import ActorSpec, HostedActor, verb, verbs_of
from daskserve.cluster.protocols.stores import StoreOwnership
from daskserve.cluster.scheduler.controllers import (
    MISSES,
    START_RETRY_S,
    ControllerSupervisor,
    Instance,
    best_worker,
    find_controller,
)
from daskserve.cluster.scheduler.owned_store import OwnedStore
from daskserve.cluster.store.errors import StoreUnavailableError
from daskserve.cluster.store.opening import MemoryStore, open_store
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorAddress, ActorKind, WorkerAddress
from daskserve.errors import ActorLostError, UnavailableError
from daskserve.loops.tasks import TaskSet
from daskserve.testing import wait_until


class Controller:
    """A controller that can hang: then it ignores pings, but only the first ``answers_from`` of them."""

    def __init__(self, spec: ActorSpec) -> None:
        self.spec = spec
        self.verbs = verbs_of(self)
        self.hangs = self.is_stopped = False
        self.unanswered = 0
        self.answers_from: int | None = None

    async def start(self) -> Mapping[str, Any]:
        return {}

    async def stop(self, grace_s: float) -> None:
        self.is_stopped = True

    def samples(self) -> Iterable[Any]:
        return ()

    @verb
    async def ping(self, store: Mapping[str, Any]) -> None:
        if self.hangs and self.unanswered != self.answers_from:
            self.unanswered += 1
            await asyncio.Event().wait()


def _info(
    worker: WorkerAddress,
    *,
    is_head: bool = True,
    is_available: bool = True,
    is_retiring: bool = False,
    resources: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    return {
        "address": worker,
        "host": "h1",
        "threads": 1,
        "memory_bytes": 0,
        "resources": resources or {},
        "is_head": is_head,
        "is_available": is_available,
        "is_retiring": is_retiring,
    }


class Hosts:
    """Workers with an open Host each."""

    def __init__(self, *workers: WorkerAddress) -> None:
        self.suspects: set[WorkerAddress] = set()
        self.made: list[Controller] = []
        self._registries = {each: ActorRegistry(each, 1, LoopClock(), self._make) for each in workers}

    def _make(self, spec: ActorSpec) -> HostedActor:
        self.made.append(Controller(spec))
        return self.made[-1]  # type: ignore[return-value]

    def has(self, worker: WorkerAddress) -> bool:
        return worker in self._registries

    def infos(self, *of: WorkerAddress) -> list[dict[str, Any]]:
        return [_info(worker) for worker in of or self._registries if worker in self._registries]

    def join(self, worker: WorkerAddress) -> None:
        self._registries[worker] = ActorRegistry(worker, 1, LoopClock(), self._make)

    async def call(self, address: ActorAddress, verb: str, **message: Any) -> Any:
        if address.worker not in self._registries:
            raise ActorLostError(f"{address.worker} is gone.")
        registry = self._registries[address.worker]
        return await registry.call(address.name, address.incarnation, verb, message)

    def lose(self, worker: WorkerAddress) -> None:
        del self._registries[worker]


class Site:
    """A controller supervisor with one instance on two workers."""

    def __init__(self) -> None:
        self.hosts = Hosts("w1", "w2")
        self.published: list[Mapping[str, Any]] = []
        self.entry = Instance("shop", None, False, 5.0, b"settings", MemoryStore())
        self.instances = {"shop": self.entry}
        self.tasks = TaskSet(logging.getLogger(__name__))
        self.may_move = True
        self.controllers = ControllerSupervisor(
            self.hosts,  # type: ignore[arg-type]
            self.instances,
            publish=lambda _, message: self.published.append(message),
            spawn=self.tasks.spawn,
            may_move=lambda: self.may_move,
        )


@pytest.mark.virtual_time
async def test_a_controller_is_started_with_its_instances_payload() -> None:
    site = Site()
    await site.controllers.start(site.entry)
    [controller] = site.hosts.made
    assert controller.spec == ActorSpec(ActorKind.CONTROLLER, "shop/controller", 1, "shop", b"settings")
    assert site.entry.controller == ActorAddress("shop/controller", "w2", 1)


@pytest.mark.virtual_time
async def test_a_controller_that_does_not_answer_pings_is_replaced_and_stopped() -> None:
    site = Site()
    await site.controllers.start(site.entry)
    site.tasks.spawn(site.controllers.watch())
    await asyncio.sleep(10)
    assert len(site.hosts.made) == 1
    site.hosts.made[0].hangs = True
    await wait_until(lambda: site.hosts.made[0].is_stopped)
    assert site.entry.controller == ActorAddress("shop/controller", "w1", 2)
    assert [controller.is_stopped for controller in site.hosts.made] == [True, False]
    assert not site.hosts.suspects, "the worker's Host answers, so the worker is used again"
    await site.tasks.close()


@pytest.mark.virtual_time
async def test_a_new_controller_may_miss_as_many_pings_as_the_one_that_it_replaces() -> None:
    site = Site()
    await site.controllers.start(site.entry)
    site.tasks.spawn(site.controllers.watch())
    site.hosts.made[0].hangs = True
    await wait_until(lambda: site.hosts.made[0].is_stopped)
    assert site.hosts.made[0].unanswered == MISSES
    site.hosts.made[1].hangs, site.hosts.made[1].answers_from = True, MISSES - 1
    await asyncio.sleep(60)
    assert site.hosts.made[1].unanswered == MISSES - 1
    assert [controller.is_stopped for controller in site.hosts.made] == [True, False]
    await site.tasks.close()


@pytest.mark.virtual_time
async def test_a_hanging_controller_is_replaced_although_one_of_the_same_epoch_answers() -> None:
    """Each instance counts its own epochs, so the controllers of two instances may have the same one."""
    site = Site()
    site.instances["other"] = Instance("other", None, False, 5.0, b"", MemoryStore())
    for entry in site.instances.values():
        await site.controllers.start(entry)
    hanging, other = site.hosts.made
    assert hanging.spec.incarnation == other.spec.incarnation
    hanging.hangs = True
    site.tasks.spawn(site.controllers.watch())
    await wait_until(lambda: hanging.is_stopped)
    assert not other.is_stopped
    await site.tasks.close()


@pytest.mark.virtual_time
async def test_a_lost_worker_does_not_prevent_the_replacement_of_its_controller() -> None:
    site = Site()
    await site.controllers.start(site.entry)
    site.hosts.lose("w2")
    await site.controllers.replace(site.entry, {"w2"})
    await site.tasks.wait()
    assert site.entry.controller == ActorAddress("shop/controller", "w1", 2)


@pytest.mark.virtual_time
async def test_a_controller_whose_workers_are_all_lost_starts_once_there_is_another() -> None:
    site = Site()
    await site.controllers.start(site.entry)
    for worker in ("w1", "w2"):
        site.hosts.lose(worker)
    await site.controllers.replace(site.entry, {"w2"})
    site.hosts.join("w3")
    await wait_until(lambda: site.entry.controller is not None)
    assert site.entry.controller.worker == "w3"  # type: ignore[union-attr]
    await site.tasks.close()


async def test_a_lost_controller_is_replaced_once_another_cluster_has_taken_over(tmp_path: Path) -> None:
    """It does not take the store back from the other instance."""
    site = Site()
    url = f"sqlite:///{tmp_path}/store.db"
    ours, others = (OwnedStore(open_store(url, "shop"), name, LoopClock()) for name in ("a.1", "b.1"))
    for store in (ours, others):
        await store.open()
        await store.begin()
        epoch = await store.claim_epoch()
        await store.take_over(epoch, is_complete=True, own=())
    site.entry.store = ours
    await site.controllers.start(site.entry)
    await site.controllers.replace(site.entry, {"w2"})
    await site.tasks.wait()
    assert site.entry.controller == ActorAddress("shop/controller", "w1", 3)
    assert ours.ownership is StoreOwnership.TAKEN
    await others.check()
    assert others.ownership is StoreOwnership.HELD
    for store in (ours, others):
        await store.close()


@pytest.mark.virtual_time
async def test_workers_that_join_while_the_store_is_away_do_not_multiply_the_attempts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site()
    await site.controllers.start(site.entry)
    attempts: list[float] = []

    async def fail() -> int:
        attempts.append(asyncio.get_running_loop().time())
        raise StoreUnavailableError("the store is away")

    monkeypatch.setattr(site.entry.store, "claim_epoch", fail)
    site.controllers.mark_lost(site.entry)
    for _ in range(20):  # as the supervisor does for each worker
        await site.controllers.start(site.entry)
    await asyncio.sleep(10 * START_RETRY_S)
    assert len(attempts) <= 20 + 10
    assert [each.getMessage() for each in caplog.records] == [
        "The controller of shop waits for its store: the store is away"
    ]
    with pytest.raises(UnavailableError, match="'shop' cannot start: the store is away"):
        await find_controller(lambda _: site.entry, "shop")
    monkeypatch.undo()
    await wait_until(lambda: site.entry.controller is not None)
    assert (await find_controller(lambda _: site.entry, "shop"))["name"] == "shop/controller"
    await site.tasks.close()


@pytest.mark.virtual_time
async def test_an_instance_that_comes_back_waits_for_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> int:
        raise StoreUnavailableError("the disk is full")

    site = Site()
    monkeypatch.setattr(site.entry.store, "claim_epoch", fail)
    with pytest.raises(StoreUnavailableError):
        await site.controllers.start(site.entry)
    site.entry.epoch, site.entry.is_back = 0, True
    await site.controllers.start(site.entry)
    monkeypatch.undo()
    await wait_until(lambda: site.entry.controller is not None)
    await site.tasks.close()


def test_a_controller_keeps_away_from_proxies() -> None:
    for infos, excluded, proxies, expected in [
        ([], (), (), None),
        ([_info("a")], (), (), "a"),
        ([_info("a")], ("a",), (), None),
        # The first proxy will start on the first worker of the scheduler's host.
        ([_info("a"), _info("b"), _info("z", is_head=False)], (), (), "b"),
        ([_info("a"), _info("y", is_head=False), _info("z", is_head=False)], (), (), "z"),
        ([_info("a"), _info("b"), _info("z", is_head=False)], (), ("b",), "a"),
        ([_info("a"), _info("z", is_head=False)], (), ("a",), "z"),
        ([_info("a"), _info("z", is_head=False)], (), ("z",), "a"),
        # Everything has a proxy.
        ([_info("a"), _info("b")], (), ("a", "b"), "b"),
        ([_info("a"), _info("b", is_available=False)], (), ("a",), "a"),
        ([_info("a"), _info("b", is_retiring=True)], (), ("a",), "a"),
    ]:
        assert best_worker(infos, excluded, proxies) == expected, infos


@pytest.mark.virtual_time
async def test_a_controller_moves_once_there_is_a_worker_without_a_proxy() -> None:
    site = Site()
    site.hosts.lose("w2")
    await site.controllers.start(site.entry)
    site.entry.proxies = frozenset({"w1"})
    site.tasks.spawn(site.controllers.watch())
    await asyncio.sleep(10)
    assert site.entry.epoch == 1
    site.hosts.join("w2")
    site.may_move = False
    await asyncio.sleep(10)
    assert site.entry.epoch == 1, "an adaptive cluster would have one worker more in use"
    site.may_move = True
    await asyncio.sleep(5)
    site.entry.proxies = frozenset({"w1", "w2"})  # it was only about to start there
    await asyncio.sleep(5)
    site.entry.proxies = frozenset({"w1"})
    await asyncio.sleep(9)
    assert site.entry.epoch == 1
    await wait_until(lambda: site.entry.epoch == 2)
    await asyncio.sleep(10)
    assert site.entry.controller == ActorAddress("shop/controller", "w2", 2)
    assert [controller.is_stopped for controller in site.hosts.made] == [True, False]
    await site.tasks.close()


SYSTEM = {"system": 1.0}


def test_a_controller_goes_to_the_workers_that_are_kept_for_it() -> None:
    for infos, proxies, expected in [
        ([_info("a", resources=SYSTEM), _info("b")], (), "a"),
        ([_info("a", resources=SYSTEM), _info("b")], ("a",), "a"),
        ([_info("a", resources=SYSTEM), _info("b", resources=SYSTEM), _info("c")], (), "b"),
        ([_info("a", resources=SYSTEM), _info("b", resources=SYSTEM), _info("c")], ("b",), "a"),
        ([_info("a", is_head=False, resources=SYSTEM), _info("b")], (), "a"),
        ([_info("a", is_available=False, resources=SYSTEM), _info("b")], (), "b"),
        ([_info("a"), _info("b")], ("b",), "a"),
    ]:
        assert best_worker(infos, (), proxies, ["system"]) == expected, infos


@pytest.mark.virtual_time
@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_controller_moves_to_a_worker_that_is_kept_for_it_once_that_joins(is_shared: bool) -> None:
    site = Site()
    site.may_move = False  # a worker that is kept for it does not keep an adaptive cluster larger
    site.entry.system_workers = ("w0",)
    await site.controllers.start(site.entry)
    site.tasks.spawn(site.controllers.watch())
    await asyncio.sleep(10)
    assert site.entry.controller == ActorAddress("shop/controller", "w2", 1)
    site.entry.proxies = frozenset({"w0"} if is_shared else {"w1"})
    site.hosts.join("w0")
    await asyncio.sleep(20)
    assert site.entry.controller == ActorAddress("shop/controller", "w0", 2)
    await site.tasks.close()
