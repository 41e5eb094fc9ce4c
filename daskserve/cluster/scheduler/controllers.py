"""Keeping a controller running for every instance, even if its worker dies or hangs.

When a worker dies, the scheduler reports it and its controllers are replaced. A ping once a second detects a
hanging controller, whose process is stopped or whose event loop is blocked. The ping also carries the
condition of the store to the controller. Every new controller first gets a newer epoch, so an older one that
is still alive is fenced. The older one is also stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from daskserve.cluster.actors.calls import create_actor, destroy_actor, list_actors
from daskserve.cluster.long_poll import CONTROLLER, WORKERS
from daskserve.cluster.protocols.base import ActorSpec, InstanceStore
from daskserve.cluster.scheduler.hosts import HostRegistry
from daskserve.cluster.scheduler.parcels import InstanceParcels
from daskserve.cluster.task_queues import InstanceTaskQueues
from daskserve.common.types import ActorAddress, ActorKind, InstanceName, WorkerAddress, WorkerInfo
from daskserve.errors import ActorLostError, BadRequestError, ServeError, UnavailableError

logger = logging.getLogger("daskserve.supervisor")

#: How often a controller is pinged, and after how many missed answers it is replaced.
PERIOD_S = 1.0
MISSES = 3
#: How long another worker must be better before a controller moves there, because it may be about to get a
#: proxy.
SETTLED_S = 10.0
#: Timeout of a controller's start, which includes reading the store; its worker may hang.
START_TIMEOUT_S = 10.0
#: Pause before the next attempt when no worker could start a controller or the store was unreachable.
START_RETRY_S = 0.5
#: How long a lookup waits for a controller that is being replaced.
LOOKUP_S = 0.5


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
    #: The option ``system_workers``.
    system_workers: tuple[str, ...] = ()
    epoch: int = 0
    #: Why its next controller cannot start: an error of the store.
    obstacle: str = ""
    #: Whether its actors have outlived another scheduler, so that they serve while it has no controller.
    is_back: bool = False
    #: Number of controllers started so far.
    starts: int = 0
    #: How many pings in a row the controller has not answered.
    misses: int = 0
    #: The workers of the proxies, as the controller reported them last.
    proxies: frozenset[WorkerAddress] = frozenset()
    #: Time since which the controller could run on a better worker.
    better_since: float | None = None
    controller: ActorAddress | None = None
    controller_up: asyncio.Event = field(default_factory=asyncio.Event)
    #: Retries the start of a controller after failed attempts.
    retrying: asyncio.Task[None] | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: The wait for the workers' Hosts during the start.
    awaiting_hosts: asyncio.Task[None] | None = None
    #: Set when the first start has succeeded or failed.
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    #: Waits until the requests are complete, before the end.
    draining: asyncio.Task[None] | None = None
    is_ending: bool = False
    ending: asyncio.Task[None] | None = None
    #: Watches the store, if other clusters may also use it.
    watching: asyncio.Task[None] | None = None
    #: Whether the start has failed and the store goes back to its previous owner.
    has_failed: bool = False
    grace: asyncio.TimerHandle | None = None
    #: The URL of the store.
    url: str = "memory://"
    parcels: InstanceParcels = field(init=False)
    tasks: InstanceTaskQueues = field(init=False)

    def __post_init__(self) -> None:
        self.parcels = InstanceParcels(self.store)
        self.tasks = InstanceTaskQueues(self.url, self.name, self.start_id)

    @classmethod
    def started_by(cls, start: Mapping[str, Any], store: InstanceStore) -> Self:
        """Return the instance that a message of the verb ``start_instance`` starts."""
        fields = {name: start[name] for name in ("owner", "owns_cluster", "grace_s", "payload")}
        optional = {name: start[name] for name in ("start_id", "is_default") if name in start}
        url = start.get("store", "memory://")
        system_workers = tuple(start.get("system_workers", ()))
        named = {"name": start["instance"], "store": store, "url": url, "system_workers": system_workers}
        return cls(**named, **fields, **optional)

    def spare(self) -> None:
        """Cancel a scheduled end."""
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None


async def list_instances(instances: Mapping[InstanceName, Instance]) -> dict[InstanceName, dict[str, Any]]:
    """Return the instances that are not ending, each with the fields by which programs choose one."""
    return {
        # An instance whose owner has left is about to end.
        entry.name: {
            "owns_cluster": entry.owns_cluster,
            "is_default": entry.is_default and entry.grace is None,
            "owner": entry.owner,
        }
        for entry in instances.values()
        if not entry.is_ending and entry.draining is None
    }


async def find_controller(
    known: Callable[[InstanceName], Instance], instance: InstanceName
) -> dict[str, Any]:
    """Return the fields of the address of an instance's controller.

    Raises
    ------
    NotRunningError
        The instance does not run.
    UnavailableError
        Its controller is being replaced.
    """
    entry = known(instance)
    # A short wait saves callers a retry. It must be short: it occupies the caller's connection to the
    # scheduler.
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOKUP_S):
            await entry.controller_up.wait()
    if entry.controller is None:
        what = f"cannot start: {entry.obstacle}" if entry.obstacle else "is being replaced; try again."
        raise UnavailableError(f"The controller of {instance!r} {what}")
    return asdict(entry.controller)


def best_worker(
    infos: Iterable[Mapping[str, Any]],
    excluded: Collection[WorkerAddress],
    proxies: Collection[WorkerAddress],
    system_workers: Collection[str] = (),
) -> WorkerAddress | None:
    """Return the best worker for a controller, or None: one on the scheduler's host, without a proxy.

    A system worker, which is reserved for the controller and the proxies, is better than any other worker.

    If a worker with a controller and a proxy hung, the proxy would be replaced only after the controller:
    clients would wait for two detections in a row.

    Parameters
    ----------
    infos
        The workers, as the fields of `daskserve.common.types.WorkerInfo`.
    proxies
        The workers of the proxies; before there are any, the worker that gets the first one is expected.
    system_workers
        The option of this name.
    """
    known = [each for each in infos if not each["is_retiring"]]
    system = {info["address"] for info in known if WorkerInfo(**info).matches(system_workers)}
    if not proxies and known:
        own = [info for info in known if info["address"] in system] or known
        first = min(own, key=lambda info: (not info["is_head"], not info["is_available"], info["address"]))
        proxies = {first["address"]}
    candidates = [info for info in known if info["address"] not in excluded]

    def rank(info: Mapping[str, Any]) -> tuple[bool, bool, bool, bool, str]:
        address = info["address"]
        return (info["is_available"], address in system, address not in proxies, info["is_head"], address)

    return max(candidates, key=rank)["address"] if candidates else None


class ControllerSupervisor:
    """Starts, pings and replaces the controllers of all instances.

    Parameters
    ----------
    publish
        Publishes plain values on an instance's topic.
    spawn
        Runs a coroutine as a task of the supervisor.
    may_move
        Returns whether controllers may move onto workers that the cluster could do without.
    """

    def __init__(
        self,
        hosts: HostRegistry,
        instances: Mapping[InstanceName, Instance],
        *,
        publish: Callable[[InstanceName, Mapping[str, Any]], None],
        spawn: Callable[[Any], Any],
        may_move: Callable[[], bool] = lambda: True,
    ) -> None:
        self._hosts = hosts
        self._may_move = may_move
        self._instances = instances
        self._publish = publish
        self._spawn = spawn

    async def start(self, entry: Instance, excluded: set[WorkerAddress] | None = None) -> None:
        """Start a controller for an instance; try one worker after another.

        The first start of a new instance raises its error; other starts are retried in the background.
        """
        # One start at a time: when all workers return at once, each of them triggers a start, and each newer
        # epoch would cancel the start before it, without end.
        async with entry.starting:
            await self._start(entry, excluded)

    async def _start(self, entry: Instance, excluded: set[WorkerAddress] | None) -> None:
        tried: set[WorkerAddress] = set(excluded or ())
        is_first = not entry.epoch and not entry.is_back
        while not entry.is_ending and entry.controller is None:
            worker = best_worker(self._hosts.infos(), tried, entry.proxies, entry.system_workers)
            if worker is None:
                if not is_first:
                    self._retry(entry)
                return
            tried.add(worker)
            try:
                entry.epoch += 1  # now, so that a pending start of an older controller is discarded
                epoch = entry.epoch = await entry.store.claim_epoch()
            except ServeError as error:
                if is_first:
                    raise
                if entry.obstacle != str(error):
                    logger.warning("The controller of %s waits for its store: %s", entry.name, error)
                entry.obstacle = str(error)
                self._retry(entry)
                return
            entry.obstacle = ""
            address = ActorAddress(f"{entry.name}/controller", worker, epoch)
            try:
                # Not wait_for: up to Python 3.11, it sometimes swallows a cancellation.
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._create(entry, address)
            except (OSError, TimeoutError, ServeError) as error:
                if is_first and isinstance(error, BadRequestError):
                    raise  # the caller's mistake fails on every worker
                # No warning if the worker has left, because all workers leave when the cluster closes.
                level = logging.INFO if isinstance(error, ActorLostError) else logging.WARNING
                logger.log(level, "The controller of %s did not start on %s: %r", entry.name, worker, error)
                self._spawn(self._end(address))  # it may still start
                continue
            if entry.epoch == epoch and self._hosts.has(worker) and not entry.is_ending:
                entry.controller = address
                entry.misses = 0
                entry.starts += 1
                entry.controller_up.set()
                self._publish(entry.name, {"kind": CONTROLLER, **asdict(address)})
            else:
                self._spawn(self._end(address))

    async def replace(self, entry: Instance, excluded: set[WorkerAddress]) -> None:
        """Start a new controller on another worker; the old one is fenced and, if it is alive, stopped."""
        old = self.mark_lost(entry)
        await self.start(entry, excluded)
        if old is not None:
            self._spawn(self._end(old))

    def mark_lost(self, entry: Instance) -> ActorAddress | None:
        """Mark an instance's controller as lost; return its address."""
        old, entry.controller = entry.controller, None
        entry.controller_up.clear()
        return old

    def expected(self, leaving: set[WorkerAddress]) -> list[InstanceName]:
        """Return the instances that have a controller, or will get one on another worker."""
        has_room = best_worker(self._hosts.infos(), leaving, ()) is not None
        return [
            entry.name
            for entry in self._instances.values()
            if not entry.is_ending and (has_room or entry.controller is not None)
        ]

    async def watch(self) -> None:
        """Replace controllers that do not answer, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            for entry in list(self._instances.values()):
                address = entry.controller
                if address is None or entry.is_ending:
                    continue
                is_answered = await self._answers(entry, address)
                if entry.controller != address:
                    continue
                entry.misses = 0 if is_answered else entry.misses + 1
                if is_answered:
                    await self._keep_apart(entry, address)
                elif entry.misses >= MISSES:
                    logger.warning("Replacing controller %s: it does not answer", address)
                    self._hosts.suspects.add(address.worker)
                    self._spawn(self._clear_suspect(address.worker))
                    await self.replace(entry, {address.worker})
            await asyncio.sleep(max(0.0, began + PERIOD_S - loop.time()))

    async def _keep_apart(self, entry: Instance, address: ActorAddress) -> None:
        """Move a controller to a system worker, or to a worker without a proxy, if the cluster has one
        now."""
        found = self._better(entry, address.worker)
        if found is None:
            entry.better_since = None
            return
        now = asyncio.get_running_loop().time()
        if entry.better_since is None:
            entry.better_since = now
        if now < entry.better_since + SETTLED_S:
            return
        entry.better_since = None
        best, why = found
        logger.info("Moving controller %s, which %s, to %s", address, why, best)
        await self.replace(entry, {address.worker})

    def _better(self, entry: Instance, here: WorkerAddress) -> tuple[WorkerAddress, str] | None:
        """Return a better worker for a controller and the reason; None if there is none."""
        infos = self._hosts.infos()
        known = {info["address"]: WorkerInfo(**info) for info in infos}
        best = best_worker(infos, (), entry.proxies, entry.system_workers)
        if best is None or here not in known or not known[best].is_available:
            return None

        def rank(worker: WorkerAddress) -> tuple[bool, bool]:
            return known[worker].matches(entry.system_workers), worker not in entry.proxies

        now, then = rank(here), rank(best)
        # Moving to a system worker is always allowed, because it stays in the cluster in any case.
        if then <= now or not (then[0] > now[0] or self._may_move()):
            return None
        return best, "shares its worker with a proxy" if then[0] == now[0] else "is on no system worker"

    async def _create(self, entry: Instance, address: ActorAddress) -> None:
        spec = ActorSpec(ActorKind.CONTROLLER, address.name, address.incarnation, entry.name, entry.payload)
        await create_actor(self._hosts.call, spec, address.worker)

    def _retry(self, entry: Instance) -> None:
        # One task is enough, because each worker that joins also triggers an attempt.
        if entry.retrying is None or entry.retrying.done():
            entry.retrying = self._spawn(self._keep_starting(entry))

    async def _keep_starting(self, entry: Instance) -> None:
        while entry.controller is None and not entry.is_ending:
            await asyncio.sleep(START_RETRY_S)
            await self.start(entry)

    async def _answers(self, entry: Instance, address: ActorAddress) -> bool:
        condition = {"problems": dict(entry.store.problems()), "hold": entry.store.ownership.value}
        try:
            async with asyncio.timeout(PERIOD_S):
                await self._hosts.call(address, "ping", store=condition)
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
        for name in list(self._instances):
            self._publish(name, {"kind": WORKERS, "joined": self._hosts.infos(worker), "left": []})
