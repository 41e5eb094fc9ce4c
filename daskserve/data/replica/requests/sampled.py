"""Requests whose bodies are copied for the payload log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from daskserve.common.clock import stopwatch
from daskserve.common.types import SOCKET_RECEIVER, ActorRequest, EnvelopeKind, Load, Message, Receive, Send
from daskserve.data.replica.requests.counted import ObservedRequest
from daskserve.data.replica.requests.replica_request import LocalRequest
from daskserve.loops.deadlines import is_over
from daskserve.payload.packed_errors import PackedError
from daskserve.telemetry.payloads.events import CALLER_GONE, TOO_LATE, Sample


class SampledRequest(ObservedRequest):
    """A request that is sampled.

    Parameters
    ----------
    request : ActorRequest
        The request to answer; it may wrap ``local``.
    local : LocalRequest
        The request itself.
    take : callable
        Called with the sample once the request has ended.
    """

    def __init__(
        self,
        request: ActorRequest,
        local: LocalRequest,
        max_bytes: int,
        time: float,
        take: Callable[[Sample], object],
    ) -> None:
        super().__init__(request)
        self._local = local
        self._take = take
        self._has_ended = False
        envelope = local.envelope
        kind = "call" if envelope.kind is EnvelopeKind.CALL else envelope.head["type"]
        self._sample = Sample(time, max_bytes, kind, envelope.head)
        if kind == "call" and "values" not in envelope.head and envelope.payload is not None:
            # Copied before user code can change the payload.
            self._sample.request.add_payload(envelope.payload)

    def note_end(self, message: Message | None, error: Exception | None) -> None:
        if message is not None:
            self._sample.sent(message)
        self._end(error=error)

    def note_leave(self) -> None:
        is_late = is_over(self._local.envelope.deadline, asyncio.get_running_loop().time())
        self._end(TOO_LATE if is_late else CALLER_GONE)

    async def respond(self, receive: Receive, send: Send) -> Load:
        sample = self._sample

        async def forward() -> Message:
            message = await receive()
            sample.received(message)
            return message

        def pass_on(message: Message) -> Awaitable[None]:
            sample.sent(message)
            if SOCKET_RECEIVER in message:
                # Keep the messages of a WebSocket in this pipe, so that they can be sampled.
                place = message[SOCKET_RECEIVER]
                place.give_up()
                message = {name: value for name, value in message.items() if name != SOCKET_RECEIVER}
            return send(message)

        try:
            load = await self._request.respond(forward, pass_on)
        except asyncio.CancelledError:
            self.note_leave()
            raise
        except Exception as error:
            self._end(error=error)
            raise
        self._end()
        return load

    def _end(self, status: int = 0, error: Exception | None = None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        sample = self._sample
        envelope = self._local.envelope
        if sample.kind == "call" and not sample.request.size and envelope.payload is not None:
            # Added only now, because the arguments arrived or were fetched after the request had begun.
            sample.request.add_payload(envelope.payload)
            sample.head = envelope.head
        if error is not None:
            sample.error = error.summary if isinstance(error, PackedError) else type(error).__name__
            status = status or 500
        sample.status = status or sample.status or CALLER_GONE
        sample.seconds = stopwatch() - self._began
        self._take(sample)
