"""Records of the connections that one process has given to another, in memory that both share.

The giver accepts connections, keeps a copy of each socket, and sends another copy to the taker. For each
connection, the taker records what it has received and not answered yet. So the giver can continue with a
connection when the taker gives it back, and even when the taker was killed: the kernel keeps the memory and
the connection.

Each connection has a slot of `SLOT_BYTES`: its state, the number of recorded bytes, and these bytes. The
taker writes a state after the bytes that belong to it.
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

#: Size of a slot. A request that needs more cannot move, so it is lost with its process.
SLOT_BYTES = 16 * 1024
_HEAD = struct.Struct("<B3xI")
_LENGTH = struct.Struct("<I")
_LENGTH_AT = 4
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
    #: Its response has begun, or not all bytes could be recorded: it cannot move.
    FIXED = 3


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
        os.pwrite(self._descriptor, _HEAD.pack(ConnectionState.GIVEN, 0), slot * SLOT_BYTES)

    def state(self, slot: int) -> ConnectionState:
        """Return the state of a connection."""
        return ConnectionState(os.pread(self._descriptor, 1, slot * SLOT_BYTES)[0])

    def received(self, slot: int) -> bytes:
        """Return the recorded bytes of a connection."""
        _, length = _HEAD.unpack(os.pread(self._descriptor, _HEAD.size, slot * SLOT_BYTES))
        return os.pread(self._descriptor, length, slot * SLOT_BYTES + _HEAD.size)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def map_table(descriptor: int) -> mmap.mmap:
    """Return the memory of a table, for the taker."""
    return mmap.mmap(descriptor, 0)


class ConnectionRecord:
    """What the taker has received over one connection and not answered yet."""

    def __init__(self, memory: mmap.mmap, slot: int) -> None:
        self.slot = slot
        self._memory = memory
        self._at = slot * SLOT_BYTES
        self._end = _HEAD.size
        memory[self._at] = ConnectionState.IDLE

    def add(self, data: bytes) -> None:
        """Record received bytes; if there is no room for them, the connection cannot move."""
        start, end = self._end, self._end + len(data)
        if end > SLOT_BYTES:
            self.fix()
            return
        self._end = end
        self._memory[self._at + start : self._at + end] = data
        _LENGTH.pack_into(self._memory, self._at + _LENGTH_AT, end - _HEAD.size)

    def begin(self) -> None:
        """Record that a request begins."""
        if self._memory[self._at] == ConnectionState.IDLE:
            self._memory[self._at] = ConnectionState.BEGUN

    def fix(self) -> None:
        """Record that the connection cannot move, until the next call of `finish`."""
        self._memory[self._at] = ConnectionState.FIXED

    def finish(self, rest: bytes) -> None:
        """Record that the request and its response are complete; ``rest`` was received after the request."""
        self._end = _HEAD.size
        if len(rest) > SLOT_BYTES - _HEAD.size:
            self.fix()
            return
        self._memory[self._at + _HEAD.size : self._at + _HEAD.size + len(rest)] = rest
        self._end += len(rest)
        _LENGTH.pack_into(self._memory, self._at + _LENGTH_AT, len(rest))
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
