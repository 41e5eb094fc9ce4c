"""What a channel keeps of each stream: on the side that opened it, and on the side that answers.

All of this is made and dropped once per request, so it is small: no queue or event of asyncio's before
somebody has to wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, MutableMapping, Sequence
from typing import Any, Protocol

from daskserve.cluster.channel.frames import ANSWER, CREDIT, DATA, END, is_last, wire_message
from daskserve.payload import message_bytes
from daskserve.types import DONE, Load, Message, OnAnswer

#: How much of a body may be on its way at a time. Credit for half of it is given at once, so that streams of
#: small messages need no frames for it.
WINDOW_BYTES = 1024 * 1024


class Inbox:
    """What has arrived and has not been taken yet; for one taker."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, *items: Any) -> None:
        self._items += items
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        """Return the next item when there is one."""
        while not self._items:
            await self._wait()
        return self._items.popleft()

    async def get_all(self) -> deque[Any]:
        """Return all items there are when there is one."""
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
    """How much may be sent yet in one direction of a stream; the sender's side."""

    __slots__ = ("_left_bytes", "_room")

    def __init__(self, size_bytes: int) -> None:
        self._left_bytes = size_bytes
        self._room: asyncio.Event | None = None  # few streams ever fill their window

    def take(self, size_bytes: int) -> bool:
        """Note that so much was sent; return whether there is room for more."""
        self._left_bytes -= size_bytes
        return self._left_bytes > 0

    def give(self, size_bytes: int) -> None:
        self._left_bytes += size_bytes
        if self._room is not None and self._left_bytes > 0:
            self._room.set()

    async def wait(self) -> None:
        """Return when there is room."""
        while self._left_bytes <= 0:
            if self._room is None:
                self._room = asyncio.Event()
            self._room.clear()
            await self._room.wait()


class Opened:
    """A stream that this side has opened: the messages, the load or the error that come back."""

    __slots__ = ("inbox", "window")

    def __init__(self) -> None:
        self.inbox = Inbox()
        #: What may be sent of the request: a single message, however large, until more is asked for.
        self.window = Window(1)


class Asked:
    """A stream that this side has opened for one answer, which goes to a callback. No task waits for it."""

    __slots__ = ("_message", "_number", "_on_answer", "_outlet", "_streams")

    def __init__(
        self, number: int, streams: MutableMapping[int, Any], outlet: Outlet, on_answer: OnAnswer
    ) -> None:
        self._number = number
        self._streams = streams
        self._outlet = outlet
        self._on_answer = on_answer
        self._message: Message | None = None

    @property
    def inbox(self) -> Asked:
        """Where what comes back is put: all of it is taken at once."""
        return self

    @property
    def window(self) -> Window:
        """What may be sent: nothing follows the request."""
        return Window(0)

    def put(self, *items: Any) -> None:
        for item in items:
            if type(item) is not dict:
                self._end(self._message, item)
                return
            self._message = item
            size_bytes = message_bytes(item)
            if size_bytes >= WINDOW_BYTES // 2:
                self._outlet.post((CREDIT, self._number, size_bytes))

    def answer(self, messages: Sequence[Message], load: Load) -> None:
        """Take the last messages: nobody has to be told how much there is room for."""
        self._end(messages[-1] if messages else self._message, load)

    def _end(self, message: Message | None, outcome: Load | Exception) -> None:
        self._streams.pop(self._number, None)
        self._on_answer(message, outcome)


class Outlet(Protocol):
    """The part of a `daskserve.cluster.channel.transport.Transport` that streams send through."""

    @property
    def turn(self) -> int: ...
    def post(self, frame: Any) -> None: ...


class Accepted:
    """A stream that the other side has opened, as its handler sees it.

    Most handlers answer at once, with the start of a response, its body, and their end: in one frame.
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

    def __init__(self, number: int, outlet: Outlet, *, has_body: bool) -> None:
        self._number = number
        self._outlet = outlet
        # The last frame, which may be added to for as long as it has not left.
        self._frame: list[Any] = []
        self._turn = -1
        # Whoever begins to read a body wants more than its first message.
        self._taken_bytes = WINDOW_BYTES
        self.has_body = has_body
        self._inbox: Inbox | None = None
        #: What may be sent of the response.
        self.window = Window(WINDOW_BYTES)

    @property
    def inbox(self) -> Inbox:
        """What has come in of the request; made on first use."""
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
            self._outlet.post((CREDIT, self._number, self._taken_bytes))
            self._taken_bytes = 0
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message to the client, as fast as it reads."""
        if self._turn == self._outlet.turn:
            self._frame[2].append(wire_message(message))
        else:
            self._turn = self._outlet.turn
            self._frame = [DATA, self._number, [wire_message(message)]]
            self._outlet.post(self._frame)
        return DONE if self.window.take(message_bytes(message)) else self.window.wait()

    def end(self, load: Load) -> None:
        """Tell the client that nothing more comes."""
        if self._turn == self._outlet.turn:
            self._frame[0] = ANSWER
            self._frame += (load.ongoing, load.queued)
            self._turn = -1
        else:
            self._outlet.post((END, self._number, load.ongoing, load.queued))
