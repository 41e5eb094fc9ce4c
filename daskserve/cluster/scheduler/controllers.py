"""Keeping a controller alive for every instance, whatever becomes of the worker it lives on.

One that dies with its worker is replaced at the word of the scheduler; one that hangs, because its process
is stopped or its loop blocked, is found by asking it once a second. Every new one has a newer epoch, that the
store claims first, so an older one that still lives can do no harm; it is told to end all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from daskserve.cluster.base import InstanceStore
from daskserve.cluster.long_poll import CONTROLLER, WORKERS
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.errors import ServeError
from daskserve.types import ActorAddress, ActorKind, InstanceName, WorkerAddress

logger = logging.getLogger("daskserve.supervisor")

#: A controller is asked this often, and replaced after so many answers that did not come.
PERIOD_S = 1.0
MISSES = 3
#: A controller must have read its store by then; its worker may hang.
START_TIMEOUT_S = 10.0
#: When no worker could start one, or the store could not be reached, it is tried again after that long.
START_RETRY_S = 0.5


@dataclass(slots=True)
class Instance:
    name: InstanceName
    owner: str | None
    owns_cluster: bool
    grace_s: float
    payload: bytes
    store: InstanceStore
    #: Which call of ``serve.start()`` made it.
    start_id: str = ""
    epoch: int = 0
    #: How many controllers it has had.
    starts: int = 0
    controller: ActorAddress | None = None
    controller_up: asyncio.Event = field(default_factory=asyncio.Event)
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Waits for the workers' Hosts at the start.
    awaiting_hosts: asyncio.Task[None] | None = None
    #: Set when the first start is over, however it went.
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    is_ending: bool = False
    ending: asyncio.Task[None] | None = None
    grace: asyncio.TimerHandle | None = None


def plain(address: ActorAddress) -> dict[str, Any]:
    """Return an address as plain values."""
    return {"name": address.name, "worker": address.worker, "incarnation": address.incarnation}


class ControllerKeeper:
    """See the module.

    Parameters
    ----------
    tell
        Sends plain values to an instance's topic.
    spawn
        Runs a coroutine as a task of the supervisor's.
    """

    def __init__(
        self,
        hosts: HostRegistry,
        instances: Mapping[InstanceName, Instance],
        *,
        tell: Callable[[InstanceName, Mapping[str, Any]], None],
        spawn: Callable[[Any], Any],
    ) -> None:
        self._hosts = hosts
        self._instances = instances
        self._tell = tell
        self._spawn = spawn

    async def start(self, entry: Instance, excluded: set[WorkerAddress] | None = None) -> None:
        """Give an instance a controller, on one worker after the other until one has it.

        Raises what went wrong only for an instance that has never had one; otherwise it is tried again later.
        """
        # One at a time: when all workers are lost and come back at once, so many start one, and each newer
        # epoch would end the start before it, for ever.
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
            entry.epoch += 1  # at once, so that whoever is still starting an older one gives way
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
                # Not by wait_for: up to Python 3.11 that swallows a cancellation now and then.
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._create(entry, address)
            except (OSError, TimeoutError, ServeError) as error:
                logger.warning("The controller of %s did not start on %s: %r", entry.name, worker, error)
                continue
            if entry.epoch == epoch and self._hosts.has(worker) and not entry.is_ending:
                entry.controller = address
                entry.starts += 1
                entry.controller_up.set()
                self._tell(entry.name, {"kind": CONTROLLER, **plain(address)})
            else:
                self._spawn(self._end(address))

    async def replace(self, entry: Instance, excluded: set[WorkerAddress]) -> None:
        """Start a new controller elsewhere; the old one, if it still lives, is fenced and told to end."""
        old = self.lose(entry)
        await self.start(entry, excluded)
        if old is not None:
            self._spawn(self._end(old))

    def lose(self, entry: Instance) -> ActorAddress | None:
        """Take note that an instance's controller is of no use any more; return where it was."""
        old, entry.controller = entry.controller, None
        entry.controller_up.clear()
        return old

    def expected(self, leaving: set[WorkerAddress]) -> list[InstanceName]:
        """Return the instances that have a controller, or will have one that is not on these workers."""
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
                    logger.warning("The controller %s does not answer and is replaced", address)
                    misses.pop(address.incarnation)
                    self._hosts.suspects.add(address.worker)
                    self._spawn(self._clear_suspect(address.worker))
                    await self.replace(entry, {address.worker})
            await asyncio.sleep(max(0.0, began + PERIOD_S - loop.time()))

    async def _create(self, entry: Instance, address: ActorAddress) -> None:
        spec = {
            "kind": ActorKind.CONTROLLER.value,
            "name": address.name,
            "incarnation": address.incarnation,
            "instance": entry.name,
            "payload": entry.payload,
        }
        await self._hosts.run(address.worker, "create", {"spec": spec})

    async def _start_later(self, entry: Instance) -> None:
        await asyncio.sleep(START_RETRY_S)
        await self.start(entry)

    async def _answers(self, address: ActorAddress) -> bool:
        message = {
            "name": address.name,
            "incarnation": address.incarnation,
            "verb": "ping",
            "message": {},
        }
        try:
            async with asyncio.timeout(PERIOD_S):
                await self._hosts.run(address.worker, "call", message)
        except (OSError, TimeoutError, ServeError):
            return False
        return True

    async def _end(self, address: ActorAddress) -> None:
        message = {"name": address.name, "incarnation": address.incarnation, "grace_s": 0.0}
        try:
            await self._hosts.run(address.worker, "destroy", message)
        except (OSError, ServeError) as error:
            logger.info("Controller %s could not be told to end: %s", address, error)

    async def _clear_suspect(self, worker: WorkerAddress) -> None:
        """Trust a worker again when its Host answers, however long that takes."""
        try:
            await self._hosts.run(worker, "actors", {"instance": ""})
        except (OSError, ServeError) as error:
            logger.info("Worker %s was lost before it answered again: %s", worker, error)
        self._hosts.suspects.discard(worker)
        infos = [info for info in self._hosts.infos() if info["address"] == worker]
        for name in list(self._instances):
            self._tell(name, {"kind": WORKERS, "joined": infos, "left": []})
