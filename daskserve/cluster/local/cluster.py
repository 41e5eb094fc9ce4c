"""A cluster in one process and on one event loop, for tests, simulations and experiments.

`LocalCluster` has simulated workers, and does for one instance what the supervisor does for all instances on
a real Dask cluster. It holds the store and the topic, starts the controller, and starts a new one with a
newer epoch when the controller's worker is lost. Every simulated worker is a `LocalProcess`: a view of the
cluster with a separate listener, routers and actors. It implements the
`daskserve.cluster.protocols.base.Cluster` protocol, like `daskserve.cluster.dask.cluster`, so the layers
above work with both.

Requests between processes use real channels over a transport in memory. Requests within a process take the
same path as in a real worker. The topic can lose, delay and reorder messages. Time is the loop's time, so
everything also runs on `daskserve.testing.VirtualTimeLoop`. A removed worker is dead immediately: callers
that wait for its actors get `ActorLostError`. Code that still runs on it can no longer write, publish or call
actors; such an attempt waits until it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Self, TypeVar

from daskserve.cluster.actors.instance_drain import drain
from daskserve.cluster.actors.registry import ActorRegistry
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.local.network import LocalNetwork
from daskserve.cluster.local.process import LocalProcess
from daskserve.cluster.local.run_state import RunState
from daskserve.cluster.local.topic import Deliver, LocalTopic, deliver_at_once
from daskserve.cluster.local.world import LocalWorld
from daskserve.cluster.long_poll import CONTROLLER, ENDED, WORKERS
from daskserve.cluster.protocols.base import ActorContext, ActorFactory, ActorSpec, HostedActor, InstanceStore
from daskserve.cluster.protocols.usage import UsageReport
from daskserve.cluster.store.opening import MemoryStore
from daskserve.common.clock import Clock, LoopClock
from daskserve.common.types import (
    ActorAddress,
    ActorKind,
    InstanceName,
    WorkerAddress,
    WorkerInfo,
)
from daskserve.errors import (
    ActorLostError,
    AlreadyRunningError,
    InstanceError,
    NotRunningError,
    UnavailableError,
)
from daskserve.loops.tasks import TaskSet

logger = logging.getLogger("daskserve.local")

T = TypeVar("T")


#: How long a lookup of the controller waits while it is being replaced, as at the supervisor.
CONTROLLER_PATIENCE_S = 0.5
#: Delay after the controller could not be started on any worker.
START_RETRY_S = 0.5


class LocalHost:
    """One simulated worker: its view of the cluster and its actors."""

    def __init__(
        self, world: LocalWorld, info: WorkerInfo, factories: Mapping[ActorKind, ActorFactory]
    ) -> None:
        def make(spec: ActorSpec) -> HostedActor:
            process = self.process
            return factories[spec.kind](
                ActorContext(
                    spec,
                    process,
                    process.clock,
                    world.rng,
                    info.address,
                    process.connection.inbox,
                    logs=self.logs,
                )
            )

        state = RunState(world.clock)
        self.info = info
        self.logs = world.network.records.logs()
        self.registry = ActorRegistry(
            info.address,
            info.pid,
            state.clock,
            make,
            broken_routes=lambda _: self.process.routes.broken(),
            logs=self.logs,
        )
        self.process = LocalProcess(world, state, self.registry)

    async def stop(self) -> None:
        """Stop all actors and the listener."""
        await self.registry.drain(0.0, self.process.instance)
        await self.process.stop_listening()


class LocalCluster:
    """Simulated workers, and one instance on them.

    Parameters
    ----------
    factories : mapping
        The factory for actors of each kind; the real ones are in `daskserve.actors`.
    workers : int or sequence of WorkerInfo
        The initial workers; an int creates that number of workers with 4 threads each.
    store : InstanceStore, optional
        The store of the instance's records; default: a `MemoryStore`. `start` opens it; `close` does not
        close it.
    deliver : callable, optional
        How the topic delivers messages, see `Deliver`.
    latency_s : float or callable
        Latency between two processes; a callable is called for each message.

    Attributes
    ----------
    program : LocalProcess
        The view of a program outside the workers, such as a test.
    network : LocalNetwork
        The network between the processes, which may be cut.
    topic : LocalTopic
        The instance's topic; set ``topic.deliver`` to change its delivery.
    reported : UsageReport
        The controller's last report to the scheduler.
    is_adaptive : bool
        The result of the controller's reports: whether the cluster is adaptive.
    epoch : int
        The epoch of the newest controller, running or starting.
    refused : dict
        The result of `Cluster.refused_workers`.

    Examples
    --------
    Start a controller on two workers and call it::

        async with LocalCluster(factories) as cluster:
            controller = await cluster.start(payload)
            await cluster.program.call(controller, "status")
            cluster.remove_worker(controller.worker)  # a new one takes over
    """

    is_adaptive = False

    def __init__(
        self,
        factories: Mapping[ActorKind, ActorFactory],
        *,
        workers: int | Sequence[WorkerInfo] = 2,
        instance: InstanceName = "local",
        clock: Clock | None = None,
        rng: random.Random | None = None,
        store: InstanceStore | None = None,
        deliver: Deliver = deliver_at_once,
        latency_s: float | Callable[[], float] = 0.0,
    ) -> None:
        self.instance = instance
        self.clock: Clock = clock or LoopClock()
        self.rng = rng or random.Random(0)
        self.store: InstanceStore = store or MemoryStore()
        self.refused: dict[WorkerAddress, str] = {}
        self._factories = dict(factories)
        self.topic = LocalTopic(deliver)
        self._hosts: dict[WorkerAddress, LocalHost] = {}
        self._worker_count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._payload: bytes | None = None
        self.epoch = 0
        self.reported = UsageReport()
        self._controller: ActorAddress | None = None
        self._controller_up = asyncio.Event()
        self._replacing: asyncio.Task[None] | None = None
        self._is_ended = False
        self._tasks = TaskSet(logger)

        def end_at(worker: WorkerAddress) -> tuple[ChannelPool, RunState] | None:
            host = self._hosts.get(worker)
            return None if host is None else (host.process.channels, host.process.state)

        latency = latency_s if callable(latency_s) else lambda: latency_s
        self.network = LocalNetwork(end_at, latency, self._tasks.spawn)
        self.program = LocalProcess(self, RunState(self.clock))
        for each in [None] * workers if isinstance(workers, int) else workers:
            self._join(each)

    def __repr__(self) -> str:
        actors = sum(len(host.registry.entries) for host in self._hosts.values())
        return f"<LocalCluster {self.instance} workers={len(self._hosts)} actors={actors} epoch={self.epoch}>"

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the cluster."""
        if self._loop is None:
            raise InstanceError("The local cluster has not been started.")
        return self._loop

    # Lifecycle

    async def start(self, payload: bytes) -> ActorAddress:
        """Start the instance's controller with this start message and return its address.

        Raises
        ------
        AlreadyRunningError
            The instance has been started before.
        InstanceError
            There is no worker for the controller.
        Exception
            The error of the controller's ``start``.
        """
        if self._payload is not None:
            raise AlreadyRunningError(f"Instance {self.instance!r} has been started before.")
        self._loop = asyncio.get_running_loop()
        self._payload = payload
        self.network.records.open()
        await self.store.open()
        await self._start_controller()
        if self._controller is None:
            raise InstanceError(f"The controller of {self.instance!r} could not be started on any worker.")
        return self._controller

    async def drain(self) -> None:
        """Let the requests of the instance complete, before its end."""
        if self._controller is not None:
            await drain(self.instance, partial(self.program.call, self._controller), self.clock)

    async def end(self) -> None:
        """End the instance: notify all listeners and stop all actors, the controller first. Idempotent."""
        if self._is_ended:
            return
        self._is_ended = True
        self._controller = None
        self.topic.publish({"kind": ENDED})
        await asyncio.gather(*(host.stop() for host in self._hosts.values()))

    async def close(self) -> None:
        """End the instance, all connections and all tasks of this object. Idempotent."""
        await self.end()
        await self.program.stop_listening()
        processes = [self.program, *(host.process for host in self._hosts.values())]
        await asyncio.gather(*(process.channels.close() for process in processes))
        await self._tasks.close()
        await self.network.tasks.close()
        self.network.records.close()

    # Workers

    def workers(self) -> list[WorkerInfo]:
        """Return the current workers."""
        return [host.info for host in self._hosts.values()]

    def process(self, worker: WorkerAddress) -> LocalProcess:
        """Return a worker's view of the cluster."""
        return self._hosts[worker].process

    def add_worker(self, info: WorkerInfo | None = None, **changes: Any) -> WorkerInfo:
        """Add a worker and notify the listeners.

        Parameters
        ----------
        info : WorkerInfo, optional
            Default: the next free address, on 127.0.0.1, with 4 threads and 4 GiB.
        **changes
            Fields of ``info`` to change.
        """
        joined = self._join(info, **changes)
        self.topic.publish({"kind": WORKERS, "joined": [_plain_info(joined)], "left": []})
        if self._controller is None:
            self._replace_controller()
        return joined

    def _join(self, info: WorkerInfo | None, **changes: Any) -> WorkerInfo:
        self._worker_count += 1
        if info is None:
            name = f"worker-{self._worker_count}"
            info = WorkerInfo(
                f"local://{name}", "127.0.0.1", 4, 4 << 30, name=name, pid=os.getpid(), is_head=True
            )
        info = replace(info, **changes)
        if info.address in self._hosts:
            raise ValueError(f"There is already a worker {info.address}; choose another address.")
        self._hosts[info.address] = LocalHost(self, info, self._factories)
        return info

    def change_worker(self, worker: WorkerAddress, **changes: Any) -> None:
        """Change worker fields such as ``is_available``.

        As on a real cluster, it sends no notification, except of ``taken_by_tasks``.
        """
        host = self._hosts[worker]
        host.info = replace(host.info, **changes)
        if "taken_by_tasks" in changes:
            taken = {worker: changes["taken_by_tasks"]}
            self.topic.publish({"kind": WORKERS, "joined": [], "left": [], "taken": taken})

    def suspend_worker(self, worker: WorkerAddress, *, is_suspended: bool = True) -> None:
        """Suspend a worker's process at any point, as SIGSTOP does, or resume it.

        While suspended, it neither sends nor receives messages, and its timers do not fire. Code that does
        not use the clock of its `ActorContext` for delays is not suspended.
        """
        state = self._hosts[worker].process.state
        state.suspend() if is_suspended else state.resume()

    def retire_worker(self, worker: WorkerAddress) -> None:
        """Announce that a worker will leave, so that its replicas move; call `remove_worker` afterwards.

        A controller on this worker is replaced on another worker and then stopped.
        """

        async def end(old: ActorAddress) -> None:
            await self._controller_up.wait()
            await self.program.destroy(old, 0)

        self.change_worker(worker, is_retiring=True, is_available=False)
        self.topic.publish({"kind": WORKERS, "joined": [], "left": [], "retiring": [worker]})
        old = self._controller
        if old is not None and old.worker == worker:
            self._controller = None
            self._controller_up.clear()
            self._replace_controller()
            self.spawn(end(old))

    def remove_worker(self, worker: WorkerAddress) -> None:
        """Kill a worker with its actors, notify the listeners, and replace the controller if it was there.

        The actors' ``stop(0)`` runs to free their resources in this process; it has no visible effect.
        """
        host = self._hosts.pop(worker)
        host.process.kill()
        self.spawn(host.stop())
        self.topic.publish({"kind": WORKERS, "joined": [], "left": [worker]})
        if self._controller is not None and self._controller.worker == worker:
            self._controller = None
            self._controller_up.clear()
            self._replace_controller()

    # Actors

    def actors(self) -> list[ActorAddress]:
        """Return the addresses of all actors, ready or not."""
        return [
            ActorAddress(entry.spec.name, host.info.address, entry.spec.incarnation)
            for host in self._hosts.values()
            for entry in host.registry.entries.values()
        ]

    def actor(self, address: ActorAddress) -> HostedActor:
        """Return the actor itself.

        Raises
        ------
        ActorLostError, UnavailableError
            There is no such actor, or it is still starting.
        """
        host = self._hosts.get(address.worker)
        if host is None:
            raise ActorLostError(f"Worker {address.worker} cannot be reached.", begun=False)
        return host.registry.ready_actor(address.name, address.incarnation)

    async def find_controller(self) -> ActorAddress:
        """Return the controller's address; wait briefly if it is being replaced."""
        if self._payload is None or self._is_ended:
            raise NotRunningError(f"Instance {self.instance!r} does not run on this cluster.")
        if self._controller is None:
            try:
                await self.clock.wait_for(self._controller_up.wait(), CONTROLLER_PATIENCE_S)
            except TimeoutError:
                pass
        if self._controller is None:
            raise UnavailableError(f"The controller of {self.instance!r} is being replaced; try again.")
        return self._controller

    def _replace_controller(self) -> None:
        if self._payload is not None and (self._replacing is None or self._replacing.done()):
            self._replacing = self.spawn(self._keep_starting())

    async def _keep_starting(self) -> None:
        while self._hosts and self._controller is None and not self._is_ended:
            try:
                await self._start_controller()
            except Exception as error:
                # The cause may be temporary, such as a store that cannot be reached.
                logger.warning("The controller did not start: %r", error)
            if self._controller is None:
                await self.clock.sleep(START_RETRY_S)

    async def _start_controller(self) -> None:
        tried: set[WorkerAddress] = set()
        while self._controller is None and not self._is_ended:
            candidates = [
                info for info in self.workers() if info.address not in tried and not info.is_retiring
            ]
            if not candidates:
                return
            worker = max(candidates, key=lambda info: (info.is_available, info.is_head, info.address)).address
            tried.add(worker)
            self.epoch += 1  # first, so that the older controller is fenced even if the store fails
            self.epoch = await self.store.claim_epoch()
            assert self._payload is not None
            spec = ActorSpec(
                ActorKind.CONTROLLER, f"{self.instance}/controller", self.epoch, self.instance, self._payload
            )
            try:
                await self.program.create(spec, worker)
            except ActorLostError as error:
                logger.warning("The controller did not start on %s: %s", worker, error)
                continue
            if worker in self._hosts:
                self._controller = ActorAddress(spec.name, worker, spec.incarnation)
                self._controller_up.set()
                self.topic.publish({"kind": CONTROLLER, **asdict(self._controller)})

    # Called by the processes

    async def inspect(
        self, worker: WorkerAddress, metrics_of: Collection[str]
    ) -> Sequence[Mapping[str, Any]]:
        """Return the actors on a worker, as the scheduler does on a real cluster."""
        host = self._hosts.get(worker)
        if host is None:
            raise ActorLostError(f"Worker {worker} has left the cluster.", begun=False)
        await host.process.state.wait_until_running()
        return await host.registry.actors(self.instance, metrics_of)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine without waiting for it; `close` cancels it."""
        return self._tasks.spawn(coroutine)


def _plain_info(info: WorkerInfo) -> dict[str, Any]:
    return {**asdict(info), "resources": dict(info.resources)}
