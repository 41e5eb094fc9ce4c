"""A simulated process of a `daskserve.cluster.local.cluster.LocalCluster`.

The layers above use a `LocalProcess` as they use a `daskserve.cluster.dask.cluster.DaskCluster`. It calls
actors through the same `daskserve.cluster.actors.calls.ProcessView`, over channels whose transport is in
memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from daskserve.cluster.actors.calls import ProcessView, close_shared
from daskserve.cluster.actors.registry import ActorRegistry
from daskserve.cluster.channel.pool import ChannelPool, refuse_requests
from daskserve.cluster.channel.wire.transport import Transport
from daskserve.cluster.local.connection import LocalConnection
from daskserve.cluster.local.run_state import RunState
from daskserve.cluster.local.topic import plain_copy
from daskserve.cluster.local.world import LocalWorld
from daskserve.cluster.protocols.base import Store, StoreChange, TopicHandler
from daskserve.cluster.protocols.stores import StoreOwnership
from daskserve.cluster.protocols.usage import UsageReport
from daskserve.common.types import (
    ActorAddress,
    ActorRequest,
    Envelope,
    Load,
    OnAnswer,
    Receive,
    Send,
    WorkerAddress,
    WorkerInfo,
)
from daskserve.errors import InstanceError, StaleEpochError
from daskserve.payload.parcels import Parcel
from daskserve.telemetry.tracing.process import disable

#: Longest pause between two attempts to connect to a worker directly.
RETRY_DIRECT_S = 30.0


class LocalProcess(ProcessView):
    """One simulated process's view of a `LocalCluster`: a `daskserve.cluster.protocols.base.Process`.

    Parameters
    ----------
    state : RunState
        Whether the process runs.
    registry : ActorRegistry, optional
        The actors of a simulated worker; None for the user's program.

    Attributes
    ----------
    clock : Clock
        The cluster's clock, except that no timer fires while the process is suspended.
    shared : dict
        Objects that the layers above keep once per process.
    connection : LocalConnection
        The connection for handles and clients.
    channels : ChannelPool
        The connections to other processes.
    """

    def __init__(self, world: LocalWorld, state: RunState, registry: ActorRegistry | None = None) -> None:
        self.state = state
        self.connection = LocalConnection(world, self)
        self.store: Store = _ProcessStore(world, state)
        self.tasks = _ProcessTasks(world, state)
        self._world = world
        here = "program" if registry is None else registry.worker

        async def dial(worker: WorkerAddress, *, directly: bool = False) -> Transport:
            return world.network.connect(here, state.when_awake, worker, directly=directly)

        self.channels = ChannelPool(
            refuse_requests if registry is None else registry.dispatch,
            dial,
            kept=None if registry is None else registry.kept,
            connect_directly=partial(dial, directly=True),
            retry_direct_s=RETRY_DIRECT_S,
        )
        super().__init__(world.instance, self.channels, registry, state.clock)
        self._subscriptions: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<LocalProcess {self.here or 'program'} of {self.instance} {self.state!r}>"

    def kill(self) -> None:
        """Kill the process: end its subscriptions and connections."""
        self.state.kill()
        disable(self.shared)
        self.routes.close()
        for unsubscribe in self._subscriptions:
            unsubscribe()
        self.channels.abort()

    async def stop_listening(self) -> None:
        """Stop the long-poll client, if there is one."""
        self.routes.close()
        close_shared(self)
        if self._listener is not None:
            await self._listener.stop()

    async def workers(self) -> Sequence[WorkerInfo]:
        await self.state.wait_until_running()
        return self._world.workers()

    async def refused_workers(self) -> Mapping[WorkerAddress, str]:
        await self.state.wait_until_running()
        return dict(self._world.refused)

    async def call(self, address: ActorAddress, verb: str, **message: Any) -> Any:
        # Copied even within a process, so that values that a channel cannot carry also raise an error here.
        return plain_copy(await super().call(address, verb, **plain_copy(message)))

    def request(self, address: ActorAddress, envelope: Envelope) -> ActorRequest:
        return _LocalRequest(self.state, partial(super().request, address, envelope))

    def handler_of(self, address: ActorAddress) -> Callable[[Envelope], ActorRequest]:
        handle = super().handler_of(address)
        return lambda envelope: _LocalRequest(self.state, partial(handle, envelope))

    async def inspect(
        self, worker: WorkerAddress, *, metrics_of: Collection[str] = (), by_scheduler: bool = False
    ) -> Sequence[Mapping[str, Any]]:
        if by_scheduler:
            await self.state.wait_until_running()
            return list(plain_copy(await self._world.inspect(worker, metrics_of)))
        return await super().inspect(worker, metrics_of=metrics_of)

    async def report(self, epoch: int, report: UsageReport) -> bool:
        await self.state.wait_until_running()
        if epoch == self._world.epoch:
            self._world.reported = report
        return self._world.is_adaptive

    async def restart_worker(self, epoch: int, worker: WorkerAddress) -> None:
        await self.state.wait_until_running()
        self._world.remove_worker(worker)

    async def send_parcel(self, parcel: Parcel, parts: Sequence[Any]) -> None:
        await self.state.wait_until_running()
        self._world.network.parcels[parcel.digest] = [bytes(each) for each in parts]

    async def fetch_parcel(self, code: str, parcel: Parcel) -> Sequence[Any]:
        await self.state.wait_until_running()
        return self._world.network.parcels[parcel.digest]

    async def controller(self) -> ActorAddress:
        await self.state.wait_until_running()
        return await self._world.find_controller()

    def forget_controller(self) -> None:
        """Do nothing: every call looks up the controller."""

    def publish(self, message: Any) -> None:
        if not self.here:
            raise InstanceError("Only actors publish on an instance's topic.")
        if self.state.is_alive:
            self.state.when_awake(self._world.topic.publish, message)

    async def subscribe(self, handler: TopicHandler) -> Callable[[], Awaitable[None]]:
        await self.state.wait_until_running()
        end = self._world.topic.subscribe(lambda message: self.state.when_awake(handler, message))
        self._subscriptions.append(end)

        async def unsubscribe() -> None:
            end()

        return unsubscribe


class _LocalRequest:
    """A request sent by a simulated process. While the process is suspended, the request neither starts nor
    completes."""

    def __init__(self, state: RunState, make: Callable[[], ActorRequest]) -> None:
        self._state = state
        self._make = make

    def start(self, on_answer: OnAnswer) -> Callable[[], None] | None:
        return self._make().start(on_answer) if self._state.is_running else None

    async def respond(self, receive: Receive, send: Send) -> Load:
        await self._state.wait_until_running()
        try:
            load = await self._make().respond(receive, send)
        except Exception:
            await self._state.wait_until_running()
            raise
        await self._state.wait_until_running()
        return load


class _ProcessTasks:
    """One process's access to the instance's queues of tasks."""

    def __init__(self, world: LocalWorld, state: RunState) -> None:
        self._world, self._state = world, state

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        await self._state.wait_until_running()
        found = await self._world.network.tasks.call(method, plain_copy(arguments))
        await self._state.wait_until_running()
        return plain_copy(found)


class _ProcessStore:
    """One process's access to the instance's store, fenced by epoch and by the death of the process."""

    def __init__(self, world: LocalWorld, state: RunState) -> None:
        self._world = world
        self._state = state

    async def load(self) -> Mapping[str, bytes]:
        await self._state.wait_until_running()
        records = await self._world.store.load()
        await self._state.wait_until_running()
        return records

    def problems(self) -> Mapping[str, str]:
        return self._world.store.problems()

    @property
    def ownership(self) -> StoreOwnership:
        return self._world.store.ownership

    def learn(self, condition: Mapping[str, Any]) -> None:
        """Do nothing; this process uses the store directly."""

    async def take_over(
        self, epoch: int, *, is_complete: bool, own: Sequence[str]
    ) -> Mapping[str, bytes | None] | None:
        await self._state.wait_until_running()
        return await self._world.store.take_over(epoch, is_complete=is_complete, own=own)

    async def commit(self, epoch: int, change: StoreChange) -> None:
        await self._state.wait_until_running()
        if epoch < self._world.epoch:
            # The store would reject it only after the new controller's first write.
            raise StaleEpochError(f"Controller epoch {epoch} was replaced by {self._world.epoch}.")
        await self._world.store.commit(epoch, change)
        await self._state.wait_until_running()

    async def rewrite(self, epoch: int, change: StoreChange, unreadable: Sequence[str] = ()) -> None:
        await self._state.wait_until_running()
        await self._world.store.rewrite(epoch, change, unreadable)
