"""The pipe that carries the messages of one request between the worker's loop and user code."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from daskserve.common.clock import LoopClock
from daskserve.common.types import WHOLE_RESPONSE, Message, Receive, Send
from daskserve.data.replica.execution.executor import UserExecutor

#: Maximum number of messages of one request in flight in one direction.
WINDOW = 16
#: Maximum size of joined parts of a body.
JOIN_BYTES = 64 * 1024


class ClientDisconnectedError(ConnectionResetError):
    """User code sends to a WebSocket whose client has left."""

    def __init__(self) -> None:
        super().__init__("the client of the WebSocket has left")


class MessagePipe:
    """Carries the messages of one request across the executor.

    User code calls `receive`, `send` and `send_from_thread`. On the worker's loop, the pipe calls
    `on_message` when there are messages to `flush`.

    Parameters
    ----------
    kind : str
        ``"http"``, ``"websocket"`` or ``"call"``.
    receive, send : callable, optional
        Those of the request's caller; None until `connect` for a request without a task.
    first : Message, optional
        A message that the worker's side has received already, so that a small body needs no further crossing.
    """

    def __init__(
        self,
        executor: UserExecutor,
        kind: str,
        receive: Receive | None = None,
        send: Send | None = None,
        first: Message | None = None,
    ) -> None:
        self._executor = executor
        self._kind = kind
        self._receive = receive
        self._send = send
        #: Messages that user code has sent and the caller has not taken yet.
        self.outbox: deque[Message] = deque()
        # Lists, because they hold at most `WINDOW` items and are faster to create than deques.
        self._blocked: list[Callable[[], None]] = []
        self._inbox: list[Message | Exception] = [] if first is None else [first]
        self._readers: list[asyncio.Future[None]] = []

    # Whether user code has begun its response. These are class attributes, because each request creates a
    # pipe, and most requests never change them.
    is_started = False
    #: The bytes of the body that the caller does not have yet, infinite if the length is unknown. At 0, the
    #: caller has the whole response, although the application may end it later, after background tasks.
    missing_bytes: float = math.inf
    #: Whether ``first`` is the empty body of a request that has none; the caller's ``receive`` repeats it.
    is_body_assumed = False
    _is_closed = _is_accepted = _is_leaving = False
    #: Called on the worker's loop when there are messages in the `outbox`.
    on_message: Callable[[], None] | None = None
    # Exists if user code reads before `connect`.
    _connected: asyncio.Event | None = None
    # Counts of outgoing messages: only the user's side writes `_sent`, and only the worker's side `_passed`.
    _sent = _passed = 0
    # Counts of incoming messages: only the worker's side writes `_arrived`, and only the user's side
    # `_taken`.
    _arrived = _taken = 0
    #: The task that reads ahead. The user's side requests more messages only when it has none.
    _reading: asyncio.Task[None] | None = None

    # ---- called by user code

    @property
    def is_closed(self) -> bool:
        """Whether the client has left, or the request was ended."""
        return self._is_closed

    async def receive(self) -> Message:
        """Return the next message of the client."""
        while not self._inbox:
            if self._is_closed:
                return self._disconnect()
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            if self._reading is None:
                self._executor.to_worker.post_soon(self._read_more)
            await reader
        message = self._inbox.pop(0)
        self._taken += 1
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message: Message) -> None:
        """Send a message to the client, waiting only while too many are in flight."""
        self._post(message, self._executor.to_worker.post_soon)
        if self._is_closed:
            # Without this, code that never waits would never be cancelled.
            await LoopClock().sleep(0)
        elif self._sent - self._passed >= WINDOW:
            room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._block(partial(self._executor.user_loop.thread_calls.post, _wake, room))
            await room

    def send_nowait(self, *messages: Message) -> Awaitable[None] | None:
        """Send messages from a callback of the user-code loop; await the result before the next `send`."""
        for message in messages:
            self._post(message, self._executor.to_worker.post_soon)
        return None

    def send_from_thread(self, message: Message) -> bool:
        """Send a message from a plain function; return False if the caller has left."""
        self._post(message, self._executor.to_worker.post)
        if self._sent - self._passed >= WINDOW and not self._is_closed:
            room = threading.Event()
            self._block(room.set)
            room.wait()
        return not self._is_closed

    def _disconnect(self) -> Message:
        if self._kind == "websocket":
            return {"type": "websocket.disconnect", "code": 1006, "reason": ""}
        return {"type": "http.disconnect"}

    def _post(self, message: Message, post: Callable[..., None]) -> None:
        self.is_started = True
        if not self._is_closed:
            self._sent += 1
            post(self._arrive, message)

    def _block(self, release: Callable[[], None]) -> None:
        self._blocked.append(release)
        # Check again: the worker's side may have passed on the last message before the append.
        if self._has_room() or self._is_closed:
            release()

    def _has_room(self) -> bool:
        return self._sent - self._passed <= WINDOW // 2

    def _deliver(self, message: Message | Exception | None) -> None:
        if message is not None:
            self._inbox.append(message)
        readers, self._readers = self._readers, []
        for reader in readers:
            _wake(reader)

    # ---- on the worker's loop

    def connect(self, receive: Receive, send: Send) -> None:
        """Attach the pipe to its caller."""
        self._receive, self._send = receive, send
        if self._connected is not None:
            self._connected.set()

    async def flush(self) -> None:
        """Send the messages of user code to the caller."""
        send, outbox = self._send, self.outbox
        assert send is not None
        while outbox:
            message = outbox.popleft()
            count = 1
            if outbox and message["type"] == "http.response.body":
                message, count = _join_parts(message, outbox)
            await send(message)
            self._passed += count
            self._note_sent(message)
            if self._blocked and self._has_room():
                self._release()

    def _note_sent(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self.missing_bytes = _content_length(message)
        elif kind == "http.response.body" and message.get("more_body", False):
            self.missing_bytes -= len(message.get("body", b""))
        elif kind == "http.response.body" or kind == WHOLE_RESPONSE:
            self.missing_bytes = 0

    def leave(self) -> None:
        """Close a WebSocket with code 1001 as soon as it is open; user code then gets its disconnect."""
        self._is_leaving = True
        # Not `is_started`, because the message with which user code accepts the WebSocket may still be on its
        # way.
        if self._is_accepted:
            self._arrive(_going_away())

    def close(self) -> None:
        """Detach from the caller: drop messages from user code, and send it a disconnect."""
        if self._is_closed:
            return
        self._is_closed = True
        self.on_message = None
        if self._blocked:
            self._release()
        if self._reading is not None:
            self._reading.cancel()
        if self._readers:
            self._executor.user_loop.thread_calls.post(self._deliver, None)

    def _arrive(self, message: Message) -> None:
        self.outbox.append(message)
        if message["type"] == "websocket.accept":
            self._is_accepted = True
            if self._is_leaving:
                self.outbox.append(_going_away())
        if self.on_message is not None:
            self.on_message()

    def _release(self) -> None:
        while self._blocked:
            self._blocked.pop(0)()

    def _read_more(self) -> None:
        if self._is_closed:
            self._executor.user_loop.thread_calls.post(self._deliver, None)
        elif self._reading is None:
            self._reading = self._executor.loop.create_task(self._read_ahead())

    async def _receive_next(self) -> Message:
        receive = self._receive
        while receive is None:
            if self._connected is None:
                self._connected = asyncio.Event()
            await self._connected.wait()
            receive = self._receive
        message = await receive()
        if self.is_body_assumed and message["type"] == "http.request":
            message = await receive()
        return message

    async def _read_ahead(self) -> None:
        to_user = self._executor.user_loop.thread_calls
        try:
            while self._reading is not None:
                message: Message | Exception
                try:
                    message = await self._receive_next()
                    has_more = message.get("more_body", message["type"] == "websocket.receive")
                except Exception as error:  # user code gets the error from `receive`
                    message, has_more = error, False
                self._arrived += 1
                if not has_more or self._arrived - self._taken >= WINDOW:
                    # Set before the post, because user code has to request the next message after this one.
                    self._reading = None
                to_user.post_soon(self._deliver, message)
        finally:
            self._reading = None


class DirectPipe(MessagePipe):
    """A pipe for user code on the worker's loop, whose messages cross no threads."""

    def close(self) -> None:
        if self._blocked or self._reading or self._readers:
            super().close()
        else:
            self._is_closed = True
            self.on_message = None

    async def receive(self) -> Message:
        if not self._inbox and self._is_closed:
            return self._disconnect()
        message = self._inbox.pop(0) if self._inbox else await self._receive_next()
        if isinstance(message, Exception):
            raise message
        return self._disconnect() if message["type"] == "http.disconnect" else message

    def send_nowait(self, *messages: Message) -> Awaitable[None] | None:
        self.is_started = True
        return asyncio.get_running_loop().create_task(self._send_all(messages))

    async def _send_all(self, messages: Iterable[Message]) -> None:
        for message in messages:
            await self.send(message)

    async def send(self, message: Message) -> None:
        self.is_started = True
        if self._is_closed:
            await LoopClock().sleep(0)
            return
        send = self._send
        assert send is not None
        try:
            await send(message)
        except OSError:
            self._is_closed = True  # the caller has left; user code continues, as on its own loop
            return
        self._note_sent(message)
        if self.on_message is not None:
            self.on_message()
        if message["type"] == "websocket.accept":
            self._is_accepted = True
            if self._is_leaving:
                await send(_going_away())


def open_pipe(
    executor: UserExecutor,
    kind: str,
    receive: Receive | None = None,
    send: Send | None = None,
    first: Message | None = None,
) -> MessagePipe:
    """Return the kind of pipe for the loop on which the executor runs async code."""
    pipe = DirectPipe if executor.is_on_worker_loop else MessagePipe
    return pipe(executor, kind, receive, send, first)


def _join_parts(first: Message, others: deque[Message]) -> tuple[Message, int]:
    """Join the parts of a body that are ready, and also return their number.

    A write of the server costs more than joining parts.
    """
    parts = [first.get("body", b"")]
    size_bytes = len(parts[0])
    more_body = first.get("more_body", False)
    while more_body and others and others[0]["type"] == "http.response.body":
        part = others[0].get("body", b"")
        size_bytes += len(part)
        if size_bytes > JOIN_BYTES:
            break
        parts.append(part)
        more_body = others.popleft().get("more_body", False)
    if len(parts) == 1:
        return first, 1
    return {"type": "http.response.body", "body": b"".join(parts), "more_body": more_body}, len(parts)


def _content_length(start: Message) -> float:
    for name, value in start.get("headers", ()):
        if bytes(name).lower() == b"content-length" and bytes(value).isdigit():
            return int(value)
    return math.inf


def _going_away() -> Message:
    return {"type": "websocket.close", "code": 1001, "reason": "going away"}


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
