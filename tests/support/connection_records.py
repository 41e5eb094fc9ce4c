"""Receives data into the record of a connection, as the transports of a replica's process do."""

from __future__ import annotations

from daskserve.loops.connection_table import ConnectionRecord


def receive(record: ConnectionRecord, data: bytes) -> None:
    """Receive data and pass it on, as much as there is room for at a time."""
    while data:
        room = record.room()
        part, data = (data, b"") if room is None else (data[: len(room)], data[len(room) :])
        if room is not None:
            room[: len(part)] = part
        record.note_received(len(part), is_recorded=room is not None)
        record.passed += len(part)
