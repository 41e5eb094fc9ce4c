"""Keeping a controller running for every instance, even if its worker dies or hangs.

When a worker dies, the scheduler reports it and its controllers are replaced. A hanging controller, whose
process is stopped or whose event loop is blocked, is detected by a ping once a second. Every new controller
first claims a newer epoch in the store, so an older one that is still alive is fenced. It is stopped anyway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from daskserve.cluster.actor_calls import create_actor, destroy_actor, list_actors
from daskserve.cluster.base import ActorSpec, InstanceStore
from daskserve.cluster.long_poll import CONTROLLER, WORKERS
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.cluster.scheduler.parcels import InstanceParcels
from daskserve.errors import ActorLostError, BadRequestError, ServeError
from daskserve.types import ActorAddress, ActorKind, InstanceName, WorkerAddress

logger = logging.getLogger("daskserve.supervisor")

#: How often a controller is pinged, and after how many missed answers it is replaced.
PERIOD_S = 1.0
MISSES = 3
#: Timeout of a controller's start, which includes reading the store; its worker may hang.
START_TIMEOUT_S = 10.0
#: Pause before the next attempt when no worker could start a controller or the store was unreachable.
START_RETRY_S = 0.5


@dataclass(slots=True)
class Instance:
    name: InstanceName
    owner: str | None
    owns_cluster: bool
    grace_s: float
    payload: bytes
    store: InstanceStore
    #: Id of the ``serve.start()`` call that started the instance.
    start_id: str = ""
    #: Whether ``serve.run()`` started the instance, so that other programs use it.
    is_default: bool = False
    epoch: int = 0
    #: Number of controllers started so far.
    starts: int = 0
    controller: ActorAddress | None = None
    controller_up: asyncio.Event = field(default_factory=asyncio.Event)
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: The wait for the workers' Hosts during the start.
    awaiting_hosts: asyncio.Task[None] | None = None
    #: Set when the first start has succeeded or failed.
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    #: Lets the requests complete, before the end.
    draining: asyncio.Task[None] | None = None
    is_ending: bool = False
    ending: asyncio.Task[None] | None = None
    grace: asyncio.TimerHandle | None = None
    parcels: InstanceParcels = field(init=False)

    def __post_init__(self) -> None:
        self.parcels = InstanceParcels(self.store)


def plain(address: ActorAddress) -> dict[str, Any]:
    """Return an address as plain values."""
    return {"name": address.name, "worker": address.worker, "incarnation": address.incarnation}


class ControllerKeeper:
    """Starts, pings and replaces the controllers of all instances.

    Parameters
    ----------
    publish
        Publishes plain values on an instance's topic.
    spawn
        Runs a coroutine as a task of the supervisor.
    """

    def __init__(
        self,
        hosts: HostRegistry,
        instances: Mapping[InstanceName, Instance],
        *,
        publish: Callable[[InstanceName, Mapping[str, Any]], None],
        spawn: Callable[[Any], Any],
    ) -> None:
        self._hosts = hosts
        self._instances = instances
        self._publish = publish
        self._spawn = spawn

    async def start(self, entry: Instance, excluded: set[WorkerAddress] | None = None) -> None:
        """Start a controller for an instance; try one worker after another.

        The first start of an instance raises its error; later starts are retried in the background.
        """
        # One start at a time: when all workers return at once, each of them triggers a start, and each newer
        # epoch would cancel the start before it, without end.
        async with entry.starting:
            await self._start(entry, excluded)

    async def _start(self, entry: Instance, excluded: set[WorkerAddress] | None) -> None:
        tried: set[WorkerAddress] = set(excluded or ())
        is_first = not entry.epoch
        while not entry.is_ending and entry.controller is None:
            worker = self._hosts.best_for_controller(tried)
            if worker is None:
                if not is_first:
                    self._spawn(self._start_later(entry))
                return
            tried.add(worker)
            entry.epoch += 1  # at once, so that a pending start of an older controller is discarded
            try:
                epoch = entry.epoch = await entry.store.claim_epoch()
            except ServeError as error:
                if is_first:
                    raise
                logger.warning("The controller of %s waits for its store: %s", entry.name, error)
                self._spawn(self._start_later(entry))
                return
            address = ActorAddress(f"{entry.name}/controller", worker, epoch)
            try:
                # Not wait_for: up to Python 3.11, it sometimes swallows a cancellation.
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._create(entry, address)
            except (OSError, TimeoutError, ServeError) as error:
                if is_first and isinstance(error, BadRequestError):
                    raise  # it is the caller's, on every worker
                # A worker that has left, as all do when the cluster closes, is nothing to warn of.
                level = logging.INFO if isinstance(error, ActorLostError) else logging.WARNING
                logger.log(level, "The controller of %s did not start on %s: %r", entry.name, worker, error)
                continue
            if entry.epoch == epoch and self._hosts.has(worker) and not entry.is_ending:
                entry.controller = address
                entry.starts += 1
                entry.controller_up.set()
                self._publish(entry.name, {"kind": CONTROLLER, **plain(address)})
            else:
                self._spawn(self._end(address))

    async def replace(self, entry: Instance, excluded: set[WorkerAddress]) -> None:
        """Start a new controller on another worker; the old one is fenced and, if it is alive, stopped."""
        old = self.lose(entry)
        await self.start(entry, excluded)
        if old is not None:
            self._spawn(self._end(old))

    def lose(self, entry: Instance) -> ActorAddress | None:
        """Mark an instance's controller as lost; return its address."""
        old, entry.controller = entry.controller, None
        entry.controller_up.clear()
        return old

    def expected(self, leaving: set[WorkerAddress]) -> list[InstanceName]:
        """Return the instances that have a controller, or will get one on another worker."""
        has_room = self._hosts.best_for_controller(leaving) is not None
        return [
            entry.name
            for entry in self._instances.values()
            if not entry.is_ending and (has_room or entry.controller is not None)
        ]

    async def watch(self) -> None:
        """Replace controllers that do not answer, until cancelled."""
        misses: dict[int, int] = {}
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            for entry in list(self._instances.values()):
                address = entry.controller
                if address is None or entry.is_ending:
                    continue
                if await self._answers(address):
                    misses.pop(address.incarnation, None)
                    continue
                misses[address.incarnation] = misses.get(address.incarnation, 0) + 1
                if misses[address.incarnation] >= MISSES and entry.controller == address:
                    logger.warning("Replacing controller %s: it does not answer", address)
                    misses.pop(address.incarnation)
                    self._hosts.suspects.add(address.worker)
                    self._spawn(self._clear_suspect(address.worker))
                    await self.replace(entry, {address.worker})
            await asyncio.sleep(max(0.0, began + PERIOD_S - loop.time()))

    async def _create(self, entry: Instance, address: ActorAddress) -> None:
        spec = ActorSpec(ActorKind.CONTROLLER, address.name, address.incarnation, entry.name, entry.payload)
        await create_actor(self._hosts.call, spec, address.worker)

    async def _start_later(self, entry: Instance) -> None:
        await asyncio.sleep(START_RETRY_S)
        await self.start(entry)

    async def _answers(self, address: ActorAddress) -> bool:
        try:
            async with asyncio.timeout(PERIOD_S):
                await self._hosts.call(address, "ping")
        except (OSError, TimeoutError, ServeError):
            return False
        return True

    async def _end(self, address: ActorAddress) -> None:
        try:
            await destroy_actor(self._hosts.call, address, 0.0)
        except (OSError, ServeError) as error:
            logger.info("Stopping controller %s failed: %s", address, error)

    async def _clear_suspect(self, worker: WorkerAddress) -> None:
        """Wait until a worker's Host answers, then use the worker again."""
        try:
            await list_actors(self._hosts.call, worker, "")
        except (OSError, ServeError) as error:
            logger.info("Worker %s was lost before it answered again: %s", worker, error)
        self._hosts.suspects.discard(worker)
        infos = [info for info in self._hosts.infos() if info["address"] == worker]
        for name in list(self._instances):
            self._publish(name, {"kind": WORKERS, "joined": infos, "left": []})
