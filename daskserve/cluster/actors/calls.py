"""Calls to actors: directly if the actor is in this process's `ActorRegistry`, otherwise over channels.

`daskserve.cluster.dask.cluster.DaskCluster` and `daskserve.cluster.local.process.LocalProcess` share
`ProcessView`, so the in-process cluster takes the same paths as a real one. The scheduler calls Hosts as Dask
actors; it shares the functions that form the messages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias, cast

from daskserve.cluster.actors.registry import HOST_ACTOR, ActorRegistry
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.cluster.long_poll import LongPollClient
from daskserve.cluster.protocols.base import ActorSpec, Cluster
from daskserve.cluster.routes import WorkerRoutes
from daskserve.common.clock import Clock
from daskserve.common.types import (
    ActorAddress,
    ActorRequest,
    Envelope,
    EnvelopeKind,
    InstanceName,
    Message,
    Payload,
    WorkerAddress,
    nothing_to_receive,
)
from daskserve.errors import ActorLostError, UnavailableError

#: A function that calls a verb of an actor, such as `daskserve.cluster.protocols.base.Cluster.call`.
CallVerb: TypeAlias = Callable[..., Awaitable[Any]]


def host_of(worker: WorkerAddress) -> ActorAddress:
    """Return the address at which a worker's Host answers its own verbs."""
    return ActorAddress(HOST_ACTOR, worker, 0)


async def control_call(
    request: Callable[[Envelope], ActorRequest],
    verb: str,
    message: Mapping[str, Any],
    payload: Payload | None = None,
) -> Any:
    """Call a verb over a request stream and return its value: plain, or a `Payload`."""
    answer: list[Message] = []

    async def keep(item: Message) -> None:
        answer.append(item)

    envelope = Envelope(EnvelopeKind.CONTROL, {"verb": verb, "message": message}, payload)
    await request(envelope).respond(nothing_to_receive, keep)
    return answer[0]["payload"] if "payload" in answer[0] else answer[0]["value"]


async def create_actor(call: CallVerb, spec: ActorSpec, worker: WorkerAddress) -> Mapping[str, Any]:
    """Create an actor on a worker; see `daskserve.cluster.protocols.base.Cluster.create`."""
    message = {**asdict(spec), "kind": spec.kind.value}
    facts: Mapping[str, Any] = await call(host_of(worker), "create", spec=message)
    return facts


async def destroy_actor(call: CallVerb, address: ActorAddress, grace_s: float) -> None:
    """Stop and remove an actor; see `daskserve.cluster.protocols.base.Cluster.destroy`."""
    name, incarnation = address.name, address.incarnation
    try:
        await call(host_of(address.worker), "destroy", name=name, incarnation=incarnation, grace_s=grace_s)
    except ActorLostError as error:
        if error.is_disconnected:
            raise  # only the connection is known to be lost; the actor may be in its grace period
        # The worker is gone, so the actor is too.


async def list_actors(
    call: CallVerb, worker: WorkerAddress, instance: InstanceName, metrics_of: Collection[str] = ()
) -> Sequence[Mapping[str, Any]]:
    """Return an instance's actors on a worker; see `daskserve.cluster.protocols.base.Cluster.inspect`."""
    actors: Sequence[Mapping[str, Any]] = await call(
        host_of(worker), "actors", instance=instance, metrics_of=list(metrics_of)
    )
    return actors


def close_shared(view: ProcessView) -> None:
    """Close the shared objects that can be closed: routers and tracing have threads."""
    for each in list(view.shared.values()):
        close = getattr(each, "close", None)
        if close is not None:
            close()


class ProcessView:
    """The part of `daskserve.cluster.protocols.base.Process` that every kind of cluster has.

    Parameters
    ----------
    registry : ActorRegistry, optional
        The actors of this process, if it is a worker.

    Attributes
    ----------
    shared : dict
        Objects that the layers above keep once per process and instance, by name. Those that have a method
        ``close`` are closed with it.
    """

    def __init__(
        self, instance: InstanceName, channels: ChannelPool, registry: ActorRegistry | None, clock: Clock
    ) -> None:
        self.instance = instance
        self.clock = clock
        self.routes = WorkerRoutes(channels, clock)
        self.shared: dict[str, Any] = {}
        self.is_ended = False
        self.resumed_at: float | None = None
        self._channels = channels
        self._registry = registry
        #: The address of the worker in this process; empty if there is none.
        self.here: WorkerAddress = "" if registry is None else registry.worker
        self._listener: LongPollClient | None = None

    @property
    def listener(self) -> LongPollClient:
        """This process's long-poll client for the instance; created on first use, not yet started."""
        if self._listener is None:
            self._listener = LongPollClient(cast(Cluster, self), self.clock)
            self._listener.on_worker_left(self._forget_worker)
            self._listener.on_ended(self._mark_ended)
        return self._listener

    def _forget_worker(self, worker: WorkerAddress) -> None:
        self._channels.drop(worker)

    def _mark_ended(self) -> None:
        self.is_ended = True
        self.routes.close()

    async def create(self, spec: ActorSpec, worker: WorkerAddress) -> Mapping[str, Any]:
        return await create_actor(self.call, spec, worker)

    async def destroy(self, address: ActorAddress, grace_s: float) -> None:
        await destroy_actor(self.call, address, grace_s)

    async def inspect(
        self, worker: WorkerAddress, *, metrics_of: Collection[str] = ()
    ) -> Sequence[Mapping[str, Any]]:
        return await list_actors(self.call, worker, self.instance, metrics_of)

    async def call(self, address: ActorAddress, verb: str, **message: Any) -> Any:
        return await control_call(partial(self.request, address), verb, message)

    async def fetch_answer(self, worker: WorkerAddress, token: str) -> Payload:
        try:
            found = await control_call(
                partial(self.request, host_of(worker)), "kept_result", {"token": token}
            )
        except ActorLostError as error:
            raise UnavailableError(
                f"The result of a call was stored on worker {worker}, which is lost: {error}"
            ) from error
        assert isinstance(found, Payload)
        return found

    def request(self, address: ActorAddress, envelope: Envelope) -> ActorRequest:
        if self._registry is not None and address.worker == self.here:
            return self._registry.dispatch(address.name, address.incarnation, envelope)
        return self._channels.request(address, envelope)

    def handler_of(self, address: ActorAddress) -> Callable[[Envelope], ActorRequest]:
        if self._registry is None or address.worker != self.here:
            return self._channels.handler_of(address)
        try:
            return self._registry.handler_of(address.name, address.incarnation)
        except (ActorLostError, UnavailableError):
            return partial(self.request, address)  # raises the same error while the actor is not ready

    def is_local(self, address: ActorAddress) -> bool:
        return address.worker == self.here
