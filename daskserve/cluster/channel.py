"""Channels: one persistent, multiplexed connection between two processes that carries request streams.

Problem: an actor call costs 0.4 ms and one message each way; requests need streaming both ways,
cancellation and tens of thousands of calls a second. Choice: take over one Dask comm per pair of
processes (so TLS and the other transports come with it; see `daskserve.cluster.transport`) and send lists of
small frames both ways, all frames of one event-loop turn in one write. Large bytes go out of band, uncopied.

Frames (tuples; the first two fields are the kind and the stream's number, chosen by the side that opens)::

    (OPEN,   n, name, incarnation, kind, head, payload)   open a stream to an actor of the other side;
                                                          then the seconds left of its deadline, if it has one
    (DATA,   n, message)                                  one ASGI (or ``call.*``) message, either way
    (END,    n, ongoing, queued)                          the handler is done; carries the actor's load
    (ERROR,  n, pickled error)                            the handler raised
    (CANCEL, n)                                           the opener went away
    (CREDIT, n, size)                                     the other side may send so many more bytes

Either way messages go on credit, which is given as they are read, so that a body is not piled up at a slow
reader: a handler may be `WINDOW_BYTES` ahead of the opener; the opener sends one message of a request ahead,
and as much more once the handler has begun to read. So a replica that refuses a request has not swallowed
more of its body than the router keeps to give again.

Streams opened by the dialling side have even numbers, by the accepting side odd ones. Frame kinds that a
side does not know are ignored, so flow control can be added as a frame kind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from distributed.comm import connect
from distributed.protocol import to_serialize

from daskserve.cluster.transport import Frames, Transport, take_over
from daskserve.deadlines import until
from daskserve.errors import ActorLostError
from daskserve.payload import dump_error, load_error, message_bytes
from daskserve.types import (
    ActorAddress,
    Envelope,
    EnvelopeKind,
    Load,
    Message,
    Payload,
    Receive,
    Send,
    WorkerAddress,
)

logger = logging.getLogger("daskserve.channel")

OPEN, DATA, END, ERROR, CANCEL, CREDIT = range(6)

#: How much of a body may be on its way at a time. Credit for half of it is given at once, so that streams of
#: small messages need no frames for it.
WINDOW_BYTES = 1024 * 1024

#: Bytes values from this size on leave the msgpack part of a write, so that they are not copied into it.
OUT_OF_BAND_BYTES = 32 * 1024

#: The worker handler that a dialling side names in its first message.
HANDLER = "daskserve_channel"
#: What the accepting side says before both go over to frames.
READY = "ready"

#: Answers one stream: (actor name, incarnation, envelope, receive, send) -> load of the actor.
Dispatch = Callable[[str, int, Envelope, Receive, Send], Awaitable[Load]]


def _wire(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)) and len(value) >= OUT_OF_BAND_BYTES:
        return to_serialize(value)
    return value


def _wire_payload(payload: Payload | None) -> Any:
    if payload is None:
        return None
    return (_wire(payload.data), tuple(to_serialize(buffer) for buffer in payload.buffers))


def _unwire_payload(value: Any) -> Payload | None:
    return None if value is None else Payload(value[0], tuple(value[1]))


def _wire_message(message: Message) -> Message:
    body = message.get("body")
    if body is not None and len(body) >= OUT_OF_BAND_BYTES:
        return {**message, "body": to_serialize(body)}
    payload = message.get("payload")
    if payload is not None:
        return {**message, "payload": _wire_payload(payload)}
    return message


def _unwire_message(message: Message) -> Message:
    if "payload" in message:
        message["payload"] = _unwire_payload(message["payload"])
    return message


def _is_last(message: Message) -> bool:
    """Whether nothing follows of what a client sends: its body is whole, or it has gone."""
    kind = message["type"]
    if kind.startswith("websocket."):
        return bool(kind == "websocket.disconnect")
    return kind == "http.disconnect" or not message.get("more_body", False)


class _Window:
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


class Channel:
    """The streams of one connection; `serve` runs until it ends."""

    def __init__(self, transport: Transport, dispatch: Dispatch, *, first_stream: int) -> None:
        self._transport = transport
        self._post = transport.post
        self._dispatch = dispatch
        self._next_stream = first_stream
        self._opened: dict[int, asyncio.Queue[Message | Load | BaseException]] = {}
        self._inboxes: dict[int, asyncio.Queue[Message]] = {}
        #: What this side may send: of a request on the streams it opened, of a response on the others.
        self._windows: dict[int, _Window] = {}
        self._handlers: dict[int, asyncio.Task[None]] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return (
            f"<Channel to {self._transport.peer_address} {state} opened={len(self._opened)} "
            f"handling={len(self._handlers)}>"
        )

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def serve(self) -> None:
        """Carry streams until either side closes; every open one then ends with an error."""
        try:
            await self._transport.run(self._receive, self._refuse)
        finally:
            self._finish()

    def close(self) -> None:
        """End the connection at once."""
        if not self._is_closed:
            self._transport.abort()

    async def request(self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send) -> Load:
        """Open a stream to an actor of the other side and carry it to its end.

        Raises
        ------
        ActorLostError
            The connection ended first; ``begun`` tells whether the request may have been seen.
        Exception
            What the actor's handler raised.
        """
        if self._is_closed:
            raise ActorLostError(f"The connection to {address.worker} is closed.", begun=False)
        stream = self._next_stream
        self._next_stream += 2
        inbox: asyncio.Queue[Message | Load | BaseException] = asyncio.Queue()
        self._opened[stream] = inbox
        frame = (
            OPEN,
            stream,
            address.name,
            address.incarnation,
            envelope.kind.value,
            envelope.head,
            _wire_payload(envelope.payload),
        )
        deadline = envelope.deadline
        pump = None
        taken_bytes = 0
        if envelope.kind is EnvelopeKind.HTTP:
            self._windows[stream] = _Window(1)  # a single message, however large
            # Made before anything is posted: what it posts at once then leaves in one piece with that.
            pump = asyncio.create_task(self._pump(stream, receive), name="daskserve-channel-pump")
        self._post(frame if deadline is None else (*frame, deadline - asyncio.get_running_loop().time()))
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, Load):
                    return item
                if isinstance(item, BaseException):
                    raise item
                await send(item)
                taken_bytes += message_bytes(item)
                if taken_bytes >= WINDOW_BYTES // 2:
                    self._post((CREDIT, stream, taken_bytes))
                    taken_bytes = 0
        except BaseException:
            if stream in self._opened and not self._is_closed:
                self._post((CANCEL, stream))
            raise
        finally:
            self._opened.pop(stream, None)
            self._windows.pop(stream, None)
            if pump is not None:
                pump.cancel()

    async def _pump(self, stream: int, receive: Receive) -> None:
        window = self._windows[stream]
        while stream in self._opened:
            message = await receive()
            self._post((DATA, stream, _wire_message(message)))
            if _is_last(message):
                # A disconnect after the body reaches us as the cancellation of the whole request.
                return
            if not window.take(message_bytes(message)):
                await window.wait()

    def _refuse(self, frame: Any, error: Exception) -> None:
        """End the stream of a frame that cannot be sent."""
        logger.error("A message of stream %s cannot be sent: %s", frame[1], error)
        problem = TypeError(f"A message holds a value that cannot be sent: {error}")
        if frame[1] in self._opened:
            self._opened[frame[1]].put_nowait(problem)
        else:
            self._post((ERROR, frame[1], dump_error(problem)))

    def _receive(self, frames: Frames) -> None:
        for frame in frames:
            self._receive_frame(frame)

    def _receive_frame(self, frame: Any) -> None:
        kind, stream = frame[0], frame[1]
        if kind == DATA:
            message = _unwire_message(frame[2])
            if stream in self._opened:
                self._opened[stream].put_nowait(message)
            elif stream in self._inboxes:
                self._inboxes[stream].put_nowait(message)
        elif kind == END:
            if stream in self._opened:
                self._opened[stream].put_nowait(Load(frame[2], frame[3]))
        elif kind == ERROR:
            if stream in self._opened:
                self._opened[stream].put_nowait(load_error(frame[2]))
        elif kind == OPEN:
            self._accept_stream(stream, *frame[2:])
        elif kind == CANCEL and stream in self._handlers:
            self._handlers[stream].cancel()
        elif kind == CREDIT and stream in self._windows:
            self._windows[stream].give(frame[2])

    def _accept_stream(
        self,
        stream: int,
        name: str,
        incarnation: int,
        kind: str,
        head: Mapping[str, Any],
        payload: Any,
        left_s: float | None = None,
    ) -> None:
        deadline = None if left_s is None else asyncio.get_running_loop().time() + left_s
        envelope = Envelope(EnvelopeKind(kind), head, _unwire_payload(payload), deadline)
        self._inboxes[stream] = asyncio.Queue()
        self._windows[stream] = _Window(WINDOW_BYTES)
        task = self._handlers[stream] = asyncio.create_task(
            self._handle(stream, name, incarnation, envelope), name="daskserve-channel-handle"
        )
        # Not in the task itself: one that is cancelled before its first step never gets there.
        task.add_done_callback(lambda _: self._forget(stream))

    def _forget(self, stream: int) -> None:
        for known in (self._inboxes, self._windows, self._handlers):
            known.pop(stream, None)

    async def _handle(self, stream: int, name: str, incarnation: int, envelope: Envelope) -> None:
        inbox, window = self._inboxes[stream], self._windows[stream]
        taken_bytes = WINDOW_BYTES  # whoever begins to read a body wants more than its first message

        async def receive() -> Message:
            nonlocal taken_bytes
            message = await inbox.get()
            taken_bytes += message_bytes(message)
            if taken_bytes >= WINDOW_BYTES // 2 and not _is_last(message):
                self._post((CREDIT, stream, taken_bytes))
                taken_bytes = 0
            return message

        async def send(message: Message) -> None:
            self._post((DATA, stream, _wire_message(message)))
            if not window.take(message_bytes(message)):
                await window.wait()

        try:
            answering: Any = self._dispatch(name, incarnation, envelope, receive, send)
            if envelope.deadline is not None:
                answering = until(envelope.deadline, answering, f"The time for a request to {name} is over.")
            load = await answering
            self._post((END, stream, load.ongoing, load.queued))
        except asyncio.CancelledError:
            # By its opener, who does not listen any more, or because the actor was stopped under it.
            stopped = ActorLostError(f"{name} was stopped.", begun=True)
            self._post((ERROR, stream, dump_error(stopped)))
            raise
        except Exception as error:
            # The opener gets every error of the handler; nothing is lost here.
            self._post((ERROR, stream, dump_error(error)))

    def _finish(self) -> None:
        self._is_closed = True
        self._transport.abort()
        for inbox in self._opened.values():
            inbox.put_nowait(
                ActorLostError(f"The connection to {self._transport.peer_address} was lost.", begun=True)
            )
        for task in list(self._handlers.values()):
            task.cancel()


class ChannelPool:
    """The channels of one process, one per other process, opened on first use."""

    def __init__(
        self, dispatch: Dispatch, *, connection_args: Mapping[str, Any], connect_timeout_s: float = 5.0
    ) -> None:
        self._dispatch = dispatch
        self._connection_args = connection_args
        self._connect_timeout_s = connect_timeout_s
        self._dialled: dict[WorkerAddress, asyncio.Task[Channel]] = {}
        self._serving: dict[Channel, asyncio.Task[None]] = {}

    async def accept(self, comm: Any) -> None:
        """Serve a connection that the other side opened; returns when it ends."""
        # Once the other side has read this, and before it has sent anything, neither uses the comm any more.
        await comm.write(READY)
        channel = Channel(take_over(comm), self._dispatch, first_stream=1)
        task = asyncio.current_task()
        assert task is not None
        self._serving[channel] = task
        try:
            await channel.serve()
        finally:
            self._serving.pop(channel, None)

    async def request(self, address: ActorAddress, envelope: Envelope, receive: Receive, send: Send) -> Load:
        """Carry one request to an actor elsewhere; see `Channel.request`."""
        channel = _channel_in(self._dialled.get(address.worker))
        if channel is None:
            channel = await self._channel(address.worker)
        return await channel.request(address, envelope, receive, send)

    def drop(self, worker: WorkerAddress) -> None:
        """Close the channel to a worker that is known to be gone, so that its requests fail at once."""
        dialled = self._dialled.pop(worker, None)
        if dialled is None:
            return
        channel = _channel_in(dialled)
        if channel is not None:
            channel.close()
        else:
            dialled.cancel()

    async def close(self) -> None:
        """Close every channel and wait until their tasks are gone."""
        for worker in list(self._dialled):
            self.drop(worker)
        tasks = list(self._serving.values())
        for channel in list(self._serving):
            channel.close()
        if tasks:
            await asyncio.wait(tasks, timeout=2)

    async def _channel(self, worker: WorkerAddress) -> Channel:
        task = self._dialled.get(worker)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._dial(worker), name="daskserve-channel-dial")
            # Looked at even if all who waited for it have given up meanwhile.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._dialled[worker] = task
        # Shielded: one caller that gives up must not end the dialling for the others.
        try:
            return await asyncio.shield(task)
        except OSError as error:
            raise ActorLostError(f"Worker {worker} cannot be reached: {error}", begun=False) from error
        except asyncio.CancelledError:
            if task.cancelled():
                raise ActorLostError(f"Worker {worker} left the cluster.", begun=False) from None
            raise

    async def _dial(self, worker: WorkerAddress) -> Channel:
        comm = await connect(worker, timeout=self._connect_timeout_s, **self._connection_args)
        comm.name = "daskserve channel"
        try:
            await comm.write({"op": HANDLER, "reply": False})
            answer = await comm.read()
            if answer != READY:
                raise OSError(f"{worker} does not take channels: {answer!r}")
        except BaseException:
            comm.abort()
            raise
        channel = Channel(take_over(comm), self._dispatch, first_stream=0)
        task = asyncio.create_task(self._serve_dialled(worker, channel), name="daskserve-channel")
        self._serving[channel] = task
        return channel

    async def _serve_dialled(self, worker: WorkerAddress, channel: Channel) -> None:
        try:
            await channel.serve()
        finally:
            self._serving.pop(channel, None)
            if _channel_in(self._dialled.get(worker)) is channel:
                del self._dialled[worker]


def _channel_in(dialled: asyncio.Task[Channel] | None) -> Channel | None:
    """Return the channel that dialling gave; None while, or if, there is none."""
    if dialled is None or not dialled.done() or dialled.cancelled() or dialled.exception() is not None:
        return None
    return dialled.result()
