"""Channels: one persistent, multiplexed connection between two processes that carries request streams.

Problem: a call of a Dask actor costs 0.4 ms and carries one message each way. Requests need streaming both
ways, cancellation and tens of thousands of calls a second. Choice: one Dask comm per pair of processes is
taken over, which brings TLS and the other transports with it (see
`daskserve.cluster.channel.wire.transport`). Both sides send lists of small frames; all frames of one
event-loop iteration go out in one write. Large bytes travel out of band, without a copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from daskserve.cluster.channel.kept_results import KeptResults
from daskserve.cluster.channel.streams import AcceptedStream, Offer, OnDemandStream, OpenedStream
from daskserve.cluster.channel.wire.frames import (
    ANSWER,
    CANCEL,
    CREDIT,
    DATA,
    END,
    ERROR,
    MEMORY,
    OFFER,
    OPEN,
    unwire_message,
    unwire_payload,
    wire_message,
)
from daskserve.cluster.channel.wire.transport import CALL_WORK, FRAME_WORK, Frames, Transport
from daskserve.common.types import (
    DONE,
    KEPT_BYTES,
    ON_DEMAND,
    ActorAddress,
    ActorRequest,
    Envelope,
    EnvelopeKind,
    KeptPayload,
    Load,
    Message,
    Payload,
    QueueTimeout,
    described_actor,
)
from daskserve.errors import ActorLostError
from daskserve.loops.deadlines import until
from daskserve.loops.thread_calls import CallInbox
from daskserve.payload.packed_errors import dump_error, received_error

logger = logging.getLogger("daskserve.channel")


#: Takes a request from the other side: (actor name, incarnation, envelope) -> the request.
Dispatch = Callable[[str, int, Envelope], ActorRequest]

_KINDS: Mapping[str, EnvelopeKind] = {kind.value: kind for kind in EnvelopeKind}


class Channel:
    """The streams of one connection; `serve` runs until the connection ends."""

    def __init__(
        self,
        transport: Transport,
        dispatch: Dispatch,
        *,
        first_stream: int,
        inbox: CallInbox | None = None,
        kept: KeptResults | None = None,
    ) -> None:
        self._transport = transport
        self._post = transport.post
        self._dispatch = dispatch
        self._next_stream = first_stream
        self._opened: dict[int, OpenedStream] = {}
        self._accepted: dict[int, AcceptedStream] = {}
        #: Streams that are answered without a task, each with the function that cancels it.
        self._taskless: dict[int, Callable[[], None]] = {}
        #: Where this side keeps large answers, and the offered answers by stream; None if it sends all
        #: answers.
        self._kept = kept
        self._offered: dict[int, tuple[str, Load]] = {}
        #: The streams whose large answers the other side keeps for callers on this side.
        self._held: set[int] = set()
        self._inbox = inbox
        self.is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        return (
            f"<Channel to {self._transport.peer_address} {state} opened={len(self._opened)} "
            f"handling={len(self._accepted) + len(self._taskless)}>"
        )

    @property
    def is_idle(self) -> bool:
        """Whether this side has no open requests, and the other side keeps no results for it."""
        return not (self._opened or self._held)

    async def serve(self) -> None:
        """Carry streams until either side closes; open streams then end with an error."""
        try:
            await self._transport.run(self._receive, self._refuse)
        finally:
            self._finish()

    def close(self) -> None:
        """End the connection at once."""
        if not self.is_closed:
            self._transport.abort()

    def request(self, address: ActorAddress, envelope: Envelope) -> OpenedStream:
        """Return a request to an actor on the other side, not sent.

        Raises
        ------
        ActorLostError
            The connection has ended.
        """
        if self.is_closed:
            closed = f"The connection to {address.worker} is closed."
            raise ActorLostError(closed, begun=False, is_disconnected=True)
        number = self._next_stream
        self._next_stream += 2
        return OpenedStream(number, self._opened, self._transport, address, envelope)

    def _refuse(self, frame: Any, error: Exception) -> None:
        """End the stream of a frame that could not be sent."""
        logger.error("A message of stream %s cannot be sent: %s", frame[1], error)
        problem = TypeError(f"A message holds a value that cannot be sent: {error}")
        if frame[1] in self._opened:
            self._opened[frame[1]].put(problem)
        else:
            self._post((ERROR, frame[1], dump_error(problem)))

    def _receive(self, frames: Frames) -> None:
        if self._inbox is not None:
            # First send the messages that other threads have posted. The other side can work on them while
            # this side handles the frames that have just arrived.
            self._inbox.catch_up()
            self._transport.flush()
        for frame in frames:
            self._receive_frame(frame)

    def _receive_frame(self, frame: Any) -> None:
        kind, number = frame[0], frame[1]
        if kind == OPEN:
            self._accept_stream(number, *frame[2:])
            return
        # The two sides use different numbers, so a stream is in at most one of these. If it is in neither, it
        # has ended.
        stream = self._opened.get(number) or self._accepted.get(number)
        if stream is None:
            self._receive_other(kind, number, frame)
            return
        if kind == DATA:
            stream.put(*map(unwire_message, frame[2]))
        elif kind == CREDIT:
            stream.window.give(frame[2])
        elif isinstance(stream, AcceptedStream):
            if kind == CANCEL:
                self._cancel(number, stream)
        elif kind == ANSWER:
            stream.put(*map(unwire_message, frame[2]), Load(frame[3], frame[4]))
        elif kind == END:
            stream.put(Load(frame[2], frame[3]))
        elif kind == ERROR:
            stream.put(received_error(frame[2]))
        elif kind == OFFER:
            self._take_offer(number, stream, *frame[2:])

    def _receive_other(self, kind: int, number: int, frame: Any) -> None:
        """Handle a frame that belongs to an accepted stream without a task, or to the connection."""
        if kind == CANCEL:
            give_up = self._taskless.pop(number, None)
            if give_up is not None:
                give_up()
            elif number in self._offered:
                self._withdraw(number)
        elif kind == CREDIT and number in self._offered:
            payload, load = self._withdraw(number)
            message = wire_message({"type": "call.result", "payload": payload})
            self._post((ANSWER, number, [message], load.ongoing, load.queued))
        elif kind == MEMORY:
            self._transport.take_note(frame[2])

    # ---- large answers

    def _offer(self, number: int, payload: Payload, load: Load) -> None:
        """Keep an answer until the other side requests it, or closes the stream."""
        assert self._kept is not None
        token = self._kept.add(payload)
        self._offered[number] = token, load
        self._post((OFFER, number, self._kept.worker, token, payload.nbytes, load.ongoing, load.queued))

    def _withdraw(self, number: int) -> tuple[Payload, Load]:
        assert self._kept is not None
        token, load = self._offered.pop(number)
        return self._kept.drop(token), load

    def _take_offer(
        self,
        number: int,
        stream: OpenedStream,
        worker: str,
        token: str,
        size_bytes: int,
        ongoing: int,
        queued: int,
    ) -> None:
        call = stream.envelope.call
        if call is None or not call.leaves_value:
            self._post((CREDIT, number, size_bytes))
            return
        loop = asyncio.get_running_loop()

        def release() -> None:
            # Scheduled on the loop, because the garbage collector may call this on any thread at any time.
            with suppress(RuntimeError):  # raised by a closed loop
                loop.call_soon_threadsafe(self._release, number)

        self._held.add(number)
        stream.put(Offer(KeptPayload(worker, token, size_bytes, release), Load(ongoing, queued)))

    def _release(self, number: int) -> None:
        self._held.discard(number)
        if not self.is_closed:
            self._post((CANCEL, number))

    def _accept_stream(
        self,
        number: int,
        name: str,
        incarnation: int,
        kind: str,
        head: Mapping[str, Any],
        payload: Any,
        has_body: bool | Literal[2],
        left_s: float | None,
        queue_timeout: tuple[float, float, int] | None,
    ) -> None:
        deadline = None if left_s is None else asyncio.get_running_loop().time() + left_s
        envelope = Envelope(
            _KINDS[kind],
            head,
            unwire_payload(payload),
            deadline,
            has_body,
            None if queue_timeout is None else QueueTimeout(*queue_timeout),
        )
        is_for_one = kind == EnvelopeKind.CALL or (kind == EnvelopeKind.HTTP and not has_body)
        try:
            request = self._dispatch(name, incarnation, envelope)
            if is_for_one and deadline is None and queue_timeout is None:
                give_up = request.start(partial(self._answered, number, name, envelope))
                if give_up is not None:
                    self._taskless[number] = give_up
                    return
        except Exception as error:  # the error fails only this request, not the connection
            self._post((ERROR, number, dump_error(error)))
            return
        self._begin(number, name, envelope, request)

    def _begin(
        self,
        number: int,
        name: str,
        envelope: Envelope,
        request: ActorRequest,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        accepted = OnDemandStream if envelope.has_body == ON_DEMAND else AcceptedStream
        stream = self._accepted[number] = accepted(number, self._transport, has_body=envelope.has_body)
        # Without a name: naming a task costs as much as creating it.
        stream.task = asyncio.get_running_loop().create_task(
            self._handle(number, name, envelope, request, stream)
        )
        if give_up is not None:  # the task may be cancelled before its first step
            stream.task.add_done_callback(lambda _: give_up())

    def _answered(
        self,
        number: int,
        name: str,
        envelope: Envelope,
        message: Message | None,
        outcome: Load | Exception | ActorRequest,
    ) -> None:
        give_up = self._taskless.pop(number, None)
        if give_up is None:
            return  # cancelled
        if isinstance(outcome, Load):
            work = FRAME_WORK
            if envelope.kind is EnvelopeKind.CALL:
                work = CALL_WORK
                if self._kept is not None and message is not None and _is_large(message):
                    self._offer(number, message["payload"], outcome)
                    return
            messages = [] if message is None else [wire_message(message)]
            self._post((ANSWER, number, messages, outcome.ongoing, outcome.queued), work)
        elif isinstance(outcome, Exception):
            self._post((ERROR, number, dump_error(outcome)))
        else:
            self._begin(number, name, envelope, outcome, give_up)

    async def _handle(
        self,
        number: int,
        name: str,
        envelope: Envelope,
        request: ActorRequest,
        stream: AcceptedStream,
    ) -> None:
        send, large = stream.send, []
        if self._kept is not None and envelope.kind is EnvelopeKind.CALL:

            def send(message: Message) -> Awaitable[None]:
                if _is_large(message):
                    large.append(message["payload"])
                    return DONE
                return stream.send(message)

        try:
            answering = request.respond(stream.receive, send)
            if envelope.deadline is not None:
                answering = until(
                    envelope.deadline, answering, f"The deadline of a request to {name} passed."
                )
            load = await answering
            if large:
                self._offer(number, large[0], load)
            else:
                stream.end(load)
        except asyncio.CancelledError:
            # Either the opener cancelled it and no longer listens, or the actor was stopped.
            stopped = ActorLostError(f"{described_actor(name)} was stopped.", begun=True, is_planned=True)
            self._post((ERROR, number, dump_error(stopped)))
            raise
        except Exception as error:
            # Every error of the handler goes to the opener.
            self._post((ERROR, number, dump_error(error)))
        finally:
            # Not a done callback, which costs one more loop iteration; `_cancel` covers the exception.
            self._accepted.pop(number, None)
            del stream.task  # a cancelled task refers to its frames: the cycle would keep the request

    def _cancel(self, number: int, stream: AcceptedStream) -> None:
        stream.task.cancel()
        # A task that is cancelled before its first step never runs its own cleanup.
        stream.task.add_done_callback(lambda _: self._opener_left(number, stream))

    def _opener_left(self, number: int, stream: AcceptedStream) -> None:
        self._accepted.pop(number, None)
        # Code that was not cancelled may still read, and receives this. It comes after the end of the task,
        # so cancelled code never receives it.
        stream.put({"type": "http.disconnect"})

    def _finish(self) -> None:
        self.is_closed = self._transport.is_closed = True
        self._transport.abort()
        unsent = {frame[1] for frame in self._transport.unsent if frame[0] == OPEN}
        for number, opened in list(self._opened.items()):
            lost = f"The connection to {self._transport.peer_address} was lost."
            opened.put(ActorLostError(lost, begun=number not in unsent, is_disconnected=True))
        for number, accepted in list(self._accepted.items()):
            self._cancel(number, accepted)
        for number in list(self._offered):
            self._withdraw(number)
        taskless, self._taskless = self._taskless, {}
        for give_up in taskless.values():
            give_up()


def _is_large(message: Message) -> bool:
    """Return whether a message is the result of a call that is offered instead of sent."""
    if message["type"] != "call.result":
        return False
    payload = message["payload"]
    if payload.buffers:
        return bool(payload.nbytes >= KEPT_BYTES)
    return len(payload.data) >= KEPT_BYTES
