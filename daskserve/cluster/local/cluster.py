"""A cluster in one process and on one event loop, for tests, simulations and trying things out.

`LocalCluster` keeps some pretend workers and does for one instance what the supervisor does on a real Dask
cluster: it holds the store and the topic, starts the controller, and starts a new one with a newer epoch when
the worker of the last one is lost. Every pretend worker is a `LocalProcess`: its own view of the cluster,
with its own listener, routers and actors, behind the `daskserve.cluster.base.Cluster` protocol that
`daskserve.cluster.dask` answers too. The layers above cannot tell the difference.

What differs on purpose: plain values are copied as Dask would copy them (a list arrives as a tuple, and what
msgpack cannot pack is refused), errors are pickled, but request streams are handed over as they are. The
topic loses, delays and reorders messages if told to. Time is the loop's, so everything also runs on
`daskserve.testing.VirtualTimeLoop`. A worker that is removed is dead at once: whoever waits for one of its
actors gets `ActorLostError`, and what still runs of its code can neither write nor publish nor call; it waits
until it is cancelled.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import os
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self, TypeVar

from daskserve.clock import Clock, LoopClock
from daskserve.cluster.base import (
    ActorContext,
    ActorFactory,
    ActorSpec,
    Hosted,
    InstanceStore,
    TopicHandler,
    UseReport,
)
from daskserve.cluster.local.process import LocalHost, LocalProcess, plain_copy
from daskserve.cluster.long_poll import CONTROLLER, ENDED, WORKERS
from daskserve.cluster.store.opening import MemoryStore
from daskserve.errors import (
    ActorLostError,
    AlreadyRunningError,
    InstanceError,
    NotRunningError,
    UnavailableError,
)
from daskserve.types import ActorAddress, ActorKind, InstanceName, WorkerAddress, WorkerInfo

logger = logging.getLogger("daskserve.local")

T = TypeVar("T")

#: Who asks for the controller while it is being replaced waits this long, as at the supervisor.
CONTROLLER_PATIENCE_S = 0.5
#: Pause after the controller could not be started on any worker.
CONTROLLER_RETRY_S = 0.5

#: Says after how many seconds a message of the topic reaches one listener. No number: it is lost; several: it
#: comes that often.
Deliver = Callable[[Any], Iterable[float]]


def deliver_at_once(message: Any) -> Iterable[float]:
    """Deliver every message once, in order, as soon as the loop turns."""
    return (0.0,)


class LocalTopic:
    """Publish and subscribe. Messages due at the same time arrive in the order they were published in.

    Attributes
    ----------
    deliver : callable
        How messages published from now on are delivered, see `Deliver`.
    """

    def __init__(self, deliver: Deliver) -> None:
        self.deliver = deliver
        self._handlers: dict[int, TopicHandler] = {}
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, int, Any]] = []

    def subscribe(self, handler: TopicHandler) -> Callable[[], None]:
        """Hear every message from now on; returns what ends it."""
        number = next(self._numbers)
        self._handlers[number] = handler

        def unsubscribe() -> None:
            self._handlers.pop(number, None)

        return unsubscribe

    def publish(self, message: Any) -> None:
        """Send plain values to every listener there is now."""
        message = plain_copy(message)
        loop = asyncio.get_running_loop()
        for number in self._handlers:
            for delay_s in self.deliver(message):
                # Timers due at one time fire in no order, so each takes whatever is first by our own.
                heapq.heappush(self._due, (loop.time() + delay_s, next(self._numbers), number, message))
                if delay_s > 0:
                    loop.call_later(delay_s, self._deliver_next)
                else:
                    loop.call_soon(self._deliver_next)

    def _deliver_next(self) -> None:
        _, _, number, message = heapq.heappop(self._due)
        if number in self._handlers:
            self._handlers[number](plain_copy(message))


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
            controller = await cluster.start(ControllerStart(http={"location": "NoServer"}).encode())
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
        self._tasks: set[asyncio.Task[None]] = set()
        self.program = LocalProcess(self, None)
        for each in [None] * workers if isinstance(workers, int) else workers:
            self._join(each)

    def __repr__(self) -> str:
        actors = sum(len(host.entries) for host in self._hosts.values())
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
        await asyncio.gather(*(host.bury() for host in self._hosts.values()))

    async def close(self) -> None:
        """End the instance and whatever this object has running. Idempotent."""
        await self.end()
        await self.program.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        process = LocalProcess(self, info.address)
        self._hosts[info.address] = LocalHost(info, process, self._make_actor)
        return info

    def _make_actor(self, spec: ActorSpec, host: LocalHost) -> Hosted:
        context = ActorContext(spec, host.process, host.process.clock, self.rng, host.info.address)
        return self._factories[spec.kind](context)

    def change_worker(self, worker: WorkerAddress, **changes: Any) -> None:
        """Change fields of a worker, such as ``is_available``; nobody is told, as on a real cluster."""
        host = self._hosts[worker]
        host.info = replace(host.info, **changes)

    def suspend_worker(self, worker: WorkerAddress, *, is_suspended: bool = True) -> None:
        """Stop a worker's process in the middle of whatever it does, as SIGSTOP does, or let it go on.

        It answers nobody, hears and says nothing, and nothing falls due in it until it goes on. Only code
        that waits for time by itself, not by the clock of its `ActorContext`, cannot be held up.
        """
        process = self._hosts[worker].process
        process.suspend() if is_suspended else process.resume()

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
        host.kill()
        self.spawn(host.bury())
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
            for entry in host.entries.values()
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
        return host.ready_actor(address)

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
                await self.clock.sleep(CONTROLLER_RETRY_S)

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

    async def run_on(
        self,
        caller: LocalProcess,
        worker: WorkerAddress,
        work: Callable[[LocalHost], Coroutine[Any, Any, T]],
    ) -> T:
        """Do something on a worker for a process: directly in its own, else from process to process.

        Raises
        ------
        ActorLostError
            The worker is not there (``begun`` is False), or was lost before it was done.
        """
        await caller.breathe()
        if worker == caller.worker:
            return await work(self._hosts[worker])
        await self.clock.sleep(self._latency_s())
        host = self._hosts.get(worker)
        if host is None or not host.process.is_alive:
            raise ActorLostError(f"Worker {worker} cannot be reached.", begun=False)
        try:
            result = await host.carry(lambda: work(host), caller)
        except Exception:
            await caller.breathe()
            raise
        await self.clock.sleep(self._latency_s())
        await caller.breathe()
        return result

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine without waiting for it; `close` ends it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _plain_info(info: WorkerInfo) -> dict[str, Any]:
    return {**asdict(info), "resources": dict(info.resources)}
