"""A connection that a proxy has given to this process, and of which it keeps a copy."""

from __future__ import annotations

import asyncio
import mmap
import socket
from collections.abc import Callable
from contextlib import suppress

from daskserve.loops.connection_table import GIVE_BACK, ConnectionRecord

#: How much is received at a time when it cannot be recorded.
_UNRECORDED_BYTES = 64 * 1024


class TakenConnection(ConnectionRecord):
    """One connection of the proxy.

    Parameters
    ----------
    notify : callable
        Sends the proxy a message; see `daskserve.loops.connection_table.SLOT_NUMBER`.
    """

    #: Whether the proxy has asked for the connection.
    is_asked_back = False
    #: Whether a part of the last response may still wait for the client.
    is_unsent = False
    #: Whether this process has closed its copy of the connection.
    has_ended = False
    _goes_back = False

    def __init__(
        self, memory: mmap.mmap, slot: int, sock: socket.socket, notify: Callable[[int], object]
    ) -> None:
        super().__init__(memory, slot)
        self._sock, self._notify = sock, notify

    def give_back(self) -> None:
        """Let the proxy continue with the connection once this process has closed its copy."""
        self._goes_back = True

    def shut_down(self) -> None:
        """End the connection, although the proxy has a copy of it, unless it is given back."""
        if not self._goes_back:
            with suppress(OSError):  # it is closed already
                self._sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Tell the proxy that this process has closed its copy of the connection. Idempotent."""
        if not self.has_ended:  # the proxy may have given the slot to another connection
            self.has_ended = True
            self._notify(self.slot | GIVE_BACK if self._goes_back else self.slot)


class RecordingProtocol(asyncio.BufferedProtocol):
    """The protocol of a transport that receives data into the record of a connection."""

    def __init__(self, reader: asyncio.Protocol, taken: TakenConnection) -> None:
        self._reader, self._taken = reader, taken
        self._room: memoryview | None = None
        self._is_recorded = False
        self.eof_received = reader.eof_received  # type: ignore[method-assign]
        self.connection_lost = reader.connection_lost  # type: ignore[method-assign]
        self.pause_writing = reader.pause_writing  # type: ignore[method-assign]
        self.resume_writing = reader.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._taken.room()
        self._is_recorded = room is not None
        self._room = memoryview(bytearray(_UNRECORDED_BYTES)) if room is None else room
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        assert self._room is not None
        data, self._room = bytes(self._room[:nbytes]), None
        self._taken.note_received(nbytes, is_recorded=self._is_recorded)
        self._reader.data_received(data)
