"""The state of a channel's streams, on the opening side and on the answering side.

These objects are created for every request, so they are small: they create an asyncio future or event only
when something waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from daskserve.cluster.channel.wire.frames import (
    ANSWER,
    CANCEL,
    CREDIT,
    DATA,
    END,
    OPEN,
    in_parts,
    is_last,
    wire_message,
    wire_payload,
)
from daskserve.cluster.channel.wire.transport import CALL_WORK, Transport
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
    Receive,
    Send,
)
from daskserve.errors import ActorLostError
from daskserve.payload.pickling import message_bytes

#: How many bytes of a body may be in flight. A reader grants credit in steps of half a window, so that short
#: streams need no credit frames.
WINDOW_BYTES = 1024 * 1024


class Inbox:
    """A queue of received items for one reader."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, *items: Any) -> None:
        self._items += items
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        """Wait for the next item and return it."""
        while not self._items:
            await self._wait()
        return self._items.popleft()

    async def get_all(self) -> deque[Any]:
        """Wait for at least one item and return all items."""
        while not self._items:
            await self._wait()
        items, self._items = self._items, deque()
        return items

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Window:
    """The sender's remaining credit in one direction of a stream."""

    __slots__ = ("_left_bytes", "_room")

    def __init__(self, size_bytes: int) -> None:
        self._left_bytes = size_bytes
        self._room: asyncio.Event | None = None  # created on demand: few streams fill their window

    def take(self, size_bytes: int) -> bool:
        """Subtract sent bytes from the credit; return whether any credit is left."""
        self._left_bytes -= size_bytes
        return self._left_bytes > 0

    def give(self, size_bytes: int) -> None:
        self._left_bytes += size_bytes
        if self._room is not None and self._left_bytes > 0:
            self._room.set()

    async def wait(self) -> None:
        """Wait until there is credit."""
        while self._left_bytes <= 0:
            if self._room is None:
                self._room = asyncio.Event()
            self._room.clear()
            await self._room.wait()


@dataclass(slots=True)
class Offer:
    """An answer that stays on the other side until this side requests it or closes the stream."""

    kept: KeptPayload
    load: Load

    def message(self) -> Message:
        """Return the message of the answer."""
        return {"type": "call.result", "payload": self.kept}


class OpenedStream:
    """A request that this side sends to an actor on the other side: a `daskserve.common.types.ActorRequest`.

    The channel passes incoming messages to `put`, then a load, an offer or an error.
    """

    __slots__ = (
        "_address",
        "_inbox",
        "_message",
        "_number",
        "_on_answer",
        "_outlet",
        "_streams",
        "_window",
        "envelope",
    )

    _inbox: Inbox  # set by `respond`

    def __init__(
        self,
        number: int,
        streams: MutableMapping[int, Any],
        outlet: Transport,
        address: ActorAddress,
        envelope: Envelope,
    ) -> None:
        self.envelope = envelope
        self._address = address
        self._number = number
        self._streams = streams
        self._outlet = outlet
        #: Called with the answer; None if a task waits for the answer.
        self._on_answer: OnAnswer | None = None
        self._message: Message | None = None
        self._window: Window | None = None

    @property
    def window(self) -> Window:
        """The credit for the body of the request."""
        return self._window or Window(0)

    def start(self, on_answer: OnAnswer) -> Callable[[], None]:
        """Send the request; call the callback once, with the answer, or with an `ActorLostError` if the
        connection ends.

        This is for requests without a deadline or a body, and costs half of what `respond` costs.

        Raises
        ------
        ActorLostError
            The connection has ended.
        """
        self._check_open()
        self._on_answer = on_answer
        self._streams[self._number] = self
        self._outlet.post(self._frame(), CALL_WORK)
        return self._give_up

    async def respond(self, receive: Receive, send: Send) -> Load:
        """Send the request, pass its messages on, and return the actor's load.

        Raises
        ------
        ActorLostError
            The connection ended first; ``begun`` is False if the actor cannot have seen the request.
        Exception
            The error that the actor's handler raised.
        """
        self._check_open()
        inbox = self._inbox = Inbox()
        self._streams[self._number] = self
        pump = None
        taken_bytes = 0
        if self.envelope.has_body and (
            self.envelope.kind is EnvelopeKind.HTTP or "reserve" in self.envelope.head
        ):
            # Created before the first post, so that its first frames leave in the same write.
            pump = asyncio.create_task(self._pump(receive), name="daskserve-channel-pump")
            pump.add_done_callback(self._end_with)
        self._outlet.post(self._frame())
        try:
            while True:
                items = await inbox.get_all()
                has_more = type(items[-1]) is dict  # after the end, the other side needs no more credit
                for item in items:
                    if type(item) is dict:
                        await send(item)
                        if has_more:
                            taken_bytes += message_bytes(item)
                            if taken_bytes >= WINDOW_BYTES // 2:
                                self._outlet.post((CREDIT, self._number, taken_bytes))
                                taken_bytes = 0
                    elif isinstance(item, Load):
                        return item
                    elif type(item) is Offer:
                        await send(item.message())
                        return item.load
                    else:
                        raise item
        except BaseException:
            self._give_up()
            raise
        finally:
            self._streams.pop(self._number, None)
            if pump is not None:
                pump.cancel()

    def _end_with(self, pump: asyncio.Task[None]) -> None:
        """End the request if its body could not be received, because a user's middleware may raise."""
        if not pump.cancelled() and (error := pump.exception()) is not None:
            self._inbox.put(error)

    def _check_open(self) -> None:
        """Raise `ActorLostError` if the connection has ended since the request was made."""
        if self._outlet.is_closed:
            closed = f"The connection to {self._address.worker} is closed."
            raise ActorLostError(closed, begun=False, is_disconnected=True)

    def put(self, *items: Any) -> None:
        """Process arrived messages, or the end of the request."""
        on_answer, outcome = self._on_answer, items[-1]
        if on_answer is None:
            self._inbox.put(*items)
        elif type(outcome) is dict:  # the end follows in a separate frame
            self._message = outcome
            size_bytes = message_bytes(outcome)
            if size_bytes >= WINDOW_BYTES // 2:
                self._outlet.post((CREDIT, self._number, size_bytes))
        else:
            message = items[-2] if len(items) > 1 else self._message
            self._streams.pop(self._number, None)
            if type(outcome) is Offer:
                on_answer(outcome.message(), outcome.load)
            else:
                on_answer(message, outcome)

    def _give_up(self) -> None:
        if self._streams.pop(self._number, None) is not None and not self._outlet.is_closed:
            self._outlet.post((CANCEL, self._number))

    def _frame(self) -> tuple[Any, ...]:
        address, envelope = self._address, self.envelope
        deadline, queue_timeout = envelope.deadline, envelope.queue_timeout
        return (
            OPEN,
            self._number,
            address.name,
            address.incarnation,
            envelope.kind,  # a str
            envelope.head,
            wire_payload(envelope.payload),
            envelope.has_body,
            None if deadline is None else deadline - asyncio.get_running_loop().time(),
            None
            if queue_timeout is None
            else (queue_timeout.left_s, queue_timeout.waited_s, queue_timeout.priority),
        )

    async def _pump(self, receive: Receive) -> None:
        """Send the body: one message of any size, and more as the handler grants credit."""
        is_on_demand = self.envelope.has_body == ON_DEMAND
        window = self._window = Window(0 if is_on_demand else 1)
        while self._number in self._streams:
            if is_on_demand:
                await window.wait()
            message = await receive()
            for part in in_parts(message):
                self._outlet.post((DATA, self._number, (wire_message(part),)))
                if is_last(part):
                    # A disconnect after the body arrives here as the cancellation of the whole request.
                    return
                if not window.take(message_bytes(part)):
                    await window.wait()


class AcceptedStream:
    """A stream that the other side opened, as its handler sees it.

    Most handlers answer at once. The start of the response, its body and the end can then share one frame.
    """

    __slots__ = (
        "_frame",
        "_inbox",
        "_number",
        "_outlet",
        "_taken_bytes",
        "_turn",
        "has_body",
        "task",
        "window",
    )

    task: asyncio.Task[None]

    def __init__(self, number: int, outlet: Transport, *, has_body: bool | Literal[2]) -> None:
        self._number = number
        self._outlet = outlet
        # The last frame; messages are added to it until it is sent.
        self._frame: list[Any] = []
        self._turn = -1
        # Starts at a full window, so that reading the first message of a body grants credit for the rest.
        self._taken_bytes = WINDOW_BYTES
        self.has_body = has_body
        self._inbox: Inbox | None = None
        #: Credit for the response.
        self.window = Window(WINDOW_BYTES)

    @property
    def inbox(self) -> Inbox:
        """The received messages of the request; created on first use."""
        if self._inbox is None:
            self._inbox = Inbox()
            if not self.has_body:
                self._inbox.put({"type": "http.request", "body": b"", "more_body": False})
        return self._inbox

    def put(self, *items: Message) -> None:
        """Take messages that have arrived."""
        self.inbox.put(*items)

    async def receive(self) -> Message:
        """Return the client's next message."""
        message: Message = await self.inbox.get()
        self._taken_bytes += message_bytes(message)
        if self._taken_bytes >= WINDOW_BYTES // 2 and not is_last(message):
            self._outlet.post((CREDIT, self._number, self._taken_bytes))
            self._taken_bytes = 0
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message to the client; the result waits while the client reads too slowly."""
        if self._turn == self._outlet.turn:
            self._frame[2].append(wire_message(message))
        else:
            self._turn = self._outlet.turn
            self._frame = [DATA, self._number, [wire_message(message)]]
            self._outlet.post(self._frame)
        return DONE if self.window.take(message_bytes(message)) else self.window.wait()

    def end(self, load: Load) -> None:
        """Send the end of the stream with the actor's load."""
        if self._turn == self._outlet.turn:
            self._frame[0] = ANSWER
            self._frame += (load.ongoing, load.queued)
            self._turn = -1
        else:
            self._outlet.post((END, self._number, load.ongoing, load.queued))


class OnDemandStream(AcceptedStream):
    """A stream whose other side does not read the body before the handler does."""

    __slots__ = ()

    async def receive(self) -> Message:
        if self._inbox is None:  # the first call
            self._outlet.post((CREDIT, self._number, 1))
        return await super().receive()
