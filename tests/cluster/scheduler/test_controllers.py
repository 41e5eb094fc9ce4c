"""The supervisor keeps a controller running for each instance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from daskserve.clock import LoopClock
from daskserve.cluster.actor_book import ActorBook
from daskserve.cluster.base import ActorSpec, Hosted, verb, verbs_of
from daskserve.cluster.scheduler.controllers import ControllerKeeper, Instance
from daskserve.cluster.store.opening import MemoryStore
from daskserve.errors import ActorLostError
from daskserve.loops.tasks import TaskSet
from daskserve.testing import run_virtual, wait_until
from daskserve.types import ActorAddress, ActorKind, WorkerAddress


class Controller:
    """A controller that answers pings until it hangs."""

    def __init__(self, spec: ActorSpec) -> None:
        self.spec = spec
        self.verbs = verbs_of(self)
        self.hangs = self.is_stopped = False

    async def start(self) -> Mapping[str, Any]:
        return {}

    async def stop(self, grace_s: float) -> None:
        self.is_stopped = True

    def samples(self) -> Iterable[Any]:
        return ()

    @verb
    async def ping(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()


class Hosts:
    """Workers with an open Host each."""

    def __init__(self, *workers: WorkerAddress) -> None:
        self.suspects: set[WorkerAddress] = set()
        self.made: list[Controller] = []
        self._books = {each: ActorBook(each, 1, LoopClock(), self._make) for each in workers}

    def _make(self, spec: ActorSpec) -> Hosted:
        self.made.append(Controller(spec))
        return self.made[-1]  # type: ignore[return-value]

    def has(self, worker: WorkerAddress) -> bool:
        return worker in self._books

    def infos(self) -> list[dict[str, Any]]:
        return [{"address": worker} for worker in self._books]

    def best_for_controller(self, excluded: set[WorkerAddress]) -> WorkerAddress | None:
        return min(set(self._books) - excluded, default=None)

    async def call(self, address: ActorAddress, verb: str, **message: Any) -> Any:
        if address.worker not in self._books:
            raise ActorLostError(f"{address.worker} is gone.")
        book = self._books[address.worker]
        return await book.call(address.name, address.incarnation, verb, message)

    def lose(self, worker: WorkerAddress) -> None:
        del self._books[worker]


class Site:
    """A keeper with one instance on two workers."""

    def __init__(self) -> None:
        self.hosts = Hosts("w1", "w2")
        self.published: list[Mapping[str, Any]] = []
        self.entry = Instance("shop", None, False, 5.0, b"settings", MemoryStore())
        self.tasks = TaskSet(logging.getLogger(__name__))
        self.keeper = ControllerKeeper(
            self.hosts,  # type: ignore[arg-type]
            {"shop": self.entry},
            publish=lambda _, message: self.published.append(message),
            spawn=self.tasks.spawn,
        )


def test_a_controller_is_started_with_its_instances_payload() -> None:
    async def scenario() -> None:
        site = Site()
        await site.keeper.start(site.entry)
        [controller] = site.hosts.made
        assert controller.spec == ActorSpec(ActorKind.CONTROLLER, "shop/controller", 1, "shop", b"settings")
        assert site.entry.controller == ActorAddress("shop/controller", "w1", 1)

    run_virtual(scenario)


def test_a_controller_that_does_not_answer_pings_is_replaced_and_stopped() -> None:
    async def scenario() -> None:
        site = Site()
        await site.keeper.start(site.entry)
        site.tasks.spawn(site.keeper.watch())
        await asyncio.sleep(10)
        assert len(site.hosts.made) == 1
        site.hosts.made[0].hangs = True
        await wait_until(lambda: site.hosts.made[0].is_stopped)
        assert site.entry.controller == ActorAddress("shop/controller", "w2", 2)
        assert [controller.is_stopped for controller in site.hosts.made] == [True, False]
        assert not site.hosts.suspects, "the worker's Host answers, so the worker is used again"
        await site.tasks.close()

    run_virtual(scenario)


def test_a_lost_worker_does_not_prevent_the_replacement_of_its_controller() -> None:
    async def scenario() -> None:
        site = Site()
        await site.keeper.start(site.entry)
        site.hosts.lose("w1")
        await site.keeper.replace(site.entry, {"w1"})
        await site.tasks.wait()
        assert site.entry.controller == ActorAddress("shop/controller", "w2", 2)

    run_virtual(scenario)
