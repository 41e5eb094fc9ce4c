"""The parcels of an instance in the scheduler's process; see `daskserve.payload.parcels.Parcel`.

A client sends a parcel before the change that refers to it. When the controller commits the code, the
content becomes rows of the same transaction, next to the records and invisible to the controller. The rows
are deleted with the code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from daskserve.cluster.parcel_memory import PIECE_BYTES, ParcelMemory, Place
from daskserve.cluster.protocols.base import InstanceStore
from daskserve.common.types import InstanceName
from daskserve.errors import BadRequestError, CodeLoadError, InstanceError

#: How long the content of a parcel is kept without a change that refers to it.
PATIENCE_S = 600.0
_CODE, _ROW = "code/", "parcel/"

AsyncFunction: TypeAlias = Callable[..., Awaitable[Any]]


def is_row(key: str) -> bool:
    """Return whether the record of a key is a part of a parcel's content."""
    return key.startswith(_ROW)


def verbs_for(find: Callable[[InstanceName], Any], **functions: AsyncFunction) -> dict[str, AsyncFunction]:
    """Return verbs whose messages name an instance; each passes the result of ``find`` to its function."""

    def verb(function: AsyncFunction) -> AsyncFunction:
        return lambda instance, **message: function(find(instance), **message)

    return {name: verb(function) for name, function in functions.items()}


def parcel_verbs(find: Callable[[InstanceName], InstanceParcels]) -> dict[str, AsyncFunction]:
    """Return the supervisor's verbs for parcels, given the parcels of each instance."""
    return verbs_for(
        find,
        offer_parcel=InstanceParcels.offer,
        add_to_parcel=InstanceParcels.add,
        find_parcel=InstanceParcels.find,
        read_parcel=InstanceParcels.read,
    )


class InstanceParcels:
    """The parcels of one instance in the scheduler's process; see the module."""

    def __init__(self, store: InstanceStore) -> None:
        self._store = store
        self._memory: dict[str, ParcelMemory] = {}
        #: Parcels that are arriving in pieces.
        self._arriving: dict[str, ParcelMemory] = {}
        #: The digest of the parcel behind each code, and the number of its rows, by the code's name.
        self._digests: dict[str, str] = {}
        self._rows: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._reading = asyncio.Lock()

    # ---- verbs of clients and replicas

    async def offer(self, digest: str, place: Sequence[int] | None) -> bool:
        """Return whether the content is here, or could be read from the place where a client holds it."""
        if digest not in self._memory and place is not None:
            opened = ParcelMemory.opened(place, digest)
            if opened is not None:
                self._memory[digest] = opened
        self._keep_for_a_while(digest)
        return digest in self._memory

    async def add(self, digest: str, size_bytes: int, at: int, piece: bytes) -> None:
        """Take the next piece of a parcel's content."""
        if not at:
            self._arriving[digest] = ParcelMemory(size_bytes)
        memory = self._arriving.get(digest)
        if memory is None:
            raise InstanceError(f"Parcel {digest[:16]} arrived without its beginning; deploy again.")
        memory.write(piece, at)
        if at + len(piece) == size_bytes:
            self._memory[digest] = self._arriving.pop(digest)
        self._keep_for_a_while(digest)

    async def find(self, code: str, digest: str) -> Place | None:
        """Return where processes of this machine find the content."""
        return (await self._read(code, digest)).place

    async def read(self, code: str, digest: str, at: int, size_bytes: int) -> bytes:
        """Return a piece of the content."""
        return bytes((await self._read(code, digest)).content[at : at + size_bytes])

    # ---- with the controller's transactions

    def without_rows(self, records: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the records for a controller, without the rows of parcels, which are only counted."""
        rows = [key for key in records if key.startswith(_ROW)]
        self._rows.clear()
        for key in rows:
            code = key.removeprefix(_ROW).rpartition("/")[0]
            self._rows[code] = self._rows.get(code, 0) + 1
        return {key: value for key, value in records.items() if not key.startswith(_ROW)}

    async def recall(self, parcels: Mapping[str, str]) -> None:
        """Read missing parcels from the store, which may have them under another code's name."""
        for code, digest in parcels.items():
            if digest not in self._memory:
                try:
                    await self._read(code, digest)
                except CodeLoadError:
                    pass  # `rows_of` raises the error

    def rows_of(self, records: Mapping[str, bytes | None], parcels: Mapping[str, str]) -> dict[str, Any]:
        """Return the rows to write and to remove together with some records.

        Parameters
        ----------
        parcels
            The digest of the parcel behind each code that is written, by the code's name.

        Raises
        ------
        BadRequestError
            A parcel is not here.
        """
        rows: dict[str, Any] = {}
        for key, value in records.items():
            code = key.removeprefix(_CODE)
            if key.startswith(_CODE) and (value is None or code in parcels):
                rows |= {f"{_ROW}{code}/{number}": None for number in range(self._rows.get(code, 0))}
        for code, digest in parcels.items():
            if digest not in self._memory:
                raise BadRequestError(
                    f"The scheduler no longer has the constructor arguments of {code}; deploy again."
                )
            rows |= self._pieces(code, digest)
        return rows

    async def all_rows(self, parcels: Mapping[str, str]) -> dict[str, Any]:
        """Return the rows of all codes, given the digests of the parcels behind them."""
        rows: dict[str, Any] = {}
        for code, digest in parcels.items():
            await self._read(code, digest)
            rows |= self._pieces(code, digest)
        return rows

    def _pieces(self, code: str, digest: str) -> dict[str, Any]:
        content = self._memory[digest].content
        pieces = range(0, len(content), PIECE_BYTES)
        return {f"{_ROW}{code}/{number}": content[at : at + PIECE_BYTES] for number, at in enumerate(pieces)}

    def committed(self, records: Mapping[str, bytes | None], parcels: Mapping[str, str]) -> None:
        """Record that a transaction is in the store."""
        for key, value in records.items():
            if key.startswith(_CODE) and value is None:
                self._rows.pop(key.removeprefix(_CODE), None)
                digest = self._digests.pop(key.removeprefix(_CODE), None)
                if digest is not None and digest not in self._digests.values() and digest not in self._timers:
                    self._memory.pop(digest, None)
        for code, digest in parcels.items():
            self._digests[code] = digest
            self._rows[code] = -(-len(self._memory[digest].content) // PIECE_BYTES)
            self._stop_timer(digest)

    def close(self) -> None:
        """Drop everything."""
        for digest in list(self._timers):
            self._stop_timer(digest)
        self._memory.clear()
        self._arriving.clear()

    # ---- private

    async def _read(self, code: str, digest: str) -> ParcelMemory:
        async with self._reading:
            if digest not in self._memory:
                # The scheduler was restarted since then.
                records = await self._store.load()
                # A restart renames a code, and the store may still have the content under the previous name.
                for source in dict.fromkeys([code, *self._rows]):
                    rows = [f"{_ROW}{source}/{number}" for number in range(self._rows.get(source, 0))]
                    is_whole = bool(rows) and all(each in records for each in rows)
                    if is_whole and bytes(records[rows[0]]).startswith(bytes.fromhex(digest)):
                        break
                else:
                    what = "has other" if self._rows.get(code) else "has lost the"
                    raise CodeLoadError(f"The store {what} constructor arguments of {code}. Deploy it again.")
                memory = await asyncio.to_thread(_join, [records[each] for each in rows])
                if source not in self._rows:
                    return memory  # the code was deleted in the meantime, so nothing would drop the content
                self._memory[digest] = memory
                self._digests[source] = digest
            return self._memory[digest]

    def _keep_for_a_while(self, digest: str) -> None:
        self._stop_timer(digest)
        self._timers[digest] = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, digest)

    def _stop_timer(self, digest: str) -> None:
        timer = self._timers.pop(digest, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, digest: str) -> None:
        self._timers.pop(digest, None)
        self._arriving.pop(digest, None)
        if digest not in self._digests.values():
            self._memory.pop(digest, None)


def _join(pieces: Sequence[Any]) -> ParcelMemory:
    memory = ParcelMemory(sum(map(len, pieces)))
    at = 0
    for piece in pieces:
        memory.write(piece, at)
        at += len(piece)
    return memory
