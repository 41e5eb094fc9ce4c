"""The state of a channel's streams, on the opening side and on the answering side.

These objects are created for every request, so they are small: they create an asyncio future or event only
when something waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from daskserve.cluster.channel.wire.frames import ANSWER, CREDIT, DATA, END, is_last, wire_message
from daskserve.cluster.channel.wire.transport import Transport
from daskserve.common.types import DONE, KeptPayload, Load, MayLeaveAnswer, Message, OnAnswer, Receive
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
        self._room: asyncio.Event | None = None  # few streams ever fill their window

    def take(self, size_bytes: int) -> bool:
        """Subtract sent bytes from the credit; return whether any is left."""
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
    """An answer that stays on the other side, until this side asks for it or closes the stream."""

    kept: KeptPayload
    load: Load

    def message(self) -> Message:
        """Return the message that stands for the answer."""
        return {"type": "call.result", "payload": self.kept}


class Opened:
    """A stream that this side opened; its inbox gets messages, then a load, an offer or an error."""

    __slots__ = ("call", "inbox", "window")

    def __init__(self, call: MayLeaveAnswer | None) -> None:
        self.inbox = Inbox()
        self.call = call
        #: Credit for the request body: one message of any size until the handler grants more.
        self.window = Window(1)

    def on_demand(self, receive: Receive) -> Receive:
        """Return a function that calls ``receive`` only once the handler has granted credit."""
        self.window = window = Window(0)

        async def receive_on_demand() -> Message:
            await window.wait()
            return await receive()

        return receive_on_demand


class Asked:
    """A single-answer stream that this side opened. The answer goes to a callback; no task waits."""

    __slots__ = ("_message", "_number", "_on_answer", "_streams", "_transport", "call")

    def __init__(
        self,
        number: int,
        streams: MutableMapping[int, Any],
        transport: Transport,
        on_answer: OnAnswer,
        call: MayLeaveAnswer | None,
    ) -> None:
        self.call = call
        self._number = number
        self._streams = streams
        self._transport = transport
        self._on_answer = on_answer
        self._message: Message | None = None

    @property
    def inbox(self) -> Asked:
        """This object, which processes received items at once."""
        return self

    @property
    def window(self) -> Window:
        """An empty window: no messages follow the request."""
        return Window(0)

    def put(self, *items: Any) -> None:
        for item in items:
            if type(item) is not dict:
                if type(item) is Offer:
                    self._end(item.message(), item.load)
                else:
                    self._end(self._message, item)
                return
            self._message = item
            size_bytes = message_bytes(item)
            if size_bytes >= WINDOW_BYTES // 2:
                self._transport.post((CREDIT, self._number, size_bytes))

    def answer(self, messages: Sequence[Message], load: Load) -> None:
        """Take the last messages and end the stream, without granting credit."""
        self._end(messages[-1] if messages else self._message, load)

    def _end(self, message: Message | None, outcome: Load | Exception) -> None:
        self._streams.pop(self._number, None)
        self._on_answer(message, outcome)


class Accepted:
    """A stream that the other side opened, as its handler sees it.

    Most handlers answer at once. The start of the response, its body and the end then share one frame.
    """

    __slots__ = (
        "_frame",
        "_inbox",
        "_number",
        "_taken_bytes",
        "_transport",
        "_turn",
        "has_body",
        "task",
        "window",
    )

    task: asyncio.Task[None]

    def __init__(self, number: int, transport: Transport, *, has_body: bool | Literal[2]) -> None:
        self._number = number
        self._transport = transport
        # The last frame; messages are added to it until it is sent.
        self._frame: list[Any] = []
        self._turn = -1
        # A full window, so that reading the first message of a body grants credit for the rest.
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

    async def receive(self) -> Message:
        """Return the client's next message."""
        message: Message = await self.inbox.get()
        self._taken_bytes += message_bytes(message)
        if self._taken_bytes >= WINDOW_BYTES // 2 and not is_last(message):
            self._transport.post((CREDIT, self._number, self._taken_bytes))
            self._taken_bytes = 0
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message to the client; the result waits while the client reads too slowly."""
        if self._turn == self._transport.turn:
            self._frame[2].append(wire_message(message))
        else:
            self._turn = self._transport.turn
            self._frame = [DATA, self._number, [wire_message(message)]]
            self._transport.post(self._frame)
        return DONE if self.window.take(message_bytes(message)) else self.window.wait()

    def end(self, load: Load) -> None:
        """Send the end of the stream with the actor's load."""
        if self._turn == self._transport.turn:
            self._frame[0] = ANSWER
            self._frame += (load.ongoing, load.queued)
            self._turn = -1
        else:
            self._transport.post((END, self._number, load.ongoing, load.queued))


class AcceptedOnDemand(Accepted):
    """A stream whose other side reads nothing of the body before the handler does."""

    __slots__ = ()

    async def receive(self) -> Message:
        if self._inbox is None:  # the first call
            self._transport.post((CREDIT, self._number, 1))
        return await super().receive()
