"""The content of parcels in one process, and their transport to others; see `daskserve.payload.parcels`."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self
from weakref import WeakValueDictionary

from daskserve.cluster.channel.wire.segments import HAS_SEGMENTS, Mapping, MemorySegment
from daskserve.payload.parcels import Parcel

#: Where a process holds shared memory: its process id, and the segment's key, descriptor and inode.
Place = tuple[int, int, int, int]
#: Calls a verb of the supervisor with plain values.
AskSupervisor = Callable[..., Awaitable[Any]]

#: The size of the pieces in which content is sent over a connection or stored.
PIECE_BYTES = 8 * 1024 * 1024


class ParcelMemory:
    """Memory for a parcel's content: shared where the system allows it."""

    def __init__(self, size_bytes: int) -> None:
        self._plain = bytearray()
        self._segment: MemorySegment | None = None
        self._mapping: Mapping | None = None
        if HAS_SEGMENTS:
            self._segment = MemorySegment(size_bytes, secrets.randbits(63))
        else:
            self._plain = bytearray(size_bytes)

    @classmethod
    def opened(cls, place: Sequence[int], digest: str) -> Self | None:
        """Return the content that a process holds; None if the process is on another machine."""
        if not HAS_SEGMENTS:
            return None
        try:
            mapping = Mapping.open(*place)
        except (OSError, ValueError):
            return None
        if bytes(mapping[: len(digest) // 2]).hex() != digest:
            return None
        memory = cls.__new__(cls)
        memory._plain, memory._segment, memory._mapping = bytearray(), None, mapping
        return memory

    def write(self, data: Any, at: int) -> None:
        """Write a part of the content."""
        view = memoryview(data).cast("B")
        if self._segment is not None:
            self._segment.write(view, at)
        else:
            self._plain[at : at + len(view)] = view

    def fill(self, parcel: Parcel, parts: Sequence[Any]) -> None:
        """Write the whole content."""
        self.write(parcel.head, 0)
        for start, part in zip(parcel.starts(), parts, strict=True):
            self.write(part, start)

    @property
    def mapping(self) -> Mapping | None:
        """The content in shared memory; None if it is not shared. Nothing may be written afterwards."""
        if self._mapping is None and self._segment is not None:
            segment, self._segment = self._segment, None
            self._mapping = Mapping.open(os.getpid(), segment.key, segment.descriptor, segment.inode)
        return self._mapping

    @property
    def content(self) -> memoryview:
        """The content, read-only."""
        mapping = self.mapping
        return memoryview(self._plain).toreadonly() if mapping is None else memoryview(mapping)

    @property
    def place(self) -> Place | None:
        """The place at which other processes of this machine can map the content."""
        mapping = self.mapping
        if mapping is None:
            return None
        return os.getpid(), mapping.key, mapping.descriptor, mapping.inode


class ParcelCarrier:
    """Carries parcels between a process and the supervisor of an instance."""

    def __init__(self, ask: AskSupervisor) -> None:
        self._ask = ask
        #: The parcels that replicas of this process use, so that the next replica need not fetch them again.
        self._mappings: WeakValueDictionary[str, Mapping] = WeakValueDictionary()
        self._lock = asyncio.Lock()

    async def send(self, parcel: Parcel, parts: Sequence[Any]) -> None:
        """Send a parcel to the supervisor, unless the supervisor already has it."""
        digest, size_bytes = parcel.digest, parcel.size_bytes
        if await self._ask("offer_parcel", digest=digest, place=None):
            return
        memory = ParcelMemory(size_bytes)
        await asyncio.to_thread(memory.fill, parcel, parts)
        if memory.place is not None and await self._ask("offer_parcel", digest=digest, place=memory.place):
            return
        for at in range(0, size_bytes, PIECE_BYTES):
            piece = bytes(memory.content[at : at + PIECE_BYTES])
            await self._ask("add_to_parcel", digest=digest, size_bytes=size_bytes, at=at, piece=piece)

    async def fetch(self, code: str, parcel: Parcel) -> list[memoryview]:
        """Return the parts of the parcel with some code, given the code's name."""
        async with self._lock:
            known = self._mappings.get(parcel.digest)
            if known is not None:
                return parcel.split(memoryview(known))
            place = await self._ask("find_parcel", code=code, digest=parcel.digest)
            memory = None if place is None else ParcelMemory.opened(place, parcel.digest)
            if memory is None:
                memory = ParcelMemory(parcel.size_bytes)
                for at in range(0, parcel.size_bytes, PIECE_BYTES):
                    size_bytes = min(PIECE_BYTES, parcel.size_bytes - at)
                    memory.write(
                        await self._ask(
                            "read_parcel", code=code, digest=parcel.digest, at=at, size_bytes=size_bytes
                        ),
                        at,
                    )
            if memory.mapping is not None:
                self._mappings[parcel.digest] = memory.mapping
            return parcel.split(memory.content)
