"""The in-process cluster in virtual time, with faults and the real supervisor of controllers.

`SimulatedCluster` is a `LocalCluster` whose controllers are started, checked and replaced by the scheduler's
own code (`daskserve.cluster.scheduler.controllers.ControllerSupervisor`). It takes the place of its registry
of Hosts. `SimulatedStore` can be slow or unreachable, can lose answers, and can harm the controller
right after the n-th commit, before the controller acts on it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from daskserve.cluster.local.cluster import LocalCluster
from daskserve.cluster.long_poll import WORKERS
from daskserve.cluster.protocols.base import StoreChange
from daskserve.cluster.scheduler.controllers import ControllerSupervisor, Instance
from daskserve.cluster.scheduler.records import check_epoch
from daskserve.cluster.store.opening import MemoryStore, StoreUnavailableError
from daskserve.common.clock import LoopClock
from daskserve.common.types import ActorAddress, ActorKind, WorkerAddress, WorkerInfo
from daskserve.errors import InstanceError

#: How long a retiring worker waits until its actors are replaced elsewhere, as with the supervisor.
EVACUATION_S = 60.0
#: Largest delay of late updates.
LATE_S = 3.0
#: The time at which every simulation begins, in seconds since the epoch.
BEGAN_AT = 1_700_000_000.0


class VirtualClock(LoopClock):
    """The clock of the running loop, whose wall time is also virtual, because some deadlines use it."""

    def wall(self) -> float:
        return BEGAN_AT + self.now()


class CommitWitness(Protocol):
    """Receives every committed change."""

    def committed(self, epoch: int, newest_epoch: int, change: Mapping[str, bytes | None]) -> None: ...


class SimulatedStore(MemoryStore):
    """A memory store with the faults of real ones.

    Attributes
    ----------
    delay_s : callable
        Returns the latency of one message to or from the store.
    unreachable_until : float
        Time until which the store is unreachable.
    lost_answers : int
        Number of further commits that are written but reported as failed.
    after_commit : callable or None
        Called once, with the epoch, after ``commits_left`` more commits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.witness: CommitWitness | None = None
        self.delay_s: Callable[[], float] = lambda: 0.0
        self.unreachable_until = 0.0
        self.lost_answers = 0
        self.after_commit: Callable[[int], None] | None = None
        self.commits_left = 0
        self.commits = 0

    async def _travel(self) -> None:
        delay_s = self.delay_s()
        if delay_s:
            await asyncio.sleep(delay_s)

    async def _reach(self) -> None:
        await self._travel()
        if asyncio.get_running_loop().time() < self.unreachable_until:
            raise StoreUnavailableError("The store cannot be reached.")

    async def load(self) -> Mapping[str, bytes]:
        await self._reach()
        records = await super().load()
        await self._travel()
        return records

    async def claim_epoch(self) -> int:
        await self._reach()
        return await super().claim_epoch()

    async def commit(self, epoch: int, change: StoreChange) -> None:
        # A commit that was sent is written even if its sender is cancelled.
        await asyncio.shield(asyncio.create_task(self._commit(epoch, change)))
        await self._travel()

    async def _commit(self, epoch: int, change: StoreChange) -> None:
        await self._reach()
        await super().commit(epoch, change)
        self.commits += 1
        if self.witness is not None:
            self.witness.committed(epoch, self._epoch, change.records)
        if self.after_commit is not None:
            self.commits_left -= 1
            if self.commits_left <= 0:
                happen, self.after_commit = self.after_commit, None
                happen(epoch)
        if self.lost_answers:
            self.lost_answers -= 1
            raise StoreUnavailableError("The connection to the store was lost before the answer.")


def delivery(kind: str, rng: random.Random) -> Callable[[Any], Iterable[float]]:
    """Return the topic's delivery: ``good``, ``lossy``, ``late``, ``doubled`` or ``shuffled``."""

    def deliver(message: Any) -> Iterable[float]:
        if kind == "lossy":
            return [] if rng.random() < 0.4 else [0.0]
        if kind == "late":
            return [rng.random() * LATE_S]
        if kind == "doubled":
            return [0.0, rng.random()]
        if kind == "shuffled":
            return [rng.random() * 0.05]
        return [0.0]

    return deliver


class SimulatedCluster(LocalCluster):
    """See the module. ``store`` is the `SimulatedStore`; the rest is as in `LocalCluster`."""

    def __init__(self, factories: Mapping[ActorKind, Any], *, store: SimulatedStore, **options: Any) -> None:
        self.entry = Instance("local", None, False, 0.0, b"", store)
        self.controllers = ControllerSupervisor(
            self,  # type: ignore[arg-type]
            {"local": self.entry},
            publish=lambda _, message: self.topic.publish(dict(message)),
            spawn=self.spawn,
        )
        self.suspects: set[WorkerAddress] = set()
        self.has_nannies = True
        #: Called with a description when a worker retires although its proxy has not ended.
        self.on_cut: Callable[[str], None] = lambda text: None
        super().__init__(factories, store=store, clock=VirtualClock(), **options)

    # State that the supervisor holds instead of `LocalCluster`.

    @property
    def epoch(self) -> int:
        return self.entry.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.entry.epoch = epoch

    @property
    def _controller(self) -> ActorAddress | None:
        return self.entry.controller

    @_controller.setter
    def _controller(self, address: None) -> None:
        if self.entry.controller is not None:
            self.controllers.mark_lost(self.entry)

    @property
    def _controller_up(self) -> asyncio.Event:
        return self.entry.controller_up

    @_controller_up.setter
    def _controller_up(self, event: asyncio.Event) -> None:
        self.entry.controller_up = event

    async def start(self, payload: bytes) -> ActorAddress:
        self.entry.payload = payload
        controller = await super().start(payload)
        self.spawn(self.controllers.watch())
        return controller

    async def end(self) -> None:
        self.entry.is_ending = True
        await super().end()

    async def _start_controller(self) -> None:
        await self.controllers.start(self.entry)

    def _replace_controller(self) -> None:
        if self._payload is not None and not self.entry.is_ending:
            self.spawn(self.controllers.start(self.entry))

    # The interface of Hosts that the supervisor uses

    def has(self, worker: WorkerAddress) -> bool:
        return worker in self._hosts

    def infos(self, *of: WorkerAddress) -> list[dict[str, Any]]:
        return [
            {**asdict(info), "resources": dict(info.resources)}
            for info in self.workers()
            if not of or info.address in of
        ]

    async def call(self, address: ActorAddress, verb: str, **message: Any) -> Any:
        return await self.program.call(address, verb, **message)

    # Workers

    def workers(self) -> list[WorkerInfo]:
        return [
            replace(info, is_available=False) if info.address in self.suspects else info
            for info in super().workers()
        ]

    def _join(self, info: WorkerInfo | None, **changes: Any) -> WorkerInfo:
        joined = super()._join(info, **changes)
        self._hosts[joined.address].process.restart_worker = self._restart  # type: ignore[method-assign]
        return joined

    async def _restart(self, epoch: int, worker: WorkerAddress) -> None:
        check_epoch(self.entry, epoch)
        if not self.has_nannies:
            raise InstanceError(f"Worker {worker} has no nanny that could restart it.")
        host = self._hosts.get(worker)
        if host is not None:
            self.remove_worker(worker)
            self.spawn(self._come_back(host.info))

    async def _come_back(self, info: WorkerInfo) -> None:
        await self.clock.sleep(0.5)
        if not self._is_ended:
            changes = {"host": info.host, "is_head": info.is_head, "threads": info.threads}
            self.add_worker(resources=info.resources, **changes)

    def remove_worker(self, worker: WorkerAddress) -> None:
        self.suspects.discard(worker)
        super().remove_worker(worker)

    def retire_worker(self, worker: WorkerAddress) -> None:
        """Retire a worker gracefully: its actors move, then it leaves."""
        self.change_worker(worker, is_retiring=True, is_available=False)
        self.topic.publish({"kind": WORKERS, "joined": [], "left": [], "retiring": [worker]})
        self.spawn(self._evacuate(worker))

    async def _evacuate(self, worker: WorkerAddress) -> None:
        if self.entry.controller is not None and self.entry.controller.worker == worker:
            await self.controllers.replace(self.entry, {worker})
        deadline = self.clock.now() + EVACUATION_S
        # As in the supervisor: an instance has left when it knows of the retirement and has no actor there.
        while self.clock.now() < deadline and (
            worker in self.reported.in_use or worker not in self.reported.retiring
        ):
            await self.clock.sleep(0.25)
        if self.has(worker) and not self._is_ended:
            for actor in self.actors():
                is_proxy = actor.worker == worker and "/proxy/" in actor.name
                if is_proxy and self.entry_is_ready(actor) and self.clock.now() < deadline:
                    self.on_cut(f"worker {worker} retires with {actor}")
            self.remove_worker(worker)

    def is_suspended(self, worker: WorkerAddress) -> bool:
        return not self._hosts[worker].process.state.is_running

    def break_connections(self, worker: WorkerAddress) -> None:
        """Break all connections of a worker."""
        self._hosts[worker].process.channels.abort()

    def drop_actor(self, address: ActorAddress) -> None:
        """Remove an actor from its worker silently."""
        self._hosts[address.worker].registry.entries.pop(address.name, None)

    def entry_is_ready(self, address: ActorAddress) -> bool:
        host = self._hosts.get(address.worker)
        entry = None if host is None else host.registry.entries.get(address.name)
        return entry is not None and entry.spec.incarnation == address.incarnation and entry.is_ready
