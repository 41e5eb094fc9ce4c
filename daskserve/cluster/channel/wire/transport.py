"""The transport for the frames of a channel over a socket, once the handshake is done.

It sends all frames that are posted in one iteration of the event loop together. Such a batch is one message::

    magic, number of parts        4 + 4 bytes
    size of each part             8 bytes each
    part 0                        the list of frames, in msgpack
    parts 1...                    large bytes, which part 0 refers to by number; never copied together

Each large part is read into its own memory, so that it is never copied and does not keep other parts alive.
Everything else goes through one small buffer.

All numbers are little-endian. Between processes of one machine, buffers of 1 MiB and more are not sent as
parts: part 0 refers to shared memory instead, see `daskserve.cluster.channel.wire.sharing`.

This module does not import Dask, not even indirectly, because this takes longer than the rest of a child's
start.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from daskserve.cluster.channel.wire.frames import (
    CONNECTION,
    LARGE_BYTES,
    MAX_PARTS,
    MEMORY,
    Buffer,
    FramePacker,
    unpack,
)
from daskserve.cluster.channel.wire.readiness import Readiness
from daskserve.cluster.channel.wire.segments import Segments
from daskserve.cluster.channel.wire.sharing import MessageSegments, Sharing
from daskserve.common.formatting import shown_size

logger = logging.getLogger("daskserve.channel")

Frames = Sequence[Any]
#: Called with a frame that cannot be sent, and the reason.
Refuser = Callable[[Any, Exception], None]

#: When the posted frames reach this amount of work, they are sent at once, so that the other side can start
#: on them. A handle call or its answer counts half as much as most other frames.
MAX_WORK = 32
CALL_WORK, FRAME_WORK = 1, 2
#: Called with the frames of each message; an error that it raises ends the connection.
Receiver = Callable[[Frames], None]

MAGIC = b"dsv1"
HEAD = struct.Struct("<4sI")
SIZE = struct.Struct("<Q")
#: Maximum size of a message, all parts together.
MAX_MESSAGE_BYTES = 16 * 1024**3
#: The buffer for parts that are not large.
BUFFER_BYTES = 256 * 1024
#: Parts of at least this size are mapped, and take memory only as their bytes arrive. Below this size, glibc
#: reuses freed memory; above it, glibc returns the memory to the kernel.
MAPPED_BYTES = 32 * 1024 * 1024

#: Large parts are written to the socket in pieces of this size.
PIECE_BYTES = 256 * 1024
#: Maximum number of bytes written to the socket in one iteration of the event loop.
TURN_BYTES = 1024 * 1024


class Traffic:
    """Counts the bytes of several connections, and how many of these ended with invalid frames."""

    __slots__ = ("invalid", "received_bytes", "sent_bytes")

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.invalid = 0


class Transport(Protocol):
    """One connection, as a channel uses it."""

    #: Whether the connection leads through the scheduler.
    is_relayed: bool

    #: Counts the connection's bytes.
    traffic: Traffic

    #: Set by the channel when the connection has ended.
    is_closed: bool

    @property
    def peer_address(self) -> str:
        """Address of the other end."""

    @property
    def sock(self) -> socket.socket | None:
        """The underlying socket, or None if there is none; for inspection only."""

    @property
    def unsent(self) -> Frames:
        """The posted frames that were not written at all; they stay here after the connection ends."""

    @property
    def turn(self) -> int:
        """Number of writes so far; a frame posted in the current turn may still be changed."""

    def share(self, segments: Segments, *, begins: bool) -> None:
        """Send large buffers through shared memory where possible; call this before `run`.

        Parameters
        ----------
        begins : bool
            Whether this side may send before it has received anything.
        """

    async def run(self, receive: Receiver, refuse: Refuser) -> None:
        """Read and write until either side closes."""

    def post(self, frame: Any, work: int = FRAME_WORK) -> None:
        """Send a frame with the others of this loop iteration, or at once if they reach `MAX_WORK`."""

    def flush(self) -> None:
        """Send the posted frames now instead of at the end of this loop iteration."""

    def take_note(self, note: Sequence[Any]) -> None:
        """Process a note of the other end about shared memory."""

    def abort(self) -> None:
        """End the connection at once; idempotent."""


class Outbox:
    """The sending half of a `Transport` that never blocks on sending."""

    def __init__(self) -> None:
        self.turn = 0
        #: Whether the connection has ended, so that nothing more is sent.
        self.is_closed = False
        #: Set by `Transport.run`, before anything is sent.
        self._refuse: Refuser | None = None
        self._packer = FramePacker()
        self.unsent: list[Any] = []
        self._work = 0
        self._is_flushing = False

    def post(self, frame: Any, work: int = FRAME_WORK) -> None:
        self.unsent.append(frame)
        self._work += work
        if self._work >= MAX_WORK:
            self.flush()
        elif not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush_turn)

    def flush(self) -> None:
        if not self.unsent or not self._can_send():
            return
        frames, self.unsent = self.unsent, []
        self._work = 0
        self.turn += 1
        try:
            self._send(frames)
        except (TypeError, ValueError, OverflowError):
            self._send_one_by_one(frames)

    def _flush_turn(self) -> None:
        self._is_flushing = False
        self.flush()

    def _send_one_by_one(self, frames: list[Any]) -> None:
        # A frame that cannot be packed must not prevent sending the others.
        assert self._refuse is not None
        for frame in frames:
            try:
                self._send([frame])
            except (TypeError, ValueError, OverflowError) as error:
                self._refuse(frame, error)

    def _can_send(self) -> bool:
        """Return whether frames can be sent now; otherwise they stay in the outbox."""
        raise NotImplementedError

    def _send(self, frames: list[Any]) -> None:
        """Pack frames into one message and send it.

        Raises
        ------
        TypeError, ValueError, OverflowError
            A frame cannot be packed; nothing was sent.
        """
        raise NotImplementedError


def _memory(size_bytes: int) -> memoryview:
    """Return writable memory for a large part."""
    if size_bytes < MAPPED_BYTES:
        return memoryview(bytearray(size_bytes))
    # Private, so that a forked process does not share later writes.
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class PartReader:
    """Splits a byte stream into messages. Pure.

    Write into `room`, then call `filled` with the number of bytes.

    Parameters
    ----------
    magic : bytes
        The first four bytes of each message.
    receive : callable
        Called with the parts of each message. The part of a single-part message is valid until it returns.
    """

    def __init__(self, magic: bytes, receive: Callable[[Sequence[Buffer]], None]) -> None:
        self._magic = magic
        self._receive = receive
        self._view = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._sizes: Sequence[int] = ()
        self._parts: list[Buffer] = []
        # The large part being read, and how much of it has arrived.
        self._large: memoryview | None = None
        self._large_filled = 0

    def room(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        if self._large is not None:
            return self._large[self._large_filled :]
        return self._view[self._end :]

    def filled(self, size_bytes: int) -> None:
        """Process bytes that were written into `room`.

        Raises
        ------
        ValueError
            The bytes are not a message.
        Exception
            An error that the receiver raised.
        """
        if self._large is None:
            self._end += size_bytes
        else:
            self._large_filled += size_bytes
            if self._large_filled < len(self._large):
                return
            self._parts.append(self._large)
            self._large = None
        while self._large is None and self._advance():
            pass
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end > BUFFER_BYTES // 2 and self._start:
            left = bytes(self._view[self._start : self._end])
            self._view[: len(left)] = left
            self._start, self._end = 0, len(left)

    def _advance(self) -> bool:
        """Consume one head, part or message; return False if more bytes are needed."""
        if not self._sizes:
            return self._read_head()
        done = len(self._parts)
        if done == len(self._sizes):
            parts, self._parts, self._sizes = self._parts, [], ()
            self._receive(parts)
            return True
        size = self._sizes[done]
        there = min(size, self._end - self._start)
        if there < size < LARGE_BYTES:
            return False
        part = self._view[self._start : self._start + there]
        self._start += there
        if there == size and len(self._sizes) == 1:
            self._parts.append(part)
        elif size < LARGE_BYTES:
            self._parts.append(bytes(part))
        else:
            large = _memory(size)
            large[:there] = part
            if there == size:
                self._parts.append(large)
            else:
                self._large, self._large_filled = large, there
        return True

    def _read_head(self) -> bool:
        if self._end - self._start < HEAD.size:
            return False
        magic, count = HEAD.unpack_from(self._view, self._start)
        if magic != self._magic or not 0 < count <= MAX_PARTS:
            found = bytes(self._view[self._start : self._start + HEAD.size])
            raise ValueError(f"no message begins with {found!r}")
        start = self._start + HEAD.size
        if self._end - start < SIZE.size * count:
            return False
        sizes = self._sizes = struct.unpack_from(f"<{count}Q", self._view, start)
        if (count > 1 or sizes[0] >= LARGE_BYTES) and sum(sizes) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {sum(sizes)} bytes exceeds the maximum of {MAX_MESSAGE_BYTES}")
        self._start = start + SIZE.size * count
        return True


class SocketTransport(Outbox):
    """A transport over a connected stream socket, which it owns and closes."""

    def __init__(self, sock: socket.socket, peer_address: str) -> None:
        super().__init__()
        self.is_relayed = False
        self.sock = sock
        self.traffic = Traffic()
        self._sharing = Sharing(None, self._send_note)
        self.peer_address = peer_address
        #: The messages to write; a loan is a message whose large buffers must be copied first.
        self._pieces: deque[Buffer | MessageSegments] = deque()
        self._is_full = self._is_broken = self._is_aborted = False
        self._readiness: Readiness | None = None
        self._lost: asyncio.Future[None] | None = None
        self._parts = PartReader(MAGIC, self._unpack)
        self._receive: Receiver | None = None

    def share(self, segments: Segments, *, begins: bool) -> None:
        self._sharing = Sharing(segments, self._send_note, begins=begins)

    async def run(self, receive: Receiver, refuse: Refuser) -> None:
        self._receive, self._refuse = receive, refuse
        if self._is_aborted:
            return
        self._lost = asyncio.get_running_loop().create_future()
        try:
            self.sock.setblocking(False)
            if self.sock.family in (socket.AF_INET, socket.AF_INET6):
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._readiness = Readiness(self.sock, self._read)
            self._sharing.begin()
            self.flush()
            await self._lost
        finally:
            self.abort()

    def take_note(self, note: Sequence[Any]) -> None:
        self._sharing.take_note(note)
        self.flush()

    def abort(self) -> None:
        if self._is_aborted:
            return
        self._is_aborted = True
        self._pieces.clear()
        self._sharing.close()
        if self._readiness is not None:
            self._readiness.close()
        self.sock.close()
        if self._lost is not None and not self._lost.done() and not self._lost.get_loop().is_closed():
            self._lost.set_result(None)

    # ---- private

    def _read(self) -> bool:
        """Read and process available bytes; return whether there may be more."""
        try:
            size_bytes = self.sock.recv_into(self._parts.room())
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            size_bytes = 0
        if not size_bytes:
            self.abort()
            return False
        self.traffic.received_bytes += size_bytes
        try:
            self._parts.filled(size_bytes)
        except ConnectionResetError as error:
            logger.info("Lost %s: %s", self.peer_address, error)
            self.abort()
        except Exception:
            self.traffic.invalid += 1
            logger.exception("Received an invalid frame from %s; closed the connection", self.peer_address)
            self.abort()
        except BaseException:
            self.abort()  # the message was only partly processed
            raise
        return True

    def _read_to_end(self) -> None:
        while not self._is_aborted and self._read():
            pass
        self.abort()

    def _unpack(self, parts: Sequence[Buffer]) -> None:
        assert self._receive is not None
        self._receive(unpack(parts, self._open_shared))

    def _open_shared(self, reference: bytes) -> memoryview:
        found = self._sharing.open(reference)
        self.traffic.received_bytes += found.nbytes
        return found

    def _can_send(self) -> bool:
        # Frames are kept before `run`, and until it is known whether the other end reads shared memory.
        is_ready = self._readiness is not None and self._sharing.can_lend is not None
        return is_ready and not self._is_broken and not self._is_aborted

    def _send_note(self, note: Sequence[Any]) -> None:
        if not self._is_broken and not self._is_aborted:
            self._send([(MEMORY, CONNECTION, note)])

    def _send(self, frames: list[Any]) -> None:
        try:
            body, large = self._packer.pack(frames, self._sharing.lend)
        finally:
            message_segments, self._sharing.message_segments = self._sharing.message_segments, None
        if large and len(body) + sum(map(len, large)) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"it exceeds {shown_size(MAX_MESSAGE_BYTES)}; send it in parts, or send only its location"
            )
        pieces = self._message(body, large)
        if message_segments is None:
            self._pieces += pieces
        else:
            message_segments.frames, message_segments.pieces = frames, pieces
            self._pieces.append(message_segments)
        if not self._is_full:
            self._write()

    def _message(self, body: bytes, large: Sequence[memoryview]) -> list[Buffer]:
        head = HEAD.pack(MAGIC, 1 + len(large)) + SIZE.pack(len(body))
        if not large and len(body) < PIECE_BYTES:
            return [head + body]
        pieces: list[Buffer] = [head + b"".join([SIZE.pack(len(view)) for view in large])]
        for view in (memoryview(body), *large):
            pieces += [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]
        return pieces

    def _lend(self, message_segments: MessageSegments) -> bool:
        """Copy some of a message's buffers to shared memory; return whether it can be written."""
        try:
            if not message_segments.copy_more():
                return False
            pieces = message_segments.pieces
            self._sharing.sent(message_segments)
            self.traffic.sent_bytes += message_segments.size_bytes
        except OSError as error:
            logger.warning("Sending a large value over the connection: no shared memory (%s)", str(error))
            pieces = self._message(*self._packer.pack(message_segments.frames))
        self._pieces.popleft()
        self._pieces.extendleft(reversed(pieces))
        return True

    def _write(self) -> None:
        """Write up to `TURN_BYTES` now, and the rest whenever the socket is writable."""
        left_bytes = TURN_BYTES
        while self._pieces and left_bytes > 0:
            piece = self._pieces[0]
            if isinstance(piece, MessageSegments):
                if self._lend(piece):
                    continue
                break
            try:
                sent_bytes = self.sock.send(piece)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                # Nothing more can be sent, but the bytes that the other side sent earlier can still be read.
                # Read them in a later iteration, because `_write` may run during a read.
                self._is_broken = True
                self._pieces.clear()
                asyncio.get_running_loop().call_soon(self._read_to_end)
                break
            self.traffic.sent_bytes += sent_bytes
            left_bytes -= sent_bytes
            if sent_bytes == len(piece):
                self._pieces.popleft()
            else:
                self._pieces[0] = memoryview(piece)[sent_bytes:]
        if bool(self._pieces) != self._is_full:
            self._is_full = not self._is_full
            assert self._readiness is not None
            self._readiness.on_writable(self._write if self._is_full else None)
