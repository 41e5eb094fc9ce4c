"""A new connection in memory, as the handshake of a channel uses it."""

from __future__ import annotations

import asyncio


class MemoryWire:
    """One end; see `connected`."""

    def __init__(self, peer_address: str) -> None:
        self.peer_address = peer_address
        self.peer = self
        self.sent = b""
        self.is_aborted = False
        self._arrived = bytearray()
        self._changed = asyncio.Event()

    async def send(self, data: bytes) -> None:
        if self.is_aborted:
            raise OSError("aborted")
        self.sent += data
        self.peer._arrived += data
        self.peer._changed.set()

    async def receive(self, size_bytes: int) -> bytes:
        while len(self._arrived) < size_bytes:
            if self.is_aborted or self.peer.is_aborted:
                raise OSError("the connection has ended")
            self._changed.clear()
            await self._changed.wait()
        data = bytes(self._arrived[:size_bytes])
        del self._arrived[:size_bytes]
        return data

    async def receive_message(self) -> bytes:
        """Return what the other end has sent, at least one byte."""
        first = await self.receive(1)
        return first + await self.receive(self.unread_bytes)

    @property
    def unread_bytes(self) -> int:
        return len(self._arrived)

    def abort(self) -> None:
        self.is_aborted = True
        self._changed.set()
        self.peer._changed.set()


def connected() -> tuple[MemoryWire, MemoryWire]:
    """Return the dialler's end and the listener's."""
    near, far = MemoryWire("the worker"), MemoryWire("the program")
    near.peer, far.peer = far, near
    return near, far
