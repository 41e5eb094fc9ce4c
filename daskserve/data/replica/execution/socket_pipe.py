"""The pipes of WebSockets, whose connection moves to user code if both are in the same process.

The messages of the handshake pass through the pipe, like those of any request: the replica, the router and
the ingress see that the WebSocket is accepted. The accept also names the event loop of user code
(`daskserve.common.types.SOCKET_RECEIVER`). The server then moves the open WebSocket to this loop, where user
code receives and sends directly. If the connection cannot move, for example because of TLS under Tornado, all
messages pass through the pipe.
"""

from __future__ import annotations

import asyncio

from daskserve.common.clock import LoopClock, stopwatch
from daskserve.common.types import SOCKET_RECEIVER, Envelope, Message, OpenSocket, Receive, Send
from daskserve.data.replica.execution.executor import UserExecutor
from daskserve.data.replica.execution.message_pipe import ClientDisconnectedError, DirectPipe, MessagePipe
from daskserve.data.replica.execution.user_loop import UserLoop


class _MovedError(Exception):
    """Raised in a reader of the pipe, because the connection has moved."""


class UserSocketReceiver:
    """The user's own loop as the `SocketReceiver` of one WebSocket."""

    def __init__(self, user_loop: UserLoop, pipe: SocketPipe) -> None:
        self.loop = user_loop.loop
        self.post = user_loop.thread_calls.post
        #: The connection, once it has moved here.
        self.socket: OpenSocket | None = None
        #: Whether the connection is moving here.
        self.is_expected = False
        #: Set when the connection has moved here, or will not move.
        self.is_decided = asyncio.Event()
        self._user_loop = user_loop
        self._pipe: SocketPipe | None = pipe  # until `is_decided` is set
        self._leaves_at_once = False

    def expect_socket(self) -> None:
        """Record that the connection is moving here; on the worker's loop."""
        self.is_expected = True
        if self._pipe is not None:
            self._pipe.stop_passing()

    def give_up(self) -> None:
        """Keep the messages in the pipe, unless the connection is moving. Any thread may call this."""
        if not self.is_expected:
            self.post(self.decide)

    def take_socket(self, socket: OpenSocket) -> None:
        """Take the connection: all messages pass through it from now on."""
        self.socket = socket
        self._user_loop.admit(socket)
        if self._pipe is not None:
            self._pipe.end_readers()
        if self._leaves_at_once:
            socket.go_away()
        self.decide()

    def drop_socket(self, socket: OpenSocket) -> None:
        """Record that the connection has ended."""
        self._user_loop.dismiss(socket)

    def leave(self) -> None:
        """Close the connection with code 1001 once it has moved here."""
        self._leaves_at_once = True
        if self.socket is not None:
            self.socket.go_away()

    def decide(self) -> None:
        """Release user code that waits to send: to the connection if it has moved here, or to the pipe."""
        self._pipe = None  # the pipe refers to this object
        self.is_decided.set()


class _SocketPipe(MessagePipe):
    """The pipe of a WebSocket, whose connection may move to the loop of user code.

    Parameters
    ----------
    envelope : Envelope
        Says whether the connection may move, and records the time of user code for each message.
    """

    def __init__(
        self,
        executor: UserExecutor,
        envelope: Envelope,
        receive: Receive | None,
        send: Send | None,
        first: Message | None,
    ) -> None:
        super().__init__(executor, "websocket", receive, send, first)
        self._note_turn = envelope.note_turn
        #: When user code got its current message; 0 if it has none.
        self._turn_began = 0.0
        self._is_direct = envelope.is_direct
        #: Set when user code accepts the WebSocket.
        self._receiver: UserSocketReceiver | WorkerSocketReceiver | None = None
        self._has_disconnect = False  # user code has received it

    def _make_receiver(self) -> UserSocketReceiver | WorkerSocketReceiver:
        raise NotImplementedError

    async def receive(self) -> Message:
        if self._turn_began and self._note_turn is not None:
            self._note_turn(stopwatch() - self._turn_began)
        self._turn_began = 0.0
        message = await self._receive_message()
        if message["type"] == "websocket.receive":
            self._turn_began = stopwatch()
        else:
            self._has_disconnect = message["type"] == "websocket.disconnect"
        return message

    async def _receive_message(self) -> Message:
        while True:
            receiver = self._receiver
            if receiver is not None and receiver.socket is not None and not self._inbox:
                return await receiver.socket.receive()
            try:
                return await super().receive()
            except _MovedError:
                pass

    async def send(self, message: Message) -> None:
        if self.is_closed or self._has_disconnect:
            # Yield, so that code in a loop can still receive the disconnect, or its cancellation.
            await LoopClock().sleep(0)
            if message["type"] == "websocket.send":
                raise ClientDisconnectedError
            return
        receiver = self._receiver
        if receiver is None:
            if message["type"] == "websocket.accept" and self._is_direct:
                receiver = self._receiver = self._make_receiver()
                await super().send({**message, SOCKET_RECEIVER: receiver})
                if self._is_closed:
                    receiver.give_up()
                await receiver.is_decided.wait()
            else:
                await super().send(message)
            return
        if not receiver.is_decided.is_set():
            await receiver.is_decided.wait()
        if receiver.socket is None:
            await super().send(message)
            return
        try:
            await receiver.socket.send(message)
        except OSError:
            if message["type"] == "websocket.send":
                raise ClientDisconnectedError from None


class SocketPipe(_SocketPipe):
    """The pipe of a WebSocket whose connection may move to the user's own loop."""

    _receiver: UserSocketReceiver | None

    def _make_receiver(self) -> UserSocketReceiver:
        return UserSocketReceiver(self._executor.user_loop, self)

    def end_readers(self) -> None:
        """Make waiting readers read from the connection, which has moved here."""
        self._inbox.extend(_MovedError() for _ in self._readers)
        self._deliver(None)

    # ---- on the worker's loop

    def stop_passing(self) -> None:
        """Read no more messages: the connection is moving to the user-code loop."""
        if self._reading is not None:
            self._reading.cancel()
        if self._is_leaving:
            self.outbox.clear()  # drops a close that would follow the accept
            self.leave()

    def leave(self) -> None:
        if self._receiver is not None and self._receiver.is_expected:
            self._receiver.post(self._receiver.leave)
        else:
            super().leave()

    def close(self) -> None:
        super().close()
        if self._receiver is not None:
            self._receiver.give_up()

    def _read_more(self) -> None:
        if self._receiver is None or not self._receiver.is_expected:
            super()._read_more()

    def _note_sent(self, message: Message) -> None:
        super()._note_sent(message)
        if message["type"] == "websocket.accept" and self._receiver is not None:
            self._receiver.give_up()


class WorkerSocketReceiver:
    """The worker's loop as the `SocketReceiver` of a WebSocket whose connection is already on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.post = loop.call_soon_threadsafe
        self.socket: OpenSocket | None = None
        self.is_decided = asyncio.Event()
        self.is_decided.set()

    def give_up(self) -> None:
        """Do nothing: messages never wait."""

    def expect_socket(self) -> None:
        """Do nothing: the pipe reads only while user code does."""

    def take_socket(self, socket: OpenSocket) -> None:
        """Take the connection: all messages pass through it from now on."""
        self.socket = socket

    def drop_socket(self, socket: OpenSocket) -> None:
        """Do nothing: the session ends the connection."""


class DirectSocketPipe(_SocketPipe, DirectPipe):
    """The pipe of a WebSocket for user code on the worker's loop."""

    def _make_receiver(self) -> WorkerSocketReceiver:
        return WorkerSocketReceiver(self._executor.loop)


def open_socket_pipe(
    executor: UserExecutor,
    envelope: Envelope,
    receive: Receive | None,
    send: Send | None,
    first: Message | None,
) -> MessagePipe:
    """Return the kind of pipe for the loop on which the executor runs async code."""
    pipe = DirectSocketPipe if executor.is_on_worker_loop else SocketPipe
    return pipe(executor, envelope, receive, send, first)
