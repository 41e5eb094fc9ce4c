"""What a process records of a connection that another one has given to it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from connection_records import receive
from tables import each_case

from daskserve.loops.connection_table import (
    SLOT_BYTES,
    ConnectionRecord,
    ConnectionState,
    ConnectionTable,
    map_table,
)
from daskserve.loops.tcp_counts import Transferred

HEAD, BODY = b"GET / HTTP/1.1\r\n\r\n", b"x" * 100
LONG = b"y" * SLOT_BYTES
IDLE, BEGUN, FIXED = ConnectionState.IDLE, ConnectionState.BEGUN, ConnectionState.FIXED


def nothing(record: ConnectionRecord) -> None:
    pass


def begins(record: ConnectionRecord) -> None:
    receive(record, HEAD)
    record.begin()


def answers(record: ConnectionRecord) -> None:
    begins(record)
    record.answer(0, 10, 0)


def finishes(record: ConnectionRecord) -> None:
    answers(record)
    record.finish(0)


def has_next(record: ConnectionRecord) -> None:
    answers(record)
    receive(record, BODY)
    record.finish(len(BODY))
    receive(record, HEAD)


def refuses(record: ConnectionRecord) -> None:
    receive(record, HEAD)
    record.answer(0, 10, 0)


def is_too_long(record: ConnectionRecord) -> None:
    receive(record, HEAD)
    receive(record, LONG)
    record.begin()


def is_answered_too_long(record: ConnectionRecord) -> None:
    is_too_long(record)
    record.finish(0)
    receive(record, HEAD)


def has_too_much_next(record: ConnectionRecord) -> None:
    begins(record)
    receive(record, LONG)
    record.finish(len(LONG))


@each_case(
    ("steps", "state", "received"),
    [
        (nothing, IDLE, b""),
        (lambda record: receive(record, HEAD[:5]), IDLE, HEAD[:5]),
        (begins, BEGUN, HEAD),
        (answers, FIXED, b""),
        (refuses, FIXED, b""),
        (finishes, IDLE, b""),
        (has_next, IDLE, BODY + HEAD),
        (is_too_long, FIXED, b""),
        (is_answered_too_long, IDLE, HEAD),
        (has_too_much_next, FIXED, b""),
    ],
)
def test_the_giver_reads_what_the_taker_has_recorded(
    steps: Callable[[ConnectionRecord], object], state: ConnectionState, received: bytes
) -> None:
    table = ConnectionTable(3)
    memory = map_table(table.fileno())
    for slot in range(3):
        table.reset(slot)
    record = ConnectionRecord(memory, 1)
    steps(record)
    assert table.read(1) == (state, received)
    assert record.can_move() is (state == IDLE)
    for untouched in (0, 2):
        assert table.read(untouched) == (ConnectionState.GIVEN, b"")
    table.close()
    memory.close()


def is_read(record: ConnectionRecord) -> None:
    """Receive data, and end before recording that."""
    room = record.room()
    assert room is not None
    room[: len(HEAD)] = HEAD


def is_read_next(record: ConnectionRecord) -> None:
    answers(record)
    is_read(record)


def is_read_elsewhere(record: ConnectionRecord) -> None:
    receive(record, LONG[: -len(HEAD)])
    record.finish(0)
    receive(record, HEAD)


def is_streamed(record: ConnectionRecord) -> None:
    begins(record)
    record.answer(7, 0, 0)


SIZE = len(HEAD)


@each_case(
    ("steps", "read", "written", "state", "received"),
    [
        (is_read, SIZE, 0, IDLE, HEAD),
        (is_read_next, 2 * SIZE, 0, BEGUN, HEAD + HEAD),
        (is_read_next, 2 * SIZE, 10, IDLE, HEAD),
        (is_read_next, 2 * SIZE, 9, FIXED, b""),
        (is_read_next, 2 * SIZE, 11, FIXED, b""),
        (answers, SIZE, 10, IDLE, b""),
        (answers, SLOT_BYTES, 10, FIXED, b""),  # it has read more than its slot holds
        (finishes, SIZE, 10, IDLE, b""),
        (has_next, 2 * SIZE + len(BODY), 10, IDLE, BODY + HEAD),
        (is_read_elsewhere, SLOT_BYTES, 0, IDLE, HEAD),
        (is_streamed, SIZE, 7, BEGUN, HEAD),
        (is_streamed, SIZE, 8, FIXED, b""),
        (answers, 0, 0, FIXED, b""),  # a kernel that does not count
    ],
)
def test_the_counts_of_the_kernel_complete_the_record_of_a_lost_taker(
    steps: Callable[[ConnectionRecord], object],
    read: int,
    written: int,
    state: ConnectionState,
    received: bytes,
) -> None:
    table = ConnectionTable(2)
    memory = map_table(table.fileno())
    steps(ConnectionRecord(memory, 1))
    assert table.read(1, Transferred(read, written)) == (state, received)
    table.close()
    memory.close()


def test_a_slot_can_be_used_again() -> None:
    table = ConnectionTable(1)
    memory = map_table(table.fileno())
    begins(ConnectionRecord(memory, 0))
    table.reset(0)
    assert table.read(0) == (ConnectionState.GIVEN, b"")
    again = ConnectionRecord(memory, 0)
    receive(again, BODY)
    assert table.read(0) == (IDLE, BODY)
    table.close()
    memory.close()


def test_a_table_takes_memory_only_for_slots_that_were_written() -> None:
    table = ConnectionTable(10_000)
    table.reset(9_999)
    assert os.fstat(table.fileno()).st_blocks * 512 <= 2 * SLOT_BYTES
    table.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        table.state(0)
