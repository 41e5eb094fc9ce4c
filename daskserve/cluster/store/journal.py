"""Encodes and decodes the journal's objects, and replays them in the right order. Pure: no I/O.

A *change* is one commit; a *snapshot* is all records as of one change. Each is written once, under its
position ``<epoch>-<number>``, and never rewritten. Every change names the position it builds on (``after``):
the last position that its writer knew to be part of the history. So the history is a chain. Later changes
decide which earlier ones belong to it; the arrival time of an object does not matter:

* A change between another change's position and that change's ``after`` is not part of the history. A
  replaced controller wrote it, or its write was reported as failed and landed late.

An object is a magic line, then frames, each with a length and a checksum: a header that every later format
can read, then a key and a value per record. A damaged change is dropped as a whole; from a damaged snapshot,
all readable records are used.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from daskserve.cluster.store.errors import check_format

#: The format that this module writes, and the newest one it reads.
FORMAT = 1
MAGIC = b"daskserve\n"
#: The journal is compacted when its size exceeds the cost of a snapshot by this much.
COMPACT_BYTES = 1 << 20
COMPACT_OBJECTS = 512
#: Bytes of records for each further object that the journal may hold before it is compacted.
BYTES_PER_OBJECT = 4096
_FRAME = struct.Struct(">II")
_NAME = re.compile(r"(\d{1,18})-(\d{1,18})")


class Position(NamedTuple):
    """Position of a change: the controller's epoch, and the change's number in that epoch."""

    epoch: int
    number: int

    @property
    def name(self) -> str:
        """The object's name; names sort in the order of positions."""
        return f"{self.epoch:08d}-{self.number:010d}"

    @classmethod
    def parse(cls, name: str) -> Position | None:
        """Return the position in an object's name, or None for other names."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2]))


START = Position(0, 0)


class DamagedError(Exception):
    """An object is damaged; the message says how."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One commit."""

    position: Position
    after: Position
    records: Mapping[str, bytes | None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All records as of a position.

    Attributes
    ----------
    damaged : tuple of str
        The records that could not be read.
    """

    position: Position
    records: Mapping[str, bytes]
    damaged: tuple[str, ...] = ()


@dataclass(slots=True)
class History:
    """The result of a replay.

    Attributes
    ----------
    last : Position
        The newest change that is part of it.
    builds_on : tuple of Position
        The predecessors that its changes after the snapshot name: each was part of it, too.
    """

    records: dict[str, bytes] = field(default_factory=dict)
    last: Position = START
    builds_on: tuple[Position, ...] = field(default=(), compare=False)


def encode_change(change: JournalEntry, writer: str) -> bytes:
    """Return a change as an object. ``writer`` makes equal changes of two processes differ."""
    header = {"kind": "change", "position": change.position, "after": change.after, "writer": writer}
    return encode_object(header, change.records)


def encode_snapshot(snapshot: Snapshot, writer: str) -> bytes:
    """Return a snapshot as an object."""
    header = {"kind": "snapshot", "position": snapshot.position, "writer": writer}
    return encode_object(header, snapshot.records)


def encode_object(header: Mapping[str, Any], records: Mapping[str, bytes | None]) -> bytes:
    """Return an object with a header, which names its kind, and records."""
    parts = [MAGIC]

    def add(data: bytes) -> None:
        parts.append(_FRAME.pack(len(data), zlib.crc32(data)))
        parts.append(data)

    add(bytes(msgpack.packb({"format": FORMAT, "count": len(records), **header})))
    for key, value in records.items():
        add((b"-" if value is None else b"+") + key.encode())
        if value is not None:
            add(value)
    return b"".join(parts)


def decode_change(url: str, data: bytes) -> JournalEntry:
    """Return the change that an object holds.

    Raises
    ------
    DamagedError
        A part of the object cannot be read.
    StoreFormatError
        A newer version of daskserve wrote the object.
    """
    header, records = decode_object(url, data, "change")
    return JournalEntry(Position(*header["position"]), Position(*header["after"]), records)


def decode_object(url: str, data: bytes, kind: str) -> tuple[dict[str, Any], dict[str, bytes | None]]:
    """Return the header and the records of an object.

    Raises
    ------
    DamagedError, StoreFormatError
        As `decode_change` does.
    """
    header, frames = _header(url, data, kind)
    records: dict[str, bytes | None] = {}
    for _ in range(header["count"]):
        key = _undamaged(next(frames, None))
        records[key[1:].decode()] = None if key[:1] == b"-" else _undamaged(next(frames, None))
    return header, records


def decode_snapshot(url: str, data: bytes) -> Snapshot:
    """Return the readable records of the snapshot that an object holds.

    Raises
    ------
    DamagedError
        The header cannot be read.
    StoreFormatError
        A newer version of daskserve wrote the object.
    """
    header, frames = _header(url, data, "snapshot")
    records: dict[str, bytes] = {}
    damaged: list[str] = []
    for index in range(header["count"]):
        key, value = next(frames, None), next(frames, None)
        name = f"record number {index + 1}" if key is None else repr(key[1:].decode(errors="replace"))
        if key is None or value is None:
            damaged.append(name)
        else:
            records[key[1:].decode()] = value
    return Snapshot(Position(*header["position"]), records, tuple(damaged))


def _header(url: str, data: bytes, kind: str) -> tuple[dict[str, Any], Iterator[bytes | None]]:
    if not data.startswith(MAGIC):
        raise DamagedError("it is empty" if not data else "it does not start with daskserve's magic line")
    frames = _frames(data)
    header: dict[str, Any] = msgpack.unpackb(_undamaged(next(frames, None)))
    check_format(url, header["format"], FORMAT)
    if header["kind"] != kind:
        raise DamagedError(f"it holds a {header['kind']}, not a {kind}")
    return header, frames


def _frames(data: bytes) -> Iterator[bytes | None]:
    """Yield the frames, and None for each damaged one, until the object ends or a length exceeds it."""
    offset = len(MAGIC)
    while offset + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, offset)
        offset += _FRAME.size
        if offset + length > len(data):
            return
        frame = data[offset : offset + length]
        yield frame if zlib.crc32(frame) == crc else None
        offset += length


def _undamaged(frame: bytes | None) -> bytes:
    if frame is None:
        raise DamagedError("its contents are cut off or altered")
    return frame


def replay(base: Snapshot | None, changes: Iterable[JournalEntry]) -> History:
    """Return the history that a snapshot and the changes after it form."""
    history = History()
    if base is not None:
        history.records = dict(base.records)
        history.last = start = base.position
    else:
        start = START
    chain: list[JournalEntry] = []
    for change in sorted(changes, key=lambda each: each.position, reverse=True):
        if change.position > history.last and (not chain or change.position <= chain[-1].after):
            chain.append(change)
    history.builds_on = tuple(each.after for each in reversed(chain) if each.after > start)
    for change in reversed(chain):
        for key, value in change.records.items():
            if value is None:
                history.records.pop(key, None)
            else:
                history.records[key] = value
    if chain:
        history.last = chain[0].position
    return history


@dataclass(slots=True)
class Journal:
    """One process's view of the journal; dropped when another process may have written there.

    Attributes
    ----------
    numbers : dict
        The highest change number of each epoch, including failed changes.
    sound : Position or None
        Position of the newest undamaged snapshot.
    objects, size : int
        Number of changes since that snapshot, and their bytes.
    state_size : int
        Bytes of all records, which is about the size of the next snapshot.
    """

    records: dict[str, bytes]
    last: Position
    numbers: dict[int, int]
    sound: Position | None
    objects: int
    size: int
    state_size: int

    @property
    def is_long(self) -> bool:
        """Whether the journal is long enough to be worth a snapshot."""
        return (
            self.objects > COMPACT_OBJECTS + self.state_size // BYTES_PER_OBJECT
            or self.size > COMPACT_BYTES + self.state_size
        )

    @classmethod
    def of(cls, position: Position, records: Mapping[str, bytes]) -> Journal:
        """Return the journal that a new snapshot of all records begins."""
        size = sum(len(key) + len(value) for key, value in records.items())
        return cls(dict(records), position, {position.epoch: position.number}, position, 0, 0, size)

    def add(self, change: JournalEntry, size: int) -> None:
        """Apply a change that has been written."""
        self.last = change.position
        self.objects += 1
        self.size += size
        for key, value in change.records.items():
            if key in self.records:
                self.state_size -= len(key) + len(self.records.pop(key))
            if value is not None:
                self.records[key] = value
                self.state_size += len(key) + len(value)
