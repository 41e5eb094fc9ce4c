"""The received messages of a WebSocket, until the application takes them, and their limits."""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from wsproto.events import BytesMessage, TextMessage

from daskserve.common.types import Message
from daskserve.proxies.exchange.limits.limits import BUFFERS, Limits
from daskserve.proxies.exchange.limits.loop_work import SLICE_BYTES, STEP_BYTES, LoopWork
from daskserve.proxies.exchange.stream import READ_BYTES, Stream, can_detect_disconnects

#: Maximum size of the messages that wait for the application; while they are larger, nothing is read.
MAX_INBOX_BYTES = 1024 * 1024
#: Interval of the checks whether a client has disconnected, while nothing is read from it.
DISCONNECT_CHECK_S = 0.5
#: Overhead of each message or part, counted in addition to its data.
_PART_BYTES = 256
#: Maximum overhead of the parts of a message, in addition to the maximum size of the message.
_PARTS_ALLOWANCE_BYTES = 1024 * 1024


class WebSocketInbox:
    """Messages that wait for the application; after the last one, every `take` returns the disconnect.

    The messages count in the budget of ``limits``.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._charged_bytes = 0
        #: Whether a message exceeded the budget.
        self.is_over_budget = False
        self._messages: deque[tuple[Message, int]] = deque()
        self._held_bytes = 0
        self._takers: set[asyncio.Future[None]] = set()
        self._parts: list[Any] = []
        self._parts_bytes = 0
        self.disconnect: Message | None = None
        #: Called once when the inbox is no longer full.
        self.on_room: Callable[[], None] | None = None

    @property
    def is_full(self) -> bool:
        return self._held_bytes > MAX_INBOX_BYTES and self.disconnect is None

    def put(self, message: Message, size_bytes: int) -> None:
        self._messages.append((message, size_bytes))
        self._held_bytes += size_bytes
        if self._takers:
            self._wake()

    def add_part(self, event: TextMessage | BytesMessage, max_bytes: int) -> bool:
        """Add a message or a part of one; return False if it exceeds a limit."""
        self._parts.append(event.data)
        self._parts_bytes += len(event.data)
        if not self._charge(len(event.data)):
            return False
        # Many small parts also use memory.
        overhead_bytes = _PART_BYTES * len(self._parts)
        if (
            self._parts_bytes > max_bytes
            or self._parts_bytes + overhead_bytes > max_bytes + _PARTS_ALLOWANCE_BYTES
        ):
            return False
        if event.message_finished:
            message: Message = {"type": "websocket.receive", "text": None, "bytes": None}
            if isinstance(event, TextMessage):
                message["text"] = "".join(self._parts)
            else:
                message["bytes"] = b"".join(bytes(part) for part in self._parts)
            self.put(message, self._parts_bytes + _PART_BYTES)
            self._parts, self._parts_bytes = [], 0
        return True

    def _charge(self, size_bytes: int) -> bool:
        self._charged_bytes += size_bytes
        if self._limits.received.acquire(size_bytes):
            return True
        self.is_over_budget = True
        self._limits.hit(BUFFERS)
        return False

    def _discharge(self, size_bytes: int) -> None:
        if self._charged_bytes:
            self._charged_bytes -= size_bytes
            self._limits.received.release(size_bytes)

    def release(self) -> None:
        """Drop all messages, because the application has ended."""
        self._messages.clear()
        self._discharge(self._charged_bytes)

    def end(self, disconnect: Message) -> None:
        self.disconnect = disconnect
        self._discharge(self._parts_bytes)
        self._parts, self._parts_bytes = [], 0
        self._wake()
        self._notify_room()

    async def take(self) -> Message:
        while not self._messages:
            if self.disconnect is not None:
                return self.disconnect
            taker = asyncio.get_running_loop().create_future()
            self._takers.add(taker)
            try:
                await taker
            finally:
                self._takers.discard(taker)
        message, size_bytes = self._messages.popleft()
        self._held_bytes -= size_bytes
        self._discharge(max(0, size_bytes - _PART_BYTES))
        if self.on_room is not None and not self.is_full:
            self._notify_room()
        return message

    def _wake(self) -> None:
        # Wake all of them, because one that is being cancelled takes nothing.
        for taker in self._takers:
            if not taker.done():
                taker.set_result(None)

    def _notify_room(self) -> None:
        on_room, self.on_room = self.on_room, None
        if on_room is not None:
            on_room()


class WebSocketReader:
    """Reads a stream while the inbox has room, in slices that share the event loop with others.

    Parameters
    ----------
    parse : callable
        ``parse(data)`` is an iterator. Each step adds messages to the inbox and yields their cost; see
        `daskserve.proxies.exchange.limits.loop_work`.
    """

    _stream: Stream
    _loop_work: LoopWork

    def __init__(self, inbox: WebSocketInbox, parse: Callable[[bytes], Iterator[int]]) -> None:
        self._inbox = inbox
        self._parse = parse
        self._steps: Iterator[int] | None = None
        self._rest = b""
        self._is_waiting = False  # for a turn, or for room in the inbox
        self._timer: asyncio.TimerHandle | None = None
        #: Whether anything was received since this was last set to False.
        self.has_received = True
        #: Whether data from the client is still read.
        self.is_open = False

    def start(self, stream: Stream, loop_work: LoopWork, unread: bytes = b"") -> None:
        """Start reading from a stream; ``unread`` precedes its data."""
        self._stream = stream
        self._loop_work = loop_work
        self.is_open = True
        if unread:
            self._receive(unread)
        stream.start_reading(self._receive)

    def stop(self) -> None:
        """Stop reading."""
        self.is_open = False
        self._rest = b""
        self._steps = None
        if self._timer is not None:
            self._timer.cancel()

    def _receive(self, data: bytes) -> None:
        self.has_received = True
        if self.is_open:
            self._rest = self._rest + data if self._rest else data
            if self._is_waiting:
                self._stream.pause_reading()
            else:
                self._loop_work.do(self._work)

    def _work(self) -> int:
        """Do a slice of work; return its cost."""
        self._is_waiting = False
        cost = 0
        while self.is_open:
            if self._inbox.is_full:
                self._wait()
                self._inbox.on_room = self._note_room
                self._check_soon()
                break
            if cost >= SLICE_BYTES:
                self._wait()
                self._loop_work.add(self._work)
                break
            if self._steps is None:
                if not self._rest:
                    self._stream.resume_reading()
                    break
                data, self._rest = self._rest[:READ_BYTES], self._rest[READ_BYTES:]
                self._steps = self._parse(data)
                cost += STEP_BYTES
            step = next(self._steps, None)
            if step is None:
                self._steps = None
            else:
                cost += step
        return cost

    def _wait(self) -> None:
        self._is_waiting = self.has_received = True
        self._stream.pause_reading()

    def _note_room(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop_work.add(self._work)

    def _check_soon(self) -> None:
        if can_detect_disconnects():
            self._timer = asyncio.get_running_loop().call_later(DISCONNECT_CHECK_S, self._check_disconnect)

    def _check_disconnect(self) -> None:
        """Close the stream if its client has disconnected, which is not noticed while nothing is read."""
        stream = self._stream
        if self._inbox.on_room is None or stream.closed():
            return
        poll = select.poll()
        poll.register(stream.socket.fileno(), select.POLLRDHUP)
        if poll.poll(0):
            stream.close()
        else:
            self._check_soon()
