"""The parts that the requests of a replica share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from daskserve.common.types import Message, Payload, Receive, short_tag
from daskserve.data.replica.errors.log import FailureLog
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.execution.message_pipe import MessagePipe
from daskserve.data.replica.requests.batches import ReplicaBatches
from daskserve.data.replica.requests.slots import Slots
from daskserve.data.replica.user_code.servable import Servable
from daskserve.errors import ActorLostError
from daskserve.telemetry.replica import ReplicaMetrics

if TYPE_CHECKING:
    from daskserve.telemetry.tracing.templates import ReplicaTemplates


class ServingCode:
    """The parts that the requests of one replica share: user code, executor, slots and metrics."""

    def __init__(
        self,
        executor: UserExecutor,
        servable: Servable,
        batches: ReplicaBatches,
        slots: Slots,
        metrics: ReplicaMetrics,
        failures: FailureLog,
    ) -> None:
        self.executor = executor
        self.servable = servable
        self.batches = batches
        self.slots = slots
        self.metrics = metrics
        self.failures = failures
        #: The open WebSockets.
        self.sockets: set[MessagePipe] = set()
        #: For each reserved call that waits for its arguments, a future that ends the wait.
        self._reservations: set[asyncio.Future[None]] = set()
        #: The option ``method_header``: whether a header of an HTTP request may name the method to call.
        self.has_method_header = False
        #: Returns a call's arguments with the values that the caller sent separately.
        self.fill: Callable[[Payload, Any], Awaitable[Payload]]
        #: The description of the replica for callers that choose it; see
        #: `daskserve.data.caller.calls.replica_choice.ReplicaSelection`.
        self.place: Mapping[str, Any] = {}
        #: The templates of its spans; None before the first one.
        self.templates: ReplicaTemplates | None = None
        #: The option ``on_disconnect``.
        self.on_disconnect: str | None = None
        #: Writes the end of a call to the access log; None if there is none.
        self.note_call: Callable[[str, str, int, float], None] | None = None

    def configure(self, config: Any, note_call: Callable[[str, str, int, float], None] | None) -> None:
        """Apply the options of a backend."""
        self.has_method_header = config.method_header
        self.on_disconnect = config.on_disconnect
        self.note_call = note_call

    async def arguments_of(self, receive: Receive) -> Message:
        """Return the message with the arguments of a reserved call; raise if the replica stops first."""
        stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        arriving: asyncio.Future[Message] = asyncio.ensure_future(receive())
        self._reservations.add(stopping)
        try:
            either: set[asyncio.Future[Any]] = {stopping, arriving}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if arriving.done():
                return arriving.result()
            # With begun=True, the router does not choose another replica.
            raise ActorLostError(f"Replica {short_tag(self.slots.replica_tag)!r} was stopped.", begun=True)
        finally:
            arriving.cancel()
            self._reservations.discard(stopping)

    def end_reservations(self) -> None:
        """Fail the reserved calls whose arguments have not arrived."""
        for stopping in self._reservations:
            if not stopping.done():
                stopping.set_result(None)

    def close_websockets(self) -> None:
        """Close the open WebSockets with code 1001."""
        for pipe in list(self.sockets):
            pipe.leave()
