"""The child's end of process isolation: a replica that its actor asks over a channel."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from daskserve import settings
from daskserve.clock import LoopClock, system_rng
from daskserve.cluster.base import ActorSpec, ContextWith
from daskserve.cluster.worker.child import ChildView
from daskserve.context import HasLink
from daskserve.data.replica.child_figures import tell
from daskserve.data.replica.child_runner import PACKED
from daskserve.data.replica.replica import Replica
from daskserve.errors import ServeError, UnavailableError
from daskserve.payload import dump_error
from daskserve.types import ActorKind, Envelope, EnvelopeKind, Load, Payload, Receive, Send


class ChildReplica(Replica):
    """A replica that can tell when the code of a request that was given up has ended."""

    def __init__(self, context: ContextWith[HasLink]) -> None:
        super().__init__(context)
        self._slots.on_free = self._note_free
        #: The requests within `handle`, each with what is to be told when it leaves.
        self._inside: dict[int, asyncio.Future[None]] = {}
        self._left: deque[asyncio.Future[None]] = deque()

    async def answer(self, number: int, envelope: Envelope, receive: Receive, send: Send) -> Load:
        """Answer a request, which `ended` knows by its number."""
        self._inside[number] = asyncio.get_running_loop().create_future()
        try:
            return await self.handle(envelope, receive, send)
        finally:
            self._inside.pop(number).set_result(None)
            self._release()

    async def statistics(self, has_stats: bool = False) -> dict[str, Any]:
        """Return the replica's figures, all that a scrape of this process would find, and the stats."""
        stats = {"custom": self.figures().get("custom", {})} if has_stats else {}
        return {**await super().statistics(), **tell(self.samples(), self.user_samples()), **stats}

    async def ended(self, number: int) -> None:
        """Return when a cancelled request holds no slot any more, or never held one."""
        if number in self._inside:
            await asyncio.shield(self._inside[number])
        left = asyncio.get_running_loop().create_future()
        self._left.append(left)
        self._release()
        await left

    def _note_free(self) -> None:
        if self._left:
            # Not at once: a request that is about to leave `handle` lets go of its slot first.
            asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        # A request within `handle` holds a slot, so all other slots are held by requests that have left.
        # Which of them lets go of one does not matter: slots are all alike.
        while self._left and len(self._left) > self.load().ongoing - len(self._inside):
            left = self._left.popleft()
            if not left.done():
                left.set_result(None)


class ReplicaServer:
    """Serves one replica to its actor; a `daskserve.cluster.worker.child.Served`."""

    def __init__(self) -> None:
        self._replica: ChildReplica | None = None
        self._view: ChildView | None = None
        self._verbs: Mapping[str, Callable[..., Awaitable[Any]]] = {"start": self._start, "stop": self._stop}

    async def dispatch(
        self, name: str, number: int, envelope: Envelope, receive: Receive, send: Send
    ) -> Load:
        """Answer a verb or a request of the actor."""
        if envelope.kind is EnvelopeKind.CONTROL:
            head = envelope.head
            value = await self._run(head["verb"], envelope.payload, head["message"])
            await send({"type": "control.result", "value": value})
            return Load()
        replica = self._started()
        try:
            return await replica.answer(number, envelope, receive, send)
        except Exception as error:
            if type(error).__module__ == ServeError.__module__:
                raise
            # Packed here, to be raised where it is wanted.
            await send({"type": PACKED, "error": dump_error(error)})
            return replica.load()

    async def _run(self, verb: str, payload: Payload | None, message: Mapping[str, Any]) -> Any:
        if verb in self._verbs:
            more = {} if payload is None else {"payload": payload.data}
            return await self._verbs[verb](**message, **more)
        return await getattr(self._started(), verb)(**message)

    def _started(self) -> ChildReplica:
        if self._replica is None:
            raise UnavailableError("The replica has not been started.")
        return self._replica

    async def _start(
        self, payload: bytes, name: str, incarnation: int, instance: str, worker: str, access: bytes
    ) -> Mapping[str, Any]:
        view = self._view = ChildView(instance, access, settings.timeouts().connect_s)
        spec = ActorSpec(ActorKind.REPLICA, name, incarnation, instance, bytes(payload))
        # User code sees of the view only what handles and clients need of it.
        context = ContextWith(spec, view, LoopClock(), system_rng(), worker)
        self._replica = ChildReplica(context)
        return await self._replica.start()

    async def _stop(self) -> None:
        if self._replica is not None:
            await self._replica.stop(0)
            gc.collect()  # what only a cycle holds has a destructor, too, and this was its last chance
        if self._view is not None:
            await asyncio.to_thread(self._view.close)
