"""Channels: one persistent, multiplexed connection between two processes that carries request streams.

Problem: an actor call costs 0.4 ms and one message each way; requests need streaming both ways, cancellation
and tens of thousands of calls a second. Choice: one Dask comm per pair of processes is taken over, which
brings TLS and the other transports with it (see `daskserve.cluster.channel.wire.transport`). Both sides send
lists of small frames; all frames of one event-loop iteration go out in one write. Large bytes travel out of
band, without a copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from daskserve.cluster.channel.kept_results import KeptResults, is_large
from daskserve.cluster.channel.streams import WINDOW_BYTES, Accepted, AcceptedOnDemand, Asked, Offer, Opened
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
    in_parts,
    is_last,
    unwire_message,
    unwire_payload,
    wire_message,
    wire_payload,
)
from daskserve.cluster.channel.wire.outbox import CALL_WORK, FRAME_WORK, Frames
from daskserve.cluster.channel.wire.transport import Transport
from daskserve.common.types import (
    DONE,
    ON_DEMAND,
    ActorAddress,
    Envelope,
    EnvelopeKind,
    KeptPayload,
    Load,
    Message,
    OnAnswer,
    Payload,
    QueueTimeout,
    Receive,
    RemainingResponse,
    Send,
    described_actor,
)
from daskserve.errors import ActorLostError
from daskserve.loops.deadlines import until
from daskserve.loops.thread_calls import CallInbox
from daskserve.payload.packed_errors import dump_error, received_error
from daskserve.payload.pickling import message_bytes

logger = logging.getLogger("daskserve.channel")


#: Handles one stream: (actor name, incarnation, envelope, receive, send) -> load of the actor.
Dispatch = Callable[[str, int, Envelope, Receive, Send], Coroutine[Any, Any, Load]]

#: Answers a single-answer stream without a task: (actor name, incarnation, envelope, on_answer) -> a function
#: that cancels it, or None if the stream needs `Dispatch`.
DispatchNowait = Callable[[str, int, Envelope, OnAnswer], Callable[[], None] | None]

_KINDS: Mapping[str, EnvelopeKind] = {kind.value: kind for kind in EnvelopeKind}


class Channel:
    """The streams of one connection; `serve` runs until the connection ends."""

    def __init__(
        self,
        transport: Transport,
        dispatch: Dispatch,
        *,
        first_stream: int,
        dispatch_nowait: DispatchNowait | None = None,
        inbox: CallInbox | None = None,
        kept: KeptResults | None = None,
    ) -> None:
        self._transport = transport
        self._post = transport.post
        self._dispatch = dispatch
        self._next_stream = first_stream
        self._opened: dict[int, Opened | Asked] = {}
        self._accepted: dict[int, Accepted] = {}
        #: Streams that are answered without a task, each with the function that cancels it.
        self._taskless: dict[int, Callable[[], None]] = {}
        #: Where this side keeps large answers, and those that were offered, by stream; None if it sends all.
        self._kept = kept
        self._offered: dict[int, tuple[str, Load]] = {}
        #: The streams whose large answers the other side keeps for callers of this one.
        self._held: set[int] = set()
        self._dispatch_nowait = dispatch_nowait
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
        """Whether nothing that this side has opened is under way, and the other side keeps nothing for it."""
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

    async def request(self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send) -> Load:
        """Open a stream to an actor on the other side, carry it to its end, and return the actor's load.

        Raises
        ------
        ActorLostError
            The connection ended first; ``begun`` is False if the actor cannot have seen the request.
        Exception
            The error that the actor's handler raised.
        """
        if self.is_closed:
            closed = f"The connection to {address.worker} is closed."
            raise ActorLostError(closed, begun=False, is_disconnected=True)
        stream = self._next_stream
        self._next_stream += 2
        opened = self._opened[stream] = Opened(envelope.call)
        pump = None
        taken_bytes = 0
        if envelope.has_body and (envelope.kind is EnvelopeKind.HTTP or "reserve" in envelope.head):
            # Created before the first post, so that its first frames leave in the same write.
            if envelope.has_body == ON_DEMAND:
                receive = opened.on_demand(receive)
            pump = asyncio.create_task(self._pump(stream, opened, receive), name="daskserve-channel-pump")
        self._post(_open_frame(stream, address, envelope))
        try:
            while True:
                for item in await opened.inbox.get_all():
                    if type(item) is dict:
                        await send(item)
                        taken_bytes += message_bytes(item)
                        if taken_bytes >= WINDOW_BYTES // 2:
                            self._post((CREDIT, stream, taken_bytes))
                            taken_bytes = 0
                    elif isinstance(item, Load):
                        return item
                    elif type(item) is Offer:
                        await send(item.message())
                        return item.load
                    else:
                        raise item
        except BaseException:
            if stream in self._opened and not self.is_closed:
                self._post((CANCEL, stream))
            raise
        finally:
            self._opened.pop(stream, None)
            if pump is not None:
                pump.cancel()

    def ask(self, address: ActorAddress, envelope: Envelope, on_answer: OnAnswer) -> Callable[[], None]:
        """Open a single-answer stream and return a function that cancels it.

        The answer goes to the callback. This is for requests without a deadline or a body stream; it costs
        half of what `request` costs. The connection must be open. If it ends before the answer arrives, the
        callback gets an `ActorLostError`.
        """
        stream = self._next_stream
        self._next_stream += 2
        self._opened[stream] = Asked(stream, self._opened, self._transport, on_answer, envelope.call)
        self._post(_open_frame(stream, address, envelope), CALL_WORK)
        return partial(self._give_up, stream)

    def _give_up(self, stream: int) -> None:
        if self._opened.pop(stream, None) is not None and not self.is_closed:
            self._post((CANCEL, stream))

    async def _pump(self, stream: int, opened: Opened, receive: Receive) -> None:
        while stream in self._opened:
            message = await receive()
            for part in in_parts(message):
                self._post((DATA, stream, (wire_message(part),)))
                if is_last(part):
                    # A disconnect after the body arrives here as the cancellation of the whole request.
                    return
                if not opened.window.take(message_bytes(part)):
                    await opened.window.wait()

    def _refuse(self, frame: Any, error: Exception) -> None:
        """End the stream of a frame that could not be sent."""
        logger.error("A message of stream %s cannot be sent: %s", frame[1], error)
        problem = TypeError(f"A message holds a value that cannot be sent: {error}")
        if frame[1] in self._opened:
            self._opened[frame[1]].inbox.put(problem)
        else:
            self._post((ERROR, frame[1], dump_error(problem)))

    def _receive(self, frames: Frames) -> None:
        if self._inbox is not None:
            # Send what other threads have ready: the other side then works on it while this side handles
            # the frames that have just arrived.
            self._inbox.catch_up()
            self._transport.flush()
        for frame in frames:
            self._receive_frame(frame)

    def _receive_frame(self, frame: Any) -> None:
        kind, number = frame[0], frame[1]
        if kind == OPEN:
            self._accept_stream(number, *frame[2:])
            return
        # The two sides use different numbers, so a stream is in at most one of these; otherwise it has ended.
        stream = self._opened.get(number) or self._accepted.get(number)
        if stream is None:
            self._receive_other(kind, number, frame)
            return
        if kind == DATA:
            stream.inbox.put(*map(unwire_message, frame[2]))
        elif kind == CREDIT:
            stream.window.give(frame[2])
        elif isinstance(stream, Accepted):
            if kind == CANCEL:
                self._cancel(number, stream)
        elif kind == ANSWER:
            messages, load = [unwire_message(each) for each in frame[2]], Load(frame[3], frame[4])
            if isinstance(stream, Asked):
                stream.answer(messages, load)
            else:
                stream.inbox.put(*messages, load)
        elif kind == END:
            stream.inbox.put(Load(frame[2], frame[3]))
        elif kind == ERROR:
            stream.inbox.put(received_error(frame[2]))
        elif kind == OFFER:
            self._take_offer(number, stream, *frame[2:])

    def _receive_other(self, kind: int, number: int, frame: Any) -> None:
        """Handle a frame of no stream that a task carries, or that this side opened."""
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
        """Keep an answer until the other side asks for it, or closes the stream."""
        assert self._kept is not None
        token = self._kept.add(payload)
        self._offered[number] = token, load
        self._post((OFFER, number, self._kept.worker, token, payload.nbytes, load.ongoing, load.queued))

    def _withdraw(self, number: int) -> tuple[Payload, Load]:
        assert self._kept is not None
        token, load = self._offered.pop(number)
        return self._kept.drop(token), load

    def _take_offer(
        self, number: int, stream: Any, worker: str, token: str, size_bytes: int, ongoing: int, queued: int
    ) -> None:
        if stream.call is None or not stream.call.leaves_value:
            self._post((CREDIT, number, size_bytes))
            return
        loop = asyncio.get_running_loop()

        def release() -> None:
            # Through the loop, because the garbage collector may call this on any thread at any time.
            with suppress(RuntimeError):  # what a closed loop raises
                loop.call_soon_threadsafe(self._release, number)

        self._held.add(number)
        stream.inbox.put(Offer(KeptPayload(worker, token, size_bytes, release), Load(ongoing, queued)))

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
        queue_timeout: tuple[float, float] | None,
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
        if is_for_one and deadline is None and queue_timeout is None and self._dispatch_nowait is not None:
            on_answer = partial(self._answered, number, name, incarnation, envelope)
            try:
                give_up = self._dispatch_nowait(name, incarnation, envelope, on_answer)
            except Exception as error:  # it concerns this request only, not the connection
                self._post((ERROR, number, dump_error(error)))
                return
            if give_up is not None:
                self._taskless[number] = give_up
                return
        self._begin(number, name, incarnation, envelope)

    def _begin(
        self,
        number: int,
        name: str,
        incarnation: int,
        envelope: Envelope,
        rest: RemainingResponse | None = None,
    ) -> None:
        accepted = AcceptedOnDemand if envelope.has_body == ON_DEMAND else Accepted
        stream = self._accepted[number] = accepted(number, self._transport, has_body=envelope.has_body)
        # Without a name: naming a task costs as much as creating it.
        stream.task = asyncio.get_running_loop().create_task(
            self._handle(number, name, incarnation, envelope, stream, rest)
        )
        if rest is not None:
            stream.task.add_done_callback(
                lambda _: rest.drop()
            )  # the task may be cancelled before its first step

    def _answered(
        self,
        number: int,
        name: str,
        incarnation: int,
        envelope: Envelope,
        message: Message | None,
        outcome: Load | Exception | RemainingResponse,
    ) -> None:
        if self._taskless.pop(number, None) is None:
            return  # cancelled
        if isinstance(outcome, Load):
            work = FRAME_WORK
            if envelope.kind is EnvelopeKind.CALL:
                work = CALL_WORK
                if self._kept is not None and message is not None and is_large(message):
                    self._offer(number, message["payload"], outcome)
                    return
            messages = [] if message is None else [wire_message(message)]
            self._post((ANSWER, number, messages, outcome.ongoing, outcome.queued), work)
        elif isinstance(outcome, Exception):
            self._post((ERROR, number, dump_error(outcome)))
        else:
            self._begin(number, name, incarnation, envelope, outcome)

    async def _handle(
        self,
        number: int,
        name: str,
        incarnation: int,
        envelope: Envelope,
        stream: Accepted,
        rest: RemainingResponse | None,
    ) -> None:
        send, large = stream.send, []
        if self._kept is not None and envelope.kind is EnvelopeKind.CALL:

            def send(message: Message) -> Awaitable[None]:
                if is_large(message):
                    large.append(message["payload"])
                    return DONE
                return stream.send(message)

        try:
            if rest is None:
                answering: Any = self._dispatch(name, incarnation, envelope, stream.receive, send)
            else:
                answering = rest.respond(stream.receive, stream.send)
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

    def _cancel(self, number: int, stream: Accepted) -> None:
        stream.task.cancel()
        # A task that is cancelled before its first step never runs its own cleanup.
        stream.task.add_done_callback(lambda _: self._opener_left(number, stream))

    def _opener_left(self, number: int, stream: Accepted) -> None:
        self._accepted.pop(number, None)
        # Code that was not cancelled may still read, and receives this. It comes after the end of the task,
        # so cancelled code never receives it.
        stream.inbox.put({"type": "http.disconnect"})

    def _finish(self) -> None:
        self.is_closed = True
        self._transport.abort()
        unsent = {frame[1] for frame in self._transport.unsent if frame[0] == OPEN}
        for number, opened in list(self._opened.items()):
            lost = f"The connection to {self._transport.peer_address} was lost."
            opened.inbox.put(ActorLostError(lost, begun=number not in unsent, is_disconnected=True))
        for number, accepted in list(self._accepted.items()):
            self._cancel(number, accepted)
        for number in list(self._offered):
            self._withdraw(number)
        taskless, self._taskless = self._taskless, {}
        for give_up in taskless.values():
            give_up()


def _open_frame(stream: int, address: ActorAddress, envelope: Envelope) -> tuple[Any, ...]:
    deadline, queue_timeout = envelope.deadline, envelope.queue_timeout
    return (
        OPEN,
        stream,
        address.name,
        address.incarnation,
        envelope.kind,  # a str
        envelope.head,
        wire_payload(envelope.payload),
        envelope.has_body,
        None if deadline is None else deadline - asyncio.get_running_loop().time(),
        None if queue_timeout is None else (queue_timeout.left_s, queue_timeout.waited_s),
    )
