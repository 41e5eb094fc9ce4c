"""Records of the connections that one process has given to another, in memory that both share.

The giver accepts connections, keeps a copy of each socket, and sends another copy to the taker. For each
connection, the taker records what it has received and not answered yet. So the giver can continue with a
connection when the taker gives it back, and even when the taker was killed: the kernel keeps the memory and
the connection.

Each connection has a slot of `SLOT_BYTES`: its state, some numbers, and the recorded bytes. The taker
receives data directly into its slot, so none is lost if the taker is killed before it has recorded how much.
The kernel knows how much that was, and whether a response was sent: see `daskserve.loops.tcp_counts`.
"""

from __future__ import annotations

import enum
import mmap
import os
import socket
import struct
import tempfile
from dataclasses import dataclass
from typing import NamedTuple

from daskserve.common.types import WorkerAddress
from daskserve.loops.tcp_counts import Transferred

#: Size of a slot. A request that needs more cannot move, so it is lost with its process.
SLOT_BYTES = 16 * 1024
#: The state; the number of recorded bytes, and of bytes received before them; and for a response, its size,
#: or 0 if that is not known, and the numbers of bytes received up to the end of its request and sent before.
_HEAD = struct.Struct("<B3xIQIQQ")
_RECEIVED, _RECEIVED_AT = struct.Struct("<IQ"), 4
_LENGTH = struct.Struct("<I")
_RESPONSE, _RESPONSE_AT = struct.Struct("<IQQ"), 16
_ROOM_BYTES = SLOT_BYTES - _HEAD.size
_INT = struct.Struct("i")
#: The messages between the two processes: the number of a slot, and the flag that gives its connection back.
SLOT_NUMBER = struct.Struct("<I")
GIVE_BACK = 1 << 31
#: Lets the taker close the connection that has been idle longest.
EVICT = (1 << 32) - 1


class ConnectionState(enum.IntEnum):
    """The states of a connection in a table."""

    #: The taker has not taken it yet.
    GIVEN = 0
    #: It has no request; the recorded bytes begin the next one.
    IDLE = 1
    #: Its request has begun, and its response has not. The recorded bytes begin with this request.
    BEGUN = 2
    #: Its response may have begun. It can move if nothing or all of the response was sent.
    ANSWERED = 3
    #: Not all bytes could be recorded: it cannot move.
    FIXED = 4


class LostAttempt(NamedTuple):
    """The attempt of a request that had begun at a replica that is lost, and the worker of the replica."""

    error: Exception
    worker: WorkerAddress


@dataclass
class MovedConnection:
    """A connection that another process has served.

    Attributes
    ----------
    sock : socket.socket
        The connection.
    received : bytes
        What was received and not answered.
    lost : LostAttempt, optional
        Set if its request had begun at a replica whose process has ended.
    stays : bool
        Whether it must not move again, because its requests belong to several processes.
    """

    sock: socket.socket
    received: bytes = b""
    lost: LostAttempt | None = None
    stays: bool = False


class ConnectionTable:
    """The giver's side of a table.

    Parameters
    ----------
    slots : int
        Maximum number of connections. Memory is used only for slots that were written.
    """

    def __init__(self, slots: int) -> None:
        self._descriptor = _new_file()
        os.ftruncate(self._descriptor, slots * SLOT_BYTES)

    def fileno(self) -> int:
        """Return the descriptor of the memory, for `map_table`."""
        return self._descriptor

    def reset(self, slot: int) -> None:
        """Prepare a slot for a connection."""
        os.pwrite(self._descriptor, bytes(_HEAD.size), slot * SLOT_BYTES)  # `GIVEN`

    def state(self, slot: int) -> ConnectionState:
        """Return the state of a connection."""
        return ConnectionState(os.pread(self._descriptor, 1, slot * SLOT_BYTES)[0])

    def read(self, slot: int, counts: Transferred | None = None) -> tuple[ConnectionState, bytes]:
        """Return the state and the recorded bytes of a connection.

        Parameters
        ----------
        counts : Transferred, optional
            What a lost taker has read and written in all, by which its record is completed. Without it, a
            connection whose response may have begun is `FIXED`.
        """
        data = os.pread(self._descriptor, _HEAD.size, slot * SLOT_BYTES)
        number, length, start, size, end, sent = _HEAD.unpack(data)
        state, first = ConnectionState(number), 0
        if counts is None or counts.read < start + length:
            state = ConnectionState.FIXED if state == ConnectionState.ANSWERED else state
        else:
            length = counts.read - start
            if state == ConnectionState.ANSWERED:
                if counts.written == sent:
                    state = ConnectionState.BEGUN
                elif size and counts.written == sent + size:
                    state, first = ConnectionState.IDLE, end - start
                else:
                    state = ConnectionState.FIXED
        if state == ConnectionState.FIXED or length > _ROOM_BYTES:
            return ConnectionState.FIXED, b""
        return state, os.pread(self._descriptor, length - first, slot * SLOT_BYTES + _HEAD.size + first)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def map_table(descriptor: int) -> mmap.mmap:
    """Return the memory of a table, for the taker."""
    return mmap.mmap(descriptor, 0)


class ConnectionRecord:
    """What the taker has received over one connection and not answered yet.

    Attributes
    ----------
    received : int
        The number of bytes that were received over the connection.
    passed : int
        How many of them the transport has passed on.
    """

    def __init__(self, memory: mmap.mmap, slot: int) -> None:
        self.slot = slot
        self._memory = memory
        self._at = slot * SLOT_BYTES
        self._start = 0  # bytes received before the recorded ones
        self._is_whole = True  # all later bytes are recorded
        self.received = self.passed = 0
        memory[self._at] = ConnectionState.IDLE

    @property
    def state(self) -> ConnectionState:
        """The state."""
        return ConnectionState(self._memory[self._at])

    def room(self) -> memoryview | None:
        """Return the memory into which data is to be received; None if no more can be recorded."""
        used = self.received - self._start
        if not self._is_whole or used >= _ROOM_BYTES:
            return None
        at = self._at + _HEAD.size
        return memoryview(self._memory)[at + used : at + _ROOM_BYTES]

    def note_received(self, size_bytes: int, *, is_recorded: bool) -> None:
        """Record that data was received, into `room` or elsewhere."""
        self.received += size_bytes
        if is_recorded:
            _LENGTH.pack_into(self._memory, self._at + _RECEIVED_AT, self.received - self._start)
        elif size_bytes:
            self._is_whole = False
            self.fix()

    def begin(self) -> None:
        """Record that a request begins."""
        if self._memory[self._at] == ConnectionState.IDLE:
            self._memory[self._at] = ConnectionState.BEGUN

    def answer(self, sent_bytes: int, size_bytes: int, rest_bytes: int) -> None:
        """Record that a response is written next.

        Parameters
        ----------
        sent_bytes : int
            The number of bytes that were sent over the connection before.
        size_bytes : int
            The size of the response; 0 if it has several parts, or the connection ends with it.
        rest_bytes : int
            How many of the `passed` bytes follow the request.
        """
        is_begun = self._memory[self._at] == ConnectionState.BEGUN
        if is_begun:
            end = self.passed - rest_bytes
            _RESPONSE.pack_into(self._memory, self._at + _RESPONSE_AT, size_bytes, end, sent_bytes)
        self._memory[self._at] = ConnectionState.ANSWERED if is_begun else ConnectionState.FIXED

    def fix(self) -> None:
        """Record that the connection cannot move, until the next call of `finish`."""
        self._memory[self._at] = ConnectionState.FIXED

    def finish(self, rest_bytes: int) -> None:
        """Record that the request and its response are complete.

        ``rest_bytes`` of the `passed` bytes follow the request.
        """
        end = self.passed - rest_bytes
        left = self.received - end
        if left:
            if not self._is_whole:
                return
            self.fix()
            first = self._at + _HEAD.size
            self._memory.move(first, first + end - self._start, left)
        self._is_whole = True
        self._start = end
        _RECEIVED.pack_into(self._memory, self._at + _RECEIVED_AT, left, end)
        self._memory[self._at] = ConnectionState.IDLE

    def can_move(self) -> bool:
        """Return whether no request has begun, and all received bytes are recorded."""
        return self._memory[self._at] == ConnectionState.IDLE


def receive_message(pair: socket.socket) -> tuple[int, list[int]] | None:
    """Return the next message that waits at an end of the socket pair, and the descriptors in it.

    Returns None at the end of the data.

    Raises
    ------
    BlockingIOError
        There is none.
    """
    # `socket.recv_fds` of some Python versions ignores the flags.
    flags = socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    data, parts, _, _ = pair.recvmsg(SLOT_NUMBER.size, socket.CMSG_LEN(_INT.size), flags)
    if len(data) < SLOT_NUMBER.size:
        return None
    files = [_INT.unpack(each)[0] for _, _, each in parts if len(each) == _INT.size]
    for each in files:
        os.set_inheritable(each, False)
    (message,) = SLOT_NUMBER.unpack(data)
    return message, files


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("connections", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
