"""Large buffers of one connection that travel in `daskserve.cluster.channel.wire.segments`: shared memory.

Each end offers the other a segment with a random token. An end that can read the token lives on the same
machine, with the same process numbers and the same user; in all other cases the buffers travel over the
connection. The notes that both ends exchange::

    (OFFER, process, descriptor, inode, token)    where my segments are, and a test
    (ANSWER, can_read)                            whether your segments can be read here
    (OPENED,)                                     your next reference was opened

A message refers to a segment by its descriptor in the sender's process, so the sender keeps it open until the
other end has opened it. A buffer that lies in a segment is not copied: the message refers to that segment. It
was received there and is sent on, or was copied there when the call was made (`Segments.copy`).
"""

from __future__ import annotations

import os
import secrets
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from daskserve.cluster.channel.wire.frames import Buffer
from daskserve.cluster.channel.wire.segments import (
    HAS_SEGMENTS,
    Mapping,
    MemorySegment,
    SegmentMemory,
    Segments,
    mapping_under,
)

OFFER, ANSWER, OPENED = range(3)

#: A reference to a buffer in a segment: its key, descriptor and inode, then the buffer's offset and size.
REFERENCE = struct.Struct("<QIQQQ")
#: Maximum number of bytes that are copied to shared memory in one iteration of the event loop.
STEP_BYTES = 2 * 1024 * 1024


class MessageSegments:
    """The segments that one message refers to, and the buffers that must be copied there first."""

    def __init__(self) -> None:
        #: The message: its frames, and the bytes to write to the socket once the buffers are copied.
        self.frames: Sequence[Any] = ()
        self.pieces: list[Buffer] = []
        #: In the order of the references: own segments, and received buffers that are sent on.
        self.lent: list[MemorySegment | memoryview] = []
        self.size_bytes = 0
        self._copies: deque[tuple[MemorySegment, memoryview]] = deque()
        self._copied_bytes = 0

    def add(self, segment: MemorySegment, data: memoryview) -> None:
        """Lend a segment into which data must be copied."""
        self.lent.append(segment)
        self._copies.append((segment, data))

    def copy_more(self) -> bool:
        """Copy up to `STEP_BYTES`; return whether all buffers are copied.

        Raises
        ------
        OSError
            There is no memory left.
        """
        left_bytes = STEP_BYTES
        while self._copies and left_bytes > 0:
            segment, data = self._copies[0]
            part = data[self._copied_bytes : self._copied_bytes + left_bytes]
            segment.write(part, self._copied_bytes)
            left_bytes -= len(part)
            self._copied_bytes += len(part)
            if self._copied_bytes == len(data):
                self._copies.popleft()
                self._copied_bytes = 0
        return not self._copies


class Sharing:
    """The shared memory of one connection.

    Parameters
    ----------
    segments : Segments or None
        None if this end offers none.
    send : callable
        Sends a note to the other end, which passes it to `take_note`.
    begins : bool
        Whether this end offers first; the other one then offers with its answer.
    """

    def __init__(
        self,
        segments: Segments | None,
        send: Callable[[Sequence[Any]], None],
        *,
        begins: bool = False,
    ) -> None:
        self._segments = segments
        self._send = send
        self._begins = begins
        self._token: MemorySegment | None = None
        #: Whether the other end reads this end's segments; None until it has answered an offer.
        self.can_lend: bool | None = False
        self._peer = 0
        #: The segments that were sent, in order, until the other end has opened them.
        self._lent: deque[MemorySegment | memoryview] = deque()
        #: The segments for the message that is being packed; the transport takes them.
        self.message_segments: MessageSegments | None = None

    def begin(self) -> None:
        """Send the first offer, if this end begins. `can_lend` is None until the other end answers."""
        if self._begins:
            self._offer()

    def take_note(self, note: Sequence[Any]) -> None:
        """Process a note of the other end."""
        kind, *rest = note
        if kind == OFFER:
            self._send((ANSWER, self._can_read(*rest)))
            if not self._begins:
                self._offer()
        elif kind == ANSWER:
            self.can_lend, self._token = rest[0], None
        elif kind == OPENED:
            opened = self._lent.popleft()
            if isinstance(opened, MemorySegment) and self._segments is not None:
                self._segments.keep(opened)

    def lend(self, view: memoryview) -> bytes | None:
        """Return a reference to a buffer, to be sent in its place; None if its bytes must be sent.

        `message_segments` holds the segments of the references of one message.
        """
        if not self.can_lend or self._segments is None:
            return None
        message_segments = self.message_segments or MessageSegments()
        found = mapping_under(view)
        if found is not None:
            holder: MemorySegment | SegmentMemory
            holder, at = found
            message_segments.lent.append(view)
        else:
            try:
                holder, at = self._segments.take(view.nbytes), 0
            except OSError:  # too many open files
                return None
            message_segments.add(holder, view)
        message_segments.size_bytes += view.nbytes
        self.message_segments = message_segments
        return REFERENCE.pack(holder.key, holder.descriptor, holder.inode, at, view.nbytes)

    def sent(self, message_segments: MessageSegments) -> None:
        """Keep the segments of a message until the other end has opened them."""
        self._lent += message_segments.lent

    def open(self, reference: bytes) -> memoryview:
        """Return the buffer that a reference names; call this in the order of the references.

        Raises
        ------
        ConnectionResetError
            The other end is gone.
        OSError, ValueError
            The buffer cannot be mapped.
        """
        if self._segments is None or not self._peer:
            raise ValueError("a message refers to shared memory that this end cannot read")
        found = self._segments.map(self._peer, *REFERENCE.unpack(reference))
        self._send((OPENED,))
        return found

    def close(self) -> None:
        """Close the segments that the other end has not opened yet; they are not reused."""
        self._token = self.message_segments = None
        self.can_lend = False
        self._lent.clear()

    def _offer(self) -> None:
        if self._segments is None or not HAS_SEGMENTS:
            return
        token = secrets.token_bytes(16)
        try:
            self._token = MemorySegment(len(token), 0)
            self._token.write(memoryview(token), 0)
        except OSError:  # too many open files
            return
        self.can_lend = None
        self._segments.offer_copies()
        self._send((OFFER, os.getpid(), self._token.descriptor, self._token.inode, token))

    def _can_read(self, process: int, descriptor: int, inode: int, token: bytes) -> bool:
        if self._segments is None or not HAS_SEGMENTS:
            return False
        try:
            with Mapping.open(process, 0, descriptor, inode) as found:
                is_same = found[:] == token
        except (OSError, ValueError):
            return False  # another machine, another container, or another user's process
        self._peer = process
        return is_same
