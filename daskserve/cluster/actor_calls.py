"""How one process calls actors: those in its own `ActorBook` directly, all others over channels.

Shared by `daskserve.cluster.dask.DaskCluster` and `daskserve.cluster.local.process.LocalProcess`, so that the
in-process cluster takes the same paths as a real one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from daskserve.cluster.actor_book import HOST_ACTOR, ActorBook
from daskserve.cluster.base import ActorSpec
from daskserve.cluster.channel.pool import ChannelPool
from daskserve.errors import ActorLostError
from daskserve.types import (
    ActorAddress,
    Envelope,
    EnvelopeKind,
    InstanceName,
    Load,
    Message,
    OnAnswer,
    Payload,
    Receive,
    Send,
    WorkerAddress,
    nothing_to_receive,
)


async def control_call(
    request: Callable[[Envelope, Receive, Send], Awaitable[Any]],
    verb: str,
    message: Mapping[str, Any],
    payload: Payload | None = None,
) -> Any:
    """Call a verb over a request stream and return its value."""
    answer: list[Message] = []

    async def keep(item: Message) -> None:
        answer.append(item)

    envelope = Envelope(EnvelopeKind.CONTROL, {"verb": verb, "message": message}, payload)
    await request(envelope, nothing_to_receive, keep)
    return answer[0]["value"]


class ActorCalls:
    """The part of `daskserve.cluster.base.Cluster` that calls actors.

    Parameters
    ----------
    book : ActorBook, optional
        The actors of this process, if it is a worker.
    """

    def __init__(self, instance: InstanceName, channels: ChannelPool, book: ActorBook | None) -> None:
        self.instance = instance
        self._channels = channels
        self._book = book
        self._here: WorkerAddress | None = None if book is None else book.worker

    async def create(self, spec: ActorSpec, worker: WorkerAddress) -> Mapping[str, Any]:
        message = {
            "kind": spec.kind.value,
            "name": spec.name,
            "incarnation": spec.incarnation,
            "instance": spec.instance,
            "payload": spec.payload,
        }
        facts: Mapping[str, Any] = await self.call(
            ActorAddress(HOST_ACTOR, worker, 0), "create", spec=message
        )
        return facts

    async def destroy(self, address: ActorAddress, grace_s: float) -> None:
        host = ActorAddress(HOST_ACTOR, address.worker, 0)
        try:
            await self.call(
                host, "destroy", name=address.name, incarnation=address.incarnation, grace_s=grace_s
            )
        except ActorLostError:
            pass  # the worker is gone, so the actor is too

    async def inspect(
        self, worker: WorkerAddress, *, figures_of: Collection[str] = ()
    ) -> Sequence[Mapping[str, Any]]:
        actors: Sequence[Mapping[str, Any]] = await self.call(
            ActorAddress(HOST_ACTOR, worker, 0),
            "actors",
            instance=self.instance,
            figures_of=list(figures_of),
        )
        return actors

    async def call(self, address: ActorAddress, verb: str, **message: Any) -> Any:
        def request(envelope: Envelope, receive: Receive, send: Send) -> Coroutine[Any, Any, Load]:
            return self.request(address, envelope, receive, send)

        return await control_call(request, verb, message)

    def request(
        self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send
    ) -> Coroutine[Any, Any, Load]:
        if self._book is not None and address.worker == self._here:
            return self._book.dispatch(address.name, address.incarnation, envelope, receive, send)
        return self._channels.request(address, envelope, receive, send)

    def ask(
        self, address: ActorAddress, envelope: Envelope, on_answer: OnAnswer
    ) -> Callable[[], None] | None:
        if self._book is not None and address.worker == self._here:
            return self._book.answer(address.name, address.incarnation, envelope, on_answer)
        return self._channels.ask(address, envelope, on_answer)

    def is_local(self, address: ActorAddress) -> bool:
        return address.worker == self._here
