"""A cluster in one process and on one event loop, for tests, simulations and trying things out.

`LocalCluster` keeps some pretend workers and does for one instance what the supervisor does on a real Dask
cluster: it holds the store and the topic, starts the controller, and starts a new one with a newer epoch when
the worker of the last one is lost. Every pretend worker is a `LocalProcess`: its own view of the cluster,
with its own listener, routers and actors, behind the `daskserve.cluster.base.Cluster` protocol that
`daskserve.cluster.dask` answers too. The layers above cannot tell the difference.

Requests between processes run over real channels with a transport in memory; those within one take the same
paths as in a real worker. The topic loses, delays and reorders messages if told to. Time is the loop's, so
everything also runs on `daskserve.testing.VirtualTimeLoop`. A worker that is removed is dead at once: whoever
waits for one of its actors gets `ActorLostError`, and what still runs of its code can neither write nor
publish nor call; it waits until it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self, TypeVar

from daskserve.clock import Clock, LoopClock
from daskserve.cluster.actor_book import ActorBook
from daskserve.cluster.base import (
    ActorContext,
    ActorFactory,
    ActorSpec,
    Hosted,
    InstanceStore,
    UseReport,
)
from daskserve.cluster.channel.transport import Transport
from daskserve.cluster.local.process import LocalProcess
from daskserve.cluster.local.run_state import RunState
from daskserve.cluster.local.topic import Deliver, LocalTopic, deliver_at_once
from daskserve.cluster.local.transport import WhenAwake, connect
from daskserve.cluster.local.world import LocalWorld
from daskserve.cluster.long_poll import CONTROLLER, ENDED, WORKERS
from daskserve.cluster.store.opening import MemoryStore
from daskserve.errors import (
    ActorLostError,
    AlreadyRunningError,
    InstanceError,
    NotRunningError,
    UnavailableError,
)
from daskserve.loops.tasks import TaskSet
from daskserve.types import ActorAddress, ActorKind, InstanceName, WorkerAddress, WorkerInfo

logger = logging.getLogger("daskserve.local")

T = TypeVar("T")


#: Who asks for the controller while it is being replaced waits this long, as at the supervisor.
CONTROLLER_PATIENCE_S = 0.5
#: Pause after the controller could not be started on any worker.
START_RETRY_S = 0.5


class LocalHost:
    """One pretend worker: its view of the cluster and its actors."""

    def __init__(
        self, world: LocalWorld, info: WorkerInfo, factories: Mapping[ActorKind, ActorFactory]
    ) -> None:
        def make(spec: ActorSpec) -> Hosted:
            process = self.process
            return factories[spec.kind](
                ActorContext(spec, process, process.clock, world.rng, info.address, process.link.landing)
            )

        state = RunState(world.clock)
        self.info = info
        self.book = ActorBook(info.address, info.pid, state.clock, make)
        self.process = LocalProcess(world, state, self.book)

    async def stop(self) -> None:
        """Stop all actors and listen no more."""
        await self.book.end_instance(self.process.instance)
        await self.process.stop_listening()


class LocalCluster:
    """Some pretend workers, and one instance on them.

    Parameters
    ----------
    factories : mapping
        What makes the actors of each kind; the real ones are in `daskserve.actors`.
    workers : int or sequence of WorkerInfo
        The workers to begin with; a number makes that many of 4 threads each.
    store : InstanceStore, optional
        Where the instance's records are; default: a `MemoryStore`. It is opened by `start`, closed by nobody.
    deliver : callable, optional
        How the topic delivers, see `Deliver`.
    latency_s : float or callable
        How long anything takes to get from one process to another; a callable is asked each time.

    Attributes
    ----------
    program : LocalProcess
        The view of a program outside the workers, such as a test.
    topic : LocalTopic
        What the listeners hear; set ``topic.deliver`` to change how from then on.
    reported : UseReport
        What the controller told the scheduler last.
    is_adaptive : bool
        What the controller is told about the cluster when it reports.
    epoch : int
        That of the newest controller, running or being started.
    refused : dict
        What `Cluster.refused_workers` answers.

    Examples
    --------
    A controller with its state, on two workers, and a call to it::

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
        self._latency_s = latency_s if callable(latency_s) else lambda: latency_s
        self.topic = LocalTopic(deliver)
        self._hosts: dict[WorkerAddress, LocalHost] = {}
        self._worker_count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._payload: bytes | None = None
        self.epoch = 0
        self.reported = UseReport()
        self._controller: ActorAddress | None = None
        self._controller_up = asyncio.Event()
        self._replacing: asyncio.Task[None] | None = None
        self._is_ended = False
        self._tasks = TaskSet(logger)
        self.program = LocalProcess(self, RunState(self.clock))
        for each in [None] * workers if isinstance(workers, int) else workers:
            self._join(each)

    def __repr__(self) -> str:
        actors = sum(len(host.book.entries) for host in self._hosts.values())
        return f"<LocalCluster {self.instance} workers={len(self._hosts)} actors={actors} epoch={self.epoch}>"

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that all of this runs on."""
        if self._loop is None:
            raise InstanceError("The local cluster has not been started.")
        return self._loop

    # Lifecycle

    async def start(self, payload: bytes) -> ActorAddress:
        """Start the instance's controller with this start message and return where it lives.

        Raises
        ------
        AlreadyRunningError
            It has been started before.
        InstanceError
            There is no worker for it.
        Exception
            What the controller's ``start`` raised.
        """
        if self._payload is not None:
            raise AlreadyRunningError(f"Instance {self.instance!r} has been started before.")
        self._loop = asyncio.get_running_loop()
        self._payload = payload
        await self.store.open()
        await self._start_controller()
        if self._controller is None:
            raise InstanceError(f"The controller of {self.instance!r} could not be started on any worker.")
        return self._controller

    async def end(self) -> None:
        """End the instance: all listeners are told, all actors stopped, the controller first. Idempotent."""
        if self._is_ended:
            return
        self._is_ended = True
        self._controller = None
        self.topic.publish({"kind": ENDED})
        await asyncio.gather(*(host.stop() for host in self._hosts.values()))

    async def close(self) -> None:
        """End the instance and whatever this object has running. Idempotent."""
        await self.end()
        await self.program.stop_listening()
        processes = [self.program, *(host.process for host in self._hosts.values())]
        await asyncio.gather(*(process.channels.close() for process in processes))
        await self._tasks.close()

    # Workers

    def workers(self) -> list[WorkerInfo]:
        """Return the workers that are there now."""
        return [host.info for host in self._hosts.values()]

    def process(self, worker: WorkerAddress) -> LocalProcess:
        """Return a worker's view of the cluster."""
        return self._hosts[worker].process

    def add_worker(self, info: WorkerInfo | None = None, **changes: Any) -> WorkerInfo:
        """Let a worker join and tell the listeners.

        Parameters
        ----------
        info : WorkerInfo, optional
            Default: the next free address, on 127.0.0.1, with 4 threads and 4 GiB.
        **changes
            Fields in which the worker differs from that.
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
            raise ValueError(f"a worker {info.address} is there already")
        self._hosts[info.address] = LocalHost(self, info, self._factories)
        return info

    def change_worker(self, worker: WorkerAddress, **changes: Any) -> None:
        """Change fields of a worker, such as ``is_available``; nobody is told, as on a real cluster."""
        host = self._hosts[worker]
        host.info = replace(host.info, **changes)

    def suspend_worker(self, worker: WorkerAddress, *, is_suspended: bool = True) -> None:
        """Stop a worker's process in the middle of whatever it does, as SIGSTOP does, or let it go on.

        It answers nobody, hears and says nothing, and nothing falls due in it until it goes on. Only code
        that waits for time by itself, not by the clock of its `ActorContext`, cannot be held up.
        """
        state = self._hosts[worker].process.state
        state.suspend() if is_suspended else state.resume()

    def retire_worker(self, worker: WorkerAddress) -> None:
        """Announce that a worker is to leave, so that what it holds moves; then `remove_worker` it.

        A controller that lives there is replaced elsewhere and then ended.
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
        """Kill a worker with all its actors, tell the listeners, and replace the controller if it was there.

        The actors get a ``stop(0)`` to free what they hold in this process; nobody sees what they do.
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
        """Return where the actors are that have been made, ready or not."""
        return [
            ActorAddress(entry.spec.name, host.info.address, entry.spec.incarnation)
            for host in self._hosts.values()
            for entry in host.book.entries.values()
        ]

    def actor(self, address: ActorAddress) -> Hosted:
        """Return the actor itself.

        Raises
        ------
        ActorLostError, UnavailableError
            It is not there; it is still starting.
        """
        host = self._hosts.get(address.worker)
        if host is None:
            raise ActorLostError(f"Worker {address.worker} cannot be reached.", begun=False)
        return host.book.ready_actor(address.name, address.incarnation)

    async def find_controller(self) -> ActorAddress:
        """Return where the controller lives; wait a moment if it is being replaced."""
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
                # Whatever keeps it from starting, such as a store that cannot be reached, may pass.
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
            self.epoch += 1  # at once, so that an older controller is fenced whatever the store does
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

    # What the processes use

    def connect(self, caller: str, when_awake: WhenAwake, worker: WorkerAddress) -> Transport:
        """Return one end of a new connection to a worker; `OSError` if it is not there."""
        host = self._hosts.get(worker)
        if host is None:
            raise OSError("there is no such worker")
        process = host.process
        ours, theirs = connect((caller, when_awake), (worker, process.state.when_awake), self._latency_s)
        self.spawn(process.channels.serve(theirs))
        return ours

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine without waiting for it; `close` ends it."""
        return self._tasks.spawn(coroutine)


def _plain_info(info: WorkerInfo) -> dict[str, Any]:
    return {**asdict(info), "resources": dict(info.resources)}
