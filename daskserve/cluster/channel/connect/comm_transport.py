"""The transport for the frames of a channel over a Dask comm, and the choice between the two transports.

Writing and reading one message of a Dask comm takes 0.1 ms of CPU time, mostly for features that requests do
not need. If a comm is plain TCP, `SocketTransport` takes over its socket and needs an eighth of that time.
`CommTransport` uses the comms of all other protocols (TLS, UCX, WebSockets) unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any

from daskserve.cluster.channel.connect.handshake import Wire
from daskserve.cluster.channel.wire.frames import FramePacker, OutOfBand, unpack
from daskserve.cluster.channel.wire.segments import Segments
from daskserve.cluster.channel.wire.transport import (
    FRAME_WORK,
    Receiver,
    Refuser,
    SocketTransport,
    Traffic,
    Transport,
)
from daskserve.cluster.distributed_internals import (
    detach_socket,
    is_plain_tcp,
    socket_of,
    stream_of,
    to_serialize,
)

logger = logging.getLogger("daskserve.channel")


class CommTransport:
    """A Dask comm of any kind."""

    def __init__(self, comm: Any) -> None:
        self.is_relayed = self.is_closed = False
        self._comm = comm
        #: Counts sent bytes only: a Dask comm does not report how much it read.
        self.traffic = Traffic()
        self.peer_address = str(comm.peer_address)
        self.unsent: list[Any] = []
        self._has_unsent = asyncio.Event()
        self.turn = 0

    @property
    def sock(self) -> socket.socket | None:
        return socket_of(self._comm)

    def share(self, segments: Segments, *, begins: bool) -> None:
        """Do nothing: a Dask comm of another protocol may lead anywhere."""

    async def run(self, receive: Receiver, refuse: Refuser) -> None:
        writer = asyncio.create_task(self._write(refuse), name="daskserve-channel-write")
        try:
            while True:
                try:
                    frames = await self._comm.read()
                except OSError:
                    return
                receive(frames)
        except (TypeError, ValueError, LookupError, AttributeError):
            # The peer does not speak this protocol, so nothing more from it can be trusted.
            self.traffic.invalid += 1
            logger.exception("Received an invalid frame from %s; closed the connection", self.peer_address)
        finally:
            writer.cancel()
            self._comm.abort()

    def post(self, frame: Any, work: int = FRAME_WORK) -> None:
        self.unsent.append(frame)
        self._has_unsent.set()

    def flush(self) -> None:
        """Do nothing: a separate task writes."""

    def take_note(self, note: Sequence[Any]) -> None:
        """Do nothing: the other end has a comm too, and shares no memory."""

    def abort(self) -> None:
        self._comm.abort()  # wakes the reader, which finishes

    async def _write(self, refuse: Refuser) -> None:
        while True:
            await self._has_unsent.wait()
            if self._comm.closed():
                return
            self._has_unsent.clear()
            frames, self.unsent = self.unsent, []
            self.turn += 1
            try:
                await self._send(frames)
            except OSError:
                self._comm.abort()
                return
            except (TypeError, ValueError, OverflowError):
                # If a frame cannot be packed, the others must still be sent.
                await self._write_one_by_one(frames, refuse)
            except Exception:
                # Any other error of a transport: without a writer no request would ever be answered.
                logger.exception("Writing to %s failed; closed the connection", self.peer_address)
                self._comm.abort()
                return

    async def _write_one_by_one(self, frames: list[Any], refuse: Refuser) -> None:
        for frame in frames:
            try:
                await self._send([frame])
            except (TypeError, ValueError, OverflowError) as error:
                refuse(frame, error)
            except OSError:
                self._comm.abort()
                return

    async def _send(self, frames: Sequence[Any]) -> None:
        if self.peer_address.startswith("inproc://"):
            # Such a comm passes objects on unchanged, including marked buffers and the sender's memory.
            body, large = FramePacker().pack(frames)
            frames = unpack([body, *map(bytearray, large)])
        else:
            frames = [_for_dask(frame) for frame in frames]
        self.traffic.sent_bytes += _written(await self._comm.write(frames))


def _written(found: Any) -> int:
    # TCP and TLS return the number of bytes written; other protocols may not.
    return found if isinstance(found, int) else 0


def _for_dask(value: Any) -> Any:
    """Return frames whose out-of-band values are marked for Dask."""
    kind = type(value)
    if kind is OutOfBand:
        return to_serialize(value.data)
    if kind is tuple or kind is list:
        return kind(map(_for_dask, value))
    if kind is dict:
        return {key: _for_dask(each) for key, each in value.items()}
    return value


class _CommWire:
    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.peer_address = str(comm.peer_address)

    def abort(self) -> None:
        self._comm.abort()


class StreamWire(_CommWire):
    """A new comm over TCP, read as bytes: Dask's own `read` accepts any size, and unpickles."""

    async def send(self, data: bytes) -> None:
        await self._stream.write(data)

    async def receive(self, size_bytes: int) -> bytes:
        return bytes(await self._stream.read_bytes(size_bytes))

    @property
    def _stream(self) -> Any:
        stream = stream_of(self._comm)
        if stream is None:
            raise OSError("the connection is closed")
        return stream


class MessageWire(_CommWire):
    """A new comm of another protocol, or within a process, which carries messages instead of bytes."""

    async def send(self, data: bytes) -> None:
        await self._comm.write(data)

    async def receive(self, size_bytes: int) -> bytes:
        found = await self._comm.read()
        if not isinstance(found, bytes) or len(found) != size_bytes:
            raise ValueError("it sent something other than a handshake")
        return found


def wire_of(comm: Any) -> Wire:
    """Return a new comm as the handshake uses it."""
    return MessageWire(comm) if stream_of(comm) is None else StreamWire(comm)


def take_over(comm: Any, *, by_socket: bool = True) -> Transport:
    """Return the transport for a comm, and take the comm over; the caller must not use the comm any more.

    Call this before the other side sends anything, because bytes that the comm has buffered would be lost.
    Both sides must choose the same kind of transport, which they do if the comm connects them directly. If
    the comm ends at the scheduler, which forwards the bytes, ``by_socket`` says whether the far connection is
    plain TCP too.
    """
    if not (by_socket and is_plain_tcp(comm)):
        return CommTransport(comm)
    peer_address = str(comm.peer_address)
    return SocketTransport(detach_socket(comm), peer_address)
