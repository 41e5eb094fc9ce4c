"""User code that is ready to serve, and the base class of all answers that run it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from typing import Any

from daskserve.common.types import Envelope, EnvelopeKind, Message, Payload, Receive, short_tag
from daskserve.context import current_request
from daskserve.data.replica.errors.log import FailureLog, is_failure
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.execution.message_pipe import MessagePipe
from daskserve.data.replica.requests.batches import ReplicaBatches
from daskserve.data.replica.requests.replica_request import ReplicaRequest
from daskserve.data.replica.requests.slots import Slots
from daskserve.data.replica.user_code.definitions import CALL, Method
from daskserve.data.replica.user_code.request_objects import request_context, request_id_of
from daskserve.data.replica.user_code.servable import Servable
from daskserve.errors import ActorLostError
from daskserve.payload.packed_errors import PackedError
from daskserve.telemetry.replica import ReplicaMetrics


class ServingCode:
    """What the answers of one replica share: its user code, the executor, the slots and the metrics."""

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
        #: The reserved calls that wait for their arguments.
        self._reservations: set[asyncio.Future[None]] = set()
        #: Whether a header of an HTTP request may name the method to call.
        self.has_method_header = False
        #: Returns a call's arguments with the values that the caller took out of them.
        self.fill: Callable[[Payload, Any], Awaitable[Payload]]
        #: What a caller that chooses this replica learns about it.
        self.place: Mapping[str, Any] = {}
        #: The option ``on_disconnect``.
        self.on_disconnect: str | None = None

    def needs_task(self, envelope: Envelope) -> bool:
        """Whether a request needs a task, because something may have to wait."""
        head, servable = envelope.head, self.servable
        if envelope.kind is EnvelopeKind.HTTP:
            is_simple = head["type"] == "http" and not envelope.has_body and not self.has_method_header
            method = servable.methods.get(CALL) if is_simple else None
        else:
            method = None if "stream" in head else servable.methods.get(head.get("method") or CALL)
        if method is None or method.is_asgi or method.accepts_batches:
            return True
        # On the worker's loop, a task for the request saves one for user code; a call saves more without it.
        is_in_task = (
            envelope.kind is EnvelopeKind.HTTP and method.is_async and self.executor.is_on_worker_loop
        )
        return self.executor.is_closed or is_in_task

    async def arguments_of(self, receive: Receive) -> Message:
        """Return the message with the arguments of a reserved call; raise if the replica stops before."""
        stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        arriving: asyncio.Future[Message] = asyncio.ensure_future(receive())
        self._reservations.add(stopping)
        try:
            either: set[asyncio.Future[Any]] = {stopping, arriving}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if arriving.done():
                return arriving.result()
            # As if it had begun, so that the router does not choose another replica.
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


class LocalRequest(ReplicaRequest):
    """The answer to a request whose user code runs in this process."""

    __slots__ = ("_context", "_method", "code", "runs_in_task")

    # Set by `daskserve.data.replica.local_code.LocalCode.answer`: a constructor would be one more call for
    # each request.
    code: ServingCode
    #: Returns whether an error of user code is for the log.
    is_failure: Callable[[PackedError], bool] = staticmethod(is_failure)
    # Known when user code begins.
    #: Whether async code runs in the task that carries the answer, on the worker's loop.
    runs_in_task: bool
    _context: Context
    _method: Method

    def accept(self, value: Any) -> None:
        """Keep what user code returned or raised; log an error, with the context variables of the code."""
        super().accept(value)
        if type(value) is PackedError:
            if self.is_failure(value):
                log = self.code.failures.logs_for(self._context.get(current_request))
                self._context.copy().run(log, value, request_id_of(self.envelope.head))
            value.error = None  # it refers to the user's object

    def _set_context(self) -> None:
        """Create the context in which user code answers the request: a copy of the replica's."""
        self._context = context = self.code.executor.context.copy()
        context.run(current_request.set, request_context(self.envelope))

    def _start(self, is_async: bool, function: Callable[..., Any], *args: Any) -> None:
        """Start user code, or the next step of it."""
        executor = self.code.executor
        if is_async and self.runs_in_task:
            self.run = executor.enter(function, args, self._context, self)
        else:
            self.run = executor.start(is_async, function, args, self._context, self)

    def _next_step(self, is_async: bool, function: Callable[..., Any], *args: Any) -> None:
        # A copy, because the previous run may not have left its context yet.
        self._context = self._context.copy()
        self._start(is_async, function, *args)
